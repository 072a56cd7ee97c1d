"""Train a task in this process, on workers of this machine, on emulated machines
or under torchrun. Rerun the same command to resume from its last checkpoint;
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

METHOD is model(options)+exchange(options); `pufferfish methods` lists the
models, the exchanges and their options, and says what a name means.

examples:
  pufferfish train digits --method 'pufferfish(rank=0.5,at=0.1)'
  pufferfish train my_model.py --method 'pufferfish+powersgd(4)' --per-node 2
  pufferfish train digits --method 'auto+powersgd(4)' --nodes 4 \\
      --network 100mbit
  pufferfish train cifar10 --method 'powersgd(4)' --per-node 16 --simulate
  pufferfish train enwik8 --method 'streaming(30,fragments=4)' --per-node 8 \\
      --simulate
  pufferfish train cifar10 --batch 2048 --method 'dense(optimizer=lars,lr=1.6)'
  torchrun --nproc-per-node 4 -m pufferfish train cifar10 \\
      --method 'auto+powersgd(4)'
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import add_device, add_workers, check_output_folder, default_device, settings_from

if TYPE_CHECKING:
    import argparse

    from ..lab.tasks import Task
    from ..lab.train import RunSettings
    from . import Parser


def add_arguments(parser: Parser) -> None:
    add, rare = parser.add_argument, parser.add_rare
    add("task", metavar="TASK", help="what to train, see above")
    add("--method", default="dense", metavar="METHOD", help="training method, see above (default: dense)")
    recipe = "short or paper, optionally with changed values: short,rank=0.33,clip=1 (default: short)"
    add("--recipe", default="short", help=recipe)
    add("--epochs", type=int, metavar="N", help="number of epochs (default: from the recipe)")
    add("--batch", type=int, metavar="N", help="global batch size (default: from the recipe)")
    add("--lr", type=float, metavar="X", help="learning rate (default: from the recipe)")
    add("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    add("--data", type=Path, metavar="FOLDER", help="data folder (default: $PUFFERFISH_DATA)")
    add("--out", type=Path, metavar="FOLDER", help="output folder (default: runs/TASK-METHOD-SEED)")
    add_workers(parser)
    add_device(parser)
    rare("--accumulate", type=int, default=1, metavar="N", help="backward passes per update (default: 1)")
    timeout = "how long workers wait for one another before they fail; must exceed the time that validation"
    default = "(default: torch's, 30 minutes; 10 minutes with NCCL)"
    rare("--timeout", type=float, metavar="SECONDS", help=f"{timeout} and saving take {default}")
    every = "updates between checkpoints (default: save after each epoch, at most every few seconds)"
    rare("--save-every", type=int, metavar="N", help=every)
    rare("--tensorboard", action="store_true", help="also write TensorBoard files")


def run(arguments: argparse.Namespace) -> int:
    if "RANK" in os.environ:
        return _train_as_worker(arguments)
    task, settings = train_settings(arguments)
    nodes, per_node = arguments.nodes or 1, arguments.per_node or 1
    check_output_folder(settings.folder)
    if settings.simulate or nodes * per_node == 1:
        return _train_here(task, settings)
    from ..lab.train.workers import launch_workers

    _check_before_launch(task, settings, nodes * per_node)
    command = ["-m", "pufferfish", "train", *_worker_arguments(arguments, settings)]
    return launch_workers(command, network=arguments.network, hosts=nodes, per_host=per_node)


def train_settings(arguments: argparse.Namespace, nodes: int = 1) -> tuple[Task, RunSettings]:
    """Return the task and the settings of a run whose workers are on `nodes` machines."""
    from ..lab.method_name import slug, training_method
    from ..lab.tasks import find_task
    from ..lab.tasks.find_task import with_tokenizer
    from ..lab.train import RunSettings

    _check_workers(arguments)
    machines, size = arguments.nodes or 1, (arguments.nodes or 1) * (arguments.per_node or 1)
    task: Any = find_task(with_tokenizer(arguments.task, arguments.data))
    method = training_method(arguments.method)
    if arguments.lr is not None:
        method = replace(method, lr=arguments.lr)
    folder = slug(f"{task.name}-{method.name}-{arguments.seed}")
    return task, settings_from(
        RunSettings,
        arguments,
        method=method,
        recipe=method.recipe(task.recipe(arguments.recipe, epochs=arguments.epochs, batch=arguments.batch)),
        folder=arguments.out or Path("runs") / folder,
        device=arguments.device or default_device(machines > 1 and not arguments.simulate),
        simulate=size if arguments.simulate else None,
        network=(arguments.simulate and arguments.network) or None,
        hosts=nodes,
        save_model=True,
    )


def _check_workers(arguments: argparse.Namespace) -> None:
    for name in ("nodes", "per_node"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= 64:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be 1 to 64")
    if arguments.network and (arguments.nodes or 1) == 1 and not arguments.simulate:
        raise ValueError(f"--network {arguments.network}: give the number of machines with --nodes N")
    if arguments.simulate and not (arguments.nodes or arguments.per_node):
        raise ValueError("--simulate: give the number of simulated workers with --per-node N")


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
    Console(silent).result(f"{settings.method.name}: {summary}; {settings.folder}")
    return 0


def _train_as_worker(arguments: argparse.Namespace) -> int:
    """Train as one of several workers; an error that all of them have is printed by rank 0 only."""
    from ..lab.train.console import Console
    from ..lab.train.workers import WorkersUnreachable, launch_info

    rank, parsed = os.environ["RANK"], False
    try:
        if arguments.nodes or arguments.per_node or arguments.network or arguments.simulate:
            raise ValueError("--nodes, --per-node, --network and --simulate cannot be used under torchrun")
        launch = launch_info()
        task, settings = train_settings(arguments, nodes=launch.get("hosts", 1))
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
        if name in ("command", "run", "parser", "task", "nodes", "per_node", "network", "simulate"):
            continue
        if value is True:
            line.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            line.append(f"--{name.replace('_', '-')}={value}")
    return line
