"""Accelerate training loop with a switch. Run it again to resume. On two CPU processes:

accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import pufferfish as pf
from pufferfish.integrations.accelerate import HookKwargs, checkpoint_with


def main(folder: str = "run", epochs: int = 6) -> None:
    data = [(torch.randn(64), i % 4) for i in range(256)]  # your data here
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[HookKwargs(register=pf.distributed.exact_)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(2))
    checkpoint_with(accelerator, switch, model, optimizer)
    saved = sorted(Path(folder).glob("epoch*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    for epoch in range(len(saved), epochs):
        if switch.step(model, optimizer, epoch=epoch):
            accelerator.print(switch.report)
            accelerator.log(switch.report.metrics, step=epoch)  # to your trackers: TensorBoard, W&B …
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(f"{folder}/epoch{epoch:04}")


if __name__ == "__main__":
    main()
