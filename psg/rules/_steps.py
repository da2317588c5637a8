"""Elementwise steps of a loop, each compiled into one kernel: for loops that are a single op in a compiled graph."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

# Tracing and compiling patch global state.
_compiling = threading.RLock()


class CompiledStep:
    """A function that writes into some of its arguments, compiled at the first call. All calls must have the same shapes and strides.

    Args:
        fn: A module-level function, the key of the cache of compiled code. It returns nothing, and its arguments do not overlap.
    """

    def __init__(self, fn: Callable[..., None]) -> None:
        self._fn = fn
        self._run: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        if self._run is None:
            with _compiling:
                self._run = _compiled(self._fn, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors), torch.get_num_threads())
        self._run(*tensors)


@functools.lru_cache(maxsize=256)
def _compiled(fn: Callable[..., None], signature: tuple[Any, ...], threads: int) -> Callable[..., Any]:
    """`threads` is part of the key because the generated code depends on it."""
    examples = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in signature]

    def flat(*tensors: Tensor) -> tuple[()]:
        fn(*tensors)
        return ()

    run: Any = torch._inductor.compile(make_fx(flat)(*examples), [*examples])
    return run
