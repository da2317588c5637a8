"""Replacements of torch's attributes, while psg needs them."""

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any


class Patch:
    """Other values for attributes, in place as long as a context is open in any thread.

    Args:
        values: By owner and name.
    """

    def __init__(self, values: dict[tuple[Any, str], Any]) -> None:
        self._values = values
        self._own = {(owner, name): inspect.getattr_static(owner, name) for owner, name in values}
        self._lock = threading.Lock()
        self._contexts = 0

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Such a context."""
        with self._lock:
            if not self._contexts:
                self._set(self._values)
            self._contexts += 1
        try:
            yield
        finally:
            with self._lock:
                self._contexts -= 1
                if not self._contexts:
                    self._set(self._own)

    def _set(self, values: dict[tuple[Any, str], Any]) -> None:
        for (owner, name), value in values.items():
            setattr(owner, name, value)
