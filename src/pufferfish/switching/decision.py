"""What a switch finds out about the model: the ranks at its moment, and the layers that share an input."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.ddp import Job
from ..layers import named_modules
from ..lowrank.factors import shared_spectra
from ..planning import LITTLE, Plan, apply_rules


def choose_ranks(
    job: Job, plan: Plan, shared: tuple[tuple[str, ...], ...], automatic: bool
) -> tuple[Plan, str]:
    """The plan with the ranks that its rules give for the weights of this moment, the same on all workers.

    Args:
        shared: linear layers that were called with the same tensor, by groups.
        automatic: whether a plan that saves too little is applied to no layer.

    Returns:
        The plan, and text that says how little it saves, if ranks were chosen here.
    """
    unresolved = job.workers.run_on_first(lambda: [e.name for e in plan.entries if e.rule is not None])
    spectra = shared_spectra(job, unresolved) if unresolved else None
    plan = dataclasses.replace(plan, shared_inputs=shared or plan.shared_inputs)
    # Of rank 0, since measured times may differ between workers.
    chosen = Plan.from_data(
        job.workers.run_on_first(lambda: (plan if spectra is None else apply_rules(plan, spectra)).as_data())
    )
    little = _saves_little(chosen) if unresolved else ""
    if little and automatic:
        chosen = chosen.replace(e.keep_dense(little) if e.rank else e for e in chosen)
    return chosen, little


def _saves_little(plan: Plan) -> str:
    """Text that says how little the plan saves; "" if it saves at least a tenth of the gradient bytes or of the time."""
    saved = 1 - plan.after.gradient_bytes / max(plan.before.gradient_bytes, 1)
    speedup = plan.speedup if plan.measured else None
    if not plan.ranks or saved >= LITTLE or (speedup and 1 - 1 / speedup >= LITTLE):
        return ""
    time = f" and {1 - 1 / speedup:.1%} of the time" if speedup else ""
    return f"low rank saves only {saved:.1%} of the gradient bytes{time}"


class SharedInputs:
    """Finds linear layers that one forward pass of the training loop calls, one after the other, with the same tensor."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []  # layers that were called one after the other with one tensor
        self._last: Callable[[], Tensor | None] = _nothing  # a weak reference to the last input
        self._handles: list[Any] = []

    def watch(self, model: nn.Module, plan: Plan) -> None:
        """Register a hook with every linear layer of the plan; each is removed after its first call."""
        self._remove()
        names = {e.layer for e in plan if e.rank or e.rule}
        for name, _, module in named_modules(model):
            if name in names and isinstance(module, nn.Linear):
                self._handles.append(
                    module.register_forward_hook(self._hook(name, len(self._handles), module))
                )

    def _hook(self, name: str, place: int, watched: nn.Module) -> Callable[..., None]:
        watched_id = id(watched)

        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if torch.compiler.is_compiling():
                return  # what follows breaks the compiled graph, and a model that calls it in a loop is never compiled
            if id(module) != watched_id or place >= len(self._handles):
                hooks = module._forward_hooks  # those of a copy of the model
                for key in [key for key, hook in hooks.items() if hook is record]:
                    del hooks[key]
                return
            self._handles[place].remove()
            if args and args[0] is self._last():
                self.groups[-1].append(name)
            else:
                self.groups.append([name])
            self._last = weakref.ref(args[0]) if args and isinstance(args[0], Tensor) else _nothing

        return record

    def shared(self) -> tuple[tuple[str, ...], ...]:
        """Groups of two and more layers; ends the watch."""
        self._remove()
        return tuple(tuple(dict.fromkeys(names)) for names in self.groups if len(set(names)) > 1)

    def _remove(self) -> None:
        self._last = _nothing
        while self._handles:
            self._handles.pop().remove()


def _nothing() -> None:
    """Stand-in for a weak reference whose object is gone."""
