"""The change that a run's choice makes: none, low rank by a `Switch`, or a rival's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...layers.names import unwrap
from ...measure import RunLog
from ...switching.job import Job
from ...switching.switch import Switch
from ..rivals.model_change import Change
from ..rivals.rival_by_name import is_rival, make
from .layer_records import after, layers
from .parts import Parts


class LowRank(Change):
    """Low rank, when and how a `Switch` says."""

    def __init__(self, parts: Parts, switch: Switch, an_epoch: int) -> None:
        super().__init__(parts.model, epochs=parts.given.recipe.epochs, an_epoch=an_epoch)
        self.switch, self.optimizer = switch, parts.optimizer
        self._before: dict[str, Tensor] = {}  # singular values

    @property
    def kept(self) -> dict[str, Any]:
        return {"switch": self.switch}

    @property
    def report(self) -> str:
        return str(self.switch.report or "It never became low-rank").splitlines()[0]

    def begin_epoch(self, epoch: int) -> bool:
        if not self.switch.due(self.model, epoch=epoch, total=self.epochs):
            return False
        with self.aside():
            self._before = Job(self.model).spectra()
        return self.switch.step(self.model, self.optimizer, epoch=epoch, total=self.epochs)

    def changed(self, log: RunLog) -> None:
        assert self.switch.report is not None
        log.describe(layers=layers(self.switch.report.plan, self._before))

    def results(self, log: RunLog) -> dict[str, Any]:
        if log.writes and self.switch.report is not None:
            log.describe(layers=after(log.data["layers"], self.switch.report.plan, unwrap(self.model)))
        return super().results(log)


def change(parts: Parts, an_epoch: int) -> Change:
    """What becomes of the model in a run of these parts; refuses a model that it cannot become of."""
    chosen, recipe = parts.given.choice, parts.given.recipe
    if is_rival(chosen.model):
        return make(chosen.model, parts.model, parts.optimizer, epochs=recipe.epochs, an_epoch=an_epoch)
    switch = chosen.switch(recipe, parts.task.keep)
    if switch is not None:
        return LowRank(parts, switch, an_epoch)
    return Change(parts.model, epochs=recipe.epochs, an_epoch=an_epoch)
