"""Ops of the user's own: torch.library ops, autograd functions, and rules for them."""

import collections
import functools
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_derivatives_agree
from cases import Problem
from conftest import as_large
from torch import Tensor

import psg
from psg._torch import _functions
from psg.factors import Dense, Outer, Rows
from psg.rules import _registry
from psg.testing import assert_trees_close, loop_grad

# vmap has no batching rule for a user's op, and warns of that itself.
quiet = pytest.mark.filterwarnings("ignore:There is a performance drop")


@torch.library.custom_op("psg_tests::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def _backward(ctx, cotangent):
    x, weight = ctx.saved_tensors
    return cotangent @ weight, cotangent.reshape(-1, cotangent.shape[-1]).T @ x.reshape(-1, x.shape[-1])


project.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Cube(torch.autograd.Function):
    """w x^3, with a backward pass of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return weight * x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        x, weight = ctx.saved_tensors
        return 3 * cotangent * weight * x**2, cotangent * x**3


def positions(tensor):
    return tensor.reshape(len(tensor), -1, tensor.shape[-1])


def project_rule(x, weight):
    return x @ weight.T, {"weight": lambda cotangent: Outer(positions(cotangent), positions(x))}


@pytest.fixture
def rule_for_project():
    before = dict(_registry._rules)
    yield lambda op: psg.rule(op, params=("weight",))(project_rule)
    _registry._rules.clear()
    _registry._rules.update(before)


CALLS = {
    "the function": project,
    "the packet": torch.ops.psg_tests.project,
    "the overload": torch.ops.psg_tests.project.default,
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def test_a_rule_for_an_op_that_has_run_before(rule_for_project, device):
    fn = lambda w, x: torch.sinc(w * x).sum()  # noqa: E731
    w, x = torch.randn(4, device=device), torch.randn(5, 4, device=device)
    expected, calls = psg.per_sample_grad(fn)(w, x), []
    assert_trees_close(expected, loop_grad(fn)(w, x), rtol=1e-9)

    @psg.rule(torch.sinc, params=())
    def sinc(input):
        calls.append(input.shape)
        return torch.sinc(input), {}

    assert_trees_close(psg.per_sample_grad(fn)(w, x), expected)
    assert calls == [(5, 4)]


@each_call
@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_library_op_without_a_rule(call, n, device):
    weight, x = torch.randn(3, 4, device=device), torch.randn(n, 2, 4, device=device)
    constant = torch.randn(3, 4, device=device)
    fn = lambda weight, x: (call(x, weight) * call(x, constant)).tanh().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn)(weight, x), loop_grad(fn)(weight, x), rtol=1e-9)


@torch.library.custom_op("psg_tests::rows_of", mutates_args=())
def rows_of(x: torch.Tensor) -> int:
    ROWS_ASKED.append(None)
    return x.shape[0]


ROWS_ASKED = []


def test_a_library_op_on_constants_runs_once(device):
    constant, weight, x = torch.ones(6, 2, device=device), torch.randn(4, device=device), torch.randn(5, 4, device=device)
    ROWS_ASKED.clear()
    fn = lambda weight, x: (weight * x).sin().sum() * rows_of(constant)  # noqa: E731
    grads = psg.per_sample_grad(fn)(weight, x)
    assert len(ROWS_ASKED) == 1
    assert_trees_close(grads, loop_grad(fn)(weight, x), rtol=1e-9)


def test_random_overloads_draw_as_the_samples_shall(device):
    """They have no batching rule either: what vmap does for them depends on its randomness."""
    fn = lambda weight, x: (weight * x * torch.ops.aten.rand.default([4], device=x.device)).sum()  # noqa: E731
    weight, x = torch.randn(4, device=device), torch.ones(5, 4, device=device)
    same = psg.per_sample_grad(fn, randomness="same")(weight, x)
    assert torch.equal(same, same[:1].expand(5, 4))
    different = psg.per_sample_grad(fn)(weight, x)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        psg.per_sample_grad(fn, randomness="error")(weight, x)


@each_call
@pytest.mark.parametrize("registered", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_library_op_with_a_rule(registered, call, n, rule_for_project, device):
    rule_for_project(registered)
    weight, x = torch.randn(3, 4, device=device), torch.randn(n, 2, 4, device=device)
    fn = lambda weight, x: call(x, weight).tanh().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn)(weight, x), loop_grad(fn)(weight, x), rtol=1e-9)
    if n:
        assert [leaf.kind for leaf in psg.explain(fn, method="capture")(weight, x).leaves] == ["Outer"]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_an_autograd_function(n, device):
    weight, x = torch.randn(4, device=device), torch.randn(n, 4, device=device)
    fn = lambda weight, x: Cube.apply(x.sin(), weight).tanh().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(weight, x), loop_grad(fn)(weight, x), rtol=1e-9)


def test_a_python_function_that_no_mode_sees():
    with pytest.raises(psg.InputError, match=r"psg.rule\('positions'\).*psg\.primitive"):
        psg.rule(positions, params=("tensor",))(lambda tensor: tensor)


@pytest.fixture
def gained(monkeypatch):
    """A primitive; rules that are registered for it last as long as the test."""
    monkeypatch.setattr(_registry, "_rules", dict(_registry._rules))

    @psg.primitive
    def gained(x, gain):
        return x * gain

    return gained


@pytest.mark.parametrize(
    "rule, message",
    [
        (lambda x, gain: x * gain, r"has to return \(output, \{parameter: builder\}\).*got Tensor"),
        (lambda x, gain: (x * gain, {}), "gives no builder for the parameter gain"),
        (lambda x, gain: ((x * gain).sum(0), {"gain": Dense}), r"the 4 samples in dim 0, got \(2,\)"),
        (lambda x, gain: (3.0, {"gain": Dense}), "the 4 samples in dim 0, got float"),
        (lambda x, gain: ((x * gain, None), {"gain": Dense}), r"the 4 samples in dim 0, got \(4, 2\), NoneType"),
        (lambda x, gain: (x * gain, {"gain": Dense(x)}), "gives a Dense as the builder for gain; expected a function from the"),
        (lambda x, gain: (x * gain, {"gain": lambda cotangent: cotangent * x}), "gives a Tensor; expected one of psg.factors"),
        (lambda x, gain: (x * gain, {"gain": lambda cotangent: Dense(cotangent[:, :1])}), r"shape \(1,\), the parameter has"),
        (
            lambda x, gain: (x * gain, {"gain": lambda cotangent: Outer(cotangent, x)}),
            r"Outer: expected \[n, t, a\] and \[n, t, b\], got \(4, 2\)",
        ),
        (lambda x, gain: (x * gain, {"gain": lambda cotangent: Dense(cotangent.sum())}), "its Dense for gain of gained has too few"),
        (
            lambda x, gain: (x * gain, {"gain": lambda cotangent: Rows(x.long(), cotangent, 2)}),
            r"Rows: expected an index \[n, t\] and a cotangent \[n, t, d\], got \(4, 2\) and \(4, 2\)",
        ),
        (
            lambda x, gain: (x * gain, {"gain": lambda cotangent: Rows(x, cotangent[..., None], 2)}),
            "Rows: expected an index of integers",
        ),
        (
            lambda x, gain: (x * gain, {"gain": lambda cotangent: Rows(2 * x.long(), cotangent[..., None], 2)}),
            r"Rows: expected an index of integers in \[0, 2\), got integers from 2 to 2",
        ),
    ],
)
def test_a_rule_that_is_broken_says_so(rule, message, gained, device):
    psg.rule(gained, params=("gain",))(rule)
    with pytest.raises(psg.InputError, match=message):
        psg.per_sample_grad(lambda p, x: gained(x, p).sum())(torch.ones(2, device=device), torch.ones(4, 2, device=device))


@pytest.mark.parametrize(
    "builders", [{}, {"factors[1]": Dense}, {"factors": Dense}, {"factors": [Dense]}], ids=["none", "entry", "function", "too few"]
)
def test_a_rule_gives_a_list_of_builders_for_a_list(builders, monkeypatch, device):
    monkeypatch.setattr(_registry, "_rules", dict(_registry._rules))
    multiplied = psg.primitive(lambda factors: factors[0] * factors[1])
    fn, args = lambda p, x: multiplied([x, p]).sum(), (torch.ones(2, device=device), torch.ones(4, 2, device=device))  # noqa: E731
    psg.rule(multiplied, params=("factors",))(
        lambda factors, shared=(): (factors[0] * factors[1], {"factors": [None, lambda c: Dense(c * factors[0])]})
    )
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(*args), args[1])
    psg.rule(multiplied, params=("factors",))(lambda factors, shared=(): (factors[0] * factors[1], builders))
    for method in ("auto", "capture"):
        with pytest.raises(psg.InputError, match=r"no builder for the parameter factors\[1\].*expected {'factors': \[builder, ...\]}"):
            psg.per_sample_grad(fn, method=method)(*args)


class Scaled(torch.autograd.Function):
    """A Function of the user's own."""


@pytest.mark.parametrize("op", [torch.nn.Linear, lambda x, gain: x, Scaled.apply, Scaled], ids=["module", "lambda", "apply", "Function"])
def test_what_calls_nobody_sees_is_refused_at_once(op):
    with pytest.raises(psg.InputError, match=r"does not see calls of this.*@psg.rule\(op\)"):
        psg.rule(op)


def test_a_function_without_a_module(gained, device):
    """As `exec` makes it in a namespace without a name."""
    gained.__module__ = None
    psg.rule(gained, params=("gain",))(lambda x, gain: (x * gain, {"gain": lambda cotangent: Dense(cotangent * x)}))
    psg.check(lambda p, x: gained(x, p).sum())(torch.ones(2, device=device), torch.ones(4, 2, device=device))


def test_annotations_may_be_written_as_text():
    def plain(x, factor: "float | None" = None): ...

    def unknown(x, factor: "Nowhere" = None): ...  # noqa: F821

    assert _registry.Rule.of(plain, ()).numbers == {"factor"} and not _registry.Rule.of(unknown, ()).numbers


class Rounded(torch.autograd.Function):
    """A straight-through estimator, as for training quantised networks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w, steps):
        return (w * steps).round() / steps, w.abs().amax()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx, cotangent, of_most):
        w, most = ctx.saved_tensors
        return cotangent * (w.abs() < most) + of_most * (w.abs() == most) * w.sign(), None


class Unbatched(torch.autograd.Function):
    """The same without a rule for vmap."""

    forward, setup_context, backward = Rounded.forward, Rounded.setup_context, Rounded.backward


class Dithered(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(w):
        return w + torch.rand_like(w)

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("function", [Rounded, Unbatched], ids=["a rule for vmap", "none"])
def test_an_autograd_function_of_a_weight_alone_is_computed_once(function, n, device):
    def fn(p, x):
        w, most = function.apply(p["w"] * p["scale"], 4)
        return (F.linear(x, w).tanh() / most).square().sum()

    params = {"w": torch.randn(3, 4, device=device), "scale": torch.rand(3, 1, device=device)}
    x = torch.randn(n, 2, 4, device=device)
    psg.check(fn, method="capture")(params, x)
    assert any("custom_function_call: derived" in leaf.uses for leaf in psg.explain(fn)(params, x).leaves)


def test_an_autograd_function_of_a_weight_that_draws_draws_for_every_sample(device):
    w, x = torch.zeros(3, device=device), torch.ones(5, 3, device=device)
    values, grads = psg.per_sample_value_and_grad(lambda w, x: (Dithered.apply(w) * x).square().sum() / 2)(w, x)
    assert len(values.unique()) == 5
    assert_trees_close(grads.square().sum(1) / 2, values)


@pytest.mark.parametrize("make", [lambda w, x: w * x, lambda w, x: w.clone()], ids=["in both passes", "in the backward alone"])
def test_an_autograd_function_of_a_weight_that_closes_over_the_sample(make, device):
    def fn(w, x):
        class Scaled(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(w):
                return make(w, x)

            @staticmethod
            def setup_context(ctx, inputs, output): ...

            @staticmethod
            def backward(ctx, cotangent):
                return cotangent * x

        return Scaled.apply(w).sin().sum()

    w, x = torch.randn(4, 3, device=device), torch.randn(5, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), make(w, x[:, None]).cos() * x[:, None])


class Quantised(torch.autograd.Function):
    """A straight-through estimator in the old style, with clipped gradients."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.round()

    @staticmethod
    def backward(ctx, cotangent):
        (w,) = ctx.saved_tensors
        return cotangent.clamp(-1, 1) * (w.abs() < 2)


class Reversed(torch.autograd.Function):
    """A gradient reversal in the old style."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, cotangent):
        return -ctx.scale * cotangent, None


class Both(torch.autograd.Function):
    """Two outputs of two arguments, of which one backward is None."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.set_materialize_grads(False)
        return x * w, w.sin()

    @staticmethod
    def backward(ctx, c, d):
        x, w = ctx.saved_tensors
        by_product = torch.zeros_like(x * w) if c is None else c
        return (by_product * w if ctx.needs_input_grad[0] else None), by_product * x + (0 if d is None else d * w.cos())


class Measured(torch.autograd.Function):
    """The derivative depends on a Python value of the data."""

    @staticmethod
    def forward(ctx, x):
        ctx.total = float(x.sum())
        return x * ctx.total

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.total if ctx.total > 0 else cotangent


_quantised, _reversed = Quantised.apply, Reversed.apply  # bound before psg's patch


class Ruleless(torch.autograd.Function):
    """In the new style, without a rule for vmap."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent * ctx.saved_tensors[0].cos()


def _method_and_code():
    method = vars(torch.autograd.Function)["apply"]
    return method, getattr(getattr(method, "__func__", None), "__code__", None)


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (Quantised.apply(w * 3) @ x).sin().sum() * 5,
        lambda w, x: (Quantised.apply(w) @ x).sin().sum() + (w @ x).sum(),
        lambda w, x: Reversed.apply((w @ x).tanh(), 0.5).square().sum(),
        lambda w, x: (Quantised.apply(w) @ Reversed.apply(x * w[0], 2.0)).sum(),
        lambda w, x: sum(part.square().sum() for part in Both.apply(x, w[0])),
        lambda w, x: Both.apply(x, w * 2)[0].sin().sum(),
        lambda w, x: Both.apply(x.cos(), x)[1].sum() * w.sum(),
        lambda w, x: Measured.apply(w @ x).square().sum() + Measured.apply(w).sum(),
        lambda w, x: Ruleless.apply(w @ x).square().sum() + Ruleless.apply(w).sum() * x.sum(),
        lambda w, x: (w @ (x * Quantised.apply(torch.full((4,), 0.7, device=x.device)))).sin().sum(),
        pytest.param(
            lambda w, x: (_quantised(w) @ _reversed(x * w[0], 2.0)).square().sum(),
            marks=pytest.mark.skipif(not _functions.SEES_BOUND, reason="psg does not see these calls"),
        ),
    ],
)
def test_functions_that_vmap_cannot_run(fn, n, device):
    w, x = torch.randn(3, 4, device=device), torch.randn(n, 4, device=device)
    before = _method_and_code()
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    assert _method_and_code() == before


def test_a_function_in_the_old_style_keeps_factors(device, monkeypatch):
    as_large(monkeypatch)
    loss, w = lambda w, x: (F.linear(x, Quantised.apply(w)) ** 2).sum(), torch.randn(6, 7, device=device)
    (leaf,) = psg.explain(loss)(w, torch.randn(4, 7, device=device)).leaves
    assert leaf.uses == {"custom_function_call: derived": 1, "linear: rule": 1}


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent


class Secret(torch.autograd.Function):
    """Writes into its argument without saying so."""

    @staticmethod
    def forward(ctx, x):
        return x.mul_(2).clone()

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent


class PastAutograd(torch.autograd.Function):
    """Writes into its argument so that autograd does not see it."""

    @staticmethod
    def forward(ctx, x):
        x.data.mul_(2)
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 2 * cotangent * x.cos()


class Shifted(torch.autograd.Function):
    """A softmax that shifts its argument in place, as TabNet's sparsemax does; its output also depends on a second one."""

    @staticmethod
    def forward(ctx, x, scale):
        x -= x.amax(-1, keepdim=True)
        output = x.exp() / x.exp().sum(-1, keepdim=True)
        ctx.save_for_backward(x, output, scale)
        return output * scale

    @staticmethod
    def backward(ctx, cotangent):
        x, output, scale = ctx.saved_tensors
        scaled = cotangent * scale
        return output * (scaled - (output * scaled).sum(-1, keepdim=True)) + x, (cotangent * output).sum().expand(scale.shape)


class Itself(torch.autograd.Function):
    """Writes into its argument, and returns a view of it."""

    @staticmethod
    def forward(ctx, x):
        return x.mul_(2)[:]

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


class Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, "a word"

    @staticmethod
    def backward(ctx, cotangent, _):
        return 2 * cotangent


class Injected(torch.autograd.Function):
    """Zero, whose gradient is that of half the squared norm."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.zeros((), device=x.device, dtype=x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0]


class Apart(torch.autograd.Function):
    """Two products, of which the second does not depend on the first argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w, 2 * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, first, second):
        x, w = ctx.saved_tensors
        return first * w, first * x + 2 * second


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log):
        log.append(x.detach().abs())
        return x * 3

    @staticmethod
    def backward(ctx, cotangent):
        return 3 * cotangent, None


def _logging(w, x):
    log = [torch.ones_like(x[:3])]
    return (Logged.apply(w @ x, log) * log[-1]).sum()


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log):
        log[0].append(len(log[0]))
        ctx.log = log[0]
        return x * 3

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.log.pop(), None


class Settings(dict):
    """A dict whose entries are attributes."""

    __getattr__ = dict.__getitem__


class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, settings):
        ctx.save_for_backward(x)
        ctx.settings = settings
        return x ** settings["powers"][0]

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        power = getattr(ctx.settings, "powers", ctx.settings["powers"])[0]
        return cotangent * power * x ** (power - 1), None


class Holder:
    seen = None


class Remembering(torch.autograd.Function):
    seen = None

    @staticmethod
    def forward(ctx, x, holder):
        ctx.holder = Remembering if holder is None else holder
        ctx.holder.seen = x
        return x * 3

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.holder.seen, None


def _recalling(write, read):
    """A function that keeps its argument in a place that its backward reads."""

    class Recalling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            write(x.detach())
            return x.sin()

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent * read().to(cotangent).cos()

    return lambda w, x: Recalling.apply(w @ x).sum()


_last = {}
_queue = collections.deque()
_holder = Holder()
_seen = None
_buffer = torch.zeros(3)
_module = types.ModuleType("somewhere_else")


def _keep(x):
    global _seen
    _seen = x


def _closing_over(w, x):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w @ x

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent[:, None] * x

    return Product.apply(w).sum()


def _used_again(function, y):
    return (function(y) + y * y.sin()).sum()


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: _used_again(Secret.apply, w @ x),
        lambda w, x: (w @ Secret.apply(x)).sin().sum() + (w @ x).cos().sum(),
        lambda w, x: _used_again(lambda y: Secret.apply(y[1:]).sum(), w @ x),
        lambda w, x: (lambda y, view: (Secret.apply(y)[1:] * view.sin()).sum() + y.cos().sum())(*(lambda y: (y, y[:2]))(w @ x)),
        lambda w, x: _used_again(lambda y: Shifted.apply(y, w[0, :1]), w @ x),
        lambda w, x: Shifted.apply(w @ x, w[0] @ x).sin().sum(),
    ],
    ids=["result", "input", "view", "base", "two arguments", "two results"],
)
def test_functions_that_write_into_what_the_samples_compute(fn, n, device):
    w, x = torch.randn(3, 4, device=device), torch.randn(n, 4, device=device)
    before = x.clone()
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("settings", [{"powers": [3]}, Settings(powers=[3], name="cube")], ids=["dict", "subclass"])
def test_functions_that_are_given_settings(settings, n, device):
    w, x = torch.randn(3, 4, device=device), torch.randn(n, 4, device=device)
    for fn in (
        lambda w, x: Power.apply(w @ x, settings).sin().sum(),
        lambda w, x: (Power.apply(w, settings) @ x).sin().sum(),
        lambda w, x: (Power.apply(w * 2, settings) * x).sin().sum(),
    ):
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
    if n and type(settings) is dict:
        (leaf,) = psg.explain(lambda w, x: (Power.apply(w, settings) @ x).sum(), method="capture")(w, x).leaves
        assert "custom_function_call: derived" in leaf.uses


def test_torchs_own_normalization_across_channels(device):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.CrossMapLRN2d(3)).to(device)
    fn, params = psg.stateless(module, lambda output: output.square().sum())
    x = torch.randn(4, 3, 5, 5, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(params, x), loop_grad(fn)(params, x))


def test_a_function_that_writes_in_compiled_calls(device):
    def fn(w, x):
        return _used_again(lambda y: Shifted.apply(y, w[0, :1]), w @ x)

    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    compiled = psg.jit(psg.per_sample_grad(fn), backend="eager")
    for scale in (1, -3):
        assert_trees_close(compiled(w, scale * x), loop_grad(fn)(w, scale * x))
    assert [entry.error for entry in compiled.cache_info()] == [None]


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda w, x: Dirty.apply(w @ x).sum(), "writes into its arguments"),
        (lambda w, x: (Secret.apply(w) @ x).sum(), "writes into its arguments, which all samples share"),
        (lambda w, x: (Secret.apply(w * 2) @ x).sum(), "writes into its arguments, which all samples share"),
        (lambda w, x: (Secret.apply(torch.ones_like(w[:, 0])) * (w @ x)).sum(), "writes into its arguments, which all samples share"),
        (lambda w, x: _used_again(PastAutograd.apply, w @ x), "unseen by autograd"),
        (lambda w, x: Itself.apply(w @ x).sin().sum(), "has other views"),
        (lambda w, x: Noisy.apply(w @ x).sum(), "draws random numbers"),
        (lambda w, x: Listed.apply(w @ x)[0].sum(), "raises TypeError sample by sample"),
        (_logging, "takes a list or a dict with tensors"),
        (lambda w, x: Counted.apply(w @ x, ([],)).sum(), "changes its class, an argument"),
        (lambda w, x: (Counted.apply(w, ([],)) @ x).sum(), "changes its class, an argument"),
        (lambda w, x: Remembering.apply(w @ x, Holder()).sum(), "changes its class"),
        (lambda w, x: Remembering.apply(w @ x, None).sum(), "changes its class"),
        (_recalling(lambda x: _last.update(x=x), lambda: _last["x"]), "what its backward reads elsewhere"),
        (_recalling(_queue.append, _queue.popleft), "what its backward reads elsewhere"),
        (_recalling(lambda x: _queue.append(x), lambda: _queue.popleft()), "what its backward reads elsewhere"),
        (_recalling(lambda x: setattr(_holder, "seen", [x]), lambda: _holder.seen[0]), "what its backward reads elsewhere"),
        (_recalling(_keep, lambda: _seen), "what its backward reads elsewhere"),
        (_recalling(lambda x: setattr(_module, "seen", x), lambda: _module.seen), "what its backward reads elsewhere"),
        (_recalling(lambda x: _buffer.copy_(x), lambda: _buffer), "what its backward reads elsewhere"),
        (lambda w, x: Injected.apply(w @ x) + (w @ x).sin().sum(), "samples are not told apart"),
        (_closing_over, "raises RuntimeError sample by sample"),
        (lambda w, x: torch.func.grad(lambda z: Reversed.apply(w @ z, 0.5).sum())(x).sum(), "runs inside a transform of fn's own"),
    ],
    ids=[
        "dirty",
        "parameter",
        "derived",
        "constant",
        "past autograd",
        "itself",
        "random",
        "no tensor",
        "list",
        "list in a tuple",
        "list and parameter",
        "object",
        "class",
        "dict",
        "method",
        "queue",
        "attribute",
        "global",
        "module",
        "buffer",
        "injection",
        "closure",
        "in a transform",
    ],
)
def test_functions_that_need_a_loop(fn, why, device):
    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    before = x.clone()
    with pytest.raises((psg.PsgError, RuntimeError), match=why):
        psg.per_sample_grad(fn, method="capture")(w, x)
    if "transform" not in why:  # in which torch refuses the old style
        rung = "vmap" if "told apart" in why else "loop"
        with pytest.warns(psg.FallbackWarning, match=f"method='{rung}'"):
            assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    assert torch.equal(x, before)


def test_an_output_of_a_function_that_all_samples_share_is_differentiated(device):
    """Lifted, every sample has an output of its own; where it has none, a derivative is refused."""

    def fn(w, x):
        product, double = Apart.apply(x, w)
        return (product * double.sin()).sum()

    w, x = torch.randn(4, device=device), torch.randn(5, 4, device=device)
    own, other = (w.clone().requires_grad_() for _ in range(2))
    with pytest.raises(psg.PsgError, match="samples are not told apart"):
        psg.per_sample_norm(fn, method="vmap")(own, x).square().sum().backward()
    psg.per_sample_norm(fn)(own, x).square().sum().backward()
    rows = [torch.autograd.grad(fn(other, row), other, create_graph=True)[0] for row in x]
    sum(row.square().sum() for row in rows).backward()
    assert_trees_close(own.grad, other.grad, per_sample=False)


def test_attributes_that_are_compared_stay_alive():
    """Otherwise an object that replaces one could lie in its place, and count as the same."""
    holder = Holder()
    holder.seen = torch.zeros(3)
    former, before = weakref.ref(holder.seen), _functions.state_of(Remembering, [holder])
    assert _functions.same_state(before, _functions.state_of(Remembering, [holder]))
    holder.seen = torch.zeros(3)
    assert former() is not None and not _functions.same_state(before, _functions.state_of(Remembering, [holder]))


def test_a_function_that_is_given_one_tensor_twice_sees_that(device):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            ctx.factor = 1 if a is b else 10
            return a * b

        @staticmethod
        def backward(ctx, cotangent):
            a, b = ctx.saved_tensors
            return ctx.factor * cotangent * b, ctx.factor * cotangent * a

    def fn(w, x):
        z = w * x
        return Product.apply(z, z).sum() + Product.apply(z, w).sum()

    w, x = torch.randn(4, device=device), torch.randn(5, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


def test_a_function_with_a_sparse_gradient(device):
    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, table, index):
            ctx.save_for_backward(index)
            ctx.shape = table.shape
            return table[index]

        @staticmethod
        def backward(ctx, cotangent):
            return torch.sparse_coo_tensor(ctx.saved_tensors[0][None], cotangent, ctx.shape), None

    table, index = torch.randn(5, 3, device=device), torch.randint(5, (4, 2), device=device)
    for fn in (
        lambda table, index: Look.apply(table, index).sin().sum(),
        lambda table, index: Look.apply(table, index).sin().sum() + table.square().sum(),
    ):
        expected = loop_grad(fn)(table, index)
        assert_trees_close(psg.per_sample_grad(fn)(table, index), expected)
        assert_trees_close(psg.per_sample_norm(fn)(table, index), expected.flatten(1).norm(dim=1))


def test_a_function_that_runs_out_of_memory_ends_the_call(device):
    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        psg.per_sample_grad(lambda w, x: Full.apply(w * x).sum())(torch.ones(2, device=device), torch.ones(3, 2, device=device))


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: F.linear(x, Rounded.apply(w, 4)[0]).sin().sum(),
        lambda w, x: F.linear(x, Quantised.apply(w)).sin().sum(),
        lambda w, x: Reversed.apply(w @ x, 0.5).sin().sum(),
        lambda w, x: Ruleless.apply(w @ x).sin().sum(),
    ],
)
def test_autograd_functions_compile(fn):
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    assert_trees_close(fast(w, x), loop_grad(fn)(w, x))
    assert fast.cache_info()[0].error is None


class OwnRule(torch.autograd.Function):
    """A straight-through estimator whose own rule for vmap does not call it: below vmap autograd would see the rounding alone."""

    @staticmethod
    def forward(h):
        return h.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent

    @staticmethod
    def vmap(info, in_dims, h):
        return h.round(), in_dims[0]


class Unit(OwnRule):
    """The backward mixes the entries of a sample, and its own rule for vmap hands it all samples together."""

    @staticmethod
    def forward(h):
        return h.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent / (cotangent.norm() + 1)

    @staticmethod
    def vmap(info, in_dims, h):
        return Unit.apply(h), in_dims[0]


@torch.library.custom_op("psg_tests::rounded", mutates_args=())
def rounded(h: Tensor) -> Tensor:
    return h.round()


@torch.library.custom_op("psg_tests::unit", mutates_args=())
def unit(h: Tensor) -> Tensor:
    return h.clone()


rounded.register_autograd(lambda ctx, cotangent: cotangent)
rounded.register_vmap(lambda info, in_dims, h: (h.round(), in_dims[0]))
unit.register_autograd(lambda ctx, cotangent: cotangent / (cotangent.norm() + 1))
unit.register_vmap(lambda info, in_dims, h: (unit(h), in_dims[0]))


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("op", [OwnRule.apply, Unit.apply, rounded, unit], ids=["function", "mixing function", "op", "mixing op"])
@pytest.mark.parametrize("place", [lambda op, w, x: op(w @ x), lambda op, w, x: op(w) @ x, lambda op, w, x: op(w * 2) @ op(x * w[0])])
def test_rules_for_vmap_of_the_user_s_own(place, op, n, device):
    def fn(w, x):
        return place(op, w, x).square().sum()

    w, x = 3 * torch.randn(3, 4, device=device), torch.randn(n, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))


def test_a_rule_may_take_shared_without_a_default(rule_for_project, device):
    """As the docstring of `rule` writes it: it was never run."""
    seen = []

    def by_rule(x, weight, *, shared):
        seen.append(shared)
        return x @ weight.T, {"weight": lambda cotangent: Outer(cotangent, x)}

    psg.rule(project, params=("weight",))(by_rule)
    weight, x = torch.randn(3, 4, device=device), torch.randn(5, 2, 4, device=device)
    fn = lambda weight, x: project(x, weight).sin().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn)(weight, x), loop_grad(fn)(weight, x))
    assert seen == [{"weight"}]


@pytest.mark.parametrize("params", ["weight", 3])
def test_params_of_a_rule_are_a_tuple(params):
    with pytest.raises(psg.InputError, match=r"params=('weight'|3)\): expected a tuple of names, such as \('weight',\)"):
        psg.rule(project, params=params)


def test_a_rule_for_no_op_and_a_primitive_of_no_function():
    with pytest.raises(psg.InputError, match=r"expected the ops that the rule is for"):
        psg.rule()
    with pytest.raises(psg.InputError, match=r"psg\.primitive: expected a function of tensors, got an int"):
        psg.primitive(3)
    with pytest.raises(psg.InputError, match=r"got the class Function\. Give its apply: psg\.primitive\(Function\.apply\)"):
        psg.primitive(torch.autograd.Function)
    with pytest.raises(psg.InputError, match=r"psg\.rule: expected to decorate a function, got a NoneType"):
        psg.rule(project, params=("weight",))(None)


def test_a_rule_whose_sides_do_not_fit_is_an_error(rule_for_project, device):
    """Its norms were wrong: they never multiply the two sides."""
    psg.rule(project, params=("weight",))(
        lambda x, weight: (x @ weight.T, {"weight": lambda cotangent: Outer(cotangent.sum(1, keepdim=True), x)})
    )
    weight, x = torch.randn(3, 4, device=device), torch.randn(5, 2, 4, device=device)
    with pytest.raises(psg.InputError, match=r"psg.factors.Outer: expected \[n, t, a\] and \[n, t, b\]"):
        psg.per_sample_norm(lambda weight, x: project(x, weight).sin().sum())(weight, x)


# Primitives without a rule: their ops are watched like any others


@psg.primitive
def largest(x):
    return x.max()  # of which vmap splits ties in another way


@psg.primitive
def rolled(x):
    return torch.roll(x, 1)  # vmap rolls the samples of a scalar


@psg.primitive
def distances(x):
    return torch.cdist(x[:, None], x[:, None])  # of which vmap(grad) has another gradient


@psg.primitive
def doubled_(x):
    return x.mul_(2)


@psg.primitive
def gated(x, out=None):
    return x if out is None else x * out


PRIMITIVES = {
    "max": lambda w, x: largest(w * x.sign().abs()),
    "roll": lambda w, x: rolled(w.sum() * x.sum()) * x.sum(),
    "distances": lambda w, x: distances(w * x).sin().sum(),
    "write": lambda w, x: (doubled_(x) * w).sum() + x.sum() * w.sum(),
    "out": lambda w, x: (gated(w, out=x) * w).sum(),
    "closure": lambda w, x: psg.primitive(lambda x: F.linear(x, w[None]).square())(x).sum(),
    "transform": lambda w, x: torch.func.grad(lambda x: largest(w * x.sin()))(x).sum(),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_the_ops_of_a_primitive_are_watched(name, method, device):
    fn, x = PRIMITIVES[name], torch.randn(4, 3, device=device, dtype=torch.float64)
    w, before = torch.ones(3, device=device, dtype=torch.float64), x.clone()
    if (name, method) == ("distances", "vmap"):
        with pytest.raises(psg.PsgError, match="the gradient of cdist"):
            psg.per_sample_grad(fn, method=method)(w, x)
    else:
        assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x), loop_grad(fn)(w, before))
    assert (x == before).all()


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_batch_norm_in_a_primitive(method, device):
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    normalized = psg.primitive(lambda x: F.batch_norm(x, mean, var, training=True))
    with pytest.raises(psg.StateError, match="running statistics"):
        psg.per_sample_grad(lambda w, x: normalized(w * x).sum(), method=method)(mean, torch.randn(4, 2, 3, device=device))
    assert not mean.any()


def test_a_primitive_in_a_function_of_a_batch(device):
    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    closed = lambda w, x: psg.primitive(lambda x: F.linear(x, w[None]).sin())(x)[:, 0]  # noqa: E731
    assert_trees_close(psg.per_sample_grad(closed, method="batch")(w, x), loop_grad(lambda w, x: (x @ w).sin())(w, x))


@torch.library.custom_op("psg_tests::clone", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


tripled.register_autograd(lambda ctx, cotangent: cotangent * 3)


@torch.library.custom_op("psg_tests::relu", mutates_args=())
def noised(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


noised.register_autograd(lambda ctx, cotangent: cotangent)


@quiet
@pytest.mark.parametrize("op", [torch.ops.psg_tests.clone, torch.ops.psg_tests.clone.default, tripled])
def test_an_op_of_a_library_is_none_of_torchs(op, device):
    w, x = torch.randn(20, 20, device=device, dtype=torch.float64), torch.randn(3, 20, device=device, dtype=torch.float64)
    expected = loop_grad(lambda w, x: F.linear(x, 3 * w).square().sum())(w, x)
    fn = lambda w, x: F.linear(x, op(w)).square().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn)(w, x), expected)
    assert_trees_close(psg.per_sample_norm(fn)(w, x), expected.flatten(1).norm(dim=1))


@quiet
def test_an_op_of_a_library_draws_for_each_sample_under_any_name(device):
    w, x = torch.randn(3, device=device), torch.ones(4, 3, device=device)
    values, _ = psg.per_sample_value_and_grad(lambda w, x: (torch.ops.psg_tests.relu(w) * x).sum())(w, x)
    assert len(set(values.tolist())) == 4


# Arguments by other names


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (torch.zeros_like(input=x) + torch.clone(input=w * x)).sum(),
        lambda w, x: torch.index_select(w * x, axis=0, index=torch.tensor([0], device=x.device)).sum(),
        lambda w, x: torch.sum(w * x, axis=0, keepdims=True).sin().sum() + (w * x).mean(axis=-1),
        lambda w, x: torch.cumsum(torch.stack([w, w * x], axis=1), axis=0).square().sum(),
        lambda w, x: w.norm(0) * x.sum() + (w * x).sum(),
    ],
)
def test_arguments_by_their_other_names_stay_on_the_first_rung(fn, device):
    w, x = torch.rand(3, device=device, dtype=torch.float64), torch.rand(4, 3, device=device, dtype=torch.float64)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


@pytest.mark.filterwarnings("error")
def test_requires_grad_by_name(device):
    def fn(w, x):
        x = x.clone().requires_grad_(requires_grad=True)
        return torch.autograd.grad((w * x).square().sum(), x, create_graph=True)[0].sum()

    w, x = torch.rand(3, device=device, dtype=torch.float64), torch.rand(4, 3, device=device, dtype=torch.float64)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), 4 * w * x)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("function", [Dirty, Secret])
def test_functions_that_write_into_a_value_computed_from_parameters(function, device):
    def fn(w, x):
        value = w * 1
        before = value + 1
        function.apply(value)
        return before.sum() * x + (value + 1).sin().sum() * x

    w, x = torch.randn(3, device=device), torch.randn(4, device=device)
    kept = w.clone()
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    assert torch.equal(w, kept)


CONSTANT_RETURNED = {
    "broadcast": lambda k, p, x: (torch.broadcast_tensors(k, p)[0] * p).sum() * x.sum(),
    "converted": lambda k, p, x: (k.type_as(p.detach()) * p).sum() * x.sum(),
    "a distribution": lambda k, p, x: torch.distributions.Normal(p, k).log_prob(x).sum(),
}


@pytest.mark.parametrize("name", CONSTANT_RETURNED)
def test_a_constant_that_an_op_returns_as_it_is_stays_a_constant(name, device):
    """It was marked as made in the first call, and refused in the second."""
    k, w, x = torch.rand(3, device=device), torch.randn(3, device=device), torch.randn(4, 3, device=device)
    fn = functools.partial(CONSTANT_RETURNED[name], k)
    for _ in range(2):
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
    assert not vars(k)


def _alone_and_squared(x, gain):
    y = x * gain
    return y, y.square()


def _twice(x, gain):
    y = x * gain
    return y, y


def _beside_its_input(x, gain):
    return x * gain, x


# What a rule returns of one product, or of its input; and what of the cotangents reaches the product.
SEVERAL = {
    "one computed from another": (_alone_and_squared, lambda c, y: c[0] + c[1] * 2 * y),
    "one twice": (_twice, lambda c, y: c[0] + c[1]),
    "an input": (_beside_its_input, lambda c, y: c[0]),
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", SEVERAL)
def test_each_of_several_outputs_has_its_own_cotangent(name, differentiable, device, monkeypatch):
    monkeypatch.setattr(_registry, "_rules", dict(_registry._rules))
    body, cotangent = SEVERAL[name]
    op = psg.primitive(body)

    @psg.rule(op, params=("gain",), differentiable=differentiable)
    def run(x, gain):
        outputs = body(x, gain)
        return outputs, {"gain": lambda c: Dense(cotangent(c, outputs[0]) * x)}

    uses = [
        lambda gain, x: op(x.sin(), gain)[1].sum() * gain.sum(),
        lambda gain, x: (op(x * gain, gain)[0] * op(x, gain)[1]).sum(),
        lambda gain, x: op(x * gain, gain)[0].square().sum(),
        lambda gain, x: op(op(x, gain)[1], gain)[0].exp().sum(),
    ]
    gain, x = torch.rand(3, device=device), torch.rand(4, 3, device=device)
    for fn in uses:
        problem = Problem(fn, (gain, x))
        assert_agrees(problem)
        if name != "an input":  # inside of a transform, psg has no edge for what depends on no parameter
            assert_derivatives_agree(problem)
        psg.per_sample_norm(fn)(gain.clone().requires_grad_(), x)
    assert not x.requires_grad


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_an_output_that_a_builder_reads_must_not_be_written_into(device, monkeypatch):
    monkeypatch.setattr(_registry, "_rules", dict(_registry._rules))
    op = psg.primitive(lambda x, gain: (x * gain).exp())

    @psg.rule(op, params=("gain",))
    def run(x, gain):
        y = (x * gain).exp()
        return y, {"gain": lambda c: Dense(c * y * x)}

    gain, x = torch.rand(3, device=device), torch.rand(4, 3, device=device)
    assert_agrees(Problem(lambda gain, x: op(x, gain).mul(2).sum(), (gain, x)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch's own, in the loop
        psg.per_sample_grad(lambda gain, x: op(x, gain).mul_(2).sum())(gain, x)
