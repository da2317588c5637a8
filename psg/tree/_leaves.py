"""Trees as lists of factors, and how messages name a leaf."""

from typing import Any

import optree
from torch import Tensor

from psg import _trees
from psg._errors import InputError, a_kind
from psg.clipping import is_clipped
from psg.factors import Dense, Factor, is_factor


def place_of(tree: Any, root: str, i: int) -> str:
    """How to reach leaf i, as Python writes it: `tree['w']`."""
    return _trees.paths(tree, root, is_factor)[i]


def factors_of(tree: Any, name: str, computes: bool = True) -> tuple[list[Factor], optree.PyTreeSpec]:
    """The leaves as factors, at least one, all with the same n, and the structure. Else InputError, naming psg.tree's function `name`."""
    if is_clipped(tree):
        raise InputError(
            f"psg.tree.{name}: got {a_kind(tree)}; expected per-sample gradients. Its grads are sums, without a batch dimension; "
            "the samples' norms are in its norms."
        )
    leaves, spec = _trees.flatten(tree, is_factor)
    if not leaves:
        raise InputError(f"psg.tree.{name}: the tree has no leaves.")
    for i, leaf in enumerate(leaves):
        got = None if isinstance(leaf, Factor) else _trees.oddity(leaf)
        if got is None and isinstance(leaf, Tensor) and leaf.ndim == 0:
            got = "a scalar tensor"
        if got is not None:
            place = place_of(tree, "tree", i)
            raise InputError(f"psg.tree.{name}: expected per-sample gradients, dense tensors [n, ...] or factors; {place} is {got}.")
        # A function that only selects, joins or materialises samples takes any dtype: ids, say, beside the gradients.
        if computes and isinstance(leaf, Tensor) and not _trees.is_computable(leaf):
            place = place_of(tree, "tree", i)
            raise InputError(
                f"psg.tree.{name}: {place} has dtype {leaf.dtype}, in which sums would round or overflow; convert it to float32."
            )
    factors = [leaf if isinstance(leaf, Factor) else Dense(leaf) for leaf in leaves]
    n = factors[0].n
    other = next((i for i, factor in enumerate(factors) if factor.n != n), None)
    if other is not None:
        first, place = place_of(tree, "tree", 0), place_of(tree, "tree", other)
        raise InputError(
            f"psg.tree.{name}: the leaves disagree on the number of samples: {first} has {n} and {place} {factors[other].n}. "
            "The leaves of sums, such as ClippedGrad.grads, have no batch dimension; for their norm see help(psg.tree.norm)."
        )
    return factors, spec


def beside(tree: Any, other: Any, name: str, what: str) -> tuple[list[Factor], list[Tensor]]:
    """The factors of `tree`, and the tensors of `other`, a tree like the parameters, which messages call `what`."""
    factors, spec = factors_of(tree, name)
    leaves, own = _trees.flatten(other, is_factor)
    if spec != own:
        difference = _trees.differences(own, spec, (what, "tree of gradients"))
        raise InputError(f"psg.tree.{name}: the {what} and the gradients differ in structure: {difference}.")
    for i, (factor, leaf) in enumerate(zip(factors, leaves, strict=True)):
        odd = _trees.oddity(leaf)
        if odd is not None or factor.shape != leaf.shape:
            got = f"has shape {tuple(leaf.shape)}" if odd is None else f"is {odd}"
            hint = "; pass its to_dense()" if isinstance(leaf, Tensor) and leaf.is_sparse else ""
            raise InputError(f"psg.tree.{name}: {place_of(other, what, i)} {got}, expected {tuple(factor.shape)}{hint}.")
    return factors, leaves
