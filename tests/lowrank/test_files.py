"""Saving, loading and converting: the same result as on the live model, and no harm done by bad files."""

from __future__ import annotations

import copy
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.integrations.convert import convert, low_rank_names, merge, plan_file
from pufferfish.layers.names import own_keys
from pufferfish.measure import RunLog


class Mixed(nn.Module):
    """Every way a layer can keep its tensors: one matrix, gates, shared projections, loose biases, buffers, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1, groups=2)
        self.back = nn.ConvTranspose1d(32, 32, 3, padding=1)
        self.lstm = nn.LSTM(32, 48, 2, bidirectional=True, proj_size=24)
        self.attention = nn.MultiheadAttention(48, 4, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(48, 4, kdim=32, vdim=32, bias=False)
        self.norm = nn.BatchNorm1d(48)
        self.narrow = nn.Linear(48, 32)
        self.out = nn.Linear(32, 64, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.back(self.conv(x.permute(1, 2, 0))).permute(2, 0, 1)
        h, _ = self.lstm(x)
        h = h + self.attention(h, h, h)[0] + self.cross(h, x, x)[0]
        logits: Tensor = self.out(self.narrow(self.norm(h.flatten(0, 1))))
        return logits


TOKENS = torch.arange(20).view(5, 4) * 3 % 64


def build(seed: int = 0) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def planned(model: nn.Module) -> pf.Plan:
    return pf.plan(
        model,
        pf.Ratio(0.25, multiple=1),
        keep=["attention.v", "lstm.weight_hh_l1"],
        overrides={"narrow": pf.Energy(0.5)},
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
    "momentum, named": lambda model: torch.optim.SGD(model.named_parameters(), 0.01, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), 1e-3, momentum=0.9),
    "two groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        1e-3,
    ),
}


def same(a: Any, b: Any, rounding: float = 0.0) -> bool:
    """Equality of nested containers with tensors, or of their tensors up to `rounding`."""
    if isinstance(a, Tensor):
        if not (isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape):
            return False
        return torch.equal(a, b) or bool((a - b).norm() <= rounding * b.norm())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k], rounding) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, rounding) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("wrapped", ["", "module.", "_orig_mod."])
def test_state_dicts_become_what_the_model_becomes(wrapped: str) -> None:
    model = build()
    plan = planned(model)
    state = {wrapped + name: value for name, value in model.state_dict().items()}
    low_rank = pf.lowrank.factorize_state_dict(state, plan)
    done = pf.factorize_(model, plan)
    assert low_rank_names(done) == [name for name, _ in model.named_parameters()]
    assert same({name: low_rank[wrapped + name] for name in model.state_dict()}, model.state_dict())
    dense = pf.lowrank.merge_state_dict(low_rank, done)
    pf.merge_(model)
    assert same({own: dense[key] for key, own in own_keys(dense).items()}, dict(model.state_dict()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_converted_checkpoints_equal_the_live_switch_and_go_on(tmp_path: Path, name: str) -> None:
    make = OPTIMIZERS[name]
    model = build()
    optimizer = make(model)
    train(model, optimizer)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}, tmp_path / "a.pt"
    )

    plan = convert(tmp_path / "a.pt", planned(model), tmp_path / "low.pt")
    live = pf.factorize_(model, plan, optimizer)
    assert plan.hash == live.hash == pf.Plan.load(plan_file(tmp_path / "low.pt")).hash
    loaded = torch.load(tmp_path / "low.pt", weights_only=True)
    assert loaded["epoch"] == 7
    assert same(dict(model.state_dict()), loaded["model"])
    assert same(optimizer.state_dict(), loaded["optimizer"], rounding=1e-6)

    fresh = build(1)
    pf.reshape_(fresh, plan)
    fresh_optimizer = make(fresh)
    fresh.load_state_dict(loaded["model"])
    fresh_optimizer.load_state_dict(loaded["optimizer"])
    optimizer.load_state_dict(copy.deepcopy(loaded["optimizer"]))  # rounding apart, the same as its own
    train(model, optimizer)
    train(fresh, fresh_optimizer)
    assert same(dict(model.state_dict()), dict(fresh.state_dict()))

    merge(tmp_path / "low.pt", tmp_path / "back.pt")
    pf.reshape_(again := build(2), plan)
    again_optimizer = make(again)
    loaded = torch.load(tmp_path / "low.pt", weights_only=True)
    again.load_state_dict(loaded["model"])
    again_optimizer.load_state_dict(loaded["optimizer"])
    pf.merge_(again, again_optimizer)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert same(dict(again.state_dict()), back["model"])
    assert same(again_optimizer.state_dict(), back["optimizer"], rounding=1e-6)


def test_optimizer_state_that_cannot_be_matched_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.SGD(
        [{"params": [model[1].weight]}, {"params": [model[0].weight]}], 0.1, momentum=0.9
    )
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="named_parameters"):
        convert(tmp_path / "a.pt", pf.plan(model), tmp_path / "b.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_safetensors_files_are_converted_as_a_stream(tmp_path: Path) -> None:
    model = build()
    state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    del state["out.weight"]  # safetensors do not write a tied weight twice
    save_file(state, tmp_path / "a.safetensors")
    done = convert(tmp_path / "a.safetensors", planned(model), tmp_path / "low.safetensors")
    assert same(load_file(tmp_path / "low.safetensors"), pf.lowrank.factorize_state_dict(state, done))
    merge(tmp_path / "low.safetensors", tmp_path / "back.safetensors")
    back = load_file(tmp_path / "back.safetensors")
    assert {k: (v.shape, v.dtype) for k, v in back.items()} == {
        k: (v.shape, v.dtype) for k, v in state.items()
    }
    kept = [name for name in state if name.startswith(("embedding", "norm"))]
    assert kept
    assert all(torch.equal(back[name], state[name]) for name in kept)


def test_converting_holds_one_layer_in_memory(tmp_path: Path) -> None:
    """A chain of equal layers: the peak must not grow with their number."""

    from pufferfish.lowrank.state_dict import Source, factorized

    layers = 12
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers)))
    live = 0
    peak = 0
    state = model.state_dict()

    def get(key: str) -> Tensor:
        nonlocal live, peak
        tensor = state[key].clone()
        live += 1
        peak = max(peak, live)

        def gone() -> None:
            nonlocal live
            live -= 1

        import weakref

        weakref.finalize(tensor, gone)
        return tensor

    from pufferfish.lowrank.state_dict import write_weights

    source = Source({k: (v.shape, v.dtype) for k, v in state.items()}, get)
    names = write_weights(tmp_path, "out", factorized(source, pf.plan(model)), max_shard=150_000)
    assert peak == 1
    assert len(names) > 3
    assert sum(len(load_file(tmp_path / name)) for name in names[:-1]) == 2 * layers


@pytest.mark.parametrize("meta", [False, True])
def test_save_and_load(tmp_path: Path, meta: bool) -> None:
    model = build().eval()
    done = pf.factorize_(model, planned(model))
    pf.save(model, tmp_path / "saved")
    pf.save(model, tmp_path / "saved")  # replaces the older one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    with torch.device("meta" if meta else "cpu"):
        fresh = Mixed().eval()
    plan = pf.load(fresh, tmp_path / "saved")
    assert plan.ranks == done.ranks
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    torch.testing.assert_close(fresh(TOKENS), model(TOKENS), rtol=0, atol=0)
    pf.load(fresh, tmp_path / "saved")  # onto a model that is low-rank already
    pf.save(dense := build(), tmp_path / "dense")
    pf.load(other := build(1), tmp_path / "dense")
    assert same(dict(other.state_dict()), dict(dense.state_dict()))


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_permissions_of_the_umask(tmp_path: Path, umask: int) -> None:
    model = small()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    (tmp_path / "in").mkdir()
    save_file(model.state_dict(), tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    before = os.umask(umask)
    try:
        out = tmp_path / "out"
        out.mkdir()
        for name in ("a.pt", "a.safetensors"):
            convert(tmp_path / name, pf.plan(model, 8), out / name)
        convert(tmp_path / "in", pf.plan(model, 8), out / "low")
        pf.save(model, out / "saved")
        pf.save(model, out / "saved")
        with RunLog(out / "run") as log:
            log.log(step=1, loss=1.0)
    finally:
        os.umask(before)
    modes = {str(p): (0o777 if p.is_dir() else 0o666, p.stat().st_mode & 0o777) for p in out.rglob("*")}
    assert len(modes) > 10
    assert {name: mode for name, (most, mode) in modes.items() if mode != most & ~umask} == {}


def test_a_failed_write_names_the_file(tmp_path: Path) -> None:
    """By a limit on the size of files, which fails like a full disk."""
    model = small()
    plan = pf.plan(model, 8)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    writes: dict[str, Any] = {
        "model/model.safetensors": lambda: pf.save(model, tmp_path / "model"),
        "b.pt": lambda: convert(tmp_path / "a.pt", plan, tmp_path / "b.pt"),
        "b.safetensors": lambda: convert(tmp_path / "a.safetensors", plan, tmp_path / "b.safetensors"),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writes.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as error:
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert error.value.filename == str(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.safetensors"]


def test_other_files_in_a_saved_folder_stay(tmp_path: Path) -> None:
    model, folder = small(), tmp_path / "model"
    pf.save(model, folder)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("main")
    (folder / "notes.txt").write_text("mine")
    save_file({"x": torch.zeros(2)}, folder / "model-00001-of-00002.safetensors")  # of an earlier save
    pf.factorize_(model, pf.plan(model, 8))
    assert_saved_and_loaded(model, small(), folder)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {".git/HEAD", "notes.txt", "model.safetensors", "pufferfish.json"}


@pytest.mark.parametrize(
    "dtype",
    [torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fnuz, torch.float8_e8m0fnu],
)
def test_a_dtype_that_load_does_not_read_is_not_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small()
    model[1].register_buffer("table", torch.empty(4, dtype=dtype))
    with pytest.raises(ValueError, match=rf"save: 1\.table is {dtype}, which cannot be saved"):
        pf.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2])
def test_buffers_of_any_shape_are_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also at addresses in the file that are no multiple of their size."""
    model, other = small(), small()
    for shape in ((), (0, 3), (3,), (2, 1)):
        name = f"b{len(shape)}{sum(shape)}"
        model.register_buffer(name, torch.randint(0, 2, shape).to(dtype))
        other.register_buffer(name, torch.zeros(shape).to(dtype))
    pf.save(model, tmp_path / "model")
    pf.load(other, tmp_path / "model")
    for name, value in model.named_buffers():
        loaded = other.get_buffer(name)
        assert loaded.dtype == dtype
        assert torch.equal(loaded.double(), value.double())


def test_a_model_without_values_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"save: 0\.weight is on the meta device"):
        pf.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def _damage(folder: Path, how: str) -> None:
    weights, manifest = folder / "model.safetensors", folder / "pufferfish.json"
    if how == "flipped bit":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif how == "no weights":
        weights.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "half a manifest":
        manifest.write_text(manifest.read_text()[:200])
    elif how == "newer format":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"pufferfish": 9}))
    elif how == "file elsewhere":
        manifest.write_text(manifest.read_text().replace('"model.', '"../saved/model.'))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("flipped bit", "SHA-256"),
        ("truncated", "incomplete"),
        ("no weights", "model.safetensors is missing"),
        ("no manifest", "pufferfish.json is missing"),
        ("half a manifest", "damaged"),
        ("newer format", "format is 9"),
        ("file elsewhere", r"pufferfish\.json: it lists the file .*, which is not in its folder"),
    ],
)
def test_a_damaged_folder_leaves_the_model_alone(tmp_path: Path, how: str, message: str) -> None:
    model = build()
    pf.factorize_(model, planned(model))
    pf.save(model, tmp_path / "saved")
    _damage(tmp_path / "saved", how)
    fresh = build(1)
    before, modules = copy.deepcopy(fresh.state_dict()), list(fresh.modules())
    with pytest.raises(ValueError, match=message):
        pf.load(fresh, tmp_path / "saved")
    assert same(dict(before), dict(fresh.state_dict()))
    assert modules == list(fresh.modules())


def test_a_folder_of_another_model_leaves_the_model_alone(tmp_path: Path) -> None:
    pf.save(nn.Sequential(nn.Linear(8, 8)), tmp_path / "saved")
    for other in (nn.Sequential(nn.Linear(8, 9)), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match="saved"):
            pf.load(other, tmp_path / "saved")
        assert same(dict(before), dict(other.state_dict()))


def test_a_folder_that_is_not_ours_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="was not written by pufferfish"):
        pf.save(nn.Linear(2, 2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("pickled code ran",)


@pytest.mark.parametrize("content", ["pickle", "garbage", "list", "other model", "nan"])
def test_bad_checkpoints_give_one_clear_error_and_no_output(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    source = tmp_path / "a.pt"
    if content == "pickle":
        torch.save({"model": model.state_dict(), "evil": Evil()}, source)
    elif content == "garbage":
        source.write_bytes(b"not a checkpoint")
    elif content == "list":
        torch.save([torch.zeros(2)], source)
    elif content == "other model":
        torch.save(nn.Sequential(nn.Linear(64, 32)).state_dict(), source)
    else:
        state = model.state_dict()
        state["0.weight"][3, 3] = float("nan")
        torch.save(state, source)
    with pytest.raises(ValueError, match=r"a\.pt|0: ") as error:
        convert(source, pf.plan(model), tmp_path / "out.pt")
    assert "weights_only" not in str(error.value)  # torch's advice is to switch it off
    assert content != "pickle" or "it contains print, but only tensors" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]
    assert capsys.readouterr().out == ""


def test_existing_outputs_and_missing_plans_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="already exists"):
        convert(tmp_path / "a.pt", pf.plan(model), tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"plan\.json is missing"):
        merge(tmp_path / "a.pt", tmp_path / "b.pt")
    with pf.Checkpoint(tmp_path / "saved", model) as checkpoint:
        checkpoint.save(step=1)
    with pytest.raises(ValueError, match="training checkpoint; resume it"):
        merge(next((tmp_path / "saved").iterdir()), tmp_path / "b")
    (tmp_path / "nets.py").write_text("import torch")
    with pytest.raises(ValueError, match=r"nets.py: neither a \.safetensors file nor a complete torch.save"):
        convert(tmp_path / "nets.py", pf.plan(model), tmp_path / "b.pt")
    with pytest.raises(ValueError, match="no such file"):
        convert(tmp_path / "missing.pt", pf.plan(model), tmp_path / "b.pt")


def test_buffers_that_no_file_has_must_not_be_on_meta(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    model = Rotary()
    pf.factorize_(model, pf.plan(model))
    pf.save(model, tmp_path / "saved")
    with torch.device("meta"):
        fresh = Rotary()
    with pytest.raises(ValueError, match="the buffers frequencies are on the meta device"):
        pf.load(fresh, tmp_path / "saved")
    assert type(fresh.layer) is nn.Linear
    fresh.frequencies = torch.arange(4.0)
    pf.load(fresh, tmp_path / "saved")
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert not any(x.is_meta for x in [*fresh.parameters(), *fresh.buffers()])


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def assert_saved_and_loaded(model: nn.Module, other: nn.Module, folder: Path) -> None:
    pf.save(model, folder)
    pf.load(other, folder)
    expected = model.state_dict()
    assert expected.keys() == other.state_dict().keys()
    for name, value in other.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_parameters_that_share_memory_without_being_tied(tmp_path: Path) -> None:
    model = small()
    model[1].weight = nn.Parameter(model[0].weight)
    model.register_buffer("square", torch.arange(9.0).view(3, 3))
    model.register_buffer("transposed", model.get_buffer("square").T)
    other = small()
    other.register_buffer("square", torch.zeros(3, 3))
    other.register_buffer("transposed", torch.zeros(3, 3))
    assert_saved_and_loaded(model, other, tmp_path / "model")


def test_a_link_to_a_folder_is_kept(tmp_path: Path) -> None:
    model = small()
    pf.save(model, tmp_path / "first")
    (tmp_path / "latest").symlink_to("first")
    with torch.no_grad():
        model[0].weight.zero_()
    assert_saved_and_loaded(model, small(), tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "latest"]


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def test_extra_state_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(WithExtraState(32, 32))
    with pytest.raises(ValueError, match=r"0\._extra_state: extra state of type dict cannot be saved"):
        pf.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such folder$"):
        pf.load(build(), tmp_path / "nowhere")
