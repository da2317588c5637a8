"""The arguments that the transforms accept, and their results."""

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, linear_args, linear_loss, summed
from cases import N, Problem, Tied, convnet, parameters, score
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg.testing import assert_trees_close, loop_grad, reference_norm
from psg.testing._loop import tree_map


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


@pytest.mark.parametrize("method", ["capture", "vmap", "loop", "batch"])
@pytest.mark.parametrize("n", [1, N])
def test_aux_is_not_the_memory_of_what_fn_closes_over(method, n, device):
    params, x = linear_args(device)
    held = torch.arange(2.0 * n, device=device).reshape((n, 2) if method == "batch" else (2 * n,))
    before, rows = held.clone(), method == "batch"

    def with_aux(p, x):
        loss = linear_loss(p, x)
        return (torch.stack([linear_loss(p, own) for own in x]) if rows else loss), {"whole": held, "part": held[:n], "shared": scale}

    scale = torch.ones(n, device=device)
    _, aux = psg.per_sample_grad(with_aux, has_aux=True, method=method)(params, x[:n])
    if n == 1:
        aux["whole"].add_(1)
        aux["part"].add_(1)
        assert torch.equal(held, before)
    kept = {name: tensor.clone() for name, tensor in aux.items()}
    held.zero_()
    scale.zero_()
    assert_trees_close(aux, kept)


def test_aux_of_what_fn_closes_over_has_its_derivative(device):
    params, x = linear_args(device)
    held = torch.arange(2.0, device=device, requires_grad=True)
    for method in ("auto", "vmap", "loop"):
        _, aux = psg.per_sample_norm(lambda p, x: (linear_loss(p, x), 2 * held), has_aux=True, method=method)(params, x)
        assert_trees_close(torch.autograd.grad(aux.sum(), held)[0], torch.full_like(held, 2 * N), per_sample=False)


class Unequal:
    """Two instances are unequal, though they have the same repr."""

    def __repr__(self):
        return "Unequal"


AUX_OF_ONE_SHAPE_ONLY = {
    "another key": (lambda x: {"positive": x} if x[0, 0] > 0 else {"negative": x}, "must have the same structure"),
    "more leaves": (lambda x: [x] * (1 + int(x[0, 0] > 0)), "must have the same structure"),
    "another shape": (lambda x: x[: 1 + int(x[0, 0] > 0), :1], r"a tensor that must have the same shape .* \[[12], 1\] and \[[12], 1\]"),
    "another value": (lambda x: "positive" if x[0, 0] > 0 else "negative", "a Python value that is not the same"),
    "another sign": (lambda x: 0.0 if x[0, 0] > 0 else -0.0, "a Python value that is not the same"),
    "an object of its own": (lambda x: Unequal() if x[0, 0] > 0 else Unequal(), "a Python value that is not the same"),
    "an array": (lambda x: np_array_of(float(x[0, 0])), "a Python value that is not the same"),
}


def np_array_of(value):
    """An array so long that its repr leaves out the middle."""
    array = pytest.importorskip("numpy").zeros(5000)
    array[2500] = value
    return array


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("options", [{}, {"method": "loop"}, {"chunk_size": 1}, {"chunk_size": 1, "method": "loop"}])
@pytest.mark.parametrize("name", AUX_OF_ONE_SHAPE_ONLY)
def test_aux_that_is_no_batch_is_refused(name, options, device):
    make, message = AUX_OF_ONE_SHAPE_ONLY[name]
    params, x = linear_args(device)
    x = x.abs() * torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], device=device)[:N, None, None]
    with pytest.raises(psg.InputError, match=f"aux .*{message}"):
        psg.per_sample_norm(lambda p, x: (linear_loss(p, x), make(x)), has_aux=True, **options)(params, x)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"chunk_size": 2, "method": "loop"}])
def test_values_and_aux_have_the_widest_dtype_of_any_sample(options, device):
    def fn(w, x):
        found = (w * x).sum()
        return found.float() if x[0] > 0 else found, found.half() if x[0] > 0 else 1e5 * found

    w, x = torch.ones(2, device=device), torch.tensor([[1.0, 2.0], [-1.0, 3.0], [2.0, 2.0]], device=device)
    (values, aux), _ = psg.per_sample_value_and_grad(fn, has_aux=True, **options)(w, x)
    assert_trees_close((values, aux), (torch.tensor([3.0, 2.0, 4.0], device=device), torch.tensor([3.0, 2e5, 4.0], device=device)))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"method": "vmap"}, {"method": "loop"}, {"method": "batch"}])
def test_every_sample_finds_keyword_tensors_as_they_were_given(options, device):
    def fn(w, x, given):
        given["scale"].mul_(2)
        return (given["scale"] * x * w).square().sum(-1)

    w, x, given = torch.ones(4, device=device), torch.rand(N, 4, device=device), {"scale": torch.ones(4, device=device), "what": "a scale"}
    for _ in range(2):
        assert_trees_close(psg.per_sample_grad(fn, **options)(w, x, given=given), 8 * x**2)
        assert (given["scale"] == 1).all()


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_a_parameter_in_values_and_aux_has_no_history(method, device):
    w, x = torch.randn((), device=device), torch.randn(3, device=device)
    values, grads = psg.per_sample_value_and_grad(lambda w, x: w, method=method)(w, x)
    assert torch.equal(values, w.expand(3)) and torch.equal(grads, torch.ones_like(x))
    _, aux = psg.per_sample_norm(lambda w, x: (w * x, {"own": w, "view": w[None]}), has_aux=True, method=method)(w, x)
    assert not values.requires_grad and not any(tensor.requires_grad for tensor in aux.values())
    assert torch.equal(aux["view"], w.expand(3, 1))
    assert all(tensor.data_ptr() != w.data_ptr() for tensor in (values, *aux.values()))


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
    # Both switch autograd off for the caller's code, but psg's gradients stay the same.
    args = linear_args(device)
    expected = loop_grad(linear_loss)(*args)
    with switch():
        args = tree_map(torch.clone, args) if inside else args  # tensors made in inference mode behave differently too
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


def test_samples_sum_to_the_ordinary_gradient(device):
    model = convnet().to(device)
    x, y = torch.randn(7, 1, 8, 8, device=device), torch.randint(5, (7,), device=device)
    loss, params = psg.stateless(model, F.cross_entropy)
    F.cross_entropy(model(x), y, reduction="sum").backward()
    ordinary = {name: p.grad for name, p in model.named_parameters()}
    summed(psg.tree.sum(psg.factored_grad(loss)(params, x, y)), ordinary, "sum")
    summed(psg.tree.sum(psg.per_sample_grad(loss)(params, x, y)), ordinary, "sum")


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


def test_a_part_of_the_parameters(device):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(device)
    loss, params = psg.stateless(model, F.cross_entropy)
    batch = torch.randn(N, 3, device=device), torch.randint(2, (N,), device=device)
    every = psg.per_sample_grad(loss)(params, *batch)
    for part in (["2.weight"], ["0.bias", "2.bias"]):
        found = psg.per_sample_grad(loss)({name: params[name] for name in part}, *batch)
        assert_trees_close(found, {name: every[name] for name in part})


def test_argnums_are_shared_unless_in_dims_says_otherwise(device):
    a, b, x = torch.randn(2, device=device), torch.randn(N, 2, device=device), torch.randn(N, 2, device=device)
    fn = lambda a, b, x: (a * b * x).sum()  # noqa: E731
    shared = psg.per_sample_grad(fn, argnums=(0, 1))(a, b[0], x)
    assert_trees_close(shared, (b[0] * x, a * x))
    own = psg.per_sample_grad(fn, argnums=(0, 1), in_dims=(None, 0, 0))(a, b, x)
    assert_trees_close(own, (b * x, a * x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_by_keyword(device):
    def fn(w, x, extra=None):
        return (w * x).sum() * sum(part.sum() for part in extra.unbind())

    extra = torch.nested.nested_tensor([torch.ones(2, 3, device=device), torch.ones(1, 3, device=device)])
    w, x = torch.ones(3, device=device), torch.randn(4, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(w, x, extra=extra), 9 * x)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("chunk_size", [None, 1, 2, "1 MiB"])
def test_the_parts_of_a_nested_tensor_are_the_samples(chunk_size, device):
    fn = lambda w, x: (x @ w).tanh().sum()  # noqa: E731
    w, parts = torch.randn(3, device=device), [torch.randn(size, 3, device=device) for size in (2, 1, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    expected = torch.stack([torch.func.grad(fn)(w, part) for part in parts])
    assert_trees_close(psg.per_sample_grad(fn, chunk_size=chunk_size)(w, x), expected)


def test_nested_tensors_are_told_to_be_padded(device):
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged).to(device)
    with pytest.warns(psg.FallbackWarning, match=r"x is a NestedTensor, .*to_padded_tensor"):
        psg.per_sample_grad(lambda w, x: (x @ w).sum())(torch.ones(3, device=device), x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_without_a_shape_is_an_error():
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    with pytest.raises(psg.InputError, match=r"x is a nested tensor of layout torch\.strided.*layout=torch\.jagged"):
        psg.per_sample_grad(lambda w, x: (x @ w).sum())(torch.ones(3), x)


@pytest.mark.parametrize("transform", [psg.per_sample_grad, psg.per_sample_value_and_grad, psg.per_sample_norm, psg.factored_grad])
def test_what_a_transform_has_made_is_no_function_of_one_sample(transform):
    made = psg.per_sample_norm(lambda w, x: (w * x).sum())
    with pytest.raises(psg.InputError, match=rf"psg\.{transform.__name__}: got psg\.per_sample_norm.*, a function of a batch"):
        transform(made)
    with pytest.raises(psg.InputError, match=r"psg\.clipped_grad: got"):
        psg.clipped_grad(made, 1.0)


@pytest.mark.parametrize("method", ["auto", "vmap", "loop", "batch"])
def test_equal_gradients_are_two_tensors_and_aux_is_no_input(method, device):
    params, x = {"a": torch.ones(2, device=device), "b": torch.ones(2, device=device)}, torch.ones(3, 2, device=device)

    def fn(p, x):
        return ((p["a"] + p["b"]) * x).square().sum(-1), x

    grads, aux = psg.per_sample_grad(fn, has_aux=True, method=method)(params, x)
    for leaf in (*grads.values(), aux):
        leaf.mul_(2)
    assert (x == 1).all() and all((leaf == 8).all() for leaf in grads.values())
