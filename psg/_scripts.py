"""Calls of TorchScript, inside of which no function mode sees an op."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from psg._errors import PsgError

_look: ContextVar[Callable[[Any], None] | None] = ContextVar("_look", default=None)
_lock = threading.Lock()
_contexts = 0  # `watched` contexts in any thread

_KINDS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_CALLS = {kind: kind.__call__ for kind in _KINDS}


@contextlib.contextmanager
def watched(look: Callable[[Any], None]) -> Iterator[None]:
    """A context in which `look` is given each function or method of torch.jit that Python calls, before it runs; inner contexts add theirs.

    Raises:
        PsgError: `look` has raised an error that did not leave the context: whoever caught it went on in another way.
    """
    global _contexts
    outer, failures = _look.get(), list[str]()

    def look_all(script: Any) -> None:
        if outer is not None:
            outer(script)
        try:
            look(script)
        except PsgError as error:
            failures.append(str(error))
            raise

    token = _look.set(look_all)
    with _lock:
        _contexts += 1
        for kind in _KINDS:
            kind.__call__ = _call
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            if not _contexts:
                for kind, call in _CALLS.items():
                    kind.__call__ = call
        _look.reset(token)
    if failures:
        raise PsgError(f"the function handles an error: {failures[0]}")


def _call(called: Any, *args: Any, **kwargs: Any) -> Any:
    look = _look.get()
    if look is not None:
        look(called)
    kind = next(kind for kind in _KINDS if isinstance(called, kind))
    return _CALLS[kind](called, *args, **kwargs)
