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


class SEANet(nn.Module):
    """SEANet/EnCodec: strided Conv1d down, LSTM in the middle, ConvTranspose1d up with kernel 2 x stride."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        strides = (2, 3)
        enc: list[nn.Module] = [nn.Conv1d(1, width, 7, padding=3)]
        for s in strides:
            enc += [self.Residual(width), nn.ELU(), nn.Conv1d(width, width, 2 * s, s, padding=(s + 1) // 2)]
        self.encoder = nn.Sequential(*enc)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        dec: list[nn.Module] = []
        for s in reversed(strides):
            up = nn.ConvTranspose1d(width, width, 2 * s, s, padding=(s + 1) // 2, output_padding=s % 2)
            dec += [nn.ELU(), up, self.Residual(width)]
        self.decoder = nn.Sequential(*dec, nn.ELU(), nn.Conv1d(width, 1, 7, padding=3))

    class Residual(nn.Module):
        """Dilated 3-tap convolution and a 1-tap one around an identity."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.dilated = nn.Conv1d(width, width, 3, padding=2, dilation=2)
            self.pointwise = nn.Conv1d(width, width, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.pointwise(F.elu(self.dilated(F.elu(x))))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).transpose(1, 2)
        return self.decoder((z + self.lstm(z)[0]).transpose(1, 2))


def dcgan_generator() -> nn.Module:
    """DCGAN generator: transposed convolutions only, the first one from a 1x1 map, no bias, tanh."""
    layers: list[nn.Module] = []
    for cin, cout, stride, pad in ((64, 128, 1, 0), (128, 128, 2, 1), (128, 64, 2, 1)):
        conv = nn.ConvTranspose2d(cin, cout, 4, stride, pad, bias=False)
        layers += [conv, nn.BatchNorm2d(cout), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())


class SpaceToDepth(nn.Module):
    """ESPCN-like restoration: pixel (un)shuffle, reflect, replicate and circular padding, "same", "valid"."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.squeeze, self.expand = nn.PixelUnshuffle(2), nn.PixelShuffle(2)
        self.enter = nn.Conv2d(12, width, 3, padding=1, padding_mode="reflect")
        self.body = nn.ModuleList(
            [
                nn.Conv2d(width, width, (3, 5), padding="same", dilation=(2, 1)),
                nn.Conv2d(width, width, 4, padding="same", padding_mode="reflect"),
                nn.Conv2d(width, width, 3, padding=(1, 2), dilation=(1, 2), padding_mode="replicate"),
                nn.Conv2d(width, width, (5, 1), padding=(2, 0), padding_mode="circular"),
            ]
        )
        self.valid = nn.Conv2d(width, width, 3, padding="valid")
        self.leave = nn.Conv2d(width, 12, 3, padding="same", padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(self.squeeze(x))
        for conv in self.body:
            y = y + F.relu(conv(y))
        y = y + F.relu(F.pad(self.valid(y), (1, 1, 1, 1)))
        return x + self.expand(self.leave(y))


CASES = {
    "unet": Case(build=UNet, inputs=normal((2, 3, 22, 30))),
    "unet3d": Case(build=UNet3d, inputs=normal((1, 1, 8, 8, 8))),
    "wavenet": Case(build=WaveNet, inputs=normal((2, 1, 96))),
    "seanet": Case(build=SEANet, inputs=normal((2, 1, 96))),
    "dcgan_generator": Case(build=dcgan_generator, inputs=normal((4, 64, 1, 1))),
    "space_to_depth": Case(build=SpaceToDepth, inputs=normal((2, 3, 24, 32))),
}
