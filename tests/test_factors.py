"""Every factor, every operation and every pair of kinds against the tensors that they stand for."""

import contextlib
import itertools
import random
from unittest import mock

import optree
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as torch_pytree
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental import proxy_tensor
from tracing import one_mode

import psg
from psg._torch import _functorch
from psg._torch._patches import assigned
from psg.factors import (
    Conv,
    Dense,
    Entries,
    Expanded,
    Factor,
    Geometry,
    Outer,
    Region,
    Routed,
    Rows,
    Scaled,
    Segments,
    Sum,
    Views,
    _base,
    _division,
    _einsum,
    _maps,
    _products,
    _segments,
    merge,
)
from psg.factors._arithmetic import WIDENING
from psg.factors._sketch import Sketch
from psg.testing import (
    assert_trees_close,
    loop_grad,
    reference_dot,
    reference_gram,
    reference_norm,
    reference_weighted_sum,
)

NAMESPACE = "psg"


def randn(*shape, generator):
    return torch.randn(shape, generator=generator)


# --- one recipe a kind: (n, size, generator) -> (factor of n samples, the tensor that it stands for) ------------
# All matrix kinds of one `size` have the same shape, so that any two can be multiplied. `size` also decides the plan: with few
# positions and wide matrices psg multiplies positions, with many positions it materialises the tensor.

SIZES = {
    "wide": (1, 6, 5),
    "wider": (2, 90, 70),
    "square": (4, 4, 3),
    "long": (40, 2, 3),
    "one column": (3, 4, 1),
    "no positions": (0, 3, 2),
}


def dense(n, size, generator):
    _, a, b = SIZES[size]
    values = randn(n, a, b, generator=generator)
    return Dense(values), values


def outer(n, size, generator):
    t, a, b = SIZES[size]
    left, right = randn(n, t, a, generator=generator), randn(n, t, b, generator=generator)
    return Outer(left, right), torch.einsum("nta,ntb->nab", left, right)


def rows(n, size, generator):
    t, a, b = SIZES[size]
    index = torch.randint(a, (n, t), generator=generator)
    cotangent = randn(n, t, b, generator=generator)
    return Rows(index, cotangent, a), torch.einsum("nta,ntb->nab", F.one_hot(index, a).to(cotangent.dtype), cotangent)


def views(n, size, generator):
    """A view of the first rows, and a transposed view of the others."""
    t, a, b = SIZES[size]
    left, right = randn(n, t, a // 2, generator=generator), randn(n, t, b, generator=generator)
    below = randn(n, b, a - a // 2, generator=generator)
    regions = [Region((a // 2, b), (b, 1), 0), Region((b, a - a // 2), (1, b), a // 2 * b)]
    factor = Views([Outer(left, right), Dense(below)], regions, torch.Size((a, b)))
    return factor, torch.cat([torch.einsum("nta,ntb->nab", left, right), below.mT], 1)


def reshaped(n, size, generator):
    """An Outer of shape [b, a], reshaped to [a, b]."""
    t, a, b = SIZES[size]
    left, right = randn(n, t, b, generator=generator), randn(n, t, a, generator=generator)
    factor = Views([Outer(left, right)], [Region((b, a), (a, 1), 0)], torch.Size((a, b)))
    return factor, torch.einsum("nta,ntb->nab", left, right).reshape(n, a, b)


def expanded(*small):
    """One number for several entries; small[k] = 0 stands for the full size of dimension k."""

    def recipe(n, size, generator):
        shape = SIZES[size][1:]
        values = randn(n, *(own or whole for own, whole in zip(small, shape, strict=True)), generator=generator)
        return Expanded(values, torch.Size(shape)), values.expand(n, *shape)

    return recipe


def scaled(kind, apart=False, one=False):
    """Scaled by entries that all samples share; or, with `apart`, by entries of each sample's own; or, with `one`, all by one number."""

    def recipe(n, size, generator):
        factor, tensor = kind(n, size, generator)
        shape = (1, 1) if one else SIZES[size][1:]
        entries = randn(n if apart else 1, *shape, generator=generator)
        return Scaled(factor, entries), tensor * entries

    return recipe


def entries(kind, apart=False):
    """Entries of a matrix, some of them twice; or, with `apart`, other ones of each sample."""

    def recipe(n, size, generator):
        factor, tensor = kind(n, size, generator)
        _, a, b = SIZES[size]
        places = torch.randint(a * b, (n if apart else 1, 7), generator=generator).expand(n, 7)
        return Entries(factor, places), tensor.reshape(n, a * b).gather(1, places)

    return recipe


def sum_of(*kinds):
    def recipe(n, size, generator):
        made = [kind(n, size, generator) for kind in kinds]
        _, a, b = SIZES[size]
        like = torch.zeros(n, 0)
        total = sum((tensor for _, tensor in made), torch.zeros(n, a, b))
        return Sum([factor for factor, _ in made], like, torch.Size((a, b))), total

    return recipe


def segments(kind):
    """Sums over segments of 3, 1, 0 and 11 samples, drawn at random."""

    def recipe(n, size, generator):
        sizes = torch.tensor([3, 1, 0, 11])[torch.randint(4, (n,), generator=generator)]
        factor, tensor = kind(int(sizes.sum()), size, generator)
        return Segments(factor, sizes), torch.stack([*map(lambda own: own.sum(0), tensor.split(sizes.tolist())), tensor[:0].sum(0)])[:n]

    return recipe


MATRICES = {
    "Dense": dense,
    "Outer": outer,
    "Rows": rows,
    "Views": views,
    "Views in another shape": reshaped,
    "Sum of nothing": sum_of(),
    "Sum of Views": sum_of(views, reshaped, dense),
    "Sum of Rows and Outer": sum_of(rows, outer),
    "Sum of all": sum_of(rows, dense, outer, rows),
    "Sum of a Sum": sum_of(sum_of(rows, rows), outer),
}
ENTRY_BY_ENTRY = {
    "Expanded rows": expanded(0, 1),
    "Expanded columns": expanded(1, 0),
    "Expanded number": expanded(1, 1),
    "Scaled rows": scaled(expanded(0, 1)),
    "Scaled number": scaled(expanded(1, 1)),
    "Scaled Outer": scaled(outer),
    "Scaled Outer, by one number": scaled(outer, one=True),
    "Scaled Rows": scaled(rows),
    "Scaled Views": scaled(reshaped),
    "Scaled apart": scaled(outer, apart=True),
    "Sum of scaled products": sum_of(outer, scaled(outer), scaled(outer)),
    "Sum of scaled ones": sum_of(outer, scaled(expanded(0, 1)), expanded(1, 1), scaled(rows)),
}
SEGMENTS = {
    "Segments of Dense": segments(dense),
    "Segments of Outer": segments(outer),
    "Segments of Rows": segments(rows),
    "Segments of Sum": segments(sum_of(rows, outer)),
    "Segments of Scaled": segments(scaled(outer, apart=True)),
    "Segments of Segments": segments(segments(outer)),
    "Sum of Segments": sum_of(segments(outer), segments(rows), outer),
}
PARTNERS = ["Dense", "Outer", "Rows", "Views in another shape", "Scaled rows"]  # other pairs meet in the tests with drawn shapes

# (images, in, out, groups, input shape, kernel, stride, padding, dilation); some favour the product over positions.
CONVS = {
    "1-D": (1, 3, 4, 1, (8,), (3,), (1,), (0,), (1,)),
    "1-D dilated": (2, 2, 2, 1, (9,), (3,), (2,), (1,), (3,)),
    "2-D": (1, 3, 2, 1, (5, 6), (3, 2), (1, 2), (1, 0), (1, 1)),
    "2-D grouped": (2, 4, 6, 2, (5, 5), (3, 3), (2, 2), (1, 1), (1, 1)),
    "2-D depthwise": (1, 3, 6, 3, (5, 5), (3, 3), (1, 1), (1, 1), (1, 2)),
    "3-D": (1, 2, 2, 2, (3, 4, 3), (2, 2, 2), (1, 1, 1), (0, 1, 0), (1, 1, 1)),
    "few positions": (1, 36, 40, 1, (4, 4), (3, 3), (1, 1), (0, 0), (1, 1)),
    "few positions, grouped": (1, 16, 24, 2, (4, 4), (3, 3), (1, 1), (0, 0), (1, 1)),
    "one position": (1, 8, 6, 1, (3, 3), (3, 3), (1, 1), (0, 0), (1, 1)),
    "few positions, strided": (2, 20, 24, 1, (5, 4), (3, 3), (3, 2), (1, 1), (1, 1)),
    "one position, padded": (1, 8, 6, 1, (1, 2), (3, 3), (1, 2), (1, 1), (1, 1)),
    "many channels": (2, 17, 3, 1, (5, 4), (3, 2), (2, 1), (1, 1), (1, 2)),
    "many channels, grouped": (1, 32, 4, 2, (4, 5), (2, 3), (1, 2), (1, 0), (2, 1)),
    "many channels, 1-D": (1, 16, 2, 1, (9,), (3,), (2,), (1,), (3,)),
    "depthwise": (1, 3, 3, 3, (9, 8), (5, 2), (1, 1), (2, 0), (1, 1)),
    "depthwise, strided": (1, 3, 3, 3, (9, 8), (2, 3), (3, 2), (1, 2), (1, 1)),
    "depthwise, dilated": (1, 2, 2, 2, (9, 8), (2, 3), (2, 1), (0, 1), (3, 2)),
    "depthwise, one position": (1, 3, 3, 3, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "grouped, one position": (1, 34, 4, 2, (3, 3), (2, 3), (1, 1), (0, 0), (1, 1)),
    "depthwise, 3-D": (1, 2, 2, 2, (5, 4, 6), (2, 1, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2)),
    "many positions": (1, 2, 3, 1, (14, 13), (3, 2), (1, 1), (1, 1), (1, 1)),
}


def conv(n, size, generator):
    images, i, o, groups, spatial, kernel, stride, padding, dilation = CONVS[size]
    op = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(spatial)]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    input = randn(n, images, i, *spatial, generator=generator)
    weight = torch.zeros(o, i // groups, *kernel)
    out = op(torch.zeros(1, i, *spatial), weight, **options).shape[1:]
    cotangent = randn(n, images, *out, generator=generator)
    tensor = loop_grad(lambda w, x, c: (op(x, w, **options) * c).sum())(weight, input, cotangent)
    return Conv(cotangent, input, Geometry(kernel, stride, padding, dilation, groups)), tensor


def routed(n, size, generator):
    """Rows of four matrices, of which the last has none."""
    t, a, b = SIZES[size]
    index = torch.randint(3, (n, t), generator=generator)
    left, right = randn(n, t, a, generator=generator), randn(n, t, b, generator=generator)
    return Routed(index, left, right, 4), torch.einsum("ntg,nta,ntb->ngab", F.one_hot(index, 4).to(left.dtype), left, right)


def vector(n, size, generator):
    values = randn(n, 7, generator=generator)
    return Dense(values), values


def scalar(n, size, generator):
    values = randn(n, generator=generator)
    return Dense(values), values


ALL = {**MATRICES, **ENTRY_BY_ENTRY, **SEGMENTS}
MATRIX_ROWS = [(kind, size, recipe) for kind, recipe in ALL.items() for size in SIZES]
CONV_ROWS = [(kind, size, recipe) for kind, recipe in (("Conv", conv), ("Segments", segments(conv))) for size in CONVS]
ROUTED_ROWS = [(kind, size, recipe) for kind, recipe in (("Routed", routed), ("Segments", segments(routed))) for size in SIZES]
READ = {
    **{f"Entries of {kind}": entries(MATRICES[kind]) for kind in ("Dense", "Outer", "Rows", "Views", "Sum of Rows and Outer")},
    "Entries of products": entries(sum_of(outer, scaled(outer))),
    "Entries apart": entries(outer, apart=True),
    "Segments of Entries": segments(entries(outer)),
}
READ_ROWS = [(kind, size, recipe) for kind, recipe in READ.items() for size in SIZES]
ROWS = [*MATRIX_ROWS, *CONV_ROWS, *ROUTED_ROWS, *READ_ROWS, ("Dense", "vector", vector), ("Dense", "scalar", scalar)]
each_matrix, each_factor = (
    pytest.mark.parametrize("kind, size, recipe", rows, ids=[f"{kind}, {size}" for kind, size, _ in rows]) for rows in (MATRIX_ROWS, ROWS)
)
each_count = pytest.mark.parametrize("n", [0, 1, 3])


def sketch_matrix(shape, dim, draw):
    """The matrix of a sketch, [P, dim]: the bucket and the sign of every entry, from polynomials in Python integers."""
    polynomials = [[draw.randrange(2**31 - 1) for _ in range(4)] for _ in range(4)]

    def values(k, count, modulus):
        a, b, c, d = polynomials[k]
        return torch.tensor([(a * x**3 + b * x**2 + c * x + d) % (2**31 - 1) % modulus for x in range(count)])

    rows, columns = shape[0] if len(shape) else 1, shape[1:].numel()
    buckets = (values(0, rows, dim)[:, None] + values(2, columns, dim)) % dim
    signs = (-1) ** (values(1, rows, 2)[:, None] + values(3, columns, 2))
    return F.one_hot(buckets.flatten(), dim) * signs.reshape(-1, 1).to(torch.get_default_dtype())


def make_fx(function):
    def trace(*args):
        with one_mode():
            return proxy_tensor.make_fx(function)(*args)

    return trace


@pytest.fixture
def make(device):
    generator = torch.Generator().manual_seed(0)

    def make(recipe, n, size):
        factor, tensor = recipe(n, size, generator)
        return factor.map(to_device), tensor.to(device)

    def to_device(part):
        is_shared = len(part) > 1 and part.stride(0) == 0  # by the samples, which a copy to another device would forget
        return part[:1].to(device).expand(part.shape) if is_shared else part.to(device)

    return make


def spoil(factor, at):
    """Put NaN into the samples that a mask selects."""
    if isinstance(factor, Segments):
        return Segments(spoil(factor.factor, at[factor.ids]), factor.sizes)
    return factor._each(
        lambda part: part.masked_fill(at.reshape(-1, *[1] * (part.dim() - 1)), float("nan")) if part.is_floating_point() else part,
        lambda own: spoil(own, at),
    )


@given(
    n=st.sampled_from([0, 1, 3]),
    sizes=st.tuples(*[st.integers(1, 6)] * 3),
    by_columns=st.booleans(),
)
def test_products_of_gradients_are_laid_out_as_these(n, sizes, by_columns, device):
    """Rows that follow one another in memory are multiplied at once: a product for each sample takes up to twenty times as long."""
    rows, columns, made = sizes
    values = torch.randn(n, columns, rows, device=device).mT if by_columns else torch.randn(n, rows, columns, device=device)
    left, right = torch.randn(rows, made, device=device), torch.randn(columns, made, device=device)
    found = _maps.premultiplied(Dense(values), left), _maps.postmultiplied(Dense(values), right)
    for factor, expected in zip(found, (left.T @ values, values @ right), strict=True):
        assert_trees_close(factor.materialize(), expected)
    for factor, is_alike in zip(found, (by_columns, not by_columns), strict=True):
        if is_alike and isinstance(factor, Dense):
            assert (factor.values.mT if by_columns else factor.values).is_contiguous()


@each_count
@each_matrix
def test_linear_maps(kind, size, recipe, n, make):
    """Each map gives the right factor, or None where the gradient has to be materialised."""
    factor, tensor = make(recipe, n, size)
    a, b = factor.shape
    weights, matrix, other = (torch.randn(shape).to(tensor) for shape in ((a, b), (a, 3), (b, 2)))
    index, target = torch.randint(5, (a,), device=tensor.device), torch.randint(a, (6,), device=tensor.device)
    columns, entries = torch.randint(4, (b,), device=tensor.device), torch.randint(2, (a * b,), device=tensor.device)
    in_a_row = _maps.reshaped(factor, torch.Size((a * b, 1)))
    maps = {
        "scaled by a number": (_maps.scaled(factor, 2.0), 2 * tensor),
        "transposed": (_maps.transposed(factor), tensor.mT),
        "premultiplied": (_maps.premultiplied(factor, matrix), matrix.T @ tensor),
        "premultiplied by one column": (_maps.premultiplied(factor, matrix[:, :1]), matrix[:, :1].T @ tensor),
        "premultiplied by many": (_maps.premultiplied(factor, matrix.repeat(1, 40)), matrix.repeat(1, 40).T @ tensor),
        "postmultiplied": (_maps.postmultiplied(factor, other), tensor @ other),
        "scattered": (_maps.scattered(factor, index, 5), tensor.new_zeros(n, 5, b).index_add(1, index, tensor)),
        "columns scattered": (_maps.scattered_columns(factor, columns, 4), tensor.new_zeros(n, a, 4).index_add(2, columns, tensor)),
        "entries added up": (
            _maps.scattered(in_a_row, entries, 2),
            tensor.new_zeros(n, 2, 1).index_add(1, entries, tensor.reshape(n, a * b, 1)),
        ),
        "entries among others": (
            _maps.scattered(in_a_row, 7 * entries, a * b + 7),
            tensor.new_zeros(n, a * b + 7, 1).index_add(1, 7 * entries, tensor.reshape(n, a * b, 1)),
        ),
        "gathered": (_maps.gathered(factor, target), tensor[:, target]),
        "in a row": (_maps.reshaped(factor, torch.Size((a * b,))), tensor.reshape(n, a * b)),
        "its first rows": (_maps.narrowed(factor, 0, 0, a - 1), tensor[:, :-1]),
        "its last rows": (_maps.narrowed(factor, 0, 1, a - 1), tensor[:, 1:]),
        "its last column": (_maps.narrowed(factor, 1, b - 1, 1), tensor[:, :, -1:]),
    }
    for shape in ((), (a, 1), (b,), (a, b)):
        own = torch.randn(shape).to(tensor)
        maps[f"scaled by {shape}"] = _maps.scaled(factor, own), own * tensor
        total = _maps.contracted(factor, weights, torch.Size(shape))
        found = None if total is None else Dense(total)
        maps[f"contracted to {shape}"] = found, (weights * tensor).sum_to_size(n, *(1,) * (2 - len(shape)), *shape).reshape(n, *shape)
        maps[f"added up to {shape}"] = _maps.added_up(factor, weights, torch.Size(shape)), maps[f"contracted to {shape}"][1]
    for name, (found, expected) in maps.items():
        if found is not None:
            assert_trees_close(found.materialize(), expected, atol=1e-9, name=name)


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    kept=st.tuples(*[st.booleans()] * 3),
    dims=st.integers(1, 2),
    n=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_linear_maps_of_a_matrix_viewed_with_three_dimensions(shape, kept, dims, n, seed):
    torch.manual_seed(seed)
    shape, small = torch.Size(shape), torch.Size(size if keep else 1 for size, keep in zip(shape, kept, strict=True))
    rows, columns = shape[:dims].numel(), shape[dims:].numel()
    factor, own, weights = (
        _maps.reshaped(Outer(torch.randn(n, 2, rows), torch.randn(n, 2, columns)), shape),
        torch.randn(small),
        torch.randn(shape),
    )
    total, scaled = _maps.contracted(factor, weights, small), _maps.scaled(factor, own)
    if total is not None:
        assert_trees_close(total, (weights * factor.materialize()).sum_to_size(n, *small), atol=1e-9)
    if scaled is not None:
        assert_trees_close(scaled.materialize(), own * factor.materialize(), atol=1e-9)


@given(
    equation=st.sampled_from(
        [
            *("xy,pq->xpyq", "pq,xy->xpyq", "aib,bkl->aikl", "bij,bkl->ikjl", "r,ar,br->ab", "ij,ai,bj->ab", "kij,jkl->ikjl", "e,eoi->oi"),
            *(
                "ab,bc,cd->ad",
                "ab,c->ac",
                "ab->ba",
                "abc->ac",
                "ab,ab->ab",
                "a,b->ab",
                "a,ab->ab",
                "ab,cb->c",
                "a,bc->abc",
                "ib,bjc,ck->ijk",
            ),
            *("ab,a->b", "kai,kbi->kab", "ac,bd,e->abcd"),
        ]
    ),
    sizes=st.lists(st.integers(1, 3), min_size=17, max_size=17),
    n=st.integers(0, 3),
    positions=st.sampled_from([0, 1, 2, 9]),
    first=st.integers(0, 4),
    kind=st.sampled_from(["Dense", "Outer", "Rows"]),
    seed=st.integers(0, 99),
)
def test_operands_of_an_einsum(equation, sizes, n, positions, first, kind, seed, device):
    torch.manual_seed(seed)
    inputs, output = equation.split("->")
    size = {label: sizes["abcdeijklopqrxy".index(label)] for label in equation if label.isalpha()}
    shape = torch.Size([size[label] for label in output])
    tensors = [torch.randn([size[label] for label in labels], device=device) for labels in inputs.split(",")]
    if kind == "Dense":
        factor = Dense(torch.randn(n, *shape, device=device))
    elif kind == "Outer":
        k = min(first, len(shape))
        left, right = (torch.randn(n, positions, own.numel(), device=device) for own in (shape[:k], shape[k:]))
        factor = _maps.reshaped(Outer(left, right), shape)
    else:
        index, rows = torch.randint(shape[0], (n, positions), device=device), torch.randn(n, positions, shape[1:].numel(), device=device)
        factor = _maps.reshaped(Rows(index, rows, shape[0]), shape)
    labels = inputs.split(",")
    for k, own in enumerate(labels):
        others = [(other, tensor) for i, (other, tensor) in enumerate(zip(labels, tensors, strict=True)) if i != k]
        found = _einsum.of_operand(factor, output, others, own, tensors[k].shape)
        assert found is not None or kind != "Dense"
        if found is None:
            continue

        def product(tensor, k=k):
            return torch.einsum(equation, *tensors[:k], tensor, *tensors[k + 1 :])

        expected = [torch.func.vjp(product, tensors[k])[1](cotangent)[0] for cotangent in factor.materialize()]
        assert_trees_close(found.materialize(), torch.stack([*expected, tensors[k]])[:-1], atol=1e-9, name=own)


def drawn_factor(kind, n, positions, a, b, device):
    if kind is Dense:
        return Dense(torch.randn(n, a, b, device=device))
    right = torch.randn(n, positions, b, device=device)
    if kind is Rows:
        return Rows(torch.randint(a, (n, positions), device=device), right, a)
    outer = Outer(torch.randn(n, positions, a, device=device), right)
    return Scaled(outer, torch.randn(a, b, device=device).expand(n, a, b)) if kind is Scaled else outer


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@given(
    kind=st.sampled_from([Dense, Outer, Rows, Scaled]),
    layout=st.sampled_from([torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]),
    density=st.sampled_from([0.0, 0.2, 1.0]),
    n=st.integers(0, 3),
    sizes=st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 2, 5, 30])),
    seed=st.integers(0, 99),
)
def test_products_with_constant_matrices(kind, layout, density, n, sizes, seed, device):
    torch.manual_seed(seed)
    positions, a, b, m = sizes
    factor = drawn_factor(kind, n, positions, a, b, device)
    matrix = torch.randn(a, m, device=device) * (torch.rand(a, m, device=device) < density)
    found = _maps.premultiplied(factor, matrix if layout is torch.strided else matrix.to_sparse(layout=layout))
    assert (found is None) == (kind is Scaled and (positions != 1 or n == 0 or m > min(a, b) or layout is not torch.strided))
    if found is not None:
        assert_trees_close(found.materialize(), matrix.T @ factor.materialize(), atol=1e-9)


@given(
    kind=st.sampled_from([Dense, Outer, Rows]),
    n=st.integers(0, 3),
    sizes=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 3)),
    index=st.lists(st.integers(0, 3), max_size=6),
    seed=st.integers(0, 99),
)
def test_rows_that_are_copied_and_added_up(kind, n, sizes, index, seed, device):
    torch.manual_seed(seed)
    positions, a, b = sizes
    index = torch.tensor(index, dtype=torch.int64, device=device)
    added = drawn_factor(kind, n, positions, a, b, device)
    found = _maps.gathered(added, index % a)
    if found is not None:  # of Rows, where the index can be read
        assert_trees_close(found.materialize(), added.materialize()[:, index % a], atol=1e-9)
    if len(index):
        copied = drawn_factor(kind, n, positions, len(index), b, device)
        expected = torch.zeros(n, a, b, device=device).index_add(1, index % a, copied.materialize())
        assert_trees_close(_maps.scattered(copied, index % a, a).materialize(), expected, atol=1e-9)


def test_terms_with_one_index_are_added():
    index, rows = torch.tensor([[0, 2]]), torch.randn(1, 2, 3)
    assert merge([Rows(index, rows, 4), Rows(index, 2 * rows, 4)]).positions == 2
    apart = merge([Rows(index, rows, 4), Rows(index.clone(), 2 * rows, 4)])
    assert apart.positions == 4
    narrow = merge([Rows(index, rows.bfloat16(), 4), Rows(index, rows.bfloat16(), 4)])
    assert narrow.positions == 4  # a sum would be rounded


def test_regions_that_share_no_entry():
    """Disjoint regions are recognised if both are boxes in the parameter's dimensions; otherwise the answer is no."""
    shape, left, right = torch.Size((4, 6)), Region((4, 2), (6, 1), 0), Region((4, 2), (6, 1), 2)
    diagonal, over_the_end, of_two_rows = Region((4,), (7,), 0), Region((3,), (1,), 4), Region((2, 2), (1, 1), 2)
    assert left.is_apart(right, shape) and not left.is_apart(left, shape)
    for joined in (diagonal, over_the_end, of_two_rows):
        assert not joined.is_apart(right, shape) and not right.is_apart(joined, shape)
    assert not Region((0, 6), (6, 1), 0).is_apart(right, torch.Size((0, 6)))
    assert not Region((6, 0), (1, 1), 0).is_apart(right, torch.Size((6, 0)))
    assert Region((1, 0), (1, 1), 0).is_apart(Region((1, 1), (1, 1), 0), torch.Size((1, 1)))


@st.composite
def views_of(draw, shape):
    """A view of a parameter of this shape, by slices and transposes; whether it is a box in the parameter's dimensions; its region."""
    whole = torch.arange(shape.numel()).reshape(shape)
    view, is_box = whole, True
    for dim, size in enumerate(shape):
        start, step = draw(st.integers(0, size - 1)), draw(st.sampled_from([1, 1, 2]))
        stop = draw(st.integers(start + 1, size))
        view = view[(slice(None),) * dim + (slice(start, stop, step),)]
        is_box &= step == 1 or stop - start == 1
    if draw(st.booleans()):
        view = view.movedim(0, -1)
    if draw(st.booleans()) and view.is_contiguous():
        is_box &= sum(size > 1 for size in view.shape) < 2
        view = view.reshape(-1)
    return view, is_box, Region(tuple(view.shape), view.stride(), view.storage_offset())


@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(torch.Size))
def test_regions_are_apart_if_they_share_no_entry(data, shape):
    (one, is_box, region), (other, is_other_box, other_region) = (data.draw(views_of(shape)) for _ in range(2))
    disjoint = not set(one.flatten().tolist()) & set(other.flatten().tolist())
    found = region.is_apart(other_region, shape)
    assert found == other_region.is_apart(region, shape)
    assert disjoint if found else not (disjoint and is_box and is_other_box)


@each_count
@each_factor
class TestOneFactor:
    def test_materialize(self, kind, size, recipe, n, make):
        factor, tensor = make(recipe, n, size)
        assert_trees_close(factor.materialize(), tensor)
        assert (factor.n, factor.shape, factor.dtype, factor.device) == (n, tensor.shape[1:], tensor.dtype, tensor.device)
        factor.materialize().mul_(0)  # no two entries share memory

    def test_squared_norm(self, kind, size, recipe, n, make):
        factor, tensor = make(recipe, n, size)
        assert_trees_close(factor.squared_norm(), reference_norm(tensor).square())

    def test_weighted_sum(self, kind, size, recipe, n, make):
        factor, tensor = make(recipe, n, size)
        weights = torch.linspace(-1, 2, n, device=tensor.device)
        total = factor.weighted_sum(weights)
        assert_trees_close(total, reference_weighted_sum(tensor, weights), per_sample=False)
        total.mul_(0)  # no two entries share memory

    def test_dot(self, kind, size, recipe, n, make):
        factor, tensor = make(recipe, n, size)
        direction = torch.randn(tensor.shape[1:], device=tensor.device)
        assert_trees_close(factor.dot(direction), reference_dot(tensor, direction))

    def test_gram_with_itself(self, kind, size, recipe, n, make):
        factor, tensor = make(recipe, n, size)
        assert_trees_close(factor.gram(), reference_gram(tensor))
        assert_trees_close(factor.inner(factor), reference_norm(tensor).square())

    def test_settle(self, kind, size, recipe, n, make):
        factor, tensor = make(recipe, n, size)
        assert_trees_close(factor.settle().materialize(), tensor)

    def test_zero_of_a_sample_that_is_not_finite(self, kind, size, recipe, n, make):
        factor, tensor = make(recipe, n, size)
        keep = torch.arange(n, device=tensor.device) % 2 == 0
        spoiled = spoil(factor, ~keep)
        expected = torch.where(keep.reshape(-1, *[1] * (tensor.dim() - 1)), tensor, 0)
        assert_trees_close(spoiled.zero(keep).materialize(), expected)
        assert_trees_close(spoiled.zero(keep).weighted_sum(torch.ones(n, device=tensor.device)), expected.sum(0), per_sample=False)

    def test_trees_of_factors_go_through_tree_map(self, kind, size, recipe, n, make):
        factor, tensor = make(recipe, n, size)
        by_optree = optree.tree_map(torch.clone, {"w": factor}, namespace=NAMESPACE)["w"]
        by_torch = torch_pytree.tree_map(torch.clone, {"w": factor})["w"]
        for copy in (by_optree, by_torch):
            assert type(copy) is type(factor)
            assert (copy.n, copy.shape) == (factor.n, factor.shape)
            assert_trees_close(copy.materialize(), tensor)

    def test_repr_says_what_it_stands_for(self, kind, size, recipe, n, make):
        factor, tensor = make(recipe, n, size)
        for part in (kind.split()[0], str(n), str(tuple(tensor.shape[1:]))):
            assert part in repr(factor)


def test_entries_that_are_not_finite(make):
    # All samples share the entries: the norms of kept samples are not finite, the other samples are exactly zero.
    entries = torch.tensor([[1.0, torch.inf], [torch.nan, 2.0]])
    factor, _ = make(
        lambda n, size, generator: (Scaled(Outer(torch.ones(n, 1, 2), torch.ones(n, 1, 2)), entries.expand(n, 2, 2)), entries), 3, ""
    )
    kept = factor.zero(torch.tensor([True, False, True], device=factor.device))
    of_none = factor.regroup(torch.tensor([[0, 3], [3, 3], [1, 2]], device=factor.device))
    for found in (kept, of_none):
        assert torch.equal(found.materialize()[1].cpu(), torch.zeros(2, 2))
        assert found.squared_norm().isfinite().tolist() == [False, True, False]


@each_factor
@pytest.mark.parametrize("index", [[2, 0], [], [1, 1, 1]], ids=str)
def test_take(kind, size, recipe, index, make):
    factor, tensor = make(recipe, 3, size)
    at = torch.tensor(index, dtype=torch.int64, device=tensor.device)
    assert_trees_close(factor.take(at).materialize(), tensor[at])
    assert_trees_close(factor.take(slice(1, None)).materialize(), tensor[1:])
    assert_trees_close(factor.take(torch.tensor([True, False, True], device=tensor.device)).materialize(), tensor[[0, 2]])


@each_count
@each_factor
def test_moment_sums(kind, size, recipe, n, make):
    factor, tensor = make(recipe, n, size)
    assert_trees_close(factor.moment_sums(), (tensor.sum(0), tensor.square().sum(0)), per_sample=False)


@each_count
@each_factor
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_project(kind, size, recipe, n, dim, make):
    factor, tensor = make(recipe, n, size)
    matrix = sketch_matrix(tensor.shape[1:], dim, random.Random(dim)).to(tensor)
    rows = tensor.reshape(n, len(matrix))
    found, expected = factor.project(Sketch(dim, random.Random(dim))), rows @ matrix
    # Entries of one bucket may cancel, even exactly: rounding errors are relative to what the magnitudes of a sample add up to.
    limit = psg.testing.default_rtol(tensor.dtype) * (rows.abs() @ matrix.abs()).norm(dim=1, keepdim=True)
    assert found.shape == expected.shape and ((found - expected).abs() <= limit).all()


@each_count
@each_factor
def test_projections_moments_and_sums_of_groups_a_little_at_a_time(kind, size, recipe, n, make, monkeypatch):
    factor, tensor = make(recipe, n, size)
    sketches = [Sketch(dim, random.Random(dim)) for dim in (5, 64)]
    whole = [factor.project(sketch) for sketch in sketches]
    monkeypatch.setattr(psg._hardware._machine, "chunk_bytes", lambda device: 100)
    monkeypatch.setattr(psg.factors._base, "_LARGE", 1)
    assert_trees_close([factor.project(sketch) for sketch in sketches], whole)
    assert_trees_close(factor.moment_sums(), (tensor.sum(0), tensor.square().sum(0)), per_sample=False)
    ids = torch.arange(n, device=tensor.device) % 2
    assert_trees_close(factor._segments_materialized(_division.Division(ids, 2)).materialize(), summed(tensor, ids, 2))


@each_count
@each_factor
def test_regroup(kind, size, recipe, n, make):
    # Groups of samples are summed; the index n stands for no sample, and a sample may be in several groups.
    factor, tensor = make(recipe, n, size)
    table = torch.tensor([[0, n], [n, n], [max(n - 1, 0), 0]] if n else [[0, 0]], device=tensor.device)
    padded = torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])
    assert_trees_close(factor.regroup(table).materialize(), padded[table].sum(1))


@pytest.mark.parametrize("size", ["few positions", "few positions, strided", "one position", "one position, padded"])
def test_few_positions_of_a_convolution_are_not_materialized(size, make):
    factor, tensor = make(conv, 3, size)
    matrix = sketch_matrix(tensor.shape[1:], 7, random.Random(7)).to(tensor)
    with mock.patch.object(Conv, "materialize", side_effect=AssertionError):
        assert_trees_close(factor.project(Sketch(7, random.Random(7))), tensor.flatten(1) @ matrix)
        if factor.positions == 1:
            assert_trees_close(factor.moment_sums(), (tensor.sum(0), tensor.square().sum(0)), per_sample=False)


@pytest.mark.parametrize("size", ["few positions", "few positions, grouped"])
def test_a_convolution_with_itself_is_unfolded_once(size, make):
    factor, tensor = make(conv, 3, size)
    with mock.patch.object(Conv, "_windows", autospec=True, side_effect=Conv._windows) as windows:
        assert_trees_close(factor.gram(), reference_gram(tensor))
        assert_trees_close(factor.inner(factor), reference_norm(tensor).square())
        assert windows.call_count == 2
        twin = factor.map(torch.clone)
        assert_trees_close((factor.gram(twin), factor.inner(twin)), (reference_gram(tensor), reference_norm(tensor).square()))
        assert windows.call_count == 6


def summed(tensor, ids, count):
    return torch.stack([*(tensor[ids == k].sum(0) for k in range(count)), tensor[:0].sum(0)])[:count]


@given(
    n=st.integers(0, 12),
    count=st.integers(0, 5),
    t=st.integers(0, 3),
    a=st.integers(1, 4),
    b=st.integers(1, 4),
    kind=st.sampled_from([*ALL, *(f"Conv: {size}" for size in CONVS)]),
    tiny=st.sampled_from([0, _base._TINY]),
    seed=st.integers(0, 2**16),
)
def test_segment_sum_over_drawn_shapes(n, count, t, a, b, kind, tiny, seed):
    generator = torch.Generator().manual_seed(seed)
    n = n if count else 0
    SIZES["drawn"] = (t, a, b)
    try:
        factor, tensor = conv(n, kind[6:], generator) if kind.startswith("Conv") else ALL[kind](n, "drawn", generator)
    finally:
        del SIZES["drawn"]
    ids = torch.randint(max(1, count), (n,), generator=generator)
    ids[: n // 2] = 0  # the first segment has many samples
    with mock.patch.object(_base, "_TINY", tiny):
        found, expected = factor.segment_sum(ids, count), summed(tensor, ids, count)
        joined = psg.factors.concat([found, factor.segment_sum(ids, count)])
    holds_all_operations(found, expected)
    assert_trees_close(found.settle().materialize(), expected, atol=1e-12)
    assert_trees_close(found.norm(), reference_norm(expected), atol=1e-12)
    assert_trees_close(found.moment_sums(), (expected.sum(0), expected.square().sum(0)), per_sample=False, atol=1e-12)
    index = torch.randint(max(1, count), (3 if count else 0,), generator=generator)
    assert_trees_close(found.take(index).materialize(), expected[index], atol=1e-12)
    assert_trees_close(merge([found, found]).squared_norm(), reference_norm(2 * expected).square(), atol=1e-12)
    again = torch.arange(count) // 2
    assert_trees_close(found.segment_sum(again, count).materialize(), summed(expected, again, count), atol=1e-12)
    assert type(joined) is type(found)
    assert_trees_close(joined.materialize(), torch.cat([expected, expected]), atol=1e-12)
    dense, plain = Dense(expected), torch.randn(tensor.shape[1:], generator=generator)
    assert_trees_close(found.inner(dense), dense.inner(dense), atol=1e-12)
    assert_trees_close(found.gram(factor), reference_gram(expected, tensor), atol=1e-12)
    traced = make_fx(lambda factor: (factor.norm(), factor.dot(plain), factor.gram(), factor.settle().weighted_sum(factor.norm())))(found)
    assert_trees_close(
        traced(found), (found.norm(), found.dot(plain), found.gram(), found.weighted_sum(found.norm())), atol=1e-12, per_sample=False
    )


def test_segments_hold_no_more_than_their_samples(device):
    """One segment of a thousand samples, a thousand segments of one: padding all to the largest would take 500 times the memory."""
    factor = Outer(torch.randn(2000, 1, 6, device=device), torch.randn(2000, 1, 5, device=device))
    ids = torch.cat([torch.zeros(1000, dtype=torch.int64, device=device), 1 + torch.arange(1000, device=device)]).flip(0)
    found = factor.segment_sum(ids, 1001)
    assert found.nbytes <= 2 * factor.nbytes
    joined = [own for _, own in found._joined()]
    assert sum(own.nbytes for own in joined) <= 2 * factor.nbytes and len(joined) == 2
    assert_trees_close(found.norm(), reference_norm(summed(factor.materialize(), ids, 1001)))


def test_a_sample_that_is_not_finite_is_its_own_segment_s(make):
    for _, size, recipe in [row for row in ROWS if row[1] in ("square", "2-D grouped")]:
        factor, _ = make(recipe, 6, size)
        ids = torch.tensor([0, 1, 2, 0, 1, 2], device=factor.device)
        spoiled = spoil(factor, torch.arange(6, device=factor.device) == 3)
        found = spoiled.segment_sum(ids, 4)
        if spoiled.materialize()[3].isfinite().all():
            continue  # a Sum without terms
        assert found.norm().isfinite().tolist() == [False, True, True, True]
        keep = torch.tensor([False, True, True, True], device=factor.device)
        kept = found.zero(keep)
        assert kept.norm()[0] == 0 and (kept.materialize()[0] == 0).all()
        assert kept.weighted_sum(kept.norm()).isfinite().all()


def test_segments_of_half_precision(device):
    """In bfloat16 a sum of 512 ones would stop at 256."""
    index, ones = torch.zeros(512, 1, dtype=torch.int64, device=device), torch.ones(512, 1, 1, dtype=torch.bfloat16, device=device)
    found = Rows(index, ones, 3).segment_sum(index[:, 0], 2)
    assert found.norm().tolist() == [512, 0] and found.materialize()[:, 0, 0].tolist() == [512, 0]
    assert found.materialize().dtype == torch.bfloat16 and found.norm().dtype == torch.float32


def test_derivatives_of_segments(device):
    left, right, ids = (
        torch.randn(5, 1, 3, device=device),
        torch.randn(5, 1, 2, device=device),
        torch.tensor([0, 1, 0, 3, 0], device=device),
    )

    def norms(left, right):
        return Outer(left, right).segment_sum(ids, 4).norm()

    assert torch.autograd.gradcheck(norms, [left.requires_grad_(), right.requires_grad_()])
    lefts = torch.stack([left, 2 * left]).detach()
    assert_trees_close(torch.func.vmap(norms, (0, None))(lefts, right.detach()), torch.stack([norms(own, right) for own in lefts]).detach())


class Diagonal(Factor):
    """A user-defined kind that is no sum over positions: gradient[n, i, j] = [i = j] values[n, i]."""

    fields = ("values",)

    def __init__(self, values):
        self.values = values

    shape = property(lambda self: torch.Size([self.values.shape[1]] * 2))
    _lead = property(lambda self: self.values)

    def materialize(self):
        return torch.diag_embed(self.values)

    def squared_norm(self):
        return self.values.square().sum(1)

    squared_terms = squared_norm

    def weighted_sum(self, weights):
        return torch.diag(self.values.T @ weights)

    def dot(self, direction):
        return self.values @ direction.diagonal()


def test_a_kind_of_the_user_s_own(device):
    values, ids = torch.randn(7, 3, device=device), torch.tensor([1, 1, 0, 1, 1, 3, 3], device=device)
    expected = summed(torch.diag_embed(values), ids, 4)
    holds_all_operations(Diagonal(values).segment_sum(ids, 4), expected)
    assert_trees_close(Diagonal(values).segment_sum(ids, 4).norm(), reference_norm(expected))
    table = torch.tensor([[0, 1, 3, 4], [2, 7, 7, 7]], device=device)
    assert_trees_close(Diagonal(values).regroup(table).materialize(), expected[[1, 0]])
    assert Diagonal(torch.ones(4, 3, device=device)).segment_sum(ids[:4] * 0, 1).norm().item() == pytest.approx(48**0.5)


def test_a_kind_of_the_user_s_own_is_a_node_of_trees(device):
    values = torch.randn(3, 4, device=device)
    assert_trees_close(
        psg.tree.concat([Diagonal(values), Diagonal(2 * values)]).materialize(), torch.diag_embed(torch.cat([values, 2 * values]))
    )
    assert_trees_close(optree.tree_map(lambda tensor: 3 * tensor, Diagonal(values)).materialize(), torch.diag_embed(3 * values))


@pytest.mark.parametrize(("positions", "kind"), [(1, Segments), (2, Dense)])
def test_segments_are_materialized_where_gradients_are_smaller_than_factors(positions, kind, device, monkeypatch):
    monkeypatch.setattr(_base, "_TINY", 0)
    factor = Outer(torch.randn(5, positions, 3, device=device), torch.randn(5, positions, 4, device=device))
    assert isinstance(factor.segment_sum(torch.tensor([1, 0, 1, 1, 0], device=device), 2), kind)


def test_terms_that_cancel_are_not_rounded_one_by_one(device):
    # The first term, 3000.5 in each entry, would be rounded to 3000 in float16.
    ones = lambda *shape: torch.ones(shape, dtype=torch.float16, device=device)  # noqa: E731
    first = Outer(torch.cat([3000 * ones(1, 1, 4), 0.5 * ones(1, 1, 4)], dim=1), ones(1, 2, 3))
    total = Sum([first, Outer(-3000 * ones(1, 1, 4), ones(1, 1, 3))], ones(1, 0), torch.Size([4, 3])).weighted_sum(ones(1).float())
    assert_trees_close(total, 0.5 * ones(4, 3).float(), rtol=0, per_sample=False)


@pytest.mark.parametrize("norm", ["gram", "chunks"])
@pytest.mark.parametrize("kind", ["sum", "segments"])
def test_norms_of_terms_that_cancel_are_those_of_what_is_added_up(kind, norm, device):
    """Rounded one by one, these terms in bfloat16 cancel: the norm read zero, and the sample escaped clipping."""
    ones = lambda *shape: torch.ones(shape, dtype=torch.bfloat16, device=device)  # noqa: E731
    if kind == "sum":  # 257 - 256
        first = Outer(torch.cat([256 * ones(1, 1, 4), ones(1, 1, 4)], dim=1), ones(1, 2, 4))
        factor = Sum([first, Outer(-256 * ones(1, 1, 4), ones(1, 1, 4))], ones(1, 0), torch.Size([4, 4]))
    else:  # (1 + 2^-7) 1.25 - (1.25 + 2^-7)
        sides = torch.stack([(1 + 2.0**-7) * ones(1, 4), (1.25 + 2.0**-7) * ones(1, 4)])
        entries = torch.stack([1.25 * ones(4, 4), -ones(4, 4)])
        factor = Segments(Scaled(Outer(sides, ones(2, 1, 4)), entries), torch.tensor([2], device=device))
    exact = factor.to(torch.float64).materialize()
    assert exact.all()
    with psg.plans.using(norm=norm, keep_bytes=0):
        clipped = psg.tree.clip(factor, 2.0**-20)
        for norms in (factor.norm(), clipped.norms):
            assert_norms(norms, exact.flatten(1).norm(dim=1), rtol=1e-5)
        # On devices whose products of 16-bit matrices return float32, one side times its weights is rounded to 16 bits.
        rtol = 2.0**-8 if device.type in WIDENING else None
        assert_trees_close(clipped.grads, (2.0**-20 * exact[0] / clipped.norms).float(), rtol=rtol, per_sample=False)
        assert torch.equal(factor.materialize(), exact.bfloat16())
        assert torch.equal(factor.moment_sums()[0], exact[0].float())


@pytest.mark.parametrize("ids", list(itertools.permutations(range(3))))
def test_segments_of_samples_in_any_order(ids, make, monkeypatch):
    monkeypatch.setattr(_base, "_TINY", 0)
    factor, tensor = make(outer, 3, "wide")
    at = torch.tensor(ids, device=tensor.device)
    found = factor.segment_sum(at, 3)
    assert isinstance(found, Segments)
    assert_trees_close(found.materialize(), summed(tensor, at, 3))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_segments_of_gradients_of_any_strides(order, device):
    back = [order.index(dim) for dim in range(4)]
    values = torch.randn([(6, 2, 3, 4)[dim] for dim in order], device=device).permute(back)
    ids = torch.tensor([1, 0, 1, 3, 3, 1], device=device)
    assert_trees_close(Dense(values).segment_sum(ids, 4).materialize(), summed(values, ids, 4))


def test_materialized_segments_are_not_rounded_one_by_one(device):
    # In bfloat16 the gradient of the first sample, 1 + 2^-8, would be rounded to 1.
    terms = torch.tensor([[[1.0], [2.0**-8]], [[2.0**-8], [0.0]]], device=device, dtype=torch.bfloat16)
    found = Outer(terms, torch.ones_like(terms)).segment_sum(torch.zeros(2, dtype=torch.int64, device=device), 1)
    assert isinstance(found, Dense) and found.dtype == torch.bfloat16 and found.materialize().item() == 1 + 2.0**-7
    # In a trace, too, where the sizes of segments cannot be read.
    ones = torch.ones_like(terms)
    held, one = Segments(Outer(terms, ones), torch.tensor([2], device=device)), Outer(ones[:1, :1], ones[:1, :1])
    products = lambda held, one: (held.norm(), held.inner(one), held.gram(one)[0])  # noqa: E731
    for found in (products(held, one), make_fx(products)(held, one)(held, one)):
        assert [value.item() for value in found] == [1 + 2.0**-7] * 3


def test_segments_are_materialized_where_gradients_are_tiny(device):
    ids, ones = torch.zeros(2, dtype=torch.int64, device=device), torch.ones(2, 1, 30, device=device)
    assert isinstance(Outer(ones, ones).segment_sum(ids, 2), Dense)
    assert isinstance(Rows(ids[:, None], ones, 40).segment_sum(ids, 2), Segments)  # its sparse sums stay sparse
    # A sum of 65536 is beyond float16.
    large = Outer(2**7 * ones.half(), 2**8 * ones.half()).segment_sum(ids, 2)
    assert large.norm().tolist() == [30 * 2**16, 0]


def test_segments_share_what_depends_on_the_ids(device, monkeypatch):
    counted = mock.Mock(wraps=_division.tables_of)
    monkeypatch.setattr(_division, "tables_of", counted)
    monkeypatch.setattr(_segments, "tables_of", counted)
    ids = torch.tensor([2, 0, 2], device=device)
    tree = [Rows(torch.randint(9, (3, 2), device=device), torch.randn(3, 2, 4, device=device), 9) for _ in range(3)]
    found = psg.tree.segment_sum(tree, ids, 4)
    dense = [summed(factor.materialize(), ids, 4) for factor in tree]
    assert_trees_close(psg.tree.clip(found, 0.5).grads, psg.tree.clip(dense, 0.5).grads, per_sample=False)
    assert counted.call_count == 1


def test_sizes_of_segments_are_integers():
    with pytest.raises(psg.InputError, match="expected sizes that are integers, got torch.float"):
        Segments(Outer(torch.ones(3, 1, 3), torch.ones(3, 1, 3)), torch.ones(2))
    users = Segments(Outer(torch.ones(3, 1, 3), torch.ones(3, 1, 3)), torch.tensor([1, 2]))
    with pytest.raises(psg.InputError, match="by their own method"):
        optree.tree_map(lambda tensor: tensor.to(torch.float32), users)
    assert users.to(torch.float32).weighted_sum(torch.ones(2)).dtype == torch.float32


@pytest.mark.parametrize(
    "sizes, message",
    [
        ([1, 1], r"whose sum is 3, the number of samples, got a sum of 2"),
        ([4], r"whose sum is 3, the number of samples, got a sum of 4"),
        ([], r"whose sum is 3, the number of samples, got a sum of 0"),
        ([4, -1], r"expected sizes of at least 0, got -1"),
        ([[1, 2]], r"expected sizes \[m\], got shape \(1, 2\)"),
        (3, r"expected sizes \[m\], got shape \(\)"),
    ],
)
def test_sizes_of_segments_that_do_not_fit(sizes, message):
    with pytest.raises(psg.InputError, match=message):
        Segments(Dense(torch.ones(3, 2)), torch.tensor(sizes, dtype=torch.int64))


def test_sizes_of_segments_in_32_bits(device):
    sizes = torch.zeros(2, dtype=torch.int32, device=device)
    assert Segments(Dense(torch.zeros(0, 3, device=device)), sizes).norm().tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 1, 1), (2, 0)])
def test_expanded_values_that_do_not_fit_the_shape(shape):
    with pytest.raises(psg.InputError, match=r"Expanded: expected values \[n, \*small\], where small is \(3,\) with 1"):
        Expanded(torch.ones(shape), torch.Size([3]))


@each_count
def test_entries_that_broadcast(n, device):
    values, entries = torch.randn(n, 2, 3, device=device), torch.randn(1, 1, 3, device=device)
    factor, index = Scaled(Dense(values), entries), torch.arange(n - 1, -1, -1, device=device)
    assert_trees_close(factor.take(index).materialize(), (values * entries).flip(0))
    assert_trees_close(psg.factors.concat([factor, factor]).materialize(), torch.cat([values * entries] * 2))
    assert_trees_close(factor.squared_norm(), (values * entries).square().sum((1, 2)))


@pytest.mark.parametrize("shape", [(3,), (2, 2), (3, 3), (2, 1, 3)])
def test_entries_that_do_not_fit_the_factor(shape):
    with pytest.raises(psg.InputError, match=r"Scaled: expected entries that broadcast to \(2, 3\), .* got \("):
        Scaled(Dense(torch.ones(2, 3)), torch.ones(shape))


@pytest.mark.parametrize("function", [psg.factors.merge, psg.factors.concat])
@pytest.mark.parametrize("shapes", [[], [(2, 3), (2, 4)], [(2, 3), (2, 3, 1)]])
def test_what_is_joined_has_one_shape(function, shapes):
    with pytest.raises(
        psg.InputError, match=rf"psg\.factors\.{function.__name__}: expected factors of one shape, at least one of them, got"
    ):
        function([Dense(torch.ones(shape)) for shape in shapes])


@pytest.mark.parametrize("other", ["cpu", torch.device("cpu"), torch.int64, None])
def test_the_dtype_of_a_factor_is_floating(other):
    """A device was taken too, to which all but the indices moved."""
    factor = Rows(torch.tensor([[0, 2]]), torch.ones(1, 2, 3), 4)
    with pytest.raises(psg.InputError, match=r"psg\.factors\.Rows\.to\(.*\): expected a floating dtype\. Move a tree"):
        factor.to(other)
    assert factor.to(torch.float16).dtype == torch.float16


def test_entries_are_real():
    """Their imaginary part was dropped."""
    with pytest.raises(psg.InputError, match=r"psg\.factors\.Scaled: .*only Dense"):
        Scaled(Dense(torch.ones(2, 3)), 1j * torch.ones(2, 3))


@each_count
@each_matrix
def test_precondition(kind, size, recipe, n, make, device):
    factor, tensor = make(recipe, n, size)
    diagonal = torch.rand(tensor.shape[1:], device=device) + 0.1
    found = psg.tree.precondition({"w": factor}, {"w": diagonal})["w"]
    holds_all_operations(found, tensor * diagonal)
    assert_trees_close(psg.tree.norm({"w": found}), reference_norm(tensor * diagonal))
    assert_trees_close(psg.tree.gram(found, factor), reference_gram(tensor * diagonal, tensor))


# --- pairs --------------------------------------------------------------------------------------------------

MET = [*itertools.product(MATRICES, MATRICES), *itertools.product(ENTRY_BY_ENTRY, PARTNERS)]
MET += itertools.product(SEGMENTS, ["Dense", "Outer", "Sum of Rows and Outer", "Scaled rows", "Segments of Outer"])
PAIRS = [(f"{a} x {b}, {size}", ALL[a], ALL[b], size) for a, b in MET for size in SIZES]
PAIRS += [(f"Conv x Conv, {size}", conv, conv, size) for size in CONVS]
each_pair = pytest.mark.parametrize("first, second, size", [row[1:] for row in PAIRS], ids=[row[0] for row in PAIRS])


# There are a thousand pairs. Each test loops over the numbers of samples: separate tests would take longer to report than to run.


@each_pair
def test_inner(first, second, size, make):
    for n in (0, 1, 3):
        (x, x_tensor), (y, y_tensor) = make(first, n, size), make(second, n, size)
        assert_trees_close(x.inner(y), (x_tensor * y_tensor).flatten(1).sum(1))


@each_pair
def test_gram(first, second, size, make):
    for n, m in ((3, 2), (1, 1), (0, 2), (2, 0), (0, 0)):
        (x, x_tensor), (y, y_tensor) = make(first, n, size), make(second, m, size)
        assert_trees_close(x.gram(y), reference_gram(x_tensor, y_tensor))


@pytest.mark.parametrize("positions", [(1, 1), (2, 3), (4, 4)])
@pytest.mark.parametrize("chunk", [1, 500, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gram_of_more_pairs_than_a_cache_holds(dtype, positions, chunk, monkeypatch, device):
    monkeypatch.setattr(psg._hardware._machine, "chunk_bytes", lambda device: chunk)
    x, y = (Outer(*torch.randn(2, n, t, 40, device=device).to(dtype)) for n, t in zip((7, 5), positions, strict=True))
    left, right = (factor.to(torch.float64).materialize() for factor in (x, y))
    rounding = {} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-3}
    assert_trees_close(x.gram(y).double(), reference_gram(left, right), **rounding)
    assert_trees_close(x.gram().double(), reference_gram(left), **rounding)


@each_factor
def test_gram_of_materialised_gradients_a_column_at_a_time(kind, size, recipe, make, monkeypatch):
    monkeypatch.setattr(psg._hardware._machine, "chunk_bytes", lambda device: 1)
    (x, x_tensor), (y, y_tensor) = make(recipe, 3, size), make(recipe, 2, size)
    assert_trees_close(_products.gram.materialized(x, y), reference_gram(x_tensor, y_tensor))
    assert_trees_close(_products.gram.materialized(x, x), reference_gram(x_tensor))
    if kind in ("Outer", "Rows", "Routed"):
        assert len(_products._in_blocks([x, y])) == x.shape[1]


@pytest.mark.parametrize("size", CONVS)
@each_count
def test_conv_meets_dense_and_sum(size, n, make):
    (x, x_tensor), (other, other_tensor) = make(conv, n, size), make(conv, n, size)
    both = Sum([x, other], torch.zeros(n, 0, device=x.device), x.shape)
    plain = Dense(other_tensor)
    for y, y_tensor in ((plain, other_tensor), (both, x_tensor + other_tensor)):
        assert_trees_close(x.inner(y), (x_tensor * y_tensor).flatten(1).sum(1))
        assert_trees_close(y.inner(x), (x_tensor * y_tensor).flatten(1).sum(1))
        assert_trees_close(x.gram(y), reference_gram(x_tensor, y_tensor))
        assert_trees_close(y.gram(x), reference_gram(y_tensor, x_tensor))
    assert_trees_close(both.squared_norm(), (x_tensor + other_tensor).flatten(1).square().sum(1))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dims", [1, 2])
def test_single_pixels_of_any_strides(dims, n, device):
    # Concatenated, the channels of all samples look channels-first to torch, and those of one group channels-last.
    kernel, steps = (3,) * dims, (1,) * dims
    input = torch.randn(n, 1, 9, *steps, device=device).as_strided((n, 1, 9, *steps), (9, 9, 1, *(9,) * dims))
    cotangent, geometry = torch.randn(n, 1, 6, *steps, device=device), Geometry(kernel, steps, steps, steps, 3)
    plain = Conv(cotangent, torch.empty(input.shape, device=device).copy_(input), geometry)
    with psg.plans.using(materialize="convolution"):
        assert_trees_close(Conv(cotangent, input, geometry).materialize(), plain.materialize())
    weights = torch.rand(n, device=device)
    assert_trees_close(Conv(cotangent, input, geometry).weighted_sum(weights), plain.weighted_sum(weights), per_sample=False)


@pytest.mark.parametrize("n", [0, 2])
def test_convs_of_other_geometry_meet(n, make):
    # One kernel used twice, with different strides and paddings.
    first, first_tensor = make(conv, n, "2-D depthwise")
    generator = torch.Generator().manual_seed(1)
    input = torch.randn(n, 2, 3, 9, 9, generator=generator).to(first.device)
    weight = torch.zeros(6, 1, 3, 3, device=first.device)
    cotangent = torch.randn(n, 2, 6, 4, 4, generator=generator).to(first.device)
    tensor = loop_grad(lambda w, x, c: (F.conv2d(x, w, stride=2, groups=3) * c).sum())(weight, input, cotangent)
    second = Conv(cotangent, input, Geometry((3, 3), (2, 2), (0, 0), (1, 1), 3))
    assert_trees_close(first.inner(second), (first_tensor * tensor).flatten(1).sum(1))
    assert_trees_close(first.gram(second), reference_gram(first_tensor, tensor))


# --- every algorithm, whether or not it is the cheapest here ----------------------------------------------------


@each_count
@pytest.mark.parametrize("norm, gram", [("keep", None), ("gram", "pixels"), ("gram", "patches"), ("chunks", None)])
@pytest.mark.parametrize("materialize", ["convolution", "samples", "patches"])
@pytest.mark.parametrize("size", CONVS)
def test_conv_by_every_plan(size, materialize, norm, gram, n, make):
    factor, tensor = make(conv, n, size)
    with psg.plans.using(norm=norm, gram=gram, materialize=materialize):
        assert isinstance(factor.settle(), Dense if norm == "keep" else Conv)
        holds_all_operations(factor, tensor)
        holds_all_operations(factor.settle(), tensor)


@each_count
@pytest.mark.parametrize("norm", ["keep", "gram", "chunks"])
@pytest.mark.parametrize("size", [name for name in CONVS if name.startswith("depthwise")])
def test_depthwise_convolutions_by_correlation(size, norm, n, make, monkeypatch):
    factor, tensor = make(conv, n, size)
    monkeypatch.setattr(Conv, "_is_depthwise", True)  # by default only for dtypes in which it is faster, not float64
    monkeypatch.setattr(Conv, "_is_correlated", True)
    with psg.plans.using(norm=norm, materialize="correlation"):
        holds_all_operations(factor, tensor)


@given(n=st.sampled_from([0, 1, 3]), sizes=st.lists(st.integers(0, 3), max_size=4), data=st.data())
def test_dimensions_in_another_order_are_not_copied(n, sizes, data):
    order = data.draw(st.permutations(range(len(sizes))))
    values = torch.randn(n, *sizes)
    shape = torch.Size(sizes[dim] for dim in order)
    strides = [shape[k + 1 :].numel() for k in range(len(shape))]
    region = Region(tuple(sizes), tuple(strides[order.index(dim)] for dim in range(len(sizes))), 0)
    factor = Views([Dense(values)], [region], shape)
    found = factor.materialize()
    assert found.data_ptr() == values.data_ptr()
    holds_all_operations(factor, values.permute(0, *(1 + dim for dim in order)))
    joined = Sum([factor, factor], found[:0], shape)
    assert_trees_close(joined.materialize(), 2 * found)
    assert_trees_close(factor.materialize(), found)  # nothing was added to what is shared


@pytest.mark.parametrize("channels", [1, 3])
@given(n=st.sampled_from([0, 1, 3]), stride=st.integers(1, 9), padding=st.integers(0, 3), seed=st.integers(0, 99))
def test_overlapping_patches_of_one_line_of_pixels(channels, n, stride, padding, seed):
    """bmm multiplies a view whose rows overlap in calls for each sample."""
    generator = torch.Generator().manual_seed(seed)
    input, weight = randn(n, 1, channels, 120, generator=generator), torch.zeros(channels * 8, 1, 5)
    options = {"stride": stride, "padding": padding, "groups": channels}
    cotangent = randn(n, *F.conv1d(input[:0].flatten(0, 1), weight, **options).shape[1:], generator=generator)
    expected = loop_grad(lambda w, x, c: (F.conv1d(x, w, **options) * c).sum())(weight, input, cotangent)
    factor = Conv(cotangent.unsqueeze(1), input, Geometry((5,), (stride,), (padding,), (1,), channels))
    with psg.plans.using(materialize="patches"), torch.autograd.profiler.profile() as profile:
        found = factor.materialize()
    assert_trees_close(found, expected, atol=1e-9)
    assert "aten::select" not in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("size", CONVS)
def test_patches_of_a_few_samples_at_a_time_have_derivatives(size, make, monkeypatch):
    monkeypatch.setattr(psg._hardware._machine, "chunk_bytes", lambda device: 100)
    factor, tensor = make(conv, 3, size)
    tracked, direction = factor.map(lambda field: field.clone().requires_grad_()), torch.randn_like(tensor[0])
    fields = tracked.cotangent, tracked.input
    with psg.plans.using(materialize="patches"):
        found = torch.autograd.grad((tracked.materialize() * direction).sum(), fields)
    assert_trees_close(found, torch.autograd.grad(tracked.dot(direction).sum(), fields))


@pytest.mark.parametrize("size", CONVS)
def test_directions_in_half_precision(size, make):
    factor, tensor = make(conv, 3, size)
    narrow, direction = factor.to(torch.bfloat16), torch.randn_like(tensor[0]).bfloat16()
    assert_trees_close(narrow.dot(direction).double(), narrow.to(torch.float64).dot(direction.double()), rtol=1e-5)


def test_large_depthwise_kernels_are_correlated():
    """Their native gradient is slow, so norms and sums come from the materialised gradients of single samples."""
    loss, params = psg.stateless(torch.nn.Conv2d(6, 6, 5, padding=2, groups=6), lambda out, target: (out - target).square().mean())
    params = {name: value.float() for name, value in params.items()}
    x, y = torch.randn(2, 4, 6, 9, 9, dtype=torch.float32).unbind()
    assert psg.explain(loss)(params, x, y).leaves[1].plan == "materialised and kept"
    wide = {name: value.double() for name, value in params.items()}, x.double(), y.double()
    grads, expected = psg.per_sample_grad(loss)(params, x, y), psg.per_sample_grad(loss)(*wide)
    assert_trees_close({name: grad.double() for name, grad in grads.items()}, expected, rtol=1e-5)
    out, expected = psg.clipped_grad(loss, 0.1)(params, x, y), psg.clipped_grad(loss, 0.1)(*wide)
    assert_trees_close({name: grad.double() for name, grad in out.grads.items()}, expected.grads, rtol=1e-5, per_sample=False)
    assert_trees_close(out.norms.double(), expected.norms, rtol=1e-5)


@each_count
@pytest.mark.parametrize("norm", ["keep", "gram", "chunks"])
@pytest.mark.parametrize("size", SIZES)
def test_outer_by_every_plan(size, norm, n, make):
    factor, tensor = make(outer, n, size)
    with psg.plans.using(norm=norm):
        assert isinstance(factor.settle(), Dense if norm == "keep" and factor.positions != 1 else Outer)
        holds_all_operations(factor, tensor)
        holds_all_operations(factor.settle(), tensor)


@each_count
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("norm", ["keep", "gram", "chunks"])
@pytest.mark.parametrize("size", ["square", "one column", "no positions", "whole blocks"])
def test_routed_by_every_plan(size, norm, dtype, n, make, monkeypatch):
    """Eager, in a trace, under vmap and with autograd: rows are sorted by group, or each group takes all rows."""
    monkeypatch.setitem(SIZES, "whole blocks", (9, 4, 8))  # those torch._grouped_mm takes
    factor, tensor = make(routed, n, size)
    weights, direction = torch.linspace(-1, 2, n).to(tensor), torch.randn(tensor.shape[1:]).to(tensor)

    def results(index, left, right):
        own = Routed(index, left, right, 4)
        return own.materialize(), own.norm(), own.weighted_sum(weights.to(dtype)), own.dot(direction.to(dtype)), own.inner(own), own.gram()

    products = reference_gram(tensor)
    expected = (tensor, products.diagonal().sqrt(), reference_weighted_sum(tensor, weights), reference_dot(tensor, direction))
    expected = *expected, products.diagonal(), products
    index, left, right = factor.index, factor.left.to(dtype), factor.right.to(dtype)
    with psg.plans.using(norm=norm):
        found = [results(index, left, right), make_fx(results)(index, left, right)(index, left, right)]
        found.append(results(index, left.clone().requires_grad_(), right))
        found.append([part[0] for part in torch.func.vmap(results, (None, 0, None))(index, left[None], right)])
    rtol, atol = (1e-9, 1e-9) if dtype == torch.float64 else (1e-4, 1e-3)
    for own in found:
        for part, wanted in zip(own, expected, strict=True):
            torch.testing.assert_close(part.detach().double(), wanted, rtol=rtol, atol=atol)


def test_derivatives_through_routed(device):
    index, weights = torch.tensor([[1, 0, 1], [2, 2, 2]], device=device), torch.tensor([1.0, -2.0], device=device)
    left, right, direction = (torch.randn(shape).to(device) for shape in ((2, 3, 4), (2, 3, 2), (3, 4, 2)))

    def results(left, right):
        factor = Routed(index, left, right, 3)
        return factor.squared_norm(), factor.weighted_sum(weights), factor.materialize(), factor.dot(direction)

    assert torch.autograd.gradcheck(results, (left.requires_grad_(), right.requires_grad_()))


@pytest.mark.parametrize("n, t", [(0, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["Outer", "Rows", "Routed", "Conv"])
def test_norms_without_samples_or_positions_have_derivatives(kind, n, t, device):
    """Those of Routed and Conv had no history."""
    sides = torch.ones(2, n, t, 3, device=device, requires_grad=True)
    index = torch.zeros(n, t, dtype=torch.int64, device=device)
    factor = {
        "Outer": lambda left, right: Outer(left, right),
        "Rows": lambda left, right: Rows(index, left, 4),
        "Routed": lambda left, right: Routed(index, left, right, 4),
        "Conv": lambda left, right: Conv(left[..., None], right[..., None], Geometry((1,), (1,), (0,), (1,), 1)),
    }[kind](*sides)
    for norm in (factor.squared_norm(), factor.norm()):
        assert norm.shape == (n,) and not norm.any()
        (slope,) = torch.autograd.grad(norm.sum(), sides)
        assert slope.shape == sides.shape and not slope.any()


def test_maps_and_terms_of_routed(make):
    (factor, tensor), (other, other_tensor) = make(routed, 3, "square"), make(routed, 3, "square")
    both = merge([factor, other])
    assert isinstance(both, Routed)
    assert_trees_close(both.materialize(), tensor + other_tensor)
    assert_trees_close(factor.inner(other), (tensor * other_tensor).flatten(1).sum(1))
    assert_trees_close(factor.gram(other), reference_gram(tensor, other_tensor))
    assert_trees_close(_maps.transposed(factor).materialize(), tensor.mT)
    for dim in range(3):
        assert_trees_close(_maps.narrowed(factor, dim, 1, 2).materialize(), tensor.narrow(1 + dim, 1, 2))
    for shape in ((), (4, 1, 1), (1, 4, 1), (4, 1, 3), (3,)):
        scale = torch.randn(shape).to(tensor)
        assert_trees_close(_maps.scaled(factor, scale).materialize(), tensor * scale)
    entries = torch.randn(tensor.shape[1:]).to(tensor)
    with psg.plans.using(norm="gram"):  # where nothing is materialised
        found = _maps.scaled(factor, entries)
    assert isinstance(found, Scaled)
    assert_trees_close(found.materialize(), tensor * entries)


def test_norms_of_routed_rows_that_nearly_cancel(device):
    u, r, shift = torch.randn(3, 4, 1, 60, device=device, dtype=torch.float32)
    index = torch.tensor([[2, 2]], device=device).expand(4, 2)
    factor = Routed(index, torch.cat([r, -r], 1), torch.cat([u, u + 1e-4 * shift], 1), 3)
    exact = factor.to(torch.float64).materialize().flatten(1).norm(dim=1)
    with psg.plans.using(norm="gram"):
        assert_norms(factor.norm(), exact, rtol=5e-5)


@pytest.mark.parametrize("reduced", [False, True])
def test_factors_are_saved_and_loaded(reduced, make, tmp_path):
    one = {
        "routed": make(routed, 3, "square")[0],
        "conv": make(conv, 3, "depthwise")[0],
        "outer": make(outer, 3, next(iter(SIZES)))[0],
        "tied": make(sum_of(rows, outer), 3, next(iter(SIZES)))[0],
        "segments": make(segments(routed), 3, "square")[0],
    }
    if reduced:  # factors keep what they have computed for it
        psg.tree.norm(one)
        psg.tree.sum(one)
    torch.save(one, tmp_path / "factors.pt")
    other = torch.load(tmp_path / "factors.pt", weights_only=True)
    assert {name: type(factor) for name, factor in other.items()} == {name: type(factor) for name, factor in one.items()}
    assert all(torch.equal(factor.materialize(), other[name].materialize()) for name, factor in one.items())


def holds_all_operations(factor, tensor):
    weights = torch.linspace(-1, 2, factor.n, device=tensor.device)
    direction = torch.randn(tensor.shape[1:], device=tensor.device)
    assert_trees_close(factor.materialize(), tensor)
    assert_trees_close(factor.squared_norm(), reference_norm(tensor).square())
    assert_trees_close(factor.weighted_sum(weights), reference_weighted_sum(tensor, weights), per_sample=False)
    assert_trees_close(factor.dot(direction), reference_dot(tensor, direction))
    assert_trees_close(factor.gram(), reference_gram(tensor))


@each_count
@pytest.mark.parametrize("multiplies", [True, False])
def test_products_of_one_position_by_either_way(multiplies, n, device, monkeypatch):
    monkeypatch.setattr("psg._hardware._matmul.multiplies", lambda device, rows, columns: multiplies)
    left, right = torch.randn(n, 1, 3, device=device), torch.randn(n, 1, 2, device=device)
    holds_all_operations(Outer(left, right), torch.einsum("nta,ntb->nab", left, right))


@given(
    n=st.sampled_from([0, 1, 3]),
    sizes=st.one_of(st.tuples(st.integers(0, 19), st.integers(0, 20)), st.tuples(st.just(1), st.integers(400, 500))),
    turned=st.booleans(),
)
def test_small_products_of_one_position_are_no_matrix_products(n, sizes, turned):
    """Also where MKL's would be faster for larger ones: torch's `bmm` does not call it for few numbers, and it is slow for vectors."""
    sides = [torch.randn(n, 1, size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    factor = Outer(*(reversed(sides) if turned else sides))
    out = torch.zeros(n, *factor.shape)
    with mock.patch.multiple(psg._hardware._matmul, pages_are_kept=lambda: True, _mkl_is_untuned=lambda: False):
        with torch.autograd.profiler.profile() as profile:
            gradient = factor.materialize()
            factor.write_to(out)
            factor.add_to(out)
        holds_all_operations(factor, torch.einsum("nta,ntb->nab", factor.left, factor.right))
    assert_trees_close(out, 2 * gradient)
    assert not {"aten::bmm", "aten::baddbmm_"} & {event.key for event in profile.key_averages()}


@given(n=st.integers(0, 5), m=st.integers(0, 4), width=st.integers(0, 12), blocks=st.sampled_from([2, 3]), seed=st.integers(0, 2**16))
def test_sums_and_products_of_dense_gradients_in_blocks(n, m, width, blocks, seed, device):
    generator = torch.Generator().manual_seed(seed)
    x, y, weights = (randn(*shape, generator=generator).to(device) for shape in ((n, width, 2), (m, width, 2), (n,)))

    def wherever_they_fit(rows, *_):
        return blocks if rows.numel() and rows.shape[1] % blocks == 0 else 1

    with mock.patch.multiple(psg._hardware._matmul, column_blocks=wherever_they_fit, inner_blocks=wherever_they_fit):
        assert_trees_close(Dense(x).weighted_sum(weights), reference_weighted_sum(x, weights), per_sample=False)
        assert_trees_close(Dense(x).gram(Dense(y)), reference_gram(x, y))
        assert_trees_close(Dense(x).gram(), reference_gram(x))


# --- what is easy to get wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda values: Outer(values, values),
        lambda values: Outer(values.real, values),
        lambda values: Rows(torch.zeros(2, 3, dtype=torch.int64), values, 4),
        lambda values: Conv(values.real[:, None], values[:, None], Geometry((1,), (1,), (0,), (1,), 1)),
        lambda values: Conv(values[:, None], values[:, None], Geometry((1,), (1,), (0,), (1,), 1)),
    ],
)
def test_products_of_complex_tensors_are_refused(make):
    with pytest.raises(psg.InputError, match=r"psg\.factors\.(Outer|Rows|Conv): .*only Dense"):
        make(torch.ones(2, 3, 4, dtype=torch.complex64))


@pytest.mark.parametrize("index", [[[0, 4], [1, 0]], [[0, 1], [-1, 0]]])
@pytest.mark.parametrize("kind", [Rows, Routed])
def test_indices_out_of_range(kind, index):
    """They were written into the gradient of the sample beside."""
    sides = [torch.ones(2, 2, 3)] * (len(kind.fields) - 1)
    kind(torch.tensor([[0, 3], [1, 0]]), *sides, 4)
    with pytest.raises(psg.InputError, match=rf"{kind.__name__}: expected an index of integers in \[0, 4\), got integers from -?\d to \d"):
        kind(torch.tensor(index), *sides, 4)


@pytest.mark.parametrize("input", [torch.ones(2, 3, 5), torch.ones(2, 2, 3, 5), torch.ones(3, 1, 3, 5)])
def test_the_sides_of_a_convolution_have_the_same_samples_and_images(input):
    with pytest.raises(psg.InputError, match=r"Conv: expected a cotangent \[n, images, o, \*out\] .* one image a sample is \[n, 1"):
        Conv(torch.ones(2, 1, 4, 5), input, Geometry((1,), (1,), (0,), (1,), 1))


@pytest.mark.parametrize("cotangent, groups", [((2, 1, 4, 6), 1), ((2, 1, 4, 5), 2), ((2, 1, 3, 5), 2)])
def test_the_sides_of_a_convolution_fit_its_geometry(cotangent, groups):
    geometry = Geometry((2,), (1,), (0,), (1,), groups)
    assert Conv(torch.ones(2, 1, 4, 4), torch.ones(2, 1, 3, 6), geometry._replace(groups=1)).materialize().eq(4).all()  # of five positions
    with pytest.raises(
        psg.InputError, match=rf"Conv: Geometry.* has {groups} groups and, from an input .*, at most \[5\] output positions"
    ):
        Conv(torch.ones(cotangent), torch.ones(2, 1, 3, 6), geometry)


def test_groups_never_mix(device):
    # The inner product over all channels at once would count products between the groups.
    input = torch.ones(1, 1, 4, 3, 3, device=device)
    input[:, :, 2:] = -1
    cotangent = torch.ones(1, 1, 2, 1, 1, device=device)
    factor = Conv(cotangent, input, Geometry((3, 3), (1, 1), (0, 0), (1, 1), 2))
    assert factor.squared_norm().item() == 36.0  # two groups x two channels x nine entries of one
    assert factor.gram().item() == 36.0


def test_positions_with_one_id_add_up_before_they_are_squared(device):
    index = torch.tensor([[1, 1, 1, 0]], device=device)
    cotangent = torch.tensor([[[1.0], [2.0], [-3.0], [5.0]]], device=device)
    assert Rows(index, cotangent, 3).squared_norm().item() == 25.0


@given(n=st.integers(0, 5), t=st.integers(0, 12), rows=st.sampled_from([1, 3, 30, 1000]), seed=st.integers(0, 2**16))
def test_norms_of_rows_with_few_and_many_repeats(n, t, rows, seed, device):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(rows, (n, t), generator=generator).to(device)
    factor = Rows(index, torch.randn(n, t, 2, generator=generator).to(device), rows)
    torch.testing.assert_close(factor.squared_norm(), factor.materialize().square().sum((1, 2)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [lambda v: Dense(v), lambda v: Outer(v[:, None], v[:, None]), lambda v: Outer(v[None], v[None])])
def test_derivatives_of_a_norm_of_zero_are_zero(make, device):
    values = torch.zeros(2, 3, device=device, requires_grad=True)
    (slope,) = torch.autograd.grad(make(values).norm().sum(), values, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), values)
    assert not slope.any() and not curvature.any()


def test_a_true_zero_is_never_negative(device):
    # The terms of these sums cancel; what rounding leaves must not become the root of a negative number.
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(64, 2, 30, generator=generator).to(device, torch.float32)
    left = torch.cat([left, -left.sum(1, keepdim=True)], 1)
    right = torch.randn(64, 1, 20, generator=generator).to(device, torch.float32)
    factor = Outer(left, right.expand(64, 3, 20))
    with psg.plans.using(norm="gram"):
        assert (factor.squared_norm() >= 0).all()
    single = Outer(left[:, :2], right.expand(64, 2, 20))
    both = Sum([single, Dense(-single.materialize())], torch.zeros(64, 0, device=device), single.shape)
    assert (both.squared_norm() >= 0).all()


def test_small_weights_of_half_precision_are_not_rounded_first(device):
    # Rounded to float16 this weight would be off by a fifth. Tiny clip norms give such weights, and their products fit float16 well.
    weight, size = 1e-7, 200.0
    ones = lambda *shape: size * torch.ones(shape, dtype=torch.float16, device=device)  # noqa: E731
    index = torch.zeros(2, 1, dtype=torch.int64, device=device)
    factors = [
        Dense(ones(2, 3)),
        Outer(ones(2, 1, 3), ones(2, 1, 4) / size),
        Rows(index, ones(2, 1, 4), 1),
        Conv(ones(2, 1, 3, 2), ones(2, 1, 2, 4) / size / 2, Geometry((3,), (1,), (0,), (1,), 1)),
    ]
    for factor in factors:
        total = factor.weighted_sum(torch.full((2,), weight, device=device, dtype=torch.float32))
        assert_trees_close(total, torch.full_like(total, 2 * weight * size), rtol=1e-2, name=repr(factor), per_sample=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reductions_accumulate_in_float32(dtype, device):
    generator = torch.Generator().manual_seed(0)
    for _, size, recipe in [row for row in ROWS if row[1] != "few positions"]:
        factor, _ = recipe(3, size, generator)
        low = factor.to(dtype).map(lambda part: part.to(device))
        exact = low.map(lambda part: part.double() if part.is_floating_point() else part)
        weights, direction = torch.tensor([1.0, 0.3, 0.7], device=device), torch.randn(low.shape, device=device)
        for name, *args in (("squared_norm",), ("gram",), ("dot", direction), ("weighted_sum", weights)):
            found, wanted = getattr(low, name)(*args), getattr(exact, name)(*args)
            assert found.dtype == torch.float32
            assert_trees_close(found.double(), wanted, rtol=psg_rtol(dtype), name=f"{size}: {name}", per_sample=name != "weighted_sum")
        terms = low.squared_terms()
        assert terms.dtype == torch.float32
        assert_trees_close(terms.double(), low.to(torch.float64).squared_terms(), rtol=psg_rtol(dtype), name=f"{size}: squared_terms")


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_number_for_a_whole_row_is_added_to_a_sum_as_it_is(n, device):
    outer = Outer(torch.randn(n, 2, 3, device=device), torch.randn(n, 2, 4, device=device))
    row = Expanded(torch.randn(n, 3, 1, device=device), torch.Size([3, 4]))
    both = Sum([row, outer], outer.left[:, 0, :0], outer.shape)
    with mock.patch.object(Expanded, "materialize", side_effect=AssertionError):
        found = both.materialize()
    torch.testing.assert_close(found, outer.materialize() + row.values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_rounded_once(dtype, device):
    # In bfloat16 a sum of many rows would stop growing, and each weighted row would be rounded.
    index, weights = torch.randint(3, (512, 4), device=device), torch.rand(512, device=device, dtype=torch.float32)
    rows = Rows(index, torch.randint(1, 8, (512, 4, 5), device=device).to(dtype), 3)
    exact = rows.to(torch.float64).weighted_sum(weights).to(dtype)
    for total in (psg.tree.weighted_sum(rows, weights), psg.tree.sparse_weighted_sum(rows, weights).to_dense()):
        assert_trees_close(total, exact, rtol=torch.finfo(dtype).eps / 2, per_sample=False)
    # And a sum of terms would stay at its first term.
    ones = [Dense(torch.full((1, 5), value, device=device).to(dtype)) for value in (1 / torch.finfo(dtype).eps * 2, *[1.0] * 8)]
    total = psg.tree.sum(Sum(ones, torch.empty(1, 0, dtype=dtype, device=device), torch.Size([5])))
    assert_trees_close(total, ones[0].values[0] + 8, rtol=0, per_sample=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [(1e-25, 1e25), (1e-18, 1e18), (1e18, 1e-18), (1e25, 1e-25)])
def test_outer_products_of_a_small_and_a_large_side(scales, dtype, device):
    # A loss scaled by 1e25, of inputs scaled by 1e-25, has ordinary gradients; the squares of both sides do not fit float32.
    left, right = (torch.randn(4, 1, size, device=device, dtype=torch.float32) * s for size, s in zip((3, 5), scales, strict=True))
    left[1] = 0
    factor = Outer(left.to(dtype), right.to(dtype))
    exact = reference_norm(factor.to(torch.float64).materialize())
    assert_trees_close(factor.norm(), exact.float(), rtol=1e-5)
    assert_trees_close(factor.squared_norm(), exact.square().float(), rtol=1e-5)
    # In a trace, and under differentiation, no value can be read.
    traced = make_fx(lambda left, right: Outer(left, right).norm())(factor.left, factor.right)
    assert_trees_close(traced(factor.left, factor.right), exact.float(), rtol=1e-5)
    batched = torch.func.vmap(lambda right: Outer(factor.left, right).norm())(factor.right[None])
    assert_trees_close(batched[0], exact.float(), rtol=1e-5)
    tracked = Outer(factor.left.clone().requires_grad_(), factor.right)
    assert_trees_close(tracked.squared_norm().detach(), exact.square().float(), rtol=1e-5)


@pytest.mark.parametrize("scales", [(1e25, 1.0), (1.0, 1e25), (1e-25, 1.0), (1.0, 1e-25)])
def test_norms_of_outer_products_whose_squares_do_not_fit(scales, device):
    left, right = (torch.randn(4, 1, size, device=device, dtype=torch.float32) * s for size, s in zip((3, 5), scales, strict=True))
    exact = reference_norm(Outer(left.double(), right.double()).materialize()).float()
    for norm in (lambda left, right: Outer(left, right).norm(), make_fx(lambda left, right: Outer(left, right).norm())(left, right)):
        assert_trees_close(norm(left, right), exact, rtol=1e-5)


@given(n=st.integers(0, 3), t=st.integers(0, 5), a=st.integers(0, 5), b=st.integers(1, 5), order=st.permutations(range(3)))
def test_squared_terms_of_sides_of_any_strides(n, t, a, b, order, device):
    """Positions innermost, as inputs of `w @ x` and of convolutions have them, or samples."""
    back = [order.index(dim) for dim in range(3)]
    left, right = (torch.randn([(n, t, size)[dim] for dim in order], device=device).permute(back) for size in (a, b))
    terms = Outer(left, right).squared_terms()
    assert_trees_close(terms, (left.square().sum(2) * right.square().sum(2)).sum(1))
    in_half = Outer(left.half(), right.half())
    assert in_half.squared_terms().dtype == torch.float32
    # The derivative of a norm of zero would not be finite.
    zeros = torch.zeros_like(left).requires_grad_()
    (gradient,) = torch.autograd.grad(Outer(zeros, right).squared_terms().sum(), zeros)
    assert torch.equal(gradient, torch.zeros_like(left))


def psg_rtol(dtype):
    from psg.testing import default_rtol

    return default_rtol(dtype)


def test_merge_keeps_the_sum(make):
    made = [make(recipe, 2, "square") for recipe in (outer, rows, dense, outer, dense, rows)]
    total = sum(tensor for _, tensor in made)
    merged = merge([factor for factor, _ in made])
    assert_trees_close(merged.materialize(), total)
    assert_trees_close(merged.squared_norm(), reference_norm(total).square())
    assert isinstance(merge([made[0][0], made[3][0]]), Outer)


@pytest.mark.parametrize("size", CONVS)
@pytest.mark.parametrize("norm", [None, "gram", "keep"])
def test_merged_convolutions(make, size, norm):
    """Of one geometry and size; where each gradient is kept, and smaller than its sides, gradients are added."""
    terms, tensors = zip(*(make(conv, 2, size) for _ in range(3)), strict=True)
    first = terms[0]
    larger = Conv(F.pad(first.cotangent, (0, 1)), F.pad(first.input, (0, first.geometry.stride[-1])), first.geometry)
    with psg.plans.using(norm=norm):
        merged = merge(list(terms))
        apart = norm == "keep" and first.nbytes > first.dense_bytes
        if apart or norm == "gram":
            assert isinstance(merged, Sum if apart else Conv)
        assert_trees_close(merged.materialize(), sum(tensors))
        assert_trees_close(merged.norm(), reference_norm(sum(tensors)))
        both = merge([first, larger])
        assert isinstance(both, Sum)
        assert_trees_close(both.materialize(), tensors[0] + larger.materialize())


@given(
    n=st.integers(0, 3),
    t=st.integers(0, 5),
    a=st.integers(1, 5),
    b=st.integers(1, 5),
    kinds=st.tuples(st.sampled_from(list(ALL)), st.sampled_from(list(ALL))),
    seed=st.integers(0, 2**16),
)
def test_pairs_over_drawn_shapes(n, t, a, b, kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    SIZES["drawn"] = (t, a, b)
    try:
        (x, x_tensor), (y, y_tensor) = (ALL[kind](n, "drawn", generator) for kind in kinds)
    finally:
        del SIZES["drawn"]
    assert_trees_close(x.squared_norm(), reference_norm(x_tensor).square(), atol=1e-12)
    assert_trees_close(x.inner(y), (x_tensor * y_tensor).flatten(1).sum(1), atol=1e-12)
    assert_trees_close(x.gram(y), reference_gram(x_tensor, y_tensor), atol=1e-12)


def assert_norms(found, exact, rtol):
    """Norms of what nearly cancels: exact; where values cannot be read (on accelerators), finite and not below those."""
    if _functorch.can_read_now(found):
        torch.testing.assert_close(found, exact.to(found.dtype), rtol=rtol, atol=0)
    else:
        assert (found.isfinite() & (found >= exact * (1 - rtol))).all()


def anyhow(plan, device):
    """The plan, or where values cannot be read one that is exact although squares of one side leave the range (help(psg.tree))."""
    return plan if plan != "gram" or _functorch.can_read_now(torch.empty(0, device=device)) else "chunks"


CENTRED = {  # nearly vanishing gradients: the common parts of the terms cancel
    "pair": lambda x, c: Outer(torch.stack([c, -c], 1), torch.stack([x, x + 1e-3 * c[:, :1]], 1)),
    "mean": lambda x, c: Outer((c[:, :, None] - c.mean(1)[:, None, None]).expand(-1, -1, 3), 100 + 0.01 * torch.stack([x, c], 2)),
    "conv": lambda x, c: Conv(
        torch.stack([c, -c], 2).unflatten(1, (1, -1)), 100 + 0.01 * torch.stack([x, x + c, c], 2).unflatten(1, (1, -1)), PAIR
    ),
    "tied": lambda x, c: Sum([Dense(1 + x), Dense(1e-3 * c - (1 + x))], x[:, :0], x.shape[1:]),
    "tied rows": lambda x, c: Sum(
        [
            Rows(torch.zeros(len(x), 1, dtype=torch.int64, device=x.device), 1 + x[:, None], 4),
            Outer(torch.eye(4).to(x)[0].expand(len(x), 1, 4), -1 - 1.001 * x[:, None]),
        ],
        x[:, :0],
        torch.Size((4, x.shape[1])),
    ),
}
PAIR = Geometry((2,), (1,), (0,), (1,), 1)


@pytest.mark.parametrize("gram", ["pixels", "patches"])
@pytest.mark.parametrize("make", CENTRED.values(), ids=CENTRED)
def test_norms_of_what_nearly_cancels(make, gram, device):
    """Inner products in float32 lose what is left of these gradients, weighted sums do not: clipped ones could exceed the clip norm."""
    generator = torch.Generator().manual_seed(0)
    x, c = (torch.randn(6, 40, generator=generator, dtype=torch.float32).to(device) for _ in range(2))
    c[-1] = x[-1] = 0
    factor = make(x, c)
    exact = factor.to(torch.float64).materialize().flatten(1).norm(dim=1).float()
    with psg.plans.using(norm="gram", gram=gram):
        assert_norms(factor.norm(), exact, rtol=1e-3)
        traced = make_fx(lambda factor: factor.norm())(factor)(factor)  # a trace cannot read values: an upper bound
    assert ((traced >= exact * (1 - 1e-3)) & (traced <= exact + 0.01 * factor.squared_terms().sqrt())).all()


UNEVEN = {  # gradients of ordinary size whose sides are not
    "outer": lambda left, right: Outer(left, right),
    "conv": lambda left, right: Conv(left.mT.unflatten(1, (1, -1)), right.mT.unflatten(1, (1, -1)), Geometry((1,), (1,), (0,), (1,), 1)),
    "segments": lambda left, right: Outer(left, right).segment_sum(torch.tensor([0, 2, 2, 0], device=left.device), 3),
}


@pytest.mark.parametrize("gram", ["pixels", "patches"])
@pytest.mark.parametrize("sizes", [(1e-22, 1e6), (1e-24, 1e8), (1e-24, 1e18), (1e-19, 1e18), (1e18, 1e-24), (1e6, 1e-22)])
@pytest.mark.parametrize("make", UNEVEN.values(), ids=UNEVEN)
def test_norms_of_uneven_sides(make, sizes, gram, device):
    """Inner products of one side underflow, so that a norm would read 0, and its sample escape clipping."""
    generator = torch.Generator().manual_seed(0)
    left, right = (size * torch.randn(4, 3, 8, generator=generator, dtype=torch.float32).to(device) for size in sizes)
    left[1], right[2, 1] = 0, 0
    left[3, 1:] *= 1e12 if sizes[0] < 1 else 1e-12  # positions of one sample may differ as much
    right[3, 1:] *= 1e-12 if sizes[0] < 1 else 1e12
    factor = make(left, right)
    with psg.plans.using(norm=anyhow("gram", device), gram=gram):
        norms = factor.norm()
    assert_trees_close(norms, factor.to(torch.float64).materialize().flatten(1).norm(dim=1).float(), rtol=1e-3)


@pytest.mark.parametrize("gram", ["pixels", "patches"])
@pytest.mark.parametrize("sizes", [(1e20, 1e-10), (1e-10, 1e20), (1e30, 1e-25)])
@pytest.mark.parametrize("make", UNEVEN.values(), ids=UNEVEN)
def test_norms_of_sides_of_which_one_has_squares_that_overflow(make, sizes, gram, device):
    """Infinite throughout, inner products gave infinity, not NaN, and samples of ordinary size were left out of clipped sums."""
    generator = torch.Generator().manual_seed(0)
    left, right = (size * (1 + torch.rand(4, 3, 8, generator=generator, dtype=torch.float32).to(device)) for size in sizes)
    left[1, 0, 0], left[2, 1, 2], left[3] = torch.nan, torch.inf, 0
    factor = make(left, right)
    exact = factor.to(torch.float64).materialize().flatten(1).norm(dim=1).float()
    for norm in (anyhow("gram", device), "chunks"):
        with psg.plans.using(norm=norm, gram=gram):
            found = factor.norm()
        assert_trees_close(found[exact.isfinite()], exact[exact.isfinite()])
        assert found.isfinite().tolist() == exact.isfinite().tolist()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("sizes", [(1e12, 1e12), (1e13, 1e13), (1e23, 1.0), (1.0, 1e26), (1e30, 1.0)])
@pytest.mark.parametrize("least", [0.0, 1e-21, 1e-30])
@pytest.mark.parametrize("kind", ["outer", "expanded"])
def test_norms_of_scaled_gradients_whose_largest_terms_meet_the_least_entries(kind, least, sizes, traced, device):
    """In units of these terms all others underflow: the norm read zero, and its sample escaped clipping."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(4, 1, size, generator=generator, dtype=torch.float32).to(device) for size in (6, 5))
    left[0, 0, 2], right[0, 0, 3], left[1] = *sizes, 0
    entries = torch.rand(6, 5, generator=generator, dtype=torch.float32).to(device)
    entries[2], entries[:, 3] = least, least

    def norms(left, right, entries):
        factor = Outer(left, right) if kind == "outer" else Expanded(left.mT, torch.Size([6, 5]))
        scaled = Scaled(factor, entries.expand(4, 6, 5))
        return scaled.norm(), scaled.squared_norm()

    found = (make_fx(norms)(left, right, entries) if traced else norms)(left, right, entries)
    wide = [part.double() for part in (left, right, entries)]
    exact, squares = norms(*wide)
    assert_trees_close(exact, (wide[0].mT * (wide[1] if kind == "outer" else 1) * wide[2]).flatten(1).norm(dim=1))
    assert_trees_close(found, (exact.float(), squares.float()), rtol=1e-5)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("sizes", [(1e25, 1e25), (1e38, 1e2), (1e2, 1e38)])
def test_a_product_that_overflows_where_it_is_scaled_by_zero_is_not_finite(sizes, traced, device):
    """Infinity times zero is NaN: the norm was finite, and the clipped sum of all samples NaN."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(4, 1, size, generator=generator, dtype=torch.float32).to(device) for size in (6, 5))
    left[0, 0, 2], right[0, 0, 3] = sizes
    entries = torch.rand(6, 5, generator=generator, dtype=torch.float32).to(device)
    entries[2], entries[:, 3] = 0, 0

    def clipped(left, right, entries):
        return psg.tree.clip(Scaled(Outer(left, right), entries.expand(len(left), 6, 5)), 1.0)

    dense = left.mT * right * entries
    out = (make_fx(clipped)(left, right, entries) if traced else clipped)(left, right, entries)
    assert dense.flatten(1).norm(dim=1).isfinite().tolist() == out.norms.isfinite().tolist() == [False, True, True, True]
    assert out.nonfinite == 1
    assert_trees_close(out.grads, psg.tree.clip(dense[1:], 1.0).grads, per_sample=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives_of_scaled_gradients_at_zero(dtype, device):
    right, entries = torch.randn(2, 1, 3, device=device, dtype=dtype), torch.rand(4, 3, device=device, dtype=dtype)
    left = torch.randn(2, 1, 4, device=device, dtype=dtype)
    left[0] = 0
    squared = lambda left: Scaled(Outer(left, right), entries.expand(2, 4, 3)).squared_norm().sum()  # noqa: E731
    dense = lambda left: (left.mT * right * entries).square().sum()  # noqa: E731
    hessian = torch.autograd.functional.hessian
    assert_trees_close(hessian(squared, left), hessian(dense, left), per_sample=False, rtol=1e-5)


def test_samples_whose_terms_are_zero_are_not_materialised(device):
    left, right = torch.randn(4, 3, 8, device=device), torch.randn(4, 3, 8, device=device)
    left[1], right[2] = 0, 0
    factor = Outer(left, right)
    with psg.plans.using(norm="gram"), mock.patch.object(Outer, "parts", side_effect=AssertionError):
        norms = factor.norm()
    assert_trees_close(norms, factor.materialize().flatten(1).norm(dim=1))


def test_norms_of_what_nearly_cancels_have_derivatives(device):
    x, c = (torch.randn(3, 5, device=device) for _ in range(2))
    factor = Outer(torch.stack([c, -c], 1), torch.stack([x, x + 1e-7 * c], 1).requires_grad_())
    assert (factor.squared_norm() < 1e-11 * factor.squared_terms()).all()
    with psg.plans.using(norm=anyhow("gram", device)):
        found = torch.autograd.grad(factor.squared_norm().sum(), factor.right)
    assert_trees_close(found, torch.autograd.grad(factor.materialize().square().sum(), factor.right))


@pytest.mark.parametrize("eps", [1e-4, 4e-4, 1e-3, 4e-3])
def test_norms_of_terms_that_cancel_as_a_whole(eps, device):
    """The positions add up to large terms, which cancel: the rounding error is proportional to the terms, not to the positions."""
    generator = torch.Generator().manual_seed(0)
    t = 4000
    left, right = (1 + 0.1 * torch.randn(2, t, 3, generator=generator, dtype=torch.float32) for _ in range(2))
    first, second = Outer(left.to(device), right.to(device)), Outer(-left.to(device), right.to(device) * (1 + eps))
    factor = Sum([first, second], left[:, 0, :0].to(device), torch.Size((3, 3)))
    exact = factor.to(torch.float64).materialize().flatten(1).norm(dim=1)
    with psg.plans.using(norm="gram"):
        assert_norms(factor.norm(), exact, rtol=5e-3)
        traced = make_fx(lambda factor: factor.norm())(factor)(factor)
    assert (traced >= exact * 0.99).all()


@pytest.mark.parametrize("alike", [True, False])
def test_what_is_one_tensor_for_all_samples_stays_one_when_they_are_joined(alike, make):
    def recipe(n, size, generator):
        factor, tensor = outer(n, size, generator)
        entries = torch.arange(12.0).reshape(4, 3) * (1 if alike else n)
        return Scaled(factor, entries.expand(n, 4, 3)), tensor * entries

    factors, tensors = zip(*(make(recipe, n, "square") for n in (2, 0, 3, 1)), strict=True)
    joined = psg.factors.concat(factors)
    assert_trees_close(joined.materialize(), torch.cat(tensors))
    if joined.device.type == "cpu":
        assert (joined.entries.stride(0) == 0) is alike


@pytest.mark.parametrize(
    "kind", ["Outer", "Rows", "Views in another shape", "Sum of Rows and Outer", "Sum of a Sum", "Scaled Outer", "Segments of Outer"]
)
def test_sums_of_different_lengths_stay_factored_when_they_are_joined(kind, make, monkeypatch):
    def recipe(n, t, generator):
        monkeypatch.setitem(SIZES, "of that length", (t, 300, 200))
        return ALL[kind](n, "of that length", generator)

    expect_joined(*zip(*(make(recipe, n, t) for n, t in ((2, 5), (0, 3), (3, 1), (1, 7))), strict=True))


def test_rows_routed_to_matrices_stay_factored_when_they_are_joined(make, monkeypatch):
    def recipe(n, t, generator):
        monkeypatch.setitem(SIZES, "of that length", (t, 30, 20))
        return routed(n, "of that length", generator)

    expect_joined(*zip(*(make(recipe, n, t) for n, t in ((2, 5), (0, 3), (3, 1))), strict=True))


def test_convolutions_of_different_numbers_of_images_stay_factored_when_they_are_joined(make, monkeypatch):
    def recipe(n, images, generator):
        monkeypatch.setitem(CONVS, "so many", (images, *CONVS["few positions"][1:]))
        return conv(n, "so many", generator)

    expect_joined(*zip(*(make(recipe, n, images) for n, images in ((2, 2), (1, 1), (2, 3))), strict=True))


def expect_joined(factors, tensors):
    joined, tensor = psg.factors.concat(factors), torch.cat(tensors)
    assert type(joined) is type(factors[0])
    assert_trees_close(joined.materialize(), tensor)
    assert_trees_close(joined.norm(), tensor.flatten(1).norm(dim=1))
    weights = torch.rand(len(tensor)).to(tensor)
    assert_trees_close(joined.weighted_sum(weights), torch.einsum("n,n...->...", weights, tensor))
    assert_trees_close(psg.tree.gram([joined]), tensor.flatten(1) @ tensor.flatten(1).T)


def test_joined_factors_have_the_derivatives_of_each(device):
    ones, entries = Expanded(torch.ones(2, 1, 1, device=device), torch.Size([4, 3])), torch.rand(2, 4, 3, device=device)
    entries[1] = entries[0]
    entries.requires_grad_()
    joined = psg.factors.concat([Scaled(ones, own.expand(2, 4, 3)) for own in entries])
    (slope,) = torch.autograd.grad(joined.weighted_sum(torch.tensor([1.0, 1.0, 2.0, 3.0], device=device)).sum(), entries)
    assert_trees_close(slope, torch.tensor([2.0, 5.0], device=device)[:, None, None].expand(2, 4, 3))


def test_what_the_samples_share_stays_shared_within_sums_and_views(make):
    def recipe(n, size, generator):
        (left, tensor), (right, other) = (scaled(outer)(n, size, generator) for _ in range(2))
        whole = Region((4, 3), (3, 1), 0)
        return Sum([left, Views([right], [whole], torch.Size((4, 3)))], torch.zeros(n, 0), torch.Size((4, 3))), tensor + other

    (left, right), keep = make(recipe, 5, "square"), torch.tensor([True, True, False, True, True])
    keep = keep.to(left.device)
    for factor, tensor in (
        (left.take(keep), right[keep]),
        (left.zero(keep), torch.where(keep[:, None, None], right, 0)),
        (left.to(torch.float32), right.float()),
    ):
        assert_trees_close(factor.materialize(), tensor, **({"rtol": 1e-5, "atol": 1e-5} if tensor.dtype == torch.float32 else {}))
        assert factor.terms[0].shared is not None and factor.terms[1].factors[0].shared is not None


@pytest.mark.parametrize("kind", [expanded(1, 1), outer, rows])
def test_second_derivatives_of_norms_by_shared_entries(kind):
    factor, _ = kind(2, "wide", torch.Generator().manual_seed(0))

    def norms(entries):
        return Scaled(factor, entries.expand(2, 6, 5)).squared_norm().sum()

    def reference(entries):
        return (factor.materialize() * entries).square().sum()

    for entries in (torch.zeros(6, 5), torch.randn(6, 5)):
        found, expected = (torch.autograd.functional.hessian(function, entries) for function in (norms, reference))
        assert_trees_close(found, expected, per_sample=False)
    root, plain = Scaled(factor, entries.requires_grad_().expand(2, 6, 5)).norm(), (factor.materialize() * entries).flatten(1).norm(dim=1)
    assert_trees_close(root.detach(), plain.detach())
    assert_trees_close(*(torch.autograd.grad(norm.sum(), entries) for norm in (root, plain)), per_sample=False)


@pytest.mark.parametrize("t", [2, 16])
@pytest.mark.parametrize("seed", range(3))
def test_norms_of_few_positions_that_nearly_cancel(seed, t, device):
    """As above; rounding would change these norms by 2e-4 if only smaller ones were computed from the gradients."""
    generator = torch.Generator().manual_seed(seed)
    u, r, shift = torch.randn(3, 8, 1, 300, generator=generator, dtype=torch.float32).to(device)
    factor = Outer(torch.cat([r, -r], 1).repeat(1, t // 2, 1), torch.cat([u, u + 0.03 * shift], 1).repeat(1, t // 2, 1))
    with psg.plans.using(norm="gram"):
        found = factor.norm()
    assert_norms(found, factor.to(torch.float64).materialize().flatten(1).norm(dim=1), rtol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_several_factors_of_which_some_nearly_cancel(dtype, device):
    """They are checked together: with a dtype and a number of positions of their own, and other samples that cancel in each."""
    generator = torch.Generator().manual_seed(0)
    tree = {}
    for name, t, own in (("few", 2, torch.float32), ("many", 200, torch.float32), ("other", 16, dtype), ("plain", 3, torch.float32)):
        u, r, shift = torch.randn(3, 8, 1, 60, generator=generator, dtype=torch.float32).to(device)
        signs = torch.tensor([1.0, -1.0], device=device)[None, :, None].repeat(8, 1, 1)
        signs[len(tree) :: 2] = 0.5  # these samples do not cancel
        left, right = torch.cat([r, r], 1) * (1 if name == "plain" else signs), torch.cat([u, u + 0.03 * shift], 1)
        tree[name] = Outer(*(side.repeat_interleave(-(-t // 2), 1).to(own) for side in (left, right)))
    exact = torch.stack([factor.to(torch.float64).materialize().flatten(1).norm(dim=1) for factor in tree.values()]).norm(dim=0)
    with psg.plans.using(norm="gram"):
        found = psg.tree.norm(tree)
        apart = torch.stack([factor.norm().double() for factor in tree.values()]).norm(dim=0)
        with assigned(_base.BOUNDING, True):
            most = psg.tree.norm(tree)
    assert_norms(found, exact, rtol=5e-5)
    torch.testing.assert_close(found.double(), apart, rtol=1e-6, atol=0)
    assert ((most >= exact * (1 - 5e-5)) & (most <= exact + 0.01 * sum(f.squared_terms().double() for f in tree.values()).sqrt())).all()


def halves(n, sides):
    """As samples of their own, the two positions of each sample."""
    return Segments(Outer(*(side.flatten(0, 1).unsqueeze(1) for side in sides)), torch.full((n,), 2, device=sides[0].device))


@pytest.mark.parametrize("kind", ["outer", "rows", "segments", "sum"])
def test_norms_of_sums_of_which_one_term_nearly_cancels(kind, device):
    """Inner products with that term are rounded as much as those of its positions: without a correction these norms are off by 2e-4."""
    generator = torch.Generator().manual_seed(0)
    n, apart, shape = 8, 3e-4, torch.Size((300, 300))
    u, r, shift = torch.randn(3, n, 1, 300, generator=generator, dtype=torch.float32).to(device)
    if kind == "rows":  # r is one row
        r = 300**0.5 * torch.eye(300, device=device, dtype=torch.float32)[0].expand(n, 1, 300)
    like, left, right = r[:, 0, :0], torch.cat([r, -r], 1), torch.cat([u, u + apart * shift], 1)
    first = {
        "outer": lambda: Outer(left, right),
        "rows": lambda: Rows(torch.zeros(n, 2, dtype=torch.int64, device=device), left[:, :, :1] * right, 300),
        "segments": lambda: halves(n, (left, right)),
        "sum": lambda: Sum([Outer(left[:, :1], right[:, :1]), Outer(left[:, 1:], right[:, 1:])], like, shape),
    }[kind]()
    both = Sum([first, Outer(apart * r, u)], like, shape)
    with psg.plans.using(norm="gram"):
        found = both.norm()
    assert_norms(found, both.to(torch.float64).materialize().flatten(1).norm(dim=1), rtol=2e-5)


@pytest.mark.parametrize("kind", ["outer", "views", "segments"])
def test_norms_of_sums_of_terms_of_many_positions_that_nearly_cancel(kind, device):
    """The errors of inner products of positions that repeat add up. Views and Segments counted as one position: norms were off by 6e-5."""
    generator = torch.Generator().manual_seed(0)
    n, t, shape = 8, 2000, torch.Size((60, 60))
    u, r, shift = torch.randn(3, n, 1, 60, generator=generator, dtype=torch.float32).to(device)
    wrapped = {
        "outer": Outer,
        "views": lambda left, right: Views([Outer(left, right)], [Region((60, 60), (60, 1), 0)], shape),
        "segments": lambda left, right: Segments(
            Outer(*(side.reshape(4 * n, -1, 60) for side in (left, right))), torch.full((n,), 4, device=device)
        ),
    }[kind]
    left = torch.cat([r, -r], 1).repeat(1, t // 2, 1)
    rights = (torch.cat([u, u + apart], 1).repeat(1, t // 2, 1) for apart in (0.03 * shift, 0.06 * shift.flip(2)))
    both = Sum([wrapped(left, right) for right in rights], r[:, 0, :0], shape)
    assert both.positions == 2 * t
    with psg.plans.using(norm="gram"):
        found = both.norm()
    assert_norms(found, both.to(torch.float64).materialize().flatten(1).norm(dim=1), rtol=2e-5)


def test_norms_of_what_nearly_cancels_are_of_gradients_that_are_not_rounded(device):
    """The gradient, 2^-6 (1 + 2^-8), is between two numbers of bfloat16."""
    sides = [torch.tensor([[[1 + 2.0**-7], [last]]], dtype=torch.bfloat16, device=device) for last in (1.0, -1.0)]
    exact = torch.tensor([2.0**-6 + 2.0**-14], device=device)
    with psg.plans.using(norm="gram"):
        assert_norms(Outer(*sides).norm(), exact, rtol=0)
        ones = torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device)
        assert_norms(Scaled(Outer(*sides), ones).norm(), exact, rtol=0)
    # 1 + 2^-8, the sum of the rows of one index, is too.
    rows = torch.tensor([[[1.0], [2.0**-8]]], dtype=torch.bfloat16, device=device)
    assert Rows(torch.zeros(1, 2, dtype=torch.int64, device=device), rows, 1).norm().item() == 1 + 2.0**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1 << 20,), (1 << 10, 1 << 10)])
def test_norms_of_many_entries_are_summed_in_blocks(shape, dtype, device):
    """A single float32 sum over so many squares is off by 1e-5."""
    values = torch.rand(2, *shape, device=device).to(dtype)
    torch.testing.assert_close(Dense(values).norm(), values.double().flatten(1).norm(dim=1).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", [None, "gram", "chunks", "keep"])
def test_a_sample_of_zeros_and_huge_inputs_has_the_norm_zero(plan, dtype, device):
    """Squared, the inputs are infinite, and zero times infinity is NaN."""
    left, right = torch.randn(2, 4, 64, device=device), torch.randn(2, 4, 64, device=device)
    left[1], right[1, 0, 0] = 0, 1e20
    factor = Outer(left.to(dtype), right.to(dtype))
    with contextlib.nullcontext() if plan is None else psg.plans.using(norm=anyhow(plan, device)):
        norms = factor.norm()
        assert norms[1] == 0 and norms[0] > 0
        grads = {"w": factor, "b": Dense(torch.ones(2, 3, device=device, dtype=dtype))}
        clipped = psg.tree.clip(grads, 1e9)
        assert int(clipped.nonfinite) == 0
        torch.testing.assert_close(clipped.grads["b"], torch.full((3,), 2.0, device=device, dtype=torch.float32))


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_inner_products_of_gradients_materialized_a_few_at_a_time(chunk, n, monkeypatch, device):
    monkeypatch.setattr(psg._hardware._machine, "chunk_bytes", lambda device: chunk)
    gradient = Outer(torch.randn(n, 3, 6, device=device), torch.randn(n, 3, 5, device=device))
    other = Outer(torch.randn(n, 2, 6, device=device), torch.randn(n, 2, 5, device=device))
    scale = torch.rand(6, 5, device=device)
    scaled = psg.tree.precondition({"w": gradient}, {"w": scale})
    expected = (gradient.materialize() * scale * other.materialize()).sum((1, 2))
    torch.testing.assert_close(psg.tree.inner(scaled, {"w": other}), expected)
    torch.testing.assert_close(psg.tree.inner({"w": other}, scaled), expected)
    torch.testing.assert_close(psg.tree.inner(scaled, scaled), (gradient.materialize() * scale).square().sum((1, 2)))


@pytest.mark.parametrize("t", [16, 128, 1000])
@pytest.mark.parametrize("apart", [1e-3, 8e-3, 2e-2, 5e-2])
@pytest.mark.parametrize("seed", range(3))
def test_norms_of_many_positions_that_repeat(seed, apart, t, device):
    """Two vectors, nearly equal, in turns, with opposite cotangents: the rounding errors of all inner products are the same."""
    generator = torch.Generator().manual_seed(seed)
    u, r, shift = torch.randn(3, 2 if t > 128 else 16, 1, 300, generator=generator, dtype=torch.float32).to(device)
    factor = Outer(torch.cat([r, -r], 1).repeat(1, t // 2, 1), torch.cat([u, u + apart * shift], 1).repeat(1, t // 2, 1))
    exact = factor.to(torch.float64).materialize().flatten(1).norm(dim=1).float()
    with psg.plans.using(norm="gram"):
        assert_norms(factor.norm(), exact, rtol=1e-3)
        traced = make_fx(lambda factor: factor.norm())(factor)(factor)
    assert (traced >= exact * (1 - 1e-3)).all()
