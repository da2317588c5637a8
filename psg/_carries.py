"""Values computed from parameters: how a factor of their gradient becomes factors of their parameters' gradients.

A merged low-rank update W + s B A, weights times a scale, a spectral norm: an op on parameters has a derivative that is linear, and the
transpose of many such maps takes a factor of few terms to others. With G = sum_t l_t r_t^T the gradient of B A, that of B is
sum_t l_t (A r_t)^T and that of A is sum_t (B^T l_t) r_t^T. So G is never formed.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from psg import _functorch
from psg.factors import Dense, Factor, Outer, Place, Views
from psg.factors._maps import Scale, contracted, premultiplied, scaled, transposed

Carry = Callable[[Factor], Factor | None]
"""From a factor of the result's gradient to one of an argument's; None where it would have to be formed."""

_Carried = list[tuple[Any, Carry]]


def carries_of(op: str, output: Any, args: Any, kwargs: Any) -> _Carried:
    """For each tensor that an op on parameters was given, how factors are carried over to it; [] for an op that has none."""
    find = _CARRIES.get(op)
    if find is None or not isinstance(output, Tensor) or not output.is_floating_point():
        return []
    try:
        found = find(output.detach(), *args, **kwargs)
    except TypeError:
        return []  # called in a form that is not known here
    read = [(tensor, tensor._version) for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor)]

    def carried(side: Tensor, carry: Carry, factor: Factor) -> Factor | None:
        if any(tensor._version != version for tensor, version in read):
            return None  # written into since: autograd, which has to form the gradient, says so
        found = carry(factor)
        return found if found is None or found.dtype == side.dtype else found.to(side.dtype)

    sides = [(side, carry) for side, carry in found if isinstance(side, Tensor) and side.is_floating_point()]
    return [(side, partial(carried, side, carry)) for side, carry in sides]


# Entry by entry: what each argument, broadcast, is multiplied by


def _entrywise(output: Tensor, sides: Iterable[tuple[Any, Scale]]) -> _Carried:
    return [(side, _entry(output, side.shape, scale)) for side, scale in sides if isinstance(side, Tensor)]


def _entry(output: Tensor, shape: torch.Size, scale: Scale) -> Carry:
    if shape == output.shape:
        return (lambda factor: factor) if isinstance(scale, (int, float)) and scale == 1 else lambda factor: scaled(factor, scale)
    weights = scale if isinstance(scale, Tensor) else output.new_full((), scale)
    return lambda factor: contracted(factor, weights.expand(output.shape), shape)


def _value(argument: Any) -> Scale:
    return argument.detach() if isinstance(argument, Tensor) else argument


def _add(output: Tensor, input: Any, other: Any, *, alpha: float = 1) -> _Carried:
    return _entrywise(output, [(input, 1), (other, alpha)])


def _sub(output: Tensor, input: Any, other: Any, *, alpha: float = 1) -> _Carried:
    return _entrywise(output, [(input, 1), (other, -alpha)])


def _rsub(output: Tensor, input: Any, other: Any) -> _Carried:
    return _sub(output, other, input)


def _neg(output: Tensor, input: Any) -> _Carried:
    return _entrywise(output, [(input, -1)])


def _mul(output: Tensor, input: Any, other: Any) -> _Carried:
    return _entrywise(output, [(input, _value(other)), (other, _value(input))])


def _div(output: Tensor, input: Any, other: Any) -> _Carried:
    divisor = _value(other)
    return _entrywise(output, [(input, output.new_ones(()) / divisor), (other, -output / divisor)])


def _rdiv(output: Tensor, input: Any, other: Any) -> _Carried:
    return _div(output, other, input)


def _expand(output: Tensor, input: Any, *_: Any) -> _Carried:
    return _entrywise(output, [(input, 1)])


# Products


def _matmul(output: Tensor, input: Any, other: Any) -> _Carried:
    x, y = input.detach(), other.detach()
    if (x.ndim, y.ndim) == (2, 2):
        return [(input, lambda factor: _postmultiplied(factor, y.T)), (other, lambda factor: premultiplied(factor, x.T))]
    if (x.ndim, y.ndim) == (2, 1):
        return [
            (input, lambda factor: _if_dense(factor, lambda c: Outer(c[:, None], y.expand(len(c), 1, -1).to(c.dtype)))),
            (other, lambda factor: _if_dense(factor, lambda c: Dense(c @ x.to(c.dtype)))),
        ]
    if (x.ndim, y.ndim) == (1, 1):
        return [
            (input, lambda factor: _if_dense(factor, lambda c: Dense(c[:, None] * y))),
            (other, lambda factor: _if_dense(factor, lambda c: Dense(c[:, None] * x))),
        ]
    return []


def _rmatmul(output: Tensor, input: Any, other: Any) -> _Carried:
    return _matmul(output, other, input)


def _postmultiplied(factor: Factor, matrix: Tensor) -> Factor | None:
    swapped = transposed(factor)
    product = None if swapped is None else premultiplied(swapped, matrix.T)
    return None if product is None else transposed(product)


def _if_dense(factor: Factor, build: Callable[[Tensor], Factor]) -> Factor | None:
    return build(factor.values) if isinstance(factor, Dense) else None


# Layouts and dtypes


def _reshape(output: Tensor, input: Any, *_: Any, **__: Any) -> _Carried:
    shape = input.shape
    if input.dtype != output.dtype:
        return []  # the same bytes, seen otherwise
    if shape == output.shape:
        return [(input, lambda factor: factor)]
    place = Place(tuple(output.shape), tuple(output.shape[k + 1 :].numel() for k in range(output.ndim)), 0)

    def carry(factor: Factor) -> Factor:
        return Dense(factor.values.reshape(factor.n, *shape)) if isinstance(factor, Dense) else Views([factor], [place], shape)

    return [(input, carry)]


def _part(output: Tensor, input: Any, *_: Any, **__: Any) -> _Carried:
    """A view of some entries, or of all in another order."""
    of_input = input.is_contiguous() and _functorch.memory_of(output) == _functorch.memory_of(input.detach())
    if not of_input or any(stride == 0 and size > 1 for size, stride in zip(output.shape, output.stride(), strict=True)):
        return []
    place = Place(tuple(output.shape), tuple(output.stride()), int(output.storage_offset() - input.storage_offset()))
    return [(input, lambda factor: None if isinstance(factor, Dense) else Views([factor], [place], input.shape))]


def _transpose(output: Tensor, input: Any, *_: Any, **__: Any) -> _Carried:
    if input.ndim != 2:
        return _part(output, input)
    turned = input.detach().mT
    if (output.shape, output.stride()) != (turned.shape, turned.stride()):
        return []
    if (output.shape, output.stride()) == (input.shape, input.stride()):
        return []  # by its strides it may be either
    return [(input, transposed)]


def _cast(output: Tensor, input: Any, *_: Any, **__: Any) -> _Carried:
    return [(input, lambda factor: factor)] if (output.shape, output.device) == (input.shape, input.device) else []


_CARRIES: dict[str, Callable[..., _Carried]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("sub", "__sub__"), _sub),
    **dict.fromkeys(("rsub", "__rsub__"), _rsub),
    **dict.fromkeys(("neg", "__neg__"), _neg),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _mul),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), _div),
    "__rtruediv__": _rdiv,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("matmul", "mm", "mv", "dot", "vdot", "__matmul__"), _matmul),
    "__rmatmul__": _rmatmul,
    **dict.fromkeys(("reshape", "reshape_as", "view", "view_as", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute"), _transpose),
    **dict.fromkeys(
        ("__getitem__", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "movedim", "moveaxis"), _part
    ),
    **dict.fromkeys(("to", "type", "float", "double", "half", "bfloat16", "contiguous", "clone"), _cast),
}
