"""factorize_: best approximations, what is carried over, hooks, devices and compilation."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import pufferfish as pf
from matrices import forced
from mixed import Mixed, images, low_rank_modules
from processes import in_processes
from pufferfish.planning.text import display_progress

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
    done = pf.factorize_(model, forced(model, 1000))
    assert len(low_rank_modules(model)) == 7 + 4  # attention holds four low-rank Linear layers
    assert all(e.error is not None and e.error < 1e-6 for e in done)
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-5)


def test_rules_are_answered_from_the_weights_of_the_moment() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plan = pf.plan(model, pf.Energy(0.99, multiple=1))
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
    pf.factorize_(model, pf.plan(model, overrides={"*": 4}))
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
        p.options = {"lr_scale": 0.5}  # type: ignore[attr-defined]
        p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]  # as Megatron does; not of a factor's shape
    bias = model.fc.bias
    pf.factorize_(model, pf.plan(model, 4))
    assert model.fc.down.weight.my_name == model.fc.up.weight.my_name == "fc.weight"
    assert model.fc.up.bias.my_name == "fc.bias"
    assert model.fc.up.weight.options == {"lr_scale": 0.5}
    assert not any(hasattr(p, "main_grad") for p in (model.fc.down.weight, model.fc.up.weight))
    assert model.fc.up.bias.main_grad is bias.main_grad  # the same parameter
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


def test_hooks_on_parameters_that_stay_go_on_firing() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    seen: list[int] = []
    model[0].bias.register_hook(lambda grad: seen.append(grad.numel()))
    pf.factorize_(model, pf.plan(model))
    model(torch.randn(2, 64)).sum().backward()
    pf.merge_(model)
    model(torch.randn(2, 64)).sum().backward()
    assert seen == [64, 64]


def other_models_leave_transformers_alone(rank: int, size: int) -> None:
    from transformers import PreTrainedModel

    before = dict(vars(PreTrainedModel))
    model = nn.Sequential(nn.Linear(64, 64))
    pf.factorize_(model, pf.plan(model))
    assert dict(vars(PreTrainedModel)) == before


def test_other_models_leave_transformers_alone() -> None:
    """In a process of its own: models of transformers extend its classes."""
    pytest.importorskip("transformers")
    in_processes(other_models_leave_transformers_alone, 1)


# Devices; copies, precision and compilation are in test_export.py.


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


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def trained(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Normed()
    made, x = optimizer(model), torch.randn(128, 64)
    for _ in range(5):
        made.zero_grad()
        (model(x) - x).square().mean().backward()
        made.step()
    return model, made


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def test_a_trained_model_that_is_not_trained_further_is_announced() -> None:
    model = trained(adam)[0]
    with pytest.warns(UserWarning, match="too little for this trained model to work as before") as caught:
        done = pf.factorize_(model, pf.plan(model, 0.5))
    assert caught[0].filename == __file__
    kept = sum(1 - e.error**2 for e in done if e.error) / 2
    assert f"keep {kept:.1%} of" in str(caught[0].message)
    model = trained(adam)[0]
    with pytest.warns(UserWarning, match="too little"):
        pf.factorize_(model, pf.plan(model, 0.5), adam(model))  # fine-tuning: has no state yet


def test_what_is_not_announced() -> None:
    fresh, (model, optimizer), exact = Normed(), trained(adam), trained(adam)[0]
    batch_norm = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    batch_norm(torch.randn(9, 64))
    with torch.no_grad():
        for layer in (exact.first, exact.last):
            layer.weight.copy_(torch.randn(64, 16) @ torch.randn(16, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.factorize_(fresh, pf.plan(fresh, 0.25))  # to be trained
        pf.factorize_(batch_norm, pf.plan(batch_norm, 0.25))
        pf.factorize_(model, pf.plan(model, 0.25), optimizer)  # is being trained
        model, optimizer = trained(lambda model: torch.optim.SGD(model.parameters(), 0.1))
        pf.factorize_(model, pf.plan(model, 0.25), optimizer)  # without state
        pf.factorize_(exact, pf.plan(exact, 16))  # loses nothing


def test_progress_is_reported_for_every_layer() -> None:
    seen: list[tuple[str, float]] = []

    @contextmanager
    def display(text: str, total: float | None) -> Iterator[Callable[[float], None]]:
        yield lambda amount: seen.append((text, amount))

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    with display_progress(display):
        pf.factorize_(model, pf.plan(model, pf.Energy(0.5), keep=["2"]))
    assert seen == [("computing singular values", 1)] * 2 + [("factorizing layers", 1)] * 2
