"""Weights in one file and in several with an index: written as they are read, and nothing outside the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.integrations.convert import convert, merge
from pufferfish.lowrank.state_dict import LazyTensor, open_weights, write_weights

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.ones(50),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.arange(4).to(torch.bfloat16),
}


def lazy(tensors: dict[str, Tensor]) -> list[LazyTensor]:
    return [LazyTensor(name, x.shape, x.dtype, x.clone) for name, x in tensors.items()]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.mark.parametrize(
    ("most", "shards"), [(1000, [["a", "b", "c", "d"]]), (100, [["a"], ["b"], ["c", "d"]])]
)
def test_shards_and_their_index(tmp_path: Path, most: int, shards: list[list[str]]) -> None:
    files = write_weights(tmp_path, "model", lazy(TENSORS), max_shard=most)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    weights = [file for file in files if file.endswith(".safetensors")]
    assert [list(load_file(tmp_path / file)) for file in weights] == shards
    with open_weights(tmp_path / files[-1]) as source:
        assert equal({name: source.get(name) for name in source.shapes}, TENSORS)
        assert source.shapes == {name: (x.shape, x.dtype) for name, x in TENSORS.items()}
    if len(shards) > 1:
        assert files[0] == "model-00001-of-00003.safetensors"
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in TENSORS.values())
        assert index["weight_map"]["d"] == "model-00003-of-00003.safetensors"


def dense_folder(folder: Path, **index: Any) -> pf.Plan:
    """A model in two shards, and an index of them that is updated by `index`."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    state = model.state_dict()
    folder.mkdir()
    for i in range(2):
        save_file({k: v for k, v in state.items() if k.startswith(f"{i}.")}, folder / f"{i}.safetensors")
    where = {name: f"{name[0]}.safetensors" for name in state}
    text = json.dumps({"weight_map": where, **index})
    (folder / "model.safetensors.index.json").write_text(text)
    return pf.plan(model)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    """Also not by an absolute path. The file exists there, so only the check can refuse it."""
    plan = dense_folder(tmp_path / "in")
    outside = tmp_path / "0.safetensors"
    (tmp_path / "in" / "0.safetensors").rename(outside)
    where = dict.fromkeys(("1.weight", "1.bias"), "1.safetensors")
    for path in ("../0.safetensors", str(outside), ".."):
        index = {"weight_map": where | {"0.weight": path, "0.bias": path}}
        (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"in/model\.safetensors\.index\.json: .* is not in its folder"):
            convert(tmp_path / "in", plan, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_tensors_that_the_index_does_not_list_are_not_taken(tmp_path: Path) -> None:
    plan = dense_folder(tmp_path / "in")
    state = load_file(tmp_path / "in" / "1.safetensors")
    first = load_file(tmp_path / "in" / "0.safetensors")
    stray = {
        "stray": torch.zeros(3),
        "0.weight": torch.zeros(64, 64),
    }  # the second is listed for the other file
    save_file(state | stray, tmp_path / "in" / "1.safetensors")
    convert(tmp_path / "in", plan, tmp_path / "low")
    merge(tmp_path / "low", tmp_path / "out")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == (first | state).keys()
    expected = pf.lowrank.merge_state_dict(pf.lowrank.factorize_state_dict(first | state, plan), plan)
    assert equal(out, expected)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"0.weight": "2.safetensors"}}, r"2\.safetensors: no such file"),
        (
            {"weight_map": {"0.weigth": "0.safetensors"}},
            r"0\.safetensors: it does not have the tensor 0\.weigth",
        ),
        ({"weight_map": ["0.safetensors"]}, r"index\.json: damaged, its weight_map"),
        ({"weight_map": {"0.weight": 1}}, r"index\.json: damaged, its weight_map"),
        ({"weight_map": {"0.weight": "0.safetensors"}}, r"in: 0: the checkpoint has no tensor '0\.bias'"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, index: dict[str, Any], message: str) -> None:
    plan = dense_folder(tmp_path / "in", **index)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "in", plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "[]"])
def test_an_unreadable_index_is_named(tmp_path: Path, text: str) -> None:
    plan = dense_folder(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        convert(tmp_path / "in", plan, tmp_path / "out")


def test_torch_files_with_an_index(tmp_path: Path) -> None:
    plan = dense_folder(tmp_path / "in")
    state: dict[str, Tensor] = {}
    for i in range(2):
        part = load_file(tmp_path / "in" / f"{i}.safetensors")
        torch.save(part, tmp_path / "in" / f"{i}.bin")
        state |= part
    where = {name: f"{name[0]}.bin" for name in state}
    (tmp_path / "in" / "model.safetensors.index.json").unlink()
    (tmp_path / "in" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    convert(tmp_path / "in", plan, tmp_path / "out")
    assert equal(
        load_file(tmp_path / "out" / "model.safetensors"), pf.lowrank.factorize_state_dict(state, plan)
    )
    torch.save([state], tmp_path / "in" / "0.bin")
    with pytest.raises(ValueError, match=r"0\.bin: it does not contain a state dict"):
        convert(tmp_path / "in", plan, tmp_path / "again")
