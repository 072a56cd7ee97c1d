"""Seconds a step of fine-tuning over slow links: arms of given.py on emulated hosts.

    python benchmarks/given_steps.py [STUDY ...]             # time what is missing, on a machine that does nothing else
    python benchmarks/given_steps.py [STUDY ...] --show

minilm-steps-LINK     MiniLM on 4 hosts. In given.py, one worker contrasts all 64 sentence pairs of an update. Here each of
                      the hosts has 16, and they send each other the vectors of their sentences, so that the gradient is the
                      same (`shared_contrast`).
smollm2-steps-1gbit   SmolLM2-135M on 2 hosts; also for the memory.

Every host is a network namespace with one single-threaded worker; links are shaped both ways and measured first. A run is
one arm in one round: two updates, then 5 that are timed, then 5 without an exchange of gradients ("alone"). All hosts share
the cores of this machine, so that they take longer alone than on machines of their own. `peak_bytes` is the memory of
worker 0, with Python and all libraries. Needs root, or user namespaces; models and data as given.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import given
import torch
import torch.distributed as dist
from given import bilingual
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf
from pufferfish.lab.harness import Job, Row, Study, main
from pufferfish.lab.network import Network
from pufferfish.lab.train.record import peak_memory

STEPS = 5
ARMS = [
    "full training, bf16",
    "block int8",
    "PowerSGD(16)",
    "PowerSGD(4)",
    "PowerSGD(1)",
    "LoRA 64",
    "LoRA 16",
    "LoRA 4",
]


def run(job: Job) -> Row:
    """Time one arm once."""
    out = job.folder / "times.json"
    with Network(job.settings["hosts"], job.settings["link"]) as network:
        link = network.measure()
        command = [__file__, "--worker", job.arm, job.settings["task"], str(out)]
        if code := network.launch(command, env={"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}):
            raise RuntimeError(f"the workers failed with exit code {code}")
    times = json.loads(out.read_text())
    return {"validation": times["step"], "test": times["step"], "mbit": round(link.got_mbit, 1)} | times


def work(arm_name: str, task_name: str, out: str) -> None:
    """One of the workers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    (settings, *_) = (s.settings for s in given.STUDIES if s.settings["task"] == task_name)
    arm, _ = given.ARMS[arm_name]
    task = given.TASKS[task_name](dict(settings))
    torch.manual_seed(0)
    model, optimizer = given.prepare(arm, task.model, 1e-5)
    ddp = DistributedDataParallel(model, init_sync=False)  # all have loaded the same weights
    hook = pf.compress(ddp, arm.method, optimizer=optimizer)
    loss = shared_contrast(ddp) if task_name == "minilm" else task.loss(ddp)

    def update(number: int, loss: Callable[..., Tensor]) -> None:
        batch = task.batches(torch.Generator().manual_seed(0), number, size)[rank]
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(*batch)
        value.backward()
        if settings["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
        optimizer.zero_grad()

    def seconds(loss: Callable[..., Tensor]) -> float:
        dist.barrier()
        began = time.perf_counter()
        for number in range(2, 2 + STEPS):
            update(number, loss)
        dist.barrier()
        return (time.perf_counter() - began) / STEPS

    for number in range(2):  # DDP arranges its buckets
        update(number, loss)
    hook.meter.reset()
    found = {"step": seconds(loss), "wire_bytes": hook.meter.wire_bytes / STEPS}
    with ddp.no_sync():
        found["alone"] = seconds(task.loss(ddp))
    if rank == 0:
        with open(out, "w") as file:
            json.dump(found | {"peak_bytes": peak_memory(torch.device("cpu"))}, file)
    dist.barrier()
    dist.destroy_process_group()


def shared_contrast(encoder: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss whose gradients have the mean, over the workers, of `bilingual.contrast` for all their pairs.

    Every worker computes the loss of all pairs, of which only its own vectors have a gradient.
    """

    def loss(ids: Tensor, mask: Tensor) -> Tensor:
        own = encoder(ids.flatten(0, 1), mask.flatten(0, 1)).unflatten(0, (2, -1))
        vectors = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(vectors, own.detach().contiguous())
        vectors[dist.get_rank()] = own
        return len(vectors) * bilingual.info_nce(*torch.cat(vectors, dim=1))

    return loss


def study(task: str, link: str, hosts: int, arms: list[str]) -> Study:
    return Study(
        name=f"{task}-steps-{link}", run=run, arms=dict.fromkeys(arms, (0.0,)), baseline=arms[0], score="s a step",
        higher=False, digits=3, columns={"alone": ".3f", "wire_bytes": ",.0f", "peak_bytes": ",.0f"},
        settings={"task": task, "link": link, "hosts": hosts, "steps": STEPS},
    )  # fmt: skip


STUDIES = [
    study("minilm", "100mbit", 4, ARMS), study("minilm", "1gbit", 4, ARMS),
    study("smollm2", "1gbit", 2, ["full training, bf16", "PowerSGD(16)", "PowerSGD(4)", "LoRA 64", "LoRA 16"]),
]  # fmt: skip

if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main(STUDIES, __doc__, processes=1)
