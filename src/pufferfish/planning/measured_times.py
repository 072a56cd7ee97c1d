"""`with_measured_times`: measure the layers that a plan changes, and keep those dense that low rank would slow down."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..layers import low_rank_type
from .plan import Entry, Plan
from .profile import Call, Example, Profile
from .progress import progress, track
from .rules import align
from .timing import Mode, measure_layer, measure_step

T = TypeVar("T")
Times = tuple[float, float]  # milliseconds in one step, dense and low-rank


def with_measured_times(
    plan: Plan,
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    profiled: Profile,
    example: Example,
    mode: Mode,
    link: float | None,
) -> Plan:
    """Measure each layer that would change and keep those dense whose low-rank form does not shorten a step.

    One dense step of the whole model is measured too, for what the plan expects.

    Args:
        modules: the model's layers by name.
        link: bytes of gradients per second that the workers average; None: bytes do not count.
    """
    device = next(model.parameters()).device
    ranks = {layer: r for layer, r in _ranks(plan).items() if layer in profiled.calls}
    entries: dict[str, Entry] = {}
    known: dict[str, Times | None] = {}  # equal layers are measured once
    with torch.random.fork_rng(devices={p.device for p in model.parameters() if p.is_cuda}):
        for layer in track(ranks, "measuring layers"):
            dense, call = modules[layer], profiled.calls[layer]
            key = _what_is_measured(dense, ranks[layer], call)
            if key not in known:
                kind = low_rank_type(type(dense))
                assert kind is not None
                measure = partial(measure_layer, dense, kind(dense, ranks[layer]), call)
                known[key] = _measured(layer, measure, mode)
            if (times := known[key]) is not None:
                group = [e for e in plan.entries if e.layer == layer]
                ms = times[0] * call.count, times[1] * call.count
                entries |= {e.name: e for e in _decide(group, ranks[layer], ms, link)}
        if not entries:
            return plan
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        measured: dict[str, Any] = {"device": name, "mode": mode} | ({} if link is None else {"link": link})
        if not _waits_for_others(model):
            with progress("measuring a step", None):
                step = _measured("the whole step", partial(measure_step, model, example), mode)
            measured |= {} if step is None else {"step_ms": step}
    return dataclasses.replace(
        plan, entries=tuple(entries.get(e.name, e) for e in plan.entries), measured=measured
    )


def speedup(plan: Plan, link: float | None = None) -> float | None:
    """Expected time of a dense step over that of a step with the plan; None if no step was measured.

    Args:
        link: bytes of gradients per second that the workers average; None: without their exchange.
    """
    step = plan.measured.get("step_ms")
    if step is None:
        return None
    times = {e.layer: e.ms for e in plan.entries if e.ms and (e.rank or e.rule)}
    dense, low_rank = (sum(ms[i] for ms in times.values()) for i in range(2))
    # Layers may add up to more than the step, which hides the time to launch some of their kernels.
    after = max(step - dense + low_rank, low_rank)
    sent = [1e3 * x.gradient_bytes / link if link else 0.0 for x in (plan.before, plan.after)]
    return float((step + sent[0]) / (after + sent[1]))


def _ranks(plan: Plan) -> dict[str, dict[str, int]]:
    """Ranks to measure: layer → matrix → rank."""
    ranks: dict[str, dict[str, int]] = {}
    for e in plan.entries:
        if e.matrix is not None and (e.rank or e.rule):
            # A rule that needs the weights has no rank yet; time a quarter of the full rank instead.
            r = e.rank or align(e.matrix.full_rank // 4, e.matrix, plan.multiple, plan.min_saving)
            ranks.setdefault(e.layer, {})[e.matrix.name] = r
    return ranks


def _what_is_measured(dense: nn.Module, ranks: Mapping[str, int], call: Call) -> str:
    """The same text for layers that take the same time."""
    kind = type(dense).__module__, type(dense).__qualname__, dense.training
    weights = [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in dense.parameters()]
    inputs = [
        (x.shape, x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
        for x in pytree.tree_leaves((call.args, call.kwargs))
    ]
    return repr((dense, kind, weights, ranks, inputs, call.autocast))


def _measured(name: str, measure: Callable[[Mode], T], mode: Mode) -> T | None:
    """What `measure` returns; None, with a warning, where it raises in eager mode. There, nobody need have asked for it."""
    try:
        return measure(mode)
    except Exception as error:  # a layer that runs alone may raise anything
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
        text = f"{name}: cannot be measured in mode {mode!r} ({text})"
        if mode != "eager":
            raise RuntimeError(f'{text}; give measure="eager", or keep the layer dense with keep=') from error
        warnings.warn(text, stacklevel=4)
        return None


def _decide(group: Sequence[Entry], ranks: Mapping[str, int], ms: Times, link: float | None) -> list[Entry]:
    """Entries of a layer with its times; dense if low rank takes longer than it saves in sending."""
    saved_bytes = sum(
        e.itemsize * (e.before - e.matrix.factor_numel(ranks[e.matrix.name]))
        for e in group
        if e.matrix is not None and e.trainable and (e.rank or e.rule)
    )
    less_to_send = 1e3 * saved_bytes / link if link else 0.0
    reason = f"slower when measured: {ms[0]:.3g} ms dense, {ms[1]:.3g} ms low-rank"
    reason += f", {less_to_send:.3g} ms less to send" if link else ""
    decided = []
    for e in group:
        timed = dataclasses.replace(e, ms=ms)
        slower = (e.rank or e.rule) and ms[1] - less_to_send >= ms[0]
        decided.append(timed.keep_dense(reason) if slower else timed)
    return decided


def _waits_for_others(model: nn.Module) -> bool:
    """Whether a layer may wait for other workers, which need not measure as many steps."""
    if any(type(p) not in (Tensor, nn.Parameter) for p in model.parameters()):
        return True
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
