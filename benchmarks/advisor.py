"""Predictions and advice against the clock: how far off is a predicted step, and is the recommended method the fastest one?

    python benchmarks/advisor.py [--cases 1 2 …] [--rounds 5] [--keep FOLDER]

Ten cases of a model, an emulated network and a number of hosts. In each a job probes its link, measures what steps compute
and advises, as `pufferfish advise --network real` does: no prediction has seen a step with an exchange. It then runs the best
three methods, and what they begin as, and advises again, as `--check` does. Last, all methods are timed in rounds in which they
alternate, and their medians are compared with the predicted steps. The recommended method is compared with the fastest by the
time of a run, warm-up included. A case that is in `--keep` is not run again. Needs root, or user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.advise import advise, check, load_workload
from pufferfish.lab.advise.advisor import Workload
from pufferfish.lab.models import GPT, REFERENCES, LSTMLanguageModel
from pufferfish.lab.network import Network
from pufferfish.planning.text import Table

CASES = [
    ("digits:mlp", "20mbit", 2),
    ("digits:cnn", "100mbit", 4),
    ("digits:cnn", "1gbit", 4),
    ("digits:mlp,width=256", "1gbit", 2),
    ("resnet18", "500mbit", 4),
    ("resnet18", "1gbit", 2),
    ("gpt", "100mbit", 4),
    ("gpt", "1gbit", 2),
    ("lstm", "100mbit", 2),
    ("lstm", "1gbit,delay=2ms", 4),
]


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


def lstm() -> Made:
    """3.2 million parameters, 20 × 8 words a worker."""
    words = torch.randint(2000, (21, 8))
    model = LSTMLanguageModel(vocabulary=2000, d=384, layers=2, dropout=0.2)
    return model, (words[:-1], words[1:]), lambda model, batch: classes(lambda x: model(x)[0], batch)


def classes(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


#: Models of this file, and the layers that stay dense.
OWN: dict[str, tuple[Callable[[], Made], tuple[str, ...]]] = {
    "resnet18": (resnet18, REFERENCES["resnet18"].keep),
    "gpt": (gpt, REFERENCES["gpt"].keep),
    "lstm": (lstm, ("decoder",)),
}


def own_workload(name: str) -> Workload:
    make, keep = OWN[name]
    _, batch, loss = make()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return make()[0]

    return Workload(
        name=name, build=build, batch=lambda: batch, loss=loss, keep=keep,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    )  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--cases", nargs="+", type=int, default=list(range(1, len(CASES) + 1)))
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--keep", type=Path, help="a folder; default: nothing is kept")
    ask.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = ask.parse_args()
    if given.worker:
        work(given)
        return
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, pufferfish "
          f"{pf.__version__}, {given.rounds} rounds\n")  # fmt: skip
    rows = [[
        "", "case", "link", "hosts", "fastest", "advised", "the run", "after --check", "the run", "largest error",
    ]]  # fmt: skip
    lost: dict[str, list[float]] = {"predicted": [], "checked": []}
    errors: list[float] = []
    for number in given.cases:
        name, link, hosts = CASES[number - 1]
        found = measured(given, number)
        runs = {c["name"]: 1 / c["run_speedup"] for c in found["choices"]}
        fastest = min(runs, key=runs.__getitem__)
        row = [str(number), name, link, str(hosts), fastest]
        for when, ratios in lost.items():
            best = found["advised"][when]
            ratios.append(runs[best] / runs[fastest])
            row += [best, f"{ratios[-1] - 1:+.1%}"]
        own = [c["step"] / c["measured"] - 1 for c in found["choices"]]
        errors += own
        rows.append([*row, f"{max(own, key=abs):+.0%}"])
        print(Table(rows[-1:], left=range(10)), flush=True)
    print(f"\n{Table(rows, left=(0, 1, 2, 4, 5, 7))}\n")
    for when, ratios in lost.items():
        print(f"within 10 % of the fastest run, {when}: {sum(x <= 1.1 for x in ratios)} of {len(ratios)}")
    print(f"predicted steps within 20 %: {sum(abs(e) <= 0.2 for e in errors)} of {len(errors)}")


def measured(given: argparse.Namespace, number: int) -> dict[str, Any]:
    """What a job of that case finds."""
    _, link, hosts = CASES[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        out = (given.keep or Path(folder)) / f"{number}.json"
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            words = ["--cases", str(number), "--rounds", str(given.rounds)]
            with Network(hosts, link) as network:
                code = network.launch([__file__, "--worker", str(out), *words], env=ENV)
            if code:
                raise SystemExit(f"case {number}: the workers failed with exit code {code}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def work(given: argparse.Namespace) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name, link, hosts = CASES[given.cases[0] - 1]
    workload = own_workload(name) if name in OWN else load_workload(name, rank=dist.get_rank(), size=hosts)
    predicted = advise(workload, network=link, nodes=hosts)
    best = {"predicted": predicted.best.name, "checked": check(predicted, workload).best.name}
    found = check(predicted, workload, rounds=given.rounds, best=None)
    if dist.get_rank() == 0:
        aside = given.worker.with_suffix(".new")
        aside.write_text(json.dumps(found.as_dict() | {"advised": best}))
        aside.replace(given.worker)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
