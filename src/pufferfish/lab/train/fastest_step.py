"""`FastestStep`: an update in the fastest mode that works."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..report.formatting import format_seconds
from .graphed_callable import WARM_UP
from .rewind_point import RewindPoint
from .step_modes import StepModes

Step = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]

#: Seconds that compiling a model takes, roughly, and how much longer than that training must still take.
COMPILE_SECONDS, WORTH = 40.0, 10
#: Losses of successive updates that are compared, and eager trials, whose differences show the noise of dropout.
LOSSES, TRIALS = 2, 3


class FastestStep:
    """Calls `in_mode("eager")` a few times, then chooses: the first mode whose updates run and have the eager losses.

    All modes are tried on one batch, and the trials are undone.

    Args:
        modes: the candidates.
        in_mode: builds the update in a mode, a function of a batch's tensors and of carried tensors.
        rewind_point: copies the state that updates change, given the carried tensors.
        loss: of an update's result.
        tolerance: relative difference of losses.
        steps_left: updates that the run will still make.
        tell: gets a line about the choice.

    Attributes:
        mode: the chosen mode; None before the choice.
    """

    def __init__(
        self,
        modes: StepModes,
        in_mode: Callable[[str], Step],
        *,
        rewind_point: Callable[[Sequence[Tensor]], RewindPoint],
        loss: Callable[[Any], Tensor],
        tolerance: float,
        steps_left: Callable[[], int],
        tell: Callable[[str], None],
    ) -> None:
        self.mode: str | None = None
        self._modes, self._in_mode, self._rewind_point, self._loss = modes, in_mode, rewind_point, loss
        self._tolerance, self._steps_left, self._tell = tolerance, steps_left, tell
        self._step, self._calls = in_mode("eager"), 0

    def __call__(self, inputs: Sequence[Tensor], carried: Sequence[Tensor] = ()) -> Any:
        """Return what the update in the current mode returns."""
        # The optimizer has its state after an update; a captured graph needs all tensors to exist.
        if self.mode is None and self._calls == WARM_UP:
            self._choose(inputs, carried)
        self._calls += 1
        return self._step(inputs, carried)

    def _choose(self, inputs: Sequence[Tensor], carried: Sequence[Tensor]) -> None:
        start = self._rewind_point(carried)

        def losses(step: Step) -> list[float]:
            return [float(self._loss(step(inputs, carried))) for _ in range(LOSSES)]

        trials, seconds = [], []
        for _ in range(TRIALS):
            began = time.perf_counter()
            trials.append(losses(self._step))
            seconds.append((time.perf_counter() - began) / LOSSES)
            start.rewind(random=False)
        start.rewind()
        reasons = dict(self._modes.refused)
        left = self._steps_left() * min(seconds)
        if left < WORTH * COMPILE_SECONDS:
            reasons.setdefault(
                "compile", f"the {format_seconds(left)} left are too short for compiling to pay"
            )
        for mode in self._modes.candidates:
            if any(part in reasons for part in mode.split("+")):
                continue
            if mode == "eager":
                break
            step: Step | None = None
            try:
                step = self._in_mode(mode)
                for _ in range(WARM_UP):
                    step(inputs, carried)
                start.rewind()
                self._compare(losses(step), trials)
                self._step = step
                break
            except Exception as error:  # compilers and drivers raise errors of all kinds
                reasons[mode] = _first_line(error)
                step = None
                gc.collect()  # frees the memory of a failed graph
            finally:
                start.rewind()
        self.mode = mode
        self._tell(f"mode: {mode}" + (f" ({_listed(reasons)})" if reasons else ""))

    def _compare(self, losses: list[float], trials: list[list[float]]) -> None:
        """Raise ValueError if losses differ from the eager ones by more than these differ, and the tolerance."""
        for loss, *eager in zip(losses, *trials, strict=True):
            noise = 3 * (max(eager) - min(eager))
            if not math.isclose(loss, eager[0], rel_tol=self._tolerance, abs_tol=noise) and not (
                math.isnan(loss) and math.isnan(eager[0])
            ):
                raise ValueError(f"its loss is {loss:.6g}, but {eager[0]:.6g} in eager mode")


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{mode}: {reason}" for mode, reason in reasons.items())
