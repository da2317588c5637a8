"""How norms and sums of per-sample gradients are computed where there is a choice, and who chooses.

Three questions have several answers:

    norm:        Of layers whose weight meets several positions of a sample. "keep": the gradients are materialised once, for the norm and
                 for the sum. "gram": the norm from the inner products of positions. "chunks": the norm from gradients that are
                 materialised a few samples at a time. After the last two the sum is one weighted product.
    gram:        Of convolutions: from the inner products of all "pixels", or of all "patches".
    materialize: Of convolutions: by one grouped "convolution", by the native gradient of each of the "samples", by products of "patches"
                 or, of depthwise ones, by a "correlation": a convolution with the cotangents as kernels.

All answers give one result, up to rounding. A model of costs chooses, from operations, bytes, and what a byte is worth on the device;
`using` asks for something else, and `psg.explain` tells what runs.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psg import _functorch, _trees
from psg._errors import InputError
from psg.memory import pages_are_kept

__all__ = ["Choice", "using"]

Choice = str | Callable[[Any, Mapping[str, float]], str]
"""An answer, or a function that gives one for a factor and the costs of all answers."""

_ANSWERS = {
    "norm": ("keep", "gram", "chunks"),
    "gram": ("pixels", "patches"),
    "materialize": ("convolution", "samples", "patches", "correlation"),
}


class _Settings(NamedTuple):
    choices: Mapping[str, Choice]
    keep_bytes: int
    measure: bool


_DEFAULT = _Settings({}, 512 << 20, False)
_settings: ContextVar[_Settings] = ContextVar("psg_plans", default=_DEFAULT)
_measured: dict[Any, str] = {}


@contextlib.contextmanager
def using(
    *,
    norm: Choice | None = None,
    gram: Choice | None = None,
    materialize: Choice | None = None,
    keep_bytes: int | None = None,
    measure: bool | None = None,
) -> Iterator[None]:
    """A context in which norms and sums are computed so. It changes time and memory, and no result beyond rounding.

    It holds for the thread that enters it, and nests: what is None stays as it is. An answer that a parameter does not have (a "gram" of
    one position) is passed over, and the cost model chooses.

    Args:
        norm: "keep", "gram" or "chunks", or a function of the factor and a mapping from possible answers to costs in operations a sample.
        gram: "pixels" or "patches", or such a function.
        materialize: "convolution", "samples", "patches" or "correlation", or such a function.
        keep_bytes: The most that is kept for one parameter between the norm and the sum, in bytes; 512 MiB by default.
        measure: Whether to time all answers, once for every shape, dtype, device and number of threads, and take the fastest from then on.

    Raises:
        InputError: There is no such answer, or `keep_bytes` is negative.

    Example:
        >>> import torch, psg
        >>> loss, params = psg.stateless(torch.nn.Conv2d(3, 8, 3), lambda output, y: (output.mean((2, 3)) * y).sum())
        >>> x, y = torch.randn(4, 3, 8, 8), torch.randn(4, 8)
        >>> with psg.plans.using(norm="gram"):
        ...     psg.explain(loss)(params, x, y).leaves[1].plan
        'Gram of patches, native weight gradient'
    """
    answers = {"norm": norm, "gram": gram, "materialize": materialize}
    for question, answer in answers.items():
        if answer is not None and not callable(answer) and answer not in _ANSWERS[question]:
            raise InputError(f"psg.plans.using({question}={answer!r}): expected one of {_ANSWERS[question]}, or a function.")
    if keep_bytes is not None and not (isinstance(keep_bytes, int) and keep_bytes >= 0):
        raise InputError(f"psg.plans.using(keep_bytes={keep_bytes!r}): expected a number of bytes that is at least 0.")
    before = _settings.get()
    token = _settings.set(
        _Settings(
            {**before.choices, **{question: answer for question, answer in answers.items() if answer is not None}},
            before.keep_bytes if keep_bytes is None else keep_bytes,
            before.measure if measure is None else measure,
        )
    )
    try:
        yield
    finally:
        _settings.reset(token)


def asked() -> Hashable:
    """What `using` asks for here: equal where the same is asked for."""
    choices, *rest = _settings.get()
    # A function that is written where it is asked for is another one each time, and says the same.
    told = {question: _told(answer) for question, answer in choices.items()}
    return tuple(sorted(told.items(), key=lambda item: item[0])), *rest


def _told(answer: Choice) -> Hashable:
    if isinstance(answer, FunctionType) and not (answer.__closure__ or answer.__defaults__ or answer.__kwdefaults__):
        return answer.__code__
    return answer


def choose(question: str, costs: Mapping[str, float], factor: Any, run: Callable[[str], Any]) -> str:
    """The answer to a question.

    Args:
        question: A key of the questions above.
        costs: The possible answers, with their costs in operations.
        factor: Whom it is about.
        run: Does what an answer says, to be timed, and returns what it has made.

    Returns:
        One of the keys of `costs`.
    """
    if len(costs) == 1:
        return next(iter(costs))
    settings = _settings.get()
    choice = settings.choices.get(question)
    if choice is not None:
        answer = choice(factor, costs) if callable(choice) else choice
        if answer in costs:
            return answer
    if settings.measure and factor.n and not factor.is_differentiated and not _functorch.is_traced():
        return _fastest(question, costs, factor, run)
    return min(costs, key=lambda answer: costs[answer])


def may_keep(count: int) -> bool:
    """Whether so many bytes may be kept for one parameter."""
    return count <= _settings.get().keep_bytes


def _fastest(question: str, costs: Mapping[str, float], factor: Any, run: Callable[[str], Any]) -> str:
    held = [leaf for leaf in _trees.flatten(factor)[0] if isinstance(leaf, Tensor)]
    layout = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in held)
    key = question, tuple(costs), type(factor), layout, factor.shape, factor.device, torch.get_num_threads(), pages_are_kept()
    if key not in _measured:
        seconds = {answer: _time(run, answer, factor.device) for answer in costs}
        _measured[key] = min(seconds, key=lambda answer: seconds[answer])
    return _measured[key]


def _time(run: Callable[[str], Any], answer: str, device: torch.device) -> float:
    """The best of three, after one to warm up."""
    best, held = float("inf"), []
    for turn in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        held.append(run(answer))  # as in a step, which holds what is kept: the next turn does not find it in cache
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start) if turn else best
    return best


# How a product of matrices is computed. MKL divides it among threads as it suits Intel's processors. On AMD's that takes up to twice as
# long as a block for each thread, and for some shapes eight times: benchmarks/micro.py product, weighted_sum, gram.

_LARGE_PRODUCT = 1 << 22  # multiplications
_LARGE_SUM = 1 << 19


def row_blocks(left: Tensor, right: Tensor) -> int:
    """Into how many blocks of rows left[a, t] @ right[t, b] is divided, each for one thread; 1 where the whole product is as fast."""
    (rows, inner), columns, threads = left.shape, right.shape[1], _dividing_threads(left, right)
    pays = threads >= 4 and rows >= 48 * threads and 3 * rows >= columns and rows * inner * columns >= _LARGE_PRODUCT
    return threads if pays and rows % threads == 0 else 1


def column_blocks(rows: Tensor) -> int:
    """Into how many blocks of columns weights[n] @ rows[n, p] is divided."""
    threads = _dividing_threads(rows)
    return threads if rows.numel() >= _LARGE_SUM and rows.shape[1] % threads == 0 else 1


def inner_blocks(left: Tensor, right: Tensor) -> int:
    """Into how many blocks left[n, p] @ right[m, p]^T is divided along p, whose products add up."""
    (rows, inner), columns, threads = left.shape, len(right), _dividing_threads(left, right)
    pays = inner >= 64 * max(rows, columns) and rows * inner * columns >= _LARGE_PRODUCT
    return threads if pays and inner % threads == 0 else 1


def _dividing_threads(*sides: Tensor) -> int:
    """How many threads to divide a product of these among; 1 for none."""
    single = all(side.dtype == torch.float32 and side.device.type == "cpu" for side in sides)
    return torch.get_num_threads() if single and _mkl_is_untuned() else 1


def multiplies(device: torch.device) -> bool:
    """Whether outer products of single vectors are formed by a multiplication for each entry, and not by products of matrices."""
    # MKL's write the faster where it is tuned, but not into fresh pages: benchmarks/micro.py outer.
    return device.type != "cpu" or not pages_are_kept() or _mkl_is_untuned()


@functools.cache
def _mkl_is_untuned() -> bool:
    return torch.backends.mkl.is_available() and "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")


# What a byte, and an op whatever its size, is worth, in arithmetic operations.


def used(device: torch.device, dtype: torch.dtype) -> int:
    """A byte read, or written into memory that is in use."""
    if device.type == "cpu":
        return 13  # measured: benchmarks/micro.py
    # Published operations by bytes a second of an H100: half precision, TF32, float32.
    if dtype in (torch.float16, torch.bfloat16):
        return 295
    return 148 if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else 20


def written(device: torch.device, dtype: torch.dtype) -> int:
    """A byte written into newly allocated memory: on a CPU the kernel must first clear its page, unless pages are kept."""
    return 60 if device.type == "cpu" and not pages_are_kept() else used(device, dtype)


def kept(device: torch.device, dtype: torch.dtype) -> int:
    """A byte of a materialised gradient that is read for a norm, and again for a weighted sum; and what it costs to have memory for it."""
    return written(device, dtype) + used(device, dtype)


def taken_out(device: torch.device, dtype: torch.dtype) -> int:
    """A byte of what samples are taken out of before a sum: read and written, but on a CPU, where it is known first if any is to go."""
    return 0 if device.type == "cpu" else 2 * used(device, dtype)


def dispatched(device: torch.device) -> int:
    """An op of few numbers: Python's time and torch's, of which a trace takes next to none."""
    if _functorch.is_traced():
        return 0
    return 1_000_000 if device.type == "cpu" else 100_000_000


def chunk_bytes(device: torch.device) -> int:
    """How much to form at a time of what is read once and dropped: a cache full on a CPU, elsewhere enough to keep a device busy."""
    return (4 if device.type == "cpu" else 256) << 20
