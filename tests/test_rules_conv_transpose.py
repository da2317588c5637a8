"""Transposed convolutions over drawn shapes and options: input and cotangent swap roles."""

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_derivatives_agree, on
from cases import Problem, parameters, score
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg.testing import layouts, tensors

OPS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@st.composite
def problems(draw, dims):
    """Every valid option; an output padding of a stride or more, where a larger dilation allows it."""
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    n = draw(st.integers(0, 3))
    images = draw(st.sampled_from([None, 1, 2]))  # None: one image without a batch dimension of its own
    groups = draw(st.integers(1, 3))
    i, o = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    spatial, kernel, stride, dilation = each(1, 3), each(1, 3), each(1, 3), each(1, 3)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    reach = [(t - 1) * s + d * (k - 1) + e for t, k, s, d, e in zip(spatial, kernel, stride, dilation, extra, strict=True)]
    padding = tuple(draw(st.integers(0, min(2, r // 2))) for r in reach)  # something must be left of the output
    options = {"stride": stride, "padding": padding, "output_padding": extra, "dilation": dilation, "groups": groups}
    if dims == 1 and draw(st.booleans()):
        options = {name: option[0] if isinstance(option, tuple) else option for name, option in options.items()}
    params = {"weight": draw(layouts(draw(tensors((i, o // groups, *kernel)))))}
    if draw(st.booleans()):
        params["bias"] = draw(tensors((o,)))
    frozen = draw(st.sampled_from([(), ("weight",), ("bias",)])) if "bias" in params else ()
    fixed = {name: params.pop(name) for name in frozen}
    x = draw(layouts(draw(tensors((n, *(() if images is None else (images,)), i, *spatial)))))

    def fn(p, x):
        weights = {**{name: tensor.to(x.device) for name, tensor in fixed.items()}, **p}
        return score(OPS[dims](x, weights["weight"], weights.get("bias"), **options))

    return Problem(fn, (params, x))


@pytest.mark.parametrize("dims", OPS)
@given(data=st.data(), rules=st.sampled_from([True, False]))
def test_transposed_convolution(dims, data, rules, device):
    assert_agrees(on(data.draw(problems(dims)), device), rules=rules)


@pytest.mark.parametrize("dims", OPS)
@given(data=st.data())
def test_derivatives_of_results(dims, data, device):
    assert_derivatives_agree(on(data.draw(problems(dims)), device))


@given(n=st.integers(0, 3), t=st.integers(2, 4), seed=st.integers(0, 99))
def test_output_padding_of_a_stride(n, t, seed, device):
    # One more window fits into the output than the input has positions.
    torch.manual_seed(seed)
    w, x = torch.randn(2, 3, 2, device=device), torch.randn(n, 1, 2, t, device=device)
    assert_agrees(Problem(lambda w, x: score(F.conv_transpose1d(x, w, stride=1, dilation=3, padding=2, output_padding=2)), (w, x)))


@given(groups=st.integers(1, 3), n=st.integers(0, 3), memory=st.sampled_from(["weight", "input", "both"]), seed=st.integers(0, 99))
def test_channels_last(groups, n, memory, seed, device):
    torch.manual_seed(seed)
    weight, x = torch.randn(2 * groups, 2, 3, 3, device=device), torch.randn(n, 2, 2 * groups, 4, 3, device=device)
    if memory != "input":
        weight = weight.to(memory_format=torch.channels_last)
    if memory != "weight":
        x = x.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, (n, 2))
    assert_agrees(Problem(lambda w, x: score(F.conv_transpose2d(x, w, stride=2, padding=1, groups=groups)), (weight, x)))


def test_groups_do_not_mix(device):
    # Two groups whose gradients are (1, 0) and (0, 1) at different samples: their inner product is zero.
    weight = torch.zeros(2, 1, 1, 1, device=device)
    x = torch.eye(2, device=device).reshape(2, 1, 2, 1, 1)
    factors = psg.factored_grad(lambda w, x: F.conv_transpose2d(x, w, groups=2).sum())(weight, x)
    assert psg.tree.gram(factors).tolist() == [[1, 0], [0, 1]]
    assert psg.tree.norm(factors).tolist() == [1, 1]


@pytest.mark.parametrize(
    "module, sample",
    [
        (lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, groups=2), (4, 5)),
        (lambda: nn.ConvTranspose2d(2, 3, 3, 2, bias=False), (2, 3, 4)),
        (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), (2, 3, 2, 2)),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_modules_take_the_rule(module, sample, batched, device):
    module = nn.Sequential(module(), nn.ReLU(inplace=True)).to(device)
    x = torch.randn(2, *(3,) * batched, *sample, device=device)

    def fn(params, x):
        return score(functional_call(module, params, (x,)))

    assert_agrees(Problem(fn, (parameters(module), x)))
    for leaf in psg.explain(fn)(parameters(module), x).leaves:
        assert set(leaf.uses) == {f"conv_transpose{len(sample) - 1}d: rule"}
        assert leaf.kind == ("Conv" if "weight" in leaf.path else "Dense")


# (in, out, groups, side, kernel, stride): shapes, each with another cheapest algorithm.
CHOICES = [
    (32, 36, 1, 4, 3, 1),
    (64, 64, 1, 3, 3, 2),
    (3, 8, 1, 8, 5, 2),
    (24, 48, 2, 4, 3, 2),
    (16, 16, 16, 6, 3, 1),
    (40, 48, 1, 8, 1, 1),
]


@pytest.mark.parametrize("i, o, groups, side, kernel, stride", CHOICES)
def test_shapes_that_take_every_cost_choice(i, o, groups, side, kernel, stride, device):
    weight = torch.randn(i, o // groups, kernel, kernel, device=device) / (i * kernel)
    x = torch.randn(3, 1, i, side, side, device=device)
    assert_agrees(Problem(lambda w, x: score(F.conv_transpose2d(x, w, stride=stride, groups=groups)), (weight, x)))
