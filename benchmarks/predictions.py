"""The cost model against the clock: steps over emulated links, predicted without having seen one, and then measured.

    python benchmarks/predictions.py [--models resnet18 gpt digits:cnn …] [--hosts 4] [--per-host 1] [--links 100mbit …]
        [--methods dense powersgd-4 powersgd-4@node …] [--rounds 5] [--keep FOLDER]

A job on every link. It measures computing without any exchange and runs the methods dry, which knows nothing of the link,
and probes the link for a few seconds: nothing is fitted to steps, on this link or another. Then each method's step is
predicted and measured, all taking turns in every round, and the medians are compared. `@node` is `hierarchy="node"`: with
several workers a host. A link whose times are in `--keep` is not measured again. Needs root, or user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.advise.build_timed_model import build_timed_model
from pufferfish.lab.advise.measured_work import measured_work, with_messages
from pufferfish.lab.advise.timing_rounds import step_times
from pufferfish.lab.advise.workload import Workload, load_workload
from pufferfish.lab.models import GPT, REFERENCES
from pufferfish.lab.network import Network
from pufferfish.lab.train.training_method import training_method
from pufferfish.measure import AlphaBeta, CostModel, Link, Work, probe
from pufferfish.measure.step_messages import probe_bytes
from pufferfish.planning.table import format_table

METHODS = ["dense", "bf16", "powersgd-4", "int8", "topk-0.01", "pufferfish", "pufferfish+powersgd-4"]
LINKS = ["100mbit", "500mbit", "1gbit", "50mbit,delay=2ms"]
#: Of the workers; DDP warns of strides that differ by nothing.
ENV = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
Made = tuple[nn.Module, tuple[Tensor, Tensor], Callable[[nn.Module, Any], Tensor]]


def resnet18() -> Made:
    """CIFAR shapes, batch 8 a worker."""
    return REFERENCES["resnet18"].build(), (torch.randn(8, 3, 32, 32), torch.randint(10, (8,))), classes


def gpt() -> Made:
    """3.3 million parameters, 4 × 128 bytes a worker."""
    tokens = torch.randint(256, (4, 129))
    return GPT(d=256, layers=4, heads=4, context=128), (tokens[:, :-1], tokens[:, 1:]), classes


def made_workload(name: str, make: Callable[[], Made], keep: Sequence[str]) -> Workload:
    """The workload of one of the models above."""
    _, batch, loss = make()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return make()[0]

    return Workload(
        name=name, build=build, batch=lambda: batch, loss=loss, keep=keep,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    )  # fmt: skip


KEEP = {"resnet18": REFERENCES["resnet18"].keep, "gpt": REFERENCES["gpt"].keep}


def classes(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--models", nargs="+", default=list(KEEP), help="of this file, or tasks")
    ask.add_argument("--hosts", type=int, default=4)
    ask.add_argument("--per-host", type=int, default=1, help="workers")
    ask.add_argument("--links", nargs="+", default=LINKS)
    ask.add_argument("--methods", nargs="+", default=METHODS)
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--keep", type=Path, help="a folder; default: nothing is kept")
    ask.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = ask.parse_args()
    if given.worker:
        work(given)
        return
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, pufferfish "
          f"{pf.__version__}, {given.hosts} hosts of {given.per_host}, {given.rounds} rounds\n")  # fmt: skip
    errors: list[float] = []
    for model in given.models:
        for link in given.links:
            found = measured(given, model, link)
            works = {name: _work(x) for name, x in found["works"].items()}
            steps = {name: statistics.median(x) for name, x in found["times"].items()}
            costs = CostModel(link=_link(found["link"]))
            lost = f"{1e9 * costs.link.contention:.2g} ns of computation lost per byte"
            print(f"{model}, {given.hosts} hosts, {link}: probed {costs.link}, {lost}")
            print(table(costs, works, steps, found["times"]), "\n", flush=True)
            errors += [costs.predict(work).step / steps[name] - 1 for name, work in works.items()]
    within, mean = sum(abs(e) <= 0.2 for e in errors), statistics.mean(map(abs, errors))
    print(f"{within} of {len(errors)} steps within 20 %; mean deviation {mean:.1%}, largest "
          f"{max(errors, key=abs):+.1%}")  # fmt: skip


def measured(given: argparse.Namespace, model: str, link: str) -> dict[str, Any]:
    """What a job on such a link finds."""
    with tempfile.TemporaryDirectory() as folder:
        out = (given.keep or Path(folder)) / f"{model}-{given.hosts}x{given.per_host}-{link}.json"
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            words = ["--models", model, "--rounds", str(given.rounds), "--methods", *given.methods]
            with Network(given.hosts, link) as network:
                code = network.launch(
                    [__file__, "--worker", str(out), *words], per_host=given.per_host, env=ENV
                )
            if code:
                raise SystemExit(f"{model}, {link}: the workers failed with exit code {code}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def work(given: argparse.Namespace) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (model,) = given.models
    if model in KEEP:
        workload = made_workload(model, globals()[model], KEEP[model])
    else:
        workload = load_workload(model, rank=dist.get_rank(), size=dist.get_world_size())
    found = job(workload, given.methods, given.rounds)
    if dist.get_rank() == 0:
        aside = given.worker.with_suffix(".new")
        aside.write_text(json.dumps(found))
        aside.replace(given.worker)
    dist.barrier()
    dist.destroy_process_group()


def job(workload: Workload, methods: list[str], rounds: int) -> dict[str, Any]:
    plan = pf.plan(workload.build(), workload.rank, keep=workload.keep, multiple=1)
    size, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    parts = {name: name.partition("@") for name in methods}
    ways = {
        name: build_timed_model(workload, training_method(word), plan, hierarchy="node" if node else "flat")
        for name, (word, _, node) in parts.items()
    }
    bare: dict[str, Work] = {}
    works: dict[str, Work] = {}
    for name, one in ways.items():
        word, _, node = parts[name]
        chosen = training_method(word)
        if chosen.model not in bare:
            bare[chosen.model] = measured_work(one)
        works[name] = with_messages(
            bare[chosen.model], one.inner, chosen.compress, size, per_node if node else 1
        )
    link = probe(largest=probe_bytes(ways[methods[0]].inner))
    times = step_times(ways, rounds)
    return {
        "link": link.as_dict(),
        "works": {name: asdict(work) for name, work in works.items()},
        "times": times,
    }


def _work(data: dict[str, Any]) -> Work:
    for key in ("messages", "gradient_curve"):
        data[key] = tuple(map(tuple, data[key]))
    return Work(**{**data, "bucket_bytes": tuple(data["bucket_bytes"])})


def _link(data: dict[str, Any]) -> Link:
    def costs(some: dict[str, Any]) -> dict[str, AlphaBeta]:
        return {
            kind: AlphaBeta(**{**cost, "points": tuple(map(tuple, cost["points"]))})
            for kind, cost in some.items()
        }

    scopes = {key: data[key] and costs(data[key]) for key in ("collectives", "intra_node", "inter_node")}
    return Link(**{**data, **scopes})


def table(
    costs: CostModel, works: dict[str, Work], steps: dict[str, float], times: dict[str, list[float]]
) -> str:
    rows = [["s a step", "predicted", "measured", "error", "lowest … highest", "computing", "exchange"]]
    for name, work in works.items():
        said = costs.predict(work)
        low, high = min(times[name]), max(times[name])
        rows.append([
            name, f"{said.step:.3f}", f"{steps[name]:.3f}", f"{said.step / steps[name] - 1:+.0%}",
            f"{low:.3f} … {high:.3f}", f"{said.step - said.exchange:.3f}", f"{said.exchange:.3f}",
        ])  # fmt: skip
    return format_table(rows, left=(0,))


if __name__ == "__main__":
    main()
