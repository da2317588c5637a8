"""torch's settings around a call: autocast applies to fn alone; inference mode, torch.compile and cached parametrizations to nothing.

What psg computes around fn keeps its stated precision under autocast. Under inference mode nothing could be differentiated. torch.compile
must not trace a pass that watches fn's ops, neither when it compiles psg's caller nor when it compiles fn: its graph breaks around psg's
functions, which run eagerly.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx.experimental.const_fold import FoldedGraphModule
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from psg._torch import _autograd, _functorch
from psg._torch._patches import ForAll, patch

P = ParamSpec("P")
R = TypeVar("R")

_ACCELERATOR = torch.accelerator.current_accelerator(check_available=False)
_DEVICES = ("cpu",) if _ACCELERATOR is None else ("cpu", _ACCELERATOR.type)


def autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices for which autocast is enabled, with their autocast dtypes."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype of autocast on this tensor's device; None if autocast is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def is_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for this tensor's device."""
    return autocast_dtype(tensor) is not None


def is_castable(leaf: Any, device: str) -> bool:
    """Whether autocast for this type of device casts an argument of an op."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64 and leaf.device.type == device


def narrowed(*tensors: torch.Tensor | None) -> list[Any]:
    """The arguments of an op that runs in autocast's dtype, where it is on."""
    if not torch._C._is_any_autocast_enabled():
        return [*tensors]
    dtypes = [autocast_dtype(tensor) if tensor is not None and is_castable(tensor, tensor.device.type) else None for tensor in tensors]
    return [tensor if tensor is None or dtype is None else tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]


def keep(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to run under the autocast settings that hold now, wherever it is called."""
    enabled = autocast()
    if not enabled:
        return fn

    @functools.wraps(fn)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in enabled:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=cache))
            return fn(*args, **kwargs)

    cache = torch.is_autocast_cache_enabled()
    return kept


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_OF_AUTOGRAD = _AUTOGRAD, torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.AutogradNestedTensor


def off() -> contextlib.AbstractContextManager[Any]:
    """A context that runs the body without autocast, and under no_grad instead of inference mode or below autograd.

    Below autograd are the implementation of a `torch.library` op and the handler of a `TorchDispatchMode`: there nothing has a history. It
    also hides the body from a `torch.utils.checkpoint` around it, which counts the tensors that autograd saves, and drops tensors that the
    body itself will need.
    """
    inference, checkpointed = torch.is_inference_mode_enabled(), _autograd.is_checkpointed()
    # Inside a transform the transform records, also in inference mode.
    below = torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD) and not _functorch.transform_active()
    enabled = [device for device, _ in autocast()]
    return _off(inference, below, checkpointed, enabled) if inference or below or checkpointed or enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _off(inference: bool, below: bool, checkpointed: bool, enabled: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if checkpointed:
            stack.enter_context(_autograd.unhooked())
        if inference:
            stack.enter_context(torch.inference_mode(False))
        elif below:
            excluded = torch._C._dispatch_tls_local_exclude_set()
            for key in _OF_AUTOGRAD:
                excluded = excluded.remove(key)
            stack.enter_context(torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded))
        if inference or below:
            stack.enter_context(torch.no_grad())
        for device in enabled:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            yield
        finally:
            if enabled:  # the user's context would keep what fn has cast: values of tensors that are made anew in every call
                torch.clear_autocast_cache()


def usable(leaf: Any) -> Any:
    """Make of an inference tensor, or one with the negative bit, one that autograd handles correctly; return everything else as it is.

    Call it outside of inference mode. (For a tensor with the negative bit, torch's det has a transposed gradient.)
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C.DisableTorchFunction():  # a function mode would look at each question
        is_inference, is_neg = leaf.is_inference(), leaf.is_neg()
    if is_inference:
        return leaf.clone()
    return leaf.resolve_neg() if is_neg else leaf  # under a transform, resolve_neg wraps every tensor


_SETTINGS = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


def settings() -> list[Any]:
    """torch's settings that programs change by calls, and not by contexts, which errors end."""
    return [get() for get, _ in _SETTINGS]


def set_settings(before: list[Any]) -> None:
    """Put these settings back."""
    for (get, put), value in zip(_SETTINGS, before, strict=True):
        if get() != value:
            put(value)


def has_function_modes() -> bool:
    """Whether function modes see every op, beside those that only set the default device."""
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def default_device() -> torch.device | None:
    """The default device, if one was set: by a function mode."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def as_now() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Note these settings and the default device; the returned function makes a context in which they hold again, whatever holds then."""
    noted, device = settings(), default_device()

    @contextlib.contextmanager
    def holding() -> Iterator[None]:
        before = settings()
        with contextlib.nullcontext() if default_device() == device else device or torch.device("cpu"):
            set_settings(noted)
            try:
                yield
            finally:
                set_settings(before)

    return holding


def may_compile() -> bool:
    """Whether this process may compile: it has imported torch's compiler."""
    # Importing it takes half a second, which other processes need not spend.
    return "torch._dynamo" in sys.modules


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that torch.compile does not trace it."""
    disabled: Any = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if not may_compile():
                return function(*args, **kwargs)
            made: Any = torch.compiler.disable(function)
            if torch.compiler.is_compiling():
                return made(*args, **kwargs)  # do not keep what was made while torch.compile traces
            disabled = made
        return disabled(*args, **kwargs)

    # torch.compile caches by code object, and confuses closures that share one.
    call.__code__ = call.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return call


def _force_eager() -> Callable[[], None]:
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


_eager = ForAll(_force_eager)


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """A context: run the body as if nothing in it were compiled."""
    return _eager if may_compile() else contextlib.nullcontext()


unvalidated = patch({(torch.distributions.Distribution, "_validate_args"): False})
"""A context in which torch.distributions does not branch on whether its arguments are valid."""

compiling = patch({(torch.compiler, "_is_compiling_flag"): True})
"""A context in which `torch.compiler.is_compiling()` is true, so that models do not branch on the values of tensors."""


def _leave_cudnn() -> Callable[[], None]:
    before = torch.backends.cudnn.enabled
    torch._C._set_cudnn_enabled(False)
    return lambda: torch._C._set_cudnn_enabled(before)


without_cudnn = ForAll(_leave_cudnn)
"""A context in which torch runs kernels of its own instead of cuDNN's."""

unmoved = patch({(torch.nn.RNNBase, "flatten_parameters"): lambda layer: None})
"""A context in which recurrent layers leave their weights where they are, which other threads notice by no more than their speed.

When its weights have changed, a layer on a GPU gathers them in one chunk of memory, as cuDNN likes them best. That fails for tensors that a
transform has wrapped, which have no memory, and for computed weights without one entry for each element; and it moves tensors that fn is
given away from those with which they share memory, such as the parameters that an optimizer updates.
"""


def _fold(graph: FoldedGraphModule) -> None:
    """`run_folding` without its detach."""
    graph.has_folding_been_run = True
    if graph.const_subgraph_module is None or graph.fx_const_folded_attrs_name is None:
        return
    values = graph.const_subgraph_module()
    delattr(graph, graph.fx_const_folded_attrs_name)  # a place for parameters, which have no history
    setattr(graph, graph.fx_const_folded_attrs_name, values)


linearizing = patch({(FoldedGraphModule, "run_folding"): _fold})
"""A context in which plain autograd is right through `torch.func.linearize`, also for what the linearized function closes over.

What depends on no tangent torch computes once, and detaches: then gradients lack a part, and results require grad.
"""


class _Unkept(dict[Any, Any]):
    """Takes the place of the cache of parametrizations: keeps nothing, unless `cached()` is entered once more than now."""

    def __init__(self) -> None:
        super().__init__()
        self._entered = parametrize._cache_enabled

    def __setitem__(self, key: Any, value: Any) -> None:
        if parametrize._cache_enabled > self._entered:
            super().__setitem__(key, value)


class uncached:
    """A context: run the body as if outside of `torch.nn.utils.parametrize.cached()`, which keeps the values of the first parameters used.

    All threads share that cache: while it is on, they take turns. Another thread may switch it off, which empties it, before the body ends:
    so the count of those that have switched it on is left as it is. (A thread that meanwhile switches it off and on may meet values of the
    body's.)
    """

    _turn = threading.RLock()

    def __enter__(self) -> None:
        uncached._turn.acquire()
        self._kept = parametrize._cache
        self._own = _Unkept() if parametrize._cache_enabled else None
        if self._own is None:
            uncached._turn.release()
        else:
            parametrize._cache = self._own

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            if parametrize._cache is self._own:
                parametrize._cache = self._kept
            uncached._turn.release()


def unaffected(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run uncompiled and in the context `off()`, wherever it is called."""

    @untraced
    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with off():
            return function(*args, **kwargs)

    return plain
