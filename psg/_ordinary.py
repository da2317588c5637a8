"""Functions of torch's that nothing but vmap has to treat: most of those that fn calls.

A pass asks every table of psg's about a function. For these all tables have the same answer, found once.
"""

import functools
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

from torch import Tensor
from torch._functorch.autograd_function import custom_function_call

from psg._higher_order import HIGHER_ORDER
from psg._ops import CONVERSIONS, DIFFERENTIATING, FACTORIES, LIKENESSES, LOCATING, MASKED, PREDICATES, is_torchs
from psg._outside import REQUIRING
from psg.rules._registry import is_registered
from psg.rules.embedding import LOOKUPS
from psg.rules.leaks import UPDATING


def is_ordinary(func: Any, tensors: Sequence[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether a pass under vmap runs a call as it is, if it meets no lifted value and writes into nothing.

    Args:
        func: The function.
        tensors: The tensors among its arguments.
        kwargs: Its keyword arguments.
    """
    if not _is_plain(func):
        return func is Tensor.__getitem__ and len(tensors) == 1  # an index without tensors is no mask
    return not is_registered(func) and "requires_grad" not in kwargs


_KINDS = BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType

_TREATED = {
    *(*PREDICATES, *DIFFERENTIATING, *REQUIRING, Tensor.register_hook, custom_function_call),
    *(*HIGHER_ORDER, *LOOKUPS, *UPDATING, *LIKENESSES, *CONVERSIONS, *MASKED, *LOCATING),
    *(factory for kind in FACTORIES for factory in kind),
}


@functools.cache
def _is_plain(func: Any) -> bool:
    return isinstance(func, _KINDS) and is_torchs(func) and func not in _TREATED
