"""Values that hold inside a context: of context variables, and of torch's attributes, where all threads see them."""

import contextlib
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class assigned(contextlib.AbstractContextManager[T]):
    """A context in which a context variable has this value."""

    def __init__(self, variable: ContextVar[Any], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._value

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


class ForAll:
    """A context that holds for all threads at once: the first thread to enter makes a change, the last to leave takes it back.

    Args:
        make: Makes the change, and returns a function that takes it back.
    """

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


def patch(values: dict[tuple[Any, str], Any]) -> ForAll:
    """A context in which attributes, each held by its owner itself, have other values, given by owner and name."""
    return ForAll(partial(assign, values))


def assign(values: dict[tuple[Any, str], Any]) -> Callable[[], None]:
    """Give such attributes other values; returns what puts theirs back."""
    before = []
    for (owner, name), value in values.items():
        before.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)
    return partial(_put_back, before)


def _put_back(before: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in before:
        setattr(owner, name, value)
