"""From trees of per-sample gradients to other such trees: other forms, chosen or joined samples, sums of segments, entries scaled."""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from psg import _trees
from psg._errors import InputError, a_kind, as_integer, received
from psg._torch import _functorch
from psg._torch._ambient import unaffected
from psg.factors import Dense, Factor, is_factor
from psg.factors import concat as concat_factors
from psg.factors._arithmetic import wide
from psg.factors._division import Division
from psg.factors._maps import scaled
from psg.tree._leaves import beside, factors_of, place_of


@unaffected
def materialize(tree: Any) -> Any:
    """The gradients themselves, as tensors.

    Args:
        tree: Per-sample gradients.

    Returns:
        The same tree with a tensor [n, *shape] at every leaf. It may share memory with `tree`, as that of a dense leaf does: clone it
        before you write into it.

    Raises:
        InputError: `tree` is no tree of per-sample gradients: see `help(psg.tree)`.

    Example:
        >>> import torch
        >>> from psg.factors import Outer
        >>> materialize({"w": Outer(torch.ones(1, 1, 2), torch.tensor([[[1.0, 2.0]]]))})
        {'w': tensor([[[1., 2.],
                 [1., 2.]]])}
    """
    factors, spec = factors_of(tree, "materialize", computes=False)
    return _trees.unflatten(spec, [factor.materialize() for factor in factors])


@unaffected
def flatten(tree: Any) -> Tensor:
    """All leaves side by side, in the order of the tree: a dict's by sorted keys, an OrderedDict's in its own order.

    Args:
        tree: Per-sample gradients.

    Returns:
        [n, P], in the leaves' common dtype. Factored leaves are materialised one after the other.

    Raises:
        InputError: `tree` is no tree of per-sample gradients: see `help(psg.tree)`.

    Example:
        >>> import torch
        >>> flatten({"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])})
        tensor([[1., 2., 3.]])
    """
    factors, _ = factors_of(tree, "flatten", computes=False)
    sizes = [factor.shape.numel() for factor in factors]
    if any(factor.is_differentiated for factor in factors):
        return torch.cat([factor.materialize().reshape(factor.n, size) for factor, size in zip(factors, sizes, strict=True)], dim=1)
    # One leaf at a time: all of them beside the result would take twice the memory.
    dtype = functools.reduce(torch.promote_types, (factor.dtype for factor in factors))
    flat = torch.empty(factors[0].n, sum(sizes), dtype=dtype, device=factors[0].device)
    for factor, columns in zip(factors, flat.split(sizes, dim=1), strict=True):
        columns.copy_(factor.materialize().reshape(columns.shape))
    return flat


def unflatten(flat: Tensor, like: Any) -> Any:
    """The inverse of `flatten`.

    Args:
        flat: [..., P], in the order of `flatten` (a dict's sorted keys), which is not that of `torch.nn.utils.parameters_to_vector`.
        like: A tree like the parameters, with tensors [*shape].

    Returns:
        The tree of `like` with a tensor [..., *shape] at every leaf, in the dtype of `flat`. Where the leaves' dtypes differ and `flat` has
        their common dtype, as from `flatten`, each leaf gets its own dtype back; a real leaf drops the imaginary part, which is zero.

    Raises:
        InputError: `flat` is no tensor of at least one dimension, or P is not the number of entries of `like`; a leaf is no tensor.

    Example:
        >>> import torch
        >>> unflatten(torch.tensor([[1.0, 2.0, 3.0]]), {"a": torch.zeros(2), "b": torch.zeros(())})
        {'a': tensor([[1., 2.]]), 'b': tensor([3.])}
    """
    leaves, spec = _trees.flatten(like, is_factor)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            place = place_of(like, "like", i)
            raise InputError(
                f"psg.tree.unflatten: {place} is {a_kind(leaf)}; expected a tensor, whose shape the entries get: like is a tree "
                "like the parameters."
            )
    sizes = [leaf.numel() for leaf in leaves]
    total = sum(sizes)
    if not isinstance(flat, Tensor) or flat.ndim == 0:
        got = "a tensor without dimensions" if isinstance(flat, Tensor) else a_kind(flat)
        raise InputError(f"psg.tree.unflatten: expected a tensor [..., {total}], got {got}.")
    if flat.shape[-1] != total:
        raise InputError(f"psg.tree.unflatten: expected {total} entries along the last dimension, got {flat.shape[-1]}.")
    dtypes = {leaf.dtype for leaf in leaves}
    mixed = len(dtypes) > 1 and flat.dtype == functools.reduce(torch.promote_types, dtypes)

    def back(part: Tensor, leaf: Tensor) -> Tensor:
        part = part.reshape(flat.shape[:-1] + leaf.shape)
        if not mixed:
            return part
        return (part.real if part.is_complex() and not leaf.is_complex() else part).to(leaf.dtype)

    return _trees.unflatten(spec, [back(part, leaf) for part, leaf in zip(flat.split(sizes, dim=-1), leaves, strict=True)])


@unaffected
def take(tree: Any, index: Any) -> Any:
    """The gradients of some samples.

    Args:
        tree: Per-sample gradients.
        index: Integers [m], a mask [n], or a slice.

    Returns:
        The same tree, with the same kinds of leaves, for those samples.

    Raises:
        InputError: `index` is something else (a single integer would drop the batch dimension), the mask has another length, an integer
            on the CPU is out of range, or `index` is on an accelerator and the gradients elsewhere.

    Guarantee: integers and slices do not wait for an accelerator, unless a leaf holds sums over segments, whose sizes are read. A mask that
    is there does: the number of samples that it selects is read. Integers that are there, or in a trace, are left to torch, whose kernels
    check them.

    Example:
        >>> import torch
        >>> take(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
    """
    found = _slice(index) if isinstance(index, slice) else _indices(index)
    if found is None:
        raise InputError(f"psg.tree.take: expected a slice, integers [m] or a mask [n], got {index!r}; for one sample k, slice(k, k + 1).")
    factors, _ = factors_of(tree, "take", computes=False)
    if isinstance(found, Tensor):
        _check_indices(found, factors, tree)
    return _in_the_form_of(tree, [factor.take(found) for factor in factors])


def _slice(index: slice) -> slice | None:
    """The slice; None if torch could not take it."""
    if not all(end is None or hasattr(end, "__index__") for end in (index.start, index.stop, index.step)):
        return None
    return index if index.step is None or index.step >= 1 else None


def _check_indices(index: Tensor, factors: list[Factor], tree: Any) -> None:
    """Raise InputError unless `index` selects from the samples of all factors."""
    n = factors[0].n
    if index.dtype == torch.bool:
        if len(index) != n:
            raise InputError(f"psg.tree.take: got a mask of {len(index)} for {n} samples.")
    elif len(index) and _functorch.can_read_now(index) and not (-n <= int(index.min()) and int(index.max()) < n):
        raise InputError(f"psg.tree.take: the integers are from {int(index.min())} to {int(index.max())}, with {n} samples.")
    for i, factor in enumerate(factors):
        if index.device.type != "cpu" and index.device != factor.device:
            raise InputError(
                f"psg.tree.take: the index is on {index.device}, but {place_of(tree, 'tree', i)} on {factor.device}: move it there."
            )


def _indices(index: Any) -> Tensor | None:
    """Integers or a mask of one dimension as a tensor; None for anything else."""
    try:
        found = index if isinstance(index, Tensor) else torch.as_tensor(index, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.numel() == 0 and not isinstance(index, Tensor):
        found = found.long()  # torch makes floats of an empty list
    if _trees.oddity(found) is not None or found.ndim != 1 or _trees.is_inexact(found):
        return None
    return found if found.dtype == torch.bool else found.long()  # torch would take bytes for a mask, and no 16-bit indices


@unaffected
def concat(trees: Iterable[Any]) -> Any:
    """The samples of several trees, one after the other.

    Args:
        trees: Per-sample gradients in trees of the same structure: a list of them, or any other iterable; at least one.

    Returns:
        One tree. A leaf stays factored where its kind and shapes agree in all trees, and is materialised where they do not.

    Raises:
        InputError: No tree is given, structures or shapes differ, or `trees` is a tree itself.

    Example:
        >>> import torch
        >>> concat([torch.tensor([[1.0]]), torch.tensor([[2.0]])])
        tensor([[1.],
                [2.]])
    """
    if isinstance(trees, (Tensor, Factor, Mapping)) or not isinstance(trees, Iterable):
        raise InputError(f"psg.tree.concat: expected a list of trees, got {received(trees)}; one tree alone is [tree].")
    trees = list(trees)
    if not trees:
        raise InputError("psg.tree.concat: expected at least one tree.")
    columns, specs = zip(*(factors_of(tree, "concat", computes=False) for tree in trees), strict=True)
    if (other := next((spec for spec in specs if spec != specs[0]), None)) is not None:
        raise InputError(f"psg.tree.concat: the trees differ in structure: {_trees.differences(specs[0], other, ('first', 'other'))}.")
    for i, column in enumerate(zip(*columns, strict=True)):
        if len({factor.shape for factor in column}) > 1:
            shapes = ", ".join(str(tuple(factor.shape)) for factor in column)
            raise InputError(f"psg.tree.concat: the gradients of {place_of(trees[0], 'tree', i)} differ in shape: {shapes}.")
    return _in_the_form_of(trees[0], [concat_factors(column) for column in zip(*columns, strict=True)])


@unaffected
def segment_sum(tree: Any, segment_ids: Tensor, num_segments: int) -> Any:
    """Sum the gradients within segments of the samples: those of one user, say, for privacy or influence of users instead of samples.

    Factors stay factors: a segment is held as its samples. Reductions that are linear in the gradients run on the samples as they are. The
    others run on segments of similar size at a time, padded: each costs at most twice its samples, whatever the sizes of the others.

    Args:
        tree: Per-sample gradients.
        segment_ids: Integers [n] in [0, num_segments): the segment of each sample, in any order.
        num_segments: The number of segments; those without samples have a sum of zero.

    Returns:
        The same tree with a sum for each segment in place of each sample: [num_segments, *shape] where a leaf was [n, *shape].

    Raises:
        InputError: `segment_ids` are not such integers, or `num_segments` is not an integer of at least 0.

    Guarantee: an id out of range raises. To check the ids, and later to read the sizes of factors' segments, psg waits for an accelerator.
    In a trace it can do neither: there the sums are materialised, and are NaN if an id is out of range.

    Example:
        >>> import torch
        >>> from psg.tree import norm, segment_sum
        >>> users = segment_sum(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 0, 1]), 3)
        >>> users, norm(users)
        (tensor([[2.],
                [5.],
                [0.]]), tensor([2., 5., 0.]))

    Source: `jax.ops.segment_sum`; McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018 (users).
    """
    factors, _ = factors_of(tree, "segment_sum")
    n = factors[0].n
    integers = isinstance(segment_ids, Tensor) and not _trees.is_inexact(segment_ids)
    if not integers or segment_ids.dtype == torch.bool or segment_ids.shape != (n,):
        got = f"{segment_ids.dtype} {tuple(segment_ids.shape)}" if isinstance(segment_ids, Tensor) else type(segment_ids).__name__
        raise InputError(f"psg.tree.segment_sum: expected segment_ids as integers [{n}], one for each sample, got {got}.")
    count = as_integer(num_segments, least=0)
    if count is None:
        raise InputError(f"psg.tree.segment_sum: num_segments={num_segments!r}: expected an integer of at least 0.")
    ids = segment_ids.to(factors[0].device, torch.int64)
    valid: Tensor | None = None
    if count and not _functorch.can_read(ids):
        # Compiled code might take -1 for the last segment.
        valid, ids = ((0 <= ids) & (ids < count)).all(), ids.clamp(0, count - 1)
    elif n and not (0 <= int(ids.min()) and int(ids.max()) < count):
        raise InputError(f"psg.tree.segment_sum: segment_ids are from {int(ids.min())} to {int(ids.max())}, with {count} segments.")

    division = Division(ids, count)

    def sums(factor: Factor) -> Factor:
        found = factor._segment_sum(division)
        return found if valid is None else Dense(torch.where(valid, found.materialize(), math.nan))

    return _in_the_form_of(tree, map(sums, factors))


@unaffected
def precondition(tree: Any, diagonal: Any) -> Any:
    """diagonal * g_n, entry by entry: multiplies every sample's gradient by a diagonal, which it does not invert.

    Give it an inverse Fisher diagonal, say, or Adam's 1 / sqrt(second moment).

    Args:
        tree: Per-sample gradients.
        diagonal: A tree like the parameters, with real tensors [*shape], all finite: invert with an epsilon. Where an entry is inf or NaN,
            gradients of zero become NaN in dense leaves. In factored ones those that no factor holds stay zero: of rows that a sample does
            not look up, parts of a parameter that fn does not use; and a sum of terms, one of them zero, may be NaN instead of inf.

    Returns:
        The same tree, in the dtypes of the gradients, or float32 in place of 16-bit dtypes, whose range a diagonal soon leaves: for inner
        products (influence, LESS), norms, projections. Factors stay factors unless they are small; reductions of those that stay
        materialise the gradients of a few samples at a time (Gram matrices may materialise all).

    Raises:
        InputError: The diagonal's structure or shapes do not fit, or it is complex.

    Example:
        >>> import torch
        >>> from psg.tree import gram, precondition
        >>> g = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
        >>> gram(precondition(g, {"w": torch.tensor([1.0, 0.5])}), g)  # g_n^T D g_m
        tensor([[ 3.,  7.],
                [ 7., 17.]])

    Source: Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", 2024, section 3 (gradients as Adam takes them);
    George et al., "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis", 2018 (EK-FAC, in an eigenbasis).
    """
    factors, leaves = beside(tree, diagonal, "precondition", "diagonal")
    if any(leaf.is_complex() for leaf in leaves):
        raise InputError("psg.tree.precondition: expected a real diagonal.")

    def conditioned(factor: Factor, leaf: Tensor) -> Factor:
        dtype = wide(factor.dtype)
        factor, own = factor.to(dtype), leaf.to(dtype)
        found = scaled(factor, own)
        return Dense(factor.materialize() * own) if found is None else found

    return _in_the_form_of(tree, map(conditioned, factors, leaves))


def _in_the_form_of(tree: Any, factors: Iterable[Factor]) -> Any:
    """The tree with these factors in place of its leaves; a leaf that was a tensor stays one."""
    leaves, spec = _trees.flatten(tree, is_factor)
    return _trees.unflatten(
        spec, [factor.materialize() if isinstance(leaf, Tensor) else factor for factor, leaf in zip(factors, leaves, strict=True)]
    )
