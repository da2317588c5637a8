"""Lifted values (parameters and values computed from them), the terms of their per-sample gradients, and taps of the graph."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from psg import _trees
from psg._capture._carries import carry_of, terms_of
from psg._capture._steps import Step, part_of
from psg._capture._written import WrittenBackward
from psg._errors import InputError, a_kind
from psg._hardware import _machine
from psg._torch import _autograd, _functorch
from psg._torch._ops import REQUIRES_GRAD, name_of, tensors_of
from psg.factors import Conv, Dense, Factor, Sum, merge


class Lifted:
    """A parameter, or a value computed once for all samples from parameters, with the terms of its per-sample gradient.

    Attributes:
        leaf: What the function sees, under vmap's wrapper: [n, *shape], an autograd leaf. (A function of a whole batch sees `value`.)
        nbytes: Of the leaf, as if every sample had a copy.
        value: The one unexpanded value, detached: what rules use. None if every sample has its own.
        made_by: For a derived value, the step that has computed it, and the lifted values among the step's arguments.
        handle: The wrapper that the function holds; kept alive, since values are found by its id().
        shared: Whether it was computed from parameters and from data, the same for all samples.
        name: Its name in messages.
        terms: The factors found so far, whose sum is its gradient.
        uses: The ops that used it, each with its path (rule, lifted or derived); a derived value has its first parent's list.
    """

    def __init__(self, leaf: Tensor, value: Tensor | None, name: str = "") -> None:
        self.leaf = leaf
        self.nbytes = leaf.nbytes
        self.value = value
        self.made_by: tuple[Step, list[Lifted]] | None = None
        self.shared = False
        self.handle: Tensor | None = None
        self.name = name
        self.terms: list[Factor] = []
        self.uses: list[str] = []

    @classmethod
    def parameter(cls, value: Tensor, in_dim: int | None, n: int, name: str = "") -> "Lifted":
        """Lift a parameter; one with a dimension of samples is the leaf itself. One that requires grad keeps its history."""
        leaf = value.expand(n, *value.shape) if in_dim is None else value.movedim(in_dim, 0)
        if not value.requires_grad:
            leaf = _autograd.own_leaf(leaf if in_dim is None else leaf.detach())
        return cls(leaf, value if in_dim is None else None, name)

    @classmethod
    def derivation(cls, step: Step, parents: "list[Lifted]", n: int) -> "Lifted":
        """Lift a value that an op has computed from lifted ones."""
        value = step.output.detach()
        lifted = cls(_autograd.own_leaf(value.expand(n, *value.shape)), value, f"{step.name} of {parents[0].name}")
        lifted.made_by, lifted.uses = (step, parents), parents[0].uses
        return lifted

    @property
    def is_from_autograd_function(self) -> bool:
        """Whether an autograd.Function of the user's has computed this value."""
        return self.made_by is not None and self.made_by[0].name == "custom_function_call"

    @property
    def is_little(self) -> bool:
        """Whether it is few numbers, of all samples together."""
        return self.nbytes <= _FEW_BYTES

    @cached_property
    def attached(self) -> Tensor | None:
        """What values are derived from: this one with its history; for a parameter a leaf over its `value`, or None if it has none."""
        if self.made_by is not None:
            return self.made_by[0].output
        return None if self.value is None else self.value.detach().requires_grad_()

    def ask(self, predicate: Callable[[Tensor], Any]) -> Any:
        """What plain autograd would say of this value: whether it is a leaf, requires grad, has a history."""
        return predicate(_autograd.own_leaf(self.leaf.detach()) if self.made_by is None else self.made_by[0].output)

    def carry_terms(self) -> None:
        """Carry the terms over to the values from which this one was computed, where their kind allows it."""
        if not self.terms or self.made_by is None:
            return
        step, parents = self.made_by
        by_attached = {id(value.attached): value for value in parents}
        sides = [by_attached.get(id(side)) for side in step.sides]
        if not set(map(id, parents)) <= set(map(id, sides)):
            return  # a lifted argument is no side of the step
        if (carry := carry_of(step)) is None:
            return

        def handed_on(terms: Sequence[Factor]) -> list[Factor]:
            """Carry these terms over; returns those that cannot be."""
            left: list[Factor] = []
            for term in terms:
                if isinstance(term, Conv) and len(parents) > 1 and term.is_kept:  # once, not for each of them
                    term = Dense(term.materialize())
                carried = carry(term)
                if carried is None:
                    left.append(term)
                    continue
                for value, factors in zip(sides, carried, strict=True):
                    if value is not None:
                        value.terms += factors
            return left

        terms = terms_of(self.terms)
        self.terms = self.terms if terms is None else handed_on(terms)
        # A parent may be large where this value is small, as that of a weight which is made from a vector.
        if max(value.nbytes for value in (self, *parents)) >= _machine.MANY_BYTES and not all(
            isinstance(term, Dense) for term in self.terms
        ):
            # They have to be materialised, but not to be left to autograd: its backward under vmap holds arguments that require grad, and
            # with those torch's matrix products copy the whole gradient into another layout.
            self.terms = handed_on([Dense(merge(self.terms).materialize())])

    def accept(self, factor: Factor, place: str, n: int) -> Factor:
        """Check a rule's factor and return it in the parameter's dtype: under autocast its two sides may have different ones.

        Raises:
            InputError: The factor does not fit the parameter, so the rule is broken.
        """
        if not isinstance(factor, Factor):
            raise InputError(f"a rule is broken: its builder for {place} gives {a_kind(factor)}; expected one of psg.factors.")
        try:
            got, expected = (factor.n, factor.shape), (n, self.leaf.shape[1:])
        except IndexError:
            raise InputError(f"a rule is broken: a tensor of its {type(factor).__name__} for {place} has too few dimensions.") from None
        if got != expected:
            raise InputError(
                f"a rule is broken: its factor for {place} has {got[0]} samples of shape {tuple(got[1])}, "
                f"the parameter has {expected[0]} samples of shape {tuple(expected[1])}"
            )
        dtype = self.leaf.dtype

        def cast(tensor: Tensor) -> Tensor:
            if tensor.requires_grad and not torch.is_grad_enabled():
                tensor = tensor.detach()
            return tensor if tensor.dtype == dtype or not _trees.is_inexact(tensor) else tensor.to(dtype)

        return factor.map(cast)

    def factor(self, n: int) -> Factor:
        """The terms as one factor of the parameter's dtype."""
        if not self.terms:
            return Sum([], self.leaf.new_empty(n, 0), self.leaf.shape[1:])
        if self.leaf.shape[1:].numel() == 0:  # what is not finite in the sides of a gradient without entries makes no norm NaN
            return Dense(self.leaf.new_empty(n, *self.leaf.shape[1:]))
        return merge(self.terms)


class Tap(NamedTuple):
    """The place of a rule's outputs in the graph, and the builders that make factors of the cotangents that arrive there."""

    op: str
    edges: tuple[GradientEdge, ...]
    zeros: tuple[Tensor, ...] | None  # for several outputs: these take no memory, for cotangents that never arrive
    builders: list[tuple[str, Lifted, Callable[[Any], Factor]]]
    inputs: list[tuple[Tensor, int]]  # tensors that the builders will read, each with its version when the rule read it
    outputs: list[tuple[ref[Tensor], int]]  # the same of the rule's outputs, some of which the builders may hold
    nbytes: int  # of the outputs, and so of the cotangents
    guess: Any = None  # if a pass only guessed which samples the output rows belong to, the key of that guess

    @property
    def is_little(self) -> bool:
        """Whether the outputs, and the tensors that the builders will read, are few numbers."""
        return self.nbytes + sum([tensor.nbytes for tensor, _ in self.inputs]) <= _FEW_BYTES

    @property
    def read(self) -> list[Tensor]:
        """What the builders will read: the inputs, and outputs that they hold."""
        held = {id(own) for *_, build in self.builders for own in _closed_over(build)}
        outputs = [own() for own, _ in self.outputs]
        return [tensor for tensor, _ in self.inputs] + [own for own in outputs if own is not None and id(own) in held]

    @property
    def is_outdated(self) -> bool:
        """Whether a tensor that the builders will read has been changed in place."""
        if any([tensor._version != version for tensor, version in self.inputs]):
            return True
        written = [id(output) for own, version in self.outputs if (output := own()) is not None and output._version != version]
        return bool(written) and not set(written).isdisjoint(map(id, self.read))

    def factors(self, arrived: Sequence[Tensor | None], n: int) -> list[tuple[Lifted, Factor]]:
        """The factors that the builders make of the outputs' cotangents, at least one of which has arrived."""
        cotangent: Any = arrived[0]
        if self.zeros is not None:
            cotangent = tuple(zero if own is None else own for own, zero in zip(arrived, self.zeros, strict=True))
        return [(value, value.accept(build(cotangent), f"{name} of {self.op}", n)) for name, value, build in self.builders]


class Watch(TorchFunctionMode):
    """Watches the calls of a function, and recognises lifted values among their arguments by the wrappers that the function holds.

    Attributes:
        n: The number of samples.
        params: The lifted parameters.
        values: The lifted parameters and, as they appear, the values derived from them.
        derived_at: The storage addresses of the latter.
        by_handle: The lifted values by the id() of the wrapper that the function holds.
        taps: The taps whose cotangents the backward pass will take.
        quiet: Views of lifted values taken under no_grad.
        level: The level of the transform in which the function runs; -1 outside of all.
    """

    def __init__(self, n: int, params: Sequence[Lifted], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.level = -1
        self.n = n
        self.params = params
        self._inputs = inputs
        self.values = list(params)
        self.derived_at: set[int] = set()
        self.by_handle: dict[int, Lifted] = {}
        self.taps: list[Tap] = []
        self.quiet: list[Tensor] = []

    def hold(self, value: Lifted, handle: Tensor) -> Tensor:
        """Register the wrapper under which the function holds this value from now on; returns the wrapper."""
        value.handle = handle
        self.by_handle[id(handle)] = value
        return handle

    # Cached, since deep models have hundreds of parameters, and hundreds of in-place activations to check against them.

    @cached_property
    def owned(self) -> set[int]:
        """The storage addresses of the parameters."""
        return {_functorch.memory_of(value.leaf) for value in self.params}

    @cached_property
    def given(self) -> set[int]:
        """The storage addresses of the inputs that the function must not write into."""
        return {_functorch.memory_of(tensor) for tensor in self._inputs if tensor.numel()}

    def expect_agreed(self, tensor: Tensor) -> None:
        """Refuse a Python value of a tensor that is not the same for all samples by its nature."""

    def lifted_among(self, leaves: Sequence[Any]) -> list[Lifted]:
        """The lifted values among the arguments of a call."""
        return [self.by_handle[id(leaf)] for leaf in leaves if id(leaf) in self.by_handle]

    def are_few(self, tensors: Sequence[Tensor], inside: bool) -> bool:
        """Whether those of a call are so few numbers that vmap computes it for every sample in less time than Python takes for a rule.

        A rule takes more time inside a transform or a derivative of the function's own, and for data of several rows, whose factor is more
        than two vectors. (A program that is traced has no such overhead.)
        """
        most, sampled, largest = 2 * _FEW_BYTES, False, 0
        if any([value.nbytes >= most for value in self.lifted_among(tensors)]) or _functorch.is_traced():
            return False  # what is usual first
        for tensor in tensors:
            own = _functorch.innermost(tensor, self.level)
            value = self.by_handle.get(id(own))
            if value is not None:
                if value.leaf.itemsize < 4:
                    return False  # the gradients of several uses would add up in this dtype
                largest = max(largest, value.nbytes)
            elif own.ndim == 0 and _trees.is_inexact(own):
                return False  # perhaps in the place of a number, which a rule takes; an integer is an index
            elif _functorch.is_batched(own, self.level):
                sampled = True
                inside = inside or own.numel() > own.shape[-1:].numel()
                if self.n * own.nbytes >= most:
                    return False
        return sampled and largest * (1 if inside else 8) < most

    def ask(self, predicate: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """What plain autograd would say of a tensor."""
        value = self.by_handle.get(id(tensor))
        if value is not None:
            return value.ask(predicate)
        return predicate == REQUIRES_GRAD and any(view is tensor for view in self.quiet) or predicate(tensor)

    def attached(self, leaf: Any) -> Any:
        """For a lifted value its attached value, with a history up to the parameters; any other argument as it is."""
        value = self.by_handle.get(id(leaf))
        return leaf if value is None else value.attached

    def wrapped(self, value: Lifted) -> Tensor:
        """The tensor under which the function is to hold a derived value."""
        raise NotImplementedError

    def lift(self, func: Any, parents: list[Lifted], args: Any, kwargs: Any, output: Any) -> tuple[Any, list[Lifted], list[Tensor]]:
        """Lift an op's output; returns what the function gets, the derived values in it, and the tensors in it without a history."""
        several = isinstance(output, (tuple, list))
        parts = list(output) if several else [output]
        given = set(map(id, tensors_of(args, kwargs)))  # an op may return a constant of the caller's as it is
        values: list[Lifted] = []
        constants: list[Tensor] = []
        for i, part in enumerate(parts):
            if isinstance(part, Tensor) and part.requires_grad and part.grad_fn is None and id(part) not in given:
                parts[i] = part = part.detach()  # a view under no_grad has no history, though it says that it requires grad
                self.quiet.append(part)
            if isinstance(part, Tensor) and part.requires_grad:
                step = Step(part_of(func, i if several else None), args, kwargs, part, name_of(func))
                values.append(Lifted.derivation(step, parents, self.n))
                parts[i] = self.hold(values[-1], self.wrapped(values[-1]))
            elif isinstance(part, Tensor) and id(part) not in given:
                constants.append(part)
        self.values += values
        self.derived_at.update(_functorch.memory_of(value.leaf) for value in values)
        for value in parents:
            value.uses.append(f"{name_of(func)}: derived")
        if several:
            output = type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
        else:
            output = parts[0]
        return output, values, constants

    def tap(
        self, op: str, outputs: tuple[Tensor, ...], single: bool, builders: Any, inputs: Sequence[Tensor], guess: Any = None
    ) -> tuple[Tensor, ...]:
        """Tap a rule's outputs; returns the outputs with which the function goes on."""
        read = [(tensor, tensor._version) for tensor in inputs]
        made = [(ref(output), output._version) for output in outputs]
        outputs, edges = _anchored(outputs, inputs)
        zeros = None if single else tuple(output.detach().new_zeros(()).expand(output.shape) for output in outputs)
        self.taps.append(Tap(op, edges, zeros, builders, read, made, sum([output.nbytes for output in outputs]), guess))
        return outputs


def _closed_over(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def with_history(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A rule's data, at least one of them with a history, so that autograd records the op and its output can be tapped.

    This costs nothing in the backward pass, which stops at the output.
    """
    for value in values:
        if value.requires_grad:
            return values
    for i, value in enumerate(values):
        if value.is_floating_point():
            return (*values[:i], value.detach().requires_grad_(), *values[i + 1 :])
    return values


class _Anchor(torch.autograd.Function):
    """Give a history to a tensor that has none, without a copy and without making it a leaf or a view.

    An in-place op of the user's on the output of a first layer is then as legal as in plain PyTorch. It has no backward: every backward
    pass stops at the edge of its output, where the cotangent is taken.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output


def _anchored(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[GradientEdge, ...]]:
    """A rule's outputs with a history, and the edges at which their cotangents will arrive."""
    found, given = [], set(map(id, inputs))
    for output in outputs:
        # An in-place op on a view would make the gradient bypass the edge. At that of an input, or of an output from which another one has
        # been computed, more would arrive than the cotangent of the output.
        if len(outputs) > 1 or output._is_view() or id(output) in given:
            output = output.clone()
        found.append(output if output.requires_grad else _Anchor.apply(output, torch.empty(0, requires_grad=True)))
    # Taken now, since a later in-place op of the user's gives the tensor another edge.
    return tuple(found), tuple(map(get_gradient_edge, found))


_MANY_STEPS = 16
_FEW_BYTES = 1 << 17  # of all samples


def pull_back(values: Sequence[Lifted], params: Sequence[Lifted], n: int) -> None:
    """Turn the terms of derived values into terms of the parameters they were computed from."""
    derived = [value for value in values if value.made_by is not None]
    # Many steps on small tensors: autograd pulls all of them back in less time than it takes to carry factors over each step.
    little = len(derived) >= _MANY_STEPS and all(value.is_little for value in (*derived, *params))
    for value in () if little else reversed(derived):  # parents come before the values derived from them
        value.carry_terms()
    derived = [value for value in derived if value.terms]
    if not derived:
        return
    roots = [value for value in params if value.attached is not None]
    outputs: Any = [value.attached for value in derived]
    inputs: Any = [value.attached for value in roots]
    cotangents = [value.factor(n).materialize() for value in derived]
    with WrittenBackward():
        found = _autograd.pulled_for_all(outputs, inputs, cotangents)
    for value, gradient in zip(roots, found, strict=True):
        if gradient is not None:
            value.terms.append(Dense(gradient))
