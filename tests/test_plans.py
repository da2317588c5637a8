"""How plans for norms and sums are chosen, and that no choice changes a result."""

import threading

import pytest
import torch
import torch.nn.functional as F
from cases import N
from torch import nn

import psg
from psg import _machine, plans
from psg.factors import Conv, Dense, Geometry, Outer, Rows, _planned
from psg.factors._base import product
from psg.testing import assert_trees_close


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.second = nn.Conv2d(5, 4, 3, stride=2, groups=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.mix = nn.Linear(9, 6)
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        x = self.second(self.first(x).tanh()).tanh()
        x = x + self.again(self.again(x[:, :, ::2]).tanh()).repeat_interleave(2, 2)[:, :, :3]
        return self.head(self.mix(x.flatten(2)).tanh().flatten(1))


@pytest.fixture
def problem(device):
    torch.manual_seed(0)
    loss, params = psg.stateless(Net().to(device), F.cross_entropy)
    return loss, params, torch.randn(N, 3, 8, 8, device=device), torch.randint(3, (N,), device=device)


def outer(device, n=3):
    return Outer(torch.randn(n, 4, 5, device=device), torch.randn(n, 4, 6, device=device))


@pytest.mark.parametrize(
    "settings",
    [
        *({"norm": norm, "gram": gram} for norm in ("keep", "gram", "chunks") for gram in ("pixels", "patches")),
        *({"materialize": materialize} for materialize in ("convolution", "samples", "patches", "correlation")),
        {"keep_bytes": 0},
        {"measure": True},
        {"norm": lambda factor, costs: max(costs, key=costs.get)},
    ],
)
def test_no_choice_changes_a_result(settings, problem):
    loss, params, x, y = problem
    calls = (psg.clipped_grad(loss, 0.5), psg.per_sample_norm(loss), psg.per_sample_grad(loss))
    expected = [call(params, x, y) for call in calls]
    with plans.using(**settings):
        found = [call(params, x, y) for call in calls]
    for own, other in zip(found, expected, strict=True):
        assert_trees_close(own, other, rtol=1e-9)


def test_what_is_asked_for_is_what_runs(problem):
    loss, params, x, y = problem

    def plan(path):
        report = psg.explain(loss)(params, x, y)
        return next(leaf.plan for leaf in report.leaves if path in leaf.path)

    with plans.using(norm="gram", gram="pixels"):
        assert plan("first.weight") == "Gram of pixels, native weight gradient"
        assert plan("mix.weight") == "Gram, one matrix product"
        with plans.using(gram="patches"):  # the rest stays as it is
            assert plan("first.weight") == "Gram of patches, native weight gradient"
        assert plan("first.weight") == "Gram of pixels, native weight gradient"
    with plans.using(norm="keep"):
        assert plan("first.weight") == plan("mix.weight") == "materialised and kept"
        assert plan("head.weight") == "product of norms, one matrix product"  # with one position there is no such plan
    with plans.using(norm="chunks"):
        assert plan("second.weight") == "materialised in chunks, native weight gradient"


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_remembered_costs_are_those_of_the_layout_and_the_machine(kept, threads, device, monkeypatch):
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    factors = [
        *(outer(device, n) for n in (2, 3)),
        *(Conv(torch.randn(2, 1, 4, 8, 8), torch.randn(2, 1, channels, 8, 8), geometry).map(lambda t: t.to(device)) for channels in (3, 5)),
    ]
    before = torch.get_num_threads()
    monkeypatch.setattr(psg.memory, "_kept", kept)
    torch.set_num_threads(threads)
    try:
        for factor in factors * 2:
            questions = (factor._norm_costs, factor._joint_costs, *([factor._materialize_costs] if isinstance(factor, Conv) else []))
            for costs in questions:
                assert costs() == costs.__wrapped__(factor)
    finally:
        torch.set_num_threads(before)


def test_the_options_of_a_convolution_may_be_lists(device):
    cotangent, input = torch.randn(2, 1, 4, 6, 6, device=device), torch.randn(2, 1, 3, 8, 8, device=device)
    factors = [Conv(cotangent, input, Geometry(*(kind(own) for own in ((3, 3), (1, 1), (0, 0), (1, 1))), 1)) for kind in (tuple, list)]
    assert_trees_close(*(factor.norm() for factor in factors))


def test_remembered_costs_are_bounded(device, monkeypatch):
    monkeypatch.setattr(_planned, "_MOST_KNOWN", 3)
    monkeypatch.setattr(_planned, "_known", {})
    costs = [outer(device, n)._joint_costs() for n in range(1, 9)]
    assert len(_planned._known) <= 3
    assert costs == [outer(device, n)._joint_costs() for n in range(1, 9)]


def test_a_function_that_chooses_may_write_into_the_costs(device):
    factor, seen = outer(device), []

    def choice(factor, costs):
        seen.append(dict(costs))
        costs.clear()
        return "gram"

    with plans.using(norm=choice):
        factor.norm(), factor.norm()
    assert seen[0] == seen[1] and len(seen[0]) == 2


def test_settings_are_put_back_after_an_error(device):
    before = plans.settings_key()
    with pytest.raises(ZeroDivisionError), plans.using(norm="gram", keep_bytes=3, measure=True):
        raise ZeroDivisionError
    assert plans.settings_key() == before


def test_settings_are_those_of_a_thread():
    before, inside, left = plans.settings_key(), threading.Event(), threading.Event()

    def other():
        with plans.using(norm="gram"):
            inside.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with plans.using(keep_bytes=1):
        left.set()
        thread.join()
    assert plans.settings_key() == before


def test_a_function_may_choose_for_one_parameter(device):
    seen = []

    def choice(factor, costs):
        seen.append((tuple(factor.shape), set(costs)))
        return "keep" if factor.shape == (5, 6) else "none of them"

    with plans.using(norm=choice):
        assert isinstance(outer(device).settle(), Dense)
        other = Outer(torch.randn(3, 400, 2, device=device), torch.randn(3, 400, 2, device=device))
        settled = other.settle()
    assert isinstance(settled, type(other.settle()))  # the unknown answer is ignored
    assert seen == [((5, 6), {"keep", "gram", "chunks"}), ((2, 2), {"keep", "gram", "chunks"})]


def test_nothing_is_kept_beyond_the_budget(device):
    factor = outer(device)
    with plans.using(norm="keep"):
        with plans.using(keep_bytes=3 * 30 * 8):
            assert isinstance(factor.settle(), Dense)
        with plans.using(keep_bytes=3 * 30 * 8 - 1):
            assert isinstance(factor.settle(), Outer)


@pytest.mark.parametrize("fastest", ["keep", "gram", "chunks"])
def test_measuring_takes_the_fastest_and_measures_once(fastest, device, monkeypatch):
    timed = []

    def time(run, answer, where):
        timed.append(answer)
        run(answer)  # every answer that is timed can run
        return 1.0 if answer == fastest else 2.0

    monkeypatch.setattr(plans, "_time", time)
    monkeypatch.setattr(plans, "_measured", {})
    with plans.using(measure=True):
        kinds = [type(outer(device).settle()) for _ in range(3)]
        assert kinds == [Dense if fastest == "keep" else Outer] * 3
        assert sorted(timed) == ["chunks", "gram", "keep"]
        outer(device, n=4).settle()  # another shape
        assert len(timed) == 6
        outer(device, n=0).settle()  # nothing to time
        assert len(timed) == 6
        with plans.using(norm="gram"):  # a requested plan is not measured
            assert isinstance(outer(device, n=5).settle(), Outer)
        assert len(timed) == 6


def test_a_trace_is_not_measured(problem, monkeypatch):
    monkeypatch.setattr(plans, "_measured", {})
    loss, params, x, y = problem
    clipped = psg.clipped_grad(loss, 0.5)
    traced = psg.jit(clipped, backend="eager")
    expected = clipped(params, x, y)
    with plans.using(measure=True):
        assert_trees_close(traced(params, x, y), expected, rtol=1e-9)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"norm": "grams"}, r"psg\.plans\.using\(norm='grams'\): expected one of \('keep', 'gram', 'chunks'\)"),
        ({"gram": "keep"}, r"psg\.plans\.using\(gram='keep'\): expected one of \('pixels', 'patches'\)"),
        ({"materialize": 3}, r"psg\.plans\.using\(materialize=3\)"),
        ({"keep_bytes": "1 MiB"}, r"psg\.plans\.using\(keep_bytes='1 MiB'\): expected a number of bytes"),
        ({"keep_bytes": -1}, r"psg\.plans\.using\(keep_bytes=-1\): expected .* at least 0"),
    ],
)
def test_errors(settings, message):
    with pytest.raises(psg.InputError, match=message), plans.using(**settings):
        pass


@pytest.mark.parametrize("size, uses, way", [(2, 2, "with their inner products"), (8, 2, "added up"), (4, 6, "added up")])
def test_a_convolution_used_again(size, uses, way, device):
    """The cost of inner products of all pairs of uses is quadratic in their number; that of adding up gradients is linear."""

    def fn(w, *images):
        return sum(F.conv2d(image, w, padding=1).sin().sum() for image in images)

    w = torch.randn(16, 16, 3, 3, device=device)
    images = [torch.randn(N, 16, size, size, device=device) for _ in range(uses)]
    assert way in psg.explain(fn)(w, *images).leaves[0].plan
    psg.check(fn)(w, *images)
    factor = psg.factored_grad(fn)(w, *images)
    rows = factor.materialize().flatten(1)
    assert_trees_close(factor.gram(), rows @ rows.T, per_sample=False)


def test_tables_looked_up_again_are_one_factor(device):
    def fn(table, query, document):
        return (F.embedding(query, table).mean(0) * F.embedding(document, table).sin().sum(0)).sum()

    table, query, document = (
        torch.randn(50, 3, device=device),
        torch.randint(50, (N, 4), device=device),
        torch.randint(50, (N, 7), device=device),
    )
    factor = psg.factored_grad(fn)(table, query, document)
    assert type(factor) is Rows and factor.index.shape == (N, 11)
    psg.check(fn)(table, query, document)


@pytest.fixture
def blocks(monkeypatch):
    """Compute all products in blocks, on any processor and of any size."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(_machine, "_mkl_is_untuned", lambda: True)
    monkeypatch.setattr(_machine, "_LARGE_PRODUCT", 1)
    monkeypatch.setattr(_machine, "_LARGE_SUM", 1)
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "rows, inner, columns", [(192, 5, 7), (256, 1, 192), (260, 3, 1), (194, 5, 7), (192, 2, 1000), (188, 5, 7), (192, 0, 3)]
)
def test_products_in_blocks_of_rows(rows, inner, columns, blocks):
    for left in (torch.randn(rows, inner), torch.randn(inner, rows).T):
        left, right = left.float(), torch.randn(columns, inner).T.float()
        divided = rows % 4 == 0 and rows >= 192 and columns < 1000 and inner > 0
        assert _machine.row_blocks(left, right) == (blocks if divided else 1)
        torch.testing.assert_close(product(left, right), left @ right)
        assert _machine.row_blocks(left.double(), right.double()) == 1


@pytest.mark.parametrize("n, columns", [(3, 8), (1, 4), (5, 6), (0, 4), (2, 0), (4, 1)])
def test_weighted_sums_in_blocks_of_columns(n, columns, blocks):
    rows, weights = torch.randn(n, columns).float(), torch.randn(n).float()
    assert _machine.column_blocks(rows) == (blocks if rows.numel() and columns % 4 == 0 else 1)
    for values in (rows, rows.unflatten(1, (-1, 2)) if columns % 2 == 0 and columns else rows):
        torch.testing.assert_close(Dense(values).weighted_sum(weights), torch.tensordot(weights, values, 1))
    assert _machine.column_blocks(rows.double()) == 1


@pytest.mark.parametrize("n, m, inner", [(3, 2, 256), (1, 1, 64), (4, 5, 256), (4, 4, 258), (0, 2, 256), (2, 3, 0)])
def test_inner_products_in_blocks(n, m, inner, blocks):
    left, right = torch.randn(n, inner).float(), torch.randn(m, inner).float()
    divided = n * m * inner > 0 and inner >= 64 * max(n, m) and inner % 4 == 0
    assert _machine.inner_blocks(left, right) == (blocks if divided else 1)
    torch.testing.assert_close(Dense(left).gram(Dense(right)), left @ right.T)
    assert _machine.inner_blocks(left.double(), right.double()) == 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_in_blocks_of_rows(bias, dtype, blocks, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 200, bias=bias), nn.ReLU(inplace=True), nn.Linear(200, 192, bias=bias)).float()
    loss, params = psg.stateless(model, lambda output, y: (output * y).float().mean())
    x, y = torch.randn(4, 48, 8).float(), torch.randn(4, 48, 192).float()
    divided = []
    monkeypatch.setattr(_machine, "row_blocks", lambda *sides, own=_machine.row_blocks: divided.append(own(*sides)) or divided[-1])
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found, expected = (psg.clipped_grad(loss, 1e-3, method=method)(params, x, y) for method in ("capture", "loop"))
    assert 4 in divided
    assert_trees_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 3e-2)


def test_a_bias_of_another_dtype_is_refused_in_blocks_too(blocks):
    weight, bias, x = torch.randn(192, 8).float(), torch.randn(192).double(), torch.randn(4, 48, 8).float()
    with pytest.raises(RuntimeError, match="dtype"):
        psg.per_sample_grad(lambda params, x: F.linear(x, *params).sum())((weight, bias), x)
