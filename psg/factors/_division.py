"""Division: which samples belong to which segment."""

from functools import cached_property

import torch
from torch import Tensor

from psg._torch import _functorch


class Division:
    """A division of samples into segments. What depends on it alone is computed once, for all factors of a tree.

    Args:
        ids: Integers [n] in [0, count): the segment of each sample.
        count: The number of segments.
    """

    def __init__(self, ids: Tensor, count: int) -> None:
        self.ids = ids
        self.count = count

    @cached_property
    def order(self) -> Tensor | None:
        """The samples of the first segment, then those of the second, and so on; None if they are known to be in this order."""
        if _functorch.can_read_now(self.ids) and bool((self.ids[1:] >= self.ids[:-1]).all()):
            return None
        return self.ids.argsort(stable=True)

    @cached_property
    def sizes(self) -> Tensor:
        """How many samples each segment has, [count]. Not for traces, in which the largest id cannot be read."""
        return torch.bincount(self.ids, minlength=self.count)

    @cached_property
    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """See `tables_of`."""
        return tables_of(self.sizes)


def tables_of(sizes: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each power of two: the segments of at most that size and above half of it, and their samples, as `Factor.regroup` takes them.

    The samples are those of the first segment, then those of the second, and so on.
    """
    device, sizes = sizes.device, sizes.cpu()  # the only wait for a device
    n, starts = int(sizes.sum()), sizes.cumsum(0) - sizes
    powers = torch.where(sizes > 0, torch.frexp((sizes - 1).float()).exponent, -1)
    tables = []
    for power in set(powers.tolist()) - {-1}:
        members = (powers == power).nonzero()[:, 0]
        counts = sizes[members, None]
        places = torch.arange(int(counts.max()), device=sizes.device)
        table = torch.where(places < counts, starts[members, None] + places, n)
        tables.append((members.to(device), table.to(device)))
    return tables
