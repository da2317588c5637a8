"""Ops that vmap does not know, or runs sample by sample: from others that it does know."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg import _functorch
from psg.factors._base import widen
from psg.rules._registry import decomposition


@decomposition(torch.equal)
@decomposition(Tensor.equal)
def _equal(input: Tensor, other: Tensor) -> bool:
    return input.shape == other.shape and bool((input == other).all())


@decomposition(torch.allclose)
@decomposition(Tensor.allclose)
def _allclose(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    near = ((input - other).abs() <= atol + rtol * other.abs()) & input.isfinite() & other.isfinite()
    close = near | (input == other)
    return bool((close | (input.isnan() & other.isnan()) if equal_nan else close).all())


@decomposition(torch.moveaxis)
@decomposition(Tensor.moveaxis)
def _moveaxis(input: Tensor, source: Any, destination: Any) -> Tensor:
    return input.movedim(source, destination)


@decomposition(torch.index_add)
@decomposition(Tensor.index_add)
def _index_add(input: Tensor, dim: Any = None, index: Any = None, source: Any = None, *, alpha: float = 1, **others: Any) -> Any:
    """Where every sample has an index of its own (the edges of a graph): vmap selects each from the whole."""
    if others or not isinstance(dim, int) or not isinstance(index, Tensor) or not isinstance(source, Tensor):
        return NotImplemented
    if not _functorch.is_sampled(index) or index.ndim != 1 or source.ndim == 0 or source.dtype != input.dtype:
        return NotImplemented
    shape = [1] * source.ndim
    shape[dim] = len(index)
    whole = all(given == own for d, (given, own) in enumerate(zip(source.shape, input.shape, strict=False)) if d != dim % source.ndim)
    if not whole or input.ndim != source.ndim or source.shape[dim] != len(index):
        return NotImplemented  # torch says what it expects
    if alpha != 1:
        source = (alpha * source).to(input.dtype)
    return input.scatter_add(dim, index.reshape(shape).expand(source.shape), source)


@decomposition(Tensor.index_add_)
def _index_add_in_place(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    added = _index_add(input, *args, **kwargs)
    return added if added is NotImplemented else input.copy_(added)


@decomposition(torch._weight_norm)  # pyright: ignore[reportPrivateImportUsage]
def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """v g / |v|, the norm over all dimensions but one, or over all for -1: its own backward is run sample by sample."""
    if not -v.ndim <= dim < v.ndim or v.dtype != g.dtype or v.is_complex():
        return NotImplemented
    dims = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    wide = widen(v)
    norm = torch.linalg.vector_norm(wide, dim=dims, keepdim=dim != -1) if dims else wide.abs()
    return (wide * (widen(g) / norm)).to(v.dtype)


def _written_back(op: Any) -> Callable[..., Any]:
    # Of a copy: what the op keeps for its backward must not be what is written into.
    return lambda input, *args, **kwargs: input.copy_(op(input.clone(), *args, **kwargs))


# In place, vmap runs these sample by sample.
for _name in (
    *("addcdiv", "addcmul", "addmm", "addr", "clamp", "clip", "cumprod", "cumsum", "fmod", "heaviside", "hypot", "index_copy", "ldexp"),
    *("lerp", "remainder", "scatter", "square", "tril", "triu", "xlogy"),
):
    for _holder in (Tensor, torch):
        if hasattr(_holder, f"{_name}_"):
            decomposition(getattr(_holder, f"{_name}_"))(_written_back(getattr(Tensor, _name)))


@decomposition(F.kl_div)
def _kl_div(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean", log_target: bool = False
) -> Any:
    if size_average is not None or reduce is not None or reduction not in ("none", "sum", "mean", "batchmean"):
        return NotImplemented
    terms = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    if reduction == "batchmean":
        return terms.sum() / input.shape[0] if input.ndim else terms.sum()
    return {"none": lambda: terms, "sum": terms.sum, "mean": terms.mean}[reduction]()


def _global_average(dims: int) -> Callable[..., Any]:
    def average(input: Tensor, output_size: Any) -> Any:
        sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
        if any(size != 1 for size in sizes) or input.numel() == 0:
            return NotImplemented
        return input.mean([-1 - k for k in range(dims)], keepdim=True)

    return average


decomposition(F.adaptive_avg_pool2d)(_global_average(2))
decomposition(F.adaptive_avg_pool3d)(_global_average(3))


@decomposition(vars(torch._C)["_nn"].pad_sequence)
def _pad_sequence(sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right") -> Any:
    longest = max(len(sequence) for sequence in sequences)
    rows = []
    for sequence in sequences:
        gap = longest - len(sequence)
        sides = (0, gap) if padding_side == "right" else (gap, 0)
        rows.append(F.pad(sequence, (*(0, 0) * (sequence.ndim - 1), *sides), value=padding_value))
    return torch.stack(rows, 0 if batch_first else 1)


@decomposition(torch.is_nonzero)
@decomposition(Tensor.is_nonzero)
def _is_nonzero(input: Tensor) -> bool:
    return bool(input)


@decomposition(Tensor.__contains__)
def _contains(self: Tensor, element: Any) -> Any:
    """`element in tensor`, written out: its last step is a Python value of a tensor, which the pass knows how to take."""
    return bool((self == element).any())


@decomposition(Tensor.__setitem__)
def _fill(self: Tensor, index: Any, value: Any) -> Any:
    """tensor[mask] = number, of a mask that depends on the sample: what it selects has no shape under vmap, and need not have one."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == self.shape[: index.ndim]
    is_number = value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, (int, float))
    if not (is_mask and is_number and _functorch.is_sampled(index)):
        return NotImplemented
    self.copy_(torch.where(index.reshape(*index.shape, *(1,) * (self.ndim - index.ndim)), value, self))


_CHANNELS_LAST = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _layout(conversion: Any) -> None:
    @decomposition(conversion)
    def channels_last(self: Tensor, *args: Any, memory_format: Any = None, **kwargs: Any) -> Any:
        """The layout of a sample: vmap cannot ask for it by name, but by a permutation of a contiguous tensor."""
        if _CHANNELS_LAST.get(memory_format) != self.ndim:
            return NotImplemented
        return conversion(self.movedim(1, -1), *args, **kwargs).contiguous().movedim(-1, 1)


for _conversion in (
    *(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
):
    _layout(_conversion)


@decomposition(Tensor.is_contiguous)
def _is_contiguous(self: Tensor, memory_format: Any = torch.contiguous_format) -> Any:
    """Of a sample in this layout."""
    if _CHANNELS_LAST.get(memory_format) != self.ndim:
        return NotImplemented
    return self.movedim(1, -1).is_contiguous()
