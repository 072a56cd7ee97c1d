"""An error or ctrl-C at any line of a change leaves the old model and optimizer, or the complete new ones."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import pufferfish as pf
from processes import in_processes

SOURCE = str(Path(pf.__file__).parent)

Line = tuple[str, int]


class Interruption(BaseException):
    """Like ctrl-C, not an Exception."""


class Lines:
    """Calls `at` before every line of the package that is executed inside the block."""

    def __init__(self, at: Callable[[Line], None]) -> None:
        self.at = at

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(SOURCE):
            return None
        if event == "line":
            self.at((file, frame.f_lineno))
        return self._trace


def interrupted(work: Callable[[Case], object], case: Case, where: Line, occurrence: int) -> bool:
    """Raise before the given execution of a line; return whether that was reached."""
    left = occurrence

    def at(line: Line) -> None:
        nonlocal left
        if line == where:
            left -= 1
            if left == 0:
                raise Interruption

    try:
        with Lines(at):
            work(case)
    except Interruption:
        return True
    return False


class Case:
    """A model that has been trained for a step, its optimizer, its average and a switch."""

    def __init__(self, low_rank: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.Conv2d(2, 8, 2), nn.Flatten())
        )
        self.plan = pf.plan(self.model, 2)
        if low_rank:
            pf.factorize_(self.model, self.plan)
        self.optimizer = torch.optim.AdamW(
            [{"params": self.model[0].parameters()}, {"params": self.model[1:].parameters()}]
        )
        self.model[0](torch.randn(4, 8)).square().sum().backward()
        self.model[2](torch.randn(4, 2, 3, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average = AveragedModel(self.model)
        self.switch = pf.Switch(plan=self.plan, when=pf.AtEpoch(0), back=pf.AtEpoch(1))

    def step(self, model: nn.Module, epoch: int = 0) -> bool:
        return self.switch.step(model, self.optimizer, epoch=epoch, also=[self.average])

    def bits(self) -> dict[str, Any]:
        """All that training depends on."""
        groups = self.optimizer.param_groups
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {
            "types": [type(m).__name__ for m in (*self.model.modules(), *self.average.modules())],
            "tensors": [x.tolist() for m in (self.model, self.average) for x in m.state_dict().values()],
            "groups": [[names[id(p)] for p in group["params"]] for group in groups],
            "state": {
                names[id(p)]: {key: x.tolist() for key, x in state.items()}
                for p, state in self.optimizer.state.items()
            },
        }


CHANGES: dict[str, tuple[bool, Callable[[Case], object]]] = {
    "switch": (False, lambda case: case.step(case.model)),
    "factorize_": (False, lambda case: pf.factorize_(case.model, case.plan, case.optimizer)),
    "merge_": (True, lambda case: pf.merge_(case.model, case.optimizer)),
}


#: Given a case and its workers, returns the call that changes it.
Prepare = Callable[..., Callable[[], object]]


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", CHANGES)
def test_at_every_line(change: str, stride: int) -> None:
    low_rank, work = CHANGES[change]
    case, old = Case(low_rank), Case(low_rank).bits()
    executed: dict[Line, int] = {}
    with Lines(lambda line: executed.update({line: executed.get(line, 0) + 1})):
        work(case)
    new = case.bits()
    assert old != new
    outcomes = {"old": 0, "new": 0}
    for line, count in list(executed.items())[::stride]:
        for occurrence in {1, count}:
            case = Case(low_rank)
            if not interrupted(work, case, line, occurrence):
                continue  # caches are filled now
            bits = case.bits()
            assert bits in (old, new), line
            outcomes["old" if bits == old else "new"] += 1
            if change == "switch":  # the same call goes on
                assert case.step(case.model) == (bits == old)
            elif bits == old:
                work(case)
            assert case.bits() == new, line
    assert outcomes["old"] > 50 / stride


def switch_under_ddp(case: Case, group: dist.ProcessGroup | None = None) -> Callable[[], object]:
    ddp = DistributedDataParallel(case.model, find_unused_parameters=True, process_group=group)
    return lambda: case.step(ddp)


def factorize_by_hand(case: Case, group: dist.ProcessGroup | None = None) -> Callable[[], object]:
    return lambda: pf.factorize_(case.model, case.plan, case.optimizer, group=group or dist.group.WORLD)


#: Changes that two workers make together. `merge_` is made by each worker alone.
TOGETHER = [switch_under_ddp, factorize_by_hand]


@pytest.mark.parametrize("change", TOGETHER)
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_worker_that_fails_before_the_agreement_stops_all(change: Prepare, share: float) -> None:
    in_processes(fails_before_the_agreement, 2, change, share, limit=60)


def fails_before_the_agreement(rank: int, size: int, change: Prepare, share: float) -> None:
    case = Case(False)
    old, work = case.bits(), change(case)
    lines = [line for line, agreed in lines_with_agreement(change) if not agreed]
    failing = lines[int(share * len(lines))]

    def fail(at: Line) -> None:
        if at == failing and rank == 0:
            raise Interruption

    try:
        with Lines(fail):
            work()
    except (Interruption, RuntimeError):
        assert case.bits() == old
        os._exit(0)  # as an interrupted worker ends: without a word to the other
    raise AssertionError("the model was changed")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("change", TOGETHER)
@pytest.mark.parametrize("share", range(4))
def test_at_every_line_before_the_agreement(change: Prepare, share: int, tmp_path: Path) -> None:
    in_processes(fails_at_every_line_before_the_agreement, 2, change, share, str(tmp_path), limit=1700)


def fails_at_every_line_before_the_agreement(
    rank: int, size: int, change: Prepare, share: int, folder: str
) -> None:
    """The first worker fails; the other one waits for it, not longer than the time-out."""
    lines = [[line for line, agreed in lines_with_agreement(change) if not agreed]]
    dist.broadcast_object_list(lines)
    case = Case(False)
    old, _, new = case.bits(), change(case)(), case.bits()
    failures: list[bool] = []
    for failing in lines[0][share::4]:
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{folder}/{len(failures)}", rank=rank, world_size=size)
        case = Case(False)
        work = change(case, dist.new_group(timeout=timedelta(seconds=1)))

        def fail(at: Line, failing: Line = failing) -> None:
            if at == failing and rank == 0:
                raise Interruption

        try:
            with Lines(fail):
                work()
            failures.append(False)  # caches are filled now
        except (Interruption, RuntimeError):
            failures.append(True)
        assert case.bits() == (old if failures[-1] else new), failing
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, failures)
    assert everyone[0] == everyone[1]
    assert sum(failures) > 0.9 * len(failures)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", TOGETHER)
def test_a_signal_after_the_agreement_waits_for_the_end(change: Prepare, stride: int) -> None:
    in_processes(signal_after_the_agreement, 2, change, stride)


def signal_after_the_agreement(rank: int, size: int, change: Prepare, stride: int) -> None:
    case = Case(False)
    _, new = change(case)(), case.bits()
    lines = [line for line, agreed in lines_with_agreement(change) if agreed]
    assert len(lines) > 20
    for line in lines[::stride]:
        case, arrived = Case(False), False
        work = change(case)

        def stop(at: Line, line: Line = line) -> None:
            nonlocal arrived
            if at == line and not arrived:
                arrived = True
                signal.raise_signal(signal.SIGINT)

        if rank == 0:
            with pytest.raises(KeyboardInterrupt), Lines(stop):
                work()
        else:
            work()
        assert case.bits() == new, line
        if change is switch_under_ddp:
            assert not work()
        dist.barrier()


def lines_with_agreement(change: Prepare) -> list[tuple[Line, bool]]:
    """Lines of a change on all workers, with whether they are executed only after the last message between them."""
    order: list[Line | None] = []
    gather = dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = gather(*args, **kwargs)
        order.append(None)
        return result

    work = change(Case(False))
    dist.all_gather = counted
    try:
        with Lines(order.append):
            work()
    finally:
        dist.all_gather = gather
    last = max(i for i, line in enumerate(order) if line is None)
    before = set(order[:last])
    return [(line, line not in before) for line in dict.fromkeys(order) if line is not None]


@pytest.mark.parametrize("work", [work for _, work in CHANGES.values()], ids=list(CHANGES))
def test_not_in_inference_mode(work: Callable[[Case], object]) -> None:
    case = Case(False)
    old = case.bits()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="cannot be trained; call it outside"):
        work(case)
    assert case.bits() == old
