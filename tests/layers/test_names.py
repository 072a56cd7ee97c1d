"""Names without what wrappers add to them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pufferfish.layers.names import named_modules, own_keys, own_name, unwrap


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("", ""),
        ("fc.weight", "fc.weight"),
        ("_orig_mod", ""),
        ("_orig_mod.fc.weight", "fc.weight"),
        ("layers.0._checkpoint_wrapped_module.fc", "layers.0.fc"),
        ("_fsdp_wrapped_module._orig_mod.a._checkpoint_wrapped_module._orig_mod.b", "a.b"),
        ("module.fc", "module.fc"),  # somebody's own module may be called so
        ("my_orig_mod.fc", "my_orig_mod.fc"),
    ],
)
def test_own_name(name: str, own: str) -> None:
    assert own_name(name) == own


def test_unwrap_finds_the_model_under_any_nest() -> None:
    model = block()
    assert unwrap(model) is model
    assert unwrap(torch.compile(model)) is model
    assert unwrap(nn.DataParallel(torch.compile(model))) is model
    assert unwrap(torch.compile(nn.DataParallel(model))) is model
    own = nn.ModuleDict({"_forward_module": model})  # somebody's own module may be called so
    assert unwrap(own) is own


def test_named_modules_gives_own_names_and_usable_paths() -> None:
    plain = nn.Sequential(block(), block())
    expected = [name for name, _ in plain.named_modules()]
    wrapped = nn.Sequential(checkpoint_wrapper(block()), torch.compile(block()))
    wrapped[0]._checkpoint_wrapped_module[2] = checkpoint_wrapper(nn.Linear(4, 4))
    found = list(named_modules(torch.compile(wrapped)))
    assert [name for name, *_ in found] == expected
    for _, path, module in found:
        assert wrapped.get_submodule(path) is module
        assert type(module) in (nn.Sequential, nn.Linear, nn.ReLU)


def test_own_keys_of_a_whole_state_dict() -> None:
    model = nn.Sequential(checkpoint_wrapper(block()))
    names = list(nn.Sequential(block()).state_dict())
    wrapped = [f"module._orig_mod.{name}" for name, _ in model.named_parameters()]
    assert list(own_keys(wrapped).values()) == names
    # One key without the prefix: then `module.` is the model's own.
    assert own_keys(["module.fc.weight", "head.weight"]) == {
        "module.fc.weight": "module.fc.weight",
        "head.weight": "head.weight",
    }
    assert own_keys([]) == {}
