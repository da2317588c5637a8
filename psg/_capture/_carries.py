"""Values computed from parameters: how a factor of their gradient becomes factors of the parameters' gradients.

Examples are a merged low-rank update W + s B A, weights times a scale, a spectral norm. The derivative of an op on parameters is a linear
map, and for many ops its transpose maps a factor with few terms to such factors. If G = sum_t l_t r_t^T is the gradient of B A, that of B
is sum_t l_t (A r_t)^T and that of A is sum_t (B^T l_t) r_t^T. An elementwise op scales the entries of G; an op that reduces each row, or
all entries, to one number gives multiples c_n E of one tensor E. So G is never materialised.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call
from torch.overrides import TorchFunctionMode

from psg import _trees
from psg._capture._adjoints import ADJOINTS, FUSED, MOVING, multiple
from psg._capture._by_rows import ELEMENTWISE, is_row_by_row, over_rows
from psg._capture._estimators import entries_of
from psg._capture._steps import POINTWISE, Step, keepdim_shape, part_of, run_pullable
from psg._hardware import _machine
from psg._torch import _autograd, _functorch
from psg._torch._ops import LIKE_ANOTHER, is_mask, name_of
from psg.factors import Dense, Expanded, Factor, Scaled, Sum, merge
from psg.factors._arithmetic import is_one_row
from psg.factors._maps import read_at, scaled, table_of
from psg.rules._kernels import BATCH_NORMS
from psg.rules.repairs import householder_product

Carry = Callable[[Factor], list[list[Factor]] | None]
"""Maps a factor of the output's gradient to factors for each side, which add up; None if the gradient must be materialised."""


def carry_of(step: Step) -> Carry | None:
    """The map that carries factors over to the sides of a step; None if its output is not real floating-point."""
    output, sides = step.output, step.sides
    if not output.is_floating_point():
        return None
    if step.name == "custom_function_call":  # of no other function of the user's is it known that its backward is linear in the cotangent
        return _carry_of_estimator(step)
    try:
        known = ADJOINTS[step.name](output.detach(), *step.args, **step.kwargs) if step.name in ADJOINTS else []
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # not from the call itself, but from within
        known = []  # the table does not know this form of the call

    known += _writes(step)

    def over_to(side: Tensor, factor: Factor) -> list[Factor] | None:
        if step.name in LIKE_ANOTHER and not step.is_first(side):
            return []
        found = [carry(factor) for own, carry in known if own is side] or [None]
        if any(part is None for part in found):
            found = [_of_entries(step, side, factor)]
        return [part if part.dtype == side.dtype else part.to(side.dtype) for part in found if part is not None] or None

    # In float16 and float8 the sides of a factor may overflow or underflow where their product, which autograd computes first, does not.
    narrow = step.name not in MOVING and any(torch.finfo(tensor.dtype).max < _MOST for tensor in (output, *sides))

    def carry(factor: Factor) -> list[list[Factor]] | None:
        if narrow and not isinstance(factor, Dense):
            factor = Dense(factor.materialize())
        if step.is_outdated:
            return None  # an argument was written into: leave it to autograd, which raises the error
        rows = table_of(factor)
        if rows is not None and rows.num_rows < rows.index.shape[1]:
            factor, rows = Dense(factor.materialize()), None
        if rows is not None and not is_row_by_row(step):
            rows = None
        if rows is not None and step.name not in ELEMENTWISE:
            return over_rows(step, rows)
        # The backward of these takes fewer ops than maps of factors do, and that of the fused ones fewer passes over the gradients.
        is_fused = step.name in FUSED or step.name in _WRITING or step.run is F.layer_norm
        is_little = factor.dense_bytes < _machine.MANY_BYTES and step.run in _COMPOSITES
        if (is_fused or is_little) and _is_dense(factor):
            return _pulled(step, Dense(factor.materialize()))
        if step.run in _COMPOSITES:  # their steps include sums of rows, for which some factors are better materialised
            return None if factor.prefers_dense_maps else _over_steps(step, factor)
        found = [over_to(side, factor) for side in sides]
        carried = [factors for factors in found if factors is not None]
        if len(carried) < len(found):
            return None if rows is None else over_rows(step, rows)
        return carried

    return carry


def _is_dense(factor: Factor) -> bool:
    """Whether it is a gradient tensor, or one times a scale that has not been multiplied yet."""
    return isinstance(factor.factor if isinstance(factor, Scaled) else factor, Dense)


def _carry_of_estimator(step: Step) -> Carry | None:
    """The map of an autograd.Function whose backward scales the cotangent entry by entry; None for any other."""
    function, *given = step.args
    if len(step.sides) != 1 or step.run is not custom_function_call or step.sides[0].dtype.itemsize < 4:
        return None
    (side,) = step.sides
    places = [place for place, own in enumerate(given) if own is side]
    found = entries_of(function, step.output, places[0]) if len(places) == 1 else None
    if found is None or found[0].shape != side.shape or step.output.dtype != side.dtype:
        return None

    entries, selects = found

    def carry(factor: Factor) -> list[list[Factor]] | None:
        carried = None if step.is_outdated or not _may_scale(factor, entries, selects) else scaled(factor, entries)
        return None if carried is None else [[carried]]

    return carry


def _writes(step: Step) -> list[tuple[Tensor, Callable[[Factor], Factor | None]]]:
    """The carries to what the op writes into its first argument, entry by entry."""
    if not _is_write(step):
        return []

    def carry_to(side: Tensor) -> Callable[[Factor], Factor | None]:
        places = functools.cache(lambda: _places_of(step, side))  # of all factors

        def carry(factor: Factor) -> Factor | None:
            return None if places() is None else read_at(factor, places())

        return carry

    return [(side, carry_to(side)) for side in step.sides if not step.is_first(side)]


def _is_write(step: Step) -> bool:
    """Whether the op writes entries of other arguments into the first one, at places that can be computed: not by a mask in a trace."""
    if step.name not in _WRITING or "reduce" in step.kwargs:
        return False
    return not (_functorch.is_traced() and not all(map(_functorch.is_known, filter(is_mask, step.tensors))))


def _places_of(step: Step, side: Tensor) -> Tensor | None:
    """Where each entry of an argument stands in the output, in one row; None if it does not stand in one place, or nothing tells."""
    output, options = step.output.detach(), {"dtype": step.output.dtype, "device": step.output.device}
    if step.name == "index_put":
        places = _places_in(output, *step.args, **step.kwargs)
        return places if places.shape == side.shape else None
    if output.numel() >= 2 / torch.finfo(output.dtype).eps:
        return None  # its dtype does not hold the numbers of all places
    counts = step.vjp(side, torch.ones(output.shape, **options))
    if not _functorch.is_known_for_good(counts) or not (counts == 1).all():
        return None
    return step.vjp(side, torch.arange(output.numel(), **options).reshape(output.shape)).long()


def _places_in(output: Tensor, input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    whole = [slice(None) if index is None else index for index in indices]  # ATen's own op takes None for all of a dimension
    return torch.arange(output.numel(), device=output.device).reshape(output.shape)[tuple(whole)]


_WRITING = frozenset("index_put index_copy masked_scatter scatter slice_scatter select_scatter diagonal_scatter put".split())
"""Ops that write entries of other arguments into the first one."""

_MOST = 1e6  # the largest number of dtypes with few exponents is smaller


class _Steps(TorchFunctionMode):
    """Records the calls of a function as steps."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Step] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        parts = enumerate(output) if isinstance(output, (tuple, list)) else [(None, output)]
        self.found += [
            Step(part_of(func, i), args, kwargs, part, name_of(func))
            for i, part in parts
            if isinstance(part, Tensor) and part.requires_grad
        ]
        return output


def _over_steps(whole: Step, factor: Factor) -> list[list[Factor]] | None:
    """Carry a factor over an op that is a composite of others, step by step as if these had run."""
    leaves = {id(side): side.detach().requires_grad_() for side in whole.sides}
    with _Steps() as steps:
        output = whole.rerun(leaves, _COMPOSITES[whole.run])
    if output is NotImplemented or output.dtype != whole.output.dtype:
        return None
    terms: dict[int, list[Factor]] = {id(output): [factor]}
    for step in reversed(steps.found):
        own, carry = terms.pop(id(step.output), None), carry_of(step)
        parts = terms_of(own) if own else ()
        if parts is None:
            return None
        for term in parts:
            carried = carry(term) if carry is not None else None
            if carried is None and carry is not None and not isinstance(term, Dense):
                carried = carry(Dense(term.materialize()))
            if carried is None:
                return None
            for side, factors in zip(step.sides, carried, strict=True):
                terms.setdefault(id(side), []).extend(factors)
    return [terms.get(id(leaf), []) for leaf in leaves.values()]


def _pulled(step: Step, factor: Dense) -> list[list[Factor]]:
    """Pull materialised gradients back over one op as autograd does: for ops whose backward reads them fewer times than maps of factors."""
    leaves = {id(side): side.detach().requires_grad_() for side in step.sides}
    output = step.rerun(leaves, functools.partial(run_pullable, step.run))
    found = _autograd.pulled_for_all((output,), list(leaves.values()), (factor.values.to(output.dtype),))
    return [[] if gradient is None else [Dense(gradient)] for gradient in found]


_MAX_TERMS = 4
_MAX_SIZE = 4  # of the terms together, in units of the gradient's own


def terms_of(found: list[Factor]) -> Sequence[Factor] | None:
    """The terms of one gradient, merged; None if they are so many, or so large, that the gradient is better materialised.

    A step of a derivation may use a value twice, so that terms carried over k steps could become 2^k terms.
    """
    merged = merge(found)
    terms = merged.terms if isinstance(merged, Sum) else (merged,)
    if len(terms) > 1 and any(isinstance(term, Dense) for term in terms):
        return (Dense(merged.materialize()),)
    if len(found) > 1 and merged.nbytes > _MAX_SIZE * merged.dense_bytes or isinstance(merged, Sum) and merged.is_mixed:
        return None
    return terms if len(terms) <= _MAX_TERMS else None


def _of_entries(step: Step, side: Tensor, factor: Factor) -> Factor | None:
    """Carry a factor over an elementwise op or a reduction to few numbers; over any op, if it is multiples c[n] E of a constant E."""
    output, constant, numbers = step.output.detach(), None, None
    if step.name in _BATCH_NORMS:
        return None  # outside of vmap torch's own backward is wrong for some layouts in memory: psg/rules/_kernels.py
    if (
        isinstance(factor, Scaled)
        and isinstance(factor.factor, Expanded)
        and factor.shared is not None
        and factor.factor.small.numel() == 1
    ):
        numbers, constant = factor.factor.values, factor.shared.expand(factor.shape)
        if numbers.ndim != 1 + side.ndim:  # else keep the same tensor: multiples are recognised by it
            numbers = numbers.reshape(factor.n, *(1,) * side.ndim)
    elif step.name in POINTWISE or _is_write(step) and step.is_first(side) and [*map(id, step.tensors)].count(id(side)) == 1:
        if side.shape != output.shape or factor.prefers_dense_maps:
            return None
    elif isinstance(factor, Dense):
        small = (1,) * side.ndim if output.numel() == 1 else keepdim_shape(step, side)
        if small is None:
            return None
        numbers = factor.values.reshape(factor.n, *small)
        if step.name in _ADDING and output.numel() > 1:  # one number is kept as it is: multiples are recognised by it
            return Expanded(numbers / max(1, side.numel() // output.numel()) if step.name == "mean" else numbers, side.shape)
    else:
        return None
    entries = step.vjp(side, torch.ones_like(output) if constant is None else constant)
    if not _may_scale(factor, entries, step.name in _SELECTING or step.name in _WRITING):
        return None
    return scaled(factor, entries) if numbers is None else multiple(numbers, entries)


def _may_scale(factor: Factor, entries: Tensor, selects: bool) -> bool:
    """Whether to scale a factor gives what autograd gives, if numbers that are not finite meet zero.

    Where an op selects entries, autograd has exact zeros. On an accelerator or in a trace the values cannot be read: there gradients
    [n, *shape] are left to autograd at ops that select, and an entry of another factor that is not finite may give NaN.
    """
    if not _functorch.can_read_now(entries):
        return not (selects and isinstance(factor, Dense))
    if not math.isfinite(_largest(entries)):
        return False
    # Entries of a gradient are products of entries of its factor's tensors, which may overflow where these do not.
    return bool(entries.all()) or math.prod(map(_largest, _trees.flatten(factor)[0])) <= torch.finfo(factor.dtype).max


def _largest(tensor: Tensor) -> float:
    """The largest absolute value, or NaN; of integers and of nothing 1."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 1.0
    least, most = (tensor[:1] if tensor.ndim and is_one_row(tensor) else tensor).detach().aminmax()
    return max(abs(least.item()), abs(most.item())) if least == least else math.nan


_BATCH_NORMS = frozenset(map(name_of, BATCH_NORMS))

_ADDING = ("sum", "mean")
"""Reductions whose derivative is the same at all entries that they reduce to one."""

_SELECTING = frozenset(
    """
    relu relu6 hardtanh hardswish hardsigmoid hardshrink softshrink threshold clamp clamp_min clamp_max clip where masked_fill maximum
    minimum fmax fmin tril triu copysign xlogy special_xlogy nan_to_num max min median
    """.split()
)
"""Those of them whose derivative is zero at some entries whatever the cotangent is there, NaN included."""

# Ops that are composites of other ops, over which factors are carried


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    return input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    dims = list(range(-len(normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    output = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()  # torch.var is slower than all of this
    output = output if weight is None else output * weight
    return output if bias is None else output + bias


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if eps is None and input.dtype.itemsize < 4:
        return NotImplemented  # torch's own epsilon is that of the dtype in which it computes
    squares = input.square().mean(list(range(-len(normalized_shape), 0)), keepdim=True)
    output = input * (squares + (torch.finfo(input.dtype).eps if eps is None else eps)).rsqrt()
    return output if weight is None else output * weight


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    slopes = weight.reshape(-1, *(1,) * (input.ndim - 2)) if weight.ndim and input.ndim > 1 else weight
    return torch.where(input > 0, input, slopes * input)


_COMPOSITES: dict[Any, Callable[..., Any]] = {
    torch._weight_norm: _weight_norm,  # pyright: ignore[reportPrivateImportUsage]
    F.normalize: _normalize,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), _prelu),
    **dict.fromkeys((torch.linalg.householder_product, torch.orgqr, Tensor.orgqr), householder_product),
}
"""Composites written out; they return NotImplemented for forms of the call that are something else."""
