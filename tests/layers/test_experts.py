"""Low-rank experts: the same function as transformers' modules with the products of the factors, and closed-form counts."""

import copy
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pufferfish as pf
from matrices import forced
from pufferfish.layers import LowRankExperts
from pufferfish.planning.profile import flop_formulas

transformers = pytest.importorskip("transformers")

E, K, D = 4, 2, 16

#: Experts modules of transformers with every layout that there is: (folder, class, names in its configuration, inner width).
LAYOUTS = {
    "gate and up as one matrix": ("mixtral", "MixtralExperts", {"num_local_experts": E, "intermediate_size": 24}),
    "gate and up apart": ("mixtral", "MixtralExperts", {"num_local_experts": E, "intermediate_size": 8}),
    "transposed, interleaved, biases": ("gpt_oss", "GptOssExperts", {"num_local_experts": E, "intermediate_size": 24}),
    "the same, apart": ("gpt_oss", "GptOssExperts", {"num_local_experts": E, "intermediate_size": 8}),
    "no gate": ("nemotron_h", "NemotronHExperts", {"n_routed_experts": E, "moe_intermediate_size": 8}),
}  # fmt: skip
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def build(layout, dtype=torch.float32):
    folder, name, sizes = LAYOUTS[layout]
    package = getattr(transformers.models, folder)
    config = getattr(package, f"configuration_{folder}")
    kind = getattr(getattr(package, f"modeling_{folder}"), name)
    made = getattr(config, name.replace("Experts", "Config"))(hidden_size=D, **sizes)
    made._experts_implementation = "eager"  # a loop over experts
    torch.manual_seed(0)
    experts = kind(made).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return nn.ModuleDict({"experts": experts})


def inputs(dtype=torch.float32, tokens=7):
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)])
    weights = torch.rand(tokens, K, dtype=dtype, requires_grad=True)
    return torch.randn(tokens, D, dtype=dtype, requires_grad=True), index, weights


def factorized(model, rank=3, **options):
    model = copy.deepcopy(model)
    pf.factorize_(model, forced(model, rank=rank, **options))
    return model


@every_layout
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_and_gradients(layout, dtype):
    model = factorized(build(layout, dtype))
    assert isinstance(model["experts"], LowRankExperts)
    dense = copy.deepcopy(model)
    pf.merge_(dense)
    tokens, index, weights = inputs(dtype)
    results = []
    for m in (model, dense):
        output = m["experts"](tokens, index, weights)
        results.append([output, *torch.autograd.grad(output.square().sum(), (tokens, weights))])
    assert_close(*results, 1e-10 if dtype == torch.float64 else 1e-4)
    # The gradients of the factors are those of the dense weights, by the chain rule.
    grads = [p.grad for p in (*model.parameters(), *dense.parameters())]
    assert grads == [None] * len(grads)
    for m in (model, dense):
        m["experts"](tokens, index, weights).square().sum().backward()
    for x, (down, up) in model["experts"].factors().items():
        G = x.to_matrix(dense["experts"].get_parameter(x.weight).grad)
        assert_close([up.grad, down.grad], [G @ down.mT, up.mT @ G], 1e-8 if dtype == torch.float64 else 1e-3)


@every_layout
def test_full_rank_is_the_dense_module(layout):
    dense = build(layout, torch.float64)
    model = factorized(dense, rank=999)
    args = inputs(torch.float64)
    assert_close([model["experts"](*args)], [dense["experts"](*args)], 1e-10)
    pf.merge_(model)
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize("keep", ["experts.gate_proj", "experts.up_proj", "experts.down_proj"])
@pytest.mark.parametrize("layout", ["gate and up apart", "the same, apart"])
def test_partly_factorized(layout, keep):
    model = build(layout, torch.float64)
    part = factorized(model, keep=[keep])
    kept = keep.removeprefix("experts.")
    assert f"{keep}.weight" in part.state_dict()
    assert kept not in part["experts"].ranks
    dense = copy.deepcopy(part)
    pf.merge_(dense)
    args = inputs(torch.float64)
    assert_close([part["experts"](*args)], [dense["experts"](*args)], 1e-10)
    x = next(x for x in type(part["experts"]).matrices(model["experts"]) if x.name == kept)
    for m in (model, dense):
        assert torch.equal(m["experts"].get_parameter(x.weight)[x.index], part.state_dict()[f"{keep}.weight"])


@every_layout
def test_state_dicts(layout):
    model = build(layout, torch.float64)
    plan = forced(model, rank=3)
    low_rank = pf.lowrank.factorize_state_dict(model.state_dict(), plan)
    ours = factorized(model).state_dict()
    assert low_rank.keys() == ours.keys()
    assert all(torch.equal(low_rank[name], ours[name]) for name in ours)
    dense = factorized(model)
    pf.merge_(dense)
    merged = pf.lowrank.merge_state_dict(low_rank, plan)
    assert list(merged) == list(dense.state_dict())
    assert all(torch.equal(merged[name], value) for name, value in dense.state_dict().items())


@settings(deadline=None, max_examples=40)
@given(inner=st.integers(1, 40), width=st.integers(1, 40), transposed=st.booleans())
def test_gate_and_up_are_one_matrix_where_that_is_smaller(inner, width, transposed):
    dense = nn.Module()
    shape, back = ((width, 2 * inner), (inner, width)) if transposed else ((2 * inner, width), (width, inner))
    dense.gate_up_proj = nn.Parameter(torch.empty(E, *shape, device="meta"))
    dense.down_proj = nn.Parameter(torch.empty(E, *back, device="meta"))
    dense.is_transposed = transposed
    *first, down = LowRankExperts.matrices(dense)
    together = min(2 * inner, width) * (2 * inner + width)
    apart = 2 * min(inner, width) * (inner + width)
    assert [x.name for x in first] == (["gate_up_proj"] if together < apart else ["gate_proj", "up_proj"])
    assert sum(x.full_rank * (x.m + x.n) for x in first) == min(together, apart)
    assert sum(x.numel for x in first) == dense.gate_up_proj.numel()
    assert (down.m, down.n, down.blocks) == (width, inner, E)


def test_rows_sorted_by_expert():
    """Llama 4 passes all tokens to all experts, and its weights have no flags that describe their layout."""
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    for inner in (24, 8):
        config = Llama4TextConfig(hidden_size=D, intermediate_size=inner, num_local_experts=E)
        dense = nn.ModuleDict({"experts": Llama4TextExperts(config).double()})
        for p in dense.parameters():
            nn.init.normal_(p, std=0.5)
        rows = torch.randn(3 * E, D, dtype=torch.float64)
        model = factorized(dense, rank=999)
        assert_close([model["experts"](rows)], [dense["experts"](rows)], 1e-10)


def test_every_experts_module_of_transformers_is_registered():
    """The modules whose forward transformers itself replaces by grouped products are those that we can replace."""
    found = []
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text()
        for match in re.finditer(r"@use_experts_implementation[^\n]*\n(?:@[^\n]*\n)*class (\w+)\(", text):
            found.append(f"transformers.models.{path.parent.name}.{path.stem}.{match[1]}")
    assert found
    from pufferfish.layers import base

    missing = [name for name in found if base._REGISTRY.get(name) is not LowRankExperts]
    assert not missing


def test_split_experts_are_refused():
    model = build("no gate")
    model["experts"]._is_expert_parallel = True
    assert {e.reason.partition(":")[0] for e in pf.plan(model)} == {"expert-parallel"}
    model["experts"]._is_expert_parallel = False
    plan = pf.plan(model, rank=2)
    assert plan.ranks
    model["experts"]._is_expert_parallel = True
    with pytest.raises(
        ValueError, match=r"experts\.up_proj: expert-parallel: a worker has only some of the experts"
    ):
        pf.factorize_(model, plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled(dtype):
    model = factorized(build("gate and up as one matrix"))["experts"].to(dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for m in (compiled, model):
        tokens, index, weights = inputs(dtype)
        output = m(tokens, index, weights)
        results.append([output, *torch.autograd.grad(output.square().mean(), [tokens, *model.parameters()])])
    assert_close(*results, 2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_macs_on_the_meta_device(dtype):
    """The shapes alone give the MACs of forward and backward, the same as a real run and as the plan."""
    model = factorized(build("gate and up apart"), rank=8)["experts"].to(dtype)  # no padding
    positions = inputs()[1].numel()
    weights = sum(p.numel() for p in model.parameters()) // E
    counted = []
    for device in ("cpu", "meta"):
        args = [x.detach().to(device).requires_grad_(x.requires_grad) for x in inputs(dtype)]
        with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counter:
            model.to(device)(*args).square().sum().backward()
        counted.append(counter.get_total_flops() // 2)
    assert counted == [3 * positions * weights] * 2


@pytest.mark.parametrize("trained", ["up_proj", "down_proj"])
def test_macs_of_a_part_that_is_trained(trained):
    model = build("no gate")
    for name, p in model.named_parameters():
        p.requires_grad_(name == f"experts.{trained}")
    args = [x.detach() for x in inputs()]
    plan = forced(model, 8, overrides={"*": 8}, example=lambda m: m["experts"](*args))
    pf.factorize_(model, plan)
    with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counter:
        output = model["experts"](*args)
        forward = counter.get_total_flops() // 2
        output.sum().backward()
    assert plan.after.forward_macs == forward
    assert plan.after.backward_macs == counter.get_total_flops() // 2 - forward
