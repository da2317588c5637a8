"""Convolution modules: every padding mode, unbatched images, memory that is not contiguous."""

import pytest
from agreement import assert_agrees, on
from cases import Problem, parameters, score
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg.testing import layouts, tensors

MODULES = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def problems(draw, dims, mode):
    """A convolution between two others, so that its padding is differentiated too."""
    n, groups, batched = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.booleans())
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    padding = draw(st.sampled_from([tuple(draw(st.integers(0, 1)) for _ in range(dims)), "same"]))
    stride = 1 if padding == "same" else draw(st.integers(1, 2))
    layer = MODULES[dims](2 * groups, 2 * groups, kernel, stride, padding, groups=groups, padding_mode=mode, bias=draw(st.booleans()))
    module = nn.Sequential(MODULES[dims](1, 2 * groups, 1), nn.ReLU(inplace=True), layer, nn.ReLU(inplace=True))
    for parameter in module.parameters():
        parameter.data = draw(tensors(parameter.shape))
    spatial = tuple(draw(st.integers(3, 4)) for _ in range(dims))
    x = draw(layouts(draw(tensors((n, *((2,) if batched else ()), 1, *spatial)))))
    return Problem(lambda p, x: score(functional_call(module, p, (x,))), (parameters(module), x))


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("dims", MODULES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@given(data=st.data())
def test_padding_modes(dims, mode, data, device):
    problem = on(data.draw(problems(dims, mode)), device)
    assert_agrees(problem)
    if len(problem.args[1]):
        for leaf in psg.explain(problem.fn)(*problem.args).leaves:
            assert set(leaf.uses) == {f"conv{dims}d: rule"}
