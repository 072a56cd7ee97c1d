"""Accelerate: save the switch with `save_state` and `load_state`, and register a communication hook in `prepare`.

`switch.step(model, optimizer, …)` accepts the objects that `accelerator.prepare` returns. If it returns True,
`accelerator.log(switch.report.metrics, step=step)` shows the switch in all trackers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..lowrank.optimizers import Optimizers
from ..planning import read_json, write_text
from ..switching.switch import Switch

_FILE = "switch.json"


def checkpoint_with(
    accelerator: Accelerator, switch: Switch, model: nn.Module, optimizer: Optimizers
) -> None:
    """Make `accelerator.save_state` save the switch, and `load_state` restore the model's structure first.

    Call it once, with the objects that `accelerator.prepare` returns. A checkpoint saved after the switch then
    loads into the dense model that the script builds.

    >>> import pufferfish as pf, tempfile, torch
    >>> def build():
    ...     accelerator = Accelerator(cpu=True)
    ...     model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    ...     model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ...     switch = pf.Switch(rank=0.25, when=pf.AtEpoch(0))
    ...     checkpoint_with(accelerator, switch, model, optimizer)
    ...     return accelerator, switch, model, optimizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     accelerator, switch, model, optimizer = build()
    ...     _ = switch.step(model, optimizer, epoch=0), accelerator.save_state(folder)
    ...     accelerator, switch, model, optimizer = build()
    ...     accelerator.load_state(folder)
    >>> model[0].ranks
    {'': 16}
    """

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if each_node else accelerator.is_main_process:
            write_text(Path(folder, _FILE), json.dumps(switch.state_dict()))

    def load(models: list[nn.Module], folder: str) -> None:
        file = Path(folder, _FILE)
        # A checkpoint without this file comes from a dense run without a switch.
        state = read_json(file) if file.is_file() else Switch().state_dict()
        switch.restore_(model, optimizer, state)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


@dataclass(kw_only=True)
class HookKwargs(DistributedDataParallelKwargs):  # type: ignore[misc]
    """Keyword arguments for DDP, and `register`, which `prepare` calls with the new DDP wrapper.

    >>> import pufferfish as pf
    >>> kwargs = HookKwargs(register=print, bucket_cap_mb=50)
    >>> accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    >>> kwargs.to_kwargs()
    {'bucket_cap_mb': 50}
    """

    register: Callable[[DistributedDataParallel], Any]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Accelerate finds handlers by their exact class, so this one reports the base class."""
        return DistributedDataParallelKwargs

    def to_dict(self, ignore_keys: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the arguments for DDP itself, without copying objects that `register` refers to."""
        excluded = {"register", "comm_hook", "comm_wrapper", "comm_state_option", *ignore_keys}
        return {name: value for name, value in vars(self).items() if name not in excluded}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        self.register(model)
