"""Matrix products: y = x W^T + b and its relatives.

With C the cotangent of y, sample n at positions t: grad W = sum_t C[n,t,:] x[n,t,:]^T and grad b = sum_t C[n,t,:].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg.factors import Dense, Outer
from psg.rules._registry import reshape, rule


def positions(tensor: Tensor) -> Tensor:
    """[n, *positions, d] -> [n, t, d]."""
    return tensor.reshape(tensor.shape[0], tensor.shape[1:-1].numel(), tensor.shape[-1])


def sum_positions(cotangent: Tensor) -> Dense:
    """[n, *positions, d] -> the Dense gradient [n, d] of something added at every position."""
    flat = positions(cotangent)
    return Dense(flat[:, 0] if flat.shape[1] == 1 else flat.sum(1))


@rule(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """y = x W^T + b: ([n,*,i], [o,i], [o]) -> [n,*,o]."""
    if weight.is_complex() or weight.ndim != 2:
        return NotImplemented
    # One flat product: on [n, 1, i] the native op would copy the bias n times.
    output = reshape(F.linear(input.reshape(-1, input.shape[-1]), weight, bias), (*input.shape[:-1], weight.shape[0]))
    return output, {
        "weight": lambda cotangent: Outer(positions(cotangent), positions(input)),
        "bias": sum_positions,
    }


@rule(torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, params=("other",))
def matmul(input: Tensor, other: Tensor) -> Any:
    """y = x W: ([n,*,i], [i,o]) -> [n,*,o], at least one position dimension."""
    if other.is_complex() or other.ndim != 2 or input.ndim < 2:
        return NotImplemented
    return input @ other, {"other": lambda cotangent: Outer(positions(input), positions(cotangent))}


@rule(torch.addmm, Tensor.addmm, params=("input", "mat2"))
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """y = beta b + alpha x W: ([o], [n,t,i], [i,o]) -> [n,t,o]."""
    if mat2.is_complex() or input.ndim != 1 or mat1.ndim != 3 or beta == 0:
        return NotImplemented
    output = reshape(torch.addmm(input, mat1.flatten(0, 1), mat2, beta=beta, alpha=alpha), (*mat1.shape[:2], mat2.shape[1]))
    return output, {
        "input": lambda cotangent: Dense(beta * cotangent.sum(1)),
        "mat2": lambda cotangent: Outer(alpha * mat1, cotangent),
    }
