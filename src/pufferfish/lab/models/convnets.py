"""ResNets and VGGs of the Pufferfish paper."""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from .scaled import scaled


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Convolution without bias that keeps the image size at stride 1."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Projection of the residual connection; None where the input already has the right shape."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, inner, 3, stride)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = conv(inner, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions, and a shortcut."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, inner, 1)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = conv(inner, inner, 3, stride)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = conv(inner, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A stem, four stages of `depths` blocks each, and a linear classifier.

    `inner` and `outputs` are the channels of the blocks in the first stage; each stage doubles both. `width` is a factor
    on all channels, for a narrower model.
    `cifar` is the stem for small images: a single 3x3 convolution without batch norm and pooling.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        stem: int,
        inner: int,
        outputs: int,
        classes: int,
        cifar: bool,
        width: float,
    ) -> None:
        super().__init__()
        stem = scaled(stem, width)
        self.conv1 = conv(3, stem, 3) if cifar else conv(3, stem, 7, stride=2)
        self.bn1 = nn.Identity() if cifar else nn.BatchNorm2d(stem)
        self.maxpool = nn.Identity() if cifar else nn.MaxPool2d(3, stride=2, padding=1)
        stages, channels = [], stem
        for index, depth in enumerate(depths):
            blocks = []
            for position in range(depth):
                stride = 2 if index > 0 and position == 0 else 1
                sizes = scaled(inner << index, width), scaled(outputs << index, width)
                blocks.append(block(channels, *sizes, stride))
                channels = sizes[1]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet18(*, classes: int = 10, channels: int = 64, width: float = 1.0) -> ResNet:
    """ResNet-18 for 32x32 images; `channels` are those of the first stage, `width` a factor on all."""
    return ResNet(
        BasicBlock,
        (2, 2, 2, 2),
        stem=channels,
        inner=channels,
        outputs=channels,
        classes=classes,
        cifar=True,
        width=width,
    )


def resnet50(*, classes: int = 1000, channels: int = 64, wide: int = 1, width: float = 1.0) -> ResNet:
    """ResNet-50 for ImageNet; `wide` multiplies the inner channels of the bottlenecks, `width` all channels."""
    return ResNet(
        Bottleneck,
        (3, 4, 6, 3),
        stem=channels,
        inner=wide * channels,
        outputs=4 * channels,
        classes=classes,
        cifar=False,
        width=width,
    )


def wide_resnet50_2(*, classes: int = 1000, width: float = 1.0) -> ResNet:
    """WideResNet-50-2 for ImageNet."""
    return resnet50(classes=classes, wide=2, width=width)


# Number of convolutions in each stage, and its width relative to the first stage.
STAGES = ((2, 1), (2, 2), (4, 4), (4, 8), (4, 8))


class VGG19(nn.Module):
    """Sixteen 3x3 convolutions without bias, each followed by batch norm, then `fcs` fully connected layers.

    Args:
        channels: of the first stage.
        width: factor on the channels of all layers, for a narrower model.
    """

    def __init__(self, *, classes: int = 10, fcs: int = 3, channels: int = 64, width: float = 1.0) -> None:
        super().__init__()
        features: OrderedDict[str, nn.Module] = OrderedDict()
        inputs, index = 3, 0
        for stage, (convs, factor) in enumerate(STAGES, start=1):
            outputs = scaled(factor * channels, width)
            for _ in range(convs):
                index += 1
                features[f"conv{index}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
                features[f"bn{index}"] = nn.BatchNorm2d(outputs)
                features[f"relu{index}"] = nn.ReLU(inplace=True)
                inputs = outputs
            features[f"pool{stage}"] = nn.MaxPool2d(2)
        self.features = nn.Sequential(features)

        classifier: OrderedDict[str, nn.Module] = OrderedDict()
        for index in range(1, fcs):
            classifier[f"dropout{index}"] = nn.Dropout(0.5)
            classifier[f"fc{index}"] = nn.Linear(inputs, inputs)
            classifier[f"relu{index}"] = nn.ReLU(inplace=True)
        classifier[f"fc{fcs}"] = nn.Linear(inputs, classes)
        self.classifier = nn.Sequential(classifier)

        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits
