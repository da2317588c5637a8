"""Recurrences over time with the cotangents of their gates: what the native kernels compute and do not give out.

With z_t = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh the gates before their activations, and C_t the cotangent of z_t, every parameter's
gradient is a sum over time: W_ih: C_t x_t^T, W_hh: C_t h_{t-1}^T, b_ih and b_hh: C_t.

Forward, the gates of all steps are kept. Backward, what each gate's cotangent is multiplied by is computed for all steps at once; what is
left for each step is one product with W_hh and a few elementwise operations. benchmarks/recurrent.py compares this with other ways: for
an LSTM on few threads it is the fastest; a native forward pass, which keeps no gates, and its gates computed again win from about four
threads on.

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
        """The same in another dtype."""
        w_ih, w_hh, *rest = self
        return Weights(w_ih.to(dtype), w_hh.to(dtype), *(None if weight is None else weight.to(dtype) for weight in rest))

    def present(self) -> list[str]:
        """The names of those that are there, in torch's order."""
        return [name for name, weight in self._asdict().items() if weight is not None]


class Recurrence(ABC):
    """One direction of one layer, run on construction.

    Args:
        input: [m, t, i], at least one step.
        state: The initial states: h [m, h or p] and, for an LSTM, c [m, h].
        weights: The parameters.
        reverse: Whether time runs backwards.

    Attributes:
        before: The h that each step reads, [m, t, h or p].
        after: The h that each step writes, in the order of the input.
        final: The states after the last step.
        c_input: After `backward`, the cotangent of W_ih x + b_ih, [m, t, g h].
        c_hidden: After `backward`, the cotangent of W_hh h + b_hh.
        c_state: After `backward`, the cotangents of the initial states.
    """

    gates: int
    states = 1

    def __init__(self, input: Tensor, state: Sequence[Tensor], weights: Weights, reverse: bool) -> None:
        self.input = input
        self.weights = weights
        self.reverse = reverse
        count = input.shape[1]
        self.steps = range(count - 1, -1, -1) if reverse else range(count)
        self.before, self.after = self.track(state[0])
        self.final = self.forward(state)
        self.c_input = self.c_hidden = input.new_empty(0)
        self.c_state: list[Tensor] = []

    @abstractmethod
    def forward(self, state: Sequence[Tensor]) -> list[Tensor]:
        """Fill `after`; return the final states."""

    @staticmethod
    @abstractmethod
    def step(z: Tensor, state: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        """One step in plain ops, from z = W_ih x + b_ih: the new states."""

    @abstractmethod
    def backward(self, cotangent: Tensor | None, final: Sequence[Tensor | None]) -> None:
        """Fill `c_input`, `c_hidden` and `c_state` from the cotangents of `after` and `final`; None is zero. May be called again."""

    def terms(self) -> dict[str, tuple[Tensor, ...]]:
        """After `backward`, by name of the parameter: (left, right) of its gradient sum_t left_t right_t^T; of a bias (left,)."""
        return {
            "w_ih": (self.c_input, self.input),
            "w_hh": (self.c_hidden, self.before),
            "b_ih": (self.c_input,),
            "b_hh": (self.c_hidden,),
        }

    def track(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Room for a state at every step: what the steps read, the first of them `first`, and what they write."""
        count = len(self.steps)
        room = self.input.new_empty(len(first), count + 1, first.shape[1])
        early, late = room[:, :count], room[:, 1:]
        before, after = (late, early) if self.reverse else (early, late)
        before[:, self.steps[0]] = first
        return before, after

    def project(self, bias: Tensor | None) -> Tensor:
        """W_ih x + bias for all steps: [m, t, g h]."""
        return F.linear(self.input.flatten(0, 1), self.weights.w_ih, bias).unflatten(0, self.input.shape[:2])

    def columns(self) -> Tensor:
        """W_hh^T for one product with every step."""
        # A copy costs as much as a step, and makes each step a quarter faster.
        return self.weights.w_hh.T.contiguous() if len(self.steps) > 8 else self.weights.w_hh.T

    def unroll(self, cotangent: Tensor | None, c_h: Tensor, step: Callable[[int], None]) -> None:
        """Backwards through time: add what arrives at each step's output to `c_h`, and let `step` turn that into the one before."""
        rows = None if cotangent is None else cotangent.unbind(1)
        for t in reversed(self.steps):
            if rows is not None:
                c_h.add_(rows[t])
            step(t)


def _add(b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor | None:
    return None if b_ih is None or b_hh is None else b_ih + b_hh


def _copy(cotangent: Tensor | None, like: Tensor) -> Tensor:
    """A cotangent to be changed in place; zeros for None."""
    return torch.zeros_like(like) if cotangent is None else cotangent.clone(memory_format=torch.contiguous_format)


class Elman(Recurrence):
    """h_t = tanh(z_t)."""

    gates = 1

    @staticmethod
    def step(z: Tensor, state: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        return [torch.tanh(z + F.linear(state[0], weights.w_hh, weights.b_hh))]

    def forward(self, state: Sequence[Tensor]) -> list[Tensor]:
        z, before, after = (part.unbind(1) for part in (self.project(_add(self.weights.b_ih, self.weights.b_hh)), self.before, self.after))
        w_hh = self.columns()
        for t in self.steps:
            self.activate(torch.addmm(z[t], before[t], w_hh, out=after[t]))
        return [after[self.steps[-1]]]

    def backward(self, cotangent: Tensor | None, final: Sequence[Tensor | None]) -> None:
        c_h, gates = _copy(final[0], self.final[0]), self.slope()
        rows, w_hh = gates.unbind(1), self.weights.w_hh

        def step(t: int) -> None:
            rows[t].mul_(c_h)
            torch.mm(rows[t], w_hh, out=c_h)

        self.unroll(cotangent, c_h, step)
        self.c_input, self.c_hidden, self.c_state = gates, gates, [c_h]

    def activate(self, z: Tensor) -> None:
        """In place."""
        z.tanh_()

    def slope(self) -> Tensor:
        """The derivative of the activation at every step, as memory of its own."""
        return _tanh_slope(torch.ones_like(self.after), self.after)


class Relu(Elman):
    """h_t = relu(z_t)."""

    @staticmethod
    def step(z: Tensor, state: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        return [torch.relu(z + F.linear(state[0], weights.w_hh, weights.b_hh))]

    def activate(self, z: Tensor) -> None:
        z.relu_()

    def slope(self) -> Tensor:
        return _relu_slope(torch.ones_like(self.after), self.after, 0)


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

    def forward(self, state: Sequence[Tensor]) -> list[Tensor]:
        w_hh, w_hr, width = self.columns(), self.weights.w_hr, state[1].shape[1]
        self.z = self.project(_add(self.weights.b_ih, self.weights.b_hh))
        self.cells, after_c = self.track(state[1])
        self.squashed = torch.empty_like(after_c)
        self.hidden = self.after if w_hr is None else torch.empty_like(after_c)  # o tanh(c)
        z, before, cells, after_c_rows = (part.unbind(1) for part in (self.z, self.before, self.cells, after_c))
        squashed, hidden, after = (part.unbind(1) for part in (self.squashed, self.hidden, self.after))
        i, f, g, o = (gate.unbind(1) for gate in self.z.split(width, 2))
        i_f = self.z[..., : 2 * width].unbind(1)
        for t in self.steps:
            z[t].addmm_(before[t], w_hh)
            i_f[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            c = torch.mul(i[t], g[t], out=after_c_rows[t]).addcmul_(f[t], cells[t])
            torch.mul(o[t], torch.tanh(c, out=squashed[t]), out=hidden[t])
            if w_hr is not None:
                torch.mm(hidden[t], w_hr.T, out=after[t])
        return [after[self.steps[-1]], after_c_rows[self.steps[-1]]]

    def backward(self, cotangent: Tensor | None, final: Sequence[Tensor | None]) -> None:
        w_hh, w_hr = self.weights.w_hh, self.weights.w_hr
        c_h, c_c = (_copy(given, like) for given, like in zip(final, self.final, strict=True))
        i, f, g, o = self.z.chunk(4, 2)
        gates = torch.empty_like(self.z)
        # What the cotangent of c multiplies in the gates i, f, g, and that of h in the gate o and in c.
        c_i, c_f, c_g, c_o = gates.chunk(4, 2)
        _sigmoid_slope(g, i, grad_input=c_i)
        _sigmoid_slope(self.cells, f, grad_input=c_f)
        _tanh_slope(i, g, grad_input=c_g)
        _sigmoid_slope(self.squashed, o, grad_input=c_o)
        through = _tanh_slope(o, self.squashed).unbind(1)
        width = c_o.shape[2]
        c_ifg = gates[..., : 3 * width].unflatten(2, (3, width)).unbind(1)
        rows, c_o, f, three = gates.unbind(1), c_o.unbind(1), f.unbind(1), c_c.unsqueeze(1)
        self.c_projected = None if w_hr is None else torch.empty_like(self.after)

        def step(t: int) -> None:
            c_hidden = c_h
            if self.c_projected is not None and w_hr is not None:
                self.c_projected[:, t] = c_h
                c_hidden = c_h @ w_hr
            c_c.addcmul_(c_hidden, through[t])
            c_ifg[t].mul_(three)
            c_o[t].mul_(c_hidden)
            c_c.mul_(f[t])
            torch.mm(rows[t], w_hh, out=c_h)

        self.unroll(cotangent, c_h, step)
        self.c_input, self.c_hidden, self.c_state = gates, gates, [c_h, c_c]

    def terms(self) -> dict[str, tuple[Tensor, ...]]:
        terms = super().terms()
        return terms if self.c_projected is None else terms | {"w_hr": (self.c_projected, self.hidden)}


class Gru(Recurrence):
    """h_t = (1 - u_t) n_t + u_t h_{t-1} with n_t = tanh(z^n_t + r_t (W_hn h_{t-1} + b_hn)); r and u sigmoids of z.

    The gate n is not a function of the sum z: its two parts have cotangents of their own, c and r c.
    """

    gates = 3

    @staticmethod
    def step(z: Tensor, state: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        (z_r, z_u, z_n), (h_r, h_u, h_n) = z.chunk(3, -1), F.linear(state[0], weights.w_hh, weights.b_hh).chunk(3, -1)
        u, n = torch.sigmoid(z_u + h_u), torch.tanh(z_n + torch.sigmoid(z_r + h_r) * h_n)
        return [n + u * (state[0] - n)]

    def forward(self, state: Sequence[Tensor]) -> list[Tensor]:
        w_ih, w_hh, b_ih, b_hh, _ = self.weights
        width = state[0].shape[1]
        b_n = None
        if b_ih is not None and b_hh is not None:
            b_n = b_hh[2 * width :]
            b_ih = torch.cat([b_ih[: 2 * width] + b_hh[: 2 * width], b_ih[2 * width :]])
        self.z = self.project(b_ih)
        self.hidden_n = self.z.new_empty(*self.z.shape[:2], width)  # W_hn h + b_hn
        r_u = self.z[..., : 2 * width].unbind(1)
        r, u, n = (gate.unbind(1) for gate in self.z.split(width, 2))
        hidden_n, before, after = (part.unbind(1) for part in (self.hidden_n, self.before, self.after))
        w_ru, w_n = self.columns().split((2 * width, width), 1)
        for t in self.steps:
            r_u[t].addmm_(before[t], w_ru).sigmoid_()
            if b_n is None:
                torch.mm(before[t], w_n, out=hidden_n[t])
            else:
                torch.addmm(b_n, before[t], w_n, out=hidden_n[t])
            n[t].addcmul_(r[t], hidden_n[t]).tanh_()
            torch.lerp(n[t], before[t], u[t], out=after[t])
        return [after[self.steps[-1]]]

    def backward(self, cotangent: Tensor | None, final: Sequence[Tensor | None]) -> None:
        c_h, w_hh = _copy(final[0], self.final[0]), self.weights.w_hh
        r, u, n = self.z.chunk(3, 2)
        width = n.shape[2]
        # What the cotangent of h multiplies in each gate.
        c_input, c_hidden = torch.empty_like(self.z), torch.empty_like(self.z)
        c_n = _tanh_slope(1 - u, n, grad_input=c_input[..., 2 * width :])
        c_r, c_u, c_hidden_n = c_hidden.chunk(3, 2)
        torch.mul(_sigmoid_slope(self.hidden_n, r), c_n, out=c_r)
        _sigmoid_slope(self.before - n, u, grad_input=c_u)
        torch.mul(c_n, r, out=c_hidden_n)
        rows, gates, c_n, u = c_hidden.unbind(1), c_hidden.unflatten(2, (3, width)).unbind(1), c_n.unbind(1), u.unbind(1)
        three = c_h.unsqueeze(1)

        def step(t: int) -> None:
            gates[t].mul_(three)
            c_n[t].mul_(c_h)
            c_h.mul_(u[t]).addmm_(rows[t], w_hh)

        self.unroll(cotangent, c_h, step)
        c_input[..., : 2 * width] = c_hidden[..., : 2 * width]
        self.c_input, self.c_hidden, self.c_state = c_input, c_hidden, [c_h]
