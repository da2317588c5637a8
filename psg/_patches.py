"""Replacements of torch's attributes, while psg needs them."""

import inspect
import threading
from typing import Any


class Patch:
    """A context in which attributes have other values, in place as long as any thread is in it.

    Args:
        values: By owner and name.
    """

    def __init__(self, values: dict[tuple[Any, str], Any]) -> None:
        self._values = values
        self._own = {(owner, name): inspect.getattr_static(owner, name) for owner, name in values}
        self._lock = threading.Lock()
        self._contexts = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._contexts:
                self._set(self._values)
            self._contexts += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._contexts -= 1
            if not self._contexts:
                self._set(self._own)

    def _set(self, values: dict[tuple[Any, str], Any]) -> None:
        for (owner, name), value in values.items():
            setattr(owner, name, value)
