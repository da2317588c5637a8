"""Dense: the per-sample gradient itself."""

import torch
from torch import Tensor

from psg import _matmul
from psg.factors._base import Factor, add_up, as_real, gather_groups, norm_of_norms, wide, widen
from psg.factors._division import Division

_BLOCK = 4096


class Dense(Factor):
    """The per-sample gradient tensor itself: for biases, normalisation layers, and whatever has no rule.

    Args:
        values: The per-sample gradients, [n, *shape].

    Example:
        >>> import torch
        >>> Dense(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).norm()
        tensor([5., 1.])
    """

    fields = ("values",)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[1:]

    @property
    def _lead(self) -> Tensor:
        return self.values

    def materialize(self) -> Tensor:
        return self.values

    def squared_norm(self) -> Tensor:
        if self.is_differentiated:
            return widen(real_rows(self.values)).square().sum(1)
        return self.norm().square()  # one read and no temporary, but no second derivative at zero

    def squared_terms(self) -> Tensor:
        return self.squared_norm()

    def norm(self) -> Tensor:
        return norm_of_norms(self.partial_norms())

    def partial_norms(self) -> list[Tensor]:
        dtype = wide(self.dtype.to_real())
        if self.values.ndim == 2 and self.values.shape[1] < _BLOCK and not self.values.is_complex():
            return [torch.linalg.vector_norm(self.values, dim=1, keepdim=True, dtype=dtype)]
        # Block by block: one float32 sum over a million squares is off by 1e-5, and a norm must not be.
        rows = real_rows(_straight(self.values)[0])
        head = rows.shape[1] // _BLOCK * _BLOCK
        parts = [torch.linalg.vector_norm(rows[:, :head].unflatten(1, (-1, _BLOCK)), dim=2, dtype=dtype)] if head else []
        if head < rows.shape[1] or not head:
            parts.append(torch.linalg.vector_norm(rows[:, head:], dim=1, keepdim=True, dtype=dtype))
        return parts

    def weighted_sum(self, weights: Tensor) -> Tensor:
        values, order = _straight(self.values)
        values = widen(values)
        if weights.dtype != values.dtype:
            weights = weights.to(values.dtype)
        total = _matmul.sum_rows(rows_of(values), weights)
        if total.dtype != self.dtype:
            total = total.to(self.dtype)
        if values.ndim != 2:
            total = total.reshape(values.shape[1:])
        return total if order is None else total.permute(order).contiguous()

    def dot(self, direction: Tensor) -> Tensor:
        return widen(real_rows(self.values)) @ widen(real_rows(direction[None].to(wide(self.dtype)))[0])

    @property
    def is_kept(self) -> bool:
        return True

    def settle(self) -> Factor:
        return self

    def regroup(self, table: Tensor) -> Factor:
        return Dense(gather_groups(self.values.unsqueeze(1), table).sum(1))

    def _segment_sum(self, division: Division) -> Factor:
        values, order = _straight(self.values)
        total = add_up([values], division.ids, division.count).to(self.dtype)
        return Dense(total if order is None else total.permute(0, *(1 + dim for dim in order)))


def _straight(values: Tensor) -> tuple[Tensor, list[int] | None]:
    """The values with the dimensions after the first sorted into memory order, and the inverse permutation (None for no change).

    In memory order a reduction reads sequentially and copies nothing.
    """
    if values.is_contiguous():
        return values, None
    order = sorted(range(1, values.ndim), key=lambda dim: -values.stride(dim))
    return values.permute(0, *order), [order.index(dim) for dim in range(1, values.ndim)]


def rows_of(values: Tensor) -> Tensor:
    """[n, *shape] -> [n, P], also for n = 0 and for scalars."""
    if values.ndim == 2:
        return values
    return values.reshape(values.shape[0], values.shape[1:].numel())


def real_rows(values: Tensor) -> Tensor:
    """[n, *shape] -> [n, P] or, of complex values, [n, 2 P]: the inner product of complex gradients is that of R^2."""
    return rows_of(as_real(values))
