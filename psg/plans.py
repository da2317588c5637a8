"""How norms and sums of per-sample gradients are computed where there is a choice, and who chooses.

Four questions have several answers:

    norm:        For layers that use their weight at several positions of a sample, and for parameters that are used several times. "keep":
                 materialise the gradients once, for the norm and the sum. "gram": the norm from inner products between positions (the
                 ghost norm), or between uses. "chunks": the norm from gradients materialised a few samples at a time, and dropped, or by a
                 kernel that never writes them (convolutions on CUDA devices). After the last two the sum is one weighted matrix product.
                 Where no sum follows, or too many bytes would have to be kept, "keep" means "chunks".
    gram:        For convolutions: from the inner products of all "pixels", or of all "patches".
    materialize: For convolutions: by one grouped "convolution", by the native weight gradient of each of the "samples", by products of
                 "patches" or, if depthwise, by a "correlation": a convolution with the cotangents as kernels.
    sum:         For convolutions of 16-bit numbers on CUDA devices: by the "native" weight gradient, in float32, or by a "kernel" that
                 multiplies 16-bit numbers and adds up in float32.

All answers give the same result, up to rounding. A cost model chooses: it counts operations and bytes, and weighs a byte as the device
does. `using` overrides the choice, and `psg.explain` shows it.
"""

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch

from psg import _trees
from psg._errors import InputError, as_integer
from psg._hardware import _machine
from psg._torch import _functorch
from psg._torch._patches import assigned

__all__ = ["Choice", "using"]

Choice = str | Callable[[Any, Mapping[str, float]], str]
"""An answer, or a function `(factor, costs of all answers) -> answer`."""

_ANSWERS = {
    "norm": ("keep", "gram", "chunks"),
    "gram": ("pixels", "patches"),
    "materialize": ("convolution", "samples", "patches", "correlation"),
    "sum": ("native", "kernel"),
}


class _Settings(NamedTuple):
    choices: Mapping[str, Choice]
    keep_bytes: int
    measure: bool


_DEFAULT = _Settings({}, 512 << 20, False)
_settings: ContextVar[_Settings] = ContextVar("psg_plans", default=_DEFAULT)
_measured: dict[Hashable, str] = {}
_MOST_KNOWN = 1 << 14  # Poisson sampling draws many batch sizes, each a layout of its own
_Found = TypeVar("_Found")


def using(
    *,
    norm: Choice | None = None,
    gram: Choice | None = None,
    materialize: Choice | None = None,
    sum: Choice | None = None,
    keep_bytes: int | None = None,
    measure: bool | None = None,
) -> contextlib.AbstractContextManager[None]:
    """A context that sets how norms and sums are computed. It changes time and memory, and results only by rounding.

    It applies to the thread that enters it. Contexts nest: an argument of None keeps the outer setting. Where a parameter does not have
    the answer asked for (a "gram" of one position, or of a gradient that is so small that psg computes it at once), the cost model chooses.

    Args:
        norm: "keep", "gram" or "chunks", or a function that gets the factor and a mapping from the possible answers to their costs, in
            operations a sample, and returns one of them; `min(costs, key=costs.get)` is what the cost model chooses.
        gram: "pixels" or "patches", or such a function.
        materialize: "convolution", "samples", "patches" or "correlation", or such a function.
        sum: "native" or "kernel", or such a function.
        keep_bytes: The most bytes of materialised gradients that may be kept for one parameter; 512 MiB by default. Small ones that are
            reduced together do not count.
        measure: Whether to time all answers once for each shape, dtype, device and number of threads, and use the fastest from then on.

    Returns:
        The context manager, for `with`.

    Raises:
        InputError: An answer does not exist, `keep_bytes` is negative or no integer, or `measure` no boolean. Where a function is called:
            it returns no answer to the question.

    Example:
        >>> import torch, psg
        >>> loss, params = psg.stateless(torch.nn.Conv2d(3, 8, 3), lambda output, y: (output.mean((2, 3)) * y).sum())
        >>> x, y = torch.randn(4, 3, 8, 8), torch.randn(4, 8)
        >>> with psg.plans.using(norm="gram"):
        ...     psg.explain(loss)(params, x, y).leaves[1].plan
        'Gram of patches, native weight gradient'
    """
    answers = {"norm": norm, "gram": gram, "materialize": materialize, "sum": sum}
    for question, answer in answers.items():
        if answer is not None and not callable(answer) and answer not in _ANSWERS[question]:
            raise InputError(f"psg.plans.using({question}={answer!r}): expected one of {_ANSWERS[question]}, or a function.")
    most = as_integer(keep_bytes, least=0)
    if keep_bytes is not None and most is None:
        raise InputError(f"psg.plans.using(keep_bytes={keep_bytes!r}): expected a number of bytes that is at least 0.")
    if measure is not None and not isinstance(measure, bool):
        raise InputError(f"psg.plans.using(measure={measure!r}): expected True or False.")
    return _using({question: answer for question, answer in answers.items() if answer is not None}, most, measure)


@contextlib.contextmanager
def _using(choices: Mapping[str, Choice], keep_bytes: int | None, measure: bool | None) -> Iterator[None]:
    before = _settings.get()
    settings = _Settings(
        {**before.choices, **choices},
        before.keep_bytes if keep_bytes is None else keep_bytes,
        before.measure if measure is None else measure,
    )
    with assigned(_settings, settings):
        yield


def settings_key() -> Hashable:
    """The current settings of `using`, as a key: equal where they ask for the same."""
    choices, *rest = _settings.get()
    # A lambda written at the call site is a new object each time: compare its code.
    return tuple((question, _choice_key(choices[question])) for question in sorted(choices)), *rest


def _choice_key(answer: Choice) -> Hashable:
    if isinstance(answer, FunctionType) and not (answer.__closure__ or answer.__defaults__ or answer.__kwdefaults__):
        return answer.__code__
    return answer


def choose(question: str, costs: Mapping[str, float], factor: Any, run: Callable[[str], Any]) -> str:
    """The answer to a question.

    Args:
        question: One of the four questions above.
        costs: The possible answers, with their costs in operations; inf for one that is taken only if it is asked for.
        factor: The factor in question.
        run: Carries out an answer and returns the result; called to time it.

    Returns:
        One of the keys of `costs`.
    """
    if len(costs) == 1:
        return next(iter(costs))
    settings = _settings.get()
    choice = settings.choices.get(question)
    if choice is not None:
        answer = _asked(question, choice, factor, costs) if callable(choice) else choice
        if answer == "keep" and answer not in costs:
            answer = "chunks"  # nothing can be kept: from gradients, too
        if answer in costs:
            return answer
    if settings.measure and factor.n and not factor.is_differentiated and not _functorch.is_traced():
        costs = {answer: cost for answer, cost in costs.items() if cost < math.inf}
        return _fastest(question, costs, factor, run)
    return min(costs, key=costs.__getitem__)


def _asked(question: str, choice: Callable[[Any, Mapping[str, float]], str], factor: Any, costs: Mapping[str, float]) -> str:
    """The answer of a user's function."""
    answer = choice(factor, dict(costs))  # costs are remembered: a copy
    if not isinstance(answer, str) or answer not in _ANSWERS[question]:
        raise InputError(f"psg.plans.using({question}=...): the function returned {answer!r}; expected one of {tuple(costs)}.")
    return answer


def may_keep(count: int) -> bool:
    """Whether `count` bytes may be kept for one parameter."""
    return count <= _settings.get().keep_bytes


def _fastest(question: str, costs: Mapping[str, float], factor: Any, run: Callable[[str], Any]) -> str:
    layout = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in _trees.all_tensors(factor))
    key = question, tuple(costs), type(factor), layout, factor.shape, factor.device, _machine.settings(factor.device)
    if (known := _measured.get(key)) is not None:
        return known
    seconds = {answer: _time(run, answer, factor.device) for answer in costs}
    return remember(_measured, key, min(seconds, key=seconds.__getitem__))


def remember(known: dict[Hashable, _Found], layout: Hashable, found: _Found) -> _Found:
    """Keep what was found for a layout; once too many are known, forget the others."""
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[layout] = found
    return found


def _time(run: Callable[[str], Any], answer: str, device: torch.device) -> float:
    """The best of three, after one to warm up."""
    best, held = float("inf"), []
    for turn in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        held.append(run(answer))  # held, as a training step holds it, so that the next turn does not reuse memory that is still in cache
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start) if turn else best
    return best
