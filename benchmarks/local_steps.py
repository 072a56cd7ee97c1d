"""How much of the time workers compute over a slow link: GPT on 4 emulated hosts by DDP, DiLoCo, Streaming DiLoCo and SparseLoCo, each also low-rank.

    python benchmarks/local_steps.py [--network 100mbit] [--hosts 4] [--h 30] [--rounds 2] [--context 128] [--methods dense …]

Every host is a network namespace with one single-threaded worker; links are shaped both ways and measured first. A method makes
`rounds` · h updates with AdamW, from the start of a round (DDP: `--ddp-steps`), after a warm-up; then as many as a quarter of it without
any exchange ("alone"), half of them before. Methods run one after the other, since their models would not fit into memory together.

- utilisation: 1 − (time spent waiting for averages or, under DDP, for the exchange) / wall time, the mean of all workers; "of alone":
  the time of an update alone over that of an update, which also counts what the exchange takes from the processor.
- predicted: utilisation by the cost model, from the update alone and the measured link.
- payload/round: bytes that a worker passes to the collectives in h updates of local steps, or in one update of DDP. wire/update: bytes that it sends for an
  update; measured: at the network interface, with headers and acknowledgements of TCP.
- peak rate: of the largest exchange, if it is to be done within the updates until it is applied, or within one.

Low rank is ratio 0.25 without the first and last layers, made by a switch as in a run. Needs root, or user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pufferfish as pf
from pufferfish.distributed.workers import Workers
from pufferfish.lab.method_name import training_method
from pufferfish.lab.models import GPT, REFERENCES
from pufferfish.lab.network import Network
from pufferfish.lab.report.formatting import format_bytes
from pufferfish.lab.train.timing import TimedModel
from pufferfish.measure import CostModel, Link, Work
from pufferfish.measure.cost_model import trainable_parameters, with_ddp_messages, with_local_exchange
from pufferfish.planning.text import Table


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--network", default="100mbit")
    ask.add_argument("--hosts", type=int, default=4)
    ask.add_argument("--h", type=int, default=30)
    ask.add_argument("--fragments", type=int, default=4)
    ask.add_argument("--rounds", type=int, default=2, help="of h updates")
    ask.add_argument("--ddp-steps", type=int, default=3)
    ask.add_argument("--d", type=int, default=384)
    ask.add_argument("--layers", type=int, default=6)
    ask.add_argument("--context", type=int, default=128)
    ask.add_argument("--batch", type=int, default=1, help="sequences of each worker")
    ask.add_argument(
        "--methods", nargs="+", help="default: dense, DiLoCo, Streaming DiLoCo, SparseLoCo, and low-rank"
    )
    ask.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)  # all settings, as JSON
    given = ask.parse_args()
    if given.worker:
        work(argparse.Namespace(**given.worker))
        return
    h = given.h
    own = ["dense", f"diloco({h})", f"streaming({h},fragments={given.fragments})", f"sparseloco({h})"]
    low_rank = ["pufferfish", *(f"pufferfish+{name}" for name in own[1:])]
    given.methods = given.methods or [*own, *low_rank]
    model = build(given)
    print(f"{os.cpu_count()} cores ({platform.processor() or platform.machine()}), Python {platform.python_version()}, torch "
          f"{torch.__version__}, pufferfish {pf.__version__}; {given.hosts} hosts, GPT of {sum(p.numel() for p in model.parameters()):,} "
          f"parameters, {given.batch} × {given.context} tokens each, h = {h}", flush=True)  # fmt: skip
    with Network(given.hosts, given.network) as network, tempfile.TemporaryDirectory() as folder:
        got = network.measure()
        print(f"{given.network}: got {got.got_mbit:.0f} Mbit/s, {got.latency_ms:.2f} ms\n", flush=True)
        out = Path(folder) / "results.json"
        settings = vars(given) | {"out": str(out), "mbit": got.got_mbit}
        command = [
            __file__,
            "--worker",
            json.dumps(settings),
        ]  # torchrun would take short options for its own
        if code := network.launch(command, env={"OMP_NUM_THREADS": "1"}):
            raise SystemExit(f"the workers failed with exit code {code}")
        results = json.loads(out.read_text())
    print()
    print(table(results))


def build(given: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocabulary=256, d=given.d, layers=given.layers, heads=given.d // 64, context=given.context)


def work(given: argparse.Namespace) -> None:
    """One process: all methods, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    for name in given.methods:
        result = measure(name, given)
        results.append(result)
        if dist.get_rank() == 0:
            print(
                f"{name}: {result['step']:.3f} s an update, utilisation {result['utilisation']:.1%}",
                flush=True,
            )
            Path(given.out).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train with a method; times are means over the workers, bytes those of this one."""
    model, workers = contender(name, given), Workers.of_job("benchmark")
    local = model.method.local
    steps = given.ddp_steps if local is None else given.rounds * local.h
    model.time_parts(1, exchange=local is None)  # DDP arranges its buckets
    some = max(3, steps // 4)
    alone = model.seconds(some, exchange=False)
    meter_before, sent_before, began = payload(model), sent_bytes(), time.perf_counter()
    parts = model.time_parts(steps)
    wall = time.perf_counter() - began
    alone = (alone + model.seconds(some, exchange=False)) / 2
    step, waited, alone = workers.mean([parts["step"], parts["exchange"], alone])
    compute, size, inner = Work(forward=alone, backward=0.0), model.size, trainable_parameters(model.inner)
    if local is None:
        predicted, wire = with_ddp_messages(compute, inner), model.traffic()[0]
        a_round, peak, hidden_in = sum(p.nbytes for p in inner.values()), wire, 1
    else:
        predicted = with_local_exchange(compute, local.schedule, local.settings.method, inner, size)
        assert predicted.local is not None
        wire, peak, hidden_in = model.traffic()[0], predicted.local.peak_bytes(size), max(local.delay, 1)
        a_round = round((payload(model) - meter_before) / given.rounds)
    link = Link.nominal(bandwidth=1e6 * given.mbit, latency=1e-3, size=size, goodput=1)
    return {
        "name": name, "step": step, "alone": alone, "utilisation": 1 - waited / step,
        "predicted": CostModel(link=link).predict(predicted).utilisation, "payload": a_round, "wire": wire,
        "measured_wire": (sent_bytes() - sent_before) / steps, "peak": peak, "peak_rate": 8 * peak / (hidden_in * alone),
        "wall": wall, "dense": sum(p.nbytes for p in build(given).parameters()),
    }  # fmt: skip


def contender(name: str, given: argparse.Namespace) -> TimedModel:
    """A model as the method trains it, low-rank from the start."""
    method, model = training_method(name), build(given)
    low = None if method.model == "dense" else pf.plan(model, rank=0.25, keep=REFERENCES["gpt"].keep)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(256, (given.batch, given.context + 1), generator=generator)

    def loss(net: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return TimedModel(
        method,
        model,
        lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4),
        loss,
        transform=None
        if low is None
        else lambda net, own: pf.Switch(low, when=pf.AtStep(0)).step(net, own, step=0),
    )


def payload(model: TimedModel) -> int:
    """Bytes that local steps have passed to collectives so far."""
    return 0 if model.local is None else sum(model.local.meter.collective_bytes.values())


def sent_bytes() -> int:
    """Bytes that have left this host's interfaces, but for the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    rows = [line.replace(":", " ").split() for line in lines]
    return sum(int(row[9]) for row in rows if row[0] != "lo")


def table(results: list[dict[str, Any]]) -> str:
    head = ["", "s/update", "alone", "utilisation", "of alone", "predicted", "payload/round", "less", "wire/update",
            "measured", "less", "largest exchange", "peak rate"]  # fmt: skip
    rows = [head]
    dense_wire = next((r["wire"] for r in results if r["name"] == "dense"), None)
    for r in results:
        less = f"{dense_wire / r['wire']:,.0f}×" if dense_wire else "–"
        rows.append([
            r["name"], f"{r['step']:.3f}", f"{r['alone']:.3f}", f"{r['utilisation']:.1%}",
            f"{r['alone'] / r['step']:.1%}", f"{r['predicted']:.1%}", format_bytes(r["payload"]),
            f"{r['dense'] / r['payload']:.1f}×", format_bytes(r["wire"]), format_bytes(r["measured_wire"]), less,
            format_bytes(r["peak"]), f"{r['peak_rate'] / 1e6:.3g} Mbit/s",
        ])  # fmt: skip
    return str(Table(rows, left=(0,)))


if __name__ == "__main__":
    main()
