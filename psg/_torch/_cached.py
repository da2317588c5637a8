"""A cache of what is said of functions, which keeps none alive: fn may define some in each call, with large tensors in their closures."""

import contextlib
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

_T = TypeVar("_T")


def cached(find: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Decorate a function of a function. What it returns must not refer to its argument, but may be that itself."""
    return _Table(find).__getitem__  # without a frame of Python: no slower than what functools.cache returns


class _Table(dict[Any, Any]):
    """What was found for functions of torch's own, by function; and for those of users while they are alive."""

    def __init__(self, find: Callable[[Any], Any]) -> None:
        super().__init__()
        self._find = find
        self._users: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __missing__(self, func: Any) -> Any:
        try:
            return self._users[func]
        except (KeyError, TypeError):
            pass  # it is not known yet, or cannot be weakly referenced
        found = self._find(func)
        if _is_permanent(func):
            self[func] = found
        elif found is not func:
            with contextlib.suppress(TypeError):
                self._users[func] = found
        return found


def _is_permanent(func: Any) -> bool:
    """Whether torch or Python itself keeps a function for as long as the process runs."""
    if isinstance(func, (BuiltinFunctionType, MethodWrapperType)):  # if bound, the function of an object, which it would keep alive
        return func.__self__ is None or isinstance(func.__self__, (ModuleType, GetSetDescriptorType))
    if isinstance(func, FunctionType):
        # Decorators of torch's make functions of its code with the user's name, functools.wraps those of the user's code with torch's.
        return all((name or "").partition(".")[0] == "torch" for name in (func.__module__, func.__globals__.get("__name__")))
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return func.__module__ == "torch._ops.aten"  # those of other libraries can be defined anew
    return isinstance(func, (HigherOrderOperator, MethodDescriptorType, WrapperDescriptorType))
