"""Entries: the gradient of a vector whose entries have been written into another tensor, as those of a triangular matrix are."""

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from psg._errors import InputError
from psg._torch import _functorch
from psg.factors._arithmetic import is_one_row, shared_row, wide
from psg.factors._base import Dense, Factor, Work, indices_below
from psg.factors._scaled import scaled_by
from psg.factors._sum import Sum


class Entries(Factor):
    """gradient[n, k] = the entry of factor[n], in one row, at places[n, k].

    Args:
        factor: Of any shape.
        places: Integers in [0, the number of its entries), [n, k]. Usually one tensor, expanded over the samples: then norms, weighted
            sums, moments and products with a direction come from those of `factor`, which is not materialised.

    Raises:
        InputError: The places are no integers [n, k], or others than these (checked where reading them is free).

    Example:
        >>> import torch
        >>> from psg.factors import Outer
        >>> outer = Outer(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]))  # [[3, 4], [6, 8]]
        >>> Entries(outer, torch.tensor([[0, 2, 3]])).materialize()
        tensor([[3., 6., 8.]])
    """

    fields = ("factor", "places")
    integers = ("places",)

    def __init__(self, factor: Factor, places: Tensor) -> None:
        if places.ndim != 2 or len(places) != factor.n:
            raise InputError(f"psg.factors.Entries: expected places [{factor.n}, k], got {tuple(places.shape)}.")
        is_shared = is_one_row(places) and len(places) > 0
        checked = indices_below(factor.shape.numel(), places[:1] if is_shared else places, self)
        self.factor = factor
        self.places = checked.expand(places.shape)

    @property
    def shape(self) -> torch.Size:
        return self.places.shape[1:]

    @property
    def _lead(self) -> Tensor:
        return self.factor._lead

    @property
    def nbytes(self) -> int:
        return self.factor.nbytes + (self.places.nbytes if self.shared is None else self.shared.nbytes)

    @property
    def shared(self) -> Tensor | None:
        """The places [k], if all samples share one tensor; else None."""
        return shared_row(self.places)

    def materialize(self) -> Tensor:
        return self.factor.materialize().reshape(self.n, self.factor.shape.numel()).gather(1, self.places)

    def _whole(self, shared: Tensor) -> Factor:
        """The factor with zero in the entries that nothing was written from: its norm is this gradient's."""
        entries = torch.zeros(self.factor.shape.numel(), dtype=wide(self.dtype), device=self.device)
        entries = entries.index_add(0, shared, torch.ones_like(shared, dtype=entries.dtype)).reshape(self.factor.shape)
        is_read = _functorch.can_read_now(entries)
        if is_read and (entries == 1).all():
            return self.factor
        if not is_read or (entries > 1).any():
            entries = entries.sqrt()
        terms = self.factor.terms if isinstance(self.factor, Sum) else [self.factor]
        masked = [scaled_by(term, entries) for term in terms]
        return masked[0] if len(masked) == 1 else Sum(masked, self._lead.new_empty(self.n, 0), self.factor.shape)

    @property
    def _source(self) -> Factor:
        return Dense(self.materialize()) if self.shared is None else self._whole(self.shared)

    def squared_norm(self) -> Tensor:
        return self._reduced(lambda factor: factor.squared_norm())

    def norm(self) -> Tensor:
        return self._reduced(lambda factor: factor.norm())

    def _reduced(self, reduce: Callable[[Factor], Tensor]) -> Tensor:
        found = reduce(self._source)
        if self.is_differentiated or not _functorch.can_read_now(found) or not (spoiled := found.isnan()).any():
            return found
        # Zero times an entry that nothing was written from may be NaN, and does not count.
        return found.masked_scatter(spoiled, reduce(Dense(self.take(spoiled).materialize())))

    @property
    def positions(self) -> int:
        return self.factor.positions

    def squared_terms(self) -> Tensor:
        return self._source.squared_terms()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        shared = self.shared
        return Dense(self.materialize()).weighted_sum(weights) if shared is None else self.factor.weighted_sum(weights).reshape(-1)[shared]

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        shared = self.shared
        if shared is None:
            return Dense(self.materialize()).moment_sums()
        total, squares = (moment.reshape(-1)[shared] for moment in self.factor.moment_sums())
        return total, squares

    def dot(self, direction: Tensor) -> Tensor:
        shared = self.shared
        if shared is None:
            return Dense(self.materialize()).dot(direction)
        direction = direction.to(wide(self.dtype))
        spread = direction.new_zeros(self.factor.shape.numel()).index_add(0, shared, direction)
        return self.factor.dot(spread.reshape(self.factor.shape))

    def take(self, index: Tensor | slice) -> Self:
        factor, shared = self.factor.take(index), self.shared
        return type(self)(factor, self.places[index] if shared is None else shared.expand(factor.n, -1))

    def regroup(self, table: Tensor) -> Factor:
        shared = self.shared
        return super().regroup(table) if shared is None else Entries(self.factor.regroup(table), shared.expand(len(table), -1))

    @property
    def is_made_anew(self) -> bool:
        return True

    @property
    def is_kept(self) -> bool:
        return self.factor.is_kept or self.shared is None

    def _work(self) -> Work | None:
        shared = self.shared
        own = None if shared is None else self._whole(shared)._work()
        return None if own is None else own._replace(gram=math.inf)

    def plan(self) -> str:
        return f"entries: {self.factor.plan()}"


def merge_entries(terms: Sequence[Entries], merge: Callable[[list[Factor]], Factor]) -> list[Factor]:
    """Merge the factors of those that read the same places."""
    merged: list[Factor] = []
    rest = list(terms)
    while rest:
        first = rest[0]
        alike = [term for term in rest if _read_alike(first, term)]
        rest = [term for term in rest if not any(term is own for own in alike)]
        merged.append(Entries(merge([term.factor for term in alike]), first.places))
    return merged


def _read_alike(one: Entries, other: Entries) -> bool:
    own, others = one.shared, other.shared
    if one is other:
        return True
    if own is None or others is None or one.factor.shape != other.factor.shape or own.shape != others.shape:
        return False
    return _functorch.are_one_view(own, others) or _functorch.can_read_now(own) and torch.equal(own, others)
