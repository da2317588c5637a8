"""The oracle is compared with hand-written gradients, and the comparison must fail where it should."""

import contextlib
import math
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from agreement import linear_args
from agreement import linear_loss as loss
from cases import N
from conftest import as_large
from hypothesis import find, given, settings
from hypothesis import strategies as st
from torch import nn

import psg
from psg import testing
from psg._batch import _exchange
from psg.testing import (
    Mismatch,
    assert_reductions_close,
    assert_trees_close,
    loop_grad,
    loop_value_and_grad,
    reference_gram,
    reference_norm,
)

# --- the oracle ---------------------------------------------------------------------------------------------


def test_loop_of_a_known_gradient(device):
    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)
    values, grads = loop_value_and_grad(lambda w, x: (w @ x).square().sum() / 2)(w, x)
    outputs = x @ w.T
    assert_trees_close(values, outputs.square().sum(1) / 2)
    assert_trees_close(grads, outputs[:, :, None] * x[:, None, :])


def test_loop_uses_no_vmap(monkeypatch, device):
    monkeypatch.setattr(torch, "vmap", None)
    monkeypatch.setattr(torch.func, "vmap", None)
    w, x = torch.randn(3, device=device), torch.randn(N, 3, device=device)
    assert_trees_close(loop_grad(lambda w, x: (w * x).sum())(w, x), x)


def test_loop_takes_contiguous_copies_of_samples_and_the_rest_as_it_is_given(device):
    images = torch.randn(N, 2, 4, 4, device=device).to(memory_format=torch.channels_last)
    seen = []

    def fn(w, x):
        seen.append((x.is_contiguous(), w.is_contiguous()))
        x.zero_()  # its own copy
        return w.sum()

    loop_grad(fn)(torch.randn(3, 4, device=device).T, images)
    assert seen == [(True, False)] * N
    assert images.any()


def test_loop_argnums_in_dims_and_aux(device):
    a, x, b = torch.randn(3, device=device), torch.randn(3, N, device=device), torch.randn(N, 3, device=device)
    values, grads = loop_value_and_grad(lambda a, x, b: (a * x * b).sum(), (2, 0), in_dims=(None, 1, 0))(a, x, b)
    assert_trees_close(values, (a * x.T * b).sum(1))
    assert isinstance(grads, tuple)
    assert_trees_close(grads, (a * x.T, x.T * b))
    grads, aux = loop_grad(lambda a, b: ((a * b).sum(), {"b": b}), has_aux=True)(a, b)
    assert_trees_close((grads, aux), (b, {"b": b}))


def test_loop_of_an_unused_parameter_and_of_no_samples(device):
    params = {"a": torch.randn(2, device=device), "b": torch.randn(3, 4, device=device)}
    x = torch.randn(N, 2, device=device)
    grads = loop_grad(lambda p, x: (p["a"] * x).sum())(params, x)
    assert grads["b"].shape == (N, 3, 4) and not grads["b"].any()
    values, grads = loop_value_and_grad(lambda p, x: 1 / 0)(params, x[:0])
    assert values.shape == (0,) and grads["b"].shape == (0, 3, 4)


@pytest.mark.parametrize(
    "sizes, options, message",
    [
        ([2], {}, "loop_grad: no argument has a dimension for the samples"),
        ([2, 3, 4], {}, r"the arguments disagree on the number of samples: rest\[0\] has 3, rest\[1\] has 4"),
        ([2, 3], {"argnums": 2}, "argnums=2 names argument 2, but the call has 2 positional arguments"),
        ([2, 3], {"argnums": -3}, "argnums=-3 names argument -3"),
        ([2, 3], {"argnums": (0, 0)}, r"argnums=\(0, 0\) names an argument twice"),
        ([2, 3], {"argnums": (0, -2)}, r"argnums=\(0, -2\) names an argument twice"),
        ([2, 3], {"argnums": "w"}, "argnums='w': expected an integer or a non-empty tuple of integers"),
        ([2, 3], {"in_dims": (None,)}, "expected None, an integer, or a tuple with one entry for each of the 2 positional arguments"),
        ([2, 3], {"in_dims": (None, "x")}, r"in_dims for rest\[0\] is 'x'; expected an integer or None"),
        ([2, 3], {"in_dims": (None, 1)}, r"rest\[0\] has shape \(3,\); expected a dimension 1 with the samples"),
        ([2, 3], {"has_aux": 1}, "has_aux=1: expected True or False"),
    ],
)
def test_loop_errors(sizes, options, message):
    """Those of the transforms."""
    with pytest.raises(psg.InputError, match=message):
        loop_grad(lambda w, *rest: w.sum(), **options)(*map(torch.ones, sizes))


def test_loop_takes_another_kind_of_mapping_for_in_dims(device):
    data = {"a": torch.randn(2, 3, 2, device=device), "b": torch.randn(2, 3, 2, device=device)}
    fn = lambda w, x: (w * x["a"]).sum() * x["b"].sum()  # noqa: E731
    w, in_dims = torch.randn(3, 2, device=device), (None, OrderedDict(b=2, a=0))
    assert_trees_close(loop_grad(fn, in_dims=in_dims)(w, data), data["a"] * data["b"].sum((0, 1))[:, None, None])
    psg.check(fn, in_dims=in_dims)(w, data)


def test_loop_wants_a_scalar():
    with pytest.raises(psg.InputError, match=r"scalar.*\(2,\)"):
        loop_grad(lambda w, x: w * x)(torch.ones(2), torch.ones(3, 2))
    with pytest.raises(psg.InputError, match=r"real floating-point scalar.*int64"):
        loop_grad(lambda w, x: (w * x).sum().long())(torch.ones(2), torch.ones(3, 2))


# --- the comparison -------------------------------------------------------------------------------------------


def trees():
    return {"w": torch.arange(1.0, 25.0).reshape(4, 3, 2), "deep": [torch.ones(4), (torch.ones(4, 2),)]}


def test_equal_trees_pass():
    assert assert_trees_close(trees(), trees()) == 0


@pytest.mark.parametrize("path, place", [("grads['w']", (2, 1, 0)), ("grads['deep'][0]", (3,)), ("grads['deep'][1][0]", (0, 1))])
def test_the_message_names_leaf_sample_entry_and_error(path, place):
    actual = trees()
    eval(path, {"grads": actual})[place] += 0.25
    with pytest.raises(Mismatch) as caught:
        assert_trees_close(actual, trees(), name="grads")
    error = caught.value
    assert (error.path, error.sample, error.error) == (path, place[0], 0.25)
    entry = f", entry {list(place[1:])}" if place[1:] else ""
    assert str(error).startswith(f"{path}, sample {place[0]}{entry}: got ")
    assert "error 2.5e-01" in str(error) and "1 of 3 leaves differ" in str(error)


def test_leaves_without_samples_have_entries_alone():
    with pytest.raises(Mismatch, match=r"^tree, entry \[1\]: got") as caught:
        assert_trees_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), per_sample=False)
    assert caught.value.sample is None


@pytest.mark.parametrize(
    "actual, message",
    [
        ({"w": torch.ones(2)}, "structure"),
        ([torch.ones(3)], "structure"),
        ({"v": torch.ones(3)}, "got shape"),
        ({"v": torch.ones(2, dtype=torch.float32)}, "got dtype torch.float32, expected torch.float64"),
    ],
)
def test_structure_shape_and_dtype_differ(actual, message):
    if "structure" in message and isinstance(actual, dict):
        expected = {"v": torch.ones(2)}
    else:
        expected = {"v": torch.ones(2, dtype=torch.float64)}
    with pytest.raises(Mismatch, match=message):
        assert_trees_close(actual, expected)


def test_the_scale_of_the_leaf_decides():
    expected = {"a": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    assert_trees_close({"a": torch.tensor([1.0, 5e-10], dtype=torch.float64)}, expected)
    with pytest.raises(Mismatch):
        assert_trees_close({"a": torch.tensor([1.0, 2e-9], dtype=torch.float64)}, expected)


def test_a_leaf_of_zeros_is_held_to_the_tree():
    zeros = torch.zeros(3, dtype=torch.float64)
    expected = {"a": torch.ones(3, dtype=torch.float64), "b": zeros}
    assert_trees_close({**expected, "b": zeros + 9e-12}, expected)
    with pytest.raises(Mismatch, match=r"tree\['b'\], sample 0"):
        assert_trees_close({**expected, "b": zeros + 2e-11}, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_agrees_with_itself_alone(bad):
    same = torch.tensor([1.0, bad])
    assert_trees_close(same, same.clone())
    for other in (torch.tensor([1.0, 1.0]), torch.tensor([1.0, -bad if bad == bad else 0.0])):
        for pair in ((same, other), (other, same)):
            with pytest.raises(Mismatch, match="sample 1"):
                assert_trees_close(*pair, atol=1e30)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128])
def test_default_tolerance_is_wider_than_the_rounding_and_narrower_than_a_mistake(dtype):
    rtol = testing.default_rtol(dtype)
    assert torch.finfo(dtype).eps < rtol < 0.1


def test_integers_must_be_equal():
    assert testing.default_rtol(torch.int64) == 0
    with pytest.raises(Mismatch):
        assert_trees_close(torch.tensor([10**6]), torch.tensor([10**6 + 1]))


# --- check --------------------------------------------------------------------------------------------------


@pytest.fixture
def args(device):
    return linear_args(device)


def test_check_passes_and_reports(args):
    checked = psg.check(loss)(*args)
    assert checked.samples == N and checked.leaves == 2
    assert 0 <= checked.error < testing.default_rtol(args[1].dtype)


@pytest.mark.parametrize("options", [{"method": "vmap"}, {"chunk_size": 2}, {"argnums": (0,)}], ids=str)
def test_check_takes_psg_s_options(options, args):
    assert psg.check(loss, **options)(*args).samples == N


def test_check_with_aux_and_keywords(args):
    assert psg.check(lambda p, x, *, k: (k * loss(p, x), x), has_aux=True)(*args, k=2.0).leaves == 2


def test_check_of_no_samples(args):
    params, x = args
    assert psg.check(loss)(params, x[:0]).samples == 0


@pytest.mark.parametrize("by_name", [False, True])
def test_check_of_a_batch_that_it_cannot_cut(by_name, device):
    """Labels alone have a dimension of samples: a batch of one label meets the nodes of all graphs."""

    def fn(w, x, graph, y):
        return F.cross_entropy(x.new_zeros(2, 3).index_add(0, graph, x @ w), y, reduction="none")

    def by_labels(w, x, graph, y):
        return F.cross_entropy(x.new_zeros(2, 3).index_add(0, graph, x @ w)[: len(y)], y, reduction="none")

    w, x = torch.randn(4, 3, device=device), torch.randn(5, 4, device=device)
    graph, y = torch.tensor([0, 0, 0, 1, 1], device=device), torch.tensor([0, 2], device=device)

    def check(fn):
        if by_name:
            return psg.check(lambda w, y, x, graph: fn(w, x, graph, y), method="batch")(w, y, x=x, graph=graph)
        return psg.check(fn, method="batch", in_dims=(None, None, None, 0))(w, x, graph, y)

    with pytest.raises(psg.InputError, match="cannot run on batches of one, ValueError: .* It gets x, graph whole") as caught:
        check(fn)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(Mismatch, match=r"^values, sample 1: .*\n.* the samples interact; or x, graph, .* hold their data") as caught:
        check(by_labels)
    assert caught.value.path == "values" and caught.value.sample == 1


def test_check_of_a_batch_says_that_samples_interact(monkeypatch, device):
    monkeypatch.setattr(_exchange, "refuse_meeting", lambda *args: None)
    w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    with pytest.raises(Mismatch, match=r"^values, .*\n.* so the samples interact\.$"):
        psg.check(lambda w, x: F.linear(x - x.mean(0), w).square().sum(1), method="batch")(w, x)


@pytest.fixture
def wrong_rule(monkeypatch):
    """psg with a rule that doubles the bias's gradient of the second sample."""
    from psg.factors import Dense
    from psg.rules import _registry

    monkeypatch.setattr(_registry, "_rules", dict(_registry._rules))
    right = _registry._rules[F.linear].run

    def wrong(input, weight, bias=None):
        output, builders = right(input, weight, bias)
        scale = torch.tensor([1.0, 2.0, 1.0], device=input.device)[:, None]
        return output, {**builders, "bias": lambda cotangent: Dense(scale * builders["bias"](cotangent).materialize())}

    psg.rule(F.linear)(wrong)


def test_check_compares_with_differences_of_a_function_that_takes_derivatives(device, monkeypatch):
    def fn(w, x):
        (slope,) = torch.autograd.grad((w * x).sin().sum(), w, create_graph=True)
        return slope.square().sum()

    def wrong(*args, **kwargs):
        def tripled(*args):
            values, grads = right(*args)
            return values, 3 * grads

        right = per_sample_value_and_grad(*args, **kwargs)
        return tripled

    per_sample_value_and_grad = psg.transforms.per_sample_value_and_grad
    monkeypatch.setattr(psg.transforms, "per_sample_value_and_grad", wrong)
    with pytest.raises(Mismatch, match="(?s)Central differences along the disagreement .*the loop is nearer"):
        psg.check(fn)(torch.randn(3, device=device), torch.randn(4, 3, device=device))


def test_check_names_what_differs_and_who_is_right(wrong_rule, args):
    with pytest.raises(Mismatch) as caught:
        psg.check(loss)(*args)
    assert caught.value.path == "grads['b']" and caught.value.sample == 1
    assert str(caught.value).startswith("grads['b'], sample 1")
    assert "Central differences along the disagreement" in str(caught.value)
    assert str(caught.value).endswith("the loop is nearer.")


def _in_mixed_dtypes(device):
    """fn, its parameters and its data, where values are computed in other dtypes than that of the loss or of a leaf."""
    w, x = torch.randn(50, 40, device=device, dtype=torch.float32), torch.randn(5, 30, 40, device=device, dtype=torch.float32)
    temperature = torch.tensor(2.0, device=device, dtype=torch.float64)
    half = torch.randn(40, device=device, dtype=torch.float16)
    return {
        "a loss in float64": (lambda w, x: sum(F.linear(x, w[k : k + 20]).double().sin().sum() for k in range(0, 50, 10)), w, x),
        "a temperature in float64": (lambda p, x: (F.linear(x, p["w"]).sin() * p["t"]).sum(), {"w": w, "t": temperature}, x),
        "layers in float16": (lambda p, x: (F.linear(x, p["w"]).half() * p["h"].sum()).double().sum(), {"w": w / 9, "h": half}, x),
        "a parameter in float32": (lambda w, x: F.linear(x.double(), w.double()).sin().sum(), w, x),
    }


@pytest.mark.parametrize("name", _in_mixed_dtypes("cpu"))
@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_check_in_mixed_dtypes(name, method, device):
    fn, params, x = _in_mixed_dtypes(device)[name]
    assert psg.check(fn, method=method)(params, x).samples == 5


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: F.linear(x.flatten().double(), w).sin().sum(),  # the data are in float16
        lambda w, x: (F.linear(x.double(), w) * (x.sum() > 0).float()).sum(),  # the mask is in float32
        lambda w, x: (F.linear(x.double(), w).sum() + w.detach().float().sum()).square(),
    ],
)
def test_check_is_no_less_strict_where_no_parameter_s_value_is_rounded(fn, monkeypatch, device):
    as_large(monkeypatch)
    w, x = torch.randn(4, 3, device=device, dtype=torch.float64), torch.rand(5, 3, device=device, dtype=torch.float16)
    psg.check(fn)(w, x)
    right = psg.factors.Outer.materialize
    monkeypatch.setattr(psg.factors.Outer, "materialize", lambda self: (1 + 1e-7) * right(self))
    with pytest.raises(Mismatch, match="grads"):
        psg.check(fn)(w, x)


def test_check_of_values_says_nothing_of_gradients(monkeypatch, args):
    right = psg._call.Call.apart
    monkeypatch.setattr(psg._call.Call, "apart", lambda self, outputs, *history: right(self, [own + 1 for own in outputs], *history))
    with pytest.raises(Mismatch, match="^values, sample [0-9]") as caught:
        psg.check(lambda p, x: loss(p, x).float())(*args)
    assert "Central differences" not in str(caught.value)


def test_check_settles_for_functions_that_return_numbers_where_nothing_is_differentiated(monkeypatch, device):
    right = psg.factors.Outer.materialize
    monkeypatch.setattr(psg.factors.Outer, "materialize", lambda self: 2 * right(self))

    def fn(w, x):
        value = F.linear(x, w).square().sum()
        return value if value.requires_grad else value.item()

    with pytest.raises(Mismatch, match="the loop is nearer"):
        psg.check(fn, method="capture")(torch.randn(2, 3, device=device), torch.randn(4, 5, 3, device=device))


def test_check_tells_random_functions_from_wrong_gradients(args):
    def noisy(p, x):
        return F.dropout(loss(p, x) * torch.ones(8, device=x.device), 0.5).sum()

    with pytest.raises(psg.InputError, match=r"random numbers or changes state.*eval"):
        psg.check(noisy)(*args)


def test_check_tells_functions_that_change_late_from_wrong_reductions(device):
    """Gradients agree, and then the norm does not, because fn has changed since."""
    calls = []

    def fn(w, x):
        calls.append(x)
        return (w * x).sum() * (1 if len(calls) <= steady else 2)

    w, x, steady = torch.randn(3, device=device), torch.randn(4, 3, device=device), math.inf
    psg.per_sample_value_and_grad(fn)(w, x)
    loop_value_and_grad(fn)(w, x)
    steady = len(calls)
    calls.clear()
    with pytest.raises(psg.InputError, match="gives another value or gradient for the same sample when it is called again"):
        psg.check(fn)(w, x)


def test_check_names_a_tensor_that_fn_keeps(device):
    kept = []

    def fn(w, x):
        kept[:] = kept or [2 * x]
        return (w * kept[0]).sum()

    with pytest.raises(psg.StateError, match="check: fn uses a tensor that it has kept from an earlier call"):
        psg.check(fn)(torch.randn(3, device=device), torch.randn(4, 3, device=device))


def test_check_holds_the_reductions_too(monkeypatch, args):
    right = psg.factors.Outer.squared_norm
    monkeypatch.setattr(psg.factors.Outer, "norm", lambda self: 2 * right(self).sqrt())
    with pytest.raises(Mismatch, match="^norm"):
        psg.check(loss)(*args)


@given(big=st.integers(0, 8), entries=st.sampled_from([0, 1, 8191, 8192, 8193, 1 << 20]), n=st.integers(0, 3), seed=st.integers(0, 99))
def test_references_add_up_many_numbers_in_float32(big, entries, n, seed, device):
    """Where a few are large, torch's sum of the squares of a million others is off by up to 1e-3."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.full((n, big), 50.0), 0.01 * torch.randn(n, entries, generator=generator)]
    grads = [leaf.to(device, torch.float32) for leaf in grads]
    exact = [leaf.double() for leaf in grads]
    for reference in (reference_norm, reference_gram):
        assert_trees_close(reference(grads).double(), reference(exact), rtol=1e-5)


def test_check_of_a_large_layer_in_float32(device):
    """The norms and products that psg's are held to were off by more than the tolerance."""
    params = {"scale": torch.ones(8, device=device, dtype=torch.float32), "w": torch.eye(1000, device=device, dtype=torch.float32)}
    x = torch.linspace(0.5, 1, 2000, device=device, dtype=torch.float32).reshape(2, 1000)
    x[:, 8:] *= 0.01
    psg.check(lambda params, x: 50 * (params["scale"] * x[:8]).sum() + (params["w"] @ x).tanh().sum())(params, x)


# --- strategies ---------------------------------------------------------------------------------------------


@given(data=st.data())
def test_shapes(data):
    shape = data.draw(testing.shapes(min_dims=1, max_dims=2, max_side=3))
    assert 1 <= len(shape) <= 2 and all(1 <= side <= 3 for side in shape)


@pytest.mark.parametrize("tolerance", [{"rtol": -1}, {"rtol": float("nan")}, {"atol": -1e-9}, {"rtol": "a"}, {"atol": None}])
def test_check_wants_tolerances(tolerance):
    with pytest.raises(psg.InputError, match=r"psg\.check\([ra]tol=.*\): expected a number that is at least 0"):
        psg.check(loss, **tolerance)
    with pytest.raises(psg.InputError, match=r"psg\.testing\.assert_trees_close\([ra]tol=.*\): expected a number that is at least 0"):
        assert_trees_close(torch.ones(2), torch.ones(2), **tolerance)


def test_check_wants_to_know_whether_there_is_aux():
    with pytest.raises(psg.InputError, match=r"has_aux=1: expected True or False"):
        psg.check(lambda w, x: (loss(w, x), x), has_aux=1)


def test_check_takes_integers_of_numpy(args):
    numpy = pytest.importorskip("numpy")
    psg.check(loss, numpy.int64(0), in_dims=(None, numpy.int64(0)), chunk_size=numpy.int32(2))(*args)


@pytest.mark.parametrize("field", [4, [(1, 8, 8)], "x", ((2, "a"), 5), (2, -1), ((2,), "x"), ((2,), 0)])
def test_batches_wants_shapes(field):
    with pytest.raises(psg.InputError, match=r"psg\.testing\.batches\(.*expected for each argument the shape of one sample"):
        testing.batches(field)


@given(batch=testing.batches((3, 4), (), ((2,), 5), max_samples=3, dtype=torch.float32))
def test_batches_share_one_n(batch):
    x, y, ids = batch
    n = len(x)
    assert 0 <= n <= 3
    assert (x.shape, y.shape, ids.shape) == ((n, 3, 4), (n,), (n, 2))
    assert x.dtype == y.dtype == torch.float32 and ids.dtype == torch.int64
    assert ((0 <= ids) & (ids < 5)).all()


@pytest.mark.parametrize("n", [0, 1, 3])
def test_batches_reach_the_empty_batch_and_the_full_one(n):
    (x,) = find(testing.batches((2,), max_samples=3), lambda batch: len(batch[0]) == n, settings=settings(database=None, max_examples=300))
    assert x.shape == (n, 2)


@given(tensor=testing.tensors((2, 3, 4)), data=st.data())
def test_layouts_keep_the_values(tensor, data):
    assert torch.equal(data.draw(testing.layouts(tensor)), tensor)


def test_layouts_reach_memory_that_is_not_contiguous():
    tensor = torch.randn(2, 3, 4)
    found = find(testing.layouts(tensor), lambda layout: not layout.is_contiguous(), settings=settings(database=None, max_examples=300))
    assert torch.equal(found, tensor)


def test_tensors_are_drawn_from_their_seed():
    for options in ({}, {"dtype": torch.float16}, {"high": 3}):
        one = find(testing.tensors((50,), **options), lambda tensor: True, settings=settings(database=None, max_examples=300))
        assert one.unique().numel() > 1


@pytest.mark.parametrize(
    "dtype, got, want, atol, passes",
    [
        (torch.int64, -(2**63), 0, 0, False),
        (torch.int64, 2**62 + 1, 2**62, 0, False),
        (torch.int8, -128, 0, 0, False),
        (torch.int8, 127, -128, 2, False),
        (torch.uint8, 1, 2, 1, True),
        (torch.bool, True, True, 0, True),
        (torch.bool, True, False, 0, False),
    ],
)
def test_integers_and_booleans_do_not_wrap(dtype, got, want, atol, passes):
    with contextlib.nullcontext() if passes else pytest.raises(Mismatch):
        assert_trees_close(torch.tensor([got], dtype=dtype), torch.tensor([want], dtype=dtype), atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_check_of_models_in_sixteen_bits(dtype, device):
    model = nn.Sequential(nn.Embedding(20, 6), nn.Conv1d(5, 4, 3), nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)).to(
        device, dtype
    )
    loss, params = psg.stateless(model, nn.functional.cross_entropy)
    psg.check(loss)(params, torch.randint(20, (6, 5), device=device), torch.randint(3, (6,), device=device))


def test_check_of_a_sample_that_is_infinite(device):
    w, x = torch.randn(4, 3, device=device), torch.randn(5, 2, 3, device=device)
    x[2, 0, 1] = torch.inf
    psg.check(lambda w, x: (x @ w.T).square().sum())(w, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_check_under_autocast(dtype):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 16, 4)).float()
    loss, params = psg.stateless(model, F.cross_entropy)
    x, y = torch.randn(5, 3, 6, 6, dtype=torch.float32), torch.randint(4, (5,))
    with torch.autocast("cpu", dtype):
        assert psg.check(loss)(params, x, y).samples == 5
        with pytest.raises(psg.testing.Mismatch):
            psg.check(loss, rtol=1e-7)(params, x, y)


def test_a_norm_that_is_finite_where_the_gradient_is_not():
    grads = torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])
    with pytest.raises(Mismatch, match="norm: finite for a sample whose gradient is not") as error:
        assert_reductions_close(torch.ones(2, 2), grads)
    assert error.value.sample == 1


def test_leaves_that_are_no_tensors_are_equal():
    assert_trees_close({"name": "w"}, {"name": "w"})
    with pytest.raises(Mismatch, match=r"tree\['name'\]: got 'v', expected 'w'"):
        assert_trees_close({"name": "v"}, {"name": "w"})
