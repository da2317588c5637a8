"""The comparison that most tests use: psg against the loop over samples, operation by operation."""

import warnings
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from cases import N, Problem, score

import psg
from psg._call import Options
from psg._trees import flatten, unflatten
from psg.testing import (
    assert_reductions_close,
    assert_trees_close,
    loop_value_and_grad,
    reference_clipped_sum,
    reference_flat,
    reference_norm,
)
from psg.testing._loop import Batch, tree_map


def summed(actual, expected, name):
    assert_trees_close(actual, expected, name=name, per_sample=False)


def floor(tree) -> float:
    """The absolute tolerance, for entries that are exactly zero: 1000 eps, times the largest entry if that exceeds 1."""
    flat = reference_flat(tree)
    largest = flat[flat.isfinite()].abs().max().item() if flat.isfinite().any() else 0.0
    return 1000 * torch.finfo(flat.dtype).eps * max(1.0, largest)


def assert_agrees(problem: Problem, *, rules: bool = True, may_fall: str = "", **options) -> None:
    """Values, materialised gradients, norm, weighted_sum, dot, gram and clipped_grad equal the loop's.

    `may_fall` is the reason why some of the drawn problems fall back to a lower rung; without it a fallback is an error.
    """
    fn, args, shared, own = problem
    loop = {key: own[key] for key in ("argnums", "in_dims", "has_aux") if key in own}
    options = {**own, **options}
    values, expected = loop_value_and_grad(fn, **loop)(*args, **shared)
    atol = floor(expected)
    norms = reference_norm(expected)
    clip_norm = norms.median().item() if len(norms) else 1.0  # clips some samples and not others

    def alone(result):
        return result[0] if options.get("has_aux") else result

    with nullcontext() if rules else psg.rules.disabled(), warnings.catch_warnings():
        if may_fall:
            warnings.simplefilter("ignore", psg.FallbackWarning)
        found_values, found = psg.per_sample_value_and_grad(fn, **options)(*args, **shared)
        assert_trees_close(found_values, values, atol=floor(values), name="values")
        assert_trees_close(found, expected, atol=atol, name="grads")
        factored = alone(psg.factored_grad(fn, **options)(*args, **shared))
        assert_trees_close(psg.tree.materialize(factored), expected, atol=atol, name="materialize")
        assert_reductions_close(factored, expected, atol=atol)
        assert_trees_close(alone(psg.per_sample_norm(fn, **options)(*args, **shared)), norms, atol=atol, name="per_sample_norm")
        out = psg.clipped_grad(fn, clip_norm, **options)(*args, **shared)
        clipped = reference_clipped_sum(expected, clip_norm)
        assert_trees_close(out.grads, clipped, atol=len(norms) * atol, name="clipped_grad.grads", per_sample=False)
        assert_trees_close(out.norms, norms, atol=atol, name="clipped_grad.norms")


def assert_derivatives_agree(problem: Problem) -> None:
    """Derivatives of the fast path's results, for all that they depend on: by torch.func.grad, by backward(), and of a member under vmap.

    They equal those that plain autograd takes of the loop's.
    """
    fn, args, shared, own = problem
    leaves, spec = flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    given = [leaves[i].detach().clone() for i in places]

    def results(method, *tensors):
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        own_args = unflatten(spec, filled)
        norms = psg.per_sample_norm(fn, method=method, **own)(*own_args, **shared)
        grads = psg.per_sample_grad(fn, method=method, **own)(*own_args, **shared)
        clipped = psg.clipped_grad(fn, 0.5, method=method, **own)(*own_args, **shared)
        return [norms, *flatten(grads)[0], *flatten(clipped.grads)[0], clipped.values]

    def score_of(method):
        return lambda *tensors: sum((own * own.sin()).sum() for own in results(method, *tensors))

    def slopes(method):
        tensors = [own.clone().requires_grad_() for own in given]
        return torch.autograd.grad(score_of(method)(*tensors), tensors, allow_unused=True, materialize_grads=True)

    expected, atol = slopes("loop"), 1e4 * torch.finfo(given[0].dtype).eps
    assert_trees_close(slopes("auto"), expected, atol=atol, name="backward", per_sample=False)
    by_transform = torch.func.grad(score_of("capture"), argnums=tuple(range(len(given))))
    assert_trees_close(by_transform(*given), expected, atol=atol, name="torch.func.grad", per_sample=False)
    members = torch.func.vmap(by_transform)(*(torch.stack([own, own]) for own in given))
    assert_trees_close(tuple(own[1] for own in members), expected, atol=atol, name="vmap", per_sample=False)


def is_right_under_vmap(fn, w, *samples, expected) -> bool:
    """Whether psg runs fn under a vmap over the samples, where it gets each alone: what it computes must equal what is expected."""
    each = torch.func.vmap(lambda *own: psg.per_sample_grad(fn)(w, *(sample[None] for sample in own)))
    try:
        found = each(*samples)
    except (psg.PsgError, RuntimeError):  # psg's error, or torch's
        return False
    assert_trees_close(found[:, 0], expected, name="under vmap")
    return True


def cut(problem: Problem) -> Batch:
    return Batch(problem.fn, problem.args, Options(problem.options.get("argnums", 0), problem.options.get("in_dims")))


def samples(problem: Problem, index: list[int]) -> Problem:
    """The same problem on the samples at `index`."""
    batch = cut(problem)

    def take(leaf, dim):
        return leaf if dim is None else leaf.index_select(dim, torch.tensor(index, dtype=torch.int64, device=leaf.device))

    return problem._replace(args=tuple(unflatten(batch.spec, [take(leaf, dim) for leaf, dim in batch.pairs()])))


def on(problem: Problem, device) -> Problem:
    """The same problem on another device."""
    return problem._replace(args=tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, problem.args))


def linear_loss(p, x):
    """A small loss, for tests to which the function does not matter."""
    return score(F.linear(x, p["w"], p["b"]))


def linear_args(device, n=N):
    """Parameters and a batch for `linear_loss`."""
    p = {"w": torch.randn(4, 3, device=device), "b": torch.randn(4, device=device)}
    return p, torch.randn(n, 5, 3, device=device)


def two_layer_loss(p, x):
    """The loss of a small network, for tests to which the function does not matter."""
    return score(F.linear(F.linear(x, p["a"], p["c"]).tanh(), p["b"]))


def two_layer_params(device):
    """Parameters for `two_layer_loss`, which takes samples of three features."""
    shapes = {"a": (4, 3), "b": (2, 4), "c": (4,)}
    return {name: torch.randn(shape, device=device) for name, shape in shapes.items()}


def rows_loss(p, x):
    """A loss whose gradient at sample n is x[n] itself, so that norms can be chosen."""
    return (p * x).sum()


def rows(*norms, device="cpu"):
    """A batch of rows with these norms, and a parameter for `rows_loss`."""
    return torch.tensor([[norm, 0.0] for norm in norms], device=device), torch.zeros(2, device=device)
