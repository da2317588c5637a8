"""Workarounds for ops that torch's kernels get wrong, used where fn's own ops run: `vmap(grad)`, the loop, its oracle and method="batch".

On a CPU the backward pass of batch norm is wrong for a batch of one image whose cotangent has another memory layout than the image, and for
inputs with only batch and channel dimensions whose weights or running statistics have gaps between their entries in memory.

Of some ops the gradient itself is wrong at some inputs, as that of determinants, which is zero where a pivot is (psg/rules/repairs.py).

On a GPU batch norm gives a bias without a weight no gradient: an empty one, which for one channel reads as zero. Weight norm takes square
roots of float64 in float32 there. And cuDNN differentiates recurrent layers once, in training mode alone, and not after a write into their
outputs; it refuses weights with gaps; and from one state of the generator it drops out other units than the rules do. torch's own kernels
have none of these limits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._torch import _ambient
from psg.rules._registry import find_decomposition, is_written_out, known_as
from psg.rules.leaks import UPDATING


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op of fn's, with the workarounds. The output's values and memory layout are torch's own."""
    output = written_out(func, args, kwargs)
    return run_whole(func, args, kwargs) if output is NotImplemented else output


def run_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """The same, not written out as other ops."""
    if func in RECURRENT and not _ambient.autocast():  # torch's own kernels do not take the dtypes that autocast makes
        with _ambient.without_cudnn:
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


def written_out(func: Any, args: Any, kwargs: Any) -> Any:
    """An op whose gradient is wrong, by others; NotImplemented for other ops."""
    decompose = find_decomposition(func, differentiated=False) if is_written_out(func) else None
    return NotImplemented if decompose is None else decompose(*args, **kwargs)


def is_imprecise(func: Any, args: Any) -> bool:
    """Whether this is a call of weight norm that must be written out."""
    return known_as(func) is _WEIGHT_NORM and bool(args) and args[0].dtype == torch.float64 and not args[0].is_cpu


def shared_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """`F.dropout` of one sample, with the numbers that vmap draws once for all samples: on a GPU its fused kernel draws others."""
    return _shared_dropout(*args, **kwargs) if func is F.dropout else NotImplemented


def _shared_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or not 0 < p < 1 or inplace:
        return NotImplemented
    kept = torch.empty_like(input, memory_format=torch.contiguous_format).bernoulli_(1 - p)
    return input * kept * (1 / (1 - p))


def run_without_gaps(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op, a batch norm with weights and statistics without gaps; under transforms, where the workaround by a hook has no place."""
    if func in BATCH_NORMS:
        args, kwargs = _with_weight(func, args, kwargs)
        # All arguments but the input. Running statistics may be copies: updates of them were refused before (psg/rules/leaks.py).
        args = (*args[:1], *map(_without_gaps, args[1:]))
        kwargs = {name: value if name == "input" else _without_gaps(value) for name, value in kwargs.items()}
    return func(*args, **kwargs)


def _with_weight(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a batch norm, with a weight of ones if there is a bias alone."""
    place = 4 - UPDATING.get(func, (3,))[0]  # the weight follows the statistics, or they follow the bias
    weight, bias = (args[i] if i < len(args) else kwargs.get(name) for i, name in ((place, "weight"), (place + 1, "bias")))
    if weight is not None or bias is None:
        return args, kwargs
    ones = torch.ones_like(bias)
    return ((*args[:place], ones, *args[place + 1 :]), kwargs) if place < len(args) else (args, kwargs | {"weight": ones})


def _without_gaps(value: Any) -> Any:
    """A CPU tensor without gaps between its entries; everything else as it is."""
    return value.contiguous() if isinstance(value, Tensor) and value.is_cpu else value


_WEIGHT_NORM = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage]
_aten = torch.ops.aten
BATCH_NORMS = {*UPDATING, _aten._native_batch_norm_legit.no_stats, _aten._native_batch_norm_legit_no_training.default}
RECURRENT = {
    form
    for op in (torch.rnn_tanh, torch.rnn_relu, torch.gru, torch.lstm)
    for form in (op, getattr(_aten, op.__name__).input, getattr(_aten, op.__name__).data)
}
