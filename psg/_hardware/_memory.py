"""Memory: how much a chunk may take, and pages that a process keeps, so that each step of a loop reuses those of the step before.

On a CPU, large tensors come from the C library's malloc. glibc's malloc gives their pages back to the system as soon as they are freed, and
the next step gets fresh ones, which the kernel must map and clear: 0.25 microseconds for each 4 KiB, a third of a small model's step.
"""

import contextlib
import ctypes
import math
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from psg._errors import InputError
from psg._hardware._processor import is_amd
from psg._torch import _functorch

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4

_kept = False


def keep_pages() -> bool:
    """Make this process keep the memory that it frees, and reuse it for later allocations.

    For programs that repeat the same step, such as training: each step then writes into the pages of the step before. It makes plain
    PyTorch faster too. psg counts on it from then on: it materialises more layers' per-sample gradients and keeps them from the norm to
    the sum, where writing them and reading them twice is cheaper than avoiding them. The process never shrinks again, and its peak may be
    higher, by fragmentation and by what `psg.explain` lists as "materialised and kept".

    This affects CPU tensors, on Linux with glibc. For CUDA tensors, PyTorch's own allocator keeps its memory anyway.

    Returns:
        Whether it took effect. False, with nothing changed, where the C library has no such setting.

    Example:
        >>> import psg
        >>> psg.keep_pages()  # doctest: +SKIP
        True

    Source: mallopt(3): with M_TRIM_THRESHOLD = -1 the heap is never trimmed, with M_MMAP_MAX = 0 nothing is allocated outside it by mmap.
    """
    global _kept
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    _kept = mallopt is not None and mallopt(_M_TRIM_THRESHOLD, -1) == 1 and mallopt(_M_MMAP_MAX, 0) == 1
    return _kept


def pages_are_kept() -> bool:
    """Whether `keep_pages` has taken effect."""
    return _kept


_LARGE = 64 << 20  # bytes: more than the caches hold


def new_zeros(like: Tensor, *shape: int) -> Tensor:
    """`like.new_zeros(shape)`. On AMD's processors large ones, in pages that are kept, are cleared by C's memset, in half the time."""
    # memset bypasses the caches, by one thread, which on Intel's processors writes less in a second than torch's fill by two. Into fresh
    # pages it is slower everywhere: the fill, on several threads, lets the kernel map them in parallel.
    bypasses = _kept and is_amd() and like.device.type == "cpu" and like.element_size() * math.prod(shape) >= _LARGE
    if not bypasses or type(like) is not Tensor or _functorch.is_watched():
        return like.new_zeros(shape)
    zeros = like.new_empty(shape)
    ctypes.memset(zeros.data_ptr(), 0, zeros.nbytes)
    return zeros


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse(size: str) -> int | None:
    """The number of bytes that a text such as "512 MiB" names.

    Returns:
        The number; None for "auto".

    Raises:
        InputError: The text names no bytes.
    """
    if size == "auto":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B\s*", size.upper())
    if match is None or float(match[1]) == 0:
        raise InputError(
            f'chunk_size={size!r}: expected bytes as in "512 MiB" or "2 GB", or "auto" for a quarter of the memory that is free.'
        )
    return int(float(match[1]) * _UNITS[match[2] or ""])


def budget(size: str, device: torch.device) -> int:
    """The bytes that a chunk may take on a device: those that `size` names, or for "auto" a quarter of the free ones."""
    named = parse(size)
    if named is not None:
        return named
    if device.type == "cuda":
        # Memory that torch's allocator has reserved, but that holds no tensor, is free too.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (torch.cuda.mem_get_info(device)[0] + unused) // 4
    return _free_on_the_host() // 4


def _free_on_the_host() -> int:
    """The bytes that this process can still allocate, by Linux's account and its container's limit; without those a guess, 4 GiB."""
    free = [4 << 30]
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, IndexError):
        # MemAvailable counts cached pages of files as available.
        free = [int(re.findall(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE)[0]) << 10]
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(free))
