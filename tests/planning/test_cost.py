"""Costs: the paper's counts, plans that tell the truth, totals, measured times."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import pufferfish as pf
from paper import COUNTS
from pufferfish.lab.models import GPT, REFERENCES, Transformer, resnet18
from pufferfish.layers import LowRank, Matrix, base
from pufferfish.planning import totals
from pufferfish.planning.profile import profile

aten = torch.ops.aten


class Macs(TorchDispatchMode):
    """Counts multiplications as they happen: the obvious formulas for the few operators that do any."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        match func.overloadpacket:
            case aten.mm | aten.bmm:
                self.count += args[0].numel() * args[1].shape[-1]
            case aten.addmm | aten.baddbmm:
                self.count += args[1].numel() * args[2].shape[-1]
            case aten.convolution:
                x, weight, transposed = args[0], args[1], args[6]
                self.count += _conv(weight, x if transposed else out)
            case aten.convolution_backward:
                grad, x, weight, transposed, wanted = *args[:3], args[7], args[10]
                self.count += _conv(weight, x if transposed else grad) * sum(wanted[:2])
            case other:
                assert not any(word in str(other) for word in ("attention", "rnn", "lstm", "gru")), other
        return out


def _conv(weight: Tensor, places: Tensor) -> int:
    return weight.numel() * places.shape[0] * math.prod(places.shape[2:])


def counted(model: nn.Module, example: Any) -> tuple[int, int]:
    """Forward and backward MACs of one step on the meta device, by `Macs`."""
    args = pytree.tree_map_only(
        Tensor, lambda x: x.detach().to("meta").requires_grad_(x.requires_grad), example
    )
    with Macs() as macs:
        output = model.to("meta")(*args)
        forward = macs.count
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])
    return forward, macs.count - forward


# The paper's tables.

GRADIENT_MB = {
    "resnet18": (44.7, 13.3),
    "resnet50": (102.2, 60.8),
    "wide_resnet50_2": (275.5, 160.2),
    "vgg19": (82.2, 33.5),
    "lstm": (343.8, 271.8),
    "transformer": (195.9, 106.8),
}


def on_meta(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device("meta"):
        return REFERENCES[name].build(), REFERENCES[name].example()


@pytest.mark.parametrize("name", COUNTS)
def test_the_papers_counts(name: str) -> None:
    model, _ = on_meta(name)
    plan = pf.plan(model, pf.Ratio(0.25, multiple=1), keep=REFERENCES[name].keep)
    assert (plan.before.parameters, plan.after.parameters) == COUNTS[name]
    if name in GRADIENT_MB:
        megabytes = plan.before.gradient_bytes / 1e6, plan.after.gradient_bytes / 1e6
        assert megabytes == pytest.approx(GRADIENT_MB[name], abs=0.1)
    pf.reshape_(model, plan)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name][1]


@pytest.mark.parametrize(
    ("name", "before", "after"), [("resnet50", 4.089, 3.572), ("wide_resnet50_2", 11.398, 9.947)]
)
def test_the_papers_macs(name: str, before: float, after: float) -> None:
    """Per image, convolutions and the classifier.

    The original strides the downsample's second factor, so that its first one works on 14 × 14 places; ours
    strides the first and works on 7 × 7.
    """
    model, example = on_meta(name)
    plan = pf.plan(model, pf.Ratio(0.25, multiple=1), keep=REFERENCES[name].keep, example=example)
    assert plan.before.forward_macs is not None
    assert plan.after.forward_macs is not None
    saved = 256 * 1024 * (14 * 14 - 7 * 7)
    assert round(plan.before.forward_macs / len(example[0]) / 1e9, 3) == before
    assert round((plan.after.forward_macs / len(example[0]) + saved) / 1e9, 3) == after


# Plans tell the truth about the model they lead to.


class CallTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x))


class CrossAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, **options)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        return self.attention(query, memory, memory)[0]


class Stateful(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return self.rnn(x, (h, c))


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.q, self.k, self.v = (nn.Linear(40, 40) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.q(y) * self.k(y) * self.v(y)


def only(model: nn.Module, *names: str) -> nn.Module:
    """The model, in which only these parameters are trained."""
    for name, p in model.named_parameters():
        p.requires_grad_(name in names)
    return model


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48))


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 32, 3, stride=2, padding=1),
        nn.Conv2d(32, 64, 3, padding="same", groups=4, padding_mode="circular"),
        nn.Conv2d(64, 64, 3, groups=64),
        nn.Conv2d(64, 48, (3, 1), dilation=(2, 1), bias=False),
    )


def transposed() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(32, 32, 4, stride=2, padding=1),
        nn.ConvTranspose2d(32, 32, 3, stride=2, groups=2, output_padding=1),
        nn.ConvTranspose2d(32, 8, 3, dilation=2),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (mlp, (torch.randn(5, 40),)),
    "mlp_with_input_gradient": (mlp, (torch.randn(5, 40, requires_grad=True),)),
    "first_frozen": (lambda: frozen(mlp(), "0"), (torch.randn(5, 40),)),
    "middle_frozen": (lambda: frozen(mlp(), "2"), (torch.randn(5, 40),)),
    "last_frozen": (lambda: frozen(mlp(), "4"), (torch.randn(5, 40),)),
    "all_but_the_last_frozen": (lambda: frozen(mlp(), "0", "2"), (torch.randn(5, 40),)),
    "shared_input": (Projections, (torch.randn(5, 40),)),
    "shared_input_frozen": (lambda: frozen(Projections(), "q"), (torch.randn(5, 40),)),
    "call_twice": (CallTwice, (torch.randn(5, 48),)),
    "convolutions": (convolutions, (torch.randn(2, 8, 16, 16),)),
    "convolution_frozen": (lambda: frozen(convolutions(), "1"), (torch.randn(2, 8, 16, 16),)),
    "transposed": (transposed, (torch.randn(2, 32, 5, 5),)),
    "one_dimension": (lambda: nn.Sequential(nn.Conv1d(16, 32, 5), nn.Conv1d(32, 32, 3)), (torch.randn(3, 16, 20),)),
    "three_dimensions": (
        lambda: nn.Sequential(nn.Conv3d(4, 32, 3), nn.ConvTranspose3d(32, 8, 3)),
        (torch.randn(2, 4, 6, 6, 6),),
    ),
    "lstm": (lambda: nn.Sequential(nn.LSTM(32, 48, 2)), (torch.randn(7, 3, 32),)),
    "lstm_both_ways": (
        lambda: nn.Sequential(nn.LSTM(32, 32, 2, bidirectional=True, batch_first=True)),
        (torch.randn(3, 7, 32, requires_grad=True),),
    ),
    "lstm_with_projection": (lambda: nn.Sequential(nn.LSTM(32, 64, proj_size=32)), (torch.randn(7, 3, 32),)),
    "lstm_with_state": (
        lambda: Stateful(nn.LSTM(32, 48)),
        (torch.randn(7, 3, 32), torch.randn(1, 3, 48, requires_grad=True), torch.randn(1, 3, 48)),
    ),
    "lstm_frozen": (
        lambda: nn.Sequential(nn.Linear(32, 32), nn.LSTM(32, 48).requires_grad_(False)),
        (torch.randn(7, 3, 32),),
    ),
    "lstm_second_layer": (
        lambda: only(nn.Sequential(nn.LSTM(32, 48, 2)), "0.weight_ih_l1", "0.weight_hh_l1"), (torch.randn(7, 3, 32),),
    ),
    "lstm_first_layer": (
        lambda: only(nn.Sequential(nn.LSTM(32, 48, 2)), "0.weight_ih_l0", "0.weight_hh_l0"), (torch.randn(7, 3, 32),),
    ),
    "lstm_one_direction": (
        lambda: only(nn.Sequential(nn.LSTM(32, 32, bidirectional=True)), "0.weight_ih_l0", "0.weight_hh_l0"), (torch.randn(7, 3, 32),),
    ),
    "gru": (lambda: nn.Sequential(nn.GRU(32, 48, 2)), (torch.randn(7, 32),)),
    "rnn": (lambda: nn.Sequential(nn.RNN(32, 48, nonlinearity="relu")), (torch.randn(7, 3, 32),)),
    "self_attention": (lambda: nn.TransformerEncoderLayer(32, 4, 64), (torch.randn(6, 2, 32),)),
    "decoder": (lambda: nn.TransformerDecoderLayer(32, 4, 64), (torch.randn(6, 2, 32), torch.randn(5, 2, 32))),
    "cross_attention": (
        lambda: CrossAttention(kdim=40, vdim=40),
        (torch.randn(2, 6, 32, requires_grad=True), torch.randn(2, 5, 40)),
    ),
    "attention_output": (
        lambda: only(CrossAttention(), "attention.out_proj.weight"), (torch.randn(2, 6, 32), torch.randn(2, 5, 32)),
    ),
    "attention_frozen": (
        lambda: CrossAttention().requires_grad_(False),
        (torch.randn(2, 6, 32, requires_grad=True), torch.randn(2, 5, 32)),
    ),
    "resnet18": (lambda: resnet18(channels=8), (torch.randn(2, 3, 16, 16),)),
    "gpt": (lambda: GPT(vocabulary=40, d=32, layers=2, heads=4, context=8), (torch.randint(40, (2, 8)),)),
    "transformer": (
        lambda: Transformer(vocabulary=40, d=32, layers=1, heads=4, hidden=64, length=8),
        (torch.randint(1, 40, (2, 8)), torch.randint(1, 40, (2, 6))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_totals_after_are_the_truth_of_the_reshaped_model(name: str) -> None:
    build, example = MODELS[name]
    model = build()
    plan = pf.plan(model, overrides={"*": pf.Ratio(0.25, multiple=1)}, example=example)
    assert plan.ranks
    assert (plan.before.forward_macs, plan.before.backward_macs) == counted(copy.deepcopy(model), example)
    pf.reshape_(model, plan)
    assert (plan.after.forward_macs, plan.after.backward_macs) == counted(model, example)
    assert plan.after.parameters == sum(p.numel() for p in model.parameters())
    assert plan.after.parameter_bytes == 4 * plan.after.parameters
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (plan.after.trainable, plan.after.gradient_bytes) == (trained, 4 * trained)
    assert plan.after == totals(model, profile(model, example))


class LowRankBilinear(LowRank):
    """A low-rank form of `nn.Bilinear`, whose operator has no FLOP formula."""

    def __init__(self, dense: nn.Bilinear, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        (matrix,) = self.matrices(dense)
        self.down = nn.Linear(matrix.n, ranks[""], bias=False, device="meta")
        self.up = nn.Linear(ranks[""], matrix.m, bias=False, device="meta")

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        m, *inputs = dense.weight.shape
        n = math.prod(inputs)
        return [Matrix(name="", weight="weight", shape=(m, *inputs), m=m, n=n, down_row=(n,))]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.up(self.down((a[..., None] * b[..., None, :]).flatten(-2)))


def test_layers_whose_operators_are_not_counted_have_no_macs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pair = nn.Linear(64, 16), nn.Bilinear(16, 16, 96, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.pair(y, y)

    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    pf.register(nn.Bilinear, LowRankBilinear)
    plan = pf.plan(Pairs(), pf.Ratio(0.25, multiple=1), example=torch.randn(8, 64))
    assert plan.ranks == {"first": {"": 4}, "pair": {"": 24}}
    assert plan["pair"].macs(low_rank=True) == plan["pair"].macs(low_rank=False) == (0, 0)
    assert plan.before.forward_macs == 8 * 64 * 16
    assert plan.after.forward_macs == 8 * 4 * (64 + 16)


def test_a_packed_sequence_needs_a_real_run() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 48, batch_first=True)
            self.out = nn.Linear(48, 40)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
            return self.out(y)

    model, example = Tagger(), (torch.randn(3, 9, 32), torch.tensor([4, 9, 6]))
    plan = pf.plan(model, pf.Ratio(0.25, multiple=1), example=example)
    assert plan["lstm.weight_ih_l0"].positions == 4 + 9 + 6
    assert plan["out"].positions == 3 * 9
    assert plan.before.forward_macs == 19 * 4 * 48 * (32 + 48) + 27 * 48 * 40
    pf.reshape_(model, plan)
    for p in model.parameters():
        p.data.nan_to_num_()
    truth = totals(model, profile(model, example))
    assert plan.after.forward_macs == truth.forward_macs
    assert plan.after.backward_macs == pytest.approx(truth.backward_macs, rel=0.02)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_real_runs_count_recurrent_layers_too(kind: type[nn.RNNBase]) -> None:
    """Fused kernels hide their products from the counter."""
    model, x = nn.Sequential(kind(32, 48)), torch.randn(7, 3, 32)
    assert profile(model, lambda m: m(x)).forward_macs == profile(model, x).forward_macs > 0


def test_real_runs_count_attention_too() -> None:
    model, x = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), torch.randn(2, 6, 32)
    for trained in (True, False):
        model.requires_grad_(trained)
        assert profile(model, lambda m: m(x)).forward_macs == profile(model, x).forward_macs > 0


def test_checkpointed_layers_run_once_in_forward() -> None:
    def build(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        return nn.Sequential(wrap(nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 64))), nn.Linear(64, 64))

    x = torch.randn(5, 40)
    plain, wrapped = (profile(build(wrap), x) for wrap in (lambda m: m, checkpoint_wrapper))
    assert {k: v.positions for k, v in wrapped.calls.items()} == {
        k: v.positions for k, v in plain.calls.items()
    }
    assert wrapped.forward_macs == plain.forward_macs
    assert wrapped.backward_macs > plain.backward_macs  # the second run of what is inside


# Totals.


def test_totals_of_mixed_dtypes_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(10, 20).bfloat16(), nn.Linear(20, 5).requires_grad_(False))
    found = totals(model)
    assert (found.parameters, found.trainable) == (220 + 105, 220)
    assert (found.parameter_bytes, found.gradient_bytes) == (440 + 420, 440)
    assert found.memory(2) == 860 + 3 * 440


def test_shared_parameters_count_once() -> None:
    layer = nn.Linear(10, 10)
    assert totals(nn.Sequential(layer, layer)).parameters == 110


def test_gradient_bytes_after_with_mixed_dtypes() -> None:
    model = nn.Sequential(
        nn.Linear(64, 64).bfloat16(), nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)
    )
    plan = pf.plan(model, overrides={"*": 16})
    pf.factorize_(model, plan)
    assert plan.after == totals(model)


# Measuring.


@pytest.mark.parametrize("name", ["lstm", "cross_attention", "convolutions", "transposed", "middle_frozen"])
def test_every_layer_that_would_change_is_measured(name: str) -> None:
    build, example = MODELS[name]
    plan = pf.plan(build(), overrides={"*": pf.Ratio(0.25, multiple=1)}, example=example, measure=True)
    would = pf.plan(build(), overrides={"*": pf.Ratio(0.25, multiple=1)}).ranks
    for e in plan:
        if e.layer not in would:
            assert e.ms is None
            continue
        assert e.ms is not None
        assert all(ms > 0 for ms in e.ms)
        slower = e.ms[1] >= e.ms[0]
        assert (e.rank is None) == slower
        assert e.reason.startswith("slower when measured") == slower
    assert "ms" in str(plan).splitlines()[0]


def test_packed_sequences_are_measured_with_their_lengths() -> None:
    lstm = nn.LSTM(32, 48)

    def example(model: nn.Module) -> Any:
        return model(pack_padded_sequence(torch.randn(6, 3, 32), torch.tensor([6, 4, 2])))

    plan = pf.plan(nn.Sequential(lstm), pf.Ratio(0.25, multiple=1), example=example, measure=True)
    assert all(e.ms for e in plan)


def test_layers_are_measured_in_the_precision_of_the_example() -> None:
    """A step that enters autocast itself gives layers low-precision inputs, which fp32 weights refuse."""
    model, x = mlp(), torch.randn(4, 40)

    def in_bf16(net: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output: Tensor = net(x)
            return output

    assert profile(model, x).calls["2"].autocast is None
    assert profile(model, in_bf16).calls["2"].autocast == torch.bfloat16
    plan = pf.plan(model, pf.Ratio(0.25, multiple=1), example=in_bf16, measure=True)
    assert [e.ms is not None for e in plan] == [True, True, True]


def test_rules_are_measured_at_a_quarter_of_the_full_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, int]] = []

    def pretend(dense: nn.Module, low_rank: Any, call: Any, *rest: Any) -> tuple[float, float]:
        seen.append(low_rank.ranks)
        return 1.0, 2.0

    monkeypatch.setattr("pufferfish.planning.timing.measure_layer", pretend)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 8))
    for rule in (pf.Energy(0.9), pf.Budget(params=1e4)):
        plan = pf.plan(model, rule, example=torch.randn(2, 128), measure=True)
        assert plan["0"].reason.startswith("slower when measured")
        assert plan["1"].reason.startswith("not smaller")
    assert seen == [{"": 32}, {"": 32}]
