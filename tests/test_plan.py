"""Plans: reasons, patterns, wrappers, text and JSON, and models that a plan does not fit."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

import pufferfish as pf
from pufferfish.lab.models import LSTMLanguageModel, resnet18


def reasons(model: nn.Module, **options: Any) -> dict[str, str]:
    return {e.name: e.reason for e in pf.plan(model, **options)}


def in_sequence(*layers: nn.Module) -> nn.Sequential:
    """With a layer that is factorized, so that a plan never is only reasons."""
    return nn.Sequential(*layers, nn.Linear(64, 64))


# Why layers stay.


def test_every_kind_of_layer_has_a_rank() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(64, 64),
            "conv1d": nn.Conv1d(32, 32, 3),
            "conv2d": nn.Conv2d(64, 64, 3, groups=2),
            "conv3d": nn.Conv3d(32, 32, 3),
            "up": nn.ConvTranspose2d(64, 32, 4),
            "lstm": nn.LSTM(64, 64, proj_size=32),
            "gru": nn.GRU(64, 64, bidirectional=True),
            "rnn": nn.RNN(64, 64),
            "attention": nn.MultiheadAttention(64, 4, kdim=48),
        }
    )
    plan = pf.plan(model, 4)
    assert all(e.rank == 4 for e in plan)
    assert [e.name for e in plan if e.layer in ("lstm", "attention")] == [
        *("lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.weight_hr_l0"),
        *("attention.q", "attention.k", "attention.v", "attention.out"),
    ]
    assert plan["conv2d"].shape == (64, 32, 3, 3)
    assert plan["conv2d"].matrix.blocks == 2
    assert plan["attention.k"].shape == (64, 48)


def test_not_smaller() -> None:
    model = nn.Sequential(nn.Linear(64, 10), nn.Linear(1, 64), nn.Conv2d(3, 4, 1))
    assert reasons(model) == {
        "0": "not smaller: break-even is rank 8, below multiple of 16",
        "1": "not smaller: break-even is rank 0, below multiple of 16",
        "2": "not smaller: break-even is rank 1, below multiple of 16",
    }
    assert reasons(model, rank=0.9, multiple=1)["1"] == "not smaller: break-even is rank 0, below rank 1"
    assert (
        reasons(model, rank=pf.Energy(0.9))["0"] == "not smaller: break-even is rank 8, below multiple of 16"
    )


def test_a_tied_weight_names_its_partner() -> None:
    found = reasons(LSTMLanguageModel(vocabulary=70, d=64))
    assert found["decoder"] == "tied weight: shared with embedding.weight"
    assert found["embedding"] == "embedding: a lookup, not a product"
    assert found["lstm.weight_ih_l0"] == ""


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


def test_kept_and_only() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    assert reasons(model, keep=["1", "[12]"]) == {
        "0": "",
        "1": "kept by pattern '1'",
        "2": "kept by pattern '[12]'",
    }
    assert reasons(model, only=["1"], keep=["1"])["1"] == "kept by pattern '1'"
    assert reasons(model, only=["1", "0"])["2"] == "not matched by `only`"


class Special(nn.Linear):
    pass


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
    (lambda: Special(64, 64), {"0": "unsupported: no low-rank form is registered for Special"}),
    (lambda: nn.Bilinear(8, 8, 8), {"0": "unsupported: no low-rank form is registered for Bilinear"}),
    (Raw, {"0.table": "raw parameter: used by the module's own code, not covered"}),
    (lambda: nn.Embedding(9, 64), {"0": "embedding: a lookup, not a product"}),
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_torchs_own_quantized_layers() -> None:
    from torch.ao.quantization import quantize_dynamic

    model = quantize_dynamic(nn.Sequential(nn.Linear(64, 64), nn.Conv2d(32, 64, 3)))
    plan = pf.plan(model)
    assert plan["0"].reason == "quantized"
    assert plan["0"].shape == (64, 64)
    assert plan["1"].rank == 16
    assert plan.before.parameters == 64 * 32 * 9 + 64


def test_lora_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(64, 64))
    model.add_module("head", nn.Linear(64, 64))
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["fc"]), model)
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
        "0": "low-rank already, rank 8",
        "1.weight_ih_l0": "low-rank already, rank 8",
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


def test_patterns_may_match_what_stays_anyway() -> None:
    assert reasons(nn.Sequential(nn.Embedding(9, 64), nn.Linear(64, 64)), keep=["0"])["0"].startswith(
        "embedding"
    )


# Wrappers.


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
        nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )


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
    assert list(pf.spectra(wrapped)) == ["0.0", "1.0", "2"]


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("verb", [pf.factorize_, pf.reshape_, lambda model, plan: pf.merge_(model)])
def test_wrapped_models_are_refused(name: str, verb: Callable[..., Any]) -> None:
    model = blocks()
    wrapped = WRAPPERS[name](model)
    before = list(model.modules())
    with pytest.raises(ValueError, match="around the model; apply it to the model inside, then wrap that"):
        verb(wrapped, pf.plan(wrapped))
    assert list(model.modules()) == before


def test_compiled_submodules_are_refused() -> None:
    for compile_it in (lambda m: m.__setitem__(1, torch.compile(m[1])), lambda m: m[1].compile()):
        model = blocks()
        compile_it(model)
        with pytest.raises(ValueError, match="is compiled already; compile after this, not before"):
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


# Text.


def test_the_table() -> None:
    model = resnet18(width=16)
    model.layer1[0].conv1.requires_grad_(False)
    plan = pf.plan(
        model, keep=["conv1", "fc"], overrides={"layer4.*": pf.Energy(0.9)}, example=torch.randn(2, 3, 16, 16)
    )
    text = str(plan)
    lines = text.splitlines()
    assert lines[0].split() == [
        "layer",
        "type",
        "shape",
        "rank",
        "weights",
        "MACs",
        "of",
        "bytes",
        "left",
        "why",
        "it",
        "stays",
    ]
    assert len(lines[1 : lines.index("")]) == len(plan.entries)
    assert "energy 0.9" in text
    assert "5 ranks are decided when the plan is applied" in text
    row = next(line for line in lines if line.startswith("layer1.0.conv1 "))
    assert " 0.0% " in f"{row} "  # frozen: none of the bytes
    for label in (
        "parameters",
        "MACs forward",
        "MACs backward",
        "gradient bytes (DDP)",
        "FSDP2 bytes",
        "memory, Adam",
    ):
        assert any(line.startswith(label) for line in lines)
    assert f"{plan.before.parameters:,}" in text
    assert f"{plan.after.parameters:,}" in text
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[1 : lines.index("")]]
    vectors = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert sum(shares) == pytest.approx(100 * (1 - vectors / plan.after.trainable), abs=1.5)


def test_the_table_after_factorizing_has_errors() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    W = model[0].weight.detach().clone()
    plan = pf.factorize_(model, pf.plan(model))
    relative = (W - model[0].weight.detach()).norm() / W.norm()
    assert plan["0"].error == pytest.approx(float(relative), rel=1e-4)
    assert "error" in str(plan).splitlines()[0]
    assert f"{float(relative):.3f}" in str(plan)


# JSON.


def rich_plan() -> pf.Plan:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(64, 64, 3, groups=2),
            "up": nn.ConvTranspose1d(64, 64, 3),
            "a": nn.MultiheadAttention(64, 4),
            "lstm": nn.LSTM(64, 64),
            "emb": nn.Embedding(5, 4),
            "lazy": nn.LazyLinear(4),
        }
    )
    return pf.plan(
        model,
        overrides={"a": pf.StableRank({"a.q": 3.0}), "lstm.weight_ih_l0": pf.Budget(params=1e5), "up": 5},
        keep=["lstm.weight_hh_l0"],
        example=lambda m: m["conv"](torch.randn(1, 64, 8, 8)),
        min_saving=0.1,
    )


def test_json_round_trip(tmp_path: Path) -> None:
    plan = rich_plan()
    again = pf.Plan.from_json(plan.to_json())
    assert again == plan
    assert (again.hash, str(again), again.after) == (plan.hash, str(plan), plan.after)
    plan.save(tmp_path / "plan.json")
    assert pf.Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["pufferfish_plan"] == 1


def test_json_of_another_version() -> None:
    data = json.loads(rich_plan().to_json())
    with pytest.raises(
        ValueError, match="not a plan of version 1 but of version 2: it needs another pufferfish"
    ):
        pf.Plan.from_json(json.dumps({**data, "pufferfish_plan": 2}))
    with pytest.raises(ValueError, match=r"not a plan of version 1$"):
        pf.Plan.from_json(json.dumps({"model": "resnet"}))


def damage(change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(rich_plan().to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("entries"), "damaged: 'entries'"),
        (lambda d: d.pop("before"), "damaged: 'before'"),
        (lambda d: d.update(entries=5), "damaged"),
        (lambda d: d.update(entries=[5]), "damaged"),
        (lambda d: d.update(before={}), "damaged.*parameters"),
        (lambda d: d["entries"][0].pop("name"), "damaged.*name"),
        (lambda d: d["entries"][0].update(colour="red"), "damaged.*colour"),
        (lambda d: d["entries"][0]["matrix"].update(m=7), "damaged"),
        (lambda d: d["entries"][0]["matrix"].pop("n"), "damaged"),
        (lambda d: d["entries"][2]["rule"].update(rule="Oracle"), "unknown rank rule 'Oracle'"),
        (lambda d: d["entries"][2]["rule"].update(keep=1), "damaged"),
        (lambda d: d["entries"][0].update(rank=0), "conv: rank 0 is not a whole number from 1 to 32"),
        (lambda d: d["entries"][0].update(rank=33), "conv: rank 33 is not a whole number from 1 to 32"),
        (lambda d: d["entries"][0].update(rank=4.0), "conv: rank 4.0 is not a whole number"),
        (lambda d: d["entries"][0].update(rank=True), "conv: rank True is not a whole number"),
        (lambda d: d["entries"][-1].update(rank=1), "lazy: rank 1 is not a whole number from 1 to 0"),
    ],
)
def test_damaged_json(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pf.Plan.from_json(damage(change))


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '"plan"', "null"])
def test_what_is_no_plan_at_all(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=r"p\.json: this is not a plan"):
        pf.Plan.load(tmp_path / "p.json")


def test_binary_rubbish_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00PK")
    with pytest.raises(ValueError, match=r"p\.json: "):
        pf.Plan.load(tmp_path / "p.json")


def test_an_edited_rank_is_applied() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    data = json.loads(pf.plan(model, 8).to_json())
    data["entries"][0]["rank"] = 5
    data["entries"][1]["rank"] = None
    plan = pf.Plan.from_json(json.dumps(data))
    assert plan.after.parameters == 5 * 128 + 64 * 65 + 64
    pf.factorize_(model, plan)
    assert model[0].ranks == {"": 5}
    assert type(model[1]) is nn.Linear


def test_the_hash_covers_decisions_only() -> None:
    model = blocks()
    plan = pf.plan(model)
    same = [
        pf.plan(model, 16, keep=["2"]),  # another rule, another reason, the same ranks
        pf.plan(model, multiple=8, keep=["2"]),
        pf.plan(model, example=torch.randn(2, 64)),
        pf.plan(copy.deepcopy(model).bfloat16().requires_grad_(False)),
        pf.factorize_(copy.deepcopy(model), plan),
        plan.replace(reversed(plan.entries)),
    ]
    assert {p.hash for p in same} == {plan.hash}
    other = [
        pf.plan(model, 8),
        pf.plan(model, keep=["0.0"]),
        pf.plan(model, pf.Energy(0.5)),
        pf.plan(model, pf.Energy(0.6)),
        pf.plan(nn.Sequential(*blocks(), nn.Linear(10, 10))),
        pf.plan(nn.Sequential(*list(blocks())[:2], nn.Linear(64, 11))),
    ]
    assert len({plan.hash, *(p.hash for p in other)}) == 1 + len(other)


def test_the_hash_is_the_same_in_another_process() -> None:
    code = (
        "import torch, pufferfish as pf; from torch import nn;"
        "print(pf.plan(nn.Sequential(nn.Linear(64, 64), nn.Conv2d(32, 64, 3)), pf.Energy(0.5)).hash)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    here = pf.plan(nn.Sequential(nn.Linear(64, 64), nn.Conv2d(32, 64, 3)), pf.Energy(0.5)).hash
    assert ran.stdout.strip() == here


def test_entries_by_name() -> None:
    plan = pf.plan(blocks())
    assert plan["0.0"].shape == (64, 64)
    assert [e.name for e in plan] == ["0.0", "1.0", "2"]
    with pytest.raises(KeyError, match="the plan has no layer 'fc'"):
        plan["fc"]


# Models that a plan does not fit.


def net(second: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), second)


Make = Callable[[], nn.Module]


def linear() -> nn.Module:
    return nn.Linear(64, 64)


MISFITS: list[tuple[Make, Make, str]] = [
    (linear, nn.ReLU, "1: the plan is for a Linear, the model has a ReLU"),
    (linear, lambda: nn.Conv2d(64, 64, 1), "1: the plan is for a Linear, the model has a Conv2d"),
    (linear, lambda: Special(64, 64), "1: the plan is for a Linear, the model has a Special"),
    (linear, lambda: nn.Linear(64, 48), "1: the plan is for a weight of 64×64 with a bias, the model has a weight of 48×64"),
    (linear, lambda: nn.Linear(64, 64, bias=False), "a bias, the model has a weight of 64×64 without a bias"),
    (
        lambda: nn.Conv2d(64, 64, 3, groups=2),
        lambda: nn.Conv2d(64, 64, 3, groups=4),
        "1: the plan is for a weight of 64×32×3×3 in 2 blocks with a bias, the model has a weight of 64×16×3×3 in 4",
    ),
    (
        lambda: nn.LSTM(64, 64, 2),
        lambda: nn.LSTM(64, 64),
        "1.weight_ih_l1: the plan is for a weight of 256×64 in 4 blocks without a bias, the model has no such weight",
    ),
    (
        lambda: nn.MultiheadAttention(64, 4),
        lambda: nn.MultiheadAttention(64, 4, kdim=32),
        "1.q: the plan is for a weight of 64×64 with a bias, the model",
    ),
    (lambda: nn.Sequential(nn.Linear(64, 64)), linear, "1.0: the plan has this layer, the model does not"),
    (
        linear,
        lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
        "1: the plan is for a Linear, the model has a ParametrizedLinear",
    ),
    (linear, lambda: prune.identity(nn.Linear(64, 64), "weight"), "1: unsupported: its weight is computed"),
]  # fmt: skip


@pytest.mark.parametrize(("planned", "actual", "message"), MISFITS, ids=[m[:30] for *_, m in MISFITS])
@pytest.mark.parametrize("verb", [pf.factorize_, pf.reshape_])
def test_a_plan_for_another_model(
    planned: Make, actual: Make, message: str, verb: Callable[..., Any]
) -> None:
    plan = pf.plan(net(planned()), 4)
    model = net(actual())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    modules = dict(model.named_modules())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        verb(model, plan, optimizer)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_plan_applied_twice() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    plan = pf.plan(model)
    pf.factorize_(model, plan)
    with pytest.raises(
        ValueError, match="0: the plan is for a Linear, the model has a LowRankLinear; it is low-rank already"
    ):
        pf.factorize_(model, plan)


def test_kept_layers_must_fit_too() -> None:
    plan = pf.plan(net(nn.Linear(64, 64)), keep=["1"])
    with pytest.raises(ValueError, match="1: the plan is for a weight of 64×64"):
        pf.factorize_(net(nn.Linear(64, 32)), plan)


def test_a_type_that_is_no_longer_registered() -> None:
    model = net(Special(64, 64))
    plan = pf.plan(net(nn.Linear(64, 64)))
    renamed = plan.replace(
        pf.Entry(**{**vars(e), "type": "Special"}) if e.name == "1" else e for e in plan.entries
    )
    with pytest.raises(
        ValueError, match=r"1: no low-rank form is registered for Special; call pufferfish\.register"
    ):
        pf.factorize_(model, renamed)


def test_rules_of_a_plan_for_another_model() -> None:
    plan = pf.plan(nn.Sequential(nn.Linear(64, 64)), pf.Energy(0.5))
    with pytest.raises(ValueError, match="0: the plan has a rule for it"):
        pf.resolve(plan, nn.Sequential(nn.ReLU()))
