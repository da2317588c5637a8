"""One pass of plain autograd: what must hold from the call of fn to the end of its backward, and backward passes of fn's own making.

Checkpointed, reversible and adjoint layers run a part of fn again in their backward pass, and read their module's parameters there. What
`stateless` has put into the module must be there until then. Some of them also add to the `.grad` of what they read.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from psg import _functorch

_open: ContextVar[contextlib.ExitStack | None] = ContextVar("psg_pass", default=None)


@contextlib.contextmanager
def of_its_own() -> Iterator[None]:
    """A context for a call of psg, which may stand inside a pass of another: what fn enters is left as soon as fn says."""
    token = _open.set(None)
    try:
        yield
    finally:
        _open.reset(token)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """A context for a pass, forward and backward: what fn enters by `until_its_end` is left with it."""
    with contextlib.ExitStack() as stack:
        token = _open.set(stack)
        try:
            yield
        finally:
            _open.reset(token)


@contextlib.contextmanager
def until_its_end() -> Iterator[contextlib.ExitStack]:
    """A context whose stack is that of the pass around it; one that ends with the body where there is none."""
    around = _open.get()
    if around is not None:
        yield around
    else:
        with contextlib.ExitStack() as stack:
            yield stack


def straighten(func: Any, output: Any) -> Any:
    """The output of an op, arranged so that its cotangent comes contiguous where torch's CPU kernel is wrong for another layout.

    That is the backward of batch_norm for a batch of one image whose cotangent is channels last.
    """
    if func in _BATCH_NORMS and output.ndim > 3 and output.requires_grad:
        output.register_hook(Tensor.contiguous)
    return output


_BATCH_NORMS = {F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm}


class Straight(TorchFunctionMode):
    """Straightens every op."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return straighten(func, func(*args, **(kwargs or {})))


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
            found = _functorch.gradients(loss, targets)
    else:
        # Whatever a function adds to its leaves itself is found in their `.grad`; nobody else's is to change.
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        others = [leaf for leaf in leaves if not any(leaf is target for target in targets)]
        before = [leaf.grad for leaf in others]
        for leaf in (*targets, *others):
            leaf.grad = None
        try:
            with watch:
                _functorch.accumulate(loss)
            found = [target.grad for target in targets]
        finally:
            for leaf, grad in zip(others, before, strict=True):
                leaf.grad = grad
    return [torch.zeros_like(target) if own is None else own.to_dense() for target, own in zip(targets, found, strict=True)]


def _nodes_of(loss: Tensor) -> list[Any]:
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:
        following = [child for child, _ in node.next_functions if child is not None and child not in seen]
        seen.update(following)
        nodes += dict.fromkeys(following)
    return nodes
