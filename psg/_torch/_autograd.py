"""psg's access to autograd's internals: the engine, the nodes of a graph and the hooks on saved tensors."""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge


def pulled(
    outputs: Sequence[Tensor],
    targets: Sequence[Any],
    cotangents: Sequence[Tensor],
    retain_graph: bool = False,
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad(outputs, targets, cotangents, ..., allow_unused=True)`, without its checks of shapes."""
    return torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(cotangents), retain_graph, create_graph, tuple(targets), allow_unreachable=True, accumulate_grad=False
    )


def pulled_for_all(outputs: Sequence[Tensor], targets: Sequence[Any], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
    """The same under vmap, for cotangents with one more dimension, the first."""
    reached: list[bool] = []

    def pull(*cotangents: Tensor) -> tuple[Tensor, ...]:
        found = pulled(outputs, targets, cotangents)
        reached[:] = [gradient is not None for gradient in found]
        return tuple(gradient for gradient in found if gradient is not None)

    found = iter(torch.func.vmap(pull)(*cotangents))
    return [next(found) if is_reached else None for is_reached in reached]


def dense(gradient: Tensor) -> Tensor:
    """The gradient itself, but where it is sparse, as that of an embedding or of an autograd.Function may be."""
    # torch 2.15 makes a node of to_dense for dense tensors too, which loses tangents, and fails below transforms.
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def accumulate(loss: Tensor) -> None:
    """`loss.backward(retain_graph=True)`, unseen by function modes, which see only the ops that fn's own backward functions call."""
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), True, False, (), allow_unreachable=True, accumulate_grad=True
    )


class in_this_thread:
    """A context in which backward passes stay in this thread, also those for an accelerator's tensors.

    In its own threads autograd counts the nodes that it records from zero, so that to `made_before` they are old, and psg's context
    variables have their defaults. And what a pass runs again there would wait for the locks of modules that this thread holds.
    """

    def __enter__(self) -> None:
        self._before = torch._C._is_multithreading_enabled()
        with torch._C.DisableTorchFunction():  # function modes take the call for an op of fn's: fifteen microseconds each
            torch._C._set_multithreading_enabled(False)

    def __exit__(self, *_: object) -> None:
        with torch._C.DisableTorchFunction():
            torch._C._set_multithreading_enabled(self._before)


def now() -> int:
    """autograd's current sequence number in this thread, a moment for `made_before`."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def made_before(node: Any, moment: int) -> bool:
    """Whether autograd recorded this node before a moment that `now` returned."""
    return node._sequence_nr() < moment


def own_leaf(tensor: Tensor) -> Tensor:
    """Make a new tensor an autograd leaf of psg's own, which `is_own_leaf` tells from those that fn closes over."""
    vars(tensor)["_psg_leaf"] = True
    if peek_interpreter_stack() is None:
        return tensor.requires_grad_()
    with enable_inplace_requires_grad(True):  # which torch.func forbids inside of its transforms, but for its own leaves
        return tensor.requires_grad_()


def is_own_leaf(tensor: Tensor) -> bool:
    return "_psg_leaf" in vars(tensor)


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that a view is of; any other tensor itself."""
    return tensor._base if tensor._is_view() else tensor  # pyright: ignore[reportReturnType]


def find_leaf(node: Any, ids: Container[int], seen: set[Any]) -> int | None:
    """The id, one of these, of a leaf in the graph that ends at this node; None, with the graph's nodes added to `seen`, if it has none."""
    return next((id(own.variable) for own in nodes_of(node, seen) if id(getattr(own, "variable", None)) in ids), None)


def nodes_of(node: Any, seen: set[Any] | None = None) -> Iterator[Any]:
    """The nodes of the graph that ends at this node (none if it is None), each once; not those in `seen`, to which it adds them."""
    seen = set() if seen is None else seen
    nodes = [] if node is None or node in seen else [node]
    seen.update(nodes)
    for node in nodes:
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                nodes.append(before)


def dtypes_in(output: Tensor) -> set[torch.dtype]:
    """The dtypes of the values in the graph that ends at this tensor: of what is computed from leaves, not of the leaves themselves."""
    with torch._C.DisableTorchFunction():  # function modes watch fn, not this question
        nodes = [node for node in nodes_of(output.grad_fn) if not hasattr(node, "variable")]
    return {metadata.dtype for node in nodes for metadata in node._input_metadata}


def leaves_in(nodes: Iterable[Any]) -> list[Any]:
    """Those of these nodes at which gradients of leaves arrive."""
    return [node for node in nodes if hasattr(node, "variable")]


def outdated(nodes: Sequence[Any]) -> list[Any]:
    """Those of these nodes of leaves at which the gradients of their leaves do not arrive any more."""
    if not nodes:
        return []
    # `get_gradient_edge` for all at once, at a seventh of its cost: an op that takes any tensors, unseen by modes and classes of tensors.
    joined = vars(torch._C)["_functions"].DelayedError("", len(nodes))(*[node.variable for node in nodes])
    node = (joined[0] if isinstance(joined, tuple) else joined).grad_fn
    edges = [(None, 0)] * len(nodes) if node is None else node.next_functions
    return [node for node, (now, _) in zip(nodes, edges, strict=True) if now is not node and _node_of(node.variable) is not node]


def _node_of(tensor: Tensor) -> Any:
    """The node at which a tensor's gradient arrives now, also for classes of tensors that handle ops themselves."""
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(tensor).node


def sides_of_functions(output: Tensor) -> list[GradientEdge]:
    """The inputs of all autograd.Functions in a graph, but those of psg's own.

    autograd calls a Function's backward only on the way to the gradients it was asked for. One that adds to the `.grad` of leaves itself
    (a reversible layer's) must be called too: to be told from others.
    """
    return [
        GradientEdge(before, index)
        for node in nodes_of(output.grad_fn)
        if isinstance(node, BackwardCFunction) and not _is_of_psg(node)
        for before, index in node.next_functions
        if before is not None
    ]


def _is_of_psg(node: Any) -> bool:
    return node._forward_cls.__module__.startswith("psg.")


def has_scripted_part(node: Any) -> bool:
    """Whether the graph that ends at this node holds one of TorchScript's own, which transforms differentiate once, but not twice."""
    return any(own.name().endswith("DifferentiableGraphBackward") for own in nodes_of(node))


saved_tensor_hooks: Callable[[], object] = partial(_autograd._top_saved_tensors_default_hooks, True)
"""The innermost hooks (pack, unpack) through which autograd now saves tensors; None if there are none."""


def is_checkpointed() -> bool:
    """Whether `torch.utils.checkpoint` now drops the tensors that autograd saves, to recompute them for the backward pass."""
    hooks: Any = saved_tensor_hooks()
    return hooks is not None and any(getattr(hook, "__module__", None) == "torch.utils.checkpoint" for hook in hooks)


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """A context in which autograd saves tensors without hooks."""
    hooks: list[Any] = []
    try:
        while (top := saved_tensor_hooks()) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            hooks.append(top)
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
