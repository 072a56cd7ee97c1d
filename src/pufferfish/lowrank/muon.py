"""`Muon`: `torch.optim.Muon` that updates matrices of equal shape together, also in a CUDA graph and under FSDP2."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..layers import LowRankEmbedding, local_part

Matrices = list[tuple[Tensor, Tensor, Tensor]]  # parameter, gradient and momentum

#: Largest number of elements in one batch on a worker: enough to fill a GPU, few in memory.
_BATCH = 2**24


class Muon(optim.Muon):
    """`torch.optim.Muon` with one batch of products for all matrices of equal shape.

    Arguments, updates (up to the rounding of bf16) and state dicts are those of `torch.optim.Muon`, so each loads the
    other's state. It launches fewer kernels, and a CUDA graph can capture it, with `lr` as a tensor on the device.

    Under FSDP2 each worker orthogonalises its share of the whole matrices. A batch takes two all-to-alls in bf16,
    where torch's Muon takes 11 to 16 collectives for each matrix.

    >>> import pufferfish as pf
    >>> model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    >>> matrices, others = pf.lowrank.muon_parameters(model)
    >>> optimizers = [pf.lowrank.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
    >>> model(torch.arange(9)).square().sum().backward()
    >>> for optimizer in optimizers:
    ...     optimizer.step()
    >>> [list(optimizers[0].state[p]) for p in matrices]
    [['momentum_buffer'], ['momentum_buffer']]
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            means: list[Tensor] = []
            self._init_group(group, params, grads, means)
            for batch in _batches(list(zip(params, grads, means, strict=True))):
                _update(group, batch)
        return loss


def muon_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Divide the parameters into those for Muon, the matrices of repeated blocks, and all others, for AdamW.

    A matrix of a block has a number in its name (`nn.ModuleList`, `nn.Sequential`) and does not belong to an embedding. Check
    this for your model: in a plain `nn.Sequential` the output layer has a number too.

    >>> blocks = nn.ModuleList([nn.Linear(4, 3)])
    >>> model = nn.ModuleDict({"words": nn.Embedding(9, 4), "blocks": blocks, "head": nn.Linear(3, 9)})
    >>> [[tuple(p.shape) for p in part] for part in muon_parameters(model)]
    [[(3, 4)], [(9, 4), (3,), (9, 3), (9,)]]
    """
    tables = (nn.Embedding, nn.EmbeddingBag, LowRankEmbedding)
    embeddings = {id(p) for x in model.modules() if isinstance(x, tables) for p in x.parameters()}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        in_block = p.dim() == 2 and id(p) not in embeddings and any(map(str.isdigit, name.split(".")))
        (matrices if in_block else others).append(p)
    return matrices, others


def orthogonalize(G: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton–Schulz iteration of Muon on a stack of matrices (k, m, n), in bf16: all singular values come near 1."""
    a, b, c = coefficients
    X = G.bfloat16()
    X = X.mT if G.shape[1] > G.shape[2] else X
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if G.shape[1] > G.shape[2] else X


def _batches(matrices: Matrices) -> Iterator[Matrices]:
    """Group matrices of equal shape, type and sharding, up to the largest size of a batch."""
    alike: dict[Any, Matrices] = {}
    for x in matrices:
        p = x[0]
        sharding = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        if sharding and not all(isinstance(placement, (Shard, Replicate)) for placement in sharding[1]):
            raise ValueError(
                f"Muon: a {p.shape[0]}×{p.shape[1]} matrix has the placements {sharding[1]}; "
                "shard it over one dimension of the mesh, or use torch.optim.Muon"
            )
        alike.setdefault((p.shape, p.dtype, p.device, sharding), []).append(x)
    for same in alike.values():
        p = same[0][0]
        size = max(1, _BATCH * _shards(p) // max(1, p.numel()))
        yield from (same[i : i + size] for i in range(0, len(same), size))


def _update(group: dict[str, Any], batch: Matrices) -> None:
    like = batch[0][0]
    params, grads, means = ([local_part(x) for x in column] for column in zip(*batch, strict=True))
    torch._foreach_lerp_(means, grads, 1 - group["momentum"])
    directions = torch._foreach_lerp(grads, means, group["momentum"]) if group["nesterov"] else means
    G = torch.empty(len(batch), *params[0].shape, dtype=torch.bfloat16, device=params[0].device)
    torch._foreach_copy_(list(G.unbind()), list(directions))  # and converts, in one kernel

    O = _orthogonalize(G, like, group["ns_coefficients"], group["ns_steps"], group["eps"])
    m, n = like.shape
    ratio = 0.2 * max(m, n) ** 0.5 if group["adjust_lr_fn"] == "match_rms_adamw" else max(1, m / n) ** 0.5
    lr = group["lr"]
    if isinstance(lr, Tensor):  # not read on the host
        lr = lr.to(G.device).reshape(())
    if group["weight_decay"]:
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_sub_(params, list((O.to(like.dtype) * (lr * ratio)).unbind()))


# Under FSDP2 a worker has rows of every matrix. It gets some of the matrices whole, and gives their rows back.


def _orthogonalize(G: Tensor, like: Tensor, *settings: Any) -> Tensor:
    if not isinstance(like, DTensor):
        return orthogonalize(G, *settings)
    mesh, shape = like.device_mesh, (len(G), *like.shape)
    stride = (like.numel(), like.shape[1], 1)
    rows = [Shard(x.dim + 1) if isinstance(x, Shard) else x for x in like.placements]
    whole = [Shard(0) if isinstance(x, Shard) else x for x in like.placements]

    def exchange(x: Tensor, source: list[Any], target: list[Any]) -> Tensor:
        stack = DTensor.from_local(x, mesh, source, run_check=False, shape=torch.Size(shape), stride=stride)
        return stack.redistribute(placements=target).to_local()

    return exchange(orthogonalize(exchange(G, rows, whole), *settings).contiguous(), whole, rows)


def _shards(p: Tensor) -> int:
    """Number of workers that share a tensor."""
    if not isinstance(p, DTensor):
        return 1
    sizes = zip(p.device_mesh.shape, p.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Shard))
