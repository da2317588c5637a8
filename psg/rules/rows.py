"""How the ops that have rules hold rows: what of their data is one row, which belongs to one sample or to none.

Used where fn sees a whole batch, in whatever layout: every row is then treated as a sample of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg.factors import Dense
from psg.rules._registry import Rule

Split = tuple[dict[str, Any], Callable[[torch.Size], tuple[int, ...]]]
"""The data with the rows in dim 0, as a rule expects samples; and the output's own shape from the one that the rule gives."""

_splits: dict[Any, tuple[Callable[[dict[str, Any]], Split | None], set[str]]] = {}


def split_rows(op: Any, arguments: dict[str, Any], params: set[str]) -> Split | None:
    """Split the data of a call with these parameters; None if it is not known how."""
    split, known = _splits.get(op, (None, set()))
    return None if split is None or not params <= known else split(arguments)


def _splits_of(*ops: Any, params: tuple[str, ...] = ("weight", "bias")) -> Callable[[Callable[[dict[str, Any]], Split | None]], None]:
    def register(split: Callable[[dict[str, Any]], Split | None]) -> None:
        _splits.update(dict.fromkeys(ops, (split, set(params))))

    return register


def _leading(tensor: Tensor, kept: int) -> tuple[Tensor, tuple[int, ...]]:
    """[*rows, *kept dimensions] -> [rows, *kept dimensions], and the rows' own shape."""
    lead = tuple(tensor.shape[: tensor.ndim - kept])
    return tensor.reshape(-1, *tensor.shape[tensor.ndim - kept :]), lead


def _last_dimension(arguments: dict[str, Any]) -> Split | None:
    input, lead = _leading(arguments["input"], 1)
    return {"input": input}, lambda shape: (*lead, *shape[1:])


_splits_of(F.linear)(_last_dimension)
_splits_of(torch.matmul, Tensor.matmul, Tensor.__matmul__, params=("other",))(_last_dimension)


@_splits_of(torch.mm, Tensor.mm, params=("mat2",))
def _(arguments: dict[str, Any]) -> Split | None:
    return {"input": arguments["input"].unsqueeze(1)}, lambda shape: (shape[0], shape[2])


@_splits_of(torch.addmm, Tensor.addmm, params=("input", "mat2"))
def _(arguments: dict[str, Any]) -> Split | None:
    if arguments["input"].ndim != 1:
        return None  # a row of its own for every row, or the same for all: there is no telling
    return {"mat1": arguments["mat1"].unsqueeze(1)}, lambda shape: (shape[0], shape[2])


@_splits_of(F.layer_norm, F.rms_norm)
def _(arguments: dict[str, Any]) -> Split | None:
    input, lead = _leading(arguments["input"], len(arguments["normalized_shape"]))
    return {"input": input}, lambda shape: (*lead, *shape[1:])


@_splits_of(F.embedding)
def _(arguments: dict[str, Any]) -> Split | None:
    if arguments.get("scale_grad_by_freq"):
        return None  # the frequency would be that in the batch: a sample's gradient would depend on the others
    lead = arguments["input"].shape
    return {"input": arguments["input"].reshape(-1)}, lambda shape: (*lead, *shape[1:])


@_splits_of(F.conv1d, F.conv2d, F.conv3d)
def _(arguments: dict[str, Any]) -> Split | None:
    if arguments["input"].ndim != arguments["weight"].ndim:
        return None  # a single image: there is no telling its rows apart
    return {}, tuple


@_splits_of(F.group_norm, F.instance_norm)
def _(arguments: dict[str, Any]) -> Split | None:
    return {"input": arguments["input"].unsqueeze(1)}, lambda shape: (shape[0], *shape[2:])


# Products and sums with a parameter that has the shape of a row. Under vmap lifting does these; without it they need a rule.

_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


@_splits_of(*_PRODUCTS, *_SUMS)
def _(arguments: dict[str, Any]) -> Split | None:
    input, weight = arguments["input"], arguments["weight"]
    shape = _row_shape(weight)
    if not isinstance(input, Tensor) or input.shape[input.ndim - len(shape) :] != shape or weight.is_complex():
        return None
    rows, lead = _leading(input, len(shape))
    return {"input": rows}, lambda output: (*lead, *output[1:])


def _row_shape(weight: Tensor) -> torch.Size:
    """The weight's shape without leading ones."""
    return weight.shape[next((i for i, size in enumerate(weight.shape) if size != 1), weight.ndim) :]


def _product(input: Tensor, weight: Tensor) -> Any:
    """y = x w: ([rows,*shape], [1,*shape]) -> [rows,*shape]."""
    own = weight.shape
    output = input * weight.reshape(_row_shape(weight))
    return output, {"weight": lambda cotangent: Dense((cotangent * input).reshape(len(input), *own))}


def _sum(input: Tensor, weight: Tensor) -> Any:
    """y = x + b: ([rows,*shape], [1,*shape]) -> [rows,*shape]."""
    own = weight.shape
    output = input + weight.reshape(_row_shape(weight))
    return output, {"weight": lambda cotangent: Dense(cotangent.reshape(len(input), *own))}


ELEMENTWISE = dict.fromkeys(_PRODUCTS, Rule.of(_product, ("weight",)))
ELEMENTWISE |= dict.fromkeys(_SUMS, Rule.of(_sum, ("weight",)))
