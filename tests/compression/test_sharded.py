"""Models sharded over all workers: gathers of what changed, and quantised reductions, against plain FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.compression import BFloat16, BlockInt8, Changed, Int4, NoCompression, ShardedHook, TopK
from pufferfish.compression.methods.changed import as_integers

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Config:
    """What is different from a plain training loop."""

    rate: float = 1e-4
    reshard: bool | int | None = None  # None: FSDP2's default
    policy: MixedPrecisionPolicy = BF16
    clip: bool = False
    accumulate: bool = False
    twice: bool = False
    checkpointed: bool = False
    prefetch: bool = False
    interrupted: bool = False  # by evaluations and a loaded state
    frozen: bool = False
    replicas: bool = False
    spoil: bool = False
    compiled: bool = False
    divide: float | None = None
    steps: int = 6


CONFIGS = {
    "plain": Config(),
    "rate 1e-6": Config(rate=1e-6),
    "rate 1e-5": Config(rate=1e-5, steps=12),
    "rate 1e-3": Config(rate=1e-3),
    "reshard": Config(reshard=True),
    "keep": Config(reshard=False),
    "clip": Config(clip=True),
    "accumulate": Config(accumulate=True),
    "twice": Config(twice=True),
    "checkpointed": Config(checkpointed=True),
    "prefetch": Config(prefetch=True),
    "interrupted": Config(interrupted=True),
    "frozen": Config(frozen=True),
    "fp32": Config(policy=MixedPrecisionPolicy()),
    "bf16 both ways": Config(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "NaN": Config(spoil=True),
    "compiled": Config(compiled=True),
}


class Net(nn.Module):
    """Blocks of odd sizes, and parameters that belong to none of them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 13)
        blocks = [nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 13)) for _ in range(3)]
        self.blocks = nn.ModuleList(checkpoint_wrapper(b) if config.checkpointed else b for b in blocks)
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, 11)
        self.config = config

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        if self.config.twice:
            x = x + self.blocks[1](x)
        return self.head(self.norm(x))


def build(config: Config) -> Net:
    size = dist.get_world_size()
    net = Net(config)
    if config.frozen:
        net.blocks[0].requires_grad_(False)
    names = ("replicate", "shard")
    shape = (2, size // 2) if config.replicas else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, mp_policy=config.policy, reshard_after_forward=config.reshard)
    if config.prefetch:
        for here, after in zip(net.blocks, net.blocks[1:], strict=False):
            here.set_modules_to_forward_prefetch([after])
    if config.divide:
        net.set_gradient_divide_factor(config.divide)
        for block in net.blocks:
            block.set_gradient_divide_factor(config.divide)
    return net


def loss_of(net: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(11, (2, 4, 9), generator=generator)
    return nn.functional.cross_entropy(net(tokens[0]).flatten(0, 1).float(), tokens[1].flatten())


def train(config: Config, *methods: Any) -> tuple[list[Tensor], Net, ShardedHook | None]:
    """Train a net, compressed by methods for gradients and parameters if there are any."""
    net = build(config)
    if config.compiled:
        net = torch.compile(net, backend="aot_eager")  # type: ignore[assignment]
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=config.rate)
    hook: Any = pf.compress(net, methods[0], parameters=methods[1], optimizer=optimizer) if methods else None
    seen = []
    saved: Any = None
    for step in range(config.steps):
        if config.accumulate:
            net.set_requires_gradient_sync(False)
            loss_of(net, 100 + step).backward()
            net.set_requires_gradient_sync(True)
        loss = loss_of(net, step)
        loss.backward()
        seen.append(loss.detach())
        if config.clip:
            seen.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
        if config.interrupted and step in (2, 3):
            with torch.no_grad():
                seen += [loss_of(net, 50 + n) for n in range(3)]
        if config.interrupted and step == 1:
            saved = {name: p.clone() for name, p in net.state_dict().items()}
        if config.interrupted and step == 4:
            net.load_state_dict(saved)
        if config.spoil and step == 2:
            local = next(net.blocks[1].parameters()).to_local()
            local.data.view(-1)[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    return seen, net, hook


def shards(net: nn.Module) -> list[Tensor]:
    return [p.to_local().detach() for p in net.parameters()]


def bits_are_those_of_plain_fsdp2(rank: int, size: int, names: tuple[str, ...]) -> None:
    for name in names:
        config = CONFIGS[name]
        losses, net, _ = train(config)
        same, compressed, hook = train(config, NoCompression(), Changed())
        assert hook is not None
        for x, y in zip(losses + shards(net), same + shards(compressed), strict=True):
            assert torch.equal(as_integers(x), as_integers(y)), name
        assert hook.meter.steps == config.steps
        assert hook.meter.wire_bytes < hook.meter.plain_wire_bytes or config.rate == 1e-3 or "32" in name


def over_meshes(rank: int, size: int) -> None:
    """An integer `reshard_after_forward` gathers over another group; a 2-D mesh has replicas."""
    for config in (Config(reshard=2), Config(replicas=True), Config(replicas=True, clip=True, reshard=False)):
        losses, net, _ = train(config)
        same, compressed, _ = train(config, NoCompression(), Changed())
        for x, y in zip(losses + shards(net), same + shards(compressed), strict=True):
            assert torch.equal(x, y), config


def for_a_while(rank: int, size: int, rate: float) -> None:
    config = Config(rate=rate, steps=200)
    losses, net, _ = train(config)
    same, compressed, _ = train(config, NoCompression(), Changed())
    for x, y in zip(losses + shards(net), same + shards(compressed), strict=True):
        assert torch.equal(x, y)


def unchanged_parameters_cost_a_header(rank: int, size: int) -> None:
    """Such as frozen ones: 64 bytes a gather, of three blocks forward and backward and of the root, which stays."""
    _, net, hook = train(Config(steps=2), NoCompression(), Changed())
    assert hook is not None
    sent = []
    for step in range(4):
        before = hook.meter.collective_bytes["all_gather"]
        loss_of(net, step).backward()
        sent.append(hook.meter.collective_bytes["all_gather"] - before)
    assert sent[2:] == [7 * 64] * 2  # the first finds the last update, the second had expected another one


def a_lost_or_corrupt_copy_is_gathered_again(rank: int, size: int) -> None:
    _, net, _ = train(Config(steps=3), NoCompression(), Changed())
    _, plain, _ = train(Config(steps=3))
    expected = loss_of(plain, 9)
    comm = net.blocks[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm
    if rank == 1:
        comm.held = None
    assert torch.equal(loss_of(net, 9), expected)
    if rank == 1:
        comm.held[0, 3] += 1
    comm.gathers = 64
    with pytest.warns(UserWarning, match=r"blocks\.0: the workers' held copies differ"):
        assert torch.equal(loss_of(net, 9), expected)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*held copies")
        assert torch.equal(loss_of(net, 9), expected)


def out_of_step(rank: int, size: int) -> None:
    """The workers call different blocks."""
    _, net, _ = train(Config(steps=2), NoCompression(), Changed())
    with torch.no_grad():
        for step in range(2):
            loss_of(net, step)
    words = r"out of step: worker 0 in gather \d+ of blocks\.0; worker 1 in gather \d+ of blocks\.1"
    with pytest.raises(RuntimeError, match=words), torch.no_grad():
        net.blocks[rank](torch.ones(2, 13))


def rounded(x: Tensor, largest: int, multiple: int) -> Tensor:
    """Each block of at most 256 elements as integers up to `largest` times a scale."""
    many = -(-len(x) // 256)
    size = -(-len(x) // (many * multiple)) * multiple
    parts = []
    for block in x.split(size):
        scale = block.abs().max() / largest
        parts.append((block / scale).round() * scale if scale > 0 else block)
    return torch.cat(parts)


ROUND: dict[Any, Callable[[Tensor], Tensor]] = {
    BlockInt8(): lambda x: rounded(x, 127, 1),
    Int4(): lambda x: rounded(x, 7, 8),
    BFloat16(): lambda x: x.bfloat16().float(),
}
METHODS = tuple(ROUND)


def pieces(tensors: list[Tensor], size: int) -> list[Tensor]:
    """What FSDP2 sends to each worker: its rows of all parameters of a module, padded to the same number."""
    found = []
    for worker in range(size):
        rows = []
        for x in tensors:
            per_worker = -(-len(x) // size)
            mine = x[worker * per_worker : (worker + 1) * per_worker]
            rows.append(nn.functional.pad(mine.flatten(), (0, per_worker * x[0].numel() - mine.numel())))
        found.append(torch.cat(rows))
    return found


def groups(net: Net) -> list[list[str]]:
    """Names of the parameters of each sharded module."""
    names = [name for name, _ in net.named_parameters()]
    blocks = [[n for n in names if n.startswith(f"blocks.{i}.")] for i in range(3)]
    return [*blocks, [n for n in names if not n.startswith("blocks.")]]


def everyone(x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


def gradients_are_those_of_the_reference(rank: int, size: int) -> None:
    """Gather everything, quantise what each worker sends to each, add up, keep the own part."""
    for method in METHODS:
        for divide in (None, 3.0):
            config = Config(policy=MixedPrecisionPolicy(), divide=divide)
            net, plain = build(config), Net(config)
            pf.compress(net, method, parameters=NoCompression())
            loss_of(net, 0).backward()
            loss_of(plain, 0).backward()
            own = {name: p.grad for name, p in plain.named_parameters()}
            for names in groups(plain):
                sent = [everyone(piece) for piece in pieces([own[n] for n in names], size)]  # type: ignore[misc]
                mean = sum(ROUND[method](theirs) for theirs in sent[rank]) / (divide or size)
                got = [p.grad.to_local() for n, p in net.named_parameters() if n in names]
                at = 0
                for g, n in zip(got, names, strict=True):
                    expected = mean[at : at + g.numel()].view(g.shape)  # type: ignore[index]
                    torch.testing.assert_close(g, expected, rtol=1e-5, atol=1e-8)
                    at += -(-len(own[n]) // size) * own[n][0].numel()  # type: ignore[arg-type, index]


def parameters_are_those_of_the_reference(rank: int, size: int) -> None:
    """All workers compute with each shard as it was sent, and update their own unrounded one."""
    for method in (BlockInt8(), BFloat16()):
        config = Config(policy=MixedPrecisionPolicy())
        net, plain = build(config), Net(config)
        hook = pf.compress(net, NoCompression(), parameters=method)
        assert hook.meter.messages == 0
        parameters = dict(plain.named_parameters())
        for names in groups(plain):
            shards = [ROUND[method](piece) for piece in pieces([parameters[n].data for n in names], size)]
            for worker, shard in enumerate(shards):
                at = 0
                for n in names:
                    per_worker = -(-len(parameters[n]) // size)
                    rows = parameters[n].data[worker * per_worker : (worker + 1) * per_worker]
                    rows.copy_(shard[at : at + rows.numel()].view(rows.shape))
                    at += per_worker * parameters[n][0].numel()
        torch.testing.assert_close(loss_of(net, 0), loss_of(plain, 0), rtol=1e-5, atol=1e-7)


def workers_stay_equal_and_learn(rank: int, size: int) -> None:
    """The default pair, for a while: as good as plain FSDP2, with a part of its bytes."""
    for config in (Config(rate=3e-3, steps=25), Config(rate=3e-3, steps=25, replicas=True)):
        losses, _, _ = train(config)
        small, net, hook = train(config, None, None)
        assert isinstance(hook, ShardedHook)
        assert (hook.method, hook.parameters) == (BlockInt8(), Changed())
        assert torch.stack(small[-5:]).mean() < torch.stack(losses[-5:]).mean() + 0.02
        for p in net.parameters():
            assert same_everywhere(p.full_tensor())
        assert hook.meter.wire_bytes < hook.meter.plain_wire_bytes
        assert hook.meter.steps == config.steps


def one_infinite_step_leaves_no_trace(rank: int, size: int) -> None:
    for method in METHODS:
        grads = []
        for spoiled in (False, True):
            net = build(Config())
            pf.compress(net, method)
            for step in range(2):
                net.zero_grad()
                loss = loss_of(net, step)
                (loss * float("inf") if spoiled and step == 0 and rank == 1 else loss).backward()
                norm = nn.utils.clip_grad_norm_(net.parameters(), 1e9).full_tensor()
                assert bool(norm.isfinite()) == (not spoiled or step == 1)
            grads.append([p.grad.to_local() for p in net.parameters()])
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True)), method


def refusals(rank: int, size: int) -> None:
    net = build(Config())

    def refused(words: str, *args: Any, model: nn.Module = net, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
            pf.compress(model, *args, **options)

    refused("TopK.* is not for the gradients of a sharded model; choose from BlockInt8", TopK())
    refused("TopK.* is not for the gradients", TopK() if rank else BlockInt8())
    refused("is not for the gradients", {"blocks.0": BlockInt8()})
    refused(r"Int4.* is not for parameters=", parameters=Int4())
    refused("takes no settings", settings=pf.compression.Settings(smallest=0))
    refused("parameters= is for .* without replicas=", replicas=dist.group.WORLD, parameters=Changed())
    refused("parameters= is for a model that FSDP2", model=nn.Linear(2, 2), parameters=Changed())
    refused("differ from rank 0 in", BFloat16() if rank else BlockInt8())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    hybrid = nn.Linear(4, 4)
    fully_shard(hybrid, mesh=mesh)
    refused(r'pass only the 1-D mesh\["shard"\]', model=hybrid, replicas=mesh["a"].get_group())
    alone = nn.Linear(4, 4)
    fully_shard(alone, mesh=mesh["b"])
    refused("sharded over 1 of 2 workers; pass the workers that hold the same shard", model=alone)
    hook = pf.compress(net)
    assert isinstance(hook, ShardedHook)
    refused("already compressed")
    hook.attach(net)


def through_a_rebuild(rank: int, size: int) -> None:
    """After the switch to low rank the new model is compressed, by the same hook."""

    def dense() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 4))

    def shard(model: nn.Module) -> None:
        for layer in (model[0], model):
            fully_shard(layer, mp_policy=BF16)

    ends = []
    for compressed in (False, True):
        model = dense()
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        hook: Any = pf.compress(model, NoCompression(), optimizer=optimizer) if compressed else None
        switch = pf.Switch(rank=0.25, when=pf.AtStep(2))
        for step in range(4):
            model, optimizer = switch.rebuild(model, optimizer, build=dense, shard=shard, step=step)
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(8, 64, generator=generator)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert switch.low_rank
        ends.append(torch.cat([p.full_tensor().flatten() for p in model.parameters()]))
        assert hook is None or hook.meter.steps == 4
    assert torch.equal(*ends)


def saves(rank: int, size: int, folder: Path) -> None:
    for compressed in (False, True):
        run(folder, compressed, 0, 3)


def resumes(rank: int, size: int, folder: Path) -> None:
    """On another number of workers: the held copies are filled again."""
    plain, same = (run(folder, compressed, 3, 6) for compressed in (False, True))
    assert all(torch.equal(x, y) for x, y in zip(plain, same, strict=True))


def run(folder: Path, compressed: bool, start: int, stop: int) -> list[Tensor]:
    config = Config(rate=1e-4)
    net = build(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.rate)
    hook: Any = pf.compress(net, NoCompression(), optimizer=optimizer) if compressed else None
    checkpoint = pf.Checkpoint(folder / str(compressed), net, optimizer, compressor=hook)
    at = checkpoint.resume()
    assert (at.position["step"] if at else 0) == start
    losses = []
    for step in range(start, stop):
        losses.append(loss_of(net, step))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(step=stop)
    return losses + shards(net)


@pytest.mark.timeout(180)  # the hang guard
@pytest.mark.parametrize("names", [tuple(CONFIGS)[:8], tuple(CONFIGS)[8:]])
def test_the_bits_of_plain_fsdp2(names: tuple[str, ...]) -> None:
    in_processes(bits_are_those_of_plain_fsdp2, 2, names)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4, 3e-4])
@pytest.mark.parametrize("size", [2, 4])
def test_200_steps(size: int, rate: float) -> None:
    in_processes(for_a_while, size, rate)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_bits_of_plain_fsdp2_with_four_workers() -> None:
    in_processes(bits_are_those_of_plain_fsdp2, 4, tuple(CONFIGS))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", [over_meshes, workers_stay_equal_and_learn])
def test_four_workers(case: Callable[..., None]) -> None:
    in_processes(case, 4)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "case",
    [
        unchanged_parameters_cost_a_header,
        a_lost_or_corrupt_copy_is_gathered_again,
        out_of_step,
        gradients_are_those_of_the_reference,
        parameters_are_those_of_the_reference,
        one_infinite_step_leaves_no_trace,
        through_a_rebuild,
        refusals,
    ],
)
def test_two_workers(case: Callable[..., None]) -> None:
    in_processes(case, 2)


@pytest.mark.timeout(180)
def test_resume_on_another_number_of_workers(tmp_path: Path) -> None:
    in_processes(saves, 2, tmp_path)
    in_processes(resumes, 4, tmp_path)
