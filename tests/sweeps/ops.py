"""Every differentiable op that PyTorch's own tests know, with every tensor of its sample inputs in every role.

python -m sweeps.ops [--only NAME ...] [--jobs 2] [--dtype complex128] [--large] [--json FILE]
"""

import contextlib
import inspect
import random
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import optree
import torch
from cases import Problem
from seeding import seed
from torch import Tensor

from sweeps.outcome import score, spread
from sweeps.report import Trial, report

N = 3
PARAM, DATA, CONST, PRODUCT, STRIDED, TURNED = "param", "data", "const", "product", "strided", "turned"
"""What a tensor of an op's arguments is: a parameter; another one in every sample; the same in all; a parameter times data; a parameter
whose memory lies transposed; the transpose of a parameter."""
INSIDE = {
    "gradient": lambda f, input: torch.func.grad(f)(input),
    "tangent": lambda f, input: torch.func.jvp(f, (input,), (input.cos(),))[1],
}
"""Derivatives of an op for its first argument that fn itself takes."""
NOT_INSIDE = re.compile("^(bfloat16|half|chalf|float|cfloat)$|linear_cross_entropy|multi_head_attention_forward")
"""Not of ops that round a derivative otherwise; of one that has no tangent in torch, and branches on requires_grad; and of one whose sample
inputs are so large that the digits of its second derivatives cancel."""
LARGE = 100_000
"""Sample inputs with more entries than this test speed, not rules."""


def names(dtype: torch.dtype = torch.float64) -> list[str]:
    """The ops that have a gradient in this dtype."""
    return [op.full_name for op in database() if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")]


def database() -> list:
    """The ops that PyTorch's own tests know."""
    # Slow to import, and not for everyone who collects the tests.
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # For every list of sample inputs torch looks for one of its own tests on the stack: a tenth of a second under pytest.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    return op_db


def trials(name: str, dtype: torch.dtype) -> Iterator[Trial]:
    """All trials of an op. Labels name the op, its form, the number of the sample input and the roles."""
    (op,) = (op for op in database() if op.full_name == name)
    seed()
    random.seed(0)
    for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
        if sum(leaf.numel() for leaf in _leaves(sample)[0] if isinstance(leaf, Tensor)) > LARGE:
            continue
        for form, call in _forms(op, sample).items():
            for roles in _roles(sample, form, layouts="dropout" not in name):
                label = f"{name} {form} {number} {'.'.join(roles)}"
                build = partial(_problem, sample, call, roles, form, f"{name} {number}")
                yield Trial(label, [partial(build, roll) for roll in _rolls(sample, roles)])


def _forms(op: Any, sample: Any) -> dict[str, Callable]:
    processed = {form: _processed(call, sample) for form, call in _calls(op, sample).items()}
    real = isinstance(sample.input, Tensor) and sample.input.is_floating_point()  # of complex inputs the sines of sines lose all digits
    if real and _differentiable(sample.input) and not NOT_INSIDE.search(op.full_name):
        processed |= {f"{name} inside": _inside(derivative, processed["function"]) for name, derivative in INSIDE.items()}
    return processed


def _processed(call: Callable, sample: Any) -> Callable:
    return lambda input, *args, **kwargs: sample.output_process_fn_grad(call(input, *args, **kwargs))


def _inside(derivative: Callable, call: Callable) -> Callable:
    return lambda input, *args, **kwargs: derivative(lambda input: score(call(input, *args, **kwargs)), input)


def _calls(op: Any, sample: Any) -> dict[str, Callable]:
    forms = {"function": op.get_op(), "by name": _named(op.get_op(), sample)}
    if isinstance(sample.input, Tensor):
        forms |= {"method": op.method_variant, "in place": op.inplace_variant}
        if not sample.kwargs and len(sample.args) == 1:
            forms |= {"operator": op.operator_variant, "in-place operator": op.inplace_operator_variant}
    return {form: call for form, call in forms.items() if call is not None}


def _named(function: Callable, sample: Any) -> Callable | None:
    """The function called with all its arguments by name; None if it does not take them so."""
    given = (sample.input, *sample.args)
    for names in _parameters(function):
        if len(names) < len(given) or not sample.kwargs.keys().isdisjoint(names[: len(given)]):
            continue
        by_name = lambda *args, names=names, **kwargs: function(**dict(zip(names, args, strict=False)), **kwargs)  # noqa: E731
        with contextlib.suppress(TypeError, RuntimeError, ValueError), warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            by_name(*given, **sample.kwargs)
            return by_name
    return None


def _parameters(function: Callable) -> list[list[str]]:
    """The names of a function's arguments, for each of its overloads."""
    if isinstance(function, BuiltinFunctionType):
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{function.__name__}")
        return [["input" if argument.name == "self" else argument.name for argument in schema.arguments] for schema in schemas]
    return [list(inspect.signature(function).parameters)] if isinstance(function, FunctionType) else []


def _leaves(sample: Any) -> tuple[list, Any]:
    return optree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)), none_is_leaf=True)


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.layout == torch.strided


def _shared(leaf: Tensor) -> bool:
    """What cannot be different in every sample: no stack of samples can hold it."""
    return leaf.layout != torch.strided


def _roles(sample: Any, form: str, layouts: bool) -> list[tuple[str, ...]]:
    """The roles to try, one for each tensor among the arguments; other layouts of parameters not where a random mask follows them."""
    tensors = [leaf for leaf in _leaves(sample)[0] if isinstance(leaf, Tensor)]
    own = [i for i, leaf in enumerate(tensors) if _differentiable(leaf)]

    def others(role: str, other: str, chosen: list[int]) -> tuple[str, ...]:
        return tuple(role if i in chosen else CONST if _shared(tensor) else other for i, tensor in enumerate(tensors))

    tried = [others(PARAM, DATA, [i]) for i in own] + [others(PARAM, CONST, own)]
    if form == "function":
        tried += [others(role, CONST, [i]) for role in (PARAM, PRODUCT) for i in own]
        tried += [others(role, DATA, [i]) for role in (STRIDED, TURNED) for i in own if layouts and tensors[i].ndim > 1]
    tried += [others(PRODUCT, DATA, own)]
    return list(dict.fromkeys(tried)) if own else []


def _rolls(sample: Any, roles: tuple[str, ...]) -> list[bool]:
    """Whether to roll the integers among the data: first rolled, and as they are if the loop cannot run that."""
    tensors = [leaf for leaf in _leaves(sample)[0] if isinstance(leaf, Tensor)]
    return [True, False] if any(role == DATA and not t.is_floating_point() for t, role in zip(tensors, roles, strict=True)) else [False]


def _problem(sample: Any, call: Callable, roles: tuple[str, ...], form: str, name: str, roll: bool) -> Problem:
    leaves, spec = _leaves(sample)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    params: dict[str, Tensor] = {}
    batch: dict[str, Tensor] = {"scale": torch.linspace(0.5, 1.5, N, dtype=torch.float64)}
    for i, role in zip(places, roles, strict=True):
        value = leaves[i].detach()
        if role in (PARAM, PRODUCT):
            params[str(i)] = value
        if role in (STRIDED, TURNED):
            params[str(i)] = _turned(_turned(value).contiguous()) if role == STRIDED else _turned(value).contiguous()
        if role == DATA:
            batch[str(i)] = spread(value, N, generator, roll)
        if role == PRODUCT:
            batch[str(i)] = spread(torch.ones_like(value), N, generator)
    constants = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def fn(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        own = list(constants)
        for i, role in zip(places, roles, strict=True):
            if role in (PARAM, STRIDED):
                own[i] = params[str(i)]
            elif role == DATA:
                own[i] = batch[str(i)]
            elif role == PRODUCT:
                own[i] = params[str(i)] * batch[str(i)]
            elif role == TURNED:
                own[i] = _turned(params[str(i)])
        input, args, kwargs = optree.tree_unflatten(spec, own)
        if form.startswith("in"):  # in place
            input = input.clone()
        output = call(input, *args, **kwargs)
        return score(optree.tree_map(lambda leaf: leaf * batch["scale"] if _real(leaf) else leaf, output, none_is_leaf=True))

    return Problem(fn, (params, batch))


def _turned(tensor: Tensor) -> Tensor:
    return tensor.permute(*reversed(range(tensor.ndim)))


def _real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and (leaf.is_floating_point() or leaf.is_complex())


if __name__ == "__main__":
    report(__doc__, names, trials)
