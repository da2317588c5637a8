"""What a function was found to do, and how a pass that expects it treats it."""

import functools
import inspect
import weakref
from types import FunctionType
from typing import Any, NamedTuple

from psg._errors import Unsupported


class Habits(NamedTuple):
    """How a pass treats what the function does; it starts with the cheapest.

    Attributes:
        copied: The inputs are copies that the function may write into.
        derives: Ops on parameters alone are computed once.
        fills: How many kinds of the tensors that the function makes are made for every sample: first those that are most often written
            into; what is made for every sample has no Python value.
        ruled: Known ops run by their rules.
        recorded: The function calls autograd itself: what runs by rules can be differentiated again.
    """

    copied: bool = False
    derives: bool = True
    fills: int = 0
    ruled: bool = True
    recorded: bool = False


class Retry(Unsupported):
    """The function does what this pass did not expect; another can follow it.

    Attributes:
        change: Fields of its `Habits`.
    """

    def __init__(self, message: str, **change: Any) -> None:
        super().__init__(message)
        self.change = change


# What functions did when they were last called: a pass that does not expect it has to begin again.
_known: weakref.WeakKeyDictionary[FunctionType, Habits] = weakref.WeakKeyDictionary()


def habits_of(function: Any) -> Habits:
    """What is known of a function."""
    own = _function_of(function)
    return Habits() if own is None else _known.get(own, Habits())


def remember(function: Any, habits: Habits) -> None:
    """Expect these of the function from now on."""
    own = _function_of(function)
    # What slows every op down is found out anew: code may be shared by functions of which one alone needs it.
    kept = Habits(copied=habits.copied, fills=habits.fills, recorded=habits.recorded)
    if own is not None and (own in _known or kept != Habits()):
        _known[own] = kept


def _function_of(function: Any) -> Any:
    """What a callable runs: the function under wrappers, bound arguments and methods; None if that is not written in Python."""
    while type(function) is not FunctionType or "__wrapped__" in function.__dict__:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = inspect.unwrap(function)
        else:
            call = inspect.getattr_static(type(function), "__call__", None)
            return call if isinstance(call, FunctionType) else None
    return function
