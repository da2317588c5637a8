"""Gradients of the operands of an einsum, of which every product of tensors is one, from a factor of its output's gradient."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from psg._hardware import _machine
from psg.factors._base import Dense, Factor
from psg.factors._maps import placed, reshaped, transposed
from psg.factors._outer import Outer
from psg.factors._scaled import Expanded
from psg.factors._views import Region, Views, strides_of

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
    # First those over which a product is summed, so that it is small when it meets the others.
    ordered = sorted(others, key=lambda operand: set(operand[0]).isdisjoint(output))
    others = [(labels, tensor.to(factor.dtype)) for labels, tensor in ordered]
    made = _made(factor, output, others, found, sizes)
    if made is None:
        return None
    small = torch.Size(size if label in known else 1 for label, size in zip(own, shape, strict=True))
    if small == shape:
        return reshaped(made, shape)
    return Expanded(made.materialize().reshape(made.n, *small), shape)


def permuted(factor: Factor, order: Sequence[int]) -> Factor:
    """The gradient with its dimensions in this order."""
    if isinstance(factor, Dense):
        return Dense(factor.values.permute(0, *(1 + dim for dim in order)))
    turned = transposed(factor) if list(order) == [1, 0] else None
    if turned is not None:
        return turned
    shape, labels = torch.Size([factor.shape[dim] for dim in order]), [f"{dim}" for dim in range(len(order))]
    found = [labels[dim] for dim, size in zip(order, shape, strict=True) if size > 1]
    sides = _sides_of(factor, labels)
    for pair in (sides, sides[::-1]) if sides is not None else ():
        own = [[label for label in found if label in side.labels] for side in pair]
        if [*own[0], *own[1]] == found:  # those of one side follow those of the other
            left, right = (side.product(kept).unsqueeze(2).flatten(2) for side, kept in zip(pair, own, strict=True))
            return reshaped(Outer(left, right), shape)
    strides = dict(zip(order, strides_of(shape), strict=True))
    return placed(factor, Region(tuple(factor.shape), tuple(strides[dim] for dim in range(len(order))), 0), shape)


def _made(factor: Factor, output: Labels, others: Sequence[Operand], found: Labels, sizes: dict[str, int]) -> Factor | None:
    if isinstance(factor, Dense):
        return Dense(_einsum([([_SAMPLE, *output], factor.values), *others], [_SAMPLE, *found]))
    sides = _sides_of(factor, output)
    if sides is None:
        return None
    left, right, work = _divided(*sides, others, found, sizes)
    count = sides[0].operand[1].shape[1]
    shared = [label for label in left.labels if label in right.labels]
    first, last = ([label for label in found if label in side.labels] for side in (left, right))
    positions, rows, columns = count * _volume(shared, sizes), _volume(first, sizes), _volume(last, sizes)
    is_smaller = positions * (rows + columns) < rows * columns and not set(first).intersection(last)
    if is_smaller:
        made = Outer(
            left.product([*shared, *first]).reshape(factor.n, positions, rows),
            right.product([*shared, *last]).reshape(factor.n, positions, columns),
        )
        order = [*first, *last]
        return permuted(reshaped(made, torch.Size([sizes[label] for label in order])), [order.index(label) for label in found])
    work += _volume({*left.labels, *right.labels}, sizes)
    if _is_cheaper_dense(factor, left, right, 2 * count * work, output, others, sizes):
        return None  # to be materialised, then the case above
    products = [([_SAMPLE, _POSITION, *side.labels], side.product(side.labels)) for side in (left, right)]
    return Dense(_einsum(products, [_SAMPLE, *found]))


def _is_cheaper_dense(
    factor: Factor, left: "_Side", right: "_Side", work: float, output: Labels, others: Sequence[Operand], sizes: dict[str, int]
) -> bool:
    """Whether to materialise takes less than products of sides, of so much work; both are also written, and laid out anew."""

    def written(numbers: int) -> float:
        nbytes = numbers * factor.dtype.itemsize
        return 2 * nbytes * _machine.fresh_byte(factor.device, factor.dtype, factor.n * nbytes)

    count = left.operand[1].shape[1]
    of_sides = sum(written(count * _volume(side.labels, sizes)) for side in (left, right) if side.others)
    dense = count * _volume(output, sizes) + _volume({*output}.union(*(labels for labels, _ in others)), sizes)
    return work + of_sides > 2 * dense + written(_volume(output, sizes))


class _Side(NamedTuple):
    """One side of an Outer, the operands that are multiplied with it, and the labels of the product that something needs."""

    operand: Operand
    others: list[Operand]
    labels: list[str]

    def product(self, labels: Labels) -> Tensor:
        """[n, t, *labels]."""
        return _einsum([self.operand, *self.others], [_SAMPLE, _POSITION, *labels])


def _sides_of(factor: Factor, output: Labels) -> tuple[_Side, _Side] | None:
    """Both sides of an Outer, perhaps in another shape or with its dimensions in another order, each with the labels of its dimensions."""
    if isinstance(factor, Views) and not factor.is_reshaped:
        order = factor.order
        return None if order is None else _sides_of(factor.factors[0], [output[dim] for dim in order])
    outer = factor.factors[0] if isinstance(factor, Views) and factor.is_reshaped else factor
    if not isinstance(outer, Outer):
        return None
    for k in range(len(output) + 1):
        first, last = factor.shape[:k], factor.shape[k:]
        if (first.numel(), last.numel()) == tuple(outer.shape):
            left, right = outer.left.reshape(*outer.left.shape[:2], *first), outer.right.reshape(*outer.right.shape[:2], *last)
            (one, other) = output[:k], output[k:]
            return (
                _Side(([_SAMPLE, _POSITION, *one], left), [], list(one)),
                _Side(([_SAMPLE, _POSITION, *other], right), [], list(other)),
            )
    return None


def _divided(left: _Side, right: _Side, others: Sequence[Operand], found: Labels, sizes: dict[str, int]) -> tuple[_Side, _Side, int]:
    """Multiply each operand with the side with which the product is smaller; also gives the operations for one position."""
    sides, work = [left, right], 0
    for k, (labels, _) in enumerate(others):
        later = {*found}.union(*(own for own, _ in others[k + 1 :]))
        products = [
            [own for own in dict.fromkeys((*side.labels, *labels)) if own in later or own in beside.labels]
            for side, beside in (sides, sides[::-1])
        ]
        i = min((0, 1), key=lambda i: _volume(products[i], sizes))
        work += _volume({*sides[i].labels, *labels}, sizes)
        sides[i] = _Side(sides[i].operand, [*sides[i].others, others[k]], products[i])
    kept = [[own for own in side.labels if own in found or own in beside.labels] for side, beside in (sides, sides[::-1])]
    left, right = (side._replace(labels=labels) for side, labels in zip(sides, kept, strict=True))
    return left, right, work


def _einsum(operands: Sequence[Operand], output: Labels) -> Tensor:
    labels = list(dict.fromkeys(label for labels, _ in operands for label in labels))
    given = [part for own, tensor in operands for part in (tensor, [labels.index(label) for label in own])]
    return torch.einsum(*given, [labels.index(label) for label in output])


def _volume(labels: Iterable[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[label] for label in labels)
