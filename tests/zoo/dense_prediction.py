"""Networks whose output is a signal, an image or a volume: most have transposed convolutions."""
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, normal


def double_conv(cin: int, cout: int) -> nn.Sequential:
    first = (nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU())
    return nn.Sequential(*first, nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU())


class UNet(nn.Module):
    """U-Net: skips across resolutions; ConvTranspose2d called with output_size, as odd sizes need."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter = double_conv(3, width)
        self.down = nn.ModuleList([double_conv(width, width), double_conv(width, 2 * width)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(2 * width, width, 2, 2), nn.ConvTranspose2d(width, width, 2, 2)]
        )
        self.merge = nn.ModuleList([double_conv(2 * width, width), double_conv(2 * width, width)])
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = merge(torch.cat([skip, up(x, output_size=skip.shape[-2:])], 1))
        return self.out(x)


class ResidualBlock3d(nn.Module):
    """Two 3x3x3 convolutions with InstanceNorm and a projection shortcut."""

    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv3d(cin, cout, 3, stride, 1), nn.InstanceNorm3d(cout, affine=True)
        self.conv2, self.norm2 = nn.Conv3d(cout, cout, 3, 1, 1), nn.InstanceNorm3d(cout, affine=True)
        self.skip = nn.Conv3d(cin, cout, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm1(self.conv1(x)), 0.01)
        return F.leaky_relu(self.norm2(self.conv2(y)) + self.skip(x), 0.01)


class UNet3d(nn.Module):
    """Residual 3-D U-Net: Conv3d, ConvTranspose3d with output_padding, a (1, 2, 2) anisotropic level."""

    def __init__(self) -> None:
        super().__init__()
        self.enc1 = ResidualBlock3d(1, 64)
        self.enc2 = ResidualBlock3d(64, 64, 2)
        self.bottom = nn.Conv3d(64, 128, (1, 3, 3), (1, 2, 2), (0, 1, 1))
        self.up2 = nn.ConvTranspose3d(128, 64, (1, 2, 2), (1, 2, 2))
        self.up1 = nn.ConvTranspose3d(64, 64, 3, 2, padding=1, output_padding=1)
        self.out = nn.Conv3d(64, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.enc1(x)
        low = self.enc2(high)
        return self.out(F.relu(self.up1(F.relu(self.up2(F.relu(self.bottom(low)))) + low) + high))


class WaveNet(nn.Module):
    """WaveNet: causal dilated Conv1d with gated activations, residual and summed skip outputs."""

    def __init__(self, width: int = 64, classes: int = 64) -> None:
        super().__init__()
        self.dilations = (1, 2, 4, 8)
        self.front = nn.Conv1d(1, width, 1)
        self.gated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.dilations)
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.dilations[1:])
        self.skip = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in self.dilations)
        self.end = nn.Sequential(
            nn.ReLU(), nn.Conv1d(2 * width, width, 1), nn.ReLU(), nn.Conv1d(width, classes, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        total = x.new_zeros(())
        for i, d in enumerate(self.dilations):
            tanh, gate = self.gated[i](F.pad(x, (d, 0))).chunk(2, 1)
            y = tanh.tanh() * gate.sigmoid()
            total = total + self.skip[i](y)
            if i < len(self.residual):
                x = x + self.residual[i](y)
        return self.end(total)


CASES = {
    "unet": Case(build=UNet, inputs=normal((2, 3, 22, 30))),
    "unet3d": Case(build=UNet3d, inputs=normal((1, 1, 8, 8, 8))),
    "wavenet": Case(build=WaveNet, inputs=normal((2, 1, 96))),
}
