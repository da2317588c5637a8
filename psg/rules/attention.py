"""Attention has no parameters of its own; its rule folds the samples into the batch dimension of the native fused kernels."""

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._torch import _functorch
from psg.factors._arithmetic import widen
from psg.rules._registry import DIFFERENTIATED, decomposition, rule


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
    """softmax(scale q k^T + mask) v: ([n,*,h,t,e], [n,*,h,s,e], [n,*,h,s,f]) -> [n,*,h,t,f], dimensions before t broadcast.

    With a mask that requires grad (a learned bias) torch chooses its unfused implementation; under vmap it would not see that the mask
    requires grad. Declines dropout, whose draws follow vmap's `randomness`, and values that are not finite where torch would run one
    sample unfused: the fused kernel takes a row of NaN scores for a row without entries.
    """
    dims = max(query.ndim, key.ndim, value.ndim) - 1
    alone = dims == 2  # fn has no dimension for heads
    if dropout_p or query.numel() == 0 or min(query.ndim, key.ndim, value.ndim) < 3 or (alone and enable_gqa):
        return NotImplemented
    q, k, v = query, key, value
    if not q.ndim == k.ndim == v.ndim > 3:
        q, k, v = (_with_dims(tensor, max(dims, 3)) for tensor in (q, k, v))
    shared = -2 if not enable_gqa else -3  # the dimensions before this one are the same for all three
    alike = q.shape[:shared] == k.shape[:shared] == v.shape[:shared]
    is_fused_alone = dims == 4 and alike
    if is_causal and attn_mask is not None and not is_fused_alone:
        return NotImplemented  # torch refuses both together
    if not is_fused_alone and _functorch.can_read_now(q) and not (q.sum() + k.sum()).isfinite():
        return NotImplemented
    if not alike:
        try:
            batch = torch.broadcast_shapes(*(tensor.shape[:shared] for tensor in (q, k, v)))
        except RuntimeError:
            return NotImplemented  # torch will say what is wrong
        q, k, v = (tensor.expand(*batch, *tensor.shape[shared:]) for tensor in (q, k, v))
    lead = q.shape[:-3]
    last = len(lead) - 1  # of the dimensions that are folded
    if attn_mask is not None:
        full = (*q.shape[:-1], k.shape[-2])
        attn_mask = _with_dims(attn_mask, len(full) - 1)
        if attn_mask.ndim != len(full) or any(size not in (1, most) for size, most in zip(attn_mask.shape, full, strict=True)):
            return NotImplemented
        # Expand only the dimensions that are folded.
        attn_mask = attn_mask.expand(*lead, attn_mask.shape[-3], *full[-2:]).flatten(0, last)
    elif is_causal and scale is not None and scale <= 0:
        # The fused kernel (torch 2.13) multiplies the -inf of its mask by the scale, too.
        is_causal, attn_mask = False, q.new_ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    q, k, v = q.flatten(0, last), k.flatten(0, last), v.flatten(0, last)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return output.squeeze(1) if alone else output.unflatten(0, lead), {}


@decomposition(F.scaled_dot_product_attention, need=DIFFERENTIATED, misderived=True)
def attention_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As products and a softmax: torch's fused kernels have no second derivative."""
    if min(query.ndim, key.ndim, value.ndim) < 2 or is_causal and attn_mask is not None:
        return NotImplemented  # torch's errors
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (side.repeat_interleave(heads // side.shape[-3], -3) for side in (key, value))
    dtype = query.dtype
    query, key, value = (widen(side) for side in (query, key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        empty = (scores == -torch.inf).all(-1, keepdim=True)  # a row without entries is zero, and so are its derivatives
        weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return (weights @ value).to(dtype)


def _with_dims(tensor: Tensor, dims: int) -> Tensor:
    """[n, *shape] -> [n, 1, ..., 1, *shape], with `dims` dimensions after the first."""
    missing = dims + 1 - tensor.ndim
    return tensor.reshape(tensor.shape[0], *(1,) * missing, *tensor.shape[1:]) if missing else tensor


def _without_override_check(function: FunctionType) -> FunctionType:
    """A composite of torch.nn.functional, without the check that hands the whole call to a function mode.

    The function mode then sees the inner calls one by one, and those that have rules run by them.
    """
    no = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *args: False)
    return FunctionType(function.__code__, {**function.__globals__, **no}, function.__name__, function.__defaults__, function.__closure__)


_multi_head_attention_forward = _without_override_check(F.multi_head_attention_forward)


@decomposition(F.multi_head_attention_forward, misderived=True)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """torch's own code, whose projections are linear ops."""
    return _multi_head_attention_forward(*args, **kwargs)


@decomposition(torch._nested_tensor_from_mask_left_aligned)  # pyright: ignore[reportPrivateImportUsage]
def nested_tensor_from_mask_left_aligned(*args: Any) -> bool:
    """False: keeps nn.TransformerEncoder off its nested-tensor path, which has no gradients. It asks before it knows if it needs them."""
    return False
