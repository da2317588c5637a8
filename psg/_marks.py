"""What a pass under vmap has made."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from psg import _functorch
from psg._errors import Stale


class Marks:
    """What one pass under vmap makes, so that what another has left behind is known for it: a new pass has the level of the last.

    Args:
        levels: The pass' own.
    """

    def __init__(self, *levels: int) -> None:
        self._levels = levels
        self._mark = object()

    def claim(self, output: Any, target: Any = None) -> None:
        """Mark what is made from the samples or the parameters of this pass, and what that is written into."""
        for tensor in (*output, target) if isinstance(output, (tuple, list)) else (output, target):
            if isinstance(tensor, Tensor) and _functorch.level_of(tensor) in self._levels:
                vars(tensor)["_psg_pass"] = self._mark

    def mark(self, output: Any) -> None:
        """Mark what no transform has wrapped, and was computed from the parameters of this pass nevertheless."""
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and not _functorch.is_wrapped(tensor):
                vars(tensor)["_psg_pass"] = self._mark

    def has_marked(self, leaves: Sequence[Any]) -> bool:
        """Whether one of these is of that kind."""
        return any(
            isinstance(leaf, Tensor) and leaf.__dict__.get("_psg_pass") is self._mark and not _functorch.is_wrapped(leaf) for leaf in leaves
        )

    def owns(self, leaves: Sequence[Any]) -> bool:
        """Whether one of these is marked. Raises Stale if one was made by another pass at this level."""
        marked = False
        for leaf in leaves:
            mark = leaf.__dict__.get("_psg_pass") if isinstance(leaf, Tensor) else None
            if mark is self._mark:
                marked = True
            elif mark is not None:
                level = _functorch.level_of(leaf)
                if level in self._levels or level < 0:  # what grad has wrapped has none after its end
                    raise Stale("a tensor of an earlier pass")
        return marked
