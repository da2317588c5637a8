"""Convolutions, plain and transposed.

With C the cotangent: grad W[n,o,i,k] = sum_t C[n,o,t] x[n,i, stride t + dilation k - padding] and grad b[n,o] = sum_t C[n,o,t].
A transposed convolution adds x[n,i,t] W[i,o,k] to y[n,o, stride t + dilation k - padding]. So input and cotangent swap roles:
grad W[n,i,o,k] = sum_t x[n,i,t] C[n,o, stride t + dilation k - padding], within each group as before.
"""

from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._torch import _ambient, _functorch
from psg.factors import Conv, Geometry
from psg.rules._registry import decomposition, reshape, rule, transpose
from psg.rules.linear import sum_images


def _each(option: Any, dims: int) -> tuple[int, ...]:
    """The option with one entry for each spatial dimension, of an integer (NumPy's, too) or several."""
    entries = tuple(map(index, (option,) if hasattr(option, "__index__") else option))
    return entries * dims if len(entries) == 1 else entries


def _same_padding(dilation: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[tuple[int, ...], list[int]]:
    """The padding on both sides, and further padding on the far side alone, in F.pad's order (last dimension first)."""
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    extra = [amount for t in reversed(total) for amount in (0, t % 2)]
    return tuple(t // 2 for t in total), extra


def _convolution(dims: int) -> Any:
    def convolution(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        if weight.is_complex() or weight.numel() == 0 or input.ndim not in (dims + 2, dims + 3):
            return NotImplemented  # without entries, torch raises its own error, or leaves out the output channels
        kernel, stride, dilation = tuple(weight.shape[2:]), _each(stride, dims), _each(dilation, dims)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            if any(step != 1 for step in stride):
                return NotImplemented  # torch refuses it
            padding, extra = _same_padding(dilation, kernel)
            input = F.pad(input, extra) if any(extra) else input
        padding = _each(padding, dims)

        images, weight, bias = _ambient.narrowed(_images(input, dims), _ordered(weight, groups), bias)
        output = torch.convolution(images.flatten(0, 1), weight, bias, stride, padding, dilation, False, [0] * dims, groups)
        geometry = Geometry(kernel, stride, padding, dilation, groups)
        return reshape(output, (*input.shape[: input.ndim - dims - 1], *output.shape[1:])), {
            "weight": lambda cotangent: _conv(_images(cotangent, dims), images, geometry),
            "bias": lambda cotangent: sum_images(_images(cotangent, dims)),
        }

    return convolution


def _transposed(dims: int) -> Any:
    def transposed(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if weight.is_complex() or input.ndim not in (dims + 2, dims + 3):
            return NotImplemented
        stride, padding, dilation, output_padding = (_each(option, dims) for option in (stride, padding, dilation, output_padding))
        images, weight, bias = _ambient.narrowed(_images(input, dims), _ordered(weight, groups), bias)
        output = torch.convolution(images.flatten(0, 1), weight, bias, stride, padding, dilation, True, output_padding, groups)
        geometry = Geometry(tuple(weight.shape[2:]), stride, padding, dilation, groups)
        # An output padding of a stride or more leaves room for windows that no input position has: pad the input with zeros.
        beyond = [amount for extra, pace in zip(reversed(output_padding), reversed(stride), strict=True) for amount in (0, extra // pace)]

        def weight_factor(cotangent: Tensor) -> Conv:
            return _conv(F.pad(images, beyond) if any(beyond) else images, _images(cotangent, dims), geometry)

        return reshape(output, (*input.shape[: input.ndim - dims - 1], *output.shape[1:])), {
            "weight": weight_factor,
            "bias": lambda cotangent: sum_images(_images(cotangent, dims)),
        }

    return transposed


def _images(tensor: Tensor, dims: int) -> Tensor:
    """The tensor as [n, images, c, *spatial], also where fn convolves one image without a batch dimension."""
    return tensor.unsqueeze(1) if tensor.ndim == dims + 2 else tensor


def _ordered(weight: Tensor, groups: int) -> Tensor:
    """A weight whose gradient torch gets right (2.13), if it is asked for it: not where weight and one image are channels last, in groups.

    That is so where another kernel than oneDNN's runs.
    """
    return weight.contiguous() if groups > 1 and weight.requires_grad else weight


def _conv(cotangent: Tensor, input: Tensor, geometry: Geometry) -> Conv:
    """The factor; a sample with an entry of the cotangent that is not finite and meets padding alone is all NaN, as zero times it is."""
    if geometry.may_read_padding_alone(input.shape[3:]):  # else such an entry meets an entry of the input: no algorithm can omit it
        cotangent = cotangent + (cotangent * 0).sum(tuple(range(1, cotangent.ndim)), keepdim=True)
    return Conv(cotangent, input, geometry)


def _repaired(op: Any, dims: int) -> None:
    def each(option: Any) -> Any:
        return _each(option, dims) if isinstance(option, (list, tuple)) and len(option) == 1 < dims else option

    @decomposition(op)
    def repaired(input: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **named: Any) -> Any:
        """What vmap gets wrong (2.13): options, and weights of each sample's own.

        It takes the length of `stride` for the number of spatial dimensions, and misplaces the bias. And see `_ordered`.
        """
        groups = named.get("groups", options[3] if len(options) > 3 else 1)
        copied = groups > 1 and not weight.is_contiguous() and _functorch.is_vmapped(weight)
        if not copied and all(each(option) is option for option in (*options, *named.values())):
            return NotImplemented
        own = weight.contiguous() if copied else weight
        return op(input, own, bias, *map(each, options), **{name: each(option) for name, option in named.items()})


@decomposition(torch.convolution)
def _any_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """All convolutions as one op, as graphs of ATen's ops have them."""
    dims = weight.ndim - 2
    if dims not in (1, 2, 3):
        return NotImplemented  # torch raises its own error
    if transposed:
        return _TRANSPOSED[dims - 1](input, weight, bias, stride, padding, output_padding, groups, dilation)
    return _PLAIN[dims - 1](input, weight, bias, stride, padding, dilation, groups)


def _transpose_each_other(plain: Any, transposed: Any, dims: int) -> None:
    def fits(shape: torch.Size, weight: Tensor) -> bool:
        return not weight.is_complex() and weight.ndim == dims + 2 and len(shape) in (dims + 1, dims + 2)

    @transpose(plain, data="input", item=dims + 1, constants=("bias",))
    def of_plain(
        shape: torch.Size,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if not fits(shape, weight):
            return NotImplemented
        stride, dilation, kernel = _each(stride, dims), _each(dilation, dims), tuple(weight.shape[2:])
        if isinstance(padding, str):
            padding, extra = ((0,) * dims, []) if padding == "valid" else _same_padding(dilation, kernel)
            if any(extra):
                return NotImplemented
        padding = _each(padding, dims)
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        # The number of entries at the far end of the input that no window reaches.
        rest = tuple((size + 2 * p - span) % step for size, p, span, step in zip(shape[-dims:], padding, spans, stride, strict=True))
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return transposed, {"weight": weight, "output_padding": rest, **options}

    @transpose(transposed, data="input", item=dims + 1, constants=("bias",))
    def of_transposed(
        shape: torch.Size,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if not fits(shape, weight):
            return NotImplemented
        stride, padding, dilation, output_padding = (_each(option, dims) for option in (stride, padding, dilation, output_padding))
        if any(extra >= step for extra, step in zip(output_padding, stride, strict=True)):
            return NotImplemented  # room for windows that no input position has
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return plain, {"weight": weight, **options}


_PLAIN = F.conv1d, F.conv2d, F.conv3d
_TRANSPOSED = F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d
for _dims, (_plain, _other) in enumerate(zip(_PLAIN, _TRANSPOSED, strict=True), start=1):
    rule(_plain, differentiable=True)(_convolution(_dims))
    rule(_other, differentiable=True)(_transposed(_dims))
    _repaired(_plain, _dims)
    _repaired(_other, _dims)
    _transpose_each_other(_plain, _other, _dims)
