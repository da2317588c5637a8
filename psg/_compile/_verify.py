"""Compare a compiled function with the eager one: compilers do go wrong."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from psg import _trees
from psg._compile._trace import Generators
from psg._errors import PsgError
from psg._torch import _random
from psg._torch._patches import assigned
from psg.factors import is_factor
from psg.factors._base import BOUNDING
from psg.testing import Mismatch, assert_trees_close

_Run = Callable[[Sequence[Tensor]], Any]
"""From the tensors of the arguments to the function's result."""


class Draws:
    """The random generators of a build, which runs the function several times.

    Attributes:
        generators: Those that the function draws from, beside torch's default ones, as the trace finds them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.generators: Generators = {}
        self._state = _random.get_state(tensors)

    def rewind(self) -> None:
        """Put all generators back into the states before the build."""
        _random.set_state(self._state)
        for generator, before in self.generators.values():
            generator.set_state(before)

    def advance(self) -> None:
        """Put all generators into states that the trace has not seen: the graph knows nothing of one that fn seeds or makes."""
        self.rewind()
        for device in self._state:
            torch.rand(1, device=device)
        for generator, _ in self.generators.values():
            torch.rand(1, generator=generator, device=generator.device)

    def now(self) -> list[Tensor]:
        """The states of all generators."""
        return [*_random.now(self._state).values(), *(generator.get_state() for generator, _ in self.generators.values())]


def draws_numbers(graph: GraphModule) -> bool:
    """Whether an op of the graph draws random numbers."""
    ops = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)


def verify(compiled: _Run, eager: _Run, graph: GraphModule, tensors: Sequence[Tensor], draws: Draws) -> None:
    """Compare the results of a compiled and an eager function, and the random numbers that they draw.

    Args:
        compiled: The compiled function.
        eager: The function itself.
        graph: What was compiled.
        tensors: The arguments to compare at, without history.
        draws: The generators that the function draws from. They are left wherever the last run has left them.

    Raises:
        Mismatch: The results differ by more than rounding.
        PsgError: So do two eager results, or the compiled function leaves the generators elsewhere.
    """

    def advanced(run: _Run, tensors: Sequence[Tensor]) -> Any:
        draws.advance()
        return run(tensors)

    expected, drawn = advanced(eager, tensors), draws.now()
    actual = advanced(compiled, tensors)
    # Equal results do not tell: the numbers may have been multiplied by zeros.
    if not all(map(torch.equal, draws.now(), drawn)):
        raise PsgError("it seeds or makes a random generator, which a graph would not do")
    eps = _coarsest(graph, tensors)

    def nudged() -> tuple[Any, Any]:
        near = _nudged(tensors, eps)
        expected = advanced(eager, near)
        return advanced(compiled, near), expected

    _expect_equal(actual, expected, lambda: advanced(eager, tensors), nudged, eps)


def _expect_equal(actual: Any, expected: Any, again: Callable[[], Any], nudged: Callable[[], tuple[Any, Any]], eps: float) -> None:
    """Compare a compiled result with the eager one.

    Args:
        actual: The compiled result.
        expected: The eager result.
        again: Gives the eager result once more.
        nudged: Gives the compiled and the eager result for arguments that are changed by a rounding error.
        eps: The coarsest rounding in the graph; 0 for that of the results.

    Raises:
        Mismatch: They differ by more than rounding.
        PsgError: So do two eager results.
    """
    try:
        _compare(*_alike(actual, expected), name="compiled result")
    except Mismatch as mismatch:
        if not _repeats(again(), expected, eps):
            raise PsgError("it returns other values in every call, so it draws random numbers that torch does not know") from None
        if math.isnan(mismatch.error):
            raise
        actual = _trees.map_tensors(Tensor.clone, actual)  # CUDA graphs write the next result into the memory of this one
        if not _is_rounding(actual, expected, nudged):
            with assigned(BOUNDING, True):
                if not _is_rounding(actual, again(), nudged):
                    raise


def _repeats(second: Any, first: Any, eps: float) -> bool:
    """Whether two eager results agree. On a GPU sums are added up in any order, and later roundings enlarge the difference."""
    for rtol in (None, 8 * eps):
        try:
            _compare(second, first, "second result", rtol)
        except Mismatch:
            continue
        return True
    return False


def _alike(*results: Any) -> list[Any]:
    """The results, with factors at one place materialised if they are of different kinds, or hold tensors of different shapes.

    Eager calls and traces choose the kinds of some factors by different costs, and all of them are right. Of rows that are looked up along
    a graph, an eager call counts how many there are, where a trace makes room for as many as there may be.
    """
    flat = [_trees.flatten(result, is_factor) for result in results]
    if any(spec != flat[0][1] for _, spec in flat):
        return list(results)
    for i, values in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        if all(map(is_factor, values)) and any(_form(value) != _form(values[0]) for value in values):
            for leaves, _ in flat:
                leaves[i] = leaves[i].materialize()
    return [_trees.unflatten(spec, leaves) for leaves, spec in flat]


def _form(factor: Any) -> tuple[Any, ...]:
    """The structure of a factor, and the shapes of its tensors."""
    leaves, spec = _trees.flatten(factor)
    return spec, [leaf.shape for leaf in leaves]


def _compare(actual: Any, expected: Any, name: str, rtol: float | None = None) -> None:
    """Raise Mismatch unless all parts of a result agree, each within a tolerance on its own scale."""
    if isinstance(expected, tuple):
        for i, (own, other) in enumerate(zip(actual, expected, strict=True)):
            _compare(own, other, f"{name}[{i}]", rtol)
    else:
        assert_trees_close(actual, expected, rtol, name=name, per_sample=False)


_TF32 = 2.0**-10  # the distance of 1 from the next number in TensorFloat-32


def _coarsest(graph: GraphModule, tensors: Sequence[Tensor]) -> float:
    """The eps of the coarsest dtype to which the graph casts, or in which a GPU multiplies float32; 0 for neither."""
    named = {value for node in graph.graph.nodes for value in (*node.args, *node.kwargs.values()) if isinstance(value, torch.dtype)}
    coarsest = max((torch.finfo(dtype).eps for dtype in named if dtype.is_floating_point), default=0.0)
    if not any(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors):
        return coarsest
    products = [torch.backends.cuda.matmul.fp32_precision]
    if graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        products.append(torch.backends.cudnn.conv.fp32_precision)  # pyright: ignore[reportAttributeAccessIssue]
    return max(coarsest, _TF32) if "tf32" in products else coarsest


def _nudged(tensors: Sequence[Tensor], eps: float) -> list[Tensor]:
    """The tensors, each entry randomly changed by a few roundings: of its dtype, or of `eps` if that is larger."""

    def nudge(tensor: Tensor) -> Tensor:
        return tensor + 4 * max(torch.finfo(tensor.dtype).eps, eps) * tensor * torch.randn_like(tensor)

    return [nudge(tensor) if tensor.dtype.is_floating_point else tensor for tensor in tensors]


_NUDGES = 8


def _is_rounding(actual: Any, expected: Any, nudged: Callable[[], tuple[Any, Any]]) -> bool:
    """Whether each leaf is off by at most ten times what nudging the inputs changes the eager result by, here or at nudged inputs."""
    # Rounding may push a ReLU's input across zero, and the gradient jumps: in large models always somewhere, but not always at one place.
    offs, jumps = [], []
    for _ in range(_NUDGES):
        results = _alike(actual, expected, *nudged())
        here, want, compiled, eager = (_trees.all_tensors(result) for result in results)
        offs += [_distances(here, want), _distances(compiled, eager)]
        jumps.append(_distances(eager, want))
        leaves = zip(zip(*offs, strict=True), zip(*jumps, strict=True), strict=True)
        if all(min(math.inf, *off) <= 10 * max(0.0, *jump) for off, jump in leaves):  # no NaN is less or more
            return True
    return False


def _distances(found: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    return [_distance(*pair) for pair in zip(found, want, strict=True)]


def _distance(found: Tensor, want: Tensor) -> float:
    """The largest difference of two entries, 0 for equal ones: two infinities, and a NaN and another. NaN if only one of two is."""
    if not want.numel():
        return 0.0
    same = (found == want) | (found.isnan() & want.isnan())
    if not _trees.is_inexact(want):
        return float(not same.all())
    return float(torch.where(same, 0, (found - want).abs()).amax())
