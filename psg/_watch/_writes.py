"""Tensors that fn must not write into, beside the parameters and the inputs, which every pass knows (`_lifted.Watch`).

These are tensors that others hold, such as a module's buffers, and tensors that are views in a loop over samples but copies under vmap,
or the other way round.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from psg._errors import UnsupportedByVmap
from psg._torch import _functorch
from psg._torch._ops import SET_DATA
from psg._torch._patches import assigned
from psg._watch._habits import Retry

Refuse = Callable[[Any, Any, Any], None]

_refusing: ContextVar[Refuse | None] = ContextVar("psg_refusing", default=None)


def refusing(refuse: Refuse) -> AbstractContextManager[Refuse]:
    """A context in which `refuse` is called with every op that is about to write, its arguments and the target that it writes into."""
    return assigned(_refusing, refuse)


def refusal() -> Refuse | None:
    """The function that `refusing` was given; None outside of such contexts."""
    return _refusing.get()


def written(target: Any) -> list[Tensor]:
    """The tensors that an op writes into, of a target that may be a list of them; tensors without memory do not count."""
    several = target if isinstance(target, (tuple, list)) else (target,)
    # A write into an empty part of a tensor changes no entry, but does change the version of the tensor.
    return [tensor for tensor in several if isinstance(tensor, Tensor) and (tensor.numel() or _functorch.memory_of(tensor))]


def changes_nothing(func: Any, args: Any) -> bool:
    """Whether this is `tensor.data = value` with the tensor's own data, as `tensor.data.to(device)` returns it where nothing is to do."""
    return func == SET_DATA and isinstance(args[1], Tensor) and _functorch.are_one_view(*args)


def rewrites(func: Any, args: Any) -> bool:
    """Whether this is `tensor.copy_(other)` with the values that the tensor has already, as far as Python can read them."""
    if func is not Tensor.copy_ or len(args) < 2:
        return False
    target, source = args[:2]
    if not isinstance(source, Tensor) or not (_functorch.can_read(target) and _functorch.can_read(source)):
        return False
    with torch._C.DisableTorchFunction():
        return target.shape == source.shape and target.dtype == source.dtype and target.device == source.device and target.equal(source)


class Aliases:
    """Tensors of which each may share memory with another in a loop over samples and not in this pass, or the other way round.

    `reshape` and its kin return a view where the layout in memory allows one, and a copy elsewhere. For all samples together, vmap and
    rules may lay a tensor out otherwise than a loop does. Selecting by a number of each sample's own gives a view in a loop, and a copy
    under vmap. Once fn has written into one of two such tensors, it must not read the other.

    Tensors that certainly share memory are one node, that memory. Nodes that may share memory in a loop are partners.

    Args:
        laid_out: Tensors whose samples are laid out as in a loop, so that a reshape does the same.
        follows: Whether to follow such tensors. If not, a write where there are some is refused by asking for a pass that does.

    Attributes:
        outdated: The nodes with a partner that has been written into.
    """

    def __init__(self, laid_out: Sequence[Tensor], follows: bool) -> None:
        self._laid_out = laid_out
        self._follows = follows
        self._found = False
        self._partners: dict[Any, set[Any]] = {}
        self._shown: set[Any] = set()
        self.outdated: set[Any] = set()

    @cached_property
    def _known(self) -> set[int]:
        return set(map(_functorch.storage_id, self._laid_out))

    def note(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], output: Any) -> Any:
        """Track the result of an op that has run, given its arguments and the tensors among them; returns the result to go on with."""
        if self._found and not self._follows:
            return output
        # `to` and its kin look at the strides of the whole batch, even if they are asked for a layout that each sample has.
        converts = func in _CONVERSIONS and kwargs.get("memory_format") is not None and output.dtype == tensors[0].dtype
        reshapes = func in _RESHAPING and _functorch.storage_id(tensors[0]) not in self._known
        if (converts or reshapes) and _functorch.is_vmapped(tensors[0]) or func is Tensor.__getitem__ and _selects(args[1]):
            self._found = True
            return self._pair(tensors[0], output) if self._follows else output
        return output

    def _pair(self, tensor: Tensor, output: Tensor) -> Tensor:
        """Make a tensor and what a reshape has made of it partners, with memory of their own: these are told apart under any wrappers."""
        source = _functorch.storage_of(tensor)
        if _functorch.storage_of(output) == source:
            with torch.enable_grad() if output is tensor else nullcontext():  # what the op returns as it is keeps its history
                output = output.clone()
        group = self._partners.get(source, {source}) | {_functorch.storage_of(output)}
        self._partners |= dict.fromkeys(group, group)
        return output

    def show(self, tensor: Tensor) -> None:
        """Note that fn gets what has a tensor's memory and is no tensor: a NumPy array, a storage, its address."""
        self._shown.add(_functorch.storage_of(tensor))

    def shows(self, tensor: Tensor) -> bool:
        """Whether fn has such an object for a tensor's memory."""
        return bool(self._shown) and _functorch.storage_of(tensor) in self._shown

    def write(self, op: str, tensors: Iterable[Tensor]) -> None:
        """Note that an op is about to write into these tensors.

        Raises:
            Retry: There are tensors to be followed.
            UnsupportedByVmap: fn has an array of one of them.
        """
        if self._shown and any(_functorch.is_wrapped(tensor) and self.shows(tensor) for tensor in tensors):
            raise UnsupportedByVmap(f"{op} writes into a tensor of which fn has an array or a storage: in a loop both share memory")
        if self._found and not self._follows:
            raise Retry(f"{op} writes into a tensor after a reshape", follows=True)
        for node in map(_functorch.storage_of, tensors if self._partners else ()):
            self.outdated |= self._partners.get(node, set()) - {node}

    def read(self, op: str, tensors: Iterable[Tensor]) -> None:
        """Check the tensors that are about to be read, or returned.

        Raises:
            UnsupportedByVmap: A tensor that may share memory with one of them has been written into since.
        """
        if self.outdated and not self.outdated.isdisjoint(map(_functorch.storage_of, tensors)):
            raise UnsupportedByVmap(
                f"{op} reads a tensor after a write into another, where one is a reshape of the other (also by flatten or contiguous), or "
                "selected from it by a number of each sample's own: in a loop both may share memory, while under vmap one is a copy"
            )


_ATEN = torch.ops.aten.reshape, torch.ops.aten.contiguous, torch.ops.aten.flatten, torch.ops.aten.ravel
_RESHAPING = {
    *(Tensor.contiguous, Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.ravel),
    *(torch.reshape, torch.flatten, torch.ravel),
    *(packet for op in _ATEN for packet in (op, *(getattr(op, overload) for overload in op.overloads()))),
}
"""Ops that return a copy where no view is possible."""

_CONVERSIONS = {Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}
"""Ops that return a copy where the layout in memory is not the one asked for."""


may_copy: Callable[[Any], bool] = (_RESHAPING | _CONVERSIONS).__contains__
"""Whether the layout of its argument in memory decides if an op returns a view of it or a copy."""


def _selects(index: Any) -> bool:
    """Whether an index has an integer tensor [] of each sample's own: that gives a view in a loop, but a copy under vmap."""
    items = index if isinstance(index, (tuple, list)) else (index,)
    return any(
        isinstance(item, Tensor)
        and item.ndim == 0
        and item.dtype != torch.bool
        and not item.is_floating_point()
        and _functorch.is_vmapped(item)
        for item in items
    )
