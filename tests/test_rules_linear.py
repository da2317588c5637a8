"""Linear maps over drawn shapes and options: F.linear, matmul, addmm."""

import importlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_derivatives_agree, on
from cases import Problem, score
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg._capture import _backward, _lifted
from psg.testing import assert_trees_close, layouts, shapes, tensors

each_rule = st.sampled_from([True, False])
LINEAR = importlib.import_module("psg.rules.linear")
FEW = st.sampled_from([0, LINEAR._FEW])  # outputs of more numbers than this take another path than those of fewer


@st.composite
def linear_problems(draw):
    """A linear layer on a sample of one to four dimensions, with drawn memory layouts."""
    n, i, o = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 4))
    positions = draw(shapes(min_dims=0, max_dims=3, max_side=3))
    x = draw(layouts(draw(tensors((n, *positions, i)))))
    params = {"weight": draw(layouts(draw(tensors((o, i)))))}
    if draw(st.booleans()):
        params["bias"] = draw(tensors((o,)))
    return Problem(lambda p, x: score(F.linear(x, p["weight"], p.get("bias"))), (params, x))


@st.composite
def stacked_problems(draw):
    """Several linear layers, some frozen, some used twice, with a nonlinearity between them."""
    n, width = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    t = draw(st.integers(1, 3))
    layers = draw(st.lists(st.sampled_from(["a", "b", "frozen weight", "frozen"]), min_size=1, max_size=5))
    frozen, constant = draw(tensors((width, width))), draw(st.sampled_from([None, draw(tensors((width,)))]))
    params = {"a": draw(tensors((width, width))), "b": draw(tensors((width, width))), "bias": draw(tensors((width,)))}

    def fn(p, x):
        for layer in layers:
            weight = p[layer] if layer in p else frozen.to(x.device)
            bias = p["bias"] if layer != "frozen" else None if constant is None else constant.to(x.device)
            x = F.linear(x, weight, bias).tanh()
        return score(x)

    return Problem(fn, (params, draw(tensors((n, t, width)))))


@st.composite
def product_problems(draw):
    """x @ W, spelled in several ways, with position dimensions before the last."""
    n, i, o = draw(st.integers(0, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    positions = draw(shapes(min_dims=0, max_dims=2, max_side=3))
    spelling = draw(
        st.sampled_from(
            [
                lambda x, w: x @ w,
                torch.matmul,
                lambda x, w: x.matmul(w),
                lambda x, w: torch.tensordot(x, w, 1),
                lambda x, w: torch.einsum("...i,io->...o", x, w),
                lambda x, w: F.linear(x, w.T),
                lambda x, w: (w.mT @ x.unsqueeze(-1)).squeeze(-1),
            ]
        )
    )
    return Problem(lambda w, x: score(spelling(x, w)), (draw(tensors((i, o))), draw(tensors((n, *positions, i)))))


@st.composite
def addmm_problems(draw):
    n, t, i, o = draw(st.integers(0, 4)), draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    options = draw(st.fixed_dictionaries({}, optional={"beta": st.sampled_from([0, 1, -2.0]), "alpha": st.sampled_from([0, 1, 0.5])}))
    bias = draw(st.sampled_from([(o,), (1, o), (t, o)]))
    params = {"bias": draw(tensors(bias)), "weight": draw(tensors((i, o)))}
    return Problem(lambda p, x: score(torch.addmm(p["bias"], x, p["weight"], **options)), (params, draw(tensors((n, t, i)))))


@given(problem=linear_problems(), rules=each_rule, few=FEW)
def test_linear(problem, rules, few, device):
    with mock.patch.object(LINEAR, "_FEW", few):
        assert_agrees(on(problem, device), rules=rules)


@given(problem=st.one_of(linear_problems(), stacked_problems(), product_problems(), addmm_problems()))
def test_products_of_few_numbers(problem, device):
    """Each sample multiplies by parameters of its own."""
    with mock.patch.object(_lifted, "_FEW_BYTES", 1 << 17):
        assert_agrees(on(problem, device))
        assert_derivatives_agree(on(problem, device))


def blocks_of_rows(left, right):
    """Three blocks or two, wherever the rows allow it."""
    return next((count for count in (3, 2) if len(left) and len(left) % count == 0), 1)


@given(problem=st.one_of(linear_problems(), stacked_problems()))
def test_products_in_blocks_of_rows(problem, device):
    with mock.patch.multiple(psg._hardware._matmul, row_blocks=blocks_of_rows, _LARGE_PRODUCT=0), mock.patch.object(LINEAR, "_FEW", 0):
        assert_agrees(on(problem, device))


@pytest.mark.parametrize("names", [{"weight"}, {"weight", "bias"}])
@given(
    n=st.sampled_from([0, 1, 3]),
    lead=st.lists(st.integers(1, 3), max_size=2),
    channels=st.integers(1, 4),
    positions=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    outputs=st.integers(1, 4),
)
def test_transposes_of_contiguous_tensors(names, device, n, lead, channels, positions, outputs):
    """Large ones are not copied: an image, unfolded or not, the mixing of tokens."""
    shapes = {"weight": (outputs, channels), "bias": (outputs,)}
    params = {name: torch.randn(shapes[name], device=device) for name in names}
    x = torch.randn(n, *lead, channels, *positions, device=device)
    blocks = mock.patch.object(LINEAR._matmul, "affine_blocks", wraps=LINEAR._matmul.affine_blocks)
    with mock.patch.object(LINEAR, "_FEW", 0), blocks as run:
        assert_agrees(Problem(lambda p, x: score(F.linear(x.movedim(len(lead), -1), **p)), (params, x)))
    assert run.called != x.movedim(1 + len(lead), -1).is_contiguous()


@pytest.mark.parametrize("n", [2, 6])
def test_products_in_blocks_of_rows_in_a_graph(n, device):
    params = {"weight": torch.randn(4, 3, device=device), "bias": torch.randn(4, device=device)}
    clipped = psg.clipped_grad(lambda p, x: score(F.linear(x, **p)), clip_norm=0.5)
    x = torch.randn(n, 5, 3, device=device)
    with mock.patch.multiple(psg._hardware._matmul, row_blocks=blocks_of_rows, _LARGE_PRODUCT=0):
        found = psg.jit(clipped, backend="eager")(params, x)
    assert_trees_close(found.grads, clipped(params, x).grads, per_sample=False)


@pytest.mark.parametrize("shape", [(), (1,), (1, 4), (5, 4), (5, 1)])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_bias_of_another_shape(shape, frozen, device):
    params = {"weight": torch.randn(4, 3, device=device), "bias": torch.randn(shape, device=device)}
    fixed = {"bias": params.pop("bias")} if frozen else {}
    assert_agrees(Problem(lambda p, x: score(F.linear(x, **p, **fixed)), (params, torch.randn(3, 5, 3, device=device))))


@given(problem=stacked_problems(), rules=each_rule)
def test_stacks_of_linear_layers(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=stacked_problems(), norm=st.sampled_from(["keep", "gram", "chunks"]))
def test_stacks_whose_cotangents_are_taken_as_they_arrive(problem, norm, device):
    early = mock.patch.object(_backward, "_is_worth_a_hook", lambda tap: tap.zeros is None)
    with early, psg.plans.using(norm=norm):
        assert_agrees(on(problem, device))


@given(problem=st.one_of(linear_problems(), stacked_problems(), product_problems(), addmm_problems()))
def test_derivatives_of_results(problem, device):
    assert_derivatives_agree(on(problem, device))


@given(problem=product_problems(), rules=each_rule)
def test_products(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=addmm_problems(), rules=each_rule)
def test_addmm(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


def test_the_rule_gives_an_outer(device):
    params = {"weight": torch.randn(4, 3, device=device), "bias": torch.randn(4, device=device)}
    factors = psg.factored_grad(lambda p, x: score(F.linear(x, **p)))(params, torch.randn(2, 5, 3, device=device))
    assert isinstance(factors["weight"], psg.factors.Outer)
    assert isinstance(factors["bias"], psg.factors.Dense)


def test_long_and_wide_shapes_take_every_cost_choice(device):
    # Few positions and wide layers, many positions and narrow ones: the norms are computed in different ways.
    for t, i, o in [(1, 96, 80), (2, 96, 80), (64, 8, 6), (12, 24, 24)]:
        params = {"weight": torch.randn(o, i, device=device) / i}
        x = torch.randn(3, t, i, device=device)
        assert_agrees(Problem(lambda p, x: score(F.linear(x, p["weight"])), (params, x)))
