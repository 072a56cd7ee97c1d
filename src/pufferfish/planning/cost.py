"""What a model costs in a training step: parameters, MACs, bytes on the wire, memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from ..layers.names import unwrap
from .profile import Profile


@dataclass(frozen=True, kw_only=True)
class Totals:
    """A whole model's cost for one training step."""

    parameters: int
    parameter_bytes: int
    trainable: int
    gradient_bytes: int
    forward_macs: int | None = None  # None: no example was given
    backward_macs: int | None = None

    def memory(self, states: int) -> int:
        """Bytes of weights, gradients and `states` optimizer tensors a parameter (SGD 1, Adam 2)."""
        return self.parameter_bytes + (1 + states) * self.gradient_bytes

    def wire_bytes(self, engine: str = "ddp", *, shards: int = 1) -> int:
        """Bytes a rank hands to collectives in one step.

        `ddp` all-reduces the gradients. `fsdp2` gathers the parameters twice and reduce-scatters the
        gradients. `hsdp` does the same inside each of the groups of `shards` ranks and all-reduces each
        gradient shard between them.

        >>> step = totals(nn.Linear(1000, 1000, bias=False))
        >>> [step.wire_bytes(engine, shards=4) for engine in ("ddp", "fsdp2", "hsdp")]
        [4000000, 12000000, 13000000]
        """
        sharded = 2 * self.parameter_bytes + self.gradient_bytes
        match engine:
            case "ddp":
                return self.gradient_bytes
            case "fsdp2":
                return sharded
            case "hsdp":
                return sharded + self.gradient_bytes // shards
        raise ValueError(f"engine {engine!r} is not one of ddp, fsdp2, hsdp")


def totals(model: nn.Module, profile: Profile | None = None) -> Totals:
    """Count a model's parameters; with a `Profile` its MACs too."""
    parameters = [p for p in unwrap(model).parameters() if not is_lazy(p)]
    trainable = [p for p in parameters if p.requires_grad]
    return Totals(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        trainable=sum(p.numel() for p in trainable),
        gradient_bytes=sum(p.numel() * p.element_size() for p in trainable),
        forward_macs=profile.forward_macs if profile else None,
        backward_macs=profile.backward_macs if profile else None,
    )
