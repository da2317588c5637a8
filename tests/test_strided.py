"""as_strided of what the samples compute: captured where a batch lies in memory as each sample alone does, else in the loop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg.testing import assert_trees_close, loop_value_and_grad


@pytest.fixture
def normal(device):
    return lambda *shape: torch.randn(shape, device=device)


def agrees(fn, *args, **options):
    """Compares with the loop; returns the rung."""
    found = psg.per_sample_value_and_grad(fn, **options)(*args)
    assert_trees_close(found, loop_value_and_grad(fn, **options)(*args))
    return psg.explain(fn, **options)(*args).rung


@st.composite
def views(draw):
    """(shape of a tensor, order in which its dimensions lie in memory, size, strides and offset of a view into it)."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(shape))))
    count = int(torch.tensor(shape).prod())
    offset = draw(st.integers(0, count - 1))
    left, size, step = count - 1 - offset, [], []
    for _ in range(draw(st.integers(0, 3))):
        step.append(draw(st.integers(0, max(1, left))))
        size.append(draw(st.integers(0, left // step[-1] + 1 if step[-1] else 3)))
        left -= max(0, size[-1] - 1) * step[-1]
    return shape, order, size, step, offset


@given(view=views(), n=st.integers(0, 3), explicit=st.booleans())
def test_views_of_dense_tensors(view, n, explicit):
    shape, order, size, step, offset = view
    params = {"w": torch.randn(3, 3), "gain": torch.randn(())}
    x = torch.randn(n, 3)

    def fn(p, x):
        count = int(torch.tensor(shape).prod())
        h = F.linear(x, p["w"]).tanh().repeat(count)[:count] * torch.arange(1.0, count + 1)
        h = h.reshape([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
        view = h.as_strided(size, step, h.storage_offset() + offset) if explicit else h.flatten().as_strided(size, step)
        return (view.square() * p["gain"]).sum() + h.sum()

    found = psg.per_sample_value_and_grad(fn)(params, x)
    assert_trees_close(found, loop_value_and_grad(fn)(params, x))
    if n:
        assert psg.explain(fn)(params, x).rung == "capture"


def hidden(p, x):
    return F.linear(x, p["w"]).tanh()


def windows(h):
    """Longformer's: pieces of the rows that overlap by half."""
    step = h.stride()
    return h.as_strided(((h.shape[0] - 1) // 2, 3, h.shape[1]), (2 * step[0], step[0], step[1]))


FUNCTIONS = {
    "windows": lambda p, x: windows(hidden(p, x)).cumsum(1).square().sum(),
    "windows of a transposed tensor": lambda p, x: windows(hidden(p, x).T[:4]).cumsum(1).square().sum(),
    "two calls": lambda p, x: (windows(hidden(p, x)) * torch.as_strided(hidden(p, x).sin(), (2, 3, 4), (1, 2, 3))).sum(),
    "written into": lambda p, x: written(hidden(p, x) * 2),
    "of a view, written into": lambda p, x: written((hidden(p, x) * 2).view(3, 2, 4)[1:]),
    "a parameter beside": lambda p, x: (p["w"].as_strided((2, 4), (4, 1)).sum() * windows(hidden(p, x))).square().sum(),
    "a constant beside": lambda p, x: (torch.ones(6, 4).as_strided((2, 3, 4), (8, 4, 1)) * windows(hidden(p, x))).square().sum(),
    "sizes as tensors": lambda p, x: torch.as_strided(
        hidden(p, x), (torch.tensor(2), (x.new_ones(()) * 4).long()), (4, torch.tensor(1))
    ).square().sum(),
    "differentiated by fn": lambda p, x: slope(p, x),
}  # fmt: skip


def written(h):
    h.as_strided((3,), (5,), h.storage_offset()).mul_(3.0)
    return h.square().sum()


def slope(p, x):
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(windows(hidden(p, x)).square().sum(), x, create_graph=True)
    return found.square().sum()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, n, normal):
    assert agrees(FUNCTIONS[name], {"w": normal(4, 3)}, normal(n, 6, 3)) == "capture"
    assert_trees_close(psg.clipped_grad(FUNCTIONS[name], 1.0)({"w": normal(4, 3)}, normal(0, 6, 3)).values, normal(0))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_a_batch_that_lies_otherwise(normal):
    """With the samples in the last dimension, and torch keeps that order, a sample has gaps; alone it has none."""

    def fn(p, x):
        return (x * p["gain"]).as_strided((3, 4), (2, 1)).square().sum()

    params = {"gain": normal(2, 1)}
    assert agrees(fn, params, normal(2, 4, 3), in_dims=(None, 2)) == "loop"
    assert agrees(fn, params, normal(3, 2, 4)) == "capture"
    images = normal(3, 2, 4, 5).contiguous(memory_format=torch.channels_last)  # no gaps, but another order
    assert agrees(fn, {"gain": normal(2, 1, 1)}, images) == "loop"


@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize(
    "op", [torch.as_strided_, torch.Tensor.as_strided_, torch.ops.aten.as_strided_, torch.ops.aten.as_strided_.default]
)
def test_views_in_place_are_left_to_the_loop(op, method, normal):
    """vmap leaves the tensor as it is, without an error."""

    def fn(p, x):
        return (p["w"] * op(x.clone(), (1,), (1,))).sum()

    args = {"w": normal(3)}, normal(4, 3)
    with pytest.warns(psg.FallbackWarning, match="as_strided depends on"):
        assert agrees(fn, *args) == "loop"
    with pytest.raises(psg.PsgError, match="as_strided depends on the memory layout"):
        psg.per_sample_grad(fn, method=method)(*args)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_views_that_differ_from_sample_to_sample(normal):
    def fn(p, x):
        h = hidden(p, x)
        if x[0, 0] > 0:
            return windows(h).square().sum()
        return h.as_strided((2, 4), (5, 1)).sum() + h.as_strided((2,), (1,)).square().sum()

    def from_data(p, x):
        return hidden(p, x).as_strided((2, 3), (int(x[0, 0].abs() * 3) + 1, 1)).square().sum()

    params, x = {"w": normal(4, 3)}, normal(5, 6, 3)
    x[:, 0, 0] = torch.tensor([1, -1, 0.5, -0.5, 2.0], dtype=x.dtype)
    assert agrees(fn, params, x) == "capture"
    agrees(from_data, params, x)


def test_the_sample_alone_draws_no_numbers_of_the_batch(normal):
    def without(p, x):
        h = F.dropout(hidden(p, x), 0.5)
        return torch.stack([h[2 * i : 2 * i + 3] for i in range(2)]).square().sum() + h[4:].square().sum()

    def with_views(p, x):
        h = F.dropout(hidden(p, x), 0.5)
        return windows(h).square().sum() + h[4:].square().sum()

    params, x = {"w": normal(4, 3)}, normal(3, 6, 3)
    drawn = []
    for own in (without, with_views, with_views):  # the second call of a function knows that it calls as_strided
        torch.manual_seed(0)
        drawn.append((psg.per_sample_grad(own)(params, x), torch.get_rng_state()))
    for other in drawn[1:]:
        assert_trees_close(other[0], drawn[0][0])
        assert torch.equal(other[1], drawn[0][1])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled(normal):
    """The compiler lays tensors out as the trace did."""

    def fn(p, x):
        h = hidden(p, x)
        return windows(h).cumsum(1).square().sum() + windows(h.T.sin()).exp().sum()

    params, norms = {"w": normal(4, 3)}, psg.per_sample_norm(fn)
    fast = psg.jit(norms)
    for x in (normal(3, 6, 3), normal(3, 6, 3)):
        assert_trees_close(fast(params, x), norms(params, x))
    assert fast.cache_info()[0].error is None


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        h = windows(self.linear(x))
        self.calls += 1
        return h.square().sum()


def test_writes_into_a_module_are_refused(device):
    model = Counting().to(device)
    loss, params = psg.stateless(model, lambda output: output)
    for _ in range(2):
        with pytest.raises(psg.StateError, match="calls"):
            psg.per_sample_grad(loss)(params, torch.randn(3, 6, 3, device=device))
        assert model.calls == 0


@given(
    size=st.integers(1, 6),
    hop=st.integers(1, 7),
    center=st.booleans(),
    rows=st.sampled_from([(), (2,)]),
    signal=st.sampled_from(["a parameter", "what is computed from one", "each sample's own"]),
    inside=st.booleans(),
    n=st.integers(0, 3),
)
def test_frames_of_a_signal_that_all_samples_share(size, hop, center, rows, signal, inside, n):
    """torch takes the frames of stft by as_strided, whose derivative adds up what shares its memory, as the samples of a parameter do."""
    options = {"n_fft": size, "hop_length": hop, "center": center, "return_complex": True}
    w, x = torch.randn(*rows, 12), torch.rand(n, size)

    def fn(w, x):
        def loss(w):
            return torch.view_as_real(torch.stft(w, window=x, **options)).sin().sum()

        w = w.sin() if signal == "what is computed from one" else w
        return torch.func.grad(loss)(w).sin().sum() if inside else loss(w)

    batch = (w.expand(n, *w.shape), x) if signal == "each sample's own" else (w, x)
    in_dims = (0, 0) if signal == "each sample's own" else None
    found = psg.per_sample_value_and_grad(fn, in_dims=in_dims)(*batch)
    assert_trees_close(found, loop_value_and_grad(fn, in_dims=in_dims)(*batch))
