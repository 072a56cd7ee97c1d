"""Runs on meta tensors with known values, compared with the same code on ordinary tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pufferfish.planning import known_values
from pufferfish.planning.known_values import KnownValues

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
WEIGHT = nn.Parameter(torch.arange(8.0).view(4, 2))


def written(mask: Tensor) -> list[Any]:
    """Writes to views, and through views."""
    copied = mask.clone()
    copied[0].zero_()
    copied[:, 1:].T[-1] = 5
    copied.T.add_(1)
    return copied.tolist()


def filled(mask: Tensor) -> Any:
    out = torch.full((4,), -1, device=mask.device)
    out.masked_fill_(mask[0].bool(), 7)
    return out.tolist(), torch.zeros(3, device=mask.device).add_(1).sum().item()


KNOWN: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda mask: bool(mask.all()),
    "item": lambda mask: mask.sum().item(),
    "lengths": lambda mask: mask.sum(-1).tolist(),
    "equal": lambda mask: torch.equal(mask, mask.clone()),
    "cpu": lambda mask: mask.float().cpu().numpy().tolist(),
    "range": lambda mask: (torch.arange(4, device=mask.device) < mask.sum(1, keepdim=True)).tolist(),
    "causal": lambda mask: torch.ones(4, 4, device=mask.device).tril().sum().item(),
    "moved": lambda mask: (torch.tensor([3, 4]).to(mask.device) + 1).tolist(),
    "mixed devices": lambda mask: (mask[0] + torch.tensor([1, 2, 3, 4])).tolist(),
    "sorted": lambda mask: [x.tolist() for x in mask.sum(1).sort()],
    "nonzero": lambda mask: mask.nonzero().tolist(),
    "where": lambda mask: [x.tolist() for x in torch.where(mask.bool())],
    "one_hot": lambda mask: F.one_hot(mask).tolist(),
    "unique": lambda mask: torch.unique(mask, return_counts=True)[1].tolist(),
    "written": written,
    "filled": filled,
}


@pytest.mark.parametrize("name", KNOWN)
def test_values_of_inputs_are_known(name: str) -> None:
    known = KnownValues()
    mask = known.to_meta(MASK)
    with known:
        assert KNOWN[name](mask) == KNOWN[name](MASK.clone())
    assert mask.device.type == "meta"


SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows by mask": lambda mask, weight: weight[mask[0].bool()] * 2,
    "elements by mask": lambda mask, weight: weight.expand(2, 4, 2)[mask.bool()],
    "mask and index": lambda mask, weight: weight[mask[0].bool(), 1],
    "split": lambda mask, weight: weight.split(mask.sum(1).tolist())[0],
    "repeated": lambda mask, weight: weight.repeat_interleave(mask[0] + 1, 0),
    "embedding": lambda mask, weight: F.embedding(mask, weight),
    "with padding": lambda mask, weight: weight if mask.all() else weight @ weight.T,
    "finite": lambda mask, weight: weight if torch.isfinite(weight).all() else weight[:1],
    "not a number": lambda mask, weight: (
        weight[:1] if weight.isnan().any() or weight.isinf().any() else weight
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_may_depend_on_them(name: str) -> None:
    known = KnownValues()
    mask, weight = known.to_meta(MASK), known.to_meta(WEIGHT)
    expected = SHAPES[name](MASK, WEIGHT)
    with known:
        output = SHAPES[name](mask, weight)
        output.sum().backward()
    assert (output.shape, output.dtype, output.device.type) == (expected.shape, expected.dtype, "meta")
    assert weight.grad.shape == weight.shape
    assert weight.grad.is_meta


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "parameter": lambda mask, weight: weight.sum().item(),
    "mixed": lambda mask, weight: (weight * mask[0, :, None]).tolist(),
    "random": lambda mask, weight: torch.rand_like(mask.float()).sum().item(),
    "uninitialized": lambda mask, weight: torch.empty(3, device=mask.device).sum().item(),
    "written": lambda mask, weight: mask.float().copy_(weight[:2, :1]).sum().item(),
    "written through a view": lambda mask, weight: _write_to_row(mask.float(), weight).sum().item(),
}


def _write_to_row(x: Tensor, weight: Tensor) -> Tensor:
    row = x[0]
    row.copy_(weight[:, 0].detach())
    return x


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_values_are_not(name: str) -> None:
    known = KnownValues()
    mask, weight = known.to_meta(MASK), known.to_meta(WEIGHT)
    state = torch.get_rng_state()
    with known, pytest.raises((RuntimeError, NotImplementedError)):
        UNKNOWN[name](mask, weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_users_tensor_is_not_changed() -> None:
    known, mask = KnownValues(), MASK.clone()
    with known:
        assert known.to_meta(mask).zero_().sum().item() == 0
    assert torch.equal(mask, MASK)


def test_large_tensors_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_values, "_LARGEST", 6)
    known = KnownValues()
    small = known.to_meta(torch.ones(6))
    with known:
        assert small.sum().item() == 6
        with pytest.raises(RuntimeError):
            (small[:, None] + small).sum().item()
        with pytest.raises(RuntimeError):
            known.to_meta(torch.ones(7)).sum().item()


@pytest.mark.parametrize(
    "shapes", [((24, 8), (3, 8, 16)), ((3, 16, 8), (8, 24)), ((16, 24), (24, 8)), ((3, 16, 8), (3, 8, 24))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products(shapes: Any, dtype: torch.dtype) -> None:
    a, b = (torch.randn(shape, dtype=dtype) for shape in shapes)
    ends = None if a.dim() == b.dim() == 3 else torch.tensor([8, 8, 24], dtype=torch.int32)
    known = KnownValues()
    with known:
        meta = F.grouped_mm(
            *(x.to("meta") for x in (a, b)), offs=None if ends is None else known.to_meta(ends)
        )
    assert meta.shape == reference_grouped(a, b, ends).shape
    assert meta.dtype == dtype


def reference_grouped(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    if ends is None:
        return a @ b
    ranges = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
    if a.dim() == b.dim():
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in ranges])
    if a.dim() == 2:
        return torch.cat([a[i:j] @ W for (i, j), W in zip(ranges, b, strict=True)])
    return torch.cat([W @ b[:, i:j] for (i, j), W in zip(ranges, a, strict=True)], 1)
