"""Lightning: a callback that runs the switch between two updates, on one device or under DDP."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.ddp import find_ddp
from ..lowrank.factorize import merge_
from ..switching.moments import AtStep, RanksSettle, moment_text
from ..switching.switch import Switch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer


class SwitchCallback(Callback):  # type: ignore[misc]
    """Calls the switch in `trainer.fit`: `Trainer(callbacks=[SwitchCallback(switch)])`.

    The trainer's loggers get the parameters, energy kept and loss of the switch (`switch.report.metrics`).
    Build the module dense as usual: checkpoints from before and after the switch can be resumed and evaluated.
    Averaged copies of the callbacks `WeightAveraging`, `EMAWeightAveraging` and `StochasticWeightAveraging` are changed too.
    Strategies that start workers from a running process (`ddp_spawn`, `ddp_fork`, `ddp_notebook`) return merged,
    dense weights to it.

    Args:
        switch: the switch to call.
        by: call the switch at every "epoch" or "step". The default is "epoch" if a moment of the switch counts
            epochs (`AtEpoch`, `RanksSettle(every=…)`) or is your own function, and "step" otherwise. `RanksSettle` needs the
            length of the run, and counts epochs where the number of steps is not known.
        register: called with the DDP wrapper to register a communication hook, such as `pufferfish.distributed.exact_`.
            Lightning's own `ddp_comm_hook` works only on CUDA.

    >>> import pufferfish as pf
    >>> switch = pf.Switch(rank=0.25, when=pf.AtFraction(0.1))
    >>> trainer = Trainer(callbacks=[SwitchCallback(switch)], accelerator="cpu", logger=False)
    >>> trainer.callbacks[0].by
    'step'
    """

    def __init__(
        self,
        switch: Switch,
        *,
        by: Literal["epoch", "step"] | None = None,
        register: Callable[[DistributedDataParallel], Any] | None = None,
    ) -> None:
        self.switch = switch
        self.by = by or switch.by
        self.register = register
        self._default_by = by is None
        self._saved: dict[str, Any] | None = None
        self._epoch: int | None = None  # last epoch for which the switch was called

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.strategy.restore_checkpoint_after_setup:
            raise ValueError(
                f"SwitchCallback: a {type(trainer.strategy).__name__} shards the model; use one device or DDP"
            )

        # Lightning calls callbacks after it loads the weights, and only the module before.
        def restore_structure(checkpoint: dict[str, Any]) -> None:
            type(pl_module).on_load_checkpoint(pl_module, checkpoint)
            saved = checkpoint.get("callbacks", {}).get(self.state_key)
            # Optimizers do not exist yet. A checkpoint without our state comes from a dense run without a switch.
            for model in (pl_module, *_averages(trainer)):
                Switch().restore_(model, None, saved["switch"] if saved else Switch().state_dict())

        pl_module.on_load_checkpoint = restore_structure

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(pl_module).pop("on_load_checkpoint", None)

    def state_dict(self) -> dict[str, Any]:
        return {"switch": self.switch.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved, self._epoch = state_dict["switch"], state_dict["epoch"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ddp = find_ddp(trainer.strategy.model)
        if self.register is not None and ddp is not None:
            self.register(ddp)
        if self._default_by and isinstance(self.switch.when, RanksSettle):
            self.by = "epoch" if _total_steps(trainer) is None else self.switch.by
        if self._saved is not None:
            self.switch.restore_(trainer.strategy.model, trainer.optimizers, self._saved)
            self._saved = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Not in on_train_epoch_start, which Lightning skips after resuming from some checkpoints.
        epoch, step = None, trainer.global_step
        if self.by == "step":
            total = _total_steps(trainer)
            if not pl_module.automatic_optimization and trainer.max_steps == -1 and not self._counts_updates:
                # global_step counts the updates of all optimizers, but the total is in batches.
                step = trainer.fit_loop.total_batch_idx
        elif trainer.current_epoch == self._epoch:
            return
        else:
            epoch = self._epoch = trainer.current_epoch
            total = trainer.max_epochs if trainer.max_epochs > 0 else None
        if pl_module.automatic_optimization:
            if batch_idx % trainer.accumulate_grad_batches:
                return
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()  # as Lightning is about to do: these gradients are already used
        changed = self.switch.step(
            trainer.strategy.model, trainer.optimizers, epoch=epoch, step=step, total=total,
            also=_averages(trainer),
        )  # fmt: skip
        if changed and self.switch.report is not None:
            # Not by `log`, which drops what falls between two multiples of log_every_n_steps.
            for logger in trainer.loggers:
                logger.log_metrics(self.switch.report.metrics, step=trainer.global_step)

    @property
    def _counts_updates(self) -> bool:
        """Whether a moment of the switch is a number of updates, and not a share of the run."""
        when, back = self.switch.when, self.switch.back
        return any(isinstance(moment, AtStep) for moment in (when, getattr(when, "latest", None), back))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.switch.report is None and trainer.is_global_zero:
            when = moment_text(self.switch.when)
            warnings.warn(f"SwitchCallback: the run ended before the switch (when={when})", stacklevel=2)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The process that started the workers loads the result into its dense module, ignoring other keys.
        if getattr(trainer.strategy, "_start_method", "popen") != "popen" and self.switch.low_rank:
            merge_(pl_module)


def _averages(trainer: Trainer) -> list[nn.Module]:
    """Averaged copies of the module, which Lightning's callbacks for EMA and SWA keep."""
    kept = (getattr(callback, "_average_model", None) for callback in trainer.callbacks)
    return [average for average in kept if isinstance(average, nn.Module)]


def _total_steps(trainer: Trainer) -> int | None:
    """Number of steps of the run; None without a limit, or on a stream of unknown length."""
    total = trainer.estimated_stepping_batches  # -1 on a stream without max_steps
    return int(total) if 0 < total < math.inf else None
