"""The pass for functions of a whole batch: `fn(params, *batch) -> losses [n]`, called once, without vmap.

For what vmap cannot run and a loop would run slowly: data-dependent routing, `.item()`, kernels without a batching rule. The gradient of
sample i is that of losses[i].

Nothing is lifted here. An op that meets a parameter runs by its rule, row by row of its data; an op on parameters alone is computed once
and pulled back; any other op that meets a parameter is an error, for nobody could say which sample its gradient belongs to.

Which sample a row belongs to is measured (psg/_owners.py). A call on which that fails is run again by groups of samples, or refused.

An op on parameters and on what the samples share (a frozen weight to which they are added, a mask, positions in a table), or that repeats
a parameter, may make values for all samples together, computed once too, or rows that are the samples' own (an initial state, a class token
for each image). Only the backward pass tells: the likelier is tried first, and what does not hold is run again the other way. Either way
gives the gradient of losses[i], or an error, whatever was taken for shared: a value computed once is a tensor that the losses depend on, as
a parameter is, and what has a history, which would be lost there, is not taken.

What fn holds requires grad, though no gradient should ever reach it: if one does, an op has met the parameter unseen, which is an error.
Activation checkpointing computes again in the backward pass, which therefore runs under the same mode.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from psg import _copies, _functorch, _kernels, _pass
from psg._capture import Captured
from psg._errors import InputError, PsgError, StateError, user_line
from psg._lifted import Lifted, Tap, Watch, pull_back
from psg._operands import run_rule
from psg._ops import (
    DIFFERENTIATING,
    GRAD_FN,
    METADATA,
    PREDICATES,
    Node,
    Place,
    derives,
    leaves_of,
    name_of,
    places_of,
    replace_at,
    substitute,
    target_of,
)
from psg._owners import codes, decoded, groups, loss_weights, owners
from psg._sampled import Sampled
from psg._writes import written
from psg.factors import Dense, Factor
from psg.factors._base import as_real
from psg.rules import _registry
from psg.rules.embedding import LOOKUPS
from psg.rules.leaks import refuse_updates
from psg.rules.products import sum_to
from psg.rules.rows import split_rows
from psg.rules.unlifted import ELEMENTWISE, EXPANSIONS, IN_PLACE, WRITTEN_OUT


def capture_batch(
    function: Callable[[Sequence[Tensor], bool], tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    in_dims: Sequence[int | None],
    beside: Sequence[Tensor],
    params: dict[int, str],
    n: int,
    look: Callable[..., None],
) -> Captured:
    """Run the pass described at the top of this file.

    Args:
        function: From the tensors of a batch, and whether to copy whatever else it is given, to a tuple of tensors, the first of which are
            the losses, [n].
        tensors: The function's arguments.
        in_dims: For each of them the dimension of the samples, or None.
        beside: What else it is given.
        params: The positions among `tensors` of those to differentiate, and what messages call them.
        n: The number of samples, at least 1.
        look: Called with every op of the function and its arguments.

    Returns:
        The outputs and the factors.

    Raises:
        InputError: A parameter reaches an op that has no rule, or a rule that does not fit.
        StateError: A row depends on two samples.
        NotFinite: A row's cotangent does not tell its sample.
    """
    tensors = [tensor.detach() for tensor in tensors]
    choices, copied = _Choices({}, set()), False
    failure: PsgError | None = None  # one like the first
    while True:
        try:
            # Copies of each pass's own: one that failed may have written into those it had.
            given = [_copies.copy_of(tensor) if copied and i not in params else tensor for i, tensor in enumerate(tensors)]
            inputs = [] if copied else [*given, *beside]
            sampled = Sampled(tensor for tensor, dim in zip(given, in_dims, strict=True) if dim is not None)
            return _one_pass(lambda tensors: function(tensors, copied), given, params, n, inputs, sampled, look, choices)  # noqa: B023
        except _WritesInput:
            # An activation in place on the batch itself, say: harmless to the caller on a copy.
            copied = True
        except _SharedRows as error:
            choices = _Choices(choices.known | dict.fromkeys(error.keys, True), set())
        except (InputError, StateError) as error:
            if not choices.guessed:
                raise failure or error from None
            failure = failure or type(error)(*error.args)
            choices = _Choices(choices.known | dict.fromkeys(choices.guessed, False), set())


_Choice = tuple[str, str, tuple[tuple[int, ...], ...]]
"""An op, a parameter, and the shapes of what it meets there, or of what comes out."""


class _Choices(NamedTuple):
    """What is known of the ops that make either rows of the samples' own or values for all of them.

    Attributes:
        known: Whether it is the latter. If so, the backward pass has shown it; if not, a pass that has taken it for that has failed.
        guessed: Those that a pass has taken for the latter without knowing.
    """

    known: dict[_Choice, bool]
    guessed: set[_Choice]


class _WritesInput(PsgError):
    """The function writes into one of its inputs that is no parameter."""


class _SharedRows(PsgError):
    """Rows taken for the samples' own belong to several of them.

    Attributes:
        keys: The ops that made them.
    """

    def __init__(self, keys: set[_Choice]) -> None:
        super().__init__("rows belong to several samples")
        self.keys = keys


class NotFinite(PsgError):
    """A row has an infinite or NaN cotangent, which tells no sample.

    Attributes:
        groups: Samples to run together: those whose losses are finite, and every other one alone; if all are, each alone.
    """

    def __init__(self, losses: Tensor) -> None:
        super().__init__("a cotangent is not finite")
        finite = losses.isfinite()
        together, alone = finite.nonzero()[:, 0], (~finite).nonzero()[:, 0]
        self.groups = [*together.split(1)] if len(alone) == 0 else [together, *alone.split(1)][len(together) == 0 :]


def _one_pass(
    function: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    params: dict[int, str],
    n: int,
    inputs: Sequence[Tensor],
    sampled: Sampled,
    look: Callable[..., None],
    choices: _Choices,
) -> Captured:
    tensors = list(tensors)
    values = [Lifted.parameter(tensors[position], None, n, name) for position, name in params.items()]
    mode = _BatchMode(n, values, inputs, sampled, look, choices)
    for position, value in zip(params, values, strict=True):
        tensors[position] = mode.hold(value, tensors[position].detach().requires_grad_())
    called = _pass.Pass()
    with torch.enable_grad(), _pass.opened(called), mode:
        outputs = function(tensors)
    if mode.failure is not None:
        raise mode.failure  # which fn has handled
    uses = [list(value.uses) for value in values]
    with called.again():
        try:
            mode.backward(outputs[0])
        except CheckpointError as error:
            raise InputError(
                'method="batch": a checkpointed part of fn ran in another way when it ran again for the backward pass. A module called by '
                "torch.func.functional_call has its own parameters back by then: checkpoint a function of the parameters instead, or none. "
                f"{_FOR_ONE_SAMPLE}"
            ) from error
    pull_back(mode.values, values, n)
    factors = [value.factor(n).detach() for value in values]
    return Captured(tuple(output.detach() for output in outputs), factors, uses)


_Owners = Callable[[str, Tensor, list[Tensor], list[Tensor], float], Tensor]
"""Whose each row is, as `owners` says it: from the op, the cotangent, those of weighted sums of the losses, the weights and eps."""

_FOR_ONE_SAMPLE = 'Write fn for one sample and use method="auto".'


class _BatchMode(Watch):
    """Watches the calls of the function and routes those that meet a parameter."""

    def __init__(
        self,
        n: int,
        params: Sequence[Lifted],
        inputs: Sequence[Tensor],
        sampled: Sampled,
        look: Callable[..., None],
        choices: _Choices,
    ) -> None:
        super().__init__(n, params, inputs)
        self.sampled = sampled
        self.look = look
        self.choices = choices
        self.derived: set[Any] = set()  # the memory of derived values
        self.level = _functorch.current_level()
        self.failure: PsgError | None = None  # one like it: the error itself holds all frames, and so what they hold

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        leaves, target = leaves_of(args, kwargs), target_of(func, args, kwargs)
        try:
            output = self._route(func, args, kwargs, leaves, target)
        except PsgError as error:
            self.failure = type(error)(*error.args)
            raise
        self.sampled.follow(func, leaves, output, target)
        return output

    def _route(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], target: Any) -> Any:
        self.look(func, leaves, self.by_handle.keys())
        if target is not None:
            self._protect(func, target)
        refuse_updates(func, args, kwargs)
        if func == torch._VF._make_dual or (func in DIFFERENTIATING and kwargs.get("create_graph")):
            raise InputError(
                f'method="batch": {name_of(func)} at {user_line()} makes derivatives that are differentiated in turn; rules give no such '
                f"derivatives. {_FOR_ONE_SAMPLE}"
            )
        met = self.lifted_among(leaves)
        if func in PREDICATES:
            answer = met[0].ask(func) if met else func(*args, **kwargs)
            return Node(answer, self._refuse) if func == GRAD_FN and answer is not None else answer
        if not met:
            return _kernels.run(func, args, kwargs)
        if _functorch.current_level() != self.level:
            names = ", ".join(value.name for value in met)
            raise InputError(f'method="batch": {names} is used inside a torch.func transform at {user_line()}. {_FOR_ONE_SAMPLE}')
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in self.by_handle]
        if (body := _registry.body_of(func)) is not None:
            output = self._run_rule(func, args, kwargs, None)
            if output is not NotImplemented:
                return output
            with self:  # which sees what it closes over
                return body(*args, **kwargs)
        # A hook would be called for what is pulled back, which is under vmap, and for no rule's gradient.
        computes = func != Tensor.register_hook and _registry.find_leak(func, args, kwargs, "vmap") is None
        if func in EXPANSIONS and len(met) == 1 and not others:
            output = self._expand(func, met[0], args, kwargs)
            if output is not NotImplemented:
                return output
        if computes and not others:
            return self._derive(func, met, args, kwargs)
        if func in LOOKUPS and others:
            with self:
                output = LOOKUPS[func](*args, **kwargs)
            if output is not NotImplemented:
                return output
        says_where = not any(map(_differentiable, others))
        # What has a history would lose it.
        constant = not any(leaf.requires_grad or leaf in self.sampled for leaf in others)
        leaks = _registry.find_leak(func, args, kwargs, "capture", "vmap") is not None
        choice = None
        if not leaks and (constant and target is None and derives(func) or says_where and _computable_once(func, args, kwargs)):
            choice = name_of(func), met[0].name, tuple(tuple(leaf.shape) for leaf in others)
        # With as many rows as there are samples these may be theirs; one number chooses an expert, say.
        likely = constant and all(leaf.shape[:1] != (self.n,) or leaf.shape == met[0].leaf.shape[1:] for leaf in others)
        likely |= says_where and all(_is_one(self.n, leaf.shape) for leaf in others)
        if choice is not None and self._is_for_all(choice, likely):
            return self._derive(func, met, args, kwargs)
        if func in IN_PLACE and args[0] is not met[0].handle:
            with self:  # of a copy, which rules may still read when the data is gone
                return args[0].copy_(IN_PLACE[func](args[0].clone(), *args[1:], **kwargs))
        output = self._run_rule(func, args, kwargs, choice)
        if output is not NotImplemented:
            return output
        decompose = WRITTEN_OUT.get(func) or _registry.find_decomposition(func, differentiated=False)
        if decompose is not None:
            with self:
                output = decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if (computes and says_where and not leaks) or (choice is not None and self._is_for_all(choice, True)):
            return self._derive(func, met, args, kwargs)
        names = ", ".join(value.name for value in met)
        raise InputError(
            f'method="batch": {names} reaches {name_of(func)} at {user_line()}, for which there is no rule that fits. Write one with '
            'psg.rule, freeze the parameter, or write fn for one sample and use method="auto".'
        )

    def _refuse(self, what: str) -> None:
        message = f'method="batch": fn uses {what} at {user_line()}, through which rules do not go. {_FOR_ONE_SAMPLE}'
        self.failure = InputError(message)
        raise InputError(message)

    def _protect(self, func: Any, target: Any) -> None:
        """Refuse to write into memory that the caller owns."""
        memories = set(map(_functorch.memory_of, written(target)))
        if memories & self.owned:
            raise InputError(
                f'method="batch": {name_of(func)} at {user_line()} writes into a parameter, or a view of one. Write into a clone of it.'
            )
        if self.derived.intersection(map(_functorch.storage_of, written(target))):
            raise InputError(
                f'method="batch": {name_of(func)} at {user_line()} writes into what was computed from parameters, which would be another '
                "value for what has read it before. Use the op that gives a new tensor."
            )
        if memories & self.given:
            raise _WritesInput(f"{name_of(func)} writes into an input, or a view of one")

    def _derive(self, func: Any, met: list[Lifted], args: Any, kwargs: Any) -> Any:
        """An op on parameters alone, or with what the samples share, is computed once; what comes out is known by its history."""
        args, kwargs = substitute((args, kwargs), self.attached)
        output, values, _ = self.lift(func, met, args, kwargs, func(*args, **kwargs), lambda _, part: part.detach().requires_grad_())
        self.derived.update(_functorch.storage_of(value.leaf) for value in values)
        return output

    def _is_for_all(self, choice: _Choice, likely: bool) -> bool:
        """Whether what the op makes is for all samples; else its rows are their own. Where nothing is known it is what is likely."""
        if likely and choice not in self.choices.known:
            self.choices.guessed.add(choice)
        return self.choices.known.get(choice, likely)

    def _expand(self, func: Any, value: Lifted, args: Any, kwargs: Any) -> Any:
        """A parameter repeated along dim 0, where each repetition may be a sample's own; NotImplemented if it is for all of them."""
        if value.value is None:
            return NotImplemented
        args, kwargs = substitute((args, kwargs), lambda leaf: value.value if leaf is value.handle else leaf)
        output, shape = func(*args, **kwargs), value.value.shape
        inner = shape[1:] if len(shape) == output.ndim else shape
        along = zip(inner, output.shape[output.ndim - len(inner) :], strict=True)
        repeated = (len(shape) < output.ndim or shape[:1] == (1,)) and all(size in (1, full) for size, full in along)
        choice = name_of(func), value.name, (tuple(output.shape),)
        if not repeated or not torch.is_grad_enabled() or self._is_for_all(choice, _is_one(self.n, output.shape)):
            return NotImplemented

        def build(cotangent: Tensor) -> Factor:
            return Dense(sum_to(cotangent, inner).reshape(len(cotangent), *shape))

        (output,) = self.tap(choice[0], (output.clone(),), True, [(choice[1], value, build)], [], choice)
        value.uses.append(f"{choice[0]}: rule")
        return output

    def _run_rule(self, func: Any, args: Any, kwargs: Any, choice: _Choice | None) -> Any:
        """Run the op's rule with every row of the data as a sample of its own, and tap its output; NotImplemented if none fits."""
        if func in ELEMENTWISE:
            rule = ELEMENTWISE[func]
            args = sorted(args, key=lambda leaf: id(leaf) in self.by_handle)  # it commutes: data first
        else:
            rule = _registry.find_rule(func)
        if rule is None:
            return NotImplemented
        bound = rule.bind(args, kwargs)
        if bound is None:
            return NotImplemented
        own: dict[Place, Lifted] = {}
        for place, argument in places_of(bound):
            value = self.by_handle.get(id(argument))
            if value is not None and place[0] not in rule.params:
                return NotImplemented  # a parameter in the place of data: its rows are no sample's
            if value is not None:
                own[place] = value
        split = split_rows(func, bound, own) if own else None
        if split is None:
            return NotImplemented
        bound = replace_at(bound | split.options, split.data)
        others = {place: tensor for place, tensor in places_of(bound) if place not in own}
        shared = {place: others.pop(place) for place in list(others) if place[0] in rule.params and place not in split.data}
        ran = run_rule(self, name_of(func), rule, bound, own, others, shared, len(next(iter(split.data.values()))), choice)
        return NotImplemented if ran is None else split.join(*ran[0])

    def backward(self, losses: Tensor) -> None:
        """Three backward passes, in bfloat16 some more: the cotangents, and which sample each row of them belongs to."""
        if losses.shape != (self.n,) or not losses.requires_grad:
            return
        # What is computed again for the backward pass is lifted and tapped anew, to no purpose.
        values, taps, self.taps = list(self.values), self.taps, []
        targets = [edge for tap in taps for edge in tap.edges]
        handles: list[Any] = [value.handle for value in values]
        # Edges alone: a call with tensors would go to the mode itself, which would not be in force below it.
        output: Any = [get_gradient_edge(losses)]
        inputs: Any = [*targets, *map(get_gradient_edge, handles)]
        ones = torch.ones_like(losses)
        with self:
            arrived = torch.autograd.grad(output, inputs, [ones], allow_unused=True, retain_graph=self.n > 1)
        first, unseen = arrived[: len(targets)], arrived[len(targets) :]
        names = [value.name for value, gradient in zip(values, unseen, strict=True) if gradient is not None]
        if names:
            raise InputError(
                f'method="batch": {", ".join(names)} reaches the losses by an op that no function mode sees (a custom autograd.Function, '
                f"say), or as it is. {_FOR_ONE_SAMPLE}"
            )
        # Functions of double precision are often rounded to single somewhere, and under autocast to less; cancellation amplifies it.
        dtypes = [torch.float32, *(own.dtype for own in first if own is not None)]
        coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
        if coarsest > torch.finfo(torch.float16).eps:  # float16 has not the exponents
            weights, find = codes(losses), decoded
        else:
            weights, find = [loss_weights(losses, seed) for seed in (0, 1)], functools.partial(owners, rounding=coarsest**0.5)
        weighted = [first] * len(weights)
        if self.n > 1 and targets:
            with self:
                weighted = [
                    torch.autograd.grad(output, inputs[: len(targets)], [own], allow_unused=True, retain_graph=True) for own in weights
                ]
        sides = zip(first, *weighted, strict=True)
        shared: set[_Choice] = set()
        mixed: StateError | None = None
        with torch.no_grad():
            for tap in taps:
                try:
                    self._collect(tap, [next(sides) for _ in tap.edges], weights, losses, find)
                except StateError as error:
                    if tap.guess is None or self.choices.known.get(tap.guess):
                        mixed = mixed or error
                    else:
                        shared.add(tap.guess)
        if shared:
            raise _SharedRows(shared)
        if mixed is not None:
            raise mixed

    def _collect(self, tap: Tap, arrived: list[tuple[Any, ...]], weights: list[Tensor], losses: Tensor, find: _Owners) -> None:
        present = [sides for sides in arrived if sides[0] is not None and sides[0].numel()]
        if not present:
            return
        rows = len(present[0][0])
        if tap.is_outdated:
            raise InputError(f'method="batch": an input of {tap.op} was changed in place after {tap.op} had read it.')
        flat, *weighted = (
            torch.cat([as_real(side).reshape(rows, -1).double() for side in sides], 1) for sides in zip(*present, strict=True)
        )
        if self.n > 1 and not all(side.isfinite().all() for side in (flat, *weighted)):
            raise NotFinite(losses)
        eps = max(torch.finfo(own.dtype).eps for own, *_ in present)
        table = groups(find(tap.op, flat, weighted, [own.double() for own in weights], eps), self.n)
        for value, factor in tap.factors([own for own, *_ in arrived], rows):
            value.terms.append(factor.regroup(table))


def _is_one(n: int, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape can hardly have a row for each sample."""
    return n > 1 and tuple(shape[:1]) in ((), (1,))


def _computable_once(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op that has a rule for rows can also be left to torch: its gradient is dense."""
    rule = _registry.find_rule(func)
    bound = None if rule is None else rule.bind(args, kwargs)
    return bound is not None and not bound.get("sparse")


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
