"""Which path each parameter takes, why, and what it costs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from psg._call import Method, Options, Randomness, prepare
from psg._errors import InputError
from psg._ladder import _ladder
from psg._torch import _ambient
from psg._watch._habits import habits_of
from psg.factors import Factor
from psg.transforms import expect_one_sample


@dataclass(frozen=True)
class Leaf:
    """One leaf of the differentiated argument.

    Attributes:
        path: Where the leaf is in the arguments, such as `params['weight']`.
        kind: The kind of its factor.
        plan: How `clipped_grad` computes its norm and its sum, if it is not among small ones that are materialised and reduced together:
            four or more gradients, dense or outer products, of at most 64 KiB for all samples on a CPU, 1 MiB elsewhere.
        uses: The ops that used it, each with the way psg ran it (rule, derived, lifted), and their counts.
        factored_bytes: The bytes of the factor.
        dense_bytes: The bytes that the materialised gradients [n, *shape] would take.
    """

    path: str
    kind: str
    plan: str
    uses: dict[str, int]
    factored_bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class Report:
    """What `psg.explain` returns; `print` it.

    Attributes:
        name: The function's name.
        n: The number of samples.
        rung: The method that runs the call: "capture", "vmap" or "loop"; "batch" for a function of a whole batch.
        reasons: Why each method tried before could not run it, as (rung, reason).
        leaves: One entry for each leaf.
    """

    name: str
    n: int
    rung: str
    reasons: tuple[tuple[str, str], ...]
    leaves: tuple[Leaf, ...]

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.n} samples: {self.rung}"]
        lines += [f"  not {rung}: {reason}" for rung, reason in self.reasons]
        rows = [("parameter", "factor", "norm and sum", "holds", "dense", "ops")]
        for leaf in self.leaves:
            uses = ", ".join(use if count == 1 else f"{use} x{count}" for use, count in leaf.uses.items())
            sizes = (_human(leaf.factored_bytes), _human(leaf.dense_bytes))
            rows.append((leaf.path, leaf.kind, leaf.plan, *sizes, uses or "-"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)


@_ambient.untraced
def explain(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    in_dims: Any = None,
    has_aux: bool = False,
    randomness: Randomness = "different",
    method: Method = "auto",
) -> Callable[..., Report]:
    """Make a function that runs one pass over a batch and reports the path of every parameter.

    The path may depend on sizes: products of few numbers (some 100 KB of all samples), and what is computed from few, are lifted, which
    takes less time there than rules and factors. (`factored_grad` gives factors all the same.) Ask with a batch as large as in training.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        argnums: The index of the positional argument to differentiate, or a tuple of indices. The samples share these arguments unless
            in_dims says otherwise.
        in_dims: The batch dimension of each positional argument: an integer, None (shared by all samples) or a tree of these. By default
            the argnums arguments are shared, and tensors in the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws new random numbers for every sample, "same" draws once for all samples, "error" forbids drawing.
        method: "auto" takes the first that can run fn of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample after
            another); a name forces that method. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function that takes fn's arguments for a batch of at least one sample. It returns a `Report`, to print or to read: the
        rung that ran the call, the reasons why others could not, and for each leaf its path, the kind of its factor, the plan for its norm
        and sum, the ops that used it, `factored_bytes` (printed as "holds") and `dense_bytes` ("dense").

    Raises:
        InputError: An argument does not fit, fn was made by a transform, or the batch is empty.

    Example:
        >>> import torch, psg
        >>> model = torch.nn.Linear(64, 32)
        >>> loss, params = psg.stateless(model, torch.nn.functional.mse_loss)
        >>> report = psg.explain(loss)(params, torch.randn(5, 64), torch.randn(5, 32))
        >>> report.rung, [leaf.kind for leaf in report.leaves]
        ('capture', ['Dense', 'Outer'])
    """
    expect_one_sample("psg.explain", fn)
    options = Options(argnums, in_dims, has_aux, randomness, method=method)

    @_ambient.untraced
    def explained(*args: Any, **kwargs: Any) -> Report:
        name = getattr(fn, "__name__", type(fn).__name__)
        kept = _ambient.keep(fn)
        with _ambient.off(), torch.no_grad():  # reports the forward pass, which is the same if the result is differentiated
            call = prepare(f"explain({name})", kept, options, args, kwargs)
            if call.n == 0:
                raise InputError(f"explain({name}): the batch is empty; expected at least one sample.")
            known = habits_of(kept)
            result = _ladder.run(call, method)
            if habits_of(kept) != known:
                result = _ladder.run(call, method)  # later calls run by what the first has learnt
            if result.is_unused:
                _ladder.warn_of_unused(call)
        leaves = tuple(
            _leaf(call.paths[position], factor, uses)
            for position, factor, uses in zip(call.params, result.factors, result.uses, strict=True)
        )
        return Report(name, call.n, result.rung, result.reasons, leaves)

    return explained


def _leaf(path: str, factor: Factor, uses: list[str]) -> Leaf:
    return Leaf(path, type(factor).__name__, factor.plan(), dict(Counter(uses)), factor.nbytes, factor.dense_bytes)


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.0f} TiB"
