"""Attention has no parameters of its own; its rule folds the samples into the batch that the native fused kernels know."""

import math
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg.rules._registry import decomposition, rule


@rule(F.scaled_dot_product_attention, params=())
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(scale q k^T + mask) v: ([n,*,h,t,e], [n,*,h,s,e], [n,*,h,s,f]) -> [n,*,h,t,f].

    Declines a dropout, whose draws follow vmap's `randomness`, and a mask that is differentiated, which no fused kernel does.
    """
    lead = query.ndim - 3  # what is folded into one batch dimension
    if dropout_p or lead < 1 or key.ndim != query.ndim or value.ndim != query.ndim or query.numel() == 0:
        return NotImplemented
    if key.shape[:lead] != query.shape[:lead] or value.shape[:lead] != query.shape[:lead]:
        return NotImplemented
    if attn_mask is not None:
        if attn_mask.requires_grad:
            return NotImplemented
        attn_mask = _fold_mask(attn_mask, query.shape, lead, query.shape[-2], key.shape[-2])
    q, k, v = (tensor.flatten(0, lead - 1) for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return output.unflatten(0, query.shape[:lead]), {}


def _fold_mask(mask: Tensor, query_shape: torch.Size, lead: int, targets: int, sources: int) -> Tensor:
    """[n, *mask of one sample] -> [n * folded, 1 or h, t, s], expanding only what must be folded."""
    own = mask.shape[1:]
    mask = mask.reshape(mask.shape[0], *(1,) * (len(query_shape) - 1 - len(own)), *own)
    mask = mask.expand(*query_shape[:lead], mask.shape[lead], targets, sources)
    return mask.reshape(math.prod(query_shape[:lead]), *mask.shape[lead:])


def _opened(function: FunctionType) -> FunctionType:
    """The body of a composite of torch.nn.functional, without the check that hands the whole call to a function mode.

    Its inner calls then meet the mode one by one, and those that have rules run by them.
    """
    no = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *args: False)
    return FunctionType(function.__code__, {**function.__globals__, **no}, function.__name__, function.__defaults__, function.__closure__)


_multi_head_attention_forward = _opened(F.multi_head_attention_forward)


@decomposition(F.multi_head_attention_forward)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """torch's own code, whose projections are linear ops."""
    return _multi_head_attention_forward(*args, **kwargs)
