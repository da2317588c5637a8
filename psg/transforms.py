"""From a function of one sample to functions of a batch: the five transforms.

Arguments that all five share:

    argnums:    Which positional argument, or arguments, to differentiate: an integer or a tuple of them, as in torch.func.grad.
                All of them are the same for every sample, unless in_dims says otherwise.
    in_dims:    Where the samples are: for each positional argument an integer, None (the same for every sample) or a tree of them,
                as in torch.func.vmap. By default the argnums arguments are shared and every tensor of every other argument is batched
                along dim 0; what is no tensor (a number, a string, a flag) is the same for every sample.
    has_aux:    Whether fn returns (loss, aux). aux is a tree; its tensors come back with the samples in dim 0.
    randomness: "different" draws afresh for every sample, "same" once for all, "error" forbids random numbers.
    chunk_size: At most so many samples at a time. It changes memory and speed, and no result but through "different" random numbers. An
                integer; a size in bytes that a chunk should stay within, such as "512 MiB"; or "auto" for a quarter of the memory that is
                free. What a sample takes is measured on a first, small chunk, once for every shape. What chunks give is written into
                place or added up, so that nothing is held twice.
    method:     "auto" takes the highest rung of capture -> vmap(grad) -> loop that can run fn, and warns once (FallbackWarning) if it is
                not the first; "capture", "vmap" or "loop" takes that one. All are right; `psg.explain` tells which runs and why.
                "batch" is for another kind of fn, one of a whole batch: `fn(params, *batch) -> losses [n]`, called once, without vmap.
                Choose it where vmap cannot run fn and a loop is slow: data-dependent routing (mixtures of experts), `.item()`, kernels
                without a batching rule, activation checkpointing. Sample i's gradient is that of losses[i]. Every op in which a
                parameter meets data needs a rule, or an error names the parameter, the op and the line; what is computed from parameters
                and what is frozen (merged low ranks, masks, anchors of penalties) is computed once. StateError if losses share rows of
                data, as under batch normalisation, or change when other samples are exchanged. It takes two more backward passes (in
                bfloat16 three, of more than 32 samples five) and one more forward pass (two where fn draws random numbers), which measure
                that, on the samples at hand. Only what the samples share can be differentiated, and tensors of an aux have the samples in
                dim 0.

Keyword arguments of a call go to fn as they are, the same for every sample, as in torch.func.vmap.

Every transform raises InputError if an argument does not fit, or if fn does not return a scalar; what fn itself raises is raised as it
is. Sample i's gradient is that of fn at sample i: nothing is averaged or rescaled. Inputs are not changed. A batch of no samples gives
leaves [0, *shape] and zero sums.

Derivatives. If an input requires grad, or a tensor that fn closes over, so do the results. The forward pass then is the same, at the
same price, and holds nothing but the inputs; a backward pass, if there is one, computes vmap(grad(fn)) (or, where vmap cannot run fn, a
loop over the samples) and differentiates that. It runs fn again: until then, write into nothing that fn reads, such as a module's
buffers; and fn may draw random numbers from torch's default generators alone, not from one of its own or from Python's, which would
give others. A function that draws takes this path from the start, for values and derivative must come from one draw: pass it detached
parameters, or call under torch.no_grad(), where no derivative is wanted. Inside torch.func transforms (grad, vmap, jvp, ...) the path
through vmap(grad) is taken too. At a norm of zero derivatives are zero.

torch.compile does not look into psg's functions: its graph breaks around them. What is compiled inside of fn runs uncompiled.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from psg import _ambient, _chunks, _differentiable, _trees, clipping
from psg._call import Call, Method, Options, Randomness, prepare
from psg._errors import InputError
from psg._rungs import Result
from psg.factors import Factor, Joint


class Batching(NamedTuple):
    """What a transform's function, as its attribute `batching`, tells of the batches it takes: for `psg.jit`, which pads them.

    Attributes:
        name: What messages call it.
        fn: The function of one sample.
        pad: From args, kwargs and a function of the number of samples that gives another, no smaller: args and kwargs of so many, and
            the number before. The last sample is repeated, and masked where the function takes a mask.
        trim: From a result and a number of samples to the result for the first so many.
    """

    name: str
    fn: Callable[..., Any]
    pad: Callable[[tuple[Any, ...], dict[str, Any], Callable[[int], int]], tuple[tuple[Any, ...], dict[str, Any], int]]
    trim: Callable[[Any, int], Any]


class ClippedGrad(NamedTuple):
    """What `clipped_grad` returns.

    Attributes:
        grads: sum_n clip_coef[n] g_n: the parameters' tree, each leaf [*shape]. It has no samples, so that its norm is not `psg.tree.norm`
            but `torch.nn.utils.get_total_norm(optree.tree_leaves(grads))`.
        norms: |g_n| over all leaves before clipping, [n]; 0 for masked samples.
        clip_coef: The parameters' tree, each leaf [n]: what the sample's gradient of that leaf was multiplied with. 0 for samples that
            are masked or not finite.
        values: The losses, [n]; 0 for masked samples.
        aux: The auxiliary output with has_aux, else None.
        nonfinite: How many unmasked samples had a norm that is not finite and so contribute zero; an integer tensor [].
        sensitivity: The most by which adding or removing one sample changes `grads` in L2 norm: the clip norm, sqrt(sum C^2) over
            groups, inf for a policy of the user's without a bound (`clipping.bounded`). Replacing one changes them by up to twice that.
        group_norms: The parameters' tree, each leaf [n]: the norm over the leaves that it is clipped together with, before clipping; 0 for
            masked samples. With one clip norm for all they are `norms`; with several, what each is adapted by.
    """

    grads: Any
    norms: Tensor
    clip_coef: Any
    values: Tensor
    aux: Any
    nonfinite: Tensor
    sensitivity: float | Tensor
    group_norms: Any


torch.serialization.add_safe_globals([ClippedGrad])


@_ambient.untraced
def per_sample_grad(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    in_dims: Any = None,
    has_aux: bool = False,
    randomness: Randomness = "different",
    chunk_size: int | str | None = None,
    method: Method = "auto",
) -> Callable[..., Any]:
    """The function that gives every sample's gradient.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        argnums: Which positional argument, or tuple of them, to differentiate. The samples share them all, unless in_dims says otherwise.
        in_dims: Where the samples are: for each positional argument an integer, None (the same for every sample) or a tree of them. By
            default the argnums arguments are shared, and tensors of the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws afresh for every sample, "same" once for all, "error" forbids random numbers.
        chunk_size: At most so many samples at a time: an integer; what fits in bytes, "512 MiB"; "auto", in a quarter of the free memory;
            None for all at once.
        method: "auto" takes the fastest that can run fn, of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample
            after another); each by its name takes that one. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function of the same arguments over a batch. It returns the tree of the differentiated argument with a tensor [n, *shape] at
        every leaf, in the leaf's dtype (for a tuple of argnums, a tuple of trees); with has_aux `(grads, aux)`. As with
        `torch.autograd.grad`, leaves may share memory with each other, or one entry stand for many: clone a leaf to write into it.

    Raises:
        InputError: An option is not one of those above.

    Example:
        >>> import torch, psg
        >>> loss = lambda w, x: (w * x).sum() ** 2
        >>> psg.per_sample_grad(loss)(torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([[2., 0.],
                [4., 4.]])
    """
    options = Options(argnums, in_dims, has_aux, randomness, chunk_size, method)
    return _transform("per_sample_grad", fn, options, _chunks.Rows, _materialize, _gradients, materializes=True)


@_ambient.untraced
def per_sample_value_and_grad(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    in_dims: Any = None,
    has_aux: bool = False,
    randomness: Randomness = "different",
    chunk_size: int | str | None = None,
    method: Method = "auto",
) -> Callable[..., tuple[Any, Any]]:
    """Like `per_sample_grad`, with the losses.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        argnums: Which positional argument, or tuple of them, to differentiate. The samples share them all, unless in_dims says otherwise.
        in_dims: Where the samples are: for each positional argument an integer, None (the same for every sample) or a tree of them. By
            default the argnums arguments are shared, and tensors of the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws afresh for every sample, "same" once for all, "error" forbids random numbers.
        chunk_size: At most so many samples at a time: an integer; what fits in bytes, "512 MiB"; "auto", in a quarter of the free memory;
            None for all at once.
        method: "auto" takes the fastest that can run fn, of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample
            after another); each by its name takes that one. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function of the same arguments over a batch. It returns `(values, grads)`, values [n]; with has_aux `((values, aux), grads)`.

    Raises:
        InputError: An option is not one of those above.

    Example:
        >>> import torch, psg
        >>> loss = lambda w, x: (w * x).sum() ** 2
        >>> psg.per_sample_value_and_grad(loss)(torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        (tensor([1., 4.]), tensor([[2., 0.],
                [4., 4.]]))
    """
    options = Options(argnums, in_dims, has_aux, randomness, chunk_size, method)
    return _transform("per_sample_value_and_grad", fn, options, _chunks.Rows, _materialize, _values_and_gradients, materializes=True)


@_ambient.untraced
def per_sample_norm(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    in_dims: Any = None,
    has_aux: bool = False,
    randomness: Randomness = "different",
    chunk_size: int | str | None = None,
    method: Method = "auto",
) -> Callable[..., Any]:
    """The function that gives the norm of every sample's gradient, over all leaves together.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        argnums: Which positional argument, or tuple of them, to differentiate. The samples share them all, unless in_dims says otherwise.
        in_dims: Where the samples are: for each positional argument an integer, None (the same for every sample) or a tree of them. By
            default the argnums arguments are shared, and tensors of the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws afresh for every sample, "same" once for all, "error" forbids random numbers.
        chunk_size: At most so many samples at a time: an integer; what fits in bytes, "512 MiB"; "auto", in a quarter of the free memory;
            None for all at once.
        method: "auto" takes the fastest that can run fn, of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample
            after another); each by its name takes that one. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function of the same arguments over a batch. It returns the norms, [n], real and at least float32; with has_aux
        `(norms, aux)`. Per-sample gradients are held for one parameter and a few samples at a time, where that is cheapest.

    Raises:
        InputError: An option is not one of those above.

    Example:
        >>> import torch, psg
        >>> loss = lambda w, x: (w * x).sum()
        >>> psg.per_sample_norm(loss)(torch.zeros(2), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([5., 0.])
    """
    options = Options(argnums, in_dims, has_aux, randomness, chunk_size, method)
    return _transform("per_sample_norm", fn, options, _chunks.Rows, _norm, _norms, settles=True)


@_ambient.untraced
def factored_grad(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    in_dims: Any = None,
    has_aux: bool = False,
    randomness: Randomness = "different",
    chunk_size: int | str | None = None,
    method: Method = "auto",
) -> Callable[..., Any]:
    """The function that gives every sample's gradient as factors, from which `psg.tree` computes everything else.

    On inputs that require grad, and inside torch.func transforms, the factors are Dense and computed by vmap(grad): pass detached
    parameters to have them factored.

    Factors may share memory with the batch, as the input of a linear layer is one half of its factor, and with parameters, where a weight
    is the product of two: while they are in use, write into neither, by refilling a buffer for the next batch or by an optimizer's step.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        argnums: Which positional argument, or tuple of them, to differentiate. The samples share them all, unless in_dims says otherwise.
        in_dims: Where the samples are: for each positional argument an integer, None (the same for every sample) or a tree of them. By
            default the argnums arguments are shared, and tensors of the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws afresh for every sample, "same" once for all, "error" forbids random numbers.
        chunk_size: At most so many samples at a time: an integer; what fits in bytes, "512 MiB"; "auto", in a quarter of the free memory;
            None for all at once.
        method: "auto" takes the fastest that can run fn, of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample
            after another); each by its name takes that one. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function of the same arguments over a batch. It returns the tree of the differentiated argument with a `psg.factors.Factor` at
        every leaf that stands for [n, *shape]; with has_aux `(tree, aux)`.

    Raises:
        InputError: An option is not one of those above.

    Example:
        >>> import torch, psg
        >>> model = torch.nn.Linear(3, 2)
        >>> loss, params = psg.stateless(model, torch.nn.functional.mse_loss)
        >>> g = psg.factored_grad(loss)(params, torch.randn(5, 3), torch.randn(5, 2))
        >>> g["weight"]
        Outer(n=5, shape=(2, 3), dtype=torch.float32)
        >>> psg.tree.gram(g).shape
        torch.Size([5, 5])
    """
    options = Options(argnums, in_dims, has_aux, randomness, chunk_size, method)
    return _transform("factored_grad", fn, options, _chunks.Factors, _factors, _gradients, factored=True)


@_ambient.untraced
def clipped_grad(
    fn: Callable[..., Any],
    clip_norm: Any,
    argnums: int | tuple[int, ...] = 0,
    *,
    policy: Literal["clip", "automatic", "normalize"] | clipping.Policy = "clip",
    in_dims: Any = None,
    has_aux: bool = False,
    randomness: Randomness = "different",
    chunk_size: int | str | None = None,
    method: Method = "auto",
) -> Callable[..., ClippedGrad]:
    """The function that gives the sum of clipped per-sample gradients: sum_n min(1, C / |g_n|) g_n.

    Formal guarantee: with the built-in policies, and bounded ones, each sample's term has L2 norm at most `sensitivity`, up to rounding
    in the dtypes of the norms and of the gradients; a sample whose norm is not finite, and a masked one, adds exactly zero. Rounding is
    relative to the terms that a gradient adds up (over positions), which are larger than it where they cancel: down to a millionth, say,
    `plans.using(norm="keep")` forms gradients before they are scaled.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        clip_norm: C, in the units of the gradient: a number or scalar tensor for the norm over all leaves, `psg.clipping.PerLeaf` or
            `psg.clipping.PerGroup` for leaves and groups of them. 0 gives a zero sum; inf, with the policy "clip", the plain sum.
        argnums: Which positional argument, or tuple of them, to differentiate. The samples share them all, unless in_dims says otherwise.
        policy: "clip", "automatic", "normalize" or a function (norms, clip_norm) -> clip_coef; see `psg.clipping`. It must treat every
            sample on its own, elementwise in the norms: chunks and buckets call it on parts of a batch and on padding.
        in_dims: Where the samples are: for each positional argument an integer, None (the same for every sample) or a tree of them. By
            default the argnums arguments are shared, and tensors of the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws afresh for every sample, "same" once for all, "error" forbids random numbers.
        chunk_size: At most so many samples at a time: an integer; what fits in bytes, "512 MiB"; "auto", in a quarter of the free memory;
            None for all at once.
        method: "auto" takes the fastest that can run fn, of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample
            after another); each by its name takes that one. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function of the same arguments over a batch, and of the keyword `mask`, booleans [n]: samples where it is False contribute
        exactly zero. It returns a `ClippedGrad`. Per-sample gradients are formed only where that is cheapest, parameter by parameter; of
        each at most `plans.using(keep_bytes=)`, 512 MiB by default, is kept for the sum.

    Raises:
        InputError: A clip norm is negative or NaN, or an option is not one of those above. At a call: a mask is not [n] booleans, or fn
            has an argument `mask` too; a policy gives something else than [n], or would bring gradients to a norm of inf; a leaf has no
            group, or a group no leaf. See `help(psg.transforms)` for what every transform raises.

    Example:
        >>> import torch, psg
        >>> loss = lambda w, x: (w * x).sum()
        >>> out = psg.clipped_grad(loss, clip_norm=1.0)(torch.zeros(2), torch.tensor([[3.0, 4.0], [0.5, 0.0]]))
        >>> out.grads, out.norms
        (tensor([1.1000, 0.8000]), tensor([5.0000, 0.5000]))

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1; Bu et al., "Differentially Private Optimization
    on Large Model at Small Cost", 2023 (one backward pass, weighted sums from its factors).
    """
    chosen = clipping.policy_of(policy)
    if not isinstance(clip_norm, (clipping.PerLeaf, clipping.PerGroup)):
        clipping.check_clip_norm(clip_norm)
    options = Options(argnums, in_dims, has_aux, randomness, chunk_size, method)
    run = _over_batches("clipped_grad", fn, options, _chunks.ClippedSums, settles=True)

    def clipped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ClippedGrad:
        mask = kwargs.pop(_PADDED) if _PADDED in kwargs else _pop_mask(fn, args, kwargs)
        groups: list[clipping.Group] = []

        def reduce(call: Call, result: Result, start: int) -> _chunks.Clipped:
            return _clip(call, result, groups, chosen, None if mask is None else mask[start : start + len(result.values)])

        def check(call: Call) -> None:
            groups.extend(clipping.groups_of(clip_norm, call.gradient_spec))
            clipping.expect_finite(groups, chosen)
            clipping.check_mask("clipped_grad", mask, call.n)

        call, (reduced, _, aux) = run(args, kwargs, reduce, check)
        leaves = reduced.sums, clipping.by_leaf(groups, reduced.coefs), clipping.by_leaf(groups, reduced.group_norms)
        grads, coefs, group_norms = map(call.gradient_tree, leaves)
        bound = clipping.sensitivity(groups, chosen)
        return ClippedGrad(grads, reduced.norms, coefs, reduced.values, aux, reduced.nonfinite, bound, group_norms)

    return _wrap("clipped_grad", fn, options, clipped, _first_clipped, masked=True)


# What the five have in common


class _Reduced(NamedTuple):
    """What is left of a whole batch: the reduction, the losses, the auxiliary output."""

    reduced: Any
    values: Tensor
    aux: Any


def _transform(
    name: str,
    fn: Callable[..., Any],
    options: Options,
    collector: Callable[[int], Any],
    reduce: Callable[[Call, Result, int], Any],
    finish: Callable[[Call, _Reduced], Any],
    factored: bool = False,
    materializes: bool = False,
    settles: bool = False,
) -> Callable[..., Any]:
    """The function that runs a call chunk by chunk, reduces each chunk, and finishes what is left of all together."""
    run = _over_batches(name, fn, options, collector, factored, materializes, settles)
    return _wrap(name, fn, options, lambda args, kwargs: finish(*run(args, kwargs, reduce)), _first)


def _over_batches(
    name: str,
    fn: Callable[..., Any],
    options: Options,
    collector: Callable[[int], Any],
    factored: bool = False,
    materializes: bool = False,
    settles: bool = False,
) -> Callable[..., tuple[Call, _Reduced]]:
    """Prepare a call, run it chunk by chunk, reduce each chunk and collect what is left."""
    label, sizes = _label(name, fn), _chunks.Sizes(options.chunk_size, materializes)

    def compute(reduce: Callable[[Call, Result, int], Any], call: Call, method: str) -> _Reduced:
        reduced, values, aux = collector(call.n), _chunks.Rows(call.n), _chunks.Rows(call.n)
        first: Any = None

        def collect(start: int, result: Result) -> None:
            nonlocal first
            reduced.add(start, reduce(call, result, start))
            values.add(start, [result.values])
            tree = _trees.flatten(result.aux)
            first = first or tree
            _trees.expect_same(first, tree, "aux", lead=1)
            aux.add(start, [leaf for leaf in tree[0] if isinstance(leaf, Tensor)])

        _chunks.run(call, method, sizes, collect)
        leaves, spec = first
        return _Reduced(reduced.result(), values.result()[0], _trees.unflatten(spec, _trees.fill(leaves, aux.result())))

    def run(
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reduce: Callable[[Call, Result, int], Any],
        check: Callable[[Call], None] = lambda call: None,
    ) -> tuple[Call, _Reduced]:
        kept = _ambient.keep(fn)
        with _ambient.off():
            call = prepare(label, kept, options, args, kwargs, settles)
            check(call)
            return call, _differentiable.differentiable(functools.partial(compute, reduce), call, options.method, attach=not factored)

    return run


def _wrap(
    name: str,
    fn: Callable[..., Any],
    options: Options,
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    trim: Callable[[Any, int], Any],
    masked: bool = False,
) -> Callable[..., Any]:
    label = _label(name, fn)

    # The result has fn's name and docstring, but not its signature: it takes a batch.
    @functools.wraps(fn, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
    def transformed(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    def pad(args: tuple[Any, ...], kwargs: dict[str, Any], size_for: Callable[[int], int]) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        own = prepare(label, fn, options, args, {})
        if own.n == 0:
            return args, kwargs, 0
        index = torch.arange(size_for(own.n), device=own.leaves[own.params[0]].device)
        source = index.clamp(max=own.n - 1)
        if masked:
            kwargs = dict(kwargs)
            mask = _pop_mask(fn, args, kwargs)
            clipping.check_mask("clipped_grad", mask, own.n)
            within = index < own.n
            kwargs[_PADDED] = within if mask is None else within & mask[source]
        if len(index) == own.n:
            return args, kwargs, own.n  # as it is, without a copy
        return _trees.unflatten(own.spec, own.take(source).leaves), kwargs, own.n

    del transformed.__wrapped__
    transformed.batching = Batching(label, fn, pad, trim)  # type: ignore[attr-defined]
    made = _ambient.untraced(transformed)
    mark(made, label)
    return made


# What the transforms have made, with what messages call it: by itself, for functools.wraps hands attributes on.
_made: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def mark(function: Any, label: str) -> None:
    """Note that a function is one of a batch, which a transform has made."""
    _made[function] = label


def label_of(function: Any) -> str | None:
    """What messages call a function that a transform has made; None for every other."""
    try:
        return _made.get(function)
    except TypeError:  # no weak references to it, so that it is none
        return None


def expect_one_sample(name: str, fn: Any) -> None:
    """Refuse a function that a transform has made, where one of a sample belongs.

    Raises:
        InputError: It is one.
    """
    label = label_of(fn)
    if label is not None:
        raise InputError(
            f"{name}: got psg.{label}, a function of a batch; expected the function of one sample that the transform was made of."
        )


# The keyword that takes the mask of a padded batch: no name, so that no argument of fn's has it.
_PADDED = "mask and padding"


def _pop_mask(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take clipped_grad's own keyword out of those of a call; InputError if fn may be meant, which has an argument of the same name."""
    if "mask" not in kwargs:
        return None
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # not every callable has one
        names = []
    if "mask" in names[len(args) :]:
        raise InputError(
            "clipped_grad: mask= says which samples count, and fn has an argument of that name too. Pass fn's by position, or rename it."
        )
    return kwargs.pop("mask")


def _label(name: str, fn: Callable[..., Any]) -> str:
    return f"{name}({getattr(fn, '__name__', type(fn).__name__)})"


def _first(result: Any, n: int) -> Any:
    """The first n samples of a result all of whose tensors have the samples in dim 0."""
    return _trees.map_tensors(lambda tensor: tensor[:n], result)


def _first_clipped(result: ClippedGrad, n: int) -> ClippedGrad:
    rows = ("norms", "clip_coef", "values", "aux", "group_norms")
    return result._replace(**{name: _first(getattr(result, name), n) for name in rows})


# What a transform leaves of a chunk


def _materialize(call: Call, result: Result, start: int) -> list[Tensor]:
    return [factor.materialize() for factor in result.factors]


def _factors(call: Call, result: Result, start: int) -> list[Factor]:
    return result.factors


def _norm(call: Call, result: Result, start: int) -> list[Tensor]:
    return [Joint(result.factors).norm]


def _clip(call: Call, result: Result, groups: list[clipping.Group], policy: clipping.Policy, mask: Tensor | None) -> _chunks.Clipped:
    # A policy may close over what is differentiated.
    coefficients = functools.partial(call.outside.run, functools.partial(clipping.coefficients, policy))
    values = result.values if mask is None else torch.where(mask, result.values, 0)
    return _chunks.Clipped(values, *clipping.clipped_sums(result.factors, groups, coefficients, mask))


# What it returns of all


def _gradients(call: Call, whole: _Reduced) -> Any:
    tree = call.gradient_tree(whole.reduced)
    return (tree, whole.aux) if call.has_aux else tree


def _values_and_gradients(call: Call, whole: _Reduced) -> Any:
    return ((whole.values, whole.aux) if call.has_aux else whole.values), call.gradient_tree(whole.reduced)


def _norms(call: Call, whole: _Reduced) -> Any:
    (norms,) = whole.reduced
    return (norms, whole.aux) if call.has_aux else norms
