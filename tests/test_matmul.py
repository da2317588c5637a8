"""Matrix products where a library needs help: MKL by oneDNN, and in blocks; cuBLAS by rows of whole blocks."""

import sys
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees
from cases import Problem, score
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import psg
from psg._hardware import _matmul
from psg.factors import Dense, Outer
from psg.testing import assert_trees_close, layouts, tensors

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def untuned(monkeypatch):
    """Four threads of a processor for which MKL is not tuned, and products of any size that count as large."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(_matmul, "_mkl_is_untuned", lambda: True)
    monkeypatch.setattr(_matmul, "_LARGE_FOR_ONEDNN", 1)
    monkeypatch.setattr(_matmul, "_LARGE_PRODUCT", 1)
    monkeypatch.setattr(_matmul, "_LARGE_SUM", 1)
    monkeypatch.setattr(_matmul, "_LARGE_NARROW", 1)
    monkeypatch.setattr(sys.modules["psg.rules.linear"], "_FEW", 0)
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(threads)


@contextmanager
def onednn(enabled):
    """Switch oneDNN on or off. To set the attribute is an error once torch.testing._internal is imported; torch's context sets TF32 too."""
    before, *_ = torch.backends.mkldnn.set_flags(enabled)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


@pytest.mark.parametrize(
    "rows, inner, columns", [(192, 5, 7), (256, 1, 192), (260, 3, 1), (194, 5, 7), (192, 2, 1000), (188, 5, 7), (192, 0, 3)]
)
def test_products_in_blocks_of_rows(rows, inner, columns, untuned):
    for left in (torch.randn(rows, inner), torch.randn(inner, rows).T):
        left, right = left.float(), torch.randn(columns, inner).T.float()
        divided = rows % 4 == 0 and rows >= 192 and columns < 1000
        assert _matmul.row_blocks(left, right) == (untuned if divided else 1)
        with onednn(False):
            torch.testing.assert_close(_matmul.product(left, right), left @ right)
        assert _matmul.row_blocks(left.double(), right.double()) == 1


@pytest.mark.parametrize("batch", [(), (0,), (3,)])
@pytest.mark.parametrize("t", [0, 1, 5])
@pytest.mark.parametrize("a, b, narrow", [(128, 32, True), (40, 1, True), (12, 3, True), (11, 3, False), (140, 33, False), (4, 40, False)])
def test_products_with_few_columns(batch, t, a, b, narrow, untuned):
    left, right = torch.randn(*batch, t, a).float(), torch.randn(*batch, t, b).float()
    found = _matmul.cross(left, right)
    torch.testing.assert_close(found, left.mT @ right)
    assert found.is_contiguous()
    if left.numel() and right.numel():
        firsts = {args[0].shape[-2] for args in products_of(_matmul.cross, left, right)}
        assert firsts == ({b} if narrow else {a})
        assert {args[0].shape[-2] for args in products_of(_matmul.cross, left.double(), right.double())} == {a}


def products_of(fn, *args):
    """The arguments of all matrix products that a call runs."""

    class Products(TorchDispatchMode):
        found: list[tuple[torch.Tensor, ...]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("aten::mm", "aten::bmm"):
                self.found.append(args)
            return func(*args, **(kwargs or {}))

    with Products() as products:
        fn(*args)
    return products.found


@pytest.mark.parametrize("few", [1, 2, 8, 9])
@pytest.mark.parametrize("layout", ["rows", "columns", "expanded", "every other"])
@pytest.mark.parametrize("tall", [True, False])
def test_thin_matrices_are_laid_out_lengthwise(few, layout, tall, untuned):
    shape = (20, few) if tall else (few, 20)
    matrix = {
        "rows": torch.randn(shape),
        "columns": torch.randn(shape[::-1]).T,
        "expanded": torch.randn(20, 1).expand(20, few) if tall else torch.randn(1, 20).expand(few, 20),
        "every other": torch.randn(*shape, 2)[..., 0],
    }[layout].float()
    left, bias = torch.randn(300, shape[0]).float(), torch.randn(shape[1]).float()
    torch.testing.assert_close(_matmul.product(left, matrix), left @ matrix)
    torch.testing.assert_close(_matmul.affine(left, matrix.T, bias), left @ matrix + bias)
    found = _matmul._lengthwise(matrix, 300)
    assert torch.equal(found, matrix)
    if 1 < few <= 8:
        assert (found.T if tall else found).is_contiguous()
    else:
        assert found is matrix
    ((_, given),) = products_of(_matmul.product, left.double(), matrix.double())
    assert given.stride() == matrix.double().stride()


@needs_onednn
@pytest.mark.parametrize("rows, inner, columns", [(1, 1, 1), (5, 1, 3), (1, 6, 4), (7, 64, 33), (0, 2, 3), (2, 0, 3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_onednn(rows, inner, columns, transposed, untuned):
    left = torch.randn(rows, inner).float()
    right = (torch.randn(columns, inner).T if transposed else torch.randn(inner, columns)).float()
    taken = rows * inner * columns > 0
    assert _matmul.takes_onednn(left, right) == taken
    torch.testing.assert_close(_matmul.product(left, right), left @ right)
    for bias in (None, torch.randn(columns).float()):
        torch.testing.assert_close(_matmul.affine(left, right.T, bias), F.linear(left, right.T, bias))
    assert not _matmul.takes_onednn(left.double(), right.double())
    assert not _matmul.takes_onednn(left.bfloat16(), right.bfloat16())
    if rows > 1 and inner > 1:
        assert not _matmul.takes_onednn(left.T.contiguous().T, right)  # it would be copied
    torch.set_num_threads(3)
    assert not _matmul.takes_onednn(left, right)
    torch.set_num_threads(4)
    with onednn(False):
        assert not _matmul.takes_onednn(left, right)


@needs_onednn
@pytest.mark.parametrize("layout", ["expanded", "every other", "overlapping"])
def test_weights_in_any_layout_by_onednn(layout, untuned):
    def laid_out(*shape):
        if layout == "expanded":
            return torch.randn(()).float().expand(shape)
        if layout == "every other":
            return torch.randn(*shape, 2).float()[..., 0]
        return torch.randn(sum(shape)).float().as_strided(shape, (1,) * len(shape))

    left, weight, bias = torch.randn(5, 4).float(), laid_out(6, 4), laid_out(6)
    assert _matmul.takes_onednn(left, weight.T)
    torch.testing.assert_close(_matmul.product(left, weight.T), left @ weight.T.contiguous())
    for own in (weight, torch.randn(6, 4).float()):
        torch.testing.assert_close(_matmul.affine(left, own, bias), left @ own.T.contiguous() + bias)


@needs_onednn
@pytest.mark.parametrize("differentiated", [(True, False, False), (True, True, False), (False, False, True)])
def test_derivatives(differentiated, untuned):
    sides = [torch.randn(*shape).float().requires_grad_(own) for shape, own in zip(((5, 4), (3, 4), (3,)), differentiated, strict=True)]
    asked = [side for side in sides if side.requires_grad]
    cotangent = torch.randn(5, 3).float()
    found, expected = (torch.autograd.grad(op(*sides), asked, cotangent) for op in (_matmul.affine, F.linear))
    torch.testing.assert_close(found, expected)
    if differentiated[0]:
        left, right = sides[0], sides[1].detach().T.requires_grad_()
        (found,), (expected,) = (torch.autograd.grad(op(left, right), right, cotangent) for op in (_matmul.product, torch.mm))
        torch.testing.assert_close(found, expected)


@needs_onednn
def test_under_transforms(untuned):
    left, right = torch.randn(6, 5, 4).float(), torch.randn(4, 3).float()
    for op, native in ((_matmul.product, torch.mm), (lambda x, y: _matmul.affine(x, y.T), torch.mm)):
        torch.testing.assert_close(torch.func.vmap(op, (0, None))(left, right), left @ right)
        for transform in (torch.func.jacrev, torch.func.jacfwd):
            torch.testing.assert_close(transform(op, (0, 1))(left[0], right), transform(native, (0, 1))(left[0], right))
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(op(forward_ad.make_dual(left[0], left[1]), right)).tangent
        torch.testing.assert_close(tangent, left[1] @ right)


@pytest.mark.parametrize("n, columns", [(3, 8), (1, 4), (5, 6), (0, 4), (2, 0), (4, 1)])
def test_weighted_sums_in_blocks_of_columns(n, columns, untuned):
    rows, weights = torch.randn(n, columns).float(), torch.randn(n).float()
    assert _matmul.column_blocks(rows) == (untuned if rows.numel() and columns % 4 == 0 else 1)
    for values in (rows, rows.unflatten(1, (-1, 2)) if columns % 2 == 0 and columns else rows):
        torch.testing.assert_close(Dense(values).weighted_sum(weights), torch.tensordot(weights, values, 1))
    assert _matmul.column_blocks(rows.double()) == 1


@pytest.mark.parametrize("n, m, inner", [(3, 2, 256), (1, 1, 64), (4, 5, 256), (4, 4, 258), (0, 2, 256), (2, 3, 0)])
def test_inner_products_in_blocks(n, m, inner, untuned):
    left, right = torch.randn(n, inner).float(), torch.randn(m, inner).float()
    divided = n * m * inner > 0 and inner >= 64 * max(n, m) and inner % 4 == 0
    assert _matmul.inner_blocks(left, right) == (untuned if divided else 1)
    torch.testing.assert_close(Dense(left).gram(Dense(right)), left @ right.T)
    assert _matmul.inner_blocks(left.double(), right.double()) == 1


def recorded(monkeypatch, decision):
    """The list to which a decision of `_matmul` appends its results from now on."""
    results = []
    own = getattr(_matmul, decision)
    monkeypatch.setattr(_matmul, decision, lambda *sides: results.append(own(*sides)) or results[-1])
    return results


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("enabled", [pytest.param(True, marks=needs_onednn), False])
def test_layers(bias, dtype, enabled, untuned, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 200, bias=bias), nn.ReLU(inplace=True), nn.Linear(200, 192, bias=bias)).float()
    loss, params = psg.stateless(model, lambda output, y: (output * y).float().mean())
    x, y = torch.randn(4, 48, 8).float(), torch.randn(4, 48, 192).float()
    blocks, taken = recorded(monkeypatch, "row_blocks"), recorded(monkeypatch, "takes_onednn")
    with onednn(enabled), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found, expected = (psg.clipped_grad(loss, 1e-3, method=method)(params, x, y) for method in ("capture", "loop"))
    assert 4 in blocks
    assert (True in taken) == (enabled and dtype == torch.float32)
    assert_trees_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 3e-2)


def test_a_bias_of_another_dtype_is_refused_here_too(untuned):
    weight, bias, x = torch.randn(192, 8).float(), torch.randn(192).double(), torch.randn(4, 48, 8).float()
    with pytest.raises(RuntimeError, match="dtype"):
        psg.per_sample_grad(lambda params, x: F.linear(x, *params).sum())((weight, bias), x)


@st.composite
def products(draw):
    """Two layers, the second of them a linear layer, a matrix product, one with a bias, or a recurrent layer."""
    n, t, i, h, o = draw(st.integers(0, 3)), draw(st.integers(1, 3)), *(draw(st.sampled_from([1, 2, 3, 4, 9])) for _ in range(3))
    params = {"w": draw(layouts(draw(tensors((h, i))))), "v": draw(layouts(draw(tensors((h, o))))), "b": draw(tensors((o,)))}
    x, kind = draw(layouts(draw(tensors((n, t, i))))), draw(st.sampled_from(["linear", "matmul", "addmm", "recurrent"]))

    def fn(p, x):
        hidden = F.linear(x, p["w"]).tanh()
        if kind == "recurrent":
            weights = [p["v"].T, x.new_full((o, o), 0.1)]
            return score(torch.rnn_tanh(hidden[None], x.new_zeros(1, 1, o), weights, False, 1, 0.0, False, False, True)[0])
        if kind == "linear":
            return score(F.linear(hidden, p["v"].T, p["b"]))
        return score(hidden @ p["v"] if kind == "matmul" else torch.addmm(p["b"], hidden, p["v"]))

    return Problem(fn, (params, x))


@given(problem=products())
def test_every_product_by_a_node_of_psg(problem):
    # In float64, which oneDNN does not have.
    taken = {"_is_slow": lambda *_: True, "takes_onednn": lambda *_: True, "_LARGE_PRODUCT": 0, "_onednn": F.linear}
    with mock.patch.multiple(_matmul, **taken), mock.patch.object(sys.modules["psg.rules.linear"], "_FEW", 0):
        assert_agrees(problem)


@given(problem=products())
def test_every_product_with_few_columns(problem):
    taken = {"_is_slow": lambda *_: True, "_LARGE_NARROW": 0, "_LARGE_PRODUCT": 0}
    with mock.patch.multiple(_matmul, **taken), mock.patch.object(sys.modules["psg.rules.linear"], "_FEW", 0):
        assert_agrees(problem)


@needs_onednn
def test_a_compiled_graph_has_no_op_that_a_compiler_cannot_fuse(untuned, monkeypatch):
    taken = recorded(monkeypatch, "takes_onednn")
    params, x = (torch.randn(4, 3).float(),), torch.randn(2, 5, 3).float()
    clipped = psg.clipped_grad(lambda p, x: score(F.linear(x, *p)), clip_norm=0.5)
    found = psg.jit(clipped, backend="eager")(params, x)
    assert False in taken
    assert_trees_close(found.grads, clipped(params, x).grads, per_sample=False, rtol=1e-5)
    assert True in taken


@needs_onednn
def test_a_weight_that_is_written_into_before_the_backward_pass_is_noticed(untuned):
    weight = torch.randn(3, 4).float()
    output = _matmul.affine(torch.randn(5, 4).float().requires_grad_(), weight)
    weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.fixture
def tensor_cores(monkeypatch):
    """As on a GPU whose tensor cores multiply everything, and where every copy pays."""
    monkeypatch.setattr(_matmul, "multiplies_by_tensor_cores", lambda tensor: True)
    monkeypatch.setattr(_matmul, "_USES", 1)
    monkeypatch.setattr(_matmul, "_LARGE_SIDE", 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outs, ins", [(5, 7), (4, 8), (8, 3), (3, 8)])
def test_factors_with_rows_of_odd_lengths(dtype, outs, ins, tensor_cores):
    left, right = torch.randn(3, 4, outs).to(dtype), torch.randn(3, 4, ins).to(dtype)
    block = 16 // dtype.itemsize
    assert _matmul.whole_rows(left, ins).shape[2] == -(-outs // block) * block
    factor, exact, weights = Outer(left, right), Outer(left, right).to(torch.float64).materialize(), torch.rand(3)
    with psg.plans.using(norm="gram"):
        norms = factor.norm()
    total = factor.weighted_sum(weights)
    assert total.shape == (outs, ins) and total.is_contiguous()
    rtol = 1e-6 if dtype == torch.float64 else 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert_trees_close(norms.double(), exact.flatten(1).norm(dim=1), rtol=rtol)
    assert_trees_close(total.double(), torch.einsum("n,nab->ab", weights, exact), rtol=rtol, per_sample=False)


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_of_odd_lengths(bias, tensor_cores):
    rows, weight = torch.randn(6, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    given = (rows, weight, torch.randn(5, requires_grad=True) if bias else None)
    output = _matmul._affine_of_whole_rows(*given)
    assert output.is_contiguous()
    torch.testing.assert_close(output, F.linear(*given))
    assert torch.autograd.gradcheck(_matmul._affine_of_whole_rows, given)


def test_few_uses_and_small_sides_are_left_alone(monkeypatch):
    monkeypatch.setattr(_matmul, "multiplies_by_tensor_cores", lambda tensor: True)
    small, large = torch.randn(4, 5), torch.randn(1 << 18, 5)
    assert _matmul.whole_rows(small, 1000) is small
    assert _matmul.whole_rows(large, 255) is large
    assert _matmul.whole_rows(large, 256).shape == (1 << 18, 6)
