"""The adjoint of each op on parameters: how a factor of its output's gradient becomes factors of its arguments' gradients.

A function for each op takes the output and the call's arguments. It names arguments, each with a map of factors; the gradient of one that
is named twice is the sum of both. A map gives None where psg has no factor for the result: the gradient then has to be materialised. So it
has for arguments that are not named.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from psg._capture._exponential import pulled, sides_of
from psg._capture._steps import run_pullable
from psg._torch import _functorch
from psg.factors import Conv, Dense, Expanded, Factor, Outer, Region, Routed, Rows, Scaled, Views
from psg.factors._einsum import Labels, of_operand, permuted
from psg.factors._maps import (
    Scale,
    added_up,
    as_product,
    contracted,
    diagonal,
    gathered,
    narrowed,
    on_diagonal,
    placed,
    postmultiplied,
    premultiplied,
    reshaped,
    scaled,
    scattered,
    scattered_columns,
    sliced,
    slices_of,
    transposed,
)
from psg.rules.products import einsum_labels, matmul_equation, tensordot_labels
from psg.rules.systems import Solve, by_lu, by_triangle, solve_all, takes_vectors, triangle

CarryToSide = Callable[[Factor], Factor | None]
"""Maps a factor of the output's gradient to one of an argument's."""

SideCarries = list[tuple[Any, CarryToSide]]
"""Arguments of a call, each with the map to it."""


# Elementwise ops: the scale for the gradient of each argument, which may have been broadcast


def _entrywise(output: Tensor, sides: Iterable[tuple[Any, Scale]]) -> SideCarries:
    return [(side, _entry(output, side.shape, scale)) for side, scale in sides if isinstance(side, Tensor)]


def _entry(output: Tensor, shape: torch.Size, scale: Scale) -> CarryToSide:
    is_one = isinstance(scale, (int, float)) and scale == 1
    if shape == output.shape:
        return (lambda factor: factor) if is_one else lambda factor: scaled(factor, scale)
    weights = scale if isinstance(scale, Tensor) else output.new_full((), scale)
    labels, first = [f"{dim}" for dim in range(output.ndim)], output.ndim - len(shape)
    own = [label if size == whole else "one" for label, size, whole in zip(labels[first:], shape, output.shape[first:], strict=True)]
    held = [label for label, size in zip(labels[output.ndim - weights.ndim :], weights.shape, strict=True) if size != 1]
    others = [] if is_one else [(held, weights.squeeze())]

    def carry(factor: Factor) -> Factor | None:
        total = added_up(factor, weights.expand(output.shape), shape)
        return of_operand(factor, labels, others, own, shape) if total is None else total

    return carry


def _value(argument: Any) -> Scale:
    return argument.detach() if isinstance(argument, Tensor) else argument


def _add(output: Tensor, input: Any, other: Any, *, alpha: float = 1) -> SideCarries:
    return _entrywise(output, [(input, 1), (other, alpha)])


def _sub(output: Tensor, input: Any, other: Any, *, alpha: float = 1) -> SideCarries:
    return _entrywise(output, [(input, 1), (other, -alpha)])


def _swapped(carry: Callable[..., SideCarries]) -> Callable[..., SideCarries]:
    """The same with the op's two arguments swapped."""
    return lambda output, input, other: carry(output, other, input)


def _neg(output: Tensor, input: Any) -> SideCarries:
    return _entrywise(output, [(input, -1)])


def _mul(output: Tensor, input: Any, other: Any) -> SideCarries:
    return _entrywise(output, [(input, _value(other)), (other, _value(input))])


def _div(output: Tensor, input: Any, other: Any) -> SideCarries:
    divisor = _value(other)
    return _entrywise(output, [(input, output.new_ones(()) / divisor), (other, -output / divisor)])


def _expand(output: Tensor, input: Any, *_: Any) -> SideCarries:
    return _entrywise(output, [(input, 1)])


def _repeat(output: Tensor, input: Any, *sizes: Any) -> SideCarries:
    counts = sizes[0] if sizes and isinstance(sizes[0], (list, tuple)) else sizes
    shape = [1] * (len(counts) - input.ndim) + list(input.shape)
    return _copies(input, list(zip(counts, shape, strict=True)))


def _tile(output: Tensor, input: Any, *dims: Any) -> SideCarries:
    counts = dims[0] if dims and isinstance(dims[0], (list, tuple)) else dims
    return _repeat(output, input, [1] * (input.ndim - len(counts)) + list(counts))


def _repeat_interleave(output: Tensor, input: Any, repeats: Any, dim: Any = None) -> SideCarries:
    if not isinstance(repeats, int) or dim is None or input.ndim == 0:
        return []
    dim %= input.ndim
    return _copies(input, [*((1, size) for size in input.shape[: dim + 1]), (repeats, 1), *((1, size) for size in input.shape[dim + 1 :])])


def _copies(input: Tensor, sizes: Sequence[tuple[int, int]]) -> SideCarries:
    """Copies of a tensor: of its dimension of size d, the output has r copies one after another, for each (r, d)."""
    labels = [f"{kind}{k}" for k in range(len(sizes)) for kind in ("copy ", "entry ")]
    shape = torch.Size([size for pair in sizes for size in pair])
    kept = torch.Size([size for _, size in sizes])

    def carry(factor: Factor) -> Factor | None:
        found = of_operand(reshaped(factor, shape), labels, [], labels[1::2], kept)
        return None if found is None else reshaped(found, input.shape)

    return [(input, carry)]


# Softmax, from the output of torch's own kernel: computed from exponentials here, it would be rounded as those of large logits are


def _softmax(output: Tensor, input: Any, dim: int | None = None, *_: Any, **__: Any) -> SideCarries:
    # y (G - sum_k y_k G_k), with y the output
    small = _small_along(output, input, dim)
    return [] if small is None else [(input, lambda factor: scaled(factor, output)), (input, _less(output, output, small))]


def _log_softmax(output: Tensor, input: Any, dim: int | None = None, *_: Any, **__: Any) -> SideCarries:
    # G - softmax(x) sum_k G_k
    small = _small_along(output, input, dim)
    return [] if small is None else [(input, lambda factor: factor), (input, _less(output.new_ones(()), output.exp(), small))]


def _small_along(output: Tensor, input: Any, dim: int | None) -> torch.Size | None:
    """The shape of a sum along `dim`; None where the gradient is better materialised: narrow dtypes would round terms that cancel."""
    if dim is None or input.dtype != output.dtype or output.dtype.itemsize < 4:
        return None
    return torch.Size(1 if d == dim % output.ndim else size for d, size in enumerate(output.shape))


def _less(weights: Tensor, constant: Tensor | None, small: torch.Size) -> CarryToSide:
    """For a gradient G: -constant * sum(weights * G), summed to the shape `small`; without a constant, expanded."""

    def carry(factor: Factor) -> Factor | None:
        total = contracted(factor, weights.expand(factor.shape), small)
        if total is None:
            return None
        numbers = -total.to(weights.dtype)
        return Expanded(numbers, factor.shape) if constant is None else multiple(numbers, constant)

    return carry


def _batch_norm(
    output: Tensor,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> SideCarries:
    # y = w x + b with x = r (input - its mean): r (H - mean(H) - x mean(x H)) with H = w G; x G and G, added up, for w and b
    if not training or running_mean is not None or running_var is not None or input.dtype != output.dtype or output.dtype.itemsize < 4:
        return []  # narrow dtypes would round terms that cancel
    dims = [dim for dim in range(input.ndim) if dim != 1]
    affine = torch.Size((input.shape[1], *(1,) * (input.ndim - 2)))
    centred = input.detach() - input.detach().mean(dims, keepdim=True)
    r = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()  # torch.var is slower than all of this
    x, scale = centred * r, r if weight is None else weight.detach().reshape(affine) * r
    means = scale / max(1, x.numel() // max(1, r.numel()))

    def to_affine(side: Tensor, scale: Scale) -> CarryToSide:
        carry = _entry(output, affine, scale)

        def flat(factor: Factor) -> Factor | None:
            found = carry(factor)
            return None if found is None else reshaped(found, side.shape)

        return flat

    to_input = [lambda factor: scaled(factor, scale), _less(means, None, r.shape), _less(x * means, x, r.shape)]
    to_others = [(side, to_affine(side, scale)) for side, scale in ((weight, x), (bias, 1)) if side is not None]
    return [(input, carry) for carry in to_input] + to_others


def multiple(numbers: Tensor, constant: Tensor) -> Factor:
    """The factor of numbers[n, *small] * constant[*shape]."""
    if numbers.shape[1:] == constant.shape:
        return Dense(numbers * constant)
    return Scaled(Expanded(numbers, constant.shape), constant.to(numbers.dtype).expand(len(numbers), *constant.shape))


# Products


def _matmul(output: Tensor, input: Any, other: Any) -> SideCarries:
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
    if (x.ndim, y.ndim) == (1, 2):
        return [
            (input, lambda factor: _if_dense(factor, lambda c: Dense(c @ y.t().to(c.dtype)))),
            (other, lambda factor: _if_dense(factor, lambda c: Outer(x.expand(len(c), 1, -1).to(c.dtype), c[:, None]))),
        ]
    if x.ndim < 2 or x.ndim not in (2, y.ndim):
        return []
    return _einsum(output, matmul_equation((x.ndim, y.ndim)), input, other)


def _linear(output: Tensor, input: Any, weight: Any, bias: Any = None) -> SideCarries:
    if weight.ndim != 2:
        return []
    if input.ndim == 1:
        products = _matmul(output, weight, input)
    else:
        to_input, to_matrix = _of_rows(input.detach(), weight.detach().t())
        products = [(input, to_input), (weight, lambda factor: _turned(to_matrix(factor)))]
    return products + _entrywise(output, [(bias, 1)])


def _of_rows(x: Tensor, matrix: Tensor) -> tuple[CarryToSide, CarryToSide]:
    """The carries of x @ matrix to both, for x of rows in any number of dimensions."""
    flat = torch.Size((x.shape[:-1].numel(), matrix.shape[1]))

    def to_x(factor: Factor) -> Factor | None:
        found = postmultiplied(reshaped(factor, flat), matrix.t())
        return None if found is None else reshaped(found, x.shape)

    def to_matrix(factor: Factor) -> Factor | None:
        return premultiplied(reshaped(factor, flat), x if x.ndim == 2 else x.flatten(0, -2))

    return to_x, to_matrix


def _addmm(output: Tensor, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> SideCarries:
    product = [(side, lambda factor, carry=carry: carry(scaled(factor, alpha))) for side, carry in _matmul(output, mat1, mat2)]
    return _entrywise(output, [(input, beta)]) + product


def _outer(output: Tensor, input: Any, vec2: Any) -> SideCarries:
    rows, columns = (input.shape[0], 1), (1, vec2.shape[0])
    left, right = (vector.detach().reshape(shape).expand(output.shape) for vector, shape in ((input, rows), (vec2, columns)))

    def carry(factor: Factor, weights: Tensor, shape: tuple[int, int]) -> Factor | None:
        total = contracted(factor, weights, torch.Size(shape))
        return None if total is None else Dense(total.flatten(1))

    return [(input, lambda factor: carry(factor, right, rows)), (vec2, lambda factor: carry(factor, left, columns))]


def _inv(output: Tensor, A: Any) -> SideCarries:
    # -X^T G X^T, with X the inverse
    x = output.detach()

    def carry(factor: Factor) -> Factor:
        product = as_product(factor)
        if product is not None:
            return Outer(product.left @ -x.to(factor.dtype), product.right @ x.mT.to(factor.dtype))
        return Dense(x.mT @ factor.materialize() @ -x.mT)

    return [(A, carry)]


def _pinv(output: Tensor, A: Any, *_: Any, **__: Any) -> SideCarries:
    # -P^T G P^T + (I - A P) G^T P P^T + P^T P G^T (I - P A), with P the pseudoinverse, as in torch: while the rank of A stays the same
    if A.ndim != 2:
        return []

    def carry(factor: Factor) -> Factor | None:
        product, dtype = as_product(factor), factor.dtype
        if product is None or 3 * product.positions * sum(A.shape) >= A.numel():
            return None
        a, p = A.detach().to(dtype), output.detach().to(dtype)
        left, right = product.left, product.right
        to_rows, to_columns = left @ p, right @ p.mT
        lefts = -to_rows, right - to_columns @ a.mT, to_columns @ p
        return Outer(torch.cat(lefts, 1), torch.cat((to_columns, to_rows @ p.mT, left - to_rows @ a), 1))

    return [(A, carry)]


def _matrix_exp(output: Tensor, A: Any) -> SideCarries:
    if A.ndim != 2 or not A.is_cpu:  # reading its size would wait for an accelerator
        return []

    def carry(factor: Factor) -> Factor | None:
        product = as_product(factor)
        if product is None:
            return None
        given = A.detach(), product.left, product.right
        most = len(A) // max(1, 2 * product.positions)  # with more nodes the sides would be larger than the gradient
        sides = sides_of(*given, most) if _functorch.can_read_now(A) else None
        return Dense(pulled(*given)) if sides is None else Outer(*sides)

    return [(A, carry)]


def _solve(output: Tensor, A: Any, B: Any, *, left: bool = True) -> SideCarries:
    return _of_system(output, A, B, by_lu(A.detach()), left)


def _solve_triangular(output: Tensor, A: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> SideCarries:
    entries = triangle(A.detach(), upper, unitriangular)
    return _of_system(output, A, B, by_triangle(A.detach(), upper, unitriangular), left, entries)


def _of_system(output: Tensor, A: Any, B: Any, solve: Solve, left: bool, entries: Tensor | None = None) -> SideCarries:
    """For A X = B, with Y = A^-T G: Y for B, and -Y X^T for A, or these entries of it; from the right, the same of all transposes."""
    is_vector = takes_vectors(A.shape, B.shape)
    x = output.detach().unsqueeze(-1) if is_vector else output.detach() if left else output.detach().mT
    if output.shape != B.shape or x.shape[:-1] != A.shape[:-1]:
        return []  # broadcast

    def solved(factor: Factor) -> Factor:
        product = as_product(factor) if A.ndim == 2 else None
        if product is not None:
            rows, others = (product.left, product.right) if left else (product.right, product.left)
            return Outer(solve(rows.flatten(0, 1).mT.to(x.dtype), left).mT.unflatten(0, rows.shape[:2]).to(factor.dtype), others)
        c = factor.materialize().to(x.dtype)
        return Dense(solve_all(solve, c.unsqueeze(-1) if is_vector else c if left else c.mT, A.ndim, left))

    def to_A(factor: Factor) -> Factor | None:
        y = solved(factor)
        product = Dense(y.values @ -x.mT) if isinstance(y, Dense) and A.ndim > 2 else postmultiplied(y, -x.mT)
        product = product if left else _turned(product)
        return product if product is None or entries is None else scaled(product, entries)

    def to_B(factor: Factor) -> Factor | None:
        y = solved(factor)
        if is_vector:
            return Dense(y.materialize().squeeze(-1))
        return y if left else transposed(y)

    return [(A, to_A), (B, to_B)]


def _turned(factor: Factor | None) -> Factor | None:
    return None if factor is None else transposed(factor)


def _if_dense(factor: Factor, build: Callable[[Tensor], Factor]) -> Factor | None:
    return build(factor.values) if isinstance(factor, Dense) else None


def _operands(output: Tensor, labels: Labels, operands: Sequence[tuple[Labels, Any]]) -> SideCarries:
    """The carries of an einsum, or of what is a reshape of its result, with the labels of its output."""
    sizes: dict[str, int] = {}
    for own, tensor in operands:
        if len(set(own)) < len(own) or any(sizes.setdefault(label, size) != size for label, size in zip(own, tensor.shape, strict=True)):
            return []  # a diagonal, or broadcast
    shape = torch.Size([sizes[label] for label in labels])
    if output.numel() == 0 or shape.numel() != output.numel():
        return []

    def to(k: int) -> CarryToSide:
        own, tensor = operands[k]
        others = [(theirs, other.detach()) for theirs, other in (*operands[:k], *operands[k + 1 :])]
        return lambda factor: of_operand(reshaped(factor, shape), labels, others, own, tensor.shape)

    return [(tensor, to(k)) for k, (_, tensor) in enumerate(operands)]


def _einsum(output: Tensor, equation: Any, *operands: Any) -> SideCarries:
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or "." in equation:
        return []
    written = einsum_labels(equation, [tensor.ndim for tensor in given])
    return [] if written is None else _operands(output, written[1], list(zip(written[0], given, strict=True)))


def _kron(output: Tensor, input: Any, other: Any) -> SideCarries:
    if input.ndim != other.ndim:
        return []
    first, second = ([f"{name}{k}" for k in range(input.ndim)] for name in ("outer", "inner"))
    return _operands(output, [label for pair in zip(first, second, strict=True) for label in pair], [(first, input), (second, other)])


def _tensordot(output: Tensor, a: Any, b: Any, dims: Any = 2, out: None = None) -> SideCarries:
    written = tensordot_labels((a.ndim, b.ndim), dims)
    return [] if written is None else _operands(output, written[1], list(zip(written[0], (a, b), strict=True)))


def _inner(output: Tensor, input: Any, other: Any) -> SideCarries:
    if other.ndim == 2:
        return _linear(output, input, other)
    return _tensordot(output, input, other, ([input.ndim - 1], [other.ndim - 1])) if input.ndim and other.ndim else []


# Layouts and dtypes


def _reshape(output: Tensor, input: Any, *_: Any, **__: Any) -> SideCarries:
    shape = input.shape
    return [(input, lambda factor: reshaped(factor, shape))]


def _cat(output: Tensor, tensors: Any, dim: int = 0) -> SideCarries:
    dim %= output.ndim
    sizes = [tensor.shape[dim] if tensor.ndim == output.ndim else 0 for tensor in tensors]  # cat ignores tensors of shape [0]
    if 0 in sizes:
        return []

    return [(tensor, lambda factor, k=k: narrowed(factor, dim, sum(sizes[:k]), sizes[k])) for k, tensor in enumerate(tensors)]


def _pad(output: Tensor, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> SideCarries:
    if mode != "constant" or min(pad, default=0) < 0 or 0 in input.shape:
        return []

    starts = [0] * (input.ndim - len(pad) // 2) + list(pad[::2])[::-1]
    return [(input, lambda factor: _box(factor, starts, input.shape))]


def _box(factor: Factor | None, starts: Sequence[int], sizes: Sequence[int]) -> Factor | None:
    """The entries from `starts` on, as many as `sizes` says in each dimension."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if factor is not None and factor.shape[dim] != size:
            factor = narrowed(factor, dim, start, size)
    return factor


def _stack(output: Tensor, tensors: Any, dim: int = 0) -> SideCarries:
    if len(tensors) > _MOST_SLICES:
        return []
    dim %= output.ndim
    return [(tensor, lambda factor, k=k: sliced(factor, dim, k)) for k, tensor in enumerate(tensors)]


def _sum(output: Tensor, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> SideCarries:
    return _added_slices(input, dim)


def _mean(output: Tensor, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> SideCarries:
    return _added_slices(input, dim, is_mean=True)


def _added_slices(input: Tensor, dim: Any, is_mean: bool = False) -> SideCarries:
    """Sums of a few slices: the gradient of each is that of the sum."""
    if not isinstance(dim, int) or input.ndim == 0 or not 0 < input.shape[dim] <= _MOST_SLICES:
        return []
    slices = slices_of(input.shape, dim % input.ndim)
    scale = 1 / len(slices) if is_mean else 1

    def carry(factor: Factor) -> Factor | None:
        own = scaled(factor, scale) if isinstance(factor, _SPREAD) else None
        if own is None:
            return None
        own = reshaped(own, torch.Size(slices[0].size))
        if own.is_kept and not isinstance(own, Rows):  # of a table, also a small one, the rows go on to the next step
            return Expanded(own.materialize().unsqueeze(1 + dim % input.ndim), input.shape)
        return Views([own] * len(slices), slices, input.shape)

    return [(input, carry)]


_MOST_SLICES = 16  # which are carried one by one, in less time than autograd takes for all
_SPREAD = (Outer, Rows, Routed, Conv, Views)


def _block_diag(output: Tensor, *tensors: Any) -> SideCarries:
    if any(tensor.ndim != 2 or tensor.numel() == 0 for tensor in tensors):
        return []

    starts = [[sum(before.shape[dim] for before in tensors[:k]) for dim in (0, 1)] for k in range(len(tensors))]
    return [(tensor, lambda factor, k=k: _box(factor, starts[k], tensors[k].shape)) for k, tensor in enumerate(tensors)]


def _diag(output: Tensor, input: Any) -> SideCarries:
    return [(input, diagonal)] if input.ndim == 1 else []


def _diagonal(output: Tensor, input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> SideCarries:
    is_main = input.ndim == 2 and (offset, dim1 % 2, dim2 % 2) == (0, 0, 1)
    return [(input, lambda factor: on_diagonal(factor, input.shape))] if is_main else []


def _part(output: Tensor, input: Any, *_: Any, **__: Any) -> SideCarries:
    """Views of some of the entries, or of all of them in another order."""
    if not input.is_contiguous():
        order = sorted(range(input.ndim), key=lambda dim: -input.stride(dim))
        whole, back = input.permute(order), [order.index(dim) for dim in range(input.ndim)]
        carries = _part(output, whole) if whole.is_contiguous() else []
        return [(input, lambda factor, carry=carry: _reordered(carry(factor), back)) for _, carry in carries]
    of_input = output.numel() > 0 and _functorch.memory_of(output) == _functorch.memory_of(input)
    if not of_input or any(stride == 0 and size > 1 for size, stride in zip(output.shape, output.stride(), strict=True)):
        return []
    region = Region(tuple(output.shape), tuple(output.stride()), int(output.storage_offset() - input.storage_offset()))

    # The output's dimensions as they follow each other in the input, if these are all that has been changed.
    order = sorted(range(output.ndim), key=lambda dim: -output.stride(dim))
    moved = [(output.shape[dim], output.stride(dim)) for dim in order]
    of_one, of_other = ([pair for pair in pairs if pair[0] != 1] for pairs in (moved, zip(input.shape, input.stride(), strict=True)))
    is_permuted = of_one == of_other

    def carry(factor: Factor) -> Factor | None:
        if is_permuted:
            return reshaped(permuted(factor, order), input.shape)
        found = placed(factor, region, input.shape)
        is_small = isinstance(found, Views) and found.is_small_part
        return None if isinstance(factor, Dense) and not is_small else found

    return [(input, carry)]


def _reordered(factor: Factor | None, order: Sequence[int]) -> Factor | None:
    return None if factor is None else permuted(factor, order)


def _indexed(output: Tensor, input: Any, index: Any) -> SideCarries:
    views = _part(output, input)
    parts = index if isinstance(index, tuple) else (index,)
    if views or not all(map(_is_kept_index, parts)):
        return views
    if isinstance(index, tuple) and len(index) == input.ndim == 2 and _is_columns(*index):
        return _index_select(output, input, 1, index[1])
    are_rows = all(isinstance(part, Tensor) and part.dtype in _INDICES for part in parts)
    if isinstance(index, Tensor) and are_rows and (index.ndim, input.ndim) == (2, 2) and index.shape[1] <= _MOST_SLICES:
        lookups = [carry for column in index.unbind(1) for _, carry in _index_select(output, input, 0, column)]
        return [(input, lambda factor, k=k, carry=carry: _of_slice(factor, k, carry)) for k, carry in enumerate(lookups)]
    return _read(output, input, lambda numbers: numbers[index], len(parts) if are_rows else input.ndim)


def _is_columns(rows: Any, columns: Any) -> bool:
    is_all = rows is ... or isinstance(rows, slice) and rows == slice(None)
    return is_all and isinstance(columns, Tensor) and columns.ndim == 1 and columns.dtype in _INDICES


def _is_kept_index(part: Any) -> bool:
    """Whether a part of an index selects the same entries later, whatever fn does with it; in a trace also as many whatever its values are.

    Not an array, which fn may write into unseen; of lists, steps have copies.
    """
    if isinstance(part, Tensor):
        return part.dtype in _INDICES or not _functorch.is_traced()
    if isinstance(part, list):
        return all(type(item) is int for item in part)
    if isinstance(part, slice):
        return all(bound is None or isinstance(bound, int) for bound in (part.start, part.stop, part.step))
    return part is None or part is ... or isinstance(part, int)


def _of_slice(factor: Factor, k: int, carry: CarryToSide) -> Factor | None:
    own = sliced(factor, 1, k)
    return None if own is None else carry(own)


def _index_select(output: Tensor, input: Any, dim: int, index: Any) -> SideCarries:
    if not isinstance(index, Tensor) or index.dtype not in _INDICES or input.ndim == 0:
        return []
    if _is_first(dim, input):
        return _read(output, input, lambda numbers: numbers[index], 1)
    entries = _read(output, input, lambda numbers: numbers.index_select(dim, index), input.ndim)
    if input.ndim != 2 or not entries:
        return entries

    def carry(factor: Factor) -> Factor | None:
        found = scattered_columns(factor, index.long().flatten() % max(1, input.shape[1]), input.shape[1])
        return entries[0][1](factor) if found is None else found

    return [(input, carry)]


def _read(output: Tensor, input: Any, read: Callable[[Tensor], Tensor], dims: int) -> SideCarries:
    """Entries of a tensor, or what has these dimensions in front, at places that an op selects; `read` is this op."""
    if output.dtype == torch.float16:  # in which sums may leave the range
        return []
    shape, width = input.shape[:dims], input.shape[dims:].numel()

    def carry(factor: Factor) -> Factor | None:
        places = read(torch.arange(shape.numel(), device=input.device).reshape(shape)).flatten()
        found = scattered(reshaped(factor, torch.Size((len(places), width))), places, shape.numel())
        return None if found is None else reshaped(found, input.shape)

    return [(input, carry)]


def _gather(output: Tensor, input: Any, dim: int, index: Tensor, *, sparse_grad: bool = False) -> SideCarries:
    return _read(output, input, lambda numbers: numbers.gather(dim, index), input.ndim)


def _take(output: Tensor, input: Any, index: Tensor) -> SideCarries:
    return _read(output, input, lambda numbers: numbers.take(index), input.ndim)


def _take_along_dim(output: Tensor, input: Any, indices: Tensor, dim: int | None = None) -> SideCarries:
    return _read(output, input, lambda numbers: numbers.take_along_dim(indices, dim), input.ndim)


def _rearranged(name: str) -> Callable[..., SideCarries]:
    """The carries of flips and rolls: where a matrix has its rows and its columns in another order, a product's sides have them so."""

    def carries(output: Tensor, input: Any, *args: Any, **kwargs: Any) -> SideCarries:
        def move(numbers: Tensor) -> Tensor:
            return getattr(numbers, name)(*args, **kwargs)

        entries = _read(output, input, move, input.ndim)
        is_flat = name == "roll" and kwargs.get("dims", args[1] if len(args) > 1 else ()) in ((), [])  # of all entries in one line
        if input.ndim != 2 or input.numel() == 0 or is_flat or name == "rot90":
            return entries

        def carry(factor: Factor) -> Factor | None:
            places = move(torch.arange(input.numel(), device=input.device).view(input.shape))
            rows, columns = (places[:, 0] // input.shape[1]).argsort(), (places[0] % input.shape[1]).argsort()
            turned = _turned(gathered(factor, rows))
            found = None if turned is None else _turned(gathered(turned, columns))
            return found if found is not None or not entries else entries[0][1](factor)

        return [(input, carry)]

    return carries


def _index_add(output: Tensor, input: Any, dim: int, index: Tensor, source: Any, *, alpha: float = 1) -> SideCarries:
    if not _is_first(dim, input) or index.ndim != 1 or source.ndim != input.ndim:
        return []
    return [(input, lambda factor: factor), (source, _to_rows_of(source, index, alpha))]


def _scatter_add(output: Tensor, input: Any, dim: int, index: Tensor, src: Any) -> SideCarries:
    places = _places_of_rows(output, dim, index, src)
    return [] if places is None else [(input, lambda factor: factor), (src, _to_rows_of(src, places))]


def _scatter_reduce(
    output: Tensor, input: Any, dim: int, index: Tensor, src: Any, reduce: str, *, include_self: bool = True
) -> SideCarries:
    places = _places_of_rows(output, dim, index, src)
    if places is None or reduce == "prod":
        return []
    # Each argument's entry has one place in the output: its gradient is the one there times a number, which shares out what is equal.
    with torch.enable_grad():
        sides = [side.detach().requires_grad_() for side in (input, src)]
        reduced = run_pullable(torch.scatter_reduce, sides[0], dim, index, sides[1], reduce, include_self=include_self)
        to_input, to_src = torch.autograd.grad(reduced, sides, torch.ones_like(reduced))
    # Without `input` itself its gradient is zero, whatever the cotangent is: also where that is not finite.
    return [(input, lambda factor: scaled(factor, to_input) if include_self else None), (src, _to_rows_of(src, places, to_src))]


def _places_of_rows(output: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor | None:
    """The place of each row of `src` among those of the output; None if its entries may go to several."""
    if not _is_first(dim, output) or index.shape != src.shape or src.shape[1:] != output.shape[1:]:
        return None
    if index.ndim == 0 or index.numel() == 0:
        return None
    if any(stride and size > 1 for size, stride in zip(index.shape[1:], index.stride()[1:], strict=True)):
        return None
    return index[(slice(None), *(0,) * (index.ndim - 1))]


def _to_rows_of(source: Tensor, places: Tensor, scale: Scale = 1) -> CarryToSide:
    """The carry to rows that go to these places, scaled."""
    to_source = _entry(source, source.shape, scale)

    def carry(factor: Factor) -> Factor | None:
        found = gathered(_as_matrix(factor), places.long())
        return None if found is None else to_source(reshaped(found, source.shape))

    return carry


def _is_first(dim: int, tensor: Tensor) -> bool:
    return tensor.ndim > 0 and dim % tensor.ndim == 0


def _as_matrix(factor: Factor) -> Factor:
    """The gradient of a table, with its rows flattened."""
    return reshaped(factor, torch.Size((factor.shape[0], factor.shape[1:].numel())))


_INDICES = (torch.int64, torch.int32)


def _transpose(output: Tensor, input: Any, *_: Any, **__: Any) -> SideCarries:
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


def _cast(output: Tensor, input: Any, *_: Any, **__: Any) -> SideCarries:
    return [(input, lambda factor: factor)] if (output.shape, output.device) == (input.shape, input.device) else []


ADJOINTS: dict[str, Callable[..., SideCarries]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("sub", "subtract", "__sub__"), _sub),
    **dict.fromkeys(("rsub", "__rsub__"), _swapped(_sub)),
    **dict.fromkeys(("neg", "negative"), _neg),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _mul),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _div),
    "__rdiv__": _swapped(_div),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("matmul", "linalg_matmul", "mm", "bmm", "_sparse_mm", "mv", "dot", "vdot", "__matmul__"), _matmul),
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("outer", "ger"), _outer),
    "einsum": _einsum,
    "kron": _kron,
    "tensordot": _tensordot,
    "inner": _inner,
    **dict.fromkeys(("linalg_inv", "inverse"), _inv),
    **dict.fromkeys(("linalg_pinv", "pinverse"), _pinv),
    **dict.fromkeys(("linalg_matrix_exp", "matrix_exp"), _matrix_exp),
    "linalg_solve": _solve,
    "linalg_solve_triangular": _solve_triangular,
    "repeat": _repeat,
    "tile": _tile,
    "repeat_interleave": _repeat_interleave,
    "block_diag": _block_diag,
    **dict.fromkeys(("diag", "diag_embed"), _diag),
    "diagonal": _diagonal,
    "batch_norm": _batch_norm,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    **dict.fromkeys(("reshape", "reshape_as", "view", "view_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("t", "T", "mT", "H", "mH", "adjoint", "transpose", "swapaxes", "swapdims", "permute"), _transpose),
    **dict.fromkeys(("select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "movedim", "moveaxis"), _part),
    "__getitem__": _indexed,
    "index_select": _index_select,
    "gather": _gather,
    "take": _take,
    "take_along_dim": _take_along_dim,
    **{name: _rearranged(name) for name in ("flip", "fliplr", "flipud", "roll", "rot90")},
    "index_add": _index_add,
    "scatter_add": _scatter_add,
    "scatter_reduce": _scatter_reduce,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    "stack": _stack,
    "sum": _sum,
    "mean": _mean,
    **dict.fromkeys(("to", "type", "float", "double", "half", "bfloat16", "contiguous", "clone", "dropout"), _cast),
}

FUSED = frozenset(name for name, carries in ADJOINTS.items() if carries in (_softmax, _log_softmax, _batch_norm))
"""Ops whose backward is one kernel, where the maps of factors are several."""

ARITHMETIC = frozenset(name for name, carries in ADJOINTS.items() if carries in (_add, _sub, _neg, _mul, _div))
"""Elementwise ops of two arguments, which are broadcast."""

MOVING = frozenset(name for name, carries in ADJOINTS.items() if carries in (_reshape, _transpose, _part, _indexed, _cat, _stack, _pad))
"""Ops that move entries and do not change their values."""

AS_SMALL = frozenset(name for name, carries in ADJOINTS.items() if carries in (_matmul, _linear, _indexed))
"""Ops with a rule whose factors, if all samples share the data, are no larger than those of the rule, however many rows there are."""
