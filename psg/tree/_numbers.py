"""Numbers of each sample, or of each pair: norms, inner products, projections."""

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from psg import _trees
from psg._ambient import unaffected
from psg._errors import InputError
from psg.factors import Factor, Joint
from psg.factors._sketch import Sketch
from psg.tree._leaves import beside, factors_of, is_factor, place_of


@unaffected
def squared_norm(tree: Any) -> Tensor:
    """|g_n|^2, over all leaves together.

    Args:
        tree: Per-sample gradients.

    Returns:
        [n], real.

    Raises:
        InputError: The tree holds no per-sample gradients, or its leaves disagree on n.

    Example:
        >>> import torch
        >>> squared_norm({"w": torch.tensor([[3.0, 0.0], [1.0, 1.0]]), "b": torch.tensor([4.0, 1.0])})
        tensor([25.,  3.])
    """
    return _total([factor.squared_norm() for factor in factors_of(tree, "squared_norm")[0]])


@unaffected
def norm(tree: Any) -> Tensor:
    """|g_n|, over all leaves together.

    Of one leaf, `norm(g["weight"])`, it is that layer's. Of a tree of sums, `ClippedGrad.grads` say, it is not the norm: dimension 0 of
    every leaf would count as the samples. That is `torch.nn.utils.get_total_norm(optree.tree_leaves(sums))`.

    Args:
        tree: Per-sample gradients.

    Returns:
        [n], real. Differentiable; at zero all derivatives are taken to be zero.

    Example:
        >>> import torch
        >>> norm([torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])])
        tensor([5.])
    """
    factors, _ = factors_of(tree, "norm")
    return Joint(factors).norm


@unaffected
def dot(tree: Any, direction: Any) -> Tensor:
    """<g_n, v>: how each sample's gradient lies to one direction.

    Args:
        tree: Per-sample gradients.
        direction: The tree of the parameters, with tensors [*shape].

    Returns:
        [n], real.

    Raises:
        InputError: The direction's tree or shapes do not fit.

    Example:
        >>> import torch
        >>> dot(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, -1.0]))
        tensor([-1., -1.])
    """
    factors, leaves = beside(tree, direction, "dot", "direction")
    return _total([factor.dot(leaf) for factor, leaf in zip(factors, leaves, strict=True)])


@unaffected
def inner(tree: Any, other: Any) -> Tensor:
    """<g_n, h_n>, sample by sample.

    Args:
        tree: Per-sample gradients.
        other: Per-sample gradients of as many samples, in the same tree.

    Returns:
        [n], real.

    Raises:
        InputError: The trees differ in structure or n.

    Example:
        >>> import torch
        >>> inner(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([11.])
    """
    pairs = _pairs(tree, other, "inner")
    if pairs[0][0].n != pairs[0][1].n:
        raise InputError(f"psg.tree.inner: the trees have {pairs[0][0].n} and {pairs[0][1].n} samples; psg.tree.gram takes both.")
    return _total([x.inner(y) for x, y in pairs])


@unaffected
def gram(tree: Any, other: Any = None) -> Tensor:
    """<g_n, h_m> of every pair: the empirical neural tangent kernel of the loss.

    That of a model's outputs takes a sample for each output: see "Outputs instead of losses" in the README.

    Args:
        tree: Per-sample gradients of n samples.
        other: Per-sample gradients of m samples in the same tree; `tree` itself by default.

    Returns:
        [n, m], real.

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
        [n, m], real, in [-1, 1] up to rounding. The inner products are formed first: in float32 they overflow for norms above 1.8e19 (the
        cosine is NaN), and lose their digits for norms below 1e-19, or read 0.

    Example:
        >>> import torch
        >>> cosine(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
        tensor([[1., 0.],
                [0., 0.]])
    """
    rows = norm(tree)
    columns = rows if other is None else norm(other)
    scale = rows[:, None] * columns[None, :]
    zero = scale == 0
    return torch.where(zero, 0, gram(tree, other) / torch.where(zero, 1, scale))


@unaffected
def project(tree: Any, dim: int, *, seed: int = 0) -> Tensor:
    """A random projection: each sample's gradient as `dim` numbers with, on average, the same inner products.

    For gradients u and v, E[project(u) . project(v)] = <u, v> over seeds, with a variance of at most 11 / dim |u|^2 |v|^2. Every entry of
    a leaf goes to one of `dim` buckets, with a sign; the leaves' buckets are added up. So the projection is linear, costs what looking at
    the gradients once does or, of wide layers, much less (their gradients are not formed), and no matrix [P, dim] is drawn or held.

    Args:
        tree: Per-sample gradients.
        dim: How many numbers: an integer that is at least 1. Powers of two are fastest.
        seed: An integer. The projection depends on it, on `dim`, and on the leaves' shapes and where in the tree they are (names, indices)
            alone, and is the same for dense and factored trees, for every order of a mapping, on every machine and device: what is
            projected today can be compared with what is projected later.

    Returns:
        [n, dim], real, in at least float32.

    Raises:
        InputError: `dim` or `seed` is no such integer.

    Example:
        >>> import torch
        >>> sketch = project({"w": torch.eye(3)}, 1024)
        >>> sketch.shape, (sketch @ sketch.T).diagonal()
        (torch.Size([3, 1024]), tensor([1., 1., 1.]))

    Source: Pham & Pagh, "Fast and Scalable Polynomial Kernels via Explicit Feature Maps", 2013 (TensorSketch); Park et al., "TRAK:
    Attributing Model Behavior at Scale", 2023 (what projected gradients are for).
    """
    factors, _ = factors_of(tree, "project")
    for name, value, least in (("dim", dim, 1), ("seed", seed, None)):
        if not isinstance(value, int) or isinstance(value, bool) or least is not None and value < least:
            raise InputError(f"psg.tree.project: {name}={value!r}: expected an integer{'' if least is None else ' that is at least 1'}.")
    places = _trees.keys(tree, is_factor)
    return _total([factor.project(Sketch(dim, random.Random(f"{seed} {place}"))) for factor, place in zip(factors, places, strict=True)])


def _pairs(tree: Any, other: Any, name: str) -> list[tuple[Factor, Factor]]:
    (factors, spec), (others, other_spec) = factors_of(tree, name), factors_of(other, name)
    if spec != other_spec:
        raise InputError(f"psg.tree.{name}: the trees differ in structure: {spec} and {other_spec}.")
    for i, (x, y) in enumerate(zip(factors, others, strict=True)):
        if x.shape != y.shape:
            place = place_of(tree, "tree", i)
            raise InputError(f"psg.tree.{name}: {place} has shape {tuple(x.shape)} of one sample, and {tuple(y.shape)} in the other tree.")
    return [(x, y) if x.dtype == y.dtype else _in_one_dtype(x, y) for x, y in zip(factors, others, strict=True)]


def _in_one_dtype(x: Factor, y: Factor) -> tuple[Factor, Factor]:
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
