"""The transformers Trainer: `train(trainer, switch)` in place of `trainer.train()`.

The switch changes the Trainer's model, its DDP wrapper and its optimizer in place between two updates; schedule,
step count, data order and loggers are not affected. The Trainer loads a checkpoint before it calls any callback and
ignores missing weights, so the callback gives the model the structure of the checkpoint when the Trainer loads it.
"""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import HubStrategy, TrainOutput

from ..distributed.ddp import find_ddp
from ..lowrank.factorize import ranks_of
from ..planning import read_json
from ..switching.moments import moment_text
from ..switching.switch import Switch
from .pretrained import from_pretrained as from_pretrained

_KEY = "pufferfish"  # in trainer_state.json, the last file of a checkpoint to be written


def train(
    trainer: Trainer,
    switch: Switch,
    resume_from_checkpoint: str | bool | None = None,
    *,
    by: Literal["epoch", "step"] | None = None,
    register: Callable[[DistributedDataParallel], Any] | None = None,
) -> TrainOutput:
    """Run `trainer.train` with the switch, in one process or under DDP.

    Build the model dense as usual: checkpoints from before and after the switch can be resumed.
    The parameters, energy kept and loss of the switch (`switch.report.metrics`) are logged by `trainer.log`.
    `load_best_model_at_end` considers only checkpoints after the switch. The trained model is low-rank: call
    `pufferfish.merge_(trainer.model)` to save or publish it as a dense one.

    Args:
        trainer: runs on one process or under DDP, not FSDP or DeepSpeed.
        switch: the switch to call.
        resume_from_checkpoint: as in `trainer.train`; True resumes from the last one in the output folder.
        by: call the switch at every "epoch" or "step". The default is "epoch" if a moment of the switch counts
            epochs (`AtEpoch`, `RanksSettle(every=…)`) or is your own function, and "step" otherwise.
        register: called with the DDP wrapper to register a communication hook, such as `pufferfish.distributed.exact_`.

    Returns:
        The result of `trainer.train`.

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
        raise ValueError("train: FSDP and DeepSpeed shard the model; use one process or DDP")
    callback = SwitchCallback(trainer, switch, by=by, register=register)
    trainer.add_callback(callback)
    try:
        return trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    finally:
        trainer.remove_callback(callback)
        del trainer._load_from_checkpoint


class SwitchCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that `train` adds to the Trainer: `trainer.add_callback(SwitchCallback(trainer, switch))` does the same."""

    def __init__(
        self,
        trainer: Trainer,
        switch: Switch,
        *,
        by: Literal["epoch", "step"] | None = None,
        register: Callable[[DistributedDataParallel], Any] | None = None,
    ) -> None:
        if trainer.args.push_to_hub and trainer.args.hub_strategy != HubStrategy.END:
            # The Trainer uploads model.safetensors of a checkpoint, and no low-rank checkpoint has this file.
            raise ValueError(
                f'train: hub_strategy="{trainer.args.hub_strategy.value}" would publish the weights from before the '
                'switch; set hub_strategy="end"'
            )
        self.trainer = trainer
        self.switch = switch
        self.by = by or switch.by
        self.register = register
        self._saved: dict[str, Any] | None = None
        self._inside_epoch = False
        trainer._load_from_checkpoint = self._load

    def _load(self, folder: str, model: nn.Module | None = None) -> None:
        """Give the model the structure of the checkpoint, then let the Trainer load it."""
        self._restore_structure(Path(folder))
        type(self.trainer)._load_from_checkpoint(self.trainer, folder, model)

    def _restore_structure(self, folder: Path) -> None:
        file = folder / "trainer_state.json"
        if not file.is_file():
            raise ValueError(f"{folder}: {file.name} is missing; pass a folder that the Trainer saved")
        # A checkpoint without our state comes from a dense run without a switch.
        callbacks = read_json(file).get("stateful_callbacks") or {}
        saved = callbacks.get(_KEY, Switch().state_dict())
        # Restores only the structure: the Trainer may not have created the optimizer yet.
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
            self._saved = None
        elif self.trainer.model_init is not None or (
            self.switch.low_rank and not ranks_of(self.trainer.model)
        ):
            self.switch.load_state_dict(Switch().state_dict())  # a second run, of a new model
        self._inside_epoch = state.epoch != int(state.epoch)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # A run that resumes inside an epoch has called the switch at its start.
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
        if (
            control.should_save or control.should_evaluate
        ):  # evaluation may select this checkpoint as the best
            self._store(state)

    on_epoch_end = on_step_end

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.switch.report is None and state.is_world_process_zero:
            when = moment_text(self.switch.when)
            warnings.warn(f"train: the run ended before the switch (when={when})", stacklevel=2)

    def _step(self, state: TrainerState, epoch: int | None, total: int) -> None:
        model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
        recorded = len(self.switch.history)
        if self.switch.step(model, optimizer, epoch=epoch, step=state.global_step, total=total):
            # The best checkpoint so far has another structure and cannot be loaded at the end.
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            recorded = -1
            assert self.switch.report is not None
            self.trainer.log(self.switch.report.metrics)
        if recorded != len(self.switch.history) or _KEY not in state.stateful_callbacks:
            self._store(state)

    def _store(self, state: TrainerState) -> None:
        state.stateful_callbacks[_KEY] = self.switch.state_dict()
