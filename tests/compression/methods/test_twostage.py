"""TwoStage: exchange="all_gather" against a plain mean, sizes of shards, and collectives of all methods."""

import pytest
import torch
from torch import Tensor

from driver import State, drive, normal
from pufferfish.compression import (
    DGC,
    QSGD,
    AlternatingPowerSGD,
    Atomo,
    BlockFP8,
    BlockInt8,
    BlockRandomK,
    EFSignSGD,
    Int2,
    Int4,
    LoCo,
    Method,
    NoCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    Settings,
    SignSGD,
    Signum,
    Simulated,
    SparseLoCo,
    StepContext,
    Sum,
    TernGrad,
    Threshold,
    TopK,
)
from pufferfish.compression.check_compressor import gradients
from pufferfish.compression.methods.twostage import even

WITH_ERROR_FEEDBACK = [EFSignSGD(), BlockInt8(block=8), BlockFP8(block=8)]


@pytest.mark.parametrize("method", WITH_ERROR_FEEDBACK, ids=repr)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_message_to_all_workers_loses_nothing(method: Method, workers: int) -> None:
    """A worker sends x − rest; all workers apply the mean of what was sent."""
    states: list[State] = [{} for _ in range(workers)]
    for step in range(2):
        xs = normal(2, 27, workers=workers, seed=step)
        mean, rests, meter = drive(method, xs, states, step, exchange="all_gather")
        sent = [x - rest for x, rest in zip(xs, rests, strict=True)]
        torch.testing.assert_close(mean, sum(sent) / workers)
        for x, own in zip(xs, sent, strict=True):
            alone = drive(method, [x], exchange="all_gather").mean
            torch.testing.assert_close(own, alone)
            assert (x - own).norm() < x.norm()
        assert not any(states), "owners have no error feedback"
        assert meter.messages == 1
    signs, blocks = 2 * (4 + 4), 2 * (28 + 4 * 4)  # 27 elements in 4 bytes of bits, or in 4 blocks of 7
    assert meter.collective_bytes["all_gather"] == (signs if isinstance(method, EFSignSGD) else blocks)
    assert sum(meter.collective_bytes.values()) == meter.collective_bytes["all_gather"]


@pytest.mark.parametrize("method", [SignSGD(), Signum(momentum=0.0)], ids=repr)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_worker_counts_the_votes(method: Method, workers: int) -> None:
    states: list[State] = [{} for _ in range(workers)]
    for step in range(3):
        torch.manual_seed(step)
        xs = [torch.randint(-1, 2, (2, 21)).float() for _ in range(workers)]
        even = 1.0 if step % 2 == 0 else -1.0
        votes = sum(torch.where(x == 0, even, x) for x in xs)
        mean, _, meter = drive(method, xs, states, step, exchange="all_gather")
        assert torch.equal(mean, torch.where(votes == 0, even, votes.sign()))
        two = drive(method, xs, step=step).mean  # through owners it is the same
        assert torch.equal(mean, two)
    assert meter.collective_bytes["all_gather"] == 2 * 3
    assert sum(meter.collective_bytes.values()) == meter.collective_bytes["all_gather"]


def test_levels_are_rounded_once() -> None:
    """Right on average, with the noise of one rounding, and the mean is one of single workers' values."""
    b, workers = 4000, 2
    xs = [x.expand(b, 16) for x in normal(1, 16, workers=workers)]
    mean, _, meter = drive(QSGD(levels=3), xs, exchange="all_gather")
    target = (xs[0] + xs[1]) / 2
    assert ((mean - target).mean(0).abs() < 5 * mean.std(0) / b**0.5).all()
    grid = torch.arange(-3, 4)
    values = ((xs[0][0].norm() * grid[:, None] + xs[1][0].norm() * grid) / 3 / workers).flatten()
    assert ((mean[:100, :, None] - values).abs().amin(-1) < 1e-5).all()
    assert meter.collective_bytes["all_gather"] == b * (16 * 3 // 8 + 4)
    assert mean.var(0).sum() < drive(QSGD(levels=3), xs).mean.var(0).sum()


@pytest.mark.parametrize(
    "method", [QSGD(bucket=64), EFSignSGD(), SignSGD(), BlockInt8(block=5), Int4(), Int2()], ids=repr
)
def test_in_an_engine(method: Method) -> None:
    """Conserved, the same on all workers, and resumed."""
    whole, resumed = (Simulated(Settings(method, smallest=0, exchange="all_gather"), 3) for _ in range(2))
    balance = torch.zeros(24, 36)
    for step in range(4):
        given = gradients(3, step)
        if step == 2:
            resumed.load_state_dict(whole.state_dict())
        means = whole.average(given)
        assert all(torch.equal(mean["a.weight"], means[0]["a.weight"]) for mean in means)
        if step >= 2:
            assert torch.equal(resumed.average(given)[1]["a.weight"], means[0]["a.weight"])
        balance += sum(g["a.weight"] for g in given) / 3 - means[0]["a.weight"]
    if method.kind == "contraction":
        errors = [worker["own"]["a.weight"]["error"] for worker in whole.state_dict()["workers"]]
        torch.testing.assert_close(sum(errors) / 3, balance, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("d", [1, 8, 100, 513, 1500, 4096])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_levels_need_little_padding(d: int, workers: int) -> None:
    """One norm for at most 512 elements; bytes are not rounded up to 512."""
    xs = normal(1, d, workers=workers)
    mean, _, meter = drive(QSGD(levels=7), xs)
    assert mean.shape == (1, d)
    each = -(-d // workers)
    norms = -(-each // 512)
    assert (each / 2 + 4 * norms) <= meter.collective_bytes["all_gather"] <= each / 2 + 4 * norms + 4 * norms
    assert meter.collective_bytes["all_to_all"] == workers * meter.collective_bytes["all_gather"]


def test_even_blocks_hold_all_and_no_more_than_most() -> None:
    for n in range(1, 200):
        for most, multiple in [(8, 8), (24, 8), (5, 1), (1, 1), (64, 8)]:
            many, size = even(n, most, multiple)
            assert size <= most
            assert size % multiple == 0
            assert n <= many * size < n + many * multiple
            assert even(many * size, most, multiple) == (many, size)


ALL: list[Method] = [
    NoCompression(), PowerSGD(2), AlternatingPowerSGD(2), Atomo(2), TopK(), RandomK(), RandomK(coordinates="own"),
    BlockRandomK(), BlockRandomK(coordinates="own"), Threshold(), DGC(), OneBitSGD(), SignSGD(), Signum(),
    EFSignSGD(), QSGD(), TernGrad(), BlockInt8(), BlockFP8(), Int4(), Int2(), LoCo(),
    SparseLoCo(),
]  # fmt: skip


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_methods_use_the_chosen_collective(method: Method) -> None:
    """An all-to-all is followed by an all-gather; otherwise only the chosen collective is used."""
    assert method.exchanges
    (x, y) = normal(2, 8, 9, workers=2)
    for exchange in method.exchanges:
        shaped = [z if method.matrix else z.flatten(1) for z in (x, y)]
        used = {
            key for key, n in drive(method, shaped, exchange=exchange).meter.collective_bytes.items() if n
        }
        assert used == ({"all_to_all", "all_gather"} if exchange == "all_to_all" else {exchange})


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_state_does_not_share_memory_with_the_step(method: Method) -> None:
    """x, scratch memory and sums are overwritten by the next step."""

    def spoil(x: Tensor) -> None:
        x.fill_(float("nan") if x.is_floating_point() else 1)

    state: State = {}
    for step in range(3):
        (x,) = normal(2, 8, 9, workers=1, seed=step)
        lent = [x]

        def empty(shape: tuple[int, ...], dtype: torch.dtype, lent: list[Tensor] = lent) -> Tensor:
            lent.append(torch.empty(shape, dtype=dtype))
            return lent[-1]

        ctx = StepContext(0, 1, step, ("t0", "t1"), state=dict(state), empty=empty)
        steps = method.compress(x if method.matrix else x.flatten(1), ctx)
        answer = None
        try:
            while True:
                message = steps.send(answer)
                if isinstance(message, Sum):
                    answer = message.tensor.clone()
                    spoil(message.tensor)
                else:
                    answer = [message.tensors if hasattr(message, "tensors") else message.pieces[0]]
        except StopIteration as end:
            mean, rest = end.value
        mean = torch.bmm(*mean) if isinstance(mean, tuple) else mean
        assert mean.isfinite().all()
        assert rest is None or rest.isfinite().all()
        assert rest is None or rest.data_ptr() != mean.data_ptr()
        kept = {key: value.clone() for key, value in ctx.state.items()}
        sums = [] if answer is None or isinstance(answer, list) else [answer]
        for used in (*lent, mean, *sums):
            spoil(used if used.is_contiguous() else used.contiguous())
        for key, value in ctx.state.items():
            assert torch.equal(value, kept[key]), key
        state = ctx.state
