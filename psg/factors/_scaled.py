"""Expanded and Scaled: the gradients of parameters that enter through reductions and through entry-by-entry functions."""

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._errors import InputError
from psg._hardware import _machine
from psg._torch import _functorch
from psg.factors._arithmetic import root, shared_row, spacious, square, wide, widen, zero_rows
from psg.factors._base import Dense, Factor, Work, expect_real
from psg.factors._division import Division
from psg.factors._outer import Outer


class Expanded(Factor):
    """gradient[n] = values[n], expanded to the parameter's shape: one number for a whole row, or for all of it.

    Args:
        values: [n, *small], where small is the shape with 1 in place of some of its sizes.
        shape: The parameter's shape.

    Raises:
        InputError: The values do not fit the shape, or are complex.

    Example:
        >>> import torch
        >>> Expanded(torch.tensor([[[1.0], [2.0]]]), torch.Size([2, 3])).materialize()
        tensor([[[1., 1., 1.],
                 [2., 2., 2.]]])
    """

    fields = ("values",)
    constants = ("_shape",)

    def __init__(self, values: Tensor, shape: torch.Size) -> None:
        fits = values.ndim == 1 + len(shape) and all(own in (1, size) for own, size in zip(values.shape[1:], shape, strict=True))
        if not fits:
            raise InputError(
                f"psg.factors.Expanded: expected values [n, *small], where small is {tuple(shape)} with 1 in place of some sizes, got "
                f"{tuple(values.shape)}."
            )
        self.values = values
        self._shape = torch.Size(shape)
        expect_real(self, values)

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def small(self) -> torch.Size:
        """The shape of `values` of one sample."""
        return self.values.shape[1:]

    @property
    def _lead(self) -> Tensor:
        return self.values

    def materialize(self) -> Tensor:
        return self.values.expand(self.n, *self.shape).contiguous()

    def add_to(self, out: Tensor) -> None:
        out.add_(self.values)

    def squared_norm(self) -> Tensor:
        return Dense(widen(self.values) * self._times**0.5).squared_norm()

    @property
    def _times(self) -> float:
        """How many entries of the gradient share one value."""
        return self.shape.numel() / max(1, self.small.numel())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return Dense(self.values).weighted_sum(weights).expand(self.shape).contiguous()

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        total, squares = (moment.expand(self.shape).contiguous() for moment in Dense(self.values).moment_sums())
        return total, squares

    def dot(self, direction: Tensor) -> Tensor:
        return Dense(self.values).dot(direction.to(wide(self.dtype)).sum_to_size(self.small))

    def regroup(self, table: Tensor) -> Factor:
        return Expanded(Dense(self.values).regroup(table).materialize(), self.shape)

    def _segment_sum(self, division: Division) -> Factor:
        return Expanded(Dense(self.values)._segment_sum(division).materialize(), self.shape)

    def _work(self) -> Work:
        return Work(0, math.inf, _machine.reused_byte(self.device, self.dtype) * self.sample_bytes, 0)

    def plan(self) -> str:
        return "expanded"


class Scaled(Factor):
    """gradient[n] = entries[n] * factor[n], entry by entry.

    Args:
        factor: Of the parameter's shape.
        entries: [n, *shape], or a tensor of as many dimensions that broadcasts to it. Usually one tensor, expanded over the samples:
            then weighted sums, moments and products with a direction are those of `factor`, scaled.

    Raises:
        InputError: The entries do not fit the factor, or are complex.

    Example:
        >>> import torch
        >>> ones = Expanded(torch.ones(2, 1), torch.Size([3]))
        >>> Scaled(ones, torch.tensor([1.0, 2.0, 2.0]).expand(2, 3)).norm()
        tensor([3., 3.])
    """

    fields = ("factor", "entries")

    def __init__(self, factor: Factor, entries: Tensor) -> None:
        fits = entries.ndim == 1 + len(factor.shape)
        if not fits or any(own not in (1, size) for own, size in zip(entries.shape, (factor.n, *factor.shape), strict=True)):
            raise InputError(
                f"psg.factors.Scaled: expected entries that broadcast to {(factor.n, *factor.shape)}, with as many dimensions, got "
                f"{tuple(entries.shape)}."
            )
        expect_real(self, entries)
        self.factor = factor
        self.entries = entries.expand(factor.n, *entries.shape[1:])  # a row for each sample, to take and to join

    @property
    def shape(self) -> torch.Size:
        return self.factor.shape

    @property
    def _lead(self) -> Tensor:
        return self.factor._lead

    @property
    def nbytes(self) -> int:
        return self.factor.nbytes + (self.entries.nbytes if self.shared is None else self.shared.nbytes)

    @property
    def shared(self) -> Tensor | None:
        """The entries, [*shape] or broadcasting to it, if all samples share one tensor; else None."""
        return shared_row(self.entries)

    def materialize(self) -> Tensor:
        if isinstance(self.factor, Expanded):
            return self.factor.values * self.entries.expand(self.n, *self.shape)
        values = self.factor.materialize()
        alike = self.factor.is_made_anew and values.dtype == self.entries.dtype and not self.is_differentiated
        return values.mul_(self.entries) if alike else values * self.entries

    def add_to(self, out: Tensor) -> None:
        if not isinstance(self.factor, Expanded):
            return super().add_to(out)
        entries, shared = self.entries, self.shared
        if shared is not None and len(out):
            entries = torch.empty_like(out[0]).copy_(shared)  # laid out in memory as what it is added to
        out.addcmul_(self.factor.values, entries)

    def norm(self) -> Tensor:
        squared, unit = self._squared_in_units()
        return ((root(squared) if self.is_differentiated else squared.sqrt()) * unit).to(wide(self.dtype))

    def squared_norm(self) -> Tensor:
        squared, unit = self._squared_in_units()
        return (squared * unit.square()).to(wide(self.dtype))

    def squared_norm_and_terms(self) -> tuple[Tensor, Tensor]:
        squared = self.squared_norm()
        return squared, squared if self._is_one_term else self.squared_terms()

    @property
    def _is_one_term(self) -> bool:
        return isinstance(self.factor, Expanded) or isinstance(self.factor, Outer) and self.factor.is_product

    def _squared_in_units(self) -> tuple[Tensor, Tensor]:
        """Squared norm / unit^2, and each sample's unit, both [n]: without units, squares of parts may overflow before the norm does."""
        if self.shared is not None and self._is_one_term:
            return self._squared_terms_in_units(self.shared)
        products = products_in(self)
        if products is not None and are_few(products[0], products[0]):
            squared = self.recover(inner_by_entries(products, products), self.squared_terms())
            return squared, torch.ones_like(squared)
        whole = self.to(wide(self.dtype))
        squared = Dense(whole.materialize()).squared_norm() if isinstance(self.factor, Dense) else whole.materialized_norm()
        return squared, torch.ones_like(squared)

    def _squared_terms_in_units(self, shared: Tensor) -> tuple[Tensor, Tensor]:
        """sum over the terms of |term / unit|^2, or an upper bound of it, and the unit of each sample, both [n]; materialises no gradient.

        Where the entries are zero just where the terms are largest, the squares of those that are left may underflow, though the gradient
        is of ordinary size: float64 holds them.
        """
        dtype = wide(self.dtype)
        at_once = isinstance(self.factor, Expanded)  # of few numbers
        if at_once or dtype == torch.float64 or self.is_differentiated or not _functorch.can_read_now(self._lead):
            return self._scaled_terms(shared, spacious(self._lead))
        squared, unit = self._scaled_terms(shared, dtype)
        limits = torch.finfo(dtype)
        lost = squared < self.positions * self.shape.numel() * limits.tiny / limits.eps
        if not lost.any():
            return squared, unit
        some = self.factor.take(lost)
        exact, size = Scaled(some, shared.expand(some.n, *shared.shape))._scaled_terms(shared, torch.float64)
        return torch.where(lost, 1, squared), unit.masked_scatter(lost, (root(exact) * size).to(dtype))

    def _scaled_terms(self, shared: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same in one dtype throughout."""
        squared = torch.square if self.is_differentiated else _normal_squares
        if shared.dtype != dtype == torch.float64:  # it holds the squares as they are
            squares, size = shared.to(dtype).square().expand(self.shape), shared.new_ones((), dtype=dtype)
        else:
            entries, size = (part[0] for part in _in_units(shared[None].to(dtype)))
            squares = squared(entries).expand(self.shape)
        if isinstance(self.factor, Expanded):
            values, unit = _in_units(self.factor.values.to(dtype))
            products = squared(values) * squares.sum_to_size(self.factor.small)
            return products.reshape(self.n, self.factor.small.numel()).sum(1), unit * size
        if isinstance(self.factor, Outer):
            (left, unit), (right, other) = _in_units(self.factor.left.to(dtype)), _in_units(self.factor.right.to(dtype))
            # A product that overflows makes the gradient NaN even where the entry that scales it is zero.
            largest = unit * other
            largest = torch.where(largest.to(wide(self.dtype)).isfinite(), largest, torch.nan)
            return ((squared(left) @ squares) * squared(right)).sum((1, 2)), largest * size
        return self.factor.to(dtype).squared_terms(), size.expand(self.n)

    @property
    def positions(self) -> int:
        return self.factor.positions

    def squared_terms(self) -> Tensor:
        if self.shared is None:
            return self.squared_norm()
        squared, unit = self._squared_terms_in_units(self.shared)
        return (squared * unit.square()).to(wide(self.dtype))

    def _materialized(self) -> Dense:
        # Wide, as for the norm: a product of 16-bit numbers may be infinite where the norm is not.
        return Dense(self.to(wide(self.dtype)).materialize())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        shared = self.shared
        return self._materialized().weighted_sum(weights) if shared is None else self.factor.weighted_sum(weights) * shared

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        shared = self.shared
        if shared is None:
            return self._materialized().moment_sums()
        total, squares = self.factor.moment_sums()
        return total * shared, squares * square(shared)

    def dot(self, direction: Tensor) -> Tensor:
        shared = self.shared
        return self._materialized().dot(direction) if shared is None else self.factor.dot(widen(direction) * shared)

    def take(self, index: Tensor | slice) -> Self:
        factor = self.factor.take(index)
        return type(self)(factor, self.entries[index] if self.shared is None else self.shared.expand(factor.n, *self.shared.shape))

    def zero(self, keep: Tensor) -> Self:
        if self.shared is None:
            return type(self)(self.factor.zero(keep), zero_rows(self.entries, keep))
        # Entries that are not finite affect every sample. Move them into the factor as NaN, so that dropped samples can be exactly zero.
        finite = self.shared.isfinite()
        factor = self.factor.map(lambda tensor: torch.where(finite.all(), tensor, torch.nan) if tensor.is_floating_point() else tensor)
        return type(self)(factor.zero(keep), torch.where(finite, self.shared, 0).expand(self.entries.shape))

    def to(self, dtype: torch.dtype) -> Self:
        entries = self.entries.to(dtype) if self.shared is None else self.shared.to(dtype).expand(self.entries.shape)
        return type(self)(self.factor.to(dtype), entries)

    def regroup(self, table: Tensor) -> Factor:
        if self.shared is None:
            return super().regroup(table)
        groups = Scaled(self.factor.regroup(table), self.shared.expand(table.shape[0], *self.shared.shape))
        used = (table < self.n).any(1)
        return groups if _functorch.can_read_now(used) and used.all() else groups.zero(used)  # even if entries are not finite

    @property
    def is_made_anew(self) -> bool:
        return True

    @property
    def is_kept(self) -> bool:
        return self.factor.is_kept

    def _work(self) -> Work | None:
        own = self.factor._work()
        if own is None:
            return None
        written = _machine.reused_byte(self.device, self.dtype) * self.sample_bytes
        materialize, products = own.materialize + written, products_in(self)
        summed = materialize + written if self.shared is None else own.sum
        if products is None:
            return Work(0 if self._is_one_term else materialize + written, math.inf, materialize, summed)
        gram = _pairs_cost(products[0], products[0])
        return Work(min(gram, materialize + written), gram, materialize, summed)

    def plan(self) -> str:
        return f"scaled: {self.factor.plan()}"


def scaled_by(factor: Factor, entries: Tensor) -> Scaled:
    """A factor scaled by entries that all samples share, also if it is one of this kind."""
    if isinstance(factor, Scaled) and factor.shared is not None:
        factor, entries = factor.factor, factor.shared * entries
    return Scaled(factor, entries.expand(factor.n, *entries.shape))


Products = tuple[Outer, Tensor]
"""A gradient E * sum_t l_t r_t^T, entry by entry, with the entries E that all samples share."""


def products_in(term: Factor) -> Products | None:
    """What a term consists of, if it is an Outer, or one scaled by entries that all samples share."""
    if isinstance(term, Scaled) and isinstance(term.factor, Outer) and term.shared is not None:
        return term.factor, term.shared
    return (term, term.left.new_ones(1, 1)) if isinstance(term, Outer) else None


def are_few(x: Outer, y: Outer) -> bool:
    """Whether `inner_by_entries` takes less than to materialise both gradients: so it is where there are few pairs of positions."""
    read = _machine.reused_byte(x.device, x.dtype) * x.sample_bytes
    if x is y:
        return _pairs_cost(x, y) < x._materialize_cost() + 2 * read
    return _pairs_cost(x, y) < x._materialize_cost() + y._materialize_cost() + 3 * read


def _pairs_cost(x: Outer, y: Outer) -> float:
    return 2 * x.positions * y.positions * x.shape.numel() * spacious(x.left).itemsize / x.dtype.itemsize


def inner_by_entries(x: Products, y: Products) -> Tensor:
    """<x[n], y[n]> -> [n], as sum_{t,s} (l_t * l'_s)^T (E * E') (r_t * r'_s): one matrix product for all samples and pairs of positions.

    Computed in float64 where there is one: four sides are multiplied, some of which may be small and others large.
    """
    (one, entries), (other, others) = x, y
    dtype = spacious(one.left)
    entries = entries.to(dtype) * others.to(dtype)
    left, right = (
        (own.unsqueeze(2) * beside.unsqueeze(1)).flatten(1, 2)
        for own, beside in ((one.left.to(dtype), other.left.to(dtype)), (one.right.to(dtype), other.right.to(dtype)))
    )
    return ((left @ entries.expand(one.shape)) * right).sum((1, 2)).to(wide(one.dtype))


def _in_units(side: Tensor) -> tuple[Tensor, Tensor]:
    """[n, *] -> each sample divided by its largest absolute entry, so that its squares fit the dtype, and these entries, [n]."""
    side = widen(side)
    rows = side.detach().reshape(len(side), side.shape[1:].numel())
    size = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    size = torch.where(size == 0, 1, size)
    return side / size.reshape(-1, *(1,) * (side.ndim - 1)), size


def _normal_squares(side: Tensor) -> Tensor:
    """The squares of entries of at most 1, with zero in place of subnormal ones, with which products may take twenty times as long."""
    return F.threshold(side.square(), torch.finfo(side.dtype).tiny, 0.0)


def merge_scaled(terms: list[Scaled]) -> list[Factor]:
    """Merge terms that scale the same tensor c: c E + c F = c (E + F), for entries E and F that all samples share."""
    merged: list[Factor] = []
    constants: dict[int, tuple[Expanded, Tensor]] = {}
    for term in terms:
        if not isinstance(term.factor, Expanded) or term.shared is None:
            merged.append(term)
            continue
        key = id(term.factor.values)
        constants[key] = term.factor, constants[key][1] + term.shared if key in constants else term.shared
    return merged + [Scaled(factor, entries.expand(factor.n, *entries.shape)) for factor, entries in constants.values()]
