"""What a step of simulated workers would take as real ones: computing measured here, the exchange from the cost model."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from ...measure import CostModel, Link, Prediction, Work, buckets, dry_run
from ...measure.compute_work import alone
from ...measure.remedies import gradients
from ..network import Shape
from ..report.numbers import seconds
from .optimizer import optimizer
from .parts import Parts
from .screen import Screen
from .sinks import Log

#: Seconds of a message where nobody states a delay: a good network's.
LATENCY = 5e-5


def tell(parts: Parts, log: Log, screen: Screen, step: int) -> float:
    """Seconds of a step as the model is now; also for the log and the user.

    What was predicted for the model before the switch stays as "warm_up_seconds_a_step".
    """
    network = parts.given.network
    found = predicted(parts, Shape.parse(network))
    before = log.data["predicted"].get("seconds_a_step")
    log.predict(seconds_a_step=found.step, **({"warm_up_seconds_a_step": before} if before else {}))
    log.log(step=step, **{"predicted/step": found.step, "predicted/exchange": found.exchange})
    screen.say(
        f"predicted, not measured: {seconds(found.step)} a step with {parts.size} workers on {network}, "
        f"{seconds(found.exchange)} of it waiting for the exchange"
    )
    return found.step


def predicted(parts: Parts, link: Shape) -> Prediction:
    """One step of one of `parts.size` workers on such links. Neither the model nor random numbers are touched."""
    work = _sending(_computed(parts), parts)
    line = Link.of(bandwidth=1e6 * link.mbit, latency=1e-3 * link.delay_ms + LATENCY, size=parts.size)
    return CostModel(link=line).predict(work.accumulated(parts.given.accumulate))


def _computed(parts: Parts) -> Work:
    """One pass of one worker on a copy of the model, and an update."""
    task, given = parts.task, parts.given
    devices = [parts.device] if parts.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        model = copy.deepcopy(parts.bare).train()
        own = optimizer(model, given.recipe)
        batch = next(
            task.batches(
                parts.data, "train", given.recipe.batch // given.accumulate, device=parts.device,
                generator=torch.Generator().manual_seed(0), size=parts.size,
            )
        )  # fmt: skip

        def step() -> None:
            with given.autocast:
                loss = task.loss(model, batch, given.recipe)
            loss.backward()
            own.step()
            own.zero_grad()

        return alone(model, step, own)


def _sending(work: Work, parts: Parts) -> Work:
    like = gradients(parts.bare)
    method = parts.given.choice.compress
    if method is None:
        sizes = buckets(x.nbytes for x in reversed(list(like.values())))
        return replace(work, messages=tuple(("all_reduce", nbytes) for nbytes in sizes), overlaps=True)
    sent = dry_run(method, like, parts.size)
    return replace(
        work, messages=sent.messages, overlaps=sent.overlaps, encode=sent.encode, decode=sent.decode
    )
