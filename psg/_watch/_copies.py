"""Copies of fn's arguments, for a function that may write into them, or look at their layout."""

import torch
from torch import Tensor

from psg._torch import _functorch


def sample_by_sample(tensor: Tensor, dim: int | None) -> Tensor:
    """A copy in which every sample is contiguous, as it is in a loop.

    Otherwise an op such as `reshape` may give a copy under vmap where it gives a view in a loop, or the other way round.
    """
    if dim is None:
        return copy_of(tensor)
    copy = contiguous_copy_of(tensor.movedim(dim, 0)).movedim(0, dim)
    # autograd lets nobody write parameters into a view that was made under no_grad
    return copy if torch.is_grad_enabled() or _functorch.is_transformed() else copy.detach()


def contiguous_copy_of(tensor: Tensor) -> Tensor:
    """A contiguous copy; of a sparse tensor, which has no strides, a copy."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.layout == torch.strided else tensor.clone()


_SPARSEST = 64


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the tensor's strides and the memory in the gaps between its entries: fn may branch on strides, and read the gaps.

    If the gaps are much larger than the entries, or the tensor is differentiated, a plain `clone` without gaps.
    """
    copy = tensor.clone()
    if tensor.layout != torch.strided or tensor.is_nested:
        return copy
    if copy.stride() == tensor.stride() or copy.numel() == 0 or tensor.requires_grad or _functorch.is_wrapped(tensor):
        return copy
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if extent > _SPARSEST * copy.numel():
        return copy
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copy.as_strided((extent,), (1,)).copy_(tensor.as_strided((extent,), (1,)))
    return copy
