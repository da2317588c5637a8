"""Kernels for CUDA devices with Triton, against float64 and against what runs elsewhere in their place."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import psg
from psg._hardware import _fused
from psg.factors import Conv, Geometry, Outer
from psg.testing import assert_trees_close


@pytest.fixture(autouse=True)
def _on_a_gpu(device):
    if device.type != "cuda" or not _fused._runs_kernels(device):
        pytest.skip("a kernel for CUDA devices with tensor cores")


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def dtype(request, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    return request.param


def draw_conv(data, dtype, device, images=1):
    """A drawn convolution in one or two dimensions without groups."""
    dims = data.draw(st.integers(1, 2))
    each = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    geometry = Geometry(each(1, 4), each(1, 3), each(0, 2), each(1, 2), 1)
    size = each(4, 40)
    reach = [dilation * (taps - 1) + 1 for taps, dilation in zip(geometry.kernel, geometry.dilation, strict=True)]
    out = [(s + 2 * p - r) // stride + 1 for s, p, r, stride in zip(size, geometry.padding, reach, geometry.stride, strict=True)]
    assume(min(out) > 0)
    n, i, o = (data.draw(st.sampled_from(sizes)) for sizes in ([1, 3], [1, 3, 16, 32, 70, 192], [1, 5, 64, 130]))
    input, cotangent = torch.randn(n, images, i, *size, device=device), torch.randn(n, images, o, *out, device=device)
    if dims == 2 and dtype != torch.float32 and data.draw(st.booleans()):
        input, cotangent = (
            x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (n, images)) for x in (input, cotangent)
        )
    return Conv(cotangent, input, geometry).to(dtype)


@given(data=st.data())
def test_norms_of_convolutions(data, dtype, device):
    factor = draw_conv(data, dtype, device)
    with psg.plans.using(norm="chunks"):
        assert factor.plan().startswith("kernel")
        found = factor.squared_norm()
    # TF32 rounds every factor of a product by up to 2^-11: few terms do not average that out.
    rtol = 4 * 2**-11 if dtype == torch.float32 else 1e-4
    assert_trees_close(found.double(), factor.to(torch.float64).materialize().flatten(1).norm(dim=1).square(), rtol=rtol)


@given(data=st.data())
def test_sums_of_convolutions(data, dtype, device):
    if dtype == torch.float32:
        pytest.skip("torch's own sums of float32 are as exact")
    factor = draw_conv(data, dtype, device, images=data.draw(st.integers(1, 2)))
    weights = torch.randn(factor.n, device=device).float()
    exact = factor.to(torch.float64).weighted_sum(weights.double())
    with psg.plans.using(norm="chunks", sum="kernel"):
        assert factor.plan().endswith("sum by a kernel")
        found = factor.weighted_sum(weights)
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert_trees_close(found.double(), exact, rtol=1e-5, per_sample=False)
    # Samples that do not count are left out, whatever they hold.
    keep = torch.arange(factor.n, device=device) % 2 == 1
    factor.cotangent[~keep], factor.input[~keep] = torch.nan, torch.inf
    left_out = torch.where(keep, weights, 0)
    with psg.plans.using(sum="kernel"):
        found = factor.weighted_sum_of(left_out, keep, torch.ones_like(keep))
        assert factor.weighted_sum(left_out).isnan().any()
    assert_trees_close(found.double(), factor.zero(keep).to(torch.float64).weighted_sum(left_out.double()), rtol=1e-5, per_sample=False)


@given(data=st.data())
def test_norms_by_inner_products(data, device):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    n, t, o, i = (data.draw(st.sampled_from(sizes)) for sizes in ([0, 1, 3], [0, 2, 16, 17, 64, 65, 200], [8, 64, 136], [8, 72]))
    left, right = ((torch.randn(n, t, size, device=device) + data.draw(st.sampled_from([0, 1]))).to(dtype) for size in (o, i))
    if data.draw(st.booleans()):
        right = torch.cat((right, right), 1)[:, :t]
    factor, exact = Outer(left, right), Outer(left.double(), right.double())
    assert factor._is_fused
    with psg.plans.using(norm="gram"):
        assert factor.plan().startswith("Gram")
        squared, terms = factor._gram_sums()
    assert_trees_close(terms.double(), exact.squared_terms(), rtol=4e-6)
    # Where terms cancel, what remains is small beside them.
    assert ((squared.double() - exact.materialized_norm()).abs() <= 4e-6 * max(1, t / 8) * terms).all()


def test_sides_that_the_kernel_for_inner_products_does_not_take(device):
    fits = torch.randn(2, 3, 8, device=device).float()
    assert Outer(fits, fits)._is_fused
    far = torch.empty((1 << 31) + 8, dtype=torch.bfloat16, device=device).as_strided((1, 3, 8), (8, 1 << 30, 1))  # 4 GiB
    for side in (fits.double(), fits.mT.contiguous().mT, torch.cat((fits, fits[..., :1]), 2)[..., :8], fits.clone().requires_grad_(), far):
        assert not Outer(side, side)._is_fused


def test_tf32_does_not_make_norms_smaller(device, monkeypatch):
    # Tensor cores cut numbers off, which takes a thousandth of every product; psg rounds them first.
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    input, cotangent = torch.randn(8, 1, 16, 28, 28, device=device).float(), torch.randn(8, 1, 64, 28, 28, device=device).float()
    factor = Conv(cotangent, input, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1))
    with psg.plans.using(norm="chunks"):
        found = factor.squared_norm()
    exact = factor.to(torch.float64).materialize().flatten(1).norm(dim=1).square()
    assert ((found - exact) / exact).mean().abs() < 1e-4


@given(data=st.data())
def test_sums_without_samples_that_are_not_finite(data, device):
    n, t, o, i = (data.draw(st.sampled_from(sizes)) for sizes in ([0, 1, 3, 130], [1, 2, 5], [1, 7, 70], [1, 9, 66]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    left, right = torch.randn(n, t, o, device=device).to(dtype), torch.randn(n, t, i, device=device).to(dtype)
    if data.draw(st.booleans()):
        left = left.mT.contiguous().mT
    keep = torch.rand(n, device=device) < 0.7
    finite = keep | (torch.rand(n, device=device) < data.draw(st.sampled_from([0.5, 2.0])))
    for sample in (~finite).nonzero()[:, 0].tolist():
        data.draw(st.sampled_from([left, right]))[sample, 0] = data.draw(st.sampled_from([torch.inf, torch.nan]))
    weights = torch.where(keep, torch.rand(n, device=device), 0).float()
    factor = Outer(left, right)
    assert factor.is_zeroed_in_sums
    found = factor.weighted_sum_of(weights, keep, finite)
    assert_trees_close(found, factor.zero(keep).weighted_sum(weights), rtol=1e-5, per_sample=False)


def test_sums_of_samples_with_more_entries_than_32_bits_count(device):
    # As the logits of one long text are. The places of the last positions were negative, and reading there ended the process.
    memory = torch.empty((1 << 31) + 8, dtype=torch.bfloat16, device=device)  # 4 GiB
    left = memory.as_strided((2, 3, 4), (4, 1 << 30, 1))
    left.copy_(torch.randn(2, 3, 4, device=device))
    right = torch.randn(2, 3, 5, device=device).to(torch.bfloat16)
    left[1], finite = torch.nan, torch.tensor([True, False], device=device)
    found = _fused.without_spoiled(torch.full((4, 5), torch.nan, dtype=torch.float32, device=device), left, right, finite)
    assert_trees_close(found, (left[0].double().T @ right[0].double()).float(), rtol=1e-5, per_sample=False)


@pytest.mark.parametrize("stride", [(1 << 30, 8, 1), (1, 1, 5 << 26)], ids=["channels", "positions"])
def test_convolutions_with_cotangents_in_a_larger_tensor(stride, device):
    # The places of the last channels or positions, counted in 32 bits, were negative.
    memory = torch.empty((1 << 31) + (1 << 29), dtype=torch.float16, device=device)  # 5 GiB
    cotangent, input = memory.as_strided((1, 3, 1, 8), (1, *stride)), torch.randn(1, 3, 3, 10, device=device)
    cotangent.copy_(torch.randn(1, 3, 1, 8, device=device))
    factor = Conv(cotangent[:, None], input.to(torch.float16)[:, None], Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1))
    with psg.plans.using(norm="chunks", sum="kernel"):
        assert factor.plan() == "kernel, sum by a kernel"
        found, total = factor.squared_norm(), factor.weighted_sum(torch.ones(1, device=device))
    exact = Conv(cotangent.double()[:, None].contiguous(), factor.input.double(), factor.geometry).materialize()
    assert_trees_close(found.double(), exact.flatten(1).norm(dim=1).square(), rtol=1e-4)
    assert_trees_close(total.double(), exact[0], rtol=1e-5, per_sample=False)


class Mixer(nn.Module):
    """Convolutions, attention and linear layers of all sizes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        self.down = nn.Conv2d(64, 64, 4, 4)
        self.qkv = nn.Linear(64, 192)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.down(F.gelu(self.conv(x))).flatten(2).mT
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_model(dtype, jit, masked, device):
    if dtype == torch.float16:
        pytest.skip("matrix products in float16 are summed in float32")
    torch.set_default_dtype(torch.float32)  # inductor takes some numbers of a float32 model for float64 otherwise
    model = Mixer().to(torch.float32)
    x, y = torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
    x[5, 0, 3, 3], x[9] = torch.nan, torch.inf
    mask = torch.arange(64) % 3 > 0 if masked else None

    def clipped(device, dtype, wrap=lambda fn: fn):
        own = Mixer().to(device, dtype)
        own.load_state_dict(model.state_dict())
        loss, params = psg.stateless(own, F.cross_entropy)
        options = {} if mask is None else {"mask": mask.to(device)}
        return wrap(psg.clipped_grad(loss, clip_norm=0.1))(params, x.to(device, dtype), y.to(device), **options)

    found = clipped(device, dtype, psg.jit if jit else lambda fn: fn)
    expected = clipped("cpu", torch.float64)
    assert found.nonfinite == expected.nonfinite > 0
    rtol = 0.1 if dtype == torch.bfloat16 else 0.01  # a sample too many would add a tenth and more
    for name, own in expected.grads.items():
        error = (found.grads[name].cpu().double() - own).norm()
        assert error <= rtol * own.norm(), name


def test_attention_without_dropout_is_compiled(device):
    # Its kernel returns a seed on the CPU, into whose memory inductor would have written a number of the graph.
    torch.set_default_dtype(torch.float32)
    model = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, batch_first=True, device=device)
    loss, params = psg.stateless(model, lambda output, y: (output.mean((1, 2)) - y).square().sum())
    x, y = torch.randn(64, 196, 768, device=device), torch.randn(64, device=device)
    fast = psg.jit(psg.clipped_grad(loss, clip_norm=0.1))
    fast(params, x, y)
    assert [entry.error for entry in fast.cache_info()] == [None]
