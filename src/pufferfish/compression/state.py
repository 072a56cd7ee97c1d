"""`State`: everything that compression keeps from step to step, by parameter name: moved to new batches, rescaled, saved."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim

if TYPE_CHECKING:
    from .engine import Batch

#: Version of the saved format.
FORMAT = 1
#: Key of the error feedback among a parameter's tensors; the others are the method's own.
ERROR = "error"
#: Parameter name → key → tensor.
Named = dict[str, dict[str, Tensor]]
_KEYS = {"format", "steps", "size", "inside", "worker", "units", "scale", "methods", "shared", "own"}


class State:
    """One worker's error feedback and method state. In batches while training, by parameter name in files.

    Args:
        worker: This worker's number, of those that exchange compressed messages.
        size: The number of those.
        inside: Workers of each machine that share one copy of this state.
        local_worker: This worker's number inside its machine.

    >>> State(worker=0, size=2).state_dict()["steps"]
    0
    """

    def __init__(self, worker: int, size: int, inside: int = 1, local_worker: int = 0) -> None:
        self.worker, self.size = worker, size
        self.steps = 0  # finite or not: the random generators advance with them
        self.units: dict[str, float] = {}
        self.scale = 1.0
        self.batches: list[Batch] = []
        self.resumed: dict[str, Any] | None = None  # the loaded state, until the next step
        self._loaded: Named | None = None  # its tensors, until the batches are known
        self._loaded_methods: dict[str, Any] = {}
        self._place = {"size": size * inside, "inside": inside, "worker": worker * inside + local_worker}

    def arrange(self, batches: Sequence[Batch], device: torch.device) -> None:
        """Move all state to other batches. That of other parameters is dropped.

        Error feedback follows its parameter to any method, and what a method has not sent yet is added to it; other state
        follows to the same method only.
        """
        named, methods = self.named(), self.methods()
        self._release_unsent(named, {name: key for b in batches for name, key in _method_keys(b).items()})
        for batch in batches:
            _fill(batch, named, methods, device)
        self.batches, self._loaded = list(batches), None

    def errors(self) -> dict[str, Tensor]:
        """Error feedback by name, with what the methods have not sent yet."""
        named = self.named()
        self._release_unsent(named, dict.fromkeys(named))
        return {name: state[ERROR] for name, state in named.items() if ERROR in state}

    def start_with(self, errors: Mapping[str, Tensor], units: Mapping[str, float]) -> None:
        """Begin with this error feedback, of tensors that had other names or shapes before."""
        self._loaded, self.units = {name: {ERROR: x} for name, x in errors.items()}, dict(units)

    def _release_unsent(self, named: Named, after: Mapping[str, Any]) -> None:
        """Add what a method has not sent yet to the error feedback where another method, in `after`, takes over."""
        for batch in self.batches if self._loaded is None else ():
            for (name, key), shape in zip(_method_keys(batch).items(), batch.shapes, strict=True):
                if name in named and after.get(name, key) != key:
                    unsent = batch.method.unsent(named[name], shape, self.worker, self.size)
                    if unsent is not None:
                        old = named[name].get(ERROR)
                        named[name][ERROR] = unsent if old is None else unsent + old

    def move(self, worker: int, size: int) -> None:
        """Continue as worker `worker` of `size`: workers came or left.

        Error feedback is this worker's own and stays. The errors of a shard that it owned for all become error feedback.
        """
        if (self.worker, self.size) == (worker, size):
            return
        self.release_divided(size)
        self.worker, self.size = worker, size
        self._place |= {"size": size, "worker": worker}
        if self.resumed is not None:
            self.resumed |= self._place

    def release_divided(self, size: int) -> None:
        """Make the errors of a shard that this worker owned for all its error feedback, in a job of `size` workers from now on."""
        before = self.worker, self.size
        for batch in self.batches:
            for key in batch.state.keys() & batch.method.keys("divided"):
                pieces = zip(batch.unstack(batch.state.pop(key)), batch.shapes, strict=True)
                unsent = [batch.method.unsent({key: piece}, shape, *before) for piece, shape in pieces]
                known = [x for x in unsent if x is not None]
                left = batch.stack(known) if known else None
                if left is not None:
                    left *= size / before[1]  # an error of the mean is `size` times that of one gradient
                    batch.error = left if batch.error is None else batch.error + left

    @property
    def has_error(self) -> bool:
        """Whether there is any error feedback."""
        if self._loaded is not None:
            return any(ERROR in state for state in self._loaded.values())
        return any(batch.error is not None for batch in self.batches)

    @property
    def has_tensors(self) -> bool:
        """Whether there is any error feedback or method state."""
        if self._loaded is not None:
            return any(self._loaded.values())
        return any(batch.error is not None or batch.state for batch in self.batches)

    def rescale(self, units: Mapping[str, float], scale: float) -> None:
        """Convert what is kept to new units by parameter name, and to a new loss scale.

        A unit of 0 is unknown, such as that of a learning rate of 0: the last known one counts, at the new loss scale.
        """
        follow = scale / self.scale
        old = {name: self.units.get(name, 0.0) for name in units}
        known = {name: u or old[name] * follow for name, u in units.items()}
        factors = {name: u / old[name] if old[name] else follow for name, u in known.items()}
        for batch in self.batches:
            if follow != 1:
                for key in batch.state.keys() & batch.method.keys("loss scale"):
                    batch.state[key].mul_(follow)
            mine = [factors.get(name, 1.0) for name in batch.names]
            if any(f != 1 for f in mine):
                if batch.error is not None:
                    batch.error = _scaled(batch, batch.error, mine)
                for key in batch.state.keys() & batch.method.keys("units"):
                    batch.state[key] = _scaled(batch, batch.state[key], mine)
        self.units, self.scale = known or self.units, scale

    def named(self) -> Named:
        """All tensors by parameter name."""
        if self._loaded is not None:
            return self._loaded
        found: Named = {}
        for batch in self.batches:
            error = {} if batch.error is None else {ERROR: batch.error}
            for key, tensor in (error | batch.state).items():
                for name, piece in zip(batch.names, batch.unstack(tensor), strict=True):
                    found.setdefault(name, {})[key] = piece
        return found

    def methods(self) -> dict[str, Any]:
        """The method and shape that the state belongs to, by parameter name."""
        if self._loaded is not None:
            return dict(self._loaded_methods)
        return {name: key for batch in self.batches for name, key in _method_keys(batch).items()}

    def check_resumed(self, batches: Sequence[Batch]) -> None:
        """Raise or warn if a loaded state belongs to another model or to other methods."""
        if self.resumed is not None:
            shapes = {n: s for batch in batches for n, s in zip(batch.names, batch.shapes, strict=True)}
            _refuse_other_model(self.resumed, shapes)
            _warn_of_other_method(self.resumed["methods"], batches)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text. Every worker has its own error feedback: save it on all workers."""
        if self.resumed is not None:
            return self.resumed | {"steps": self.steps}
        shared: Named = {}
        own: Named = {}
        keys = {name: batch.policy.keys("shared") for batch in self.batches for name in batch.names}
        for name, state in self.named().items():
            for key, x in state.items():
                place = shared if key in keys[name] else own
                place.setdefault(name, {})[key] = x.clone()
        return {
            "format": FORMAT,
            "steps": self.steps,
            **self._place,
            "units": dict(self.units),
            "scale": self.scale,
            "methods": self.methods(),
            "shared": shared,
            "own": own,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Continue from a saved state. State of another worker, or number of workers, is dropped with a warning.

        `shapes`: of the parameters, by name, where they are known already.
        """
        check_format(state)
        if shapes:
            _refuse_other_model(state, shapes)
        here = self._place
        same_sizes = all(state[key] == here[key] for key in ("size", "inside"))
        own = state["own"] if same_sizes and state["worker"] == here["worker"] else {}
        if state["own"] and not own:
            warnings.warn(
                f"compression: worker {here['worker']} of {_workers(here)} starts with empty error feedback; the saved one "
                f"belongs to worker {state['worker']} of {_workers(state)}",
                stacklevel=3,
            )
        # with a hierarchy one worker of a machine has all of it, and the others nothing
        shared = state["shared"] if same_sizes or state["inside"] == 1 else {}
        self._loaded = {}
        for part in (shared, own):
            for name, tensors in part.items():
                self._loaded.setdefault(name, {}).update({key: x.clone() for key, x in tensors.items()})
        self._loaded_methods = dict(state["methods"])
        self.steps, self.units, self.scale = state["steps"], dict(state["units"]), state["scale"]
        self.resumed = {**state, **here, "shared": shared, "own": own}


def check_format(state: Mapping[str, Any]) -> None:
    """Raise ValueError if `state` is not a state of compression, or one of another format."""
    missing = _KEYS - state.keys()
    if missing:
        raise ValueError(f"not a state of compression: it lacks {', '.join(sorted(missing))}")
    if state["format"] != FORMAT:
        raise ValueError(f"compression state of format {state['format']}; this version reads format {FORMAT}")


def updates_by_rate(optimizer: optim.Optimizer) -> bool:
    """Whether an update is the gradient times the learning rate: in SGD, and its subclasses that keep its `step`.

    Others divide the size of the gradient out (Adam, Muon, signs; LARS, which is often a subclass of SGD), so the rate at
    which a part of it was left over does not matter.

    >>> p = [torch.nn.Parameter(torch.ones(1))]
    >>> updates_by_rate(optim.SGD(p, lr=0.1)), updates_by_rate(optim.Adam(p))
    (True, False)
    """
    # torch wraps `step` in each class at its first use
    steps = [inspect.unwrap(kind.step) for kind in (type(optimizer), optim.SGD)]
    return isinstance(optimizer, optim.SGD) and steps[0] is steps[1]


def _fill(batch: Batch, named: Named, methods: Mapping[str, Any], device: torch.device) -> None:
    """Give a batch its error feedback and state, from that of its parameters."""
    always = {ERROR, *(batch.policy.keys("shared") if batch.policy != batch.method else ())}
    states: list[dict[str, Tensor]] = []
    for (name, key), shape in zip(_method_keys(batch).items(), batch.shapes, strict=True):
        same = methods.get(name) == key
        state = {k: x.to(device) for k, x in named.get(name, {}).items() if same or k in always}
        if ERROR in state and state[ERROR].shape != shape:
            del state[ERROR]
        states.append(state)
    for key in sorted(set().union(*states)):
        stacked = _stacked(batch, key, states)
        if stacked is not None and key == ERROR:
            batch.error = stacked
        elif stacked is not None:
            batch.state[key] = stacked


def _stacked(batch: Batch, key: str, states: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
    """State of one key in the batch's layout, from that of its parameters; None if it does not fit there."""
    known = [(state[key], shape) for state, shape in zip(states, batch.shapes, strict=True) if key in state]
    if all(x.shape == shape for x, shape in known) or key in batch.method.keys("units"):
        x, like = known[0]  # where nothing was kept, it is zero
        each = x.shape == like
        pairs = zip(states, batch.shapes, strict=True)
        return batch.stack(
            [s[key] if key in s else x.new_zeros(shape if each else x.shape) for s, shape in pairs]
        )
    return batch.stack([x for x, _ in known]) if len(known) == len(states) else None


def _scaled(batch: Batch, x: Tensor, factors: Sequence[float]) -> Tensor:
    """x with each parameter's part multiplied by its factor, in place where they are equal."""
    if all(f == factors[0] for f in factors):
        return x.mul_(factors[0])
    scaled = batch.stack([piece * f for piece, f in zip(batch.unstack(x), factors, strict=True)])
    assert scaled is not None
    return scaled


def _method_keys(batch: Batch) -> dict[str, Any]:
    """Method and shape of each parameter: state is valid for the same ones only. JSON data."""
    fields = {f.name: getattr(batch.method, f.name) for f in dataclasses.fields(batch.method)}
    method = {"class": type(batch.method).__qualname__, "fields": json.loads(json.dumps(fields))}
    return {
        name: method | {"shape": list(shape)} for name, shape in zip(batch.names, batch.shapes, strict=True)
    }


def _refuse_other_model(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError if nothing in `state` fits this model. After a switch some parameters still do."""
    saved = {name: tuple(key["shape"]) for name, key in state["methods"].items()}
    here = {name: tuple(shape) for name, shape in shapes.items()}
    if (state["shared"] or state["own"]) and not saved.items() & here.items():
        raise ValueError(
            f"this compression state belongs to another model, with {_few(saved)}; this model has {_few(here)}; "
            "load the state that was saved with it"
        )


def _warn_of_other_method(saved: Mapping[str, Any], batches: Sequence[Batch]) -> None:
    """Warn if the job was restarted with another method, probably by mistake."""
    for batch in batches:
        for name, key in _method_keys(batch).items():
            before = saved.get(name)
            if before and before | {"shape": key["shape"]} != key:
                fields = ", ".join(f"{field}={value!r}" for field, value in before["fields"].items())
                warnings.warn(
                    f"compression: {name} was saved with {before['class']}({fields}) and resumes with {batch.method!r}; to "
                    "continue as before, pass that method, or call use() with it after loading",
                    stacklevel=6,
                )
                return


def _few(shapes: Mapping[str, Any]) -> str:
    names = [f"{name} {shape}" for name, shape in shapes.items()]
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _workers(place: Mapping[str, Any]) -> str:
    inside = f" ({place['inside']} on each machine)" if place["inside"] > 1 else ""
    return f"{place['size']}{inside}"
