"""Recurrent layers and cells.

With C_t the cotangents of the gates before their activations (psg/rules/_gates.py): grad W_ih[n] = sum_t C_t x_t^T,
grad W_hh[n] = sum_t C_t h_{t-1}^T, grad b[n] = sum_t C_t. A rule runs one layer, in one direction or two. A stack of layers is split into
such calls, with its dropout between them, which follows vmap's randomness. vmap itself has no rule for these ops: where psg's rule declines
(weights differ between samples, a pack holds sequences of several lengths), and for cells, the recurrence is written out in other ops.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._errors import PsgError
from psg._torch import _ambient
from psg.rules._gates import Elman, Gru, Lstm, Relu, Weights
from psg.rules._layers import Kind, Layer, as_hx, compute_dtype, run_layer, states_of, weights_of
from psg.rules._registry import decomposition, has_history, rule

_REFUSED = "recurrent op: the sizes or dtypes of the input, the states and the weights do not fit together"


def _layer(op: Any, kind: Kind) -> None:
    overloads = getattr(torch.ops.aten, op.__name__)  # exported programs call these

    @rule(op, overloads.input, params=("params",), frozen=True)
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
            return NotImplemented  # a pack, or a stack of layers
        states, weights = states_of(kind, hx), weights_of(kind, params, has_biases, 1 + bidirectional)
        expected = input.shape[0], 1 + bidirectional, input.shape[1 if batch_first else 2]
        if weights is None or any(has_history(*own) for own in weights) or any(state.shape[:3] != expected for state in states):
            return NotImplemented
        compute = compute_dtype(kind, input, states, weights)
        if compute is None:
            return NotImplemented
        dtypes = [input.dtype] * (1 + len(states))
        if _ambient.is_autocast(input):
            # Which dtypes come out depends on the kernel: ask torch, with one step of one sample.
            step = input[0, :, :1] if batch_first else input[0, :1]
            with torch.no_grad():
                first = as_hx(kind, [state[0] for state in states])
                dtypes = [output.dtype for output in op(step, first, params, has_biases, 1, 0.0, False, bidirectional, batch_first)]
        run = Layer(kind, weights, compute, dtypes, time_first=not batch_first)
        builders = [run.builder(d, name) for d, own in enumerate(weights) for name in own.names()]
        return run_layer(run, input, *states), {"params": builders}

    @decomposition(op, overloads.input, overloads.data)
    def layers(*args: Any, **kwargs: Any) -> Any:
        """Runs what the rule declines: a pack of equal lengths as padded sequences, a stack layer by layer, one layer written out."""
        if kwargs or len(args) != 9:
            return NotImplemented
        if not isinstance(args[3], bool):
            data, batch_sizes, hx, *options = args
            sizes = [int(size) for size in batch_sizes.unbind()]
            if min(sizes) == max(sizes):
                output, *final = op(data.unflatten(0, (len(sizes), sizes[0])), hx, *options, False)
                return output.flatten(0, 1), *final
            return tuple(layer_by_layer(data, sizes, states_of(kind, hx), *options))
        input, hx, *options, batch_first = args
        output, *final = layer_by_layer(input.transpose(0, 1) if batch_first else input, None, states_of(kind, hx), *options)
        return output.transpose(0, 1) if batch_first else output, *final

    def layer_by_layer(
        input: Tensor,
        sizes: list[int] | None,
        states: list[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> list[Tensor]:
        """Runs layer by layer, on [t, b, i] or, with `sizes`, a pack [rows, i]."""
        if num_layers == 1:
            return _written_out(kind, input, sizes, states, weights_of(kind, params, has_biases, 1 + bidirectional))
        count, final = len(params) // num_layers, []
        for k in range(num_layers):
            if k and dropout and train:
                input = F.dropout(input, dropout)
            first, own = [state.chunk(num_layers)[k] for state in states], params[k * count : (k + 1) * count]
            if sizes is None:
                input, *last = op(input, as_hx(kind, first), own, has_biases, 1, 0.0, train, bidirectional, False)
            else:
                input, *last = layer_by_layer(input, sizes, first, own, has_biases, 1, 0.0, train, bidirectional)
            final.append(last)
        return [input, *(torch.cat(parts) for parts in zip(*final, strict=True))]


def _written_out(
    kind: Kind, input: Tensor, sizes: list[int] | None, states: Sequence[Tensor], weights: Sequence[Weights] | None
) -> list[Tensor]:
    """One layer in ops that vmap can run: [t, b, i] or a pack [rows, i], states [d, b, h] -> [t, b, d h] or [rows, d h], [d, b, h]."""
    expected = (len(weights or ()), input.shape[1] if sizes is None else sizes[0])
    if weights is None or any(state.shape[:2] != expected for state in states) or compute_dtype(kind, input, states, weights) is None:
        raise PsgError(_REFUSED)
    outputs: list[Tensor] = []
    final: list[list[Tensor]] = []
    for d, own in enumerate(weights):
        z = F.linear(input, own.w_ih, own.b_ih)
        rows, state = [], [value[d] for value in states]
        steps = z.unbind(0) if sizes is None else z.split(sizes)
        for step in reversed(steps) if d else steps:
            new = kind.step(step, [value[: len(step)] for value in state], own)
            # In a pack the longest sequences come first; those beyond len(step) have ended or, backwards in time, not begun.
            state = new if sizes is None else [torch.cat([value, old[len(step) :]]) for value, old in zip(new, state, strict=True)]
            rows.append(new[0])
        rows = rows[::-1] if d else rows
        outputs.append(torch.stack(rows) if sizes is None else torch.cat(rows))
        final.append(state)
    return [torch.cat(outputs, -1), *(torch.stack(parts) for parts in zip(*final, strict=True))]


# Packs. Their lengths are read as Python values: samples whose lengths differ are then run in separate groups (`_ops.CONVERSIONS`).


@decomposition(torch._VF._pack_padded_sequence, torch.ops.aten._pack_padded_sequence.default)
def _pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """Step by step, the rows of the sequences that have not ended: [t, b, *] or [b, t, *] -> [rows, *], number of rows at each step [t]."""
    input = input.transpose(0, 1) if batch_first else input
    counts = [int(length) for length in lengths.unbind()]
    if counts != sorted(counts, reverse=True) or len(counts) != input.shape[1] or not 0 < counts[-1] <= counts[0] <= len(input):
        raise PsgError("pack_padded_sequence: lengths has to hold one length of 1 to t for each sequence, in decreasing order")
    sizes = [sum(count > t for count in counts) for t in range(counts[0])]
    return torch.cat([input[t, :size] for t, size in enumerate(sizes)]), torch.tensor(sizes, device="cpu")


@decomposition(torch._VF._pad_packed_sequence, torch.ops.aten._pad_packed_sequence.default)
def _pad_packed_sequence(data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int) -> Any:
    """The inverse of packing: [rows, *] -> [t, b, *] or [b, t, *], and the lengths [b]."""
    sizes = [int(size) for size in batch_sizes.unbind()]
    if 0 < total_length < len(sizes):
        raise PsgError("pad_packed_sequence: total_length has to be at least the length of the longest sequence")
    pad = (0, 0) * (data.ndim - 1)
    steps = [F.pad(step, (*pad, 0, sizes[0] - len(step)), value=padding_value) for step in data.split(sizes)]
    output = F.pad(torch.stack(steps), (*pad, 0, 0, 0, max(0, total_length - len(sizes))), value=padding_value)
    lengths = torch.tensor([sum(size > b for size in sizes) for b in range(sizes[0])], device="cpu")
    return output.transpose(0, 1) if batch_first else output, lengths


# Cells are always written out: the rules of their linear layers, and elementwise operations, take less time than a rule of the cell's own.


def _cell(op: Any, kind: Kind) -> None:
    overload = getattr(torch.ops.aten, op.__name__).default

    @decomposition(op, overload)
    def written_out(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Any:
        """One step: ([*,i], [*,h]) -> [*,h], or two states of an LSTM."""
        states, weights = states_of(kind, hx), Weights(w_ih, w_hh, b_ih, b_hh, None)
        with torch._C.DisableTorchFunction():  # each look at a shape would pass the function mode
            sized = all(state.shape[:-1] == input.shape[:-1] for state in states)
            fits = sized and compute_dtype(kind, input, states, [weights]) is not None
        if not fits:
            raise PsgError(_REFUSED)
        return as_hx(kind, kind.step(F.linear(input, w_ih, b_ih), states, weights))


for _name, _kind in (("rnn_tanh", Elman), ("rnn_relu", Relu), ("gru", Gru), ("lstm", Lstm)):
    _layer(getattr(torch, _name), _kind)
    _cell(getattr(torch, f"{_name}_cell"), _kind)
