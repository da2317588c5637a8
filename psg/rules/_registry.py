"""The registries: rules, decompositions (ops rewritten with other ops), transposes, and leaks (ops that a pass must not run)."""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import handle_torch_function, has_torch_function

from psg._errors import InputError, received
from psg._torch._ambient import P, R
from psg._torch._cached import cached
from psg._torch._higher_order import HIGHER_ORDER
from psg._torch._ops import base_name, is_torchs, tensors_of
from psg._torch._patches import assigned


class Rule(NamedTuple):
    """A fast path for one op: how to run it on the physical batch, and the factors of its parameters.

    Attributes:
        run: Takes the op's arguments and returns `(output, {parameter name: builder})`, or NotImplemented to decline the call. A builder
            maps the output's cotangent (samples in dim 0; a tuple of them for a tuple of outputs) to the factor.
        params: The arguments that may be parameters.
        names: The arguments that may be given by position, in order.
        numbers: The arguments that are Python numbers; a tensor given for one is converted to its value, as in torch.
        star: The name of the `*args` argument, if there is one.
        accepted: The arguments that may be given by name.
        required: The arguments without a default.
        frozen: Whether the rule also runs where none of `params` is differentiated.
        declines_few: Whether the rule is only for calls on more than a few numbers.
        differentiable: Whether the rule runs in passes whose result has a derivative: the parameters then arrive with a history.
        takes_shared: Whether `run` takes the keyword `shared`; then arguments in `params` may also be data.
    """

    run: Callable[..., Any]
    params: tuple[str, ...]
    names: tuple[str, ...]
    numbers: frozenset[str]
    star: str | None
    accepted: frozenset[str]
    required: frozenset[str]
    frozen: bool
    declines_few: bool
    differentiable: bool
    takes_shared: bool

    @classmethod
    def of(
        cls,
        run: Callable[..., Any],
        params: tuple[str, ...],
        frozen: bool = False,
        declines_few: bool = False,
        differentiable: bool = False,
    ) -> "Rule":
        """The rule that runs this function."""
        try:
            signature = inspect.signature(run, eval_str=True)
        except NameError:  # an annotation for type checkers alone
            signature = inspect.signature(run)
        for name in params:
            if name not in signature.parameters:
                raise InputError(f"psg.rule(params={params!r}): {run.__name__} has no argument {name!r}; it takes {signature}.")
        arguments = signature.parameters.values()
        if any(a.kind in (a.POSITIONAL_ONLY, a.VAR_KEYWORD) for a in arguments):
            raise InputError(f"psg.rule: {run.__name__} has positional-only arguments or **options; expected (x, *rest, option=None).")
        by_position = [a for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD]
        star = next((a.name for a in arguments if a.kind is a.VAR_POSITIONAL), None)
        by_name = [a for a in arguments if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)]
        takes_shared = any(a.name == "shared" for a in by_name)
        return cls(
            run,
            params,
            names=tuple(a.name for a in by_position),
            numbers=frozenset(a.name for a in by_name if _is_number(a.annotation)),
            star=star,
            accepted=frozenset(a.name for a in by_name) - {"shared"},
            required=frozenset(a.name for a in by_name if a.default is a.empty) - {"shared"},
            frozen=frozen,
            declines_few=declines_few,
            differentiable=differentiable,
            takes_shared=takes_shared,
        )

    @property
    def takes_data_alone(self) -> bool:
        """Whether the rule may run a call without a parameter."""
        return self.frozen or not self.params

    def bind(self, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """The arguments of a call by name; None if they do not fit. What `inspect.Signature.bind` does, at a tenth of its cost."""
        arguments = dict(zip(self.names, args, strict=False))
        rest = args[len(self.names) :]
        if self.star is not None:
            arguments[self.star] = rest
        elif rest:
            return None
        for name, argument in kwargs.items():
            if name in arguments or name not in self.accepted:
                return None
            arguments[name] = argument
        return arguments if self.required <= arguments.keys() else None

    def call(self, arguments: dict[str, Any], shared: Iterable[str]) -> Any:
        """Run on arguments given by name; `shared` names those that are parameters."""
        if self.takes_shared:
            arguments = {**arguments, "shared": set(shared)}
        if self.star is None:
            return self.run(**arguments)
        rest = dict(arguments)
        first = [rest.pop(name) for name in self.names if name in rest]
        return self.run(*first, *rest.pop(self.star), **rest)


def outputs_and_builders(op: str, result: Any, n: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Check what a rule returned for n samples (or rows): its outputs, and the builders of the factors by name of the parameter.

    Raises:
        InputError: The rule returned something else.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise InputError(
            f"the rule for {op} has to return (output, {{parameter: builder}}) or NotImplemented, got {type(result).__name__}."
        )
    output, builders = result
    outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    for output in outputs:
        if not isinstance(output, Tensor) or output.ndim == 0 or output.shape[0] != n:
            got = ", ".join(str(tuple(own.shape)) if isinstance(own, Tensor) else type(own).__name__ for own in outputs)
            raise InputError(f"the rule for {op} has to return outputs with the {n} samples in dim 0, got {got}.")
    return outputs, builders


def _is_number(annotation: Any) -> bool:
    return set(get_args(annotation) or (annotation,)) <= {bool, int, float, types.NoneType}


_rules: dict[Any, Rule] = {}
_decompositions: dict[Any, Callable[..., Any]] = {}
_differentiated_decompositions: dict[Any, Callable[..., Any]] = {}
_misderived: set[Any] = set()
_everywhere: set[Any] = set()
_transposes: "dict[Any, Transpose]" = {}
_transposable_forms: dict[Any, Callable[..., Any]] = {}
_forms_of_each: dict[Any, Callable[..., Any]] = {}
_leaks: "dict[Any, Leak]" = {}
ALWAYS, DIFFERENTIATED, MIXED, SPARSE = "any call", "a pass that is differentiated", "numbers of several dtypes", "a sparse tensor"
REWRITTEN: dict[Any, set[str]] = {}
"""The ops that have a decomposition or a leak, each with what a call needs to meet it: one of these, or an option of this name."""
_disabled: ContextVar[bool] = ContextVar("psg_rules_disabled", default=False)


def rule(
    *ops: Callable[..., Any],
    params: tuple[str, ...] = ("weight", "bias"),
    frozen: bool = False,
    declines_few: bool = False,
    differentiable: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the fast path of an op.

    The function takes the op's arguments under the same names. Those in `params` may be parameters: they arrive without a batch
    dimension and, unless the rule is `differentiable`, detached. Every other tensor arrives with the samples in dim 0. The function runs
    the ordinary batched op and returns the output (samples in dim 0; a tensor or a tuple of them) and, for each parameter, a function from
    the output's cotangent to the factor; for an argument that is a list of tensors, as in `params=("operands",)`, a list of such functions,
    one for each entry: `{"operands": [f, g]}`. Those of entries that are no parameters are not called. It may return NotImplemented: the
    call then takes the lifted path, which is always correct but slower.

    Where either operand may be the parameter, the function takes a keyword `shared`: the names of those in `params` that arrive without a
    batch dimension ("mat2"; in a list "operands[1]"). The other arguments in `params` are then data, with the samples in dim 0. Without
    this keyword, a call with data for an argument in `params` takes the lifted path.

    An argument that is annotated as a number (`float`, `int | None`) arrives as one: a tensor given for it is converted to its value, as
    in torch.

    A rule with no `params` only defines how to run the op on the true batch.

    Args:
        *ops: Ops that torch's function mode sees: a function of torch, a method of Tensor, a `torch.library` op
            (`torch.library.custom_op` or `torch.ops.library.op`), or a `psg.primitive`.
        params: Names of the arguments that may be parameters.
        frozen: Also run where no argument in `params` is differentiated: for ops that vmap cannot run, or runs slowly.
        declines_few: Leave calls on few numbers (some 100 KB of parameters' gradients and of data, of all samples together) to the lifted
            path: for ops that `torch.func.vmap` runs about as fast as torch, since a rule takes longer there.
        differentiable: Also run where the result has a derivative, as for `norms.sum().backward()`: the parameters then arrive with their
            history, and autograd must be able to differentiate the outputs for them, and what the builders make of a cotangent with a
            history. Other rules do not run there.

    Returns:
        A decorator that registers the function, in place of an earlier rule for the same op, and returns it.

    Raises:
        InputError: No op is given, torch's function mode does not see one, what is decorated is no function, `params` are no names of its
            arguments, or it takes positional-only arguments or `**options`.

    Example:
        >>> import torch, psg
        >>> from psg.factors import Dense
        >>> @psg.primitive
        ... def scale(x, gain):
        ...     return x * gain
        >>> @psg.rule(scale, params=("gain",))
        ... def scale_rule(x, gain):
        ...     return x * gain, {"gain": lambda cotangent: Dense(cotangent * x)}
        >>> fn = lambda gain, x: scale(x, gain).sum()
        >>> psg.per_sample_grad(fn)(torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[1., 2.],
                [3., 4.]])
    """
    if not ops:
        raise InputError("psg.rule(): expected the ops that the rule is for, as in @psg.rule(op).")
    for op in ops:
        if not _visible(op):
            raise InputError(
                f"psg.rule({getattr(op, '__name__', op)!r}): torch's function mode does not see calls of this. Name a function of torch "
                "(`F.linear`, not `nn.Linear`), or decorate your own with psg.primitive first (also one that calls an autograd.Function). "
                "A rule is registered by `@psg.rule(op)`."
            )

    if not isinstance(params, (tuple, list)):
        raise InputError(f"psg.rule(params={params!r}): expected a tuple of names, such as ('weight',).")

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(run):
            raise InputError(f"psg.rule: expected to decorate a function, got {received(run)}.")
        made = Rule.of(run, tuple(params), frozen, declines_few, differentiable)
        for op in ops:
            _rules.update(dict.fromkeys(_aliases(op), made))
        return run

    return register


def _aliases(op: Any) -> tuple[Any, ...]:
    """All objects as which a function mode may see an op: a torch.library op is called as a packet or as an overload."""
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, OpOverloadPacket):
        return (op, *(getattr(op, name) for name in op.overloads()))
    if isinstance(op, OpOverload) and op.overloadpacket.overloads() == ["default"]:
        return op, op.overloadpacket
    return (op,)


def _visible(op: Any) -> bool:
    if isinstance(op, types.FunctionType):
        return (op.__module__ or "").split(".")[0] == "torch" or hasattr(op, "_psg_primitive")
    return callable(op) and not isinstance(op, type) and not isinstance(getattr(op, "__self__", None), torch.autograd.function.FunctionMeta)


def primitive(function: Callable[P, R]) -> Callable[P, R]:
    """Make a Python function a single op for psg (and for torch's function modes), so that it can have a `psg.rule`.

    Args:
        function: Any function of tensors. What it computes does not change.

    Returns:
        A function with the same results, to call in place of the original. A call that no rule takes runs the ops of the original.

    Raises:
        InputError: It is not a function.

    Example:
        >>> import torch, psg
        >>> @psg.primitive
        ... def double(x):
        ...     return 2 * x
        >>> double(torch.tensor(1.5))
        tensor(3.)
    """
    if not callable(function) or isinstance(function, type):
        hint = (
            f" Give its apply: psg.primitive({function.__name__}.apply)."
            if isinstance(function, torch.autograd.function.FunctionMeta)
            else ""
        )
        raise InputError(f"psg.primitive: expected a function of tensors, got {received(function)}.{hint}")

    @functools.wraps(function)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = tuple(tensors_of(args, kwargs))
        if has_torch_function(tensors):
            return handle_torch_function(op, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    op._psg_primitive = True  # type: ignore[attr-defined]
    return op


def body_of(op: Any) -> Callable[..., Any] | None:
    """The function that `primitive` has made this op; None for other ops."""
    return vars(op)["__wrapped__"] if isinstance(op, types.FunctionType) and hasattr(op, "_psg_primitive") else None


def python_form(op: Any) -> Callable[..., Any] | None:
    """The function of Python that an op calls, or that stands for it, so that a mode sees the ops in it; None for other ops."""
    return HIGHER_ORDER.get(op) or body_of(op)


def decomposition(
    *ops: Any, need: str = ALWAYS, misderived: bool = False, everywhere: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function, which rewrites a call with other ops that rules or vmap can run; NotImplemented declines the call.

    `need` is the keyword argument, or what else of the above, without which it declines all calls. A function that needs DIFFERENTIATED
    is used only in passes that differentiate the op's gradient again, under vmap. The others are also used for a call on parameters alone,
    which runs once for all samples and counts as one step.

    With `misderived`, torch's own higher derivatives of the op are wrong: where these are asked for, plain autograd uses the function, too.
    With `everywhere`, its gradient is: plain autograd always uses the function.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if misderived:
            _misderived.update(ops)
        if everywhere:
            _everywhere.update(ops)
        (_differentiated_decompositions if need == DIFFERENTIATED else _decompositions).update(dict.fromkeys(ops, function))
        _note_rewritten(ops, need)
        return function

    return register


class Transpose(NamedTuple):
    """The transpose of an op that, for fixed parameters, is linear in its data: derivatives with respect to the data are such ops again.

    Attributes:
        data: The argument in which the op is linear.
        item: The number of dimensions of one item of `data`, for an op that allows one batch dimension at most; None if it allows any.
        constants: Arguments that only add a constant, such as a bias: derivatives omit them.
        run: Takes the shape of one sample's `data` and the op's other arguments by name; returns the op that maps the output's cotangent
            to that of `data`, and the other arguments of that op by name. NotImplemented declines the call.
    """

    data: str
    item: int | None
    constants: tuple[str, ...]
    run: Callable[..., Any]


def transpose(
    *ops: Any, data: str, item: int | None = None, constants: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how to transpose an op that has a rule; see `Transpose`. The transposed op needs a rule and a transpose, too."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        _transposes.update(dict.fromkeys(ops, Transpose(data, item, constants, run)))
        return run

    return register


def transposable_form(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how to rewrite a call of an op that has a rule with ops that have a transpose; NotImplemented declines the call.

    The function takes the op's arguments by name, and in `shared` the names of those that are parameters.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _transposable_forms.update(dict.fromkeys(ops, function))
        return function

    return register


def of_each(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how to run an op whose rule declines few numbers with parameters of each sample's own, in fewer ops than vmap takes.

    The function takes the tensors that are given by position, with the samples in dim 0; NotImplemented leaves the call to vmap.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _forms_of_each.update(dict.fromkeys(ops, function))
        return function

    return register


def has_history(*weights: Tensor | None) -> bool:
    """Whether a weight has autograd history. A rule with its own backward pass gives cotangents for its data alone."""
    return any([weight is not None and weight.grad_fn is not None for weight in weights])


def reshape(output: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Reshape a rule's output so that it is not a view of another tensor, which a rule's output must not be.

    An in-place op on a view would rebuild its history, and the gradient would bypass the tap. Only for ops that do not save their output.
    """
    return output if output.shape == shape and not output._is_view() else torch.ops.aten._unsafe_view.default(output, shape)


class Leak(NamedTuple):
    """Calls of an op that must not run as it is on some rungs of the ladder, mostly because PyTorch's vmap gets them wrong.

    Attributes:
        reason: What goes wrong, for the message.
        when: Takes a call's arguments and returns whether the call is affected.
        rungs: The rungs on which the call must not run.
    """

    reason: str
    when: Callable[..., bool]
    rungs: tuple[str, ...]


def leak(*ops: Any, reason: str, when: Callable[..., bool] = lambda *args, **kwargs: True, rungs: tuple[str, ...] = ("capture",)) -> None:
    """Register ops that a pass must not run: if fn calls one, psg goes down the ladder. See `Leak`."""
    _leaks.update(dict.fromkeys(ops, Leak(reason, when, rungs)))
    _note_rewritten(ops, ALWAYS)


def _note_rewritten(ops: Iterable[Any], need: str) -> None:
    for op in ops:
        REWRITTEN.setdefault(op, set()).add(need)


def may_rewrite(op: Any, tensors: Iterable[Tensor], kwargs: Mapping[str, Any], differentiated: bool) -> bool:
    """Whether a call of an op in REWRITTEN, without sparse tensors, may meet a decomposition or a leak."""
    needs = REWRITTEN[op]
    if ALWAYS in needs or differentiated and DIFFERENTIATED in needs or not needs.isdisjoint(kwargs):
        return True
    return MIXED in needs and len({tensor.dtype for tensor in tensors if tensor.dtype != torch.bool}) > 1


def find_rule(op: Any) -> Rule | None:
    """The rule of an op, if there is one."""
    return _rules.get(op)


def find_transpose(op: Any) -> Transpose | None:
    """The transpose of an op, if there is one."""
    return _transposes.get(op)


def find_transposable_form(op: Any) -> Callable[..., Any] | None:
    """How to rewrite a call of an op with ops that have a transpose, if that is registered."""
    return _transposable_forms.get(op)


def find_form_of_each(op: Any) -> Callable[..., Any] | None:
    """How to run an op with few parameters of each sample's own, if that is registered."""
    return _forms_of_each.get(op)


def find_decomposition(op: Any, differentiated: bool) -> Callable[..., Any] | None:
    """The decomposition of an op, if there is one; with `differentiated`, one registered for such passes comes first."""
    op = known_as(op)
    return (_differentiated_decompositions.get(op) if differentiated else None) or _decompositions.get(op)


@cached
def known_as(op: Any) -> Any:
    """The function of torch under which an op of ATen's, as exported programs call them, may be registered; else the op itself."""
    if op in REWRITTEN or not isinstance(op, (OpOverload, OpOverloadPacket)) or not is_torchs(op):
        return op
    name = base_name(op)
    places = ((torch, name), (Tensor, name), (torch.linalg, name.removeprefix("linalg_")), (vars(torch._C)["_nn"], name))
    found = next((getattr(place, own) for place, own in places if hasattr(place, own)), op)
    return op if found is torch.block_diag else found  # which takes its tensors one by one


def namesake(op: Any, kwargs: dict[str, Any]) -> Any:
    """The function of torch that is the same as an op of ATen's, which exported programs call; the op itself if there is none.

    It is the op itself, too, if it is registered, or where the function would not take this call or compute something else.
    """
    if not isinstance(op, (OpOverload, OpOverloadPacket)) or op in _rules or "self" in kwargs:
        return op
    return _namesake(op)


_OTHERWISE = {"to", "index_put", "index_put_", "_native_batch_norm_legit", "var", "std", "var_mean", "std_mean"}
"""Ops of ATen's whose overloads the function of that name does not take, in another order, or as others: var(x, 0) of one dimension."""


@cached
def _namesake(op: Any) -> Any:
    found = known_as(op)
    if not isinstance(found, (types.BuiltinFunctionType, types.MethodDescriptorType)) or found.__name__ in _OTHERWISE:
        return op
    # Losses: ATen's default is the mean, that of the functions none.
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    reduces = any(argument.name == "reduction" for overload in overloads for argument in overload._schema.arguments)
    return op if reduces else found


def is_misderived(op: Any) -> bool:
    """Whether torch's own higher derivatives of the op are wrong. Those of its decomposition are right."""
    return known_as(op) in _misderived


def is_written_out(op: Any) -> bool:
    """Whether torch's own gradient of the op is wrong. That of its decomposition is right."""
    return known_as(op) in _everywhere


def find_leak(op: Any, args: Any, kwargs: Any, *rungs: str) -> str | None:
    """The reason why this call must not run on one of these rungs; None if it may run on all."""
    found = _leaks.get(known_as(op))
    if found is None or not set(rungs) & set(found.rungs) or not found.when(*args, **kwargs):
        return None
    return found.reason


def registered() -> Mapping[Any, Rule]:
    """All rules.

    Returns:
        A read-only view: op -> rule.

    Example:
        >>> import torch, psg
        >>> psg.rules.registered()[torch.nn.functional.linear].params
        ('weight', 'bias')
    """
    return types.MappingProxyType(_rules)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Inside this context psg runs plain `torch.func.vmap(torch.func.grad(fn))`: no rules, no lifting.

    This is the reference implementation, with which the fast path is compared. Ops that vmap cannot run are written out
    with others. method="capture" and "batch", which need rules, raise InputError. The setting holds for the current thread or async task.

    Example:
        >>> import torch, psg
        >>> with psg.rules.disabled():
        ...     psg.explain(lambda w, x: (w * x).sum())(torch.ones(2), torch.ones(3, 2)).rung
        'vmap'
    """
    with assigned(_disabled, True):
        yield


def are_disabled() -> bool:
    """Whether the caller is inside `disabled()`."""
    return _disabled.get()
