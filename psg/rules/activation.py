"""PReLU: y = x where x > 0, else w x, with one w for each channel or one for all.

With C the cotangent, grad w[n] is the sum of min(x, 0) C over the entries that share w.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._torch import _functorch
from psg.factors import Dense
from psg.rules._registry import DIFFERENTIATED, decomposition, reshape, rule
from psg.rules.linear import sum_images


@rule(F.prelu, Tensor.prelu, params=("weight",), frozen=True)
def prelu(input: Tensor, weight: Tensor) -> Any:
    """([n,b,c,*] or, for one weight, [n,*], [c] or [1]) -> the shape of the input."""
    if weight.ndim > 1 or weight.numel() != 1 and (input.ndim < 3 or weight.numel() != input.shape[2]):
        return NotImplemented
    flat = input.flatten(0, 1) if weight.numel() != 1 else input

    def factor(cotangent: Tensor) -> Dense:
        slopes = torch.where(input > 0, 0, input * cotangent)  # there an infinite cotangent must not meet a zero
        if weight.numel() != 1:
            return sum_images(slopes)
        return Dense(slopes.reshape(len(slopes), slopes.shape[1:].numel()).sum(1).reshape(-1, *weight.shape))

    return reshape(F.prelu(flat, weight), input.shape), {"weight": factor}


@decomposition(F.prelu, Tensor.prelu, need=DIFFERENTIATED, misderived=True)
def prelu_written_out(input: Tensor, weight: Tensor) -> Any:
    """Inside transforms: vmap's backward is wrong where another vmap has batched the cotangent than input or weight."""
    fits = weight.ndim < 2 and (weight.numel() == 1 or input.ndim > 1 and weight.numel() == input.shape[1])
    if not fits or not (_functorch.is_vmapped(input) or _functorch.is_vmapped(weight)):
        return NotImplemented
    return written_out(input, weight)


def written_out(input: Tensor, weight: Tensor) -> Tensor:
    """([b,c,*] or, for one weight, [*], [c] or [1]) -> the shape of the input."""
    weight = weight.reshape(()) if weight.numel() == 1 else weight.reshape(-1, *(1,) * (input.ndim - 2))
    positive = input > 0
    # Where the input is positive, neither it nor its cotangent may meet the zero of the other, since they may be infinite.
    return torch.where(positive, input, weight * torch.where(positive, 0, input))


@decomposition(F.prelu, Tensor.prelu)
def prelu_under_vmaps(input: Tensor, weight: Tensor) -> Any:
    """The same where psg itself runs under a vmap."""
    return prelu_written_out(input, weight) if _functorch.vmap_depth() > 1 else NotImplemented
