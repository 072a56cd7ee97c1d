"""factorize_, reshape_ and merge_: what is carried over, and that a failure changes nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import pufferfish as pf
from pufferfish.lab.models import GPT, resnet18
from pufferfish.layers import LowRank


class Mixed(nn.Module):
    """One of each family of layers, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.grouped = nn.Conv2d(32, 64, 3, padding=1, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.lstm = nn.LSTM(32, 32, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True, add_bias_kv=True)
        self.fc = nn.Linear(64, 48)

    def forward(self, images: Tensor) -> Tensor:
        x = self.up(self.grouped(self.norm(self.conv(images)).relu()))
        x = x.mean(2).mT
        x = self.gru(self.lstm(x)[0])[0]
        return self.fc(self.attention(x, x, x)[0])


def images() -> Tensor:
    return torch.randn(2, 3, 12, 12)


def low_rank_modules(model: nn.Module) -> list[LowRank]:
    return [m for m in model.modules() if isinstance(m, LowRank)]


def snapshot(model: nn.Module, optimizer: optim.Optimizer | None) -> list[Any]:
    """Everything that must be the same after a failure: objects by identity, tensors by value."""
    found: list[Any] = [
        [(name, id(m), m.training) for name, m in model.named_modules()],
        [(name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)],
        [(name, v.tolist()) for name, v in model.state_dict(keep_vars=True).items()],
        [(k, id(v), list(v)) for m in model.modules() for k, v in vars(m).items() if k.endswith("_hooks")],
    ]
    if optimizer is not None:
        found += [
            [[id(p) for p in group["params"]] for group in optimizer.param_groups],
            [(id(p), {k: _plain(v) for k, v in s.items()}) for p, s in optimizer.state.items()],
        ]
    return found


def _plain(value: Any) -> Any:
    return (id(value), value.tolist()) if isinstance(value, Tensor) else value


# Splitting.


def test_layers_become_their_best_approximation() -> None:
    model = Mixed()
    dense = copy.deepcopy(model)
    done = pf.factorize_(model, pf.plan(model, 5))
    assert done.resolved
    for name, W in (("fc", dense.fc.weight), ("conv", dense.conv.weight.flatten(1))):
        made = model.get_submodule(name).weight.reshape(W.shape)
        lost = torch.linalg.svdvals(W.detach().double())[5:].square().sum().sqrt()
        torch.testing.assert_close((W - made).double().norm(), lost, rtol=1e-4, atol=1e-6)
        assert done[name].error == pytest.approx(float(lost / W.detach().norm()), rel=1e-4)


def test_at_full_rank_nothing_is_lost() -> None:
    model, x = Mixed().eval(), images()
    before = model(x)
    done = pf.factorize_(model, pf.plan(model, 1000, min_saving=-1))
    assert len(low_rank_modules(model)) == 7 + 4  # attention holds four low-rank Linear layers
    assert all(e.error is not None and e.error < 1e-6 for e in done)
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-5)


def test_rules_are_answered_from_the_weights_of_the_moment() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plan = pf.plan(model, pf.Energy(0.99), multiple=1)
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(64, 2) @ torch.randn(2, 64))
    done = pf.factorize_(model, plan)
    assert done["1"].rank == model[1].ranks[""] <= 2
    assert done["0"].rank == 31  # a random matrix needs all that still saves
    assert plan["1"].rank is None  # the plan that was given is data


def test_a_layer_that_starts_at_zero_learns() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 48))
    nn.init.zeros_(model[2].weight)
    pf.factorize_(model, pf.plan(model, 8))
    assert (model[2].weight == 0).all()
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(16, 32)) - 1).square().mean().backward()
        optimizer.step()
    assert model[2].weight.count_nonzero() > 1000


# What is carried over.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_mode_and_flags(dtype: torch.dtype) -> None:
    model = Mixed().to(dtype)
    model.fc.weight.requires_grad_(False)
    model.attention.in_proj_weight.requires_grad_(False)
    model.conv.eval()
    pf.factorize_(model, pf.plan(model, 4))
    assert {p.dtype for p in model.parameters()} == {dtype}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    projections = {f"attention.{x}.{side}.weight" for x in "qkv" for side in ("down", "up")}
    assert frozen == {"fc.down.weight", "fc.up.weight"} | projections
    assert not any(m.training for m in model.conv.modules())
    assert all(m.training for m in model.fc.modules())


@pytest.mark.parametrize(
    ("build", "order"),
    [
        (lambda: nn.Conv2d(16, 32, 3), torch.channels_last),
        (lambda: nn.ConvTranspose2d(32, 16, 3), torch.channels_last),
        (lambda: nn.Conv3d(16, 32, 3), torch.channels_last_3d),
    ],
)
def test_memory_format(build: Callable[[], nn.Module], order: torch.memory_format) -> None:
    model = nn.Sequential(build()).to(memory_format=order)
    plain = nn.Sequential(build())
    for m in (model, plain):
        pf.factorize_(m, pf.plan(m, 4))
    assert all(p.is_contiguous(memory_format=order) for p in model.parameters() if p.dim() > 3)
    assert any(not p.is_contiguous() for p in model.parameters())
    assert all(p.is_contiguous() for p in plain.parameters())
    pf.merge_(model)
    assert model[0].weight.is_contiguous(memory_format=order)
    assert not model[0].weight.is_contiguous()


@pytest.mark.parametrize("kernel", [1, 3])
def test_gradients_lie_as_their_weights(kernel: int) -> None:
    """Else optimizers leave their fast paths."""
    model = nn.Sequential(nn.Conv2d(16, 32, kernel, bias=False)).to(memory_format=torch.channels_last)
    pf.factorize_(model, pf.plan(model, 4))
    model(torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.stride() == p.stride()


def test_parameter_attributes() -> None:
    model = Mixed()
    for name, p in model.named_parameters():
        p.my_name = name  # type: ignore[attr-defined]
    pf.factorize_(model, pf.plan(model, 4))
    assert model.fc.down.weight.my_name == model.fc.up.weight.my_name == "fc.weight"
    assert model.fc.up.bias.my_name == "fc.bias"
    assert model.attention.q.up.bias.my_name == "attention.in_proj_bias"
    pf.merge_(model)
    assert {p.my_name for p in model.parameters()} == {name for name, _ in Mixed().named_parameters()}  # type: ignore[attr-defined]


def test_unchanged_parameters_are_the_very_same() -> None:
    model = Mixed()
    before = dict(model.named_parameters())
    pf.factorize_(model, pf.plan(model, 4, keep=["lstm.weight_hh_*"]))
    after = dict(model.named_parameters())
    moved = {"fc.up.bias": "fc.bias", "conv.up.bias": "conv.bias", "up.up.bias": "up.bias",
             "attention.out.up.bias": "attention.out_proj.bias"}  # fmt: skip
    same = [name for name in after if name.startswith(("norm", "lstm.bias", "gru.bias", "attention.bias"))]
    same += [name for name in after if name.startswith("lstm.weight_hh")]
    assert len(same) == 2 + 8 + 2 + 2 + 4
    for new, old in (moved | dict(zip(same, same, strict=True))).items():
        assert after[new] is before[old]
    pf.merge_(model)
    merged = dict(model.named_parameters())
    for name in [*same, *moved.values()]:
        assert merged[name] is before[name]


def test_other_attributes_of_the_layer() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1, padding_mode="reflect"))
    model[0].tag = "mine"
    pf.factorize_(model, pf.plan(model, 4))
    assert (model[0].tag, model[0].stride, model[0].out_channels) == ("mine", (2, 2), 32)
    pf.merge_(model)
    assert model[0].tag == "mine"
    assert model[0].padding_mode == "reflect"


# Hooks.


def add_call_hooks(layer: nn.Module, fired: list[str]) -> list[Any]:
    return [
        layer.register_forward_pre_hook(lambda m, args: fired.append("before")),
        layer.register_forward_hook(lambda m, args, kwargs, out: fired.append("after"), with_kwargs=True),
        layer.register_forward_hook(lambda m, args, out: fired.append("always"), always_call=True),
        layer.register_full_backward_pre_hook(lambda m, grad: fired.append("backward before")),
        layer.register_full_backward_hook(lambda m, inputs, outputs: fired.append("backward after")),
    ]


def test_call_hooks_go_along_and_back() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(2, 64)
    fired: list[str] = []
    handles = add_call_hooks(model[1], fired)
    expected = ["before", "after", "always", "backward before", "backward after"]
    for change in (lambda: pf.factorize_(model, pf.plan(model)), lambda: pf.merge_(model)):
        change()
        fired.clear()
        model(x).sum().backward()
        assert fired == expected
    pf.factorize_(model, pf.plan(model))
    for handle in handles:
        handle.remove()
    fired.clear()
    model(x).sum().backward()
    assert fired == []


def test_a_hook_that_changes_the_output_still_does() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].register_forward_hook(lambda m, args, out: out * 0 + 7)
    pf.factorize_(model, pf.plan(model))
    assert (model(torch.randn(2, 64)) == 7).all()


def test_hooks_on_parameters_that_stay_go_on_firing() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    seen: list[int] = []
    model[0].bias.register_hook(lambda grad: seen.append(grad.numel()))
    pf.factorize_(model, pf.plan(model))
    model(torch.randn(2, 64)).sum().backward()
    pf.merge_(model)
    model(torch.randn(2, 64)).sum().backward()
    assert seen == [64, 64]


# A failure in the last layer changes nothing, in the first ones neither.


def poison(value: float) -> Callable[[Mixed], None]:
    def break_it(model: Mixed) -> None:
        with torch.no_grad():
            model.fc.weight[3, 4] = value

    return break_it


def tie(model: Mixed) -> None:
    model.also = nn.Linear(64, 48)
    model.also.weight = model.fc.weight


def inner_hook(model: Mixed) -> None:
    model.attention.out_proj.register_forward_hook(lambda *args: None)


FAILURES: dict[str, tuple[Callable[[Mixed], Any], str]] = {
    "nan": (poison(float("nan")), "fc: the weight contains inf or NaN; nothing was changed"),
    "inf": (poison(float("inf")), "fc: the weight contains inf or NaN"),
    "tied": (tie, "fc: its weight is shared with another layer"),
    "state dict hook": (
        lambda m: m.fc.register_state_dict_post_hook(lambda *args: None),
        r"fc: it has hooks \(state_dict_hooks\) that cannot be carried over; remove them",
    ),
    "state dict pre-hook": (lambda m: m.fc.register_state_dict_pre_hook(lambda *args: None), "state_dict_pre_hooks"),
    "load pre-hook": (lambda m: m.fc.register_load_state_dict_pre_hook(lambda *args: None), "load_state_dict_pre_hooks"),
    "load post-hook": (lambda m: m.fc.register_load_state_dict_post_hook(lambda *args: None), "load_state_dict_post_hooks"),
    "tensor hook": (lambda m: m.fc.weight.register_hook(lambda grad: grad), r"fc\.weight: it has gradient hooks"),
    "accumulation hook": (
        lambda m: m.fc.weight.register_post_accumulate_grad_hook(lambda p: None),
        r"fc\.weight: it has gradient hooks that cannot be carried over; remove them",
    ),
    "sliced bias hook": (
        lambda m: m.attention.in_proj_bias.register_hook(lambda grad: grad),
        r"attention\.in_proj_bias: it has gradient hooks",
    ),
    "inner hook": (inner_hook, "attention: there are hooks inside it"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_changes_nothing(name: str) -> None:
    model = Mixed()
    break_it, message = FAILURES[name]
    plan = pf.plan(model, 4)
    optimizer = optim.Adam(model.parameters())
    model(images()).sum().backward()
    optimizer.step()
    break_it(model)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=message):
        pf.factorize_(model, plan, optimizer)
    assert str(snapshot(model, optimizer)) == str(before)  # as text, where NaN is equal to NaN


@pytest.mark.parametrize("name", ["tied", "tensor hook", "state dict hook"])
def test_reshape_refuses_the_same(name: str) -> None:
    model = Mixed()
    break_it, message = FAILURES[name]
    plan = pf.plan(model, 4)
    break_it(model)
    before = snapshot(model, None)
    with pytest.raises(ValueError, match=message):
        pf.reshape_(model, plan)
    assert snapshot(model, None) == before


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda p: optim.LBFGS(p), "LBFGS cannot follow a change of parameters"),
        (lambda p: optim.SparseAdam(p), "SparseAdam cannot follow"),
        (lambda p: [optim.SGD(p, 0.1), optim.LBFGS(p)], "LBFGS cannot follow"),
        (
            lambda p: [optim.lr_scheduler.StepLR(optim.SGD(p, 0.1), 1)],
            "a StepLR is not a torch.optim.Optimizer",
        ),
    ],
)
def test_optimizers_that_cannot_follow(optimizer: Callable[[Any], Any], message: str) -> None:
    model = Mixed()
    given = optimizer(list(model.parameters()))
    before = snapshot(model, None)
    with pytest.raises(TypeError, match=message):
        pf.factorize_(model, pf.plan(model, 4), given)
    with pytest.raises(TypeError, match=message):
        pf.reshape_(model, pf.plan(model, 4), given)
    assert snapshot(model, None) == before
    pf.factorize_(model, pf.plan(model, 4))
    before = snapshot(model, None)
    with pytest.raises(TypeError, match=message):
        pf.merge_(model, given)
    assert snapshot(model, None) == before


def test_a_budget_that_cannot_be_met_changes_nothing() -> None:
    model = Mixed()
    plan = pf.plan(model, pf.Budget(params=10))
    before = snapshot(model, None)
    with pytest.raises(ValueError, match="the budget is too small"):
        pf.factorize_(model, plan)
    assert snapshot(model, None) == before


@pytest.mark.parametrize("hook", ["state", "inside", "gradient"])
def test_merge_refuses_before_it_changes_anything(hook: str) -> None:
    model = Mixed()
    pf.factorize_(model, pf.plan(model, 4))
    if hook == "state":
        model.fc.register_state_dict_post_hook(lambda *args: None)
    elif hook == "inside":
        model.fc.down.register_forward_hook(lambda *args: None)
    else:
        model.fc.up.weight.register_hook(lambda grad: grad)
    before = snapshot(model, None)
    with pytest.raises(ValueError, match=r"fc.*cannot be carried over; remove them"):
        pf.merge_(model)
    assert snapshot(model, None) == before


@pytest.mark.parametrize("verb", [pf.factorize_, pf.reshape_])
def test_the_model_itself_is_the_layer(verb: Callable[..., Any]) -> None:
    layer = nn.Linear(64, 64)
    with pytest.raises(
        ValueError, match=r"the model itself is the layer to replace; put it into an nn\.Sequential"
    ):
        verb(layer, pf.plan(layer))
    model = nn.Sequential(layer)
    pf.factorize_(model, pf.plan(model))
    with pytest.raises(
        ValueError, match=r"the model itself is the low-rank layer; put it into an nn\.Sequential"
    ):
        pf.merge_(model[0])


# Devices, copies, precision, compilation.


def test_on_meta() -> None:
    with torch.device("meta"):
        model = Mixed()
    plan = pf.plan(Mixed(), 4)
    done = pf.factorize_(model, plan)
    assert all(p.is_meta for p in model.parameters())
    assert all(e.error is None for e in done)
    assert sum(p.numel() for p in model.parameters()) == plan.after.parameters
    pf.merge_(model)
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in Mixed().state_dict().items()
    }


def test_rules_need_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64))
    plan = pf.plan(model, pf.Energy(0.5))
    with pytest.raises(ValueError, match="0: the weight is on the meta device and has no values"):
        pf.factorize_(model, plan)
    with pytest.raises(ValueError, match="on the meta device"):
        pf.spectra(model)


def test_deepcopy() -> None:
    model, x = Mixed().eval(), images()
    pf.factorize_(model, pf.plan(model, 4))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    pf.merge_(twin)
    assert not low_rank_modules(twin)
    assert low_rank_modules(model)


def test_autocast() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Flatten(), nn.Linear(32 * 100, 64)), images()
    pf.factorize_(model, pf.plan(model, 8))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), model(x), rtol=0.05, atol=0.05)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def small() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 100, 64))
    pf.factorize_(model, pf.plan(model, 8))
    return model, images()


def compiled_equals_eager(backend: str) -> None:
    model, x = small()
    twin = copy.deepcopy(model)
    fast = torch.compile(twin, backend=backend)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    model(x).square().sum().backward()
    fast(x).square().sum().backward()
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)


def test_compiled_equals_eager() -> None:
    compiled_equals_eager("aot_eager")


@pytest.mark.slow
def test_compiled_with_inductor_equals_eager() -> None:
    compiled_equals_eager("inductor")


# reshape_


def test_reshaped_factors_are_nan_until_loaded() -> None:
    trained, x = Mixed().eval(), images()
    done = pf.factorize_(trained, pf.plan(trained, 4))
    fresh = Mixed().eval()
    assert pf.reshape_(fresh, done).hash == done.hash
    assert fresh.fc.down.weight.isnan().all()
    assert fresh.fc.up.weight.isnan().all()
    assert fresh(x).isnan().any()
    assert not fresh.fc.up.bias.isnan().any()
    assert list(fresh.state_dict()) == list(trained.state_dict())
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(x), trained(x))


def test_reshape_on_meta_then_assign() -> None:
    trained, x = Mixed().eval(), images()
    done = pf.factorize_(trained, pf.plan(trained, 4))
    with torch.device("meta"):
        fresh = Mixed().eval()
    pf.reshape_(fresh, pf.Plan.from_json(done.to_json()))
    assert all(p.is_meta for p in fresh.parameters())
    fresh.load_state_dict(trained.state_dict(), assign=True)
    assert torch.equal(fresh(x), trained(x))


def test_reshape_needs_ranks() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(
        ValueError,
        match=r"0: the plan still holds a rule here, not a rank; give the plan that factorize_ returned",
    ):
        pf.reshape_(model, pf.plan(model, pf.Energy(0.5)))
    assert type(model[0]) is nn.Linear


def test_reshape_ignores_values() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    plan = pf.plan(model)
    nn.init.constant_(model[0].weight, float("nan"))
    pf.reshape_(model, plan)
    assert low_rank_modules(model)


# merge_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_merge_gives_the_dense_model_back(dtype: torch.dtype) -> None:
    model, x = Mixed().to(dtype).eval(), images().to(dtype)
    original = [(name, type(m)) for name, m in model.named_modules()]
    shapes = [(name, v.shape, v.dtype) for name, v in model.state_dict().items()]
    pf.factorize_(model, pf.plan(model, 4))
    low_rank = model(x)
    pf.merge_(model)
    assert [(name, type(m)) for name, m in model.named_modules()] == original
    assert [(name, v.shape, v.dtype) for name, v in model.state_dict().items()] == shapes
    assert not any(m.training for m in model.modules())
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(model(x), low_rank, rtol=tolerance, atol=tolerance)
    # And it is a dense model like any other: nothing knows that it was low-rank.
    Mixed().to(dtype).load_state_dict(model.state_dict())
    model.train()(x).sum().backward()


def test_merge_of_a_dense_model_is_nothing() -> None:
    model = Mixed()
    before = snapshot(model, None)
    pf.merge_(model)
    assert snapshot(model, None) == before


def test_there_and_back_and_there_again() -> None:
    model, x = Mixed().double().eval(), images().double()
    plan = pf.plan(model, 4)
    pf.factorize_(model, plan)
    first = model(x)
    pf.merge_(model)
    done = pf.factorize_(model, plan)
    assert all(e.error is not None and e.error < 1e-6 for e in done if e.rank)
    torch.testing.assert_close(model(x), first, rtol=1e-9, atol=1e-9)
    pf.merge_(model)
    torch.testing.assert_close(model(x), first, rtol=1e-9, atol=1e-9)


def test_some_matrices_of_a_layer() -> None:
    model, x = Mixed().eval(), images()
    keep = ["attention.k", "attention.out", "lstm.weight_ih_l1", "gru.weight_hh_*", "conv"]
    names = list(model.state_dict())
    dense_k = model.attention.in_proj_weight[64:128].detach().clone()
    pf.factorize_(model, pf.plan(model, 4, keep=keep))
    assert model.attention.ranks == {"q": 4, "v": 4}
    assert torch.equal(model.attention.k.weight, dense_k)
    low_rank = model(x)
    pf.merge_(model)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), low_rank, rtol=1e-4, atol=1e-5)


def test_plan_of_tells_what_a_model_is_now() -> None:
    model = Mixed()
    done = pf.factorize_(model, pf.plan(model, 4, keep=["gru"]))
    before = snapshot(model, None)
    assert pf.plan_of(model).ranks == done.ranks
    assert pf.plan_of(model).hash == done.hash
    assert pf.plan_of(Mixed()).ranks == {}
    assert snapshot(model, None) == before


@pytest.mark.parametrize(
    ("build", "example"),
    [
        (lambda: resnet18(width=16), lambda: torch.randn(2, 3, 16, 16)),
        (lambda: GPT(vocabulary=30, d=32, layers=2, heads=2, context=8), lambda: torch.randint(30, (2, 8))),
    ],
)
def test_whole_networks(build: Callable[[], nn.Module], example: Callable[[], Tensor]) -> None:
    model, x = build().eval(), example()
    pf.factorize_(model, pf.plan(model, 0.25, multiple=1))
    low_rank = model(x)
    low_rank.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    pf.merge_(model)
    torch.testing.assert_close(model(x), low_rank, rtol=1e-3, atol=1e-4)


def test_a_users_own_type_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(nn.Linear):
        pass

    class Refusing(pf.layers.LowRankLinear):
        def __init__(self, *args: Any) -> None:
            raise ValueError("not with me")

    from pufferfish.layers import registry

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    pf.register(Picky, Refusing)
    model = nn.Sequential(nn.Linear(64, 64), Picky(64, 64))
    before = snapshot(model, None)
    with pytest.raises(ValueError, match="not with me"):
        pf.factorize_(model, pf.plan(model))
    assert snapshot(model, None) == before
