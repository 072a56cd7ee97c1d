"""`ElasticGradients`: gradients averaged in every step between replicas that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...compression import Engine, Methods, NoCompression, Settings, Step
from ...compression.ddp_hook import checked_settings, gradient_units
from ...compression.state import updates_by_rate
from ...layers.names import trainable_parameters
from .elastic_exchange import ElasticExchange
from .replicas import LostReplica, Replicas, digest


class ElasticGradients(ElasticExchange):
    """Average every gradient, compressed or not, between replicas that may be killed, hang, join and come back.

    It takes the place of DDP, and needs neither a wrapper nor a communication hook.

    A replica that joins gets weights, low-rank structure, optimizer state and error feedback from another one in its first
    `average`. Its own gradient, computed with other weights, is not used. If a replica is lost, the others repeat the exchange with the same gradients.

    Args:
        replicas: the replicas of this job.
        method: compression method, or a mapping from name patterns to methods.
        settings: other arguments of `pf.compression.Settings`.

    >>> from torchft.coordination import LighthouseServer
    >>> lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    >>> port = lighthouse.address().split(":")[-1]
    >>> replicas = Replicas(f"http://127.0.0.1:{port}", hostname="127.0.0.1")
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> gradients = ElasticGradients(replicas)
    >>> gradients.start(model, optimizer)
    >>> while gradients.position < 2:
    ...     model(torch.ones(2)).sum().backward()
    ...     gradients.average(model)
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> replicas.shutdown(), lighthouse.shutdown()
    (None, None)
    """

    _exchanged = "gradients"

    def __init__(self, replicas: Replicas, method: Methods | None = None, **settings: Any) -> None:
        self._replicas = replicas
        self._settings = Settings(NoCompression() if method is None else method, **settings)
        if self._settings.hierarchy != "flat":
            raise ValueError("ElasticGradients: hierarchy= is not supported between replicas")
        replicas.transport.operation = "ElasticGradients.average"
        self.engine = Engine(self._settings, replicas.transport)
        self._stale = False  # whether the gradients belong to weights that were replaced
        replicas.share_state(self._shared_state, self._adopt, self._check)

    @property
    def position(self) -> int:
        """Number of averages of the whole job. A replica that joins continues from that of the others."""
        return self._replicas.round

    def _begin(self) -> None:
        checked_settings(self._settings, trainable_parameters(self._model), self._optimizers)

    @torch.no_grad()
    def average(self, model: nn.Module) -> None:
        """Replace the gradients by their means over the replicas. Call it after the backward pass, before the update.

        A parameter that has no gradient on any replica gets none.
        """
        if not self._started:
            raise ValueError("ElasticGradients: call gradients.start(model, optimizer) before the first step")
        self._model, self._stale = model, False
        while True:
            count, error = self.engine.steps, None
            try:
                self._replicas.join()  # may replace the model's state
                self.engine.state.move(self._replicas.transport.worker, self._replicas.size)
                count = self.engine.steps
                step, means = self._exchange(trainable_parameters(model))
            except LostReplica as lost:
                error = lost
            if self._replicas.commit(error):
                break
            self.engine.state.steps = count
        step.commit()
        for name, p in trainable_parameters(model).items():
            p.grad = means.get(name)

    def _exchange(self, params: Mapping[str, nn.Parameter]) -> tuple[Step, dict[str, Tensor]]:
        used = {name: p.grad for name, p in params.items() if p.grad is not None and not self._stale}
        gradients = {name: used[name] if name in used else torch.zeros_like(p) for name, p in params.items()}
        layout = [(name, tuple(p.shape), p.dtype) for name, p in params.items()]
        facts = repr((self._settings.method, self._settings.error_feedback, self.engine.steps, layout))
        contributors = self._replicas.agree(facts, digest(params), bool(used))
        means = {name: torch.empty_like(g) for name, g in gradients.items()}
        self.engine.arrange(gradients)
        step = self.engine.begin(*self._units(params))
        step.add(gradients)
        step.finish(means)
        self._average_of_contributors_(means, contributors)
        everyone = self._replicas.confirm(digest(means), bytes(name in used for name in params))
        # An optimizer leaves parameters without a gradient alone; zeros would still decay them.
        anywhere = [any(theirs) for theirs in zip(*everyone, strict=True)]
        return step, {name: means[name] for name, flag in zip(params, anywhere, strict=True) if flag}

    def _units(self, params: Mapping[str, nn.Parameter]) -> tuple[Any, ...]:
        """Return what error feedback is kept in, where there is some."""
        if not (self.engine.keeps_units or self.engine.state.has_error):
            return ()
        by_rate = [optimizer for optimizer in self._optimizers if updates_by_rate(optimizer)]
        return gradient_units({id(p): name for name, p in params.items()}, by_rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this replica, to start the whole job again."""
        return {"engine": self.engine.state_dict(), "rounds": self._replicas.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of this replica."""
        self.engine.load_state_dict(self._engine_state(state["engine"]))
        self._replicas.load_state_dict(state["rounds"])

    def _shared_state(self) -> dict[str, Any]:
        engine = self._engine_state(self.engine.state_dict())
        return {"exchanged": self._exchanged, "shared": self._shared(), "engine": engine}

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Continue like another replica, with the error feedback of this one, if it has any that fits."""
        self.engine.state.release_divided(self._replicas.manager.num_participants())
        mine, same = self.engine.state_dict(), self._ranks == state["shared"]["ranks"]
        here = {"worker": mine["worker"], "size": mine["size"]}
        if mine["own"] and same:
            here["own"] = mine["own"]
        self._load_shared(state["shared"])
        self.engine.load_state_dict(state["engine"] | here, {})
        self._stale = True
