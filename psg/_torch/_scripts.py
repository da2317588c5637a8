"""Calls of TorchScript, inside of which no function mode sees an op."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, _jit_internal
from torch.jit._state import _try_get_jit_cached_function
from torch.jit.frontend import get_default_args, get_jit_def

from psg._errors import PsgError
from psg._torch._ops import is_torchs
from psg._torch._patches import patch

_KINDS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_CALLS = {kind: kind.__call__ for kind in _KINDS}


class watched:
    """A context in which `look` is given each function or method of torch.jit that Python calls, and its arguments, before it runs.

    Inner contexts add theirs.

    Args:
        look: Is given them.
        inlines: Whether functions that `torch.jit.script` has made run as the Python functions that it has made them of, here and in inner
            contexts; `look` is not given these. Not so if Python might give another result.

    Raises:
        PsgError: `look` or `refuse` has raised an error that did not leave the context: whoever caught it went on in another way.
    """

    def __init__(self, look: Callable[[Any, list[Any]], None], inlines: bool = False) -> None:
        self._look = look
        self.inlines = inlines
        self.failures: list[str] = []  # the messages of errors raised in this context

    def look(self, script: Any, arguments: list[Any]) -> None:
        """Give a function or method to this context's `look`, and to those of the contexts around it."""
        if self._outer is not None:
            self._outer.look(script, arguments)
        try:
            self._look(script, arguments)
        except PsgError as error:
            self.failures.append(str(error))
            raise

    def __enter__(self) -> None:
        self._outer = _current.get()
        self.inlines |= self._outer is not None and self._outer.inlines
        self._token = _current.set(self)
        _patch.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _patch.__exit__()
        _current.reset(self._token)
        if kind is None and self.failures:
            raise PsgError(f"the function handles an error: {self.failures[0]}")


def parameters_of(script: Any) -> Iterator[torch.Tensor]:
    """The parameters of the module that a method of torch.jit belongs to; none for a function."""
    owners = [script.owner] if isinstance(script, torch._C.ScriptMethod) else []
    while owners:
        owner = owners.pop()
        yield from dict(torch._C.ParameterDict(owner).items()).values()  # pyright: ignore[reportAttributeAccessIssue]
        owners += dict(torch._C.ModuleDict(owner).items()).values()


def inlining() -> watched:
    """A context in which functions of `torch.jit.script` run as Python functions, as far as that gives the same."""
    return watched(lambda script, arguments: None, inlines=True)


_current: ContextVar[watched | None] = ContextVar("psg_scripts", default=None)


def refuse(message: str) -> NoReturn:
    """Raise an error that an enclosing context must not miss.

    Raises:
        PsgError: With this message.
    """
    if (watch := _current.get()) is not None:
        watch.failures.append(message)
    raise PsgError(message)


def _call(called: Any, *args: Any, **kwargs: Any) -> Any:
    if (watch := _current.get()) is not None:
        output = _run_inline(called, args, kwargs) if watch.inlines else NotImplemented
        if output is not NotImplemented:
            return output
        watch.look(called, [*args, *kwargs.values()])
    kind = next(kind for kind in _KINDS if isinstance(called, kind))
    return _CALLS[kind](called, *args, **kwargs)


_patch = patch({(kind, "__call__"): _call for kind in _KINDS})


def _run_inline(script: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the Python function that `torch.jit.script` has compiled; NotImplemented where that might give another result, or fails."""
    original = getattr(script, "_torchdynamo_inline", None)
    if not isinstance(original, FunctionType):
        return NotImplemented
    # torch.jit.trace sets that attribute too, but has recorded one path through the function; and it does not enter torch's cache.
    compiled = _try_get_jit_cached_function(original)
    if compiled is None or compiled.qualified_name != script.qualified_name or not _is_as_compiled(original):
        return NotImplemented
    try:
        return original(**_arguments(script.schema, args, kwargs))
    except (PsgError, RuntimeError):
        raise
    except Exception:  # arguments that it takes otherwise; errors of Python's, where TorchScript has an error of its own, or none (1 / 0.0)
        return NotImplemented


def _is_as_compiled(function: FunctionType) -> bool:
    """Whether Python runs a function as TorchScript does, which has compiled it with what its names stood for at that time."""
    values = _values_of(function)
    if values is None:
        return False
    known, answer = vars(function).get("_psg_as_compiled", (None, False))
    if known is None or len(known) != len(values) or not all(map(operator.is_, known, values)):
        answer = all(map(_compiles_to_the_same, dict.fromkeys([function, *filter(_is_users, values)])))
        vars(function)["_psg_as_compiled"] = values, answer  # with the function, to which they may refer
    return answer


def _compiles_to_the_same(function: FunctionType) -> bool:
    """Whether TorchScript would make of a function what it has made of it, if anything."""
    if (compiled := _try_get_jit_cached_function(function)) is None:
        return True
    compile: Any = torch._C._jit_script_compile
    with contextlib.suppress(Exception):
        definition, names = get_jit_def(function, function.__name__), _jit_internal.createResolutionCallbackFromClosure(function)
        return compile(compiled.qualified_name, definition, names, get_default_args(function)).code == compiled.code
    return False


def _is_users(value: Any) -> bool:
    return isinstance(value, FunctionType) and not is_torchs(value)


def _values_of(function: FunctionType) -> list[Any] | None:
    """What the names in a function, and in those that it calls, stand for. None if Python runs one of them in another way than TorchScript.

    That leaves out decorators and answers `is_scripting()`.
    """
    pending, seen, found = [function], set(), []
    while pending:
        if (own := pending.pop()) in seen:
            continue
        seen.add(own)
        names = list(_names_in(own.__code__))
        if hasattr(own, "__wrapped__") or "is_scripting" in names:
            return None
        try:
            values = [cell.cell_contents for cell in own.__closure__ or ()]
        except ValueError:  # a variable that it closes over has no value any more
            return None
        values += [own.__globals__[name] for name in names if name in own.__globals__]
        for value in values:  # and of modules within modules
            if isinstance(value, ModuleType) and value not in seen:
                seen.add(value)
                values += [vars(value)[name] for name in names if name in vars(value)]
        pending += filter(_is_users, values)
        found += values
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a comprehension, in Python 3.11
            yield from _names_in(constant)


def _arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as TorchScript hands them to a function: by name, with defaults, each of the type that the schema names.

    Raises:
        TypeError: It takes them for something else, or does not take them.
    """
    expected = {argument.name: argument for argument in schema.arguments}
    given = dict(zip([name for name, argument in expected.items() if not argument.kwarg_only], args, strict=False))
    if len(given) < len(args) or given.keys() & kwargs.keys() or not kwargs.keys() <= expected.keys():
        raise TypeError("a call of arguments that the function does not have")
    given = {name: argument.default_value for name, argument in expected.items() if argument.has_default_value()} | given | kwargs
    if given.keys() < expected.keys():
        raise TypeError("a call without an argument that the function needs")
    return {name: _converted(value, expected[name].type) for name, value in given.items()}


def _converted(value: Any, kind: Any) -> Any:
    """An argument as TorchScript converts it: an integer may become a float, and a container is copied.

    Raises:
        TypeError: It is converted in a way that is not known here, or refused: a tensor given for a number loses its history, say.
    """
    name = kind.kind()
    if name == "OptionalType":
        return None if value is None else _converted(value, kind.getElementType())
    if name == "ListType" and isinstance(value, (list, tuple)):
        return [_converted(item, kind.getElementType()) for item in value]
    if name == "TupleType" and type(value) in (tuple, list) and len(value) == len(kind.elements()):
        return tuple(map(_converted, value, kind.elements()))
    if name == "DictType" and isinstance(value, dict):
        return {_converted(key, kind.getKeyType()): _converted(item, kind.getValueType()) for key, item in value.items()}
    if name == "FloatType" and type(value) is int:
        return float(value)
    if name not in _TYPES or not isinstance(value, _TYPES[name]) or isinstance(value, bool) != (name == "BoolType"):
        raise TypeError(name)
    return value


_TYPES: dict[str, Any] = {
    "TensorType": Tensor,
    "FloatType": float,
    "IntType": (int, torch.dtype),
    "BoolType": bool,
    "StringType": str,
    "DeviceObjType": torch.device,
}
"""Types of TorchScript whose values Python has too."""
