"""Rules and decompositions of ops on a parameter that have no registered rule, for `method="batch"`, which lifts no parameters.

Elementwise products and sums get rules for their rows. Other ops are written with ops that have such rules.
"""

from collections.abc import Callable, Collection
from functools import reduce
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._torch._ops import Place, tensors_of
from psg.factors import Dense
from psg.rules import activation, attention
from psg.rules._registry import Rule
from psg.rules.products import sum_to
from psg.rules.rows import Split, split_labels, split_positions, splits

_PRODUCTS = (torch.mul, Tensor.mul, torch.multiply, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


@splits(*_PRODUCTS, *SUMS)
def _elementwise_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    """Rows run along the dimensions in front of the weight's; where it has as many as the data, along all in which it is broadcast."""
    input, weight = arguments["input"], arguments["weight"]
    if not isinstance(input, Tensor):
        return None
    shape, full = _row_shape(weight), torch.broadcast_shapes(input.shape, weight.shape)
    if input.ndim == 0:  # expanded, its dtype would count, which torch ranks below that of other tensors
        input = input.to(torch.result_type(input, weight))
    input = input.expand(full)
    if full[: len(full) - len(shape)].numel() != 1 or 1 not in shape:
        return split_positions({"input": input}, len(shape), "input")
    labels, place = ascii_letters[: len(full)], ("weight", None)
    operands: dict[Place, Tensor] = {("input", None): input, place: weight.reshape((1,) * (len(full) - len(shape)) + shape)}
    return split_labels(operands, [labels, labels], labels, [place], contiguous=True)


def _row_shape(weight: Tensor) -> torch.Size:
    """The weight's shape without leading ones, which is the shape of one row of the data."""
    return weight.shape[next((i for i, size in enumerate(weight.shape) if size != 1), weight.ndim) :]


def _laid_along(weight: Tensor, shape: torch.Size) -> Tensor:
    """The weight in the shape of a row. It stays a tensor with dimensions if it is one: torch ranks the dtype of others lower."""
    return weight.reshape(shape if shape or weight.ndim == 0 else (1,))


def _scaled(input: Tensor, weight: Tensor) -> Any:
    """y = x w: ([rows,*], [*]) -> [rows,*], the weight broadcast."""
    shape = _row_shape(weight)
    output = input * _laid_along(weight, shape)
    return output, {"weight": lambda cotangent: _broadcast(cotangent * input.conj(), weight, shape)}


def _shifted(input: Tensor, weight: Tensor) -> Any:
    """y = x + b: ([rows,*], [*]) -> [rows,*], the weight broadcast."""
    shape = _row_shape(weight)
    output = input + _laid_along(weight, shape)
    return output, {"weight": lambda cotangent: _broadcast(cotangent, weight, shape)}


def _broadcast(cotangent: Tensor, weight: Tensor, shape: torch.Size) -> Dense:
    """The gradient of a weight that was broadcast, which may be real where the data is complex."""
    summed = sum_to(cotangent, shape)
    return Dense((summed if weight.is_complex() else summed.real).reshape(len(cotangent), *weight.shape))


ELEMENTWISE = {
    **dict.fromkeys(_PRODUCTS, Rule.of(_scaled, ("weight",))),
    **dict.fromkeys(SUMS, Rule.of(_shifted, ("weight",))),
}
"""Rules of products and sums with a parameter, whose operands commute."""

VIEWING = frozenset((Tensor.expand, torch.broadcast_to, Tensor.broadcast_to))
INTERLEAVING = frozenset((torch.repeat_interleave, Tensor.repeat_interleave))
EXPANSIONS = VIEWING | INTERLEAVING | {Tensor.repeat, torch.tile, Tensor.tile}
"""Ops that repeat a parameter, perhaps once for each sample. The output of the first is a view; the second repeat entry by entry."""


def _stacked(tensors: Any, dim: int = 0, **others: Any) -> Any:
    return NotImplemented if others or dim != 0 or _differ(tensors) else tensors[0].expand(len(tensors), *tensors[0].shape)


def _concatenated(tensors: Any, dim: int = 0, **others: Any) -> Any:
    shape = tensors[0].shape
    return NotImplemented if others or dim != 0 or shape[:1] != (1,) or _differ(tensors) else tensors[0].expand(len(tensors), *shape[1:])


def _differ(tensors: Any) -> bool:
    return any(tensor is not tensors[0] for tensor in tensors)


JOINS = {torch.stack: _stacked, torch.cat: _concatenated}
"""Ops that repeat a parameter if they are given nothing else, over and over."""


def _broadcast_tensors(*given: Any) -> Any:
    tensors = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    full = _full_shape(*tensors)
    return NotImplemented if all(tensor.shape == full for tensor in tensors) else tuple(tensor.expand(full) for tensor in tensors)


def _operands(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The two operands of an op, those given by name taken from `options`; none if there are others, or their dtypes differ.

    Where they do, torch converts one operand before it computes; an op written out would negate or scale it before that.
    """
    operands = *args, *(options.pop(name) for name in ("input", "other") if name in options)
    dtypes = {operand.dtype for operand in operands if isinstance(operand, Tensor)}
    return operands if len(operands) == 2 and not options and len(dtypes) == 1 else ()


def _product(*args: Any, **options: Any) -> Any:
    operands = _operands(args, options)
    return NotImplemented if not operands or len(args) == 2 else torch.mul(*operands)


def _sum(*args: Any, alpha: Any = 1, **options: Any) -> Any:
    operands = _operands(args, options)
    if not operands or (len(args) == 2 and alpha == 1):
        return NotImplemented
    return operands[0] + (operands[1] if alpha == 1 else alpha * operands[1])


def _difference(*args: Any, alpha: Any = 1, **options: Any) -> Any:
    operands = _operands(args, options)
    return operands[0] + -alpha * operands[1] if operands else NotImplemented


def _added(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """y = beta input + alpha product(x, z)."""

    def added(input: Tensor, *operands: Tensor, beta: float = 1, alpha: float = 1, **named: Tensor) -> Any:
        # By name, the second operand may come first.
        order = ("mat1", "batch1", "vec1", "mat", "mat2", "batch2", "vec2", "vec")
        if not named.keys() <= set(order) or len(operands) + len(named) != 2:
            return NotImplemented
        x, z = *operands, *(named[name] for name in order if name in named)
        scaled = alpha * product(x, z)
        return scaled + beta * input if beta else scaled

    return added


def _outer(input: Tensor, vec2: Tensor) -> Tensor:
    return input[:, None] * vec2


def _inner(input: Tensor, other: Tensor) -> Tensor:
    if input.ndim == 0 or other.ndim == 0:
        return input * other
    return torch.tensordot(input, other, dims=([-1], [-1]))  # pyright: ignore[reportArgumentType]


def _distances(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Any:
    """([*,t,d], [*,s,d]) -> [*,t,s]. Where entries tie, the gradient of other norms than p = 2 is not that of `vector_norm`."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), dim=-1) if p == 2 else NotImplemented


def _vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    return (x.conj() * y).sum(dim)


def _grouped_product(self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if offs is None or bias is not None or out_dtype is not None or self.ndim != 2 or mat2.ndim != 3:
        return NotImplemented
    ends = offs.tolist()
    groups = [self[start:end] @ matrix for start, end, matrix in zip([0, *ends], ends, mat2.unbind(), strict=False)]
    # torch leaves rows beyond the last offset undefined; here they are zero.
    return torch.cat([*groups, self.new_zeros(len(self) - ends[-1], mat2.shape[2])])


def _converted(input: Tensor, other: Tensor, *flags: Any, **options: Any) -> Tensor:
    return input.to(other.device, other.dtype, *flags, **options)


def _full_shape(*args: Any, **kwargs: Any) -> torch.Size:
    return torch.broadcast_shapes(*(tensor.shape for tensor in tensors_of(args, kwargs)))


def _found(names: str) -> list[Any]:
    """The functions and methods of torch with these names."""
    holders = (torch, torch.special, torch._C.TensorBase, Tensor)
    return [vars(holder)[name] for holder in holders for name in names.split() if name in vars(holder)]


_COMPARED = "bucketize eq ge gt isclose le lt ne searchsorted __eq__ __ge__ __gt__ __le__ __lt__ __ne__"
_POINTWISE = """addcdiv addcmul arctan2 atan2 clamp clamp_max clamp_min clip copysign cosine_similarity div divide float_power fmax fmin
fmod hypot ldexp lerp logaddexp logaddexp2 maximum minimum pairwise_distance polar pow remainder true_divide where xlog1py
xlogy add complex mul multiply rsub sub subtract __add__ __mul__ __pow__ __radd__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__
__truediv__"""

IN_FLOAT64 = frozenset(_found("float_power"))
"""Those that compute in float64 whatever they are given."""

OUTER_PRODUCTS = frozenset(_found("addr einsum ger outer"))
"""Ops whose output may have a row for each entry of one operand."""

COMPARISONS = frozenset(_found(_COMPARED))
"""Ops through which no gradient goes."""

BROADCASTING: dict[Any, Callable[..., torch.Size | None]] = {
    **dict.fromkeys(_found("cat concat concatenate hstack stack vstack"), lambda *args, **options: None),
    **dict.fromkeys(_found(_POINTWISE), _full_shape),
    Tensor.copy_: lambda self, *others, **options: self.shape,
    Tensor.__setitem__: lambda self, index, value: self[index].shape,
}
"""Other ops that broadcast a parameter (a mask token, an exponent), and for each the shape to which they do; None for its own."""

IN_PLACE = {
    **{
        getattr(Tensor, f"__i{name}__"): getattr(torch, op)
        for name, op in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("pow", "pow"))
    },
    **{getattr(Tensor, f"{name}_"): getattr(Tensor, name) for name in _POINTWISE.split() if hasattr(Tensor, f"{name}_")},
}
"""In-place ops on data and a parameter, and for each the op that computes the values to write."""

WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(SUMS, _sum),
    **dict.fromkeys((torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__), _difference),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), lambda input, other, **options: _difference(other, input, **options)),
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.addmv, Tensor.addmv, torch.baddbmm, Tensor.baddbmm), _added(torch.matmul)),
    **dict.fromkeys((torch.addbmm, Tensor.addbmm), _added(lambda x, z: torch.matmul(x, z).sum(0))),
    **dict.fromkeys((torch.addr, Tensor.addr), _added(_outer)),
    **dict.fromkeys((torch.outer, Tensor.outer, torch.ger, Tensor.ger), _outer),
    **dict.fromkeys((torch.inner, Tensor.inner), _inner),
    **dict.fromkeys((torch.dot, Tensor.dot), lambda input, tensor: _inner(input, tensor)),
    **dict.fromkeys((torch.vdot, Tensor.vdot), lambda input, other: _inner(input.conj(), other)),
    torch.cdist: _distances,
    torch.linalg.vecdot: _vecdot,
    torch.linalg.multi_dot: lambda tensors: reduce(torch.matmul, tensors),
    torch.broadcast_tensors: _broadcast_tensors,
    Tensor.expand_as: lambda input, other: input.expand(other.shape),
    Tensor.view_as: lambda input, other: input.view(other.shape),
    Tensor.reshape_as: lambda input, other: input.reshape(other.shape),
    **dict.fromkeys((Tensor.to, Tensor.type_as), _converted),
    F.scaled_dot_product_attention: attention.attention_in_parts,
    **dict.fromkeys((torch.prelu, Tensor.prelu), activation.written_out),
    torch._grouped_mm: _grouped_product,  # pyright: ignore[reportPrivateImportUsage]
}
"""Ops without a rule for rows, written with ops that have one."""
