"""Factors: per-sample gradients in factored form. Every kind of factor has the same few operations.

For n samples and a parameter [*shape]; what positions t have is added up. A rule needs the first five; psg makes the others of them.

    kind                              tensors                                    for
    Dense(values)                     [n, *shape]                                what is small: biases, scales, normalisation layers
    Outer(left, right)                [n, t, a], [n, t, b]                       a matrix [a, b] that is multiplied with data
    Rows(index, cotangent, num_rows)  integers [n, t], [n, t, d]                 a table [num_rows, d] of which data choose rows
    Routed(index, left, right, ...)   integers [n, t], [n, t, a], [n, t, b]      matrices [g, a, b] of which data choose one for each row
    Conv(cotangent, input, geometry)  [n, images, o, *out], [n, images, i, *in]  a convolution's weight
    Expanded(values, shape)           [n, *shape], with sizes of 1               one number for a whole row, or for all entries
    Scaled(factor, entries)           a factor, [n, *shape]                      a weight that is multiplied entry by entry, by a mask say
    Entries(factor, places)           a factor, integers [n, k]                  a vector that fills a weight, a triangular one say
    Views(factors, regions, shape)    a factor for each Region                   parts of a parameter: slices, layers of a stack
    Sum(terms, like, shape)           factors, [n, 0]                            a parameter that is used several times: see `merge`
    Segments(factor, sizes)           a factor, integers [m]                     sums over samples: see `psg.tree.segment_sum`

Subclasses of `Factor` other than these are not supported: where no kind fits, return Dense.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from psg._errors import InputError
from psg.factors._arithmetic import is_one_row, one_after_another
from psg.factors._base import Dense, Factor
from psg.factors._conv import Conv, Geometry
from psg.factors._entries import Entries, merge_entries
from psg.factors._outer import Outer
from psg.factors._planned import Planned
from psg.factors._routed import Routed
from psg.factors._rows import Rows, merge_rows
from psg.factors._scaled import Expanded, Scaled, merge_scaled
from psg.factors._segments import Segments
from psg.factors._sum import Sum
from psg.factors._views import Region, Views, merge_views

__all__ = [
    "Conv",
    "Dense",
    "Entries",
    "Expanded",
    "Factor",
    "Geometry",
    "Outer",
    "Region",
    "Routed",
    "Rows",
    "Scaled",
    "Segments",
    "Sum",
    "Views",
    "concat",
    "is_factor",
    "merge",
]


def is_factor(node: Any) -> bool:
    """Whether a node of a tree is a factor: for `is_leaf=` of optree's and torch's functions, to which it is a node with tensors below.

    Args:
        node: Anything.

    Returns:
        Whether it is a factor.

    Example:
        >>> is_factor(Dense(torch.ones(2, 3))), is_factor(torch.ones(2, 3))
        (True, False)
    """
    return isinstance(node, Factor)


def merge(terms: list[Factor]) -> Factor:
    """One factor for a non-empty list of terms of the same parameter.

    Dense terms are added, and so are Rows terms of one index tensor. Outer terms become one Outer over all their positions, Rows terms one
    Rows, Routed terms one Routed, Conv terms of one geometry and size one Conv over all their images, Scaled terms of the same values one
    Scaled, Entries of the same places one Entries, and Views of disjoint regions one Views. If several factors remain, a Sum holds them.
    Terms whose gradients are smaller than their sides, and kept, remain too.

    Args:
        terms: At least one, of the same samples and shape.

    Returns:
        Their sum.

    Raises:
        InputError: There are no terms, or they differ in samples or shape.

    Example:
        >>> x = torch.ones(2, 1, 3)  # two samples
        >>> merge([Outer(x, x), Outer(x, x)]).positions
        2
    """
    if len(terms) == 1:
        return terms[0]
    _expect_alike("merge", [(term.n, *term.shape) for term in terms])
    merged: list[Factor] = []
    by_kind: dict[type[Factor], list[Any]] = {}
    for term in terms:
        own = merged if isinstance(term, Planned) and term.is_added_apart else by_kind.setdefault(type(term), [])
        own.append(term)
    for kind, alike in by_kind.items():
        merged += alike if len(alike) == 1 else _MERGES.get(kind, list)(alike)
    if len(merged) == 1:
        return merged[0]
    first = merged[0]
    return Sum(merged, torch.empty(first.n, 0, dtype=first.dtype, device=first.device), first.shape)


def _expect_alike(name: str, shapes: Sequence[tuple[Any, ...]]) -> None:
    """Raise InputError unless there is at least one shape, and all are the same."""
    if len(set(shapes)) != 1:
        raise InputError(f"psg.factors.{name}: expected factors of one shape, at least one of them, got {list(shapes)}.")


def _added(terms: list[Dense]) -> list[Factor]:
    return [Dense(sum([term.values for term in terms[1:]], start=terms[0].values))]


def _joined(terms: Sequence[Factor]) -> list[Factor]:
    """Terms of one kind; those of the same constants and, but for their positions, the same sizes are one over the positions of all."""
    groups: list[list[Factor]] = []
    for term in terms:
        own = next((own for own in groups if _can_join(own[0], term)), None)
        groups.append([term]) if own is None else own.append(term)
    return [own[0] if len(own) == 1 else _over_all_positions(own) for own in groups]


def _can_join(one: Factor, other: Factor) -> bool:
    # Compared, not looked up in a table: in a trace sizes may be symbols.
    same = all(getattr(one, name) == getattr(other, name) for name in one.constants)
    return same and all(getattr(one, name).shape[2:] == getattr(other, name).shape[2:] for name in one.fields)


def _over_all_positions(terms: Sequence[Factor]) -> Factor:
    first = terms[0]
    sides = [torch.cat([getattr(term, name) for term in terms], dim=1) for name in first.fields]
    return type(first)(*sides, *(getattr(first, name) for name in first.constants))


_MERGES: dict[type[Factor], Callable[[list[Any]], Sequence[Factor]]] = {
    Conv: _joined,
    Dense: _added,
    Entries: lambda terms: merge_entries(terms, merge),
    Outer: _joined,
    Routed: _joined,
    Rows: lambda terms: _joined(merge_rows(terms)),
    Scaled: merge_scaled,
    Views: lambda terms: merge_views(terms, merge),
}
"""How `merge` puts several terms of one kind together; those of other kinds remain."""


def concat(factors: Sequence[Factor]) -> Factor:
    """Concatenate the samples of several factors.

    Factors of one kind whose sums have different numbers of terms are filled up with zeros. The result is Dense if the kinds differ, or if
    that takes less memory.

    Args:
        factors: At least one, of the same shape.

    Returns:
        The factor of all samples.

    Raises:
        InputError: There are no factors, or they differ in shape.

    Example:
        >>> concat([Dense(torch.zeros(2, 3)), Dense(torch.ones(1, 3))])
        Dense(n=3, shape=(3,), dtype=torch.float32)
    """
    _expect_alike("concat", [("n", *factor.shape) for factor in factors])
    parts, specs = zip(*(optree.tree_flatten(cast(Any, factor)) for factor in factors), strict=True)
    if all(spec == specs[0] for spec in specs):
        columns = list(zip(*parts, strict=True))
        if not all(map(_are_alike, columns)) and sum(map(_filled_bytes, columns)) <= sum(factor.dense_bytes for factor in factors):
            columns = list(zip(*(optree.tree_leaves(cast(Any, factor)) for factor in _filled_up(factors)), strict=True))
        if all(map(_are_alike, columns)):
            return cast(Factor, optree.tree_unflatten(specs[0], [one_after_another(column) for column in columns]))
    return Dense(torch.cat([factor.materialize() for factor in factors]))


def _are_alike(column: Sequence[Tensor]) -> bool:
    """Whether one field of several factors differs in the number of samples alone."""
    return len({part.shape[1:] for part in column}) == 1


def _filled_bytes(column: Sequence[Tensor]) -> int:
    """The bytes that one field of several factors takes if each is filled up to the largest, and all samples of a factor may share it."""
    is_shared = any(len(part) > 1 for part in column) and all(map(is_one_row, column))
    sizes = [max(sizes) for sizes in zip(*(part.shape[1:] for part in column), strict=True)]
    return math.prod(sizes) * column[0].itemsize * (1 if is_shared else sum(map(len, column)))


def _filled_up(factors: Sequence[Factor]) -> list[Factor]:
    """The same factors, all of one kind, with as many terms each: zeros are appended to sums of fewer."""
    kind = type(factors[0])
    columns: list[Sequence[Any]] = []
    for name in kind.fields:
        held = [getattr(factor, name) for factor in factors]
        if name in kind.summed:
            most = max(field.shape[1] for field in held)
            held = [F.pad(field, (0, 0) * (field.ndim - 2) + (0, most - field.shape[1])) for field in held]
        elif isinstance(held[0], Factor):
            held = _filled_up(held)
        elif isinstance(held[0], tuple):  # of factors
            parts = [_filled_up(column) for column in zip(*held, strict=True)]
            held = [tuple(column[i] for column in parts) for i in range(len(held))]
        columns.append(held)
    return [kind(*fields, *(getattr(factors[0], name) for name in kind.constants)) for fields in zip(*columns, strict=True)]


# So that `torch.load` reads saved factors with its default `weights_only=True`.
_SAVED = [Conv, Dense, Entries, Expanded, Geometry, Outer, Region, Routed, Rows, Scaled, Segments, Sum, Views]
for _kind in _SAVED:
    _kind.__module__ = __name__  # saved files hold this name
torch.serialization.add_safe_globals(_SAVED)
