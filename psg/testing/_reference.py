"""Reductions of materialised per-sample gradients in plain torch: what the factored ones must equal."""

import torch
from torch import Tensor

from psg._trees import Tree, flatten
from psg.testing._loop import tree_map

_BLOCK = 1 << 13
"""How many numbers are added up at once: torch's sum of a million squares in float32 is off by up to 4e-4."""


def reference_flat(grads: Tree) -> Tensor:
    """Per-sample gradients side by side, in float32 or wider; a complex entry is two real ones.

    Args:
        grads: Tree of [n, *shape] tensors with at least one leaf.

    Returns:
        The [n, P] matrix.

    Example:
        >>> reference_flat({"a": torch.ones(2, 1), "b": torch.zeros(2, 1, 2)})
        tensor([[1., 0., 0.],
                [1., 0., 0.]])
    """
    leaves = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in flatten(grads)[0]]
    leaves = [leaf.reshape(leaf.shape[0], leaf.shape[1:].numel()) for leaf in leaves]
    return torch.cat([leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves], 1)


def reference_norm(grads: Tree) -> Tensor:
    """The norm of each sample's gradient over all leaves: `|g[n]|`.

    Args:
        grads: Tree of [n, *shape] tensors.

    Returns:
        [n], in float32 or wider.

    Example:
        >>> reference_norm([torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])])
        tensor([5.])
    """
    parts = [torch.linalg.vector_norm(block, dim=1) for block in reference_flat(grads).split(_BLOCK, dim=1)]
    return torch.linalg.vector_norm(torch.stack(parts, dim=1), dim=1)


def reference_gram(grads: Tree, other: Tree | None = None) -> Tensor:
    """Inner products of all pairs of samples: `<g[n], h[m]>`.

    Args:
        grads: Tree of [n, *shape] tensors.
        other: Tree of [m, *shape] tensors; None takes `grads`.

    Returns:
        [n, m], in float32 or wider.

    Example:
        >>> reference_gram(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([[1., 1.],
                [1., 2.]])
    """
    blocks, others = (reference_flat(side).split(_BLOCK, dim=1) for side in (grads, grads if other is None else other))
    return torch.stack([block @ another.T for block, another in zip(blocks, others, strict=True)]).sum(0)


def reference_dot(grads: Tree, direction: Tree) -> Tensor:
    """Inner product of each sample's gradient with one direction: `<g[n], direction>`.

    Args:
        grads: Tree of [n, *shape] tensors.
        direction: Tree of [*shape] tensors.

    Returns:
        [n], in float32 or wider.

    Example:
        >>> reference_dot(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, -1.0]))
        tensor([-1., -1.])
    """
    return reference_gram(grads, tree_map(lambda leaf: leaf[None], direction))[:, 0]


def reference_weighted_sum(grads: Tree, weights: Tensor) -> Tree:
    """The weighted sum over samples: `sum_n weights[n] g[n]`.

    Args:
        grads: Tree of [n, *shape] tensors.
        weights: [n].

    Returns:
        Tree of [*shape] tensors in the dtypes of `grads`.

    Example:
        >>> reference_weighted_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 0.5]))
        tensor([2.5000, 4.0000])
    """
    return tree_map(lambda leaf: torch.einsum("n,n...->...", weights.to(leaf.dtype), leaf), grads)


def reference_clipped_sum(grads: Tree, clip_norm: float) -> Tree:
    """The sum of gradients clipped by their norms: `sum_n min(1, clip_norm / |g[n]|) g[n]`.

    A zero norm counts as coefficient 1, and a sample that is not finite contributes exactly zero.

    Args:
        grads: Tree of [n, *shape] tensors.
        clip_norm: The bound, infinity included.

    Returns:
        Tree of [*shape] tensors in the dtypes of `grads`.

    Example:
        >>> reference_clipped_sum(torch.tensor([[0.5, 0.0], [0.0, 4.0], [torch.inf, 0.0]]), 2.0)
        tensor([0.5000, 2.0000])
    """
    norms = reference_norm(grads)
    finite = norms.isfinite()
    coef = torch.where(norms > clip_norm, clip_norm / norms, 1.0).masked_fill(~finite, 0)
    kept = tree_map(lambda leaf: torch.where(finite.reshape(-1, *[1] * (leaf.dim() - 1)), leaf, 0), grads)
    return reference_weighted_sum(kept, coef)
