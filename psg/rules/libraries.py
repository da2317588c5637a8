"""Ops of libraries that hold frozen weights in fewer bits: products of such a weight with data.

Each takes the data first, [*, i], and gives [*, o], row by row, so that one call serves all samples. vmap has no rule for them.
"""

from typing import Any

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from psg._torch import _functorch
from psg._torch._ops import tensors_of

_PRODUCTS = {"bitsandbytes::gemm_4bit", "quanto::qbytes_mm"}


def run_rows(func: Any, args: Any, kwargs: Any, level: int, n: int) -> Any:
    """Run such an op below vmap, for the data of all samples; NotImplemented for every other op, and if more than the data differs.

    Example:
        >>> run_rows(len, (), {}, 1, 2)
        NotImplemented
    """
    if not isinstance(func, (OpOverload, OpOverloadPacket)) or _name_of(func) not in _PRODUCTS:
        return NotImplemented
    data, *others = args
    if not _functorch.is_batched(data, level) or any(map(_functorch.is_wrapped, tensors_of(others, kwargs))):
        return NotImplemented

    def run(rows: Tensor) -> Tensor:
        return func(rows, *others, **kwargs)

    return _functorch.run_below(run, [data], level, n)


def _name_of(func: OpOverload | OpOverloadPacket) -> str:
    return func._qualified_op_name if isinstance(func, OpOverloadPacket) else func._schema.name
