"""A small network in two replicas of two shards: shared by the tests of the FSDP2 hook."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pufferfish.compression import (
    DGC,
    QSGD,
    Accordion,
    AlternatingPowerSGD,
    Atomo,
    BFloat16,
    BlockFP8,
    BlockInt8,
    BlockRandomK,
    EFSignSGD,
    Float16,
    Int2,
    Int4,
    LoCo,
    NoCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    Settings,
    SignSGD,
    Signum,
    Simulated,
    SparseLoCo,
    TernGrad,
    Threshold,
    TopK,
)
from pufferfish.compression.fsdp2_hook import FSDP2Hook, compress_fsdp2
from pufferfish.layers.names import own_name

METHODS: dict[str, Any] = {
    "none": NoCompression(),
    "bf16": BFloat16(),
    "fp16": Float16(),
    "topk": TopK(0.1),
    "random": RandomK(0.1),
    "random, own": RandomK(0.1, "own"),
    "block random": BlockRandomK(0.1),
    "sign": SignSGD(),
    "signum": Signum(),
    "ef-sign": EFSignSGD(),
    "qsgd": QSGD(levels=3, bucket=8),
    "terngrad": TernGrad(),
    "threshold": Threshold(1e-3),
    "dgc": DGC(0.9, warm_up=2),
    "int8": BlockInt8(16),
    "fp8": BlockFP8(16),
    "int4": Int4(16),
    "int2": Int2(16),
    "loco": LoCo(16),
    "several": {"first": TopK(0.1), "b?": SignSGD()},  # that of the outermost module is sent uncompressed
}


#: Methods for matrices, in settings for matrices of a few rows.
MATRIX_METHODS: dict[str, Any] = {
    "powersgd": PowerSGD(1),
    "powersgd, later": PowerSGD(1, start=2),
    "alternating": AlternatingPowerSGD(1),
    "atomo": Atomo(1),
    "onebit": OneBitSGD(),
    "accordion": Accordion(PowerSGD(2), PowerSGD(1), every=1),
    "accordion, elements": Accordion(TopK(0.5), TopK(0.1), every=1),
    "sparseloco": SparseLoCo(k=4, chunk=16),
    "powersgd and topk": {"b?": PowerSGD(1), "*": TopK(0.1)},
}


class Net(nn.Module):
    """Sizes are not multiples of two shards; `maybe` is used where the call says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 11)
        self.b0 = checkpoint_wrapper(nn.Sequential(nn.Linear(11, 13), nn.Tanh()))
        self.b1 = nn.Sequential(nn.LayerNorm(13), nn.Linear(13, 5))
        self.maybe = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, maybe: bool = False, spoil: float = 1.0) -> Tensor:
        x = self.first(x).tanh()
        if spoil != 1.0:
            x.register_hook(
                lambda g: torch.cat([g[:, :1] * spoil, g[:, 1:]], 1)
            )  # its first row: shard 0 only
        x = self.b1(self.b0(x))
        return self.head(self.maybe(x) if maybe else x)


class MatrixNet(Net):
    """Of two shards, one has more rows of most parameters; the second one has none of the head."""

    def __init__(self) -> None:
        super().__init__()
        del self.maybe
        conv = nn.Sequential(nn.Linear(11, 12), nn.Unflatten(1, (3, 4)), nn.Conv1d(3, 7, 2), nn.Flatten())
        self.b0 = checkpoint_wrapper(conv)
        self.b1 = nn.Sequential(nn.LayerNorm(21), nn.Linear(21, 5))
        self.head = nn.Linear(5, 1)


def sharded(mesh: DeviceMesh, net: nn.Module | None = None, **options: Any) -> Net:
    net = Net() if net is None else net
    assert isinstance(net, Net)
    for block in (net.first, net.b0, list(net.b1)):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def hooked(
    mesh: DeviceMesh, method: Any, net: nn.Module | None = None, **options: Any
) -> tuple[Net, FSDP2Hook]:
    model = sharded(mesh["shard"], net)
    return model, compress_fsdp2(model, lambda: Settings(method, **options), mesh["replicate"].get_group())


def loss(model: nn.Module, step: int, rank: int, **options: Any) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x, **options).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def grads(model: nn.Module) -> dict[str, Tensor]:
    """This worker's shards."""
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])


def tensors(hook: FSDP2Hook) -> dict[str, dict[str, Tensor]]:
    """The hook's state: module → key → tensor. Each module's shard is one row."""
    found = {}
    for name, module in hook.state_dict()["modules"].items():
        parts = [module["state"]["shared"], module["state"]["own"]]
        found[name] = {key: x for part in parts for row in part.values() for key, x in row.items()}
    return found


def equal(a: Any, b: Any) -> bool:
    """Whether two results of `tensors` are bit-identical."""
    return a.keys() == b.keys() and all(
        a[n].keys() == b[n].keys() and all(torch.equal(x, b[n][key]) for key, x in a[n].items()) for n in a
    )


def by_simulated_workers(model: nn.Module, mesh: DeviceMesh, method: Any, **options: Any) -> None:
    """A slow reference: both replicas get both shards and simulate two workers, of rows if the method is for matrices."""
    group, shard = mesh["replicate"].get_group(), mesh["shard"].get_local_rank()
    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule) or path == "b1.1":
            continue
        outer = own_name(path) or "(root)"
        mine = Settings(method).choose([outer])[outer]
        blocks = {"b1.0": ["b1.0", "b1.1"], "(root)": ["head"]}.get(outer, [outer])
        params = {
            own_name(n): p for n, p in model.named_parameters() if own_name(n).startswith(tuple(blocks))
        }
        simulated = Simulated(Settings(mine, **options), 2)

        def average(flat: Tensor, params: Any = params, simulated: Any = simulated, mine: Any = mine,
                    outer: str = outer) -> None:  # fmt: skip
            everyone = [torch.empty_like(flat) for _ in range(2)]
            dist.all_gather(everyone, flat, group=group)
            if mine.layout != "matrices":
                key = f"{outer}[{shard}/2]"
                flat.copy_(simulated.average([{key: x} for x in everyone])[0][key])
                return
            begin, places = 0, {}
            for name, p in params.items():
                local, by_rows = p.to_local().shape, p.placements[0].dim == 0
                if local.numel():
                    places[f"{name}[{shard}/2]"] = slice(begin, begin + local.numel()), local
                begin += math.ceil(p.shape[0] / 2) * p.shape[1:].numel() if by_rows else local.numel()
            assert begin == len(flat)
            if places:
                rows = [{k: x[s].view(shape) for k, (s, shape) in places.items()} for x in everyone]
                for key, mean in simulated.average(rows)[0].items():
                    flat[places[key][0]] = mean.flatten()

        module.set_all_reduce_hook(average)


def gradients_are_those_of_simulated_workers(mesh: DeviceMesh, rank: int, name: str, **options: Any) -> None:
    """Bit for bit, with error feedback: two terms have one sum."""
    build, method = (MatrixNet if name in MATRIX_METHODS else Net), (METHODS | MATRIX_METHODS)[name]
    smallest = options.pop("smallest", 0)
    given = {"smallest": smallest} if name in MATRIX_METHODS else {}
    model, _ = hooked(mesh, method, build(), seed=3, **given, **options)
    reference = sharded(mesh["shard"], build())
    by_simulated_workers(reference, mesh, method, seed=3, smallest=smallest, **options)
    for step in range(4):
        for x in (model, reference):
            x.zero_grad()
            loss(x, step, rank).backward()
        found, expected = grads(model), grads(reference)
        assert found.keys() == expected.keys()
        for n, g in found.items():
            assert torch.equal(g, expected[n]), (name, step, n)
