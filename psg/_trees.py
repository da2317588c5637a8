"""Trees of arguments: flattening, in_dims as a prefix tree, paths for messages. Trees are optree's."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from numbers import Number
from types import NoneType
from typing import Any

import optree
import torch
import torch.utils._pytree as torch_pytree

from psg._errors import InputError, a_kind

NAMESPACE = "psg"

Tree = Any
"""Any tree that optree can flatten: tensors in dicts, lists, tuples and the like, or a single tensor."""


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure of a tree."""
    leaves, spec = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)
    kinds = set(map(type, leaves if is_leaf is None else itertools.filterfalse(is_leaf, leaves)))
    adopted = [kind for kind in kinds if _adopt(kind)]
    return flatten(tree, is_leaf) if adopted else (leaves, spec)


def _adopt(kind: type) -> bool:
    """Register a container type that optree does not know as a node in psg's namespace; False if the type is no container.

    Containers are dataclasses, types that torch's own pytree knows (transformers' model outputs), and mappings that can be made from a dict
    (transformers' batches).
    """
    if kind in _LEAVES:
        return False
    with _adopting:  # optree accepts a type only once, and two threads may come with it at the same time
        if kind not in _adopted and _register(kind):
            _adopted.add(kind)
        return kind in _adopted


_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str})
"""The types of most leaves."""

_adopting = threading.Lock()
_adopted: set[type] = set()


def _register(kind: type) -> bool:
    register: Any = optree.register_pytree_node  # its type hints accept collections only
    if kind in torch_pytree.SUPPORTED_NODES:
        node = torch_pytree.SUPPORTED_NODES[kind]
        register(kind, node.flatten_fn, lambda context, children: node.unflatten_fn(list(children), context), namespace=NAMESPACE)
    elif dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))

        def flatten(value: Any) -> Any:
            own = tuple(name for name in names if hasattr(value, name))  # a field may be filled later
            return [getattr(value, name) for name in own], (own, _Others(value, names)), own

        def unflatten(held: Any, children: Sequence[Any]) -> Any:
            value = object.__new__(kind)  # no __init__: it may check or derive, and the children may be anything
            for name, child in zip(held[0], children, strict=True):
                object.__setattr__(value, name, child)
            return held[1].restore(value)

        register(kind, flatten, unflatten, namespace=NAMESPACE)
    elif issubclass(kind, Mapping):
        make: Any = kind
        register(
            kind,
            lambda value: (list(value.values()), (tuple(value), _Others(value, value)), tuple(value)),
            lambda held, children: held[1].restore(make(dict(zip(held[0], children, strict=True)))),
            namespace=NAMESPACE,
        )
    else:
        return False
    return True


class _Others:
    """The public Python values that a container has as attributes beside its leaves, for which its class has a default.

    They are no part of a tree's structure: trees that differ in them alone may be added, compared and joined.
    """

    def __init__(self, value: Any, names: Container[str]) -> None:
        kind, held = type(value), _attributes(value)
        # A property that is cached may be one of the whole batch; a private attribute too.
        self.values = {
            name: own
            for name, own in held.items()
            if not name.startswith("_")
            and name not in names
            and _is_plain(own)
            and not isinstance(getattr(kind, name, _DERIVED), _DERIVING)
        }

    def restore(self, value: Any) -> Any:
        """Give a container that was made anew these attributes, except those that its constructor has derived; returns it."""
        held = _attributes(value)
        for name, own in self.values.items():
            if name not in held:
                object.__setattr__(value, name, own)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Others)

    def __hash__(self) -> int:
        return 0


_DERIVED = property()
_DERIVING = (property, cached_property)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")  # not the class's own way, which may take attributes for keys
    except AttributeError:
        return {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, complex, str, bytes, NoneType, Enum, torch.dtype, torch.device))


def key_of(value: Any) -> Hashable:
    """What tells one number or string from another, as a key: 1 == 1.0 == True, 0.0 == -0.0 and NaN != NaN. None for other objects."""
    kind = type(value)
    if kind is int or kind is bool or kind is str:  # the most frequent, and no more needs to be told
        return kind, value
    if isinstance(value, (Number, str)):
        return kind, value if value == value else None, repr(value)
    return None


def attributes_of(node: Any) -> Hashable:
    """What a node of a tree holds beside its leaves, as a key: equal for nodes whose attributes are."""
    if type(node) not in _adopted:
        return ()
    held = _Others(node, node if isinstance(node, Mapping) else ()).values
    return tuple((name, key_of(own) or (type(own), repr(own))) for name, own in held.items())


def unflatten(spec: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The tree of this structure with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def spec_of_tuple(specs: Sequence[optree.PyTreeSpec]) -> optree.PyTreeSpec:
    """The structure of a tuple of trees of these structures."""
    return optree.treespec_tuple(specs, namespace=NAMESPACE)


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether the entries are floating or complex numbers, which have derivatives."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_computable(tensor: torch.Tensor) -> bool:
    """Whether torch computes with the entries as it does with real numbers: 8 bits it only stores, and integers wrap around."""
    return is_inexact(tensor) and tensor.dtype.itemsize > 1


def oddity(leaf: Any) -> str | None:
    """What a leaf is, if it is no dense tensor; None if it is one."""
    if not isinstance(leaf, torch.Tensor):
        return a_kind(leaf)
    if leaf.is_nested:
        return "a nested tensor"
    if leaf.is_quantized:
        return "a quantized tensor"
    return None if leaf.layout == torch.strided else f"a tensor of layout {leaf.layout}"


def paths(tree: Any, root: str, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The path to every leaf, as a Python expression: `args[1]['ids']`."""
    return [accessor.codify(root) for accessor in optree.tree_accessors(tree, is_leaf, namespace=NAMESPACE)]


def differences(spec: optree.PyTreeSpec, other: optree.PyTreeSpec, names: tuple[str, str]) -> str:
    """How two structures, called `names`, differ: in leaves that only one has or, where there are none, as a list and a tuple do."""
    places = [[accessor.codify("tree") for accessor in own.accessors()] for own in (spec, other)]
    lacks = []
    for name, own, others in zip(names, places, map(set, reversed(places)), strict=True):
        if alone := [place for place in own if place not in others]:
            lacks.append(f"only the {name} has {', '.join(alone[:3])}" + (f" and {len(alone) - 3} more" if len(alone) > 3 else ""))
    return ", ".join(lacks) or f"the {names[0]} is {spec}, the {names[1]} {other}"


def broadcast(prefix: Any, tree: Any, name: str) -> list[Any]:
    """The leaves of `prefix` (None counts as one), repeated over the leaves of `tree` below each.

    Raises:
        InputError: `prefix` is no prefix of `tree`.
    """
    leaves, spec = flatten(tree)
    skeleton = _skeleton(spec, leaves)
    options: Any = {"none_is_leaf": True, "namespace": NAMESPACE}
    try:
        spread = optree.tree_broadcast_prefix(prefix, skeleton, **options)
    except ValueError as error:
        raise InputError(f"{name}={prefix!r} is no prefix of the tree it belongs to, which has the structure {spec}.") from error
    # Kinds of dicts differ in their order, so leaves are matched by path.
    found = dict(zip(optree.tree_paths(spread, **options), optree.tree_leaves(spread, **options), strict=True))
    return [found[path] for path in optree.tree_paths(skeleton, **options)]


def _skeleton(spec: optree.PyTreeSpec, leaves: list[Any]) -> Any:
    # `None` nodes of the tree are no leaves of ours, but broadcast_prefix would count them with none_is_leaf=True:
    # an empty tuple in their place has no leaves in either reading.
    return optree.tree_map(
        lambda leaf: () if leaf is None else leaf,
        optree.tree_unflatten(spec, list(leaves)),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def keys(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[Any, ...]]:
    """The path to every leaf as a tuple of keys, indices and attribute names."""
    return list(optree.tree_paths(tree, is_leaf, namespace=NAMESPACE))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with the function applied to every leaf."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [function(leaf) for leaf in leaves])


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with the function applied to every tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def tensors_in(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the leaves, in order."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def all_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree, in order."""
    return tensors_in(flatten(tree)[0])


def fill(leaves: Sequence[Any], tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The leaves, with `tensors_in` them replaced by these, in order."""
    rest = iter(tensors)
    return [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def by_dtype_and_device(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """The positions of the tensors, grouped by dtype and device."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(i)
    return list(groups.values())


def expect_same(tree: tuple[Sequence[Any], Any], other: tuple[Sequence[Any], Any], name: str, lead: int = 0) -> None:
    """Refuse two samples' trees, each as leaves and structure, that cannot be joined to the tree of a batch.

    A batch has one structure, tensors of one shape after `lead` dimensions, and one value for each leaf that is no tensor.

    Raises:
        InputError: The trees cannot be joined.
    """
    (leaves, spec), (others, other_spec) = tree, other
    if spec != other_spec:
        raise InputError(f"{name} must have the same structure for all samples, got {spec} and {other_spec}.")
    for one, another in zip(leaves, others, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(another, torch.Tensor):
            if one.shape[lead:] != another.shape[lead:]:
                shapes = f"{list(one.shape[lead:])} and {list(another.shape[lead:])}"
                raise InputError(f"{name} holds a tensor that must have the same shape for all samples, got {shapes}.")
        elif not _is_same(one, another):
            raise InputError(f"{name} holds a Python value that is not the same for all samples, {one!r} and {another!r}: return a tensor.")


def _is_same(one: Any, another: Any) -> bool:
    if one is another:
        return True
    if type(one) is not type(another):
        return False
    if hasattr(one, "tobytes") and hasattr(one, "dtype"):  # NumPy's
        return (one.dtype, one.shape, one.tobytes()) == (another.dtype, another.shape, another.tobytes())
    if isinstance(one, (float, complex)):
        return repr(one) == repr(another)  # so that NaN is the same as NaN, and 0.0 is not the same as -0.0
    return bool(one == another)


def concat(parts: Sequence[Any], name: str) -> Any:
    """One tree from several: tensors are joined along dim 0; a leaf that is no tensor has to be the same in all.

    Raises:
        InputError: The trees cannot be joined.
    """
    trees = [flatten(part) for part in parts]
    for tree in trees:
        expect_same(trees[0], tree, name, lead=1)
    columns, specs = zip(*trees, strict=True)
    return unflatten(specs[0], [torch.cat(c) if isinstance(c[0], torch.Tensor) else c[0] for c in zip(*columns, strict=True)])
