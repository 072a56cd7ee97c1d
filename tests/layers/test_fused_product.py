"""Both products of a low-rank layer in one operator: gradients, modes, and when layers use it. Run as a script: the kernel."""

from __future__ import annotations

import copy
import importlib.util
import io
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pufferfish as pf
from processes import in_processes
from pufferfish.layers import LowRankLinear, SharedInput
from pufferfish.layers.fused_product import fused_product
from pufferfish.layers.recompute import recompute_


def reference(x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(F.linear(x, first), second, bias)


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


def check_kernel(device: str, dtype: torch.dtype) -> None:
    """The Triton kernel alone: sizes that are no powers of two, strides, rows that do not fill a program."""
    from pufferfish.layers.fused_kernel import two_products_in_one_kernel

    for rows, n, r, m in ((300, 96, 48, 160), (128, 64, 16, 64), (1, 16, 128, 256), (513, 208, 112, 48)):
        x = torch.randn(rows, n, device=device, dtype=dtype)
        first = torch.randn(r, n, device=device, dtype=dtype)
        second = torch.randn(m, r, device=device, dtype=dtype)
        transposed = first.T.contiguous().T, second.T.contiguous().T
        bias = torch.randn(m, device=device)
        for x_, weights, b in (
            (x, (first, second), bias),
            (x, transposed, bias.to(dtype)),
            (x.T.contiguous().T, (first, second), None),
            (x[:1].expand(rows, n), transposed, None),
            (x, (first, second), bias[:, None].repeat(1, 2)[:, 0]),
            (x, (first, second), bias[:1].expand(m)),
        ):
            y, t = two_products_in_one_kernel(x_, *weights, b)
            exact_t = x_.double() @ first.double().T
            exact_y = reference(t.double(), torch.eye(r, device=device).double(), second.double(), None)
            exact_y += 0 if b is None else b.double()
            assert y.dtype == t.dtype == dtype
            assert error(t, exact_t) < 5e-3, (rows, n, r, m)
            assert error(y, exact_y) < 5e-3, (rows, n, r, m)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU: test_fused_product_gpu.py")
def test_the_kernel_interpreted() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    # Read when triton is imported, so in a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


class Used(TorchDispatchMode):
    """Counts calls of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.pufferfish.two_products.default
        return func(*args, **kwargs or {})


def build(dtype: torch.dtype = torch.bfloat16, bias: bool = True, rank: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias, dtype=dtype), nn.Tanh(), nn.Linear(48, 80, dtype=dtype))
    pf.factorize_(model, pf.plan(model, rank, min_saving=-1, multiple=1))
    for i in (0, 2):
        model[i]._fused = True
    return model


def plain(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, LowRankLinear):
            module._fused = False
    return model


def results(model: nn.Module, x: Tensor, call=None) -> list[Tensor]:
    """Output, gradient of the input if it has one, and gradients of the parameters."""
    call = call or model
    output = call(x)
    wanted = [x] * x.requires_grad + [p for p in model.parameters() if p.requires_grad]
    return [output, *torch.autograd.grad(output.double().square().sum(), wanted)]


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float = 0.02) -> None:
    for a, b in zip(ours, exact, strict=True):
        assert a.shape == b.shape
        assert error(a, b) < tolerance


def batch(dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.randn(2, 5, 64).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_outputs_and_gradients(dtype: torch.dtype, bias: bool, grad: bool) -> None:
    model, x = build(dtype, bias), batch(dtype, grad)
    with Used() as used:
        ours = results(model, x)
    assert (
        used.count == 2 + 1 + grad
    )  # without a gradient of the input, the backward of the first layer has one product
    assert [g.dtype for g in ours] == [dtype] * len(ours)
    exact = plain(model).double()
    assert_close(ours, results(exact, x.detach().double().requires_grad_(grad)))


def test_frozen_parameters() -> None:
    model, x = build(), batch()
    for name in ("0.down.weight", "2.up.weight", "2.up.bias"):
        model.get_parameter(name).requires_grad_(False)
    exact = plain(model).double()
    assert_close(results(model, x), results(exact, x.detach().double().requires_grad_()))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_autocast(kind: torch.dtype) -> None:
    """fp32 weights get fp32 gradients, and a 16-bit input is as good as one that is cast."""
    model, x = build(torch.float32), batch(kind)
    with Used() as used, torch.autocast("cpu", torch.bfloat16):
        ours = results(model, x)
    assert used.count == 4
    assert ours[0].dtype == torch.bfloat16
    assert [g.dtype for g in ours[1:]] == [kind] + [torch.float32] * 6
    exact = plain(model).double()
    assert_close(ours, results(exact, x.detach().double().requires_grad_()))


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled(dynamic: bool) -> None:
    model, x = build(), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_close(results(model, x, compiled), results(model, x), 1e-6)


def test_checkpointing_and_recomputation() -> None:
    model, x = build(), batch()
    want = results(model, x)
    ours = results(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    assert_close(ours, want, 1e-6)
    outer = nn.Sequential(copy.deepcopy(model))
    recompute_(outer, ["0"])
    assert_close(results(outer, x), want, 1e-6)


def test_functional_calls_and_transforms() -> None:
    model, x = build(), batch()
    other = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with Used() as used:
        ours = torch.func.functional_call(model, other, (x,))
    assert used.count == 2
    assert_close([ours], [torch.func.functional_call(plain(model), other, (x,))])

    def loss(parameters: dict[str, Tensor], model: nn.Module) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    grads = [torch.func.grad(loss)(other, m) for m in (model, plain(model))]
    assert_close(list(grads[0].values()), list(grads[1].values()), 1e-6)
    assert_close([torch.func.vmap(model)(x)], [model(x)])


def test_second_derivatives_raise() -> None:
    model, x = build(), batch()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_meta_tensors_and_macs() -> None:
    model = build().to("meta")
    with FlopCounterMode(display=False) as counter:
        output = model(batch().to("meta"))
    assert output.shape == (2, 5, 80)
    assert counter.get_total_flops() == 2 * 10 * 16 * (64 + 48 + 48 + 80)


def workers(rank: int, size: int) -> None:
    """DDP and FSDP2 average the gradients that the operator computes for each worker's batch."""
    torch.manual_seed(1)
    batches = [batch(torch.float32, grad=False) for _ in range(size)]
    exact = plain(build(torch.float32)).double()
    (sum(exact(x.double()).square().sum() for x in batches) / size).backward()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for kind in ("ddp", "fsdp2"):
        model = build(torch.float32)
        wrapped = DDP(model) if kind == "ddp" else fully_shard(model, mp_policy=policy)
        with Used() as used, torch.autocast("cpu", torch.bfloat16, enabled=kind == "ddp"):
            output = wrapped(batches[rank])
        assert used.count == 2
        output.double().square().sum().backward()
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            grad = ours.grad.full_tensor() if kind == "fsdp2" else ours.grad
            assert grad.dtype == torch.float32
            assert error(grad, theirs.grad) < 0.02
    dist.barrier()


def test_several_workers() -> None:
    in_processes(workers, 2)


# When layers compute with the two factors instead.


def calls(model: nn.Module, x: Tensor) -> int:
    with Used() as used:
        output = model(x)
    assert_close([output], [plain(model)(x)])
    return used.count


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
@pytest.mark.parametrize("factor", ["down", "up"])
def test_hooks_of_the_factors_are_called(register: str, factor: str) -> None:
    model, called = build(), []
    getattr(getattr(model[2], factor), register)(lambda *_: called.append(1))
    with Used() as used:
        model(batch()).sum().backward()
    assert called == [1]
    assert used.count == 2  # forward and backward of the other layer


def test_other_factors() -> None:
    model = build()
    model[0].down = nn.Sequential(model[0].down, nn.Dropout(0.0))
    model[2].up = nn.utils.parametrizations.weight_norm(model[2].up)
    assert calls(model, batch()) == 0


def test_other_dtypes_ranks_and_inputs() -> None:
    assert calls(build(), batch()) == 2
    with torch.inference_mode():
        assert calls(build(), batch(grad=False)) == 2
    for dtype in (torch.float32, torch.float64):
        assert calls(build(dtype), batch(dtype)) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(build(torch.float64), batch(torch.float64)) == 0  # autocast leaves fp64 as it is
    assert calls(build(rank=24), batch()) == 0
    with Used() as used:
        assert build()(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 80)
    assert used.count == 0
    model = build()
    model[0].up.double()
    with pytest.raises(RuntimeError, match="dtype"):  # as without the kernel
        model(batch())


def test_a_shared_input() -> None:
    model = build()
    SharedInput([model[0], copy.deepcopy(model[0])])
    assert calls(model, batch()) == 1


def test_exported() -> None:
    """Others run an exported graph without our operator."""
    model, x = build(), batch(grad=False)
    exported = torch.export.export(model, (x,))
    assert "two_products" not in str(exported.graph)
    assert_close([exported.module()(x)], [model(x)])


def test_copies_and_files() -> None:
    model, x = build(), batch()
    assert model.state_dict().keys() == plain(model).state_dict().keys()
    assert calls(copy.deepcopy(model), x) == 2
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert calls(torch.load(file, weights_only=False), x) == 2
    pf.merge_(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh, nn.Linear]


def test_gradients_are_not_rounded_on_the_way() -> None:
    """Against the plain path under autocast, which rounds a sum over the rows to 16 bits: for the bias on a CPU too."""
    x, dy = torch.randn(512, 64), torch.randn(512, 32).bfloat16()
    V, U, b = (torch.randn(shape).requires_grad_() for shape in ((16, 64), (32, 16), (32,)))
    grads = []
    for function in (fused_product, reference):
        with torch.autocast("cpu", torch.bfloat16):
            output = function(x, V, U, b)
        grads += torch.autograd.grad(output, b, dy)
    assert grads[0].dtype == grads[1].dtype == torch.float32
    assert (grads[0].bfloat16().float() != grads[0]).any()
    assert torch.equal(grads[1].bfloat16().float(), grads[1])
    assert error(grads[0], dy.double().sum(0)) < 1e-6


if __name__ == "__main__":
    check_kernel("cpu", torch.float16)  # the interpreter multiplies the bits of bf16 numbers
