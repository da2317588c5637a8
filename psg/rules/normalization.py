"""Normalisation layers: y = xhat w + b, with xhat normalised inside the sample, or by given statistics.

With C the cotangent: grad w[n] = sum over positions of xhat C, grad b[n] = sum over positions of C. Both are small, so Dense. xhat is
recomputed when the factor is built: that takes one fused pass, and no memory until then.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from psg._torch import _ambient
from psg.factors import Dense
from psg.factors._arithmetic import widen
from psg.rules._registry import DIFFERENTIATED, decomposition, has_history, reshape, rule
from psg.rules.linear import sum_images


def _sum_leading(tensor: Tensor, dims: int) -> Dense:
    """[n, *positions, *shape] -> [n, *shape], for a shape of `dims` dimensions."""
    shape = tensor.shape[tensor.ndim - dims :]
    return Dense(tensor.reshape(tensor.shape[0], -1 if tensor.numel() else 0, *shape).sum(1))


@rule(F.layer_norm, declines_few=True)
def layer_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Any:
    """Over the last dimensions of each position: ([n,*,*shape], [*shape], [*shape]) -> [n,*,*shape]."""
    dims = len(normalized_shape)
    if dims >= input.ndim or _any_complex(input, weight, bias):
        return NotImplemented  # of more dimensions than a sample has, torch refuses it
    input = input.contiguous()  # copy here once, or the kernel copies it in forward, in backward and for the factor
    return F.layer_norm(input, normalized_shape, weight, bias, eps), {
        "weight": lambda cotangent: _sum_leading(F.layer_norm(input.to(cotangent.dtype), normalized_shape, eps=eps).mul_(cotangent), dims),
        "bias": lambda cotangent: _sum_leading(cotangent, dims),
    }


@rule(F.rms_norm, params=("weight",), declines_few=True)
def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """Like layer_norm without centring: ([n,*,*shape], [*shape]) -> [n,*,*shape]."""
    if _any_complex(input, weight):
        return NotImplemented
    dims = len(normalized_shape)
    return F.rms_norm(input, normalized_shape, weight, eps), {
        "weight": lambda cotangent: _sum_leading(F.rms_norm(input.to(cotangent.dtype), normalized_shape, None, eps).mul_(cotangent), dims),
    }


@rule(F.group_norm)
def group_norm(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Any:
    """Over groups of channels of each image: ([n,images,c,*], [c], [c]) -> [n,images,c,*]."""
    if input.ndim < 3 or input.numel() == 0 or _any_complex(input, weight, bias):
        return NotImplemented
    if input[0].numel() == num_groups:
        return NotImplemented  # one value a group: torch refuses it
    # The native kernel assumes that input, weight and bias are contiguous, and does not check.
    weight, bias = [None if part is None else part.contiguous() for part in (weight, bias)]
    if not has_history(weight, bias) and not _ambient.is_autocast(input):
        norm = _Norm(weight, bias, num_groups, eps)
        output: Any = _GroupNorm.apply(input, norm) if input.requires_grad else norm.forward(input)
        return output, norm.factors()
    images = input.flatten(0, 1).contiguous()
    output = F.group_norm(images, num_groups, weight, bias, eps)

    def weight_factor(cotangent: Tensor) -> Dense:
        xhat = F.group_norm(widen(images.detach()), num_groups, eps=eps)
        return sum_images(widen(cotangent) * xhat.reshape(cotangent.shape))

    return reshape(output, input.shape), {"weight": weight_factor, "bias": sum_images}


class _Norm:
    """A group norm. One call of its backward kernel gives the cotangent of the data and the gradients of all samples.

    Args:
        weight: [c] or None.
        bias: [c] or None.
        groups: The number of groups.
        eps: As in `F.group_norm`.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> None:
        self.weight, self.bias, self.groups, self.eps = weight, bias, groups, eps
        self.solved_for: Tensor | None = None
        self.c_input: Tensor | None = None
        self.own: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        """[n,images,c,*] -> the same."""
        self.shape = input.shape
        # If the parameters are asked for first, also compute the data's cotangent, if the data has a history.
        self.input_has_history = input.grad_fn is not None
        self.images = input.detach().flatten(0, 1).contiguous()
        count, c, *positions = self.images.shape
        options = count, c, math.prod(positions), self.groups, self.eps
        output, *self.moments = torch.native_group_norm(self.images, self.weight, self.bias, *options)
        return reshape(output, self.shape)

    def backward(self, cotangent: Tensor) -> Tensor:
        """The cotangent of the input. It is not stored any longer."""
        served = self.solved_for is cotangent
        if not served or self.c_input is None:
            self._solve(cotangent, True)
        found, self.c_input = self.c_input, None
        if served:
            self.solved_for = None  # the parameters' gradients are known: free the cotangent's memory
        assert found is not None
        return found.reshape(self.shape)

    def factors(self) -> dict[str, Callable[[Tensor], Dense]]:
        """The functions that build the factors of the parameters, [n,c], from the cotangent."""

        def own(cotangent: Tensor, k: int) -> Dense:
            if self.solved_for is not cotangent:
                self._solve(cotangent, self.input_has_history)
            return Dense(self.own[k])

        return {"weight": lambda cotangent: own(cotangent, 0), "bias": lambda cotangent: own(cotangent, 1)}

    def _solve(self, cotangent: Tensor, data: bool) -> None:
        n, b, c, *_ = self.shape
        size = self.shape[3:].numel()
        # On one image with n b c channels the native kernel keeps samples and images apart. It assumes contiguous memory, the weight's
        # too: `repeat` copies, where `expand` would leave a view of a single channel's weight.
        rows = (tensor.reshape(1, n * b * c, size).contiguous() for tensor in (cotangent, self.images))
        one = *rows, *(moment.reshape(1, -1) for moment in self.moments)
        weight = (cotangent.new_ones(c) if self.weight is None else self.weight).repeat(n * b)
        options = 1, n * b * c, size, n * b * self.groups, [data, True, True]
        found, *own = torch.ops.aten.native_group_norm_backward(*one, weight, *options)
        self.solved_for, self.c_input = cotangent, found if data else None
        self.own = [gradient.reshape(n, b, c).sum(1) for gradient in own]


class _GroupNorm(torch.autograd.Function):
    """The autograd node of a `_Norm`, which returns the cotangent of the data."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, norm: _Norm) -> Tensor:
        ctx.norm = norm
        return norm.forward(input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.norm.backward(cotangent), None


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
    """Over each channel of each image, or by running statistics: ([n,images,c,*], [c], [c]) -> [n,images,c,*]."""
    if not use_input_stats:
        return _by_statistics(input, running_mean, running_var, weight, bias, eps)
    if running_mean is not None or running_var is not None or input.ndim < 4 or input.shape[3:].numel() == 1:
        return NotImplemented  # of one value a channel, torch refuses it
    # Each channel is a group. The native instance norm is wrong on a CPU for one image with a channels-last cotangent.
    found: Any = group_norm(input, input.shape[2], weight, bias, eps)
    if found is NotImplemented:
        return NotImplemented
    output, factors = found
    if output.dtype == input.dtype:
        return found
    # CUDA's autocast computes group norm in float32, and returns instance norm in the input's dtype.
    return output.to(input.dtype), {name: lambda cotangent, of=of: of(cotangent.to(output.dtype)) for name, of in factors.items()}


@rule(F.batch_norm)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """In evaluation mode, by running statistics: ([n,images,c,*], [n,c], [n,c], [c], [c]) -> [n,images,c,*]."""
    if training:
        return NotImplemented
    return _by_statistics(input, running_mean, running_var, weight, bias, eps)


def _by_statistics(input: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """xhat = (x - mean) / sqrt(var + eps) and y = x scale + shift, for statistics [n, c]."""
    # Written out: one multiply-add in any memory layout, and the statistics may differ between samples.
    if mean is None or var is None or input.ndim < 3 or _any_complex(input, weight, bias):
        return NotImplemented
    if any(part.shape[-1:] != input.shape[2:3] for part in (mean, var, weight, bias) if part is not None):
        return NotImplemented  # torch raises its own error
    if mean.requires_grad or var.requires_grad:
        return NotImplemented  # torch refuses to differentiate for them
    # Expanded statistics (stride 0) are the same for all samples: compute with one row.
    mean, var = (widen(tensor[:1] if tensor.stride(0) == 0 else tensor) for tensor in (mean, var))
    rstd = (var + eps).rsqrt()
    scale = rstd if weight is None else rstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale

    def by_channel(tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.shape[0], 1, tensor.shape[1], *(1,) * (input.ndim - 3))

    output = torch.addcmul(by_channel(shift), input, by_channel(scale)).to(input.dtype)
    return output, {
        "weight": lambda cotangent: Dense(sum_images((input - by_channel(mean)) * cotangent).values * rstd),
        "bias": sum_images,
    }


def _any_complex(*tensors: Tensor | None) -> bool:
    return any([tensor is not None and tensor.is_complex() for tensor in tensors])


# The functions that those of torch.nn.functional call in the end, with the same result.

decomposition(torch.rms_norm)(F.rms_norm)


def _without_cudnn(op: Any, function: Any, misderived: bool = False) -> None:
    @decomposition(op, misderived=misderived)
    def plain(*args: Any, cudnn_enable: bool = True, cudnn_enabled: bool = True, **options: Any) -> Any:
        return function(*args[:5], **options)  # without the last argument, whether cuDNN may be used


_without_cudnn(torch.layer_norm, F.layer_norm, misderived=True)
_without_cudnn(torch.group_norm, F.group_norm)


def _statistics_last(op: Any, function: Any) -> None:
    @decomposition(op, misderived=True)
    def reordered(
        input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, *options: Any, cudnn_enabled: bool = True, **others: Any
    ) -> Any:
        return function(input, running_mean, running_var, weight, bias, *options[:3], **others)  # without cudnn_enabled


_statistics_last(torch.instance_norm, F.instance_norm)
_statistics_last(torch.batch_norm, F.batch_norm)


# Written out, for passes whose gradients are differentiated again: vmap's rules for the backward of these ops treat the moments as
# constants, and in plain autograd torch's third derivatives are wrong (2.13).


@decomposition(F.layer_norm, need=DIFFERENTIATED, misderived=True)
def written_out_layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    """Over the last dimensions."""
    shape = tuple(normalized_shape)
    if input.shape[input.ndim - len(shape) :] != shape:
        return NotImplemented  # torch raises its own error
    return _written_out(input, range(-len(shape), 0), weight, bias, shape, eps)


@decomposition(F.instance_norm, need=DIFFERENTIATED, misderived=True)
def written_out_instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Over each channel of each image."""
    if not use_input_stats or running_mean is not None or running_var is not None or input.ndim < 3 or input.shape[2:].numel() < 2:
        return NotImplemented
    return _written_out(input, range(2, input.ndim), weight, bias, (-1, *(1,) * (input.ndim - 2)), eps)


@decomposition(F.batch_norm, need=DIFFERENTIATED, misderived=True)
def written_out_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Over each channel of the images of one sample."""
    if not training or running_mean is not None or running_var is not None or input.ndim < 2 or input[:, 0].numel() < 2:
        return NotImplemented
    dims = [dim for dim in range(input.ndim) if dim != 1]
    return _written_out(input, dims, weight, bias, (-1, *(1,) * (input.ndim - 2)), eps)


@decomposition(torch.native_layer_norm, need=DIFFERENTIATED, misderived=True)
def written_out_native_layer_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """With the moments, which torch does not differentiate."""
    output = written_out_layer_norm(input, normalized_shape, weight, bias, eps)
    return NotImplemented if output is NotImplemented else (output, *_moments(input, range(-len(normalized_shape), 0), True, eps))


@decomposition(torch.native_batch_norm, need=DIFFERENTIATED, misderived=True)
def written_out_native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """With the moments."""
    output = written_out_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    dims = [dim for dim in range(input.ndim) if dim != 1]
    return NotImplemented if output is NotImplemented else (output, *_moments(input, dims, False, eps))


@decomposition(torch.ops.aten._native_batch_norm_legit.no_stats, need=DIFFERENTIATED, misderived=True)
def _without_statistics(input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float) -> Any:
    return written_out_native_batch_norm(input, weight, bias, None, None, training, momentum, eps)


def _moments(input: Tensor, dims: Iterable[int], keepdim: bool, eps: float) -> tuple[Tensor, Tensor]:
    """The mean, and one over the standard deviation."""
    variance, mean = torch.var_mean(input.detach(), tuple(dims), correction=0, keepdim=keepdim)
    return mean, (variance + eps).rsqrt()


def _written_out(input: Tensor, dims: Iterable[int], weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float) -> Any:
    """Normalise over `dims`; `shape` is that of weight and bias to broadcast against the input."""
    if input.numel() == 0 or _any_complex(input, weight, bias):
        return NotImplemented
    with torch._C._DisableAutocast():  # which leaves these ops as they are, and would cast their parts
        wide_input, dims = widen(input), tuple(dims)
        centred = wide_input - wide_input.mean(dims, keepdim=True)
        output = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
        if weight is not None:
            output = output * weight.reshape(shape)
        if bias is not None:
            output = output + bias.reshape(shape)
        return output.to(input.dtype)
