"""Networks of Linear (or pointwise) layers on data that is neither text nor images."""
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn

from .case import Case, Inputs, generator


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


CASES = {
    "dlrm": Case(build=DLRM, inputs=_clicks),
}
