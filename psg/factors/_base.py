"""The operations of every kind of factor. A factor stands for a tensor [n, *shape] of per-sample gradients.

Index legend, here and in the other files of psg.factors: n, m samples; t, s positions; a, b rows and columns of a matrix; d features;
i in, o out; g group; k kernel.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import reduce
from typing import Any, NamedTuple, Self

import optree.registry
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from psg import _trees
from psg._errors import InputError
from psg._hardware import _machine, _matmul
from psg._torch import _functorch
from psg.factors._arithmetic import (
    HALF,
    add_up,
    gather_groups,
    matrices,
    norm_of_norms,
    real_rows,
    root,
    rows_of,
    square,
    straight,
    wide,
    widen,
    zero_rows,
)
from psg.factors._division import Division
from psg.factors._sketch import Sketch

_TINY = 1 << 18  # to materialise this many bytes of gradients takes less time than to call the ops for segments or norms of factors
_LARGE = 1 << 14  # on a CPU, gradients of at least this many entries are squared and added in one fused pass

# In units of eps * squared_terms (see `Factor.recover`): squared norms below _LOST lack digits that a norm needs; rounding is at most
# _ROUNDING. Where terms repeat, the errors of their inner products do too, and add up with the number of terms t. Matrix products add up
# runs of some 400 numbers one after another, so the errors of inner products grow with the root of their length up to that. In all that
# makes up to 5 t, measured for lengths from 30 to 16384; _ROUNDING allows 8 t, since from _FEW terms on both limits grow with t.
_LOST = 1 << 17
_ROUNDING = 1 << 8
_FEW = 1 << 5

BOUNDING: ContextVar[bool] = ContextVar("psg_bounding", default=False)
"""Whether eager calls too raise norms that they could compute exactly: for comparison with a trace, which cannot ask where to."""


def _floating_only(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function for floating and complex tensors; integer tensors (indices) stay as they are."""
    return lambda tensor: function(tensor) if _trees.is_inexact(tensor) else tensor


def expect_real(factor: "Factor", *tensors: Tensor) -> None:
    """Raise InputError if a factor's tensor is complex: only Dense takes a complex entry for a pair of real numbers."""
    if any([tensor.is_complex() for tensor in tensors]):
        raise InputError(f"psg.factors.{type(factor).__name__}: only Dense takes complex gradients: pass them to psg.factors.Dense.")


def indices_below(count: int, index: Tensor, factor: "Factor") -> Tensor:
    """The index of a factor in 64 bits.

    Raises:
        InputError: It does not hold integers in [0, count), which is checked where reading them is free. One beyond the rows of a sample
            would be a row of the next sample's.
    """
    name = f"psg.factors.{type(factor).__name__}"
    if _trees.is_inexact(index):
        raise InputError(f"{name}: expected an index of integers, got {index.dtype}.")
    index = index.long()
    if index.numel() and _functorch.can_read_now(index):
        least, most = (bound.item() for bound in torch.aminmax(index))
        if least < 0 or most >= count:
            raise InputError(f"{name}: expected an index of integers in [0, {count}), got integers from {least} to {most}.")
    return index


def _register(kind: "type[Factor]") -> None:
    """Register a kind as a pytree node, so that tree_map sees its tensors and `concat` can join its samples."""

    # The fields are the node's children; the constants (rows, geometry, shape) are its metadata.
    def flatten(factor: Any) -> Any:
        return [getattr(factor, name) for name in kind.fields], tuple(getattr(factor, name) for name in kind.constants)

    def unflatten(metadata: Any, children: Any) -> Any:
        factor = kind.__new__(kind)
        for name, value in (*zip(kind.fields, children, strict=True), *zip(kind.constants, metadata, strict=True)):
            setattr(factor, name, value)
        for name in kind.integers:
            held = getattr(factor, name)
            if isinstance(held, Tensor) and held.is_floating_point():
                raise InputError(
                    f"psg.factors.{kind.__name__}: the integers in `{name}` were converted to {held.dtype}, which would round them. "
                    "Convert the factors of a tree by their own method: optree.tree_map(lambda leaf: leaf.to(dtype), tree, "
                    "is_leaf=psg.factors.is_factor)."
                )
        return factor

    # In optree's global namespace: a user's plain `optree.tree_map` sees the tensors too.
    everywhere = vars(optree.registry)["__GLOBAL_NAMESPACE"]
    register: Any = optree.register_pytree_node  # its type hints allow collections alone
    register(kind, lambda factor: (*flatten(factor), kind.fields), unflatten, namespace=everywhere)
    torch_pytree.register_pytree_node(kind, flatten, lambda children, metadata: unflatten(metadata, children))


class Work(NamedTuple):
    """What a factor takes as one term of several, in operations for one sample."""

    norm: float
    """Its own squared norm, in the cheapest way."""
    gram: float
    """Inner products with the positions of a term like it; inf if its inner products with other terms take gradients."""
    materialize: float
    sum: float
    """A weighted sum that leaves samples out."""


class Factor(ABC):
    """A per-sample gradient tensor [n, *shape] in factored form.

    Every kind is a pytree node, to optree and to torch: tree_map sees the tensors. All kinds have the same operations. No operation but
    `materialize` makes the whole gradient, unless that is the cheapest way to the result. Reductions accumulate in float32 or better; under
    autocast call them by `psg.tree`, which switches it off.

    Attributes:
        fields: Names of the attributes that hold the data: tensors with the samples in dim 0, factors, tuples of factors. The constructor
            takes the fields in this order, then the constants.
        constants: Names of the other constructor arguments, which are the same for all samples.
        integers: Names of the fields that hold integers, and must go on to do so.
        summed: Names of the fields whose dim 1 the gradient is a sum over, so that zeros may be appended there.
    """

    fields: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _register(cls)

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape of one sample's gradient: that of the parameter."""

    @property
    @abstractmethod
    def _lead(self) -> Tensor:
        """A tensor with the samples in dim 0, and with the gradient's dtype and device."""

    @property
    def n(self) -> int:
        """The number of samples."""
        return self._lead.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `materialize()`."""
        return self._lead.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._lead.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the factor holds."""
        return sum([held.nbytes for held in self._held()])

    @property
    def sample_bytes(self) -> int:
        """The bytes of one sample's materialised gradient."""
        return self.shape.numel() * self._lead.dtype.itemsize

    @property
    def dense_bytes(self) -> int:
        """The bytes of the materialised gradients."""
        return self.n * self.sample_bytes

    @property
    def is_differentiated(self) -> bool:
        """Whether results computed from this factor may be differentiated."""
        return _functorch.transform_active() or self._requires_grad()

    def _requires_grad(self) -> bool:
        """Whether one of the tensors does."""
        for held in self._held():
            if held.requires_grad if isinstance(held, Tensor) else held._requires_grad():
                return True
        return False

    def _held(self) -> "list[Tensor | Factor]":
        """The tensors and factors in the fields."""
        found: list[Tensor | Factor] = []
        for name in self.fields:
            field = getattr(self, name)
            found += field if isinstance(field, tuple) else (field,)
        return found

    def _each(self, of_tensor: Callable[[Tensor], Tensor], of_factor: "Callable[[Factor], Factor]") -> Self:
        """The same kind, with `of_tensor` applied to the tensors that it holds, `of_factor` to the factors; itself if none changes."""
        made: list[Any] = []
        same = True
        for name in self.fields:
            held = getattr(self, name)
            if isinstance(held, tuple):
                made.append(tuple([of_tensor(part) if isinstance(part, Tensor) else of_factor(part) for part in held]))
            else:
                made.append(of_tensor(held) if isinstance(held, Tensor) else of_factor(held))
            same = same and made[-1] is held
        if same:
            return self
        for name in self.constants:
            made.append(getattr(self, name))
        return type(self)(*made)

    @abstractmethod
    def materialize(self) -> Tensor:
        """The tensor itself: [n, *shape]."""

    def write_to(self, out: Tensor) -> None:
        """Write the gradients into a tensor [n, *shape] of their dtype, whose rows may be apart in memory."""
        out.copy_(self.materialize())

    def add_to(self, out: Tensor) -> None:
        """Add the gradients to a tensor [n, *shape] of their dtype, which nobody differentiates."""
        out += self.materialize()

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """sum over all entries of |gradient|^2 -> [n], real, at least float32, never negative."""

    @property
    def positions(self) -> int:
        """The number of terms of the sum that the gradient is."""
        return 1

    def squared_terms(self) -> Tensor:
        """sum over the terms of the gradient of |term|^2 -> [n]: rounding errors of sums of their inner products are proportional to it."""
        return self.squared_norm()

    def squared_norm_and_terms(self) -> tuple[Tensor, Tensor]:
        """Both, computed once where they are one."""
        return self.squared_norm(), self.squared_terms()

    @property
    def prefers_exact_norm(self) -> bool:
        """Whether the gradients are so small that to materialise them costs next to nothing, where `recover` could only bound a norm."""
        return not _functorch.can_read_now(self._lead) and self.dense_bytes <= _TINY

    def recover(self, squared: Tensor, squared_terms: Tensor) -> Tensor:
        """Correct squared norms [n] that were summed from inner products of terms, for samples whose terms nearly cancel.

        There rounding errors dominate the sum, and a norm that comes out too small would let the sample escape clipping. The norms of
        these samples are computed from their materialised gradients, and so are those of samples of which inner products of one side
        underflow, though the other side may be large. Where finding these samples would wait for a device, or cannot be traced, norms are
        raised by the largest possible rounding error.
        """
        return recover_all([self], [(squared, squared_terms)])[0]

    def _recover(self, squared: Tensor, suspects: Tensor) -> Tensor:
        """Compute the squared norms of the samples that a mask [n] selects from their gradients."""
        # A sample whose terms are all zero, like one with a hinge loss of zero, has the norm zero. (Products with infinities gave NaN.)
        lost = suspects.clone()
        lost[suspects] = self.take(suspects).to(torch.float64).squared_terms() != 0
        squared = squared.masked_fill(suspects & ~lost, 0)
        if not lost.any():
            return squared
        return squared.masked_scatter(lost, self.take(lost).to(wide(self.dtype)).materialized_norm())

    def unchecked_norm(self) -> tuple[Tensor, Tensor] | None:
        """What `recover` takes to the squared norm, if that is how the norm is computed; else None."""
        return None

    def materialized_norm(self) -> Tensor:
        """`squared_norm` from the gradients, materialised a few samples at a time."""
        return torch.cat([Dense(part).squared_norm() for part in self.parts()])

    def norm(self) -> Tensor:
        """The square root of `squared_norm` -> [n]."""
        return root(self.squared_norm()) if self.is_differentiated else self.squared_norm().sqrt()

    def partial_norms(self) -> list[Tensor]:
        """Norms of parts of the gradient, as matrices [n, k]; `norm_of_norms` of them is the norm of the whole."""
        return [self.norm().unsqueeze(1)]

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """sum_n weights[n] gradient[n] -> shape, in at least float32."""

    def weighted_sum_of(self, weights: Tensor, keep: Tensor, finite: Tensor) -> Tensor:
        """`weighted_sum` over the samples where keep[n] is True, exactly, even if others hold inf or NaN.

        Args:
            weights: [n], zero where keep[n] is False.
            keep: Booleans [n].
            finite: Booleans [n], whether the norm is finite; True wherever keep[n] is.
        """
        return self.zero(keep).weighted_sum(weights)

    def moment_sums(self) -> tuple[Tensor, Tensor]:
        """sum_n gradient[n] and, real, sum_n |gradient[n]|^2, both entry by entry -> shape, in at least float32."""
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        squares = torch.zeros(self.shape, dtype=total.dtype.to_real(), device=self.device)
        # Nothing may write into a tensor that a derivative, a transform or a tracer watches.
        watched = self.is_differentiated or _functorch.is_watched()
        add, addcmul = (torch.add, torch.addcmul) if watched else (Tensor.add_, Tensor.addcmul_)
        for part in map(widen, self.parts()):
            total = add(total, part.sum(0))
            if self.shape.numel() < _LARGE or part.device.type != "cpu" or part.is_complex():
                squares = add(squares, square(part).sum(0))
            else:
                squares = reduce(lambda sum, gradient: addcmul(sum, gradient, gradient), part, squares)
        return total, squares

    def project(self, sketch: Sketch) -> Tensor:
        """The sketch of each sample's gradient -> [n, dim], real, at least float32."""
        return torch.cat([sketch.matrices(matrices(part)) for part in self.parts()])

    def parts(self, chunks: int = 4) -> Iterator[Tensor]:
        """Yield the gradients materialised, a few samples at a time, in order; at least one part."""
        # Four times the cache: with parts of single samples, products would leave some of four cores idle.
        size = _machine.items_at_a_time(self.device, self.sample_bytes, chunks)
        return (self.take(slice(start, start + size)).materialize() for start in range(0, max(1, self.n), size))

    def sparse_sum(self, weights: Tensor) -> Tensor:
        """`weighted_sum`; for Rows (embeddings) as a coalesced sparse tensor."""
        return self.weighted_sum(weights)

    @abstractmethod
    def dot(self, direction: Tensor) -> Tensor:
        """<gradient[n], direction> -> [n], for a direction of the parameter's shape."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same kind with `function` applied to every tensor that has the samples in dim 0."""
        return self._each(function, lambda factor: factor.map(function))

    def regroup(self, table: Tensor) -> "Factor":
        """Sum the gradients of groups of samples.

        Args:
            table: [m, k], the samples of each of m groups; the index n, one past the last, stands for no sample.

        Returns:
            The factor of m samples.
        """
        kept = table < self.n
        owners = torch.arange(len(table), device=table.device)[:, None].expand(table.shape)[kept]
        # Gradients of a group may cancel, so they must not be rounded one by one.
        return Dense(add_up(self.take(table[kept]).to(wide(self.dtype)).parts(), owners, len(table)).to(self.dtype))

    def segment_sum(self, ids: Tensor, count: int) -> "Factor":
        """Sum the gradients of segments of the samples.

        Args:
            ids: Integers [n] in [0, count): the segment of each sample.
            count: The number of segments; those without samples have a sum of zero.

        Returns:
            The factor of `count` samples.
        """
        return self._segment_sum(Division(ids, count))

    def _segment_sum(self, division: Division) -> "Factor":
        size = self.dense_bytes
        if size <= _TINY and self.dtype not in HALF:  # in half precision, sums would be rounded or overflow
            return Dense(self.materialize())._segment_sum(division)
        # Of gradients no larger than their factor, the sums are smaller still.
        if size <= self.nbytes or _functorch.is_traced():
            return self._segments_materialized(division)
        return self._segments_factored(division)

    def _segments_materialized(self, division: Division) -> "Factor":
        # Gradients of a segment may cancel, so they must not be rounded one by one.
        return Dense(add_up(self.to(wide(self.dtype)).parts(), division.ids, division.count).to(self.dtype))

    def _segments_factored(self, division: Division) -> "Factor":
        """Not for traces, which cannot read the sizes of the segments."""
        from psg.factors._segments import divided

        return divided(self, division)

    def inner(self, other: "Factor") -> Tensor:
        """<gradient[n], other[n]> of the same sample -> [n]."""
        from psg.factors import _products  # imported here, as _products itself imports every kind

        return _products.inner(self, other)

    def gram(self, other: "Factor | None" = None) -> Tensor:
        """<gradient[n], other[m]> of every pair of samples -> [n, m]; with itself if `other` is None."""
        from psg.factors import _products

        return _products.gram(self, self if other is None else other)

    def take(self, index: Tensor | slice) -> Self:
        """The samples at `index` (a slice, integers [m] or a mask [n])."""
        return self._each(lambda tensor: tensor[index], lambda factor: factor.take(index))

    def zero(self, keep: Tensor) -> Self:
        """The same, with exactly zero for the samples where keep[n] is False, even if they held inf or NaN."""
        return self._each(_floating_only(lambda tensor: zero_rows(tensor, keep)), lambda factor: factor.zero(keep))

    def to(self, dtype: torch.dtype) -> Self:
        """The same in another floating dtype; InputError for anything else."""
        if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
            raise InputError(
                f"psg.factors.{type(self).__name__}.to({dtype!r}): expected a floating dtype. Move a tree to another device by "
                "optree.tree_map(lambda tensor: tensor.to(device), tree)."
            )
        return self._each(_floating_only(lambda tensor: tensor.to(dtype)), lambda factor: factor.to(dtype))

    def detach(self) -> Self:
        """The same without autograd history."""
        return self.map(Tensor.detach)

    @property
    def is_made_anew(self) -> bool:
        """Whether `materialize` writes into new memory, which nothing else refers to."""
        return False

    @property
    def prefers_dense_maps(self) -> bool:
        """Whether the gradient of a computed weight is best materialised before `psg.factors._maps` maps it to one of a parameter.

        Otherwise the map, and then the norm, each combine every position with a tensor of the parameter's shape.
        """
        return any(held.prefers_dense_maps for held in self._held() if isinstance(held, Factor))

    @property
    def is_kept(self) -> bool:
        """Whether a norm *and* a weighted sum are cheapest if the gradients are materialised once and kept."""
        return False

    def _work(self) -> Work | None:
        """What it takes as a term of a sum; None if that is always cheapest by inner products: few rows of a table, say."""
        return None

    def settle(self) -> "Factor":
        """The cheapest form for a norm and a weighted sum: Dense if `is_kept`, else the same kind with the factors in it settled."""
        if self.is_kept:
            return Dense(self.materialize())
        parts = any([not isinstance(held, Tensor) for held in self._held()])
        return self._each(lambda tensor: tensor, lambda factor: factor.settle()) if parts else self

    def plan(self) -> str:
        """How a norm and a weighted sum are computed from this factor, in a few words."""
        return "dense"

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and saved: not what has been computed from it, which `torch.load` may not know, or puts on another device."""
        return {name: getattr(self, name) for name in (*self.fields, *self.constants)}

    def __repr__(self) -> str:
        """Kind, samples and shape."""
        return f"{type(self).__name__}(n={self.n}, shape={tuple(self.shape)}, dtype={self.dtype})"


def recover_all(factors: Sequence[Factor], sums: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """`Factor.recover` for k factors with sums of one dtype, in one check for all -> [k, n].

    Example:
        >>> import torch
        >>> factor = Dense(torch.tensor([[3.0, 4.0]]))
        >>> recover_all([factor], [(torch.tensor([25.0]), torch.tensor([25.0]))])
        tensor([[25.]])
    """
    growth = [max(1, factor.positions / _FEW) for factor in factors]
    most = max(growth)
    squared = torch.stack([own for own, _ in sums])
    terms = torch.stack([own if rate == most else own * (rate / most) for (_, own), rate in zip(sums, growth, strict=True)])
    eps = torch.finfo(squared.dtype).eps * most
    # Not infinite, nor NaN, from infinite terms that cancel: of a large and a small side, the squares of one may overflow.
    fine = (squared >= _LOST * eps * terms) & (squared < math.inf)
    if BOUNDING.get() or not _functorch.can_read_now(squared):
        return torch.where(fine, squared, torch.add(squared.clamp(min=0), terms, alpha=_ROUNDING * eps))
    if fine.all():
        return squared
    checked = zip(factors, squared, fine, strict=True)
    return torch.stack([own if kept.all() else factor._recover(own, ~kept) for factor, own, kept in checked])


def cancel(factors: Sequence[Factor], norms: Tensor) -> bool:
    """Whether inner products of the terms of some sample's gradient lack digits that those of the gradient have; see `Factor.recover`.

    Args:
        factors: Of one gradient.
        norms: The norms over all of them, [n]. Where reading these would wait for a device or break a trace, the answer is False.
    """
    sums = [factor for factor in factors if factor.positions > 1]
    if not sums or BOUNDING.get() or not _functorch.can_read_now(norms):
        return False
    rounding = []
    for factor in sums:
        terms = factor.squared_terms()
        rounding.append(terms * (torch.finfo(terms.dtype).eps * max(1, factor.positions / _FEW)))
    return bool((norms.square() < _LOST * reduce(torch.add, rounding)).any())


class Additive(Factor):
    """A factor whose gradient is a sum, over the positions in dim 1 of its tensors or over other factors."""

    def regroup(self, table: Tensor) -> Factor:
        # The gradient of a group is the sum over the positions of all its samples.
        return self._each(lambda tensor: gather_groups(tensor, table), lambda factor: factor.regroup(table))


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

    def norm(self) -> Tensor:
        return super().norm() if self.is_differentiated else norm_of_norms(self.partial_norms())

    def partial_norms(self) -> list[Tensor]:
        dtype = wide(self.values.dtype.to_real())
        if self.values.ndim == 2 and self.values.shape[1] < _BLOCK and not self.values.is_complex():
            return [torch.linalg.vector_norm(self.values, dim=1, keepdim=True, dtype=dtype)]
        # Block by block: one float32 sum over a million squares is off by 1e-5, and a norm must not be.
        rows = real_rows(straight(self.values)[0])
        head = rows.shape[1] // _BLOCK * _BLOCK
        parts = [torch.linalg.vector_norm(rows[:, :head].unflatten(1, (-1, _BLOCK)), dim=2, dtype=dtype)] if head else []
        if head < rows.shape[1] or not head:
            parts.append(torch.linalg.vector_norm(rows[:, head:], dim=1, keepdim=True, dtype=dtype))
        return parts

    def weighted_sum(self, weights: Tensor) -> Tensor:
        values, order = straight(self.values)
        values = widen(values)
        if weights.dtype != values.dtype:
            weights = weights.to(values.dtype)
        total = _matmul.sum_rows(rows_of(values), weights)
        if values.ndim != 2:
            total = total.reshape(values.shape[1:])
        return total if order is None else total.permute(order).contiguous()

    def dot(self, direction: Tensor) -> Tensor:
        return widen(real_rows(self.values)) @ widen(real_rows(direction[None].to(wide(self.dtype)))[0])

    @property
    def is_kept(self) -> bool:
        return True

    def _work(self) -> Work:
        read = _machine.reused_byte(self.device, self.dtype) * self.sample_bytes
        return Work(read, math.inf, read, read)

    def settle(self) -> Factor:
        return self

    def regroup(self, table: Tensor) -> Factor:
        return Dense(gather_groups(self.values.unsqueeze(1), table).sum(1))

    def _segment_sum(self, division: Division) -> Factor:
        values, order = straight(self.values)
        total = add_up([values], division.ids, division.count).to(self.dtype)
        return Dense(total if order is None else total.permute(0, *(1 + dim for dim in order)))
