"""`VGG19`: with batch norm, for 32x32 images."""

from collections import OrderedDict

from torch import Tensor, nn

from .scaled import scaled

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
