"""torch's control flow (`torch.cond`, `while_loop`, `scan`, `map`) run as Python's.

torch compiles the functions that these ops are given, to find the tensors that they close over: parameters of a module, above all. psg
compiles nothing in fn, and the ops as they are would treat such tensors as constants. Python's control flow differentiates all.
(It also avoids torch's own gradients of `while_loop`, which are wrong in torch 2.11 to 2.15 where it runs more than once.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, additional: Any = (), /, **options: Any) -> Any:
    carried = tuple(carried)
    while cond_fn(*carried, *additional):
        carried = tuple(body_fn(*carried, *additional))
    return carried


def _scan(combine_fn: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Sequence[Any]) -> Any:
    carry: Any = init
    rows = []
    for items in zip(*[x.unbind() for x in xs], strict=True):
        output = combine_fn(*pytree.tree_leaves(carry), *items, *additional_inputs)
        if isinstance(combine_fn, fx.GraphModule):  # its output is flat
            output = output[: len(init)], output[len(init) :]
        carry, row = output
        rows.append(row)
    stacked = _stack(rows)
    return (*carry, *stacked) if isinstance(combine_fn, fx.GraphModule) else (carry, stacked)


def _map(f: Callable[..., Any], xs: Sequence[Tensor], args: Sequence[Any], **options: Any) -> Any:
    return _stack([f(*items, *args) for items in zip(*[x.unbind() for x in xs], strict=True)])


def _stack(rows: list[Any]) -> Any:
    """A list of trees as a tree of stacked tensors."""
    leaves, specs = zip(*map(pytree.tree_flatten, rows), strict=True)
    return pytree.tree_unflatten([torch.stack(column) for column in zip(*leaves, strict=True)], specs[0])


_ops = torch.ops.higher_order

CONTROL_FLOW: dict[Any, Callable[..., Any]] = {_ops.cond: _cond, _ops.while_loop: _while_loop, _ops.scan: _scan, _ops.map_impl: _map}
"""The ops, and what to call for each, with its arguments, where a mode watches fn."""
