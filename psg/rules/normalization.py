"""Normalisation layers: y = xhat w + b, with xhat normalised inside the sample.

With C the cotangent: grad w[n] = sum over positions of xhat C, grad b[n] = sum over positions of C. Both are small, so Dense. xhat is
computed again when the factor is built: one fused pass, and nothing more is held until then.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg.factors import Dense
from psg.rules._registry import reshape, rule


def _sum_leading(tensor: Tensor, dims: int) -> Dense:
    """[n, *positions, *shape] -> [n, *shape], for a shape of `dims` dimensions."""
    shape = tensor.shape[tensor.ndim - dims :]
    return Dense(tensor.reshape(tensor.shape[0], -1 if tensor.numel() else 0, *shape).sum(1))


def _sum_channels(tensor: Tensor) -> Dense:
    """[n, images, c, *spatial] -> [n, c]."""
    return Dense(tensor.reshape(*tensor.shape[:3], tensor.shape[3:].numel()).sum((1, 3)))


@rule(F.layer_norm)
def layer_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Any:
    """Over the last dimensions of each position: ([n,*,*shape], [*shape], [*shape]) -> [n,*,*shape]."""
    if _any_complex(input, weight, bias):
        return NotImplemented
    dims = len(normalized_shape)
    return F.layer_norm(input, normalized_shape, weight, bias, eps), {
        "weight": lambda cotangent: _sum_leading(F.layer_norm(input.to(cotangent.dtype), normalized_shape, eps=eps) * cotangent, dims),
        "bias": lambda cotangent: _sum_leading(cotangent, dims),
    }


@rule(F.rms_norm, params=("weight",))
def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """Like layer_norm without centring: ([n,*,*shape], [*shape]) -> [n,*,*shape]."""
    if _any_complex(input, weight):
        return NotImplemented
    dims = len(normalized_shape)
    return F.rms_norm(input, normalized_shape, weight, eps), {
        "weight": lambda cotangent: _sum_leading(F.rms_norm(input.to(cotangent.dtype), normalized_shape, None, eps) * cotangent, dims),
    }


@rule(F.group_norm)
def group_norm(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Any:
    """Over groups of channels of each image: ([n,images,c,*], [c], [c]) -> [n,images,c,*]."""
    if input.ndim < 3 or input.numel() == 0 or _any_complex(input, weight, bias):
        return NotImplemented
    if input[0].numel() == num_groups:
        return NotImplemented  # one value a group: torch refuses it
    images = input.flatten(0, 1).contiguous()
    output, mean, rstd = torch.native_group_norm(
        images, weight, bias, images.shape[0], images.shape[1], math.prod(images.shape[2:]), num_groups, eps
    )

    def weight_factor(cotangent: Tensor) -> Dense:
        # sum_s C (x - mean) rstd = rstd (sum_s C x - mean sum_s C): two reductions, xhat is never formed.
        n, b, c, *_ = input.shape
        size = input.shape[3:].numel()
        flat_c, flat_x = cotangent.reshape(n * b, c, size), input.reshape(n * b, c, size)
        per_channel = [moment.detach().repeat_interleave(c // num_groups, dim=1) for moment in (mean, rstd)]
        gradient = per_channel[1] * ((flat_c * flat_x).sum(2) - per_channel[0] * flat_c.sum(2))
        return Dense(gradient.reshape(n, b, c).sum(1))

    return reshape(output, input.shape), {"weight": weight_factor, "bias": _sum_channels}


@rule(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Over each channel of each image: ([n,images,c,*], [c], [c]) -> [n,images,c,*]. Without running statistics only."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        return NotImplemented
    if input.ndim < 4 or _any_complex(input, weight, bias):
        return NotImplemented

    def normalize(w: Tensor | None, b: Tensor | None) -> Tensor:
        return reshape(F.instance_norm(input.flatten(0, 1), weight=w, bias=b, eps=eps), input.shape)

    return normalize(weight, bias), {
        "weight": lambda cotangent: _sum_channels(normalize(None, None) * cotangent),
        "bias": _sum_channels,
    }


def _any_complex(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.is_complex() for tensor in tensors)
