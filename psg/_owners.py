"""Which sample each row of a batch belongs to: measured, not guessed.

The cotangent of a row is linear in the weights of the losses: a second backward pass, for sum_i w_i losses[i] with distinct w_i, gives w_i
times the first one's on every row that only loss i depends on. So the ratio tells the sample, however fn has reshaped, sorted or routed
its rows. A row on which two losses depend has a ratio between weights, which with many samples may well be near that of a third; so a
third pass with other weights must name the same sample. What is accepted by chance then is a row in some 1000 of such. A share of another
loss that is as small as rounding, 3e-4 of a row or so, cannot be seen.

In bfloat16 rounding hides the weights of a dozen samples from each other. Powers of two it leaves alone: times one of them everything is
rounded as before, so that a row which only loss i depends on is that power times what it was, to the last bit. A code of such weights for
each sample, one a backward pass, tells any number of them apart, and a share of another loss at some 3e-2 of a row, or less.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from psg._errors import StateError


def loss_weights(losses: Tensor, seed: int) -> Tensor:
    """Distinct weights for a backward pass, [n]; those of two seeds have nothing to do with each other."""
    n, generator = len(losses), torch.Generator("cpu").manual_seed(seed)
    # In [1, 2], so that no sample's cotangent outweighs another's; shuffled and uneven, so that no pattern of fn's looks like one of ours
    # and no mean of two weights is a third.
    shuffled = torch.randperm(n, generator=generator, device="cpu")
    steps = shuffled + torch.rand(n, generator=generator, dtype=torch.float64, device="cpu") / 4
    return (1 + steps / n).to(losses)


def owners(op: str, cotangent: Tensor, weighted: Sequence[Tensor], weights: Sequence[Tensor], eps: float, rounding: float) -> Tensor:
    """Which sample each row [rows, *] belongs to, [rows]; n for a row that no loss depends on.

    Args:
        op: Whose output has the rows, for the message.
        cotangent: Of the sum of the losses.
        weighted: Of their weighted sums.
        weights: Those of the losses in each sum, [n].
        eps: That of the cotangents' dtype.
        rounding: How far off a row may be, relative to itself.

    Raises:
        StateError: A row's cotangents are not one sample's weights apart.
    """
    n, largest = len(weights[0]), torch.stack([side.abs().amax(1, keepdim=True) for side in (cotangent, *weighted)]).amax(0)
    used = largest[:, 0] != 0
    if n == 1:
        return torch.where(used, 0, 1)
    # In units of the row's largest entry, whose square may be beyond the dtype.
    unit, *others = (tensor / torch.where(largest == 0, 1, largest) for tensor in (cotangent, *weighted))
    squared = unit.square().sum(1)
    ordered, order = weights[0].sort()
    ratio = (unit * others[0]).sum(1) / torch.where(squared == 0, 1, squared)
    found = order[torch.searchsorted((ordered[1:] + ordered[:-1]) / 2, ratio)]
    residuals = [other - own[found][:, None] * unit for other, own in zip(others, weights, strict=True)]
    residual = torch.stack(residuals).square().sum(2).amax(0).sqrt()
    # Beyond a quarter of the distance between two weights rounding would hide them. What is negligible beside the largest row may be all
    # rounding; how much fn rounds, it shows on the larger rows.
    gap = 0.25 * float((ordered[1:] - ordered[:-1]).min())
    size = largest[:, 0] * squared.sqrt()
    relative = (residual / torch.where(used, squared, 1).sqrt())[size > 0.1 * size.max()]
    if len(relative):
        eps = max(eps, float(relative.sort().values[len(relative) // 2]))
    noise = min(100 * eps, rounding) if 100 * eps < gap else 0.0
    allowed = torch.maximum(min(gap, rounding) * squared.sqrt(), noise * size.max() / torch.where(used, largest[:, 0], 1))
    _expect_all(~used | (residual < allowed), op)
    return torch.where(used, found, n)


def _expect_all(told: Tensor, op: str) -> None:
    """Raise unless all rows are told whose they are."""
    if not bool(told.all()):
        raise StateError(
            f'method="batch": the output of {op} has a row on which more than one loss depends, or whose sample rounding hides. Each loss '
            "must depend on rows of its own; normalise over no batch, or use a smaller chunk_size or a wider dtype."
        )


_LEVELS = 32  # of a digit: weights from 2^-16 to 2^15


def codes(losses: Tensor) -> list[Tensor]:
    """Powers of two as weights for several backward passes, [n] each; no two samples have the same in all of them."""
    n, generator, count = len(losses), torch.Generator("cpu").manual_seed(0), 0
    while _LEVELS**count < n:
        count += 1
    index = torch.randperm(n, generator=generator, device="cpu") * (_LEVELS**count // n)
    digits = [index // _LEVELS**k % _LEVELS for k in range(count)]
    # Each the other way round too, so that of two samples either outweighs the other once; and one that tells codes from what is none.
    digits += [_LEVELS - 1 - digit for digit in digits]
    digits.append(torch.randint(_LEVELS, (n,), generator=generator, device="cpu"))
    return [torch.exp2((digit - _LEVELS // 2).double()).to(losses) for digit in digits]


def decoded(op: str, cotangent: Tensor, weighted: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """What `owners` gives, or raises, from weights of `codes`."""
    n, largest = len(weights[0]), torch.stack([side.abs().amax(1) for side in (cotangent, *weighted)])
    used, squared = (largest != 0).any(0), cotangent.square().sum(1)
    if n == 1:
        return torch.where(used, 0, 1)
    powers = [((side * cotangent).sum(1) / squared).log2().round() for side in weighted]
    # The one number that has these digits.
    places = _LEVELS ** torch.arange(len(weights), dtype=torch.float64, device=cotangent.device)
    ordered, order = (torch.stack(list(weights), 1).log2() @ places).sort()
    found = order[torch.searchsorted(ordered, torch.stack(powers, 1) @ places).clamp(max=n - 1)]
    off = [(side - own[found][:, None] * cotangent).abs().amax(1) / own[found] for side, own in zip(weighted, weights, strict=True)]
    _expect_all(~used | (torch.stack(off).amax(0) <= 4 * eps * largest[0]), op)  # by units: sums in another order
    return torch.where(used, found, n)


def groups(samples: Tensor, n: int) -> Tensor:
    """The rows of each of n samples, from what `owners` gives: [n, most rows of one], filled up with the number of rows for none."""
    rows = len(samples)
    ordered, order = samples.sort(stable=True)
    counts = torch.bincount(samples, minlength=n + 1)[:n]
    width = max(1, int(counts.max()) if n else 0)
    table = torch.full((n, width), rows, device=samples.device)
    starts = counts.cumsum(0) - counts
    kept = ordered < n
    table[ordered[kept], torch.arange(rows, device=samples.device)[kept] - starts[ordered[kept]]] = order[kept]
    return table
