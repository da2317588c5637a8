"""Collectives over processes that each have samples of their own: add up their sums, join their samples.

Per-sample gradients need no communication; only results computed from them do. So every process calls psg on its share of a batch, and
passes the result to one of these functions. All processes must call it, as with any collective of torch.distributed.

Every call first compares what the processes are about to send. None can leave this out for a tree that they have agreed on before: another
process, whose tree has changed, would compare alone, and both would wait for ever.
"""

import hashlib
import re
import struct
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from optree import PyTreeSpec
from torch import Tensor

from psg import _trees
from psg._errors import InputError, PsgError, a_kind
from psg._torch import _functorch
from psg._torch._ambient import unaffected
from psg.clipping import is_clipped
from psg.factors import Dense, Factor, is_factor
from psg.factors._arithmetic import as_real, is_one_row, one_after_another, widen

__all__ = ["all_gather", "all_reduce"]


@unaffected
def all_reduce(tree: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """The sum over all processes: of clipped sums, counts of samples, Fisher diagonals.

    One collective serves all leaves of one dtype and device. Add Gaussian noise to the result, by generators that are seeded alike in all
    processes; or let each process add its own noise before, with standard deviation std / sqrt(processes), by generators seeded apart.

    First the processes compare what they hold, so that trees that do not fit raise in all of them: none waits for ever, and no sum is
    wrong. Every call therefore exchanges 32 bytes, in about the time that the sum of one number takes, and the host waits for them. They go
    by the CPU where the group has a backend for it ("gloo", "cpu:gloo,cuda:nccl"); else ("nccl") by the accelerator, after the ops that
    are queued there, so that the host waits for these too.

    Args:
        tree: Tensors of any shape, such as `ClippedGrad.grads`: in every process the same leaves, of the same paths, shapes, dtypes (once
            they are at least float32, and integers int64) and kinds of device, in the same order.
        group: The processes; None for all of them. Messages number the processes as the group does.

    Returns:
        The same tree, without history, equal in all processes, added up in at least float32. Integers become int64, as in `torch.sum`.
        Leaves of one dtype may share one buffer.

    Raises:
        InputError: In all processes if it is so in one: the tree has no leaves, or a leaf that is not a dense tensor of numbers; it is a
            `ClippedGrad`, of which only `grads` and `nonfinite` are sums; the trees differ between processes, or the function that they
            call. In this process alone: torch.distributed has not been set up; the process is not in the group.
        PsgError: Something traces the call. `psg.jit` then runs it eagerly, and warns.

    Example:
        >>> import torch
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> all_reduce({"w": torch.ones(2), "count": torch.tensor(8)})
        {'w': tensor([1., 1.]), 'count': tensor(8)}
        >>> torch.distributed.destroy_process_group()

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020 (one collective for many leaves).
    """
    _check_call("all_reduce", group)
    leaves, spec = _trees.flatten(tree, is_factor)
    problem = _no_sums(tree, leaves, spec)
    # Widened first: an empty batch's losses may have another dtype than those of other processes.
    parts = [widen(as_real(leaf.detach())) if _trees.is_inexact(leaf) else leaf.long() for leaf in leaves] if problem is None else []
    dtypes = [part.dtype.to_complex() if leaf.is_complex() else part.dtype for leaf, part in zip(leaves, parts, strict=False)]
    kinds = [_kind(leaf.shape, dtype, leaf.device) for leaf, dtype in zip(leaves, dtypes, strict=False)]
    _expect_agreement("all_reduce", problem, spec, kinds, parts[0].device if parts else None, group)
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

    As in `all_reduce` a tree that does not fit raises in all processes. Then they tell each other how many samples they hold, and how.

    Args:
        tree: Tensors [n, *] or factors: in every process the same leaves, of the same paths, shapes, dtypes and kinds of device, in the
            same order. Only n may differ.
        group: The processes; None for all of them. Messages number the processes as the group does.

    Returns:
        The same tree, without history, equal in all processes: the samples of the first process, then those of the second, and so on. A
        factor stays factored where its kind and shapes agree in all processes, and becomes Dense where they do not.

    Raises:
        InputError: In all processes if it is so in one: the tree has no leaves, or a leaf that is neither a dense tensor with a batch
            dimension nor a factor of dense tensors; its leaves disagree on n; the trees differ between processes, or the function that they
            call. In this process alone: torch.distributed has not been set up; the process is not in the group.
        PsgError: Something traces the call. `psg.jit` then runs it eagerly, and warns.

    Example:
        >>> import torch
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> all_gather(torch.tensor([0.5, 2.0]))
        tensor([0.5000, 2.0000])
        >>> torch.distributed.destroy_process_group()
    """
    _check_call("all_gather", group)
    leaves, spec = _trees.flatten(tree, is_factor)
    problem = _no_samples(leaves, spec)
    factors = [leaf if isinstance(leaf, Factor) else Dense(leaf) for leaf in leaves] if problem is None else []
    kinds = [_kind(["n", *factor.shape], factor.dtype, factor.device) for factor in factors]
    _expect_agreement("all_gather", problem, spec, kinds, factors[0].device if factors else None, group)
    # A process without samples cannot know which kinds of factors the others found: so each sends its factors, emptied of samples.
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (factors[0].n, list(map(_describe, factors))), group=group)
    sizes, described = zip(*found, strict=True)
    results: list[Any] = []
    for leaf, factor, theirs in zip(leaves, factors, zip(*described, strict=True), strict=True):
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
    factor.map(lambda tensor: fields.append(_Field(len(tensor), is_one_row(tensor))) or tensor)
    return factor.take(slice(0)).map(lambda part: part.new_empty(part.shape, device="cpu")), fields


def _are_alike(factor: Factor, other: Factor) -> bool:
    """Whether two factors without samples have the same kind, shapes and dtypes, so that factors like them can be joined."""
    (tensors, spec), (others, other_spec) = _trees.flatten(factor), _trees.flatten(other)
    return spec == other_spec and [(x.shape, x.dtype) for x in tensors] == [(x.shape, x.dtype) for x in others]


def _check_call(name: str, group: dist.ProcessGroup | None) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(f"psg.distributed.{name}: torch.distributed is not set up: call torch.distributed.init_process_group first.")
    if dist.get_rank(group) < 0:
        raise InputError(f"psg.distributed.{name}: this process is not in the group: call it in the group's processes alone.")
    if _functorch.is_recorded():
        raise PsgError(f"psg.distributed.{name} compares what the processes hold, which no graph can: call it outside.")


def _no_sums(tree: Any, leaves: Sequence[Any], spec: PyTreeSpec) -> str | None:
    """Why a tree cannot be added up over the processes; None if it can."""
    if is_clipped(tree):
        return f"got {a_kind(tree)}, whose norms are each process's own: pass its grads (and its nonfinite, if you want it)."
    for i, leaf in enumerate(leaves):
        odd = "of dtype torch.bool" if isinstance(leaf, Tensor) and leaf.dtype == torch.bool else _oddity(leaf)
        if odd is not None:
            way_out = ""
            if isinstance(leaf, Tensor) and leaf.is_sparse:
                way_out = (
                    " The rows of sparse sums differ from process to process: pass its to_dense(), or all_gather the factors and call "
                    "psg.tree.sparse_weighted_sum on all samples."
                )
            return f"expected tensors of numbers, such as a sum of gradients; {_paths(spec)[i]} is {odd}.{way_out}"
    return None if leaves else "the tree has no leaves."


def _no_samples(leaves: Sequence[Any], spec: PyTreeSpec) -> str | None:
    """Why a tree does not hold samples that can be joined with those of other processes; None if it does."""
    for i, leaf in enumerate(leaves):
        odd = next(filter(None, map(_oddity, _trees.flatten(leaf)[0])), None)
        if odd is None and not isinstance(leaf, Factor) and leaf.ndim == 0:
            odd = "a tensor without dimensions"
        if odd is not None:
            verb = "holds" if isinstance(leaf, Factor) else "is"
            return f"expected tensors [n, *] or factors; {_paths(spec)[i]} {verb} {odd}."
    sizes = [leaf.n if isinstance(leaf, Factor) else len(leaf) for leaf in leaves]
    if len(set(sizes)) > 1:
        places, other = _paths(spec), next(i for i, size in enumerate(sizes) if size != sizes[0])
        return f"the leaves disagree on the number of samples: {places[0]} has {sizes[0]}, {places[other]} has {sizes[other]}."
    return None if leaves else "expected tensors [n, *] or factors; the tree has no leaves."


def _oddity(leaf: Any) -> str | None:
    """What a leaf is, if it is no tensor that can be sent; None if it is one."""
    odd = _trees.oddity(leaf)
    if odd is None and leaf.is_meta:
        return "a tensor on the meta device, without values"
    if odd is None and _trees.is_inexact(leaf) and not _trees.is_computable(leaf):
        return f"of dtype {leaf.dtype}, in which torch does not compute: convert it"
    return odd


def _paths(spec: PyTreeSpec) -> list[str]:
    """The path to every leaf, alike in all processes."""
    return [_alike(accessor.codify("tree")) for accessor in spec.accessors()]


def _alike(text: str) -> str:
    """The text without addresses, by which Python shows an object as a key, and which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _kind(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> str:
    return f"{dtype} of shape [{', '.join(map(str, shape))}] on {device.type}"


def _expect_agreement(
    name: str, problem: str | None, spec: PyTreeSpec, kinds: list[str], device: torch.device | None, group: dist.ProcessGroup | None
) -> None:
    """Let all processes go on, or none: the first collective of a call, of one size whatever they hold.

    Args:
        name: The function's name.
        problem: Why this process cannot send its tree; None if it can.
        spec: The structure of its tree.
        kinds: What each leaf sends.
        device: Where its first leaf is, if it has one.
        group: The processes.

    Raises:
        InputError: In all processes: one has a problem, another tree than the others, or calls another function.
    """
    own = hashlib.sha256(_alike(repr((name, problem, spec.paths(), kinds))).encode()).digest()
    if _agree(own, device, group) and problem is None:
        return
    found: list[Any] = [None] * dist.get_world_size(group)
    sent = [f"a call of {name}", *(f"{path} ({kind})" for path, kind in zip(_paths(spec), kinds, strict=False))]
    dist.all_gather_object(found, (problem, sent), group=group)
    problems, trees = zip(*found, strict=True)
    if any(problems):
        shown = problem or next(filter(None, problems))
        raise InputError(f"psg.distributed.{name}, processes {[rank for rank, theirs in enumerate(problems) if theirs == shown]}: {shown}")
    other = [rank for rank, tree in enumerate(trees) if tree != trees[0]]
    here, there = next(pair for pair in zip_longest(trees[0], trees[other[0]], fillvalue="nothing more") if pair[0] != pair[1])
    raise InputError(
        f"psg.distributed.{name}: processes {other} differ from process 0, which has {here} where process {other[0]} has {there}. Pass the "
        "same leaves in all processes, in the same order."
    )


def _agree(own: bytes, device: torch.device | None, group: dist.ProcessGroup | None) -> bool:
    """Whether all processes have the same 32 bytes; they all get the same answer."""
    served = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in served:
        device = torch.device("cpu")
    elif device is None or device.type not in served:
        device = torch.device(served[0])
    sent = torch.tensor(struct.unpack("4q", own), device=device)
    found = sent.new_empty(dist.get_world_size(group), 4)
    dist.all_gather(list(found), sent, group=group)
    return bool((found == sent).all())


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
