"""The capture pass: one forward, one backward, no weight gradients, any function.

1. `fn` runs once under `torch.func.vmap`, so samples cannot interact.
2. Every parameter enters it *lifted*: a batched tensor over `param.expand(n, ...)` that is an autograd leaf. Whatever `fn` does with
   it, its gradient comes out per sample. This is the semantics; it needs no rule.
3. A function mode watches the calls. An op that has a rule and gets a lifted parameter runs by the rule instead: once, on the physical
   batch and the one unexpanded parameter, and its output is *tapped*.
4. An op on parameters alone (a transpose, a cast, W + B A) runs once, on the unexpanded values; its result is lifted in turn.
5. One `torch.autograd.grad` of the losses for the taps and the leaves. `allow_unused` tells exactly which of them were used.
6. What arrives at a tap is a factor; at a leaf it is dense. What belongs to a derived value is pulled back to the parameters. A large
   cotangent is taken as soon as it arrives: what a transform makes of it is often small, and the memory serves the rest of the pass.
"""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psg import _functorch, _random, _trees
from psg._backward import Backward
from psg._carries import Call, part_of
from psg._errors import PsgError, Unsupported
from psg._inside import Product
from psg._lifted import Lifted, Watch, pull_back, with_history
from psg._ops import (
    CONSTANTS,
    CONVERSIONS,
    FACTORIES,
    GRAD_FN,
    IS_LEAF,
    LIKE_ANOTHER,
    LIKENESSES,
    LOCATING,
    MASKED,
    METADATA,
    PREDICATES,
    Node,
    Place,
    builder_at,
    call_key,
    derives,
    name_of,
    operands_of,
    place_name,
    places_of,
    replace_at,
    substitute,
    target_of,
)
from psg.factors import Factor
from psg.rules import _registry
from psg.rules.leaks import OWN_GENERATOR, refuse_updates
from psg.rules.rows import LOOKUPS


class Diverged(PsgError):
    """The function turned a tensor into a Python value that is not the same for all samples.

    Attributes:
        groups: The samples that agree, as one index tensor for each value.
    """

    def __init__(self, op: str, labels: Tensor) -> None:
        super().__init__(f"{op} gives different Python values for different samples")
        count = int(labels.max()) + 1
        self.groups = [(labels == label).nonzero()[:, 0] for label in range(count)]


class _Retry(Unsupported):
    """The function does what this pass did not expect; another can follow it.

    Attributes:
        change: Fields of its `_Habits`.
    """

    def __init__(self, message: str, **change: Any) -> None:
        super().__init__(message)
        self.change = change


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
        function: From the tensors of one sample to a tuple of tensors, the first of which is the loss.
        tensors: The function's arguments.
        in_dims: For each tensor the dimension of the samples, or None.
        params: The positions among `tensors` of those to differentiate.
        n: The number of samples, at least 1.
        randomness: As in torch.func.vmap.
        look: Called with every op of the function and its arguments.
        settle: What may be made of a factor before the pass is over; None to leave all as they are found.
        owner: The user's function, of which it is remembered what the pass that could follow it had to expect.
    """

    function: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    tensors: Sequence[Tensor]
    in_dims: Sequence[int | None]
    params: Sequence[int]
    n: int
    randomness: str
    look: Callable[[Any, Any], None]
    settle: Callable[[Factor], Factor] | None
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
    code = _code_of(task.owner)
    habits = _Habits() if code is None else _known.get(code, _Habits())
    state = _random.get_state(tensors)
    while True:
        forget = _functorch.attempt()
        try:
            # Copies of each pass's own: one that failed may have written into those it had.
            given = [tensor.clone() if habits.copied and i not in task.params else tensor.detach() for i, tensor in enumerate(tensors)]
            captured, differentiates = _one_pass(task._replace(tensors=given), habits)
            if code is not None and (code in _known or habits.copied or habits.fills or differentiates):
                # What slows every op down is found out anew: code may be shared by functions of which one alone needs it.
                _known[code] = _Habits(copied=habits.copied, fills=habits.fills, recorded=differentiates)
            return captured
        except _Retry as retry:
            habits = habits._replace(**retry.change)
        except RuntimeError as error:
            if habits.fills == len(FACTORIES) or isinstance(error, (PsgError, torch.OutOfMemoryError)):
                raise
            # The likeliest cause that can be helped: the function writes what depends on the sample into a tensor that it made itself,
            # which under vmap is one for all samples. Give every sample its own.
            habits = habits._replace(fills=habits.fills + 1)
        forget()
        _random.set_state(state)  # whatever the pass that failed has drawn, the next is to draw again


def _code_of(function: Any) -> Any:
    """What a callable runs: the function under wrappers, bound arguments and methods; None if that is not written in Python."""
    while type(function) is not FunctionType or "__wrapped__" in function.__dict__:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = inspect.unwrap(function)
        else:
            call = inspect.getattr_static(type(function), "__call__", None)
            return call if isinstance(call, FunctionType) else None
    return function


class _Habits(NamedTuple):
    """How a pass treats what the function does; it starts with the cheapest.

    Attributes:
        copied: The inputs are copies that the function may write into.
        derives: Ops on parameters alone are computed once.
        fills: How many kinds of the tensors that the function makes are made for every sample: first those that are most often written
            into; what is made for every sample has no Python value.
        ruled: Known ops run by their rules.
        recorded: The function calls autograd itself: what runs by rules can be differentiated again.
    """

    copied: bool = False
    derives: bool = True
    fills: int = 0
    ruled: bool = True
    recorded: bool = False


# What functions did when they were last called: a pass that does not expect it has to begin again.
_known: weakref.WeakKeyDictionary[FunctionType, _Habits] = weakref.WeakKeyDictionary()


def _one_pass(task: Task, habits: _Habits) -> tuple[Captured, bool]:
    """What the pass gives, and whether the function called autograd."""
    tensors, dims, n = list(task.tensors), list(task.in_dims), task.n
    inputs = () if habits.copied else [tensor for position, tensor in enumerate(tensors) if position not in task.params]
    lifted = [Lifted.parameter(tensors[position], dims[position], n) for position in task.params]
    for position, value in zip(task.params, lifted, strict=True):
        tensors[position], dims[position] = value.leaf, 0

    mode = _Mode(task, lifted, inputs, habits)

    def watched(samples: Sequence[Tensor]) -> tuple[Tensor, ...]:
        mode.start(samples, [samples[position] for position in task.params])
        try:
            with mode:
                outputs = task.function(samples)
        except RuntimeError as error:
            if not mode.constants or isinstance(error, (PsgError, torch.OutOfMemoryError)):
                raise
            raise _Retry("a constant computed from parameters may have been written into", derives=False) from error
        if mode.failure is not None:
            # The function has handled an error that may be vmap's or ours, and gone a way that no sample alone would go.
            raise Unsupported(f"the function handles an error: {mode.failure}") from mode.failure
        return outputs

    with torch.enable_grad():
        outputs = _functorch.vmap(watched, tensors, dims, n, task.randomness)
    backward = Backward(mode.values, n, task.settle)
    backward.run(outputs[0], mode.taps)
    pull_back(mode.values, lifted, n)
    factors = [value.factor(n) for value in lifted]
    # What fn returns of a parameter as it is must not be the caller's own memory.
    outputs = tuple(output.detach().clone() if _functorch.memory_of(output) in mode.owned else output.detach() for output in outputs)
    return Captured(outputs, factors, [value.uses for value in lifted], backward.nbytes), mode.differentiates


_AUTOGRAD = {torch.autograd.grad, Tensor.requires_grad_, vars(torch._C.TensorBase)["requires_grad"].__set__}


def _differentiate_elsewhere(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, allow_unused: bool = False, **kwargs: Any
) -> Any:
    """`torch.autograd.grad` for a transform of the function's own.

    It asks which outputs have a history, and hears that what is derived from parameters has one; for its data that has none.
    """
    recorded = [output.requires_grad for output in outputs] if allow_unused else [True]
    if not any(recorded):
        return (None,) * len(inputs)
    if not all(recorded):
        outputs, grad_outputs = (part and tuple(itertools.compress(part, recorded)) for part in (outputs, grad_outputs))
    return torch.autograd.grad(outputs, inputs, grad_outputs, *args, allow_unused=allow_unused, **kwargs)


class _Operands(NamedTuple):
    """The tensors among a call's arguments, by what they are to the rule that is to run it.

    Attributes:
        own: Lifted values in the places of parameters: the rule takes their one unexpanded value.
        data: What the rule takes with the samples in dim 0.
        shared: Frozen parameters, which go in as they are.
        numbers: What stands in the places of Python numbers, as such.
        sampled: Whether some data differs from sample to sample.
        varied: Whether some data is no parameter's.
        batched: Whether some data is under vmap's wrapper.
    """

    own: dict[Place, Lifted]
    data: dict[Place, Tensor]
    shared: dict[Place, Tensor]
    numbers: dict[Place, Any]
    sampled: bool
    varied: bool
    batched: bool


class _Mode(Watch):
    """Watches the calls of the function and routes those that meet a lifted value."""

    def __init__(self, task: Task, params: Sequence[Lifted], inputs: Sequence[Tensor], habits: _Habits) -> None:
        super().__init__(task.n, params, inputs)
        self.look = task.look
        self.habits = habits
        self.hooks = _functorch.saved_tensor_hooks()
        self.derivations: dict[Any, tuple[Any, Any]] = {}  # by what was called: its output, and its arguments
        self.constants: list[Tensor] = []  # computed from parameters, without a history
        self.differentiates = False
        self.failure: Exception | None = None

    def start(self, samples: Sequence[Tensor], handles: Sequence[Tensor]) -> None:
        """Learn vmap's level and the wrappers under which the function holds its arguments, the parameters among them."""
        self.level = _functorch.current_level()
        self.own = _functorch.Marks(self.level)
        self.own.claim(samples)
        for value, handle in zip(self.params, handles, strict=True):
            if value.value is not None:
                self.hold(value, handle)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if func in METADATA:
                return func(*args, **(kwargs or {}))
            kwargs = kwargs or {}
            tensors, others = operands_of(args, kwargs)
            marked = self.own.owns(tensors) and func not in LIKENESSES
            if any(isinstance(other, torch.Generator) for other in others):
                raise Unsupported(OWN_GENERATOR)
            output = self._route(func, args, kwargs, tensors)
            if marked:
                target = target_of(func, args, kwargs)
                self.own.claim(output, target)
                if target is None and self.constants and self.own.has_marked(tensors):
                    self.own.mark(output)
            return output
        except Exception as error:
            self.failure = error
            raise

    def _route(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run a call by a rule, below vmap, or as it is."""
        self.look(func, tensors)
        target = target_of(func, args, kwargs)
        if target is not None:
            self._protect(name_of(func), target)
        refuse_updates(func, args, kwargs)
        if func in PREDICATES:
            answer = self._ask(func, args[0])
            return Node(answer, self._refuse) if func == GRAD_FN and answer is not None else answer
        here = _functorch.current_level() == self.level  # not inside a transform of the function's own
        if here:
            if func in _AUTOGRAD:
                return self._run_autograd(func, args, kwargs, tensors)
            if _functorch.saved_tensor_hooks() != self.hooks:
                raise Unsupported("fn saves tensors through hooks, as activation checkpointing does, which run after vmap has ended")
        output = self._run_known(func, args, kwargs, here)
        if output is not NotImplemented:
            return output
        if not here:
            return self._run_elsewhere(func, args, kwargs)
        output = self._run_agreed(func, args, kwargs, tensors)
        if output is not NotImplemented:
            return output
        met = self.met(tensors)
        return self._run_lifted(func, met, args, kwargs) if met else self._run_unmet(func, args, kwargs)

    # What the function asks of autograd

    def _run_autograd(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """For every sample's own, or for a transform, to which the tensors of torch.func.vjp belong."""
        if func != torch.autograd.grad:
            return self._require_grad(func, *args, **kwargs)
        return (_differentiate_elsewhere if any(map(self._is_elsewhere, tensors)) else self._differentiate)(*args, **kwargs)

    def _require_grad(self, func: Any, tensor: Tensor, flag: bool = True) -> Tensor:
        """`tensor.requires_grad_()` for every sample's own: below vmap the samples' are one."""
        if id(tensor) in self.by_handle:
            if not flag:
                raise Unsupported("requires_grad_(False) of a parameter")
            return tensor
        if not _functorch.is_batched(tensor, self.level):
            if self.constants:
                raise _Retry("requires_grad_ of what may be computed from parameters", derives=False)
            return func(tensor, flag)
        with _functorch.below():
            _functorch.value_of(tensor).requires_grad_(flag)
        return tensor

    def _is_elsewhere(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and _functorch.is_wrapped(tensor) and not _functorch.is_batched(tensor, self.level)

    def _differentiate(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad`, of all samples at once: since they do not meet, of the sum of their outputs."""
        if not self.habits.recorded:
            # Through those rules whose outputs have derivatives of every order.
            raise _Retry("fn calls torch.autograd.grad", recorded=True)
        if self.habits.ruled and self.met(operands_of((inputs,), {})[0]):
            # For parameters, through lifted values: one computed once for all samples stands apart from its parameter, and a rule's
            # output is differentiated for the data alone.
            raise _Retry("fn calls torch.autograd.grad for parameters", ruled=False, derives=False)
        self.differentiates = True
        outputs, inputs = ([item] if isinstance(item, Tensor) else list(item) for item in (outputs, inputs))
        if is_grads_batched or not all(_functorch.is_batched(tensor, self.level) for tensor in (*outputs, *inputs)):
            # What fn has made to differentiate for is one for all samples; the next pass makes it for each.
            raise RuntimeError("torch.autograd.grad of or for a tensor that is the same for all samples")
        given = [grad_outputs] if isinstance(grad_outputs, Tensor) else [None] * len(outputs) if grad_outputs is None else grad_outputs
        if any(own is None and output.numel() != 1 for own, output in zip(given, outputs, strict=True)):
            raise Unsupported("torch.autograd.grad of an output that is no scalar")
        cotangents = [torch.ones_like(output) if own is None else own for own, output in zip(given, outputs, strict=True)]
        with _functorch.below():
            sides = [[_functorch.physical(tensor, self.level, self.n) for tensor in group] for group in (outputs, cotangents)]
            targets = [_functorch.value_of(tensor) for tensor in inputs]
            options: dict[str, Any] = {"create_graph": create_graph, "allow_unused": allow_unused, "materialize_grads": materialize_grads}
            found = torch.autograd.grad(sides[0], targets, sides[1], retain_graph=True, **options)
        return tuple(None if own is None else _functorch.wrap_like(own, tensor) for own, tensor in zip(found, inputs, strict=True))

    def _ask(self, func: Any, tensor: Tensor) -> Any:
        """What autograd knows of a tensor: a wrapper of vmap does not tell what is differentiated beneath it."""
        lifted = self.by_handle.get(id(tensor))
        if lifted is not None:
            return lifted.ask(func)
        answers = [func(tensor)]
        while _functorch.is_wrapped(tensor):
            tensor = _functorch.value_of(tensor)
            answers.append(lifted.ask(func) if (lifted := self.by_handle.get(id(tensor))) else func(tensor))
        if func == IS_LEAF:
            return all(answers)
        return next((answer for answer in answers if answer), answers[0])

    def _refuse(self, what: str) -> None:
        self.failure = Unsupported(f"fn uses {what}")
        raise self.failure

    # What has to be one for all samples

    def _run_agreed(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """A Python value, what a mask selects, and a constant; NotImplemented for everything else."""
        if func in CONVERSIONS and _functorch.is_batched(args[0], self.level):
            return self._convert(func, args, kwargs)
        if func in MASKED:
            if "mask" in kwargs:
                args, kwargs = (*args, kwargs["mask"]), {}
            if len(args) > 1 and any(map(self._is_own_mask, operands_of(args[1:2], {})[0])):
                return self._select(func, *args, **kwargs)
        if func in LOCATING and len(args) == 1 and kwargs.keys() <= {"as_tuple"} and _functorch.is_batched(args[0], self.level):
            return self._locate(func, *args, **kwargs)
        if func in CONSTANTS and not self.habits.fills and args and _functorch.is_batched(args[0], self.level):
            if not any(map(_functorch.is_wrapped, tensors[1:])):
                return self._make(func, args, kwargs)
        return NotImplemented

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor like a sample's own, without its values: one for all samples, and so for those of a later call, should fn keep it."""
        with _functorch.below():
            return func(_functorch.physical(args[0], self.level, self.n)[0], *args[1:], **kwargs)

    def _convert(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A Python value of a tensor: that of every sample, if they agree. In a loop each would have gone the same way."""
        with _functorch.below():
            values = _functorch.physical(args[0], self.level, self.n).detach()
            if values[0].numel() != 1:
                return func(values[0], *args[1:], **kwargs)  # the function's own error
            told = values != 0 if func == Tensor.__bool__ else values
            distinct, labels = told.reshape(self.n).unique(return_inverse=True)
            if len(distinct) > 1:
                raise Diverged(name_of(func), labels)
            return func(values[0], *args[1:], **kwargs)

    def _is_own_mask(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dtype == torch.bool and _functorch.is_batched(leaf, self.level)

    def _select(self, func: Any, tensor: Tensor, index: Any, *values: Any) -> Any:
        """What masks select, or write into."""
        if func in (torch.masked_select, Tensor.masked_select):
            shape = torch.broadcast_shapes(tensor.shape, index.shape)
            func, tensor, index = Tensor.__getitem__, tensor.expand(shape), index.expand(shape)
        several = isinstance(index, (tuple, list))
        places: list[Any] = []
        for item in index if several else (index,):
            places += self._places(func, item) if self._is_own_mask(item) else [item]
        with self:
            return func(tensor, tuple(places) if several or len(places) > 1 else places[0], *values)

    def _locate(self, func: Any, tensor: Tensor, as_tuple: bool = False) -> Any:
        """Where a tensor is not zero."""
        places = self._places(func, tensor != 0)
        if not _functorch.is_wrapped(places[0]):
            places = list(torch.nonzero(places[0], as_tuple=True))
        return tuple(places) if as_tuple or func is torch.where else torch.stack(places, -1)

    def _places(self, func: Any, mask: Tensor) -> list[Tensor]:
        """Indices that select what every sample's mask does, one for each dimension; the mask itself if the samples agree on it."""
        with _functorch.below():
            values = _functorch.physical(mask, self.level, self.n)
            flat = values.reshape(self.n, mask.numel())
            if mask.numel() == 0 or (flat == flat[0]).all():
                return [values[0]]
            counts, labels = flat.sum(1).unique(return_inverse=True)
            if len(counts) > 1:
                raise Diverged(name_of(func), labels)
            places = values.nonzero()[:, 1:].unflatten(0, (self.n, int(counts)))
            return [_functorch.wrap(place, self.level) for place in places.unbind(2)]

    # What a pass must not meet

    def _protect(self, op: str, target: Any) -> None:
        """Refuse to write into memory that the caller owns, through whatever views and wrappers."""
        written = target if isinstance(target, (tuple, list)) else (target,)
        memories = {_functorch.memory_of(tensor) for tensor in written if isinstance(tensor, Tensor)}
        if memories & self.owned:
            raise Unsupported(f"{op} writes into a parameter, or a view of one")
        # A list is written into by ops for lists, which vmap does not have: constants can stay what they are.
        derived = [value.derived for value in self.values[len(self.params) :]] + ([] if isinstance(target, list) else self.constants)
        if any(_functorch.memory_of(value) in memories for value in derived if value is not None):
            # It is one value for all samples only because it was computed once. Lifted, it is each sample's own.
            raise _Retry(f"{op} writes into a value computed from parameters", derives=False)
        if memories & self.given:
            # An activation in place on the sample itself, say: harmless to the caller on a copy.
            raise _Retry(f"{op} writes into an input, or a view of one", copied=True)

    def _avoid_leak(self, func: Any, args: Any, kwargs: Any, *rungs: str) -> None:
        reason = _registry.find_leak(func, args, kwargs, "capture", *rungs)
        if reason is not None:
            raise Unsupported(reason)

    # How a call goes

    def _run_known(self, func: Any, args: Any, kwargs: Any, here: bool) -> Any:
        """By the op's rule, as the embedding that it is, or written with other ops; NotImplemented if none of these fits."""
        rule = _registry.find_rule(func) if self.habits.ruled else None
        if rule is not None:
            run = self._run_rule if here and not self.habits.recorded else self._run_inside
            output = run(func, rule, args, kwargs)
            if output is not NotImplemented:
                return output
        if func in LOOKUPS and here and args and id(args[0]) in self.by_handle and self.habits.ruled:
            with self:
                output = self._look_up(func, args, kwargs)
            if output is not NotImplemented:
                return output
        if not here:
            self._avoid_leak(func, args, kwargs, "inside")
        # The gradient of a transform of the function's own is differentiated by this pass.
        decompose = _registry.find_decomposition(func, differentiated=not here or self.habits.recorded)
        if decompose is None:
            return NotImplemented
        with self:
            return decompose(*args, **kwargs)

    def _look_up(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Rows of a parameter at the places that each sample says, as an embedding; NotImplemented for other places."""
        index = args[-1] if len(args) > 1 else None
        batched = isinstance(index, Tensor) and _functorch.is_batched(index, self.level)
        return LOOKUPS[func](*args) if batched and not kwargs and self.by_handle[id(args[0])].value is not None else NotImplemented

    def _run_lifted(self, func: Any, met: list[Lifted], args: Any, kwargs: Any) -> Any:
        """An op on lifted values that has no rule: computed once if on parameters alone, else under vmap as it is."""
        name = name_of(func)
        if self._may_derive(func):
            output = self._derive(func, name, met, args, kwargs)
            if output is not NotImplemented:
                return output
        self._avoid_leak(func, args, kwargs)
        for value in met:
            value.uses.append(f"{name}: lifted")
        return self._run(func, args, kwargs)

    def _run_elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same inside a transform of the function's own, which knows how the op runs."""
        if self._may_derive(func):
            held, options = substitute((args, kwargs), self._held)
            met = self.met(operands_of(held, options)[0])
            output = self._derive(func, name_of(func), met, held, options) if met else NotImplemented
            if output is not NotImplemented:
                return output
        for tensor in operands_of(args, kwargs)[0]:
            value = self.by_handle.get(id(_functorch.innermost(tensor, self.level)))
            if value is not None:
                value.uses.append(f"{name_of(func)}: lifted")
        if func is torch.autograd.grad:
            return _differentiate_elsewhere(*args, **kwargs)
        return func(*args, **kwargs)

    def _run_unmet(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op that meets no lifted value; if the function may write into what it makes, that is made for every sample."""
        self._avoid_leak(func, args, kwargs)
        output = self._run(func, args, kwargs)
        if not self.habits.fills or not any(func in kind for kind in FACTORIES[: self.habits.fills]):
            return output
        if not isinstance(output, Tensor) or _functorch.is_wrapped(output):
            return output
        with _functorch.below():
            output = output.expand(self.n, *output.shape).clone()
        return _functorch.wrap(output, self.level)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op as it is."""
        if _functorch.lacks_batching(func):
            wrapped = [tensor for tensor in operands_of(args, kwargs)[0] if _functorch.is_wrapped(tensor)]
            if wrapped and not any(map(self._is_elsewhere, wrapped)):
                return self._one_by_one(func, args, kwargs, wrapped)
        return func(*args, **kwargs)

    def _one_by_one(self, func: Any, args: Any, kwargs: Any, wrapped: list[Tensor]) -> Any:
        """What vmap runs sample by sample too, but selects each from the whole, whereupon each selection's backward writes a whole one."""
        with _functorch.below():
            sides = {id(leaf): _functorch.physical(leaf, self.level, self.n).unbind() for leaf in wrapped}
            results = []
            for i in range(self.n):
                own, options = substitute((args, kwargs), lambda leaf: sides[id(leaf)][i] if id(leaf) in sides else leaf)  # noqa: B023
                results.append(_trees.flatten(func(*own, **options)))
            outputs = [torch.stack(parts) for parts in zip(*(parts for parts, _ in results), strict=True)]
        return _trees.unflatten(results[0][1], [_functorch.wrap(output, self.level) for output in outputs])

    def _held(self, leaf: Any) -> Any:
        """A parameter, or a constant, that a transform of the function's own has wrapped to no other effect, as it is known outside."""
        if not isinstance(leaf, Tensor) or id(leaf) in self.by_handle:
            return leaf
        bare = _functorch.without_constant_wrappers(leaf, self.level)
        return bare if id(bare) in self.by_handle or not _functorch.is_wrapped(bare) else leaf

    def _may_derive(self, func: Any) -> bool:
        return self.habits.derives and derives(func)

    def _derive(self, func: Any, name: str, met: list[Lifted], args: Any, kwargs: Any) -> Any:
        """Compute an op on parameters and constants once, below vmap, and lift what comes out; what has no history is a constant."""
        others = [tensor for tensor in operands_of(args, kwargs)[0] if id(tensor) not in self.by_handle]
        if any(map(_functorch.is_wrapped, others)):
            return NotImplemented  # depends on the sample
        if name in LIKE_ANOTHER and id(args[0]) not in self.by_handle:
            return NotImplemented  # of the parameters it takes shape, dtype and device alone
        if target_of(func, args, kwargs) is not None:
            return NotImplemented
        # Inside a transform that differentiates, fn runs more than once. (Of other tensors nobody could say that they are what they were.)
        given, records = call_key(args, kwargs), _functorch.records_below(self.level)
        key = None if others or given is None else (func, given, records, _functorch.autocast_dtype(met[0].leaf))
        if key in self.derivations:
            return self.derivations[key][0]
        given = args, kwargs
        with _functorch.below(self.level):
            args, kwargs = substitute((args, kwargs), self.history)
            with torch.set_grad_enabled(records):
                output = func(*args, **kwargs)
            several = isinstance(output, (tuple, list))
            parts = list(output) if several else [output]
            if not all(isinstance(part, Tensor) for part in parts):
                return NotImplemented
            derivations = {i: Lifted.derivation(part, met, name, self.n) for i, part in enumerate(parts) if part.requires_grad}
            for i, value in derivations.items():
                value.carry_to(met, Call(part_of(func, i if several else None), args, kwargs, parts[i], name))
        for value in met:
            value.uses.append(f"{name}: derived")
        shared = any(value.shared for value in met) or any(leaf.is_floating_point() for leaf in others)
        for i, part in enumerate(parts):
            if i not in derivations:
                self.constants.append(part)
                self.own.mark(part)
                continue
            derivations[i].shared = shared
            self.values.append(derivations[i])
            parts[i] = self.hold(derivations[i], _functorch.wrap(derivations[i].leaf, self.level))
        if several:
            output = type(output)(parts) if hasattr(output, "n_fields") or not hasattr(output, "_fields") else type(output)(*parts)
        else:
            output = parts[0]
        if key is not None and len(derivations) == len(parts):  # what is no constant cannot be written into
            self.derivations[key] = output, given  # whose identities are in the key
        return output

    def _run_inside(self, func: Any, rule: _registry.Rule, args: Any, kwargs: Any) -> Any:
        """Run the rule as what fn itself may differentiate, or batch, for the data; NotImplemented if it does not fit this call."""
        arguments = rule.bind(*substitute((args, kwargs), self._held))
        if arguments is None:
            return NotImplemented
        places = {place: self.by_handle[id(argument)] for place, argument in places_of(arguments) if id(argument) in self.by_handle}
        if not places or any(place[0] not in rule.params or value.value is None for place, value in places.items()):
            return NotImplemented
        write = _registry.find_standard(func)
        if write is not None:
            with self:
                output = write(**arguments, shared=set(map(place_name, places)))
            if output is not NotImplemented:
                return output
        transpose = _registry.find_transpose(func)
        if transpose is None:
            return NotImplemented
        own = {name: value for (name, _), value in places.items()}
        data = arguments.get(transpose.data)
        others = {name: argument for name, argument in arguments.items() if name not in own and name != transpose.data}
        if not isinstance(data, Tensor) or transpose.data in own or not _functorch.is_wrapped(data):
            return NotImplemented
        if any(map(_functorch.is_wrapped, operands_of((), others)[0])):
            return NotImplemented  # every sample has its own
        product = Product(self, func, own, others, self.habits.recorded)
        unfit = torch.is_autocast_enabled(data.device.type) or not _functorch.can_descend(self.level)
        return NotImplemented if unfit or product.transposed(data.shape) is None else product(data)

    def _run_rule(self, func: Any, rule: _registry.Rule, args: Any, kwargs: Any) -> Any:
        """Run the rule on the physical batch and tap its output; NotImplemented if it does not fit this call."""
        op = name_of(func)
        arguments = rule.bind(args, kwargs)
        if arguments is None:
            return NotImplemented
        operands = self._operands(rule, arguments)
        if operands is None or not self._is_worth_a_rule(func, rule, operands):
            return NotImplemented
        own, data, shared = operands.own, operands.data, operands.shared
        arguments = replace_at(arguments, operands.numbers)

        single: bool | None = None  # unknown while the rule has not accepted the call

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            nonlocal single
            if own:
                inputs = with_history(inputs)
            values: dict[Place, Any] = dict(zip(data, inputs, strict=True))
            values.update((place, value.value) for place, value in own.items())
            placed = replace_at(arguments, values)
            if rule.mixed:
                placed["shared"] = {place_name(place) for place in (*own, *shared)}
            result = rule.call(placed)
            if result is NotImplemented:
                return ()
            outputs, builders = _registry.outputs_and_builders(op, result, self.n)
            single = isinstance(result[0], Tensor)
            if own and torch.is_grad_enabled():
                targets = [(place_name(place), value, builder_at(op, builders, place)) for place, value in own.items()]
                outputs = self.tap(op, outputs, single, targets, (*inputs, *shared.values()))
            return outputs

        outputs = _functorch.run_below(run, list(data.values()), self.level, self.n)
        if single is None:
            return NotImplemented
        for value in own.values():
            value.uses.append(f"{op}: rule")
        for tensor in data.values():
            if id(tensor) in self.by_handle:
                self.by_handle[id(tensor)].uses.append(f"{op}: lifted")
        return outputs[0] if single else outputs

    def _operands(self, rule: _registry.Rule, arguments: dict[str, Any]) -> _Operands | None:
        """What the tensors among these arguments are to the rule; None if it does not take such."""
        own: dict[Place, Lifted] = {}
        data: dict[Place, Tensor] = {}
        shared: dict[Place, Tensor] = {}
        numbers: dict[Place, Any] = {}
        sampled = varied = batched = False
        for place, argument in places_of(arguments):
            value = self.by_handle.get(id(argument))
            if place[0] in rule.numbers:
                numbers[place] = self._convert(Tensor.item, (argument,), {})
                continue
            if place[0] in rule.params:
                if value is not None and value.value is not None:
                    own[place] = value
                    continue
                if value is None and not _functorch.is_wrapped(argument):
                    shared[place] = argument
                    continue
                if not rule.mixed:
                    return None  # every sample has a weight of its own
            data[place] = argument  # a lifted value among them is data like any other: its leaf has the samples in dim 0
            varied |= value is None or value.shared
            if _functorch.is_batched(argument, self.level):
                batched = True
                sampled |= value is None
            elif _functorch.is_wrapped(argument):
                return None
        return _Operands(own, data, shared, numbers, sampled, varied, batched)

    def _is_worth_a_rule(self, func: Any, rule: _registry.Rule, operands: _Operands) -> bool:
        """Whether there is something for the rule to do that lifting would do at a higher price."""
        if not (operands.varied if operands.own else operands.batched and (rule.frozen or not rule.params)):
            return False
        if operands.sampled or not self._may_derive(func):
            return True
        # The samples share the data. To run once what they share saves time; a factor, where it is less than a gradient, memory.
        held = 2 * sum(tensor.numel() for tensor in operands.data.values())  # with the cotangent about
        return any(held < value.leaf[0].numel() for value in operands.own.values())
