"""`Breakdown`, `probe` and `diagnose` in real process groups on gloo."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pufferfish as pf
from processes import in_processes
from pufferfish.compression import Settings
from pufferfish.distributed.exact import exact_
from pufferfish.measure import Breakdown, diagnose, dry_run, probe
from pufferfish.measure import link as link_module
from pufferfish.measure.breakdown import PARTS
from pufferfish.measure.cost_model import trainable_parameters


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


def ddp_and_optimizer(**options: Any) -> tuple[DDP, torch.optim.Optimizer]:
    model = DDP(build(), **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps_without_compression_add_up(rank: int, size: int) -> None:
    ddp, optimizer = ddp_and_optimizer(bucket_cap_mb=0.05)
    with Breakdown(ddp, optimizer) as times:
        train(ddp, optimizer, 15, rank)
    p = times.parts
    assert times.steps == 15
    assert sum(p[name] for name in PARTS) == pytest.approx(p["step"])
    assert all(p[name] > 0 for name in ("forward", "backward", "exchange", "optimizer"))
    assert p["encode"] == p["decode"] == 0
    assert 0 < p["hidden"] <= p["backward"] + p["exchange"]  # several buckets: the first leave early
    with Breakdown(ddp) as times, ddp.no_sync():
        train(ddp, optimizer, 3, rank)
    assert times.parts["hidden"] == 0
    ddp, optimizer = ddp_and_optimizer()
    exact_(ddp)
    with Breakdown(ddp) as times:
        train(ddp, optimizer, 3, rank)
    assert times.parts["hidden"] == 0  # its work is counted as backward
    assert times.parts["backward"] > 0


def exchange_covers_ddp_wait(rank: int, size: int) -> None:
    """The exposed exchange covers the time between end of compute and end of communication in DDP's own log."""
    ddp, optimizer = ddp_and_optimizer()
    ddp._set_ddp_runtime_logging_sample_rate(1)
    for _ in range(3):
        with Breakdown(ddp, optimizer) as times:
            train(ddp, optimizer, 1, rank)
        data = ddp._get_ddp_logging_data()
        theirs = (data["backward_comm_time_end"] - data["backward_compute_time_end"]) / 1e9
        assert theirs <= times.parts["exchange"] <= times.parts["step"]


def compressed_steps_add_up(rank: int, size: int) -> None:
    for method in (pf.compression.TopK(0.01), pf.compression.BFloat16()):
        ddp, optimizer = ddp_and_optimizer()
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


def make_probe_fast() -> None:
    """One short measurement of everything: only the values of a real probe need more."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    link_module._SECONDS, link_module._MAX_REPEATS, link_module._CONTENTION_SECONDS = 0.0, 1, 0.01


def probe_is_equal_on_all_workers(rank: int, size: int) -> None:
    make_probe_fast()
    link = probe(largest=2**18, rounds=2)
    assert link.size == size
    assert not link.extrapolated
    assert set(link.collectives) == {"all_reduce", "all_gather", "all_to_all"}
    for cost in link.collectives.values():
        assert cost.alpha >= 0
        assert cost.beta >= 0
        assert cost.alpha + cost.beta > 0
    texts: list[Any] = [None] * size
    dist.all_gather_object(texts, json.dumps(dataclasses.asdict(link)))
    assert len(set(texts)) == 1
    assert link.intra_node is None


def _run_and_snapshot(
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


def diagnosis_has_no_side_effects(rank: int, size: int, compressed: bool = False) -> None:
    """Same weights, buffers, gradients, optimizer state, random state, hooks and next steps as without `diagnose`."""
    make_probe_fast()
    ends = []
    for watched in (False, True):
        ddp, optimizer = ddp_and_optimizer(bucket_cap_mb=0.1)
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

        first, after = _run_and_snapshot(rank, ddp, optimizer, run)
        assert after == hooks
        second, _ = _run_and_snapshot(rank, ddp, optimizer, lambda d=ddp, o=optimizer: train(d, o, 2, rank))
        ends.append({**{f"1 {k}": x for k, x in first.items()}, **{f"2 {k}": x for k, x in second.items()}})
    assert ends[0].keys() == ends[1].keys()
    for name, x in ends[0].items():
        assert torch.equal(x, ends[1][name]), name


def compressed_diagnosis_has_no_side_effects(rank: int, size: int) -> None:
    diagnosis_has_no_side_effects(rank, size, compressed=True)


def diagnosis_is_consistent(rank: int, size: int) -> None:
    make_probe_fast()
    ddp, optimizer = ddp_and_optimizer()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), diagnose(ddp, steps=5, total_steps=10_000) as found:
        assert str(found).startswith("diagnose: no result yet")
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
    kinds = [option.kind for option in found.options]
    assert kinds == sorted(kinds, key=["free", "low rank", "compression", "both"].index)
    assert set(kinds) == {"free", "low rank", "compression", "both"}
    for c in found.options:
        assert c.step > 0
        assert c.speedup == pytest.approx(found.predicted / c.step)
        assert c.hours == pytest.approx(found.hours / c.run_speedup)
    low = next(c for c in found.options if c.kind == "low rank")
    plan = pf.plan(ddp.module, 0.25)
    assert low.wire_bytes == plan.after.gradient_bytes
    assert low.run_speedup == pytest.approx(3 / (1 + 2 / low.speedup))
    half = next(c for c in found.options if "BFloat16" in c.name and c.kind == "free")
    assert gradient / 2 <= half.wire_bytes < gradient / 2 + 100
    printed = out.getvalue()
    assert ("without any exchange" in printed) == (rank == 0)
    if rank == 0:
        assert printed == f"{found}\n"
        assert all(c.name in printed for c in found.options)
        (line,) = (line for line in printed.splitlines() if "pf.Switch(rank=0.25)" in line)
        assert line.count("low rank") == 1
    same: list[Any] = [None] * size
    dist.all_gather_object(same, json.dumps(dataclasses.asdict(found)))
    assert len(set(same)) == 1


def diagnosis_knows_the_settings_of_the_hook(rank: int, size: int) -> None:
    make_probe_fast()
    for settings in (Settings(smallest=20_000), Settings(smallest=0, scope="global")):
        ddp, optimizer = ddp_and_optimizer()
        hook = pf.compress(ddp, pf.compression.TopK(0.01), optimizer=optimizer, settings=settings)
        with diagnose(ddp, steps=1, show=False, methods=()) as found:
            train(ddp, optimizer, 5, rank)
        assert found.wire_bytes == hook.meter.wire_bytes / hook.meter.steps


def errors_reach_all_workers(rank: int, size: int) -> None:
    ddp, optimizer = ddp_and_optimizer()
    with pytest.raises(ValueError, match="no optimizer step"), diagnose(ddp, show=False):
        pass

    with (
        pytest.raises(TypeError, match="is not wrapped in DistributedDataParallel"),
        diagnose(build(), show=False),
    ):
        pass
    hooked, _ = ddp_and_optimizer()
    exact_(hooked)
    with pytest.raises(ValueError, match="communication hook Exact"), diagnose(hooked, show=False):
        pass

    def only_rank_0_steps() -> None:
        with diagnose(ddp, show=False):
            ddp(torch.ones(8, 64)).sum().backward()
            if rank == 0:
                optimizer.step()

    with pytest.raises(ValueError, match="rank 1: diagnose: no optimizer step"):
        only_rank_0_steps()
    train(ddp, optimizer, 1, rank)


def probe_of_two_machines(rank: int, size: int) -> None:
    """Two machines of two workers, by LOCAL_WORLD_SIZE; afterwards the same groups can be created again."""
    make_probe_fast()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    link = probe(largest=2**14, rounds=1)
    assert (link.size, link.per_node) == (4, 2)
    assert link.intra_node is not None
    assert link.inter_node is not None
    ddp, optimizer = ddp_and_optimizer()
    hook = pf.compress(
        ddp, pf.compression.BFloat16(), optimizer=optimizer, settings=Settings(hierarchy="node")
    )
    train(ddp, optimizer, 2, rank)
    dry = dry_run(pf.compression.BFloat16(), trainable_parameters(ddp.module), size, per_node=2)
    per_step = {kind: nbytes // 2 for kind, nbytes in hook.meter.collective_bytes.items()}
    assert dry.intra_node_bytes == per_step["broadcast"]
    sent = sum(nbytes for _, nbytes in dry.messages) if rank % 2 == 0 else 0  # one worker of a machine sends
    assert dry.intra_node_bytes + sent == per_step["all_reduce"]


CASES = (
    steps_without_compression_add_up,
    exchange_covers_ddp_wait,
    compressed_steps_add_up,
    probe_is_equal_on_all_workers,
    diagnosis_has_no_side_effects,
    compressed_diagnosis_has_no_side_effects,
    diagnosis_is_consistent,
    diagnosis_knows_the_settings_of_the_hook,
    errors_reach_all_workers,
)


@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, 2) for case in CASES), (probe_of_two_machines, 4)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_in_real_processes(case: Callable[[int, int], None], size: int) -> None:
    in_processes(case, size)


def test_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with diagnose(model, steps=3) as found:
        train(model, optimizer, 8, 0)
    assert (found.workers, found.ceiling, found.link) == (1, 1.0, None)
    assert [c.kind for c in found.options] == ["low rank"]
    assert found.error == pytest.approx(0)
    assert "exchange:  none, one process" in capsys.readouterr().out
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])  # it did train


@pytest.mark.parametrize(("rate", "steps"), [(1e-3, 7), (1e-5, 7), (0.0, 7), (1e-3, 2), (1e-3, 1)])
def test_share_of_changed_bf16_weights(rate: float, steps: int) -> None:
    model = build().requires_grad_(True)
    model[0].requires_grad_(False)  # does not count
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0)
    after = []
    with diagnose(model, optimizer, steps=4, show=False) as found:
        for step in range(steps):
            model(torch.full((8, 64), 1.0 + step)).square().mean().backward()
            optimizer.step()
            weights = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
            after.append(torch.cat(weights).bfloat16())

    def share(first: int, last: int) -> float:
        return (after[first].view(torch.int16) != after[last].view(torch.int16)).double().mean().item()

    # `steps=4` after three warm-up steps: seven in all
    expected = {1: share(0, 1), 5: share(1, 6)} if steps == 7 else {1: share(0, 1)} if steps == 2 else {}
    assert found.changed == pytest.approx(expected)
    assert ("changed:" in str(found)) == bool(expected)


def test_invalid_settings() -> None:
    with pytest.raises(ValueError, match="steps=0"), diagnose(build(), steps=0):
        pass
    with pytest.raises(ValueError, match="needs at least 2 processes"):
        probe()
