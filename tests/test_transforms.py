"""The transforms: right on every case, and the properties that a per-sample gradient must have."""

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, cut, samples, summed
from cases import N, each_case, falling, ids, normal, score, Tied, convnet, parameters, Problem
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg._trees import flatten
from psg.testing import assert_trees_close, loop_grad, loop_value_and_grad, reference_norm, reference_weighted_sum
from psg.testing._loop import tree_map


def only_grads(result, problem):
    return result[0] if problem.options.get("has_aux") else result


def gradients(problem, **options):
    return only_grads(psg.per_sample_grad(problem.fn, **problem.options, **options)(*problem.args, **problem.shared), problem)


def oracle(problem):
    return only_grads(loop_grad(problem.fn, **problem.options)(*problem.args, **problem.shared), problem)


def runs_on_capture(case):
    return not case.not_capture


# --- every case against the loop ----------------------------------------------------------------------------


@each_case()
def test_equals_the_loop(case, device):
    with falling(case.not_capture):
        assert_agrees(case.build(device))


@each_case()
def test_rules_disabled_equals_the_loop(case, device):
    if case.vmap_wrong:
        pytest.skip(case.vmap_wrong)
    with falling(case.not_vmap):
        assert_agrees(case.build(device), rules=False)


@each_case(runs_on_capture)
def test_method_capture(case, device):
    problem = case.build(device)
    assert_trees_close(gradients(problem, method="capture"), oracle(problem), name="grads")


@each_case(lambda case: not case.not_vmap)
def test_method_vmap(case, device):
    if case.vmap_wrong:
        pytest.skip(case.vmap_wrong)
    problem = case.build(device)
    assert_trees_close(gradients(problem, method="vmap"), oracle(problem), name="grads")


@each_case()
def test_method_loop(case, device):
    problem = case.build(device)
    assert_trees_close(gradients(problem, method="loop"), oracle(problem), name="grads")


@each_case()
def test_arguments_are_left_alone(case, device):
    problem = case.build(device)
    before = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, problem.args)
    with falling(case.not_capture):
        gradients(problem)
    for now, then in zip(flatten(problem.args)[0], flatten(before)[0], strict=True):
        assert not isinstance(now, torch.Tensor) or torch.equal(now, then)


@each_case(lambda case: case.not_capture)
def test_method_capture_does_not_fall(case, device):
    problem = case.build(device)
    with pytest.raises(Exception):  # noqa: B017  (the error is torch's or psg's; test_ladder has their texts)
        gradients(problem, method="capture")


# --- properties, on every case that the capture pass runs -----------------------------------------------------


@each_case(runs_on_capture)
def test_no_samples(case, device):
    problem = samples(case.build(device), [])
    found = gradients(problem)
    assert_trees_close(found, oracle(problem), name="grads")
    assert_agrees(problem) if not problem.options.get("has_aux") else None


@each_case(runs_on_capture)
def test_one_sample(case, device):
    assert_agrees(samples(case.build(device), [1]))


@each_case(runs_on_capture)
def test_permuted_samples_give_permuted_gradients(case, device):
    problem = case.build(device)
    order = [2, 0, 1]
    expected = tree_map(lambda leaf: leaf[order], gradients(problem))
    assert_trees_close(gradients(samples(problem, order)), expected, name="grads")


@each_case(runs_on_capture)
def test_another_sample_leaves_a_row_untouched(case, device):
    problem = case.build(device)
    before, after = gradients(problem), gradients(samples(problem, [0, 0, 2]))
    for index in (0, 2):
        kept = tree_map(lambda leaf: leaf[index], before)  # noqa: B023
        assert_trees_close(tree_map(lambda leaf: leaf[index], after), kept, name="grads", per_sample=False)  # noqa: B023


@each_case(runs_on_capture)
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7])
def test_chunks_change_nothing(case, chunk_size, device):
    problem = case.build(device)
    expected = oracle(problem)
    assert_trees_close(gradients(problem, chunk_size=chunk_size), expected, name="grads")
    factored = only_grads(
        psg.factored_grad(problem.fn, chunk_size=chunk_size, **problem.options)(*problem.args, **problem.shared), problem
    )
    assert_trees_close(psg.tree.norm(factored), reference_norm(expected), name="norm")


@each_case(runs_on_capture)
def test_a_masked_sample_contributes_exactly_zero(case, device):
    problem = case.build(device)
    clipped = psg.clipped_grad(problem.fn, float("inf"), **problem.options)
    mask = torch.tensor([True, False, True], device=device)
    problem = samples(problem, [0, 1, 2])  # one memory layout for both calls
    out = clipped(*problem.args, mask=mask, **problem.shared)
    assert not out.norms[1] and not out.values[1]
    summed(out.grads, reference_weighted_sum(oracle(problem), mask.to(out.norms.dtype)), "grads")
    # Exactly: what the masked sample holds changes no bit of the sum.
    other = samples(problem, [0, 2, 2])
    again = clipped(*other.args, mask=mask, **problem.shared)
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), again.grads, out.grads)


@each_case(runs_on_capture)
def test_linear_in_the_loss(case, device):
    problem = case.build(device)
    if problem.options.get("has_aux"):
        doubled = lambda *args, **shared: (lambda value, aux: (-2.5 * value, aux))(*problem.fn(*args, **shared))  # noqa: E731
    else:
        doubled = lambda *args, **shared: -2.5 * problem.fn(*args, **shared)  # noqa: E731
    expected = tree_map(lambda leaf: -2.5 * leaf, gradients(problem))
    assert_trees_close(gradients(problem._replace(fn=doubled)), expected, name="grads")


@each_case(runs_on_capture)
def test_clipped_sample_has_at_most_the_clip_norm(case, device):
    problem = case.build(device)
    norms = reference_norm(oracle(problem))
    clip_norm = norms.median().item()
    for i in range(N):
        one = samples(problem, [i])
        out = psg.clipped_grad(one.fn, clip_norm, **one.options)(*one.args, **one.shared)
        length = reference_norm(tree_map(lambda leaf: leaf[None], out.grads)).item()
        assert length <= clip_norm * (1 + 4 * torch.finfo(norms.dtype).eps)
        assert length == pytest.approx(min(norms[i].item(), clip_norm), rel=psg.testing.default_rtol(norms.dtype))


def test_samples_sum_to_the_ordinary_gradient(device):
    model = convnet().to(device)
    x, y = torch.randn(7, 1, 8, 8, device=device), torch.randint(5, (7,), device=device)
    loss, params = psg.stateless(model, F.cross_entropy)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    ordinary = {name: p.grad for name, p in model.named_parameters()}
    summed(psg.tree.sum(psg.factored_grad(loss)(params, x, y)), ordinary, "sum")
    summed(psg.tree.sum(psg.per_sample_grad(loss)(params, x, y)), ordinary, "sum")


# --- what comes back ----------------------------------------------------------------------------------------


def linear_loss(p, x):
    return score(F.linear(x, p["w"], p["b"]))


def linear_args(device, n=N):
    p = {"w": torch.randn(4, 3, device=device), "b": torch.randn(4, device=device)}
    return p, torch.randn(n, 5, 3, device=device)


def test_value_and_grad_order_and_aux(device):
    def with_aux(p, x):
        value = linear_loss(p, x)
        return value, {"double": 2 * value, "x": x}

    params, x = linear_args(device)
    values, grads = psg.per_sample_value_and_grad(linear_loss)(params, x)
    assert values.shape == (N,) and grads["w"].shape == (N, 4, 3)
    (values_again, aux), grads_again = psg.per_sample_value_and_grad(with_aux, has_aux=True)(params, x)
    assert_trees_close((values_again, grads_again), (values, grads))
    assert_trees_close(aux, {"double": 2 * values, "x": x})
    grads_only, aux = psg.per_sample_grad(with_aux, has_aux=True)(params, x)
    assert_trees_close((grads_only, aux["x"]), (grads, x))
    norms, aux = psg.per_sample_norm(with_aux, has_aux=True)(params, x)
    assert_trees_close((norms, aux["x"]), (reference_norm(grads), x))
    factored, aux = psg.factored_grad(with_aux, has_aux=True)(params, x)
    assert_trees_close((psg.tree.materialize(factored), aux["x"]), (grads, x))
    out = psg.clipped_grad(with_aux, 1.0, has_aux=True)(params, x)
    assert_trees_close((out.values, out.aux["x"]), (values, x))


def test_aux_of_chunks_is_joined(device):
    def with_aux(p, x):
        return linear_loss(p, x), (x.sum(), [x])

    params, x = linear_args(device, 5)
    _, aux = psg.per_sample_grad(with_aux, has_aux=True, chunk_size=2)(params, x)
    assert_trees_close(aux, (x.sum((1, 2)), [x]))


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
def test_aux_that_does_not_depend_on_the_sample(method, device):
    params, x = linear_args(device)
    constant = torch.arange(2.0, device=device)
    _, aux = psg.per_sample_grad(lambda p, x: (linear_loss(p, x), constant), has_aux=True, method=method)(params, x)
    assert_trees_close(aux, constant.expand(N, 2))


def test_gradients_have_no_history_and_leave_the_arguments_alone(device):
    params = {name: nn.Parameter(p) for name, p in linear_args(device)[0].items()}
    x = linear_args(device)[1]
    before = {name: p.detach().clone() for name, p in params.items()}
    kept = x.clone()
    values, grads = psg.per_sample_value_and_grad(linear_loss)(params, x)
    assert all(p.grad is None for p in params.values())
    assert_trees_close({name: p.detach() for name, p in params.items()}, before, rtol=0)
    assert_trees_close(x, kept, rtol=0)
    with torch.no_grad():
        plain, quiet = psg.per_sample_value_and_grad(linear_loss)(tree_map(torch.detach, params), x)
    assert not plain.requires_grad and not any(leaf.requires_grad for leaf in quiet.values())
    assert_trees_close((plain, quiet), (values.detach(), tree_map(torch.detach, grads)))


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inside", [True, False])
def test_under_no_grad_and_inference_mode(switch, inside, method, device):
    # Both switch autograd off for the caller's code; a gradient that is asked for is still the gradient.
    args = linear_args(device)
    expected = loop_grad(linear_loss)(*args)
    with switch():
        args = tree_map(torch.clone, args) if inside else args  # tensors made in inference mode are special themselves
        assert_trees_close(psg.per_sample_grad(linear_loss, method=method)(*args), expected)
        assert_trees_close(psg.per_sample_norm(linear_loss, method=method)(*args), reference_norm(expected))


def test_arguments_may_be_shared_by_every_call_of_a_transform(device):
    grad = psg.per_sample_grad(linear_loss)
    for n in (3, 1, 0, 4):
        params, x = linear_args(device, n)
        assert_trees_close(grad(params, x), loop_grad(linear_loss)(params, x))


def test_argnums_differentiate_arguments_and_share_the_others(device):
    a, x, b = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device), torch.randn(4, device=device)

    def fn(a, x, b):
        return score(F.linear(x, a, b))

    first, second = psg.per_sample_grad(fn, argnums=(0, 2))(a, x, b)
    only = psg.per_sample_grad(fn, argnums=2, in_dims=(None, 0, None))(a, x, b)
    negative = psg.per_sample_grad(fn, argnums=-1, in_dims=(None, 0, None))(a, x, b)
    assert first.shape == (N, 4, 3)
    assert_trees_close((only, negative), (second, second))


def test_in_dims_integer_batches_every_argument(device):
    w, x = torch.randn(N, 4, 3, device=device), torch.randn(N, 3, device=device)
    fn = lambda w, x: score(F.linear(x, w))  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn, in_dims=0)(w, x), loop_grad(fn, in_dims=0)(w, x))


# --- randomness ---------------------------------------------------------------------------------------------


def dropout_loss(p, x):
    """The gradient of sample n for p is its dropout mask times x[n]: it can be read off."""
    return F.dropout(p * x, 0.5).sum()


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_each_sample_draws_its_own_mask(method, device):
    p, x = torch.ones(64, device=device), torch.ones(8, 64, device=device)
    grads = psg.per_sample_grad(dropout_loss, method=method)(p, x)
    assert set(grads.unique().tolist()) == {0.0, 2.0}
    assert len({tuple(row.tolist()) for row in grads}) == 8


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_randomness_same_draws_one_mask(method, device):
    p, x = torch.ones(64, device=device), torch.ones(8, 64, device=device)
    grads = psg.per_sample_grad(dropout_loss, method=method, randomness="same")(p, x)
    assert set(grads.unique().tolist()) == {0.0, 2.0}
    assert len({tuple(row.tolist()) for row in grads}) == 1


@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
def test_randomness_error_refuses_to_draw(method, device):
    p, x = torch.ones(4, device=device), torch.ones(8, 4, device=device)
    with pytest.raises(RuntimeError, match="random"):
        psg.per_sample_grad(dropout_loss, method=method, randomness="error")(p, x)


PARAMETER_NOISE = {
    "dropped weights": lambda w, x: F.linear(x, F.dropout(w, 0.5)),
    "noise like the weights": lambda w, x: F.linear(x, w + torch.randn_like(w)),
    "weights as probabilities": lambda w, x: F.linear(x, w * torch.bernoulli(w.detach() * 0.5)),
    "fresh noise": lambda w, x: F.linear(x, w * torch.rand(8, 8, device=w.device)),
    "alpha dropout": lambda w, x: F.linear(x, F.alpha_dropout(w, 0.5, training=True)),
    "normal around the weights": lambda w, x: F.linear(x, torch.normal(w, 1.0)).square(),
}


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize("name", PARAMETER_NOISE)
def test_noise_on_parameters_is_drawn_for_each_sample(name, method, device):
    # No sample enters the noisy weight, and it is still not the same for all.
    w, x = torch.ones(8, 8, device=device), torch.ones(4, 8, device=device)
    fn = PARAMETER_NOISE[name]
    values = psg.per_sample_value_and_grad(lambda w, x: fn(w, x).square().sum(), method=method)(w, x)[0]
    assert values.unique().numel() == 4


def test_norms_and_sums_of_one_call_see_the_same_mask(device):
    p, x = torch.ones(64, device=device), torch.ones(1, 64, device=device)
    out = psg.clipped_grad(dropout_loss, float("inf"))(p, x)
    assert_trees_close(torch.linalg.vector_norm(out.grads)[None], out.norms)
    assert_trees_close(out.grads.sum()[None], out.values)
    out = psg.clipped_grad(dropout_loss, 0.25)(p, x)
    assert torch.linalg.vector_norm(out.grads).item() == pytest.approx(0.25)


def test_dropout_before_a_rule_is_the_same_in_both_passes(device):
    # The factor of the second layer must hold the masked input that the forward pass used.
    def fn(p, x):
        return F.linear(F.dropout(F.linear(x, p["a"]), 0.5), p["b"]).sum()

    params = {"a": torch.ones(16, 1, device=device), "b": torch.ones(1, 16, device=device)}
    values, grads = psg.per_sample_value_and_grad(fn)(params, torch.ones(4, 1, device=device))
    assert_trees_close(grads["b"].sum((1, 2)), values)
    assert_trees_close(grads["a"].sum((1, 2)), values)


# --- dtypes, autocast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear 2-D", "conv2d groups", "embedding", "layer_norm", "group_norm", "instance_norm", "rms_norm"])
def test_low_precision_follows_torch(name, dtype, device):
    problem = next(case for case in each_case().args[1] if case.name == name).build(device)
    args = tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, problem.args)
    grads = psg.per_sample_grad(problem.fn)(*args)
    assert_trees_close(grads, loop_grad(problem.fn)(*args), name="grads")
    norms = psg.per_sample_norm(problem.fn)(*args)
    assert norms.dtype == torch.float32
    assert_trees_close(norms, reference_norm(grads), rtol=psg.testing.default_rtol(dtype), name="norms")


def test_norms_of_half_precision_do_not_overflow(device):
    # 300^2 is beyond float16, whose largest number is 65504.
    p, x = torch.ones(4, device=device, dtype=torch.float16), torch.full((2, 4), 300.0, device=device, dtype=torch.float16)
    norms = psg.per_sample_norm(lambda p, x: (p * x).sum())(p, x)
    assert_trees_close(norms, torch.full((2,), 600.0, device=device, dtype=torch.float32))
    w = torch.ones(1, 4, device=device, dtype=torch.float16)
    assert_trees_close(psg.per_sample_norm(lambda w, x: F.linear(x, w).sum())(w, x), norms)


def test_autocast(device):
    def fn(p, x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = F.linear(F.linear(x, p["a"], p["c"]).relu(), p["b"])
        return y.float().square().mean()

    params = {"a": torch.randn(8, 6), "c": torch.randn(8), "b": torch.randn(3, 8)}
    params = {name: p.to(device, torch.float32) for name, p in params.items()}
    x = torch.randn(N, 5, 6, device=device, dtype=torch.float32)
    expected = loop_grad(fn)(params, x)
    grads = psg.per_sample_grad(fn)(params, x)
    assert_trees_close(grads, expected, rtol=psg.testing.default_rtol(torch.bfloat16), name="grads")
    norms = psg.per_sample_norm(fn)(params, x)
    assert_trees_close(norms, reference_norm(grads), rtol=psg.testing.default_rtol(torch.bfloat16), name="norms")


def test_autocast_outside_the_call(device):
    params, x = linear_args(device)
    params, x = tree_map(torch.Tensor.float, (params, x))
    fn = lambda p, x: F.linear(x, p["w"], p["b"]).float().square().mean()  # noqa: E731
    with torch.autocast(device.type, dtype=torch.bfloat16):
        grads, expected = psg.per_sample_grad(fn)(params, x), loop_grad(fn)(params, x)
    assert_trees_close(grads, expected, rtol=psg.testing.default_rtol(torch.bfloat16), name="grads")


# --- numbers that are not finite stay where they are ----------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_spoils_its_own_row_alone(bad, device):
    params, x = linear_args(device)
    clean = psg.per_sample_grad(linear_loss)(params, x)
    x[1, 0, 0] = bad
    grads, norms = psg.per_sample_grad(linear_loss)(params, x), psg.per_sample_norm(linear_loss)(params, x)
    assert not torch.isfinite(norms[1])
    rest = [0, 2]
    assert_trees_close(tree_map(lambda leaf: leaf[rest], grads), tree_map(lambda leaf: leaf[rest], clean))
    assert_trees_close(norms[rest], reference_norm(clean)[rest])


# --- whole models over drawn batches --------------------------------------------------------------------------


@given(batch=psg.testing.batches((1, 8, 8), ((), 5), max_samples=4))
def test_convnet_over_drawn_batches(batch, device):
    loss, params = psg.stateless(convnet().to(device), F.cross_entropy)
    assert_agrees(Problem(loss, (params, *(field.to(device) for field in batch))))


@given(batch=psg.testing.batches(((7,), 11), max_samples=4))
def test_tied_model_over_drawn_batches(batch, device):
    module = Tied().to(device)

    def fn(p, tokens):
        return F.cross_entropy(functional_call(module, p, (tokens[:-1],)), tokens[1:])

    assert_agrees(Problem(fn, (parameters(module), *(field.to(device) for field in batch))))


@given(seed=st.integers(0, 2**16), n=st.integers(1, 5), j=st.integers(0, 4))
def test_a_row_depends_on_its_sample_alone(seed, n, j, device):
    torch.manual_seed(seed)
    params, x = linear_args(device, n)
    before = psg.per_sample_grad(linear_loss)(params, x)
    x[j % n] = torch.randn(5, 3, device=device)
    after = psg.per_sample_grad(linear_loss)(params, x)
    rest = [i for i in range(n) if i != j % n]
    # Bit for bit: the kernels of a small linear layer allow it.
    tree_map(lambda a, b: torch.testing.assert_close(a[rest], b[rest], rtol=0, atol=0), after, before)


def test_values_and_batch_sizes_of_the_cases(device):
    # The table's own promise: every row has N samples, so that the properties above mean what they say.
    for case in each_case().args[1]:
        problem = case.build(device)
        assert cut(problem).n == N, case.name
        values, _ = loop_value_and_grad(problem.fn, **problem.options)(*problem.args, **problem.shared)
        values = values[0] if problem.options.get("has_aux") else values
        assert values.shape == (N,) and values.isfinite().all(), case.name
