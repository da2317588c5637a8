"""Derivatives of per-sample gradients against those of the loop: vmap(grad), the reference of other tests, is itself wrong for some."""

import contextlib
import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import each_case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import psg
from psg._trees import flatten
from psg.testing import assert_trees_close, loop_grad
from psg.testing._loop import tree_map

N = 3

NORMS = {
    "layer_norm": lambda z, p: F.layer_norm(z, (4,), p["w"], p["b"]),
    "layer_norm without affine": lambda z, p: F.layer_norm(z, (4,)) * p["w"] + p["b"],
    "layer_norm over two dimensions": lambda z, p: F.layer_norm(z[:, None], (1, 4), p["w"][None], p["b"][None]),
    "rms_norm": lambda z, p: F.rms_norm(z, (4,), p["w"]) + p["b"],
    "group_norm": lambda z, p: F.group_norm(z.T[None], 2, p["w"], p["b"]),
    "instance_norm": lambda z, p: F.instance_norm(z.T[None], weight=p["w"], bias=p["b"]),
    "batch_norm": lambda z, p: F.batch_norm(z, None, None, p["w"], p["b"], training=True),
}


@pytest.fixture
def setting(device):
    torch.manual_seed(0)
    params = {"W": torch.randn(4, 4, device=device), "w": torch.randn(4, device=device), "b": torch.randn(4, device=device)}
    return params, torch.randn(N, 5, 4, device=device)


@pytest.fixture(params=NORMS)
def fn(request):
    return lambda p, x: NORMS[request.param](F.linear(x, p["W"]), p).sin().sum()


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_a_gradient_inside_fn(fn, setting, method):
    params, x = setting

    def adapted(p, x):
        return fn({name: p[name] - 0.1 * g for name, g in torch.func.grad(fn)(p, x).items()}, x)

    assert_trees_close(psg.per_sample_grad(adapted, method=method)(params, x), loop_grad(adapted)(params, x))


@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
def test_backward_through_norms(fn, setting, method):
    params, x = setting

    def penalty(method):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        psg.per_sample_norm(fn, method=method)(leaves, x).square().sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    assert_trees_close(penalty(method), penalty("loop"))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev])
def test_transforms_of_norms(fn, setting, transform):
    params, x = setting

    def penalty(method):
        return transform(lambda p: psg.per_sample_norm(fn, method=method)(p, x).square().sum())(params)

    assert_trees_close(penalty("auto"), penalty("loop"))


@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
def test_shapes_that_layer_norm_refuses_are_refused_in_transforms(method, device):
    fn = lambda w, x: torch.func.grad(lambda x: F.layer_norm(w * x, (3,)).sin().sum())(x).sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="normalized_shape"):
        psg.per_sample_grad(fn, method=method)(torch.ones(4, device=device), torch.ones(2, 4, device=device))


TOO_FEW_DIMENSIONS = {
    "layer_norm": lambda w, x: F.layer_norm(w * x, (2, 4)).square().sum(),
    "layer_norm of a parameter": lambda w, x: F.layer_norm(x, (2, 4), w.expand(2, 4)).square().sum(),
    "tril": lambda w, x: (torch.tril(x) * w).sum(),
    "triu_": lambda w, x: (x * w).triu_().sum(),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")  # the loop says what torch says
@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
@pytest.mark.parametrize("name", TOO_FEW_DIMENSIONS)
def test_the_samples_are_no_dimension_of_one_of_them(name, method, device):
    """Under vmap these ops took the dimension of the samples for one of theirs, if there were as many samples as fit."""
    w, x = torch.ones(4, device=device), torch.randn(2, 4, device=device)
    with pytest.raises((RuntimeError, psg.PsgError), match="normalized_shape|dimensions"):
        psg.per_sample_grad(TOO_FEW_DIMENSIONS[name], method=method)(w, x)


@given(data=st.data())
def test_backward_through_norms_over_drawn_shapes(data, device):
    # At least three values: normalising two leaves only their signs, with derivatives that are rounding errors.
    n, images, channels, size = (data.draw(st.integers(low, low + 2)) for low in (0, 1, 1, 3))
    kind, affine = data.draw(st.sampled_from(["layer", "instance", "batch"])), data.draw(st.sampled_from(["w", "wb"]))
    eps = data.draw(st.sampled_from([1e-3, 0.1]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    shape = (channels, size) if kind == "layer" else (channels,)
    params = {name: torch.randn(shape, device=device) for name in affine}
    x = torch.randn(n, images, channels, size, device=device)

    def fn(p, x):
        w, b = p["w"], p.get("b")
        if kind == "layer":
            return F.layer_norm(x, shape, w, b, eps).exp().sum()
        if kind == "instance":
            return F.instance_norm(x, weight=w, bias=b, eps=eps).exp().sum()
        return F.batch_norm(x, None, None, w, b, training=True, eps=eps).exp().sum()

    def penalty(method):
        leaves, inputs = {name: value.clone().requires_grad_() for name, value in params.items()}, x.clone().requires_grad_()
        loss = psg.per_sample_norm(fn, method=method)(leaves, inputs).square().sum()
        return torch.autograd.grad(loss, [*leaves.values(), inputs], allow_unused=True, materialize_grads=True) if n else loss

    assert_trees_close(penalty("auto"), penalty("loop"))


def adds_up(p, x):
    return (F.embedding(x, p["W"], scale_grad_by_freq=True).sin() * p["w"]).sum()


def pads(p, x):
    return (F.embedding(x, p["W"], padding_idx=-3, scale_grad_by_freq=True).sin() * p["w"]).sum()


def selects(p, x):
    return F.linear(torch.select_scatter(p["W"], p["w"], 0, 1), p["b"]).sin().sum() * x.sum()


def freezes(p, x):
    return (F.linear(p["b"], p["W"].data) * p["W"].sin()).square().sum() * x.sum()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")  # some go to the loop, which is right
@pytest.mark.parametrize("fn", [adds_up, pads, selects, freezes])
def test_backward_through_other_ops(fn, setting):
    params, _ = setting
    x = torch.tensor([[1, 0, 1], [1, 2, 2], [3, 3, 0]], device=params["w"].device)

    def penalty(method):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        psg.per_sample_norm(fn, method=method)(leaves, x).square().sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    assert_trees_close(penalty("auto"), penalty("loop"))


NOT_COMPARED = {
    "gradient hook on an output": "torch calls the hook for the derivative too, once more under vmap",
    "layer_norm without weight": "torch's own derivative, which the loop takes, leaves the bias out",
    "instance_norm without weight": "torch's own derivative, which the loop takes, leaves the bias out",
    "derived: weight_norm parametrisation": "torch's own second derivative is wrong: gradgradcheck of _weight_norm fails",
    "embedding_bag": "torch has no second derivative",
    "embedding of no ids": "torch has no second derivative",
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@each_case(lambda case: not case.not_vmap and not case.vmap_wrong and case.name not in NOT_COMPARED)
def test_backward_through_norms_of_the_cases(case, device):
    problem = case.build(device)

    def penalty(method):
        args = tree_map(lambda leaf: leaf.detach().clone().requires_grad_() if _is_real(leaf) else leaf, problem.args)
        norms = psg.per_sample_norm(problem.fn, method=method, **problem.options)(*args, **problem.shared)
        norms = norms[0] if problem.options.get("has_aux") else norms
        if norms.requires_grad:
            norms.square().sum().backward()
        leaves = [leaf for leaf in flatten(args)[0] if _is_real(leaf)]
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    assert_trees_close(penalty("auto"), penalty("loop"))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_second_derivative_of_weight_norm(dim, device):
    def written_out(v, g, dim):
        return v * (g / torch.linalg.vector_norm(v, dim=None if dim == -1 else 1 - dim, keepdim=dim != -1))

    def penalty(normalised, method):
        given = [leaf.clone().requires_grad_() for leaf in (v, g)]
        norms = psg.per_sample_norm(lambda p, x: F.linear(x, normalised(*p, dim)).sin().sum(), method=method)(given, x)
        return torch.autograd.grad(norms.square().sum(), given)

    v, g, x = (
        torch.randn(4, 3, device=device),
        torch.rand({0: (4, 1), 1: (1, 3), -1: ()}[dim], device=device),
        torch.randn(5, 3, device=device),
    )
    assert_trees_close(penalty(torch._weight_norm, "auto"), penalty(written_out, "loop"))


SHARED_MEMORY = {
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "one sample": lambda x: x[:1].expand(x.shape),
    "sliding windows": lambda x: x.flatten()[: len(x) + x[0].numel()].unfold(0, x[0].numel(), 1)[: len(x)].unflatten(1, x.shape[1:]),
}


@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
@pytest.mark.parametrize("memory", SHARED_MEMORY)
@given(
    dims=st.integers(1, 3),
    images=st.sampled_from([(), (1,), (2,)]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    padding=st.integers(0, 1),
    groups=st.integers(1, 2),
    n=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_samples_of_convolutions_whose_entries_share_memory(memory, method, dims, images, sizes, padding, groups, n, seed, device):
    torch.manual_seed(seed)
    channels, outputs, kernel = sizes
    conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    w = torch.randn(groups * outputs, channels, *(kernel,) * dims, device=device)
    x = SHARED_MEMORY[memory](torch.randn(n + 1, *images, groups * channels, *(3,) * dims, device=device))[:n]
    fn = lambda w, x: conv(x, w, padding=padding, groups=groups).sin().sum()  # noqa: E731

    def penalty(method):
        return lambda w, x: psg.per_sample_norm(fn, method=method)(w, x).square().sum()

    expected = torch.func.grad(penalty("loop"), argnums=(0, 1))(w, x.contiguous())
    assert_trees_close(torch.func.grad(penalty(method), argnums=(0, 1))(w, x), expected, per_sample=False)
    leaves = w.clone().requires_grad_(), x.detach().requires_grad_()
    assert_trees_close(torch.autograd.grad(penalty(method)(*leaves), leaves), expected, per_sample=False)


def _is_real(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


# Tangents of tensors that are no argument of fn


def loss(w, x, scale):
    return ((w * x).sum() * scale).sin()


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("place", ["closed over", "keyword", "clip norm"])
def test_forward_mode_of_what_is_no_parameter(place, method, device):
    torch.manual_seed(0)
    w, x, value = torch.randn(3, device=device), torch.randn(4, 3, device=device), torch.tensor(0.8, device=device)

    def results(value):
        if place == "closed over":
            out = psg.clipped_grad(lambda w, x: loss(w, x, value), 0.5, method=method)(w, x)
        elif place == "keyword":
            out = psg.clipped_grad(loss, 0.5, method=method)(w, x, scale=value)
        else:
            out = psg.clipped_grad(loss, value, method=method)(w, x, scale=2.0)
        return out.grads, out.clip_coef

    _, expected = torch.func.jvp(results, (value,), (torch.ones_like(value),))
    with forward_ad.dual_level():
        found = tuple(forward_ad.unpack_dual(result).tangent for result in results(forward_ad.make_dual(value, torch.ones_like(value))))
    assert_trees_close(tuple(tangent.detach() for tangent in found), expected)


@pytest.mark.parametrize(
    "gradients", [psg.per_sample_grad, psg.per_sample_norm, psg.factored_grad, partial(psg.clipped_grad, clip_norm=1.0)]
)
def test_capture_gives_no_tangents_and_says_so(gradients, device):
    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    with forward_ad.dual_level(), pytest.raises(psg.PsgError, match="inside a level of torch.autograd.forward_ad"):
        gradients(lambda w, x: (w * x).sum().sin(), method="capture")(forward_ad.make_dual(w, torch.ones_like(w)), x)


# --- ops whose higher derivatives torch itself gets wrong ------------------------------------------------------


def standardized(x, dims, eps=1e-5):
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()


# Each op, and the same in elementary ops, on [2, 3, 4].
MISDERIVED = {
    "layer_norm": (lambda z: F.layer_norm(z, (4,)), lambda z: standardized(z, -1)),
    "instance_norm": (F.instance_norm, lambda z: standardized(z, 2)),
    "batch_norm": (lambda z: F.batch_norm(z, None, None, training=True), lambda z: standardized(z, (0, 2))),
    "weight_norm": (
        lambda z: torch._weight_norm(z[0], z[1, :, :1].exp(), 0),
        lambda z: z[0] * z[1, :, :1].exp() / z[0].square().sum(1, keepdim=True).sqrt(),
    ),
}


def regular(z):
    """A matrix with determinants that differ from zero, [3, 3]; singular values that are equal where z is zero."""
    return z[0, :, :3] / 4 + 2 * torch.eye(3, device=z.device)


def cofactors(a):
    """The determinant of a matrix [3, 3], and its cofactors."""
    minors = [[a[(i + 1) % 3, (j + 1) % 3] * a[(i + 2) % 3, (j + 2) % 3] - a[(i + 1) % 3, (j + 2) % 3] * a[(i + 2) % 3, (j + 1) % 3]
               for j in range(3)] for i in range(3)]  # fmt: skip
    found = torch.stack([torch.stack(row) for row in minors])
    return (a[0] * found[0]).sum(), found


def solution(a, b):
    determinant, found = cofactors(a)
    return found.mT @ b / determinant


def reflected(vectors, scales):
    """The first columns of the product of the reflections in these vectors, whose entries above the diagonal do not count."""
    product = torch.eye(len(vectors), device=vectors.device)
    for k, scale in enumerate(scales):
        vector = torch.cat([vectors.new_zeros(k), vectors.new_ones(1), vectors[k + 1 :, k]])
        product = product - scale * torch.outer(product @ vector, vector)
    return product[:, : vectors.shape[1]]


DECOMPOSED = {
    "det": (lambda z: torch.linalg.det(regular(z)), lambda z: cofactors(regular(z))[0]),
    "slogdet": (lambda z: regular(z).slogdet().logabsdet, lambda z: cofactors(regular(z))[0].abs().log()),
    "logdet": (lambda z: torch.logdet(regular(z)), lambda z: cofactors(regular(z))[0].log()),
    "solve": (lambda z: torch.linalg.solve(regular(z), z[1]), lambda z: solution(regular(z), z[1])),
    "solve of a vector": (lambda z: torch.linalg.solve(regular(z), z[1, :, 0]), lambda z: solution(regular(z), z[1, :, 0])),
    "solve from the right": (
        lambda z: torch.linalg.solve_ex(regular(z), z[1].mT, left=False).result,
        lambda z: solution(regular(z).mT, z[1]).mT,
    ),
    "tensorsolve": (lambda z: torch.linalg.tensorsolve(regular(z), z[1, :, 0]), lambda z: solution(regular(z), z[1, :, 0])),
    "tensorsolve of other dimensions": (
        lambda z: torch.linalg.tensorsolve(regular(z), z[1, :, 0], dims=(0,)),
        lambda z: solution(regular(z).mT, z[1, :, 0]),
    ),
    "householder_product": (
        lambda z: torch.linalg.householder_product(z[0].mT.tanh(), z[1, :, 0].tanh()),
        lambda z: reflected(z[0].mT.tanh(), z[1, :, 0].tanh()),
    ),
    "triangular_solve": (
        lambda z: torch.triangular_solve(z[1], regular(z), transpose=True).solution,
        lambda z: solution(regular(z).triu().mT, z[1]),
    ),
}
"""Ops on matrices, whose derivatives torch gets wrong in transforms, and which psg therefore writes out."""


MISDERIVED |= DECOMPOSED
if hasattr(F, "linear_cross_entropy"):  # torch >= 2.13
    MISDERIVED["linear_cross_entropy"] = (
        lambda z: F.linear_cross_entropy(
            z[0], z[1], torch.arange(3, device=z.device), options=nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
        ),
        lambda z: (z[0] @ z[1].mT).logsumexp(1).mean() - (z[0] * z[1]).sum(1).mean(),
    )


@pytest.fixture(params=MISDERIVED)
def pair(request):
    """A function of a sample by torch's op, and the same in elementary ops."""

    def function_of(op, branches):
        def fn(p, x):
            loss = op((x @ p["W"] + p["b"]).reshape(2, 3, 4)).sin().square().sum()
            return 2 * loss if branches and x[0, 0] > 100 else loss

        return fn

    op, elementary = MISDERIVED[request.param]
    return lambda branches=False: function_of(op, branches), function_of(elementary, False)


@pytest.fixture
def wide_setting(device):
    torch.manual_seed(0)
    return {"W": torch.randn(4, 4, device=device), "b": torch.randn(4, device=device)}, torch.randn(N, 6, 4, device=device)


def two_derivatives_of_norms(fn, method, params, x):
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    norms = psg.per_sample_norm(fn, method=method)(leaves, x)
    first = torch.autograd.grad(norms.sin().sum(), list(leaves.values()), create_graph=True)
    return norms, first, torch.autograd.grad(sum(g.sin().sum() for g in first), list(leaves.values()))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(("method", "branches"), [("auto", False), ("auto", True), ("vmap", False), ("loop", False)])
def test_derivatives_of_norms_through_misderived_ops(method, branches, pair, wide_setting):
    make, elementary = pair
    found = two_derivatives_of_norms(make(branches), method, *wide_setting)
    assert_trees_close(found, two_derivatives_of_norms(elementary, "loop", *wide_setting), per_sample=False)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_derivatives_of_norms_through_misderived_ops_under_autocast(method, pair, wide_setting, device):
    """In float64, which autocast leaves as it is; it kept the ops from being written out."""
    make, elementary = pair
    params, x = tree_map(Tensor.double, wide_setting)
    with torch.autocast(device.type, torch.bfloat16):
        found = two_derivatives_of_norms(make(), method, params, x)
    assert_trees_close(found, two_derivatives_of_norms(elementary, "loop", params, x), per_sample=False)


def laplacian(fn):
    def differentiating(p, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(fn(p, x), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x, create_graph=True)[0].square().sum()

    return differentiating


@pytest.mark.parametrize("method", ["auto", "capture", "loop"])
def test_functions_that_differentiate_misderived_ops(method, pair, wide_setting):
    make, elementary = pair
    expected = loop_grad(laplacian(elementary))(*wide_setting)
    assert_trees_close(psg.per_sample_grad(laplacian(make()), method=method)(*wide_setting), expected)
    assert_trees_close(loop_grad(laplacian(make()))(*wide_setting), expected)
    psg.check(laplacian(make()))(*wide_setting)


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_functions_that_differentiate_misderived_ops_for_what_they_compute(method, pair, wide_setting):
    """Which they can under `vmap(grad)` too; of the ops there some ran before the first of these derivatives was taken."""

    def of(fn):
        def differentiating(p, x):
            hidden, loss = x * p["b"], fn(p, x)
            (slope,) = torch.autograd.grad(fn(p, hidden), hidden, create_graph=True)
            return torch.autograd.grad(slope.square().sum(), hidden, create_graph=True)[0].square().sum() + loss

        return differentiating

    make, elementary = pair
    expected = loop_grad(of(elementary))(*wide_setting)
    assert_trees_close(psg.per_sample_grad(of(make()), method=method)(*wide_setting), expected)
    psg.check(of(make()), method=method)(*wide_setting)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("pair", [name for name in MISDERIVED if name != "linear_cross_entropy"], indirect=True)
def test_functions_that_take_tangents_of_misderived_ops(method, pair, wide_setting):
    """By a level of forward-mode autograd inside fn: in the derivatives of these tangents, too, the ops are written out.

    Not of the cross entropy: plain autograd cannot differentiate the tangents of logsumexp (2.13).
    """

    def of(fn):
        def tangent(p, x):
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(fn(p, forward_ad.make_dual(x, x.cos()))).tangent.sin()

        return tangent

    make, elementary = pair
    expected = loop_grad(of(elementary))(*wide_setting)
    assert_trees_close(psg.per_sample_grad(of(make()), method=method)(*wide_setting), expected)
    assert_trees_close(loop_grad(of(make()))(*wide_setting), expected)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", DECOMPOSED)
@given(scale=st.sampled_from([0.0, 1.0]), n=st.sampled_from([0, 1, 3]), seed=st.integers(0, 9))
@settings(max_examples=6)
def test_gradients_of_tangents_and_slopes_through_ops_on_matrices(name, method, scale, n, seed, device):
    """And of matrices with equal singular values."""
    torch.manual_seed(seed)
    w, direction = scale * torch.randn(2, 3, 4, device=device), torch.randn(2, 3, 4, device=device)
    x = 1 + torch.rand(n, 1, device=device)

    def tangents(op):
        return lambda w, x: torch.func.jvp(lambda w: op(w * x), (w,), (direction,))[1].sin().sum()

    def slopes(op):
        return lambda w, x: (torch.func.grad(lambda w: op(w * x).sin().sum())(w) * direction).sum() + op(w).sum()

    op, elementary = DECOMPOSED[name]
    for made in (tangents, slopes):
        assert_trees_close(psg.per_sample_grad(made(op), method=method)(w, x), loop_grad(made(elementary))(w, x), atol=1e-9)


def products(input, dim, index, src, include_self):
    """What `scatter_reduce` by "prod" gives, entry by entry."""
    output = {place: value for place, value in zip(itertools.product(*map(range, input.shape)), input.flatten(), strict=True)}
    met = set()
    for place in itertools.product(*map(range, index.shape)):
        target = (*place[:dim], int(index[place]), *place[dim + 1 :])[: input.ndim]
        output[target] = output[target] * src[place] if include_self or target in met else src[place]
        met.add(target)
    return torch.stack(list(output.values())).reshape(input.shape)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@given(
    shape=st.lists(st.integers(1, 3), max_size=3),
    include_self=st.booleans(),
    in_place=st.booleans(),
    n=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_tangents_of_products_of_scattered_entries(method, shape, include_self, in_place, n, seed, device):
    """Which torch leaves zero (2.13). An index may be smaller than the source and than the input, in all dimensions but its own."""
    torch.manual_seed(seed)
    dim = seed % len(shape) if shape else 0
    sizes = [4 if d == dim else max(1, size - seed % 2) for d, size in enumerate(shape)]
    index = torch.randint(shape[dim] if shape else 1, sizes, device=device)
    w = {"input": torch.randn(shape, device=device), "src": torch.randn([size + 1 for size in sizes], device=device)}
    direction, x = {key: torch.randn_like(value) for key, value in w.items()}, 1 + torch.rand(n, device=device)

    def reduced(input, dim, index, src, include_self):
        if in_place:
            return (input * 1).scatter_reduce_(dim, index, src, "prod", include_self=include_self)
        return torch.scatter_reduce(input, dim - input.ndim if input.ndim else -1, index, src, "prod", include_self=include_self)

    def by(op):
        of = lambda w, x: op(w["input"] * x, dim, index, w["src"].sin() * x, include_self).exp().sum()  # noqa: E731
        return lambda w, x: torch.func.jvp(lambda w: of(w, x), (w,), (direction,))[1].sin()

    assert_trees_close(psg.per_sample_grad(by(reduced), method=method)(w, x), loop_grad(by(products))(w, x))


def expanded(a):
    """The determinants of matrices [*, k, k], by their first rows."""
    if a.shape[-1] == 0:
        return 1 + a.sum((-2, -1))
    others = [[j for j in range(a.shape[-1]) if j != k] for k in range(a.shape[-1])]
    return sum((-1) ** k * a[..., 0, k] * expanded(a[..., 1:, :][..., others[k]]) for k in range(a.shape[-1]))


SOLVED = {
    "det": (lambda a, b: a.det(), lambda a, b: expanded(a)),
    "torch.det": (lambda a, b: torch.det(input=a), lambda a, b: expanded(a)),
    "slogdet": (
        lambda a, b: torch.linalg.slogdet(a).sign * torch.slogdet(a).logabsdet,
        lambda a, b: expanded(a).sign() * expanded(a).abs().log(),
    ),
    "logdet": (lambda a, b: torch.logdet(a @ a.mT), lambda a, b: expanded(a @ a.mT).log()),
    "solve": (lambda a, b: torch.linalg.solve(a, b), lambda a, b: a.inverse() @ b),
    "solve_ex, checked": (lambda a, b: torch.linalg.solve_ex(a, b, check_errors=True)[0], lambda a, b: a.inverse() @ b),
    "from the right": (lambda a, b: torch.linalg.solve(A=a, B=b.mT, left=False), lambda a, b: b.mT @ a.inverse()),
    "one vector": (lambda a, b: torch.linalg.solve(a, b.flatten()[: a.shape[-1]]), lambda a, b: a.inverse() @ b.flatten()[: a.shape[-1]]),
    "vectors": (
        lambda a, b: torch.linalg.solve_ex(a, b[..., 0].expand(a.shape[:-1])).result,
        lambda a, b: (a.inverse() @ b[..., 0].expand(a.shape[:-1])[..., None])[..., 0],
    ),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", SOLVED)
@given(
    batch=st.sampled_from([((), ()), ((2,), (2,)), ((2,), ()), ((2, 1), (3,)), ((1,), (2,))]),
    size=st.integers(1, 3),
    columns=st.integers(1, 3),
    varied=st.sampled_from(["the matrix", "both", "the sides"]),
    n=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_drawn_determinants_and_solutions_inside_transforms(name, method, batch, size, columns, varied, n, seed, device):
    """Of one matrix and of several, with as many sides and with others, as many as torch broadcasts."""
    torch.manual_seed(seed)
    first, second = batch if name != "vectors" else (batch[0], batch[0])
    w = {"a": torch.randn(*first, size, size, device=device) + 3 * torch.eye(size, device=device)}
    w["b"] = torch.randn(*second, size, columns, device=device)
    direction = {key: torch.randn_like(value) for key, value in w.items()}
    x = 1 + torch.rand(n, 1, device=device)

    def by(op):
        def of(w, x):
            a, b = w["a"] * (1 if varied == "the sides" else x), w["b"] * (1 if varied == "the matrix" else x)
            return op(a, b).sin().sum()

        def fn(w, x):
            _, tangent = torch.func.jvp(lambda w: of(w, x), (w,), (direction,))
            slope = torch.func.grad(of)(w, x)
            return tangent.sin() + sum((slope[key] * direction[key]).sum() for key in w) + of(w, x)

        return fn

    op, elementary = SOLVED[name]
    assert_trees_close(psg.per_sample_grad(by(op), method=method)(w, x), loop_grad(by(elementary))(w, x), atol=1e-9)


def real_of(z):
    """A real number that depends on all parts of all entries."""
    return z.sum() if not z.is_complex() else (z * (1 - 2j)).sum().real


def gradients_of_one(w, direction, of):
    return real_of(of(w))


def tangents_of_one(w, direction, of):
    return real_of(torch.func.jvp(of, (w,), (direction,))[1])


def second_tangents_of_one(w, direction, of):
    return real_of(torch.func.jvp(lambda w: torch.func.jvp(of, (w,), (direction,))[1], (w,), (direction.flip(0),))[1])


def slopes_of_one(w, direction, of):
    return real_of(torch.func.grad(lambda w: real_of(of(w)))(w) * direction) + real_of(of(w))


def recorded_slopes_of_one(w, direction, of):
    w = w + torch.zeros_like(w).requires_grad_()
    return real_of(torch.autograd.grad(real_of(of(w)), w, create_graph=True)[0] * direction) + real_of(of(w))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((gradients_of_one, method) for method in ("auto", "vmap", "loop")),
        *((tangents_of_one, method) for method in ("auto", "vmap", "loop")),
        *((second_tangents_of_one, method) for method in ("auto", "vmap", "loop")),
        *((slopes_of_one, method) for method in ("auto", "vmap", "loop")),
        *((recorded_slopes_of_one, method) for method in ("auto", "loop")),
    ],
)
@given(
    shape=st.integers(0, 5).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size))),
    exact=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
    n=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_determinants_of_singular_matrices(kind, method, shape, exact, dtype, n, seed, device):
    """By rounding alone, and exactly: torch's own gradient is zero then."""
    torch.manual_seed(seed)
    size, rank = shape
    w = torch.randn(size, rank, dtype=dtype, device=device) @ torch.randn(rank, size, dtype=dtype, device=device)
    if exact:
        w[rank:] = 0
        w = w[torch.randperm(size, device=device)]
    direction, x = torch.randn_like(w), 1 + torch.rand(n, 1, device=device)

    def by(op):
        return lambda w, x: kind(w * x, direction, op)

    assert_trees_close(psg.per_sample_grad(by(torch.linalg.det), method=method)(w, x), loop_grad(by(expanded))(w, x), atol=1e-10)


@pytest.mark.parametrize("method", ["auto", "vmap", "loop", "batch"])
@given(size=st.integers(2, 5), shared=st.booleans(), n=st.sampled_from([0, 1, 3]), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_determinants_of_integers(method, size, shared, n, seed, device):
    """Whose pivots can be zero anywhere; of one matrix too, which all samples share."""
    torch.manual_seed(seed)
    w, x = torch.randint(-1, 2, (size, size), device=device).double(), 1 + torch.rand(n, 1, 1, device=device)
    fn = lambda op: lambda w, x: op(w).sin() * x.sum() if shared else op(w * x).sin().sum()  # noqa: E731
    det = torch.linalg.det
    if method == "batch":
        rows = (lambda w, x: det(w).sin() * x.sum((1, 2))) if shared else (lambda w, x: det(w * x).sin())
        found = psg.per_sample_grad(rows, method="batch")(w, x)
    else:
        found = psg.per_sample_grad(fn(det), method=method)(w, x)
    assert_trees_close(found, loop_grad(fn(expanded))(w, x), atol=1e-11)


def sine_series(x):
    """sin(pi x) / (pi x), where x is small."""
    square, series = (torch.pi * x).square(), 1
    for k in range(60, 0, -2):
        series = 1 - series * square / (k * (k + 1))
    return series


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((slopes_of_one, method) for method in ("auto", "vmap", "loop")),
        *((recorded_slopes_of_one, method) for method in ("auto", "loop")),
        *((second_tangents_of_one, method) for method in ("auto", "vmap", "loop")),
    ],
)
@given(
    entries=st.lists(st.sampled_from([0.0, -0.0, 1e-9, -1e-8, 1e-5, 0.1, 0.159, -0.16, 0.7, 1.0, -1.5]), max_size=3),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
    n=st.sampled_from([0, 1, 3]),
)
@settings(max_examples=20)
def test_sinc_near_zero(kind, method, entries, dtype, n, device):
    w, x = torch.tensor(entries, dtype=dtype, device=device), 0.5 + torch.rand(n, 1, device=device)

    def by(op):
        return lambda w, x: kind(w * x, torch.ones_like(w), op)

    # Half of the digits: torch's first derivative next to zero has no more.
    assert_trees_close(psg.per_sample_grad(by(torch.sinc), method=method)(w, x), loop_grad(by(sine_series))(w, x), atol=1e-7)


def test_penalties_on_norms_through_sinc(device):
    def penalty(op, method):
        w = torch.tensor([0.0, 0.3], device=device, requires_grad=True)
        norms = psg.per_sample_norm(lambda w, x: (op(w * x) + w).square().sum(), method=method)(w, x)
        return torch.autograd.grad(norms.sum(), w)

    x = torch.rand(3, 2, device=device)
    for method in ("auto", "vmap", "loop"):
        assert_trees_close(penalty(torch.sinc, method), penalty(sine_series, "loop"))


def test_vectors_that_solve_refuses_are_refused_in_transforms(device):
    fn = lambda w, x: torch.func.grad(lambda w: torch.linalg.solve(w, x, left=False).sum())(w).sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="Incompatible shapes of A and B"):
        psg.per_sample_grad(fn, method="loop")(torch.eye(3, device=device), torch.ones(2, 3, device=device))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("watched", [False, True])
def test_second_derivatives_of_a_bias_alone(method, watched, device):
    """Whose derivative torch leaves out where there is no weight; also below a mode of the caller's, where no op can be written out."""

    def fn(w, x):
        return torch.autograd.grad(F.layer_norm(x, (3,), None, w).sin().sum(), w, create_graph=True)[0].square().sum()

    def written_out(w, x):
        return torch.autograd.grad((standardized(x, -1) + w).sin().sum(), w, create_graph=True)[0].square().sum()

    w, x = torch.randn(3, device=device), torch.randn(N, 2, 3, device=device)
    with Unchanged() if watched else contextlib.nullcontext():
        if watched and method == "vmap":
            with pytest.raises(psg.PsgError, match="layer_norm has to be written out as other ops inside of transforms"):
                psg.per_sample_grad(fn, method=method)(w, x)
            return
        found = psg.per_sample_grad(fn, method=method)(w, x)
    assert_trees_close(found, loop_grad(written_out)(w, x))


class Unchanged(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_repeated_loop_draws_the_same_numbers(pair, wide_setting):
    make, elementary = pair

    def noisy(fn):
        return lambda p, x: laplacian(lambda p, x: fn(p, x + torch.rand_like(x)))(p, x)

    results = []
    for function in (psg.per_sample_grad(noisy(make()), method="loop"), loop_grad(noisy(make())), loop_grad(noisy(elementary))):
        torch.manual_seed(1)
        results.append((function(*wide_setting), torch.rand(1)))
    assert_trees_close(results[0], results[2])
    assert_trees_close(results[1], results[2])


def test_checkpointed_misderived_ops_run_as_they_are(pair, wide_setting):
    """The checkpoint may run again when the call has ended: it must not find other ops than in its forward pass."""
    make, _ = pair

    def checkpointed(p, x):
        return checkpoint(make(), p, x, use_reentrant=False)

    def by_torch(p, x):
        p = {name: value.clone().requires_grad_() for name, value in p.items()}
        norms = [torch.stack([g.square().sum() for g in slopes]).sum().sqrt() for slopes in (slopes_of(p, own) for own in x)]
        return torch.autograd.grad(torch.stack(norms).sin().sum(), list(p.values()))

    def slopes_of(p, own):
        return torch.autograd.grad(make()(p, own), list(p.values()), create_graph=True)

    params, x = wide_setting
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    psg.per_sample_norm(checkpointed, method="loop")(leaves, x).sin().sum().backward()
    assert_trees_close([leaf.grad for leaf in leaves.values()], list(by_torch(params, x)), per_sample=False)


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("kind", [gradients_of_one, tangents_of_one])
def test_determinants_under_autocast(kind, method, device):
    """Which leaves them as they are, and so must leave their parts."""
    w, x = torch.randn(5, 5, dtype=torch.float32, device=device), 1 + torch.rand(3, 1, 1, dtype=torch.float32, device=device)
    fn = lambda w, x: kind(w * x, torch.ones_like(w), torch.linalg.det)  # noqa: E731
    expected = psg.per_sample_grad(fn, method=method)(w, x)
    with torch.autocast(device.type, torch.bfloat16):
        assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x), expected)


def test_gradients_of_checkpointed_determinants(device):
    """In the loop, too, which runs them again as in the forward pass."""
    w, x = torch.tensor([[1.0, -1, 2], [1, -1, 3], [0, 0, 0]], device=device), 1 + torch.rand(2, 1, 1, device=device)
    w = torch.block_diag(w, torch.eye(2, device=device))

    def fn(op):
        return lambda w, x: checkpoint(lambda w: op(w * x).exp(), w, use_reentrant=False)

    for method in ("auto", "loop"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", psg.FallbackWarning)
            found = psg.per_sample_grad(fn(torch.linalg.det), method=method)(w, x)
        assert_trees_close(found, loop_grad(fn(expanded))(w, x), atol=1e-11)
    assert_trees_close(loop_grad(fn(torch.linalg.det))(w, x), loop_grad(fn(expanded))(w, x), atol=1e-11)


class Swish(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([0.3, -0.5]))

    def forward(self, x):
        a = x * self.w
        return (a * torch.sigmoid(a)).sum(-1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_of_scripted_modules_are_differentiated_in_a_loop():
    """Transforms see nothing of the graph that TorchScript differentiates itself, and would take its derivative for zero."""
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

    def penalties(module, method="auto"):
        loss, params = psg.stateless(module, lambda output: output.sum())
        return lambda w: psg.per_sample_norm(loss, method=method)({"w": w}, x).square().sum() + params["w"].sum()

    w = Swish().w.detach().requires_grad_()
    (expected,) = torch.autograd.grad(penalties(Swish(), "loop")(w), w)
    scripted = torch.jit.script(Swish())
    for _ in range(3):  # TorchScript optimises the second or third call
        scripted(x).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # before it optimises, the fast rungs are right
            (found,) = torch.autograd.grad(penalties(scripted)(w), w)
        assert_trees_close(found, expected, per_sample=False)
    with pytest.raises(psg.PsgError, match=r"use the function before scripting"):
        torch.func.grad(penalties(scripted))(w.detach())


_NORMS = {
    "torch.layer_norm": lambda x, w: torch.layer_norm(x.mT, [6], w, w, 1e-5, cudnn_enable=False),
    "torch.instance_norm": lambda x, w: torch.instance_norm(x, w, w, None, None, True, 0.1, 1e-5, False),
    "torch.batch_norm": lambda x, w: torch.batch_norm(x, w, w, None, None, True, 0.1, 1e-5, False),
    "torch.native_layer_norm": lambda x, w: torch.native_layer_norm(x.mT, [6], w, w, 1e-5)[0],
    "torch.native_batch_norm": lambda x, w: torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)[0],
    "aten.layer_norm": lambda x, w: torch.ops.aten.layer_norm.default(x.mT, [6], w, w),
    "aten.instance_norm": lambda x, w: torch.ops.aten.instance_norm.default(x, w, w, None, None, True, 0.1, 1e-5, False),
    "aten.batch_norm": lambda x, w: torch.ops.aten.batch_norm.default(x, w, w, None, None, True, 0.1, 1e-5, False),
    "aten.native_layer_norm": lambda x, w: torch.ops.aten.native_layer_norm.default(x.mT, [6], w, w, 1e-5)[0],
    "aten without statistics": lambda x, w: torch.ops.aten._native_batch_norm_legit.no_stats(x, w, w, True, 0.1, 1e-5)[0],
}


@pytest.mark.parametrize("name", _NORMS)
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_norms_under_all_names_have_right_higher_derivatives(name, method, device):
    """As exported programs have them. Against the norm written out: torch's own third derivatives are wrong, and vmap's second ones."""
    w, x = torch.rand(6, device=device) + 0.5, torch.randn(2, 2, 6, 3, device=device)
    last = "layer" in name

    def written_out(x, w):
        x = x.mT if last else x
        dims, shape = ((-1,), (6,)) if last else ((2,), (6, 1)) if "instance" in name else ((0, 2), (6, 1))
        centred = x - x.mean(dims, keepdim=True)
        return centred * (centred.square().mean(dims, keepdim=True) + 1e-5).rsqrt() * w.view(shape) + w.view(shape)

    def third(norm, **options):
        def fn(w, x):
            slope = torch.func.grad(lambda x: (norm(x, w) ** 3).sum())(x)
            return slope.square().sum() / 100

        z = x.clone().requires_grad_()
        norms = psg.per_sample_norm(fn, **options)(w, z)
        return norms.detach(), torch.autograd.grad(norms.sum(), z)[0]

    assert_trees_close(third(_NORMS[name], method=method), third(written_out, method="loop"))
