"""Rules of the user's own: registering, declining, listing, and the errors of wrong registrations."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_derivatives_agree
from cases import N, Problem, score
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg._torch import _ops
from psg.factors import Dense, Outer
from psg.rules import _registry
from psg.testing import assert_trees_close, loop_grad


@pytest.fixture(autouse=True)
def _put_the_registry_back(monkeypatch):
    monkeypatch.setattr(_registry, "_rules", dict(_registry._rules))


@psg.primitive
def bilinear_form(x, weight, scale=1.0):
    """x^T W x."""
    return scale * torch.einsum("...i,ij,...j->...", x, weight, x)


def problem(device, fn=bilinear_form, **options):
    w, x = torch.randn(4, 4, device=device), torch.randn(N, 5, 4, device=device)
    return Problem(lambda w, x: score(fn(x, w, **options)), (w, x))


def register(calls, decline=False):
    @psg.rule(bilinear_form, params=("weight",))
    def bilinear_rule(x, weight, scale=1.0):
        calls.append((x.shape, weight.shape, scale))
        if decline:
            return NotImplemented
        output = scale * torch.einsum("nti,ij,ntj->nt", x, weight, x)
        return output, {"weight": lambda cotangent: Outer(scale * cotangent[..., None] * x, x)}

    return bilinear_rule


def test_a_primitive_without_a_rule_is_lifted(device):
    x, w = torch.randn(5, 4, device=device), torch.randn(4, 4, device=device)
    assert torch.equal(bilinear_form(x, w), torch.einsum("ti,ij,tj->t", x, w, x))
    assert_agrees(problem(device))
    assert bilinear_form.__doc__ == "x^T W x." and bilinear_form.__name__ == "bilinear_form"


def test_an_own_rule_runs_on_the_physical_batch(device):
    calls = []
    register(calls)
    assert_agrees(problem(device, scale=2.0))
    assert set(calls) == {((N, 5, 4), (4, 4), 2.0)}
    assert isinstance(psg.factored_grad(problem(device).fn)(*problem(device).args), Outer)


def test_disabled_rules_do_not_run(device):
    calls = []
    register(calls)
    assert_agrees(problem(device), rules=False)
    assert not calls


@pytest.mark.parametrize("method", ["capture", "batch"])
def test_methods_that_need_rules_refuse_to_run_without(method):
    with psg.rules.disabled(), pytest.raises(psg.InputError, match=rf"method={method!r} runs ops by their rules"):
        psg.per_sample_grad(lambda w, x: (x * w).sum(-1), method=method)(torch.ones(2), torch.ones(3, 2))


def test_a_rule_may_decline(device):
    calls = []
    register(calls, decline=True)
    assert_agrees(problem(device))
    assert calls


def test_a_call_with_arguments_that_the_rule_does_not_take_is_lifted(device):
    calls = []

    @psg.rule(bilinear_form, params=("weight",))
    def plain_rule(x, weight):
        calls.append(x.shape)
        return NotImplemented

    w, x = torch.randn(4, 4, device=device), torch.randn(N, 5, 4, device=device)
    for call in (lambda x, w: bilinear_form(x, w, 2.0), lambda x, w: bilinear_form(x, w, scale=2.0)):
        assert_agrees(Problem(lambda w, x, call=call: score(call(x, w)), (w, x)))
    assert not calls


def test_a_later_rule_replaces_an_earlier_one(device):
    first, second = [], []
    register(first)
    register(second)
    assert_agrees(problem(device))
    assert second and not first


def test_a_weight_that_depends_on_the_sample_is_no_parameter(device):
    calls = []
    register(calls)
    w, x = torch.randn(4, 4, device=device), torch.randn(N, 5, 4, device=device)
    assert_agrees(Problem(lambda w, x: score(bilinear_form(x, w * x.sum())), (w, x)))
    assert not calls


def test_a_parameter_as_data_takes_the_lifted_path(device):
    calls = []
    register(calls)
    w, x = torch.randn(4, 4, device=device), torch.randn(N, 4, device=device)
    assert_agrees(Problem(lambda w, x: score(bilinear_form(w, w) * x), (w, x)))


def test_a_rule_for_torch_s_own_function(device):
    calls = []

    @psg.rule(F.prelu, params=("weight",))
    def prelu(input, weight):
        calls.append(input.shape)
        negative = input.clamp(max=0)
        return input.clamp(min=0) + weight * negative, {"weight": lambda cotangent: Dense((cotangent * negative).sum(1))}

    w, x = torch.randn(4, device=device), torch.randn(N, 5, 4, device=device)
    assert_agrees(Problem(lambda w, x: score(F.prelu(x, w)), (w, x)))
    assert set(calls) == {(N, 5, 4)}


def test_a_rule_for_a_library_op(device):
    op = torch.ops.aten.mv.default
    calls = []

    @psg.rule(op, params=("self",))
    def mv(self, vec):
        calls.append(vec.shape)
        return vec @ self.T, {"self": lambda cotangent: Outer(cotangent[:, None], vec[:, None])}

    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)
    assert_agrees(Problem(lambda w, x: score(op(w, x)), (w, x)))
    assert calls


def test_a_rule_with_several_outputs(device):
    @psg.primitive
    def both(x, weight):
        return x * weight, x + weight

    @psg.rule(both, params=("weight",))
    def both_rule(x, weight):
        outputs = x * weight, x + weight
        return outputs, {"weight": lambda cotangents: Dense(cotangents[0] * x + cotangents[1])}

    w, x = torch.randn(4, device=device), torch.randn(N, 4, device=device)
    assert_agrees(Problem(lambda w, x: score(both(x, w)[0]) + score(both(x, w)[1]), (w, x)))
    # One output unused: its cotangent never arrives, and counts as zeros.
    assert_agrees(Problem(lambda w, x: score(both(x, w)[1]), (w, x)))
    assert_agrees(Problem(lambda w, x: score(both(x, w)[0]), (w, x)))


@pytest.mark.parametrize(
    "write",
    [lambda y: y.mul_(3), lambda y: y.relu_(), lambda y: y[:1].zero_(), lambda y: y.view(-1)[0].add_(1), lambda y: y.T.sin_()],
    ids=["mul_", "relu_", "row", "entry", "transposed"],
)
def test_the_output_of_a_rule_may_be_a_view_and_may_be_written_into(write, device):
    @psg.rule(bilinear_form, params=("weight",))
    def viewing_rule(x, weight, scale=1.0):
        output = scale * torch.einsum("nti,ij,ntj->tn", x, weight, x)
        both = torch.stack([output.T, 0 * output.T])  # the output is a view of this
        return both[0].contiguous().view(len(x), -1), {"weight": lambda cotangent: Outer(scale * cotangent[..., None] * x, x)}

    def fn(w, x):
        y = bilinear_form(x, w)
        write(y.unsqueeze(0))
        return score(y)

    w, x = torch.randn(4, 4, device=device), torch.randn(N, 5, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


def test_registered_lists_the_rules():
    rules = psg.rules.registered()
    for op in (F.linear, F.conv1d, F.conv2d, F.conv3d, F.embedding, F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm):
        assert op in rules, op
    with pytest.raises(TypeError):
        rules[F.linear] = None


def test_a_function_that_no_mode_sees_is_an_error():
    def unseen(x, weight):
        return x @ weight

    with pytest.raises(psg.InputError, match=r"'unseen'.*psg\.primitive"):
        psg.rule(unseen)(lambda x, weight, bias=None: NotImplemented)


def test_a_parameter_that_the_rule_does_not_take_is_an_error():
    with pytest.raises(psg.InputError, match=r"no argument 'gain'.*it takes \(x, weight\)"):

        @psg.rule(bilinear_form, params=("gain",))
        def wrong(x, weight):
            return NotImplemented


def test_arguments_without_names_are_an_error():
    for wrong in (lambda x, /, weight: NotImplemented, lambda x, weight, **options: NotImplemented):
        with pytest.raises(psg.InputError, match=r"has positional-only arguments or \*\*options"):
            psg.rule(bilinear_form, params=("weight",))(wrong)


def test_a_broken_rule_is_named(device):
    """A factor that does not fit is an error, not a wrong gradient: nothing downstream would notice a shape that broadcasts."""

    @psg.rule(bilinear_form, params=("weight",))
    def broken_rule(x, weight, scale=1.0):
        output = scale * torch.einsum("nti,ij,ntj->nt", x, weight, x)
        return output, {"weight": lambda cotangent: Dense(cotangent.sum(1)[:, None, None])}

    with pytest.raises(psg.PsgError, match=r"weight of bilinear_form.*\(1, 1\).*\(4, 4\)"):
        psg.per_sample_grad(problem(device).fn, method="capture")(*problem(device).args)


@pytest.mark.parametrize("alias, name", [("dsmm", "mm"), ("spmm", "mm"), ("hsmm", "hspmm"), ("saddmm", "sspaddmm")])
def test_functions_that_are_equal_have_one_name(alias, name):
    """Otherwise what psg remembers of an op would depend on which alias came first."""
    assert getattr(torch, alias) == getattr(torch, name)
    assert _ops.name_of(getattr(torch, alias)) == _ops.name_of(getattr(torch, name)) == name


def test_functions_that_others_have_replaced_before(device):
    """A library may put wrappers in the place of torch's functions, as torch_geometric does; these call the builtin ones."""
    program = f"""
import torch
import torch.nn.functional as F

def wrapped(old):
    return lambda *args, **kwargs: old(*args, **kwargs)

torch.set_default_dtype(torch.float64)
torch.index_select, F.linear = map(wrapped, (torch.index_select, F.linear))
theirs = torch.index_select, F.linear
import psg
from psg.testing import assert_trees_close, loop_grad

assert theirs == (torch.index_select, F.linear)
w, i = torch.randn(7, 4, device={str(device)!r}), torch.tensor([1, 5, 2], device={str(device)!r})
for select in (torch.index_select, torch.Tensor.index_select):
    fn = lambda w, i: (select(1.5 * w, 1, i % 4) ** 3).sum()
    assert_trees_close(psg.per_sample_grad(fn)(w, i), loop_grad(fn)(w, i))
table = psg.factored_grad(lambda w, i: torch.index_select(w, 0, i.reshape(1)).sum())(w, i)
layer = psg.factored_grad(lambda w, i: F.linear(i * torch.ones(2, 4, device=w.device), w).sum())(w, i)
print(type(table).__name__, type(layer).__name__)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["Rows", "Outer"], done.stderr


@given(n=st.integers(0, 3), t=st.integers(0, 3), sides=st.tuples(st.integers(1, 3), st.integers(1, 3)), differentiable=st.booleans())
def test_a_rule_of_the_user_s_where_the_result_is_differentiated(n, t, sides, differentiable, device):
    """Only one that says so runs there; either way derivatives are those of the loop."""
    ran = []

    @psg.primitive
    def affine(x, weight):
        return x @ weight.T

    @psg.rule(affine, params=("weight",), differentiable=differentiable)
    def affine_rule(x, weight):
        ran.append(weight.requires_grad)
        return x @ weight.T, {"weight": lambda cotangent: Outer(cotangent, x)}

    torch.manual_seed(n)
    problem = Problem(lambda w, x: score(affine(x, w)), (torch.randn(sides, device=device), torch.randn(n, t, sides[1], device=device)))
    assert_derivatives_agree(problem)
    assert any(ran) == (differentiable and n > 0)
