"""Autocast as torch applies it: to every op that fn calls, as a whole.

vmap, decompositions and some rules take an op apart, and autocast has other dtypes for the parts: a loss of 16-bit outputs, which torch
computes in float32, would be summed in 16 bits. So psg casts the arguments of an op itself, and runs the op without autocast.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg._torch import _ambient
from psg._torch._cached import cached
from psg._torch._ops import base_name, is_torchs, substitute, tensors_of

Kind = Literal["narrow", "float32", "widest", "unchanged"]
"""The dtype in which an op runs: autocast's own, float32, the widest of its arguments', or what the arguments have."""


class Cast(NamedTuple):
    """What autocast does to the arguments of an op.

    Attributes:
        device: The device type for which autocast is on.
        dtype: The dtype to which it casts them, except float64; None for none.
        narrows: Whether that is autocast's own dtype.
    """

    device: str
    dtype: torch.dtype | None = None
    narrows: bool = False

    def run(self, mode: TorchFunctionMode, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op under this mode, which sees the casts, and then the op without autocast."""
        with torch._C._DisableAutocast(), mode:
            if self.dtype is not None:
                args, kwargs = substitute((args, kwargs), self._of_leaf)
            return func(*args, **kwargs)

    def _of_leaf(self, leaf: Any) -> Any:
        return leaf.to(self.dtype) if _ambient.is_castable(leaf, self.device) else leaf


def cast_of(func: Any, args: Any, kwargs: Any) -> Cast | None:
    """What autocast does to the arguments of this call; None if it is off, or if torch too leaves it to the parts of the op."""
    if not torch._C._is_any_autocast_enabled():
        return None
    tensors = tensors_of(args, kwargs)
    first = next(filter(_ambient.is_autocast, tensors), None)
    if first is None:
        return None
    device = first.device.type
    kind = _kinds_of(func).get(device)
    if kind is None and _is_dot(func, tensors, args, kwargs):
        kind = _kinds_of(torch.dot).get(device)
    if kind is None:
        return None
    if kwargs.get("out") is not None or kwargs.get("dtype") is not None:
        return Cast(device)  # autocast leaves the dtype to the caller
    if kind == "widest":
        kind = "float32" if any(tensor.dtype == torch.float32 for tensor in tensors) else "narrow"
    if kind == "narrow":
        return Cast(device, _ambient.autocast_dtype(first), narrows=True)
    return Cast(device, torch.float32 if kind == "float32" else None)


@cached
def is_narrowed(func: Any) -> bool:
    """Whether this is one of torch's ops that autocast would run in its own dtype: a matrix product, in the main."""
    return is_torchs(func) and _NAMES.get(base_name(func), base_name(func)) in _NARROW


def _is_dot(func: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> bool:
    """Whether an op that is a matrix product in general is, for these arguments, one of two vectors."""
    name = base_name(func)
    if name == "inner":
        return all(tensor.ndim == 1 for tensor in tensors)
    if name != "tensordot":
        return False
    dims = kwargs.get("dims", args[2] if len(args) > 2 else 2)
    if not isinstance(dims, int):
        dims = len(dims if isinstance(dims[0], int) else dims[0])  # ATen's op takes those of the two tensors apart
    return all(tensor.ndim == dims for tensor in tensors)


@cached
def _kinds_of(func: Any) -> dict[str, Kind | None]:
    """By device type, CPU or CUDA, in which dtype autocast runs an op; None if it leaves that to the op's parts."""
    name = _NAMES.get(base_name(func), base_name(func))
    return {device: _kind_of(name, device) for device in _KEYS} if is_torchs(func) and name in _ops(_ALL) else {}


def _kind_of(name: str, device: str) -> Kind | None:
    if (device, name) in _OTHERWISE:
        return _OTHERWISE[device, name]
    if name in _ops(_KEYS[device]):
        return "narrow" if name in _NARROW else "widest" if name in _WIDEST else "float32"
    return None if name in _ops("CompositeImplicitAutograd") else "unchanged"


@functools.cache
def _ops(key: str) -> frozenset[str]:
    """The names of ATen's ops that have a kernel for this dispatch key."""
    ops = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(name.partition(".")[0] for op in ops for space, _, name in [op.partition("::")] if space == "aten")


_ALL = ""  # for which torch lists all ops
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_NAMES = {"cross_entropy": "cross_entropy_loss", "__matmul__": "matmul", "_max_pool3d": "max_pool3d"}
"""The names in ATen of functions that are called otherwise."""

# From aten/src/ATen/autocast_mode.h. All other ops for which autocast has a kernel run in float32.
_NARROW = frozenset(
    """
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
    mm bmm matmul addmm addbmm baddbmm _addmm_activation linear mv addmv addr einsum chain_matmul linalg_multi_dot linalg_vecdot prelu
    scaled_dot_product_attention _scaled_dot_product_flash_attention _native_multi_head_attention
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell
    """.split()
)
_WIDEST = frozenset("cat stack index_copy addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add".split())
_OTHERWISE: dict[tuple[str, str], Kind | None] = {
    ("cuda", "grid_sampler"): "widest",
    ("cuda", "binary_cross_entropy"): None,
}  # None: refused
