"""The same numbers from two versions of the source: plans, switches, compression, checkpoints, files.

    python tests/same_numbers.py OLD/src NEW/src     runs both side by side, prints what differs; exit status 1 if any
    PYTHONPATH=SOURCE python tests/same_numbers.py   prints one digest for each case of that source, to be compared by diff
    --only PATTERN                                   only the cases whose name matches, such as "switch*"

Not a test of its own: it notices that a rewrite changed a number that it was not meant to change. Cases use public names
only. A name that changes goes into ALIASES, a number that may change into MAY_DIFFER.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fnmatch
import hashlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from processes import in_processes
from zoo import ZOO

#: Name that the cases use → its name in other versions.
ALIASES: dict[str, str] = {}
#: Pattern of cases that may differ → largest relative difference (at most 1e-6) and the reason.
MAY_DIFFER: dict[str, tuple[float, str]] = {}
#: Where public names are looked for, in this order. Where a module moves, add its new path.
PLACES = (
    "pufferfish", "pufferfish.compression", "pufferfish.lowrank", "pufferfish.planning", "pufferfish.distributed",
    "pufferfish.integrations.convert", "pufferfish.integrations.transformers",
    "pufferfish.lab.models",
)  # fmt: skip

Values = Iterator[tuple[str, Any]]  # label and anything that `parts` understands


class Public(dict[str, Any]):
    """The public names of whichever version is on the path: `pf.Switch`, `pf["PowerSGD"]`."""

    def __missing__(self, name: str) -> Any:
        for known in filter(None, (name, ALIASES.get(name))):
            for place in PLACES:
                with contextlib.suppress(ImportError, AttributeError):
                    return pkgutil.resolve_name(f"{place}.{known}")
        raise AttributeError(f"there is no {name}; if it has a new name, add it to ALIASES")

    __getattr__ = __missing__


pf = Public()


# Cases


#: Number of workers (0: without a process group) → functions, each with its variants.
CASES: dict[int, list[tuple[Callable[..., Values], list[str]]]] = {0: [], 1: [], 2: [], 4: []}


def case(*sizes: int, each: Iterable[str] = ()) -> Callable[[Callable[..., Values]], Callable[..., Values]]:
    """Register a case: it runs on each number of workers, once or for each variant, and yields labelled values."""

    def register(run: Callable[..., Values]) -> Callable[..., Values]:
        for size in sizes:
            CASES[size].append((run, list(each)))
        return run

    return register


class Net(nn.Module):
    """Layers of one matrix, of grouped blocks, of gates, and of matrices that share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 48)
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.gru = nn.GRU(48, 32, batch_first=True)
        self.conv = nn.Conv1d(32, 48, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm1d(48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = x + self.attention(x, x, x)[0]
        x = self.norm(self.conv(self.gru(x)[0].mT)).mT
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x.mean(1))


def plain_net() -> nn.Sequential:
    """Linear layers and a convolution whose sizes two workers cannot share evenly."""
    with torch.random.fork_rng():  # `rebuild` calls it in the middle of a run
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(2, (4, 4)), nn.Conv2d(6, 33, 3), nn.Flatten(), nn.Linear(132, 65), nn.Tanh(),
            nn.Linear(65, 48), nn.Dropout(0.1), nn.Linear(48, 5),
        )  # fmt: skip


def muon(model: nn.Module) -> list[optim.Optimizer]:
    matrices, others = pf.muon_parameters(model)
    return [pf.Muon(matrices, lr=0.01), optim.AdamW(others, lr=1e-3)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[optim.Optimizer]]] = {
    "SGD": lambda model: [optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)],
    "AdamW": lambda model: [optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)],
    "Muon": muon,
    "plain SGD": lambda model: [optim.SGD(model.parameters(), lr=0.05)],
}
STATES = [f"{name}-{state}" for name in ("SGD", "AdamW", "Muon") for state in ("project", "reset")]

#: Every method → "matrix": under FSDP2 it compresses small matrices, too, if told to; "momentum": it has its own.
METHODS = {
    "NoCompression()": "", "BFloat16()": "", "Float16()": "", "PowerSGD(2)": "matrix", "AlternatingPowerSGD(2)": "matrix",
    "Atomo(1)": "matrix", "TopK(0.05)": "", "RandomK(0.05)": "", "RandomK(0.05,'own')": "", "RandomK(0.3,scale=True)": "",
    "BlockRandomK(0.1)": "", "BlockRandomK(0.1,'own')": "", "Threshold(1e-3)": "", "DGC(0.9,warm_up=2)": "momentum",
    "SparseLoCo(k=8,chunk=64)": "matrix momentum", "SignSGD()": "", "Signum()": "momentum", "EFSignSGD()": "",
    "OneBitSGD()": "matrix", "QSGD(levels=3,bucket=64)": "", "TernGrad()": "", "BlockInt8(64)": "", "BlockFP8(64)": "",
    "Int4(64)": "", "Int2(64)": "", "LoCo(64,reset=4)": "", "Accordion(PowerSGD(2),PowerSGD(1),every=2)": "matrix",
}  # fmt: skip
#: For cases that are slower, on four workers: one method for each collective and kind of state.
FEW = [
    "NoCompression()", "PowerSGD(2)", "TopK(0.05)", "RandomK(0.05)", "DGC(0.9,warm_up=2)", "BlockInt8(64)", "LoCo(64,reset=4)",
    "Accordion(PowerSGD(2),PowerSGD(1),every=2)",
]  # fmt: skip
SPECIAL = {  # method → options of `compress`
    "TopK(0.1)": {"scope": "global"},
    "RandomK(0.1,'own')": {"error_feedback": False},
    "QSGD()": {"exchange": "all_gather"},
    "Int4(64)": {"exchange": "all_gather", "nonfinite": "zero"},
    "BFloat16()": {"overlap": False},
    "PowerSGD(2)": {"smallest": 1024},
    "{'5':PowerSGD(1),'3.*':TopK(0.1),'*':BFloat16()}": {},
}


def method(text: str) -> Any:
    return eval(text, {"__builtins__": {}}, pf)


def batch(step: int, worker: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 * step + worker)
    return torch.randn(8, 6, 16, generator=g), torch.randint(5, (8,), generator=g)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def backward(model: nn.Module, step: int) -> None:
    x, y = batch(step, rank())
    nn.functional.cross_entropy(model(x), y).backward()


def train(model: nn.Module, optimizers: list[optim.Optimizer], steps: range) -> None:
    for step in steps:
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DDP | AveragedModel) else model


def all_state(model: nn.Module, optimizers: list[optim.Optimizer]) -> Any:
    """Weights, buffers, optimizer state and the settings of all groups, by name."""
    model = inner(model)
    names = {p: name for name, p in model.named_parameters()}
    kept = [{names[p]: state for p, state in o.state.items()} for o in optimizers]
    groups = [
        [{k: [names[p] for p in v] if k == "params" else v for k, v in g.items()} for g in o.param_groups]
        for o in optimizers
    ]
    return model.state_dict(), kept, groups


def decisions(plan: Any) -> Any:
    """A plan's ranks, layers and costs, without reasons and notes, which are texts."""
    entries = [(e.name, e.layer, e.type, e.shape, e.rank, e.before, e.after, e.error) for e in plan]
    totals = [
        (t.parameters, t.gradient_bytes, t.forward_macs, t.backward_macs) for t in (plan.before, plan.after)
    ]
    return plan.ranks, entries, totals, plan.shared_inputs


@case(0, each=("vgg19", "resnet18", "resnet50", "wide_resnet50_2", "lstm", "transformer"))
def plan_of_paper(name: str) -> Values:
    reference = pf.REFERENCES[name]
    with torch.device("meta"):
        model, example = reference.build(), reference.example()
    plan = pf.plan(model, 0.25, keep=reference.keep, example=example)
    yield "", decisions(plan)


@case(0, each=("unet3d", "vit_encoder", "bilstm_tagger", "moe"))
def plan_of_zoo(name: str) -> Values:
    model, (args, _) = ZOO[name].build(), ZOO[name].inputs()
    size = sum(p.numel() for p in model.parameters())
    yield "ratio", decisions(pf.plan(model, 0.25, example=args))
    for rule in (pf.Energy(0.5), pf.StableRank(), pf.Fixed(8), pf.Budget(params=0.6 * size)):
        yield type(rule).__name__, decisions(pf.resolve(pf.plan(model, rule), model))
    done = pf.factorize_(model, pf.plan(model, 0.25))
    yield "factors", (model.state_dict(), decisions(done), decisions(pf.plan_of(model)))


@case(0, each=("SGD", "AdamW", "Muon"))
def factorize_train_merge(name: str) -> Values:
    model = Net()
    optimizers = OPTIMIZERS[name](model)
    train(model, optimizers, range(2))
    done = pf.factorize_(model, pf.plan(model, 0.25, keep=["head"]), optimizers)
    yield "factorized", (all_state(model, optimizers), decisions(done))
    train(model, optimizers, range(2, 5))
    yield "trained", all_state(model, optimizers)
    pf.merge_(model, optimizers)
    yield "merged", all_state(model, optimizers)
    train(model, optimizers, range(5, 6))
    yield "end", all_state(model, optimizers)


@case(0, each=("SGD", "AdamW"))
def frobenius_decay(name: str) -> Values:
    model = Net()
    optimizers = OPTIMIZERS[name](model)
    pf.FrobeniusDecay(model, optimizers, strength=0.1)
    pf.factorize_(model, pf.plan(model, 0.25), optimizers)
    train(model, optimizers, range(3))
    yield "", all_state(model, optimizers)


@case(0, 1, 2, 4, each=STATES)
def switch(variant: str) -> Values:
    name, state = variant.split("-")
    model: nn.Module = DDP(Net()) if dist.is_initialized() else Net()
    optimizers = OPTIMIZERS[name](inner(model))
    moved = pf.Switch(rank=0.25, keep=["head"], when=pf.AtStep(2), back=pf.AtStep(4), state=state)
    for step in range(6):
        if moved.step(model, optimizers, step=step):
            yield f"step {step}", (all_state(model, optimizers), decisions(moved.report.plan))
        train(model, optimizers, range(step, step + 1))
    yield "end", all_state(model, optimizers)


@case(0, 2)
def switch_when_ranks_settle() -> Values:
    model: nn.Module = DDP(Net()) if dist.is_initialized() else Net()
    optimizers = OPTIMIZERS["AdamW"](inner(model))
    ema = AveragedModel(inner(model), multi_avg_fn=get_ema_multi_avg_fn(0.8))
    moved = pf.Switch(when=pf.RanksSettle(every=1, window=3, span=2, tolerance=0.5), keep=["head"])
    for step in range(8):
        if moved.step(model, optimizers, step=step, total=30, also=[ema]):
            yield "switched", (step, moved.initial, moved.history, decisions(moved.report.plan))
            yield "average", ema.module.state_dict()
        train(model, optimizers, range(step, step + 1))
        ema.update_parameters(inner(model))
    yield "end", (all_state(model, optimizers), ema.module.state_dict())


def shard(model: nn.Module, mesh: Any = None) -> None:
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)


@case(2, each=STATES)
def rebuild(variant: str) -> Values:
    name, state = variant.split("-")
    model: nn.Module = plain_net()
    shard(model)
    optimizers = OPTIMIZERS[name](model)
    moved = pf.Switch(rank=0.25, when=pf.AtStep(2), state=state)
    for step in range(4):
        before = model
        model, optimizers = moved.rebuild(model, optimizers, build=plain_net, shard=shard, step=step)
        if model is not before:
            yield "switched", (all_state(model, optimizers), decisions(moved.report.plan))
        train(model, optimizers, range(step, step + 1))
    yield "end", all_state(model, optimizers)


# Compression


def sgd(text: str, model: nn.Module) -> list[optim.Optimizer]:
    return OPTIMIZERS["plain SGD" if "momentum" in METHODS.get(text, "") else "SGD"](inner(model))


def compress(model: nn.Module, chosen: Any, **options: Any) -> Any:
    """`pf.compress`, in whose earlier versions the settings are arguments."""
    if "settings" in inspect.signature(pf.compress).parameters:
        own = {k: v for k, v in options.items() if k in ("optimizer", "replicas")}
        rest = {k: v for k, v in options.items() if k not in own}
        return pf.compress(model, chosen, settings=pf.Settings(**rest), **own)
    return pf.compress(model, chosen, **options)


def compressed(text: str, model: nn.Module, **options: Any) -> Values:
    optimizers = sgd(text, model)
    hook = compress(model, method(text), optimizer=optimizers, **options)
    train(model, optimizers, range(5))
    backward(model, 5)
    yield "gradients", {name: p.grad for name, p in model.named_parameters()}
    optimizers[0].step()
    yield "weights", inner(model).state_dict()
    yield "bytes", hook.meter.wire_bytes


def ddp_net() -> DDP:
    return DDP(plain_net(), bucket_cap_mb=0.02)


def replicas_net() -> tuple[nn.Module, dict[str, Any]]:
    """A model sharded inside each of two replicas, and what `compress` needs for it."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = plain_net()
    shard(model, mesh["shard"])
    return model, {"replicas": mesh["replicate"].get_group()}


@case(2, each=METHODS)
def ddp(text: str) -> Values:
    yield from compressed(text, ddp_net(), smallest=0)


@case(4, each=FEW)
def hierarchy(text: str) -> Values:
    """Without the bytes of each worker: which of a machine sends them is no promise."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = compressed(text, ddp_net(), smallest=0, hierarchy="node")
    yield from ((label, value) for label, value in found if label != "bytes")


@case(2, each=METHODS)
@case(4, each=FEW)
def fsdp2(text: str) -> Values:
    model, options = replicas_net()
    yield from compressed(text, model, **options, **({"smallest": 0} if "matrix" in METHODS[text] else {}))


@case(2, each=SPECIAL)
def ddp_options(text: str) -> Values:
    yield from compressed(text, ddp_net(), **{"smallest": 0} | SPECIAL[text])


@case(2, each=("nan", "zero"))
def gradients_that_are_not_finite(result: str) -> Values:
    """Of one worker in one step, which all workers skip; what was left over before is sent later."""
    model = ddp_net()
    compress(model, method("TopK(0.05)"), smallest=0, nonfinite=result)
    optimizers = OPTIMIZERS["SGD"](model.module)
    guard = pf.FiniteGuard(model, on_bad="skip")
    for step in range(4):
        x, y = batch(step, rank())
        x[0] *= float("inf") if (step, rank()) == (2, 1) else 1.0
        nn.functional.cross_entropy(model(x), y).backward()
        if guard():
            optimizers[0].step()
        optimizers[0].zero_grad()
    yield "", (all_state(model, optimizers), guard.skipped)


def outer(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


@case(2, each=METHODS)
def local_steps(text: str) -> Values:
    chosen = (lambda params: optim.SGD(params, lr=0.1)) if "momentum" in METHODS[text] else outer
    yield from locally(pf.LocalSteps(2, outer=chosen, method=method(text)))


SCHEDULES = {
    "plain": {"h": 3},
    "streaming": {"h": 2, "fragments": 2, "delay": 1},
    "three fragments": {"h": 4, "fragments": 3},
}


@case(2, 4, each=SCHEDULES)
def local_schedules(name: str) -> Values:
    yield from locally(pf.LocalSteps(**SCHEDULES[name], method=method("Int4(64)")))


def locally(local: Any) -> Values:
    model = Net()
    optimizers = OPTIMIZERS["AdamW"](model)
    local.start(model)
    for step in range(6):
        train(model, optimizers, range(step, step + 1))
        if local.step(model):
            yield f"after {step + 1}", model.state_dict()
    local.sync(model)
    yield "end", (all_state(model, optimizers), local.meter.wire_bytes)


@case(0, each=METHODS)
def simulated(text: str) -> Values:
    """Also resumed, by as many workers and by fewer."""
    model, saved = plain_net(), None
    for size in (3, 3, 2):
        workers = pf.Simulated(pf.Settings(method(text), smallest=0), size)
        if saved is not None:
            workers.load_state_dict(copy.deepcopy(saved))
        means = []
        for step in range(6):
            given = []
            for worker in range(size):
                model.zero_grad()
                x, y = batch(step // 2, worker)
                nn.functional.cross_entropy(model(x), y).backward()
                given.append({name: p.grad.clone() for name, p in model.named_parameters()})
            means.append(workers.average(given))
        yield f"{size} workers" + (" resumed" if saved else ""), (means, workers.meter.wire_bytes)
        saved = saved or workers.state_dict()


@case(2, each=(*FEW[1:], "OneBitSGD()"))
def compression_through_a_switch(text: str) -> Values:
    """Error feedback of what stays is kept; then another method takes over what is left."""
    model = ddp_net()
    optimizers = sgd(text, model)
    hook = compress(model, method(text), optimizer=optimizers, smallest=0)
    train(model, optimizers, range(2))
    pf.Switch(rank=0.25, when=pf.AtStep(0)).step(model, optimizers, step=2)
    train(model, optimizers, range(2, 4))
    yield "switched", all_state(model, optimizers)
    hook.use(method("BlockInt8(64)"))
    optimizers[0].param_groups[0]["lr"] /= 4
    train(model, optimizers, range(4, 6))
    yield "other method", all_state(model, optimizers)


@case(4)
def exact() -> Values:
    model = ddp_net()
    pf.exact_(model)
    optimizers = OPTIMIZERS["SGD"](model.module)
    train(model, optimizers, range(3))
    yield "", all_state(model, optimizers)


# Checkpoints and files


class Job:
    """A training job of a kind: plain, fsdp2, replicas (of FSDP2), local (steps), or DDP with a method by its text."""

    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        self.kind, self.model, self.compressor = kind, plain_net(), None
        torch.manual_seed(seed + rank())
        for p in self.model.parameters():
            p.data += seed  # what was saved has to come back
        self.switch = pf.Switch(rank=0.25, when=pf.AtStep(3))
        if kind == "fsdp2":
            if seed and (plan := pf.Checkpoint.plan_in(folder)):
                pf.reshape_(self.model, plan)
            shard(self.model)
        elif kind == "replicas":
            self.model, options = replicas_net()
            self.compressor = compress(self.model, method("PowerSGD(2)"), smallest=0, **options)
        elif kind == "local":
            self.compressor = pf.LocalSteps(2, outer=outer, method=method("Int4(64)"))
            if not seed:
                self.compressor.start(self.model)
        elif kind != "plain":
            self.model = DDP(self.model)
            self.compressor = compress(self.model, method(kind), smallest=0)
        self.optimizers = OPTIMIZERS["AdamW"](inner(self.model))
        self.schedule = optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.9)
        self.checkpoint = pf.Checkpoint(
            folder, self.model, self.optimizers, switch=self.switch, scheduler=self.schedule, compressor=self.compressor
        )  # fmt: skip

    def go(self, start: int, stop: int) -> Any:
        """Train, and return all that should be the same after a resume."""
        for step in range(start, stop):
            if self.kind == "fsdp2":
                self.model, _ = self.switch.rebuild(
                    self.model, self.optimizers, build=plain_net, shard=shard, step=step
                )
            elif self.kind not in ("local", "replicas"):
                self.switch.step(self.model, self.optimizers, step=step)
            train(self.model, self.optimizers, range(step, step + 1))
            self.schedule.step()
            if self.kind == "local":
                self.compressor.step(self.model)
        return all_state(self.model, self.optimizers), torch.rand(2)


def resumed(kind: str) -> Values:
    """Saved before the switch at step 3, or after it, and resumed by a new job."""
    for stop in (2, 4):
        folder = FOLDER / f"{kind} {stop} {dist.is_initialized()}"
        first = Job(folder, kind, 0)
        first.go(0, stop)
        first.checkpoint.save(step=stop)
        first.checkpoint.close()
        yield f"uninterrupted {stop}", first.go(stop, 6)
        second = Job(folder, kind, 7)
        at = second.checkpoint.resume()
        yield f"position {stop}", (at.position, at.reset)
        yield f"resumed {stop}", second.go(stop, 6)
        second.checkpoint.close()


@case(0)
def checkpoint() -> Values:
    yield from resumed("plain")


@case(2, each=("PowerSGD(2)", "TopK(0.05)", "LoCo(64,reset=4)", "fsdp2", "replicas", "local"))
def checkpoint_of_workers(kind: str) -> Values:
    yield from resumed(kind)


@case(0)
def files() -> Values:
    """`save`, `load`, `convert` and `merge`: names of files and tensors, and the tensors."""
    model, folder = Net(), FOLDER / "files"
    optimizers = OPTIMIZERS["AdamW"](model)
    train(model, optimizers, range(2))
    dense = copy.deepcopy(model)
    plan = pf.plan(dense, 0.25, keep=["head"])
    folder.mkdir()
    torch.save({"model": dense.state_dict(), "optimizer": optimizers[0].state_dict()}, folder / "dense.pt")
    done = pf.factorize_(model, plan, optimizers)
    pf.save(model, folder / "saved")
    yield "saved", tensors_in(folder / "saved")
    fresh = Net()
    yield "loaded", (decisions(pf.load(fresh, folder / "saved")), fresh.state_dict())
    yield "factorized state dict", pf.factorize_state_dict(dense.state_dict(), plan)
    yield "merged state dict", pf.merge_state_dict(model.state_dict(), done)
    save_file(dense.state_dict(), folder / "dense.safetensors")
    yield (
        "converted",
        decisions(pf.convert(folder / "dense.safetensors", plan, folder / "low" / "x.safetensors")),
    )
    yield "converted tensors", tensors_in(folder / "low")
    pf.merge(folder / "low" / "x.safetensors", folder / "again" / "x.safetensors")
    yield "merged", tensors_in(folder / "again")
    pf.merge(folder / "saved", folder / "merged folder")
    yield "merged folder", tensors_in(folder / "merged folder")
    pf.convert(folder / "dense.pt", plan, folder / "low.pt")
    yield "converted with optimizer", torch.load(folder / "low.pt", weights_only=True)


@case(0, each=("hf_mixtral", "hf_gpt2"))
def files_of_transformers(name: str) -> Values:
    model, folder = ZOO[name].build(), FOLDER / name
    model.save_pretrained(folder / "dense")
    plan = pf.plan(model, 0.25, keep=["lm_head"])
    pf.convert(folder / "dense", plan, folder / "low", max_shard=60_000)
    yield "converted", tensors_in(folder / "low")
    yield "loaded", pf.from_pretrained(folder / "low").state_dict()
    pf.merge(folder / "low", folder / "again", max_shard=60_000)
    yield "merged", tensors_in(folder / "again")


def tensors_in(folder: Path) -> Any:
    return {path.name: load_file(path) if path.suffix == ".safetensors" else "" for path in folder.iterdir()}


# Digests


def parts(value: Any) -> Iterator[Any]:
    """A nested value as a sequence of tensors and texts."""
    if isinstance(value, DTensor):
        yield from parts(value.full_tensor())
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}"
        yield value.detach().reshape(-1).contiguous()
    elif isinstance(value, Mapping):
        yield "{"
        for key in sorted(value, key=str):
            yield str(key)
            yield from parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}"
        for x in value:
            yield from parts(x)
    elif isinstance(value, float):
        yield torch.tensor([value], dtype=torch.float64)
    elif value is None or isinstance(value, bool | int | str):
        yield repr(value)
    else:
        raise TypeError(f"no digest of a {type(value).__name__}")


def digest(value: Any) -> str:
    h = hashlib.sha256()
    for part in parts(value):
        h.update(part.encode() if isinstance(part, str) else part.view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def numbers(value: Any) -> str:
    """For a value that may differ a little: its norm and its products with fixed random directions of length 1."""
    found = [x.double() for x in parts(value) if not isinstance(x, str) and x.is_floating_point()]
    x = torch.cat(found)
    g = torch.Generator().manual_seed(0)
    directions = [torch.randn(len(x), generator=g, dtype=torch.float64) for _ in range(4)]
    return ",".join(f"{float(y):.12g}" for y in [x.norm(), *(x @ d / d.norm() for d in directions)])


def tolerance(name: str) -> float | None:
    return next((most for pattern, (most, _) in MAY_DIFFER.items() if fnmatch.fnmatch(name, pattern)), None)


def same(name: str, old: str, new: str) -> bool:
    if old == new or tolerance(name) is None:
        return old == new
    a, b = (torch.tensor([float(x) for x in line.split(",")], dtype=torch.float64) for line in (old, new))
    return a.shape == b.shape and float((a - b).abs().max()) <= float(tolerance(name) or 0) * float(a[0])


# Running them

FOLDER = Path()


def run_cases(size: int, only: str, folder: str) -> dict[str, str]:
    """Name → digest, or error, of all cases for this number of workers."""
    global FOLDER
    FOLDER = Path(folder)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    for run, variants in CASES[size]:
        for variant in variants or [""]:
            name = "/".join(filter(None, (f"{run.__name__}@{size}" if size else run.__name__, variant)))
            if not fnmatch.fnmatch(name, only):
                continue
            torch.manual_seed(0)
            try:
                for label, value in run(*([variant] if variant else [])):
                    full = f"{name}/{label}".replace(" ", "-").rstrip("/")
                    found[full] = digest(value) if tolerance(full) is None else numbers(value)
            except Exception as error:
                found[name] = f"error {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found


def run_worker(worker: int, size: int, only: str, folder: str) -> None:
    Path(folder, f"{size}-{worker}.json").write_text(json.dumps(run_cases(size, only, folder)))


def print_digests(only: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(0, only, folder)
        for size in (1, 2, 4):
            try:
                in_processes(run_worker, size, only, folder, limit=400)
            except Exception as error:
                results[f"workers@{size}"] = f"error {type(error).__name__}: {str(error).strip()[-200:]!r}"
                continue
            found = [json.loads(Path(folder, f"{size}-{worker}.json").read_text()) for worker in range(size)]
            for name in sorted({name for one in found for name in one}):
                own = [one.get(name, "error: not on this worker") for one in found]
                errors = [x for x in own if x.startswith("error")]
                alike = errors or (own if own[1:] == own[:-1] else [])
                results[name] = alike[0] if alike else ",".join(own) if tolerance(name) else digest(own)
    for name, text in results.items():
        print(name, text)


def compare(sources: list[str], only: str) -> int:
    """Run both sources at once; print the cases that differ or fail."""
    jobs = []
    for source in sources:
        if not Path(source, "pufferfish").is_dir():
            raise SystemExit(f"{source}: it has no folder pufferfish; pass the folder src of a checkout")
        environment = os.environ | {"PYTHONPATH": str(Path(source).resolve())}
        command = [sys.executable, __file__, "--only", only]
        jobs.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    outputs, errors = zip(*(job.communicate() for job in jobs), strict=True)
    if any(job.returncode for job in jobs):
        print("a run failed:", *errors, sep="\n")
        return 1
    old, new = ({k: v for k, _, v in (x.partition(" ") for x in text.splitlines())} for text in outputs)
    wrong = [
        name
        for name in old | new
        if "error" in old.get(name, "error") + new.get(name, "error") or not same(name, old[name], new[name])
    ]
    for name in wrong:
        print(f"{name}\n  old {old.get(name, 'is missing')}\n  new {new.get(name, 'is missing')}")
    print(f"{len(old | new)} digests, {len(wrong)} differ or failed")
    return 1 if wrong or not old else 0


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="*", metavar="SRC", help="two folders src: the old and the new one")
    parser.add_argument("--only", default="*", metavar="PATTERN")
    arguments = parser.parse_args()
    if len(arguments.sources) not in (0, 2):
        parser.error("pass two folders, or none")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if arguments.sources:
        return compare(arguments.sources, arguments.only)
    print_digests(arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
