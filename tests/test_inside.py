"""Rules inside transforms that fn applies, and inside derivatives that fn takes."""

import contextlib
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees
from cases import Problem
from conftest import as_large
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.func import grad, jacrev, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import psg
from psg.testing import assert_trees_close, loop_grad


@pytest.fixture
def normal(device):
    return functools.partial(torch.randn, device=device)


# Forms of a layer: (shape of its parameter, shape of one sample, the layer).

LAYERS = {
    "linear": ((4, 3), (3,), lambda w, x: F.linear(x, w, w[:, 0])),
    "linear, rows": ((4, 3), (2, 3), lambda w, x: F.linear(x, w)),
    "x @ w": ((3, 4), (3,), lambda w, x: x @ w),
    "x @ w, rows": ((3, 4), (2, 2, 3), lambda w, x: x @ w),
    "w @ x": ((4, 3), (3,), lambda w, x: w @ x),
    "w @ x, columns": ((4, 3), (3, 2), lambda w, x: w @ x),
    "w @ x, stacks": ((4, 3), (2, 3, 2), lambda w, x: torch.matmul(w, x)),
    "x @ w.T": ((4, 3), (3,), lambda w, x: x @ w.T),
    "of a derived weight": ((4, 3), (3,), lambda w, x: F.linear(x, w * w.norm(dim=1, keepdim=True))),
    "mm": ((4, 3), (3, 2), lambda w, x: torch.mm(w, x) + x.mT.mm(w.T).mT),
    "mv": ((4, 3), (3,), lambda w, x: w.mv(x)),
    "einsum": ((3, 4), (2, 3, 2), lambda w, x: torch.einsum("oi,bik->kob", w.T, x)),
    "einsum, with an ellipsis": ((3, 4), (2, 3), lambda w, x: torch.einsum("...i,io->...o", x, w)),
    "einsum, summed": ((3, 4), (2, 3), lambda w, x: torch.einsum("bi,io->o", x, w)),
    "conv1d": ((3, 3, 2), (3, 6), lambda w, x: F.conv1d(x, w, w[:, 0, 0], stride=2, padding=1)),
    "conv1d, same": ((3, 3, 3), (2, 3, 6), lambda w, x: F.conv1d(x, w, padding="same")),
    "conv1d, same, uneven": ((3, 3, 2), (3, 6), lambda w, x: F.conv1d(x, w, padding="same")),
    "conv2d": ((4, 1, 3, 2), (4, 5, 4), lambda w, x: F.conv2d(x, w, stride=(2, 1), padding=1, groups=4)),
    "conv2d, images": ((2, 2, 2, 2), (3, 2, 4, 5), lambda w, x: F.conv2d(x, w, w[:, 0, 0, 0], dilation=2, stride=2, padding=(2, 1))),
    "conv3d": ((2, 2, 2, 1, 2), (2, 3, 3, 3), lambda w, x: F.conv3d(x, w, stride=[2], padding="valid")),
    "conv_transpose1d": ((3, 2, 3), (3, 4), lambda w, x: F.conv_transpose1d(x, w, w[0, :, 0], stride=2, padding=1, output_padding=1)),
    "conv_transpose2d": ((4, 1, 2, 2), (2, 4, 2, 3), lambda w, x: F.conv_transpose2d(x, w, groups=2, dilation=(1, 2))),
}

WITHOUT = "conv1d, same, uneven", "einsum, summed"  # lifted inside transforms, with right results


def network(layer):
    def run(p, x):
        """A scalar; the second use of the layer depends on the result of the first."""
        hidden = layer(p["w"], x).tanh()
        again = layer(p["w"], x * hidden.square().mean() + hidden.sum().sin())
        return (again.sin() * p["gain"]).sum() + hidden.square().sum()

    return run


def flat(values):
    return values.reshape(-1)


# What fn does with a network f, where f(p, x) is a scalar.

TRANSFORMS = {
    "value": lambda f, p, x: f(p, x),
    "grad": lambda f, p, x: (torch.func.grad(f, argnums=1)(p, x).square().sum() + 1).log(),
    "grad_and_value": lambda f, p, x: torch.func.grad_and_value(f, argnums=1)(p, x)[0].sin().sum(),
    "vjp": lambda f, p, x: torch.func.vjp(lambda z: f(p, z), x)[1](x.mean())[0].square().sum(),
    "jvp": lambda f, p, x: torch.func.jvp(lambda z: f(p, z), (x,), (torch.ones_like(x),))[1].square(),
    "a constant tangent": lambda f, p, x: torch.func.jvp(
        lambda z: f(p, z), (x,), (torch.linspace(0.0, 1.0, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape),)
    )[1].square(),
    "jacrev": lambda f, p, x: torch.func.jacrev(lambda z: torch.stack([f(p, z), f(p, z.sin())]))(x).square().sum(),
    "jacfwd": lambda f, p, x: torch.func.jacfwd(lambda z: f(p, z))(x).square().sum(),
    "hessian": lambda f, p, x: torch.func.hessian(lambda z: f(p, z.reshape(x.shape)))(flat(x)).diagonal().sum().square(),
    "grad of grad": lambda f, p, x: torch.func.grad(lambda z: torch.func.grad(f, argnums=1)(p, z).square().sum())(x).sum().square(),
    "jvp of grad": lambda f, p, x: torch.func.jvp(torch.func.grad(lambda z: f(p, z)), (x,), (x.cos(),))[1].square().sum(),
    "grad of jvp": lambda f, p, x: torch.func.grad(lambda z: torch.func.jvp(lambda y: f(p, y), (z,), (x.cos(),))[1])(x).square().sum(),
    "jvp of jvp": lambda f, p, x: torch.func.jvp(lambda z: torch.func.jvp(lambda y: f(p, y), (z,), (z.cos(),))[1], (x,), (x.sin(),))[
        1
    ].square(),
    "jvp of jvp of jvp": lambda f, p, x: torch.func.jvp(
        lambda v: torch.func.jvp(lambda z: torch.func.jvp(lambda y: f(p, y), (z,), (z.cos(),))[1], (v,), (v.sin(),))[1], (x,), (x,)
    )[1].sin(),
    "jacfwd of grad of jvp": lambda f, p, x: (
        torch.func.jacfwd(torch.func.grad(lambda z: torch.func.jvp(lambda y: f(p, y), (z,), (z.cos(),))[1]))(x).square().sum()
    ),
    "vmap": lambda f, p, x: torch.func.vmap(lambda scale: f(p, x * scale))(torch.arange(1.0, 4.0).to(x)).square().sum(),
    "vmap, in another dimension": lambda f, p, x: torch.func.vmap(lambda z: f(p, z), in_dims=x.ndim)(
        torch.stack([x, x.sin(), x.cos()], x.ndim)
    ).prod(),
    "vmap of vmap": lambda f, p, x: torch.func.vmap(
        lambda scale: torch.func.vmap(lambda shift: f(p, x * scale + shift))(torch.arange(2.0).to(x))
    )(torch.arange(1.0, 4.0).to(x)).prod(),
    "vmap of grad": lambda f, p, x: (
        torch.func.vmap(lambda scale: torch.func.grad(lambda z: f(p, z * scale))(x))(torch.arange(1.0, 4.0).to(x)).square().sum()
    ),
    "grad of vmap": lambda f, p, x: (
        torch.func.grad(lambda z: torch.func.vmap(lambda scale: f(p, z * scale))(torch.arange(1.0, 4.0).to(x)).prod())(x).square().sum()
    ),
    "jacfwd of all arguments": lambda f, p, x: torch.func.jacfwd(f, argnums=1)(p, x).square().sum(),
    "hessian of all arguments": lambda f, p, x: torch.func.hessian(f, argnums=1)(p, x).square().sum(),
    "grad of jvp for the parameters": lambda f, p, x: torch.func.jvp(
        lambda q: torch.func.grad(f, argnums=1)(q, x).sin().sum(), (p,), ({name: value.cos() for name, value in p.items()},)
    )[1].square(),
    "jvp of grad for the parameters": lambda f, p, x: (
        torch.func.grad(
            lambda q: torch.func.jvp(lambda r, z: f(r, z), (q, x), ({name: torch.zeros_like(v) for name, v in q.items()}, x.cos()))[1]
        )(p)["w"]
        .square()
        .sum()
    ),
    "without what is switched off": lambda f, p, x: torch.func.grad(lambda z: switched_off(f, p, z))(x).square().sum(),
    "autograd.grad": lambda f, p, x: slope(f, p, x)[0].square().sum(),
    "autograd.grad, twice": lambda f, p, x: curvature(f, p, x),
    "autograd.grad, not to be differentiated": lambda f, p, x: fixed_slope(f, p, x),
    "autograd.grad of what torch.func gives": lambda f, p, x: (
        slope(lambda p, z: torch.func.jvp(lambda y: f(p, y), (z,), (torch.ones_like(z),))[1], p, x)[0].square().sum()
    ),
}


def switched_off(f, p, z):
    with torch.no_grad():
        scale = f(p, z)
    return f(p, z) * scale


def slope(f, p, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(p, x), x, create_graph=True)[0], x


def curvature(f, p, x):
    first, x = slope(f, p, x)
    return torch.autograd.grad(first.square().sum(), x, create_graph=True)[0].sum().square()


def fixed_slope(f, p, x):
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(f(p, x), x)
    return (f(p, x) * found).sum()


def are_lifted(fn, params, *args):
    """The names of the matrices that were lifted somewhere, or that no rule has seen."""
    uses = {name: leaf.uses for name, leaf in zip(sorted(params), psg.explain(fn)(params, *args).leaves, strict=True)}
    return [name for name, own in uses.items() if params[name].ndim > 1 and (not own or any("lifted" in use for use in own))]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_equals_the_loop(layer, transform, normal, monkeypatch):
    shape, item, run = LAYERS[layer]
    params = {"w": normal(*shape) / 2, "gain": normal(())}
    apply = TRANSFORMS[transform]
    x = normal(3, *item)

    def fn(p, x):
        return apply(network(run), p, x)

    assert_agrees(Problem(fn, (params, x)))
    assert_trees_close(psg.per_sample_grad(fn)(params, x[1:2]), loop_grad(fn)(params, x[1:2]))
    as_large(monkeypatch)  # small weights run without rules from the second call on
    # Lifted as well: slices of a parameter under no_grad, and parameters for which fn itself differentiates.
    lifts = layer in WITHOUT or transform == "without what is switched off" or "for the parameters" in transform
    assert lifts or not are_lifted(fn, params, x)


# --- what else a model is made of -------------------------------------------------------------------------------------------------


def test_lookups_under_a_vmap_of_fn(normal, device):
    params = {"table": normal(7, 3), "w": normal(2, 3)}
    ids = torch.randint(7, (4, 5), device=device)

    def fn(p, ids):
        def token(i):
            return F.linear(F.embedding(i, p["table"], padding_idx=2), p["w"]).tanh()

        return torch.func.vmap(token)(ids).square().sum()

    assert_agrees(Problem(fn, (params, ids)))
    assert not are_lifted(fn, params, ids)


def test_a_frozen_weight_with_a_trained_bias(normal):
    frozen = normal(4, 3)

    def energy(p, x):
        return (F.linear(F.linear(x, frozen, p["bias"]).sin(), p["down"]) @ p["up"]).cos().sum()

    def fn(p, x):
        return torch.func.grad(energy, argnums=1)(p, x).square().sum()

    params, x = {"bias": normal(4), "down": normal(2, 4), "up": normal(2, 3)}, normal(5, 3)
    assert_agrees(Problem(fn, (params, x)))
    assert not are_lifted(fn, params, x)


@pytest.mark.parametrize(
    "layer",
    [lambda x, w, b: F.linear(x, w, b), lambda x, w, b: F.conv1d(x[:, None], w[..., None], b)],
    ids=["linear", "conv1d"],
)
def test_a_trained_weight_with_a_frozen_bias(layer, normal):
    """The derivative in a direction has no bias."""
    bias = normal(4)

    def fn(p, x):
        return torch.func.jvp(lambda z: layer(z, p["w"], bias).sin(), (x,), (x.cos(),))[1].square().sum()

    params, x = {"w": normal(4, 3)}, normal(5, 3)
    assert_agrees(Problem(fn, (params, x)))
    assert not are_lifted(fn, params, x)


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.grad, torch.func.vmap])
def test_data_that_the_samples_share(transform, normal):
    points = normal(6, 3)

    def fn(p, x):
        found = transform(lambda z: (F.linear(z, p["w"]).tanh() @ p["v"]).sum(-1))(points if transform is torch.func.vmap else points[0])
        return (found.sum() * x.sum()).sin()

    assert_agrees(Problem(fn, ({"w": normal(4, 3), "v": normal(4, 2)}, normal(5, 3))))


def test_a_parameter_that_the_inner_derivative_is_for(normal):
    def inner(p, x):
        return (F.linear(x, p["w"]).tanh() @ p["v"]).square().sum()

    def fn(p, x, y):
        slopes = torch.func.grad(lambda w: inner({**p, "w": w}, x))(p["w"])
        return inner({**p, "w": p["w"] - 0.1 * slopes}, y)

    assert_agrees(Problem(fn, ({"w": normal(4, 3), "v": normal(4, 2)}, normal(5, 3), normal(5, 3))))


def test_a_parameter_for_which_autograd_is_asked(normal):
    def inner(p, x):
        return (F.linear(x, p["w"]).tanh() @ p["v"]).square().sum()

    def fn(p, x):
        z = x.clone().requires_grad_()
        by_data, by_weight = torch.autograd.grad(inner(p, z), (z, p["w"]), create_graph=True)
        return by_data.square().sum() + by_weight.sin().sum()

    assert_agrees(Problem(fn, ({"w": normal(4, 3), "v": normal(4, 2)}, normal(5, 3))))


def test_hidden_layers_for_which_autograd_is_asked(normal):
    def fn(p, x):
        hidden = F.linear(x, p["w"]).tanh()
        (slope,) = torch.autograd.grad((hidden @ p["v"]).square().sum(), hidden, create_graph=True)
        return (slope * F.linear(slope @ p["w"], p["w"])).sum()

    params, x = {"w": normal(4, 3), "v": normal(4, 2)}, normal(5, 3)
    assert_agrees(Problem(fn, (params, x)))
    assert not are_lifted(fn, params, x)


@pytest.mark.parametrize("form", ["no_grad inside", "no_grad around", "enable_grad inside of it"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp, torch.func.jvp, torch.func.vmap, torch.func.jacrev])
def test_what_is_switched_off(transform, form, normal):
    def layer(p, z):
        with torch.no_grad():
            output = F.linear(z, p["w"])
            if form == "enable_grad inside of it":
                with torch.enable_grad():
                    output = output + F.linear(z, p["w"])
        return output

    def inside(p, z):
        kept.append(2 * p["w"])
        derived = F.linear(z, kept[-1])
        return ((layer(p, z) if form != "no_grad around" else derived) * z.sum() + derived.sin()).sum()

    def derivative(p, x):
        if transform is torch.func.vmap:
            return transform(lambda z: inside(p, z))(torch.stack([x, x.cos()])).sum()
        if transform is torch.func.jvp:
            return transform(lambda z: inside(p, z), (x,), (x.cos(),))[1]
        if transform is torch.func.vjp:
            return transform(lambda z: inside(p, z), x)[1](x.sum())[0].sum()
        return transform(lambda z: inside(p, z))(x).square().sum()

    def fn(p, x):
        with torch.set_grad_enabled(form != "no_grad around"):
            found = derivative(p, x)
        return (found * F.linear(x, p["w"] + kept.pop()).sum()).sin()

    kept = []

    assert_agrees(Problem(fn, ({"w": normal(4, 3)}, normal(5, 3))))


def test_an_activation_kept_from_a_transform_that_has_ended(normal):
    def fn(p, x):
        kept = []

        def energy(z):
            kept.append(z.sin())
            return F.linear(kept[-1], p["w"]).cos().sum()

        z = x.clone().requires_grad_()
        slope = torch.func.grad(energy)(x)
        (other,) = torch.autograd.grad(F.linear(kept[0] * z, p["w"]).sin().sum(), z, create_graph=True)
        return (F.linear(slope + kept[0], p["w"]) + F.linear(kept[0], p["w"])).sin().sum() + other.square().sum()

    assert_agrees(Problem(fn, ({"w": normal(4, 3)}, normal(5, 3))))


@pytest.mark.parametrize("op", [lambda z, w: F.linear(z, w), lambda z, w: F.conv1d(z[None], w[:, None, :1])])
def test_a_vjp_made_under_no_grad_and_called_outside_of_it(op, normal):
    def fn(p, x):
        with torch.no_grad():
            output, pull = torch.func.vjp(lambda z: op(z, p["w"]), x)
        return (pull(output)[0] * F.linear(x, p["w"]).sum()).sum()

    assert_agrees(Problem(fn, ({"w": normal(4, 3)}, normal(5, 3))), may_fall="such a derivative is torch's own")


def test_normalisation_and_attention_between(normal, device):
    model = torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).to(device)
    params = {name: value.detach() for name, value in model.named_parameters()}

    def fn(p, x):
        def run(z):
            return torch.func.functional_call(model, p, (z[None],)).sin().sum()

        return torch.func.grad(run)(x).square().sum() + torch.func.vmap(run)(torch.stack([x, x.cos()])).prod()

    x = normal(3, 5, 8)
    with sdpa_kernel(SDPBackend.MATH):  # the loop's own attention has no second derivative
        assert_agrees(Problem(fn, (params, x)))
        assert not are_lifted(fn, params, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision(dtype, autocast, normal):
    params = {"w": normal(4, 3).to(dtype), "v": normal(4, 2).to(dtype)}

    def energy(p, x):
        return (F.linear(x, p["w"]).tanh() @ p["v"]).float().sum()

    def fn(p, x):
        with torch.autocast(x.device.type, enabled=autocast):
            return torch.func.grad(energy, argnums=1)(p, x).square().sum()

    x = normal(5, 3).to(dtype)
    found = psg.per_sample_grad(fn)(params, x)
    double = {name: value.double() for name, value in params.items()}
    expected = loop_grad(fn)(double, x.double())
    for name, value in found.items():
        assert value.dtype == dtype
        limit = 1e-5 if dtype == torch.float32 and not autocast else 0.1
        assert (value - expected[name]).norm() < limit * expected[name].norm()


@pytest.mark.parametrize("transform", ["grad", "hessian", "vmap of grad", "jvp of grad", "autograd.grad, twice"])
def test_compiled_and_in_chunks(transform, normal):
    apply, run = TRANSFORMS[transform], network(LAYERS["x @ w.T"][2])

    def fn(p, x):
        return apply(run, p, x)

    params, x = {"w": normal(4, 3), "gain": normal(())}, normal(5, 3)
    expected = loop_grad(fn)(params, x)
    assert_trees_close(psg.per_sample_grad(fn, chunk_size=2)(params, x), expected)
    assert_trees_close(psg.jit(psg.per_sample_grad(fn), backend="eager")(params, x), expected)


@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 2),
    size=st.integers(5, 8),
    kernel=st.integers(1, 3),
    out=st.integers(0, 2),
    transposed=st.booleans(),
    order=st.sampled_from(["grad", "jvp of grad", "vmap of grad", "autograd.grad, twice"]),
)
def test_drawn_convolutions(lead, stride, padding, dilation, groups, size, kernel, out, transposed, order, normal):
    lead = lead[:1]
    params = {"w": normal(2 * groups, 2, kernel), "gain": normal(())}
    options = {"stride": stride, "padding": min(padding, dilation * (kernel - 1) // 2), "dilation": dilation, "groups": groups}
    if transposed:
        options["output_padding"] = min(out, max(stride, dilation) - 1)
    op = F.conv_transpose1d if transposed else F.conv1d

    def run(p, x):
        return (op(x, p["w"], **options).tanh() * p["gain"]).sin().sum()

    def fn(p, x):
        return TRANSFORMS[order](run, p, x)

    assert_agrees(Problem(fn, (params, normal(2, *lead, 2 * groups, size))))


def test_one_seed_gives_one_result_from_the_first_call_on(normal):
    """In the first call psg abandons a pass, from which it learns that fn calls autograd: its draws must not count."""

    def fn(p, x):
        noise = torch.rand_like(x)
        z = (x + noise).requires_grad_()
        (slope,) = torch.autograd.grad(F.linear(z, p["w"]).tanh().sum(), z, create_graph=True)
        return (slope * torch.rand_like(x)).sum()

    params, x = {"w": normal(4, 3)}, normal(5, 3)
    results = []
    for _ in range(3):
        torch.manual_seed(1)
        results.append(psg.per_sample_grad(fn)(params, x)["w"])
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


def test_a_function_that_calls_autograd_now_and_then(normal):
    def fn(p, x, differentiate):
        hidden = F.linear(x, p["w"]).tanh()
        if not differentiate:
            return F.layer_norm(hidden, (4,), p["gain"]).sum()
        z = x.clone().requires_grad_()
        return torch.autograd.grad((F.linear(z, p["w"]).sin() * p["gain"]).sum(), z, create_graph=True)[0].square().sum() + hidden.sum()

    params, x = {"w": normal(4, 3), "gain": normal(4)}, normal(5, 3)
    for differentiate in (True, True, False, False, True):
        assert_trees_close(psg.per_sample_grad(fn)(params, x, differentiate), loop_grad(fn)(params, x, differentiate))


@pytest.mark.parametrize("gradients", [*(functools.partial(psg.per_sample_grad, method=m) for m in ("capture", "vmap", "loop")), loop_grad])
def test_backward_passes_of_the_function_stay_in_its_thread(gradients, normal):
    """In an accelerator's thread autograd counts nodes anew: gradients looked like tensors that fn closes over, and got a history."""
    threaded = []

    def fn(w, x):
        threaded.append(torch._C._is_multithreading_enabled())
        slope = torch.func.grad(lambda x: F.linear(x, w).tanh().sum())(x)
        return (slope * x).sum()

    assert not gradients(fn)(normal(4, 3), normal(5, 3)).requires_grad
    assert threaded and not any(threaded) and torch._C._is_multithreading_enabled()


# --- values that are computed from parameters again and again ---------------------------------------------------------------------


def test_what_is_derived_again_is_derived_once(normal, monkeypatch):
    as_large(monkeypatch)

    def fn(p, x):
        def energy(z):
            weight = p["v"] * (p["g"][:, None] / p["v"].norm(dim=1, keepdim=True))
            return F.linear(z, weight - weight.T).tanh().sum()

        return torch.func.hessian(energy)(x).square().sum() + torch.func.grad(energy)(x).sum() * energy(x)

    params, x = {"v": normal(3, 3), "g": normal(3)}, normal(5, 3)
    assert_agrees(Problem(fn, (params, x)))
    _, v = psg.explain(fn)(params, x).leaves
    assert v.uses["norm: derived"] == 1


def test_constants_made_inside_of_a_transform(normal, monkeypatch):
    as_large(monkeypatch)
    frozen = normal(3, 3)

    def fn(p, x):
        def energy(z, scale):
            weight = p["w"] - torch.eye(3, device=z.device) * 0.5 + frozen.to(z) @ p["w"].T
            return (F.linear(z, weight).tanh() * scale).sum()

        return torch.func.jvp(torch.func.grad(lambda z: energy(z, 2.0)), (x,), (x.cos(),))[1].square().sum()

    params, x = {"w": normal(3, 3)}, normal(5, 3)
    assert_agrees(Problem(fn, (params, x)))
    assert not are_lifted(fn, params, x)


def test_a_constant_that_is_written_into_between_two_uses(normal):
    def fn(p, x):
        room = torch.ones(3, 3, device=x.device)

        def energy(z):
            return F.linear(z, p["w"] + room).tanh().sum()

        first = torch.func.grad(energy)(x)
        room[0] = 3.0
        return (first * torch.func.grad(energy)(x)).sum()

    assert_agrees(Problem(fn, ({"w": normal(3, 3)}, normal(5, 3))), may_fall="what fn makes to write into is then of each sample's own")


def test_constants_of_the_parameters_inside_of_a_transform(normal):
    def fn(p, x):
        def energy(z):
            with torch.no_grad():
                u = torch.mv(p["w"], torch.ones(3, device=z.device))
                scale = torch.dot(u, u).sqrt()
            weight = torch.where(p["w"].detach().abs() > 0.1, p["w"], 0.0) / scale + (p["w"].round() - p["w"]).detach()
            return F.linear(z, weight).tanh().sum() * (2.0 if scale > 0.5 else 1.0)

        return torch.func.hessian(energy)(x).square().sum() + torch.func.grad(energy)(x).sum() * energy(x)

    params, x = {"w": normal(4, 3)}, normal(5, 3)
    assert_agrees(Problem(fn, (params, x)))
    assert not are_lifted(fn, params, x)


def test_a_detached_parameter_that_an_inner_transform_differentiates_for(normal):
    def fn(p, x):
        slopes = torch.func.grad(lambda w: F.linear(x, w).square().sum())(p["w"].detach())
        return (F.linear(x, p["w"] - 0.1 * slopes)).sin().sum()

    assert_agrees(Problem(fn, ({"w": normal(4, 3)}, normal(5, 3))))


def penalised(calls, p, x):
    calls.append(1)
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad((x @ p).tanh().sum(), x, create_graph=True)
    return slope.square().sum()


class Penalised:
    def __init__(self, calls):
        self.calls = calls

    def __call__(self, p, x):
        return penalised(self.calls, p, x)


@pytest.mark.parametrize("wrap", [lambda calls: functools.partial(penalised, calls), Penalised, lambda calls: Penalised(calls).__call__])
def test_a_function_that_calls_autograd_is_remembered_under_its_wrappers(wrap, device):
    calls = []
    norm, args = psg.per_sample_norm(wrap(calls)), (torch.randn(3, device=device), torch.randn(4, 3, device=device))
    norm(*args)
    calls.clear()
    norm(*args)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "inner",
    [
        lambda p, x: grad(lambda z: p.square().sum())(x).sum(),
        lambda p, x: jacrev(lambda z: p.sum(0))(x).sum(),
        lambda p, x: vmap(grad(lambda z: p.square().sum()))(x.reshape(2, 2)).sum(),
        lambda p, x: vjp(lambda z: (p.sum(0), F.linear(z, p).sin()), x)[1]((x, x[:2]))[0].square().sum(),
        lambda p, x: vjp(lambda z: F.embedding(torch.tensor([0, 1], device=z.device), p), x)[1](p)[0].sum(),
    ],
)
def test_what_does_not_depend_on_the_data_has_no_derivative_for_it(inner, device):
    p, x = torch.randn(2, 4, device=device), torch.randn(3, 4, device=device)
    fn = lambda p, x: inner(p, x) + F.linear(x, p).sin().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(p, x), loop_grad(fn)(p, x))


# torch's own nested vmap gets these ops wrong where the operands, or operand and cotangent, are batched by different vmaps. Its error is
# silent where sizes coincide, so sizes are drawn from few. The loop of psg.testing runs only fn's own transform.


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap"])
@given(data=st.data())
def test_prelu_under_several_vmaps(method, data):
    n, k = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
    channels = data.draw(st.sampled_from([1, 3]))
    w, x = torch.randn(channels), torch.randn(n, k, 3)
    form = data.draw(
        st.sampled_from(
            [
                lambda w, x: vmap(grad(lambda z: F.prelu(z[None], w).square().sum()))(x).sin().sum(),
                lambda w, x: jacrev(lambda z: F.prelu(z, w).square())(x).sin().sum(),
                lambda w, x: jacrev(lambda a: F.prelu(x, a).square())(w).sin().sum(),
                lambda w, x: vmap(lambda z: vjp(lambda a: F.prelu(x, a), w)[1](z * x)[0])(x).sin().sum(),
                lambda w, x: vmap(grad(lambda z: F.prelu(z * w.sum(), x[0, :1]).sin().sum()))(x).sum(),
                lambda w, x: psg.per_sample_norm(lambda w, z: (F.prelu(z[None], w) ** 3).sum())(w, x).sum(),
            ]
        )
    )
    assert_trees_close(psg.per_sample_grad(form, method=method)(w, x), loop_grad(form)(w, x))


def test_prelu_of_an_ensemble():
    params = {"w": torch.randn(3, 4, 2), "a": torch.rand(3, 4), "v": torch.randn(3, 1, 4)}
    x = torch.randn(3, 1, 2)

    def fn(p, x):
        return F.linear(F.prelu(F.linear(x, p["w"]), p["a"]), p["v"]).sin().sum()

    found = vmap(lambda p: psg.per_sample_grad(fn)(p, x))(params)
    expected = [loop_grad(fn)({name: p[i] for name, p in params.items()}, x) for i in range(3)]
    assert_trees_close(found, {name: torch.stack([tree[name] for tree in expected]) for name in params}, per_sample=False)


def test_prelu_of_infinite_inputs():
    x = torch.tensor([[math.inf, 1.0], [2.0, -1.0]])
    assert_trees_close(
        psg.per_sample_grad(lambda w, x: F.prelu(x, w).clamp(max=3).sum())(torch.tensor([0.5]), x), torch.tensor([[0.0], [-1.0]])
    )


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")  # by torch's huber_loss in the loop
@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.parametrize("method", ["auto", "vmap"])
@given(n=st.integers(0, 4), k=st.integers(1, 4), swapped=st.booleans(), derived=st.booleans())
def test_losses_whose_operands_are_batched_by_different_vmaps(method, loss, reduction, n, k, swapped, derived):
    w, x, y, shifts = torch.randn(4, 3), torch.randn(n, 3), torch.randn(n, 4), torch.randn(k, 3)

    def one(w, x, y, shift):
        output = w @ (x + shift)
        return loss(y, output, reduction=reduction) if swapped else loss(output, y, reduction=reduction)

    def fn(w, x, y):
        inner = vmap(one, in_dims=(None, None, None, 0))
        return inner(w, x, y, shifts).sin().sum() if not derived else vmap(grad(lambda s: one(w, x, y, s)))(shifts).sin().sum()

    assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x, y), loop_grad(fn)(w, x, y))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")  # of the hook
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("order", ["jvp", "third"])
@pytest.mark.parametrize(
    "norm",
    [lambda z: F.layer_norm(z, (3,), eps=0.5), lambda z: F.instance_norm(z[None], eps=0.5), lambda z: F.group_norm(z[None], 2, eps=0.5)],
    ids=["layer", "instance", "group"],
)
def test_higher_derivatives_of_norms_inside(norm, order, hooked, method):
    """torch's own are wrong, in every loop: compare with differences of the values."""

    def fn(w, x):
        scale = w * 1
        if hooked:
            scale.register_hook(lambda cotangent: cotangent)  # which capture refuses
        if order == "jvp":
            return torch.func.jvp(lambda y: norm(y * scale), (x,), (x.cos(),))[1].sin().sum()
        return grad(lambda z: grad(lambda z: norm(z * scale).sin().sum())(z).sin().sum())(x).sin().sum()

    w, x, direction, step = torch.randn(2, 3), torch.randn(2, 2, 3), torch.randn(2, 3), 1e-4
    found = (psg.per_sample_grad(fn, method=method)(w, x) * direction).sum((1, 2))
    ends = [torch.stack([fn((w + side * direction).requires_grad_(), own) for own in x]).detach() for side in (step, -step)]
    torch.testing.assert_close(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize(
    "constant", [lambda w: w > 0, lambda w: w.detach(), lambda w: w[w.argsort()], lambda w: 1.0], ids=["mask", "detached", "order", "none"]
)
def test_constants_of_a_pass_around_psg(constant, method):
    s = torch.tensor([1.0, 2.0])

    def fn(w, x):
        inner = psg.per_sample_norm(lambda z, s: (w * constant(w) * z * s).sin().sum())
        clipped = psg.clipped_grad(lambda z, s: (constant(w) * w * z * s).cos().sum(), clip_norm=1.0)
        return inner(x, s).sum() + clipped(x, s).grads.sum()

    w, x = torch.randn(4), torch.randn(3, 4)
    assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x), loop_grad(fn)(w, x))


# --- Python values and masks inside of derivatives --------------------------------------------------------------------------------


# Each reads values of q, for which fn differentiates, of the integers z or of the parameter w: [2, 3], [2] and [3].

READS = {
    "int": lambda w, q, z: (q @ w).tanh().sum() * int(z.max() < 5),
    "bool": lambda w, q, z: (q @ w).tanh().sum() if q.norm() < 9 else q.sum(),
    "a branch": lambda w, q, z: (q @ w).tanh().sum() if q.sum() > 0 else (q @ w).sin().sum(),
    "item": lambda w, q, z: (q @ w).tanh().sum() * z.sum().item(),
    "float": lambda w, q, z: (q @ w).tanh().sum() * float(q.sum() > 0),
    "tolist": lambda w, q, z: (q @ w).tanh().sum() * sum((z * 2).tolist()),
    "format": lambda w, q, z: (q @ w).tanh().sum() * len(f"{z.max() * 6}"),
    "a size": lambda w, q, z: (q[: z.max()] @ w).tanh().sum(),
    "of a parameter": lambda w, q, z: (q @ w).tanh().sum() * float(w.detach().norm()) if w.norm() > 0 else q.sum(),
    "in a vmap": lambda w, q, z: vmap(lambda row: (row @ w).tanh() * int(z.max() < 5))(q).sum(),
    "a mask": lambda w, q, z: (q[q[:, 0] > -9] @ w).tanh().sum(),
    "a mask of each sample's own": lambda w, q, z: (q[q[:, 0] == q[:, 0].max()] @ w).tanh().sum(),
    "a mask of different counts": lambda w, q, z: (q[z > 0] @ w).tanh().sum() + q.square().sum(),
    "masked_select": lambda w, q, z: (q * w).masked_select(z[:, None] > 0).tanh().sum(),
    "nonzero": lambda w, q, z: (q @ w)[torch.nonzero(z)[:, 0]].tanh().sum(),
    "where": lambda w, q, z: (q @ w)[torch.where(q[:, 0] == q[:, 0].max())].tanh().sum(),
    "a write": lambda w, q, z: written(q * w, q[:, 0] == q[:, 0].max(), w * q.sum()).tanh().sum(),
}


def written(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize("n", [0, 1, 9])
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev", "grad of grad", "jvp of grad", "grad of jvp"])
@pytest.mark.parametrize("read", READS)
def test_values_read_inside_of_derivatives(read, transform, n, normal, device):
    z = torch.tensor([[0, 1], [1, 1]], device=device).repeat(5, 1)[:n]

    def fn(w, x, z):
        return TRANSFORMS[transform](lambda w, q: READS[read](w, q, z), w, x)

    assert_agrees(Problem(fn, (normal(3), normal(n, 2, 3), z)))


@pytest.mark.parametrize(
    "read",
    [lambda row: row.sum() > 0, lambda row: int(row.sum()), lambda row: row[row > 0], torch.nonzero],
    ids=["bool", "int", "mask", "nonzero"],
)
def test_what_a_vmap_of_fn_batches_has_no_value_inside_of_derivatives_either(read, normal):
    def fn(w, x):
        return grad(lambda q: vmap(lambda row: (row @ w).sin() if read(row) is not None and bool(read(row).sum()) else row.sum())(q).sum())(
            x
        ).sum()

    with pytest.raises(RuntimeError, match="vmap: "):
        psg.per_sample_grad(fn)(normal(3), normal(4, 2, 3))


def noisy(x):
    return x + torch.randn_like(x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: grad(lambda q: (q @ w).sin() if noisy(q).sum() > 0 else (q @ w).cos())(x).sum(),
        lambda w, x: grad(lambda q: (q @ w).sin() if q.sum() > 0 else (q @ w).cos())(noisy(x)).sum(),
        lambda w, x: grad(lambda q: (q[noisy(q) > -99] * w).prod())(x).sum(),
        lambda w, x: (w @ x).sin() * int(grad(lambda q: (q * noisy(q)).sum())(x).sum() > 0),
        lambda w, x: (w @ x).sin() * int(vmap(torch.sin)(noisy(x)).sum() > 0),
        lambda w, x: grad(lambda q: (w @ q).sin() * int(torch.func.jvp(torch.sin, (x,), (noisy(x),))[1].sum() > 0))(x).sum(),
    ],
    ids=["inside", "outside", "a mask", "out of grad", "out of vmap", "a tangent"],
)
def test_random_numbers_read_inside_of_derivatives_or_after_them(fn, normal):
    """Samples that agree must not draw again together; marks of random numbers do not pass through transforms of fn's own."""
    with pytest.warns(psg.FallbackWarning, match="takes a Python value from random numbers"):
        psg.per_sample_grad(fn)(normal(3), normal(4, 3))


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
def test_values_read_before_random_numbers_are_drawn(normal):
    def fn(w, x):
        return F.dropout(grad(lambda q: (q @ w).sin() * int(q.norm() < 99))(x)).sum()

    w, x = normal(3), normal(4, 3)
    grads = psg.per_sample_grad(fn)(w, x)
    kept = torch.cartesian_prod(*[torch.tensor([0.0, 2.0], device=w.device)] * 3)  # what dropout may multiply by
    sines, cosines = (x @ w).sin()[:, None, None], (x @ w).cos()[:, None, None]
    possible = kept * cosines - (kept @ w)[:, None] * sines * x[:, None]
    assert ((possible - grads[:, None]).abs().amax(2) < 1e-12).any(1).all()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("write", [written, lambda t, index, value: t.clone().index_put_((index,), value)], ids=["setitem", "index_put_"])
@pytest.mark.parametrize(
    "inner",
    [
        lambda write, w, x, index: vmap(lambda c: write(x * w * c, index, w * c))(x[0, :2]),
        lambda write, w, x, index: vmap(lambda c: write(x * w * c, index, x[:2]))(x[0, :2]),
        lambda write, w, x, index: vmap(lambda c: torch.func.jvp(lambda q: write(q * w, index, q[0] * w), (x,), (x * c,))[1])(x[0, :2]),
    ],
    ids=["values", "what is written into", "tangents"],
)
def test_writes_at_indices_under_a_vmap_of_fn(inner, write, method, normal):
    """Two vmaps, one of which does not batch the indices: torch takes the dimension of one for that of the indices."""

    def fn(w, x):
        return inner(write, w, x, x[:, 0].topk(2).indices).sin().sum()

    w, x = normal(3), normal(4, 5, 3)
    with pytest.raises(psg.PsgError, match="nested vmaps") if method == "vmap" else contextlib.nullcontext():
        assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x), loop_grad(fn)(w, x))


FORWARD = {
    "a jvp": lambda f, A, v: torch.func.jvp(f, (A,), (v,))[1],
    "a jvp of the gradient": lambda f, A, v: torch.func.jvp(grad(f), (A,), (v,))[1],
    "the gradient of a jvp": lambda f, A, v: grad(lambda A: torch.func.jvp(f, (A,), (v,))[1])(A),
}


@given(
    rows=st.sampled_from([(), (2,)]),
    op=st.sampled_from([torch.linalg.det, lambda A: torch.linalg.slogdet(A)[1], lambda A: A.slogdet()[0] * A.det(), torch.logdet]),
    forward=st.sampled_from(sorted(FORWARD)),
    matrix=st.sampled_from(["w", "x", "w x"]),
    layout=st.sampled_from(["dense", "every second", "one for all", "transposed"]),
    n=st.integers(0, 3),
)
def test_forward_mode_through_determinants_of_any_layout(rows, op, forward, matrix, layout, n):
    """torch asks the layout of A whether its factors are those of the transpose; a sample's may differ from its batch's."""
    w, x = torch.randn(*rows, 3, 3), torch.randn(n, *rows, 3, 3)
    x = {
        "dense": x,
        "every second": x.repeat_interleave(2, 0)[::2],
        "one for all": torch.randn(*rows, 3, 3).expand(n, *rows, 3, 3),
        "transposed": x.mT.contiguous().mT,
    }[layout]

    def fn(w, x):
        A = {"w": w, "x": x, "w x": w * x}[matrix]
        return FORWARD[forward](lambda A: (op(A) * w.sum() * x.sum()).sin().sum(), A, A.cos()).sin().sum()

    for method in ("capture", "vmap"):
        assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x), loop_grad(fn)(w, x))


@pytest.mark.parametrize("op", [torch.linalg.det, torch.logdet, lambda A: torch.linalg.slogdet(A)[1]], ids=["det", "logdet", "slogdet"])
def test_dual_numbers_through_determinants_of_a_part_of_a_sample(op):
    """The same in a level of forward mode that fn opens itself: the sample's matrix is contiguous, those of the batch lie apart."""

    def fn(w, x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x[0], x[1].cos())
            return forward_ad.unpack_dual(op(dual)).tangent * w.sum()

    w, x = torch.randn(3, 3), torch.randn(4, 2, 3, 3).abs() + 2 * torch.eye(3)
    assert_trees_close(psg.per_sample_grad(fn, method="vmap")(w, x), loop_grad(fn)(w, x))
