"""What local steps are made of: when fragments of a model are averaged, the average on its way, and the anchor it is applied to."""

from __future__ import annotations

import glob
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from ..compression import Engine, Method, NoCompression, Settings, Transport
from ..layers import matches
from ..layers.matrix import at_least_fp32
from ..lowrank.by_name import check_optimizer, group_names, load_optimizer, optimizer_state
from ..lowrank.factors import balance

#: Means over the workers by name.
Means = dict[str, Tensor]

#: Creates the outer optimizer for the given parameters.
Outer = Callable[[list[nn.Parameter]], optim.Optimizer]

#: A finer division is tried if the largest fragment exceeds the mean by more than this factor.
_TOLERANCE = 1.25


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The moments of averages, counted in updates. Invalid values raise ValueError.

    >>> schedule = Schedule(h=6, fragments=3)
    >>> [schedule.due(update) for update in range(1, 7)]
    [[], [1], [], [2], [], [0]]
    """

    h: int  #: updates between two averages of a fragment
    fragments: int = 1  #: their number
    delay: int = 0  #: updates from sending a fragment to applying its average
    mixing: float = 0.0  #: share of its own parameters that a worker keeps

    def __post_init__(self) -> None:
        h, fragments, delay, mixing = self.h, self.fragments, self.delay, self.mixing
        for name, value, what in (("h", h, "updates"), ("fragments", fragments, "fragments")):
            if value < 1:
                raise ValueError(f"LocalSteps: {name}={value!r} is not a number of {what}")
        if fragments > h:
            raise ValueError(
                f"LocalSteps: fragments={fragments} exceeds h={h}; average at most one fragment in an update"
            )
        if not 0 <= delay < h:
            raise ValueError(
                f"LocalSteps: delay={delay} must be at least 0 and below h={h}, after which the fragment is sent again"
            )
        if not 0 <= mixing < 1 or (mixing and not delay):
            raise ValueError(
                f"LocalSteps: mixing={mixing!r} must be at least 0 and below 1, and 0 without a delay"
            )

    def due(self, update: int) -> list[int]:
        """Return the fragments that are averaged after this update, counted from 1."""
        return [p for p in range(self.fragments) if update % self.h == self.h * p // self.fragments]


def split_by_depth(sizes: Mapping[str, int], fragments: int) -> list[list[str]]:
    """Split tensors into fragments of about equal size.

    A fragment consists of whole blocks, the numbered modules of a model. If blocks are too few or too unequal, it
    consists of inner blocks, of layers or of single tensors. A tensor is never divided. The blocks are dealt out in
    turn, so that every fragment has blocks of all depths.

    Args:
        sizes: number of elements of each tensor by name, in the order of depth.
        fragments: their number.

    Returns:
        The names in each fragment, in the order of depth.

    >>> sizes = {"embed.weight": 4, "blocks.0.a": 2, "blocks.0.b": 2, "blocks.1.a": 4, "blocks.2.a": 4}
    >>> split_by_depth(sizes, 2)
    [['embed.weight', 'blocks.1.a'], ['blocks.0.a', 'blocks.0.b', 'blocks.2.a']]
    """
    if fragments > len(sizes):
        raise ValueError(
            f"LocalSteps: fragments={fragments}, but the model has only {len(sizes)} tensors to average; pass fewer"
        )
    share = max(sum(sizes.values()) / fragments, *sizes.values(), 1)
    split: list[list[str]] = []
    levels = max(sum(part.isdigit() for part in name.split(".")) for name in sizes)
    for level in range(1, levels + 3):
        units: dict[str, list[str]] = {}
        for name in sizes:
            unit = _unit(name, level) if level < levels + 2 else name
            units.setdefault(unit, []).append(name)
        if len(units) < fragments:
            continue
        costs = [max(sum(sizes[name] for name in names), 1) for names in units.values()]
        split = [[] for _ in range(fragments)]
        for names, owner in zip(units.values(), balance(costs, fragments), strict=True):
            split[owner] += names
        if max(sum(sizes[name] for name in names) for names in split) <= _TOLERANCE * share:
            break
    return split


def _unit(name: str, level: int) -> str:
    """Return the module that a tensor belongs to: down to its `level`-th number, or the layer itself."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[: numbers[level - 1] + 1] if level <= len(numbers) else parts[:-1])


class Fragment:
    """Names of the tensors in a fragment, the engine that averages them, and the average on its way.

    Args:
        names: names of its parameters and buffers.
        settings: settings of the whole model.
        uncompressed: names that are sent uncompressed, whatever the settings say.
    """

    def __init__(
        self, names: Sequence[str], settings: Settings, uncompressed: Collection[str], transport: Transport
    ) -> None:
        self.names = list(names)
        self.engine = Engine(settings_for(names, settings, uncompressed), transport)
        self.since = 0  # number of updates since it was sent
        self.sent_bytes = 0.0  # on the wire, in its last average
        self.flight: Flight | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings. Waits for the flight, which changes error feedback."""
        flight = self.flight and {"means": dict(self.flight.wait()), "remaining": self.flight.remaining}
        return {
            "names": list(self.names),
            "since": self.since,
            "sent_bytes": self.sent_bytes,
            "engine": self.engine.state_dict(),
            "flight": flight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.engine.load_state_dict(state["engine"])
        self.since = state["since"]
        self.sent_bytes = state["sent_bytes"]
        self.flight = state["flight"] and Flight(**state["flight"])


def move_engine_states(
    states: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return the state of an engine for tensors that were in other fragments before.

    Args:
        states: states of the engines so far.
        shapes: shapes of the new engine's tensors. State of a tensor that had another shape is dropped.
    """
    methods = {name: key for state in states for name, key in state["methods"].items()}
    names = {name for name in methods.keys() & shapes.keys() if methods[name]["shape"] == [*shapes[name]]}
    parts = {
        part: {name: x for state in states for name, x in state[part].items() if name in names}
        for part in ("units", "methods", "shared", "own")
    }
    return {**states[0], **parts, "steps": max(state["steps"] for state in states)}


def settings_for(names: Sequence[str], settings: Settings, uncompressed: Collection[str]) -> Settings:
    """Return the settings with only those patterns that choose the method of a tensor among `names`."""
    patterns = settings.by_pattern
    chosen = {next((p for p in patterns if matches(n, p)), None) for n in names if n not in uncompressed}
    mine: dict[str, Method] = {glob.escape(name): NoCompression() for name in names if name in uncompressed}
    mine |= {pattern: method for pattern, method in patterns.items() if pattern in chosen}
    return Settings(mine or NoCompression())


class Flight:
    """One average on its way to the workers.

    Flights run one after the other, each in a thread: a method may need several messages, and the next one depends on
    the answer to the last. All workers send their flights in the same order.

    Args:
        remaining: number of updates until it is applied.
        means: the result, if it is known already.

    Attributes:
        remaining: counted down by the caller.

    >>> flight = Flight.send(lambda: {"w": torch.ones(2)}, remaining=3)
    >>> flight.wait(), flight.remaining
    ({'w': tensor([1., 1.])}, 3)
    """

    def __init__(self, remaining: int, means: Means | None = None) -> None:
        self.remaining = remaining
        self._means = means
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def send(
        cls,
        average: Callable[[], Means],
        remaining: int,
        *,
        after: Flight | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> Flight:
        """Start `average` in a thread.

        Args:
            after: begin when this flight has ended.
            stream: GPU stream of the work. It waits for what the current stream has been given so far.
        """
        flight = cls(remaining)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        # A daemon: after an error elsewhere, the process does not wait for workers that are gone.
        flight._thread = threading.Thread(
            target=flight._run, args=(average, after, stream), name="LocalSteps flight", daemon=True
        )
        flight._thread.start()
        return flight

    def wait(self) -> Means:
        """Return the result once it is there; raise the error that ended the flight."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._means is not None
        for x in self._means.values():
            if x.is_cuda:  # allocated on the stream of the flight, which must not reuse the memory too early
                x.record_stream(torch.cuda.current_stream(x.device))
        return self._means

    def _run(
        self, average: Callable[[], Means], after: Flight | None, stream: torch.cuda.Stream | None
    ) -> None:
        if after is not None and after._thread is not None:
            after._thread.join()
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self._means = average()
            if stream is not None:
                stream.synchronize()  # in this thread, before the inputs are freed
        except BaseException as error:  # raised by `wait`
            self._error = error


def separate_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Create a second group of the same workers, so that flights never meet other messages. All of them call it."""
    if group is None or dist.get_world_size(group) == 1:
        return group
    backend = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    timeout = group._get_backend(torch.device(backend.split(":")[0])).options._timeout
    ranks = dist.get_process_group_ranks(group)
    second: dist.ProcessGroup = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    return second


class Anchor:
    """Parameters and averaged buffers of the last shared model, in fp32 or wider, and their outer optimizer.

    Of sharded parameters it has the shard of this worker.

    Args:
        make_outer: creates the outer optimizer.
        params: parameters of the model, by name.
        settings: compression of the averages.
        before: the anchor so far. State of the outer optimizer is kept for parameters of the same shape.
    """

    def __init__(
        self,
        make_outer: Outer,
        params: Mapping[str, Tensor],
        settings: Settings,
        before: Anchor | None = None,
    ) -> None:
        old: Mapping[str, nn.Parameter] = before.params if before else {}
        self.params: dict[str, nn.Parameter] = {
            name: _anchor_for(old.get(name), x) for name, x in params.items()
        }
        self.buffers: dict[str, Tensor] = {}
        self.outer = make_outer(list(self.params.values()))
        self._before = before
        self._check_outer(settings)

    def _check_outer(self, settings: Settings) -> None:
        outer, kind = self.outer, type(self.outer).__name__
        groups = group_names(outer, self._names())
        for name in self.params.keys() - {name for group in groups for name in group}:
            raise ValueError(f"LocalSteps: the outer {kind} does not have {name}; pass it all parameters")
        for one in settings.by_pattern.values():
            if one.has_momentum and any(g.get("momentum") or "betas" in g for g in outer.param_groups):
                name = type(one).__name__
                raise ValueError(
                    f"LocalSteps: {name} and the outer {kind} both have momentum; use it in one of them"
                )

    def check_outer_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a saved state of the outer optimizer does not fit."""
        check_optimizer(state, type(self.outer).__name__, group_names(self.outer, self._names()))

    def fill(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], device: torch.device) -> None:
        """Set the values, and continue with the outer optimizer of the anchor before, if there is one."""
        for name, a in self.params.items():
            a.copy_(params[name])
        self.buffers = {name: at_least_fp32(b.detach()).to(device, copy=True) for name, b in buffers.items()}
        if self._before is not None:
            self.outer = _with_params_of(self._before.outer, self.outer)
            self._before = None

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return {**self.params, **self.buffers}

    def differences(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return anchor − x of the named tensors, without the rounding error that a copy of the anchor starts with."""
        found = {}
        anchor = self.tensors()
        for name in names:
            a, x = anchor[name], tensors[name]
            found[name] = a.to(x.dtype).to(a.dtype) - x.to(a.device)
        return found

    def step(self, means: Mapping[str, Tensor]) -> None:
        """Update the parameters in `means` by the outer optimizer, and buffers to the mean."""
        for name, mean in means.items():
            if name in self.buffers:
                self.buffers[name].sub_(mean)
            else:
                self.params[name].grad = mean
        self.outer.step()
        self.outer.zero_grad()

    def copy_to(self, names: Iterable[str], tensors: Mapping[str, Tensor], mixing: float = 0.0) -> None:
        """Set the named tensors to mixing · (their values) + (1 − mixing) · anchor."""
        anchor = self.tensors()
        for name in names:
            x, a = tensors[name], anchor[name]
            x.copy_(torch.lerp(a, x.to(a), mixing) if mixing else a)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings, by name."""
        return {
            "anchor": {name: a.detach() for name, a in self.params.items()},
            "buffers": dict(self.buffers),
            "outer": optimizer_state(self.outer, self._names()),
        }

    def load_outer_state(self, state: Mapping[str, Any]) -> None:
        """Load a saved state of the outer optimizer."""
        load_optimizer(self.outer, self._names(), state)

    def _names(self) -> dict[int, str]:
        return {id(a): name for name, a in self.params.items()}


def _with_params_of(outer: optim.Optimizer, new: optim.Optimizer) -> optim.Optimizer:
    """Return `outer`, which a scheduler may refer to, with the parameters of `new`."""
    for group, other in zip(outer.param_groups, new.param_groups, strict=True):
        group["params"] = other["params"]
    present = {p for group in outer.param_groups for p in group["params"]}
    for p in outer.state.keys() - present:
        del outer.state[p]
    return outer


def _anchor_for(anchor: nn.Parameter | None, x: Tensor) -> nn.Parameter:
    """Return the anchor of a parameter: the present one, to which outer optimizer state belongs, or a new one."""
    wide = at_least_fp32(x.detach())
    if anchor is not None and (anchor.shape, anchor.dtype, anchor.device) == (x.shape, wide.dtype, x.device):
        return anchor
    return nn.Parameter(wide.clone())
