"""Trees of arguments: flattening, in_dims as a prefix tree, paths for messages. Trees are optree's."""

from collections.abc import Callable, Sequence
from typing import Any

import optree

from psg._errors import InputError

NAMESPACE = "psg"


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure of a tree."""
    return optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def unflatten(spec: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The tree of this structure with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def paths(tree: Any, root: str = "") -> list[str]:
    """How to reach every leaf, as Python writes it: `args[1]['ids']`."""
    return [accessor.codify(root) for accessor in optree.tree_accessors(tree, namespace=NAMESPACE)]


def broadcast(prefix: Any, tree: Any, name: str) -> list[Any]:
    """The leaves of `prefix` (None counts as one), repeated over the leaves of `tree` below each.

    Raises:
        InputError: `prefix` is no prefix of `tree`.
    """
    leaves, spec = flatten(tree)
    try:
        return optree.broadcast_prefix(prefix, _skeleton(spec, leaves), none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        raise InputError(f"{name}={prefix!r} is no prefix of the tree it belongs to, which has the structure {spec}.") from error


def _skeleton(spec: optree.PyTreeSpec, leaves: list[Any]) -> Any:
    # `None` nodes of the tree are no leaves of ours, but broadcast_prefix would count them with none_is_leaf=True:
    # an empty tuple in their place has no leaves in either reading.
    return optree.tree_map(
        lambda leaf: () if leaf is None else leaf,
        optree.tree_unflatten(spec, list(leaves)),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def keys(tree: Any) -> list[tuple[Any, ...]]:
    """The path to every leaf as a tuple of keys, indices and attribute names."""
    return list(optree.tree_paths(tree, namespace=NAMESPACE))
