"""psg's access to functorch's internals, behind a few functions.

A rule needs the *physical* batch: the tensors under vmap's wrappers, with the samples in dim 0. The public API for this is an
`autograd.Function` whose `vmap` static method is the rule; it costs some 200 microseconds a call, thirty times as much as the op that it
wraps. The cheaper way, taken here, reads the wrapped value, pops vmap off the interpreter stack for the call, and wraps the result again.
Both run the same code at the same level, with ordinary autograd recording it; tests check that the results are equal.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as _C  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import lazy_load_decompositions  # pyright: ignore[reportPrivateImportUsage]
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only


def transform_active() -> bool:
    """Whether the caller runs inside a torch.func transform (grad, vmap, jvp, ...)."""
    return _C.peek_interpreter_stack() is not None


def tangents_active() -> bool:
    """Whether tensors may carry tangents of forward-mode autograd (torch.autograd.forward_ad)."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether a transform, of torch.func or of forward-mode autograd, sees every op."""
    return transform_active() or tangents_active()


def is_differentiated() -> bool:
    """Whether the caller runs inside a transform that takes derivatives, of torch.func or of forward-mode autograd."""
    stack = _C.get_interpreter_stack() or ()
    return any(interpreter.key() in (_C.TransformType.Grad, _C.TransformType.Jvp) for interpreter in stack) or tangents_active()


def is_traced() -> bool:
    """Whether something below torch.func, such as a tracer, sees every op: then no op may return a Python value."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_recorded() -> bool:
    """Whether a tracer records a graph."""
    return is_traced() and get_proxy_mode() is not None


class Tracers:
    """What sees every op now, to tell later tracers from. A tracer inside another takes its place for a while."""

    def __init__(self) -> None:
        self._traced, self._tracer = is_traced(), get_proxy_mode()

    def has_new(self) -> bool:
        """Whether another one sees every op."""
        return is_traced() and (not self._traced or get_proxy_mode() not in (None, self._tracer))


def is_watched() -> bool:
    """Whether a tracer or a transform, of torch.func or of forward-mode autograd, sees every op."""
    return is_traced() or is_transformed()


def can_read(tensor: Tensor) -> bool:
    """Whether Python can read a tensor's values, waiting for an accelerator if need be: not under wrappers, nor in a trace."""
    return not (is_wrapped(tensor) or is_traced())


def can_read_now(tensor: Tensor) -> bool:
    """The same without waiting for an accelerator."""
    return tensor.is_cpu and can_read(tensor)


KNOWING: ContextVar[Callable[[Tensor], Collection[Any] | None]] = ContextVar("psg_knowing", default=lambda tensor: None)
"""Tells a trace of a tensor whose values the tracer gives to Python, and bakes in, from which closed-over ones they follow; else None."""


def is_known(tensor: Tensor) -> bool:
    """Whether Python can read a tensor's values now, or gets them of the tracer: then later calls check what they follow from."""
    return can_read_now(tensor) or _sources(tensor) is not None


def is_known_for_good(tensor: Tensor) -> bool:
    """The same of values that no later call has to check: in a trace, those that follow from numbers alone."""
    return can_read_now(tensor) or _sources(tensor) == 0


def _sources(tensor: Tensor) -> int | None:
    found = KNOWING.get()(tensor) if is_recorded() and not is_wrapped(tensor) else None
    return None if found is None else len(found)


def attempt() -> Callable[[], None]:
    """Begin an attempt that may fail; the returned function makes a tracer forget the ops that it has recorded since."""
    mode = get_proxy_mode() if is_traced() else None
    if mode is None:
        return lambda: None
    graph: Any = mode.tracer.graph
    before = set(graph.nodes)

    def forget() -> None:
        for node in reversed(graph.nodes):
            if node not in before and node.op == "call_function":  # nodes for tensors from outside stay
                graph.erase_node(node)

    return forget


def current_level() -> int:
    """The level of the innermost torch.func transform; -1 outside all of them."""
    return _C.maybe_current_level() or -1


is_wrapped = _C.is_functorch_wrapped_tensor
"""Whether some torch.func transform has wrapped this tensor."""


level_of = _C.maybe_get_level
"""The level of the transform that has wrapped this tensor; negative if none has, or if it has ended."""


def is_batched(tensor: Tensor, level: int) -> bool:
    """Whether the vmap at this level has wrapped this tensor."""
    return level_of(tensor) == level and _C.is_batchedtensor(tensor)


def without_constant_wrappers(tensor: Tensor, level: int) -> Tensor:
    """Strip the outer wrappers, of transforms above this level, that neither batch nor differentiate the tensor.

    torch.func.grad wraps all arguments of its function, also those that it does not differentiate for.
    """
    tensor = alive(tensor)
    while _C.is_gradtrackingtensor(tensor) and (own := level_of(tensor)) > level:
        if tensor.requires_grad or _has_tangent(tensor, own):
            break
        tensor = value_of(tensor)
    return tensor


def innermost(tensor: Tensor, level: int) -> Tensor:
    """A tensor without any wrapper of a transform above this level."""
    while is_wrapped(tensor) and level_of(tensor) > level:
        tensor = value_of(tensor)
    return tensor


def under_derivatives(tensor: Tensor, level: int) -> Tensor:
    """A tensor without the outer wrappers of transforms above this level that differentiate, which leave its values as they are."""
    while _C.is_gradtrackingtensor(tensor) and level_of(tensor) > level:
        tensor = value_of(tensor)
    return tensor


def _has_tangent(tensor: Tensor, level: int) -> bool:
    """Whether a tensor that the transform at this level has wrapped carries a tangent there."""
    with below(level + 1):
        return torch._VF._unpack_dual(tensor, level=0)[1] is not None


def alive(tensor: Tensor) -> Tensor:
    """A tensor without the wrappers of transforms that have ended."""
    while (bare := _C.unwrap_if_dead(tensor)) is not tensor:
        tensor = bare
    return tensor


def can_descend(level: int) -> bool:
    """Whether `descend` knows each transform above this level: it knows vmap, grad and jvp."""
    known = _C.TransformType.Vmap, _C.TransformType.Grad, _C.TransformType.Jvp
    return all(interpreter.key() in known for interpreter in (_C.get_interpreter_stack() or ())[level:])


def records_below(level: int) -> bool:
    """Whether autograd below this level records the ops called here: not under no_grad, nor in a grad that was called under no_grad."""
    inner = [interpreter for interpreter in (_C.get_interpreter_stack() or ())[level:] if interpreter.key() == _C.TransformType.Grad]
    return torch.is_grad_enabled() and all(_C.CGradInterpreterPtr(interpreter).prevGradMode() for interpreter in inner)


def descend(
    tensor: Tensor,
    function: Callable[[Tensor], Tensor],
    batched: Callable[[Tensor], Tensor],
    recorded: Callable[[Callable[[Tensor], Tensor]], Tensor],
) -> Tensor:
    """Run an op through the innermost transform, which treats it like an `autograd.Function`, at a tenth of a Function's cost.

    Args:
        tensor: The op's argument.
        function: The op, called on the tensor below the transform.
        batched: The op, called below a vmap on a tensor with one more dimension in front.
        recorded: Given a forward function, applies a `OneLevel` to the tensor that calls it in its forward.

    Returns:
        The op's output.
    """
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    if level_of(tensor) != level:
        with interpreter.lower():
            return function(tensor)  # a constant for this transform
    if interpreter.key() == _C.TransformType.Vmap:
        with interpreter.lower():
            output = batched(physical(tensor, level, 0))
        return wrap(output, level)

    differentiates = torch.is_grad_enabled()

    def forward(tensor: Tensor) -> Tensor:
        # A Function switches autograd and tangents off in its forward, and tangents in its jvp. That is right for this transform only:
        # switch them on again for those further down.
        with torch.set_grad_enabled(differentiates), forward_ad._set_fwd_grad_enabled(True), interpreter.lower():
            output = function(_C._unwrap_for_grad(tensor, level))
        return _C._wrap_for_grad(output, level)

    return recorded(forward)


class OneLevel(torch.autograd.function._SingleLevelFunction):
    """An autograd Function that only the innermost transform sees."""

    @classmethod
    def apply_here(cls, *args: Any) -> Any:
        """The counterpart of other Functions' `apply`."""
        with enable_single_level_autograd_function():
            return cls.apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


def tangents_apart() -> bool:
    """Whether the caller runs in a jvp inside two vmaps, psg's and one of fn's own, which may batch the tangents but not the values."""
    kinds = [interpreter.key() for interpreter in _C.get_interpreter_stack() or ()]
    jvps = [level for level, kind in enumerate(kinds) if kind == _C.TransformType.Jvp]
    return bool(jvps) and kinds[: jvps[-1]].count(_C.TransformType.Vmap) > 1


def vmap_depth() -> int:
    """How many vmaps the caller runs in."""
    return sum(interpreter.key() == _C.TransformType.Vmap for interpreter in _C.get_interpreter_stack() or ())


def vmap_levels(tensor: Tensor) -> set[int]:
    """The levels of the vmaps that have wrapped this tensor."""
    return {level_of(layer) for layer in layers(tensor) if _C.is_batchedtensor(layer)}


def under_vmaps(tensor: Tensor, level: int) -> list[Tensor]:
    """The tensors right under the wrappers that vmaps below this level have put around this tensor."""
    return [value_of(layer) for layer in layers(tensor) if _C.is_batchedtensor(layer) and level_of(layer) < level]


def is_vmapped(tensor: Tensor) -> bool:
    """Whether some vmap has wrapped this tensor."""
    return any(map(_C.is_batchedtensor, layers(tensor)))


def is_tracked(tensor: Tensor) -> bool:
    """Whether a transform of torch.func differentiates, or has differentiated, for this tensor."""
    return any(map(_C.is_gradtrackingtensor, layers(tensor)))


value_of = _C.get_unwrapped
"""The tensor under one wrapper."""


def layers(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor and the tensors under each of its wrappers, the outermost first."""
    yield tensor
    while is_wrapped(tensor):
        tensor = value_of(tensor)
        yield tensor


def bare(tensor: Tensor) -> Tensor:
    """The tensor under all wrappers."""
    while is_wrapped(tensor):
        tensor = value_of(tensor)
    return tensor


def in_parts(op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a composite op as the ops that it is made of. vmap alone runs one without a batching rule sample by sample.

    A differentiating transform decomposes such ops on the way to vmap, so wrap the arguments in one that differentiates for nothing.
    """
    level = _C._grad_increment_nesting()
    try:
        with torch._C.DisableTorchFunction():
            args, kwargs = tree_map_only(Tensor, lambda tensor: _C._wrap_for_grad(tensor, level), (args, kwargs))
            return tree_map_only(Tensor, lambda tensor: _C._unwrap_for_grad(tensor, level), op(*args, **kwargs))
    finally:
        _C._grad_decrement_nesting()


class gradient_level:
    """A context: a level on top of the transforms around it, in which autograd records what runs, as in torch.func.grad.

    Outside of all transforms it adds no level, since there autograd records anyway.
    """

    def __enter__(self) -> "gradient_level":
        self._level = None
        if transform_active():
            # Where the caller has switched autograd off, it stays off for the levels below; this one takes that over as it begins.
            self._before = torch.is_grad_enabled()
            self._level = _C._grad_increment_nesting()
            torch._C._set_grad_enabled(True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._level is not None:
            torch._C._set_grad_enabled(self._before)
            _C._grad_decrement_nesting()

    @property
    def is_added(self) -> bool:
        """Whether there is such a level."""
        return self._level is not None

    def wrap(self, tensor: Tensor) -> Tensor:
        """A new tensor of this level, with the history that the given one has below; outside of all transforms a view of it."""
        return tensor.view_as(tensor) if self._level is None else _C._wrap_for_grad(tensor, self._level)

    def unwrap(self, tensor: Tensor) -> Tensor:
        """The tensor without its history in this level; outside of all transforms the tensor itself."""
        return tensor if self._level is None else _C._unwrap_for_grad(tensor, self._level)


def memory_of(tensor: Tensor) -> int:
    """The address of the storage that holds the values, under all wrappers; of the tensor itself where it has none, as sparse ones."""
    with torch._C.DisableTorchFunction():  # function modes watch fn, not this question
        own = bare(tensor)
        holds = torch._C._has_storage(own) and not is_traceable_wrapper_subclass(own)  # the latter hold tensors, not numbers
        return own.untyped_storage().data_ptr() if holds else own._cdata


def shares_memory(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether a tensor without wrappers is in the same memory as one of these."""
    return any([torch._C._is_alias_of(tensor, other) for other in others])  # pyright: ignore[reportAttributeAccessIssue]


def storage_id(tensor: Tensor) -> int:
    """What tells the storage under all wrappers from all others that are alive."""
    with torch._C.DisableTorchFunction():
        return bare(tensor).untyped_storage()._cdata


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to that storage: it does not keep the storage alive and, unlike `storage_id`, never comes to mean another one."""
    with torch._C.DisableTorchFunction():
        return StorageWeakRef(bare(tensor).untyped_storage())


def _uses(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_USES_OF_ONE = _uses(torch.empty(1))  # the object by which Python asks may be another use


def holders(tensor: Tensor) -> int:
    """How many tensors hold the storage under all wrappers: the tensor, views of it, what autograd has saved of it."""
    return _uses(bare(tensor)) - _USES_OF_ONE + 1


def may_swap(tensor: Tensor, views: int = 0) -> bool:
    """Whether nothing but Python, and so many views of it, hold a tensor, so that `swap` reaches all who do."""
    with torch._C.DisableTorchFunction():
        return type(tensor) is Tensor and tensor._use_count() == 1 + views  # pyright: ignore[reportAttributeAccessIssue]


def swap(tensor: Tensor, other: Tensor) -> None:
    """Make one tensor what another is, and that one what the first is, for all who hold them in Python.

    `torch.utils.swap_tensors` refuses tensors that are weakly referred to, as a tracer does to all: to tell what is under a wrapper by.
    """
    with torch._C.DisableTorchFunction():
        torch._C._swap_tensor_impl(tensor, other)


def are_one_view(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory, under any wrappers."""
    if is_lazy(tensor) or is_lazy(other):
        return False  # a lazy module's parameter has neither memory nor a shape until the module is called
    with torch._C.DisableTorchFunction():
        # The memory of one sample may be that of a tensor that all share: compare what is under the wrappers, too.
        sides = [(*_view_of(t), *_view_of(bare(t)), t.dtype, t.is_conj(), t.is_neg(), bare(t).data_ptr()) for t in (tensor, other)]
        return sides[0] == sides[1] and bare(tensor).numel() > 0


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride()


def is_contiguous(tensor: Tensor) -> bool:
    """Whether the values are, under all wrappers."""
    with torch._C.DisableTorchFunction():
        return bare(tensor).is_contiguous()


def physical(tensor: Tensor, level: int, n: int) -> Tensor:
    """The value with the samples in dim 0; a tensor without a batch dimension is expanded to n samples, without a copy."""
    if not is_batched(tensor, level):
        return tensor.unsqueeze(0).expand(n, *tensor.shape)
    value, dim = value_of(tensor), _C.maybe_get_bdim(tensor)
    return value if dim == 0 else value.movedim(dim, 0)


def wrap(value: Tensor, level: int) -> Tensor:
    """Wrap a physical value for the vmap at this level, with dim 0 as the batch dimension."""
    return _C._add_batch_dim(value, 0, level)


def wrap_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Wrap a value as `tensor` is wrapped: with the batch dimension at the same place, at the same level."""
    return _C._add_batch_dim(value, _C.maybe_get_bdim(tensor), level_of(tensor))


class below:
    """A context: run the body below the transform at this level and all inner ones; by default below the innermost."""

    def __init__(self, level: int | None = None) -> None:
        self._level = level

    def __enter__(self) -> None:
        self._popped = []
        while not self._popped if self._level is None else current_level() >= self._level:
            self._popped.append(_C.pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self._popped:
            _C.push_dynamic_layer_stack(self._popped.pop())


def run_below(run: Callable[..., Any], tensors: Sequence[Tensor], level: int, n: int) -> Any:
    """Call `run` on the physical values of `tensors`, below vmap; wrap the tensor or tensors that it returns (samples in dim 0)."""
    # `physical` and `run` are ordinary ops on ordinary tensors, so they belong below the transform.
    layer = _C.pop_dynamic_layer_stack()
    try:
        output = run(*[physical(tensor, level, n) for tensor in tensors])
    finally:
        _C.push_dynamic_layer_stack(layer)
    if isinstance(output, tuple):
        return tuple([wrap(own, level) for own in output])
    return output if output is NotImplemented else wrap(output, level)


def lacks_batching(func: Any) -> bool:
    """Whether this is an op of torch.library that vmap runs sample by sample, for want of a batching rule, or by a rule of the user's own.

    Below vmap autograd differentiates what such a rule calls, which need not be the op.
    """
    if isinstance(func, OpOverloadPacket):
        func = getattr(func, "default", None)
    if not isinstance(func, OpOverload) or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False  # a random op must obey vmap's `randomness`
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return (func.namespace not in _TORCH or not has("FuncTorchBatched")) and not has("CompositeImplicitAutograd")


_TORCH = {"aten", "prim", "prims", "mkldnn", "quantized"}


def unaliased(outputs: Iterable[Tensor], level: int) -> tuple[Tensor, ...]:
    """What a function returns to the vmap at this level, with copies of tensors that it does not batch.

    The function may close over such a tensor. For all samples vmap would return one view of its memory.
    """
    return tuple([output if is_batched(output, level) else output.clone() for output in outputs])


def vmap(
    function: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    in_dims: Sequence[int | None],
    n: int,
    randomness: str,
) -> tuple[Tensor, ...]:
    """`torch.func.vmap` of a function of a flat sequence of tensors, without the checks and the flattening that the caller has done.

    No output shares memory with a tensor that the function closes over.
    """
    _load_decompositions()
    level = _C._vmap_increment_nesting(n, randomness)
    try:
        samples = [tensor if dim is None else _C._add_batch_dim(tensor, dim, level) for tensor, dim in zip(tensors, in_dims, strict=True)]
        outputs = unaliased(function(samples), level)
        return tuple(_C._remove_batch_dim(output, level, n, 0) for output in outputs)
    finally:
        _C._vmap_decrement_nesting()


_load_decompositions = functools.cache(lazy_load_decompositions)
