"""The backward pass of a capture: one for all taps and leaves. Large cotangents are taken as they arrive."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from psg import _autograd, _functorch
from psg._errors import Unsupported
from psg._lifted import Lifted, Tap
from psg.factors import Dense, Factor

LARGE = 2 << 20  # bytes; below, what it costs to go from autograd to Python and back is more than the memory is worth


class Backward:
    """What arrives is added to the terms of the lifted values.

    Args:
        values: The lifted values.
        n: The number of samples.
        settles: Whether factors are settled as they are found; else they are left as they are.

    Attributes:
        nbytes: What the factors took when they were found.
    """

    def __init__(self, values: Sequence[Lifted], n: int, settles: bool) -> None:
        self.values = values
        self.n = n
        self.settles = settles
        self.nbytes = 0

    def run(self, losses: Tensor, taps: list[Tap]) -> None:
        """Differentiate the sum of the losses. The taps are taken out of their list, so that nothing else holds what they hold."""
        if not losses.requires_grad:
            return  # no parameter was used
        asked = self._hooked(taps)
        targets: Any = [edge for tap in asked for edge in tap.edges] + [value.leaf for value in self.values]
        cotangents = iter(_autograd.gradients(losses, targets))
        with torch.no_grad():
            for tap in asked:
                self._collect(tap, [next(cotangents) for _ in tap.edges])
            for value in self.values:
                cotangent = next(cotangents)
                if cotangent is not None:
                    self._add(value, Dense(cotangent))

    def _hooked(self, taps: list[Tap]) -> list[Tap]:
        """Arrange that large cotangents are taken as they arrive; returns the taps whose cotangents must be asked for."""
        left = list(taps)
        taps.clear()
        if not self.settles or _functorch.is_traced() or not any(map(_is_worth_a_hook, left)):
            return left
        tapped = Counter(id(value) for tap in left for _, value, _ in tap.builders)
        asked: list[Tap] = []
        reached: set[Any] = set()
        # In the order of the forward pass. Autograd stops at a node that is asked for, and runs one from which it goes on to such.
        while left:
            tap = left.pop(0)
            if _is_worth_a_hook(tap) and _leads_to(tap.edges[0].node, reached):
                self._hook(tap, [value.derived is None and tapped[id(value)] == 1 for _, value, _ in tap.builders])
            else:
                asked.append(tap)
            reached.update(edge.node for edge in tap.edges)
        return asked

    def _hook(self, tap: Tap, alone: list[bool]) -> None:
        waiting = [tap]  # let go of with the cotangent
        node, index = tap.edges[0].node, tap.edges[0].output_nr

        def take(cotangents: tuple[Tensor | None, ...]) -> None:
            with torch.no_grad():
                self._collect(waiting.pop(), [cotangents[index]], alone)

        node.register_prehook(take)

    def _collect(self, tap: Tap, arrived: list[Tensor | None], alone: Sequence[bool] = ()) -> None:
        """Build the factors; those that are alone in what becomes of their parameter are settled."""
        if all(cotangent is None for cotangent in arrived):
            return
        if tap.is_outdated:
            raise Unsupported(f"an input of {tap.op} was changed in place after {tap.op} had read it")
        for i, (value, factor) in enumerate(tap.factors(arrived, self.n)):
            self._add(value, factor, i < len(alone) and alone[i])

    def _add(self, value: Lifted, factor: Factor, alone: bool = False) -> None:
        self.nbytes += factor.nbytes
        value.terms.append(factor.settle() if self.settles and alone else factor)


def _is_worth_a_hook(tap: Tap) -> bool:
    # Where the gradients of all samples take less than the cotangent: what is made of them never takes more.
    formed = sum(value.leaf.nbytes for _, value, _ in tap.builders)
    return tap.shapes is None and tap.nbytes >= max(LARGE, formed)


def _leads_to(node: Any, reached: set[Any]) -> bool:
    """Whether the backward pass goes from this node to one of those."""
    seen: set[Any] = set()
    ahead = [node]
    while ahead:
        for following, _ in ahead.pop().next_functions:
            if following in reached:
                return True
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return False
