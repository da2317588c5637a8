"""autograd.Functions without a generated rule for vmap, for all samples at once: forward and backward each run under a vmap of their own.

That is what torch's generated rule does. A function is run so if it calls only ops that psg knows to be right under vmap. One that calls
others runs sample by sample, as does one that writes into its arguments, closes over a sample, draws random numbers, or keeps more on its
ctx than tensors and plain values.
"""

import enum
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from psg import _trees
from psg._capture._ordinary import is_vmapped_right
from psg._capture._written import Unhandled
from psg._errors import UnsupportedByVmap, unwrapped
from psg._torch import _functions, _functorch, _scripts
from psg._torch._autocast import cast_of
from psg._torch._ops import REQUIRES_GRAD, draws, handlers_among, is_torchs, run_handlers, tensors_of
from psg._watch._habits import Retry
from psg._watch._marks import OfFunction
from psg.rules._registry import find_decomposition, find_leak, python_form
from psg.rules.libraries import run_rows


class _Refused(Exception):
    """A function has to run sample by sample."""


class _Ordinary(Unhandled):
    """Under vmap: runs ops that psg knows to be right there, and refuses all others, and tensors of fn's beside the function's arguments.

    Args:
        n: The number of samples.

    Raises:
        _Refused: The function calls another op, or handles an error.
    """

    refusal = _Refused

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.own = OfFunction()

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, if it may run."""
        if (cast := cast_of(func, args, kwargs)) is not None:
            return cast.run(self, func, args, kwargs)
        tensors = tensors_of(args, kwargs)
        wrapped = list(filter(_functorch.is_wrapped, tensors))
        if any(map(self.own.is_foreign, wrapped)):
            raise _Refused
        if func == REQUIRES_GRAD and wrapped:
            return _functorch.value_of(tensors[0]).requires_grad  # vmap's wrapper does not say it of an argument
        if handlers := handlers_among(types):
            return run_handlers(self, handlers, func, types, args, kwargs)
        if not wrapped:
            if is_torchs(func) and draws(func, args, kwargs):
                raise _Refused  # of which every sample draws its own
            return func(*args, **kwargs)
        output = run_rows(func, args, kwargs, _functorch.current_level(), self.n)
        if output is NotImplemented and (written_out := python_form(func) or find_decomposition(func, differentiated=False)) is not None:
            with self:
                output = written_out(*args, **kwargs)
        if output is NotImplemented:
            if not is_vmapped_right(func, args, kwargs) or find_leak(func, args, kwargs, "vmap") is not None:
                raise _Refused
            output = func(*args, **kwargs)
        self.own.claim(output)
        return output


def _refuse_script(script: Any, arguments: list[Any]) -> None:
    raise _Refused


class _Context:
    """What a function gets for ctx: under vmap, where it saves tensors of all samples."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self._psg_saved: tuple[Tensor | None, ...] = ()
        self._psg_plain: tuple[Tensor, ...] = ()
        self._psg_fills = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self._psg_saved = tensors

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        return self._psg_saved

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self._psg_plain = outputs

    def set_materialize_grads(self, value: bool) -> None:
        self._psg_fills = value

    def mark_dirty(self, *_: Tensor) -> None:
        raise _Refused


class _Plan:
    """One call of a function.

    Attributes:
        function: The function.
        batched: The places of the tensors of all samples among its arguments.
        apart: The keys of the functions that are known to need to run sample by sample.
        single: After the forward pass, whether it returned one tensor, not a tuple.
    """

    def __init__(self, function: type[Function], batched: Sequence[int], n: int, randomness: str, apart: frozenset[Any]) -> None:
        self.function, self.batched, self.n, self.randomness, self.apart = function, batched, n, randomness, apart
        self.single = True
        self._shapes: dict[int, torch.Size] = {}
        self._spec: Any
        self._leaves: list[Any]
        self._whole: list[int]  # the places in `_leaves` of tensors of all samples

    def forward(self, given: Sequence[Any], needs_input_grad: tuple[bool, ...]) -> tuple[tuple[Tensor, ...], list[Tensor], list[int], bool]:
        """The outputs, the tensors to save, the places of outputs without a derivative, whether to materialise cotangents."""
        own = _Context(needs_input_grad)
        self._shapes = {place: given[place].shape[1:] for place in self.batched}
        unique = {id(given[place]): given[place] for place in self.batched}  # the function may ask whether two are one tensor
        plain: list[int] = []
        count = 0

        def run(samples: Sequence[Tensor]) -> tuple[Tensor, ...]:
            nonlocal count
            wrappers = dict(zip(unique, samples, strict=True))
            args = [wrappers.get(id(arg), arg) if isinstance(arg, Tensor) else arg for arg in given]
            with _Ordinary(self.n), _scripts.watched(_refuse_script, inlines=True):
                if (setup := _functions.setup_of(self.function)) is None:
                    outputs = self.function.forward(own, *args)
                else:
                    outputs = self.function.forward(*args)
                    setup(own, tuple(args), outputs)
            self.single = isinstance(outputs, Tensor)
            outputs = (outputs,) if self.single else outputs
            level = _functorch.current_level()
            if not isinstance(outputs, tuple) or not all(_is_of_all(part, level) for part in outputs):
                raise _Refused  # no tensor, or one that is the same for all samples
            unlearned = set(map(id, own._psg_plain))
            plain.extend(i for i, part in enumerate(outputs) if id(part) in unlearned)
            count = len(outputs)
            return *outputs, *self._keep(own, given, level)

        found = _functorch.vmap(run, list(unique.values()), [0] * len(unique), self.n, self.randomness)
        return found[:count], list(found[count:]), plain, own._psg_fills

    def _keep(self, own: _Context, given: Sequence[Any], level: int) -> list[Tensor]:
        """Note what the function has put on its ctx; returns the tensors of all samples."""
        known = set(map(id, given))
        leaves, self._spec = _trees.flatten(vars(own), lambda part: isinstance(part, (list, dict)) and id(part) in known)
        if not all(isinstance(leaf, (Tensor, *_PLAIN)) or leaf is None or id(leaf) in known for leaf in leaves):
            raise _Refused
        self._whole = [i for i, leaf in enumerate(leaves) if _is_of_all(leaf, level)]
        tensors = [leaves[i] for i in self._whole]
        if any(_functorch.is_wrapped(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in self._whole):
            raise _Refused
        self._leaves = [None if i in self._whole else leaf for i, leaf in enumerate(leaves)]
        return tensors

    def backward(self, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
        """The gradients of the function's `count` arguments."""
        arrived = [cotangent for cotangent in cotangents if cotangent is not None]
        versions = [cotangent._version for cotangent in arrived]
        places: list[int] = []

        def run(samples: Sequence[Tensor]) -> tuple[Tensor, ...]:
            leaves, rest = list(self._leaves), iter(samples[len(saved) :])
            for i, sample in zip(self._whole, samples, strict=False):
                leaves[i] = sample
            own = _Context(())
            vars(own).update(_trees.unflatten(self._spec, leaves))
            with _Ordinary(self.n), _scripts.watched(_refuse_script, inlines=True):
                found = self.function.backward(own, *(None if cotangent is None else next(rest) for cotangent in cotangents))
            found = found if isinstance(found, tuple) else (found,)
            places.extend(place for place in self.batched if found[place] is not None and own.needs_input_grad[place])
            return tuple(found[place].sum_to_size(self._shapes[place]) for place in places)

        gradients = _functorch.vmap(run, [*saved, *arrived], [0] * (len(saved) + len(arrived)), self.n, self.randomness)
        if versions != [cotangent._version for cotangent in arrived]:
            raise _Refused  # autograd may give the same tensor to other nodes
        by_place = dict(zip(places, gradients, strict=True))
        return [by_place.get(place) for place in range(count)]


_PLAIN = (
    *(int, float, complex, str, bytes, slice, enum.Enum, type, FunctionType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


def _is_of_all(leaf: Any, level: int) -> bool:
    """Whether this is a tensor that the vmap at this level batches."""
    return isinstance(leaf, Tensor) and _functorch.is_batched(leaf, level)


class _Vectorised(Function):
    """A function of all samples; its node in the graph."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *args: Any) -> Any:
        ctx.plan = plan
        outputs, saved, plain, fills = plan.forward(args, ctx.needs_input_grad[1:])
        operands = [args[place] for place in plan.batched]
        outputs = tuple(output.clone() if _functorch.shares_memory(output, operands) else output for output in outputs)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(outputs[i] for i in plain))
        ctx.set_materialize_grads(fills)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        try:
            return None, *ctx.plan.backward(ctx.saved_tensors, cotangents, len(ctx.needs_input_grad) - 1)
        except (torch.OutOfMemoryError, UnsupportedByVmap):
            raise
        except Exception as error:
            function = ctx.plan.function
            why = f"the backward of {function.__name__}, an autograd.Function, raises {type(error).__name__} under vmap"
            raise Retry(why, apart=ctx.plan.apart | {key_of(function)}) from error


def key_of(function: type[Function]) -> Any:
    """What stands for a function in `Habits.apart`: the code of its backward, for fn may make the class anew in every call."""
    return getattr(unwrapped(_functions.backward_of(function)), "__code__", function.__qualname__)


def apply(function: type[Function], args: Sequence[Any], batched: Sequence[int], n: int, randomness: str, apart: frozenset[Any]) -> Any:
    """Call a function for all samples, outside of vmap.

    Args:
        function: The function.
        args: Its arguments, with the samples in dim 0 of those at the places `batched`.
        batched: These places.
        n: The number of samples.
        randomness: As vmap takes it.
        apart: The keys of the functions that are known to need to run sample by sample.

    Returns:
        Its output, with the samples in dim 0: a tensor or a tuple of tensors.

    Raises:
        Exception: The function has to run sample by sample.
    """
    plan = _Plan(function, batched, n, randomness, apart)
    outputs = _Vectorised.apply(plan, *args)
    return outputs[0] if plan.single else outputs
