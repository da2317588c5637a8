"""Clip coefficients from norms (policies), and clip norms for leaves and for groups of leaves.

A policy is a function `policy(norms, clip_norm) -> clip_coef`, [n] to [n]. With norms |g_n| and clip norm C:

- clip:      min(1, C / |g_n|), exactly: no epsilon is added, and a zero norm has coefficient 1. (Abadi et al., "Deep Learning with
             Differential Privacy", 2016.)
- automatic: C / (|g_n| + gamma). (Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger", 2023.)
- normalize: C / |g_n|, and 1 where the norm is zero. (Das et al., "Differentially Private Federated Learning with Normalized Updates",
             2022; Yang et al., "Normalized/Clipped SGD with Perturbation for Differentially Private Non-Convex
             Optimization", 2022.)

Under each, the scaled gradient's norm is at most C up to rounding, so adding or removing one sample changes a sum by at most C.

A policy of your own must be elementwise in the norms, as these are: it is called on parts of a batch (`chunk_size`) and on padded batches
(`buckets` of `psg.jit`, masks), whose mean norm or quantiles are not those of the batch.
"""

import math
import numbers
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psg._errors import InputError, a_kind, received
from psg._torch import _functorch

__all__ = ["PerGroup", "PerLeaf", "Policy", "adapt", "automatic", "bounded", "clip", "normalize"]

Policy = Callable[[Tensor, Any], Tensor]
"""A function (norms, clip_norm) -> clip_coef, [n] to [n]."""


def clip(norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """min(1, clip_norm / norm); 1 where the norm is zero.

    Args:
        norms: [n].
        clip_norm: A number or a scalar tensor, at least 0; inf clips nothing.

    Returns:
        [n], in [0, 1].

    Example:
        >>> import torch
        >>> clip(torch.tensor([0.0, 1.0, 4.0]), 2.0)
        tensor([1.0000, 1.0000, 0.5000])
    """
    under = norms <= clip_norm  # all False for a NaN clip norm, so that it gives NaN instead of unclipped gradients
    return torch.where(under, 1, clip_norm / torch.where(under, 1, norms))


def fits(value: Any, within: Callable[[float], bool]) -> bool:
    """Whether a value is a number, or a scalar tensor of one, within bounds; the tensor's is looked at where reading it is free."""
    if isinstance(value, Tensor):
        if value.ndim > 0 or value.is_complex():
            return False
        if not _functorch.can_read_now(value):
            return True
        value = value.item()
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and within(float(value))


def automatic(gamma: float = 0.01) -> Policy:
    """The policy clip_norm / (norm + gamma); at most 1 where the norm is zero.

    Args:
        gamma: The stability constant, greater than 0.

    Returns:
        The policy.

    Raises:
        InputError: gamma is not greater than 0.

    Example:
        >>> import torch
        >>> automatic(gamma=1.0)(torch.tensor([0.0, 1.0]), 2.0)
        tensor([1., 1.])
    """
    if not fits(gamma, lambda gamma: gamma > 0):
        raise InputError(f"psg.clipping.automatic(gamma={gamma!r}): expected a number greater than 0; 'normalize' is the limit at 0.")
    return _Automatic(gamma)


@dataclass(frozen=True)
class _Automatic:
    """The policy that `automatic` makes."""

    gamma: float

    def __call__(self, norms: Tensor, clip_norm: float | Tensor) -> Tensor:
        return _at_zero(norms, clip_norm / (norms.clamp(min=_least(norms.dtype)) + self.gamma))


def bounded(policy: Policy) -> Policy:
    """Your own policy, its coefficients capped at clip_norm / norm, so that the clipped sum has a finite sensitivity.

    That holds for a policy that is elementwise in the norms, which psg does not check. If a coefficient depends on other samples (on the
    maximum, the mean or a rank of the norms, say), a sample more or less changes the terms of the others too, and the sum by more than the
    `sensitivity` that the result states.

    Args:
        policy: From norms [n] and a clip norm to coefficients [n], at least 0. Each coefficient may depend on its own norm alone.

    Returns:
        The policy min(policy, clip_norm / norm), at most 1 where the norm is zero. A coefficient of `policy` that is negative or NaN counts
        as zero.

    Raises:
        InputError: `policy` is not a function. At a call: `policy` does not return a real tensor [n].

    Example:
        >>> import torch
        >>> smooth = bounded(lambda norms, clip_norm: 2 * clip_norm / (norms.square() + clip_norm**2).sqrt())
        >>> smooth(torch.tensor([0.0, 3.0]), 4.0)
        tensor([1.0000, 1.3333])
    """
    if not callable(policy):
        raise InputError(f"psg.clipping.bounded(policy={policy!r}): expected a function (norms, clip_norm) -> clip_coef.")
    return _Bounded(policy)


@dataclass(frozen=True)
class _Bounded:
    """The policy that `bounded` makes."""

    policy: Policy

    def __call__(self, norms: Tensor, clip_norm: float | Tensor) -> Tensor:
        coefs = coefficients(self.policy, norms, clip_norm)
        most = (clip_norm / norms.clamp(min=_least(norms.dtype))).clamp(max=torch.finfo(norms.dtype).max)  # no coefficient may be infinite
        return _at_zero(norms, torch.minimum(torch.where(coefs >= 0, coefs, 0), most))


def _least(dtype: torch.dtype) -> float:
    """A norm that no underflow of squares can change much, in a gradient of up to 1e12 entries: 1e-12, from float32 squares or narrower."""
    return 1e7 * torch.finfo(torch.promote_types(dtype, torch.float32)).tiny ** 0.5


def _at_zero(norms: Tensor, coefs: Tensor) -> Tensor:
    """Coefficients of at most 1 where the norm is zero: those gradients are zero, or underflow, though their inputs may be large."""
    return torch.where(norms > 0, coefs, coefs.clamp(max=1))


def normalize(norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """clip_norm / norm; 1 where the norm is zero.

    Args:
        norms: [n].
        clip_norm: A number or a scalar tensor, at least 0 and finite.

    Returns:
        [n]. Positive norms below 1e-12 (of float32; 1e-147 of float64) count as that: where squares underflow, they read too small.

    Example:
        >>> import torch
        >>> normalize(torch.tensor([0.0, 1.0, 4.0]), 2.0)
        tensor([1.0000, 2.0000, 0.5000])
    """
    return torch.where(norms > 0, clip_norm / norms.clamp(min=_least(norms.dtype)), 1)


def adapt(
    clip_norm: float | Tensor,
    norms: Tensor,
    expected_batch_size: float,
    *,
    quantile: float = 0.5,
    rate: float = 0.2,
    std: float = 0.0,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The clip norm for the next step, which follows a quantile of the norms.

    It is clip_norm exp(-rate (fraction - quantile)), where fraction is 1/2 + (sum_n ([norms[n] <= clip_norm] - 1/2) + std z) / m, with m
    the expected batch size and z standard normal. The clip norm is the only state from step to step; nothing waits for the device. Under
    `psg.jit`, let the function close over a tensor C, `clip_norm=C`, and update C in place: `C.copy_(adapt(C, ...))`.

    Args:
        clip_norm: This step's clip norm: a number or a scalar tensor, finite and greater than 0 (from 0 or inf it never moves).
        norms: `ClippedGrad.norms`, [n]; where there are several clip norms, the leaf of `group_norms` that belongs to this one. A norm that
            is not finite counts as larger than the clip norm.
        expected_batch_size: The mean number of samples in a batch, a public number; without privacy, the batch's own size.
        quantile: The share of norms that should stay unclipped, in [0, 1].
        rate: The learning rate, at least 0.
        std: The standard deviation of the noise on the sum, at least 0. One sample changes the sum by 1/2, so the sum's noise multiplier is
            2 std. If the gradients' is s, that of the whole step is (s^-2 + (2 std)^-2)^-1/2; with k clip norms adapted in one step,
            (s^-2 + k (2 std)^-2)^-1/2.
        mask: Booleans [n], as given to `clipped_grad`: samples where it is False do not count.
        generator: The generator that draws z, on the norms' device; None for torch's default.

    Returns:
        A scalar tensor on the device of `norms`, in their dtype or that of a `clip_norm` of higher precision.

    Raises:
        InputError: `norms` or `mask` is not [n], `clip_norm` is a `PerLeaf` or `PerGroup`, a value is out of range, or `generator` is none.

    Example:
        >>> import torch
        >>> clip_norm = torch.tensor(1.0)
        >>> for _ in range(200):
        ...     clip_norm = adapt(clip_norm, torch.tensor([1.0, 2.0, 3.0, 4.0]), 4, quantile=0.75)
        >>> 2.5 < clip_norm < 3.5
        tensor(True)

    Source: Andrew, Thakkar, McMahan & Ramaswamy, "Differentially Private Learning with Adaptive Clipping", 2021, Algorithm 1, Theorem 1.
    """
    if isinstance(clip_norm, (PerLeaf, PerGroup)):
        raise InputError(f"psg.clipping.adapt: got {a_kind(clip_norm)}; adapt each of its clip norms by its own `group_norms`.")
    if not isinstance(norms, Tensor):
        hint = ": pass out.norms" if is_clipped(norms) else ""
        raise InputError(f"psg.clipping.adapt: expected norms as a tensor [n], got {a_kind(norms)}{hint}.")
    if norms.ndim != 1 or not norms.is_floating_point():
        raise InputError(f"psg.clipping.adapt: expected real floating norms [n], got {norms.dtype} of shape {tuple(norms.shape)}.")
    check_mask("psg.clipping.adapt", mask, len(norms))
    check_generator("psg.clipping.adapt", generator)
    for name, value, within, expected in (
        ("clip_norm", clip_norm, lambda norm: 0 < norm < math.inf, "greater than 0 and finite, or it would never move"),
        ("expected_batch_size", expected_batch_size, lambda size: 0 < size < math.inf, "greater than 0 and finite"),
        ("quantile", quantile, lambda share: 0 <= share <= 1, "in [0, 1]"),
        ("rate", rate, lambda rate: 0 <= rate < math.inf, "at least 0 and finite"),
        ("std", std, lambda std: 0 <= std < math.inf, "at least 0 and finite"),
    ):
        if not fits(value, within):
            raise InputError(f"psg.clipping.adapt: {name}={value!r}: expected a number {expected}.")
    counts = (norms <= clip_norm).to(norms.dtype) - 0.5
    total = (counts if mask is None else torch.where(mask, counts, 0)).sum()
    if isinstance(std, Tensor) or std:  # to look at a tensor might wait for the device
        total = total + std * torch.randn((), dtype=norms.dtype, device=norms.device, generator=generator)
    return clip_norm * torch.exp(-rate * (total / expected_batch_size + 0.5 - quantile))


POLICIES: dict[str, Policy] = {"clip": clip, "automatic": automatic(), "normalize": normalize}


@dataclass(frozen=True)
class PerLeaf:
    """Clip every leaf on its own.

    With C for each of k leaves the clipped sum has sensitivity C sqrt(k): divide C by sqrt(k) to keep C. To clip the leaves of each module
    together, see `PerGroup`.

    Args:
        clip_norm: A number for all leaves, or a tree of numbers with the parameters' structure (or a prefix of it).

    Raises:
        InputError: At a call: the tree does not fit the parameters, a clip norm is not a number of at least 0, or it is inf under a policy
            that cannot use that.

    Example:
        >>> import torch, psg
        >>> loss = lambda params, x: x * params["w"] + 3 * x * params["b"]
        >>> params = {"w": torch.tensor(0.0), "b": torch.tensor(0.0)}
        >>> psg.clipped_grad(loss, PerLeaf({"w": 1.0, "b": 2.0}))(params, torch.tensor([0.5, 4.0])).grads
        {'w': tensor(1.5000), 'b': tensor(3.5000)}
    """

    clip_norm: Any


@dataclass(frozen=True)
class PerGroup:
    """Clip groups of leaves, each to a norm of its own.

    The sensitivity of the clipped sum is sqrt(sum C^2) over the groups. The label `path[0].rpartition(".")[0]` makes each module's
    parameters one group.

    Args:
        label: A function from a leaf's path to its group's label. The path is a tuple of keys; in a dict of parameters it has one key,
            `("encoder.weight",)`, so the parameter's name is `path[0]`.
        clip_norm: A mapping from every label that `label` gives to a clip norm. `collections.defaultdict(lambda: C)` gives all groups the
            same one.

    Raises:
        InputError: At a call: `label` is not a function, `clip_norm` is not a mapping, a label is not hashable or has no clip norm, no
            leaf has a label of `clip_norm`, a clip norm is not a number of at least 0, or it is inf under a policy that cannot use that.

    Example:
        >>> import torch, psg
        >>> loss = lambda params, x: (x * params["head.w"]).sum() + (x * params["body.w"]).sum() + x[0] * params["body.b"]
        >>> params = {"head.w": torch.zeros(2), "body.w": torch.zeros(2), "body.b": torch.tensor(0.0)}
        >>> groups = PerGroup(lambda path: path[0].split(".")[0], {"head": 1.0, "body": 2.0})
        >>> psg.clipped_grad(loss, groups)(params, torch.tensor([[3.0, 4.0]])).clip_coef["head.w"]
        tensor([0.2000])
    """

    label: Callable[[tuple[Any, ...]], Hashable]
    clip_norm: Mapping[Any, Any]


def check_clip_norm(clip_norm: Any) -> None:
    """Raise unless `clip_norm` is a number that is at least 0 (inf included), or a scalar tensor of one, checked where reading it is free.

    Raises:
        InputError: It is not.
    """
    if fits(clip_norm, lambda norm: norm >= 0):
        return
    if isinstance(clip_norm, Tensor) and clip_norm.ndim > 0:
        raise InputError(f"clip_norm: expected a number or a scalar tensor, got a tensor of shape {tuple(clip_norm.shape)}.")
    value = clip_norm.item() if isinstance(clip_norm, Tensor) else clip_norm
    if fits(value, lambda norm: True):
        raise InputError(f"clip_norm={value}: expected a number that is at least 0. 0 gives a zero sum, inf the plain sum.")
    hint = " Wrap clip norms of several leaves: PerLeaf(...)." if isinstance(value, (Mapping, list, tuple)) else ""
    raise InputError(f"clip_norm: expected a number, a scalar tensor, PerLeaf or PerGroup, got {received(value)}.{hint}")


def policy_of(policy: str | Policy) -> Policy:
    """The policy of that name, or the function itself.

    Args:
        policy: A name or a function.

    Returns:
        The function (norms, clip_norm) -> clip_coef.

    Raises:
        InputError: No policy has that name, or `policy` is `automatic` or `bounded` itself, which make policies.
    """
    if policy is automatic or policy is bounded:
        made = 'automatic(), or "automatic"' if policy is automatic else "bounded(your_policy)"
        raise InputError(f"policy={made.partition('(')[0]}: this function makes policies: give what it returns, {made}.")
    if callable(policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        hint = " Clip each layer by itself with clip_norm=PerLeaf(...) or PerGroup(...)." if policy in ("per_layer", "per_leaf") else ""
        raise InputError(f"policy={policy!r}: expected one of {list(POLICIES)} or a function (norms, clip_norm) -> clip_coef.{hint}")
    return POLICIES[policy]


def coefficients(policy: Policy, norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """A policy's clip coefficients for these norms.

    Args:
        policy: The policy.
        norms: [n].
        clip_norm: A number or a scalar tensor.

    Returns:
        A coefficient for each norm, [n].

    Raises:
        InputError: The policy returns anything but a real tensor [n].
    """
    coefs = policy(norms if is_bounded(policy) else norms.clone(), clip_norm)  # a user's policy may write into its input
    if not isinstance(coefs, Tensor) or coefs.shape != norms.shape or coefs.is_complex():
        got = f"{tuple(coefs.shape)} of {coefs.dtype}" if isinstance(coefs, Tensor) else type(coefs).__name__
        raise InputError(
            f"policy: expected it to return a real tensor of shape {tuple(norms.shape)}, a coefficient for each norm, got {got}. One "
            "number for all of them is torch.full_like(norms, number)."
        )
    return coefs if coefs.is_floating_point() else coefs.to(norms.dtype)  # `norms <= clip_norm` drops what is longer


def check_mask(name: str, mask: Any, n: int, hint: str = "") -> None:
    """Raise InputError, whose message ends with the hint, unless a mask is None or booleans [n]."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (n,)):
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"{name}: mask: expected a bool tensor of shape ({n},), got {got}.{hint}")


def check_generator(name: str, generator: Any) -> None:
    """Raise InputError unless this is None or a generator."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(
            f"{name}: generator: expected a torch.Generator, got {a_kind(generator)}. torch.Generator().manual_seed(seed) is one."
        )


def is_clipped(value: Any) -> bool:
    """Whether this is a `Clipped` or a `ClippedGrad`, whose classes the modules that ask cannot import."""
    return hasattr(value, "clip_coef")


def is_bounded(policy: Policy) -> bool:
    """Whether none of the policy's coefficients leaves a gradient longer than the clip norm."""
    return policy is clip or policy is normalize or isinstance(policy, (_Automatic, _Bounded))
