"""Ops that a pass must not meet. The list is short, and each entry has its test.

Lifting is as right as PyTorch's vmap with autograd beneath it; these are the places where that is wrong and cannot be helped (what can is
in repairs.py), or where a function would change what it must not.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg import _functorch, _writes
from psg._errors import StateError
from psg._ops import target_of
from psg.rules._registry import leak

leak(
    *(torch.as_strided, Tensor.as_strided),
    reason="as_strided reads the memory of one sample, which vmap lays out in its own way",
    when=lambda input, *args, **kwargs: _functorch.is_sampled(input),
    rungs=("capture", "vmap"),
)
leak(torch.as_strided_copy, Tensor.as_strided_, reason="this variant of as_strided under vmap has a wrong gradient or value")
leak(
    *(F.embedding, F.embedding_bag),
    reason="max_norm writes into the weight",
    when=lambda *args, **kwargs: kwargs.get("max_norm", args[3] if len(args) > 3 else None) is not None,
)
_DATA = vars(torch._C.TensorBase)["data"]
leak(_DATA.__set__, reason="assigning to .data under vmap(grad) breaks the tensor", rungs=("vmap",))
leak(_DATA.__get__, reason=".data inside a transform is a constant for that one alone", rungs=("inside",))
leak(torch.select_scatter, Tensor.select_scatter, reason="select_scatter under vmap has a wrong gradient")
leak(torch.cdist, reason="the gradient of cdist under vmap(grad) is wrong", rungs=("vmap",))
leak(Tensor.addbmm_, reason="addbmm_ under vmap resizes the tensor that it writes into", rungs=("capture", "vmap"))
leak(
    *(torch.index_fill, Tensor.index_fill, Tensor.index_fill_),
    reason="index_fill under vmap mixes the samples of a tensor value",
    when=lambda *args, **kwargs: any(isinstance(value, Tensor) for value in (*args[3:], kwargs.get("value"))),
    rungs=("capture", "vmap"),
)
leak(
    *(torch.roll, Tensor.roll),
    reason="roll of a scalar under vmap rolls the samples",
    when=lambda input, *args, **kwargs: input.ndim == 0,
    rungs=("capture", "vmap"),
)
leak(
    *(torch.linalg.solve, torch.linalg.solve_ex, torch.linalg.tensorsolve, torch.logdet, Tensor.logdet),
    *(torch.linalg.det, torch.det, Tensor.det, torch.linalg.slogdet, torch.slogdet, Tensor.slogdet),
    reason="forward-mode derivatives of solve and det under vmap are those of other pivots",
    when=lambda *args, **kwargs: _functorch.tangents_apart(),
    rungs=("capture", "vmap"),
)
leak(
    torch.linalg.lstsq,
    reason="lstsq of operands with different numbers of dimensions, whose batch dimensions vmap mistakes",
    when=lambda A, B, *args, **kwargs: A.ndim != B.ndim and (A.ndim, B.ndim) != (2, 1),
    rungs=("capture", "vmap"),
)

OWN_GENERATOR = "fn draws from a generator that it is given or makes: one seeded in fn draws the same for every sample, and vmap would not"

# Where the running mean stands, and the name of the flag under which it is updated, which stands in the sixth place.
_UPDATING: dict[Any, tuple[int, str]] = {
    F.batch_norm: (1, "training"),
    F.instance_norm: (1, "use_input_stats"),
    torch.batch_norm: (3, "training"),
    torch.instance_norm: (3, "use_input_stats"),
    torch.native_batch_norm: (3, "training"),
    torch._native_batch_norm_legit: (3, "training"),  # pyright: ignore[reportPrivateImportUsage]
    torch.ops.aten.batch_norm.default: (3, "training"),
    torch.ops.aten.instance_norm.default: (3, "use_input_stats"),
    torch.ops.aten.native_batch_norm.default: (3, "training"),
    torch.ops.aten._native_batch_norm_legit: (3, "training"),
    torch.ops.aten._native_batch_norm_legit.default: (3, "training"),
}


def refuse_updates(func: Any, args: Any, kwargs: Any) -> None:
    """Raise if the call writes into a buffer of the module, or updates running statistics, in whatever memory they are.

    Raises:
        StateError: It does.
    """
    refuse = _writes.refusal()
    if refuse is not None and (target := target_of(func, args, kwargs)) is not None:
        refuse(target)
    if func not in _UPDATING:
        return

    def argument(position: int, name: str) -> Any:
        return args[position] if position < len(args) else kwargs.get(name, _default(func, name))

    mean, flag = _UPDATING[func]
    if argument(mean, "running_mean") is not None and argument(5, flag):
        raise StateError(
            f"a {func.__name__} in training mode updates its running statistics, so that one sample's gradient would depend on the others. "
            "Put the module in eval mode, or use GroupNorm, LayerNorm or an InstanceNorm without them."
        )


@cache
def _default(func: Any, name: str) -> Any:
    return inspect.signature(func).parameters[name].default if inspect.isfunction(func) else None
