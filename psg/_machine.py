"""What the machine is good at: how many operations a byte is worth to it, and how a product is divided among its threads."""

import functools
from collections.abc import Hashable

import torch
from torch import Tensor

from psg import _functorch
from psg.memory import pages_are_kept

# What a byte, and an op whatever its size, is worth, in arithmetic operations.


def used(device: torch.device, dtype: torch.dtype) -> int:
    """A byte read, or written into memory that is in use."""
    if device.type == "cpu":
        return 13  # measured: benchmarks/micro.py
    # Published operations by bytes a second of an H100: half precision, TF32, float32.
    if dtype in (torch.float16, torch.bfloat16):
        return 295
    return 148 if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else 20


def written(device: torch.device, dtype: torch.dtype) -> int:
    """A byte written into newly allocated memory: on a CPU the kernel must first clear its page, unless pages are kept."""
    return 60 if device.type == "cpu" and not pages_are_kept() else used(device, dtype)


def kept(device: torch.device, dtype: torch.dtype) -> int:
    """A byte of a materialised gradient that is read for a norm, and again for a weighted sum; and what it costs to have memory for it."""
    return written(device, dtype) + used(device, dtype)


def taken_out(device: torch.device, dtype: torch.dtype) -> int:
    """A byte of what samples are taken out of before a sum: read and written, but on a CPU, where it is known first if any is to go."""
    return 0 if device.type == "cpu" else 2 * used(device, dtype)


def dispatched(device: torch.device) -> int:
    """An op of few numbers: Python's time and torch's, of which a trace takes next to none."""
    if _functorch.is_traced():
        return 0
    return 1_000_000 if device.type == "cpu" else 100_000_000


def settings(device: torch.device) -> Hashable:
    """The settings of the process that the figures above depend on."""
    # Only float32 products on an accelerator have several precisions.
    precision = None if device.type == "cpu" else torch.backends.cuda.matmul.fp32_precision
    return torch.get_num_threads(), pages_are_kept(), precision


def chunk_bytes(device: torch.device) -> int:
    """How much to form at a time of what is read once and dropped: a cache full on a CPU, elsewhere enough to keep a device busy."""
    return (4 if device.type == "cpu" else 256) << 20


# Products of matrices. MKL divides them among threads as it suits Intel's processors. On AMD's that takes up to twice as long as a block
# for each thread, and for some shapes eight times: benchmarks/micro.py product, weighted_sum, gram.

_LARGE_PRODUCT = 1 << 22  # multiplications
_LARGE_SUM = 1 << 19


def row_blocks(left: Tensor, right: Tensor) -> int:
    """Into how many blocks of rows left[a, t] @ right[t, b] is divided, each for one thread; 1 where the whole product is as fast."""
    (rows, inner), columns, threads = left.shape, right.shape[1], _dividing_threads(left, right)
    pays = threads >= 4 and rows >= 48 * threads and 3 * rows >= columns and rows * inner * columns >= _LARGE_PRODUCT
    return threads if pays and rows % threads == 0 else 1


def column_blocks(rows: Tensor) -> int:
    """Into how many blocks of columns weights[n] @ rows[n, p] is divided."""
    threads = _dividing_threads(rows)
    return threads if rows.numel() >= _LARGE_SUM and rows.shape[1] % threads == 0 else 1


def inner_blocks(left: Tensor, right: Tensor) -> int:
    """Into how many blocks left[n, p] @ right[m, p]^T is divided along p, whose products add up."""
    (rows, inner), columns, threads = left.shape, len(right), _dividing_threads(left, right)
    pays = inner >= 64 * max(rows, columns) and rows * inner * columns >= _LARGE_PRODUCT
    return threads if pays and inner % threads == 0 else 1


def _dividing_threads(*sides: Tensor) -> int:
    """How many threads to divide a product of these among; 1 for none."""
    single = all(side.dtype == torch.float32 and side.device.type == "cpu" for side in sides)
    return torch.get_num_threads() if single and _mkl_is_untuned() else 1


def multiplies(device: torch.device) -> bool:
    """Whether outer products of single vectors are formed by a multiplication for each entry, and not by products of matrices."""
    # MKL's write the faster where it is tuned, but not into fresh pages: benchmarks/micro.py outer.
    return device.type != "cpu" or not pages_are_kept() or _mkl_is_untuned()


@functools.cache
def _mkl_is_untuned() -> bool:
    return torch.backends.mkl.is_available() and "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")
