"""psg against the loop, on a function and data of your own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psg import transforms, tree
from psg._call import Call, Method, Options, prepare
from psg._errors import InputError, first_line
from psg._ladder._ladder import refuse_stale
from psg._torch import _ambient, _autograd
from psg._trees import Tree, all_tensors, flatten
from psg._watch._effects import forgetting
from psg.testing._compare import Mismatch, assert_trees_close, compare, default_rtol, expect_tolerances
from psg.testing._loop import Batch, loop_value_and_grad, tree_map
from psg.testing._reference import reference_dot, reference_flat, reference_gram, reference_norm, reference_weighted_sum


class Checked(NamedTuple):
    """What `check` returns when it passes.

    Attributes:
        samples: Number of samples.
        leaves: Number of leaves that were differentiated.
        error: The largest relative error of a gradient, as `assert_trees_close` returns it.
    """

    samples: int
    leaves: int
    error: float


def check(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    in_dims: Any = None,
    has_aux: bool = False,
    chunk_size: int | str | None = None,
    method: Method = "auto",
    rtol: float | None = None,
    atol: float = 0.0,
) -> Callable[..., Checked]:
    """Compare psg with a loop over samples, on your function and your data.

    Values, materialised gradients and the factored norm, Gram matrix, dot product and weighted sum are compared with those of
    `loop_value_and_grad`. Where gradients differ, central differences of `fn` along the disagreement tell which side is nearer, because
    eager PyTorch has wrong kernels too.

    Args:
        fn: As in `psg.per_sample_grad`; it must draw no random numbers (call `model.eval()`).
        argnums: As in `psg.per_sample_grad`.
        in_dims: As in `psg.per_sample_grad`.
        has_aux: As in `psg.per_sample_grad`; `aux` is not compared.
        chunk_size: As in `psg.per_sample_grad`.
        method: As in `psg.per_sample_grad`. With "batch" the loop calls `fn` on batches of one: a passed check then says that the samples
            do not interact. Arguments that all samples share go to it whole, so they must not hold the data of samples, as those of joined
            graphs do.
        rtol: As in `assert_trees_close`. Where dtypes are mixed (under autocast, or for a loss summed in float64), None takes at least the
            tolerance of every dtype in which a value is computed from the arguments to differentiate.
        atol: As in `assert_trees_close`.

    Returns:
        A function of `(*args, **shared)` that returns `Checked`, and raises `Mismatch` where anything differs.

    Raises:
        InputError: `fn` was made by a transform, or an option has a value that is not allowed. At a call: results differ, but so do two
            runs of the loop; with method "batch", `fn` cannot run on batches of one, and all samples share some tensors beside the
            parameters.
        StateError: At a call: `fn` uses a tensor that it has kept from an earlier call.

    Example:
        >>> result = check(lambda w, x: (w * x).sin().sum())(torch.ones(3), torch.rand(5, 3))
        >>> result.samples, result.leaves
        (5, 1)
    """
    transforms.expect_one_sample("psg.check", fn)
    options = Options(argnums, in_dims, has_aux, chunk_size=chunk_size, method=method)
    options.has_aux = False  # what is compared returns the loss alone
    argnums, in_dims = options.argnums, options.in_dims
    expect_tolerances("psg.check", rtol, atol)
    route: dict[str, Any] = {"chunk_size": options.chunk_size, "method": method}

    def checked(*args: Tree, **shared: Any) -> Checked:
        scalar = (lambda *a, **k: fn(*a, **k)[0]) if has_aux else fn
        batch = prepare("check", scalar, options, args, shared) if method == "batch" else None
        single = scalar if batch is None else batch.with_sample_fn().fn
        computed: set[torch.dtype] = set()

        def watched(*sample: Any, **shared: Any) -> Any:
            value = single(*sample, **shared)
            if isinstance(value, Tensor):
                computed.update(_autograd.dtypes_in(value))
            return value

        loop = loop_value_and_grad(watched, argnums, in_dims=in_dims)
        both = transforms.per_sample_value_and_grad(scalar, argnums, in_dims=in_dims, **route)
        found_values, found = both(*args, **shared)  # psg first: its errors say more
        try:
            values, grads = loop(*args, **shared)
        except Exception as error:
            refuse_stale("check", error)
            if batch is None or isinstance(error, torch.OutOfMemoryError) or not (names := _shared_data(batch)):
                raise
            raise InputError(
                f"check: fn cannot run on batches of one, {type(error).__name__}: {first_line(error).rstrip('.')}. It gets {names} whole, "
                f"which all samples share. {_NOT_CUT}"
            ) from error
        dtypes = {leaf.dtype for leaf in flatten(grads)[0]}
        least = max(map(default_rtol, computed), default=0.0)

        def rtol_of(dtype: torch.dtype) -> float:
            return max(default_rtol(dtype), least) if rtol is None else rtol

        def expect_repeatable(mismatch: Mismatch) -> None:
            if not _repeatable(loop(*args, **shared), (values, grads)):
                raise InputError(
                    "check: fn gives another value or gradient for the same sample when it is called again. It draws"
                    " random numbers or changes state: compare it in evaluation mode, model.eval()."
                ) from mismatch

        try:
            compare(found_values, values, rtol_of, atol, "values")
            error = compare(found, grads, rtol_of, atol, "grads")
        except Mismatch as mismatch:
            expect_repeatable(mismatch)
            i = mismatch.sample
            verdict = ""
            if mismatch.path != "values":
                verdict = "" if i is None else _arbitrate(single, options, args, shared, found, grads, i)
            elif batch is not None:
                names = _shared_data(batch)
                verdict = "\nThe loop has run fn on batches of one, so the samples interact" + (
                    f"; or {names}, which all samples share, hold their data. {_NOT_CUT}" if names else "."
                )
            raise Mismatch(f"{mismatch}{verdict}", mismatch.path, i, mismatch.error) from None
        factored = transforms.factored_grad(scalar, argnums, in_dims=in_dims, **route)(*args, **shared)
        # Reductions have the widest dtype of any leaf, but the errors of all. (Those of 16-bit leaves are allowed for there.)
        mixed = len(computed | dtypes) > 1
        widest = max([least, *(default_rtol(dtype) for dtype in dtypes if dtype.itemsize >= 4)])
        try:
            with _ambient.off():
                assert_reductions_close(factored, grads, widest if rtol is None and mixed else rtol, atol)
        except Mismatch as mismatch:
            expect_repeatable(mismatch)
            raise
        return Checked(len(values), len(flatten(grads)[0]), error)

    return checked


_NOT_CUT = (
    "If that is data of samples (nodes of joined graphs, packed sequences), check cannot cut it: pass a batch of one graph, or compare "
    "with torch.autograd.grad(fn(params, *batch)[i], ...), which says nothing of other samples."
)


def _shared_data(call: Call) -> str:
    """The names of tensors that all samples share, beside the parameters."""
    tensors = zip(call.leaves, call.dims, strict=True)
    names = [call.paths[i] for i, (leaf, dim) in enumerate(tensors) if dim is None and i not in call.params and isinstance(leaf, Tensor)]
    names += [name for name, value in call.kwargs.items() if all_tensors(value)]
    return ", ".join(names)


def assert_reductions_close(factored: Tree, grads: Tree, rtol: float | None = None, atol: float = 0.0) -> None:
    """Raise `Mismatch` unless the reductions of a factored tree equal those of the gradients that it stands for.

    Compares `psg.tree.norm`, `gram`, `dot` (along one fixed direction) and `weighted_sum` (with fixed weights of both signs). A reduction's
    terms may cancel, so in addition to `rtol` its error may be a thousand roundings of the terms.

    Args:
        factored: Tree of factors or of [n, *shape] tensors.
        grads: Tree of [n, *shape] tensors.
        rtol: As in `assert_trees_close`.
        atol: As in `assert_trees_close`.

    Raises:
        Mismatch: A reduction differs; the message begins with its name.

    Example:
        >>> import psg
        >>> loss, params, batch = lambda w, x: (w * x).sum() ** 2, torch.ones(3), torch.rand(5, 3)
        >>> assert_reductions_close(psg.factored_grad(loss)(params, batch), psg.per_sample_grad(loss)(params, batch))
    """
    sizes = reference_norm(grads)
    if not (finite := sizes.isfinite()).all():
        # For a gradient that is not finite, one order of summation may give inf and another NaN.
        found = tree.norm(factored)
        if found[~finite].isfinite().any():
            raise Mismatch("norm: finite for a sample whose gradient is not", "norm", int((found.isfinite() & ~finite).nonzero()[0]))
        factored, grads, sizes = tree.take(factored, finite), tree_map(lambda leaf: leaf[finite], grads), sizes[finite]
    flat = reference_flat(grads)
    weights = torch.linspace(-1, 2, len(flat), dtype=flat.dtype, device=flat.device)
    direction = tree_map(_waves, grads)
    size = sizes.max().item() if len(sizes) else 0.0
    length = reference_norm(tree_map(lambda leaf: leaf[None], direction)).item()
    # Materialised gradients of 16 bits have been rounded, which their factors have not.
    narrow = [default_rtol(leaf.dtype) for leaf in flatten(grads)[0] if leaf.dtype.itemsize < 4]
    rounding = max([1000 * torch.finfo(flat.dtype).eps, *narrow])

    def close(name: str, actual: Tree, expected: Tree, terms: float, per_sample: bool = True) -> None:
        assert_trees_close(actual, expected, rtol, atol + rounding * terms, name=name, per_sample=per_sample)

    close("norm", tree.norm(factored), reference_norm(grads), size)
    close("gram", tree.gram(factored), reference_gram(grads), size * size)
    close("dot", tree.dot(factored, direction), reference_dot(grads, direction), size * length)
    summed = tree.weighted_sum(factored, weights), reference_weighted_sum(grads, weights)
    close("weighted_sum", *summed, terms=2 * size * len(flat), per_sample=False)


def _waves(leaf: Tensor) -> Tensor:
    """[n, *shape] -> [*shape]: a fixed tensor of the shape of one sample's gradient, whose entries differ."""
    shape = leaf.shape[1:]
    return torch.arange(shape.numel(), device=leaf.device, dtype=torch.float32).cos().reshape(shape).to(leaf.dtype)


def _repeatable(again: Tree, before: Tree) -> bool:
    try:
        assert_trees_close(again, before)
    except Mismatch:
        return False
    return True


def _arbitrate(fn: Callable, options: Options, args: tuple, shared: dict, found: Tree, grads: Tree, i: int) -> str:
    """A verdict on two gradients of sample i: which is nearer to central differences of fn, along the line on which they differ."""
    batch = Batch(fn, args, options)
    sides = ((found,), (grads,)) if isinstance(options.argnums, int) else (found, grads)
    ours, theirs = (tree_map(lambda leaf: leaf[i : i + 1].detach(), side) for side in sides)
    gap = tree_map(torch.sub, ours, theirs)
    size = reference_norm(gap).item()
    if not 0 < size < float("inf"):
        return ""
    line = tree_map(lambda leaf: leaf[0] / size, gap)
    origin = tuple(batch.sample(i)[k] for k in batch.positions)
    resolution = torch.finfo(reference_flat(gap).dtype).eps ** (1 / 3)
    step = resolution * max(1.0, reference_norm(tree_map(lambda leaf: leaf[None], origin)).item())

    def value(shift: float) -> float:
        arguments = batch.sample(i)
        for k, along in zip(batch.positions, line, strict=True):
            # fn may differentiate for it, or look whether anything is to be differentiated.
            arguments[k] = tree_map(lambda leaf, d: (leaf + shift * d).detach().requires_grad_(), arguments[k], along)
        with forgetting(), torch.enable_grad():
            found = fn(*arguments, **shared)
        return found.item() if isinstance(found, Tensor) else found

    slope = (value(step) - value(-step)) / (2 * step)
    slopes = {"psg": reference_dot(ours, line).item(), "the loop": reference_dot(theirs, line).item()}
    nearer = min(slopes, key=lambda side: abs(slopes[side] - slope))
    said = ", ".join(f"{side} {told:.6e}" for side, told in slopes.items())
    return f"\nCentral differences along the disagreement give {slope:.6e} ({said}): {nearer} is nearer."
