"""Clip coefficients from norms (policies), groups of leaves that are clipped together, and clipped sums.

A policy is a function `policy(norms, clip_norm) -> clip_coef`, [n] to [n]. With norms |g_n| and clip norm C:

- clip:      min(1, C / |g_n|), exactly: no epsilon is added, and a zero norm has coefficient 1. (Abadi et al., "Deep Learning with
             Differential Privacy", 2016.)
- automatic: C / (|g_n| + gamma). (Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger", 2023.)
- normalize: C / |g_n|, and 1 where the norm is zero. (Das et al., "Beyond Uniform Lipschitz Condition in Differentially Private
             Optimization", 2023; Yang et al., "Normalized/Clipped SGD with Perturbation for Differentially Private Non-Convex
             Optimization", 2022.)

Under each, the scaled gradient's norm is at most C up to rounding, so adding or removing one sample changes a sum by at most C.

A policy of your own must be elementwise in the norms, as these are: it is called on parts of a batch (`chunk_size`) and on padded batches
(`buckets` of `psg.jit`, masks), whose mean norm or quantiles are not those of the batch.
"""

import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from psg import _functorch, _trees
from psg._errors import InputError
from psg.factors import Factor
from psg.factors._joint import Joint, norm_of

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


def automatic(gamma: float = 0.01) -> Policy:
    """The policy clip_norm / (norm + gamma).

    Args:
        gamma: The stability constant, greater than 0.

    Returns:
        The policy.

    Raises:
        InputError: gamma is not greater than 0.

    Example:
        >>> import torch
        >>> automatic(gamma=1.0)(torch.tensor([0.0, 1.0]), 2.0)
        tensor([2., 1.])
    """
    if not gamma > 0:
        raise InputError(f"automatic(gamma={gamma}): expected a number greater than 0; policy='normalize' is the limit at 0.")
    return _Automatic(gamma)


@dataclass(frozen=True)
class _Automatic:
    """The policy that `automatic` makes."""

    gamma: float

    def __call__(self, norms: Tensor, clip_norm: float | Tensor) -> Tensor:
        return clip_norm / (norms + self.gamma)


def bounded(policy: Policy) -> Policy:
    """Your own policy, its coefficients capped at clip_norm / norm, so that the clipped sum has a finite sensitivity.

    Args:
        policy: From norms [n] and a clip norm to coefficients [n], at least 0.

    Returns:
        The policy min(policy, clip_norm / norm). A coefficient of `policy` that is negative or NaN counts as zero.

    Raises:
        InputError: `policy` is not a function. At a call: `policy` does not return a tensor [n].

    Example:
        >>> import torch
        >>> smooth = bounded(lambda norms, clip_norm: 2 * clip_norm / (norms.square() + clip_norm**2).sqrt())
        >>> smooth(torch.tensor([0.0, 3.0]), 4.0)
        tensor([2.0000, 1.3333])
    """
    if not callable(policy):
        raise InputError(f"bounded(policy={policy!r}): expected a function (norms, clip_norm) -> clip_coef.")
    return _Bounded(policy)


@dataclass(frozen=True)
class _Bounded:
    """The policy that `bounded` makes."""

    policy: Policy

    def __call__(self, norms: Tensor, clip_norm: float | Tensor) -> Tensor:
        coefs = coefficients(self.policy, norms, clip_norm)
        # A norm of zero may be an underflow: its gradient's squares were too small. And no coefficient may be infinite.
        limits = torch.finfo(norms.dtype)
        most = (clip_norm / norms.clamp(min=limits.tiny**0.5)).clamp(max=limits.max)
        return torch.minimum(torch.where(coefs >= 0, coefs, 0), most)


def normalize(norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """clip_norm / norm; 1 where the norm is zero.

    Args:
        norms: [n].
        clip_norm: A number or a scalar tensor, at least 0 and finite.

    Returns:
        [n]. Positive norms below eps^4 of their dtype (2e-28 in float32) count as eps^4, so that coefficients stay finite.

    Example:
        >>> import torch
        >>> normalize(torch.tensor([0.0, 1.0, 4.0]), 2.0)
        tensor([1.0000, 2.0000, 0.5000])
    """
    return torch.where(norms > 0, clip_norm / torch.where(norms > 0, norms, 1).clamp(min=torch.finfo(norms.dtype).eps ** 4), 1)


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
        clip_norm: This step's clip norm: a number or a scalar tensor, greater than 0 (from 0 it never moves).
        norms: `ClippedGrad.norms`, [n]; where there are several clip norms, the leaf of `group_norms` that belongs to this one. A norm that
            is not finite counts as larger than the clip norm.
        expected_batch_size: The mean number of samples in a batch, a public number; without privacy, the batch's own size.
        quantile: The share of norms that should stay unclipped, in [0, 1].
        rate: The learning rate, at least 0.
        std: The standard deviation of the noise on the sum, at least 0. One sample changes the sum by 1/2, so the sum's noise multiplier is
            2 std. If the gradients' is s, that of the whole step is (s^-2 + (2 std)^-2)^-1/2.
        mask: Booleans [n], as given to `clipped_grad`: samples where it is False do not count.
        generator: The generator that draws z, on the norms' device; None for torch's default.

    Returns:
        A scalar tensor on the device of `norms`, in their dtype or that of a `clip_norm` of higher precision.

    Raises:
        InputError: `norms` or `mask` is not [n], `clip_norm` is a `PerLeaf` or `PerGroup`, or an option is out of range.

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
        raise InputError(f"psg.clipping.adapt: got a {type(clip_norm).__name__}; adapt each of its clip norms by its own `group_norms`.")
    check_clip_norm(clip_norm)
    if not isinstance(norms, Tensor):
        hint = ": pass out.norms" if hasattr(norms, "clip_coef") else ""
        raise InputError(f"psg.clipping.adapt: expected norms as a tensor [n], got a {type(norms).__name__}{hint}.")
    if norms.ndim != 1:
        raise InputError(f"psg.clipping.adapt: expected norms [n], got shape {tuple(norms.shape)}.")
    check_mask("psg.clipping.adapt", mask, len(norms))
    for name, value, fits, expected in (
        ("expected_batch_size", expected_batch_size, 0 < expected_batch_size < math.inf, "greater than 0 and finite"),
        ("quantile", quantile, 0 <= quantile <= 1, "in [0, 1]"),
        ("rate", rate, 0 <= rate < math.inf, "at least 0 and finite"),
        ("std", std, 0 <= std < math.inf, "at least 0 and finite"),
    ):
        if not fits:
            raise InputError(f"psg.clipping.adapt: {name}={value!r}: expected a number {expected}.")
    counts = (norms <= clip_norm).to(norms.dtype) - 0.5
    total = (counts if mask is None else torch.where(mask, counts, 0)).sum()
    if std:
        total = total + std * torch.randn((), dtype=norms.dtype, device=norms.device, generator=generator)
    return clip_norm * torch.exp(-rate * (total / expected_batch_size + 0.5 - quantile))


POLICIES: dict[str, Policy] = {"clip": clip, "automatic": automatic(), "normalize": normalize}


@dataclass(frozen=True)
class PerLeaf:
    """Clip every leaf on its own.

    Args:
        clip_norm: A number for all leaves, or a tree of numbers with the parameters' structure (or a prefix of it).

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

    Args:
        label: A function from a leaf's path to its group's label. The path is a tuple of keys; in a dict of parameters it has one key,
            `("encoder.weight",)`, so the parameter's name is `path[0]`.
        clip_norm: A mapping from every label that `label` gives to a clip norm.

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


class Group(NamedTuple):
    """Leaves that are clipped together."""

    leaves: tuple[int, ...]
    clip_norm: Any


def groups_of(clip_norm: Any, spec: optree.PyTreeSpec, policy: Policy) -> list[Group]:
    """The groups in which a clip norm clips the leaves of a tree.

    Args:
        clip_norm: A number or scalar tensor (one group), a `PerLeaf` or a `PerGroup`.
        spec: The structure of the tree of parameters.
        policy: The policy by which they are clipped.

    Returns:
        The groups; every leaf is in exactly one.

    Raises:
        InputError: A clip norm is not a number, negative or NaN, or inf under a policy that scales gradients by it; a label has no clip
            norm, or no leaf; `PerLeaf`'s tree does not fit.
    """
    indices = range(spec.num_leaves)
    if isinstance(clip_norm, PerLeaf):
        params = _trees.unflatten(spec, indices)
        _expect_keys(clip_norm.clip_norm, params)
        norms = _trees.broadcast(clip_norm.clip_norm, params, "PerLeaf(clip_norm)")
        groups = [Group((i,), norm) for i, norm in enumerate(norms)]
    elif isinstance(clip_norm, PerGroup):
        if not isinstance(clip_norm.clip_norm, Mapping):
            raise InputError(
                f"PerGroup(clip_norm=...): expected a mapping from labels to clip norms, got a {type(clip_norm.clip_norm).__name__}."
            )
        members: dict[Hashable, list[int]] = {}
        for i, path in enumerate(_trees.keys(_trees.unflatten(spec, indices))):
            members.setdefault(_label(clip_norm, path), []).append(i)
        try:
            groups = [Group(tuple(own), clip_norm.clip_norm[label]) for label, own in members.items()]
        except KeyError as error:
            raise InputError(
                f"PerGroup(label=...) gives {error.args[0]!r}, which has no clip norm; clip_norm has {list(clip_norm.clip_norm)!r}."
            ) from None
        if unused := [label for label in clip_norm.clip_norm if label not in members]:
            raise InputError(
                f"PerGroup(clip_norm=...): no leaf has the label {unused[0]!r}; there are {list(members)!r}. label takes the path of a "
                "leaf, a tuple of keys, and a parameter's name is path[0]."
            )
    else:
        groups = [Group(tuple(indices), clip_norm)]
    for group in groups:
        check_clip_norm(group.clip_norm)
    _expect_finite(groups, policy)
    return [group if isinstance(group.clip_norm, Tensor) else group._replace(clip_norm=float(group.clip_norm)) for group in groups]


def _label(groups: PerGroup, path: tuple[Any, ...]) -> Hashable:
    try:
        label = groups.label(path)
    except Exception as error:
        error.add_note(
            f"PerGroup(label=...) was given {path!r}: it takes the path of a leaf, a tuple of keys. A parameter's name is path[0]."
        )
        raise
    if not isinstance(label, Hashable):
        raise InputError(f"PerGroup(label=...) gives {label!r} for {path!r}; expected a label that is hashable.")
    return label


def _expect_keys(norms: Any, params: Any) -> None:
    """Raise InputError if two mappings, of clip norms and of parameters, differ in their keys."""
    if not isinstance(norms, Mapping) or not isinstance(params, Mapping):
        return
    missing, unknown = [key for key in params if key not in norms], [key for key in norms if key not in params]
    if missing or unknown:
        parts = [f"no clip norm for {', '.join(map(repr, missing))}"] if missing else []
        parts += [f"one for {', '.join(map(repr, unknown))}, which is no parameter"] if unknown else []
        raise InputError(f"PerLeaf(clip_norm): there is {', and '.join(parts)}.")


def check_clip_norm(clip_norm: Any) -> None:
    """Raise unless `clip_norm` is a number that is at least 0 (inf included), or a scalar tensor of one, checked where reading it is free.

    Raises:
        InputError: It is not.
    """
    if isinstance(clip_norm, Tensor):
        if clip_norm.ndim != 0:
            raise InputError(f"clip_norm: expected a number or a scalar tensor, got a tensor of shape {tuple(clip_norm.shape)}.")
        if not _functorch.can_read_now(clip_norm):
            return  # reading its value would wait for the device; a trace has no value
        clip_norm = clip_norm.item()
    if not isinstance(clip_norm, numbers.Real) or isinstance(clip_norm, bool):
        raise InputError(f"clip_norm: expected a number, a scalar tensor, PerLeaf or PerGroup, got {type(clip_norm).__name__}.")
    if not float(clip_norm) >= 0:
        raise InputError(f"clip_norm={clip_norm}: expected a number that is at least 0. 0 gives a zero sum, inf the plain sum.")


def _expect_finite(groups: list[Group], policy: Policy) -> None:
    """Raise InputError for a clip norm of inf under a policy that scales gradients by it: every bounded one but "clip"."""
    if policy is clip or not _is_bounded(policy):
        return
    asked = (group.clip_norm for group in groups if not isinstance(group.clip_norm, Tensor) or _functorch.can_read_now(group.clip_norm))
    if any(clip_norm == math.inf for clip_norm in asked):
        raise InputError('clip_norm=inf: this policy needs a finite clip norm. policy="clip" takes inf, and leaves gradients as they are.')


def policy_of(policy: str | Policy) -> Policy:
    """The policy of that name, or the function itself.

    Args:
        policy: A name or a function.

    Returns:
        The function (norms, clip_norm) -> clip_coef.

    Raises:
        InputError: No policy has that name, or `policy` is `automatic` itself, which makes policies.
    """
    if policy is automatic:
        raise InputError('policy=automatic: this function makes policies: give what it returns, automatic(), or "automatic".')
    if callable(policy):
        return policy
    if policy not in POLICIES:
        raise InputError(f"policy={policy!r}: expected one of {list(POLICIES)} or a function (norms, clip_norm) -> clip_coef.")
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
        InputError: The policy returns anything but a tensor [n].
    """
    coefs = policy(norms if _is_bounded(policy) else norms.clone(), clip_norm)  # a user's policy may write into its input
    if not isinstance(coefs, Tensor) or coefs.shape != norms.shape:
        got = tuple(coefs.shape) if isinstance(coefs, Tensor) else type(coefs).__name__
        raise InputError(f"the policy has to give a coefficient for each norm, {tuple(norms.shape)}; it gave {got}.")
    return coefs


class ClippedSums(NamedTuple):
    """What `clipped_sums` returns: `sums` in the order of the leaves, `coefs` and `group_norms` in the order of the groups."""

    sums: list[Tensor]
    norms: Tensor
    coefs: list[Tensor]
    group_norms: list[Tensor]
    nonfinite: Tensor

    def by_leaf(self, groups: Sequence[Group]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The sums, the coefficients and the group norms, each in the order of the leaves; `groups` as `clipped_sums` took them."""
        group_of = {leaf: k for k, group in enumerate(groups) for leaf in group.leaves}
        order = [group_of[leaf] for leaf in range(len(self.sums))]
        return self.sums, [self.coefs[k] for k in order], [self.group_norms[k] for k in order]


def clipped_sums(
    factors: Sequence[Factor], groups: list[Group], choose: Callable[[Tensor, float | Tensor], Tensor], mask: Tensor | None
) -> ClippedSums:
    """The sums of clipped per-sample gradients.

    Args:
        factors: One for each leaf.
        groups: Which leaves are clipped together, and their clip norms.
        choose: From norms [n] and a clip norm to clip coefficients [n].
        mask: Booleans [n], or None: a sample where it is False contributes exactly zero.

    Returns:
        The sums, norms and coefficients. Samples whose norm is not finite contribute exactly zero and are counted.
    """
    factors = [factor.settle() for factor in factors]
    joints = [Joint([factors[leaf] for leaf in group.leaves]) for group in groups]
    norms = norm_of(joints)
    apart = [norms] if len(groups) == 1 else [joint.norm for joint in joints]
    keep, nonfinite = None, torch.zeros((), dtype=torch.int64, device=norms.device)
    if not _all_count(norms, mask):
        finite = norms < math.inf  # False for NaN
        keep = finite if mask is None else finite & mask
        nonfinite = (~finite if mask is None else ~finite & mask).sum()
        if mask is not None:
            norms, *apart = (torch.where(mask, value, 0) for value in (norms, *apart))
        # A weight of zero times inf or NaN would be NaN: such samples are zeroed in the factors themselves.
        joints = [joint.zero(keep) for joint in joints]

    coefs = []
    sums: dict[int, Tensor] = {}
    for group, joint, own in zip(groups, joints, apart, strict=True):
        coef = choose(own, group.clip_norm)
        coefs.append(coef if keep is None else torch.where(keep, coef, 0))
        sums |= zip(group.leaves, joint.weighted_sums(coefs[-1]), strict=True)
    return ClippedSums([sums[i] for i in range(len(factors))], norms, coefs, apart, nonfinite)


def _all_count(norms: Tensor, mask: Tensor | None) -> bool:
    """Whether every sample counts: none masked, all norms finite. False where that is unknown: on other devices and in a trace."""
    if not _functorch.can_read_now(norms):
        return False
    # Norms are not negative: their sum is finite only if each of them is.
    return math.isfinite(norms.detach().sum().item()) and (mask is None or bool(mask.all()))


def check_mask(name: str, mask: Any, n: int) -> None:
    """Raise InputError unless a mask is None or booleans [n]."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (n,)):
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"{name}: mask: expected a bool tensor of shape ({n},), got {got}.")


def sensitivity(groups: list[Group], policy: Policy) -> float | Tensor:
    """The most that one sample can add to the L2 norm of the clipped sum.

    Args:
        groups: The groups and their clip norms C.
        policy: The policy.

    Returns:
        sqrt(sum over groups of C^2), in the units of the gradient; inf for a user's policy that `bounded` does not wrap.
    """
    if not _is_bounded(policy):
        return math.inf
    if len(groups) == 1:
        only = groups[0].clip_norm
        return only.clone() if isinstance(only, Tensor) else only  # a copy: the clip norm may be adapted in place
    if any(isinstance(group.clip_norm, Tensor) for group in groups):
        device = next(group.clip_norm.device for group in groups if isinstance(group.clip_norm, Tensor))
        # Times 1.0, because vector_norm takes no integers.
        return torch.linalg.vector_norm(torch.stack([1.0 * torch.as_tensor(group.clip_norm, device=device) for group in groups]))
    return math.hypot(*(group.clip_norm for group in groups))


def _is_bounded(policy: Policy) -> bool:
    """Whether none of the policy's coefficients leaves a gradient longer than the clip norm."""
    return policy is clip or policy is normalize or isinstance(policy, (_Automatic, _Bounded))
