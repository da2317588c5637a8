"""Reductions of several factors at once.

A model has many small parameters (biases, normalisation layers, all of a small model's). Reducing the gradient of one costs little more
than the overhead of the call, so these gradients are materialised, concatenated and reduced together.
"""

import cmath
import functools
import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from psg._torch import _functorch
from psg.factors._arithmetic import HALF, norm_of_norms, root, rows_of
from psg.factors._base import Dense, Factor, recover_all
from psg.factors._outer import Outer
from psg.factors._sketch import Sketch, sketch_side_by_side

_MIN_JOINED = 4  # joining fewer factors gains nothing
_MAX_HASHED = 256  # sketches of joined factors hash every entry, those of one factor only every row and every column


class Joint:
    """Several factors of one gradient, reduced together.

    Args:
        factors: At least one, of the same samples.

    Example:
        >>> import torch
        >>> both = Joint([Dense(torch.tensor([[3.0]])), Dense(torch.tensor([[4.0]]))])
        >>> both.norm, both.weighted_sums(torch.tensor([2.0]))
        (tensor([5.]), [tensor([6.]), tensor([8.])])
    """

    def __init__(self, factors: Sequence[Factor]) -> None:
        self.is_differentiated = _functorch.transform_active() or any([factor._requires_grad() for factor in factors])
        self._factors = list(factors)
        self._small = [] if self.is_differentiated else _worth_joining(factors)
        small = set(self._small)
        self._rest = [i for i in range(len(factors)) if i not in small]

    @cached_property
    def _parts(self) -> list[Factor]:
        """The other factors, then the small ones concatenated into one."""
        rest = [self._factors[i] for i in self._rest]
        if not self._small:
            return rest
        return [*rest, _side_by_side([self._factors[i] for i in self._small])]

    @cached_property
    def squared_norm(self) -> Tensor:
        """The squared norm over all factors, [n]."""
        return functools.reduce(torch.add, (part.squared_norm() for part in self._parts))

    @cached_property
    def norm(self) -> Tensor:
        """The norm over all factors, [n]."""
        # A norm of norms has no second derivative where a part is zero; the root of a sum of squares has.
        if self.is_differentiated:
            return root(self.squared_norm)
        parts: list[Tensor] = []
        unchecked: dict[torch.dtype, list[tuple[Factor, tuple[Tensor, Tensor]]]] = {}
        for part in self._parts:
            sums = part.unchecked_norm()
            if sums is None:
                parts += part.partial_norms()
            else:
                unchecked.setdefault(sums[0].dtype, []).append((part, sums))
        parts += [recover_all(*zip(*own, strict=True)).sqrt().T for own in unchecked.values()]
        return norm_of_norms(parts)

    def weighted_sums(self, weights: Tensor) -> list[Tensor]:
        """sum_n weights[n] gradient[n] of each factor."""
        return self._apart(sums_in_range([part.weighted_sum for part in self._parts], weights))

    def weighted_sums_of(self, weights: Tensor, keep: Tensor, finite: Tensor) -> list[Tensor]:
        """The same, over the samples where keep[n] is True; see `Factor.weighted_sum_of`."""
        sums = [functools.partial(part.weighted_sum_of, keep=keep, finite=finite) for part in self._parts]
        return self._apart(sums_in_range(sums, weights))

    def moment_sums(self) -> tuple[list[Tensor], list[Tensor]]:
        """The sum over n of gradient[n], and of |gradient[n]|^2, of each factor; see `Factor.moment_sums`."""
        totals, squares = zip(*(part.moment_sums() for part in self._parts), strict=True)
        return self._apart(list(totals)), self._apart(list(squares))

    def _apart(self, sums: list[Tensor]) -> list[Tensor]:
        """From one sum per part to one sum per factor."""
        if not self._small:
            return sums
        shapes = [self._factors[i].shape for i in self._small]
        copies = _split(sums.pop(), [shape.numel() for shape in shapes])
        sums += [copy if len(shape) == 1 else copy.reshape(shape) for copy, shape in zip(copies, shapes, strict=True)]
        found = dict(zip([*self._rest, *self._small], sums, strict=True))
        return [found[i] for i in range(len(self._factors))]


def sums_in_range(sums_of: Sequence[Callable[[Tensor], Tensor]], weights: Tensor) -> list[Tensor]:
    """Functions of weights [n] that are linear, each called with these.

    A factor multiplies one of its tensors by the weights. Weights above 1 may bring that beyond the range where the sum is within it: then
    they are divided by a power of two, the sum's unit. Where reading the sums would wait for a device or break a trace, they are not.

    Example:
        >>> outer = Outer(torch.tensor([[[1e38], [0.0]]]), torch.tensor([[[0.0], [1.0]]]))
        >>> outer.weighted_sum(torch.tensor([10.0])), sums_in_range([outer.weighted_sum], torch.tensor([10.0]))
        (tensor([[nan]]), [tensor([[0.]])])
    """
    sums = [sum_of(weights) for sum_of in sums_of]
    most = torch.linalg.vector_norm(weights.detach(), math.inf).item() if len(weights) and _functorch.can_read_now(weights) else 0
    if not 1 < most < math.inf:
        return sums
    unit = 2.0 ** math.frexp(most)[1]
    return [
        total if not _functorch.can_read_now(total) or cmath.isfinite(total.sum().item()) else sum_of(weights / unit) * unit
        for total, sum_of in zip(sums, sums_of, strict=True)
    ]


def _split(values: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The pieces of these sizes, each in memory of its own."""
    if values.is_cpu:
        return torch.split_with_sizes_copy(values, sizes)  # pyright: ignore[reportReturnType] (torch says None)
    # On an accelerator a multiplication by 1 copies all of them in one kernel.
    return torch._foreach_mul(values.split(sizes), 1)  # pyright: ignore[reportPrivateImportUsage]


def norm_of(joints: Sequence[Joint]) -> Tensor:
    """The norm over all factors of all joints, [n].

    Example:
        >>> import torch
        >>> norm_of([Joint([Dense(torch.tensor([[3.0]]))]), Joint([Dense(torch.tensor([[4.0]]))])])
        tensor([5.])
    """
    if len(joints) == 1:
        return joints[0].norm
    if any(joint.is_differentiated for joint in joints):
        return root(functools.reduce(torch.add, (joint.squared_norm for joint in joints)))
    return norm_of_norms([joint.norm.unsqueeze(1) for joint in joints])


def joined_pairs(pairs: Sequence[tuple[Factor, Factor]]) -> list[tuple[Factor, Factor]]:
    """The pairs, with those of small factors materialised and joined to one pair, whose inner products are the sums of theirs.

    Example:
        >>> import torch
        >>> small = Dense(torch.ones(1, 2))
        >>> joined_pairs([(small, small)] * 5)
        [(Dense(n=1, shape=(10,), dtype=torch.float32), Dense(n=1, shape=(10,), dtype=torch.float32))]
    """
    sides = list(zip(*pairs, strict=True))
    small = set.intersection(*(set(_worth_joining(side)) for side in sides))
    if len(small) < _MIN_JOINED:
        return list(pairs)
    x, y = ([side[i] for i in sorted(small)] for side in sides)
    left = _side_by_side(x)
    same = all([*map(id, own._held())] == [*map(id, other._held())] for own, other in zip(x, y, strict=True))
    joined = left, left if same else _side_by_side(y)
    return [*(pair for i, pair in enumerate(pairs) if i not in small), joined]


def total_sketch(factors: Sequence[Factor], sketches: Sequence[Sketch]) -> Tensor:
    """The sum over the factors of their sketches, one for each factor, [n, dim].

    Example:
        >>> import torch, random
        >>> total_sketch([Dense(torch.tensor([[3.0, 4.0]]))], [Sketch(1, random.Random(0))]).abs()
        tensor([[7.]])
    """
    small = [i for i in _worth_joining(factors) if factors[i].shape.numel() <= _MAX_HASHED]
    small = small if len(small) >= _MIN_JOINED else []
    rest = sorted(set(range(len(factors))).difference(small))
    parts = [factors[i].project(sketches[i]) for i in rest]
    if small:
        rows = _side_by_side([factors[i] for i in small]).values
        parts.append(sketch_side_by_side(rows, [sketches[i] for i in small], [factors[i].shape for i in small]))
    return functools.reduce(torch.add, parts)


def _side_by_side(factors: Sequence[Factor]) -> Dense:
    """Factors as one, [n, P]."""
    return Dense(torch.cat([rows_of(factor.materialize()) for factor in factors], dim=1))


def _worth_joining(factors: Sequence[Factor]) -> list[int]:
    """Indices of factors of one dtype and device that take no longer to materialise and copy than an op takes to call; none if too few."""
    held = [i for i, factor in enumerate(factors) if isinstance(factor, Dense) or _is_outer_product(factor)]
    if len(held) < _MIN_JOINED:
        return []
    first = factors[held[0]]._lead
    limit = (1 << (16 if first.device.type == "cpu" else 20)) // (first.shape[0] * first.dtype.itemsize or 1)
    small = []
    for i in held:
        lead = factors[i]._lead
        if lead.dtype == first.dtype and lead.device == first.device and factors[i].shape.numel() <= limit:
            small.append(i)
    return small if len(small) >= _MIN_JOINED and not first.is_complex() else []


def _is_outer_product(factor: Factor) -> bool:
    """Whether this is one outer product for each sample, and not of half precision, to which its entries would be rounded."""
    return isinstance(factor, Outer) and factor.is_product and factor.left.dtype not in HALF
