"""The linear layer: y = x W^T + b.

With C the cotangent of y, for sample n with positions t: grad W[n] = sum_t C[n,t,:] x[n,t,:]^T and grad b[n] = sum_t C[n,t,:].
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._hardware import _matmul
from psg._torch import _ambient
from psg.factors import Dense, Outer
from psg.rules._registry import of_each, reshape, rule, transpose


def flatten_positions(tensor: Tensor) -> Tensor:
    """[n, *positions, d] -> [n, t, d]."""
    return tensor if tensor.ndim == 3 else tensor.reshape(tensor.shape[0], tensor.shape[1:-1].numel(), tensor.shape[-1])


def sum_positions(cotangent: Tensor) -> Dense:
    """[n, *positions, d] -> the Dense gradient [n, d] of a parameter that is added at every position."""
    flat = flatten_positions(cotangent)
    return Dense(flat.squeeze(1) if flat.shape[1] == 1 else flat.sum(1))


def sum_images(cotangent: Tensor) -> Dense:
    """[n, images, c, *spatial] -> the Dense gradient [n, c] of a parameter that is added to every pixel of its channel."""
    return Dense(cotangent.reshape(*cotangent.shape[:3], cotangent.shape[3:].numel()).sum((1, 3)))


_FEW = 1 << 13  # numbers in an output


@rule(F.linear, frozen=True, declines_few=True, differentiable=True)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """y = x W^T + b: ([n,*,i], [o,i], [o]) -> [n,*,o]."""
    if weight.is_complex() or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    shape = (*input.shape[:-1], weight.shape[0])
    converted = _ambient.is_autocast(input) or bias is not None and bias.dtype != input.dtype
    if input.ndim > 2 and not converted and math.prod(shape) <= _FEW:
        # Without a bias the native op returns no view of another tensor. A pass over few numbers takes less time than two more ops.
        output = F.linear(input, weight)
        output = output if bias is None else output.add_(bias)
    elif not converted and (blocks := _blocks(input)) is not None:
        output = reshape(_matmul.affine_blocks(blocks, weight, bias), shape)
    else:
        # One flat product: on [n, 1, i] the native op would copy the bias n times. vmap would add the bias in a separate pass, so frozen
        # layers run here too.
        rows = input.flatten(0, -2)
        output = reshape((F.linear if converted else _matmul.affine)(rows, weight, bias), shape)
    return output, {
        "weight": lambda cotangent: Outer(flatten_positions(cotangent), flatten_positions(input)),
        "bias": sum_positions,
    }


def _blocks(input: Tensor) -> Tensor | None:
    """[n,*,i] -> [k,t,i] if that is the transpose of a contiguous tensor, such as an image: a flat product would copy it first."""
    if input.is_contiguous():
        return None
    first = next((dim for dim in range(input.ndim - 2, 0, -1) if input.movedim(-1, dim).is_contiguous()), None)
    return None if first is None else input.flatten(first, -2).flatten(0, first - 1)


@of_each(F.linear)
def linear_of_each(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """([n,*,i], [n,o,i], [n,o]) -> [n,*,o]."""
    if weight.ndim != 3 or input.ndim < 2 or input.shape[-1] != weight.shape[2] or input.dtype != weight.dtype:
        return NotImplemented
    if bias is not None and (bias.shape != weight.shape[:2] or bias.dtype != weight.dtype):
        return NotImplemented
    if input.ndim == 2 or input.ndim == 3 and input.shape[1] == 1:
        # From the left, so that the gradient of the weight is contiguous.
        column = input.unsqueeze(2) if input.ndim == 2 else input.mT
        output = torch.bmm(weight, column) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, column)
    else:
        rows = flatten_positions(input)
        output = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return reshape(output, (*input.shape[:-1], weight.shape[1]))


@transpose(F.linear, data="input", constants=("bias",))
def linear_transpose(shape: torch.Size, weight: Tensor, bias: Tensor | None = None) -> Any:
    """C -> C W."""
    if weight.ndim != 2 or weight.is_complex() or len(shape) == 0 or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    return torch.matmul, {"other": weight}
