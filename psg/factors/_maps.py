"""Linear maps of gradients: if an op computes a weight from a parameter, its transpose (vjp) maps the weight's factor to the parameter's.

Each function returns None where psg has no factor for the result: the gradient then has to be materialised.
"""

from collections.abc import Callable
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._hardware import _machine, _matmul, _processor
from psg._torch import _functorch
from psg._torch._library import opaque
from psg.factors._arithmetic import is_one_row, wide, widen
from psg.factors._base import Dense, Factor
from psg.factors._conv import Conv
from psg.factors._entries import Entries
from psg.factors._outer import Outer
from psg.factors._routed import Routed
from psg.factors._rows import Rows
from psg.factors._scaled import Expanded, Scaled, scaled_by
from psg.factors._sum import Sum
from psg.factors._views import Region, Views, strides_of

Scale = Tensor | float

_FEWER = 8  # times fewer entries than the parameter has: a scale of whole rows, say


@singledispatch
def scaled(factor: Factor, scale: Scale) -> Factor | None:
    """scale * gradient[n], for a scale that broadcasts to the parameter's shape."""
    return _entry_by_entry(factor, torch.as_tensor(scale, device=factor.device).expand(factor.shape))


@scaled.register
def _(factor: Dense, scale: Scale) -> Factor:
    entries = _entries(scale, factor)
    if entries is None or factor.dense_bytes < _machine.MANY_BYTES or entries.numel() * _FEWER > factor.shape.numel():
        return Dense(factor.values * scale)
    return scaled_by(factor, entries)  # scales of the steps to come, and other terms, take no pass over the gradients of their own


@scaled.register
def _(factor: Outer, scale: Scale) -> Factor | None:
    left, right, entries = factor.left, factor.right, _entries(scale, factor)
    if entries is None:
        return Outer(left * scale, right) if left.shape[2] <= right.shape[2] else Outer(left, right * scale)
    if entries.shape[1] == 1:
        return Outer(left * entries[:, 0], right)
    return Outer(left, right * entries[0]) if len(entries) == 1 else _entry_by_entry(factor, entries)


@scaled.register
def _(factor: Rows, scale: Scale) -> Factor | None:
    entries = _entries(scale, factor)
    if entries is not None:
        scale = entries[0] if len(entries) == 1 else entries[factor.index]
    return Rows(factor.index, factor.cotangent * scale, factor.num_rows)


@scaled.register
def _(factor: Routed, scale: Scale) -> Factor | None:
    left, right, entries = factor.left, factor.right, _entries(scale, factor)
    if entries is None:
        return Routed(factor.index, left * scale, right, factor.num_groups)
    if min(entries.shape[1:]) != 1:
        return _entry_by_entry(factor, entries)
    scale = entries.flatten(1)
    scale = scale[0] if len(scale) == 1 else scale[factor.index]
    left, right = (left * scale, right) if entries.shape[2] == 1 else (left, right * scale)
    return Routed(factor.index, left, right, factor.num_groups)


@scaled.register
def _(factor: Conv, scale: Scale) -> Factor | None:
    entries = _entries(scale, factor)
    if entries is not None:
        if entries.shape[1:].numel() != 1:
            return _entry_by_entry(factor, entries)
        scale = entries[:, 0]
    return Conv(factor.cotangent * scale, factor.input, factor.geometry)


@scaled.register
def _(factor: Expanded, scale: Scale) -> Factor | None:
    entries = _entries(scale, factor)
    if entries is None:
        return Expanded(factor.values * scale, factor.shape)
    fits = all(entry == 1 or own != 1 for entry, own in zip(entries.shape, factor.small, strict=True))
    return Expanded(factor.values * entries, factor.shape) if fits else _entry_by_entry(factor, entries)


@scaled.register
def _(factor: Scaled, scale: Scale) -> Factor | None:
    if factor.shared is not None:
        return scaled(factor.factor, factor.shared * scale)
    own = scaled(factor.factor, scale)
    return None if own is None else Scaled(own, factor.entries)


@scaled.register
def _(factor: Entries, scale: Scale) -> Factor | None:
    entries, shared, shape = _entries(scale, factor), factor.shared, factor.factor.shape
    if entries is None or shared is None:
        own = scaled(factor.factor, scale) if entries is None else None
    elif not _functorch.can_read_now(shared) or _most(shared.new_zeros(shape.numel()).index_add(0, shared, torch.ones_like(shared))) > 1:
        return _entry_by_entry(factor, entries)
    else:
        spread = entries.new_zeros(shape.numel()).index_put((shared,), entries)
        own = scaled(factor.factor, spread.reshape(shape))
    return None if own is None else Entries(own, factor.places)


@scaled.register
def _(factor: Views, scale: Scale) -> Factor | None:
    entries = _entries(scale, factor)
    if entries is None:
        found = [scaled(own, scale) for own in factor.factors]
    elif factor.is_reshaped:
        found = [scaled(factor.factors[0], _regrouped(entries, factor.shape, factor.factors[0].shape))]
    elif _are_slices(factor):
        found = [scaled(own, entries[min(k, len(entries) - 1)]) for k, own in enumerate(factor.factors)]
    else:
        whole = entries.expand(factor.shape).contiguous()
        found = [scaled(own, region.of(whole)) for own, region in zip(factor.factors, factor.regions, strict=True)]
    own = [part for part in found if part is not None]
    return Views(own, factor.regions, factor.shape) if len(own) == len(found) else None


@scaled.register
def _(factor: Sum, scale: Scale) -> Factor | None:
    found = [scaled(term, scale) for term in factor.terms]
    own = [term for term in found if term is not None]
    return Sum(own, factor.like, factor.shape) if len(own) == len(found) else None


@singledispatch
def contracted(factor: Factor, weights: Tensor, shape: torch.Size) -> Tensor | None:
    """weights * gradient[n], for weights of the parameter's shape, summed to a shape that broadcasts to it -> [n, *shape].

    In at least float32, because the result may be an inner product.
    """
    return factor.dot(weights).reshape(factor.n, *shape) if shape.numel() == 1 else None


@contracted.register
def _(factor: Dense, weights: Tensor, shape: torch.Size) -> Tensor:
    values, small = widen(factor.values), _small(shape, factor)
    last = max((dim + 1 for dim, size in enumerate(small) if size != 1), default=1)  # the first dimension that is summed with all after it
    if weights.shape[last:].numel() != 1 and not _processor.multiplies_by_tensor_cores(values):
        # As products of rows, which make no tensor of the gradients' size; the entries of a row as they lie in memory.
        order = sorted(range(last, weights.ndim), key=lambda dim: -values.stride(1 + dim))
        first = range(last)
        rows = values.permute(*(1 + dim for dim in first), 0, *(1 + dim for dim in order)).flatten(1 + last).flatten(0, last - 1)
        columns = weights.permute(*first, *order).flatten(last).flatten(0, last - 1).to(values.dtype)
        total = torch.bmm(rows, columns.unsqueeze(2)).reshape(*weights.shape[:last], factor.n)
        total = total.movedim(-1, 0).sum_to_size(factor.n, *small[:last])
    elif any(weights.stride()) or weights.numel() == 0:
        total = (values * weights).sum_to_size(factor.n, *small)
    else:  # one number, expanded
        total = values.sum_to_size(factor.n, *small) * weights[(slice(1),) * weights.ndim]
    return total.reshape(factor.n, *shape)


@contracted.register
def _(factor: Outer, weights: Tensor, shape: torch.Size) -> Tensor | None:
    left, right = widen(factor.left), widen(factor.right)
    weights = weights.to(left.dtype)
    rows, columns = _small(shape, factor)
    if min(rows, columns) != 1 or factor.prefers_dense_maps:
        return None
    if columns != 1:
        total = ((left @ weights) * right).sum(1)
    else:
        total = ((right @ _shared_row(weights).T) * left).sum(1)
        total = total if rows != 1 else total.sum(1)
    return total.reshape(factor.n, *shape)


@contracted.register
def _(factor: Conv, weights: Tensor, shape: torch.Size) -> Tensor | None:
    small = _small(shape, factor)
    if small[1:].numel() != 1 or factor.prefers_dense_maps:
        return None
    products = factor.products(_shared_row(weights) if factor.geometry.groups == 1 else weights)
    total = products.sum((1, *range(3, 3 + len(factor.geometry.kernel)))).sum_to_size(factor.n, small[0])
    return total.reshape(factor.n, *shape)


@contracted.register
def _(factor: Expanded, weights: Tensor, shape: torch.Size) -> Tensor | None:
    small, values, weights = _small(shape, factor), widen(factor.values), widen(weights)
    if any(size != 1 and own == 1 for size, own in zip(small, factor.small, strict=True)):
        own, kept = ([1 + dim for dim, size in enumerate(sizes) if size != 1] for sizes in (factor.small, small))
        values = values.reshape(factor.n, *(size for size in factor.small if size != 1))
        total = torch.einsum(values, [0, *own], weights.to(values.dtype), range(1, 1 + weights.ndim), [0, *kept])
    else:
        total = (values * weights.sum_to_size(factor.small)).sum_to_size(factor.n, *small)
    return total.reshape(factor.n, *shape)


@contracted.register
def _(factor: Scaled, weights: Tensor, shape: torch.Size) -> Tensor | None:
    return None if factor.shared is None else contracted(factor.factor, widen(weights) * factor.shared, shape)


@contracted.register
def _(factor: Views, weights: Tensor, shape: torch.Size) -> Tensor | None:
    if shape.numel() == 1:
        return factor.dot(weights).reshape(factor.n, *shape)
    if not factor.is_reshaped:
        return _contracted_slices(factor, weights, shape) if _are_slices(factor) else None
    own = factor.factors[0]
    small = _regrouped(weights.new_empty(_small(shape, factor)), factor.shape, own.shape).shape
    total = contracted(own, weights.reshape(own.shape), small) if small.numel() == shape.numel() else None
    return None if total is None else total.reshape(factor.n, *shape)


def _are_slices(factor: Views) -> bool:
    """Whether the views are the slices in the first dimension, in their order."""
    return len(factor.regions) == factor.shape[0] > 1 and list(factor.regions) == slices_of(factor.shape, 0)


def _contracted_slices(factor: Views, weights: Tensor, shape: torch.Size) -> Tensor | None:
    first, *small = _small(shape, factor)
    found = [contracted(own, part, torch.Size(small)) for own, part in zip(factor.factors, weights, strict=True)]
    totals = [total for total in found if total is not None]
    if len(totals) < len(found):
        return None
    total = torch.stack(totals, 1)
    return (total if first != 1 else total.sum(1)).reshape(factor.n, *shape)


@contracted.register
def _(factor: Rows, weights: Tensor, shape: torch.Size) -> Tensor | None:
    if shape.numel() == 1:
        return factor.dot(weights).reshape(factor.n, *shape)
    return _weighted_rows(factor, weights).sum(1).reshape(factor.n, *shape) if _small(shape, factor)[0] == 1 else None


def _weighted_rows(factor: Rows, weights: Tensor) -> Tensor:
    cotangent = widen(factor.cotangent)
    return cotangent * weights.to(cotangent.dtype)[factor.index]


def added_up(factor: Factor, weights: Tensor, shape: torch.Size) -> Factor | None:
    """`contracted` as a factor: of a table's rows, one number for each row that was looked up."""
    if isinstance(factor, Rows) and shape == (factor.num_rows, 1):
        return Rows(factor.index, _weighted_rows(factor, weights).sum(2, keepdim=True), factor.num_rows)
    total = contracted(factor, weights, shape)
    return None if total is None else Dense(total)


@singledispatch
def transposed(factor: Factor) -> Factor | None:
    """The gradient of the transposed matrix, or of the transposed matrices in a stack."""
    return None


@transposed.register
def _(factor: Dense) -> Factor:
    return Dense(factor.values.mT)


@transposed.register
def _(factor: Outer) -> Factor:
    return Outer(factor.right, factor.left)


@transposed.register
def _(factor: Routed) -> Factor:
    return Routed(factor.index, factor.right, factor.left, factor.num_groups)


@transposed.register
def _(factor: Expanded) -> Factor:
    values = factor.values if factor.small.numel() == 1 else factor.values.mT  # keep the object: `merge_scaled` compares ids
    return Expanded(values, factor.shape[::-1])


@transposed.register
def _(factor: Views) -> Factor | None:
    if len(factor.shape) != 2:
        return None
    turned = [region.transposed(factor.shape) for region in factor.regions]
    regions = [region for region in turned if region is not None]
    return Views(factor.factors, regions, factor.shape[::-1]) if len(regions) == len(turned) else None


@transposed.register
def _(factor: Scaled) -> Factor | None:
    turned = transposed(factor.factor)
    return None if turned is None else Scaled(turned, factor.entries.mT)


@singledispatch
def diagonal(factor: Factor) -> Factor | None:
    """The gradient of x, if that of diag(x) is given."""
    return None


@diagonal.register
def _(factor: Dense) -> Factor:
    return Dense(factor.values.diagonal(dim1=1, dim2=2))


@diagonal.register
def _(factor: Outer) -> Factor:
    return Dense((widen(factor.left) * widen(factor.right)).sum(1).to(factor.dtype))


def on_diagonal(factor: Factor, shape: torch.Size) -> Factor | None:
    """The gradient of a matrix if that of its diagonal is given: multiples of the identity's rows, which numbers have to be finite for."""
    if not isinstance(factor, Dense) or shape[0] > shape[1]:
        return None
    if not (_functorch.can_read_now(factor.values) and factor.values.sum().isfinite()):
        return None
    rows = torch.eye(*shape, dtype=factor.dtype, device=factor.device)
    return Scaled(Expanded(factor.values.unsqueeze(2), shape), rows.unsqueeze(0))


@singledispatch
def premultiplied(factor: Factor, matrix: Tensor) -> Factor | None:
    """matrix^T @ gradient[n], the gradient of x if that of matrix @ x is given, for a matrix, perhaps a sparse one."""
    return None


@premultiplied.register
def _(factor: Dense, matrix: Tensor) -> Factor | None:
    values, matrix = factor.values, matrix.to(factor.dtype)
    (n, rows, columns), made = values.shape, matrix.shape[1]
    if matrix.layout is not torch.strided:
        return Dense(_sparse_product(matrix.t(), values))
    if rows * (made + columns) < made * columns:  # a product with few terms, whose factor is smaller than its gradient
        return Outer(matrix.expand(n, rows, made), values)
    if values.mT.is_contiguous():
        return Dense((values.mT @ matrix).mT)  # one product for all samples, where the other way round is one for each
    return Dense(matrix.t() @ values)


@premultiplied.register
def _(factor: Outer, matrix: Tensor) -> Factor:
    left = factor.left.flatten(0, 1) @ matrix.to(factor.dtype)
    return Outer(left.unflatten(0, factor.left.shape[:2]), factor.right)


@premultiplied.register
def _(factor: Scaled, matrix: Tensor) -> Factor | None:
    outer, entries = factor.factor, factor.shared
    if not isinstance(outer, Outer) or not outer.is_product or entries is None or matrix.layout is not torch.strided:
        return None
    if matrix.shape[1] > min(factor.shape):
        return None  # the product, or one side of it, is larger than the gradient
    # M^T (E * l r^T) = ((l * M)^T E) * r: one product for all samples, and no gradient of this factor's size
    rows = outer.left.mT * matrix.to(factor.dtype)
    return Dense(rows.mT @ entries.expand(factor.shape) * outer.right)


@premultiplied.register
def _(factor: Rows, matrix: Tensor) -> Factor | None:
    if factor.num_rows <= factor.index.shape[1]:
        return premultiplied(Dense(factor.materialize()), matrix)
    if matrix.layout is not torch.strided:
        return _looked_up_in_sparse(factor, matrix)
    factor = factor.coalesced() if _functorch.can_read_now(factor.index) else factor  # each row of the matrix is read again and again
    left = matrix.to(factor.dtype)[factor.index]
    rows = _looked_up_among_zeros(factor, left, matrix) if _functorch.can_read_now(left) and left.numel() else None
    return Outer(left, factor.cotangent) if rows is None else rows


@premultiplied.register
def _(factor: Views, matrix: Tensor) -> Factor | None:
    whole = as_product(factor)
    return None if whole is None else premultiplied(whole, matrix)


def as_product(factor: Factor) -> Outer | None:
    """The gradient of a matrix as an Outer, which one of a block of its entries is with zeros around; None for others."""
    if isinstance(factor, Outer):
        return factor
    if not isinstance(factor, Views) or len(factor.factors) != 1 or len(factor.shape) != 2:
        return None
    region, own, (rows, columns) = factor.regions[0], factor.factors[0], factor.shape
    if not isinstance(own, Outer) or region.stride not in ((columns, 1), (1, columns)):
        return None
    own = own if region.stride == (columns, 1) else Outer(own.right, own.left)
    row, column = divmod(region.offset, max(1, columns))
    after = rows - row - own.shape[0], columns - column - own.shape[1]
    if min(after) < 0:
        return None
    return Outer(F.pad(own.left, (row, after[0])), F.pad(own.right, (column, after[1])))


def _looked_up_among_zeros(factor: Rows, left: Tensor, matrix: Tensor) -> Rows | None:
    """The same for a matrix that is mostly zeros, as a graph's may be, though held as a dense one; None for others.

    Of these the rows of the first sample tell.
    """
    if not _are_few(_most(left[0].count_nonzero(1)), factor, matrix):
        return None
    counts = left.count_nonzero(2)
    most = _most(counts)
    if most == 0 or not _are_few(most, factor, matrix):
        return None
    first = counts.flatten().cumsum(0).reshape(counts.shape) - counts
    places, held = _up_to(most, first, counts)
    columns = left.flatten(0, 1).nonzero()[:, 1][places]
    return _spread(factor, columns, left.gather(2, columns), held, matrix.shape[1])


def _are_few(rows: int, factor: Rows, matrix: Tensor) -> bool:
    """Whether to hold so many rows for each that was looked up in a product, and not an Outer, whose positions do not become more."""
    columns = factor.cotangent.shape[2]
    return _SMALLER * rows * columns < matrix.shape[1] + columns


def _spread(factor: Rows, places: Tensor, weights: Tensor, held: Tensor, num_rows: int) -> Rows:
    """The gradient of a table if each row that was looked up is the sum of its rows at `places` [n, t, k] where they are held, weighted."""
    products = torch.where(held.unsqueeze(3), weights.unsqueeze(3) * factor.cotangent.unsqueeze(2), 0)
    return Rows(places.flatten(1), products.flatten(1, 2), num_rows)


def _sparse_product(matrix: Tensor, values: Tensor) -> Tensor:
    """matrix @ values[n], for a sparse matrix: some samples at a time, which it reads from cache."""
    parts = values.split(_machine.items_at_a_time(values.device, values[:1].nbytes))
    return torch.cat([_matmul.for_all_columns(torch.mm, matrix, part) for part in parts])


def _looked_up_in_sparse(factor: Rows, matrix: Tensor) -> Factor | None:
    """The rows of x that the rows of (matrix @ x) that were looked up are sums of; if these are many, an Outer, or the gradient itself.

    The positions of an Outer are those of the lookup, whatever number of products follows, where those of Rows would go on to grow.
    """
    index, cotangent, made = factor.index, factor.cotangent, matrix.shape[1]
    positions, columns = cotangent.shape[1:]
    is_smaller = positions * (made + columns) <= made * columns  # as an Outer
    if not _functorch.can_read_now(index):
        chosen = cotangent.new_zeros(*index.shape, factor.num_rows).scatter(2, index.unsqueeze(2), 1) if is_smaller else None
        return premultiplied(Dense(factor.materialize()) if chosen is None else Outer(chosen, cotangent), matrix)
    matrix = matrix.to_sparse_coo().coalesce()  # torch warns that CSR is new
    (rows, of), entries = matrix.indices(), matrix.values().to(factor.dtype)
    most, first, counts = _members_of(factor, rows)
    places, held = _up_to(most, first, counts)
    weights = torch.where(held, entries[places], 0)
    if _are_few(places.shape[2], factor, matrix):
        return _spread(factor, of[places], weights, held, made)
    if is_smaller:
        return Outer(weights.new_zeros(*index.shape, made).scatter_add_(2, of[places], weights), cotangent)
    return premultiplied(Dense(factor.materialize()), matrix)


_SMALLER = 8
"""How many times smaller than an Outer the rows of a product have to be."""


def _members_of(factor: Rows, ascending: Tensor) -> tuple[int, Tensor, Tensor]:
    """Where each row that was looked up begins among ascending integers, and how often it is there -> [n, t] each; and how often at most.

    In a trace, where the lookups are not known, that is how often any row is there.
    """
    starts = torch.searchsorted(ascending, torch.arange(factor.num_rows + 1, device=ascending.device))
    first = starts[factor.index]
    counts = starts[factor.index + 1] - first
    return _most(counts if _functorch.can_read_now(counts) else starts.diff()), first, counts


def _most(counts: Tensor) -> int:
    return int(counts.max()) if counts.numel() else 0


def _up_to(most: int, first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """All these places -> [n, t, most], filled up with zeros; which are held."""
    steps = torch.arange(most, device=first.device)
    held = steps < counts.unsqueeze(2)
    return torch.where(held, first.unsqueeze(2) + steps, 0), held


def postmultiplied(factor: Factor, matrix: Tensor) -> Factor | None:
    """gradient[n] @ matrix."""
    if isinstance(factor, Rows):
        return Rows(factor.index, factor.cotangent @ matrix.to(factor.dtype), factor.num_rows)
    turned = transposed(factor)
    turned = None if turned is None else premultiplied(turned, matrix)
    return None if turned is None else transposed(turned)


@singledispatch
def scattered(factor: Factor, index: Tensor, num_rows: int) -> Factor | None:
    """The gradient of x [num_rows, d] if that of x[index] is given."""
    return _scattered_in_parts(factor, index, num_rows)


def _scattered_in_parts(factor: Factor, index: Tensor, num_rows: int) -> Factor:
    if len(index) < num_rows:
        return Rows(index.expand(factor.n, -1), factor.materialize(), num_rows)
    places = _inverse(index) if factor.shape[1] == 1 and len(index) == num_rows and _functorch.is_known_for_good(index) else None
    own = None if places is None else read_at(factor, places)
    if own is not None:
        return reshaped(own, factor.shape)
    # Added up while they are in the cache: of entries that are read again and again the sums are smaller.
    parts = [factor.materialize()] if _functorch.is_traced() else factor.parts(chunks=1)
    return Dense(torch.cat([_added_rows(part, index, num_rows) for part in parts]))


def _inverse(index: Tensor) -> Tensor | None:
    """Where each integer from 0 on is, in an index of as many; None if one is missing."""
    places = torch.full_like(index, -1).scatter(0, index, torch.arange(len(index), device=index.device, dtype=index.dtype))
    return None if (places < 0).any() else places


def _added_rows(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    is_whole = _functorch.is_traced() and not _functorch.transform_active() and not values.requires_grad
    return (_rows_op if is_whole else _sums_of_rows)(values, index, num_rows)


def _sums_of_rows(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """sum of values[n, m, d] over the m whose index is k -> [n, k, d]."""
    rows = values.squeeze(2) if values.shape[2] == 1 else values  # which index_add takes several times as long for
    sums = rows.new_zeros(len(rows), num_rows, *rows.shape[2:], dtype=wide(rows.dtype)).index_add(1, index, widen(rows))
    return sums.to(values.dtype).reshape(len(values), num_rows, values.shape[2])


# Compilers turn `index_add` into atomic additions, on which threads wait.
_rows_op = opaque("sums_of_rows", _sums_of_rows, lambda values, index, num_rows: values.new_empty(len(values), num_rows, values.shape[2]))


@scattered.register
def _(factor: Dense, index: Tensor, num_rows: int) -> Factor:
    if len(index) < num_rows:
        return Rows(index.expand(factor.n, -1), factor.values, num_rows)
    return Dense(_added_rows(factor.values, index, num_rows))


@scattered.register
def _(factor: Scaled, index: Tensor, num_rows: int) -> Factor | None:
    return None if isinstance(factor.factor, Expanded) else _scattered_in_parts(factor, index, num_rows)


@scattered.register
def _(factor: Views, index: Tensor, num_rows: int) -> Factor | None:
    own, width = factor.factors[0], max(1, factor.shape[1])
    if factor.is_reshaped and isinstance(own, Rows) and own.shape[1] % width == 0:
        # Each row of the table that was looked up is several of x, one after another.
        looked_up = index.reshape(own.num_rows, own.shape[1] // width)[own.index].flatten(1)
        return Rows(looked_up, own.cotangent.reshape(*looked_up.shape, factor.shape[1]), num_rows)
    if factor.is_reshaped and isinstance(own, Outer) and width == 1 and _adds_products(own, index, num_rows):
        add = _products_op if _functorch.is_traced() else _sums_of_products
        return Dense(add(own.left.squeeze(1), own.right.squeeze(1), index, num_rows).unsqueeze(2))
    return _scattered_in_parts(factor, index, num_rows)


def _adds_products(factor: Outer, index: Tensor, num_rows: int) -> bool:
    """Whether to add up all samples' products at once, entry by entry: to add one entry of many samples takes little longer than of one."""
    is_derived = factor.is_differentiated or _functorch.transform_active()
    return factor.is_product and factor.n >= 32 and len(index) >= 4 * num_rows and not is_derived


def _sums_of_products(left: Tensor, right: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """sum of left[n, a] right[n, b] over the entries a, b in one row whose index is k -> [n, k]."""
    lefts, rights = (widen(side).T.contiguous() for side in (left, right))
    sums = lefts.new_zeros(num_rows, len(left))
    rows = _machine.items_at_a_time(left.device, rights.nbytes)
    for own, places in zip(lefts.split(rows), index.split(rows * len(rights)), strict=True):
        sums.index_add_(0, places, (own.unsqueeze(1) * rights).flatten(0, 1))
    return sums.T.contiguous().to(left.dtype)


_products_op = opaque("sums_of_products", _sums_of_products, lambda left, right, index, num_rows: left.new_empty(len(left), num_rows))


@scattered.register
def _(factor: Outer, index: Tensor, num_rows: int) -> Factor:
    left = factor.left
    return Outer(left.new_zeros(*left.shape[:2], num_rows).index_add(2, index, left), factor.right)


@scattered.register
def _(factor: Rows, index: Tensor, num_rows: int) -> Factor:
    return Rows(index[factor.index], factor.cotangent, num_rows)


def scattered_columns(factor: Factor, index: Tensor, num_columns: int) -> Factor | None:
    """The gradient of x [a, num_columns] if that of x[:, index] is given."""
    if isinstance(factor, Rows):
        rows = factor.cotangent
        return Rows(factor.index, rows.new_zeros(*rows.shape[:2], num_columns).index_add(2, index, rows), factor.num_rows)
    turned = transposed(factor)
    found = None if turned is None else scattered(turned, index, num_columns)
    return None if found is None else transposed(found)


@singledispatch
def gathered(factor: Factor, index: Tensor) -> Factor | None:
    """The gradient of the rows x[k], if that of the sums of those with the same index[k] is given."""
    return None


@gathered.register
def _(factor: Dense, index: Tensor) -> Factor:
    return Dense(factor.values.index_select(1, index))


@gathered.register
def _(factor: Outer, index: Tensor) -> Factor:
    return Outer(factor.left.index_select(2, index), factor.right)


@gathered.register
def _(factor: Rows, index: Tensor) -> Factor | None:
    if not _functorch.is_known(index):
        return None
    factor = factor.coalesced() if _functorch.can_read_now(factor.index) else factor
    order = index.sort(stable=True)
    most, first, counts = _members_of(factor, order.values)
    if factor.index.shape[1] * most > len(index):
        return gathered(Dense(factor.materialize()), index)
    places, held = _up_to(most, first, counts)
    rows = torch.where(held.unsqueeze(3), factor.cotangent.unsqueeze(2), 0)
    return Rows(order.indices[places].flatten(1), rows.flatten(1, 2), len(index))


@singledispatch
def read_at(factor: Factor, places: Tensor) -> Factor | None:
    """The gradient of what has been written into a tensor, entry by entry: its entries at these places in one row."""
    return _read_from(factor, places)


def _read_from(factor: Factor, places: Tensor) -> Factor | None:
    return None if factor.prefers_dense_maps else reshaped(Entries(factor, places.reshape(1, -1).expand(factor.n, -1)), places.shape)


@read_at.register
def _(factor: Dense, places: Tensor) -> Factor:
    values = factor.values.reshape(factor.n, factor.shape.numel())
    return Dense(values.gather(1, places.reshape(1, -1).expand(factor.n, -1)).reshape(factor.n, *places.shape))


@read_at.register
def _(factor: Outer, places: Tensor) -> Factor | None:
    if factor.prefers_dense_maps:
        return None
    columns, copied = factor.shape[1], 6 * factor.dtype.itemsize * _machine.reused_byte(factor.device, factor.dtype)
    if places.ndim == 2 and places.numel() and _functorch.is_known_for_good(places):
        rows, own = places[:, 0] // columns, places[0] % columns
        if torch.equal(places, rows[:, None] * columns + own):  # all entries in some rows and some columns
            return Outer(factor.left.index_select(2, rows), factor.right.index_select(2, own))
    if copied * places.numel() < 4 * factor.shape.numel() and factor.positions * places.numel() <= factor.shape.numel():
        sides = (factor.left, places // columns), (factor.right, places % columns)
        # In half the time that `index_select` takes.
        left, right = (widen(side).gather(2, index.reshape(1, 1, -1).expand(*side.shape[:2], -1)) for side, index in sides)
        return Dense((left * right).sum(1).to(factor.dtype).reshape(factor.n, *places.shape))
    return _read_from(factor, places)


@read_at.register
def _(factor: Scaled, places: Tensor) -> Factor | None:
    if factor.shared is not None:
        own, entries = read_at(factor.factor, places), factor.shared.expand(factor.shape).reshape(-1)[places]
        if isinstance(own, (Dense, Outer, Rows)):
            return own if _functorch.is_known_for_good(entries) and (entries == 1).all() else scaled(own, entries)
    return _read_from(factor, places)


@read_at.register
def _(factor: Views, places: Tensor) -> Factor | None:
    if factor.is_reshaped:
        return read_at(factor.factors[0], places)
    if not _functorch.is_known_for_good(places):
        return None
    left = places.numel()
    for own, region in zip(factor.factors, factor.regions, strict=True):
        within = torch.full(factor.shape, -1, device=places.device)
        view = region.of(within)
        view.copy_(torch.arange(view.numel(), device=places.device).reshape(view.shape))
        found = within.reshape(-1)[places]
        count = int((found >= 0).sum())
        if count == places.numel():
            return read_at(own, found)
        left -= count
    return Sum([], factor._lead.new_empty(factor.n, 0), places.shape) if left == places.numel() else _read_from(factor, places)


@read_at.register
def _(factor: Rows, places: Tensor) -> Factor | None:
    columns = factor.shape[1]
    if places.ndim != 2 or len(places) == 0 or not 0 < places.shape[1] == columns or not _functorch.is_known_for_good(places):
        return None
    rows = places[:, 0] // columns
    if not torch.equal(places, rows[:, None] * columns + torch.arange(columns, device=rows.device)):
        return None
    written = torch.full((factor.num_rows,), -1, device=rows.device).index_put((rows,), torch.arange(len(rows), device=rows.device))
    if (written >= 0).sum() < len(rows):
        return None  # a row that has been written twice
    index = written[factor.index]
    return Rows(index.clamp(min=0), torch.where((index < 0)[:, :, None], 0, factor.cotangent), len(rows))


@singledispatch
def narrowed(factor: Factor, dim: int, start: int, length: int) -> Factor | None:
    """The entries from `start` to `start + length` along a dimension; `length` is at least 1."""
    return None


@narrowed.register
def _(factor: Dense, dim: int, start: int, length: int) -> Factor:
    return Dense(factor.values.narrow(1 + dim, start, length))


@narrowed.register
def _(factor: Outer, dim: int, start: int, length: int) -> Factor:
    left, right = factor.left, factor.right
    return Outer(left.narrow(2, start, length), right) if dim == 0 else Outer(left, right.narrow(2, start, length))


@narrowed.register
def _(factor: Rows, dim: int, start: int, length: int) -> Factor:
    if dim == 1:
        return Rows(factor.index, factor.cotangent.narrow(2, start, length), factor.num_rows)
    index = factor.index - start
    among = (index >= 0) & (index < length)
    return Rows(torch.where(among, index, 0), torch.where(among[:, :, None], factor.cotangent, 0), length)


@narrowed.register
def _(factor: Routed, dim: int, start: int, length: int) -> Factor:
    left, right = factor.left, factor.right
    if dim == 0:
        index = factor.index - start
        among = (index >= 0) & (index < length)
        left, right = (torch.where(among[:, :, None], side, 0) for side in (left, right))
        return Routed(torch.where(among, index, 0), left, right, length)
    left, right = (left.narrow(2, start, length), right) if dim == 1 else (left, right.narrow(2, start, length))
    return Routed(factor.index, left, right, factor.num_groups)


@narrowed.register
def _(factor: Conv, dim: int, start: int, length: int) -> Factor | None:
    whole = factor.geometry.groups == 1
    if dim == 0 and whole:
        return Conv(factor.cotangent.narrow(2, start, length), factor.input, factor.geometry)
    return Conv(factor.cotangent, factor.input.narrow(2, start, length), factor.geometry) if dim == 1 and whole else None


@narrowed.register
def _(factor: Views, dim: int, start: int, length: int) -> Factor | None:
    return _of_rows(factor, dim, lambda rows: rows.narrow(1 + dim, start, length))


def _of_rows(factor: Factor, dim: int, part: Callable[[Tensor], Tensor]) -> Factor | None:
    """The gradient of a part of each row of a table, given what takes it of the rows [n, t, *row]; None for other gradients."""
    table = table_of(factor)
    if table is None or dim == 0:
        return None
    rows = part(table.cotangent.unflatten(2, factor.shape[1:]))
    flat = rows.reshape(*table.index.shape, rows.shape[2:].numel())
    return reshaped(Rows(table.index, flat, table.num_rows), torch.Size((table.num_rows, *rows.shape[2:])))


def table_of(factor: Factor) -> Rows | None:
    """The gradient of a table, which has a dimension of rows in front, as Rows with each row flattened; None if it is something else."""
    if isinstance(factor, Views) and factor.is_reshaped and factor.shape[:1] == factor.factors[0].shape[:1]:
        factor = factor.factors[0]
    return factor if isinstance(factor, Rows) else None


def placed(factor: Factor, region: Region, shape: torch.Size) -> Factor:
    """The gradient of a parameter of this shape, which is that of one of its views there, and zero elsewhere."""
    if isinstance(factor, Rows) and len(shape) == 2 and region.size[1] == shape[1] and (region.stride[1] == 1 or shape[1] == 1):
        (step, aside), (first, beside) = divmod(region.stride[0], max(1, shape[1])), divmod(region.offset, max(1, shape[1]))
        if aside == beside == 0:  # whole rows
            return Rows(first + step * factor.index, factor.cotangent, shape[0])
    placed = Views([factor], [region], shape)
    return reshaped(factor, shape) if placed.is_reshaped else placed


def slices_of(shape: torch.Size, dim: int) -> list[Region]:
    """The views of a parameter with one index in a dimension each."""
    strides = strides_of(shape)
    size, stride = ((*own[:dim], *own[dim + 1 :]) for own in (tuple(shape), strides))
    return [Region(size, stride, k * strides[dim]) for k in range(shape[dim])]


def sliced(factor: Factor, dim: int, k: int) -> Factor | None:
    """The gradient of the slice with index k in a dimension."""
    if isinstance(factor, Dense):
        return Dense(factor.values.select(1 + dim, k))
    if isinstance(factor, Expanded):
        own, shape = factor.values.select(1 + dim, min(k, factor.small[dim] - 1)), slices_of(factor.shape, dim)[k].size
        return Dense(own) if own.shape[1:] == shape else Expanded(own, torch.Size(shape))
    found = _of_rows(factor, dim, lambda rows: rows.select(1 + dim, k))
    if found is not None:
        return found
    own = slices_of(factor.shape, dim)[k]
    if not isinstance(factor, Views) or not all(region == own or region.is_apart(own, factor.shape) for region in factor.regions):
        return None
    if own not in factor.regions:
        return Sum([], factor._lead.new_empty(factor.n, 0), torch.Size(own.size))
    return factor.factors[factor.regions.index(own)]


def reshaped(factor: Factor, shape: torch.Size) -> Factor:
    """The same entries, in the same order, in another shape."""
    return factor if factor.shape == shape else _reshaped(factor, shape)


@singledispatch
def _reshaped(factor: Factor, shape: torch.Size) -> Factor:
    return _viewed(factor, shape)


def _viewed(factor: Factor, shape: torch.Size) -> Factor:
    return Views([factor], [Region(tuple(factor.shape), strides_of(factor.shape), 0)], shape)


@_reshaped.register
def _(factor: Dense, shape: torch.Size) -> Factor:
    return Dense(factor.values.reshape(factor.n, *shape))


@_reshaped.register
def _(factor: Expanded, shape: torch.Size) -> Factor:
    small = _regrouped(factor.values.new_empty(factor.small), factor.shape, shape).shape
    known = small.numel() == factor.small.numel()
    return Expanded(factor.values.reshape(factor.n, *small), shape) if known else Dense(factor.materialize().reshape(factor.n, *shape))


@_reshaped.register
def _(factor: Scaled, shape: torch.Size) -> Factor:
    if factor.shared is None:
        return Dense(factor.materialize().reshape(factor.n, *shape))
    entries = _regrouped(factor.shared, factor.shape, shape)
    return Scaled(reshaped(factor.factor, shape), entries.expand(factor.n, *entries.shape))


@_reshaped.register
def _(factor: Views, shape: torch.Size) -> Factor:
    return reshaped(factor.factors[0], shape) if factor.is_reshaped else _viewed(factor, shape)


@_reshaped.register
def _(factor: Sum, shape: torch.Size) -> Factor:
    return Sum([reshaped(term, shape) for term in factor.terms], factor.like, shape)


def _entries(scale: Scale, factor: Factor) -> Tensor | None:
    """The scale, reshaped to as many dimensions as the parameter; None for a number."""
    if not isinstance(scale, Tensor) or scale.ndim == 0:
        return None
    return scale.reshape((1,) * (len(factor.shape) - scale.ndim) + scale.shape)


def _entry_by_entry(factor: Factor, entries: Tensor) -> Factor | None:
    if factor.prefers_dense_maps:
        return None
    return Scaled(factor, entries.to(factor.dtype).expand(factor.n, *entries.shape))


def _shared_row(weights: Tensor) -> Tensor:
    """The first row, if the rows are one row expanded; else all rows."""
    return weights[:1] if is_one_row(weights) else weights


def _small(shape: torch.Size, factor: Factor) -> torch.Size:
    """The shape, with leading ones up to the number of dimensions of the parameter."""
    return torch.Size((1,) * (len(factor.shape) - len(shape)) + tuple(shape))


def _regrouped(entries: Tensor, shape: torch.Size, other: torch.Size) -> Tensor:
    """Reshape a tensor that broadcasts to `shape` into one that broadcasts to `other`."""
    whole = entries.expand(shape).reshape(other)
    for dim, (size, stride) in enumerate(zip(whole.shape, whole.stride(), strict=True)):
        if stride == 0 and size > 1:
            whole = whole.narrow(dim, 0, 1)  # one number, expanded over this dimension
    return whole
