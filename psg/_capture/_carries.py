"""Values computed from parameters: how a factor of their gradient becomes factors of the parameters' gradients.

Examples are a merged low-rank update W + s B A, weights times a scale, a spectral norm. The derivative of an op on parameters is a linear
map, and for many ops its transpose maps a factor with few terms to such factors. If G = sum_t l_t r_t^T is the gradient of B A, that of B
is sum_t l_t (A r_t)^T and that of A is sum_t (B^T l_t) r_t^T. An elementwise op scales the entries of G; an op that reduces each row, or
all entries, to one number gives multiples c_n E of one tensor E. So G is never materialised.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call
from torch.overrides import TorchFunctionMode

from psg import _trees
from psg._capture._adjoints import ADJOINTS, FUSED, MOVING, multiple
from psg._capture._estimators import entries_of
from psg._torch import _autograd, _functorch
from psg._torch._ops import LIKE_ANOTHER, name_of, substitute, tensors_of
from psg.factors import Dense, Expanded, Factor, Rows, Scaled, Sum, Views, merge
from psg.factors._arithmetic import is_one_row
from psg.factors._maps import scaled
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
        return len(self.args) > 0 and self.args[0] is side

    def rerun(self, leaves: Mapping[int, Tensor], run: Callable[..., Tensor]) -> Tensor:
        """Call `run` on the op's arguments without their history; `leaves` holds replacements for some, by id()."""

        def given(leaf: Any) -> Any:
            return leaves.get(id(leaf), leaf.detach()) if isinstance(leaf, Tensor) else leaf

        with torch.enable_grad():
            args, kwargs = substitute((self.args, self.kwargs), given)
            return run(*args, **kwargs)

    def vjp(self, side: Tensor, cotangent: Tensor, rows: Tensor | None = None) -> Tensor:
        """The vector-Jacobian product of this op alone with one cotangent, for one argument, or for these rows of it.

        The arguments' history is ignored.
        """
        leaf = (side if rows is None else side[rows]).detach().requires_grad_()
        output = self.rerun({id(side): leaf}, self.run)
        if not output.requires_grad:
            return torch.zeros_like(leaf)  # this one of several outputs does not depend on this side
        (found,) = torch.autograd.grad(output, leaf, cotangent.to(output.dtype).reshape(output.shape), allow_unused=True)
        return torch.zeros_like(leaf) if found is None else found  # a norm of order 0 has a graph that leads nowhere


Carry = Callable[[Factor], list[list[Factor]] | None]
"""Maps a factor of the output's gradient to factors for each side, which add up; None if the gradient must be materialised."""


def part_of(func: Callable[..., Any], index: int | None) -> Callable[..., Tensor]:
    """`func`, made to return only its output at this index; with None, `func` itself, which has only one."""
    return func if index is None else lambda *args, **kwargs: func(*args, **kwargs)[index]


def carry_of(step: Step) -> Carry | None:
    """The map that carries factors over to the sides of a step; None if its output is not real floating-point."""
    output, sides = step.output, step.sides
    if not output.is_floating_point():
        return None
    if step.name == "custom_function_call":  # of no other function of the user's is it known that its backward is linear in the cotangent
        return _carry_of_estimator(step)
    try:
        known = ADJOINTS[step.name](output.detach(), *step.args, **step.kwargs) if step.name in ADJOINTS else []
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # not from the call itself, but from within
        known = []  # the table does not know this form of the call

    def over_to(side: Tensor, factor: Factor) -> list[Factor] | None:
        if step.name in LIKE_ANOTHER and not step.is_first(side):
            return []
        found = [carry(factor) for own, carry in known if own is side] or [None]
        if any(part is None for part in found):
            found = [_of_entries(step, side, factor)]
        return [part if part.dtype == side.dtype else part.to(side.dtype) for part in found if part is not None] or None

    # In float16 and float8 the sides of a factor may overflow or underflow where their product, which autograd computes first, does not.
    narrow = step.name not in MOVING and any(torch.finfo(tensor.dtype).max < _MOST for tensor in (output, *sides))

    def carry(factor: Factor) -> list[list[Factor]] | None:
        if narrow and not isinstance(factor, Dense):
            factor = Dense(factor.materialize())
        if step.is_outdated:
            return None  # an argument was written into: leave it to autograd, which raises the error
        rows = _looked_up(factor)
        if rows is not None and _is_row_by_row(step):
            return [[_over_rows(step, rows)]]
        if isinstance(factor, Dense) and (step.run in _COMPOSITES or step.name in FUSED):
            return _pulled(step, factor)
        if step.run in _COMPOSITES:  # their steps include sums of rows, for which some factors are better materialised
            return None if factor.prefers_dense_maps else _over_steps(step, factor)
        found = [over_to(side, factor) for side in sides]
        carried = [factors for factors in found if factors is not None]
        return carried if len(carried) == len(found) else None

    return carry


def _carry_of_estimator(step: Step) -> Carry | None:
    """The map of an autograd.Function whose backward scales the cotangent entry by entry; None for any other."""
    function, *given = step.args
    if len(step.sides) != 1 or step.run is not custom_function_call or step.sides[0].dtype.itemsize < 4:
        return None
    (side,) = step.sides
    places = [place for place, own in enumerate(given) if own is side]
    found = entries_of(function, step.output, places[0]) if len(places) == 1 else None
    if found is None or found[0].shape != side.shape or step.output.dtype != side.dtype:
        return None

    entries, selects = found

    def carry(factor: Factor) -> list[list[Factor]] | None:
        carried = None if step.is_outdated or not _may_scale(factor, entries, selects) else scaled(factor, entries)
        return None if carried is None else [[carried]]

    return carry


_MOST = 1e6  # the largest number of dtypes with few exponents is smaller


class _Steps(TorchFunctionMode):
    """Records the calls of a function as steps."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Step] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        parts = enumerate(output) if isinstance(output, (tuple, list)) else [(None, output)]
        self.found += [
            Step(part_of(func, i), args, kwargs, part, name_of(func))
            for i, part in parts
            if isinstance(part, Tensor) and part.requires_grad
        ]
        return output


def _over_steps(whole: Step, factor: Factor) -> list[list[Factor]] | None:
    """Carry a factor over an op that is a composite of others, step by step as if these had run."""
    leaves = {id(side): side.detach().requires_grad_() for side in whole.sides}
    with _Steps() as steps:
        output = whole.rerun(leaves, _COMPOSITES[whole.run])
    if output is NotImplemented or output.dtype != whole.output.dtype:
        return None
    terms: dict[int, list[Factor]] = {id(output): [factor]}
    for step in reversed(steps.found):
        own, carry = terms.pop(id(step.output), None), carry_of(step)
        parts = terms_of(own) if own else ()
        if parts is None:
            return None
        for term in parts:
            carried = carry(term) if carry is not None else None
            if carried is None:
                return None
            for side, factors in zip(step.sides, carried, strict=True):
                terms.setdefault(id(side), []).extend(factors)
    return [terms.get(id(leaf), []) for leaf in leaves.values()]


def in_parts(op: Callable[..., Any]) -> Callable[..., Any] | None:
    """The decomposition of an op on parameters, if vmap could not pull gradients back through the op itself."""
    # Of attention there is a form for passes that are differentiated, and vmap cannot run the backward of the fused one.
    return find_decomposition(op, differentiated=op is F.scaled_dot_product_attention)


def _pulled(step: Step, factor: Dense) -> list[list[Factor]]:
    """Pull materialised gradients back over one op as autograd does: for ops whose backward reads them fewer times than maps of factors."""
    leaves = {id(side): side.detach().requires_grad_() for side in step.sides}
    decompose = in_parts(step.run)
    output = NotImplemented if decompose is None else step.rerun(leaves, decompose)
    output = step.rerun(leaves, step.run) if output is NotImplemented else output
    found = _autograd.pulled_for_all((output,), list(leaves.values()), (factor.values.to(output.dtype),))
    return [[] if gradient is None else [Dense(gradient)] for gradient in found]


_MAX_TERMS = 4
_MAX_SIZE = 4  # of the terms together, in units of the gradient's own


def terms_of(found: list[Factor]) -> Sequence[Factor] | None:
    """The terms of one gradient, merged; None if they are so many, or so large, that the gradient is better materialised.

    A step of a derivation may use a value twice, so that terms carried over k steps could become 2^k terms.
    """
    merged = merge(found)
    terms = merged.terms if isinstance(merged, Sum) else (merged,)
    if len(terms) > 1 and any(isinstance(term, Dense) for term in terms):
        return (Dense(merged.materialize()),)
    if len(found) > 1 and merged.nbytes > _MAX_SIZE * merged.dense_bytes or isinstance(merged, Sum) and merged.is_mixed:
        return None
    return terms if len(terms) <= _MAX_TERMS else None


def _of_entries(step: Step, side: Tensor, factor: Factor) -> Factor | None:
    """Carry a factor over an elementwise op or a reduction to few numbers; over any op, if it is multiples c[n] E of a constant E."""
    constant = torch.ones_like(step.output.detach())
    numbers: Tensor | None = None
    if (
        isinstance(factor, Scaled)
        and isinstance(factor.factor, Expanded)
        and factor.shared is not None
        and factor.factor.small.numel() == 1
    ):
        numbers, constant = factor.factor.values, factor.shared.expand(factor.shape)
        if numbers.ndim != 1 + side.ndim:  # else keep the same tensor: multiples are recognised by it
            numbers = numbers.reshape(factor.n, *(1,) * side.ndim)
    elif step.name in POINTWISE:
        if side.shape != constant.shape or factor.prefers_dense_maps:
            return None
    elif isinstance(factor, Dense):
        small = (1,) * side.ndim if constant.numel() == 1 else _keepdim_shape(step, side)
        if small is None:
            return None
        numbers = factor.values.reshape(factor.n, *small)
    else:
        return None
    entries = step.vjp(side, constant)
    if not _may_scale(factor, entries, step.name in _SELECTING):
        return None
    return scaled(factor, entries) if numbers is None else multiple(numbers, entries)


def _may_scale(factor: Factor, entries: Tensor, selects: bool) -> bool:
    """Whether to scale a factor gives what autograd gives, if numbers that are not finite meet zero."""
    if _functorch.can_read_now(entries):
        if not _may_be_multiplied(entries):
            return False
        return bool(entries.all()) or all(map(_may_be_multiplied, _trees.flatten(factor)[0]))
    return not (selects and isinstance(factor, Dense))


def _may_be_multiplied(tensor: Tensor) -> bool:
    """Whether zero times each entry is zero: where an op selects entries, autograd has exact zeros.

    On an accelerator or in a trace the values cannot be read: there gradients [n, *shape] are left to autograd at ops that select, and an
    entry of another factor that is not finite may give NaN.
    """
    if not tensor.is_floating_point():
        return True
    return bool((tensor[:1] if tensor.ndim and is_one_row(tensor) else tensor).sum().isfinite())


def _keepdim_shape(step: Step, side: Tensor) -> tuple[int, ...] | None:
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


# Lookups of a table that is computed row by row: of the op only the rows that were looked up have to be differentiated


def _looked_up(factor: Factor) -> Rows | None:
    """The factor as rows of a table; of numbers, as rows of one column."""
    if isinstance(factor, Views) and factor.is_reshaped and len(factor.shape) == 1:
        factor = factor.factors[0]
    return factor if isinstance(factor, Rows) and len(factor.shape) == 2 else None


def _is_row_by_row(step: Step) -> bool:
    """Whether the op computes each row of its output, or each number, from the row of its only side, a matrix, at the same place."""
    if len(step.sides) != 1 or step.sides[0].ndim != 2 or not step.is_first(step.sides[0]):
        return False
    (side,) = step.sides
    if step.name in REDUCING:
        return len(side) > 1 and _keepdim_shape(step, side) == (len(side), 1)  # a single row may have been reduced with all its entries
    if step.name not in _ROW_BY_ROW:
        return False
    keyword, position, default = _ROW_BY_ROW[step.name]
    given = step.kwargs.get(keyword, step.args[position] if len(step.args) > position else default)
    if keyword == "normalized_shape":
        return tuple(given) == (side.shape[1],)
    return isinstance(given, int) and given % 2 == 1


def _over_rows(step: Step, factor: Rows) -> Factor:
    (side,) = step.sides
    if factor.index.numel() == 0:  # not every op takes a table without rows
        return Rows(factor.index, side.new_zeros(*factor.index.shape, side.shape[1]), len(side))
    found = step.vjp(side, factor.cotangent.flatten(0, 1), factor.index.flatten())
    return Rows(factor.index, found.unflatten(0, factor.index.shape), len(side))


POINTWISE = frozenset(
    """
    pow __rpow__ float_power square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p abs absolute sigmoid special_expit log_sigmoid
    tanh softplus relu relu6 leaky_relu silu gelu elu selu celu mish hardtanh hardswish hardsigmoid softsign tanhshrink softshrink
    hardshrink threshold clamp clamp_min clamp_max clip where masked_fill maximum minimum fmax fmin lerp tril triu sin cos tan asin acos
    atan sinh cosh asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh atan2 arctan2 hypot logaddexp logaddexp2 erf erfc
    special_erf erfinv sinc logit nan_to_num addcmul addcdiv copysign xlogy positive fake_quantize_per_tensor_affine fmod remainder frac
    ldexp deg2rad rad2deg lgamma mvlgamma digamma polygamma i0 special_entr special_erfcx special_erfinv special_exp2 special_expm1
    special_log1p special_logit special_log_ndtr special_ndtr special_ndtri special_gammaln special_multigammaln special_digamma special_psi
    special_polygamma special_i0 special_i0e special_i1 special_i1e special_sinc special_xlogy special_xlog1py
    """.split()
)
"""Elementwise ops: each entry of the result depends on the argument's entry at the same place alone."""

_SELECTING = frozenset(
    """
    relu relu6 hardtanh hardswish hardsigmoid hardshrink softshrink threshold clamp clamp_min clamp_max clip where masked_fill maximum
    minimum fmax fmin tril triu copysign xlogy special_xlogy nan_to_num
    """.split()
)
"""Those of them whose derivative is zero at some entries whatever the cotangent is there, NaN included."""

REDUCING: dict[str, int] = {
    **dict.fromkeys("sum mean var std var_mean std_mean amax amin logsumexp prod nansum nanmean norm_except_dim".split(), 1),
    **dict.fromkeys("norm linalg_norm linalg_vector_norm".split(), 2),
}
"""Reductions, with the position of the argument that names the dimensions: no two entries of the result share an entry of the input."""

_ROW_BY_ROW: dict[str, tuple[str, int, Any]] = {
    **dict.fromkeys(
        "softmax log_softmax special_softmax special_log_softmax softmin cumsum cumprod logcumsumexp".split(), ("dim", 1, None)
    ),
    "normalize": ("dim", 2, 1),
    **dict.fromkeys(("layer_norm", "rms_norm"), ("normalized_shape", 1, ())),
}
"""Ops along dimensions, with the keyword, the position and the default of the argument that names them."""


# Ops that are composites of other ops, over which factors are carried


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    return input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or running_mean is not None or running_var is not None:
        return NotImplemented
    var, mean = torch.var_mean(input, [dim for dim in range(input.ndim) if dim != 1], correction=0, keepdim=True)
    output = (input - mean) * (var + eps).rsqrt()
    shape = (-1, *(1,) * (input.ndim - 2))
    output = output if weight is None else output * weight.reshape(shape)
    return output if bias is None else output + bias.reshape(shape)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    if weight is None:
        return NotImplemented
    output = F.layer_norm(input, normalized_shape, None, None, eps) * weight
    return output if bias is None else output + bias


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return NotImplemented if weight is None else F.rms_norm(input, normalized_shape, None, eps) * weight


_COMPOSITES: dict[Any, Callable[..., Any]] = {
    torch._weight_norm: _weight_norm,  # pyright: ignore[reportPrivateImportUsage]
    F.normalize: _normalize,
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}
"""Composites written out; they return NotImplemented for forms of the call that are something else."""
