"""Recurrences over time that return the cotangents of their gates, which the native kernels compute but do not return.

With z_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh the gates before their activations, and C_t the cotangent of z_t, every parameter's
gradient is a sum over time: W_ih: C_t x_t^T, W_hh: C_t h_{t-1}^T, b_ih and b_hh: C_t.

The forward pass keeps the gates of all steps. The backward pass first computes the derivatives of the new states with respect to z, for
all steps at once. Each step then needs only one product with W_hh and a few elementwise operations, which psg.jit compiles into one
kernel. benchmarks/recurrent.py compares this with other ways: for an LSTM on few threads it is the fastest; from about four threads on, a
native forward pass, which keeps no gates, and recomputed gates are faster.

Index legend: m sequences, t steps, i in, h hidden, p projected, g gates.

Source: Hochreiter & Schmidhuber, "Long Short-Term Memory", 1997; Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder",
2014; Sak, Senior & Beaufays, "Long Short-Term Memory Based Recurrent Neural Network Architectures", 2014 (the projection); in the
variants and the order of gates of torch.nn.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._hardware import _matmul
from psg._torch import _functorch
from psg._torch._library import opaque
from psg.rules._steps import CompiledStep

_sigmoid_slope = torch.ops.aten.sigmoid_backward  # (c, y) -> c y (1 - y)
_relu_slope = torch.ops.aten.threshold_backward  # (c, y, 0) -> c [y > 0]
_tanh_slope = torch.ops.aten.tanh_backward  # (c, y) -> c (1 - y^2)


class Weights(NamedTuple):
    """The parameters of one direction of one layer: [g h, i], [g h, h or p], [g h] twice, [p, h]."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None

    def to(self, dtype: torch.dtype) -> "Weights":
        """The same weights in another dtype."""
        return Weights._make(None if weight is None else weight.to(dtype) for weight in self)

    def names(self) -> list[str]:
        """The names of the weights that are not None, in torch's order."""
        return [name for name, weight in self._asdict().items() if weight is not None]


class Recurrence(ABC):
    """One direction of one layer.

    Args:
        input: [m, t, i], at least one step.
        weights: The parameters.
        reverse: Whether time runs backwards.
        fuse: Whether each step's elementwise operations are compiled.

    Attributes:
        saved: After `forward`, the tensors to keep for backward; the first is h at every step, initial state included, [m, t + 1, h or p].
        found: After `backward`, its results.
        before: The h that each step reads, [m, t, h or p].
        after: The h that each step writes, in the order of the input.
        final: The states after the last step.
        c_input: The cotangent of W_ih x + b_ih, [m, t, g h].
        c_hidden: The cotangent of W_hh h + b_hh.
        c_state: The cotangents of the initial states.
    """

    gates: int
    states = 1

    def __init__(self, input: Tensor, weights: Weights, reverse: bool, fuse: bool = False) -> None:
        self.input = input
        self.weights = weights
        self.reverse = reverse
        self.fuse = fuse
        count = input.shape[1]
        self.steps = range(count - 1, -1, -1) if reverse else range(count)
        self.saved: list[Tensor] = []
        self.found: list[Tensor] = []

    def forward(self, state: Sequence[Tensor]) -> None:
        """Run from the initial states: h [m, h or p] and, for an LSTM, c [m, h]."""
        if _functorch.is_traced():
            self.saved = _forward_op(type(self).__name__, self.input, list(state), list(self.weights), self.reverse)
        else:
            self.saved = self.record(state)

    def backward(self, cotangent: Tensor | None, final: Sequence[Tensor | None]) -> None:
        """Compute `found` from the cotangents of `after` and `final`; None is zero. May be called again."""
        if _functorch.is_traced():
            given = self.input, self.saved, list(self.weights), self.reverse
            self.found = _backward_op(type(self).__name__, *given, cotangent, list(final))
        else:
            self.found = self.solve(cotangent, final)

    @abstractmethod
    def record(self, state: Sequence[Tensor]) -> list[Tensor]:
        """Run forward and return `saved`."""

    @abstractmethod
    def solve(self, cotangent: Tensor | None, final: Sequence[Tensor | None]) -> list[Tensor]:
        """Run backward and return `found`: the cotangents of the gates, those of the initial states, then what else `terms` needs."""

    @staticmethod
    @abstractmethod
    def step(z: Tensor, state: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        """One step in plain ops, from z = W_ih x + b_ih: the new states."""

    @property
    def before(self) -> Tensor:
        return self.read_write_views(self.saved[0])[0]

    @property
    def after(self) -> Tensor:
        return self.read_write_views(self.saved[0])[1]

    @property
    def final(self) -> list[Tensor]:
        return [self.read_write_views(buffer)[1][:, self.steps[-1]] for buffer in self.saved[: self.states]]

    @property
    def c_input(self) -> Tensor:
        return self.found[0]

    @property
    def c_hidden(self) -> Tensor:
        return self.found[0]

    @property
    def c_state(self) -> list[Tensor]:
        return self.found[1 : 1 + self.states]

    def terms(self) -> dict[str, tuple[Tensor, ...]]:
        """After `backward`, by name of the parameter: (left, right) of its gradient sum_t left_t right_t^T; of a bias (left,)."""
        return {
            "w_ih": (self.c_input, self.input),
            "w_hh": (self.c_hidden, self.before),
            "b_ih": (self.c_input,),
            "b_hh": (self.c_hidden,),
        }

    def buffer(self, width: int, more: int = 0) -> Tensor:
        """A buffer for all steps, [m, t + more, width], in whose memory time comes first, so that each step is contiguous."""
        return self.input.new_empty(len(self.steps) + more, len(self.input), width).transpose(0, 1)

    def state_buffer(self, first: Tensor) -> Tensor:
        """A buffer for the states before and after all steps, [m, t + 1, *], in which the initial state `first` is filled in."""
        buffer = self.buffer(first.shape[1], more=1)
        self.read_write_views(buffer)[0][:, self.steps[0]] = first
        return buffer

    def read_write_views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Two views of a buffer from `state_buffer`: the states that the steps read, and those that they write."""
        early, late = buffer[:, :-1], buffer[:, 1:]
        return (late, early) if self.reverse else (early, late)

    def project(self, bias: Tensor | None) -> Tensor:
        """W_ih x + bias for all steps, [m, t, g h], laid out like a `buffer`."""
        input = self.input.transpose(0, 1)
        return _matmul.affine(input.flatten(0, 1), self.weights.w_ih, bias).unflatten(0, input.shape[:2]).transpose(0, 1)

    def columns(self) -> Tensor:
        """W_hh^T, for the product in each step."""
        # A contiguous copy costs as much as a step, and makes each step a quarter faster.
        return self.weights.w_hh.T.contiguous() if len(self.steps) > 8 else self.weights.w_hh.T

    def kernel(self, fn: Callable[..., None]) -> Callable[..., None]:
        """The given function of one step's tensors; compiled if `fuse`."""
        return CompiledStep(fn) if self.fuse else fn

    def unroll(self, cotangent: Tensor | None, c_h: Tensor, step: Callable[[int], None]) -> None:
        """Go backwards through time: add each output's cotangent to `c_h`, which `step` then turns into that of the previous state."""
        rows = None if cotangent is None else cotangent.unbind(1)
        for t in reversed(self.steps):
            if rows is not None:
                c_h.add_(rows[t])
            step(t)


def _add(b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor | None:
    return None if b_ih is None or b_hh is None else b_ih + b_hh


def _copy(cotangent: Tensor | None, like: Tensor) -> Tensor:
    """A copy of a cotangent, to be changed in place; zeros for None."""
    return torch.zeros_like(like) if cotangent is None else cotangent.clone(memory_format=torch.contiguous_format)


class Elman(Recurrence):
    """h_t = tanh(z_t)."""

    gates = 1

    @staticmethod
    def step(z: Tensor, state: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        return [torch.tanh(z + F.linear(state[0], weights.w_hh, weights.b_hh))]

    def record(self, state: Sequence[Tensor]) -> list[Tensor]:
        z, buffer, w_hh = self.project(_add(self.weights.b_ih, self.weights.b_hh)).unbind(1), self.state_buffer(state[0]), self.columns()
        before, after = (part.unbind(1) for part in self.read_write_views(buffer))
        for t in self.steps:
            self.activate(torch.addmm(z[t], before[t], w_hh, out=after[t]))
        return [buffer]

    def solve(self, cotangent: Tensor | None, final: Sequence[Tensor | None]) -> list[Tensor]:
        c_h, gates = _copy(final[0], self.final[0]), self.slopes()
        rows, after, w_hh = gates.unbind(1), self.after.unbind(1), self.weights.w_hh

        def step(t: int) -> None:
            self.pull_back(rows[t], c_h, after[t])
            torch.mm(rows[t], w_hh, out=c_h)

        self.unroll(cotangent, c_h, step)
        return [gates, c_h]

    def activate(self, z: Tensor) -> None:
        """Apply the activation in place."""
        z.tanh_()

    def slopes(self) -> Tensor:
        """What `pull_back` needs at every step, in memory for the gates' cotangents: the derivative of the activation."""
        return _tanh_slope(torch.ones_like(self.after, memory_format=torch.contiguous_format), self.after)

    def pull_back(self, row: Tensor, c_h: Tensor, after: Tensor) -> None:
        """Write the gate's cotangent at one step into its row of `slopes`, given the state after it and that state's cotangent."""
        row.mul_(c_h)


class Relu(Elman):
    """h_t = relu(z_t)."""

    @staticmethod
    def step(z: Tensor, state: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        return [torch.relu(z + F.linear(state[0], weights.w_hh, weights.b_hh))]

    def activate(self, z: Tensor) -> None:
        z.relu_()

    def slopes(self) -> Tensor:
        return torch.empty_like(self.after, memory_format=torch.contiguous_format)

    def pull_back(self, row: Tensor, c_h: Tensor, after: Tensor) -> None:
        _relu_slope(c_h, after, 0, grad_input=row)  # selects: where a unit is off, an infinite cotangent gives zero


class Lstm(Recurrence):
    """c_t = f_t c_{t-1} + i_t g_t and h_t = o_t tanh(c_t), projected: h_t = W_hr (o_t tanh(c_t)); i, f, o sigmoids and g a tanh of z."""

    gates = 4
    states = 2

    @staticmethod
    def step(z: Tensor, state: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        i, f, g, o = (z + F.linear(state[0], weights.w_hh, weights.b_hh)).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return [h if weights.w_hr is None else F.linear(h, weights.w_hr), c]

    def record(self, state: Sequence[Tensor]) -> list[Tensor]:
        w_hh, w_hr, width = self.columns(), self.weights.w_hr, state[1].shape[1]
        gates = self.project(_add(self.weights.b_ih, self.weights.b_hh))
        buffers = [self.state_buffer(own) for own in state]
        saved = [*buffers, gates, self.buffer(width), self.buffer(width)]  # the last two for tanh(c), and for the gate g
        if w_hr is not None:
            saved.append(self.buffer(width))  # o tanh(c), which is h where there is no projection
        (before, after), (cells, after_c) = ([part.unbind(1) for part in self.read_write_views(buffer)] for buffer in buffers)
        z, squashed, g, hidden = gates.unbind(1), saved[3].unbind(1), saved[4].unbind(1), after if w_hr is None else saved[5].unbind(1)
        i, f, z_g, o = (gate.unbind(1) for gate in gates.split(width, 2))
        advance = self.kernel(_advance_lstm)
        for t in self.steps:
            z[t].addmm_(before[t], w_hh)
            advance(i[t], f[t], z_g[t], o[t], g[t], cells[t], after_c[t], squashed[t], hidden[t])
            if w_hr is not None:
                torch.mm(hidden[t], w_hr.T, out=after[t])
        return saved

    def solve(self, cotangent: Tensor | None, final: Sequence[Tensor | None]) -> list[Tensor]:
        w_hh, w_hr = self.weights.w_hh, self.weights.w_hr
        c_h, c_c = (_copy(given, like) for given, like in zip(final, self.final, strict=True))
        _, cells, z, squashed, g, *_ = self.saved
        i, f, _, o = z.chunk(4, 2)
        gates, through = z.new_empty(z.shape), torch.empty_like(squashed)
        slopes = gates.chunk(4, 2)
        self.kernel(_lstm_slopes)(i, f, g, o, self.read_write_views(cells)[0], squashed, *slopes, through)
        c_i, c_f, c_g, c_o, through, f, rows = (part.unbind(1) for part in (*slopes, through, f, gates))
        projected = None if w_hr is None else z.new_empty(self.after.shape)
        retreat = self.kernel(_retreat_lstm)

        def step(t: int) -> None:
            c_hidden = c_h
            if projected is not None and w_hr is not None:
                projected[:, t] = c_h
                c_hidden = c_h @ w_hr
            retreat(c_i[t], c_f[t], c_g[t], c_o[t], f[t], through[t], c_hidden, c_c)
            torch.mm(rows[t], w_hh, out=c_h)

        self.unroll(cotangent, c_h, step)
        return [gates, c_h, c_c, *([] if projected is None else [projected])]

    def terms(self) -> dict[str, tuple[Tensor, ...]]:
        terms = super().terms()
        return terms if self.weights.w_hr is None else terms | {"w_hr": (self.found[3], self.saved[5])}


def _advance_lstm(i: Tensor, f: Tensor, z_g: Tensor, o: Tensor, g: Tensor, c: Tensor, new_c: Tensor, squashed: Tensor, h: Tensor) -> None:
    """Activate the gates i, f and o in place, and write g = tanh(z_g), the new states and tanh of the new c."""
    i.sigmoid_()
    f.sigmoid_()
    o.sigmoid_()
    g.copy_(z_g).tanh_()  # the tanh of rows that are apart in memory takes two to three times as long
    torch.mul(i, g, out=new_c).addcmul_(f, c)
    torch.mul(o, torch.tanh(new_c, out=squashed), out=h)


def _lstm_slopes(
    i: Tensor,
    f: Tensor,
    g: Tensor,
    o: Tensor,
    c: Tensor,
    squashed: Tensor,
    c_i: Tensor,
    c_f: Tensor,
    c_g: Tensor,
    c_o: Tensor,
    through: Tensor,
) -> None:
    """The derivatives of the new c with respect to the gates i, f, g, and of h with respect to the gate o and the new c (`through`)."""
    _sigmoid_slope(g, i, grad_input=c_i)
    _sigmoid_slope(c, f, grad_input=c_f)
    _tanh_slope(i, g, grad_input=c_g)
    _sigmoid_slope(squashed, o, grad_input=c_o)
    _tanh_slope(o, squashed, grad_input=through)


def _retreat_lstm(c_i: Tensor, c_f: Tensor, c_g: Tensor, c_o: Tensor, f: Tensor, through: Tensor, c_h: Tensor, c_c: Tensor) -> None:
    """Turn derivatives into cotangents of the gates, and the cotangent of the new c into that of the previous c."""
    c_c.addcmul_(c_h, through)
    c_i.mul_(c_c)
    c_f.mul_(c_c)
    c_g.mul_(c_c)
    c_o.mul_(c_h)
    c_c.mul_(f)


class Gru(Recurrence):
    """h_t = (1 - u_t) n_t + u_t h_{t-1} with n_t = tanh(z^n_t + r_t (W_hn h_{t-1} + b_hn)); r and u sigmoids of z.

    The gate n is not a function of the sum z: its input part and its hidden part have different cotangents, c and r c.
    """

    gates = 3

    @staticmethod
    def step(z: Tensor, state: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        (z_r, z_u, z_n), (h_r, h_u, h_n) = z.chunk(3, -1), F.linear(state[0], weights.w_hh, weights.b_hh).chunk(3, -1)
        u, n = torch.sigmoid(z_u + h_u), torch.tanh(z_n + torch.sigmoid(z_r + h_r) * h_n)
        return [n + u * (state[0] - n)]

    @property
    def c_hidden(self) -> Tensor:
        return self.found[2]

    def record(self, state: Sequence[Tensor]) -> list[Tensor]:
        b_ih, b_hh = self.weights.b_ih, self.weights.b_hh
        width = state[0].shape[1]
        b_n = None
        if b_ih is not None and b_hh is not None:
            b_n = b_hh[2 * width :]
            b_ih = torch.cat([b_ih[: 2 * width] + b_hh[: 2 * width], b_ih[2 * width :]])
        z, buffer = self.project(b_ih), self.state_buffer(state[0])
        saved = [buffer, z, self.buffer(width)]  # W_hn h + b_hn last
        r_u = z[..., : 2 * width].unbind(1)
        r, u, n = (gate.unbind(1) for gate in z.split(width, 2))
        hidden_n, before, after = (part.unbind(1) for part in (saved[2], *self.read_write_views(buffer)))
        w_ru, w_n = self.columns().split((2 * width, width), 1)
        advance = self.kernel(_advance_gru)
        for t in self.steps:
            r_u[t].addmm_(before[t], w_ru)
            if b_n is None:
                torch.mm(before[t], w_n, out=hidden_n[t])
            else:
                torch.addmm(b_n, before[t], w_n, out=hidden_n[t])
            advance(r[t], u[t], n[t], hidden_n[t], before[t], after[t])
        return saved

    def solve(self, cotangent: Tensor | None, final: Sequence[Tensor | None]) -> list[Tensor]:
        c_h, w_hh = _copy(final[0], self.final[0]), self.weights.w_hh
        _, z, hidden_n = self.saved
        r, u, n = z.chunk(3, 2)
        width = n.shape[2]
        c_input, c_hidden = z.new_empty(z.shape), z.new_empty(z.shape)
        c_n, slopes = c_input[..., 2 * width :], c_hidden.chunk(3, 2)
        self.kernel(_gru_slopes)(r, u, n, hidden_n, self.before, c_n, *slopes)
        c_n, c_r, c_u, c_hidden_n, u, rows = (part.unbind(1) for part in (c_n, *slopes, u, c_hidden))
        retreat = self.kernel(_retreat_gru)

        def step(t: int) -> None:
            retreat(c_n[t], c_r[t], c_u[t], c_hidden_n[t], u[t], c_h)
            c_h.addmm_(rows[t], w_hh)

        self.unroll(cotangent, c_h, step)
        c_input[..., : 2 * width] = c_hidden[..., : 2 * width]
        return [c_input, c_h, c_hidden]


def _advance_gru(r: Tensor, u: Tensor, n: Tensor, hidden_n: Tensor, h: Tensor, new_h: Tensor) -> None:
    """Activate the gates, and write the new state."""
    r.sigmoid_()
    u.sigmoid_()
    n.addcmul_(r, hidden_n).tanh_()
    torch.lerp(n, h, u, out=new_h)


def _gru_slopes(
    r: Tensor, u: Tensor, n: Tensor, hidden_n: Tensor, h: Tensor, c_n: Tensor, c_r: Tensor, c_u: Tensor, c_hidden_n: Tensor
) -> None:
    """The derivatives of the new h with respect to the gates."""
    _tanh_slope(1 - u, n, grad_input=c_n)
    torch.mul(_sigmoid_slope(hidden_n, r), c_n, out=c_r)
    _sigmoid_slope(h - n, u, grad_input=c_u)
    torch.mul(c_n, r, out=c_hidden_n)


def _retreat_gru(c_n: Tensor, c_r: Tensor, c_u: Tensor, c_hidden_n: Tensor, u: Tensor, c_h: Tensor) -> None:
    """Turn derivatives into cotangents of the gates, and the cotangent of the new h into the part for the previous h that u passes on."""
    for gate in (c_n, c_r, c_u, c_hidden_n):
        gate.mul_(c_h)
    c_h.mul_(u)


# A tracer sees each pass through time as one op: a compiler would take minutes for a graph of all steps.

_KINDS: dict[str, type[Recurrence]] = {kind.__name__: kind for kind in (Elman, Relu, Lstm, Gru)}


def _record(kind: str, input: Tensor, state: list[Tensor], weights: list[Tensor | None], reverse: bool, fuse: bool = False) -> list[Tensor]:
    return _KINDS[kind](input, Weights._make(weights), reverse, fuse).record(state)


def _solve(
    kind: str,
    input: Tensor,
    saved: list[Tensor],
    weights: list[Tensor | None],
    reverse: bool,
    cotangent: Tensor | None,
    final: list[Tensor | None],
    fuse: bool = False,
) -> list[Tensor]:
    run = _KINDS[kind](input, Weights._make(weights), reverse, fuse)
    run.saved = saved
    return run.solve(cotangent, final)


# The same code gives the output shapes, on fake tensors and without `fuse`.
_forward_op = opaque("recurrence_forward", _record, lambda *args: _record(*args[:5]))
_backward_op = opaque("recurrence_backward", _solve, lambda *args: _solve(*args[:7]))

# Ops with an argument `fuse`, which psg.jit sets in the graphs that it compiles.
FUSIBLE = (_forward_op, _backward_op)
