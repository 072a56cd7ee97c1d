"""Local steps against workers trained one after the other by hand; in real processes, and in one alone."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes
from pufferfish.compress import DGC, Aggregator, BFloat16, BlockInt8, SignSGD, Simulated, TopK
from pufferfish.local import LocalSteps

SAMPLES = 4  # a worker and step
Make = Callable[[Any], optim.Optimizer]


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 40, bias=False),
        nn.BatchNorm1d(40),
        nn.ReLU(),
        nn.Linear(40, 40),
        nn.ReLU(),
        nn.Linear(40, 3),
    )


def sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1)


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2)


def diloco(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SAMPLES, 12, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


def update(model: nn.Module, optimizer: optim.Optimizer, step: int, rank: int = 0) -> None:
    x, y = batch(step, rank)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items() if x.is_floating_point()}


def by_hand(
    size: int, h: int, steps: int, make: Make, *, lr: float = 1.0, momentum: float = 0.0
) -> nn.Module:
    """All the workers, one after the other: θ ← a − lr·(Δ + μv) with v ← μv + Δ and Δ = a − mean θ."""
    workers = [build() for _ in range(size)]
    optimizers = [make(worker.parameters()) for worker in workers]
    anchor = floats(workers[0])
    trained = dict(workers[0].named_parameters()).keys()
    v = {name: torch.zeros_like(a) for name, a in anchor.items()}
    for step in range(steps):
        for rank in range(size):
            update(workers[rank], optimizers[rank], step, rank)
        if (step + 1) % h == 0:
            for name, a in anchor.items():
                delta = a - torch.stack([worker.state_dict()[name] for worker in workers]).mean(0)
                v[name] = momentum * v[name] + delta
                a -= lr * (delta + momentum * v[name]) if name in trained else delta
            for worker in workers:
                worker.load_state_dict(anchor, strict=False)
    return workers[0]


def train(
    local: LocalSteps, model: nn.Module, optimizer: optim.Optimizer, steps: range, rank: int
) -> list[int]:
    """The steps after which the workers averaged."""
    averaged = []
    for step in steps:
        update(model, optimizer, step, rank)
        if local.step(model):
            averaged.append(step + 1)
    return averaged


def close(model: nn.Module, other: nn.Module) -> None:
    for (name, x), y in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def same_everywhere(model: nn.Module) -> None:
    for name, x in model.state_dict().items():
        theirs = x.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(theirs, x), name


# In real processes.


def one_step_is_ddp(rank: int, size: int) -> None:
    model, other = build(), build()
    for net in (model, other):
        net[1].eval()  # the statistics of DDP are rank 0's
    ddp, local = DDP(other), LocalSteps(1)
    optimizers = [sgd(net.parameters()) for net in (model, other)]
    local.start(model)
    for step in range(4):
        update(model, optimizers[0], step, rank)
        assert local.step(model)
        update(ddp, optimizers[1], step, rank)
        same_everywhere(model)
    close(model, other)


def equals_workers_by_hand(rank: int, size: int) -> None:
    nesterov = {"lr": 0.7, "momentum": 0.9}
    for h, make, outer, settings in (
        (1, adamw, None, {}), (3, sgd, None, {}), (3, adamw, diloco, nesterov), (2, sgd, diloco, nesterov),
    ):  # fmt: skip
        model = build(seed=rank)  # the start makes it rank 0's
        local, optimizer = LocalSteps(h, outer=outer), make(model.parameters())
        local.start(model)
        assert train(local, model, optimizer, range(6), rank) == list(range(h, 7, h))
        same_everywhere(model)
        close(model, by_hand(size, h, 6, make, **settings))


def starts_from_rank_zero(rank: int, size: int) -> None:
    model = build(seed=rank).to(memory_format=torch.channels_last)
    model[1].running_mean += rank
    model[1].num_batches_tracked += rank
    model[3].weight.requires_grad_(False)  # not averaged, but equal
    model.register_buffer("mask", torch.tensor([[True, False]]) if rank else torch.tensor([[False, False]]))
    LocalSteps(2).start(model)
    same_everywhere(model)
    assert torch.equal(model[3].weight, build()[3].weight)


def compressed_as_simulated(rank: int, size: int) -> None:
    """What real workers send is what the same method averages among simulated ones."""
    for method in (TopK(0.05), BlockInt8(64), {"3": TopK(0.05), "*": BlockInt8(64)}):
        model = build()
        local = LocalSteps(2, outer=diloco, method=method)
        local.start(model)
        train(local, model, sgd(model.parameters()), range(6), rank)
        same_everywhere(model)

        workers = [build() for _ in range(size)]
        optimizers = [sgd(worker.parameters()) for worker in workers]
        anchor = build()
        outer = diloco(anchor.parameters())
        trained = dict(anchor.named_parameters()).keys()
        together = Aggregator(method, Simulated(size))
        for step in range(6):
            for i in range(size):
                update(workers[i], optimizers[i], step, i)
            if step % 2:
                start, theirs = floats(anchor), [floats(worker) for worker in workers]
                means = together.together([{n: start[n] - their[n] for n in trained} for their in theirs])
                for name, p in anchor.named_parameters():
                    p.grad = means[0][name]
                outer.step()
                for name in start.keys() - trained:
                    anchor.get_buffer(name).copy_(torch.stack([their[name] for their in theirs]).mean(0))
                for worker in workers:
                    worker.load_state_dict(floats(anchor), strict=False)
        close(model, workers[0])


def a_poisoned_round_is_lost(rank: int, size: int) -> None:
    model = build()
    local, optimizer = LocalSteps(2, outer=diloco, method={"3": TopK(0.1)}), sgd(model.parameters())
    local.start(model)
    train(local, model, optimizer, range(2), rank)
    before, kept = floats(model), copy.deepcopy(local.state_dict())
    for where in ("3.weight", "1.running_var"):
        update(model, optimizer, 2, rank)
        local.step(model)
        if rank == size - 1:
            model.state_dict()[where][0] = math.nan
        whose = "this worker" if rank == size - 1 else "another worker"
        with pytest.warns(RuntimeWarning, match=f"not finite, by {whose}"):
            assert local.step(model)
        for name, x in floats(model).items():
            assert torch.equal(x, before[name]), name
    state = local.state_dict()
    assert state["lost"] == 2
    assert_same(state["outer"], kept["outer"])
    assert_same(state["aggregator"]["own"], kept["aggregator"]["own"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(local, model, optimizer, range(3, 5), rank)
    same_everywhere(model)
    assert any(not torch.equal(x, before[name]) for name, x in floats(model).items())


def resumes_in_the_middle(rank: int, size: int) -> None:
    """Saved by every worker, with nothing pickled, between two averages and at one: bit for bit."""
    for stop in (2, 5, 6):
        for method in (None, TopK(0.05)):
            runs = []
            for interrupted in (False, True):
                model = build(seed=1)
                local, optimizer = LocalSteps(3, outer=diloco, method=method), adamw(model.parameters())
                local.start(model)
                train(local, model, optimizer, range(stop), rank)
                if interrupted:
                    file = io.BytesIO()
                    torch.save((model.state_dict(), optimizer.state_dict(), local.state_dict()), file)
                    file.seek(0)
                    saved = torch.load(file, weights_only=True)
                    model = build(seed=9)
                    local, optimizer = LocalSteps(3, outer=diloco, method=method), adamw(model.parameters())
                    if stop == 5:
                        local.start(model)  # before or after makes no difference
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                    local.load_state_dict(saved[2])
                    assert_same(local.state_dict(), saved[2])
                    if stop != 5:
                        local.start(model)
                assert train(local, model, optimizer, range(stop, 10), rank)[-1] == 9
                runs.append((model.state_dict(), local.state_dict()))
            assert_same(runs[0], runs[1])


def follows_a_switch(rank: int, size: int) -> None:
    model = build()
    local, optimizer = LocalSteps(3, outer=diloco, method=TopK(0.05)), adamw(model.parameters())
    switch = pf.Switch(rank=pf.Fixed(4), when=pf.AtEpoch(1))
    local.start(model)
    outer = local.outer
    for epoch in range(2):
        assert local.sync(model) == (epoch == 1)
        if switch.step(model, optimizer, epoch=epoch):
            before = {n: x.clone() for n, x in momenta(local).items()}
            local.start(model)
            after = momenta(local)
            assert after.keys() == before.keys() & dict(model.named_parameters()).keys()
            assert all(torch.equal(after[name], before[name]) for name in after)
        train(local, model, optimizer, range(4 * epoch, 4 * epoch + 4), rank)
    assert local.outer is outer
    local.sync(model)
    same_everywhere(model)
    assert momenta(local).keys() == dict(model.named_parameters()).keys()
    assert switch.report is not None


def momenta(local: LocalSteps) -> dict[str, Tensor]:
    return {name: x["momentum_buffer"] for name, x in local.state_dict()["outer"]["state"].items()}


def disagreement_is_the_same_error_everywhere(rank: int, size: int) -> None:
    last = rank == size - 1
    for different in (
        lambda: LocalSteps(3 if last else 2).start(build()),
        lambda: LocalSteps(2, method=TopK() if last else None).start(build()),
        lambda: LocalSteps(2).start(nn.Linear(2, 3 if last else 2)),
    ):
        with pytest.raises(RuntimeError, match=rf"LocalSteps: ranks \[{size - 1}\] differ from rank 0 in h"):
            different()
    ddp = DDP(build())
    with pytest.raises(
        RuntimeError, match="every gradient already" if last else r"differ.*on rank \d: nothing"
    ):
        LocalSteps(2).start(ddp if last else ddp.module)
    sharded = build()
    fully_shard(sharded)
    with pytest.raises(TypeError, match=r"0\.weight is a DTensor"):
        LocalSteps(2).start(sharded)
    model = build()
    model[1].eval()  # or it would count that one worker makes more updates
    local, optimizer = LocalSteps(4), sgd(model.parameters())
    local.start(model)
    train(local, model, optimizer, range(3 if last else 2), rank)
    with pytest.raises(RuntimeError, match="differ from rank 0 in the number of updates"):
        local.sync(model)
    local.updates = 2
    if last:
        model[3] = nn.Linear(40, 41)
    with pytest.raises(RuntimeError, match=r"3\.weight is 41×40" if last else r"differ.*on rank \d: nothing"):
        local.sync(model)
    if last:
        model[3] = build()[3]
    assert local.sync(model)  # and the job can go on
    same_everywhere(model)


def counts_its_bytes(rank: int, size: int) -> None:
    """One message an average, whatever h; buffers are never rounded."""
    for method, each in ((None, 4), (BFloat16(), 2)):
        model = build()
        local = LocalSteps(4, method=method)
        local.start(model)
        train(local, model, sgd(model.parameters()), range(8), rank)
        parameters = sum(p.numel() for p in model.parameters())
        tensors = floats(model)
        others = (
            sum(x.numel() for x in tensors.values()) - parameters + len(tensors) + 1
        )  # and who is finite, in use
        assert local.meter.steps == 2
        assert local.meter.handed["all_reduce"] == 2 * (each * parameters + 4 * others)
        assert local.meter.wire_bytes == local.meter.handed["all_reduce"] * 2 * (size - 1) / size


def machines_that_share_models(rank: int, size: int) -> None:
    """DDP inside two machines of two processes, local steps between them: two workers of twice the batch."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = build(seed=rank)
    model[1].eval()
    local = LocalSteps(2, outer=diloco, group=between)
    ddp, optimizer = DDP(model, process_group=inside), sgd(model.parameters())
    local.start(model)
    for step in range(4):
        update(ddp, optimizer, step, rank)
        local.step(model)
    same_everywhere(model)

    workers = [build() for _ in range(2)]
    optimizers = [sgd(worker.parameters()) for worker in workers]
    anchor = build()
    outer = diloco(anchor.parameters())
    for step in range(4):
        for i, worker in enumerate(workers):
            worker[1].eval()
            pairs = [batch(step, 2 * i + j) for j in range(2)]
            x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            nn.functional.cross_entropy(worker(x), y).backward()
            optimizers[i].step()
            optimizers[i].zero_grad()
        if step % 2:
            for a, p, q in zip(anchor.parameters(), *[w.parameters() for w in workers], strict=True):
                a.grad = a.detach() - (p.detach() + q.detach()) / 2
            outer.step()
            for worker in workers:
                worker.load_state_dict(anchor.state_dict())
    close(model, workers[0])


def checkpointed_between_two_averages(rank: int, size: int, folder: str) -> None:
    """Every worker gets back its own weights and moments."""
    ends = []
    for stops in ((9,), (5, 9)):
        for stop in stops:
            model, local = build(seed=rank), LocalSteps(3, outer=diloco, method=TopK(0.05))
            optimizer = adamw(model.parameters())
            with pf.Checkpoint(
                f"{folder}/{size}-{len(stops)}", model, optimizer, compressor=local
            ) as checkpoint:
                at = checkpoint.resume()
                local.start(model)
                train(local, model, optimizer, range(at.position["step"] if at else 0, stop), rank)
                checkpoint.save(step=stop)
        ends.append((model.state_dict(), local.state_dict()))
    assert_same(ends[0], ends[1])


def assert_same(a: Any, b: Any, at: str = "") -> None:
    """Equal in every bit."""
    if isinstance(a, Tensor):
        assert torch.equal(a, b), at
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for key in a:
            assert_same(a[key], b[key], f"{at}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{at}/{i}")
    else:
        assert a == b, at


def cases(rank: int, size: int, folder: str) -> None:
    one_step_is_ddp(rank, size)
    equals_workers_by_hand(rank, size)
    starts_from_rank_zero(rank, size)
    compressed_as_simulated(rank, size)
    a_poisoned_round_is_lost(rank, size)
    resumes_in_the_middle(rank, size)
    follows_a_switch(rank, size)
    disagreement_is_the_same_error_everywhere(rank, size)
    counts_its_bytes(rank, size)
    checkpointed_between_two_averages(rank, size, folder)
    if size == 4:
        machines_that_share_models(rank, size)


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize("size", [2, 4])
def test_in_real_processes(size: int, tmp_path: Path) -> None:
    in_processes(cases, size, tmp_path, str(tmp_path))


# In one process.


def test_alone_it_looks_ahead() -> None:
    model = build()
    local, optimizer = LocalSteps(3, outer=diloco), adamw(model.parameters())
    local.start(model)
    assert train(local, model, optimizer, range(7), 0) == [3, 6]
    assert local.sync(model)
    assert not local.sync(model)
    other = by_hand(1, 3, 6, adamw, lr=0.7, momentum=0.9)
    local, model = LocalSteps(3, outer=diloco), build()
    local.start(model)
    train(local, model, adamw(model.parameters()), range(6), 0)
    close(model, other)


def test_the_anchor_keeps_what_16_bits_cut_off() -> None:
    """A hundred outer steps, each too small for bf16 to see."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    local = LocalSteps(1, outer=lambda params: optim.SGD(params, lr=1e-3))
    local.start(model)
    for _ in range(100):
        with torch.no_grad():
            model.weight -= 0.125
        local.step(model)
    assert local.state_dict()["anchor"]["weight"].item() == pytest.approx(1 - 100 * 0.125e-3)
    assert model.weight.item() == torch.tensor(1 - 100 * 0.125e-3).bfloat16().item()


def test_buffers_without_a_mean_are_left_alone() -> None:
    model = build()
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    local = LocalSteps(1)
    local.start(model)
    assert list(local.state_dict()["buffers"]) == ["1.running_mean", "1.running_var"]
    model.cache = torch.ones(5)
    local.step(model)
    assert local.lost == 0


def test_compiled_models_keep_their_names() -> None:
    model = build()
    local = LocalSteps(2)
    local.start(torch.compile(model, backend="eager"))
    assert local.state_dict()["anchor"].keys() == dict(model.named_parameters()).keys()
    local.step(model)


@pytest.mark.gpu
def test_on_a_gpu_from_a_state_on_the_cpu() -> None:
    ends = []
    for device, stop in (("cpu", 6), ("cuda", 6), ("cuda", 4)):
        model = build().to(device)
        local, optimizer = LocalSteps(3, outer=diloco, method=BlockInt8()), sgd(model.parameters())
        local.start(model)
        for step in range(6):
            if step == stop:
                file = io.BytesIO()
                torch.save(local.state_dict(), file)
                file.seek(0)
                local = LocalSteps(3, outer=diloco, method=BlockInt8())
                local.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
            x, y = (part.to(device) for part in batch(step, 0))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step(model)
        ends.append(model.cpu())
    close(ends[0], ends[1])
    close(ends[1], ends[2])


def test_schedules_of_the_outer_optimizer_stay() -> None:
    model = build()
    local, optimizer = LocalSteps(1, outer=diloco), sgd(model.parameters())
    local.start(model)
    assert local.outer is not None
    schedule = optim.lr_scheduler.StepLR(local.outer, 1, gamma=0.5)
    train(local, model, optimizer, range(1), 0)
    schedule.step()
    pf.factorize_(model, pf.plan(model, rank=pf.Fixed(4)), optimizer)
    local.start(model)
    assert [group["lr"] for group in local.outer.param_groups] == [0.35]
    again = LocalSteps(1, outer=diloco)
    again.load_state_dict(local.state_dict())
    again.start(model)
    assert again.outer is not None
    assert [group["lr"] for group in again.outer.param_groups] == [0.35]


def test_replaced_parameters_are_told_at_once() -> None:
    model = build()
    local, optimizer = LocalSteps(9), sgd(model.parameters())
    with pytest.raises(ValueError, match=r"call local.start\(model\)"):
        local.step(model)
    local.start(model)
    train(local, model, optimizer, range(2), 0)
    pf.factorize_(model, pf.plan(model, rank=pf.Fixed(4), keep=["0"]), optimizer)
    with pytest.raises(
        ValueError, match=r"3.down.weight is 4×40, and was not there.*local.sync\(model\) before"
    ):
        local.step(model)
    with pytest.raises(ValueError, match="2 updates since the last average would be lost"):
        local.start(model)


def test_state_of_another_run_is_refused() -> None:
    model = build()
    local = LocalSteps(2, outer=diloco)
    local.start(model)
    state = local.state_dict()
    with pytest.raises(ValueError, match="lacks aggregator, anchor"):
        LocalSteps(2).load_state_dict({"updates": 1})
    for other, net, told in (
        (LocalSteps(2, outer=adamw), build(), "saved optimizer is SGD, this one is AdamW"),
        (
            LocalSteps(2, outer=diloco),
            nn.Linear(2, 2),
            "weight is 2×2, and was not there when the model was saved",
        ),
    ):
        other.load_state_dict(state)
        before = copy.deepcopy(net.state_dict())
        with pytest.raises(ValueError, match=told):
            other.start(net)
        assert_same(dict(net.state_dict()), dict(before))
    fresh = LocalSteps(2)
    fresh.load_state_dict(LocalSteps(2).state_dict())  # saved before the start
    fresh.start(model)


def refused() -> Iterator[tuple[Callable[[], object], type[Exception], str]]:
    model = build()
    frozen = build().requires_grad_(False)
    yield lambda: LocalSteps(0), ValueError, "h=0 is not a number of updates"
    yield lambda: LocalSteps(2.0), ValueError, "h=2.0"  # type: ignore[arg-type]
    yield lambda: LocalSteps(2, method=SignSGD()), ValueError, "SignSGD knows no lengths"
    yield lambda: LocalSteps(2, method={"nowhere": TopK()}).start(model), ValueError, "'nowhere' matches no"
    yield (
        lambda: LocalSteps(2, outer=diloco, method=DGC()).start(model),
        ValueError,
        "DGC and the outer SGD both",
    )
    yield lambda: LocalSteps(2, outer=optim.LBFGS).start(model), TypeError, "made a LBFGS"
    yield (
        lambda: LocalSteps(2, outer=lambda _: sgd(model.parameters())).start(model),
        ValueError,
        "does not have",
    )
    yield lambda: LocalSteps(2, outer=lambda p: sgd(p[1:])).start(model), ValueError, "does not hold 0.weight"
    yield lambda: LocalSteps(2).start(frozen), ValueError, "no parameter"
    yield (
        lambda: LocalSteps(2).start(nn.Linear(2, 2, dtype=torch.complex64)),
        TypeError,
        "weight is torch.complex64",
    )


@pytest.mark.parametrize(("act", "kind", "told"), list(refused()))
def test_nonsense_is_refused(act: Callable[[], object], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        act()
