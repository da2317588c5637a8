"""PReLU over drawn shapes and layouts."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, on
from cases import Problem, score
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg.testing import assert_trees_close, layouts, loop_grad, shapes, tensors


@st.composite
def prelu_problems(draw):
    """A sample of no to four dimensions with one slope, or of two to four with a slope for each channel; some entries are zero."""
    n = draw(st.integers(0, 4))
    per_channel = draw(st.booleans())
    shape = draw(shapes(min_dims=2 if per_channel else 0, max_dims=4, max_side=3))
    x = draw(layouts(draw(tensors((n, *shape)))))
    x = x * (x > -0.5) if draw(st.booleans()) else x
    slopes = draw(tensors((shape[1],) if per_channel else draw(st.sampled_from([(1,), ()]))))
    call = draw(st.sampled_from([F.prelu, torch.Tensor.prelu]))
    scaled = draw(st.booleans())  # so that the input has a derivative
    return Problem(
        lambda p, x: score(call(x * p["scale"] if scaled else x, p["slopes"])), ({"slopes": slopes, "scale": draw(tensors(()))}, x)
    )


@pytest.mark.parametrize("ruled", [True, False])
@given(problem=prelu_problems())
def test_prelu(problem, ruled, device):
    assert_agrees(on(problem, device), rules=ruled)


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
def test_prelu_keeps_the_factors_of_the_layers_around_it(device):
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.PReLU(4), torch.nn.Linear(4, 3), torch.nn.PReLU()).to(device)
    loss, params = psg.stateless(model, F.mse_loss)
    report = psg.explain(loss)(params, torch.randn(6, 5, device=device), torch.randn(6, 3, device=device))
    assert report.rung == "capture"
    assert all(use.endswith(": rule") for leaf in report.leaves for use in leaf.uses)


@pytest.mark.parametrize("shape", [(4, 5), (4, 1), (4,)])
def test_prelu_refuses_what_torch_refuses(shape, device):
    w, x = torch.rand(2, device=device), torch.randn(3, *shape, device=device)
    with pytest.raises(RuntimeError, match="parameter|size"):
        psg.per_sample_grad(lambda w, x: F.prelu(x, w).sum(), method="capture")(w, x)


@pytest.mark.parametrize("slopes", [1, 3])
def test_prelu_at_infinite_cotangents(slopes, device):
    def fn(w, x):  # the derivative is infinite at x = 1
        return (F.prelu(x, w) - 1).abs().sqrt().sum()

    w, x = torch.full((slopes,), 0.25, device=device), torch.tensor([[[-2.0], [1.0], [3.0]], [[1.0], [-2.0], [1.0]]], device=device)
    expected = loop_grad(fn)(w, x[:, None])
    assert_trees_close(psg.per_sample_grad(fn)(w, x[:, None]), expected)
    assert psg.clipped_grad(fn, 1.0)(w, x[:, None]).nonfinite == 0
    batch = psg.per_sample_grad(lambda w, x: (F.prelu(x, w) - 1).abs().sqrt().sum((1, 2)), method="batch")
    assert_trees_close(batch(w, x), expected)


@pytest.mark.parametrize("rrelu", [F.rrelu, partial(F.rrelu, inplace=True), torch.rrelu])
def test_rrelu_in_evaluation_mode(rrelu, device):
    w, x = torch.randn(4, 4, device=device), torch.randn(5, 3, 4, device=device)

    def fn(w, x):
        return rrelu(x @ w, 0.1, 0.5).sin().sum()

    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("dim", [-1, 0])
def test_gumbel_softmax(hard, dim, device):
    """Of one sample: the loop then draws the same numbers."""
    w, x = torch.randn(4, 4, device=device), torch.randn(1, 3, 4, device=device)

    def fn(w, x):
        return (F.gumbel_softmax(x @ w, tau=0.7, hard=hard, dim=dim) * x).sin().sum()

    for method in ("auto", "vmap"):
        torch.manual_seed(0)
        found = psg.per_sample_grad(fn, randomness="different", method=method)(w, x)
        torch.manual_seed(0)
        assert_trees_close(found, loop_grad(fn)(w, x))
