"""How the ops that have rules hold rows: what of their data is one row, which belongs to one sample or to none.

Used where fn sees a whole batch, in whatever layout: every row is then treated as a sample of its own.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._ops import Place
from psg.factors import Dense
from psg.rules._registry import Rule, reshape
from psg.rules.products import einsum_labels, matmul_equation, sum_to


class Split(NamedTuple):
    """A call whose rows are samples.

    Attributes:
        data: What has rows, with these in dim 0, as a rule expects samples.
        join: From what the rule gives to the op's own output.
        options: Other arguments that change.
    """

    data: dict[Place, Tensor]
    join: Callable[..., Any]
    options: dict[str, Any] = {}


Splitter = Callable[[dict[str, Any], Collection[Place]], Split | None]
"""From a call's arguments and the places of its parameters."""

_splitters: dict[Any, Splitter] = {}


def split_rows(op: Any, arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    """Split the data of a call with parameters in these places; None if it is not known how."""
    splitter = _splitters.get(op)
    return None if splitter is None else splitter(arguments, own)


def _splits(*ops: Any) -> Callable[[Splitter], Splitter]:
    def register(splitter: Splitter) -> Splitter:
        _splitters.update(dict.fromkeys(ops, splitter))
        return splitter

    return register


def _leading(tensor: Tensor, kept: int) -> tuple[Tensor, tuple[int, ...]]:
    """[*rows, *kept dimensions] -> [rows, *kept dimensions], and the rows' own shape."""
    lead = tuple(tensor.shape[: tensor.ndim - kept])
    return tensor.reshape(math.prod(lead), *tensor.shape[tensor.ndim - kept :]), lead


def _positions(arguments: dict[str, Any], kept: int) -> Split:
    """Every position is a row: [*rows, *kept dimensions] -> [*rows, *]."""
    input, lead = _leading(arguments["input"], kept)
    return Split({("input", None): input}, lambda output: reshape(output, (*lead, *output.shape[1:])))


_splits(F.linear)(lambda arguments, own: _positions(arguments, 1))
_splits(F.layer_norm, F.rms_norm)(lambda arguments, own: _positions(arguments, len(arguments["normalized_shape"])))


@_splits(F.embedding)
def _embedding_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    if arguments.get("scale_grad_by_freq"):
        return None  # the frequency would be that in the batch: a sample's gradient would depend on the others
    return _positions(arguments, 0)


@_splits(F.embedding_bag)
def _embedding_bag_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    """Every bag is a row: [bags,t] or, with offsets, [ids] -> [bags,d]."""
    input, offsets, weights = arguments["input"], arguments.get("offsets"), arguments.get("per_sample_weights")
    if input.ndim == 2 and offsets is None:
        data: dict[Place, Tensor] = {("input", None): input.unsqueeze(1)}
        if weights is not None:
            data["per_sample_weights", None] = weights.unsqueeze(1)
        return Split(data, _without(1))
    if input.ndim != 1 or offsets is None or offsets.ndim != 1:
        return None
    last = arguments.get("include_last_offset")
    starts, ends = (offsets[:-1], offsets[1:]) if last else (offsets, torch.cat([offsets[1:], offsets.new_tensor([len(input)])]))
    sizes = ends - starts
    if 0 in (len(input), len(sizes)) or offsets[0] != 0 or sizes.min() < 0:
        return None
    # Bags of one size, each followed by one that is no one's.
    steps = torch.arange(max(1, int(sizes.max())), device=input.device)
    places = torch.where(steps < sizes[:, None], starts[:, None] + steps, 0)
    data: dict[Place, Tensor] = {("input", None): input[places], ("offsets", None): torch.stack([torch.zeros_like(sizes), sizes], 1)}
    if weights is not None:
        data["per_sample_weights", None] = weights[places]
    return Split(data, _without(1), {"include_last_offset": True})


@_splits(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _convolution_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    if arguments["input"].ndim != arguments["weight"].ndim:
        return None  # a single image: there is no telling its rows apart
    return Split({("input", None): arguments["input"]}, lambda output: output)


@_splits(F.group_norm, F.instance_norm, F.batch_norm)
def _normalization_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    """Every image is a row; running statistics are the same for all."""
    images = arguments["input"].unsqueeze(1)
    given = {(name, None): arguments.get(name) for name in ("running_mean", "running_var")}
    statistics = {place: tensor.expand(len(images), *tensor.shape) for place, tensor in given.items() if tensor is not None}
    return Split({("input", None): images, **statistics}, _without(1))


def _without(dim: int) -> Callable[[Tensor], Tensor]:
    """Takes one dimension of size 1 away."""
    return lambda output: reshape(output, (*output.shape[:dim], *output.shape[dim + 1 :]))


# Products. A row is what all data and the output have, and no parameter.


def _contraction(operands: dict[Place, Tensor], labels: list[str], out: str, own: Collection[Place]) -> Split:
    """Rows of an einsum, one letter a dimension; the rule sees them as samples, in which their dimensions are of size 1."""
    named = dict(zip(operands, labels, strict=True))
    data = {place: names for place, names in named.items() if place not in own}
    taken: set[str] = set()
    sizes: dict[str, set[int]] = {}
    for place, names in named.items():
        for name, size in zip(names, operands[place].shape, strict=True):
            if place in data:
                sizes.setdefault(name, set()).add(size)
            elif size != 1:
                taken.add(name)

    def is_row(name: str) -> bool:
        return name not in taken and len(sizes.get(name, ())) == 1 and all(names.count(name) == 1 for names in data.values())

    rows = [name for name in out if is_row(name)]
    lead = [size for name in rows for size in sizes[name]]

    def split(tensor: Tensor, names: str) -> Tensor:
        order = [names.index(name) for name in rows] + [d for d, name in enumerate(names) if name not in rows]
        shape = [1 if name in rows else size for name, size in zip(names, tensor.shape, strict=True)]
        return tensor.permute(order).reshape(math.prod(lead), *shape)

    def join(output: Tensor) -> Tensor:
        rest = [name for name in out if name not in rows]
        kept = [size for name, size in zip(out, output.shape[1:], strict=True) if name not in rows]
        joined, order = reshape(output, (*lead, *kept)), [[*rows, *rest].index(name) for name in out]
        return joined if order == sorted(order) else joined.permute(order)

    return Split({place: split(operands[place], names) for place, names in data.items()}, join)


def _product(equation: str, *names: str) -> Splitter:
    """The splitter of an op that is always this einsum of these arguments."""
    inputs, out = equation.split("->")
    labels = inputs.split(",")

    def splitter(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
        operands: dict[Place, Tensor] = {(name, None): arguments[name] for name in names}
        if any(tensor.ndim != len(own) for tensor, own in zip(operands.values(), labels, strict=True)):
            return None
        return _contraction(operands, labels, out, [place for place in own if place in operands])

    return splitter


_splits(torch.mm, Tensor.mm)(_product("ti,io->to", "input", "mat2"))
_splits(torch.bmm, Tensor.bmm)(_product("bti,bio->bto", "input", "mat2"))
_splits(torch.mv, Tensor.mv)(_product("ti,i->t", "input", "vec"))
# What is added to a product is the same for all rows, or the rule declines it.
_splits(torch.addmm, Tensor.addmm)(_product("ti,io->to", "mat1", "mat2"))
_splits(torch.baddbmm, Tensor.baddbmm)(_product("bti,bio->bto", "batch1", "batch2"))


@_splits(torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    dims = arguments["input"].ndim, arguments["other"].ndim
    return None if 0 in dims else _product(matmul_equation(dims), "input", "other")(arguments, own)


@_splits(torch.einsum)
def _einsum_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    if not isinstance(arguments["equation"], str):
        return None
    operands: dict[Place, Tensor] = {("operands", k): tensor for k, tensor in enumerate(arguments["operands"])}
    written = einsum_labels(arguments["equation"], [tensor.ndim for tensor in operands.values()])
    return None if written is None else _contraction(operands, *written, own)


@_splits(torch.bilinear)
def _bilinear_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    (input1, lead), (input2, _) = _leading(arguments["input1"], 1), _leading(arguments["input2"], 1)
    data: dict[Place, Tensor] = {("input1", None): input1, ("input2", None): input2}
    return Split(data, lambda output: reshape(output, (*lead, *output.shape[1:])))


# Recurrences. A row is a sequence.


@_splits(*(getattr(torch, name) for name in ("rnn_tanh", "rnn_relu", "gru", "lstm")))
def _recurrent_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    """[b,t,i] or [t,b,i], states [d,b,h]. A pack or a stack is opened first: the rule declines it."""
    input, hx, batch_first = arguments["input"], arguments["hx"], arguments["batch_first"]
    if not isinstance(arguments["has_biases"], bool) or input.ndim != 3:
        return None
    single = isinstance(hx, Tensor)
    data: dict[Place, Tensor] = {
        ("hx", None if single else k): state.transpose(0, 1).unsqueeze(2) for k, state in enumerate([hx] if single else hx)
    }
    data["input", None] = input.unsqueeze(1) if batch_first else input.transpose(0, 1).unsqueeze(2)

    def join(output: Tensor, *final: Tensor) -> tuple[Tensor, ...]:
        output = _without(1)(output) if batch_first else _without(2)(output).transpose(0, 1)
        return output, *(_without(2)(state).transpose(0, 1) for state in final)

    return Split(data, join)


@_splits(*(getattr(torch, f"{name}_cell") for name in ("rnn_tanh", "rnn_relu", "gru", "lstm")))
def _cell_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    input, hx = arguments["input"], arguments["hx"]
    single = isinstance(hx, Tensor)
    if input.ndim != 2:
        return None
    data: dict[Place, Tensor] = {("hx", None if single else k): state.unsqueeze(1) for k, state in enumerate([hx] if single else hx)}
    return Split({("input", None): input.unsqueeze(1), **data}, _each(_without(1)))


def _each(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The function of one output, or of each of several."""
    return lambda *outputs: function(*outputs) if len(outputs) == 1 else tuple(map(function, outputs))


# Products and sums with a parameter. Under vmap lifting does these; without it they need a rule.

_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


@_splits(*_PRODUCTS, *_SUMS)
def _elementwise_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    input, weight = arguments["input"], arguments["weight"]
    shape = _row_shape(weight)
    if not isinstance(input, Tensor) or input.ndim < weight.ndim or weight.is_complex():
        return None
    if any(size not in (1, full) for size, full in zip(shape, input.shape[input.ndim - len(shape) :], strict=True)):
        return None
    return _positions(arguments, len(shape))


def _row_shape(weight: Tensor) -> torch.Size:
    """The weight's shape without leading ones: what it is multiplied with or added to is a row."""
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
    """The gradient of a real weight that was broadcast, to complex data perhaps."""
    summed = sum_to(cotangent, shape)
    return Dense((summed.real if summed.is_complex() else summed).reshape(len(cotangent), *own))


ELEMENTWISE = dict.fromkeys(_PRODUCTS, Rule.of(_scaled, ("weight",)))
ELEMENTWISE |= dict.fromkeys(_SUMS, Rule.of(_shifted, ("weight",)))


EXPANSIONS = frozenset({Tensor.expand, Tensor.repeat, torch.tile, Tensor.tile, torch.broadcast_to, Tensor.broadcast_to})
"""Ops that repeat a parameter, perhaps once for each sample."""


def _lookup(input: Any, index: Any, from_end: bool = False) -> Any:
    """W[index], an integer tensor along dim 0, as an embedding; negative ones count from the end where the op lets them."""
    known = isinstance(input, Tensor) and isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64)
    if not known or input.ndim == 0 or input.is_complex() or len(input) == 0:
        return NotImplemented
    if from_end:
        index = torch.where(index < 0, index + len(input), index)
    if input.ndim == 2:
        return F.embedding(index, input)
    if input.ndim == 1:
        return F.embedding(index, input.unsqueeze(1)).squeeze(-1)
    return F.embedding(index, input.flatten(1)).unflatten(-1, input.shape[1:])


LOOKUPS = {
    Tensor.__getitem__: lambda input, index: _lookup(input, index, from_end=True),
    **dict.fromkeys(
        (torch.index_select, Tensor.index_select), lambda input, dim, index: _lookup(input, index) if dim == 0 else NotImplemented
    ),
}
"""Ops that look rows of a parameter up, as an embedding does."""

IN_PLACE = {
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), torch.add),
    **dict.fromkeys((Tensor.sub_, Tensor.__isub__), torch.sub),
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), torch.mul),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), torch.div),
}
"""Ops that write into data what the op named here makes of it and a parameter."""


def _difference(input: Any, other: Any, **options: Any) -> Any:
    return NotImplemented if options else input + (-other)


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
    return scores.softmax(-1) @ value


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """y = max(x, 0) + w min(x, 0): ([b,c,*], [c] or [1]) -> [b,c,*]."""
    return input.relu() + input.clamp(max=0) * weight.reshape(-1, *(1,) * (input.ndim - 2))


def _where(condition: Tensor, *choices: Any) -> Any:
    """A parameter (a mask token) is repeated first, and what a row takes of it is then the row's own."""
    shape = torch.broadcast_shapes(condition.shape, *(choice.shape for choice in choices if isinstance(choice, Tensor)))
    if all(not isinstance(choice, Tensor) or choice.shape == shape for choice in choices):
        return NotImplemented
    return torch.where(condition, *(choice.expand(shape) if isinstance(choice, Tensor) else choice for choice in choices))


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__), _difference),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), lambda input, other, **options: _difference(other, input, **options)),
    **dict.fromkeys((torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__), _quotient),
    Tensor.__rtruediv__: lambda input, other: _quotient(other, input),
    Tensor.expand_as: lambda input, other: input.expand(other.shape),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.prelu, Tensor.prelu), _prelu),
    torch.where: _where,
    Tensor.where: lambda self, condition, other: _where(condition, self, other),
}
"""Ops that reach a parameter by no rule for rows, in other ops that do."""
