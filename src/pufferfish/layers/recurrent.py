"""Low-rank LSTM, GRU and RNN: the input and hidden matrix of every gate have their own two factors."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .base import LowRank, any_requires_grad, register
from .matrix import Matrix
from .product_weight import ProductWeight

State = Tensor | tuple[Tensor, Tensor]  # as passed by users: h, or (h, c) of an LSTM
States = tuple[Tensor, ...]  # the same as a tuple: (h,) or (h, c)


class GateFactors(nn.Module):
    """Factors of one stacked weight of a recurrent layer, one pair per gate.

    `down` computes V x for all gates at once. `up` is the block-diagonal U, stored as a grouped 1×1
    convolution. `forward` uses its weight in one batched product, equivalent to that convolution, and
    returns (gates, positions, m), the layout that the cells use.
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

    def product(self) -> Tensor:
        """Product of the factors, in the shape of the dense weight."""
        U, V = (w.flatten(1).unflatten(0, (self.up.groups, -1)) for w in (self.up.weight, self.down.weight))
        product: Tensor = U @ V
        return product.flatten(0, 1)

    @property
    def weight(self) -> Tensor:
        """The product as a read-only tensor; see `ProductWeight`."""
        shape = (self.up.out_channels, self.down.in_features)
        return ProductWeight.of(self.product, shape, (self.down.weight, self.up.weight))


class LowRankRNNBase(LowRank):
    """Base class with layers, directions and packed sequences. Arguments and outputs are those of `nn.LSTM`.

    All inputs run as packed sequences; a plain batch is one in which all lengths are equal. Products with
    the input are computed for all time steps at once, products with the hidden state in the time loop.

    On CUDA the time loop runs in cuDNN on multiplied-out weights: hundreds of small kernels would take ten
    times as long as the arithmetic they save. There low rank reduces communication, not computation.
    """

    slower_on_cuda = True
    gates: int
    input_biases: tuple[str, ...] = ("ih", "hh")  # biases that are added outside the time loop
    _kernel: Callable[..., States]  # torch's fused kernel; returns outputs, then final states
    # Copied from the dense layer by the base class.
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
        for name, p in dense.named_parameters(recurse=False):
            if name in ranks:
                x = matrices[name]
                self.add_module(name, GateFactors(x.n, x.m, x.blocks, ranks[name], p.dtype))
            else:
                self.register_parameter(name, nn.Parameter(p.detach().to("meta"), p.requires_grad))

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        matrices = []
        for name, parameter in dense.named_parameters(recurse=False):
            if parameter.dim() != 2:
                continue
            rows, n = parameter.shape
            gates = cls._gates(name)
            shapes: dict[str, Any] = {"shape": (rows, n), "down_row": (n,), "up_tail": (1,)}
            matrices.append(Matrix(name=name, weight=name, blocks=gates, m=rows // gates, n=n, **shapes))
        return matrices

    @classmethod
    def _gates(cls, name: str) -> int:
        return 1 if name.startswith("weight_hr") else cls.gates  # the projection of an LSTM is one matrix

    @classmethod
    def positions(cls, matrix: Matrix, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        out = output[0].data if isinstance(output[0], PackedSequence) else output[0]
        return int(out.numel() // out.shape[-1])

    @classmethod
    def grad_positions(
        cls, matrix: Matrix, dense: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> int:
        arguments = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        positions = cls.positions(matrix, args, kwargs, output)
        if matrix.name in ("weight_ih_l0", "weight_ih_l0_reverse"):
            return positions if any_requires_grad(arguments["input"]) else 0
        kind, place = matrix.name.split("_l")  # "weight_hh", "1_reverse"

        def feeds(
            parameter: str,
        ) -> bool:  # the input of this matrix: in a layer before it, or in the same recurrence
            at = parameter.split("_l")[1]
            before = int(at.partition("_")[0]) < int(place.partition("_")[0])
            return before or (kind != "weight_ih" and at == place)

        if not any_requires_grad((args, kwargs, [p for name, p in dense.named_parameters() if feeds(name)])):
            return 0
        if matrix.name.startswith("weight_hh") and not any_requires_grad(arguments.get("hx")):
            final = output[1][0] if isinstance(output[1], tuple) else output[1]
            # The initial state of every sequence needs no gradient.
            positions -= final.numel() // (final.shape[0] * final.shape[-1])
        return positions

    def flatten_parameters(self) -> None:
        """Do nothing. Models call this method of `nn.LSTM`."""

    def _product(self, name: str, input: Tensor, bias: Tensor | None) -> Tensor:
        """Compute W x (+ bias) per gate: (gates, positions, m)."""
        weight = getattr(self, name)
        if isinstance(weight, GateFactors):
            return cast(Tensor, weight(input, bias))
        product: Tensor = F.linear(input, weight).unflatten(-1, (self._gates(name), -1)).transpose(0, 1)
        return product if bias is None else product + bias

    def _bias(self, suffix: str, *kinds: str) -> Tensor | None:
        """Sum of the biases of these kinds, for all gates: (gates, 1, m)."""
        if not self.bias:
            return None
        # Added before the view: as views of one sum, both biases would share the storage of their gradients.
        first, *rest = (getattr(self, f"bias_{kind}{suffix}") for kind in kinds)
        return cast(Tensor, first + rest[0] if rest else first).view(self.gates, 1, -1)

    def cell(self, gx: Tensor, state: States, suffix: str) -> States:
        """Compute one time step from the input products `gx`. The first tensor of the new state is the output."""
        raise NotImplementedError

    def _direction(self, data: Tensor, sizes: list[int], state: States, suffix: str) -> tuple[Tensor, States]:
        """Run one layer in one direction over packed `data`; `state` has one row per sequence."""
        bias = self._bias(suffix, *self.input_biases)
        products = self._product(f"weight_ih{suffix}", data, bias).split(sizes, dim=1)
        outputs: list[Tensor] = []
        if suffix.endswith("_reverse"):
            # From the last step to the first: shorter sequences join with their initial state at their end.
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

    def _fused(self, data: Tensor, sizes: list[int], states: States) -> tuple[Tensor, States]:
        """Run all layers in torch's fused kernel."""
        tensors = [getattr(self, name) for name in cast(list[str], self._dense[0]._flat_weights_names)]
        products = [x.product() if isinstance(x, GateFactors) else x for x in tensors]
        # The kernel needs a single dtype; under autocast that of the products.
        dtype = next(w.dtype for w, x in zip(products, tensors, strict=True) if isinstance(x, GateFactors))
        weights = [w.to(dtype) for w in products]
        data, states = data.to(dtype), tuple(x.to(dtype) for x in states)
        state = _as_state(states)
        settings = (self.bias, self.num_layers, float(self.dropout), self.training, self.bidirectional)
        if sizes[0] != sizes[-1]:
            output, *finals = self._kernel(data, torch.tensor(sizes), state, weights, *settings)
            return output, tuple(finals)
        batch = data.unflatten(0, (len(sizes), sizes[0]))
        output, *finals = self._kernel(batch, state, weights, *settings, False)
        return output.flatten(0, 1), tuple(finals)

    def _layers(self, data: Tensor, sizes: list[int], states: States) -> tuple[Tensor, States]:
        if data.is_cuda and data.numel() and not torch.compiler.is_compiling():
            return self._fused(data, sizes, states)
        finals: list[States] = []
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

    def _zero_state(self, input: Tensor, batch: int) -> States:
        count = self.num_layers * (2 if self.bidirectional else 1)
        return (input.new_zeros(count, batch, self.proj_size or self.hidden_size),)

    def forward(self, input: Tensor | PackedSequence, hx: State | None = None) -> tuple[Any, State]:
        initial: States | None = (hx,) if isinstance(hx, Tensor) else hx
        if isinstance(input, PackedSequence):
            sizes = input.batch_sizes.tolist()
            states = _permute(self._states(initial, input.data, sizes[0]), input.sorted_indices)
            data, finals = self._layers(input.data, sizes, states)
            packed = PackedSequence(data, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
            return packed, _as_state(_permute(finals, input.unsorted_indices))
        if input.dim() not in (2, 3) or input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"{type(self).__name__}: input has shape {tuple(input.shape)}, expected "
                f"(time, batch, {self.input_size}) or (time, {self.input_size})"
            )
        batched = input.dim() == 3
        if not batched:
            input = input.unsqueeze(1)
            initial = None if initial is None else tuple(x.unsqueeze(1) for x in initial)
        elif self.batch_first:
            input = input.transpose(0, 1)
        time, batch = input.shape[:2]
        states = self._states(initial, input, batch)
        data, finals = self._layers(input.flatten(0, 1), [batch] * time, states)
        output = data.unflatten(0, (time, batch))
        if not batched:
            return output.squeeze(1), _as_state(tuple(x.squeeze(1) for x in finals))
        return (output.transpose(0, 1) if self.batch_first else output), _as_state(finals)

    def _states(self, initial: States | None, input: Tensor, batch: int) -> States:
        """Return `initial` after checking its shapes, or zeros."""
        zeros = self._zero_state(input, batch)
        if initial is None:
            return zeros
        shapes, expected = ([tuple(x.shape) for x in states] for states in (initial, zeros))
        if shapes != expected:
            kind = type(self).__name__
            raise RuntimeError(f"{kind}: initial state has shape {shapes}, expected {expected}")
        return initial


def _as_state(states: States) -> State:
    return cast(State, states if len(states) > 1 else states[0])


def _permute(states: States, order: Tensor | None) -> States:
    return states if order is None else tuple(x.index_select(1, order) for x in states)


class LowRankLSTM(LowRankRNNBase):
    """Low-rank `nn.LSTM`, including projections."""

    gates = 4
    _kernel = staticmethod(torch.lstm)

    def cell(self, gx: Tensor, state: States, suffix: str) -> States:
        h, c = state
        i, f, g, o = self._product(f"weight_hh{suffix}", h, gx).unbind(0)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        # Under autocast c stays fp32; the output has autocast's dtype.
        h = (o.sigmoid() * c.tanh()).to(o.dtype)
        if self.proj_size:
            h = self._product(f"weight_hr{suffix}", h, None)[0]
        return h, c

    def _zero_state(self, input: Tensor, batch: int) -> States:
        (h,) = super()._zero_state(input, batch)
        return h, h.new_zeros(h.shape[0], batch, self.hidden_size)


class LowRankGRU(LowRankRNNBase):
    """Low-rank `nn.GRU`."""

    gates = 3
    input_biases = ("ih",)  # the hidden bias of the new gate is inside r ⊙ (…)
    _kernel = staticmethod(torch.gru)

    def cell(self, gx: Tensor, state: States, suffix: str) -> States:
        (h,) = state
        gh = self._product(f"weight_hh{suffix}", h, self._bias(suffix, "hh"))
        r, z = (gx[:2] + gh[:2]).sigmoid().unbind(0)
        n = (gx[2] + r * gh[2]).tanh()
        return (n + z * (h - n),)


class LowRankRNN(LowRankRNNBase):
    """Low-rank `nn.RNN` with tanh or relu."""

    gates = 1
    nonlinearity: str  # copied from the dense layer

    def _kernel(self, *args: Any) -> States:
        return torch.rnn_tanh(*args) if self.nonlinearity == "tanh" else torch.rnn_relu(*args)

    def cell(self, gx: Tensor, state: States, suffix: str) -> States:
        act: Callable[[Tensor], Tensor] = torch.tanh if self.nonlinearity == "tanh" else torch.relu
        return (act(self._product(f"weight_hh{suffix}", state[0], gx)[0]),)


register(nn.LSTM, LowRankLSTM)
register(nn.GRU, LowRankGRU)
register(nn.RNN, LowRankRNN)
