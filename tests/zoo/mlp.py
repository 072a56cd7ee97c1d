"""Networks of Linear (or pointwise) layers on data that is neither text nor images."""
# mypy: no-warn-return-any

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Inputs, generator, normal


class NeRF(nn.Module):
    """NeRF: Fourier features, concatenated skip in mid-network, density and view-dependent colour heads."""

    def __init__(self, width: int = 128, depth: int = 6, bands: int = 6) -> None:
        super().__init__()
        self.bands, self.skip = bands, depth // 2
        points, views = 3 + 6 * bands, 3 + 6 * (bands // 2)
        fan_in = [points] + [width + points * (i == self.skip) for i in range(1, depth)]
        self.trunk = nn.ModuleList(nn.Linear(n, width) for n in fan_in)
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.colour = nn.Linear(width + views, width // 2), nn.Linear(width // 2, 3)

    @staticmethod
    def encode(x: Tensor, bands: int) -> Tensor:
        angles = x[..., None] * 2.0 ** torch.arange(bands, device=x.device, dtype=x.dtype)
        return torch.cat([x, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)

    def forward(self, position: Tensor, direction: Tensor) -> Tensor:
        p, d = self.encode(position, self.bands), self.encode(direction, self.bands // 2)
        h = p
        for i, layer in enumerate(self.trunk):
            h = F.relu(layer(torch.cat([h, p], -1) if i == self.skip else h))
        colour = F.relu(self.view(torch.cat([self.feature(h), d], -1)))
        return torch.cat([self.colour(colour).sigmoid(), F.softplus(self.density(h))], -1)


class DLRM(nn.Module):
    """DLRM: EmbeddingBags with offsets, bottom MLP, pairwise dot products, top MLP."""

    def __init__(self, width: int = 64, sizes: tuple[int, ...] = (50, 200, 30)) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in sizes)
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        pairs = len(sizes) * (len(sizes) + 1) // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        sparse = [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]
        z = torch.stack([x, *sparse], 1)
        rows, cols = torch.tril_indices(z.shape[1], z.shape[1], -1, device=z.device)
        return self.top(torch.cat([x, (z @ z.mT)[:, rows, cols]], 1)).sigmoid()


def _clicks() -> Inputs:
    g = generator()
    indices = [torch.randint(n, (9,), generator=g) for n in (50, 200, 30)]
    offsets = [torch.tensor(o) for o in ([0, 2, 3, 7], [0, 1, 5, 6], [0, 3, 6, 8])]
    return (torch.rand(4, 13, generator=g), indices, offsets), {}


class GCN(nn.Module):
    """Graph convolution: adjacency @ Linear without bias, the bias a raw Parameter added afterwards."""

    def __init__(self, features: int = 128, width: int = 64, classes: int = 7) -> None:
        super().__init__()
        widths = (features, width, width, classes)
        pairs = list(pairwise(widths))
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairs)
        self.biases = nn.ParameterList(nn.Parameter(0.01 * torch.randn(o)) for _, o in pairs)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        a = adjacency + torch.eye(len(x), device=x.device)
        scale = a.sum(1).rsqrt()
        a = scale[:, None] * a * scale
        for i, (layer, bias) in enumerate(zip(self.layers, self.biases, strict=True)):
            x = a @ layer(x) + bias
            x = F.relu(x) if i + 1 < len(self.layers) else x
        return x


def _graph() -> Inputs:
    g = generator()
    edges = (torch.rand(24, 24, generator=g) < 0.15).float().triu(1)
    return (torch.randn(24, 128, generator=g),), {"adjacency": edges + edges.T}


class PointNet(nn.Module):
    """PointNet: pointwise Conv1d with BatchNorm1d, a T-Net regressing a transform, max over points."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.tnet = nn.Sequential(self.shared(3, 64, 128), nn.AdaptiveMaxPool1d(1), nn.Flatten())
        self.transform = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 9))
        self.local = self.shared(3, 64, 64)
        self.features = self.shared(64, 128, 256)
        self.head = nn.Sequential(
            nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, classes)
        )

    @staticmethod
    def shared(*widths: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for cin, cout in pairwise(widths):
            layers += [nn.Conv1d(cin, cout, 1), nn.BatchNorm1d(cout), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, points: Tensor) -> Tensor:
        matrix = self.transform(self.tnet(points)).view(-1, 3, 3) + torch.eye(3, device=points.device)
        return self.head(self.features(self.local(matrix @ points)).amax(2))


CASES = {
    "nerf": Case(build=NeRF, inputs=normal((64, 3), (64, 3))),
    "dlrm": Case(build=DLRM, inputs=_clicks),
    "gcn": Case(build=GCN, inputs=_graph),
    "pointnet": Case(build=PointNet, inputs=normal((4, 3, 40))),
}
