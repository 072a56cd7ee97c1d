"""`predict_step`: time of a step with simulated workers: computation is measured, the exchange comes from the cost model."""

import copy
from dataclasses import replace

import torch

from ...layers.names import trainable_parameters
from ...measure import CostModel, Link, Prediction, Work, dry_run
from ...measure.cost_model import (
    measure_compute,
    with_ddp_messages,
    with_local_exchange,
)
from ..network import LinkShape
from ..network.network import LATENCY
from ..report.formatting import format_seconds
from .console import Console
from .optimizers import build_optimizer
from .record import TrainingLog
from .step import RunComponents


def log_predicted_step(components: RunComponents, log: TrainingLog, console: Console, step: int) -> float:
    """Predict a step of the current model, log it at update `step`, and return its seconds.

    An earlier prediction, for the model before the switch, stays in run.json as "warm_up_seconds_a_step".
    """
    network = components.settings.network
    prediction = predict_step(components, LinkShape.parse(network))
    earlier = log.data["predicted"].get("seconds_a_step")
    log.predict(
        seconds_a_step=prediction.step,
        utilisation=prediction.utilisation,
        **({"warm_up_seconds_a_step": earlier} if earlier else {}),
    )
    log.log(step=step, **{"predicted/step": prediction.step, "predicted/exchange": prediction.exchange})
    console.info(
        f"predicted, not measured: {format_seconds(prediction.step)} per step with {components.world_size} workers on {network}, "
        f"{format_seconds(prediction.exchange)} of it waiting for the exchange"
    )
    return prediction.step


def predict_step(components: RunComponents, link: LinkShape) -> Prediction:
    """Predict a step of one of the run's workers on such links; leaves the model and random state unchanged."""
    work = _with_exchange(_measure_work(components), components)
    bandwidth, latency = 1e6 * link.mbit, 1e-3 * link.delay_ms + LATENCY
    model = CostModel(link=Link.nominal(bandwidth=bandwidth, latency=latency, size=components.world_size))
    return model.predict(work.accumulated(components.settings.accumulate))


def _measure_work(components: RunComponents) -> Work:
    """Measure a forward and backward pass of one worker and an update, on a copy of the model."""
    task, settings = components.task, components.settings
    devices = [components.device] if components.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        model = copy.deepcopy(components.module).train()
        optimizer = build_optimizer(model, settings.recipe)
        batch = next(
            task.batches(
                components.data, "train", settings.recipe.batch // settings.accumulate, device=components.device,
                generator=torch.Generator().manual_seed(0), world_size=components.world_size,
            )
        )  # fmt: skip

        def step() -> None:
            with settings.autocast:
                loss = task.loss(model, batch, settings.recipe)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return measure_compute(model, step, optimizer)


def _with_exchange(work: Work, components: RunComponents) -> Work:
    """Add the messages of the run's compression, and the time to encode and decode them."""
    parameters = trainable_parameters(components.module)
    method, local = components.settings.method.compress, components.settings.method.local
    if local is not None:
        size = components.world_size
        return with_local_exchange(work, local.schedule, local.settings, parameters, size)
    if method is None:
        return with_ddp_messages(work, parameters)
    return replace(work, **vars(dry_run(method, parameters, components.world_size)))
