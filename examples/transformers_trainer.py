"""transformers Trainer with a switch. Run it again to resume. On two CPU processes:

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import pufferfish as pf
from pufferfish.integrations.transformers import train


def main(folder: str = "run", steps: int = 200) -> None:
    text = torch.arange(10_000) % 97 % 64  # your tokens here
    data = [{"input_ids": t, "labels": t} for t in text.split(50)]
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=128, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    )
    args = TrainingArguments(
        folder, max_steps=steps, save_steps=50, learning_rate=1e-3, use_cpu=True, report_to=[]
    )
    trainer = Trainer(model, args, train_dataset=data)

    switch = pf.Switch(rank=0.25, when=pf.AtFraction(0.25))
    saved = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    train(trainer, switch, resume_from_checkpoint=saved)

    if trainer.is_world_process_zero():
        print(switch.report)
        pf.merge_(trainer.model)  # back to a dense model
        trainer.model.save_pretrained(f"{folder}/dense")


if __name__ == "__main__":
    main()
