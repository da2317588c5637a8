"""The five transforms: each turns a function of one sample into a function of a batch.

Arguments that all five share:

    argnums:    The index of the positional argument to differentiate, or a tuple of indices, as in torch.func.grad. The samples share
                these arguments unless in_dims says otherwise.
    in_dims:    The batch dimension of each positional argument, as in torch.func.vmap: an integer, None (shared by all samples) or a tree
                of these. By default the argnums arguments are shared, and every tensor in the other arguments is batched along dim 0.
                Values that are not tensors (numbers, lists of numbers, strings, flags) are always shared.
    has_aux:    Whether fn returns (loss, aux). aux is a tree; its tensors are returned with the samples in dim 0.
    randomness: "different" draws new random numbers for every sample, "same" draws once for all samples, "error" forbids drawing. With
                method="batch" fn draws itself, for the whole batch: "different" leaves it to fn, the others raise StateError if it draws.
    chunk_size: The most samples to run at a time: an integer; a size in bytes, such as "512 MiB", for as many as fit; "auto", for as many
                as fit in a quarter of the free memory; None for the whole batch. For a size and "auto", a small first chunk measures the
                bytes per sample, once for every shape. Chunks change memory and speed, but no result except through "different" random
                numbers. Each chunk's results are written into place or added up, so nothing is held twice.
    method:     "auto" takes the first of capture, vmap(grad) and a loop over the samples that can run fn, and warns once (FallbackWarning)
                if an earlier one could not. "capture", "vmap" or "loop" forces that method. All give right results; `psg.explain` tells
                which one runs and why.
                "batch" is for a different kind of fn, one of a whole batch: `fn(params, *batch) -> losses [n]`, called without vmap. Choose
                it where vmap cannot run fn and a loop is slow: data-dependent routing (mixtures of experts), `.item()`, kernels without a
                batching rule, activation checkpointing. Sample i's gradient is that of losses[i]. Every op that combines a parameter with
                data needs a rule; otherwise InputError names the parameter, the op and the line. Values computed from parameters and frozen
                tensors alone (merged low-rank updates, masks, penalties against an anchor) need none. StateError if several losses depend
                on one row of data, as under batch normalisation (to more than about 2e-5 of the largest row, in 16-bit dtypes 3e-2; less
                looks like rounding), or if a loss of up to half of the samples (of fewer than eight, of all) changes by more than 1e-4 of
                it (in float64 1e-9, in 16-bit dtypes 3e-2) when the others are exchanged; unless fewer than half of these change by more
                than 1e-3, and each changes too when matrix products are rounded otherwise, as where a router's scores are nearly equal.
                When fn runs on so many samples for the first time, more samples are compared (up to 16, all), and the gradient of their
                losses must not change either, by more than 1e-3 (5e-3 on a GPU, in float64 1e-9, in 16 bits 3e-2), unless it does when
                products are rounded otherwise: zero weights, detached values and hooks hide from the losses that samples meet. So make fn
                once, and not anew for each call. Samples that interact rarely, in other ways than through parameters, are not always
                noticed; nor are those of an fn that rejects the exchanged batch, or whose losses are not repeatable (it warns), nor what fn
                mixes in shared tensors (in_dims with None, keyword arguments, closures), which cannot be exchanged: whether nodes of joined
                graphs, say, meet those of other graphs in a mean. Nor is a scale by the number of rows, as a gradient may have that only
                the backward pass of an autograd.Function computes. In a batch or chunk of one sample there is nothing to exchange.
                InputError if samples that have to run without the others (one is not finite, a derivative is wanted) do not have the losses
                of the whole batch, unless fn draws random numbers. These checks hold for the samples at hand, and cost two more backward
                passes (three for more than 65 samples; more in float16, or if cotangents of other samples cancel) and two more forward
                passes (for fewer than eight samples up to five; one more where fn draws random numbers, or samples run without the others;
                up to 16 where fewer than half of the losses change); and, where parameters meet a tensor that all samples share with as
                many rows as there are samples, or are repeated, one more for each of some log2(n) + 3 sets of samples, so that none with
                large gradients hides the others' on a row; the first time up to 17 forward and 32 backward passes (seven and
                twelve for more than 16 samples). Only shared arguments can be differentiated, and tensors in aux must have the samples in
                dim 0 (else InputError).

Keyword arguments of a call go to fn unchanged and are shared by all samples, as in torch.func.vmap.

Every transform raises InputError if an argument does not fit, if fn does not return a scalar, or if fn is itself the result of a
transform; errors from fn itself are raised as they are, those that torch too may raise where a shape does not fit (RuntimeError, TypeError,
ValueError, IndexError) with a note of what fn was given. A method that is forced and cannot run fn raises PsgError, or torch's own error.
Sample i's gradient is that of fn at sample i: nothing is averaged or rescaled. Inputs are not changed. A batch of no samples gives leaves
[0, *shape] and zero sums. fn is not called, so the losses have the first parameter's dtype, even if fn returns another; with has_aux fn is
called once, on zeros, and they have that of its loss.

Derivatives. If an input requires grad, or a tensor that fn closes over does, the results require grad too. The forward pass is the same, at
the same price, and saves nothing but the inputs. A backward pass through the results runs fn again, with a history, and differentiates
that. Until then, write into nothing that fn reads, such as a module's buffers. If fn draws random numbers, the first pass has the history,
because values and derivatives must come from one draw; so it has in `factored_grad`, under a function mode of yours, and inside torch.func
transforms (grad, vmap, jvp, ...). Where no derivative is wanted, pass detached parameters or call under torch.no_grad(). A pass with a
history takes the rules of linear layers, products, convolutions and lookups, and those of yours that are `differentiable`; for an fn that
calls torch.autograd.grad, in calls inside of fn, and in a level of torch.autograd.forward_ad it is one of vmap(grad). With method="batch"
it calls fn on batches of one. psg notices draws from the default generators of torch, Python and NumPy, but of the latter two not where
only a closed-over tensor requires grad; draws from a generator of fn's own go unnoticed. Where a norm is zero, its derivatives are zero.

Derivatives reach the history of a closed-over tensor only if it was recorded in the thread that calls psg. Of what fn hands to TorchScript,
psg sees nothing, unless it runs as the Python function that torch.jit.script was given.

Side effects. fn runs once for all samples, in one thread, and again wherever a pass cannot go on: samples that branch apart run in groups,
other functions by the next method. Side effects (counters, writes into tensors that fn closes over) happen once in every pass, not once for
each sample; in the loop, a sample sees those of the samples before it. To print a tensor, or make other text of it, is to read its values:
of samples that differ it shows each, mostly in the loop, so that method="loop" is the one for debuggers. A pass that is given up takes back
torch.set_default_dtype and torch.use_deterministic_algorithms; other settings of torch's change by contexts, `with` blocks, inside fn.
`stateless` takes back what a pass that is given up has left in the module's attributes. With `functional_call` alone the next pass starts
from it: a module that changes its weights and undoes that at the end of its forward pass (adapters that are merged, say) may then compute
something else, without a warning. A tensor that fn computes from the samples or the parameters and keeps is of no use after the call:
return it as aux. Out of the attributes, lists and dicts of its module `stateless` takes it again (after "vmap", "loop" and "batch"
constants too), so that a cache is empty for the next call. It leaves it where another value was before, so that nobody takes that for the
result, and in a module of which a flag or a number has changed as well; there a tensor that any use of raises an error, and that can be
copied and saved, stands for what vmap has made. `Tensor.set_`, which psg cannot see, does nothing to a sample, as under vmap. Parameters
and samples used in threads that fn starts are an error, except with method="loop". An error that ends in such a thread, or that the thread
handles, goes unnoticed: pass it on. Of errors of ops that fn itself handles psg takes note, and goes down to the loop.

torch.compile does not trace psg's functions: it breaks the graph around them. Compiled functions inside fn run uncompiled.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from psg import _trees, clipping
from psg._call import Call, Kept, Method, Options, Randomness, note, noted, prepare, takes_keyword
from psg._clipped_sums import ClippedSums, clipped_sums, groups_of, sensitivity
from psg._errors import InputError, received
from psg._ladder import _chunks, _differentiable
from psg._ladder._rungs import Result
from psg._torch import _ambient
from psg.factors import Factor
from psg.factors._joint import Joint

__all__ = ["ClippedGrad", "clipped_grad", "factored_grad", "per_sample_grad", "per_sample_norm", "per_sample_value_and_grad"]


class Batching(NamedTuple):
    """A function that a transform has made: its label, and how `psg.jit` pads its batches; see `batching_of`.

    Attributes:
        name: The function's name in messages.
        fn: The function of one sample.
        pad: (args, kwargs, size_for) -> (args, kwargs, n): a batch of n samples, padded to size_for(n) >= n samples. The padding repeats
            the last sample, and is masked where the function takes a mask.
    """

    name: str
    fn: Callable[..., Any]
    pad: Callable[[tuple[Any, ...], dict[str, Any], Callable[[int], int]], tuple[tuple[Any, ...], dict[str, Any], int]]


class ClippedGrad(NamedTuple):
    """What `clipped_grad` returns.

    In `clip_coef` and `group_norms`, leaves that are clipped together are one tensor: clone before you write into it.

    Differential privacy: `sensitivity` is that of `grads` alone. All other fields, the count `nonfinite` included, are exact functions of
    the samples: neither publish them nor let them steer the training without noise of their own (`clipping.adapt` has `std` for it).

    Attributes:
        grads: sum_n clip_coef[n] g_n: the parameters' tree, each leaf [*shape], in float32 for parameters of 16 bits: rounded to these, the
            sum could change by more than `sensitivity`. Round after the noise. It has no batch dimension, so its norm is
            `torch.nn.utils.get_total_norm(optree.tree_leaves(grads))`, not `psg.tree.norm`.
        norms: |g_n| over all leaves before clipping, [n]; 0 for masked samples.
        clip_coef: The parameters' tree, each leaf [n]: the coefficients that multiply the samples' gradients of that leaf. 0 for samples
            that are masked or whose norm is not finite.
        values: The losses, [n]; 0 for masked samples.
        aux: The auxiliary output with has_aux, else None.
        nonfinite: How many unmasked samples had a norm that is not finite and so contribute zero; an integer tensor [].
        sensitivity: A bound on the L2 change of `grads` when one sample is added or removed: the clip norm; sqrt(sum C^2) over groups; inf
            for your own policy, unless `clipping.bounded` wraps it. Replacing one sample changes `grads` by up to twice that.
        group_norms: The parameters' tree, each leaf [n]: the norms, before clipping, over the leaves clipped together with this one; 0 for
            masked samples. Equal to `norms` with one clip norm for all leaves; with several, adapt each (`clipping.adapt`) by these.
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
    """Make a function that computes every sample's gradient.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        argnums: The index of the positional argument to differentiate, or a tuple of indices. The samples share these arguments unless
            in_dims says otherwise.
        in_dims: The batch dimension of each positional argument: an integer, None (shared by all samples) or a tree of these. By default
            the argnums arguments are shared, and tensors in the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws new random numbers for every sample, "same" draws once for all samples, "error" forbids drawing.
        chunk_size: The most samples to run at a time: an integer; a size, such as "512 MiB", for as many as fit; "auto", for as many as
            fit in a quarter of the free memory; None for the whole batch.
        method: "auto" takes the first that can run fn of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample after
            another); a name forces that method. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function that takes fn's arguments for a batch. It returns the tree of the differentiated argument with a tensor [n, *shape] at
        every leaf, in the leaf's dtype (for a tuple of argnums, a tuple of trees); with has_aux `(grads, aux)`. As with
        `torch.autograd.grad`, leaves may share memory with each other or be expanded tensors: clone a leaf before you write into it.

    Raises:
        InputError: `fn` is not a function, or an option has a value that is not allowed. `help(psg.transforms)` has what every transform
            raises at a call.

    Example:
        >>> import torch, psg
        >>> loss = lambda w, x: (w * x).sum() ** 2
        >>> psg.per_sample_grad(loss)(torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([[2., 0.],
                [4., 4.]])
    """
    options = Options(argnums, in_dims, has_aux, randomness, chunk_size, method)
    return _transform("per_sample_grad", fn, options, "gradients", _chunks.RowCollector, _materialize, _gradients)


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
    """Like `per_sample_grad`, but the function also returns the losses.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        argnums: The index of the positional argument to differentiate, or a tuple of indices. The samples share these arguments unless
            in_dims says otherwise.
        in_dims: The batch dimension of each positional argument: an integer, None (shared by all samples) or a tree of these. By default
            the argnums arguments are shared, and tensors in the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws new random numbers for every sample, "same" draws once for all samples, "error" forbids drawing.
        chunk_size: The most samples to run at a time: an integer; a size, such as "512 MiB", for as many as fit; "auto", for as many as
            fit in a quarter of the free memory; None for the whole batch.
        method: "auto" takes the first that can run fn of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample after
            another); a name forces that method. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function that takes fn's arguments for a batch. It returns `(values, grads)`, values [n]; with has_aux `((values, aux), grads)`.

    Raises:
        InputError: `fn` is not a function, or an option has a value that is not allowed. `help(psg.transforms)` has what every transform
            raises at a call.

    Example:
        >>> import torch, psg
        >>> loss = lambda w, x: (w * x).sum() ** 2
        >>> psg.per_sample_value_and_grad(loss)(torch.tensor([1.0, 1.0]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        (tensor([1., 4.]), tensor([[2., 0.],
                [4., 4.]]))
    """
    options = Options(argnums, in_dims, has_aux, randomness, chunk_size, method)
    return _transform("per_sample_value_and_grad", fn, options, "gradients", _chunks.RowCollector, _materialize, _values_and_gradients)


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
    """Make a function that computes the norm of every sample's gradient, over all leaves together.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        argnums: The index of the positional argument to differentiate, or a tuple of indices. The samples share these arguments unless
            in_dims says otherwise.
        in_dims: The batch dimension of each positional argument: an integer, None (shared by all samples) or a tree of these. By default
            the argnums arguments are shared, and tensors in the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws new random numbers for every sample, "same" draws once for all samples, "error" forbids drawing.
        chunk_size: The most samples to run at a time: an integer; a size, such as "512 MiB", for as many as fit; "auto", for as many as
            fit in a quarter of the free memory; None for the whole batch.
        method: "auto" takes the first that can run fn of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample after
            another); a name forces that method. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function that takes fn's arguments for a batch. It returns the norms, [n], real and at least float32; with has_aux
        `(norms, aux)`. Rules materialise per-sample gradients only where that is cheapest, mostly a few samples at a time.

    Raises:
        InputError: `fn` is not a function, or an option has a value that is not allowed. `help(psg.transforms)` has what every transform
            raises at a call.

    Example:
        >>> import torch, psg
        >>> loss = lambda w, x: (w * x).sum()
        >>> psg.per_sample_norm(loss)(torch.zeros(2), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([5., 0.])

    Source: Goodfellow, "Efficient Per-Example Gradient Computations", 2015; Li, Tramer, Liang & Hashimoto, "Large Language Models Can Be
    Strong Differentially Private Learners", 2022 (ghost clipping: norms from Gram matrices over positions).
    """
    options = Options(argnums, in_dims, has_aux, randomness, chunk_size, method)
    return _transform("per_sample_norm", fn, options, "reductions", _chunks.RowCollector, _norm, _norms)


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
    """Make a function that computes every sample's gradient as factors, from which `psg.tree` computes everything else.

    For inputs that require grad the factors have a history: pass detached parameters where no derivative is wanted. Inside a torch.func
    transform reduce them, `vmap(lambda p: psg.tree.norm(psg.factored_grad(loss)(p, x, y)))`: outside, dimension 0 of a factor counts the
    members.

    Factors may share memory with the batch (a linear layer's input is one half of its factor) and with parameters (where a weight is the
    product of two). While the factors are in use, write into neither: do not refill a buffer with the next batch or step an optimizer.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        argnums: The index of the positional argument to differentiate, or a tuple of indices. The samples share these arguments unless
            in_dims says otherwise.
        in_dims: The batch dimension of each positional argument: an integer, None (shared by all samples) or a tree of these. By default
            the argnums arguments are shared, and tensors in the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws new random numbers for every sample, "same" draws once for all samples, "error" forbids drawing.
        chunk_size: The most samples to run at a time: an integer; a size, such as "512 MiB", for as many as fit; "auto", for as many as
            fit in a quarter of the free memory; None for the whole batch.
        method: "auto" takes the first that can run fn of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample after
            another); a name forces that method. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function that takes fn's arguments for a batch. It returns the tree of the differentiated argument with a `psg.factors.Factor`,
        which stands for a tensor [n, *shape], at every leaf; with has_aux `(tree, aux)`. For the losses too, let fn return
        `(loss, loss)`.

    Raises:
        InputError: `fn` is not a function, or an option has a value that is not allowed. `help(psg.transforms)` has what every transform
            raises at a call.

    Example:
        >>> import torch, psg
        >>> model = torch.nn.Linear(3, 2)
        >>> loss, params = psg.stateless(model, torch.nn.functional.mse_loss)
        >>> g = psg.factored_grad(loss)(params, torch.randn(5, 3), torch.randn(5, 2))
        >>> g["weight"]
        Outer(n=5, shape=(2, 3), dtype=torch.float32)
        >>> psg.tree.gram(g).shape
        torch.Size([5, 5])

    Source: Goodfellow, "Efficient Per-Example Gradient Computations", 2015 (gradients as inputs and cotangents); Li, Tramer, Liang &
    Hashimoto, "Large Language Models Can Be Strong Differentially Private Learners", 2022 (sums over positions).
    """
    options = Options(argnums, in_dims, has_aux, randomness, chunk_size, method)
    return _transform("factored_grad", fn, options, "factors", _chunks.FactorCollector, _factors, _gradients)


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
    """Make a function that computes the sum of clipped per-sample gradients: sum_n min(1, C / |g_n|) g_n.

    Formal guarantee: with the built-in policies, and `bounded` ones, each sample's term has L2 norm at most `sensitivity`, up to rounding
    in the dtypes of the norms and of the gradients; a sample that is masked, or whose norm is not finite, adds exactly zero. Rounding is
    relative to the terms that a gradient sums (over positions, or rows of a table that one sample looks up twice), which are larger than
    the gradient where they cancel. Terms that exceed C a million times (in TF32 a thousand, of 16 bits a hundred times) and cancel leave
    rounding errors in the sum, where they may also hide what other samples add. `method="vmap"` and `"loop"` materialise each gradient
    before they scale it, and so does `plans.using(norm="keep")` for the weights of linear layers and convolutions, as far as its
    `keep_bytes` go.

    Args:
        fn: A pure function of one sample, `fn(params, *sample) -> scalar`.
        clip_norm: C, in the units of the gradient: a number or scalar tensor for the norm over all leaves; `psg.clipping.PerLeaf` or
            `psg.clipping.PerGroup` to clip leaves or groups of leaves separately. 0 gives a zero sum; inf, with the policy "clip", the
            plain sum.
        argnums: The index of the positional argument to differentiate, or a tuple of indices. The samples share these arguments unless
            in_dims says otherwise.
        policy: "clip", "automatic", "normalize" or a function (norms, clip_norm) -> clip_coef; see `psg.clipping`. The function must be
            elementwise in the norms: with chunks and buckets it is called on parts of a batch and on padding.
        in_dims: The batch dimension of each positional argument: an integer, None (shared by all samples) or a tree of these. By default
            the argnums arguments are shared, and tensors in the others are batched along dim 0.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different" draws new random numbers for every sample, "same" draws once for all samples, "error" forbids drawing.
        chunk_size: The most samples to run at a time: an integer; a size, such as "512 MiB", for as many as fit; "auto", for as many as
            fit in a quarter of the free memory; None for the whole batch.
        method: "auto" takes the first that can run fn of "capture" (rules and factors), "vmap" (`vmap(grad)`) and "loop" (one sample after
            another); a name forces that method. "batch" is for an fn of a whole batch, losses [n]: see `help(psg.transforms)`.

    Returns:
        A function that takes fn's arguments for a batch, and the keyword `mask`, booleans [n]: samples where it is False contribute
        exactly zero. It never reaches fn or a module: pass a mask of theirs by position, or bind it with functools.partial. The function
        returns a `ClippedGrad`. Rules materialise a parameter's per-sample gradients only where that is cheapest, and keep them for the
        sum only if they take at most `plans.using(keep_bytes=)`, 512 MiB by default.

    Raises:
        InputError: A clip norm is negative or NaN, or an option has a value that is not allowed. At a call: `mask` is not booleans [n], or
            fn, or the module of `stateless`, has an argument `mask` too, which is not given otherwise; the policy does not return [n]; the
            clip norm is inf and the policy, "automatic", "normalize" or `bounded`, cannot use that; a leaf has no group, or a group
            no leaf. `help(psg.transforms)` has what every transform raises.

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
    run = _chunk_by_chunk(options, _chunks.ClippedCollector)

    def clipped(call: Call, mask: Any) -> ClippedGrad:
        groups = groups_of(clip_norm, call.gradient_spec, chosen)
        _check_mask(mask, call.n)

        def reduce(call: Call, result: Result, start: int) -> ClippedSums:
            # A policy may close over a tensor that the caller differentiates.
            coefficients = functools.partial(call.outside.run, functools.partial(clipping.coefficients, chosen))
            own = None if mask is None else mask[start : start + len(result.values)]
            return clipped_sums(result.factors, groups, coefficients, own)

        found, values, aux = run(call, reduce)
        if mask is not None:
            values = torch.where(mask, values, 0)
        grads, coefs, group_norms = map(call.gradient_tree, found.by_leaf(groups))
        bound = sensitivity(groups, chosen)
        return ClippedGrad(grads, found.norms, coefs, values, aux, found.nonfinite, bound, group_norms)

    return _over_batches("clipped_grad", fn, options, "reductions", clipped, masked=True)


# Shared by the five transforms


class _Reduced(NamedTuple):
    """A whole batch, its chunks put together: the reduction, the losses, the auxiliary output."""

    reduced: Any
    values: Tensor
    aux: Any


_Reduce = Callable[[Call, Result, int], Any]
"""Reduces the result of one chunk, which begins at this sample."""


def _transform(
    name: str,
    fn: Callable[..., Any],
    options: Options,
    kept: Kept,
    collector: Callable[[int], Any],
    reduce: _Reduce,
    finish: Callable[[Call, _Reduced], Any],
) -> Callable[..., Any]:
    """The public function: it runs a call chunk by chunk, reduces each chunk, and makes the result of all reductions by `finish`."""
    run = _chunk_by_chunk(options, collector)
    return _over_batches(name, fn, options, kept, lambda call, mask: finish(call, run(call, reduce)))


def _chunk_by_chunk(options: Options, collector: Callable[[int], Any]) -> Callable[[Call, _Reduce], _Reduced]:
    """The function that runs a call chunk by chunk, reduces each chunk and collects the reductions."""
    sizes = _chunks.Sizes(options.chunk_size)

    def compute(reduce: _Reduce, call: Call, method: str) -> _Reduced:
        reduced, values, aux = collector(call.n), _chunks.RowCollector(call.n), _chunks.RowCollector(call.n)
        first: Any = None

        def collect(start: int, result: Result) -> None:
            nonlocal first
            reduced.add(start, reduce(call, result, start))
            values.add(start, [result.values])
            if call.has_aux:
                tree = _trees.flatten(result.aux)
                first = first or tree
                _trees.expect_same(first, tree, "aux", lead=1)
                aux.add(start, _trees.tensors_in(tree[0]))

        _chunks.run(call, method, sizes, collect)
        tree = None if first is None else _trees.unflatten(first[1], _trees.fill(first[0], aux.result()))
        return _Reduced(reduced.result(), values.result()[0], tree)

    def run(call: Call, reduce: _Reduce) -> _Reduced:
        return _differentiable.differentiable(functools.partial(compute, reduce), call, options.method)

    return run


def _over_batches(
    name: str,
    fn: Callable[..., Any],
    options: Options,
    kept: Kept,
    compute: Callable[[Call, Any], Any],
    masked: bool = False,
) -> Callable[..., Any]:
    """The public function: it prepares a call and gives it to `compute`, with the keyword `mask` if it is `masked`, else None."""
    expect_one_sample(f"psg.{name}", fn)
    label = f"{name}({getattr(fn, '__name__', type(fn).__name__)})"

    # The result has fn's name and docstring, but not its signature: it takes a batch.
    @functools.wraps(fn, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
    def transformed(*args: Any, **kwargs: Any) -> Any:
        mask = None
        if masked:
            mask = kwargs.pop(_PADDED) if _PADDED in kwargs else _pop_mask(fn, args, kwargs)
        own = _ambient.keep(fn)
        with _ambient.off():
            return compute(prepare(label, own, options, args, kwargs, kept=kept), mask)

    def pad(args: tuple[Any, ...], kwargs: dict[str, Any], size_for: Callable[[int], int]) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        own = prepare(label, fn, options, args, {})
        if own.n == 0:
            return args, kwargs, 0
        index = torch.arange(size_for(own.n), device=own.leaves[own.params[0]].device)
        source = index.clamp(max=own.n - 1)
        if masked:
            kwargs = dict(kwargs)
            mask = _pop_mask(fn, args, kwargs)
            _check_mask(mask, own.n)
            within = index < own.n
            kwargs[_PADDED] = within if mask is None else within & mask[source]
        if len(index) == own.n:
            return args, kwargs, own.n  # nothing to pad: no copy
        return _trees.unflatten(own.spec, own.take(source).leaves), kwargs, own.n

    del transformed.__wrapped__
    made = _ambient.untraced(transformed)
    mark(made, Batching(label, fn, pad))
    return made


def mark(made: Any, batching: Batching) -> None:
    """Note how a function that a transform has made takes its batch."""
    note(made, "batching", batching)


def batching_of(function: Any) -> Batching | None:
    """How a function that a transform has made takes its batch; None for every other."""
    return noted(function, "batching")


def expect_one_sample(name: str, fn: Any) -> None:
    """Refuse anything but a function of one sample.

    Raises:
        InputError: `fn` is no function, or a transform has made it.
    """
    if not callable(fn) or isinstance(fn, type):
        raise InputError(f"{name}: expected a function of one sample, fn(params, *sample), got {received(fn)}.")
    made = batching_of(fn)
    if made is not None:
        raise InputError(
            f"{name}: got psg.{made.name}, a function of a batch; expected the function of one sample that you gave to that transform."
        )


# The keyword under which `pad` passes its mask: not a Python identifier, so that no argument of fn can have this name.
_PADDED = "mask and padding"


def _pop_mask(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Remove clipped_grad's keyword `mask` from a call's and return it; InputError if fn has an argument `mask`, which may be meant."""
    if "mask" in kwargs and takes_keyword(fn, "mask", args):
        raise InputError(
            "clipped_grad: mask= says which samples count, but fn has an argument of that name too. Pass fn's by position, for a module "
            "also in a mapping, or bind it with functools.partial(fn, mask=...)."
        )
    return kwargs.pop("mask", None)


def _check_mask(mask: Any, n: int) -> None:
    clipping.check_mask("clipped_grad", mask, n, " It says which samples count, and does not reach fn: pass fn's own by position.")


def first_samples(result: Any, n: int) -> Any:
    """The result of a transform for the first n samples; sums as they are, to which masked padding adds zero."""
    if isinstance(result, ClippedGrad):
        rows = ("norms", "clip_coef", "values", "aux", "group_norms")
        return result._replace(**{name: first_samples(getattr(result, name), n) for name in rows})
    return _trees.map_tensors(lambda tensor: tensor[:n], result)


# How a transform reduces one chunk


def _materialize(call: Call, result: Result, start: int) -> list[Tensor]:
    leaves = [factor.materialize() for factor in result.factors]
    # Where fn uses only the sum of two parameters, they have one gradient: give each a tensor of its own.
    first: dict[int, int] = {}
    return [leaf if first.setdefault(id(leaf), i) == i else leaf.clone() for i, leaf in enumerate(leaves)]


def _factors(call: Call, result: Result, start: int) -> list[Factor]:
    return result.factors


def _norm(call: Call, result: Result, start: int) -> list[Tensor]:
    return [Joint(result.factors).norm]


# How a transform makes its result from the whole batch


def _gradients(call: Call, whole: _Reduced) -> Any:
    tree = call.gradient_tree(whole.reduced)
    return (tree, whole.aux) if call.has_aux else tree


def _values_and_gradients(call: Call, whole: _Reduced) -> Any:
    return ((whole.values, whole.aux) if call.has_aux else whole.values), call.gradient_tree(whole.reduced)


def _norms(call: Call, whole: _Reduced) -> Any:
    (norms,) = whole.reduced
    return (norms, whole.aux) if call.has_aux else norms
