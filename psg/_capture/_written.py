"""Backward passes that users have written: of autograd.Functions, and of ops of torch.library.

No mode that watches fn sees what they call. Where they run for all samples at once, or on cotangents that rules and vmap have laid out in
memory, they must not call what gives another result there than in a loop.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call
from torch.overrides import TorchFunctionMode

from psg._errors import Unsupported, UnsupportedByVmap
from psg._torch import _autograd, _functions, _functorch
from psg._torch._ops import METADATA, is_torchs, name_of, operands_of, target_of
from psg._watch._writes import may_copy, written
from psg.rules._registry import find_decomposition, find_leak
from psg.rules.leaks import OWN_GENERATOR


def has_written_backward(func: Any) -> bool:
    """Whether the backward pass of this op may be one that users have written."""
    return func is custom_function_call or not is_torchs(func)


class Unhandled(TorchFunctionMode):
    """Notes the errors that ops raise where no mode that watches fn sees them: inside autograd.Functions, and in backward passes.

    Raises:
        UnsupportedByVmap: There was one that users' code has handled: it has taken a path that no sample may take in a loop.
    """

    refusal: type[Exception] = UnsupportedByVmap
    failure: str | None = None  # the message alone: the error itself would keep all frames alive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self.run(func, types, args, kwargs or {})
        except Exception as error:
            self.failure = str(error)
            raise

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op."""
        if func is not custom_function_call:
            return func(*args, **kwargs)
        with self:  # it comes back once for each transform, and then calls the function
            return _functions.call_within(args, kwargs)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self.failure is not None:
            raise self.refusal(f"an autograd.Function, or a hook, handles an error: {self.failure}")


def run_watched(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call of an autograd.Function."""
    with Unhandled():
        return func(*args, **kwargs)


class WrittenBackward(Unhandled):
    """Watches such backward passes: refuses writes into reshapes, and under vmap ops that it gets wrong, where it cannot rewrite them.

    `flatten` and its kin return a view where the layout in memory allows one, and else a copy, into which a write is lost. A cotangent may
    be laid out otherwise than in a loop.

    Args:
        is_on: Whether it does; otherwise ops run as they are, and only their errors are noted.

    Attributes:
        has_begun: Whether a backward pass has begun, or fn is still running.

    Raises:
        Unsupported: A backward pass reads what fn has computed, and not saved for it.
        UnsupportedByVmap: A backward pass calls what only a loop gets right, or handles an error.
    """

    def __init__(self, is_on: bool = True) -> None:
        super().__init__()
        self.is_on = self.has_begun = is_on
        self._reshapes: list[tuple[Any, Any]] = []  # weak references to the storages of a tensor and of its reshape

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, if it may run."""
        if self.has_begun and func is torch.autograd.grad and kwargs == _OF_TRANSFORM | {"create_graph": kwargs["create_graph"]}:
            outputs, inputs = args
            ones = [torch.ones_like(output) for output in outputs]
            with self:
                return _autograd.pulled(outputs, inputs, ones, kwargs["retain_graph"], kwargs["create_graph"])
        if not self.is_on or func in METADATA:
            return func(*args, **kwargs)
        tensors, others = operands_of(args, kwargs)
        target = target_of(func, args, kwargs)
        if target is not None:
            self._write(name_of(func), written(target))
        if any(_functorch.is_wrapped(tensor) and _functorch.level_of(tensor) > _functorch.current_level() for tensor in tensors):
            raise Unsupported("a backward pass reads a tensor of fn's that it finds elsewhere than on its ctx")
        if any(isinstance(other, torch.Generator) for other in others) and _functorch.vmap_depth():
            raise UnsupportedByVmap(f"in a backward pass: {OWN_GENERATOR}")
        if any(map(_functorch.is_vmapped, tensors)):
            if (decompose := find_decomposition(func, differentiated=False)) is not None:
                with self:
                    output = decompose(*args, **kwargs)
                if output is not NotImplemented:
                    return output
            if (reason := find_leak(func, args, kwargs, "vmap")) is not None:
                raise UnsupportedByVmap(f"in a backward pass: {reason}")
        output = func(*args, **kwargs)
        if may_copy(func) and isinstance(output, Tensor):
            self._reshapes.append((_functorch.storage_of(tensors[0]), _functorch.storage_of(output)))
        return output

    def _write(self, op: str, tensors: Iterable[Tensor]) -> None:
        for storage in map(_functorch.storage_of, tensors if self._reshapes else ()):
            for pair in self._reshapes:
                if storage in pair and not any(side.expired() for side in pair):
                    raise UnsupportedByVmap(
                        f"the backward pass of an autograd.Function, or of an op of torch.library, calls {op} to write into a tensor of "
                        "which there is a reshape (also by flatten or contiguous), or into the reshape: whether the two share memory "
                        "depends on the layout of the cotangent, which is another in a loop. Write before the reshape, or into a clone."
                    )


_OF_TRANSFORM = {
    "grad_outputs": None,
    **dict.fromkeys(("retain_graph", "is_grads_batched", "materialize_grads"), False),
    **dict.fromkeys(("only_inputs", "allow_unused"), True),
}
"""The options with which torch.func.grad calls autograd, beside `create_graph`."""
