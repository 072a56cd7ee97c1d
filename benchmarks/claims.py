"""The tables of docs/results.md, docs/elastic.md and README.md, generated from recorded results.

    python benchmarks/claims.py            # prints what differs or is not generated; exit status 1 if anything is
    python benchmarks/claims.py --write    # writes the tables into the pages

A table stands between `<!-- claims: NAME -->` and `<!-- end -->`, where NAME is a key of `TABLES`. The function of that
name reads files in benchmarks/results (lines of JSON, or the output of a script) or runs a command, and returns
Markdown. A table with digits outside of such markers is an error, unless its head says "0.1.0, raw data not kept" (or
"0.1.0/0.2.0, …").
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import given as minilm
import given_steps
import quality

from pufferfish.cli import main as pufferfish
from pufferfish.compression import BlockInt8, LoCo
from pufferfish.lab.harness import Study, best_rates, jobs, read_rows
from pufferfish.lab.report.comparison import Estimate, estimate, paired_differences
from pufferfish.lab.report.formatting import format_estimate

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/results.md", "docs/elastic.md")
BLOCK = re.compile(r"<!-- claims: (.*?) -->\n(.*?)<!-- end -->", re.S)
NOT_KEPT = re.compile(r"0\.\d\.0(/0\.\d\.0)?, raw data not kept")

Line = dict[str, Any]
Lines = dict[int, Line]  # by seed


def main(arguments: list[str] | None = None) -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--write", action="store_true", help="write the tables into the pages")
    write = ask.parse_args(arguments).write
    made = {name: table() for name, table in TABLES.items()}
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    if write:
        for page, text in texts.items():
            texts[page] = BLOCK.sub(lambda found: block(found[1], made.get(found[1], found[2].strip())), text)
            (ROOT / page).write_text(texts[page])
    found = [problem for page, text in texts.items() for problem in problems(page, text, made)]
    shown = {name for text in texts.values() for name, _ in BLOCK.findall(text)}
    found += [f"{name!r} is on no page" for name in TABLES if name not in shown]
    print("\n".join(found) or f"{len(made)} tables are as their results say")
    return 1 if found else 0


def block(name: str, table: str) -> str:
    return f"<!-- claims: {name} -->\n\n{table}\n\n<!-- end -->"


def problems(page: str, text: str, made: dict[str, str]) -> Iterator[str]:
    """Tables that differ from what is generated, and tables with digits that are not generated."""
    for name, table in BLOCK.findall(text):
        if name not in made:
            yield f"{page}: claims.py has no table {name!r}"
        elif table.strip() != made[name]:
            yield f"{page}: {name!r} differs from its results; run python benchmarks/claims.py --write"
    rest = BLOCK.sub("", text)
    if page == "README.md":  # other sections have no results
        rest = re.split(r"^## ", rest[rest.index("## Results") + 3 :], flags=re.M)[0]
    for table in re.findall(r"(?:^\|.*(?:\n|$))+", rest, re.M):
        head, *rows = table.splitlines()
        if re.search(r"\d", "".join(rows)) and not NOT_KEPT.search(head):
            yield f"{page}: a table with digits is neither generated nor marked as not kept: {head}"


# What the tables share.


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]], source: str = "") -> str:
    lines = [list(head), *map(list, rows)]
    assert len({len(line) for line in lines}) == 1
    lines.insert(1, ["---"] * len(lines[0]))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{source}" if source else table


def arm_table(
    of: dict[str, Lines],
    labels: Mapping[str, str],
    columns: Mapping[str, Callable[[Lines], str]],
    source: str,
) -> str:
    """A row for each arm, in the order of the labels. Every arm of the results must have a label."""
    assert of.keys() == labels.keys(), of.keys() ^ labels.keys()
    rows = [[label, *(column(of[arm]) for column in columns.values())] for arm, label in labels.items()]
    return markdown(["", *columns], rows, source)


def read(*files: str) -> list[Line]:
    return [json.loads(text) for file in files for text in (RESULTS / file).read_text().splitlines()]


def by_arm(lines: Iterable[Line]) -> dict[str, Lines]:
    found: dict[str, Lines] = {}
    for line in lines:
        own = found.setdefault(line["arm"], {})
        assert line["seed"] not in own, f"more than one result: {line}"
        own[line["seed"]] = line
    return found


def mean(lines: Lines, key: str = "score") -> float:
    return fmean(line[key] for line in lines.values())


def gain(ours: Lines, theirs: Lines, key: str = "score") -> Estimate | None:
    """Mean difference, paired by seed, with its 95 % interval."""
    values = ({seed: line[key] for seed, line in lines.items()} for lines in (ours, theirs))
    return estimate(paired_differences(*values))


def difference(ours: Lines, theirs: Lines, key: str = "score", places: int = 2) -> str:
    found = gain(ours, theirs, key)
    return format_estimate(found, places, sign=True) if found and ours is not theirs else ""


def seeds(lines: Lines) -> str:
    return str(len(lines))


def rate(lines: Lines) -> str:
    (found,) = {line["lr"] for line in lines.values()}
    return f"{found:g}"


def recorded(*files: str) -> str:
    """Names of result files, and the versions and devices in their lines."""
    settings = [line | line["settings"] for line in read(*files)]
    about = {
        (s.get("pufferfish", ""), s["torch"], s.get("device") or s.get("machine") or f"{s['cpus']} CPU cores")
        for s in settings
    }
    words = [
        f"{f'version {ours}, ' * bool(ours)}torch {torch}, {device}" for ours, torch, device in sorted(about)
    ]
    return f"From {', '.join(f'`benchmarks/results/{file}`' for file in files)}: {'; '.join(words)}."


INDEPENDENT = "an independent script, not in this repository; torch 2.11, H200"

# The tables, in the order of the pages.

MODELS = {
    "resnet18": "ResNet-18, CIFAR", "vgg19": "VGG-19-BN, CIFAR", "resnet50": "ResNet-50",
    "wide_resnet50_2": "WideResNet-50-2", "lstm": "LSTM, WikiText-2", "transformer": "Transformer, 6+6 layers",
}  # fmt: skip


@functools.cache
def planned() -> list[list[str]]:
    """As `pufferfish plan` prints it: parameters before and after, factors of bytes and MACs."""
    rows = []
    for name, label in MODELS.items():
        with contextlib.redirect_stdout(io.StringIO()) as output:
            pufferfish(["plan", name])
        parameters, macs, gradient = (
            next(line for line in output.getvalue().splitlines() if line.startswith(start)).split()
            for start in ("parameters", "MACs forward", "gradient bytes")
        )
        rows.append([label, *parameters[1:3], f"{gradient[-2]} fewer", f"{macs[-2]} fewer"])
    return rows


def plans() -> str:
    return markdown(
        ["model", "parameters", "low-rank", "bytes to all-reduce per step", "forward MACs"], planned()
    )


def timed_steps() -> tuple[str, dict[str, Line]]:
    """From the output of `benchmarks/step.py`: its first line; modes, MACs and limit of each model."""
    about, *texts = (RESULTS / "h200_step.log").read_text().strip().split("\n\n")
    mode = re.compile(r"^(eager|graph|compile) +(\S+) +(\S+)  (\S+) as fast$", re.M)
    limit = re.compile(r"ms \((\d+)%\) of .* limit (\S+), reached (\d+)%")
    models = {}
    for text in texts:
        (found,) = limit.findall(text)
        model, macs = text.splitlines()[:2]
        modes = {name: times for name, *times in mode.findall(text)}
        models[model] = {"modes": modes, "macs": macs.split()[0], "limit": found}
    return about, models


def steps() -> str:
    about, models = timed_steps()
    names = {"eager": "eager", "graph": "in a CUDA graph", "compile": "compiled"}
    rows = []
    for model, found in models.items():
        share, limit, reached = found["limit"]
        for mode, (dense, low, speed) in found["modes"].items():
            speed = f"**{speed}: slower**" if float(speed[:-1]) < 1 else f"{speed} as fast"
            last = [found["macs"], f"{share} %", f"{limit}, {reached} %"] if mode == "compile" else [""] * 3
            rows.append([model, names[mode], dense, low, speed, *last])
    head = ["model, batch", "mode", "dense, ms", "low-rank, ms", "speed", "fewer MACs", "share of the step"]
    return markdown([*head, "limit, reached"], rows, f"From `benchmarks/results/h200_step.log`: {about}.")


NARROW = {
    "dense": "dense",
    "lr:0.25": "low rank, ratio 0.25",
    "narrow:0.547": "narrow, 0.547 of the width",
    "lr:0.1": "low rank, ratio 0.1",
    "narrow:0.366": "narrow, 0.366 of the width",
}
SAME_SIZE = {"lr:0.25": "narrow:0.547", "lr:0.1": "narrow:0.366"}


def narrow_cnn() -> dict[str, Lines]:
    return by_arm(read("h200_cifar_narrow.jsonl"))


def narrow() -> str:
    of = narrow_cnn()
    columns = {
        "parameters": lambda own: f"{mean(own, 'params'):,.0f}",
        "seeds 1, 2, 3": lambda own: ", ".join(f"{own[seed]['acc']:.2f}" for seed in (1, 2, 3)),
        "mean": lambda own: f"{mean(own, 'acc'):.2f} %",
        "difference from dense": lambda own: difference(own, of["dense"], "acc"),
        "difference from narrow of the same size": lambda own: difference(
            own, of[SAME_SIZE.get(own[1]["arm"], own[1]["arm"])], "acc"
        ),
    }
    return arm_table(
        of, NARROW, columns, f"From `benchmarks/results/h200_cifar_narrow.jsonl`: {INDEPENDENT}."
    )


RULES = {
    "128 dense 0.008": "dense",
    "128 narrow 0.008": "narrow: dense, with fewer channels",
    "128 narrow 0.004": "the same",
    "128 muon 0.008": "low-rank, the same ratio everywhere",
    "128 muon 0.016": "the same",
    "128 ranks of attention halved 0.008": "attention at half the ratio of the feed-forward layers",
    "128 equal shares 0.008": "the same share of the weights of every matrix (attention at 0.625 of the ratio)",
    "128 ranks of attention quartered 0.008": "attention at a quarter",
    "128 ranks of attention doubled 0.008": "attention at twice the ratio",
    "128 muon, from the start 0.008": "low-rank from the start",
    "128 muon, dense from 80 % 0.008": "low-rank after a third, dense again for the last fifth",
    "128 tangent × 2 0.008": "steps measured in the product of the factors, × 2",
    "128 tangent × 4 0.008": "the same, × 4",
    "128 bounded × 16 0.008": "Muon's steps divided by the norms of the factors (Spectron), × 16",
    "64 narrow 0.008": "hidden size 64: narrow",
    "64 muon 0.008": "hidden size 64: low-rank, the same ratio everywhere",
}


def language_models() -> dict[str, Lines]:
    """By hidden size, rule and rate."""
    lines = read("factor_rules.jsonl")
    return by_arm(line | {"arm": f"{line['settings']['d']} {line['rule']} {line['lr']:g}"} for line in lines)


def above_narrow(own: Lines) -> str:
    """At the better rate of narrow."""
    narrow = language_models()[f"{next(iter(own.values()))['settings']['d']} narrow 0.008"]
    return difference(own, narrow, "bits", 4) if own != narrow else ""


def factor_rules() -> str:
    columns = {
        "weights in blocks": lambda own: f"{mean(own, 'weights'):,.0f}",
        "rate": rate,
        "bits per byte": lambda own: f"{mean(own, 'bits'):.4f}",
        "seeds": seeds,
        "difference from narrow at 0.008": above_narrow,
    }
    return arm_table(language_models(), RULES, columns, recorded("factor_rules.jsonl"))


def finished(studies: Iterable[Study]) -> dict[str, Study]:
    return {study.name: study for study in studies if (RESULTS / f"{study.name}.jsonl").exists()}


#: Studies of benchmarks/given.py and quality.py that have been run.
STUDIES, QUALITY = finished(minilm.STUDIES), finished(quality.STUDIES)


@functools.cache
def given_runs(name: str) -> dict[str, Lines]:
    """The runs of each arm with its chosen rate."""
    study = (STUDIES | QUALITY)[name]
    rows = read_rows(study, RESULTS)
    assert not [*jobs(study, rows, Path())], f"{name} is not finished"
    chosen = best_rates(study, rows)
    return by_arm(row | {"lr": row["rate"]} for row in rows if row["rate"] == chosen[row["arm"]])


def sent(name: str, arm: str) -> float:
    """Mean bytes that each of 4 workers sends in an update, over the whole run."""
    of, settings = given_runs(name), minilm.ARMS[arm][0]
    own, full = of[arm], of[STUDIES[name].baseline]
    updates, end = own_updates(name), mean(own, "wire_bytes")
    if isinstance(settings.method, BlockInt8 | LoCo) and own[0]["commit"].startswith("f9df00b"):
        # That version counted the all-gather of the mean as one worker does it: 3 times the size, where four send 0.75 times.
        end *= (0.75 + 0.75) / (0.75 + 3)
    if start := getattr(settings.method, "start", 0):  # fp32, by a ring all-reduce
        first, begin = start, 1.5 * 4 * mean(own, "trained")
    else:  # as full training, for the tenth before a switch
        first, begin = math.ceil(0.1 * updates) * bool(settings.switch), mean(full, "wire_bytes")
    return (first * begin + (updates - first) * end) / updates


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.3g} GB"


def chosen_rate(name: str, own: Lines) -> str:
    tried = (STUDIES | QUALITY)[name].arms[own[0]["arm"]]
    edge = len(tried) > 1 and own[0]["lr"] in (min(tried), max(tried))
    return f"{rate(own)}{' (edge)' * edge}"


def scored(name: str, arm: str) -> str:
    study = STUDIES[name]
    return f"{mean(given_runs(name)[arm], 'test'):.{study.digits}f}{' %' * ('%' in study.score)}"


def given_difference(name: str, ours: str, theirs: str) -> str:
    return difference(given_runs(name)[ours], given_runs(name)[theirs], "test", STUDIES[name].digits)


def given(name: str) -> str:
    of, study = given_runs(name), STUDIES[name]
    columns = {
        "rate": lambda own: chosen_rate(name, own),
        study.score.split(",")[0]: lambda own: scored(name, own[0]["arm"]),
        f"difference from {study.baseline.split(', bf16')[0]}": lambda own: given_difference(
            name, own[0]["arm"], study.baseline
        ),
        "seeds": seeds,
        "sent an update": lambda own: megabytes(sent(name, own[0]["arm"])),
        "optimizer state": lambda own: megabytes(mean(own, "optimizer_bytes")),
    }
    if "embedding_rows" in study.columns:
        columns["rows of the embedding's gradient"] = lambda own: f"{mean(own, 'embedding_rows'):,.0f}"
    source = f"{own_updates(name)} updates. {recorded(f'{name}.jsonl')}"
    return arm_table(of, {arm: arm for arm in study.arms}, columns, source)


def quality_table(name: str) -> str:
    of, study = given_runs(name), QUALITY[name]
    score, unit, *_ = [*study.score.split(", "), ""]
    columns = {
        "parameters": lambda own: f"{mean(own, 'parameters'):,.0f}",
        "rate": lambda own: chosen_rate(name, own),
        score: lambda own: f"{mean(own, 'test'):.{study.digits}f} {unit}".rstrip(),
        "difference from dense": lambda own: difference(own, of["dense"], "test", study.digits),
        "difference from narrow": lambda own: difference(own, of["narrow"], "test", study.digits),
        "seeds": seeds,
    }
    return arm_table(of, {arm: arm for arm in study.arms}, columns, recorded(f"{name}.jsonl"))


def own_updates(name: str) -> int:
    (updates,) = {line["updates"] for own in given_runs(name).values() for line in own.values()}
    return int(updates)


#: Arms of given.py that send about as many bytes in an update, apart from updates that are not compressed.
PAIRS = [
    ("PowerSGD(16)", "LoRA 64"), ("PowerSGD(16), 5 plain", "LoRA 64"), ("PowerSGD(4)", "LoRA 16"),
    ("PowerSGD(4), 5 plain", "LoRA 16"), ("PowerSGD(1)", "LoRA 4"),
]  # fmt: skip


def lengths(task: str) -> list[str]:
    """The studies of a task that compare PowerSGD and LoRA, the shortest runs first."""
    compared = [name for name, s in STUDIES.items() if s.settings["task"] == task and "LoRA 16" in s.arms]
    names = [name for name in compared if "batch" not in name]
    return sorted(names, key=lambda name: (own_updates(name), STUDIES[name].settings["workers"]))


def given_pairs(task: str) -> str:
    names = lengths(task)
    head = ["", "compared with"]
    for name in names:
        workers = STUDIES[name].settings["workers"]
        head.append(f"{own_updates(name)} updates{f', {workers} workers' * (workers > 1)}")
    rows = []
    for ours, theirs in PAIRS:
        gaps = [given_difference(name, ours, theirs) if ours in STUDIES[name].arms else "" for name in names]
        rows.append([f"full training, {ours}", theirs, *gaps])
    return markdown(head, rows, recorded(*(f"{name}.jsonl" for name in names)))


#: Studies of benchmarks/given_steps.py that have been run.
STEPS = finished(given_steps.STUDIES)


@functools.cache
def step_rounds(name: str) -> dict[str, Lines]:
    """The rounds of each arm."""
    rows = read_rows(STEPS[name], RESULTS)
    assert not [*jobs(STEPS[name], rows, Path())], f"{name} is not finished"
    return by_arm(rows)


def middle(lines: Lines, key: str) -> float:
    return median(line[key] for line in lines.values())


def given_steps_table(name: str) -> str:
    of, full = step_rounds(name), STEPS[name].baseline
    columns = {
        "s a step": lambda own: f"{middle(own, 'step'):.2f}",
        "alone": lambda own: f"{middle(own, 'alone'):.2f}",
        "as fast as full training": lambda own: f"{middle(of[full], 'step') / middle(own, 'step'):.2f}×",
        "sent an update": lambda own: megabytes(middle(own, "wire_bytes")),
        "peak memory": lambda own: f"{middle(own, 'peak_bytes') / 1e9:.2f} GB",
    }
    return arm_table(of, {arm: arm for arm in STEPS[name].arms}, columns, recorded(f"{name}.jsonl"))


def updates_to(target: float, arm: str, names: list[str]) -> int | None:
    """Length of the shortest complete schedule whose mean accuracy is at least the target."""
    there = (name for name in names if arm in STUDIES[name].arms)
    reached = (name for name in there if mean(given_runs(name)[arm], "test") >= target)
    return next(map(own_updates, reached), None)


def given_times() -> str:
    """Time to 1 point less than full training has at the end of the longest schedule."""
    names = [name for name in lengths("minilm") if STUDIES[name].settings["workers"] == 1]
    full = STUDIES[names[-1]].baseline
    target = mean(given_runs(names[-1])[full], "test") - 1
    links = {
        name: study.settings["link"] for name, study in STEPS.items() if study.settings["task"] == "minilm"
    }
    head = ["", f"updates to {target:.2f} %", *(f"minutes, {link}" for link in links.values())]
    head += [f"as fast as full training, {link}" for link in links.values()]

    def seconds(arm: str) -> list[float]:
        updates = updates_to(target, arm, names)
        return [updates * middle(step_rounds(name)[arm], "step") for name in links] if updates else []

    rows = []
    for arm in (arm for arm in given_steps.ARMS if arm in minilm.MIDDLE):
        found = [f"{s / 60:.1f}" for s in seconds(arm)] or ["not reached"] * len(links)
        faster = [f"{t / s:.2f}×" for s, t in zip(seconds(arm), seconds(full), strict=False)]
        rows.append([
            arm, str(updates_to(target, arm, names) or ""), *found, *(faster or [""] * len(links)),
        ])  # fmt: skip
    files = [f"{name}.jsonl" for name in (*names, *links)]
    return markdown(head, rows, recorded(*files))


GIVEN = {
    "full": "full training", "frozenemb": "full training, embeddings frozen",
    "svd0.5@0.1": "low rank 0.5 after a tenth", "svd0.25@0.1": "low rank 0.25 after a tenth",
}  # fmt: skip
#: Methods of the independent script that given.py repeats.
REPEATED = {"psgd16", "psgd4", "psgd1", "lora64", "lora16", "lora4"}


def best_runs(method: str, epochs: float) -> Lines:
    """The runs with the rate that has the best mean validation accuracy."""
    rates: dict[float, Lines] = {}
    for line in read("h200_given_minilm.jsonl"):
        if (line["method"], line["epochs"]) == (method, epochs):
            rates.setdefault(line["lr"], {})[line["seed"]] = line
    return max(rates.values(), key=lambda own: mean(own, "val"))


def given_before() -> str:
    head = ["", "numbers sent an update"]
    rows = [
        [label, f"{best_runs(method, 0.3)[0]['trainable'] / 1e6:.2f} M"] for method, label in GIVEN.items()
    ]
    for epochs in (0.3, 2.0):
        head += ["rate", f"{epochs:g} epochs", "seeds"]
        for row, method in zip(rows, GIVEN, strict=True):
            runs = best_runs(method, epochs)
            row += [rate(runs), f"{mean(runs, 'test'):.1f} %", seeds(runs)]
    assert {line["method"] for line in read("h200_given_minilm.jsonl")} == GIVEN.keys() | REPEATED
    return markdown(head, rows, f"From `benchmarks/results/h200_given_minilm.jsonl`: {INDEPENDENT}.")


TICKETS = {
    "dense": "dense",
    "pufferfish": "Pufferfish, ratio 0.25 after 10 epochs",
    "auto": "`pf.Switch()`, automatic, after 15 epochs: half of the run; the default is a third now",
    "early-bird 30 %": "Early-Bird, 30 %",
    "early-bird 50 %": "Early-Bird, 50 %",
    "early-bird 70 %": "Early-Bird, 70 %",
    "lottery ticket, 3 rounds": "lottery ticket, 3 rounds",
    "lottery ticket, 5 rounds": "lottery ticket, 5 rounds",
}


def tickets() -> str:
    of = by_arm(read("tickets.jsonl"))
    dense = of["dense"]

    def slower(own: Lines) -> str:
        """Of the seeds whose run had the GPU to itself."""
        times = [line["seconds"] / dense[seed]["seconds"] for seed, line in own.items() if line["seconds"]]
        return f"{fmean(times):.2f}×"

    columns = {
        "parameters": lambda own: f"{mean(own, 'parameters'):,.0f}",
        "MACs": lambda own: f"{mean(own, 'macs') / 1e6:.0f} M",
        "accuracy": lambda own: f"{mean(own):.2f} %",
        "difference from dense": lambda own: difference(own, dense),
        "epochs": lambda own: f"{mean(own, 'epochs'):.0f}",
        "training MACs": lambda own: f"{mean(own, 'training_macs'):.2e}".replace("e+", "e"),
        "time relative to dense": slower,
        "seeds": seeds,
    }
    return arm_table(of, TICKETS, columns, recorded("tickets.jsonl"))


def large_batches() -> str:
    files = {"first": "large_batch.jsonl", "second": "large_batch-second.jsonl"}
    rows = []
    for choice, file in files.items():
        for line in sorted(read(file), key=lambda line: (int(line["arm"].split()[1]), line["arm"])):
            optimizer, batch = line["arm"].upper().split()
            rows.append(
                [batch, f"{line['updates']}", optimizer, choice, f"{line['lr']:g}", f"{line['score']:.2f} %"]
            )
    head = ["batch size", "updates", "optimizer", "choice", "rate", "accuracy"]
    return markdown(head, rows, recorded(*files.values()))


COMPRESSED = {
    "plain": "plain averages",
    "int8": "`BlockInt8()`",
    "powersgd 4": "`PowerSGD(4)`",
    "top-k 1 %": "`TopK(0.01)`, layer by layer",
    "top-k 1 %, global": '`TopK(0.01)`, `scope="global"`',
    "dgc 0.1 %": "`DGC(0.999)`, layer by layer",
    "dgc 0.1 %, global": '`DGC(0.999)`, `scope="global"`',
    "dgc 0.1 % at 1.6, earlier": "`DGC(0.999)`, layer by layer, earlier version",
    "dgc 0.1 %, global at 0.8, earlier": '`DGC(0.999)`, `scope="global"`, earlier version',
    "dgc 0.1 %, global at 1.6, earlier": "the same",
    "random-k 1 %, all-reduce": '`RandomK(0.01, "shared")`',
    "random-k 1 %, all-gather": '`RandomK(0.01, "own")`',
    "block-random-k 1 %, all-reduce": '`BlockRandomK(0.01, "shared")`',
    "block-random-k 1 %, all-gather": '`BlockRandomK(0.01, "own")`',
}
COMPRESSED_FILES = (
    "compressed.jsonl",
    "compressed-dgc-following-0.8.jsonl",
    "compressed-dgc-following-1.6.jsonl",
)
CHURN = {
    "streaming": "streaming",
    "plain": "plain",
    "sparseloco": "SparseLoCo",
    "sparseloco+checkpoints": "SparseLoCo, a checkpoint after every round",
}
#: "Sparse Communication for Training Deep Networks", Table 1: accuracy with 8 workers, 300 epochs.
PUBLISHED = {
    "plain": 94.30, "top-k 1 %": 93.41, "block-random-k 1 %, all-gather": 93.10, "random-k 1 %, all-gather": 92.54,
    "random-k 1 %, all-reduce": 92.43, "block-random-k 1 %, all-reduce": 90.63,
}  # fmt: skip


def compressed_runs() -> dict[str, Lines]:
    now, *earlier = COMPRESSED_FILES
    renamed = [line | {"arm": f"{line['arm']} at {line['lr']:g}, earlier"} for line in read(*earlier)]
    return by_arm(read(now) + renamed)


def fewer(own: Lines, key: str) -> str:
    return f"{mean(compressed_runs()['plain'], key) / mean(own, key):.1f}×"


def compressed() -> str:
    of = compressed_runs()
    columns = {
        "rate": rate,
        "fewer bytes on the wire": lambda own: fewer(own, "wire"),
        "at the end": lambda own: fewer(own, "wire_last"),
        "accuracy": lambda own: f"{mean(own):.2f} %",
        "difference from plain": lambda own: difference(own, of["plain"]),
        "seeds": seeds,
    }
    return arm_table(of, COMPRESSED, columns, recorded(*COMPRESSED_FILES))


def orderings() -> str:
    """Every pair of the published table; and global top-k, which it found worse."""
    of = compressed_runs()
    rows = []
    for better, worse in [*itertools.combinations(PUBLISHED, 2), ("top-k 1 %", "top-k 1 %, global")]:
        published = f"{PUBLISHED[better] - PUBLISHED[worse]:+.2f}" if worse in PUBLISHED else "above 0"
        found = gain(of[better], of[worse])
        assert found
        settled = "confirmed" if found.mean > 0 else "the opposite holds"
        verdict = "one seed" if found.half is None else settled if found.significant else "not settled"
        rows.append(
            [COMPRESSED[better], COMPRESSED[worse], published, difference(of[better], of[worse]), verdict]
        )
    head = ["better", "worse", "published difference", "here", "verdict"]
    return markdown(head, rows, recorded("compressed.jsonl"))


def churn() -> str:
    """Every run with accidents, beside the undisturbed ones on the same links."""
    rows = []
    for line in (lines := read("churn.jsonl")):
        if not line["disturbed"]:
            continue
        key = ("network", "method")
        calm = [x for x in lines if not x["disturbed"] and all(x[k] == line[k] for k in key)]
        assert calm[0]["seed"] == line["seed"]
        rows.append([
            f"{line['network'].removesuffix('mbit')} Mbit/s, {CHURN[line['method']]}",
            ", ".join(map(str, line["kills"].values())), f"{line['rounds']}, {line['different']}",
            f"{line['made']:,}, {line['lost']:,}", f"{line['loss']:.3f}",
            ", ".join(f"{x['loss']:.3f}" for x in calm),
        ])  # fmt: skip
    kills = ", ".join(lines[0]["kills"])
    head = [
        "links, method",
        f"kills during: {kills}",
        "rounds, of which with different anchors",
        "updates made, lost",
    ]
    return markdown(
        [*head, "bits per byte", "undisturbed: the same seed, other seeds"], rows, recorded("churn.jsonl")
    )


def span(factors: Iterable[str]) -> str:
    low, *_, high = sorted(factors, key=lambda factor: float(factor[:-1]))
    return f"{low} to {high}"


def whom() -> str:
    """What to use, by what the user has: the first table of the README."""
    cnn = given_runs("cifar-small")
    low, small = cnn["hybrid after a third, Frobenius decay"], mean(cnn["narrow"], "parameters")
    lost = max(
        (line for line in read("churn.jsonl") if line["disturbed"]),
        key=lambda line: sum(line["kills"].values()),
    )
    full, ours, lora = (
        f"{scored('minilm-2', arm)}, {megabytes(sent('minilm-2', arm))} an update"
        for arm in ("full training, bf16", "PowerSGD(16)", "LoRA 64")
    )
    rows = [
        ("**weights that exist**: fine-tuning, continued pre-training",
         "full training, [`pf.compress(ddp, PowerSGD(16), optimizer=opt)`](docs/tutorials/fine_tune.md)",
         f"{ours}; bf16: {full}; LoRA 64: {lora}",
         "LoRA, below a hundred updates or where Adam's state does not fit"),
        ("**a model that must be sharded** over machines",
         "[`pf.compress(fsdp_model)`](docs/how_to/fsdp2.md): gathers what changed, the bits of plain FSDP2",
         "",
         "FSDP2 inside each machine, if it fits there"),
        ("**a CNN**, and the wish for a small one",
         "[`pf.Switch`](docs/tutorials/cnn.md): low rank after a third of the run",
         f"{difference(low, cnn['narrow'], 'test')} points from a narrower model of {small / 1e6:.2g} M parameters, "
         f"{difference(low, cnn['dense'], 'test')} from the dense one of {mean(cnn['dense'], 'parameters') / 1e6:.2g} M",
         "Early-Bird pruning is as good"),
        ("**a language model to pre-train**",
         "`PowerSGD`, or [`pf.LocalSteps`](docs/local_steps.md): the model stays as it is", "",
         "a narrower dense model, if it must be smaller: low rank loses "
         f"{above_narrow(language_models()['128 ranks of attention halved 0.008'])} bits per byte to it"),
        ("**workers that come and go**", "`pf.LocalSteps` [with torchft](docs/elastic.md)",
         f"{sum(lost['kills'].values())} kills: {lost['loss']:.3f} bits per byte; undisturbed: "
         + ", ".join(f"{x['loss']:.3f}" for x in read("churn.jsonl")
                     if not x["disturbed"] and all(x[k] == lost[k] for k in ("network", "method"))),
         "a job that restarts from `pf.Checkpoint`"),
        ("**a fast network**", "plain DDP in bf16; `pf.diagnose` and `pufferfish advise` say so", "", ""),
    ]  # fmt: skip
    return markdown(["you have", "use", "measured", "better without us"], rows)


def readme() -> str:
    """The claims of the README, all from the tables above."""
    models = timed_steps()[1]
    cnn = models["ResNet-18 CIFAR, batch 512"]["modes"]
    language = (found["modes"]["compile"][2] for name, found in models.items() if "ResNet" not in name)
    of, compression = narrow_cnn(), compressed_runs()
    low, rival = of["lr:0.25"], of["narrow:0.547"]
    rows = [
        ("bytes to all-reduce", f"{span(row[3].split()[0] for row in planned())} fewer",
         "the six models of the Pufferfish paper, rank ratio 0.25; counted, not trained"),
        ("step on one GPU, bf16, compiled", f"{span(language)} as fast",
         "two GPTs and a Llama with the shapes of a 1B model, H200"),
        ("the same for a CNN", f"{cnn['compile'][2]} as fast; in eager mode **{cnn['eager'][2]}: slower**",
         "ResNet-18, batch 512, H200"),
        ("accuracy of low rank after a third of the run, with Frobenius decay",
         f"{difference(low, of['dense'], 'acc')} points from dense; {difference(low, rival, 'acc')} from a narrower "
         "dense model of the same size",
         f"CIFAR-10, ResNet-18, 30 epochs, 3 seeds; {INDEPENDENT}"),
        ("accuracy of a dense model with `PowerSGD(4)`",
         f"{difference(compression['powersgd 4'], compression['plain'])} points, with "
         f"{fewer(compression['powersgd 4'], 'wire')} fewer bytes",
         "CIFAR-10, ResNet-18, 30 epochs, 4 simulated workers, 3 seeds, version 0.1.0"),
        ("fine-tuning in few updates",
         f"`PowerSGD(4)` is **worse** than LoRA 16: {given_difference('minilm-0.1', 'PowerSGD(4)', 'LoRA 16')} points",
         f"MiniLM on Multi30k, {own_updates('minilm-0.1')} updates, 3 seeds, H200"),
    ]  # fmt: skip
    return markdown(["", "result", "measured on"], rows)


#: Name between the markers → what stands there.
TABLES: dict[str, Callable[[], str]] = {
    "plans": plans,
    "steps": steps,
    "narrow": narrow,
    "factor_rules": factor_rules,
    **{name: functools.partial(given, name) for name in STUDIES},
    **{f"{task}_pairs": functools.partial(given_pairs, task) for task in minilm.TASKS if lengths(task)},
    **{name: functools.partial(quality_table, name) for name in QUALITY},
    **{name: functools.partial(given_steps_table, name) for name in STEPS},
    **({"minilm_times": given_times} if "minilm-steps-100mbit" in STEPS else {}),
    "given_before": given_before,
    "tickets": tickets,
    "large_batches": large_batches,
    "compressed": compressed,
    "orderings": orderings,
    "churn": churn,
    "whom": whom,
    "readme": readme,
}

if __name__ == "__main__":
    sys.exit(main())
