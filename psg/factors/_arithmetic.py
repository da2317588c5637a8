"""Arithmetic on per-sample tensors that all kinds of factors share: wide dtypes, rows scaled, zeroed, grouped and added up, norms."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from psg._torch import _functorch

# The dtypes whose sums are accumulated in float32, those of complex numbers in complex64.
HALF = (torch.float16, torch.bfloat16, torch.complex32)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of products of `dtype` are accumulated: at least float32."""
    return torch.promote_types(dtype, torch.float32) if dtype in HALF else dtype


def widen(tensor: Tensor) -> Tensor:
    """The tensor in its `wide` dtype."""
    return tensor.to(wide(tensor.dtype)) if tensor.dtype in HALF else tensor


def spacious(tensor: Tensor) -> torch.dtype:
    """float64, which holds the squares of all float32 numbers, on devices that have it; elsewhere the tensor's own dtype."""
    return torch.float64 if tensor.device.type in ("cpu", "cuda") else tensor.dtype


# Devices whose products of 16-bit matrices can return float32, the dtype in which they accumulate anyway.
WIDENING = {"cuda", "xpu"}


def wide_bmm(left: Tensor, right: Tensor) -> Tensor:
    """left[n] @ right[n] -> [n, a, b], accumulated and returned in the `wide` dtype."""
    if left.dtype not in HALF:
        return torch.bmm(left, right)
    if left.device.type in WIDENING and not (_functorch.transform_active() or left.requires_grad or right.requires_grad):
        return torch.bmm(left, right, out_dtype=torch.float32)  # `out_dtype` has no derivative
    return torch.bmm(widen(left), widen(right))


def scale_rows(tensor: Tensor, weights: Tensor) -> Tensor:
    """weights[n] * tensor[n, ...] -> [n, ...], in the dtype of `tensor`; the weights themselves are not rounded to it."""
    dtype = wide(tensor.dtype)
    if weights.dtype != dtype:
        weights = weights.to(dtype)
    weights = weights.reshape(-1, *(1,) * (tensor.ndim - 1))
    if dtype == tensor.dtype:
        return tensor * weights
    if _functorch.transform_active() or _functorch.is_traced() or tensor.requires_grad or weights.requires_grad:
        return (tensor * weights).to(tensor.dtype)
    return torch.mul(tensor, weights, out=torch.empty_like(tensor))  # rounds as it writes


def zero_rows(tensor: Tensor, keep: Tensor) -> Tensor:
    """Exactly zero where keep[n] is False, even where `tensor` is inf or NaN."""
    return torch.where(keep.reshape(-1, *(1,) * (tensor.ndim - 1)), tensor, 0)


def root(squared: Tensor) -> Tensor:
    """The square root, with derivatives of zero at zero."""
    zero = squared == 0
    return torch.where(zero, 0, torch.where(zero, 1, squared).sqrt())


def squared_terms_of(left: Tensor, right: Tensor) -> Tensor:
    """sum_t |left_t|^2 |right_t|^2 -> [n], from the Gram matrices of two sides, [n, t, t], for `Factor.recover`.

    Squares so small that inner products with them may have underflowed count as the largest such, where `recover` can look further.
    """
    left, right = left.diagonal(dim1=1, dim2=2), right.diagonal(dim1=1, dim2=2)
    if _functorch.can_read_now(left):
        limits = torch.finfo(left.dtype)
        least = 10 * limits.tiny / limits.eps
        left, right = left.clamp(min=least), right.clamp(min=least)
    return (left * right).sum(1)


def norm_of_norms(parts: list[Tensor]) -> Tensor:
    """[n, k], [n, l], ... -> the norm of every row over all of them, [n]."""
    if len(parts) == 1 and parts[0].shape[1] == 1:
        return parts[0].squeeze(1)
    return torch.linalg.vector_norm(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), dim=1)


def gather_groups(tensor: Tensor, table: Tensor) -> Tensor:
    """[n, t, ...] -> [m, k t, ...]: the positions of the samples in each row of table [m, k]; zeros where the table holds n."""
    order = table.reshape(-1)
    shape = table.shape[0], table.shape[1] * tensor.shape[1], *tensor.shape[2:]
    if order.shape[0] == tensor.shape[0] and torch.equal(order, torch.arange(len(order), device=order.device)):
        return tensor.reshape(shape)  # already side by side
    held = (order < len(tensor)).nonzero()[:, 0]
    if len(held) == len(order):
        return tensor[order].reshape(shape)
    return tensor.new_zeros(len(order), *tensor.shape[1:]).index_copy_(0, held, tensor[order[held]]).reshape(shape)


def add_up(parts: Iterable[Tensor], owners: Tensor, n: int) -> Tensor:
    """Sum the rows of each of n owners: rows [rows, *], split into one or more parts -> [n, *], in the `wide` dtype."""
    total, start = None, 0
    for part in map(widen, parts):
        total = part.new_zeros(n, *part.shape[1:]) if total is None else total
        # Row by row, index_add_ is up to eight times slower on other strides.
        add = torch.index_add if _functorch.transform_active() else Tensor.index_add_  # vmap cannot write the owners' rows into one total
        total = add(total, 0, owners[start : start + len(part)], part.contiguous())
        start += len(part)
    assert total is not None
    return total


def square(values: Tensor) -> Tensor:
    """|values|^2, real, at least float32."""
    values = widen(values)
    return values.real.square() + values.imag.square() if values.is_complex() else values.square()


def as_real(values: Tensor) -> Tensor:
    """The values; complex ones as pairs of real numbers, [*shape, 2]."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values  # conj() may be lazy


def matrices(values: Tensor) -> Tensor:
    """[n, *shape] as matrices [n, shape[0], the rest]; a complex entry is two real ones."""
    values = as_real(values)
    rows = values.shape[1] if values.ndim > 1 else 1
    return values.reshape(len(values), rows, values.shape[2:].numel())


def straight(values: Tensor) -> tuple[Tensor, list[int] | None]:
    """The values with the dimensions after the first sorted into memory order, and the inverse permutation (None for no change).

    In memory order a reduction reads sequentially and copies nothing.
    """
    if values.is_contiguous():
        return values, None
    order = sorted(range(1, values.ndim), key=lambda dim: -values.stride(dim))
    return values.permute(0, *order), [order.index(dim) for dim in range(1, values.ndim)]


def rows_of(values: Tensor) -> Tensor:
    """[n, *shape] -> [n, P], also for n = 0 and for scalars."""
    if values.ndim == 2:
        return values
    return values.reshape(values.shape[0], values.shape[1:].numel())


def real_rows(values: Tensor) -> Tensor:
    """[n, *shape] -> [n, P] or, of complex values, [n, 2 P]: the inner product of complex gradients is that of R^2."""
    return rows_of(as_real(values))


def is_one_row(tensor: Tensor) -> bool:
    """Whether all rows are one, expanded over dim 0, or there is at most one."""
    return len(tensor) < 2 or tensor.stride(0) == 0


def shared_row(tensor: Tensor) -> Tensor | None:
    """The row that all samples share, if there is one, expanded over dim 0; None if each has its own, and without samples."""
    return tensor[0] if len(tensor) and is_one_row(tensor) else None


def one_after_another(fields: Sequence[Tensor]) -> Tensor:
    """Concatenate the samples of one field of several factors. If all samples share one expanded tensor, so do those of the result."""
    filled = [field for field in fields if len(field)]
    if any(len(field) > 1 for field in filled) and all(map(is_one_row, filled)):
        differ = (field.requires_grad or not torch.equal(field[0], filled[0][0]) for field in filled)
        if all(map(_functorch.can_read_now, filled)) and not any(differ):
            return filled[0][:1].expand(sum(map(len, filled)), *filled[0].shape[1:])
    return torch.cat(list(fields))
