"""autograd.Functions for which torch has generated no rule for vmap: they have none, one of their own, or the old style's `forward(ctx)`.

Below vmap autograd differentiates what a rule of the user's own calls, which need not be the function. So psg runs such a function once if
it is called on parameters alone, and elsewhere under a vmap of psg's own, or sample by sample. torch refuses the old style inside
transforms before any function mode can see the call; `shown` makes it an op that modes see. `noting` tells of what torch so refuses.
"""

import contextlib
import inspect
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import dispatch_functorch
from torch.autograd.function import Function, _SingleLevelFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import dirichlet
from torch.nn.modules._functions import CrossMapLRN2d

from psg._errors import unwrapped
from psg._torch import _functorch
from psg._torch._patches import ForAll, assign, assigned

_method: Any = vars(Function)["apply"]
_applied: types.FunctionType | None = getattr(_method, "__func__", None)  # None from torch 2.14 on, where the method is written in C
_copy = _applied and types.FunctionType(
    _applied.__code__, _applied.__globals__, _applied.__name__, _applied.__defaults__, _applied.__closure__
)
_apply_of_torch = classmethod(_copy) if _copy else _method

_is_shown: ContextVar[bool] = ContextVar("psg_functions_shown", default=False)


class _Noted(threading.local):
    """Who is told of refusals in this thread. No context variable: to set one slows down every look at another."""

    mode: Any = None


_noted = _Noted()

Route = Callable[[Any, Any, Any], Any]
_route: ContextVar[Route | None] = ContextVar("psg_functions_route", default=None)


_REFUSAL = "must override the setup_context"


def is_refusal(message: str) -> bool:
    """Whether torch has raised an error with this message because of a function in the old style."""
    return _REFUSAL in message


SEES_BOUND = _applied is not None
"""Whether psg sees the calls of an `apply` that was bound before it looks."""
OR_UNSEEN = "" if SEES_BOUND else ", or whose apply was bound before the call, as in `f = MyFunction.apply`"
UNSEEN = (
    "fn calls an autograd.Function in the old style that psg cannot see: one of torch's own (a reentrant checkpoint, a full backward hook "
    f"of a module){OR_UNSEEN}"
)


def setup_of(function: type[Function]) -> Callable[..., Any] | None:
    """The function's setup_context; None in the old style, which has none."""
    found = inspect.getattr_static(function, "setup_context")  # an ordinary lookup is what `_Asked` takes for torch's
    return None if found is _inherited or isinstance(found, _Asked) else function.setup_context


def call_within(args: Any, kwargs: Any) -> Any:
    """`custom_function_call` for modes that have seen the call, and see what it calls too."""
    active = torch._C._are_functorch_transforms_active()
    return dispatch_functorch(custom_function_call, args, kwargs) if active else args[0].apply(*args[1:], **kwargs)


def lacks_vmap_rule(func: Any, args: Any) -> bool:
    """Whether this is the call of an autograd.Function without a generated rule for vmap."""
    return func is custom_function_call and not args[0].generate_vmap_rule


def unbatched(function: type[Function], tensors: Sequence[Tensor], output: Any, level: int) -> str | None:
    """Why a pass must not go on if a function of samples has returned an output with a history, but without the wrapper of the vmap.

    For example zeros that inject a gradient. Below that vmap the output's cotangent is the sum over the samples, and each gets it.
    """
    if not any(level in _functorch.vmap_levels(tensor) for tensor in tensors):
        return None
    parts = output if isinstance(output, (tuple, list)) else (output,)
    alike = [part for part in parts if isinstance(part, Tensor) and level not in _functorch.vmap_levels(part)]
    if not any(layer.requires_grad for part in alike for layer in _functorch.layers(part)):
        return None
    name = function.__name__
    return f"{name}, an autograd.Function, returns an output in which samples are not told apart: torch would add up their cotangents"


def containers_in(tree: Any) -> list[Any]:
    """The lists and dicts in a tree of arguments: the function may write into them."""
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    inner = [own for part in parts for own in containers_in(part)]
    return [tree, *inner] if isinstance(tree, (list, dict)) else inner


def state_of(function: type[Function], arguments: Sequence[Any]) -> list[Any]:
    """What the function may keep beside ctx, where its backward finds it: in its class, in its arguments, and in what that reads elsewhere.

    The objects themselves, which stay alive so that no other takes the place and the id() of one, and how often tensors were written into.
    """
    return [part for holder in (function, *arguments, *_read_by(backward_of(function), set())) for part in _held(holder, 2)]


def backward_of(function: type[Function]) -> Any:
    """The backward pass of a function, which may have the other of the two names that torch knows."""
    return function.vjp if function.backward is Function.backward else function.backward


def forward_state_of(function: type[Function], arguments: Sequence[Any]) -> list[Any]:
    """What its forward may leave there."""
    read = [*_read_by(function.forward, set()), *_read_by(setup_of(function), set())]
    return [part for holder in (function, *arguments, *read) for part in _held(holder, 2)]


def same_state(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether nothing has changed: the same objects, and the same numbers of writes."""
    return len(before) == len(now) and all(
        old is new or type(old) is type(new) is _Writes and old == new for old, new in zip(before, now, strict=True)
    )


def contents_of(state: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The lists, queues, dicts and attributes of objects in a state, each with a copy of what it holds. Modules of Python are left out."""
    kinds, left_out = (list, deque, dict), (Tensor, types.ModuleType)
    own = [part if isinstance(part, kinds) else getattr(part, "__dict__", None) for part in state if not isinstance(part, left_out)]
    return [(part, part.copy()) for part in own if isinstance(part, kinds)]


def put_back(contents: Sequence[tuple[Any, Any]]) -> None:
    """Put those back that have changed: what a call that does not count has left in a queue would be taken for something else."""
    for part, before in contents:
        if have_changed([(part, before)]):
            part.clear()
            part.update(before) if isinstance(part, dict) else part.extend(before)


def have_changed(contents: Sequence[tuple[Any, Any]]) -> bool:
    """Whether one of these holds something else now."""
    return any([*map(id, _parts(part))] != [*map(id, _parts(before))] for part, before in contents)


def _parts(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


class _Writes(int):
    """How often a tensor was written into."""


def _read_by(function: Any, seen: set[Any]) -> Iterator[Any]:
    """The global and closed-over values that a function reads, and those that functions of the same package read, which it calls."""
    function = unwrapped(function)
    if not isinstance(function, types.FunctionType) or function in seen:
        return
    seen.add(function)
    names = function.__code__.co_names
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable that it closes over has no value yet
        return
    values += [function.__globals__[name] for name in names if name in function.__globals__]
    for module in [value for value in values if isinstance(value, types.ModuleType) and _package_of(value.__name__) != "torch"]:
        values += [vars(module)[name] for name in names if name in vars(module)]
    for value in values:
        if isinstance(value, types.FunctionType) and _package_of(value.__module__) == _package_of(function.__module__):
            yield from _read_by(value, seen)
        yield value


def _package_of(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _held(holder: Any, depth: int) -> Iterator[Any]:
    """An object, and what it holds: the elements of collections, the attributes of other objects and of the user's classes."""
    yield holder
    if isinstance(holder, (types.MethodType, types.BuiltinMethodType)):
        holder = holder.__self__
        yield holder
    if isinstance(holder, Tensor):
        yield _Writes(-1 if holder.is_inference() else holder._version)
        return
    if depth == 0 or isinstance(holder, (types.ModuleType, types.FunctionType)):
        return
    if isinstance(holder, type) and _package_of(holder.__module__) == "torch":
        return
    if isinstance(holder, (dict, list, tuple, set, deque)):
        parts = _parts(holder)
    else:
        parts = list(getattr(holder, "__dict__", {}).values())
    for part in parts:
        yield from _held(part, depth - 1)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """A context in which function modes see the calls of functions in the old style inside transforms, as `custom_function_call`."""
    with assigned(_is_shown, True), _patch:
        yield


class noting:
    """A context in which `mode.failure` is set to the message of each error by which torch refuses a function, or hooks on saved tensors.

    Inside transforms it does so before any function mode can see the call, and who calls may handle the error.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before, _noted.mode = _noted.mode, self._mode
        _patch.__enter__()

    def __exit__(self, *_: object) -> None:
        _patch.__exit__()
        _noted.mode = self._before


@contextlib.contextmanager
def routed(route: Route) -> Iterator[None]:
    """A context in which `route` is given each function that is called outside of transforms, and its arguments.

    It returns the output, or NotImplemented: then the function runs as it is.
    """
    with assigned(_route, route), _patch:
        yield


class _SampleDirichlet(Function):
    """`torch.distributions`' own function of the Dirichlet and the beta distribution, in the style that `vmap` can batch.

    Source: Figurnov et al., "Implicit reparameterization gradients", 2018.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: Tensor) -> Tensor:
        return torch._sample_dirichlet(concentration)  # pyright: ignore[reportPrivateImportUsage]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, *inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        output, concentration = ctx.saved_tensors
        return dirichlet._Dirichlet_backward(output, concentration, cotangent)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`. Most of torch's own functions (reentrant checkpoints, modules' backward hooks) depend on the graph around them."""
    is_own = cls is CrossMapLRN2d or cls.__module__.split(".")[0] not in ("torch", "psg")
    if not torch._C._are_functorch_transforms_active():
        output = route(cls, args, kwargs) if is_own and (route := _route.get()) is not None else NotImplemented
        if output is not NotImplemented:
            return output
    elif _is_shown.get():
        if cls is dirichlet._Dirichlet:
            return _SampleDirichlet.apply(*args)
        if is_own and setup_of(cls) is None:
            return custom_function_call(cls, *args, **kwargs)
    try:
        return _apply_of_torch.__get__(None, cls)(*args, **kwargs)
    except RuntimeError as error:
        if _noted.mode is not None and is_refusal(str(error)):
            _noted.mode.failure = str(error)
        raise


def _enter_hooks(self: saved_tensors_hooks) -> None:
    """`saved_tensors_hooks.__enter__`, as activation checkpointing calls it."""
    try:
        _entered(self)
    except RuntimeError as error:
        if _noted.mode is not None:
            _noted.mode.failure = str(error)
        raise


_entered = saved_tensors_hooks.__enter__
_inherited: Any = vars(_SingleLevelFunction)["setup_context"]


class _Asked:
    """In the place of what functions in the old style inherit as setup_context: C's apply asks for that before it refuses one."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        if _noted.mode is not None and issubclass(owner, Function) and torch._C._are_functorch_transforms_active():
            _noted.mode.failure = f"{owner.__name__} {_REFUSAL} staticmethod"
        return _inherited.__func__


def _stand_in() -> types.CodeType:
    """The code that runs in the place of `Function.apply`'s own."""
    __class__ = None

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from psg._torch import _functions  # where this code runs, the globals are those of torch's module

        # The name is here to be a free variable, as it is of torch's own code: else whoever reads the variables of this frame crashes.
        return _functions._apply(cls or __class__, *args, **kwargs)

    return apply.__code__


def _divert() -> Callable[[], None]:
    values = {(saved_tensors_hooks, "__enter__"): _enter_hooks}
    if _applied is None:
        return assign({**values, (Function, "apply"): classmethod(_apply), (_SingleLevelFunction, "setup_context"): _Asked()})
    # The code is exchanged, and not the attribute: many programs bind the method when they are imported, `f = MyFunction.apply`.
    put_back, put_code_back = assign(values), partial(setattr, _applied, "__code__", _applied.__code__)
    _applied.__code__ = _stand_in()

    def take_back() -> None:
        put_code_back()
        put_back()

    return take_back


_patch = ForAll(_divert)
