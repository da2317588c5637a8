"""The capture pass: one call of fn, no weight gradients, derived values computed once, both ways below vmap, nothing left behind."""

import contextlib
import copy
import gc
import operator
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import N, each_case, score
from cases.derived import COMPUTED_ONCE, Scaled
from conftest import as_large
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import psg
from psg._call import Options, prepare
from psg._capture import _backward, _derived, _lifted
from psg._ladder import _ladder
from psg._torch import _functorch
from psg.factors import Outer
from psg.rules import _registry
from psg.testing import assert_trees_close, loop_grad, loop_value_and_grad


def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_fn_is_called_once(device):
    calls = []

    def fn(w, x):
        calls.append(x.shape)
        return score(F.linear(x, w))

    psg.per_sample_grad(fn)(torch.randn(4, 3, device=device), torch.randn(N, 3, device=device))
    assert calls == [(3,)]


def test_norms_compute_no_weight_gradient(device):
    n, sizes = 16, (24, 20, 12, 8)
    params = [torch.randn(o, i, device=device) for i, o in zip(sizes, sizes[1:], strict=False)]

    def fn(p, x):
        for w in p:
            x = F.linear(x, w).tanh()
        return x.sum()

    x = torch.randn(n, sizes[0], device=device)
    layers = [2 * n * w.numel() for w in params]
    # Forward through every layer, backward through all but the first, and nothing else: with one position the norm is
    # a product of norms.
    assert flops(lambda: psg.per_sample_norm(fn)(params, x)) == sum(layers) + sum(layers[1:])
    # The clipped sum is one more product for each layer: what training pays for its weight gradients.
    assert flops(lambda: psg.clipped_grad(fn, 1.0)(params, x)) == 2 * sum(layers) + sum(layers[1:])


def test_a_derived_value_is_computed_once(device):
    n, r, i, o = 8, 2, 6, 5
    params = {"a": torch.randn(r, i, device=device), "b": torch.randn(o, r, device=device)}
    frozen = torch.randn(o, i, device=device)
    x = torch.randn(n, i, device=device)
    derive = 2 * o * r * i

    def fn(p, x):
        return F.linear(x, frozen + p["b"] @ p["a"]).sum()

    with psg.rules.disabled():
        psg.per_sample_grad(fn)(params, x)
    assert flops(lambda: psg.per_sample_grad(fn)(params, x)) <= derive + 2 * n * o * i + 2 * n * derive
    assert_trees_close(psg.per_sample_grad(fn)(params, x), loop_grad(fn)(params, x))


def parts_of(output):
    return [output] if isinstance(output, torch.Tensor) else [part for item in output for part in parts_of(item)]


def with_an_op_on_parameters(name, device):
    """How to compare a function of n samples with the loop; it gives what `explain` says of the parameter.

    The function uses all outputs of the op, with cotangents that differ from sample to sample and from entry to entry.
    """

    def fn(w, x):
        loss = score(w * x[0])
        for part in parts_of(COMPUTED_ONCE[name](w + 0)):
            part = torch.view_as_real(part) if part.is_complex() else part.to(w.dtype)
            loss = loss + ((part * x[0]).sin() * (part + x[1]).cos()).sum() * x[2]
        return loss

    def compare(n, calls=1):
        with torch.device(device):
            w, x = torch.rand(4, 4) + 0.5, torch.randn(n, 3)
            try:
                expected = loop_grad(fn)(w, x)
            except RuntimeError as error:
                if "is not implemented" not in str(error) and "is now removed" not in str(error):
                    raise
                pytest.skip(f"torch {torch.__version__} lacks it: {str(error).splitlines()[0]}")
            for _ in range(calls):
                assert_trees_close(psg.per_sample_grad(fn)(w, x), expected)
            return psg.explain(fn)(w, x).leaves[0].uses

    return compare


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:index_reduce")
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", COMPUTED_ONCE)
def test_an_op_on_parameters_alone_runs_once(name, n, device, monkeypatch):
    as_large(monkeypatch)
    uses = with_an_op_on_parameters(name, device)(n)
    op = name.split()[0]
    assert uses[f"{op}: derived"] and f"{op}: lifted" not in uses


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:index_reduce", "ignore:.*searchsorted.*non-contiguous")
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", COMPUTED_ONCE)
def test_an_op_on_few_numbers_of_parameters_runs_for_every_sample(name, n, device, monkeypatch):
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    uses = with_an_op_on_parameters(name, device)(n, calls=2)  # the first call learns it
    op = name.split()[0]
    assert (f"{op}: derived" in uses) == (op in _derived._UNFIT_FOR_VMAP)


@pytest.mark.parametrize(("n", "size"), [(4, 8), (4, 60), (64, 12), (64, 30)])
@pytest.mark.parametrize("factorise", [torch.linalg.slogdet, torch.linalg.svdvals])
def test_only_small_matrices_are_factorised_for_every_sample(factorise, n, size, device, monkeypatch):
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 20)
    w, x = torch.rand(size, size, device=device) + size * torch.eye(size, device=device), torch.randn(n, device=device)

    def fn(w, x):
        return score(factorise(w + 1)[1]) * x

    for _ in range(2):  # the first call learns it
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    op = f"linalg_{factorise.__name__.removeprefix('linalg_')}"
    most = {"linalg_slogdet": 1 << 15, "linalg_svdvals": 1 << 13}[op]
    assert (f"{op}: derived" in psg.explain(fn)(w, x).leaves[0].uses) == (n * w.nbytes > most)


def few_numbers(p, x):
    # A Gaussian's log density, with standard deviations and correlation computed from parameters.
    deviation = F.softplus(p["raw"]) + 1e-3
    whitened = (x - p["mean"]) / deviation
    mixed = whitened - p["lean"].tanh() * whitened.flip(0)
    return 0.5 * mixed.square().sum() + deviation.log().sum() + 0.01 * p["raw"].norm()


def few_parameters(size, device):
    return {name: torch.randn(size, device=device) for name in ("raw", "mean", "lean")}


@pytest.mark.parametrize("n", [0, 1, 5])
def test_few_numbers_computed_from_parameters_are_lifted(n, device, monkeypatch):
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    calls = []

    def fn(p, x):
        calls.append(x.shape)
        return few_numbers(p, x)

    params, x = few_parameters(2, device), torch.randn(n, 2, device=device)
    expected = loop_grad(few_numbers)(params, x)
    for _ in range(3):  # the first call learns it
        calls.clear()
        grads = psg.per_sample_grad(fn)(params, x)
        assert len(calls) == min(n, 1)
        assert_trees_close(grads, expected)
    if n:
        assert {use.split()[-1] for use in psg.explain(fn)(params, x).leaves[0].uses} == {"lifted"}


def test_many_numbers_computed_from_parameters_are_not_lifted(device, monkeypatch):
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    few, many = few_parameters(2, device), few_parameters(5000, device)

    def fn(p, x):
        return few_numbers(p, x)

    for params in (few, many, few):  # also where the function's earlier calls were on few numbers; the first call learns it
        x = torch.randn(5, params["raw"].numel(), device=device)
        assert_trees_close(psg.per_sample_grad(fn)(params, x), loop_grad(few_numbers)(params, x))
        uses = psg.explain(fn)(params, x).leaves[0].uses
        assert any(use.endswith("derived") for use in uses) == (params is many)


def written_after_no_grad(p, x):
    with torch.no_grad():
        scale = F.linear(x, p["w"]).exp_()
    return scale.add_(F.linear(x, p["w"], p["b"]).relu_())


SMALL_LAYERS = {
    "linear": lambda p, x: F.linear(x, p["w"], p["b"]),
    "linear without a bias": lambda p, x: F.linear(x, p["w"]),
    "linear of a vector": lambda p, x: F.linear(x[0], p["w"], p["b"]),
    "linear of more dimensions": lambda p, x: F.linear(torch.stack([x, x.cos()]), p["w"], bias=p["b"]),
    "linear of strided data": lambda p, x: F.linear(x.mT.contiguous().mT, p["w"], p["b"]),
    "linear of constants": lambda p, x: F.linear(torch.ones_like(x[0]), p["w"], p["b"]) * x.sum(),
    "linear, written into": written_after_no_grad,
    "a frozen weight": lambda p, x: F.linear(x, x.detach().mT @ x, p["w"][0]),
    "matmul of two matrices": lambda p, x: p["w"] @ x.mT,
    "matmul of a vector by a matrix": lambda p, x: x[0] @ p["w"].T,
    "matmul of two vectors": lambda p, x: x[0] @ p["w"][0],
    "matmul of stacks": lambda p, x: torch.stack([x, x.cos()]) @ p["w"].T,
    "addmm of a matrix": lambda p, x: torch.addmm(p["b"] * x[:, :1], x, p["w"].T),
    "addmm of a vector": lambda p, x: torch.addmm(p["b"], x, p["w"].T),
    "matmul": lambda p, x: x @ p["w"].T + p["b"],
    "matmul of a vector": lambda p, x: p["w"] @ x[0] + p["b"],
    "mv": lambda p, x: torch.mv(p["w"], x[0]),
    "addmm": lambda p, x: torch.addmm(p["b"], x, p["w"].T, beta=0.5),
    "addmv": lambda p, x: torch.addmv(p["b"], p["w"], x[0]),
    "einsum": lambda p, x: torch.einsum("ti,oi->to", x, p["w"]) * p["b"],
    "bmm": lambda p, x: torch.bmm(x[None], p["w"].T[None]),
    "tensordot": lambda p, x: torch.tensordot(x, p["w"], ([1], [1])),
    "layer_norm": lambda p, x: F.layer_norm(x, (x.shape[1],), p["w"][0], p["w"][-1]),
    "rms_norm": lambda p, x: F.rms_norm(x, (x.shape[1],), p["w"][0]),
    "several times": lambda p, x: F.linear(F.linear(x, p["w"]).tanh() @ p["w"], p["w"], p["b"]),
}


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("name", SMALL_LAYERS)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    inside=st.booleans(),
    seed=st.integers(0, 99),
)
def test_layers_of_few_numbers(name, n, sizes, inside, seed, device):
    torch.manual_seed(seed)
    positions, inputs, outputs = sizes
    params = {"w": torch.randn(outputs, inputs, device=device), "b": torch.randn(outputs, device=device)}
    x = torch.randn(n, positions, inputs, device=device)

    def fn(p, x):
        layer = lambda x: score(SMALL_LAYERS[name](p, x))  # noqa: E731
        return torch.func.grad(layer)(x).square().sum() if inside else layer(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
        found = psg.per_sample_grad(fn)(params, x)
        norms = psg.per_sample_norm(fn)(params, x)
    expected = loop_grad(fn)(params, x)
    assert_trees_close(found, expected)
    assert_trees_close(norms, psg.tree.norm(expected))


# Ops other than entry by entry, on parameters alone.
FEW = {
    "fft": lambda w: torch.fft.irfft(torch.fft.rfft(w) * torch.fft.rfft(w.flip(1)), w.shape[1]),
    "fft of two dimensions": lambda w: torch.fft.ifft2(torch.fft.fft2(w) * torch.complex(w, w.sin())).real,
    "real fft of all": lambda w: torch.fft.irfftn(torch.fft.rfftn(w).conj().resolve_conj(), w.shape),
    "complex": lambda w: torch.view_as_real(torch.view_as_complex(torch.stack([w, w.cos()], -1)) ** 2).sum(-1),
    "polar": lambda w: torch.polar(w.exp(), w).imag,
    "einsum": lambda w: torch.einsum("ij,kj,kl->il", w, w, w),
    "bmm": lambda w: torch.bmm(w[None], w.T[None])[0] @ w,
    "gather": lambda w: w.gather(0, torch.zeros_like(w, dtype=torch.long)) * w,
    "tile": lambda w: w.tile(2, 1)[: len(w)] * w,
}


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("name", FEW)
@given(sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)), seed=st.integers(0, 99))
def test_few_numbers_that_other_ops_compute_are_lifted(name, n, sizes, seed, device):
    torch.manual_seed(seed)
    w, x = torch.randn(sizes, device=device), torch.randn(n, *sizes, device=device)

    def fn(w, x):
        return score(FEW[name](w).sin() * x)

    expected = loop_grad(fn)(w, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
        for _ in range(2):  # the first call learns it
            assert_trees_close(psg.per_sample_grad(fn)(w, x), expected)
        if n:
            assert not any("derived" in use for use in psg.explain(fn)(w, x).leaves[0].uses)


def test_few_numbers_run_without_rules_and_many_with_them(device, monkeypatch):
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)

    def fn(w, x):
        return F.linear(x, w).square().sum()

    def uses(n, *sizes, dtype=None):
        w = torch.randn(sizes[-1], sizes[-1], device=device, dtype=dtype)
        return psg.explain(fn)(w, torch.randn(n, *sizes, device=device, dtype=dtype)).leaves[0].uses

    assert uses(3, 4) == uses(3, 5, 4) == {"linear: lifted": 1}
    # Many parameters, much data; more than a few numbers for one row; a dtype in which the gradients of several uses would be rounded.
    assert uses(3, 200) == uses(3, 9999, 4) == uses(3, 64) == uses(3, 5, 4, dtype=torch.bfloat16) == {"linear: rule": 1}
    w, x = torch.randn(4, 4, device=device), torch.randn(3, 5, 4, device=device)
    assert isinstance(psg.factored_grad(fn)(w, x), Outer)  # who asks for factors gets them


def test_a_rule_of_the_user_s_takes_few_numbers_too(device, monkeypatch):
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    monkeypatch.setattr(_registry, "_rules", dict(_registry._rules))
    taken = []

    @psg.rule(F.linear, params=("weight",))
    def own(input, weight, bias=None):
        taken.append(input.shape)
        return input @ weight.T, {"weight": lambda cotangent: Outer(cotangent[:, None], input[:, None])}

    w, x = torch.randn(2, 4, device=device), torch.randn(3, 4, device=device)
    found = psg.per_sample_grad(lambda w, x: F.linear(x, w).sin().sum())(w, x)
    assert taken == [x.shape]
    assert_trees_close(found, loop_grad(lambda w, x: (w @ x).sin().sum())(w, x))


@pytest.mark.parametrize(
    "use",
    [
        lambda w, s, x: F.linear(x, w.exp()),  # by a rule
        lambda w, s, x: F.linear(x, s.exp() * w),  # by a rule, one step later
        lambda w, s, x: (s.exp() * torch.ones(40_000, dtype=w.dtype, device=w.device)).cos().mean() * x,  # to compute many numbers
        lambda w, s, x: s.exp() * x if s.exp() > 0 else s * x,  # as a Python value
        lambda w, s, x: s.exp() * x * s.detach().abs(),  # with a constant computed from a parameter
        lambda w, s, x: torch.block_diag(w, w).sum() * x,  # with an op that vmap runs sample by sample
    ],
)
def test_few_numbers_that_are_used_otherwise_are_computed_once(use, device, monkeypatch):
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    calls = []

    def fn(p, x):
        calls.append(x.shape)
        return score(use(*p, x))

    params, x = (torch.randn(3, 5, device=device), torch.randn((), device=device)), torch.randn(4, 5, device=device)
    for _ in range(2):
        calls.clear()
        grads = psg.per_sample_grad(fn)(params, x)
        assert len(calls) == 1
    assert_trees_close(grads, loop_grad(lambda p, x: score(use(*p, x)))(params, x))


def merged(p, x):
    weight = p["base"] + p["b"] @ p["a"]
    return F.linear(x, p["size"] * weight / weight.norm(dim=1, keepdim=True))


def quantised(p, x):
    scaled = p["base"] / p["size"].abs()
    return F.linear(x, (scaled + (scaled.round().clamp(-8, 7) - scaled).detach()) * p["size"])


@pytest.mark.parametrize("use", [merged, quantised])
@pytest.mark.parametrize("width", [5, 3000])
def test_small_weights_computed_from_parameters_are_lifted_where_their_layer_is_small(use, width, device, monkeypatch):
    """Their layer then has no rule, which costs next to nothing; a large one keeps its rule."""
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    shapes = {"base": (4, 3), "a": (2, 3), "b": (4, 2), "size": (4, 1)}
    params, x = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}, torch.randn(5, width, 3, device=device)
    fn = lambda p, x: use(p, x).square().sum()  # noqa: E731
    for _ in range(2):
        assert_trees_close(psg.per_sample_grad(fn)(params, x), loop_grad(fn)(params, x))
    uses = psg.explain(fn)(params, x).leaves[-1].uses
    assert any(use.endswith("derived") for use in uses) == (width > 5)


@pytest.mark.filterwarnings("ignore:.*requires_grad=True to a scalar")
@pytest.mark.parametrize(
    "told",
    [
        lambda size: float(size.norm()),
        lambda size: torch.tensor([1.0, size.norm()], dtype=size.dtype, device=size.device)[1],  # which takes numbers from a list
        lambda size: size.cpu().numpy().sum(),
        lambda size: size[size > 0].sum(),
        lambda size: (size > 0).tolist().count(True),
    ],
)
def test_few_numbers_of_which_fn_is_told_some_are_computed_once(told, device, monkeypatch):
    """vmap may round each sample's otherwise, so that samples would not agree."""
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    calls = []

    def score_of(p, x):
        size = p["raw"].exp()
        return (size * x).square().sum() * told(size.detach())

    def fn(p, x):
        calls.append(x.shape)
        return score_of(p, x)

    params, x = few_parameters(4, device), torch.randn(5, 4, device=device)
    for _ in range(3):
        calls.clear()
        assert_trees_close(psg.per_sample_grad(fn)(params, x), loop_grad(score_of)(params, x))
        assert len(calls) == 1
    assert "exp: derived" in psg.explain(fn)(params, x).leaves[-1].uses


def test_few_numbers_for_ops_that_vmap_cannot_run_on_them_are_computed_once(device, monkeypatch):
    """Found out in the second call, and not tried again."""
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    calls = []

    def score_of(p, x):
        size = p["raw"].exp()
        return (x * size * torch.full((4,), size.detach().norm(), dtype=x.dtype, device=x.device)).square().sum()

    def fn(p, x):
        calls.append(x.shape)
        return score_of(p, x)

    params, x = few_parameters(4, device), torch.randn(5, 4, device=device)
    counts = []
    for _ in range(4):
        calls.clear()
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(params, x), loop_grad(score_of)(params, x))
        counts.append(len(calls))
    assert counts == [1, 2, 1, 1]


DENSITIES = {
    "normal": lambda p, x: torch.distributions.Normal(p["mean"], p["raw"].exp()).log_prob(x).sum(),
    "beta": lambda p, x: torch.distributions.Beta(p["raw"].exp(), p["lean"].exp()).log_prob(x.sigmoid()).sum(),
    "gaussian": lambda p, x: torch.distributions.MultivariateNormal(p["mean"], scale_tril=torch.diag(p["raw"].exp())).log_prob(x),
    "branch": lambda p, x: (p["raw"].exp() * x * (3 if (p["raw"].exp() > 0).all() else 5)).square().sum(),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_masks_of_few_numbers_do_not_keep_them_from_being_lifted(name, device, monkeypatch):
    """torch.distributions checks its parameters."""
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    calls = []

    def fn(p, x):
        calls.append(x.shape)
        return DENSITIES[name](p, x)

    params, x = few_parameters(2, device), torch.randn(5, 2, device=device)
    for _ in range(3):
        calls.clear()
        grads = psg.per_sample_grad(fn)(params, x)
        assert len(calls) == 1
        assert_trees_close(grads, loop_grad(DENSITIES[name])(params, x))
    assert "exp: lifted" in psg.explain(fn)(params, x).leaves[-1].uses


def rejected(w, x):
    try:
        return torch.distributions.Gamma(x, 1.0).mean.dot(w)
    except ValueError:
        return 5 * x.dot(w)


CHECKED = {
    "a branch": lambda w, x: x.dot(w) * (2 if torch._is_all_true(x > 0) else 3),
    "a choice": lambda w, x: torch.where(torch._is_any_true(x < 0), x.dot(w), 3 * x.dot(w)),
    "ops of ATen's": lambda w, x: torch.where(torch.ops.aten._is_all_true.default(x > 0), x.dot(w), 3 * x.dot(w)),
    "arguments of a distribution": rejected,
    "under a vmap": lambda w, x: torch.func.vmap(lambda row: torch.where(torch._is_all_true(row > 0), row, 3 * row).dot(w))(x[None]).sum(),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", CHECKED)
def test_what_is_asked_of_all_entries_is_asked_of_each_sample(name, disabled, device):
    """vmap's own rule reduces over all samples."""
    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device).abs()
    x[1:3, 0] *= -1
    with psg.rules.disabled() if disabled else contextlib.nullcontext():
        assert_trees_close(psg.per_sample_grad(CHECKED[name])(w, x), loop_grad(CHECKED[name])(w, x))


def test_checks_of_what_distributions_draw_keep_samples_together(device):
    def fn(w, x):
        drawn = torch.distributions.Normal(w * x, 1.0).rsample((2,))
        return torch.func.vmap(lambda row: torch.distributions.Normal(row, 1.0).log_prob(x).sum())(drawn).sum()

    args = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    assert psg.explain(fn)(*args).rung == "capture"


def test_few_numbers_in_ops_that_vmap_gets_wrong_are_computed_once(device, monkeypatch):
    """What a function's calls have learnt where it takes one branch must not cost the fast path where it takes another."""
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    branch = "first"

    def fn(w, x):
        if branch == "select_scatter":
            w = torch.select_scatter(w, w[0] ** 2, 0, 1)
        elif branch == "as_strided":
            w = w.exp().as_strided((3,), (1,))
        return (w.exp() * x).square().sum()

    w, x = torch.randn(3, device=device), torch.randn(N, 3, device=device)
    for branch in ("first", "select_scatter", "first", "as_strided", "first"):  # noqa: B007 (fn reads it)
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
        assert psg.explain(fn)(w, x).rung == "capture"


NUMBERS = {
    "alpha": lambda b, w, x: torch.addmm(w, w, w.T, alpha=b[0]).sum() * x.sum(),
    "computed alpha": lambda b, w, x: torch.addmm(w, x * w, w.T, alpha=b.exp()[1]).sum(),
    "eps": lambda b, w, x: F.layer_norm(x, (3,), w[0], eps=b[0]).square().sum(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_parameter_in_the_place_of_a_number_is_refused_as_by_torch(name, device):
    """Its gradient would be lost."""
    fn = NUMBERS[name]
    params, x = {"b": torch.rand(3, device=device), "w": torch.randn(3, 3, device=device)}, torch.randn(N, 3, device=device)
    for method in ("auto", "loop"):
        with pytest.raises(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", psg.FallbackWarning)
            psg.per_sample_grad(lambda p, x: fn(p["b"], p["w"], x), method=method)(params, x)
    detached = lambda p, x: fn(p["b"].detach(), p["w"], x)  # noqa: E731
    assert_trees_close(psg.per_sample_grad(detached, method="capture")(params, x), loop_grad(detached)(params, x))


@pytest.mark.parametrize("read", [lambda w: w.detach().numpy(), lambda w: np.asarray(w.exp().detach())], ids=["parameter", "computed"])
def test_arrays_of_parameters_cannot_be_written_into(read):
    """They are the memory of the caller's parameter, or of a value that is computed once."""

    def fn(w, x):
        read(w)[0] = 5
        return (w.exp() * x).sum()

    w = torch.tensor([0.3, -0.7])
    with pytest.raises(ValueError, match="read-only"):
        psg.per_sample_grad(fn, method="capture")(w, torch.randn(N, 2))
    assert w.tolist() == torch.tensor([0.3, -0.7]).tolist()


def test_distances_of_parameters_are_not_computed_once(device):
    # vmap over the backward of cdist, for the cotangents of all samples at once, gives wrong numbers.
    def fn(w, x):
        return (torch.cdist(w, w.square() + 1) * x).sin().sum()

    w, x = torch.randn(4, 4, device=device), torch.randn(N, 4, 4, device=device)
    assert "cdist: lifted" in psg.explain(fn)(w, x).leaves[0].uses
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    # Nor is vmap(grad) over the samples right: they share what cdist takes, but not the cotangent.
    for method in ("auto", "loop"):
        with pytest.raises(psg.PsgError, match="cdist under vmap.* call psg in a loop over the members of the vmap"):
            torch.func.vmap(lambda x: psg.per_sample_grad(fn, method=method)(w, x[None]))(x)  # noqa: B023


@pytest.mark.parametrize("n", [0, 1, N])
@pytest.mark.parametrize("shapes", [((30, 3), (1, 30, 3)), ((1, 2, 30, 3), (30, 3)), ((2, 3), (2, 1, 4, 3))], ids=str)
def test_distances_of_operands_with_different_numbers_of_dimensions(shapes, n, device):
    """vmap takes the samples of the one for a dimension of the other. Only the choice of the nearest is used, so no gradient is needed."""
    data, codes = shapes

    def fn(p, x):
        table = p["codes"] * x.sum().sin()
        with torch.no_grad():
            nearest = torch.cdist(x * p["scale"], table).argmin(-1)
        return (table.reshape(-1, 3)[nearest] - x * p["scale"]).square().sum()

    params = {"codes": torch.randn(codes, device=device), "scale": torch.randn(3, device=device)}
    x = torch.randn(n, *data, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(params, x), loop_grad(fn)(params, x))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # torch's own, of the loop
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}, {"device": "cpu"}], ids=str)
@pytest.mark.parametrize("copy", [torch.tensor, lambda part, **options: torch.zeros(1, device=part.device).new_tensor(part, **options)])
@pytest.mark.parametrize("n", [0, 1, N])
def test_copies_of_tensors_have_no_history(n, copy, options, device):
    def fn(w, x):
        copies = [copy(part, **options).to(device) for part in (w, x, w * x, (w * x)[:2])]
        return (w * sum(part.sin().sum() for part in copies)).sum() + copies[2].dtype.itemsize * w[0]

    w, x = torch.randn(3, device=device), torch.randn(n, 3, device=device)
    found = psg.per_sample_value_and_grad(fn, method="capture")(w, x)
    assert_trees_close(found, loop_value_and_grad(fn)(w, x))


DETACHED = {
    "a recurrence": lambda p, h, x: [h := torch.tanh(F.linear(h, p["w"]) + x)] and h.detach_() is h and torch.tanh(F.linear(h, p["w"]) * x),
    "used before": lambda p, h, x: [h := F.linear(x, p["w"]), before := h + 1, torch.detach_(h)] and before.square() * h,
    "a view from before": lambda p, h, x: [h := F.linear(x, p["w"]).exp(), view := h[1:], h.detach_()] and view * h[:-1],
    "two things": lambda p, h, x: [h := F.linear(x, p["w"]) * 2, h.detach_(), h.mul_(3)] and F.linear(h, p["w"]),
    "what has no history": lambda p, h, x: [x := x * 1, x.detach_(), h := torch.ones_like(h).detach_()] and F.linear(x + h, p["w"]),
    "what a layer returns": lambda p, h, x: [h := F.linear(x, p["w"]), h.detach_()] and F.linear(h, p["w"]),
}


@pytest.mark.parametrize("name", DETACHED)
@pytest.mark.parametrize("n", [0, 1, N])
def test_what_is_detached_in_place(n, name, device):
    def fn(p, h, x):
        return score(DETACHED[name](p, h * 1, x))

    params = {"w": torch.randn(4, 4, device=device) / 2}
    args = params, torch.randn(4, device=device), torch.randn(n, 4, device=device)
    found = psg.per_sample_value_and_grad(fn, in_dims=(None, None, 0), method="capture")(*args)
    assert_trees_close(found, loop_value_and_grad(fn, in_dims=(None, None, 0))(*args))


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_parameters_and_what_is_made_of_them_alone_may_be_detached_in_place(method, device):
    def fn(p, x):
        scale = p.exp() * 1
        scale.detach_()
        return (scale * p * x).sum()

    p, x = torch.randn(4, device=device), torch.randn(N, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method=method)(p, x), p.exp() * x)


def test_the_data_of_one_sample_are_not_those_of_a_tensor_of_all(device):
    """The first sample lies where the closed-over tensor does, in the same shape: that is no assignment of a tensor's own data."""
    x = torch.randn(N, 3, device=device)

    def fn(w, own):
        own.data = x[0]
        return (own * w).sum()

    w = torch.randn(3, device=device)
    with pytest.raises(RuntimeError, match="mutating directly with `.data`"):
        psg.per_sample_grad(fn, method="capture")(w, x)


def test_what_is_used_is_known_exactly(device):
    params = {"rule": torch.randn(4, 3), "lifted": torch.randn(4), "derived": torch.randn(3, 4), "unused": torch.randn(2)}
    params = {name: p.to(device) for name, p in params.items()}

    def fn(p, x):
        return score(F.linear(x, p["rule"]) * p["lifted"] + F.linear(x, p["derived"].T))

    report = psg.explain(fn)(params, torch.randn(N, 3, device=device))
    uses = {leaf.path: leaf.uses for leaf in report.leaves}
    assert report.rung == "capture"
    assert any("rule" in use for use in uses["p['rule']"])
    assert any("lifted" in use for use in uses["p['lifted']"])
    assert any("derived" in use for use in uses["p['derived']"])
    assert not uses["p['unused']"]


def test_a_zero_gradient_of_a_used_leaf_is_not_an_unused_leaf(device):
    def fn(p, x):
        return (p["a"] * 0 * x).sum() + (p["b"] * x).sum()

    params = {"a": torch.randn(3, device=device), "b": torch.randn(3, device=device)}
    grads = psg.per_sample_grad(fn)(params, torch.randn(N, 3, device=device))
    assert not grads["a"].any() and grads["b"].any()


class Below(torch.autograd.Function):
    """The public way below vmap: the `vmap` static method gets the physical batch."""

    @staticmethod
    def forward(run, *tensors):
        raise NotImplementedError("there is a vmap, so its method is asked")

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, run, *tensors):
        n = info.batch_size
        values = [
            tensor.unsqueeze(0).expand(n, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        output = run(*values)
        return output, 0 if isinstance(output, torch.Tensor) else (0,) * len(output)


def run_below_publicly(run, tensors, level, n):
    # torch calls the `vmap` method only if some tensor is batched: here one always is.
    batched = _functorch.wrap(torch.zeros(n, device=tensors[0].device if tensors else None), level)
    declined = []

    def asked(_, *values):
        output = run(*values)
        declined.append(output is NotImplemented)
        return () if declined[-1] else output

    output = Below.apply(asked, batched, *tensors)
    return NotImplemented if declined[-1] else output


@each_case(lambda case: not case.not_capture)
def test_the_public_way_below_vmap_gives_the_same(case, device, monkeypatch):
    problem = case.build(device)
    light = psg.per_sample_grad(problem.fn, **problem.options, method="capture")(*problem.args, **problem.shared)
    monkeypatch.setattr(_functorch, "run_below", run_below_publicly)
    public = psg.per_sample_grad(problem.fn, **problem.options, method="capture")(*problem.args, **problem.shared)
    assert_trees_close(public, light)


def test_nothing_is_kept_after_the_call(device):
    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)
    kept = []

    def fn(w, x):
        y = F.linear(x, w).tanh()
        kept.append(weakref.ref(y))
        return y.sum()

    norms = psg.per_sample_norm(fn)(w, x)
    gc.collect()
    assert norms.shape == (N,) and kept[0]() is None


def test_an_error_inside_leaves_torch_as_it_was(device):
    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)

    def broken(w, x):
        F.linear(x, w)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        psg.per_sample_grad(broken)(w, x)
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert torch.overrides._get_current_function_mode() is None
    assert_trees_close(psg.per_sample_grad(lambda w, x: score(F.linear(x, w)))(w, x), loop_grad(lambda w, x: score(F.linear(x, w)))(w, x))


def test_calls_may_nest(device):
    # A function of one sample that itself computes per-sample norms with psg, for data that it closes over.
    inner_w, inner_x = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)

    def inner(w, x):
        return score(F.linear(x, w))

    def fn(w, x):
        return score(F.linear(x, w)) * psg.per_sample_norm(inner, method="vmap")(inner_w, inner_x).sum()

    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))


class Doubling(TorchFunctionMode):
    """Doubles the outputs of linear layers, as a tool that injects quantisation or low-rank updates changes them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is F.linear else output


@pytest.mark.parametrize("transform", [psg.per_sample_norm, lambda fn, **options: psg.clipped_grad(fn, 0.5, **options)])
def test_function_modes_of_the_caller_see_and_change_ops(transform, device):
    """A rule would compute the gradient of the op as torch has it."""

    def fn(w, x):
        return score(F.linear(x, w).tanh())

    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)
    with Doubling():
        expected = transform(fn, method="loop")(w, x)
        with pytest.warns(psg.FallbackWarning, match="runs under Doubling, a function mode that may change ops"):
            assert_trees_close(transform(fn)(w, x), expected)
        with pytest.raises(psg.InputError, match='method="batch": the call runs under Doubling'):
            transform(lambda w, x: F.linear(x, w).tanh().sum(1), method="batch")(w, x)

    def inside(w, x):
        with Doubling():
            return fn(w, x)

    assert_trees_close(transform(inside, method="capture")(w, x), expected)


class DoubledTensor(torch.Tensor):
    """Does so where it is met."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs or {})
        return output * 2 if func is F.linear else output


@pytest.mark.parametrize("made", ["outside", "inside"])
def test_classes_that_change_ops_are_followed(made, device):
    frozen = torch.randn(3, 3, device=device).as_subclass(DoubledTensor)

    def hidden(x):
        return F.linear(x, frozen) if made == "outside" else x.as_subclass(DoubledTensor)

    def fn(w, x):
        return score(F.linear(hidden(x), w).tanh()).as_subclass(torch.Tensor)

    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)
    with pytest.warns(psg.FallbackWarning, match="fn uses a DoubledTensor, a class of tensors with a __torch_function__"):
        found = psg.per_sample_grad(fn)(w, x)
    assert_trees_close(found, loop_grad(fn)(w, x))
    with pytest.raises(psg.InputError, match="fn uses a DoubledTensor"):
        psg.per_sample_grad(lambda w, x: F.linear(hidden(x), w).tanh().sum(1), method="batch")(w, x)


class DoublingTanh(TorchFunctionMode):
    """Doubles what fn computes by tanh, but not the gates of a recurrent layer, which is one op to it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output * 2 if func in (F.linear, torch.tanh, torch.Tensor.tanh) else output


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.MultiheadAttention], ids=lambda kind: kind.__name__)
def test_function_modes_of_the_caller_see_no_parts_of_an_op(layer, device):
    """Under vmap psg writes these layers out, and the mode changed the parts: not even vmap(grad) is right there."""
    module = (layer(4, 2) if layer is nn.MultiheadAttention else layer(4, 4)).to(device)
    loss, params = psg.stateless(module, lambda output: output[0].square().sum(), batch_dim=None)
    x = torch.randn(N, 5, 4, device=device)
    inputs = (x, x, x) if layer is nn.MultiheadAttention else (x,)
    with DoublingTanh():
        expected = psg.per_sample_grad(loss, method="loop")(params, *inputs)
        refusal = "has to be written out as other ops inside of transforms, and the call runs under DoublingTanh"
        with pytest.warns(psg.FallbackWarning, match=refusal):
            assert_trees_close(psg.per_sample_grad(loss)(params, *inputs), expected)
        members = {name: param[None] for name, param in params.items()}
        with pytest.raises(psg.PsgError, match=refusal):
            torch.func.vmap(lambda params: psg.per_sample_grad(loss, method="loop")(params, *inputs))(members)


def test_classes_that_change_ops_see_no_parts_of_an_op(device):
    module = nn.LSTM(4, 4).to(device)
    frozen = torch.eye(4, device=device).as_subclass(DoubledTensor)

    def fn(params, x):
        return torch.func.functional_call(module, params, (F.linear(x, frozen),))[0].square().sum().as_subclass(torch.Tensor)

    params, x = {name: param.detach() for name, param in module.named_parameters()}, torch.randn(N, 5, 4, device=device)
    with pytest.warns(psg.FallbackWarning):
        assert_trees_close(psg.per_sample_grad(fn)(params, x), loop_grad(fn)(params, x))
    members = {name: param[None] for name, param in params.items()}
    with pytest.raises(psg.PsgError, match="lstm has to be written out as other ops inside of transforms, and fn uses a DoubledTensor"):
        torch.func.vmap(lambda params: psg.per_sample_grad(fn, method="loop")(params, x))(members)


def test_a_default_device_context_changes_nothing(device):
    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)
    with torch.device(device):
        grads = psg.per_sample_grad(lambda w, x: score(F.linear(x, w)))(w, x)
    assert_trees_close(grads, loop_grad(lambda w, x: score(F.linear(x, w)))(w, x))


def test_threads_do_not_share_a_pass(device):
    from concurrent.futures import ThreadPoolExecutor

    w, x = torch.randn(4, 3, device=device), torch.randn(8, N, 3, device=device)
    fn = lambda w, x: score(F.linear(x, w))  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda batch: psg.per_sample_grad(fn)(w, batch), x))
    for result, batch in zip(results, x, strict=True):
        assert_trees_close(result, loop_grad(fn)(w, batch))


# --- large cotangents, which are taken as they arrive ----------------------------------------------------------


@each_case(lambda case: not case.not_capture)
def test_cotangents_taken_as_they_arrive_give_the_same(case, device, monkeypatch):
    problem = case.build(device)
    clipped = psg.clipped_grad(problem.fn, 0.5, **problem.options, method="capture")
    late = clipped(*problem.args, **problem.shared)
    monkeypatch.setattr(_backward, "_is_worth_a_hook", lambda tap: tap.zeros is None)
    assert_trees_close(clipped(*problem.args, **problem.shared), late, rtol=1e-9)


def test_factors_are_settled_while_the_pass_goes_on(device, monkeypatch):
    monkeypatch.setattr(_backward, "_is_worth_a_hook", lambda tap: tap.zeros is None)
    params = [torch.randn(3, 3, device=device) for _ in range(4)]
    taken = []

    def fn(p, x):
        for i, w in enumerate(p):
            x = Spy.apply(F.linear(x, w).tanh(), i, taken.append)
        return x.sum()

    monkeypatch.setattr(Outer, "settle", lambda factor: taken.append("settled") or factor)
    call = prepare("test", fn, Options(0), (params, torch.randn(N, 3, device=device)), {}, kept="reductions")
    _ladder.run(call, "capture")
    # Layer 3's factor is settled before the pass reaches layer 2, and so on; autograd is asked for the first layer's cotangent.
    assert taken == [3, "settled", 2, "settled", 1, "settled", 0]


class Spy(torch.autograd.Function):
    """The identity; records when the backward pass reaches it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, label, note):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.label, ctx.note = inputs[1:]

    @staticmethod
    def backward(ctx, cotangent):
        ctx.note(ctx.label)
        return cotangent, None, None


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("multiply", [Scaled.apply, torch.mul], ids=["unseen", "seen"])
def test_a_history_of_others_does_not_hide_a_tap(grad_mode, multiply, device, monkeypatch):
    # The layer's input has a history in which no gradient is requested: autograd would not run the layer's node.
    monkeypatch.setattr(_backward, "_is_worth_a_hook", lambda tap: tap.zeros is None)
    outside = torch.randn(3, device=device, requires_grad=True)

    def fn(w, x):
        return score(F.linear(multiply(x, outside).tanh(), w))

    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)
    with grad_mode():
        total = psg.clipped_grad(fn, torch.inf, method="capture")(w, x).grads
    assert_trees_close(total.detach(), loop_grad(fn)(w, x).detach().sum(0), per_sample=False)


def test_an_input_changed_after_it_was_read_is_found_in_time(device, monkeypatch):
    monkeypatch.setattr(_backward, "_is_worth_a_hook", lambda tap: tap.zeros is None)

    def fn(p, x):
        hidden = F.linear(x, p[0]).tanh()
        y = F.linear(hidden, p[1])
        hidden.detach().mul_(2)
        return y.sum()

    params, x = [torch.randn(3, 3, device=device), torch.randn(2, 3, device=device)], torch.randn(N, 3, device=device)
    with pytest.raises(Exception, match="changed in place|inplace"):
        psg.clipped_grad(fn, 1.0, method="capture")(params, x)


# --- what fn keeps, and numbers that are tensors ----------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.ones_like, lambda x: x.new_full((3,), 2.0), lambda x: torch.full_like(x, 3.0)])
@pytest.mark.parametrize("sizes", [[5, 1], [1, 5], [5, 3, 5]])
def test_a_constant_that_fn_keeps_serves_later_calls(make, sizes, device):
    kept = []

    def fn(w, x):
        if not kept:
            kept.append(make(x))
        return (w * x * kept[0]).sum()

    w, scale = torch.randn(3, device=device), make(torch.zeros(3, device=device))
    for size in sizes:
        x = torch.randn(size, 3, device=device)
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), x * scale)
    assert not psg._torch._functorch.is_wrapped(kept[0])


@pytest.mark.parametrize("size", [5, 1])
@pytest.mark.parametrize("make", [lambda w, x: 2 * x, lambda w, x: x > 0, lambda w, x: 2 * w, lambda w, x: (w * x).split(2)[0].sum()])
@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
def test_a_tensor_of_the_samples_that_fn_keeps_is_refused(method, make, size, device, monkeypatch):
    as_large(monkeypatch)  # else 2 w is made for every sample, in a second pass, which refuses what the first one has left
    kept = []

    def fn(w, x):
        if not kept:
            kept.append(make(w, x))
        return (w * x * kept[0]).sum()

    w, x = torch.randn(3, device=device), torch.randn(5, 3, device=device)
    psg.per_sample_grad(fn, method=method)(w, x)
    with pytest.raises(psg.StateError, match="kept from an earlier call"):
        psg.per_sample_grad(fn, method=method)(w, x[:size])


OUTSIDE = {
    "vmap": lambda norms, w: torch.func.vmap(norms)(torch.stack([w, w, w])),
    "two vmaps": lambda norms, w: torch.func.vmap(torch.func.vmap(norms))(torch.stack([w, w, w])[None]),
    "grad": lambda norms, w: torch.func.grad(lambda w: norms(w).sum())(w),
    "jvp": lambda norms, w: torch.func.jvp(norms, (w,), (w,)),
}


@pytest.mark.parametrize("outside", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
def test_a_kept_tensor_of_the_samples_is_refused_inside_transforms(method, outside, device):
    """At the level of the transform around psg's call it looked as if it were alive."""
    kept = {}

    def fn(w, x):
        return (w * x * kept.setdefault("scale", x.abs().sum())).tanh().sum()

    w, x = torch.randn(3, device=device), torch.randn(3, 3, device=device)
    norms = psg.per_sample_norm(fn, method=method)
    norms(w, x)
    with pytest.raises(psg.StateError, match="kept from an earlier call"):
        outside(lambda w: norms(w, x), w)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_a_kept_tensor_of_the_samples_is_refused_in_transforms_of_fn(method, device):
    kept = {}

    def fn(w, x):
        scale = kept.setdefault("scale", x.abs().sum())
        return torch.func.vmap(lambda row: (row * x * scale).tanh().sum())(torch.stack([w, 2 * w, 3 * w])).sum()

    w, x = torch.randn(3, device=device), torch.randn(3, 3, device=device)
    norms = psg.per_sample_norm(fn, method=method)
    torch.func.vmap(lambda w: norms(w, x))(torch.stack([w, w, w]))
    with pytest.raises(psg.StateError, match="kept from an earlier call"):
        norms(w, x)


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")  # of the hook, which capture refuses
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    "value", [lambda w, x: w.sin(), lambda w, x: (w * x).sin(), lambda w, x: x.sin() * w], ids=["parameters", "both", "samples"]
)
def test_parameters_used_in_another_thread_are_refused_above_the_loop(value, hooked, device):
    def fn(w, x):
        h = w * x
        if hooked:
            h.register_hook(lambda cotangent: cotangent)
        return (h * in_a_thread(lambda: value(w, x))).sum()

    w, x = torch.randn(3, device=device), torch.randn(5, 3, device=device)
    for method in ("auto", "vmap"):
        with pytest.raises(psg.StateError, match="in a thread that it starts"):
            psg.per_sample_grad(fn, method=method)(w, x)
    assert_trees_close(psg.per_sample_grad(fn, method="loop")(w, x), loop_grad(fn)(w, x))


@pytest.mark.parametrize("calls", [1, 2])
def test_a_value_of_the_parameters_that_fn_keeps_is_refused_by_the_loop(calls, device):
    kept = {}

    def fn(w, x, key):
        return (w * x * kept.setdefault(key, 2 * w)).sum()

    w, x = torch.randn(3, device=device), torch.randn(5, 3, device=device)
    grad = psg.per_sample_grad(fn, method="loop")
    grad(w, x[:1], key=1)
    with pytest.raises((psg.StateError, RuntimeError), match="kept from an earlier call|backward through the graph a second time"):
        grad(w, x, key=calls)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")  # samples with different numbers cannot run as one batch
@pytest.mark.parametrize("number", [lambda x: torch.tensor(0.5, device=x.device), lambda x: x[0, 0].abs()])
@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x, number: torch.addmm(p[1], x, p[0], alpha=number.item()),
        lambda p, x, number: torch.addmm(p[1], x, p[0], alpha=number),
        lambda p, x, number: F.layer_norm(x, (3,), p[0][0], p[1], eps=number),
        lambda p, x, number: F.group_norm(x.T[None], 3, p[0][0], p[1], eps=number),
        lambda p, x, number: F.batch_norm(x, torch.zeros_like(p[1]), torch.ones_like(p[1]), p[0][0], p[1], eps=number),
    ],
)
def test_a_tensor_in_the_place_of_a_number_counts_for_its_value(fn, number, device):
    # There are as many samples as features: the samples' numbers must not be taken for a vector.
    params, x = (torch.randn(3, 3, device=device), torch.randn(3, device=device)), torch.randn(3, 4, 3, device=device)
    x[1:, 0, 0] = x[0, 0, 0] + torch.arange(1, 3, device=device) * 0.5

    def loss(p, x):
        return score(fn(p, x, number(x)))

    values, grads = loop_value_and_grad(loss)(params, x)
    found_values, found = psg.per_sample_value_and_grad(loss)(params, x)
    assert_trees_close(found_values, values)
    assert_trees_close(found, grads)
    agreeing = x[:1].expand(3, -1, -1)
    assert_trees_close(psg.per_sample_grad(loss, method="capture")(params, agreeing), loop_grad(loss)(params, agreeing))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_narrow_from_a_tensor_on(n, device):
    def fn(w, x, start):
        return score(w.narrow(0, start, 2) * x.narrow(0, start, 2) + x.narrow(0, x.detach().argmax() // 12, 2))

    w, x, start = torch.randn(4, 3, device=device), torch.randn(n, 4, 3, device=device), torch.ones(n, device=device, dtype=torch.long)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x, start), loop_grad(fn)(w, x, start))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    "inner",
    [
        lambda w, y: torch.select_scatter(w * y, y * w[1], 0, 1).sin().sum(),
        lambda w, y: (w.as_strided((3, 3), (1, 3)) @ y).sin().sum(),
        lambda w, y: (torch.roll((w @ y).sum(), 1) * y).sum(),
        lambda w, y: ((y * w).data * y).sum(),
    ],
)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1]])
def test_what_vmap_gets_wrong_is_sent_around_inside_transforms_too(transform, inner, device):
    def fn(w, x):
        return transform(lambda y: inner(w, y))(x).sin().sum()

    w, x = torch.randn(3, 3, device=device), torch.randn(3, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1]])
def test_data_inside_a_transform_of_fn_is_a_constant_for_that_alone(transform, method, device):
    def fn(w, x):
        return transform(lambda y: ((y * w).data * y + w.data * y.sin()).sum() + (w * w.data).sum())(x).sin().sum()

    def flat(w):
        return psg.per_sample_grad(fn, method=method)(w, x).sin()

    w, x = torch.randn(3, 3, device=device), torch.randn(3, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x), loop_grad(fn)(w, x))
    both = torch.stack([w, w.cos()])
    assert_trees_close(torch.func.vmap(flat)(both), torch.stack([loop_grad(fn)(own, x).sin() for own in both]))
    tracked = w.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(flat(tracked).sum(), tracked)
    assert_trees_close(torch.func.grad(lambda w: flat(w).sum())(w), slopes)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_a_frozen_matrix_that_is_written_into_after_it_was_read(device):
    """The product's backward would read the matrix's new values; plain PyTorch raises too."""

    def fn(w, x):
        frozen = torch.eye(3, device=x.device)
        product = torch.einsum("i,ij,jk->k", x, w, frozen)
        frozen.mul_(2)
        return product.sum()

    w, x = torch.randn(3, 3, device=device), torch.randn(5, 3, device=device)
    with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
        psg.per_sample_grad(fn)(w, x)


def writes_into(make):
    def fn(w, x):
        made = make(x)
        made[1:3] += (w @ x)[1:3].to(made.dtype)
        return made.sin().sum()

    return fn


def adds_up(w, x):
    total = torch.tensor(0.0, device=x.device)
    for row in w:
        total += (row * x).sum().sin()
    return total


def initialised(w, x):
    return (w @ x * torch.nn.init.constant_(torch.empty(4, device=x.device), 2.0)).sin().sum()


def masked(mask):
    def fn(w, x):
        y, where = w @ x, mask(x)
        made = torch.zeros_like(x)
        made[where] = y[where].sin()
        return (
            made.sum() + torch.masked_select(y, where).square().sum() + y[where.nonzero()[:, 0]].cos().sum() + y[None][:, where].exp().sum()
        )

    return fn


STAYS = {
    "a write into arange": writes_into(lambda x: torch.arange(4.0, device=x.device)),
    "a write into linspace": writes_into(lambda x: torch.linspace(0, 1, 4, device=x.device)),
    "a write into eye": writes_into(lambda x: torch.eye(4, device=x.device)[0]),
    "a write into a copy of a constant": writes_into(lambda x: CONSTANT.to(x.device).clone()),
    "a sum that starts as a tensor": adds_up,
    "initialisation": initialised,
    "equal": lambda w, x: (w @ x).sin().sum() if torch.equal(x, x.clone()) and not x.equal(x[:2]) else w.sum(),
    "allclose": lambda w, x: (w @ x).sin().sum() if x.allclose(x + 1e-12) and not torch.allclose(x, x + 1) else w.sum(),
    "isclose": lambda w, x: ((w @ x) * torch.isclose(x, x.round(), atol=0.2) * (x / 0).isclose(x / 0, equal_nan=True)).sin().sum(),
    "allclose of nan": lambda w, x: (
        (w @ x).sum() if not torch.allclose(x / 0, x) and torch.allclose(x * torch.nan, x * torch.nan, equal_nan=True) else w.sum()
    ),
    "allclose of infinities": lambda w, x: (w @ x).sum() if not torch.allclose(x, x / 0) and torch.allclose(x / 0, x / 0) else w.sum(),
    "an assertion of all samples": lambda w, x: (
        torch._assert_async((x < 100).all(), "large") or torch._assert_async((w @ x).isfinite().all()) or (w @ x).sin().sum()
    ),
    "an assertion of parameters": lambda w, x: torch._assert_async((w < 100).all(), "large") or (w @ x).sin().sum(),
    "a copy of a parameter": lambda w, x: (w @ x + copy.deepcopy(w) @ x).sin().sum(),
    "a frozen copy of a parameter": lambda w, x: (w @ x + copy.deepcopy(w).requires_grad_(False) @ x).sin().sum(),
    "a copy that is written into": lambda w, x: (
        (w @ x + copy.deepcopy(w).requires_grad_(False).mul_(2) @ copy.deepcopy(x).exp_()).sin().sum()
    ),
    "a copy of which a derivative is taken": lambda w, x: (lambda own: (w * torch.autograd.grad(score(own @ x), own)[0] @ x).sum())(
        copy.deepcopy(w)
    ),
    "is_nonzero": lambda w, x: (w @ x).sin().sum() if torch.is_nonzero(x.square().sum()) else w.sum(),
    "is_all_true": lambda w, x: (w @ x).sin().sum() * (2 if torch._is_all_true(x[0] > 0) else 3),
    "is_any_true": lambda w, x: torch.where(torch.ops.aten._is_any_true((w @ x) > 2), w @ x, w).sin().sum(),
    "is_all_true, true of all": lambda w, x: (w @ x).sin().sum() * (2 if (x[0] < 100)._is_all_true() else 3),
    **{
        f"index_add, {name}": lambda w, x, add=add: (add(w * x, x[:3].abs().mul(2).long() % 4, (w @ w.T)[:3] * x) @ x).sin().sum()
        for name, add in {
            "rows": lambda y, index, source: y.index_add(0, index, source),
            "columns": lambda y, index, source: torch.index_add(y, -1, index, source.T, alpha=2),
            "in place": lambda y, index, source: y.index_add_(0, index, source, alpha=0.5),
            "into zeros": lambda y, index, source: torch.zeros_like(y).index_add_(1, index, source.T) + y,
            "by an index that samples share": lambda y, index, source: y.index_add(0, torch.tensor([1, 1, 3], device=y.device), source),
            "of numbers": lambda y, index, source: y + y[0].index_add(0, index, source[:, 0]),
            "by keywords": lambda y, index, source: y.index_add(dim=0, index=index, source=source, alpha=3),
        }.items()
    },
    **{
        f"weight norm along {dim}": lambda w, x, dim=dim: (
            (torch._weight_norm(w, {1: w[:1], -1: w[:1, :1]}.get(dim, w[:, :1]).exp(), dim) @ x).sin().sum()
        )
        for dim in (0, 1, -1, -2)
    },
    "weight norm of numbers": lambda w, x: (torch._weight_norm(w[0], w[1], 0) * x + torch._weight_norm(w[0], w[1, 1], -1)).sin().sum(),
    "moveaxis": lambda w, x: (torch.moveaxis(w * x, 0, 1) @ x).sin().sum(),
    "norms of a list": lambda w, x: torch.stack(torch._foreach_norm([w @ x, w * x], 1) + torch._foreach_norm([w * x, x])).prod(),
    "arithmetic on lists": lambda w, x: sum(
        map(
            torch.sum,
            torch._foreach_add(torch._foreach_mul(torch._foreach_sub([w @ x, w], [x, x]), 2.0), torch._foreach_div([x, w], x[0].exp())),
        )
    ).sin(),
    "a mask that all samples share": masked(lambda x: x < 100),
    "a mask of two kinds": masked(lambda x: torch.arange(4, device=x.device) < 2 + (x[0] > 0)),
    "weight standardisation": lambda w, x: (F.batch_norm(w[None], None, None, training=True)[0] @ x).sin().sum(),
    "moments": lambda w, x: ((w - torch.var_mean(w, 1, keepdim=True)[1]) / torch.std_mean(w, 1, keepdim=True)[0] @ x).sin().sum(),
    **{
        f"{name}_": lambda w, x, name=name, args=args: getattr(w @ x * 1.0, f"{name}_")(*args(x)).sin().sum()
        for name, args in {
            "addcmul": lambda x: (x, x),
            "addcdiv": lambda x: (x, x.exp()),
            "clamp": lambda x: (-0.5, 0.5),
            "clip": lambda x: (-0.5,),
            "cumprod": lambda x: (0,),
            "cumsum": lambda x: (0,),
            "fmod": lambda x: (0.7,),
            "hypot": lambda x: (x,),
            "index_copy": lambda x: (0, torch.tensor([1, 3], device=x.device), x[:2]),
            "lerp": lambda x: (x, 0.3),
            "remainder": lambda x: (0.7,),
            "scatter": lambda x: (0, x[:2].abs().long() % 4, x[2:]),
            "square": lambda x: (),
            "xlogy": lambda x: (x.exp(),),
        }.items()
    },
    "tril_": lambda w, x: score((w * x).tril_()) + score((w * x).triu_(1)),
    "addmm_": lambda w, x: score((w * x).addmm_(w, w * x).addr_(x, x, alpha=2)),
    "one hot by scatter_": lambda w, x: (w @ x @ torch.zeros_like(x).scatter_(0, x[:1].abs().long() % 4, 1.0)[:, None]).sum(),
    **{
        f"kl_div {reduction} {log}": lambda w, x, reduction=reduction, log=log: F.kl_div(
            (w * x).log_softmax(1), x.log_softmax(0) if log else x.softmax(0), reduction=reduction, log_target=log
        ).sum()
        for reduction in ("none", "sum", "batchmean")
        for log in (False, True)
    },
    "global averages, channels last": lambda w, x: (
        F.adaptive_avg_pool2d((w * x)[None, None].expand(1, 3, 4, 4).contiguous(memory_format=torch.channels_last), (1, 1)).sin().sum()
        + F.adaptive_avg_pool3d((w * x)[None, None], 1).sin().sum()
    ),
    "padded sequences": lambda w, x: (
        torch.nn.utils.rnn.pad_sequence([w @ x, (w @ x)[:2]], batch_first=True, padding_value=2.0).cumsum(1).sin().sum()
    ),
    "sequences padded on the left": lambda w, x: (
        (torch.nn.utils.rnn.pad_sequence([w * x, (w * x)[:2]], padding_side="left") * torch.arange(4.0, device=x.device)[:, None, None])
        .sin()
        .sum()
    ),
    **{
        f"{kind}, {between}, {q}, dim {dim}": lambda w, x, kind=kind, between=between, q=q, dim=dim: (
            (getattr(torch, kind)(w * x, q, dim, keepdim=q == 0.3, interpolation=between) * x[0]).sin().sum()
        )
        for kind in ("quantile", "nanquantile")
        for between in ("linear", "lower", "higher", "nearest", "midpoint")
        for q, dim in ((0.3, None), (0.5, 0), (1.0, -1))
    },
    "several quantiles": lambda w, x: (
        score(torch.quantile(w * x, torch.tensor([0.0, 0.3, 1.0], device=x.device), dim=1, keepdim=True) * x)
        + (w * x).nanquantile(torch.tensor([0.6], device=x.device)).cos().sum()
        + score((w * x).view(2, 1, 2, 4).quantile(torch.tensor([0.2, 0.7], device=x.device), 0))
        + score((w * x).view(2, 2, 2, 2).nanquantile(0.4, -3, keepdim=True))
        + (w @ x).quantile(torch.tensor(0.2, device=x.device), 0, True).exp().sum()
    ),
    "quantiles among NaN": lambda w, x: (
        torch.cat([w @ x, torch.where(x > 1, torch.nan, x)]).nanquantile(0.4)
        + torch.where(x > 9, torch.nan, w @ x).quantile(0.7).sin()
        + torch.where(torch.cat([x > 1, x > 9]), torch.nan, torch.cat([w @ x, x])).view(2, 4).quantile(0.0, 1).nansum()
        + (w @ x)[0].quantile(0.2, dim=0)
    ),
    "short-time spectrum": lambda w, x: score(
        torch.stft((w * x).flatten(), 8, 4, window=torch.hann_window(8, device=x.device, dtype=x.dtype), return_complex=True)
    ),
    "diagonal matrices": lambda w, x: (torch.diagflat(w @ x, 1) @ x.repeat(2)[:5]).sin().sum(),
    "tensorsolve": lambda w, x: torch.linalg.tensorsolve(
        w.view(2, 2, 2, 2) * 0.1 + torch.eye(4, device=x.device).view(2, 2, 2, 2), x.view(2, 2)
    ).sum(),
    **{f"renorm {p}": lambda w, x, p=p: ((w * x).renorm(p, 0, 1.0) @ x).sin().sum() for p in (1, 2, 2.5)},
    **{
        f"affine_grid {corners}": lambda w, x, corners=corners: (
            score(F.affine_grid((w * x)[:2, :3][None], (1, 1, 3, 2), align_corners=corners))
            + score(F.affine_grid(torch.stack([w * x, w - x])[:, :3], (2, 2, 2, 3, 4), align_corners=corners))
        )
        for corners in (False, True)
    },
    "pairs of rows": lambda w, x: (
        score(F.pdist(w * x)) + F.pdist(torch.cat([w * x, w * x]), 1).sum() + F.pdist(torch.stack([x, x]) @ w).sum()
    ),
    "put": lambda w, x: score(torch.put(w * x, (3 * x[:3]).long() % 16, x[:3] * w[0, :3], accumulate=True)),
    "put into columns": lambda w, x: score(
        (lambda y: y.view(-1) if y.is_contiguous() else y.exp())((w * x).T.put((3 * x[:3]).long() % 16, x[:3] * w[0, :3]))
    ),
    "quantiles of each sample's own": lambda w, x: (
        torch.quantile(w @ x, x[:2].sigmoid()).sin().sum() + (w * x).nanquantile(w[0, 0].sigmoid(), 1).sum()
    ),
    "quantiles beside infinities": lambda w, x: (
        torch.cat([w @ x, torch.full_like(x, torch.inf)]).quantile(0.3, interpolation="lower").sin()
        + torch.cat([w @ x, torch.full_like(x, -torch.inf)]).quantile(0.6, interpolation="higher").sin()
    ),
    "a token in masked places": lambda w, x: (torch.masked_fill(w * x, x > 0, w[0, 0]) @ x).sin().sum(),
    "entries that are filled": lambda w, x: (
        (w * x).index_fill(1, (3 * x[:2]).long() % 4, 2.0).sin().sum()
        + (w * x).index_fill(-1, (3 * x[:2]).long() % 4 - 4, -1.0).cos().sum()
        + (w * x)[0].index_fill_(0, (3 * x[2]).long() % 4, w[0, 0]).exp().sum()
        + (w @ x).sum().index_fill(0, torch.tensor([0], device=x.device), x[0]).sin()
    ),
    "addmm that ignores its input": lambda w, x: (
        score(torch.addmm(x.expand(4, 4) * torch.nan, x.outer(x), x.outer(x), beta=0) * w)
        + score((x.expand(4, 4) * torch.nan).addmm_(w * x, w, beta=0, alpha=2))
    ),
    "one_hot": lambda w, x: score(w @ F.one_hot((3 * x).long() % 5, 5).to(x.dtype)) + (w @ x)[F.one_hot(x[0].long() % 4, 4).argmax()],
    "one_hot of a number of classes that is computed": lambda w, x: score(
        (w @ F.one_hot((3 * x).long() % 3, (x > 99).sum() + 3).to(x.dtype)) * x[:, None]
    ),
    "entries that are taken": lambda w, x: ((w * x).take((3 * x[:3]).long() % 16) * x[:3]).sin().sum(),
    "columns side by side": lambda w, x: (torch.column_stack([w @ x, w * x]) @ x.repeat(2)[:5]).sin().sum(),
    "blocks along a diagonal": lambda w, x: (torch.block_diag(w * x, w @ x[:, None]).sin() * torch.arange(5.0, device=x.device)).sum(),
    "pow_": lambda w, x: ((w @ x).exp() * 1.5).pow_(x).sin().sum(),
    "**=": lambda w, x: operator.ipow((w @ x).exp() * 1.5, x).sin().sum() + operator.ipow(x.exp(), w[0]).cos().sum(),
    "renorm_": lambda w, x: (w * x).renorm_(2, 0, 1.0).sin().sum(),
    "places of a token, as many in each sample or not": lambda w, x: (
        score((w * x).masked_scatter(x > 0, (w @ x).repeat(4)))
        + score(torch.masked_scatter(w @ x, x == x[0], w[0] * x))
        + score((w @ x).masked_scatter((w * x).detach() > 0, (w + x).exp()))
    ),
    "places that samples share": lambda w, x: score((w * x).masked_scatter_(CONSTANT.to(x.device) > 2, (w @ x).repeat(3)) * x),
    "index_add, columns that are viewed": lambda w, x: score(
        torch.zeros_like(w * x).index_add(1, x[:3].abs().long() % 4, (w * x)[:, :3]).view(-1)
    ),
    "a write after index_select": lambda w, x: (
        lambda y: (y.index_select(0, torch.arange(2, device=x.device)) * x[0]).sum() + y.mul_(2).sin().sum()
    )(w * x + x),
    "index_select by a number": lambda w, x: score((w * x).index_select(1, x[0].abs().long() % 4) * x[:, None]),
    "rows of scatter_add, of numbers": lambda w, x: score(x.new_zeros(4).scatter_add(0, x[:3].abs().long() % 4, (w @ x)[:3])),
    "scatter_add into more columns": lambda w, x: score(
        w.exp().scatter_add(0, (x[:3].abs().long() % 4)[:, None].expand(3, 2), (w * x)[:3, :2])
    ),
    "scatter_add into more columns, by an index that samples share": lambda w, x: score(
        w.exp().scatter_add(0, CONSTANT[:3, None].to(x.device).long().expand(3, 2), (w * x)[:3, :2])
    ),
    "empty constants that are joined": lambda w, x: (w @ x + torch.cat([torch.zeros(0, device=x.device)] * 2).sum()).sin().sum(),
    "interpolation": lambda w, x: (F.interpolate(w[None, None], (4, 6), mode="bilinear")[0, 0, :, 1:5] @ x).sin().sum(),
}
CONSTANT = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


def assert_stays_on_the_first_rung(fn, device):
    w, x = torch.randn(4, 4, device=device), torch.randn(6, 4, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = psg.per_sample_grad(fn)(w, x)
        assert psg.explain(fn)(w, x).rung == "capture"
    assert_trees_close(found, loop_grad(fn)(w, x))


@pytest.mark.parametrize("fn", STAYS.values(), ids=STAYS)
def test_stays_on_the_first_rung(fn, device):
    assert_stays_on_the_first_rung(fn, device)
    assert torch.equal(CONSTANT, torch.tensor([1.0, 2.0, 3.0, 4.0]))


REWRITTEN = {
    "index_fill by a number": lambda y, i, dim: y.index_fill(dim, i % y.shape[dim], 2.0),
    "index_fill by a tensor": lambda y, i, dim: y.index_fill(dim, i % y.shape[dim], y.flatten()[0]),
    "index_fill_": lambda y, i, dim: (y * 1).index_fill_(dim, i % y.shape[dim] - y.shape[dim], -1.0),
    "one_hot": lambda y, i, dim: y.sum() * F.one_hot(i, 6).cumsum(-1),
    "one_hot of pairs": lambda y, i, dim: y.sum() * F.one_hot(torch.stack([i, i + 1]), 7).cumsum(-1),
    "masked_scatter": lambda y, i, dim: y.masked_scatter(y > 0, y.detach().exp() * y.flip(0)),
    "masked_scatter_ of a row": lambda y, i, dim: (y * 1).masked_scatter_(torch.arange(y.shape[-1]) % 2 == i[0] % 2, y.cos().flatten()),
    "masked_scatter of a number": lambda y, i, dim: y.sum().masked_scatter(y > 0, y.exp()),
    "isclose": lambda y, i, dim: y * torch.isclose(y, y.round(), rtol=0.1, atol=0.1) * y.isclose(y.detach()),
    "addmm with beta=0": lambda y, i, dim: torch.addmm(y.flatten(1) * torch.nan, y.flatten(1), y.flatten(1).T @ y.flatten(1), beta=0),
    "addmm_ with beta=0": lambda y, i, dim: (y.flatten(1) * 1).addmm_(y.flatten(1), y.flatten(1).T @ y.flatten(1), beta=0, alpha=2),
}


@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize("use", REWRITTEN.values(), ids=REWRITTEN)
@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=3), n=st.integers(0, 3), count=st.integers(1, 3), seed=st.integers(0, 99))
def test_ops_that_are_written_out(use, method, sizes, n, count, seed):
    torch.manual_seed(seed)
    w, x, i = torch.randn(sizes), torch.randn(n, *sizes), torch.randint(0, 6, (n, count))
    dim = seed % (2 * len(sizes)) - len(sizes)

    def fn(w, x, i):
        output = use(w * x, i, dim)
        return (output * torch.arange(1.0, 1 + output.numel()).reshape(output.shape)).sum().sin()

    assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x, i), loop_grad(fn)(w, x, i))


# Ops whose gradient torch gets wrong under plain autograd too: compared with others.
REDUCED = {
    "scatter_reduce": lambda y, i, src, how: y.scatter_reduce(0, i[:, None].expand_as(src), src, how, include_self=False),
    "scatter_reduce by name": lambda y, i, src, how: torch.scatter_reduce(
        input=y, dim=-2, index=i[:, None].expand_as(src), src=src, reduce=how, include_self=False
    ),
    "scatter_reduce_": lambda y, i, src, how: (y * 1).scatter_reduce_(0, i[:, None].expand_as(src), src, how, include_self=False),
    "index_reduce": lambda y, i, src, how: torch.index_reduce(y, -2, i, src, how, include_self=False),
    "index_reduce_": lambda y, i, src, how: (y * 1).index_reduce_(0, i, src, how, include_self=False),
}


def reduced_by_rows(y, i, src, how):
    return torch.stack([getattr(src[i == k], how)(0) if (i == k).any() else row for k, row in enumerate(y)])


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, method) for name in REDUCED for method in ("auto", "vmap", "loop")),
        *((name, "batch") for name in REDUCED if name[-1] != "_"),  # it refuses writes
    ],
)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)),
    how=st.sampled_from(["amax", "amin"]),
    alone=st.booleans(),
    n=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
def test_extremes_of_others_that_are_equal_to_what_they_replace(name, method, sizes, how, alone, n, seed, device):
    torch.manual_seed(seed)
    rows, columns, count = sizes
    params = {
        "y": torch.randint(-1, 2, (rows, columns), device=device).double(),
        "src": torch.randint(-1, 2, (count, columns), device=device).double(),
    }
    i, x = torch.randint(rows, (count,), device=device), 1 + torch.rand(n, 1, 1, device=device)
    alone = alone or method == "batch"
    x = x if method == "batch" else x[:, 0]

    def by(op):
        def fn(p, x):
            output = op(p["y"], i, p["src"], how) * x if alone else op(p["y"] * x, i, p["src"] * x, how)
            return (output.exp() * torch.arange(1.0, 1 + output.shape[-1], device=device)).sum((-2, -1))

        return fn

    assert_trees_close(psg.per_sample_grad(by(REDUCED[name]), method=method)(params, x), loop_grad(by(reduced_by_rows))(params, x))


@pytest.mark.parametrize("method", ["auto", "vmap", "loop", "batch"])
@given(shape=st.lists(st.integers(0, 3), max_size=2), n=st.sampled_from([0, 1, 3]), seed=st.integers(0, 99))
def test_radii_of_zero(method, shape, n, seed, device):
    torch.manual_seed(seed)
    params = {"r": torch.randint(2, shape, device=device).double(), "angle": torch.randn(shape, device=device)}
    x = 1 + torch.rand(n, device=device)

    def by(op):
        def fn(p, x):
            scale = x.reshape((*x.shape, *(1,) * len(shape)))
            output = op(p["r"] * scale, p["angle"]) * (1 - 2j)
            return output.real.exp().reshape((*x.shape, -1)).sum(-1)

        return fn

    written_out = lambda r, angle: torch.complex(r * angle.cos(), r * angle.sin())  # noqa: E731
    assert_trees_close(psg.per_sample_grad(by(torch.polar), method=method)(params, x), loop_grad(by(written_out))(params, x))


@pytest.mark.parametrize("by", ["position", "name", "method"])
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    places=st.lists(st.integers(-1, 4), max_size=2) | st.integers(1, 3),
    owned=st.booleans(),
    n=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
def test_places_to_split_at_in_a_tensor(by, shape, places, owned, n, seed, device):
    """torch reads them from memory, also inside of transforms, where a tensor has none."""
    torch.manual_seed(seed)
    dim = seed % (2 * len(shape)) - len(shape)
    where = torch.tensor(places, dtype=torch.long)
    w, x, own = torch.randn(shape, device=device), torch.randn(n, *shape, device=device), where.expand(n, *where.shape)

    def parts(y, where):
        if by == "name":
            return torch.tensor_split(input=y, tensor_indices_or_sections=where, dim=dim)
        return y.tensor_split(where, dim) if by == "method" else torch.tensor_split(y, where, dim)

    def through(split):
        def fn(w, x, own):
            return sum(k * (part.sin() * (w.sum() + k)).sum() for k, part in enumerate(split(w * x, own if owned else where), 1))

        return fn

    args = w, x, own
    of_lists = through(lambda y, where: torch.tensor_split(y, where.tolist(), dim))
    assert_trees_close(psg.per_sample_grad(through(parts), method="capture")(*args), loop_grad(of_lists)(*args))
    slopes = [torch.func.grad(lambda w, f=f: psg.per_sample_norm(f)(w, x, own).square().sum())(w) for f in (through(parts), of_lists)]
    assert_trees_close(*slopes, per_sample=False)


STRIDED_SCATTER = {
    "function": torch.as_strided_scatter,
    "method": lambda y, src, *view: y.as_strided_scatter(src, *view),
    "by name": lambda y, src, size, stride, offset: torch.as_strided_scatter(
        input=y, src=src, size=size, stride=stride, storage_offset=offset
    ),
    "of a part": lambda y, src, size, stride, offset: torch.cat([y[0], y.flatten()])[1:].as_strided_scatter(src, size, stride, offset + 4)[
        3:
    ],
}


def scattered_by_strides(y, src, size, stride, offset):
    places = torch.arange(y.numel(), device=y.device).as_strided(size, stride, offset)
    return y.flatten().index_put((places,), src).view(y.shape)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "loop", "batch"])
@pytest.mark.parametrize("name", STRIDED_SCATTER)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    strides=st.sampled_from([(1, 3), (3, 1), (2, 5)]),
    offset=st.integers(0, 2),
    varied=st.booleans(),
    n=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
def test_entries_beside_those_that_as_strided_scatter_writes(name, method, sizes, strides, offset, varied, n, seed, device):
    torch.manual_seed(seed)
    params = {"y": torch.randn(4, 4, device=device), "src": torch.randn(sizes, device=device)}
    x = 1 + torch.rand(n, device=device)
    varied = varied and method != "batch"

    def by(op):
        def fn(p, x):
            y, src = (p["y"] * x, p["src"] * x) if varied else (p["y"], p["src"])
            output = op(y, src, sizes, strides, offset).flatten().sin()
            return output @ torch.arange(1.0, 1 + len(output), device=device) * x

        return fn

    assert_trees_close(
        psg.per_sample_grad(by(STRIDED_SCATTER[name]), method=method)(params, x), loop_grad(by(scattered_by_strides))(params, x)
    )


@pytest.mark.parametrize("p", [1, 2, 3, 4.5])
@pytest.mark.parametrize("columns", [1, 2])
def test_renorm_of_numbers_whose_powers_are_zero(columns, p, device):
    w = torch.tensor([1e-200, 1e-120, 2.0, 0.0], device=device)[:, None] * torch.tensor([1.0, -0.5], device=device)[:columns]
    fn = lambda w, x: ((w * x).renorm(p, 0, 1.0) * x).sum()  # noqa: E731
    x = torch.rand(3, columns, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))


def by_rows(index, dim, like):
    """An index of rows along `dim`, expanded along all other dimensions."""
    return index.reshape([-1 if d == dim % like.ndim else 1 for d in range(like.ndim)]).expand(
        [len(index) if d == dim % like.ndim else size for d, size in enumerate(like.shape)]
    )


@pytest.mark.parametrize("n", [4, 1, 0])
@pytest.mark.parametrize("dim", [0, 1, -1, -3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", ["capture", "vmap"])
def test_rows_that_are_gathered_and_scattered(method, shared, dim, n, device):
    """As between the nodes and edges of a graph."""

    def fn(w, x, source, target):
        nodes = (w * x).sin()
        edges = nodes.index_select(dim, source) * torch.index_select(x, dim, target)
        sums = torch.zeros_like(nodes).scatter_add_(dim, by_rows(target, dim, nodes), edges)
        sums = torch.scatter_add(sums, dim, by_rows(source, dim, nodes), edges.exp())
        return score(sums)

    shape = (4, 3, 5)
    w, x = torch.randn(shape, device=device), torch.randn(n, *shape, device=device)
    edges = [torch.randint(shape[dim], (7,) if shared else (n, 7), device=device) for _ in range(2)]
    in_dims = (None, 0, *[None if shared else 0] * 2)
    assert_trees_close(psg.per_sample_grad(fn, in_dims=in_dims, method=method)(w, x, *edges), loop_grad(fn, in_dims=in_dims)(w, x, *edges))


@pytest.mark.parametrize("bad", [5, -1])
@pytest.mark.parametrize("op", ["index_select", "scatter_add"])
def test_rows_out_of_range_are_an_error(op, bad, device):
    """Not rows of another sample."""
    if device.type != "cpu":
        pytest.skip("a kernel's own assertion ends the process there")

    def fn(w, x, index):
        y = w * x
        return (y.index_select(0, index) if op == "index_select" else y.scatter_add(0, by_rows(index, 0, y), y[:1])).sum()

    index = torch.tensor([[1], [bad], [2]])
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        psg.per_sample_grad(fn, method="capture")(torch.randn(5, 2), torch.randn(3, 5, 2), index)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_an_assertion_that_one_sample_fails(method):
    """On the CPU alone: a failed assertion ends a GPU's context."""

    def fn(w, x):
        torch._assert_async((x < 100).all() & x.any(), "too large")
        return (w @ x).sin().sum()

    w, x = torch.randn(4, 4), torch.randn(6, 4)
    for n in (0, 1, 6):
        assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x[:n]), loop_grad(fn)(w, x[:n]))
    with_aux = psg.per_sample_grad(lambda w, x: (fn(w, x), w @ x), has_aux=True, method=method)
    assert with_aux(w, x[:0])[1].shape == (0, 4)  # on zeros, of which nothing is asserted
    x[3, 1] = 200
    with pytest.raises(RuntimeError, match="too large"):
        psg.per_sample_grad(fn, method=method)(w, x)


def test_assertions_do_not_wait():
    """Each reads one value for all samples, and no Python value of it."""
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def fn(w, x):
        torch._assert_async((x < 100).all(), "too large")
        return (w @ x).sin().sum()

    with Seen():
        psg.per_sample_grad(fn, method="capture")(torch.randn(4, 4), torch.randn(6, 4))
    assert seen.count(torch.ops.aten._assert_async.msg) == 1
    assert not {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}.intersection(seen)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_a_copy_of_an_activation_is_refused_as_by_torch(method, device):
    def fn(w, x):
        return copy.deepcopy(w @ x).sum()

    with pytest.raises(RuntimeError, match="deepcopy|storage of BatchedTensorImpl"):
        psg.per_sample_grad(fn, method=method)(torch.randn(4, 4, device=device), torch.randn(6, 4, device=device))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool])
def test_allclose_of_integers(dtype, device):
    """torch compares them as floating numbers: their differences do not wrap around."""
    x = torch.tensor([[0, 1], [0, 1], [100, 1], [-128, 1]], device=device).to(dtype)
    y = torch.tensor([[255, 1], [1, 1], [-100, 1], [0, 1]], device=device).to(dtype)

    def fn(w, x, y):
        return w.square().sum() if torch.allclose(x, y, atol=60) and x.allclose(y, atol=60) else w.sin().sum()

    w = torch.randn(3, device=device)
    for own in ((x, y), (x, x), (y, x)):
        same = [torch.allclose(*pair, atol=60) for pair in zip(*own, strict=True)]
        expected = torch.stack([2 * w if close else w.cos() for close in same])
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, *own), expected)


SPARSE = {
    "data": lambda a, p, x: a @ x.tanh() @ p["w"] + a.matmul(x),
    "a layer's output": lambda a, p, x: torch.mm(a, torch.sparse.mm(a, x @ p["w"]).relu()),
    "a parameter": lambda a, p, x: x @ (a @ p["w"]),
    "a parameter, entry by entry": lambda a, p, x: (a @ p["w"]) * x,
    "what is computed from one": lambda a, p, x: (a.t() @ (a @ p["w"].sin()).relu()) * x,
    "a node of a graph": lambda a, p, x: (a @ (a @ p["w"].sin()).relu()).index_select(0, x[0, :2].abs().long() % 6),
}


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("name", SPARSE)
def test_a_constant_sparse_matrix(name, layout, device):
    """The adjacency of a graph: vmap cannot repeat it for every sample."""
    adjacency = torch.randn(6, 6, device=device).relu().to_sparse(layout=layout)
    params = {"w": torch.randn(6, 6, device=device)}

    def fn(p, x):
        return SPARSE[name](adjacency, p, x).sin().sum()

    for n in (0, 1, 3):
        x = torch.randn(n, 6, 6, device=device)
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(params, x), loop_grad(fn)(params, x))


# Each has one step that vmap would run sample by sample, with a warning.
IN_PARTS = {
    "half of a spectrum": lambda w, x: torch.fft.ihfft2(w * x).abs().square().sum() + torch.fft.hfft2(w * x).sin().sum(),
    "to a spectrum and back": lambda w, x: (
        torch.istft(
            torch.stft((w * x).flatten(), 8, 2, window=torch.ones(8, device=x.device), return_complex=True) * (1 + 0.5j),
            *(8, 2),
            window=torch.ones(8, device=x.device),
        )
        .sin()
        .sum()
    ),
}


@pytest.mark.parametrize("fn", IN_PARTS.values(), ids=IN_PARTS)
def test_ops_that_are_taken_in_parts(fn, device):
    w, x = torch.randn(4, 4, device=device), torch.randn(6, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


def written_where(y, where, w):
    y = y.clone()
    y[where] = 2 * w[:1].expand(int(where.sum()), 4)
    return y


# Selections by each sample's own mask: w [4, 4], x [5, 4], where [5].
SELECTIONS = {
    "rows of the data": lambda w, x, where: x[where] @ w,
    "rows of a result": lambda w, x, where: (x @ w).sin()[where],
    "rows of a parameter": lambda w, x, where: w[where[:4]] * x[:4][where[:4]],
    "columns": lambda w, x, where: (x @ w)[:, where[:4]] * x[..., ~where[:4]].sum(),
    "a column of rows": lambda w, x, where: (x @ w)[where, 1] + (x @ w)[where][:, 2],
    "entries": lambda w, x, where: (x @ w)[where[:, None] & (torch.arange(4, device=x.device) > 0)],
    "masked_select": lambda w, x, where: torch.masked_select(x @ w, where[:, None]),
    "masked_select by keyword": lambda w, x, where: (x @ w).masked_select(mask=where[:, None].expand(5, 4)),
    "nonzero": lambda w, x, where: (x @ w)[where.nonzero()[:, 0]],
    "nonzero, a tuple": lambda w, x, where: (x @ w)[torch.nonzero(where[:, None] * x, as_tuple=True)],
    "argwhere": lambda w, x, where: (x @ w)[torch.argwhere(~where).squeeze(1)],
    "where": lambda w, x, where: (x @ w)[torch.where(where)],
    "written": lambda w, x, where: written_where(x @ w, where, w),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_masks_of_each_samples_own_that_select_as_many_entries(name, device):
    def fn(w, x, order):
        where = order < 2
        return SELECTIONS[name](w, x, where).sin().mean()

    order = torch.stack([torch.randperm(4, device=device) for _ in range(6)])
    order = torch.cat([order, torch.full((6, 1), 4, device=device)], 1)  # every mask selects two of the first four
    w, x = torch.randn(4, 4, device=device), torch.randn(6, 5, 4, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = psg.per_sample_grad(fn)(w, x, order)
    assert_trees_close(found, loop_grad(fn)(w, x, order))


@pytest.mark.parametrize("name", SELECTIONS)
def test_masks_that_select_different_numbers_go_apart(name, device):
    fn = lambda w, x, where: SELECTIONS[name](w, x, where).sin().sum()  # noqa: E731
    where = torch.rand(16, 5, device=device) < torch.tensor([0.9, 0.3])[torch.arange(16) % 2, None].to(device)
    w, x = torch.randn(4, 4, device=device), torch.randn(16, 5, 4, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = psg.per_sample_grad(fn)(w, x, where)
    assert_trees_close(found, loop_grad(fn)(w, x, where))


def network(p, x):
    return (torch.tanh(F.linear(x, p["w"], p["b"])) @ p["v"]).sum(-1)


def force(p, x):
    x = x.clone().requires_grad_()
    energy = network(p, x)
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy.square() + slope.square().sum()


def laplacian(p, x):
    x.requires_grad_()
    slope = torch.autograd.grad(network(p, x), x, create_graph=True)[0]
    second = [torch.autograd.grad(slope[i], x, create_graph=True)[0][i] for i in range(len(x))]
    return (sum(second) + slope.sum().sin()).square()


def assigned(p, x):
    x = x.detach()
    x.requires_grad = True
    rows = F.layer_norm(torch.stack([x, x.sin()]), x.shape)
    (slope,) = torch.autograd.grad(network(p, rows), x, torch.tensor([1.0, 2.0], device=x.device), create_graph=True)
    return slope.square().sum() if x.requires_grad else x.sum()


def not_differentiated_again(p, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(network(p, x), x)
    assert not slope.requires_grad
    return (network(p, x) + slope.sum()).square()


def of_what_fn_makes(p, x):
    offset = torch.zeros_like(x[:1]).requires_grad_()
    (slope,) = torch.autograd.grad(network(p, x + offset), offset, create_graph=True)
    return slope.square().sum()


def unused_inputs(p, x):
    x, other = x.clone().requires_grad_(), (2 * x).requires_grad_()
    slope, nothing = torch.autograd.grad(network(p, x), (x, other), create_graph=True, allow_unused=True)
    assert nothing is None
    return slope.square().sum()


def inner_step(p, x):
    """fn's gradient for the parameter passes through its transpose, which therefore must not become a separate derived value."""
    loss = ((x @ p["w"].T) + (p["w"][0] * x).sum()).square().sum()
    (slope,) = torch.autograd.grad(loss, p["w"], create_graph=True)
    return (x @ (p["w"] - 0.1 * slope).T).sin().sum() + (p["b"] * p["v"][:, 0]).sum()


def jacobian(p, x):
    return torch.autograd.functional.jacobian(lambda x: network(p, x[None]).sin(), x, create_graph=True).square().sum()


def rows_of_a_jacobian(p, x):
    x = x.clone().requires_grad_()
    hidden, other = torch.tanh(p["w"] @ x), (2 * x).requires_grad_()
    cotangents = torch.eye(4, device=x.device), torch.stack([hidden * hidden] * 4)  # the same for all samples, and of each sample's own
    rows, nothing = torch.autograd.grad(
        (hidden, hidden.sin()), (x, other), cotangents, create_graph=True, allow_unused=True, is_grads_batched=True
    )
    assert nothing is None
    return (p["b"] @ rows).square().sum()


def vectorized_jacobian(p, x):
    return torch.autograd.functional.jacobian(lambda x: p["w"] @ x.sin(), x, create_graph=True, vectorize=True).square().sum()


def recurrent(p, x):
    x = x[None, None].clone().requires_grad_()
    output, _ = torch.rnn_tanh(x, x.new_zeros(1, 1, 4), [p["w"], torch.diag(p["b"])], False, 1, 0.0, False, False, True)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return slope.square().sum() + p["v"].sum()


DIFFERENTIATE = [
    force, laplacian, assigned, not_differentiated_again, of_what_fn_makes, unused_inputs, inner_step, jacobian, rows_of_a_jacobian,
    vectorized_jacobian, recurrent,
]  # fmt: skip


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("fn", DIFFERENTIATE)
def test_functions_that_call_autograd_stay_on_the_first_rung(fn, n, device):
    params = {"w": torch.randn(4, 3, device=device), "b": torch.randn(4, device=device), "v": torch.randn(4, 2, device=device)}
    x = torch.randn(n, 3, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values, found = psg.per_sample_value_and_grad(fn)(params, x)
        assert psg.explain(fn)(params, x).rung == "capture"
    want_values, expected = loop_value_and_grad(fn)(params, x)
    assert_trees_close(found, expected)
    assert_trees_close(values, want_values)
    assert not x.requires_grad and not any(value.requires_grad for value in params.values())


def test_a_module_whose_output_is_a_derivative(device):
    class Force(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

        def forward(self, x):
            x = x.requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    loss, params = psg.stateless(Force().to(device), F.mse_loss)
    x, y = torch.randn(2, 4, 3, device=device)
    out = psg.clipped_grad(loss, 0.1)(params, x, y)
    grads = loop_grad(loss)(params, x, y)
    assert_trees_close(out.grads, psg.testing.reference_clipped_sum(grads, 0.1))
    assert psg.explain(loss)(params, x, y).rung == "capture"


@pytest.mark.parametrize("method, write", [("capture", False), ("capture", True), ("vmap", False)])  # vmap refuses such a write
@pytest.mark.parametrize(
    "make",
    [
        lambda w, x: torch.arange(3.0, device=x.device) + 1,
        lambda w, x: torch.zeros_like(w.detach()) + 2,
        lambda w, x: x.new_full((3,), 2.0) * 2,
    ],
)
def test_constants_that_fn_keeps_serve_on_every_rung(make, method, write, device):
    kept = []

    def fn(w, x):
        if write:
            room = torch.zeros(3, device=x.device)
            room[1:] = x[1:]  # from here on every tensor that fn makes has one copy per sample
            x = room + x
        if not kept:
            kept.append(make(w, x))
        return (w * x * kept[0]).sum()

    w, x = torch.randn(3, device=device), torch.randn(5, 3, device=device)
    first, second = (psg.per_sample_grad(fn, method=method)(w, x) for _ in range(2))
    assert_trees_close(first, second)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_a_mask_may_be_made_in_place_and_named(device):
    def fn(w, x):
        mask = torch.zeros(4, dtype=torch.bool, device=x.device)
        mask[1:3] = x[1:3] > 0
        same = torch.ones(4, dtype=torch.bool, device=x.device) & (x < 100)
        return (w @ x * mask).sin().sum() + (w @ x).masked_select(mask=same).cos().sum()

    w, x = torch.randn(4, 4, device=device), torch.randn(6, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))


# --- constants that are computed from parameters ------------------------------------------------------------------


def first_order_step(w, x):
    """fn differentiates for its own copy of the parameter."""
    own = w.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad((own @ x).square().sum(), own)
    return (w @ x - 0.1 * (slope @ x)).sin().sum()


def first_order_step_at_the_detached(w, x):
    own = w.detach().requires_grad_()
    (slope,) = torch.autograd.grad((own @ x).square().sum(), own)
    return (w @ x - 0.1 * (slope @ x)).sin().sum()


def written_into(w, x):
    with torch.no_grad():
        scale = w.abs()
        scale += 1.0
        scale[0] = x
    return (w * scale @ x).sin().sum()


def what_is_made_of_it_is_written_into(w, x):
    scale = w.detach().abs() * torch.tensor(2.0).to(x)
    other = torch.flip(torch.tril(scale), (0,)).clone()
    other[1] = x
    return ((w + other) @ x).sin().sum()


def branches(w, x):
    with torch.no_grad():
        order = w.norm(dim=1).argmax().item()
    return (w[order] * x).sin().sum() if (w.detach() > 0).any() else (w @ x).sum()


def twins(w, x):
    with torch.no_grad():
        one, other = w.clone(), w.clone()
        torch._foreach_add_([one], 1.0)
    return ((w * other + one) @ x).sin().sum()


VIEWS = {
    "transposed": lambda w: w.t(),
    "T": lambda w: w.T,
    "slice": lambda w: w[:2],
    "row": lambda w: w[1],
    "view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(2, -1),
    "flatten": lambda w: w.flatten(),
    "split": lambda w: w.split(2)[1],
    "unbind": lambda w: w.unbind()[2],
    "expand": lambda w: w.expand(2, 4, 4),
    "diagonal": lambda w: w.diagonal(),
    "einsum": lambda w: torch.einsum("ij->ji", w),
    "of the view": lambda w: w[1:].t()[:3],
    "the same tensor": lambda w: w.contiguous(),
    "copy": lambda w: w.clone(),
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("of", ["parameter", "derived"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_under_no_grad_have_no_history(view, of, n, device):
    """Unlike its results, torch's views say there that they require grad. `contiguous` returns its argument, which does."""

    def fn(w, x):
        w = w if of == "parameter" else w.sin()
        with torch.no_grad():
            seen = VIEWS[view](w)
        return seen.square().sum() * (x.sum() if seen.requires_grad else 2 * x.sum()) + (w @ x).sum() + (seen * 2).sin().sum()

    def of_a_batch(w, x):
        w = w if of == "parameter" else w.sin()
        with torch.no_grad():
            seen = VIEWS[view](w)
        return seen.square().sum() * x.sum(1) + (x @ w.T).sum(1) + (seen * 2).sin().sum()

    w, x = torch.randn(4, 4, device=device), torch.randn(n, 4, device=device)
    live = w.clone().requires_grad_()
    expected = torch.stack([torch.autograd.grad(fn(live, row), live)[0] for row in x])
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), expected)
    assert_trees_close(psg.per_sample_grad(of_a_batch, method="batch")(w, x), expected)
    assert_trees_close(psg.jit(psg.per_sample_grad(fn), backend="eager")(w, x), expected)


class Row:
    """An index whose repr does not show its value, like that of a NumPy array of more than a thousand entries."""

    def __init__(self, row):
        self.row = row

    def __index__(self):
        return self.row

    def __repr__(self):
        return "Row"


def rows_by_objects(w, x):
    return ((w[Row(0)] - 2 * w[Row(1)]) * x).sin().sum()


def two_precisions(w, x):
    w, x = w.float(), x.float()
    with torch.autocast(w.device.type, torch.bfloat16):
        one = w @ w
    with torch.autocast(w.device.type, torch.float16):
        other = w @ w
    assert (one.dtype, other.dtype) == (torch.bfloat16, torch.float16)
    return (w * x).sin().sum().double()


CONSTANTS = [
    *(
        first_order_step,
        first_order_step_at_the_detached,
        written_into,
        what_is_made_of_it_is_written_into,
        branches,
        twins,
        rows_by_objects,
    ),
    two_precisions,
]


@pytest.mark.parametrize("fn", CONSTANTS)
def test_constants_computed_from_parameters_stay_on_the_first_rung(fn, device):
    assert_stays_on_the_first_rung(fn, device)


def test_a_tensor_of_the_users_own_that_takes_a_constant(device):
    room = torch.zeros(4, device=device)

    def writes(w, x):
        with torch.no_grad():
            room.copy_(w * 2)
        return (w * x * room).sum()

    def reads(w, x):
        return (w * x + room).sin().sum()

    w, x = torch.randn(4, device=device), torch.randn(3, 4, device=device)
    for fn in (writes, reads, writes, reads):
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))


def test_aux_of_a_parameter_is_not_its_memory(device):
    w, x = torch.randn(4, device=device), torch.randn(3, 4, device=device)
    before = w.clone()
    _, aux = psg.per_sample_grad(lambda w, x: ((w * x).sum(), w.detach()), has_aux=True)(w, x)
    aux.zero_()
    assert torch.equal(w, before)


def test_fake_quantisation(device, monkeypatch):
    as_large(monkeypatch)

    def fn(w, x):
        by_row = torch.fake_quantize_per_channel_affine(w, steps, zeros, 0, -8, 7)
        return (torch.fake_quantize_per_tensor_affine(w, 0.1, 0, -8, 7) @ x).sin().sum() + (by_row @ x).cos().sum()

    steps, zeros = torch.full((4,), 0.2, device=device, dtype=torch.float32), torch.zeros(4, device=device, dtype=torch.int32)
    w, x = torch.randn(4, 4, device=device, dtype=torch.float32), torch.randn(6, 4, device=device, dtype=torch.float32)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    (leaf,) = psg.explain(fn)(w, x).leaves
    assert not any("lifted" in use for use in leaf.uses)


def test_a_constant_of_the_parameters_that_fn_keeps(device):
    kept = []

    def fn(w, x):
        if not kept:
            kept.append(w.detach().abs())
        return (w * x * kept[0]).sum()

    w, x = torch.randn(4, device=device), torch.randn(6, 4, device=device)
    psg.per_sample_grad(fn)(w, x)
    with pytest.raises(psg.StateError, match="kept from an earlier call"):
        psg.per_sample_grad(fn)(2 * w, x)


# --- data that the samples share ------------------------------------------------------------------------------

ON_SHARED = {
    "conv1d": ((2, 3, 12), lambda w, x: F.conv1d(x, w[:24].reshape(4, 3, 2), w[:4], 2, 1, 1)),
    "conv2d": ((2, 3, 8, 8), lambda w, x: F.conv2d(x, w.reshape(2, 3, 2, 3), w[:2], 1, (1, 0), (2, 1))),
    "conv2d, grouped": ((4, 8, 8), lambda w, x: F.conv2d(x, w.reshape(4, 1, 3, 3), None, 2, 1, 1, 4)),
    "conv2d, channels last": ((2, 3, 8, 8), lambda w, x: F.conv2d(x.to(memory_format=torch.channels_last), w[:27].reshape(1, 3, 3, 3))),
    "conv3d": ((2, 2, 4, 4, 4), lambda w, x: F.conv3d(x, w[:32].reshape(2, 2, 2, 2, 2), w[:2])),
    "max_pool1d": ((2, 36), lambda w, x: F.max_pool1d(x * w, 3, 2, 1)),
    "max_pool2d": ((2, 6, 6), lambda w, x: F.max_pool2d(x * w.reshape(6, 6), 3, 2, 1)),
    "avg_pool1d": ((2, 36), lambda w, x: F.avg_pool1d(x * w, 3, 2, 1)),
    "avg_pool2d": ((2, 6, 6), lambda w, x: F.avg_pool2d(x * w.reshape(6, 6), 3, 2, 1, True, False)),
    "avg_pool3d": ((1, 2, 6, 6), lambda w, x: F.avg_pool3d(x * w.reshape(6, 6), 2)),
    "adaptive_avg_pool1d": ((2, 36), lambda w, x: F.adaptive_avg_pool1d(x * w, 5)),
    "adaptive_avg_pool2d": ((2, 6, 6), lambda w, x: F.adaptive_avg_pool2d(x * w.reshape(6, 6), (2, 4))),
    "globally, of one image": ((2, 6, 6), lambda w, x: F.adaptive_avg_pool2d(x * w.reshape(6, 6), 1)),
    "globally, of several": ((2, 3, 6, 6), lambda w, x: F.adaptive_avg_pool2d(x * w.reshape(6, 6), (1, 1))),
    "globally, of one sequence, transposed": ((4, 6), lambda w, x: F.adaptive_avg_pool1d((x * w[:6]).mT[None], 1)),
    "globally, of one volume": ((2, 4, 6, 6), lambda w, x: F.adaptive_avg_pool3d(x * w.reshape(6, 6), 1)),
    "activations": (
        (2, 36),
        lambda w, x: sum(
            getattr(F, name)(3 * x * w).cos()
            for name in ("relu6", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "mish", "selu", "celu")
        ),
    ),
    "glu": ((2, 36), lambda w, x: F.glu(3 * x * w)),
}


@pytest.mark.parametrize("name", ON_SHARED)
@pytest.mark.parametrize("n", [0, 1, N])
def test_ops_on_what_the_samples_share(name, n, device):
    """The op on shared data alone, and beside the same op on each sample's own data."""
    shape, op = ON_SHARED[name]
    w, x, scale = torch.randn(36, device=device), torch.randn(shape, device=device), torch.arange(1.0, n + 1, device=device)

    def fn(w, s):
        out = op(w, x).flatten()
        return (out.sin() * torch.arange(out.numel(), device=device).cos()).sum() * s + (out[0] * s).sin()

    psg.check(fn)(w, scale)
    psg.check(lambda w, s: fn(w, s) + op(w, x * s).square().sum())(w, scale)


@pytest.mark.parametrize("rows", [2, 40])
def test_products_of_shared_data_run_once(rows, device, monkeypatch):
    as_large(monkeypatch)
    x = torch.randn(rows, 6, device=device)
    adjacency = torch.rand(rows, rows, device=device)

    def fn(p, node, y):
        hidden = adjacency @ F.linear(x, p["first"]).tanh()
        return F.cross_entropy(F.linear(adjacency @ hidden, p["last"]).index_select(0, node[None]), y[None])

    p = {"first": torch.randn(8, 6, device=device), "last": torch.randn(3, 8, device=device)}
    batch = torch.randint(rows, (N,), device=device), torch.randint(3, (N,), device=device)
    assert "linear: derived" in str(psg.explain(fn)(p, *batch))
    psg.check(fn)(p, *batch)


@pytest.mark.parametrize("length, way", [(4, "rule"), (40, "derived")])
def test_shared_data_run_once_where_a_gradient_is_smaller_than_its_factor(length, way, device, monkeypatch):
    as_large(monkeypatch)
    x, w, scales = torch.randn(2, length, device=device), torch.randn(3, 2, 3, device=device), torch.randn(N, device=device)

    def fn(w, s):
        return (F.conv1d(x, w) * s).sin().sum()

    assert f"conv1d: {way}" in str(psg.explain(fn)(w, scales))
    psg.check(fn)(w, scales)


SHAPES = [(), (1,), (2,), (3, 1)]
SYSTEMS = [  # the dimensions before those of the matrices A, those before the right-hand sides B, and the columns of B
    *((left, right, (3,)) for left in SHAPES for right in SHAPES),
    *((left, left, ()) for left in SHAPES),  # a vector for each matrix
    *((left, (), ()) for left in SHAPES if left),  # one vector
]


@pytest.mark.parametrize("sampled", ["A", "B", "both"])
@pytest.mark.parametrize("ex", [False, True])
@pytest.mark.parametrize("left, right, columns", SYSTEMS, ids=str)
def test_systems_of_equations_with_different_numbers_of_dimensions(left, right, columns, ex, sampled, device):
    a = torch.randn(*([N] if sampled != "B" else []), *left, 2, 2, device=device)
    on_the_right = ex and columns == (3,)
    b = torch.randn(*([N] if sampled != "A" else []), *right, *((3, 2) if on_the_right else (2, *columns)), device=device)
    in_dims = (None, None if sampled == "B" else 0, None if sampled == "A" else 0)

    def fn(w, a, b):
        solution = torch.linalg.solve_ex(a * w, b + w, left=not on_the_right)[0] if ex else torch.linalg.solve(a * w, b + w)
        return solution.sin().sum() + solution.mean()

    w = torch.tensor(1.1, device=device)
    for method in ("capture", "vmap"):
        grads = psg.per_sample_grad(fn, in_dims=in_dims, method=method)(w, a, b)
        assert_trees_close(grads, loop_grad(fn, in_dims=in_dims)(w, a, b))


def test_least_squares_with_different_numbers_of_dimensions(device):
    a, w, b = torch.randn(1, 3, 2, device=device), torch.tensor(1.1, device=device), torch.randn(N, 3, 2, device=device)

    def fn(w, b):
        return torch.linalg.lstsq(a, b * w)[0].sin().sum()

    with pytest.warns(psg.FallbackWarning, match="lstsq of operands with different numbers of dimensions"):
        assert_trees_close(psg.per_sample_grad(fn)(w, b), loop_grad(fn)(w, b))


def test_what_a_function_does_is_found_out_once(device):
    """If fn writes into the sample, or into a view of a tensor that it makes, the first call restarts the pass; later calls expect it."""
    calls = []

    def writes_input(p, x):
        calls.append(1)
        return F.relu(x, inplace=True).mul(p).sum()

    def writes_zeros(p, x):
        calls.append(1)
        table = torch.zeros(3, device=device)
        table[1:].fill_((p * x).sum())
        return table.square().sum()

    p, x = torch.randn(4, device=device), torch.randn(2, 4, device=device)
    for fn in (writes_input, writes_zeros):
        expected, counts = loop_grad(fn)(p, x), []
        for _ in range(3):
            calls.clear()
            assert_trees_close(psg.per_sample_grad(fn, method="capture")(p, x), expected)
            counts.append(len(calls))
        assert counts == [2, 1, 1]


class Doubled(torch.Tensor):
    """A tensor that handles one op itself."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs or {})
        return output * 2 if func is torch.Tensor.tanh else output


class Plain(torch.Tensor):
    """A tensor that handles ops like any other."""


@pytest.mark.parametrize("which", [0, 1])
def test_tensors_that_handle_ops_themselves_run_in_a_loop(which, device):
    def fn(w, x):
        return (w * x).tanh().sum()

    args = [torch.randn(3, device=device), torch.randn(5, 3, device=device)]
    args[which] = args[which].as_subclass(Doubled)
    with pytest.warns(psg.FallbackWarning, match=rf"{'wx'[which]} is a Doubled, whose __torch_function__ .*as_subclass\(torch.Tensor\)"):
        found = psg.per_sample_grad(fn)(*args)
    plain = [arg.as_subclass(torch.Tensor) for arg in args]
    assert_trees_close(found.as_subclass(torch.Tensor), 2 * loop_grad(fn)(*plain))
    with pytest.raises(psg.PsgError, match="is a Doubled"):
        psg.per_sample_grad(fn, method="vmap")(*args)


class Held:
    """No tensor, but it handles ops as if it were the one that it holds."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*[own.tensor if isinstance(own, cls) else own for own in args], **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_products_with_what_is_no_tensor(method, device):
    def fn(w, x):
        return (torch.matmul(x, Held(w)) + torch.mm(Held(w), w).sum()).sin().sum()

    args = torch.randn(3, 3, device=device), torch.randn(N, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method=method)(*args), loop_grad(fn)(*args))
    slope = torch.func.grad(lambda w: psg.per_sample_norm(fn, method=method)(w, args[1]).sum())(args[0])
    norms = lambda w: torch.func.vmap(torch.func.grad(fn), in_dims=(None, 0))(w, args[1]).flatten(1).norm(dim=1).sum()  # noqa: E731
    assert_trees_close(slope, torch.func.grad(norms)(args[0]), per_sample=False)


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
def test_tensors_of_a_class_that_handles_ops_like_any_other(device):
    def fn(w, x):
        return (w * x).tanh().sum() * (2 if isinstance(x, Plain) else 1)

    w, x = torch.randn(3, device=device), torch.randn(5, 3, device=device)
    for params in (w.as_subclass(Plain), w):
        assert_trees_close(psg.per_sample_grad(fn)(params, x), loop_grad(fn)(w, x))
    with pytest.warns(psg.FallbackWarning, match=r"x is a Plain, and under vmap a plain tensor; .*as_subclass\(torch.Tensor\)"):
        found = psg.per_sample_grad(fn)(w, x.as_subclass(Plain))
    assert_trees_close(found, 2 * loop_grad(fn)(w, x))


def test_a_number_that_a_function_takes_later_is_rounded_as_in_one_sample(device, monkeypatch):
    """Small values of parameters are computed for every sample, by other ops, unless a pass has taken numbers from them."""
    monkeypatch.undo()  # where all sizes count as large, they are not
    w, x = torch.randn(100, device=device), torch.randn(3, 4, device=device)
    numbers = []

    def fn(w, x):
        product = torch.dot(w, w.sin())
        return x.sum() * product if not numbers or product.item() == numbers[0] else -x.sum() * product

    for _ in range(2):
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
        numbers.append(torch.dot(w, w.sin()).item())


def test_writes_into_samples_without_entries(device):
    def fn(w, x):
        x.mul_(2)
        return w.sum() + x.sum()

    w, x = torch.ones(3, device=device), torch.zeros(4, 0, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), torch.ones(4, 3, device=device))


_aten = torch.ops.aten


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (w.index_select(0, x[0].round().abs().long() % 4).sum(0) * x).sum(),
        lambda w, x: (w * x).index_select(0, torch.tensor(0, device=x.device)).square().sum(),
        lambda w, x: w.sum() * x.index_select(0, x[0].round().abs().long() % 4).square().sum(),
        lambda w, x: (w.sum() * x.clone().resize_(2)).square().sum(),
        lambda w, x: (w * x).sum() * torch.any(x > 0, []).sum(),
        lambda w, x: (w * x).sum() * (x > 0).all(dim=()).sum(),
        lambda w, x: _aten.max(w * x.round()),
        lambda w, x: _aten.median.default(w * x.round()),
        lambda w, x: (_aten.select_scatter(w * x[0], (w * x[1])[0], 0, 1) * x).sum(),
        lambda w, x: (_aten.roll((w * x).sum(), [1], []) * x[0]).sum(),
        lambda w, x: _aten.as_strided_copy(w * x[0], [2], [1], 1).square().sum(),
        lambda w, x: (_aten.index_select(w * x, 0, torch.tensor(1, device=x.device)) * x).sum(),
        lambda w, x: (_aten.embedding(w[:, None], x.round().abs().long() % 4, 1).squeeze(1) * x).sum(),
        lambda w, x: _aten.var.default(w.expand(3, -1) * x[:3, None], 0) + _aten.std_mean.default(w * x, 1)[0] + _aten.var(w.sin(), 0),
        lambda w, x: (_aten.addmm(self=x[:2, None], mat1=w[:2, None], mat2=x[None]).sin()[0] * x).sum(),
        lambda w, x: torch.layer_norm(x=w * x, normalized_shape=(4,), weight=w).square().sum(),
        lambda w, x: (
            _aten.einsum(equation="i,j->", tensors=[w, x.sin()]) + torch.linalg.det(A=w.diag() + x) + torch.det(input=w.diag() * 2)
        ),
    ],
    ids=[
        "row",
        "entry",
        "entry of data",
        "resize_",
        "any",
        "all",
        "max",
        "median",
        "select_scatter",
        "roll",
        "as_strided",
        "ATen",
        "embedding",
        "var",
        "self by name",
        "x by name",
        "all by name",
    ],
)
@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_forms_that_vmap_gets_wrong(fn, method, device):
    w = torch.ones(4, device=device)
    x = torch.tensor([[1.0, 3, 3, 2], [2, 2, 1, 0], [3, 1, 2, 3]], device=device)
    try:
        values, grads = psg.per_sample_value_and_grad(fn, method=method)(w, x)
    except (psg.PsgError, RuntimeError, IndexError):
        assert method == "vmap"  # refused, or unknown to vmap
        return
    assert_trees_close(values, torch.stack([fn(w, own) for own in x]))
    assert_trees_close(grads, loop_grad(fn)(w, x))


def _exported(module, x):
    return torch.export.export(module, (x,)).module()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning", "ignore::DeprecationWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("form", [lambda m, x: torch.jit.script(m), lambda m, x: torch.jit.trace(m, (x,)), _exported])
def test_the_padding_of_an_embedding_in_a_graph(form):
    module = torch.nn.Sequential(torch.nn.Embedding(5, 2, padding_idx=0), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    ids = torch.tensor([[0, 1, 0], [0, 2, 3]])
    loss, params = psg.stateless(form(module, ids[:1]), lambda output: output.sum())
    expected = loop_grad(psg.stateless(module, lambda output: output.sum())[0])(params, ids)
    assert_trees_close(psg.per_sample_grad(loss)(params, ids), expected)
