"""Losses have no parameters; their rules fold the samples into the rows that the native kernels know.

Under vmap they are written out in a dozen small ops.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg.rules._registry import decomposition, rule


@rule(F.cross_entropy, params=())
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """-log softmax(x)[y], and its sum or mean over the positions of a sample: ([n,*rows,classes], [n,*rows]) -> [n,*rows] or [n].

    Takes class indices with classes last, as in [rows, classes]; weights, smoothing and other layouts take the lifted path.
    """
    if weight is not None or label_smoothing or size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if target.is_floating_point() or input.ndim not in (2, 3) or target.shape != input.shape[:-1] or input.numel() == 0:
        return NotImplemented
    losses = F.cross_entropy(input.reshape(-1, input.shape[-1]), target.reshape(-1), reduction="none", ignore_index=ignore_index)
    if reduction == "none":
        return losses.reshape(target.shape), {}
    counted = target.reshape(-1) != ignore_index
    if input.numel() == input.shape[0] * input.shape[-1]:  # one position a sample
        return losses if reduction == "sum" else torch.where(counted, losses, math.nan), {}
    losses = losses.reshape(input.shape[0], -1)
    if reduction == "sum":
        return losses.sum(1), {}
    # 0 / 0 where a sample ignores all its positions, as in torch.
    return losses.sum(1) / counted.reshape(losses.shape).sum(1, dtype=losses.dtype), {}


@decomposition(F.cross_entropy)
def smoothed_and_weighted(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """(1 - eps) loss + eps / classes * -sum_k w_k log softmax(x)_k, written out: torch selects by a mask here, which vmap cannot.

    A mean is one over the weights of the targets. Source: cross_entropy_loss_label_smoothing in aten/src/ATen/native/LossNLL.cpp.
    """
    legacy = size_average is not None or reduce is not None
    if weight is None or not label_smoothing or legacy or target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    plain = F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    dim = min(1, input.ndim - 1)
    shape = [1] * input.ndim
    shape[dim] = -1
    ignored = target == ignore_index
    smooth = -(F.log_softmax(input, dim) * weight.reshape(shape)).sum(dim).masked_fill(ignored, 0)
    if reduction != "none":
        smooth = smooth.sum()
    if reduction == "mean":
        smooth = smooth / weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0).sum()
    return (1 - label_smoothing) * plain + label_smoothing / input.shape[dim] * smooth
