"""Values computed from parameters: how a factor of their gradient becomes factors of the parameters' gradients.

Examples are a merged low-rank update W + s B A, weights times a scale, a spectral norm. The derivative of an op on parameters is a linear
map, and for many ops its transpose maps a factor with few terms to such factors. If G = sum_t l_t r_t^T is the gradient of B A, that of B
is sum_t l_t (A r_t)^T and that of A is sum_t (B^T l_t) r_t^T. An elementwise op scales the entries of G; an op that reduces each row, or
all entries, to one number gives multiples c_n E of one tensor E. So G is never materialised.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call
from torch.overrides import TorchFunctionMode

from psg import _trees
from psg._capture._estimators import entries_of
from psg._torch import _autograd, _functorch
from psg._torch._cached import cached
from psg._torch._ops import LIKE_ANOTHER, is_torchs, name_of, substitute, tensors_of
from psg.factors import Conv, Dense, Expanded, Factor, Outer, Region, Routed, Rows, Scaled, Sum, Views, merge
from psg.factors._arithmetic import is_one_row
from psg.factors._einsum import Labels, of_operand
from psg.factors._maps import (
    Scale,
    added_up,
    contracted,
    diagonal,
    gathered,
    narrowed,
    placed,
    postmultiplied,
    premultiplied,
    reshaped,
    scaled,
    scattered,
    sliced,
    slices_of,
    transposed,
)
from psg.rules._registry import find_decomposition


class Step:
    """One call of an op on parameters, and one of its outputs.

    Attributes:
        run: Calls the op and returns this output.
        args: The positional arguments, the parameters among them with their history.
        kwargs: The keyword arguments.
        output: The output, one of the tensors that the op returned.
        name: The name of the op.
        tensors: The tensors among the arguments.
        is_outdated: Whether one of `tensors` has been written into since.
    """

    def __init__(self, run: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any], output: Tensor, name: str) -> None:
        self.run, self.args, self.kwargs, self.output, self.name = run, args, kwargs, output, name
        self.tensors = tensors_of(args, kwargs)
        self._versions = [tensor._version for tensor in self.tensors]

    @property
    def is_outdated(self) -> bool:
        return [tensor._version for tensor in self.tensors] != self._versions

    @property
    def sides(self) -> list[Tensor]:
        """The tensors among the arguments that have gradients, each once."""
        return list({id(tensor): tensor for tensor in self.tensors if tensor.requires_grad and tensor.is_floating_point()}.values())

    def is_first(self, side: Tensor) -> bool:
        """Whether this side is the op's first argument."""
        return len(self.args) > 0 and self.args[0] is side

    def rerun(self, leaves: Mapping[int, Tensor], run: Callable[..., Tensor]) -> Tensor:
        """Call `run` on the op's arguments without their history; `leaves` holds replacements for some, by id()."""

        def given(leaf: Any) -> Any:
            return leaves.get(id(leaf), leaf.detach()) if isinstance(leaf, Tensor) else leaf

        with torch.enable_grad():
            args, kwargs = substitute((self.args, self.kwargs), given)
            return run(*args, **kwargs)

    def vjp(self, side: Tensor, cotangent: Tensor, rows: Tensor | None = None) -> Tensor:
        """The vector-Jacobian product of this op alone with one cotangent, for one argument, or for these rows of it.

        The arguments' history is ignored.
        """
        leaf = (side if rows is None else side[rows]).detach().requires_grad_()
        output = self.rerun({id(side): leaf}, self.run)
        if not output.requires_grad:
            return torch.zeros_like(leaf)  # this one of several outputs does not depend on this side
        (found,) = torch.autograd.grad(output, leaf, cotangent.to(output.dtype).reshape(output.shape), allow_unused=True)
        return torch.zeros_like(leaf) if found is None else found  # a norm of order 0 has a graph that leads nowhere


Carry = Callable[[Factor], list[list[Factor]] | None]
"""Maps a factor of the output's gradient to factors for each side, which add up; None if the gradient must be materialised."""

_CarryToSide = Callable[[Factor], Factor | None]  # the same for one side
_SideCarries = list[tuple[Any, _CarryToSide]]


def part_of(func: Callable[..., Any], index: int | None) -> Callable[..., Tensor]:
    """`func`, made to return only its output at this index; with None, `func` itself, which has only one."""
    return func if index is None else lambda *args, **kwargs: func(*args, **kwargs)[index]


def carry_of(step: Step) -> Carry | None:
    """The map that carries factors over to the sides of a step; None if its output is not real floating-point."""
    output, sides = step.output, step.sides
    if not output.is_floating_point():
        return None
    if step.name == "custom_function_call":  # of no other function of the user's is it known that its backward is linear in the cotangent
        return _carry_of_estimator(step)
    try:
        known = _CARRIES[step.name](output.detach(), *step.args, **step.kwargs) if step.name in _CARRIES else []
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # not from the call itself, but from within
        known = []  # the table does not know this form of the call

    def over_to(side: Tensor, factor: Factor) -> list[Factor] | None:
        if step.name in LIKE_ANOTHER and not step.is_first(side):
            return []
        found = [carry(factor) for own, carry in known if own is side] or [None]
        if any(part is None for part in found):
            found = [_of_entries(step, side, factor)]
        return [part if part.dtype == side.dtype else part.to(side.dtype) for part in found if part is not None] or None

    # In float16 and float8 the sides of a factor may overflow or underflow where their product, which autograd computes first, does not.
    narrow = step.name not in _MOVING and any(torch.finfo(tensor.dtype).max < _MOST for tensor in (output, *sides))

    def carry(factor: Factor) -> list[list[Factor]] | None:
        if narrow and not isinstance(factor, Dense):
            factor = Dense(factor.materialize())
        if step.is_outdated:
            return None  # an argument was written into: leave it to autograd, which raises the error
        rows = _looked_up(factor)
        if rows is not None and _is_row_by_row(step):
            return [[_over_rows(step, rows)]]
        if isinstance(factor, Dense) and (step.run in _COMPOSITES or step.name in _FUSED):
            return _pulled(step, factor)
        if step.run in _COMPOSITES:  # their steps include sums of rows, for which some factors are better materialised
            return None if factor.prefers_dense_maps else _over_steps(step, factor)
        found = [over_to(side, factor) for side in sides]
        carried = [factors for factors in found if factors is not None]
        return carried if len(carried) == len(found) else None

    return carry


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
            if carried is None:
                return None
            for side, factors in zip(step.sides, carried, strict=True):
                terms.setdefault(id(side), []).extend(factors)
    return [terms.get(id(leaf), []) for leaf in leaves.values()]


def _pulled(step: Step, factor: Dense) -> list[list[Factor]]:
    """Pull materialised gradients back over one op as autograd does: for ops whose backward reads them fewer times than maps of factors."""
    leaves = {id(side): side.detach().requires_grad_() for side in step.sides}
    decompose = find_decomposition(step.run, differentiated=False)  # it runs under vmap
    output = NotImplemented if decompose is None else step.rerun(leaves, decompose)
    output = step.rerun(leaves, step.run) if output is NotImplemented else output
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
    constant = torch.ones_like(step.output.detach())
    numbers: Tensor | None = None
    if (
        isinstance(factor, Scaled)
        and isinstance(factor.factor, Expanded)
        and factor.shared is not None
        and factor.factor.small.numel() == 1
    ):
        numbers, constant = factor.factor.values, factor.shared.expand(factor.shape)
        if numbers.ndim != 1 + side.ndim:  # else keep the same tensor: multiples are recognised by it
            numbers = numbers.reshape(factor.n, *(1,) * side.ndim)
    elif step.name in _POINTWISE:
        if side.shape != constant.shape or factor.prefers_dense_maps:
            return None
    elif isinstance(factor, Dense):
        small = (1,) * side.ndim if constant.numel() == 1 else _keepdim_shape(step, side)
        if small is None:
            return None
        numbers = factor.values.reshape(factor.n, *small)
    else:
        return None
    entries = step.vjp(side, constant)
    if not _may_scale(factor, entries, step.name in _SELECTING):
        return None
    return scaled(factor, entries) if numbers is None else _multiple(numbers, entries)


def _may_scale(factor: Factor, entries: Tensor, selects: bool) -> bool:
    """Whether to scale a factor gives what autograd gives, if numbers that are not finite meet zero."""
    if _functorch.can_read_now(entries):
        if not _may_be_multiplied(entries):
            return False
        return bool(entries.all()) or all(map(_may_be_multiplied, _trees.flatten(factor)[0]))
    return not (selects and isinstance(factor, Dense))


def _may_be_multiplied(tensor: Tensor) -> bool:
    """Whether zero times each entry is zero: where an op selects entries, autograd has exact zeros.

    On an accelerator or in a trace the values cannot be read: there gradients [n, *shape] are left to autograd at ops that select, and an
    entry of another factor that is not finite may give NaN.
    """
    if not tensor.is_floating_point():
        return True
    return bool((tensor[:1] if tensor.ndim and is_one_row(tensor) else tensor).sum().isfinite())


def _multiple(numbers: Tensor, constant: Tensor) -> Factor:
    """The factor of numbers[n, *small] * constant[*shape]."""
    if numbers.shape[1:] == constant.shape:
        return Dense(numbers * constant)
    return Scaled(Expanded(numbers, constant.shape), constant.to(numbers.dtype).expand(len(numbers), *constant.shape))


def _keepdim_shape(step: Step, side: Tensor) -> tuple[int, ...] | None:
    """For a reduction, the shape of its output with the reduced dimensions kept as 1; None if it is not clear which were reduced."""
    position = _REDUCING.get(step.name)
    if position is None or not step.is_first(side):
        return None
    shape, reduced = side.shape, step.output.shape
    if len(reduced) == len(shape):
        small = tuple(reduced)
    else:
        dims = step.kwargs.get("dim", step.args[position] if len(step.args) > position else None)
        if isinstance(dims, bool) or not isinstance(dims, (int, list, tuple)):
            return None
        gone = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)}
        small = tuple(1 if dim in gone else size for dim, size in enumerate(shape))
        if [size for dim, size in enumerate(small) if dim not in gone] != list(reduced):
            return None
    return small if all(size in (1, own) for size, own in zip(small, shape, strict=True)) else None


# Lookups of a table that is computed row by row: of the op only the rows that were looked up have to be differentiated


def _looked_up(factor: Factor) -> Rows | None:
    """The factor as rows of a table; of numbers, as rows of one column."""
    if isinstance(factor, Views) and factor.is_reshaped and len(factor.shape) == 1:
        factor = factor.factors[0]
    return factor if isinstance(factor, Rows) and len(factor.shape) == 2 else None


def _is_row_by_row(step: Step) -> bool:
    """Whether the op computes each row of its output, or each number, from the row of its only side, a matrix, at the same place."""
    if len(step.sides) != 1 or step.sides[0].ndim != 2 or not step.is_first(step.sides[0]):
        return False
    (side,) = step.sides
    if step.name in _REDUCING:
        return _keepdim_shape(step, side) == (len(side), 1)
    if step.name not in _ROW_BY_ROW:
        return False
    keyword, position, default = _ROW_BY_ROW[step.name]
    given = step.kwargs.get(keyword, step.args[position] if len(step.args) > position else default)
    if keyword == "normalized_shape":
        return tuple(given) == (side.shape[1],)
    return isinstance(given, int) and given % 2 == 1


def _over_rows(step: Step, factor: Rows) -> Factor:
    (side,) = step.sides
    found = step.vjp(side, factor.cotangent.flatten(0, 1), factor.index.flatten())
    return Rows(factor.index, found.unflatten(0, factor.index.shape), len(side))


# Elementwise ops: the scale for the gradient of each argument, which may have been broadcast


def _entrywise(output: Tensor, sides: Iterable[tuple[Any, Scale]]) -> _SideCarries:
    return [(side, _entry(output, side.shape, scale)) for side, scale in sides if isinstance(side, Tensor)]


def _entry(output: Tensor, shape: torch.Size, scale: Scale) -> _CarryToSide:
    if shape == output.shape:
        return (lambda factor: factor) if isinstance(scale, (int, float)) and scale == 1 else lambda factor: scaled(factor, scale)
    weights = scale if isinstance(scale, Tensor) else output.new_full((), scale)
    return lambda factor: added_up(factor, weights.expand(output.shape), shape)


def _value(argument: Any) -> Scale:
    return argument.detach() if isinstance(argument, Tensor) else argument


def _add(output: Tensor, input: Any, other: Any, *, alpha: float = 1) -> _SideCarries:
    return _entrywise(output, [(input, 1), (other, alpha)])


def _sub(output: Tensor, input: Any, other: Any, *, alpha: float = 1) -> _SideCarries:
    return _entrywise(output, [(input, 1), (other, -alpha)])


def _swapped(carry: Callable[..., _SideCarries]) -> Callable[..., _SideCarries]:
    """The same with the op's two arguments swapped."""
    return lambda output, input, other: carry(output, other, input)


def _neg(output: Tensor, input: Any) -> _SideCarries:
    return _entrywise(output, [(input, -1)])


def _mul(output: Tensor, input: Any, other: Any) -> _SideCarries:
    return _entrywise(output, [(input, _value(other)), (other, _value(input))])


def _div(output: Tensor, input: Any, other: Any) -> _SideCarries:
    divisor = _value(other)
    return _entrywise(output, [(input, output.new_ones(()) / divisor), (other, -output / divisor)])


def _expand(output: Tensor, input: Any, *_: Any) -> _SideCarries:
    ((_, added),) = _entrywise(output, [(input, 1)])
    new = output.ndim - input.ndim
    sizes = [(1, size) if own == size else (size, 1) for own, size in zip(input.shape, output.shape[new:], strict=True)]
    ((_, copied),) = _copies(input, [*((size, 1) for size in output.shape[:new]), *sizes])

    def carry(factor: Factor) -> Factor | None:
        found = added(factor)
        return copied(factor) if found is None else found

    return [(input, carry)]


def _repeat(output: Tensor, input: Any, *sizes: Any) -> _SideCarries:
    counts = sizes if isinstance(sizes[0], int) else sizes[0]
    shape = [1] * (len(counts) - input.ndim) + list(input.shape)
    return _copies(input, list(zip(counts, shape, strict=True)))


def _tile(output: Tensor, input: Any, *dims: Any) -> _SideCarries:
    counts = dims if isinstance(dims[0], int) else dims[0]
    return _repeat(output, input, [1] * (input.ndim - len(counts)) + list(counts))


def _repeat_interleave(output: Tensor, input: Any, repeats: Any, dim: Any = None) -> _SideCarries:
    if not isinstance(repeats, int) or dim is None:
        return []
    dim %= input.ndim
    return _copies(input, [*((1, size) for size in input.shape[: dim + 1]), (repeats, 1), *((1, size) for size in input.shape[dim + 1 :])])


def _copies(input: Tensor, sizes: Sequence[tuple[int, int]]) -> _SideCarries:
    """Copies of a tensor: of its dimension of size d, the output has r copies one after another, for each (r, d)."""
    labels = [f"{kind}{k}" for k in range(len(sizes)) for kind in ("copy ", "entry ")]
    shape = torch.Size([size for pair in sizes for size in pair])
    kept = torch.Size([size for _, size in sizes])

    def carry(factor: Factor) -> Factor | None:
        found = of_operand(reshaped(factor, shape), labels, [], labels[1::2], kept)
        return None if found is None else reshaped(found, input.shape)

    return [(input, carry)]


# Softmax, from the output of torch's own kernel: computed from exponentials here, it would be rounded as those of large logits are


def _softmax(output: Tensor, input: Any, dim: int | None = None, *_: Any, **__: Any) -> _SideCarries:
    # y (G - sum_k y_k G_k), with y the output
    small = _small_along(output, input, dim)
    return [] if small is None else [(input, lambda factor: scaled(factor, output)), (input, _less(output, output, small))]


def _log_softmax(output: Tensor, input: Any, dim: int | None = None, *_: Any, **__: Any) -> _SideCarries:
    # G - softmax(x) sum_k G_k
    small = _small_along(output, input, dim)
    return [] if small is None else [(input, lambda factor: factor), (input, _less(output.new_ones(()), output.exp(), small))]


def _small_along(output: Tensor, input: Any, dim: int | None) -> torch.Size | None:
    """The shape of a sum along `dim`; None where the gradient is better materialised: narrow dtypes would round terms that cancel."""
    if dim is None or input.dtype != output.dtype or output.dtype.itemsize < 4:
        return None
    return torch.Size(1 if d == dim % output.ndim else size for d, size in enumerate(output.shape))


def _less(weights: Tensor, constant: Tensor, small: torch.Size) -> _CarryToSide:
    """For a gradient G: -constant * sum(weights * G), summed to the shape `small`."""

    def carry(factor: Factor) -> Factor | None:
        total = contracted(factor, weights.expand(factor.shape), small)
        return None if total is None else _multiple(-total.to(constant.dtype), constant)

    return carry


# Products


def _matmul(output: Tensor, input: Any, other: Any) -> _SideCarries:
    x, y = input.detach(), other.detach()
    if x.ndim > 1 and y.ndim == 2:
        to_input, to_other = _of_rows(x, y)
        return [(input, to_input), (other, to_other)]
    if (x.ndim, y.ndim) == (2, 1):
        return [
            (input, lambda factor: _if_dense(factor, lambda c: Outer(c[:, None], y.expand(len(c), 1, -1).to(c.dtype)))),
            (other, lambda factor: _if_dense(factor, lambda c: Dense(c @ x.to(c.dtype)))),
        ]
    if (x.ndim, y.ndim) == (1, 1):
        return [
            (input, lambda factor: _if_dense(factor, lambda c: Dense(c[:, None] * y))),
            (other, lambda factor: _if_dense(factor, lambda c: Dense(c[:, None] * x))),
        ]
    return []


def _linear(output: Tensor, input: Any, weight: Any, bias: Any = None) -> _SideCarries:
    if weight.ndim != 2:
        return []
    if input.ndim == 1:
        products = _matmul(output, weight, input)
    else:
        to_input, to_matrix = _of_rows(input.detach(), weight.detach().t())
        products = [(input, to_input), (weight, lambda factor: _turned(to_matrix(factor)))]
    return products + _entrywise(output, [(bias, 1)])


def _of_rows(x: Tensor, matrix: Tensor) -> tuple[_CarryToSide, _CarryToSide]:
    """The carries of x @ matrix to both, for x of rows in any number of dimensions."""
    rows = x if x.ndim == 2 else x.flatten(0, -2)
    flat = torch.Size((len(rows), matrix.shape[1]))

    def to_x(factor: Factor) -> Factor | None:
        found = postmultiplied(reshaped(factor, flat), matrix.t())
        return None if found is None else reshaped(found, x.shape)

    return to_x, lambda factor: premultiplied(reshaped(factor, flat), rows)


def _addmm(output: Tensor, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> _SideCarries:
    product = [(side, lambda factor, carry=carry: carry(scaled(factor, alpha))) for side, carry in _matmul(output, mat1, mat2)]
    return _entrywise(output, [(input, beta)]) + product


def _outer(output: Tensor, input: Any, vec2: Any) -> _SideCarries:
    rows, columns = (input.shape[0], 1), (1, vec2.shape[0])
    left, right = (vector.detach().reshape(shape).expand(output.shape) for vector, shape in ((input, rows), (vec2, columns)))

    def carry(factor: Factor, weights: Tensor, shape: tuple[int, int]) -> Factor | None:
        total = contracted(factor, weights, torch.Size(shape))
        return None if total is None else Dense(total.flatten(1))

    return [(input, lambda factor: carry(factor, right, rows)), (vec2, lambda factor: carry(factor, left, columns))]


def _turned(factor: Factor | None) -> Factor | None:
    return None if factor is None else transposed(factor)


def _if_dense(factor: Factor, build: Callable[[Tensor], Factor]) -> Factor | None:
    return build(factor.values) if isinstance(factor, Dense) else None


def _operands(output: Tensor, labels: Labels, operands: Sequence[tuple[Labels, Any]]) -> _SideCarries:
    """The carries of an einsum, or of what is a reshape of its result, with the labels of its output."""
    if output.numel() == 0:
        return []
    sizes = {label: size for own, tensor in operands for label, size in zip(own, tensor.shape, strict=True)}
    shape = torch.Size([sizes[label] for label in labels])

    def to(k: int) -> _CarryToSide:
        own, tensor = operands[k]
        others = [(labels, tensor.detach()) for labels, tensor in (*operands[:k], *operands[k + 1 :])]
        return lambda factor: of_operand(reshaped(factor, shape), labels, others, own, tensor.shape)

    return [(tensor, to(k)) for k, (_, tensor) in enumerate(operands)]


def _einsum(output: Tensor, equation: Any, *operands: Any) -> _SideCarries:
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or "." in equation:
        return []
    inputs, arrow, labels = equation.replace(" ", "").partition("->")
    if not arrow:
        labels = "".join(sorted(label for label in set(inputs) - {","} if inputs.count(label) == 1))
    parts = inputs.split(",")
    if any(len(set(part)) < len(part) for part in (*parts, labels)) or any(
        len(part) != tensor.ndim for part, tensor in zip(parts, given, strict=True)
    ):
        return []  # diagonals
    sizes = [dict(zip(part, tensor.shape, strict=True)) for part, tensor in zip(parts, given, strict=True)]
    if any(one[label] != other[label] for one, other in itertools.combinations(sizes, 2) for label in one.keys() & other.keys()):
        return []  # broadcast
    return _operands(output, labels, list(zip(parts, given, strict=True)))


def _kron(output: Tensor, input: Any, other: Any) -> _SideCarries:
    if input.ndim != other.ndim:
        return []
    first, second = ([f"{name}{k}" for k in range(input.ndim)] for name in ("outer", "inner"))
    return _operands(output, [label for pair in zip(first, second, strict=True) for label in pair], [(first, input), (second, other)])


def _tensordot(output: Tensor, a: Any, b: Any, dims: Any = 2, out: None = None) -> _SideCarries:
    if isinstance(dims, int):
        dims = range(a.ndim - dims, a.ndim), range(dims)
    if isinstance(dims, Tensor) or len(dims) != 2:
        return []
    first, second = ([f"{name}{k}" for k in range(tensor.ndim)] for name, tensor in (("a", a), ("b", b)))
    pairs = {dim % a.ndim: other % b.ndim for dim, other in zip(*dims, strict=True)}
    for dim, other in pairs.items():
        second[other] = first[dim]
    if any(a.shape[dim] != b.shape[other] for dim, other in pairs.items()):
        return []
    labels = [label for k, label in enumerate(first) if k not in pairs] + [label for label in second if label not in first]
    return _operands(output, labels, [(first, a), (second, b)])


# Layouts and dtypes


def _reshape(output: Tensor, input: Any, *_: Any, **__: Any) -> _SideCarries:
    shape = input.shape
    return [(input, lambda factor: reshaped(factor, shape))]


def _cat(output: Tensor, tensors: Any, dim: int = 0) -> _SideCarries:
    dim %= output.ndim
    sizes = [tensor.shape[dim] if tensor.ndim == output.ndim else 0 for tensor in tensors]  # cat ignores tensors of shape [0]
    if 0 in sizes:
        return []

    def piece(k: int) -> _CarryToSide:
        return lambda factor: narrowed(factor, dim, sum(sizes[:k]), sizes[k])

    return [(tensor, piece(k)) for k, tensor in enumerate(tensors)]


def _pad(output: Tensor, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> _SideCarries:
    if mode != "constant" or min(pad, default=0) < 0 or 0 in input.shape:
        return []

    def carry(factor: Factor) -> Factor | None:
        own: Factor | None = factor
        for k, before in enumerate(pad[::2]):
            dim = input.ndim - 1 - k
            own = None if own is None else narrowed(own, dim, before, input.shape[dim])
        return own

    return [(input, carry)]


def _stack(output: Tensor, tensors: Any, dim: int = 0) -> _SideCarries:
    dim %= output.ndim

    def piece(k: int) -> _CarryToSide:
        return lambda factor: sliced(factor, dim, k)

    return [(tensor, piece(k)) for k, tensor in enumerate(tensors)]


def _sum(output: Tensor, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> _SideCarries:
    return _added_slices(input, dim, 1)


def _mean(output: Tensor, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> _SideCarries:
    return _added_slices(input, dim, 1 / input.shape[dim]) if isinstance(dim, int) and input.shape[dim] else []


def _added_slices(input: Tensor, dim: Any, scale: float) -> _SideCarries:
    """Sums of a few slices: the gradient of each is that of the sum."""
    if not isinstance(dim, int) or not 0 < input.shape[dim] <= _MOST_SLICES:
        return []
    slices = slices_of(input.shape, dim % input.ndim)

    def carry(factor: Factor) -> Factor | None:
        own = scaled(factor, scale) if isinstance(factor, _SPREAD) else None
        own = None if own is None else reshaped(own, torch.Size(slices[0].size))
        if own is None or not own.is_kept or isinstance(own, Rows):
            return None if own is None else Views([own] * len(slices), slices, input.shape)
        return Expanded(own.materialize().unsqueeze(1 + dim % input.ndim), input.shape)

    return [(input, carry)]


_MOST_SLICES = 16
_SPREAD = (Outer, Rows, Routed, Conv, Views)


def _block_diag(output: Tensor, *tensors: Any) -> _SideCarries:
    if any(tensor.ndim != 2 or tensor.numel() == 0 for tensor in tensors):
        return []

    def block(k: int) -> _CarryToSide:
        row, column = (sum(tensor.shape[dim] for tensor in tensors[:k]) for dim in (0, 1))
        rows, columns = tensors[k].shape

        def carry(factor: Factor) -> Factor | None:
            own = narrowed(factor, 0, row, rows)
            return None if own is None else narrowed(own, 1, column, columns)

        return carry

    return [(tensor, block(k)) for k, tensor in enumerate(tensors)]


def _diag(output: Tensor, input: Any) -> _SideCarries:
    return [(input, diagonal)] if input.ndim == 1 else []


def _part(output: Tensor, input: Any, *_: Any, **__: Any) -> _SideCarries:
    """Views of some of the entries, or of all of them in another order."""
    of_input = input.is_contiguous() and _functorch.memory_of(output) == _functorch.memory_of(input)
    if not of_input or any(stride == 0 and size > 1 for size, stride in zip(output.shape, output.stride(), strict=True)):
        return []
    region = Region(tuple(output.shape), tuple(output.stride()), int(output.storage_offset() - input.storage_offset()))
    return [(input, lambda factor: None if isinstance(factor, Dense) else placed(factor, region, input.shape))]


def _indexed(output: Tensor, input: Any, *index: Any) -> _SideCarries:
    return _part(output, input) or (_index_select(output, input, 0, *index) if len(index) == 1 else [])


def _index_select(output: Tensor, input: Any, dim: int, index: Any) -> _SideCarries:
    if input.ndim != 2 or dim % 2 != 0 or not isinstance(index, Tensor) or index.dtype not in _INDICES:
        return []
    rows = index.long() % max(1, len(input))
    if index.ndim == 1:
        return [(input, lambda factor: scattered(factor, rows, len(input)))]

    def of_column(k: int) -> _CarryToSide:
        def carry(factor: Factor) -> Factor | None:
            own = sliced(factor, 1, k)
            return None if own is None else scattered(own, rows[:, k], len(input))

        return carry

    return [(input, of_column(k)) for k in range(index.shape[1])] if index.ndim == 2 and index.shape[1] <= _MOST_SLICES else []


def _index_add(output: Tensor, input: Any, dim: int, index: Tensor, source: Any, *, alpha: float = 1) -> _SideCarries:
    if input.ndim != 2 or dim % 2 != 0 or index.ndim != 1 or source.ndim != 2:
        return []

    def carry(factor: Factor) -> Factor | None:
        found = gathered(factor, index.long())
        return None if found is None else scaled(found, alpha)

    return [(input, lambda factor: factor), (source, carry)]


def _scatter_add(output: Tensor, input: Any, dim: int, index: Tensor, src: Any) -> _SideCarries:
    """Only with one index for each row."""
    if index.ndim != 2 or index.shape != src.shape or index.shape[1] != output.shape[1] or index.stride(1) != 0:
        return []
    return _index_add(output, input, dim, index[:, 0], src)


_INDICES = (torch.int64, torch.int32)


def _transpose(output: Tensor, input: Any, *_: Any, **__: Any) -> _SideCarries:
    if input.ndim not in (2, 3):
        return _part(output, input)
    turned, views = input.detach().mT, [] if input.ndim == 2 else _part(output, input)
    if (output.shape, output.stride()) != (turned.shape, turned.stride()):
        return views
    if (output.shape, output.stride()) == (input.shape, input.stride()):
        return views  # the strides do not tell whether it is transposed
    if input.ndim == 2:
        return [(input, transposed)]

    def carry(factor: Factor) -> Factor | None:
        return transposed(factor) if isinstance(factor, Routed) else views[0][1](factor)

    return [(input, carry)] if views else []


def _cast(output: Tensor, input: Any, *_: Any, **__: Any) -> _SideCarries:
    return [(input, lambda factor: factor)] if (output.shape, output.device) == (input.shape, input.device) else []


_CARRIES: dict[str, Callable[..., _SideCarries]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("sub", "subtract", "__sub__"), _sub),
    **dict.fromkeys(("rsub", "__rsub__"), _swapped(_sub)),
    **dict.fromkeys(("neg", "negative"), _neg),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _mul),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _div),
    "__rdiv__": _swapped(_div),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("matmul", "linalg_matmul", "mm", "_sparse_mm", "mv", "dot", "vdot", "__matmul__"), _matmul),
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("outer", "ger"), _outer),
    "einsum": _einsum,
    "kron": _kron,
    "tensordot": _tensordot,
    "repeat": _repeat,
    "tile": _tile,
    "repeat_interleave": _repeat_interleave,
    "block_diag": _block_diag,
    **dict.fromkeys(("diag", "diag_embed"), _diag),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    **dict.fromkeys(("reshape", "reshape_as", "view", "view_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute"), _transpose),
    **dict.fromkeys(("select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "movedim", "moveaxis"), _part),
    "__getitem__": _indexed,
    "index_select": _index_select,
    "index_add": _index_add,
    "scatter_add": _scatter_add,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    "stack": _stack,
    "sum": _sum,
    "mean": _mean,
    **dict.fromkeys(("to", "type", "float", "double", "half", "bfloat16", "contiguous", "clone"), _cast),
}

_FUSED = {name for name, carry in _CARRIES.items() if carry in (_softmax, _log_softmax)}
"""Ops whose backward is one kernel, where the maps of factors are several."""

_MOVING = {name for name, carry in _CARRIES.items() if carry in (_reshape, _transpose, _part, _cat)}
"""Ops that move entries and do not change their values."""

_POINTWISE = frozenset(
    """
    pow __rpow__ float_power square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p abs absolute sigmoid special_expit log_sigmoid
    tanh softplus relu relu6 leaky_relu silu gelu elu selu celu mish hardtanh hardswish hardsigmoid softsign tanhshrink softshrink
    hardshrink threshold clamp clamp_min clamp_max clip where masked_fill maximum minimum fmax fmin lerp tril triu sin cos tan asin acos
    atan sinh cosh asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh atan2 arctan2 hypot logaddexp logaddexp2 erf erfc
    special_erf erfinv sinc logit nan_to_num addcmul addcdiv copysign xlogy positive fake_quantize_per_tensor_affine fmod remainder frac
    ldexp deg2rad rad2deg lgamma mvlgamma digamma polygamma i0 special_entr special_erfcx special_erfinv special_exp2 special_expm1
    special_log1p special_logit special_log_ndtr special_ndtr special_ndtri special_gammaln special_multigammaln special_digamma special_psi
    special_polygamma special_i0 special_i0e special_i1 special_i1e special_sinc special_xlogy special_xlog1py
    """.split()
)
"""Elementwise ops: each entry of the result depends on the argument's entry at the same place alone."""

_SELECTING = frozenset(
    """
    relu relu6 hardtanh hardswish hardsigmoid hardshrink softshrink threshold clamp clamp_min clamp_max clip where masked_fill maximum
    minimum fmax fmin tril triu copysign xlogy special_xlogy nan_to_num
    """.split()
)
"""Those of them whose derivative is zero at some entries whatever the cotangent is there, NaN included."""

_REDUCING: dict[str, int] = {
    **dict.fromkeys("sum mean var std var_mean std_mean amax amin logsumexp prod nansum nanmean norm_except_dim".split(), 1),
    **dict.fromkeys("norm linalg_norm linalg_vector_norm".split(), 2),
}
"""Reductions, with the position of the argument that names the dimensions: no two entries of the result share an entry of the input."""

_ROW_BY_ROW: dict[str, tuple[str, int, Any]] = {
    **dict.fromkeys(
        "softmax log_softmax special_softmax special_log_softmax softmin cumsum cumprod logcumsumexp".split(), ("dim", 1, None)
    ),
    "normalize": ("dim", 2, 1),
    **dict.fromkeys(("layer_norm", "rms_norm"), ("normalized_shape", 1, ())),
}
"""Ops along dimensions, with the keyword, the position and the default of the argument that names them."""


# Ops that are composites of other ops, over which factors are carried


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    return input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or running_mean is not None or running_var is not None:
        return NotImplemented
    var, mean = torch.var_mean(input, [dim for dim in range(input.ndim) if dim != 1], correction=0, keepdim=True)
    output = (input - mean) * (var + eps).rsqrt()
    shape = (-1, *(1,) * (input.ndim - 2))
    output = output if weight is None else output * weight.reshape(shape)
    return output if bias is None else output + bias.reshape(shape)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    if weight is None:
        return NotImplemented
    output = F.layer_norm(input, normalized_shape, None, None, eps) * weight
    return output if bias is None else output + bias


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return NotImplemented if weight is None else F.rms_norm(input, normalized_shape, None, eps) * weight


_COMPOSITES: dict[Any, Callable[..., Any]] = {
    torch._weight_norm: _weight_norm,  # pyright: ignore[reportPrivateImportUsage]
    F.normalize: _normalize,
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}
"""Composites written out; they return NotImplemented for forms of the call that are something else."""


# Ops that are computed once on parameters and constants

_SIMPLE = frozenset({*_CARRIES, *_POINTWISE, *_REDUCING}) | frozenset(
    """
    broadcast_tensors stack hstack vstack diag diagonal diag_embed flip roll repeat type_as index_select pad round floor ceil trunc sign sgn
    cumsum cumprod einsum bmm tile gather real imag conj resolve_conj view_as_real view_as_complex complex polar fft_fft fft_ifft fft_rfft
    fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn
    """.split()
)
"""Ops that vmap runs about as fast as torch does: entry by entry, reductions, products, moves of entries."""

# Deterministic, functional ops, which have one value for all samples: those above, whose factors are carried over, and these, whose
# gradients are pulled back. An op that is not named is lifted, which is right too; an op that draws random numbers must not be named, nor
# one whose backward vmap gets wrong (cdist). An output without a derivative, such as a mask, is a constant. (custom_function_call is every
# autograd.Function: the router's `_compute` sees if one has drawn.)
_DERIVING = _SIMPLE | frozenset(
    """
    batch_norm interpolate normalize kron tensordot repeat_interleave as_strided conv1d conv2d conv3d max_pool1d max_pool2d avg_pool1d
    avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d glu _weight_norm detach fake_quantize_per_channel_affine gt ge lt le eq ne
    __gt__ __ge__ __lt__ __le__ __eq__ __ne__ logical_and logical_or logical_not isnan isinf isfinite max min argmax argmin inner addmv addr
    baddbmm cross trace diff block_diag matrix_power matrix_exp linalg_matrix_exp mH H adjoint linalg_solve linalg_solve_triangular
    linalg_inv inverse pinverse linalg_pinv linalg_cholesky linalg_qr linalg_det linalg_slogdet logdet linalg_householder_product orgqr
    fft_hfft fft_ihfft fft_fftshift fft_ifftshift stft istft fix igamma igammac special_zeta special_round special_softmax
    special_log_softmax special_logsumexp softmin _threshold prelu layer_norm group_norm instance_norm rms_norm local_response_norm
    cosine_similarity pairwise_distance pdist dist renorm median nanmedian quantile nanquantile kthvalue mode topk sort msort argsort
    aminmax cummax cummin logcumsumexp cov corrcoef trapezoid trapz cumulative_trapezoid gradient any all count_nonzero signbit isposinf
    isneginf isreal isclose isin greater greater_equal less less_equal not_equal logical_xor searchsorted bucketize masked_scatter index_put
    index_add index_copy index_fill index_reduce scatter scatter_add scatter_reduce put take take_along_dim select_scatter slice_scatter
    diagonal_scatter unfold fold rot90 fliplr flipud diagflat meshgrid cartesian_prod combinations column_stack row_stack dstack dsplit
    hsplit vsplit unsafe_chunk unsafe_split constant_pad_nd sum_to_size atleast_1d atleast_2d atleast_3d conj_physical pixel_shuffle
    pixel_unshuffle channel_shuffle grid_sample affine_grid conv_transpose1d conv_transpose2d conv_transpose3d max_pool3d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d linalg_svd linalg_svdvals svd
    linalg_eig linalg_eigvals linalg_eigh linalg_eigvalsh linalg_lu linalg_lu_factor linalg_lu_factor_ex lu lu_unpack qr cholesky
    linalg_cholesky_ex cholesky_inverse cholesky_solve linalg_inv_ex linalg_solve_ex linalg_lstsq linalg_tensorinv linalg_tensorsolve
    triangular_solve det slogdet linalg_cond linalg_matrix_norm linalg_matrix_rank linalg_matrix_power linalg_multi_dot linalg_cross
    linalg_diagonal linalg_vander linalg_vecdot mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss binary_cross_entropy
    binary_cross_entropy_with_logits poisson_nll_loss hinge_embedding_loss cosine_embedding_loss multilabel_soft_margin_loss
    custom_function_call
    """.split()
)


AS_SMALL = frozenset(name for name, carry in _CARRIES.items() if carry in (_matmul, _linear, _indexed))
"""Products and lookups: if all samples share the data, of however many rows, their factors are no larger than those of a rule."""


@cached
def derives(func: Any) -> bool:
    """Whether an op is computed once on parameters and constants."""
    return name_of(func) in _DERIVING and is_torchs(func)


def is_simple(name: str) -> bool:
    """Whether vmap runs the op of this name about as fast as torch does."""
    return name in _SIMPLE
