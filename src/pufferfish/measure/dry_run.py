"""`dry_run`: runs a compression method in one process, to get the messages and compute times of one of many workers."""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..compression.engine import Engine
from ..compression.settings import Methods, Settings
from ..compression.simulated import OneWorker
from .clock import pause, trimmed_mean

#: Timed steps take about so many seconds, between the minimum and maximum number.
_SECONDS, _MIN_STEPS, _MAX_STEPS = 0.1, 3, 20


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages and compression time of one worker in one step."""

    messages: tuple[tuple[str, int], ...]  # (collective, bytes passed to it), in the order they are sent
    encode: float = 0.0  # seconds up to the last message
    decode: float = 0.0  # seconds after the last message
    overlaps: bool = False  # whether messages are sent during the backward pass
    intra_node_bytes: int = 0  # averaged inside each machine first


def dry_run(
    method: Methods | Settings,
    like: Mapping[str, Tensor],
    size: int,
    *,
    device: torch.device | str | None = None,
    steps: int | None = None,
    per_node: int = 1,
) -> Traffic:
    """Run `method` on random gradients as one of `size` workers, without a network.

    The other workers are taken to send the same as this one, so that the work on received messages is included. The
    global random state is not used.

    Args:
        method: compression method, one per parameter pattern, or all settings; their `hierarchy` is that of `per_node`.
        like: tensors with the shapes and dtypes of the gradients, by name.
        device: where to run (default: that of the tensors).
        steps: number of timed steps after the first (default: 3 to 20, for about 0.1 s). Times are trimmed means.
            Messages are those of the last of `steps`, or of the third, so that they are equal on all workers.
        per_node: workers per machine; above 1, as `hierarchy="node"`, with the messages between machines.

    >>> from pufferfish.compression import BFloat16
    >>> traffic = dry_run(BFloat16(), {"w": torch.empty(64, 64)}, 4, steps=1)
    >>> traffic.messages[0], traffic.overlaps
    (('all_reduce', 8192), True)
    """
    here = torch.device(device) if device is not None else next(iter(like.values())).device
    generator = torch.Generator(here).manual_seed(0)
    gradients = {
        name: torch.empty(x.shape, dtype=x.dtype, device=here).normal_(generator=generator)
        for name, x in like.items()
    }
    means = {name: torch.empty_like(g) for name, g in gradients.items()}
    worker = OneWorker(size // per_node)
    settings = replace(method, hierarchy="flat") if isinstance(method, Settings) else Settings(method)
    if per_node > 1:
        settings = replace(settings, overlap=False)
    engine = Engine(settings, worker)
    engine.arrange(gradients, engine.overlap_bytes)
    engine.state.steps = 2**20  # after the uncompressed or less compressed first steps of a method
    timings: dict[str, list[float]] = {"encode": [], "decode": []}
    messages: tuple[tuple[str, int], ...] = ()
    last = recorded = steps or _MIN_STEPS
    for step in itertools.count():
        worker.messages.clear()
        pause()
        before = worker.meter.seconds
        exchange = engine.begin()
        exchange.add(gradients)
        exchange.finish(means)
        exchange.commit()
        after, end = worker.meter.seconds, time.perf_counter()
        torch.get_device_module(here).synchronize()
        after["decode"] += time.perf_counter() - end
        if step:
            for name, seconds in timings.items():
                seconds.append(after[name] - before[name])
        if step == recorded:
            messages = tuple(worker.messages)
        if step == 1 and steps is None:
            first = sum(seconds[-1] for seconds in timings.values())
            last = max(_MIN_STEPS, min(_MAX_STEPS, int(_SECONDS / first) if first else _MAX_STEPS))
        if step == last:
            break
    return Traffic(
        messages=messages,
        encode=trimmed_mean(timings["encode"]),
        decode=trimmed_mean(timings["decode"]),
        overlaps=engine.overlap_bytes is not None,
        intra_node_bytes=sum(g.nbytes for g in gradients.values()) if per_node > 1 else 0,
    )
