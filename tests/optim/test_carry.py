"""Optimizers across the switch and back: their state, the first step after it, and checkpoints."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import pufferfish as pf
from optimizers import OPTIMIZERS, Make, Net, decay_groups, plan, train


def check_state(model: nn.Module, optimizer: optim.Optimizer, keys: set[str], steps: int) -> None:
    """Every parameter is there once, in the model's order, with a whole state that fits it."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in model.parameters()]
    assert set(optimizer.state) <= set(held)
    for p in held:
        state = optimizer.state[p]
        assert state.keys() == keys
        assert float(state.get("step", steps)) == steps
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in ("step", "mu_product"):
                assert value.shape == p.shape, key
                assert value.stride() == p.stride(), key
                assert value.isfinite().all(), key
                assert not value.requires_grad


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_follows_there_and_back(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, [optimizer], range(4))
    keys = set(optimizer.state[model.fc.weight])
    kept = [model.head.weight, model.fc.bias, model.norm.weight, model.gru.bias_ih_l0]
    states = [optimizer.state[p] for p in kept]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.factorize_(model, plan(model), optimizer)
        check_state(model, optimizer, keys, 4)
        assert all(optimizer.state[p] is state for p, state in zip(kept, states, strict=True))
        train(model, [optimizer], range(4, 7))
        check_state(model, optimizer, keys, 7)
        pf.merge_(model, optimizer)
    check_state(model, optimizer, keys, 7)
    train(model, [optimizer], range(7, 10))
    check_state(model, optimizer, keys, 10)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["SGD", "AdamW amsgrad", "Adagrad", "Adagrad fused"])
def test_before_the_first_step(name: str) -> None:
    """There is nothing to carry; but Adagrad has state from its construction on."""
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    pf.factorize_(model, plan(model), optimizer)
    assert len(optimizer.state) == (len(list(model.parameters())) if "Adagrad" in name else 0)
    train(model, [optimizer], range(2))
    assert len(optimizer.state) == len(list(model.parameters()))
    assert all(p.isfinite().all() for p in model.parameters())


# The first step after the switch.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_step_after_the_switch_is_like_the_last_before(name: str) -> None:
    """Of the weight that the layer stands for, whatever it is made of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = OPTIMIZERS[name](model.parameters())
    X = torch.randn(256, 32)
    Y = (X @ torch.randn(32, 10)).argmax(1)

    def step(i: int) -> Tensor:
        """One step; the root mean square of what it changed."""
        before = model[2].weight.detach().clone()
        optimizer.zero_grad()
        rows = torch.arange(64 * i, 64 * i + 64) % 256
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
        return (model[2].weight.detach() - before).square().mean().sqrt()

    last = [step(i) for i in range(6)][-1]
    pf.factorize_(model, pf.plan(model, 12, only=["2"]), optimizer)
    first = step(6)
    assert first.isfinite()
    assert 0.1 * last < first < 3 * last
    after = step(7)
    pf.merge_(model, optimizer)
    back = step(8)
    assert back.isfinite()
    assert back < 4 * max(after, last)


# Checkpoints.


@pytest.mark.parametrize("name", ["SGD", "AdamW amsgrad", "Adagrad", "RMSprop momentum"])
def test_a_checkpoint_after_the_switch_goes_on_bit_by_bit(name: str) -> None:
    def build(m: nn.Module) -> optim.Optimizer:
        return OPTIMIZERS[name]([{"params": g["params"]} for g in decay_groups(m)])

    model = Net()
    optimizer = build(model)
    train(model, [optimizer], range(3))
    done = pf.factorize_(model, plan(model), optimizer)
    train(model, [optimizer], range(3, 5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    fresh = Net()
    pf.reshape_(fresh, done)
    fresh.load_state_dict(saved[0])
    again = build(fresh)
    again.load_state_dict(saved[1])
    train(model, [optimizer], range(5, 8))
    train(fresh, [again], range(5, 8))
    for one, other in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


# Optimizers whose state is not known.


class Sign(optim.Optimizer):
    """Somebody's own: keeps a moment under a name of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["velocity"] = 0.9 * state.get("velocity", 0) + p.grad
            p -= self.param_groups[0]["lr"] * state["velocity"].sign()


class Watching(optim.Adagrad):
    """One of torch's with more state. Adagrad wants its own to be there."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = p.detach().clone()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Sign, "test_carry.Sign"),
        (Watching, "test_carry.Watching"),
        (optim.Adafactor, "torch.optim.Adafactor"),
        (lambda p: optim.RMSprop(p, 1e-3, centered=True), "torch.optim.RMSprop"),
    ],
)
def test_unknown_state_is_reset_with_a_warning(make: Make, name: str) -> None:
    model = Net()
    optimizer = make(model.parameters())
    train(model, [optimizer], range(3))
    kept = optimizer.state[model.head.weight]
    with pytest.warns(UserWarning, match=f"^{name}: the state of replaced parameters was reset") as caught:
        pf.factorize_(model, plan(model), optimizer)
    assert caught[0].filename == __file__
    assert optimizer.state[model.head.weight] is kept
    assert not {"velocity", "seen", "row_var", "grad_avg"} & set(
        optimizer.state.get(model.fc.down.weight, {})
    )
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    train(model, [optimizer], range(3, 5))
    with pytest.warns(UserWarning, match=f"{name}: the state of replaced parameters was reset") as caught:
        pf.merge_(model, optimizer)
    assert caught[0].filename == __file__
    train(model, [optimizer], range(5, 7))


class Wrapper(optim.Optimizer):
    """Like SAM and Lookahead: groups are those of the optimizer that it keeps."""

    def __init__(self, base: optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()


def test_an_optimizer_inside_of_another() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    base = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapper = Wrapper(base)
    model(torch.ones(2, 64)).sum().backward()
    wrapper.step()
    wrapper.zero_grad()
    old = model[0].weight
    pf.factorize_(model, pf.plan(model, 16), wrapper)
    check_state(model, base, {"momentum_buffer"}, 1)
    assert wrapper.param_groups is base.param_groups
    assert old not in base.state


class Counting(Sign):
    """Like Adam of schedule-free: the number of updates is in the group, the moment is in the state of a parameter."""

    def __init__(self, params: Any, place: str = "k") -> None:
        super().__init__(params)
        self.counts = self.state if place == "state" else self.param_groups[0]
        self.place = "k" if place == "state" else place  # in the state as MADGRAD does
        self.counts[self.place] = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.counts[self.place] += 1


@pytest.mark.parametrize("place", ["k", "step", "state"])
def test_an_optimizer_that_counts_updates_in_its_groups_is_refused(place: str) -> None:
    model = Net()
    optimizer = Counting(model.parameters(), place=place)
    before = list(model.modules())
    train(model, [optimizer], range(3))
    with pytest.raises(TypeError, match=r"Counting counts its updates for all parameters together"):
        pf.factorize_(model, plan(model), optimizer)
    assert list(model.modules()) == before


def test_an_optimizer_that_counts_updates_is_refused_before_the_warm_up() -> None:
    model = Net()
    optimizer = Counting(model.parameters())
    for state in ("project", "reset"):
        switch = pf.Switch(rank=4, keep=["head"], when=pf.AtEpoch(3), state=state)  # type: ignore[arg-type]
        for call in (switch.due, switch.step):
            with pytest.raises(TypeError, match="Counting counts its updates"):
                call(model, optimizer, epoch=0)
    assert pf.Switch(rank=4, keep=["head"], when=pf.AtEpoch(0)).step(model, optimizer, epoch=0)


@pytest.mark.parametrize("make", [Sign, lambda p: optim.RMSprop(p, 1e-3, centered=True)])
def test_a_reset_is_announced_before_the_warm_up(make: Make) -> None:
    model = Net()
    optimizer = make(model.parameters())
    switch = pf.Switch(rank=4, keep=["head"], when=pf.AtEpoch(2))
    with pytest.warns(UserWarning, match="the state of .* will be reset") as caught:
        switch.step(model, optimizer, epoch=0)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        switch.step(model, optimizer, epoch=1)  # once
        pf.Switch(rank=4, keep=["head"], when=pf.AtEpoch(2), state="reset").step(model, optimizer, epoch=0)
        # One that holds no weight that is replaced, and one of torch.
        other = Sign([model.head.weight])
        adam = optim.Adam([p for p in model.parameters() if p is not model.head.weight])
        pf.Switch(rank=4, keep=["head"], when=pf.AtEpoch(2)).step(model, [other, adam], epoch=0)
