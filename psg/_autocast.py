"""Autocast as torch applies it: to every op that fn calls, as a whole.

vmap, decompositions and some rules take an op apart, and autocast has other dtypes for the parts: a loss of 16-bit outputs, which torch
computes in float32, would be summed in 16 bits. So psg casts the arguments of an op itself, and runs the op without autocast.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg import _ambient
from psg._ops import is_torchs, name_of, operands_of, substitute


class Cast(NamedTuple):
    """What autocast does to the arguments of an op.

    Attributes:
        device: The device type for which autocast is on.
        dtype: The dtype to which it casts them, except float64; None for none.
        narrows: Whether that is autocast's own dtype.
    """

    device: str
    dtype: torch.dtype | None
    narrows: bool

    def run(self, mode: TorchFunctionMode, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op under this mode, which sees the casts, and then the op without autocast."""
        with torch._C._DisableAutocast(), mode:
            if self.dtype is not None:
                args, kwargs = substitute((args, kwargs), self._of_leaf)
            return func(*args, **kwargs)

    def _of_leaf(self, leaf: Any) -> Any:
        return leaf.to(self.dtype) if _is_eligible(leaf, self.device) and leaf.dtype != self.dtype else leaf


def _is_eligible(leaf: Any, device: str) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64 and leaf.device.type == device


def cast_of(func: Any, args: Any, kwargs: Any) -> Cast | None:
    """What autocast does to the arguments of this call; None if it is off, or if torch too leaves it to the parts of the op."""
    if not torch._C._is_any_autocast_enabled():
        return None
    tensors = operands_of(args, kwargs)[0]
    narrow, device = next(((dtype, tensor.device.type) for tensor in tensors if (dtype := _ambient.autocast_dtype(tensor))), (None, ""))
    kind = None if narrow is None else _kind_of(torch.dot if _is_dot(func, args, kwargs) else func, device)
    if kind is None:
        return None
    if kind == "unchanged" or kwargs.get("out") is not None or kwargs.get("dtype") is not None:  # what these say goes
        return Cast(device, None, False)
    if kind == "widest":
        kind = "float32" if any(tensor.dtype == torch.float32 for tensor in tensors) else "narrow"
    return Cast(device, narrow, True) if kind == "narrow" else Cast(device, torch.float32, False)


def _is_dot(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this op is a matrix product in general, but here one of two vectors, for which autocast has another dtype."""
    if func not in _PRODUCTS:
        return False
    args, kwargs = substitute((args, kwargs), lambda leaf: torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf)
    return func(*args, **kwargs).ndim == 0


_PRODUCTS = {torch.inner, Tensor.inner, torch.tensordot}


@functools.cache
def _kind_of(func: Any, device: str) -> str | None:
    """Its dtype under autocast: "narrow", "float32", "widest" (of the arguments), "unchanged"; None if left to its parts."""
    name = _NAMES.get(name_of(func), name_of(func)).partition(".")[0]
    if device not in _KEYS or not is_torchs(func) or name not in _ops(""):
        return None
    if name in _ops(_KEYS[device]):
        return "narrow" if name in _NARROW else "widest" if name in _WIDEST else "float32"
    return None if name in _ops("CompositeImplicitAutograd") else "unchanged"


@functools.cache
def _ops(key: str) -> frozenset[str]:
    """The names of ATen's ops that have a kernel for this dispatch key; of all ops for an empty key."""
    ops = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(name.partition(".")[0] for op in ops for space, _, name in [op.partition("::")] if space == "aten")


_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_NAMES = {"cross_entropy": "cross_entropy_loss", "__matmul__": "matmul", "_max_pool3d": "max_pool3d"}
"""The names in ATen of functions that are called otherwise."""

# From aten/src/ATen/autocast_mode.h, for both devices. All other ops that autocast knows run in float32.
_NARROW = frozenset(
    """
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
    mm bmm matmul addmm addbmm baddbmm _addmm_activation linear mv addmv addr einsum chain_matmul linalg_multi_dot linalg_vecdot prelu
    scaled_dot_product_attention _native_multi_head_attention lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """.split()
)
_WIDEST = frozenset("cat stack index_copy addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add".split())
