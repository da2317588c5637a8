"""Runs a call chunk by chunk: how many samples a chunk takes, and how the chunks' results are joined."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from psg._call import Call, shape_of_sample
from psg._clipped_sums import ClippedSums
from psg._hardware import _memory
from psg._ladder import _ladder, _rungs
from psg._ladder._rungs import Result
from psg._torch import _functorch, _random
from psg.tree import concat


def run(call: Call, method: str, sizes: "Sizes", collect: Callable[[int, Result], None]) -> None:
    """Run a call chunk by chunk: `collect` gets each result and the position of its first sample, or one empty result if n is 0."""
    # Not a generator: that would turn a StopIteration that fn raises into another error.
    if call.n == 0:
        collect(0, _rungs.empty(call.with_sample_fn() if method == "batch" else call))
        return
    state, start, unused = call.shared_draws(), 0, True
    while start < call.n:
        _random.rewind(state)
        chunk = call.chunk(start, sizes.next(call))
        result = _ladder.run(chunk, method)
        sizes.learn(call, chunk.n, result)
        unused = unused and result.is_unused
        collect(start, result)
        del result  # frees its memory before the next chunk runs
        start += chunk.n
    if unused:
        _ladder.warn_of_unused(call)


class Sizes:
    """Chooses how many samples a chunk takes.

    Args:
        chunk_size: As the transforms take it.
    """

    def __init__(self, chunk_size: int | str | None) -> None:
        self.chunk_size = chunk_size
        self.bytes: dict[Any, int] = {}  # for one sample, by the shapes of the call

    def next(self, call: Call) -> int:
        """The number of samples in the next chunk of this call."""
        if not isinstance(self.chunk_size, str):
            return self.chunk_size or call.n
        taken = self.bytes.get(self._shapes(call))
        if taken is None:
            return max(1, min(call.n // 16, 64))
        return max(1, _memory.budget(self.chunk_size, call.leaves[call.params[0]].device) // taken)

    def learn(self, call: Call, count: int, result: Result) -> None:
        """Estimate from the result of `count` samples how many bytes one sample of such a call takes."""
        if not isinstance(self.chunk_size, str) or self._shapes(call) in self.bytes:
            return
        # Factors hold the layers' inputs and cotangents. The graph holds about as much again, for the ops between the layers.
        held = 2 * (result.freed + sum(factor.nbytes for factor in result.factors))
        materialized = count * sum(factor.sample_bytes for factor in result.factors) if call.kept == "gradients" else 0
        self.bytes[self._shapes(call)] = max(1, (held + materialized) // count)

    def _shapes(self, call: Call) -> Any:
        tensors = zip(call.tensors, call.tensor_dims, strict=True)
        return tuple((tensor.dtype, shape_of_sample(tensor, dim)) for tensor, dim in tensors)


# Collectors: each joins one kind of what transforms keep of a chunk.


class RowCollector:
    """Joins chunks of tensors with the samples in dim 0: writes each into its place at once, unless they may have a history."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.parts: list[list[Tensor]] = []
        self.whole: list[Tensor] = []

    @cached_property
    def may_have_history(self) -> bool:
        """Whether the mode in which the chunks are computed lets them have a history."""
        return torch.is_grad_enabled() or _functorch.is_watched()

    def add(self, start: int, rows: list[Tensor]) -> None:
        if not rows or len(rows[0]) == self.n or self.may_have_history:  # the only chunk is taken as it is
            self.parts.append(rows)
            return
        if start == 0:
            self.whole = [row.new_empty(self.n, *row.shape[1:]) for row in rows]
        self.whole = [whole.to(torch.promote_types(whole.dtype, row.dtype)) for whole, row in zip(self.whole, rows, strict=True)]
        for whole, row in zip(self.whole, rows, strict=True):
            whole[start : start + len(row)] = row

    def result(self) -> list[Tensor]:
        if len(self.parts) == 1:
            return self.parts[0]
        return self.whole or [torch.cat(column) for column in zip(*self.parts, strict=True)]


class FactorCollector:
    """Joins the factors of the chunks."""

    def __init__(self, n: int) -> None:
        self.parts: list[list[Any]] = []

    def add(self, start: int, factors: list[Any]) -> None:
        self.parts.append(factors)

    def result(self) -> list[Any]:
        return self.parts[0] if len(self.parts) == 1 else concat(self.parts)


class ClippedCollector:
    """Joins clipped sums of chunks: adds up the sums, and joins the rest by a `RowCollector`."""

    def __init__(self, n: int) -> None:
        self.rows = RowCollector(n)
        self.sums: list[Tensor] = []

    def add(self, start: int, part: ClippedSums) -> None:
        self.rows.add(start, [part.norms, *part.coefs, *part.group_norms])
        sums = [*part.sums, part.nonfinite]
        if not self.sums:
            self.sums = sums
        elif self.rows.may_have_history:
            self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)]
        else:
            torch._foreach_add_(self.sums, sums)  # pyright: ignore[reportPrivateImportUsage]

    def result(self) -> ClippedSums:
        norms, *groups = self.rows.result()
        *sums, nonfinite = self.sums
        half = len(groups) // 2
        return ClippedSums(sums, norms, groups[:half], groups[half:], nonfinite)
