"""Inner products between factors: the same sample (`inner`) and every pair of samples (`gram`).

Each has a table with one function for each pair of kinds. Pairs that are not in the table are materialised.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from psg._hardware import _machine, _matmul
from psg._torch import _functorch
from psg.factors._arithmetic import real_rows, wide, wide_bmm, widen
from psg.factors._base import Dense, Factor
from psg.factors._conv import Conv
from psg.factors._maps import added_up, narrowed, read_at
from psg.factors._outer import Outer
from psg.factors._routed import Routed
from psg.factors._rows import Rows
from psg.factors._scaled import Expanded, Scaled, are_few, inner_by_entries, products_in
from psg.factors._segments import Segments
from psg.factors._sum import Sum, multiplies_parts
from psg.factors._views import Views

Function = Callable[..., Tensor | None]


class Product:
    """A bilinear product of two factors: a table with one function for each pair of kinds.

    Args:
        materialized: The product of two factors by materialising them.
        swap: From the product of (y, x) to that of (x, y).
        shape: The shape of the product of factors of n and of m samples.
    """

    def __init__(
        self, materialized: Callable[[Factor, Factor], Tensor], swap: Callable[[Tensor], Tensor], shape: Callable[[int, int], Any]
    ) -> None:
        self.materialized = materialized
        self.swap = swap
        self.shape = shape
        self._functions: dict[tuple[type, type], Function] = {}

    def of(self, x: type, y: type) -> Callable[[Function], Function]:
        """Register the decorated function for a pair of kinds; `Factor` is any kind. It returns None where materialising is cheaper."""

        def register(function: Function) -> Function:
            self._functions[x, y] = function
            return function

        return register

    def __call__(self, x: Factor, y: Factor) -> Tensor:
        """The product, in the `wide` dtype."""
        total: Tensor | None = None
        terms, others = _terms(x), _terms(y)
        for i, j in itertools.product(range(len(terms)), range(len(others))):
            if x is y and j < i:
                continue  # for a factor with itself, compute each pair of terms once: the swapped pair has the same products
            product = self._of_pair(terms[i], others[j])
            if product is None:
                # No function for this pair, or materialising is cheaper. Once one term is materialised, adding the others is cheapest.
                return self.materialized(x, y)
            if x is y and i != j:
                product = product + self.swap(product)
            total = product if total is None else total + product
        if total is None:  # x or y is a Sum without terms: zero
            return torch.zeros(self.shape(x.n, y.n), dtype=wide(x.dtype).to_real(), device=x.device)
        return total

    def _of_pair(self, x: Factor, y: Factor) -> Tensor | None:
        product = self._one_way(x, y)
        if product is not None:
            return product
        swapped = self._one_way(y, x)
        return None if swapped is None else self.swap(swapped)

    def _one_way(self, x: Factor, y: Factor) -> Tensor | None:
        function = self._functions.get((type(x), type(y)), self._functions.get((type(x), Factor)))
        return None if function is None else function(x, y)


def _terms(factor: Factor) -> Sequence[Factor]:
    return factor.terms if isinstance(factor, Sum) else (factor,)


def _inner_materialized(x: Factor, y: Factor) -> Tensor:
    """<x[n], y[n]>, with the gradients of a few samples at a time where nothing watches or records every op."""
    x, y, same = x.to(wide(x.dtype)), y.to(wide(y.dtype)), x is y
    is_whole = isinstance(x, Dense) or x.is_differentiated or y.is_differentiated or _functorch.is_watched()
    products, start = [], 0
    for part in [x.materialize()] if is_whole else x.parts():
        other = part if same else y.take(slice(start, start + len(part))).materialize()
        products.append((real_rows(part) * real_rows(other)).sum(1))
        start += len(part)
    return torch.cat(products)


def _gram_materialized(x: Factor, y: Factor) -> Tensor:
    """<x[n], y[m]>, with some columns of the gradients at a time where nothing watches or records every op."""
    return reduce(torch.add, map(_pairs, _in_blocks([factor.to(wide(factor.dtype)) for factor in ((x,) if x is y else (x, y))])))


def _pairs(factors: Sequence[Factor]) -> Tensor:
    """The inner products of all pairs of one or two factors, materialised."""
    left, *right = [real_rows(factor.materialize()) for factor in factors]
    return _matmul.pair_rows(left, *(right or [left]))


def _in_blocks(factors: Sequence[Factor]) -> Sequence[Sequence[Factor]]:
    """The factors of some columns of the gradients each; one block of all if these are small, or cannot be cut."""
    columns = factors[0].shape[1] if len(factors[0].shape) > 1 else 1
    nbytes = sum(factor.dense_bytes for factor in factors) // max(1, columns)
    count = -(-columns // _machine.items_at_a_time(factors[0].device, nbytes, chunks=8))  # in thinner blocks products take longer
    is_whole = all(isinstance(factor, Dense) for factor in factors) or any(factor.is_differentiated for factor in factors)
    if count < 2 or is_whole or _functorch.is_watched():
        return [factors]
    size = -(-columns // count)
    blocks: list[list[Factor]] = []
    for start in range(0, columns, size):
        blocks.append([])
        for factor in factors:
            part = narrowed(factor, 1, start, min(size, columns - start))
            if part is None:
                return [factors]
            blocks[-1].append(part)
    return blocks


inner = Product(_inner_materialized, swap=lambda product: product, shape=lambda n, m: (n,))
"""<x[n], y[n]> -> [n]."""

gram = Product(_gram_materialized, swap=lambda product: product.T, shape=lambda n, m: (n, m))
"""<x[n], y[m]> -> [n, m]."""


# Dense x anything


@inner.of(Outer, Dense)
def _(x: Outer, y: Dense) -> Tensor:
    # sum_t left_t^T Y right_t
    return (wide_bmm(x.left, y.values) * widen(x.right)).sum((1, 2))


@inner.of(Rows, Dense)
def _(x: Rows, y: Dense) -> Tensor:
    # sum_t <Y[index_t], c_t>
    index = x.index[:, :, None].expand(x.cotangent.shape)
    return (widen(y.values).gather(1, index) * widen(x.cotangent)).sum((1, 2))


# Outer x Outer: sum_{t,s} <left_t, left'_s> <right_t, right'_s>


@inner.of(Outer, Outer)
def _(x: Outer, y: Outer) -> Tensor | None:
    t, s = x.positions, y.positions
    if t * s * sum(x.shape) > (t + s) * x.shape.numel():
        return None
    left, right = wide_bmm(x.left, y.left.transpose(1, 2)), wide_bmm(x.right, y.right.transpose(1, 2))
    return (left * right).sum((1, 2))


@gram.of(Outer, Outer)
def _(x: Outer, y: Outer) -> Tensor | None:
    (n, t, _), (m, s, _) = x.left.shape, y.left.shape
    fresh, reused, kept = (byte(x.device, x.dtype) for byte in (_machine.fresh_byte, _machine.reused_byte, _machine.kept_byte))
    in_blocks = t * s <= _MAX_POSITION_PAIRS and 3 * n * m * t * s * wide(x.dtype).itemsize > _machine.chunk_bytes(x.device)
    factored = n * m * t * s * (2 * sum(x.shape) + 3 * (reused if in_blocks else fresh) * x.left.element_size())
    materialized = ((n, t),) if x is y else ((n, t), (m, s))
    dense = x.shape.numel() * (2 * n * m + sum(count * (2 * terms + kept * x.left.element_size()) for count, terms in materialized))
    if factored > dense or n * m * t * s > 1 << 28:
        return None
    if in_blocks:
        return _gram_in_blocks(x, y)
    left = widen(x.left).flatten(0, 1) @ widen(y.left).flatten(0, 1).T
    right = widen(x.right).flatten(0, 1) @ widen(y.right).flatten(0, 1).T
    return (left * right).reshape(n, t, m, s).sum((1, 3))


_MAX_POSITION_PAIRS = 16  # with more pairs of positions than this, products pair by pair are too small to be efficient


def _gram_in_blocks(x: Outer, y: Outer) -> Tensor:
    """One pair of positions at a time, for blocks of samples of x that are small enough for the products to stay in cache."""
    left, right = ([widen(side[:, s]).T for s in range(y.positions)] for side in (y.left, y.right))
    size = _machine.items_at_a_time(x.device, y.n * wide(x.dtype).itemsize)
    blocks = []
    for lefts, rights in zip(widen(x.left).split(size), widen(x.right).split(size), strict=True):
        total: Tensor | None = None
        for t, s in itertools.product(range(x.positions), range(y.positions)):
            pair = lefts[:, t] @ left[s], rights[:, t] @ right[s]
            total = pair[0] * pair[1] if total is None else torch.addcmul(total, *pair)
        blocks.append(total)
    return torch.cat(blocks)


# Expanded, or Scaled of Expanded, x anything: <c E, Y> = <c, E Y summed to the shape of c>


def _with_expanded(x: Expanded | Scaled, y: Factor, product: Callable[[Factor, Factor], Tensor]) -> Tensor | None:
    expanded, entries = (x, x.values.new_ones(())) if isinstance(x, Expanded) else (x.factor, x.shared)
    if not isinstance(expanded, Expanded) or entries is None:
        return None
    total = added_up(y, entries.expand(x.shape), expanded.small)
    return None if total is None else product(Dense(expanded.values), total)


for _product in (inner, gram):
    for _kind in (Expanded, Scaled):
        _product.of(_kind, Factor)(partial(_with_expanded, product=_product))


# Scaled Outer x Outer, scaled or not


@inner.of(Scaled, Outer)
@inner.of(Scaled, Scaled)
def _(x: Scaled, y: Outer | Scaled) -> Tensor | None:
    own, other = products_in(x), products_in(y)
    if own is None or other is None:
        return _with_expanded(x, y, inner)
    return inner_by_entries(own, other) if are_few(own[0], other[0]) else None


# Segments x anything: segments of similar size at a time, as one factor


@inner.of(Segments, Factor)
def _(x: Segments, y: Factor) -> Tensor:
    return x.by_size(lambda own, members: own.inner(y.take(members).to(own.dtype)))


@gram.of(Segments, Factor)
def _(x: Segments, y: Factor) -> Tensor:
    return x.by_size(lambda own, members: own.gram(y.to(own.dtype)))


# Views x Views of the same regions: region by region


def _view_by_view(x: Views, y: Views, product: Product) -> Tensor | None:
    return torch.stack(list(map(product, x.factors, y.factors))).sum(0) if x.regions == y.regions else None


for _product in (inner, gram):
    _product.of(Views, Views)(partial(_view_by_view, product=_product))


# A few entries of a matrix, or products, x products: the entries of the latter there


@inner.of(Views, Outer)
@inner.of(Views, Scaled)
def _(x: Views, y: Outer | Scaled) -> Tensor | None:
    places = torch.arange(x.shape.numel(), device=x.device).reshape(x.shape)
    if not multiplies_parts(x) or products_in(y) is None or not _functorch.is_known_for_good(places):
        return None
    others = [read_at(y, region.of(places)) for region in x.regions]
    pairs = [(own, other) for own, other in zip(x.factors, others, strict=True) if other is not None]
    return torch.stack([inner(own, other) for own, other in pairs]).sum(0) if len(pairs) == len(others) else None


# Rows x Rows: sum_{t,s} [index_t = index'_s] <c_t, c'_s>


def _prefers_tables(x: Rows, other: int, samples: int, others: int) -> bool:
    """Whether products of materialised gradients cost less than those of positions (t and `other`), for all `samples` x `others` pairs."""
    (rows, d), t, size = x.shape, x.index.shape[1], x.cotangent.element_size()
    fresh, kept = _machine.fresh_byte(x.device, x.dtype), _machine.kept_byte(x.device, x.dtype)
    positions = samples * others * t * other * (2 * d + 3 * fresh * size)
    return positions > rows * d * (2 * samples * others + (samples + others) * kept * size)


@inner.of(Rows, Rows)
def _(x: Rows, y: Rows) -> Tensor | None:
    if _prefers_tables(x, y.index.shape[1], 1, 1):
        return None
    same = x.index[:, :, None] == y.index[:, None, :]
    return (wide_bmm(x.cotangent, y.cotangent.transpose(1, 2)) * same).sum((1, 2))


@gram.of(Rows, Rows)
def _(x: Rows, y: Rows) -> Tensor | None:
    if _prefers_tables(x, y.index.shape[1], x.n, y.n):
        return None
    # Sample by sample, so that no more than t x m s pairs are held at a time.
    other = widen(y.cotangent).flatten(0, 1)
    index = y.index.reshape(-1)
    rows = [
        ((cotangent @ other.T) * (own[:, None] == index)).sum(0).reshape(y.index.shape).sum(1)
        for own, cotangent in zip(x.index, widen(x.cotangent), strict=True)
    ]
    return torch.stack(rows) if rows else other.new_zeros(0, y.n)


# Rows x Outer, as for a tied embedding and head: sum_{t,s} left[s, index_t] <right_s, c_t>, with no gradient of the vocabulary's size


@inner.of(Rows, Outer)
def _(x: Rows, y: Outer) -> Tensor | None:
    if _prefers_tables(x, y.positions, 1, 1):
        return None
    s, t = y.positions, x.index.shape[1]
    left = widen(y.left).gather(2, x.index[:, None, :].expand(x.n, s, t))
    return (left * wide_bmm(y.right, x.cotangent.transpose(1, 2))).sum((1, 2))


@gram.of(Rows, Outer)
def _(x: Rows, y: Outer) -> Tensor | None:
    if _prefers_tables(x, y.positions, x.n, y.n):
        return None
    left, right = widen(y.left), widen(y.right)
    rows = [(left[:, :, own] * (right @ cotangent.T)).sum((1, 2)) for own, cotangent in zip(x.index, widen(x.cotangent), strict=True)]
    return torch.stack(rows) if rows else left.new_zeros(0, y.n)


# Routed x Routed: sum_{t,s} [index_t = index'_s] <left_t, left'_s> <right_t, right'_s>


@inner.of(Routed, Routed)
def _(x: Routed, y: Routed) -> Tensor | None:
    t, s = x.positions, y.positions
    if t * s * sum(x.shape[1:]) > (t + s) * x.shape[1:].numel():
        return None
    left, right = wide_bmm(x.left, y.left.transpose(1, 2)), wide_bmm(x.right, y.right.transpose(1, 2))
    return torch.where(x.index[:, :, None] == y.index[:, None, :], left * right, 0).sum((1, 2))


@gram.of(Routed, Routed)
def _(x: Routed, y: Routed) -> Tensor | None:
    pairs = x.n * x.positions * y.n * y.positions / x.num_groups
    fresh, kept = _machine.fresh_byte(x.device, x.dtype), _machine.kept_byte(x.device, x.dtype)
    factored = pairs * (2 * sum(x.shape[1:]) + 3 * fresh * x.dtype.itemsize)
    dense = x.shape.numel() * (2 * x.n * y.n + (x.n if x is y else x.n + y.n) * kept * x.dtype.itemsize)
    if factored > dense or x.is_differentiated or y.is_differentiated or not _functorch.can_read(x.index):
        return None
    # Group by group: each has its own rows, of all samples.
    total = widen(x.left).new_zeros(x.n, y.n)
    own = x.by_group()
    for (samples, left, right), (others, other_left, other_right) in zip(own, own if x is y else y.by_group(), strict=True):
        products = (left @ other_left.T) * (right @ other_right.T)
        total.index_add_(1, others, products.new_zeros(x.n, len(others)).index_add_(0, samples, products))
    return total


# Conv x Conv: as Outer x Outer over patches, group by group


@inner.of(Conv, Conv)
def _(x: Conv, y: Conv) -> Tensor | None:
    t, s = x.positions, y.positions
    if x.geometry.groups != y.geometry.groups or t * s * (x.shape[0] + x.shape[1:].numel()) > (t + s) * x.shape.numel():
        return None
    own = x._by_group()
    return inner(own, own if x is y else y._by_group()).reshape(x.n, x.geometry.groups).sum(1)


@gram.of(Conv, Conv)
def _(x: Conv, y: Conv) -> Tensor | None:
    groups = x.geometry.groups
    if groups != y.geometry.groups or x.positions * y.positions * 8 > x.shape.numel() // groups:
        return None

    def by_group(factor: Conv) -> list[Outer]:
        outer = factor._by_group()
        return list(map(Outer, *(side.unflatten(0, (factor.n, groups)).unbind(1) for side in (outer.left, outer.right))))

    own = by_group(x)
    other = own if x is y else by_group(y)
    return torch.stack([gram(a, b) for a, b in zip(own, other, strict=True)]).sum(0)
