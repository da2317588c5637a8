"""torch's ops that are given functions, run as plain Python.

These are control flow (`torch.cond`, `while_loop`, `scan`, `map`), `flex_attention`, and the triplet loss with a distance function.

torch compiles the functions that most of these ops are given, to find the tensors that they close over: parameters of a module, above all.
psg compiles nothing in fn, and the ops as they are would treat such tensors as constants. In Python, autograd and rules see them all.
(It also avoids torch's own gradients of `while_loop`, which are wrong in torch 2.13 and 2.15 where it runs more than once.)
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from psg._errors import InputError


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, additional: Any = (), /, **options: Any) -> Any:
    carried = tuple(carried)
    leaves: Sequence[Any] = carried
    while cond_fn(*leaves, *additional):
        carried = tuple(body_fn(*leaves, *additional))
        leaves = pytree.tree_leaves(carried)  # torch hands on the leaves of nested values, and returns the values
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


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any,
    score_mod_buffers: Sequence[Any] = (),
    mask_mod_buffers: Sequence[Any] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(score_mod(scale Q K^T)) V with -inf where mask_mod is False; logsumexp and maximum of the scores to the base 2."""
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    key, value = (side.repeat_interleave(query.shape[1] // key.shape[1], 1).expand(query.shape[0], -1, -1, -1) for side in (key, value))
    scores = scale * (query.to(compute) @ key.to(compute).mT)
    numbers = [torch.arange(size, device=query.device) for size in scores.shape]
    with _IndexByTensors():
        allowed = _for_all_pairs(block_mask[-1], 0, len(mask_mod_buffers))(*numbers, *mask_mod_buffers)
        scores = _for_all_pairs(score_mod, 1, len(score_mod_buffers))(scores, *numbers, *score_mod_buffers)
    scores = torch.where(allowed, scores, -math.inf)
    weights = torch.where(allowed.any(-1, keepdim=True), scores, 0).softmax(-1)
    output = torch.where(allowed, weights, 0).to(query.dtype) @ value
    return output, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


def _for_all_pairs(mod: Callable[..., Tensor], scores: int, buffers: int) -> Callable[..., Tensor]:
    """A function of one score and its numbers b, h, q, k, for all of them: [b, h, q, k]."""
    for own in reversed(range(4)):
        mod = torch.vmap(mod, (*[0] * scores, *(0 if i == own else None for i in range(4)), *[None] * buffers))
    return mod


def triplet_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """max(0, margin + d(anchor, positive) - d(anchor, negative)), reduced; with `swap` the lesser of the negative's two distances."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    if not anchor.ndim == positive.ndim == negative.ndim:
        raise RuntimeError("The anchor, positive, and negative tensors are expected to have the same number of dimensions")
    distance = F.pairwise_distance if distance_function is None else distance_function
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    loss = (margin + near - far).clamp_min(0)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


class _IndexByTensors(TorchFunctionMode):
    """Where an index is a number that vmap sees as a tensor, torch's own indexing would ask for its Python value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(own, Tensor) for own in index):
                return torch.ops.aten.index.Tensor(args[0], list(index))
        return func(*args, **(kwargs or {}))


_ops = torch.ops.higher_order

HIGHER_ORDER: dict[Any, Callable[..., Any]] = {
    _ops.cond: _cond,
    _ops.while_loop: _while_loop,
    _ops.scan: _scan,
    _ops.map_impl: _map,
    _ops.flex_attention: _flex_attention,
    F.triplet_margin_with_distance_loss: triplet_loss,
}
"""The ops, and what to call for each, with its arguments, where a mode watches fn."""


def refuse_others(op: Any, args: Sequence[Any]) -> None:
    """Raise if this is another higher-order op, given a function of Python: what that closes over would count as a constant.

    Raises:
        InputError: It is.
    """
    if isinstance(op, HigherOrderOperator) and any(isinstance(own, (FunctionType, MethodType, partial)) for own in args):
        raise InputError(
            f"fn calls {op.name()}, a higher-order op for which psg has no rule: the gradients of tensors that its function closes over "
            "would be lost. Call that function from Python instead."
        )
