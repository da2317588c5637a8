"""Which processor this is: libraries are tuned for some."""

import functools

import torch


@functools.cache
def is_amd() -> bool:
    """Whether this is one of AMD's processors."""
    return "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")
