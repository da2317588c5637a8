"""Recurrent layers on the physical batch: their autograd nodes, and the factors of their parameters."""

import contextlib
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psg._errors import PsgError
from psg._hardware import _matmul
from psg._torch import _ambient
from psg.factors import Dense, Factor, Outer
from psg.factors._arithmetic import wide
from psg.rules._gates import Lstm, Recurrence, Weights

Kind = type[Recurrence]


class Layer:
    """One layer on physical tensors. Autograd and the builders of the factors share one backward pass, which the first to ask runs.

    Sequences are [n, b, t, i], or [n, t, b, i] where time comes first; b is fn's own batch dimension. States are [n, d, b, h], one for
    each of d directions.

    Args:
        kind: The recurrence that runs in each direction.
        weights: The parameters of each direction.
        compute: The dtype to compute in.
        dtypes: The dtypes of the outputs.
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
        self.solved_for: tuple[Tensor | None, ...] | None = None

    def forward(self, input: Tensor, *states: Tensor) -> list[Tensor]:
        """The concatenated outputs of the directions, and the final states; none is a view of a tensor that backward reads."""
        self.inputs = input, *states
        self.batch = self._turn(input).shape[:2]
        first = [[state[:, d].to(self.compute).flatten(0, 1) for state in states] for d in range(len(self.weights))]
        self.runs = [self.kind(self._sequences(input), own, reverse=d == 1) for d, own in enumerate(self.weights)]
        for run, state in zip(self.runs, first, strict=True):
            run.forward(state)
        output = torch.cat([self._turn(run.after.unflatten(0, self.batch)) for run in self.runs], 3)
        final = [torch.stack([run.final[k].unflatten(0, self.batch) for run in self.runs], 1) for k in range(len(states))]
        return [value.to(dtype) for value, dtype in zip([output, *final], self.dtypes, strict=True)]

    def backward(self, cotangents: Sequence[Tensor | None]) -> None:
        """Compute the cotangents of the gates from those of the outputs (None is zero), unless the last call did so for the same."""
        if self.solved_for is not None and all(own is None or own is c for own, c in zip(self.solved_for, cotangents, strict=True)):
            return  # a cotangent that is None in the graph reaches a builder as zeros
        if self._versions() != self.versions:
            raise PsgError("a weight of a recurrent layer was changed in place between forward and backward; change a clone of it")
        self.solved_for = tuple(cotangents)
        self._solve(cotangents)

    def _solve(self, cotangents: Sequence[Tensor | None]) -> None:
        output, *final = (None if c is None else c.to(self.compute) for c in cotangents)
        width = self.runs[0].after.shape[2]
        for d, run in enumerate(self.runs):
            own = None if output is None else self._sequences(output[..., d * width : (d + 1) * width])
            run.backward(own, [None if c is None else c[:, d].flatten(0, 1) for c in final])

    def input_cotangents(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """After `backward`: the cotangents of those inputs that need one."""
        cotangents: list[Tensor | None] = [None] * len(self.inputs)
        if needed[0]:
            first, *rest = (_matmul.product(run.c_input.flatten(0, 1), run.weights.w_ih) for run in self.runs)
            total = sum(rest, start=first).reshape(*self.batch, *self.runs[0].input.shape[1:])
            cotangents[0] = self._turn(total).to(self.inputs[0].dtype)
        for k in range(1, len(self.inputs)):
            if needed[k]:
                parts = [run.c_state[k - 1].unflatten(0, self.batch) for run in self.runs]
                cotangents[k] = torch.stack(parts, 1).to(self.inputs[k].dtype)
        return cotangents

    def builder(self, direction: int, name: str) -> Callable[[Any], Factor]:
        """The function that builds the factor of one parameter of one direction from the outputs' cotangents."""

        def build(cotangents: Any) -> Factor:
            self.backward(cotangents if isinstance(cotangents, tuple) else (cotangents,))
            sides = self.runs[direction].terms()[name]
            left, *right = (side.contiguous().reshape(self.batch[0], -1, side.shape[2]) for side in sides)
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


class _Run(torch.autograd.Function):
    """The autograd node of a layer. It returns the cotangents of the inputs; the parameters have factors instead."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, *data: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        return tuple(layer.forward(*data))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layer.backward(cotangents)
        return None, *ctx.layer.input_cotangents(ctx.needs_input_grad[1:])


def run_layer(layer: Layer, *data: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast(data[0].device.type, enabled=False) if _ambient.is_autocast(data[0]) else contextlib.nullcontext():
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in data):
            outputs: Any = _Run.apply(layer, *data)
            return outputs
        with torch.no_grad():
            return tuple(layer.forward(*data))


# Reading a call's arguments


def states_of(kind: Kind, hx: Any) -> list[Tensor]:
    """The states of torch's argument hx, or output: a single tensor unless there are several."""
    return list(hx) if kind.states > 1 else [hx]


def as_hx(kind: Kind, states: Sequence[Tensor]) -> Any:
    """The inverse of `states_of`."""
    return tuple(states) if kind.states > 1 else states[0]


def weights_of(kind: Kind, params: Sequence[Tensor], has_biases: bool, directions: int) -> list[Weights] | None:
    """torch's flat list of a layer's parameters, grouped by direction; None if its length does not fit."""
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


def compute_dtype(kind: Kind, input: Tensor, states: Sequence[Tensor], weights: Sequence[Weights]) -> torch.dtype | None:
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
    if not all(dtype.is_floating_point for dtype in dtypes) or len(dtypes) > 1 and not _ambient.is_autocast(input):
        return None
    return reduce(torch.promote_types, map(wide, dtypes))
