"""What the forward pass of a module does beside computing: writes into its tensors, and changes of its attributes."""

import contextlib
import itertools
import operator
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from psg import _trees
from psg._errors import Stale, StateError
from psg._torch import _ambient, _functorch
from psg._watch import _writes
from psg._watch._marks import is_marked


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
        values = [*itertools.chain.from_iterable(map(dict.values, self._held.values()))]
        collections = itertools.compress(values, map(_COLLECTIONS.__contains__, map(type, values)))
        self._contents = {id(value): value.copy() for value in filter(None, collections)}  # most are hooks, and empty

    def restore(self) -> None:
        """Put everything back: a pass that is given up must not leave the next one another mode, other hooks or other attributes."""
        for prefix, held in self._held.items():
            attributes = vars(self._children[prefix])
            attributes.clear()
            attributes.update(held)
            for value in held.values():
                if type(value) in _COLLECTIONS:
                    _refill(value, self._contents.get(id(value), ()))

    def forget_results(self, constants: bool) -> None:
        """Take out again what a pass has computed from the samples or the parameters and left where nothing was, as in a cache.

        It is of no use after the pass, and the next one would meet it. So are constants that the pass' transforms have wrapped. What was
        there before does not come back in the place of a result: who reads that would take the one for the other. Nor is anything changed
        in a module of which a flag or a number has changed, which may say that the result is there. What stays of a transform's tensors,
        which have no values outside of it, becomes `Forgotten`, so that the module can be copied and saved.

        Args:
            constants: Whether to take out all tensors, after a pass that does not mark what depends on the samples.
        """
        for prefix, held in self._held.items():
            attributes = vars(self._children[prefix])
            names = attributes.keys() - _MODULES_OWN
            values = [*map(attributes.get, names)]
            if all(map(operator.is_, values, map(held.get, names))) and _COLLECTIONS.isdisjoint(map(type, values)):
                continue  # as most: nothing has changed
            for name in names:
                value = attributes[name]
                if type(value) in _COLLECTIONS and value is held.get(name):
                    before = self._contents.get(id(value), ())
                    if len(value) > len(before) and _holds_results(value, constants) and not self._changed_marks(prefix):
                        _refill(value, before)
                elif value is not None and held.get(name) is None and _holds_results(value, constants) and not self._changed_marks(prefix):
                    if name in held:
                        attributes[name] = None
                    else:
                        del attributes[name]
                value = attributes.get(name)
                if value is not held.get(name):
                    if _holds_ended(value):
                        attributes[name] = _without_ended(value)
                elif type(value) in _COLLECTIONS and _has_changed(value, self._contents.get(id(value), ())) and _holds_ended(value):
                    _refill(value, _without_ended(value))

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
        for prefix in self._held:
            if names := self._changed_marks(prefix):
                self.restore()
                raise StateError(
                    f"stateless: the forward pass writes into the parameter {written!r} and changes {names[0]!r} of "
                    f"{prefix or 'the module'} ({kind_of(self._children[prefix])}). If later calls then do not write again: each sample "
                    "starts from the parameters that it is given, so run the module once, in this mode, before stateless sees it. Else "
                    "take the write, or the change, out of forward."
                )

    def _changed_marks(self, prefix: str) -> list[str]:
        """The attributes of a module that are flags, numbers or strings, or were, and have changed."""
        before, now = self._held[prefix], vars(self._children[prefix])
        return [name for name in (*before, *now) if _mark_of(now.get(name)) != _mark_of(before.get(name))]


class Forgotten(Tensor):
    """Stands in a module's attribute for a tensor that its forward pass has left there, under a transform that has ended."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Stale(
            "a module's attribute, read here, was set inside of fn. There it held a tensor of one sample, under vmap, which has no value "
            "outside of fn and cannot be used in a later call: let fn return it as aux (has_aux=True). Or, if it depends on neither "
            "samples nor parameters, clear it, and run the module once, in this mode, before psg does"
        )

    def __deepcopy__(self, memo: Any) -> "Forgotten":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Forgotten, ()

    def __repr__(self, **options: Any) -> str:
        return "<a tensor that psg has taken out>"


def _has_ended(tensor: Tensor) -> bool:
    """Whether a transform that has ended has wrapped this tensor."""
    with torch._C.DisableTorchFunction():
        return _functorch.is_wrapped(tensor) and not 0 < _functorch.level_of(tensor) <= _functorch.current_level()


_FORGOTTEN = Forgotten()  # made here, where no mode sees it: tracers take its class for one of tensors that they could trace


def _holds_ended(value: Any) -> bool:
    return any(map(_has_ended, _trees.all_tensors(value)))


def _without_ended(value: Any) -> Any:
    return _trees.map_tensors(lambda tensor: _FORGOTTEN if _has_ended(tensor) else tensor, value)


def _has_changed(collection: Any, before: Any) -> bool:
    """Whether a collection holds other objects than before."""
    now, then = (own.values() if isinstance(own, dict) else own for own in (collection, before))
    return len(now) != len(then) or any(map(operator.is_not, now, then))


_COLLECTIONS = {dict, OrderedDict, list, set}
_MODULES_OWN = vars(nn.Module()).keys()


def _refill(collection: Any, items: Any) -> None:
    """Put these items in the place of those that a collection holds."""
    collection.clear()
    add = collection.extend if isinstance(collection, list) else collection.update
    add(items)


def _holds_results(value: Any, constants: bool) -> bool:
    """Whether a value holds tensors that a pass has made from the samples or the parameters, or under its transforms, or any."""
    with torch._C.DisableTorchFunction():  # a pass around this one would look at each question
        tensors = _trees.all_tensors(value)
        return any(constants or tensor.requires_grad or is_marked(tensor) or _has_ended(tensor) for tensor in tensors)


class _Changes(NamedTuple):
    """What a module held before a pass has called it, and the lock under which psg's passes change it."""

    lock: Any
    attributes: Attributes


class _Open(threading.local):
    """The passes of this thread, the innermost last: for each key, the changes that one may have to take back."""

    def __init__(self) -> None:
        self.passes: list[dict[Hashable, _Changes]] = []


_open = _Open()  # no context variable: to set one slows down every look at another


class Attempt:
    """A context for a pass that may be given up: if it raises, modules get back the attributes that they had before, torch its settings."""

    def __enter__(self) -> "Attempt":
        self._settings = _ambient.settings()
        self._changes: dict[Hashable, _Changes] = {}
        _open.passes.append(self._changes)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        _open.passes.pop()
        if kind is not None:
            _ambient.set_settings(self._settings)
            self.give_up()
        else:
            for key, own in self._changes.items():
                note_attributes(key, *own)

    def give_up(self) -> None:
        """Give the pass up after it has ended."""
        for lock, attributes in reversed(self._changes.values()):  # modules may share submodules
            with lock:
                attributes.restore()


def note_attributes(key: Hashable, lock: Any, attributes: Attributes) -> None:
    """Note what the modules of this key held before a call, unless the pass that is open has called them before."""
    if _open.passes:
        _open.passes[-1].setdefault(key, _Changes(lock, attributes))


def forget_results(constants: bool = False) -> None:
    """Let the modules that the open pass has called forget its results; see `Attributes.forget_results`."""
    for lock, attributes in reversed(_open.passes[-1].values()):
        with lock:
            attributes.forget_results(constants)


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """A context for one of several calls of fn in a pass without marks: each starts with the modules as the first has found them."""
    with Attempt():
        yield
        forget_results(constants=True)


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
