"""Rows: cotangent rows scattered by index, the gradient of a table lookup."""

from collections.abc import Iterable

import torch
from torch import Tensor

from psg._errors import InputError
from psg._hardware import _machine, _memory
from psg._torch import _functorch
from psg._torch._library import opaque
from psg.factors._arithmetic import HALF, square, wide, widen
from psg.factors._base import Additive, Dense, Factor, expect_real, indices_below
from psg.factors._division import Division
from psg.factors._sketch import Sketch


class Rows(Additive):
    """gradient[n, v, d] = sum_t [index[n, t] = v] cotangent[n, t, d].

    Args:
        index: Integers in [0, num_rows), [n, t].
        cotangent: [n, t, d].
        num_rows: The number of rows v of the parameter.

    Raises:
        InputError: The index holds no integers, or others than these (checked where reading them is free), the shapes do not fit, or the
            cotangent is complex.

    Example:
        >>> import torch
        >>> gradient = Rows(torch.tensor([[2, 0, 2]]), torch.tensor([[[1.0], [2.0], [3.0]]]), num_rows=3)
        >>> gradient.materialize()
        tensor([[[2.],
                 [0.],
                 [4.]]])
    """

    fields = ("index", "cotangent")
    summed = fields
    constants = ("num_rows",)
    integers = ("index",)

    def __init__(self, index: Tensor, cotangent: Tensor, num_rows: int) -> None:
        self.index = indices_below(num_rows, index, self)
        if index.ndim != 2 or cotangent.ndim != 3 or index.shape != cotangent.shape[:2]:
            shapes = f"{tuple(index.shape)} and {tuple(cotangent.shape)}"
            raise InputError(f"psg.factors.Rows: expected an index [n, t] and a cotangent [n, t, d], got {shapes}.")
        self.cotangent = cotangent
        self.num_rows = num_rows
        expect_real(self, cotangent)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_rows, self.cotangent.shape[2]))

    @property
    def _lead(self) -> Tensor:
        return self.cotangent

    def materialize(self) -> Tensor:
        rows = torch.arange(self.n, device=self.device)[:, None] * self.num_rows + self.index
        return scatter_rows(rows, self.cotangent, self.n * self.num_rows).reshape(self.n, *self.shape)

    def squared_norm(self) -> Tensor:
        if self.index.shape[1] == 1:
            return Dense(self.cotangent).squared_norm()
        if self.is_kept:
            return Dense(self.to(wide(self.dtype)).materialize()).squared_norm()
        if _functorch.is_traced() and not self.is_differentiated:
            return _norm_op(self.index, self.cotangent, self.num_rows)
        # Cotangents with the same index must be added before they are squared. Sorting gives each distinct index of a sample a slot
        # below t, so the work is that of t rows, never that of t x t pairs or of num_rows.
        ordered, order = self.index.sort(dim=1)
        if self.device.type == "cpu" and not self.is_differentiated:
            follows = torch.zeros_like(ordered, dtype=torch.bool)  # where a sample's index is that of the place before
            torch.eq(ordered[:, 1:], ordered[:, :-1], out=follows[:, 1:])
            repeated = follows.clone()
            repeated[:, :-1] |= follows[:, 1:]
            places = repeated.flatten().nonzero().squeeze(1)
            if len(places) == 0:
                return Dense(self.cotangent).squared_norm()
            if 4 * len(places) < repeated.numel():
                return self._norm_with_few_repeats(order, follows, places)
        return Dense(self._distinct(ordered, order)[1]).squared_norm()

    @property
    def positions(self) -> int:
        return self.index.shape[1]

    def squared_terms(self) -> Tensor:
        return square(self.cotangent).sum((1, 2))

    @property
    def is_made_anew(self) -> bool:
        return True

    @property
    def is_kept(self) -> bool:
        """Whether a sample's whole table takes no more than its cotangent, or all tables less time than to find equal indices."""
        if self.num_rows <= self.index.shape[1]:
            return True
        return 2 * _machine.reused_byte(self.device, self.dtype) * self.dense_bytes < _OPS_OF_SORTING * _machine.op_call(self.device)

    def coalesced(self) -> "Rows":
        """The same gradient with each index of a sample once, as far as samples with more distinct ones leave no room."""
        if self.index.shape[1] < 2:
            return self
        ordered, order = self.index.sort(dim=1)
        most = int((ordered[:, 1:] != ordered[:, :-1]).sum(1).max()) + 1 if self.n else 0
        if most == self.index.shape[1]:
            return self
        index, values = self._distinct(ordered, order)
        return Rows(index[:, :most], values[:, :most].to(self.dtype), self.num_rows)

    def _distinct(self, ordered: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct rows of each sample, equal indices added up: index [n, t], values [n, t, d].

        In the slots left over there are zeros, at the first index.
        """
        slot = torch.zeros_like(order)
        slot[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
        index = ordered[:, :1].repeat(1, order.shape[1]).scatter_(1, slot, ordered)
        slots = torch.empty_like(slot).scatter_(1, order, slot)
        return index, Rows(slots, widen(self.cotangent), order.shape[1]).materialize()

    def _norm_with_few_repeats(self, order: Tensor, follows: Tensor, places: Tensor) -> Tensor:
        """The squared norm, of whose sorted indices [n * t] those at `places` occur more than once in their sample."""
        # Only repeated rows are added up, and so read twice; each of the others is squared as it is.
        rows = widen(self.cotangent).flatten(0, 1)
        sample = places // order.shape[1]
        repeated = order.flatten()[places] + sample * order.shape[1]
        first = ~follows.flatten()[places]
        owner = sample[first]
        sums = scatter_rows(first.cumsum(0) - 1, rows[repeated], len(owner))
        squares = Dense(rows).squared_norm().index_fill_(0, repeated, 0)
        return squares.reshape(order.shape).sum(1).index_add_(0, owner, Dense(sums).squared_norm())

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        index, values = self._distinct(*self.index.sort(dim=1))
        return scatter_rows(index, values, self.num_rows), scatter_rows(index, square(values), self.num_rows)

    def project(self, sketch: Sketch) -> Tensor:
        return sketch.rows(self.index, self.cotangent)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return scatter_rows(self.index, self._scaled(weights), self.num_rows)

    def _segment_sum(self, division: Division) -> Factor:
        # However small the table: its sparse sums stay sparse.
        return self._segments_materialized(division) if _functorch.is_traced() else self._segments_factored(division)

    def sparse_sum(self, weights: Tensor) -> Tensor:
        if _functorch.transform_active():
            return self.weighted_sum(weights)  # vmap knows no sparse tensors, nor do the backward passes that jacrev maps
        rows, index = self._scaled(weights).flatten(0, 1), self.index.reshape(1, -1)
        return torch.sparse_coo_tensor(index, rows, self.shape, device=rows.device, check_invariants=False).coalesce()

    def _scaled(self, weights: Tensor) -> Tensor:
        """weights[n] cotangent[n], in the `wide` dtype: a scatter adds rows one by one and would round each time."""
        return self.cotangent * weights.to(wide(self.dtype))[:, None, None]

    def dot(self, direction: Tensor) -> Tensor:
        cotangent = widen(self.cotangent)
        return (direction.to(cotangent.dtype)[self.index] * cotangent).sum((1, 2))

    def plan(self) -> str:
        return "materialised and kept" if self.is_kept else "sorted rows, one scatter"


_OPS_OF_SORTING = 8
"""How many more ops a norm of sorted rows takes than one of scattered rows."""


def merge_rows(terms: Iterable[Factor]) -> list[Factor]:
    """The Rows among these terms; those that have the same index tensor are added."""
    by_index: dict[int, list[Rows]] = {}
    for term in terms:
        if isinstance(term, Rows):
            by_index.setdefault(id(term.index), []).append(term)
    merged: list[Factor] = []
    for first, *rest in by_index.values():
        if first.dtype in HALF or not rest:  # in half precision sums would be rounded term by term
            merged += [first, *rest]
        else:
            merged.append(Rows(first.index, sum((term.cotangent for term in rest), start=first.cotangent), first.num_rows))
    return merged


def scatter_rows(index: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """out[v] = sum of the rows [..., d] whose index [...] is v -> [num_rows, d]."""
    if _functorch.is_traced() and not _functorch.transform_active() and not rows.requires_grad:
        return _scatter_op(index, rows, num_rows)
    return _scatter(index, rows, num_rows)


def _scatter(index: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return _memory.new_zeros(rows, num_rows, rows.shape[-1]).index_add_(0, index.reshape(-1), rows.flatten(0, -2))


def _norm(index: Tensor, cotangent: Tensor, num_rows: int) -> Tensor:
    return Rows(index, cotangent, num_rows).squared_norm()


# Ops of their own to tracers: compilers turn a scatter into atomic additions, on which threads wait, and cannot branch on values.
_scatter_op = opaque("scatter_rows", _scatter, lambda index, rows, num_rows: rows.new_empty(num_rows, rows.shape[-1]))
_norm_op = opaque("rows_squared_norm", _norm, lambda index, cotangent, _: cotangent.new_empty(len(index), dtype=wide(cotangent.dtype)))
