"""One table of cases, shared by all tests: functions of one sample, with parameters and a batch of N.

Each row is a name and a recipe; `case.build(device)` runs the recipe from a fixed seed. What a row says about the
ladder is the reason why a rung cannot run it, and tests hold it to that.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from seeding import seed
from torch.func import functional_call

import psg

N = 3


class Problem(NamedTuple):
    """A function of one sample, its arguments (parameters and batch), keyword arguments and psg's options."""

    fn: Callable
    args: tuple
    shared: dict[str, Any] = {}
    options: dict[str, Any] = {}


class Case(NamedTuple):
    """A row of the table.

    `not_capture` says why the capture pass cannot run it, `not_vmap` why vmap(grad) cannot either: only then may psg
    warn that it goes down the ladder, and then it must. `vmap_wrong` says why vmap(grad) is no reference here, and
    `not_traced` why psg.jit cannot trace it although capture can run it.
    """

    name: str
    recipe: Callable[[], Problem]
    not_capture: str = ""
    not_vmap: str = ""
    vmap_wrong: str = ""
    not_traced: str = ""

    def build(self, device="cpu") -> Problem:
        seed()
        with torch.device(device):
            return self.recipe()


def falling(reason):
    """The context of a call that goes down the ladder for a reason, or, without one, must not."""
    return pytest.warns(psg.FallbackWarning) if reason else nullcontext()


CASES: list[Case] = []


def each_case(keep=lambda case: True):
    """Parametrize a test over the table, or over the rows that `keep` picks."""
    return pytest.mark.parametrize("case", [case for case in CASES if keep(case)], ids=lambda case: case.name)


def case(recipe=None, *, name=None, **ladder):
    """Add a row whose recipe is the decorated function."""

    def add(recipe):
        CASES.append(Case(name or recipe.__name__.replace("_", " "), recipe, **ladder))
        return recipe

    return add if recipe is None else add(recipe)


def score(y):
    """A scalar whose derivative differs from entry to entry, also of the same entries in another order or shape."""
    y = torch.view_as_real(y) if y.is_complex() else y
    code = sum(k * size for k, size in enumerate(y.shape, 1))
    weights = 1 + torch.arange(y.numel(), device=y.device).reshape(y.shape) / max(1, y.numel())
    return (y * torch.sin(y + code / 16) * weights.to(y.dtype)).sum()


def normal(*shape):
    return torch.randn(shape)


def ids(high, *shape):
    return torch.randint(high, shape)


def op_case(name, op, sample, *positional, params, high=None, ladder=None, **options):
    """Add the row of one op: parameters by keyword, a batch of samples of one shape (integers below `high`)."""

    def recipe():
        weights = {key: normal(*shape) for key, shape in params.items()}
        batch = normal(N, *sample) if high is None else ids(high, N, *sample)
        return Problem(lambda p, x: score(op(x, *positional, **p, **options)), (weights, batch))

    CASES.append(Case(name, recipe, **(ladder or {})))


def module_case(name, build, *samples, **ladder):
    """Add the row of a module: its own parameters, one batch dimension added for it."""

    def recipe():
        module = build()

        def fn(params, *inputs):
            out = functional_call(module, params, tuple(x.unsqueeze(0) for x in inputs))
            return score(out[0] if isinstance(out, tuple) else out)

        return Problem(fn, (parameters(module), *(normal(N, *sample) for sample in samples)))

    CASES.append(Case(name, recipe, **ladder))


def parameters(module):
    return {name: p.detach() for name, p in module.named_parameters()}
