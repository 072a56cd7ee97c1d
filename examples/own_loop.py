"""Plain training loop with a switch, on one device or under torchrun.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pufferfish as pf
from pufferfish.lab.tasks.digits import digits

EPOCHS, WARM_UP = int(os.environ.get("EPOCHS", 12)), 3


def main() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    data = TensorDataset(*digits())
    sampler: DistributedSampler[int] | None = None
    if dist.is_initialized():
        model, sampler = nn.parallel.DistributedDataParallel(model), DistributedSampler(data)
    batches = DataLoader(data, 64, shuffle=sampler is None, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    switch = pf.Switch(rank=0.25, keep=["0"], when=pf.AtEpoch(WARM_UP))
    for epoch in range(EPOCHS):
        if switch.step(model, optimizer, epoch=epoch) and (sampler is None or dist.get_rank() == 0):
            print(switch.report)
        if sampler:
            sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    x, y = digits(test=True)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.barrier()  # all workers are done before the group is destroyed
        dist.destroy_process_group()
