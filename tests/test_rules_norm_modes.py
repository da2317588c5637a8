"""Normalisation by given statistics, in every memory layout, under autocast and in half precision."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, on
from cases import Problem, parameters, score
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg.testing import assert_trees_close, default_rtol, loop_grad, loop_value_and_grad, shapes, tensors

each_rule = st.sampled_from([True, False])
OPS = {
    "batch_norm": F.batch_norm,
    "instance_norm": lambda x, mean, var, weight, bias, eps: F.instance_norm(x, mean, var, weight, bias, use_input_stats=False, eps=eps),
}


@st.composite
def problems(draw, op):
    """Statistics that are buffers, shared arguments, or each sample's own; weight, bias or both."""
    n, images, channels = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    spatial = draw(shapes(min_dims=0 if op == "batch_norm" else 1, max_dims=3, max_side=3))
    names = draw(st.lists(st.sampled_from(["weight", "bias"]), min_size=1, unique=True))
    params = {name: draw(tensors((channels,))) for name in names}
    kind = draw(st.sampled_from(["buffers", "shared", "of the sample"]))
    shape = (n, channels) if kind == "of the sample" else (channels,)
    mean, var = draw(tensors(shape)), draw(tensors(shape)).square() + 0.5
    eps = draw(st.sampled_from([1e-5, 1e-1]))
    x = draw(tensors((n, images, channels, *spatial)))
    before = draw(st.booleans())  # whether an op before it has a parameter too
    if before:
        params["scale"] = draw(tensors(()))

    def fn(p, x, given_mean, given_var):
        m, v = (mean.to(x.device), var.to(x.device)) if kind == "buffers" else (given_mean, given_var)
        return score(OPS[op](x * p["scale"] if before else x, m, v, p.get("weight"), p.get("bias"), eps=eps))

    dim = 0 if kind == "of the sample" else None
    return Problem(fn, (params, x, mean, var), options={"in_dims": (None, 0, dim, dim)})


@pytest.mark.parametrize("op", OPS)
@given(data=st.data(), rules=each_rule)
def test_by_given_statistics(op, data, rules, device):
    fall = "" if rules or device.type == "cpu" else "under vmap torch's kernel of a GPU refuses some layouts of few numbers"
    assert_agrees(on(data.draw(problems(op)), device), rules=rules, may_fall=fall)


MODULES = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "BatchNorm1d of sequences": (lambda: nn.BatchNorm1d(3), (3, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 4, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 4, 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_evaluation_mode_take_the_rule(name, device):
    build, sample = MODULES[name]
    module = build().to(device)
    with torch.no_grad():
        module(2 * torch.randn(20, *sample, device=device) + 1)  # statistics that are not 0 and 1
    module.eval()

    def fn(params, x):
        return score(functional_call(module, params, (x[None],)))

    problem = Problem(fn, (parameters(module), torch.randn(3, *sample, device=device)))
    assert_agrees(problem)
    op = "instance_norm" if "Instance" in name else "batch_norm"
    for leaf in psg.explain(fn)(*problem.args).leaves:
        assert leaf.uses == {f"{op}: rule": 1} and leaf.kind == "Dense"


def test_channels_last_cotangents(device):
    # A contiguous input and a channels-last cotangent, for which eager torch has been wrong: the reference writes the norm out.
    weight, bias = torch.randn(2, 3, device=device)
    mean, var = torch.randn(3, device=device), torch.rand(3, device=device) + 0.5
    kernel = torch.randn(3, 3, 1, 1, device=device)
    last = torch.randn(4, 3, 3, 3, device=device).to(memory_format=torch.channels_last)

    def fn(normalize):
        def loss(p, x):
            return score(F.conv2d(normalize(F.conv2d(x, p["kernel"]), p), last))

        return loss

    def written_out(x, p):
        column = [value[:, None, None] for value in (mean, (var + 1e-5).rsqrt(), p["weight"], p["bias"])]
        return (x - column[0]) * column[1] * column[2] + column[3]

    args = ({"kernel": kernel, "weight": weight, "bias": bias}, torch.randn(3, 2, 3, 6, 6, device=device))
    grads = psg.per_sample_grad(fn(lambda x, p: F.batch_norm(x, mean, var, p["weight"], p["bias"])))(*args)
    assert_trees_close(grads, loop_grad(fn(written_out))(*args))


NORMS = {
    "layer_norm": lambda x, p, s: F.layer_norm(x.movedim(1, -1), (6,), p["weight"], p["bias"], eps=0.5),
    "rms_norm": lambda x, p, s: F.rms_norm(x.movedim(1, -1), (6,), p["weight"], eps=0.5) + p["bias"],
    "group_norm": lambda x, p, s: F.group_norm(x.mT.contiguous().mT, 2, p["weight"], p["bias"], eps=0.5),
    "instance_norm": lambda x, p, s: F.instance_norm(x, weight=p["weight"], bias=p["bias"], eps=0.5),
    "batch_norm": lambda x, p, s: F.batch_norm(x, *s, p["weight"], p["bias"], eps=0.5),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("mode", ["bfloat16", "float16", "autocast", "autocast of a product"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's remark on rms_norm under autocast
def test_half_precision(name, mode, device):
    # Compared with float64: the rule's error must be within that of half precision, and its dtypes must be torch's.
    half = torch.float16 if mode == "float16" else torch.bfloat16
    autocast = mode.startswith("autocast")
    dtype = torch.float32 if autocast else half
    params = {key: torch.randn(6, device=device).to(dtype) for key in ("weight", "bias")}
    statistics = [torch.randn(6, device=device).to(dtype), (torch.rand(6, device=device) + 0.5).to(dtype)]
    mix, x = torch.randn(4, 4, device=device).to(dtype), torch.randn(3, 2, 6, 4, device=device).to(dtype)
    found = []

    def loss(lowered):
        def fn(p, x, mix, statistics):
            with torch.autocast(device.type, dtype=half, enabled=autocast and lowered):
                y = NORMS[name](F.linear(x, mix) if mode == "autocast of a product" else x, p, statistics)
            if lowered:
                found.append(y.dtype)
            return score(y.double())

        return fn

    args, options = (params, x, mix, statistics), {"in_dims": (None, 0, None, None)}
    values, grads = psg.per_sample_value_and_grad(loss(True), **options)(*args)
    wide = ({k: v.double() for k, v in params.items()}, x.double(), mix.double(), [s.double() for s in statistics])
    wide_values, wide_grads = loop_value_and_grad(loss(False), **options)(*wide)
    rtol = 4 * default_rtol(torch.float32 if mode == "autocast" else half)
    assert_trees_close(values.double(), wide_values, rtol=rtol)
    assert {grad.dtype for grad in grads.values()} == {dtype}
    assert_trees_close({key: grad.double() for key, grad in grads.items()}, wide_grads, rtol=rtol)
    (ruled,) = set(found)
    found.clear()
    loop_grad(loss(True), **options)(*args)
    assert set(found) == {ruled}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("method", ["capture", "vmap", "loop", "batch"])
def test_channels_last_cotangents_of_single_images(method, affine, kind, dims, n, device):
    """Cotangents as tokens give them. torch's own backward on a CPU is wrong for one image then; psg's loops avoid that."""
    norm = getattr(nn, kind.__name__.replace("1", str(dims)))(3, affine=affine).to(device).eval()
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 3, 3, padding=1).to(device)
    frozen = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}
    params = {name: value.detach() for name, value in conv.named_parameters()}
    x, y = torch.randn(n, 2, *(4, 5, 3)[:dims], device=device), torch.randn(n, math.prod((4, 5, 3)[:dims]), 3, device=device)
    frozen = {name: value.detach() for name, value in frozen.items()}

    def score(params, x, y, tokens):
        output = torch.func.functional_call(norm, frozen, (torch.func.functional_call(conv, params, (x,)),))
        if tokens:
            return (output.flatten(2).transpose(1, 2) * y).sum((1, 2))
        return (output.flatten(2) * y.transpose(1, 2).contiguous()).sum((1, 2))

    def one(params, x, y, tokens):
        return score(params, x[None], y[None], tokens)[0]

    expected = loop_grad(one)(params, x, y, tokens=False)
    assert_trees_close(psg.per_sample_grad(score if method == "batch" else one, method=method)(params, x, y, tokens=True), expected)
    assert_trees_close(loop_grad(one)(params, x, y, tokens=True), expected)


def _with_gaps(tensor):
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


@pytest.mark.parametrize("layout", ["samples' channels last", "weight", "bias", "mean", "var"])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 1), (1, 3, 5), (1, 3, 2, 4), (2, 3, 2, 4), (1, 3, 2, 2, 3)])
@pytest.mark.parametrize("method", ["capture", "vmap", "loop", "oracle"])
def test_batch_norm_whatever_the_layout(method, shape, layout, device):
    """Torch's own backward on a CPU is wrong for memory with gaps if the input is [batch, channels], and for one channels-last image
    with a contiguous cotangent."""
    params = {"scale": torch.tensor(1.3, device=device), "weight": torch.randn(3, device=device), "bias": torch.randn(3, device=device)}
    statistics = {"mean": torch.randn(3, device=device), "var": torch.rand(3, device=device) + 0.5}
    x = torch.randn(3, *shape, device=device)

    def loss(params, x, layout):
        own = {**params, **statistics, "x": x * params["scale"]}
        if layout in own:
            own[layout] = _with_gaps(own[layout])
        elif layout is not None:
            images = [image.movedim(0, -1).contiguous().movedim(-1, 0) for image in own["x"]]
            own["x"] = images[0][None] if len(images) == 1 else torch.stack(images, -1).movedim(-1, 0)
        output = F.batch_norm(own["x"], own["mean"], own["var"], own["weight"], own["bias"])
        return output.sin().square().sum()

    def written_out(params, x, layout):
        wide = (1, 3, *(1 for _ in shape[2:]))
        mean, var, weight, bias = (value.reshape(wide) for value in (*statistics.values(), params["weight"], params["bias"]))
        return (weight * (x * params["scale"] - mean) / (var + 1e-5).sqrt() + bias).sin().square().sum()

    gradients = loop_grad(loss) if method == "oracle" else psg.per_sample_grad(loss, method=method)
    assert_trees_close(gradients(params, x, layout=layout), loop_grad(written_out)(params, x, layout=None))


@pytest.mark.parametrize("gradients", [loop_grad, partial(psg.per_sample_grad, method="loop"), psg.check])
def test_batch_norm_keeps_its_layout(gradients, device):
    """Only a channels-last output can be viewed as flat after the permutation."""
    mean, var = torch.randn(3, device=device), torch.rand(3, device=device) + 0.5

    def loss(w, x, last):
        images = (x[None] * w).to(memory_format=torch.channels_last if last else torch.contiguous_format)
        output = F.batch_norm(images, mean, var).permute(0, 2, 3, 1)
        return (output.view(-1) if last else output.reshape(-1)).sin().square().sum()

    w, x = torch.randn(3, 1, 1, device=device), torch.randn(4, 3, 5, 6, device=device)
    if gradients is psg.check:
        psg.check(loss, method="loop")(w, x, last=True)
    else:
        assert_trees_close(gradients(loss)(w, x, last=True), loop_grad(loss)(w, x, last=False))


@pytest.mark.parametrize("gradients", [loop_grad, partial(psg.per_sample_grad, method="loop")])
def test_batch_norm_to_which_no_cotangent_comes(gradients, device):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, cotangent):
            return None

    def loss(w, x):
        return Stop.apply(F.batch_norm(x * w, torch.zeros(3, device=device), torch.ones(3, device=device))).sum() + w.square().sum()

    w = torch.randn(3, device=device)
    assert_trees_close(gradients(loss)(w, torch.randn(4, 5, 3, device=device)), (2 * w).expand(4, 3))


_ATEN = torch.ops.aten


@pytest.mark.parametrize("op", [_ATEN.batch_norm.default, _ATEN.native_batch_norm.default, _ATEN.batch_norm, _ATEN.native_batch_norm])
def test_running_statistics_in_graphs_of_exported_programs(op, device):
    def loss(w, x):
        options = () if "native" in str(op) else (False,)
        output = op(x * w, None, None, torch.zeros(3, device=device), torch.ones(3, device=device), True, 0.1, 1e-5, *options)
        return (output[0] if isinstance(output, tuple) else output).sin().sum()

    with pytest.raises(psg.StateError, match="updates its running statistics"):
        psg.per_sample_grad(loss, method="loop")(torch.randn(3, device=device), torch.randn(4, 5, 3, device=device))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("weight", [None, torch.float32])
@pytest.mark.parametrize("of", [lambda w, x: w @ x, lambda w, x: w], ids=["data", "parameters"])
def test_group_norm_of_small_numbers_of_half_precision_inside_transforms(of, weight, autocast, half, device):
    """The third power of one over their standard deviation is beyond float16."""
    w, x, c = (torch.randn(shape, device=device).to(half) for shape in ((8, 4), (2, 4, 4), (2, 8, 4)))
    gain = None if weight is None else torch.ones(8, dtype=weight, device=device)

    def loss(w, x, c):
        with torch.autocast(device.type, half, enabled=autocast):
            y = F.group_norm((0.003 * of(w, x))[None], 2, gain)[0]
        assert autocast or y.dtype == c.dtype
        return (y * c).sum()

    expected = loop_grad(loss)(w, x, c)
    for method in ("capture", "vmap"):
        assert_trees_close(psg.per_sample_grad(loss, method=method)(w, x, c), expected, rtol=4 * default_rtol(half))
    (found,) = torch.func.vmap(lambda w: psg.per_sample_grad(loss)(w, x, c))(w[None])
    assert_trees_close(found, expected, rtol=4 * default_rtol(half))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [2, 8])
@pytest.mark.parametrize("of", [lambda p, x: x @ p["mix"], lambda p, x: p["mix"]], ids=["data", "parameters"])
def test_layer_norm_of_half_precision_with_weights_of_float32(of, features, half, device):
    """Two normalised features are 1 and -1, whatever the input: the terms of the gradients before them cancel."""
    params = {"weight": torch.randn(features, device=device).float(), "bias": torch.randn(features, device=device).float()}
    params["mix"] = torch.randn(features, features, device=device).to(half)
    x, c = torch.randn(3, features, features, device=device).to(half), torch.randn(3, features, features, device=device).to(half)

    def loss(p, x, c):
        return (F.layer_norm(of(p, x), (features,), p["weight"], p["bias"]) * c).sum()

    expected = loop_grad(loss)(params, x, c)
    for method in ("auto", "capture", "vmap"):
        assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x, c), expected, rtol=8 * default_rtol(half), name=method)
