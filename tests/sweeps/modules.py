"""Every module with parameters that PyTorch's own tests know, on every sample input.

python -m sweeps.modules [--only NAME ...] [--jobs 2] [--large] [--json FILE]
"""

import random
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import optree
import torch
from cases import Problem, parameters
from seeding import seed
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from sweeps.outcome import score, spread
from sweeps.report import Trial, report

N = 3


def names(dtype: torch.dtype = torch.float64) -> list[str]:
    """The modules that know this dtype."""
    return [info.name for info in _database() if dtype in info.dtypes]


def _database() -> list:
    from torch.testing._internal.common_modules import module_db  # slow, and not for everyone who collects the tests

    return module_db


def trials(name: str, dtype: torch.dtype) -> Iterator[Trial]:
    """All trials of a module that has parameters. Labels name the module, its mode and the number of the sample input."""
    (info,) = (info for info in _database() if info.name == name)
    seed()
    random.seed(0)
    for mode in ("train", "eval") if info.train_and_eval_differ else ("train",):
        training = mode == "train"
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for number, input in enumerate(inputs):
            module = info.module_cls(*input.constructor_input.args, **input.constructor_input.kwargs)
            module = module.to(dtype).train(training)
            args, kwargs = input.forward_input.args, input.forward_input.kwargs
            if isinstance(module, nn.modules.lazy.LazyModuleMixin):
                module(*args, **kwargs)
            if parameters(module):
                label = f"{name} {mode} {number}"
                yield Trial(label, [partial(_problem, module, (args, kwargs), label)])


def _problem(module: nn.Module, inputs: Any, label: str) -> Problem:
    """The module as a function of its parameters and of the floating-point and integer tensors among its inputs."""
    # A packed sequence is one input, of which only the values differ from sample to sample.
    leaves, spec = optree.tree_flatten(inputs, none_is_leaf=True, is_leaf=lambda node: isinstance(node, PackedSequence))
    values = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in leaves]
    places = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.dtype != torch.bool]
    generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    batch = {str(i): spread(values[i], N, generator) for i in places}
    constants = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def fn(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        own = list(constants)
        for i in places:
            leaf, value = own[i], batch[str(i)]
            own[i] = leaf._replace(data=value) if isinstance(leaf, PackedSequence) else value
        args, kwargs = optree.tree_unflatten(spec, own)
        return score(functional_call(module, params, args, kwargs))

    return Problem(fn, (parameters(module), batch))


if __name__ == "__main__":
    report(__doc__, names, trials)
