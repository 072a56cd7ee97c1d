"""Workers: agreement, errors and small values, in real processes on gloo and in a single process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from processes import in_processes
from pufferfish.distributed.workers import Workers


def of_all(caller: str = "test") -> Workers:
    return Workers(dist.group.WORLD, torch.device("cpu"), caller)


def errors_are_raised_on_all(rank: int, size: int) -> None:
    def fail_with(error: Exception, ranks: set[int]) -> Callable[[], int]:
        def work() -> int:
            if rank in ranks:
                raise error
            return rank

        return work

    workers = of_all()
    assert workers.run_on_all(fail_with(ValueError("no"), set())) == rank
    last, everyone = {size - 1}, set(range(size))
    for error, ranks, kind, message in (
        (ValueError("layer 3"), last, ValueError, f"^rank {size - 1}: layer 3$"),
        (FileNotFoundError("folder"), {0}, OSError, "^rank 0: folder$"),
        (RuntimeError("hang"), last, RuntimeError, f"^rank {size - 1}: hang$"),
        (KeyError("name"), last, RuntimeError, f"^rank {size - 1}: KeyError: 'name'$"),
        (ValueError(f"folder {rank}"), everyone, ValueError, "^rank 0: folder 0$"),
        (ZeroDivisionError("all"), everyone, ZeroDivisionError, "^all$"),  # the same everywhere: as it was
    ):
        for run in (workers.run_on_all, workers.gather):
            with pytest.raises(kind, match=message):
                run(fail_with(error, ranks))
    with pytest.raises(TypeError, match="JSON"):
        workers.gather(lambda: {rank})


def values_are_exchanged(rank: int, size: int) -> None:
    workers = of_all()
    assert workers.gather(lambda: ["a" * rank, rank]) == [["a" * r, r] for r in range(size)]
    assert workers.run_on_first(lambda: f"from {rank}") == "from 0"
    text = workers.run_on_first(lambda: {"rank": rank, "text": "ö" * (3 - rank)})
    assert text == {"rank": 0, "text": "ööö"}
    assert workers.broadcast_tensor(torch.tensor([rank]), size - 1).item() == size - 1
    for dtype in (torch.bool, torch.int16, torch.uint32, torch.complex64, torch.float8_e4m3fn):
        x = torch.tensor(float(rank)).to(dtype)
        assert workers.broadcast_tensor(x, 1).to(torch.complex64) == 1
    images = torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
    assert workers.broadcast_tensor(images, 1).eq(1).all()
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert workers.max(torch.tensor([rank, -rank])).tolist() == [size - 1, 0]
    assert workers.mean([1.0, rank]) == [1.0, (size - 1) / 2]


def facts_are_compared(rank: int, size: int) -> None:
    workers = of_all("switch")
    assert workers.agree("same", 7 + rank, "anything") == 7
    with pytest.raises(RuntimeError, match=rf"switch: ranks \[{size - 1}\] differ from rank 0 in the epoch"):
        workers.agree(str(rank == size - 1), 0, "the epoch")


def workers_in_different_operations_find_out(rank: int, size: int) -> None:
    """Whatever they call, all raise the same error, and nothing is left over for the next call."""
    workers = of_all()
    calls: list[Callable[[], object]] = [
        lambda: workers.agree("facts", 0, "anything"),
        lambda: workers.run_on_all(lambda: None),
        lambda: workers.gather(lambda: "longer than any header" * 99),
    ]
    for i, call in enumerate(calls):
        for j in range(i + 1, len(calls)):
            workers.operation = "first" if rank == 0 else "second"
            words = r"out of step: worker 0 in first \(.*\); workers? 1.* in second \("
            with pytest.raises(RuntimeError, match=words):
                (call if rank == 0 else calls[j])()
            if {i, j} == {1, 2}:
                continue  # the same round, `gather` with something to say
            workers.operation = "same"
            with pytest.raises(RuntimeError, match=r"worker 0 in same \(.*\); workers? 1.* in same \("):
                (call if rank == 0 else calls[j])()
    workers.operation = "last"
    assert workers.gather(lambda: rank) == list(range(size))


def messages_do_not_meet_those_of_the_training(rank: int, size: int) -> None:
    """gloo ends a process that receives more than it expects. The group beside is made once."""
    workers, groups = of_all(), len(dist.distributed_c10d._world.pg_map)
    for numel in (1, 1000):
        gradient = torch.full((numel,), float(rank))
        training = (
            dist.all_reduce(gradient, async_op=True) if rank == 0 else None
        )  # first here, last elsewhere
        assert workers.mean([rank]) == [(size - 1) / 2]
        assert of_all().gather(lambda: rank) == list(range(size))
        (training or dist.all_reduce(gradient, async_op=True)).wait()
        assert gradient[0] == sum(range(size))
    assert len(dist.distributed_c10d._world.pg_map) == groups + 1


def a_flag_is_seen_by_all_at_the_same_call(rank: int, size: int) -> None:
    workers = Workers.of_job("test", side_group=True)
    answers = [workers.any_async(call == 2 and rank == size - 1) for call in range(5)]
    assert answers == [False, False, False, True, False]


@pytest.mark.timeout(120)  # the hang guard
@pytest.mark.parametrize(
    "case",
    [
        errors_are_raised_on_all,
        values_are_exchanged,
        facts_are_compared,
        workers_in_different_operations_find_out,
        messages_do_not_meet_those_of_the_training,
        a_flag_is_seen_by_all_at_the_same_call,
    ],
)
def test_in_real_processes(case: Callable[[int, int], None]) -> None:
    in_processes(case, 2)


def test_a_single_process_needs_no_process_group() -> None:
    workers = Workers.of_job("test")
    assert (workers.rank, workers.size) == (0, 1)
    with pytest.raises(KeyError, match="as it is"):
        workers.run_on_all(lambda: {}["as it is"])
    assert workers.gather(lambda: (1, 2)) == [(1, 2)]
    assert workers.mean([1.0, 2.0]) == [1.0, 2.0]
    assert workers.any_async(True)
    assert workers.agree("facts", 3, "anything") == 3
