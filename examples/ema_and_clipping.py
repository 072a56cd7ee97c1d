"""Averaged model (EMA), clipped gradients, and weight decay of the product instead of its factors."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pufferfish as pf
from pufferfish.lab.tasks.digits import digits

EPOCHS = int(os.environ.get("EPOCHS", 10))
torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
pf.lowrank.FrobeniusDecay(model, optimizer, 0.05)  # after the switch: decays ‖UV‖² instead of ‖U‖² + ‖V‖²
x, y = digits()
held_out = x[:128], y[:128]
switch = pf.Switch(
    rank=0.25,
    when=pf.AtFraction(0.2),
    evaluate=lambda m: F.cross_entropy(m(held_out[0]), held_out[1]),
)
for epoch in range(EPOCHS):
    if switch.step(model, optimizer, epoch=epoch, total=EPOCHS, also=[ema]):
        print(switch.report)
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(model)
test_x, test_y = digits(test=True)
for name, net in (("live", model), ("averaged", ema)):
    with torch.no_grad():
        accuracy = (net(test_x).argmax(1) == test_y).float().mean()
    print(f"{name}: test accuracy {accuracy:.1%}")
