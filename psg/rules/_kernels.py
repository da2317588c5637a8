"""Workarounds for ops that torch's kernels get wrong, used where fn's own ops run: the loop, its oracle and method="batch".

On a CPU, the backward pass of batch norm is wrong for a batch of one image whose cotangent has another memory layout than the image, and
for inputs with only batch and channel dimensions whose weights or running statistics have gaps between their entries in memory.

On a GPU, cuDNN differentiates recurrent layers once, in training mode alone, and not after a write into their outputs; it refuses weights
with gaps; and from one state of the generator it drops out other units than the rules do. torch's own kernels have none of these limits.
"""

from typing import Any

import torch
from torch import Tensor

from psg._torch import _ambient
from psg.rules.leaks import UPDATING


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op of fn's, with the workarounds. The output's values and memory layout are torch's own."""
    if func in RECURRENT and not _ambient.autocast():  # torch's own kernels do not take the dtypes that autocast makes
        with _ambient.without_cudnn():
            return func(*args, **kwargs)
    output = run_without_gaps(func, args, kwargs)
    if func not in BATCH_NORMS:
        return output
    normalized = output[0] if isinstance(output, tuple) else output
    if normalized.is_cpu and normalized.requires_grad:
        shape, stride = normalized.shape, normalized.stride()

        def laid_out(cotangent: Tensor | None) -> Tensor | None:
            if cotangent is None or cotangent.stride() == stride:  # None: no cotangent has arrived
                return cotangent
            return cotangent.new_empty_strided(shape, stride).copy_(cotangent)

        normalized.register_hook(laid_out)
    return output


def run_without_gaps(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op, a batch norm with weights and statistics without gaps; under transforms, where the workaround by a hook has no place."""
    if func in BATCH_NORMS:
        # All arguments but the input. Running statistics may be copies: updates of them were refused before (psg/rules/leaks.py).
        args = (*args[:1], *map(_without_gaps, args[1:]))
        kwargs = {name: value if name == "input" else _without_gaps(value) for name, value in kwargs.items()}
    return func(*args, **kwargs)


def _without_gaps(value: Any) -> Any:
    """A CPU tensor without gaps between its entries; everything else as it is."""
    return value.contiguous() if isinstance(value, Tensor) and value.is_cpu else value


_aten = torch.ops.aten
BATCH_NORMS = {*UPDATING, _aten._native_batch_norm_legit.no_stats, _aten._native_batch_norm_legit_no_training.default}
RECURRENT = {
    form
    for op in (torch.rnn_tanh, torch.rnn_relu, torch.gru, torch.lstm)
    for form in (op, getattr(_aten, op.__name__).input, getattr(_aten, op.__name__).data)
}
