"""Comparison of trees, with an error that says where they differ."""

from collections.abc import Callable

import torch
from torch import Tensor

from psg._errors import InputError
from psg._trees import Tree, differences, flatten, is_inexact, paths
from psg.clipping import fits

_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Mismatch(AssertionError):
    """Two trees differ: the message names the leaf, the sample and the error.

    Attributes:
        path: The worst leaf, as an expression such as `grads['conv.weight']`.
        sample: The worst sample of that leaf; None where leaves have no sample dimension or shapes differ.
        error: The largest absolute error of that leaf; NaN where no number can be compared.
    """

    def __init__(self, message: str, path: str = "", sample: int | None = None, error: float = float("nan")):
        super().__init__(message)
        self.path, self.sample, self.error = path, sample, error


Mismatch.__module__ = "psg.testing"  # the name under which tracebacks show it is the public one


def default_rtol(dtype: torch.dtype) -> float:
    """The relative tolerance of a comparison: 1e-9, 1e-4, 1e-2 and 5e-2 for float64, float32, float16 and bfloat16.

    Args:
        dtype: A dtype; a complex one counts as that of its real part, one that is not floating point gets 0.

    Returns:
        The tolerance.

    Example:
        >>> default_rtol(torch.float64), default_rtol(torch.complex64), default_rtol(torch.int64)
        (1e-09, 0.0001, 0.0)
    """
    real = dtype.to_real() if dtype.is_complex else dtype
    return _RTOL.get(real, 0.0)


def assert_trees_close(
    actual: Tree,
    expected: Tree,
    rtol: float | None = None,
    atol: float = 0.0,
    *,
    name: str = "tree",
    per_sample: bool = True,
) -> float:
    """Raise `Mismatch` unless two trees have one structure and close leaves.

    An entry may differ by `atol + rtol * max(leaf, tree / 100)`, where `leaf` and `tree` are the largest finite magnitudes in the expected
    leaf and in the whole expected tree. So entries, and whole leaves, whose exact gradient is zero may have the rounding errors of their
    neighbours. NaN agrees with NaN, and an infinity with itself. Shapes, dtypes and devices must agree; leaves that are not tensors must be
    equal.

    Args:
        actual: A tree.
        expected: A tree.
        rtol: Relative tolerance; None takes `default_rtol` of each leaf's dtype.
        atol: Absolute tolerance.
        name: What the message calls the tree.
        per_sample: Whether dimension 0 of every leaf counts samples, so that the message can name one.

    Returns:
        The largest `error / max(leaf, tree / 100)`, 0 for trees without entries.

    Raises:
        Mismatch: Structure, shape, dtype, device or values differ.
        InputError: A tolerance is not a number of at least 0.

    Example:
        >>> assert_trees_close({"w": torch.tensor([1.0, 2.5])}, {"w": torch.tensor([1.0, 2.0])}, name="grads")
        Traceback (most recent call last):
        psg.testing.Mismatch: grads['w'], sample 1: got 2.5, expected 2.0, error 5.0e-01 where 2.0e-04 is allowed
    """
    expect_tolerances("psg.testing.assert_trees_close", rtol, atol)
    return compare(actual, expected, default_rtol if rtol is None else lambda dtype: rtol, atol, name, per_sample)


def expect_tolerances(name: str, rtol: float | None, atol: float) -> None:
    """Raise InputError unless both tolerances are numbers of at least 0; `rtol` may be None."""
    for which, tolerance in (("rtol", 0.0 if rtol is None else rtol), ("atol", atol)):
        if not fits(tolerance, lambda tolerance: tolerance >= 0):
            raise InputError(f"{name}({which}={tolerance!r}): expected a number that is at least 0.")


def compare(
    actual: Tree, expected: Tree, rtol_of: Callable[[torch.dtype], float], atol: float, name: str, per_sample: bool = True
) -> float:
    """`assert_trees_close` with a relative tolerance for each dtype of a leaf."""
    wants, structure = flatten(expected)
    gots, found = flatten(actual)
    if structure != found:
        raise Mismatch(f"{name}: the trees differ in structure: {differences(found, structure, ('tree', 'expected one'))}", name)
    labels = paths(expected, name)
    compared = []
    for label, got, want in zip(labels, gots, wants, strict=True):
        if isinstance(got, Tensor) and isinstance(want, Tensor):
            compared.append((label, got, want))
        elif type(got) is not type(want) or got != want:
            raise Mismatch(f"{label}: got {got!r}, expected {want!r}", label)
    for label, got, want in compared:
        for what in ("shape", "dtype", "device"):
            if getattr(got, what) != getattr(want, what):
                raise Mismatch(f"{label}: got {what} {getattr(got, what)}, expected {getattr(want, what)}", label)
    whole = max((_magnitude(want) for _, _, want in compared), default=0.0)
    worst, failures = 0.0, []
    for label, got, want in compared:
        scale = max(_magnitude(want), whole / 100)
        allowed = atol + rtol_of(want.dtype) * scale
        error = _error(got.detach(), want.detach())
        largest = error.max().item() if error.numel() else 0.0
        worst = max(worst, largest / scale if scale else float(largest > 0))
        if not largest <= allowed:
            place = tuple(int(k) for k in torch.unravel_index(error.argmax(), error.shape))
            failures.append((largest / allowed if allowed else largest, label, place, got, want, largest, allowed))
    if failures:
        _, label, place, got, want, largest, allowed = max(failures, key=lambda failure: failure[0])
        sample, entry = (place[0], place[1:]) if per_sample and place else (None, place)
        where = ("" if sample is None else f", sample {sample}") + (f", entry {list(entry)}" if entry else "")
        others = f"; {len(failures)} of {len(wants)} leaves differ" if len(wants) > 1 else ""
        raise Mismatch(
            f"{label}{where}: got {got[place].item()}, expected {want[place].item()}, error {largest:.1e}"
            f" where {allowed:.1e} is allowed{others}",
            label,
            sample,
            largest,
        )
    return worst


def _magnitude(leaf: Tensor) -> float:
    leaf = _number(leaf.detach())
    finite = leaf[leaf.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _error(got: Tensor, want: Tensor) -> Tensor:
    """Absolute error: 0 where both are NaN or the same infinity, infinite where only one is."""
    same = (got == want) | (got.isnan() & want.isnan())
    error = (_number(got) - _number(want)).abs().nan_to_num(nan=torch.inf)
    if not is_inexact(got):
        error = error.clamp(min=1)  # unequal integers may round to the same floating-point number
    return error.masked_fill(same, 0)


def _number(leaf: Tensor) -> Tensor:
    """Integers and booleans as floating-point numbers, whose differences do not wrap."""
    return leaf if is_inexact(leaf) else leaf.double()
