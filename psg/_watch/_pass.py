"""One pass of plain autograd: the state that must last from the call of fn to the end of its backward pass, also one that fn defines.

Checkpointed, reversible and adjoint layers run a part of fn again in their backward pass, and read their module's parameters there. The
parameters that `stateless` has put into the module must be there until then. Some layers also add to the `.grad` of tensors that they read.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from psg._errors import USED_ELSEWHERE, StateError
from psg._torch import _autograd
from psg._torch._patches import assigned

Held = Callable[[], contextlib.AbstractContextManager[Any]]


class Pass:
    """The tensors with which fn has called modules, for its backward pass.

    Attributes:
        ambiguous: The ids of the tensors of owners that were called with several sets of them.
        replaced: The names of the owners' own tensors, by id, in whose place they had these.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[dict[str, Tensor], Held]] = {}
        self.ambiguous: set[int] = set()
        self.replaced: dict[int, str] = {}

    def remember(self, owner: Any, tensors: dict[str, Tensor], held: Held, replaced: dict[int, str]) -> None:
        """Note that an owner (a module) was called with these tensors, in whose place, and the context in which it holds them."""
        self.replaced |= replaced
        known, _ = self._held.setdefault(id(owner), (tensors, held))
        if {name: id(tensor) for name, tensor in known.items()} != {name: id(tensor) for name, tensor in tensors.items()}:
            self.ambiguous.update(id(tensor) for tensor in (*known.values(), *tensors.values()))

    def expect_replaced(self, leaves: Iterable[Any]) -> None:
        """Raise StateError if one of these nodes of leaves is that of an owner's own tensor, and not of the one in its place."""
        for node in leaves:
            if (name := self.replaced.get(id(node.variable))) is not None:
                raise StateError(USED_ELSEWHERE.format(name))

    def again(self) -> contextlib.AbstractContextManager[None]:
        """A context for the backward pass, which stays in this thread, and in which the owners hold their tensors."""
        return self._holding() if self._held else _autograd.in_this_thread()

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack, _autograd.in_this_thread():
            # In one order everywhere, to avoid deadlocks: each context waits for its module's lock.
            for _, (_, held) in sorted(self._held.items()):
                stack.enter_context(held())
            yield


_open: ContextVar[Pass | None] = ContextVar("psg_pass", default=None)


def opened(new: Pass | None) -> contextlib.AbstractContextManager[Pass | None]:
    """A context in which module calls are noted in this pass; in none with None, for a call of psg that is made inside another."""
    return assigned(_open, new)


def remember(owner: Any, tensors: dict[str, Tensor], held: Held, replaced: dict[int, str]) -> None:
    """`Pass.remember` of the pass that is open, if one is."""
    if (now := _open.get()) is not None:
        now.remember(owner, tensors, held, replaced)


def gradients(
    loss: Tensor,
    targets: Sequence[Tensor],
    watch: contextlib.AbstractContextManager[Any] | None = None,
    look: Callable[[list[Any]], None] | None = None,
) -> list[Tensor | None]:
    """d loss / d targets, without history; None for targets that the loss does not depend on.

    Args:
        loss: A scalar.
        targets: Leaves.
        watch: A mode for the ops that the backward pass calls from Python.
        look: Called with the nodes of the loss' graph, each once.
    """
    watch = watch or contextlib.nullcontext()
    nodes = list(_autograd.nodes_of(loss.grad_fn))
    if look is not None:
        look(nodes)
    if loss.grad_fn is None:
        found: Sequence[Tensor | None] = [torch.ones_like(loss) if loss is target else None for target in targets]
    elif not any(issubclass(kind, BackwardCFunction) for kind in set(map(type, nodes))):
        ones = torch.ones_like(loss)
        with watch:
            found = _autograd.pulled((loss,), targets, (ones,))
    else:
        # A Function's backward may add to the `.grad` of leaves itself: read the targets' gradients there, and restore the others' `.grad`.
        leaves = [node.variable for node in _autograd.leaves_in(nodes)]
        own = {id(target) for target in targets}
        others = [leaf for leaf in leaves if id(leaf) not in own]
        before = [leaf.grad for leaf in others]
        for leaf in (*targets, *others):
            leaf.grad = None
        try:
            with watch, _unhooked(others):
                _autograd.accumulate(loss)
            found = [target.grad for target in targets]
        finally:
            for leaf, grad in zip(others, before, strict=True):
                leaf.grad = grad
    return [None if own is None else _autograd.dense(own) for own in found]


@contextlib.contextmanager
def _unhooked(leaves: Sequence[Any]) -> Iterator[None]:
    """A context in which the hooks of these leaves are not called."""
    held = [hooks for leaf in leaves for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if hooks]
    kept = [hooks.copy() for hooks in held]
    for hooks in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(held, kept, strict=True):
            hooks.update(own)
