"""Checkpoints with torch.save, before and after the switch. Run it again to resume."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import pufferfish as pf
from pufferfish.lab.tasks.digits import digits

EPOCHS, FILE = int(os.environ.get("EPOCHS", 8)), Path(os.environ.get("FILE", "own_checkpoint.pt"))
torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
switch = pf.Switch(rank=0.25, when=pf.AtEpoch(3))
saved = torch.load(FILE, weights_only=True) if FILE.exists() else None
if saved:
    switch.load_state_dict(saved["switch"])
    if switch.low_rank:
        pf.reshape_(model, switch.report.plan)  # low-rank structure first, then the weights
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
if saved:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
x, y = digits()
for epoch in range(saved["epoch"] if saved else 0, EPOCHS):
    switch.step(model, optimizer, epoch=epoch)
    for batch in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "switch": switch.state_dict()}
    torch.save(state | {"epoch": epoch + 1}, FILE)
with torch.no_grad():
    print(f"loss {F.cross_entropy(model(x), y).item():.6f} after {EPOCHS} epochs")
