"""Breakdown, probe and diagnosis of real jobs: two gloo processes, all cases in one group."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes
from pufferfish.distributed.exact import exact_
from pufferfish.measure import Breakdown, diagnose, dry_run, probe
from pufferfish.measure.breakdown import PARTS
from pufferfish.measure.remedies import gradients
from pufferfish.planning.timing import measure


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.BatchNorm1d(256)
    )


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.full((8, 64), 1.0 + rank + step)).square().mean().backward()
        optimizer.step()


def job(**ddp: Any) -> tuple[DDP, torch.optim.Optimizer]:
    model = DDP(build(), **ddp)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_steps_add_up(rank: int) -> None:
    ddp, optimizer = job(bucket_cap_mb=0.05)
    with Breakdown(ddp, optimizer) as times:
        train(ddp, optimizer, 15, rank)
    p = times.parts
    assert times.steps == 15
    assert sum(p[name] for name in PARTS) == pytest.approx(p["step"])
    assert all(p[name] > 0 for name in ("forward", "backward", "exchange", "optimizer"))
    assert p["encode"] == p["decode"] == 0
    assert 0 < p["hidden"] <= p["backward"] + p["exchange"]  # several buckets: the first leave early


def exchange_is_what_ddp_waits_for(rank: int) -> None:
    """Against DDP's own log of the same step: its end of communication less its end of computing."""
    ddp, optimizer = job()
    ddp._set_ddp_runtime_logging_sample_rate(1)
    for _ in range(3):
        with Breakdown(ddp, optimizer) as times:
            train(ddp, optimizer, 1, rank)
        data = ddp._get_ddp_logging_data()
        theirs = (data["backward_comm_time_end"] - data["backward_compute_time_end"]) / 1e9
        assert theirs <= times.parts["exchange"] <= times.parts["step"]


def without_sync_nothing_is_exchanged(rank: int) -> None:
    ddp, optimizer = job()
    train(ddp, optimizer, 2, rank)
    with Breakdown(ddp) as times, ddp.no_sync():
        train(ddp, optimizer, 3, rank)
    assert times.steps == 3
    assert times.parts["hidden"] == 0


def compressed_steps_add_up(rank: int) -> None:
    for method in (pf.compression.TopK(0.01), pf.compression.BFloat16()):
        ddp, optimizer = job()
        hook = pf.compress(ddp, method, optimizer=optimizer)
        train(ddp, optimizer, 1, rank)
        before = hook.meter.seconds
        with Breakdown(ddp) as times:
            train(ddp, optimizer, 4, rank)
        p = times.parts
        spent = {name: (x - before[name]) / 4 for name, x in hook.meter.seconds.items()}
        assert p["encode"] == pytest.approx(spent["encode"])
        assert p["decode"] == pytest.approx(spent["decode"])
        assert p["exchange"] >= spent["exchange"]
        assert p["backward"] > 0
        assert sum(p[name] for name in PARTS) == pytest.approx(p["step"])


def other_hooks_are_only_watched(rank: int) -> None:
    ddp, optimizer = job()
    exact_(ddp)
    with Breakdown(ddp) as times:
        train(ddp, optimizer, 3, rank)
    assert times.parts["hidden"] == 0
    assert times.parts["backward"] > 0


def the_link_is_the_same_for_all(rank: int, size: int) -> None:
    link = probe(largest=2**18, rounds=2)
    assert link.size == size
    assert not link.extrapolated
    assert set(link.lines) == {"all_reduce", "all_gather", "all_to_all"}
    for line in link.lines.values():
        assert line.alpha >= 0
        assert line.beta >= 0
        assert line.alpha + line.beta > 0
    texts: list[Any] = [None] * size
    dist.all_gather_object(texts, json.dumps(link.as_dict()))
    assert len(set(texts)) == 1
    assert link.inside is None


def _untouched(
    rank: int, ddp: DDP, optimizer: torch.optim.Optimizer, run: Any
) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(7 + rank)
    run()
    gradients = {f"grad {n}": p.grad.clone() for n, p in ddp.named_parameters() if p.grad is not None}
    moments = {
        f"{i} {k}": x.clone()
        for i, state in optimizer.state_dict()["state"].items()
        for k, x in state.items()
        if isinstance(x, Tensor)
    }
    state = {name: x.clone() for name, x in ddp.state_dict().items()}
    return {**state, **gradients, **moments, "random": torch.get_rng_state()}, _hooks(ddp)


def _hooks(ddp: DDP) -> Any:
    from torch.optim import optimizer as module

    return (
        [len(x) for m in ddp.modules() for name, x in vars(m).items() if name.endswith("_hooks")],
        [len(p._post_accumulate_grad_hooks or ()) for p in ddp.parameters()],
        len(module._global_optimizer_pre_hooks) + len(module._global_optimizer_post_hooks),
        [id(hook) for _, hook in ddp._comm_hooks],
    )


def diagnosis_leaves_all_as_it_was(rank: int, size: int, compressed: bool) -> None:
    """Against the same steps without it: weights, buffers, gradients, moments, random numbers, hooks, next steps."""
    ends = []
    for watched in (False, True):
        ddp, optimizer = job(bucket_cap_mb=0.1)
        if compressed:
            pf.compress(ddp, pf.compression.PowerSGD(rank=2), optimizer=optimizer)
        hooks = _hooks(ddp)

        def run(watched: bool = watched, ddp: DDP = ddp, optimizer: Any = optimizer) -> None:
            around: Any = (
                diagnose(ddp, optimizer, steps=4, methods=[pf.compression.TopK(0.05)], show=False)
                if watched
                else contextlib.nullcontext()
            )
            with around:
                train(ddp, optimizer, 9, rank)

        first, after = _untouched(rank, ddp, optimizer, run)
        assert after == hooks
        second, _ = _untouched(rank, ddp, optimizer, lambda d=ddp, o=optimizer: train(d, o, 2, rank))
        ends.append({**{f"1 {k}": x for k, x in first.items()}, **{f"2 {k}": x for k, x in second.items()}})
    assert ends[0].keys() == ends[1].keys()
    for name, x in ends[0].items():
        assert torch.equal(x, ends[1][name]), name


def diagnosis_adds_up(rank: int, size: int) -> None:
    ddp, optimizer = job()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), diagnose(ddp, steps=5, total_steps=10_000) as found:
        assert str(found) == "diagnose: not done yet"
        train(ddp, optimizer, 12, rank)
    assert (found.workers, found.steps) == (size, 5)
    p = found.parts
    assert sum(p[name] for name in PARTS) == pytest.approx(p["step"])
    assert found.ceiling >= 1
    assert 0 <= found.waiting <= p["exchange"]
    assert found.link is not None
    assert found.hours == pytest.approx(p["step"] * 10_000 / 3600)
    gradient = sum(q.numel() * 4 for q in ddp.parameters())
    assert found.wire_bytes == gradient  # two workers: 2 · 1/2
    kinds = [c.kind for c in found.choices]
    assert kinds == sorted(kinds, key=["free", "low rank", "compression", "both"].index)
    assert set(kinds) == {"free", "low rank", "compression", "both"}
    for c in found.choices:
        assert c.step > 0
        assert c.speedup == pytest.approx(found.predicted / c.step)
        assert c.hours == pytest.approx(found.hours / c.run_speedup)
    low = next(c for c in found.choices if c.kind == "low rank")
    plan = pf.plan(ddp.module, 0.25)
    assert low.wire_bytes == plan.after.gradient_bytes
    assert low.run_speedup == pytest.approx(3 / (1 + 2 / low.speedup))
    half = next(c for c in found.choices if "BFloat16" in c.name and c.kind == "free")
    assert gradient / 2 <= half.wire_bytes < gradient / 2 + 100
    told = out.getvalue()
    assert ("no exchange at all" in told) == (rank == 0)
    if rank == 0:
        assert told == f"{found}\n"
        assert all(c.name in told for c in found.choices)
        (line,) = (line for line in told.splitlines() if "pf.Switch(rank=0.25)" in line)
        assert line.count("low rank") == 1
    same: list[Any] = [None] * size
    dist.all_gather_object(same, json.dumps(found.as_dict()))
    assert len(set(same)) == 1


def errors_reach_all_ranks(rank: int) -> None:
    ddp, optimizer = job()
    with pytest.raises(ValueError, match="no step"), diagnose(ddp, show=False):
        pass

    with pytest.raises(TypeError, match="not wrapped"), diagnose(build(), show=False):
        pass
    hooked, _ = job()
    exact_(hooked)
    with pytest.raises(ValueError, match="communication hook Exact"), diagnose(hooked, show=False):
        pass

    def alone() -> None:
        with diagnose(ddp, show=False):
            ddp(torch.ones(8, 64)).sum().backward()
            if rank == 0:
                optimizer.step()

    with pytest.raises(RuntimeError, match="differ from rank 0"):
        alone()
    train(ddp, optimizer, 1, rank)


def cases(rank: int, size: int) -> None:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    plain_steps_add_up(rank)
    exchange_is_what_ddp_waits_for(rank)
    without_sync_nothing_is_exchanged(rank)
    compressed_steps_add_up(rank)
    other_hooks_are_only_watched(rank)
    the_link_is_the_same_for_all(rank, size)
    for compressed in (False, True):
        diagnosis_leaves_all_as_it_was(rank, size, compressed)
    diagnosis_adds_up(rank, size)
    errors_reach_all_ranks(rank)
    gc.collect()


@pytest.mark.timeout(180)
def test_two_workers(tmp_path: Path) -> None:
    in_processes(cases, 2)


def levels(rank: int, size: int) -> None:
    """Two machines of two workers, as LOCAL_WORLD_SIZE says: three sets of lines, and groups of those ranks can be made again."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    link = probe(largest=2**14, rounds=1)
    assert (link.size, link.per_node) == (4, 2)
    assert link.inside is not None
    assert link.between is not None
    ddp, optimizer = job()  # groups of the same ranks as the probe's
    hook = pf.compress(ddp, pf.compression.BFloat16(), optimizer=optimizer, levels="node")
    train(ddp, optimizer, 2, rank)
    dry = dry_run(pf.compression.BFloat16(), gradients(ddp.module), size, per_node=2)
    handed = {kind: nbytes // 2 for kind, nbytes in hook.meter.handed.items()}  # a step
    assert dry.inside == handed["reduce_scatter"] == 2 * handed["all_gather"]
    if rank % 2 == 0:  # the owner of most; what all agree on goes inside too
        assert dry.nbytes + 4 * (1 + 6) == handed["all_reduce"]
    del ddp, hook


@pytest.mark.timeout(180)
def test_two_levels(tmp_path: Path) -> None:
    in_processes(levels, 4)


def test_one_process_has_nothing_to_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with diagnose(model, steps=3) as found:
        train(model, optimizer, 8, 0)
    assert (found.workers, found.ceiling, found.link) == (1, 1.0, None)
    assert [c.kind for c in found.choices] == ["low rank"]
    assert found.error == pytest.approx(0)
    assert "one process: nothing to exchange" in capsys.readouterr().out
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])  # it did train


def test_layers_are_timed_in_the_loop_s_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spied(*given: Any) -> tuple[float, float]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return measure(*given)

    monkeypatch.setattr("pufferfish.planning.planner.measure", spied)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for precision in (True, False):
        with diagnose(model, optimizer, steps=3, measure=True, show=False):
            for _ in range(6):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision):
                    loss = model(torch.randn(8, 64)).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert seen
        assert set(seen) == {precision}
        seen.clear()


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="steps=0"), diagnose(build(), steps=0):
        pass
    with pytest.raises(ValueError, match="one process has no link"):
        probe()
