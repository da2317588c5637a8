"""The pass for functions of a whole batch: `fn(params, *batch) -> losses [n]`, called once, without vmap.

It serves functions that vmap cannot run and a loop would run slowly: data-dependent routing, `.item()`, kernels without a batching rule.
The gradient of sample i is that of losses[i].

This pass makes no copy of a parameter for each sample. An op that combines a parameter with data runs by its rule, which treats each row
of the data as a sample. An op on parameters alone is computed once, and its gradients are pulled back. Any other op that meets a parameter
raises an error, because nothing tells which sample its gradient belongs to.

Weighted backward passes measure which sample each row belongs to (`_owners.py`). If the measurement fails, the call runs again by groups of
samples, or raises an error.

Some ops combine a parameter with tensors that all samples share (a frozen weight, a mask, positions in a table), or repeat a parameter.
Their output may be one value for all samples, to be computed once, or may have rows of each sample's own (an initial state, a class token
for each image). Only the backward pass can tell: the pass tries the likelier choice first, and runs again with the other one if the first
fails. Either choice gives the gradient of losses[i], or an error: the losses depend on a value that is computed once just as they depend on
a parameter. Tensors with a history never enter such a value, because their history would be lost.

The wrappers of parameters that fn holds require grad, though no gradient should reach them. If one does, an op has met the parameter
unseen, which is an error. Activation checkpointing runs ops again in the backward pass, so that pass runs under the same mode.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointError

from psg import _trees
from psg._batch._owners import NotFinite, are_apart, groups, measure, sets_apart
from psg._batch._sampled import Sampled
from psg._call import Call
from psg._capture._capture import Captured, Function
from psg._capture._carries import run_pullable
from psg._capture._derived import derives
from psg._capture._lifted import Lifted, Tap, pull_back
from psg._capture._operands import run_rule
from psg._capture._rewriting import Rewriting
from psg._errors import InputError, PsgError, StateError, first_line, user_line
from psg._torch import _autograd, _functions, _functorch, _random, _scripts
from psg._torch._autocast import cast_of
from psg._torch._higher_order import HIGHER_ORDER
from psg._torch._ops import (
    ACCUMULATING,
    DETACHING,
    DIFFERENTIATING,
    GRAD_FN,
    METADATA,
    PREDICATES,
    REQUIRING,
    SET_DATA,
    SHOWING,
    Node,
    handle_only,
    handled_by,
    handlers_among,
    name_of,
    places_of,
    replace_at,
    run_handlers,
    substitute,
    target_of,
    tensors_of,
    torchs_arguments,
)
from psg._watch import _copies, _pass
from psg._watch._habits import Retry, habits_of, remember
from psg._watch._marks import Marks
from psg._watch._outside import Looking
from psg._watch._writes import Aliases, changes_nothing, written
from psg.factors._arithmetic import as_real
from psg.rules import _kernels, _registry
from psg.rules.embedding import LOOKUPS
from psg.rules.leaks import refuse_updates
from psg.rules.rows import split_rows
from psg.rules.unlifted import (
    BROADCASTING,
    COMPARISONS,
    ELEMENTWISE,
    EXPANSIONS,
    IN_FLOAT64,
    IN_PLACE,
    INTERLEAVING,
    JOINS,
    OUTER_PRODUCTS,
    SUMS,
    VIEWING,
    WRITTEN_OUT,
)


def capture_batch(call: Call, function: Function) -> Captured:
    """Run the pass described at the top of this file.

    Args:
        call: What to run; its samples share all arguments to differentiate.
        function: Calls its function.

    Returns:
        The outputs and the factors.

    Raises:
        InputError: A parameter reaches an op that has no rule, or a rule that does not fit.
        StateError: Two losses depend on one row.
        NotFinite: A row's cotangent is infinite or NaN.
    """
    choices, copied = _Choices({}), habits_of(call.fn).copied
    left: list[_Choices] = []  # to be tried yet
    failure: PsgError | None = None  # a copy of the first error: the error itself would keep all frames alive
    passes = 0
    start = _random.Start(call.tensors)
    while True:
        try:
            return _one_pass(call, function, copied, choices)
        except Retry:
            # For example an in-place activation on the batch itself: on a copy it does not change the caller's tensor.
            copied = True
            remember(call.fn, habits_of(call.fn)._replace(copied=True))
        except _SharedRows as error:
            failure, choices = failure or error.failure, choices.with_all(error.keys, True)
        except (InputError, StateError) as error:
            passes += 1
            left = [*choices.others(), *left]
            if failure is None and not left:
                raise error from None
            failure = failure or type(error)(*error.args)
            note = f"With {choices.instead} instead: {error}"
            if str(error) != str(failure) and note not in getattr(failure, "__notes__", ()):
                failure.add_note(note)
            if not left or passes == _MOST_PASSES:
                raise failure from None
            choices = left.pop(0)
        start.go_back()


_MOST_PASSES = 8  # that fail


_Choice = tuple[str, str, tuple[tuple[int, ...], ...]]
"""An op, a parameter, and the shapes of the other tensors that the op takes, or of its output."""


class _Choices:
    """Which ops make one value for all samples, and which make rows of each sample's own.

    Args:
        known: True for one value, False for rows: shown by a backward pass, or tried since a pass that chose otherwise has failed.
        instead: What is tried, for messages.

    Attributes:
        guessed: The ops for which the current pass computes one value without knowing.
        parted: Those for which it makes rows without knowing.
    """

    def __init__(self, known: dict[_Choice, bool], instead: str = "") -> None:
        self.known = known
        self.instead = instead
        self.guessed: set[_Choice] = set()
        self.parted: set[_Choice] = set()

    def with_all(self, keys: set[_Choice], once: bool) -> "_Choices":
        """The same for another pass, in which these ops compute one value, or else make rows."""
        return _Choices(self.known | dict.fromkeys(keys, once), "one value for all samples" if once else "rows of each sample's own")

    def others(self) -> "list[_Choices]":
        """What else to try if the pass has failed, and nothing shows why: either kind of guess the other way, the likelier first."""
        return [self.with_all(keys, once) for keys, once in ((self.guessed, False), (self.parted, True)) if keys]


class _SharedRows(PsgError):
    """Several losses depend on rows that were taken for a single sample's.

    Attributes:
        keys: The ops that made these rows, or rows that they were computed from.
        failure: The error to raise if one value for all samples fails, too.
    """

    def __init__(self, keys: set[_Choice], failure: StateError) -> None:
        super().__init__("rows belong to several samples")
        self.keys = keys
        self.failure = failure


def _one_pass(call: Call, function: Function, copied: bool, choices: _Choices) -> Captured:
    """Run one pass; with `copied` on copies of all arguments but the parameters, so that the function may write into them."""
    n, tensors, params = call.n, [tensor.detach() for tensor in call.tensors], call.tensor_params
    if copied:  # new copies for each pass: a pass that failed may have written into its own
        tensors = [tensor if i in params else _copies.copy_of(tensor) for i, tensor in enumerate(tensors)]
    inputs = [] if copied else [*tensors, *call.keyword_tensors]
    sampled = Sampled(tensor for tensor, dim in zip(tensors, call.tensor_dims, strict=True) if dim is not None)
    values = [Lifted.parameter(tensors[i], None, n, call.paths[position]) for i, position in zip(params, call.params, strict=True)]
    mode = _BatchMode(n, values, inputs, sampled, call.outside.look, choices)
    for position, value in zip(params, values, strict=True):
        tensors[position] = mode.hold(value, tensors[position].detach().requires_grad_())
    called = _pass.Pass()
    with torch.enable_grad(), _pass.opened(called), _functions.routed(mode.run_function), _scripts.inlining(), mode:
        outputs = function(tensors, copied)
    if mode.failure is not None:
        raise mode.failure  # fn has caught it
    uses = [list(value.uses) for value in values]
    called.expect_replaced(_autograd.leaves_in(_autograd.nodes_of(outputs[0].grad_fn)))
    with called.again(), _functions.routed(mode.run_function), _scripts.inlining():
        try:
            mode.backward(outputs[0])
        except CheckpointError as error:
            raise InputError(
                'method="batch": a checkpointed part of fn ran in another way when it ran again for the backward pass. A module called by '
                "torch.func.functional_call has its own parameters back by then: checkpoint a function of the parameters instead, or none. "
                f"{_FOR_ONE_SAMPLE}"
            ) from error
        except RuntimeError as error:
            why = next((why for cause, why in _FAILURES.items() if cause in str(error)), None)
            if why is None:
                raise
            raise InputError(f'method="batch": {why} {_FOR_ONE_SAMPLE}') from error
    try:
        pull_back(mode.values, values, n)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(value.is_from_autograd_function for value in mode.values):
            raise
        raise InputError(
            'method="batch": the backward of an autograd.Function that is given parameters cannot run for several cotangents at once: '
            f"{first_line(error).rstrip('.')}. {_FOR_ONE_SAMPLE}"
        ) from error
    # fn may close over what does not depend on the samples.
    outputs = [output if output in sampled else output.clone() for output in outputs]
    return Captured(call.apart(outputs), [value.factor(n) for value in values], uses)


_FOR_ONE_SAMPLE = 'Write fn for one sample and use method="auto".'

_SEVERAL_PASSES = "which allows one backward pass; this method runs several, to measure whose each row is."
_FAILURES = {
    "selective activation checkpoint": f"fn uses a selective activation checkpoint, {_SEVERAL_PASSES} Use a plain one, or none.",
    "through the graph a second time": f"fn uses an autograd.Function that differentiates a graph of its own, {_SEVERAL_PASSES}",
    "When use_reentrant=True": "fn uses a reentrant checkpoint, whose gradients psg would not see: pass use_reentrant=False.",
}
"""Errors of torch's in the backward pass, by a part of their message, and why they are raised."""


class _BatchMode(Rewriting, Looking):
    """Watches the calls of the function and routes those that meet a parameter."""

    held = 4  # also what fn holds

    def __init__(
        self,
        n: int,
        params: Sequence[Lifted],
        inputs: Sequence[Tensor],
        sampled: Sampled,
        look: Callable[..., Any],
        choices: _Choices,
    ) -> None:
        super().__init__(n, params, inputs, Aliases((), follows=False))
        self.own = Marks()
        self.sampled = sampled
        self.look = look
        self.choices = choices
        self.level = _functorch.current_level()
        self.repeated: dict[Any, int] = {}  # by storage: copies of values in the place of expanded views, and the size of these values
        self.failure: PsgError | None = None  # a copy of the error raised: the error itself would keep all frames alive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torchs_arguments(func, args, kwargs)
        func = _registry.namesake(func, kwargs)
        if func in METADATA:
            return func(*args, **kwargs)
        if changes_nothing(func, args):
            return None
        if func in HIGHER_ORDER:
            return self._run_inside(HIGHER_ORDER[func], args, kwargs)
        if (cast := cast_of(func, args, kwargs)) is not None:
            return cast.run(self, func, args, kwargs)
        tensors, target = tensors_of(args, kwargs), target_of(func, args, kwargs)
        try:
            if types and (handlers := handlers_among(types)):
                if not handle_only(handlers, tensors, self._is_constant):
                    raise InputError(f'method="batch": {handled_by(handlers[0])}.')
                return run_handlers(self, handlers, func, types, args, kwargs)
            output = self._route(func, args, kwargs, tensors, target)
        except PsgError as error:
            self.failure = type(error)(*error.args)
            raise
        self.sampled.follow(func, tensors, output, target)
        if target is None and isinstance(output, Tensor) and self._is_constant(output):
            self.note_constant(func, args, kwargs, tensors, output)
        return output

    def _route(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], target: Any) -> Any:
        self.look(func, tensors, self.by_handle.keys(), self.level)
        if target is not None:
            output = self._protect(func, args, kwargs, target)
            if output is not NotImplemented:
                return output
        if func in SHOWING:
            self.aliases.show(args[0])
        if func == SET_DATA or func is Tensor.set_:
            self.own.forget_new(args[0])
        refuse_updates(func, args, kwargs, target)
        if func == torch._VF._make_dual or (func in DIFFERENTIATING and kwargs.get("create_graph")):
            raise InputError(
                f'method="batch": {name_of(func)} at {user_line()} makes derivatives that are differentiated in turn; rules give no such '
                f"derivatives. {_FOR_ONE_SAMPLE}"
            )
        if func in ACCUMULATING and kwargs.get("inputs") is None:
            self._refuse_accumulation(tensors)
        met = self.lifted_among(tensors)
        if func in PREDICATES:
            answer = self.ask(func, args[0])
            return Node(answer, self._refuse) if func == GRAD_FN and answer is not None else answer
        body = _registry.body_of(func)
        if not met:
            return _kernels.run(func, args, kwargs) if body is None else self._run_inside(body, args, kwargs)
        if _functorch.current_level() != self.level:
            names = ", ".join(value.name for value in met)
            raise InputError(f'method="batch": {names} is used inside a torch.func transform at {user_line()}. {_FOR_ONE_SAMPLE}')
        returned = [value.name for value in met if value.handle is not None and value.handle.grad_fn is not None]
        if returned:  # a handle, or a view of one, that the Function's forward has returned: a rule would skip its backward
            self._refuse(f"{returned[0]} as an autograd.Function returns it")
        if func in REQUIRING and False in (*args[1:], *kwargs.values()):
            self._refuse(f"requires_grad_(False) on {met[0].name}")
        if func in DETACHING:  # the handle would go on as the same value
            self._refuse(f"detach_ on {met[0].name}")
        if func == Tensor.register_hook:  # it would never see the gradient of a rule, and run under vmap when others are pulled back
            self._refuse(f"a hook on {met[0].name}")
        if body is not None:
            output = self._run_rule(func, args, kwargs, None)
            return output if output is not NotImplemented else self._run_inside(body, args, kwargs)
        return self._run_met(func, args, kwargs, met, tensors, target)

    def _refuse_accumulation(self, tensors: list[Tensor]) -> None:
        """Raise if a graph to which fn, or the backward of one of its autograd.Functions, applies `backward()` leads to a parameter."""
        graph = {node for tensor in tensors for node in _autograd.nodes_of(tensor.grad_fn)}
        names = [value.name for value in self.lifted_among(tensors)]
        names += [value.name for tap in self.taps if any(edge.node in graph for edge in tap.edges) for _, value, _ in tap.builders]
        names += [value.name for value in self.values if value.handle is not None and get_gradient_edge(value.handle).node in graph]
        if names:
            raise InputError(
                f'method="batch": backward() at {user_line()} would add to the .grad of {names[0]}, unseen by psg. If a checkpoint calls '
                f"it, pass use_reentrant=False. {_FOR_ONE_SAMPLE}"
            )

    def _run_met(self, func: Any, args: Any, kwargs: Any, met: list[Lifted], tensors: list[Tensor], target: Any) -> Any:
        """Run an op that parameters, or values computed from them, meet."""
        others = [tensor for tensor in tensors if id(tensor) not in self.by_handle]
        if any(tensor.is_nested for tensor in others):
            raise InputError(
                f'method="batch": {met[0].name} meets a nested tensor in {name_of(func)} at {user_line()}, which has no rows that rules '
                "could read. Pad it (torch.nested.to_padded_tensor), or unbind it."
            )
        if func in JOINS and not others:
            output = self._run_inside(JOINS[func], args, kwargs)
            if output is not NotImplemented:
                self.repeated.pop(_functorch.storage_of(output), None)  # a copy in torch, too
                return output
        if func in EXPANSIONS and len(met) == 1 and not others:
            output = self._expand(func, met[0], args, kwargs)
            if output is not NotImplemented:
                if func in VIEWING:
                    self.repeated[_functorch.storage_of(output)] = met[0].leaf.shape[1:].numel()
                    self.aliases.show(met[0].leaf)  # in torch, a write into it would reach this output
                return output
        if not others and _registry.find_leak(func, args, kwargs, "vmap") is None:
            return self._derive(func, met, args, kwargs)
        if func in LOOKUPS and others:
            output = self._run_inside(LOOKUPS[func], args, kwargs)
            if output is not NotImplemented:
                return output
        return self._run_mixed(func, args, kwargs, met, others, target)

    def run_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Compute an autograd.Function of parameters and shared tensors once; NotImplemented for any other."""
        if _get_current_function_mode() is not self:
            return NotImplemented
        func, args = _functions.custom_function_call, (function, *args)
        with _pop_mode_temporarily():
            tensors = tensors_of(args, kwargs)
            met = self.lifted_among(tensors)
            if not met or not all(self._is_constant(leaf) for leaf in tensors if id(leaf) not in self.by_handle):
                return NotImplemented
            if _registry.find_leak(func, args, kwargs, "vmap") is not None:
                return NotImplemented
            return self._derive(func, met, args, kwargs, watched=True)

    def _run_inside(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function under this mode."""
        with self:
            return function(*args, **kwargs)

    def _run_mixed(self, func: Any, args: Any, kwargs: Any, met: list[Lifted], others: list[Tensor], target: Any) -> Any:
        """Run an op of parameters and other tensors: once for all samples if these are constants, else by its rule or decomposed.

        Raises:
            InputError: It can run in none of these ways.
        """
        says_where = not any(map(_trees.is_inexact, others))  # the others are indices, masks and the like
        leaks = _registry.find_leak(func, args, kwargs, "capture", "vmap") is not None
        choice, likely = (None, False) if leaks else self._choice(func, args, kwargs, met, others, target, says_where)
        if choice is not None and self._is_for_all(choice, likely):
            return self._derive(func, met, args, kwargs)
        if func in IN_PLACE and args[0] is not met[0].handle:
            with self:  # computed from a copy, since rules read the data again after the write
                output = IN_PLACE[func](args[0].clone(), *args[1:], **kwargs)
            if not torch.can_cast(output.dtype, args[0].dtype):  # an integer, say, that a float is added to: torch's own error
                return func(*args, **kwargs)
            with self:
                return args[0].copy_(output)
        output = self._run_rule(func, args, kwargs, choice)
        if output is not NotImplemented:
            return output
        dense = all(leaf.layout == torch.strided for leaf in others)
        decompose = WRITTEN_OUT.get(func) or _registry.find_decomposition(func, differentiated=False)
        decompose = decompose if dense and "out" not in kwargs else None
        if decompose is not None:
            output = self._run_inside(decompose, args, kwargs)
            if output is not NotImplemented:
                return output
        if func in COMPARISONS:
            return _kernels.run(func, *self._bare((args, kwargs)))
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in BROADCASTING:
            output = self._spread(func, args, kwargs, met)
            if output is not NotImplemented:
                return output
        if target is not None:
            output = self._rewrite(func, args, kwargs, target)
            if output is not NotImplemented:
                return output
        if self.n > 1 and _counts_ids(func, args, kwargs) and any(leaf in self.sampled for leaf in others):
            raise InputError(
                f'method="batch": {met[0].name} reaches {name_of(func)} at {user_line()} with scale_grad_by_freq=True, which counts the '
                f"ids of the whole batch, so that a sample's gradient would depend on the others. {_FOR_ONE_SAMPLE}"
            )
        if (says_where and not leaks) or (choice is not None and self._is_for_all(choice, True)):
            return self._derive(func, met, args, kwargs)
        names = ", ".join(value.name for value in met)
        way_out = "Freeze the parameter"
        if target is not None:
            way_out = "Make a new tensor instead of the write (index_put, torch.where, torch.cat), freeze the parameter"
        raise InputError(
            f'method="batch": {names} reaches {name_of(func)} at {user_line()}, for which this method has no rule that fits. '
            f'{way_out}, or write fn for one sample and use method="auto".'
        )

    def _choice(
        self, func: Any, args: Any, kwargs: Any, met: list[Lifted], others: list[Tensor], target: Any, says_where: bool
    ) -> tuple[_Choice | None, bool]:
        """The choice between one value for all samples and rows of each sample's own, if the op allows both; and if one value is likely."""
        # A tensor with a history would lose it in a value that is computed once.
        constant = all(map(self._is_constant, others))
        if not (constant and target is None and derives(func, args, kwargs) or says_where and _computable_once(func, args, kwargs)):
            return None, False
        # A tensor with n rows may have one for each sample. A single number is likely shared: it may choose an expert.
        # But a mask, say, has them as the parameter does, whose shape it has; and of a sparse tensor no rule could take the rows.
        alike = {met[0].leaf.shape[1:]} if func not in OUTER_PRODUCTS else set()
        likely = constant and all(leaf.shape[:1] != (self.n,) or leaf.shape in alike or leaf.layout != torch.strided for leaf in others)
        likely |= says_where and all(_is_one(self.n, leaf.shape) for leaf in others)
        return (name_of(func), met[0].name, tuple(tuple(leaf.shape) for leaf in others)), likely

    def _refuse(self, what: str) -> None:
        message = f'method="batch": fn uses {what} at {user_line()}, through which rules do not go. {_FOR_ONE_SAMPLE}'
        self.failure = InputError(message)
        raise InputError(message)

    def _protect(self, func: Any, args: Any, kwargs: Any, target: Any) -> Any:
        """Refuse to write into memory that the caller owns. Write into what is computed once; NotImplemented for other targets."""
        memories = set(map(_functorch.memory_of, written(target)))
        if memories & self.owned:
            raise InputError(
                f'method="batch": {name_of(func)} at {user_line()} writes into a parameter, or a view of one. Write into a clone of it.'
            )
        if memories & self.derived_at:
            output = self._rewrite(func, args, kwargs, target)
            if output is not NotImplemented:
                return output
            raise InputError(
                f'method="batch": {name_of(func)} at {user_line()} writes into what was computed from parameters, where it cannot be told '
                "what that becomes for all samples: the write depends on the samples, say, or other tensors share the memory. Use the op "
                "that gives a new tensor."
            )
        # In torch that is a view, which may be written into where an entry counts once: in one repetition, or if there is only one.
        targets = [tensor for tensor in written(target) if tensor.layout == torch.strided] if self.repeated else []
        if any(tensor.numel() <= self.repeated.get(_functorch.storage_of(tensor), -1) for tensor in targets):
            raise InputError(
                f'method="batch": {name_of(func)} at {user_line()} writes into an expanded view of a parameter, or of what was computed '
                "from parameters. Write into a copy: repeat() or clone() gives one."
            )
        if memories & self.given:
            raise Retry(f"{name_of(func)} writes into an input, or a view of one", copied=True)
        return NotImplemented

    def _rewrite(self, func: Any, args: Any, kwargs: Any, target: Any) -> Any:
        """Write into what is computed once, or make a new constant that; NotImplemented where that cannot be told, or samples meet it.

        Where the write is not the same for all samples, the backward pass tells, as for any value that is computed once.
        """
        if not isinstance(target, Tensor) or not args or args[0] is not target or _functorch.current_level() != self.level:
            return NotImplemented
        others = [tensor for tensor in tensors_of(args, kwargs) if id(tensor) not in self.by_handle]
        if target.grad_fn is not None or not all(map(self._is_constant, others)):
            return NotImplemented  # with a history, it is data, or an autograd.Function has returned it
        family = self.family_of(target, self.by_handle.get(id(target)))
        read = {id(tensor) for tap in self.taps for tensor, _ in tap.inputs}  # what rules will read again
        if family is None or not read.isdisjoint(map(id, (family.owner, *family.views))):
            return NotImplemented
        return self.rewrite_once(func, args, kwargs, family)

    def derive_anew(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As in the base class."""
        return self._derive(func, self.lifted_among(tensors_of(args, kwargs)), args, kwargs)

    def below(self) -> contextlib.AbstractContextManager[Any]:
        """As in the base class."""
        return _autograd.unhooked()

    def wrapped(self, value: Lifted) -> Tensor:
        """As in the base class."""
        assert value.value is not None
        return value.value.detach().requires_grad_()

    def _derive(self, func: Any, met: list[Lifted], args: Any, kwargs: Any, watched: bool = False) -> Any:
        """Compute an op on parameters and shared tensors once, with a history by which gradients are pulled back.

        `watched` says whether this mode sees the ops that it calls in turn.
        """
        args, kwargs = substitute((args, kwargs), self.attached)
        with _autograd.unhooked():  # a checkpoint would drop what this op saves, and find it by running fn again without rules
            output = self._run_inside(func, args, kwargs) if watched else run_pullable(func, *args, **kwargs)
        return self.lift(func, met, args, kwargs, output)[0]

    def _is_for_all(self, choice: _Choice, likely: bool) -> bool:
        """Whether to compute one value for all samples, rather than rows of each sample's own. If this is unknown, guess what is likely."""
        if choice not in self.choices.known:
            (self.choices.guessed if likely else self.choices.parted).add(choice)
        return self.choices.known.get(choice, likely)

    def _bare(self, tree: Any) -> Any:
        """The same arguments, with the values of parameters in place of their handles."""
        return substitute(tree, lambda leaf: self.by_handle[id(leaf)].value if id(leaf) in self.by_handle else leaf)

    def _expand(self, func: Any, value: Lifted, args: Any, kwargs: Any, op: str = "", once: bool = True) -> Any:
        """Repeat a parameter, each repetition a row of its own; NotImplemented if the repetitions are for all samples.

        `op` is the name of the op that needs rows of it, perhaps a single one, if that is another op; `once` says whether that op may make
        one value for all samples.
        """
        bare_args, bare_kwargs = self._bare((args, kwargs))
        output, shape = func(*bare_args, **bare_kwargs), value.leaf.shape[1:]
        if len(shape) > output.ndim or not torch.is_grad_enabled():
            return NotImplemented
        lead = output.shape[: output.ndim - len(shape)]
        along: list[tuple[int, int]] = []  # sizes, before and after, of dimensions of which each is repeated as a whole or not at all
        for size, full in zip(shape, output.shape[len(lead) :], strict=True):
            if size in (1, full):
                along.append((size, full))
            else:
                pair = (1, full // size), (size, size)
                along += pair[::-1] if func in INTERLEAVING else pair
        repeats = [*lead, *(full for size, full in along if size == 1)]
        if not repeats and self.n > 1 and not op:
            return NotImplemented
        in_front = bool(lead) or shape[:1] == (1,)
        choice = (name_of(func), value.name, (tuple(output.shape),)) if once else None
        if choice is not None and self._is_for_all(choice, _is_one(self.n, output.shape) if in_front else self.n not in repeats):
            return NotImplemented
        handle = value.handle
        if len(along) > len(shape):
            handle = self._run_inside(Tensor.reshape, (handle, [size for size, _ in along]), {})
        # Added to zeros, it is a sum with data, whose rule knows rows in every layout.
        zeros = output.new_zeros((*lead, *(full for _, full in along)))
        rows = self._run_rule(torch.add, (zeros, handle), {}, choice, op or name_of(func))
        return rows if rows is NotImplemented else rows.reshape(output.shape)

    def _spread(self, func: Any, args: Any, kwargs: Any, met: list[Lifted]) -> Any:
        """Run an op that broadcasts on parameters that are first repeated, so that every row has its own copy."""
        shape = self._run_inside(BROADCASTING[func], args, kwargs)
        if shape is not None and any(value.leaf.ndim - 1 > len(shape) for value in met):
            return NotImplemented
        once, rows = all(self._is_constant(leaf) for leaf in tensors_of(args, kwargs) if id(leaf) not in self.by_handle), {}
        for value in met:
            given = value.handle, value.leaf.shape[1:] if shape is None else shape
            rows[id(value.handle)] = self._expand(Tensor.expand, value, given, {}, name_of(func), once)
        if any(row is NotImplemented for row in rows.values()):
            return NotImplemented
        # Torch ranks the dtype of a number below that of other tensors; repeated, it would count.
        others = [leaf for leaf in tensors_of(args, kwargs) if leaf.ndim and _trees.is_inexact(leaf)]
        dtypes = {leaf.dtype for leaf in others}
        for value in met:
            if value.leaf.ndim == 1 and value.leaf.dtype not in dtypes and dtypes and func not in IN_FLOAT64:
                if len(dtypes) > 1:
                    return NotImplemented
                rows[id(value.handle)] = rows[id(value.handle)].to(*dtypes)
        args, kwargs = substitute((args, kwargs), lambda leaf: rows.get(id(leaf), leaf))
        return _kernels.run(func, args, kwargs)

    def _run_rule(self, func: Any, args: Any, kwargs: Any, choice: _Choice | None, op: str = "") -> Any:
        """Run the op's rule with every row of the data as a sample, and tap its output; NotImplemented if no rule fits.

        `op` is the name in messages, if fn has called another op.
        """
        if func in ELEMENTWISE:
            rule = ELEMENTWISE[func]
            args = sorted(args, key=lambda leaf: id(leaf) in self.by_handle)  # the op commutes: data first
        else:
            rule = _registry.find_rule(func)
        if rule is None:
            return NotImplemented
        bound = rule.bind(args, kwargs)
        if bound is None:
            return NotImplemented
        given = dict(places_of(bound))
        own = {place: self.by_handle[id(argument)] for place, argument in given.items() if id(argument) in self.by_handle}
        if any(name not in rule.params for name, _ in own):
            return NotImplemented  # a parameter in the place of data: its rows belong to no sample
        if any(leaf.layout != torch.strided for leaf in tensors_of(args, kwargs)):
            return NotImplemented  # sparse data cannot be reshaped to rows
        split = split_rows(func, bound, own) if own else None
        if split is None:
            return NotImplemented
        if self.n > 1 and split.rows == 1:  # no rows: perhaps a frozen weight, which has none, is among the data
            frozen = {place for place in split.data if place[0] in rule.params and self._is_constant(given[place])}
            if frozen and len(frozen) < len(split.data):
                split = split_rows(func, bound, own.keys() | frozen) or split
        bound = replace_at(bound | split.options, split.data)
        others = {place: tensor for place, tensor in places_of(bound) if place not in own}
        shared = {place: others.pop(place) for place in list(others) if place[0] in rule.params and place not in split.data}
        ran = run_rule(self, op or name_of(func), rule, bound, own, others, shared, split.rows, choice)
        return NotImplemented if ran is NotImplemented else split.join(*(ran if isinstance(ran, tuple) else (ran,)))

    def _is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor has no history, and does not depend on the samples."""
        return not (tensor.requires_grad or tensor in self.sampled)

    def backward(self, losses: Tensor) -> None:
        """Compute the cotangents at the taps, measure which sample each of their rows belongs to, and make factors of them."""
        if not losses.requires_grad:
            return  # no parameter was used
        # A checkpoint that is recomputed in the backward pass lifts and taps again; the factors need no more than these.
        values, taps = list(self.values), list(self.taps)
        targets = [edge for tap in taps for edge in tap.edges]
        handles: list[Any] = [value.handle for value in values]
        # Edges alone: this mode would intercept a call with tensors, and not be active inside it.
        output: Any = [get_gradient_edge(losses)]
        inputs: Any = [*targets, *map(get_gradient_edge, handles), *_autograd.sides_of_functions(losses)]
        ones = torch.ones_like(losses)
        with self:
            arrived = torch.autograd.grad(output, inputs, [ones], allow_unused=True, retain_graph=self.n > 1)
        direct = arrived[len(targets) : len(targets) + len(handles)]
        names = [value.name for value, gradient in zip(values, direct, strict=True) if gradient is not None]
        if names:
            raise InputError(
                f'method="batch": {", ".join(names)} reaches the losses by an op that no function mode sees (an autograd.Function that '
                f"is given samples too{_functions.OR_UNSEEN}, or TorchScript, say), or as it is. "
                f"{_FOR_ONE_SAMPLE}"
            )
        reached = [(tap, own) for tap, own in zip(taps, _by_tap(taps, arrived), strict=True) if _present(own)]
        for tap, _ in reached:
            if tap.is_outdated:
                raise InputError(f'method="batch": an input of {tap.op} was changed in place after {tap.op} had read it.')
        found = measure(losses, [_rows(own) for _, own in reached], partial(self._weighted, output, [tap for tap, _ in reached]))
        told = [(tap, own, samples) for (tap, own), samples in zip(reached, found, strict=True) if samples is not None]
        failed = [tap for (tap, _), samples in zip(reached, found, strict=True) if samples is None]
        if failed:
            raise self._shared_rows(failed)
        if any(_hides(tap, samples == self.n) for tap, _, samples in told):
            raise NotFinite(losses)
        if self.n > 1 and (shared := self._shared_after_all(losses, output, told)):
            raise self._shared_rows(shared)
        with torch.no_grad():
            for tap, own, samples in told:
                table = groups(samples, self.n)
                for value, factor in tap.factors(own, len(samples)):
                    value.terms.append(factor.regroup(table))

    def _shared_rows(self, failed: list[Tap]) -> PsgError:
        """The error to raise if these taps have rows on which several losses depend."""
        failure = StateError(
            f'method="batch": the output of {failed[0].op} has a row on which more than one loss depends, or whose sample rounding hides, '
            "or a hook or an autograd.Function behind it is not linear in the gradient. Each loss must depend on rows of its own: "
            "normalise over no batch, keep the samples in front of the dimensions of a parameter that is added, multiplied or repeated, "
            "and repeat one for every sample before it is joined with data. Losses that compare samples have no per-sample gradients, but "
            "shares: see README.md. Against rounding use a smaller chunk_size or a wider dtype."
        )
        guessed = {tap.guess for tap in failed if tap.guess is not None and not self.choices.known.get(tap.guess)}
        return _SharedRows(guessed, failure) if guessed else failure

    def _shared_after_all(self, losses: Tensor, output: Any, told: Sequence[tuple[Tap, Any, Tensor]]) -> list[Tap]:
        """The taps whose rows may be one value for all samples, and of which some row does depend on several losses."""
        guessed = [(tap, samples) for tap, _, samples in told if tap.guess is not None]
        if not guessed:
            return []
        sets = [own.to(losses) for own in sets_apart(self.n)]
        sides = [self._weighted(output, [tap for tap, _ in guessed], own) for own in sets]
        by_tap = zip(guessed, zip(*sides, strict=True), strict=True)
        return [tap for (tap, samples), cotangents in by_tap if not are_apart(samples, sets, cotangents)]

    def _weighted(self, output: Any, taps: list[Tap], weights: Tensor) -> list[Tensor]:
        """The cotangents that arrive at each tap, [rows, *], for these weights of the losses."""
        targets = [edge for tap in taps for edge in tap.edges]
        with self:
            arrived = torch.autograd.grad(output, targets, [weights], allow_unused=True, retain_graph=True)
        return [_rows(own) for own in _by_tap(taps, arrived)]


def _by_tap(taps: list[Tap], arrived: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    """The cotangents of all taps' outputs, split by tap."""
    sides = iter(arrived)
    return [[next(sides) for _ in tap.edges] for tap in taps]


def _present(cotangents: Sequence[Tensor | None]) -> list[Tensor]:
    """The cotangents that have arrived and are not empty."""
    return [own for own in cotangents if own is not None and own.numel()]


def _rows(cotangents: Sequence[Tensor | None]) -> Tensor:
    """The cotangents that have arrived at one tap, side by side as real numbers: [rows, *]."""
    present = [as_real(own) for own in _present(cotangents)]
    rows = [own.reshape(len(present[0]), -1) for own in present]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


_SUMS = set(map(name_of, SUMS))  # whose gradient does not read the data


def _hides(tap: Tap, unowned: Tensor) -> bool:
    """Whether a row that no cotangent gives to a sample has infinite or NaN data: its gradient is zero times that, which is NaN."""
    if tap.op in _SUMS or not unowned.any():
        return False
    data = [tensor for tensor in tap.read if tensor.shape[:1] == unowned.shape and _trees.is_inexact(tensor)]
    return not all(tensor[unowned].isfinite().all() for tensor in data)


def _is_one(n: int, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape has at most one row, though there are several samples."""
    return n > 1 and tuple(shape[:1]) in ((), (1,))


def _computable_once(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether torch can also compute an op that has a rule for rows: its gradient is dense."""
    bound = _bound(func, args, kwargs)
    return bound is not None and not bound.get("sparse")


def _counts_ids(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op scales its gradient by the frequencies of ids."""
    bound = _bound(func, args, kwargs)
    return bound is not None and bool(bound.get("scale_grad_by_freq"))


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments by name, of an op that has a rule; None of others."""
    rule = _registry.find_rule(func)
    return None if rule is None else rule.bind(args, kwargs)
