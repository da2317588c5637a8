"""Figures of the machine for cost models: what a byte, and the call of an op, cost in operations."""

import math
from collections.abc import Hashable

import torch

from psg._hardware._memory import pages_are_kept
from psg._torch import _functorch


def reused_byte(device: torch.device, dtype: torch.dtype) -> int:
    """A byte read from memory, or written into memory that this process already uses."""
    if device.type == "cpu":
        return 13  # measured: benchmarks/micro.py
    # Published operations a second over bytes a second of an H100: half precision, TF32, float32.
    if dtype in (torch.float16, torch.bfloat16):
        return 295
    return 148 if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else 20


MANY_BYTES = 1 << 20
"""A tensor of so many bytes takes longer to read or write than Python takes for a few ops."""

_RECYCLED = 2 << 20
"""The most bytes of a tensor for which a CPU's allocator has memory that was freed before, in most calls of a loop."""


def fresh_byte(device: torch.device, dtype: torch.dtype, nbytes: float = math.inf) -> int:
    """A byte written into newly allocated memory, of which a tensor has `nbytes`.

    On a CPU the kernel must first clear its page, unless the tensor is small, or `psg.keep_pages` is in effect.
    """
    return 60 if device.type == "cpu" and nbytes > _RECYCLED and not pages_are_kept() else reused_byte(device, dtype)


def kept_byte(device: torch.device, dtype: torch.dtype, nbytes: float = math.inf) -> int:
    """A byte of a materialised gradient that is kept: written into new memory, and read again after the norm, for the weighted sum."""
    return fresh_byte(device, dtype, nbytes) + reused_byte(device, dtype)


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


def items_at_a_time(device: torch.device, nbytes: int, chunks: int = 1) -> int:
    """How many temporaries of `nbytes` bytes fit into so many `chunk_bytes`; at least one."""
    return max(1, chunks * chunk_bytes(device) // max(1, nbytes))
