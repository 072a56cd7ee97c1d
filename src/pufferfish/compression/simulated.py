"""`Simulated`: several workers in one process, for tests and experiments without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .engine import Engine
from .exchange import Meter, Started, Transport, no_wait
from .settings import Settings


class Simulated:
    """`workers` engines that are advanced together, on one device: the results of real workers, without a network.

    With three or more workers the last bit of a sum depends on the order of its terms, which every backend chooses for
    itself: methods that sum agree with real workers up to rounding, the others bit for bit.

    >>> from pufferfish.compression import TopK
    >>> two = Simulated(Settings(TopK(k=1), smallest=0), workers=2)
    >>> two.average([{"w": torch.tensor([4.0, 1.0])}, {"w": torch.tensor([0.0, 2.0])}])[0]
    {'w': tensor([2., 1.])}
    >>> two.meter.messages, two.meter.collective_bytes["all_gather"]
    (2, 8)
    """

    def __init__(self, settings: Settings, workers: int) -> None:
        self._workers = simulated_transports(workers)
        self.engines = [Engine(settings, worker) for worker in self._workers]

    @property
    def meter(self) -> Meter:
        """Bytes and times of worker 0."""
        return self.engines[0].meter

    def use(self, settings: Settings) -> None:
        """See `Engine.use`."""
        for engine in self.engines:
            engine.use(settings)

    def average(
        self,
        gradients: Sequence[Mapping[str, Tensor]],
        units: Mapping[str, float] | None = None,
        scale: float = 1.0,
    ) -> list[dict[str, Tensor]]:
        """`Engine.average` for all workers: one mapping of gradients, and one of means, for each."""
        means = [{name: torch.empty_like(g) for name, g in own.items()} for own in gradients]
        if any(g.numel() for g in gradients[0].values()):
            self._workers[0].mail.clear()
            for worker, engine, own in zip(self._workers, self.engines, gradients, strict=True):
                worker.posted = 0
                engine.arrange(own)
            steps = [engine.begin(units, scale) for engine in self.engines]
            for step, own in zip(steps, gradients, strict=True):
                step.add(own)
            while max([step.advance() for step in steps]):  # all of them, in every round
                pass
            for step, mean in zip(steps, means, strict=True):
                step.finish(mean)
                step.commit()
        return means

    def state_dict(self) -> dict[str, Any]:
        """The engines' states."""
        return {"workers": [engine.state_dict() for engine in self.engines]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. With another number of workers, error feedback starts empty."""
        saved = state["workers"]
        for worker, engine in enumerate(self.engines):
            engine.load_state_dict(saved[worker % len(saved)])


def simulated_transports(size: int) -> list[SimulatedTransport]:
    """Connected transports of `size` workers in one process. None may wait before all have sent."""
    mail: dict[int, _Collective] = {}
    return [SimulatedTransport(mail, worker, size) for worker in range(size)]


@dataclass
class _Collective:
    """The buffers of one collective, by worker."""

    buffers: dict[int, Any] = field(default_factory=dict)
    summed: bool = False


class SimulatedTransport(Transport):
    """One worker's end: its n-th collective meets the n-th of all others."""

    def __init__(self, mail: dict[int, _Collective], worker: int, size: int) -> None:
        super().__init__()
        self.mail, self.worker, self.size = mail, worker, size
        self.posted = 0  # collectives in this step

    def _post(self, data: Any) -> _Collective:
        collective = self.mail.setdefault(self.posted, _Collective())
        collective.buffers[self.worker] = data
        self.posted += 1
        return collective

    def _all(self, collective: _Collective) -> list[Any]:
        assert len(collective.buffers) == self.size, (
            "a simulated worker did not send its part of a collective"
        )
        return [collective.buffers[worker] for worker in range(self.size)]

    def _sum(self, buffer: Tensor) -> Started[Tensor]:
        collective = self._post(buffer)

        def done() -> None:
            if not collective.summed:
                total, *others = self._all(collective)
                for x in others:
                    total += x
                for x in others:
                    x.copy_(total)
                collective.summed = True

        return done, buffer

    def _gather(self, buffer: Tensor) -> Started[list[Tensor]]:
        collective = self._post(buffer)
        everyone: list[Tensor] = []

        def done() -> None:
            everyone.extend(self._all(collective))
            assert len({x.numel() for x in everyone}) == 1, "workers gather messages of different sizes"

        return done, everyone

    def _scatter(self, pieces: list[Tensor]) -> Started[list[Tensor]]:
        collective = self._post(pieces)
        received: list[Tensor] = []

        def done() -> None:
            received.extend(theirs[self.worker] for theirs in self._all(collective))
            assert len({x.numel() for x in received}) == 1, "an owner is sent pieces of different sizes"

        return done, received


class OneWorker(Transport):
    """Worker 0 of `size`, without the others: the bytes and the work of a real worker. All send what it sends.

    Sums stay as they are: their values do not matter here, and computing them would take time. On a GPU each message
    waits for the device, so that the meter's times are those of the work.

    >>> OneWorker(8).size
    8
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.worker, self.size = 0, size
        self.messages: list[tuple[str, int]] = []  # collective and bytes, in the order of sending

    def _sum(self, buffer: Tensor) -> Started[Tensor]:
        self._note("all_reduce", buffer)
        return no_wait, buffer

    def _gather(self, buffer: Tensor) -> Started[list[Tensor]]:
        self._note("all_gather", buffer)
        return no_wait, [buffer] * self.size

    def _scatter(self, pieces: list[Tensor]) -> Started[list[Tensor]]:
        self._note("all_to_all", *pieces)
        return no_wait, [pieces[0]] * self.size

    def _note(self, kind: str, *tensors: Tensor) -> None:
        self.messages.append((kind, sum(x.nbytes for x in tensors)))
        torch.get_device_module(tensors[0].device).synchronize()
