"""Quality of models sharded by FSDP2 whose gathers and reductions are compressed.

    pip install transformers gguf
    python examples/continue_lm/continue_lm.py --fetch              # into data/
    python benchmarks/sharded_quality.py [STUDY ...] [--processes 1]    # run what is missing, with the folder DATA or data/
    python benchmarks/sharded_quality.py [STUDY ...] --show

sharded-smollm2   SmolLM2-135M continued on German captions, 60 updates of 256 tokens; bits per byte.
sharded-enwik8    A GPT (d 256, 4 layers) from scratch on enwik8, 1,000 updates of 16 × 256 bytes; bits per byte.

Two workers on this machine, parameters gathered in bf16 and gradients reduced in fp32 unless the arm says otherwise. AdamW
without weight decay, linear warm-up over a tenth of the updates and linear decay to 0, gradients clipped at 1. All arms have
one rate. The lossless gather is in every arm that names gradients only, so that its differences are theirs.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import given
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pufferfish as pf
from pufferfish.compression import BFloat16, BlockInt8, Changed, Int4, Method, NoCompression
from pufferfish.lab.data.dataset import read_files
from pufferfish.lab.harness import Job, Row, Study, main
from pufferfish.lab.models import GPT
from pufferfish.lab.network.hosts import Hosts
from pufferfish.lab.tasks.language import ENWIK8

#: Methods of the gradients and of the parameters.
ARMS: dict[str, tuple[Method, Method | Changed]] = {
    "uncompressed": (NoCompression(), NoCompression()),
    "bf16 gradients": (BFloat16(), Changed()),
    "int8 gradients": (BlockInt8(), Changed()),
    "4-bit gradients": (Int4(), Changed()),
    "int8 parameters": (NoCompression(), BlockInt8()),
    "int8 both ways": (BlockInt8(), BlockInt8()),
}
WORKERS = 2


class Enwik8:
    """A GPT on bytes; of the last tenth, the first half is for validation and the second for the test."""

    context, rows = 256, 16

    def __init__(self, settings: dict[str, Any]) -> None:
        data = torch.frombuffer(bytearray(read_files(ENWIK8, given.DATA)["enwik8"].data), dtype=torch.uint8)
        self.train, self.validation, self.test = data.split([90_000_000, 5_000_000, 5_000_000])
        self.updates = settings["updates"]
        self.model: nn.Module = GPT(vocabulary=256, d=256, layers=4, heads=4, context=self.context)

    def batches(self, generator: torch.Generator, update: int, workers: int) -> list[tuple[Tensor]]:
        starts = torch.randint(len(self.train) - self.context, (self.updates, self.rows), generator=generator)
        return [(self._rows(self.train, part),) for part in starts[update].chunk(workers)]

    def loss(self, model: nn.Module) -> Callable[..., Tensor]:
        return lambda x: nn.functional.cross_entropy(
            model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten()
        )

    @torch.no_grad()
    def score(self, model: nn.Module, split: str) -> float:
        text = self.validation if split == "validation" else self.test
        x = self._rows(text, torch.arange(256) * self.context)
        return sum(self.loss(model)(part).item() for part in x.split(16)) / (len(x) // 16) / math.log(2)

    def _rows(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts[:, None] + torch.arange(self.context + 1)].long().to(given.DEVICE)


TASKS: dict[str, Any] = {"smollm2": given.Captions, "enwik8": Enwik8}


def run(job: Job) -> Row:
    """Train one arm with its workers."""
    out = job.folder / "scores.json"
    words = [job.arm, str(job.rate), str(job.seed), json.dumps(dict(job.settings)), str(out)]
    with Hosts(1) as hosts:
        if code := hosts.launch([__file__, "--worker", *words], per_host=WORKERS):
            raise RuntimeError(f"the workers failed with exit code {code}")
    return dict(json.loads(out.read_text()))


def work(arm: str, rate: str, seed: str, text: str, out: str) -> None:
    """One of the workers."""
    dist.init_process_group("gloo")
    settings = json.loads(text)
    torch.manual_seed(int(seed))
    task = TASKS[settings["task"]](settings)
    model: Any = task.model.to(given.DEVICE).train()
    mesh = init_device_mesh(given.DEVICE.type, (WORKERS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*(model.blocks if settings["task"] == "enwik8" else model.model.layers), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(rate), weight_decay=0.0)
    gradients, parameters = ARMS[arm]
    hook = pf.compress(model, gradients, parameters=parameters, optimizer=optimizer)
    updates, warm_up = task.updates, max(task.updates // 10, 1)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = float(rate) * min(
            (update + 1) / warm_up, (updates - update) / (updates - warm_up)
        )
        batch = task.batches(torch.Generator().manual_seed(int(seed)), update, WORKERS)[dist.get_rank()]
        task.loss(model)(*batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = {"wire_bytes": hook.meter.wire_bytes / updates}
    found |= {split: task.score(model, split) for split in ("validation", "test")}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def study(task: str, rate: float, **settings: Any) -> Study:
    return Study(
        name=f"sharded-{task}", run=run, arms=dict.fromkeys(ARMS, (rate,)), seeds=(0, 1), baseline="uncompressed",
        score="bits per byte", higher=False, digits=4, columns={"wire_bytes": ",.0f"},
        settings={"task": task, **settings},
    )  # fmt: skip


STUDIES = [study("smollm2", 2e-4, updates=60, rows=4), study("enwik8", 1e-3, updates=1000)]

if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main(STUDIES, __doc__, processes=1)
