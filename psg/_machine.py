"""Figures of the machine for cost models: what a byte costs in operations, and how to divide a matrix product among threads."""

import functools
from collections.abc import Hashable

import torch
from torch import Tensor

from psg import _functorch
from psg.memory import pages_are_kept

# Costs of a byte, and of calling an op, in arithmetic operations.


def reused_byte(device: torch.device, dtype: torch.dtype) -> int:
    """A byte read from memory, or written into memory that this process already uses."""
    if device.type == "cpu":
        return 13  # measured: benchmarks/micro.py
    # Published operations a second over bytes a second of an H100: half precision, TF32, float32.
    if dtype in (torch.float16, torch.bfloat16):
        return 295
    return 148 if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else 20


def fresh_byte(device: torch.device, dtype: torch.dtype) -> int:
    """A byte written into newly allocated memory: on a CPU the kernel must first clear its page, unless `psg.keep_pages` is in effect."""
    return 60 if device.type == "cpu" and not pages_are_kept() else reused_byte(device, dtype)


def kept_byte(device: torch.device, dtype: torch.dtype) -> int:
    """A byte of a materialised gradient that is kept: written into new memory, and read again after the norm, for the weighted sum."""
    return fresh_byte(device, dtype) + reused_byte(device, dtype)


def masked_byte(device: torch.device, dtype: torch.dtype) -> int:
    """A byte of a tensor from which excluded samples are zeroed before a sum. Free on a CPU, where we first ask if there are any."""
    return 0 if device.type == "cpu" else 2 * reused_byte(device, dtype)


def op_call(device: torch.device) -> int:
    """The call of an op on few numbers: Python's and torch's overhead, of which a traced program has almost none."""
    if _functorch.is_traced():
        return 0
    return 1_000_000 if device.type == "cpu" else 100_000_000


def settings(device: torch.device) -> Hashable:
    """The settings of the process that the figures above depend on."""
    # Only float32 products on an accelerator have several precisions.
    precision = None if device.type == "cpu" else torch.backends.cuda.matmul.fp32_precision
    return torch.get_num_threads(), pages_are_kept(), precision


def chunk_bytes(device: torch.device) -> int:
    """How many bytes of a temporary to form at a time: what fits a CPU's cache; on other devices enough to keep them busy."""
    return (4 if device.type == "cpu" else 256) << 20


# Matrix products. MKL's division among threads is tuned for Intel's processors. On AMD's it takes up to twice as long as one block for
# each thread, and for some shapes eight times as long: benchmarks/micro.py product, weighted_sum, gram.

_LARGE_PRODUCT = 1 << 22  # multiplications
_LARGE_SUM = 1 << 19


def row_blocks(left: Tensor, right: Tensor) -> int:
    """Into how many blocks of rows to divide left[a, t] @ right[t, b], one for each thread; 1 where this gains nothing."""
    (rows, inner), columns, threads = left.shape, right.shape[1], _dividing_threads(left, right)
    pays = threads >= 4 and rows >= 48 * threads and 3 * rows >= columns and rows * inner * columns >= _LARGE_PRODUCT
    return threads if pays and rows % threads == 0 else 1


def column_blocks(rows: Tensor) -> int:
    """Into how many blocks of columns to divide weights[n] @ rows[n, p]."""
    threads = _dividing_threads(rows)
    return threads if rows.numel() >= _LARGE_SUM and rows.shape[1] % threads == 0 else 1


def inner_blocks(left: Tensor, right: Tensor) -> int:
    """Into how many blocks along p to divide left[n, p] @ right[m, p]^T; the blocks' products are then added up."""
    (rows, inner), columns, threads = left.shape, len(right), _dividing_threads(left, right)
    pays = inner >= 64 * max(rows, columns) and rows * inner * columns >= _LARGE_PRODUCT
    return threads if pays and inner % threads == 0 else 1


def _dividing_threads(*sides: Tensor) -> int:
    """Among how many threads to divide a product of these tensors; 1 for no division."""
    single = all(side.dtype == torch.float32 and side.device.type == "cpu" for side in sides)
    return torch.get_num_threads() if single and _mkl_is_untuned() else 1


def multiplies(device: torch.device) -> bool:
    """Whether outer products of single vectors are formed by elementwise multiplication rather than by `bmm`."""
    # MKL's `bmm` is faster where it is tuned, but not into fresh pages: benchmarks/micro.py outer.
    return device.type != "cpu" or not pages_are_kept() or _mkl_is_untuned()


@functools.cache
def _mkl_is_untuned() -> bool:
    return torch.backends.mkl.is_available() and "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")
