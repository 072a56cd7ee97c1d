"""What an example may be, what is found in it, and that nothing is touched."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import pufferfish as pf
from pufferfish.planning.profile import Example, profile

# What the example may be.


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(40, 64), nn.Linear(48, 64)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        return {"sum": self.a(x) + (0 if y is None else self.b(y))}


def test_forms_of_an_example() -> None:
    model, x, y = Adder(), torch.randn(5, 40), torch.randn(5, 48)
    both: list[Example] = [(x, y), [x, y], {"x": x, "y": y}, {"y": y, "x": x}, lambda m: m(x, y=y)]
    for example in both:
        plan = pf.plan(model, example=example)
        assert plan.before.forward_macs == 5 * 64 * (40 + 48)
        assert plan.before.backward_macs == 5 * 64 * (40 + 48)  # the inputs need no gradient
        assert [e.positions for e in plan] == [5, 5]
        assert plan.functional == {}
    alone = pf.plan(model, example=x)
    assert alone.before.forward_macs == 5 * 64 * 40
    assert [e.positions for e in alone] == [5, None]
    assert pf.plan(model).before.forward_macs is None


@pytest.mark.filterwarnings("ignore:the example does not run on fake tensors")
def test_an_example_that_does_not_fit_raises_what_the_model_raises() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pf.plan(Adder(), example=torch.randn(5, 41))


@pytest.mark.filterwarnings("ignore:the example does not run on fake tensors")
def test_lazy_models_are_profiled_but_stay_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 64))
    plan = pf.plan(model, example=torch.randn(2, 32))
    assert plan.before.forward_macs == 2 * 64 * (32 + 64)
    assert plan["0"].reason == "lazy: run one batch through the model first"
    assert plan.before.parameters == 64 * 65
    assert isinstance(model[0], nn.LazyLinear)


# Functional calls.


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 40))
        self.inner = Inner()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.inner(F.linear(x, self.table)))

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(F.linear(x, self.table))


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT @ x


def test_functional_macs_are_reported_where_they_happen() -> None:
    model, x = Functional(), torch.randn(5, 40)
    plan = pf.plan(model, example=x)
    table, inner, fc = 5 * 40 * 64, 2 * 5 * 5 * 64, 5 * 64 * 64
    assert plan.before.forward_macs == table + inner + fc
    assert plan.functional == {"": table, "inner": inner}
    share = f"{(table + inner) / (table + inner + fc):.1%}"
    assert f"Not covered: {share} of the forward MACs are functional calls" in str(plan)
    assert "(the model itself, inner)" in str(plan)
    assert "Not covered: 2,560 weights in raw parameters (table)" in str(plan)


def test_functional_macs_of_another_method_than_forward() -> None:
    plan = pf.plan(Functional(), example=lambda m: m.encode(torch.randn(5, 40)))
    assert plan.functional == {"": 5 * 40 * 64, "inner": 2 * 5 * 5 * 64}


def test_low_rank_layers_are_no_functional_calls() -> None:
    model = nn.Sequential(nn.LSTM(32, 48))
    pf.factorize_(model, pf.plan(model, 8))
    assert pf.plan(model, example=torch.randn(7, 3, 32)).functional == {}


# Nothing is touched.


class Stochastic(nn.Module):
    """Batch statistics, random numbers, an in-place operation on its input, gradients that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3)
        self.norm = nn.BatchNorm2d(32)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.relu_()))
        return self.out(self.drop(x + torch.randn_like(x)).mean((2, 3)))


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("time_it", [False, True])
def test_profiling_touches_nothing(real: bool, time_it: bool) -> None:
    model, x = Stochastic(), torch.randn(4, 3, 8, 8)
    model(x.clone()).sum().backward()
    fired: list[str] = []
    model.conv.register_forward_hook(lambda *args: fired.append("forward"))
    model.register_full_backward_hook(lambda *args: fired.append("backward"))
    model.out.weight.register_hook(lambda grad: fired.append("gradient"))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    modules, random, given = list(model.modules()), torch.get_rng_state(), x.clone()

    example: Example = (lambda m: m(x.clone())) if real else x
    plan = pf.plan(model, pf.Ratio(0.25, multiple=1), example=example, measure=time_it)
    assert plan.before.forward_macs == 4 * 36 * 27 * 32 + 4 * 32 * 64
    assert fired == []
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, given)
    assert list(model.modules()) == modules
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters() if p.grad is not None)
    assert len(grads) == 6


def test_profiling_leaves_the_examples_gradient_alone() -> None:
    x = torch.rand(5, 40).requires_grad_()
    assert profile(nn.Linear(40, 64), x).backward_macs == 2 * 5 * 40 * 64
    assert x.grad is None


# Models that read values.


class Padded(nn.Module):
    """Skips a layer where the mask has no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.a(x)
        return x if mask.all() else self.b(x[mask.bool()])


class Allocated(TorchDispatchMode):
    """Sum of the bytes of all tensors that are created and have their own memory."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if isinstance(result, Tensor) and not any(torch._C._is_alias_of(x, result) for x in given):
            self.total += 0 if result.is_meta or isinstance(result, FakeTensor) else result.nbytes
        return result


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.filterwarnings("error")
def test_a_plan_allocates_nothing(device: str) -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), torch.randn(5, 256)
    for example in (x, x.to("meta")):
        with Allocated() as allocated:
            plan = pf.plan(model.to(device), example=example)
        assert allocated.total < 1000
        assert plan.before.forward_macs == 2 * 5 * 256 * 256


def test_a_copy_of_the_model_is_announced() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    with pytest.warns(UserWarning, match=r"DataDependent.*a real copy of the model \(1 MiB"):
        plan = pf.plan(Padded(), example={"x": torch.randn(2, 5, 256), "mask": mask})
    assert plan.before.forward_macs == (10 + 7) * 256 * 256
    assert [e.positions for e in plan] == [10, 7]


def test_a_model_on_meta_that_reads_values() -> None:
    example = (torch.randn(2, 5, 256), torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"DataDependent.*use a model with real weights, or plan without"):
        pf.plan(Padded().to("meta"), example=example)


def test_a_function_may_run_a_model_on_meta() -> None:
    x = torch.randn(10, 256, device="meta")
    plan = pf.plan(nn.Linear(256, 256, device="meta"), example=lambda m: m(x))
    assert plan.before.forward_macs == 10 * 256 * 256


# Weights that other code computes with.


class ReadsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in (
            "used",
            "transposed",
            "keyword",
            "listed",
            "rows",
            "rescaled",
            "set",
            "asked",
            "looked_at",
        ):
            setattr(self, name, nn.Linear(64, 64, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.looked_at(x.to(self.looked_at.weight.dtype)).view(-1, self.looked_at.weight.size(0))
        x = self.asked(x.type_as(self.asked.weight) + self.asked.weight.new_zeros(64))
        x = F.linear(self.used(x), self.used.weight.t())
        x = self.transposed(x) @ self.transposed.weight.T
        x = F.linear(self.keyword(x), weight=self.keyword.weight)
        x = self.listed(x) @ torch.cat([self.listed.weight, torch.zeros(64, 1, device=x.device)], 1)
        x = self.rows(x[:, :64]) * self.rows.weight.unbind()[0]
        with torch.no_grad():
            self.rescaled.weight.div_(2)
            self.set.weight[0] = 0
        return self.set(self.rescaled(x))


def test_layers_whose_weight_is_used_elsewhere_stay() -> None:
    made = pf.plan(ReadsWeights(), example=torch.zeros(2, 64))
    reason = "its weight is used outside the layer too"
    stay = {e.name for e in made if e.reason == reason}
    assert stay == {"used", "transposed", "keyword", "listed", "rows", "rescaled", "set"}
    assert {e.name for e in made if not e.reason} == {"asked", "looked_at"}
    assert all(not e.reason for e in pf.plan(ReadsWeights()))  # only a run can tell


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = (
            nn.Embedding(50, 64),
            nn.Linear(64, 64),
            nn.Linear(64, 50, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)))


def test_a_tied_weight_is_not_used_outside_while_one_of_its_layers_runs() -> None:
    model = Tied()
    assert profile(model, torch.arange(5)).read_outside == set()
    assert profile(model, lambda m: m.embed.weight.sum()).read_outside == {"embed", "head"}
