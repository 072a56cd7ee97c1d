"""Parameter groups across the switch and back: order, settings, names, several optimizers."""

import torch
from torch import nn, optim

import pufferfish as pf
from optimizers import OPTIMIZERS, Net, decay_groups, plan, train


def test_groups_keep_their_settings_and_the_models_order() -> None:
    model = Net()
    optimizer = optim.SGD(decay_groups(model), 0.01, momentum=0.9)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, [optimizer], range(2))
    schedule.step()
    for change in (lambda: pf.factorize_(model, plan(model), optimizer), lambda: pf.merge_(model, optimizer)):
        groups = optimizer.param_groups
        change()
        assert optimizer.param_groups is groups  # schedulers hold on to them
        assert [(g["lr"], g["weight_decay"], g["momentum"]) for g in groups] == [
            (0.01, 0.1, 0.9),
            (0.005, 0.0, 0.9),
        ]
        expected = decay_groups(model)
        for group, other in zip(groups, expected, strict=True):
            assert [id(p) for p in group["params"]] == [id(p) for p in other["params"]]
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_groups_in_another_order_than_the_models_keep_theirs() -> None:
    model = Net()
    fc, head = model.fc.weight, model.head.weight
    optimizer = optim.SGD([head, fc, model.fc.bias], 0.1, momentum=0.9)
    pf.factorize_(model, plan(model), optimizer)
    expected = [head, model.fc.down.weight, model.fc.up.weight, model.fc.up.bias]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in expected]


def test_parameters_that_the_optimizer_does_not_have_stay_away() -> None:
    model = Net()
    model.fc.requires_grad_(False)
    optimizer = OPTIMIZERS["Adam"](p for p in model.parameters() if p.requires_grad)
    train(model, [optimizer], range(2))
    pf.factorize_(model, pf.plan(model, keep=["head"], overrides={"*": 4}), optimizer)
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
    assert not held & {id(p) for p in model.fc.parameters()}
    pf.merge_(model, optimizer)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
        id(p) for p in model.parameters() if p.requires_grad
    }


def test_names_follow() -> None:
    model = Net()
    vectors = [(name, p) for name, p in model.named_parameters() if p.dim() < 2]
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() >= 2]
    optimizer = optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])

    def check() -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            assert group["param_names"] == [names[id(p)] for p in group["params"]]

    dense = [list(group["param_names"]) for group in optimizer.param_groups]
    check()
    pf.factorize_(model, plan(model), optimizer)
    check()
    assert "fc.up.bias" in optimizer.param_groups[1]["param_names"]
    pf.merge_(model, optimizer)
    check()
    assert [group["param_names"] for group in optimizer.param_groups] == dense


def test_parameters_of_somebody_else_stay_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    extra = nn.Parameter(torch.randn(3))
    optimizer = optim.SGD([*model.named_parameters(), ("temperature", extra)], 0.1, momentum=0.9)
    extra.grad = torch.ones(3)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    pf.factorize_(model, pf.plan(model), optimizer)
    group = optimizer.param_groups[0]
    assert group["param_names"] == ["0.down.weight", "0.up.weight", "0.up.bias", "temperature"]
    assert group["params"][-1] is extra
    assert torch.equal(optimizer.state[extra]["momentum_buffer"], torch.ones(3))


def test_reshape_with_an_optimizer() -> None:
    model = Net()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    pf.reshape_(model, plan(model), optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert not optimizer.state
