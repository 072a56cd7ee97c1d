"""Networks, optimizers and steps for FSDP2 tests, and what they are compared by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import pufferfish as pf
from pufferfish.distributed.workers import Workers
from pufferfish.lowrank.rewrite import whole
from pufferfish.switching.fsdp2 import parameters, rebuild

Make = Callable[[nn.Module], torch.optim.Optimizer]


def image_net() -> nn.Module:
    """With sizes that two and four workers cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 33, 3, padding=1), nn.BatchNorm2d(33), nn.ReLU(), nn.Conv2d(33, 48, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(48 * 9, 65), nn.ReLU(), nn.Linear(65, 5),
    )  # fmt: skip


class Text(nn.Module):
    """Attention with its packed projections; tied, frozen and computed tensors; a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 11, bias=False)
        self.head.weight = self.embed.weight
        self.layer.linear1.bias.requires_grad_(False)
        self.register_buffer("places", torch.linspace(0, 1, 64), persistent=False)
        self.scale = torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x) + self.places * self.scale).mean(1))


class SelfAttention(nn.Module):
    """Projections q, k and v that read the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(3 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2)
        q, k, v = (layer(x).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head((x + self.o(attended.transpose(1, 2).flatten(2))).flatten(1))


def mixture() -> nn.Module:
    """A mixture of experts whose gate and up projections are matrices of their own, interleaved, with biases."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 5, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes)
    config._experts_implementation = "grouped_mm"

    class First(nn.Module):
        def forward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
            return outputs[0].flatten(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(2), GptOssMLP(config), First(), nn.Linear(192, 5))
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return model


def sharder(mesh: DeviceMesh, **options: Any) -> Callable[[nn.Module], None]:
    """Blocks first: here the layers that a plan may change, so that they are `FSDPLinear` and the like."""

    def shard(model: nn.Module) -> None:
        for child in model.children():
            block = isinstance(child, nn.Conv2d | nn.Linear | nn.TransformerEncoderLayer | pf.layers.LowRank)
            if block and child is not getattr(model, "head", None):  # tied: in one group with the embedding
                fully_shard(child, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    return shard


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # A bias of attention's keys has no gradient but rounding, which a smaller eps would blow up.
    return torch.optim.AdamW(model.named_parameters(), lr=1e-3, eps=1e-4)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=1e-3)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, text: bool = False) -> float:
    g = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randint(11, (3, 7), generator=g) if text else torch.randn(3, 3, 8, 8, generator=g)
    device = next(model.parameters()).device
    y = torch.randint(5, (3,), generator=g)
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Everything an optimizer keeps, whole, in the order of its groups."""
    return [
        {k: whole(v).clone() if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def same_as(model: nn.Module, plain: nn.Module, tolerance: float = 0.0) -> None:
    mine, theirs = parameters(model), parameters(plain)
    assert list(mine) == list(theirs)
    for name, p in mine.items():
        assert p.requires_grad == theirs[name].requires_grad, name
        torch.testing.assert_close(whole(p), theirs[name].detach(), rtol=tolerance, atol=tolerance)


def switched(mesh: DeviceMesh, build: Callable[[], nn.Module], warm_up: int = 1) -> tuple[Any, ...]:
    """A model before its switch, and how to rebuild it: without the decisions around it."""
    model = build()
    sharder(mesh)(model)
    optimizer = adamw(model)
    for step in range(warm_up):
        update(model, optimizer, step, build is Text)
    plan = pf.plan(build(), 0.25)

    def call(**other: Any) -> tuple[nn.Module, pf.Plan]:
        given = {"build": build, "shard": sharder(mesh), "plan": plan, "optimizer": optimizer, "carry": True}
        given["workers"] = Workers(dist.group.WORLD, torch.device("cpu"))
        return rebuild(model, **(given | other))

    return model, optimizer, call
