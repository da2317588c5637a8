"""Calls of TorchScript, inside of which no function mode sees an op."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch

from psg._errors import PsgError
from psg._patches import patch


class _Watch(NamedTuple):
    look: Callable[[Any], None]
    failures: list[str]  # the messages of errors raised in its context


_current: ContextVar[_Watch | None] = ContextVar("psg_scripts", default=None)

_KINDS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_CALLS = {kind: kind.__call__ for kind in _KINDS}


class watched:
    """A context in which `look` is given each function or method of torch.jit that Python calls, before it runs; inner contexts add theirs.

    Raises:
        PsgError: `look` or `refuse` has raised an error that did not leave the context: whoever caught it went on in another way.
    """

    def __init__(self, look: Callable[[Any], None]) -> None:
        self._look = look

    def __enter__(self) -> None:
        outer, failures, look = _current.get(), list[str](), self._look

        def look_all(script: Any) -> None:
            if outer is not None:
                outer.look(script)
            try:
                look(script)
            except PsgError as error:
                failures.append(str(error))
                raise

        self._failures = failures
        self._token = _current.set(_Watch(look_all, failures))
        _patch.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _patch.__exit__()
        _current.reset(self._token)
        if kind is None and self._failures:
            raise PsgError(f"the function handles an error: {self._failures[0]}")


def refuse(message: str) -> NoReturn:
    """Raise an error that an enclosing context must not miss.

    Raises:
        PsgError: With this message.
    """
    if (watch := _current.get()) is not None:
        watch.failures.append(message)
    raise PsgError(message)


def _call(called: Any, *args: Any, **kwargs: Any) -> Any:
    if (watch := _current.get()) is not None:
        watch.look(called)
    kind = next(kind for kind in _KINDS if isinstance(called, kind))
    return _CALLS[kind](called, *args, **kwargs)


_patch = patch({(kind, "__call__"): _call for kind in _KINDS})
