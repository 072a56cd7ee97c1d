"""DDP with compressed gradients that survives kills: `torchrun --nproc-per-node 2 examples/compressed.py runs/digits`.

Start it again after a kill and it goes on as if nothing had happened; memories of the compression come along.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pufferfish as pf
from pufferfish.lab.data.digits import digits

STEPS, BATCH = 400, 32


def main(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    hook = pf.compress(ddp, pf.compression.PowerSGD(rank=4), optimizer=optimizer)  # the line that matters
    images, labels = digits()
    with pf.Checkpoint(folder, ddp, optimizer, compressor=hook, every=50) as checkpoint:
        resumed = checkpoint.resume()
        for step in range(resumed.position["step"] if resumed else 0, STEPS):
            some = torch.randint(len(images), (size, BATCH), generator=torch.Generator().manual_seed(step))[
                rank
            ]
            optimizer.zero_grad()
            F.cross_entropy(ddp(images[some]), labels[some]).backward()
            optimizer.step()
            if checkpoint.step(step=step + 1):  # SIGTERM on any rank: saved, leave
                return
    if rank == 0:
        x, y = digits(test=True)
        with torch.no_grad():
            right = (model(x).argmax(1) == y).float().mean()
        sent = hook.meter
        print(f"{right:.1%} of the test digits right")
        print(
            f"{sent.plain_wire_bytes / max(sent.wire_bytes, 1):.1f} times fewer bytes on the wire than fp32"
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()
