"""The advisor against the clock: is the way to train that it advises the fastest one?

    python benchmarks/advisor.py [--cases 1 2 …] [--rounds 5] [--keep FOLDER]

Ten cases of a model, an emulated network and a number of hosts. In each a job probes its link, measures what steps compute
and advises, as `pufferfish advise --network real` does; it then runs the best three, and what they begin as, and advises
again, as `--check` does. At last every way that it had to choose from is run, all taking turns in every round. What counts is
the time of a run, warm-up included: the advised way's over that of the fastest, by the medians of these steps. A case that is in
`--keep` is not run again. Needs root, or user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from predictions import ENV, Made, classes, gpt, made_workload, resnet18  # noqa: F401  # models of cases, found here by name
from predictions import KEEP as SHARED

import pufferfish as pf
from pufferfish.lab.advise import advise, check, load_workload
from pufferfish.lab.models import LSTMLanguageModel
from pufferfish.lab.network import Network
from pufferfish.planning.table import format_table

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


def lstm() -> Made:
    """3.2 million parameters, 20 × 8 words a worker."""
    words = torch.randint(2000, (21, 8))
    model = LSTMLanguageModel(vocabulary=2000, d=384, layers=2, dropout=0.2)
    return model, (words[:-1], words[1:]), lambda model, batch: classes(lambda x: model(x)[0], batch)


KEEP = {**SHARED, "lstm": ("decoder",)}


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
        worst = max((c["step"] / c["measured"] - 1 for c in found["choices"]), key=abs)
        rows.append([*row, f"{worst:+.0%}"])
        print(format_table(rows[-1:], left=range(10)), flush=True)
    print(f"\n{format_table(rows, left=(0, 1, 2, 4, 5, 7))}\n")
    for when, ratios in lost.items():
        print(f"within 10 % of the fastest run, {when}: {sum(x <= 1.1 for x in ratios)} of {len(ratios)}")


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
    if name in KEEP:
        workload = made_workload(name, globals()[name], KEEP[name])
    else:
        workload = load_workload(name, rank=dist.get_rank(), size=hosts)
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
