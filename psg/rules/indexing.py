"""Entries and rows at indices. vmap runs some of these ops entry by entry or sample by sample, and gets some indices in brackets wrong."""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psg._torch import _functorch
from psg._torch._ops import dims_before, tensors_of
from psg._trees import is_inexact
from psg.rules._registry import decomposition, reshape, rule


@rule(torch.index_select, Tensor.index_select, params=())
def index_select(input: Tensor, dim: int, index: Tensor) -> Any:
    """Rows as they lie in memory, of each sample's own index or a shared one: ([n,*], [n,t]) -> [n,*].

    vmap would gather each entry by itself, and save the input for the backward pass, so that fn could not write into it.
    """
    dims = input.ndim - 1
    if index.ndim != 2 or not -dims <= dim < dims or index.dtype not in (torch.int32, torch.int64) or not index.numel():
        return NotImplemented
    place = 1 + dim % dims
    if index.stride(0) == 0:
        return torch.index_select(input, place, index[0]), {}
    rows = _rows_of_samples(index, input.shape[place], input)
    if rows is None:
        return NotImplemented
    output = input.movedim(place, 1).flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, index.shape).movedim(1, place).contiguous()
    return reshape(output, output.shape), {}


def _rows_of_samples(index: Tensor, size: int, input: Tensor) -> Tensor | None:
    """The index of each sample into its own rows, as an index into the rows of all; None if an entry is, or may be, out of range."""
    # It would address a row of another sample.
    if not _functorch.can_read_now(index) or input.numel() == 0 or ((index < 0) | (index >= size)).any():
        return None
    return index + size * torch.arange(len(index), device=index.device)[:, None]


@rule(torch.index_add, Tensor.index_add, params=())
def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    """One call on the rows of all samples, if each has an index of its own (the edges of a graph): ([n,*], [n,t], [n,*]) -> [n,*]."""
    dims, (n, *shape), edges = input.ndim - 1, input.shape, index.shape[1:]
    if not -dims <= dim < dims or input.ndim != source.ndim or source.dtype != input.dtype or len(edges) != 1 or index.stride(0) == 0:
        return NotImplemented
    dim %= dims
    if index.dtype not in (torch.int32, torch.int64) or not input.is_contiguous() and input.stride(0) != 0:
        return NotImplemented
    if [*source.shape[1 : 1 + dim], *source.shape[2 + dim :]] != shape[:dim] + shape[dim + 1 :] or source.shape[1 + dim] != edges[0]:
        return NotImplemented  # torch raises its own error
    rows = _rows_of_samples(index, shape[dim], input)
    if rows is None:
        return NotImplemented
    table, added = input.movedim(1 + dim, 1).flatten(0, 1), source.movedim(1 + dim, 1).flatten(0, 1)
    output = table.index_add(0, rows.flatten(), added, alpha=alpha).unflatten(0, (n, shape[dim])).movedim(1, 1 + dim).contiguous()
    return reshape(output, output.shape), {}


@decomposition(torch.index_add, Tensor.index_add)
def _index_add(input: Tensor, dim: Any, index: Tensor, source: Tensor, *, alpha: float = 1, **others: Any) -> Any:
    """The same where the rule declines, as a scatter_add: vmap would run index_add sample by sample."""
    if others or not isinstance(dim, int):
        return NotImplemented
    if not _functorch.is_vmapped(index) or index.ndim != 1 or source.dtype != input.dtype:
        return NotImplemented
    if not -source.ndim <= dim < source.ndim:
        return NotImplemented  # torch raises its own error
    shape = [1] * source.ndim
    shape[dim] = len(index)
    whole = all(given == own for d, (given, own) in enumerate(zip(source.shape, input.shape, strict=False)) if d != dim % source.ndim)
    if not whole or input.ndim != source.ndim or source.shape[dim] != len(index):
        return NotImplemented  # torch raises its own error
    if alpha != 1:
        source = (alpha * source).to(input.dtype)
    return input.scatter_add(dim, index.reshape(shape).expand(source.shape), source)


@rule(torch.scatter_add, Tensor.scatter_add, params=())
def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    """Whole rows at a time, where an index of rows was expanded along all other dimensions: ([n,*], [n,*], [n,*]) -> [n,*]."""
    dims = input.ndim - 1
    if not -dims <= dim < dims or index.shape != src.shape or index.dtype != torch.int64:
        return NotImplemented
    place = 1 + dim % dims
    if not _is_of_rows(index, 0, place):
        return NotImplemented
    rows = index[tuple(slice(None) if d in (0, place) else 0 for d in range(index.ndim))]
    if rows.stride(0) or src.dtype != input.dtype:
        return index_add(input, dim, rows, src)
    if [*src.shape[:place], *src.shape[place + 1 :]] != [*input.shape[:place], *input.shape[place + 1 :]]:
        return NotImplemented  # other entries of the input stay as they are
    return torch.index_add(input, place, rows[0], src), {}


def _is_of_rows(index: Tensor, *dims: int) -> bool:
    """Whether an index was expanded along all dimensions but these."""
    sizes = enumerate(zip(index.shape, index.stride(), strict=True))
    return index.numel() > 0 and all(d in dims or size == 1 or not stride for d, (size, stride) in sizes)


@decomposition(Tensor.scatter_add_)
def _scatter_add_in_place(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    """The same, for the sake of the rule above."""
    ndim = input.ndim
    if ndim < 2 or index.ndim != ndim or not -ndim <= dim < ndim or not _is_of_rows(index, dim % ndim):
        return NotImplemented
    return input.copy_(torch.scatter_add(input, dim, index, src))


@decomposition(Tensor.index_add_)
def _index_add_in_place(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return input.copy_(Tensor.index_add(input, *args, **kwargs))


@decomposition(Tensor.__setitem__)
def _fill(self: Tensor, index: Any, value: Any) -> Any:
    """tensor[mask] = number, or one row for all: where the mask depends on the sample, the selection has no shape under vmap.

    torch.where needs none. Neither does it read the mask in Python, which a trace cannot, and for which an accelerator would have to wait.
    """
    target = _Masked.at(self, index) if isinstance(value, (Tensor, int, float)) else None
    filled = None if target is None else target.filled(value)
    if target is None or filled is None:
        return _put_at(self, index, value)
    target.view.copy_(filled)


class _Masked(NamedTuple):
    """Entries that one mask selects, `tensor[mask]`, `tensor[:, mask, 0]`.

    Attributes:
        view: The tensor without what numbers and slices leave out.
        mask: The mask.
        after: How many dimensions of the view come after those of the mask.
    """

    view: Tensor
    mask: Tensor
    after: int

    @classmethod
    def at(cls, tensor: Tensor, index: Any) -> "_Masked | None":
        """What an index in brackets means, under vmap; None if there is no mask, or more than numbers, slices, None and dots beside it."""
        items = index if isinstance(index, tuple) else (index,)
        at = [k for k, item in enumerate(items) if isinstance(item, Tensor)]
        if len(at) != 1 or not all(item is None or item is ... or type(item) in (int, slice) or isinstance(item, Tensor) for item in items):
            return None
        mask, left, right = items[at[0]], items[: at[0]], items[at[0] + 1 :]
        if mask.dtype != torch.bool or not (_functorch.is_vmapped(mask) or _functorch.is_vmapped(tensor)):
            return None
        view = tensor[(*left, *[slice(None)] * mask.ndim, *right)] if left or right else tensor
        before, after = (sum(type(item) is not int for item in side) for side in (left, right))
        after = after if ... in left else view.ndim - before - mask.ndim
        start = view.ndim - after - mask.ndim
        return cls(view, mask, after) if mask.shape == view.shape[start : view.ndim - after] else None

    def filled(self, value: Any, accumulate: bool = False) -> Tensor | None:
        """The view with this value, or added to it, where the mask says so; None if there is one for each of the selected entries."""
        if isinstance(value, Tensor) and value.ndim:
            value = self._broadcast(value)
            if value is None:
                return None
        elif isinstance(value, Tensor):
            value = value.to(self.view.dtype)
        elif not is_inexact(self.view):
            value = self.view.new_full((), value)  # of a float and integers, torch.where makes float32, which rounds the integers
        mask = self.mask.reshape(self.mask.shape + (1,) * self.after)
        return torch.where(mask, self.view + value if accumulate else value, self.view)

    def _broadcast(self, values: Tensor) -> Tensor | None:
        """Values that all that is selected gets, with the dimensions of the view."""
        before = self.view.ndim - self.after - self.mask.ndim
        sizes = (*self.view.shape[:before], 1, *self.view.shape[self.view.ndim - self.after :])
        while values.ndim > len(sizes) and values.shape[0] == 1:
            values = values[0]
        pairs = zip(reversed(values.shape), reversed(sizes), strict=False)
        if values.dtype != self.view.dtype or values.ndim > len(sizes) or not all(size in (1, own) for size, own in pairs):
            return None
        return values.expand(sizes).reshape(*sizes[:before], *[1] * self.mask.ndim, *sizes[before + 1 :])


class _Places(NamedTuple):
    """Places in a tensor that indices give, `tensor[:, i]`, as vmap gets them right: with their dimensions in front.

    Attributes:
        front: A view of the tensor, with the dimensions that the places index in front.
        chosen: The places.
        before: How many of the other dimensions come before those of the places in what is read or written.
    """

    front: Tensor
    chosen: tuple[Tensor, ...]
    before: int

    @classmethod
    def of(cls, tensor: Tensor, places: Sequence[Tensor | None], counted: Callable[[Tensor], bool] = lambda place: True) -> "_Places":
        """Places by dimension; those that are `counted` decide where their dimensions come: in front unless they are side by side."""
        at = [d for d, place in enumerate(places) if place is not None]
        chosen = tuple([place for place in places if place is not None])
        others = [d for d in range(tensor.ndim) if d not in at]
        before = dims_before({d: counted(place) for d, place in zip(at, chosen, strict=True)}, tensor.ndim)
        return cls(tensor.permute(*at, *others), chosen, before)

    @classmethod
    def at(cls, tensor: Tensor, index: Any) -> "_Places | None":
        """What an index in brackets means; None if it has no places, or masks of each sample's own."""
        items: list[Any] = []
        for item in index if isinstance(index, tuple) else (index,):
            items += _parts_of(item, tensor)
        if not all(item is None or item is ... or type(item) in (int, slice, _InNewDim) or _is_place(item) for item in items):
            return None
        dots = [k for k, item in enumerate(items) if item is ...] or [len(items)]
        rest = tensor.ndim - sum(type(item) in (int, slice) or _is_place(item) for item in items)
        if rest < 0 or len(dots) > 1 or not any(map(_is_place, items)):
            return None
        items[dots[0] : dots[0] + 1] = [slice(None)] * rest
        view = tensor[tuple([slice(None) if _is_place(item) else None if type(item) is _InNewDim else item for item in items])]
        own = [item.place if type(item) is _InNewDim else item if _is_place(item) else None for item in items if type(item) is not int]
        return cls.of(view, own, lambda place: place.ndim > 0)  # a place without dimensions counts as a number, as in torch

    @property
    def shape(self) -> torch.Size:
        """That of the places."""
        return torch.broadcast_shapes(*(place.shape for place in self.chosen))

    def read(self) -> Tensor:
        """What is there."""
        count = len(self.shape)
        return self.front[tuple([place.expand(self.shape) for place in self.chosen])].movedim(
            list(range(count)), list(range(self.before, self.before + count))
        )

    def write(self, values: Tensor, accumulate: bool = False) -> None:
        """Put values there, which may have fewer entries, and more dimensions of size 1."""
        rest, count = self.front.shape[len(self.chosen) :], len(self.shape)
        sizes = (*rest[: self.before], *self.shape, *rest[self.before :])
        while values.ndim > len(sizes) and values.shape[0] == 1:
            values = values[0]
        values = values.expand(sizes).movedim(list(range(self.before, self.before + count)), list(range(count)))
        self.front.index_put_(self.chosen, values, accumulate)


def _is_place(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32)


class _InNewDim(NamedTuple):
    """What True and False stand for in brackets: a place in a new dimension, of size 1, or none."""

    place: Tensor


def _parts_of(item: Any, tensor: Tensor) -> list[Any]:
    """What an item in brackets stands for: the places of a list, an array or a mask which all samples share, or itself."""
    if _is_array(item) or isinstance(item, bool):
        item = torch.as_tensor(item, device=tensor.device)
    if not isinstance(item, Tensor):
        return [index(item) if hasattr(item, "__index__") else item]  # an integer of NumPy's
    if _functorch.is_vmapped(item) or item.dtype not in (torch.bool, torch.uint8):
        return [item]
    places = item.nonzero(as_tuple=True)
    return [*places] if item.ndim else [_InNewDim(*places)]


def _is_array(item: Any) -> bool:
    return isinstance(item, (list, tuple, range)) or not isinstance(item, Tensor) and getattr(item, "ndim", 0) > 0


def _are_in_front(items: Sequence[Any]) -> bool:
    """Whether places and masks come before everything else, which vmap gets right."""
    chosen = [isinstance(item, Tensor) or _is_array(item) for item in items]
    return all(chosen[: sum(chosen)])


def _have_numbers(items: Sequence[Any]) -> bool:
    """Whether an item is a number of each sample's own."""
    return any(_is_place(item) and not item.ndim and _functorch.is_vmapped(item) for item in items)


def _differ_and_lack_entries(items: Sequence[Any]) -> bool:
    """Whether places have several shapes, one of them without entries."""
    shapes = {item.shape for item in items if _is_place(item)}
    return len(shapes) > 1 and any(not shape.numel() for shape in shapes)


def _put_at(self: Tensor, index: Any, value: Any) -> Any:
    """tensor[:, i] = values, tensor[i, :, j] = values. vmap takes the values in another order, and no tensor for a number."""
    items = index if isinstance(index, tuple) else (index,)
    if not _have_numbers(items) and (not isinstance(value, Tensor) or _are_in_front(items)):
        return NotImplemented
    if not any(map(_functorch.is_vmapped, tensors_of((self, index, value), {}))):
        return NotImplemented
    places = _Places.at(self, index)
    return NotImplemented if places is None else places.write(torch.as_tensor(value, dtype=self.dtype, device=self.device))


@decomposition(Tensor.__getitem__)
def _get_at(self: Tensor, index: Any) -> Any:
    """tensor[i, :, j] where i has no dimensions, and is a number for one sample alone: vmap takes it for another place like j.

    Or where one has no entries: vmap does not broadcast it with others.
    """
    if not isinstance(index, tuple) or not (_have_numbers(index) or _differ_and_lack_entries(index)):
        return NotImplemented
    places = _Places.at(self, index)
    return NotImplemented if places is None or not places.shape else places.read()


@decomposition(torch.index_put_, Tensor.index_put_)
def _index_put(input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """The same as in brackets."""
    if (filled := _put_by_mask(input, indices, values, accumulate)) is not NotImplemented:
        return input.copy_(filled)
    if _are_in_front(indices) or not any(map(_functorch.is_vmapped, tensors_of((input, indices, values), {}))):
        return NotImplemented
    if not all(place is None or _is_place(place) for place in indices) or len(indices) > input.ndim or values.dtype != input.dtype:
        return NotImplemented
    _Places.of(input, indices).write(values, accumulate)
    return input


@decomposition(torch.index_put, Tensor.index_put)
def _put_by_mask(input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """index_put with a mask of each sample's own, and one row for all that it selects."""
    target = _Masked.at(input, tuple([slice(None) if place is None else place for place in indices]))
    if target is None or values.dtype != input.dtype or values.ndim > input.ndim - target.mask.ndim + 1:
        return NotImplemented  # brackets alone leave out more dimensions of size 1
    filled = target.filled(values, accumulate)
    return NotImplemented if filled is None else filled


@decomposition(torch.masked_fill, Tensor.masked_fill)
def _masked_fill(input: Tensor, mask: Tensor, value: Any) -> Any:
    """masked_fill whose value is a tensor without dimensions (a mask token)."""
    if not isinstance(value, Tensor) or value.ndim or mask.dtype != torch.bool or value.is_complex() and not input.is_complex():
        return NotImplemented
    return torch.where(mask, value.to(input.dtype), input).contiguous()


@decomposition(torch.index_fill, Tensor.index_fill)
def _index_fill(input: Tensor, dim: Any, index: Tensor, value: Any) -> Any:
    """Choose the value where a mask says so: vmap fills other samples' entries, if an index is out of range or the value is a tensor."""
    if not _functorch.is_vmapped(index) and not isinstance(value, Tensor):
        return NotImplemented
    if not isinstance(dim, int) or index.dtype != torch.int64 or index.ndim > 1 or not -max(input.ndim, 1) <= dim < max(input.ndim, 1):
        return NotImplemented  # torch raises its own error
    value = value if isinstance(value, Tensor) else torch.tensor(value, device=input.device)
    if value.ndim or value.is_complex() and not input.is_complex():
        return NotImplemented
    shape = input.shape or (1,)
    size = shape[dim]
    places = torch.where(index < 0, index + size, index).reshape(-1)
    mask = torch.zeros(size, dtype=torch.bool, device=input.device).scatter(0, places, True)
    mask = mask.reshape([size if d == dim % len(shape) else 1 for d in range(len(shape))]).expand(shape).reshape(input.shape)
    return torch.where(mask, value.to(input.dtype), input)


@decomposition(torch.take, Tensor.take)
def _take(input: Tensor, index: Tensor, **others: Any) -> Any:
    if others or index.dtype != torch.int64 or input.numel() == 0:
        return NotImplemented
    return input.reshape(-1)[index].contiguous()


@decomposition(torch.put, Tensor.put)
def _put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Any:
    if index.numel() != source.numel() or index.dtype != torch.int64:
        return NotImplemented
    flat = input.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1), accumulate).reshape(input.shape)
    return flat if input.is_contiguous() else input.clone().copy_(flat)  # in the layout of the input
