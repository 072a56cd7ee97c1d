"""A small Llama, trained by the Trainer: low-rank, saved, loaded and merged, with the same text at each stage."""

from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig, Trainer, TrainingArguments

import pufferfish as pf
from pufferfish.integrations.transformers import from_pretrained, train

tokenizer = ByT5Tokenizer(extra_ids=0)  # a token is a byte
text = tokenizer("The quick brown fox jumps over the lazy dog.")  # your text here
data = [{**text, "labels": text["input_ids"]}] * 200
size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **size)
args = TrainingArguments("run", max_steps=40, learning_rate=3e-3, use_cpu=True, report_to=[])
model = AutoModelForCausalLM.from_config(config)
trainer = Trainer(model, args, train_dataset=data, processing_class=tokenizer)
train(trainer, pf.Switch(rank=0.25, when=pf.AtFraction(0.5)))


def story(model: AutoModelForCausalLM) -> str:
    prompt = tokenizer("The quick", return_tensors="pt", add_special_tokens=False)
    return tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0], skip_special_tokens=True)


print("trained:", story(model))
trainer.save_model("low-rank")  # weights, plan, configuration, tokenizer; its README says how to load it
loaded = from_pretrained("low-rank")
print("loaded:", story(loaded))
pf.merge_(loaded)
loaded.save_pretrained("dense")
print("merged:", story(AutoModelForCausalLM.from_pretrained("dense")))
