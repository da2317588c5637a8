"""Functions of torch's that nothing but vmap has to treat: most of those that fn calls.

A pass asks every table of psg's about a function. For these all tables have the same answer, found once but for rules, which users add.
"""

from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call

from psg._torch._cached import cached
from psg._torch._higher_order import HIGHER_ORDER
from psg._torch._ops import (
    ARRAYS,
    CONVERSIONS,
    DETACHING,
    DIFFERENTIATING,
    FACTORIES,
    LIKENESSES,
    LOCATING,
    MASKED,
    MEMORY_MARKS,
    METADATA,
    REQUIRING,
    chooses,
    draws,
    is_torchs,
    may_draw,
    may_write,
    target_of,
    tensors_of,
)
from psg._watch._writes import may_copy
from psg.rules._kernels import BATCH_NORMS, RECURRENT
from psg.rules._registry import REWRITTEN, find_rule, may_rewrite, namesake
from psg.rules.embedding import LOOKUPS
from psg.rules.leaks import UPDATING

FUNCTIONS = {BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType}
"""The types of torch's functions and methods. Attributes of tensors, and ops of ATen and of libraries, have others."""


def is_ordinary(func: Any, tensors: Sequence[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether a pass under vmap runs a call as it is, if it meets no lifted value and writes into nothing.

    Args:
        func: The function.
        tensors: The tensors among its arguments.
        kwargs: Its keyword arguments.
    """
    if not _is_plain(func):
        return func is Tensor.__getitem__ and len(tensors) == 1  # an index without tensors is no mask
    return func not in REWRITTEN and find_rule(func) is None and "requires_grad" not in kwargs


def is_pure(func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor], others: Sequence[Any], differentiated: bool) -> bool:
    """Whether a call without sparse tensors only reads its arguments and draws no random numbers. Its rule is not asked here.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        tensors: The tensors among its arguments.
        others: Arguments that are neither tensors nor plain values.
        differentiated: Whether the pass is differentiated.
    """
    if others or not (_is_plain(func) or chooses(func, args, kwargs)):
        return func is Tensor.__getitem__ and len(tensors) == 1 and all(map(_is_plain_slice, others))
    if func in REWRITTEN and may_rewrite(func, tensors, kwargs, differentiated) or kwargs and not _NOTED.isdisjoint(kwargs):
        return False
    return reads(func) and not may_draw(func) or target_of(func, args, kwargs) is None and not draws(func, args, kwargs)


def is_vmapped_right(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether vmap alone runs a call right that has no decomposition and no leak; it may write."""
    func = namesake(func, kwargs)
    if func in _COPYING:
        return "requires_grad" not in kwargs
    if not (_is_plain(func) or chooses(func, args, kwargs)) or func in RECURRENT or func in BATCH_NORMS:
        return False
    return _NOTED.isdisjoint(kwargs) and not draws(func, args, kwargs)


_COPYING = {
    *(*METADATA, *LIKENESSES, Tensor.__getitem__, torch.clone, Tensor.clone),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
}
"""What tells of a tensor, and takes or copies its entries as vmap does for each sample."""

_NOTED = {"out", "requires_grad"}
"""Options by which a call makes, or writes into, a tensor that a pass has to know of."""


def _is_plain_slice(item: Any) -> bool:
    return type(item) is slice and not tensors_of((item.start, item.stop, item.step), {})


@cached
def reads(func: Any) -> bool:
    """Whether a function does no more than read its arguments; what rules, decompositions and leaks make of it is not asked here."""
    return _is_plain(func) and not may_write(func) and not may_copy(func)


_ELSEWHERE = {
    *(*MEMORY_MARKS, *DIFFERENTIATING, *REQUIRING, *DETACHING, Tensor.register_hook, custom_function_call),
    *(*HIGHER_ORDER, *LOOKUPS, *UPDATING, *CONVERSIONS, *ARRAYS, *MASKED, *LOCATING),
    *(factory for kind in FACTORIES for factory in kind),
}


@cached
def _is_plain(func: Any) -> bool:
    return type(func) in FUNCTIONS and is_torchs(func) and func not in _ELSEWHERE
