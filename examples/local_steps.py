"""Local steps (DiLoCo): workers average their models every 20 updates instead of every gradient.

python examples/local_steps.py
torchrun --nproc-per-node 2 examples/local_steps.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pufferfish as pf
from pufferfish.lab.tasks.digits import digits

EPOCHS, H = int(os.environ.get("EPOCHS", 12)), 20


def diloco(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def main(rank: int, size: int) -> None:
    torch.manual_seed(rank)  # local.start broadcasts the weights of rank 0
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    data = TensorDataset(*digits())
    sampler: DistributedSampler[int] = DistributedSampler(data, size, rank)
    batches = DataLoader(data, 16, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    local = pf.LocalSteps(H, outer=diloco, method=pf.compression.BlockInt8())
    local.start(model)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            local.step(model)
    local.sync(model)  # average the updates since the last time
    x, y = digits(test=True)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"test accuracy {accuracy:.1%}")
    if rank == 0:
        sent = local.meter.wire_bytes / (EPOCHS * len(batches))
        ddp = 2 * (size - 1) / size * sum(p.nbytes for p in model.parameters())
        print(f"{sent:,.0f} bytes per step on the wire; DDP in fp32 sends {ddp:,.0f}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        main(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # all workers are done before the group is destroyed
        dist.destroy_process_group()
    else:
        main(0, 1)
