"""Lookups. With C the cotangent: grad W[n,v,:] = sum_t [index[n,t] = v] C[n,t,:]."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psg.factors import Rows
from psg.rules._registry import rule


@rule(F.embedding, params=("weight",))
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """y = W[index]: ([n,*], [v,d]) -> [n,*,d]. `sparse` says how torch would store the summed gradient; it changes no number."""
    if weight.is_complex():
        return NotImplemented
    rows, features = weight.shape
    output = F.embedding(input, weight)
    if max_norm is not None:
        # Rows longer than max_norm are shortened before the lookup, outside of differentiation. torch writes them back into the
        # weight; a pure function does not, and reads the same values.
        with torch.no_grad():
            norm = torch.linalg.vector_norm(output, norm_type, dim=-1, keepdim=True)
            output = torch.where(norm > max_norm, output * (max_norm / (norm + 1e-7)), output)

    def factor(cotangent: Tensor) -> Rows:
        index = input.reshape(input.shape[0], input.shape[1:].numel())
        cotangent = cotangent.reshape(*index.shape, features)
        ignored = None if padding_idx is None else index == padding_idx % rows
        if scale_grad_by_freq:
            # The frequency is that within the sample: one sample is all that fn sees.
            count = (index[:, :, None] == index[:, None, :]).sum(2, keepdim=True)
            cotangent = cotangent / count
        if ignored is not None:
            cotangent = cotangent.masked_fill(ignored[:, :, None], 0)
        return Rows(index, cotangent, rows)

    return output, {"weight": factor}
