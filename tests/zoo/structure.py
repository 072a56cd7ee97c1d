"""Networks that are unusual in how their modules and parameters are held, shared or used."""
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from .case import Case, normal, tokens


class TiedAutoencoder(nn.Module):
    """Autoencoder whose decoder is F.linear with its encoder layers' transposed weights: no module call."""

    def __init__(self, features: int = 196, width: int = 128, code: int = 64) -> None:
        super().__init__()
        self.enter, self.narrow = nn.Linear(features, width), nn.Linear(width, code)
        self.middle = nn.Linear(code, code)
        self.narrow_bias = nn.Parameter(torch.zeros(width))
        self.enter_bias = nn.Parameter(torch.zeros(features))

    @property
    def decoder_weights(self) -> tuple[Tensor, Tensor]:
        return self.narrow.weight.t(), self.enter.weight.t()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.middle(self.narrow(F.relu(self.enter(x))).tanh())
        first, second = self.decoder_weights
        return F.linear(F.relu(F.linear(z, first, self.narrow_bias)), second, self.enter_bias), z


class Siamese(nn.Module):
    """One trunk registered under two names and called twice; the head sees their distance and product."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        trunk = nn.Sequential(
            *(nn.Conv2d(1, width, 5, 2, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(width * 16, 128), nn.ReLU(), nn.Linear(128, 64)),
        )
        self.left = trunk
        self.right = trunk
        self.head = nn.Linear(128, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.left(a), self.right(b)
        return self.head(torch.cat([(a - b).abs(), a * b], -1))


class MoELayer(nn.Module):
    """Switch layer: experts in a ModuleList, each token's output masked to and scaled by its top expert."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gate, chosen = self.router(y).softmax(-1).max(-1, keepdim=True)
        for i, expert in enumerate(self.experts):
            x = x + expert(y) * gate * (chosen == i)
        return x


class MoE(nn.Module):
    """Mixture of experts: routing depends on layers that may be replaced."""

    def __init__(self, vocab: int = 96, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.Sequential(MoELayer(width, 4), MoELayer(width, 4))
        self.out = nn.Linear(width, vocab)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(words)))


class TemporalBlock(nn.Module):
    """Two causal, dilated, weight-normalized convolutions with a plain residual projection."""

    def __init__(self, cin: int, cout: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(cin, cout, 3, padding=self.pad, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(cout, cout, 3, padding=self.pad, dilation=dilation))
        self.match = nn.Conv1d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x)[..., : -self.pad])
        y = F.relu(self.conv2(y)[..., : -self.pad])
        return F.relu(y + self.match(x))


class WeightNormTCN(nn.Module):
    """Temporal convolutional network: parametrized layers (weight computed on access) among plain ones."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(TemporalBlock(i, width, 2**n) for n, i in enumerate((64, width, width)))
        )
        self.mix = nn.Linear(width, 2 * width)
        self.out = weight_norm(nn.Linear(2 * width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.mix(self.blocks(x)[..., -1])))


CASES = {
    "tied_autoencoder": Case(build=TiedAutoencoder, inputs=normal((8, 196))),
    "siamese": Case(build=Siamese, inputs=normal((3, 1, 16, 16), (3, 1, 16, 16))),
    "moe": Case(build=MoE, inputs=tokens(96, (3, 12))),
    "weight_norm_tcn": Case(build=WeightNormTCN, inputs=normal((3, 64, 30))),
}
