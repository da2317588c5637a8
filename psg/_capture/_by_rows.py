"""Lookups of a table that is computed row by row: of the op only the rows that were looked up have to be differentiated.

A table is what has a dimension of rows in front, whatever the shape of a row.
"""

from typing import Any

import torch
from torch import Tensor

from psg._capture._adjoints import ARITHMETIC
from psg._capture._steps import POINTWISE, REDUCING, Step, keepdim_shape
from psg.factors import Dense, Factor, Rows
from psg.factors._maps import reshaped


def is_row_by_row(step: Step) -> bool:
    """Whether an op computes each row of its output from its arguments' rows at the same place, and from what has no rows."""
    tensors = step.tensors
    if step.name == "masked_fill" and not all(map(step.is_first, step.sides)):
        return False  # its value has no dimensions, and so no rows
    if step.name in ELEMENTWISE:
        return step.output.ndim > 0 and len(step.output) > 1 and all(_has_rows(own, step) or _has_none(own, step) for own in tensors)
    if len(tensors) != 1 or not step.sides or tensors[0].ndim < 2 or not step.is_first(tensors[0]):
        return False
    (side,) = tensors
    if step.name in REDUCING:
        small = keepdim_shape(step, side)
        return small is not None and small[0] == len(side) > 1  # a single row may have been reduced with all its entries
    if step.name not in _ROW_BY_ROW:
        return False
    keyword, position, default = _ROW_BY_ROW[step.name]
    given = step.kwargs.get(keyword, step.args[position] if len(step.args) > position else default)
    if keyword == "normalized_shape":
        return len(given) < side.ndim
    return isinstance(given, int) and given % side.ndim > 0


def _has_rows(tensor: Tensor, step: Step) -> bool:
    return step.name not in ELEMENTWISE or tensor.ndim == step.output.ndim and len(tensor) == len(step.output)


def _has_none(tensor: Tensor, step: Step) -> bool:
    """Whether all rows of the output use the same entries of an argument."""
    return tensor.ndim < step.output.ndim or len(tensor) == 1


def over_rows(step: Step, factor: Rows) -> list[list[Factor]]:
    """Carry the gradient of rows that were looked up over an op that works row by row."""
    index, sides = factor.index.flatten(), step.sides
    if index.numel() == 0:  # not every op takes a table without rows
        return [[] for _ in sides]
    given: dict[int, Tensor] = {}
    for tensor in step.tensors:
        own = tensor.detach()
        if _has_rows(tensor, step):
            own = own[index]
        elif tensor.requires_grad:  # each row has its own gradient: add up those of one sample
            own = own.reshape((1,) * (step.output.ndim - own.ndim) + own.shape)
            own = own.expand(len(index), *own.shape[1:])
        given[id(tensor)] = own
    leaves = [given[id(side)].requires_grad_() for side in sides]
    output = step.rerun(given, step.run)
    cotangent = factor.cotangent.to(output.dtype).reshape(output.shape)
    found = torch.autograd.grad(output, leaves, cotangent, materialize_grads=True)
    return [[_gradient(gradient, side, factor, _has_rows(side, step))] for gradient, side in zip(found, sides, strict=True)]


def _gradient(gradient: Tensor, side: Tensor, factor: Rows, has_rows: bool) -> Factor:
    each = gradient.reshape(*factor.index.shape, gradient.shape[1:].numel())
    if has_rows:
        return reshaped(Rows(factor.index, each, len(side)), side.shape)
    return Dense(each.sum(1).reshape(factor.n, *side.shape))


ELEMENTWISE = (POINTWISE | ARITHMETIC) - {"tril", "triu", "fake_quantize_per_channel_affine"}
"""Ops whose entries do not depend on their place."""

_ROW_BY_ROW: dict[str, tuple[str, int, Any]] = {
    **dict.fromkeys(
        "softmax log_softmax special_softmax special_log_softmax softmin cumsum cumprod logcumsumexp".split(), ("dim", 1, None)
    ),
    "normalize": ("dim", 2, 1),
    **dict.fromkeys(("layer_norm", "rms_norm"), ("normalized_shape", 1, ())),
}
"""Ops along dimensions, with the keyword, the position and the default of the argument that names them."""
