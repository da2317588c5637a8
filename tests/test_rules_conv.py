"""Convolutions over drawn shapes and options."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_derivatives_agree, on
from cases import Problem, score
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import psg
from psg.factors import Geometry
from psg.testing import assert_trees_close, default_rtol, loop_grad, tensors

OPS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@st.composite
def conv_problems(draw, dims):
    """Stride, padding in numbers and words, dilation, groups, images, layouts: any valid combination."""
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    n = draw(st.integers(0, 3))
    images = draw(st.sampled_from([None, 1, 2]))  # None: one image without a batch dimension of its own
    groups = draw(st.integers(1, 3))
    i, o = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, dilation = each(1, 3), each(1, 2)
    kind = draw(st.sampled_from(["numbers", "number", "same", "valid"]))
    stride = (1,) * dims if kind == "same" else each(1, 3)
    padding = {"numbers": lambda: each(0, 2), "number": lambda: draw(st.integers(0, 2))}.get(kind, lambda: kind)()
    # The padded image must hold one window at least; the size beyond that is drawn.
    pads = padding if isinstance(padding, tuple) else (padding if isinstance(padding, int) else 0,) * dims
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    spatial = tuple(max(r - 2 * p, 1) + draw(st.integers(0, 3)) for r, p in zip(reach, pads, strict=True))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if draw(st.booleans()) and dims > 1:
        options["stride"] = stride[0]
    params = {"weight": draw(tensors((o, i // groups, *kernel)))}
    if draw(st.booleans()):
        params["bias"] = draw(tensors((o,)))
    x = draw(tensors((n, *(() if images is None else (images,)), i, *spatial)))
    return Problem(lambda p, x: score(OPS[dims](x, p["weight"], p.get("bias"), **options)), (params, x))


@pytest.mark.parametrize("dims", OPS)
@given(data=st.data(), rules=st.sampled_from([True, False]))
def test_conv(dims, data, rules, device):
    assert_agrees(on(data.draw(conv_problems(dims)), device), rules=rules)


@pytest.mark.parametrize("dims", OPS)
@given(data=st.data())
def test_derivatives_of_results(dims, data, device):
    assert_derivatives_agree(on(data.draw(conv_problems(dims)), device))


@pytest.mark.parametrize("dims", OPS)
@given(
    data=st.data(),
    norm=st.sampled_from(["keep", "gram", "chunks"]),
    gram=st.sampled_from(["pixels", "patches"]),
    materialize=st.sampled_from(["convolution", "samples", "patches"]),
)
def test_conv_by_every_plan(dims, data, norm, gram, materialize, device):
    with psg.plans.using(norm=norm, gram=gram, materialize=materialize):
        assert_agrees(on(data.draw(conv_problems(dims)), device))


@pytest.mark.parametrize("dims", OPS)
@given(data=st.data(), norm=st.sampled_from([None, "keep", "gram", "chunks"]), other_size=st.booleans())
def test_filters_used_several_times(dims, data, norm, other_size, device):
    """Calls on inputs of one size are one factor over all their images."""
    problem = data.draw(conv_problems(dims))

    def fn(params, x):
        larger = problem.fn(params, torch.cat([x, x.sin()], -1)) if other_size else 0
        return problem.fn(params, x) + problem.fn(params, x.sin()) * problem.fn(params, x.cos()) + larger

    with psg.plans.using(norm=norm):
        assert_agrees(on(problem._replace(fn=fn), device))


@pytest.mark.parametrize("dims", OPS)
@given(data=st.data())
def test_patches_of_one_sample_at_a_time(dims, data, device):
    with pytest.MonkeyPatch.context() as patch, psg.plans.using(norm="keep", materialize="patches"):
        patch.setattr(psg._hardware._machine, "chunk_bytes", lambda device, dtype=None: 1)
        assert_agrees(on(data.draw(conv_problems(dims)), device))


@pytest.mark.parametrize("materialize", ["convolution", "samples", "patches", "correlation"])
@given(n=st.integers(0, 3), shape=st.sampled_from([(3, 8, 1, 9), (4, 4, 4, 2), (4, 4, 4, 1), (6, 4, 2, 3)]), seed=st.integers(0, 99))
def test_every_plan_under_transforms(materialize, n, shape, seed, device):
    """Gradients are also materialised in a trace, and with autograd history."""
    torch.manual_seed(seed)
    i, o, groups, side = shape
    geometry = psg.factors.Geometry((3, 3), (1, 1), (1, 1), (1, 1), groups)
    input, cotangent = torch.randn(n, 1, i, side, side, device=device), torch.randn(n, 1, o, side, side, device=device)

    def formed(cotangent, input):
        return psg.factors.Conv(cotangent, input, geometry).materialize()

    def expected(cotangent, input):
        of_one = lambda w, x, c: (F.conv2d(x, w, padding=1, groups=groups) * c).sum()  # noqa: E731
        return loop_grad(of_one)(torch.zeros(o, i // groups, 3, 3, device=device), input, cotangent)

    with psg.plans.using(materialize=materialize):
        assert_trees_close(formed(cotangent, input), expected(cotangent, input))
        assert_trees_close(formed(cotangent.requires_grad_(), input), expected(cotangent.detach(), input))
        twice = torch.func.vmap(formed)(torch.stack([cotangent.detach()] * 2), torch.stack([input, 2 * input]))
        assert_trees_close(twice[1], 2 * expected(cotangent.detach(), input))
        traced = make_fx(formed)(cotangent.detach(), input)
        assert_trees_close(traced(cotangent.detach(), input), expected(cotangent.detach(), input))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("n", [0, 1, 3])
@given(
    groups=st.integers(1, 3),
    same=st.booleans(),
    memory=st.sampled_from(["weight", "input", "both"]),
    seed=st.integers(0, 99),
)
def test_channels_last(own, n, groups, same, memory, seed, device):
    torch.manual_seed(seed)
    weight, x = torch.randn(2 * groups, 2, 3, 3, device=device), torch.randn(n, 2 * groups, 5, 6, device=device)
    if memory != "input":
        weight = weight.to(memory_format=torch.channels_last)
    if memory != "weight":
        x = x.to(memory_format=torch.channels_last)
    padding = "same" if same else 1

    def fn(w, x):
        weight = w * x.mean() if own else w  # one of each sample's own
        return score(F.conv2d(x[None], weight, padding=padding, groups=groups))

    assert_agrees(Problem(fn, (weight, x)))


@pytest.mark.parametrize("n", [0, 1, 3])
@given(
    dims=st.sampled_from([2, 3]),
    groups=st.integers(1, 3),
    transposed=st.booleans(),
    memory=st.sampled_from(["weight", "input", "both"]),
    seed=st.integers(0, 99),
)
def test_derivatives_channels_last(n, dims, groups, transposed, memory, seed, device):
    torch.manual_seed(seed)
    op = {(2, False): F.conv2d, (2, True): F.conv_transpose2d, (3, False): F.conv3d, (3, True): F.conv_transpose3d}[dims, transposed]
    weight = torch.randn(2 * groups, 2, *(3,) * dims, device=device)
    x = torch.randn(n, 2 * groups, *(5, 4, 3)[:dims], device=device)

    def fn(w, x):
        return score(op(x[None], w, padding=1, groups=groups))

    def derivatives(weight, x):
        weight, x = weight.requires_grad_(), x.requires_grad_()
        values, grads = psg.per_sample_value_and_grad(fn)(weight, x)
        return torch.autograd.grad(score(grads) + values.sum(), (weight, x), materialize_grads=True)  # none reaches x if n = 0

    last = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    laid_out = [
        tensor.clone(memory_format=last if memory in (name, "both") else torch.contiguous_format)
        for name, tensor in (("weight", weight), ("input", x))
    ]
    assert_trees_close(derivatives(*laid_out), derivatives(weight, x), per_sample=False)


# (images, in, out, groups, side, kernel): shapes, each with another cheapest algorithm.
CHOICES = [
    (1, 3, 8, 1, 12, 5),
    (1, 32, 36, 1, 4, 3),
    (1, 64, 64, 1, 3, 3),
    (2, 32, 32, 1, 3, 2),
    (1, 24, 48, 2, 4, 3),
    (1, 16, 16, 16, 6, 3),
    (4, 2, 2, 1, 6, 1),
    (1, 40, 48, 1, 8, 1),
    (1, 3, 16, 1, 40, 7),
    (1, 64, 3, 1, 40, 7),
    (1, 16, 16, 16, 5, 5),
    (1, 24, 48, 3, 3, 3),
    (1, 16, 32, 16, 8, 1),
]


@pytest.mark.parametrize("images, i, o, groups, side, kernel", CHOICES)
def test_shapes_that_take_every_cost_choice(images, i, o, groups, side, kernel, device):
    weight = torch.randn(o, i // groups, kernel, kernel, device=device) / (i * kernel)
    x = torch.randn(3, images, i, side, side, device=device)
    assert_agrees(Problem(lambda w, x: score(F.conv2d(x, w, groups=groups)), (weight, x)))


def test_groups_do_not_mix(device):
    # Two groups whose gradients are (1, 0) and (0, 1) at different samples: their inner product is zero.
    weight = torch.zeros(2, 1, 1, 1, device=device)
    x = torch.eye(2, device=device).reshape(2, 2, 1, 1)
    factors = psg.factored_grad(lambda w, x: F.conv2d(x, w, groups=2).sum())(weight, x)
    assert psg.tree.gram(factors).tolist() == [[1, 0], [0, 1]]
    assert psg.tree.norm(factors).tolist() == [1, 1]


def test_the_rule_gives_a_conv(device):
    params = {"weight": torch.randn(4, 3, 2, 2, device=device), "bias": torch.randn(4, device=device)}
    factors = psg.factored_grad(lambda p, x: score(F.conv2d(x, **p)))(params, torch.randn(2, 3, 5, 5, device=device))
    assert isinstance(factors["weight"], psg.factors.Conv)
    assert isinstance(factors["bias"], psg.factors.Dense)


@given(n=st.integers(0, 3), stride=st.integers(1, 2), groups=st.integers(1, 2), seed=st.integers(0, 99))
def test_transposed_convolution_without_a_rule(n, stride, groups, seed, device):
    torch.manual_seed(seed)
    weight, x = torch.randn(2 * groups, 3, 2, 2, device=device), torch.randn(n, 1, 2 * groups, 3, 4, device=device)
    assert_agrees(Problem(lambda w, x: score(F.conv_transpose2d(x, w, stride=stride, groups=groups)), (weight, x)))


@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize("option", [{"stride": (2,)}, {"stride": [1], "padding": [1]}, {"dilation": (1,), "stride": (2,), "groups": 1}])
@pytest.mark.parametrize("op", [F.conv2d, F.conv3d, F.conv_transpose2d, F.conv_transpose3d])
def test_lists_of_one_entry(op, option, method, device):
    # vmap takes the length of the stride for the number of spatial dimensions: it added the bias along a wrong one.
    dims = 2 if op in (F.conv2d, F.conv_transpose2d) else 3

    def fn(p, x):
        return score(op(x, p["weight"] * x.mean(), p["bias"], **option)[..., *(slice(3),) * dims])

    params = {"weight": torch.randn(3, 3, *(2,) * dims, device=device), "bias": torch.randn(3, device=device)}
    x = torch.randn(2, 1, 3, *(7,) * dims, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method=method)(params, x), loop_grad(fn)(params, x))


@pytest.mark.parametrize("groups", [1, 2])
def test_samples_without_images(groups, device):
    params, x = {"w": torch.randn(4, 2, 2, 3, device=device)}, torch.randn(3, 0, 2 * groups, 5, 5, device=device)
    assert_agrees(Problem(lambda p, x: F.conv2d(x, p["w"], groups=groups).square().sum(), (params, x)))


@given(
    size=st.integers(1, 5),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 4),
    dilation=st.integers(1, 2),
)
def test_taps_that_meet_padding_alone(size, kernel, stride, padding, dilation):
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    assume(out > 0)
    met = {tap for tap in range(kernel) for t in range(out) if 0 <= stride * t + dilation * tap - padding < size}
    geometry = Geometry((kernel,), (stride,), (padding,), (dilation,), 1)
    assert geometry.dead_taps((size,), (out,)) == [[tap for tap in range(kernel) if tap not in met]]


def test_positions_that_meet_padding_alone_are_foreseen():
    for size, kernel, padding, dilation in itertools.product(range(1, 5), range(1, 5), range(5), range(1, 6)):
        starts = range(-padding, size + padding - dilation * (kernel - 1))
        alone = any(all(not 0 <= start + dilation * tap < size for tap in range(kernel)) for start in starts)
        geometry = Geometry((2, kernel), (1, 1), (0, padding), (1, dilation), 1)
        assert geometry.may_read_padding_alone((5, size)) or not alone


@pytest.mark.parametrize("materialize", ["samples", None])
@pytest.mark.parametrize("kernel, size, options", [(5, 1, {"padding": 2}), (3, 2, {"padding": 1, "stride": 3}), (7, 2, {"padding": 3})])
def test_half_precision_of_taps_that_meet_padding_alone(kernel, size, options, materialize, device):
    # The native kernel leaves these taps of the gradient uninitialised.
    x, w = (torch.randn(*shape, device=device).bfloat16() for shape in ((200, 20, 1, size, size), (16, 20, kernel, kernel)))

    def fn(w, x):
        return F.conv2d(x.transpose(0, 1), w, **options).float().square().sum()

    filled = [torch.full((w.numel(),), 1e17, dtype=torch.bfloat16, device=device) for _ in range(30)]
    del filled
    with psg.plans.using(materialize=materialize, norm="gram"):
        out = psg.clipped_grad(fn, 1.0)(w, x)
        grads = psg.per_sample_grad(fn)(w, x[:4])
    expected = loop_grad(fn)(w.float(), x[:4].float())
    assert out.grads.double().norm() <= 201
    assert_trees_close(grads.float(), expected, rtol=default_rtol(torch.bfloat16))


@pytest.mark.parametrize("norm", [None, "keep", "gram", "chunks"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"kernel": 2, "stride": 2, "padding": 2}, {"kernel": 1, "stride": 1, "padding": 1}, {"kernel": 2, "padding": 1, "dilation": 5}],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("materialize", [None, "correlation"])
def test_entries_that_meet_only_padding_and_are_not_finite(materialize, value, options, transposed, groups, norm):
    """In float32 torch's kernels disagree on whether zero times such an entry is zero: it must not be so in a norm and NaN in the sum."""
    rest = {name: option for name, option in options.items() if name != "kernel"}
    module = (torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d)(2, 2, options["kernel"], groups=groups, bias=False, **rest)
    loss, params = psg.stateless(module.float(), lambda output, y: (output * y).sum())
    x = torch.randn(3, 2, 4, 4).float()
    y = torch.randn(3, *module(x).shape[1:]).float()
    with psg.plans.using(norm=norm, materialize=materialize):
        expected = psg.clipped_grad(loss, clip_norm=1.0)(params, x[[0, 2]], y[[0, 2]]).grads
        for entry in range(0, (x if transposed else y)[1].numel(), 3):
            given = x.clone(), y.clone()
            given[0 if transposed else 1][1].view(-1)[entry] = value
            out = psg.clipped_grad(loss, clip_norm=1.0)(params, *given)
            assert int(out.nonfinite) == int(not out.norms[1].isfinite())
            if out.nonfinite:
                assert_trees_close(out.grads, expected, per_sample=False)
            else:
                assert out.grads["weight"].isfinite().all()


@given(
    n=st.integers(0, 3), b=st.integers(1, 2), dims=st.integers(1, 3), groups=st.integers(1, 2), stride=st.integers(1, 2),
    padding=st.integers(0, 1), dilation=st.integers(1, 2), transposed=st.booleans(), bias=st.booleans(), atens=st.booleans(),
)  # fmt: skip
def test_all_convolutions_as_one_op(n, b, dims, groups, stride, padding, dilation, transposed, bias, atens):
    """As graphs of ATen's ops have them."""
    op = torch.ops.aten.convolution.default if atens else torch.convolution
    params = {"w": torch.randn(2 * groups, 2, *(2,) * dims)}
    if bias:
        params["b"] = torch.randn(2 * groups)
    x = torch.randn(n, b, 2 * groups, *(4,) * dims)
    geometry = [stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups

    def fn(p, x):
        return op(x, p["w"], p.get("b"), *geometry).sin().sum()

    assert_trees_close(psg.per_sample_grad(fn)(params, x), loop_grad(fn)(params, x))
    assert_trees_close(psg.per_sample_norm(fn)(params, x), psg.per_sample_norm(fn, method="loop")(params, x))


@pytest.mark.filterwarnings("error")
def test_options_may_be_numpys_integers(device):
    sizes = np.array([3, 2, 4])
    w, v, x = (torch.randn(*shape, device=device) for shape in ((2, 3, 3, 3), (3, 2, 3, 3), (4, 1, 3, 8, 8)))
    plain = lambda w, x: F.conv2d(x, w, padding=sizes[0] // 2, stride=(sizes[1], 1)).square().sum()  # noqa: E731
    transposed = lambda v, x: F.conv_transpose2d(x, v, stride=sizes[1], padding=[sizes[1]]).square().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(plain, method="capture")(w, x), loop_grad(plain)(w, x))
    assert_trees_close(psg.per_sample_grad(transposed, method="capture")(v, x), loop_grad(transposed)(v, x))
