"""Measures which sample each row of a batch belongs to.

A row's cotangent is linear in the weights of the losses. A backward pass for sum_i w_i losses[i] multiplies the cotangent of every row on
which only loss i depends by w_i, however fn has reshaped, sorted or routed its rows. Weights that are powers of two change no rounding, so
the weighted cotangent is w_i times the plain one to the last bit. Each sample gets a code: one exponent for each weighted pass. The ratios
of a row's cotangents spell the code of its sample.

The exponents of a code have the same sum for all samples. So of two samples, either has the larger weight in some pass, and a share of
another loss shows at its full size or more. By Hölder's inequality a row that is a mean of several samples' spells no code: the product of
its ratios is larger than that of any code.

Where fn subtracts running sums, say, cotangents of other samples cancel but for rounding errors, and large weights amplify these. If a
measurement with few passes fails, another with more passes and weights of 1 and 2 decides.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._errors import PsgError

_HALVES = {torch.float16, torch.bfloat16}
_SINGLE, _HALF = 2**-16, 2**-5
"""Relative rounding errors allowed in single and double precision, and in 16 bits: an accelerator may add up in another order each time.

Functions of double precision often round to single precision somewhere.
"""


class NotFinite(PsgError):
    """A row has an infinite or NaN cotangent, so its sample cannot be measured.

    Attributes:
        groups: Samples to run together: all samples with finite losses, and each other sample alone. If all losses are finite, each alone.
    """

    def __init__(self, losses: Tensor) -> None:
        finite = losses.isfinite()
        together, alone = finite.nonzero()[:, 0], (~finite).nonzero()[:, 0]
        names = ", ".join(f"losses[{i}]" for i in alone[:5].tolist()) + (", ..." if len(alone) > 5 else "")
        super().__init__(f"not finite: {names or 'a gradient of finite losses'}")
        groups = (together, *alone.split(1)) if len(alone) else together.split(1)
        self.groups = [group for group in groups if len(group)]


def measure(losses: Tensor, rows: list[Tensor], weighted: Callable[[Tensor], list[Tensor]]) -> list[Tensor | None]:
    """The sample of each row, by `owners`, for each op that a backward pass reaches.

    Args:
        losses: [n].
        rows: The cotangents of the plain sum of the losses at each op's output, [rows, *].
        weighted: Gives the same for a sum with these weights, [n], by a backward pass of its own.

    Returns:
        For each op what `owners` returns.

    Raises:
        NotFinite: A cotangent is infinite or NaN.
    """
    n = len(losses)
    if n == 1 or not rows:
        return [torch.zeros(len(own), dtype=torch.long, device=own.device) for own in rows]
    found: list[Tensor | None] = []
    sides: list[list[Tensor]] = []
    dtypes = {losses.dtype, *(own.dtype for own in rows)}
    coarsest = _HALF if dtypes & _HALVES else _SINGLE
    for most in (8 if torch.float16 in dtypes else 64, 1):  # float16 has few exponents
        exponents, strict = codes(n, most).to(losses.device), most > 1
        sides = [weighted(powers.to(losses).exp2()) for powers in exponents]
        found = [
            owners(own, others, exponents, _HALF if own.dtype in _HALVES else _SINGLE if strict else coarsest, strict)
            for own, *others in zip(rows, *sides, strict=True)
        ]
        if all(samples is not None for samples in found):
            return found
    if not all(own.isfinite().all() for others in sides for own in others):
        raise NotFinite(losses)
    return found


def codes(n: int, most: int) -> Tensor:
    """Different codes for n samples: exponents of two, [passes, n], from 0 to at most `most`."""
    passes = 2
    while _all_codes(passes, most).shape[1] < n:
        passes += 1
    # The smallest weights that suffice amplify rounding errors least.
    least = 1 + bisect_left(range(1, most), n, key=lambda most: _all_codes(passes, most).shape[1])
    found = _all_codes(passes, least)
    return found[:, torch.randperm(found.shape[1], generator=torch.Generator("cpu").manual_seed(0), device="cpu")[:n]]


def _all_codes(passes: int, most: int) -> Tensor:
    """All columns of exponents from 0 to `most` with one sum, [passes, *]; none is negative, or small cotangents would underflow."""
    free = torch.cartesian_prod(*[torch.arange(most + 1, device="cpu")] * (passes - 1)).reshape(-1, passes - 1)
    last = passes * most // 2 - free.sum(1, keepdim=True)
    return torch.cat([free, last], 1)[((last >= 0) & (last <= most))[:, 0]].T


def sets_apart(n: int) -> Tensor:
    """Sets of samples, [sets, n], such that of any two samples either is in a set without the other."""
    count = 2
    while math.comb(count, count // 2) < n:
        count += 1
    # Each sample is in half of the sets, no two in the same ones (E. Sperner, "Ein Satz über Untermengen einer endlichen Menge", 1928).
    own = itertools.islice(itertools.combinations(range(count), count // 2), n)
    return F.one_hot(torch.tensor([*own]), count).sum(1).T


def are_apart(samples: Tensor, members: Sequence[Tensor], cotangents: Sequence[Tensor]) -> bool:
    """Whether no row depends on another sample than its own, by however little.

    A sample whose cotangents are by far the largest hides the others' from `owners`, which allows for rounding errors. Of a sum over some
    of the losses, rows of other samples have cotangents of exactly zero, which rounding leaves as they are.

    Args:
        samples: The sample of each row, from `owners`.
        members: Which samples are in each set of `sets_apart`, [n].
        cotangents: The rows' cotangents of the sum over each set's losses, [rows, *].
    """
    known = samples < len(members[0])
    alone = [~(known & own[samples.clamp(max=len(own) - 1)].bool()) for own in members]
    return all(not bool(rows[others].any()) for rows, others in zip(cotangents, alone, strict=True))


def owners(cotangent: Tensor, weighted: Sequence[Tensor], exponents: Tensor, rounding: float, strict: bool) -> Tensor | None:
    """The sample of each row, [rows]; n for a row whose cotangent is zero; None if some row fits no sample.

    Args:
        cotangent: The cotangents of the plain sum of the losses, [rows, *].
        weighted: The same for each weighted sum.
        exponents: The codes, [passes, n].
        rounding: How far a row may be off, relative to its largest entry.
        strict: Whether this must hold for every row; otherwise a row may also be off by rounding of single precision in the largest row.
    """
    n = exponents.shape[1]
    at = cotangent.abs().argmax(1, keepdim=True)
    largest = cotangent.gather(1, at)
    digits = torch.cat([side.gather(1, at) / largest for side in weighted], 1).double().log2().round()
    places = (1 + exponents.max().double()) ** torch.arange(len(exponents), device=cotangent.device)
    ordered, order = (places @ exponents.double()).sort()
    found = order[torch.searchsorted(ordered, digits @ places).clamp(max=n - 1)]
    allowed = rounding * largest.abs()
    if not strict:
        allowed = torch.maximum(allowed, _SINGLE * largest.abs().max())
    fits = torch.ones_like(largest, dtype=torch.bool)
    for side, powers in zip(weighted, exponents, strict=True):
        weight = powers[found, None].to(cotangent).exp2()
        fits &= (side - weight * cotangent).abs().amax(1, keepdim=True) <= allowed * weight
    return torch.where(largest[:, 0] == 0, n, found) if bool(fits.all()) else None


def groups(samples: Tensor, n: int) -> Tensor:
    """The rows of each sample, [n, most rows of one sample], padded with the number of rows.

    Args:
        samples: The sample of each row, from `owners`.
        n: The number of samples.
    """
    rows = len(samples)
    order = F.pad(samples.argsort(stable=True), (0, 1), value=rows)  # rows of no sample come last
    counts = torch.bincount(samples, minlength=n + 1)[:n, None]
    places = torch.arange(max(1, int(counts.max())), device=samples.device)
    found = counts.cumsum(0) - counts + places
    return torch.where(places < counts, order[found.clamp(max=rows)], rows)
