"""What the forward pass of a module does beside computing: writes into its tensors, and changes of its attributes."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from psg._errors import StateError
from psg._torch import _functorch
from psg._watch import _writes


class Writes:
    """The writes of one call into the module's tensors.

    Args:
        children: The modules by name.
        kept: The tensors that it must not write into.
        params: Those that it is given, into which it may write, as clamps and masks do: every sample has its own.

    Attributes:
        param: The name of one of these into which it has written, if any.
        rewrites: How often it has written into a tensor, by name, the values that were there.
    """

    def __init__(self, children: dict[str, nn.Module], kept: dict[str, Tensor], params: dict[str, Tensor]) -> None:
        self._children = children
        self._kept = kept
        self._params = params
        self._names: dict[int, str] = {}
        self.param = ""
        self.rewrites: Counter[str] = Counter()

    def refuse(self, func: Any, args: Any, target: Any) -> None:
        """Raise if an op is about to write into a tensor that is kept: a write through `.data` leaves the version counter unchanged."""
        if not self._names:
            held = {**self._params, **self._kept}
            self._names = {_functorch.memory_of(tensor): name for name, tensor in held.items() if tensor.numel()}
        for tensor in _writes.written(target):
            name = self._names.get(_functorch.memory_of(tensor))
            if name not in self._kept:
                self.param = name or self.param
            elif _writes.rewrites(func, args):
                self.rewrites[name] += 1
            else:
                raise StateError(changing(self._children, name))


class Attributes:
    """What modules hold as Python sees it, before a call: their attributes, and the contents of those that are collections."""

    def __init__(self, children: dict[str, nn.Module]) -> None:
        self._children = children
        self._held = {prefix: vars(child).copy() for prefix, child in children.items()}
        # Most collections are hooks, and empty: no copy of these.
        self._contents = {
            id(value): value.copy() for held in self._held.values() for value in held.values() if type(value) in _COLLECTIONS and value
        }

    def restore(self) -> None:
        """Put everything back: a pass that is given up must not leave the next one another mode, other hooks or other attributes."""
        for prefix, held in self._held.items():
            attributes = vars(self._children[prefix])
            attributes.clear()
            attributes.update(held)
            for value in held.values():
                if type(value) in _COLLECTIONS:
                    value.clear()
                    add = value.extend if isinstance(value, list) else value.update
                    add(self._contents.get(id(value), ()))

    def adopt(self, given: dict[int, Tensor]) -> None:
        """Put the module's own parameters, by the ids of the call's, under the further names that the call has registered."""
        for child in self._children.values():
            for key, tensor in child._parameters.items():
                if id(tensor) in given:
                    child._parameters[key] = given[id(tensor)]  # pyright: ignore[reportArgumentType]

    def expect_same(self, written: str) -> None:
        """Refuse a call that has written into this parameter and changed a mark, perhaps so that later calls do not write again.

        Raises:
            StateError: An attribute that is a flag, a number or a string, or was one, has changed.
        """
        for prefix, before in self._held.items():
            child = self._children[prefix]
            now = vars(child)
            names = [name for name in (*before, *now) if _mark_of(now.get(name)) != _mark_of(before.get(name))]
            if names:
                self.restore()
                raise StateError(
                    f"stateless: the forward pass writes into the parameter {written!r} and changes {names[0]!r} of "
                    f"{prefix or 'the module'} ({kind_of(child)}). If later calls then do not write again: each sample starts from the "
                    "parameters that it is given, so run the module once, in this mode, before stateless sees it. Else take the write, or "
                    "the change, out of forward."
                )


_COLLECTIONS = {dict, OrderedDict, list, set}


class _Open(threading.local):
    """The passes of this thread that may be given up, the innermost last: what takes back the changes of each key."""

    def __init__(self) -> None:
        self.passes: list[dict[Hashable, Callable[[], None]]] = []


_open = _Open()  # no context variable: to set one slows down every look at another


class Attempt:
    """A context for a pass that may be given up: if it raises, modules get back the attributes that they had before."""

    def __enter__(self) -> "Attempt":
        self._restoring: dict[Hashable, Callable[[], None]] = {}
        _open.passes.append(self._restoring)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        _open.passes.pop()
        if kind is not None:
            self.give_up()
        else:
            for key, restore in self._restoring.items():
                restore_if_given_up(key, restore)

    def give_up(self) -> None:
        """Give the pass up after it has ended."""
        for restore in reversed(self._restoring.values()):  # modules may share submodules
            restore()


def restore_if_given_up(key: Hashable, restore: Callable[[], None]) -> None:
    """Note what takes back the changes of this key, unless the pass that is open has noted that before."""
    if _open.passes:
        _open.passes[-1].setdefault(key, restore)


def _mark_of(value: Any) -> Any:
    return (type(value), value) if type(value) in (bool, int, float, str) else None


def changing(children: dict[str, nn.Module], name: str) -> str:
    """The message for a forward pass that changes this buffer or parameter."""
    owner, _, key = name.rpartition(".")
    is_buffer = key in dict(children[owner].named_buffers(recurse=False))
    what = f"buffer {name!r}" if is_buffer else f"parameter {name!r}, which is not differentiated"
    way_out = "Put it in eval mode, or take the update out of forward."
    if any(hasattr(child, "disable_observer") for child in children.values()):
        way_out = "Switch observers off: model.apply(torch.ao.quantization.disable_observer)."
    elif not children[owner].training:
        way_out = "Take the update out of forward; if it fills a cache, run the module on the longest input once before."
    return (
        f"stateless: the forward pass of {owner or 'the module'} ({kind_of(children[owner])}) changes its {what}: in a loop one "
        f"sample's gradient could depend on the samples before it. {way_out} If every sample may start from the buffer as it is now, as "
        "where forward resets a state, write fn with torch.func.functional_call(module, (params, copies of what it changes), inputs)."
    )


def kind_of(module: nn.Module) -> str:
    """The name of a module's class; a scripted module keeps that of the class that it was scripted from."""
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__
