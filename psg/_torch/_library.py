"""Ops of psg's own. Tracers and compilers see each as one op, whatever it does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("psg", "FRAGMENT")


def opaque(name: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> Any:
    """The op psg::`name`, without a derivative. `torch.library.custom_op` would make each call of it 13 microseconds slower.

    Args:
        name: Its name.
        run: The function, of annotated arguments. It writes into none of them and returns none.
        fake: Gives results of the same shapes, strides and dtypes, for tensors without values.
        tags: What compilers need to know.
    """
    _library.define(name + torch.library.infer_schema(run, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"psg::{name}", fake)
    return getattr(torch.ops.psg, name).default
