"""The errors and the one warning that psg raises on its own account, a check of arguments, and how messages name things."""

import functools
import inspect
import operator
import sys
import traceback
import warnings
from collections.abc import Hashable
from types import FrameType, FunctionType
from typing import Any
from weakref import ref

import torch


class PsgError(Exception):
    """Base class of every error that psg raises on its own account.

    An error inside the user's function is never wrapped in one: it is raised as it is.
    """


class InputError(PsgError, ValueError):
    """An argument does not fit. The message names it, what arrived, what was expected and what to do."""


class StateError(PsgError, RuntimeError):
    """The function changes state or mixes samples, so that one sample's gradient is not defined by that sample."""


class Unsupported(PsgError):
    """A rung cannot run this function; the next one can."""


class UnsupportedByVmap(Unsupported):
    """Neither this rung nor `vmap(grad)` can run this function; a loop can."""


USED_ELSEWHERE = (
    "stateless: the module uses its parameter {!r} from a list, function, object or other place that is not a registered parameter, where "
    "psg cannot replace it. Use it by its registered name."
)


class Stale(StateError):
    """A function under vmap has used a tensor that was made under an earlier vmap, which has ended."""

    @staticmethod
    def seen_in(error: Exception) -> bool:
        """Whether an error reports the use of such a tensor, raised by psg or by torch."""
        return isinstance(error, Stale) or "escaped from inside a function being vmapped" in str(error)


class FallbackWarning(UserWarning):
    """A call went down the ladder (capture, vmap, loop): the result is right, the call is slower. The message says why."""


for _public in (PsgError, InputError, StateError, FallbackWarning):
    _public.__module__ = "psg"  # the name under which tracebacks show it is the public one

warned: set[Hashable] = set()


def warn_once(key: Hashable, message: str, category: type[Warning] = FallbackWarning) -> None:
    """Warn once for each key, with the user's own call as the location; by default of a step down the ladder."""
    if key not in warned:
        warnings.warn(message, category, stacklevel=_stack_level())
        warned.add(key)  # afterwards: under a filter "error" every call raises, not only the first


def as_integer(value: Any, least: int | None = None) -> int | None:
    """An argument as an int if it is an integer (NumPy's and tensors of one too), of at least `least` if that is given; else None.

    Booleans are no integers.
    """
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        return None
    try:
        found = operator.index(value)
    except TypeError:
        return None
    return found if least is None or found >= least else None


def a_kind(value: Any) -> str:
    """A value's type, with its article."""
    name = type(value).__name__
    return f"{'an' if name.startswith(tuple('aeioAEIO')) else 'a'} {name}"


def received(value: Any) -> str:
    """What arrived in the place of a function or a module, by its type: what it holds may fill pages."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, tuple) and value and callable(value[0]):
        return "the pair that stateless returns: unpack it, loss, params = psg.stateless(...)"
    return a_kind(value)


def unwrapped(function: Any) -> Any:
    """What a callable calls in the end, under wrappers, partials and methods."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = inspect.unwrap(function)
        else:
            return function


def code_of(function: Any) -> Hashable:
    """A function's identity in the keys of `warn_once`: its code object under wrappers; its type if it is not written in Python.

    Functions that psg makes, those of `stateless` for example, share their code, and are told apart by themselves.
    """
    function = unwrapped(function)
    # A function made by exec may belong to no module.
    if isinstance(function, FunctionType) and (function.__module__ or "").partition(".")[0] == "psg":
        return ref(function)
    return getattr(function, "__code__", type(function))


def user_line(error: BaseException | None = None, unknown: str = "an unknown line") -> str:
    """The innermost line of user code that is running now or, given an error, the one that raised it; `unknown` if there is none."""
    if error is None:
        frames = ((frame, frame.f_lineno) for frame, _ in traceback.walk_stack(sys._getframe(1)))  # the innermost first
    else:
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    line = next(((frame.f_code.co_filename, number) for frame, number in frames if not _is_internal(frame)), None)
    return unknown if line is None else f"{line[0]}:{line[1]}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]


def _stack_level() -> int:
    """How many frames up the user's own call is."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_internal(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_internal(frame: FrameType) -> bool:
    """Whether a frame is psg's or torch's."""
    return frame.f_globals.get("__name__", "").split(".")[0] in ("psg", "torch")
