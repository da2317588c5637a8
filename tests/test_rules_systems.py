"""Linear systems over drawn shapes and options: the matrix as the parameter, and as a value computed from parameters."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_derivatives_agree, on
from cases import Problem, score
from conftest import as_large
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg.factors import Dense, Outer, Scaled, _base
from psg.testing import assert_trees_close, layouts, loop_grad, loop_value_and_grad, shapes, tensors

sides = st.integers(1, 3)


@st.composite
def systems(draw):
    """The op as a function of A and B, a well-conditioned matrix or some, and the shape of the right-hand sides."""
    i, k, left = draw(sides), draw(sides), draw(st.booleans())
    batch = draw(shapes(min_dims=0, max_dims=2, max_side=2))
    is_vector = draw(st.booleans())
    lead = draw(st.sampled_from([batch, (*draw(shapes(min_dims=0, max_dims=2, max_side=2)), *batch), batch[1:], (1,) * len(batch)]))
    given_shape = (*lead, i, k) if left else (*lead, k, i)
    A = draw(layouts(4 * torch.eye(i) + draw(tensors((*batch, i, i))).clamp(-1, 1)))
    if draw(st.booleans()):
        if is_vector:
            return draw(st.sampled_from([torch.linalg.solve, lambda A, B: torch.linalg.solve(B=B, A=A)])), A, (*batch, i)
        assume(left or given_shape != A.shape[:-1])  # which torch takes for vectors
        return (lambda A, B: torch.linalg.solve(A, B, left=left)), A, given_shape
    options = {"upper": draw(st.booleans()), "left": left, "unitriangular": draw(st.booleans())}
    return (lambda A, B: torch.linalg.solve_triangular(A, B, **options)), A, given_shape


@st.composite
def ruled_problems(draw):
    """Data on the other side, perhaps times a parameter."""
    op, A, shape = draw(systems())
    x = draw(layouts(draw(tensors((draw(st.integers(0, 3)), *shape)))))
    own = {"A": A, "s": torch.tensor(2.0)} if draw(st.booleans()) else {"A": A}
    return Problem(lambda p, x: score(op(p["A"], x * p.get("s", 1))), (own, x))


@st.composite
def derived_problems(draw):
    """Both sides computed from parameters, or one a constant."""
    op, A, shape = draw(systems())
    B, kind, n = draw(layouts(draw(tensors(shape)))), draw(st.sampled_from(["both", "A", "B", "inverse"])), draw(st.integers(0, 3))

    def fn(p, x):
        first, second = p.get("A", A).to(x.device), p.get("B", B).to(x.device)
        if kind == "inverse":
            solution = torch.linalg.inv(first) if len(shape) % 2 else first.inverse()
        else:
            solution = op(2 * first if "A" in p else first, second + second if "B" in p else second)
        return score(solution * x) if solution.ndim < 2 else score(solution @ x.expand(solution.shape[-1], 1)[..., 0])

    own = {name: tensor for name, tensor in (("A", A), ("B", B)) if kind in ("both", name) or kind == "inverse" and name == "A"}
    return Problem(fn, (own, draw(tensors((n, 1)))))


@given(problem=ruled_problems(), rules=st.booleans())
def test_data_as_the_right_hand_side(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=derived_problems(), rules=st.booleans())
def test_of_parameters_alone(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=st.one_of(ruled_problems(), derived_problems()))
def test_derivatives_of_results(problem, device):
    assert_derivatives_agree(on(problem, device))


@pytest.mark.parametrize("sample", [(3,), (3, 2), (2, 3, 2)])
def test_fn_may_write_into_a_solution(sample, device):
    # Torch refuses it, whose backward needs the output.
    params = {"A": torch.randn(3, 3, device=device) + 4 * torch.eye(3, device=device), "s": torch.randn(sample, device=device)}
    x = torch.randn(2, *sample, device=device)
    found = psg.per_sample_grad(lambda p, x: score(torch.linalg.solve(p["A"], p["s"] * x).mul_(3)))(params, x)
    assert_trees_close(found, loop_grad(lambda p, x: score(3 * torch.linalg.solve(p["A"], p["s"] * x)))(params, x))


SMALL, LARGE = {"A": (3, 3)}, {"A": (2, 40, 40)}
RULED = {
    "a vector": (lambda A, x: torch.linalg.solve(A, x), SMALL, (3,), "Outer"),
    "a matrix": (lambda A, x: torch.linalg.solve(A, x), SMALL, (3, 2), "Outer"),
    "from the right": (lambda A, x: torch.linalg.solve(A, x, left=False), SMALL, (2, 3), "Outer"),
    "matrices": (lambda A, x: torch.linalg.solve(A, x), SMALL, (4, 3, 2), "Outer"),
    "of a stack": (lambda A, x: torch.linalg.solve(A, x), LARGE, (2, 40, 1), "Views"),
    "vectors of a stack": (lambda A, x: torch.linalg.solve(A, x), LARGE, (2, 40), "Views"),
    "of a triangle": (lambda A, x: torch.linalg.solve_triangular(A, x, upper=False), SMALL, (3, 1), "Scaled"),
    "of a triangle, from the right": (lambda A, x: torch.linalg.solve_triangular(A, x, upper=True, left=False), SMALL, (1, 3), "Scaled"),
}


@pytest.mark.parametrize("name", RULED)
def test_the_rule_is_taken(name, device, monkeypatch):
    as_large(monkeypatch)
    op, shapes, sample, kind = RULED[name]
    params = {key: torch.randn(shape) + 4 * torch.eye(shape[-1]) for key, shape in shapes.items()}
    problem = on(Problem(lambda p, x: score(op(p["A"], x)), (params, torch.randn(2, *sample))), device)
    (leaf,) = psg.explain(problem.fn)(*problem.args).leaves
    assert [use.split(": ")[1] for use in leaf.uses] == ["rule"]
    assert leaf.kind == kind


def test_a_singular_matrix_raises_torch_s_error(device):
    fn = lambda A, x: torch.linalg.solve(A, x).sum()  # noqa: E731
    A, x = torch.zeros(2, 2, device=device), torch.ones(3, 2, device=device)
    for grads in (psg.per_sample_grad(fn), torch.func.grad(lambda A, x: psg.per_sample_norm(fn)(A, x).sum())):
        with pytest.raises(torch.linalg.LinAlgError, match="torch.linalg.solve: The solver failed because the input matrix is singular"):
            grads(A, x)


# A rule must not accept what eager torch refuses.
REFUSED = {
    "a vector from the right": (lambda A, x: torch.linalg.solve(A, x, left=False), (3, 3), (3,)),
    "a row": (lambda A, x: torch.linalg.solve(A, x), (3, 3), (1, 3)),
    "a matrix that is not square": (lambda A, x: torch.linalg.solve(A, x), (3, 2), (3,)),
    "a vector of a triangle": (lambda A, x: torch.linalg.solve_triangular(A, x, upper=True), (3, 3), (3,)),
    "a stack of others": (lambda A, x: torch.linalg.solve(A, x), (2, 3, 3), (4, 3, 2)),
    "more reflections than columns": (torch.linalg.householder_product, (4, 1), (3,)),
    "more columns than rows": (torch.linalg.householder_product, (2, 3), (2,)),
    "a stack of scales": (torch.linalg.householder_product, (4, 3), (2, 3)),
    "reflections in a vector": (torch.linalg.householder_product, (4,), (1,)),
    "reflections in another dtype": (lambda A, x: torch.linalg.householder_product(A, x.float()), (4, 3), (3,)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_what_torch_refuses(name, device):
    op, shape, sample = REFUSED[name]
    A, x = torch.randn(shape, device=device), torch.randn(2, *sample, device=device)
    with pytest.raises(RuntimeError):
        op(A, x[0])
    with pytest.raises(RuntimeError):
        psg.per_sample_grad(lambda A, x: op(A, x).sum())(A, x)


@pytest.mark.parametrize(("name", "kind"), [("cayley", Scaled), ("matrix_exp", Scaled), ("householder", Dense)])
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 80), (80, 40), (64, 64)])
def test_orthogonal_weights(inputs, outputs, name, kind, device, monkeypatch):
    as_large(monkeypatch)
    monkeypatch.setattr(_base, "_TINY", 0)
    # Of the result torch takes columns, which lie apart in memory; it multiplies them by the signs of the weight's diagonal.
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(inputs, outputs), orthogonal_map=name).to(device)
    with torch.no_grad():  # not where the weight is the identity's
        original = layer.parametrizations.weight.original
        original.add_(0.1 * torch.randn_like(original))
    x = torch.randn(3, inputs, device=device)
    params = {name: param.detach() for name, param in layer.named_parameters()}
    problem = Problem(lambda p, x: score(functional_call(layer, p, (x,))), (params, x))
    assert_agrees(problem)
    kinds = {name: type(factor) for name, factor in psg.factored_grad(problem.fn)(*problem.args).items()}
    assert kinds == {"bias": Dense, "parametrizations.weight.original": kind}


@given(
    d=st.integers(1, 26),
    size=st.sampled_from([0.0, 0.3, 2.0, 8.0, 100.0]),
    skew=st.booleans(),
    turned=st.booleans(),
    positions=st.sampled_from([0, 1, 2]),
    n=st.sampled_from([0, 1, 3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_matrix_exponentials(d, size, skew, turned, positions, n, dtype, seed):
    torch.manual_seed(seed)
    params = {"w": (size * torch.randn(d, d) / d**0.5).to(dtype), "s": torch.randn(d, dtype=dtype)}

    def fn(p, x):
        w = p["w"] - p["w"].mT if skew or size > 8 else p["w"]
        exponential = torch.linalg.matrix_exp(w.mT if turned else w)
        return score(F.linear(x, exponential * p["s"]) / exponential.detach().abs().amax())

    problem = Problem(fn, (params, torch.randn(n, positions, d, dtype=dtype)))
    with mock.patch.object(_base, "_TINY", 0):
        assert_agrees(problem)


def test_exponentials_of_what_is_not_finite(device):
    w = torch.zeros(40, 40, device=device)
    w[0, 0] = torch.nan
    grads = psg.per_sample_grad(lambda w, x: (torch.matrix_exp(w) @ x).sum())(w, torch.randn(3, 40, device=device))
    assert grads.isnan().any((1, 2)).all()


def test_exponentials_keep_factors(device):
    w, x = torch.randn(80, 80, device=device) / 80, torch.randn(3, 80, device=device)
    factor = psg.factored_grad(lambda w, x: (torch.matrix_exp(w) @ x).sum().sin())(w, x)
    assert isinstance(factor, Outer)
    assert 1 < factor.positions < 12


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    count=st.integers(0, 9),
    batch=st.sampled_from([(), (2,)]),
    positions=st.sampled_from([0, 1, 3]),
    n=st.sampled_from([0, 1, 3]),
    orthogonal=st.booleans(),
    of_samples=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_of_reflections(rows, columns, count, batch, positions, n, orthogonal, of_samples, seed):
    torch.manual_seed(seed)
    columns = min(rows, columns)
    count = min(columns, count)
    params = {"a": torch.randn(*batch, rows, columns), "tau": torch.randn(*batch, count)}

    def fn(p, x, y):
        a = p["a"] * y if of_samples else p["a"]
        tau = 2 / (1 + a.tril(-1).square().sum(-2)[..., :count]) if orthogonal else p["tau"]
        return score(x @ torch.linalg.householder_product(a, tau))

    assert_agrees(Problem(fn, (params, torch.randn(n, *batch, positions, rows), torch.rand(n))))


def test_reflections_under_autocast(device):
    """The op runs in the dtype of its arguments, and no part of it in 16 bits."""
    w, x = torch.randn(9, 5, dtype=torch.float32, device=device), torch.randn(3, 9, dtype=torch.float32, device=device)

    def fn(w, x):
        return (torch.linalg.householder_product(w, 2 / (1 + w.tril(-1).square().sum(0))) * x[:, None]).sum().sin()

    expected = loop_value_and_grad(fn)(w, x)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert_trees_close(psg.per_sample_value_and_grad(fn)(w, x), expected)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop", "batch"])
@given(
    size=st.integers(0, 4),
    columns=st.integers(0, 3),
    batch=st.sampled_from([(), (2,)]),
    upper=st.booleans(),
    inverse=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
    n=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
def test_the_triangle_of_a_cholesky_factor_that_is_not_read(method, size, columns, batch, upper, inverse, dtype, n, seed, device):
    """Has no gradient, as in torch it has."""
    torch.manual_seed(seed)
    factor = torch.randn(*batch, size, size, dtype=dtype, device=device) + 4 * torch.eye(size, device=device)
    params = {"L": factor, "B": torch.randn(size, columns, dtype=dtype, device=device)}

    def solved(B, L, upper):
        A = L.triu().mH @ L.triu() if upper else L.tril() @ L.tril().mH
        return torch.linalg.inv(A) @ B

    def inverted(L, upper):
        return solved(torch.eye(size, dtype=dtype, device=device), L, upper)

    def by(solve, invert):
        def fn(p, x):
            of_samples = p["L"] if method == "batch" else p["L"] * x
            output = invert(of_samples, upper) if inverse else solve(p["B"], of_samples, upper)
            return x * (output * (1 - 2j)).sum().real

        return fn

    x = 1 + torch.rand(n, device=device)
    found = psg.per_sample_grad(by(torch.cholesky_solve, torch.cholesky_inverse), method=method)(params, x)
    assert_trees_close(found, loop_grad(by(solved, inverted))(params, x))
