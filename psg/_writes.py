"""Tensors that fn must not write into, beside the parameters and the inputs, which every pass knows (`_lifted.Watch`).

These are tensors that others hold, such as a module's buffers, and tensors that are views in a loop over samples but copies under vmap,
or the other way round.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from psg import _functorch
from psg._errors import UnsupportedByVmap
from psg._habits import Retry

Refuse = Callable[[Any], None]

_refusing: ContextVar[Refuse | None] = ContextVar("psg_refusing", default=None)


@contextlib.contextmanager
def refusing(refuse: Refuse) -> Iterator[None]:
    """A context in which `refuse` is called with every target that fn is about to write into."""
    token = _refusing.set(refuse)
    try:
        yield
    finally:
        _refusing.reset(token)


def refusal() -> Refuse | None:
    """The function that `refusing` was given; None outside of such contexts."""
    return _refusing.get()


def written(target: Any) -> list[Tensor]:
    """The tensors that an op writes into, of a target that may be a list of them; tensors without entries do not count."""
    several = target if isinstance(target, (tuple, list)) else (target,)
    return [tensor for tensor in several if isinstance(tensor, Tensor) and tensor.numel()]


class Aliases:
    """Tracks tensors that may be copies under vmap but views in a loop, or the other way round, and the tensors that they were made of.

    Args:
        noncontiguous: Whether samples are not contiguous in the batch; in a loop each is.
    """

    def __init__(self, noncontiguous: bool) -> None:
        self._noncontiguous = noncontiguous
        self._selected: set[Any] = set()
        self._reshaped: set[Any] = set()
        self._laid_out: set[Any] = set()  # their layout may differ from that in a loop

    def note(self, func: Any, args: Any, tensors: list[Tensor], output: Any) -> None:
        """Track the result of an op that has run, given its arguments, the tensors among them and its output."""
        if func is Tensor.__getitem__:
            if _selects(args[1]):
                self._selected.update(map(_functorch.storage_of, (args[0], output)))
            elif _lays_out(args[1]):
                self._laid_out.add(_functorch.storage_of(output))
        elif func in _RESHAPING and (self._noncontiguous or self._laid_out):
            storages = {_functorch.storage_of(tensors[0]), _functorch.storage_of(output)}
            if self._noncontiguous:
                self._reshaped |= storages
            if storages & self._laid_out:
                self._selected |= storages

    def refuse(self, op: str, tensors: list[Tensor]) -> None:
        """Raise if the op writes into a tracked tensor.

        Raises:
            UnsupportedByVmap: It does, and vmap would get it wrong in every pass.
            Retry: It does, and a pass on contiguous copies gets it right.
        """
        storages = set(map(_functorch.storage_of, tensors))
        if storages & self._selected:
            raise UnsupportedByVmap(
                f"{op} writes into the result of indexing, or the indexed tensor: the result may be a view in a loop, and a copy under vmap"
            )
        if storages & self._reshaped:
            raise Retry(f"{op} writes into a tensor in another shape, of samples that are not contiguous as each is by itself", copied=True)


_RESHAPING = {
    *(Tensor.contiguous, Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.ravel),
    *(torch.reshape, torch.flatten, torch.ravel),
}
"""Ops that return a copy where no view is possible."""


def _selects(index: Any) -> bool:
    """Whether an index has an integer tensor [] of each sample's own: that gives a view in a loop, but a copy under vmap."""
    items = index if isinstance(index, (tuple, list)) else (index,)
    return any(
        isinstance(item, Tensor)
        and item.ndim == 0
        and item.dtype != torch.bool
        and not item.is_floating_point()
        and _functorch.is_sampled(item)
        for item in items
    )


def _lays_out(index: Any) -> bool:
    """Whether an index has tensors among other items: torch then lays out the result like the indexed tensor, vmap does not."""
    return isinstance(index, (tuple, list)) and len(index) > 1 and any(isinstance(item, Tensor) and item.ndim > 0 for item in index)
