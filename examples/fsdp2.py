"""Switch under FSDP2, on CPUs or GPUs: `torchrun --nproc-per-node 2 examples/fsdp2.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pufferfish as pf

EPOCHS, STEPS, TOKENS = 6, 20, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build() -> nn.Module:
    block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(TOKENS, 64), blocks, nn.Linear(64, TOKENS))


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for block in model[1].layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    torch.manual_seed(0)
    model = build().to(DEVICE)
    shard(model)
    torch.manual_seed(dist.get_rank())  # each worker draws different data
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(2))
    for epoch in range(EPOCHS):
        model, optimizer = switch.rebuild(model, optimizer, build=build, shard=shard, epoch=epoch)
        for _ in range(STEPS):
            x = torch.randint(TOKENS, (16, 8), device=DEVICE)
            loss = nn.functional.cross_entropy(model(x)[:, 0], x.amax(1))  # task: find the largest token
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if dist.get_rank() == 0:
            count = sum(p.numel() for p in model.parameters())
            print(f"epoch {epoch}: loss {loss:.3f}, {count:,} parameters")
    if dist.get_rank() == 0:
        print(switch.report)


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.barrier()  # all workers are done before the group is destroyed
    dist.destroy_process_group()
