"""Tells which tensors of a batch's pass were computed from the batch, by the ops that the mode sees.

A tensor that was not may still hold data of the samples: by way of Python numbers, a closure, or an op that no mode sees.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from psg._torch._ops import CONVERTING, LIKENESSES, name_of, tensors_of
from psg._watch._writes import written


class Sampled:
    """The tensors that one pass computes from the batch, and views of them.

    Args:
        tensors: The arguments that have a dimension of samples.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._mark = object()
        self._claim(tensors)

    def __contains__(self, tensor: Tensor) -> bool:
        base = tensor._base
        return self._is_marked(tensor) or (base is not None and self._is_marked(base))

    def follow(self, func: Any, tensors: Sequence[Tensor], output: Any, target: Any) -> None:
        """Record an op that has run on these tensors: if one depends on the samples, so do its output and what it wrote into."""
        used = () if func in LIKENESSES else tensors[:1] if name_of(func) in CONVERTING else tensors
        if any(tensor in self for tensor in used):
            self._claim(tensors_of((output,), {}))
            targets = written(target)
            self._claim([*targets, *(tensor._base for tensor in targets if tensor._base is not None)])

    def _claim(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            vars(tensor)["_psg_sampled"] = self._mark

    def _is_marked(self, tensor: Tensor) -> bool:
        return vars(tensor).get("_psg_sampled") is self._mark
