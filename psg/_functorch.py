"""What psg asks of functorch's internals, behind a few functions.

A rule wants to see the *physical* batch: the tensors under vmap's wrappers, with the samples in dim 0. The public way there is an
`autograd.Function` whose `vmap` static method is the rule; it costs some 200 microseconds a call, thirty times the price of the op it
wraps. The light way, taken here, reads the wrapped value, pops vmap off the interpreter stack for the call, and wraps the result again.
Both run the same code at the same level, with ordinary autograd recording it; the tests hold them equal.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
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
from torch.utils._pytree import tree_map_only

from psg._errors import Stale


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of autocast on this tensor's device; None without it."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def transform_active() -> bool:
    """Whether the caller runs inside a torch.func transform (grad, vmap, jvp, ...)."""
    return _C.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Whether something below torch.func, such as a tracer, sees every op: then no op may give a Python value."""
    return torch._C._len_torch_dispatch_stack() > 0


def may_ask(tensor: Tensor) -> bool:
    """Whether a Python value can be had of a tensor at no cost: a device would be waited for; a wrapper and a trace have no answer."""
    return tensor.is_cpu and not is_wrapped(tensor) and not is_traced()


def attempt() -> Callable[[], None]:
    """Begin what may fail: the result makes a tracer forget the ops that it has recorded since, of which some may be what failed."""
    mode = get_proxy_mode() if is_traced() else None
    if mode is None:
        return lambda: None
    graph: Any = mode.tracer.graph
    before = set(graph.nodes)

    def forget() -> None:
        for node in reversed(graph.nodes):
            if node not in before and node.op == "call_function":  # what stands for a tensor from outside stays known
                graph.erase_node(node)

    return forget


def current_level() -> int:
    """The level of the innermost torch.func transform; -1 outside all of them."""
    return _C.maybe_current_level() or -1


def is_wrapped(tensor: Tensor) -> bool:
    """Whether some torch.func transform has wrapped this tensor."""
    return _C.is_functorch_wrapped_tensor(tensor)


level_of = _C.maybe_get_level
"""The level of the transform that has wrapped this tensor; negative if none has, or if it has ended."""


def is_batched(tensor: Tensor, level: int) -> bool:
    """Whether the vmap at this level has wrapped this tensor."""
    return _C.is_batchedtensor(tensor) and level_of(tensor) == level


def is_batched_within(tensor: Tensor, level: int) -> bool:
    """Whether the vmap at this level has wrapped this tensor, under whatever other wrappers."""
    return any(is_batched(layer, level) for layer in layers(tensor))


def without_constant_wrappers(tensor: Tensor, level: int) -> Tensor:
    """A tensor without those wrappers of transforms above this level that neither batch nor differentiate it.

    torch.func.grad wraps all arguments of the function, and differentiates for some.
    """
    tensor = alive(tensor)
    while _C.is_gradtrackingtensor(tensor) and (own := level_of(tensor)) > level:
        if tensor.requires_grad or _has_tangent(tensor, own):
            break
        tensor = value_of(tensor)
    return tensor


def innermost(tensor: Tensor, level: int) -> Tensor:
    """A tensor without all wrappers of transforms above this level."""
    while is_wrapped(tensor) and level_of(tensor) > level:
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
    """Whether `descend` knows each transform above this level: vmap, grad and jvp."""
    known = _C.TransformType.Vmap, _C.TransformType.Grad, _C.TransformType.Jvp
    return all(interpreter.key() in known for interpreter in (_C.get_interpreter_stack() or ())[level:])


def records_below(level: int) -> bool:
    """Whether autograd records what is computed here below the transform at this level: a grad inside of no_grad does not."""
    inner = [interpreter for interpreter in (_C.get_interpreter_stack() or ())[level:] if interpreter.key() == _C.TransformType.Grad]
    return torch.is_grad_enabled() and all(_C.CGradInterpreterPtr(interpreter).prevGradMode() for interpreter in inner)


def descend(
    tensor: Tensor,
    function: Callable[[Tensor], Tensor],
    batched: Callable[[Tensor], Tensor],
    recorded: Callable[[Callable[[Tensor], Tensor]], Tensor],
) -> Tensor:
    """Take an op through the innermost transform, as it would take an `autograd.Function`, for a tenth of the price.

    Args:
        tensor: The op's argument.
        function: The op, for what lies below the transform.
        batched: The op, for a tensor with one more dimension in front, below a vmap.
        recorded: Applies a `OneLevel` to the tensor, which calls in its forward what it is given here.

    Returns:
        The op's output.
    """
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    if level_of(tensor) != level:
        with interpreter.lower():
            return function(tensor)  # to this transform a constant
    if interpreter.key() == _C.TransformType.Vmap:
        with interpreter.lower():
            output = batched(physical(tensor, level, 0))
        return wrap(output, level)

    differentiates = torch.is_grad_enabled()

    def forward(tensor: Tensor) -> Tensor:
        # A Function runs its forward without autograd and without tangents, and its jvp without tangents: for this transform, and not
        # for those further down.
        with torch.set_grad_enabled(differentiates), forward_ad._set_fwd_grad_enabled(True), interpreter.lower():
            output = function(_C._unwrap_for_grad(tensor, level))
        return _C._wrap_for_grad(output, level)

    return recorded(forward)


class OneLevel(torch.autograd.function._SingleLevelFunction):
    """An autograd Function that only the innermost transform sees."""

    @classmethod
    def apply_here(cls, *args: Any) -> Any:
        """What `apply` is for other Functions."""
        with enable_single_level_autograd_function():
            return cls.apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


def tangents_apart() -> bool:
    """Whether the caller runs in a jvp inside of two vmaps, psg's and one of fn's own, which may have the tangents without the values."""
    kinds = [interpreter.key() for interpreter in _C.get_interpreter_stack() or ()]
    jvps = [level for level, kind in enumerate(kinds) if kind == _C.TransformType.Jvp]
    return bool(jvps) and kinds[: jvps[-1]].count(_C.TransformType.Vmap) > 1


def vmaps(tensor: Tensor) -> int:
    """How many vmaps have wrapped this tensor, under whatever other wrappers."""
    return sum(map(_C.is_batchedtensor, layers(tensor)))


def is_sampled(tensor: Tensor) -> bool:
    """Whether some vmap has wrapped this tensor."""
    return vmaps(tensor) > 0


def value_of(tensor: Tensor) -> Tensor:
    """The tensor under one wrapper."""
    return _C.get_unwrapped(tensor)


def layers(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and what is under its wrappers, the outermost first."""
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
    """Call an op that is made of others as these. vmap alone runs one that it does not know for sample after sample.

    As a transform that differentiates does on its way to vmap; this one differentiates for nothing.
    """
    level = _C._grad_increment_nesting()
    try:
        with torch._C.DisableTorchFunction():
            args, kwargs = tree_map_only(Tensor, lambda tensor: _C._wrap_for_grad(tensor, level), (args, kwargs))
            return tree_map_only(Tensor, lambda tensor: _C._unwrap_for_grad(tensor, level), op(*args, **kwargs))
    finally:
        _C._grad_decrement_nesting()


def memory_of(tensor: Tensor) -> int:
    """Where the values are stored, under whatever wrappers."""
    return bare(tensor).untyped_storage().data_ptr()


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """The same as what stays its own when the values are let go of, and does not hold them."""
    return StorageWeakRef(bare(tensor).untyped_storage())


def physical(tensor: Tensor, level: int, n: int) -> Tensor:
    """The value with the samples in dim 0; a tensor without a batch dimension is expanded to one, without a copy."""
    if not is_batched(tensor, level):
        return tensor.unsqueeze(0).expand(n, *tensor.shape)
    value, dim = _C.get_unwrapped(tensor), _C.maybe_get_bdim(tensor)
    return value if dim == 0 else value.movedim(dim, 0)


def wrap(value: Tensor, level: int) -> Tensor:
    """Give dim 0 of a physical value to the vmap at this level."""
    return _C._add_batch_dim(value, 0, level)


def wrap_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Wrap a value that is laid out as that of `tensor` is: with the batch dimension at the same place, at the same level."""
    return _C._add_batch_dim(value, _C.maybe_get_bdim(tensor), level_of(tensor))


class below:
    """A context: run the body below the transform at this level, and all above it; by default below the innermost."""

    def __init__(self, level: int | None = None) -> None:
        self._level = level

    def __enter__(self) -> None:
        level = current_level() if self._level is None else self._level
        self._popped = []
        while current_level() >= level:
            self._popped.append(_C.pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self._popped:
            _C.push_dynamic_layer_stack(self._popped.pop())


def run_below(run: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], level: int, n: int) -> tuple[Tensor, ...]:
    """Call `run` on the physical values of `tensors`, below vmap; wrap what it returns (samples in dim 0)."""
    # `physical` and `run` are ordinary ops on ordinary tensors, so they belong below the transform.
    with below():
        outputs = run(*[physical(tensor, level, n) for tensor in tensors])
    return tuple([wrap(output, level) for output in outputs])


def lacks_batching(func: Any) -> bool:
    """Whether this is an op of torch.library that vmap runs sample by sample, for want of a rule."""
    if isinstance(func, OpOverloadPacket):
        func = getattr(func, "default", None)
    if not isinstance(func, OpOverload) or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False  # what draws random numbers does as vmap's `randomness` says
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return not has("FuncTorchBatched") and not has("CompositeImplicitAutograd")


def vmap(
    function: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    in_dims: Sequence[int | None],
    n: int,
    randomness: str,
) -> tuple[Tensor, ...]:
    """`torch.func.vmap` of a function of a flat sequence of tensors, without the checks and trees that the caller has done already."""
    _load_decompositions()
    level = _C._vmap_increment_nesting(n, randomness)
    try:
        samples = [tensor if dim is None else _C._add_batch_dim(tensor, dim, level) for tensor, dim in zip(tensors, in_dims, strict=True)]
        outputs = function(samples)
        if any(is_batched(output, level) and len(physical(output, level, n)) != n for output in outputs):
            raise Stale(f"a batch of another size than {n}")
        return tuple(_C._remove_batch_dim(output, level, n, 0) for output in outputs)
    finally:
        _C._vmap_decrement_nesting()


_load_decompositions = functools.cache(lazy_load_decompositions)
