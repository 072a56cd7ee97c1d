"""The transformers Trainer: `train(trainer, switch)` in place of `trainer.train()`.

The switch changes the Trainer's model, its DDP wrapper and its optimizer in place between two updates, so one
run goes through: schedule, step count, data order and loggers see nothing. Only checkpoints need care: the
Trainer loads one before any callback runs, and the model must have its structure by then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from ..distributed.rewrap import find_ddp
from ..switching.moments import AtFraction, AtStep
from ..switching.switch import Switch

_KEY = "pufferfish"  # in trainer_state.json, which is the last file of a checkpoint to be written


def train(
    trainer: Trainer,
    switch: Switch,
    resume_from_checkpoint: str | bool | None = None,
    *,
    by: Literal["epoch", "step"] | None = None,
    register: Callable[[DistributedDataParallel], Any] | None = None,
) -> TrainOutput:
    """`trainer.train`, with the switch in it, on one process or under DDP.

    Checkpoints from before and from after the switch can be resumed, with the model built dense as always.
    `load_best_model_at_end` chooses among those since the switch. At the end the model is low-rank: call
    `pufferfish.merge_(trainer.model)` before you save or publish it as an ordinary one.

    Args:
        resume_from_checkpoint: as in `trainer.train`; True takes the last one in the output folder.
        by: whether `switch.when` is asked at every epoch or every update. By default updates for `AtStep`
            and `AtFraction`, epochs for all others.
        register: registers a communication hook, given the DDP wrapper; `pufferfish.exact_` for one.

    >>> import pufferfish as pf, tempfile, torch
    >>> from transformers import Trainer, TrainingArguments
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    ...     def forward(self, x, labels):
    ...         return {"loss": torch.nn.functional.cross_entropy(self.layers(x), labels)}
    >>> data = [{"x": torch.randn(64), "labels": i % 4} for i in range(16)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     args = TrainingArguments(folder, max_steps=4, use_cpu=True, report_to=[], disable_tqdm=True)
    ...     switch = pf.Switch(rank=0.25, when=pf.AtStep(2))
    ...     trainer = Trainer(Net(), args, train_dataset=data)
    ...     steps = train(trainer, switch).global_step  # doctest: +ELLIPSIS
    {...}
    >>> steps, switch.report.plan.ranks
    (4, {'layers.0': {'': 16}})
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("train: the switch changes plain and DDP models; FSDP and DeepSpeed shard them")
    folder = resume_from_checkpoint
    if folder is True:
        folder = get_last_checkpoint(trainer.args.output_dir) or True
    callback = SwitchCallback(trainer, switch, by=by, register=register)
    if isinstance(folder, str | Path):
        callback.load(Path(folder))
    trainer.add_callback(callback)
    try:
        return trainer.train(resume_from_checkpoint=folder)
    finally:
        trainer.remove_callback(callback)


class SwitchCallback(TrainerCallback):  # type: ignore[misc]
    """What `train` adds to the Trainer. By hand, for a run that is not resumed: `trainer.add_callback(…)`."""

    def __init__(
        self,
        trainer: Trainer,
        switch: Switch,
        *,
        by: Literal["epoch", "step"] | None = None,
        register: Callable[[DistributedDataParallel], Any] | None = None,
    ) -> None:
        self.trainer = trainer
        self.switch = switch
        self.by = by or ("step" if isinstance(switch.when, AtStep | AtFraction) else "epoch")
        self.register = register
        self._saved: dict[str, Any] | None = None
        self._inside_epoch = False

    def load(self, folder: Path) -> None:
        """Give the model the structure that the checkpoint has, before the Trainer loads it.

        The Trainer does not mind missing weights, so a difference must not get past here.
        """
        file = folder / "trainer_state.json"
        if not file.is_file():
            raise ValueError(f"{folder}: it has no {file.name}; give a folder that the Trainer saved")
        # A checkpoint without our state comes from an ordinary dense run.
        noted = json.loads(file.read_text()).get("stateful_callbacks") or {}
        saved = noted.get(_KEY, Switch().state_dict())
        if saved["switched"] and self.trainer.model_init is not None:
            raise ValueError(
                f"{folder}: it was saved after the switch, and model_init would build a dense model for it; "
                "give the Trainer a model instead"
            )
        # The structure only: the optimizer that the switch goes on with may not be there yet.
        Switch().restore_(self.trainer.model, self.trainer.optimizer, saved)
        self._saved = saved

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        ddp = find_ddp(self.trainer.model_wrapped)
        if self.register is not None and ddp is not None:
            self.register(ddp)
        if self._saved is not None:
            self.switch.restore_(self.trainer.model_wrapped, self.trainer.optimizer, self._saved)
        self._inside_epoch = state.epoch != int(state.epoch)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # A run that resumes inside an epoch has been asked at its start already.
        if self.by == "epoch" and not self._inside_epoch:
            self._step(state, epoch=math.ceil(state.epoch), total=state.num_train_epochs)
        self._inside_epoch = False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.by == "step":
            self._step(state, epoch=None, total=state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if control.should_save or control.should_evaluate:  # evaluation may find that this is the best one
            self._note(state)

    on_epoch_end = on_step_end

    def _step(self, state: TrainerState, epoch: int | None, total: int) -> None:
        model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
        seen = len(self.switch.history)
        if self.switch.step(model, optimizer, epoch=epoch, step=state.global_step, total=total):
            # The best checkpoint so far has another structure: it cannot be loaded at the end.
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            seen = -1
        if seen != len(self.switch.history) or _KEY not in state.stateful_callbacks:
            self._note(state)

    def _note(self, state: TrainerState) -> None:
        state.stateful_callbacks[_KEY] = self.switch.state_dict()
