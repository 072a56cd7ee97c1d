"""Fine-tune a pretrained Hugging Face model at low rank: preview some ranks, then switch.

python examples/finetune.py NAME_OR_FOLDER [OUTPUT]        a causal language model for from_pretrained
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM

import pufferfish as pf

STEPS = int(os.environ.get("STEPS", 200))
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = torch.randint(model.config.vocab_size, (8, 32))  # your text here


def loss(m: torch.nn.Module) -> torch.Tensor:
    return m(input_ids=tokens, labels=tokens).loss


# Keep 90 % of the energy of the pretrained weights, and leave the first block dense.
switch = pf.Switch(rank=pf.Energy(0.9), keep=["*.0.*"], when=pf.AtStep(STEPS // 10), evaluate=loss)
print(switch.preview(model, loss, ranks=[pf.Energy(0.8), pf.Energy(0.9), pf.Energy(0.95)]), "\n")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(STEPS):
    if switch.step(model, optimizer, step=step):
        print(switch.report, "\n")
    optimizer.zero_grad()
    value = loss(model)
    value.backward()
    optimizer.step()
print(f"loss {value.item():.3f} after {STEPS} steps")
pf.merge_(model)  # back to a dense model
model.save_pretrained(sys.argv[2] if len(sys.argv) > 2 else "finetuned")
