"""Two optimizers, Muon for matrices and AdamW for the rest: pass both to the switch as a list."""

import os

import torch
import torch.nn.functional as F
from torch import nn

import pufferfish as pf
from pufferfish.lab.tasks.digits import digits

EPOCHS = int(os.environ.get("EPOCHS", 10))
torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
matrices = [p for p in model.parameters() if p.dim() == 2]
optimizers = [
    pf.lowrank.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw"),
    torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-3),
]
schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, EPOCHS) for o in optimizers]
switch = pf.Switch(rank=0.25, when=pf.AtEpoch(2))
x, y = digits()
for epoch in range(EPOCHS):
    if switch.step(model, optimizers, epoch=epoch):
        print(switch.report)
    for batch in torch.randperm(len(x)).split(64):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        for optimizer in optimizers:
            optimizer.step()
    for schedule in schedules:
        schedule.step()
test_x, test_y = digits(test=True)
with torch.no_grad():
    print(f"test accuracy {(model(test_x).argmax(1) == test_y).float().mean():.1%}")
