"""psg's functions under torch.func's transforms and under plain autograd: right results, differentiable.

One table: outer transform x psg function x how the parameters are used. Every entry is compared with the same composition over plain
`vmap(grad)`, differentiated for everything at once: parameters, data, the direction, the weights, the clip norm.
"""

import zlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cases import N, score
from conftest import as_large
from differentiation import FUNCTIONS, live, scalar, slopes, stacked, weigh
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from tracing import one_mode

import psg
from psg.factors import Conv, Geometry, Outer, Rows, Sum, _base
from psg.testing import assert_trees_close, loop_grad

# How parameters are used: name -> (function of one sample, shapes of the parameters, the use that `psg.explain` reports).
KINDS = {
    "ruled": (
        lambda p, x: score(F.linear(F.linear(x, p["a"], p["c"]).tanh(), p["b"])),
        {"a": (3, 2), "b": (2, 3), "c": (3,)},
        "rule",
    ),
    "lifted": (
        lambda p, x: score(torch.hypot(p["a"], x) * torch.atan2(x, p["b"])),
        {"a": (3, 2), "b": (2,)},
        "lifted",
    ),
    "tied": (
        lambda p, x: score(F.linear(F.linear(x, p["a"], p["b"]).tanh(), p["a"])),
        {"a": (2, 2), "b": (2,)},
        "rule",
    ),
    "derived": (
        lambda p, x: score(F.linear(x, p["a"] * p["g"].exp() + p["l"] @ p["r"])),
        {"a": (3, 2), "g": (3, 1), "l": (3, 1), "r": (1, 2)},
        "derived",
    ),
}


def arguments(kind, device="cpu"):
    """(params, data, the rest): everything that can be differentiated."""
    params = {name: torch.randn(shape, device=device) for name, shape in KINDS[kind][1].items()}
    rest = {
        "direction": {name: torch.randn_like(p) for name, p in params.items()},
        "weights": torch.randn(N, device=device),
        "clip_norm": torch.tensor(1.3, device=device),
    }
    return params, torch.randn(N, 2, device=device), rest


# Outer transforms: each maps a function of (params, data, rest) to the function whose results are compared.

ALL = (0, 1, 2)


def directions(args):
    return tree_map(torch.cos, args)


def jvp_of(f):
    return lambda *args: jvp(f, args, directions(args))


def vjp_of(f):
    def pulled(*args):
        out, pull_back = vjp(f, *args)
        return pull_back(directions(out))

    return pulled


def linearize_of(f):
    def linear(*args):
        with one_mode():
            out, push = linearize(f, *args)
        return out, push(*directions(args))

    return linear


def second(f):
    """The gradient of the gradient of a scalar, for everything and everything."""
    return grad(scalar(grad(scalar(f), argnums=ALL)), argnums=ALL)


def backward(f):
    def call(*args):
        args = live(args)
        return slopes(weigh(f(*args)), args)

    return call


def double_backward(f):
    def call(*args):
        args = live(args)
        return slopes(weigh(slopes(weigh(f(*args)), args, create_graph=True)), args)

    return call


def batched_backward(f):
    def call(*args):
        args = live(args)
        out = f(*args)
        cotangents = [stacked(leaf.detach().cos()) for leaf in tree_leaves(out)]
        return slopes(tree_leaves(out), args, grad_outputs=cotangents, is_grads_batched=True)

    return call


def backward_of_vmap(f):
    def call(*args):
        args = live(args)
        return slopes(weigh(vmap(f, in_dims=(0, None, None))(stacked(args[0]), *args[1:])), args)

    return call


def forward_mode(f):
    def call(*args):
        with forward_ad.dual_level():
            leaves, spec = tree_flatten(args)
            duals = [forward_ad.make_dual(leaf, leaf.cos()) for leaf in leaves]
            return [forward_ad.unpack_dual(leaf).tangent for leaf in tree_leaves(f(*tree_unflatten(duals, spec)))]

    return call


OUTER = {
    "alone": lambda f: f,
    "grad": lambda f: grad(scalar(f), argnums=ALL),
    "grad of grad": second,
    "vmap over parameters": lambda f: lambda p, *rest: vmap(f, in_dims=(0, None, None))(stacked(p), *rest),
    "vmap over batches": lambda f: lambda p, x, rest: vmap(f, in_dims=(None, 1, None))(p, stacked(x).transpose(0, 1), rest),
    "vmap of grad": lambda f: lambda p, *rest: vmap(grad(scalar(f), argnums=ALL), in_dims=(0, None, None))(stacked(p), *rest),
    "vmap of vmap": lambda f: lambda *args: vmap(vmap(f, in_dims=(0, None, None)), in_dims=(None, 0, 0))(*stacked(args)),
    "jvp": jvp_of,
    "jvp of grad": lambda f: jvp_of(grad(scalar(f), argnums=ALL)),
    "vjp": vjp_of,
    "jacrev": lambda f: jacrev(f, argnums=ALL),
    "jacfwd": lambda f: jacfwd(f, argnums=ALL),
    "hessian": lambda f: hessian(scalar(f), argnums=1),
    "linearize": linearize_of,
    "functionalize": functionalize,
    "backward": backward,
    "double backward": double_backward,
    "batched backward": batched_backward,
    "backward of vmap": backward_of_vmap,
    "forward-mode autograd": forward_mode,
}


# Inside a transform all kinds run the same way: of each pair two kinds run, and of linearize, which is slow since it traces, one.
PLAIN = ("alone", "functionalize", "backward", "double backward", "batched backward", "backward of vmap", "forward-mode autograd")
REFERENCE = {**OUTER, "linearize": jvp_of}  # linearize gives what jvp should give


def kinds_of(outer, name):
    if outer in PLAIN:
        return KINDS
    first, *others = KINDS
    return [first] if outer == "linearize" else [first, others[zlib.crc32(f"{outer} {name}".encode()) % len(others)]]


TABLE = [(outer, name, kind) for outer in OUTER for name in FUNCTIONS for kind in kinds_of(outer, name)]


@pytest.mark.parametrize("outer, name, kind", TABLE)
def test_equals_the_composition_over_vmap_grad(outer, name, kind, device):
    fn, args = KINDS[kind][0], arguments(kind, device)
    ours, theirs = FUNCTIONS[name]
    expected = REFERENCE[outer](lambda p, x, rest: theirs(fn, p, x, rest))(*args)
    assert_trees_close(OUTER[outer](ours(fn))(*args), expected, name=name, per_sample=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kinds_are_what_they_are_called(kind, monkeypatch):
    as_large(monkeypatch)  # small weights run without rules from the second call on
    fn, shapes, way = KINDS[kind]
    p, x, _ = arguments(kind)
    report = psg.explain(fn)(p, x)
    uses = [leaf.uses for leaf in report.leaves]
    assert report.rung == "capture" and len(uses) == len(shapes)
    if kind == "tied":
        assert uses[0] == {"linear: rule": 2}
    else:
        assert all(use.endswith(f": {way}") or kind == "derived" and use == "linear: rule" for own in uses for use in own)
        assert all(any(use.endswith(f": {way}") for use in own) for own in uses)


def test_values_inside_a_transform_that_does_not_see_them_are_plain(device):
    fn, (params, x, _) = KINDS["ruled"][0], arguments("ruled", device)
    expected = loop_grad(fn)(params, x)

    def outer(s):
        assert_trees_close(psg.per_sample_grad(fn)(params, x), expected)
        return s**2

    assert grad(outer)(torch.tensor(3.0, device=device)).item() == 6.0


def test_an_ensemble_is_its_members(device):
    fn, (params, x, _) = KINDS["ruled"][0], arguments("ruled", device)
    many = stacked(params)
    together = vmap(lambda p, x: psg.clipped_grad(fn, 0.8)(p, x)[:2], in_dims=(0, None))(many, x)
    for i in range(3):
        alone = psg.clipped_grad(fn, 0.8)({name: p[i] for name, p in many.items()}, x)
        assert_trees_close(tree_map(lambda leaf, i=i: leaf[i], together), alone[:2], per_sample=False)


INSIDE = {
    "vmap": lambda f, p: vmap(f)(stacked(p)),
    "vmap of grad": lambda f, p: vmap(grad(lambda own: f(own).sum()))(stacked(p)),
    "grad of grad": lambda f, p: grad(lambda own: weigh(grad(lambda own: f(own).sum())(own)))(p),
    "jvp": lambda f, p: jvp(f, (p,), (p,))[1],
    "jacrev": lambda f, p: jacrev(f)(p),
    "hessian": lambda f, p: hessian(lambda own: f(own).sum())(p),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_path_runs_inside_of_transforms(kind, inside, device):
    fn, (params, x, _) = KINDS[kind][0], arguments(kind, device)

    def found(method):
        return INSIDE[inside](lambda p: psg.per_sample_norm(fn, method=method)(p, x), params)

    assert_trees_close(found("capture"), found("vmap"), per_sample=False)


# Factors that a user makes of tensors that are differentiated.

FACTORS = {
    "outer": lambda: Outer(torch.randn(N, 3, 4), torch.randn(N, 3, 2)),
    "outer of one position": lambda: Outer(torch.randn(N, 1, 4), torch.randn(N, 1, 2)),
    "outer of many positions": lambda: Outer(torch.randn(N, 40, 2), torch.randn(N, 40, 2)),
    "rows": lambda: Rows(torch.tensor([[0, 1, 1], [2, 2, 2], [3, 0, 1]]), torch.randn(N, 3, 2), 4),
    "conv": lambda: Conv(torch.randn(N, 1, 2, 3), torch.randn(N, 1, 2, 4), Geometry((2,), (1,), (0,), (1,), 2)),
    "sum": lambda: Sum(
        [Outer(torch.randn(N, 3, 4), torch.randn(N, 3, 2)), Outer(torch.randn(N, 2, 4), torch.randn(N, 2, 2))],
        torch.empty(N, 0),
        torch.Size([4, 2]),
    ),
}


def moments_of_large(g):
    """As for gradients of many entries, a sample at a time."""
    with mock.patch.object(_base, "_LARGE", 0), mock.patch.object(psg._hardware._machine, "chunk_bytes", lambda device: 0):
        return psg.tree.moments(g)


REDUCTIONS = {
    "norm": lambda g, w: psg.tree.norm(g),
    "squared_norm": lambda g, w: psg.tree.squared_norm(g),
    "weighted_sum": lambda g, w: psg.tree.weighted_sum(g, w),
    "dot": lambda g, w: psg.tree.dot(g, psg.tree.weighted_sum(g, w)),
    "inner": lambda g, w: psg.tree.inner(g, psg.tree.take(g, [1, 2, 0])),
    "gram": lambda g, w: psg.tree.gram(g),
    "cosine": lambda g, w: psg.tree.cosine(g),
    "moments": lambda g, w: psg.tree.moments(g).second,
    "moments of large gradients": lambda g, w: moments_of_large(g).second,
    "project": lambda g, w: psg.tree.project(g, 2),  # so few dimensions that every factor uses its own algorithm
}


@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("outer", ["grad", "grad of grad", "jvp", "vmap", "double backward"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_of_factors_equal_those_of_tensors(reduction, outer, kind, device):
    leaves, spec = tree_flatten({"leaf": tree_map(lambda t: t.to(device), FACTORS[kind]())})
    floating = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point()]
    reduce = REDUCTIONS[reduction]

    def of_factors(values, weights):
        whole = list(leaves)
        for i, value in zip(floating, values, strict=True):
            whole[i] = value
        return reduce(tree_unflatten(whole, spec), weights)

    def of_tensors(values, weights):
        whole = list(leaves)
        for i, value in zip(floating, values, strict=True):
            whole[i] = value
        return reduce(psg.tree.materialize(tree_unflatten(whole, spec)), weights)

    transform = {
        "grad": lambda f: grad(scalar(f), argnums=(0, 1)),
        "grad of grad": lambda f: grad(scalar(grad(scalar(f), argnums=(0, 1))), argnums=(0, 1)),
        "jvp": jvp_of,
        "vmap": lambda f: lambda *args: vmap(f)(*stacked(args)),
        "double backward": double_backward,
    }[outer]
    args = [leaves[i] for i in floating], torch.randn(N, device=device)
    assert_trees_close(transform(of_factors)(*args), transform(of_tensors)(*args), per_sample=False)


SCALE = torch.tensor(1.5, requires_grad=True)


def by_product(w, x):
    return (SCALE * (w @ x)).tanh().square().sum()


RESULTS = {
    "values": lambda method: lambda w, x: psg.per_sample_value_and_grad(by_product, method=method)(w, x)[0],
    "gradients": lambda method: psg.per_sample_grad(by_product, method=method),
    "norms": lambda method: psg.per_sample_norm(by_product, method=method),
    "clipped": lambda method: lambda w, x: psg.clipped_grad(by_product, 0.3, method=method)(w, x).grads,
}
AROUND = {
    "vmap over models": lambda f, w, x: torch.func.vmap(f, (0, None))(torch.stack([w, 2 * w]), x),
    "vmap over batches": lambda f, w, x: torch.func.vmap(f, (None, 0))(w, torch.stack([x, 2 * x])),
    "two of them": lambda f, w, x: torch.func.vmap(torch.func.vmap(f, (0, None)), (None, 0))(
        torch.stack([w, 2 * w]), torch.stack([x, x + 1])
    ),
    "tangents": lambda f, w, x: torch.func.jvp(lambda w: f(w, x), (w,), (w.sin(),)),
    "a derivative": lambda f, w, x: torch.func.grad(lambda w: f(w, x).square().sum())(w),
    "a Jacobian": lambda f, w, x: torch.func.jacrev(f)(w, x),
}


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("around", AROUND)
def test_autograd_that_is_off_around_a_transform(around, result, method, off, device):
    """Transforms differentiate all the same, and what they return has no history."""
    with off():
        if torch.func.grad(torch.sin)(torch.zeros((), device=device)) == 0:
            pytest.skip("torch's own transforms differentiate nothing in inference mode (2.11)")
    w, x = torch.randn(2, 3, device=device, requires_grad=True), torch.randn(4, 3, device=device)
    function = RESULTS[result](method)
    expected = AROUND[around](function, w.detach(), x)
    with off():
        found = AROUND[around](function, w, x)
    assert_trees_close(found, expected, per_sample=False)
    for tensor in found if isinstance(found, tuple) else (found,):
        assert not tensor.requires_grad and tensor.abs().max() > 0
