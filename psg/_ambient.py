"""What surrounds a call: autocast is for fn alone; inference mode, torch.compile and cached parametrizations are for neither.

Under autocast, what psg computes around fn keeps the precision that it states. Under inference mode nothing could be differentiated. And
torch.compile is not to trace a pass that watches fn's ops, neither from outside nor, where fn is compiled, from within: its graph breaks
around psg's functions, which run as ever.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn.utils import parametrize

from psg import _autograd

P = ParamSpec("P")
R = TypeVar("R")

_ACCELERATOR = torch.accelerator.current_accelerator(check_available=False)
_DEVICES = ("cpu",) if _ACCELERATOR is None else ("cpu", _ACCELERATOR.type)


def autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices that autocast is on for, with its dtypes."""
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


def keep(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the autocast settings that hold now, wherever it is called."""
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


def off() -> contextlib.AbstractContextManager[Any]:
    """A context: run the body without autocast and outside of inference mode, which leaves only that nobody differentiates the results.

    And unseen by a `torch.utils.checkpoint` around it, which counts what autograd saves, and drops what the body itself will need.
    """
    inference, checkpointed = torch.is_inference_mode_enabled(), _autograd.is_checkpointed()
    enabled = [device for device, _ in autocast()]
    return _off(inference, checkpointed, enabled) if inference or checkpointed or enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _off(inference: bool, checkpointed: bool, enabled: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if checkpointed:
            stack.enter_context(_autograd.unhooked())
        if inference:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        for device in enabled:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def usable(leaf: Any) -> Any:
    """A tensor made under inference mode, or marked as negative, as one of which autograd is right; everything else as it is.

    Call it outside of that mode. (Of a marked tensor torch's det has the gradient of the transposed one.)
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.clone() if leaf.is_inference() else leaf.resolve_neg()


def _may_compile() -> bool:
    # Whoever compiles has imported it; that takes half a second, and nobody else needs it.
    return "torch._dynamo" in sys.modules


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that torch.compile does not look into."""
    disabled: Any = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if not _may_compile():
                return function(*args, **kwargs)
            made: Any = torch.compiler.disable(function)
            if torch.compiler.is_compiling():
                return made(*args, **kwargs)  # what torch.compile runs through must not be kept
            disabled = made
        return disabled(*args, **kwargs)

    # torch.compile remembers by code object, and mixes up closures that share one.
    call.__code__ = call.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return call


class _ForAll:
    """A setting that torch holds for all threads at once: the first to come makes it, the last to go takes it back."""

    def __init__(self, make: Callable[[], Callable[[], None]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0
        self._take_back: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._take_back = self._make()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._take_back is not None:
                self._take_back()


def _force_eager() -> Callable[[], None]:
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def _say_compiling() -> Callable[[], None]:
    before = torch.compiler._is_compiling_flag

    def take_back() -> None:
        torch.compiler._is_compiling_flag = before

    torch.compiler._is_compiling_flag = True
    return take_back


_eager, _compiling = _ForAll(_force_eager), _ForAll(_say_compiling)


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """A context: run the body as if nothing in it were compiled."""
    return _eager if _may_compile() else contextlib.nullcontext()


def compiling() -> contextlib.AbstractContextManager[Any]:
    """A context: a model that asks `torch.compiler.is_compiling()` hears that it must not look into its tensors."""
    return _compiling


class uncached:
    """A context: run the body as if outside of `torch.nn.utils.parametrize.cached()`, which keeps values of whatever parameters came first.

    That is one state for all threads: where it is on, they take turns.
    """

    _turn = threading.RLock()

    def __enter__(self) -> None:
        uncached._turn.acquire()
        self._kept = parametrize._cache_enabled, parametrize._cache
        if parametrize._cache_enabled:
            parametrize._cache_enabled, parametrize._cache = 0, {}
        else:
            uncached._turn.release()

    def __exit__(self, *_: object) -> None:
        if self._kept[0]:
            parametrize._cache_enabled, parametrize._cache = self._kept
            uncached._turn.release()


def unaffected(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run without autocast and not to be compiled, wherever it is called."""

    @untraced
    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with off():
            return function(*args, **kwargs)

    return plain
