"""DDP with compressed gradients and checkpoints: `torchrun --nproc-per-node 2 examples/compressed.py runs/digits`.

Run it again after it was killed: it resumes exactly, because the checkpoint includes the error feedback.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf
from pufferfish.lab.tasks.digits import digits

STEPS, BATCH = 400, 32


def main(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    hook = pf.compress(ddp, pf.compression.PowerSGD(rank=4), optimizer=optimizer)
    images, labels = digits()
    with pf.Checkpoint(folder, ddp, optimizer, compressor=hook, every=50) as checkpoint:
        resumed = checkpoint.resume()
        for step in range(resumed.position["step"] if resumed else 0, STEPS):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randint(len(images), (size, BATCH), generator=generator)[rank]
            optimizer.zero_grad()
            F.cross_entropy(ddp(images[batch]), labels[batch]).backward()
            optimizer.step()
            if checkpoint.step(step=step + 1):  # SIGTERM or ctrl-C on any worker: saved, stop
                return
    if rank == 0:
        x, y = digits(test=True)
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean()
        ratio = hook.meter.plain_wire_bytes / max(hook.meter.wire_bytes, 1)
        print(f"test accuracy {accuracy:.1%}")
        print(f"{ratio:.1f} times fewer bytes on the wire than fp32")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.barrier()  # all workers are done before the group is destroyed
    dist.destroy_process_group()
