"""Outside tensors: tensors with a history that fn does not get by position, but closes over or gets by keyword.

The caller may differentiate the result for them too. They are seen when an op uses them: the modes that watch fn report its ops here.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.weak import TensorWeakRef

from psg._errors import USED_ELSEWHERE, StateError, code_of, user_line, warn_once
from psg._torch import _autograd, _functorch
from psg._torch._ops import (
    GET_DATA,
    LIKE_ANOTHER,
    LIKENESSES,
    METADATA,
    PREDICATES,
    REQUIRING,
    name_of,
    substitute,
    tensors_of,
)
from psg._torch._patches import assigned

COMPUTED_BEFORE = (
    "stateless: the module uses a tensor that was computed from its parameter {!r} before the call (in __init__ or an earlier call), "
    "where psg cannot replace the parameter. Compute it in forward, or detach it if it is meant as a constant."
)

LOST_TO_TRANSFORM = (
    "fn closes over a tensor that requires grad, and hands it as an argument to a function that torch.func transforms (vmap, grad, "
    "jacrev) at {}, where psg cannot follow it: the result has no derivative for that tensor. Hand over a clone of it, or make it one of "
    "fn's arguments, or detach it, or call psg under torch.no_grad() if no derivative is wanted."
)
LOST_TO_FUNCTION = (
    "fn closes over a tensor that requires grad, and hands it to an autograd.Function or scripted function, where psg cannot follow it: "
    "the result has no derivative for that tensor. Make it one of fn's arguments, or detach it, or call psg under torch.no_grad() if no "
    "derivative is wanted."
)

UNDIFFERENTIATED = METADATA | PREDICATES | {Tensor.detach, torch.detach, GET_DATA, vars(torch._C.TensorBase)["_backward_hooks"].__set__}
"""Ops through which nothing is differentiated. (Autograd sets hooks of views that are written into, under a lock that grad_fn takes.)"""


_owned: ContextVar[tuple[Mapping[int, str], str]] = ContextVar("psg_owned", default=({}, ""))  # never changed


def owning(names: Mapping[int, str], message: str = USED_ELSEWHERE) -> AbstractContextManager[Any]:
    """A context in which a module runs with other parameters than its own, whose names these are, by id: no op must use its own."""
    return assigned(_owned, (names, message))


class Looking(TorchFunctionMode):
    """A function mode that shows all ops to `Outside.look`."""


def is_looked_at() -> bool:
    """Whether such a mode sees the ops that fn calls now."""
    return any(isinstance(mode, Looking) for mode in _get_current_function_mode_stack())


def refuse_own(func: Any, leaf: Tensor, first: Any, names: Mapping[int, str], message: str) -> None:
    """Raise if an op differentiates a parameter with one of these names, or a view of it.

    Raises:
        StateError: It does; the message, with the name.
    """
    with torch._C.DisableTorchFunction():  # other modes watch fn, not these questions
        name = names.get(id(_autograd.base_of(leaf)))
    if name is not None and not _takes_metadata(func, leaf, first):
        raise StateError(message.format(name))


def _takes_metadata(func: Any, leaf: Tensor, first: Any) -> bool:
    """Whether an op takes no more from a leaf than a shape, dtype or device; `first` is the first leaf of its arguments."""
    return func in LIKENESSES or (name_of(func) in LIKE_ANOTHER and leaf is not first)


class Outside:
    """Ignores outside tensors, but refuses those that a module owns where it runs with other parameters (`owning`).

    Attributes:
        found: The outside tensors that ops have used, each once.
    """

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        self._made: dict[int, Tensor] = {}  # leaves of the function's own, by id
        self._start = _autograd.now()
        self._allowed: set[Any] = set()  # nodes of outside tensors' graphs that lead to no parameter that a module owns

    def look(self, func: Any, tensors: list[Tensor], own: Collection[int] = (), level: int = -1) -> bool:
        """Look for outside tensors among the arguments of an op.

        Args:
            func: The op.
            tensors: The tensors among its arguments.
            own: The ids of tensors that do not count.
            level: The level of psg's innermost transform: those above it are fn's own.

        Returns:
            Whether autograd may record this op.

        Raises:
            StateError: A module uses its own parameter instead of the one that it is given, or a tensor computed from its own.
        """
        if func in REQUIRING and not tensors[0].requires_grad:
            self._made[id(tensors[0])] = tensors[0]
        if func in UNDIFFERENTIATED or not torch.is_grad_enabled():
            return False
        names, message = _owned.get()
        if names:
            met = [tensor for tensor in tensors if tensor.requires_grad and id(tensor) not in own and not _functorch.is_wrapped(tensor)]
            for tensor in (*met, *_bare(tensors, level)):
                refuse_own(func, tensor, tensors[0], names, message)
                if tensor.grad_fn is not None and self._is_older(tensor, own) and not _takes_metadata(func, tensor, tensors[0]):
                    key = _autograd.find_leaf(tensor.grad_fn, names, self._allowed)
                    if key is not None:
                        raise StateError(COMPUTED_BEFORE.format(names[key]))
        return True

    def made(self, output: Any, kwargs: Any) -> None:
        """Note what an op of fn's has made: with requires_grad=True it is a leaf of fn's own."""
        if kwargs.get("requires_grad") is True and isinstance(output, Tensor):
            self._made[id(output)] = output

    def _is_older(self, tensor: Tensor, own: Collection[int]) -> bool:
        """Whether a tensor that requires grad is neither one of these nor made by fn, or by a call of psg that fn makes."""
        if (node := tensor.grad_fn) is not None and not _autograd.made_before(node, self._start):
            return False
        if _autograd.is_own_leaf(tensor):
            return False
        base = id(_autograd.base_of(tensor))
        return id(tensor) not in own and base not in own and base not in self._made

    def expect(self, nodes: list[Any], leaves: list[Any], seen: set[int]) -> None:
        """Check that ops have used all outside tensors in the loss' graph.

        Args:
            nodes: The nodes of the graph.
            leaves: Those of leaves among them.
            seen: The ids of the tensors that ops have used.
        """

    def replace(self, arguments: Any) -> Any:
        """The same arguments, with other tensors in the places of outside ones."""
        return arguments

    def run(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a function that no mode watches."""
        return function(*args)


def _bare(tensors: list[Tensor], level: int) -> list[Tensor]:
    """The tensors that require grad and that transforms above this level, fn's own, have wrapped, without the wrappers."""
    if _functorch.current_level() <= level:
        return []
    bare = [_functorch.innermost(tensor, level) for tensor in tensors if _functorch.is_wrapped(tensor)]
    return [tensor for tensor in bare if not _functorch.is_wrapped(tensor) and tensor.requires_grad]


def _reference(what: Any) -> Callable[[], Any]:
    """A function that returns this tensor or node; None once it is a leaf (others lead to leaves) that nothing else refers to."""
    return TensorWeakRef(what) if isinstance(what, Tensor) and what.grad_fn is None else lambda: what


class Recorded(Outside):
    """Records outside tensors. Results computed meanwhile have no history."""

    def __init__(self) -> None:
        super().__init__()
        self._lost: list[tuple[Callable[[], Any], Any, str]] = []  # tensors that cannot be replaced, and the key and text of a warning

    def look(self, func: Any, tensors: list[Tensor], own: Collection[int] = (), level: int = -1) -> bool:
        """Note outside tensors, and those that fn's own transforms have wrapped: these cannot be replaced, so their derivative is lost."""
        if not super().look(func, tensors, own, level):
            return False
        for tensor in tensors:
            if tensor.requires_grad and id(tensor) not in own and not _functorch.is_wrapped(tensor) and self._is_older(tensor, own):
                if not any(tensor is other for other in self.found):
                    self.found.append(tensor)
        for bare in _bare(tensors, level):
            if self._is_older(bare, own) and not any(bare is other for other in self.found):
                self._lost.append((_reference(bare), ("wrapped", name_of(func)), LOST_TO_TRANSFORM.format(user_line())))
        return True

    def expect(self, nodes: list[Any], leaves: list[Any], seen: set[int]) -> None:
        """Note outside tensors that no op has shown: they cannot be replaced, so that the result has no derivative for them."""
        known = seen | {tensor.grad_fn for tensor in self.found} | {id(tensor._base) for tensor in self.found if tensor._is_view()}
        others = {node for node in nodes if _autograd.made_before(node, self._start)}.difference(leaves)
        hidden = {node for node in leaves if id(node.variable) not in known} | (others - known)
        for node in nodes if hidden else ():
            if node not in others and node not in leaves:  # of an op of fn's
                for before, _ in node.next_functions:
                    if before in hidden:
                        self._lost.append((_reference(getattr(before, "variable", before)), ("hidden", node.name()), LOST_TO_FUNCTION))

    def conclude(self, function: Any) -> None:
        """After the call of a function: forget leaves that nothing else refers to, then warn of the other tensors whose derivative is lost.

        fn has made such leaves itself, where no function mode sees it (nn.Parameter, a module's constructor): had it closed over them, it
        would still refer to them. And nobody can ask for their derivative.
        """
        references = [*map(_reference, self.found)]
        self.found.clear()
        self.found += [tensor for reference in references if (tensor := reference()) is not None]
        for reference, key, message in self._lost:
            if reference() is not None:
                warn_once((code_of(function), *key), message, UserWarning)

    def run(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call the function and note the outside tensors that it uses; an output without a history depends on none."""
        with torch.enable_grad():
            output = function(*args)
            if output.requires_grad:
                with _Mode(self):
                    function(*args)
        return output.detach()


class Replaced(Outside):
    """Replaces the outside tensors in `found` by others."""

    def __init__(self, found: list[Tensor], others: list[Tensor]) -> None:
        super().__init__()
        self.found = found
        self._others = {id(tensor): other for tensor, other in zip(found, others, strict=True)}

    def replace(self, arguments: Any) -> Any:
        """The same arguments, with the outside tensors replaced."""
        return substitute(arguments, lambda leaf: self._others.get(id(leaf), leaf)) if self._others else arguments

    def run(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call the function with the outside tensors replaced."""
        with _Mode(self):
            return function(*args)


class _Mode(Looking):
    def __init__(self, outside: Outside) -> None:
        super().__init__()
        self.outside = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.outside.look(func, tensors_of(args, kwargs or {}))
        args, kwargs = self.outside.replace((args, kwargs or {}))
        return func(*args, **kwargs)
