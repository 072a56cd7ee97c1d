"""The cost model against the clock: steps over emulated links, predicted without having seen one, and then measured.

    python benchmarks/predictions.py [--models resnet18 gpt digits:cnn …] [--hosts 4] [--per-host 1] [--links 100mbit …]
        [--methods dense powersgd-4 powersgd-4@node …] [--rounds 5] [--keep FOLDER]

A job on every link. It measures computing without any exchange and runs the methods dry, which knows nothing of the link,
and probes the link for a few seconds: nothing is fitted to steps, on this link or another. Then each method's step is
predicted and measured, all taking turns in every round, and the medians are compared. `@node` is `levels="node"`: with
several workers a host. A link whose times are in `--keep` is not measured again. Needs root, or user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.advise.measured_work import computing, sending
from pufferfish.lab.advise.subject import Subject, subject
from pufferfish.lab.advise.timing_rounds import turns
from pufferfish.lab.advise.ways import way
from pufferfish.lab.models import GPT, REFERENCES
from pufferfish.lab.network import Network
from pufferfish.lab.train.choice import choice
from pufferfish.measure import CostModel, Line, Link, Work, probe
from pufferfish.measure.remedies import message_bytes
from pufferfish.planning.table import aligned

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
            toll = f"{1e9 * costs.link.toll:.2g} ns of computing lost a byte"
            print(f"{model}, {given.hosts} hosts, {link}: probed {costs.link}, {toll}")
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
    text = f"{__file__}:{model}" if model in KEEP else model
    about = subject(text, keep=KEEP.get(model), rank=dist.get_rank(), size=dist.get_world_size())
    found = job(about, given.methods, given.rounds)
    if dist.get_rank() == 0:
        aside = given.worker.with_suffix(".new")
        aside.write_text(json.dumps(found))
        aside.replace(given.worker)
    dist.barrier()
    dist.destroy_process_group()


def job(about: Subject, methods: list[str], rounds: int) -> dict[str, Any]:
    plan = pf.plan(about.build(), about.rank, keep=about.keep, multiple=1)
    size, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    parts = {name: name.partition("@") for name in methods}
    ways = {
        name: way(about, choice(word), plan, levels="node" if node else "flat")
        for name, (word, _, node) in parts.items()
    }
    bare: dict[str, Work] = {}
    works: dict[str, Work] = {}
    for name, one in ways.items():
        word, _, node = parts[name]
        chosen = choice(word)
        if chosen.model not in bare:
            bare[chosen.model] = computing(one)
        works[name] = sending(bare[chosen.model], one.bare, chosen.compress, size, per_node if node else 1)
    link = probe(largest=message_bytes(ways[methods[0]].bare))
    times = turns(ways, rounds)
    return {
        "link": link.as_dict(),
        "works": {name: asdict(work) for name, work in works.items()},
        "times": times,
    }


def _work(data: dict[str, Any]) -> Work:
    for key in ("messages", "ready", "gathers"):
        data[key] = tuple(map(tuple, data[key]))
    return Work(**{**data, "handed": tuple(data["handed"])})


def _link(data: dict[str, Any]) -> Link:
    def lines(some: dict[str, Any]) -> dict[str, Line]:
        return {
            kind: Line(**{**line, "points": tuple(map(tuple, line["points"]))}) for kind, line in some.items()
        }

    levels = {key: data[key] and lines(data[key]) for key in ("lines", "inside", "between")}
    return Link(**{**data, **levels})


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
    return aligned(rows, left=(0,))


if __name__ == "__main__":
    main()
