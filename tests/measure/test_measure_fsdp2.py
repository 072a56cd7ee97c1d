"""`diagnose` of models that FSDP2 shards over all workers: its bytes are those that the workers then send."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import pufferfish as pf
from processes import in_processes
from pufferfish.compression import BlockInt8, Int4, NoCompression
from pufferfish.measure import Diagnosis, diagnose
from pufferfish.measure import link as link_module

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_BOTH_WAYS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Block(nn.Module):
    """A Llama block without rotary embedding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.before_attention(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocabulary: int = 61, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(policy: MixedPrecisionPolicy = BF16, reshard: bool | int | None = None, *shape: int) -> Any:
    torch.manual_seed(0)
    model = Llama()
    shape = shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, batches: int = 1) -> None:
    for step in range(first, first + steps):
        for batch in range(batches):
            model.set_requires_gradient_sync(batch == batches - 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * batch + dist.get_rank())
            tokens = torch.randint(61, (2, 17), generator=generator)
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def make_probe_fast() -> None:
    """One short measurement of everything: only the values of a real probe need more."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    link_module._SECONDS, link_module._MAX_REPEATS, link_module._CONTENTION_SECONDS = 0.0, 1, 0.01


def sent_in_step_4(model: Any, optimizer: Any, *methods: Any, batches: int = 1) -> float:
    """Bytes that a worker sends in the fourth step."""
    hook: Any = pf.compress(model, methods[0], parameters=methods[1], optimizer=optimizer)
    train(model, optimizer, 3, batches=batches)
    before = hook.meter.wire_bytes
    train(model, optimizer, 1, first=3, batches=batches)
    return float(hook.meter.wire_bytes - before)


def diagnosed(steps: int = 5) -> Diagnosis:
    make_probe_fast()
    model, optimizer = build()
    with diagnose(model, optimizer, steps=2, show=False) as found:
        train(model, optimizer, steps)
    return found


def bytes_are_those_that_are_sent(rank: int, size: int) -> None:
    """The meter counts an efficient reduce-scatter; gloo's, which `diagnose` knows, sends twice as much."""
    found = diagnosed()
    plain = (NoCompression(), NoCompression())
    gathers, reductions = (sum(x) for x in zip(*found.module_bytes.values(), strict=True))
    assert set(found.module_bytes) == {"blocks.0", "blocks.1", "blocks.2", "(root)"}
    assert found.wire_bytes == gathers + reductions
    assert sent_in_step_4(*build(), *plain) == gathers + reductions / 2
    options = {option.name.split(",")[0]: option for option in found.options}

    two = options["2 batches per step"].wire_bytes * 2  # of an update
    assert sent_in_step_4(*build(), *plain, batches=2) == two - reductions / 2
    kept = options["reshard_after_forward=False"].wire_bytes
    assert sent_in_step_4(*build(BF16_BOTH_WAYS, False), *plain) == kept - reductions / 4
    parameters = sum(p.numel() for p in Llama().parameters())
    for name in ("reshard_after_forward=False", "pf.compress(model)"):
        assert options[name].note == f"holds {2 * parameters / 1e6:.3g} MB of parameters"

    for method, name in ((BlockInt8(), "pf.compress(model)"), (Int4(), "pf.compress(model")):
        real = sent_in_step_4(*build(), method, pf.compression.Changed())
        assert options[name].wire_bytes == pytest.approx(real, rel=0.02)


def diagnosis_is_consistent(rank: int, size: int) -> None:
    found = diagnosed(6)
    assert (found.workers, found.steps) == (size, 2)
    assert all(found.parts[name] > 0 for name in ("forward", "backward", "exchange", "optimizer"))
    assert found.parts["hidden"] == 0
    assert found.link is not None
    assert found.ceiling >= 1
    assert 0 < found.changed[1] < 1
    assert [option.kind for option in found.options] == ["free"] * 3 + ["compression"] * 2
    for option in found.options:
        assert option.speedup == pytest.approx(found.predicted / option.step)
    assert "sent:      gathers" in str(found)
    assert all(option.name in str(found) for option in found.options)


def diagnosis_has_no_side_effects(rank: int, size: int) -> None:
    """Same weights and messages as without `diagnose`."""
    make_probe_fast()
    ends = []
    for watched in (False, True):
        model, optimizer = build()
        around: Any = diagnose(model, optimizer, steps=2, show=False) if watched else contextlib.nullcontext()
        with around:
            train(model, optimizer, 6)
        hook: Any = pf.compress(model, optimizer=optimizer)
        train(model, optimizer, 2, first=6)
        ends.append([p.to_local().clone() for p in model.parameters()])
        ends[-1].append(torch.tensor(hook.meter.wire_bytes))
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))


def what_cannot_be_timed_is_refused(rank: int, size: int) -> None:
    make_probe_fast()
    model, optimizer = build()
    with pytest.raises(ValueError, match="3 steps or more"), diagnose(model, show=False):
        train(model, optimizer, 2)
    pf.compress(model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"call pf\.compress afterwards"), diagnose(model, show=False):
        pass
    with pytest.raises(ValueError, match="1-D mesh"), diagnose(build(BF16, None, 1, 2)[0], show=False):
        pass


def two_machines(rank: int, size: int) -> None:
    """Two machines of two workers: shards inside them, and all-reduces of fp32 shards between them."""
    make_probe_fast()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    model, optimizer = build()
    with diagnose(model, optimizer, steps=1, show=False) as found:
        train(model, optimizer, 4)
    (option,) = (option for option in found.options if "2 × 2" in option.name)
    gradients = sum(4 * p.numel() for p in model.parameters())
    # 2 · 1/2 of the half that each worker of a machine averages; shards are padded
    assert option.wire_bytes == pytest.approx(gradients / 2, rel=0.01)
    model, _ = build(BF16, 2)
    with pytest.raises(ValueError, match="reshard_after_forward=True or False"), diagnose(model, show=False):
        train(model, optimizer, 1)


CASES = (
    bytes_are_those_that_are_sent,
    diagnosis_is_consistent,
    diagnosis_has_no_side_effects,
    what_cannot_be_timed_is_refused,
)


@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, 2) for case in CASES), (two_machines, 4)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_in_real_processes(case: Callable[[int, int], None], size: int) -> None:
    in_processes(case, size)
