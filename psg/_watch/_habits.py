"""What psg has found out about a function, and how a pass treats the function accordingly."""

import inspect
import weakref
from types import FunctionType
from typing import Any, NamedTuple

from psg._errors import Unsupported, unwrapped


class Habits(NamedTuple):
    """How a pass treats the function; the defaults are the cheapest.

    Attributes:
        copied: Inputs are copied, so that the function may write into them.
        derives: Ops on parameters alone are computed once.
        lifts: Whether simple ones of them, on few numbers that meet nothing large, are computed for every sample instead, which is faster
            there. None until a pass has found some; False once a pass that did so has failed.
        fills: How many sets of `FACTORIES` make a tensor for every sample, so that the function may write into it; such a tensor has no
            Python value.
        ruled: Known ops run by their rules.
        recorded: The function calls autograd itself, so that the outputs of rules must be differentiable.
        follows: The function writes into tensors after a reshape, so that those which may share memory are followed.
        shows: The function calls autograd.Functions in the old style, which function modes have to see.
        strided: The function calls as_strided, whose result depends on how a sample lies in memory: it also runs for the first one alone.
        apart: What stands for the autograd.Functions, of those without a generated rule for vmap, whose backward has to run sample by
            sample.
    """

    copied: bool = False
    derives: bool = True
    lifts: bool | None = None
    fills: int = 0
    ruled: bool = True
    recorded: bool = False
    follows: bool = False
    shows: bool = False
    strided: bool = False
    apart: frozenset[Any] = frozenset()


class Retry(Unsupported):
    """The function does something that this pass cannot follow; a pass with other habits can.

    Attributes:
        change: The fields of `Habits` to change.
    """

    def __init__(self, message: str, **change: Any) -> None:
        super().__init__(message)
        self.change = change


# The habits with which each function's last pass succeeded: starting from the defaults would cost a failed pass again.
_known: weakref.WeakKeyDictionary[FunctionType, Habits] = weakref.WeakKeyDictionary()


def habits_of(function: Any) -> Habits:
    """The habits known for a function, or the defaults."""
    own = _function_of(function)
    return Habits() if own is None else _known.get(own, Habits())


def remember(function: Any, habits: Habits) -> None:
    """Begin with these habits when the function is called again."""
    own = _function_of(function)
    # Not `derives` and `ruled`: to turn these off slows every op down, and only one of the functions that share this code may need it.
    kept = habits._replace(derives=True, ruled=True)
    if own is not None and (own in _known or kept != Habits()):
        _known[own] = kept


def _function_of(function: Any) -> Any:
    """The Python function that a callable runs; None if it is not written in Python."""
    function = unwrapped(function)
    if type(function) is not FunctionType:
        function = inspect.getattr_static(type(function), "__call__", None)
    return function if isinstance(function, FunctionType) else None
