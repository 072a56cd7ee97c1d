"""`pufferfish train`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .common import Commands

TRAIN_HELP = """\
Train a task, alone or under torchrun. Start the same command again and it goes on where it was.

TASK is digits, cifar10, cifar10:vgg19, wikitext2, wikitext2:gpt, multi30k, imagefolder, text, or one of
yours: file.py:task. Data comes from --data or $PUFFERFISH_DATA; a message says what to put where.

  pufferfish train digits --method pufferfish
  torchrun --nproc-per-node 4 -m pufferfish train cifar10 --method auto --compress powersgd-4
"""


def add(commands: Commands) -> None:
    """The command's arguments."""
    train = commands.add_parser(
        "train",
        help="train a task; goes on by itself",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=TRAIN_HELP,
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


def _train(arguments: argparse.Namespace) -> None:
    from dataclasses import replace

    import torch

    from ..lab.choice import choice
    from ..lab.tasks.find import find
    from ..lab.train import Settings, train

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
