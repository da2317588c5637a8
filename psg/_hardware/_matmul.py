"""Matrix products where the library that computes them needs help: MKL on some CPUs, cuBLAS with rows of odd lengths.

MKL's kernels, and its division of a product among threads, are tuned for Intel's processors. On many threads of AMD's it takes up to
twice as long as oneDNN or as one block for each thread, and for some shapes eight times as long: benchmarks/micro.py affine, product,
weighted_sum, gram. Its kernels for few columns take two to nine times as long as they need, according to how these lie in memory
(micro.py narrow, thin). oneDNN would first copy a left operand that is not contiguous, and is slower in a compiled graph and on few
threads: other products are divided into blocks.

On the tensor cores of a GPU, cuBLAS takes three to eight times as long for rows that are not whole blocks of 16 bytes, such as those of
50257 logits: with zeros at their ends, they are.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from psg._hardware._memory import pages_are_kept
from psg._hardware._processor import is_amd, multiplies_by_tensor_cores
from psg._torch import _functorch

# Multiplications.
_LARGE_FOR_ONEDNN = 1 << 24  # it takes a millisecond to generate a kernel for every new shape
_LARGE_PRODUCT = 1 << 22
_LARGE_SUM = 1 << 19
_LARGE_NARROW = 1 << 18

# Rows or columns.
_NARROW = 32
_THIN = 8

# Of tensor cores: what copies pay for, from the measured 120 instead of 400 TFLOP/s (TF32) and 4.2 TB/s of an H200.
_LARGE_SIDE = 1 << 20
_USES = 256  # of each entry

FEW_PRODUCTS = 400
"""Matrices of fewer products torch's `bmm` multiplies on a CPU itself: entry by entry, in any layout, without a call for each matrix."""

_MANY_THREADS = 4  # on fewer, MKL divides large products well enough, and is a twentieth faster than oneDNN


def product(left: Tensor, right: Tensor) -> Tensor:
    """left[a, t] @ right[t, b] -> [a, b]."""
    if not _is_slow(left, right):
        return torch.mm(left, right)
    if left.is_contiguous():
        right = _lengthwise(right, left.shape[0])
    if left.numel() * right.shape[1] < _LARGE_PRODUCT:
        return torch.mm(left, right)
    if takes_onednn(left, right) and not (left.requires_grad or right.requires_grad):
        return _onednn(left, right.T, None)
    blocks = row_blocks(left, right)
    if blocks == 1:
        return torch.mm(left, right)
    return torch.bmm(left.unflatten(0, (blocks, -1)), right.expand(blocks, *right.shape)).flatten(0, 1)


def cross(left: Tensor, right: Tensor) -> Tensor:
    """left[*, t, a]^T right[*, t, b] -> [*, a, b], of one pair of matrices or of each in a batch."""
    few, many = right.shape[-1], left.shape[-1]
    if few <= _NARROW and 4 * few <= many and left.numel() * few >= _LARGE_NARROW and _is_slow(left, right):
        # The narrow side first.
        return (right.mT @ left).mT.contiguous()
    return product(left.T, right) if left.ndim == 2 else torch.bmm(left.mT, right)


def affine(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows W^T + bias: [t, i], [o, i], [o] -> [t, o]. Only once differentiable where the rows alone require grad."""
    if not _is_slow(rows, weight):
        return _affine_of_whole_rows(rows, weight, bias) if rows.is_cuda else F.linear(rows, weight, bias)
    weight = _lengthwise(weight, rows.shape[0])
    if rows.numel() * weight.shape[0] < _LARGE_PRODUCT:
        return F.linear(rows, weight, bias)
    if takes_onednn(rows, weight.T) and not any(own is not None and own.requires_grad for own in (weight, bias)):
        output: Any = _Affine.apply(rows, weight, bias)
        return output
    blocks = row_blocks(rows, weight.T)
    return F.linear(rows, weight, bias) if blocks == 1 else affine_blocks(rows.unflatten(0, (blocks, -1)), weight, bias).flatten(0, 1)


def affine_blocks(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same for blocks of rows: [k, t, i] -> [k, t, o]."""
    output = torch.bmm(rows, weight.T.expand(len(rows), *weight.T.shape))
    return output if bias is None else output.add_(bias)


def sum_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_n weights[n] rows[n, p] -> [p]."""
    blocks = column_blocks(rows)
    if blocks == 1:
        return torch.mv(rows.t(), weights)
    return torch.bmm(weights.expand(blocks, 1, -1), rows.unflatten(1, (blocks, -1)).transpose(0, 1)).flatten()


def pair_rows(left: Tensor, right: Tensor) -> Tensor:
    """<left[n], right[m]> of rows [n, p] and [m, p] -> [n, m]."""
    blocks = inner_blocks(left, right)
    if blocks == 1:
        return left @ right.T
    left, right = (side.unflatten(1, (blocks, -1)).transpose(0, 1) for side in (left, right))
    return torch.bmm(left, right.mT).sum(0)


def whole_rows(matrix: Tensor, uses: int) -> Tensor:
    """matrix[*, t, a] with zeros at the ends of its rows, if tensor cores then multiply it faster; each entry is used so many times."""
    if uses < _USES or matrix.numel() < _LARGE_SIDE:
        return matrix
    missing = _missing(matrix.shape[-1], matrix)
    return F.pad(matrix, (0, missing)) if missing else matrix


def _affine_of_whole_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`affine` on a GPU, in a way that its output and the output's cotangent have whole rows where that pays."""
    outs, ins = weight.shape
    missing = _missing(outs, weight) if ins >= _USES and rows.shape[0] * outs >= _LARGE_SIDE else 0
    if not missing:
        return F.linear(rows, weight, bias)
    bias = None if bias is None else F.pad(bias, (0, missing))
    return F.linear(rows, F.pad(weight, (0, 0, 0, missing)), bias)[:, :outs].contiguous()


def _missing(length: int, like: Tensor) -> int:
    """How many entries rows of this length lack to whole blocks of 16 bytes, if tensor cores need those."""
    if not multiplies_by_tensor_cores(like) or _functorch.is_traced():  # inductor does as much by itself
        return 0
    return -length % (16 // like.itemsize)


class _Affine(torch.autograd.Function):
    """`affine` by oneDNN, in both directions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _onednn(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return product(cotangent, weight), None, None


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The op assumes that the bias is contiguous, and does not check. Of an expanded or overlapping weight it makes nothing.
    weight = weight if weight.is_contiguous() or weight.T.is_contiguous() else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")


def _lengthwise(matrix: Tensor, rows: int) -> Tensor:
    """A large, slow product's thin matrix laid out along its longer side; any other as it is. The product has so many rows."""
    if 1 < min(matrix.shape) <= _THIN and rows * matrix.numel() >= _LARGE_NARROW:
        return matrix.contiguous() if matrix.shape[0] < matrix.shape[1] else matrix.T.contiguous().T
    return matrix


# Decisions


def takes_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether to compute left[a, t] @ right[t, b] by oneDNN, of whose op autograd and torch.func know nothing."""
    (rows, inner), columns = left.shape, right.shape[1]
    pays = rows * inner * columns >= _LARGE_FOR_ONEDNN and left.is_contiguous() and _dividing_threads(left, right) >= _MANY_THREADS
    return pays and _has_onednn() and not _functorch.is_watched()


def row_blocks(left: Tensor, right: Tensor) -> int:
    """Into how many blocks of rows to divide a large left[a, t] @ right[t, b], one for each thread; 1 where this gains nothing."""
    rows, threads = left.shape[0], _dividing_threads(left, right)
    pays = threads >= _MANY_THREADS and rows >= 48 * threads and 3 * rows >= right.shape[1]
    return threads if pays and rows % threads == 0 else 1


def column_blocks(rows: Tensor) -> int:
    """Into how many blocks of columns to divide weights[n] @ rows[n, p]."""
    if rows.numel() < _LARGE_SUM:
        return 1
    threads = _dividing_threads(rows)
    return threads if rows.shape[1] % threads == 0 else 1


def inner_blocks(left: Tensor, right: Tensor) -> int:
    """Into how many blocks along p to divide left[n, p] @ right[m, p]^T; the blocks' products are then added up."""
    (rows, inner), columns = left.shape, right.shape[0]
    if rows * inner * columns < _LARGE_PRODUCT or inner < 64 * max(rows, columns):
        return 1
    threads = _dividing_threads(left, right)
    return threads if inner % threads == 0 else 1


def for_all_columns(multiply: Callable[..., Tensor], matrix: Tensor, dense: Tensor) -> Tensor:
    """matrix @ dense[n], for a sparse matrix, as one product with the columns of all samples: torch would repeat the matrix for each."""
    product = multiply(matrix, dense.movedim(0, 1).flatten(1))
    return product.unflatten(1, (len(dense), dense.shape[2])).movedim(1, 0)


def multiplies(device: torch.device, rows: int, columns: int) -> bool:
    """Whether outer products of single vectors are formed by elementwise multiplication rather than by `bmm`."""
    # MKL's `bmm` is faster where it is tuned and torch calls it, but not into fresh pages, or for a vector: benchmarks/micro.py outer.
    if device.type != "cpu" or not pages_are_kept() or _mkl_is_untuned():
        return True
    return min(rows, columns) == 1 or rows * columns < FEW_PRODUCTS


def _dividing_threads(*sides: Tensor) -> int:
    """Among how many threads to divide a product of these tensors; 1 for no division."""
    return torch.get_num_threads() if _is_slow(*sides) else 1


def _is_slow(*sides: Tensor) -> bool:
    """Whether MKL would run a product of these tensors, and is not tuned for it."""
    return _mkl_is_untuned() and all([side.dtype == torch.float32 and side.device.type == "cpu" for side in sides])


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


@functools.cache
def _mkl_is_untuned() -> bool:
    return torch.backends.mkl.is_available() and is_amd()
