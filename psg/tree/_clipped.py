"""Clipped sums, and noise on sums: what private training releases."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from psg import _trees, clipping
from psg._clipped_sums import clipped_sums, groups_of, sensitivity
from psg._errors import InputError, a_kind
from psg._torch import _functorch
from psg._torch._ambient import unaffected
from psg.factors import is_factor
from psg.factors._arithmetic import as_real, wide, widen
from psg.tree._leaves import factors_of, place_of


class Clipped(NamedTuple):
    """What `clip` returns. As in `ClippedGrad`, `sensitivity` is that of `grads` alone, and all other fields are exact.

    Attributes:
        grads: sum_n clip_coef[n] g_n: the parameters' tree, each leaf [*shape], in float32 for gradients of 16 bits.
        norms: |g_n| over all leaves before clipping, [n]; 0 for masked samples.
        clip_coef: The parameters' tree, each leaf [n]: the coefficients that multiply the samples' gradients of that leaf. 0 for samples
            that are masked or whose norm is not finite.
        nonfinite: How many unmasked samples had a norm that is not finite and so contribute zero; an integer tensor [].
        sensitivity: A bound on the L2 change of `grads` when one sample is added or removed: the clip norm; sqrt(sum C^2) over groups; inf
            for your own policy, unless `clipping.bounded` wraps it. Replacing one sample changes `grads` by up to twice that.
        group_norms: The parameters' tree, each leaf [n]: the norms, before clipping, over the leaves clipped together with this one; 0 for
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
    """The sum of clipped gradients, sum_n min(1, C / |g_n|) g_n: `psg.clipped_grad` for gradients that you already have.

    Given `segment_sum(g, users, num_users)`, it clips each user's gradient, for privacy of users instead of samples. All samples of a
    user must then be in one batch: a user whose samples are in k batches adds up to k times the clip norm.

    Formal guarantee: that of `psg.clipped_grad`. With the built-in policies, and `bounded` ones, each sample's term has L2 norm at most
    `sensitivity`, up to rounding in the dtypes of the norms and of the gradients; a sample that is masked, or whose norm is not finite,
    adds exactly zero. Rounding is relative to the terms that a gradient sums (positions, a user's samples): see `psg.clipped_grad`.

    Args:
        tree: Per-sample gradients.
        clip_norm: C, in the units of the gradient: a number or scalar tensor for the norm over all leaves; `psg.clipping.PerLeaf` or
            `psg.clipping.PerGroup` to clip leaves or groups of leaves separately. 0 gives a zero sum; inf, with the policy "clip", the
            plain sum.
        policy: "clip", "automatic", "normalize" or a function (norms, clip_norm) -> clip_coef; see `psg.clipping`.
        mask: Booleans [n]: samples where it is False contribute exactly zero; None masks none.

    Returns:
        A `Clipped`: the sum, with the norms and the coefficients.

    Raises:
        InputError: A clip norm is negative or NaN; there is no such policy, or it does not return [n]; the clip norm is inf and the policy,
            "automatic", "normalize" or `bounded`, cannot use that; `mask` is not booleans [n]; a leaf has no group, or a group no leaf.

    Example:
        >>> import torch
        >>> from psg.tree import clip, segment_sum
        >>> g = {"w": torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), "b": torch.tensor([0.0, 0.0, torch.nan])}
        >>> out = clip(segment_sum(g, torch.tensor([0, 0, 1]), 2), 1.0)
        >>> out.grads["w"], out.nonfinite
        (tensor([0.9487, 0.3162]), tensor(1))

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1; McMahan et al., "Learning Differentially Private
    Recurrent Language Models", 2018 (users).
    """
    factors, spec = factors_of(tree, "clip")
    chosen = clipping.policy_of(policy)
    groups = groups_of(clip_norm, spec, chosen)
    clipping.check_mask("psg.tree.clip", mask, factors[0].n)
    found = clipped_sums(factors, groups, functools.partial(clipping.coefficients, chosen), mask)
    grads, coefs, group_norms = (_trees.unflatten(spec, own) for own in found.by_leaf(groups))
    return Clipped(grads, found.norms, coefs, found.nonfinite, sensitivity(groups, chosen), group_norms)


@unaffected
def add_noise(tree: Any, std: float | Tensor, *, generator: torch.Generator | None = None) -> Any:
    """x + std z, with z standard normal for every entry: Gaussian noise on a sum of clipped gradients.

    A handful of kernels serves all leaves of one dtype and device; nothing waits for the device. torch's generators are not
    cryptographically secure, and floating-point noise is not exactly Gaussian (Mironov, "On Significance of the Least Significant Bits
    for Differential Privacy", 2012): a release that must withstand an adversary needs a sampler that is made for it.

    Args:
        tree: Tensors of any shape, such as `ClippedGrad.grads`.
        std: The standard deviation, in the units of the tree: a number that is at least 0 and finite, or a scalar tensor. For a noise
            multiplier sigma it is sigma times `ClippedGrad.sensitivity`.
        generator: The generator that draws z, on the leaves' device; None for torch's default. If fn, or anything else in a step, seeds
            the default one, each step draws the same noise: then pass a generator of your own.

    Returns:
        The same tree, in its dtypes. Noise is drawn and added in at least float32; a complex entry gets noise on both its parts.

    Raises:
        InputError: The tree has no leaves, or a leaf that is not a dense floating or complex tensor of at least 16 bits; `std` is not such
            a number, or `generator` none.

    Example:
        >>> import torch
        >>> noisy = add_noise({"w": torch.ones(300, 300), "b": torch.zeros(300)}, 0.5)
        >>> noisy["w"].mean().round(decimals=1), noisy["w"].std().round(decimals=1)
        (tensor(1.), tensor(0.5000))

    Source: Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014, Appendix A (the Gaussian mechanism).
    """
    if clipping.is_clipped(tree):
        raise InputError(f"psg.tree.add_noise: got {a_kind(tree)}: pass its grads.")
    leaves, spec = _trees.flatten(tree, is_factor)
    if not leaves:
        raise InputError("psg.tree.add_noise: the tree has no leaves.")
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not _trees.is_computable(leaf):
            got = f"of dtype {leaf.dtype}" if isinstance(leaf, Tensor) else a_kind(leaf)
            place = place_of(tree, "tree", i)
            raise InputError(f"psg.tree.add_noise: expected floating or complex tensors, such as a sum of gradients; {place} is {got}.")
        if (odd := _trees.oddity(leaf)) is not None:
            place = place_of(tree, "tree", i)
            raise InputError(f"psg.tree.add_noise: {place} is {odd}, but noise goes on every entry: pass its to_dense(), if it is sparse.")
    if not clipping.fits(std, lambda std: 0 <= std < math.inf):
        raise InputError(
            f"psg.tree.add_noise: std={std!r}: expected a number that is at least 0 and finite, or a scalar tensor of one. The sensitivity "
            "of a policy of your own is inf unless psg.clipping.bounded wraps it."
        )
    clipping.check_generator("psg.tree.add_noise", generator)
    scale = std if isinstance(std, Tensor) else float(std)
    parts = [as_real(leaf) for leaf in leaves]
    noisy: dict[int, Tensor] = {}
    for alike in _trees.by_dtype_and_device(parts):
        first, shapes = parts[alike[0]], [parts[i].shape for i in alike]
        count = sum(map(torch.Size.numel, shapes))
        drawn = torch.randn(count, dtype=wide(first.dtype), device=first.device, generator=generator) * scale
        pieces = [piece.view(shape) for piece, shape in zip(drawn.split([shape.numel() for shape in shapes]), shapes, strict=True)]
        sums = _add([widen(parts[i]) for i in alike], pieces)
        noisy |= zip(alike, sums, strict=True)
    results = [(torch.view_as_complex(noisy[i]) if leaf.is_complex() else noisy[i]).to(leaf.dtype) for i, leaf in enumerate(leaves)]
    return _trees.unflatten(spec, results)


def _add(tensors: list[Tensor], others: list[Tensor]) -> Sequence[Tensor]:
    if _functorch.transform_active():  # vmap has no rule for ops on lists
        return [tensor + other for tensor, other in zip(tensors, others, strict=True)]
    return torch._foreach_add(tensors, others)  # pyright: ignore[reportPrivateImportUsage]
