"""Blocks that recompute: what they keep, gradients against blocks that keep everything, and where they run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_storages import LiveStorages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import pufferfish as pf
from processes import in_processes
from pufferfish.lab.models.gpt import GPT
from pufferfish.layers.recompute import policy_with_random
from pufferfish.layers.shared_input import SharedInput

D, HEADS, TIME = 64, 4, 8


def gelu_block() -> nn.Module:
    return GPT(vocabulary=2, d=D, layers=1, heads=HEADS, context=TIME).blocks[0]


class GatedBlock(nn.Module):
    """Pre-norm block with grouped-query attention, rotated queries and keys, and a gated feed-forward layer."""

    def __init__(self, d: int = D, heads: int = HEADS, inner: int = 4 * D) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k, self.v = nn.Linear(d, d // 4, bias=False), nn.Linear(d, d // 4, bias=False)
        self.gate, self.up = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False)
        self.down = nn.Linear(inner, d, bias=False)
        angles = torch.randn(TIME, d // heads)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: Tensor) -> Tensor:
        half = x.chunk(2, -1)
        return x * self.cos + torch.cat([-half[1], half[0]], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            p(y).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            self.rotated(q), self.rotated(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class DropoutBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: Tensor | None = None, debug: bool = False) -> Tensor:
        y = self.drop(self.b(self.drop(F.gelu(self.a(x)))))
        return x + (y if scale is None else y * scale)


class ConvBlock(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.GroupNorm(2, D), nn.Conv2d(D, D, 3, padding=1), nn.GELU(), nn.Conv2d(D, D, 3))


class Blocks(nn.Module):
    def __init__(self, build: Callable[[], nn.Module], count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(build() for _ in range(count))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **kwargs)
        return x


def low_rank(model: nn.Module, example: Tensor | None = None) -> nn.Module:
    """Factorize; with an example, projections that read the same tensor share a product."""
    pf.factorize_(model, pf.plan(model, rank=0.25, multiple=1, example=example))
    return model


def recomputing(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    assert pf.recompute_(model, ["blocks.*"]) == [f"blocks.{i}" for i in range(len(model.blocks))]
    return model


def gradients(
    model: nn.Module, *args: Any, amp: bool = False, cache: bool = True, times: int = 1, **kwargs: Any
) -> list[Tensor]:
    torch.manual_seed(1)
    # With autocast's cache the gradients of a weight that is used twice are added in 16 bits.
    with torch.autocast("cpu", torch.bfloat16, enabled=amp, cache_enabled=cache):
        output = model(*args, **kwargs)
        for _ in range(times - 1):
            output = model(output, **kwargs)
    model.zero_grad()
    output.float().square().mean().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    assert all(map(torch.equal, a, b))


# What a block keeps, in units of tokens × width, against the count on paper.


def kept(block: nn.Module, run: Callable[..., Tensor], x: Tensor | None = None) -> float:
    x = torch.randn(2, TIME, D, requires_grad=True) if x is None else x
    with LiveStorages([*block.parameters(), *block.buffers(), x]) as storages:
        output = run(x)
    assert output.requires_grad
    return storages.nbytes() / x.nbytes  # the output stands for the input, which belongs to the block before


LOG_SUMS = HEADS / D  # of attention


@pytest.mark.parametrize(
    ("build", "norms", "everything", "ours", "dense", "dense_ours"),
    [
        # x, norm 2; q, k, v 3; attention 1; x, norm 2; up, GELU 8; first factors 6/4
        (gelu_block, 4 / D, 17.5, 3.5, 16, 3),
        # x, norm 2; q, k, v 1.5; attention 1; x, norm 2; gate, SiLU, up, product 16; first factors of q, o, gate, up and
        # down 5/4, of k and v 1/8. On a CPU an RMSNorm keeps its output without the weight too.
        (GatedBlock, 2 / D, 23.875 + 2, 3.375, 22.5 + 2, 3.5),
    ],
    ids=["gelu", "gated"],
)
def test_kept_bytes_are_those_on_paper(
    build: Callable[[], nn.Module],
    norms: float,
    everything: float,
    ours: float,
    dense: float,
    dense_ours: float,
) -> None:
    for model, all_, few in [
        (Blocks(build), dense, dense_ours),
        (low_rank(Blocks(build)), everything, ours),
    ]:
        block, again = model.blocks[0], recomputing(model).blocks[0]
        assert kept(block, block) == all_ + norms + LOG_SUMS
        assert kept(block, lambda x, b=block: checkpoint(b, x, use_reentrant=False)) == 1
        assert kept(again, again) == few + LOG_SUMS
    shared = recomputing(low_rank(Blocks(build), torch.randn(2, TIME, D))).blocks[0]
    assert any(isinstance(getattr(layer, "_shared_input", None), SharedInput) for layer in shared.modules())
    assert kept(shared, shared) == ours + LOG_SUMS


def test_first_factors_of_convolutions_and_experts_are_kept() -> None:
    model = low_rank(Blocks(ConvBlock))
    x = torch.randn(2, D, 6, 6, requires_grad=True)
    block = recomputing(model).blocks[0]
    with LiveStorages([*block.parameters(), x]) as storages:
        output = block(x)
    assert storages.nbytes() - output.nbytes == 4 * 2 * (D // 4) * (6 * 6 + 4 * 4)

    ends = torch.tensor([5, 12])

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = pf.layers.GroupedLinear(2, D, 16), pf.layers.GroupedLinear(2, 16, D)

        def forward(self, rows: Tensor) -> Tensor:
            return rows + self.up(F.silu(self.down(rows, ends)), ends)

    for dtype in (torch.float32, torch.float64):  # torch's kernel and the loop over experts
        model, x = Blocks(Experts).to(dtype), torch.randn(12, D, dtype=dtype, requires_grad=True)
        block = recomputing(model).blocks[0]
        with LiveStorages([*block.parameters(), x, ends]) as storages:
            output = block(x)
        assert storages.nbytes() - output.nbytes == x.nbytes // 4
        assert_same(gradients(recomputing(model), x), gradients(model, x))


# Gradients: bit-identical.


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        gelu_block,
        GatedBlock,
        DropoutBlock,
        lambda: nn.TransformerEncoderLayer(D, HEADS, 4 * D, dropout=0.1, batch_first=True),
    ],
    ids=["gelu", "gated", "dropout", "encoder"],
)
def test_gradients_are_bit_identical(build: Callable[[], nn.Module], amp: bool) -> None:
    x = torch.randn(2, TIME, D)
    for model in (Blocks(build), low_rank(Blocks(build)), low_rank(Blocks(build), x)):
        assert_same(gradients(recomputing(model), x, amp=amp), gradients(model, x, amp=amp))


def test_gradients_of_convolutions() -> None:
    x = torch.randn(2, D, 6, 6)
    model = low_rank(Blocks(ConvBlock))
    assert_same(gradients(recomputing(model), x), gradients(model, x))


@pytest.mark.parametrize("amp", [False, True])
def test_a_block_that_runs_twice(amp: bool) -> None:
    # Under autocast the second run finds the weights in the cache, the recomputation does not.
    model, x = low_rank(Blocks(DropoutBlock)), torch.randn(2, D)
    again = gradients(recomputing(model), x, amp=amp, times=2)
    assert torch.is_autocast_cache_enabled()
    assert_same(again, gradients(model, x, amp=amp, cache=False, times=2))


def test_keyword_arguments() -> None:
    model, x = Blocks(DropoutBlock), torch.randn(2, D)
    results = []
    for m in (model, recomputing(model)):
        scale = torch.full((D,), 2.0, requires_grad=True)
        results.append([*gradients(m, x, scale=scale, debug=True), scale.grad])
    assert_same(*results)


def test_random_numbers_are_kept_where_the_generator_cannot_be_rewound() -> None:
    def block(x: Tensor) -> Tensor:
        return torch.native_dropout(x * x, 0.5, True)[0].sin()

    x = torch.randn(100, requires_grad=True)
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    torch.manual_seed(1)
    output = checkpoint(
        block,
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy_with_random),
    )
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


# In place, around the changes of a model.


def test_the_model_stays_the_same_to_others() -> None:
    model = GPT(vocabulary=16, d=D, layers=2, heads=2, context=TIME)
    again, x = recomputing(model), torch.randint(16, (2, TIME))
    assert again.state_dict().keys() == model.state_dict().keys()
    assert list(map(type, again.modules())) == list(map(type, model.modules()))
    assert pf.plan(again, 0.25, example=x).entries == pf.plan(model, 0.25, example=x).entries
    copied = copy.deepcopy(again)  # an averaged copy must compute with its own weights
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
        assert torch.equal(copied(x), model(x))


def test_around_factorize_and_merge() -> None:
    model, x = Blocks(GatedBlock), torch.randn(2, TIME, D)
    again = recomputing(model)
    for change in (low_rank, pf.merge_):
        change(model)
        change(again)
        assert_same(gradients(again, x), gradients(model, x))
        assert kept(again.blocks[0], again.blocks[0]) < 4
    assert pf.recompute_(again, ["blocks.1", "blocks.*"]) == ["blocks.0", "blocks.1"]  # a second time
    assert_same(gradients(again, x), gradients(model, x))


def test_without_gradients_nothing_is_wrapped() -> None:
    again, x = recomputing(Blocks(GatedBlock)), torch.randn(2, TIME, D)
    with torch.no_grad():
        expected = again(x)
    assert torch.equal(torch.export.export(again, (x,)).module()(x), expected)


# Errors, after which the model is as it was.


def two_parts() -> nn.Module:
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "b": norm})


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        ("a", TypeError, r"blocks='a': give a list of patterns, blocks=\['a'\]"),
        (["a", "c.*"], ValueError, r"the patterns \['c.\*'\] match no module with a forward pass and layers"),
        (["a.0"], ValueError, r"\['a.0'\] match no"),
        (["a", "b"], ValueError, "b.1: BatchNorm1d would update its running statistics twice"),
    ],
)
def test_errors(blocks: Any, error: type[Exception], message: str) -> None:
    model = two_parts()
    with pytest.raises(error, match=message):
        pf.recompute_(model, blocks)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_other_code_replaced() -> None:
    model = two_parts()
    model["a"].forward = lambda x: x
    with pytest.raises(ValueError, match="a: its forward was replaced; call recompute_ before"):
        pf.recompute_(model, ["a"])


def test_a_second_backward_pass_raises() -> None:
    output = recomputing(low_rank(Blocks(DropoutBlock)))(torch.randn(2, D)).sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        output.backward()


def test_a_cache_of_keys_and_values() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": D, "intermediate_size": D, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes)
    model, x = transformers.LlamaForCausalLM(config), torch.randint(16, (2, TIME))
    model(x).logits.square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    assert pf.recompute_(model, ["model.layers.*"]) == ["model.layers.0"]
    with pytest.raises(
        ValueError, match=r"LlamaDecoderLayer: recomputing it would append to the cache .*use_cache = False"
    ):
        model(x)
    model.config.use_cache = False
    model.zero_grad()
    model(x).logits.square().mean().backward()
    assert_same([p.grad for p in model.parameters()], expected)


# Compiled.


@contextmanager
def saved(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """What autograd saves, by storage, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if (place := x.untyped_storage().data_ptr()) not in own:
            found[place] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found


@pytest.mark.parametrize(
    ("backend", "amp"),
    [
        ("aot_eager", False),
        pytest.param("aot_eager", True, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_compiled(backend: str, amp: bool) -> None:
    x = torch.randn(2, TIME, D)
    model = low_rank(Blocks(gelu_block), x)
    compiled = torch.compile(recomputing(model), backend=backend, fullgraph=True)
    with saved(compiled) as found:
        ours = gradients(compiled, x, amp=amp)
    inside = 2 * (
        2.5 / (2 if amp else 1) + LOG_SUMS
    )  # beside the blocks' inputs and the output, which stay in fp32
    assert sum(t.untyped_storage().nbytes() for t in found.values()) / x.nbytes == 3 + inside
    for a, b in zip(ours, gradients(model, x, amp=amp), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-3 if amp else 1e-6)


def test_compiled_with_dropout_and_keywords() -> None:
    model, x, scale = low_rank(Blocks(DropoutBlock)), torch.randn(2, D), torch.randn(D)
    ours = torch.compile(recomputing(model), backend="aot_eager", fullgraph=True)
    assert_same(gradients(ours, x, scale=scale), gradients(model, x, scale=scale))


# Several workers.


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocabulary=16, d=D, layers=2, heads=2, context=TIME)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, switch: pf.Switch | None, rank: int
) -> list[float]:
    losses = []
    for step in range(4):
        if switch is not None:
            switch.step(model, optimizer, step=step, total=4)
        tokens = torch.randint(16, (2, TIME), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def switches_under_ddp(rank: int, size: int) -> None:
    losses = []
    for again in (False, True):
        model = recomputing(gpt()) if again else gpt()
        ddp = DDP(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        losses.append(steps(ddp, optimizer, pf.Switch(rank=0.25, when=pf.AtStep(2)), rank))
        assert isinstance(model.blocks[0].up, pf.layers.LowRankLinear)
    assert losses[0] == losses[1]


def shards(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    losses = []
    for when in ("never", "before", "after"):
        model = low_rank(gpt())
        if when == "before":
            pf.recompute_(model, ["blocks.*"])
        fully_shard(model.blocks[0].attention, mesh=mesh)  # inside of a block
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if when == "after":
            pf.recompute_(model, ["blocks.*"])
        assert ("forward" in vars(model.blocks[0])) == (when != "never")
        losses.append(steps(model, torch.optim.SGD(model.parameters(), lr=0.1), None, rank))
    assert losses[0] == losses[1] == losses[2]
    dist.barrier()


def rebuilds(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))

    def shard(model: nn.Module) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    losses = []
    for build in (gpt, lambda: recomputing(gpt())):
        model = build()
        shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        steps(model, optimizer, None, rank)
        switch = pf.Switch(rank=0.25, when=pf.AtStep(1))
        model, optimizer = switch.rebuild(model, optimizer, build=build, shard=shard, step=1, total=4)
        assert isinstance(model.blocks[0].up, pf.layers.LowRankLinear)
        assert ("forward" in vars(model.blocks[0])) == (build is not gpt)
        losses.append(steps(model, optimizer, None, rank))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("case", [switches_under_ddp, shards, rebuilds])
def test_several_workers(case: Callable[..., None]) -> None:
    in_processes(case, 2)


# On a GPU.


@pytest.mark.gpu
def test_the_outputs_of_attention_kernels_are_kept() -> None:
    block = recomputing(low_rank(Blocks(gelu_block))).blocks[0].to("cuda", torch.bfloat16)
    x = torch.randn(2, 256, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert 3.5 < kept(block, block, x) < 3.5 + 4 * LOG_SUMS  # the sums are in fp32; kernels add a few numbers


@pytest.mark.gpu
def test_dropout_in_a_cuda_graph() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.first(x), 0.5)

    model = recomputing(Blocks(Masked, 1)).cuda()
    x = torch.randn(32, D, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        inner = model.blocks[0].first.bias
        output = model(x)
        return output, torch.autograd.grad(output.sum(0).sum(), inner)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, grad = step()
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(output != 0)
        torch.testing.assert_close(grad, 2.0 * masks[-1].sum(0))  # the gradient goes through the same mask
    assert not torch.equal(*masks)  # and the next replay draws another
