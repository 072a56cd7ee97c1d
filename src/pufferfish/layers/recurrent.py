"""Low-rank LSTM, GRU and RNN: every gate's input and hidden matrix has its own two factors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .base import LowRank, wants_gradient
from .matrix import Matrix

State = Tensor | tuple[Tensor, Tensor]


class GateFactors(nn.Module):
    """The factors of one stacked weight of a recurrent layer, a pair a gate.

    `down` computes V x for all gates at once; `up` is the block-diagonal U, a grouped 1×1 convolution.
    `forward` uses its weight in one batched product, which is what that convolution amounts to and
    leaves the gates apart, as the cell wants them: (gates, positions, m).
    """

    def __init__(self, n: int, m: int, gates: int, r: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.down = nn.Linear(n, gates * r, bias=False, device="meta", dtype=dtype)
        self.up = nn.Conv1d(gates * r, gates * m, 1, groups=gates, bias=False, device="meta", dtype=dtype)

    def forward(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        gates = self.up.groups
        inner = self.down(input).unflatten(-1, (gates, -1)).transpose(0, 1)
        U = self.up.weight.view(gates, -1, inner.shape[-1]).mT
        return inner @ U if bias is None else torch.baddbmm(bias, inner, U)

    @property
    def weight(self) -> Tensor:
        """The product of the factors, gates stacked like the dense weight. Read-only."""
        U, V = (w.flatten(1).unflatten(0, (self.up.groups, -1)) for w in (self.up.weight, self.down.weight))
        product: Tensor = U @ V
        return product.flatten(0, 1)


def _dense_gates(input: Tensor, weight: Tensor, gates: int, bias: Tensor | None) -> Tensor:
    product: Tensor = F.linear(input, weight).unflatten(-1, (gates, -1)).transpose(0, 1)
    return product if bias is None else product + bias


class LowRankRNNBase(LowRank):
    """What the three share: layers, directions, packed sequences. Called like, and returns like, `nn.LSTM`.

    Everything is run as a packed sequence: a plain batch is one whose length never shrinks. The products
    with the input are taken for all time steps at once, only those with the hidden state stay in the loop.

    On CUDA the time loop is cuDNN's, on multiplied-out weights: hundreds of small kernels in a row would take
    ten times as long as the arithmetic that they save. There low rank shrinks what is sent, not what is computed.
    """

    gates: int
    # Copied from the dense layer:
    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        dense = cast(nn.LSTM, dense)
        matrices = {matrix.name: matrix for matrix in self.matrices(dense)}
        for name, parameter in dense.named_parameters(recurse=False):
            if name in ranks:
                x = matrices[name]
                self.add_module(name, GateFactors(x.n, x.m, x.blocks, ranks[name], parameter.dtype))
            else:
                self.register_parameter(
                    name, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                )

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        found = []
        for name, parameter in dense.named_parameters(recurse=False):
            if parameter.dim() != 2:
                continue
            rows, n = parameter.shape
            gates = 1 if name.startswith("weight_hr") else cls.gates  # an LSTM's projection is one matrix
            found.append(
                Matrix(
                    name=name,
                    weight=name,
                    shape=(rows, n),
                    blocks=gates,
                    m=rows // gates,
                    n=n,
                    down_row=(n,),
                    up_tail=(1,),
                )
            )
        return found

    @classmethod
    def positions(cls, matrix: Matrix, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        out = output[0].data if isinstance(output[0], PackedSequence) else output[0]
        return int(out.numel() // out.shape[-1])

    @classmethod
    def grad_positions(
        cls, matrix: Matrix, dense: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> int:
        given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        positions = cls.positions(matrix, args, kwargs, output)
        if matrix.name in ("weight_ih_l0", "weight_ih_l0_reverse"):
            return positions if wants_gradient(given["input"]) else 0
        if not wants_gradient((args, kwargs, list(dense.parameters()))):
            return 0
        if matrix.name.startswith("weight_hh") and not wants_gradient(given.get("hx")):
            final = output[1][0] if isinstance(output[1], tuple) else output[1]
            positions -= final.numel() // (
                final.shape[0] * final.shape[-1]
            )  # the first step of every sequence
        return positions

    def flatten_parameters(self) -> None:
        """Nothing to do: the factors are used as they are. Here because models call it on `nn.LSTM`."""

    def _product(self, name: str, input: Tensor, bias: Tensor | None) -> Tensor:
        """W x (+ bias), gate by gate: (gates, positions, m)."""
        weight = getattr(self, name)
        if isinstance(weight, GateFactors):
            product: Tensor = weight(input, bias)
            return product
        return _dense_gates(input, weight, 1 if name.startswith("weight_hr") else self.gates, bias)

    def _bias(self, which: str, suffix: str) -> Tensor | None:
        """(gates, 1, m)"""
        if not self.bias:
            return None
        return cast(Tensor, getattr(self, f"bias_{which}{suffix}")).view(self.gates, 1, -1)

    def cell(self, gx: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, ...]:
        """One time step: `gx` are the gates' input products, the new state's first tensor is the output."""
        raise NotImplementedError

    def _input_bias(self, suffix: str) -> Tensor | None:
        """What can be added outside the time loop."""
        if not self.bias:
            return None
        # Added before the view: views of one sum would leave both biases with the same memory as their gradient.
        both: Tensor = getattr(self, f"bias_ih{suffix}") + getattr(self, f"bias_hh{suffix}")
        return both.view(self.gates, 1, -1)

    def _direction(
        self, data: Tensor, sizes: list[int], state: tuple[Tensor, ...], suffix: str
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction over packed `data`; `state` has a row a sequence."""
        products = self._product(f"weight_ih{suffix}", data, self._input_bias(suffix)).split(sizes, dim=1)
        outputs: list[Tensor] = []
        if suffix.endswith("_reverse"):
            # From the last step back: shorter sequences join with their initial state as we reach their end.
            now = tuple(x[: sizes[-1]] for x in state)
            for gx in reversed(products):
                have, need = now[0].shape[0], gx.shape[1]
                if need > have:
                    now = tuple(torch.cat((x, x0[have:need])) for x, x0 in zip(now, state, strict=True))
                now = self.cell(gx, now, suffix)
                outputs.append(now[0])
            return torch.cat(outputs[::-1]), now
        now, ended = state, []
        for gx in products:
            have, need = now[0].shape[0], gx.shape[1]
            if need < have:
                ended.append(tuple(x[need:] for x in now))
                now = tuple(x[:need] for x in now)
            now = self.cell(gx, now, suffix)
            outputs.append(now[0])
        ended.append(now)
        return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(*ended[::-1], strict=True))

    def _kernel(self, *args: Any) -> tuple[Tensor, ...]:
        """torch's own: outputs, then final states."""
        raise NotImplementedError

    def _fused(
        self, data: Tensor, sizes: list[int], states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All layers in torch's own kernel."""
        held = [getattr(self, name) for name in cast(list[str], self._dense[0]._flat_weights_names)]
        products = [x.weight if isinstance(x, GateFactors) else x for x in held]
        # The kernel wants one dtype; under autocast that of the products.
        dtype = next(w.dtype for w, x in zip(products, held, strict=True) if isinstance(x, GateFactors))
        weights = [w.to(dtype) for w in products]
        data, states = data.to(dtype), tuple(x.to(dtype) for x in states)
        state = states if len(states) > 1 else states[0]
        settings = (self.bias, self.num_layers, float(self.dropout), self.training, self.bidirectional)
        with warnings.catch_warnings():
            # Fresh weights in every step cannot lie in one chunk of memory; cuDNN copies them there.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            if sizes[0] != sizes[-1]:
                output, *finals = self._kernel(data, torch.tensor(sizes), state, weights, *settings)
                return output, tuple(finals)
            plain = data.unflatten(0, (len(sizes), sizes[0]))
            output, *finals = self._kernel(plain, state, weights, *settings, False)
        return output.flatten(0, 1), tuple(finals)

    def _layers(
        self, data: Tensor, sizes: list[int], states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if data.is_cuda and data.numel() and not torch.compiler.is_compiling():
            return self._fused(data, sizes, states)
        finals: list[tuple[Tensor, ...]] = []
        directions = ("", "_reverse") if self.bidirectional else ("",)
        for layer in range(self.num_layers):
            outputs = []
            for direction in directions:
                state = tuple(x[len(finals)] for x in states)
                output, final = self._direction(data, sizes, state, f"_l{layer}{direction}")
                outputs.append(output)
                finals.append(final)
            data = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if self.dropout and layer < self.num_layers - 1:
                data = F.dropout(data, self.dropout, self.training)
        return data, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))

    def _initial(self, input: Tensor, batch: int) -> tuple[Tensor, ...]:
        count = self.num_layers * (2 if self.bidirectional else 1)
        return (input.new_zeros(count, batch, self.proj_size or self.hidden_size),)

    def forward(self, input: Tensor | PackedSequence, hx: State | None = None) -> tuple[Any, State]:
        given: tuple[Tensor, ...] | None = (hx,) if isinstance(hx, Tensor) else hx
        if isinstance(input, PackedSequence):
            sizes = input.batch_sizes.tolist()
            states = _permute(self._states(given, input.data, sizes[0]), input.sorted_indices)
            data, finals = self._layers(input.data, sizes, states)
            packed = PackedSequence(data, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
            return packed, self._state(_permute(finals, input.unsorted_indices))
        if input.dim() not in (2, 3) or input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"{type(self).__name__}: input has shape {tuple(input.shape)}, expected "
                f"(time, batch, {self.input_size}) or (time, {self.input_size})"
            )
        batched = input.dim() == 3
        if not batched:
            input = input.unsqueeze(1)
            given = None if given is None else tuple(x.unsqueeze(1) for x in given)
        elif self.batch_first:
            input = input.transpose(0, 1)
        time, batch = input.shape[:2]
        states = self._states(given, input, batch)
        data, finals = self._layers(input.flatten(0, 1), [batch] * time, states)
        output = data.unflatten(0, (time, batch))
        if not batched:
            return output.squeeze(1), self._state(tuple(x.squeeze(1) for x in finals))
        return (output.transpose(0, 1) if self.batch_first else output), self._state(finals)

    def _states(self, given: tuple[Tensor, ...] | None, input: Tensor, batch: int) -> tuple[Tensor, ...]:
        """The initial states: those given, checked, or zeros."""
        zeros = self._initial(input, batch)
        if given is None:
            return zeros
        shapes, right = ([tuple(x.shape) for x in states] for states in (given, zeros))
        if shapes != right:
            raise RuntimeError(f"{type(self).__name__}: initial state has shape {shapes}, expected {right}")
        return given

    def _state(self, finals: tuple[Tensor, ...]) -> State:
        return finals[0]


def _permute(states: tuple[Tensor, ...], order: Tensor | None) -> tuple[Tensor, ...]:
    return states if order is None else tuple(x.index_select(1, order) for x in states)


class LowRankLSTM(LowRankRNNBase):
    """`nn.LSTM`, projections included."""

    gates = 4

    def _kernel(self, *args: Any) -> tuple[Tensor, ...]:
        return torch.lstm(*args)

    def cell(self, gx: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, ...]:
        h, c = state
        i, f, g, o = self._product(f"weight_hh{suffix}", h, gx).unbind(0)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = (o.sigmoid() * c.tanh()).to(
            o.dtype
        )  # under autocast c stays fp32, the output is what autocast says
        if self.proj_size:
            h = self._product(f"weight_hr{suffix}", h, None)[0]
        return h, c

    def _initial(self, input: Tensor, batch: int) -> tuple[Tensor, ...]:
        (h,) = super()._initial(input, batch)
        return h, h.new_zeros(h.shape[0], batch, self.hidden_size)

    def _state(self, finals: tuple[Tensor, ...]) -> State:
        h, c = finals
        return h, c


class LowRankGRU(LowRankRNNBase):
    """`nn.GRU`."""

    gates = 3

    def _kernel(self, *args: Any) -> tuple[Tensor, ...]:
        return torch.gru(*args)

    def _input_bias(self, suffix: str) -> Tensor | None:
        return self._bias("ih", suffix)  # the new gate's hidden bias stands inside r ⊙ (…)

    def cell(self, gx: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, ...]:
        (h,) = state
        gh = self._product(f"weight_hh{suffix}", h, self._bias("hh", suffix))
        r, z = (gx[:2] + gh[:2]).sigmoid().unbind(0)
        n = (gx[2] + r * gh[2]).tanh()
        return (n + z * (h - n),)


class LowRankRNN(LowRankRNNBase):
    """`nn.RNN` with tanh or relu."""

    gates = 1
    nonlinearity: str  # copied from the dense layer

    def _kernel(self, *args: Any) -> tuple[Tensor, ...]:
        return torch.rnn_tanh(*args) if self.nonlinearity == "tanh" else torch.rnn_relu(*args)

    def cell(self, gx: Tensor, state: tuple[Tensor, ...], suffix: str) -> tuple[Tensor, ...]:
        act: Callable[[Tensor], Tensor] = torch.tanh if self.nonlinearity == "tanh" else torch.relu
        return (act(self._product(f"weight_hh{suffix}", state[0], gx)[0]),)
