"""LowRankEmbedding against the multiplied-out table, from the plan to files and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import assert_close, factorized, reference, tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.integrations.convert import convert, merge

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2}


class Text(nn.Module):
    """An embedding and an untied head."""

    def __init__(self, n: int = 200, d: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(n, d, padding_idx=3)
        self.head = nn.Linear(d, n)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits


def ids(step: int = 0) -> Tensor:
    return torch.randint(200, (4, 6), generator=torch.Generator().manual_seed(step))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(ids(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# The layer.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [9, 40])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_outputs_and_gradients(dtype: torch.dtype, n: int, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(n, 12, padding_idx, dtype=dtype)
    low_rank = factorized(dense, embed=5)
    assert type(low_rank) is pf.layers.LowRankEmbedding
    assert list(low_rank.state_dict()) == ["down.weight", "up.weight"]
    assert low_rank.down.weight.shape == (n, 5)
    assert (low_rank.num_embeddings, low_rank.embedding_dim) == (n, 12)
    assert low_rank.weight.shape == (n, 12)
    x = torch.tensor([[1, 2, 2], [0, 8, 1]])
    exact, table = factorized(dense, embed=5).double(), dense.double()
    exact.load_state_dict(low_rank.state_dict())
    ours, theirs = low_rank(x), reference(exact, table)(x)
    assert_close([ours], [theirs], TOLERANCE[dtype])
    # The reference multiplies out: it gives the padding row of `down` a gradient, which it must not have.
    weight = torch.randn(ours.shape, dtype=torch.float64)
    weight[x == padding_idx] = 0
    gradients = [
        torch.autograd.grad(out, list(layer.parameters()), weight.to(out.dtype))
        for layer, out in ((low_rank, ours), (exact, theirs))
    ]
    assert_close(tensors(gradients[0]), tensors(gradients[1]), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [20, 32, 200])  # the SVD takes another path for short tables
def test_the_padding_row_stays_exactly_zero(dtype: torch.dtype, n: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(n, 32, padding_idx=3, dtype=dtype))
    pf.factorize_(model, pf.plan(model, embed=8))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    padding = torch.tensor([3])
    assert model(padding).count_nonzero() == 0
    for _ in range(2):
        model(torch.arange(n)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model(padding).count_nonzero() == 0
    pf.merge_(model, optimizer)
    assert model[0].weight[3].count_nonzero() == 0


def test_momentum_goes_along() -> None:
    """∂down = G up and ∂up = Gᵀ down, for W = down upᵀ."""
    model = Text()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    update(model, optimizer, 0)
    G = optimizer.state[model.embed.weight]["momentum_buffer"].clone()
    pf.factorize_(model, pf.plan(model, embed=8), optimizer)
    down, up = model.embed.down.weight, model.embed.up.weight
    torch.testing.assert_close(optimizer.state[down]["momentum_buffer"], G @ up)
    torch.testing.assert_close(optimizer.state[up]["momentum_buffer"], G.T @ down)
    pf.merge_(model, optimizer)
    assert type(model.embed) is nn.Embedding
    assert model.embed.padding_idx == 3
    assert model.embed.weight in optimizer.state


# The plan.


def test_embeddings_are_planned_on_request_only() -> None:
    model = Text()
    assert pf.plan(model)["embed"].reason.startswith("embedding: a lookup, not a product; embed=")
    assert pf.plan(model, overrides={"*": 4})["embed"].rank is None
    plan = pf.plan(model, pf.Ratio(0.5, multiple=1), embed=pf.Ratio(0.25, multiple=1))
    assert (plan["embed"].rank, plan["head"].rank) == (8, 16)
    assert pf.plan(model, embed=4, overrides={"emb*": 6})["embed"].rank == 6
    assert pf.plan(model, embed=4, keep=["embed"])["embed"].reason == "kept by pattern 'embed'"
    assert pf.Plan.from_json(plan.to_json()) == plan


def test_a_plan_without_embeddings_fits_another_vocabulary() -> None:
    small, large = (nn.Sequential(nn.Embedding(n, 32), nn.Linear(32, 32)) for n in (200, 300))
    pf.factorize_(large, pf.plan(small, 4))
    with pytest.raises(ValueError, match="0: the plan is for a weight of 200×32"):
        pf.factorize_(nn.Sequential(nn.Embedding(300, 32), nn.Linear(32, 32)), pf.plan(small, 4, embed=4))


def test_a_budget_may_include_them() -> None:
    model, budget = Text(), pf.Budget(params=5000, multiple=1)
    plan = pf.resolve(pf.plan(model, budget, embed=budget), model)
    assert plan["embed"].rank
    assert 5000 - (200 + 32) < plan.after.parameters <= 5000  # no room for one rank more
    macs = pf.Budget(macs=100_000, multiple=1)
    plan = pf.plan(model, macs, embed=macs, example=ids())
    assert plan["embed"].reason == "a lookup has no MACs to save"


def test_macs() -> None:
    model, tokens, r, n, d = Text(), 24, 8, 200, 32
    plan = pf.plan(model, keep=["head"], embed=r, example=ids())
    head = tokens * n * d
    assert (plan.before.forward_macs, plan.before.backward_macs) == (head, 2 * head)
    assert plan.after.forward_macs == head + tokens * r * d
    assert plan.after.backward_macs == 2 * head + 2 * tokens * r * d
    pf.factorize_(model, plan)
    recount = pf.plan(model, example=ids()).before
    assert recount == plan.after


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_options_that_a_product_cannot_have(option: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(200, 32, **option))
    assert f"unsupported: {next(iter(option))} " in pf.plan(model, embed=4)["0"].reason
    plan = pf.plan(nn.Sequential(nn.Embedding(200, 32)), embed=4)
    with pytest.raises(ValueError, match=f"0: unsupported: {next(iter(option))} "):
        pf.factorize_(model, plan)
    assert type(model[0]) is nn.Embedding


def test_tied_embeddings_stay_dense() -> None:
    model = Text()
    model.head.weight = model.embed.weight
    plan = pf.plan(model, embed=4)
    assert plan["embed"].reason == "tied weight: shared with head.weight"
    assert plan["head"].reason == "tied weight: shared with embed.weight"


def test_an_embedding_that_is_a_head_too() -> None:
    class Tied(Text):
        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.linear(self.embed(ids), self.embed.weight)

    assert (
        pf.plan(Tied(), embed=4, example=ids())["embed"].reason == "its weight is used outside the layer too"
    )


def test_wrong_ranks() -> None:
    with pytest.raises(TypeError, match="embed=True: give a float"):
        pf.plan(Text(), embed=True)
    with pytest.raises(ValueError, match=r"embed=2\.0: .* a fixed rank an int"):
        pf.plan(Text(), embed=2.0)
    with pytest.raises(ValueError, match=r"embed: the model has no nn\.Embedding"):
        pf.plan(nn.Sequential(nn.Linear(64, 64)), embed=4)


# Files.


def test_files_and_back(tmp_path: Path) -> None:
    model, x = Text(), ids()
    torch.save(model.state_dict(), tmp_path / "dense.pt")
    plan = pf.plan(model, 4, embed=8)
    done = pf.factorize_(model, plan)
    assert pf.lowrank.plan_of(model).ranks == done.ranks == {"embed": {"": 8}, "head": {"": 4}}
    pf.save(model, tmp_path / "saved")
    for fresh in (Text(), Text().to("meta")):
        pf.load(fresh, tmp_path / "saved")
        assert torch.equal(fresh(x), model(x))
    convert(tmp_path / "dense.pt", plan, tmp_path / "low.pt")
    converted = Text()
    pf.reshape_(converted, done)
    converted.load_state_dict(torch.load(tmp_path / "low.pt"))
    assert torch.equal(converted(x), model(x))
    merge(tmp_path / "low.pt", tmp_path / "again.pt")
    again = Text()
    again.load_state_dict(torch.load(tmp_path / "again.pt"))
    torch.testing.assert_close(again(x), model(x))


# Several workers.


def switched(wrap: Any) -> tuple[nn.Module, pf.Switch]:
    """Train with a switch in the middle; `wrap` is DDP or fully_shard."""
    model: Any = wrap(Text())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    switch = pf.Switch(pf.plan(Text(), 4, embed=8), when=pf.AtStep(2))
    for step in range(4):
        if isinstance(model, DDP):
            switch.step(model, optimizer, step=step)
        else:
            model, optimizer = switch.rebuild(model, optimizer, build=Text, shard=wrap, step=step)
        update(model, optimizer, step)
    return model, switch


def under_ddp_and_fsdp2(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    ddp, switch = switched(lambda model: DDP(model))
    assert all(same_everywhere(p) for p in ddp.parameters())
    sharded, other = switched(lambda model: fully_shard(model, mesh=mesh))
    assert switch.report.plan.ranks == other.report.plan.ranks == {"embed": {"": 8}, "head": {"": 4}}
    for p, q in zip(ddp.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p)
    dist.barrier()


def test_under_ddp_and_fsdp2() -> None:
    in_processes(under_ddp_and_fsdp2, 2)
