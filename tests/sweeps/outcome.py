"""One problem through psg and the loop: what came of it."""

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from agreement import cut
from cases import Problem
from seeding import seed
from torch import Tensor

import psg
from psg import _errors
from psg._trees import flatten, unflatten
from psg.testing import Mismatch, assert_trees_close, loop_value_and_grad

RUNGS = ("capture", "vmap", "loop")
"""Right, and on this rung."""
LEFT_OUT = "left out"
"""The loop cannot run it: there is nothing to compare with."""
TORCH = "torch"
"""psg agrees with finite differences, and the loop, which is eager PyTorch, does not."""
REFUSED = "refused"
"""psg says that the function changes state."""
FAILURES = ("wrong", "raised", "wrote")
"""Another number than the loop's; an error where the loop has a number; a change in the caller's own tensors."""

ROUNDING = 1e-11
"""What an exact zero is held to: inputs are of order ten, and a stabiliser such as 1e-5 under a root amplifies their rounding."""


class Outcome(NamedTuple):
    """What came of a problem: one of the words above, and why."""

    status: str
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.status in FAILURES


class NotDifferentiable(Exception):
    """The function has no floating-point output."""


def score(tree: Any) -> Tensor:
    """A smooth scalar of all floating-point tensors in a tree, sensitive to each of their entries."""
    terms = []
    for leaf in flatten(tree)[0]:
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            values = leaf.to_dense() if leaf.layout != torch.strided else leaf
            values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
            weights = torch.arange(1, values.numel() + 1, dtype=values.dtype).sin().reshape(values.shape)
            terms.append((weights * values + torch.sin(values) / 2).sum().double())
    if not terms:
        raise NotDifferentiable("no floating-point output")
    return torch.stack(terms).sum()


def settle(problems: Iterable[Problem]) -> Outcome:
    """Run the first problem that the loop can run by `method="auto"`, and compare."""
    outcome = Outcome(LEFT_OUT)
    for problem in problems:
        # Where a function draws random numbers, it draws the same for every sample, here and there.
        problem = problem._replace(fn=_seeded(problem.fn))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = loop_value_and_grad(problem.fn)(*problem.args)
                asis = problem.fn(_watched(problem.args[0]), *cut(problem).sample(0)[1:])
            except Exception as error:
                outcome = Outcome(LEFT_OUT, f"the loop: {_told(error)}")
                continue
        if not torch.allclose(asis.detach(), expected[0][0], equal_nan=True):
            return Outcome(LEFT_OUT, "it reads the memory around a parameter, which the loop's compact copy does not have")
        return _compare(problem, expected)
    return outcome


def _watched(params: Any) -> Any:
    """Leaves of autograd over the same memory."""
    leaves, spec = flatten(params)
    return unflatten(spec, [leaf.detach().requires_grad_() for leaf in leaves])


def _seeded(fn: Callable) -> Callable:
    def seeded(*args: Any) -> Tensor:
        seed()
        return fn(*args)

    return seeded


def _compare(problem: Problem, expected: Any) -> Outcome:
    before = [leaf.clone() for leaf in _tensors(problem.args)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _errors.warned.clear()
        try:
            found = psg.per_sample_value_and_grad(problem.fn, randomness="same")(*problem.args)
        except psg.StateError as error:
            return Outcome(REFUSED, _told(error))
        except Exception as error:
            return Outcome("raised", _told(error))
    if not all(map(_same, before, _tensors(problem.args))):
        return Outcome("wrote", "into the caller's tensors")
    rung, reason = _rung(caught)
    try:
        assert_trees_close(found[0], expected[0], rtol=1e-9, atol=ROUNDING, name="values")
    except Mismatch as mismatch:
        return Outcome("wrong", f"{rung}: {mismatch}")
    try:
        assert_trees_close(found[1], expected[1], rtol=1e-9, atol=ROUNDING, name="grads")
    except Mismatch as mismatch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nearer = arbitrate(problem, found[1], expected[1], mismatch.sample)
        return Outcome(TORCH if nearer == "psg" else "wrong", f"{rung}: {mismatch} (finite differences: {nearer})")
    return Outcome(rung, reason)


def arbitrate(problem: Problem, found: Any, expected: Any, i: int | None) -> str:
    """Whether finite differences of sample i along the disagreement agree with "psg", "the loop" or "neither"."""
    if i is None:
        return "neither"
    ours, theirs = ([leaf[i] for leaf in flatten(tree)[0]] for tree in (found, expected))
    gap = [a - b for a, b in zip(ours, theirs, strict=True)]
    size = torch.stack([leaf.abs().square().sum() for leaf in gap]).sum().sqrt().item()
    if not 0 < size < float("inf"):
        return "neither"
    line = [leaf / size for leaf in gap]
    args = cut(problem).sample(i)
    origin, spec = flatten(args[0])

    def value(shift: float) -> float:
        return problem.fn(unflatten(spec, [p + shift * d for p, d in zip(origin, line, strict=True)]), *args[1:]).item()

    def slope(step: float) -> float:
        return (8 * (value(step) - value(-step)) - (value(2 * step) - value(-2 * step))) / (12 * step)

    measured = slope(1e-3)
    spread = abs(measured - slope(1e-4))
    told = {"psg": _along(ours, line), "the loop": _along(theirs, line)}
    nearer = min(told, key=lambda side: abs(told[side] - measured))
    return nearer if abs(told[nearer] - measured) <= max(10 * spread, 0.05 * size) else "neither"


def _along(gradient: list[Tensor], line: list[Tensor]) -> float:
    return sum((g.conj() * d).real.sum().item() for g, d in zip(gradient, line, strict=True))


def _rung(caught: list[warnings.WarningMessage]) -> tuple[str, str]:
    """The rung that gave the result and the reasons, from the one warning of the ladder."""
    for warning in caught:
        if issubclass(warning.category, psg.FallbackWarning):
            text = str(warning.message)
            (rung,) = re.findall(r"The result comes from method='(\w+)'", text)
            (reason,) = re.findall(r"^.*?: (capture could not run it \(.*\))\. The result comes from", text, re.DOTALL)
            return rung, reason
    return "capture", ""


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def _same(before: Tensor, after: Tensor) -> bool:
    return before.shape == after.shape and torch.equal(before.nan_to_num(), after.detach().nan_to_num())


def _told(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else 'no message'}"


def spread(value: Tensor, n: int, generator: torch.Generator, roll: bool = True) -> Tensor:
    """n samples around a value, [*shape] -> [n, *shape].

    Floating-point tensors are scaled, by at most 1 so that they stay in the domain of the function, and perturbed entry by entry;
    of integers the last dimension is rolled, which no function that wants them sorted can run; others are repeated.
    """
    rows = value.detach().expand(n, *value.shape).clone(memory_format=torch.contiguous_format)
    if value.is_floating_point() or value.is_complex():
        noise = 1 - 0.05 * torch.rand(rows.shape, generator=generator, dtype=torch.float64)
        scale = torch.linspace(1, 0.8, n, dtype=torch.float64).reshape(n, *(1,) * value.ndim)
        return (rows * (noise * scale)).to(value.dtype)
    if roll and value.ndim and value.dtype != torch.bool:
        return torch.stack([row.roll(i, -1) for i, row in enumerate(rows)])
    return rows
