"""State packed into JSON and tensors is unpacked unchanged."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from pufferfish.checkpoint.files import pack, storable, unpack

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """The obvious comparison: same types all the way down, same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        bits = [x.contiguous().view(-1).view(torch.uint8) for x in (a, b)] if a.numel() else [a, b]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and [type(k) for k in a] == [type(k) for k in b]
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def through_files(state: Any, folder: Path) -> Any:
    tree, tensors = pack(state)
    save_file(storable(tensors), folder / "x.safetensors")
    (folder / "x.json").write_text(json.dumps(tree, allow_nan=False))
    return unpack(json.loads((folder / "x.json").read_text()), load_file(folder / "x.safetensors"))


@st.composite
def tensor(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    bits = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    if dtype != torch.bool:
        bits *= 77
    return bits.view(dtype).view(shape)


numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.text()
hashable = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.floats(allow_nan=False)
nested = st.recursive(
    numbers | tensor(),
    lambda x: (
        st.lists(x, max_size=4)
        | st.tuples(x, x)
        | st.dictionaries(hashable, x, max_size=4)
        | st.dictionaries(st.text("ab/'"), x, max_size=4)
    ),
    max_leaves=12,
)


@given(nested)
def test_packing_round_trip(state: Any) -> None:
    tree, tensors = pack(state)
    assert same(unpack(json.loads(json.dumps(tree, allow_nan=False)), tensors), state)


def test_dicts_of_other_kinds_come_back() -> None:
    state = [OrderedDict(b=1, a=2), Counter({30: 1, 60: 2}), {}, OrderedDict(), (), []]
    back = unpack(json.loads(json.dumps(pack(state)[0])), {})
    assert same(back, state)
    assert sorted(back[1].elements()) == [30, 60, 60]


def test_all_kinds_of_tensors_through_files(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    images = torch.randn(2, 3, 4, 4)
    state = {
        "0-dim": torch.tensor(3.0),
        "bf16": torch.randn(3).bfloat16(),
        "empty": torch.empty(0, 3),
        "another empty": torch.empty(0, 3),
        "transposed": base.T,
        "column": base[:, 1],
        "expanded": torch.ones(1).expand(5),
        "whole": base,
        "part": base[1:3],
        "flat": base.view(-1),
        "channels last": images.to(memory_format=torch.channels_last),
        "a parameter": torch.nn.Parameter(torch.randn(2)),
        "nan": torch.tensor([math.nan, math.inf, -0.0]),
        "bool": torch.tensor([True, False]),
        "step": torch.tensor(2**40),
    }
    back = through_files(state, tmp_path)
    assert list(back) == list(state)
    for name, value in state.items():
        assert same(back[name], value.detach()), name
        if name in ("transposed", "channels last", "whole", "empty"):
            assert back[name].stride() == value.stride(), name
    places = [x.untyped_storage().data_ptr() for x in back.values() if x.numel()]
    assert len(set(places)) == len(places)  # no two results share memory


def test_the_same_tensor_twice_is_stored_once_and_is_one_again() -> None:
    tied = torch.randn(3)
    tree, tensors = pack({"a": tied, "b": tied.detach(), "c": tied.clone(), "view": tied[:2]})
    assert list(tensors) == ["a", "c", "view"]
    back = unpack(tree, tensors)
    assert back["a"] is back["b"]
    assert back["a"].data_ptr() != tied.data_ptr()


def test_paths_that_read_alike_do_not_collide() -> None:
    state = {"a": {"b": torch.zeros(1), 1: torch.ones(1), "1": torch.ones(1) * 2}, "a/b": torch.ones(1) * 3}
    tree, tensors = pack(state)
    assert len(tensors) == 4
    assert same(unpack(tree, tensors), state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {"b": {1, 2}}]}, r"data: a/1/b is a set, which cannot be saved; use numbers"),
        ({frozenset(): 1}, r"data: frozenset\(\) \(a key\) is a frozenset"),
        ({"m": torch.empty(2, device="meta")}, "data: m is a tensor on the meta device"),
        ({"s": torch.eye(2).to_sparse()}, "data: s is a torch.sparse_coo or quantized tensor"),
    ],
)
def test_other_types_are_refused(state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(state, "data")
