"""`Part`: the all-reduce hook of one module that FSDP was applied to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim
from torch.autograd import Variable

from .aggregator import Aggregator
from .fsdp2_modules import group_of, optimizer_groups
from .method import Method

if TYPE_CHECKING:
    from .fsdp2_hook import ShardedHook


@dataclass(eq=False)
class Part:
    """The all-reduce hook of one module that FSDP was applied to: the flat shard of its gradients, averaged in place."""

    hook: ShardedHook
    name: str
    layout: str
    module: Any
    method: Method
    aggregator: Aggregator
    numel: int | None = None  # of the shard, the last time
    waiting: Tensor | None = None  # the sum of passes that were not to be averaged yet

    @property
    def key(self) -> str:
        """Its name among random streams, of which every shard has its own."""
        return f"{self.name}[{self.hook._shards.rank}/{self.hook._shards.size}]"

    @torch.no_grad()
    def __call__(self, flat: Tensor) -> None:
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        if stream is not None:  # FSDP may let go of it before this stream is done
            flat.record_stream(stream)
        # set_requires_all_reduce(False): on a 1-D mesh FSDP itself does not heed it
        if not group_of(self.module).all_reduce_grads:
            self.waiting = flat.clone() if self.waiting is None else self.waiting + flat
            flat.zero_()
            return
        if self.waiting is not None:
            flat += self.waiting
            self.waiting = None
        before = self.aggregator.state_dict()
        keeps = bool(before["shared"] or any(before["own"]))
        if keeps and self.numel not in (None, flat.numel()):
            raise ValueError(
                f"{self.name}: a shard of {flat.numel():,} gradients, where there were {self.numel:,}: other parameters "
                "were used than before, and what is kept does not fit. Call set_reduce_scatter_unused_params(True) on "
                "the model, or take a method that keeps nothing, such as BFloat16; after freezing parameters, call "
                "attach(model) of the hook"
            )
        self.numel = flat.numel()
        units = self._units() if self.aggregator.remembers else {}
        flat.copy_(self.aggregator({self.key: flat}, units, self.hook._scale or 1.0)[self.key])
        keeps |= not self.method.elementwise
        self.hook._staged.append(Staged(self, before, keeps, flat[:1].isnan(), stream))
        Variable._execution_engine.queue_callback(self.hook._finish)  # the first of them settles all

    def _units(self) -> dict[str, float]:
        """Loss scale over learning rate; 0 where that is not one number."""
        rates = {
            float(group["lr"])
            for optimizer, group in optimizer_groups(self.hook.optimizers, self.module)
            if isinstance(optimizer, optim.SGD)
        }
        if not rates and self.hook.scaler is None:
            return {}
        scale = self.hook._loss_scale()
        rate = 1.0 if not rates else rates.pop() if len(rates) == 1 else 0.0
        return {self.key: scale / rate if rate else 0.0}

    def take_back(self, before: dict[str, Any]) -> None:
        """Keep what was kept before; random streams go on."""
        steps = self.aggregator.steps
        self.aggregator.load_state_dict(before)
        self.aggregator.kept.steps = steps


@dataclass(frozen=True)
class Staged:
    """A module's exchange in this backward pass."""

    part: Part
    before: dict[str, Any]  # the state before it
    keeps: bool  # whether there was any, or may be now
    bad: Tensor
    stream: torch.cuda.Stream | None


def refuse_hooked(name: str, present: Any, hook: ShardedHook) -> None:
    """A module takes one all-reduce hook, and that of `hook` may be replaced by a later one of it."""
    if isinstance(present, Part) and present.hook is not hook:
        raise ValueError(
            "compress: this model is compressed already; change its method by use() of that hook"
        )
    if present is not None and not isinstance(present, Part):
        raise ValueError(f"compress: {name} has an all-reduce hook already, and takes only one")
