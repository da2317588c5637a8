"""Marks on the tensors that a pass under vmap has made."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack

from psg._errors import Stale
from psg._torch import _functorch


class _OfPass:
    """The mark of what a pass makes.

    Args:
        number: How many passes have begun before it.
    """

    def __init__(self, number: int) -> None:
        self.number = number


_numbers = itertools.count()


class Marks:
    """Marks the tensors that one pass under vmap makes, to tell them from those of an earlier pass, which had the same level.

    For every op that fn calls, the pass asks for the mark of the arguments (`owns`). If there is one, the output depends on the samples or
    the parameters, and gets it too (`claim`). Otherwise the output is remembered (`note`), since it may be filled from them later, through
    a view. Constants computed from parameters, which vmap does not wrap, are marked by `mark`.

    Args:
        levels: The levels of the pass' own transforms.

    Attributes:
        made: The mark of tensors that the pass has made.
        drawn: The mark of tensors that depend on random numbers, of which every sample draws its own.
        assumed: The mark that `is_drawn` assumes where there is none, as on what comes out of fn's own transforms: `drawn`, once fn draws.
    """

    def __init__(self, *levels: int) -> None:
        self._levels = levels
        number = next(_numbers)
        self.made, self.drawn = _OfPass(number), _OfPass(number)
        self.assumed: object | None = None
        self._unmarked: dict[StorageWeakRef, list[ref[Tensor]]] = {}  # outputs noted, by their storage

    def claim(self, output: Any, target: Any = None, mark: object | None = None) -> None:
        """Mark an output made from the samples or the parameters of this pass, and the target that it is written into, with its views.

        The mark is what `owns` has returned for the arguments; by default it says nothing of random numbers.
        """
        if target is not None:
            output = (*output, target) if isinstance(output, (tuple, list)) else (output, target)
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and _functorch.level_of(tensor) in self._levels:
                vars(tensor)["_psg_pass"] = mark or self.made
        if target is not None and self._unmarked:
            for own in target if isinstance(target, (tuple, list)) else (target,):
                if isinstance(own, Tensor) and own.layout == torch.strided:
                    viewed = [view() for view in self._unmarked.pop(_functorch.storage_of(own), ())]
                    self.claim([view for view in viewed if view is not None], mark=mark)

    def note(self, output: Any) -> None:
        """Note an output made from neither, which may be filled from them through a view of it."""
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and _functorch.level_of(tensor) in self._levels and tensor.layout == torch.strided:
                self._unmarked.setdefault(_functorch.storage_of(tensor), []).append(ref(tensor))

    def note_new(self, output: Any) -> None:
        """Note a tensor that fn has made in memory of its own, and that no transform has wrapped."""
        if type(output) is Tensor and output.layout is torch.strided and not _functorch.is_wrapped(output):
            vars(output)["_psg_new"] = self.made

    def note_view(self, output: Tensor, view: Callable[[Tensor], Tensor]) -> None:
        """Note a view of such a tensor, and what makes it of that."""
        vars(output)["_psg_view"] = self.made, view

    def view_of(self, tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
        """What makes a tensor of the one that it is a view of, if it has been noted."""
        made, view = vars(tensor).get("_psg_view", (None, None))
        return view if made is self.made else None

    def forget_new(self, tensor: Tensor) -> None:
        """Forget what is noted of it: it has been wrapped, or is in other memory."""
        vars(tensor).pop("_psg_new", None)
        vars(tensor).pop("_psg_view", None)

    def disown(self, tensor: Tensor) -> None:
        """Take the mark of the pass off a tensor that is none of its own any more."""
        vars(tensor).pop("_psg_pass", None)

    def is_new(self, tensor: Tensor) -> bool:
        """Whether it is such a tensor."""
        return vars(tensor).get("_psg_new") is self.made

    def mark(self, output: Any, given: Sequence[Tensor] = ()) -> None:
        """Mark an output that no transform has wrapped, though it was computed from the parameters of this pass; `given` are not marked."""
        known = set(map(id, given))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and id(tensor) not in known and not _functorch.is_wrapped(tensor):
                vars(tensor)["_psg_pass"] = self.made

    def has_marked(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `mark` has marked one of these, which no transform has wrapped."""
        return any(tensor.__dict__.get("_psg_pass") is self.made and not _functorch.is_wrapped(tensor) for tensor in tensors)

    def owns(self, tensors: Sequence[Tensor]) -> object | None:
        """The mark of this pass on one of these, `drawn` before the other; None if there is none.

        Raises:
            Stale: One was made by another pass, at this level or before this pass began.
        """
        found = None
        for tensor in tensors:
            mark = tensor.__dict__.get("_psg_pass")
            if mark is self.made:
                found = found or mark
            elif mark is self.drawn:
                found = mark
            elif mark is not None:
                level = _functorch.level_of(tensor)  # below 0: without a wrapper, or with one of a grad that has ended
                # Passes inside of this one have begun later. At the level of an earlier one there may be a transform of the user's by now.
                may_have_ended = level < 0 or isinstance(mark, _OfPass) and mark.number < self.made.number
                if level in self._levels or may_have_ended and not _is_of_running_pass(mark):
                    raise Stale("a tensor of an earlier pass")
        return found

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether this tensor depends, or may depend, on random numbers, of which every sample draws its own."""
        return tensor.__dict__.get("_psg_pass", self.assumed) is self.drawn


class OfFunction:
    """The mark of what an autograd.Function computes in one call under a vmap of its own: it may keep that where its next call finds it."""

    def claim(self, output: Any) -> None:
        """Mark an output."""
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and _functorch.is_wrapped(tensor):
                vars(tensor)["_psg_pass"] = self

    def is_foreign(self, tensor: Tensor) -> bool:
        """Whether another call, or a pass, has made this tensor."""
        return vars(tensor).get("_psg_pass", self) is not self


def is_marked(tensor: Tensor) -> bool:
    """Whether a pass, or an autograd.Function in it, has made this tensor from the samples or the parameters."""
    return "_psg_pass" in vars(tensor)


def _is_of_running_pass(mark: object) -> bool:
    """Whether a mark is that of a pass around this one, whose fn has called psg."""
    passes = (getattr(mode, "own", None) for mode in _get_current_function_mode_stack())
    return any(isinstance(own, Marks) and mark in (own.made, own.drawn) for own in passes)
