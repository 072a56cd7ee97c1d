"""`with_measured_times`: measure the layers that a plan changes, and keep those dense that low rank would slow down."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..layers import LowRank, LowRankLinear, SharedInput, low_rank_type
from .plan import Entry, Plan
from .profile import Call, Example, Profile, autocast_dtype
from .progress import progress, track
from .rules import align
from .time_cache import TimeCache, Times
from .timing import Mode, Together, measure_layer, measure_step


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

    Layers that read the same tensor are measured and decided about together, as they run their first factors together.
    One dense step of the whole model is measured too, for what the plan expects.

    Args:
        modules: the model's layers by name.
        link: bytes of gradients per second that the workers average; None: bytes do not count.
    """
    device = next(model.parameters()).device
    gpu = _gpu_name(device)
    cache = TimeCache(gpu)
    ranks = _ranks(plan)
    entries: dict[str, Entry] = {}
    with torch.random.fork_rng(devices={p.device for p in model.parameters() if p.is_cuda}):
        for names in track(_groups(plan, ranks, profiled.calls), "measuring layers"):
            group = [e for e in plan.entries if e.layer in names]
            found = _measure_group(names, ranks, modules, profiled.calls, mode, cache)
            if found is not None:
                entries |= {e.name: e for e in _decide(group, names, ranks, found, link)}
        if not entries:
            return plan
        measured = {"device": gpu or str(device), "mode": mode} | ({} if link is None else {"link": link})
        with progress("measuring a step", None):
            measured |= _step_time(model, profiled, example, mode, cache)
    cache.save()
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


def _gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _ranks(plan: Plan) -> dict[str, dict[str, int]]:
    """Ranks to measure: layer → matrix → rank."""
    ranks: dict[str, dict[str, int]] = {}
    for e in plan.entries:
        if e.matrix is not None and (e.rank or e.rule):
            # A rule that needs the weights has no rank yet; time a quarter of the full rank instead.
            r = e.rank or align(e.matrix.full_rank // 4, e.matrix, plan.multiple, plan.min_saving)
            ranks.setdefault(e.layer, {})[e.matrix.name] = r
    return ranks


def _groups(
    plan: Plan, ranks: Mapping[str, dict[str, int]], calls: Mapping[str, Call]
) -> list[tuple[str, ...]]:
    """Names of the layers that are measured together; most are alone."""
    called = [layer for layer in ranks if layer in calls]
    groups: dict[str, tuple[str, ...]] = {layer: (layer,) for layer in called}
    for names in plan.shared_inputs:
        together = tuple(name for name in names if name in groups)
        groups |= dict.fromkeys(together, together)
    return list(dict.fromkeys(groups[layer] for layer in called))


def _measure_group(
    names: tuple[str, ...],
    ranks: Mapping[str, dict[str, int]],
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, Call],
    mode: Mode,
    cache: TimeCache,
) -> tuple[float, float] | None:
    """Milliseconds of the layers in one step, dense and low-rank; None if they cannot be measured."""
    layers, call = [modules[name] for name in names], calls[names[0]]
    low_rank = [_low_rank(layer, ranks[name]) for layer, name in zip(layers, names, strict=True)]
    pair: tuple[nn.Module, nn.Module] = layers[0], low_rank[0]
    if len(names) > 1:
        SharedInput([x for x in low_rank if isinstance(x, LowRankLinear)])
        pair = Together(layers), Together(low_rank)
        call = dataclasses.replace(call, args=call.args[:1], kwargs={})
    kinds = [(type(layer).__module__, type(layer).__qualname__, layer.training) for layer in layers]
    inputs = _shapes((call.args, call.kwargs)), call.autocast
    key = (pair[0], kinds, _weights(pair[0]), [ranks[name] for name in names], inputs)

    def measure(mode: Mode) -> Times:
        return measure_layer(*pair, call, mode)

    found = _in_mode_or_eager(", ".join(names), key, measure, mode, cache)
    if found is None:
        return None
    (dense_ms, low_rank_ms), _ = found
    return dense_ms * call.count, low_rank_ms * call.count


def _low_rank(dense: nn.Module, ranks: dict[str, int]) -> LowRank:
    kind = low_rank_type(type(dense))
    assert kind is not None
    return kind(dense, ranks)


def _decide(
    group: Sequence[Entry],
    names: tuple[str, ...],
    ranks: Mapping[str, dict[str, int]],
    ms: tuple[float, float],
    link: float | None,
) -> list[Entry]:
    """Entries of layers measured together, with their times; dense if low rank takes longer than it saves in sending."""
    saved_bytes = sum(
        e.itemsize * (e.before - e.matrix.factor_numel(ranks[e.layer][e.matrix.name]))
        for e in group
        if e.matrix is not None and e.trainable and (e.rank or e.rule)
    )
    less_to_send = 1e3 * saved_bytes / link if link else 0.0
    reason = f"slower when measured: {ms[0]:.3g} ms dense, {ms[1]:.3g} ms low-rank"
    reason += f", {less_to_send:.3g} ms less to send" if link else ""
    reason += f" ({', '.join(names)} together)" if len(names) > 1 else ""
    weights = {name: sum(e.before for e in group if e.layer == name) for name in names}
    decided = []
    for e in group:
        # Each layer gets the part of the group's time that it has of the group's weights, so that times add up.
        part = weights[e.layer] / sum(weights.values()) if len(names) > 1 else 1.0
        timed = dataclasses.replace(e, ms=(ms[0] * part, ms[1] * part))
        slower = (e.rank or e.rule) and ms[1] - less_to_send >= ms[0]
        decided.append(timed.keep_dense(reason) if slower else timed)
    return decided


def _step_time(
    model: nn.Module, profiled: Profile, example: Example, mode: Mode, cache: TimeCache
) -> dict[str, Any]:
    """Milliseconds of one dense step and the mode they were measured in; nothing if the step cannot be measured."""
    sharded = any(type(p) not in (Tensor, nn.Parameter) for p in model.parameters())
    if sharded or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return {}  # a layer may wait for other workers, which need not measure as many steps
    calls = [
        (name, _shapes((call.args, call.kwargs)), call.autocast) for name, call in profiled.calls.items()
    ]
    macs = profiled.forward_macs, profiled.backward_macs
    key = (model, model.training, _weights(model), calls, macs)

    def measure(mode: Mode) -> Times:
        return (measure_step(model, example, mode),)

    found = _in_mode_or_eager("the whole step", key, measure, mode, cache)
    return {} if found is None else {"step_ms": found[0][0], "step_mode": found[1]}


def _in_mode_or_eager(
    name: str, key: Any, measure: Callable[[Mode], Times], mode: Mode, cache: TimeCache
) -> tuple[Times, Mode] | None:
    """The times in a mode, or eager ones if that raises, and the mode that they are of; None if both raise."""

    def attempt(mode: Mode) -> Times | None:
        try:
            return measure(mode)
        except Exception as error:  # a layer that cannot be captured or compiled may raise anything
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
            warnings.warn(f"{name}: cannot be measured in mode {mode!r} ({text})", stacklevel=7)
            return None

    modes: tuple[Mode, ...] = (mode,) if mode == "eager" else (mode, "eager")
    for each in modes:
        times = cache.get(repr((key, each, _settings())), partial(attempt, each))
        if times is not None:
            return times, each
    return None


def _weights(module: nn.Module) -> list[Any]:
    return [(p.shape, p.stride(), p.dtype, p.requires_grad, p.device.type) for p in module.parameters()]


def _shapes(values: Any) -> list[Any]:
    return [
        (x.shape, x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
        for x in pytree.tree_leaves(values)
    ]


def _settings() -> tuple[Any, ...]:
    """Everything that times depend on besides a layer and its input."""
    cudnn = torch.backends.cudnn
    return (
        [autocast_dtype(torch.device(kind)) for kind in ("cpu", "cuda")],
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
    )
