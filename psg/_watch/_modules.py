"""What a trace depends on of the modules that it meets: what they hold, their modes and hooks, and the attributes that it reads."""

import contextlib
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules import module as _module

from psg import _trees

# A lock for each module: while a call runs, the module holds that call's parameters. Reentrant: a module may call psg on itself.
LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


class Called:
    """What a trace must know of the modules that it has met.

    Attributes:
        constants: By id, parameters that functions of `stateless` were not given: constants, though they require grad.
    """

    def __init__(self) -> None:
        self.constants: dict[int, Tensor] = {}
        self._met: dict[int, tuple[nn.Module, Hashable, list[Any]]] = {}  # with the state in which the trace met it, and what that is of
        self._read: dict[tuple[int, str], tuple[nn.Module, Hashable, Any]] = {}  # with what told the value that the trace read first
        self._written: set[tuple[int, str]] = set()
        self._hooked = _hooked()
        self._made: list[nn.Module] = []  # kept alive, so that no other module gets the id of one

    @contextlib.contextmanager
    def noting(self, *ignored: nn.Module) -> Iterator[None]:
        """A context in which the trace's function runs: it notes which attributes of which modules are read and written."""
        passed = set(map(id, ignored))
        kind: Any = nn.Module
        before = {name: vars(kind).get(name) for name in ("__getattribute__", "__setattr__")}

        def get(module: nn.Module, name: str) -> Any:
            if id(module) not in passed and CALLED.get() is self:  # else another thread reads it
                held = object.__getattribute__(module, "__dict__")
                if "_modules" not in held:  # the function is making this module
                    passed.add(id(module))
                    self._made.append(module)
                elif id(module) not in self._met:
                    self._met[id(module)] = module, _state_of(module), _held_by(module)
                names = (name,)
                if name == "__dict__":
                    names = () if _looks_up(sys._getframe(1).f_globals) else (name, *held)  # what it reads there is not to be seen
                for own in names:
                    if (id(module), own) not in self._read:
                        self._read[id(module), own] = module, _attribute(held, own), _kept(held.get(own))
            return super(kind, module).__getattribute__(name)

        def put(module: nn.Module, name: str, value: Any) -> None:
            if CALLED.get() is self:
                self._written.add((id(module), name))
            before["__setattr__"](module, name, value)

        kind.__getattribute__, kind.__setattr__ = get, put
        try:
            yield
        finally:
            kind.__setattr__ = before["__setattr__"]
            if before["__getattribute__"] is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = before["__getattribute__"]

    def guard(self) -> tuple["Guard", Hashable, list[Any]]:
        """What the trace depends on, the state that this was in when the trace began, and the objects whose ids are in the state."""
        # What the trace itself has written (a counter, a list of activations) does not tell whether anything else has. But of the names of
        # all attributes it has perhaps added some, once.
        read = [
            (module, name, told, kept)
            for (key, name), (module, told, kept) in self._read.items()
            if key in self._met and (key, name) not in self._written and _may_vary(name, module)
            if name == "__dict__" or told == _attribute(vars(module), name)
        ]
        guard = Guard([module for module, _, _ in self._met.values()], [(module, name) for module, name, _, _ in read])
        state = tuple(state for _, state, _ in self._met.values()), self._hooked, tuple(told for _, _, told, _ in read)
        return guard, state, [*(kept for *_, kept in read), *(held for _, _, held in self._met.values())]


_ABSENT = object()


def _looks_up(code: dict[str, Any]) -> bool:
    """Whether code with these globals reads a module's `__dict__` only for attributes that are noted, or for psg's own ends."""
    return code is vars(_module) or str(code.get("__name__")).startswith("psg.")


def _may_vary(name: str, module: nn.Module) -> bool:
    """Whether an attribute that was read may have another value at another call, unseen by `_state_of`."""
    held = object.__getattribute__(module, "__dict__")
    known = hasattr(nn.Module, name) or name in _INTERNAL or any(name in (held.get(slots) or ()) for slots in _SLOTS)
    return name in ("forward", "__dict__") or not known


_INTERNAL = frozenset(vars(nn.Module()))
_OVERRIDABLE = frozenset(dir(nn.Module)) - _INTERNAL
"""The names of the class's own attributes, which an instance may give to others: `self.type`."""


class Guard:
    """Tells whether modules are as they were in a trace, except for the values of their tensors.

    Args:
        modules: The modules of which the trace has read something.
        read: The attributes that it has read, by module and name.
    """

    def __init__(self, modules: list[nn.Module], read: list[tuple[nn.Module, str]]) -> None:
        self.modules = modules
        self.read = read
        # In one order everywhere, as in `_pass.Pass.again`, to avoid deadlocks.
        self._locks = [lock for module in sorted(modules, key=id) if (lock := LOCKS.get(module)) is not None]
        self._key = tuple(map(id, modules)), tuple((id(module), name) for module, name in read)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Guard) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def state(self) -> Hashable:
        """The current state. Equal states have equal traces, while the objects whose ids are in it are alive."""
        with contextlib.ExitStack() as stack:
            for lock in self._locks:  # in a call of another thread a module may hold other tensors
                stack.enter_context(lock)
            states = tuple(map(_state_of, self.modules))
        return states, _hooked(), tuple(_attribute(vars(module), name) for module, name in self.read)


def _attribute(held: dict[str, Any], name: str) -> Hashable:
    return tuple(held) if name == "__dict__" else _told(held.get(name, _ABSENT))


_DEPTH = 8
_CONTAINERS = frozenset((tuple, list, dict, set, frozenset, OrderedDict, defaultdict, deque))


def _told(value: Any, depth: int = _DEPTH) -> Hashable:
    """What tells one value of an attribute from another: containers by their items, objects beside numbers and strings by their ids."""
    if (key := _trees.key_of(value)) is not None:
        return key
    if (items := _items(value, depth)) is None:
        return id(value)
    told = [_told(item, depth - 1) for item in items]
    return type(value), frozenset(told) if isinstance(value, (set, frozenset)) else tuple(told)


def _kept(value: Any, depth: int = _DEPTH) -> Any:
    """The objects whose ids `_told` gives: a container may lose what it holds."""
    items = _items(value, depth)
    return value if items is None else [value, *(_kept(item, depth - 1) for item in items)]


def _items(value: Any, depth: int) -> tuple[Any, ...] | None:
    """The items by which a container is told from another: of Python's own kinds, short, and not too deep in others."""
    if type(value) not in _CONTAINERS or not depth or len(value) > 100:
        return None
    return (*value, *value.values()) if isinstance(value, dict) else tuple(value)


def _state_of(module: nn.Module) -> Hashable:
    """What a trace of this module alone depends on, beside attributes: its type, mode and hooks, and what it holds."""
    held = object.__getattribute__(module, "__dict__")  # its class may handle attributes in a way of its own
    ids = [(*slots, *map(id, slots.values())) if (slots := held.get(name)) else () for name in _SLOTS]
    hooks = [tuple(own) if (own := held.get(name)) else () for name in _HOOKS]  # their keys are numbers that are given once
    own = [(name, _told(held[name])) for name in held if name in _OVERRIDABLE]
    return type(module), held.get("training"), *ids, *hooks, *own


def _held_by(module: nn.Module) -> list[Any]:
    """The objects whose ids are in the module's state."""
    held = object.__getattribute__(module, "__dict__")
    own = [_kept(held[name]) for name in held if name in _OVERRIDABLE]
    return [*(each for name in _SLOTS for each in (held.get(name) or {}).values()), *own]


def _hooked() -> Hashable:
    return tuple(map(tuple, _GLOBAL_HOOKS))


_SLOTS = "_parameters", "_buffers", "_modules"
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    *(_module._global_forward_pre_hooks, _module._global_forward_hooks),
    *(_module._global_backward_pre_hooks, _module._global_backward_hooks),
)

CALLED: ContextVar[Called | None] = ContextVar("psg_called", default=None)
"""What the trace that is running must know of the modules that it meets; None outside of traces."""
