"""as_strided of activations, whose result depends on how a tensor lies in memory: every sample has to lie in a batch as it does alone."""

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg._torch import _functorch

STRIDED = {torch.as_strided, Tensor.as_strided}


class View(NamedTuple):
    """A call of as_strided for one sample.

    Attributes:
        shape: The shape of its tensor.
        stride: The strides of its tensor.
        size: The shape of the view.
        step: The strides of the view.
        offset: Where the view begins, in entries after the tensor's first.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size: tuple[int, ...]
    step: tuple[int, ...]
    offset: int


def view_of(input: Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None) -> View:
    """The view that a call with these arguments, those of as_strided, makes."""
    offset = 0 if storage_offset is None else index(storage_offset) - input.storage_offset()
    return View(tuple(input.shape), input.stride(), tuple(map(index, size)), tuple(map(index, stride)), index(offset))


class Noting(TorchFunctionMode):
    """Notes the views that as_strided makes.

    Attributes:
        views: Those of all calls, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.views: list[View] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in STRIDED:
            self.views.append(view_of(*args, **kwargs))
        return func(*args, **kwargs)


def for_every_sample(input: Tensor, view: View, level: int, n: int) -> Any:
    """The view for all samples of a tensor that the vmap at this level batches; NotImplemented if it may reach past a sample's entries."""
    return _functorch.run_below(lambda batch: _view(batch, view), [input], level, n)


def _view(batch: Tensor, view: View) -> Any:
    count = batch[0].numel()
    reach = 0 if 0 in view.size else sum((size - 1) * step for size, step in zip(view.size, view.step, strict=True))
    # The entries of a sample have to fill a piece of memory without gaps, which no other sample shares.
    if not _is_dense(view) or len(batch) > 1 and batch.stride(0) < count:
        return NotImplemented
    if not 0 <= view.offset < count - reach:
        return NotImplemented
    return batch.as_strided((len(batch), *view.size), (batch.stride(0), *view.step), batch.storage_offset() + view.offset)


def _is_dense(view: View) -> bool:
    expected = 1
    for step, size in sorted(zip(view.stride, view.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
