"""Calls of TorchScript, inside of which no function mode sees an op."""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import torch

from psg._errors import PsgError
from psg._torch._patches import patch

_KINDS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_CALLS = {kind: kind.__call__ for kind in _KINDS}


class watched:
    """A context in which `look` is given each function or method of torch.jit that Python calls, and its arguments, before it runs.

    Inner contexts add theirs.

    Raises:
        PsgError: `look` or `refuse` has raised an error that did not leave the context: whoever caught it went on in another way.
    """

    def __init__(self, look: Callable[[Any, list[Any]], None]) -> None:
        self._look = look
        self.failures: list[str] = []  # the messages of errors raised in this context

    def look(self, script: Any, arguments: list[Any]) -> None:
        """Give a function or method to this context's `look`, and to those of the contexts around it."""
        if self._outer is not None:
            self._outer.look(script, arguments)
        try:
            self._look(script, arguments)
        except PsgError as error:
            self.failures.append(str(error))
            raise

    def __enter__(self) -> None:
        self._outer = _current.get()
        self._token = _current.set(self)
        _patch.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _patch.__exit__()
        _current.reset(self._token)
        if kind is None and self.failures:
            raise PsgError(f"the function handles an error: {self.failures[0]}")


def parameters_of(script: Any) -> Iterator[torch.Tensor]:
    """The parameters of the module that a method of torch.jit belongs to; none for a function."""
    owners = [script.owner] if isinstance(script, torch._C.ScriptMethod) else []
    while owners:
        owner = owners.pop()
        yield from dict(torch._C.ParameterDict(owner).items()).values()  # pyright: ignore[reportAttributeAccessIssue]
        owners += dict(torch._C.ModuleDict(owner).items()).values()


_current: ContextVar[watched | None] = ContextVar("psg_scripts", default=None)


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
        watch.look(called, [*args, *kwargs.values()])
    kind = next(kind for kind in _KINDS if isinstance(called, kind))
    return _CALLS[kind](called, *args, **kwargs)


_patch = patch({(kind, "__call__"): _call for kind in _KINDS})
