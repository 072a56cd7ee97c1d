"""`Checkpoint`: save and resume a whole training job, across the switch and across a crash."""

from __future__ import annotations

import json
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn, optim

from ..compression.ddp_hook import find_hook
from ..distributed.ddp import find_ddp
from ..distributed.workers import Workers
from ..layers import meta_copy, own_name, rebuilt, unwrap
from ..lowrank.by_name import group_names, load_optimizer, names_by_id, optimizer_state
from ..lowrank.factorize import plan_of, ranks_of, reshape_
from ..lowrank.factors import nan_factors
from ..lowrank.optimizers import (
    Optimizers,
    as_list,
    check_optimizers,
    check_wrapper_passed,
    factorized_weights,
)
from ..lowrank.rewrite import Rewrite, commit
from ..planning import Plan
from ..switching.switch import Switch
from .files import (
    SavedCheckpoint,
    differing_state,
    is_sharded,
    load_model_state,
    model_state,
    write_files,
)
from .folder import FolderOwner, create_hidden_folder, newest_checkpoint, publish_by_rename
from .process import Sigterm, rng_state, seed_rng, set_rng_state

Ranks = dict[str, dict[str, int]]  # of a model's low-rank layers
Parts = Mapping[str, Any]  # objects with a state_dict, by name; None: there is none


@dataclass(frozen=True)
class Resumed:
    """Position of a resumed run."""

    position: dict[str, Any]  # the keyword arguments of the `save` or `step` that wrote the checkpoint
    folder: Path  # of the checkpoint
    reset: list[str]  # parts that were not restored, with the reason


class Checkpoint:
    """Saves a whole training job atomically in `folder` and restores it bit for bit.

    Call every method on all workers, between two updates. The folder is on a file system that all workers share,
    and belongs to one job at a time: while a job uses it, `resume` and `save` of another one raise ValueError.
    So does `save` of a second `Checkpoint` in the same process while the first is neither closed nor deleted;
    `resume` of the second, as in a restart, takes the folder from the first.
    Files are safetensors and JSON; nothing is pickled. Weights and optimizer state are saved once, by worker 0;
    with FSDP2 every worker saves its shards, and with `LocalSteps` as `compressor` its own model, optimizers,
    averages, schedulers and scaler. Buffers, random number generators, `data` and `compressor` are always saved per
    worker. SIGTERM is caught from the first `step`, or the start of a `with` block, until `close` or the end of
    the block; in the block the first ctrl-C is caught, too, and the second one interrupts.

    Args:
        folder: gets one subfolder per checkpoint.
        model: plain, DDP, compiled or FSDP2. After `switch.rebuild` the new model is saved.
        optimizer: one, several or none, over the model's parameters.
        switch: restores the low-rank structure if the checkpoint was saved after the switch.
        also: averaged copies of the model (`torch.optim.swa_utils.AveragedModel`).
        scheduler: one or several. Like `scaler`, `compressor` and `data`, any object with `state_dict` and
            `load_state_dict` whose state consists of numbers, strings and tensors.
        every: `step` saves when its `step=` is a multiple of this; without `step=`, after this many calls.
        keep: number of checkpoints to keep; None keeps all.

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
    ...             if checkpoint.step(step=step + 1):  # SIGTERM or ctrl-C: saved, stop
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
        if keep is not None and keep < 1:
            raise ValueError(f"Checkpoint: keep={keep} must be at least 1, or None")
        self.folder = Path(folder)
        self.model = model
        self.optimizers: list[optim.Optimizer] = as_list(optimizer)
        self.switch = switch
        self.also = list(also)
        schedulers = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
        # Objects with a state_dict: of the whole job, and of each worker.
        self._job_parts = {"scaler": scaler} | {
            f"scheduler {i}" if i else "scheduler": x for i, x in enumerate(schedulers)
        }
        self._worker_parts = {"compressor": compressor, "data": data}
        check_is_stateful(self._job_parts | self._worker_parts)
        self.every, self.keep = every, keep
        self._calls = 0
        self._workers = Workers.of_job("Checkpoint", side_group=True)
        self._owner: FolderOwner | None = None  # of worker 0, from the first `resume` or `save` on
        self._sigterm = Sigterm()
        weakref.finalize(self, self._sigterm.close)

    def __enter__(self) -> Checkpoint:
        self._sigterm.catch()
        self._sigterm.catch_ctrl_c(tell=self._workers.rank == 0)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the previous signal handlers, and let other jobs use the folder."""
        self._sigterm.close()
        self._owner = None

    def step(self, *, step: int | None = None, **position: Any) -> bool:
        """Save when it is due, or when any worker has received SIGTERM or ctrl-C. Call it after every update.

        Args:
            step: number of updates so far.
            position: as in `save`.

        Returns:
            True after SIGTERM or ctrl-C: a checkpoint is saved, leave the loop. All workers return True at the same call;
            with several workers it is the one after the signal, because the workers exchange the flag during a step.
        """
        self._calls += 1
        now = self._calls if step is None else step
        self._workers.operation = f"checkpoint.step({now})"
        self._sigterm.catch()  # not before: who never asks here could not be stopped
        stop = self._workers.any_async(self._sigterm.seen)
        if stop or (self.every is not None and now % self.every == 0):
            self.save(step=step, **position)
        return stop

    def save(self, *, step: int | None = None, **position: Any) -> Path:
        """Write a checkpoint into a hidden folder and make it visible by one rename (`publish_by_rename`).

        After an error the older checkpoints are unchanged and all workers have raised it.

        Args:
            step: number of updates so far; becomes part of the folder name.
            position: numbers and strings, returned by `resume`.

        Returns:
            The folder of the checkpoint.
        """
        self._workers.operation = "checkpoint.save"
        self._check_model()
        position = ({} if step is None else {"step": step}) | position
        hidden = Path(self._workers.run_on_first(self._begin_save))
        try:
            parts: list[Any] = self._workers.gather(
                lambda: [self._write(hidden, position), json.dumps(position)]
            )
            files = {name: record for records, _ in parts for name, record in records.items()}
            different = [worker for worker, (_, text) in enumerate(parts) if text != parts[0][1]]
            if different:
                raise ValueError(
                    f"{self.folder}: workers {different} pass another position than worker 0; pass the same step and position on all workers"
                )
            size = self._workers.size
            published = self._workers.run_on_first(
                lambda: str(publish_by_rename(hidden, files, size, step, self.keep))
            )
            return Path(published)
        finally:
            if self._workers.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)

    def resume(self, damaged: Literal["raise", "previous"] = "raise") -> Resumed | None:
        """Restore the newest checkpoint.

        All files are read and checked first: after an error the model and all other objects are unchanged. The exception
        is an error of a part's own `load_state_dict`, which is called last; the message names the part.

        Args:
            damaged: "raise" for an error if the newest checkpoint is damaged, "previous" to resume from the one
                before it.

        Returns:
            The position of the run; None if there is no checkpoint.
        """
        self._workers.operation = "checkpoint.resume"
        self._check_model()
        newest = self._workers.run_on_first(lambda: self._newest(damaged))
        if newest is None:
            return None
        apply = self._workers.run_on_all(lambda: self._prepare_resume(*newest))
        resumed = self._workers.run_on_all(apply)
        if resumed.reset and self._workers.rank == 0:
            warnings.warn(f"{resumed.folder}: not restored: {'; '.join(resumed.reset)}", stacklevel=2)
        return resumed

    @staticmethod
    def plan_in(folder: str | Path, damaged: Literal["raise", "previous"] = "raise") -> Plan | None:
        """Return the plan of the newest checkpoint's model; None if there is no checkpoint or the model is dense.

        Before resuming, a model to be sharded (FSDP2) gets its low-rank structure by `pf.reshape_(model, plan)`.
        """
        newest = newest_checkpoint(Path(folder), damaged)
        if newest is None:
            return None
        saved = SavedCheckpoint(Path(newest[0]))
        if saved.ranks and saved.plan is None:
            raise ValueError(
                f"{saved.path}: saved from a sharded low-rank model without switch=, so it has no plan; apply the plan of that job with "
                "pf.reshape_, and pass switch= to Checkpoint from now on"
            )
        return saved.plan

    def _check_model(self) -> None:
        self.model = rebuilt(self.model)
        if self._worker_parts["compressor"] is None and find_hook(self.model) is not None:
            raise ValueError(
                f"{self.folder}: the model's gradients are compressed, and that state would be lost; pass "
                "compressor=hook, the result of pf.compress, to Checkpoint"
            )

    def _begin_save(self) -> str:
        self._owner = FolderOwner.take(self.folder, self._owner)
        return str(create_hidden_folder(self.folder))

    def _write(self, hidden: Path, position: dict[str, Any]) -> dict[str, Any]:
        """Write this worker's files and return their manifest entries."""
        step = position.get("step", 0)
        if not isinstance(step, int) or step < 0:  # a folder of another name would not be found again
            raise TypeError(f"step={step!r} must be an int of at least 0")
        if not hidden.is_dir():
            raise OSError(
                f"{self.folder}: this worker does not see files of worker 0; all workers must share the folder"
            )
        names = names_by_id(self.model)
        optimizers = [optimizer_state(optimizer, names) for optimizer in self.optimizers]
        job_states = self._job_states(position, optimizers)
        return write_files(hidden, self._workers.rank, job_states, self._worker_state(optimizers))

    def _job_states(self, position: dict[str, Any], optimizers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the whole job by file, equal on all workers, except for shards."""
        inner = unwrap(self.model)
        plan = known_plan(self.model, self.switch)
        return {
            "model": model_state(inner),
            "optimizer": optimizers,
            "training": {
                "position": position,
                "ranks": ranks_of(inner),
                "plan": plan and plan.to_json(),
                "averages": len(self.also),
                "parts": state_dicts(self._job_parts | {"switch": self.switch}),
                "classes": {name: _class_name(x) for name, x in self._job_parts.items()},
            },
        } | {f"average-{i}": model_state(average) for i, average in enumerate(self.also)}

    def _worker_state(self, optimizers: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of this worker alone. What worker 0 has in the files of the job is not repeated."""
        worker, inner = self._workers.rank, unwrap(self.model)
        model_per_worker = getattr(self._worker_parts["compressor"], "has_model_per_worker", False)
        # Every worker saves and reads its shards in any case.
        own_optimizers = worker and model_per_worker and not is_sharded(inner)
        own_parts = self._job_parts if worker and model_per_worker else {}
        return {
            "random": rng_state(_gpus(inner)),
            "buffers": differing_state(inner, model_per_worker) if worker else {},
            "averages": [differing_state(x, model_per_worker) for x in (self.also if worker else [])],
            "optimizers": optimizers if own_optimizers else None,
            "parts": state_dicts(self._worker_parts | own_parts),
        }

    def _newest(self, damaged: str) -> tuple[str, str] | None:
        self._owner = FolderOwner.take_to_resume(self.folder, self._owner)
        return newest_checkpoint(self.folder, damaged)

    def _prepare_resume(self, path: str, digest: str) -> Callable[[], Resumed]:
        """Read and check everything, and return a function that restores it."""
        worker, size = self._workers.rank, self._workers.size
        saved = SavedCheckpoint(Path(path), self.model, digest=digest, worker=worker, world_size=size)
        passed = self._job_parts | self._worker_parts
        worker_state = saved.worker_state()
        parts = saved.training["parts"] | worker_state["parts"]
        try:
            weights, averages, optimizer_states = self._read_models(saved)
            _check_parts(passed, parts, saved.training.get("classes", {}))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        own_averages = worker_state.get("averages") or [{} for _ in averages]

        def apply() -> Resumed:
            if self.switch is not None and parts["switch"] is not None:
                self.switch.restore_(self.model, self.optimizers, parts["switch"])
            inner = unwrap(self.model)
            load_model_state(inner, weights | worker_state["buffers"])
            for average, state, own_state in zip(self.also, averages, own_averages, strict=True):
                restructure_(average, saved.ranks, saved.plan)
                load_model_state(average, state | own_state)
            states = worker_state.get("optimizers") or optimizer_states
            for optimizer, state in zip(self.optimizers, states, strict=True):
                load_optimizer(optimizer, names_by_id(inner), state)
            with warnings.catch_warnings():
                if worker or not saved.same_workers:  # worker 0, or `reset`, says it once for all
                    warnings.filterwarnings("ignore", ".*starts with empty error feedback")
                _load_parts(saved.path, passed, parts)
            # Last, because loading may draw random numbers.
            if saved.same_workers:
                set_rng_state(worker_state["random"], _gpus(inner))
            else:
                seed_rng(f"{digest} {worker} of {size}")
            lost = saved.not_restored(passed | {"switch": self.switch}, parts, size)
            return Resumed(saved.training["position"], saved.path, lost)

        return apply

    def _read_models(
        self, saved: SavedCheckpoint
    ) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the states of model, averages and optimizers; ValueError if they do not fit. Changes nothing."""
        now = unwrap(self.model)
        model, optimizers = expected_structure(
            saved.ranks, saved.plan, now, self.optimizers, self.switch is not None
        )
        if model is not now and saved.plan is not None:
            check_wrapper_passed(factorized_weights(now, saved.plan), find_ddp(self.model))
        weights = saved.weights("model", model)
        count = saved.training["averages"]
        if count != len(self.also):
            raise ValueError(f"saved with {count} averaged models, now {len(self.also)}; pass also=")
        averages = [
            saved.weights(f"average-{i}", expected_structure(saved.ranks, saved.plan, average)[0])
            for i, average in enumerate(self.also)
        ]
        class_names = [type(optimizer).__name__ for optimizer in self.optimizers]
        return weights, averages, saved.optimizer_states(model, optimizers, class_names)


def check_is_stateful(parts: Parts) -> None:
    """Raise TypeError if a part lacks `state_dict` or `load_state_dict`."""
    for name, x in parts.items():
        if x is not None and not (hasattr(x, "state_dict") and hasattr(x, "load_state_dict")):
            raise TypeError(f"{name} is a {type(x).__name__} without state_dict and load_state_dict")


def known_plan(model: nn.Module, switch: Switch | None) -> Plan | None:
    """Return the plan that makes the dense model this one; None if it is dense or not known."""
    ranks, report = ranks_of(model), switch.report if switch else None
    if report is not None and report.plan.ranks == ranks:
        return report.plan
    return plan_of(model) if ranks and not is_sharded(model) else None


def state_dicts(parts: Parts) -> dict[str, Any]:
    """Return the state of each part."""
    return {name: None if x is None else x.state_dict() for name, x in parts.items()}


def _class_name(x: Any) -> str:
    """Return the class of a part; for a scheduler of schedulers with theirs.

    >>> from torch import nn, optim
    >>> optimizer = optim.SGD(nn.Linear(1, 1).parameters())
    >>> _class_name(optim.lr_scheduler.ChainedScheduler([optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]))
    'ChainedScheduler(ExponentialLR)'
    """
    inner = [_class_name(scheduler) for scheduler in getattr(x, "_schedulers", ())]
    return type(x).__name__ + (f"({', '.join(inner)})" if inner else "")


def _gpus(model: nn.Module) -> list[torch.device]:
    """GPUs that hold the model. The current device may be another one."""
    found = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return sorted(found, key=lambda device: device.index or 0)


def expected_structure(
    ranks: Ranks,
    plan: Plan | None,
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer] = (),
    may_change: bool = True,
) -> tuple[nn.Module, list[optim.Optimizer]]:
    """Return model and optimizers with the structure of the saved ones; `model` itself is not changed.

    These are the given objects if their structure fits, otherwise a converted copy on the meta device.

    Args:
        ranks: ranks of the saved model's low-rank layers.
        plan: the plan that makes a dense model the saved one.
        may_change: whether a dense model may be converted.
    """
    current = ranks_of(model)
    for name, p in unwrap(model).named_parameters():
        if p.is_meta:
            raise ValueError(f"{name} is on the meta device; call model.to_empty(device=…) before resume")
    if current == ranks:
        return model, list(optimizers)
    if current or plan is None or not may_change or is_sharded(model):
        raise ValueError(
            f"the saved model is {_structure(ranks)}, this one is {_structure(current)}; build it dense and "
            "pass switch=, or call pf.reshape_(model, pf.Checkpoint.plan_in(folder)) before wrapping it"
        )
    names, copy = names_by_id(model), meta_copy(model)
    by_name = {own_name(name): p for name, p in unwrap(copy).named_parameters()}
    stand_ins: list[optim.Optimizer] = []
    for optimizer in optimizers:
        groups = [{"params": [by_name[name] for name in group]} for group in group_names(optimizer, names)]
        # Muon takes matrices only, so some of its factors go to another optimizer.
        kind = optim.Muon if isinstance(optimizer, optim.Muon) else optim.SGD
        stand_ins.append(kind(groups))
    reshape_(unwrap(copy), plan, stand_ins)
    return copy, stand_ins


def _structure(ranks: Ranks) -> str:
    return f"low-rank in {len(ranks)} layers" if ranks else "dense"


def _check_parts(parts: Parts, states: Mapping[str, Any], classes: Mapping[str, str]) -> None:
    """Raise ValueError if a part cannot load its saved state, as far as that is known without loading it.

    Args:
        classes: `class_name` of the parts that were saved, where it is known.
    """
    for name, x in _with_state(parts, states).items():
        now = _class_name(x)
        if classes.get(name, now) != now:
            raise ValueError(f"{name} was saved as {classes[name]}, but is {now}; pass the same class")
        if hasattr(x, "check_state_dict"):
            try:
                x.check_state_dict(states[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def _with_state(parts: Parts, states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that have a saved state."""
    return {name: x for name, x in parts.items() if x is not None and states.get(name) is not None}


def restructure_(
    model: nn.Module, ranks: Ranks, plan: Plan | None, optimizers: Sequence[optim.Optimizer] = ()
) -> None:
    """Give a dense model, such as an averaged copy, the structure that `expected_structure` has checked."""
    if plan is not None and ranks_of(model) != ranks:
        change = Rewrite(unwrap(model), check_optimizers(optimizers))
        change.factorize(plan, nan_factors)
        commit([change], wrappers=[find_ddp(model)])


def _load_parts(path: Path, parts: Parts, states: Mapping[str, Any]) -> None:
    """Load the saved state of each part that has one; ValueError names a part that fails."""
    for name, x in _with_state(parts, states).items():
        try:
            x.load_state_dict(states[name])
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            message = f"{path}: {name}: {type(error).__name__}: {error}"
            raise ValueError(f"{message}; pass the {name} that was saved") from error
