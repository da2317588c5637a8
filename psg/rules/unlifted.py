"""Rules and decompositions of ops on a parameter that have no registered rule, for `method="batch"`, which lifts no parameters.

Elementwise products and sums get rules for their rows. Other ops are written with ops that have such rules.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._ops import Place
from psg.factors import Dense
from psg.rules._registry import Rule
from psg.rules.products import sum_to
from psg.rules.rows import Split, split_positions, splits

_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


@splits(*_PRODUCTS, *_SUMS)
def _elementwise_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    input, weight = arguments["input"], arguments["weight"]
    shape = _row_shape(weight)
    if not isinstance(input, Tensor) or weight.is_complex():
        return None
    full = torch.broadcast_shapes(input.shape, weight.shape)
    return split_positions({"input": input.expand(full)}, len(shape), "input")


def _row_shape(weight: Tensor) -> torch.Size:
    """The weight's shape without leading ones, which is the shape of one row of the data."""
    return weight.shape[next((i for i, size in enumerate(weight.shape) if size != 1), weight.ndim) :]


def _scaled(input: Tensor, weight: Tensor) -> Any:
    """y = x w: ([rows,*], [*]) -> [rows,*], the weight broadcast."""
    own, shape = weight.shape, _row_shape(weight)
    output = input * weight.reshape(shape)
    return output, {"weight": lambda cotangent: _broadcast(cotangent * input.conj(), shape, own)}


def _shifted(input: Tensor, weight: Tensor) -> Any:
    """y = x + b: ([rows,*], [*]) -> [rows,*], the weight broadcast."""
    own, shape = weight.shape, _row_shape(weight)
    output = input + weight.reshape(shape)
    return output, {"weight": lambda cotangent: _broadcast(cotangent, shape, own)}


def _broadcast(cotangent: Tensor, shape: torch.Size, own: torch.Size) -> Dense:
    """The gradient of a real weight that was broadcast; the data may be complex."""
    summed = sum_to(cotangent, shape)
    return Dense((summed.real if summed.is_complex() else summed).reshape(len(cotangent), *own))


ELEMENTWISE = {
    **dict.fromkeys(_PRODUCTS, Rule.of(_scaled, ("weight",))),
    **dict.fromkeys(_SUMS, Rule.of(_shifted, ("weight",))),
}
"""Rules of products and sums with a parameter, whose operands commute."""

EXPANSIONS = frozenset({Tensor.expand, Tensor.repeat, torch.tile, Tensor.tile, torch.broadcast_to, Tensor.broadcast_to})
"""Ops that repeat a parameter, perhaps once for each sample."""

IN_PLACE = {
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), torch.add),
    **dict.fromkeys((Tensor.sub_, Tensor.__isub__), torch.sub),
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), torch.mul),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), torch.div),
}
"""In-place ops on data and a parameter, and for each the op that computes the values to write."""


def _difference(input: Any, other: Any, *deprecated: Any, **options: Any) -> Any:
    return NotImplemented if deprecated or options else input + (-other)


def _quotient(input: Any, other: Any, **options: Any) -> Any:
    return NotImplemented if options else input * (1 / other)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(q k^T scale + mask) v: ([*,t,d], [*,s,d], [*,s,e]) -> [*,t,e]."""
    if dropout_p or enable_gqa:
        return NotImplemented
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    masked = (scores == -math.inf).all(-1, keepdim=True)  # where all scores are masked, torch's output is zero
    return scores.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0) @ value


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """y = max(x, 0) + w min(x, 0): ([b,c,*], [c] or [1]) -> [b,c,*]."""
    return input.relu() + input.clamp(max=0) * weight.reshape(-1, *(1,) * (input.ndim - 2))


def _where(condition: Tensor, *choices: Any, **named: Any) -> Any:
    """torch.where whose choices, such as a mask token, are first expanded, so that every row has its own copy."""
    choices = *choices, *(named[name] for name in ("input", "other") if name in named)
    if named.keys() - {"input", "other"}:
        return NotImplemented
    shape = torch.broadcast_shapes(condition.shape, *(choice.shape for choice in choices if isinstance(choice, Tensor)))
    if all(not isinstance(choice, Tensor) or choice.shape == shape for choice in choices):
        return NotImplemented
    return torch.where(condition, *(choice.expand(shape) if isinstance(choice, Tensor) else choice for choice in choices))


def _grouped_product(self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if offs is None or bias is not None or out_dtype is not None or self.ndim != 2 or mat2.ndim != 3:
        return NotImplemented
    ends = offs.tolist()
    groups = [self[start:end] @ matrix for start, end, matrix in zip([0, *ends], ends, mat2.unbind(), strict=False)]
    # torch leaves rows beyond the last offset undefined; here they are zero.
    return torch.cat([*groups, self.new_zeros(len(self) - ends[-1], mat2.shape[2])])


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__), _difference),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), lambda input, other, **options: _difference(other, input, **options)),
    **dict.fromkeys((torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__), _quotient),
    Tensor.__rtruediv__: lambda input, other: _quotient(other, input),
    Tensor.expand_as: lambda input, other: input.expand(other.shape),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.prelu, Tensor.prelu), _prelu),
    torch._grouped_mm: _grouped_product,  # pyright: ignore[reportPrivateImportUsage]
    torch.where: _where,
    Tensor.where: lambda self, condition, other: _where(condition, self, other),
}
"""Ops without a rule for rows, written with ops that have one."""
