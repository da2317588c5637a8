"""Ops that a lifted parameter must not meet as they are. The list is short, and each entry has its test.

Lifting is as right as PyTorch's vmap with autograd beneath it; these are the places where that is wrong.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg.rules._registry import decomposition, leak

for _op in (torch.as_strided, Tensor.as_strided, torch.as_strided_copy, Tensor.as_strided_):
    leak(_op, "as_strided reads memory that the batched parameter does not have")
for _op in (torch.select_scatter, Tensor.select_scatter):
    leak(_op, "select_scatter under vmap has a wrong gradient")


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
