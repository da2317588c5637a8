"""Lookups. With C the cotangent: grad W[n,v,:] = sum_t [index[n,t] = v] C[n,t,:]."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._errors import PsgError
from psg._hardware import _machine
from psg._torch import _functorch
from psg._torch._library import opaque
from psg._torch._ops import dims_before
from psg.factors import Outer, Rows
from psg.factors._arithmetic import wide
from psg.rules._registry import DIFFERENTIATED, decomposition, reshape, rule, transpose


@rule(F.embedding, params=("weight",), declines_few=True, differentiable=True)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """y = W[index]: ([n,*], [v,d]) -> [n,*,d]. `sparse` only says how torch would store the summed gradient."""
    if weight.is_complex() or max_norm is not None:
        return NotImplemented  # torch rescales rows of the weight in place, which later uses of the weight in fn must see
    rows, features = weight.shape
    if padding_idx is not None and not -rows <= padding_idx < rows:
        return NotImplemented  # torch raises its own error
    if weight.requires_grad:  # in a pass that is differentiated the output's own derivative counts, too: it leaves the padding out
        if scale_grad_by_freq:
            return NotImplemented  # torch scales the derivative of this derivative, too
        output = F.embedding(input, weight, padding_idx)
    else:
        output = _look_up_rows(input, weight)

    def factor(cotangent: Tensor) -> Rows:
        index = input.reshape(input.shape[0], input.shape[1:].numel()).long()
        cotangent = cotangent.reshape(*index.shape, features)
        if scale_grad_by_freq:
            # The frequency within the sample: fn sees one sample only.
            count = (index[:, :, None] == index[:, None, :]).sum(2, keepdim=True)
            cotangent = cotangent / count
        if padding_idx is not None:
            cotangent = cotangent.masked_fill((index == padding_idx % rows)[:, :, None], 0)
        return Rows(index, cotangent, rows)

    return output, {"weight": factor}


def _look_up_rows(index: Tensor, table: Tensor) -> Tensor:
    """table[index]: [n,*], [v,d] -> [n,*,d]."""
    # Inductor, on CPUs, would fuse the lookup into a reduction over positions and read entry by entry: benchmarks/micro.py lookup.
    fuses = table.is_cpu and _functorch.is_traced() and not _functorch.transform_active()
    return _rows(index, table) if fuses else F.embedding(index, table)


def _embedding_rows(index: Tensor, table: Tensor) -> Tensor:
    return F.embedding(index, table)


_rows = opaque("rows", _embedding_rows, lambda index, table: table.new_empty(*index.shape, table.shape[1]))


@transpose(F.embedding, data="input")
def embedding_transpose(
    shape: torch.Size, weight: Tensor, max_norm: float | None = None, scale_grad_by_freq: bool = False, **_: Any
) -> Any:
    """Lets the rule run inside transforms that fn uses. Its result is never applied: an index has no derivative."""
    return NotImplemented if weight.is_complex() or max_norm is not None or scale_grad_by_freq else (F.embedding, {})


@decomposition(F.embedding)
def embedding_of_each(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """An embedding whose weight depends on the sample: vmap has no sparse gradients, and ignores padding_idx, whose row must get none."""
    if max_norm is not None or not _functorch.is_vmapped(weight):
        return NotImplemented
    is_shared = not _functorch.is_wrapped(input) and not _has_negative(input)
    if is_shared and is_indexing(input, weight, padding_idx, max_norm, scale_grad_by_freq):
        return weight[input]  # once for all samples
    if padding_idx is None or not -len(weight) <= padding_idx < len(weight):
        return F.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq) if sparse else NotImplemented
    output = F.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq)
    return _WithoutGradient.apply(output, (input == padding_idx % len(weight)).unsqueeze(-1))


def is_indexing(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, scale_grad_by_freq: bool = False, **_: Any
) -> bool:
    """Whether a call of F.embedding that torch accepts is weight[input]."""
    fits = weight.ndim == 2 and input.dtype in (torch.int64, torch.int32)
    return fits and padding_idx is None and max_norm is None and not scale_grad_by_freq


def _has_negative(index: Tensor) -> bool:
    """Whether there are negative integers, which F.embedding refuses and indexing counts from the end; checked where reading is free."""
    return index.numel() > 0 and _functorch.can_read_now(index) and int(index.min()) < 0


class _WithoutGradient(torch.autograd.Function):
    """The identity, with a zero gradient where `padding`. Forward-mode tangents pass: in torch, too, padding only stops gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, padding: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (padding,) = ctx.saved_tensors
        return cotangent.masked_fill(padding, 0), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (padding,) = ctx.saved_tensors
        return _WithoutGradient.apply(tangent, padding)


@decomposition(F.embedding, need=DIFFERENTIATED)
def refuse_frequencies(*args: Any, scale_grad_by_freq: bool = False, **kwargs: Any) -> Any:
    """A gradient scaled by frequencies is not the gradient of any function; under vmap its derivative differs from torch's in a loop."""
    if scale_grad_by_freq or any(argument is True for argument in args[5:6]):
        raise PsgError("embedding with scale_grad_by_freq=True: vmap differentiates its gradient wrongly; use method='loop'")
    return embedding_of_each(*args, **kwargs)


@decomposition(torch.embedding)
def _embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    """The op that F.embedding calls, with its own order of arguments: vmap's batching rule of it drops the padding."""
    padding = padding_idx if 0 <= padding_idx < len(weight) else None
    return F.embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _lookup(input: Any, index: Any, from_end: bool = False) -> Any:
    """W[index] with integer tensors among the indices, as an embedding; with `from_end`, negative ones count from the end."""
    indices = index if isinstance(index, tuple) else (index,)
    if not isinstance(input, Tensor) or input.is_complex() or sum(own is ... for own in indices) > 1:
        return NotImplemented
    spare = [slice(None)] * (input.ndim - sum(own is not None and own is not ... for own in indices))
    indices = [own for given in indices for own in (spare if given is ... else [given])]
    tensors = [own for own in indices if isinstance(own, Tensor)]
    known = all(isinstance(own, (Tensor, slice)) or own is None or type(own) is int for own in indices)
    if not (tensors and known) or any(own.dtype not in (torch.int32, torch.int64) for own in tensors):
        return NotImplemented
    # As in torch: first what selects no rows by a tensor, then the tensors.
    others = tuple(slice(None) if isinstance(own, Tensor) else own for own in indices)
    if any(own != slice(None) for own in others):
        input = input[others]
    dims = [dim for dim, own in enumerate(own for own in indices if type(own) is not int) if isinstance(own, Tensor)]
    if dims[-1] >= input.ndim or any(input.shape[dim] == 0 for dim in dims):
        return NotImplemented
    first, count = dims[0], len(dims)
    if first or dims[-1] >= count:
        input = input.movedim(dims, tuple(range(count)))
    if from_end:
        tensors = [torch.where(own < 0, own + size, own) for own, size in zip(tensors, input.shape, strict=False)]
    index = _joined(tensors, input.shape)
    output = _as_embedding(input.flatten(0, count - 1) if count > 1 else input, index)
    back = dims_before({dim: own.ndim > 0 for dim, own in zip(dims, tensors, strict=True)}, input.ndim)
    return output.movedim(tuple(range(index.ndim)), tuple(range(back, back + index.ndim))) if back else output


def _joined(indices: list[Tensor], sizes: torch.Size) -> Tensor:
    """The index into the first dimensions flattened to one; out of range if one of these is."""
    joined, *others = indices
    fits: Any = True
    for own, size in zip(others, sizes[1:], strict=False):
        joined, fits = joined * size + own, fits & (own >= 0) & (own < size)
    return torch.where(fits, joined, -1) if others else joined


def _as_embedding(input: Tensor, index: Tensor) -> Tensor:
    """W[index] for one index into dim 0."""
    if input.ndim == 2:
        return F.embedding(index, input)
    if input.ndim == 1:
        return F.embedding(index, input.unsqueeze(1)).squeeze(-1)
    return F.embedding(index, input.flatten(1)).unflatten(-1, input.shape[1:])


LOOKUPS = {
    Tensor.__getitem__: lambda input, index: _lookup(input, index, from_end=True),
    **dict.fromkeys(
        (torch.index_select, Tensor.index_select),
        lambda input, dim, index: _lookup(input, index) if dim == 0 and index.ndim == 1 else NotImplemented,
    ),
}
"""Ops that look up rows of a parameter, each rewritten as an embedding."""


_MODES = {"sum": 0, "mean": 1, "max": 2}


@rule(F.embedding_bag, params=("weight",), frozen=True)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """y[b] = the sum, mean or maximum of W[index] over bag b: ([n,b,t], [v,d]) -> [n,b,d], or [n,t] with offsets [n,b].

    With C the cotangent, the row at position t of bag b gets: for a sum psw[t] C[b] (psw: per_sample_weights), for a mean
    C[b] / (entries of b), for a maximum C[b,d] for those d where t is the first position with the largest value. Padding ids do not count.
    So for sums and means grad W[n,v,:] = sum_b counts[n,b,v] C[n,b,:], which is an Outer: cheaper than Rows if the table is small.
    `sparse` asks for Rows, of which `psg.tree.sparse_weighted_sum` makes sparse sums.
    """
    rows, features = weight.shape
    if weight.is_complex() or max_norm is not None or mode not in _MODES or input.numel() == 0 or (mode == "max" and sparse):
        return NotImplemented
    if scale_grad_by_freq:
        return NotImplemented  # on CPU torch (2.13) divides by the frequency of a wrong id; the lifted path does the same
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        return NotImplemented
    if padding_idx is not None and not -rows <= padding_idx < rows:
        return NotImplemented
    include_last_offset = include_last_offset and offsets is not None  # torch ignores it without offsets
    starts = _starts(input, offsets, include_last_offset)
    if starts is None:
        return NotImplemented
    n, bags = starts.shape  # with include_last_offset the last of these is no bag
    index = input.reshape(n, -1).long()
    padding = -1 if padding_idx is None else padding_idx % rows
    scales = None if per_sample_weights is None else per_sample_weights.reshape(n, -1)

    # One call for all samples: their bags, one after the other.
    offset = starts + index.shape[1] * torch.arange(n, device=starts.device)[:, None]
    flat = None if scales is None else scales.reshape(-1).contiguous()
    # Not torch.embedding_bag, which may omit the rows that each maximum has chosen: only the weight's gradient needs them.
    # The op inside of it assumes that ids and weights are contiguous, and does not check.
    output, _, _, chosen = torch.ops.aten._embedding_bag(
        weight, index.reshape(-1).contiguous(), offset.reshape(-1), False, _MODES[mode], False, flat, False, padding
    )
    output = reshape(output, (n, bags, features))

    def factor(cotangent: Tensor) -> Rows | Outer:
        places = torch.arange(index.shape[1], device=starts.device).repeat(n, 1)
        bag = torch.searchsorted(starts, places, right=True) - 1
        entry = None if padding_idx is None else index != padding
        if include_last_offset:
            cotangent = F.pad(cotangent, (0, 0, 0, 1))
        if mode == "mean":
            entries = torch.zeros_like(starts).scatter_add_(1, bag, torch.ones_like(bag) if entry is None else entry.long())
            cotangent = cotangent / entries.clamp(min=1)[:, :, None]
        if mode != "max" and not sparse and _prefers_counts(index, cotangent, rows):
            return Outer(_counts(bag * rows + index, scales, padding, bags, rows, cotangent.dtype), cotangent)
        by_position = bag[:, :, None].expand(*index.shape, features)
        cotangent = cotangent.expand(by_position.shape) if bags == 1 else cotangent.gather(1, by_position)
        if scales is not None:
            cotangent = cotangent * scales[:, :, None]
        if mode == "max":
            largest = chosen.reshape(n, bags, features).gather(1, by_position) == index[:, :, None]
            cotangent = torch.where(largest & _first(bag * rows + index)[:, :, None], cotangent, 0)
        return Rows(index, cotangent if entry is None else torch.where(entry[:, :, None], cotangent, 0), rows)

    return (output[:, :-1].clone() if include_last_offset else output), {"weight": factor}


def _prefers_counts(index: Tensor, cotangent: Tensor, rows: int) -> bool:
    """Whether to hold a gradient as counts [n, b, v] times the cotangents of bags [n, b, d], rather than as a row for each position.

    Not where a cotangent may be infinite: times a count of zero it would be NaN, in rows that have a gradient of zero.
    """
    _, bags, features = cotangent.shape
    if cotangent.dtype != wide(cotangent.dtype) or not _functorch.can_read_now(cotangent):
        return False
    # Counts are written, and read by products with every feature; a row for each position is written, and read by a scatter.
    byte = 2 * _machine.reused_byte(cotangent.device, cotangent.dtype) * cotangent.element_size()
    counted, copied = bags * rows * (2 * features + byte), index.shape[1] * features * byte
    return counted < copied and bool(cotangent.isfinite().all())


def _counts(key: Tensor, scales: Tensor | None, padding: int, bags: int, rows: int, dtype: torch.dtype) -> Tensor:
    """How often each row occurs in each bag, or the sum of its weights there: keys bag * rows + row [n, t] -> [n, b, v]."""
    once = torch.ones(key.shape, dtype=dtype, device=key.device) if scales is None else scales.to(dtype)
    counts = once.new_zeros(len(key), bags * rows).scatter_add(1, key, once).unflatten(1, (bags, rows))
    if padding >= 0:
        counts[:, :, padding] = 0
    return counts


def _starts(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor | None:
    """The first position of every bag, [n, b]; None if the arguments do not fit."""
    if input.ndim == 3 and offsets is None:
        _, bags, size = input.shape
        return torch.arange(0, bags * size, size, device=input.device).repeat(input.shape[0], 1)
    if input.ndim != 2 or offsets is None or offsets.ndim != 2 or offsets.shape[1] <= include_last_offset:
        return None
    if offsets.device.type == "cpu":  # on other devices torch does not check either
        fits = (offsets[:, 0] == 0) & (offsets[:, -1] <= input.shape[1])
        torch.ops.aten._assert_async.msg(fits.all(), "embedding_bag: offsets[0] has to be 0, and the last offset at most the number of ids")
    return offsets.long().contiguous()


def _first(key: Tensor) -> Tensor:
    """Whether no earlier position has the same key: [n, t] -> [n, t]."""
    ordered, order = key.sort(dim=1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(new).scatter_(1, order, new)
