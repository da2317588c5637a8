"""Segments: sums of gradients over segments of the samples, held as a factor of the samples."""

from collections.abc import Callable, Iterator
from functools import cached_property, reduce
from typing import Self

import torch
from torch import Tensor

from psg import _trees, plans
from psg._errors import InputError
from psg._torch import _functorch
from psg.factors._arithmetic import add_up, wide
from psg.factors._base import Dense, Factor
from psg.factors._division import Division, tables_of
from psg.factors._sketch import Sketch


class Segments(Factor):
    """gradient[m] = sum of factor[n] over the samples n of segment m, which are adjacent.

    Operations that are linear in the gradients work on the samples. The others take segments of similar size at a time and join them by
    `Factor.regroup`, which pads each segment to the size of the largest among them, less than twice its own.

    Args:
        factor: Of the samples: those of the first segment, then those of the second, and so on.
        sizes: How many samples each segment has, integers [m].

    Raises:
        InputError: The sizes are not integers [m] of at least 0 whose sum is n; their values are checked where reading them is free.

    Example:
        >>> import torch
        >>> from psg.factors import Dense
        >>> Segments(Dense(torch.tensor([[1.0], [2.0], [4.0]])), torch.tensor([2, 1])).materialize()
        tensor([[3.],
                [4.]])
    """

    fields = ("factor", "sizes")
    integers = ("sizes",)

    def __init__(self, factor: Factor, sizes: Tensor) -> None:
        if _trees.is_inexact(sizes):
            raise InputError(f"psg.factors.Segments: expected sizes that are integers, got {sizes.dtype}.")
        if sizes.ndim != 1:
            raise InputError(f"psg.factors.Segments: expected sizes [m], got shape {tuple(sizes.shape)}.")
        self.factor = factor
        self.sizes = sizes.long()
        if not _functorch.can_read_now(sizes):
            return
        if len(sizes) and (least := int(self.sizes.min())) < 0:
            raise InputError(f"psg.factors.Segments: expected sizes of at least 0, got {least}.")
        if (total := int(self.sizes.sum())) != factor.n:
            raise InputError(f"psg.factors.Segments: expected sizes whose sum is {factor.n}, the number of samples, got a sum of {total}.")

    @property
    def shape(self) -> torch.Size:
        return self.factor.shape

    @property
    def _lead(self) -> Tensor:
        return self.factor._lead.new_empty(len(self.sizes), 0)

    @property
    def ids(self) -> Tensor:
        """The segment of each sample, [n]."""
        return torch.repeat_interleave(self.sizes, output_size=self.factor.n)

    # Computed from the samples

    @property
    def positions(self) -> int:
        if not _functorch.can_read(self.sizes):
            return self.factor.positions  # inner products are then those of gradients that have been added up
        return self.factor.positions * max((table.shape[1] for _, table in self._tables), default=0)

    def squared_terms(self) -> Tensor:
        return add_up([self.factor.squared_terms()], self.ids, self.n)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        # The gradients of a segment may cancel, so they must not be rounded one by one.
        return self.factor.to(wide(self.dtype)).weighted_sum(weights[self.ids])

    def sparse_sum(self, weights: Tensor) -> Tensor:
        return self.factor.sparse_sum(weights[self.ids])

    def dot(self, direction: Tensor) -> Tensor:
        return add_up([self.factor.dot(direction)], self.ids, self.n)

    # Computed from joined segments

    def by_size(self, function: Callable[[Factor, Tensor], Tensor]) -> Tensor:
        """Apply a function, (factor of k segments, their indices [k]) -> [k, *], to segments of similar size at a time -> [m, *]."""
        parts = self._joined()
        members, own = next(parts)
        found = function(own, members)
        if len(members) == self.n:
            return found
        total = found.new_zeros(self.n, *found.shape[1:]).index_copy_(0, members, found)
        for members, own in parts:
            total.index_copy_(0, members, function(own, members))
        return total

    def _joined(self) -> Iterator[tuple[Tensor, Factor]]:
        """Yield groups of segments of similar size, at least one: ascending indices, and the factor. Empty segments may be left out.

        In a trace there is one group, whose gradients are materialised, in the `wide` dtype.
        """
        if not _functorch.can_read(self.sizes):
            # Not rounded one by one, as in a weighted sum: a norm must be that of what is added up.
            total = add_up(self.factor.to(wide(self.dtype)).parts(), self.ids, self.n)
            yield torch.arange(self.n, device=self.device), Dense(total)
        elif self._tables:
            yield from ((members, self.factor.regroup(table)) for members, table in self._tables)
        else:
            yield self.sizes.new_empty(0), self.factor.take(slice(0))

    @cached_property
    def _tables(self) -> list[tuple[Tensor, Tensor]]:
        return tables_of(self.sizes)

    def _like(self, factor: Factor) -> Self:
        """The same segments of another factor of the samples."""
        other = type(self)(factor, self.sizes)
        if "_tables" in vars(self):
            other._tables = self._tables
        return other

    def materialize(self) -> Tensor:
        whole = self.to(wide(self.dtype))  # over many samples, a sum in half precision stops growing
        return whole.by_size(lambda own, _: own.materialize()).to(self.dtype)

    def squared_norm(self) -> Tensor:
        return self.by_size(lambda own, _: own.squared_norm())

    def norm(self) -> Tensor:
        return self.by_size(lambda own, _: own.norm())

    def project(self, sketch: Sketch) -> Tensor:
        return self.by_size(lambda own, _: own.project(sketch))

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        return reduce(lambda x, y: (x[0] + y[0], x[1] + y[1]), (own.moment_sums() for _, own in self._joined()))

    # Other selections and sums of the samples

    def regroup(self, table: Tensor) -> Factor:
        kept = table < self.n
        return self.take(table[kept]).segment_sum(kept.nonzero()[:, 0], len(table))

    def _segment_sum(self, division: Division) -> Factor:
        return self.factor.segment_sum(division.ids[self.ids], division.count)

    def take(self, index: Tensor | slice) -> Self:
        if not _functorch.can_read(self.sizes):
            values = self.materialize()[index]
            return type(self)(Dense(values), self.sizes.new_ones(len(values)))
        sizes, starts = self.sizes[index], (self.sizes.cumsum(0) - self.sizes)[index]
        ids = torch.repeat_interleave(sizes)
        within = torch.arange(len(ids), device=ids.device) - (sizes.cumsum(0) - sizes)[ids]
        return type(self)(self.factor.take(starts[ids] + within), sizes)

    def zero(self, keep: Tensor) -> Self:
        return self._like(self.factor.zero(keep[self.ids]))

    def to(self, dtype: torch.dtype) -> Self:
        return self._like(self.factor.to(dtype))

    # Plans

    @property
    def is_made_anew(self) -> bool:
        return True

    @property
    def is_kept(self) -> bool:
        if not plans.may_keep(self.dense_bytes):
            return False
        # One segment of each group decides for the whole group.
        return not _functorch.can_read(self.sizes) or all(self.factor.regroup(table[:1]).is_kept for _, table in self._tables)

    def settle(self) -> Factor:
        return Dense(self.materialize()) if self.is_kept else self

    def plan(self) -> str:
        return f"segments: {self.factor.plan()}"


def divided(factor: Factor, division: Division) -> Segments:
    """The segments of a division of the factor's samples; its tables serve all factors."""
    found = Segments(factor if division.order is None else factor.take(division.order), division.sizes)
    if _functorch.can_read(division.sizes):
        found._tables = division.tables
    return found
