"""The switch finds layers that read the same tensor in the training loop, and they compute together after it."""

import copy

import torch
from fsdp_nets import SelfAttention

import pufferfish as pf


def train(model, switch, steps=3, call=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    call = model if call is None else call
    for step in range(steps):
        switch.step(call, optimizer, step=step)
        optimizer.zero_grad()
        call(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return model


def hooks(model):
    return [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]


def test_groups_are_found_during_the_warm_up():
    model, switch = SelfAttention(), pf.Switch(rank=0.25, when=pf.AtStep(2))
    alone = copy.deepcopy(model)
    train(model, switch)
    assert switch.report.plan.shared_inputs == (("q", "k", "v"),)
    assert model.q._shared_input.layers == (model.q, model.k, model.v)
    assert not hooks(model)
    train(alone, pf.Switch(plan=pf.plan(alone, 0.25), when=pf.AtStep(2)))
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_run_that_resumes_at_the_switch_has_the_same_bits():
    """Its switch sees no pass of its own before it changes the model."""
    torch.manual_seed(0)
    whole, resumed = SelfAttention(), SelfAttention()
    batches = [torch.randn(4, 3, 8, 8) for _ in range(4)]

    def run(model, switch, optimizer, steps):
        for step in steps:
            switch.step(model, optimizer, step=step)
            optimizer.zero_grad()
            model(batches[step]).square().mean().backward()
            optimizer.step()

    switch, optimizer = pf.Switch(rank=0.25, when=pf.AtStep(2)), torch.optim.SGD(whole.parameters(), lr=0.01)
    run(whole, switch, optimizer, range(2))
    resumed.load_state_dict(whole.state_dict())
    again, other = pf.Switch(rank=0.25, when=pf.AtStep(2)), torch.optim.SGD(resumed.parameters(), lr=0.01)
    again.restore_(resumed, other, switch.state_dict())
    run(whole, switch, optimizer, range(2, 4))
    run(resumed, again, other, range(2, 4))
    assert again.report.plan.shared_inputs == switch.report.plan.shared_inputs == (("q", "k", "v"),)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_hooks_are_removed_after_one_pass():
    model, switch = SelfAttention(), pf.Switch(rank=0.25, when=pf.AtStep(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    switch.step(model, optimizer, step=0)
    assert hooks(model) == ["q", "k", "v", "o"]  # the last layer is too small to become low-rank
    model(torch.randn(4, 3, 8, 8))
    assert not hooks(model)


def test_a_switch_before_any_pass_finds_nothing():
    model = train(SelfAttention(), switch := pf.Switch(rank=0.25, when=pf.AtStep(0)))
    assert switch.report.plan.shared_inputs == ()
    assert model.q._shared_input is None
    assert not hooks(model)


def test_a_plan_with_groups_is_not_watched():
    model = SelfAttention()
    plan = pf.plan(model, 0.25, example=torch.randn(4, 3, 8, 8))
    switch = pf.Switch(plan=plan, when=pf.AtStep(1))
    switch.step(model, torch.optim.SGD(model.parameters(), lr=0.01), step=0)
    assert not hooks(model)


def test_compiled_models_are_not_watched():
    model = SelfAttention()
    switch = pf.Switch(rank=0.25, when=pf.AtStep(2))
    train(model, switch, call=torch.compile(model, backend="eager"))
    assert switch.report.plan.shared_inputs == ()
    assert not hooks(model)


def test_hooks_do_not_break_compiled_graphs():
    """A switch that gets the plain model cannot know that the loop calls it compiled."""
    model, switch = SelfAttention(), pf.Switch(rank=0.25, when=pf.AtStep(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    switch.step(model, optimizer, step=0)
    assert hooks(model)
    compiled(torch.randn(4, 3, 8, 8))
    assert switch.step(model, optimizer, step=1)
    assert switch.report.plan.shared_inputs == ()
    assert not hooks(model)
    torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 3, 8, 8))
