"""Train a task in this process, on workers of this machine, on emulated hosts or
under torchrun. Rerun the same command to resume from its last checkpoint;
Ctrl-C saves a checkpoint and exits.

TASK is digits, cifar10, cifar10:vgg19, wikitext2, wikitext2:gpt, multi30k,
imagefolder, enwik8, enwik8:llama, text, text:llama, or your own file.py.
Data is read from --data or $PUFFERFISH_DATA; if files are missing, the error
says which, and where to put them. For the task text, --data may be a file; a
tokenizer.json beside it is used, or the one that text:tokenizer=FILE names.

functions in your own file.py, also used by plan, advise and bench:
  build()               returns the model; the method narrow needs
                        build(width=1.0), a factor for the sizes of the hidden
                        layers
  data()                returns training, validation and optionally test data:
                        each a tuple of tensors (inputs, targets), or a Dataset
                        whose rows are (input, target)
  loss(output, target)  optional: mean loss of a batch (default: cross-entropy)
  score(output, target) optional: mean quality of a batch, higher is better
                        (default: accuracy, or the loss if the file has one)
  example()             optional: one worker's batch (inputs, targets), for
                        plan and advise (default: from data())
A run cannot be resumed after an edit of the file: choose another --out.
A finished run has its model in OUT/model, for pufferfish.load and `merge`.

methods:
  dense             no low rank
  pufferfish        low rank after a full-rank warm-up, as in the paper; with
                    options: 'pufferfish(rank=0.5,at=0.4,keep=stem|head)',
                    rank and moment of the switch as fractions; with the file
                    of `advise --out` or `plan --out`: 'pufferfish(plan=FILE)'
  auto              low rank; ranks and the end of the warm-up are chosen from
                    the weights
  narrow            a narrower dense model with as many parameters as
                    pufferfish's low-rank one; narrow-0.5: for rank ratio 0.5
  early-bird-0.5    removes this fraction of the channels once the selection
                    is stable
  lottery-ticket-5  prunes in this number of rounds, each trained from the start
  diloco-30         workers average their models every 30 updates instead of
                    every gradient; streaming-30x4: in 4 parts, sent while
                    training continues; sparseloco-30: with 142 times fewer
                    bytes. Each can be combined with low rank, as in
                    pufferfish+diloco-30, and takes settings of the outer
                    optimizer, as in 'diloco-30(lr=0.5, momentum=0.9)'

examples:
  pufferfish train digits --method pufferfish
  pufferfish train my_model.py --method pufferfish --compress powersgd-4 \\
      --workers 2
  pufferfish train digits --method auto --compress powersgd-4 \\
      --network 100mbit --hosts 4
  pufferfish train cifar10 --compress powersgd-4 --workers 16 --simulate
  pufferfish train enwik8 --method streaming-30x4 --workers 8 --simulate
  pufferfish train cifar10 --batch 2048 --optimizer lars --lr 1.6
  torchrun --nproc-per-node 4 -m pufferfish train cifar10 --method auto \\
      --compress powersgd-4
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import check_output_folder
from .train_settings import train_settings, worker_layout

if TYPE_CHECKING:
    from ..lab.tasks import Task
    from ..lab.train import RunSettings

HELP = "train a task on one or several workers, with automatic resume"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK", help="what to train, see above")
    add = parser.add_argument_group("training").add_argument
    add("--method", default="dense", metavar="M", help="training method, see above (default: dense)")
    add("--compress", metavar="C", help="gradient compression, for example powersgd-4 or bf16")
    add(
        "--recipe",
        default="short",
        help="short or paper, optionally with changed values: short,rank=0.33 (default: short)",
    )
    add("--epochs", type=int, metavar="N", help="number of epochs (default: from the recipe)")
    add("--batch", type=int, metavar="N", help="global batch size (default: from the recipe)")
    add("--lr", type=float, metavar="X", help="learning rate (default: from the recipe)")
    add("--optimizer", metavar="O", help="sgd, adam(w), muon, lars, lamb or sam (default: from the recipe)")
    add("--accumulate", type=int, default=1, metavar="N", help="backward passes per update (default: 1)")
    add("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    add("--data", type=Path, metavar="FOLDER", help="data folder (default: $PUFFERFISH_DATA)")
    add(
        "--held",
        type=float,
        metavar="N",
        help="training images held out for validation: a number, or a fraction for imagefolder",
    )
    add = parser.add_argument_group("workers and devices").add_argument
    add("--device", choices=("cpu", "cuda"), help="device (default: cuda if available)")
    add("--precision", choices=("fp32", "bf16"), help="data type (default: bf16 on cuda, fp32 on cpu)")
    add("--compile", action="store_true", help="train with torch.compile")
    add("--workers", type=int, metavar="N", help="number of workers on this machine")
    add("--simulate", action="store_true", help="simulate the --workers in one process and predict times")
    simulated = "with --simulate, the link for predictions (default: 10gbit)"
    link = f"emulated link between --hosts, for example 100mbit or '1gbit,delay=5ms'; {simulated}"
    add("--network", metavar="LINK", help=link)
    add("--hosts", type=int, metavar="N", help="number of emulated machines")
    add("--per-host", type=int, metavar="N", help="workers per machine (default: 1)")
    timeout = "how long workers wait for one another before they fail; must exceed the time that validation"
    default = "(default: torch's, 30 minutes; 10 minutes with NCCL)"
    add("--timeout", type=float, metavar="SECONDS", help=f"{timeout} and saving take {default}")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="FOLDER", help="output folder (default: runs/TASK-METHOD-SEED)")
    every = "updates between checkpoints (default: save after each epoch, at most every few seconds)"
    add("--save-every", type=int, metavar="N", help=every)
    add("--tensorboard", action="store_true", help="also write TensorBoard files")


def run(arguments: argparse.Namespace) -> int:
    if "RANK" in os.environ:
        return _train_as_worker(arguments)
    task, settings = train_settings(arguments)
    network, hosts, per_host = worker_layout(arguments)
    check_output_folder(settings.folder)
    if hosts * per_host == 1:
        return _train_here(task, settings)
    from ..lab.train.workers import launch_workers

    _check_before_launch(task, settings, hosts * per_host)
    command = ["-m", "pufferfish", "train", *_worker_arguments(arguments, settings)]
    return launch_workers(command, network=network, hosts=hosts, per_host=per_host)


def _train_here(task: Task, settings: RunSettings, link: Any = None) -> int:
    from ..lab.report.formatting import format_score
    from ..lab.train import train
    from ..lab.train.console import Console

    results = train(task, settings, link=link)
    if results is None:
        return 0 if "RANK" in os.environ else 130
    silent = int(os.environ.get("RANK", "0")) > 0
    score = format_score(task.metric, results[task.metric])
    summary = f"{task.final_data} {score}, {results['parameters']:,} parameters"
    Console(silent).result(f"{settings.run_name}: {summary}; {settings.folder}")
    return 0


def _train_as_worker(arguments: argparse.Namespace) -> int:
    """Train as one of several workers; an error that all of them have is printed by rank 0 only."""
    from ..lab.train.console import Console
    from ..lab.train.workers import WorkersUnreachable, launch_info

    rank, parsed = os.environ["RANK"], False
    try:
        if arguments.workers or arguments.network or arguments.hosts or arguments.simulate:
            raise ValueError("--workers, --network, --hosts and --simulate cannot be used under torchrun")
        launch = launch_info()
        task, settings = train_settings(arguments, hosts=launch.get("hosts", 1))
        parsed = True
        return _train_here(task, settings, launch.get("link"))
    except WorkersUnreachable as error:
        Console().connection_lost(f"rank {rank} lost its connection to the other workers: {error}")
        return 1
    except (ValueError, TypeError, OSError, ImportError) as error:
        shared = not parsed or str(error).startswith("rank ")
        text = str(error).removeprefix("rank 0: ")
        Console(silent=shared and rank != "0").error(f"pufferfish train: {text}")
        return 2


def _check_before_launch(task: Task, settings: RunSettings, size: int) -> None:
    """Raise errors once, here, that each of `size` workers would raise otherwise."""
    from ..lab.train.record import check_same_run
    from ..lab.train.workers import check_gpu_count

    check_same_run(task, settings)
    settings.check(task, size)
    check_gpu_count(settings.device, size)
    task.steps(task.load(settings.data), settings.recipe.batch)


def _worker_arguments(arguments: argparse.Namespace, settings: RunSettings) -> list[str]:
    """Command line of a worker."""
    resolved = {"device": settings.device, "precision": settings.precision, "out": settings.folder}
    line = [arguments.task]
    for name, value in (vars(arguments) | resolved).items():
        if name in ("command", "run", "task", "workers", "network", "hosts", "per_host"):
            continue
        if value is True:
            line.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            line.append(f"--{name.replace('_', '-')}={value}")
    return line
