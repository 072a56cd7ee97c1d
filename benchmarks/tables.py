"""The tables of the results, a command each: what is missing is run, in pieces of some minutes, and kept in one small file.

    python benchmarks/tables.py enwik8 --data FOLDER --minutes 27 --beside 3    # again until nothing is missing
    python benchmarks/tables.py all --cost                                      # what is missing, and GPU minutes
    python benchmarks/tables.py enwik8 --show                                   # the table, from the file alone
    python benchmarks/tables.py enwik8 --commands                               # the same as `pufferfish bench` commands

A table has one or several parts, and a part is a bench: every method is tuned on the same grid of learning rates, with a seed of
its own, and is judged by validation data; then all seeds are trained with the best rate, and test data is looked at once. Each
run is a process. `--beside` of them share the GPU; widths and step times are measured while nothing else runs. A run that would
end later than `--minutes` is not started, and a finished run is appended to RESULTS/NAME.jsonl at once, with its settings,
versions, device, validation curve, results and times. What does not fit the declaration below (other epochs, another rate
after the tuning) is ignored, and stays in the file.

Unfinished runs stay in `--work` with their checkpoints, and are continued if that folder is still there. Run it in the root of
the checkout. README.md says which tables to run in which order.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pufferfish.lab.bench.bench_pieces import Piece, missing_pieces
from pufferfish.lab.bench.bench_tables import bench_tables
from pufferfish.lab.bench.piece_times import PieceTimes

from pufferfish.lab.bench import BenchLines, BenchSettings, run_bench
from pufferfish.lab.report.export import as_markdown
from pufferfish.lab.report.tables import Cell, Table
from pufferfish.planning.table import format_table

RESULTS = Path(__file__).parent / "results"
GPU = {"device": "cuda", "precision": "bf16", "mode": "graph"}
COMPILED = GPU | {"mode": "compile+graph"}


@dataclass(frozen=True)
class Part:
    """A bench, and how its table is shown.

    Args:
        seconds: of a run that has the GPU for itself, roughly, as long as none is finished.
        against: methods that all others are compared with, beside dense.
        published: figures of the papers, by method.
    """

    settings: BenchSettings
    seconds: float = 0.0
    against: tuple[str, ...] = ()
    published: dict[str, str] = dataclasses.field(default_factory=dict)


Parts = dict[tuple[str, str], Part]  # by table and name


def part(
    task: str,
    *methods: str,
    seconds: float = 0.0,
    against: tuple[str, ...] = (),
    published: dict[str, str] | None = None,
    **settings: Any,
) -> Part:
    """A part with the settings of `BenchSettings`."""
    made = BenchSettings(task=task, methods=methods, **settings)
    return Part(made, seconds, against, published or {})


#: Dense, low-rank with half of the blocks' parameters after a third of the run, and narrower models; Muon, and AdamW for comparison.
LANGUAGE = ("pufferfish", "narrow", "narrow@time", "auto", "dense@adamw")
LANGUAGE_RECIPE = "short,optimizer=muon,rank=0.3125"
#: What language models exchange: every gradient, compressed, also without error feedback; the result of 30 steps.
INTERPLAY = ("powersgd-4", "benchmarks/no_feedback.py:PowerSGD(4)", "topk-0.01", "int8", "diloco-30")
LOCAL = ("diloco-30", "streaming-30x4", "sparseloco-30")
NARROW = ("narrow", "narrow@time")

#: The paper's ablation, the automatic ranks, narrow models as large as the low-rank ones, and pruned channels.
IMAGES = (
    "pufferfish", "auto(frobenius=5e-4)", "narrow", "narrow@time", "narrow-1.6M", "pufferfish(at=0)",
    "pufferfish(frobenius=5e-4)", "auto(frobenius=5e-4,back=0.9)", "early-bird-0.5",
)  # fmt: skip
#: Cutout of 12 pixels; a third of a run is full-rank.
CIFAR: dict[str, Any] = {"epochs": 100, "seeds": 3, "tune": 5, "tune_epochs": 15, "validate_every": 5}

SPARSE = (
    "TopK(0.01)", "RandomK(0.01,'own')", "RandomK(0.01,'shared')", "BlockRandomK(0.01,'own')",
    "BlockRandomK(0.01,'shared')",
)  # fmt: skip
#: Signs have no size, so Signum has learning rates of its own.
OTHERS = ("powersgd-4", "Signum()@sgd=1e-3", "OneBitSGD()", "QSGD()", "DGC(0.99)", "int8")
SPARSE_PUBLISHED = {
    "dense": "94.30", "TopK(0.01)": "93.41", "RandomK(0.01,'own')": "92.54", "RandomK(0.01,'shared')": "92.43",
    "BlockRandomK(0.01,'own')": "93.10", "BlockRandomK(0.01,'shared')": "90.63",
    "global-BlockRandomK(0.01,'shared')": "78.11",
}  # fmt: skip


def sparse(workers: int, *methods: str, **more: Any) -> Part:
    """Compression with simulated workers; the batch is that of all workers together."""
    return part(
        "cifar10", *methods, per_host=workers, simulate=True, network="1gbit", epochs=60, seeds=2, tune=5,
        tune_epochs=9, validate_every=5, **GPU, **more,
    )  # fmt: skip


def exchange(workers: int, *methods: str) -> Part:
    """A small language model with simulated workers; the batch is that of all workers together."""
    return part(
        "enwik8:d=256,layers=6,heads=4,context=256,epoch_tokens=15000000", "pufferfish", *methods,
        recipe=f"{LANGUAGE_RECIPE},lr=4e-3,batch=256", per_host=workers, simulate=True, network="100mbit", epochs=9,
        seeds=3, tune=5, tune_epochs=3, validate_every=3, seconds=70, **GPU,
    )  # fmt: skip


#: In the order in which they should be run.
TABLES: dict[str, dict[str, Part]] = {
    "smoke": {
        "digits": part(
            "digits:mlp,width=16", "pufferfish", recipe="short,rank=0.5", epochs=2, seeds=2, tune=2,
            tune_epochs=1, mode="eager", against=("pufferfish",), published={"dense": "none"},
        ),
    },
    "enwik8": {
        "d512": part(
            "enwik8:epoch_tokens=20000000", *LANGUAGE, recipe=f"{LANGUAGE_RECIPE},lr=2e-3", epochs=20, seeds=3, tune=5,
            tune_epochs=3, equal="time", validate_every=5, seconds=230, against=NARROW, **COMPILED,
        ),
    },
    "cifar10": {
        "resnet18": part(
            "cifar10:cutout=12", *IMAGES, "pufferfish(at=0,keep=conv1|fc)", seconds=62,
            against=("narrow", "narrow@time", "narrow-1.6M"), **CIFAR, **COMPILED,
            published={
                "dense": "95.09", "pufferfish(at=0,keep=conv1|fc)": "93.75", "pufferfish(at=0)": "93.92",
                "pufferfish": "94.87",
            },
        ),
    },
    "interplay": {"4 workers": exchange(4, *INTERPLAY, *(f"pufferfish+{method}" for method in INTERPLAY))},
    "local": {"8 replicas": exchange(8, *LOCAL, *(f"pufferfish+{method}" for method in LOCAL), "narrow")},
    "enwik8-768": {
        "d768": part(
            "enwik8:d=768,layers=12,heads=12,epoch_tokens=10000000", "pufferfish", *NARROW,
            recipe=f"{LANGUAGE_RECIPE},lr=2e-3", epochs=30, seeds=1, tune=5, tune_epochs=3, equal="time", validate_every=10,
            seconds=430, against=NARROW, **COMPILED,
        ),
    },
    "cifar10-vgg": {
        "vgg19": part(
            "cifar10:vgg19,cutout=12", *IMAGES, "pufferfish(at=0,keep=features.conv1|classifier.fc3)", seconds=55,
            against=("narrow", "narrow@time", "narrow-1.6M"), **CIFAR, **COMPILED,
            published={"dense": "93.91", "pufferfish": "93.89"},
        ),
    },
    "wikitext2": {
        # Batch 80 in place of the paper's 20, with which a run takes more than ten minutes.
        "lstm": part(
            "wikitext2", "pufferfish", *NARROW, "pufferfish(at=0)", epochs=40, seeds=3, tune=5, tune_epochs=6,
            validate_every=1, seconds=330, against=NARROW, **GPU,
            published={"dense": "88.16", "pufferfish(at=0)": "92.04", "pufferfish": "88.72"},
        ),
    },
    "multi30k": {
        "transformer": part(
            "multi30k:dropout=0.3", "pufferfish", *NARROW, "auto", epochs=40, seeds=3, tune=5, tune_epochs=12,
            validate_every=10, seconds=220, against=NARROW, **GPU | {"mode": "eager"},
        ),
    },
    "cifar10-long": {
        "resnet18, 300 epochs": part(
            "cifar10", "pufferfish", recipe="paper", seeds=1, validate_every=20, seconds=300, **COMPILED,
            published={"dense": "95.09", "pufferfish": "94.87"},
        ),
        "resnet18, lottery": part(  # six trainings in a run
            "cifar10:cutout=12", "pufferfish", "lottery-ticket-5", epochs=60, seeds=2, validate_every=5, seconds=280, **GPU
        ),
        "vgg19, lottery": part(
            "cifar10:vgg19,cutout=12", "pufferfish", "lottery-ticket-5", epochs=60, seeds=2, validate_every=5, seconds=280,
            **GPU,
        ),
    },
    "seed004": {
        "8 workers": sparse(
            8, *SPARSE, *(f"global-{method}" for method in SPARSE), *OTHERS, seconds=400, published=SPARSE_PUBLISHED
        ),
        "4 workers": sparse(4, SPARSE[0], *SPARSE[3:], seconds=230),
        "2 workers": sparse(2, SPARSE[0], *SPARSE[3:], seconds=140),
    },
}  # fmt: skip
#: Tables that need a GPU and data.
ALL = tuple(name for name in TABLES if name != "smoke")


def main(arguments: list[str] | None = None) -> int:
    """Run a table or show it; 0 if nothing failed."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("table", choices=[*TABLES, "all"])
    ask.add_argument("--part", help="only this part of the table")
    ask.add_argument("--show", action="store_true", help="only print the table, as Markdown")
    ask.add_argument(
        "--cost", action="store_true", help="only print what is missing, and the GPU minutes it needs"
    )
    ask.add_argument("--commands", action="store_true", help="only print the commands of `pufferfish bench`")
    ask.add_argument("--data", type=Path, help="folder with the task's data")
    ask.add_argument("--minutes", type=float, help="start no run that would end later")
    ask.add_argument("--beside", type=int, default=1, help="runs that share the device")
    ask.add_argument("--results", type=Path, default=RESULTS, help="folder of NAME.jsonl")
    ask.add_argument("--work", type=Path, default=Path("runs/tables"), help="folder for unfinished runs")
    given = ask.parse_args(arguments)
    chosen = ALL if given.table == "all" else (given.table,)
    known = {(table, name): each for table in chosen for name, each in TABLES[table].items()}
    parts = {key: each for key, each in known.items() if given.part in (None, key[1])}
    if not parts:
        ask.error(f"--part {given.part}: {given.table} has the parts {', '.join(name for _, name in known)}")
    if given.commands:
        print("\n".join(command(each.settings) for each in parts.values()))
    elif given.cost:
        print(cost(parts, given.results))
    elif given.show:
        files = {key: lines(given.results, *key) for key in parts}
        print("\n".join(shown(key[1], each, files[key]) for key, each in parts.items()))
    else:
        return run(parts, given)
    return 0


def lines(results: Path, table: str, name: str) -> BenchLines:
    """The finished pieces of a part."""
    return BenchLines(results / f"{table}.jsonl", name)


def run(parts: Parts, given: argparse.Namespace) -> int:
    """Run what is missing, part after part, while there is time."""
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    threads = max(1, (os.cpu_count() or 1) // max(1, given.beside))
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):  # processes share the cores
        os.environ.setdefault(variable, str(threads))
    codes = []
    for (table, name), each in parts.items():
        left = None if end is None else (end - time.monotonic()) / 60
        if left is not None and left <= 0:
            break
        digest = hashlib.sha256(repr(each.settings).encode()).hexdigest()[:12]
        # Changed settings make a new folder; the file has what still fits.
        root = given.work / table / digest
        root.parent.mkdir(parents=True, exist_ok=True)
        try:
            code = run_bench(
                each.settings, root, data=given.data, beside=given.beside, minutes=left, expected=each.seconds or None,
                lines=lines(given.results, table, name),
            )  # fmt: skip
        except (ValueError, ImportError, OSError) as error:  # missing data or packages concern one table
            print(f"{table}, {name}: {error}", file=sys.stderr)
            code = 1
        codes.append(code)
        if codes[-1] == 130:
            break
    return max(codes, default=0)


def cost(parts: Parts, results: Path) -> str:
    """What is missing in each part, and its GPU time: as that of finished runs, or else as declared."""
    head = ("table", "part", "tuning", "runs", "equal time", "measurements", "seconds a run", "GPU minutes")
    rows, total = [], 0.0
    for (table, name), each in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            lines(results, table, name).restore(each.settings, Path(folder))
            missing = missing_pieces(each.settings, Path(folder))
            times = PieceTimes.of(each.settings, Path(folder), each.seconds)
        kinds = ("tune", "runs", f"equal-{each.settings.equal}")
        of_kind = [[piece for piece in missing if piece.kind == kind and not piece.alone] for kind in kinds]
        alone = [piece for piece in missing if piece.alone]
        seconds = [times.device_seconds(Piece("runs/", method)) for method in each.settings.methods]
        minutes = sum(map(times.device_seconds, missing)) / 60
        counts = [f"{len(pieces)}" for pieces in (*of_kind, alone)]
        rows.append((table, name, *counts, f"{sum(seconds) / len(seconds):.0f}", f"{minutes:.0f}"))
        total += minutes
    rows.append(("all", *[""] * 6, f"{total:.0f}"))
    return format_table([head, *rows], left=(0, 1))


def shown(name: str, each: Part, lines: BenchLines) -> str:
    """A part's tables as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        lines.restore(each.settings, Path(folder))
        tables = bench_tables(each.settings, Path(folder), each.against)
    if each.published and tables[0].columns[0] == "method" and len(tables) > 1:
        tables[0] = with_published(tables[0], each.published)
    return f"# {name}: {each.settings.task}\n\n{as_markdown(tables)}"


def with_published(table: Table, published: dict[str, str]) -> Table:
    """The table with the papers' figures as a last column."""
    rows = [[*row, Cell(published.get(row[0].text, "–"))] for row in table.rows]
    return dataclasses.replace(table, columns=[*table.columns, "published"], rows=rows)


def command(settings: BenchSettings) -> str:
    """The same bench as a command."""
    methods = [method for method in settings.methods if method not in settings.references]
    words = ["pufferfish", "bench", settings.task, "--methods", ",".join(methods)]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in ("task", "methods") or value == field.default:
            continue
        flag = "--workers" if field.name == "per_host" else f"--{field.name.replace('_', '-')}"
        value = f"lr={value}" if field.name == "tune" else value
        words += [flag] if value is True else [flag, f"{value}"]
    return shlex.join(words)


if __name__ == "__main__":
    sys.exit(main())
