"""Ops that vmap gets wrong, written with ops that it gets right. Each has its test. Ops without such a form are in leaks.py."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode

from psg._torch import _functorch
from psg._torch._ops import GET_DATA, SET_DATA, substitute, tensors_of
from psg._trees import is_inexact
from psg.factors._arithmetic import HALF, widen
from psg.rules._registry import DIFFERENTIATED, MIXED, decomposition, rule
from psg.rules.systems import lu_factors, takes_vectors

_UNCAST = torch._C._DisableAutocast
"""A context without autocast, which leaves some ops as they are, and would cast their parts."""


# By sorting: along a dimension torch has no deterministic median on a GPU.


def _median(input: Tensor) -> Tensor:
    ordered = input.flatten().sort().values  # NaN last
    return torch.where(ordered[-1].isnan(), ordered[-1], ordered[(input.numel() - 1) // 2])


def _nanmedian(input: Tensor) -> Tensor:
    ordered = input.flatten().sort().values
    count = (~ordered.isnan()).sum(0, keepdim=True)
    return ordered.gather(0, ((count - 1) // 2).clamp(min=0))[0]


def _level_of_fn() -> float:
    """The level at which the pass that watches fn runs it; transforms above it are fn's own. Where fn has none, nothing is above."""
    return getattr(_get_current_function_mode(), "level", math.inf)


def _shared_evenly(op: Any, value_of: Callable[[Tensor], Tensor]) -> None:
    @decomposition(op)
    def whole(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The max, min or median of all entries. Entries equal to it share its cotangent evenly; vmap would give all of it to one.

        That is because vmap reduces along a dimension. Under a vmap of fn's own torch itself does so: the call is declined.
        """
        if args or kwargs or not input.is_floating_point() or input.numel() == 0:
            return NotImplemented
        if not (levels := _functorch.vmap_levels(input)) or max(levels) > _level_of_fn():
            return NotImplemented
        value = value_of(input.detach())
        chosen = (input == value) | (input.isnan() & value.isnan())
        share = (torch.where(chosen, input, 0) / chosen.sum()).sum()
        # Return the value itself, not the rounded sum.
        return torch.where(value.isfinite(), value + (share - share.detach()), share)


for _name, _value_of in {"max": torch.amax, "min": torch.amin, "median": _median, "nanmedian": _nanmedian}.items():
    for _op in (getattr(torch, _name), getattr(Tensor, _name)):
        _shared_evenly(_op, _value_of)


@decomposition(torch.linalg.lu_solve)
def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False, out: Tensor | None = None) -> Any:
    """X with P L U X = B by triangular solves: ([*,i,i], [*,i], [*,i,k]) -> [*,i,k].

    Where LU depends on the sample and B has more dimensions, vmap gives LU one of size 1, for which torch (2.13) takes wrong pivots.
    """
    if out is not None or not _functorch.is_vmapped(LU):
        return NotImplemented
    if not left:  # X A = B is A^H X^H = B^H
        return torch.linalg.lu_solve(LU, pivots, B.mH, adjoint=not adjoint).mH
    solve = torch.linalg.solve_triangular
    P, L, U = torch.lu_unpack(LU, pivots)
    if adjoint:
        return P @ solve(L.mH, solve(U.mH, B, upper=False), upper=True, unitriangular=True)
    return solve(U, solve(L, P.mT @ B, upper=False, unitriangular=True), upper=True)


@decomposition(torch.lu_solve, Tensor.lu_solve)
def old_lu_solve(b: Tensor, LU_data: Tensor, LU_pivots: Tensor, *, out: Tensor | None = None) -> Any:
    """The same with its arguments in another order, which vmap runs sample by sample."""
    return torch.linalg.lu_solve(LU_data, LU_pivots, b) if out is None else NotImplemented


# Of these ops, derivatives that transforms take of derivatives, and of tangents, are wrong in torch: those of tangents leave out that the
# factors depend on the matrix, and those of determinants divide by differences of singular values. Those of the factors are right, where
# the matrix is not singular.


_DETERMINANTS = (torch.linalg.det, torch.det, Tensor.det)


def _factors(A: Tensor, check_errors: bool = False) -> Any:
    """The LU factors, pivots and errors of a matrix that transforms, of torch.func or of forward-mode autograd, may differentiate for."""
    return lu_factors(A, check_errors) if _functorch.is_tracked(A) or _functorch.tangents_active() else None


def _sign_and_diagonal(LU: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
    """The sign of the permutation, and the diagonal of U."""
    moved = pivots != torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return (1 - 2 * (moved.sum(-1) % 2)).to(LU.dtype), LU.diagonal(dim1=-2, dim2=-1)


def _product(LU: Tensor, pivots: Tensor, *_: Tensor) -> Tensor:
    """The determinant of a matrix with these factors."""
    sign, diagonal = _sign_and_diagonal(LU, pivots)
    return sign * diagonal.prod(-1)


def _is_square(A: Tensor) -> bool:
    """Whether this is what torch has determinants of."""
    return A.ndim >= 2 and A.shape[-1] == A.shape[-2] and A.dtype not in HALF and (A.is_floating_point() or A.is_complex())


def _polynomial(A: Tensor) -> Tensor:
    """The determinant of a matrix of at most three rows, as the sum of its terms."""
    if A.shape[-1] == 3:
        return (A[..., 0, :] * torch.linalg.cross(A[..., 1, :], A[..., 2, :])).sum(-1)
    if A.shape[-1] == 2:
        return A[..., 0, 0] * A[..., 1, 1] - A[..., 0, 1] * A[..., 1, 0]
    return A.diagonal(dim1=-2, dim2=-1).prod(-1)


@decomposition(*_DETERMINANTS, misderived=True, everywhere=True)
def det(A: Tensor, *, out: Tensor | None = None) -> Any:
    """By factors without zeros: [*,i,i] -> [*]. Where one is zero, autograd gives torch's op (2.13) a gradient of zeros.

    The zeros are replaced by rounding errors, which a constant adds to the matrix. Of the derivatives only the first is right there.
    """
    if out is not None or not _is_square(A):
        return NotImplemented
    if A.shape[-1] <= 3:
        return _polynomial(A)
    with _UNCAST():
        LU, pivots, _ = lu_factors(A.detach(), check_errors=False)
        P, L, U = torch.lu_unpack(LU, pivots)
        diagonal, largest = U.diagonal(dim1=-2, dim2=-1), U.abs().amax((-2, -1)).unsqueeze(-1)
        error = A.shape[-1] * torch.finfo(A.dtype).eps * torch.where(largest == 0, 1, largest)
        value = _product(*lu_factors(A + P @ L * torch.where(diagonal == 0, error, 0).unsqueeze(-2), check_errors=False))
        return torch.where((diagonal == 0).any(-1), value - value.detach(), value)


@decomposition(*_DETERMINANTS, need=DIFFERENTIATED, misderived=True)
def _det(A: Tensor, *, out: Tensor | None = None) -> Any:
    """With right derivatives up to the third for all matrices: [*,i,i] -> [*].

    The singular vectors are constants, by which the matrix is turned. Of its least three singular values, which can be zero, it has the
    determinant of their Schur complement.
    """
    if out is not None or not _is_square(A):
        return NotImplemented
    if A.shape[-1] <= 3:
        return _polynomial(A)
    constant = A.detach()
    with _UNCAST():
        U, S, Vh = torch.linalg.svd(torch.where(constant.isfinite(), constant, 0))
        turned = U.mH @ A @ Vh.mH
        # Where more than three are zero, these derivatives are, and stay so to rounding with others in the place of the zeros.
        least = torch.zeros_like(S).masked_fill(S == 0, torch.finfo(S.dtype).eps)[..., :-3].diag_embed()
        LU, pivots, _ = lu_factors(turned[..., :-3, :-3] + least, check_errors=False)
        rest = turned[..., -3:, -3:] - turned[..., -3:, :-3] @ torch.linalg.lu_solve(LU, pivots, turned[..., :-3, -3:])
        return _product(*lu_factors(U @ Vh, check_errors=False)) * _product(LU, pivots) * _polynomial(rest)


def _sign_and_log(A: Tensor) -> tuple[Tensor, Tensor] | None:
    if (factors := _factors(A)) is None:
        return None
    sign, diagonal = _sign_and_diagonal(*factors[:2])
    return sign * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1)


def _slogdet(op: Any, kind: Any) -> None:
    @decomposition(op, need=DIFFERENTIATED, misderived=True)
    def slogdet(A: Tensor, *, out: Any = None) -> Any:
        return NotImplemented if out is not None or (parts := _sign_and_log(A)) is None else kind(parts)


_slogdet(torch.linalg.slogdet, torch.return_types.linalg_slogdet)  # pyright: ignore[reportAttributeAccessIssue]
_slogdet(torch.slogdet, torch.return_types.slogdet)
_slogdet(Tensor.slogdet, torch.return_types.slogdet)


@decomposition(torch.logdet, Tensor.logdet, need=DIFFERENTIATED, misderived=True)
def _logdet(A: Tensor) -> Any:
    parts = _sign_and_log(A)
    return NotImplemented if parts is None else parts[0].log() + parts[1]


def _solving(op: Any, checks: bool, result: Callable[[Tensor, Tensor], Any]) -> None:
    """`checks` says whether the op raises an error for a singular matrix if it is not told; `result` makes its output."""

    @decomposition(op)
    def aligned(A: Tensor, B: Tensor, *, left: bool = True, out: Any = None, **options: Any) -> Any:
        """Give A and B equally many dimensions: where one has fewer, vmap broadcasts them, or their cotangents, to a wrong shape."""
        vector = takes_vectors(A.shape, B.shape)
        if out is not None or A.ndim == B.ndim + vector:
            return NotImplemented
        if vector:
            return op(A, B.expand(A.shape[:-1]), left=left, **options)
        rank = max(A.ndim, B.ndim)
        sides = (side.reshape(*(1,) * (rank - side.ndim), *side.shape) for side in (A, B))
        solved = op(*sides, left=left, **options)
        return solved if isinstance(solved, Tensor) else type(solved)((solved[0], solved[1].reshape(A.shape[:-2])))

    @decomposition(op, need=DIFFERENTIATED, misderived=True)
    def by_factors(A: Tensor, B: Tensor, *, left: bool = True, out: Any = None, **options: Any) -> Any:
        if out is not None or (factors := _factors(A, options.get("check_errors", checks))) is None:
            return aligned(A, B, left=left, out=out, **options)
        LU, pivots, errors = factors
        if not takes_vectors(A.shape, B.shape):
            return result(torch.linalg.lu_solve(LU, pivots, B, left=left), errors)
        if not left:
            return NotImplemented  # torch refuses vectors there
        return result(torch.linalg.lu_solve(LU, pivots, B.expand(A.shape[:-1]).unsqueeze(-1)).squeeze(-1), errors)


_solving(torch.linalg.solve, True, lambda solved, _: solved)
_solving(torch.linalg.solve_ex, False, lambda *parts: torch.return_types.linalg_solve_ex(parts))  # pyright: ignore[reportAttributeAccessIssue]


@decomposition(torch.linalg.tensorsolve, misderived=True)
def _tensorsolve(A: Tensor, B: Tensor, dims: Any = None, *, out: Tensor | None = None) -> Any:
    """By torch.linalg.solve, as torch computes it; vmap has no rule for the whole."""
    if out is not None:
        return NotImplemented
    moved = A if dims is None else A.movedim(tuple(dims), tuple(range(A.ndim - len(dims), A.ndim)))
    return torch.linalg.solve(moved.reshape(B.numel(), B.numel()), B.flatten()).reshape(moved.shape[B.ndim :])


@decomposition(torch.linalg.householder_product, torch.orgqr, Tensor.orgqr, misderived=True)
def householder_product(A: Tensor, tau: Tensor, *, out: Tensor | None = None) -> Any:
    """The first k columns of H_1 ... H_t as I - V T V^H, by one triangular system: ([*,m,k], [*,t]) -> [*,m,k].

    Derivatives are those of products, of many gradients at once; torch's go column after column, and those of tangents are wrong.

    Source:
        Joffrain et al., "Accumulating Householder transformations, revisited", 2006: T^-1 = diag(1 / tau) + striu(V^H V), here multiplied
        by diag(tau), which may be zero.
    """
    if out is not None or A.ndim != tau.ndim + 1 or A.ndim < 2 or (*tau.shape[:-1], tau.dtype) != (*A.shape[:-2], A.dtype):
        return NotImplemented
    (rows, columns), count = A.shape[-2:], tau.shape[-1]
    if not rows >= columns >= count:
        return NotImplemented  # torch refuses it
    with _UNCAST():
        eye = torch.eye(rows, columns, dtype=A.dtype, device=A.device)
        V, scale = A[..., :count].tril(-1) + eye[:, :count], tau.unsqueeze(-1)
        T = eye[:count, :count] + scale * (V.mH @ V).triu(1)
        return eye - V @ torch.linalg.solve_triangular(T, scale * V[..., :columns, :].mH, upper=True, unitriangular=True)


def _of_difference(op: Any) -> None:
    @decomposition(op)
    def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of input - target and of zeros: of operands that different vmaps have wrapped, vmap broadcasts the wrong dimensions."""
        if not (isinstance(input, Tensor) and isinstance(target, Tensor)):
            return NotImplemented
        levels = _functorch.vmap_levels(input), _functorch.vmap_levels(target)
        if levels[0] == levels[1] or len(levels[0] | levels[1]) < 2:
            return NotImplemented
        difference = input - target
        return op(difference, torch.zeros_like(difference), *args, **kwargs)


for _op in (F.mse_loss, F.smooth_l1_loss, F.huber_loss):
    _of_difference(_op)


@decomposition(torch.addmm, Tensor.addmm, need="beta")
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, **others: Any) -> Any:
    """With beta = 0 torch ignores the input, NaN included, but for a gradient of zeros; vmap multiplies it by 0."""
    if others or isinstance(beta, Tensor) or beta != 0 or not any(map(_functorch.is_vmapped, (input, mat1, mat2))):
        return NotImplemented
    product, none = mat1 @ mat2, torch.zeros((), dtype=torch.bool, device=input.device)
    return (alpha * product + torch.where(none, input, 0)).contiguous()


def _promoted(args: Any, kwargs: Any) -> Any:
    """Operands in the dtype of their result; None if vmap finds it too.

    Operands without dimensions change the dtype of others only from integers to floating-point or complex numbers. vmap gives those that
    depend on the sample a dimension, and then asks for their dtypes like any others'.
    """
    tensors = tensors_of(args, kwargs)
    if len({tensor.dtype for tensor in tensors}) < 2 or all(tensor.ndim for tensor in tensors):
        return None
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors if tensor.ndim == 0])
    if others := [tensor.dtype for tensor in tensors if tensor.ndim]:
        other = reduce(torch.promote_types, others)
        dtype = torch.result_type(torch.empty((), dtype=dtype, device="meta"), torch.empty(1, dtype=other, device="meta"))
    return _in_dtype((args, kwargs), dtype)


def _in_dtype(arguments: Any, dtype: torch.dtype) -> Any:
    return substitute(arguments, lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) else leaf)


def _of_promoted(op: Any) -> None:
    @decomposition(op, need=MIXED)
    def promoted(*args: Any, **kwargs: Any) -> Any:
        """The same of operands in one dtype."""
        if kwargs.get("out") is not None or (operands := _promoted(args, kwargs)) is None:
            return NotImplemented
        args, kwargs = operands
        return op(*args, **kwargs)


for _name in ("clamp", "clip", "addcmul", "addcdiv"):
    _of_promoted(getattr(torch, _name))
    _of_promoted(getattr(Tensor, _name))


@decomposition(torch.where, need=MIXED)
def where(condition: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same of values in one dtype."""
    if kwargs.get("out") is not None or (values := _promoted(args, kwargs)) is None:
        return NotImplemented
    args, kwargs = values
    return torch.where(condition, *args, **kwargs)


@decomposition(Tensor.where, need=MIXED)
def where_of(input: Tensor, condition: Tensor, other: Any) -> Any:
    """As a function."""
    return torch.where(condition, input, other)


@decomposition(torch.roll, Tensor.roll)
def roll(input: Tensor, shifts: Any, dims: Any = ()) -> Any:
    """A scalar stays as it is; vmap rolls the samples, forward and backward."""
    if input.ndim or isinstance(dims, int) or dims or isinstance(shifts, (list, tuple)) and len(shifts) != 1:
        return NotImplemented
    return input.clone()


@decomposition(Tensor.squeeze_)
def squeeze_(input: Tensor, *dims: Any, **options: Any) -> Any:
    """Squeeze one dimension after the other: without `dim`, vmap squeezes the dimension of the samples too, where there is one sample."""
    if dims or options or not _functorch.is_vmapped(input):
        return NotImplemented
    for dim in reversed(range(input.ndim)):
        input.squeeze_(dim)  # does nothing in a dimension of another size than 1
    return input


def _widened(part: Tensor | None) -> Tensor | None:
    return None if part is None else widen(part)


@decomposition(F.layer_norm, need=MIXED)
def mixed_layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    """Of 16 bits, with float32 weights: in float32, as torch computes it. vmap rounds between its steps, or refuses other dtypes."""
    if input.dtype not in HALF or all(part is None or part.dtype == input.dtype for part in (weight, bias)):
        return NotImplemented
    return F.layer_norm(widen(input), normalized_shape, _widened(weight), _widened(bias), eps).to(input.dtype)


@decomposition(F.binary_cross_entropy_with_logits, need=MIXED)
def mixed_binary_cross_entropy_with_logits(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In the target's dtype, in which torch adds up its terms in place. vmap gives it that of all tensors."""
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors_of((input, target, *args), kwargs)])
    if not target.is_floating_point() or dtype == target.dtype:
        return NotImplemented
    operands, options = _in_dtype(((input, target, *args), kwargs), dtype)
    return F.binary_cross_entropy_with_logits(*operands, **options).to(target.dtype)


@decomposition(F.group_norm)
def contiguous_group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    """Make the batch contiguous, as the kernel needs it: in a part of the channels each sample may be contiguous where the batch is not.

    Of 16 bits compute it in float32: under vmap torch's derivative cubes one over the standard deviation, which leaves float16's range.
    """
    if input.dtype in HALF:
        return F.group_norm(widen(input), num_groups, _widened(weight), _widened(bias), eps).to(input.dtype)
    if not _functorch.is_wrapped(input) or _functorch.is_contiguous(input):
        return NotImplemented
    copy = input.clone(memory_format=torch.contiguous_format)
    if _functorch.is_contiguous(copy):
        return F.group_norm(copy, num_groups, weight, bias, eps)
    # The copy of a parameter is made once, and expanded to all samples. So is what it is normalised to, without their weights and biases.
    if input.ndim < 2 or any(part is not None and (part.dtype != input.dtype or part.shape != input.shape[1:2]) for part in (weight, bias)):
        return NotImplemented
    weight, bias = (part if part is None else part.reshape(-1, *[1] * (input.ndim - 2)) for part in (weight, bias))
    output = F.group_norm(input, num_groups, eps=eps)
    output = output if weight is None else output * weight
    return output if bias is None else output + bias


@decomposition(GET_DATA, need=DIFFERENTIATED)
def data(self: Tensor) -> Tensor:
    """`.data` as a constant for every derivative; under vmap torch's own is a constant for the innermost alone."""
    return self.detach()


@rule(GET_DATA, params=())
def data_of_a_batch(self: Tensor) -> Any:
    """The same outside of all transforms of fn's own, where vmap does not support `.data`."""
    return self.detach(), {}


# `Module.to` asks the first and does the second for every parameter, also where it is on the device already, and of that dtype.


@decomposition(torch._has_compatible_shallow_copy_type)  # pyright: ignore[reportPrivateImportUsage]
def _can_be_data_of(input: Tensor, other: Tensor) -> Any:
    """A tensor can take its own data, which vmap refuses to answer."""
    return True if _functorch.are_one_view(input, other) else NotImplemented


@decomposition(SET_DATA)
def set_data(self: Tensor, value: Tensor) -> Any:
    """Assigning a tensor's own data to it changes nothing."""
    return None if _functorch.are_one_view(self, value) else NotImplemented


@decomposition(torch.cdist)
def distances(x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Give both operands equally many dimensions: where one has fewer, vmap broadcasts the samples of one against those of the other."""
    rank = max(x1.ndim, x2.ndim)
    if x1.ndim == x2.ndim or not (_functorch.is_vmapped(x1) and _functorch.is_vmapped(x2)):
        return NotImplemented
    x1, x2 = (side.reshape(*(1,) * (rank - side.ndim), *side.shape) for side in (x1, x2))
    return torch.cdist(x1, x2, *args, **kwargs)


if hasattr(F, "linear_cross_entropy"):  # torch >= 2.13

    @decomposition(F.linear_cross_entropy, misderived=True)
    def linear_cross_entropy(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        options: Any = None,
        **cross_entropy_options: Any,
    ) -> Tensor:
        """Unfused: the fused op reads `requires_grad` below the function mode, where vmap says False, and then returns no gradient."""
        if cross_entropy_options.get("ignore_index", 0) is None:
            del cross_entropy_options["ignore_index"]
        classes = linear_weight.shape[:-1]  # more than one dimension for a loss over further dimensions
        bias = None if linear_bias is None else linear_bias.reshape(-1)
        logits = F.linear(input, linear_weight.reshape(-1, linear_weight.shape[-1]), bias)
        return F.cross_entropy(logits.reshape(*input.shape[:-1], *classes), target, **cross_entropy_options)


@decomposition(torch.index_select, Tensor.index_select)
def _index_select(input: Tensor, dim: int, index: Tensor) -> Any:
    """With an index of no dimensions: the output keeps `dim`, with size one, where vmap drops it or takes other entries."""
    return torch.index_select(input, dim, index.reshape(1)) if index.ndim == 0 and input.ndim else NotImplemented


# With `include_self=False` torch (2.13) shares the gradient of a largest or smallest entry out to an equal one of the input, which is not
# among those that are compared, and drops that share: of zeros into which positive numbers are scattered, say, and zeros.
_WORST = {"amax": -math.inf, "amin": math.inf}


def _is_replaced(input: Tensor, reduce: str, include_self: bool, out: Any = None) -> bool:
    return not include_self and reduce in _WORST and input.is_floating_point() and out is None


@decomposition(torch.scatter_reduce, Tensor.scatter_reduce, everywhere=True)
def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True, out: Tensor | None = None
) -> Any:
    """Of an input whose replaced entries lose to all others; products with tangents, which torch (2.13) leaves zero, entry by entry."""
    if reduce == "prod" and _functorch.tangents_active() and out is None and input.is_floating_point():
        return _products(input, dim, index, src, include_self)
    if not _is_replaced(input, reduce, include_self, out):
        return NotImplemented
    replaced = torch.zeros(input.shape, dtype=torch.bool, device=input.device).scatter(dim, index, True)
    return torch.scatter_reduce(torch.where(replaced, _WORST[reduce], input), dim, index, src, reduce)


def _products(input: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool) -> Tensor:
    if input.ndim == 0:
        return _products(input.reshape(1), 0, index.reshape(1), src.reshape(1), include_self)[0]
    dim %= input.ndim
    rows = torch.arange(input.shape[dim], device=input.device).reshape(-1, *(1,) * (input.ndim - dim))
    found = index.unsqueeze(dim) == rows
    factors = torch.where(found, src[tuple(map(slice, index.shape))].unsqueeze(dim), 1).prod(dim + 1)
    beyond = [0 if d == dim else input.shape[d] - index.shape[d] for d in range(input.ndim)]
    around = [amount for size in reversed(beyond) for amount in (0, size)]  # an index may leave out the last entries of other dimensions
    # A clone, for the call in place writes the product over the input.
    own = input.clone() if include_self else torch.where(F.pad(found.any(dim + 1), around), 1, input)
    return own * F.pad(factors, around, value=1.0)


@decomposition(torch.index_reduce, Tensor.index_reduce, everywhere=True)
def index_reduce(
    input: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True, out: Tensor | None = None
) -> Any:
    """The same."""
    if not _is_replaced(input, reduce, include_self, out):
        return NotImplemented
    return torch.index_reduce(input.index_fill(dim, index, _WORST[reduce]), dim, index, source, reduce)


@decomposition(Tensor.scatter_reduce_, everywhere=True)
def scatter_reduce_(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same, written back."""
    output = scatter_reduce(input, *args, **kwargs)
    return output if output is NotImplemented else input.copy_(output)


@decomposition(Tensor.index_reduce_, everywhere=True)
def index_reduce_(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same; vmap runs all calls in place sample by sample."""
    output = index_reduce(input, *args, **kwargs)
    return input.copy_(torch.index_reduce(input.clone(), *args, **kwargs) if output is NotImplemented else output)


@decomposition(torch._grouped_mm, everywhere=True)  # pyright: ignore[reportPrivateImportUsage]
def grouped_mm(self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows of zeros in the place of those beyond the last offset, whose gradients torch (2.13) leaves uninitialised."""
    if offs is None or out_dtype is not None or self.ndim != 2 or mat2.ndim != 3:
        return NotImplemented
    within = torch.arange(len(self), device=offs.device) < offs[-1]
    rows = torch.where(within[:, None], self, 0)
    return torch._grouped_mm(rows, mat2, offs, bias, self.dtype)  # pyright: ignore[reportPrivateImportUsage]


@decomposition(torch.polar, everywhere=True)
def polar(abs: Tensor, angle: Tensor, *, out: Tensor | None = None) -> Any:
    """From the real and the imaginary part. Where the radius is zero, torch (2.13) takes the direction of its result, which is zero too."""
    if out is not None or abs.dtype != angle.dtype or not abs.is_floating_point():
        return NotImplemented
    return torch.complex(abs * angle.cos(), abs * angle.sin())


@decomposition(torch.cholesky_solve, Tensor.cholesky_solve, everywhere=True)
def cholesky_solve(input: Tensor, input2: Tensor, upper: bool = False, *, out: Tensor | None = None) -> Any:
    """By two triangular systems: torch (2.13) gives gradients to the other triangle of the factor, which it does not read."""
    if out is not None or input.dtype != input2.dtype:
        return NotImplemented
    solved = torch.linalg.solve_triangular(input2.mH if upper else input2, input, upper=False)
    return torch.linalg.solve_triangular(input2 if upper else input2.mH, solved, upper=True)


@decomposition(torch.cholesky_inverse, Tensor.cholesky_inverse, everywhere=True)
def cholesky_inverse(input: Tensor, upper: bool = False, *, out: Tensor | None = None) -> Any:
    """The same of the identity."""
    return cholesky_solve(torch.eye(input.shape[-1], dtype=input.dtype, device=input.device), input, upper, out=out)


@decomposition(torch.as_strided_scatter, Tensor.as_strided_scatter, everywhere=True)
def as_strided_scatter(input: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: Any = None, *, out: Tensor | None = None) -> Any:
    """By what it does to the entries' numbers: torch (2.13) gives the input the gradient of the entries that are written over alone."""
    if out is not None or not is_inexact(input) or input.dtype != src.dtype or _functorch.is_vmapped(input) or not input.is_contiguous():
        return NotImplemented
    start, count = input.storage_offset(), input.numel()  # a view's memory is counted from where that of the whole begins
    numbers = torch.arange(-start, count, device=input.device)[start:].view(input.shape)
    others = torch.arange(count, count + src.numel(), device=input.device).view(src.shape)
    kept = torch.as_strided_scatter(numbers, others, size, stride, storage_offset)
    return torch.cat([input.flatten(), src.flatten()])[kept]


@decomposition(torch.triangular_solve, Tensor.triangular_solve, everywhere=True)
def triangular_solve(
    input: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False, *, out: Any = None
) -> Any:
    """By its successor, if there are tangents: torch's (2.13) take the matrix for another."""
    if out is not None or not _functorch.tangents_active() or input.ndim < 2 or A.ndim < 2:
        return NotImplemented
    matrix = A.mT if transpose else A
    solution = torch.linalg.solve_triangular(matrix, input, upper=upper != transpose, unitriangular=unitriangular)
    return torch.return_types.triangular_solve((solution, A.clone()))


@decomposition(torch.sinc, Tensor.sinc, torch.special.sinc, need=DIFFERENTIATED, misderived=True)
def sinc(input: Tensor, *, out: Tensor | None = None) -> Any:
    """Next to zero by its series: torch's second derivative is NaN at zero, and near it differences of nearly equal numbers."""
    if out is not None or not (input.is_floating_point() or input.is_complex()):
        return NotImplemented
    angle = math.pi * widen(input)
    near = angle.detach().abs() < 0.5
    square, series = torch.where(near, angle, 0).square(), 1
    for k in range(14, 0, -2):
        series = 1 - series * square / (k * (k + 1))
    angle = torch.where(near, 1, angle)
    return torch.where(near, series, angle.sin() / angle).to(input.dtype)
