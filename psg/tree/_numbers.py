"""Numbers for each sample, or each pair of samples: norms, inner products, projections."""

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from psg import _trees
from psg._errors import InputError, as_integer
from psg._torch._ambient import unaffected
from psg.factors import Dense, Factor, _products, is_factor
from psg.factors._base import cancel
from psg.factors._joint import Joint, joined_pairs, total_sketch
from psg.factors._sketch import Sketch
from psg.tree._leaves import beside, factors_of, place_of


@unaffected
def squared_norm(tree: Any) -> Tensor:
    """|g_n|^2, over all leaves together.

    Args:
        tree: Per-sample gradients.

    Returns:
        [n], real, in at least float32.

    Raises:
        InputError: The tree holds no per-sample gradients, or its leaves disagree on n.

    Example:
        >>> import torch
        >>> squared_norm({"w": torch.tensor([[3.0, 0.0], [1.0, 1.0]]), "b": torch.tensor([4.0, 1.0])})
        tensor([25.,  3.])
    """
    return Joint(factors_of(tree, "squared_norm")[0]).squared_norm


@unaffected
def norm(tree: Any) -> Tensor:
    """|g_n|, over all leaves together.

    `norm(g["weight"])` gives the norms of one layer. For a tree of sums, such as `ClippedGrad.grads`, use
    `torch.nn.utils.get_total_norm(optree.tree_leaves(sums))` instead: `norm` would take dimension 0 of every leaf for the samples.

    Args:
        tree: Per-sample gradients.

    Returns:
        [n], real, in at least float32. Differentiable; at zero all derivatives are taken to be zero.

    Raises:
        InputError: `tree` is no tree of per-sample gradients: see `help(psg.tree)`.

    Example:
        >>> import torch
        >>> norm([torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])])
        tensor([5.])
    """
    factors, _ = factors_of(tree, "norm")
    return Joint(factors).norm


@unaffected
def dot(tree: Any, direction: Any) -> Tensor:
    """<g_n, v>, the inner product of each sample's gradient with one direction v, the same for all samples.

    Many directions, stacked to a tree of tensors [k, *shape], are like the gradients of k samples: `gram(tree, directions)` is [n, k].

    Args:
        tree: Per-sample gradients.
        direction: A tree like the parameters, with tensors [*shape].

    Returns:
        [n], real, in at least float32.

    Raises:
        InputError: The direction's structure or shapes do not fit.

    Example:
        >>> import torch
        >>> dot(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, -1.0]))
        tensor([-1., -1.])
    """
    factors, leaves = beside(tree, direction, "dot", "direction")
    # Real gradients are orthogonal to imaginary parts.
    own = [leaf if factor.dtype.is_complex or not leaf.is_complex() else leaf.real for factor, leaf in zip(factors, leaves, strict=True)]
    pairs = joined_pairs([(factor, Dense(leaf[None])) for factor, leaf in zip(factors, own, strict=True)])
    return _total([factor.dot(leaf.materialize()[0]) for factor, leaf in pairs])


@unaffected
def inner(tree: Any, other: Any) -> Tensor:
    """<g_n, h_n>, sample by sample: the inner product of each sample's gradient with the same sample's gradient in another tree.

    Where the terms of a gradient nearly cancel, rounding hides it: see `gram`.

    Args:
        tree: Per-sample gradients.
        other: Per-sample gradients of the same number of samples, in the same tree.

    Returns:
        [n], real, in at least float32.

    Raises:
        InputError: The trees differ in structure or n.

    Example:
        >>> import torch
        >>> inner(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([11.])
    """
    pairs = _pairs(tree, other, "inner")
    if pairs[0][0].n != pairs[0][1].n:
        raise InputError(f"psg.tree.inner: the trees have {pairs[0][0].n} and {pairs[0][1].n} samples; for all pairs see psg.tree.gram.")
    return _total([x.inner(y) for x, y in pairs])


@unaffected
def gram(tree: Any, other: Any = None) -> Tensor:
    """<g_n, h_m> of every pair: the empirical neural tangent kernel of the loss.

    The kernel of a model's outputs takes one sample for each output: see "Outputs instead of losses" in the README.

    Rounding is relative to the terms that a gradient sums (over positions). Where these are a thousand times larger than the gradient, and
    cancel, it hides the inner products, and squared norms on the diagonal may come out negative: there take `gram(materialize(tree))`.

    Args:
        tree: Per-sample gradients of n samples.
        other: Per-sample gradients of m samples in the same tree; `tree` itself by default.

    Returns:
        [n, m], real, in at least float32.

    Raises:
        InputError: The trees differ in structure.

    Example:
        >>> import torch
        >>> gram(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([[1., 1.],
                [1., 2.]])
    """
    return _total([x.gram(y) for x, y in _pairs(tree, tree if other is None else other, "gram")])


@unaffected
def cosine(tree: Any, other: Any = None) -> Tensor:
    """<g_n, h_m> / (|g_n| |h_m|) of every pair; 0 where a norm is zero.

    Args:
        tree: Per-sample gradients of n samples.
        other: Per-sample gradients of m samples in the same tree; `tree` itself by default.

    Returns:
        [n, m], real, in at least float32, in [-1, 1] up to rounding. Where the terms of a gradient nearly cancel, eager calls on CPUs
        compute all inner products from the gradients; under `psg.jit` and on accelerators such cosines have no digits (see `gram`). The
        inner products are computed first: in float32 they overflow for norms above 1.8e19 (the cosine is NaN), and for norms below 1e-19
        they lose digits or become 0.

    Raises:
        InputError: A tree holds no per-sample gradients, or the trees differ in structure: see `help(psg.tree)`.

    Example:
        >>> import torch
        >>> cosine(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
        tensor([[1., 0.],
                [0., 0.]])
    """
    rows = Joint(factors_of(tree, "cosine")[0]).norm
    columns = rows if other is None else Joint(factors_of(other, "cosine")[0]).norm
    scale = rows[:, None] * columns[None, :]
    zero = scale == 0
    pairs = _pairs(tree, tree if other is None else other, "cosine")
    hidden = cancel([x for x, _ in pairs], rows) or other is not None and cancel([y for _, y in pairs], columns)
    products = _total([_products.gram.materialized(x, y) if hidden else x.gram(y) for x, y in pairs])
    return torch.where(zero, 0, products / torch.where(zero, 1, scale))


@unaffected
def project(tree: Any, dim: int, *, seed: int = 0) -> Tensor:
    """A random projection of each sample's gradient to `dim` numbers, which keeps inner products on average.

    For gradients u and v, E[project(u) . project(v)] = <u, v> over seeds, with a variance of at most 11 / dim |u|^2 |v|^2. Every entry of
    a leaf goes to one of `dim` buckets, with a sign; the leaves' buckets are added up. So the projection is linear and needs no matrix
    [P, dim]. It costs one pass over the gradients; for wide layers much less, because their gradients are not materialised.

    Args:
        tree: Per-sample gradients.
        dim: How many numbers: an integer that is at least 1. Powers of two are fastest.
        seed: An integer. The projection depends only on it, on `dim`, and on the leaves' shapes and places in the tree (names, indices).
            It is the same for dense and factored trees, for every order of a mapping, on every machine and device, so that later
            projections can be compared with earlier ones.

    Returns:
        [n, dim], real, in at least float32.

    Raises:
        InputError: `dim` or `seed` is not such an integer.

    Example:
        >>> import torch
        >>> sketch = project({"w": torch.eye(3)}, 1024)
        >>> sketch.shape, (sketch @ sketch.T).diagonal()
        (torch.Size([3, 1024]), tensor([1., 1., 1.]))

    Source: Pham & Pagh, "Fast and Scalable Polynomial Kernels via Explicit Feature Maps", 2013 (TensorSketch); Park et al., "TRAK:
    Attributing Model Behavior at Scale", 2023 (what projected gradients are for).
    """
    factors, _ = factors_of(tree, "project")
    size, start = as_integer(dim, least=1), as_integer(seed)
    if size is None:
        raise InputError(f"psg.tree.project: dim={dim!r}: expected an integer that is at least 1.")
    if start is None:
        raise InputError(f"psg.tree.project: seed={seed!r}: expected an integer.")
    places = _trees.keys(tree, is_factor)
    return total_sketch(factors, [Sketch(size, random.Random(f"{start} {place}")) for place in places])


def _pairs(tree: Any, other: Any, name: str) -> list[tuple[Factor, Factor]]:
    factors, spec = factors_of(tree, name)
    others, other_spec = (factors, spec) if other is tree else factors_of(other, name)
    if spec != other_spec:
        difference = _trees.differences(spec, other_spec, ("first", "second"))
        raise InputError(f"psg.tree.{name}: the trees differ in structure: {difference}.")
    for i, (x, y) in enumerate(zip(factors, others, strict=True)):
        if x.shape != y.shape:
            place = place_of(tree, "tree", i)
            raise InputError(f"psg.tree.{name}: {place} has shape {tuple(x.shape)} for one sample, but {tuple(y.shape)} in the other tree.")
    return joined_pairs([(x, y) if x.dtype == y.dtype else _in_one_dtype(x, y) for x, y in zip(factors, others, strict=True)])


def _in_one_dtype(x: Factor, y: Factor) -> tuple[Factor, Factor]:
    dtype = torch.promote_types(x.dtype, y.dtype)
    if dtype.is_complex:  # which only Dense holds
        x, y = Dense(x.materialize()), Dense(y.materialize())
    return x.to(dtype), y.to(dtype)


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
