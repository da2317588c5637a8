"""The capture pass: one forward, one backward, no weight gradients, any function.

1. `fn` runs once under `torch.func.vmap`, so samples cannot interact.
2. Every parameter enters it *lifted*: a batched tensor over `param.expand(n, ...)` that is an autograd leaf. Whatever `fn` does with
   it, its gradient comes out per sample. This is the semantics; it needs no rule.
3. A function mode, the router, watches the calls. An op that has a rule and gets a lifted parameter runs by the rule instead: once, on
   the physical batch and the one unexpanded parameter, and its output is *tapped*.
4. An op on parameters alone (a transpose, a cast, W + B A) runs once, on the unexpanded values; its result is lifted in turn.
5. One `torch.autograd.grad` of the losses for the taps and the leaves. `allow_unused` tells exactly which of them were used.
6. What arrives at a tap is a factor; at a leaf it is dense. What belongs to a derived value is pulled back to the parameters. A large
   cotangent is taken as soon as it arrives: what a transform makes of it is often small, and the memory serves the rest of the pass.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psg import _copies, _functorch, _random
from psg._backward import Backward
from psg._errors import PsgError, Unsupported
from psg._habits import Habits, Retry, habits_of, remember
from psg._lifted import Lifted, pull_back
from psg._ops import FACTORIES
from psg._router import Router
from psg.factors import Factor


class Captured(NamedTuple):
    """What one pass gives.

    Attributes:
        outputs: What the function returned, samples in dim 0, without autograd history.
        factors: One for each parameter.
        uses: For each parameter the ops that met it, with the way each went.
        nbytes: What the factors took when they were found.
    """

    outputs: tuple[Tensor, ...]
    factors: list[Factor]
    uses: list[list[str]]
    nbytes: int = 0


class Task(NamedTuple):
    """What a pass is to run.

    Attributes:
        function: From the tensors of one sample, and whether to copy whatever else it is given, to a tuple of tensors, the first of which
            is the loss.
        tensors: The function's arguments.
        beside: What else it is given, the same for all samples.
        in_dims: For each tensor the dimension of the samples, or None.
        params: The positions among `tensors` of those to differentiate.
        n: The number of samples, at least 1.
        randomness: As in torch.func.vmap.
        look: Called with every op of the function and its arguments.
        settles: Whether factors are settled before the pass is over.
        owner: The user's function, of which it is remembered what the pass that could follow it had to expect.
    """

    function: Callable[[Sequence[Tensor], bool], tuple[Tensor, ...]]
    tensors: Sequence[Tensor]
    beside: Sequence[Tensor]
    in_dims: Sequence[int | None]
    params: Sequence[int]
    n: int
    randomness: str
    look: Callable[[Any, Any], None]
    settles: bool
    owner: Any


def capture(task: Task) -> Captured:
    """Run the pass described at the top of this file.

    Args:
        task: What to run.

    Returns:
        The outputs and the factors.

    Raises:
        Unsupported: The function does what lifting cannot follow.
        Diverged: The function goes different ways for different samples.
        RuntimeError: What vmap cannot run, and the function's own errors.
    """
    tensors = [tensor.detach() for tensor in task.tensors]
    habits = habits_of(task.owner)
    state = _random.get_state(tensors)
    while True:
        forget = _functorch.attempt()
        try:
            # Copies of each pass's own: one that failed may have written into those it had.
            given = [
                _copies.sample_by_sample(tensor, dim) if habits.copied and i not in task.params else tensor.detach()
                for i, (tensor, dim) in enumerate(zip(tensors, task.in_dims, strict=True))
            ]
            captured, differentiates = _one_pass(task._replace(tensors=given), habits)
            remember(task.owner, habits._replace(recorded=differentiates))
            return captured
        except Retry as retry:
            habits = habits._replace(**retry.change)
        except RuntimeError as error:
            if habits.fills == len(FACTORIES) or isinstance(error, (PsgError, torch.OutOfMemoryError)):
                raise
            # The likeliest cause that can be helped: the function writes what depends on the sample into a tensor that it made itself,
            # which under vmap is one for all samples. Give every sample its own.
            habits = habits._replace(fills=habits.fills + 1)
        forget()
        _random.set_state(state)  # whatever the pass that failed has drawn, the next is to draw again


def _one_pass(task: Task, habits: Habits) -> tuple[Captured, bool]:
    """What the pass gives, and whether the function called autograd."""
    tensors, dims, n = list(task.tensors), list(task.in_dims), task.n
    data = [pair for i, pair in enumerate(zip(tensors, dims, strict=True)) if i not in task.params]
    inputs = [] if habits.copied else [*(tensor for tensor, _ in data), *task.beside]
    noncontiguous = not habits.copied and any(dim is not None and not tensor.movedim(dim, 0).is_contiguous() for tensor, dim in data)
    lifted = [Lifted.parameter(tensors[position], dims[position], n) for position in task.params]
    for position, value in zip(task.params, lifted, strict=True):
        tensors[position], dims[position] = value.leaf, 0

    mode = Router(n, lifted, inputs, noncontiguous, habits, task.look)

    def watched(samples: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mode.start(samples, [samples[position] for position in task.params])
        try:
            with mode:
                outputs = task.function(samples, habits.copied)
        except RuntimeError as error:
            if not mode.constants or isinstance(error, (PsgError, torch.OutOfMemoryError)):
                raise
            raise Retry("a constant computed from parameters may have been written into", derives=False) from error
        if mode.failure is not None:
            # The function has handled an error that may be vmap's or ours, and gone a way that no sample alone would go.
            raise Unsupported(f"the function handles an error: {mode.failure}")
        return outputs

    with torch.enable_grad():
        outputs = _functorch.vmap(watched, tensors, dims, n, task.randomness)
    backward = Backward(mode.values, n, task.settles)
    backward.run(outputs[0], mode.taps)
    try:
        pull_back(mode.values, lifted, n)
    except RuntimeError as error:
        if not any(value.is_a_function_s_own for value in mode.values):
            raise
        raise Retry("the backward of an autograd.Function may close over the sample", derives=False) from error
    factors = [value.factor(n) for value in lifted]
    # What fn returns of a parameter as it is must not be the caller's own memory.
    outputs = tuple(output.detach().clone() if _functorch.memory_of(output) in mode.owned else output.detach() for output in outputs)
    return Captured(outputs, factors, [value.uses for value in lifted], backward.nbytes), mode.differentiates
