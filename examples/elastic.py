"""Replicas that come and go, with torchft: kill one and start it again, while the other continues.

torchft_lighthouse --bind "[::]:29510" --min_replicas 1 --join_timeout_ms 60000
RUST_LOG=warn python examples/elastic.py        # in two more terminals
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import pufferfish as pf
from pufferfish.integrations.torchft import ElasticLocalSteps, Replicas
from pufferfish.lab.tasks.digits import digits

UPDATES, H = int(os.environ.get("UPDATES", 9000)), 20
LIGHTHOUSE = os.environ.get("TORCHFT_LIGHTHOUSE", "http://localhost:29510")


def diloco(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def main() -> None:
    torch.seed()  # each replica draws its own batches; local.start gives all of them the same weights
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    images, labels = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    switch = pf.Switch(rank=0.25, when=pf.AtStep(UPDATES // 3))
    replicas = Replicas(LIGHTHOUSE)
    local = ElasticLocalSteps(replicas, H, outer=diloco)
    local.start(model, optimizer, switch=switch)
    print(f"joined at update {local.position}")
    while local.position < UPDATES:
        if local.position % (UPDATES // 9) == 0:
            local.sync(model)  # the switch needs equal weights
            print(f"update {local.position}: {replicas.size} replicas")
            if switch.step(model, optimizer, step=local.position):
                local.start(model)
                print(switch.report)
        batch = torch.randint(len(images), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        local.step(model)
    local.sync(model)
    replicas.shutdown()
    images, labels = digits(test=True)
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
