"""Which sample each row of a batch belongs to: measured, not guessed.

The cotangent of a row is linear in the weights of the losses: a second backward pass, for sum_i w_i losses[i] with distinct w_i, gives w_i
times the first one's on every row that only loss i depends on. So the ratio tells the sample, however fn has reshaped, sorted or routed
its rows; and a row on which two losses depend is found out, for its ratio is none of the weights but by chance.
"""

import torch
from torch import Tensor

from psg._errors import StateError


def loss_weights(losses: Tensor) -> Tensor:
    """The distinct weights of the second backward pass, [n]."""
    n, generator = len(losses), torch.Generator().manual_seed(0)
    # In [1, 2], so that no sample's cotangent outweighs another's; shuffled and uneven, so that no pattern of fn's looks like one of ours
    # and no mean of two weights is a third.
    steps = torch.randperm(n, generator=generator) + torch.rand(n, generator=generator, dtype=torch.float64) / 4
    return (1 + steps / n).to(losses)


def owners(op: str, cotangent: Tensor, weighted: Tensor, weights: Tensor, eps: float, rounding: float) -> Tensor:
    """Which sample each row [rows, *] belongs to, [rows]; n for a row that no loss depends on.

    Args:
        op: Whose output has the rows, for the message.
        cotangent: Of the sum of the losses.
        weighted: Of their weighted sum.
        weights: Those of the losses.
        eps: That of the cotangents' dtype.
        rounding: How far off a row may be, relative to itself.

    Raises:
        StateError: A row's two cotangents are not one weight apart.
    """
    n, largest = len(weights), torch.maximum(cotangent.abs(), weighted.abs()).amax(1, keepdim=True)
    used = largest[:, 0] != 0
    if n == 1:
        return torch.where(used, 0, 1)
    # In units of the row's largest entry, whose square may be beyond the dtype.
    unit, other = (tensor / torch.where(largest == 0, 1, largest) for tensor in (cotangent, weighted))
    squared = unit.square().sum(1)
    ordered, order = weights.sort()
    ratio = (unit * other).sum(1) / torch.where(squared == 0, 1, squared)
    nearest = torch.searchsorted((ordered[1:] + ordered[:-1]) / 2, ratio)
    residual = (other - ordered[nearest][:, None] * unit).square().sum(1).sqrt()
    # Beyond a quarter of the distance between two weights rounding would hide them. What is negligible beside the largest row may be all
    # rounding; how much fn rounds, it shows on the larger rows.
    gap = 0.25 * float((ordered[1:] - ordered[:-1]).min())
    size = largest[:, 0] * squared.sqrt()
    relative = (residual / torch.where(used, squared, 1).sqrt())[size > 0.1 * size.max()]
    if len(relative):
        eps = max(eps, float(relative.sort().values[len(relative) // 2]))
    noise = 100 * eps if 100 * eps < gap else 0.0
    allowed = torch.maximum(min(gap, rounding) * squared.sqrt(), noise * size.max() / torch.where(used, largest[:, 0], 1))
    if bool((used & ~(residual < allowed)).any()):
        raise StateError(
            f'method="batch": the output of {op} has a row on which more than one loss depends, or whose sample rounding hides. Each loss '
            "must depend on rows of its own; normalise over no batch, or use a smaller chunk_size or a wider dtype."
        )
    return torch.where(used, order[nearest], n)


def groups(owners: Tensor, n: int) -> Tensor:
    """The rows of every sample, [n, most rows of one], filled up with the number of rows."""
    rows = len(owners)
    ordered, order = owners.sort(stable=True)
    counts = torch.bincount(owners, minlength=n + 1)[:n]
    width = max(1, int(counts.max()))
    table = torch.full((n, width), rows, device=owners.device)
    starts = counts.cumsum(0) - counts
    kept = ordered < n
    table[ordered[kept], torch.arange(rows, device=owners.device)[kept] - starts[ordered[kept]]] = order[kept]
    return table
