"""`pufferfish train`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output_paths import Commands, refuse_locked
from .train_settings import places, settings

if TYPE_CHECKING:
    from ..lab.tasks.task import Task
    from ..lab.train import Settings

TRAIN_HELP = """\
Train a task: alone, on workers of this machine, or under torchrun. Start the same command again and it goes on where it
was; ctrl-C ends it with a checkpoint.

TASK is digits, cifar10, cifar10:vgg19, wikitext2, wikitext2:gpt, multi30k, imagefolder, text, or one of
yours: file.py:task. Data comes from --data or $PUFFERFISH_DATA; a message says what to put where.

Methods: dense, pufferfish (the paper's recipe), auto (ranks and moment from the weights), and what the paper compares
with: early-bird-0.5 (that share of the channels removed, once the choice has settled) and lottery-ticket-5 (so many
rounds of pruning, each trained anew).

  pufferfish train digits --method pufferfish
  pufferfish train digits --method auto --compress powersgd-4 --network 100mbit --hosts 4
  pufferfish train cifar10 --compress powersgd-4 --workers 16 --simulate --graph
  pufferfish train cifar10 --method early-bird-0.5 --graph
  pufferfish train cifar10 --batch 2048 --optimizer lars --lr 1.6
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
    what = train.add_argument_group("what")
    what.add_argument(
        "--method",
        default="dense",
        metavar="M",
        help="dense, pufferfish, auto, early-bird-0.5, lottery-ticket-5",
    )
    what.add_argument(
        "--compress", metavar="C", help="a compression method on top, such as powersgd-4 or bf16"
    )
    what.add_argument("--recipe", default="short", help="short (default) or paper")
    for name, kind in (("epochs", int), ("batch", int), ("lr", float)):
        what.add_argument(f"--{name}", type=kind, metavar="N", help="in place of the recipe's")
    what.add_argument(
        "--optimizer",
        metavar="O",
        help="in place of the recipe's: sgd, adam, adamw, lars, lamb, sam (around sgd)",
    )
    what.add_argument("--accumulate", type=int, default=1, metavar="N", help="backward passes an update")
    what.add_argument("--seed", type=int, default=0, metavar="N")
    what.add_argument("--data", type=Path, metavar="FOLDER", help="default: $PUFFERFISH_DATA")
    what.add_argument(
        "--held",
        type=float,
        metavar="N",
        help="images (or their share) held out for validation; 0: train on all",
    )
    where = train.add_argument_group("where")
    where.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    where.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on cuda, else fp32"
    )
    where.add_argument("--compile", action="store_true", help="torch.compile")
    where.add_argument(
        "--graph", action="store_true", help="whole updates in a CUDA graph, for batches of one shape"
    )
    where.add_argument("--workers", type=int, metavar="N", help="processes on this machine")
    where.add_argument(
        "--simulate",
        action="store_true",
        help="play the --workers exactly in one process; times are predicted",
    )
    where.add_argument(
        "--network",
        metavar="LINK",
        help="100mbit, 1gbit,delay=5ms …: emulated, with --simulate predicted (10gbit)",
    )
    where.add_argument("--hosts", type=int, metavar="N", help="on the emulated network")
    where.add_argument("--per-host", type=int, metavar="N", help="workers on each (1)")
    where.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="that workers wait for one another before they give up; more than the first one needs to validate and to save "
        "(torch's default: half an hour, NCCL's ten minutes)",
    )
    records = train.add_argument_group("records")
    records.add_argument("--out", type=Path, metavar="FOLDER", help="default: runs/TASK-METHOD-SEED")
    records.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="updates between checkpoints (default: at the end of epochs, but not every few seconds)",
    )
    records.add_argument("--jsonl", action="store_true", help="metrics.jsonl too, an object a logged step")
    records.add_argument("--tensorboard", action="store_true", help="TensorBoard's files too")
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    if "RANK" in os.environ:
        return _worker(arguments)
    task, given = settings(arguments)
    network, hosts, per_host = places(arguments)
    refuse_locked(given.folder)
    if hosts * per_host == 1:
        return _here(task, given)
    from ..lab.train.launch_workers import start

    _refuse(task, given, hosts * per_host)
    command = ["-m", "pufferfish", "train", *_words(arguments, given)]
    return start(command, network=network, hosts=hosts, per_host=per_host)


def _here(task: Task, given: Settings, link: Any = None) -> int:
    from ..lab.train import train
    from ..lab.train.screen import Screen

    found = train(task, given, link=link)
    if found is None:
        return 0 if "RANK" in os.environ else 130
    silent = int(os.environ.get("RANK", "0")) > 0
    figures = f"test {task.measure} {found[task.measure]:.2f}, {found['parameters']:,} parameters"
    Screen(silent).result(f"{given.called}: {figures}; {given.folder}")
    return 0


def _worker(arguments: argparse.Namespace) -> int:
    """One of several: what is wrong with all of them is told once."""
    from ..lab.train.launch_workers import told
    from ..lab.train.process_group import Lost
    from ..lab.train.screen import Screen

    rank, settled = os.environ["RANK"], False
    try:
        if arguments.workers or arguments.network or arguments.hosts or arguments.simulate:
            raise ValueError(
                "--workers, --network, --hosts and --simulate start their own; leave them out under torchrun"
            )
        started = told()
        task, given = settings(arguments, hosts=started.get("hosts", 1))
        settled = True
        return _here(task, given, started.get("link"))
    except Lost as error:
        Screen().lost(f"rank {rank} has lost the others: {error}")
        return 1
    except (ValueError, TypeError, OSError, ImportError) as error:
        shared = not settled or str(error).startswith("rank ")
        text = str(error).removeprefix("rank 0: ")
        Screen(silent=shared and rank != "0").refuse(f"pufferfish train: {text}")
        return 2


def _refuse(task: Task, given: Settings, size: int) -> None:
    """What workers would refuse one by one, before they are started."""
    from ..lab.train.process_group import enough_gpus
    from ..lab.train.run_records import refuse_other

    refuse_other(task, given)
    given.check(task, size)
    enough_gpus(given.device, size)
    task.steps(task.load(given.data), given.recipe.batch)


def _words(arguments: argparse.Namespace, given: Settings) -> list[str]:
    """The command line of a worker."""
    known = vars(arguments) | {"device": given.device, "precision": given.precision, "out": given.folder}
    words = [arguments.task]
    for name, value in known.items():
        if name in ("command", "run", "task", "workers", "network", "hosts", "per_host"):
            continue
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}={value}")
    return words
