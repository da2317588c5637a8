"""Normalisation layers over drawn shapes and options."""

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, on
from cases import N, Problem, score
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg.testing import assert_trees_close, loop_grad, shapes, tensors

each_rule = st.sampled_from([True, False])
counts = st.integers(0, 3)


def some(draw, **params):
    """A drawn subset of the parameters, one of them at least."""
    names = draw(st.lists(st.sampled_from(sorted(params)), min_size=1, unique=True))
    return {name: draw(tensors(params[name])) for name in names}


@st.composite
def layer_norm_problems(draw):
    shape, positions = draw(shapes(min_dims=1, max_dims=2)), draw(shapes(min_dims=0, max_dims=2))
    params = some(draw, weight=shape, bias=shape)
    eps = draw(st.sampled_from([1e-5, 1e-2]))
    x = draw(tensors((draw(counts), *positions, *shape)))
    return Problem(lambda p, x: score(F.layer_norm(x, shape, p.get("weight"), p.get("bias"), eps)), (params, x))


@st.composite
def rms_norm_problems(draw):
    shape, positions = draw(shapes(min_dims=1, max_dims=2)), draw(shapes(min_dims=0, max_dims=2))
    eps = draw(st.sampled_from([None, 1e-5, 1e-2]))
    x = draw(tensors((draw(counts), *positions, *shape)))
    return Problem(lambda p, x: score(F.rms_norm(x, shape, weight=p["weight"], eps=eps)), ({"weight": draw(tensors(shape))}, x))


@st.composite
def group_norm_problems(draw):
    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 3))
    # torch wants more than one value a channel, over images and positions together.
    images = draw(st.integers(1, 2))
    spatial = draw(shapes(min_dims=0, max_dims=2, max_side=3)) if images > 1 else (draw(st.integers(2, 3)), *draw(shapes(0, 1, 2)))
    # Eager torch fails on a bias without a weight: the test below has that case.
    params = {"weight": draw(tensors((channels,))), **(some(draw, bias=(channels,)) if draw(st.booleans()) else {})}
    x = draw(tensors((draw(counts), images, channels, *spatial)))
    return Problem(lambda p, x: score(F.group_norm(x, groups, p.get("weight"), p.get("bias"), 1e-3)), (params, x))


@st.composite
def instance_norm_problems(draw):
    channels, images = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    spatial = (draw(st.integers(2, 3)), *draw(shapes(min_dims=0, max_dims=2, max_side=2)))
    params = some(draw, weight=(channels,), bias=(channels,))
    x = draw(tensors((draw(counts), images, channels, *spatial)))
    return Problem(lambda p, x: score(F.instance_norm(x, weight=p.get("weight"), bias=p.get("bias"), eps=1e-3)), (params, x))


@given(problem=layer_norm_problems(), rules=each_rule)
def test_layer_norm(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=rms_norm_problems(), rules=each_rule)
def test_rms_norm(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=group_norm_problems(), rules=each_rule)
def test_group_norm(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(n=counts, groups=st.integers(1, 3), seed=st.integers(0, 99))
def test_group_norm_of_a_bias_alone(n, groups, seed, device):
    # "tensor does not have a device": eager torch cannot differentiate this call, so the loop runs an equivalent one.
    torch.manual_seed(seed)
    bias, x = torch.randn(2 * groups, device=device), torch.randn(n, 2, 2 * groups, 3, device=device)
    grads = psg.per_sample_grad(lambda b, x: score(F.group_norm(x, groups, bias=b)))(bias, x)
    expected = loop_grad(lambda b, x: score(F.group_norm(x, groups) + b[:, None]))(bias, x)
    assert_trees_close(grads, expected)


@given(problem=instance_norm_problems(), rules=each_rule)
def test_instance_norm(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(n=counts, affine=st.booleans(), seed=st.integers(0, 99))
def test_instance_norm_with_running_statistics(n, affine, seed, device):
    # In evaluation mode the statistics are buffers.
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=affine, track_running_stats=True)).to(device).eval()
    params = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(n, 1, 2, 6, device=device)
    assert_agrees(Problem(lambda p, x: score(functional_call(module, p, (x,))), (params, x)))


def test_the_rules_give_dense_factors(device):
    params = {"weight": torch.randn(4, device=device), "bias": torch.randn(4, device=device)}
    fns = [
        lambda p, x: F.layer_norm(x, (4,), p["weight"], p["bias"]),
        lambda p, x: F.rms_norm(x, (4,), p["weight"]) + p["bias"],
        lambda p, x: F.group_norm(x[None], 2, p["weight"], p["bias"]),
        lambda p, x: F.instance_norm(x[None], weight=p["weight"], bias=p["bias"]),
    ]
    for fn in fns:
        factors = psg.factored_grad(lambda p, x: score(fn(p, x)))(params, torch.randn(2, 4, 4, device=device))  # noqa: B023
        assert all(isinstance(factor, psg.factors.Dense) for factor in factors.values())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_group_norm_with_cotangents_of_any_layout(n, chunk_size, device):
    # The native kernel assumes contiguous cotangents; those of one sample alone keep their strides.
    torch.manual_seed(0)
    params = {"weight": torch.randn(4, device=device), "bias": torch.randn(4, device=device)}

    def normalize(p, x):
        return F.group_norm(x, 2, p["weight"], p["bias"])

    def expanded(p, x):
        return normalize(p, x[None]).sum()

    def transposed(p, x):
        return (x + normalize(p, x.T[None])[0].T).logsumexp((0, 1))

    def transposed_batch(p, x):
        return (x + normalize(p, x.transpose(1, 2)).transpose(1, 2)).logsumexp((1, 2))

    x, rows = torch.randn(n, 4, 3, 3, device=device), torch.randn(n, 3, 4, device=device)
    options = {"chunk_size": chunk_size}
    assert_trees_close(psg.per_sample_grad(expanded, method="capture", **options)(params, x), loop_grad(expanded)(params, x))
    expected = loop_grad(transposed)(params, rows)
    assert_trees_close(psg.per_sample_grad(transposed, method="capture", **options)(params, rows), expected)
    assert_trees_close(psg.per_sample_grad(transposed_batch, method="batch", **options)(params, rows), expected)


@pytest.mark.parametrize("layout", [lambda w: w[:, 1], lambda w: w[0, :1].expand(4), lambda w: w.flatten()[::3][:4]])
def test_group_norm_with_parameters_of_any_layout(layout, device):
    # The native kernel assumes that weight and bias are contiguous, and does not check.
    params = {"weight": torch.randn(4, 3, device=device), "bias": torch.randn(4, 3, device=device)}
    x = torch.randn(3, 4, 3, 2, device=device)

    def fn(p, x):
        return (F.group_norm(x[None], 2, layout(p["weight"]), layout(p["bias"])) ** 3).sum()

    def strided(p, x):
        return (F.group_norm(x[None], 2, p["weight"], p["bias"]) ** 3).sum()

    def frozen(p, x):
        return (F.group_norm(p["bias"].sum() * x[None], 2, layout(params["weight"]), layout(p["bias"])) ** 3).sum()

    own = {name: layout(leaf) for name, leaf in params.items()}
    for function, p in ((fn, params), (strided, own), (frozen, params)):
        assert_trees_close(psg.per_sample_grad(function, method="capture")(p, x), loop_grad(function)(p, x))


@pytest.mark.parametrize(
    "norm", [lambda h, p: F.group_norm(h, 1, p["weight"], p["bias"]), lambda h, p: F.instance_norm(h, None, None, p["weight"])]
)
def test_norms_of_one_channel(norm, device):
    # The weight, repeated for all samples, was a view of one number: the native kernel read beyond it, and what came before the norm had
    # gradients made of stray memory in all samples but the first.
    params = {name: torch.randn(1, device=device) for name in ("scale", "weight", "bias")}
    x = torch.randn(8, 1, 1, 5, device=device)

    def fn(p, x):
        return (norm(x * p["scale"], p) ** 3).sum()

    for part in (params, {"scale": params["scale"]}, {"scale": params["scale"], "bias": params["bias"]}):

        def some(p, x):
            return fn({**params, **p}, x)

        assert_trees_close(psg.per_sample_grad(some, method="capture")(part, x), loop_grad(some)(part, x))


@pytest.mark.parametrize("size", [4, 64])
def test_group_norm_runs_backward_once(size, device):
    """Once for the data and all per-sample gradients, whether psg uses cotangents as they arrive (large) or asks autograd for them."""
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Tanh()) for _ in range(3)), nn.Flatten()).to(device)
    loss, params = psg.stateless(model, lambda out, y: (out.mean() - y.mean()).square())
    x, y = torch.randn(8, 4, size, size, device=device), torch.randn(8, device=device)
    assert_trees_close(psg.clipped_grad(loss, 0.1)(params, x, y).norms, psg.tree.norm(loop_grad(loss)(params, x, y)))
    with torch.autograd.profiler.profile() as profile:
        psg.clipped_grad(loss, 0.1)(params, x, y)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::native_group_norm_backward"] == 3


@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize(
    "norm",
    [
        lambda p, h, x: F.group_norm(h, 2),
        lambda p, h, x: F.group_norm(h, 2, torch.full_like(x[0, 0, :1], 2.0).expand(4)),
        lambda p, h, x: F.group_norm(h, 2, p["b"][:4] * x[0, 0, 0], p["b"][4:]),
        lambda p, h, x: F.group_norm(h, 2, p["b"][:4].clone().index_fill_(0, torch.zeros(1, dtype=torch.long, device=h.device), 1.0)),
    ],
)
def test_group_norm_of_a_part_of_the_channels(norm, method, device):
    """Each sample is contiguous, the batch is not; and weight and bias are no plain parameters, so that no rule runs."""

    def fn(p, x):
        h, gate = F.conv2d(x[None], p["w"], p["b"], padding=1).chunk(2, 1)
        return score(norm(p, h, x) * gate.sigmoid())

    p = {"w": torch.randn(8, 3, 3, 3, device=device), "b": torch.randn(8, device=device)}
    x = torch.randn(N, 3, 5, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method=method)(p, x), loop_grad(fn)(p, x))


@pytest.mark.parametrize(
    "norm",
    [
        lambda p, x: F.group_norm(p["a"], 2, x[0], x[1]),
        lambda p, x: F.group_norm(p["a"], 2, p["w"], x[1]),
        lambda p, x: F.group_norm(2 * p["a"], 2, x[0]),
        lambda p, x: F.group_norm(p["a"][..., 0], 2, None, x[1], eps=0.1),
        lambda p, x: torch.group_norm(p["a"], 2, x[0], x[1]),
    ],
)
def test_group_norm_of_a_parameter_with_weights_of_each_sample(norm, device):
    """As where a generator's learned constant is normalised with each sample's style."""
    p = {"a": torch.randn(1, 4, 5, device=device), "w": torch.randn(4, device=device)}
    x = torch.randn(N, 2, 4, device=device)

    def fn(p, x):
        return score(norm(p, x))

    assert_trees_close(psg.per_sample_grad(fn, method="capture")(p, x), loop_grad(fn)(p, x))


@given(n=st.integers(0, 4), b=st.integers(1, 3), c=st.integers(1, 4), t=st.integers(2, 5), eps=st.sampled_from([1e-5, 1e-2]))
@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w, v, eps: torch.layer_norm(x.mT, w.shape, w, v, eps),
        lambda x, w, v, eps: torch.rms_norm(x.mT, w.shape, w, eps) + v,
        lambda x, w, v, eps: torch.group_norm(x, len(w), w, v, eps),
        lambda x, w, v, eps: torch.instance_norm(x, w, v, None, None, True, 0.1, eps, False),
        lambda x, w, v, eps: torch.batch_norm(x, w, v, None, None, training=True, momentum=0.1, eps=eps, cudnn_enabled=False),
        lambda x, w, v, eps: torch.native_layer_norm(x.mT, w.shape, w, v, eps)[0],
        lambda x, w, v, eps: torch.ops.aten._native_batch_norm_legit.no_stats(x, w, v, True, 0.1, eps)[0],
        lambda x, w, v, eps: torch.ops.aten._native_batch_norm_legit(x, w, v, True, 0.1, eps)[0],
    ],
)
def test_norms_under_their_other_names(norm, n, b, c, t, eps):
    w, v, x = torch.rand(c) + 0.5, torch.randn(c), torch.randn(n, b, c, t)

    def fn(p, x):
        return norm(x, p["w"], p["v"], eps).sin().sum()

    params = {"w": w, "v": v}
    assert_trees_close(psg.per_sample_grad(fn)(params, x), loop_grad(fn)(params, x))
    assert_trees_close(psg.per_sample_norm(fn)(params, x), psg.per_sample_norm(fn, method="loop")(params, x))


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize(
    "normalise",
    [
        lambda input, stats, weight: F.batch_norm(input, *stats, weight, None, False, 0.1, 0.1),
        lambda input, stats, weight: torch.batch_norm(input, weight, None, *stats, False, 0.1, 0.1, False),
        lambda input, stats, weight: torch.native_batch_norm(input, weight, None, *stats, False, 0.1, 0.1)[0],
    ],
)
@given(n=st.sampled_from([0, 1, 3]), rows=st.integers(1, 4), channels=st.integers(1, 3))
@settings(max_examples=8)
def test_batch_norm_of_parameters_alone_with_gaps(normalise, method, device, n, rows, channels):
    """torch's kernel is wrong for weights with gaps between their entries, also where vmap does not batch it."""

    def fn(p, x):
        stats = torch.zeros(channels, device=x.device), torch.ones(channels, device=x.device)
        return normalise(p["b"], stats, p["a"][::2]).square().sum()

    a, b, x = (torch.randn(shape, device=device) for shape in ((2 * channels,), (rows, channels), (n,)))
    by_a = torch.zeros_like(a).index_put((torch.arange(0, 2 * channels, 2, device=device),), 2 * a[::2] * (b.square() / 1.1).sum(0))
    expected = {"a": by_a, "b": 2 * b / 1.1 * a[::2].square()}
    found = psg.per_sample_grad(fn, method=method)({"a": a, "b": b}, x)
    assert_trees_close(found, {key: value.expand(n, *value.shape) for key, value in expected.items()})
