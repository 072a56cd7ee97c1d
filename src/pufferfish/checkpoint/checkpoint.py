"""`Checkpoint`: save and resume everything of a training job, across the switch and across a crash."""

from __future__ import annotations

import json
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn, optim

from ..compression.ddp_hook import compressor_of
from ..layers.names import own_name, unwrap
from ..lowrank.factorize import plan_of, ranks_of
from ..optim.by_name import load_optimizer, names_of, optimizer_state
from ..optim.carry import Optimizers, as_list
from ..planning.plan import Plan
from ..switching.switch import Switch
from . import checkpoint_folder as folders
from .checkpoint_files import Saved, load_own_state, own_state, state_of, write
from .control import Control, Sigterm
from .random_state import rng_state, seed_rng, set_rng_state
from .structure import expected, is_sharded, restructure_


@dataclass(frozen=True)
class Resumed:
    """Where a resumed run goes on."""

    position: dict[str, Any]  # what was stated when it was saved
    folder: Path
    reset: list[str]  # what could not be brought back and starts anew


class Checkpoint:
    """Saves everything of a training job in `folder`, whole or not at all, and brings it back bit for bit.

    Every rank calls every method, between two updates. The folder lies on a file system that all ranks see.
    safetensors and JSON, nothing is pickled. Weights and optimizer state are rank 0's, or every rank's
    shards, or with `LocalSteps` as `compressor` each rank's own; random numbers, `data` and `compressor` are
    always so. SIGTERM is caught until `close`, or until the end of a `with` block.

    Args:
        folder: where checkpoints go, each in a folder of its own.
        model: plain, DDP, compiled or FSDP2.
        optimizer: one, several or none, of the model's parameters.
        switch: gives the model its structure when the saved run had switched.
        also: averaged copies of the model (`torch.optim.swa_utils.AveragedModel`).
        scheduler: one or several; like `scaler`, `compressor` and `data` anything with `state_dict` and
            `load_state_dict` made of numbers, text and tensors.
        every: `step` saves when its `step=` is a multiple of this; without `step=` at every so many calls.
        keep: how many are kept; None keeps all.

    >>> import tempfile, torch
    >>> import pufferfish as pf
    >>> folder = tempfile.TemporaryDirectory()
    >>> def train(stop):
    ...     model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 4))
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...     switch = pf.Switch(rank=0.25, when=pf.AtStep(3))
    ...     with Checkpoint(folder.name, model, optimizer, switch=switch, every=2) as checkpoint:
    ...         at = checkpoint.resume()
    ...         for step in range(at.position["step"] if at else 0, stop):
    ...             switch.step(model, optimizer, step=step)
    ...             model(torch.randn(8, 64)).square().mean().backward()
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    ...             if checkpoint.step(step=step + 1):  # SIGTERM: saved, leave
    ...                 break
    ...     return at
    >>> train(5)
    >>> train(8).position
    {'step': 4}
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        switch: Switch | None = None,
        also: Iterable[nn.Module] = (),
        scheduler: Any = None,
        scaler: Any = None,
        compressor: Any = None,
        data: Any = None,
        every: int | None = None,
        keep: int | None = 3,
    ) -> None:
        for name, number in (("every", every), ("keep", keep)):
            if number is not None and number < 1:
                raise ValueError(f"Checkpoint: {name}={number}; it counts from 1, or is None")
        self.folder = Path(folder)
        self.model = model
        self.optimizers: list[optim.Optimizer] = as_list(optimizer)
        self.switch = switch
        self.also = list(also)
        schedulers = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
        # Of the whole job, and of each rank: what has a state_dict of its own.
        self._shared = {"scaler": scaler} | {
            f"scheduler {i}" if i else "scheduler": x for i, x in enumerate(schedulers)
        }
        self._own = {"compressor": compressor, "data": data}
        for name, x in (self._shared | self._own).items():
            if x is not None and not (hasattr(x, "state_dict") and hasattr(x, "load_state_dict")):
                raise TypeError(f"{name}: a {type(x).__name__} has no state_dict and load_state_dict")
        self.every, self.keep = every, keep
        self._calls = 0
        self._control = Control()
        self._sigterm = Sigterm()
        weakref.finalize(self, self._sigterm.close)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening for SIGTERM."""
        self._sigterm.close()

    def step(self, *, step: int | None = None, **position: Any) -> bool:
        """Call after every update. Saves when it is time, and when any rank has received SIGTERM.

        Returns:
            True in that last case: all is saved, leave the loop. All ranks hear of it at the same call; with
            several of them it is the call after the signal's, for the question travels behind a step.
        """
        self._calls += 1
        stop = self._control.anyone(self._sigterm.seen)
        now = self._calls if step is None else step
        if stop or (self.every is not None and now % self.every == 0):
            self.save(step=step, **position)
        return stop

    def save(self, *, step: int | None = None, **position: Any) -> Path:
        """Write a checkpoint of now, at a `position` stated in numbers and text; it comes back with `resume`.

        After any error the older checkpoints are as they were, and all ranks have raised it.
        """
        self._refuse_forgotten()
        position = ({} if step is None else {"step": step}) | position
        fresh = Path(self._control.first(lambda: str(folders.begin(self.folder))))
        try:
            parts: list[Any] = self._control.gather(
                lambda: [self._write(fresh, position), json.dumps(position)]
            )
            files = {name: known for part, _ in parts for name, known in part.items()}
            others = [rank for rank, (_, stated) in enumerate(parts) if stated != parts[0][1]]
            if others:
                raise ValueError(f"{self.folder}: ranks {others} state another position than rank 0")
            size = self._control.size
            return Path(self._control.first(lambda: str(folders.finish(fresh, files, size, step, self.keep))))
        finally:
            if self._control.rank == 0:
                shutil.rmtree(fresh, ignore_errors=True)

    def resume(self, damaged: Literal["raise", "previous"] = "raise") -> Resumed | None:
        """Bring back the newest checkpoint; None if there is none.

        Everything is read and compared first: after an error the model and all else are as they were.

        Args:
            damaged: what to do when the newest is not whole: "raise", or go on from the "previous" one.
        """
        self._refuse_forgotten()
        found = self._control.first(lambda: folders.newest(self.folder, damaged))
        if found is None:
            return None
        apply = self._control.together(lambda: self._prepared(*found))
        resumed = self._control.together(apply)
        if resumed.reset and self._control.rank == 0:
            warnings.warn(f"{resumed.folder}: starts anew: {'; '.join(resumed.reset)}", stacklevel=2)
        return resumed

    @staticmethod
    def plan_in(folder: str | Path, damaged: Literal["raise", "previous"] = "raise") -> Plan | None:
        """The plan of the newest checkpoint's model; None if there is none, or if it is dense.

        A model that is sharded (FSDP2) gets its low-rank structure before: `pf.reshape_(model, plan)`.
        """
        found = folders.newest(Path(folder), damaged)
        if found is None:
            return None
        saved = Saved(Path(found[0]))
        if saved.ranks and saved.plan is None:
            raise ValueError(f"{saved.path}: a sharded model saved without switch= does not tell its plan")
        return saved.plan

    def _write(self, fresh: Path, position: dict[str, Any]) -> dict[str, Any]:
        """This rank's files, and by what to know them again."""
        for name, value in position.items():
            wanted = int if name == "step" else int | float | str | None
            if not isinstance(value, wanted) or (name == "step" and value < 0):
                raise TypeError(f"{name}={value!r}: a position is numbers and text, and step a whole number")
        if not fresh.is_dir():
            raise OSError(f"{self.folder}: what rank 0 makes there is not seen here; all ranks must share it")
        rank, names, inner = self._control.rank, names_of(self.model), unwrap(self.model)
        parts = {name: state_of(x) for name, x in (self._shared | {"switch": self.switch}).items()}
        weights = own_state(inner)
        alone = getattr(self._own["compressor"], "trains_alone", False)
        # Not even DDP keeps buffers equal: it sends rank 0's around before a pass that changes them.
        differ = set(weights) if alone else {own_name(name) for name, _ in inner.named_buffers()}
        optimizers = [optimizer_state(optimizer, names) for optimizer in self.optimizers]
        states = {
            "model": weights,
            "optimizer": optimizers,
            "training": {
                "position": position,
                "ranks": ranks_of(inner),
                "plan": self._plan(),
                "averages": len(self.also),
                "parts": parts,
            },
        } | {f"average-{i}": own_state(average) for i, average in enumerate(self.also)}
        own = {
            "random": rng_state(),
            "buffers": {name: x for name, x in weights.items() if rank and name in differ},
            "optimizers": optimizers if rank and alone else None,
            "parts": {name: state_of(x) for name, x in self._own.items()},
        }
        return write(fresh, rank, states, own)

    def _refuse_forgotten(self) -> None:
        if self._own["compressor"] is None and compressor_of(self.model) is not None:
            raise ValueError(
                f"{self.folder}: this model is compressed, and what the compression keeps would be lost; "
                "give Checkpoint compressor=hook, which pf.compress returned"
            )

    def _plan(self) -> str | None:
        """What makes a dense model what this one is now."""
        ranks = ranks_of(self.model)
        report = self.switch.report if self.switch else None
        if report is not None and report.plan.ranks == ranks:
            return report.plan.to_json()
        return plan_of(self.model).to_json() if ranks and not is_sharded(self.model) else None

    def _prepared(self, path: str, digest: str) -> Callable[[], Resumed]:
        """Everything read and compared; what is returned puts it in place."""
        rank, size = self._control.rank, self._control.size
        saved = Saved(Path(path), self.model, digest=digest, rank=rank, size=size)
        to = saved.path, saved.ranks, saved.plan
        trial, optimizers = expected(*to, unwrap(self.model), self.optimizers, self.switch is not None)
        weights = saved.weights("model", trial)
        count = saved.training["averages"]
        if count != len(self.also):
            raise ValueError(f"{path}: it has {count} averaged models, here are {len(self.also)}; give also=")
        averages = [
            saved.weights(f"average-{i}", expected(*to, average)[0]) for i, average in enumerate(self.also)
        ]
        states = saved.optimizer_states(trial, optimizers, [type(o).__name__ for o in self.optimizers])
        there = saved.training["parts"] | (saved.own["parts"] if saved.own else saved.common())

        def apply() -> Resumed:
            if self.switch is not None and there["switch"] is not None:
                self.switch.restore_(self.model, self.optimizers, there["switch"])
            inner = unwrap(self.model)
            own = saved.own or {"buffers": {}}
            load_own_state(inner, weights | own["buffers"])
            for average, state in zip(self.also, averages, strict=True):
                restructure_(average, saved.ranks, saved.plan)
                load_own_state(average, state)
            for optimizer, state in zip(self.optimizers, own.get("optimizers") or states, strict=True):
                load_optimizer(optimizer, names_of(inner), state)
            for name, x in (self._shared | self._own).items():
                if x is not None and there.get(name) is not None:
                    x.load_state_dict(there[name])
            # Last: what came before may have drawn numbers.
            if saved.own is not None:
                set_rng_state(saved.own["random"])
            else:
                seed_rng(f"{digest} {rank} of {size}")
            return Resumed(saved.training["position"], saved.path, self._reset(saved, there))

        return apply

    def _reset(self, saved: Saved, there: dict[str, Any]) -> list[str]:
        """What starts anew: all that belongs to single ranks when their number changed, and what one side lacks.

        A compressor keeps what its workers shared.
        """
        given = {"switch": self.switch} | self._shared | self._own
        reset = []
        if saved.own is None:
            gone = ["random numbers", *(name for name in self._own if given[name] is not None)]
            reset += [f"{name} (saved by {saved.world} ranks, now {self._control.size})" for name in gone]
            given.pop("data")
        for name in given.keys() | there.keys():
            has, gets = there.get(name) is not None, given.get(name) is not None
            if has != gets:
                reset.append(f"{name} ({'none was given' if has else 'none was saved'})")
        return sorted(reset)
