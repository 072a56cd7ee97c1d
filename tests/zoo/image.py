"""Convolutional image classifiers."""
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, normal


def conv_bn(cin: int, cout: int, k: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout))


def classifier(width: int, classes: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class SqueezeExcite(nn.Module):
    """Channel gating from globally pooled features, with 1x1 convolutions on 1x1 maps."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


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
    """1x1 reduce, 3x3 (possibly grouped), 1x1 expand; squeeze-and-excite before the sum if asked for."""

    def __init__(
        self, cin: int, width: int, cout: int, stride: int = 1, groups: int = 1, se: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = conv_bn(cin, width, 1)
        self.conv2 = conv_bn(width, width, 3, stride, groups)
        self.conv3 = conv_bn(width, cout, 1)
        self.se = SqueezeExcite(cout, cout // 4) if se else nn.Identity()
        self.downsample = conv_bn(cin, cout, 1, stride) if stride > 1 or cin != cout else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv3(F.relu(self.conv2(F.relu(self.conv1(x)))))
        return F.relu(self.se(y) + (x if self.downsample is None else self.downsample(x)))


def resnet_basic() -> nn.Module:
    """CIFAR ResNet: 3x3 stem without pooling, residual sums, strided 1x1 projections."""
    blocks = [BasicBlock(64, 64), BasicBlock(64, 128, 2), BasicBlock(128, 128)]
    return nn.Sequential(conv_bn(3, 64), nn.ReLU(), *blocks, classifier(128))


def resnet_bottleneck() -> nn.Module:
    """ImageNet ResNet: 7x7 strided stem, max-pool, bottlenecks of unequal widths."""
    blocks = [Bottleneck(64, 64, 256), Bottleneck(256, 64, 256), Bottleneck(256, 128, 512, 2)]
    stem = (conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, classifier(512))


def resnext() -> nn.Module:
    """ResNeXt: grouped 3x3 convolutions, neither dense nor depthwise."""
    blocks = [Bottleneck(64, 128, 256, groups=8), Bottleneck(256, 256, 512, 2, groups=4)]
    return nn.Sequential(conv_bn(3, 64, 3, 2), nn.ReLU(), *blocks, classifier(512))


def se_resnet() -> nn.Module:
    """SE-ResNet: dense bottlenecks, with gates computed on 1x1 maps."""
    blocks = [Bottleneck(64, 64, 256, se=True), Bottleneck(256, 64, 256, 2, se=True)]
    return nn.Sequential(conv_bn(3, 64, 3, 2), nn.ReLU(), *blocks, classifier(256))


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise k x k, project 1x1 without activation; with SE it is EfficientNet's MBConv."""

    def __init__(self, cin: int, cout: int, *, k: int, stride: int, act: type[nn.Module], se: bool) -> None:
        super().__init__()
        hidden = 4 * cin
        gate = SqueezeExcite(hidden, max(16, cin // 4)) if se else nn.Identity()
        self.body = nn.Sequential(
            *(conv_bn(cin, hidden, 1), act()),
            *(conv_bn(hidden, hidden, k, stride, groups=hidden), act()),
            gate,
            conv_bn(hidden, cout, 1),
        )
        self.residual = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobilenet_v2() -> nn.Module:
    """MobileNetV2: depthwise convolutions between linear bottlenecks, ReLU6."""
    plan = [(64, 64, 1), (64, 96, 2), (96, 96, 1)]
    blocks = [InvertedResidual(i, o, k=3, stride=s, act=nn.ReLU6, se=False) for i, o, s in plan]
    last = (conv_bn(96, 256, 1), nn.ReLU6())
    return nn.Sequential(conv_bn(3, 64, 3, 2), nn.ReLU6(), *blocks, *last, classifier(256))


def efficientnet() -> nn.Module:
    """EfficientNet: MBConv with 5x5 depthwise kernels, SE inside the expansion, SiLU."""
    plan = [(64, 64, 1), (64, 96, 2), (96, 96, 1)]
    blocks = [InvertedResidual(i, o, k=5, stride=s, act=nn.SiLU, se=True) for i, o, s in plan]
    last = (conv_bn(96, 256, 1), nn.SiLU())
    return nn.Sequential(conv_bn(3, 64, 3, 2), nn.SiLU(), *blocks, *last, classifier(256))


class VGG(nn.Module):
    """VGG-BN: biased convolutions before BatchNorm in one Sequential, large fully connected head."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        cin = 3
        for item in (64, 64, "M", 128, 128, "M", 128, "M"):
            if isinstance(item, int):
                layers += [nn.Conv2d(cin, item, 3, padding=1), nn.BatchNorm2d(item), nn.ReLU(inplace=True)]
                cin = item
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            *(nn.Linear(cin * 16, 256), nn.ReLU(inplace=True), nn.Dropout(0.0)),
            *(nn.Linear(256, 256), nn.ReLU(inplace=True), nn.Dropout(0.0)),
            nn.Linear(256, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class DenseLayer(nn.Module):
    """BN-ReLU-Conv twice, its output appended to its input."""

    def __init__(self, cin: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(cin), nn.Conv2d(cin, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, y], 1)


def densenet() -> nn.Module:
    """DenseNet: concatenation instead of sums, normalization before the convolution, transitions."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2, 1, bias=False)]
    width, growth = 64, 32
    for block in range(2):
        for _ in range(3):
            layers.append(DenseLayer(width, growth))
            width += growth
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        if block == 0:
            layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*layers, classifier(width))


class Inception(nn.Module):
    """Inception-v3 mixed block: parallel branches, 1x7 and 7x1 kernels padded on one axis, pooling."""

    def __init__(self, cin: int, width: int = 64) -> None:
        super().__init__()
        self.direct = conv_bn(cin, width, 1)
        self.five = nn.Sequential(conv_bn(cin, 64, 1), nn.ReLU(), conv_bn(64, width, 5))
        self.seven = nn.Sequential(
            *(conv_bn(cin, 64, 1), nn.ReLU()),
            *(nn.Conv2d(64, 64, (1, 7), padding=(0, 3), bias=False), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Conv2d(64, width, (7, 1), padding=(3, 0), bias=False), nn.BatchNorm2d(width)),
        )
        self.pool = conv_bn(cin, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(F.avg_pool2d(x, 3, stride=1, padding=1))
        return F.relu(torch.cat([self.direct(x), self.five(x), self.seven(x), pooled], 1))


def inception() -> nn.Module:
    """Two Inception blocks with a strided reduction between them."""
    reduce = (conv_bn(256, 128, 3, 2), nn.ReLU())
    return nn.Sequential(
        conv_bn(3, 64, 3, 2), nn.ReLU(), Inception(64), *reduce, Inception(128), classifier(256)
    )


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, then LayerNorm and Linear layers on channels-last maps, scaled by a raw Parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    """ConvNeXt: patchify stem, Linear layers on 4-D input, kernel = stride downsampling."""
    stages = (ConvNeXtBlock(64), nn.Conv2d(64, 128, 2, 2), ConvNeXtBlock(128), ConvNeXtBlock(128))
    return nn.Sequential(nn.Conv2d(3, 64, 4, 4), *stages, classifier(128))


_IMAGES = normal((4, 3, 32, 32))

CASES = {
    "resnet_basic": Case(build=resnet_basic, inputs=normal((2, 3, 24, 24))),
    "resnet_bottleneck": Case(build=resnet_bottleneck, inputs=_IMAGES),
    "resnext": Case(build=resnext, inputs=_IMAGES),
    "se_resnet": Case(build=se_resnet, inputs=_IMAGES),
    "mobilenet_v2": Case(build=mobilenet_v2, inputs=_IMAGES),
    "efficientnet": Case(build=efficientnet, inputs=_IMAGES),
    "vgg_bn": Case(build=VGG, inputs=normal((2, 3, 32, 32))),
    "densenet": Case(build=densenet, inputs=_IMAGES),
    "inception": Case(build=inception, inputs=_IMAGES),
    "convnext": Case(build=convnext, inputs=_IMAGES),
}
