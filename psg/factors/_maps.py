"""Linear maps of gradients: what the transpose of an op that made a parameter's value makes of a factor of that value's gradient.

Each gives None where the result is no factor of few terms: then the gradient has to be formed.
"""

from functools import singledispatch

import torch
from torch import Tensor

from psg.factors._base import Factor, widen
from psg.factors._conv import Conv
from psg.factors._dense import Dense
from psg.factors._outer import Outer
from psg.factors._rows import Rows
from psg.factors._views import Views

Scale = Tensor | float


@singledispatch
def scaled(factor: Factor, scale: Scale) -> Factor | None:
    """scale * gradient[n], for a scale that broadcasts to the parameter's shape."""
    return None


@scaled.register
def _(factor: Dense, scale: Scale) -> Factor:
    return Dense(factor.values * scale)


@scaled.register
def _(factor: Outer, scale: Scale) -> Factor | None:
    left, right, entries = factor.left, factor.right, _entries(scale, factor)
    if entries is None:
        return Outer(left * scale, right) if left.shape[2] <= right.shape[2] else Outer(left, right * scale)
    if entries.shape[1] == 1:
        return Outer(left * entries[:, 0], right)
    return Outer(left, right * entries[0]) if len(entries) == 1 else None


@scaled.register
def _(factor: Rows, scale: Scale) -> Factor | None:
    entries = _entries(scale, factor)
    if entries is not None:
        if len(entries) != 1 and entries.shape[1] != 1:
            return None
        scale = entries[0] if len(entries) == 1 else entries[factor.index]
    return Rows(factor.index, factor.cotangent * scale, factor.num_rows)


@scaled.register
def _(factor: Conv, scale: Scale) -> Factor | None:
    entries = _entries(scale, factor)
    if entries is not None:
        if entries.shape[1:].numel() != 1:
            return None
        scale = entries[:, 0]
    return Conv(factor.cotangent * scale, factor.input, factor.geometry)


@scaled.register
def _(factor: Views, scale: Scale) -> Factor | None:
    found = [scaled(own, scale) for own in factor.factors] if _entries(scale, factor) is None else [None]
    own = [part for part in found if part is not None]
    return factor.with_factors(own) if len(own) == len(factor.factors) else None


@singledispatch
def contracted(factor: Factor, weights: Tensor, shape: torch.Size) -> Factor | None:
    """weights * gradient[n], for weights of the parameter's shape, added up to a shape that broadcasts to it."""
    return Dense(factor.dot(weights).to(factor.dtype).reshape(factor.n, *shape)) if shape.numel() == 1 else None


@contracted.register
def _(factor: Dense, weights: Tensor, shape: torch.Size) -> Factor:
    total = (widen(factor.values) * weights).sum_to_size(factor.n, *(1,) * (len(factor.shape) - len(shape)), *shape)
    return Dense(total.to(factor.dtype).reshape(factor.n, *shape))


@contracted.register
def _(factor: Outer, weights: Tensor, shape: torch.Size) -> Factor | None:
    left, right = widen(factor.left), widen(factor.right)
    weights = weights.to(left.dtype)
    rows, columns = (1,) * (2 - len(shape)) + tuple(shape)
    if rows != 1 and columns != 1:
        return None
    if columns != 1:
        total = ((left @ weights) * right).sum(1)
    else:
        total = ((right @ weights.T) * left).sum(1)
        total = total if rows == len(weights) else total.sum(1)
    return Dense(total.to(factor.dtype).reshape(factor.n, *shape))


@singledispatch
def transposed(factor: Factor) -> Factor | None:
    """The gradient of the transposed matrix."""
    return None


@transposed.register
def _(factor: Dense) -> Factor:
    return Dense(factor.values.mT)


@transposed.register
def _(factor: Outer) -> Factor:
    return factor.transpose()


@singledispatch
def premultiplied(factor: Factor, matrix: Tensor) -> Factor | None:
    """matrix @ gradient[n], for a matrix."""
    return None


@premultiplied.register
def _(factor: Dense, matrix: Tensor) -> Factor:
    return Dense(matrix.to(factor.dtype) @ factor.values)


@premultiplied.register
def _(factor: Outer, matrix: Tensor) -> Factor:
    return Outer(factor.left @ matrix.to(factor.dtype).T, factor.right)


def _entries(scale: Scale, factor: Factor) -> Tensor | None:
    """The scale with as many dimensions as the parameter; None for a number."""
    if not isinstance(scale, Tensor) or scale.ndim == 0:
        return None
    return scale.reshape((1,) * (len(factor.shape) - scale.ndim) + scale.shape)
