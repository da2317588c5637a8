"""Gradients of the operands of an einsum, of which every product of tensors is one, from a factor of its output's gradient."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from psg._hardware import _machine
from psg.factors._base import Dense, Factor
from psg.factors._maps import reshaped
from psg.factors._outer import Outer
from psg.factors._scaled import Expanded
from psg.factors._views import Views

Labels = Sequence[str]

Operand = tuple[Labels, Tensor]
"""A tensor, and the labels of its dimensions, no two of which are the same."""

_SAMPLE, _POSITION = "the samples", "their positions"


def of_operand(factor: Factor, output: Labels, others: Sequence[Operand], own: Labels, shape: torch.Size) -> Factor | None:
    """The gradient of an operand, if that of the output is given; None where psg has no factor for it.

    If sum_t l_t r_t^T is the gradient of the output, with the output's first dimensions as those of l_t, and the others as those of r_t, an
    operand's is the einsum of l_t, r_t and the other operands, each of which is multiplied with one of the two first.

    Args:
        factor: Of the output's gradient.
        output: The labels of the output.
        others: The other operands.
        own: The labels of the operand.
        shape: The operand's shape.
    """
    known = {*output}.union(*(labels for labels, _ in others))
    found = [label for label in own if label in known]
    sizes = dict(zip(output, factor.shape, strict=True)) | {
        label: size for labels, tensor in others for label, size in zip(labels, tensor.shape, strict=True)
    }
    others = [(labels, tensor.to(factor.dtype)) for labels, tensor in others]
    made = _made(factor, output, others, found, sizes)
    small = torch.Size(size if label in known else 1 for label, size in zip(own, shape, strict=True))
    if made is None or small == shape:
        return made if made is None else reshaped(made, shape)
    return Expanded(made.materialize().reshape(made.n, *small), shape)


def _made(factor: Factor, output: Labels, others: Sequence[Operand], found: Labels, sizes: dict[str, int]) -> Factor | None:
    if isinstance(factor, Dense):
        return Dense(_einsum([([_SAMPLE, *output], factor.values), *others], [_SAMPLE, *found]))
    sides = _sides_of(factor, output)
    if sides is None:
        return None
    left, right = _multiplied(*sides, others, found, sizes)
    shared = [label for label in left.labels if label in right.labels]
    first, last = ([label for label in found if label in side.labels] for side in (left, right))
    positions = left.operand[1].shape[1] * _volume(shared, sizes)
    rows, columns = _volume(first, sizes), _volume(last, sizes)
    is_factored = positions * (rows + columns) < rows * columns and not set(first).intersection(last)
    if is_factored and found in ([*first, *last], [*last, *first]):
        sides = [
            _einsum([side.operand], [_SAMPLE, _POSITION, *shared, *own]).reshape(factor.n, positions, size)
            for side, own, size in ((left, first, rows), (right, last, columns))
        ]
        made = Outer(*sides) if [*first, *last] == found else Outer(*reversed(sides))
        return reshaped(made, torch.Size([sizes[label] for label in found]))
    materialized = left.operand[1].shape[1] * _volume(output, sizes) + _volume({*output}.union(*(labels for labels, _ in others)), sizes)
    written = _machine.reused_byte(factor.device, factor.dtype) * factor.sample_bytes
    if positions * rows * columns + left.work + right.work > materialized + written:
        return None  # to be materialised, then the case above
    return Dense(_einsum([left.operand, right.operand], [_SAMPLE, *found]))


class _Side(NamedTuple):
    """One side of an Outer, multiplied with some operands, and the operations that this takes for one sample."""

    operand: Operand
    work: float

    @property
    def labels(self) -> Labels:
        return self.operand[0][2:]


def _sides_of(factor: Factor, output: Labels) -> tuple[_Side, _Side] | None:
    """Both sides of an Outer, perhaps in another shape, each with the labels of its dimensions."""
    outer = factor.factors[0] if isinstance(factor, Views) and factor.is_reshaped else factor
    if not isinstance(outer, Outer):
        return None
    for k in range(len(output) + 1):
        first, last = factor.shape[:k], factor.shape[k:]
        if (first.numel(), last.numel()) == tuple(outer.shape):
            left, right = outer.left.unflatten(2, first or (1,)), outer.right.unflatten(2, last or (1,))
            left, right = left if first else left.squeeze(2), right if last else right.squeeze(2)
            return (
                _Side(([_SAMPLE, _POSITION, *output[:k]], left), 0),
                _Side(([_SAMPLE, _POSITION, *output[k:]], right), 0),
            )
    return None


def _multiplied(left: _Side, right: _Side, others: Sequence[Operand], found: Labels, sizes: dict[str, int]) -> tuple[_Side, _Side]:
    """Multiply each operand with the side with which the product is smaller; labels that nothing needs any more are summed over."""
    sides = [left, right]
    for k, (labels, tensor) in enumerate(others):
        rest = {*found}.union(*(own for own, _ in others[k + 1 :]))
        needed = [rest.union(sides[1 - i].labels) for i in (0, 1)]
        products = [[own for own in dict.fromkeys((*sides[i].labels, *labels)) if own in needed[i]] for i in (0, 1)]
        i = min((0, 1), key=lambda i: _volume(products[i], sizes))
        held, work = sides[i].operand, sides[i].work
        count = held[1].shape[1] * _volume({*sides[i].labels, *labels}, sizes)
        product = [_SAMPLE, _POSITION, *products[i]]
        sides[i] = _Side((product, _einsum([held, (labels, tensor)], product)), work + count)
    for i in (0, 1):
        held = sides[i].operand
        kept = [_SAMPLE, _POSITION, *(own for own in sides[i].labels if own in found or own in sides[1 - i].labels)]
        sides[i] = sides[i] if kept == held[0] else _Side((kept, _einsum([held], kept)), sides[i].work)
    return sides[0], sides[1]


def _einsum(operands: Sequence[Operand], output: Labels) -> Tensor:
    labels = list(dict.fromkeys(label for labels, _ in operands for label in labels))
    given = [part for own, tensor in operands for part in (tensor, [labels.index(label) for label in own])]
    return torch.einsum(*given, [labels.index(label) for label in output])


def _volume(labels: Iterable[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[label] for label in labels)
