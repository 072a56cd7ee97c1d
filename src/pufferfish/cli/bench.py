"""`pufferfish bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .output_paths import Commands, refuse_locked

HELP = """\
Compare ways to train a task: accuracy over seeds, and seconds a step on a network.

fp32 DDP (dense), DDP with bf16 gradients (bf16) and a step without any exchange are always in; of one worker, which
sends nothing, dense alone. Steps are timed in rounds in which all methods take turns. Each run is a cell of the folder:
start the same command again and it goes on; more methods and seeds may be added.

  pufferfish bench digits --methods powersgd-4,pufferfish,auto+powersgd-4 --hosts 4 --network 100mbit --seeds 3
  pufferfish bench cifar10 --methods 'pufferfish,file.py:Mine(rank=2)' --hosts 4 --network 1gbit --tune lr=5
  pufferfish bench digits --methods pufferfish,auto,lottery-ticket-5 --seeds 3        (pruning in rounds)
  pufferfish bench digits --methods pufferfish,early-bird-0.3,early-bird-0.5,early-bird-0.7 --seeds 3
  pufferfish bench cifar10 --batch 2048 --methods dense@sgd=1.6,dense@lars=1.6,dense@lamb=0.02,dense@sam=1.6 --tune lr=3
  torchrun … -m pufferfish bench cifar10 --methods pufferfish --hosts 4 --per-host 8 --device cuda   (a real cluster)
"""


def add(commands: Commands) -> None:
    """The command's arguments."""
    bench = commands.add_parser(
        "bench",
        help="compare methods fairly: seeds, timed rounds, a page",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=HELP,
    )
    bench.add_argument("task", metavar="TASK", help="as in `pufferfish train`")
    bench.add_argument(
        "--methods",
        default="pufferfish",
        metavar="M,M,…",
        help="as in `pufferfish train`, and @OPTIMIZER or @OPTIMIZER=LR behind it for another one than the recipe's "
        "(default: pufferfish)",
    )
    bench.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each method (default 1)")
    bench.add_argument(
        "--tune",
        metavar="lr=N",
        help="let every method try N learning rates around the recipe's, each twice the last",
    )
    bench.add_argument("--hosts", type=int, default=1, metavar="N", help="machines to emulate (default 1)")
    bench.add_argument("--per-host", type=int, default=1, metavar="N", help="workers on each (default 1)")
    bench.add_argument("--workers", type=int, metavar="N", help="on this machine, instead of hosts")
    bench.add_argument(
        "--network", metavar="LINK", help="between hosts: 100mbit, 1gbit,delay=5ms (default: loopback)"
    )
    bench.add_argument(
        "--simulate", action="store_true", help="all workers in one process; times are predicted"
    )
    bench.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="in which steps are timed (default 5)"
    )
    bench.add_argument("--recipe", default="short", help="short (default) or paper")
    for name in ("epochs", "batch"):
        bench.add_argument(f"--{name}", type=int, metavar="N", help="in place of the recipe's")
    bench.add_argument("--data", type=Path, metavar="FOLDER", help="default: $PUFFERFISH_DATA")
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    bench.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on cuda, else fp32"
    )
    bench.add_argument("--graph", action="store_true", help="whole updates in a CUDA graph")
    bench.add_argument("--target", type=float, metavar="X", help="also: how long to this validation score")
    bench.add_argument("--out", type=Path, metavar="FOLDER", help="default: runs/bench-TASK")
    bench.add_argument(
        "--shard", default="1/1", metavar="I/N", help="this call's part of the work, for job arrays"
    )
    bench.set_defaults(run=_bench)


def _bench(given: argparse.Namespace) -> int:
    from ..lab.bench import Asked, Shard, run
    from ..lab.bench.bench_settings import split, trials
    from ..lab.bench.cells import slug

    if given.workers is not None and (given.hosts, given.per_host) != (1, 1):
        raise ValueError("--workers is for this machine alone; leave it out with --hosts and --per-host")
    asked = Asked(
        task=given.task,
        methods=split(given.methods),
        seeds=given.seeds,
        recipe=given.recipe,
        epochs=given.epochs,
        batch=given.batch,
        tune=trials(given.tune) if given.tune else 0,
        hosts=given.hosts,
        per_host=given.workers or given.per_host,
        network=given.network,
        rounds=given.rounds,
        simulate=given.simulate,
        device=given.device,
        graph=given.graph,
        precision=given.precision or ("bf16" if given.device == "cuda" else "fp32"),
    )
    out = given.out or Path("runs") / f"bench-{slug(given.task)}"
    if not out.exists():  # what is in it is looked at by all workers and shards; nothing is tried there
        refuse_locked(out)
    return run(asked, out, data=given.data, shard=Shard.parse(given.shard), target=given.target)
