"""`SimulatedLocalSteps`: local steps between several models in one process."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...compression import Simulated
from ...layers.names import trainable_parameters
from ...local.fragments import Anchor, Means, move_engine_states, settings_for, split_by_depth
from ...local.local_steps import all_finite, averaged_buffers, check_model
from .local_method import LocalMethod

_SAVED = ("since", "means", "remaining", "sent_bytes")


@dataclass
class _Fragment:
    """A fragment of all models: its engines, one for each worker, and the average on its way."""

    names: list[str]
    engines: Simulated
    since: int = 0  # number of updates since it was sent
    means: Means | None = None  # on their way
    remaining: int = 0  # number of updates until they are applied
    sent_bytes: float = 0.0  # on the wire, by one worker, in its last average


class SimulatedLocalSteps:
    """`LocalSteps` of `size` workers that compute one after the other in this process, each with a model of its own.

    All workers have the same anchor and outer optimizer, so there is one of each. Methods and state are those of `LocalSteps`,
    with the models of all workers instead of one. Two workers are bit-identical to real ones; with three or more, sums
    may differ in the last bit (see `Simulated`).

    >>> models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    >>> _ = nn.init.zeros_(models[0].weight)
    >>> local = SimulatedLocalSteps(LocalMethod(h=2, lr=1.0, momentum=0.0), size=2)
    >>> local.start(models)
    >>> for step in range(2):
    ...     for value, model in zip((1.0, 3.0), models):
    ...         _ = nn.init.constant_(model.weight, value)
    ...     averaged = local.step(models)
    >>> averaged, models[0].weight.tolist()
    (True, [[2.0, 2.0, 2.0, 2.0]])
    """

    def __init__(self, method: LocalMethod, size: int) -> None:
        self.size, self.schedule, self.settings = size, method.schedule, method.settings
        self.applied_bytes = 0.0  # on the wire, by one worker, of the averages applied so far
        self.lost = 0  # number of averages discarded because they were not finite
        self._make_outer = method.outer
        self._phase = 0
        self._anchor: Anchor | None = None
        self._fragments: list[_Fragment] = []
        self._resumed: Mapping[str, Any] | None = None

    @torch.no_grad()
    def start(self, models: Sequence[nn.Module]) -> None:
        """Set the anchor, and give all models the parameters and buffers of the first, unless state was loaded."""
        first, resumed = models[0], self._resumed
        check_model(first, None)
        params = trainable_parameters(first)
        self.settings.check_patterns(params)
        anchor = Anchor(self._make_outer, params, self.settings, self._anchor)
        device = next(iter(params.values())).device
        if resumed is None:
            for model in models[1:]:
                model.load_state_dict(first.state_dict())
            anchor.fill(params, averaged_buffers(first), device)
        else:
            anchor.fill(resumed["anchor"], resumed["buffers"], device)
            anchor.load_outer_state(resumed["outer"])
        self._make_fragments(first, anchor, resumed["fragments"] if resumed else None)
        self._anchor, self._resumed = anchor, None

    @torch.no_grad()
    def step(self, models: Sequence[nn.Module]) -> bool:
        """Count one update of all models and average what is due; whether an average was applied."""
        if self._resumed is not None:
            self.start(models)
        self._phase = (self._phase + 1) % self.schedule.h
        landing = []
        for fragment in self._fragments:
            fragment.since += 1
            if fragment.means is not None:
                fragment.remaining -= 1
                landing += [fragment] if fragment.remaining == 0 else []
        due = [self._fragments[p] for p in self.schedule.due(self._phase)]
        tensors = [self._tensors(model) for model in models]
        self._send(due, tensors)
        self._land(landing if self.schedule.delay else due, tensors)
        return bool(landing) or bool(due and not self.schedule.delay)

    @torch.no_grad()
    def sync(self, models: Sequence[nn.Module]) -> bool:
        """Average now. Returns False if there was no update since the last average."""
        if self._resumed is not None:
            self.start(models)
        tensors = [self._tensors(model) for model in models]
        flying = [fragment for fragment in self._fragments if fragment.means is not None]
        self._land(flying, tensors)
        changed = [fragment for fragment in self._fragments if fragment.since]
        self._send(changed, tensors)
        self._land(changed, tensors)
        self._phase = 0
        return bool(flying or changed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings, by parameter name."""
        if self._resumed is not None:
            return dict(self._resumed)
        assert self._anchor is not None
        fragments = [
            {"names": f.names, "engines": f.engines.state_dict(), **{key: getattr(f, key) for key in _SAVED}}
            for f in self._fragments
        ]
        return {"phase": self._phase, "lost": self.lost, "fragments": fragments} | self._anchor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; it takes effect at the next `step` or `sync`."""
        self._resumed = copy.deepcopy(dict(state))
        self._phase, self.lost = state["phase"], state["lost"]

    def _make_fragments(
        self, model: nn.Module, anchor: Anchor, saved: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Divide the model. Error feedback goes along with tensors that move to another fragment."""
        shapes = {name: x.shape for name, x in anchor.tensors().items()}
        if saved is not None:
            split = [f["names"] for f in saved]
        else:
            sizes = {
                n: x.numel() for n, x in {**trainable_parameters(model), **averaged_buffers(model)}.items()
            }
            split = split_by_depth(sizes, self.schedule.fragments)
        before, self._fragments = self._fragments, []
        for i, names in enumerate(split):
            engines = Simulated(settings_for(names, self.settings, anchor.buffers), self.size)
            self._fragments.append(_Fragment(list(names), engines))
            if saved is not None:
                engines.load_state_dict(saved[i]["engines"])
                for key in _SAVED:
                    setattr(self._fragments[-1], key, saved[i][key])
            elif before:
                mine = {name: shapes[name] for name in names}
                for worker, engine in enumerate(engines.engines):
                    states = [f.engines.engines[worker].state_dict() for f in before]
                    engine.load_state_dict(move_engine_states(states, mine))

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        assert self._anchor is not None
        buffers = {name: b for name, b in model.named_buffers() if name in self._anchor.buffers}
        return {**trainable_parameters(model), **buffers}

    def _send(self, fragments: Sequence[_Fragment], tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Average fragments of all models. The means are applied by `_land`."""
        assert self._anchor is not None
        for fragment in fragments:
            differences = [self._anchor.differences(fragment.names, own) for own in tensors]
            before = fragment.engines.meter.wire_bytes
            fragment.means = fragment.engines.average(differences)[0]
            fragment.sent_bytes = fragment.engines.meter.wire_bytes - before
            fragment.since, fragment.remaining = 0, self.schedule.delay

    def _land(self, fragments: Sequence[_Fragment], tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Update the anchor by the means of some fragments, and all models by the anchor."""
        assert self._anchor is not None
        lost = False
        for fragment in fragments:
            self.applied_bytes += fragment.sent_bytes
            means, fragment.means = fragment.means, None
            assert means is not None
            if not all_finite(means.values()):
                lost = True
                continue
            self._anchor.step(means)
            mixing = self.schedule.mixing if fragment.since else 0.0
            for own in tensors:
                self._anchor.copy_to(fragment.names, own, mixing)
        if lost:
            self.lost += 1
            warnings.warn(
                "local steps: the model of a worker is not finite; all workers return to the last averaged model",
                RuntimeWarning,
                stacklevel=2,
            )
            for fragment in self._fragments:
                if fragment.means is not None and not all_finite(fragment.means.values()):
                    fragment.means = None
                fragment.since = 0
            for own in tensors:
                self._anchor.copy_to(own, own)
