"""Frobenius decay against plain references: autograd of ½λ‖UV‖², and a decoupled loop by hand."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from matrices import forced
from operations import Operations
from processes import in_processes
from pufferfish.layers import LowRank
from pufferfish.lowrank import frobenius_decay
from pufferfish.lowrank.frobenius_decay import FrobeniusDecay
from pufferfish.planning.timing import capture_cuda_graph

LAMBDA, OWN = 0.03, 0.05  # large, so that a wrong one cannot hide
Make = Callable[..., optim.Optimizer]

COUPLED: dict[str, Make] = {
    "SGD nesterov": lambda p, **o: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, **o),
    "SGD dampening, foreach": lambda p, **o: optim.SGD(p, 0.05, momentum=0.9, dampening=0.5, foreach=True, **o),
    "SGD maximize": lambda p, **o: optim.SGD(p, 0.01, momentum=0.5, maximize=True, **o),
    "SGD fused": lambda p, **o: optim.SGD(p, 0.05, momentum=0.9, fused=True, **o),
    "Adam": lambda p, **o: optim.Adam(p, 1e-2, **o),
    "Adam fused maximize": lambda p, **o: optim.Adam(p, 1e-2, fused=True, maximize=True, **o),
    "RMSprop": lambda p, **o: optim.RMSprop(p, 1e-2, momentum=0.5, centered=True, **o),
    "Adagrad": lambda p, **o: optim.Adagrad(p, 1e-2, **o),
    "Adadelta": lambda p, **o: optim.Adadelta(p, 1.0, **o),
    "NAdam": lambda p, **o: optim.NAdam(p, 1e-2, **o),
}  # fmt: skip
DECOUPLED: dict[str, Make] = {
    "AdamW": lambda p, **o: optim.AdamW(p, 1e-2, **o),
    "AdamW amsgrad, foreach": lambda p, **o: optim.AdamW(p, 1e-2, amsgrad=True, foreach=True, **o),
    "AdamW fused": lambda p, **o: optim.AdamW(p, 1e-2, fused=True, **o),
    "AdamW, tensor as LR": lambda p, **o: optim.AdamW(
        p, torch.tensor(1e-2, dtype=torch.float64), capturable=False, foreach=False, **o
    ),
    "AdamW maximize": lambda p, **o: optim.AdamW(p, 1e-2, maximize=True, **o),
    "RAdam decoupled": lambda p, **o: optim.RAdam(p, 1e-2, decoupled_weight_decay=True, **o),
}
EVERY = COUPLED | DECOUPLED


class Net(nn.Module):
    """One matrix, grouped blocks, the transposed kind, gates, and a low-rank layer made of low-rank layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 16)
        self.attention = nn.MultiheadAttention(16, 2, bias=False, batch_first=True)
        self.lstm = nn.LSTM(16, 12, batch_first=True)
        self.conv = nn.Conv1d(12, 16, 3, padding=1, groups=2)
        self.back = nn.ConvTranspose1d(16, 12, 3, padding=1, groups=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.back(torch.tanh(self.conv(self.lstm(x)[0].mT))).mT
        return self.head(x.mean(1))


def low_rank() -> Net:
    torch.manual_seed(0)
    net = Net().double()
    pf.factorize_(net, forced(net, rank=3, keep=["head"]))
    assert {type(m).__name__ for m in net.children() if isinstance(m, LowRank)} == {
        "LowRankLinear", "LowRankMultiheadAttention", "LowRankLSTM", "LowRankConv", "LowRankConvTranspose",
    }  # fmt: skip
    return net


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, 12, generator=generator)
    return x.to(dtype), torch.randint(5, (8,), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, next(model.parameters()).dtype)
    return F.cross_entropy(model(x), y)


def is_factor(name: str) -> bool:
    return name.endswith(("down.weight", "up.weight"))


def penalty_gradients(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """∇½‖UV‖² of all outermost low-rank layers, by autograd through the multiplied-out weights."""
    layers = [m for m in model.children() if isinstance(m, LowRank)]
    half_square = sum(
        (m.product(name).square().sum() / 2 for m in layers for name in m.ranks), torch.zeros(())
    )
    factors = [p for name, p in model.named_parameters() if is_factor(name)]
    return dict(zip(factors, torch.autograd.grad(half_square, factors), strict=True))


def two_groups(model: nn.Module, make: Make) -> optim.Optimizer:
    """The reference's optimizer: no decay of its own on the factors."""
    named = list(model.named_parameters())
    others = [p for name, p in named if not is_factor(name)]
    factors = [p for name, p in named if is_factor(name)]
    return make([{"params": others}, {"params": factors, "weight_decay": 0.0}], weight_decay=OWN)


def reference_step(
    model: nn.Module, optimizer: optim.Optimizer, step: int, decoupled: bool, clip: float | None = None
) -> None:
    """The slow way: the penalty's gradient by autograd, into the gradient or off the weights."""
    optimizer.zero_grad()
    loss_of(model, step).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for p, pull in penalty_gradients(model).items():
        group = groups[p]
        if decoupled:
            with torch.no_grad():
                p -= group["lr"] * LAMBDA * pull
        else:
            assert p.grad is not None
            p.grad += (-LAMBDA if group["maximize"] else LAMBDA) * pull
    optimizer.step()


def our_step(
    model: nn.Module, optimizer: optim.Optimizer, step: int, clip: float | None = None, scaler: Any = None
) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, step)
    (scaler.scale(loss) if scaler else loss).backward()
    if clip is not None:
        if scaler:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()


def assert_same(model: nn.Module, other: nn.Module, tolerance: float = 1e-9) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def compare(name: str, ours: nn.Module, theirs: nn.Module, steps: int = 5, **options: Any) -> None:
    """Several steps of both, side by side."""
    make = EVERY[name]
    optimizer, other = make(ours.parameters(), weight_decay=OWN), two_groups(theirs, make)
    FrobeniusDecay(ours, optimizer, LAMBDA)
    before = copy.deepcopy(theirs)
    for step in range(steps):
        our_step(ours, optimizer, step, **options)
        reference_step(theirs, other, step, name in DECOUPLED, options.get("clip"))
        assert_same(ours, theirs)
    assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_equals_the_reference(name: str) -> None:
    compare(name, low_rank(), low_rank())


@pytest.mark.parametrize("name", ["SGD nesterov", "Adam fused maximize", "AdamW", "AdamW fused"])
@pytest.mark.parametrize("clip", [None, 0.05])  # with clipping the gradients come unscaled
def test_it_acts_at_the_right_loss_scale(name: str, clip: float | None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    compare(name, low_rank(), low_rank(), clip=clip, scaler=scaler)
    assert scaler.get_scale() > 256


@pytest.mark.parametrize("name", ["SGD nesterov", "SGD fused", "AdamW", "AdamW fused"])
def test_a_step_skipped_for_its_gradients_changes_nothing(name: str) -> None:
    model = low_rank()
    optimizer = EVERY[name](model.parameters(), weight_decay=OWN)
    FrobeniusDecay(model, optimizer, LAMBDA)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    our_step(model, optimizer, 0, scaler=scaler)
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["state"])
    scaler.scale(loss_of(model, 1)).backward()
    model.fc.up.weight.grad[0, 0] = float("inf")  # type: ignore[union-attr, index]
    scaler.step(optimizer)
    scaler.update()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i]["step"], state[i]["step"]) for i in state if "step" in state[i])


def test_a_closure_computes_the_gradients_first() -> None:
    for name in ("SGD nesterov", "AdamW"):
        ours, theirs = low_rank(), low_rank()
        make = EVERY[name]
        optimizer, other = make(ours.parameters(), weight_decay=OWN), two_groups(theirs, make)
        FrobeniusDecay(ours, optimizer, LAMBDA)
        for step in range(4):

            def closure(step: int = step, ours: nn.Module = ours, optimizer: Any = optimizer) -> float:
                optimizer.zero_grad()
                loss = loss_of(ours, step)
                loss.backward()
                return loss.item()

            expected = loss_of(theirs, step).item()
            given = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
            assert given == pytest.approx(expected)
            reference_step(theirs, other, step, name in DECOUPLED)
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW"])
def test_groups_keep_their_settings_and_their_schedulers(name: str) -> None:
    def groups(model: nn.Module, down: float, up: float) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": [p for n, p in named if not is_factor(n)]},
            {"params": [p for n, p in named if n.endswith("down.weight")], "lr": 0.03, "weight_decay": down},
            {"params": [p for n, p in named if n.endswith("up.weight")], "lr": 0.01, "weight_decay": up},
        ]

    ours, theirs = low_rank(), low_rank()
    optimizer = EVERY[name](groups(ours, OWN, 3 * OWN), weight_decay=OWN)
    other = EVERY[name](groups(theirs, 0.0, 0.0), weight_decay=OWN)
    schedulers = [optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in (optimizer, other)]
    FrobeniusDecay(ours, optimizer, LAMBDA)
    for step in range(3):
        our_step(ours, optimizer, step)
        reference_step(theirs, other, step, name in DECOUPLED)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(ours, theirs)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [OWN, OWN, 3 * OWN]


class Shrinking(optim.Optimizer):
    """Not torch's: nobody can know that its decay is decoupled."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "maximize": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad.sign(), alpha=group["lr"])


def test_two_optimizers_of_two_kinds_and_an_unknown_one() -> None:
    """Muon takes matrices only, as those who use it do; both of torch's own are known to be decoupled."""

    def pair(model: nn.Module, own: float) -> list[optim.Optimizer]:
        named = list(model.named_parameters())
        matrices = [p for n, p in named if is_factor(n) and n.startswith(("fc", "attention"))]
        curved = [p for n, p in named if is_factor(n) and n.startswith(("lstm", "conv", "back"))]
        groups = [
            {"params": [p for n, p in named if not is_factor(n)]},
            {"params": curved, "weight_decay": own},
        ]
        return [
            optim.Muon(matrices, 0.01, weight_decay=own),
            optim.SGD(groups, 0.05, momentum=0.9, weight_decay=OWN),
        ]

    ours, theirs = low_rank(), low_rank()
    optimizers, others = pair(ours, OWN), pair(theirs, 0.0)
    FrobeniusDecay(ours, optimizers, LAMBDA)
    for model in (ours, theirs):
        loss_of(model, 0).backward()
    for p, pull in penalty_gradients(theirs).items():
        assert p.grad is not None
        if any(p is q for q in others[0].param_groups[0]["params"]):
            with torch.no_grad():
                p -= 0.01 * LAMBDA * pull
        else:
            p.grad += LAMBDA * pull
    for one in (*optimizers, *others):
        one.step()
    assert_same(
        ours, theirs
    )  # one step: Muon computes in bf16, which would blow up the last bit's difference

    model, other_model = low_rank(), low_rank()
    with pytest.raises(TypeError, match=r"Shrinking.*decoupled="):
        FrobeniusDecay(model, Shrinking(model.parameters(), 1e-3, OWN))
    optimizer = Shrinking(model.parameters(), 1e-3, OWN)
    FrobeniusDecay(model, optimizer, LAMBDA, decoupled=True)
    reference = two_groups(other_model, lambda p, **o: Shrinking(p, 1e-3, **o))
    for step in range(3):
        our_step(model, optimizer, step)
        reference_step(other_model, reference, step, decoupled=True)
    assert_same(model, other_model)


@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW"])
def test_without_a_gradient_a_factor_is_left_alone(name: str) -> None:
    model = low_rank()
    model.fc.down.weight.requires_grad_(False)
    optimizer = EVERY[name](model.parameters(), weight_decay=OWN)
    FrobeniusDecay(model, optimizer, LAMBDA)
    down, up = model.fc.down.weight.detach().clone(), model.fc.up.weight.detach().clone()
    our_step(model, optimizer, 0)
    assert torch.equal(model.fc.down.weight, down)
    assert not torch.equal(model.fc.up.weight, up)


@pytest.mark.parametrize(
    "wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager")], ids=["plain", "compiled"]
)
@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW"])
def test_made_before_the_switch(name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Dense it does nothing, low-rank it is the reference, after `remove` it is gone."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5)).double()
    plain, model = copy.deepcopy(net), wrap(net)
    make = EVERY[name]
    optimizer, other = (make(m.parameters(), weight_decay=OWN) for m in (net, plain))
    decay = FrobeniusDecay(model, optimizer, LAMBDA)
    switch = pf.Switch(rank=4, keep=["3"], when=pf.AtStep(2))
    for step in range(4):
        if switch.step(model, optimizer, step=step):
            plain = copy.deepcopy(net)
            other = two_groups(plain, make)
            at = {id(p): q for p, q in zip(net.parameters(), plain.parameters(), strict=True)}
            for p, state in optimizer.state.items():
                other.state[at[id(p)]] = copy.deepcopy(state)
        our_step(model, optimizer, step)
        if step < 2:
            our_step(plain, other, step)
        else:
            reference_step(plain, other, step, name in DECOUPLED)
        assert_same(net, plain, 0.0 if step < 2 else 1e-9)
    decay.remove()
    for p, state in optimizer.state.items():
        other.state[at[id(p)]] = copy.deepcopy(state)
    other.param_groups[1]["weight_decay"] = OWN
    our_step(model, optimizer, 4)
    our_step(plain, other, 4)
    assert_same(net, plain)


def test_half_precision_weights_and_autocast_are_decayed_in_fp32() -> None:
    model = low_rank().to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    for net in (model, exact):
        optimizer = optim.SGD(net.parameters(), 0.0, weight_decay=0.0)
        FrobeniusDecay(net, optimizer, LAMBDA)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        with torch.autocast("cpu", torch.bfloat16, enabled=net is model):
            optimizer.step()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        # Within one bf16 rounding step: products in bf16 would be off by more.
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=4e-3, atol=0)  # type: ignore[union-attr]


def several(kinds: Iterable[Callable[[], nn.Module]], copies: int) -> nn.ModuleList:
    """`copies` low-rank layers of each kind, all of different weights."""
    torch.manual_seed(0)
    model = nn.ModuleList(kind() for kind in kinds for _ in range(copies)).double()
    embed = 3 if any(isinstance(m, nn.Embedding) for m in model) else None
    pf.factorize_(model, forced(model, rank=3, embed=embed))
    assert all(isinstance(m, LowRank) for m in model)
    return model


def zero_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # in the memory format of p


KINDS = {
    "linear": lambda: nn.Linear(12, 16),
    "grouped": lambda: nn.Conv2d(12, 16, 3, groups=2),
    "channels last": lambda: nn.Conv2d(12, 16, 3),
    "transposed": lambda: nn.ConvTranspose2d(12, 16, 3, groups=2),
    "embedding": lambda: nn.Embedding(24, 12),
    "gates": lambda: nn.LSTM(12, 12),
    "attention": lambda: nn.MultiheadAttention(12, 2),
}


@pytest.mark.parametrize("limit", [150, 2**23], ids=["some together", "all together"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_equal_shape(kind: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many share a product, each factor gets its own layer's decay."""
    monkeypatch.setattr(frobenius_decay, "_BATCH", limit)
    model = several([KINDS[kind]], 5)
    if kind == "channels last":
        model.to(memory_format=torch.channels_last)
        assert not all(p.is_contiguous() for p in model.parameters())
    optimizer = optim.SGD(model.parameters(), 0.0, weight_decay=OWN)
    FrobeniusDecay(model, optimizer, LAMBDA)
    zero_gradients(model)
    expected = {p: LAMBDA * pull for p, pull in penalty_gradients(model).items()}
    optimizer.step()
    for p, pull in expected.items():  # the optimizer adds OWN·p itself
        assert p.grad is not None
        torch.testing.assert_close(p.grad, pull - OWN * p, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["SGD nesterov", "SGD fused", "AdamW fused", "AdamW, tensor as LR"])
def test_more_layers_take_no_more_operations(name: str) -> None:
    """Nor is a value read on the host, which a CUDA graph could not do."""
    counts = []
    for copies in (2, 6):
        model = several([KINDS["linear"], KINDS["attention"]], copies)
        optimizer = EVERY[name](model.parameters(), weight_decay=OWN)
        decay = FrobeniusDecay(model, optimizer, LAMBDA)
        zero_gradients(model)
        optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
        optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        with Operations() as operations:
            decay._decay(optimizer)
        counts.append(len(operations.names))
        assert "_local_scalar_dense" not in operations.names
    assert counts[0] == counts[1] <= 60


def test_it_follows_the_model_and_keeps_no_layer_alive() -> None:
    """Dense, low-rank, dense, low-rank at another rank: between two steps, and twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12)).double()
    optimizer = optim.SGD(model.parameters(), 0.0, weight_decay=0.0)
    FrobeniusDecay(model, optimizer, LAMBDA)
    old: list[weakref.ref[nn.Module]] = []
    for rank in (2, 3, 2, 2):
        pf.factorize_(model, forced(model, rank=rank), optimizer)
        zero_gradients(model)
        optimizer.step()
        assert not any(ref() for ref in old)
        for p, pull in penalty_gradients(model).items():
            torch.testing.assert_close(p.grad, LAMBDA * pull)
        old = [weakref.ref(m.get_submodule(f)) for m in (model[0], model[2]) for f in ("down", "up")]
        pf.merge_(model, optimizer)
        if rank == 3:
            zero_gradients(model)
            optimizer.step()
            assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW"])
def test_in_a_cuda_graph(name: str) -> None:
    make: dict[str, Make] = {
        "SGD nesterov": EVERY["SGD nesterov"],
        "AdamW": lambda p, **o: optim.AdamW(p, 1e-2, capturable=True, **o),
    }
    ends = []
    for graph in (False, True):
        model = several([KINDS["linear"]], 5).to("cuda", torch.float32)
        optimizer = make[name](model.parameters(), weight_decay=OWN)
        FrobeniusDecay(model, optimizer, LAMBDA)
        zero_gradients(model)

        def step(optimizer: optim.Optimizer = optimizer, model: nn.Module = model) -> None:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.fill_(0.01)
            optimizer.step()

        replay = capture_cuda_graph(step) if graph else step
        for _ in range(4 if graph else 7):  # three steps warm up
            replay()
        ends.append(model)
    assert_same(ends[0], ends[1], 1e-6)


def test_what_is_refused() -> None:
    model = low_rank()
    optimizer = optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="no optimizer has a parameter of this model"):
        FrobeniusDecay(low_rank(), optimizer)
    with pytest.raises(ValueError, match="no optimizer"):
        FrobeniusDecay(model, None)
    with pytest.raises(TypeError, match="LBFGS"):
        FrobeniusDecay(model, optim.LBFGS(model.parameters()), decoupled=False)
    assert not optimizer._optimizer_step_pre_hooks


def sharded_and_replicated(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))  # also where there is a GPU
    for name in ("SGD nesterov", "AdamW"):
        for wrap in (DDP, lambda m: fully_shard(m, mesh=mesh)):
            model, alone = low_rank(), low_rank()
            wrapped = wrap(model)
            optimizer = EVERY[name](wrapped.parameters(), weight_decay=OWN)
            FrobeniusDecay(wrapped, optimizer, LAMBDA)
            other = two_groups(alone, EVERY[name])
            for step in range(3):  # every worker has the same batch, so the mean gradient is that of one
                our_step(wrapped, optimizer, step)
                reference_step(alone, other, step, name in DECOUPLED)
            for (label, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert isinstance(p, DTensor) == (wrap is not DDP)
                whole = p.full_tensor() if isinstance(p, DTensor) else p
                torch.testing.assert_close(whole, q, rtol=1e-9, atol=1e-9, msg=lambda m, n=label: f"{n}: {m}")


def rebuilt_by_the_switch(rank: int, size: int) -> None:
    """The decay of a dense model continues with the factors of the model that replaces it."""
    mesh = init_device_mesh("cpu", (size,))

    def shard(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.Flatten(), nn.Linear(64, 5)).double()

    model, alone = build(), build()
    shard(model)
    optimizer, other = (optim.AdamW(m.parameters(), 1e-2, weight_decay=OWN) for m in (model, alone))
    FrobeniusDecay(model, optimizer, LAMBDA)
    FrobeniusDecay(alone, other, LAMBDA)
    plan = pf.plan(alone, rank=3)
    switch, beside = (pf.Switch(plan, when=pf.AtStep(1)) for _ in range(2))
    for step in range(3):
        model, _ = switch.rebuild(model, optimizer, build=build, shard=shard, step=step)
        beside.step(alone, other, step=step)
        our_step(model, optimizer, step)
        our_step(alone, other, step)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-9, atol=1e-9)


@pytest.mark.timeout(240)  # the hang guard
@pytest.mark.parametrize("case", [sharded_and_replicated, rebuilt_by_the_switch])
def test_ddp_and_fsdp2(case: Callable[[int, int], None]) -> None:
    in_processes(case, 2)
