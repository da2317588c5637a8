"""Backward passes that users have written, of kinds that run otherwise for all samples at once than in a loop."""

import contextlib
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from agreement import is_right_under_vmap
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg.testing import assert_trees_close, loop_grad


def function(backward, rule, forward=torch.clone):
    """An autograd.Function of one tensor; `rule` is "old" for the old style, and else whether torch generates a rule for vmap."""
    if rule == "old":
        members = {"forward": staticmethod(lambda ctx, x: forward(x))}
    else:
        members = {
            "generate_vmap_rule": rule,
            "forward": staticmethod(lambda x: forward(x)),
            "setup_context": staticmethod(lambda ctx, inputs, output: None),
        }
    members["backward"] = staticmethod(lambda ctx, cotangent: backward(cotangent))
    return types.new_class("Written", (torch.autograd.Function,), exec_body=lambda body: body.update(members))


def every_other(cotangent):
    cotangent = cotangent.clone()
    cotangent.flatten()[::2] = 0
    return cotangent


def rows(cotangent):
    cotangent = 2 * cotangent
    cotangent.reshape(cotangent.shape[0], -1)[:, 0] = 0
    return cotangent


def largest(cotangent):
    mask = torch.zeros_like(cotangent)
    mask.flatten().scatter_(0, cotangent.flatten().abs().topk(min(3, cotangent.numel())).indices, 1.0)
    return cotangent * mask


def source(cotangent):
    cotangent = cotangent.clone()
    flat = cotangent.contiguous()
    cotangent.mul_(3)
    return flat + cotangent


def before(cotangent):
    cotangent = cotangent.clone()
    cotangent[0] = 0
    return cotangent.flatten().sin().view(cotangent.shape)


def seeded(cotangent):
    return cotangent * torch.rand((), generator=torch.Generator(cotangent.device).manual_seed(0), device=cotangent.device)


def over_no_dimensions(cotangent):
    return cotangent * torch.any(cotangent > 0.5, [])


def overwritten(cotangent):
    return torch.addmm(cotangent / 0 * 0, torch.eye(len(cotangent), device=cotangent.device, dtype=cotangent.dtype), cotangent, beta=0)


PASSES = {own.__name__: own for own in (every_other, rows, largest, source, before, seeded, over_no_dimensions, overwritten)}
USES = {
    "weight of a linear layer": lambda f, w, x: F.linear(x, f(w)).sin().sum(),
    "computed weight": lambda f, w, x: F.linear(x, f(w * 1.5)).sin().sum(),
    "transposed weight": lambda f, w, x: (x @ f(w).t()).sin().sum(),
    "factors": lambda f, w, x: (x * f(w)[: len(x)].sum(0)).sin().sum(),
    "data": lambda f, w, x: (f(x @ w.t()).t() @ x).sin().sum(),
    "transposed data": lambda f, w, x: f((x @ w.t()).t()).sin().sum(),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning", "ignore:There is a performance drop")
@given(
    backward=st.sampled_from(sorted(PASSES)),
    use=st.sampled_from(sorted(USES)),
    rule=st.sampled_from([True, False, "old"]),
    n=st.integers(0, 4),
    t=st.integers(1, 6),
    i=st.integers(1, 5),
    o=st.integers(1, 5),
    in_dim=st.sampled_from([0, 1]),
)
def test_equals_the_loop(backward, use, rule, n, t, i, o, in_dim, device):
    written = function(PASSES[backward], rule)
    w, x = torch.randn(o, i, device=device), torch.randn(n, t, i, device=device)
    own = x.movedim(0, in_dim).contiguous()

    def fn(w, x):
        return USES[use](written.apply, w, x)

    expected = loop_grad(fn)(w, x)
    assert_trees_close(psg.per_sample_grad(fn, in_dims=(None, in_dim))(w, own), expected)
    assert_trees_close(psg.per_sample_norm(fn, in_dims=(None, in_dim))(w, own), expected.flatten(1).norm(dim=1))


@pytest.mark.parametrize("rule", [True, False, "old"])
@pytest.mark.parametrize("use", sorted(USES))
def test_a_write_before_a_reshape_stays_on_the_fast_path(rule, use, device):
    written = function(before, rule)
    w, x = torch.randn(3, 5, device=device), torch.randn(4, 2, 5, device=device)

    def fn(w, x):
        return USES[use](written.apply, w, x)

    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize("use", ["data", "weight of a linear layer"])
def test_the_error_names_the_way_out(method, use, device):
    written = function(every_other, True)
    w, x = torch.randn(3, 5, device=device), torch.randn(4, 2, 5, device=device)
    with pytest.raises(psg.PsgError, match=r"__setitem__ to write into a tensor of which there is a reshape.* Write before the reshape"):
        psg.per_sample_grad(lambda w, x: USES[use](written.apply, w, x), method=method)(w, x)


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.scale = [1.0]
        return w.sin()

    @staticmethod
    def backward(ctx, cotangent):
        ctx.scale[0] *= 2
        return cotangent * ctx.scale[0]


class Emptying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.left = [w.sin(), w.cos()]
        return w.sin()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * (ctx.left.pop() if ctx.left else 0)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.output = w.sigmoid()
        return ctx.output.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.output.mul_(1 - ctx.output)


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.state = types.SimpleNamespace(scale=torch.ones_like(w))
        return w.sin()

    @staticmethod
    def backward(ctx, cotangent):
        ctx.state.scale = ctx.state.scale + 1
        return cotangent * ctx.state.scale


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("kind", [Counting, Emptying, InPlace, Nested], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_what_a_backward_pass_of_a_weight_changes_on_its_ctx(kind, n, device):
    w, x = torch.randn(3, 4, device=device), torch.randn(n, 2, 4, device=device)

    def fn(w, x):
        return F.linear(x, kind.apply(w)).sin().sum()

    for _ in range(2):
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
        assert_trees_close(psg.clipped_grad(fn, 1e9)(w, x).grads, loop_grad(fn)(w, x).sum(0))


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
def test_a_function_that_fn_makes_anew_in_each_call(device):
    """Its backward cannot run under vmap. Known by its class alone, psg tried it for all samples again and again."""

    def fn(w, x):
        return function(lambda cotangent: cotangent * (2 if cotangent.sum() > 0 else 3), "old").apply(w @ x).sin().sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))


def _observing(observer, of_argument):
    class Observing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, given):
            own = given if of_argument else observer
            own.most = torch.maximum(0.5 * own.most, h.abs().amax())
            return h / own.most

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent, None

    return lambda w, x: Observing.apply(w @ x, observer if of_argument else None).sin().sum()


@pytest.mark.parametrize("of_argument", [False, True])
def test_a_forward_pass_that_keeps_a_tensor_elsewhere_runs_in_the_loop(of_argument, device):
    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    found = []
    for method in ("auto", "loop"):
        observer = types.SimpleNamespace(most=torch.tensor(0.0, device=device))
        fn = psg.per_sample_value_and_grad(_observing(observer, of_argument), method=method)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", psg.FallbackWarning)
            found.append([fn(w, scale * x) for scale in (3, 1)] + [observer.most])
    assert_trees_close(found[0], found[1])


def test_a_backward_pass_that_keeps_a_tensor_elsewhere_is_found_out(device):
    """In the next call, which would take it for a tensor of its own samples."""
    kept = types.SimpleNamespace(mean=torch.tensor(1.0, device=device))

    def backward(cotangent):
        kept.mean = 0.9 * kept.mean + 0.1 * cotangent.norm()
        return cotangent / kept.mean

    written = function(backward, "old")

    def fn(w, x):
        return written.apply(w @ x).sin().sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    psg.per_sample_norm(fn)(w, x)
    with pytest.raises(psg.StateError, match="kept from an earlier call"):
        psg.per_sample_norm(fn)(w, x)


def test_a_backward_pass_that_reads_what_fn_has_put_elsewhere_runs_in_the_loop(device):
    kept = types.SimpleNamespace()
    written = function(lambda cotangent: cotangent * kept.scale, "old", torch.sin)

    def fn(w, x):
        hidden = w @ x
        kept.scale = hidden.detach()
        return written.apply(hidden).sum()

    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    with pytest.warns(psg.FallbackWarning, match="elsewhere than on its ctx"):
        found = psg.per_sample_grad(fn)(w, x)
    assert_trees_close(found, loop_grad(fn)(w, x))


@pytest.mark.parametrize("shape", [(3, 4), (300, 400)])
def test_a_mask_that_a_backward_pass_writes_by_is_compiled(shape, device):
    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            ctx.save_for_backward(w)
            return w.sign()

        @staticmethod
        def backward(ctx, cotangent):
            cotangent = cotangent.clone()
            cotangent[ctx.saved_tensors[0].abs() > 1] = 0
            return cotangent

    def fn(w, x):
        return (Masked.apply(w) @ x).sin().sum()

    w, x = torch.randn(shape, device=device), torch.randn(5, shape[1], device=device)
    compiled = psg.jit(psg.per_sample_grad(fn), backend="eager")
    assert_trees_close(compiled(w, x), loop_grad(fn)(w, x))
    assert [entry.error for entry in compiled.cache_info()] == [None]


def test_a_backward_pass_of_a_weight_that_does_not_fit_is_not_tried_again(device):
    calls = []

    def backward(cotangent):
        calls.append(cotangent.shape)
        raise torch.OutOfMemoryError("it does not fit")

    written = function(backward, "old")
    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="it does not fit"):
        psg.per_sample_grad(lambda w, x: (written.apply(w) @ x).sin().sum())(w, x)
    assert len(calls) == 1


def scale_of(values):
    """What a loop reads; an error that is handled, where it cannot be read."""
    try:
        return 2.0 if values.sum() > 0 else 3.0
    except Exception:
        return 7.0


READING = {
    "forward": lambda rule: function(lambda cotangent: cotangent, rule, lambda y: y * scale_of(y)).apply,
    "backward": lambda rule: function(lambda cotangent: cotangent * scale_of(cotangent), rule).apply,
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("rule", ["old", False, True])
@pytest.mark.parametrize("where", READING)
def test_an_error_that_a_function_handles(where, rule, disabled, device):
    """Of a read that only a loop can do: no mode that watches fn sees what the function calls."""
    apply = READING[where](rule)

    def fn(w, x):
        return (apply(w * x) * x).square().sum()

    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    x[0] = w.sign()
    x[1] = -w.sign()
    with psg.rules.disabled() if disabled else contextlib.nullcontext():
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
        assert not is_right_under_vmap(fn, w, x, expected=loop_grad(fn)(w, x))


@pytest.mark.parametrize("disabled", [False, True])
def test_an_error_that_a_hook_handles(disabled, device):
    def fn(w, x):
        h = w * x
        h.register_hook(lambda cotangent: cotangent * scale_of(x))
        return h.sum()

    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    with (
        psg.rules.disabled() if disabled else contextlib.nullcontext(),
        pytest.warns(psg.FallbackWarning, match="a hook, handles an error"),
    ):
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
        assert not is_right_under_vmap(fn, w, x, expected=loop_grad(fn)(w, x))


@pytest.mark.parametrize("disabled", [False, True])
def test_tangents_that_a_backward_takes_of_solutions(disabled, device):
    """Under two vmaps torch's own are those of other pivots."""
    base = torch.tensor([[0.1, 3, 1], [0.5, 0.2, 4], [5, 1, 0.3]], device=device)

    def backward(cotangent):
        return torch.func.jacfwd(lambda c: torch.linalg.solve(base + torch.outer(c, c), c))(cotangent) @ cotangent

    apply = function(backward, True).apply

    def fn(w, x):
        return (apply(w * x) * x).sin().sum()

    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    with psg.rules.disabled() if disabled else contextlib.nullcontext(), pytest.warns(psg.FallbackWarning, match="other pivots"):
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
        assert not is_right_under_vmap(fn, w, x, expected=loop_grad(fn)(w, x))
