"""autograd.Functions for which torch has generated no rule for vmap: they have none, one of their own, or the old style's `forward(ctx)`.

Below vmap autograd differentiates what a rule of the user's own calls, which need not be the function. So psg runs such a function once if
it is called on parameters alone, and sample by sample elsewhere. torch refuses the old style inside transforms before any function mode
can see the call; `shown` makes it an op that modes see.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call
from torch.autograd.function import Function, _is_setup_context_defined

_APPLY = vars(Function)["apply"]

_is_shown: ContextVar[bool] = ContextVar("psg_functions_shown", default=False)
_lock = threading.Lock()
_contexts = 0


def is_refusal(error: Exception) -> bool:
    """Whether torch has raised this error because of a function in the old style."""
    return "must override the setup_context" in str(error)


def lacks_batching(func: Any, args: Any) -> bool:
    """Whether this is the call of such a function."""
    return func is custom_function_call and not args[0].generate_vmap_rule


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """A context in which function modes see the calls of functions in the old style inside transforms, as `custom_function_call`."""
    global _contexts
    token = _is_shown.set(True)
    with _lock:
        _contexts += 1
        Function.apply = classmethod(_apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            if not _contexts:
                Function.apply = _APPLY
        _is_shown.reset(token)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`. torch's own functions (reentrant checkpoints, modules' backward hooks) depend on the graph around them."""
    refused = torch._C._are_functorch_transforms_active() and not _is_setup_context_defined(cls.setup_context)
    if _is_shown.get() and refused and cls.__module__.split(".")[0] not in ("torch", "psg"):
        return custom_function_call(cls, *args, **kwargs)
    return _APPLY.__get__(None, cls)(*args, **kwargs)
