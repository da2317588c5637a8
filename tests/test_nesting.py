"""psg inside psg, psg inside the function, torch.func inside the function: against loops over samples and plain vmap(grad)."""

import optree
import pytest
import torch
import torch.nn.functional as F
from agreement import two_layer_params
from cases import N, score
from differentiation import flat, gradients, live, reference_clipped, scalar, slopes, stacked, weigh
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import psg
from psg.testing import assert_trees_close, loop_grad, loop_value_and_grad

each_method = pytest.mark.parametrize("method", ["auto", "vmap", "loop"])


def net(p, x):
    return F.linear(F.linear(x, p["a"], p["c"]).tanh(), p["b"])


def loss(p, x):
    return score(net(p, x))


@pytest.fixture
def args(device):
    """Parameters, and N tasks of five support points and one query point each."""
    p = {name: leaf / 2 for name, leaf in two_layer_params(device).items()}
    return p, torch.randn(N, 5, 3, device=device), torch.randn(N, 3, device=device)


# --- psg inside the function --------------------------------------------------------------------------------


def step(p, direction):
    return {name: p[name] - 0.1 * direction[name] for name in p}


# What a task does with its support points: by psg, and by plain vmap(grad).
INNER = {
    "clipped step": (
        lambda p, support, **options: step(p, psg.clipped_grad(loss, 0.7, **options)(p, support).grads),
        lambda p, support: step(p, reference_clipped(loss, p, support, {"clip_norm": 0.7})[0]),
    ),
    "mean step": (
        lambda p, support, **options: step(p, {k: g.mean(0) for k, g in psg.per_sample_grad(loss, **options)(p, support).items()}),
        lambda p, support: step(p, {k: g.mean(0) for k, g in gradients(loss, p, support).items()}),
    ),
    "step weighed by norms": (
        lambda p, support, **options: step(
            p, psg.tree.weighted_sum(psg.factored_grad(loss, **options)(p, support), psg.per_sample_norm(loss, **options)(p, support))
        ),
        lambda p, support: step(
            p,
            {
                k: torch.einsum("n,n...->...", flat(gradients(loss, p, support)).norm(dim=1), g)
                for k, g in gradients(loss, p, support).items()
            },
        ),
    ),
}


def meta(inner):
    """A task's loss after two inner steps."""

    def fn(p, support, query):
        for _ in range(2):
            p = inner(p, support)
        return loss(p, query)

    return fn


@each_method
@pytest.mark.parametrize("name", INNER)
def test_maml(name, method, args):
    ours, theirs = INNER[name]
    values, found = psg.per_sample_value_and_grad(meta(ours), method=method)(*args)
    expected_values, expected = loop_value_and_grad(meta(theirs))(*args)
    assert_trees_close(values, expected_values)
    assert_trees_close(found, expected)


@pytest.mark.parametrize("inner_method", ["vmap", "loop"])
def test_maml_with_a_pinned_inner_method(inner_method, args):
    ours, theirs = INNER["clipped step"]
    found = psg.per_sample_grad(meta(lambda p, support: ours(p, support, method=inner_method)))(*args)
    assert_trees_close(found, loop_grad(meta(theirs))(*args))


def test_maml_runs_on_the_first_rung(args):
    report = psg.explain(meta(INNER["clipped step"][0]))(*args)
    assert report.rung == "capture", report.reasons


@pytest.mark.parametrize("name", INNER)
def test_maml_inside_a_transform(name, args):
    ours, theirs = (meta(inner) for inner in INNER[name])
    norms = psg.per_sample_norm(ours)
    reference = lambda p, *tasks: flat(vmap(grad(theirs), in_dims=(None, 0, 0))(p, *tasks)).norm(dim=1)  # noqa: E731
    assert_trees_close(grad(scalar(norms))(*args), grad(scalar(reference))(*args), per_sample=False)
    many = stacked(args[0])
    dims = (0, None, None)
    assert_trees_close(vmap(norms, dims)(many, *args[1:]), vmap(reference, dims)(many, *args[1:]), per_sample=False)


def test_maml_under_plain_autograd(args):
    ours, theirs = (meta(inner) for inner in INNER["clipped step"])
    p = live(args[0])
    out = psg.clipped_grad(ours, 0.5)(p, *args[1:]).grads
    expected = reference_clipped(lambda p, task: theirs(p, *task), p, args[1:], {"clip_norm": 0.5})[0]
    assert_trees_close(out, expected, per_sample=False)
    assert_trees_close(slopes(weigh(out), p), slopes(weigh(expected), p), per_sample=False)


@each_method
def test_a_penalty_on_norms_inside_the_function(method, args):
    def penalised(norms):
        return lambda p, support, query: loss(p, query) + (norms(p, support) - 1).square().mean()

    found = psg.per_sample_grad(penalised(psg.per_sample_norm(loss)), method=method)(*args)
    assert_trees_close(found, loop_grad(penalised(lambda p, x: flat(gradients(loss, p, x)).norm(dim=1)))(*args))


def test_three_deep(args):
    p, support, query = args

    def deep(norm):
        def middle(p, x):
            return (norm(loss)(p, x[None]).sum() * x[0]).sin()

        return lambda p, support, query: norm(middle)(p, support).square().sum() + loss(p, query)

    def reference(fn):
        return lambda p, x: flat(gradients(fn, p, x)).norm(dim=1)

    found = psg.per_sample_norm(deep(psg.per_sample_norm))(*args)
    assert_trees_close(found, flat(vmap(grad(deep(reference)), in_dims=(None, 0, 0))(*args)).norm(dim=1))


# --- torch.func inside the function -------------------------------------------------------------------------


def tangents(p):
    return {name: leaf.cos() for name, leaf in p.items()}


INSIDE = {
    "grad": lambda p, s, q: loss(step(p, grad(lambda p: loss(p, s))(p)), q),
    "grad of the data": lambda p, s, q: score(grad(loss, argnums=1)(p, q)),
    "grad of grad": lambda p, s, q: grad(lambda q: score(grad(loss, argnums=1)(p, q)))(q).square().sum(),
    "jvp": lambda p, s, q: score(jvp(lambda p: net(p, q), (p,), (tangents(p),))[1]),
    "jvp of the data": lambda p, s, q: score(jvp(lambda q: net(p, q), (q,), (q.sin(),))[1]),
    "vjp": lambda p, s, q: score(vjp(lambda q: net(p, q), q)[1](torch.ones(2, device=q.device))[0]),
    "hessian": lambda p, s, q: hessian(lambda q: loss(p, q))(q).diagonal().sum(),
    "jacrev": lambda p, s, q: score(jacrev(lambda q: net(p, q))(q)),
    "jacfwd": lambda p, s, q: score(jacfwd(lambda q: net(p, q))(q)),
    "jacrev of the parameters": lambda p, s, q: score(jacrev(net)(p, q)["a"]),
    "vmap": lambda p, s, q: vmap(lambda x: loss(p, x))(s).square().sum() + loss(p, q),
    "vmap of grad": lambda p, s, q: flat(vmap(grad(loss), in_dims=(None, 0))(p, s)).square().sum(1).sqrt().sum(),
}


@each_method
@pytest.mark.parametrize("name", INSIDE)
def test_torch_func_inside_the_function(name, method, args):
    fn = INSIDE[name]
    assert_trees_close(psg.per_sample_grad(fn, method=method)(*args), loop_grad(fn)(*args))


@pytest.mark.parametrize("name", INSIDE)
def test_torch_func_inside_and_outside(name, args):
    fn = INSIDE[name]
    p, support, query = args
    norms = psg.per_sample_norm(fn)
    reference = lambda p, s, q: flat(vmap(grad(fn), in_dims=(None, 0, 0))(p, s, q)).norm(dim=1)  # noqa: E731
    assert_trees_close(grad(scalar(norms))(*args), grad(scalar(reference))(*args), per_sample=False)
    live_p = live(p)
    expected = slopes(weigh(reference(live_p, support, query)), live_p)
    assert_trees_close(slopes(weigh(norms(live_p, support, query)), live_p), expected, per_sample=False)


@pytest.mark.parametrize("inner", [psg.per_sample_norm, psg.per_sample_grad, psg.clipped_grad])
def test_reshapes_inside_leave_no_history(inner, device):
    """The bookkeeping of the inner pass is no op of fn's: its tensors are not closed over by the outer one."""

    def squared(p, x):
        return (x @ p["w"].reshape(2, 2)).square().sum() + F.layer_norm(p["w"], (4,)).flatten()[0]

    def outer(p, x):
        options = {"clip_norm": 1.0} if inner is psg.clipped_grad else {}
        found = inner(squared, **options)(p, torch.stack([x, x.sin()]))
        return sum(leaf.square().sum() for leaf in optree.tree_leaves(getattr(found, "grads", found)))

    p, x = {"w": torch.rand(4, device=device)}, torch.randn(3, 5, 2, device=device)
    grads = psg.per_sample_grad(outer)(p, x)
    assert not grads["w"].requires_grad
    assert_trees_close(grads, loop_grad(outer)(p, x))
    psg.factored_grad(outer)(p, x)  # without a warning of a tensor that fn closes over


def test_group_norm_inside_runs_on_the_first_rung(device):
    def squared(p, x):
        return F.group_norm(F.conv1d(x[None], p["a"], padding=1), 2, p["w"], p["b"]).square().sum()

    def outer(p, x):
        return psg.per_sample_norm(squared)(p, torch.stack([x, x.sin()])).sum()

    p = {name: torch.randn(shape, device=device) for name, shape in {"a": (4, 2, 3), "w": (4,), "b": (4,)}.items()}
    x = torch.randn(3, 2, 4, device=device)
    assert_trees_close(psg.per_sample_grad(outer)(p, x), loop_grad(outer)(p, x))  # without a warning of a fallback
