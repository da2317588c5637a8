"""Ops under vmap whose result must be one for all samples: Python values, selections by masks, constants that fn may keep.

Inside a derivative that fn takes by torch.func, its transform has wrapped the tensors once more: the values beneath are what counts. A
tensor that a `vmap` of fn's own has batched has no single value, not even for one sample: such calls are left to torch.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from psg import _trees
from psg._capture._lifted import Watch
from psg._errors import PsgError, Unsupported, user_line
from psg._torch import _functorch
from psg._torch._ops import ARRAYS, CONSTANTS, CONVERSIONS, LIKENESSES, LOCATING, MASKED, TEXTS, name_of, substitute, tensors_of


class Diverged(PsgError):
    """The function turned a tensor into a Python value that is not the same for all samples.

    Attributes:
        groups: The samples that agree, as one index tensor for each value.
    """

    def __init__(self, op: str, labels: Tensor) -> None:
        super().__init__(f"{op} at {user_line()} gives different Python values for different samples")
        count = int(labels.max()) + 1
        self.groups = [(labels == label).nonzero()[:, 0] for label in range(count)]


class Drawn(Unsupported):
    """The function turned random numbers, of which every sample draws its own, into a Python value."""


def run_agreed(watch: Watch, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], here: bool, constants: bool) -> Any:
    """Run a call that returns a Python value, selects by a mask or, if `constants`, makes a constant; NotImplemented for any other call.

    Unless it is called `here`, outside of fn's own transforms, constants and NumPy arrays are left to these: torch has no arrays there.

    Raises:
        Diverged: The Python value, or the number of selected entries, is not the same for all samples.
        Unsupported: A vmap of fn's own has batched the tensor that the call makes text of.
    """
    if func in CONVERSIONS or func in ARRAYS and here:
        if _is_own(watch, args[0]):
            return python_value(watch, func, args, kwargs)
        if func in TEXTS and watch.level in _functorch.vmap_levels(args[0]):
            raise Unsupported(TEXT_OF_ALL)
    if func in MASKED:
        if "mask" in kwargs:
            args, kwargs = (*args, kwargs["mask"]), {name: value for name, value in kwargs.items() if name != "mask"}
        if len(args) > 1 and any(_is_own_mask(watch, leaf) for leaf in tensors_of(args[1:2], {})):
            return _select(watch, func, *args, **kwargs)
    if func in LOCATING and len(args) == 1 and kwargs.keys() <= {"as_tuple"} and _is_own(watch, args[0]):
        return _locate(watch, func, *args, **kwargs)
    if here and constants and args and _makes_constant(watch, func, args[0], kwargs) and _functorch.is_batched(args[0], watch.level):
        if not any(map(_functorch.is_wrapped, tensors[1:])):
            # Only a sample's shape, dtype and device matter: all samples share the result, and fn may keep it for a later call.
            with _functorch.below():
                return func(_functorch.physical(args[0], watch.level, watch.n)[0], *args[1:], **kwargs)
    return NotImplemented


def python_value(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    """The Python value, or NumPy array, that a tensor has for every sample, as in a loop over them.

    Raises:
        Diverged: The samples do not agree.
    """
    own = _functorch.under_derivatives(args[0], watch.level)
    watch.expect_agreed(own)
    with _functorch.below(watch.level):
        given = _functorch.physical(own, watch.level, watch.n)
        values, count = given.detach(), given[0].numel()
        if count == 0 or count > 1 and func not in _OF_ALL_ENTRIES:
            return func(values[0], *args[1:], **kwargs)  # raises torch's own error, but for what is empty
        told = (values != 0 if func == Tensor.__bool__ else values).reshape(watch.n, count)
        if _trees.is_inexact(told):
            # Compare bits: 0.0 and -0.0 are equal, but fn may treat them differently.
            told = told.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        distinct, labels = told.unique(dim=0, return_inverse=True)
        if len(distinct) > 1:
            raise Diverged(name_of(func), labels)
        if func not in ARRAYS:
            return func(values[0], *args[1:], **kwargs)
        array = func(given[0].clone(), *args[1:], **kwargs)
        array.setflags(write=False)  # a write would not reach the sample, as in a loop
        return array


_OF_ALL_ENTRIES = {Tensor.tolist, *TEXTS, *ARRAYS}

TEXT_OF_ALL = "fn makes text of a tensor (by print, str or repr), which under vmap shows all samples"


def asks_for_a_number(error: RuntimeError) -> bool:
    """Whether vmap has raised this error because torch has read a tensor as a number, or would have (2.13)."""
    return any(text in str(error) for text in ("calling .item() on a Tensor", "aten::narrow.Tensor"))


def with_numbers(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call with numbers for the integer tensors [] that torch reads: sizes, bounds of slices.

    Raises:
        RuntimeError: There are none: the call fails as it has before.
        Diverged: Such a number is not the same for all samples.
    """
    found = False

    def number(leaf: Any) -> Any:
        nonlocal found
        if isinstance(leaf, slice):
            return slice(number(leaf.start), number(leaf.stop), number(leaf.step))
        if not isinstance(leaf, Tensor) or leaf.ndim or leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool:
            return leaf
        if not _is_own(watch, leaf):
            return leaf
        found = True
        return python_value(watch, Tensor.__index__, (leaf,), {})

    kept = 1 if func in vars(Tensor).values() or hasattr(func, "__objclass__") else 0  # a method's own tensor
    args, kwargs = (*args[:kept], *substitute(args[kept:], number)), substitute(kwargs, number)
    with watch if found else contextlib.nullcontext():  # under `watch` the same call would come back here, without end
        return func(*args, **kwargs)


def _makes_constant(watch: Watch, func: Any, tensor: Any, kwargs: Any) -> bool:
    """Whether a call makes a tensor that is the same for all samples, and into which they seldom write."""
    return func in CONSTANTS or func in LIKENESSES and id(tensor) in watch.by_handle and "requires_grad" not in kwargs


def _is_own(watch: Watch, tensor: Tensor) -> bool:
    """Whether a tensor has a value for each sample, and no other vmap batches it."""
    return _functorch.is_batched(_functorch.under_derivatives(tensor, watch.level), watch.level)


def _is_own_mask(watch: Watch, leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.bool and _is_own(watch, leaf)


def _select(watch: Watch, func: Any, tensor: Tensor, index: Any, *values: Any) -> Any:
    """Run an op that reads, or writes into, the entries that masks select."""
    if func in (torch.masked_select, Tensor.masked_select):
        shape = torch.broadcast_shapes(tensor.shape, index.shape)
        func, tensor, index = Tensor.__getitem__, tensor.expand(shape), index.expand(shape)
    several = isinstance(index, (tuple, list))
    places: list[Any] = []
    for item in index if several else (index,):
        places += _places(watch, func, item) if _is_own_mask(watch, item) else [item]
    with watch:
        return func(tensor, tuple(places) if several or len(places) > 1 else places[0], *values)


def _locate(watch: Watch, func: Any, tensor: Tensor, as_tuple: bool = False) -> Any:
    """The indices of a tensor's nonzero entries."""
    places = _places(watch, func, tensor != 0)
    if not _functorch.is_wrapped(places[0]):
        places = list(torch.nonzero(places[0], as_tuple=True))
    if as_tuple or func is torch.where:
        return tuple(places)
    return torch.stack(places, -1)[:, : tensor.ndim]  # a tensor [] has no dimensions to index, but one place in a tuple


def _places(watch: Watch, func: Any, mask: Tensor) -> list[Tensor]:
    """Index tensors, one for each dimension, that select what each sample's mask selects; the mask itself if all samples share it."""
    own = _functorch.under_derivatives(mask, watch.level)
    watch.expect_agreed(own)
    with _functorch.below(watch.level):
        values = _functorch.physical(own, watch.level, watch.n)
        flat = values.reshape(watch.n, mask.numel())
        if mask.numel() == 0 or (flat == flat[0]).all():
            return [values[0]]
        counts, labels = flat.sum(1).unique(return_inverse=True)
        if len(counts) > 1:
            raise Diverged(name_of(func), labels)
        places = values.nonzero()[:, 1:].unflatten(0, (watch.n, int(counts)))
        return [_functorch.wrap(place, watch.level) for place in places.unbind(2)]
