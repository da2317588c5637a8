"""Ops that vmap cannot run, or runs sample by sample, written with ops that it does run."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg._errors import Unsupported
from psg._hardware._matmul import for_all_columns
from psg._torch import _functorch
from psg._torch._ops import tensors_of
from psg._trees import is_inexact
from psg.factors._arithmetic import widen
from psg.rules._registry import SPARSE, decomposition, rule


@decomposition(torch.equal, Tensor.equal)
def _equal(input: Tensor, other: Tensor) -> bool:
    return input.shape == other.shape and bool((input == other).all())


@decomposition(torch.allclose, Tensor.allclose)
def _allclose(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


@decomposition(torch.isclose, Tensor.isclose)
def _isclose(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    if input.dtype != other.dtype or rtol < 0 or atol < 0:
        return NotImplemented  # torch raises its own error
    same = input == other
    if not is_inexact(input):  # the difference of small integers would wrap around
        input, other = (side.to(torch.get_default_dtype()) for side in (input, other))
    close = same | ((input - other).abs() <= atol + rtol * other.abs()) & other.isfinite()
    return close | (input.isnan() & other.isnan()) if equal_nan else close


_assert = torch._assert_async  # pyright: ignore[reportPrivateImportUsage]


@decomposition(_assert)
def _assert_async(condition: Tensor, *message: str) -> Any:
    """One assertion for all samples, which an accelerator need not wait for either."""
    if not _functorch.is_vmapped(condition) or condition.numel() != 1:
        return NotImplemented  # torch raises its own error
    with torch._C.DisableTorchFunction():
        _assert(_functorch.bare(condition).bool().all(), *message)


@decomposition(Tensor.__deepcopy__)
def _deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
    """A leaf for every sample, which autograd takes for another than the one that is copied, in memory of its own: fn may write into it."""
    if id(self) in memo:
        return memo[id(self)]
    if not _functorch.is_wrapped(self) or not self.is_leaf:
        return NotImplemented  # torch raises its own error, if not under vmap then in the loop
    with torch._C.DisableTorchFunction():  # else a parameter's would be computed once for all
        copy = self.detach().clone()
    if self.requires_grad:
        copy.requires_grad_()
    # What the user has set on it, and that it is a parameter, but not what a pass has noted of the other tensor.
    vars(copy).update(deepcopy({name: value for name, value in vars(self).items() if not name.startswith("_psg")}, memo))
    memo[id(self)] = copy
    return copy


@decomposition(torch.tensor_split, Tensor.tensor_split)
def _tensor_split(input: Tensor, tensor_indices_or_sections: Any = None, dim: int = 0, **others: Any) -> Any:
    """At the values of a tensor, which torch reads from memory: inside of transforms a tensor has none."""
    where = tensor_indices_or_sections
    if others or not isinstance(where, Tensor) or where.dtype != torch.long or where.ndim > 1:
        return NotImplemented  # torch raises its own error
    return torch.tensor_split(input, where.tolist(), dim)


decomposition(torch.ops.aten.sym_size.int)(Tensor.size)
decomposition(torch.moveaxis, Tensor.moveaxis)(torch.movedim)


@decomposition(torch._weight_norm, misderived=True)  # pyright: ignore[reportPrivateImportUsage]
def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """v g / |v|, with the norm over all dimensions but `dim`, or over all if it is -1.

    vmap would run torch's backward sample by sample, and in plain autograd torch's second derivatives are wrong (2.13).
    """
    if not -v.ndim <= dim < v.ndim or v.dtype != g.dtype or v.is_complex():
        return NotImplemented
    dims = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    wide = widen(v)
    norm = torch.linalg.vector_norm(wide, dim=dims, keepdim=dim != -1) if dims else wide.abs()
    return (wide * (widen(g) / norm)).to(v.dtype)


def _written_back(op: Any) -> Callable[..., Any]:
    # Run the op on a copy: the input is written into, and must not be what the op saves for its backward.
    return lambda input, *args, **kwargs: input.copy_(op(input.clone(), *args, **kwargs))


# vmap runs the in-place forms of these ops sample by sample.
for _name in (
    *("addcdiv", "addcmul", "addmm", "addr", "clamp", "clip", "cumprod", "cumsum", "fmod", "heaviside", "hypot", "index_copy", "ldexp"),
    *("baddbmm", "index_fill", "lerp", "nextafter", "polygamma", "pow", "put", "remainder", "renorm", "scatter", "square"),
    *("masked_scatter", "tril", "triu", "xlogy"),
):
    for _holder in (Tensor, torch):
        if hasattr(_holder, f"{_name}_"):
            decomposition(getattr(_holder, f"{_name}_"))(_written_back(getattr(Tensor, _name)))
decomposition(Tensor.__ipow__)(_written_back(Tensor.pow))  # a function of Python, not another name of pow_


def _global_average(dims: int) -> Callable[..., Any]:
    def average(input: Tensor, output_size: Any) -> Any:
        sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
        if any(size != 1 for size in sizes) or input.numel() == 0:
            return NotImplemented
        return input.mean([-1 - k for k in range(dims)], keepdim=True)

    return average


decomposition(F.adaptive_avg_pool1d)(_global_average(1))
decomposition(F.adaptive_avg_pool2d)(_global_average(2))
decomposition(F.adaptive_avg_pool3d)(_global_average(3))


@decomposition(torch.tensor)
def _copied(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False) -> Any:
    """Of a tensor, a copy without its history: torch detaches in place, which vmap refuses."""
    if not isinstance(data, Tensor) or requires_grad or pin_memory:
        return NotImplemented
    return data.detach().clone().to(data.device if device is None else device, data.dtype if dtype is None else dtype)


@decomposition(Tensor.new_tensor)
def _copied_alike(
    self: Tensor,
    data: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    layout: Any = None,
    pin_memory: bool = False,
) -> Any:
    if layout not in (None, torch.strided):
        return NotImplemented
    dtype, device = self.dtype if dtype is None else dtype, self.device if device is None else device
    return _copied(data, dtype=dtype, device=device, requires_grad=requires_grad, pin_memory=pin_memory)


@decomposition(vars(torch._C)["_nn"].pad_sequence)
def _pad_sequence(sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right") -> Any:
    longest = max(len(sequence) for sequence in sequences)
    rows = []
    for sequence in sequences:
        gap = longest - len(sequence)
        sides = (0, gap) if padding_side == "right" else (gap, 0)
        rows.append(F.pad(sequence, (*(0, 0) * (sequence.ndim - 1), *sides), value=padding_value))
    return torch.stack(rows, 0 if batch_first else 1)


@decomposition(torch.is_nonzero, Tensor.is_nonzero)
def _is_nonzero(input: Tensor) -> bool:
    return bool(input)


def _of_all_entries(name: str, reduction: Any, conclusive: bool) -> None:
    @decomposition(getattr(torch, name), getattr(Tensor, name))
    def whole(input: Tensor) -> Any:
        """For each sample, where vmap's own rule reduces over all of them; that answer only if it is the same for each.

        `torch.distributions` asks whether its arguments are valid: an answer that all share keeps samples together, whatever they draw, and
        is one that fn can read inside a vmap of its own.

        Raises:
            Unsupported: There, it is not the same for all.
        """
        if input.dtype != torch.bool or _functorch.is_recorded() or not (levels := _functorch.vmap_levels(input)):
            return NotImplemented  # torch raises its own error; a trace takes arguments for valid
        with torch._C.DisableTorchFunction():
            if (answer := reduction(_functorch.bare(input))) == conclusive:
                return answer
        if len(levels) > 1:
            raise Unsupported(f"{name}, as torch.distributions calls it, has different answers for different samples in a vmap of fn's own")
        return reduction(input)


_of_all_entries("_is_all_true", torch.all, True)
_of_all_entries("_is_any_true", torch.any, False)


@decomposition(Tensor.__contains__)
def _contains(self: Tensor, element: Any) -> Any:
    """`element in tensor`, written out: it ends in bool() of a tensor, which the pass can handle."""
    return bool((self == element).any())


def _in_parts(op: Any) -> None:
    @decomposition(op)
    def parts(*args: Any, **kwargs: Any) -> Any:
        if "out" in kwargs or not any(map(_functorch.is_vmapped, tensors_of(args, kwargs))) or _functorch.tangents_active():
            return NotImplemented
        return _functorch.in_parts(op, args, kwargs)


for _op in (
    *(torch.istft, Tensor.istft, torch.diagflat, Tensor.diagflat, torch.column_stack, torch.block_diag),
    *(torch.fft.hfft2, torch.fft.hfftn, torch.fft.ihfft2, torch.fft.ihfftn),
):
    _in_parts(_op)


@decomposition(torch.stft, Tensor.stft)
def stft(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In parts too, and of a copy: torch takes frames by as_strided, whose derivative adds up the samples of an expanded tensor."""
    if not any(map(_functorch.is_vmapped, tensors_of((input, *args), kwargs))):
        return NotImplemented

    def of_a_copy(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stft(input.clone(), *args, **kwargs)

    if _functorch.tangents_active():  # which take any op in parts
        with torch._C.DisableTorchFunction():
            return of_a_copy(input, *args, **kwargs)
    return _functorch.in_parts(of_a_copy, (input, *args), kwargs)


def _quantile(name: str) -> None:
    @decomposition(getattr(Tensor, name), getattr(torch, name))
    def quantile(
        input: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear", out: Tensor | None = None
    ) -> Any:
        """Interpolate between the sorted entries next to rank q (count - 1), in torch's own steps, one of which vmap runs sample by sample.

        Source: quantile_compute in aten/src/ATen/native/Sorting.cpp.
        """
        several = isinstance(q, Tensor) and q.ndim == 1
        if out is not None or not _functorch.is_vmapped(input) or input.numel() == 0 or not input.ndim and dim not in (None, 0, -1):
            return NotImplemented
        if isinstance(q, Tensor) and (q.ndim > 1 or q.dtype != input.dtype or q.device != input.device):
            return NotImplemented
        share = q if isinstance(q, Tensor) else torch.tensor(q, dtype=input.dtype, device=input.device)
        if share.device.type == "cpu" and not ((share >= 0) & (share <= 1)).all():
            return NotImplemented  # torch raises its own error
        if input.dtype not in (torch.float32, torch.float64) or interpolation not in (*_WHOLE, "linear", "midpoint"):
            return NotImplemented  # torch raises its own error
        flat = input.reshape(-1) if dim is None else input.movedim(dim, -1) if input.ndim else input[None]
        ordered = flat.sort().values  # NaN last
        unknown = ordered.isnan().sum(-1, keepdim=True)
        last = flat.shape[-1] - 1
        if name == "nanquantile":
            rank = share * (last - unknown).clamp(min=0)
        else:
            rank = torch.where(unknown > 0, last, share * last)  # the rank of a NaN, if there is one
        if interpolation in _WHOLE:
            found = ordered.gather(-1, _WHOLE[interpolation](rank).long())
        else:
            below, above = rank.floor(), rank.ceil()
            weight = torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - below
            found = torch.lerp(ordered.gather(-1, below.long()), ordered.gather(-1, above.long()), weight)
        # [*rest, several] -> [several, *rest]: the shares first, then the remaining dimensions of the input.
        whole = found.movedim(-1, 0)
        if keepdim:
            whole = whole.reshape(-1, *(1,) * input.ndim) if dim is None or not input.ndim else whole.unsqueeze(1 + dim % input.ndim)
        return whole if several else whole[0]


_WHOLE = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}
"""How to round the rank for the interpolations whose quantile is one of the entries."""

_quantile("quantile")
_quantile("nanquantile")


@decomposition(torch._foreach_norm)  # pyright: ignore[reportPrivateImportUsage]
def _foreach_norm(tensors: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """As `torch.nn.utils.clip_grad_norm_` calls it."""
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def _one_after_another(op: Any) -> Callable[..., Any]:
    """An op of two operands on lists, as it runs on their tensors; the second may be one number for all."""

    def run(self: Sequence[Tensor], others: Any, **options: Any) -> Any:
        others = others if isinstance(others, (list, tuple)) else [others] * len(self)
        return [op(*pair, **options) for pair in zip(self, others, strict=True)] if len(self) == len(others) else NotImplemented

    return run


for _name in ("add", "sub", "mul", "div"):
    decomposition(getattr(torch, f"_foreach_{_name}"))(_one_after_another(getattr(torch, _name)))


@rule(torch.sparse.mm, params=("mat1",), frozen=True)
def sparse_product(mat1: Tensor, mat2: Tensor) -> Any:
    """One product of a constant sparse matrix, which vmap cannot repeat, with the columns of all samples: [k,m], [n,m,p] -> [n,k,p]."""
    if mat1.layout == torch.strided or mat1.ndim != 2 or mat2.layout != torch.strided or mat2.ndim != 3:
        return NotImplemented
    return for_all_columns(torch.sparse.mm, mat1, mat2), {}


class _SparseProduct(torch.autograd.Function):
    """S D, for a constant sparse S: its derivative for D is such a product too, of which vmap can run one for all samples."""

    @staticmethod
    def forward(matrix: Tensor, dense: Tensor) -> Tensor:
        return torch.sparse.mm(matrix, dense)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (matrix,) = ctx.saved_tensors
        return None, _SparseProduct.apply(matrix.t(), cotangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, matrix: Tensor, dense: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return for_all_columns(_SparseProduct.apply, matrix, dense.movedim(in_dims[1], 0)), 0


@decomposition(torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, need=SPARSE)
def _product_with_sparse(input: Tensor, *others: Tensor, **options: Any) -> Any:
    """Of a sparse matrix with a dense one, or of a dense one with a sparse one."""
    if _is_sparse_product(input, *others, **options):
        return _sparse_times_dense(input, *others)
    if len(others) == 1 and _is_sparse_product(others[0], input, **options):
        return _sparse_times_dense(others[0].t(), input.t()).t()
    return NotImplemented


def _sparse_times_dense(matrix: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.mm(matrix, dense) if _functorch.is_wrapped(dense) else _SparseProduct.apply(matrix, dense)


@decomposition(torch.sparse.mm)
def _sparse_mm(mat1: Tensor, mat2: Tensor, *reduce: Any, **options: Any) -> Any:
    fits = _is_sparse_product(mat1, mat2, *reduce, **options) and not _functorch.is_wrapped(mat2)
    return _SparseProduct.apply(mat1, mat2) if fits else NotImplemented


def _is_sparse_product(input: Tensor, *others: Any, **options: Any) -> bool:
    if len(others) != 1 or options or not (isinstance(input, Tensor) and isinstance(others[0], Tensor)):
        return False  # what is no tensor may have a __torch_function__
    if (input.ndim, others[0].ndim) != (2, 2) or others[0].layout != torch.strided:
        return False
    return input.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


@decomposition(F.rrelu)
def _rrelu(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    """In evaluation mode. In training mode the numbers that torch draws depend on the signs of all samples."""
    return NotImplemented if training else F.leaky_relu(input, (lower + upper) / 2, inplace)


@decomposition(torch.rrelu)
def _torch_rrelu(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Any:
    return NotImplemented if training else F.leaky_relu(input, (lower + upper) / 2)


@decomposition(F.gumbel_softmax)
def _gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Any:
    """The hard form: vmap would run its scatter_ sample by sample."""
    if not hard:
        return NotImplemented
    soft = F.gumbel_softmax(logits, tau, eps=eps, dim=dim)
    chosen = soft.max(dim, keepdim=True).indices
    return torch.zeros_like(soft).scatter(dim, chosen, 1.0) - soft.detach() + soft


@decomposition(F.one_hot)
def _one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
    """Compare with all classes, as vmap does too, but outside of derivatives alone, and of classes that do not exist it makes zeros."""
    if not _functorch.is_vmapped(tensor) or tensor.dtype != torch.int64:
        return NotImplemented
    if isinstance(num_classes, Tensor):
        num_classes = int(num_classes)
    if num_classes == -1 and tensor.numel():
        num_classes = int(tensor.max()) + 1  # the same for all samples, or they part
    if num_classes < 1:
        return NotImplemented  # torch raises its own error
    classes = _functorch.bare(tensor)
    with torch._C.DisableTorchFunction():
        known = _functorch.can_read_now(classes) and classes.numel()
        if known and not 0 <= classes.min() <= classes.max() < num_classes:
            raise RuntimeError(f"one_hot: a class is not in 0, ..., {num_classes - 1}")
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


@decomposition(torch.masked_scatter, Tensor.masked_scatter)
def _masked_scatter(input: Tensor, mask: Tensor, source: Tensor, **options: Any) -> Any:
    """Each place that the mask selects looks its entry of the source up: the first one the first, and so on."""
    if options or mask.dtype != torch.bool or input.dtype != source.dtype or not source.numel():
        return NotImplemented  # torch raises its own error, or copies nothing
    mask = mask.expand(torch.broadcast_shapes(input.shape, mask.shape))
    ranks = torch.where(mask, mask.reshape(-1).cumsum(0).reshape(mask.shape) - 1, 0)
    return torch.where(mask, source.reshape(-1)[ranks], input)


@decomposition(torch.renorm, Tensor.renorm)
def _renorm(input: Tensor, p: float, dim: int, maxnorm: float, **others: Any) -> Any:
    """Scale the slices along `dim` that have a norm above `maxnorm` down to that norm."""
    if input.ndim < 2 or input.is_complex() or not input.is_contiguous() or any(isinstance(number, Tensor) for number in (p, maxnorm)):
        return NotImplemented
    if others or p <= 0 or maxnorm < 0 or not -input.ndim <= dim < input.ndim:
        return NotImplemented  # torch raises its own error
    dims = [d for d in range(input.ndim) if d != dim % input.ndim]
    norm = torch.linalg.vector_norm(input, p, dims, keepdim=True)
    # Of the others the norm has no derivative, which rounding can make NaN: powers of small numbers are zero.
    norm = torch.linalg.vector_norm(torch.where(norm > maxnorm, input, 0), p, dims, keepdim=True)
    return input * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1)


@decomposition(F.affine_grid)
def _affine_grid(theta: Tensor, size: Any, align_corners: bool | None = None) -> Any:
    """The product of theta and the grid of the identity: ([b,d,d+1], [b,c,*shape]) -> [b,*shape,d]."""
    dims = len(size) - 2 if isinstance(size, (list, tuple)) else 0
    if dims not in (2, 3) or theta.ndim != 3 or theta.shape != (size[0], dims, dims + 1) or not _functorch.is_vmapped(theta):
        return NotImplemented
    identity = torch.eye(dims, dims + 1, dtype=theta.dtype, device=theta.device)[None]
    grid = F.affine_grid(identity, [1, *size[1:]], bool(align_corners))
    points = F.pad(grid.reshape(-1, dims), (0, 1), value=1.0)
    return (points @ theta.mT).reshape(size[0], *size[2:], dims)


@decomposition(F.pdist)
def _pdist(input: Tensor, p: float = 2.0) -> Any:
    """The distances of all pairs of rows."""
    if input.ndim != 2 or p not in (1, 2) or input.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return torch.linalg.vector_norm(input[first] - input[second], p, -1)


_CHANNELS_LAST = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _layout(conversion: Any) -> None:
    @decomposition(conversion, need="memory_format")
    def channels_last(*args: Any, memory_format: Any = None, **kwargs: Any) -> Any:
        """Channels last within each sample: vmap cannot convert to it by name, so permute, make contiguous, and permute back."""
        if memory_format not in _CHANNELS_LAST:
            return NotImplemented
        self, *others = args or (kwargs.pop("input"),)  # the name that functions have for it
        if _CHANNELS_LAST[memory_format] != self.ndim:
            return NotImplemented
        moved = conversion(self.movedim(1, -1), *others, **kwargs).contiguous().movedim(-1, 1)
        # torch takes a tensor that fits both layouts for contiguous, so its conversion to channels last is a copy, not an alias.
        both = conversion is not Tensor.contiguous and moved.dtype == self.dtype and self.is_contiguous()
        with torch._C.DisableTorchFunction():
            alias = both and _functorch.memory_of(moved) == _functorch.memory_of(self)
        return moved.clone() if alias else moved


for _conversion in (
    *(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
):
    _layout(_conversion)


@decomposition(Tensor.is_contiguous)
def _is_contiguous(self: Tensor, memory_format: Any = torch.contiguous_format) -> Any:
    """Whether a sample is contiguous in a channels-last layout."""
    if _CHANNELS_LAST.get(memory_format) != self.ndim:
        return NotImplemented
    return self.movedim(1, -1).is_contiguous()


@decomposition(torch.complex)
def _complex(real: Tensor, imag: Tensor, *, out: Tensor | None = None) -> Any:
    """The same in memory: the derivative of `torch.complex` takes the imaginary part of a lazy conjugate, which vmap cannot negate."""
    if out is not None or real.dtype != imag.dtype or not real.is_floating_point():
        return NotImplemented
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imag), -1))


@decomposition(torch.imag, vars(torch._C.TensorBase)["imag"].__get__)
def _imag(input: Tensor) -> Any:
    """Of a lazy conjugate, resolved."""
    return input.resolve_conj().imag if input.is_conj() else NotImplemented
