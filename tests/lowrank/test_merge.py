"""reshape_ and merge_: low-rank layers to load a state into, and dense models back."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from mixed import Mixed, images, low_rank_modules, snapshot
from processes import in_processes, same_everywhere

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
    assert pf.lowrank.plan_of(model).ranks == done.ranks
    assert pf.lowrank.plan_of(model).hash == done.hash
    assert pf.lowrank.plan_of(Mixed()).ranks == {}
    assert snapshot(model, None) == before


def test_layers_go_on_sharing_objects() -> None:
    """A configuration that all layers hold can still be changed for all of them."""
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    config = {"scale": 1.0}
    for layer in model:
        layer.config = config
    pf.factorize_(model, pf.plan(model, keep=["1"]))
    assert [layer.config is config for layer in model] == [True, True]
    pf.merge_(model)
    assert [layer.config is config for layer in model] == [True, True]
    model = copy.deepcopy(model)
    pf.factorize_(model, pf.plan(model, keep=["1"]))
    pf.merge_(copied := copy.deepcopy(model))
    assert copied[0].config is copied[1].config
    assert copied[0].config is not model[1].config


# merge_ of a wrapped model


def low_rank_net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    pf.factorize_(model, pf.plan(model))
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.optim.swa_utils.AveragedModel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: model.compile(backend="eager") or model,
    ],
    ids=["DataParallel", "AveragedModel", "torch.compile(model)", "model.compile()"],
)
def test_wrapped_models_are_merged_inside(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped, x = wrap(low_rank_net()), torch.randn(8, 64)
    low_rank = wrapped(x)
    pf.merge_(wrapped)
    assert not low_rank_modules(wrapped)
    torch.testing.assert_close(wrapped(x), low_rank)


def trains_on_after_merging(rank: int, size: int) -> None:
    """DDP compared with one process that gets all samples."""
    ddp, alone = DDP(low_rank_net()), low_rank_net()
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (ddp, alone)]
    for step in range(4):
        x, y = torch.randn(8, 64), torch.randint(4, (8,))  # the same on all workers
        share = slice(rank, None, size)
        for (m, optimizer), rows in zip(pairs, (share, slice(None)), strict=True):
            if step == 2:
                pf.merge_(m, optimizer)
            nn.functional.cross_entropy(m(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not low_rank_modules(ddp)
    for p, q in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert same_everywhere(p)


def merges_on_one_worker(rank: int, size: int) -> None:
    """As for an export: the others do not take part."""
    ddp = DDP(low_rank_net())
    low_rank = copy.deepcopy(ddp.module)
    if rank == 0:
        pf.merge_(ddp)
        x = torch.randn(8, 64)
        torch.testing.assert_close(ddp.module(x), low_rank(x))
    assert bool(low_rank_modules(ddp)) == (rank > 0)


@pytest.mark.parametrize("case", [trains_on_after_merging, merges_on_one_worker])
def test_under_ddp(case: Callable[[int, int], None]) -> None:
    in_processes(case, 2)


def test_attributes_set_since_the_switch_are_kept() -> None:
    model = nn.ModuleDict({"lstm": nn.LSTM(32, 32, 2, dropout=0.5)})
    pf.factorize_(model, pf.plan(model, 8))
    model["lstm"].dropout = 0.25
    pf.merge_(model)
    assert model["lstm"].dropout == 0.25


def sharded_models_are_refused(rank: int, size: int, folder: Path) -> None:
    model = low_rank_net()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    for change in (pf.merge_, lambda model: pf.save(model, folder / "model")):
        with pytest.raises(ValueError, match=r"the model is sharded \(FSDP2\); load its full state dict"):
            change(model)
    assert not list(folder.iterdir())


def test_sharded_models_are_refused(tmp_path: Path) -> None:
    in_processes(sharded_models_are_refused, 1, tmp_path)
