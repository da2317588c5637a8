"""Routed: sums of outer products, each added to one of several matrices: the gradient of a mixture of experts."""

from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from psg._errors import InputError
from psg._hardware import _machine
from psg._torch import _functorch
from psg.factors._arithmetic import HALF, squared_terms_of, wide_bmm, widen
from psg.factors._base import expect_real, indices_below
from psg.factors._division import Division
from psg.factors._outer import Outer
from psg.factors._planned import Costs, Planned, remembered
from psg.factors._segments import divided

_OPS_PER_GRAM = 80
"""How many ops a norm by "gram" takes: a few for each power of two among the numbers of rows of a group."""


class Routed(Planned):
    """gradient[n, g, a, b] = sum_t [index[n, t] = g] left[n, t, a] right[n, t, b].

    Of y_t = x_t W[e_t], for the expert e_t of row t, the gradient for W is `Routed(e, input, cotangent, experts)`. With one group it is an
    Outer. A row that belongs to no group has zeros in `left` and `right`, and any of these integers.

    Args:
        index: Integers in [0, num_groups), [n, t].
        left: [n, t, a].
        right: [n, t, b], of the same dtype.
        num_groups: The number of matrices g of the parameter, at least 1.

    Raises:
        InputError: The index holds no integers, or others than these (checked where reading them is free), the shapes do not fit, or the
            sides are complex.

    Example:
        >>> import torch
        >>> rows = torch.tensor([[[1.0], [2.0], [3.0]]])  # one sample, three rows: the first and the last go to matrix 1
        >>> gradient = Routed(torch.tensor([[1, 0, 1]]), rows, rows, num_groups=3)
        >>> gradient.materialize().flatten(), gradient.norm().square()
        (tensor([ 4., 10.,  0.]), tensor([116.]))

    Source: as of Outer, matrix by matrix; Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
    Layer", 2017 (the layer).
    """

    fields = ("index", "left", "right")
    summed = fields
    constants = ("num_groups",)
    integers = ("index",)

    def __init__(self, index: Tensor, left: Tensor, right: Tensor, num_groups: int) -> None:
        self.index = indices_below(num_groups, index, self)
        if index.ndim != 2 or left.ndim != 3 or right.ndim != 3 or not index.shape == left.shape[:2] == right.shape[:2]:
            shapes = ", ".join(str(tuple(field.shape)) for field in (index, left, right))
            raise InputError(f"psg.factors.Routed: expected an index [n, t], left [n, t, a] and right [n, t, b], got {shapes}.")
        self.left = left
        self.right = right
        self.num_groups = num_groups
        expect_real(self, left, right)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_groups, self.left.shape[2], self.right.shape[2]))

    @property
    def positions(self) -> int:
        return self.index.shape[1]

    @property
    def _lead(self) -> Tensor:
        return self.left

    def materialize(self) -> Tensor:
        if self._is_masked(self.left, self.right):
            return torch.stack([outer.materialize() for outer in self._masked(self.left, self.right)], 1)
        samples = torch.arange(self.n, device=self.device)[:, None]
        division = Division((samples * self.num_groups + self.index).flatten(), self.n * self.num_groups)
        left, right = (_in_order(side, division) for side in (self.left, self.right))
        return _sums(left, right, _ends(division, division.count)).reshape(self.n, *self.shape)

    def _gram_sums(self) -> tuple[Tensor, Tensor]:
        # sum_{t,s} [index_t = index_s] <left_t, left_s> <right_t, right_s>
        if not self._is_grouped:
            left, right = (wide_bmm(side, side.transpose(1, 2)) for side in (self.left, self.right))
            same = self.index[:, :, None] == self.index[:, None, :]
            return torch.where(same, left * right, 0).sum((1, 2)), squared_terms_of(left, right)
        # The rows of one sample and one group are those of an Outer: no product of rows of two groups is computed.
        rows = Outer(*(side.flatten(0, 1).unsqueeze(1) for side in (self.left, self.right)))
        sums = divided(rows, self._division).by_size(lambda own, _: torch.stack(cast(Outer, own)._gram_sums(), 1))
        squared, squared_terms = sums.reshape(self.num_groups, self.n, 2).sum(0).unbind(1)
        return squared, squared_terms

    @property
    def _is_grouped(self) -> bool:
        """Whether to sort the rows by sample and group for a norm, for which Python has to read how many there are."""
        return _functorch.can_read_now(self.index) and not self.is_differentiated

    def squared_terms(self) -> Tensor:
        return Outer(self.left, self.right).squared_terms()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.dtype in HALF:  # a side times its weights may leave the range, and the sum would be rounded
            return self.to(torch.float32).weighted_sum(weights)
        left, right = Outer(self.left, self.right)._scaled(weights)
        if self._is_masked(left, right):
            return torch.stack([outer.weighted_sum(torch.ones_like(weights)) for outer in self._masked(left, right)])
        return _sums(_in_order(left, self._division), _in_order(right, self._division), _ends(self._division, self.num_groups, self.n))

    def dot(self, direction: Tensor) -> Tensor:
        left, right = widen(self.left), widen(self.right)
        direction = direction.to(left.dtype)
        if self._is_masked(left, right, direction):
            return torch.stack([outer.dot(own) for outer, own in zip(self._masked(left, right), direction, strict=True)]).sum(0)
        left, right = _in_order(left, self._division), _in_order(right, self._division)
        terms = (_products(left, direction.contiguous(), _ends(self._division, self.num_groups, self.n)) * right).sum(1)
        order = self._division.order
        terms = terms if order is None else torch.empty_like(terms).index_copy_(0, order, terms)
        return terms.reshape(self.index.shape).sum(1)

    def by_group(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each group the samples [r] that its rows are of, and both sides of these, [r, a] and [r, b], at least float32.

        Not for traces, in which the numbers of rows cannot be read.
        """
        samples = torch.arange(self.n, device=self.device)[:, None, None].expand(self.n, self.positions, 1)
        rows = [_in_order(side, self._division) for side in (samples, widen(self.left), widen(self.right))]
        ends = _ends(self._division, self.num_groups, self.n)
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return [(of.squeeze(1), left, right) for of, left, right in zip(*(side.split(sizes) for side in rows), strict=True)]

    @cached_property
    def _division(self) -> Division:
        """The rows of all samples by group, those of a group by sample."""
        samples = torch.arange(self.n, device=self.device)[:, None]
        return Division((self.index * self.n + samples).flatten(), self.num_groups * self.n)

    def _is_masked(self, *sides: Tensor) -> bool:
        """Whether neither Python nor an op may divide rows by group: then each group takes all rows, those of others as zeros."""
        if self.is_differentiated or any(side.requires_grad for side in sides):
            return True
        return not _functorch.can_read(self.index) and not _takes_groups(*sides)

    def _masked(self, left: Tensor, right: Tensor) -> list[Outer]:
        """For each group the gradient of its matrix."""
        own = ((self.index == group).unsqueeze(2) for group in range(self.num_groups))
        return [Outer(torch.where(mask, left, 0), torch.where(mask, right, 0)) for mask in own]

    def plan(self) -> str:
        return _PLANS[self._plan() if self._is_planned else "chunks"]

    # Costs, in operations for one sample

    @remembered
    def _norm_costs(self) -> Costs:
        t, byte = self.positions, _machine.reused_byte(self.device, self.dtype)
        alike = min(t, -(-t // self.num_groups)) if self._is_grouped else t  # rows in the group of a row, if they are balanced
        calls = _OPS_PER_GRAM * _machine.op_call(self.device) / max(1, self.n) if self._is_grouped else 0
        return {
            "gram": t * alike * (2 * sum(self.shape[1:]) + 3 * byte * self.left.element_size()) + calls,
            "chunks": self._chunks_cost(byte),
        }

    def _materialize_cost(self) -> float:
        return 2 * self.positions * self.shape[1:].numel()

    def _sum_cost(self) -> float:
        return self._materialize_cost() + self._masking_cost()


def _in_order(side: Tensor, division: Division) -> Tensor:
    """The rows of all samples [n, t, d] in the order of a division -> [n t, d]."""
    rows = side.flatten(0, 1)
    return rows.contiguous() if division.order is None else rows.index_select(0, division.order)


def _ends(division: Division, groups: int, segments: int = 1) -> Tensor:
    """Where each group of so many segments ends in the rows of a division, as torch._grouped_mm takes it -> [groups]."""
    ids = division.ids if division.order is None else division.ids.index_select(0, division.order)
    return torch.searchsorted(ids, torch.arange(1, groups + 1, device=ids.device) * segments).int()


def _takes_groups(*sides: Tensor) -> bool:
    """Whether torch._grouped_mm takes these operands: it has no float64, and rows are whole blocks of 16 bytes."""
    return all(side.dtype != torch.float64 and side.shape[-1] * side.itemsize % 16 == 0 for side in sides)


def _sums(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left[start:end]^T right[start:end] of each group: [r, a], [r, b], [g] -> [g, a, b]."""
    if _takes_groups(left, right):
        return torch._grouped_mm(left.T, right, offs=ends)  # pyright: ignore[reportPrivateImportUsage]
    total = left.new_empty(len(ends), left.shape[1], right.shape[1])
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    for out, x, y in zip(total, left.split(sizes), right.split(sizes), strict=True):
        torch.mm(x.T, y, out=out)
    return total


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows[start:end] @ matrices[g] of each group: [r, a], [g, a, b], [g] -> [r, b]."""
    if _takes_groups(rows, matrices):
        return torch._grouped_mm(rows, matrices, offs=ends)  # pyright: ignore[reportPrivateImportUsage]
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([x @ matrix for x, matrix in zip(rows.split(sizes), matrices, strict=True)])


_PLANS = {
    "keep": "materialised and kept",
    "gram": "Gram of each group, one product a group",
    "chunks": "materialised in chunks, one product a group",
}
