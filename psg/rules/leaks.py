"""Ops that a pass must not run. The list is short, and each entry has its test.

Lifting is only as correct as PyTorch's vmap with autograd beneath it. Listed here are ops that vmap gets wrong and that cannot be written
with other ops (repairs.py has those that can), and ops that would change a tensor that they must not change.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._errors import StateError
from psg._torch import _functions, _functorch
from psg._torch._cached import cached
from psg._torch._ops import SET_DATA, tensors_of
from psg._watch import _writes
from psg.rules._registry import leak

leak(
    *(torch.as_strided, Tensor.as_strided, torch.as_strided_, Tensor.as_strided_),
    reason="as_strided depends on the memory layout of one sample, which vmap does not keep",
    when=lambda input, *args, **kwargs: _functorch.is_vmapped(input),
    rungs=("capture", "vmap"),
)
leak(torch.as_strided_copy, reason="as_strided_copy under vmap has a wrong gradient or value")
leak(
    *(F.embedding, F.embedding_bag),
    reason="max_norm writes into the weight",
    when=lambda *args, **kwargs: kwargs.get("max_norm", args[3] if len(args) > 3 else None) is not None,
)
leak(SET_DATA, reason="assigning to .data under vmap(grad) breaks the tensor", rungs=("vmap",))
leak(
    *(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")),
    reason="an op in place on a list of tensors leaves the history of their views behind under torch.func.grad",
    rungs=("vmap",),
)
leak(
    *(Tensor.resize_, Tensor.resize_as_),
    reason="resize_ under vmap takes entries of other samples",
    when=lambda input, *args, **kwargs: _functorch.is_vmapped(input),
    rungs=("capture", "vmap"),
)
leak(
    *(torch.any, torch.all, Tensor.any, Tensor.all),
    reason="any or all over no dimensions reduces nothing, and under vmap everything",
    when=lambda input, dim=None, *args, **kwargs: isinstance(dim, (list, tuple)) and not dim,
    rungs=("capture", "vmap"),
)
leak(
    *(F.layer_norm, torch.layer_norm),
    reason="layer_norm over more dimensions than a sample has: vmap takes the dimension of the samples for one of them",
    when=lambda input, normalized_shape, *args, **kwargs: len(normalized_shape) > input.ndim,
    rungs=("capture", "vmap"),
)
leak(
    *(torch.tril, Tensor.tril, Tensor.tril_, torch.triu, Tensor.triu, Tensor.triu_),
    reason="tril or triu of a sample with less than two dimensions: vmap takes the dimension of the samples for one of them",
    when=lambda input, *args, **kwargs: input.ndim < 2,
    rungs=("capture", "vmap"),
)
leak(torch.select_scatter, Tensor.select_scatter, reason="select_scatter under vmap has a wrong gradient")
leak(torch.cdist, reason="the gradient of cdist under vmap(grad) is wrong", rungs=("vmap",))
leak(Tensor.addbmm_, reason="addbmm_ under vmap resizes the tensor that it writes into", rungs=("capture", "vmap"))
leak(
    *(torch.linalg.solve, torch.linalg.solve_ex, torch.linalg.tensorsolve, torch.logdet, Tensor.logdet),
    *(torch.linalg.det, torch.det, Tensor.det, torch.linalg.slogdet, torch.slogdet, Tensor.slogdet),
    reason="forward-mode derivatives of solve and det under nested vmaps use other pivots, and are wrong",
    when=lambda *args, **kwargs: _functorch.tangents_apart(),
    rungs=("capture", "vmap"),
)
leak(
    torch.linalg.lstsq,
    reason="lstsq of operands with different numbers of dimensions: vmap confuses their batch dimensions",
    when=lambda A, B, *args, **kwargs: A.ndim != B.ndim and (A.ndim, B.ndim) != (2, 1),
    rungs=("capture", "vmap"),
)
leak(
    *(getattr(torch, f"sparse_{layout}_tensor") for layout in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
    *(getattr(Tensor, f"to_sparse{layout}") for layout in ("", "_coo", "_csr", "_csc", "_bsr", "_bsc")),
    *(Tensor.sparse_mask, torch.sparse.sampled_addmm),
    reason="vmap knows no sparse tensors, and may give their values wrong gradients",
    when=lambda *args, **kwargs: any(
        isinstance(leaf, Tensor) and (leaf.requires_grad or _functorch.is_vmapped(leaf)) for leaf in (*args, *kwargs.values())
    ),
    rungs=("capture", "vmap"),
)


def _batches_apart(input: Tensor, indices: Any, values: Any, accumulate: bool = False) -> bool:
    """Whether vmaps batch indices, and another one the other tensors, or their tangents. Masks do not count: they become indices first."""
    levels = [_functorch.vmap_levels(index) for index in tensors_of((indices,), {}) if index.dtype != torch.bool]
    if not any(levels) or not isinstance(values, Tensor):
        return False
    others = _functorch.vmap_levels(input) | _functorch.vmap_levels(values)
    return not others <= set().union(*levels) or _functorch.tangents_apart()


leak(
    *(Tensor.__setitem__, torch.index_put_, Tensor.index_put_),
    reason="writes at indices under nested vmaps, one of which does not batch the indices, put the values into other places",
    when=_batches_apart,
    rungs=("capture", "vmap"),
)


def _marks_dirty(function: Any) -> bool:
    """Whether an autograd.Function says that it writes into an argument."""
    codes = [getattr(part, "__code__", None) for part in (function.forward, _functions.setup_of(function))]
    return any("mark_dirty" in code.co_names for code in codes if code is not None)


leak(
    _functions.custom_function_call,
    reason="an autograd.Function writes into its arguments, unseen",
    when=lambda function, *args, **kwargs: _marks_dirty(function),
    rungs=("capture", "vmap"),
)

OWN_GENERATOR = "fn draws from a torch.Generator: one that fn seeds has to give every sample the same numbers, and under vmap would not"

# The position of the argument running_mean, and the name of the flag that enables its update, which is at position 5.
UPDATING: dict[Any, tuple[int, str]] = {F.batch_norm: (1, "training"), F.instance_norm: (1, "use_input_stats")}
for _name in ("batch_norm", "instance_norm", "native_batch_norm", "_native_batch_norm_legit"):
    _packet = getattr(torch.ops.aten, _name)  # exported programs call its overload
    _flag = "use_input_stats" if _name == "instance_norm" else "training"
    UPDATING |= dict.fromkeys((getattr(torch, _name), _packet, _packet.default), (3, _flag))


def refuse_updates(func: Any, args: Any, kwargs: Any, target: Any) -> None:
    """Raise if the call, which writes into `target`, changes a buffer of the module, or running statistics, wherever they are stored.

    Raises:
        StateError: The call does so.
    """
    if target is not None and (refuse := _writes.refusal()) is not None:
        refuse(func, args, target)
    if func not in UPDATING:
        return

    def argument(position: int, name: str) -> Any:
        return args[position] if position < len(args) else kwargs.get(name, _defaults(func).get(name))

    mean, flag = UPDATING[func]
    if isinstance(argument(mean, "running_mean"), Tensor) and argument(5, flag):  # a form without statistics has a flag in their place
        raise StateError(
            f"a {func.__name__} in training mode updates its running statistics, so that one sample's gradient would depend on the others. "
            "Put the module in eval mode, or use GroupNorm, LayerNorm or an InstanceNorm without running statistics."
        )


@cached
def _defaults(func: Any) -> dict[str, Any]:
    return {name: own.default for name, own in inspect.signature(func).parameters.items()} if inspect.isfunction(func) else {}


# What no mode sees: ops inside TorchScript. These are right under vmap as they are.
_RIGHT_UNSEEN = frozenset(
    """
    linear matmul mm bmm addmm baddbmm t transpose permute view reshape flatten unsqueeze squeeze contiguous expand expand_as cat stack
    chunk split slice select unbind narrow add sub mul div neg rsub pow sqrt rsqrt square exp log abs tanh sigmoid relu relu_ relu6 gelu
    sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh log1p log2 log10 expm1 exp2 erf reciprocal hypot lerp addcmul addcdiv where
    clamp clamp_min clamp_max maximum minimum floor ceil round trunc sign norm linalg_vector_norm
    silu elu leaky_relu softplus hardtanh softmax log_softmax mean sum layer_norm conv1d conv2d conv3d _convolution max_pool1d
    max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d dropout batch_norm zeros ones full arange zeros_like
    ones_like to type_as detach clone size dim len numel Int Float Bool IntImplicit FloatImplicit ScalarImplicit NumToTensor __getitem__
    __is__ __isnot__ __not__ __contains__ eq ne lt gt le ge floordiv append format warn list device is_floating_point requires_grad
    """.split()
)


def unseen_op(script: Any) -> str | None:
    """An op inside of a function or method of TorchScript that psg may have to repair where it sees it; None if there is none."""
    for node in _nodes_of(script.inlined_graph):
        space, _, name = node.kind().partition("::")
        padded = name == "embedding" and list(node.inputs())[2].toIValue() != -1
        if space != "prim" and (padded or name not in _RIGHT_UNSEEN | {"embedding"}):
            return node.kind()
    return None


def _nodes_of(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes_of(inner)
