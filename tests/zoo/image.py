"""Convolutional image classifiers."""
# mypy: no-warn-return-any

from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, normal


def conv_bn(cin: int, cout: int, k: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout))


def classifier(width: int, classes: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and an identity or projection shortcut."""

    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv_bn(cin, cout, 3, stride)
        self.conv2 = conv_bn(cout, cout)
        same = stride == 1 and cin == cout
        self.shortcut = nn.Identity() if same else conv_bn(cin, cout, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1 reduce, grouped 3x3, 1x1 expand."""

    def __init__(self, cin: int, width: int, cout: int, stride: int = 1, *, groups: int) -> None:
        super().__init__()
        self.conv1 = conv_bn(cin, width, 1)
        self.conv2 = conv_bn(width, width, 3, stride, groups)
        self.conv3 = conv_bn(width, cout, 1)
        self.downsample = conv_bn(cin, cout, 1, stride) if stride > 1 or cin != cout else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv3(F.relu(self.conv2(F.relu(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def resnet_basic() -> nn.Module:
    """CIFAR ResNet: 3x3 stem without pooling, residual sums, strided 1x1 projections."""
    blocks = [BasicBlock(64, 64), BasicBlock(64, 128, 2), BasicBlock(128, 128)]
    return nn.Sequential(conv_bn(3, 64), nn.ReLU(), *blocks, classifier(128))


def resnext() -> nn.Module:
    """ResNeXt: grouped 3x3 convolutions, neither dense nor depthwise."""
    blocks = [Bottleneck(64, 128, 256, groups=8), Bottleneck(256, 256, 512, 2, groups=4)]
    return nn.Sequential(conv_bn(3, 64, 3, 2), nn.ReLU(), *blocks, classifier(512))


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise 3x3, project 1x1 without activation."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        hidden = 4 * cin
        self.body = nn.Sequential(
            *(conv_bn(cin, hidden, 1), nn.ReLU6()),
            *(conv_bn(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()),
            conv_bn(hidden, cout, 1),
        )
        self.residual = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobilenet_v2() -> nn.Module:
    """MobileNetV2: depthwise convolutions between linear bottlenecks, ReLU6."""
    plan = [(64, 64, 1), (64, 96, 2), (96, 96, 1)]
    blocks = [InvertedResidual(*widths) for widths in plan]
    last = (conv_bn(96, 256, 1), nn.ReLU6())
    return nn.Sequential(conv_bn(3, 64, 3, 2), nn.ReLU6(), *blocks, *last, classifier(256))


_IMAGES = normal((4, 3, 32, 32))

CASES = {
    "resnet_basic": Case(build=resnet_basic, inputs=normal((2, 3, 24, 24))),
    "resnext": Case(build=resnext, inputs=_IMAGES),
    "mobilenet_v2": Case(build=mobilenet_v2, inputs=_IMAGES),
}
