"""Outer: a sum over positions of outer products, the gradient of every matrix product."""

import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from psg._errors import InputError
from psg._hardware import _fused, _machine, _matmul
from psg._torch import _functorch
from psg.factors._arithmetic import HALF, WIDENING, norm_of_norms, scale_rows, spacious, square, squared_terms_of, wide, wide_bmm, widen
from psg.factors._base import Dense, expect_real
from psg.factors._planned import Costs, Planned, remembered
from psg.factors._sketch import Sketch


class Outer(Planned):
    """gradient[n, a, b] = sum_t left[n, t, a] right[n, t, b].

    Of y = x W^T the gradient for W is `Outer(cotangent, input)`; of y = x W it is `Outer(input, cotangent)`.

    Args:
        left: [n, t, a].
        right: [n, t, b], of the same dtype.

    Raises:
        InputError: Their shapes do not fit, or they are complex.

    Example:
        >>> import torch
        >>> gradient = Outer(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]]))  # one sample, one position
        >>> gradient.materialize(), gradient.norm().square()
        (tensor([[[3., 4.],
                 [6., 8.]]]), tensor([125.]))

    Source: Goodfellow, "Efficient Per-Example Gradient Computations", 2015 (one position); Li et al., "Large Language Models Can Be
    Strong Differentially Private Learners", 2022, section 4 (positions, the Gram form of the norm).
    """

    fields = ("left", "right")
    summed = fields

    def __init__(self, left: Tensor, right: Tensor) -> None:
        if left.ndim != 3 or right.ndim != 3 or left.shape[:2] != right.shape[:2]:
            shapes = f"{tuple(left.shape)} and {tuple(right.shape)}"
            raise InputError(f"psg.factors.Outer: expected [n, t, a] and [n, t, b], got {shapes}; a single position is [n, 1, a].")
        self.left = left
        self.right = right
        expect_real(self, left, right)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.left.shape[2], self.right.shape[2]))

    @property
    def positions(self) -> int:
        """The number of terms t of the sum."""
        return self.left.shape[1]

    @property
    def is_product(self) -> bool:
        """Whether each sample's gradient is one outer product."""
        return self.left.shape[1] == 1

    @property
    def _is_multiplied(self) -> bool:
        """Whether it is materialised entry by entry."""
        return self.is_product and _matmul.multiplies(self.left.device, *self.shape)

    @property
    def _lead(self) -> Tensor:
        return self.left

    def materialize(self) -> Tensor:
        if self._is_multiplied:
            return self.left.mT * self.right
        return _matmul.cross(self.left, self.right)

    def write_to(self, out: Tensor) -> None:
        if self.is_differentiated or _functorch.is_traced():
            super().write_to(out)
        elif self._is_multiplied:
            torch.mul(self.left.mT, self.right, out=out)
        else:
            torch.bmm(self.left.mT, self.right, out=out)

    def add_to(self, out: Tensor) -> None:
        if self._is_multiplied:
            out.addcmul_(self.left.mT, self.right)
        else:
            out.baddbmm_(self.left.mT, self.right)

    def norm(self) -> Tensor:
        if not self.is_product or self.is_differentiated:
            return super().norm()
        left, right = [norm_of_norms(Dense(side.squeeze(1)).partial_norms()) for side in (self.left, self.right)]
        return left * right if _are_safe(left, right) else self._product(Dense.norm)

    def squared_norm(self) -> Tensor:
        return self._product(Dense.squared_norm) if self.is_product else super().squared_norm()

    @property
    def _is_fused(self) -> bool:
        """Whether a kernel adds up products of inner products that it never writes."""
        return not self.is_differentiated and _fused.takes_gram(self.left, self.right)

    @property
    def _is_planned(self) -> bool:
        return not self.is_product  # without samples or positions too: of these the plans give zeros that have derivatives

    def _product(self, reduce: Callable[[Dense], Tensor]) -> Tensor:
        # The squares of one side may underflow and those of the other overflow, although the gradient itself is of ordinary size.
        left, right = (reduce(Dense(side.squeeze(1).to(spacious(side)))) for side in (self.left, self.right))
        return (left * right).to(wide(self.dtype))

    def _gram_sums(self) -> tuple[Tensor, Tensor]:
        # sum_{t,s} <left_t, left_s> <right_t, right_s>
        if self._is_fused:
            squared, squared_terms = _fused.gram_sums(self.left, self.right).unbind(1)
            return squared, squared_terms
        left, right = (_matmul.whole_rows(side, self.positions) for side in (self.left, self.right))
        left, right = wide_bmm(left, left.transpose(1, 2)), wide_bmm(right, right.transpose(1, 2))
        return (left * right).sum((1, 2)), squared_terms_of(left, right)

    def squared_terms(self) -> Tensor:
        left, right = map(_squares_of_rows, (self.left, self.right))
        return (left * right).sum(1)

    def _chunked_norm(self) -> Tensor:
        # Materialised a few samples at a time: the memory is reused and, on a CPU, the norm reads from cache.
        size = _machine.items_at_a_time(self.device, self.sample_bytes)
        few, many = sorted((self.left, self.right), key=lambda side: side.shape[2])  # the order in which products take less time
        chunks = zip(few.transpose(1, 2).split(size), many.split(size), strict=True)
        return torch.cat([Dense(wide_bmm(left, right)).squared_norm() for left, right in chunks])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        dtype = self.left.dtype
        # In float16 a side times its weights may leave the range, even where the sum does not.
        if dtype == torch.float16 or dtype == torch.bfloat16 and self.device.type not in WIDENING:
            return self.to(torch.float32).weighted_sum(weights)
        return _summed(*self._scaled(weights))

    def _scaled(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Both sides, the smaller one times the weights."""
        if self.left.shape[2] <= self.right.shape[2]:
            return scale_rows(self.left, weights), self.right
        return self.left, scale_rows(self.right, weights)

    @property
    def is_zeroed_in_sums(self) -> bool:
        """Whether `weighted_sum_of` leaves samples out by a kernel, and does not zero them in the factor's tensors."""
        return not self.is_differentiated and _fused.takes_product(self.left)

    def weighted_sum_of(self, weights: Tensor, keep: Tensor, finite: Tensor) -> Tensor:
        if not self.is_zeroed_in_sums or weights.requires_grad:
            return super().weighted_sum_of(weights, keep, finite)
        # Zero times a finite number is zero: only samples that are not finite must be left out.
        left, right = self._scaled(weights)
        return _fused.without_spoiled(_summed(left, right), left, right, finite)

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        if not self.is_product:
            return super().moment_sums()
        left, right = widen(self.left.squeeze(1)), widen(self.right.squeeze(1))
        return left.T @ right, square(left).T @ square(right)

    def project(self, sketch: Sketch) -> Tensor:
        touched = self.positions * (sum(self.shape) + sketch.dim)
        return sketch.outer(self.left, self.right) if touched < self.shape.numel() else super().project(sketch)

    def dot(self, direction: Tensor) -> Tensor:
        left, right = widen(self.left), widen(self.right)
        return ((left @ direction.to(left.dtype)) * right).sum((1, 2))

    def plan(self) -> str:
        return _PLANS[self._plan()]

    def _plan(self, more: float = 0) -> str:
        return "product" if self.is_product and not more else super()._plan(more)

    # Costs, in operations for one sample

    @remembered
    def _norm_costs(self) -> Costs:
        t, byte = self.positions, _machine.reused_byte(self.device, self.dtype)
        if self._is_fused:
            gram = _fused.gram_cost(t, sum(self.shape), self.dtype)
        else:
            gram = t * t * (2 * sum(self.shape) + 3 * byte * self.left.element_size())
        return {"gram": gram, "chunks": self._chunks_cost(byte)}

    def _materialize_cost(self) -> float:
        return 2 * self.positions * self.shape.numel()

    def _sum_cost(self) -> float:
        return self._materialize_cost() + (0 if self.is_zeroed_in_sums else self._masking_cost())

    def _kernels(self) -> Hashable:
        return (self.is_zeroed_in_sums, self._is_fused) if self.left.is_cuda else ()


def _squares_of_rows(side: Tensor) -> Tensor:
    """sum_a |side[n, t, a]|^2 -> [n, t], in at least float32."""
    if side.is_cpu and side.shape[2] > 1 and side.stride(2) != 1:
        return square(side).sum(2)  # vector_norm reads rows whose entries lie apart one by one, in up to ten times as long
    return torch.linalg.vector_norm(side, dim=2, dtype=wide(side.dtype)).square()  # reads once and writes nothing


def _summed(left: Tensor, right: Tensor) -> Tensor:
    """sum_{n,t} left[n, t, a] right[n, t, b] -> [a, b], in at least float32."""
    outs, ins = left.shape[2], right.shape[2]
    left, right = _matmul.whole_rows(left.flatten(0, 1), ins), _matmul.whole_rows(right.flatten(0, 1), outs)
    total = wide_bmm(left.T[None], right[None])[0] if left.dtype in HALF else _matmul.cross(left, right)
    return total if total.shape == (outs, ins) else total[:outs, :ins].contiguous()


# sqrt(tiny / eps): in the float32 square of a norm above this, terms that are eps times smaller than the whole still count.
_LEAST = (torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps) ** 0.5


def _are_safe(left: Tensor, right: Tensor) -> bool:
    """Whether no square underflowed or overflowed in these norms, [n]. False where asking would wait for a device or break a trace."""
    if left.dtype == torch.float64 or left.numel() == 0:
        return True
    if not (_functorch.can_read_now(left) and _functorch.can_read_now(right)):
        return False
    least, most = torch.cat((left, right)).aminmax()
    return least.item() > _LEAST and most.item() < math.inf


_PLANS = {
    "product": "product of norms, one matrix product",
    "keep": "materialised and kept",
    "gram": "Gram, one matrix product",
    "chunks": "materialised in chunks, one matrix product",
}
