"""Reductions over dense, factored and mixed trees, and their errors."""

import io
import math
from collections import OrderedDict
from fractions import Fraction

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg.factors import Dense, Factor, Outer, Rows, Segments, Sum
from psg.testing import (
    assert_trees_close,
    reference_dot,
    reference_flat,
    reference_gram,
    reference_norm,
    reference_weighted_sum,
)
from psg.testing._loop import tree_map


def factored_tree(n, device="cpu"):
    generator = torch.Generator().manual_seed(n)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device)

    index = torch.randint(4, (n, 6), generator=generator).to(device)
    rows = Rows(index, randn(n, 6, 3), 4)
    tied = Sum(
        [Rows(index, randn(n, 6, 3), 4), Outer(randn(n, 5, 4), randn(n, 5, 3))], torch.zeros(n, 0, device=device), torch.Size((4, 3))
    )
    return {"head": [Outer(randn(n, 2, 5), randn(n, 2, 3)), Dense(randn(n, 5))], "table": (rows, tied), "scale": Dense(randn(n))}


def dense_tree(tree):
    return psg.tree.materialize(tree)


def mixed_tree(tree):
    return {**tree, "head": dense_tree(tree["head"]), "scale": dense_tree(tree["scale"])}


KINDS = {"factored": lambda tree: tree, "dense": dense_tree, "mixed": mixed_tree}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
each_count = pytest.mark.parametrize("n", [0, 1, 4])


def direction_of(dense):
    return tree_map(lambda leaf: torch.randn(leaf.shape[1:], device=leaf.device), dense)


@each_kind
@each_count
class TestReductions:
    def test_materialize(self, kind, n, device):
        tree = factored_tree(n, device)
        assert_trees_close(psg.tree.materialize(kind(tree)), dense_tree(tree))
        assert all(isinstance(leaf, torch.Tensor) for leaf in (psg.tree.materialize(kind(tree))["table"]))

    def test_norm(self, kind, n, device):
        tree = factored_tree(n, device)
        assert_trees_close(psg.tree.norm(kind(tree)), reference_norm(dense_tree(tree)))
        assert_trees_close(psg.tree.squared_norm(kind(tree)), reference_norm(dense_tree(tree)).square())

    def test_weighted_sum(self, kind, n, device):
        tree = factored_tree(n, device)
        weights = torch.linspace(-1, 2, n, device=device)
        expected = reference_weighted_sum(dense_tree(tree), weights)
        assert_trees_close(psg.tree.weighted_sum(kind(tree), weights), expected, per_sample=False)
        sparse = psg.tree.sparse_weighted_sum(kind(tree), weights)
        assert sparse["table"][0].is_sparse == isinstance(kind(tree)["table"][0], Rows)
        assert_trees_close(tree_map(lambda leaf: leaf.to_dense() if leaf.is_sparse else leaf, sparse), expected, per_sample=False)

    def test_many_weightings_and_directions(self, kind, n, device):
        tree = factored_tree(n, device)
        dense, weightings = dense_tree(tree), torch.randn(3, n, device=device)
        found = torch.func.vmap(lambda weights: psg.tree.weighted_sum(kind(tree), weights))(weightings)
        expected = [reference_weighted_sum(dense, weights) for weights in weightings]
        assert_trees_close(found, optree.tree_map(lambda *leaves: torch.stack(leaves), *expected), per_sample=False)
        dense_sums = torch.func.vmap(lambda weights: psg.tree.sparse_weighted_sum(kind(tree), weights))(
            weightings
        )  # vmap has no sparse ones
        assert_trees_close(dense_sums, found, per_sample=False)
        expected = torch.stack([reference_dot(dense, direction) for direction in expected], 1)
        assert_trees_close(psg.tree.gram(kind(tree), found), expected, atol=1e-12)

    def test_sum_and_mean(self, kind, n, device):
        tree = factored_tree(n, device)
        dense = dense_tree(tree)
        assert_trees_close(psg.tree.sum(kind(tree)), tree_map(lambda leaf: leaf.sum(0), dense), per_sample=False)
        assert_trees_close(psg.tree.mean(kind(tree)), tree_map(lambda leaf: leaf.mean(0), dense), per_sample=False)

    def test_moments(self, kind, n, device):
        tree = factored_tree(n, device)
        dense = dense_tree(tree)
        found = psg.tree.moments(kind(tree))
        assert_trees_close(found.mean, tree_map(lambda leaf: leaf.mean(0), dense), per_sample=False)
        assert_trees_close(found.second, tree_map(lambda leaf: leaf.square().mean(0), dense), per_sample=False)
        if n:
            expected = tree_map(lambda leaf: leaf.var(0, correction=0), dense)
            assert_trees_close(found.variance, expected, atol=1e-12, per_sample=False)

    def test_project(self, kind, n, device):
        tree = factored_tree(n, device)
        found = psg.tree.project(kind(tree), 16, seed=3)
        assert found.shape == (n, 16)
        assert_trees_close(found, psg.tree.project(dense_tree(tree), 16, seed=3))

    def test_dot(self, kind, n, device):
        tree = factored_tree(n, device)
        direction = direction_of(dense_tree(tree))
        assert_trees_close(psg.tree.dot(kind(tree), direction), reference_dot(dense_tree(tree), direction))

    def test_gram_inner_cosine_with_itself(self, kind, n, device):
        tree = factored_tree(n, device)
        gram, norms = reference_gram(dense_tree(tree)), reference_norm(dense_tree(tree))
        assert_trees_close(psg.tree.gram(kind(tree)), gram)
        assert_trees_close(psg.tree.inner(kind(tree), kind(tree)), gram.diagonal())
        assert_trees_close(psg.tree.cosine(kind(tree)), gram / norms[:, None] / norms)

    @pytest.mark.parametrize("other_kind", KINDS.values(), ids=KINDS.keys())
    def test_gram_inner_cosine_with_another_tree(self, kind, n, other_kind, device):
        tree, other = factored_tree(n, device), factored_tree(3, device)
        a, b = dense_tree(tree), dense_tree(other)
        gram = reference_gram(a, b)
        assert_trees_close(psg.tree.gram(kind(tree), other_kind(other)), gram)
        cosine = gram / reference_norm(a)[:, None] / reference_norm(b)
        assert_trees_close(psg.tree.cosine(kind(tree), other_kind(other)), cosine)
        same = factored_tree(n + 10, device)
        same = psg.tree.take(same, slice(0, n))
        inner = (reference_flat(a) * reference_flat(dense_tree(same))).sum(1)
        assert_trees_close(psg.tree.inner(kind(tree), other_kind(same)), inner)

    def test_flatten_and_unflatten(self, kind, n, device):
        tree = factored_tree(n, device)
        dense = dense_tree(tree)
        flat = psg.tree.flatten(kind(tree))
        assert_trees_close(flat, reference_flat(dense))
        like = tree_map(lambda leaf: torch.zeros(leaf.shape[1:], device=leaf.device), dense)
        assert_trees_close(psg.tree.unflatten(flat, like), dense)

    def test_take(self, kind, n, device):
        tree = kind(factored_tree(n, device))
        zeros = [0] * (3 if n else 0)
        indices = [
            slice(0, 2),
            torch.arange(n, device=device) % 2 == 0,
            torch.tensor(zeros, dtype=torch.int64, device=device),
            torch.tensor(zeros, dtype=torch.uint8, device=device),
            zeros,
            tuple(zeros),
        ]
        for index in indices:
            bytes_ = isinstance(index, torch.Tensor) and index.dtype == torch.uint8
            rows = list(index) if isinstance(index, tuple) else index.long() if bytes_ else index
            expected = tree_map(lambda leaf: leaf[rows], dense_tree(tree))  # noqa: B023
            assert_trees_close(psg.tree.materialize(psg.tree.take(tree, index)), expected)

    def test_concat(self, kind, n, device):
        trees = [kind(factored_tree(count, device)) for count in (n, 2, 0)]
        joined = psg.tree.concat(trees)
        expected = tree_map(lambda *leaves: torch.cat(leaves), *map(dense_tree, trees))
        assert_trees_close(psg.tree.materialize(joined), expected)

    @pytest.mark.parametrize("segments", [0, 1, 3, 6])
    def test_segment_sum(self, kind, n, segments, device):
        tree = kind(factored_tree(n if segments else 0, device))
        ids = torch.tensor([2, 0, 2, 2], device=device)[: psg.tree.materialize(tree)["table"][0].shape[0]] % max(1, segments)
        found = psg.tree.segment_sum(tree, ids, segments)

        def expected(leaf):
            return torch.stack([leaf[ids == k].sum(0) for k in range(segments)]) if segments else leaf

        assert_trees_close(psg.tree.materialize(found), tree_map(expected, dense_tree(tree)), per_sample=False)
        assert_trees_close(psg.tree.norm(found), reference_norm(tree_map(expected, dense_tree(tree))), per_sample=False)
        # The head's gradients are smaller than their factors; a table's sums stay sparse.
        for name, expected_kind in (("head", Dense), ("table", Segments)):
            assert type(found[name][0]) is (torch.Tensor if isinstance(tree[name][0], torch.Tensor) else expected_kind)
        weights = torch.linspace(-1, 2, segments, device=device)
        sparse = psg.tree.sparse_weighted_sum(found, weights)
        assert sparse["table"][0].is_sparse == isinstance(found["table"][0], Segments)
        sums = tree_map(lambda leaf: torch.einsum("m...,m->...", expected(leaf), weights), dense_tree(tree))
        assert_trees_close(psg.tree.weighted_sum(found, weights), sums, per_sample=False, atol=1e-12)
        assert_trees_close(tree_map(lambda leaf: leaf.to_dense(), sparse), sums, per_sample=False, atol=1e-12)
        buffer = io.BytesIO()
        torch.save(found, buffer)
        buffer.seek(0)
        assert_trees_close(psg.tree.norm(torch.load(buffer)), psg.tree.norm(found))

    @pytest.mark.parametrize("reduce", [psg.tree.materialize, psg.tree.norm, psg.tree.sum], ids=lambda reduce: reduce.__name__)
    def test_vmap_over_segments(self, kind, n, reduce, device):
        """In one of them an id is out of range, which is no error where nobody can read it: its sums are NaN."""
        tree = kind(factored_tree(n, device))
        ids = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [2, 2, 2, 2]], device=device)[:, :n]
        summed = lambda ids: reduce(psg.tree.segment_sum(tree, ids, 2))  # noqa: E731
        found = torch.func.vmap(summed)(ids)
        expected = tree_map(lambda *rows: torch.stack(rows), summed(ids[0]), summed(ids[1]))
        assert_trees_close(tree_map(lambda leaf: leaf[:2], found), expected, per_sample=False, atol=1e-12)
        assert all(leaf[2].isnan().all() for leaf in optree.tree_leaves(found)) or n == 0


@pytest.mark.parametrize("n", [0, 1, 5])
def test_products_of_many_small_leaves(n, device):
    """Small dense leaves are joined, but not with those that are factored, complex or of another dtype."""

    def leaves(n, dtype):
        shapes = [(3,), (), (2, 3), (4, 1, 2), (0,), (5,)]
        return [
            *(torch.randn(n, *shape, device=device) for shape in shapes),
            Outer(torch.randn(n, 2, 3, device=device), torch.randn(n, 2, 4, device=device)),
            torch.randn(n, 3, dtype=torch.complex128, device=device),
            torch.randn(n, 4, 3, device=device).mT,
            torch.randint(-3, 4, (n, 2), device=device).to(dtype),
        ]

    def added(function, *trees):
        return sum(function(*([leaf] for leaf in column)) for column in zip(*trees, strict=True))  # leaf by leaf: nothing to join

    tree, other, same_n = leaves(n, torch.float32), leaves(3, torch.float64), leaves(n, torch.float64)
    direction = psg.tree.sum(other)
    for found, expected in (
        (psg.tree.gram(tree), added(psg.tree.gram, tree)),
        (psg.tree.gram(tree, other), added(psg.tree.gram, tree, other)),
        (psg.tree.gram(other, tree), added(psg.tree.gram, other, tree)),
        (psg.tree.inner(tree, same_n), added(psg.tree.inner, tree, same_n)),
        (psg.tree.dot(tree, direction), added(psg.tree.dot, tree, direction)),
    ):
        assert_trees_close(found, expected, per_sample=False, atol=1e-12)


def test_sums_of_large_segments_keep_their_digits(device):
    ones = torch.ones(5000, 1, dtype=torch.bfloat16, device=device)
    assert psg.tree.segment_sum(ones, torch.zeros(5000, dtype=torch.int64, device=device), 1).item() == 4992  # 5000, rounded once


@pytest.mark.parametrize(
    "ids, message",
    [
        (torch.tensor([0, 1, 2]), "from 0 to 2, with 2 segments"),
        (torch.tensor([0, -1, 1]), "from -1 to 1"),
        (torch.tensor([0, 1]), r"integers \[3\], one for each sample, got torch.int64 \(2,\)"),
        (torch.tensor([0.0, 1.0, 1.0]), "got torch.float"),
        (torch.tensor([True, False, True]), "got torch.bool"),
        ([0, 1, 1], "got list"),
    ],
)
def test_segments_out_of_range_are_an_error(ids, message):
    with pytest.raises(psg.InputError, match=f"segment_sum: .*{message}"):
        psg.tree.segment_sum(torch.ones(3, 2), ids, 2)


@pytest.mark.parametrize("count", [2.5, -1, True])
def test_a_number_of_segments_that_is_none_is_an_error(count):
    with pytest.raises(psg.InputError, match="num_segments=.*: expected an integer"):
        psg.tree.segment_sum(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64), count)


def test_a_number_of_segments_as_a_tensor(device):
    users, tree = torch.tensor([0, 2, 2], device=device), torch.ones(3, 2, device=device)
    assert torch.equal(psg.tree.segment_sum(tree, users, users.max() + 1), psg.tree.segment_sum(tree, users, 3))


def test_rows_by_integers_of_32_bits(device):
    index, cotangent = torch.randint(40_000, (3, 4), device=device), torch.randn(3, 4, 5, device=device)
    short, long = Rows(index.int(), cotangent, 40_000), Rows(index, cotangent, 40_000)
    for reduce in (lambda tree: psg.tree.project(tree, 16), psg.tree.moments, psg.tree.norm, psg.tree.gram):
        assert_trees_close(reduce(short), reduce(long), per_sample=False)


def test_integers_among_the_gradients_stay_what_they_are(device):
    ids = torch.tensor([5, -(2**53)], device=device)
    assert torch.equal(psg.tree.materialize({"ids": ids})["ids"], ids)
    assert torch.equal(psg.tree.flatten({"ids": ids, "w": ids.int()[:, None].expand(2, 3)})[:, 0], ids)
    tree = {"ids": ids[:, None], "w": torch.randn(2, 3, device=device, dtype=torch.float64)}
    flat = psg.tree.flatten(tree)
    assert torch.equal(flat, torch.cat([tree["ids"].double(), tree["w"]], 1))
    back = psg.tree.unflatten(flat, {name: leaf[0] for name, leaf in tree.items()})
    assert all(torch.equal(back[name], leaf) and back[name].dtype == leaf.dtype for name, leaf in tree.items())


@pytest.mark.filterwarnings("error")  # torch warns where it discards an imaginary part
def test_unflatten_gives_every_leaf_its_dtype(device):
    dtypes = {"half": torch.bfloat16, "real": torch.float32, "complex": torch.complex64}
    tree = {name: torch.randn(4, 2, 3, dtype=dtype, device=device) for name, dtype in dtypes.items()}
    like = {name: leaf.new_zeros(2, 3) for name, leaf in tree.items()}
    back = psg.tree.unflatten(psg.tree.flatten(tree), like)
    assert all(torch.equal(back[name], leaf) and back[name].dtype == leaf.dtype for name, leaf in tree.items())
    two = {name: tree[name] for name in ("half", "real")}
    assert psg.tree.unflatten(psg.tree.flatten(two)[0], {name: leaf[0] for name, leaf in two.items()})["half"].dtype == torch.bfloat16
    wider = psg.tree.unflatten(torch.zeros(6, dtype=torch.float64, device=device), {"real": like["real"]})
    assert wider["real"].dtype == torch.float64


def test_unflatten_of_a_vector_with_numbers_among_the_leaves(device):
    params = {"w": torch.randn(2, 3, device=device), "scale": torch.randn((), device=device)}
    flat = psg.tree.flatten({name: value[None] for name, value in params.items()})
    assert_trees_close(psg.tree.unflatten(flat[0], params), params, per_sample=False)


def test_unflatten_needs_tensors(device):
    with pytest.raises(psg.InputError, match=r"like\['a'\] is a float; expected a tensor"):
        psg.tree.unflatten(torch.zeros(3, device=device), {"a": 1.0, "b": torch.zeros(2, device=device)})
    gradients = {"w": psg.factors.Outer(torch.ones(4, 1, 3, device=device), torch.ones(4, 1, 2, device=device))}
    with pytest.raises(psg.InputError, match=r"like\['w'\] is an Outer; .* like is a tree like the parameters"):
        psg.tree.unflatten(torch.zeros(4, 6, device=device), gradients)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_take_by_integers_of_any_size(dtype, device):
    values = torch.randn(4, 3, device=device)
    assert torch.equal(psg.tree.take(values, torch.tensor([2, 0, 1], dtype=dtype, device=device)), values[[2, 0, 1]])


@pytest.mark.parametrize("flat, got", [([1.0, 2.0], "a list"), (torch.tensor(1.0), "a tensor without dimensions")])
def test_unflatten_of_what_is_no_tensor_of_rows(flat, got):
    with pytest.raises(psg.InputError, match=rf"unflatten: expected a tensor \[\.\.\., 2\], got {got}"):
        psg.tree.unflatten(flat, {"a": torch.zeros(2)})


def test_a_default_device_changes_nothing(device):
    """Not even one where no tensor is: the tensors that psg makes itself are on the gradients' device, or on the CPU."""
    tree = factored_tree(3, device)
    weights = torch.rand(3, device=device)
    compute = [
        lambda: psg.tree.project(tree, 8),
        lambda: psg.tree.project([Dense(torch.ones(3, 2, device=device))] * 6, 8),
        lambda: psg.tree.take(tree, [2, 0])["head"][1].values,
        lambda: psg.tree.sparse_weighted_sum(tree, weights)["table"][0].to_dense(),
    ]
    expected = [function() for function in compute]
    with torch.device("meta"):
        found = [function() for function in compute]
    assert_trees_close(found, expected)


def test_projections_keep_inner_products(device):
    # Over seeds, their mean is right within five standard errors, and their variance is below the stated bound.
    tree = factored_tree(4, device)
    gram, dim, seeds = psg.tree.gram(tree), 8, 400
    projected = torch.stack([psg.tree.project(tree, dim, seed=seed) for seed in range(seeds)])
    products = projected @ projected.transpose(1, 2)
    bound = 11 / dim * gram.diagonal()[:, None] * gram.diagonal()
    assert (products.var(0) < bound).all()
    assert ((products.mean(0) - gram).abs() < 5 * products.std(0) / seeds**0.5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("n", [0, 3])
def test_projections_of_many_small_leaves(n, dtype, device):
    """Small leaves are hashed together: their projection is the sum of those of each leaf, whose key it depends on."""
    shapes = [(3,), (), (2, 3), (4, 1, 2), (0,), (3, 0), (5,), (16, 17)]
    tree = {str(i): torch.randn(n, *shape, dtype=dtype, device=device) for i, shape in enumerate(shapes)}
    tree |= {"low": torch.randn(n, 3, device=device).bfloat16(), "strided": torch.randn(n, 4, 3, device=device).mT}
    apart = sum(psg.tree.project({name: leaf}, 64, seed=1) for name, leaf in tree.items())
    assert_trees_close(psg.tree.project(tree, 64, seed=1), apart)


def test_a_projection_depends_on_its_seed_alone(device):
    tree = factored_tree(4, device)
    first = psg.tree.project(tree, 8)
    torch.manual_seed(1)
    again = psg.tree.project(tree, 8)
    if device.type == "cpu":
        assert torch.equal(again, first)
    assert_trees_close(again, first)  # an accelerator adds up in any order
    assert not torch.allclose(psg.tree.project(tree, 8, seed=1), first)
    assert_trees_close(psg.tree.project(psg.tree.take(tree, [2, 1]), 8), first[[2, 1]])
    # Named parameters come as a dict, a state_dict as an OrderedDict in another order.
    names = {"w": torch.randn(3, 5, device=device), "b": torch.randn(3, 2, device=device)}
    assert_trees_close(psg.tree.project(OrderedDict(names), 64), psg.tree.project(names, 64), per_sample=False)
    assert_trees_close(psg.tree.project(OrderedDict(reversed(names.items())), 64), psg.tree.project(names, 64), per_sample=False)
    # Leaves of one shape have different projections: otherwise opposite leaves would cancel for every seed.
    leaf = torch.randn(3, 5, device=device)
    assert (psg.tree.project([leaf, -leaf], 64).abs().amax(1) > 0).all()


def test_moments_and_projections_of_complex_and_low_precision(device):
    pairs = torch.randn(4, 3, 2, device=device)
    tree = torch.view_as_complex(pairs)
    assert_trees_close(psg.tree.moments(tree).second, pairs.square().sum(2).mean(0), per_sample=False)
    assert_trees_close(psg.tree.project(tree, 8), psg.tree.project(pairs, 8))
    low = pairs.bfloat16()
    for part in (*psg.tree.moments(low), psg.tree.moments(low).variance, psg.tree.project(low, 8)):
        assert part.dtype == torch.float32
    assert_trees_close(psg.tree.moments(low).second, low.float().square().mean(0), rtol=1e-6, per_sample=False)


def test_a_variance_is_never_negative(device):
    equal = torch.rand(500, device=device).float().expand(3, 500)  # of which rounding leaves numbers on both sides of zero
    assert (psg.tree.moments(equal).variance >= 0).all()


def test_a_mean_is_as_exact_as_its_gradients(device):
    torch.set_default_dtype(torch.float32)
    values = torch.rand(3, 5, dtype=torch.float64, device=device)
    assert_trees_close(psg.tree.mean(values), values.mean(0), per_sample=False, rtol=1e-14)


def test_moments_of_an_embedding_never_become_dense_per_sample(device):
    rows = Rows(torch.randint(10**6, (64, 8), device=device), torch.randn(64, 8, 4, device=device), 10**6)  # dense: 2 GB
    found = psg.tree.moments(rows)
    assert found.second.count_nonzero() <= 64 * 8 * 4
    assert_trees_close(found.second.sum() * 64, psg.tree.squared_norm(rows).sum(), rtol=1e-5, per_sample=False)
    assert psg.tree.project(rows, 16).isfinite().all()


def test_take_and_concat_keep_factors(device):
    tree = factored_tree(3, device)
    for kept in (psg.tree.take(tree, slice(1, 3)), psg.tree.concat([tree, tree])):
        assert type(kept["head"][0]) is Outer
        assert type(kept["table"][0]) is Rows
        assert type(kept["table"][1]) is Sum


def test_take_and_concat_keep_tensors(device):
    tree = dense_tree(factored_tree(3, device))
    for kept in (psg.tree.take(tree, slice(1, 3)), psg.tree.concat([tree, tree])):
        assert isinstance(kept["head"][0], torch.Tensor)


def test_concat_takes_any_iterable(device):
    halves = torch.randn(2, 3, 4, device=device)
    assert_trees_close(psg.tree.concat(half for half in halves), halves.flatten(0, 1))


def test_the_norm_of_a_tree_of_sums_is_torch_s(device):
    loss = lambda p, x: (p["w"] @ x + p["b"]).square().sum()  # noqa: E731
    params = {"w": torch.randn(4, 3, device=device), "b": torch.randn(4, device=device)}
    out = psg.clipped_grad(loss, math.inf)(params, torch.randn(5, 3, device=device))
    expected = torch.linalg.vector_norm(torch.cat([out.grads["w"].flatten(), out.grads["b"]]))
    assert_trees_close(torch.nn.utils.get_total_norm(optree.tree_leaves(out.grads)), expected, per_sample=False)


def test_a_weight_of_zero_does_not_take_out_a_gradient_that_is_not_finite(device):
    # As the docstring says; the alternatives that it names do.
    grads = torch.tensor([[1.0, 2.0], [math.nan, 4.0]], device=device)
    assert psg.tree.weighted_sum(grads, torch.tensor([1.0, 0.0], device=device))[0].isnan()
    assert torch.equal(psg.tree.sum(psg.tree.take(grads, torch.tensor([True, False], device=device))), grads[0])
    out = psg.clipped_grad(lambda w, x: (w * x).sum(), math.inf)(torch.ones(2, device=device), grads)
    assert torch.equal(out.grads, grads[0])


def test_concat_of_factors_that_differ_in_positions(device):
    def tree(n, t):
        return [Outer(torch.randn(n, t, 3, device=device), torch.randn(n, t, 2, device=device))]

    trees = [tree(2, 5), tree(1, 3)]
    expected = torch.cat([leaf.materialize() for (leaf,) in trees])
    assert_trees_close(psg.tree.materialize(psg.tree.concat(trees)), [expected])


def test_cosine_of_a_zero_gradient_is_zero(device):
    grads = {"w": torch.tensor([[3.0, 4.0], [0.0, 0.0]], device=device)}
    assert psg.tree.cosine(grads).tolist() == [[pytest.approx(1.0), 0.0], [0.0, 0.0]]


def test_complex_leaves_count_as_pairs_of_real_numbers(device):
    values = torch.complex(torch.randn(3, 4), torch.randn(3, 4)).to(device)
    other = torch.complex(torch.randn(3, 4), torch.randn(3, 4)).to(device)
    weights = torch.linspace(-1, 1, 3, device=device)
    for kind in (lambda x: x, Dense):
        assert_trees_close(psg.tree.norm([kind(values)]), torch.linalg.vector_norm(values, dim=1))
        assert_trees_close(psg.tree.gram([kind(values)], [kind(other)]), (values @ other.mH).real)
        assert_trees_close(psg.tree.inner([kind(values)], [kind(other)]), (values * other.conj()).sum(1).real)
        assert_trees_close(psg.tree.dot([kind(values)], [other[0]]), (values * other[0].conj()).sum(1).real)
        assert_trees_close(psg.tree.weighted_sum([kind(values)], weights), [weights.to(values.dtype) @ values], per_sample=False)


def test_conjugates_that_are_not_yet_computed(device):
    # z.conj() is z's memory with a mark, which view_as_real refuses.
    plain = torch.complex(torch.randn(3, 4), torch.randn(3, 4)).to(device)
    lazy, other, weights = plain.conj(), plain.conj().resolve_conj(), torch.linspace(-1, 1, 3, device=device)
    assert lazy.is_conj() and not other.is_conj()
    functions = (psg.tree.norm, psg.tree.squared_norm, psg.tree.gram, psg.tree.cosine, reference_flat, lambda g: psg.tree.project(g, 5))
    for function in (*functions, lambda g: psg.tree.inner(g, plain), lambda g: psg.tree.inner(plain, g)):
        assert_trees_close(function(lazy), function(other))
    for function in (psg.tree.moments, lambda g: psg.tree.weighted_sum(g, weights), lambda g: psg.tree.dot(plain, g[0])):
        assert_trees_close(function(lazy), function(other), per_sample=False)
    noisy = [psg.tree.add_noise(sums, 1.0, generator=generator_of(device)) for sums in (lazy, other)]
    assert_trees_close(*noisy)


def test_functions_of_a_bare_leaf(device):
    values = torch.randn(3, 2, device=device)
    for leaf in (values, Dense(values)):
        assert_trees_close(psg.tree.norm(leaf), torch.linalg.vector_norm(values, dim=1))
        assert_trees_close(psg.tree.materialize(leaf), values)


@given(n=st.integers(0, 5), split=st.integers(0, 5), seed=st.integers(0, 2**16))
def test_take_undoes_concat(n, split, seed, device):
    tree = factored_tree(n, device)
    parts = [psg.tree.take(tree, slice(0, split)), psg.tree.take(tree, slice(split, None))]
    assert_trees_close(dense_tree(psg.tree.concat(parts)), dense_tree(tree))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(device)
    assert_trees_close(psg.tree.norm(psg.tree.take(tree, order)), psg.tree.norm(tree)[order])


@pytest.mark.parametrize("n", range(1, 6))
def test_cauchy_schwarz_and_symmetry(n, device):
    tree = factored_tree(n, device)
    gram, norms = psg.tree.gram(tree), psg.tree.norm(tree)
    assert_trees_close(gram, gram.T)
    assert_trees_close(gram.diagonal().sqrt(), norms)
    assert (psg.tree.cosine(tree).abs() <= 1 + 1e-6).all()


CANCELLING = {
    "linear": (lambda w, x, c: ((x @ w) * c).sum(), (64, 64), (1, 64), (1, 64)),
    "conv": (lambda w, x, c: (F.conv1d(x, w) * c).sum(), (8, 32, 1), (1, 32, 1), (1, 8, 1)),
    "twice": (lambda w, x, c: ((x[0] @ w) * c[0]).sum() + ((x[1] @ w) * c[1]).sum(), (64, 64), (1, 64), (1, 64)),
}


@pytest.mark.parametrize(("fn", "weight", "sample", "cotangent"), CANCELLING.values(), ids=CANCELLING)
def test_cosines_of_gradients_whose_terms_cancel(fn, weight, sample, cotangent, device):
    """Of inner products of the terms, rounding errors alone would be left."""
    if device.type != "cpu":
        pytest.skip("norms are not read: see help(psg.tree.cosine)")
    x, c = torch.randn(3, *sample).float(), torch.randn(3, *cotangent).float()
    x, c = torch.cat([x, x + 1e-4 * torch.randn(x.shape).float()], 1), torch.cat([c, -c], 1)
    g, other = (
        psg.factored_grad(fn, method="capture")(torch.zeros(weight).float(), *args) for args in ((x, c), (x.flip(0), x.new_ones(c.shape)))
    )
    a, b = (psg.tree.materialize(own).double() for own in (g, other))
    for found, expected in (
        (psg.tree.cosine(g), psg.tree.cosine(a)),
        (psg.tree.cosine(g, other), psg.tree.cosine(a, b)),
        (psg.tree.cosine(other, g), psg.tree.cosine(b, a)),
    ):
        assert_trees_close(found.double(), expected, rtol=0, atol=1e-4)


SHAPES = st.sampled_from([(), (1,), (3,), (2, 4), (0,), (5, 2, 3), (9000,)])
DTYPES = st.sampled_from([torch.float64, torch.float64, torch.float32, torch.complex128])


@given(leaves=st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=9), n=st.integers(0, 4), seed=st.integers(0, 2**16))
def test_many_small_leaves_among_others(leaves, n, seed, device):
    generator = torch.Generator().manual_seed(seed)
    tree = [torch.randn(n, *shape, dtype=dtype, generator=generator).to(device) for shape, dtype in leaves]
    tree.insert(len(tree) // 2, Outer(torch.randn(n, 2, 5, generator=generator).to(device), torch.ones(n, 2, 3, device=device)))
    weights = torch.rand(n, generator=generator).to(device)
    tolerance = {torch.float32: 1e-6}
    loosest = max(tolerance.get(dtype, 1e-12) for _, dtype in leaves)
    squares = [(leaf.abs().double().reshape(n, leaf.shape[1:].numel()) ** 2).sum(1) for leaf in map(psg.tree.materialize, tree)]
    assert_trees_close(psg.tree.norm(tree).double(), sum(squares).sqrt(), rtol=loosest)
    sums = psg.tree.weighted_sum(tree, weights)
    for leaf, total in zip(tree, sums, strict=True):
        values = psg.tree.materialize(leaf)
        expected = (values.to(torch.promote_types(values.dtype, torch.float64)) * weights.view(-1, *(1,) * (values.ndim - 1))).sum(0)
        assert total.dtype == values.dtype
        assert_trees_close(
            total.to(expected.dtype), expected, rtol=tolerance.get(values.dtype, 1e-12), atol=tolerance.get(values.dtype, 1e-12)
        )
    held = [total.untyped_storage().data_ptr() for total in sums if total.numel()]
    assert len(set(held)) == len(held)  # results share no memory


def test_a_complex_leaf_meets_a_real_one_in_factors(device):
    one = torch.randn(3, 5, 4, dtype=torch.complex128, device=device)
    other = Outer(torch.randn(3, 2, 5, device=device), torch.randn(3, 2, 4, device=device))
    rows = torch.view_as_real(one)[..., 0]  # the inner product is that of the real parts
    assert_trees_close(psg.tree.inner(one, other), (rows * other.materialize()).sum((1, 2)))
    assert_trees_close(psg.tree.gram(other, one), reference_flat(other.materialize()) @ reference_flat(rows).T)


PRODUCTS = st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(0, 200))


@given(
    products=st.lists(PRODUCTS, min_size=1, max_size=5),
    vectors=st.lists(st.integers(0, 5), max_size=5),
    n=st.integers(0, 40),
    m=st.integers(0, 3),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_many_small_products(products, vectors, n, m, dtype, seed, device):
    """Outer products, some of them small enough to be materialised and reduced with the others."""
    generator = torch.Generator().manual_seed(seed)

    def tree_of(count):
        def draw(*shape):
            return torch.randn(count, *shape, dtype=torch.float64, generator=generator).to(dtype).to(device)

        return [*(Outer(draw(t, a), draw(t, b)) for t, a, b in products), *(Dense(draw(width)) for width in vectors)]

    def exact(tree):
        return [leaf.to(torch.float64).materialize() for leaf in tree]

    tree, other = tree_of(n), tree_of(m)
    dense, others = exact(tree), exact(other)
    weights = torch.rand(n, generator=generator, dtype=torch.float64).to(device)
    loose = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.01}[dtype]
    size = 1 + sum(leaf.square().sum() for leaf in dense).sqrt() * (1 + sum(leaf.square().sum() for leaf in others).sqrt())

    def close(found, expected):
        assert_trees_close(tree_map(torch.Tensor.double, found), expected, rtol=loose, atol=float(loose * size), per_sample=False)

    close(psg.tree.norm(tree), reference_norm(dense))
    close(psg.tree.weighted_sum(tree, weights), reference_weighted_sum(dense, weights))
    close(psg.tree.gram(tree), reference_gram(dense))
    close(psg.tree.gram(tree, other), reference_flat(dense) @ reference_flat(others).T)
    close(psg.tree.inner(tree, tree), reference_norm(dense).square())
    close(psg.tree.project(tree, 8, seed=1), psg.tree.project(dense, 8, seed=1))
    out = psg.tree.clip(tree, clip_norm=1.0)
    close(out.norms, reference_norm(dense))
    close(out.grads, reference_weighted_sum(dense, 1 / reference_norm(dense).clamp(min=1)))


# --- noise --------------------------------------------------------------------------------------------------


def generator_of(device, seed=0):
    return torch.Generator(device).manual_seed(seed)


def test_noise_is_normal_and_independent(device):
    sums = {"a": torch.full((200, 300), 5.0, device=device), "b": torch.zeros(60_000, device=device), "c": torch.zeros((), device=device)}
    noisy = psg.tree.add_noise(sums, 3.0, generator=generator_of(device))
    z = torch.stack([(noisy["a"] - 5).flatten(), noisy["b"]]) / 3
    # Six standard errors of 60 000 draws.
    assert z.mean(1).abs().max() < 6 / 60_000**0.5
    assert (z.std(1) - 1).abs().max() < 6 / 120_000**0.5
    assert (z[0] @ z[1] / 60_000).abs() < 6 / 60_000**0.5
    assert ((z**4).mean(1) - 3).abs().max() < 6 * (96 / 60_000) ** 0.5
    assert noisy["c"].shape == () and noisy["c"] != 0


def test_noise_follows_its_generator_and_leaves_the_rest_alone(device):
    sums = [torch.ones(3, 2, device=device), torch.ones(4, device=device)]
    before, state = [leaf.clone() for leaf in sums], torch.get_rng_state()
    noisy = psg.tree.add_noise(sums, 0.5, generator=generator_of(device))
    assert_trees_close(sums, before)
    assert torch.equal(torch.get_rng_state(), state)
    for std in (torch.tensor(0.5, device=device), Fraction(1, 2)):
        assert_trees_close(psg.tree.add_noise(sums, std, generator=generator_of(device)), noisy)
    assert not torch.equal(psg.tree.add_noise(sums, 0.5, generator=generator_of(device, seed=1))[1], noisy[1])
    assert_trees_close(psg.tree.add_noise(sums, 0), before)
    assert len({leaf.untyped_storage().data_ptr() for leaf in (*noisy, *sums)}) == 4  # no two tensors share memory


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128]
)
def test_noise_keeps_the_dtype(dtype, device):
    sums = {"x": torch.full((40_000,), 2.0, dtype=dtype, device=device), "other": torch.zeros(3, dtype=torch.float32, device=device)}
    noisy = psg.tree.add_noise(sums, 0.5, generator=generator_of(device))
    assert noisy["x"].dtype == dtype and noisy["other"].dtype == torch.float32
    parts = torch.view_as_real(noisy["x"] - 2).T if dtype.is_complex else (noisy["x"].double() - 2)[None]
    assert (parts.std(1) - 0.5).abs().max() < 6 * 0.5 / 80_000**0.5 + (0.5 * 2**-8 if dtype == torch.bfloat16 else 0)
    if dtype == torch.bfloat16:  # rounded once, after the sum
        drawn = torch.randn(40_000, dtype=torch.float32, device=device, generator=generator_of(device))
        assert torch.equal(psg.tree.add_noise(sums["x"], 0.5, generator=generator_of(device)), (2 + drawn * 0.5).bfloat16())


def test_noise_has_the_derivatives_of_a_sum(device):
    sums = torch.ones(3, device=device, requires_grad=True)
    std = torch.tensor(0.5, device=device, requires_grad=True)
    noisy = psg.tree.add_noise([sums], std, generator=generator_of(device))[0]
    by_sums, by_std = torch.autograd.grad(noisy.sum(), [sums, std])
    assert_trees_close(by_sums, torch.ones_like(sums))
    assert_trees_close(by_std, ((noisy - 1) / 0.5).sum().detach())


def test_noise_under_vmap_is_drawn_as_its_randomness_says(device):
    sums = {"a": torch.zeros(2, 300, device=device), "b": torch.ones(2, device=device)}
    noisy = torch.func.vmap(lambda tree: psg.tree.add_noise(tree, 1.0), randomness="different")(sums)
    assert noisy["a"].shape == (2, 300) and not torch.equal(noisy["a"][0], noisy["a"][1])
    noisy = torch.func.vmap(lambda tree: psg.tree.add_noise(tree, 1.0), randomness="same")(sums)
    assert torch.equal(noisy["a"][0], noisy["a"][1]) and noisy["b"][0] == noisy["b"][1] != 1


def test_means_of_large_gradients_in_16_bits_do_not_overflow(device):
    gradients = torch.full((256, 2), 300.0, dtype=torch.float16, device=device)
    assert torch.equal(psg.tree.mean(gradients), gradients[0])
    assert psg.tree.mean(gradients[:0]).isnan().all()


def test_outer_products_in_16_bits_are_not_rounded_before_they_are_added_up(device):
    """Not in many small leaves either, which are reduced together: (1 + 2^-7)^2 is between two numbers of bfloat16."""
    side = torch.full((2, 1, 1), 1 + 2.0**-7, dtype=torch.bfloat16, device=device)
    out = psg.tree.clip({name: Outer(side, side) for name in "abcd"}, math.inf)
    assert {grad.item() for grad in out.grads.values()} == {2 * (1 + 2.0**-7) ** 2}


def test_directions_of_another_dtype(device):
    left, right = torch.randn(3, 2, 4, device=device), torch.randn(3, 2, 5, device=device)
    direction = torch.randn(4, 5, device=device).float()
    expected = torch.einsum("nta,ntb,ab->n", left, right, direction.to(left.dtype))
    for factor in (Outer(left, right), Dense(Outer(left, right).materialize())):
        torch.testing.assert_close(psg.tree.dot(factor, direction), expected)


# --- errors -------------------------------------------------------------------------------------------------

VALUES = torch.ones(3, 2, dtype=torch.float32)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: psg.tree.norm({}), r"psg\.tree\.norm: .*no leaves"),
        (lambda: psg.tree.norm({"w": "text"}), r"psg\.tree\.norm: expected .*tensors \[n, \.\.\.\].*; tree\['w'\] is a str"),
        (lambda: psg.tree.norm(torch.tensor(1.0)), r"psg\.tree\.norm: .*; tree is a scalar tensor"),
        (lambda: psg.tree.norm([VALUES, VALUES[:2]]), r"psg\.tree\.norm: .*disagree.*: tree\[0\] has 3 and tree\[1\] 2\. .*sums"),
        (lambda: psg.tree.sparse_weighted_sum(VALUES, torch.ones(2)), r"psg\.tree\.sparse_weighted_sum: expected .*\(3,\), got \(2,\)"),
        (lambda: psg.tree.weighted_sum(VALUES, torch.ones(2)), r"psg\.tree\.weighted_sum: expected .*\(3,\), got \(2,\)"),
        (lambda: psg.tree.dot({"a": VALUES}, {"b": VALUES[0]}), r"structure: only the direction has tree\['b'\], only .*\['a'\]\.$"),
        # The thousand names of a large model are no message.
        (lambda: psg.tree.gram(dict.fromkeys("abcdefg", VALUES), {"a": VALUES}), r": only the first has (tree\['.'\],? ){3}and 3 more\.$"),
        (lambda: psg.tree.dot(VALUES, torch.ones(5)), r"psg\.tree\.dot: direction has shape \(5,\), expected \(2,\)"),
        (lambda: psg.tree.dot({"a": Dense(VALUES), "w": VALUES}, {"a": VALUES[0], "w": VALUES}), r"direction\['w'\] has shape \(3, 2\)"),
        (lambda: psg.tree.dot([VALUES], [1.0]), r"psg\.tree\.dot: direction\[0\] is a float, expected \(2,\)"),
        (lambda: psg.tree.inner(VALUES, VALUES[:2]), r"psg\.tree\.inner: .*3 and 2 samples.*gram"),
        (lambda: psg.tree.inner([VALUES], [VALUES, VALUES]), r"psg\.tree\.inner: .*differ in structure"),
        (lambda: psg.tree.gram([VALUES], (VALUES,)), r"psg\.tree\.gram: .*structure: the first is .*\[\*\].*, the second .*\(\*,\)"),
        (lambda: psg.tree.take(VALUES, 1), r"psg\.tree\.take: expected .*got 1; .*slice\(k, k \+ 1\)"),
        (lambda: psg.tree.take(VALUES, [[0], [1]]), r"psg\.tree\.take: expected .*got \[\[0\], \[1\]\]"),
        (lambda: psg.tree.take(VALUES, torch.ones(3).bool().to_sparse()), r"psg\.tree\.take: expected a slice, integers .* or a mask"),
        (lambda: psg.tree.take(VALUES, torch.tensor(1)), r"psg\.tree\.take: expected .*got tensor\(1\)"),
        (lambda: psg.tree.inner(VALUES, VALUES[:, :1]), r"psg\.tree\.inner: tree has shape \(2,\) for one sample, but \(1,\) in the other"),
        (lambda: psg.tree.inner({"a": VALUES, "b": VALUES}, {"a": VALUES, "b": VALUES[:, :1]}), r"inner: tree\['b'\] has shape \(2,\)"),
        (lambda: psg.tree.gram(Outer(VALUES[:, None], VALUES[:, None]), VALUES), r"psg\.tree\.gram: .*\(2, 2\) for one sample, but \(2,\)"),
        (lambda: psg.tree.weighted_sum(VALUES, [1.0, 2.0, 3.0]), r"psg\.tree\.weighted_sum: expected real weights .*got list"),
        (lambda: psg.tree.weighted_sum(VALUES, 1j * torch.ones(3)), r"weighted_sum: expected real .*got \(3,\) of torch.complex"),
        (lambda: psg.tree.concat([]), r"psg\.tree\.concat: .*at least one tree"),
        (lambda: psg.tree.concat([[VALUES], (VALUES,)]), r"psg\.tree\.concat: .*differ in structure"),
        (lambda: psg.tree.project(VALUES, 0), r"psg\.tree\.project: dim=0: expected an integer that is at least 1"),
        (lambda: psg.tree.project(VALUES, 8.0), r"psg\.tree\.project: dim=8\.0"),
        (lambda: psg.tree.project(VALUES, 8, seed="a"), r"psg\.tree\.project: seed='a': expected an integer\."),
        (lambda: psg.tree.project([], 8), r"psg\.tree\.project: .*no leaves"),
        (lambda: psg.tree.moments([]), r"psg\.tree\.moments: .*no leaves"),
        (lambda: psg.tree.add_noise([], 1.0), r"psg\.tree\.add_noise: .*no leaves"),
        (lambda: psg.tree.add_noise([torch.ones(2, dtype=torch.int64)], 1.0), r"add_noise: .*; tree\[0\] is of dtype torch\.int64"),
        (lambda: psg.tree.add_noise({"w": Dense(VALUES)}, 1.0), r"psg\.tree\.add_noise: .*; tree\['w'\] is a Dense"),
        (lambda: psg.tree.add_noise(VALUES.to_sparse(), 1.0), r"add_noise: tree is a tensor of layout torch.sparse_coo.*to_dense"),
        (lambda: psg.tree.add_noise(VALUES.to(torch.float8_e4m3fn), 1.0), r"add_noise: .*; tree is of dtype torch\.float8_e4m3fn"),
        (lambda: psg.tree.add_noise(torch.nested.nested_tensor([VALUES], layout=torch.jagged), 1.0), r"add_noise: tree is a nested tensor"),
        (lambda: psg.tree.add_noise(VALUES, 1.0, generator=0), r"add_noise: generator: expected .*, got an int\..*manual_seed"),
        (lambda: psg.tree.norm(VALUES.to_sparse()), r"norm: expected .*dense tensors .*; tree is a tensor of layout torch\.sparse"),
        (lambda: psg.tree.sum([torch.nested.nested_tensor([VALUES], layout=torch.jagged)]), r"sum: .*; tree\[0\] is a nested tensor"),
        (lambda: psg.tree.cosine(1.0), r"psg\.tree\.cosine: expected .*; tree is a float"),
        (lambda: psg.tree.dot(VALUES, VALUES[0].to_sparse()), r"dot: direction is a tensor of layout torch\.sparse_coo, .*to_dense\(\)"),
        (lambda: psg.tree.dot([Dense(VALUES)], [Dense(VALUES)]), r"dot: direction\[0\] is a Dense, expected \(2,\)"),
        (lambda: psg.tree.add_noise(VALUES, -1.0), r"psg\.tree\.add_noise: std=-1\.0: expected a number that is at least 0"),
        (lambda: psg.tree.add_noise(VALUES, "1"), r"psg\.tree\.add_noise: std='1': expected a number that is at least 0"),
        (lambda: psg.tree.add_noise(VALUES, torch.ones(2)), r"psg\.tree\.add_noise: std=tensor\(\[1\., 1\.\].*: expected a number"),
        (lambda: psg.tree.concat(torch.ones(3, 2)), r"concat: expected a list of trees, got a Tensor; one tree alone is \[tree\]"),
        (lambda: psg.tree.concat({"a": VALUES}), r"psg\.tree\.concat: expected a list of trees, got a dict"),
        (lambda: psg.tree.concat(psg.factors.Dense(torch.ones(3, 2))), r"psg\.tree\.concat: expected a list of trees, got a Dense"),
        (lambda: psg.tree.concat(None), r"psg\.tree\.concat: expected a list of trees, got a NoneType"),
        (lambda: psg.tree.unflatten(torch.ones(3, 5), {"a": torch.zeros(2)}), r"psg\.tree\.unflatten: expected 2 .*got 5"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(psg.InputError, match=message):
        call()


@pytest.mark.parametrize("weights", [[True, False, True], [2, 0, -3]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_weights_may_be_counts_and_masks(weights, dtype, device):
    weights, values = torch.tensor(weights, device=device), VALUES.to(device, dtype)
    for tree in (values, Outer(values[:, None], values[:, None])):
        for sums in (psg.tree.weighted_sum, psg.tree.sparse_weighted_sum):
            assert_trees_close(sums(tree, weights), sums(tree, weights.double()))


def test_factor_is_the_name_of_all_kinds():
    assert all(issubclass(kind, Factor) for kind in (Dense, Outer, Rows, Sum, psg.factors.Conv))


def test_leaves_of_other_dtypes_meet_in_the_wider(device):
    single, double = (torch.randn(3, 2, 4, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64))
    tree, other = {"a": Outer(single, single), "b": double}, {"a": Outer(double, double), "b": single}
    for reduce in (psg.tree.gram, psg.tree.inner):
        exact = reduce(*(tree_map(lambda leaf: leaf.double(), psg.tree.materialize(side)) for side in (tree, other)))
        assert_trees_close(reduce(tree, other), exact, rtol=1e-6)
    assert_trees_close(psg.tree.mean({"a": single, "b": double})["b"], double.mean(0), per_sample=False)


def test_results_can_be_saved(device):
    params, x = torch.ones(2, device=device), torch.ones(3, 2, device=device)
    fn = lambda p, x: (p * x).sum()  # noqa: E731
    for result in (psg.tree.moments(psg.factored_grad(fn)(params, x)), psg.clipped_grad(fn, 1.0)(params, x)):
        file = io.BytesIO()
        torch.save(result, file)
        file.seek(0)
        loaded = torch.load(file)
        assert type(loaded) is type(result)
        assert_trees_close(loaded[0], result[0], per_sample=False)


@pytest.mark.parametrize(
    "diagonal, message",
    [
        ({"v": torch.ones(3)}, "the diagonal and the gradients differ in structure"),
        ({"w": torch.ones(2)}, r"diagonal\['w'\] has shape \(2,\), expected \(3,\)"),
        ({"w": torch.ones(3, dtype=torch.complex128)}, "expected a real diagonal"),
    ],
)
def test_a_diagonal_that_does_not_fit(diagonal, message):
    with pytest.raises(psg.InputError, match=message):
        psg.tree.precondition({"w": torch.ones(5, 3)}, diagonal)


@pytest.mark.parametrize("factor", [lambda sides: sides[:, 0], lambda sides: Outer(sides, sides)], ids=["dense", "factored"])
def test_a_complex_direction_of_real_gradients(factor, device):
    g = factor(torch.randn(3, 2, 4, device=device))
    direction = torch.randn(psg.tree.materialize(g).shape[1:], dtype=torch.complex128, device=device)
    assert_trees_close(psg.tree.dot(g, direction), psg.tree.gram(g, direction[None])[:, 0])


def test_zeros_that_a_factor_does_not_hold_stay_zero_under_an_infinite_diagonal(device):
    diagonal = torch.tensor([[torch.inf], [torch.inf], [2.0]], device=device)
    table = Rows(torch.tensor([[0], [2]], device=device), torch.ones(2, 1, 1, device=device), 3)
    found = psg.tree.precondition(table, diagonal).materialize()
    assert found.flatten(1).tolist() == [[torch.inf, 0, 0], [0, 0, 2]]
    dense = psg.tree.precondition(table.materialize(), diagonal)
    assert torch.equal(dense.isnan(), diagonal.isinf() & (table.materialize() == 0))


def test_a_preconditioned_table_is_summed_sparsely():
    model = torch.nn.Embedding(10, 2)
    loss, params = psg.stateless(model, lambda output: output.square().sum())
    g = psg.factored_grad(loss)(params, torch.tensor([[1, 7], [7, 2]]))
    diagonal = {"weight": torch.rand(10, 2)}
    found = psg.tree.sparse_weighted_sum(psg.tree.precondition(g, diagonal), torch.ones(2))["weight"]
    assert found.is_sparse and found._nnz() == 3
    assert_trees_close(found.to_dense(), psg.tree.sum(g)["weight"] * diagonal["weight"])


@pytest.mark.parametrize(
    "index", [0, None, "a", slice(None, None, -1), slice(0.5), slice(None, None, "a"), [0.5], torch.ones(2, 2, dtype=torch.bool), [1j]]
)
def test_what_take_cannot_take(index):
    with pytest.raises(psg.InputError, match=r"psg.tree.take: expected a slice, integers \[m\] or a mask \[n\], got"):
        psg.tree.take(torch.ones(2, 3), index)


@pytest.mark.parametrize(
    "index, message",
    [
        ([0, 3], "the integers are from 0 to 3, with 3 samples"),
        (torch.tensor([-4, 1]), "the integers are from -4 to 1, with 3 samples"),
        (torch.tensor([3], dtype=torch.uint8), "the integers are from 3 to 3, with 3 samples"),
        (torch.tensor([True, False]), "got a mask of 2 for 3 samples"),
        ([True] * 4, "got a mask of 4 for 3 samples"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), r"the index is on meta, but tree\['w'\] on "),
        (torch.zeros(3, dtype=torch.bool, device="meta"), r"the index is on meta, but tree\['w'\] on "),
    ],
)
@pytest.mark.parametrize("factor", [lambda sides: sides[:, 0], lambda sides: Outer(sides, sides)], ids=["dense", "factored"])
def test_samples_that_take_cannot_find(index, message, factor, device):
    with pytest.raises(psg.InputError, match=rf"psg\.tree\.take: {message}"):
        psg.tree.take({"w": factor(torch.ones(3, 1, 2, device=device))}, index)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e5m2])
@pytest.mark.parametrize("reduce", [psg.tree.sum, psg.tree.mean, psg.tree.norm, psg.tree.gram, lambda g: psg.tree.dot(g, {"w": g["w"][0]})])
def test_integers_and_numbers_of_8_bits_are_no_gradients(reduce, dtype):
    with pytest.raises(psg.InputError, match=r"tree\['w'\] has dtype torch\..*, in which sums would round or overflow"):
        reduce({"w": torch.ones(3, 2).to(dtype)})


@pytest.mark.parametrize("cast", [lambda t: t.to(torch.bfloat16), lambda t: t.float(), lambda t: t.double()])
def test_a_cast_of_indices_is_refused(cast):
    """In bfloat16 neighbouring rows would become one."""
    tree = psg.factored_grad(lambda table, ids: torch.nn.functional.embedding(ids, table).sum())(
        torch.ones(5000, 8), torch.arange(4000, 4003)[:, None]
    )
    for indexed in (tree, psg.tree.segment_sum(tree, torch.tensor([0, 0, 1]), num_segments=2)):
        with pytest.raises(psg.InputError, match="were converted to torch.* by their own method"):
            optree.tree_map(cast, {"table": indexed})
        converted = optree.tree_map(lambda leaf: leaf.to(torch.bfloat16), {"table": indexed}, is_leaf=lambda node: isinstance(node, Factor))
        assert converted["table"].dtype == torch.bfloat16
        assert_trees_close(psg.tree.gram(converted), psg.tree.gram(indexed).float())


@pytest.mark.parametrize("scale, entry", [(1e6, 1e-4), (1e-8, 1000.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 60])
def test_a_diagonal_beyond_the_range_of_the_gradients(size, dtype, scale, entry):
    model = torch.nn.Linear(size, size).to(dtype)
    loss, params = psg.stateless(model, lambda output: output.sum())
    x = torch.full((4, 2, size), entry, dtype=dtype)
    diagonal = {name: torch.full(p.shape, scale) for name, p in params.items()}
    dense = {name: grad.float() * scale for name, grad in psg.per_sample_grad(loss)(params, x).items()}
    for tree in (psg.factored_grad(loss)(params, x), psg.per_sample_grad(loss)(params, x)):
        found = psg.tree.precondition(tree, diagonal)
        assert_trees_close(psg.tree.materialize(found), dense, rtol=1e-2, atol=0)
        assert_trees_close(psg.tree.norm(found), psg.tree.norm(dense), rtol=1e-2, atol=0)


def test_concat_names_the_leaf_whose_shapes_differ():
    with pytest.raises(psg.InputError, match=r"the gradients of tree\['b'\] differ in shape: \(3,\), \(4,\)"):
        psg.tree.concat([{"a": torch.ones(2, 1), "b": torch.ones(2, 3)}, {"a": torch.ones(5, 1), "b": torch.ones(5, 4)}])


@pytest.mark.parametrize("std", [math.inf, math.nan, -1.0, True])
def test_noise_of_no_width(std):
    for width in (std, torch.tensor(std)):
        with pytest.raises(psg.InputError, match="expected a number that is at least 0 and finite"):
            psg.tree.add_noise({"w": torch.zeros(3)}, width)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Outer(torch.ones(2, 3), torch.ones(2, 3)), r"psg.factors.Outer: expected \[n, t, a\] and \[n, t, b\], got \(2, 3\) and"),
        (lambda: Outer(torch.ones(2, 1, 3), torch.ones(2, 4, 3)), r"psg.factors.Outer: .* a single position is \[n, 1, a\]"),
        (lambda: Rows(torch.zeros(2, 3).long(), torch.ones(2, 1, 3), 5), r"psg.factors.Rows: expected an index \[n, t\]"),
    ],
)
def test_sides_that_do_not_fit(make, message):
    with pytest.raises(psg.InputError, match=message):
        make()


def test_what_goes_with_the_samples_may_be_integers():
    tree = {"g": torch.randn(3, 2), "ids": torch.tensor([7, 8, 9])}
    found = psg.tree.concat([psg.tree.take(tree, [2, 0]), tree])
    assert found["ids"].tolist() == [9, 7, 7, 8, 9]
    with pytest.raises(psg.InputError, match="a mask of 0 for 3 samples"):
        psg.tree.take(tree, torch.zeros(0, dtype=torch.bool))
