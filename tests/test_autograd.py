"""psg's functions under plain autograd: what has a history, what is differentiated, and what a zero gradient does."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from agreement import two_layer_loss as fn
from agreement import two_layer_params
from cases import N, score
from conftest import as_large
from differentiation import FUNCTIONS, Times, flat, gradients, live, reference_clipped, slopes, weigh
from torch import nn
from torch.func import grad, hessian, jacfwd, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import psg
from psg.testing import assert_trees_close


@pytest.fixture
def args(device):
    p = two_layer_params(device)
    rest = {"direction": tree_map(torch.randn_like, p), "weights": torch.randn(N), "clip_norm": torch.tensor(1.3)}
    return tree_map(lambda leaf: leaf.to(device) / 2, (p, torch.randn(N, 3), rest))


each_function = pytest.mark.parametrize("name", FUNCTIONS)
each_method = pytest.mark.parametrize("method", ["auto", "vmap", "loop"])


# --- what is differentiated ---------------------------------------------------------------------------------


@each_function
@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["params", "batch", "rest"])
def test_backward_for_some_arguments(name, wanted, args):
    ours, theirs = FUNCTIONS[name]

    def backward(f):
        own = list(args)
        own[wanted] = live(own[wanted])
        value = weigh(f(*own))
        return slopes(value, own[wanted]) if value.requires_grad else None

    assert_trees_close(backward(ours(fn)), backward(lambda p, x, rest: theirs(fn, p, x, rest)), name=name, per_sample=False)


@each_function
def test_history_is_there_exactly_if_an_input_requires_grad(name, args):
    ours = FUNCTIONS[name][0](fn)
    params, x, rest = args

    def history(out):
        return {leaf.requires_grad for leaf in tree_leaves(out)}

    assert history(ours(*args)) == {False}
    assert history(ours(params, live(x), rest)) == {True}
    assert history(ours(live(params), x, rest)) == {True}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert history(ours(live(params), x, rest)) == {False}


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize("part", ["parameter", "data", "activation"])
def test_what_is_closed_over(method, part, args):
    """A closed-over tensor is an input like any other: here a leaf, and a tensor that was computed from it."""
    params, x, _ = args

    def penalty(norm):
        first = torch.full((3,), 0.7, device=x.device, requires_grad=True)
        second = first.sin().mul(2)

        def fn(p, x):
            if part == "parameter":
                return score(F.linear(x, p["a"] * second * first, p["c"]))
            if part == "data":
                return score(F.linear(x * second + first, p["a"], p["c"]))
            return score(F.linear(x, p["a"], p["c"]).tanh()) * (first * second).sum()

        (slope,) = torch.autograd.grad(weigh(norm(fn)(params, x)), first, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), first)
        return slope, curve

    ours = penalty(lambda fn: psg.per_sample_norm(fn, method=method))
    expected = penalty(lambda fn: lambda p, x: flat(gradients(fn, p, x)).norm(dim=1))
    assert_trees_close(ours, expected, per_sample=False)


@each_method
def test_keyword_arguments_are_differentiated(method, args):
    params, x, _ = args
    scale = torch.tensor(1.7, device=x.device, requires_grad=True)

    def scaled(p, x, scale):
        return fn(p, scale * x)

    out = psg.clipped_grad(scaled, 0.5, method=method)(params, x, scale=scale)
    expected = reference_clipped(lambda p, x: scaled(p, x, scale), params, x, {"clip_norm": 0.5})
    assert_trees_close(slopes(weigh(out.grads), scale), slopes(weigh(expected[0]), scale), per_sample=False)


def test_a_batch_function_closes_over_too(args):
    params, x, _ = args
    scale = torch.tensor(1.7, device=x.device, requires_grad=True)

    def losses(p, x):
        y = F.linear(scale * x, p["a"], p["c"])
        return (y * (y + 1).sin()).sum(1)

    norms = psg.per_sample_norm(losses, method="batch")(params, x)
    expected = psg.per_sample_norm(lambda p, x: losses(p, x[None])[0], method="vmap")(params, x)
    assert_trees_close(norms, expected)
    assert_trees_close(slopes(norms.sum(), scale), slopes(expected.sum(), scale), per_sample=False)


def test_a_live_backbone_is_differentiated_where_it_is_used(args):
    params, x, _ = args
    backbone = torch.nn.Linear(3, 3, device=x.device)

    def features(p, x):
        return fn(p, backbone(x))

    norms = psg.per_sample_norm(features)(params, x)
    expected = flat(gradients(features, params, x)).norm(dim=1)
    assert_trees_close(norms, expected)
    ours, theirs = (slopes(out.sum(), list(backbone.parameters()), retain_graph=True) for out in (norms, expected))
    assert_trees_close(ours, theirs, per_sample=False)
    factored = psg.factored_grad(features)(params, x)
    assert type(factored["a"]).__name__ == "Outer"
    assert_trees_close(
        slopes(psg.tree.norm(factored).sum(), list(backbone.parameters())),
        slopes(expected.sum(), list(backbone.parameters())),
        per_sample=False,
    )
    backbone.requires_grad_(False)
    assert not psg.per_sample_norm(features)(params, x).requires_grad
    assert type(psg.factored_grad(features)(params, x)["a"]).__name__ == "Outer"


def own_gradient(p, x):
    with torch.enable_grad():
        (g,) = torch.autograd.grad(fn(p, x), p["a"], create_graph=True)
    return g.square().sum()


def test_live_parameters_that_cost_the_fast_path_are_warned_of(args):
    """Where the history must come from the pass that gives the result, a pass that can have none is not enough."""
    params, x, _ = args
    psg.factored_grad(own_gradient)(params, x)
    with torch.no_grad():
        psg.factored_grad(own_gradient)(live(params), x)
    psg.factored_grad(own_gradient, method="loop")(live(params), x)
    with pytest.warns(psg.FallbackWarning, match=r"fn calls torch.autograd.grad.*has a derivative") as caught:
        psg.factored_grad(own_gradient)(live(params), x)
    assert caught[0].filename == __file__
    psg.per_sample_norm(own_gradient)(live(params), x).sum().backward()  # nobody is told of what a backward pass runs


def test_a_function_that_differentiated_itself_in_its_last_call(args, monkeypatch):
    """Once rules still ran in the way that fn's own derivatives need, where their outputs have no history for the parameters."""
    as_large(monkeypatch)
    params, x, _ = args

    def may_differentiate_itself(p, x, *, itself):
        return own_gradient(p, x) if itself else fn(p, x)

    psg.factored_grad(may_differentiate_itself)(params, x, itself=True)
    p = live(params)
    norms = psg.tree.norm(psg.factored_grad(may_differentiate_itself, method="capture")(p, x, itself=False))
    expected = psg.per_sample_norm(fn, method="loop")(p, x)
    assert_trees_close(slopes(norms.sum(), p), slopes(expected.sum(), p), per_sample=False)


def test_under_autocast_functions_are_warned_of_one_by_one(device):
    """Under autocast one wrapper calls all functions: once its code told functions apart, and the second got no warning."""
    w, x = torch.ones(3, device=device), torch.ones(2, 3, device=device)
    generator = torch.Generator(device)
    for loss in (
        lambda w, x: (w * x * torch.rand(3, generator=generator, device=device)).sum(),
        lambda w, x: (w + x * torch.rand(3, generator=generator, device=device)).square().sum(),
    ):
        with torch.autocast(device.type, torch.bfloat16), pytest.warns(psg.FallbackWarning, match="Generator"):
            psg.per_sample_norm(loss)(w, x)


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev])
def test_what_is_closed_over_and_handed_to_a_transform(transform, method, args):
    """Ops see it only under the wrapper of fn's own transform, where it cannot be replaced: the derivative would be lost silently."""
    params, x, _ = args
    scale = torch.full((3,), 0.7, device=x.device, requires_grad=True)

    def handed(make):
        return lambda p, x: fn(p, transform(torch.sin)(make(scale)).sum() * x)

    with pytest.warns(UserWarning, match="hands it as an argument to a function that torch.func transforms"):
        assert not psg.per_sample_norm(handed(lambda scale: scale), method=method)(params, x).requires_grad
    ours = slopes(weigh(psg.per_sample_norm(handed(torch.clone), method=method)(params, x)), scale)
    expected = slopes(weigh(flat(gradients(handed(torch.clone), params, x)).norm(dim=1)), scale)
    assert_trees_close(ours, expected, per_sample=False)


LEAVES = {
    "requires_grad=True": lambda x: torch.zeros_like(x, requires_grad=True),
    "Parameter": lambda x: nn.Parameter(torch.zeros_like(x)),
    "Variable": lambda x: torch.autograd.Variable(0.3 * x, requires_grad=True),
    "module": lambda x: nn.LayerNorm(len(x), device=x.device).weight,
    "copy": lambda x: copy.deepcopy(nn.Parameter(0.3 * x)),
}


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_fn_makes_is_not_closed_over(name, method, args):
    """No function mode sees nn.Parameter and Variable: their leaves were taken for tensors that fn closes over."""
    params, x, _ = args

    def perturbed(p, x):
        return fn(p, x + LEAVES[name](x)) + vmap(torch.sin)(LEAVES[name](x)).sum()

    assert_trees_close(psg.per_sample_grad(perturbed, method=method)(params, x), gradients(perturbed, params, x))
    out = psg.clipped_grad(perturbed, 1.0, method=method)(params, x)
    assert not any(leaf.requires_grad for leaf in (out.values, out.norms, *tree_leaves(out.grads)))
    factor = psg.factored_grad(perturbed, method=method)(params, x)["a"]
    assert type(factor).__name__ == ("Dense" if method in ("vmap", "loop") else "Outer")


@pytest.mark.parametrize("name", LEAVES)
def test_fn_differentiates_for_a_leaf_that_it_makes(name, args):
    """nn.Parameter, given a tensor of each sample's own, required grad of vmap's wrapper alone."""
    params, x, _ = args

    def adversarial(p, x):
        delta = LEAVES[name](x)
        (slope,) = torch.autograd.grad(fn(p, x + delta), delta)
        return fn(p, x + 0.1 * slope)

    for n in (0, 1, N):
        expected = psg.per_sample_grad(adversarial, method="loop")(params, x[:n])
        assert_trees_close(psg.per_sample_grad(adversarial, method="capture")(params, x[:n]), expected)


@each_method
def test_a_leaf_that_a_graph_alone_holds_is_closed_over(method, args):
    params, x, _ = args
    node = (0.3 * torch.full((3,), 0.7, device=x.device, requires_grad=True)).grad_fn.next_functions[0][0]

    def closed(p, x):
        return fn(p, node.variable * x)

    ours = slopes(weigh(psg.per_sample_norm(closed, method=method)(params, x)), node.variable)
    expected = slopes(weigh(flat(gradients(closed, params, x)).norm(dim=1)), node.variable)
    assert_trees_close(ours, expected, per_sample=False)


@pytest.mark.parametrize("method", ["auto", "loop"])
def test_a_leaf_that_fn_keeps_is_closed_over_at_once(method, args):
    """A layer that the first call makes, say, and later calls close over."""
    params, x, _ = args
    kept = []

    def closed(p, x):
        kept[:] = kept or [nn.Parameter(torch.full((3,), 0.7, device=x.device))]
        return fn(p, kept[0] * x)

    ours = slopes(weigh(psg.per_sample_norm(closed, method=method)(params, x)), kept[0])
    expected = slopes(weigh(flat(gradients(closed, params, x)).norm(dim=1)), kept[0])
    assert_trees_close(ours, expected, per_sample=False)


def scripted_product(x, w):
    return x * w


@pytest.mark.parametrize("history", [False, True], ids=["leaf", "computed"])
@pytest.mark.parametrize("kind", ["function", "scripted"])
def test_what_is_closed_over_and_handed_where_no_op_is_seen(kind, history, args):
    """The loop finds it in the loss' graph: the derivative would be lost silently."""
    params, x, _ = args
    scale = torch.full((3,), 0.7, device=x.device, requires_grad=True)
    outside = scale.exp() if history else scale
    product = Times.apply if kind == "function" else torch.jit.script(scripted_product)

    def handed(p, x):
        return fn(p, product(x * p["a"].sum(), outside))

    with pytest.warns(UserWarning, match="hands it to an autograd.Function or scripted function"):
        assert not psg.per_sample_norm(handed, method="loop")(params, x).requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning")
@pytest.mark.parametrize("history", [False, True], ids=["leaf", "computed"])
@pytest.mark.parametrize("picks", [lambda x: x * (x > x.min()), lambda x: x[x > x.min()]], ids=["vmap", "loop"])
def test_what_is_closed_over_and_handed_to_a_scripted_function(picks, history, args):
    """It runs as the Python function where the gradients are differentiated too: psg did not see the tensor there."""
    params, x, _ = args
    scale = torch.full((3,), 0.7, device=x.device, requires_grad=True)
    product = torch.jit.script(scripted_product)

    def handed(p, x, times=product, picks=picks):
        return fn(p, times(x * p["a"].sum(), outside)) + picks(x * p["a"].sum()).sum()

    outside = scale.exp() if history else scale
    ours = slopes(weigh(psg.per_sample_norm(handed)(params, x)), scale, retain_graph=True)
    plain = lambda p, x: handed(p, x, torch.mul, lambda x: x * (x > x.min()))  # noqa: E731
    expected = slopes(weigh(flat(gradients(plain, params, x)).norm(dim=1)), scale)
    assert_trees_close(ours, expected, per_sample=False)


CONSTANTS = {
    "detached": lambda live, x: live.detach() * x,
    "data": lambda live, x: live.data * x,
    "no_grad": lambda live, x: torch.no_grad()(lambda: live * x)(),
    "asked": lambda live, x: x * len(live) if live.requires_grad and live.dtype == x.dtype and live.shape == (3,) else x,
    "in fn's own no_grad": lambda live, x: torch.no_grad()(torch.nn.functional.softplus)(live) * x,
}


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", CONSTANTS)
def test_what_is_closed_over_as_a_constant_stays_one(name, method, args):
    params, x, _ = args
    scale = torch.full((3,), 0.7, device=x.device, requires_grad=True)

    def constant(p, x):
        return fn(p, CONSTANTS[name](scale, x))

    norms = psg.per_sample_norm(constant, method=method)(params, x)
    assert not norms.requires_grad
    assert_trees_close(norms, flat(gradients(constant, params, x)).norm(dim=1))
    if method == "auto":
        assert type(psg.factored_grad(constant)(params, x)["a"]).__name__ == "Outer"


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_a_policy_closes_over(requires_grad, args):
    params, x, _ = args
    gain = torch.tensor(1.7, device=x.device, requires_grad=True)
    params = live(params) if requires_grad else params
    out = psg.clipped_grad(fn, 1.0, policy=lambda norms, clip_norm: gain / (1 + norms))(params, x)
    grads = gradients(fn, params, x)
    coef = gain / (1 + flat(grads).norm(dim=1))
    expected = tree_map(lambda g: torch.einsum("n,n...->...", coef, g), grads)
    wanted = [gain, *(params.values() if requires_grad else ())]
    assert_trees_close(slopes(weigh(out.grads), wanted), slopes(weigh(expected), wanted), per_sample=False)


def test_an_auxiliary_output_has_its_history(args):
    params, x, _ = args
    p = live(params)
    _, aux = psg.per_sample_grad(lambda p, x: (fn(p, x), (x * p["a"][0], 3, x.argmax(), x)), has_aux=True)(p, x)
    assert not aux[2].requires_grad and aux[1] == 3 and torch.equal(aux[3], x)
    assert_trees_close(slopes(weigh(aux[0]), p["a"]), slopes(weigh(x * p["a"][0]), p["a"]), per_sample=False)


@pytest.mark.parametrize("name", ["per_sample_grad", "per_sample_norm", "clipped_grad", "norm", "gram"])
def test_an_empty_batch_has_a_history_too(name, args):
    # A training loop over Poisson samples must not stop at the first empty one.
    params, x, rest = args
    p = live(params)
    out = weigh(FUNCTIONS[name][0](fn)(p, x[:0], rest))
    assert out.item() == 0 and out.requires_grad
    assert all(slope.count_nonzero() == 0 for slope in slopes(out, p))


def test_gradcheck(args):
    """Against finite differences, so against neither psg nor torch.func."""
    params, x, _ = args
    if x.dtype != torch.float64:
        pytest.skip("finite differences need float64")
    inputs = live([*params.values(), x])

    def norms(a, b, c, x):
        return psg.per_sample_norm(fn)({"a": a, "b": b, "c": c}, x)

    assert torch.autograd.gradcheck(norms, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(norms, inputs)


# --- training -----------------------------------------------------------------------------------------------


def test_gradient_penalty_trains(args):
    """The typical use: a training step on a loss that contains per-sample gradient norms."""
    params, x, _ = args
    module = {name: torch.nn.Parameter(p) for name, p in params.items()}
    penalty = (psg.per_sample_norm(fn)(module, x) - 1).square().mean()
    penalty.backward()
    expected = grad(lambda p: (flat(gradients(fn, p, x)).norm(dim=1) - 1).square().mean())(params)
    assert_trees_close({name: p.grad for name, p in module.items()}, expected, per_sample=False)


def test_backward_twice_and_for_two_calls(args):
    params, x, _ = args
    p, shared = live(params), live(torch.tensor(1.2, device=x.device))
    scale = shared.exp()
    out = [psg.per_sample_norm(lambda p, x: fn(p, scale * x), method=method)(p, x).sum() for method in ("auto", "vmap")]
    first = slopes(out[0], p, retain_graph=True)
    assert_trees_close(slopes(out[0] + out[1], p, retain_graph=True), [2 * leaf for leaf in first], per_sample=False)
    assert_trees_close(slopes(out[0] + scale, [shared], retain_graph=True), slopes(out[1] + scale, [shared]), per_sample=False)


def test_an_input_changed_before_the_backward_pass_is_an_error(args):
    params, x, _ = args
    norms = psg.per_sample_norm(fn)(live(params), x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        norms.sum().backward()


def test_nothing_is_held_once_the_results_are_gone(args):
    params, x, _ = args
    p = live(params)
    grads = psg.per_sample_grad(fn)(p, x)
    seen = [weakref.ref(leaf) for leaf in grads.values()]
    gc.disable()
    try:
        del grads
        assert not any(ref() for ref in seen)
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_random_functions_keep_their_draw(method, device):
    # The derivative must be that of the values that came out: the masks of forward and backward are the same.
    w = torch.ones(32, device=device, requires_grad=True)
    x = torch.ones(4, 32, device=device)
    transform = psg.per_sample_grad(lambda w, x: (F.dropout(w * x, 0.5) ** 2).sum() / 2, method=method)
    grads = transform(w, x)
    torch.randn(3)  # what is drawn in between does not matter
    (slope,) = torch.autograd.grad(grads.sum(), w)
    assert 0 < grads.count_nonzero() < grads.numel()
    assert_trees_close(slope, grads.detach().sum(0), per_sample=False)


def test_a_random_function_draws_the_same_with_and_without_a_history(args):
    params, x, _ = args
    noisy = psg.per_sample_grad(lambda p, x: fn(p, x + torch.randn_like(x)), method="vmap")
    torch.manual_seed(1)
    plain, after = noisy(params, x), torch.get_rng_state()
    torch.manual_seed(1)
    assert_trees_close(noisy(live(params), x), plain)
    assert torch.equal(torch.get_rng_state(), after)


# --- zero gradients -----------------------------------------------------------------------------------------


def dead(p, x):
    """The second sample's gradient is zero, and so is every sample's for b."""
    return score(F.linear(x, p["a"])) + (p["b"].sum() * x[0] * 0) ** 2


AT_ZERO = {
    "per_sample_norm": lambda p, x: psg.per_sample_norm(dead)(p, x),
    "clipped_grad": lambda p, x: psg.clipped_grad(dead, 0.5)(p, x).grads,
    "clipped_grad, automatic": lambda p, x: psg.clipped_grad(dead, 0.5, policy="automatic")(p, x).grads,
    "clipped_grad, normalize": lambda p, x: psg.clipped_grad(dead, 0.5, policy="normalize")(p, x).grads,
    "clipped_grad, per leaf": lambda p, x: psg.clipped_grad(dead, psg.clipping.PerLeaf(0.5))(p, x).grads,
    "norm": lambda p, x: psg.tree.norm(psg.factored_grad(dead)(p, x)),
    "cosine": lambda p, x: psg.tree.cosine(psg.factored_grad(dead)(p, x)),
}


@pytest.fixture
def at_zero(device):
    params = {"a": torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.7, -0.4]], device=device), "b": torch.ones(2, device=device)}
    return params, torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [2.0, -1.0, 0.5]], device=device)


@pytest.mark.parametrize("name", AT_ZERO)
def test_derivatives_at_a_zero_gradient_are_finite(name, at_zero):
    # At zero the norm has no derivative; psg takes zero. This holds to second order too, in forward and reverse mode.
    params, x = at_zero
    p, f = live(params), AT_ZERO[name]
    first = slopes(weigh(f(p, x)), p, create_graph=True)
    second = slopes(weigh(first), p)
    forwards = [jacfwd(f, argnums=k)(params, x) for k in (0, 1)]
    assert all(leaf.isfinite().all() for leaf in tree_leaves((first, second, forwards)))
    assert any(leaf.count_nonzero() for leaf in first)


def test_a_zero_factor_s_norm_has_a_finite_derivative(device):
    left = torch.zeros(2, 3, 4, device=device, requires_grad=True)
    psg.factors.Outer(left, torch.ones(2, 3, 4, device=device)).norm().sum().backward()
    assert left.grad.count_nonzero() == 0


def test_a_zero_part_does_not_lose_the_second_derivative(device):
    # |g| is smooth where one leaf's gradient is zero and another's is not.
    w, x = torch.tensor([0.3, 0.0], device=device), torch.tensor([[1.0]], device=device)

    def fn(p, x):
        return (p[0] * x).exp().sum() + (p[1] * x).cos().sum()

    found = hessian(lambda w: psg.per_sample_norm(fn)([w[0], w[1]], x).sum())(w)
    expected = hessian(lambda w: torch.linalg.vector_norm(torch.stack(vmap(grad(fn), in_dims=(None, 0))([w[0], w[1]], x))))(w)
    assert_trees_close(found, expected, per_sample=False)
    assert expected[1, 1] > 0


@pytest.mark.parametrize("size", [3, 5000])
def test_a_squared_norm_is_smooth_at_zero(size, device):
    rows = torch.zeros(1, size, device=device)
    curve = torch.autograd.functional.hessian(
        lambda s: psg.tree.squared_norm(s * torch.ones_like(rows)).sum(), torch.zeros((), device=device)
    )
    assert curve.item() == 2 * size
    factor = psg.factors.Outer(torch.zeros(1, 1, size, device=device), torch.ones(1, 1, 2, device=device))
    curve = hessian(lambda s: psg.tree.squared_norm(psg.factors.Outer(factor.left + s, factor.right)).sum())(torch.zeros((), device=device))
    assert curve.item() == 4 * size


@pytest.mark.parametrize("method", ["capture", "loop", "batch"])
def test_data_that_the_function_itself_makes_a_leaf_gives_no_history(method, device):
    def fn(w, x):
        return (w * x.detach().clone().requires_grad_(True)).sum(-1) ** 2

    w, x = torch.ones(3, device=device), torch.randn(4, 3, device=device)
    out = psg.clipped_grad(fn, 1.0, method=method)(w, x)
    assert not out.grads.requires_grad and not out.values.requires_grad
    closed = torch.ones(3, device=device, requires_grad=True)  # requires grad already, so fn's requires_grad_ changes nothing
    outer = psg.per_sample_norm(lambda w, x: fn(w, closed.requires_grad_(True) * x), method=method)(w, x)
    assert outer.requires_grad


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_results_with_a_history_may_be_written_into(method, chunk_size, device):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(device)
    loss, _ = psg.stateless(module, F.cross_entropy)
    x, y = torch.randn(4, 2, 5, device=device), torch.randint(3, (4,), device=device)

    def slopes(write):
        params = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
        calls = psg.clipped_grad(loss, 0.1, method=method, chunk_size=chunk_size), psg.per_sample_grad(loss, method=method)
        clipped, each = calls[0](params, x, y).grads, calls[1](params, x, y)
        results = [*clipped.values(), *each.values()]
        changed = [result.mul_(3) if write else 3 * result for result in results]
        return torch.autograd.grad(sum(value.sin().sum() for value in changed), list(params.values()))

    assert_trees_close(slopes(True), slopes(False), per_sample=False)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("outside", ["parameter", "closed over"])
def test_derivatives_of_a_function_that_takes_many_gradients_at_once(outside, device):
    """By autograd's own vmap, whose results have no derivatives inside of psg's: so it runs in a loop."""
    w, x = torch.randn(3, 4, device=device), torch.randn(N, 4, device=device)
    scale = torch.ones((), device=device)
    leaf = (w if outside == "parameter" else scale).requires_grad_()

    def fn(w, x):
        hidden = (w @ x * scale).sin()
        (slopes,) = torch.autograd.grad(hidden, w, torch.eye(3, device=device), is_grads_batched=True, create_graph=True)
        return slopes.square().sum()

    def derivative(method):
        values, grads = psg.per_sample_value_and_grad(fn, method=method)(w, x)
        return torch.autograd.grad(values.sum() + grads.sin().sum(), leaf)

    if outside == "closed over":
        w.requires_grad_()
    assert_trees_close(derivative("auto"), derivative("loop"), per_sample=False)
    with pytest.raises(psg.PsgError, match="is_grads_batched=True"):
        derivative("vmap")


def test_each_function_is_warned_of_a_derivative_that_is_lost(device):
    w, x, scale = torch.randn(3, 4, device=device), torch.randn(N, 4, device=device), torch.randn(3, device=device, requires_grad=True)

    def one(w, x):
        return vmap(lambda row, own: ((row * x).sum() * own).sin())(w, scale).sum()

    def another(w, x):
        return vmap(lambda row, own: ((row * x).sum() * own).cos())(w, scale).sum()

    for function in (one, another):
        with pytest.warns(UserWarning, match="derivative"):
            psg.per_sample_value_and_grad(function)(w, x)


class Doubling(torch.Tensor):
    """A class of the user's own, which changes what an op computes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs or {})
        return output + output if func is torch.Tensor.mul else output


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("of", ["weight", "batch"])
def test_the_backward_pass_for_a_class_that_handles_ops(of, device):
    """torch calls it from within the class's own handler, where the class handles no other op."""
    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    w, x = (tensor.as_subclass(Doubling) if name == of else tensor for name, tensor in (("weight", w), ("batch", x)))
    target = (w if of == "weight" else x).requires_grad_()

    def slope(grads):
        return torch.autograd.grad(grads.as_subclass(torch.Tensor).square().sum(), target)[0].as_subclass(torch.Tensor)

    def fn(w, x):
        return w.mul(x).pow(3).sum()

    own = w.detach().requires_grad_() if of == "batch" else w
    looped = torch.stack([torch.autograd.grad(fn(own, each), own, create_graph=True)[0].as_subclass(torch.Tensor) for each in x])
    torch.testing.assert_close(slope(psg.per_sample_grad(fn)(w, x)), slope(looped))


@pytest.mark.parametrize("method", ["auto", "loop"])
def test_a_function_that_asks_whether_a_sample_requires_grad(method, device):
    """As in a loop, it does where the batch does: values and derivatives are of one branch."""
    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device, requires_grad=True)

    def fn(w, x):
        return (w * x).sum() if x.requires_grad else (w * x).square().sum()

    grads = psg.per_sample_grad(fn, method=method)(w, x)
    torch.testing.assert_close(grads, x)
    torch.testing.assert_close(torch.autograd.grad(grads.sum(), x)[0], torch.ones_like(x))
    torch.testing.assert_close(psg.per_sample_grad(fn, method=method)(w, x.detach()), 2 * (w * x * x).detach())


class Sines(TorchFunctionMode):
    """A function mode that doubles sines."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return 2 * output if func is torch.sin else output


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@each_method
@pytest.mark.parametrize("wanted", ["weight", "closed over"])
@pytest.mark.parametrize("result", [psg.per_sample_grad, psg.factored_grad, psg.per_sample_norm])
def test_the_backward_pass_after_a_function_mode_has_ended(result, wanted, method, device):
    """A backward pass that runs fn again would differentiate other ops than the mode's."""
    scale, w, x = torch.randn(3, device=device), torch.randn(3, device=device), torch.randn(4, 3, device=device)
    target = (w if wanted == "weight" else scale).requires_grad_()

    def fn(w, x):
        return (torch.sin(w * x) * scale).sum().exp()

    def slope(results):
        return torch.autograd.grad(results.square().sum(), target)[0]

    with Sines():
        results = result(fn, method=method)(w, x)
        looped = torch.stack([grad(fn)(w, each) for each in x])
    if result is psg.factored_grad:
        results = psg.tree.materialize(results)
    torch.testing.assert_close(slope(results), slope(looped))


@each_method
@pytest.mark.parametrize("ended", [True, False])
def test_the_backward_pass_runs_fn_with_the_defaults_of_its_call(ended, method, device):
    """The default device is a function mode, under which torch.autograd.grad and backward() run without it."""
    w, x, seen = torch.randn(3, device=device, requires_grad=True), torch.randn(4, 3, device=device), []

    def fn(w, x):
        seen.append((torch.empty(0).dtype, torch.empty(0).device.type, torch.are_deterministic_algorithms_enabled()))
        return (w * x).sum().square()

    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        stack.callback(torch.use_deterministic_algorithms, False)
        with torch.device("meta"):
            torch.set_default_dtype(torch.float16)
            torch.use_deterministic_algorithms(True)
            norms = psg.per_sample_norm(fn, method=method)(w, x)
            if not ended:
                norms.sum().backward()
        torch.set_default_dtype(torch.bfloat16)
        torch.use_deterministic_algorithms(False)
        if ended:
            norms.sum().backward()
        assert set(seen) == {(torch.float16, "meta", True)}
        assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.bfloat16, "cpu")
        assert not torch.are_deterministic_algorithms_enabled()
