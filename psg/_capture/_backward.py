"""The one backward pass of a capture, for all taps and leaves. Large cotangents become factors as soon as they arrive."""

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from psg._capture._lifted import Lifted, Tap
from psg._errors import Unsupported
from psg._torch import _autograd, _functorch
from psg.factors import Dense

LARGE = 2 << 20  # bytes; for a smaller cotangent, a Python hook in autograd costs more than the saved memory is worth


class Backward:
    """Runs the backward pass, and adds the factors that come of it to the terms of the lifted values.

    Args:
        values: The lifted values.
        n: The number of samples.
        settles: Whether to take large cotangents by hooks, and settle their factors at once (`Factor.settle`).
        differentiated: Whether the factors keep a history.
        written: A context for autograd's own part, in which backward passes that users have written are watched.

    Attributes:
        freed: How many bytes settling the factors has freed.
    """

    def __init__(self, values: Sequence[Lifted], n: int, settles: bool, differentiated: bool, written: AbstractContextManager[Any]) -> None:
        self.values = values
        self.n = n
        self.settles = settles and not differentiated
        self.differentiated = differentiated
        self.written = written
        self.freed = 0
        self._waiting: list[list[Tap]] = []  # for each hook the tap whose cotangent it takes, until it has

    def run(self, losses: Tensor, taps: list[Tap], others: Sequence[GradientEdge]) -> None:
        """Differentiate the sum of the losses, also with respect to `others`, for what autograd calls on the way there.

        Empties the list of taps, so that each tap's tensors can be freed after its use.
        """
        if not losses.requires_grad:
            return  # no parameter was used
        asked = self._hook_large(taps)
        targets: Any = [edge for tap in asked for edge in tap.edges] + [value.leaf for value in self.values] + [*others]
        again, ones = self.differentiated, torch.ones_like(losses)
        try:
            with self.written:
                cotangents = iter(_autograd.pulled((losses,), targets, (ones,), retain_graph=again, create_graph=again))
        finally:
            # The hook of a node that the losses do not depend on is not called; its tap holds the node, which holds the hook.
            for waiting in self._waiting:
                waiting.clear()
        with torch.set_grad_enabled(self.differentiated):
            for tap in asked:
                self._collect(tap, list(islice(cotangents, len(tap.edges))))
            for value in self.values:
                cotangent = next(cotangents)
                if cotangent is not None:
                    value.terms.append(Dense(_autograd.dense(cotangent)))

    def _hook_large(self, taps: list[Tap]) -> list[Tap]:
        """Hook the taps whose large cotangents are taken as they arrive; return the others, whose cotangents autograd must return."""
        left = list(taps)
        taps.clear()
        if not self.settles or _functorch.is_traced() or not any(map(_is_worth_a_hook, left)):
            return left
        tapped = Counter([id(value) for tap in left for _, value, _ in tap.builders if value.made_by is None])
        alone = {key for key, times in tapped.items() if times == 1}
        asked: list[Tap] = []
        reached: set[Any] = set()
        # In the order of the forward pass: autograd runs a node, and its prehook, only if it leads to one whose gradient is requested.
        for tap in left:
            if _is_worth_a_hook(tap) and _leads_to(tap.edges[0].node, reached):
                self._hook(tap, alone)
            else:
                asked.append(tap)
            reached.update([edge.node for edge in tap.edges])
        return asked

    def _hook(self, tap: Tap, alone: set[int]) -> None:
        waiting = [tap]  # emptied by the hook, so that the tap is freed with its cotangent
        self._waiting.append(waiting)
        node, index = tap.edges[0].node, tap.edges[0].output_nr
        context = copy_context()  # `plans.using`, say: an accelerator's cotangents arrive in a thread of autograd's own

        def take(cotangents: tuple[Tensor | None, ...]) -> None:
            with torch.no_grad(), torch._C.DisableTorchFunction():  # `written` watches others' ops, not psg's
                context.run(self._collect, waiting.pop(), [cotangents[index]], alone)

        node.register_prehook(take)

    def _collect(self, tap: Tap, arrived: list[Tensor | None], alone: Collection[int] = ()) -> None:
        """Build the tap's factors; settle those of the values with these ids, which have no other."""
        if all([cotangent is None for cotangent in arrived]):
            return
        if tap.is_outdated:
            raise Unsupported(f"an input of {tap.op} was changed in place after {tap.op} had read it")
        for value, factor in tap.factors(arrived, self.n):
            if id(value) in alone:
                held, factor = factor.nbytes, factor.settle()
                self.freed += held - factor.nbytes
            value.terms.append(factor)


def _is_worth_a_hook(tap: Tap) -> bool:
    if tap.zeros is not None or tap.nbytes < LARGE:
        return False
    # The per-sample gradients must not take more memory than the cotangent: a settled factor never takes more than they do.
    return tap.nbytes >= sum([value.leaf.nbytes for _, value, _ in tap.builders])


def _leads_to(node: Any, reached: set[Any]) -> bool:
    """Whether the backward pass goes from this node to one of those in `reached`."""
    return any(following in reached for following in _autograd.nodes_of(node) if following is not node)
