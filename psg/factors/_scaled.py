"""Expanded and Scaled: what reductions and entry-by-entry functions of a parameter leave of their results' gradients."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from psg.factors._base import Factor, expect_real, root, square, widen
from psg.factors._dense import Dense
from psg.factors._outer import Outer


class Expanded(Factor):
    """gradient[n] = values[n], expanded to the parameter's shape: one number for a whole row, or for all of it.

    Args:
        values: [n, *small], where small is the shape with 1 in place of some of its sizes.
        shape: The parameter's shape.

    Raises:
        InputError: The values are complex.
    """

    fields = ("values",)

    def __init__(self, values: Tensor, shape: torch.Size) -> None:
        self.values = values
        self._shape = torch.Size(shape)
        expect_real(self)

    @property
    def n(self) -> int:
        return self.values.shape[0]

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def small(self) -> torch.Size:
        """The shape of `values` of one sample."""
        return self.values.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def materialize(self) -> Tensor:
        return self.values.expand(self.n, *self.shape).contiguous()

    def squared_norm(self) -> Tensor:
        return Dense(widen(self.values) * self._times**0.5).squared_norm()

    def scale(self) -> Tensor:
        return self.squared_norm()

    @property
    def _times(self) -> float:
        """How many entries of the gradient are one of the values."""
        return self.shape.numel() / max(1, self.small.numel())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return Dense(self.values).weighted_sum(weights).expand(self.shape).contiguous()

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        total, squares = (moment.expand(self.shape).contiguous() for moment in Dense(self.values).moment_sums())
        return total, squares

    def dot(self, direction: Tensor) -> Tensor:
        return Dense(self.values).dot(widen(direction).sum_to_size(self.small))

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(function(self.values), self.shape)

    def regroup(self, table: Tensor) -> Factor:
        return Expanded(Dense(self.values).regroup(table).materialize(), self.shape)

    def plan(self) -> str:
        return "expanded"


class Scaled(Factor):
    """gradient[n] = entries[n] * factor[n], entry by entry.

    Args:
        factor: Of the parameter's shape.
        entries: [n, *shape], or what broadcasts to it with as many dimensions. In most cases those of all samples are one tensor,
            expanded; then no operation but `materialize` writes a gradient for every sample.
    """

    fields = ("factor", "entries")

    def __init__(self, factor: Factor, entries: Tensor) -> None:
        self.factor = factor
        self.entries = entries

    @property
    def n(self) -> int:
        return self.entries.shape[0]

    @property
    def shape(self) -> torch.Size:
        return self.factor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.factor.dtype

    @property
    def device(self) -> torch.device:
        return self.factor.device

    @property
    def nbytes(self) -> int:
        return self.factor.nbytes + (self.entries.nbytes if self.shared is None else self.shared.nbytes)

    @property
    def is_differentiated(self) -> bool:
        return self.factor.is_differentiated or self.entries.requires_grad

    @property
    def shared(self) -> Tensor | None:
        """The entries of every sample, if they are one tensor: [*shape], or what broadcasts to it."""
        return self.entries[0] if self.n == 1 or (self.n > 1 and self.entries.stride(0) == 0) else None

    def materialize(self) -> Tensor:
        return self.factor.materialize() * self.entries

    def squared_norm(self) -> Tensor:
        shared = self.shared
        if shared is not None and isinstance(self.factor, Expanded):
            sizes = root(widen(shared).expand(self.shape).square().sum_to_size(self.factor.small))
            return Dense(widen(self.factor.values) * sizes).squared_norm()
        if shared is not None and isinstance(self.factor, Outer) and self.factor.positions == 1:
            # sum_ab (e_ab l_a r_b)^2: no gradient is formed.
            (left, size), (right, other) = (_in_units(side[:, 0]) for side in (self.factor.left, self.factor.right))
            entries = widen(shared).expand(self.shape)
            return ((left.square() @ entries.square()) * right.square()).sum(1) * (size * other).square()
        if isinstance(self.factor, Dense):
            return Dense(self.materialize()).squared_norm()
        return torch.cat([Dense(part).squared_norm() for part in self.parts()])

    def scale(self) -> Tensor:
        largest = square(self.entries if self.shared is None else self.shared[None]).flatten(1)
        return self.factor.scale() * (largest.amax(1) if largest.shape[1] else 0)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        shared = self.shared
        if shared is None:
            return Dense(self.materialize()).weighted_sum(weights)
        return self.factor.weighted_sum(weights) * shared

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        shared = self.shared
        if shared is None:
            return Dense(self.materialize()).moment_sums()
        total, squares = self.factor.moment_sums()
        return total * shared, squares * square(shared)

    def dot(self, direction: Tensor) -> Tensor:
        shared = self.shared
        if shared is None:
            return Dense(self.materialize()).dot(direction)
        return self.factor.dot(direction * shared)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(self.factor.map(function), function(self.entries))

    def take(self, index: Tensor | slice) -> Self:
        factor = self.factor.take(index)
        return type(self)(factor, self.entries[index] if self.shared is None else self.shared.expand(factor.n, *self.shared.shape))

    def zero(self, keep: Tensor) -> Self:
        if self.shared is None:
            return super().zero(keep)
        # What is not finite in the entries is so in every sample: those to keep say so themselves.
        finite = self.shared.isfinite()
        factor = self.factor.map(lambda tensor: torch.where(finite.all(), tensor, torch.nan) if tensor.is_floating_point() else tensor)
        return type(self)(factor.zero(keep), torch.where(finite, self.shared, 0).expand(self.entries.shape))

    def to(self, dtype: torch.dtype) -> Self:
        entries = self.entries.to(dtype) if self.shared is None else self.shared.to(dtype).expand(self.entries.shape)
        return type(self)(self.factor.to(dtype), entries)

    def regroup(self, table: Tensor) -> Factor:
        if self.shared is None:
            return Dense(self.materialize()).regroup(table)
        return Scaled(self.factor.regroup(table), self.shared.expand(table.shape[0], *self.shared.shape))

    def settle(self) -> Factor:
        factor = self.factor.settle()
        return Dense(factor.values * self.entries) if isinstance(factor, Dense) else Scaled(factor, self.entries)

    def plan(self) -> str:
        return f"scaled: {self.factor.plan()}"


def _in_units(side: Tensor) -> tuple[Tensor, Tensor]:
    """[n, a] -> the rows in units of their largest entries, whose squares fit, and these, [n]."""
    side = widen(side)
    size = side.detach().abs().amax(1) if side.shape[1] else side.new_zeros(len(side))
    return side / torch.where(size == 0, 1, size)[:, None], size


def merge_scaled(terms: list[Scaled]) -> list[Factor]:
    """As few as there can be: c E + c F = c (E + F), for constants E and F and the same numbers c."""
    merged: list[Factor] = []
    constants: dict[int, tuple[Expanded, Tensor]] = {}
    for term in terms:
        if not isinstance(term.factor, Expanded) or term.shared is None:
            merged.append(term)
            continue
        key = id(term.factor.values)
        constants[key] = term.factor, constants[key][1] + term.shared if key in constants else term.shared
    return merged + [Scaled(factor, entries.expand(factor.n, *entries.shape)) for factor, entries in constants.values()]
