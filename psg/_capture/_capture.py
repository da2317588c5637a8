"""The capture pass: one forward, one backward, no weight gradients, any function.

1. `fn` runs once under `torch.func.vmap`, so samples cannot interact.
2. Every parameter enters vmap *lifted*: a batched tensor over `param.expand(n, ...)` that is an autograd leaf. Whatever `fn` does with
   it, its gradient comes out per sample. This is the semantics; no rule is needed for it.
3. A function mode, the router, watches the calls. An op that has a rule and gets a lifted parameter runs by the rule instead: once, on
   the physical batch and the one unexpanded parameter, and its output is *tapped*.
4. An op on parameters alone (a transpose, a cast, W + B A) runs once, on the unexpanded values; its result is lifted in turn. (But if these
   are few numbers, and meet nothing large, later calls lift the op too, which is faster.)
5. One `torch.autograd.grad` differentiates the losses for the taps and the leaves. `allow_unused` tells exactly which of them were used.
6. The cotangent at a tap gives a factor, that at a leaf a dense gradient. Gradients of derived values are pulled back to the parameters.
   A large cotangent is used as soon as it arrives: what a transform makes of it is often small, and the rest of the pass needs the memory.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from psg._call import Call
from psg._capture._backward import Backward
from psg._capture._lifted import Lifted, pull_back
from psg._capture._router import Router
from psg._capture._strided import View
from psg._capture._written import WrittenBackward
from psg._errors import PsgError, StateError, Unsupported, UnsupportedByVmap
from psg._torch import _autograd, _functions, _functorch, _random, _scripts
from psg._torch._ops import FACTORIES
from psg._watch import _copies
from psg._watch._effects import Attempt
from psg._watch._habits import Habits, Retry, habits_of, remember
from psg.factors import Factor


class Captured(NamedTuple):
    """The result of one pass.

    Attributes:
        outputs: What the function returned, samples in dim 0; with a history if the call needs a derivative.
        factors: One for each parameter.
        uses: For each parameter the ops that used it, each with its path (rule, lifted or derived).
        freed: How many bytes settling the factors has freed.
    """

    outputs: tuple[Tensor, ...]
    factors: list[Factor]
    uses: list[list[str]]
    freed: int = 0

    def map(self, function: Callable[[Tensor], Tensor]) -> "Captured":
        """The same with `function` applied to every tensor."""
        return self._replace(outputs=tuple(map(function, self.outputs)), factors=[factor.map(function) for factor in self.factors])


Function = Callable[[Sequence[Tensor], bool], tuple[Tensor, ...]]
"""A call's function, given its tensors and whether to copy those among its keyword arguments: the loss or losses, then other tensors."""


def capture(call: Call, start: _random.Start, function: Function, alone: Callable[[], Sequence[View]]) -> Captured:
    """Run the pass described at the top of this file.

    Args:
        call: What to run.
        start: Where the call begins, for passes that are given up.
        function: Calls its function.
        alone: Calls it on the first sample; returns the views that as_strided makes there.

    Returns:
        The outputs and the factors.

    Raises:
        Unsupported: The function does something that lifting cannot follow.
        Diverged: The function turns a tensor into a Python value that differs from sample to sample.
        StateError: The function has written into an argument unseen.
        RuntimeError: vmap cannot run an op, or the function raises one itself.
    """
    known = habits = habits_of(call.fn)
    views: Sequence[View] | None = None
    differentiated = call.needs_derivative
    if differentiated:
        habits = habits._replace(recorded=False)  # such a pass refuses functions that call autograd, and rules for them have no history
    while True:
        if habits.strided and views is None:
            views = alone()
            start.go_back()
        try:
            # Every pass gets fresh copies: a failed pass may have written into its own.
            filled = [tensor for tensor in call.tensors if tensor.numel()]  # a write into the others changes nothing
            before = [tensor._version for tensor in filled]
            with Attempt(), _functorch.gradient_level() as level:
                given = _with_histories(call, level) if differentiated else [tensor.detach() for tensor in call.tensors]
                if habits.copied:
                    given = [
                        tensor if i in call.tensor_params else _copies.sample_by_sample(tensor, dim)
                        for i, (tensor, dim) in enumerate(zip(given, call.tensor_dims, strict=True))
                    ]
                captured, better = _one_pass(call, function, given, habits, start.state, views or ())
                captured = captured.map(level.unwrap) if level.is_added else captured
                if before != [tensor._version for tensor in filled]:
                    raise StateError(
                        "fn writes into an argument where psg does not see it, in an autograd.Function say. Write into a clone of it."
                    )
            if habits is not known or better != known:
                remember(call.fn, better)
            return captured
        except Retry as retry:
            habits = habits._replace(**retry.change)
            # At once: what the failed pass has left in a cache of fn's may keep the next from succeeding, until the user clears it.
            remember(call.fn, habits)
        except RuntimeError as error:
            if isinstance(error, (PsgError, torch.OutOfMemoryError)) or not habits.lifts and habits.fills == len(FACTORIES):
                raise
            # The likeliest causes that another pass can cure: vmap cannot run an op on numbers that could be computed once, or the function
            # writes values that depend on the sample into a tensor that it made itself, which all samples share under vmap. Make one for
            # every sample.
            habits = habits._replace(lifts=False) if habits.lifts else habits._replace(fills=habits.fills + 1)
        start.go_back()


def _with_histories(call: Call, level: _functorch.gradient_level) -> list[Tensor]:
    """The call's tensors with their histories; each parameter has one, which may lead nowhere, for by it a rule tells such a pass."""
    tensors = list(call.tensors)
    for i in call.tensor_params:
        tensors[i] = level.wrap(tensors[i])
        if not tensors[i].requires_grad:
            _autograd.own_leaf(tensors[i])
    return [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]


def _refuse(script: Any, arguments: list[Any]) -> None:
    # Once TorchScript has optimised it for training, its outputs have no history under vmap where only autograd records (2.13).
    raise Unsupported(f"fn calls {script.name}, which is TorchScript: use it before torch.jit has compiled it")


def _refuse_old_style(habits: Habits) -> NoReturn:
    if not habits.shows:
        raise Retry("fn calls an autograd.Function in the old style", shows=True)
    raise Unsupported(_functions.UNSEEN)


def _run(function: Function, samples: Sequence[Tensor], mode: Router) -> tuple[Tensor, ...]:
    """Call the function under the router, which must have seen all that the outputs depend on."""
    habits = mode.habits
    shown = _functions.shown() if habits.shows else contextlib.nullcontext()
    try:
        with mode, _scripts.watched(_refuse, inlines=True), _functions.noting(mode), shown:
            outputs = function(samples, habits.copied)
    except RuntimeError as error:
        if _functions.is_refusal(str(error)):
            _refuse_old_style(habits)
        if not mode.constants or isinstance(error, (PsgError, torch.OutOfMemoryError)):
            raise
        raise Retry("a constant computed from parameters may have been written into", derives=False) from error
    if mode.failure is not None:
        if _functions.is_refusal(mode.failure):
            _refuse_old_style(habits)
        # The function caught an error that may be vmap's or psg's, and took a path that no sample would take in a loop.
        raise Unsupported(f"the function handles an error: {mode.failure}")
    mode.own.owns(outputs)  # raises if fn returns what it has kept from an earlier call
    mode.aliases.read("the result", outputs)
    return outputs


def _one_pass(
    call: Call, function: Function, tensors: list[Tensor], habits: Habits, state: _random.State, views: Sequence[View]
) -> tuple[Captured, Habits]:
    """Run one pass on these tensors, from this state of the generators; returns its result, and the habits for the next call's."""
    dims, n = list(call.tensor_dims), call.n
    data = [tensor for i, tensor in enumerate(tensors) if i not in call.tensor_params]
    inputs = [] if habits.copied else [*data, *call.keyword_tensors]
    laid_out = [
        tensor
        for tensor, dim in zip(tensors, dims, strict=True)
        if dim is None or (tensor if dim == 0 else tensor.movedim(dim, 0)).is_contiguous()
    ]
    lifted = [Lifted.parameter(tensors[position], dims[position], n) for position in call.tensor_params]
    for position, value in zip(call.tensor_params, lifted, strict=True):
        tensors[position], dims[position] = value.leaf, 0

    apart = call.randomness == "different" and n > 1
    mode = Router(call, lifted, inputs, laid_out, habits, state if apart else None, views)

    def watched(samples: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mode.start(samples, [samples[position] for position in call.tensor_params])
        return _run(function, samples, mode)

    try:
        with torch.enable_grad(), mode.restoring():
            outputs = _functorch.vmap(watched, tensors, dims, n, call.randomness)
        lifts = (mode.prefers_lifting() or None) if habits.lifts is None else habits.lifts
        if (mode.differentiates, lifts) != (habits.recorded, habits.lifts):
            habits = habits._replace(recorded=mode.differentiates, lifts=lifts)
        written = WrittenBackward() if mode.has_written else contextlib.nullcontext()
        backward = Backward(mode.values, n, call.kept == "reductions", mode.differentiated, written)
        backward.run(outputs[0], mode.taps, _autograd.sides_of_functions(outputs[0]) if mode.has_functions else [])
    finally:
        # Those of a pass that fails: a tap's node may hold the mode, by a `LinearOp`, in a cycle that no garbage collector sees.
        mode.taps.clear()
    try:
        pull_back(mode.values, lifted, n)
    except (UnsupportedByVmap, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        if not any(value.is_from_autograd_function for value in mode.values):
            raise
        raise Retry("the backward of an autograd.Function may close over the sample", derives=False) from error
    factors = [value.factor(n) for value in lifted]
    return Captured(call.apart(outputs, mode.differentiated), factors, [value.uses for value in lifted], backward.freed), habits
