"""Which processor this is: libraries are tuned for some."""

import functools

import torch
from torch import Tensor


@functools.cache
def is_amd() -> bool:
    """Whether this is one of AMD's processors."""
    return "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")


def multiplies_by_tensor_cores(tensor: Tensor) -> bool:
    """Whether products of matrices like this one run on the tensor cores of a CUDA device: in 16 bits, or where TF32 is allowed."""
    if not tensor.is_cuda:
        return False
    return tensor.dtype.itemsize == 2 or tensor.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
