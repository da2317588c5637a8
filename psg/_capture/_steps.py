"""The steps by which values are computed from parameters: calls of ops, which can be differentiated by themselves."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._torch._ops import substitute, tensors_of
from psg.rules._registry import find_decomposition


class Step:
    """One call of an op on parameters, and one of its outputs.

    Attributes:
        run: Calls the op and returns this output.
        args: The positional arguments, the parameters among them with their history.
        kwargs: The keyword arguments.
        output: The output, one of the tensors that the op returned.
        name: The name of the op.
        tensors: The tensors among the arguments.
        is_outdated: Whether one of `tensors` has been written into since.
    """

    def __init__(self, run: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any], output: Tensor, name: str) -> None:
        self.run, self.args, self.kwargs, self.output, self.name = run, args, kwargs, output, name
        self.tensors = tensors_of(args, kwargs)
        self._versions = [tensor._version for tensor in self.tensors]

    @property
    def is_outdated(self) -> bool:
        return [tensor._version for tensor in self.tensors] != self._versions

    @property
    def sides(self) -> list[Tensor]:
        """The tensors among the arguments that have gradients, each once."""
        return list({id(tensor): tensor for tensor in self.tensors if tensor.requires_grad and tensor.is_floating_point()}.values())

    def is_first(self, side: Tensor) -> bool:
        """Whether this side is the op's first argument."""
        return bool(self.args) and self.args[0] is side

    def rerun(self, leaves: Mapping[int, Tensor], run: Callable[..., Tensor]) -> Tensor:
        """Call `run` on the op's arguments without their history; `leaves` holds replacements for some, by id()."""

        def given(leaf: Any) -> Any:
            return leaves.get(id(leaf), leaf.detach()) if isinstance(leaf, Tensor) else leaf

        with torch.enable_grad():
            args, kwargs = substitute((self.args, self.kwargs), given)
            return run(*args, **kwargs)

    def vjp(self, side: Tensor, cotangent: Tensor) -> Tensor:
        """The vector-Jacobian product of this op alone with one cotangent, for one argument.

        The arguments' history is ignored.
        """
        output, leaf = self.output, side
        if any([tensor.requires_grad and tensor is not side for tensor in self.tensors]):  # which may have been computed from this side
            leaf = side.detach().requires_grad_()
            output = self.rerun({id(side): leaf}, functools.partial(run_pullable, self.run))
        if not output.requires_grad:
            return torch.zeros_like(side)  # this one of several outputs does not depend on this side
        cotangent = cotangent.to(output.dtype).reshape(output.shape)
        (found,) = torch.autograd.grad(output, leaf, cotangent, retain_graph=True, allow_unused=True)
        return torch.zeros_like(side) if found is None else found  # a norm of order 0 has a graph that leads nowhere


def run_pullable(op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run an op on parameters, as its decomposition if vmap could not pull gradients back through the op itself."""
    # Of attention there is a form for passes that are differentiated, and vmap cannot run the backward of the fused one.
    decompose = find_decomposition(op, differentiated=op is F.scaled_dot_product_attention)
    output = NotImplemented if decompose is None else decompose(*args, **kwargs)
    return op(*args, **kwargs) if output is NotImplemented else output


def part_of(func: Callable[..., Any], index: int | None) -> Callable[..., Tensor]:
    """`func`, made to return only its output at this index; with None, `func` itself, which has only one."""
    return func if index is None else lambda *args, **kwargs: func(*args, **kwargs)[index]


def keepdim_shape(step: Step, side: Tensor) -> tuple[int, ...] | None:
    """For a reduction, the shape of its output with the reduced dimensions kept as 1; None if it is not clear which were reduced."""
    position = REDUCING.get(step.name)
    if position is None or not step.is_first(side):
        return None
    shape, reduced = side.shape, step.output.shape
    if len(reduced) == len(shape):
        small = tuple(reduced)
    else:
        dims = step.kwargs.get("dim", step.args[position] if len(step.args) > position else None)
        if isinstance(dims, bool) or not isinstance(dims, (int, list, tuple)):
            return None
        gone = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)}
        small = tuple(1 if dim in gone else size for dim, size in enumerate(shape))
        if [size for dim, size in enumerate(small) if dim not in gone] != list(reduced):
            return None
    return small if all(size in (1, own) for size, own in zip(small, shape, strict=True)) else None


POINTWISE = frozenset(
    """
    pow __rpow__ float_power square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p abs absolute sigmoid special_expit
    log_sigmoid tanh softplus relu relu6 leaky_relu silu gelu elu selu celu mish hardtanh hardswish hardsigmoid softsign tanhshrink
    softshrink hardshrink threshold clamp clamp_min clamp_max clip where masked_fill maximum minimum fmax fmin lerp tril triu sin cos tan
    asin acos atan sinh cosh asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh atan2 arctan2 hypot logaddexp logaddexp2 erf
    erfc special_erf erfinv sinc logit nan_to_num addcmul addcdiv copysign xlogy positive fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine fmod remainder frac ldexp deg2rad rad2deg lgamma mvlgamma digamma polygamma i0 special_entr
    special_erfcx special_erfinv special_exp2 special_expm1 special_log1p special_logit special_log_ndtr special_ndtr special_ndtri
    special_gammaln special_multigammaln special_digamma special_psi special_polygamma special_i0 special_i0e special_i1 special_i1e
    special_sinc special_xlogy special_xlog1py
    """.split()
)
"""Elementwise ops: each entry of the result depends on the argument's entry at the same place alone."""

REDUCING: dict[str, int] = {
    **dict.fromkeys("sum mean var std var_mean std_mean amax amin max min median logsumexp prod nansum nanmean norm_except_dim".split(), 1),
    **dict.fromkeys("norm linalg_norm linalg_vector_norm".split(), 2),
}
"""Reductions, with the position of the argument that names the dimensions: no two entries of the result share an entry of the input."""
