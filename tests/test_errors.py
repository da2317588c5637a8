"""Every row of the edge-case table, with the text of the message: which argument, what arrived, what was expected, the way out."""

import functools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from cases import N, score
from torch import nn
from torch.func import functional_call

import psg
from psg.testing import assert_trees_close, loop_grad, reference_norm
from psg.testing._loop import tree_map

TRANSFORMS = {
    "per_sample_grad": psg.per_sample_grad,
    "per_sample_value_and_grad": psg.per_sample_value_and_grad,
    "per_sample_norm": psg.per_sample_norm,
    "factored_grad": psg.factored_grad,
    "clipped_grad": lambda fn, *args, **options: psg.clipped_grad(fn, 1.0, *args, **options),
}
each_transform = pytest.mark.parametrize("name", TRANSFORMS)
METHODS = ["auto", "capture", "vmap", "loop"]


def loss(p, x, y=0.0):
    return score(F.linear(x, p["w"], p["b"])) + y


@pytest.fixture
def params(device):
    return {"w": torch.randn(4, 3, device=device), "b": torch.randn(4, device=device)}


@pytest.fixture
def x(device):
    return torch.randn(N, 3, device=device)


# --- n = 0 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_empty_batch(method, params, x):
    calls = []

    def counted(p, x):
        calls.append(1)
        return loss(p, x)

    x = x[:0]
    values, grads = psg.per_sample_value_and_grad(counted, method=method)(params, x)
    assert values.shape == (0,) and values.dtype == x.dtype
    assert_trees_close(grads, {"w": x.new_zeros(0, 4, 3), "b": x.new_zeros(0, 4)})
    assert psg.per_sample_norm(counted, method=method)(params, x).shape == (0,)
    factored = psg.factored_grad(counted, method=method)(params, x)
    assert_trees_close(psg.tree.materialize(factored), grads)
    assert_trees_close(psg.tree.sum(factored), tree_map(torch.zeros_like, params), per_sample=False)
    assert psg.tree.gram(factored).shape == (0, 0)
    assert_trees_close(psg.clipped_grad(counted, 1.0, method=method)(params, x).grads, tree_map(torch.zeros_like, params), per_sample=False)
    assert not calls


def test_empty_batch_with_aux_has_the_structure_of_aux(params, x):
    def with_aux(p, x):
        return loss(p, x), {"x": x, "pair": (x.sum(), 2)}

    grads, aux = psg.per_sample_grad(with_aux, has_aux=True)(params, x[:0])
    assert grads["w"].shape == (0, 4, 3)
    assert aux["x"].shape == (0, 3) and aux["pair"][0].shape == (0,) and aux["pair"][1] == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [0, N])
def test_losses_have_the_dtype_of_fn(n, method, device):
    def in_float64(w, x):
        return (w * x).sum().double(), x

    w = torch.ones(3, dtype=torch.bfloat16, device=device)
    x = torch.ones(n, 3, dtype=torch.bfloat16, device=device)
    (values, _), grads = psg.per_sample_value_and_grad(in_float64, has_aux=True, method=method)(w, x)
    assert values.dtype == torch.float64 and grads.dtype == w.dtype
    assert psg.clipped_grad(in_float64, 1.0, has_aux=True, method=method)(w, x).values.dtype == torch.float64


@pytest.mark.parametrize("n", [0, N])
def test_empty_batch_with_aux_inside_of_transforms(n, params, x):
    def with_aux(p, x):
        return loss(p, x), (p["w"] @ x,)

    def results(p):
        out = psg.clipped_grad(with_aux, 1.0, has_aux=True)(p, x[:n])
        return out.grads["w"], out.aux[0]

    assert [part.shape for part in torch.func.jvp(results, (params,), (params,))[1]] == [(4, 3), (n, 4)]
    assert [part["w"].shape for part in torch.func.jacrev(results)(params)] == [(4, 3, 4, 3), (n, 4, 4, 3)]
    many = tree_map(lambda leaf: torch.stack([leaf, leaf]), params)
    assert [part.shape for part in torch.func.vmap(results)(many)] == [(2, 4, 3), (2, n, 4)]


def test_empty_batch_with_aux_leaves_shared_tensors_alone(params, x):
    def counting(p, x, count):
        return loss(p, x), count.add_(1)

    count = torch.zeros(2)
    psg.per_sample_grad(counting, has_aux=True, in_dims=(None, 0, None))(params, x[:0], count)
    assert torch.equal(count, torch.zeros(2))


@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_python_values_in_aux_that_differ(method, chunk_size, params, x):
    def with_aux(p, x, label):
        return loss(p, x), {"label": int(label), "same": 7}

    call = psg.per_sample_grad(with_aux, has_aux=True, method=method, chunk_size=chunk_size)
    with pytest.raises(psg.InputError, match=r"aux holds a Python value that is not the same for all samples, 0 and 1: return a tensor"):
        call(params, x, torch.arange(len(x)))
    assert call(params, x, torch.ones(len(x)))[1] == {"label": 1, "same": 7}


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_empty_batch_in_chunks(chunk_size, params, x):
    assert psg.per_sample_norm(loss, chunk_size=chunk_size)(params, x[:0]).shape == (0,)


# --- unused, frozen, buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_unused_parameter_has_zeros(method, params, x):
    params["unused"] = torch.randn(2, 5, device=x.device)
    grads = psg.per_sample_grad(loss, method=method)(params, x)
    assert grads["unused"].shape == (N, 2, 5) and not grads["unused"].any()
    assert not psg.clipped_grad(loss, 1.0, method=method)(params, x).grads["unused"].any()


def test_frozen_parameters_and_buffers_have_no_gradient(device):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device).eval()
    module[0].weight.requires_grad_(False)
    fn, params = psg.stateless(module, F.cross_entropy)
    assert set(params) == {"0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}
    x, y = torch.randn(N, 3, device=device), torch.randint(2, (N,), device=device)
    assert_trees_close(psg.per_sample_grad(fn)(params, x, y), loop_grad(fn)(params, x, y))


def test_a_frozen_weight_costs_no_factor(device):
    # In a layer with a frozen weight, the bias has a Dense factor: nothing is held for the weight.
    frozen = torch.randn(4, 3, device=device)
    factors = psg.factored_grad(lambda b, x: score(F.linear(x, frozen, b)))(
        torch.randn(4, device=device), torch.randn(N, 5, 3, device=device)
    )
    assert isinstance(factors, psg.factors.Dense)


# --- fn does not return a scalar ------------------------------------------------------------------------------


@each_transform
@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda p, x: F.linear(x, p["w"]), r"expected fn to return a scalar for one sample, got a tensor of shape \(4,\).*\.sum\(\)"),
        (lambda p, x: loss(p, x)[None], r"got a tensor of shape \(1,\)"),
        (lambda p, x: (loss(p, x), x), r"expected fn to return a scalar tensor for one sample, got tuple of length 2.*has_aux=True"),
        (lambda p, x: {"loss": loss(p, x)}, r"got dict"),
        (lambda p, x: None, r"got NoneType"),
        (lambda p, x: 1.0, r"got float\..* leave out \.item\(\)"),
        (
            lambda p, x: loss(p, x).to(torch.complex128),
            r"real floating-point scalar, got dtype torch\.complex128\. Take its \.real; .*\.imag",
        ),
        (lambda p, x: loss(p, x).long(), r"real floating-point scalar, got dtype torch\.int64"),
    ],
    ids=["vector", "[1]", "tuple", "dict", "None", "float", "complex", "integer"],
)
def test_fn_that_returns_no_scalar(name, fn, message, params, x):
    with pytest.raises(psg.InputError, match=rf"^{name}.*: .*{message}"):
        TRANSFORMS[name](fn)(params, x)


@each_transform
@pytest.mark.parametrize("value", [lambda v: v, lambda v: (v, v, v), lambda v: [v, v]], ids=["scalar", "triple", "list"])
def test_has_aux_wants_a_pair(name, value, params, x):
    with pytest.raises(psg.InputError, match=rf"^{name}.*has_aux=True: expected fn to return \(loss, aux\), got"):
        TRANSFORMS[name](lambda p, x: value(loss(p, x)), has_aux=True)(params, x)


def test_a_wrong_output_is_said_at_once(params, x):
    # No lower rung could help, so the function does not run again.
    calls = []

    def vector(p, x):
        calls.append(1)
        return F.linear(x, p["w"])

    with pytest.raises(psg.InputError):
        psg.per_sample_grad(vector)(params, x)
    assert len(calls) == 1


# --- arguments that do not fit --------------------------------------------------------------------------------


@each_transform
def test_batch_sizes_that_disagree(name, params, x, device):
    y = torch.zeros(N + 1, device=device)
    with pytest.raises(psg.InputError, match=rf"^{name}.*disagree on the number of samples: x has {N}, y has {N + 1}.*in_dims"):
        TRANSFORMS[name](loss)(params, x, y)


def test_batch_sizes_that_disagree_inside_a_tree(params, x, device):
    batch = {"x": x, "more": [torch.zeros(N + 2, device=device)]}
    with pytest.raises(psg.InputError, match=rf"batch\['more'\]\[0\] has {N + 2}.*batch\['x'\] has {N}"):
        psg.per_sample_grad(lambda p, batch: loss(p, batch["x"]))(params, batch)


def test_a_row_that_all_samples_share_in_a_mapping(params, x, device):
    batch = {"x": x, "positions": torch.arange(3, device=device)[None]}
    with pytest.raises(psg.InputError, match=r"batch\['positions'\] has 1, .*or pass it by keyword, outside of a mapping"):
        psg.per_sample_grad(lambda p, batch: loss(p, batch["x"]))(params, batch)


def test_inputs_that_are_differentiated_are_shared_by_default(params, x, device):
    hint = "argnums arguments are shared and all others batched.*argnums=1, in_dims="
    classify = lambda p, x, y: F.cross_entropy(F.linear(x, p["w"]), y)  # noqa: E731
    y = torch.zeros(N, dtype=torch.int64, device=device)
    with pytest.raises(psg.InputError, match=f"disagree on the number of samples: .*{hint}"):
        psg.per_sample_grad(classify, argnums=1)(params, x, y)
    with pytest.raises(psg.InputError, match=f"no argument has a dimension for the samples.*{hint}"):
        psg.per_sample_grad(loss, argnums=(0, 1))(params, x)
    with pytest.raises(ValueError) as caught:  # torch's
        psg.per_sample_grad(classify, argnums=(0, 1))(params, x, y)
    assert re.search(hint, caught.value.__notes__[0])
    with pytest.raises(psg.InputError, match="disagree on the number of samples") as caught:
        psg.per_sample_grad(loss)(params, x, x[1:])
    assert "argnums" not in str(caught.value)


@each_transform
def test_nothing_is_batched(name, params):
    with pytest.raises(psg.InputError, match=rf"^{name}.*no argument has a dimension for the samples.*in_dims"):
        TRANSFORMS[name](lambda p: p["w"].sum())(params)


@each_transform
def test_a_scalar_where_a_batch_is_expected(name, params, x, device):
    with pytest.raises(psg.InputError, match=rf"^{name}.*: y has shape \(\).*in_dims.*None.*keyword"):
        TRANSFORMS[name](loss)(params, x, torch.tensor(1.0, device=device))


@each_transform
def test_a_parameter_that_is_no_tensor(name, params, x):
    params["scale"] = 2.0
    with pytest.raises(psg.InputError, match=rf"^{name}.*: p\['scale'\] is a float; expected a tensor.*differentiated"):
        TRANSFORMS[name](loss)(params, x)


@each_transform
@pytest.mark.parametrize("held", [torch.nn.Linear(3, 4), torch.nn.ParameterDict({"scale": torch.ones(())})])
def test_a_module_in_the_place_of_parameters(name, held, x):
    with pytest.raises(psg.InputError, match=rf"^{name}.*: p is a {type(held).__name__};.*psg\.stateless.*dict\(p\)"):
        TRANSFORMS[name](loss)(held, x)


@each_transform
def test_an_integer_parameter(name, params, x, device):
    params["steps"] = torch.tensor(3, device=device)
    message = rf"^{name}.*: p\['steps'\] has dtype torch\.int64; expected a floating or complex tensor.*another argument"
    with pytest.raises(psg.InputError, match=message):
        TRANSFORMS[name](loss)(params, x)


@each_transform
def test_a_parameter_of_8_bits(name, params, x):
    """torch stores float8 and does not compute with it: the error came from a kernel, and inner products were rounded to 8 bits."""
    params["w"] = params["w"].to(torch.float8_e4m3fn)
    message = rf"^{name}.*: p\['w'\] has dtype torch\.float8_e4m3fn; expected .* at least 16 bits.*a wider dtype"
    with pytest.raises(psg.InputError, match=message):
        TRANSFORMS[name](lambda p, x: score(F.linear(x, p["w"].to(x.dtype))))(params, x)


@each_transform
def test_a_parameter_on_the_meta_device(name, params, x):
    """torch's linear layers without a bias read uninitialised memory for it."""
    params["w"] = params["w"].to("meta")
    transformed = TRANSFORMS[name](lambda p, x: score(F.linear(x, p["w"])))
    with pytest.raises(psg.InputError, match=rf"^{name}.*: p\['w'\] is on the meta device, where tensors have no values.*to_empty"):
        transformed(params, x)
    transformed({"w": params["w"]}, x.to("meta"))  # shapes alone


def test_a_parameter_tree_without_leaves(x):
    with pytest.raises(psg.InputError, match="has no leaves"):
        psg.per_sample_grad(lambda p, x: x.sum())({}, x)


@pytest.mark.parametrize("batch, kind", [([[1.0, 2.0, 3.0]] * N, None), ("numpy", "ndarray")])
def test_a_batch_leaf_that_is_no_tensor(batch, kind, params):
    numpy = pytest.importorskip("numpy")
    batch = numpy.zeros((N, 3)) if batch == "numpy" else batch
    # A nested list of numbers is a tree of numbers, none of which has a batch dimension.
    message = rf"x is a {kind}.*torch\.as_tensor" if kind else "no argument has a dimension for the samples"
    with pytest.raises(psg.InputError, match=message):
        psg.per_sample_grad(loss)(params, batch)


def test_an_array_inside_a_dataclass_of_the_batch(params, x):
    import dataclasses

    numpy = pytest.importorskip("numpy")

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        y: object

    with pytest.raises(psg.InputError, match=r"batch.y is a ndarray.*torch\.as_tensor"):
        psg.per_sample_grad(lambda p, batch: loss(p, batch.x))(params, Batch(x, numpy.zeros(N)))


# --- options that do not exist --------------------------------------------------------------------------------


@each_transform
@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "fast"}, r"method='fast'.*'auto', 'capture', 'vmap', 'loop'"),
        ({"randomness": "some"}, r"randomness='some'.*'different', 'same', 'error'"),
        ({"chunk_size": 0}, r"chunk_size=0.*at least 1"),
        ({"chunk_size": -2}, r"chunk_size=-2.*at least 1"),
        ({"chunk_size": 2.0}, r"chunk_size=2\.0.*integer"),
        ({"argnums": "p"}, r"argnums='p'.*integer"),
        ({"has_aux": "no"}, r"has_aux='no'.*True or False"),
        ({"argnums": ()}, r"argnums=\(\).*non-empty"),
        ({"argnums": True}, r"argnums=True.*integer"),
    ],
)
def test_options(name, options, message):
    # Raised when the transform is made, before there is a batch.
    with pytest.raises(psg.InputError, match=message):
        TRANSFORMS[name](loss, **options)


@each_transform
@pytest.mark.parametrize(
    "options, message",
    [
        ({"argnums": 2}, r"argnums=2.*argument 2, but the call has 2"),
        ({"argnums": (0, -3)}, r"argnums=\(0, -3\).*argument -3"),
        ({"argnums": (0, 0)}, r"argnums=\(0, 0\) names an argument twice"),
        ({"argnums": (0, -2)}, r"names an argument twice"),
        ({"in_dims": (None,)}, r"in_dims=\(None,\).*2 positional arguments"),
        ({"in_dims": "0"}, r"in_dims='0'.*tuple"),
        ({"in_dims": (None, "0")}, r"in_dims for x is '0'.*integer or None"),
        ({"in_dims": (None, 5)}, rf"x has shape \({N}, 3\); expected a dimension 5"),
        ({"in_dims": (None, {"a": 0})}, r"in_dims for x.*prefix"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_the_call(name, options, message, params, x):
    with pytest.raises(psg.InputError, match=rf"^{name}.*{message}"):
        TRANSFORMS[name](loss, **options)(params, x)


def test_integers_of_numpy_and_of_tensors(params, x, device):
    numpy = pytest.importorskip("numpy")
    for one in (numpy.int64(1), numpy.array(1, dtype=numpy.uint8), torch.tensor(1)):
        expected = psg.factored_grad(loss)(params, x)
        found = psg.factored_grad(loss, one - one, in_dims=(None, one - one), chunk_size=one)(params, x)
        assert_trees_close(psg.tree.materialize(found), psg.tree.materialize(expected))
        inputs = psg.per_sample_grad(loss, (one,), in_dims=(None, 0))(params, x)
        assert inputs[0].shape == x.shape
        assert torch.equal(psg.tree.project(expected, 8 * one, seed=3 * one), psg.tree.project(expected, 8, seed=3))
        assert psg.tree.norm(psg.tree.segment_sum(expected, torch.zeros(N, dtype=torch.int64, device=device), 2 * one)).shape == (2,)
        assert psg.jit(psg.per_sample_norm(loss), backend="eager", buckets=4 * one)(params, x).shape == (N,)
        with psg.plans.using(keep_bytes=one):
            psg.clipped_grad(loss, 1.0, in_dims=one - one)(tree_map(lambda p: p[None].expand(N, *p.shape), params), x)
        recurrent, own = psg.stateless(torch.nn.RNN(3, 4, device=device), lambda output: output[0].sum(), batch_dim=one)
        assert psg.per_sample_norm(recurrent)(own, x[:, None]).shape == (N,)


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(2.0), torch.tensor([2, 3]), "2"])
def test_what_is_no_integer(value, params, x):
    with pytest.raises(psg.InputError, match="dim=.*: expected an integer"):
        psg.tree.project(psg.per_sample_grad(loss)(params, x), value)


# --- state, samples that mix ----------------------------------------------------------------------------------


def batch_norm_net(device):
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)).to(device)


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_in_training_mode_names_the_module(method, device):
    fn, params = psg.stateless(batch_norm_net(device), F.cross_entropy)
    batch = torch.randn(N, 2, 5, 5, device=device), torch.zeros(N, dtype=torch.int64, device=device)
    with pytest.raises(psg.StateError, match=r"\b1 \(BatchNorm2d\) is in training mode.*eval.*GroupNorm"):
        psg.per_sample_grad(fn, method=method)(params, *batch)


def test_batch_norm_in_training_mode_without_stateless(device):
    module = batch_norm_net(device)
    mean = module[1].running_mean.clone()
    params = {name: p.detach() for name, p in module.named_parameters()}
    with pytest.raises(psg.StateError, match=r"[Bb]atch.?[Nn]orm.*eval"):
        psg.per_sample_grad(lambda p, x: functional_call(module, p, (x[None],)).sum())(params, torch.randn(N, 2, 5, 5, device=device))
    assert torch.equal(module[1].running_mean, mean)


def test_batch_norm_without_running_statistics_mixes_samples_in_every_mode(device):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).to(device).eval()
    fn, params = psg.stateless(module, F.cross_entropy)
    with pytest.raises(psg.StateError, match=r"1 \(BatchNorm1d\) .*keeps no running statistics"):
        psg.per_sample_grad(fn)(params, torch.randn(N, 3, device=device), torch.zeros(N, dtype=torch.int64, device=device))


def test_batch_norm_in_evaluation_mode_works(device):
    fn, params = psg.stateless(batch_norm_net(device).eval(), F.cross_entropy)
    batch = torch.randn(N, 2, 5, 5, device=device), torch.zeros(N, dtype=torch.int64, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(params, *batch), loop_grad(fn)(params, *batch))


class Counter(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.how == "in place":
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1
        return self.linear(x)


@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_a_module_that_changes_a_buffer_is_named(how, device):
    fn, params = psg.stateless(Counter(how).to(device), F.cross_entropy)
    with pytest.raises(psg.StateError, match=r"Counter\) changes its buffer 'calls'.*eval mode"):
        psg.per_sample_grad(fn)(params, torch.randn(N, 3, device=device), torch.zeros(N, dtype=torch.int64, device=device))


# --- live parameters ------------------------------------------------------------------------------------------


@each_transform
def test_live_parameters_work(name, device):
    module = nn.Linear(3, 4).to(device)
    fn = lambda p, x: score(F.linear(x, p["weight"], p["bias"]))  # noqa: E731
    x = torch.randn(N, 3, device=device)
    live, detached = dict(module.named_parameters()), {key: p.detach() for key, p in module.named_parameters()}
    found, expected = (materialized(TRANSFORMS[name](fn)(p, x)) for p in (live, detached))
    assert_trees_close(tree_map(detach, found), tree_map(detach, expected), per_sample=False)


def materialized(result):
    return psg.tree.materialize(result) if isinstance(result, dict) and isinstance(result["weight"], psg.factors.Factor) else result


def detach(leaf):
    return leaf.detach() if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf)


# --- what is not finite ---------------------------------------------------------------------------------------


def test_a_sample_that_is_not_finite_says_so_in_its_own_outputs(params, x):
    x[1, 0] = math.nan
    values, grads = psg.per_sample_value_and_grad(loss)(params, x)
    assert values.isfinite().tolist() == [True, False, True]
    assert reference_norm(grads).isfinite().tolist() == [True, False, True]
    out = psg.clipped_grad(loss, 1.0)(params, x)
    assert out.nonfinite.item() == 1 and all(leaf.isfinite().all() for leaf in out.grads.values())


# --- what torch refuses of one sample -----------------------------------------------------------------------------

# Of x [4] and of two indices into it, one of which does not exist.
WITHOUT_ENTRIES = {
    "embedding": lambda w, x, i: F.embedding(i, w[:, None]),
    "embedding of constants": lambda w, x, i: F.embedding(i, torch.ones(4, 2, device=x.device)) * w[0],
    "embedding_bag": lambda w, x, i: F.embedding_bag(i[None], w[:, None]),
    "one_hot": lambda w, x, i: w @ F.one_hot(i, 4).to(w.dtype).T,
    "gather": lambda w, x, i: (w * x).gather(0, i),
    "take": lambda w, x, i: (w * x).take(i),
    "an index": lambda w, x, i: (w * x)[i],
    "an index into a parameter": lambda w, x, i: w[i],
    "index_select": lambda w, x, i: (w * x).index_select(0, i),
    "index_add": lambda w, x, i: torch.zeros_like(x).index_add(0, i, (w * x)[:2]),
    "index_copy": lambda w, x, i: torch.zeros_like(x).index_copy(0, i, (w * x)[:2]),
    "index_fill": lambda w, x, i: (w * x).index_fill(0, i, 0.0),
    "index_put": lambda w, x, i: torch.zeros_like(x).index_put((i,), (w * x)[:2]),
    "scatter": lambda w, x, i: torch.zeros_like(x).scatter(0, i, (w * x)[:2]),
    "scatter_add": lambda w, x, i: torch.zeros_like(x).scatter_add(0, i, (w * x)[:2]),
    "put": lambda w, x, i: (w * x).put(i, x[:2]),
    "cross_entropy": lambda w, x, i: F.cross_entropy((w * x).expand(2, 4), i),
    "nll_loss": lambda w, x, i: F.nll_loss((w * x).expand(2, 4).log_softmax(1), i),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("wrong", [5, -6])
@pytest.mark.parametrize("fn", WITHOUT_ENTRIES.values(), ids=WITHOUT_ENTRIES)
def test_an_index_of_one_sample_that_is_out_of_range(fn, wrong, method, device):
    """Under vmap it may be one into another sample."""
    if device.type != "cpu":
        pytest.skip("an accelerator may end its context")
    w, x = torch.rand(4), torch.rand(3, 4)
    index = torch.tensor([[0, 3], [1, 2], [3, 0]])
    loss = lambda w, x, i: score(fn(w, x, i))  # noqa: E731
    assert_trees_close(psg.per_sample_grad(loss, method=method)(w, x, index), loop_grad(loss)(w, x, index))
    for sample in range(3):
        own = index.clone()
        own[sample, 1] = wrong
        with pytest.raises((RuntimeError, IndexError)):
            psg.per_sample_grad(loss, method=method)(w, x, own)


# --- the classes ----------------------------------------------------------------------------------------------


def test_errors_are_also_what_python_calls_them():
    assert issubclass(psg.InputError, psg.PsgError) and issubclass(psg.InputError, ValueError)
    assert issubclass(psg.StateError, psg.PsgError) and issubclass(psg.StateError, RuntimeError)
    assert issubclass(psg.FallbackWarning, UserWarning)


class Opaque:
    """Holds a batch in an attribute that no pytree shows."""

    def __init__(self, x):
        self.x = x


def test_an_argument_that_may_hold_a_batch(device):
    w, x = torch.ones(3, device=device), torch.ones(2, 3, device=device)
    fn = lambda w, x, other: (w * x).sum() * other.x.sum()  # noqa: E731
    with pytest.raises(psg.InputError, match="other is an Opaque that holds tensors"):
        psg.per_sample_grad(fn)(w, x, Opaque(x))
    shared = psg.per_sample_grad(fn, in_dims=(None, 0, None))(w, x, Opaque(x))
    assert shared.shape == (2, 3) and (shared == psg.per_sample_grad(fn)(w, x, other=Opaque(x))).all()


def test_a_keyword_tensor_with_as_many_rows_as_samples(params, x, device):
    mask = torch.ones(N, 3, device=device)
    fn = lambda p, x, mask: loss(p, x * mask.prod(0))  # noqa: E731
    with pytest.warns(UserWarning, match="keyword argument 'mask' holds a tensor with 3 rows.*by position.*functools.partial"):
        psg.per_sample_norm(fn)(params, x, mask=mask)
    psg.per_sample_norm(fn)(params, x[:2], mask=mask)
    psg.per_sample_norm(fn)(params, x, mask)
    with pytest.raises(psg.InputError, match=r"no argument has a dimension for the samples.*keyword.* fn\(params, batch\)\."):
        psg.per_sample_norm(lambda p, x: loss(p, x))(params, x=x)


def test_each_partial_is_warned_of(params, x, device):
    mask = torch.ones(N, 3, device=device)
    for fn in (lambda scale, p, x, mask: scale * loss(p, x * mask.prod(0)), lambda scale, p, x, mask: scale * loss(p, x + mask.sum(0))):
        with pytest.warns(UserWarning, match="keyword argument 'mask' holds a tensor with 3 rows"):
            psg.per_sample_norm(functools.partial(fn, 2.0))(params, x, mask=mask)


def test_a_list_of_as_many_numbers_as_samples(params, x):
    fn = lambda p, x, batch: loss(p, x) * sum(batch["scales"])  # noqa: E731
    with pytest.warns(UserWarning, match="argument 'batch' holds a list of 3 values.*pass a tensor.*functools.partial"):
        norms = psg.per_sample_norm(fn)(params, x, {"scales": [1.0, 2.0, 3.0]})
    torch.testing.assert_close(norms, 6 * psg.per_sample_norm(loss)(params, x))


@pytest.mark.filterwarnings("error")
def test_lists_that_are_shared(params, x):
    fn = lambda p, x, *scales: loss(p, x)  # noqa: E731
    psg.per_sample_norm(fn)(params, x, [1.0, 2.0], (1.0, 2.0, 3.0))
    psg.per_sample_norm(fn, in_dims=(None, 0, None))(params, x, [1.0, 2.0, 3.0])
    psg.per_sample_norm(fn)(params, x[:1], [1.0])


@pytest.mark.filterwarnings("error")
def test_functions_of_a_batch_take_rows_by_keyword_and_in_lists(params, x, device):
    fn = lambda p, x, scales, mask: (F.linear(x, p["w"]).sum(1) + p["b"].sum()) * torch.tensor(scales, device=device) * mask  # noqa: E731
    mask = torch.tensor([1.0, 0.0, 2.0], device=device)
    norms = psg.per_sample_norm(fn, method="batch")(params, x, [1.0, 2.0, 3.0], mask=mask)
    expected = psg.per_sample_norm(lambda p, x: F.linear(x, p["w"]).sum() + p["b"].sum())(params, x)
    torch.testing.assert_close(norms, expected * torch.tensor([1.0, 0.0, 6.0], device=device))


def test_a_function_that_uses_no_parameter(params, x, device):
    model = torch.nn.Linear(3, 4, device=device)
    with pytest.warns(UserWarning, match="uses none of the tensors that it is differentiated for.*functional_call"):
        grads = psg.per_sample_grad(lambda p, x: model(x).sum().detach())(params, x)
    assert not any(leaf.any() for leaf in grads.values())
    with pytest.warns(UserWarning, match=r"If fn does compute with them, .*torch\.no_grad"):
        psg.per_sample_norm(torch.no_grad()(lambda p, x: loss(p, x)))(params, x)
    assert (psg.per_sample_grad(lambda p, x: p + x.sum())(torch.ones((), device=device), x) == 1).all()


def test_a_function_that_uses_no_parameter_in_the_loop(params, x, device):
    """Assigned to `.data`, parameters lose their history, and the warning of the loop alone said that the result is right."""
    layer = torch.nn.Linear(3, 4, device=device)

    def fn(p, x):
        layer.weight.data, layer.bias.data = p["w"], p["b"]
        return layer(x).sum()

    layer.requires_grad_(False)
    with pytest.warns(UserWarning, match="uses none of the tensors that it is differentiated for"):
        grads = psg.per_sample_grad(fn, method="loop")(params, x)
    assert {name: leaf.shape for name, leaf in grads.items()} == {name: (len(x), *leaf.shape) for name, leaf in params.items()}
    assert not any(leaf.any() for leaf in grads.values())


def test_parameters_that_are_not_dense(x, device):
    with pytest.raises(psg.InputError, match=r"w has layout torch.sparse_coo; expected a dense tensor"):
        psg.per_sample_grad(lambda w, x: (w.to_dense() @ x).sum())(torch.eye(3, device=device).to_sparse(), x)


@pytest.mark.filterwarnings("error")
def test_a_chunk_that_uses_no_parameter_is_not_the_whole_batch(device):
    def fn(p, x):
        return (p * x).sum() if x[0] > 0 else x.sum()

    p, x = torch.ones(2, device=device), torch.tensor([[3.0, 4.0], [-1.0, 2.0], [-3.0, 4.0]], device=device)
    assert psg.per_sample_norm(fn, chunk_size=1)(p, x).tolist() == [5, 0, 0]
    with pytest.warns(UserWarning, match="uses none of the tensors"):
        psg.per_sample_norm(fn, chunk_size=1)(p, x[1:])
    with pytest.warns(UserWarning, match="explain.*uses none of the tensors"):
        psg.explain(lambda p, x: x.sum())(p, x)


@pytest.mark.parametrize("fn", [None, 3, torch.nn.Linear])
@pytest.mark.parametrize("transform", [psg.per_sample_grad, psg.per_sample_norm, psg.factored_grad, lambda fn: psg.clipped_grad(fn, 1.0)])
def test_what_is_no_function(transform, fn):
    with pytest.raises(psg.InputError, match=r"expected a function of one sample, fn\(params, \*sample\), got"):
        transform(fn)


@pytest.mark.parametrize("make", [psg.per_sample_grad, lambda fn: psg.clipped_grad(fn, 1.0), psg.check, psg.explain, psg.jit])
def test_what_is_no_function_is_not_printed(make):
    pair = psg.stateless(torch.nn.Linear(3, 4), F.cross_entropy)
    with pytest.raises(psg.InputError, match=r"got the pair that stateless returns.*loss, params = psg\.stateless\(\.\.\.\)") as caught:
        make(pair)
    assert "tensor" not in str(caught.value)
    with pytest.raises(psg.InputError, match=r"got a dict\.$"):
        make(pair[1])


@pytest.mark.parametrize("fn_of", [lambda model: model, lambda model: model.forward], ids=["module", "method"])
@pytest.mark.parametrize("transform", [psg.per_sample_grad, psg.check])
def test_a_module_in_the_place_of_a_function(transform, fn_of, x, device):
    model = torch.nn.Linear(3, 4, device=device)
    with pytest.raises(TypeError, match="positional arguments") as caught:
        transform(fn_of(model))(dict(model.named_parameters()), x)
    assert "psg.stateless(module, criterion)" in caught.value.__notes__[-1]


def test_a_module_that_raises_no_error_of_torch_s(x, device):
    class Cast(torch.nn.Linear):
        def forward(self, x, y):
            return super().forward(x.to(y.dtype))

    model = Cast(3, 4, device=device)
    with pytest.raises(AttributeError, match="'dict' object") as caught:
        psg.per_sample_grad(model)(dict(model.named_parameters()), x)
    assert "psg.stateless(module, criterion)" in caught.value.__notes__[-1]


def test_a_tree_in_the_place_of_argnums():
    with pytest.raises(psg.InputError, match=r"^argnums=\{.*per_sample_grad\(fn\)\(params, \*batch\)\.$") as caught:
        psg.per_sample_grad(lambda params, x: x.sum(), {"w": torch.arange(10_000.0)})
    assert len(str(caught.value)) < 300


def test_a_module_s_parameters_in_the_place_of_a_tree(x, device):
    model = torch.nn.Linear(3, 4, device=device)
    fn, _ = psg.stateless(model, lambda output: output.sum())
    with pytest.raises(psg.InputError, match=r"params is a generator.*a dict of those to differentiate, by name"):
        psg.per_sample_grad(fn)(model.parameters(), x)


def test_parameters_that_are_an_array(x):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(psg.InputError, match=r"params\['w'\] is a ndarray; expected a tensor.*torch\.as_tensor"):
        psg.per_sample_grad(lambda params, x: (x * params["w"]).sum())({"w": numpy.zeros(3)}, x)


def test_the_arguments_of_stateless_in_messages(params, x, device):
    fn, params = psg.stateless(torch.nn.Linear(3, 4, device=device), lambda output, y: output.sum() * y)
    with pytest.raises(psg.InputError, match=r"sample\[0\] has 3, sample\[1\] has 2"):
        psg.per_sample_grad(fn)(params, x, torch.ones(2, device=device))


@pytest.mark.parametrize("criterion", [torch.nn.CrossEntropyLoss, "cross_entropy"])
def test_what_is_no_criterion(criterion):
    with pytest.raises(psg.InputError, match=r"a criterion\(output, target\), got (the class CrossEntropyLoss|a str)\."):
        psg.stateless(torch.nn.Linear(3, 4), criterion)


def test_a_criterion_with_parameters_of_its_own(x, device):
    """They would be left out, and autograd would give every result a history."""

    class Head(torch.nn.Module):
        def __init__(self, features=None):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4, device=device))
            self.features = features

        def forward(self, output, target):
            return F.mse_loss(output * self.scale, target)

    model = torch.nn.Linear(3, 4, device=device)
    with pytest.raises(
        psg.InputError, match=r"the criterion Head has parameters of its own that require grad \(scale\), which would get no"
    ):
        psg.stateless(model, Head())
    with_features = Head(features=model)  # the module's own parameters have gradients
    with_features.scale.requires_grad_(False)
    loss, params = psg.stateless(model, with_features)
    plain, _ = psg.stateless(model, F.mse_loss)
    targets = torch.randn(N, 4, device=device)
    assert_trees_close(psg.per_sample_grad(loss)(params, x, targets), loop_grad(plain)(params, x, targets))


def test_a_module_s_arguments_are_counted(x, device):
    loss, params = psg.stateless(torch.nn.Bilinear(3, 3, 4, device=device), F.mse_loss)
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        psg.per_sample_norm(loss)(params, x, x)
    assert "2 arguments after params, the last of them for criterion" in caught.value.__notes__[0]


def test_a_type_error_of_the_criterion_of_a_module_without_inputs(x, device):
    class Weight(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, *, squared=False):
            return self.weight

    # Its target alone is all that such a module's loss takes: the error is the criterion's.
    loss, params = psg.stateless(Weight().to(device), lambda output, target: len(3))
    with pytest.raises(TypeError, match=r"object of type 'int' has no len\(\)"):
        psg.per_sample_norm(loss)(params, x)


def test_a_criterion_of_three_arguments(x, device):
    loss, params = psg.stateless(torch.nn.Linear(3, 4, device=device), lambda output, y, weight: weight * F.mse_loss(output, y))
    with pytest.raises(TypeError, match="positional argument") as caught:
        psg.per_sample_norm(loss)(params, x, x, torch.ones(N, device=device))
    assert "pass several targets or weights in a tuple" in caught.value.__notes__[0]


def test_a_target_without_an_input(x, device):
    loss, params = psg.stateless(torch.nn.Linear(3, 4, device=device), F.mse_loss)
    with pytest.raises(psg.InputError, match=r"one argument after params, which is the criterion's target.*\*inputs, target\)\.$"):
        psg.per_sample_norm(loss)(params, x)
    with pytest.raises(psg.InputError, match=r"target\)\. Unpack the batch: loss\(params, \*batch\)\."):
        psg.per_sample_norm(loss)(params, [x, x])


def test_what_takes_too_much_memory_is_not_tried_again(params, x):
    calls = []

    def fn(p, x):
        calls.append(1)
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        psg.per_sample_norm(fn)(params, x)
    assert len(calls) == 1 and "chunk_size" in caught.value.__notes__[0]


class Slotted:
    """A function that takes no weak reference."""

    __slots__ = ()

    def __call__(self, w, x):
        return score(w * x)


@pytest.mark.parametrize("fn", [torch.dot, Slotted()], ids=["without a signature", "without weak references"])
def test_unusual_functions(fn, x, device):
    w = torch.randn(3, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    keep = torch.arange(N, device=device) > 0
    assert_trees_close(psg.clipped_grad(fn, float("inf"))(w, x, mask=keep).grads, loop_grad(fn)(w, x[1:]).sum(0), per_sample=False)
    with pytest.raises(psg.PsgError, match="no argument has a dimension for the samples"):
        psg.per_sample_grad(fn)(w, 3)


@pytest.mark.parametrize(
    "use, message",
    [
        (lambda clipped: psg.tree.add_noise(clipped, 1.0), "add_noise: got a ClippedGrad: pass its grads"),
        (lambda clipped: psg.tree.norm(clipped), "norm: got a ClippedGrad; expected per-sample gradients"),
    ],
)
def test_a_clipped_grad_in_the_place_of_a_tree(use, message, params, x):
    with pytest.raises(psg.PsgError, match=message):
        use(psg.clipped_grad(loss, 1.0)(params, x))


def test_a_parameter_that_no_longer_requires_grad(x, device):
    def fn(w, x):
        w.requires_grad_(False)
        return score(w * x)

    w = torch.randn(3, device=device)
    with pytest.raises(psg.PsgError, match=r"requires_grad_\(False\) on a parameter"):
        psg.per_sample_grad(fn, method="capture")(w, x)
    with pytest.warns(psg.FallbackWarning, match=r"requires_grad_\(False\) on a parameter"):
        found = psg.per_sample_grad(fn)(w, x)
    assert_trees_close(found, loop_grad(fn)(w, x))


@pytest.mark.parametrize("method", METHODS)
def test_the_truth_of_a_tensor_of_several_numbers(method, x, device):
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        psg.per_sample_grad(lambda w, x: w.sum() if x else (w * x).sum(), method=method)(torch.ones(3, device=device), x)


@pytest.mark.parametrize("method", ["auto", "capture", "loop"])
def test_a_derivative_inside_fn_of_several_numbers(method, x, device):
    def fn(w, x):
        own = x.detach().requires_grad_()
        return (torch.autograd.grad(w * own, own)[0] * w).sum()

    with pytest.raises((RuntimeError, psg.PsgError), match="no scalar|only for scalar outputs"):
        psg.per_sample_grad(fn, method=method)(torch.ones(3, device=device), x)


def test_an_empty_batch_of_a_function_that_takes_derivatives(device):
    def fn(p, x):
        x = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad((x * p).tanh().sum(), x, create_graph=True)
        (other,) = torch.autograd.grad((x * p).tanh().sum(), p, create_graph=True)
        return slope.square().sum(), (slope, other)

    _, (slope, other) = psg.per_sample_grad(fn, has_aux=True)(torch.randn(3, device=device), torch.randn(0, 3, device=device))
    assert slope.shape == other.shape == (0, 3)
