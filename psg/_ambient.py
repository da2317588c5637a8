"""What surrounds a call: autocast is for fn alone, and inference mode for neither.

Under autocast, what psg computes around fn keeps the precision that it states. Under inference mode nothing could be differentiated.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


def keep(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the autocast settings that hold now, wherever it is called."""
    enabled = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    if not enabled:
        return fn

    @functools.wraps(fn)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device in enabled:
                stack.enter_context(torch.autocast(device, dtypes[device], cache_enabled=cache))
            return fn(*args, **kwargs)

    dtypes = {device: torch.get_autocast_dtype(device) for device in enabled}
    cache = torch.is_autocast_cache_enabled()
    return kept


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Run the body without autocast and outside of inference mode."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def usable(leaf: Any) -> Any:
    """A tensor made under inference mode as one that autograd can use; everything else as it is. Call it outside of that mode."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_inference() else leaf


def never(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to run without autocast."""

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with off():
            return function(*args, **kwargs)

    return plain
