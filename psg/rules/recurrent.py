"""Recurrent layers and cells.

With C_t the cotangents of the gates before their activations (psg/rules/_gates.py): grad W_ih[n] = sum_t C_t x_t^T,
grad W_hh[n] = sum_t C_t h_{t-1}^T, grad b[n] = sum_t C_t. A rule runs one layer, in one direction or two; a stack of layers is opened into
such calls, with its dropout between them, where vmap's randomness holds. vmap itself has no rule for these ops: where ours does not fit
(every sample has weights of its own) the recurrence is written out in ops that it knows.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from psg._errors import PsgError
from psg.factors import Dense, Factor, Outer
from psg.factors._base import wide
from psg.rules._gates import Elman, Gru, Lstm, Recurrence, Relu, Weights
from psg.rules._registry import decomposition, reshape, rule

Kind = type[Recurrence]


class _Layer:
    """One layer on physical tensors: forward at once, backward for whoever asks first.

    Sequences are [n, b, t, i], or [n, t, b, i] where time comes first; fn itself batches b of them. States are [n, d, b, h], one for each
    of d directions.

    Args:
        kind: What runs in each direction.
        weights: The parameters of each direction.
        compute: The dtype to compute in.
        dtypes: Those of the outputs.
        time_first: Whether time comes first.
    """

    def __init__(
        self, kind: Kind, weights: Sequence[Weights], compute: torch.dtype, dtypes: Sequence[torch.dtype], time_first: bool
    ) -> None:
        self.kind = kind
        self.given = weights
        self.weights = [own.to(compute) for own in weights]
        self.compute = compute
        self.dtypes = dtypes
        self.time_first = time_first
        self.versions = self._versions()
        self.runs: list[Recurrence] = []
        self.inputs: tuple[Tensor, ...] = ()
        self.batch = torch.Size()  # n, b
        self.asked: tuple[Tensor | None, ...] | None = None

    def forward(self, input: Tensor, *states: Tensor) -> list[Tensor]:
        """The outputs of the directions side by side, and the final states; no view of anything that backward reads."""
        self.inputs = input, *states
        self.batch = self._turn(input).shape[:2]
        first = [[state[:, d].to(self.compute).flatten(0, 1) for state in states] for d in range(len(self.weights))]
        self.runs = [self.kind(self._sequences(input), first[d], own, reverse=d == 1) for d, own in enumerate(self.weights)]
        output = torch.cat([self._turn(run.after.unflatten(0, self.batch)) for run in self.runs], 3)
        final = [torch.stack([run.final[k].unflatten(0, self.batch) for run in self.runs], 1) for k in range(len(states))]
        return [value.to(dtype) for value, dtype in zip([output, *final], self.dtypes, strict=True)]

    def backward(self, cotangents: Sequence[Tensor | None]) -> None:
        """Find the cotangents of the gates from those of the outputs (None is zero), unless these were the last to be asked for."""
        if self.asked is not None and all(own is None or own is c for own, c in zip(self.asked, cotangents, strict=True)):
            return  # what is None in the graph comes to a builder as zeros
        if self._versions() != self.versions:
            raise PsgError("a weight of a recurrent op was changed in place after the op had read it")
        self.asked = tuple(cotangents)
        self._solve(cotangents)

    def _solve(self, cotangents: Sequence[Tensor | None]) -> None:
        output, *final = (None if c is None else c.to(self.compute) for c in cotangents)
        width = self.runs[0].after.shape[2]
        for d, run in enumerate(self.runs):
            own = None if output is None else self._sequences(output[..., d * width : (d + 1) * width])
            run.backward(own, [None if c is None else c[:, d].flatten(0, 1) for c in final])

    def input_cotangents(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """After `backward`: for those of the inputs that need one."""
        cotangents: list[Tensor | None] = [None] * len(self.inputs)
        if needed[0]:
            first, *rest = (run.c_input.flatten(0, 1) @ run.weights.w_ih for run in self.runs)
            total = sum(rest, start=first).reshape(*self.batch, *self.runs[0].input.shape[1:])
            cotangents[0] = self._turn(total).to(self.inputs[0].dtype)
        for k in range(1, len(self.inputs)):
            if needed[k]:
                parts = [run.c_state[k - 1].unflatten(0, self.batch) for run in self.runs]
                cotangents[k] = torch.stack(parts, 1).to(self.inputs[k].dtype)
        return cotangents

    def builder(self, direction: int, name: str) -> Callable[[Any], Factor]:
        """For one of the parameters of a direction."""

        def build(cotangents: Any) -> Factor:
            self.backward(cotangents if isinstance(cotangents, tuple) else (cotangents,))
            sides = self.runs[direction].terms()[name]
            left, *right = (side.reshape(self.batch[0], -1, side.shape[2]) for side in sides)
            return Outer(left, *right) if right else Dense(left.sum(1))

        return build

    def _turn(self, tensor: Tensor) -> Tensor:
        """From fn's order of dimensions to [n, b, t, *], and back."""
        return tensor.transpose(1, 2) if self.time_first else tensor

    def _sequences(self, tensor: Tensor) -> Tensor:
        """From fn's order of dimensions to [n b, t, *]."""
        return self._turn(tensor).to(self.compute).flatten(0, 1)

    def _versions(self) -> list[int]:
        return [weight._version for own in self.given for weight in own if weight is not None]


class _Cell(_Layer):
    """One step: the input is [n, b, i], states are [n, b, h], and the new states are all its output."""

    def forward(self, input: Tensor, *states: Tensor) -> list[Tensor]:
        _, *final = super().forward(input.unsqueeze(2), *(state.unsqueeze(1) for state in states))
        return [reshape(value, state.shape) for value, state in zip(final, states, strict=True)]

    def _solve(self, cotangents: Sequence[Tensor | None]) -> None:
        super()._solve([None, *(None if c is None else c.unsqueeze(1) for c in cotangents)])

    def input_cotangents(self, needed: Sequence[bool]) -> list[Tensor | None]:
        input, *states = super().input_cotangents(needed)
        return [None if input is None else input.squeeze(2), *(None if state is None else state.squeeze(1) for state in states)]


class _Run(torch.autograd.Function):
    """A layer's place in the graph, for the sake of its inputs; its parameters have factors."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, *data: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        return tuple(layer.forward(*data))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layer.backward(cotangents)
        return None, *ctx.layer.input_cotangents(ctx.needs_input_grad[1:])


def _run(layer: _Layer, *data: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast(data[0].device.type, enabled=False) if _autocast(data[0]) else contextlib.nullcontext():
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in data):
            outputs: Any = _Run.apply(layer, *data)
            return outputs
        with torch.no_grad():
            return tuple(layer.forward(*data))


def _autocast(tensor: Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)


# What a call says


def _states(kind: Kind, hx: Any) -> list[Tensor]:
    return list(hx) if kind.states > 1 else [hx]


def _weights(kind: Kind, params: Sequence[Tensor], has_biases: bool, directions: int) -> list[Weights] | None:
    """torch's flat list of a layer's parameters by direction; None if it has another length."""
    own, rest = divmod(len(params), directions)
    projections = own - 2 - 2 * has_biases
    if rest or projections not in ((0, 1) if kind is Lstm else (0,)):
        return None
    weights = []
    for start in range(0, len(params), own):
        w_ih, w_hh, *more = params[start : start + own]
        b_ih, b_hh = more[:2] if has_biases else (None, None)
        weights.append(Weights(w_ih, w_hh, b_ih, b_hh, more[-1] if projections else None))
    return weights


def _compute_dtype(kind: Kind, input: Tensor, states: Sequence[Tensor], weights: Sequence[Weights]) -> torch.dtype | None:
    """The dtype to compute in, at least float32; None if the sizes or dtypes are not those that torch expects."""
    features, dtypes = input.shape[-1], {input.dtype, *(state.dtype for state in states)}
    for own in weights:
        hidden = own.w_hh.shape[0] // kind.gates
        output = hidden if own.w_hr is None else own.w_hr.shape[0]
        rows = kind.gates * hidden
        shapes = (rows, features), (rows, output), (rows,), (rows,), (output, hidden)
        if any(w is not None and w.shape != shape for w, shape in zip(own, shapes, strict=True)) or 0 in (features, hidden, output):
            return None
        if [state.shape[-1] for state in states] != [output, hidden][: kind.states]:
            return None
        dtypes |= {w.dtype for w in own if w is not None}
    if not all(dtype.is_floating_point for dtype in dtypes) or len(dtypes) > 1 and not _autocast(input):
        return None
    compute = wide(dtypes.pop())
    for dtype in dtypes:
        compute = torch.promote_types(compute, wide(dtype))
    return compute


# Layers

_PACKED = "a PackedSequence has a length of its own for each sample; padded sequences with a mask would run faster"
_REFUSED = "torch would not accept the sizes or dtypes of this recurrent op"


def _layer(op: Any, kind: Kind) -> None:
    overload = getattr(torch.ops.aten, op.__name__).input  # in the graph of an exported program

    @rule(op, overload, params=("params",))
    def layer(
        input: Tensor,
        hx: Any,
        params: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: Any,
        train: Any,
        bidirectional: Any,
        batch_first: Any,
    ) -> Any:
        """([n,b,t,i], [n,d,b,h]) -> ([n,b,t,d h], [n,d,b,h]), or t before b; an LSTM with two states each."""
        if not isinstance(has_biases, bool) or num_layers != 1 or input.ndim != 4 or input.numel() == 0:
            return NotImplemented  # a PackedSequence; a stack of layers
        states, weights = _states(kind, hx), _weights(kind, params, has_biases, 1 + bidirectional)
        expected = input.shape[0], 1 + bidirectional, input.shape[1 if batch_first else 2]
        if weights is None or any(state.shape[:3] != expected for state in states):
            return NotImplemented
        compute = _compute_dtype(kind, input, states, weights)
        if compute is None:
            return NotImplemented
        dtypes = [input.dtype] * (1 + len(states))
        if _autocast(input):
            # Which dtypes come out depends on the kernel: ask torch, with one step of one sample.
            step = input[0, :, :1] if batch_first else input[0, :1]
            first = [state[0] for state in states]
            with torch.no_grad():
                found = op(step, first if kind is Lstm else first[0], params, has_biases, 1, 0.0, False, bidirectional, batch_first)
            dtypes = [output.dtype for output in found]
        run = _Layer(kind, weights, compute, dtypes, time_first=not batch_first)
        builders = [run.builder(d, name) for d, own in enumerate(weights) for name in own.present()]
        return _run(run, input, *states), {"params": builders}

    @decomposition(op)
    @decomposition(overload)
    def layers(
        input: Tensor,
        hx: Any,
        params: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: Any,
        train: Any,
        bidirectional: Any,
        batch_first: Any,
    ) -> Any:
        """A stack of layers as one call each; one layer that the rule declines, written out."""
        if not isinstance(has_biases, bool):
            raise PsgError(_PACKED)
        states = _states(kind, hx)
        output = input.transpose(0, 1) if batch_first else input  # torch draws its dropout in this order
        if num_layers == 1:
            output, *final = _written_out(kind, output, states, _weights(kind, params, has_biases, 1 + bidirectional))
        else:
            count, last = len(params) // num_layers, []
            for k in range(num_layers):
                if k and dropout and train:
                    output = F.dropout(output, dropout)
                first = [state.chunk(num_layers)[k] for state in states]
                own = params[k * count : (k + 1) * count]
                output, *new = op(output, first if kind is Lstm else first[0], own, has_biases, 1, 0.0, train, bidirectional, False)
                last.append(new)
            final = [torch.cat(parts) for parts in zip(*last, strict=True)]
        return output.transpose(0, 1) if batch_first else output, *final


def _written_out(kind: Kind, input: Tensor, states: Sequence[Tensor], weights: Sequence[Weights] | None) -> list[Tensor]:
    """One layer in ops that vmap knows: [t, b, i], [d, b, h] -> [t, b, d h], [d, b, h]."""
    expected = [(len(weights or ()), input.shape[1])] * len(states)
    if weights is None or [state.shape[:2] for state in states] != expected or _compute_dtype(kind, input, states, weights) is None:
        raise PsgError(_REFUSED)
    outputs: list[Tensor] = []
    final: list[list[Tensor]] = []
    for d, own in enumerate(weights):
        z, state, rows = F.linear(input, own.w_ih, own.b_ih).unbind(0), [state[d] for state in states], []
        for step in reversed(z) if d else z:
            state = kind.step(step, state, own)
            rows.append(state[0])
        outputs.append(torch.stack(rows[::-1] if d else rows))
        final.append(state)
    return [torch.cat(outputs, 2), *(torch.stack(parts) for parts in zip(*final, strict=True))]


@decomposition(torch._VF._pack_padded_sequence)
def _pack_padded_sequence(*args: Any, **kwargs: Any) -> Any:
    """None: under vmap all samples would have to have one length."""
    raise PsgError(_PACKED)


# Cells


def _cell(op: Any, kind: Kind) -> None:
    overload = getattr(torch.ops.aten, op.__name__).default

    @rule(op, overload, params=("w_ih", "w_hh", "b_ih", "b_hh"))
    def cell(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Any:
        """One step: ([n,b,i], [n,b,h]) -> [n,b,h], or two states of an LSTM."""
        states, weights = _states(kind, hx), Weights(w_ih, w_hh, b_ih, b_hh, None)
        if (b_ih is None) != (b_hh is None) or input.ndim != 3 or input.numel() == 0:
            return NotImplemented
        compute = _compute_dtype(kind, input, states, [weights])
        if compute is None or any(state.shape[:-1] != input.shape[:2] for state in states):
            return NotImplemented
        dtypes = [input.dtype] * len(states)
        if _autocast(input):
            first = [state[0, :1] for state in states]
            with torch.no_grad():
                found = _states(kind, op(input[0, :1], first if kind is Lstm else first[0], w_ih, w_hh, b_ih, b_hh))
            dtypes = [output.dtype for output in found]
        run = _Cell(kind, [weights], compute, [dtypes[0], *dtypes], time_first=False)
        outputs = _run(run, input, *states)
        return outputs if kind is Lstm else outputs[0], {name: run.builder(0, name) for name in weights.present()}

    @decomposition(op)
    @decomposition(overload)
    def written_out(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Any:
        """One step in ops that vmap knows."""
        states, weights = _states(kind, hx), Weights(w_ih, w_hh, b_ih, b_hh, None)
        shaped = all(state.shape[:-1] == input.shape[:-1] for state in states)
        if not shaped or _compute_dtype(kind, input, states, [weights]) is None:
            raise PsgError(_REFUSED)
        new = kind.step(F.linear(input, w_ih, b_ih), states, weights)
        return tuple(new) if kind is Lstm else new[0]


for _name, _kind in (("rnn_tanh", Elman), ("rnn_relu", Relu), ("gru", Gru), ("lstm", Lstm)):
    _layer(getattr(torch, _name), _kind)
    _cell(getattr(torch, f"{_name}_cell"), _kind)
