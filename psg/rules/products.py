"""Matrix products beyond F.linear: each is an einsum of parameters and data, and so is the gradient of each parameter.

y[n,O] = sum over the labels not in O of x_1[n,K_1] x_2[K_2] ..., where data carries the sample's label n and parameters do not. With C the
cotangent of y: grad x_k[n,K_k] = the einsum of C[n,O] and every other operand -> [n,K_k]. For a parameter that maps some labels of the data
to others of the output, this is an Outer over the labels that data and output share, and is not materialised.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, reduce
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._torch import _ambient, _functorch
from psg.factors import Dense, Factor, Outer, Region, Routed, Views
from psg.factors._maps import reshaped
from psg.factors._views import strides_of
from psg.rules._registry import decomposition, of_each, reshape, rule, transposable_form, transpose
from psg.rules.linear import flatten_positions, linear

_SMALL_GRADIENTS = 1 << 20
"""To materialise the gradients of one of several products takes less time than ops for its factor, if they take no more bytes."""


def contract(
    operands: Sequence[Tensor],
    labels: Sequence[str],
    out: str,
    shared: Sequence[bool],
    stretch: str = ascii_letters,
    forward: Callable[..., Tensor] | None = None,
    contiguous: bool = True,
) -> Any:
    """An einsum of data (samples in dim 0) and of shared operands (no samples).

    Args:
        operands: The operands; at least one is data.
        labels: For each operand one letter a dimension, without the samples.
        out: The labels of the output.
        shared: Which operands have no samples.
        stretch: Labels whose dimensions broadcast from size 1.
        forward: Computes the op from the physical operands; None for torch.einsum.
        contiguous: Whether the op's output for one sample is contiguous, so that fn may take views of it.

    Returns:
        The output, and for each operand the builder of its factor, meaningful for shared operands only. Or NotImplemented.
    """
    sizes: dict[str, int] = {}
    shapes = [tensor.shape if alone else tensor.shape[1:] for tensor, alone in zip(operands, shared, strict=True)]
    for names, shape in zip(labels, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            known = sizes.setdefault(name, size)
            if size != known and not (name in stretch and 1 in (size, known)):
                return NotImplemented  # torch will say what is wrong
            sizes[name] = size if known == 1 else known
    spare = [letter for letter in ascii_letters if letter not in sizes]
    repeated = any(len(set(names)) < len(names) for names, alone in zip(labels, shared, strict=True) if alone)
    if not spare or repeated or any(tensor.is_complex() for tensor in operands):
        return NotImplemented
    n = spare[0]
    physical = [names if alone else n + names for names, alone in zip(labels, shared, strict=True)]
    if forward is None:
        output = torch.einsum(f"{','.join(physical)}->{n}{out}", *operands)
    else:
        output = forward(*operands)
    if contiguous:
        output = output.contiguous()

    def builder(k: int) -> Callable[[Tensor], Factor]:
        def build(cotangent: Tensor) -> Factor:
            others = [(tensor, names) for j, (tensor, names) in enumerate(zip(operands, physical, strict=True)) if j != k]
            data, given = _together(others, n + out, labels[k], cotangent.shape[0] * math.prod(shapes[k]))
            if data is not None and data.shape[1:] == tuple(sizes[name] for name in given[1:]):
                factor = _factored(cotangent, n + out, data, given, labels[k], shapes[k])
                if factor is not None:
                    return factor
            return _dense(cotangent, n + out, others, labels[k], shapes[k], sizes)

        return build

    return reshape(output, output.shape), [builder(k) for k in range(len(operands))]


def _together(others: list[tuple[Tensor, str]], out: str, labels: str, most: int) -> tuple[Tensor | None, str]:
    """The product of all operands but one, and its labels: those of the output and of that one.

    None if it had more than `most` entries, or if it could leave the range of float16 where its product with the cotangent does not.
    """
    if len(others) == 1:
        return others[0]
    n, sizes, terms = out[0], _sizes(others), _alike(others)
    kept = n + "".join(name for name in sizes if name != n and (name in out or name in labels))
    is_formed = math.prod(sizes[name] for name in kept) <= most and terms[0][0].dtype != torch.float16
    return (_contracted(terms, kept) if is_formed else None), kept


def _factored(cotangent: Tensor, out: str, data: Tensor, given: str, labels: str, shape: torch.Size) -> Factor | None:
    """The factor, if each label of the parameter is in the data or in the output; None for others, and where the gradient is best dense.

    Labels in both (heads, experts, blocks) make one product for each of their values. A parameter that meets each sample in one number (the
    vector of a logistic regression) gets the data, times that number's cotangent.
    """
    if len(out) == 1 and sorted(labels) == sorted(given[1:]) and data.nbytes > _SMALL_GRADIENTS and data[0].numel() == shape.numel():
        (c, _), (x, _) = _alike([(cotangent, out), (data, given)])
        x = torch.einsum(f"{given}->{out}{labels}", x)
        return reshaped(Outer(c[:, None, None], x.flatten(1)[:, None]), shape)
    both = "".join(name for name in labels if name in given and name in out)
    if not both or len(set(given)) < len(given):
        return _outer(cotangent, out, data, given, labels, shape)
    count = math.prod(cotangent.shape[out.index(name)] for name in both)
    if count != math.prod(shape[labels.index(name)] for name in both):
        return None  # broadcast
    if len(cotangent) * shape.numel() * cotangent.itemsize <= count * _SMALL_GRADIENTS:
        return None
    own_out, own_given, own = ("".join(name for name in names if name not in both) for names in (out, given, labels))
    sizes, strides = dict(zip(labels, shape, strict=True)), dict(zip(labels, strides_of(shape), strict=True))
    size, stride = torch.Size(sizes[name] for name in own), tuple(strides[name] for name in own)
    sides = (
        torch.einsum(f"{names}->{both}{rest}", side).flatten(0, len(both) - 1).unbind()
        for side, names, rest in ((cotangent, out, own_out), (data, given, own_given))
    )
    parts: list[Factor] = []
    for c, x in zip(*sides, strict=True):
        part = _outer(c, own_out, x, own_given, own, size)
        if part is None or part.prefers_dense_maps:
            return None
        parts.append(part)
    starts = itertools.product(*(range(0, sizes[name] * strides[name], strides[name]) for name in both))
    return Views(parts, [Region(tuple(size), stride, sum(start)) for start in starts], shape)


def factor_of(cotangent: Tensor, out: str, data: Tensor, given: str, labels: str, shape: torch.Size) -> Factor:
    """The factor of the einsum of a cotangent and data, both with the samples' label first, to the labels of a parameter."""
    factor = _factored(cotangent, out, data, given, labels, shape)
    if factor is not None:
        return factor
    return _dense(cotangent, out, [(data, given)], labels, shape, _sizes([(cotangent, out), (data, given)]))


def _outer(cotangent: Tensor, out: str, data: Tensor, given: str, labels: str, shape: torch.Size) -> Factor | None:
    """The factor, if some labels of the parameter are only in the data and all others only in the output; else None."""
    contracted = "".join(name for name in labels if name in given and name not in out)
    produced = "".join(name for name in labels if name in out and name not in given)
    if not contracted or not produced or len(contracted + produced) < len(labels) or len(set(given)) < len(given):
        return None
    along = "".join(name for name in out if name not in produced)  # n and the positions
    x = torch.einsum(f"{given}->{along}{contracted}", data)
    c = torch.einsum(f"{out}->{along}{produced}", cotangent)
    found = dict(zip(contracted + produced, (*x.shape[len(along) :], *c.shape[len(along) :]), strict=True))
    if tuple(found[name] for name in labels) != tuple(shape):
        return None
    x, c = (flatten_positions(side.flatten(len(along))) for side in (x, c))
    factor, order = (Outer(x, c), contracted + produced) if labels.startswith(contracted) else (Outer(c, x), produced + contracted)
    if len(labels) == 2:
        return factor
    # View the matrix with all its labels, then permute these into the parameter's order.
    whole, strides = torch.Size(found[name] for name in order), dict(zip(labels, strides_of(shape), strict=True))
    viewed = reshaped(factor, whole)
    return viewed if order == labels else Views([viewed], [Region(tuple(whole), tuple(strides[name] for name in order), 0)], shape)


def _dense(
    cotangent: Tensor, out: str, others: Sequence[tuple[Tensor, str]], labels: str, shape: torch.Size, sizes: dict[str, int]
) -> Dense:
    """The einsum of the cotangent and the other operands."""
    terms = _alike([(cotangent, out), *others])
    present = {name for _, names in terms for name in names}
    # Broadcast labels are summed over; along labels that no other operand has, the gradient is constant.
    kept = [name for name, size in zip(labels, shape, strict=True) if name in present and size == sizes[name]]
    gradient = _contracted(terms, out[0] + "".join(kept))
    index = tuple(slice(None) if name in kept else None for name in labels)
    return Dense(gradient[(slice(None), *index)].expand(gradient.shape[0], *shape))


def _alike(terms: list[tuple[Tensor, str]]) -> list[tuple[Tensor, str]]:
    """The terms in one dtype: under autocast they differ."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor, _ in terms))
    return [(tensor.to(dtype), names) for tensor, names in terms]


def _contracted(terms: list[tuple[Tensor, str]], out: str) -> Tensor:
    """The einsum of several tensors, two at a time: always the pair whose product adds the fewest entries.

    torch goes from left to right: in a mixture of experts it would multiply the cotangent by all experts before the gates.
    """
    dtype = terms[0][0].dtype
    if len(terms) > 2 and dtype == torch.float16:  # the product of some may leave its range
        return _contracted([(tensor.float(), names) for tensor, names in terms], out).to(dtype)
    while len(terms) > 2:
        first, second, kept = min(_products(terms, out), key=lambda product: product[3])[:3]
        product = torch.einsum(f"{first[1]},{second[1]}->{kept}", first[0], second[0])
        terms = [(product, kept), *(term for term in terms if term is not first and term is not second)]
    return torch.einsum(f"{','.join(names for _, names in terms)}->{out}", *(tensor for tensor, _ in terms))


def _products(terms: list[tuple[Tensor, str]], out: str) -> Iterator[tuple[tuple[Tensor, str], tuple[Tensor, str], str, int]]:
    """All pairs of terms, with the labels that their product has to keep and the number of entries that it adds."""
    for first, second in itertools.combinations(terms, 2):
        needed = {*out, *(name for term in terms if term is not first and term is not second for name in term[1])}
        sizes = _sizes([first, second])
        kept = "".join(name for name in sizes if name in needed)
        yield first, second, kept, math.prod(sizes[name] for name in kept) - first[0].numel() - second[0].numel()


def _sizes(terms: Sequence[tuple[Tensor, str]]) -> dict[str, int]:
    """The size of each label; a label may have size 1 in some terms."""
    sizes: dict[str, int] = {}
    for tensor, names in terms:
        for name, size in zip(names, tensor.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes


_BATCHED = "bti,bio->bto"


def _pair(names: tuple[str, str], operands: tuple[Tensor, Tensor], equation: str, shared: Collection[str], stretch: str = "") -> Any:
    """A product of two operands, given as an einsum's equation; the labels in `stretch` broadcast from size 1."""
    inputs, out = equation.split("->")
    labels = inputs.split(",")
    alone = [name in shared for name in names]
    if all(alone):
        return NotImplemented  # neither operand of the product is data
    if any(tensor.ndim != len(own) + (not one) for tensor, own, one in zip(operands, labels, alone, strict=True)):
        return NotImplemented
    # An einsum over one term multiplies entry by entry, which autocast leaves in float32.
    is_narrowed = equation == _BATCHED and operands[1].shape[-2] == 1 and _ambient.is_autocast(operands[0])
    result = contract(operands, labels, out, alone, stretch, torch.matmul if is_narrowed else None)
    if result is NotImplemented:
        return NotImplemented
    output, builders = result
    return output, dict(zip(names, builders, strict=True))


@rule(
    torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__, params=("input", "other"), declines_few=True, differentiable=True
)
def matmul(input: Tensor, other: Tensor, *, shared: Collection[str] = ()) -> Any:
    """y = x W or W x, the dimensions before the last two broadcast: ([n,*,i], [i,o]) -> [n,*,o] and its like."""
    if input.is_complex() or other.is_complex():
        return NotImplemented
    if "input" not in shared and other.ndim == 2 and input.ndim > 1:
        output, _ = linear(input, other.T)
        return output, {"other": lambda cotangent: Outer(flatten_positions(input), flatten_positions(cotangent))}
    if "other" not in shared and input.ndim == 2 and other.ndim > 1:
        if other.ndim == 2:  # a vector
            return other @ input.T, {"input": lambda cotangent: Outer(cotangent[:, None], other[:, None])}
        # Single columns are rows just as well: of these, torch multiplies those of all samples at once.
        output = linear(other.squeeze(-1), input)[0].unsqueeze(-1) if other.shape[-1] == 1 else input @ other
        return reshape(output, output.shape), {
            "input": lambda cotangent: Outer(flatten_positions(cotangent.mT), flatten_positions(other.mT))
        }
    dims = [tensor.ndim - (name not in shared) for name, tensor in (("input", input), ("other", other))]
    if 0 in dims:
        return NotImplemented
    if min(dims) > 1 and not _is_copied_by_torch(input, other, shared):
        return _matmul_by_batch(input, other, dims, shared)
    equation = matmul_equation(dims)
    return _pair(("input", "other"), (input, other), equation, shared, stretch="".join(filter(str.isupper, equation)))


@of_each(torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul_of_each(input: Tensor, other: Tensor) -> Any:
    """Matrices and vectors: ([n,t,i] or [n,i], [n,i,o] or [n,i]) -> [n,t,o], [n,t], [n,o] or [n]."""
    dims = input.ndim, other.ndim
    if input.dtype != other.dtype or min(dims) < 2 or max(dims) > 3:
        return NotImplemented
    if dims == (2, 2):
        return (input * other).sum(1) if input.shape == other.shape else NotImplemented
    if dims == (3, 3):
        return torch.bmm(input, other)
    if dims == (2, 3):
        return reshape(torch.bmm(input.unsqueeze(1), other), (len(input), other.shape[2]))
    return reshape(torch.bmm(input, other.unsqueeze(2)), input.shape[:2])


def _is_copied_by_torch(input: Tensor, other: Tensor, shared: Collection[str]) -> bool:
    """Whether torch.matmul, which copies shared matrices for every sample, would write more than the data has."""
    (rows, inner), columns = input.shape[-2:], other.shape[-1]
    return rows * inner > (rows + inner) * columns if "input" in shared else inner * columns > rows * (inner + columns)


def _matmul_by_batch(input: Tensor, other: Tensor, dims: Sequence[int], shared: Collection[str]) -> Any:
    """Two operands whose dimensions before the last two broadcast: computed as autograd does, with the samples in dim 0."""
    rank = max(dims)
    x, w = (
        tensor if name in shared else tensor.reshape(tensor.shape[0], *(1,) * (rank - own), *tensor.shape[1:])
        for name, tensor, own in zip(("input", "other"), (input, other), dims, strict=True)
    )
    output = x @ w

    def product(left: Tensor, right: Tensor) -> Tensor:
        dtype = torch.promote_types(left.dtype, right.dtype)  # under autocast they differ
        return left.to(dtype) @ right.to(dtype)

    return reshape(output, output.shape), {
        "input": lambda cotangent: Dense(sum_to(product(cotangent, w.mT), input.shape)),
        "other": lambda cotangent: Dense(sum_to(product(x.mT, cotangent), other.shape)),
    }


def matmul_equation(dims: Sequence[int]) -> str:
    """The product of two operands as an einsum; the dimensions before the last two, which broadcast, are in capitals."""
    batch = ascii_letters[: max(0, *(d - 2 for d in dims))].upper()
    rows, columns = ["" if d == 1 else name for d, name in zip(dims, "to", strict=True)]
    lead = [batch[len(batch) - max(0, d - 2) :] for d in dims]
    return f"{lead[0]}{rows}i,{lead[1]}i{columns}->{batch}{rows}{columns}"


@decomposition(Tensor.__rmatmul__)
def rmatmul(input: Tensor, other: Tensor) -> Any:
    """other @ input."""
    return other @ input


@rule(torch.mm, Tensor.mm, params=("input", "mat2"), declines_few=True, differentiable=True)
def mm(input: Tensor, mat2: Tensor, *, shared: Collection[str] = ()) -> Any:
    """([t,i], [i,o]) -> [t,o]."""
    return _pair(("input", "mat2"), (input, mat2), "ti,io->to", shared)


@rule(torch.bmm, Tensor.bmm, params=("input", "mat2"), declines_few=True, differentiable=True)
def bmm(input: Tensor, mat2: Tensor, *, shared: Collection[str] = ()) -> Any:
    """([b,t,i], [b,i,o]) -> [b,t,o]."""
    return _pair(("input", "mat2"), (input, mat2), _BATCHED, shared)


@rule(torch.mv, Tensor.mv, params=("input", "vec"), declines_few=True, differentiable=True)
def mv(input: Tensor, vec: Tensor, *, shared: Collection[str] = ()) -> Any:
    """([t,i], [i]) -> [t]."""
    return _pair(("input", "vec"), (input, vec), "ti,i->t", shared)


@rule(torch.dot, Tensor.dot, params=("input", "tensor"), declines_few=True, differentiable=True)
def dot(input: Tensor, tensor: Tensor, *, shared: Collection[str] = ()) -> Any:
    """([i], [i]) -> []."""
    return _pair(("input", "tensor"), (input, tensor), "i,i->", shared)


@rule(torch.inner, Tensor.inner, params=("input", "other"), declines_few=True, differentiable=True)
def inner(input: Tensor, other: Tensor, *, shared: Collection[str] = ()) -> Any:
    """([*t,i], [*o,i]) -> [*t,*o]."""
    dims = [tensor.ndim - (name not in shared) for name, tensor in (("input", input), ("other", other))]
    if 0 in dims:
        return NotImplemented
    rows, columns = ascii_letters[1 : dims[0]], ascii_letters[dims[0] : dims[0] + dims[1] - 1]
    return _pair(("input", "other"), (input, other), f"{rows}a,{columns}a->{rows}{columns}", shared)


# beta b + alpha (a product)


def _added(
    input: Tensor,
    names: tuple[str, str],
    operands: tuple[Tensor, Tensor],
    equation: str,
    shared: Collection[str],
    beta: float,
    alpha: float,
) -> Any:
    result = _pair(names, operands, equation, shared)
    if result is NotImplemented or input.is_complex():
        return NotImplemented
    product, builders = result
    shape = input.shape if "input" in shared else input.shape[1:]
    lead = product.ndim - 1 - len(shape)
    if any(size not in (1, full) for size, full in zip(shape, product.shape[1 + lead :], strict=True)) or lead < 0:
        return NotImplemented
    output = alpha * product
    if beta != 0:  # for 0 torch ignores the input, NaN included
        bias = input if "input" in shared else input.reshape(input.shape[0], *(1,) * lead, *shape)
        output = (output + beta * bias).to(product.dtype)

    def scaled(build: Callable[[Tensor], Factor]) -> Callable[[Tensor], Factor]:
        return lambda cotangent: build(alpha * cotangent)

    return output, {
        "input": lambda cotangent: Dense(beta * sum_to(cotangent, shape)),
        **{name: scaled(build) for name, build in builders.items()},
    }


def sum_to(cotangent: Tensor, shape: torch.Size) -> Tensor:
    """[n, *full] -> [n, *shape], summed over the dimensions along which a tensor of that shape was broadcast."""
    lead = cotangent.ndim - 1 - len(shape)
    return cotangent.sum_to_size(len(cotangent), *(1,) * lead, *shape).reshape(len(cotangent), *shape)


@rule(torch.addmm, Tensor.addmm, params=("input", "mat1", "mat2"), declines_few=True, differentiable=True)
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, shared: Collection[str] = ()) -> Any:
    """y = beta b + alpha x W: ([t,o], [t,i], [i,o]) -> [t,o]."""
    names, equation = ("mat1", "mat2"), "ti,io->to"
    if set(shared) != {"input", "mat2"} or input.shape != mat2.shape[1:] or mat1.ndim != 3 or mat2.is_complex():
        return _added(input, names, (mat1, mat2), equation, shared, beta, alpha)
    # One flat product that adds the bias as it goes.
    if beta == alpha == 1:
        output, _ = linear(mat1, mat2.T, input)
    else:
        output = reshape(torch.addmm(input, mat1.flatten(0, 1), mat2, beta=beta, alpha=alpha), (*mat1.shape[:2], mat2.shape[1]))
    return output, {
        "input": lambda cotangent: Dense(beta * cotangent.sum(1)),
        "mat2": lambda cotangent: Outer(alpha * mat1, cotangent),
    }


@of_each(torch.addmm, Tensor.addmm)
def addmm_of_each(input: Tensor, mat1: Tensor, mat2: Tensor) -> Any:
    """([n,o] or [n,t,o], [n,t,i], [n,i,o]) -> [n,t,o]."""
    if mat1.ndim != 3 or mat2.ndim != 3 or input.ndim not in (2, 3) or not input.dtype == mat1.dtype == mat2.dtype:
        return NotImplemented
    return torch.baddbmm(input.unsqueeze(1) if input.ndim == 2 else input, mat1, mat2)


@rule(torch.addmv, Tensor.addmv, params=("input", "mat", "vec"), declines_few=True, differentiable=True)
def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1, shared: Collection[str] = ()) -> Any:
    """y = beta b + alpha W x: ([t], [t,i], [i]) -> [t]."""
    return _added(input, ("mat", "vec"), (mat, vec), "ti,i->t", shared, beta, alpha)


@rule(torch.baddbmm, Tensor.baddbmm, params=("input", "batch1", "batch2"), declines_few=True, differentiable=True)
def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, shared: Collection[str] = ()) -> Any:
    """y = beta b + alpha x W: ([b,t,o], [b,t,i], [b,i,o]) -> [b,t,o]."""
    return _added(input, ("batch1", "batch2"), (batch1, batch2), _BATCHED, shared, beta, alpha)


@rule(torch.addbmm, Tensor.addbmm, params=("input", "batch1", "batch2"), declines_few=True, differentiable=True)
def addbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, shared: Collection[str] = ()) -> Any:
    """y = beta b + alpha sum_b x_b W_b: ([t,o], [b,t,i], [b,i,o]) -> [t,o]."""
    return _added(input, ("batch1", "batch2"), (batch1, batch2), "bti,bio->to", shared, beta, alpha)


# Contractions of any dimensions


@rule(torch.einsum, params=("operands",), declines_few=True, differentiable=True)
def einsum(equation: Any, *operands: Tensor, shared: Collection[str] = ()) -> Any:
    """Any equation in which no parameter repeats a label."""
    alone = [f"operands[{k}]" in shared for k in range(len(operands))]
    written = einsum_labels(equation, [tensor.ndim - (not one) for tensor, one in zip(operands, alone, strict=True)])
    if written is None:
        return NotImplemented
    sides = zip(operands, alone, strict=True)
    layouts = tuple((side.shape, side.stride()) if one else (side.shape[1:], side.stride()[1:]) for side, one in sides)
    result = contract(operands, *written, alone, contiguous=_functorch.is_traced() or _is_contiguous(equation, layouts))
    if result is NotImplemented:
        return NotImplemented
    output, builders = result
    return output, {"operands": builders}


@decomposition(torch.einsum)
def _einsum_of_list(equation: Any, *operands: Any, tensors: Any = None, path: Any = None) -> Any:
    """The operands in a list, as torch also takes them, and ATen by name, with an order in which to multiply them."""
    found = operands[0] if len(operands) == 1 else tensors
    return torch.einsum(equation, *found) if isinstance(equation, str) and isinstance(found, (list, tuple)) else NotImplemented


@lru_cache(maxsize=1024)
def _is_contiguous(equation: str, layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...]) -> bool:
    """Whether the einsum of tensors with these shapes and strides is contiguous."""
    operands = (torch.empty_strided(shape, strides, device="meta") for shape, strides in layouts)
    return torch.einsum(equation, *operands).is_contiguous()


def einsum_labels(equation: Any, dims: Sequence[int]) -> tuple[list[str], str] | None:
    """The labels of each operand and of the output, with an ellipsis replaced by unused letters; None if they do not fit."""
    if not isinstance(equation, str):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(dims):
        return None
    wanted = [d - len(term.replace("...", "")) for term, d in zip(terms, dims, strict=True)]
    if any(count < 0 or (count > 0 and "..." not in term) for term, count in zip(terms, wanted, strict=True)):
        return None
    spare = [letter for letter in ascii_letters if letter not in equation]
    longest = max(wanted)
    if longest > len(spare):
        return None
    dots = "".join(spare[:longest])
    labels = [term.replace("...", dots[longest - count :]) for term, count in zip(terms, wanted, strict=True)]
    if not arrow:  # the broadcast dimensions, and the letters that occur once, in alphabetical order
        letters = inputs.replace("...", "").replace(",", "")
        out = "..." + "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    return labels, out.replace("...", dots)


@rule(torch.tensordot, params=("a", "b"), declines_few=True, differentiable=True)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: Tensor | None = None, *, shared: Collection[str] = ()) -> Any:
    """Contract the given dimensions of a with those of b; if `dims` is a number, the last of a with the first of b."""
    if out is not None:
        return NotImplemented
    written = tensordot_labels([tensor.ndim - (name not in shared) for name, tensor in (("a", a), ("b", b))], dims)
    if written is None:
        return NotImplemented
    labels, free = written
    contracted = "".join(name for name in labels[0] if name not in free)
    return _pair(("a", "b"), (a, b), f"{','.join(labels)}->{free}", shared, stretch=contracted)


def tensordot_labels(counts: Sequence[int], dims: Any) -> tuple[list[str], str] | None:
    """The labels of tensordot's operands and of its output, as in an einsum, from their numbers of dimensions; None if they do not fit."""
    if isinstance(dims, int) and 0 <= dims <= min(counts):
        pairs = [(counts[0] - dims + d, d) for d in range(dims)]
    elif isinstance(dims, (list, tuple)) and len(dims) == 2 and all(isinstance(own, (list, tuple)) for own in dims):
        if len(dims[0]) != len(dims[1]) or any(not -count <= d < count for own, count in zip(dims, counts, strict=True) for d in own):
            return None
        pairs = [(d % counts[0], e % counts[1]) for d, e in zip(*dims, strict=True)]
    else:
        return None
    left, right = list(ascii_letters[: counts[0]]), list(ascii_letters[counts[0] : sum(counts)])
    if len({d for d, _ in pairs}) < len(pairs) or len({e for _, e in pairs}) < len(pairs) or len(right) < counts[1]:
        return None
    for d, e in pairs:
        right[e] = left[d]
    contracted = {left[d] for d, _ in pairs}
    return ["".join(left), "".join(right)], "".join(name for name in left + right if name not in contracted)


@rule(torch.bilinear, params=("weight", "bias"), frozen=True, differentiable=True)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """y[o] = x1 W[o] x2 + b[o]: ([n,*,i], [n,*,j], [o,i,j], [o]) -> [n,*,o]."""
    lead = ascii_letters[: input1.ndim - 2].upper()
    if input1.ndim < 2 or input2.ndim != input1.ndim or weight.ndim != 3:
        return NotImplemented
    labels = (f"{lead}i", f"{lead}j", "oij")
    result = contract((input1, input2, weight), labels, f"{lead}o", (False, False, True), "", lambda x, z, w: torch.bilinear(x, z, w, bias))
    if result is NotImplemented:
        return NotImplemented
    output, builders = result
    return output, {"weight": builders[2], "bias": lambda cotangent: Dense(sum_to(cotangent, torch.Size(cotangent.shape[-1:])))}


# Mixtures of experts: rows that are sorted by their matrix.


@rule(torch._grouped_mm, params=("mat2",))  # pyright: ignore[reportPrivateImportUsage]
def grouped_mm(self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Row t by matrix e, for offs[e - 1] <= t < offs[e]: ([n,t,i], [e,i,o], [n,e]) -> [n,t,o].

    With C the cotangent: grad W[n,e] = sum of x_t C_t^T over these t.
    """
    if offs is None or bias is not None or out_dtype is not None or self.ndim != 3 or mat2.ndim != 3 or self.numel() == 0:
        return NotImplemented
    n, t = self.shape[:2]
    rows = torch.arange(t, device=offs.device, dtype=offs.dtype).expand(n, t).contiguous()
    expert = torch.searchsorted(offs.contiguous(), rows, right=True).flatten()
    # torch leaves rows beyond the last offset undefined; here they are zero.
    beyond = (expert == len(mat2))[:, None]
    input = self.flatten(0, 1).masked_fill(beyond, 0)
    # One call for the rows of all samples, sorted by matrix; and one call for the gradients, with the rows sorted by sample.
    order = expert.argsort(stable=True)
    ends = offs.diff(dim=1, prepend=offs.new_zeros(n, 1)).sum(0).cumsum(0).to(offs.dtype)
    ends = torch.cat([ends[:-1], ends.new_full((1,), n * t)])
    output = torch._grouped_mm(input.index_select(0, order), mat2, offs=ends)  # pyright: ignore[reportPrivateImportUsage]
    output = output.index_select(0, order.argsort()).unflatten(0, (n, t))

    def factor(cotangent: Tensor) -> Factor:
        if n * mat2.numel() * cotangent.itemsize > _SMALL_GRADIENTS and mat2.numel() > t * (sum(mat2.shape[1:]) + 2):
            # A row beyond the last offset counts for the last matrix, with zeros on both sides.
            rows = cotangent.masked_fill(beyond.unflatten(0, (n, t)), 0)
            index = expert.unflatten(0, (n, t)).clamp(max=len(mat2) - 1)
            return Routed(index, input.detach().unflatten(0, (n, t)), rows, len(mat2))
        ends = (offs + t * torch.arange(n, device=offs.device, dtype=offs.dtype)[:, None]).flatten()
        rows = cotangent.flatten(0, 1).masked_fill(beyond, 0)  # which count to the next sample, and may hold anything
        grads = torch._grouped_mm(input.detach().T, rows, offs=ends)  # pyright: ignore[reportPrivateImportUsage]
        return Dense(grads.unflatten(0, (n, len(mat2))))

    return output, {"mat2": factor}


# Products of data and one matrix, rewritten as the two that have a transpose: x W (torch.matmul) and x W^T (F.linear).


@transpose(torch.matmul, data="input")
def matmul_transpose(shape: torch.Size, other: Tensor) -> Any:
    """C -> C W^T."""
    if other.ndim != 2 or other.is_complex() or len(shape) == 0:
        return NotImplemented
    return F.linear, {"weight": other}


def _by_rows(left: Tensor, right: Tensor, left_is_shared: bool) -> Any:
    """left @ right, where one is the shared matrix and the other is data of any dimensions."""
    if not left_is_shared:
        return torch.matmul(left, right) if right.ndim == 2 and left.ndim > 0 else NotImplemented
    if left.ndim != 2 or right.ndim == 0:
        return NotImplemented
    return F.linear(right, left) if right.ndim == 1 else F.linear(right.mT, left).mT


@transposable_form(torch.matmul)
def transposable_product(input: Tensor, other: Tensor, shared: Collection[str]) -> Any:
    """W x."""
    return _by_rows(input, other, True) if set(shared) == {"input"} else NotImplemented


@transposable_form(torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__)
def transposable_matmul(input: Tensor, other: Tensor, shared: Collection[str]) -> Any:
    """x W or W x."""
    return _by_rows(input, other, "input" in shared) if len(shared) == 1 else NotImplemented


@transposable_form(torch.mm, Tensor.mm)
def transposable_mm(input: Tensor, mat2: Tensor, shared: Collection[str]) -> Any:
    """([t,i], [i,o]) -> [t,o]."""
    return _by_rows(input, mat2, "input" in shared) if len(shared) == 1 and input.ndim == mat2.ndim == 2 else NotImplemented


@transposable_form(torch.mv, Tensor.mv)
def transposable_mv(input: Tensor, vec: Tensor, shared: Collection[str]) -> Any:
    """([t,i], [i]) -> [t]."""
    return F.linear(vec, input) if set(shared) == {"input"} and input.ndim == 2 and vec.ndim == 1 else NotImplemented


@transposable_form(torch.einsum)
def transposable_einsum(equation: Any, operands: Sequence[Tensor], shared: Collection[str]) -> Any:
    """An einsum of data and one matrix that maps one label of the data to one of the output."""
    if len(shared) != 1 or len(operands) != 2:
        return NotImplemented
    written = einsum_labels(equation, [tensor.ndim for tensor in operands])
    if written is None:
        return NotImplemented
    k = int("operands[1]" in shared)
    weight, x, (names, out) = operands[k], operands[1 - k], written
    matrix, given = names[k], names[1 - k]
    contracted = [name for name in matrix if name in given and name not in out]
    produced = [name for name in matrix if name in out and name not in given]
    kept = given.replace(contracted[0], "") if contracted else ""
    if (len(matrix), len(contracted), len(produced)) != (2, 1, 1) or len(set(given)) < len(given) or set(kept) | set(produced) != set(out):
        return NotImplemented
    x = x.permute([given.index(name) for name in kept + contracted[0]])
    y = F.linear(x, weight) if matrix[0] == produced[0] else torch.matmul(x, weight)
    return y.permute([(kept + produced[0]).index(name) for name in out])
