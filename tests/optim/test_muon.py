"""`Muon` beside `torch.optim.Muon`: one step, state dicts, sharded matrices, CUDA graphs; which parameters it gets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import pufferfish as pf
from processes import in_processes
from pufferfish.lowrank import muon as module

SHAPES = [(32, 32), (64, 24), (32, 32), (24, 64), (64, 24), (32, 32)]


def matrices(shapes: list[tuple[int, int]], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def parameters(start: list[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(x.clone()) for x in start]


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    for p, grad in zip(
        params, matrices([tuple(p.shape) for p in params], seed, params[0].dtype), strict=True
    ):
        p.grad = grad


def assert_same_update(ours: list[nn.Parameter], theirs: list[nn.Parameter], before: list[Tensor]) -> None:
    """Both iterate in bf16, with sums in another order."""
    for p, q, old in zip(ours, theirs, before, strict=True):
        assert (p - q).norm() <= 0.05 * (q - old).norm()


groups = st.fixed_dictionaries(
    {
        "shapes": st.lists(st.sampled_from([(8, 8), (24, 7), (7, 24), (1, 6), (6, 1), (16, 40)]), min_size=1, max_size=5),
        "lr": st.sampled_from([0.0, 0.02, 0.3]),
        "weight_decay": st.sampled_from([0.0, 0.5]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "nesterov": st.booleans(),
        "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
        "ns_steps": st.integers(1, 5),
    }
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(given_groups=st.lists(groups, min_size=1, max_size=3), tensor=st.booleans(), seed=st.integers(0, 9))
def test_equals_muon_of_torch(given_groups: list[dict[str, Any]], tensor: bool, seed: int) -> None:
    starts = [matrices(group["shapes"], seed + i) for i, group in enumerate(given_groups)]
    both: list[list[dict[str, Any]]] = [[], []]
    for one in both:
        for group, start in zip(given_groups, starts, strict=True):
            one.append({**group, "params": parameters(start)})
    if tensor:
        for group in both[0]:
            group["lr"] = torch.tensor(group["lr"])
    ours, theirs = ([p for group in one for p in group["params"]] for one in both)
    mine, other = pf.lowrank.Muon(both[0]), optim.Muon(both[1])
    for step in range(3):
        for params in (ours, theirs):
            set_gradients(params, seed=10 + step)
        if step == 1 and len(ours) > 1:
            ours[0].grad = theirs[0].grad = None
        before = [p.detach().clone() for p in theirs]
        for p, q in zip(ours, before, strict=True):
            p.data.copy_(q)
        mine.step()
        other.step()
        assert_same_update(ours, theirs, before)
        for p, q in zip(ours, theirs, strict=True):
            assert mine.state[p].keys() == other.state[q].keys()
            torch.testing.assert_close(mine.state[p], other.state[q])


@pytest.mark.parametrize(
    "kinds", [(optim.Muon, pf.lowrank.Muon), (pf.lowrank.Muon, optim.Muon)], ids=["from torch", "to torch"]
)
def test_state_dicts_go_on_with_the_other_one(kinds: tuple[Any, Any]) -> None:
    start = matrices(SHAPES, 0)
    params = parameters(start)
    first = kinds[0](params, 0.02, adjust_lr_fn="match_rms_adamw")
    for step in range(2):
        set_gradients(params, step + 1)
        first.step()
    others = parameters([p.detach() for p in params])
    second = kinds[1](others)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    before = [p.detach().clone() for p in params]
    for each, optimizer in ((params, first), (others, second)):
        set_gradients(each, 3)
        optimizer.step()
    assert_same_update(others, params, before)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(first.state[p], second.state[q])


def test_large_batches_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for largest in (module._BATCH, 2 * 32 * 32, 1):
        monkeypatch.setattr(module, "_BATCH", largest)
        params = parameters(matrices(SHAPES, 0))
        set_gradients(params, 1)
        pf.lowrank.Muon(params, 0.1).step()
        results.append(params)
    start = matrices(SHAPES, 0)
    assert_same_update(results[1], results[0], start)
    assert_same_update(results[2], results[0], start)


def test_a_closure_and_a_learning_rate_that_changes_in_place() -> None:
    p = nn.Parameter(torch.eye(4))
    lr = torch.tensor([0.0])
    optimizer = pf.lowrank.Muon([p], lr, weight_decay=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure).item() == 4
    assert torch.equal(p, torch.eye(4))
    lr.fill_(0.1)
    optimizer.step(closure)
    assert p.square().sum().item() < 4


def sharded(rank: int, size: int) -> None:
    """Bit-identical to one process: each matrix is orthogonalised whole, by one worker."""
    shapes = [*SHAPES, (1, 8), (7, 5)]  # rows that the workers cannot share evenly; some get none
    meshes = [((size,), [Shard(0)]), ((2, size // 2), [Replicate(), Shard(0)]), ((size,), [Shard(1)])]
    for mesh_shape, placements in meshes:
        mesh = init_device_mesh("cpu", mesh_shape)

        def shard(x: Tensor, mesh: Any = mesh, placements: Any = placements) -> Tensor:
            return distribute_tensor(x, mesh, placements)

        alone = parameters(matrices(shapes, 0))
        params = [nn.Parameter(shard(p.detach())) for p in alone]
        optimizers = [pf.lowrank.Muon(each, 0.1, weight_decay=0.5) for each in (alone, params)]
        for step in range(2):
            set_gradients(alone, step + 1)
            for p, q in zip(alone, params, strict=True):
                assert p.grad is not None
                q.grad = shard(p.grad)
            optimizers[0].step()
            with CommDebugMode() as exchanged:
                optimizers[1].step()
            assert exchanged.get_total_counts() == 2 * len(set(shapes))
        for p, q in zip(alone, params, strict=True):
            assert torch.equal(p, q.full_tensor())  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (2, size // 2))
    strided = nn.Parameter(
        distribute_tensor(torch.ones(8, 8), mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    )
    strided.grad = strided.detach().clone()
    with pytest.raises(
        ValueError, match=r"Muon: a 8×8 matrix has the placements .*_StridedShard.*; shard it over"
    ):
        pf.lowrank.Muon([strided]).step()


def test_sharded_matrices() -> None:
    in_processes(sharded, 4)


def test_matrices_of_blocks() -> None:
    model = nn.Module()
    model.words = nn.Embedding(9, 8)
    model.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16), nn.Conv1d(8, 8, 3), nn.Linear(8, 9)])
    model.blocks[2].weight = model.words.weight  # tied: an embedding
    model.table = nn.Sequential(nn.Embedding(50, 24))
    model.head = nn.Linear(8, 9)
    pf.factorize_(model, pf.plan(model, 4, embed=4, only=["table.0"]))
    inner, others = pf.lowrank.muon_parameters(model)
    names = {id(p): name for name, p in model.named_parameters()}
    kept = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert [names[id(p)] for p in inner] == [f"blocks.0.{name}" for name in kept]
    assert sorted([*map(id, inner), *map(id, others)]) == sorted(names)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_a_cuda_graph(dtype: torch.dtype) -> None:
    start = [x.cuda() for x in matrices(SHAPES, 0, dtype)]
    grads = [x.cuda() for x in matrices(SHAPES, 1, dtype)]
    results = []
    for captured in (False, True):
        params = parameters(start)
        lr = torch.tensor(0.0, device="cuda")
        optimizer = pf.lowrank.Muon(params, lr)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()

        def update(optimizer: optim.Optimizer = optimizer) -> None:
            optimizer.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which writes the parameters and gradients
        with torch.cuda.stream(stream):
            update()
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            update = graph.replay
        for rate in (0.1, 0.01):
            lr.fill_(rate)
            update()
        torch.cuda.synchronize()
        results.append(params)
    assert_same_update(results[1], results[0], start)
    assert not any(torch.equal(p, x) for p, x in zip(results[0], start, strict=True))
