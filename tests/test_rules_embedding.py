"""Lookups over drawn shapes and options."""

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_derivatives_agree, on
from cases import Problem, score
from conftest import as_large
from hypothesis import example, given
from hypothesis import strategies as st

import psg
from psg._capture import _lifted
from psg._hardware import _machine
from psg.testing import assert_trees_close, loop_grad, loop_value_and_grad, shapes, tensors

each_rule = st.sampled_from([True, False])


@pytest.fixture(params=[0, 1 << 17], ids=["many", "few"])
def each_size(request, monkeypatch):
    """As if the numbers were many, which take rules, and few, which are looked up as under vmap."""
    monkeypatch.setattr(_lifted, "_FEW_BYTES", request.param)


each_size_too = pytest.mark.usefixtures("each_size")


@st.composite
def embedding_problems(draw, smooth=False):
    """Few rows, so that ids repeat; every option, padding ids counted from the end included. If `smooth`, those with second derivatives."""
    n, rows, d = draw(st.integers(0, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    optional = {
        "padding_idx": st.integers(-rows, rows - 1),
        "scale_grad_by_freq": st.booleans(),
        "max_norm": st.sampled_from([0.5, 1.0, 2.0]),
        "norm_type": st.sampled_from([1.0, 2.0, 3.0]),
    }
    options = draw(st.fixed_dictionaries({}, optional={"padding_idx": optional["padding_idx"]} if smooth else optional))
    ids = draw(tensors((n, *draw(shapes(min_dims=0, max_dims=2, max_side=6))), high=rows))
    ids = ids.to(draw(st.sampled_from([torch.int64, torch.int32])))
    return Problem(lambda w, ids: score(F.embedding(ids, w, **options)), (draw(tensors((rows, d))), ids))


@st.composite
def tied_problems(draw):
    """One weight as table and as head, with and without tokens that are padding."""
    n, rows, d, t = (draw(st.integers(low, 4)) for low in (0, 1, 1, 1))
    padding_idx = draw(st.none() | st.integers(0, rows - 1))
    tokens = draw(tensors((n, t), high=rows))
    params = {"table": draw(tensors((rows, d))), "bias": draw(tensors((rows,)))}

    def fn(p, tokens):
        hidden = F.embedding(tokens, p["table"], padding_idx=padding_idx).cumsum(0).tanh()
        return F.cross_entropy(F.linear(hidden, p["table"], p["bias"]), tokens)

    return Problem(fn, (params, tokens))


@st.composite
def shared_id_problems(draw):
    """Position ids that are the same for every sample, bound in fn or passed unbatched."""
    n, rows, d, t = (draw(st.integers(low, 4)) for low in (0, 1, 1, 1))
    ids = draw(tensors((t,), high=rows))
    args = draw(tensors((rows, d))), ids, draw(tensors((n, t, d)))
    if draw(st.booleans()):
        return Problem(lambda w, _, x: score(F.embedding(ids.to(x.device), w) * x), args, options={"in_dims": (None, None, 0)})
    return Problem(lambda w, ids, x: score(F.embedding(ids, w) * x), args, options={"in_dims": (None, None, 0)})


@each_size_too
@given(problem=embedding_problems(), rules=each_rule)
def test_embedding(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules, may_fall="max_norm")


@each_size_too
@given(problem=st.one_of(embedding_problems(smooth=True), tied_problems(), shared_id_problems()))
def test_derivatives_of_results(problem, device):
    assert_derivatives_agree(on(problem, device))


@each_size_too
@given(problem=tied_problems(), rules=each_rule)
def test_tied_embedding_and_head(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@each_size_too
@given(problem=shared_id_problems(), rules=each_rule)
def test_shared_ids(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@each_size_too
@pytest.mark.parametrize("rows", [1, 7])
def test_ids_of_32_bits(rows, device):
    table, ids = torch.randn(rows, 3, device=device), torch.randint(rows, (2, 5), device=device, dtype=torch.int32)
    assert_agrees(Problem(lambda w, ids: score(F.embedding(ids, w)), (table, ids)))


@each_size_too
@given(n=st.integers(0, 3), rows=st.integers(1, 4), t=st.integers(1, 4), padding=st.none() | st.integers(-4, 3), seed=st.integers(0, 99))
def test_sparse_gradients(n, rows, t, padding, seed, device):
    torch.manual_seed(seed)
    options = {"sparse": True} if padding is None or not -rows <= padding < rows else {"sparse": True, "padding_idx": padding}
    table, ids, c = torch.randn(rows, 2, device=device), torch.randint(rows, (n, t), device=device), torch.randn(n, t, 2, device=device)
    assert_agrees(Problem(lambda w, ids, c: score(F.embedding(ids, w, **options) * c), (table, ids, c)))


def test_the_rule_gives_rows(device):
    table, ids = torch.randn(7, 3, device=device), torch.randint(7, (2, 5), device=device)
    assert isinstance(psg.factored_grad(lambda w, ids: score(F.embedding(ids, w)))(table, ids), psg.factors.Rows)


def test_few_rows_are_looked_up_as_under_vmap(device, monkeypatch):
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 1 << 17)
    lookups = {
        "embedding": lambda w, ids: F.embedding(ids, w),
        "__getitem__": lambda w, ids: w[ids],
        "index_select": lambda w, ids: w.index_select(0, ids.flatten()),
    }
    for name, lookup in lookups.items():

        def fn(w, ids, lookup=lookup):
            return score(lookup(w, ids))

        for ids in (torch.randint(3, (2,), device=device), torch.randint(3, (2, 5), device=device)):  # also one number for each sample
            few, many = (psg.explain(fn)(torch.randn(rows, 4, device=device), ids).leaves[0].uses for rows in (3, 30_000))
            assert few == {f"{name}: lifted": 1} and f"{name}: lifted" not in many


def test_a_large_vocabulary_is_never_materialised(device):
    # [n, rows, d] would take 32 GB here, and t x rows of one sample 4 GB.
    table = torch.randn(1, 4, device=device, dtype=torch.float32).expand(10**8, 4)
    ids = torch.randint(10**8, (20, 10), device=device)
    factors = psg.factored_grad(lambda w, ids: F.embedding(ids, w).square().sum())(table, ids)
    counts = (ids[:, :, None] == ids[:, None, :]).sum(2)
    expected = 2 * table[0].norm() * counts.float().sum(1).sqrt()
    psg.testing.assert_trees_close(psg.tree.norm(factors), expected)
    assert psg.tree.gram(factors).shape == (20, 20)


@pytest.mark.parametrize("lookup", [F.embedding, lambda ids, w, **options: F.embedding_bag(ids[:, None], w, **options)])
@pytest.mark.parametrize(
    "use",
    [lambda y, w: y @ w.T, lambda y, w: y * w.sum(0), lambda y, w: torch.func.grad(lambda y: (y @ w.T).sin().sum())(y)],
    ids=["head", "elsewhere", "in a transform"],
)
def test_what_max_norm_writes_is_seen_later(lookup, use, device):
    # torch rescales rows of the weight in place: a tied head reads the rescaled rows.
    def fn(w, ids):
        return use(lookup(ids, w, max_norm=1.0), w).sin().sum()

    args = 2 * torch.randn(6, 4, device=device), torch.randint(6, (3, 5), device=device)
    with pytest.warns(psg.FallbackWarning, match="max_norm writes into the weight"):
        values, grads = psg.per_sample_value_and_grad(fn)(*args)
    expected_values, expected = loop_value_and_grad(fn)(*args)
    assert_trees_close(values, expected_values)
    assert_trees_close(grads, expected)
    for method in ("capture", "vmap"):
        with pytest.raises((psg.PsgError, RuntimeError), match="max_norm|embedding_renorm_"):
            psg.per_sample_grad(fn, method=method)(*args)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_max_norm_does_not_write_into_the_table(device):
    table = 5 * torch.ones(4, 2, device=device)
    psg.per_sample_grad(lambda w, ids: F.embedding(ids, w, max_norm=1.0).sum())(table, torch.arange(4, device=device)[:, None])
    assert (table == 5).all()


@given(
    mode=st.sampled_from(["sum", "mean", "max"]), n=st.integers(0, 3), t=st.integers(1, 5), weighted=st.booleans(), seed=st.integers(0, 99)
)
def test_embedding_bag_without_a_rule(mode, n, t, weighted, seed, device):
    torch.manual_seed(seed)
    table, ids = torch.randn(4, 3, device=device), torch.randint(4, (n, t), device=device)
    weights = torch.randn(n, 1, t, device=device)

    def fn(w, ids, weights):
        return score(F.embedding_bag(ids[None], w, mode=mode, per_sample_weights=weights if weighted and mode == "sum" else None))

    assert_agrees(Problem(fn, (table, ids, weights)))


@each_size_too
@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
@pytest.mark.parametrize("padding", [1, -4])
@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
def test_padding_of_a_weight_that_depends_on_the_sample(method, padding, scale_grad_by_freq, device):
    # vmap's own batching rule for such a weight ignores padding_idx.
    torch.manual_seed(0)
    options = {"padding_idx": padding, "scale_grad_by_freq": scale_grad_by_freq}

    def scaled(w, i, x):
        return F.embedding(i, w * x, **options).sin().sum()

    def adapted(w, i, x):
        inner = torch.func.grad(lambda w: F.embedding(i, w, **options).sin().sum())
        return (F.embedding(i, w - 0.1 * inner(w), **options).sin() * x).sum()

    args = torch.randn(5, 2, device=device), torch.tensor([[1, 0, 1], [1, 2, 2]], device=device), torch.randn(2, 2, device=device)
    for fn in (scaled,) if scale_grad_by_freq else (scaled, adapted):
        assert_trees_close(psg.per_sample_grad(fn, method=method)(*args), loop_grad(fn)(*args))


@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.jacrev, torch.func.hessian])
def test_padding_keeps_its_tangent(transform, method, device):
    # In torch itself padding_idx has no effect on forward-mode derivatives.
    def fn(w, i, x):
        inner = lambda x: F.embedding(i, w * x, padding_idx=1).sin()  # noqa: E731
        return transform(lambda x: inner(x).sum() if transform is torch.func.hessian else inner(x))(x).sin().sum()

    args = torch.randn(5, 2, device=device), torch.tensor([[1, 0, 1], [1, 2, 2]], device=device), torch.randn(2, 2, device=device)
    values, grads = psg.per_sample_value_and_grad(fn, method=method)(*args)
    expected_values, expected = loop_value_and_grad(fn)(*args)
    assert_trees_close(values, expected_values)
    assert_trees_close(grads, expected)


def test_a_padding_index_that_is_no_row(device):
    """`torch.embedding` does not look at it, where `F.embedding` raises an error."""
    table, tokens = torch.randn(5, 2, device=device), torch.randint(0, 5, (4, 3), device=device)

    def fn(table, tokens):
        return torch.embedding(table, tokens, 7).tanh().sum()

    assert_trees_close(psg.per_sample_grad(fn, method="capture")(table, tokens), loop_grad(fn)(table, tokens))


@each_size_too
@given(
    n=st.integers(0, 3),
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    place=st.integers(-3, 2),
    count=st.none() | st.integers(0, 3),
    role=st.sampled_from(["parameter", "product", "data"]),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_index_select_by_numbers_and_by_lists(n, shape, place, count, role, shared, seed, device):
    torch.manual_seed(seed)
    dim = place % len(shape) - (len(shape) if place < 0 else 0)
    own = () if count is None else (count,)
    index = torch.randint(shape[dim], own if shared else (n, *own), device=device)
    w, x = torch.randn(shape, device=device), torch.randn(n, *shape, device=device)

    def fn(w, x, index):
        source = {"parameter": w, "product": w * x, "data": x}[role]
        return score(source.index_select(dim, index)) * w.sum()

    assert_agrees(Problem(fn, (w, x, index), options={"in_dims": (None, 0, None if shared else 0)}))


@each_size_too
@given(
    n=st.integers(0, 3),
    kinds=st.lists(
        st.sampled_from(["ids", "ids", "few", "one", "shared", "number", "range", "all", "new", "rest"]), min_size=1, max_size=4
    ),
    left=st.integers(0, 1),
    t=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@example(n=2, kinds=["all", "ids", "range", "few"], left=0, t=2, seed=0)  # what the tensors select comes first
@example(n=2, kinds=["one", "all", "few"], left=1, t=2, seed=0)  # but a tensor without dimensions is a number
@example(n=2, kinds=["few", "all", "one"], left=0, t=2, seed=0)
@example(n=2, kinds=["all", "few", "one", "few"], left=1, t=2, seed=0)
def test_indices_of_all_kinds(n, kinds, left, t, seed, device):
    """Several tensors, whose shapes broadcast and whose entries may be negative, among numbers, ranges, None and an ellipsis."""
    torch.manual_seed(seed)
    own = {"ids": (n, 2, t), "few": (n, t), "one": (n,), "shared": (t,)}
    w = torch.randn([3] * (left + sum(kind not in ("new", "rest") for kind in kinds)), device=device)
    given = [torch.randint(-3, 3, own[kind], device=device) for kind in kinds if kind in own]
    dims = [None if kind == "shared" else 0 for kind in kinds if kind in own]

    def fn(w, x, *given):
        rest, fixed = iter(given), {"number": -2, "range": slice(1, None), "all": slice(None), "new": None, "rest": ...}
        index = [next(rest) if kind in own else fixed[kind] for kind in kinds]
        return score(w.tanh()[tuple(index)] * x)

    if kinds.count("rest") < 2:
        assert_agrees(Problem(fn, (w, torch.randn(n, device=device), *given), options={"in_dims": (None, 0, *dims)}))


@pytest.mark.parametrize("lookup", [lambda w, i, j: w[i, j], lambda w, i, j: w[..., j], lambda w, i, j: w[1:, i, j]])
def test_indices_give_views_of_rows(lookup, device):
    table, ids = torch.randn(5, 5, 5, device=device), torch.randint(-4, 4, (2, 3, 4), device=device)
    assert isinstance(psg.factored_grad(lambda w, i, j: score(lookup(w, i, j)))(table, *ids), psg.factors.Views)


@each_size_too
@given(n=st.integers(0, 3), rows=st.integers(1, 4), t=st.integers(0, 4), padding=st.integers(-1, 4), seed=st.integers(0, 99))
def test_torch_s_own_embedding(n, rows, t, padding, seed, device):
    """With another order of arguments than `F.embedding`; a padding that is no row has no effect."""
    torch.manual_seed(seed)
    table, ids = torch.randn(rows, 2, device=device), torch.randint(rows, (n, t), device=device)
    for op in (torch.embedding, torch.ops.aten.embedding.default):
        assert_agrees(Problem(lambda w, ids, op=op: score(op(w, ids, padding)), (table, ids)))


@pytest.mark.parametrize("cost", [0, 1_000_000])
@pytest.mark.parametrize("n", [0, 1, 3])
@given(rows=st.integers(1, 9), t=st.integers(0, 5), features=st.integers(1, 3), padding=st.booleans(), seed=st.integers(0, 99))
def test_small_tables(cost, n, rows, t, features, padding, seed, device):
    """Where ops cost something, norms are those of the materialised gradients; sparse sums stay sparse."""
    torch.manual_seed(seed)
    w, ids, c = torch.randn(rows, features), torch.randint(rows, (n, t)), torch.randn(n, t, features)
    problem = Problem(lambda w, ids, c: score(F.embedding(ids, w, padding_idx=0 if padding else None) * c), (w, ids, c))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_machine, "op_call", lambda device: cost)
        assert_agrees(on(problem, device))
        factor = psg.factored_grad(problem.fn)(*(tensor.to(device) for tensor in problem.args))
        if n:  # else fn is not called, and nothing says that it looks rows up
            assert psg.tree.sparse_weighted_sum(factor, torch.ones(n, device=device)).is_sparse


REFUSED = {
    "negative": ([-1], (5, 3), IndexError, "out of range"),
    "too large": ([0, 5], (5, 3), IndexError, "out of range"),
    "one of several": ([[1, 2], [-3, 0]], (5, 3), IndexError, "out of range"),
    "a mask": ([True, False, True, False, True], (5, 3), RuntimeError, "scalar types"),
    "of a stack": ([0, 1], (5, 2, 3), RuntimeError, "2-D"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_constant_index_that_embedding_refuses(name, monkeypatch):
    """Indexing, as which psg computes a lookup that all samples share, would take it."""
    as_large(monkeypatch)
    index, shape, error, message = REFUSED[name]

    def fn(w, x):
        return (F.embedding(torch.tensor(index), w) * x).sum()

    with pytest.raises(error, match=message):
        psg.per_sample_grad(fn)(torch.randn(shape), torch.randn(2, 3))
