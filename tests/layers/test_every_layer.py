"""What holds for every layer type: names, attributes, devices, copies, training."""

import copy
import gc
import weakref

import pytest
import torch
from reference import assert_close, factorized, reference, tensors
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pufferfish as pf


def conv1d_of_transformers(dtype, device="cpu", **_):
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(5, 6).to(device, dtype)


#: Every type of dense layer, and the shapes of its inputs.
LAYERS = {
    "Linear": (lambda **o: nn.Linear(6, 5, **o), [(3, 6)]),
    "GPT-2's Conv1D": (conv1d_of_transformers, [(3, 6)]),
    "Conv1d": (lambda **o: nn.Conv1d(6, 4, 3, padding="same", groups=2, **o), [(2, 6, 5)]),
    "Conv2d": (lambda **o: nn.Conv2d(3, 5, 3, stride=2, padding=1, **o), [(2, 3, 6, 5)]),
    "Conv3d": (lambda **o: nn.Conv3d(3, 5, 2, padding=1, padding_mode="circular", **o), [(2, 3, 3, 4, 3)]),
    "ConvTranspose1d": (lambda **o: nn.ConvTranspose1d(6, 4, 3, groups=2, **o), [(2, 6, 5)]),
    "ConvTranspose2d": (lambda **o: nn.ConvTranspose2d(4, 5, 3, stride=2, padding=1, output_padding=1, **o), [(2, 4, 3, 3)]),
    "ConvTranspose3d": (lambda **o: nn.ConvTranspose3d(3, 4, 2, **o), [(2, 3, 3, 2, 3)]),
    "LSTM": (lambda **o: nn.LSTM(5, 6, 2, proj_size=3, bidirectional=True, **o), [(4, 2, 5)]),
    "GRU": (lambda **o: nn.GRU(5, 6, 2, batch_first=True, **o), [(2, 4, 5)]),
    "RNN": (lambda **o: nn.RNN(5, 6, bidirectional=True, **o), [(4, 2, 5)]),
    "MultiheadAttention": (lambda **o: nn.MultiheadAttention(8, 2, **o), [(3, 2, 8), (4, 2, 8), (4, 2, 8)]),
    "MultiheadAttention, kdim": (
        lambda **o: nn.MultiheadAttention(8, 2, kdim=5, vdim=6, add_bias_kv=True, **o),
        [(3, 2, 8), (4, 2, 5), (4, 2, 6)],
    ),
}  # fmt: skip
every_layer = pytest.mark.parametrize("name", LAYERS)

#: Checkpoints depend on these: a change here breaks everybody's.
NAMES = {
    "Linear": ["down.weight", "up.weight", "up.bias"],
    "GPT-2's Conv1D": ["down.weight", "up.weight", "up.bias"],
    "Conv2d": ["down.weight", "up.weight", "up.bias"],
    "ConvTranspose2d": ["down.weight", "up.weight", "up.bias"],
    "LSTM": [
        "bias_ih_l0", "bias_hh_l0", "bias_ih_l0_reverse", "bias_hh_l0_reverse",
        "bias_ih_l1", "bias_hh_l1", "bias_ih_l1_reverse", "bias_hh_l1_reverse",
        "weight_ih_l0.down.weight", "weight_ih_l0.up.weight",
        "weight_hh_l0.down.weight", "weight_hh_l0.up.weight",
        "weight_hr_l0.down.weight", "weight_hr_l0.up.weight",
        "weight_ih_l0_reverse.down.weight", "weight_ih_l0_reverse.up.weight",
        "weight_hh_l0_reverse.down.weight", "weight_hh_l0_reverse.up.weight",
        "weight_hr_l0_reverse.down.weight", "weight_hr_l0_reverse.up.weight",
        "weight_ih_l1.down.weight", "weight_ih_l1.up.weight",
        "weight_hh_l1.down.weight", "weight_hh_l1.up.weight",
        "weight_hr_l1.down.weight", "weight_hr_l1.up.weight",
        "weight_ih_l1_reverse.down.weight", "weight_ih_l1_reverse.up.weight",
        "weight_hh_l1_reverse.down.weight", "weight_hh_l1_reverse.up.weight",
        "weight_hr_l1_reverse.down.weight", "weight_hr_l1_reverse.up.weight",
    ],
    "GRU": [
        "bias_ih_l0", "bias_hh_l0", "bias_ih_l1", "bias_hh_l1",
        "weight_ih_l0.down.weight", "weight_ih_l0.up.weight",
        "weight_hh_l0.down.weight", "weight_hh_l0.up.weight",
        "weight_ih_l1.down.weight", "weight_ih_l1.up.weight",
        "weight_hh_l1.down.weight", "weight_hh_l1.up.weight",
    ],
    "RNN": [
        "bias_ih_l0", "bias_hh_l0", "bias_ih_l0_reverse", "bias_hh_l0_reverse",
        "weight_ih_l0.down.weight", "weight_ih_l0.up.weight",
        "weight_hh_l0.down.weight", "weight_hh_l0.up.weight",
        "weight_ih_l0_reverse.down.weight", "weight_ih_l0_reverse.up.weight",
        "weight_hh_l0_reverse.down.weight", "weight_hh_l0_reverse.up.weight",
    ],
    "MultiheadAttention": [
        "q.down.weight", "q.up.weight", "q.up.bias",
        "k.down.weight", "k.up.weight", "k.up.bias",
        "v.down.weight", "v.up.weight", "v.up.bias",
        "out.down.weight", "out.up.weight", "out.up.bias",
    ],
    "MultiheadAttention, kdim": [
        "bias_k", "bias_v",
        "q.down.weight", "q.up.weight", "q.up.bias",
        "k.down.weight", "k.up.weight", "k.up.bias",
        "v.down.weight", "v.up.weight", "v.up.bias",
        "out.down.weight", "out.up.weight", "out.up.bias",
    ],
}  # fmt: skip
NAMES_IN_PART = {
    ("GRU", "0.weight_ih*"): [
        "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "weight_hh_l1", "bias_ih_l1", "bias_hh_l1",
        "weight_ih_l0.down.weight", "weight_ih_l0.up.weight",
        "weight_ih_l1.down.weight", "weight_ih_l1.up.weight",
    ],
    ("MultiheadAttention", "0.[qk]"): [
        "q.down.weight", "q.up.weight", "q.up.bias",
        "k.down.weight", "k.up.weight", "k.up.bias",
        "v.weight", "v.bias", "out.weight", "out.bias",
    ],
    ("MultiheadAttention, kdim", "0.out"): [
        "bias_k", "bias_v",
        "q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias",
        "out.down.weight", "out.up.weight", "out.up.bias",
    ],
}  # fmt: skip


def build(name, dtype=torch.float64, **options):
    torch.manual_seed(0)
    make, shapes = LAYERS[name]
    dense = make(dtype=dtype, **options)
    for label, parameter in dense.named_parameters():
        if "bias" in label:
            nn.init.normal_(parameter, std=0.5)  # some start at zero, which would hide a lost one
    return dense, [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_names(name):
    assert list(factorized(build(name)[0]).state_dict()) == NAMES[name]


@pytest.mark.parametrize(("name", "only"), NAMES_IN_PART)
def test_state_dict_names_of_partly_factorized_layers(name, only):
    assert list(factorized(build(name)[0], only=[only]).state_dict()) == NAMES_IN_PART[name, only]


@every_layer
def test_full_rank_computes_what_the_dense_layer_did(name):
    dense, inputs = build(name)
    low_rank = factorized(dense, 99)
    assert_close(tensors(low_rank(*inputs)), tensors(dense(*inputs)), 1e-10)


@every_layer
def test_attributes_are_those_of_the_dense_layer(name):
    dense, _ = build(name)
    low_rank = factorized(dense.eval())
    public = {key: value for key, value in vars(dense).items() if not key.startswith("_")}
    assert {"training"} < public.keys()
    assert {key: getattr(low_rank, key) for key in public} == public


@every_layer
def test_copies_are_independent(name):
    dense, inputs = build(name)
    low_rank = factorized(dense)
    twin = copy.deepcopy(low_rank)
    before = tensors(low_rank(*inputs))
    assert_close(tensors(twin(*inputs)), before, 0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert not torch.equal(tensors(twin(*inputs))[0], before[0])
    assert_close(tensors(low_rank(*inputs)), before, 0)


@every_layer
def test_meta_device(name):
    dense, inputs = build(name, device="meta")
    low_rank = factorized(dense)
    assert {x.device.type for x in low_rank.parameters()} == {"meta"}
    ours, theirs = (tensors(layer(*(x.to("meta") for x in inputs))) for layer in (low_rank, dense))
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]


@every_layer
def test_empty_batch(name):
    dense, inputs = build(name)
    batch_axis = 1 if isinstance(dense, nn.LSTM | nn.RNN | nn.MultiheadAttention) else 0
    empty = [x.narrow(batch_axis, 0, 0) for x in inputs]
    ours, theirs = (tensors(layer(*empty)) for layer in (factorized(dense), dense))
    assert [x.shape for x in ours] == [x.shape for x in theirs]


@every_layer
def test_autocast_gives_the_dense_layers_dtypes(name):
    dense, inputs = build(name, torch.float32)
    low_rank = factorized(dense)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (tensors(layer(*inputs)) for layer in (low_rank, dense))
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    sum(x.float().sum() for x in ours).backward()
    assert {x.grad.dtype for x in low_rank.parameters()} == {torch.float32}


@every_layer
def test_dtype_can_be_changed(name):
    dense, inputs = build(name)
    low_rank = factorized(dense)
    assert {x.dtype for x in low_rank.parameters()} == {torch.float64}
    low_rank.float()
    assert {x.dtype for x in tensors(low_rank(*(x.float() for x in inputs)))} == {torch.float32}
    assert {x.dtype for x in low_rank.parameters()} == {torch.float32}


def test_the_dense_weight_is_freed():
    model = nn.Sequential(nn.Linear(6, 5))
    weight = weakref.ref(model[0].weight)
    pf.factorize_(model, pf.plan(model, rank=2))
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.endswith(("LSTM", "GRU", "RNN"))])
def test_positions_count_the_work(name):
    """positions × weights are the MACs that torch counts; attention's own products come on top."""
    dense, inputs = build(name, bias=False)
    with FlopCounterMode(display=False) as counter:
        output = dense(*inputs)
    kind = type(factorized(dense))
    macs = sum(kind.positions(x, tuple(inputs), {}, output) * x.numel for x in kind.matrices(dense))
    if isinstance(dense, nn.MultiheadAttention):
        keys = inputs[1].shape[0] + (dense.bias_k is not None)
        macs += 2 * inputs[0].shape[0] * keys * inputs[0].shape[1] * dense.embed_dim
    assert 2 * macs == counter.get_total_flops()


class Net(nn.Module):
    """The layer between two trainable elementwise ones, so that its input and output gradients matter."""

    def __init__(self, layer, inputs):
        super().__init__()
        self.layer = layer
        self.scales = nn.ParameterList(torch.rand_like(x) + 0.5 for x in inputs)

    def forward(self, *inputs):
        output = self.layer(*(x * s for x, s in zip(inputs, self.scales, strict=True)))
        return sum((x.tanh() - 0.5).square().mean() for x in tensors(output))


@every_layer
def test_training(name):
    """Twenty steps beside the reference, which optimizes the same factors through the dense layer."""
    dense, inputs = build(name)
    net = Net(dense, inputs)
    ours = factorized(net)
    theirs = copy.deepcopy(ours)
    losses = []
    for model, run in ((ours, ours), (theirs, reference(theirs, net))):
        stepper = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(20):
            stepper.zero_grad()
            loss = run(*inputs)
            loss.backward()
            stepper.step()
            losses.append(loss.detach())
    assert losses[19] < 0.99 * losses[0]
    assert_close(losses[:20], losses[20:], 1e-9)
    assert_close(list(ours.parameters()), list(theirs.parameters()), 1e-9)
