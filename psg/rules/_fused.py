"""Elementwise steps as one kernel each, for loops that a compiled graph holds as a single op."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

# Tracing and compiling patch what all threads see.
_compiling = threading.RLock()


class Fused:
    """A function of tensors that writes into some of them, compiled at its first call for the shapes and strides that all its calls have.

    Args:
        fn: A function of the module's, for which compiled code is kept; it returns nothing, and none of its arguments overlap.
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
    """`threads` are in the code that comes out."""
    examples = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in signature]

    def flat(*tensors: Tensor) -> tuple[()]:
        fn(*tensors)
        return ()

    run: Any = torch._inductor.compile(make_fx(flat)(*examples), [*examples])
    return run
