"""Matrix products over drawn shapes and options: the parameter on either side, in any number of dimensions."""

import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_derivatives_agree, on
from cases import Problem, score
from conftest import as_large
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import psg
from psg.factors import Dense, Routed
from psg.rules import products
from psg.testing import assert_trees_close, layouts, loop_grad, shapes, tensors

each_rule = st.sampled_from([True, False])
sides = st.integers(1, 3)


def two_sided(draw, op, first, second, first_broadcast=(), **options):
    """A problem for a product of two operands, either of which is the parameter."""
    n, left = draw(st.integers(0, 3)), draw(st.booleans())
    param_shape, data_shape = (first, second) if left else (second, first)
    param = draw(layouts(draw(tensors(param_shape))))
    data = draw(layouts(draw(tensors((n, *data_shape)))))
    return Problem(lambda p, x: score(op(p, x) if left else op(x, p)), (param, data), options=options)


def stretched(draw, shape):
    """A shape that broadcasts to `shape`: some sides are 1, and some of the first ones are left out."""
    sizes = tuple(draw(st.sampled_from([1, size])) for size in shape)
    return sizes[draw(st.integers(0, len(sizes))) :]


MATMULS = [
    lambda x, w: x @ w,
    torch.matmul,
    torch.linalg.matmul,
    lambda x, w: x.matmul(w),
    lambda x, w: w.__rmatmul__(x),
    lambda x, w: torch.matmul(input=x, other=w),
]


@st.composite
def matmul_problems(draw):
    """Vectors, matrices and batches of matrices whose leading dimensions broadcast."""
    i, t, o = draw(sides), draw(sides), draw(sides)
    batch = draw(shapes(min_dims=0, max_dims=2, max_side=3))
    first = draw(st.sampled_from([(i,), (*stretched(draw, batch), t, i)]))
    second = draw(st.sampled_from([(i,), (*stretched(draw, batch), i, o)]))
    return two_sided(draw, draw(st.sampled_from(MATMULS)), first, second)


@st.composite
def fixed_problems(draw):
    """The products that take one number of dimensions only."""
    b, i, t, o = draw(sides), draw(sides), draw(sides), draw(sides)
    op, first, second = draw(
        st.sampled_from(
            [
                (torch.mm, (t, i), (i, o)),
                (torch.Tensor.mm, (t, i), (i, o)),
                (torch.bmm, (b, t, i), (b, i, o)),
                (torch.Tensor.bmm, (b, t, i), (b, i, o)),
                (torch.mv, (t, i), (i,)),
                (torch.Tensor.mv, (t, i), (i,)),
                (torch.dot, (i,), (i,)),
                (torch.Tensor.dot, (i,), (i,)),
                (torch.inner, (i,), (i,)),
                (torch.inner, (b, t, i), (o, i)),
                (torch.inner, (i,), (b, o, i)),
            ]
        )
    )
    return two_sided(draw, op, first, second)


@st.composite
def added_problems(draw):
    """beta b + alpha (a product): every mix of parameters and data, a summand of every shape that broadcasts."""
    n, b, i, t, o = draw(st.integers(0, 3)), draw(sides), draw(sides), draw(sides), draw(sides)
    op, first, second, out = draw(
        st.sampled_from(
            [
                (torch.addmm, (t, i), (i, o), (t, o)),
                (torch.Tensor.addmm, (t, i), (i, o), (t, o)),
                (torch.addmv, (t, i), (i,), (t,)),
                (torch.baddbmm, (b, t, i), (b, i, o), (b, t, o)),
                (torch.Tensor.baddbmm, (b, t, i), (b, i, o), (b, t, o)),
                (torch.addbmm, (b, t, i), (b, i, o), (t, o)),
            ]
        )
    )
    given_shapes = {"a": stretched(draw, out), "b": first, "c": second}
    own = draw(st.sampled_from(["a", "b", "c", "ab", "ac"]))
    options = draw(st.fixed_dictionaries({}, optional={"beta": st.sampled_from([0, 1, -2.0]), "alpha": st.sampled_from([0, 1, 0.5])}))
    params = {name: draw(layouts(draw(tensors(given_shapes[name])))) for name in own}
    data = {name: draw(layouts(draw(tensors((n, *given_shapes[name]))))) for name in "abc" if name not in own}

    def fn(p, x):
        every = {**p, **x}
        return score(op(every["a"], every["b"], every["c"], **options))

    return Problem(fn, (params, data))


@st.composite
def einsum_problems(draw):
    """Two or three operands of any labels; stretched sides, ellipses, outputs left to torch."""
    n = draw(st.integers(0, 3))
    sizes = {name: draw(sides) for name in "abcd"}
    batch = draw(shapes(min_dims=0, max_dims=2, max_side=2))
    dots = draw(st.booleans())
    count = draw(st.integers(2, 3))
    terms, parts = [], []
    for _ in range(count):
        names = draw(st.permutations("abcd"))[: draw(st.integers(0, 3))]
        stretch = {name: draw(st.integers(0, 4)) == 0 for name in names}
        shape = tuple(1 if stretch[name] else sizes[name] for name in names)
        if dots:
            place = draw(st.integers(0, len(names)))
            shape = (*shape[:place], *stretched(draw, batch), *shape[place:])
            terms.append("".join(names[:place]) + "..." + "".join(names[place:]))
        else:
            terms.append("".join(names))
        parts.append(shape)
    equation = ",".join(terms)
    if draw(st.booleans()):
        used = sorted({name for term in terms for name in term if name != "."})
        kept = [name for name in draw(st.permutations(used)) if draw(st.booleans())]
        equation += "->" + ("..." if dots and draw(st.booleans()) else "") + "".join(kept)
        equation = equation.replace(",", " , ") if draw(st.booleans()) else equation
    own = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(lambda flags: 0 < sum(flags) < len(flags)))
    params = {str(k): draw(tensors(shape)) for k, (shape, flag) in enumerate(zip(parts, own, strict=True)) if flag}
    data = {str(k): draw(tensors((n, *shape))) for k, (shape, flag) in enumerate(zip(parts, own, strict=True)) if not flag}

    def fn(p, x):
        every = {**p, **x}
        return score(torch.einsum(equation, *(every[str(k)] for k in range(count))))

    return Problem(fn, (params, data))


@st.composite
def tensordot_problems(draw):
    """A number of dimensions, or the dimensions themselves, counted from either end."""
    common = draw(shapes(min_dims=0, max_dims=2, max_side=3))
    first, second = draw(shapes(min_dims=0, max_dims=2, max_side=3)), draw(shapes(min_dims=0, max_dims=2, max_side=3))
    if draw(st.booleans()):
        return two_sided(draw, lambda x, y: torch.tensordot(x, y, len(common)), (*first, *common), (*common, *second))
    a, b = [*first, *common], [*second, *common]
    order_a, order_b = draw(st.permutations(range(len(a)))), draw(st.permutations(range(len(b))))
    pairs = [(order_a.index(len(first) + k), order_b.index(len(second) + k)) for k in range(len(common))]
    dims = [[d - len(a) if draw(st.booleans()) else d for d, _ in pairs], [e - len(b) if draw(st.booleans()) else e for _, e in pairs]]
    return two_sided(draw, lambda x, y: torch.tensordot(x, y, dims), tuple(a[k] for k in order_a), tuple(b[k] for k in order_b))


@st.composite
def bilinear_problems(draw):
    n, i, j, o = draw(st.integers(0, 3)), draw(sides), draw(sides), draw(sides)
    positions = draw(shapes(min_dims=0, max_dims=2, max_side=3))
    params = {"weight": draw(tensors((o, i, j)))}
    if draw(st.booleans()):
        params["bias"] = draw(tensors((o,)))
    x, y = draw(tensors((n, *positions, i))), draw(tensors((n, *positions, j)))
    return Problem(lambda p, x, y: score(F.bilinear(x, y, p["weight"], p.get("bias"))), (params, x, y))


@given(
    problem=st.one_of(matmul_problems(), fixed_problems(), added_problems(), einsum_problems(), tensordot_problems(), bilinear_problems())
)
def test_derivatives_of_results(problem, device):
    assert_derivatives_agree(on(problem, device))


@given(problem=matmul_problems(), rules=each_rule)
def test_matmul(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=fixed_problems(), rules=each_rule)
def test_products_of_fixed_dimensions(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=added_problems(), rules=each_rule)
def test_products_with_a_summand(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=einsum_problems(), rules=each_rule)
def test_einsum(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(n=st.sampled_from([0, 1, 3]), size=st.integers(1, 5), data=st.data())
def test_vectors_computed_from_parameters(n, size, data, device):
    """The gradient of a vector that meets each sample in one number is factored where it is large, and stays so."""
    derive = data.draw(st.sampled_from([lambda v: v / v.norm(), lambda v: v.flip(0).exp(), lambda v: torch.outer(v, v)[0], torch.sin]))
    v, x = data.draw(tensors((size,))) + 2, data.draw(tensors((n, size)))
    with mock.patch.object(products, "_SMALL_GRADIENTS", 0):
        assert_agrees(on(Problem(lambda p, x: score(x @ derive(p)) + x @ p, (v, x)), device), rules=True)


@given(problem=tensordot_problems(), rules=each_rule)
def test_tensordot(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(problem=bilinear_problems(), rules=each_rule)
def test_bilinear(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


# A product, the shapes of its parameters and of one sample, and the kind of w's factor.
RULED = {
    "x @ W": (lambda p, x: x @ p["w"], {"w": (3, 4)}, (5, 3), "Outer"),
    "W @ x": (lambda p, x: p["w"] @ x, {"w": (4, 5)}, (5, 3), "Outer"),
    "W @ vector": (lambda p, x: p["w"] @ x, {"w": (4, 5)}, (5,), "Outer"),
    "x @ vector": (lambda p, x: x @ p["w"], {"w": (3,)}, (5, 3), "Dense"),
    "batch of matrices": (lambda p, x: x @ p["w"], {"w": (2, 3, 4)}, (5, 3), "Dense"),
    "mm": (lambda p, x: torch.mm(x, p["w"]), {"w": (3, 4)}, (5, 3), "Outer"),
    "mv": (lambda p, x: torch.mv(p["w"], x), {"w": (3, 4)}, (4,), "Outer"),
    "batch of matrices larger than their data": (lambda p, x: x @ p["w"], {"w": (2, 300, 400)}, (2, 5, 300), "Views"),
    "data by a batch of matrices larger than they are": (lambda p, x: p["w"] @ x, {"w": (2, 300, 400)}, (2, 400, 5), "Views"),
    "one batch of matrices for several of data": (lambda p, x: x @ p["w"], {"w": (1, 300, 400)}, (2, 5, 300), "Dense"),
    "one batch of data for several of matrices": (lambda p, x: x @ p["w"], {"w": (2, 300, 400)}, (1, 5, 300), "Dense"),
    "bmm": (lambda p, x: torch.bmm(x, p["w"]), {"w": (2, 3, 4)}, (2, 100, 3), "Dense"),
    "bmm of matrices larger than their data": (lambda p, x: torch.bmm(x, p["w"]), {"w": (2, 300, 400)}, (2, 5, 300), "Views"),
    "dot": (lambda p, x: torch.dot(x, p["w"]), {"w": (3,)}, (3,), "Views"),
    "einsum to one number": (lambda p, x: torch.einsum("ab,ba->", x, p["w"]), {"w": (3, 4)}, (4, 3), "Views"),
    "inner": (lambda p, x: torch.inner(x, p["w"]), {"w": (4, 3)}, (5, 3), "Outer"),
    "addmm": (lambda p, x: torch.addmm(p["b"], x, p["w"]), {"b": (5, 1), "w": (3, 4)}, (5, 3), "Outer"),
    "addmm of data": (lambda p, x: torch.addmm(x, x, p["w"]), {"w": (3, 3)}, (5, 3), "Outer"),
    "addmv": (lambda p, x: torch.addmv(p["b"], p["w"], x), {"b": (4,), "w": (4, 3)}, (3,), "Outer"),
    "baddbmm": (lambda p, x: torch.baddbmm(p["b"], x, p["w"]), {"b": (4,), "w": (2, 3, 4)}, (2, 100, 3), "Dense"),
    "einsum": (lambda p, x: torch.einsum("...i,oi->...o", x, p["w"]), {"w": (4, 3)}, (2, 5, 3), "Outer"),
    "einsum of a list": (lambda p, x: torch.einsum("ti,oi->to", [x, p["w"]]), {"w": (4, 3)}, (5, 3), "Outer"),
    "einsum by head": (lambda p, x: torch.einsum("ti,hio->hto", x, p["w"]), {"w": (2, 3, 4)}, (5, 3), "Views"),
    "einsum of each head's own": (lambda p, x: torch.einsum("thi,hio->tho", x, p["w"]), {"w": (2, 300, 400)}, (5, 2, 300), "Views"),
    "einsum by two labels": (lambda p, x: torch.einsum("tghi,goih->tgho", x, p["w"]), {"w": (2, 300, 400, 2)}, (5, 2, 2, 400), "Views"),
    "tensordot": (lambda p, x: torch.tensordot(p["w"], x, 1), {"w": (4, 5)}, (5, 2, 3), "Outer"),
    "bilinear": (lambda p, x: F.bilinear(x, x.flip(0), p["w"], p["b"]), {"w": (2, 3, 3), "b": (2,)}, (5, 3), "Dense"),
    "bilinear of vectors": (lambda p, x: F.bilinear(x[0], x[1], p["w"], p["b"]), {"w": (2, 3, 3), "b": (2,)}, (2, 3), "Views"),
    "einsum with gates": (lambda p, x: torch.einsum("te,eoi,ti->to", x[:, :2], p["w"], x[:, 2:]), {"w": (2, 3, 4)}, (3, 6), "Views"),
    "einsum with gates, many positions": (
        lambda p, x: torch.einsum("te,eoi,ti->to", x[:, :2], p["w"], x[:, 2:]),
        {"w": (2, 3, 4)},
        (4, 6),
        "Dense",
    ),
}


@pytest.mark.parametrize("name", RULED)
def test_the_rule_is_taken(name, device, monkeypatch):
    as_large(monkeypatch)
    op, own, sample, kind = RULED[name]
    params = {key: torch.randn(shape) for key, shape in own.items()}
    problem = on(Problem(lambda p, x: score(op(p, x)), (params, torch.randn(2, *sample))), device)
    # On an accelerator some of these gradients are best materialised.
    with psg.plans.using(keep_bytes=0 if kind == "Views" and device.type != "cpu" else None):
        leaves = psg.explain(problem.fn)(*problem.args).leaves
    for leaf in leaves:
        assert [use.split(": ")[1] for use in leaf.uses] == ["rule"], leaf
        assert leaf.kind == (kind if leaf.path.endswith("['w']") else "Dense")


# A rule must not accept what eager torch refuses.
REFUSED = {
    "mm of a vector": (lambda w, x: torch.mm(x, w), (3, 4), (3,)),
    "dot of one and many": (lambda w, x: torch.dot(x, w), (3,), (1,)),
    "matmul of one and many": (lambda w, x: x @ w, (3, 4), (5, 1)),
    "mv of a matrix": (lambda w, x: torch.mv(w, x), (3, 4), (4, 1)),
    "einsum of too few dimensions": (lambda w, x: torch.einsum("tij,io->to", x, w), (3, 4), (5, 3)),
    "tensordot of sizes that differ": (lambda w, x: torch.tensordot(x, w, 1), (3, 4), (5, 2)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_what_torch_refuses(name, device):
    op, shape, sample = REFUSED[name]
    weight, x = torch.randn(shape, device=device), torch.randn(2, *sample, device=device)
    with pytest.raises((RuntimeError, IndexError)):
        op(weight, x[0])
    with pytest.raises((RuntimeError, IndexError)):
        psg.per_sample_grad(lambda w, x: score(op(w, x)))(weight, x)


def test_a_weight_of_each_sample_s_own_is_data(device):
    # A hypernetwork's weight times a parameter: to the rule the former is data.
    def fn(p, x):
        own = torch.einsum("i,ijk->jk", x, p["generator"])
        return score(own @ p["w"]) + score(torch.einsum("jk,kl,j->l", own, p["w"], x[:2]))

    params = {"generator": torch.randn(3, 2, 4, device=device), "w": torch.randn(4, 5, device=device)}
    assert_agrees(Problem(fn, (params, torch.randn(3, 3, device=device))))


@given(n=st.integers(0, 3), rank=sides, t=sides, seed=st.integers(0, 99))
def test_adapters_by_einsum(n, rank, t, seed, device):
    torch.manual_seed(seed)
    params = {"a": torch.randn(3, rank, device=device), "b": torch.randn(rank, 4, device=device), "scale": torch.randn((), device=device)}

    def fn(p, x):
        return score(torch.einsum("ti,ir,ro->to", x, p["a"], p["b"]) * p["scale"])

    assert_agrees(Problem(fn, (params, torch.randn(n, t, 3, device=device))))


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that an op returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and not output._is_view():
            self.entries = max(self.entries, output.numel())
        return output


@given(n=st.sampled_from([0, 1, 3]), lead=st.lists(sides, max_size=2), i=sides, o=sides, seed=st.integers(0, 99))
def test_a_matrix_by_single_columns(n, lead, i, o, seed, device):
    torch.manual_seed(seed)
    params = {"w": torch.randn(o, i, device=device), "v": torch.randn(o, o, device=device)}
    fn = lambda p, x: score(p["v"] @ (p["w"] @ x).sin())  # noqa: E731
    assert_agrees(Problem(fn, (params, torch.randn(n, *lead, i, 1, device=device))))


class Called(TorchDispatchMode):
    """The ops that ran."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


def test_single_columns_of_all_samples_are_one_product(device):
    fn = lambda p, x: (p["v"] @ (p["w"] @ x).sin()).sin().sum()  # noqa: E731
    params = {name: torch.randn(50, 50, device=device) / 7 for name in "vw"}
    x = torch.randn(9, 50, 1, device=device)
    with Called() as called:
        norms = psg.per_sample_norm(fn)(params, x)
    assert torch.ops.aten.bmm.default not in called.ops
    assert_trees_close(norms, psg.tree.norm(loop_grad(fn)(params, x)))


@pytest.mark.parametrize("equation", ["tef,efd,te->td", "te,tef,efd->td", "efd,tef,te->td"])
def test_experts_meet_their_gates_before_one_another(equation, device):
    n, t, e, f, d = 3, 7, 4, 5, 6
    sizes = {"t": t, "e": e, "f": f, "d": d}
    operands = equation.split("->")[0].split(",")
    own = operands.index("efd")
    tensors = [torch.randn(*(() if k == own else (n,)), *(sizes[name] for name in names)) for k, names in enumerate(operands)]
    problem = on(Problem(lambda w, x, y: score(torch.einsum(equation, *(x, y)[:own], w, *(x, y)[own:])), ()), device)
    args = tuple(tensor.to(device) for tensor in (tensors.pop(own), *tensors))
    assert_agrees(problem._replace(args=args))
    with Largest() as largest:
        psg.per_sample_grad(problem.fn)(*args)
    assert largest.entries <= n * max(e * f * d, t * e * f, t * e * d)


@given(data=st.data())
def test_einsum_of_four(data, device):
    # Sizes of 1 broadcast, and data may repeat a label.
    draw = data.draw
    n, sizes = draw(st.integers(0, 3)), {name: draw(sides) for name in "abcd"}
    terms = [
        "".join(draw(st.permutations("abcd"))[: draw(st.integers(0, 3))]),
        *("".join(draw(st.lists(st.sampled_from("abcd"), max_size=3))) for _ in range(3)),
    ]
    out = "".join(name for name in sorted(set("".join(terms))) if draw(st.booleans()))
    stretched = [{name for name in "ab"[k:] if draw(st.booleans())} for k in range(len(terms))]
    w, *batch = (
        draw(tensors((*(() if k == 0 else (n,)), *(1 if name in stretched[k] else sizes[name] for name in term))))
        for k, term in enumerate(terms)
    )
    equation = f"{','.join(terms)}->{out}"
    assert_agrees(on(Problem(lambda w, *batch: score(torch.einsum(equation, w, *batch)), (w, *batch)), device))


def test_the_same_parameter_twice_in_one_product(device):
    def fn(w, x):
        return score(torch.einsum("ti,io,jo->tj", x, w, w)) + score((x @ w) @ w.T)

    assert_agrees(Problem(fn, (torch.randn(3, 4, device=device), torch.randn(2, 5, 3, device=device))))


def test_labels_that_stand_twice_have_no_rule(device):
    # The diagonal of a parameter has none; the diagonal of data has one.
    weight, x = torch.randn(3, 3, device=device), torch.randn(2, 3, 3, device=device)
    assert_agrees(Problem(lambda w, x: score(torch.einsum("ii,ij->j", w, x)), (weight, x)))
    assert_agrees(Problem(lambda w, x: score(torch.einsum("ii,ij->j", x, w)), (weight, x)))
    assert_agrees(Problem(lambda w, x: score(torch.einsum(w, [0, 1], x, [1, 2], [0, 2])), (weight, x)))
    assert_agrees(Problem(lambda w, x: score(torch.einsum("ij,jk", [w, x])), (weight, x)))


def test_complex_products_have_no_rule(device):
    weight, x = torch.randn(3, 4, dtype=torch.complex128, device=device), torch.randn(2, 5, 3, dtype=torch.complex128, device=device)
    assert_agrees(Problem(lambda w, x: score(x @ w) + score(torch.einsum("ti,io->o", x, w)), (weight, x)))


@given(n=st.integers(0, 3), t=st.integers(0, 3), seed=st.integers(0, 99))
def test_convolution_by_a_matrix_of_transformers(n, t, seed, device):
    # transformers' Conv1D, the linear layer of GPT-2.
    torch.manual_seed(seed)
    params = {"weight": torch.randn(3, 4, device=device), "bias": torch.randn(4, device=device)}

    def fn(p, x):
        out = torch.addmm(p["bias"], x.view(-1, x.size(-1)), p["weight"])
        return score(out.view(x.size()[:-1] + (4,)))

    assert_agrees(Problem(fn, (params, torch.randn(n, 1, t, 3, device=device))))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("beyond", [0, 2])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_rows_by_the_matrices_of_their_experts(n, beyond, transposed, device):
    """The op does not support float64; the loop over plain products does."""
    experts, t = 5, 7
    params = {"w": torch.randn(experts, *((8, 4) if transposed else (4, 8)), device=device), "scale": torch.tensor(1.3, device=device)}
    x, choice = torch.randn(n, t, 4, device=device), torch.randint(experts - 1, (n, t), device=device).sort(1).values  # one is idle

    def fn(params, x, choice):
        rows = torch.arange(t, device=x.device) < t - beyond
        offsets = torch.where(rows, 1, 0).float() @ F.one_hot(choice, experts).float()
        w = params["w"].mT if transposed else params["w"]
        y = torch._grouped_mm((x * params["scale"]).float(), w.float(), offs=offsets.cumsum(0).int())
        return torch.where(rows[:, None], y, 0).double().sin().square().sum()

    def plain(params, x, choice):
        w = params["w"].mT if transposed else params["w"]
        return torch.einsum("ti,tio->to", x * params["scale"], w[choice])[: t - beyond].sin().square().sum()

    assert_trees_close(psg.per_sample_grad(fn)(params, x, choice), loop_grad(plain)(params, x, choice), rtol=1e-4, atol=1e-5)
    if n:
        assert "_grouped_mm: rule" in str(psg.explain(fn)(params, x, choice))


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
@given(n=st.integers(0, 4), counts=st.lists(st.integers(0, 3), min_size=1, max_size=4), beyond=st.integers(0, 3), seed=st.integers(0, 99))
def test_rows_that_no_expert_takes_have_no_gradient(method, n, counts, beyond, seed, device):
    """torch's own is what was in that memory before. The op has no float64, so the tolerance is that of float32."""
    torch.manual_seed(seed)
    w, scale = torch.randn(len(counts), 4, 8, device=device), torch.rand(4, device=device) + 1
    x, experts = torch.randn(n, sum(counts) + beyond, 4, device=device), torch.arange(len(counts), device=device)
    chosen = experts.repeat_interleave(torch.tensor(counts, device=device))
    ends = torch.tensor(counts, device=device).cumsum(0).int().expand(n, -1)

    def fn(p, x, ends):
        w, scale = p
        return torch._grouped_mm((x * scale).float(), w.float(), offs=ends)[: len(chosen)].double().sin().square().sum()

    def plain(p, x, ends):
        w, scale = p
        return torch.einsum("ti,tio->to", (x * scale)[: len(chosen)], w[chosen]).sin().square().sum()

    spoiled = [torch.full(x.shape[1:], torch.nan, dtype=torch.float32, device=device) for _ in range(50)]
    del spoiled
    arguments, options = ((w, scale), x, ends), {"argnums": (0, 1), "in_dims": (None, 0, 0)}
    found = psg.per_sample_grad(fn, method=method, **options)(*arguments)
    assert_trees_close(found, loop_grad(plain, **options)(*arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_large_matrices_are_not_materialised(transposed, device):
    # The op takes no float64; tests of Routed itself do.
    w = (torch.randn(8, *((96, 128) if transposed else (128, 96)), device=device) / 10).float()
    x, choice = torch.randn(4, 5, 128, device=device).float(), torch.randint(7, (4, 5), device=device).sort(1).values

    def fn(w, x, choice):
        offsets = F.one_hot(choice[:4], 8).sum(0).cumsum(0).int()  # the last row is beyond
        return torch._grouped_mm(x, w.mT if transposed else w, offs=offsets)[:4].sin().sum()

    plain = lambda w, x, choice: torch.einsum("ti,tio->to", x, (w.mT if transposed else w)[choice])[:4].sin().sum()  # noqa: E731
    assert isinstance(psg.factored_grad(fn)(w, x, choice), Routed)
    grads = loop_grad(plain)(w, x, choice)
    assert_trees_close(psg.per_sample_grad(fn)(w, x, choice), grads)
    for transform in (psg.clipped_grad(fn, 1.0), psg.jit(psg.clipped_grad(fn, 1.0), backend="eager")):
        out, expected = transform(w, x, choice), psg.tree.clip(Dense(grads), 1.0)
        assert_trees_close(out.norms, expected.norms)
        assert_trees_close(out.grads, expected.grads, per_sample=False)


def test_rows_beyond_the_last_expert_reach_no_other_sample(device):
    w, x = (torch.randn(*shape, device=device, dtype=torch.float32) for shape in ((2, 4, 8), (3, 5, 4)))
    offsets = torch.tensor([2, 4], dtype=torch.int32, device=device).expand(3, 2).contiguous()

    def fn(w, x, offsets, scale):
        y = torch._grouped_mm(x, w, offs=offsets)
        return y[:4].sin().sum() + (y[4] * scale).sum()

    scale = torch.tensor([float("inf"), 0.0, 0.0], device=device)
    grads = psg.per_sample_grad(fn, method="capture")(w, x, offsets, scale)
    plain = lambda w, x: torch.cat([x[:2] @ w[0], x[2:4] @ w[1]]).sin().sum()  # noqa: E731
    assert_trees_close(grads[1:], loop_grad(plain)(w, x[1:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_rows_of_a_batch_by_the_matrices_of_their_experts(n, transposed, device):
    """As models do it: all rows of the batch are sorted by their expert, which mixes the samples' rows."""
    experts, t = 5, 7
    w = torch.randn(experts, *((8, 4) if transposed else (4, 8)), device=device).float()
    x, choice = torch.randn(n, t, 4, device=device).float(), torch.randint(experts - 1, (n, t), device=device)  # one is idle

    def fn(w, x, choice):
        flat = choice.flatten()
        order = flat.argsort(stable=True)
        offsets = torch.bincount(flat, minlength=experts).cumsum(0).int()
        matrices = w.mT if transposed else w
        y = torch._grouped_mm(x.flatten(0, 1)[order], matrices, offs=offsets)
        return y[order.argsort()].unflatten(0, (-1, t)).sin().square().sum((1, 2))

    def plain(w, x, choice):
        return torch.einsum("ti,tio->to", x, (w.mT if transposed else w)[choice]).sin().square().sum()

    grads = psg.per_sample_grad(fn, method="batch")(w, x, choice)
    assert_trees_close(grads, loop_grad(plain)(w, x, choice), rtol=1e-4, atol=1e-5)


def test_what_is_added_to_a_product_of_parameters(device):
    params = {"w": torch.randn(4, 3, device=device), "v": torch.randn(3, 5, device=device)}

    def fn(p, x, y):
        return score(torch.addmm(x, p["w"], p["v"]) + torch.addmv(y, p["w"], p["v"][:, 0])[:, None])

    assert_agrees(Problem(fn, (params, torch.randn(6, 4, 5, device=device), torch.randn(6, 4, device=device))))


LAYOUTS = {
    "mm": lambda w, x: torch.mm(w, x),
    "mm, the parameter second": lambda w, x: torch.mm(x.T, w.T),
    "matmul of a column": lambda w, x: w @ x[:, :1],
    "matmul of columns": lambda w, x: w @ x.T[:, :, None],
    "bmm": lambda w, x: torch.bmm(x.view(3, 1, 5).expand(3, 4, 5).mT, w.view(1, 4, 3).expand(3, 4, 3)),
    "baddbmm": lambda w, x: torch.baddbmm(w[:, :1, None], x.T[None].expand(4, 5, 3), w[:, :, None].expand(4, 3, 2)),
    "addbmm": lambda w, x: torch.addbmm(w[:1, :2], x.T[None].expand(4, 5, 3), w[:, :, None].expand(4, 3, 2)),
    "tensordot": lambda w, x: torch.tensordot(x, w, ([0], [1])),
    "inner": lambda w, x: torch.inner(x.T, w),
    "matmul of a stack": lambda w, x: x.T[None].expand(2, 5, 3) @ w.T,
    "linear of a transposed sample": lambda w, x: F.linear(x.T, w),
    **{
        f"einsum {equation}": lambda w, x, equation=equation: torch.einsum(equation, w, x)
        for equation in ("oi,it->ot", "oi,it->to", "oi,it->oit", "oi,it->tio")
    },
    "einsum of heads": lambda w, x: torch.einsum(
        "bhqk,bkhd->bqhd", x.view(1, 1, 3, 5), w.view(1, 1, 4, 3)[..., :1].expand(1, 5, 4, 1)[:, :, :1]
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sample_s_output_has_the_layout_of_its_own(name, device):
    """fn may take a view of the output, or branch on its layout."""

    def fn(w, x):
        y = LAYOUTS[name](w, x)
        return y.view(-1).sin().sum() if y.is_contiguous() else y.cos().sum()

    problem = Problem(fn, (torch.randn(4, 3, device=device), torch.randn(5, 3, 5, device=device)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_agrees(problem)
