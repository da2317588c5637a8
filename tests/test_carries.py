"""Weights computed from parameters: factors of their gradients become factors of the parameters' gradients, and none is materialised."""

import collections
import math
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees
from cases import Problem, score
from cases.derived import COMPUTED_ONCE
from conftest import as_large
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import psg
from psg._capture import _carries, _derived, _lifted
from psg._hardware import _machine
from psg._torch import _autograd, _ops
from psg.factors import Conv, Dense, Entries, Expanded, Outer, Region, Rows, Scaled, Sum, Views, _base
from psg.testing import assert_trees_close, loop_grad
from psg.testing._loop import tree_map

OUT, IN, RANK = 4, 3, 2


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    as_large(monkeypatch)  # the tests expect the kinds of factors that large weights have


def dora(p):
    merged = p["w"] + p["b"] @ p["a"]
    return p["gain"] * (merged / merged.norm(dim=1, keepdim=True).detach())


def spectral(p):
    w = p["w"]
    with torch.no_grad():
        v = F.normalize(w.sum(0), dim=0)
        u = F.normalize(torch.mv(w, v), dim=0)
    return w / torch.vdot(u, torch.mv(w.flatten(1), v))


TRIANGLE = torch.tensor([[0, 1, 1, 2, 2, 2], [0, 0, 1, 0, 1, 2]]).unbind()


def written(tensor, index, value):
    tensor[index] = value
    return tensor


def symmetric(matrix):
    return matrix + matrix.triu(1).T


def well(matrix):
    return 0.1 * matrix + torch.eye(len(matrix), device=matrix.device)


# name -> (the weight as a function of the parameters, the kind of each parameter's factor after a matrix product with that weight).
MATRICES = {
    "scaled": (lambda p: p["w"] * 0.3, {"w": Outer}),
    "scaled, the number first": (lambda p: 0.3 * p["w"], {"w": Outer}),
    "divided": (lambda p: p["w"] / torch.tensor(3.0, device=p["w"].device), {"w": Outer}),
    "negative": (lambda p: -p["w"], {"w": Outer}),
    "one over it": (lambda p: 1 / p["w"], {"w": Scaled}),
    "two over it, of itself": (lambda p: p["w"] + 2 / p["s"], {"w": Outer, "s": Dense}),
    "the number first": (lambda p: 1 - p["w"], {"w": Outer}),
    "in the dtype of another": (lambda p: p["w"].to(p["s"]), {"w": Outer, "s": Sum}),
    "its own row scales": (lambda p: p["gain"] * p["w"], {"w": Outer, "gain": Dense}),
    "its own column scales": (lambda p: p["w"] * p["columns"], {"w": Outer, "columns": Dense}),
    "divided by a parameter": (lambda p: p["w"] / p["s"], {"w": Outer, "s": Dense}),
    "low rank": (lambda p: p["b"] @ p["a"], {"a": Outer, "b": Outer}),
    "merged low rank": (lambda p: p["w"] + 0.5 * torch.matmul(p["b"], p["a"]).view(OUT, IN), dict.fromkeys("wab", Outer)),
    "less a low rank": (lambda p: torch.sub(p["w"], p["b"].mm(p["a"]), alpha=2), dict.fromkeys("wab", Outer)),
    "by other names": (
        lambda p: torch.negative(torch.subtract(p["w"].ravel().view(OUT, IN), torch.linalg.matmul(p["b"], p["a"]), alpha=2)),
        dict.fromkeys("wab", Outer),
    ),
    "plus twice a low rank": (lambda p: torch.add(p["w"], p["b"].mm(p["a"]), alpha=2), dict.fromkeys("wab", Outer)),
    "transposed": (lambda p: (p["a"].T @ p["b"].T).T, {"a": Outer, "b": Outer}),
    "two uses of one": (lambda p: p["w"] * 2 + p["w"].clone(), {"w": Outer}),
    "magnitude and direction": (dora, {"w": Outer, "a": Outer, "b": Outer, "gain": Dense}),
    "spectral norm": (spectral, {"w": Outer}),
    "centred": (lambda p: p["w"] - p["columns"].expand(OUT, IN), {"w": Outer, "columns": Dense}),
    "cast": (lambda p: p["w"].float().double() + p["gain"], {"w": Outer, "gain": Dense}),
    "a linear layer of another": (lambda p: F.linear(p["b"], p["a"].T, p["columns"]), {"a": Outer, "b": Outer, "columns": Dense}),
    "added to a product": (lambda p: torch.addmm(p["w"], p["b"], p["a"], beta=2, alpha=0.5), dict.fromkeys("wab", Outer)),
    "outer product": (lambda p: p["w"] + torch.outer(p["gain"].view(-1), p["columns"]), {"w": Outer, "gain": Dense, "columns": Dense}),
    "side by side": (lambda p: torch.cat([p["b"], p["gain"]], 1), {"b": Outer, "gain": Outer}),
    "one below the other": (lambda p: torch.cat([p["a"], p["columns"][None], p["a"][:1].detach()]), {"a": Outer, "columns": Views}),
    "one twice": (lambda p: torch.cat((p["a"], 2 * p["a"]), dim=-2), {"a": Outer}),
    "masked": (lambda p: p["w"] * torch.ones_like(p["w"]).tril(), {"w": Scaled}),
    "triangular": (lambda p: p["w"].triu(), {"w": Scaled}),
    "positive": (lambda p: F.softplus(p["w"]), {"w": Scaled}),
    "the larger of two": (lambda p: torch.maximum(p["w"], p["columns"]), {"w": Dense, "columns": Dense}),
    "clamped, in part": (lambda p: torch.where(p["w"].detach() > -1, p["w"].clamp(max=0.5), 0.0), {"w": Scaled}),
    "a draw of weights": (lambda p: p["w"] + p["c"].exp() * torch.linspace(-1, 1, IN, device=p["w"].device), {"w": Outer, "c": Scaled}),
    "weight norm": (lambda p: torch._weight_norm(p["w"], p["gain"], 0), {"w": Sum, "gain": Dense}),
    "weight norm of columns": (lambda p: torch._weight_norm(p["w"], p["columns"][None], 1), {"w": Sum, "columns": Dense}),
    "normalised rows": (lambda p: F.normalize(p["w"], dim=1), {"w": Sum}),
    "normalised": (lambda p: p["w"] / p["w"].norm(), {"w": Sum}),
    "normalised rows, in part": (lambda p: F.normalize(p["w"], p=3.0, dim=-1, eps=1.5), {"w": Sum}),
    "standardised": (lambda p: (p["w"] - p["w"].mean(1, keepdim=True)) / p["w"].std(1, keepdim=True), {"w": Sum}),
    "standardised, without the dimension": (lambda p: p["w"] / torch.var_mean(p["w"], 0)[0].sqrt(), {"w": Sum}),
    "means of its rows": (lambda p: p["w"].mean(1, keepdim=True).expand(OUT, IN), {"w": Expanded}),
    "sums of its columns": (lambda p: p["w"].sum((0,)).sin().expand(OUT, IN), {"w": Expanded}),
    "the mean of its entries": (lambda p: p["w"].mean().sin().expand(OUT, IN), {"w": Scaled}),
    "standardised by batch norm": (lambda p: F.batch_norm(p["w"].T, None, None, training=True).T, {"w": Sum}),
    "softmax": (lambda p: p["w"].softmax(1), {"w": Sum}),
    "softmax of columns": (lambda p: nn.Softmax(dim=0)(p["w"] / p["s"]), {"w": Sum, "s": Dense}),
    "softmax over all": (lambda p: F.softmax(p["w"].view(-1), 0, dtype=torch.float64).view(OUT, IN), {"w": Sum}),
    "softmax of some": (lambda p: p["w"].masked_fill(torch.ones_like(p["w"]).triu(1) > 0, -math.inf).softmax(-1), {"w": Sum}),
    "softmax of a number": (lambda p: p["w"] * p["s"].softmax(0), {"w": Outer, "s": Dense}),
    "logarithms of probabilities": (lambda p: torch.log_softmax(p["w"], 1), {"w": Sum}),
    "a softmax called in another way": (lambda p: torch.softmax(p["w"], 1, torch.float64), {"w": Sum}),
    "triangles": (lambda p: p["w"].triu(1) - 2 * p["w"].tril(), {"w": Sum}),
    "a filled triangle": (lambda p: written(p["v"].new_zeros(OUT, IN), TRIANGLE, p["v"]), {"v": Entries}),
    "a filled triangle, in a row": (
        lambda p: written(p["v"].new_zeros(OUT * IN), TRIANGLE[0] * IN + TRIANGLE[1], p["v"]).view(OUT, IN),
        {"v": Entries},
    ),
    "a filled symmetric matrix": (
        lambda p: symmetric(written(p["v"].new_zeros(3, 3), TRIANGLE, p["v"]))[torch.tensor([0, 1, 2, 1])],
        {"v": Entries},
    ),
    "filled rows": (lambda p: written(written(p["a"].new_zeros(OUT, IN), slice(0, 2), p["a"]), slice(2, 4), 2 * p["a"]), {"a": Outer}),
    "filled columns": (lambda p: written(p["b"].new_ones(OUT, IN), (..., [2, 0]), p["b"]), {"b": Outer}),
    "a filled row": (lambda p: written(p["w"] * 2, 1, p["columns"]), {"w": Scaled, "columns": Entries}),
    "a filled entry": (lambda p: written(p["s"].new_ones(OUT, IN), (1, 2), p["s"]), {"s": Views}),
    "a positive diagonal": (
        lambda p: p["w"].tril(-1) + F.pad(torch.diag(p["columns"].exp()), (0, 0, 0, 1)),
        {"w": Scaled, "columns": Dense},
    ),
    "its positive diagonal": (lambda p: p["w"].T.tril(-1).diagonal_scatter(p["w"].T.diagonal().exp()).T, {"w": Sum}),
    "an inverse": (lambda p: p["b"] @ torch.linalg.inv(well(p["a"][:, :RANK])) @ p["a"].detach(), {"a": Views, "b": Outer}),
    "a solution": (lambda p: p["b"].detach() @ torch.linalg.solve(well(p["b"][:RANK]), p["a"]), {"a": Outer, "b": Views}),
    "a solution from the right": (lambda p: torch.linalg.solve(well(p["a"][:, 1:]), p["b"], left=False) @ p["a"], {"a": Sum, "b": Outer}),
    "a triangle's solution": (
        lambda p: p["b"].detach() @ torch.linalg.solve_triangular(well(p["b"][:RANK]), p["a"], upper=False),
        {"a": Outer, "b": Views},
    ),
    "blocks": (lambda p: (p["b"].view(2, 2, RANK) @ p["b"].new_ones(2, RANK, IN)).view(OUT, IN), {"b": Dense}),
    "divided by a product with vectors": (
        lambda p: p["w"] / (p["w"].new_ones(OUT) @ p["w"] @ torch.linspace(1, 2, IN, device=p["w"].device)),
        {"w": Outer},
    ),
    "divided by the largest of each row": (lambda p: p["w"] / p["w"].abs().max(1, keepdim=True)[0], {"w": Sum}),
    "less the median of each column": (lambda p: p["w"] - p["w"].median(0).values, {"w": Sum}),
    "layer norm": (lambda p: F.layer_norm(p["w"], (IN,)), {"w": Sum}),
    "layer norm over all": (lambda p: F.layer_norm(p["w"], (OUT, IN), eps=0.1), {"w": Sum}),
    "root mean squares": (lambda p: F.rms_norm(p["w"], (IN,)), {"w": Sum}),
    "flipped": (lambda p: p["w"].flip(0, 1), {"w": Outer}),
    "rolled": (lambda p: p["w"].roll((1, 2), (0, 1)), {"w": Outer}),
    "rolled, the rows in one line": (lambda p: p["w"].roll(2), {"w": Views}),
    "rolled three times": (lambda p: torch.roll(p["w"], shifts=(1, 2, -5), dims=(0, 1, 0)), {"w": Outer}),
    "mirrored": (lambda p: p["w"] + p["w"].fliplr() + p["w"].flipud(), {"w": Outer}),
    "turned": (lambda p: torch.rot90(p["w"][:3], 3), {"w": Views}),
    "inner products": (lambda p: torch.inner(p["b"], p["a"].T), {"a": Outer, "b": Outer}),
    "matrix exponential": (lambda p: p["b"] @ torch.matrix_exp(p["a"][:, :RANK]) @ p["a"], {"a": Sum, "b": Outer}),
}


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("name", [name for name in COMPUTED_ONCE if name in _carries.POINTWISE])
def test_a_factor_is_carried_over_an_elementwise_op(name, n, device):
    def fn(w, x):
        return score(F.linear(x, COMPUTED_ONCE[name](w)))

    with torch.device(device):
        problem = Problem(fn, (torch.rand(4, 4) + 0.5, torch.randn(n, 2, 4)))
    assert_agrees(problem)
    if n:
        assert not isinstance(factored(problem), Dense)


def parameters(device, *names):
    shapes = {"w": (OUT, IN), "c": (OUT, IN), "a": (RANK, IN), "b": (OUT, RANK), "gain": (OUT, 1), "columns": (IN,), "s": (), "v": (6,)}
    return {name: torch.randn(shapes[name], device=device) for name in names}


@pytest.mark.parametrize("name", MATRICES)
def test_the_factor_of_a_matrix_product_is_carried_over(name, device):
    make, kinds = MATRICES[name]
    problem = Problem(lambda p, x: score(F.linear(x, make(p))), (parameters(device, *kinds), torch.randn(5, 2, IN, device=device)))
    if name == "cast":  # computes in float32
        problem = problem._replace(fn=lambda p, x: score(F.linear(x.float(), make(p).float())).double())
        torch.testing.assert_close(*norms_and_reference(problem), rtol=1e-5, atol=1e-5)
    else:
        assert_agrees(problem)
    assert found_kinds(problem) == kinds


PENALTIES = {
    "squared norm": (lambda p: 0.1 * sum(own.square().sum() for own in p.values()), {"w": Sum, "s": Dense}),
    "norm": (lambda p: p["w"].norm() + p["s"] ** 2, {"w": Sum, "s": Dense}),
    "absolute values": (lambda p: p["w"].abs().mean() * p["s"], {"w": Sum, "s": Dense}),
    "spectrum": (lambda p: torch.linalg.slogdet(p["w"].T @ p["w"])[1] * p["s"].exp(), {"w": Sum, "s": Dense}),
    "orthogonality": (lambda p: (p["w"].T @ p["w"] - torch.eye(IN, device=p["w"].device)).square().sum() + p["s"], {"w": Sum, "s": Dense}),
    "divergence from a prior": (lambda p: (p["w"].exp() - 1 - p["w"]).sum() + p["s"].square(), {"w": Sum, "s": Dense}),
    "group lasso": (lambda p: p["w"].norm(dim=0).sum() + p["s"].abs(), {"w": Sum, "s": Dense}),
    "of what is used": (lambda p: torch.stack([p["w"].tanh().square().mean(), p["s"]]).logsumexp(0), {"w": Sum, "s": Dense}),
}


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_on_weights_are_multiples_of_one_tensor(name, n, device):
    penalty, kinds = PENALTIES[name]
    fn = lambda p, x: score(F.linear(x, p["w"] * (2 + p["s"]))) + x.sum() * penalty(p)  # noqa: E731
    problem = Problem(fn, (parameters(device, *kinds), torch.randn(n, 2, IN, device=device)))
    assert_agrees(problem)
    if n:
        assert found_kinds(problem) == kinds
        assert {type(term) for term in factored(problem)["w"].terms} == {Outer, Scaled}


def factored(problem):
    """The factors that large gradients have: small ones are materialised on devices whose values cannot be read."""
    with mock.patch.object(_base, "_TINY", 0):
        return psg.factored_grad(problem.fn)(*problem.args)


def found_kinds(problem):
    return {name: type(factor) for name, factor in factored(problem).items()}


def norms_and_reference(problem):
    grads = torch.func.vmap(torch.func.grad(problem.fn), in_dims=(None, 0))(*problem.args)
    expected = torch.cat([grad.flatten(1) for grad in grads.values()], 1).norm(dim=1)
    return psg.per_sample_norm(problem.fn)(*problem.args), expected


def lookup(table, x):
    return score(F.embedding((x[0, 0] > 0).long() + torch.arange(2, device=x.device), table))


def indexed(table, x):
    index = (x[0, 0] > 0).long() - torch.arange(1, 3, device=x.device)  # includes negative indices
    return score(table[index] * table.index_select(0, index % len(table)))


TABLES = {"rows": ((OUT, IN), Rows), "matrices": ((OUT, IN, 2), Views), "numbers": ((OUT,), Views)}


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_indexed(name, n, device):
    shape, kind = TABLES[name]
    problem = Problem(indexed, (torch.randn(shape, device=device), torch.randn(n, 2, IN, device=device)))
    assert_agrees(problem)
    assert n == 0 or type(psg.factored_grad(indexed)(*problem.args)) is kind


@pytest.mark.parametrize("n", [1, 5])
def test_tables_that_each_sample_indexes_once(n, device):
    def fn(p, i, j):
        return (p["rows"][i] * p["rows"][j]).sum() * p["numbers"][i].sin() + p["numbers"][j]

    p = {"rows": torch.randn(4, 3, device=device), "numbers": torch.randn(4, device=device)}
    index = torch.arange(n, device=device)
    assert_agrees(Problem(fn, (p, index % 4, -1 - index % 3)))


LOOKUPS = {
    "scaled": (lambda p: p["w"] * 0.3, {"w": Rows}),
    "its own row scales": (lambda p: p["w"] * p["gain"].detach(), {"w": Rows}),
    "its own column scales": (lambda p: p["w"] * p["columns"].detach(), {"w": Rows}),
    "divided by a parameter": (lambda p: p["w"] / p["s"], {"w": Rows, "s": Dense}),
    "its own gains": (lambda p: p["w"] * p["gain"] + p["columns"], {"w": Rows, "gain": Rows, "columns": Dense}),
    "low rank": (lambda p: p["b"] @ p["a"], {"a": Outer, "b": Rows}),
    "from the left": (lambda p: torch.ones(OUT, OUT, device=p["w"].device).tril() @ p["w"], {"w": Outer}),
    "a linear layer": (lambda p: F.linear(p["b"], p["a"].T, p["columns"]), {"a": Outer, "b": Rows, "columns": Dense}),
    "two layers": (lambda p: torch.addmm(p["columns"], F.linear(p["w"], p["a"]).relu(), p["a"]), {"w": Rows, "a": Outer, "columns": Dense}),
    "more rows": (lambda p: torch.cat([p["columns"][None].detach(), p["w"]]), {"w": Rows}),
    "side by side": (lambda p: torch.cat([p["b"], p["gain"]], 1), {"b": Rows, "gain": Rows}),
    "normalised": (lambda p: F.normalize(p["w"], dim=-1), {"w": Rows}),
    "normalised, by default": (lambda p: F.normalize(p["w"]), {"w": Rows}),
    "on the unit sphere": (lambda p: p["w"] / p["w"].norm(dim=1, keepdim=True), {"w": Rows}),
    "on the unit sphere, without the dimension": (lambda p: p["w"] / p["w"].square().sum(1).sqrt()[:, None], {"w": Rows}),
    "no longer than one": (lambda p: p["w"] * (1 / p["w"].norm(dim=-1)).clamp(max=1).unsqueeze(1), {"w": Rows}),
    "less their means": (lambda p: p["w"] - p["w"].mean(1, keepdim=True), {"w": Rows}),
    "probabilities": (lambda p: p["w"].softmax(-1), {"w": Rows}),
    "their logarithms": (lambda p: F.log_softmax(p["w"], 1), {"w": Rows}),
    "layer norm": (lambda p: F.layer_norm(p["w"], (IN,), p["columns"]), {"w": Rows, "columns": Dense}),
    "layer norm, with a bias": (
        lambda p: F.layer_norm(p["w"], normalized_shape=(IN,), weight=p["columns"].detach(), bias=p["columns"]),
        {"w": Rows, "columns": Dense},
    ),
    "layer norm, without": (lambda p: F.layer_norm(p["w"], (IN,)), {"w": Rows}),
    "root mean squares": (lambda p: F.rms_norm(p["w"], (IN,), p["columns"]), {"w": Rows, "columns": Dense}),
    "running sums": (lambda p: p["w"].cumsum(1), {"w": Rows}),
    "the mean of layers": (lambda p: torch.stack([p["w"], p["w"].tanh(), p["b"] @ p["a"]], 1).mean(1), {"w": Rows, "a": Outer, "b": Rows}),
    "a stack, added up": (lambda p: torch.stack([p["w"], p["w"].tanh()]).sum(0), {"w": Rows}),
    "split tables": (lambda p: torch.cat(torch.cat([p["a"], p["w"]]).split([3, 3])[::-1])[1:5], {"w": Rows, "a": Rows}),
    "every other row": (lambda p: torch.cat([p["w"], p["a"]])[::2].repeat(2, 1), {"w": Dense, "a": Dense}),
    "rows of others": (lambda p: p["a"][torch.tensor([0, -1, 1, 0], device=p["a"].device)], {"a": Rows}),
    "heads": (lambda p: (p["w"].view(OUT, 1, IN) * p["columns"]).view(OUT, IN), {"w": Rows, "columns": Dense}),
    "gates of heads": (lambda p: (p["w"][:, None] * p["b"][..., None]).flatten(1), {"w": Rows, "b": Rows}),
    "the largest of rows": (
        lambda p: torch.zeros_like(p["w"]).scatter_reduce_(
            0, p["w"].new_tensor([1, 0, 1, 2]).long()[:, None].expand(4, IN), p["w"], "amax"
        ),
        {"w": Rows},
    ),
    "selected rows": (lambda p: p["a"].index_select(0, torch.tensor([0, 1, 1, 0], device=p["a"].device)), {"a": Rows}),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_the_factor_of_a_lookup_is_carried_over(name, device):
    make, kinds = LOOKUPS[name]
    held = {"w": parameters(device, "w")["w"], **parameters(device, "gain", "columns"), **parameters(device, *kinds)}
    frozen = {name: held.pop(name) for name in list(held) if name not in kinds}
    problem = Problem(lambda p, x: lookup(make({**frozen, **p}), x), (held, torch.randn(5, 2, IN, device=device)))
    assert_agrees(problem)
    assert found_kinds(problem) == kinds


KERNELS = {
    "mirrored": (lambda w, s: (w + w.flip(2)) / 2, Sum),
    "a basis": (lambda w, s: torch.einsum("oib,bk->oik", w, w[:3, 0].cos()), Dense),
    "a mixture": (lambda w, s: (s[:, None, None, None] * torch.stack([w, w.sin(), 2 * w, w * w])).sum(0), Sum),
    "scaled": (lambda w, s: w * 0.3, Conv),
    "divided by a parameter": (lambda w, s: w / s[0], Conv),
    "filters scaled": (lambda w, s: w * s.detach()[:, None, None], Conv),
    "filters scaled by parameters": (lambda w, s: w * s[:, None, None], Conv),
    "channels scaled": (lambda w, s: w * s.detach()[:2, None], Scaled),
    "filters side by side": (lambda w, s: torch.cat([w[:1].detach(), w, 0.5 * w]), Conv),
    "channels side by side": (lambda w, s: torch.cat([w.narrow(1, 0, 1).detach(), w.narrow(1, 1, 1)], 1), Views),
    "weight norm": (lambda w, s: torch._weight_norm(w, s[:, None, None], 0), Sum),
    "standardised": (lambda w, s: (w - w.mean((1, 2), keepdim=True)) / w.std((1, 2), keepdim=True), Sum),
    "standardised by batch norm": (
        lambda w, s: F.batch_norm(w.reshape(1, 4, -1), None, None, s * 0.3, training=True, momentum=0.0, eps=1e-6).reshape_as(w),
        Sum,
    ),
    "standardised by batch norm, with a bias": (
        lambda w, s: F.batch_norm(w.reshape(1, 4, -1), None, None, None, s * 0.3, training=True).reshape_as(w),
        Sum,
    ),
    "the mean of two": (lambda w, s: torch.stack([w, w * s[:, None, None]]).mean(0), Conv),
    "by the statistics of batch norm": (
        lambda w, s: F.batch_norm(w.reshape(1, 4, -1), torch.ones_like(s), torch.full_like(s, 2.0)).reshape_as(w),
        Dense,
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_factor_of_a_convolution_is_carried_over(name, device):
    make, kind = KERNELS[name]
    params = {"w": torch.randn(4, 2, 3, device=device), "s": torch.randn(4, device=device)}
    problem = Problem(lambda p, x: score(F.conv1d(x, make(p["w"], p["s"]))), (params, torch.randn(5, 2, 6, device=device)))
    assert_agrees(problem)  # materialises the gradient, which is cheaper here
    with psg.plans.using(norm="gram"):
        assert_agrees(problem)
        assert found_kinds(problem)["w"] is kind


def numbers(w, *values):
    return torch.tensor(values, device=w.device)


def sparse(w, layout=torch.sparse_coo):
    return torch.tensor([[0, 2, 0, -1], [1, 0, 0, 0], [0, 0, 0, 0], [3, 1, 0, 2]], dtype=w.dtype, device=w.device).to_sparse(layout=layout)


def graph_attention(hidden, own, others, source, target):
    """A layer of a graph attention network (Velickovic et al., 2018) of several heads, as torch_geometric computes it."""
    to_others, to_own = ((hidden * weight).sum(-1) for weight in (others, own))
    scores = F.leaky_relu(to_others.index_select(0, source) + to_own.index_select(0, target), 0.2)
    weights = (scores - scores.detach().amax()).exp()
    total = weights.new_zeros(to_own.shape).scatter_add_(0, target[:, None].expand_as(weights), weights) + 0.1
    messages = (weights / total.index_select(0, target)).unsqueeze(-1) * hidden.index_select(0, source)
    return messages.new_zeros(hidden.shape).scatter_add_(0, target[:, None, None].expand_as(messages), messages)


@pytest.mark.parametrize("n", [0, 1, 4])
def test_attention_along_a_graph(n, device):
    """Two layers over a ring: only the rows of a node's neighbours are differentiated."""
    nodes, heads, width = 60, 2, 3
    nearby = [torch.arange(nodes, device=device).roll(k) for k in (1, 0, -1)]
    source, target = torch.cat(nearby), torch.arange(nodes, device=device).repeat(3)

    def fn(p, node):
        hidden = (p["table"] @ p["first"]).view(nodes, heads, width)
        hidden = graph_attention(hidden, p["own"], p["others"], source, target).flatten(1).relu()
        hidden = F.linear(hidden, p["second"]).view(nodes, heads, width)
        return F.embedding(node, graph_attention(hidden, p["own"], p["others"], source, target).mean(1)).sin().sum()

    shapes = {"table": (nodes, 5), "first": (5, 6), "second": (6, 6), "own": (heads, width), "others": (1, heads, width)}
    p = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    problem = Problem(fn, (p, torch.arange(n, device=device) * 7))
    assert_agrees(problem)
    assert n == 0 or found_kinds(problem) == {"table": Rows, "first": Outer, "second": Outer, "own": Dense, "others": Dense}


def added(op, table, places, include_self):
    """Messages of some rows to others, of a table of any shape."""
    messages = table.index_select(0, places[0]).sin()
    if op == "index_add":
        return table.index_add(0, places[1], messages, alpha=0.5)
    index = places[1].reshape(-1, *(1,) * (table.ndim - 1)).expand_as(messages)
    if op == "scatter_add":
        return table.new_zeros(table.shape).scatter_add_(0, index, messages)
    return table.scatter_reduce(0, index, messages.round(decimals=1), op, include_self=include_self)


OF_TABLES = {
    "times what has rows or none": lambda w, p, places: w * p["other"],
    "less what has rows or none": lambda w, p, places: torch.sub(p["other"], w, alpha=2),
    "divided": lambda w, p, places: w / (2 + p["other"].square()),
    "the larger": lambda w, p, places: torch.maximum(w, p["other"]),
    "chosen": lambda w, p, places: torch.where(w.detach() > 0, w, p["other"].sin()),
    "interpolated": lambda w, p, places: torch.lerp(w.expand_as(w + p["other"]).contiguous(), (w + p["other"]).cos(), 0.3),
    "times itself": lambda w, p, places: w * w,
    "its sums": lambda w, p, places: w.sum(-1, keepdim=True) if w.ndim > 1 else w,
    "its norms": lambda w, p, places: w / (1 + w.norm(dim=-1, keepdim=True)) if w.ndim > 1 else w,
    "its variance": lambda w, p, places: w.var(1, correction=0) if w.ndim > 1 and w.shape[1] else w,
    "softmax": lambda w, p, places: w.softmax(-1) if w.ndim > 1 else w,
    "layer norm": lambda w, p, places: F.layer_norm(w, w.shape[1:]) if w[:1].numel() > 1 and w.ndim > 1 else w,
    "a part of each row": lambda w, p, places: w.narrow(1, 0, 1) if w.ndim > 1 and w.shape[1] else w,
    "an entry of each row": lambda w, p, places: w.select(-1, 0) if w.ndim > 1 and w.shape[-1] else w,
    "joined": lambda w, p, places: torch.cat([w, w.sin()], 1) if w.ndim > 1 else torch.stack([w, w.sin()], 1),
    "flat": lambda w, p, places: w.flatten(1) if w.ndim > 1 else w[:, None],
    **{op: lambda w, p, places, op=op: added(op, w, places, True) for op in ("index_add", "scatter_add", "sum", "mean", "amax", "amin")},
    **{f"{op} of others": lambda w, p, places, op=op: added(op, w, places, False) for op in ("sum", "mean", "amax", "amin")},
}


@given(
    steps=st.lists(st.sampled_from(sorted(OF_TABLES)), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 3)),
    row=st.lists(st.integers(0, 3), max_size=2),
    kept=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    edges=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8),
    seed=st.integers(0, 99),
)
@settings(max_examples=100)
def test_tables_of_drawn_shapes(device, steps, sizes, row, kept, edges, seed):
    """Of rows of any shape, with arguments that have rows, or some of their dimensions, or none."""
    torch.manual_seed(seed)
    n, rows, looked_up = sizes
    places = torch.tensor(edges, dtype=torch.int64, device=device).reshape(-1, 2).T % rows
    other = [size if keep else 1 for size, keep in zip((rows, *row), kept, strict=False)]
    p = {"table": torch.randn(rows, *row, device=device), "other": torch.randn(other[seed % 2 :], device=device)}

    def fn(p, index, x):
        table = p["table"]
        for step in steps:
            own = {"other": p["other"] if table.shape[1:] == p["table"].shape[1:] else p["other"].sum()}
            table = OF_TABLES[step](table, own, places)
        return (F.embedding(index, table.flatten(1) if table.ndim > 1 else table[:, None]) * x).sin().sum()

    if looked_up == 0 or n == 0:
        index = torch.zeros(n, looked_up, dtype=torch.int64, device=device)
    else:
        index = torch.randint(rows, (n, looked_up), device=device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "var\\(\\): degrees of freedom")
        warnings.filterwarnings("ignore", ".*every gradient is zero")
        assert_agrees(Problem(fn, (p, index, torch.randn(n, device=device))))


@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("few", [True, False])
def test_rows_of_products_with_a_matrix_of_which_most_is_zero(few, n, device):
    nodes = 80
    links = torch.eye(nodes, device=device).roll(1, 0) - 0.5 * torch.eye(nodes, device=device)
    links[3] = 0  # a node without neighbours
    links = links if few else links + 0.01

    def fn(p, index):
        hidden = F.linear(links @ p["table"].sin(), p["w"]).relu()
        return F.embedding(index, (links.T * p["s"]) @ hidden + (links @ hidden) * p["s"]).sin().sum()

    p = {"table": torch.randn(nodes, 2, device=device), "w": torch.randn(2, 2, device=device), "s": torch.randn((), device=device)}
    problem = Problem(fn, (p, torch.tensor([[3, 4, 4], [5, 7, 0], [3, 3, 3], [70, 2, 1]], device=device)[:n]))
    assert_agrees(problem)
    assert_agrees(Problem(fn, (p, problem.args[1][2:3])))  # no row that is looked up has neighbours
    assert n == 0 or not few or found_kinds(problem)["table"] is Rows


def test_rows_of_a_table_that_is_filled_by_a_parameter(device):
    def fn(p, index):
        table = p["table"].masked_fill(p["table"].detach() > 1, p["numbers"][0])
        return F.embedding(index, table.scatter_add(0, numbers(table, 1)[0].expand(1, 2), p["numbers"][:2][None])).sin().sum()

    p = {"table": torch.randn(50, 2, device=device), "numbers": torch.randn(5, device=device)}
    assert_agrees(Problem(fn, (p, torch.tensor([[1, 4], [5, 5]], device=device))))


def test_a_number_added_to_numbers(device):
    def fn(p, index):
        return p["table"].sin().scatter_add(0, numbers(p["table"], 1)[0], p["number"].square())[index].sin().sum()

    p = {"table": torch.randn(50, device=device), "number": torch.randn((), device=device)}
    assert_agrees(Problem(fn, (p, torch.tensor([[1, 4], [5, 5]], device=device))))


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_rows_that_are_replaced_get_no_gradient_of_what_is_not_finite(reduce, device):
    places = torch.tensor([0, 1, 1, 3, 3], device=device)[:, None].expand(5, 3)

    def fn(p, x, index):
        table = p["w"].sin().scatter_reduce(0, places, p["v"].cos(), reduce, include_self=False)
        return (table[index] * x).sum()

    p = {"w": torch.rand(5, 3, device=device), "v": torch.rand(5, 3, device=device)}
    x, index = torch.tensor([1.0, math.inf], device=device), torch.tensor([[0, 1], [2, 3]], device=device)
    assert_trees_close(psg.per_sample_grad(fn)(p, x, index)["w"], loop_grad(fn)(p, x, index)["w"])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("positions", [3, 40])
def test_graphs_with_a_hub(positions, n, device):
    """A node that most edges meet, which some samples look up: then the whole graph is differentiated for them."""
    nodes, generator = 30, torch.Generator().manual_seed(0)
    source, target = torch.randint(nodes, (2, 200), generator=generator).to(device)
    target[:100] = 0

    def fn(p, index):
        hidden = p["table"] * p["gain"]
        for _ in range(2):
            hidden = torch.zeros_like(hidden).index_add_(0, target, hidden.index_select(0, source).tanh())
        return F.embedding(index, hidden).square().sum()

    p = {"table": torch.randn(nodes, 2, device=device), "gain": torch.randn(2, device=device)}
    index = torch.randint(nodes, (n, positions), generator=generator).to(device)
    index[0, 0] = 0
    assert_agrees(Problem(fn, (p, index)))


# Unusual forms of calls, of a number s, a vector v, a matrix w and a stack t.
FORMS = {
    "sum of a number": lambda s, v, w, t: s.sum(0) * s.mean(-1, keepdim=True),
    "sums by keyword": lambda s, v, w, t: t.sum(dim=0) + torch.sum(t, axis=0) + t.mean(0, dtype=torch.float64) + t.sum((0, 1)),
    "sum of nothing": lambda s, v, w, t: t[:0].sum(0) + w,
    "repeats of a number": lambda s, v, w, t: s.repeat(3) + s.tile(2, 3) + s.expand(2, 3),
    "repeats by list": lambda s, v, w, t: w.repeat([2, 1]) + torch.tile(w, dims=(2, 1)) + w.repeat(repeats=(2, 1)),
    "no repeats": lambda s, v, w, t: w.repeat(0, 1).sum() + w.repeat_interleave(0, dim=0).sum() + torch.tile(w, ()),
    "repeats of several counts": lambda s, v, w, t: (
        torch.repeat_interleave(v, torch.tensor([1, 0, 2], device=v.device)) * v.repeat_interleave(2)[:3]
    ),
    "new dimensions": lambda s, v, w, t: (
        v.expand([2, 4, 3]) + w.expand(2, -1, -1) + torch.broadcast_to(s, t.shape) + w[:1].expand(0, 3).sum()
    ),
    "einsum of a list": lambda s, v, w, t: torch.einsum("ij,kj->ik", [w, w]) + torch.einsum("ij,kj", w, w.sin()),
    "einsum with capitals": lambda s, v, w, t: torch.einsum(" B a , c a ", w, w.sin()),
    "einsum with an ellipsis": lambda s, v, w, t: torch.einsum("...j,kj->...k", t, w),
    "einsum of diagonals": lambda s, v, w, t: torch.einsum("ii->i", w[:3]) + torch.einsum("ii", w[:3]),
    "einsum by numbers": lambda s, v, w, t: torch.einsum(w, [0, 1], w.sin(), [2, 1], [0, 2]),
    "einsum of a number": lambda s, v, w, t: torch.einsum(",ij->ij", s, w) + torch.einsum("ij,ij->ij", w, w[:1].sin()),
    "kron of others": lambda s, v, w, t: (
        torch.kron(s, s.sin()) + torch.kron(v, v.sin()).sum() + torch.kron(v, w).sum() + torch.kron(t, t[:1, :2])
    ),
    "tensordot of dimensions": lambda s, v, w, t: torch.tensordot(t, w, dims=([-1], [-1])) + torch.tensordot(w, w.sin()),
    "tensordot by a tensor": lambda s, v, w, t: torch.tensordot(w, v, dims=torch.tensor(1)),
    "scattered to no columns": lambda s, v, w, t: w[:, :0].scatter_add(0, numbers(w, 1, 2)[:, None].expand(2, 0), w[:2, :0]).sum() + w,
    "no columns": lambda s, v, w, t: F.embedding(numbers(w, 0, 3), w[:, :0][numbers(w, 0, 1, 2, 3, 3)]).sum() + w,
    "a table of one row": lambda s, v, w, t: w[:1] / w[:1].norm(dim=(0, 1), keepdim=True) - w[:1, :1] + w[:1, :1].mean(0, keepdim=True),
    "tensordot of none": lambda s, v, w, t: torch.tensordot(v, v.sin(), 0) + torch.tensordot(t, w, ([1, 2], [0, 1])).sum(),
    "blocks of others": lambda s, v, w, t: torch.block_diag(w, v, s) + torch.block_diag(w, w[:0], w[:2]).sum(),
    "diagonals aside": lambda s, v, w, t: (
        torch.diag(v, 1)[:, 1:] + torch.diag(w) + torch.diag_embed(w).sum() + torch.diag_embed(v, -1)[1:].sum()
    ),
    "padded aside": lambda s, v, w, t: (
        F.pad(w, (-1, 1)) + F.pad(t, (1, 1), mode="circular")[0, :, 1:4] + F.pad(t, (0, 0, 1, 1, 2, 0))[3, 1:5]
    ),
    "stacks of others": lambda s, v, w, t: torch.stack([s, s.sin()]).sum() + torch.stack(tensors=(w, w.sin()), dim=-1).sum(-1),
    "long stack": lambda s, v, w, t: torch.stack([k * v for k in range(20)]),
    "indexed by lists": lambda s, v, w, t: w[[0, -1, 0]] + w[torch.tensor([True, False, True, True], device=w.device)],
    "indexed by others": lambda s, v, w, t: (
        w[torch.tensor(1, device=w.device)] + w[:, torch.tensor([0, 2, 2], device=w.device)] + t[:, [1, 0]].sum(0)[:1]
    ),
    "indexed by pairs": lambda s, v, w, t: w[torch.tensor([[0, -1], [1, 2]], device=w.device)] + w[[0, 1], [1, 2]].sum(),
    "indexed by nothing": lambda s, v, w, t: w[torch.zeros(2, 0, dtype=torch.int64, device=w.device)].sum() + w[None],
    "added to columns": lambda s, v, w, t: (
        w.index_add(-1, numbers(w, 0, 0), w[:, :2].sin()) + w.scatter_add(1, numbers(w, 2, 0, 1)[None].expand(4, 3), w)
    ),
    "added to a vector": lambda s, v, w, t: v.index_add(0, numbers(v, 0, 0), v[:2].sin()),
    "layers of vectors": lambda s, v, w, t: F.linear(v, w, w[:, 0]) + F.linear(w, v) + F.linear(t, w, w[:, 0]) + (t @ v).sum() + w @ v,
    "products of stacks": lambda s, v, w, t: (t @ w.T) @ (w @ t.mT).sin(),
    "norms by keyword": lambda s, v, w, t: (
        F.layer_norm(input=w, normalized_shape=(3,), weight=v, bias=v.sin(), eps=1e-3) + torch.layer_norm(w, [3], v, v)
    ),
    "norms of all": lambda s, v, w, t: F.layer_norm(w, (4, 3), w.sin()) + F.normalize(input=1 + w) + F.layer_norm(w, [3], None, v),
    "along other dimensions": lambda s, v, w, t: (
        w.cumsum(dim=0) + F.softmax(w, dim=0) + w.amax(1)[:, None] + w.amax() + w.logsumexp((0, 1))
    ),
    "sparse by others": lambda s, v, w, t: (
        w @ torch.eye(3, device=w.device).to_sparse() + torch.mv(torch.eye(3, device=w.device).to_sparse(), v)
    ),
    "constant lookups": lambda s, v, w, t: (
        F.embedding(numbers(w, 0, 1, 0), w, 0)
        + F.embedding(numbers(w, 0, 1, 0), w, scale_grad_by_freq=True)
        + F.embedding(torch.tensor([[0, 1], [3, 0]], device=w.device), w).sum(1)[:1]
    ),
    "grouped attention": lambda s, v, w, t: F.scaled_dot_product_attention(
        t[None].repeat(1, 2, 1, 1), t[None], t[None, :, 1:3].repeat(1, 1, 2, 1), enable_gqa=True, scale=0.3
    ),
}


@pytest.mark.parametrize("once", [True, False], ids=["lookup", "all"])
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_calls_on_parameters(name, once, device):
    """Whether an op's adjoint takes a form of its call or not, gradients are those of the loop."""

    def fn(p, x):
        output = FORMS[name](*(2 * own.sin() for own in p))
        if once and output.ndim == 2:
            return F.embedding((x[:2] > 0).long() % len(output), output).sin().sum() * x[0]
        return (output * x.sum()).sin().sum()

    shapes = (), (3,), (4, 3), (2, 4, 3)
    assert_agrees(Problem(fn, (tuple(torch.randn(shape, device=device) for shape in shapes), torch.randn(3, 3, device=device))))


# Every value is a matrix of one shape, so that any step may follow any other.
STEPS = {
    "number": lambda w, p: w * 0.7,
    "parameter": lambda w, p: p["s"] * w,
    "divided": lambda w, p: w / (2 + p["s"].square()),
    "of a number": lambda w, p: 2.0 / (3 + w.square()),
    "rows": lambda w, p: w * p["gain"],
    "rows, as a vector": lambda w, p: p["gain"].view(-1)[:, None] * w,
    "columns": lambda w, p: w * p["columns"],
    "columns divided": lambda w, p: w / (2 + p["columns"].square()),
    "columns added": lambda w, p: w - p["columns"],
    "rows added": lambda w, p: p["gain"] + w,
    "both": lambda w, p: w + p["gain"] * p["columns"],
    "entries": lambda w, p: w * p["w"],
    "added": lambda w, p: p["w"] - 0.7 * w,  # not zero, which some steps would divide by
    "low rank": lambda w, p: w + 0.5 * p["b"] @ p["a"],
    "from the left": lambda w, p: (p["b"] @ p["b"].T) @ w,
    "from the right": lambda w, p: w @ (p["a"].T @ p["a"]),
    "reversed": lambda w, p: 1 - w,
    "detached": lambda w, p: w + w.detach() * p["s"].detach(),
    "its norm": lambda w, p: w / (1 + w.norm()),
    "the norms of its rows": lambda w, p: w / (1 + w.norm(dim=1, keepdim=True)),
    "its own spectrum": lambda w, p: w / (3 + torch.dot(p["gain"].flatten(), torch.mv(w, p["columns"])).square()),
    "turned and back": lambda w, p: (w.T.contiguous() * p["gain"].T).mT,
    "cut and joined": lambda w, p: torch.cat(w.split(1)[::-1]),
    "in place of some": lambda w, p: torch.cat([w[:2], p["a"][:1], w[3:]]) + torch.cat([p["gain"], w[:, 1:]], 1),
    "squared": lambda w, p: w * w,
    "flat": lambda w, p: w.reshape(-1).unflatten(0, (OUT, IN)).view_as(w),
    "masked": lambda w, p: w * (p["w"].detach() > 0),
    "rows normalised": lambda w, p: F.normalize(3 + w) / (1 + w.norm(dim=1))[:, None],
    "layer norm": lambda w, p: F.layer_norm(w, (IN,), p["columns"]) + F.layer_norm(w, w.shape, p["w"], p["gain"].expand(w.shape)),
    "root mean squares": lambda w, p: F.rms_norm(w, (IN,), p["columns"]) + F.rms_norm(w, (IN,)),
    "running sums": lambda w, p: w.cumsum(1) + w.cumsum(0),
    "a Kronecker product": lambda w, p: torch.kron(w[:2].contiguous(), p["gain"][2:]) + torch.kron(p["gain"][:2], w[1:3].contiguous()),
    "by a sparse matrix": lambda w, p: torch.sparse.mm(sparse(w), w) + sparse(w, torch.sparse_csr) @ w,
    "a sparse matrix from the right": lambda w, p: (w.T @ sparse(w)).T + torch.mm(w.T.tanh(), sparse(w)).T,
    "rows of itself": lambda w, p: w[numbers(w, 3, 0, -1, 0)] + w.index_select(0, numbers(w, 1, 1, 2, 1)),
    "added to rows": lambda w, p: p["w"].index_add(0, numbers(w, 1, 3, 1, 0), w, alpha=0.3),
    "scattered to rows": lambda w, p: p["w"].scatter_add(0, numbers(w, 2, 3, 2, 2)[:, None].expand(-1, IN), w),
    "written into": lambda w, p: written(written(w * 1.5, (slice(None, None, 2), 1), p["w"][1:3, 0]), (TRIANGLE[0][:2], [2, 0]), w[:2, 1]),
    "triangles": lambda w, p: w.triu(1) - w.tril().masked_scatter(p["w"].detach() > 0, p["w"].sin()),
    "its diagonal": lambda w, p: w + torch.diag_embed(w.T.diagonal())[[0, 2, 1, 0]],
    "graph attention": lambda w, p: graph_attention(
        torch.stack([w, w @ p["a"].T @ p["a"]], 1), p["columns"], p["w"][:2], numbers(w, 0, 3, 1, 2, 2, 3), numbers(w, 1, 1, 0, 3, 2, 2)
    ).mean(1),
    "the largest of rows": lambda w, p: w.scatter_reduce(0, numbers(w, 1, 1, 2, 0)[:, None].expand(-1, IN), p["w"], "amax"),
    "the smallest of rows": lambda w, p: torch.scatter_reduce(
        p["w"], 0, numbers(w, 3, 1, 3)[:, None].expand(-1, IN), torch.cat([w, w])[3:6], "amin", include_self=False
    ),
    "means and products of rows": lambda w, p: (
        w.scatter_reduce(0, numbers(w, 1, 1, 2, 0)[:, None].expand(-1, IN), w.sin(), "mean")
        + w.scatter_reduce(0, numbers(w, 1, 1, 2, 0)[:, None].expand(-1, IN), w.cos(), "prod")
        + w.scatter_reduce(0, numbers(w, 1, 2, 0, 3, 0, 3).view(2, 3), w[1:3], "sum")
    ),
    "rows of matrices": lambda w, p: (
        (w[:, :, None] * p["a"].T).softmax(1).sum(-1)
        + F.layer_norm(w[:, None] * p["b"][..., None], (RANK, IN)).select(1, 1)
        + torch.cat([w[:, None], w[:, None].sin()], 1).narrow(1, 1, 1).squeeze(1)
        + torch.where(p["w"].detach()[:, None] > 0, w[:, None] * p["gain"][..., None], p["columns"])[:, 0]
    ),
    "rows of matrices, moved": lambda w, p: (
        (w[:, :, None] * p["a"].T)[numbers(w, 1, 3, 1, 0)].sum(2)
        + torch.zeros_like(w)[:, None].index_add(0, numbers(w, 2, 2, 0, 1), w.sin()[:, None], alpha=0.5)[:, 0]
        + torch.zeros_like(w[0, 0]).expand(OUT).index_add(0, numbers(w, 2, 2, 0, 1), w[:, 1])[:, None]
    ),
    "mean of two": lambda w, p: torch.stack([w, p["w"] * w], 1).mean(1) + torch.stack([w, w.sin()]).sum(0),
    "sum of the parts": lambda w, p: (
        w.reshape(2, 2, IN).sum(1, keepdim=True).expand(2, 2, IN).reshape(OUT, IN) + torch.stack([w, p["w"]])[1]
    ),
    "scaled by groups": lambda w, p: (
        (w.view(2, 2, IN) * p["gain"][:2, None] / (2 + p["a"][:, None].square()) - p["s"].expand(2, 2, 1)) * p["columns"]
    ).view(OUT, IN),
    "a mixture": lambda w, p: (p["columns"].softmax(0)[:, None, None] * torch.stack([w, p["w"], w.sin()])).sum(0),
    "a mixture, by einsum": lambda w, p: torch.einsum("e,eoi->oi", p["columns"], torch.stack([w, w * w, w.cos()])),
    "a mixture, by tensordot": lambda w, p: torch.tensordot(p["columns"], torch.stack([w, w * w, w.cos()]), dims=1),
    "contracted": lambda w, p: torch.tensordot(w, p["a"], dims=([1], [1])) @ p["a"] + torch.tensordot(w.T, p["b"], ([1], [0])).mean(),
    "a tensor train": lambda w, p: torch.einsum("ib, bkl->ikl", w, p["w"][:IN].view(IN, 1, IN)).reshape(OUT, IN).tanh(),
    "in three sides": lambda w, p: torch.einsum("or,r,ri", p["b"], p["s"].expand(RANK), p["a"]).T + torch.einsum("oi,oi->oi", w, p["w"]),
    "repeated": lambda w, p: w[:2, :1].repeat(2, IN) + w[:1].tile(OUT, 1) + w[:, :1].repeat(1, 1, IN)[0],
    "repeated rows": lambda w, p: w[1:3].repeat_interleave(2, 0) + w[:, 1:2].repeat_interleave(IN, dim=-1),
    "copies": lambda w, p: w[None, :2].expand(2, 2, IN).reshape(OUT, IN) * w[:2, None].expand(2, 2, IN).flatten(0, 1),
    "blocks": lambda w, p: torch.block_diag(w[:2, :1], w[:1], w[:1, :1] * 2)[:, 1:4] + torch.diag(w[0] + w[1])[:, :IN].sum(0),
    "diagonals": lambda w, p: w @ torch.diag(p["columns"] * w[2]) + (w @ torch.diag_embed(w[0])).sin(),
    "padded": lambda w, p: F.pad(w[1:, :2], (1, 0, 0, 1)) + F.pad(w, (0, 1, 2, 0), value=2.0)[2:, :IN],
    "flipped": lambda w, p: (w + w.flip(0)) / 2 + torch.cat([torch.rot90(w[:3], k) for k in range(2)])[1:5],
    "attention": lambda w, p: F.scaled_dot_product_attention(w[None], p["w"][None], w[None].sin())[0],
    "causal attention": lambda w, p: F.scaled_dot_product_attention(
        w.view(2, 2, IN), p["w"].view(2, 2, IN), w.view(2, 2, IN), is_causal=True
    ).view(OUT, IN),
    "masked attention": lambda w, p: F.scaled_dot_product_attention(w, w, p["w"], attn_mask=w.detach() @ w.T > 0),
    "dropout that draws nothing": lambda w, p: F.dropout(w, 0.5, training=False) * F.dropout(w, 0.0),
    "sums of a number": lambda w, p: w * (2 * p["s"]).sum(0) - (3 * p["s"]).mean(-1) * w.sum() + (p["s"] * w[0, 0]).repeat(OUT, 1),
    "made of a vector": lambda w, p: F.linear(p["columns"], torch.cat([w, w.sin(), w])).view(OUT, IN),
    "made of vectors": lambda w, p: F.linear(p["w"][:2], torch.cat([w, w[:2]])).view(OUT, IN),
    "positive": lambda w, p: F.softplus(w),
    "triangular": lambda w, p: w.triu() - (w.T @ w).trace().tanh(),
    "weight norm": lambda w, p: torch._weight_norm(3 + w, p["gain"], 0),
    "columns normalised": lambda w, p: F.normalize(3 + w, dim=0),
    "standardised": lambda w, p: (w - w.mean(1, keepdim=True)) / (1 + w.var(1, keepdim=True)).sqrt(),
    "distributions": lambda w, p: w.softmax(1) + w.log_softmax(0),
    "its greatest": lambda w, p: w - w.amax(0) * w.logsumexp(1).tanh()[:, None],
    "in another shape, standardised": lambda w, p: F.batch_norm(w.reshape(1, OUT, -1), None, None, p["gain"].view(-1), training=True)[0],
    "of a product": lambda w, p: torch.addmm(w, p["b"], p["a"], alpha=0.3) * torch.outer(p["gain"][:, 0], p["columns"]),
    "penalised": lambda w, p: w * (1 + (w.T @ w - torch.eye(IN, device=w.device)).square().mean()).rsqrt(),
    "between vectors": lambda w, p: w / (3 + (p["gain"][:, 0] @ w @ p["columns"]).square()) + p["gain"][:, 0].sin() @ w,
    "rolled": lambda w, p: w.roll(1, 0) * torch.roll(w, (1, 2), dims=(0, 1)) - w.fliplr() + torch.flipud(w).roll(2),
    "its rows' greatest": lambda w, p: w / (1 + w.abs().max(1, keepdim=True)[0]) - w.min(0).values * w.median(-1)[0][:, None],
    "the greater of it and another": lambda w, p: torch.max(w, p["w"]) + torch.min(w, p["columns"]),
    "layer norms": lambda w, p: F.layer_norm(w, (IN,)) + F.layer_norm(w, w.shape, p["w"], eps=0.1) * F.layer_norm(w, (IN,), None, w[0]),
    "their root mean squares": lambda w, p: F.rms_norm(w, (IN,)) + F.rms_norm(w, w.shape, p["w"], eps=0.1),
    "inner products": lambda w, p: torch.inner(w, p["a"]) @ p["a"] + w.inner(p["columns"])[:, None] * torch.inner(p["s"], p["columns"]),
    "rectified, with slopes": lambda w, p: F.prelu(w, p["columns"]) + F.prelu(w, p["s"].view(1)),
    "quantised by rows": lambda w, p: torch.fake_quantize_per_channel_affine(
        w,
        torch.linspace(0.1, 0.4, OUT, device=w.device, dtype=torch.float32),
        torch.zeros(OUT, device=w.device, dtype=torch.int32),
        0,
        -3,
        3,
    ),
}
USES = {
    "linear": lambda w, x: F.linear(x, w),
    "matmul": lambda w, x: x @ w.T,
    "lookup": lambda w, x: F.embedding(torch.tensor([1, 3, 1], device=w.device), w) * x[0],
    "lookups of each sample": lambda w, x: F.embedding((x[0] > 0).long() + numbers(x, 0, 2, 2), w).sin(),
    "convolution": lambda w, x: F.conv1d(x[..., None], w[..., None]),
    "entries": lambda w, x: w * x[0],
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", STEPS)
@given(st.sampled_from([0, 1, 4]), st.sampled_from(sorted(USES)), st.sampled_from([None, "gram"]))
@settings(max_examples=10)
def test_each_derivation(device, name, n, use, plan):
    params = parameters(device, "w", "a", "b", "gain", "columns", "s")
    with psg.plans.using(norm=plan):
        assert_agrees(Problem(lambda p, x: score(USES[use](STEPS[name](p["w"], p), x)), (params, torch.randn(n, 2, IN, device=device))))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@given(
    st.sampled_from([0, 1, 4]),
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    st.lists(st.sampled_from(sorted(USES)), min_size=1, max_size=2),
    st.booleans(),
    st.sampled_from([None, "gram"]),
)
def test_drawn_derivations(device, n, steps, uses, midway, plan):
    def fn(p, x):
        w, early = p["w"], p["w"]
        for k, step in enumerate(steps):
            w = STEPS[step](w, p)
            early = w if k == 0 else early
        return sum(score(USES[use](early if midway and k else w, x)) for k, use in enumerate(uses))

    params = parameters(device, "w", "a", "b", "gain", "columns", "s")
    with psg.plans.using(norm=plan):
        assert_agrees(Problem(fn, (params, torch.randn(n, 2, IN, device=device))))


# Weights [o, i] or [o, i, k] with their entries in another order, standardised, divided, or rounded.
ARRANGED = {
    "flipped": lambda w: w.flip(0, -1),
    "flipped from left to right, and upside down": lambda w: w.fliplr() - 2 * w.flipud(),
    "rolled": lambda w: w.roll((1, -2), (0, -1)),
    "rolled in one line": lambda w: w.roll(3),
    "turned": lambda w: torch.rot90(w, 2, (0, 1)) + w,
    "over the largest": lambda w: w / (1 + w.abs().max(-1, keepdim=True).values),
    "less the least": lambda w: w - w.min(0).values,
    "less the median": lambda w: w - torch.median(w, 1, keepdim=True)[0],
    "the greater of two": lambda w: torch.max(w, w.detach().roll(1)),
    "between vectors": lambda w: w / (3 + (w.new_ones(len(w)) @ w.flatten(1) @ w[0].detach().flatten()).square()),
    "inner products": lambda w: torch.inner(w.flatten(1), w[:1].flatten(1)).view(-1, *(1,) * (w.ndim - 1)) * w,
    "layer norm": lambda w: F.layer_norm(w, w.shape[1:], w[0].detach(), eps=0.1),
    "root mean squares": lambda w: F.rms_norm(w, w.shape[1:], eps=0.1),
    "batch norm": lambda w: F.batch_norm(w.transpose(0, 1), None, None, training=True, eps=0.1).transpose(0, 1),
    "means": lambda w: w + w.mean(1, keepdim=True) * w.sum(0),
    "slopes": lambda w: F.prelu(w, w.flatten(2).mean((0, 2)) if w.ndim > 2 else w.mean(0)),
    "rounded by channels": lambda w: torch.fake_quantize_per_channel_affine(
        w, torch.linspace(0.1, 0.4, w.shape[1], device=w.device, dtype=torch.float32), w.new_zeros(w.shape[1]).int(), 1, -3, 3
    ),
}


@pytest.mark.parametrize("name", ARRANGED)
@given(
    n=st.sampled_from([0, 1, 4]),
    sizes=st.tuples(st.integers(2, 5), st.integers(2, 5), st.integers(1, 3)),
    positions=st.integers(1, 4),
    use=st.sampled_from(["linear", "convolution", "lookup", "entries"]),
    plan=st.sampled_from([None, "gram"]),
)
@settings(max_examples=15)
def test_weights_of_drawn_sizes(name, n, sizes, positions, use, plan, device):
    o, i, k = sizes

    def fn(w, x):
        w = ARRANGED[name](w)
        if use == "convolution":
            return score(F.conv1d(x, w))
        if use == "lookup":
            return score(F.embedding((x[0] > 0).long(), w))
        return score(F.linear(x.T, w) if use == "linear" else w * x[:, 0])

    w = torch.randn((o, i, k) if use == "convolution" else (o, i), device=device)
    x = torch.randn(n, i, positions + k - 1, device=device)
    with psg.plans.using(norm=plan):
        assert_agrees(Problem(fn, (w, x)))


# The weight as a function of the parameters: [o, i], of which a gradient is best materialised if there are many positions.
MATERIALIZED = {
    "low rank, scaled": lambda p: (1 + p["b"] @ p["a"]) * p["gain"],
    "low rank, of each column": lambda p: torch.mm(p["b"], p["a"]).tanh() * p["columns"],
    "products of products": lambda p: p["w"] + (p["b"] @ p["a"]) * F.linear(p["b"].tanh(), p["a"].T),
    "of a scaled side": lambda p: F.gelu(torch.addmm(p["w"], p["b"], p["a"] * p["columns"], beta=0.5, alpha=2)),
    "rectified": lambda p: (p["b"] @ p["a"]).relu() + p["w"].triu(),
    "magnitude and direction": lambda p: (lambda v: p["gain"] * v / (1 + v.norm(dim=1, keepdim=True)))(p["w"] + p["b"] @ p["a"]),
    "weight norm": lambda p: torch._weight_norm(3 + p["b"] @ p["a"], p["gain"], 0),
    "normalised": lambda p: F.normalize(p["w"] + p["b"] @ p["a"], dim=0),
    "less its mean": lambda p: (lambda v: (v - v.mean(1, keepdim=True)) / (1 + v.square().mean()))(p["w"] @ (p["a"].T @ p["a"])),
    "softmax": lambda p: (p["b"] @ p["a"]).softmax(1) + (p["b"] @ p["a"]).log_softmax(0),
    "cut and joined": lambda p: torch.cat([part.tanh() for part in (p["b"] @ p["a"]).split(2)]),
}


@given(
    st.sampled_from(sorted(MATERIALIZED)),
    st.sampled_from([0, 1, 5]),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)),
    st.sampled_from([1, 40]),
    st.booleans(),
)
def test_gradients_that_are_materialized_midway(device, name, n, sizes, positions, twice):
    o, i, r = sizes
    shapes = {"w": (o, i), "a": (r, i), "b": (o, r), "gain": (o, 1), "columns": (i,)}

    def fn(p, x):
        w = MATERIALIZED[name](p)
        return score(F.linear(x, w)) + (score(w * x[0]) if twice else 0)

    params = {key: torch.randn(shape, device=device) for key, shape in shapes.items()}
    assert_agrees(Problem(fn, (params, torch.randn(n, positions, i, device=device))))


@pytest.mark.parametrize("name", sorted(set(MATERIALIZED) - {"cut and joined"}))
def test_they_are_carried_on_and_not_left_to_autograd(name, device, monkeypatch):
    """Under vmap torch's matrix products of what requires grad copy the whole gradient."""
    pull = mock.Mock(side_effect=_autograd.pulled_for_all)
    monkeypatch.setattr(_autograd, "pulled_for_all", pull)
    params = parameters(device, "w", "a", "b", "gain", "columns")
    psg.per_sample_grad(lambda p, x: score(F.linear(x, MATERIALIZED[name](p))))(params, torch.randn(5, 40, IN, device=device))
    alone = {"softmax": 2} | ({"weight norm": 1, "normalised": 1} if _machine.MANY_BYTES else {})
    assert pull.call_count == alone.get(name, 0)  # one op each time, on detached arguments


PARTS = {
    "layers of a stack": ((3, 3, 3), lambda w: [w[0], w.select(0, 1), w[2]]),
    "layers, one twice": ((2, 3, 3), lambda w: [w[0], w[1], w[0]]),
    "loop over a stack": ((3, 3, 3), list),
    "unbind": ((3, 3, 3), lambda w: w.unbind(0)),
    "chunks of rows": ((9, 3), lambda w: w.chunk(3)),
    "columns": ((3, 9), lambda w: w.split([3, 6], 1)[0:1] + (w[:, 4:7],)),
    "columns that overlap": ((3, 9), lambda w: [w[:, :3], w[:, 2:5]]),
    "every other row": ((6, 3), lambda w: [w[::2], w[1::2]]),
    "another shape": ((3, 1, 3, 1), lambda w: [w.squeeze(1).flatten(1), w[:, 0, :, 0]]),
    "last dimension of a stack": ((3, 3, 2), lambda w: [w[..., 0], w[..., 1]]),
    "of a scaled one": ((2, 3, 3), lambda w: [(0.5 * w)[0], (w * 2)[1]]),
    "nested": ((2, 6, 3), lambda w: [w[0].narrow(0, 1, 3), w[1][3:], w[0][:3]]),
    "flat": ((18,), lambda w: [w[:9].view(3, 3), w[9:].view(3, 3).T]),
    "permuted": ((3, 1, 3), lambda w: [w.permute(1, 0, 2).squeeze(0), w.movedim(1, 0).reshape(3, 3)]),
}


@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("name", PARTS)
def test_views_of_a_parameter(name, n, device):
    shape, parts = PARTS[name]

    def fn(p, x):
        for w in parts(p):
            x = F.linear(x, w).sin()
        return x.sum()

    p, x = torch.randn(shape, device=device), torch.randn(n, 2, 3, device=device)
    assert_agrees(Problem(fn, (p, x)))
    if n:
        factor = psg.factored_grad(fn)(p, x)
        assert all(isinstance(term, Views) for term in (factor.terms if isinstance(factor, Sum) else [factor]))


@given(
    n=st.sampled_from([0, 1, 3]),
    shape=st.tuples(*[st.integers(1, 4)] * 3),
    orders=st.tuples(*[st.permutations(range(3))] * 3),
    positions=st.sampled_from([1, 3]),
    first=st.booleans(),
)
def test_products_of_stacks_whose_dimensions_change_places(device, n, shape, orders, positions, first):
    """As in monarch and butterfly matrices."""
    stack = [torch.empty(shape).permute(orders[0]).permute(orders[1]).shape[dim] for dim in (0, 2)]

    def fn(p, x):
        w = p["w"].permute(orders[0]).permute(orders[1]) @ p["m"]
        w = w.permute(orders[2]) * 2
        return score(F.linear(x[:, : w[0].numel() if first else w.shape[2]], w.flatten(1) if first else w.flatten(0, 1)))

    params = {"w": torch.randn(shape, device=device), "m": torch.randn(*stack, 2, device=device)}
    assert_agrees(Problem(fn, (params, torch.randn(n, positions, 16, device=device))))


STACKS = {
    "monarch": lambda p, eye: p["l"] @ (p["r"] @ eye.view(4, 8, 32)).transpose(0, 1).reshape(4, 8, 32),
    "monarch, transposed": lambda p, eye: (
        (eye.view(32, 4, 8).transpose(0, 1) @ p["r"].mT).transpose(0, 1).mT.transpose(0, 1) @ p["l"].view(8, 8, 4)[:, :4].mT
    ).permute(1, 2, 0),
    "butterfly": lambda p, eye: (
        p["l"] @ (p["r"] @ eye.view(8, 4, 32).transpose(0, 1)).view(4, 2, 4, 32).permute(1, 0, 2, 3).reshape(4, 8, 32)
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_no_gradient_of_a_weight_whose_dimensions_change_places_is_materialized(name, device, monkeypatch):
    def fn(p, x):
        return score(F.linear(x, STACKS[name](p, torch.eye(32, device=device)).reshape(32, 32)))

    params = {key: torch.randn(4, 8, 8, device=device) for key in "lr"}
    monkeypatch.setattr(Views, "materialize", None)
    factored(Problem(fn, (params, torch.randn(3, 1, 32, device=device))))


@given(
    n=st.sampled_from([0, 1, 3]),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    rank=st.integers(1, 20),
    name=st.sampled_from(["pinv", "hermitian", "pinverse"]),
    positions=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_pseudoinverses(device, n, shape, rank, name, positions, seed):
    def fn(w, x):
        if name == "hermitian":
            made = torch.linalg.pinv(w @ w.T, rtol=1e-6, hermitian=True)
        else:
            made = torch.pinverse(w, 1e-6) if name == "pinverse" else torch.linalg.pinv(w, rtol=1e-6)
        return score(F.linear(x[:, : made.shape[1]], made))

    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(size, min(rank, *shape), generator=generator))[0] for size in shape)
    w = (left @ right.T).to(device)  # whose singular values are zero or one
    assert_agrees(Problem(fn, (w, torch.randn(n, positions, 20, device=device))))


def test_the_gradient_of_a_pseudoinverse_is_not_materialized(device):
    fn = lambda w, x: score(F.linear(x, torch.linalg.pinv(w)))  # noqa: E731
    assert type(factored(Problem(fn, (torch.randn(16, 8, device=device), torch.randn(3, 1, 16, device=device))))) is Outer


PERMUTED = {
    "indexed": lambda w, order: w.flatten()[order],
    "gathered": lambda w, order: w.reshape(1, -1).gather(1, order[None]),
    "taken": lambda w, order: (2 * w).take(order),
    "one twice": lambda w, order: w.flatten()[torch.cat([order[:1], order[:-1]])],
    "permuted twice": lambda w, order: w.flatten()[order].take(order),
}


@pytest.mark.parametrize("name", PERMUTED)
@given(
    n=st.sampled_from([0, 1, 3]), shape=st.tuples(st.integers(1, 4), st.integers(1, 4)), positions=st.sampled_from([1, 3]), data=st.data()
)
def test_weights_that_have_all_entries_of_another_in_another_order(name, device, n, shape, positions, data):
    order = torch.tensor(data.draw(st.permutations(range(math.prod(shape)))), device=device)
    fn = lambda w, x: score(F.linear(x, PERMUTED[name](w, order).view(shape)))  # noqa: E731
    w, x = torch.randn(shape, device=device), torch.randn(n, positions, shape[1], device=device)
    assert_agrees(Problem(fn, (w, x)))


@pytest.mark.parametrize("name", sorted(set(PERMUTED) - {"one twice"}))
def test_their_gradients_are_not_materialized(name, device):
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(device)
    fn = lambda w, x: score(F.linear(x, PERMUTED[name](w, order).view(8, 8)))  # noqa: E731
    if device.type == "cpu":  # elsewhere the order would have to be waited for
        assert type(factored(Problem(fn, (torch.randn(8, 8, device=device), torch.randn(3, 1, 8, device=device))))) is Views


def test_derivations_compiled(device):
    def fn(p, x):
        for w in p["stack"].unbind():
            x = F.linear(x, 0.5 * w).tanh()
        return (p["table"][(x.sum() > 0).long()] * x).sum()

    p = {"stack": torch.randn(3, 3, 3, device=device), "table": torch.randn(2, 3, device=device)}
    x = torch.randn(4, 2, 3, device=device)
    fast = psg.jit(psg.clipped_grad(fn, 1.0), backend="aot_eager")
    out, expected = fast(p, x), psg.clipped_grad(fn, 1.0)(p, x)
    assert [info.error for info in fast.cache_info()] == [None]
    assert_trees_close(out.grads, expected.grads, per_sample=False)
    assert_trees_close(out.norms, expected.norms)


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("norm", [lambda w: torch._weight_norm(w, w[:, :1], 0), lambda w: torch.norm_except_dim(w, 2, 0), F.normalize])
def test_tables_of_which_nothing_is_looked_up(norm, n, device):
    index = torch.zeros(n, 0, dtype=torch.int64, device=device)
    assert_agrees(Problem(lambda w, i: F.embedding(i, norm(w)).sum() + w[0, 0], (torch.randn(5, 3, device=device), index)))


COMPILED = {
    "a sparse matrix": lambda w, p, i, graph: (graph @ w)[i],
    "a sparse matrix twice": lambda w, p, i, graph: F.embedding(i, torch.sparse.mm(graph, (graph @ w).sin())),
    "rows added up": lambda w, p, i, graph: F.embedding(i, p["w"].index_add(0, numbers(w, 1, 3, 1, 0), w)),
    "rows of rows": lambda w, p, i, graph: F.embedding(i, w[numbers(w, 1, 3, 1, 0)] + F.embedding(numbers(w, 0, 0, 1, 2), w)),
    "layer norm": lambda w, p, i, graph: F.embedding(i, F.layer_norm(F.linear(w, w[:IN].sin()), (IN,), p["columns"])),
    "a Kronecker product": lambda w, p, i, graph: torch.kron(w, p["gain"]) @ F.embedding(i, w).T,
    "attention": lambda w, p, i, graph: F.linear(F.embedding(i, w), F.scaled_dot_product_attention(w, w, p["w"])),
    "a matrix exponential": lambda w, p, i, graph: F.linear(F.embedding(i, w), torch.matrix_exp(w.T @ w)),
    "reflections": lambda w, p, i, graph: F.linear(
        F.embedding(i, w), torch.linalg.householder_product(w, 2 / (1 + w.tril(-1).square().sum(0)))
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_derivations_and_lookups_compiled(name, device):
    """In one graph: a call that ran eagerly would warn."""
    graph = sparse(torch.empty(0, device=device))

    def fn(p, i):
        return score(COMPILED[name](p["w"] * p["s"], p, i, graph))

    problem = parameters(device, "w", "gain", "columns", "s"), numbers(torch.empty(0, device=device), *[[0, 3, 3], [1, 2, 0]])
    for transform in (psg.clipped_grad(fn, 1.0), psg.per_sample_norm(fn)):
        assert_trees_close(psg.jit(transform, backend="aot_eager")(*problem), transform(*problem))


def of_a_filled_weight(size, first, second):
    """A triangular weight, and its places."""

    def fn(v, x):
        return F.linear(x, written(v.new_zeros(size, size), (first, second), v)).sin().sum()

    return fn


def along_edges(first, second):
    def fn(w, x):
        for _ in range(2):
            w = torch.zeros_like(w).index_add(0, second, w[first]).sin()
        return F.embedding(x, w).sin().sum()

    return fn


EMPTY = torch.zeros(0, dtype=torch.long)
WRITTEN = {
    "no row": lambda p: written(p["w"] * 2, EMPTY, p["a"][:0]),
    "no entry": lambda p: written(p["w"] * 2, (EMPTY, EMPTY), p["columns"][:0]),
    "no entry of a mask": lambda p: written(p["w"] * 2, torch.zeros(OUT, IN, dtype=torch.bool), p["columns"][:0]),
    "everything": lambda p: written(p["w"] * 2, (), p["c"]),
    "a number of each sample's": lambda p: written(p["w"] * 2, ..., p["s"]),
    "more dimensions": lambda p: written(p["w"] * 2, torch.tensor([2]), p["columns"].view(1, 1, 1, IN)),
    "more dimensions of slices": lambda p: written(p["w"] * 2, slice(1, 2), p["columns"].view(1, 1, 1, IN)),
    "more dimensions of numbers": lambda p: written(p["w"] * 2, (1, 0), p["s"].view(1, 1)),
    "one for all of a mask": lambda p: written(p["w"] * 2, torch.ones(OUT, IN).tril() > 0, p["s"]),
    "a Python number": lambda p: written(p["w"] * 2, (slice(1, 3), [0, 2]), 1),
    "its own rows": lambda p: written(w := p["w"] * 2, [0, 1], w[[1, 0]]),
    "itself": lambda p: written(w := p["w"] * 2, ..., w),
}


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("use", ["all", "lookup"])
@pytest.mark.parametrize("name", WRITTEN)
def test_forms_of_writes(name, use, jit, device):
    """On the fast path, and in one graph."""

    def fn(p, x, i):
        weight = WRITTEN[name](p)
        return score(F.linear(x, weight) if use == "all" else F.embedding(i, weight))

    args = parameters(device, "w", "c", "a", "columns", "s"), torch.randn(3, 2, IN, device=device), torch.tensor([[0, 1], [3, 3], [2, 1]])
    if jit:
        assert_trees_close(psg.jit(psg.per_sample_grad(fn), backend="aot_eager")(*args), loop_grad(fn)(*args))
    else:
        assert_agrees(Problem(fn, args))


EVERYWHERE = torch.arange(OUT)[[2, 0, 3, 1]][:, None].expand(OUT, IN), torch.arange(IN)[[1, 2, 0]].expand(OUT, IN)
SHUFFLED = torch.tensor([[2, 0, 1], [0, 3, 3], [3, 1, 0], [1, 2, 2]])
PUT = {
    "index_put": lambda w, c: w.index_put(EVERYWHERE, c),
    "index_put, by name": lambda w, c: torch.index_put(input=w, indices=EVERYWHERE, values=c),
    "index_put of ATen": lambda w, c: torch.ops.aten.index_put(w, [None, torch.tensor([1, 2, 0])], c),
    "index_put, added": lambda w, c: w.index_put(EVERYWHERE, c, accumulate=True),
    "index_put, of itself": lambda w, c: w.index_put(EVERYWHERE, w),
    "index_put, twice": lambda w, c: w.index_put((SHUFFLED % 2, SHUFFLED % 3), c, accumulate=True),
    "scatter": lambda w, c: w.scatter(0, SHUFFLED, c),
    "scatter, by name": lambda w, c: torch.scatter(input=w, dim=0, index=SHUFFLED, src=c),
    "put": lambda w, c: w.put(EVERYWHERE[0][:, :2], c[:, :2]),
    "put, added": lambda w, c: w.put(EVERYWHERE[0], c, accumulate=True),
    "index_copy": lambda w, c: w.index_copy(0, torch.tensor([2, 0]), c[:2]),
    "index_copy, by name": lambda w, c: torch.index_copy(input=w, dim=1, index=torch.tensor([2, 0]), source=c[:, :2]),
    "masked_scatter": lambda w, c: w.masked_scatter(SHUFFLED > 1, c),
    "masked_scatter, of all": lambda w, c: w.masked_scatter(SHUFFLED >= 0, c),
    "diagonal_scatter": lambda w, c: w.diagonal_scatter(c[0, :2], offset=-2),
    "select_scatter": lambda w, c: torch.select_scatter(input=w, src=c[0], dim=0, index=1),
    "slice_scatter": lambda w, c: w.slice_scatter(c[:2], 0, 0, None, 2),
}


@pytest.mark.parametrize("name", PUT)
@given(n=st.sampled_from([0, 1, 3]), positions=st.sampled_from([0, 1, 3]), seed=st.integers(0, 99))
def test_ops_that_write_entries(name, n, positions, seed):
    torch.manual_seed(seed)
    fn = lambda p, x: score(F.linear(x, PUT[name](p["w"] * 2, p["c"].sin())))  # noqa: E731
    assert_agrees(Problem(fn, (parameters("cpu", "w", "c"), torch.randn(n, positions, IN))))


def test_products_that_overflow_where_another_value_is_written(device):
    """Autograd has exact zeros there, whatever the cotangent is."""

    def fn(w, x, y):
        weight = w * 1
        weight[0] = 0.5
        return (F.linear(x, weight) * y).sum()

    w = torch.randn(OUT, IN, device=device, dtype=torch.float32)
    x, y = torch.randn(3, IN).to(w), torch.randn(3, OUT).to(w)
    x[1], y[1, 0] = 1e20, 1e20
    found = psg.per_sample_grad(fn)(w, x, y)
    assert (found[:, 0] == 0).all()
    assert_trees_close(found, loop_grad(fn)(w, x, y))


@pytest.mark.parametrize("name", ["filled", "graph"])
def test_constants_that_a_trace_reads(name, device):
    """A program that makes room for the largest neighbourhood is compiled again where edges have changed, any other is not."""
    size, edges = 128, 60
    if name == "filled":
        places = torch.tril_indices(size, size, device=device)
        fn, w = of_a_filled_weight(size, *places), torch.randn(places.shape[1], device=device)
        x, others = (
            torch.randn(8, size, device=device),
            [places.flip(0), places.clone().index_fill_(1, torch.tensor([3], device=device), 0)],
        )
    else:
        places = torch.randint(40, (2, edges), device=device)
        fn, w, x = along_edges(*places), torch.randn(40, 3, device=device), torch.randint(40, (5, 2), device=device)
        others = [torch.randint(40, (2, edges), device=device), torch.zeros(2, edges, dtype=torch.long, device=device)]
    fast, norms = (psg.jit(transform(fn), backend="aot_eager") for transform in (psg.factored_grad, psg.per_sample_norm))
    for now in (places, *others):
        places.copy_(now)
        expected = loop_grad(fn)(w, x)
        for _ in range(2):
            assert_trees_close(fast(w, x).materialize(), expected)
            torch.testing.assert_close(norms(w, x), expected.flatten(1).norm(dim=1))
        assert now is not places or isinstance(fast(w, x), Entries if name == "filled" else Rows)
    assert (fast._builds.total(), norms._builds.total()) == {"filled": (1, 1), "graph": (3, 3)}[name]


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_what_is_written_into_after_it_was_read_is_an_error_as_in_torch(device):
    def fn(w, x):
        scale = torch.ones(3, device=x.device)
        scaled = w * scale
        scale.zero_()
        return F.linear(x, scaled).sum()

    w, x = torch.randn(4, 3, device=device), torch.randn(2, 3, device=device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        psg.per_sample_norm(fn)(w, x)


def test_views_side_by_side_are_one_factor(device):
    fn = lambda w, x: sum(F.linear(x, own).sin().sum() for own in w)  # noqa: E731
    factor = psg.factored_grad(fn)(torch.randn(4, 5, 3, device=device), torch.randn(2, 3, device=device))
    assert isinstance(factor, Views) and len(factor.factors) == 4


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_places_that_are_apart_share_no_entry(shape, data):
    entries = torch.arange(torch.Size(shape).numel()).reshape(shape)

    steps = 0

    def view():
        nonlocal steps
        part = entries
        for dim in range(entries.ndim):
            start, step = data.draw(st.integers(0, shape[dim] - 1)), data.draw(st.integers(1, 2))
            steps += step > 1
            part = part[(slice(None),) * dim + (slice(start, data.draw(st.integers(start + 1, shape[dim])), step),)]
        return part.squeeze() if data.draw(st.booleans()) else part.permute(*reversed(range(part.ndim)))

    views = [view(), view()]
    regions = [Region(tuple(part.shape), tuple(part.stride()), part.storage_offset()) for part in views]
    assert all(torch.equal(region.of(entries), part) for region, part in zip(regions, views, strict=True))
    shared = set(views[0].flatten().tolist()) & set(views[1].flatten().tolist())
    assert not (regions[0].is_apart(regions[1], entries.shape) and shared)
    assert regions[0].is_apart(regions[1], entries.shape) or shared or steps > 0  # interleaved slices need not be recognised


@pytest.mark.parametrize("n", [1, 4])
def test_penalties_and_masks_compiled(n, device):
    def fn(p, x):
        hidden = F.linear(x, p["w"] * torch.ones(4, 3, device=x.device).tril()).tanh()
        return F.linear(hidden, torch._weight_norm(p["v"], p["gain"], 0)).square().sum() + 0.1 * sum(
            own.square().sum() for own in p.values()
        )

    p = {"w": torch.randn(4, 3, device=device), "v": torch.randn(5, 4, device=device), "gain": torch.randn(5, 1, device=device)}
    x = torch.randn(n, 3, device=device)
    fast = psg.jit(psg.clipped_grad(fn, 1.0), backend="aot_eager", buckets=3)
    out, expected = fast(p, x), psg.clipped_grad(fn, 1.0)(p, x)
    assert [info.error for info in fast.cache_info()] == [None]
    assert_trees_close(out.grads, expected.grads, per_sample=False)
    assert_trees_close(out.norms, expected.norms)


def test_reductions_by_keyword(device):
    def fn(w, x):
        return score(F.linear(x, w / torch.sum(input=w.exp(), dim=1)[:, None]))

    assert_agrees(Problem(fn, (torch.randn(4, 3, device=device), torch.randn(3, 2, 3, device=device))))


def test_a_selected_zero_meets_a_cotangent_that_is_not_finite(device):
    # The mean of no entries has a NaN cotangent: `where` turns it into zero, where a product with the mask would stay NaN.
    mask = torch.tensor([[True, True], [False, False]], device=device)

    def fn(w, x):
        mean = torch.where(mask, w, 0.0).sum(1) / mask.sum(1)
        return (mean.nan_to_num() * x).sum()

    w, x = torch.randn(2, 2, device=device), torch.randn(3, 2, device=device)
    found, expected = psg.per_sample_grad(fn)(w, x), torch.func.vmap(torch.func.grad(fn), (None, 0))(w, x)
    if device.type != "cpu":  # where values cannot be read, psg promises no more than the other entries (see help(psg.tree))
        found = found.where(mask, expected)
    assert_trees_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_terms_that_cancel_are_not_rounded_to_sixteen_bits(dtype, device):
    generator = torch.Generator().manual_seed(0)
    p, x = torch.randn(40, 60, generator=generator), 1 + 0.05 * torch.randn(16, 60, generator=generator)
    p, x = p.to(device, dtype), x.to(device, dtype)
    fn = lambda p, x: F.linear(x, p).sum() - p.sum()  # noqa: E731
    exact = psg.factored_grad(fn)(p, x).to(torch.float64).materialize().flatten(1).norm(dim=1)
    torch.testing.assert_close(psg.per_sample_norm(fn)(p, x).double(), exact, rtol=1e-2, atol=0)
    compiled = psg.jit(psg.per_sample_norm(fn), backend="eager", check=False)(p, x)
    assert (compiled.double() > 0.99 * exact).all()


def test_inner_products_larger_than_float16_has_numbers(device):
    p, x = 0.1 * torch.randn(300, 400, device=device).half(), 4 * torch.rand(3, 400, device=device).half()
    fn = lambda p, x: (F.linear(x, p) * 0.5).sum() + 0.05 * x[0] * p.sum()  # noqa: E731
    exact = psg.factored_grad(fn)(p, x).to(torch.float64).materialize().flatten(1).norm(dim=1)
    torch.testing.assert_close(psg.per_sample_norm(fn)(p, x).double(), exact, rtol=1e-2, atol=0)


@pytest.mark.parametrize("op", ["conv", "entries"])
def test_a_factor_that_stands_twice_in_a_sum(op, device):
    p, x = torch.randn(2, 3, 3, device=device), torch.randn(4, 3, 5, device=device)
    fns = {"conv": lambda p, x: F.conv1d(x, p + p).square().sum(), "entries": lambda p, x: (p + p).square().sum() * x.sum()}
    with psg.plans.using(norm="gram"):
        factor = psg.factored_grad(fns[op])(p, x)
        dense = psg.per_sample_grad(fns[op])(p, x).flatten(1)
        assert_trees_close(psg.tree.gram(factor), dense @ dense.T)
        assert_trees_close(psg.tree.inner(factor, factor), dense.square().sum(1))


@pytest.mark.parametrize("size, weight", [(1e-23, 1e25), (1e20, 1e-25)])
def test_norms_whose_parts_have_no_squares_in_float32(size, weight, device):
    p, x = size * torch.randn(20, device=device).float(), torch.rand(3, 4, device=device).float()
    x[0] = 0
    fn = lambda p, x: p.square().sum() * x.sum() * weight  # noqa: E731
    exact = psg.per_sample_grad(fn)(p, x).double().norm(dim=1)
    torch.testing.assert_close(psg.per_sample_norm(fn)(p, x).double(), exact, rtol=1e-5, atol=0)


def test_parameters_without_dimensions_or_entries(device):
    x = torch.randn(4, 1, device=device)
    fn = lambda p, x: F.linear(x, p.reshape(1, 1)).sum() - F.conv1d(x[None, None], p.reshape(1, 1, 1)).sum() * (1 + 1e-9)  # noqa: E731
    assert_agrees(Problem(fn, (torch.tensor(0.3, device=device), x)))
    assert_agrees(
        Problem(lambda p, x: (p.exp().sum(0) + p.exp().sum(1).square().sum()).sum() * x.sum(), (torch.randn(3, 0, device=device), x))
    )


def repeated(step, times):
    def fn(p, x):
        w = p
        for _ in range(times):
            w = step(w)
        return score(F.linear(x, w)) + score(F.embedding((x > 0).long(), w))

    return fn


# Each of 30 steps uses a weight twice: without adding up terms there would be 2^30 of them.
LONG = {
    "linear": lambda w: 0.9 * w + 0.1 * w,
    "entry by entry": lambda w: 0.9 * w + 0.1 * w.tanh(),
    "rows": lambda w: w - 0.1 * w.logsumexp(1, keepdim=True),
    "normalised": lambda w: F.normalize(3 + w, dim=0),
    "Newton-Schulz": lambda w: 1.5 * w - 0.5 * w @ (w.T @ w) / (1 + w.square().sum()),
    "a number": lambda w: w / (1 + 0.1 * w.norm()),
}


@pytest.fixture(params=[True, False], ids=["little", "large"])
def little(request, monkeypatch):
    """Autograd differentiates many steps on small tensors at once; factors are carried over steps on larger ones one by one."""
    if not request.param:
        monkeypatch.setattr(_lifted, "_FEW_BYTES", -1)


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("name", LONG)
def test_derivations_of_many_steps(name, device):
    assert_agrees(Problem(repeated(LONG[name], 30), (torch.randn(4, 3, device=device), torch.randn(3, 2, 3, device=device))))


@pytest.mark.usefixtures("little")
def test_power_iteration_that_is_differentiated(device):
    def fn(p, x):
        u = torch.ones(4, device=x.device)
        for _ in range(20):
            v = F.normalize(p.T @ u, dim=0)
            u = F.normalize(p @ v, dim=0)
        return score(F.linear(x, p / (u @ p @ v)))

    assert_agrees(Problem(fn, (torch.randn(4, 3, device=device), torch.randn(3, 2, 3, device=device))))


def test_groups_of_no_sample_are_zero_whatever_the_weights(device):
    scale = (torch.arange(12.0, device=device).view(4, 3) - 5).log()  # NaN and -inf among them
    w, x = torch.randn(4, 3, device=device), torch.randn(4, 3, device=device)
    factor = psg.factored_grad(lambda w, x: F.linear(x, w * scale).sum())(w, x)
    groups = psg.tree.segment_sum(factor, torch.tensor([0, 0, 2, 2], device=device), 3)
    assert psg.tree.norm(groups)[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("scale, shift", [(1, 0), (30, 0), (1, 1e4), (1, 1e6), (100, 0)])
def test_probabilities_of_large_logits_in_float32(op, scale, shift, dtype, device):
    """The terms of a row's gradient nearly cancel: the error against double precision must be no worse than about the loop's."""
    w, x = (scale * torch.randn(6, 8, device=device) + shift).float(), torch.randn(5, 8, device=device).float()

    def fn(w, x):
        return F.linear(x.to(dtype), op(w, 1, dtype=dtype)).square().sum()

    exact = loop_grad(lambda w, x: F.linear(x, op(w, 1)).square().sum())(w.double(), x.double())
    near = (loop_grad(fn)(w, x) - exact).abs().max()
    found = psg.per_sample_grad(fn)(w, x)
    assert (found - exact).abs().max() <= 4 * near + (1e-6 if dtype == torch.float32 else 1e-8) * exact.abs().max()
    norms, expected = psg.per_sample_norm(fn)(w, x), exact.flatten(1).norm(dim=1)
    assert ((norms - expected).abs() <= 4 * near * w.numel() ** 0.5 + 1e-5 * expected).all()


NARROW = {
    "a number": lambda p: 16 * p["w"],
    "row scales": lambda p: p["w"] * p["gain"].detach(),
    "merged low rank": lambda p: p["w"] + 8 * (p["b"] @ p["a"]),
    "normalised": lambda p: F.normalize(p["w"], dim=1),
    "cast": lambda p: p["w"].float(),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("size, back", [(1e-2, 2.0**13), (1e3, 1e-4)])
def test_products_of_float16_whose_sides_would_leave_it(name, size, back, device):
    def fn(p, x):
        weight = NARROW[name](p)
        return (F.linear(x.to(weight.dtype), weight).float() * back).sum() / 8

    shapes = {"w": (8, 6), "gain": (8, 1), "b": (8, 2), "a": (2, 6)}
    p = {key: (0.5 + torch.rand(shape, device=device)).half() for key, shape in shapes.items()}
    x = (size * (0.5 + torch.rand(4, 5, 6, device=device))).half()
    expected = loop_grad(fn)(p, x)
    found = psg.per_sample_norm(fn)(p, x)
    exact = psg.tree.norm(tree_map(torch.Tensor.double, expected))
    assert exact.isfinite().all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=0)


def test_outputs_of_which_each_is_computed_from_one_parameter(device):
    def fn(p, x):
        first, second = torch.broadcast_tensors(p["a"], p["b"])
        return (first * x).sum() + x[0] * second

    params = {name: torch.randn((), device=device, dtype=torch.float64) for name in "ab"}
    psg.check(fn, method="capture")(params, torch.randn(5, 3, device=device, dtype=torch.float64))


def test_ops_are_known_by_names_that_torch_has():
    holders = (
        torch,
        torch.Tensor,
        F,
        torch.linalg,
        torch.fft,
        torch.special,
        torch.sparse,
        torch._C._linalg,
        torch._C._fft,
        torch._C._special,
        torch._C._nn,
    )
    names = {_ops.name_of(value) for holder in holders for value in (getattr(holder, name) for name in dir(holder)) if callable(value)}
    names |= {name for name, value in vars(torch._C.TensorBase).items() if hasattr(value, "__get__")}
    names |= {"custom_function_call"}  # torch's too, though in none of these modules
    known = {*_derived._DERIVING, *_ops.LIKE_ANOTHER}
    assert known <= names, known - names


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", ["weight norm", "normalised rows", "masked", "merged low rank"])
def test_small_derivations_are_materialized(name, n, monkeypatch, device):
    monkeypatch.undo()
    make, kinds = MATRICES[name]
    params = {"w": torch.randn(OUT, IN), "gain": torch.rand(OUT, 1), "a": torch.randn(RANK, IN), "b": torch.randn(OUT, RANK)}
    params = {key: params[key].to(device) for key in kinds}
    x = torch.randn(n, 3, IN, device=device)

    def fn(p, x):
        return F.linear(x, make(p)).tanh().square().sum()

    psg.check(fn)(params, x)
    if name != "merged low rank":
        assert isinstance(psg.factored_grad(fn)(params, x)["w"], Dense)


class Bounded(torch.autograd.Function):
    """The identity, whose backward clips the cotangent: it is not linear."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w):
        return w * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent.clamp(-1, 1)


class Mixed(torch.autograd.Function):
    """Two outputs, whose cotangents the backward multiplies."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w, v):
        return w * v, w + v

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, c, d):
        w, v = ctx.saved_tensors
        return (c * d * v).tanh(), (c * w + d * d).sin()


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: x[0] * (Bounded.apply(w) ** 2).sum(),
        lambda w, x: Bounded.apply(w[0]) * x.sum() * 3,
        lambda w, x: (Bounded.apply(w.sum()) * x).sum() * 3,
        lambda w, x: (Bounded.apply(w) * x * 2).sum() + (Bounded.apply(w).sin() * x).sum(),
        lambda w, x: (lambda v: (v * x * 2).sum() + (v.exp() * x).sum() + (v[1:] * x[1:]).sum())(Bounded.apply(w * 2)),
        lambda w, x: (Bounded.apply(Bounded.apply(w * 2) * 3) * x).sum(),
        lambda w, x: (lambda v, u: (v * x).sum() * 3 + (u.sin() * x).sum() + (u * v).sum())(*Mixed.apply(w * 2, w.sin())),
        lambda w, x: (lambda v, u: (v * x).sum() * 3 + (u.sin() * x).sum())(*Mixed.apply(w, w)),
        lambda w, x: F.linear(x, Bounded.apply(w.outer(w))).sin().sum() * 3,
    ],
)
def test_functions_whose_backward_is_not_linear(fn, n):
    w, x = torch.randn(3), torch.randn(n, 3)
    expected = loop_grad(fn)(w, x)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), expected)
    torch.testing.assert_close(psg.per_sample_norm(fn)(w, x), expected.norm(dim=1))


@pytest.mark.filterwarnings("error")
def test_filters_standardised_by_torchs_own_batch_norm(device):
    """Its arguments are in another order than those of torch.nn.functional's."""
    w, gain, x = (torch.randn(*shape, device=device, dtype=torch.float64) for shape in ((24, 24), (24,), (3, 24)))

    def fn(p, x):
        weight = torch.batch_norm(p["w"], p["gain"], p["gain"], None, None, True, 0.1, 1e-5, False)
        return F.linear(x, weight).tanh().sum()

    params = {"w": w, "gain": gain}
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(params, x), loop_grad(fn)(params, x))


@settings(max_examples=20)
@given(n=st.sampled_from([0, 1, 3]), rows=st.integers(1, 5), columns=st.integers(2, 6), leading=st.integers(1, 3))
def test_standardised_filters_are_not_read_by_welfords_algorithm(n, rows, columns, leading):
    """torch's `var_mean` takes longer than all else that is done with each entry."""

    def fn(p, x):
        weight = F.batch_norm(p["w"], None, None, p["gain"], p["bias"], training=True)
        return F.linear(x, weight.transpose(0, 1).flatten(1)).sin().sum()

    params = {"w": torch.randn(leading, rows, columns), "gain": torch.randn(rows), "bias": torch.randn(rows)}
    x = torch.randn(n, leading * columns)
    with torch.autograd.profiler.profile() as profile, psg.plans.using(norm="gram"):
        norms = psg.per_sample_norm(fn)(params, x)
    torch.testing.assert_close(norms, psg.tree.norm(loop_grad(fn)(params, x)))
    assert not {"aten::var_mean", "aten::var"} & {event.key for event in profile.key_averages()}


# Filters [o, i, *kernel] as functions of a weight and of one number for each of them, [o, 1, ...]; a few are scaled several times.
STANDARDISED = {
    "variance and mean": lambda w, gain: (lambda v, m: (w - m) * torch.rsqrt(v + 1e-2) * gain)(
        *torch.var_mean(w, dim=tuple(range(1, w.ndim)), keepdim=True, unbiased=False)
    ),
    "mean and standard deviation": lambda w, gain: (
        gain * (w - w.mean([*range(1, w.ndim)], keepdim=True)) / (1 + w.flatten(1).std(1).view_as(gain))
    ),
    "batch norm": lambda w, gain: F.batch_norm(
        w.reshape(1, len(w), -1), None, None, gain.view(-1), gain.flatten(), training=True
    ).reshape_as(w),
    "batch norm of filters": lambda w, gain: F.batch_norm(w.transpose(0, 1), None, None, gain.view(-1), training=True, eps=0.1).transpose(
        0, 1
    ),
    "weight norm": lambda w, gain: torch._weight_norm(w, gain, 0) * gain.exp(),
    "normalised": lambda w, gain: F.normalize(w * gain, dim=1) * gain,
    "root mean squares": lambda w, gain: F.rms_norm(w, w.shape[1:]) * gain * gain.sin(),
    "scaled, and added up": lambda w, gain: w * gain + 2 * (w * gain * gain) + w,
}


@pytest.mark.parametrize("name", STANDARDISED)
@given(
    n=st.sampled_from([0, 1, 3]),
    sizes=st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 40]), st.integers(2, 3)),
    dims=st.integers(1, 2),
    pixels=st.integers(3, 5),
    plan=st.sampled_from([None, "gram"]),
)
@settings(max_examples=20)
def test_standardised_filters(name, n, sizes, dims, pixels, plan, device):
    """With many channels their gradients lie in memory with the channels last."""
    o, i, k = sizes
    convolve = {1: F.conv1d, 2: F.conv2d}[dims]

    def fn(p, x):
        return score(convolve(x, STANDARDISED[name](p["w"], p["gain"])))

    w, gain = torch.randn(o, i, *[k] * dims, device=device), torch.randn(o, *[1] * (1 + dims), device=device)
    with psg.plans.using(norm=plan):
        assert_agrees(Problem(fn, ({"w": w, "gain": gain}, torch.randn(n, i, *[pixels] * dims, device=device))))


# Functions of a weight and of which entries of it count.
SELECTED = {
    "two masks": lambda w, mask: torch.logaddexp(torch.where(mask, w, -torch.inf), (2 * w).masked_fill(mask.roll(1), -torch.inf)),
    "filled": lambda w, mask: torch.logaddexp(w.masked_fill(~mask, -torch.inf), (2 * w).masked_fill(~mask, -torch.inf)).clamp(min=-3),
    "a root of zeros": lambda w, mask: (w - 0.5).relu().sqrt(),
    "a root of a mask": lambda w, mask: torch.where(mask, w.square(), 0).sqrt(),
    "clamped": lambda w, mask: (w.clamp(min=20, max=21) - 20).sqrt(),
    "a triangle": lambda w, mask: torch.outer(w.flatten(), w.flatten()).tril().sqrt(),
    "bounded": lambda w, mask: (F.hardtanh(10 * w) - 1).sqrt().nan_to_num(),
    "one over zeros": lambda w, mask: (torch.where(mask, w, 0) ** -1).clamp(max=1e3),
    "filled with zeros": lambda w, mask: w.masked_fill(mask, 0).square().sqrt(),
}


@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize("traced", [True, False])
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=2), n=st.integers(0, 3), summed=st.booleans(), seed=st.integers(0, 99))
def test_entries_that_an_op_leaves_out_have_no_gradient_whatever_the_cotangent_is(name, traced, sizes, n, summed, seed):
    """0 times NaN is NaN, but autograd selects."""
    torch.manual_seed(seed)
    w, mask, x = torch.rand(sizes), torch.rand(sizes) < 0.5, torch.randn(n)

    def fn(w, x):
        value = SELECTED[name](w, mask)
        return (value.sum() if summed else value * torch.arange(1.0, value.numel() + 1).reshape(value.shape)).sum() * x

    transform = psg.per_sample_grad(fn)
    found = (psg.jit(transform, backend="eager", check=False) if traced else transform)(w, x)
    assert_trees_close(found, loop_grad(fn)(w, x))


@torch.library.custom_op("psg_tests::mul", mutates_args=())
def not_a_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sign() * y


class Estimator(torch.autograd.Function):
    """A straight-through estimator, whose backward the tests choose."""

    @staticmethod
    def forward(ctx, w, backward):
        ctx.save_for_backward(w)
        ctx.backward = backward
        return (4 * w).round() / 4

    @staticmethod
    def backward(ctx, cotangent):
        (w,) = ctx.saved_tensors
        return ctx.backward(cotangent, w), None


class Generated(torch.autograd.Function):
    """The same in the new style, with a rule for vmap."""

    generate_vmap_rule = True
    backward = Estimator.backward

    @staticmethod
    def forward(w, backward):
        return (4 * w).round() / 4

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.backward = inputs[1]


def _with_zeros(c, w):
    c = c.clone()
    c[w > 0.5] = 0
    return c


def _without_autograd(c, w):
    c = c.clone()
    with torch._C.DisableTorchFunction():  # as an extension in C++ would
        c.clamp_(-0.5, 0.5)
    return c


def _with_a_constant(c, w):
    rest = torch.zeros_like(c)
    rest[0] = 0.5
    return torch.where(w > 0.5, c, rest)


SCALING = {
    "itself": lambda c, w: c,
    "a mask": lambda c, w: c * (w.abs() < 1),
    "numbers": lambda c, w: -2 * (c / 3).to(c.dtype),
    "several": lambda c, w: torch.mul(w.cos(), c.clone()) / (1 + w.square()),
    "where": lambda c, w: torch.where(w > 0.5, c, torch.zeros_like(c)),
    "where zero": lambda c, w: torch.where(w > 0.5, 0.0, c).contiguous(),
    "masked_fill": lambda c, w: c.masked_fill(w > 0.5, 0),
    "in place": lambda c, w: c.clone().masked_fill_(w > 0.5, 0.0),
    "indexed": _with_zeros,
    "a sum": lambda c, w: c * w + c * (w > 0),
    "a view": lambda c, w: c.reshape_as(w) * w,
}
OTHERS = {
    "clamped": lambda c, w: c.clamp(-0.01, 0.01),
    "signs": lambda c, w: c.sign() * w,
    "its size": lambda c, w: c * c.abs().mean(),
    "squared": lambda c, w: c * c,
    "a constant": lambda c, w: c + 0.1 * w,
    "turned": lambda c, w: c.flip(0) * w,
    "summed": lambda c, w: c.sum(0, keepdim=True) * w,
    "divided by it": lambda c, w: w / (1 + c),
    "written": lambda c, w: c.mul_(2) * (c.abs() < 0.1),
    "a value": lambda c, w: c * w if c.amax() > 0.1 else c,
    "an option": lambda c, w: torch.add(c, c, alpha=2) * w if w.sum() > 0 else torch.add(w, c, alpha=2),
    "in a list": lambda c, w: torch.stack([c, c]).sum(0),
    "unseen": _without_autograd,
    "zeros that are written into": _with_a_constant,
    "another library's": lambda c, w: torch.ops.psg_tests.mul(c, w),
    "another": lambda c, w: w * 2,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@given(
    kind=st.sampled_from(sorted(SCALING | OTHERS)),
    function=st.sampled_from([Estimator, Generated]),
    layer=st.sampled_from(["linear", "conv", "twice", "scaled"]),
    n=st.integers(0, 3),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
)
def test_straight_through_estimators(kind, function, layer, n, sizes, device):
    o, i, t = sizes
    backward = (SCALING | OTHERS)[kind]
    function = Estimator if kind == "a value" else function  # the rule that torch generates cannot take one

    def fn(params, x):
        w = function.apply(params["w"] * 2 if layer == "scaled" else params["w"], backward)
        if layer == "conv":
            return F.conv1d(x[None].mT, w[..., None]).sin().square().sum()
        y = F.linear(x, w)
        return (y.sin().square().sum() + (F.linear(x.cos(), w).sum() if layer == "twice" else 0)) / 3

    params, x = {"w": torch.randn(o, i, device=device)}, torch.randn(n, t, i, device=device)
    expected = psg.per_sample_grad(fn, method="loop")(params, x)
    # Entries of which both signs add up to zero are rounded to 1e-17 or so: hence `atol`.
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(params, x), expected, atol=1e-12)
    norms = torch.stack([leaf.flatten(1).square().sum(1) for leaf in expected.values()]).sum(0).sqrt()
    assert_trees_close(psg.per_sample_norm(fn, method="capture")(params, x), norms, atol=1e-12)
    clipped = psg.clipped_grad(fn, 0.5, method="capture")(params, x).grads["w"]
    assert_trees_close(clipped, torch.einsum("n,n...->...", (0.5 / norms).clamp(max=1), expected["w"]), per_sample=False, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", sorted({*SCALING, *OTHERS} - {"a value"}))
@pytest.mark.parametrize("function", [Estimator, Generated])
def test_factors_are_carried_over_those_that_scale_alone(kind, function, device):
    def fn(w, x):
        return F.linear(x, function.apply(w, (SCALING | OTHERS)[kind])).square().sum()

    factor = psg.factored_grad(fn)(torch.randn(96, 64, device=device), torch.randn(8, 64, device=device))
    assert isinstance(factor, Dense) == (kind in OTHERS)


def test_an_estimator_that_selects_where_a_cotangent_is_not_finite(device):
    """Zero times infinity is NaN; what is selected is exactly zero."""

    def fn(w, x):
        return (F.linear(x, Estimator.apply(w, SCALING["where"])) * x.sum()).exp().sum()

    w, x = torch.tensor([[0.2, 0.9], [0.8, 0.1]], device=device), torch.tensor([[1.0, 2.0], [300.0, 400.0]], device=device)
    expected = psg.per_sample_grad(fn, method="loop")(w, x)
    assert expected.isinf().any() and (expected == 0).any()
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), expected)


def test_what_a_backward_keeps_is_left_as_it_was(device):
    queue = collections.deque()

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            ctx.w = w.detach()
            queue.append(w.detach())
            return w.round()

        @staticmethod
        def backward(ctx, cotangent):
            w, ctx.w = ctx.w, None
            return cotangent.clamp(-1, 1) * w * queue.pop()

    def fn(w, x):
        return F.linear(x, Once.apply(w)).square().sum()

    w, x = torch.randn(4, 3, device=device), torch.randn(5, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), psg.per_sample_grad(fn, method="loop")(w, x))
    assert not queue


def part_of_a_dimension(size):
    several = st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)
    return st.one_of(
        st.integers(-size, size - 1),
        st.slices(size).filter(lambda part: part.step is None or part.step > 0),
        several,
        several.map(torch.tensor),
        st.lists(st.booleans(), min_size=size, max_size=size).map(torch.tensor),
    )


@st.composite
def places_in(draw, rows, columns):
    """An index of entries of a matrix, none of them twice."""
    row, column = part_of_a_dimension(rows), part_of_a_dimension(columns)
    pairs = st.permutations(range(rows * columns)).flatmap(lambda order: st.integers(1, len(order)).map(lambda k: torch.tensor(order[:k])))
    return draw(
        st.one_of(
            row,
            column.map(lambda part: (..., part)),
            st.tuples(row, column),
            pairs.map(lambda order: (order // columns, order % columns)),
            st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns).map(
                lambda own: torch.tensor(own).view(rows, columns)
            ),
        )
    )


@given(
    data=st.data(),
    sizes=st.sampled_from([(3, 4), (4, 3), (3, 3), (1, 4), (10, 9)]),
    start=st.sampled_from(["zeros", "ones", "twice", "a row"]),
    end=st.sampled_from(["as it is", "transposed", "with its square", "triangular", "scaled", "in a row"]),
    values=st.lists(
        st.sampled_from(["all", "one", "of the last dimension", "a number", "computed", "added", "read"]), min_size=1, max_size=3
    ),
    n=st.sampled_from([0, 1, 3]),
    positions=st.sampled_from([None, 0, 1, 3]),
    seed=st.integers(0, 99),
)
def test_weights_that_drawn_entries_are_written_into(data, sizes, start, end, values, n, positions, seed):
    torch.manual_seed(seed)
    rows, columns = sizes
    params, writes = {"w": torch.randn(rows, columns)}, []
    for k, value in enumerate(values):
        index = data.draw(places_in(rows, columns))
        shape = params["w"][index].shape
        shapes = {"one": (), "of the last dimension": shape[-1:], "a number": ()}
        params[f"v{k}"] = torch.randn(shapes.get(value, shape))
        writes.append((index, value, f"v{k}"))

    def weight(p):
        w = {
            "zeros": lambda: torch.zeros(rows, columns),
            "ones": lambda: torch.ones_like(p["w"]),
            "twice": lambda: p["w"] * 2,
            "a row": lambda: p["w"][torch.zeros(rows, dtype=torch.long)],
        }[start]()
        for index, value, name in writes:
            if value == "added":
                w[index] += p[name]
            elif value == "read":
                w[index] = p["w"][index].sin()
            else:
                w[index] = {"a number": lambda name: 0.5, "computed": lambda name: p[name].exp()}.get(value, p.get)(name)
        return {
            "as it is": lambda: w,
            "transposed": lambda: (w @ w.T).mT @ w,
            "with its square": lambda: w.square() + w,
            "triangular": lambda: w.tril() - w.triu(1).sin(),
            "scaled": lambda: w * p["w"],
            "in a row": lambda: w.reshape(-1).view(rows, columns),
        }[end]()

    batch = (n, columns) if positions is None else (n, positions, columns)
    assert_agrees(Problem(lambda p, x: score(F.linear(x, weight(p))), (params, torch.randn(batch))))


@st.composite
def readings(draw, shape):
    """How entries of a tensor of this shape are read into another, some of them again and again: a function, and what it is called."""
    kind = draw(st.sampled_from(["index", "indices", "with a slice", "in a list", "gather", "take", "take_along_dim", "mask"]))

    def of(size, *dims):
        least = -size if kind in ("index", "indices", "with a slice", "in a list", "take") else 0
        numbers = st.lists(st.integers(least, size - 1), min_size=math.prod(dims), max_size=math.prod(dims))
        return torch.tensor(draw(numbers), dtype=torch.long).reshape(dims)

    if kind == "index":
        dims = draw(st.sampled_from([(), (3,), (2, 3), (4, 20), (2, 1, 3)]))
        index = of(shape[0], *dims)
    elif kind == "indices":
        index = tuple(of(size, *draw(st.sampled_from([(4, 5), (5,), (4, 1), ()]))) for size in draw(st.sampled_from([shape, shape[:2]])))
    elif kind == "with a slice":
        index = draw(st.sampled_from([(..., of(shape[-1], 3, 2)), (None, of(shape[0], 2, 2)), (of(shape[0], 4), slice(None, None, 2))]))
        index = index if len(shape) > 1 or not isinstance(index[-1], slice) else index[:1]
    elif kind == "in a list":
        index = of(shape[0], 5).tolist()
    elif kind == "mask":
        index = torch.arange(math.prod(shape)).reshape(shape) % 2 == 0
    elif kind == "take":
        index = of(math.prod(shape), 3, 4)
        return lambda tensor: tensor.take(index.to(tensor.device))
    else:
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        dims = list(shape)
        dims[dim] = 4
        index = of(shape[dim], *dims)
        return lambda tensor: getattr(torch, kind)(tensor, dim, index) if kind == "gather" else tensor.take_along_dim(index, dim)
    return lambda tensor: tensor[index]


@given(
    data=st.data(),
    shape=st.sampled_from([(7,), (1,), (4, 3), (2, 5), (3, 2, 2), (60,)]),
    steps=st.lists(st.sampled_from(["scaled", "turned", "twice", "read again"]), max_size=2),
    use=st.sampled_from(["linear", "positions", "convolution", "lookups", "entries", "a norm"]),
    n=st.sampled_from([0, 1, 3, 33]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_weights_made_of_entries_that_are_read_again_and_again(data, shape, steps, use, n, seed):
    torch.manual_seed(seed)
    read = data.draw(readings(shape))
    made = read(torch.randn(shape))
    again = data.draw(readings(tuple(made.shape))) if made.ndim and made.numel() and "read again" in steps else torch.sin
    params = {"v": torch.randn(shape), "s": torch.randn(made.shape)}

    def weight(p):
        w = read(p["v"])
        for step in steps:
            w = {
                "scaled": lambda w: w * p["s"] if w.shape == p["s"].shape else w * 0.7,
                "turned": lambda w: w.mT if w.ndim > 1 else w,
                "twice": lambda w: w + w.cos(),
                "read again": lambda w: again(w) if w.shape == made.shape else w,
            }[step](w)
        return w.reshape(len(w), w[:1].numel()) if w.ndim and w.numel() else w.reshape(1, w.numel())

    rows, columns = weight(params).shape
    uses = {
        "linear": lambda w, x: F.linear(x, w),
        "positions": lambda w, x: F.linear(x.expand(3, columns) * torch.arange(3).add(1)[:, None], w),
        "convolution": lambda w, x: F.conv1d(x[:, None].expand(columns, 4).cos(), w[..., None]),
        "lookups": lambda w, x: F.embedding(torch.stack([x.sum().gt(0).long() * (rows - 1), torch.zeros_like(x.sum()).long()]), w),
        "entries": lambda w, x: w * x,
        "a norm": lambda w, x: F.linear(x, w).sum() * w.square().sum(),
    }
    assert_agrees(Problem(lambda p, x: score(uses[use](weight(p), x)), (params, torch.randn(n, columns))))


GROUPED = [
    lambda w, own: w * own,
    lambda w, own: w / (2 + own.square()),
    lambda w, own: own - 0.7 * w,
    lambda w, own: w.sin() + own.expand_as(w).cos(),
]


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    split=st.integers(0, 4),
    kept=st.lists(st.tuples(*[st.booleans()] * 4), min_size=1, max_size=2),
    ops=st.lists(st.sampled_from(GROUPED), min_size=2, max_size=2),
    positions=st.sampled_from([0, 1, 3]),
    n=st.sampled_from([0, 1, 4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=100)
def test_scales_of_groups_of_entries(sizes, split, kept, ops, positions, n, seed):
    torch.manual_seed(seed)
    rows, columns = math.prod(sizes[:split]), math.prod(sizes[split:])
    small = [tuple(size if keep else 1 for size, keep in zip(sizes, keeps, strict=True)) for keeps in kept]
    params = {"w": torch.randn(rows, columns), **{f"{k}": torch.randn(shape) for k, shape in enumerate(small)}}

    def weight(p):
        w = p["w"].view(sizes)
        for k, op in zip(range(len(small)), ops, strict=False):
            w = op(w, p[f"{k}"])
        return w.reshape(rows, columns)

    assert_agrees(Problem(lambda p, x: score(F.linear(x, weight(p))), (params, torch.randn(n, positions, columns))))


def test_scales_of_groups_leave_factors(device):
    def fn(p, x):
        weight = p["w"].view(16, 4, 8) * p["s"].unsqueeze(2)
        return score(F.linear(x, weight.view(16, 32)))

    params = {"w": torch.randn(16, 32, device=device), "s": torch.randn(16, 4, device=device)}
    assert isinstance(psg.factored_grad(fn)(params, torch.randn(5, 32, device=device))["w"], Scaled)


@pytest.mark.parametrize("index", [[0, 1], np.array([0, 1])], ids=["list", "array"])
@pytest.mark.parametrize("columns", [(), (slice(1, 3),)], ids=["rows", "entries"])
def test_an_index_that_fn_changes_after_it_has_read(index, columns, device):
    def fn(w, x):
        rows = []
        for i in range(3):
            index[0] = i
            index[1] = 4 - i
            rows.append(w[(index, *columns)])
        return score(F.linear(x, torch.cat(rows)))

    w, x = torch.randn(5, 4, device=device), torch.randn(3, 2 if columns else 4, device=device)
    assert_agrees(Problem(fn, (w, x)))


def test_entries_that_are_not_read_may_be_anything(device):
    """The sample's first row is infinite, but no entry of it is read."""
    left = torch.tensor([[[math.inf, 2.0]], [[1.0, 3.0]]], device=device)
    factor = Entries(Outer(left, torch.ones(2, 1, 2, device=device)), torch.tensor([[2, 3]], device=device).expand(2, 2))
    torch.testing.assert_close(factor.norm(), torch.tensor([8.0, 18.0], device=device).sqrt())
    torch.testing.assert_close(factor.squared_norm(), torch.tensor([8.0, 18.0], device=device))
