"""Views: gradients of disjoint views of a parameter: slices, layers of a stack, a reshape."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from psg import plans
from psg._hardware import _machine, _memory
from psg.factors._base import Additive, Factor, Work


def strides_of(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    return tuple(shape[k + 1 :].numel() for k in range(len(shape)))


class Region(NamedTuple):
    """The size, strides and offset of a view of a contiguous parameter; no two entries of the view coincide.

    Example:
        >>> import torch
        >>> Region(size=(2,), stride=(3,), offset=1).of(torch.arange(6).reshape(2, 3))  # its second column
        tensor([1, 4])
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a contiguous tensor of the parameter's shape."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def of_each(self, values: Tensor) -> Tensor:
        """The views of contiguous tensors [n, *shape]."""
        n, *shape = values.shape
        stride = torch.Size(shape).numel(), *self.stride
        return values.as_strided((n, *self.size), stride, values.storage_offset() + self.offset)

    def is_apart(self, other: "Region", shape: torch.Size) -> bool:
        """Whether the two regions are known to share no entry."""
        own, others = self._bounding_box(shape), other._bounding_box(shape)
        if own is None or others is None:
            return False
        return any(stop <= begin or end <= start for (start, stop), (begin, end) in zip(own, others, strict=True))

    def transposed(self, shape: torch.Size) -> "Region | None":
        """The same entries of the transposed matrix, if that of this shape is; None for a view that merges dimensions."""
        if self._bounding_box(shape) is None:
            return None
        rows, columns = shape
        stride, offset = (tuple(place % columns * rows + place // columns for place in places) for places in (self.stride, (self.offset,)))
        return Region(self.size, stride, offset[0])

    def _bounding_box(self, shape: torch.Size) -> list[tuple[int, int]] | None:
        """The view's range (start, stop) in each dimension of the parameter; None for a view that merges dimensions."""
        if shape.numel() == 0:
            return None
        strides = strides_of(shape)
        rest, starts = self.offset, []
        for stride in strides:
            start, rest = divmod(rest, stride)
            starts.append(start)
        stops = [start + 1 for start in starts]
        for size, stride in zip(self.size, self.stride, strict=True):
            if size == 1:
                continue
            k = next(k for k, own in enumerate(strides) if own <= stride)  # strides descend to 1
            if stride % strides[k]:
                return None
            stops[k] += (size - 1) * stride // strides[k]
            if stops[k] > shape[k]:
                return None
        return list(zip(starts, stops, strict=True))


_SMALL_PART = 8
"""How many times larger than the views the parameter has to be."""


class Views(Additive):
    """gradient[n] is zero except in disjoint views of the parameter, where it is the gradient of each view's factor.

    Args:
        factors: At least one, of the same samples.
        regions: For each factor, the view of the parameter that it fills.
        shape: The parameter's shape.

    Example:
        >>> import torch
        >>> from psg.factors import Dense
        >>> last_two = Region(size=(2,), stride=(1,), offset=1)
        >>> Views([Dense(torch.tensor([[5.0, 6.0]]))], [last_two], torch.Size([3])).materialize()
        tensor([[0., 5., 6.]])
    """

    fields = ("factors",)
    constants = ("regions", "_shape")

    def __init__(self, factors: Sequence[Factor], regions: Sequence[Region], shape: torch.Size) -> None:
        self.factors = tuple(factors)
        self.regions = tuple(regions)
        self._shape = torch.Size(shape)

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def _lead(self) -> Tensor:
        return self.factors[0]._lead

    def materialize(self) -> Tensor:
        if self.is_reshaped:
            return self.factors[0].materialize().reshape(self.n, *self.shape)
        if (order := self.order) is not None:
            return self.factors[0].materialize().permute(0, *(1 + order.index(dim) for dim in range(len(order))))
        values = self._empty_or_zeros(self._lead, self.n, *self.shape)
        for region, factor in zip(self.regions, self.factors, strict=True):
            factor.write_to(region.of_each(values))
        return values

    def _empty_or_zeros(self, like: Tensor, *shape: int) -> Tensor:
        """A tensor for all entries of the parameter: uninitialised if the views cover all of them, else zero."""
        return like.new_empty(shape) if self._covered == self.shape.numel() else _memory.new_zeros(like, *shape)

    @property
    def _covered(self) -> int:
        """How many entries of the parameter the views cover."""
        return sum(torch.Size(region.size).numel() for region in self.regions)

    def squared_norm(self) -> Tensor:
        return _added_up(factor.squared_norm() for factor in self.factors)

    @property
    def positions(self) -> int:
        return max(factor.positions for factor in self.factors)

    def partial_norms(self) -> list[Tensor]:
        return [norms for factor in self.factors for norms in factor.partial_norms()]

    def squared_terms(self) -> Tensor:
        return _added_up(factor.squared_terms() for factor in self.factors)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._placed([factor.weighted_sum(weights) for factor in self.factors])

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        totals, squares = zip(*(factor.moment_sums() for factor in self.factors), strict=True)
        return self._placed(totals), self._placed(squares)

    def _placed(self, sums: Sequence[Tensor]) -> Tensor:
        total = self._empty_or_zeros(sums[0], *self.shape)
        for region, part in zip(self.regions, sums, strict=True):
            region.of(total).copy_(part)
        return total

    def dot(self, direction: Tensor) -> Tensor:
        direction = direction.contiguous()
        pairs = zip(self.factors, self.regions, strict=True)
        return _added_up(factor.dot(region.of(direction)) for factor, region in pairs)

    @property
    def is_small_part(self) -> bool:
        """Whether the views cover so few entries that it takes next to nothing to find them in other gradients."""
        return _SMALL_PART * self._covered <= self.shape.numel()

    @property
    def is_reshaped(self) -> bool:
        """Whether there is one view, a reshape of the whole parameter."""
        region, size = self.regions[0], torch.Size(self.regions[0].size)
        return len(self.regions) == 1 and region.stride == strides_of(size) and size.numel() == self.shape.numel()

    @property
    def order(self) -> list[int] | None:
        """Which dimension of the parameter each of the view's is, if there is one view, of all dimensions in another order."""
        region, *others = self.regions
        own, wanted = _dims(self.shape, strides_of(self.shape)), _dims(region.size, region.stride)
        if others or sorted(own) != sorted(wanted):
            return None
        left = list(range(len(own)))
        return [left.pop([own[dim] for dim in left].index(found)) for found in wanted]

    @property
    def is_made_anew(self) -> bool:
        return self.factors[0].is_made_anew if self.is_reshaped or self.order is not None else True

    @property
    def is_kept(self) -> bool:
        # What lies beside the views is zero, and need not be kept.
        whole = self._covered == self.shape.numel() and plans.may_keep(self.dense_bytes)
        return whole and all(factor.is_kept for factor in self.factors)

    def settle(self) -> Factor:
        # The gradients of several views are kept apart: to join them would be to copy them.
        return super().settle() if self.is_reshaped else self._each(lambda tensor: tensor, lambda factor: factor.settle())

    def _work(self) -> Work | None:
        if self.is_small_part:
            return None
        works = [work for factor in self.factors if (work := factor._work()) is not None]
        if len(works) < len(self.factors):
            return None
        beside = _machine.reused_byte(self.device, self.dtype) * (self.shape.numel() - self._covered) * self.dtype.itemsize
        norm, gram, materialize, summed = map(sum, zip(*works, strict=True))
        return Work(norm, gram, materialize + beside, summed)

    def plan(self) -> str:
        return f"views: {', '.join(dict.fromkeys(factor.plan() for factor in self.factors))}"


def _dims(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """The size and the stride of each dimension, where it has any meaning."""
    return [(size, stride if size > 1 else 0) for size, stride in zip(sizes, strides, strict=True)]


def _added_up(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)


def merge_views(views: Sequence[Views], merge: Callable[[list[Factor]], Factor]) -> list[Views]:
    """Merge the factors of equal regions, and put disjoint regions into one Views."""
    shape = views[0].shape
    held: dict[Region, list[Factor]] = {}
    for view in views:
        for region, factor in zip(view.regions, view.factors, strict=True):
            held.setdefault(region, []).append(factor)
    rows: list[list[Region]] = []
    for region in held:
        row = next((row for row in rows if all(region.is_apart(other, shape) for other in row)), None)
        if row is None:
            rows.append([region])
        else:
            row.append(region)
    return [Views([merge(held[region]) for region in row], row, shape) for row in rows]
