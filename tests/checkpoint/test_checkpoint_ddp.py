"""Checkpoints of several workers, in real processes on gloo: DDP, FSDP2, other world sizes, errors on one worker."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import names
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import pufferfish as pf
from processes import in_processes, same_everywhere
from pufferfish.checkpoint import Checkpoint

SWITCH, TOTAL = 3, 6


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 33), nn.Linear(33, 3)
    )


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x, y = torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor, unsharded, and the next random numbers."""
    tensors = {f"model {name}": full(x).clone() for name, x in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, x in optimizer.state.get(p, {}).items():
            if isinstance(x, Tensor):
                tensors[f"optimizer {name} {key}"] = full(x).clone()
    return tensors | {"drawn": torch.rand(4)}


def same(a: dict[str, Tensor], b: dict[str, Tensor], but: tuple[str, ...] = ()) -> None:
    assert set(a) == set(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]) or name in but, name


def raises_everywhere(kind: type[Exception], text: str, work: Callable[[], Any]) -> None:
    """Check that all workers raise, with the same message."""
    with pytest.raises(kind, match=text) as caught:
        work()
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    assert messages == [messages[0]] * len(messages)


# DDP


class Run:
    def __init__(self, make: Callable[..., Any], folder: Path, seed: int, **options: Any) -> None:
        torch.manual_seed(seed + dist.get_rank())  # DDP broadcasts the weights of rank 0; dropout differs
        self.model = DDP(build(), **options)
        self.optimizer = make(self.model)
        self.switch = pf.Switch(rank=0.25, when=pf.AtStep(SWITCH))
        self.checkpoint = Checkpoint(folder, self.model, self.optimizer, switch=self.switch)

    def go(self, start: int, stop: int) -> Run:
        for step in range(start, stop):
            self.switch.step(self.model, self.optimizer, step=step)
            update(self.model, self.optimizer, step)
        return self

    def bits(self) -> dict[str, Tensor]:
        return bits(self.model.module, self.optimizer)


def ddp_resumes_exactly(rank: int, size: int, folder: Path) -> None:
    for make, options in ((momentum, {}), (adamw, {"find_unused_parameters": True})):
        place = folder / make.__name__
        uninterrupted = Run(make, place, 0, **options).go(0, TOTAL).bits()
        assert any(".down." in name for name in uninterrupted)
        for stop in (2, SWITCH, SWITCH + 1):
            Run(make, place, 0, **options).go(0, stop).checkpoint.save(step=stop)
            run = Run(make, place, 50, **options)
            at = run.checkpoint.resume()
            assert at is not None
            assert (at.position, at.reset) == ({"step": stop}, [])
            same(run.go(stop, TOTAL).bits(), uninterrupted)
            run.checkpoint.close()


class Data:
    """State that differs between workers."""

    def __init__(self) -> None:
        self.value: Any = dist.get_rank()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def an_error_on_one_worker_is_raised_on_all(rank: int, size: int, folder: Path) -> None:
    data, model = Data(), DDP(build())
    checkpoint = Checkpoint(folder, model, adamw(model), data=data)
    checkpoint.save(step=1)
    data.value = {1} if rank else 0
    raises_everywhere(
        TypeError, "rank 1: rank-00001: parts/data/value is a set", lambda: checkpoint.save(step=2)
    )
    data.value = 7
    raises_everywhere(ValueError, r"workers \[1\] pass another position", lambda: checkpoint.save(step=rank))
    assert names(folder) == ["000001-step-1"]
    assert checkpoint.resume() is not None
    assert data.value == rank
    newest = checkpoint.save(step=2)
    dist.barrier()
    if rank == 1:
        (newest / "rank-00001.json").unlink()
    dist.barrier()
    raises_everywhere(ValueError, r"rank 0: .*rank-00001.json is missing", checkpoint.resume)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        at = checkpoint.resume(damaged="previous")
    assert at is not None
    assert at.position == {"step": 1}
    # A checkpoint that does not fit on one worker is not loaded on any.
    other = DDP(build())
    if rank == 1:
        other.module.append(nn.Linear(3, 3))
    before = other.module[0].weight.detach().clone()
    raises_everywhere(
        ValueError,
        r"rank 1: .*6.weight is in the model, but was not saved",
        lambda: Checkpoint(folder, other, adamw(other)).resume("previous"),
    )
    assert torch.equal(before, other.module[0].weight)


def sigterm_on_one_worker_stops_all_at_the_same_step(rank: int, size: int, folder: Path) -> None:
    model = DDP(build())
    optimizer = momentum(model)
    with Checkpoint(folder, model, optimizer, every=4) as checkpoint:
        for step in range(9):
            update(model, optimizer, step)
            if step == 5 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoint.step(step=step + 1):
                break
        assert step == 6  # the flag of step 5 is reduced during the next step
    assert names(folder) == ["000001-step-4", "000002-step-7"]


def buffers_of_every_worker_are_restored(rank: int, size: int, folder: Path) -> None:
    """Those of averaged copies, too."""
    model = DDP(build(), broadcast_buffers=False)
    average, optimizer = AveragedModel(model.module, use_buffers=True), momentum(model)
    update(model, optimizer, 0)
    average.update_parameters(model.module)
    saved = [{name: x.clone() for name, x in m.state_dict().items()} for m in (model, average)]
    assert not same_everywhere(average.module[1].running_mean) or rank == 0
    checkpoint = Checkpoint(folder, model, optimizer, also=[average])
    checkpoint.save()
    for x in (*model.state_dict().values(), *average.state_dict().values()):
        x.zero_()
    checkpoint.resume()
    for m, expected in zip((model, average), saved, strict=True):
        same(dict(m.state_dict()), expected)


def a_folder_that_one_worker_does_not_see(rank: int, size: int, folder: Path) -> None:
    """Rank 1 mounts a file system of its own over the folder."""
    model = DDP(build())
    checkpoint = Checkpoint(folder, model)
    checkpoint.save(step=1)
    mounted = torch.ones(1)
    if rank == 1:
        private = ["mount", "--make-rprivate", "/"]
        cover = ["mount", "-t", "tmpfs", "tmpfs", str(folder)]
        mounted[0] = ctypes.CDLL(None).unshare(0x00020000) == 0 and not any(
            subprocess.run(command, capture_output=True).returncode for command in (private, cover)
        )
    dist.all_reduce(mounted, dist.ReduceOp.MIN)
    if mounted.item():
        raises_everywhere(
            OSError,
            "rank 1: .*does not see files of worker 0; all workers must share the folder",
            lambda: checkpoint.save(step=2),
        )
        raises_everywhere(ValueError, "rank 1: .*manifest.json is missing", checkpoint.resume)


# FSDP2


def sharded(model: nn.Sequential, **options: Any) -> nn.Module:
    options.setdefault(
        "mesh", init_device_mesh("cpu", (dist.get_world_size(),))
    )  # on the CPU even if there is a GPU
    for i in (0, 4):
        fully_shard(model[i], **options)
    return fully_shard(model, **options)


def plain_norms(model: nn.Sequential) -> nn.Sequential:
    model[1] = nn.LayerNorm(32)  # batch statistics would differ between workers
    return model


def shards_resume_exactly(folder: Path, low_rank: bool, **options: Any) -> None:
    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = plain_norms(build())
        if low_rank:
            plan = Checkpoint.plan_in(folder / "run") or pf.plan(model, 0.25)
            if seed:
                pf.reshape_(model, plan)
                for p in model.parameters():
                    nn.init.normal_(p)
            else:
                pf.factorize_(model, plan)
        model = sharded(model, **options)
        torch.manual_seed(seed + dist.get_rank())
        return model, adamw(model)

    model, optimizer = start(0)
    if low_rank:
        switch = pf.Switch(rank=0.25, when=pf.AtStep(0))
        switch.report = pf.switching.report.Report(
            pf.factorize_(dense := plain_norms(build()), pf.plan(dense, 0.25)),
            pf.switching.moments.Position(step=0),
            None,
        )
    else:
        switch = pf.Switch(rank=0.25, when=pf.AtStep(99))
    for step in range(5):
        if step == 3:
            Checkpoint(folder / "run", model, optimizer, switch=switch).save(step=3)
        update(model, optimizer, step)
    uninterrupted = bits(model, optimizer)
    Checkpoint(folder / "no switch", model, optimizer).save()
    if low_rank:
        with pytest.raises(ValueError, match="saved from a sharded low-rank model without switch="):
            Checkpoint.plan_in(folder / "no switch")
    else:
        assert Checkpoint.plan_in(folder / "no switch") is None
    model, optimizer = start(50)
    switch = pf.Switch(rank=0.25, when=pf.AtStep(99))
    at = Checkpoint(folder / "run", model, optimizer, switch=switch).resume()
    assert at is not None
    assert at.reset == []
    for step in range(3, 5):
        update(model, optimizer, step)
    same(bits(model, optimizer), uninterrupted)


def dense_and_low_rank_shards_resume_exactly(rank: int, size: int, folder: Path) -> None:
    """On four workers as two replicas of two shards."""
    for low_rank in (False, True):
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if size == 4 else None
        shards_resume_exactly(folder / str(low_rank), low_rank, **({"mesh": two} if two else {}))


def a_module_on_two_meshes_resumes_exactly(rank: int, size: int, folder: Path) -> None:
    """Its FSDP state has two groups of parameters."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    meshes = [FSDPMeshInfo(DeviceMesh.from_group(group, "cpu"), shard_mesh_dim=0) for group in groups]

    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = plain_norms(build())
        place = {id(p): ShardPlacementResult(Shard(0), meshes[p.dim() > 1]) for p in model.parameters()}
        fully_shard(model, mesh=meshes[0].mesh, shard_placement_fn=lambda p: place[id(p)])
        assert len(model._get_fsdp_state()._fsdp_param_groups) == 2
        torch.manual_seed(seed + rank)
        return model, adamw(model)

    model, optimizer = start(0)
    update(model, optimizer, 0)
    Checkpoint(folder, model, optimizer).save(step=1)
    update(model, optimizer, 1)
    uninterrupted = bits(model, optimizer)
    model, optimizer = start(50)
    assert Checkpoint(folder, model, optimizer).resume() is not None
    update(model, optimizer, 1)
    same(bits(model, optimizer), uninterrupted)


def a_loop_with_rebuild_resumes_exactly(rank: int, size: int, folder: Path) -> None:
    """`Checkpoint` follows the model that `rebuild` replaces; runs stop before and after that."""

    def dense() -> nn.Sequential:
        return plain_norms(build())

    def run(name: str, stop: int, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        model: nn.Module = dense()
        if (plan := Checkpoint.plan_in(folder / name)) is not None:
            pf.reshape_(model, plan)
            for p in model.parameters():
                nn.init.normal_(p)
        model = sharded(model)
        torch.manual_seed(seed + rank)
        optimizer, switch = adamw(model), pf.Switch(rank=0.25, when=pf.AtStep(SWITCH))
        with Checkpoint(folder / name, model, optimizer, switch=switch, every=1) as checkpoint:
            at = checkpoint.resume()
            for step in range(at.position["step"] if at else 0, stop):
                model, optimizer = switch.rebuild(model, optimizer, build=dense, shard=sharded, step=step)
                update(model, optimizer, step)
                checkpoint.step(step=step + 1)
        assert switch.low_rank == (stop > SWITCH)
        return bits(model, optimizer)

    uninterrupted = run("straight", TOTAL, 0)
    for number, stop in enumerate((2, 4, TOTAL)):
        end = run("stopped", stop, 10 * number)
    same(end, uninterrupted)


def reference(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tensors = bits(model, optimizer)
    if dist.get_rank() == 0:
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "reference.safetensors")
    dist.barrier()


def save_for_other_world_sizes(rank: int, size: int, folder: Path) -> None:
    """Save the same model sharded, sharded with replicas, and unsharded."""
    meshes: dict[str, Any] = {"shards": init_device_mesh("cpu", (size,))}
    if size % 2 == 0:
        meshes["replicas"] = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "shards"))
    for name, mesh in meshes.items():
        torch.manual_seed(0)
        model = sharded(plain_norms(build()), mesh=mesh)
        optimizer = adamw(model)
        update(model, optimizer, 0)
        place = folder / f"{name} of {size}"
        written = Checkpoint(place, model, optimizer).save(step=1)
        reference(place, model, optimizer)
        writers = [
            f"rank-{r:05d}"
            for r in range(size)
            if load_file(written / f"rank-{r:05d}.safetensors").keys() > {"model:0.weight"}
        ]
        assert len(writers) == (2 if name == "replicas" else size), writers
    torch.manual_seed(0)
    plain = DDP(plain_norms(build()))
    optimizer = adamw(plain)
    update(plain, optimizer, 0)
    Checkpoint(folder / f"unsharded of {size}", plain, optimizer, data=Data()).save(step=1)
    reference(folder / f"unsharded of {size}", plain.module, optimizer)


def read_from_other_world_sizes(rank: int, size: int, folder: Path) -> None:
    """Load every saved layout into every layout of this world size."""
    meshes: list[Any] = [None, init_device_mesh("cpu", (size,))]
    if size % 2 == 0:
        meshes.append(init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "shards")))
    for place in sorted(folder.iterdir()):
        saved_by = int(place.name[-1])
        if saved_by == size:
            continue
        for mesh in meshes:
            torch.manual_seed(1)
            model = plain_norms(build())
            model = DDP(model) if mesh is None else sharded(model, mesh=mesh)
            optimizer, data = adamw(model), Data() if "unsharded" in place.name else None
            warns = pytest.warns(UserWarning, match="not restored") if rank == 0 else contextlib.nullcontext()
            with warns:
                at = Checkpoint(place, model, optimizer, data=data).resume()
            assert at is not None
            lost = ["data", "random numbers"] if data else ["random numbers"]
            by = f"{saved_by} worker{'s' * (saved_by > 1)}"
            assert at.reset == [f"{x} (saved by {by}, now {size})" for x in lost]
            inner = model.module if isinstance(model, DDP) else model
            tensors = bits(inner, optimizer)
            same(tensors, load_file(place / "reference.safetensors"), but=("drawn",))
            drawn = [torch.empty(4) for _ in range(size)]
            dist.all_gather(drawn, tensors["drawn"])
            assert (
                len({tuple(x.tolist()) for x in drawn}) == size
            )  # different on each worker, and reproducible:
            Checkpoint(place, model, optimizer).resume()
            assert torch.equal(torch.rand(4), drawn[rank])
            update(model, optimizer, 1)
            assert all(p.isfinite().all() for p in (full(p) for p in inner.parameters()))


def compressed(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = DDP(build())
    optimizer = adamw(model)
    settings = pf.compression.Settings(**options)
    return model, optimizer, pf.compress(model, pf.compression.TopK(), optimizer=optimizer, settings=settings)


def save_compressed(rank: int, size: int, folder: Path) -> None:
    model, optimizer, hook = compressed()
    update(model, optimizer, 0)
    Checkpoint(folder, model, optimizer, compressor=hook).save(step=1)


def only_worker_0_warns(rank: int, size: int, folder: Path) -> None:
    """Saved by four workers without a hierarchy."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    model, optimizer, hook = compressed(hierarchy="node" if size == 4 else "flat")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        at = Checkpoint(folder, model, optimizer, compressor=hook).resume()
    assert at is not None
    assert len(at.reset) == (0 if size == 4 else 2)
    texts = [str(warning.message) for warning in heard if "error feedback" in str(warning.message)]
    assert len(texts) == (rank == 0), texts


def other_placements_are_refused(rank: int, size: int, folder: Path) -> None:
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2, size // 2))
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Shard(0), Shard(1)]))
    raises_everywhere(
        ValueError,
        "model:weight: placements .* cannot be saved; use at most one Shard",
        lambda: Checkpoint(folder, model).save(),
    )


def the_module_of_a_wrapper_is_refused(rank: int, size: int, folder: Path) -> None:
    model = DDP(build())
    optimizer, switch = momentum(model), pf.Switch(rank=8, when=pf.AtStep(0))
    assert switch.step(model, optimizer, step=0)
    Checkpoint(folder, model, optimizer, switch=switch).save(step=1)
    other, fresh = DDP(build()), pf.Switch(rank=8, when=pf.AtStep(0))
    match = "4.weight: the model is wrapped in Dist.*; pass the wrapper, not its module"
    resume = Checkpoint(folder, other.module, momentum(other), switch=fresh).resume
    raises_everywhere(ValueError, match, resume)
    assert fresh.report is None
    restore = pf.Switch(rank=8, when=pf.AtStep(0)).restore_
    raises_everywhere(ValueError, match, lambda: restore(other.module, momentum(other), switch.state_dict()))
    assert Checkpoint(folder, other, momentum(other), switch=fresh).resume() is not None


TWO_WORKERS = [
    ddp_resumes_exactly,
    an_error_on_one_worker_is_raised_on_all,
    sigterm_on_one_worker_stops_all_at_the_same_step,
    buffers_of_every_worker_are_restored,
    a_folder_that_one_worker_does_not_see,
    the_module_of_a_wrapper_is_refused,
    dense_and_low_rank_shards_resume_exactly,
    a_module_on_two_meshes_resumes_exactly,
    a_loop_with_rebuild_resumes_exactly,
    other_placements_are_refused,
]


@pytest.mark.timeout(240)  # the hang guard
@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, 2) for case in TWO_WORKERS), (dense_and_low_rank_shards_resume_exactly, 4)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_in_real_processes(case: Callable[..., None], size: int, tmp_path: Path) -> None:
    in_processes(case, size, tmp_path)


@pytest.mark.timeout(240)
def test_only_one_worker_says_what_is_lost(tmp_path: Path) -> None:
    in_processes(save_compressed, 4, tmp_path)
    in_processes(only_worker_0_warns, 3, tmp_path)
    in_processes(only_worker_0_warns, 4, tmp_path)


@pytest.mark.timeout(240)
def test_other_world_sizes(tmp_path: Path) -> None:
    in_processes(save_for_other_world_sizes, 4, tmp_path)
    in_processes(read_from_other_world_sizes, 2, tmp_path)
    in_processes(save_for_other_world_sizes, 2, tmp_path)
    in_processes(read_from_other_world_sizes, 3, tmp_path)
