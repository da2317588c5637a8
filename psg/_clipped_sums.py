"""Groups of leaves that are clipped together, and the sums of their clipped gradients."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from psg import _trees
from psg._errors import InputError, a_kind, received
from psg._torch import _functorch
from psg.clipping import PerGroup, PerLeaf, Policy, check_clip_norm, clip, is_bounded
from psg.factors import Factor
from psg.factors._arithmetic import spacious, wide, widen
from psg.factors._joint import Joint, norm_of


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
    if isinstance(clip_norm, PerLeaf):
        groups = _leaf_by_leaf(clip_norm, spec)
    elif isinstance(clip_norm, PerGroup):
        groups = _by_label(clip_norm, spec)
    else:
        groups = [Group(tuple(range(spec.num_leaves)), clip_norm)]
    for group in groups:
        check_clip_norm(group.clip_norm)
    _check_finite(groups, policy)
    return [group if isinstance(group.clip_norm, Tensor) else group._replace(clip_norm=float(group.clip_norm)) for group in groups]


def _leaf_by_leaf(given: PerLeaf, spec: optree.PyTreeSpec) -> list[Group]:
    params = _trees.unflatten(spec, range(spec.num_leaves))
    _check_keys(given.clip_norm, params)
    return [Group((i,), norm) for i, norm in enumerate(_trees.broadcast(given.clip_norm, params, "PerLeaf(clip_norm)"))]


def _by_label(given: PerGroup, spec: optree.PyTreeSpec) -> list[Group]:
    norms = given.clip_norm
    if not callable(given.label):
        raise InputError(f"PerGroup(label=...): expected a function from a leaf's path to its label, got {received(given.label)}.")
    if not isinstance(norms, Mapping):
        raise InputError(f"PerGroup(clip_norm=...): expected a mapping from labels to clip norms, got {a_kind(norms)}.")
    members: dict[Hashable, list[int]] = {}
    for i, path in enumerate(_trees.keys(_trees.unflatten(spec, range(spec.num_leaves)))):
        members.setdefault(_label(given, path), []).append(i)
    try:
        groups = [Group(tuple(own), norms[label]) for label, own in members.items()]
    except KeyError as error:
        raise InputError(f"PerGroup(label=...) gives {error.args[0]!r}, which has no clip norm; clip_norm has {list(norms)!r}.") from None
    if unused := [label for label in norms if label not in members]:
        raise InputError(
            f"PerGroup(clip_norm=...): no leaf has the label {unused[0]!r}; there are {list(members)!r}. label takes the path of a "
            "leaf, a tuple of keys, and a parameter's name is path[0]."
        )
    return groups


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


def _check_keys(norms: Any, params: Any) -> None:
    """Raise InputError if two mappings, of clip norms and of parameters, differ in their keys."""
    if not isinstance(norms, Mapping) or not isinstance(params, Mapping):
        return
    missing, unknown = [key for key in params if key not in norms], [key for key in norms if key not in params]
    if missing or unknown:
        parts = [f"no clip norm for {', '.join(map(repr, missing))}"] if missing else []
        parts += [f"one for {', '.join(map(repr, unknown))}, which is no parameter"] if unknown else []
        raise InputError(f"PerLeaf(clip_norm): there is {', and '.join(parts)}.")


def _check_finite(groups: list[Group], policy: Policy) -> None:
    """Raise InputError for a clip norm of inf under a policy that scales gradients by it: every bounded one but "clip"."""
    if policy is clip or not is_bounded(policy):
        return
    asked = (group.clip_norm for group in groups if not isinstance(group.clip_norm, Tensor) or _functorch.can_read_now(group.clip_norm))
    if any(clip_norm == math.inf for clip_norm in asked):
        raise InputError('clip_norm=inf: this policy needs a finite clip norm. policy="clip" takes inf, and leaves gradients as they are.')


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
    apart = [joint.norm for joint in joints]
    keep, finite, nonfinite = None, None, torch.zeros((), dtype=torch.int64, device=norms.device)
    if not _all_count(norms, mask):
        finite = norms < math.inf  # False for NaN
        keep = finite if mask is None else finite & mask
        nonfinite = (~finite if mask is None else ~finite & mask).sum()
        if mask is not None:
            norms, *apart = (torch.where(mask, value, 0) for value in (norms, *apart))

    coefs = []
    sums: dict[int, Tensor] = {}
    for group, joint, own in zip(groups, joints, apart, strict=True):
        if keep is None or finite is None:
            coef = choose(own, group.clip_norm)
            found = joint.weighted_sums(coef)
        else:
            # A derivative of zero times NaN would be NaN, too.
            coef = torch.where(keep, choose(torch.where(keep, own, 1), group.clip_norm), 0)
            # A weight of zero times inf or NaN is NaN: the sum itself leaves such samples out.
            found = joint.weighted_sums_of(coef, keep, finite)
        coefs.append(coef)
        sums |= zip(group.leaves, found, strict=True)
    return ClippedSums([sums[i] for i in range(len(factors))], norms, coefs, apart, nonfinite)


def _all_count(norms: Tensor, mask: Tensor | None) -> bool:
    """Whether every sample counts: none masked, all norms finite. False where that is unknown: on other devices and in a trace."""
    if not (_functorch.can_read_now(norms) and (mask is None or _functorch.can_read_now(mask))):
        return False
    # Norms are not negative: their sum is finite only if each of them is.
    return math.isfinite(norms.detach().sum().item()) and (mask is None or bool(mask.all()))


def sensitivity(groups: list[Group], policy: Policy) -> float | Tensor:
    """The most that one sample can add to the L2 norm of the clipped sum.

    Args:
        groups: The groups and their clip norms C.
        policy: The policy.

    Returns:
        sqrt(sum over groups of C^2), in the units of the gradient, at least float32; inf for a user's policy that `bounded` does not wrap.
    """
    if not is_bounded(policy):
        return math.inf
    if len(groups) == 1:
        only = groups[0].clip_norm
        # Times 1.0: an integer's too is a real number, and a copy, since the clip norm may be adapted in place.
        return widen(1.0 * only) if isinstance(only, Tensor) else only
    tensors = [group.clip_norm for group in groups if isinstance(group.clip_norm, Tensor)]
    if not tensors:
        return math.hypot(*(group.clip_norm for group in groups))
    # Rounded to 16 bits, or from squares that underflow, it could be too small.
    dtype = functools.reduce(torch.promote_types, [clip_norm.dtype for clip_norm in tensors], wide(torch.get_default_dtype()))
    norms = torch.stack([torch.as_tensor(group.clip_norm, dtype=dtype, device=tensors[0].device) for group in groups])
    return torch.linalg.vector_norm(norms, dtype=spacious(norms)).to(dtype)
