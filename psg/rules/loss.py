"""Losses have no parameters; their rules fold the samples into the rows of one call of the native kernel.

vmap would write them out in a dozen small ops, or run them sample by sample.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from psg._torch import _functorch
from psg._torch._higher_order import triplet_loss
from psg.rules._registry import decomposition, rule


def _is_plain(size_average: bool | None, reduce: bool | None, reduction: str) -> bool:
    return size_average is None and reduce is None and reduction in ("mean", "sum", "none")


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
    if weight is not None or label_smoothing or not _is_plain(size_average, reduce, reduction):
        return NotImplemented
    if target.is_floating_point() or input.ndim not in (2, 3) or target.shape != input.shape[:-1] or input.numel() == 0:
        return NotImplemented
    labels = target.flatten()
    losses = _losses_of_rows(input.flatten(0, -2), labels, ignore_index)
    if reduction != "mean":
        return _by_sample(losses, target.shape, reduction), {}
    counted = labels != ignore_index
    # 0 / 0 where a sample ignores all its positions, as in torch.
    if input.numel() == input.shape[0] * input.shape[-1]:  # one position a sample
        return losses / counted, {}
    shape = input.shape[0], -1
    return losses.reshape(shape).sum(1) / counted.reshape(shape).sum(1, dtype=losses.dtype), {}


_MANY_LOGITS = 1 << 18  # for fewer, Python in the backward pass takes longer than the op that it spares


def _losses_of_rows(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """-log softmax(x)[y] of each row: [rows,classes], [rows] -> [rows]."""
    wide = logits.dtype in (torch.float32, torch.float64)  # one of 16 bits would round p before 1 is subtracted
    if wide and logits.numel() >= _MANY_LOGITS and logits.requires_grad and torch.is_grad_enabled() and not _functorch.is_watched():
        losses: Any = _RowLosses.apply(logits, labels, ignore_index)
        return losses
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=ignore_index)


class _RowLosses(torch.autograd.Function):
    """The losses of rows, with a gradient c (p - e_y) written once: torch's fills a tensor of zeros, and reads it with log p."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        logs = logits.log_softmax(1)
        losses = F.nll_loss(logs, labels, reduction="none", ignore_index=ignore_index)
        ctx.save_for_backward(logs, labels)
        ctx.ignore_index = ignore_index
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logs, labels = ctx.saved_tensors
        ignored = labels == ctx.ignore_index
        scale, index = cotangent.masked_fill(ignored, 0).unsqueeze(1), labels.masked_fill(ignored, 0).long().unsqueeze(1)
        at_label = logs.gather(1, index).expm1_().mul_(scale)
        return logs.exp().mul_(scale).scatter_(1, index, at_label), None, None


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
    """(1 - eps) loss + eps / classes * -sum_k w_k log softmax(x)_k, written out: torch selects by a mask here, which vmap cannot do.

    A mean divides by the summed weights of the targets. Source: cross_entropy_loss_label_smoothing in aten/src/ATen/native/LossNLL.cpp.
    And for bytes see `labels_in_bytes`.
    """
    if target.dtype == torch.uint8:
        return F.cross_entropy(input, target.long(), weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if weight is None or not label_smoothing or target.is_floating_point() or not _is_plain(size_average, reduce, reduction):
        return NotImplemented
    if label_smoothing > 1:
        return NotImplemented  # torch raises its own error
    plain = F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    dim = min(1, input.ndim - 1)
    shape = [1] * input.ndim
    shape[dim] = -1
    ignored = target == ignore_index
    smooth = -(F.log_softmax(input, dim) * weight.reshape(shape)).sum(dim).masked_fill(ignored, 0)
    if reduction != "none":
        smooth = smooth.sum()
    if reduction == "mean":
        weights = weight.index_select(0, target.masked_fill(ignored, 0).flatten())  # vmap cannot index by a tensor []
        smooth = smooth / weights.masked_fill(ignored.flatten(), 0).sum()
    return (1 - label_smoothing) * plain + label_smoothing / input.shape[dim] * smooth


@decomposition(F.nll_loss)
def labels_in_bytes(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Class indices of 8 bits, as image data sets store them, which vmap does not take."""
    return F.nll_loss(input, target.long(), *args, **kwargs) if target.dtype == torch.uint8 else NotImplemented


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


# Losses of rows, whose native kernels vmap runs sample by sample


def _by_sample(losses: Tensor, rows: torch.Size, reduction: str) -> Tensor:
    """[n * rows] -> [n, *rows] or [n]."""
    losses = losses.reshape(rows)
    if reduction == "none" or losses.ndim == 1:
        return losses
    return losses.sum(1) if reduction == "sum" else losses.mean(1)


@rule(F.ctc_loss, params=())
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """All sequences of all samples in one call: ([n,t,b,classes], [n,b,s], [n,b], [n,b]) -> [n,b] or [n]; or all without b."""
    single = log_probs.ndim == 3
    if single:
        log_probs, targets = log_probs.unsqueeze(2), targets.unsqueeze(1)
    if log_probs.ndim != 4 or targets.ndim != 3 or targets.shape[1] != log_probs.shape[2] or reduction not in ("none", "sum", "mean"):
        return NotImplemented
    n, t, b, classes = log_probs.shape
    if isinstance(input_lengths, Tensor) != isinstance(target_lengths, Tensor):
        return NotImplemented  # torch raises its own error
    inputs, goals = _lengths(input_lengths, n, b, single), _lengths(target_lengths, n, b, single)
    if inputs is None or goals is None or log_probs.numel() == 0 or targets.numel() == 0:
        return NotImplemented
    if single and _functorch.can_read_now(goals) and (goals != targets.shape[2]).any():
        return NotImplemented  # without b, target_lengths has to be the length of targets: torch raises its own error
    flat = log_probs.movedim(1, 0).reshape(t, n * b, classes)
    losses = F.ctc_loss(flat, targets.flatten(0, 1), inputs.flatten(), goals.flatten(), blank, "none", zero_infinity).reshape(n, b)
    if reduction == "mean":
        losses = (losses / goals.to(losses.device).clamp(min=1)).mean(1)  # lengths may be on the CPU
    elif reduction == "sum":
        losses = losses.sum(1)
    elif single:
        losses = losses[:, 0]
    return losses, {}


def _lengths(given: Any, n: int, b: int, single: bool) -> Tensor | None:
    """The lengths of the sequences as [n,b]; None if they do not fit."""
    if isinstance(given, Tensor):
        return given.reshape(n, b) if given.shape == (n, b) or single and given.shape == (n,) else None
    if not isinstance(given, (list, tuple)) or len(given) != b:
        return None
    return torch.tensor(given, device="cpu").expand(n, b)  # the same for all samples


@rule(F.multi_margin_loss, params=())
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """w_y / classes * sum_{k != y} max(0, margin - x_y + x_k)^p: ([n,*rows,classes], [n,*rows]) -> [n,*rows] or [n]."""
    if not _is_plain(size_average, reduce, reduction) or input.ndim not in (2, 3) or target.shape != input.shape[:-1] or input.numel() == 0:
        return NotImplemented
    if weight is not None and (weight.shape != (len(input), input.shape[-1]) or weight.requires_grad):
        return NotImplemented  # torch raises its own error
    losses = F.multi_margin_loss(input.flatten(0, -2), target.flatten(), p, margin, reduction="none")
    if weight is not None:
        losses = losses * weight.gather(1, target.reshape(len(target), -1)).flatten()
    return _by_sample(losses, target.shape, reduction), {}


@rule(F.multilabel_margin_loss, params=())
def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Any:
    """1 / classes * sum_{y in target} sum_{k not in target} max(0, 1 - x_y + x_k): twice [n,*rows,classes] -> [n,*rows] or [n]."""
    if not _is_plain(size_average, reduce, reduction) or input.ndim not in (2, 3) or target.shape != input.shape or input.numel() == 0:
        return NotImplemented
    losses = F.multilabel_margin_loss(input.flatten(0, -2), target.flatten(0, -2), reduction="none")
    return _by_sample(losses, input.shape[:-1], reduction), {}


# Losses for which vmap has no batching rule, written out as in aten/src/ATen/native/Loss.cpp


@decomposition(F.soft_margin_loss)
def soft_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Any:
    """log(1 + exp(-y x))."""
    if not _is_plain(size_average, reduce, reduction) or target.shape != input.shape or target.requires_grad:
        return NotImplemented
    if not input.is_floating_point() or target.dtype != input.dtype:
        return NotImplemented
    exponent = -input * target
    # Its second derivative: that of log1p(exp(exponent)) is a difference of terms near one, of which float32 leaves no digits.
    positive = exponent > 0
    losses = torch.where(positive, exponent, 0) + torch.where(positive, -exponent, exponent).exp().log1p()
    power = exponent.exp()
    return _reduced(torch.where(power.isinf(), power.log1p(), losses), reduction)  # there torch's loss is infinite, and its gradient NaN


@decomposition(F.kl_div)
def kl_div(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean", log_target: bool = False
) -> Any:
    """y (log y - x); with `log_target`, exp(y) (y - x)."""
    if size_average is not None or reduce is not None or reduction not in ("none", "sum", "mean", "batchmean"):
        return NotImplemented
    terms = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    if reduction == "batchmean":
        return terms.sum() / input.shape[0] if input.ndim else terms.sum()
    return _reduced(terms, reduction)


@decomposition(F.margin_ranking_loss)
def margin_ranking_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """max(0, -y (x_1 - x_2) + margin)."""
    if not _is_plain(size_average, reduce, reduction) or not input1.ndim == input2.ndim == target.ndim:
        return NotImplemented
    return _reduced((-target * (input1 - input2) + margin).clamp_min(0), reduction)


@decomposition(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """max(0, |a - b + eps|_p - |a - c + eps|_p + margin); with `swap` the lesser of |a - c + eps|_p and |b - c + eps|_p."""
    if not _is_plain(size_average, reduce, reduction) or not anchor.ndim == positive.ndim == negative.ndim or margin <= 0:
        return NotImplemented
    distance = partial(F.pairwise_distance, p=p, eps=eps)
    return triplet_loss(anchor, positive, negative, distance_function=distance, margin=margin, swap=swap, reduction=reduction)


@decomposition(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """(log v + (x - y)^2 / v) / 2 for v = max(var, eps); var gets v's whole cotangent. As in torch, but the pass sees the check of var."""
    if reduction not in ("mean", "sum", "none") or not isinstance(var, float) and not (isinstance(var, Tensor) and var.is_floating_point()):
        return NotImplemented
    # Where this is traced, arguments are taken for valid if they are checked as those of torch.distributions are.
    if var < 0 if isinstance(var, float) else not torch._is_all_true((var < 0).logical_not()):  # pyright: ignore[reportPrivateImportUsage]
        raise ValueError("var has negative entry/entries")
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.ndim != var.ndim or sum(own for given, own in zip(input.shape, var.shape, strict=True) if given != own) != 1:
            raise ValueError("var is of incorrect size")
    var = torch.where(var < eps, eps + (var - var.detach()), var)
    losses = 0.5 * (var.log() + (input - target) ** 2 / var)
    return _reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)
