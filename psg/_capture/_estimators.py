"""autograd.Functions of a weight whose backward scales the cotangent entry by entry, as straight-through estimators do.

Source: Bengio et al., "Estimating or propagating gradients through stochastic neurons for conditional computation", 2013.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from psg._torch import _functions, _functorch
from psg._torch._ops import LIKENESSES, METADATA, base_name, is_torchs, tensors_of
from psg._watch._habits import Retry
from psg.rules._registry import namesake


def entries_of(function: Any, output: Tensor, position: int) -> tuple[Tensor, bool] | None:
    """The entries e of such a function: its backward takes every cotangent c to e c.

    They are found from the ops that the backward calls for one cotangent: those that `_Scaling` knows scale every cotangent in the same
    way. In case the backward also does what no function mode sees, the result is compared with that for another cotangent.

    Args:
        function: The autograd.Function.
        output: Its one output, with its history.
        position: The position of the argument that needs a gradient.

    Returns:
        The entries, and whether the backward selects some, so that zero is exact for cotangents that are not finite; None if the function
        is of another kind. On an accelerator and in a trace, where Python cannot read the comparison, they are NaN then.

    Raises:
        OutOfMemoryError: The backward does not fit.
        Retry: It has written into a tensor that it reads, so that it cannot run again.
    """
    node: Any = output.grad_fn
    if not isinstance(node, BackwardCFunction) or vars(type(node)).get("_forward_cls") is not function:
        return None
    state = _functions.state_of(function, (vars(node),))
    contents = _functions.contents_of(state)
    ones = output.detach().new_ones(output.shape)
    other = ones.clone()
    other.view(-1)[::2], other.view(-1)[::3] = -2, 4  # powers of two, so that nothing is rounded otherwise
    mode = _Scaling(ones)
    gradients: list[Any] = []
    try:
        for cotangent, watched in ((ones, mode), (other, contextlib.nullcontext())):
            with torch.no_grad(), watched:
                found = function.backward(node, cotangent)
            gradients.append((found if isinstance(found, tuple) else (found,))[position])
            _functions.put_back(contents)  # it may drop from its ctx, or a list there, what it no longer needs
    except torch.OutOfMemoryError:
        raise
    except Exception:  # what the backward raises by itself, it raises again where its gradients are pulled back
        _functions.put_back(contents)
        gradients.clear()
    if not _functions.same_state(state, _functions.state_of(function, (vars(node),))):
        raise Retry(f"the backward of {function.__name__}, an autograd.Function, writes into what it reads", derives=False)
    if not gradients:
        return None
    entries, product = gradients
    if id(entries) not in mode.scaled or not isinstance(product, Tensor) or product.shape != entries.shape:
        return None
    if _functorch.can_read_now(entries):
        return (entries, mode.selects) if torch.equal(entries * other, product) else None
    return torch.where((entries * other == product).all(), entries, torch.nan), mode.selects


class _Unknown(Exception):
    """The backward does something else with the cotangent."""


class _Scaling(TorchFunctionMode):
    """Follows what a backward makes of a cotangent by scaling its entries.

    Args:
        cotangent: The cotangent.

    Raises:
        _Unknown: It does something else with it.

    Attributes:
        scaled: What it has made of it, by id().
        selects: Whether it selects entries.
    """

    def __init__(self, cotangent: Tensor) -> None:
        super().__init__()
        self.cotangent = cotangent
        self.scaled = {id(cotangent): cotangent}
        self._zeros: dict[int, tuple[Tensor, int]] = {}  # with their versions: they may be written into
        self.selects = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func = namesake(func, kwargs)
        own = [i for i, arg in enumerate(args) if id(arg) in self.scaled]
        if len(own) != sum(id(tensor) in self.scaled for tensor in tensors_of(args, kwargs)):
            raise _Unknown  # by keyword, or in a list
        output = func(*args, **kwargs)
        if own and func in LIKENESSES:
            if base_name(func) in ("zeros_like", "new_zeros"):
                self._zeros[id(output)] = output, output._version
        elif own and func not in METADATA:
            if not is_torchs(func):
                raise _Unknown
            self._follow(base_name(func), own, args, kwargs, output)
        return output

    def _follow(self, name: str, own: list[int], args: Any, kwargs: Any, output: Any) -> None:
        """Note the output of an op on what is scaled, at these positions."""
        if name in ("mul", "multiply", "__mul__", "__rmul__"):
            fits = len(own) == 1 and not kwargs
        elif name in ("div", "divide", "true_divide", "__truediv__"):
            fits = own == [0] and not kwargs
        elif name in ("add", "__add__", "__radd__", "sub", "subtract", "__sub__"):
            fits = own == [0, 1] and kwargs.keys() <= {"alpha"}
        elif name in "neg negative __neg__ positive clone contiguous detach to view_as reshape_as expand_as type_as".split():
            fits = own == [0]
        elif name == "where":
            fits = len(args) == 3 and 0 not in own and all(i in own or self._is_zero(args[i]) for i in (1, 2))
            self.selects = True
        elif name in ("masked_fill", "masked_fill_", "__setitem__"):
            fits = own == [0] and len(args) == 3 and self._is_zero(args[2])
            self.selects = True
        else:
            fits = False
        written = name in ("masked_fill_", "__setitem__")
        target = args[0] if written else output
        if not fits or written and target is self.cotangent or not self._is_like(target):
            raise _Unknown
        self.scaled[id(target)] = target

    def _is_zero(self, arg: Any) -> bool:
        if isinstance(arg, Tensor):
            return id(arg) in self._zeros and self._zeros[id(arg)][1] == arg._version
        return isinstance(arg, (int, float)) and arg == 0

    def _is_like(self, tensor: Tensor) -> bool:
        return tensor.shape == self.cotangent.shape and tensor.dtype == self.cotangent.dtype and not _functorch.is_wrapped(tensor)
