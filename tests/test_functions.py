"""autograd.Functions without a generated rule for vmap, which run once for all samples where that gives the same."""

import array
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg._torch import _functions
from psg.testing import assert_trees_close, loop_grad

pytestmark = pytest.mark.filterwarnings("error::psg.FallbackWarning")

FORWARD, BACKWARD = 1, 2
calls = array.array("b")  # in a list or a dict, psg would see that the functions keep something


def counted(function):
    """Note every call of the forward and backward passes."""

    def called(*args):
        calls.append(BACKWARD if function.__name__ == "backward" else FORWARD)
        return function(*args)

    return staticmethod(called)


class Clipped(torch.autograd.Function):
    """A straight-through estimator in the old style, with clipped gradients; the sample is in ctx.saved_tensors."""

    @counted
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (2 * x).round() / 2

    @counted
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent.clamp(-0.3, 0.3) * (x.abs() < 1)


class Softmax(torch.autograd.Function):
    """In the new style; saves its output, and adds up over the sample."""

    @counted
    def forward(x, scale):
        return (x * scale).softmax(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.scale = inputs[1]

    @counted
    def backward(ctx, cotangent):
        (output,) = ctx.saved_tensors
        return ctx.scale * output * (cotangent - (cotangent * output).sum(-1, keepdim=True)), None


class Attributes(torch.autograd.Function):
    """Keeps a sample's tensors, and what is no tensor, in attributes of ctx."""

    @counted
    def forward(ctx, x):
        ctx.kept = {"x": [x, x.sin()], "names": ("x", 3)}
        ctx.shape, ctx.constant = x.shape, torch.ones_like(x)
        return x.flatten().cumsum(0).view_as(x)

    @counted
    def backward(ctx, cotangent):
        x, sines = ctx.kept["x"]
        return cotangent.reshape(ctx.shape) * (sines + ctx.constant) * x


class Pair(torch.autograd.Function):
    """Two arguments, two outputs, one of them without a derivative; a gradient of None for an argument that needs none."""

    @counted
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.set_materialize_grads(False)
        most = x.abs().amax(-1)
        ctx.mark_non_differentiable(most)
        return x * w, most

    @counted
    def backward(ctx, cotangent, of_most):
        assert of_most is None
        x, w = ctx.saved_tensors
        if cotangent is None:
            return None, None
        return (cotangent * w if ctx.needs_input_grad[0] else None), (cotangent * x).sum_to_size(w.shape)


class Reversed(torch.autograd.Function):
    """Returns its argument, or a view of it; the gradient has fewer dimensions."""

    @counted
    def forward(ctx, x, itself):
        return x if itself else x.view_as(x)

    @counted
    def backward(ctx, cotangent):
        return -cotangent.sum().expand(cotangent.shape), None


class InPlace(torch.autograd.Function):
    """Writes into a tensor of its own."""

    @counted
    def forward(ctx, x):
        output = torch.zeros_like(x)
        output += x
        output.clamp_(min=-0.5)
        ctx.save_for_backward(x > -0.5)
        return output.mT.contiguous().mT if x.ndim > 1 else output

    @counted
    def backward(ctx, cotangent):
        return torch.where(ctx.saved_tensors[0], cotangent, 0.0)


APPLIED = {
    "old style": lambda x, w: Clipped.apply(x),
    "new style": lambda x, w: Softmax.apply(x, 1.5),
    "attributes": lambda x, w: Attributes.apply(x),
    "two outputs": lambda x, w: Pair.apply(x, w)[0] + Pair.apply(x.sin(), w)[1][..., None],
    "one of two outputs": lambda x, w: Pair.apply(x, w)[1][..., None] * x,
    "a constant": lambda x, w: Pair.apply(x, torch.full_like(w, 0.7))[0],
    "itself": lambda x, w: Reversed.apply(x, True),
    "a view": lambda x, w: Reversed.apply(x, False) * x,
    "in place": lambda x, w: InPlace.apply(x),
    "twice": lambda x, w: Clipped.apply(Softmax.apply(Clipped.apply(x), 3.0)),
}


def network(apply, on_data):
    def fn(params, x):
        x = apply(x, params["gain"]) if on_data else x
        return apply(F.linear(x, params["w"]), params["scale"]).sin().square().sum()

    return fn


@given(
    kind=st.sampled_from(sorted(APPLIED)),
    on_data=st.booleans(),
    n=st.integers(0, 4),
    t=st.sampled_from([(), (1,), (3,), (2, 2)]),
    i=st.integers(1, 4),
    o=st.integers(1, 4),
)
def test_equals_the_loop(kind, on_data, n, t, i, o, device):
    shapes = {"w": (o, i), "scale": (o,), "gain": (i,)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    x, fn = torch.randn(n, *t, i, device=device), network(APPLIED[kind], on_data)
    before = x.clone()
    expected = loop_grad(fn)(params, x)
    del calls[:]
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(params, x), expected)
    assert calls.count(FORWARD) <= 6  # and not for each of the samples
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", sorted(APPLIED))
def test_every_kind_runs_once(kind, device):
    params = {"w": torch.randn(3, 4, device=device), "scale": torch.randn(3, device=device), "gain": torch.randn(4, device=device)}
    x, fn = torch.randn(16, 2, 4, device=device), network(APPLIED[kind], True)
    del calls[:]
    psg.clipped_grad(fn, 1.0, method="capture")(params, x)
    assert 1 <= len(calls) <= 12


@pytest.mark.parametrize("kind", sorted(APPLIED))
def test_compiled(kind, device):
    params = {"w": torch.randn(3, 4, device=device), "scale": torch.randn(3, device=device), "gain": torch.randn(4, device=device)}
    fn = network(APPLIED[kind], True)
    compiled = psg.jit(psg.per_sample_grad(fn), backend="eager")
    for _ in range(2):
        x = torch.randn(5, 4, device=device)
        assert_trees_close(compiled(params, x), loop_grad(fn)(params, x))
    assert [entry.error for entry in compiled.cache_info()] == [None]


@pytest.mark.parametrize("kind", sorted(APPLIED))
def test_under_autocast(kind, device):
    def fn(params, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return network(APPLIED[kind], False)(params, x).float()

    shapes = {"w": (3, 4), "scale": (3,), "gain": (4,)}
    params = {name: torch.randn(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}
    x = torch.randn(6, 4, dtype=torch.float32, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(params, x), loop_grad(fn)(params, x), rtol=5e-2, atol=5e-2)


class Asking(torch.autograd.Function):
    """Its backward pass takes a Python value of the sample."""

    @counted
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @counted
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * (2 if x.sum() > 0 else 3)


class Doubling(torch.autograd.Function):
    """Its backward pass writes into the cotangent, which autograd also gives to others."""

    @counted
    def forward(ctx, x):
        return x.clone()

    @counted
    def backward(ctx, cotangent):
        return cotangent.clone().mul_(2) if cotangent.ndim == 0 else cotangent.mul_(2).clone()


class Opaque:
    def __init__(self, x):
        self.x = x


class Hiding(torch.autograd.Function):
    """Keeps the sample where psg does not look for it."""

    @counted
    def forward(ctx, x):
        ctx.kept = Opaque(x)
        return x.sin()

    @counted
    def backward(ctx, cotangent):
        return cotangent * ctx.kept.x.cos()


class Counting(torch.autograd.Function):
    """An output that is the same for all samples."""

    @counted
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ones(3, device=x.device)

    @counted
    def backward(ctx, cotangent):
        return ctx.saved_tensors[0] * cotangent.sum()


@pytest.mark.parametrize("function", [Asking, Hiding, Counting], ids=lambda function: function.__name__)
def test_others_run_sample_by_sample(function, device):
    def fn(w, x):
        return (function.apply(w @ x) * (w @ x)[:3]).sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    for _ in range(2):
        del calls[:]
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
    assert calls.count(BACKWARD) >= 5


def test_a_backward_pass_that_vmap_cannot_run_is_tried_once(device):
    def fn(w, x):
        return Asking.apply(w @ x).square().sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    counts = []
    for _ in range(2):
        del calls[:]
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
        counts.append(calls.count(FORWARD))
    assert counts == [1 + 5 + 5, 5 + 5]  # together, sample by sample, and in the loop


def test_a_backward_pass_that_writes_into_its_cotangent(device):
    def fn(w, x):
        y = w @ x
        return (Doubling.apply(y) + y.sin()).square().sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


def test_a_backward_pass_that_draws_draws_for_every_sample(device):
    class Dithered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent + torch.rand(3, device=cotangent.device)

    w, x = torch.randn(3, 4, device=device), torch.ones(5, 4, device=device)
    grads = psg.per_sample_grad(lambda w, x: Dithered.apply(w @ x).sum(), method="capture")(w, x)
    assert len(grads.unique(dim=0)) == 5


def test_a_function_that_closes_over_the_sample_runs_in_the_loop(device):
    def fn(w, x):
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return y * x.sum()

            @staticmethod
            def backward(ctx, cotangent):
                return cotangent * x.sum()

        return Product.apply(w @ x).sin().sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    with pytest.warns(psg.FallbackWarning, match="raises RuntimeError sample by sample"):
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))


def test_tensors_are_freed_with_the_call(device):
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(weakref.ref(x))
            return x * 2

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent * 2

    gc.disable()
    try:
        w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
        psg.per_sample_norm(lambda w, x: Seen.apply(w @ x).square().sum())(w, x)
        assert [own() for own in seen] == [None]
    finally:
        gc.enable()


@pytest.mark.skipif(not _functions.SEES_BOUND, reason="no code is exchanged")
def test_frames_may_be_inspected(device):
    """The code in the place of `Function.apply` crashed whoever reads the variables of its frame, as pytest and debuggers do."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        psg.per_sample_grad(lambda w, x: Failing.apply(w * x).sum(), method="capture")(torch.ones(3), torch.ones(2, 3))
    names = [sorted(entry.frame.raw.f_locals) for entry in caught.traceback]
    assert ["args", "cls", "kwargs"] in [[name for name in own if name != "__class__" and name[0] != "_"][:3] for own in names]


class Sloping(torch.autograd.Function):
    """Another value, by another slope, for what requires no grad."""

    @counted
    def forward(ctx, x, c):
        ctx.slopes = [2.0 if part.requires_grad else 3.0 for part in (x, c)]
        return x * ctx.slopes[0] + c * ctx.slopes[1]

    @counted
    def backward(ctx, cotangent):
        return tuple(slope * cotangent for slope in ctx.slopes)


def test_a_function_may_ask_which_argument_requires_grad(device):
    """vmap's wrappers say that none does."""

    def fn(w, x):
        return Sloping.apply(w * x, x).sin().sum()

    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    expected = loop_grad(fn)(w, x)
    del calls[:]
    assert_trees_close(psg.per_sample_grad(fn)(w, x), expected)
    assert calls.tolist() == [FORWARD, BACKWARD]


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(w):
        return w.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent if cotangent.sum() > 0 else 2 * cotangent


def test_a_function_of_parameters_whose_backward_pass_branches(device):
    """Computed once it would have all samples' cotangents, of which no branch can be taken: it runs sample by sample instead."""

    def fn(w, x):
        return (Branching.apply(2 * w) * x).sum()

    w, x = torch.randn(30, 30, device=device), torch.rand(6, 30, 30, device=device)
    x[::2] *= -1
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
