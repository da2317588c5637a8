"""How to split the data of ops that have rules into rows, each of which belongs to one sample or to none.

Used where fn sees a whole batch (method="batch"), in whatever layout: a rule then treats every row as a sample.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._torch._ops import Place, places_of
from psg.rules._registry import reshape
from psg.rules.products import einsum_labels, matmul_equation, tensordot_labels


class Split(NamedTuple):
    """A call whose data is split into rows, for a rule that takes these for samples.

    Attributes:
        data: The data arguments, with the rows in dim 0.
        join: Turns the rule's output into the op's own output.
        options: Other arguments that change.
    """

    data: dict[Place, Tensor]
    join: Callable[..., Any]
    options: dict[str, Any] = {}

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.data.values())))


Splitter = Callable[[dict[str, Any], Collection[Place]], Split | None]
"""Splits a call, given its arguments and the places of its parameters; None if it cannot."""

_splitters: dict[Any, Splitter] = {}


def split_rows(op: Any, arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    """Split the data of a call with parameters in these places; None if there is no way."""
    splitter = _splitters.get(op)
    return None if splitter is None else splitter(arguments, own)


def splits(*ops: Any) -> Callable[[Splitter], Splitter]:
    """Register how the data of these ops is split."""

    def register(splitter: Splitter) -> Splitter:
        _splitters.update(dict.fromkeys(ops, splitter))
        return splitter

    return register


def split_positions(arguments: dict[str, Any], kept: int, *names: str) -> Split:
    """Every position of these arguments is a row: [*rows, *kept dimensions] -> [*rows, *]."""

    def lead(tensor: Tensor) -> torch.Size:
        return tensor.shape[: tensor.ndim - kept]

    tensors = {(name, None): arguments[name] for name in names}
    data: dict[Place, Tensor] = {place: own.reshape(lead(own).numel(), *own.shape[own.ndim - kept :]) for place, own in tensors.items()}
    return Split(data, lambda output: reshape(output, (*lead(arguments[names[0]]), *output.shape[1:])))


splits(F.linear)(lambda arguments, own: split_positions(arguments, 1, "input"))
splits(torch.bilinear)(lambda arguments, own: split_positions(arguments, 1, "input1", "input2"))
splits(F.layer_norm, F.rms_norm)(lambda arguments, own: split_positions(arguments, len(arguments["normalized_shape"]), "input"))


@splits(F.embedding)
def _embedding_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    if arguments.get("scale_grad_by_freq"):
        return None  # frequencies would be counted in each row
    return split_positions(arguments, 0, "input")


@splits(F.embedding_bag)
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
    # Pad the bags to one size; the padding comes after the last offset, so that it is in no bag.
    steps = torch.arange(max(1, int(sizes.max())), device=input.device)
    places = torch.where(steps < sizes[:, None], starts[:, None] + steps, 0)
    data: dict[Place, Tensor] = {("input", None): input[places], ("offsets", None): torch.stack([torch.zeros_like(sizes), sizes], 1)}
    if weights is not None:
        data["per_sample_weights", None] = weights[places]
    return Split(data, _without(1), {"include_last_offset": True})


@splits(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _convolution_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    if arguments["input"].ndim != arguments["weight"].ndim:
        return None  # a single unbatched image cannot be split into rows
    return Split({("input", None): arguments["input"]}, lambda output: output)


@splits(F.group_norm, F.instance_norm, F.batch_norm)
def _normalization_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    """Every image is a row; running statistics are the same for all."""
    images = arguments["input"].unsqueeze(1)
    given = {(name, None): arguments.get(name) for name in ("running_mean", "running_var")}
    statistics = {place: tensor.expand(len(images), *tensor.shape) for place, tensor in given.items() if tensor is not None}
    return Split({("input", None): images, **statistics}, _without(1))


def _without(dim: int) -> Callable[[Tensor], Tensor]:
    """A function that removes one dimension, of size 1."""
    return lambda output: reshape(output, (*output.shape[:dim], *output.shape[dim + 1 :]))


# Products. Rows run along the labels that all data and the output have, and no parameter.


def split_labels(operands: dict[Place, Tensor], labels: list[str], out: str, own: Collection[Place], contiguous: bool = False) -> Split:
    """Split an einsum (one letter a dimension) into rows. The rule takes these for samples, in which their dimensions have size 1.

    `contiguous` says whether torch's output is: then fn may write into views that its own reshapes make of it.
    """
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
        joined = joined if order == sorted(order) else joined.permute(order)
        return joined.contiguous() if contiguous else joined

    return Split({place: split(operands[place], names) for place, names in data.items()}, join)


def _product(equation: str, *names: str) -> Splitter:
    """The splitter of an op that is always this einsum of these arguments."""
    inputs, out = equation.split("->")
    labels = inputs.split(",")

    def splitter(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
        operands: dict[Place, Tensor] = {(name, None): arguments[name] for name in names}
        if any(tensor.ndim != len(label) for tensor, label in zip(operands.values(), labels, strict=True)):
            return None
        return split_labels(operands, labels, out, [place for place in own if place in operands], contiguous=True)

    return splitter


splits(torch.mm, Tensor.mm)(_product("ti,io->to", "input", "mat2"))
splits(torch.bmm, Tensor.bmm)(_product("bti,bio->bto", "input", "mat2"))
splits(torch.mv, Tensor.mv)(_product("ti,i->t", "input", "vec"))
# The tensor that is added to a product has to be the same for all rows; otherwise the rule declines.
splits(torch.addmm, Tensor.addmm)(_product("ti,io->to", "mat1", "mat2"))
splits(torch.baddbmm, Tensor.baddbmm)(_product("bti,bio->bto", "batch1", "batch2"))


@splits(torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    dims = arguments["input"].ndim, arguments["other"].ndim
    return None if 0 in dims else _product(matmul_equation(dims), "input", "other")(arguments, own)


@splits(torch.einsum)
def _einsum_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    operands: dict[Place, Tensor] = {("operands", k): tensor for k, tensor in enumerate(arguments["operands"])}
    written = einsum_labels(arguments["equation"], [tensor.ndim for tensor in operands.values()])
    return None if written is None else split_labels(operands, *written, own)


@splits(torch.tensordot)
def _tensordot_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    operands: dict[Place, Tensor] = {(name, None): arguments[name] for name in ("a", "b")}
    written = tensordot_labels([tensor.ndim for tensor in operands.values()], arguments["dims"])
    return None if written is None else split_labels(operands, *written, own, contiguous=True)


# Recurrences. A row is a sequence.


@splits(*(getattr(torch, name) for name in ("rnn_tanh", "rnn_relu", "gru", "lstm")))
def _recurrent_rows(arguments: dict[str, Any], own: Collection[Place]) -> Split | None:
    """[b,t,i] or [t,b,i], states [d,b,h]. The rule declines a pack or a stack, whose decomposition calls the op for each layer."""
    input, hx, batch_first = arguments["input"], arguments["hx"], arguments["batch_first"]
    if not isinstance(arguments["has_biases"], bool) or input.ndim != 3:
        return None
    data = {place: state.transpose(0, 1).unsqueeze(2) for place, state in places_of({"hx": hx})}
    data["input", None] = input.unsqueeze(1) if batch_first else input.transpose(0, 1).unsqueeze(2)

    def join(output: Tensor, *final: Tensor) -> tuple[Tensor, ...]:
        # In memory time comes first, as in torch: it decides whether fn's own reshape is a view, into which fn may write.
        output = _without(1 if batch_first else 2)(output).transpose(0, 1).contiguous()
        return output.transpose(0, 1) if batch_first else output, *(_without(2)(state).transpose(0, 1).contiguous() for state in final)

    return Split(data, join)
