"""Training loop that resumes bit for bit after a kill, SIGTERM, ctrl-C or restart. torchrun restarts it automatically:

torchrun --nproc-per-node 2 --max-restarts 10 examples/resumable.py runs/digits
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pufferfish as pf
from pufferfish.lab.tasks.digits import digits

EPOCHS = int(os.environ.get("EPOCHS", 12))


def main(folder: str) -> None:
    torch.manual_seed(0)
    layers = (
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Flatten(), *layers))
    pf.distributed.exact_(ddp)  # with three or more workers: sums that are the same after a restart
    torch.manual_seed(dist.get_rank())  # dropout differs between workers
    data = TensorDataset(*digits())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, EPOCHS * len(loader))
    switch = pf.Switch(rank=0.25, when=pf.AtFraction(0.25))
    guard = pf.distributed.FiniteGuard(ddp, on_bad="skip")
    with pf.Checkpoint(folder, ddp, optimizer, switch=switch, scheduler=scheduler, every=20) as checkpoint:
        at = checkpoint.resume(damaged="previous")
        done = at.position["step"] if at else 0
        for epoch in range(done // len(loader), EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in pf.checkpoint.skip_batches(loader, done - epoch * len(loader)):
                switch.step(ddp, optimizer, step=done, total=EPOCHS * len(loader))
                loss = F.cross_entropy(ddp(x), y)
                loss.backward()
                if guard(loss):
                    optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                done += 1
                if checkpoint.step(step=done):  # SIGTERM or ctrl-C on any worker: saved, stop
                    return
    if dist.get_rank() == 0:
        x, y = digits(test=True)
        ddp.eval()
        with torch.no_grad():
            print(f"test accuracy {(ddp.module(x).argmax(1) == y).float().mean():.1%}")
            print(f"loss {F.cross_entropy(ddp.module(x), y).item():.9f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/digits")
    dist.barrier()  # all workers are done before the group is destroyed
    dist.destroy_process_group()
