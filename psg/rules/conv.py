"""Convolutions.

With C the cotangent: grad W[n,o,i,k] = sum_t C[n,o,t] x[n,i, stride t + dilation k - padding] and grad b[n,o] = sum_t C[n,o,t].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg.factors import Conv, Dense, Geometry
from psg.rules._registry import reshape, rule


def _each(option: Any, dims: int) -> tuple[int, ...]:
    """One entry a spatial dimension."""
    if isinstance(option, int):
        return (option,) * dims
    return tuple(option) * dims if len(option) == 1 else tuple(option)


def _same_padding(dilation: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[tuple[int, ...], list[int]]:
    """Padding on both sides, and what is left for the far side alone, in F.pad's order (last dimension first)."""
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    extra = [amount for t in reversed(total) for amount in (0, t % 2)]
    return tuple(t // 2 for t in total), extra


def _convolution(dims: int) -> Any:
    def convolution(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        if weight.is_complex() or input.ndim not in (dims + 2, dims + 3):
            return NotImplemented
        kernel, stride, dilation = tuple(weight.shape[2:]), _each(stride, dims), _each(dilation, dims)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            if any(step != 1 for step in stride):
                return NotImplemented  # torch refuses it
            padding, extra = _same_padding(dilation, kernel)
            input = F.pad(input, extra) if any(extra) else input
        padding = _each(padding, dims)

        single = input.ndim == dims + 2  # fn convolves one image without a batch dimension of its own
        images = input.unsqueeze(1) if single else input
        flat = images.flatten(0, 1)
        output = torch.convolution(flat, weight, bias, stride, padding, dilation, False, [0] * dims, groups)
        geometry = Geometry(kernel, stride, padding, dilation, groups)

        def by_image(cotangent: Tensor) -> Tensor:
            return cotangent.unsqueeze(1) if single else cotangent

        shape = output.shape if single else (*images.shape[:2], *output.shape[1:])
        return reshape(output, shape), {
            "weight": lambda cotangent: Conv(by_image(cotangent), images, geometry),
            "bias": lambda cotangent: Dense(by_image(cotangent).flatten(3).sum((1, 3))),
        }

    return convolution


for _dims, _op in enumerate((F.conv1d, F.conv2d, F.conv3d), start=1):
    rule(_op)(_convolution(_dims))
