"""The linear layer: y = x W^T + b.

With C the cotangent of y, sample n at positions t: grad W = sum_t C[n,t,:] x[n,t,:]^T and grad b = sum_t C[n,t,:].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg import _functorch, plans
from psg.factors import Dense, Outer
from psg.rules._registry import reshape, rule, transpose


def positions(tensor: Tensor) -> Tensor:
    """[n, *positions, d] -> [n, t, d]."""
    return tensor if tensor.ndim == 3 else tensor.reshape(tensor.shape[0], tensor.shape[1:-1].numel(), tensor.shape[-1])


def sum_positions(cotangent: Tensor) -> Dense:
    """[n, *positions, d] -> the Dense gradient [n, d] of something added at every position."""
    flat = positions(cotangent)
    return Dense(flat[:, 0] if flat.shape[1] == 1 else flat.sum(1))


@rule(F.linear, frozen=True)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """y = x W^T + b: ([n,*,i], [o,i], [o]) -> [n,*,o]."""
    if weight.is_complex() or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    # One flat product: on [n, 1, i] the native op would copy the bias n times, and vmap would add it in a pass of its own, which is why
    # frozen layers run here too.
    output = reshape(_flat(input.flatten(0, -2), weight, bias), (*input.shape[:-1], weight.shape[0]))
    return output, {
        "weight": lambda cotangent: Outer(positions(cotangent), positions(input)),
        "bias": sum_positions,
    }


def _flat(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[t, i] -> [t, o], or with the rows in blocks [k, t / k, o]."""
    blocks = plans.row_blocks(rows, weight.T)
    converted = _functorch.autocast_dtype(rows) is not None or bias is not None and bias.dtype != rows.dtype
    if blocks == 1 or converted:
        return F.linear(rows, weight, bias)
    output = torch.bmm(rows.unflatten(0, (blocks, -1)), weight.T.expand(blocks, *weight.T.shape))
    return output if bias is None else output.add_(bias)


@transpose(F.linear, data="input", constants=("bias",))
def linear_transpose(shape: torch.Size, weight: Tensor, bias: Tensor | None = None) -> Any:
    """C -> C W."""
    if weight.ndim != 2 or weight.is_complex() or len(shape) == 0 or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    return torch.matmul, {"other": weight}
