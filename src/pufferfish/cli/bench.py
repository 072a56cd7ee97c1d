"""Compare training methods on a task: accuracy over several seeds, and seconds
per step on a network.

fp32 DDP (dense), DDP with bf16 gradients (bf16) and a step without any exchange
are always included (with one worker, only dense). Steps are timed in rounds in
which all methods alternate. Every run is saved in the output folder: rerun the
same command to resume the bench, or add methods and seeds later.

examples:
  pufferfish bench digits --methods powersgd-4,pufferfish,auto+powersgd-4 \\
      --hosts 4 --network 100mbit --seeds 3
  pufferfish bench my_model.py --methods pufferfish,narrow --workers 2
  pufferfish bench cifar10 --methods 'pufferfish,file.py:Mine(rank=2)' \\
      --hosts 4 --network 1gbit --tune lr=5

  # compare with a narrower dense model of the same size
  pufferfish bench digits --methods pufferfish,narrow --seeds 3

  # pruning methods
  pufferfish bench digits --methods pufferfish,auto,lottery-ticket-5 --seeds 3
  pufferfish bench digits --methods pufferfish,early-bird-0.3,early-bird-0.5

  # optimizers for large batches
  pufferfish bench cifar10 --batch 2048 --tune lr=3 \\
      --methods dense@sgd=1.6,dense@lars=1.6,dense@lamb=0.02,dense@sam=1.6
"""

import argparse
from pathlib import Path

from .arguments import check_output_folder, settings_from

HELP = "compare training methods over seeds and on a network"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", metavar="TASK", help="as in `pufferfish train`")
    text = "as in `pufferfish train`; @OPTIMIZER or @OPTIMIZER=LR may follow each (default: pufferfish)"
    add("--methods", default="pufferfish", metavar="M,M,…", help=text)
    add("--seeds", type=int, default=1, metavar="N", help="runs per method (default: 1)")
    text = "try N learning rates per method, each twice the one before; the outermost only if their neighbour is best"
    add("--tune", metavar="lr=N", help=text)
    add("--hosts", type=int, default=1, metavar="N", help="number of emulated machines (default: 1)")
    add("--per-host", type=int, default=1, metavar="N", help="workers per machine (default: 1)")
    add("--workers", type=int, metavar="N", help="workers on this machine, instead of --hosts")
    add("--network", metavar="LINK", help="emulated link: 100mbit, '1gbit,delay=5ms' (default: loopback)")
    add("--simulate", action="store_true", help="simulate all workers in one process and predict times")
    add("--rounds", type=int, default=5, metavar="N", help="timing rounds (default: 5)")
    text = "short or paper, optionally with changed values: short,rank=0.33,optimizer=muon (default: short)"
    add("--recipe", default="short", help=text)
    add("--epochs", type=int, metavar="N", help="number of epochs (default: from the recipe)")
    add("--batch", type=int, metavar="N", help="global batch size (default: from the recipe)")
    add("--data", type=Path, metavar="FOLDER", help="data folder (default: $PUFFERFISH_DATA)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device (default: cpu)")
    add("--precision", choices=("fp32", "bf16"), help="data type (default: bf16 on cuda, fp32 on cpu)")
    add("--compile", action="store_true", help="train with torch.compile")
    add("--out", type=Path, metavar="FOLDER", help="output folder (default: runs/bench-TASK)")


def run(arguments: argparse.Namespace) -> int:
    from ..lab.bench import BenchSettings, run_bench
    from ..lab.bench.bench_settings import parse_tune, slug, split_methods
    from ..lab.tasks.text import with_tokenizer

    if arguments.workers is not None and (arguments.hosts, arguments.per_host) != (1, 1):
        raise ValueError(
            "--workers cannot be combined with --hosts or --per-host: it starts workers on this machine only"
        )
    settings = settings_from(
        BenchSettings,
        arguments,
        task=with_tokenizer(arguments.task, arguments.data),
        methods=split_methods(arguments.methods),
        tune=parse_tune(arguments.tune) if arguments.tune else 0,
        per_host=arguments.per_host if arguments.workers is None else arguments.workers,
    )
    out = arguments.out or Path("runs") / f"bench-{slug(arguments.task)}"
    check_output_folder(out)
    return run_bench(settings, out, data=arguments.data)
