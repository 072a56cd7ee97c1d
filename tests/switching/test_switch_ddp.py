"""The switch under DDP, in real processes on gloo."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel

import pufferfish as pf
from processes import in_processes, same_everywhere

SAMPLES = 8  # of every step, shared out among the workers


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 48, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(48 * 9, 64), nn.ReLU(), nn.Linear(64, 4),
    )  # fmt: skip


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=1e-3)


def batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (
        torch.randn(SAMPLES, 3, 8, 8, generator=generator),
        torch.randint(4, (SAMPLES,), generator=generator),
    )
    return x.chunk(size)[rank], y.chunk(size)[rank]


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int = 0, size: int = 1
) -> None:
    x, y = batch(step, rank, size)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def ranks_agree(model: nn.Module) -> None:
    """Every rank holds the bits of rank 0."""
    for name, p in model.named_parameters():
        assert same_everywhere(p), name


def check_training(
    make: Callable[[nn.Module], torch.optim.Optimizer], rank: int, size: int, **options: Any
) -> None:
    """Warm-up, switch, low-rank: bit-identical ranks at every step, and what one process computes alone."""
    model, alone = build(), build()
    for net in (model, alone):
        net[1].eval()  # batch statistics of a shard are not those of the batch
    optimizer, other = make(model), make(alone)
    ddp = DDP(model, **options)
    fired = []
    ddp.register_forward_hook(lambda *_: fired.append(1))
    switch = pf.Switch(rank=0.25, when=pf.AtStep(3))
    for step in range(6):
        reducer = ddp.reducer
        if switch.step(ddp, optimizer, step=step):
            assert step == 3
            assert ddp.reducer is not reducer
            pf.factorize_(alone, pf.plan(alone, 0.25), other)
            # Signs and rotations depend on the rank that computed the SVD; go on from the same factors.
            alone.load_state_dict(model.state_dict())
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model[1].eval()
        update(ddp, optimizer, step, rank, size)
        update(alone, other, step)
        ranks_agree(model)
        for (name, p), q in zip(model.named_parameters(), alone.named_parameters(), strict=True):
            assert name == q[0]
            torch.testing.assert_close(p, q[1], rtol=1e-4, atol=1e-5)
    assert len(fired) == 6
    assert switch.report is not None
    assert len(switch.report.plan.ranks) == 2


def trains_with_momentum(rank: int, size: int) -> None:
    check_training(momentum, rank, size)


def trains_with_adamw(rank: int, size: int) -> None:
    check_training(adamw, rank, size, find_unused_parameters=True)


def trains_with_small_buckets(rank: int, size: int) -> None:
    check_training(momentum, rank, size, gradient_as_bucket_view=True, bucket_cap_mb=0.01)


def options_are_kept(rank: int, size: int) -> None:
    ddp = DDP(build(), bucket_cap_mb=3, find_unused_parameters=True, gradient_as_bucket_view=True)
    ddp.eval()
    seen: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP cannot read annotations that are strings
        state.append(1)
        return (
            dist.all_reduce(bucket.buffer() / size, async_op=True).get_future().then(lambda f: f.value()[0])
        )

    ddp.register_comm_hook(seen, hook)
    optimizer = momentum(ddp)
    pf.Switch(rank=0.25, when=pf.AtEpoch(0)).step(ddp, optimizer, epoch=0)
    assert not ddp.training
    assert (ddp.bucket_bytes_cap, ddp.find_unused_parameters, ddp.gradient_as_bucket_view) == (
        3 * 2**20,
        True,
        True,
    )
    update(ddp, optimizer, 0, rank, size)
    assert seen
    ranks_agree(ddp)


def private_copies_of_mixed_precision(rank: int, size: int) -> None:
    """DDP attaches copies in both dtypes to each parameter; those of a factor are its own."""
    ddp = DDP(build(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    pf.Switch(rank=0.25, when=pf.AtEpoch(0)).step(ddp, momentum(ddp), epoch=0)
    for name, p in ddp.named_parameters():
        copies = [x for x in vars(p).values() if isinstance(x, Tensor)]
        assert len(copies) == 2, name
        assert all(x.shape == p.shape for x in copies), name


def buckets_shrink_with_the_model(rank: int, size: int) -> None:
    """So that there are as many of them, and the first leave while the others are computed."""
    ddp = DDP(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)))
    optimizer = momentum(ddp)
    pf.Switch(rank=64, when=pf.AtEpoch(0)).step(ddp, optimizer, epoch=0)
    before, after = 2 * 1024 * 1025, 2 * (2 * 64 * 1024 + 1024)
    assert ddp.bucket_bytes_cap == pytest.approx(25 * 2**20 * after / before, abs=1)
    ddp(torch.ones(2, 1024)).sum().backward()


def dense_weights_are_freed(rank: int, size: int) -> None:
    ddp = DDP(build())
    optimizer = adamw(ddp)
    update(ddp, optimizer, 0, rank, size)
    dense = [
        weakref.ref(m.weight)
        for m in ddp.modules()
        if type(m) in (nn.Conv2d, nn.Linear) and m.weight.numel() > 9000
    ]
    pf.Switch(rank=0.25, keep=["8"], when=pf.AtEpoch(0)).step(ddp, optimizer, epoch=0)
    update(ddp, optimizer, 1, rank, size)
    gc.collect()
    kept = [ref() is not None for ref in dense]
    assert kept == [False] * len(dense), kept


def compiled_both_ways(rank: int, size: int) -> None:
    for wrap in (
        lambda m: torch.compile(DDP(m), backend="aot_eager"),
        lambda m: DDP(torch.compile(m, backend="aot_eager")),
    ):
        model = build()
        wrapped = wrap(model)
        optimizer = momentum(model)
        switch = pf.Switch(rank=0.25, when=pf.AtStep(1))
        for step in range(3):
            assert switch.step(wrapped, optimizer, step=step) == (step == 1)
            update(wrapped, optimizer, step, rank, size)
            ranks_agree(model)
        assert any(isinstance(m, pf.layers.LowRank) for m in wrapped.modules())


def disagreement_is_the_same_error_everywhere(rank: int, size: int) -> None:
    ddp = DDP(build())
    optimizer = momentum(ddp)
    for different in (
        lambda: pf.Switch(rank=0.25, when=pf.AtEpoch(0)).step(ddp, optimizer, epoch=rank),
        lambda: pf.Switch(rank=0.25 if rank else 0.5, when=pf.AtEpoch(0)).step(ddp, optimizer, epoch=0),
    ):
        with pytest.raises(RuntimeError, match=r"ranks \[.*1.*\] differ from rank 0"):
            different()
    assert not any(isinstance(m, pf.layers.LowRank) for m in ddp.modules())
    update(ddp, optimizer, 0, rank, size)  # and the job could go on


def an_error_on_one_worker_is_raised_on_all(rank: int, size: int) -> None:
    ddp = DDP(build())
    optimizer = momentum(ddp)
    if rank == size - 1:
        ddp.module[6].weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=rf"rank {size - 1}: 6: the weight contains inf or NaN"):
        pf.Switch(rank=0.25, when=pf.AtEpoch(0)).step(ddp, optimizer, epoch=0)
    assert not any(isinstance(m, pf.layers.LowRank) for m in ddp.modules())


def a_wrapper_goes_on_after_an_error_at_another_one(rank: int, size: int) -> None:
    """The wrapper inside of an average without gradients cannot be made again; that of the model was already."""
    ddp = DDP(build())
    optimizer, average = momentum(ddp), AveragedModel(ddp)
    average.requires_grad_(False)
    with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed"):
        pf.Switch(rank=0.25, when=pf.AtEpoch(0)).step(ddp, optimizer, epoch=0, also=[average])
    assert not any(isinstance(m, pf.layers.LowRank) for m in ddp.modules())
    update(ddp, optimizer, 0, rank, size)
    ranks_agree(ddp)


def svds_are_shared_out(rank: int, size: int) -> None:
    """Of four equal layers each worker decomposes as many."""
    ddp = DDP(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    sizes: list[torch.Size] = []
    eigh = torch.linalg.eigh

    def counted(matrix: Tensor, **options: Any) -> Any:
        sizes.append(matrix.shape)
        return eigh(matrix, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", counted)
        assert pf.Switch(rank=8, when=pf.AtEpoch(0)).step(ddp, momentum(ddp), epoch=0)
    assert len(sizes) == 4 / size


def an_argument_that_ddp_does_not_keep(rank: int, size: int) -> None:
    model = build()
    late = model.get_parameter("8.weight")
    ddp = DDP(model, delay_all_reduce_named_params=[("8.weight", late)], param_to_hook_all_reduce=late)
    with pytest.raises(ValueError, match="does not store its argument delay_all_reduce_named_params"):
        pf.Switch(rank=0.25, when=pf.AtEpoch(1)).step(ddp, momentum(ddp), epoch=0)


def rank_zero_decides(rank: int, size: int) -> None:
    """A moment that only rank 0 sees is the moment for all."""

    class Moment:  # an object lies elsewhere in every process
        def __call__(self, at: pf.switching.moments.Position) -> bool:
            return rank == 0 and at.epoch == 2

    ddp, switch = DDP(build()), pf.Switch(rank=0.25, when=Moment())
    assert [switch.step(ddp, momentum(ddp), epoch=e) for e in range(4)] == [False, False, True, False]


def automatic(rank: int, size: int) -> None:
    """Spectra are shared out; every rank sees the same history and switches alike."""
    model = build()
    ddp, optimizer = DDP(model), momentum(model)
    start = {name: s.tolist() for name, s in pf.planning.spectra(model).items()}
    switch = pf.Switch(when=pf.RanksSettle(span=2, tolerance=100.0))
    moments = []
    for step in range(6):
        if switch.step(ddp, optimizer, step=step, total=100):
            moments.append(step)
        update(ddp, optimizer, step, rank, size)
        ranks_agree(model)
    assert moments == [2]
    assert switch.initial is not None
    for name, values in start.items():
        assert switch.initial[name] == pytest.approx(values)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (switch.history, switch.initial))
    assert all(x == everyone[0] for x in everyone)


def averages_losses_rates_and_the_way_back(rank: int, size: int) -> None:
    model = build()
    ddp, optimizer = DDP(model), adamw(model)
    ema, around = AveragedModel(model), AveragedModel(ddp)
    x, y = batch(99, rank, size)
    switch = pf.Switch(
        rank=0.25, when=pf.AtStep(2), back=pf.AtStep(4), lr=0.5,
        evaluate=lambda m: nn.functional.cross_entropy(m(x), y),
    )  # fmt: skip
    for step in range(6):
        assert switch.step(ddp, optimizer, step=step, also=[ema, around]) == (step in (2, 4))
        assert switch.low_rank == (step in (2, 3))
        update(ddp, optimizer, step, rank, size)
        for average in (ema, around):
            average.update_parameters(model if average is ema else ddp)
            ranks_agree(average)
        ranks_agree(model)
    assert switch.report is not None
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (switch.report.loss, switch.report.plan.hash))
    assert all(x == everyone[0] for x in everyone)  # rank 0's, though every rank has another batch
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in build().named_parameters()]


def the_times_of_worker_0_count(rank: int, size: int) -> None:
    """Workers that measured layers may keep different ones dense."""
    ddp = DDP(build())
    plan = pf.plan(ddp.module, 0.25)
    plan = plan.replace(dataclasses.replace(e, ms=(2.0, 1.0)) if e.rank else e for e in plan)
    plan = plan.replace(e.keep_dense("slower") if rank and e.name == "6" else e for e in plan)
    assert pf.Switch(plan, when=pf.AtEpoch(0)).step(ddp, momentum(ddp), epoch=0)
    assert isinstance(ddp.module[6], pf.layers.LowRankLinear)
    ranks_agree(ddp)


def accumulation_and_mixed_precision(rank: int, size: int) -> None:
    for make in (momentum, adamw):
        model = build()
        ddp, optimizer = DDP(model), make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        switch = pf.Switch(rank=0.25, when=pf.AtStep(2))
        for step in range(4):
            switch.step(ddp, optimizer, step=step)
            for part in range(2):
                with contextlib.nullcontext() if part else ddp.no_sync():
                    x, y = batch(2 * step + part, rank, size)
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = nn.functional.cross_entropy(ddp(x).float(), y)
                    scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            ranks_agree(model)
        assert switch.report is not None


class Collectives:
    """Counts the collectives that this process calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("all_gather", "all_reduce", "broadcast"):
            monkeypatch.setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return collective(*args, **kwargs)

        return call

    def during(self, work: Callable[[], Any]) -> int:
        before = len(self.calls)
        work()
        return len(self.calls) - before


def only_the_first_call_and_the_due_ones_communicate(rank: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counts = Collectives(patch)
        for when, back in (
            (pf.AtEpoch(3), pf.AtEpoch(6)),
            (pf.AtStep(3), pf.AtStep(6)),
            (pf.AtFraction(0.3), pf.AtFraction(0.6)),
            (pf.RanksSettle(every=100, latest=pf.AtFraction(0.3)), pf.AtFraction(0.6)),
        ):
            ddp = DDP(build())
            optimizer = momentum(ddp)
            switch = pf.Switch(rank=0.25, when=when, back=back)

            def call(now: int, model: nn.Module, switch: Any = switch, optimizer: Any = optimizer) -> bool:
                changed: bool = switch.step(model, optimizer, epoch=now, step=now, total=10)
                return changed

            calls = [counts.during(lambda now=now, ddp=ddp: call(now, ddp)) for now in range(10)]
            assert [now for now, n in enumerate(calls) if n] == [0, 3, 6], when
            assert switch.merged is not None
        # A call that is not due does not even look at the model.
        switch = pf.Switch(rank=0.25, when=pf.AtEpoch(3))
        assert not switch.step(ddp, optimizer, epoch=0)
        assert not switch.step(None, optimizer, epoch=1)  # type: ignore[arg-type]
        assert not switch.due(None, epoch=2)  # type: ignore[arg-type]
        # A function may depend on anything, so all workers ask rank 0.
        switch = pf.Switch(rank=0.25, when=lambda at: False)
        assert all(counts.during(lambda e=e: switch.step(ddp, optimizer, epoch=e)) for e in range(3))


def the_module_of_a_wrapper_is_refused_at_the_first_call(rank: int, size: int) -> None:
    ddp = DDP(build(), find_unused_parameters=True)  # without it, torch raises an error after the switch
    optimizer, switch = momentum(ddp), pf.Switch(rank=8, when=pf.AtStep(2))
    with pytest.raises(
        ValueError, match=r"0\.weight: the model is wrapped in Dist.*; pass the wrapper, not its"
    ):
        switch.step(ddp.module, optimizer, step=0)
    for step in range(4):
        switch.step(ddp, optimizer, step=step)
        update(ddp, optimizer, step, rank, size)
    assert all(map(same_everywhere, ddp.parameters()))


def uneven_inputs(rank: int, size: int) -> None:
    """Inside of `join`, after the switch as before it, a worker without data takes part in the others' collectives."""
    model = DDP(build())
    optimizer = momentum(model)
    switch = pf.Switch(rank=8, when=pf.AtStep(2))
    with model.join():
        for step in range(4 + 2 * rank):
            switch.step(model, optimizer, step=step)
            update(model, optimizer, step, rank, size)
    assert switch.low_rank
    ranks_agree(model)


def flat_spectra() -> nn.Module:
    """With orthogonal weights: which part of them a truncation keeps is arbitrary."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    for layer in (model[0], model[2]):
        nn.init.orthogonal_(layer.weight)
    return model


def drift(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model[0].weight += 1e-6 * rank * torch.randn(64, 64)


def update_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """As loops do that average gradients themselves; under DDP they are averaged already."""
    torch.manual_seed(100 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    for p in model.parameters() if not isinstance(model, DDP) else ():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()


def averaging_by_hand_is_like_ddp(rank: int, size: int) -> None:
    """All go on from the weights of worker 0, whose answer decides, in the same basis."""
    model, ddp = flat_spectra(), DDP(flat_spectra())
    drift(model, rank)
    optimizers = momentum(model), momentum(ddp)
    by_hand, wrapped = (pf.Switch(rank=0.25, when=lambda at: rank == 0, back=pf.AtStep(3)) for _ in "12")
    for step in range(5):
        assert by_hand.due(model, step=step, group=dist.group.WORLD) == (step in (0, 3))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            by_hand.step(model, optimizers[0], step=step, group=dist.group.WORLD)
        differ = [w.filename for w in found if "0.weight differ on worker" in str(w.message)]
        assert differ == [__file__] * (step == 0)
        wrapped.step(ddp, optimizers[1], step=step)
        for net, optimizer in zip((model, ddp), optimizers, strict=True):
            update_by_hand(net, optimizer, step, rank)
            ranks_agree(net)
        for p, q in zip(model.parameters(), ddp.module.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    assert by_hand.merged is not None


def factorized_by_hand(rank: int, size: int) -> None:
    model, alone = flat_spectra(), flat_spectra()
    drift(model, rank)
    optimizer = momentum(model)
    plan = pf.plan(model, pf.StableRank() if rank == 0 else 4)  # of worker 0
    with pytest.warns(UserWarning, match=r"^factorize_: 0\.weight differ on worker"):
        done = pf.factorize_(model, plan, optimizer, group=dist.group.WORLD)
    ranks_agree(model)
    wanted = pf.factorize_(alone, pf.plan(alone, pf.StableRank()))
    assert done.ranks == wanted.ranks
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    update_by_hand(model, optimizer, 0, rank)
    other = nn.Sequential(nn.Linear(64, 64 + rank))
    with pytest.raises(RuntimeError, match=r"factorize_: ranks \[.*1.*\] differ from rank 0 in model"):
        pf.factorize_(other, pf.plan(other, 4), group=dist.group.WORLD)


def a_failure_on_one_worker_factorizes_none(rank: int, size: int) -> None:
    model = flat_spectra()
    optimizer = momentum(model)
    update_by_hand(model, optimizer, 0, rank)
    if rank == size - 1:
        optimizer.state[model[2].weight]["momentum_buffer"] = torch.ones(3)
    with pytest.raises(RuntimeError, match="is invalid for input of size 3"):
        pf.factorize_(model, pf.plan(model, 4), optimizer, group=dist.group.WORLD)
    assert not any(isinstance(m, pf.layers.LowRank) for m in model.modules())
    optimizer.state.clear()
    pf.factorize_(model, pf.plan(model, 4), optimizer, group=dist.group.WORLD)
    ranks_agree(model)


def a_group_that_is_missing_or_wrong(rank: int, size: int) -> None:
    """The first call says so, once; a worker that uses a model alone does not wait for others."""
    model = flat_spectra()
    if rank == 0:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            switch = pf.Switch(rank=8, when=pf.AtStep(1))
            assert [switch.step(model, momentum(model), step=step) for step in range(3)] == [
                False,
                True,
                False,
            ]
        named = [w.filename for w in found if "group=dist.group.WORLD" in str(w.message)]
        assert named == [__file__]
    ddp, first = DDP(build()), dist.new_group([0])
    with pytest.raises(ValueError, match=r"switch\.step: group= is for models without a wrapper"):
        pf.Switch(rank=8).step(ddp, momentum(ddp), epoch=0, group=dist.group.WORLD)
    if rank > 0:
        with pytest.raises(ValueError, match=r"switch\.step: this worker is not in the group"):
            pf.Switch(rank=8).step(model, momentum(model), epoch=0, group=first)


#: With 2 workers, and in the long run with 4. Spectra and SVDs are shared out unequally only among 4.
CASES = [
    trains_with_momentum,
    trains_with_adamw,
    trains_with_small_buckets,
    options_are_kept,
    private_copies_of_mixed_precision,
    buckets_shrink_with_the_model,
    dense_weights_are_freed,
    disagreement_is_the_same_error_everywhere,
    an_error_on_one_worker_is_raised_on_all,
    a_wrapper_goes_on_after_an_error_at_another_one,
    svds_are_shared_out,
    an_argument_that_ddp_does_not_keep,
    rank_zero_decides,
    automatic,
    averages_losses_rates_and_the_way_back,
    the_times_of_worker_0_count,
    accumulation_and_mixed_precision,
    only_the_first_call_and_the_due_ones_communicate,
    the_module_of_a_wrapper_is_refused_at_the_first_call,
    uneven_inputs,
    averaging_by_hand_is_like_ddp,
    factorized_by_hand,
    a_failure_on_one_worker_factorizes_none,
    a_group_that_is_missing_or_wrong,
]
#: Cases in which 4 workers show more: averages of more than two terms, more owners of SVDs than layers.
FOUR = [trains_with_momentum, automatic]


@pytest.mark.timeout(240)  # the hang guard
@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, 2) for case in [*CASES, compiled_both_ways]),
        *((case, 4) for case in FOUR),
        *(pytest.param(case, 4, marks=pytest.mark.slow) for case in CASES if case not in FOUR),
    ],
)
def test_in_real_processes(case: Callable[[int, int], None], size: int) -> None:
    in_processes(case, size)
