"""The errors and the one warning that psg raises on its own account."""

import sys
import warnings
from collections.abc import Hashable


class PsgError(Exception):
    """Base class of every error that psg raises on its own account.

    An error inside the user's function is never wrapped in one: it is raised as it is.
    """


class InputError(PsgError, ValueError):
    """An argument does not fit. The message names it, what arrived, what was expected and what to do."""


class StateError(PsgError, RuntimeError):
    """The function changes state or mixes samples, so that one sample's gradient is not defined by that sample."""


class FallbackWarning(UserWarning):
    """A call went down the ladder (capture, vmap, loop): the result is right and the call is slower. Says why."""


warned: set[Hashable] = set()


def warn_once(key: Hashable, message: str, category: type[Warning] = FallbackWarning) -> None:
    """Warn, of a descent unless told otherwise, at the user's own call, once for a key."""
    if key not in warned:
        warned.add(key)
        warnings.warn(message, category, stacklevel=_stack_level())


def _stack_level() -> int:
    """How many frames up the user's own call is: the first outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("psg", "torch"):
        frame, level = frame.f_back, level + 1
    return level
