"""What one kernel of ours does in the place of several of torch's, on CUDA devices with Triton.

Norms and sums of gradients that are never written to memory, and sums that leave out samples without a mask for every tensor.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from psg._hardware._processor import multiplies_by_tensor_cores
from psg._torch import _functorch
from psg._torch._library import opaque

_P = ParamSpec("_P")
_LAYOUT = [torch.Tag.flexible_layout]  # of custom ops: the kernels go by strides, so that no compiler need lay out anything anew for them


def takes_conv(tensor: Tensor) -> bool:
    """Whether `conv_squared_norm` can take this tensor, and is faster: exact products of float32 are faster by cuBLAS (measured)."""
    if tensor.dtype == torch.float32 and (_functorch.is_traced() or not tensor.is_contiguous()):
        return False  # to round channels-last images, as compilers make them, takes longer than the kernel saves (measured)
    return multiplies_by_tensor_cores(tensor) and _can_launch(tensor)


def takes_conv_sum(tensor: Tensor) -> bool:
    """Whether `conv_weighted_sum` can take this tensor. Of 16-bit numbers, torch's own sums are rounded to 16 bits."""
    return tensor.dtype in (torch.float16, torch.bfloat16) and _can_launch(tensor)


def takes_gram(left: Tensor, right: Tensor) -> bool:
    """Whether `gram_sums` can take these sides, and is faster: three products in TensorFloat-32 for one take as long as one of cuBLAS."""
    if left.dtype not in (torch.float32, torch.float16, torch.bfloat16) or left.dtype == torch.float32 and multiplies_by_tensor_cores(left):
        return False
    return _can_launch(left) and _has_whole_rows(left) and _has_whole_rows(right)


def _has_whole_rows(side: Tensor) -> bool:
    """Whether rows [n, t, a] are contiguous and whole blocks of 16 bytes, a sample's within 32 bits: others were not measured."""
    positions, size = side.shape[1:]
    row, entry = side.stride()[1:]
    return entry == 1 and row * side.itemsize % 16 == 0 and size * side.itemsize % 16 == 0 and positions * row < 1 << 31


def takes_product(tensor: Tensor) -> bool:
    """Whether `without_spoiled` can take sides like this tensor."""
    return tensor.dtype in (torch.float32, torch.bfloat16) and _can_launch(tensor)


def _can_launch(tensor: Tensor) -> bool:
    """Whether a kernel can read this tensor: its device runs them, and no transform or autograd has to see the op."""
    return tensor.is_cuda and not _functorch.is_transformed() and not tensor.requires_grad and _runs_kernels(tensor.device)


@functools.cache
def _runs_kernels(device: torch.device) -> bool:
    """Whether Triton is installed, and uses this device's tensor cores for 16 bits and TF32: from compute capability 8.0 on."""
    is_nvidia = torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    return is_nvidia and importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    """The kernels. They need Triton, which not every torch comes with."""
    return importlib.import_module("psg._hardware._triton")


def _opaque(fake: Callable[..., Tensor]) -> Callable[[Callable[_P, Tensor]], Callable[_P, Tensor]]:
    """Makes a function that launches a kernel one op to tracers. `fake` gives a tensor like its result."""

    def decorate(launch: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
        op = opaque(launch.__name__, launch, fake, _LAYOUT)

        @functools.wraps(launch)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
            return (op if _functorch.is_traced() else launch)(*args, **kwargs)

        return run

    return decorate


@_opaque(lambda cotangent, *_: cotangent.new_empty(len(cotangent), dtype=torch.float32))
def conv_squared_norm(
    cotangent: Tensor, input: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Squared norms of the weight gradients of a two-dimensional convolution without groups.

    Args:
        cotangent: [n, o, *spatial out].
        input: [n, i, *spatial in].
        kernel: Two sizes; the other arguments are like it.
        stride: Of the output positions.
        padding: On both sides of each spatial dimension.
        dilation: Of the kernel's taps.

    Returns:
        The squared norms [n], in float32.
    """
    n = len(cotangent)
    with torch.cuda.device_of(cotangent):
        tensors, sizes, options, tiles = _conv_arguments(cotangent, input, kernel, stride, padding, dilation)
        norms = torch.empty(n, tiles, dtype=torch.float32, device=cotangent.device)
        _kernels().conv_norms[(n * tiles,)](*tensors, norms, tiles, *sizes, **options)
        return norms.sum(1)


@_opaque(
    lambda weights, cotangent, input, kernel, *_, **__: weights.new_empty(cotangent.shape[1], input.shape[1], *kernel, dtype=torch.float32)
)
def conv_weighted_sum(
    weights: Tensor,
    cotangent: Tensor,
    input: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    skips: bool,
) -> Tensor:
    """The sum of the same gradients, times weights[n] -> [o, i, *kernel], in float32, however few bits the tensors have.

    If `skips`, samples of weight zero are left out, even where they hold inf or NaN.
    """
    n, outs, ins = *cotangent.shape[:2], input.shape[1]
    with torch.cuda.device_of(cotangent):
        tensors, sizes, options, tiles = _conv_arguments(cotangent, input, kernel, stride, padding, dilation)
        # Several parts of the sum at a time keep the device busy, more of them where entries are gathered one by one. Each is a tensor of
        # its own, so that the order of additions is fixed.
        programs = (2 if options["ONE_TAP"] else 4) * _multiprocessors(cotangent.device)
        each = -(-n // max(1, min(n, round(programs / tiles))))
        parts = -(-n // each)
        sums = torch.empty(parts, outs, *kernel, ins, dtype=torch.float32, device=cotangent.device)
        _kernels().conv_sums[(tiles, parts)](*tensors, weights.float().contiguous(), sums, n, each, *sizes, SKIPS=skips, **options)
        return sums.sum(0).movedim(-1, 1).contiguous()


def _conv_arguments(
    cotangent: Tensor, input: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[Tensor, Tensor], list[int], dict[str, Any], int]:
    """The tensors, sizes and options of a kernel, and the number of tiles of a gradient."""
    outs, ins = cotangent.shape[1], input.shape[1]
    entries = ins * math.prod(kernel)
    tile = [min(most, max(16, 1 << (size - 1).bit_length())) for size, most in ((outs, 128), (entries, 128))]
    if tile[0] <= 64:
        tile[1] = min(tile[1], 64)
    # 16-bit numbers are best read in runs of channels. Tensor cores take 32-bit ones in runs of positions.
    is_last = cotangent.dtype != torch.float32
    whole = math.gcd(ins, tile[1])
    is_one_tap = is_last and whole >= 32
    if is_one_tap:
        tile[1] = whole
        images = input.contiguous(memory_format=torch.channels_last)
    else:
        images = _padded_last(input, padding) if is_last else _padded_rounded(input, padding)
        padding = (0, 0)
    if not is_last:
        cotangent = _padded_rounded(cotangent, (0, 0))
    elif cotangent.shape[2:].numel() % 8:
        cotangent = cotangent.contiguous(memory_format=torch.channels_last)  # positions that are not whole blocks of 16 bytes are slow
    flat = cotangent.flatten(2)
    sizes = [flat.shape[2], *images.shape[2:], cotangent.shape[3], outs, ins, entries]
    sizes += [*stride, *padding, kernel[1], *dilation, *flat.stride(), *images.stride()]
    options = {"LAST": is_last, "ONE_TAP": is_one_tap, "OUTS": tile[0], "ENTRIES": tile[1]}
    options |= {
        "POSITIONS": 64 if is_last and flat.shape[2] > 256 else 32,
        "num_warps": 8 if math.prod(tile) > 1 << 13 else 4,
        "num_stages": 3,
    }
    return (flat, images), sizes, options, -(-outs // tile[0]) * -(-entries // tile[1])


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _padded_last(images: Tensor, padding: Sequence[int]) -> Tensor:
    """[n, i, h, w] -> [n, i, h + 2 p, w + 2 p], the channels innermost in memory."""
    if not any(padding):
        return images.contiguous(memory_format=torch.channels_last)
    (top, left), (height, width) = padding, images.shape[2:]
    padded = images.new_zeros(len(images), height + 2 * top, width + 2 * left, images.shape[1]).movedim(-1, 1)
    padded[:, :, top : top + height, left : left + width] = images
    return padded


def _padded_rounded(images: Tensor, padding: Sequence[int]) -> Tensor:
    """[n, i, h, w] -> [n, i, h + 2 p, w + 2 p], contiguous, rounded to TensorFloat-32."""
    n, channels, height, width = images.shape
    padded = images.new_empty(n, channels, height + 2 * padding[0], width + 2 * padding[1])
    rows, columns = padded.shape[2:]
    block = 1024
    grid = n * channels, -(-rows * columns // block)
    _kernels().pad_rounded[grid](images, padded, channels, height, width, rows, columns, *padding, *images.stride(), BLOCK=block)
    return padded


@_opaque(lambda left, right: left.new_empty(len(left), 2, dtype=torch.float32))
def gram_sums(left: Tensor, right: Tensor) -> Tensor:
    """Sums of products of inner products, in float32.

    Those of float32 numbers are exact to some 2^-21: each is multiplied as a sum of two in TensorFloat-32.

    Args:
        left: [n, t, o].
        right: [n, t, i], of the same dtype.

    Returns:
        sum_{t,s} <left_t, left_s> <right_t, right_s>, and sum_t |left_t|^2 |right_t|^2, as [n, 2].
    """
    (n, positions, outs), ins = left.shape, right.shape[2]
    rows = _gram_rows(positions)
    pairs = _tile_pairs(positions, rows)
    sums = torch.empty(n, pairs, 2, dtype=torch.float32, device=left.device)
    if not sums.numel():
        return sums.sum(1)
    with torch.cuda.device_of(left):
        _kernels().gram_sums[(n * pairs,)](
            left, right, sums, pairs, positions, outs, ins, *left.stride(), *right.stride(),
            ROWS=rows, DEPTH=128 // left.itemsize, PRECISION="tf32x3" if left.dtype == torch.float32 else "ieee", num_warps=4, num_stages=3,
        )  # fmt: skip
        return sums.sum(1)


def gram_cost(positions: int, entries: int, dtype: torch.dtype) -> float:
    """The cost of `gram_sums` for one sample with so many entries at each position, in operations of matrix products."""
    rows = _gram_rows(positions)
    return 2 * _tile_pairs(positions, rows) * rows**2 * entries * (1 if dtype == torch.float32 else 4)  # measured


def _gram_rows(positions: int) -> int:
    """The rows of a tile: a power of two."""
    return 16 if positions <= 16 else 32 if positions <= 32 else 64


def _tile_pairs(positions: int, rows: int) -> int:
    tiles = -(-positions // rows)
    return tiles * (tiles + 1) // 2


def without_spoiled(product: Tensor, left: Tensor, right: Tensor, finite: Tensor) -> Tensor:
    """The sum over the samples with finite[n] of left[n]^T right[n], as if the others were zero.

    To zero them would read and write both sides. Here their product, taken of all samples, is corrected by a kernel that ends at once
    if every sample counts, without asking the host.

    Args:
        product: The sum over all samples [o, i], in float32. It may be written into.
        left: [n, t, o], in float32 or bfloat16.
        right: [n, t, i].
        finite: Booleans [n], False for every sample that holds inf or NaN.

    Returns:
        The sum [o, i].
    """
    if _functorch.is_traced():
        return _mended_op(product, left, right, finite)
    _mend(product, left, right, finite)
    return product


def _mend(product: Tensor, left: Tensor, right: Tensor, finite: Tensor) -> None:
    (n, positions, outs), ins, size = left.shape, right.shape[2], 64
    if product.numel() == 0:
        return
    with torch.cuda.device_of(left):
        _kernels().mend[(-(-outs // size) * -(-ins // size),)](
            product, left, right, finite.view(torch.uint8), n, positions, outs, ins, *product.stride(), *left.stride(), *right.stride(),
            SAMPLES=128, OUTS=size, INS=size, ROWS=32, num_warps=4, num_stages=2,
        )  # fmt: skip


def _mended(product: Tensor, left: Tensor, right: Tensor, finite: Tensor) -> Tensor:
    product = product.clone()  # a compiler may use the memory of the product for other values
    _mend(product, left, right, finite)
    return product


_mended_op = opaque("without_spoiled", _mended, lambda product, left, right, finite: torch.empty_like(product), _LAYOUT)
