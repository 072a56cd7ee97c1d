"""First factors of layers that read the same tensor, as one product: the same numbers as each layer alone."""

import contextlib
import copy
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pufferfish as pf
from matrices import forced


class Attention(nn.Module):
    """Three projections of one tensor, with different widths and ranks."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.q = nn.Linear(16, 24, dtype=dtype)
        self.k = nn.Linear(16, 8, bias=False, dtype=dtype)
        self.v = nn.Linear(16, 8, dtype=dtype)
        self.o = nn.Linear(24, 16, dtype=dtype)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        return x + self.o(q * torch.cat([k, v, k + v], -1).tanh())


GROUP = ("q", "k", "v")


def pair(dtype=torch.float64):
    """The same low-rank model twice, with and without the group."""
    model = Attention(dtype)
    batch = torch.randn(3, 16, dtype=dtype)
    plan = pf.plan(model, 2, overrides={"q": 3}, example=batch)
    assert plan.shared_inputs == (GROUP,)
    grouped, alone = copy.deepcopy(model), copy.deepcopy(model)
    pf.factorize_(grouped, plan)
    pf.factorize_(alone, pf.plan(alone, 2, overrides={"q": 3}))
    assert grouped.q._shared_input is grouped.k._shared_input is grouped.v._shared_input is not None
    assert grouped.o._shared_input is alone.q._shared_input is None
    return grouped, alone, batch


def products(run):
    """Number of matrix products that `run` computes."""
    with torch.profiler.profile() as profile:
        run()
    return sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm"))


def gradients(model, x, context=None, call=lambda model, x: model(x)):
    x = x.clone().requires_grad_()
    with context or contextlib.nullcontext():
        output = call(model, x)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [output, *torch.autograd.grad(output.square().sum(), wanted)]


def assert_same(ours, theirs, tolerance=1e-12):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_outputs_and_gradients():
    grouped, alone, x = pair()
    assert_same(gradients(grouped, x), gradients(alone, x))
    assert products(lambda: alone(x)) - products(lambda: grouped(x)) == 2


@pytest.mark.parametrize("grad", [True, False])
def test_autocast(grad):
    grouped, alone, x = pair(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        assert_same([grouped(x)], [alone(x)], 1e-2)
    context = torch.autocast("cpu", torch.bfloat16)
    ours, theirs = (gradients(m, x, context) for m in (grouped, alone))
    assert [g.dtype for g in ours] == [g.dtype for g in theirs]
    assert_same(ours, theirs, 5e-2)


def test_compiled():
    grouped, alone, x = pair()
    compiled = torch.compile(grouped, fullgraph=True, backend="aot_eager")
    wanted = gradients(alone, x)
    for _ in range(2):  # nothing of the first call is left for the second
        assert_same(gradients(grouped, x, call=lambda _, x: compiled(x)), wanted)


def test_exported():
    grouped, alone, x = pair()
    exported = torch.export.export(grouped, (x,)).module()
    assert_same([exported(x)], [alone(x)])
    assert_same([grouped(x)], [alone(x)])


def test_activation_checkpointing():
    grouped, alone, x = pair()

    def rerun(model, x):
        return checkpoint(model, x, use_reentrant=False)

    assert_same(gradients(grouped, x, call=rerun), gradients(alone, x))


def test_other_inputs():
    """Layers that are called alone, in another order, twice, or with other tensors."""
    grouped, alone, x = pair()
    y = torch.randn_like(x)
    for names in ("q", "vkq", "qq", "kkvq", "qqq"):
        assert_same([getattr(grouped, n)(x) for n in names], [getattr(alone, n)(x) for n in names])
        # k has another input than q before it and v after it.
        mixed = [(n, y if n == "k" else x) for n in names]
        assert_same([getattr(grouped, n)(z) for n, z in mixed], [getattr(alone, n)(z) for n, z in mixed])


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inside", [True, False])
def test_an_input_that_changes_between_calls(context, inside):
    grouped, alone, x = pair()
    results = []
    for model in (grouped, alone):
        z = x.clone()
        with context():
            z = x.clone() if inside else z  # one that is created in inference mode has no version counter
            first = model.q(z)
            z.mul_(2)
            results.append([first, model.k(z)])
    assert_same(*results)


def test_a_weight_that_changes_in_inference_mode():
    pairs = pair()
    with torch.inference_mode():
        grouped, alone, x = copy.deepcopy(pairs)  # weights without a version counter
        results = []
        for model in (grouped, alone):
            first = model.q(x)
            model.k.down.weight.mul_(2)
            results.append([first, model.k(x)])
    assert_same(*results)


def test_frozen_weights_get_no_gradients():
    grouped, alone, x = pair()
    for model in (grouped, alone):
        model.k.requires_grad_(False)
    assert_same(gradients(grouped, x), gradients(alone, x))
    assert products(lambda: gradients(grouped, x)) == products(lambda: gradients(alone, x))
    with torch.no_grad():
        assert products(lambda: alone(x)) - products(lambda: grouped(x)) == 2


def test_modes_that_change_between_calls():
    grouped, alone, x = pair()
    with torch.no_grad():
        assert not grouped.q(x).requires_grad
    output = grouped.k(x)
    assert output.requires_grad
    with torch.inference_mode():
        assert_same([grouped.q(x), grouped.v(x)], [alone.q(x), alone.v(x)])


def test_nothing_is_held():
    grouped, _, x = pair()
    grouped(x)
    assert grouped.q._shared_input._waiting is None


def test_each_output_has_a_backward_pass_of_its_own():
    grouped, alone, x = pair()
    for model in (grouped, alone):
        model.requires_grad_(True)
        for name in GROUP:  # the first one frees the graph of the product that the others would wait for
            getattr(model, name)(x).square().sum().backward()
    for p, q in zip(grouped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("gradients_on", [False, True])
def test_a_weight_that_changes_between_two_calls(gradients_on):
    grouped, alone, x = pair()
    with torch.set_grad_enabled(gradients_on):
        outputs = []
        for model in (grouped, alone):
            model.q(x)
            with torch.no_grad():
                model.k.down.weight.add_(1.0)
            outputs.append(model.k(x))
        torch.testing.assert_close(*outputs)


def test_one_layer_inside_of_a_checkpoint():
    grouped, alone, x = pair()

    def call(model, x):
        y = model.norm(x)
        q, k = checkpoint(model.q, y, use_reentrant=False), model.k(y)
        v = checkpoint(model.v, y, use_reentrant=False)
        return model.o(q * torch.cat([k, v, k + v], -1).tanh())

    assert_same(gradients(grouped, x, call=call), gradients(alone, x, call=call))


def test_threads_do_not_take_outputs_from_each_other():
    grouped, alone, _ = pair()
    inputs = [torch.randn(3, 16, dtype=torch.float64) for _ in range(2)]

    def same(x):
        with torch.no_grad():
            expected = [getattr(alone, name)(x) for name in GROUP]
            found = ([getattr(grouped, name)(x) for name in GROUP] for _ in range(2000))
            return all(
                torch.allclose(a, b) for outputs in found for a, b in zip(outputs, expected, strict=True)
            )

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns in the middle of everything
    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(same, inputs)) == [True, True]
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_of_the_factors_are_called(register):
    grouped, alone, x = pair()
    called = []
    getattr(grouped.k.down, register)(lambda *_: called.append(1))
    assert_same(gradients(grouped, x), gradients(alone, x))
    assert called == [1]


def test_another_first_factor():
    grouped, alone, x = pair()
    for model in (grouped, alone):
        model.k.down = nn.Sequential(model.k.down, nn.Dropout(0.0))
    assert_same(gradients(grouped, x), gradients(alone, x))


def test_copies():
    grouped, alone, x = pair()
    grouped.q(x)  # the others' outputs are waiting
    twin = copy.deepcopy(grouped)
    assert twin.q._shared_input is twin.v._shared_input is not grouped.q._shared_input
    assert twin.q._shared_input.layers == (twin.q, twin.k, twin.v)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1)
    assert_same([grouped(x)], [alone(x)])
    file = io.BytesIO()
    torch.save(grouped, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.q._shared_input.layers == (loaded.q, loaded.k, loaded.v)
    assert_same([loaded(x)], [alone(x)])


def test_files_and_structures(tmp_path):
    grouped, alone, x = pair()
    assert grouped.state_dict().keys() == alone.state_dict().keys()
    plan = pf.lowrank.plan_of(grouped)
    assert plan.shared_inputs == (GROUP,)
    assert pf.Plan.from_json(plan.to_json()) == plan
    pf.save(grouped, tmp_path / "saved")
    fresh = Attention()
    pf.load(fresh, tmp_path / "saved")
    assert fresh.q._shared_input.layers == (fresh.q, fresh.k, fresh.v)
    assert_same([fresh(x)], [alone(x)])
    pf.merge_(fresh)
    assert type(fresh.q) is nn.Linear


def test_equal_values_are_not_the_same_tensor():
    class Apart(Attention):
        def forward(self, x):
            y = self.norm(x)
            return self.q(y.clone()), self.k(y), self.v(y)

    plan = pf.plan(Apart(), 2, example=torch.randn(3, 16, dtype=torch.float64))
    assert plan.shared_inputs == (("k", "v"),)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_multihead_attention(batch_first, batched):
    """q, k and v of self-attention are a group, without a plan for it."""
    model = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=batch_first)])
    pf.factorize_(model, forced(model, 4))
    attention = model[0]
    x = torch.randn(5, 3, 16) if batched else torch.randn(5, 16)
    other = x.clone()
    assert products(lambda: attention(x, other, x.clone())) - products(lambda: attention(x, x, x)) == 2
    torch.testing.assert_close(attention(x, x, x), attention(x, other, x.clone()))
    assert pf.lowrank.plan_of(model).shared_inputs == ()


def test_cross_attention():
    """k and v read the same tensor, q another one: nothing is computed in vain."""
    model = nn.ModuleList([nn.MultiheadAttention(16, 2)])
    pf.factorize_(model, forced(model, 4))
    attention = model[0]
    x, memory = torch.randn(5, 3, 16), torch.randn(7, 3, 16)
    joined, alone = (products(lambda y=y: attention(x, memory, y)) for y in (memory, memory.clone()))
    assert alone - joined == 1
    torch.testing.assert_close(attention(x, memory, memory), attention(x, memory, memory.clone()))
