"""Reductions of trees of per-sample gradients. Every function takes dense, factored and mixed trees alike.

A leaf is a tensor [n, *shape] or a `psg.factors.Factor` that stands for one. Nothing is materialised unless that is the cheapest way.
Complex leaves count as pairs of real numbers. Reductions accumulate in float32 or better.
"""

import builtins
import functools
import math
import numbers
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from psg import _functorch, _trees, clipping
from psg._ambient import unaffected
from psg._errors import InputError
from psg.factors import Dense, Factor, Joint
from psg.factors import concat as concat_factors
from psg.factors._base import as_real, square, wide, widen
from psg.factors._maps import scaled
from psg.factors._sketch import Sketch

__all__ = [
    "Clipped",
    "Moments",
    "add_noise",
    "clip",
    "concat",
    "cosine",
    "dot",
    "flatten",
    "gram",
    "inner",
    "materialize",
    "mean",
    "moments",
    "norm",
    "precondition",
    "project",
    "segment_sum",
    "sparse_weighted_sum",
    "squared_norm",
    "sum",
    "take",
    "unflatten",
    "weighted_sum",
]


def _is_factor(node: Any) -> bool:
    return isinstance(node, Factor)


def _place(tree: Any, root: str, i: int) -> str:
    """How to reach leaf i, as Python writes it: `tree['w']`."""
    return _trees.paths(tree, root, _is_factor)[i]


def _factors(tree: Any, name: str) -> tuple[list[Factor], optree.PyTreeSpec]:
    leaves, spec = _trees.flatten(tree, _is_factor)
    if not leaves:
        raise InputError(f"psg.tree.{name}: the tree has no leaves.")
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, (Tensor, Factor)) or isinstance(leaf, Tensor) and leaf.ndim == 0:
            got = "a scalar tensor" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            place = _place(tree, "tree", i)
            raise InputError(f"psg.tree.{name}: expected per-sample gradients, tensors [n, ...] or factors; {place} is {got}.")
    factors = [leaf if isinstance(leaf, Factor) else Dense(leaf) for leaf in leaves]
    other = next((i for i, factor in enumerate(factors) if factor.n != factors[0].n), None)
    if other is not None:
        first, place = _place(tree, "tree", 0), _place(tree, "tree", other)
        raise InputError(
            f"psg.tree.{name}: the leaves disagree on the number of samples: {first} has {factors[0].n} and {place} {factors[other].n}. "
            "The leaves of sums, such as ClippedGrad.grads, have no samples; for their norm see psg.tree.norm."
        )
    return factors, spec


def _pairs(tree: Any, other: Any, name: str) -> list[tuple[Factor, Factor]]:
    (factors, spec), (others, other_spec) = _factors(tree, name), _factors(other, name)
    if spec != other_spec:
        raise InputError(f"psg.tree.{name}: the trees differ in structure: {spec} and {other_spec}.")
    for i, (x, y) in enumerate(zip(factors, others, strict=True)):
        if x.shape != y.shape:
            place = _place(tree, "tree", i)
            raise InputError(f"psg.tree.{name}: {place} has shape {tuple(x.shape)} of one sample, and {tuple(y.shape)} in the other tree.")
    return [(x, y) if x.dtype == y.dtype else _in_one_dtype(x, y) for x, y in zip(factors, others, strict=True)]


def _in_one_dtype(x: Factor, y: Factor) -> tuple[Factor, Factor]:
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def _add(tensors: list[Tensor], others: list[Tensor]) -> Sequence[Tensor]:
    if _functorch.transform_active():  # vmap has no rule for ops on lists
        return [tensor + other for tensor, other in zip(tensors, others, strict=True)]
    return torch._foreach_add(tensors, others)  # pyright: ignore[reportPrivateImportUsage]


def _divide(tensors: list[Tensor], n: int) -> Sequence[Tensor]:
    if _functorch.transform_active():
        return [tensor / n for tensor in tensors]
    return torch._foreach_div(tensors, n)  # pyright: ignore[reportPrivateImportUsage]


@unaffected
def squared_norm(tree: Any) -> Tensor:
    """|g_n|^2, over all leaves together.

    Args:
        tree: Per-sample gradients.

    Returns:
        [n], real.

    Raises:
        InputError: The tree holds no per-sample gradients, or its leaves disagree on n. So do all functions of this module.

    Example:
        >>> import torch
        >>> squared_norm({"w": torch.tensor([[3.0, 0.0], [1.0, 1.0]]), "b": torch.tensor([4.0, 1.0])})
        tensor([25.,  3.])
    """
    return _total([factor.squared_norm() for factor in _factors(tree, "squared_norm")[0]])


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
    factors, _ = _factors(tree, "norm")
    return Joint(factors).norm


@unaffected
def materialize(tree: Any) -> Any:
    """The gradients themselves.

    Args:
        tree: Per-sample gradients.

    Returns:
        The same tree with a tensor [n, *shape] at every leaf.

    Example:
        >>> import torch
        >>> from psg.factors import Outer
        >>> materialize({"w": Outer(torch.ones(1, 1, 2), torch.tensor([[[1.0, 2.0]]]))})
        {'w': tensor([[[1., 2.],
                 [1., 2.]]])}
    """
    factors, spec = _factors(tree, "materialize")
    return _trees.unflatten(spec, [factor.materialize() for factor in factors])


@unaffected
def weighted_sum(tree: Any, weights: Tensor) -> Any:
    """sum_n weights[n] g_n.

    Args:
        tree: Per-sample gradients.
        weights: [n], real and finite. A weight of zero does not take out a gradient that is not finite, for 0 times NaN is NaN:
            `psg.clipped_grad` does, and `take` of the other samples.

    Returns:
        The same tree with a tensor [*shape] at every leaf, in the leaf's dtype.

    Raises:
        InputError: `weights` is not [n].

    Example:
        >>> import torch
        >>> weighted_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 0.5]))
        tensor([2.5000, 4.0000])
    """
    factors, spec = _factors(tree, "weighted_sum")
    _check_weights("weighted_sum", factors, weights)
    return _trees.unflatten(spec, Joint(factors).weighted_sums(weights))


@unaffected
def sparse_weighted_sum(tree: Any, weights: Tensor) -> Any:
    """`weighted_sum` in which leaves held as rows (embeddings) come as sparse tensors: no more than the rows that were looked up.

    Args:
        tree: Per-sample gradients.
        weights: [n], real and finite, as in `weighted_sum`: zero does not take out a gradient that is not finite.

    Returns:
        The same tree. A leaf that is a `psg.factors.Rows`, or sums of segments of one, gives a coalesced sparse COO tensor [*shape], as
        torch.optim.SparseAdam and SGD take it; every other leaf a dense one, as all do in a batch without samples.

    Raises:
        InputError: `weights` is not [n].

    Example:
        >>> import torch, psg
        >>> model = torch.nn.Embedding(1000, 2)
        >>> loss, params = psg.stateless(model, lambda output, y: (output * y).sum())
        >>> g = psg.factored_grad(loss)(params, torch.tensor([[7], [9]]), torch.ones(2, 1, 1))
        >>> sparse_weighted_sum(g, torch.tensor([1.0, 0.5]))["weight"]
        tensor(indices=tensor([[7, 9]]),
               values=tensor([[1.0000, 1.0000],
                              [0.5000, 0.5000]]),
               size=(1000, 2), nnz=2, layout=torch.sparse_coo)
    """
    factors, spec = _factors(tree, "sparse_weighted_sum")
    _check_weights("sparse_weighted_sum", factors, weights)
    return _trees.unflatten(spec, [factor.sparse_sum(weights) for factor in factors])


def _check_weights(name: str, factors: Sequence[Factor], weights: Tensor) -> None:
    if not isinstance(weights, Tensor) or weights.shape != (factors[0].n,) or weights.is_complex():
        got = f"{tuple(weights.shape)} of {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
        raise InputError(f"psg.tree.{name}: expected real weights of shape ({factors[0].n},), got {got}.")


@unaffected
def sum(tree: Any) -> Any:  # noqa: A001
    """sum_n g_n: the gradient of the summed loss.

    Args:
        tree: Per-sample gradients.

    Returns:
        The same tree with a tensor [*shape] at every leaf.

    Example:
        >>> import torch
        >>> sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([4., 6.])
    """
    factors, _ = _factors(tree, "sum")
    return weighted_sum(tree, torch.ones(factors[0].n, device=factors[0].device))


@unaffected
def mean(tree: Any) -> Any:
    """1/n sum_n g_n: the gradient of the mean loss; NaN for n = 0, as torch.mean.

    Args:
        tree: Per-sample gradients.

    Returns:
        The same tree with a tensor [*shape] at every leaf.

    Example:
        >>> import torch
        >>> mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([2., 3.])
    """
    factors, _ = _factors(tree, "mean")
    n, device = factors[0].n, factors[0].device
    if n == 0:
        return _trees.map_leaves(lambda leaf: leaf / 0, sum(tree))
    dtype = functools.reduce(torch.promote_types, {wide(factor.dtype.to_real()) for factor in factors})
    return weighted_sum(tree, torch.full((n,), 1 / n, dtype=dtype, device=device))


class Clipped(NamedTuple):
    """What `clip` returns.

    Attributes:
        grads: sum_n clip_coef[n] g_n: the parameters' tree, each leaf [*shape].
        norms: |g_n| over all leaves before clipping, [n]; 0 for masked samples.
        clip_coef: The parameters' tree, each leaf [n]: what the sample's gradient of that leaf was multiplied with. 0 for samples that
            are masked or not finite.
        nonfinite: How many unmasked samples had a norm that is not finite and so contribute zero; an integer tensor [].
        sensitivity: The most by which adding or removing one sample changes `grads` in L2 norm: the clip norm, sqrt(sum C^2) over
            groups, inf for a policy of the user's without a bound (`clipping.bounded`). Replacing one changes them by up to twice that.
        group_norms: The parameters' tree, each leaf [n]: the norm over the leaves that it is clipped together with, before clipping; 0 for
            masked samples.
    """

    grads: Any
    norms: Tensor
    clip_coef: Any
    nonfinite: Tensor
    sensitivity: float | Tensor
    group_norms: Any


@unaffected
def clip(
    tree: Any,
    clip_norm: Any,
    *,
    policy: Literal["clip", "automatic", "normalize"] | clipping.Policy = "clip",
    mask: Tensor | None = None,
) -> Clipped:
    """The sum of clipped gradients, sum_n min(1, C / |g_n|) g_n: what `psg.clipped_grad` gives, of gradients that are there already.

    Of `segment_sum(g, users, num_users)` it is the sum of the users' clipped gradients, for privacy of users instead of samples. For
    that one user's samples have to be in one batch: what is clipped in parts is as long as the parts together.

    Formal guarantee: that of `psg.clipped_grad`. With the built-in policies, and bounded ones, each sample's term has L2 norm at most
    `sensitivity`, up to rounding in the dtypes of the norms and of the gradients; one whose norm is not finite, and a masked one, adds
    exactly zero. Rounding is relative to what a gradient adds up (positions, a user's samples): see there.

    Args:
        tree: Per-sample gradients.
        clip_norm: C, in the units of the gradient: a number or scalar tensor for the norm over all leaves, `psg.clipping.PerLeaf` or
            `psg.clipping.PerGroup` for leaves and groups of them. 0 gives a zero sum; inf, with the policy "clip", the plain sum.
        policy: "clip", "automatic", "normalize" or a function (norms, clip_norm) -> clip_coef; see `psg.clipping`.
        mask: Booleans [n]: samples where it is False contribute exactly zero; None for all.

    Returns:
        The sum, and what it was clipped by.

    Raises:
        InputError: A clip norm is negative or NaN; a policy is none, gives something else than [n], or would bring gradients to a norm of
            inf; a mask is not [n] booleans; a leaf has no group.

    Example:
        >>> import torch
        >>> g = {"w": torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), "b": torch.tensor([0.0, 0.0, torch.nan])}
        >>> out = clip(segment_sum(g, torch.tensor([0, 0, 1]), 2), 1.0)
        >>> out.grads["w"], out.nonfinite
        (tensor([0.9487, 0.3162]), tensor(1))

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1; McMahan et al., "Learning Differentially Private
    Recurrent Language Models", 2018 (users).
    """
    factors, spec = _factors(tree, "clip")
    chosen, groups = clipping.policy_of(policy), clipping.groups_of(clip_norm, spec)
    clipping.expect_finite(groups, chosen)
    clipping.check_mask("psg.tree.clip", mask, factors[0].n)
    found = clipping.clipped_sums(factors, groups, functools.partial(clipping.coefficients, chosen), mask)
    leaves = found.sums, clipping.by_leaf(groups, found.coefs), clipping.by_leaf(groups, found.group_norms)
    grads, coefs, group_norms = (_trees.unflatten(spec, own) for own in leaves)
    return Clipped(grads, found.norms, coefs, found.nonfinite, clipping.sensitivity(groups, chosen), group_norms)


class Moments(NamedTuple):
    """What `moments` returns.

    `variance` is computed from the two: that of the n samples (divided by n, not n - 1), with few digits where the mean is much larger
    than the spread.

    Attributes:
        mean: 1/n sum_n g_n, the parameters' tree, each leaf [*shape].
        second: 1/n sum_n |g_n|^2 of every entry, real, the same tree: the diagonal of the empirical Fisher matrix.
    """

    mean: Any
    second: Any

    @property
    def variance(self) -> Any:
        """second - |mean|^2, never negative: of the n samples, not of what they were drawn from (that is n / (n - 1) times as much).

        Off by a few roundings of `second`: of an entry whose mean is 3000 times its spread, single precision leaves nothing.
        """
        means, spec = _trees.flatten(self.mean)
        seconds, _ = _trees.flatten(self.second)
        return _trees.unflatten(spec, [(second - square(mean)).clamp(min=0) for mean, second in zip(means, seconds, strict=True)])


torch.serialization.add_safe_globals([Clipped, Moments])


@unaffected
def moments(tree: Any) -> Moments:
    """Mean and mean square of every entry over the samples; embeddings never become dense per sample.

    The moments of several batches average, weighted by their sizes; so do those of the chunks of one.

    Args:
        tree: Per-sample gradients.

    Returns:
        The two, in at least float32; NaN for n = 0. For the gradient noise scale tr(Sigma) / |G|^2: tr(Sigma) is n / (n - 1) times the sum
        of `variance`, and |G|^2 the sum of mean^2 less tr(Sigma) / n, each without bias; average them over batches before dividing.

    Example:
        >>> import torch
        >>> mean, second = moments({"w": torch.tensor([[1.0, 2.0], [3.0, 2.0]])})
        >>> mean, second
        ({'w': tensor([2., 2.])}, {'w': tensor([5., 4.])})
        >>> moments({"w": torch.tensor([[1.0, 2.0], [3.0, 2.0]])}).variance
        {'w': tensor([1., 0.])}

    Source: Dangel, Kunstner & Hennig, "BackPACK: Packing more into backprop", 2020; McCandlish et al., "An Empirical Model of Large-Batch
    Training", 2018 (the noise scale).
    """
    factors, spec = _factors(tree, "moments")
    n = factors[0].n
    return Moments(*(_trees.unflatten(spec, _divide(sums, n)) for sums in Joint(factors).moment_sums()))


@unaffected
def add_noise(tree: Any, std: float | Tensor, *, generator: torch.Generator | None = None) -> Any:
    """x + std z with z standard normal, drawn for every entry: Gaussian noise on a sum of clipped gradients.

    All leaves of one dtype and device are served together, by a handful of kernels; nothing waits for the device. torch's generators are
    not cryptographically secure: a release that has an adversary needs one that is.

    Args:
        tree: Tensors of any shape, such as `ClippedGrad.grads`.
        std: The standard deviation, in the units of the tree: a number that is at least 0 and finite, or a scalar tensor. For a noise
            multiplier sigma it is sigma times `ClippedGrad.sensitivity`.
        generator: What draws, on the leaves' device; None for torch's default.

    Returns:
        The same tree, in its dtypes. Drawn and added in at least float32; a complex entry takes noise on both its parts.

    Raises:
        InputError: The tree has no leaves, or one that is no floating or complex tensor, or sparse; `std` is no such number.

    Example:
        >>> import torch
        >>> noisy = add_noise({"w": torch.ones(300, 300), "b": torch.zeros(300)}, 0.5)
        >>> noisy["w"].mean().round(decimals=1), noisy["w"].std().round(decimals=1)
        (tensor(1.), tensor(0.5000))

    Source: Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014, Appendix A (the Gaussian mechanism).
    """
    leaves, spec = _trees.flatten(tree, _is_factor)
    if not leaves:
        raise InputError("psg.tree.add_noise: the tree has no leaves.")
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            got = f"of dtype {leaf.dtype}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise InputError(
                f"psg.tree.add_noise: expected floating or complex tensors, such as a sum of gradients; {_place(tree, 'tree', i)} is {got}."
            )
        if leaf.layout != torch.strided:
            place = _place(tree, "tree", i)
            raise InputError(
                f"psg.tree.add_noise: {place} is a sparse sum, but noise goes on every entry, stored or not: give its to_dense()."
            )
    if isinstance(std, Tensor):
        if std.ndim != 0:
            raise InputError(f"psg.tree.add_noise: std: expected a number or a scalar tensor, got shape {tuple(std.shape)}.")
    elif not (isinstance(std, numbers.Real) and 0 <= std < math.inf):
        raise InputError(f"psg.tree.add_noise: std={std!r}: expected a number that is at least 0 and finite, or a scalar tensor.")
    scale = std if isinstance(std, Tensor) else float(std)
    parts = [as_real(leaf) for leaf in leaves]
    noisy: dict[int, Tensor] = {}
    for alike in _trees.alike(parts):
        first, shapes = parts[alike[0]], [parts[i].shape for i in alike]
        count = builtins.sum(map(torch.Size.numel, shapes))
        drawn = torch.randn(count, dtype=wide(first.dtype), device=first.device, generator=generator) * scale
        pieces = [piece.view(shape) for piece, shape in zip(drawn.split([shape.numel() for shape in shapes]), shapes, strict=True)]
        sums = _add([widen(parts[i]) for i in alike], pieces)
        noisy |= zip(alike, sums, strict=True)
    results = [torch.view_as_complex(noisy[i]) if leaf.is_complex() else noisy[i].to(leaf.dtype) for i, leaf in enumerate(leaves)]
    return _trees.unflatten(spec, results)


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
    factors, leaves = _beside(tree, direction, "dot", "direction")
    return _total([factor.dot(leaf) for factor, leaf in zip(factors, leaves, strict=True)])


@unaffected
def precondition(tree: Any, diagonal: Any) -> Any:
    """diagonal * g_n, entry by entry: Adam's second moments or a Fisher matrix' diagonal, inverted, on every sample's gradient.

    Args:
        tree: Per-sample gradients.
        diagonal: The tree of the parameters, with real tensors [*shape].

    Returns:
        The same tree, of the dtypes of the gradients: for inner products (influence, LESS), norms, projections. Factors stay factors unless
        they are small; of those that do, reductions form the gradients of a few samples at a time.

    Raises:
        InputError: The diagonal's tree or shapes do not fit, or it is complex.

    Example:
        >>> import torch
        >>> g = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
        >>> gram(precondition(g, {"w": torch.tensor([1.0, 0.5])}), g)  # g_n^T D g_m
        tensor([[ 3.,  7.],
                [ 7., 17.]])

    Source: Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", 2024, section 3 (gradients as Adam takes them).
    """
    _, leaves = _beside(tree, diagonal, "precondition", "diagonal")
    if any(leaf.is_complex() for leaf in leaves):
        raise InputError("psg.tree.precondition: expected a real diagonal.")
    parts = iter(leaves)

    def conditioned(factor: Factor) -> Factor:
        own = next(parts).to(factor.dtype)
        found = scaled(factor, own)
        return Dense(factor.materialize() * own) if found is None else found

    return _map(tree, conditioned, "precondition")


def _beside(tree: Any, other: Any, name: str, what: str) -> tuple[list[Factor], list[Tensor]]:
    """The factors of a tree, and the tensors of another like the parameters'."""
    factors, spec = _factors(tree, name)
    leaves, own = _trees.flatten(other)
    if spec != own:
        raise InputError(f"psg.tree.{name}: the {what} has the structure {own}, the gradients have {spec}.")
    for i, (factor, leaf) in enumerate(zip(factors, leaves, strict=True)):
        if not isinstance(leaf, Tensor) or factor.shape != leaf.shape:
            got = f"has shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"is a {type(leaf).__name__}"
            raise InputError(f"psg.tree.{name}: {_place(other, what, i)} {got}, expected {tuple(factor.shape)}.")
    return factors, leaves


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
    factors, _ = _factors(tree, "project")
    for name, value, least in (("dim", dim, 1), ("seed", seed, None)):
        if not isinstance(value, int) or isinstance(value, bool) or least is not None and value < least:
            raise InputError(f"psg.tree.project: {name}={value!r}: expected an integer{'' if least is None else ' that is at least 1'}.")
    places = _trees.keys(tree, _is_factor)
    return _total([factor.project(Sketch(dim, random.Random(f"{seed} {place}"))) for factor, place in zip(factors, places, strict=True)])


@unaffected
def flatten(tree: Any) -> Tensor:
    """All leaves side by side, in the order of the tree: sorted by their keys for a dict, as they were put in for an OrderedDict.

    Args:
        tree: Per-sample gradients.

    Returns:
        [n, P], in the leaves' common dtype.

    Example:
        >>> import torch
        >>> flatten({"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])})
        tensor([[1., 2., 3.]])
    """
    return torch.cat([factor.materialize().reshape(factor.n, factor.shape.numel()) for factor in _factors(tree, "flatten")[0]], dim=1)


def unflatten(flat: Tensor, like: Any) -> Any:
    """The inverse of `flatten`.

    Args:
        flat: [..., P], in the order of the tree: that of sorted keys for a dict, and not of `torch.nn.utils.parameters_to_vector`.
        like: The tree of the parameters, with tensors [*shape].

    Returns:
        The tree of `like` with a tensor [..., *shape] at every leaf, in the dtype of `flat`; in the leaf's own where `flat` has the common
        dtype of leaves that differ, as `flatten` gives it. What belongs to a real leaf has no imaginary part then: it is left out.

    Raises:
        InputError: P is not the number of entries of `like`.

    Example:
        >>> import torch
        >>> unflatten(torch.tensor([[1.0, 2.0, 3.0]]), {"a": torch.zeros(2), "b": torch.zeros(())})
        {'a': tensor([[1., 2.]]), 'b': tensor([3.])}
    """
    leaves, spec = _trees.flatten(like)
    sizes = [leaf.numel() for leaf in leaves]
    total = builtins.sum(sizes)
    if flat.shape[-1] != total:
        raise InputError(f"psg.tree.unflatten: expected {total} entries along the last dimension, got {flat.shape[-1]}.")
    dtypes = {leaf.dtype for leaf in leaves}
    mixed = len(dtypes) > 1 and flat.dtype == functools.reduce(torch.promote_types, dtypes)

    def back(part: Tensor, leaf: Tensor) -> Tensor:
        part = part.reshape(*flat.shape[:-1], *leaf.shape)
        if not mixed:
            return part
        return (part.real if part.is_complex() and not leaf.is_complex() else part).to(leaf.dtype)

    return _trees.unflatten(spec, [back(part, leaf) for part, leaf in zip(flat.split(sizes, dim=-1), leaves, strict=True)])


def take(tree: Any, index: Any) -> Any:
    """The gradients of some samples.

    Args:
        tree: Per-sample gradients.
        index: Integers [m], a mask [n], or a slice.

    Returns:
        The same tree, of the same kinds, for those samples.

    Raises:
        InputError: `index` is an integer, which would drop the dimension of samples.

    Example:
        >>> import torch
        >>> take(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
    """
    if not isinstance(index, slice):
        given, index = index, torch.as_tensor(index)
        index = index.long() if index.numel() == 0 else index  # an empty list has no integers
        if index.ndim != 1:
            raise InputError(
                f"psg.tree.take: expected a slice, integers [m] or a mask [n], got {given!r}; of one sample k, slice(k, k + 1)."
            )
    return _map(tree, lambda factor: factor.take(index), "take")


def concat(trees: Iterable[Any]) -> Any:
    """The samples of several trees, one after the other.

    Args:
        trees: Per-sample gradients in trees of the same structure: a list of them, or any other iterable; at least one.

    Returns:
        One tree. A leaf stays factored where its kind and shapes agree in all trees, and is materialised where they do not.

    Raises:
        InputError: No tree is given, or structures differ.

    Example:
        >>> import torch
        >>> concat([torch.tensor([[1.0]]), torch.tensor([[2.0]])])
        tensor([[1.],
                [2.]])
    """
    trees = list(trees)
    if not trees:
        raise InputError("psg.tree.concat: expected at least one tree.")
    columns, specs = zip(*(_factors(tree, "concat") for tree in trees), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise InputError(f"psg.tree.concat: the trees differ in structure: {', '.join(map(str, dict.fromkeys(specs)))}.")
    dense = [isinstance(leaf, Tensor) for leaf in _trees.flatten(trees[0], _is_factor)[0]]
    joined = [concat_factors(column) for column in zip(*columns, strict=True)]
    return _trees.unflatten(specs[0], [f.materialize() if plain else f for f, plain in zip(joined, dense, strict=True)])


@unaffected
def segment_sum(tree: Any, segment_ids: Tensor, num_segments: int) -> Any:
    """The sums of the gradients of segments of the samples: one user's, say, for privacy or influence of users instead of samples.

    Factors stay factors: segments are held as their samples. What is linear in the gradients is computed from these as they are; for the
    rest segments of about one size are joined, each at the price of at most twice its samples, whatever the sizes of the others.

    Args:
        tree: Per-sample gradients.
        segment_ids: Integers [n] in [0, num_segments): to which segment a sample belongs, in any order.
        num_segments: How many there are; those without samples have a sum of zero.

    Returns:
        The same tree with a sum for each segment in place of each sample: [num_segments, *shape] where a leaf was [n, *shape].

    Raises:
        InputError: `segment_ids` are no such integers, or `num_segments` is none.

    Guarantee: whether all ids are in range, and later how large the segments of factors are, is asked of the device: a wait on an
    accelerator. In a trace, which has no answer, the sums are formed, and are NaN if an id is out of range.

    Example:
        >>> import torch
        >>> users = segment_sum(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 3)
        >>> users, norm(users)
        (tensor([[2.],
                [5.],
                [0.]]), tensor([2., 5., 0.]))

    Source: `jax.ops.segment_sum`; McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018 (users).
    """
    factors, _ = _factors(tree, "segment_sum")
    n = factors[0].n
    integers = isinstance(segment_ids, Tensor) and not (segment_ids.is_floating_point() or segment_ids.is_complex())
    if not integers or segment_ids.dtype == torch.bool or segment_ids.shape != (n,):
        got = f"{segment_ids.dtype} {tuple(segment_ids.shape)}" if isinstance(segment_ids, Tensor) else type(segment_ids).__name__
        raise InputError(f"psg.tree.segment_sum: expected segment_ids as integers [{n}], one for each sample, got {got}.")
    if not isinstance(num_segments, int) or isinstance(num_segments, bool) or num_segments < 0:
        raise InputError(f"psg.tree.segment_sum: num_segments={num_segments!r}: expected an integer of at least 0.")
    ids = segment_ids.to(factors[0].device, torch.int64)
    valid: Tensor | None = None
    if _functorch.is_traced() and num_segments:
        # What is compiled might take -1 for the last segment.
        valid, ids = ((0 <= ids) & (ids < num_segments)).all(), ids.clamp(0, num_segments - 1)
    elif n and not (0 <= int(ids.min()) and int(ids.max()) < num_segments):
        raise InputError(f"psg.tree.segment_sum: segment_ids are from {int(ids.min())} to {int(ids.max())}, with {num_segments} segments.")

    def sums(factor: Factor) -> Factor:
        found = factor.segment_sum(ids, num_segments)
        return found if valid is None else Dense(torch.where(valid, found.materialize(), math.nan))

    return _map(tree, sums, "segment_sum")


def _map(tree: Any, function: Callable[[Factor], Factor], name: str) -> Any:
    """Apply a function to every leaf as a factor; a leaf that was a tensor stays one."""
    leaves, spec = _trees.flatten(tree, _is_factor)
    factors, _ = _factors(tree, name)
    mapped = [function(factor) for factor in factors]
    return _trees.unflatten(
        spec, [new.materialize() if isinstance(leaf, Tensor) else new for new, leaf in zip(mapped, leaves, strict=True)]
    )
