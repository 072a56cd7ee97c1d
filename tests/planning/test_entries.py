"""Which layers could be made low-rank, and the reason for every one that could not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import pufferfish as pf
from pufferfish.lab.models import LSTMLanguageModel


def reasons(model: nn.Module, **options: Any) -> dict[str, str]:
    return {e.name: e.reason for e in pf.plan(model, **options)}


def in_sequence(*layers: nn.Module) -> nn.Sequential:
    """With a layer that is factorized, so that a plan never is only reasons."""
    return nn.Sequential(*layers, nn.Linear(64, 64))


# Why layers stay.


def test_not_smaller() -> None:
    model = nn.Sequential(nn.Linear(64, 10), nn.Linear(1, 64), nn.Conv2d(3, 4, 1))
    assert reasons(model) == {
        "0": "not smaller at rank 16: the largest that saves is 8",
        "1": "not smaller at rank 16: the largest that saves is 0",
        "2": "not smaller at rank 16: the largest that saves is 1",
    }
    assert (
        reasons(model, rank=pf.Ratio(0.9, multiple=1))["1"]
        == "not smaller at rank 1: the largest that saves is 0"
    )
    assert reasons(model, rank=pf.Energy(0.9))["0"] == "not smaller at rank 16: the largest that saves is 8"


def test_a_tied_weight_names_its_partner() -> None:
    found = reasons(LSTMLanguageModel(vocabulary=70, d=64))
    assert found["decoder"] == "tied weight: shared with embedding.weight"
    assert found["embedding"] == "tied weight: shared with decoder.weight"
    assert found["lstm.weight_ih_l0"] == ""


def test_tied_weights_count_once() -> None:
    model = LSTMLanguageModel(vocabulary=70, d=64)
    plan = pf.plan(model)
    assert (plan["embedding"].before, plan["decoder"].before) == (70 * 64, 0)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert sum(e.before for e in plan) + vectors == plan.before.parameters
    shares = [float(line.split("%")[0].split()[-1]) for line in str(plan).splitlines() if "%" in line]
    assert sum(shares) == pytest.approx(100 * (1 - vectors / plan.after.parameters), abs=0.5)


def test_frozen_weights_stay_dense_unless_asked_for() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.MultiheadAttention(64, 4), "c": nn.Linear(64, 64)})
    model["a"].weight.requires_grad_(False)
    model["b"].in_proj_weight.requires_grad_(False)
    model["c"].bias.requires_grad_(False)
    found = reasons(model)
    frozen = {name for name, why in found.items() if why.startswith("frozen: ")}
    assert frozen == {"a", "b.q", "b.k", "b.v"}
    assert {name for name, why in found.items() if not why} == {"b.out", "c"}
    assert set(reasons(model, overrides={"*": 0.25}).values()) == {""}
    assert "naming it in overrides=" in str(pf.plan(model))
    assert pf.planning.spectra(model).keys() == found.keys()


def test_frozen_low_rank_layers_are_saved_and_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    model[1].requires_grad_(True)
    done = pf.factorize_(model, pf.plan(model, overrides={"*": 8}))
    assert pf.lowrank.plan_of(model).ranks == done.ranks == {"0": {"": 8}, "1": {"": 8}}
    assert [p.requires_grad for p in model.parameters()] == [False] * 3 + [True] * 3
    pf.save(model, tmp_path / "saved")
    fresh = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    pf.load(fresh, tmp_path / "saved")
    x = torch.randn(2, 64)
    assert torch.equal(fresh(x), model(x))
    pf.merge_(fresh)
    torch.testing.assert_close(fresh(x), model(x))


def test_a_module_under_two_names() -> None:
    shared = nn.Linear(64, 64)
    assert reasons(nn.ModuleDict({"left": shared, "right": shared, "own": nn.Linear(64, 64)})) == {
        "left": "tied weight: shared with right.weight",
        "own": "",
    }


def test_a_shared_bias_that_would_be_taken_apart() -> None:
    model = nn.ModuleList(nn.MultiheadAttention(64, 4) for _ in range(2))
    model[1].in_proj_bias = model[0].in_proj_bias
    found = reasons(model)
    assert found["0.q"] == "tied weight: shared with 1.in_proj_bias"
    assert found["0.out"] == ""
    # A Linear's bias stays the same parameter, shared or not.
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plain[1].bias = plain[0].bias
    assert set(reasons(plain).values()) == {""}


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(64, 64, 3, groups=64),
        nn.Conv1d(32, 64, 3, groups=32),
        nn.ConvTranspose2d(32, 32, 3, groups=32),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_depthwise(layer: nn.Module) -> None:
    assert reasons(in_sequence(layer)) == {"0": "depthwise", "1": ""}


class Special(nn.Linear):
    pass


class SpecialConv(nn.Conv2d):
    pass


class Cast(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype))


def special_int8() -> nn.Module:
    layer = Special(64, 64)
    layer.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (
            Special(64, 64),
            "If Special computes the same as Linear (x Wᵀ + b), register it: "
            f'pf.register("{__name__}.Special", pf.layers.LowRankLinear)',
        ),
        (
            SpecialConv(32, 64, 3),
            "If SpecialConv computes the same as Conv2d, register it: "
            f'pf.register("{__name__}.SpecialConv", pf.layers.LowRankConv)',
        ),
        (
            Cast(64, 64),
            "Cast.forward may cast or scale: then register a subclass of pf.layers.LowRankLinear that does so too. If Cast "
            f'computes the same as Linear (x Wᵀ + b), register it: pf.register("{__name__}.Cast", pf.layers.LowRankLinear)',
        ),
        (special_int8(), ""),
        (nn.Bilinear(8, 8, 8), ""),
        (parametrizations.weight_norm(nn.Linear(64, 64)), ""),
    ],
    ids=["Linear", "Conv2d", "forward", "int8", "Bilinear", "weight_norm"],
)
def test_subclasses_are_offered_with_the_line_that_registers_them(layer: nn.Module, line: str) -> None:
    plan = pf.plan(in_sequence(layer))
    assert plan["0"].note == line
    assert ("pf.register" in str(plan)) == bool(line)
    assert line in str(plan)


def test_the_line_works_as_it_is_printed() -> None:
    class Local(nn.Linear):
        pass

    model = nn.Sequential(Local(64, 64))
    exec(pf.plan(model)["0"].note.partition("register it: ")[2], {"pf": pf})
    assert pf.plan(model)["0"].rank == 16


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 64))
        self.scale = nn.Parameter(torch.randn(64))


class Adapter(nn.Module):
    """As LoRA libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(64, 64)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 4, bias=False)})


def quantized() -> nn.Module:
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    return layer


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Conv2d(32, 64, 3), "weight", 0.5)


def patched() -> nn.Module:
    layer = nn.Linear(64, 64)
    layer.forward = lambda x: x
    return layer


class Wrapped(Tensor):
    """A tensor of another kind, as quantization libraries make them."""


def of_another_tensor() -> nn.Module:
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(torch.randn(64, 64).as_subclass(Wrapped))
    return layer


STAYING: list[tuple[Callable[[], nn.Module], dict[str, str]]] = [
    (lambda: Special(64, 64), {"0": "no low-rank form is registered for Special"}),
    (lambda: nn.Bilinear(8, 8, 8), {"0": "no low-rank form is registered for Bilinear"}),
    (Raw, {"0.table": "raw parameter: used by the module's own code, not covered"}),
    (
        lambda: nn.Embedding(9, 64),
        {"0": "embedding: a lookup, not a product; embed= (--embed) factorizes it"},
    ),
    (lambda: nn.EmbeddingBag(9, 64), {"0": "embedding: a lookup, not a product"}),
    (
        lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
        {"0": "parametrized: remove the parametrization first"},
    ),
    (
        lambda: parametrizations.spectral_norm(nn.Conv2d(32, 64, 3)),
        {"0": "parametrized: remove the parametrization first"},
    ),
    (pruned, {"0.weight_orig": "unsupported: its weight is computed (weight_norm, spectral_norm, pruning)"}),
    (lambda: nn.LazyLinear(64), {"0": "lazy: run one batch through the model first"}),
    (lambda: nn.LazyConv2d(64, 3), {"0": "lazy: run one batch through the model first"}),
    (quantized, {"0": "quantized or unusual dtype int8"}),
    (patched, {"0": "unsupported: its forward was replaced"}),
    (of_another_tensor, {"0": "unsupported: its weight is a Wrapped, not a plain tensor"}),
    (
        Adapter,
        {
            "0.base_layer": "wrapped by an adapter (Adapter): merge it first",
            "0.lora_A.default": "wrapped by an adapter (Adapter): merge it first",
        },
    ),
]


@pytest.mark.parametrize(
    ("make", "expected"), STAYING, ids=lambda x: next(iter(x.values()))[:24] if isinstance(x, dict) else ""
)
def test_reasons(make: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    model = in_sequence(make())
    plan = pf.plan(model)
    assert reasons(model) == {**expected, "1": ""}
    text = str(plan)
    assert all(reason in text for reason in expected.values())
    # It is left alone, and the rest of the model is not.
    left = model[0]
    pf.factorize_(model, plan)
    assert model[0] is left
    assert isinstance(model[1], pf.layers.LowRankLinear)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_old_style_weight_norm() -> None:
    model = in_sequence(
        nn.utils.weight_norm(nn.Linear(64, 64)), nn.utils.weight_norm(nn.LSTM(64, 64), "weight_hh_l0")
    )
    why = "unsupported: its {} is computed (weight_norm, spectral_norm, pruning)"
    assert reasons(model) == {
        "0.weight_g": why.format("weight"),
        "0.weight_v": why.format("weight"),
        "1.weight_ih_l0": why.format("weight_hh_l0"),
        "1.weight_hh_l0_g": why.format("weight_hh_l0"),
        "1.weight_hh_l0_v": why.format("weight_hh_l0"),
        "2": "",
    }


def test_a_parametrized_child_of_a_layer() -> None:
    model = nn.Sequential(nn.MultiheadAttention(64, 4))
    parametrizations.weight_norm(model[0].out_proj)
    assert set(reasons(model).values()) == {"parametrized: remove the parametrization first"}


def test_lora_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(64, 64))
    model.add_module("head", nn.Linear(64, 64))
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["fc"]), model)
    assert reasons(adapted)["head"].startswith("frozen")  # as peft leaves it
    adapted.head.requires_grad_(True)
    found = reasons(adapted)
    assert found["head"] == ""
    assert found["fc.base_layer"] == "wrapped by an adapter (Linear): merge it first"
    assert all("merge it first" in why for name, why in found.items() if name.startswith("fc."))
    pf.factorize_(adapted, pf.plan(adapted))
    assert adapted(torch.randn(2, 64)).shape == (2, 64)


def test_low_rank_already() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64))
    pf.factorize_(model, pf.plan(model, 8, keep=["1.weight_hh_l0"]))
    plan = pf.plan(model)
    assert {e.name: e.reason for e in plan} == {
        "0": "already low-rank, rank 8",
        "1.weight_ih_l0": "already low-rank, rank 8",
    }
    assert plan["0"].before == 8 * 128
    assert plan.after == plan.before
    before = list(model.modules())
    pf.factorize_(model, plan)
    assert list(model.modules()) == before


def test_a_registered_parent_owns_its_children() -> None:
    model = nn.TransformerEncoderLayer(64, 4, 128)
    assert list(reasons(model)) == [
        *("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.out"),
        *("linear1", "linear2"),
    ]
