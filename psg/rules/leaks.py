"""Ops that a pass must not meet as they are. The list is short, and each entry has its test.

Lifting is as right as PyTorch's vmap with autograd beneath it; these are the places where that is wrong, or where a function would change
what it must not.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg import _functorch
from psg._errors import StateError
from psg.rules._registry import decomposition, leak, rule

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
leak(vars(torch._C.TensorBase)["data"].__set__, reason="assigning to .data under vmap(grad) breaks the tensor", rungs=("vmap",))
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

OWN_GENERATOR = "fn draws from a generator that it is given or makes: one seeded in fn draws the same for every sample, and vmap would not"

# Position and name of the running mean, and of the flag under which it is updated.
_UPDATING: dict[Any, tuple[int, str, int, str]] = {
    F.batch_norm: (1, "running_mean", 5, "training"),
    F.instance_norm: (1, "running_mean", 5, "use_input_stats"),
    torch.batch_norm: (3, "running_mean", 5, "training"),
    torch.instance_norm: (3, "running_mean", 5, "use_input_stats"),
    torch.native_batch_norm: (3, "running_mean", 5, "training"),
    torch._native_batch_norm_legit: (3, "running_mean", 5, "training"),  # pyright: ignore[reportPrivateImportUsage]
    torch.ops.aten._native_batch_norm_legit: (3, "running_mean", 5, "training"),
    torch.ops.aten._native_batch_norm_legit.default: (3, "running_mean", 5, "training"),
}


def refuse_updates(func: Any, args: Any, kwargs: Any) -> None:
    """Raise if the call updates running statistics, in whatever memory they are.

    Raises:
        StateError: It does.
    """
    if func not in _UPDATING:
        return

    def argument(position: int, name: str) -> Any:
        return args[position] if position < len(args) else kwargs.get(name, _default(func, name))

    mean, mean_name, flag, flag_name = _UPDATING[func]
    if argument(mean, mean_name) is not None and argument(flag, flag_name):
        raise StateError(
            f"a {func.__name__} in training mode updates its running statistics, so that one sample's gradient would depend on the others. "
            "Put the module in eval mode, or use GroupNorm, LayerNorm or an InstanceNorm without them."
        )


@cache
def _default(func: Any, name: str) -> Any:
    return inspect.signature(func).parameters[name].default if inspect.isfunction(func) else None


@decomposition(Tensor.__contains__)
def contains(self: Tensor, element: Any) -> Any:
    """`element in tensor`, written out: its last step is a Python value of a tensor, which the pass knows how to take."""
    return bool((self == element).any())


@decomposition(Tensor.__setitem__)
def fill(self: Tensor, index: Any, value: Any) -> Any:
    """tensor[mask] = number, of a mask that depends on the sample: what it selects has no shape under vmap, and need not have one."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == self.shape[: index.ndim]
    is_number = value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, (int, float))
    if not (is_mask and is_number and _functorch.is_sampled(index)):
        return NotImplemented
    self.copy_(torch.where(index.reshape(*index.shape, *(1,) * (self.ndim - index.ndim)), value, self))


# By sorting: along a dimension torch has no deterministic median on a GPU.


def _median(input: Tensor) -> Tensor:
    ordered = input.flatten().sort().values  # NaN last
    return torch.where(ordered[-1].isnan(), ordered[-1], ordered[(input.numel() - 1) // 2])


def _nanmedian(input: Tensor) -> Tensor:
    ordered = input.flatten().sort().values
    count = (~ordered.isnan()).sum(0, keepdim=True)
    return ordered.gather(0, ((count - 1) // 2).clamp(min=0))[0]


def _shared_evenly(op: Any, value_of: Callable[[Tensor], Tensor]) -> None:
    @decomposition(op)
    def whole(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """One of all entries, of whose cotangent every entry with its value has an equal share; vmap's form, by a dimension, picks one.

        Under a vmap of fn's own that form is torch's own too.
        """
        if args or kwargs or _functorch.vmaps(input) != 1 or not input.is_floating_point() or input.numel() == 0:
            return NotImplemented
        value = value_of(input.detach())
        chosen = (input == value) | (input.isnan() & value.isnan())
        share = (torch.where(chosen, input, 0) / chosen.sum()).sum()
        # The value itself, and not what the sum is rounded to.
        return torch.where(value.isfinite(), value + (share - share.detach()), share)


for _name, _value_of in {"max": torch.amax, "min": torch.amin, "median": _median, "nanmedian": _nanmedian}.items():
    for _op in (getattr(torch, _name), getattr(Tensor, _name)):
        _shared_evenly(_op, _value_of)


@decomposition(torch.linalg.lu_solve)
def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False, out: Tensor | None = None) -> Any:
    """X with P L U X = B by triangular solves: ([*,i,i], [*,i], [*,i,k]) -> [*,i,k].

    Where LU is the sample's own and B has further dimensions, vmap gives LU one of size 1, and there torch (2.13) takes wrong pivots.
    """
    if out is not None or not _functorch.is_sampled(LU):
        return NotImplemented
    if not left:  # X A = B is A^H X^H = B^H
        return torch.linalg.lu_solve(LU, pivots, B.mH, adjoint=not adjoint).mH
    solve = torch.linalg.solve_triangular
    P, L, U = torch.lu_unpack(LU, pivots)
    if adjoint:
        return P @ solve(L.mH, solve(U.mH, B, upper=False), upper=True, unitriangular=True)
    return solve(U, solve(L, P.mT @ B, upper=False, unitriangular=True), upper=True)


@decomposition(torch.lu_solve)
@decomposition(Tensor.lu_solve)
def old_lu_solve(b: Tensor, LU_data: Tensor, LU_pivots: Tensor, *, out: Tensor | None = None) -> Any:
    """The same with its arguments in another order."""
    return lu_solve(LU_data, LU_pivots, b, out=out)


def _aligned(op: Any) -> None:
    @decomposition(op)
    def solve(A: Tensor, B: Tensor, *, left: bool = True, **options: Any) -> Any:
        """Both with as many dimensions: where one has fewer, vmap's result has the shape of another broadcast."""
        vector = B.ndim == 1 or A.shape[:-1] == B.shape
        if A.ndim == B.ndim + vector or not (_functorch.is_sampled(A) or _functorch.is_sampled(B)) or "out" in options:
            return NotImplemented
        if vector:
            return op(A, B.expand(A.shape[:-1]), left=left, **options)
        rank = max(A.ndim, B.ndim)
        sides = (side.reshape(*(1,) * (rank - side.ndim), *side.shape) for side in (A, B))
        solved = op(*sides, left=left, **options)
        return solved if isinstance(solved, Tensor) else type(solved)((solved[0], solved[1].reshape(A.shape[:-2])))


_aligned(torch.linalg.solve)
_aligned(torch.linalg.solve_ex)
leak(
    torch.linalg.lstsq,
    reason="lstsq of operands with different numbers of dimensions, whose batch dimensions vmap mistakes",
    when=lambda A, B, *args, **kwargs: A.ndim != B.ndim and (A.ndim, B.ndim) != (2, 1),
    rungs=("capture", "vmap"),
)


_DATA = vars(torch._C.TensorBase)["data"].__get__
leak(_DATA, reason=".data inside a transform is a constant for that one alone", rungs=("inside",))


@decomposition(_DATA, differentiated=True)
def data(self: Tensor) -> Tensor:
    """A constant for every derivative; under vmap torch's own is one for the innermost alone."""
    return self.detach()


@rule(_DATA, params=())
def data_of_a_batch(self: Tensor) -> Any:
    """The same outside of all transforms of the function's own, where vmap has none."""
    return self.detach(), {}


_CHANNELS_LAST = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _layout(conversion: Any) -> None:
    @decomposition(conversion)
    def channels_last(self: Tensor, *args: Any, memory_format: Any = None, **kwargs: Any) -> Any:
        """The layout of a sample: vmap cannot ask for it by name, but by a permutation of a contiguous tensor."""
        if _CHANNELS_LAST.get(memory_format) != self.ndim:
            return NotImplemented
        return conversion(self.movedim(1, -1), *args, **kwargs).contiguous().movedim(-1, 1)


for _conversion in (
    *(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
):
    _layout(_conversion)


@decomposition(Tensor.is_contiguous)
def is_contiguous(self: Tensor, memory_format: Any = torch.contiguous_format) -> Any:
    """Of a sample in this layout."""
    if _CHANNELS_LAST.get(memory_format) != self.ndim:
        return NotImplemented
    return self.movedim(1, -1).is_contiguous()


if hasattr(F, "linear_cross_entropy"):  # torch >= 2.13

    @decomposition(F.linear_cross_entropy)
    def linear_cross_entropy(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        options: Any = None,
        **cross_entropy_options: Any,
    ) -> Tensor:
        """The fused op asks `requires_grad` below the function mode, where vmap answers no, and then returns no gradient."""
        if cross_entropy_options.get("ignore_index", 0) is None:
            del cross_entropy_options["ignore_index"]
        classes = linear_weight.shape[:-1]  # more than one dimension for a loss over further dimensions
        bias = None if linear_bias is None else linear_bias.reshape(-1)
        logits = F.linear(input, linear_weight.reshape(-1, linear_weight.shape[-1]), bias)
        return F.cross_entropy(logits.reshape(*input.shape[:-1], *classes), target, **cross_entropy_options)
