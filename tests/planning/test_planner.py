"""Patterns, and plans of wrapped models."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import pufferfish as pf
from matrices import blocks
from pufferfish.integrations.convert import convert, merge


def reasons(model: nn.Module, **options: Any) -> dict[str, str]:
    return {e.name: e.reason for e in pf.plan(model, **options)}


# Patterns.


def test_patterns_name_layers_or_single_matrices() -> None:
    model = nn.ModuleDict(
        {"lstm": nn.LSTM(64, 64, 2), "a": nn.MultiheadAttention(64, 4), "b": nn.Linear(64, 64)}
    )

    def kept(**options: Any) -> set[str]:
        return {e.name for e in pf.plan(model, **options) if e.rank is None}

    lstm = {f"lstm.weight_{x}_l{i}" for x in ("ih", "hh") for i in (0, 1)}
    attention = {f"a.{x}" for x in ("q", "k", "v", "out")}
    assert kept(keep=["lstm"]) == lstm
    assert kept(keep=["lstm.weight_hh_*"]) == {"lstm.weight_hh_l0", "lstm.weight_hh_l1"}
    assert kept(keep=["*.q"]) == {"a.q"}
    assert kept(only=["lstm", "*.q"]) == {"a.k", "a.v", "a.out", "b"}
    assert kept(keep=["*"]) == lstm | attention | {"b"}
    plan = pf.plan(model, overrides={"*": 2, "lstm": 3, "lstm.weight_hh_*": 4, "a.[qk]": 0.5})
    assert {e.name: e.rank for e in plan if e.layer != "lstm"} == {
        "a.q": 16,
        "a.k": 16,
        "a.v": 2,
        "a.out": 2,
        "b": 2,
    }
    assert [e.rank for e in plan if e.layer == "lstm"] == [3, 4, 3, 4]


def test_the_name_of_a_module_stands_for_the_layers_in_it() -> None:
    model = nn.Sequential(OrderedDict(stem=nn.Sequential(nn.Linear(64, 64)), head=nn.Linear(64, 64)))
    assert pf.plan(model, keep=["stem"]).ranks.keys() == {"head"}
    assert pf.plan(model, only=["stem"]).ranks.keys() == {"stem.0"}
    with pytest.raises(ValueError, match=r"are stem\.0, head$"):
        pf.plan(model, keep=["stm"])


@pytest.mark.parametrize("option", ["keep", "only", "overrides"])
def test_an_unmatched_pattern_is_an_error(option: str) -> None:
    patterns = ["0", "conv*"]
    with pytest.raises(
        ValueError, match=rf"{option}: the pattern 'conv\*' matches no layer; the layers are 0, 2"
    ):
        pf.plan(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
            **{option: dict.fromkeys(patterns, 4) if option == "overrides" else patterns},
        )


@pytest.mark.parametrize("option", ["keep", "only"])
def test_a_string_is_not_a_list_of_patterns(option: str) -> None:
    with pytest.raises(TypeError, match=rf"{option}=\['fc'\]"):
        pf.plan(nn.Sequential(nn.Linear(64, 64)), **{option: "fc"})


# Arguments of the wrong type.


TAKES_A_PLAN: dict[str, Callable[[Any], Any]] = {
    "factorize_": lambda plan: pf.factorize_(blocks(), plan),
    "reshape_": lambda plan: pf.reshape_(blocks(), plan),
    "resolve": lambda plan: pf.resolve(plan, blocks()),
    "Switch": lambda plan: pf.Switch(plan),
    "factorize_state_dict": lambda plan: pf.lowrank.factorize_state_dict(blocks().state_dict(), plan),
    "merge_state_dict": lambda plan: pf.lowrank.merge_state_dict(blocks().state_dict(), plan),
    "convert": lambda plan: convert("in.safetensors", plan, "out.safetensors"),
    "merge": lambda plan: merge("in.safetensors", "out.safetensors", plan),
}


@pytest.mark.parametrize("function", TAKES_A_PLAN)
def test_a_rank_is_not_a_plan(function: str) -> None:
    cases: list[tuple[Any, str]] = [
        (0.25, "the plan is of type float; pass pf.plan(model, rank=0.25)"),
        (8, "the plan is of type int; pass pf.plan(model, rank=8)"),
        (pf.Energy(0.9), "the plan is of type Energy; pass pf.plan(model, rank=Energy(keep=0.9))"),
        ("plan.json", "the plan is of type str; pass pf.Plan.load(file)"),
        (blocks(), "the plan is of type Sequential; pass pf.plan(model, rank=0.25)"),
    ]
    for wrong, message in cases:
        with pytest.raises(TypeError, match=rf"^{function}: {re.escape(message)}$"):
            TAKES_A_PLAN[function](wrong)


# Wrappers.


def checkpointed() -> nn.Sequential:
    model = blocks()
    for i in (0, 1):
        model[i] = checkpoint_wrapper(model[i])
    model[0]._checkpoint_wrapped_module[0] = checkpoint_wrapper(model[0][0])
    return model


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "OptimizedModule": torch.compile,
    "compiled DDP": lambda m: torch.compile(nn.parallel.DistributedDataParallel(m)),
    "DDP of compiled": lambda m: nn.parallel.DistributedDataParallel(torch.compile(m)),
}


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("build", [blocks, checkpointed])
def test_planning_looks_through_wrappers(name: str, build: Callable[[], nn.Module]) -> None:
    plain = pf.plan(blocks(), example=torch.randn(2, 64))
    wrapped = WRAPPERS[name](build())
    plan = pf.plan(wrapped, example=torch.randn(2, 64))
    assert [e.name for e in plan] == ["0.0", "1.0", "2"]
    assert plan.hash == plain.hash
    assert plan.entries == plain.entries
    assert plan.parameters == plain.parameters
    assert plan.before.forward_macs == plain.before.forward_macs
    assert list(pf.planning.spectra(wrapped)) == ["0.0", "1.0", "2"]


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("verb", [pf.factorize_, pf.reshape_])
def test_wrapped_models_are_refused(name: str, verb: Callable[..., Any]) -> None:
    model = blocks()
    wrapped = WRAPPERS[name](model)
    before = list(model.modules())
    with pytest.raises(
        ValueError,
        match=r"the model is wrapped in .*; call it on the inner model \(model\.module under DDP\)",
    ):
        verb(wrapped, pf.plan(wrapped))
    assert list(model.modules()) == before


def test_compiled_submodules_are_refused() -> None:
    for compile_it in (lambda m: m.__setitem__(1, torch.compile(m[1])), lambda m: m[1].compile()):
        model = blocks()
        compile_it(model)
        with pytest.raises(ValueError, match=r"is already compiled; call it before torch\.compile"):
            pf.factorize_(model, pf.plan(model))


def test_checkpointed_submodules_are_factorized_in_place() -> None:
    plain, wrapped, x = blocks(), checkpointed(), torch.randn(3, 64)
    for model in (plain, wrapped):
        pf.factorize_(model, pf.plan(model))
    inner = wrapped[0]._checkpoint_wrapped_module[0]._checkpoint_wrapped_module
    assert isinstance(inner, pf.layers.LowRankLinear)
    torch.testing.assert_close(wrapped(x), plain(x))
    for model in (plain, wrapped):
        model(x).square().sum().backward()
    for one, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    pf.merge_(wrapped)
    assert [name for name, _ in wrapped.named_parameters()] == [
        name for name, _ in checkpointed().named_parameters()
    ]


def test_a_checkpoint_wrapper_around_everything() -> None:
    model = checkpoint_wrapper(blocks())
    plan = pf.factorize_(model, pf.plan(model))
    assert plan.hash == pf.plan(blocks()).hash
    assert isinstance(model._checkpoint_wrapped_module[0][0], pf.layers.LowRankLinear)


class OnCUDA(nn.Parameter):
    """A parameter that says it lies on a CUDA device, which this machine need not have."""

    is_cuda = True


def test_recurrent_layers_stay_dense_on_cuda_unless_they_are_named() -> None:
    def ranks(**options: Any) -> dict[str, int]:
        return {e.name: e.rank for e in pf.plan(model, rank=8, **options) if e.rank}

    model = nn.ModuleDict({"lstm": nn.LSTM(64, 64), "gru": nn.GRU(64, 64), "fc": nn.Linear(64, 64)})
    everything = ranks()  # on a CPU
    for module in model.values():
        for name, p in list(module.named_parameters()):
            setattr(module, name, OnCUDA(p.detach()))
    slower = {name for name, reason in reasons(model, rank=8).items() if "slower on CUDA" in reason}
    assert (
        slower
        == everything.keys() - {"fc"}
        == {f"{x}.weight_{y}_l0" for x in ("lstm", "gru") for y in ("ih", "hh")}
    )
    assert ranks() == {"fc": 8}
    assert ranks(only=["lstm"]) == {"lstm.weight_ih_l0": 8, "lstm.weight_hh_l0": 8}
    assert ranks(overrides={"gru.weight_hh_*": 4}) == {"gru.weight_hh_l0": 4, "fc": 8}
