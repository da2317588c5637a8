"""Inner products between factors: the same sample (`inner`) and every pair of samples (`gram`).

A table has one function for each pair of kinds, bilinear in its two arguments. Pairs that are not in the table are materialised.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from psg import _machine, _matmul
from psg.factors._base import Factor, wide, wide_bmm, widen
from psg.factors._conv import Conv
from psg.factors._dense import Dense, real_rows
from psg.factors._maps import contracted
from psg.factors._outer import Outer
from psg.factors._rows import Rows
from psg.factors._scaled import Expanded, Scaled
from psg.factors._segments import Segments
from psg.factors._sum import Sum
from psg.factors._views import Views

Product = Callable[..., Tensor | None]
_inner: dict[tuple[type, type], Product] = {}
_gram: dict[tuple[type, type], Product] = {}


def inner(x: Factor, y: Factor) -> Tensor:
    """<x[n], y[n]> -> [n]."""
    return _look_up(_inner, x, y, lambda product: product, _inner_dense_dense)


def gram(x: Factor, y: Factor) -> Tensor:
    """<x[n], y[m]> -> [n, m]."""
    return _look_up(_gram, x, y, lambda product: product.T, _gram_dense_dense)


def _look_up(table: dict, x: Factor, y: Factor, swap: Callable, dense: Callable[[Dense, Dense], Tensor]) -> Tensor:
    total: Tensor | None = None
    terms, others = _terms(x), _terms(y)
    for i, j in itertools.product(range(len(terms)), range(len(others))):
        if x is y and j < i:
            continue  # for a factor with itself, compute each pair of terms once: the swapped pair has the same products
        product = _of_pair(table, terms[i], others[j], swap)
        if product is None:
            # No function for this pair, or materialising is cheaper. Once one term is materialised, adding the others to it is cheapest.
            formed = Dense(x.to(wide(x.dtype)).materialize())
            return dense(formed, formed if x is y else Dense(y.to(wide(y.dtype)).materialize()))
        if x is y and i != j:
            product = product + swap(product)
        total = product if total is None else total + product
    if total is None:  # x or y is a Sum without terms: zero
        shape = (x.n,) if table is _inner else (x.n, y.n)
        return torch.zeros(shape, dtype=wide(x.dtype).to_real(), device=x.device)
    return total


def _of_pair(table: dict, one: Factor, other: Factor, swap: Callable) -> Tensor | None:
    for x, y in ((one, other), (other, one)):
        product = table.get((type(x), type(y)), table.get((type(x), Factor)))
        found = None if product is None else product(x, y)
        if found is not None:
            return found if x is one else swap(found)
    return None


def _terms(factor: Factor) -> Sequence[Factor]:
    return factor.terms if isinstance(factor, Sum) else (factor,)


def _pair(table: dict[tuple[type, type], Product], x: type, y: type) -> Callable[[Product], Product]:
    def register(product: Product) -> Product:
        table[x, y] = product
        return product

    return register


# Dense x anything


def _inner_dense_dense(x: Dense, y: Dense) -> Tensor:
    return (widen(real_rows(x.values)) * widen(real_rows(y.values))).sum(1)


def _gram_dense_dense(x: Dense, y: Dense) -> Tensor:
    return _matmul.pair_rows(widen(real_rows(x.values)), widen(real_rows(y.values)))


@_pair(_inner, Outer, Dense)
def _(x: Outer, y: Dense) -> Tensor:
    # sum_t left_t^T Y right_t
    return (wide_bmm(x.left, y.values) * widen(x.right)).sum((1, 2))


@_pair(_inner, Rows, Dense)
def _(x: Rows, y: Dense) -> Tensor:
    # sum_t <Y[index_t], c_t>
    index = x.index[:, :, None].expand(x.cotangent.shape)
    return (widen(y.values).gather(1, index) * widen(x.cotangent)).sum((1, 2))


# Outer x Outer: sum_{t,s} <left_t, left'_s> <right_t, right'_s>


@_pair(_inner, Outer, Outer)
def _(x: Outer, y: Outer) -> Tensor | None:
    t, s = x.positions, y.positions
    if t * s * sum(x.shape) > (t + s) * x.shape.numel():
        return None
    left, right = wide_bmm(x.left, y.left.transpose(1, 2)), wide_bmm(x.right, y.right.transpose(1, 2))
    return (left * right).sum((1, 2))


@_pair(_gram, Outer, Outer)
def _(x: Outer, y: Outer) -> Tensor | None:
    (n, t, _), (m, s, _) = x.left.shape, y.left.shape
    fresh, reused = _machine.fresh_byte(x.device, x.dtype), _machine.reused_byte(x.device, x.dtype)
    in_blocks = t * s <= _MAX_POSITION_PAIRS and 3 * n * m * t * s * wide(x.dtype).itemsize > _machine.chunk_bytes(x.device)
    factored = n * m * t * s * (2 * sum(x.shape) + 3 * (reused if in_blocks else fresh) * x.left.element_size())
    dense = x.shape.numel() * (2 * (n * t + m * s + n * m) + (n + m) * (fresh + reused) * x.left.element_size())
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
    size = max(1, _machine.chunk_bytes(x.device) // max(1, y.n * wide(x.dtype).itemsize))
    blocks = []
    for lefts, rights in zip(widen(x.left).split(size), widen(x.right).split(size), strict=True):
        total: Tensor | None = None
        for t, s in itertools.product(range(x.positions), range(y.positions)):
            pair = lefts[:, t] @ left[s], rights[:, t] @ right[s]
            total = pair[0] * pair[1] if total is None else torch.addcmul(total, *pair)
        blocks.append(total)
    return torch.cat(blocks)


# Expanded, or Scaled of Expanded, x anything: <c E, Y> = <c, E Y summed to the shape of c>


def _with_expanded(x: Expanded | Scaled, y: Factor, product: Callable[[Dense, Dense], Tensor]) -> Tensor | None:
    expanded, entries = (x, x.values.new_ones(())) if isinstance(x, Expanded) else (x.factor, x.shared)
    if not isinstance(expanded, Expanded) or entries is None:
        return None
    total = contracted(y, entries.expand(x.shape), expanded.small)
    return None if total is None else product(Dense(expanded.values), Dense(total))


for _kind in (Expanded, Scaled):
    _inner[_kind, Factor] = partial(_with_expanded, product=_inner_dense_dense)
    _gram[_kind, Factor] = partial(_with_expanded, product=_gram_dense_dense)


# Segments x anything: segments of similar size at a time, as one factor


@_pair(_inner, Segments, Factor)
def _(x: Segments, y: Factor) -> Tensor:
    return x.by_size(lambda own, members: own.inner(y.take(members)))


@_pair(_gram, Segments, Factor)
def _(x: Segments, y: Factor) -> Tensor:
    return x.by_size(lambda own, members: own.gram(y))


# Views x Views of the same regions: region by region


@_pair(_inner, Views, Views)
def _(x: Views, y: Views) -> Tensor | None:
    return torch.stack([inner(*pair) for pair in zip(x.factors, y.factors, strict=True)]).sum(0) if x.regions == y.regions else None


@_pair(_gram, Views, Views)
def _(x: Views, y: Views) -> Tensor | None:
    return torch.stack([gram(*pair) for pair in zip(x.factors, y.factors, strict=True)]).sum(0) if x.regions == y.regions else None


# Rows x Rows: sum_{t,s} [index_t = index'_s] <c_t, c'_s>


def _prefers_tables(x: Rows, other: int, samples: int, others: int) -> bool:
    """Whether products of materialised gradients cost less than those of positions (t and `other`), for all `samples` x `others` pairs."""
    (rows, d), t, size = x.shape, x.index.shape[1], x.cotangent.element_size()
    fresh, reused = _machine.fresh_byte(x.device, x.dtype), _machine.reused_byte(x.device, x.dtype)
    positions = samples * others * t * other * (2 * d + 3 * fresh * size)
    return positions > rows * d * (2 * samples * others + (samples + others) * (fresh + reused) * size)


@_pair(_inner, Rows, Rows)
def _(x: Rows, y: Rows) -> Tensor | None:
    if _prefers_tables(x, y.index.shape[1], 1, 1):
        return None
    same = x.index[:, :, None] == y.index[:, None, :]
    return (wide_bmm(x.cotangent, y.cotangent.transpose(1, 2)) * same).sum((1, 2))


@_pair(_gram, Rows, Rows)
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


@_pair(_inner, Rows, Outer)
def _(x: Rows, y: Outer) -> Tensor | None:
    if _prefers_tables(x, y.positions, 1, 1):
        return None
    s, t = y.positions, x.index.shape[1]
    left = widen(y.left).gather(2, x.index[:, None, :].expand(x.n, s, t))
    return (left * wide_bmm(y.right, x.cotangent.transpose(1, 2))).sum((1, 2))


@_pair(_gram, Rows, Outer)
def _(x: Rows, y: Outer) -> Tensor | None:
    if _prefers_tables(x, y.positions, x.n, y.n):
        return None
    left, right = widen(y.left), widen(y.right)
    rows = [(left[:, :, own] * (right @ cotangent.T)).sum((1, 2)) for own, cotangent in zip(x.index, widen(x.cotangent), strict=True)]
    return torch.stack(rows) if rows else left.new_zeros(0, y.n)


# Conv x Conv: as Outer x Outer over patches, group by group


@_pair(_inner, Conv, Conv)
def _(x: Conv, y: Conv) -> Tensor | None:
    t, s = x.positions, y.positions
    if x.geometry.groups != y.geometry.groups or t * s * (x.shape[0] + x.shape[1:].numel()) > (t + s) * x.shape.numel():
        return None
    own = x._by_group()
    return inner(own, own if x is y else y._by_group()).reshape(x.n, x.geometry.groups).sum(1)


@_pair(_gram, Conv, Conv)
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
