"""Low-rank LSTM, GRU and RNN against torch's own kernels on the multiplied-out weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close, assert_same, factorized, reference, tensors
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pufferfish as pf

KINDS = {nn.LSTM: pf.layers.LowRankLSTM, nn.GRU: pf.layers.LowRankGRU, nn.RNN: pf.layers.LowRankRNN}
IN, HIDDEN, TIME, BATCH = 5, 6, 4, 3
LENGTHS = {"sorted": [4, 2, 2], "unsorted": [1, 4, 3]}
flag = st.booleans()


def initial_states(dense, batch):
    count = dense.num_layers * (1 + dense.bidirectional)
    sizes = [dense.proj_size or HIDDEN, HIDDEN] if isinstance(dense, nn.LSTM) else [HIDDEN]
    return [torch.randn(count, *batch, size, dtype=torch.float64) for size in sizes]


def state_argument(dense, states):
    """What `dense` wants as hx: nothing, a tensor or a pair."""
    return [] if not states else [tuple(states)] if isinstance(dense, nn.LSTM) else states


@st.composite
def recurrent_layers(draw):
    kind = draw(st.sampled_from(list(KINDS)))
    options = {"num_layers": draw(st.integers(1, 3)), "dtype": torch.float64}
    options |= {name: draw(flag) for name in ("bias", "batch_first", "bidirectional")}
    if kind is nn.LSTM:
        options["proj_size"] = draw(st.sampled_from([0, 3]))
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    torch.manual_seed(0)
    return kind(IN, HIDDEN, **options)


@settings(deadline=None, max_examples=25)
@given(dense=recurrent_layers(), rank=st.integers(1, 3), batched=flag, with_state=flag)
def test_plain_tensors(dense, rank, batched, with_state):
    low_rank = factorized(dense, rank)
    assert type(low_rank) is KINDS[type(dense)]
    batch = [BATCH] if batched else []
    x = torch.randn(*(batch + [TIME] if dense.batch_first else [TIME] + batch), IN, dtype=torch.float64)
    states = initial_states(dense, batch) if with_state else []
    assert_same(low_rank, dense, [x, *states], lambda layer, x, *hx: layer(x, *state_argument(dense, hx)))


@settings(deadline=None, max_examples=25)
@given(dense=recurrent_layers(), order=st.sampled_from(list(LENGTHS)), with_state=flag)
def test_packed_sequences(dense, order, with_state):
    x = torch.randn(BATCH, TIME, IN, dtype=torch.float64)
    states = initial_states(dense, [BATCH]) if with_state else []

    def call(layer, x, *hx):
        packed = pack_padded_sequence(x, LENGTHS[order], batch_first=True, enforce_sorted=order == "sorted")
        output, state = layer(packed, *state_argument(dense, hx))
        return output, pad_packed_sequence(output), state

    assert_same(factorized(dense), dense, [x, *states], call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(kind, dtype):
    torch.manual_seed(0)
    dense = kind(IN, HIDDEN, 2, bidirectional=True, dtype=dtype)
    assert_same(factorized(dense), dense, [torch.randn(TIME, BATCH, IN, dtype=dtype)])


@pytest.mark.parametrize(
    "only",
    [["0.weight_ih*"], ["0.weight_hh_l1"], ["0.weight_hr*"], ["0.weight_ih_l0", "0.weight_hh_l0_reverse"]],
)
def test_only_some_matrices(only):
    torch.manual_seed(0)
    dense = nn.LSTM(IN, HIDDEN, 2, proj_size=3, bidirectional=True, dtype=torch.float64)
    low_rank = factorized(dense, only=only)
    assert 0 < len(low_rank.ranks) < len(pf.layers.LowRankLSTM.matrices(dense))
    assert_same(low_rank, dense, [torch.randn(TIME, BATCH, IN, dtype=torch.float64)])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_between_layers_and_in_training_only(kind):
    torch.manual_seed(0)
    x = torch.randn(TIME, BATCH, IN, dtype=torch.float64)
    dense = kind(IN, HIDDEN, 2, dropout=0.5, dtype=torch.float64)
    low_rank = factorized(dense)
    assert not torch.equal(low_rank(x)[0], low_rank(x)[0])
    # The first layer's final state is before the dropout, the second layer's behind it.
    first, second = (tensors(low_rank(x)[1])[0] for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert_same(low_rank.eval(), dense.eval(), [x])

    dense = kind(IN, HIDDEN, 1, dtype=torch.float64)
    low_rank = factorized(dense)
    low_rank.dropout = 0.5  # one layer: nothing is dropped, nn.LSTM only warns
    assert_same(low_rank, dense, [x])


def test_without_gradient():
    torch.manual_seed(0)
    dense = nn.LSTM(IN, HIDDEN, 2, dtype=torch.float64).eval()
    low_rank, x = factorized(dense), torch.randn(TIME, BATCH, IN, dtype=torch.float64)
    with torch.no_grad():
        assert_close(tensors(low_rank(x)), tensors(reference(low_rank, dense)(x)), 1e-10)


def test_wrong_shapes_are_refused():
    low_rank = factorized(nn.LSTM(IN, HIDDEN))
    x = torch.randn(TIME, BATCH, IN)
    h, c = torch.zeros(1, BATCH, HIDDEN), torch.zeros(1, BATCH, HIDDEN)
    with pytest.raises(RuntimeError, match="input has shape"):
        low_rank(x[..., 1:])
    with pytest.raises(RuntimeError, match="input has shape"):
        low_rank(x[None])
    for wrong in ((h[:, 1:], c[:, 1:]), (h, c[..., 1:]), (h[0], c[0]), h):
        with pytest.raises(RuntimeError, match="initial state has shape"):
            low_rank(x, wrong)
    packed = pack_padded_sequence(x, [4, 2, 1])
    with pytest.raises(RuntimeError, match="initial state has shape"):
        low_rank(packed, (h.repeat(1, 2, 1), c.repeat(1, 2, 1)))


@settings(deadline=None, max_examples=25)
@given(dense=recurrent_layers(), rank=st.integers(1, 3), sizes=st.sampled_from([[3, 3, 3], [3, 2, 1]]))
def test_the_fused_kernel_gives_what_the_loop_gives(dense, rank, sizes):
    """On CUDA torch's kernel runs on multiplied-out weights; it has the same results on a CPU."""
    low_rank = factorized(dense, rank)
    data = torch.randn(sum(sizes), IN, dtype=torch.float64, requires_grad=True)
    wanted = [data, *low_rank.parameters()]
    results = []
    for run in (low_rank._fused, low_rank._layers):
        output, finals = run(data, sizes, tuple(initial_states_like(dense, sizes[0])))
        loss = output.square().sum() + sum(x.square().sum() for x in finals)
        results.append([output, *finals, *torch.autograd.grad(loss, wanted)])
    assert_close(*results, 1e-10)


def initial_states_like(dense, batch):
    torch.manual_seed(1)
    return initial_states(dense, [batch])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_every_gradient_has_its_own_memory(kind: type[nn.RNNBase]) -> None:
    """Scalers and clipping change gradients in place, each once."""
    model = nn.ModuleList([kind(32, 32)])
    pf.factorize_(model, pf.plan(model, rank=4))
    model[0](torch.randn(3, 2, 32))[0].sum().backward()
    places = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    assert len(places) == len(list(model.parameters()))
    assert len(set(places)) == len(places)
