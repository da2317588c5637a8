"""Collectives over processes that each have samples of their own: add up their sums, join their samples.

Per-sample gradients need no communication; only results computed from them do. So every process calls psg on its share of a batch, and
passes the result to one of these functions. All processes must call it, as with any collective of torch.distributed.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from psg import _trees
from psg._errors import InputError
from psg._torch._ambient import unaffected
from psg.factors import Dense, Factor, is_factor
from psg.factors._arithmetic import as_real, one_after_another, widen

__all__ = ["all_gather", "all_reduce"]


@unaffected
def all_reduce(tree: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """The sum over all processes: of clipped sums, counts of samples, Fisher diagonals.

    One collective serves all leaves of one dtype and device. Add Gaussian noise to the result, by generators that are seeded alike in all
    processes; or let each process add its own noise before, with standard deviation std / sqrt(processes), by generators seeded apart.

    Args:
        tree: Tensors of any shape, such as `ClippedGrad.grads`: the same structure, shapes and dtypes in every process.
        group: The processes; None for all of them.

    Returns:
        The same tree, without history, equal in all processes, added up in at least float32. Integers become int64, as in `torch.sum`.
        Leaves of one dtype may share one buffer.

    Raises:
        InputError: The tree has no leaves, or a leaf that is not a dense tensor of numbers; it is a `ClippedGrad`, of which only `grads`
            and `nonfinite` are sums; torch.distributed has not been set up.

    Example:
        >>> import torch
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> all_reduce({"w": torch.ones(2), "count": torch.tensor(8)})
        {'w': tensor([1., 1.]), 'count': tensor(8)}
        >>> torch.distributed.destroy_process_group()

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020 (one collective for many leaves).
    """
    if hasattr(tree, "clip_coef"):  # a ClippedGrad, whose class this layer cannot import
        raise InputError(
            f"psg.distributed.all_reduce: got a {type(tree).__name__}, whose norms are each process's own: pass its grads (and "
            "its nonfinite, if you want it)."
        )
    leaves, spec = _trees.flatten(tree, is_factor)
    _check_group("all_reduce")
    if not leaves:
        raise InputError("psg.distributed.all_reduce: the tree has no leaves.")
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool:
            got = "of dtype torch.bool" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            place = _trees.paths(tree, "tree", is_factor)[i]
            raise InputError(f"psg.distributed.all_reduce: expected tensors of numbers, such as a sum of gradients; {place} is {got}.")
        if leaf.layout != torch.strided:
            place = _trees.paths(tree, "tree", is_factor)[i]
            raise InputError(
                f"psg.distributed.all_reduce: {place} is a sparse sum, whose rows differ from process to process: "
                "pass its to_dense(), or all_gather the factors and call psg.tree.sparse_weighted_sum on all samples."
            )
    # Widened first: an empty batch's losses may have another dtype than those of other processes, which must not wait for ever.
    parts = [widen(as_real(leaf.detach())) if _trees.is_inexact(leaf) else leaf.long() for leaf in leaves]
    results: dict[int, Tensor] = {}
    for alike in _trees.by_dtype_and_device(parts):
        flat = torch.cat([parts[i].reshape(-1) for i in alike])
        dist.all_reduce(flat, group=group)
        for i, total in zip(alike, flat.split([parts[i].numel() for i in alike]), strict=True):
            total = total.reshape(parts[i].shape)
            total = torch.view_as_complex(total.clone()) if leaves[i].is_complex() else total
            results[i] = total.to(leaves[i].dtype) if _trees.is_inexact(leaves[i]) else total
    return _trees.unflatten(spec, [results[i] for i in range(len(leaves))])


@unaffected
def all_gather(tree: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """Join the samples of all processes: norms for a quantile, projections, factors for a Gram matrix.

    The processes first tell each other what they hold, so that a tree that does not fit raises in all of them and none waits for ever.

    Args:
        tree: Tensors [n, *] or factors. Structure, dtypes and shapes must be the same in every process, but n may differ.
        group: The processes; None for all of them.

    Returns:
        The same tree, without history, equal in all processes: the samples of the first process, then those of the second, and so on. A
        factor stays factored where its kind and shapes agree in all processes, and becomes Dense where they do not.

    Raises:
        InputError: The tree has no leaves, or a leaf without a batch dimension; its leaves disagree on n; the trees differ between
            processes; torch.distributed has not been set up.

    Example:
        >>> import torch
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> all_gather(torch.tensor([0.5, 2.0]))
        tensor([0.5000, 2.0000])
        >>> torch.distributed.destroy_process_group()
    """
    leaves, spec = _trees.flatten(tree, is_factor)
    _check_group("all_gather")
    fits = bool(leaves) and all(isinstance(leaf, Factor) or isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves)
    factors = [leaf if isinstance(leaf, Factor) else Dense(leaf) for leaf in leaves] if fits else []
    fits = len({factor.n for factor in factors}) == 1
    # A process without samples cannot know which kinds of factors the others found: so each sends its factors, emptied of samples.
    own = (factors[0].n, str(spec), list(map(_describe, factors))) if fits else None
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    wrong = [rank for rank, theirs in enumerate(found) if theirs is None]
    if wrong:
        raise InputError(f"psg.distributed.all_gather: expected tensors [n, *] or factors, all of one n; not so in processes {wrong}.")
    sizes, specs, kinds = zip(*found, strict=True)
    stands_for = [(spec, [(empty.shape, empty.dtype) for empty, _ in theirs]) for spec, theirs in zip(specs, kinds, strict=True)]
    other = [rank for rank in range(len(found)) if stands_for[rank] != stands_for[0]]
    if other:
        raise InputError(f"psg.distributed.all_gather: processes {other} have trees of another structure, shapes or dtypes than process 0.")
    results: list[Any] = []
    for leaf, factor, theirs in zip(leaves, factors, zip(*kinds, strict=True), strict=True):
        empties, fields = zip(*theirs, strict=True)
        filled = [empty for empty, n in zip(empties, sizes, strict=True) if n] or empties
        if not all(_are_alike(empty, filled[0]) for empty in filled):
            factor, fields = Dense(factor.materialize()), [[_Field(n, False)] for n in sizes]
        elif factor.n == 0:
            factor = filled[0].map(lambda tensor, device=factor.device: tensor.to(device))
        each = zip_longest(*fields, fillvalue=_Field(0, True))  # a process without samples may hold other tensors
        joined = factor.map(lambda tensor, each=each: _gather(tensor.detach(), next(each), group))
        results.append(joined.materialize() if isinstance(leaf, Tensor) else joined)
    return _trees.unflatten(spec, results)


class _Field(NamedTuple):
    """How many rows a tensor of a factor has, and whether all are one row, expanded."""

    rows: int
    is_one: bool


def _describe(factor: Factor) -> tuple[Factor, list[_Field]]:
    """The factor without samples, and what rows its tensors have: in `Segments`, some have more than n."""
    fields: list[_Field] = []
    factor.map(lambda tensor: fields.append(_Field(len(tensor), len(tensor) < 2 or tensor.stride(0) == 0)) or tensor)
    return factor.take(slice(0)).map(lambda part: part.new_empty(part.shape, device="cpu")), fields


def _are_alike(factor: Factor, other: Factor) -> bool:
    """Whether two factors without samples have the same kind, shapes and dtypes, so that factors like them can be joined."""
    (tensors, spec), (others, other_spec) = _trees.flatten(factor), _trees.flatten(other)
    return spec == other_spec and [(x.shape, x.dtype) for x in tensors] == [(x.shape, x.dtype) for x in others]


def _check_group(name: str) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(f"psg.distributed.{name}: torch.distributed is not set up: call torch.distributed.init_process_group first.")


def _gather(tensor: Tensor, fields: Sequence[_Field], group: dist.ProcessGroup | None) -> Tensor:
    """[n, *] of every process, described by `fields` -> [sum n, *]. A tensor that is one row in every process is sent as one."""
    as_one = all(field.is_one for field in fields)
    sent = [min(field.rows, 1) if as_one else field.rows for field in fields]
    if as_one:
        tensor = tensor[:1]
    # Collectives want the same size everywhere.
    padded = torch.cat([tensor, tensor.new_zeros(max(sent) - len(tensor), *tensor.shape[1:])])
    parts = [torch.empty_like(padded) for _ in fields]
    dist.all_gather([as_real(part) for part in parts], as_real(padded), group=group)
    rows = [part[:count] for part, count in zip(parts, sent, strict=True)]
    return one_after_another([own.expand(field.rows, *own.shape[1:]) for own, field in zip(rows, fields, strict=True)])
