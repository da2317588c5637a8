"""How plans for norms and sums are chosen, and that no choice changes a result."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cases import N
from conftest import as_large
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import psg
from psg import plans
from psg._capture import _backward
from psg._hardware import _machine
from psg._torch import _autograd
from psg.factors import Conv, Dense, Geometry, Outer, Region, Rows, Sum, Views, _base, _planned, merge
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
        {"norm": "chunks", "sum": "kernel"},  # which there is not for float64
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


def test_what_is_asked_for_is_what_runs(problem, monkeypatch):
    as_large(monkeypatch)
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
    monkeypatch.setattr(psg._hardware._memory, "_kept", kept)
    torch.set_num_threads(threads)
    try:
        for factor in factors * 2:
            questions = (factor._norm_costs, factor._joint_costs, *([factor._materialize_costs] if isinstance(factor, Conv) else []))
            for costs in questions:
                assert costs() == costs.__wrapped__(factor)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "channels, kernel, images, by_sample",
    [
        (3, (3, 7, 7), 1, True),
        (20, (5, 5, 5), 1, True),  # no whole blocks of channels: as groups of one convolution, patches would be formed
        (24, (5, 5, 5), 1, True),
        (12, (1, 5, 5), 1, True),
        (3, (3, 5, 5), 2, True),
        (20, (3, 3, 3), 2, True),  # torch calls oneDNN for several images,
        (20, (3, 3, 3), 1, False),  # but not for one that is small
        (12, (5, 5, 5), 1, False),
        (24, (1, 5, 5), 1, False),
        (32, (5, 5, 5), 1, False),
    ],
)
def test_convolutions_in_space_call_the_kernel_that_forms_no_patches(channels, kernel, images, by_sample):
    geometry = Geometry(kernel, (1, 2, 2), (0, 0, 0), (1, 1, 1), 1)
    size = 8, 24, 24
    out = [(whole - taps) // stride + 1 for whole, taps, stride in zip(size, kernel, geometry.stride, strict=True)]
    factor = Conv(torch.zeros(4, images, 16, *out).float(), torch.zeros(4, images, channels, *size).float(), geometry)
    costs = factor._materialize_costs()
    assert (min(costs, key=costs.__getitem__) == "samples") == by_sample


def test_the_options_of_a_convolution_may_be_lists(device):
    cotangent, input = torch.randn(2, 1, 4, 6, 6, device=device), torch.randn(2, 1, 3, 8, 8, device=device)
    factors = [Conv(cotangent, input, Geometry(*(kind(own) for own in ((3, 3), (1, 1), (0, 0), (1, 1))), 1)) for kind in (tuple, list)]
    assert_trees_close(*(factor.norm() for factor in factors))


def test_remembered_costs_are_bounded(device, monkeypatch):
    monkeypatch.setattr(plans, "_MOST_KNOWN", 3)
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


def test_settings_are_put_back_after_an_error():
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


def test_settings_hold_in_autograds_threads(device, monkeypatch):
    """An accelerator's cotangents arrive in a thread of autograd's own, where large ones become factors at once."""
    pulled, asked = _autograd.pulled, []

    def elsewhere(*args, **options):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(pulled, *args, **options).result()

    def choice(factor, costs):
        asked.append(threading.current_thread())
        return "gram"

    as_large(monkeypatch)
    monkeypatch.setattr(_autograd, "pulled", elsewhere)
    monkeypatch.setattr(_backward, "LARGE", 1)
    params = {"a": torch.randn(4, 3, device=device), "b": torch.randn(4, 4, device=device)}
    with plans.using(norm=choice):
        psg.clipped_grad(lambda p, x: F.linear(F.linear(x, p["a"]).sin(), p["b"]).sin().sum(), 1.0)(
            params, torch.randn(N, 50, 3, device=device)
        )
    assert len(set(asked)) == 2


def test_a_function_may_choose_for_one_parameter(device):
    seen = []

    def choice(factor, costs):
        seen.append((tuple(factor.shape), set(costs)))
        return "keep" if factor.shape == (5, 6) else min(costs, key=costs.get)

    with plans.using(norm=choice):
        assert isinstance(outer(device).settle(), Dense)
        other = Outer(torch.randn(3, 400, 2, device=device), torch.randn(3, 400, 2, device=device))
        settled = other.settle()
    assert isinstance(settled, type(other.settle()))  # as the cost model chooses
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


def test_few_measurements_are_kept(device, monkeypatch):
    monkeypatch.setattr(plans, "_time", lambda run, answer, where: 1.0)
    monkeypatch.setattr(plans, "_measured", measured := {})
    monkeypatch.setattr(plans, "_MOST_KNOWN", 2)
    with plans.using(measure=True):
        for n in range(1, 6):
            outer(device, n=n).settle()
            assert 1 <= len(measured) <= 2


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
        ({"sum": "gram"}, r"psg\.plans\.using\(sum='gram'\): expected one of \('native', 'kernel'\)"),
        ({"materialize": 3}, r"psg\.plans\.using\(materialize=3\)"),
        ({"keep_bytes": "1 MiB"}, r"psg\.plans\.using\(keep_bytes='1 MiB'\): expected a number of bytes"),
        ({"keep_bytes": -1}, r"psg\.plans\.using\(keep_bytes=-1\): expected .* at least 0"),
        ({"measure": "yes"}, r"psg\.plans\.using\(measure='yes'\): expected True or False"),
    ],
)
def test_errors(settings, message):
    with pytest.raises(psg.InputError, match=message):
        plans.using(**settings)  # before it is entered


@pytest.mark.parametrize("answer", [None, "grma", 1, ["gram"], "pixels"], ids=str)
def test_what_a_function_may_not_answer(answer, device):
    side = torch.randn(3, 4, 5, device=device)
    message = rf"psg\.plans\.using\(norm=\.\.\.\): the function returned {re.escape(repr(answer))}; expected one of \('gram', 'chunks'\)"
    with pytest.raises(psg.InputError, match=message), plans.using(norm=lambda factor, costs: answer):
        Outer(side, side).norm()


def test_a_function_may_answer_what_a_parameter_does_not_have(device):
    side = torch.randn(3, 4, 5, device=device)
    with plans.using(norm=lambda factor, costs: "keep"):
        assert_trees_close(Outer(side, side).norm(), Outer(side, side).materialize().flatten(1).norm(dim=1))


@pytest.mark.parametrize(
    "sizes, way",
    [
        ((1, 2), "Conv + Conv, with their inner products"),
        ((8, 9), "Conv + Conv, added up"),
        ((4, 5, 6, 7, 8, 9), "Conv + Conv + Conv + Conv + Conv + Conv, added up"),
        ((2, 2), "Gram of "),
        ((4,) * 6, "materialised and kept"),
        ((9, 9), "Conv + Conv, added up and kept"),
    ],
    ids=str,
)
def test_a_convolution_used_again(sizes, way, device):
    """On images of one size as one of more images; on others by inner products of all pairs, or if there are many by their sum."""

    def fn(w, *images):
        return sum(F.conv2d(image, w, padding=1).sin().sum() for image in images)

    w = torch.randn(16, 16, 3, 3, device=device)
    images = [torch.randn(N, 16, size, size, device=device) for size in sizes]
    with mock.patch.object(_base, "_TINY", 0):  # small gradients are materialised on devices whose values cannot be read
        assert way in psg.explain(fn)(w, *images).leaves[0].plan
    psg.check(fn)(w, *images)
    factor = psg.factored_grad(fn)(w, *images)
    rows = factor.materialize().flatten(1)
    assert_trees_close(factor.gram(), rows @ rows.T, per_sample=False)


@pytest.mark.parametrize("size, dilations", [((32,), (1, 2, 4, 8)), ((6, 6), (1, 2, 3))], ids=["long", "in pairs"])
def test_a_sum_is_kept_where_none_of_its_terms_would_be_alone(size, dilations, device, monkeypatch):
    """Its norm takes all of them, or the patches of every pair; after that a weighted sum would take all once more."""
    monkeypatch.setattr(_machine, "pages_are_kept", lambda: True)
    dims, side = len(size), torch.randn(16, 1, 96, *size, device=device)
    each = [Geometry((3,) * dims, (1,) * dims, (d,) * dims, (d,) * dims, 1) for d in dilations]
    factor = merge([Conv(side, side, geometry) for geometry in each])
    assert isinstance(factor, Sum) and len(factor.terms) == len(dilations)
    narrow = factor.to(torch.float32)
    if side.is_cpu:
        assert not any(term.is_kept for term in narrow.terms)
        assert type(narrow.settle()) is Dense and narrow.plan().endswith("added up and kept")
    dense, weights = Dense(factor.materialize()), torch.rand(16, device=device)
    with plans.using(keep_bytes=0):
        assert type(narrow.settle()) is Sum
    for norm in ("keep", "gram", "chunks"):
        with plans.using(norm=norm):
            settled = factor.settle()
            assert_trees_close(settled.norm(), dense.norm())
            assert_trees_close(settled.weighted_sum(weights), dense.weighted_sum(weights), per_sample=False)


@given(
    uses=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)),
    groups=st.integers(1, 2),
    n=st.sampled_from([0, 1, 3]),
    norm=st.sampled_from([None, "keep", "gram", "chunks"]),
    others=st.booleans(),
)
def test_filters_used_again_over_drawn_sizes_and_dilations(uses, sizes, groups, n, norm, others, device):
    outputs, inputs, kernel = sizes
    w = torch.randn(groups * outputs, inputs, kernel, device=device)
    data = [torch.randn(n, groups * inputs, size, device=device) for size, _ in uses]

    def fn(w, *data):
        each = zip(data, uses, strict=True)
        total = sum(F.conv1d(x, w, padding=3, dilation=d, groups=groups).sin().sum() for x, (_, d) in each)
        return total + (w * data[0].sum()).sin().sum() + w.square().sum() if others else total

    with plans.using(norm=norm):
        psg.check(fn)(w, *data)
        found = psg.clipped_grad(fn, 1.0)(w, *data)
    expected = psg.clipped_grad(fn, 1.0, method="loop")(w, *data)
    assert_trees_close(found.norms, expected.norms)
    assert_trees_close(found.grads, expected.grads, per_sample=False, atol=1e-9)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(
    "t, size, uses, kinds",
    [(300, 8, 3, "Outer + Outer + Outer, added up and kept"), (2, 8, 3, ""), (40, 90, 2, "")],
    ids=["many positions", "few positions", "a large matrix"],
)
def test_a_matrix_used_again_at_many_positions_is_added_up(t, size, uses, kinds, layout, device):
    """To join the sides would take longer than to add up gradients that are smaller than these."""

    def fn(w, x):
        for _ in range(uses):
            x = F.linear(x, w).sin() if layout == "rows" else (w @ x).sin()
        return x.sum()

    w, x = torch.randn(size, size, device=device), torch.randn(N, t, size, device=device)
    x = x if layout == "rows" else x.mT.contiguous()
    factor = psg.factored_grad(fn)(w, x)
    if kinds and x.is_cpu:
        assert factor.plan() == kinds and type(factor.settle()) is Dense
    elif x.is_cpu:
        assert type(factor) is Outer and factor.positions == uses * t
    psg.check(fn)(w, x)
    with plans.using(keep_bytes=0):
        assert type(psg.factored_grad(fn)(w, x)) is Outer


@given(
    uses=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    n=st.integers(0, 3),
    others=st.booleans(),
)
def test_matrices_used_again_over_drawn_numbers_of_positions(uses, sizes, n, others, device):
    w = torch.randn(sizes, device=device)
    data = [torch.randn(n, t, sizes[1], device=device) for t in uses]

    def fn(w, *data):
        total = sum(F.linear(x, w).sin().sum() for x in data)
        return total + (w * data[0].sum()).sin().sum() + w.square().sum() if others else total

    psg.check(fn)(w, *data)
    assert_trees_close(psg.clipped_grad(fn, 1.0)(w, *data).norms, psg.per_sample_norm(fn, method="loop")(w, *data))
    # Through the norms too, whose derivatives take no sums in place.
    norm = lambda w: psg.per_sample_norm(fn)(w, *data).sum()  # noqa: E731
    loop = lambda w: psg.per_sample_norm(fn, method="loop")(w, *data).sum()  # noqa: E731
    if n and any(uses):
        assert_trees_close(torch.func.grad(norm)(w), torch.func.grad(loop)(w), per_sample=False, rtol=1e-7, atol=1e-9)


def test_a_matrix_used_again_in_a_compiled_call(device):
    fn = lambda w, x: F.linear(F.linear(x, w).sin(), w).sin().sum()  # noqa: E731
    w, x = torch.randn(8, 8, device=device), torch.randn(N, 90, 8, device=device)
    for transform in (psg.per_sample_grad, psg.per_sample_norm, lambda fn: psg.clipped_grad(fn, 1.0)):
        assert_trees_close(psg.jit(transform(fn), backend="eager")(w, x), transform(fn)(w, x), per_sample=False)


VIEWED = {  # uses of a parameter [4, a, b] through views, by x [t, b]
    "matrix": lambda w, x: F.linear(x, w.flatten(0, 1)).sin().sum(),
    "kernel": lambda w, x: F.conv1d(x.mT, w.flatten(0, 1)[:, :, None]).sin().sum(),
    "layers": lambda w, x: sum(F.linear(x, own).sin().sum() for own in w),
    "layers, used twice": lambda w, x: sum((F.linear(x, own) * F.conv1d(x.mT, own[:, :, None]).mT).sum() for own in w),
    "chunks": lambda w, x: sum((part @ x.mT).sin().sum() for part in w.flatten(0, 1).chunk(2)),
    "one layer": lambda w, x: F.linear(x, w[1]).sin().sum(),
    "one layer, as a kernel": lambda w, x: F.conv1d(x.mT, w[2, :, :, None]).sin().sum(),
}
PENALTIES = {  # terms of the parameter alone
    "squares": lambda w: w.square().sum(),
    "products": lambda w: (w.flatten(1) @ w.flatten(1).T).exp().sum(),
    "squares of a layer": lambda w: w[1].square().sum(),
}


@given(
    uses=st.lists(st.sampled_from(list(VIEWED)), min_size=1, max_size=2),
    penalty=st.sampled_from(list(PENALTIES)),
    n=st.integers(0, 3),
    t=st.integers(1, 50),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_views_and_terms_of_the_parameter_alone_over_drawn_shapes(uses, penalty, n, t, sizes, device):
    w, x = torch.randn(4, *sizes, device=device) / 4, torch.randn(n, t, sizes[1], device=device)

    def fn(w, x):
        return sum(VIEWED[use](w, x) for use in uses) + PENALTIES[penalty](w)

    psg.check(fn)(w, x)
    norms = psg.per_sample_norm(fn, method="loop")(w, x)
    clipped = psg.clipped_grad(fn, 1.0)(w, x)
    assert_trees_close(clipped.norms, norms)
    expected = psg.clipped_grad(fn, 1.0, method="loop")(w, x)
    assert_trees_close(clipped.grads, expected.grads, per_sample=False, atol=1e-9)


@pytest.mark.parametrize("use", ["matrix", "kernel", "layers", "layers, used twice", "chunks"])
@pytest.mark.parametrize("penalty", ["squares", "products"])
def test_what_a_view_holds_is_added_up_where_that_costs_less(use, penalty, device):
    """Gradients of many positions are materialised through a view too: then what else there is of the parameter is added to them."""
    fn = lambda w, x: VIEWED[use](w, x) + PENALTIES[penalty](w)  # noqa: E731
    w, x = torch.randn(4, 8, 8, device=device), torch.randn(N, 300, 8, device=device)
    factor = psg.factored_grad(fn)(w, x)
    assert type(factor) is Dense or factor._plan() == "chunks"
    assert psg.explain(fn)(w, x).leaves[0].plan.endswith(("added up and kept", "dense"))


def test_views_of_few_of_many_entries_keep_their_inner_products(device):
    fn = lambda w, x: F.linear(x, w[1]).sin().sum() + w.square().sum()  # noqa: E731
    w, x = torch.randn(100, 64, 64, device=device), torch.randn(N, 3, 64, device=device)
    with mock.patch.object(_base, "_TINY", 0):  # small gradients are materialised on devices whose values cannot be read
        assert psg.explain(fn)(w, x).leaves[0].plan == "Scaled + Views, with their inner products"
    psg.check(fn)(w, x)


def test_gradients_of_several_views_are_kept_apart(device):
    sides = [torch.randn(N, 90, size, device=device) for size in (3, 5, 4)]
    halves = [Region((3, 5), (5, 1), 0), Region((4, 5), (5, 1), 15)]
    views = Views([Outer(sides[0], sides[1]), Outer(sides[2], sides[1])], halves, torch.Size((7, 5)))
    settled = views.settle()
    assert views.is_kept and type(settled) is Views and all(type(own) is Dense for own in settled.factors)
    assert type(Views(views.factors[:1], [Region((3, 5), (5, 1), 0)], torch.Size((15,))).settle()) is Dense
    assert not Views(views.factors[:1], halves[:1], torch.Size((7, 5))).is_kept
    with plans.using(keep_bytes=0):
        assert not views.is_kept


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


@pytest.mark.parametrize("norm", ["keep", "chunks"])
@pytest.mark.parametrize("transform", [psg.per_sample_norm, lambda fn: lambda *args: psg.clipped_grad(fn, 1.0)(*args).norms])
@pytest.mark.parametrize("tied", [False, True])
def test_norms_of_terms_that_cancel_come_from_gradients_in_a_compiled_call(tied, transform, norm, device):
    w = torch.randn(50, 30, device=device)
    if tied:
        ids, u = torch.randint(50, (2, 4), device=device), torch.randn(2, 4, 30, device=device)
        fn = lambda w, ids, x, y: (F.embedding(ids, w) * y).sum() - (F.linear(x, w) * F.one_hot(ids, 50)).sum()  # noqa: E731
        first, batch = (ids, torch.randn_like(u), u), (ids, u + 1e-5 * torch.randn_like(u), u)
    else:
        a, b = torch.randn(2, 32, 30, device=device), torch.randn(2, 32, 50, device=device)
        fn = lambda w, x, y: (F.linear(x, w) * y).sum()  # noqa: E731
        batch = torch.cat([a, a + 1e-5 * torch.randn_like(a)], 1), torch.cat([b, -b], 1)
        first = tuple(map(torch.randn_like, batch))
    with plans.using(norm=norm):
        compiled = psg.jit(transform(fn), backend="eager")
        compiled(w, *first)
        found = compiled(w, *batch)
    exact = [part.double() if part.is_floating_point() else part for part in batch]
    expected = psg.per_sample_norm(fn, method="loop")(w.double(), *exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("transform", [psg.per_sample_norm, lambda fn: lambda *args: psg.clipped_grad(fn, 1.0)(*args).norms])
def test_small_gradients_of_few_terms_are_formed_in_a_compiled_call(transform, device):
    """Inner products would take less time, but where terms cancel a trace could only raise such a norm."""
    w, u, v = (torch.randn(*shape, device=device) for shape in ((50, 30), (2, 1, 30), (2, 1, 50)))
    fn = lambda w, x, y: (F.linear(x, w) * y).sum()  # noqa: E731
    batch = torch.cat([u, u + torch.finfo(u.dtype).eps ** 0.5 * torch.randn_like(u)], 1), torch.cat([v, -v], 1)
    compiled = psg.jit(transform(fn), backend="eager")
    compiled(w, *map(torch.randn_like, batch))
    expected = psg.per_sample_norm(fn, method="loop")(w.double(), *(part.double() for part in batch))
    torch.testing.assert_close(compiled(w, *batch).double(), expected, rtol=1e-2, atol=0)


def test_an_answer_of_infinite_cost_is_not_timed():
    ran = []
    factor = Dense(torch.ones(2, 3))
    with plans.using(measure=True):
        assert plans.choose("norm", {"gram": 0.0, "chunks": float("inf")}, factor, ran.append) == "gram"
    assert "chunks" not in ran
