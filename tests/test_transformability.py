"""psg's functions under torch.func's transforms and under plain autograd: right results, differentiable."""

import pytest
import torch
import torch.nn.functional as F
from cases import N, score
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import psg
from psg.testing import assert_trees_close, loop_grad
from psg.testing._loop import tree_map


def loss(p, x):
    return score(F.linear(F.linear(x, p["a"], p["c"]).tanh(), p["b"]))


def reference_gradients(p, x):
    return vmap(grad(loss), in_dims=(None, 0))(p, x)


def flat(tree):
    return torch.cat([tree[key].flatten(1) for key in sorted(tree)], 1)


def reference_clipped(p, x):
    grads = reference_gradients(p, x)
    coef = (0.8 / flat(grads).norm(dim=1)).clamp(max=1)
    return {key: torch.einsum("n,n...->...", coef, leaf) for key, leaf in grads.items()}


def reference_norms(p, x):
    return flat(reference_gradients(p, x)).norm(dim=1)


def reference_gram(p, x):
    rows = flat(reference_gradients(p, x))
    return rows @ rows.T


# Name -> (psg's function, the same by torch.func alone).
FUNCTIONS = {
    "per_sample_grad": (psg.per_sample_grad(loss), reference_gradients),
    "per_sample_value_and_grad": (
        psg.per_sample_value_and_grad(loss),
        lambda p, x: (vmap(loss, in_dims=(None, 0))(p, x), reference_gradients(p, x)),
    ),
    "per_sample_norm": (psg.per_sample_norm(loss), reference_norms),
    "gram": (lambda p, x: psg.tree.gram(psg.factored_grad(loss)(p, x)), reference_gram),
    "clipped_grad": (lambda p, x: psg.clipped_grad(loss, 0.8)(p, x).grads, reference_clipped),
    "in chunks": (psg.per_sample_grad(loss, chunk_size=2), reference_gradients),
    "method vmap": (psg.per_sample_grad(loss, method="vmap"), reference_gradients),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def weigh(out):
    """A scalar of a tree whose derivative is nowhere zero."""
    leaves = torch.utils._pytree.tree_leaves(out)
    return sum((leaf * torch.arange(1.0, leaf.numel() + 1, device=leaf.device).reshape(leaf.shape)).square().sum() for leaf in leaves)


@pytest.fixture
def args(device):
    p = {"a": torch.randn(4, 3), "b": torch.randn(2, 4), "c": torch.randn(4)}
    return tree_map(lambda leaf: leaf.to(device) / 2, p), torch.randn(N, 3, device=device)


def both(name, transform, *args):
    ours, theirs = FUNCTIONS[name]
    assert_trees_close(transform(ours)(*args), transform(theirs)(*args), name=name, per_sample=False)


@each_function
def test_plain(name, args):
    both(name, lambda f: f, *args)


@each_function
def test_grad(name, args):
    both(name, lambda f: grad(lambda p, x: weigh(f(p, x))), *args)


@each_function
def test_grad_for_the_batch(name, args):
    both(name, lambda f: grad(lambda p, x: weigh(f(p, x)), argnums=1), *args)


@each_function
def test_grad_of_grad(name, args):
    both(name, lambda f: grad(lambda p, x: weigh(grad(lambda p, x: weigh(f(p, x)))(p, x))), *args)


@each_function
def test_vmap_over_parameters(name, args):
    params, x = args
    many = tree_map(lambda leaf: torch.stack([leaf, -leaf, 2 * leaf, leaf.cos()]), params)
    both(name, lambda f: vmap(f, in_dims=(0, None)), many, x)


@each_function
def test_vmap_over_batches(name, args):
    params, x = args
    both(name, lambda f: vmap(f, in_dims=(None, 1)), params, torch.stack([x, x.sin(), -x], 1))


@each_function
def test_vmap_of_grad(name, args):
    params, x = args
    both(name, lambda f: vmap(grad(lambda p, x: weigh(f(p, x))), in_dims=(None, 0)), params, torch.stack([x, x.sin()]))


@each_function
def test_jvp(name, args):
    params, x = args
    tangents = tree_map(torch.cos, params), x.sin()
    both(name, lambda f: lambda p, x: jvp(f, (p, x), tangents), *args)


@each_function
def test_vjp(name, args):
    def transform(f):
        def pulled(p, x):
            out, pull_back = vjp(f, p, x)
            return pull_back(torch.utils._pytree.tree_map(torch.cos, out))

        return pulled

    both(name, transform, *args)


@each_function
def test_jacrev(name, args):
    both(name, lambda f: jacrev(lambda p, x: weigh(f(p, x)), argnums=(0, 1)), *args)


@each_function
def test_jacfwd(name, args):
    both(name, lambda f: jacfwd(f, argnums=1), *args)


@each_function
def test_hessian(name, args):
    both(name, lambda f: hessian(lambda p, x: weigh(f(p, x)), argnums=1), *args)


@each_function
@pytest.mark.parametrize("wanted", ["params", "batch", "both"])
def test_backward(name, wanted, args):
    """Plain autograd: inputs that require grad, `.backward()`."""

    def transform(f):
        def backward(p, x):
            p = tree_map(lambda leaf: leaf.clone().requires_grad_(wanted != "batch"), p)
            x = x.clone().requires_grad_(wanted != "params")
            weigh(f(p, x)).backward()
            return [leaf.grad for leaf in (*p.values(), x) if leaf.requires_grad]

        return backward

    both(name, transform, *args)


@each_function
def test_double_backward(name, args):
    def transform(f):
        def twice(p, x):
            x = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(weigh(f(p, x)), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)

        return twice

    both(name, transform, *args)


@each_function
def test_history_is_there_exactly_if_an_input_requires_grad(name, args):
    params, x = args
    ours, _ = FUNCTIONS[name]

    def history(out):
        return {leaf.requires_grad for leaf in torch.utils._pytree.tree_leaves(out)}

    assert history(ours(params, x)) == {False}
    assert history(ours(params, x.clone().requires_grad_())) == {True}
    with torch.no_grad():
        assert history(ours(params, x.clone().requires_grad_())) == {False}


def test_gradcheck(args):
    """Against finite differences, so against neither psg nor torch.func."""
    params, x = args
    if x.dtype != torch.float64:
        pytest.skip("finite differences need float64")
    inputs = [leaf.clone().requires_grad_() for leaf in (*params.values(), x)]

    def norms(a, b, c, x):
        return psg.per_sample_norm(loss)({"a": a, "b": b, "c": c}, x)

    assert torch.autograd.gradcheck(norms, inputs)
    assert torch.autograd.gradgradcheck(norms, inputs)


def test_gradient_penalty_trains(args):
    """The use: a loss that contains per-sample gradient norms, in a training step."""
    params, x = args
    live = {name: torch.nn.Parameter(p) for name, p in params.items()}
    penalty = (psg.per_sample_norm(loss)(live, x) - 1).square().mean()
    penalty.backward()
    expected = grad(lambda p: (flat(reference_gradients(p, x)).norm(dim=1) - 1).square().mean())(params)
    assert_trees_close({name: p.grad for name, p in live.items()}, expected, per_sample=False)


def test_a_zero_gradient_has_a_finite_derivative(device):
    # The norm has no derivative at zero; the subgradient taken there is zero, and not NaN.
    w = torch.zeros(3, device=device, requires_grad=True)
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], device=device)
    psg.per_sample_norm(lambda w, x: (w * x).sum() ** 2)(w, x).sum().backward()
    assert w.grad.isfinite().all()


def test_the_transform_of_a_function_that_falls(args):
    """Inside a transform the reference composition runs, and a function that it cannot run is an error."""
    params, x = args
    asks = lambda p, x: loss(p, x) if x.sum().item() > 0 else 2 * loss(p, x)  # noqa: E731
    with pytest.raises(RuntimeError, match="item|data-dependent"):
        grad(lambda p: psg.per_sample_norm(asks)(p, x).sum())(params)


def test_the_clip_coefficient_is_differentiated_too(args):
    params, x = args
    both("clipped_grad", lambda f: jacrev(lambda s: f(params, s * x)["b"]), torch.tensor(1.3, device=x.device))


def test_random_functions_replay_their_draw(device):
    # The derivative must be that of the values that came out: the masks of forward and backward are the same.
    w = torch.ones(32, device=device, requires_grad=True)
    x = torch.ones(4, 32, device=device)
    grads = psg.per_sample_grad(lambda w, x: (F.dropout(w * x, 0.5) ** 2).sum() / 2)(w, x)
    (slope,) = torch.autograd.grad(grads.sum(), w)
    assert_trees_close(slope, grads.detach().sum(0), per_sample=False)


def test_grads_are_right_under_an_outer_grad_s_level(args):
    # Values computed inside a transform from tensors it does not see keep being plain.
    params, x = args
    expected = loop_grad(loss)(params, x)

    def outer(s):
        inner = psg.per_sample_grad(loss)(params, x)
        assert_trees_close(inner, expected)
        return s**2

    assert grad(outer)(torch.tensor(3.0, device=x.device)).item() == 6.0
