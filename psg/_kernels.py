"""Ops that torch's CPU kernels get wrong, run so that they are right: for what runs fn's own ops, the loop, its oracle and whole batches.

The backward of a batch norm is wrong where the cotangent of a batch of one image is laid out in another way than the image, and where there
are gaps between the weights, or the running statistics, of what has no dimensions but batch and channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op of fn's. Its values, and how they lie in memory, are torch's own."""
    if func not in _BATCH_NORMS:
        return func(*args, **kwargs)
    # All but the input. Running statistics that are updated are refused before (psg/rules/leaks.py).
    args = (*args[:1], *map(_closed, args[1:]))
    kwargs = {name: value if name == "input" else _closed(value) for name, value in kwargs.items()}
    output = func(*args, **kwargs)
    normalized = output[0] if isinstance(output, tuple) else output
    if normalized.is_cpu and normalized.requires_grad:
        shape, stride = normalized.shape, normalized.stride()

        def laid_out(cotangent: Tensor | None) -> Tensor | None:
            if cotangent is None or cotangent.stride() == stride:  # None: nothing has arrived
                return cotangent
            return cotangent.new_empty_strided(shape, stride).copy_(cotangent)

        normalized.register_hook(laid_out)
    return output


class Repaired(TorchFunctionMode):
    """Runs every op so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _closed(value: Any) -> Any:
    """Without gaps."""
    return value.contiguous() if isinstance(value, Tensor) and value.is_cpu else value


_aten = torch.ops.aten
_BATCH_NORMS = {
    F.batch_norm,
    F.instance_norm,
    torch.batch_norm,
    torch.instance_norm,
    torch.native_batch_norm,
    # in the graphs of exported programs
    _aten.batch_norm.default,
    _aten.instance_norm.default,
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_no_training.default,
}
