"""embedding_bag over drawn shapes and options."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, on
from cases import N, Problem, parameters, score
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg.factors import Outer, Rows
from psg.testing import assert_trees_close, loop_grad, tensors

each_rule = st.sampled_from([True, False])


def draw_offsets(draw, n, t, bags, last):
    """The offsets of each sample's bags, rising from 0, some bags empty; with `last` also the end of the last bag."""
    rows = []
    for _ in range(n):
        inner = sorted(draw(st.lists(st.integers(0, t), min_size=bags - 1, max_size=bags - 1)))
        rows.append([0, *inner, *([t] if last else [])])
    return torch.tensor(rows, dtype=torch.int64).reshape(n, bags + last)


@st.composite
def bag_problems(draw):
    """Few rows, so that ids repeat within a bag; every option; offsets for each sample, for all samples, or none."""
    n, rows, d = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    bags, t = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    kind = draw(st.sampled_from(["matrix", "offsets", "shared offsets"]))
    options = draw(
        st.fixed_dictionaries(
            {"mode": st.just(mode)},
            optional={
                "padding_idx": st.integers(-rows, rows - 1),
                "max_norm": st.sampled_from([0.5, 2.0]),
                "norm_type": st.sampled_from([1.0, 2.0]),
                **({"sparse": st.booleans()} if mode != "max" else {}),
            },
        )
    )
    last = draw(st.booleans())  # ignored for a matrix
    if last:
        options["include_last_offset"] = True
    shape = (bags, t) if kind == "matrix" else (t,)
    integers = draw(st.sampled_from([torch.int64, torch.int32]))
    ids = draw(tensors((n, *shape), high=rows)).to(integers)
    offsets = None
    if kind == "offsets":
        offsets = draw_offsets(draw, n, t, bags, last).to(integers)
    elif kind == "shared offsets":
        offsets = draw_offsets(draw, 1, t, bags, last)[0].to(integers)
    params = {"table": draw(tensors((rows, d)))}
    scales = None
    if mode == "sum":
        scales = draw(st.sampled_from(["none", "data", "parameter", "both"]))
        if scales in ("parameter", "both"):
            params["scales"] = draw(tensors(shape))
    given_scales = draw(tensors((n, *shape))) if scales in ("data", "both") else None

    def fn(p, ids, offsets, scale):
        own = [value for value in (p.get("scales"), scale) if value is not None]
        weights = own[0] * own[-1] if own else None
        return score(F.embedding_bag(ids, p["table"], offsets, per_sample_weights=weights, **options))

    dims = (None, 0, 0 if kind == "offsets" else None, None if given_scales is None else 0)
    return Problem(fn, (params, ids, offsets, given_scales), options={"in_dims": dims}), options


@given(drawn=bag_problems(), rules=each_rule)
def test_embedding_bag(drawn, rules, device):
    problem, options = drawn
    # vmap(grad) can neither rescale rows of the weight in place (max_norm) nor hold a sparse gradient; the rule needs no sparse one.
    falls = "max_norm" if "max_norm" in options else "sparse" if options.get("sparse") and not rules else ""
    assert_agrees(on(problem, device), rules=rules, may_fall=falls)


@given(n=st.integers(0, 3), mode=st.sampled_from(["sum", "mean"]), t=st.integers(1, 5), seed=st.integers(0, 99))
def test_scaling_by_frequency_has_no_rule(n, mode, t, seed, device):
    torch.manual_seed(seed)
    table, ids = torch.randn(4, 3, device=device), torch.randint(4, (n, 2, t), device=device)
    assert_agrees(Problem(lambda w, ids: score(F.embedding_bag(ids, w, mode=mode, scale_grad_by_freq=True)), (table, ids)))


@given(n=st.integers(0, 3), rows=st.integers(2, 4), t=st.integers(1, 4), seed=st.integers(0, 99))
def test_ties_of_a_maximum(n, rows, t, seed, device):
    # Equal rows: the gradient goes to the first entry alone.
    torch.manual_seed(seed)
    table, ids = torch.randn(1, 3, device=device).repeat(rows, 1), torch.randint(rows, (n, 2, t), device=device)
    assert_agrees(Problem(lambda w, ids: score(F.embedding_bag(ids, w, mode="max")), (table, ids)))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_the_module_takes_the_rule(mode, offsets, last, device):
    module = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=2, include_last_offset=last).to(device)
    ids = torch.randint(7, (3, 6) if offsets else (3, 2, 4), device=device)
    extra = (torch.tensor([[0, 2, 6], [0, 0, 6], [0, 6, 6]], device=device)[:, : 2 + last],) if offsets else ()

    def fn(params, *inputs):
        return score(functional_call(module, params, inputs))

    problem = Problem(fn, (parameters(module), ids, *extra))
    assert_agrees(problem)
    (leaf,) = psg.explain(fn)(*problem.args).leaves
    assert leaf.kind in ("Rows", "Outer") and leaf.uses == {"embedding_bag: rule": 1}


@pytest.mark.parametrize("mode, padding, weighted", [("sum", None, False), ("sum", 1, False), ("sum", -1, True), ("mean", 0, False)])
@pytest.mark.parametrize("bags", [1, 3])
def test_bags_of_a_small_table_are_counted(mode, padding, weighted, bags, device):
    # A row for each position would take 40 times the memory.
    torch.manual_seed(0)
    table, ids = torch.randn(5, 4, device=device), torch.randint(5, (N, bags, 200), device=device)
    scales = torch.randn(N, bags, 200, device=device)
    ids[-1, -1] = (padding or 0) % 5  # a bag of padding alone

    def fn(w, ids, scales, sparse=False):
        weights = scales if weighted else None
        return score(F.embedding_bag(ids, w, mode=mode, padding_idx=padding, per_sample_weights=weights, sparse=sparse))

    args = table, ids, scales
    assert_agrees(Problem(fn, args))
    factor = psg.factored_grad(fn)(*args)
    if factor.device.type == "cpu":  # elsewhere the choice would wait for the answer whether all cotangents are finite
        assert isinstance(factor, Outer) and factor.positions == bags
    kept = psg.factored_grad(fn)(torch.randn(10**5, 4, device=device), ids, scales), psg.factored_grad(partial(fn, sparse=True))(*args)
    assert all(isinstance(own, Rows) for own in kept)
    assert_trees_close(kept[1].materialize(), factor.materialize())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_infinite_cotangent_reaches_its_own_rows_alone(value, device):
    # A count of zero times infinity would be NaN.
    table, ids = torch.randn(5, 4, device=device), torch.tensor([[0, 1] * 50, [2, 3] * 50], device=device)

    def fn(w, ids, scale):
        return (F.embedding_bag(ids[None], w, mode="sum") * scale).sum()

    args = table, ids, torch.tensor([value, 1.0], device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(*args), loop_grad(fn)(*args))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_max_norm_does_not_write_into_the_table(device):
    table, ids = 5 * torch.ones(4, 2, device=device), torch.arange(4, device=device)[:, None, None]
    psg.per_sample_grad(lambda w, ids: F.embedding_bag(ids, w, max_norm=1.0).sum())(table, ids)
    assert (table == 5).all()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_after_the_last_offset_are_in_no_bag(mode, device):
    # torch's documentation says so; its CPU kernels (2.13) put them into the last bag, or read out of bounds.
    table, ids = torch.randn(5, 3, device=device), torch.randint(5, (3, 6), device=device)
    offsets = torch.tensor([0, 1, 4], device=device)
    grads = psg.per_sample_grad(lambda w, ids: score(F.embedding_bag(ids, w, offsets, mode=mode, include_last_offset=True)))(table, ids)
    expected = loop_grad(lambda w, ids: score(F.embedding_bag(ids[:4], w, offsets, mode=mode, include_last_offset=True)))(table, ids)
    assert_trees_close(grads, expected)


@pytest.mark.parametrize("offsets", [[1, 2], [0, 9]])
def test_offsets_that_do_not_fit_are_the_user_s_error(offsets):
    # A sample's ids must not fall into another sample's bag.
    table, ids, offsets = torch.randn(4, 2), torch.randint(4, (2, 3)), torch.tensor([[0, 1], offsets])
    with pytest.raises(RuntimeError, match="offsets"):
        psg.per_sample_grad(lambda w, ids, offsets: score(F.embedding_bag(ids, w, offsets)))(table, ids, offsets)


def test_a_large_vocabulary_is_never_materialised(device):
    # [n, rows, d] would take 32 GB here.
    table = torch.randn(1, 4, device=device, dtype=torch.float32).expand(10**8, 4)
    ids = torch.randint(10**8, (20, 10), device=device)

    def fn(w, ids):
        return F.embedding_bag(ids[None], w, mode="sum").square().sum()

    norms = psg.tree.norm(psg.factored_grad(fn)(table, ids))
    counts = (ids[:, :, None] == ids[:, None, :]).sum(2)
    assert_trees_close(norms, 2 * 10 * table[0].norm() * counts.float().sum(1).sqrt())


@given(n=st.integers(0, 3), rows=st.integers(1, 4), t=st.integers(0, 5), seed=st.integers(0, 99), rules=each_rule)
def test_embedding_with_sparse_gradients(n, rows, t, seed, rules, device):
    torch.manual_seed(seed)
    table, ids = torch.randn(rows, 3, device=device), torch.randint(rows, (n, t), device=device)
    problem = Problem(lambda w, ids: score(F.embedding(ids, w, sparse=True)), (table, ids))
    assert_agrees(problem, rules=rules, may_fall="" if rules else "vmap has no sparse tensors")


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_and_weights_of_any_layout(mode, device):
    # The kernel assumes that they are contiguous, and does not check.
    table, pairs, scales = torch.randn(7, 2, device=device), torch.randint(7, (4, 5, 2), device=device), torch.randn(4, 5, 2, device=device)

    def fn(table, ids, scales):
        weights = {"per_sample_weights": scales[None]} if mode == "sum" else {}
        return F.embedding_bag(ids[None], table, mode=mode, **weights).square().sum()

    args = table, pairs[..., 0], scales[..., 1]
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(*args), loop_grad(fn)(*args))
    learned = psg.per_sample_grad(fn, argnums=(0, 2), in_dims=(None, 0, 0))
    assert_trees_close(learned(*args), loop_grad(fn, argnums=(0, 2), in_dims=(None, 0, 0))(*args))
