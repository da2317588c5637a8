"""What fn must not write into, beside the parameters and the inputs, which every pass knows (`_lifted.Watch`).

That is what others hold, such as a module's buffers, and what is a view for a sample by itself and a copy under vmap, or the other way
round.
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
    """A context in which `refuse` is called with what fn is about to write into."""
    token = _refusing.set(refuse)
    try:
        yield
    finally:
        _refusing.reset(token)


def refusal() -> Refuse | None:
    """What is to be called with it; None outside of such contexts."""
    return _refusing.get()


def written(target: Any) -> list[Tensor]:
    """The tensors in what an op writes into, which may be a list of them; those without entries do not count."""
    several = target if isinstance(target, (tuple, list)) else (target,)
    return [tensor for tensor in several if isinstance(tensor, Tensor) and tensor.numel()]


class Aliases:
    """What may be a copy under vmap and a view of a sample's own, or the other way round, and what it was made of.

    Args:
        noncontiguous: Whether samples are not contiguous in the batch, which each by itself is.
    """

    def __init__(self, noncontiguous: bool) -> None:
        self._noncontiguous = noncontiguous
        self._selected: set[Any] = set()
        self._reshaped: set[Any] = set()
        self._laid_out: set[Any] = set()  # whose layout is another than a sample's own may be

    def note(self, func: Any, args: Any, tensors: list[Tensor], output: Any) -> None:
        """Look at an op that has run, at its arguments, the tensors among them and its output."""
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
        """Raise if the op writes into one of those.

        Raises:
            UnsupportedByVmap: It does, and vmap cannot help it.
            Retry: It does, and a pass on copies can.
        """
        storages = set(map(_functorch.storage_of, tensors))
        if storages & self._selected:
            raise UnsupportedByVmap(
                f"{op} writes into what an index has selected, or is selected from, which may be a view of a sample's own"
            )
        if storages & self._reshaped:
            raise Retry(f"{op} writes into a tensor in another shape, of samples that are not contiguous as each is by itself", copied=True)


_RESHAPING = {
    *(Tensor.contiguous, Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.ravel),
    *(torch.reshape, torch.flatten, torch.ravel),
}
"""Ops that copy where a view will not do."""


def _selects(index: Any) -> bool:
    """Whether an index has a number of each sample's own: of a sample it gives a view, under vmap a copy."""
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
    """Whether it has tensors among others: torch lays out what they select by the layout of what it is selected from, vmap does not."""
    return isinstance(index, (tuple, list)) and len(index) > 1 and any(isinstance(item, Tensor) and item.ndim > 0 for item in index)
