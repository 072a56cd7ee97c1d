"""FSDP2 inside machines, compression between them: `torchrun --nproc-per-node 4 examples/fsdp2_compressed.py`.

The model has two replicas, each sharded over half of the processes. With two machines,
`torchrun --nnodes 2 --nproc-per-node 8 …`, each machine holds one replica.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pufferfish as pf

EPOCHS, STEPS, TOKENS, REPLICAS = 6, 20, 32, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build() -> nn.Module:
    block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(TOKENS, 64), blocks, nn.Linear(64, TOKENS))


def main() -> None:
    shape = REPLICAS, dist.get_world_size() // REPLICAS
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # all replicas start from the same weights
    model = build().to(DEVICE)
    for block in model[1].layers:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    torch.manual_seed(dist.get_rank())  # each worker draws different data
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hook = pf.compress(model, pf.compression.BlockInt8(), replicas=mesh["replicate"].get_group())
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            x = torch.randint(TOKENS, (16, 8), device=DEVICE)
            loss = nn.functional.cross_entropy(model(x)[:, 0], x.amax(1))  # task: find the largest token
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    if dist.get_rank() == 0:
        ratio = hook.meter.plain_wire_bytes / hook.meter.wire_bytes
        print(f"{ratio:.2f} times fewer bytes between replicas")


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.barrier()  # all workers are done before the group is destroyed
    dist.destroy_process_group()
