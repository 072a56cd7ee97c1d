"""What low rank buys in time: whole training steps, dense and low-rank side by side in one run.

    python benchmarks/step.py [--cases llama "GPT d 768"] [--modes graph compile] [--decay]

Forward, loss, backward and an SGD step (fused on a GPU), bf16 autocast on a GPU and fp32 on a CPU. The two models take
turns of half a second, since a GPU's clock follows the load; medians of turns. Ranks: ratio 0.25 in multiples of 16.
Models keep their paper's full-rank layers, language models the first block; "measured plan" is what
`pf.plan(model, example=…, measure="compile")` chooses. On a GPU each step is timed in eager mode, as one CUDA graph, and
compiled (model and loss) inside a CUDA graph.

The limit of a step is its time if each changed layer took its share of MACs of its dense time and nothing else
changed. The times of the dense layers are measured one by one, in CUDA graphs (a measured plan's: compiled).

With --decay the low-rank step is timed again in a second table, with weight decay of its factors and with
`FrobeniusDecay` instead, in turns.
"""

import argparse
import copy
import dataclasses
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.lab.models import REFERENCES, Llama
from pufferfish.lab.models.decoders import GPT
from pufferfish.planning.text import Table
from pufferfish.planning.timing import capture_cuda_graph

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    keep: tuple[str, ...] = ()
    measured: bool = False  # layers that low rank slows down stay dense


def images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    return x, torch.randint(classes, (batch,))


def text(batch: int, time: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (batch, time + 1))
    return tokens[:, :-1], tokens[:, 1:]


def gpt(d: int, layers: int, context: int, batch: int) -> Case:
    return Case(
        f"GPT d {d}, {layers} layers, {batch}×{context}",
        lambda: GPT(vocabulary=8192, d=d, layers=layers, heads=d // 64, context=context),
        lambda: text(batch, context, 8192),
        ("blocks.0.*",),
    )


def llama(d: int, layers: int, kv_heads: int, inner: int, vocabulary: int, context: int, batch: int) -> Case:
    size = {"d": d, "layers": layers, "heads": d // 64, "kv_heads": kv_heads, "inner": inner}
    return Case(
        f"llama d {d}, {layers} layers, {batch}×{context}, vocabulary {vocabulary:,}",
        lambda: Llama(vocabulary=vocabulary, context=context, **size),
        lambda: text(batch, context, vocabulary),
        ("blocks.0.*",),
    )


def cifar(batch: int, measured: bool = False) -> Case:
    reference = REFERENCES["resnet18"]
    name = f"ResNet-18 CIFAR, batch {batch}" + ", measured plan" * measured
    keep = () if measured else reference.keep
    return Case(name, reference.build, lambda: images(batch, 32, 10), keep, measured)


def imagenet(model: str, batch: int) -> Case:
    reference = REFERENCES[model]
    return Case(
        f"{model} ImageNet, batch {batch}", reference.build, lambda: images(batch, 224, 1000), reference.keep
    )


GPU = [
    gpt(768, 12, 1024, 32), gpt(2048, 8, 1024, 8), gpt(4096, 4, 1024, 4),
    llama(2048, 16, 8, 8192, 128_256, 2048, 8),
    cifar(512), cifar(512, measured=True), imagenet("resnet50", 128), imagenet("wide_resnet50_2", 128),
]  # fmt: skip
CPU = [cifar(16), gpt(256, 4, 128, 8), gpt(512, 4, 128, 8), llama(256, 4, 2, 768, 8192, 128, 8)]


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases, modes = (GPU, ["eager", "graph", "compile"]) if device.type == "cuda" else (CPU, ["eager"])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", metavar="TEXT", default=[""], help="cases with this text in their name"
    )
    parser.add_argument("--modes", nargs="+", choices=("eager", "graph", "compile"), default=modes)
    parser.add_argument("--decay", action="store_true", help="show the share of FrobeniusDecay in a step")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True  # this and the next line: as networks are trained in practice
    torch.set_float32_matmul_precision("high")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, pufferfish {pf.__version__}"
    print(f"{name}, {versions}", flush=True)
    for case in cases:
        if any(text in case.name for text in args.cases):
            print(f"\n{case.name}\n" + "\n".join(report(case, device, args.modes, args.decay)), flush=True)


def report(case: Case, device: torch.device, modes: list[str], decay: bool) -> Iterator[str]:
    """Lines about one case."""
    torch.manual_seed(0)
    with device:
        models, (x, y) = [case.build() for _ in range(2)], case.batch()
    models = [m.to(memory_format=torch.channels_last) if x.dim() == 4 else m for m in models]
    plan = plan_of(case, models[1], x)
    pf.reshape_(models[1], plan)
    for p in models[1].parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)  # instead of SVDs, which would take minutes
    before, after = plan.before, plan.after
    macs = [(total.forward_macs or 0) + (total.backward_macs or 0) for total in (before, after)]
    sizes = (before.parameters / after.parameters, before.gradient_bytes / after.gradient_bytes)
    yield f"{macs[0] / macs[1]:.2f}× fewer MACs, {sizes[0]:.2f}× fewer parameters, {sizes[1]:.2f}× fewer bytes"
    rows, best = [["mode", "dense ms", "low-rank ms", ""]], [float("inf")] * 2
    for mode in modes:
        times = medians(device, in_mode(mode, [training_step(m, x, y, mode) for m in models]))
        rows.append([mode, *(f"{t:.2f}" for t in times), f"{times[0] / times[1]:.2f}× as fast"])
        best = [min(pair) for pair in zip(best, times, strict=True)]
        free_memory(models)
    rows.append(["faster of each", *(f"{t:.2f}" for t in best), f"{best[0] / best[1]:.2f}× as fast"])
    yield str(Table(rows, left=(0, 3)))
    if (linear := linear_time(plan)) is not None:
        limit = best[0] / (best[0] - linear[0] + linear[1])
        share = f"{linear[0]:.2f} ms ({linear[0] / best[0]:.0%}) of the dense step are layers that change"
        yield f"{share}; limit {limit:.2f}×, reached {best[0] / best[1] / limit:.0%} of it"
    if decay:
        decay_rows = [
            ["mode", "weight decay ms", "FrobeniusDecay ms", ""],
            *decay_shares(device, models[1], x, y, modes),
        ]
        yield str(Table(decay_rows, left=(0, 3)))


def plan_of(case: Case, model: nn.Module, x: Tensor) -> pf.Plan:
    """The case's plan, with the times of its layers on a GPU."""
    if not x.is_cuda:
        return pf.plan(model, rank=0.25, keep=case.keep, example=x)

    def run(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):  # layers are measured in this precision
            output: Tensor = model(x)
        return output

    mode = "compile" if case.measured else "graph"  # that of the job, and one without compiling for minutes
    plan = pf.plan(model, rank=0.25, keep=case.keep, example=run, measure=mode)
    if case.measured:
        return plan
    times = {e.name: e.ms for e in plan}
    given = pf.plan(model, rank=0.25, keep=case.keep, example=x, measure=False)
    return given.replace(dataclasses.replace(e, ms=times[e.name]) for e in given)


def linear_time(plan: pf.Plan) -> tuple[float, float] | None:
    """Milliseconds of the dense layers that change, and what remains of them if time follows MACs."""
    changed = [e for e in plan if e.rank and e.ms]
    if not changed:
        return None
    shares = [sum(e.macs(True)) / sum(e.macs(False)) for e in changed]
    times = [e.ms[0] for e in changed if e.ms]
    return sum(times), sum(t * share for t, share in zip(times, shares, strict=True))


def decay_shares(
    device: torch.device, low_rank: nn.Module, x: Tensor, y: Tensor, modes: list[str]
) -> list[list[str]]:
    """Time the step with weight decay of the factors and with `FrobeniusDecay`: a row for each mode."""
    rows = []
    for mode in modes:
        steps = [
            training_step(copy.deepcopy(low_rank), x, y, mode, weight_decay=1e-4, frobenius=on)
            for on in (False, True)
        ]
        without, with_it = medians(device, in_mode(mode, steps))
        del steps
        free_memory([low_rank])
        rows.append([mode, f"{without:.2f}", f"{with_it:.2f}", f"{with_it / without - 1:+.1%} of a step"])
    return rows


def training_step(
    model: nn.Module, x: Tensor, y: Tensor, mode: str, weight_decay: float = 0.0, frobenius: bool = False
) -> Step:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(
        parameters, lr=1e-3, momentum=0.9, weight_decay=weight_decay, fused=x.is_cuda or None
    )
    if frobenius:
        pf.lowrank.FrobeniusDecay(model, optimizer, weight_decay)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    run = torch.compile(loss, dynamic=False) if mode == "compile" else loss

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            value = run(x, y)
        value.backward()
        for p in parameters:
            if p.grad is not None and p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)  # which fused optimizers require
        optimizer.step()

    return step


def in_mode(mode: str, steps: list[Step]) -> list[Step]:
    """The steps as they are timed."""
    if mode == "eager" or not torch.cuda.is_available():
        return steps
    pool = torch.cuda.graph_pool_handle()  # one for all: they take turns and need no results of each other
    return [capture_cuda_graph(step, pool) for step in steps]


def free_memory(models: list[nn.Module]) -> None:
    """Free what the steps of a mode have allocated: compiled code, captured graphs, gradients."""
    torch._dynamo.reset()
    for model in models:
        model.zero_grad()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def medians(device: torch.device, steps: list[Step], turns: int = 6) -> list[float]:
    """Median milliseconds of each, taking turns, after a turn as a warm-up."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(turns):
        for step, seen in zip(steps, times, strict=True):
            one = milliseconds(device, step, 1)
            count = max(1, round(500 / one))  # a turn takes half a second, after half as long a warm-up
            milliseconds(device, step, count // 2)
            if turn:
                seen.append(milliseconds(device, step, count) / count)
    return [statistics.median(seen) for seen in times]


def milliseconds(device: torch.device, step: Step, count: int) -> float:
    wait_for(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait_for(device)
    return (time.perf_counter() - start) * 1e3


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
