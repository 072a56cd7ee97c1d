"""On a CUDA device: the same results as on the CPU, in place, and within the promised memory."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.planning import svd

pytestmark = pytest.mark.gpu


def on_gpu(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(layer).cuda().double()


def first(output: object) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[return-value]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x)[0]
        return output


LAYERS = {
    "linear": (lambda: nn.Linear(64, 48), (5, 64)),
    "conv": (lambda: nn.Conv2d(32, 48, 3, stride=2, padding=1, groups=2), (2, 32, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(32, 24, 3, stride=2, padding=1), (2, 32, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(16, 24, 3, padding=1), (2, 16, 4, 4, 4)),
    "lstm": (lambda: nn.LSTM(32, 48, 2, bidirectional=True), (6, 3, 32)),
    "projected": (lambda: nn.LSTM(32, 48, proj_size=16), (6, 3, 32)),
    "rnn": (lambda: nn.RNN(32, 48, 2, nonlinearity="relu"), (6, 3, 32)),
    "gru": (lambda: nn.GRU(32, 48, batch_first=True), (3, 6, 32)),
    "attention": (Attending, (6, 3, 32)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_forward_gradients_and_merge_equal_the_cpu(name: str) -> None:
    build, shape = LAYERS[name]
    model = on_gpu(build())
    plan = pf.plan(model, only=["0*"], rank=4)  # by name: recurrent layers stay dense on CUDA otherwise
    reference = copy.deepcopy(model).cpu()
    pf.factorize_(model, plan)
    pf.factorize_(reference, plan)
    # The SVD's signs may differ between devices; compare like with like.
    reference.load_state_dict(model.state_dict())
    x = torch.randn(shape, dtype=torch.float64)
    outputs = [first(net(x.to(p.device))) for net in (model, reference) for p in [next(net.parameters())]]
    torch.testing.assert_close(outputs[0].cpu(), outputs[1], rtol=1e-8, atol=1e-10)
    for output in outputs:
        output.square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-7, atol=1e-9)
    pf.merge_(model)
    torch.testing.assert_close(first(model(x.cuda())).cpu(), outputs[1], rtol=1e-8, atol=1e-10)


def test_split_is_optimal_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        W = torch.randn(2, 96, 320, device="cuda").to(dtype)
        U, V, error = svd.split(W, 24)
        S = torch.linalg.svdvals(W.double())
        best = float((S[:, 24:].square().sum() / S.square().sum()).sqrt())
        assert error == pytest.approx(best, rel=1e-6)
        got = float((W.double() - U.double() @ V.double()).norm() / W.double().norm())
        assert got == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_training_goes_on_in_bf16_channels_last(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(),
                          nn.Linear(64 * 64, 64)).cuda().to(memory_format=torch.channels_last)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    x = torch.randn(8, 16, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    losses = []
    for step in range(30):
        if step == 10:
            done = pf.factorize_(model, pf.plan(model, rank=0.25), optimizer)
            assert len(done.ranks) == 3
            for name, p in model.named_parameters():
                if p.dim() == 4:
                    assert p.is_contiguous(memory_format=torch.channels_last), name
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[9] < losses[0]


def test_peak_memory_is_that_of_all_factors_and_three_copies_of_the_largest_layer() -> None:
    with torch.device("cuda"):
        model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(1024, 4096), nn.Linear(4096, 1024))))
    plan = pf.plan(model, rank=0.25)
    torch.linalg.eigh(torch.eye(64, device="cuda", dtype=torch.float64))  # the solver's own workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    pf.factorize_(model, plan)
    assert torch.cuda.max_memory_allocated() - base <= (plan.after.parameters + 3 * 1024 * 4096) * 4
    saved = (plan.before.parameters - plan.after.parameters) * 4
    assert torch.cuda.memory_allocated() <= base - saved * 0.99  # nothing keeps the dense weights alive


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_and_autocast(kind: type[nn.RNNBase]) -> None:
    model = on_gpu(kind(32, 48, 2, bidirectional=True))
    assert not pf.plan(model, rank=4).ranks  # slower there
    pf.factorize_(model, pf.plan(model, overrides={"0*": 4}))
    reference = copy.deepcopy(model).cpu()
    x = torch.randn(6, 3, 32, dtype=torch.float64)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 6, 4]), enforce_sorted=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Products are new tensors in every step, which cuDNN copies into one chunk.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        torch.testing.assert_close(model(packed.to("cuda"))[0].data.cpu(), reference(packed)[0].data)
    with torch.autocast("cuda", torch.bfloat16):
        output = model.float()(x.float().cuda())[0]
    output.float().sum().backward()
    torch.testing.assert_close(output.float().cpu(), reference.float()(x.float())[0], rtol=0, atol=0.02)
