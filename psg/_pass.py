"""One pass of plain autograd: what must hold from the call of fn to the end of its backward, and backward passes of fn's own making.

Checkpointed, reversible and adjoint layers run a part of fn again in their backward pass, and read their module's parameters there. What
`stateless` has put into the module must be there until then. Some of them also add to the `.grad` of what they read.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from psg import _autograd

Held = Callable[[], contextlib.AbstractContextManager[Any]]


class Pass:
    """What fn has been called with, for its backward pass."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[dict[str, Tensor], Held]] = {}
        self.ambiguous: set[int] = set()  # by id, what was held by an owner that was called with other tensors too

    def remember(self, owner: Any, tensors: dict[str, Tensor], held: Held) -> None:
        """Note a context in which an owner (a module) holds these tensors, with which it has been called."""
        known, _ = self._held.setdefault(id(owner), (tensors, held))
        if {name: id(tensor) for name, tensor in known.items()} != {name: id(tensor) for name, tensor in tensors.items()}:
            self.ambiguous.update(id(tensor) for tensor in (*known.values(), *tensors.values()))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context for the backward pass."""
        with contextlib.ExitStack() as stack:
            # In one order everywhere: each waits for its turn.
            for _, (_, held) in sorted(self._held.items()):
                stack.enter_context(held())
            yield


_open: ContextVar[Pass | None] = ContextVar("psg_pass", default=None)


@contextlib.contextmanager
def opened(new: Pass | None) -> Iterator[Pass | None]:
    """A context in which fn's calls are noted in this pass; in none, for a call of psg that stands inside another's."""
    token = _open.set(new)
    try:
        yield new
    finally:
        _open.reset(token)


def remember(owner: Any, tensors: dict[str, Tensor], held: Held) -> None:
    """`Pass.remember` of the pass that is open, if one is."""
    if (now := _open.get()) is not None:
        now.remember(owner, tensors, held)


def gradients(
    loss: Tensor,
    targets: Sequence[Tensor],
    watch: contextlib.AbstractContextManager[Any] | None = None,
    look: Callable[[list[Any]], None] | None = None,
) -> list[Tensor]:
    """d loss / d targets, without history; zeros for those that it does not depend on.

    Args:
        loss: A scalar.
        targets: Leaves.
        watch: A mode for the ops that the backward pass calls from Python.
        look: Called with the nodes of the loss' graph, each once.
    """
    watch = watch or contextlib.nullcontext()
    nodes = _nodes_of(loss)
    if look is not None:
        look(nodes)
    if loss.grad_fn is None:
        found: Sequence[Tensor | None] = [torch.ones_like(loss) if loss is target else None for target in targets]
    elif not any(isinstance(node, BackwardCFunction) for node in nodes):
        with watch:
            found = _autograd.gradients(loss, targets)
    else:
        # Whatever a function adds to its leaves itself is found in their `.grad`; nobody else's is to change.
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
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
    return [torch.zeros_like(target) if own is None else own.to_dense() for target, own in zip(targets, found, strict=True)]


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


def _nodes_of(loss: Tensor) -> list[Any]:
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:
        following = [child for child, _ in node.next_functions if child is not None and child not in seen]
        seen.update(following)
        nodes += dict.fromkeys(following)
    return nodes
