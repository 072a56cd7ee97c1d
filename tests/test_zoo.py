"""Every architecture of the zoo: planned, factorized, trained, merged, saved and exported."""

import copy
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import pufferfish as pf
from pufferfish.layers import base
from pufferfish.planning.text import plan_table
from zoo import ZOO, Case
from zoo.case import all_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),  # exporting nn.LSTM
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.filterwarnings("ignore:The plan changes:UserWarning"),  # siamese, weight_norm_tcn
    pytest.mark.filterwarnings("error:the example does not run on fake tensors:UserWarning"),
]

# Models without factorized layers, and the start of the reason given for every large layer.
DENSE = {"siamese": "tied weight"}
# The models that every run tries; the others are slow.
DEFAULT = {
    "resnet_basic", "resnext", "mobilenet_v2", "unet", "wavenet", "vit_encoder", "seq2seq_transformer", "vit_lora",
    "bilstm_tagger", "gru_seq2seq", "lstm_tied", "char_rnn", "tied_autoencoder", "siamese", "weight_norm_tcn",
    "hf_gpt2", "hf_t5", "hf_falcon", "hf_llava", "hf_mixtral",
}  # fmt: skip
# Models whose MACs are counted on a real copy: they read values, or have fp32 experts. The others are not copied.
COPIED = {
    "bilstm_tagger", "hf_whisper", "hf_wav2vec2", "hf_llava", "hf_detr", "hf_mixtral", "hf_deepseek_v3", "hf_gpt_oss",
    "hf_nemotron_h",
}  # fmt: skip
# Models that do not support float64, and the operation that does not. The others are compared to 1e-8.
SINGLE = {"char_rnn": "one_hot(...).float()"}
# Models that compute in float32 also where they get float64, and what: compared to 1e-6.
ROUNDED = {"hf_nemotron_h": "sum of the experts, as they are multiplied by float32 weights of the router"}
# Models with layers whose gradient is zero in the dense model too: their input is zero, or their values are equal.
UNUSED = {"hf_detr": "model.decoder.layers.0.self_attn.[qkv]_proj.*"}
# Export takes seconds: by default one model for each type of low-rank layer.
EXPORTED = {
    "resnet_basic", "unet", "vit_encoder", "lstm_tied", "gru_seq2seq", "char_rnn", "hf_gpt2", "hf_mixtral", "vit_lora",
}  # fmt: skip


@dataclass
class Subject:
    """One case and the objects that its tests share. Tests work on copies."""

    name: str
    case: Case

    @cached_property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.case.inputs()

    @property
    def example(self) -> Any:
        args, kwargs = self.inputs
        return self.run_counted if args and kwargs else kwargs or args

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.case.build()

    @cached_property
    def dense(self) -> nn.Module:
        """A model that has run: libraries install hooks and store tensors and flags in the first forward pass."""
        model = self.build()
        self.run(model)
        return model

    @cached_property
    def plan(self) -> pf.Plan:
        warns = self.name in COPIED
        with pytest.warns(UserWarning, match="on a real copy of the model") if warns else nullcontext():
            return pf.plan(self.dense, overrides={"*": pf.Ratio(0.25, multiple=8)}, example=self.example)

    @cached_property
    def _factorized(self) -> tuple[nn.Module, torch.optim.SGD, pf.Plan]:
        model = self.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.step(model, optimizer)
        return model, optimizer, pf.factorize_(model, self.plan, optimizer)

    @property
    def applied_plan(self) -> pf.Plan:
        return self._factorized[2]

    def low_rank(self) -> tuple[nn.Module, torch.optim.SGD]:
        """The model after one dense step, factorized; and its optimizer."""
        return copy.deepcopy(self._factorized[:2])

    def run(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, self.inputs
        )
        return model(*args, **kwargs)

    def run_counted(self, model: nn.Module) -> Any:
        """Run with attention of plain products: other kernels compute some of them again in backward."""
        with sdpa_kernel(SDPBackend.MATH):
            return self.run(model)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        model.train()
        optimizer.zero_grad()
        loss = self.case.output(self.run(model)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in ZOO],
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    case = ZOO[request.param]
    if case.needs:
        pytest.importorskip(case.needs)
    with pytest.MonkeyPatch.context() as patch:
        if case.linear:
            patch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
            pf.register(case.linear, pf.layers.LowRankLinear)
        yield Subject(request.param, case)


def types(model: nn.Module) -> list[tuple[str, str]]:
    """Names of modules and of their types; by name, because a parametrized module has its own type."""
    return [(name, type(m).__qualname__) for name, m in model.named_modules()]


def weight_name(parameter: str) -> str:
    """`conv.parametrizations.weight.original1` is a part of `conv.weight`."""
    return re.sub(r"parametrizations\.(\w+)\.original\d*$", r"\1", parameter)


def entry_name(e: pf.planning.Entry, names: set[str]) -> str:
    """Name of the parameter of a plan entry."""
    if e.matrix is not None:
        return f"{e.layer}.{e.matrix.weight}" if e.layer else e.matrix.weight
    return e.name if e.name in names else f"{e.name}.weight"


def test_plan_accounts_for_every_matrix(subject: Subject) -> None:
    plan, model = subject.plan, subject.dense
    text = plan_table(plan)
    assert all(e.name in text for e in plan)
    assert pf.Plan.from_json(plan.to_json()) == plan
    assert all((e.rank is None) == bool(e.reason) for e in plan), "exactly one of rank and reason must be set"

    # Every parameter of two or more dimensions is in the plan, with all of its weights, once.
    # But for biases, of which each expert has its own.
    every = {weight_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    biases = {f"{e.layer}.{e.matrix.bias}" for e in plan if e.matrix is not None and e.matrix.bias}
    shapes: dict[str, Any] = {
        name: p.shape for name, p in every.items() if p.dim() >= 2 and name not in biases
    }
    shapes |= {
        weight_name(name): model.get_submodule(name.partition(".parametrizations")[0]).weight.shape
        for name, _ in model.named_parameters()
        if ".parametrizations.weight." in name
    }
    counted: dict[str, int] = {}
    for e in plan:
        name = entry_name(e, set(shapes))
        counted[name] = counted.get(name, 0) + e.before
    # A module with several names is in the plan once.
    first = {weight_name(name) for name, _ in model.named_parameters()}
    assert counted.keys() <= shapes.keys()
    assert {name for name in shapes if name in first} <= counted.keys()
    assert counted == {name: math.prod(shapes[name]) if name in first else 0 for name in counted}
    if not any("parametrizations" in name for name, _ in model.named_parameters()):
        vectors = sum(p.numel() for name, p in model.named_parameters() if p.dim() < 2 or name in biases)
        assert sum(e.before for e in plan) + vectors == plan.before.parameters


def test_something_is_factorized(subject: Subject) -> None:
    dense = DENSE.get(subject.name)
    assert bool(subject.plan.ranks) == (dense is None)
    if dense is None:
        assert subject.plan.after.parameters < subject.plan.before.parameters
        assert all(e.rank for e in subject.plan if ".experts." in e.name)
    else:
        assert all(e.reason.startswith((dense, "not smaller")) for e in subject.plan)


def test_macs(subject: Subject) -> None:
    """The plan predicts the MACs of the low-rank model, which are counted while it runs."""
    predicted = subject.plan.after
    actual = pf.plan(subject.low_rank()[0], example=subject.run_counted).before
    assert predicted.forward_macs
    assert actual.forward_macs
    assert predicted.forward_macs == actual.forward_macs
    # In a packed batch, some initial states have no gradient.
    tolerance = 0.02 if subject.name == "bilstm_tagger" else 0.0
    assert predicted.backward_macs == pytest.approx(actual.backward_macs, rel=tolerance)


def test_factorized(subject: Subject) -> None:
    model, optimizer = subject.low_rank()
    layers = {name: m for name, m in model.named_modules() if isinstance(m, pf.layers.LowRank)}
    ranks = subject.plan.ranks
    assert {name: m.ranks for name, m in layers.items() if name in ranks} == ranks
    assert sum(p.numel() for p in model.parameters()) == subject.plan.after.parameters
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == subject.plan.after.trainable
    assert all(0 <= e.error <= 1 for e in subject.applied_plan if e.rank and e.error is not None)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    for mode in (True, False):
        output = subject.case.output(subject.run(model.train(mode)))
        assert output.isfinite().all()


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_equals_its_product(subject: Subject, mode: str) -> None:
    """The low-rank model computes the same as the dense model with the products of the factors."""
    model, _ = subject.low_rank()
    dtype = torch.float32 if subject.name in SINGLE else torch.float64
    model = model.to(dtype).train(mode == "train")
    dense = copy.deepcopy(model)
    pf.merge_(dense)
    assert not any(isinstance(m, pf.layers.LowRank) for m in dense.modules())
    if hasattr(dense, "set_experts_implementation"):
        cast(Any, dense).set_experts_implementation("eager")  # a loop over experts, which takes float64
    with torch.set_grad_enabled(
        mode == "train"
    ):  # without gradients nn.TransformerEncoder uses its fused path
        got, want = (all_tensors(subject.run(m, dtype)) for m in (model, dense))
    tolerance = 1e-4 if subject.name in SINGLE else 1e-6 if subject.name in ROUNDED else 1e-8
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * want.abs().max().item())


def test_trains(subject: Subject) -> None:
    model, optimizer = subject.low_rank()
    factors = {
        f"{name}.{leaf}": p
        for name, m in model.named_modules()
        if isinstance(m, pf.layers.LowRank)
        for x in m.factors()
        for leaf in (x.down, x.up)
        if (p := m.get_parameter(leaf)).requires_grad
    }
    before = {name: p.detach().clone() for name, p in factors.items()}
    assert math.isfinite(subject.step(model, optimizer))
    for name, p in factors.items():
        assert p.grad is not None, name
        assert p.isfinite().all(), name
        if not fnmatch(name, UNUSED.get(subject.name, "")):
            assert not torch.equal(p, before[name]), f"{name} did not move"


def test_a_model_that_changes_its_weights() -> None:
    """RWKV divides weights in eval mode and multiplies them in training mode, in place."""
    pytest.importorskip("transformers")
    subject = Subject("hf_rwkv", ZOO["hf_rwkv"])

    def build() -> nn.Module:
        model = subject.build()
        cast(Any, model).config.rescale_every = 1
        return model

    # Where it was not seen, it raises before outputs differ.
    model = build()
    pf.factorize_(model, pf.plan(model, rank=pf.Ratio(0.25, multiple=8)))
    subject.run(model)
    with pytest.raises(RuntimeError, match=r"weight of a low-rank layer .* cannot be changed"):
        subject.run(model.eval())

    # An example in eval mode shows it: these layers stay dense.
    model = build().eval()
    plan = pf.plan(model, rank=pf.Ratio(0.25, multiple=8), example=subject.example)
    kept = {
        e.name for e in plan if e.name.startswith("rwkv.blocks") and e.rank is None and e.matrix is not None
    }
    assert kept == {
        f"rwkv.blocks.{i}.{name}" for i in range(2) for name in ("attention.output", "feed_forward.value")
    }
    pf.factorize_(model, plan)
    dense = copy.deepcopy(model)
    pf.merge_(dense)
    for mode in (False, True, False):
        got, want = (all_tensors(subject.run(m.train(mode))) for m in (model, dense))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_merges_back(subject: Subject) -> None:
    model, optimizer = subject.low_rank()
    pf.merge_(model, optimizer)
    assert types(model) == types(subject.dense)
    got, want = ({k: (v.shape, v.dtype) for k, v in m.state_dict().items()} for m in (model, subject.dense))
    assert got == want
    assert list(got) == list(want)
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in subject.dense.parameters()
    ]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [
        id(p) for p in model.parameters()
    ]
    assert math.isfinite(subject.step(model, optimizer))


def test_saves_and_loads(subject: Subject, tmp_path: Path) -> None:
    model, _ = subject.low_rank()
    pf.save(model, tmp_path / "saved")
    fresh = subject.build(seed=1)
    pf.load(fresh, tmp_path / "saved")
    assert types(fresh) == types(model)
    got, want = (all_tensors(subject.run(m.eval())) for m in (fresh, model))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "subject",
    [pytest.param(name, marks=() if name in EXPORTED else pytest.mark.slow) for name in ZOO],
    indirect=True,
)
def test_exports(subject: Subject) -> None:
    model = subject.low_rank()[0].eval()
    args, kwargs = subject.inputs
    try:
        exported = torch.export.export(model, args, kwargs)
    except Exception:
        try:
            torch.export.export(subject.build().eval(), args, kwargs)
        except Exception as error:
            pytest.skip(f"the dense model's export fails: {type(error).__name__}: {first_line(error)}")
        raise
    got, want = (all_tensors(subject.run(m)) for m in (exported.module(), model))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
