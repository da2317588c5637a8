"""Sums and means over the samples."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from optree import PyTreeSpec
from torch import Tensor

from psg import _trees
from psg._errors import InputError
from psg._torch import _functorch
from psg._torch._ambient import unaffected
from psg.factors import Factor
from psg.factors._arithmetic import square, wide
from psg.factors._joint import Joint, sums_in_range
from psg.tree._leaves import factors_of


@unaffected
def weighted_sum(tree: Any, weights: Tensor) -> Any:
    """sum_n weights[n] g_n.

    For many weightings of factored gradients, [k, n], vmap it: `torch.func.vmap(lambda w: weighted_sum(tree, w))(weightings)`.

    Args:
        tree: Per-sample gradients.
        weights: [n], real and finite; counts and masks may be integers and booleans. A weight of zero does not exclude a gradient that
            is not finite, because 0 times NaN is NaN: use `clip`, or `take` the other samples.

    Returns:
        The same tree with a tensor [*shape] at every leaf, in the leaf's dtype.

    Raises:
        InputError: `weights` is not [n].

    Example:
        >>> import torch
        >>> weighted_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 0.5]))
        tensor([2.5000, 4.0000])
    """
    factors, spec = factors_of(tree, "weighted_sum")
    return _weighted(factors, spec, _real_weights("weighted_sum", factors, weights))


@unaffected
def sparse_weighted_sum(tree: Any, weights: Tensor) -> Any:
    """`weighted_sum` that gives sparse tensors for leaves held as rows (embeddings): only the rows that were looked up.

    Args:
        tree: Per-sample gradients.
        weights: [n], real and finite, as in `weighted_sum`: zero does not exclude a gradient that is not finite.

    Returns:
        The same tree. A leaf that is a `psg.factors.Rows`, or its `segment_sum`, gives a coalesced sparse COO tensor [*shape], which
        torch.optim.SparseAdam and SGD accept. Every other leaf gives a dense tensor, and so do all leaves of an empty batch, and those
        inside torch.func transforms, which know no sparse tensors.

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
    factors, spec = factors_of(tree, "sparse_weighted_sum")
    weights = _real_weights("sparse_weighted_sum", factors, weights)
    return _trees.unflatten(spec, _rounded(sums_in_range([factor.sparse_sum for factor in factors], weights), factors))


def _weighted(factors: list[Factor], spec: PyTreeSpec, weights: Tensor) -> Any:
    return _trees.unflatten(spec, _rounded(Joint(factors).weighted_sums(weights), factors))


def _rounded(sums: Sequence[Tensor], factors: Sequence[Factor]) -> list[Tensor]:
    return [total.to(factor.dtype) for total, factor in zip(sums, factors, strict=True)]


def _real_weights(name: str, factors: Sequence[Factor], weights: Tensor) -> Tensor:
    """The weights as floating numbers: counts and masks may be integers and booleans."""
    if not isinstance(weights, Tensor) or weights.shape != (factors[0].n,) or weights.is_complex():
        got = f"{tuple(weights.shape)} of {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
        raise InputError(f"psg.tree.{name}: expected real weights of shape ({factors[0].n},), got {got}.")
    return weights if weights.is_floating_point() else weights.to(_wide_of(factors))


def _wide_of(factors: Sequence[Factor]) -> torch.dtype:
    """The real dtype, at least float32, that holds the entries of all leaves."""
    return functools.reduce(torch.promote_types, {wide(factor.dtype.to_real()) for factor in factors})


@unaffected
def sum(tree: Any) -> Any:
    """sum_n g_n: the gradient of the summed loss.

    Args:
        tree: Per-sample gradients.

    Returns:
        The same tree with a tensor [*shape] at every leaf, in the leaf's dtype.

    Raises:
        InputError: `tree` is no tree of per-sample gradients: see `help(psg.tree)`.

    Example:
        >>> import torch
        >>> sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([4., 6.])
    """
    factors, spec = factors_of(tree, "sum")
    return _weighted(factors, spec, torch.ones(factors[0].n, device=factors[0].device))


@unaffected
def mean(tree: Any) -> Any:
    """1/n sum_n g_n: the gradient of the mean loss; NaN for n = 0, as torch.mean.

    Args:
        tree: Per-sample gradients.

    Returns:
        The same tree with a tensor [*shape] at every leaf, in the leaf's dtype.

    Raises:
        InputError: `tree` is no tree of per-sample gradients: see `help(psg.tree)`.

    Example:
        >>> import torch
        >>> mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([2., 3.])
    """
    factors, spec = factors_of(tree, "mean")
    n, device = factors[0].n, factors[0].device
    if n == 0:
        return _trees.map_leaves(lambda leaf: leaf / 0, sum(tree))
    return _weighted(factors, spec, torch.full((n,), 1 / n, dtype=_wide_of(factors), device=device))


class Moments(NamedTuple):
    """What `moments` returns.

    `variance` is computed from both: that of the n samples (divided by n, not n - 1). It has few correct digits where the mean is much
    larger than the spread.

    Attributes:
        mean: 1/n sum_n g_n, the parameters' tree, each leaf [*shape].
        second: 1/n sum_n |g_n|^2 for every entry, real, the same tree: the diagonal of the empirical Fisher matrix.
    """

    mean: Any
    second: Any

    @property
    def variance(self) -> Any:
        """second - |mean|^2, never negative: the variance of the n samples. Times n / (n - 1), it estimates that of their distribution.

        The error is a few roundings of `second`: where an entry's mean is 3000 times its spread, float32 leaves no correct digit.
        """
        means, spec = _trees.flatten(self.mean)
        seconds, _ = _trees.flatten(self.second)
        return _trees.unflatten(spec, [(second - square(mean)).clamp(min=0) for mean, second in zip(means, seconds, strict=True)])


@unaffected
def moments(tree: Any) -> Moments:
    """Mean and mean square of every entry over the samples; embeddings never become dense per sample.

    To combine the moments of several batches, or of the chunks of one, average them, weighted by their sizes.

    Args:
        tree: Per-sample gradients.

    Returns:
        `Moments`, in at least float32; NaN for n = 0. Unbiased estimates for the gradient noise scale tr(Sigma) / |G|^2: tr(Sigma) is
        n / (n - 1) times the sum of `variance`, |G|^2 the sum of mean^2 minus tr(Sigma) / n. Average each over batches, then divide.

    Raises:
        InputError: `tree` is no tree of per-sample gradients: see `help(psg.tree)`.

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
    factors, spec = factors_of(tree, "moments")
    n = factors[0].n
    return Moments(*(_trees.unflatten(spec, _divide(sums, n)) for sums in Joint(factors).moment_sums()))


def _divide(tensors: list[Tensor], n: int) -> Sequence[Tensor]:
    if _functorch.transform_active():
        return [tensor / n for tensor in tensors]
    return torch._foreach_div(tensors, n)  # pyright: ignore[reportPrivateImportUsage]
