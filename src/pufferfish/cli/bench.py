"""Compare training methods on a task: accuracy over several seeds, and seconds
per step on a network.

fp32 DDP (dense), DDP with bf16 gradients (bf16) and a step without any exchange
are always included (with one worker, only dense). Steps are timed in rounds in
which all methods alternate. Every run is saved in the output folder: rerun the
same command to resume the bench, or add methods and seeds later.

examples:
  pufferfish bench digits --methods 'powersgd(4),pufferfish,auto+powersgd(4)' \\
      --nodes 4 --network 100mbit --seeds 3
  pufferfish bench my_model.py --methods pufferfish,narrow --per-node 2
  pufferfish bench cifar10 --methods 'pufferfish,file.py:Mine(rank=2)' \\
      --nodes 4 --network 1gbit --tune 5

  # compare with a narrower dense model of the same size
  pufferfish bench digits --methods pufferfish,narrow --seeds 3

  # pruning methods
  pufferfish bench digits --methods 'pufferfish,auto,lottery-ticket(5)'
  pufferfish bench digits --methods 'early-bird(0.3),early-bird(0.5)'

  # optimizers for large batches, and a longer run
  pufferfish bench cifar10 --batch 2048 --tune 3 --methods \\
      'dense(optimizer=lars,lr=1.6),dense(optimizer=sam),pufferfish(epochs=1.4)'
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import add_device, add_workers, check_output_folder, default_device, settings_from

if TYPE_CHECKING:
    import argparse

    from . import Parser


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("task", metavar="TASK", help="as in `pufferfish train`")
    text = "methods, as `pufferfish methods` lists them (default: pufferfish)"
    add("--methods", default="pufferfish", metavar="M,M,…", help=text)
    add("--seeds", type=int, default=1, metavar="N", help="runs per method (default: 1)")
    text = "try N learning rates per method, each twice the one before; the outermost only if their neighbour is best"
    add("--tune", type=int, default=0, metavar="N", help=text)
    text = "short or paper, optionally with changed values: short,rank=0.33,optimizer=muon (default: short)"
    add("--recipe", default="short", help=text)
    add("--epochs", type=int, metavar="N", help="number of epochs (default: from the recipe)")
    add("--batch", type=int, metavar="N", help="global batch size (default: from the recipe)")
    add("--data", type=Path, metavar="FOLDER", help="data folder (default: $PUFFERFISH_DATA)")
    add("--out", type=Path, metavar="FOLDER", help="output folder (default: runs/bench-TASK)")
    add_workers(parser)
    add_device(parser)
    parser.add_rare("--rounds", type=int, default=5, metavar="N", help="timing rounds (default: 5)")


def run(arguments: argparse.Namespace) -> int:
    from ..lab.bench import BenchSettings, run_bench
    from ..lab.method_name import slug, split_names
    from ..lab.tasks.find_task import with_tokenizer

    emulated = (arguments.nodes or 1) > 1 and not arguments.simulate
    settings = settings_from(
        BenchSettings,
        arguments,
        task=with_tokenizer(arguments.task, arguments.data),
        methods=split_names(arguments.methods),
        device=arguments.device or default_device(emulated),
    )
    out = arguments.out or Path("runs") / f"bench-{slug(arguments.task)}"
    check_output_folder(out)
    return run_bench(settings, out, data=arguments.data)
