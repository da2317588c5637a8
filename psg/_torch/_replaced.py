"""Functions of torch that other libraries have replaced by their own."""

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from psg._torch._patches import ForAll, patch


def torchs_own() -> ForAll:
    """A context in which the names of torch's builtin functions stand for these, whatever has been put in their place.

    psg's tables are made in it: a wrapper that somebody has put there calls the builtin function, which is what psg's passes then see. A
    method is another matter: torch shows to passes what stands under its name, wrapper or not. And of a function that torch itself writes
    in Python nothing is left once it is replaced.
    """
    return patch(
        {
            (owner, name): getattr(builtins, name)
            for owner, builtins in _BUILTINS
            for name in vars(owner).keys() & set(dir(builtins))
            if _is_foreign(vars(owner)[name])
        }
    )


_C: Any = torch._C
_BUILTINS = [
    (torch, _C._VariableFunctions),
    (F, _C._nn),
    (torch.special, _C._special),
    (torch.linalg, _C._linalg),
    (torch.fft, _C._fft),
]


def _is_foreign(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__globals__["__name__"].partition(".")[0] != "torch"
