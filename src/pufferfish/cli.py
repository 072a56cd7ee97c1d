"""The `pufferfish` command: arguments in, library calls, text out. No logic of its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PLAN_HELP = """\
Show what would be made low-rank, layer by layer, and what it saves. Nothing is trained or changed.

MODEL is a built-in reference model (%s), or a function that builds yours:
file.py:function or package.module:function. It returns

  model                      parameters and bytes
  model, batch               MACs and times too; the batch is a tensor, a tuple of arguments or a
                             dict of keyword arguments
  model, batch, loss_fn      loss_fn(model, batch) is one training step's loss: exact backward MACs

A built-in name alone prints the paper's hybrid plan: ratio 0.25, ranks not rounded, its full-rank layers kept.
"""


TRAIN_HELP = """\
Train a task, alone or under torchrun. Start the same command again and it goes on where it was.

TASK is digits, cifar10, cifar10:vgg19, wikitext2, wikitext2:gpt, multi30k, imagefolder, text, or one of
yours: file.py:task. Data comes from --data or $PUFFERFISH_DATA; a message says what to put where.

  pufferfish train digits --method pufferfish
  torchrun --nproc-per-node 4 -m pufferfish train cifar10 --method auto --compress powersgd-4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for bad input, with one line that says what to do."""
    arguments = _parser().parse_args(argv)
    try:
        run: Callable[[argparse.Namespace], None] = arguments.run
        run(arguments)
    except BrokenPipeError:
        return 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"pufferfish {arguments.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pufferfish", description="Train networks that are already small.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter

    plan = commands.add_parser(
        "plan", help="what would be made low-rank, and what it saves", formatter_class=raw
    )
    from .lab.models import REFERENCES  # names only; building happens when a plan is asked for

    plan.description = PLAN_HELP % ", ".join(REFERENCES)
    plan.add_argument("model", metavar="MODEL")
    plan.add_argument(
        "--rank",
        metavar="R",
        help="0.25 (share of the full rank), 8 (fixed), energy:0.9, stable, budget:params=3e6 (or macs=, bytes=)",
    )
    plan.add_argument("--keep", nargs="+", metavar="PATTERN", help="layers that stay as they are")
    plan.add_argument("--only", nargs="+", metavar="PATTERN", help="the only layers that may change")
    plan.add_argument("--override", nargs="+", metavar="PATTERN=R", help="another rank for some layers")
    plan.add_argument("--multiple", type=int, metavar="N", help="round computed ranks to it (default 16)")
    plan.add_argument("--min-saving", type=float, default=0.0, metavar="F", help="share a layer must save")
    plan.add_argument(
        "--measure",
        nargs="?",
        const="eager",
        choices=("eager", "graph"),
        help="time the layers, as they run or in CUDA graphs; the slower ones stay dense",
    )
    plan.add_argument("--device", default="cpu", help="where to measure (default cpu)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--out", type=Path, metavar="FILE", help="also save the plan as JSON")
    plan.set_defaults(run=_plan)

    convert = commands.add_parser(
        "convert", help="make a checkpoint low-rank", description="What factorize_ does, on checkpoint files."
    )
    convert.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a safetensors or torch.save file, or a folder"
    )
    convert.add_argument("--plan", type=Path, required=True, help="from `pufferfish plan … --out FILE`")
    convert.add_argument("--out", type=Path, required=True, help="of the same kind as CHECKPOINT")
    convert.set_defaults(run=_convert)

    merge = commands.add_parser(
        "merge",
        help="make a low-rank checkpoint dense again",
        description="What merge_ does, on checkpoint files.",
    )
    merge.add_argument("checkpoint", metavar="CHECKPOINT")
    merge.add_argument("--plan", type=Path, help="default: the one that lies beside the checkpoint")
    merge.add_argument("--out", type=Path, required=True)
    merge.set_defaults(run=_merge)

    methods = commands.add_parser(
        "methods",
        help="what each compression method sends, and saves",
        description="What each compression method sends, and how many times fewer bytes that makes on the wire.",
    )
    methods.add_argument(
        "methods",
        nargs="*",
        metavar="METHOD",
        help="such as 'TopK(0.001)', file.py:Mine or 'package.module:Mine(rank=2)' (default: all of Pufferfish's)",
    )
    methods.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[2, 8, 64],
        metavar="N",
        help="for these numbers of workers (2 8 64)",
    )
    methods.set_defaults(run=_methods)

    train = commands.add_parser(
        "train", help="train a task; goes on by itself", formatter_class=raw, description=TRAIN_HELP
    )
    train.add_argument("task", metavar="TASK")
    train.add_argument(
        "--method", default="dense", metavar="M", help="dense, pufferfish (the paper's recipe), auto, …"
    )
    train.add_argument(
        "--compress", metavar="C", help="a compression method on top, such as powersgd-4 or bf16"
    )
    train.add_argument("--recipe", default="short", help="short (default) or paper")
    train.add_argument("--out", type=Path, metavar="FOLDER", help="default: runs/TASK-METHOD-SEED")
    train.add_argument("--data", type=Path, metavar="FOLDER", help="default: $PUFFERFISH_DATA")
    train.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    train.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on cuda, else fp32"
    )
    for name, kind in (("epochs", int), ("batch", int), ("lr", float)):
        train.add_argument(f"--{name}", type=kind, metavar="N", help="in place of the recipe's")
    train.add_argument("--seed", type=int, default=0, metavar="N")
    train.add_argument("--accumulate", type=int, default=1, metavar="N", help="backward passes an update")
    train.add_argument(
        "--save-every", type=int, metavar="N", help="updates between checkpoints (default: an epoch)"
    )
    train.add_argument("--compile", action="store_true", help="torch.compile")
    train.set_defaults(run=_train)

    fetch = commands.add_parser("fetch", help="download a task's data, checked; goes on where it was cut")
    fetch.add_argument("task", metavar="TASK")
    fetch.add_argument("--data", type=Path, metavar="FOLDER", help="default: $PUFFERFISH_DATA")
    fetch.set_defaults(run=_fetch)

    network = commands.add_parser("network", help="remove what killed runs on emulated networks left")
    network.add_argument("action", choices=["clean"])
    network.set_defaults(run=_network)

    report = commands.add_parser("report", help="compare runs on one page, or as CSV, LaTeX, Markdown")
    report.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, or folders that hold some")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="default: report.html; other formats are printed"
    )
    form = report.add_mutually_exclusive_group()
    for name in ("csv", "latex", "markdown"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name)
    report.add_argument(
        "--against", metavar="NAME", help="what the others are compared with (default bf16, else dense)"
    )
    report.add_argument(
        "--target", type=float, metavar="X", help="also: how long to this validation accuracy, as shown"
    )
    report.set_defaults(run=_report, form="html")

    demo = commands.add_parser("demo", help="plan, train, switch, train on, merge: in about a minute")
    demo.set_defaults(run=_demo)
    return parser


def _version() -> str:
    from . import __version__

    return f"pufferfish {__version__}"


def _plan(arguments: argparse.Namespace) -> None:
    from .lab.plans import make_plan

    made, remarks = make_plan(
        arguments.model,
        rank=arguments.rank,
        keep=arguments.keep,
        only=arguments.only or (),
        overrides=dict(_pair(x) for x in arguments.override or ()),
        multiple=arguments.multiple,
        min_saving=arguments.min_saving,
        measure="graph" if arguments.measure == "graph" else arguments.measure == "eager",
        device=arguments.device,
    )
    if arguments.out:
        made.save(arguments.out)
    print(made.to_json() if arguments.json else made)
    for remark in remarks:
        print(f"\n{remark}", file=sys.stderr if arguments.json else sys.stdout)


def _pair(text: str) -> tuple[str, Any]:
    pattern, found, rank = text.partition("=")
    if not found:
        raise ValueError(f"--override {text}: write PATTERN=R, such as 'layer4.*=0.5'")
    return pattern, rank


def _convert(arguments: argparse.Namespace) -> None:
    from .convert import convert
    from .plan import Plan

    plan = convert(arguments.checkpoint, Plan.load(arguments.plan), arguments.out)
    before, after = plan.before.parameters, plan.after.parameters
    print(f"{arguments.out}: {before:,} → {after:,} parameters, {before / after:.2f}× smaller")


def _merge(arguments: argparse.Namespace) -> None:
    from .convert import merge
    from .plan import Plan

    plan = merge(arguments.checkpoint, arguments.out, arguments.plan and Plan.load(arguments.plan))
    print(f"{arguments.out}: dense again, {plan.before.parameters:,} parameters")


def _methods(arguments: argparse.Namespace) -> None:
    from .lab.methods import named, table

    print(table(named(arguments.methods), arguments.workers))


def _train(arguments: argparse.Namespace) -> None:
    from dataclasses import replace

    import torch

    from .lab.choice import choice
    from .lab.tasks.find import find
    from .lab.train import Settings, train

    task = find(arguments.task)
    word = arguments.method + (f"+{arguments.compress}" if arguments.compress else "")
    changed = {
        key: value for key in ("epochs", "batch", "lr") if (value := getattr(arguments, key)) is not None
    }
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = Settings(
        choice(word),
        replace(task.recipe(arguments.recipe), **changed),
        arguments.out or Path("runs") / f"{task.name}-{word}-{arguments.seed}",
        data=arguments.data,
        seed=arguments.seed,
        device=device,
        precision=arguments.precision or ("bf16" if device == "cuda" else "fp32"),
        accumulate=arguments.accumulate,
        compile=arguments.compile,
        save_every=arguments.save_every,
    )
    found = train(task, given)
    if found is not None and int(os.environ.get("RANK", "0")) == 0:
        print(
            f"{word}: {task.measure} {found[task.measure]:.2f}, {found['parameters']:,} parameters; {given.folder}"
        )


def _fetch(arguments: argparse.Namespace) -> None:
    from .lab.data.fetch import fetch
    from .lab.tasks.find import find

    task, folder = find(arguments.task), arguments.data or os.environ.get("PUFFERFISH_DATA")
    if task.dataset is None:
        raise ValueError(f"{task.name} has nothing to download")
    if not folder:
        raise ValueError("say where to: --data FOLDER, or PUFFERFISH_DATA")
    print(fetch(task.dataset, Path(folder)))


def _network(arguments: argparse.Namespace) -> None:
    from .lab.network import clean

    print(f"{clean()} processes of killed runs ended")


def _report(arguments: argparse.Namespace) -> None:
    from .lab.report import report, write

    text = report(arguments.runs, arguments.form, against=arguments.against, target=arguments.target)
    out = arguments.out or (Path("report.html") if arguments.form == "html" else None)
    if out is None:
        print(text, end="")
    else:
        write(text, out)
        print(f"{out}: open it in a browser" if arguments.form == "html" else out)


def _demo(arguments: argparse.Namespace) -> None:
    from .lab.demo import demo

    demo()
