"""capture -> vmap(grad) -> loop: which rung runs, what it says, and whose error it raises."""

import contextlib
import gc
import math
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import is_right_under_vmap
from cases import N, each_case, score
from differentiation import Times
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import psg
from psg._ladder._chunks import RowCollector
from psg._torch import _functions
from psg.testing import assert_trees_close, loop_grad, loop_value_and_grad
from psg.testing._loop import tree_map


def rung(fn, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", psg.FallbackWarning)
        return psg.explain(fn, **options)(*args).rung


@pytest.fixture
def args(device):
    return torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)


def plain(w, x):
    return score(F.linear(x, w))


def asks_the_sample(w, x):
    """Every sample gives another Python value, so only a loop can run it."""
    return plain(w, x) * x.sum().item()


def writes_into_the_parameter(w, x):
    """Lifted, every sample has its own copy to write into; vmap(grad) and the loop write into copies too."""
    with torch.no_grad():
        w[:1].clamp_(max=0.1)
    return plain(w, x)


# --- which rung ---------------------------------------------------------------------------------------------


@each_case()
@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_every_case_runs_on_the_rung_that_its_row_says(case, device):
    problem = case.build(device)
    expected = "capture" if not case.not_capture else "vmap" if not case.not_vmap else "loop"
    report = psg.explain(problem.fn, **problem.options)(*problem.args, **problem.shared)
    assert report.rung == expected, report.reasons


def test_method_pins_the_rung(args):
    assert [rung(plain, *args, method=method) for method in ("auto", "capture", "vmap", "loop")] == [
        "capture", "capture", "vmap", "loop",
    ]  # fmt: skip


def test_rules_disabled_is_the_plain_path(args):
    with psg.rules.disabled():
        assert rung(plain, *args) == "vmap"
    assert rung(plain, *args) == "capture"


def test_rules_stay_disabled_only_inside(args):
    with pytest.raises(ZeroDivisionError), psg.rules.disabled():
        raise ZeroDivisionError
    assert rung(plain, *args) == "capture"


# --- the warning --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn, reached, passed",
    [(asks_the_sample, "loop", ["capture", "vmap"]), (writes_into_the_parameter, "vmap", ["capture"])],
    ids=["item", "write into a parameter"],
)
def test_the_warning_says_why_and_what_it_costs(fn, reached, passed, args):
    with pytest.warns(psg.FallbackWarning) as caught:
        grads = psg.per_sample_grad(fn)(*args)
    assert_trees_close(grads, loop_grad(fn)(*args))
    (warning,) = caught
    text = str(warning.message)
    for part in (f"per_sample_grad({fn.__name__})", f"method={reached!r}", "cost"):
        assert part in text
    line = f"{__file__}:{fn.__code__.co_firstlineno + (2 if fn is asks_the_sample else 3)}"
    own = (f"item at {line} gives", f"RuntimeError at {line}: vmap") if fn is asks_the_sample else (f"a view of one, at {line})",)
    assert all(reason in text for reason in own)
    for above in passed:
        assert f"{above} could not run it (" in text
    assert ("held in full" if reached == "vmap" else "for every sample") in text


def test_the_warning_points_at_the_call(args):
    with pytest.warns(psg.FallbackWarning) as caught:
        psg.per_sample_grad(asks_the_sample)(*args)
    assert caught[0].filename == __file__


def test_a_warning_that_is_made_an_error_is_raised_by_every_call(args):
    with warnings.catch_warnings():
        warnings.simplefilter("error", psg.FallbackWarning)
        for _ in range(2):
            with pytest.raises(psg.FallbackWarning, match="could not run it"):
                psg.per_sample_grad(asks_the_sample)(*args)


def test_the_warning_comes_once_for_a_function_and_a_reason(args):
    grad, norm = psg.per_sample_grad(asks_the_sample), psg.per_sample_norm(asks_the_sample)
    with pytest.warns(psg.FallbackWarning):
        grad(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad(*args)
        norm(*args)
    with pytest.warns(psg.FallbackWarning):
        psg.per_sample_grad(writes_into_the_parameter)(*args)


@pytest.mark.parametrize(
    "fn, method", [(asks_the_sample, "loop"), (writes_into_the_parameter, "vmap"), (writes_into_the_parameter, "loop")]
)
def test_a_pinned_method_does_not_warn(fn, method, args):
    assert_trees_close(psg.per_sample_grad(fn, method=method)(*args), loop_grad(fn)(*args))


@pytest.mark.parametrize(
    "fn, method, error, message",
    [
        (asks_the_sample, "capture", psg.PsgError, r"item at .*test_ladder.py:\d+ gives different Python values for different samples"),
        (lambda w, x: plain(w, x) * len(f"{x.sum()}"), "capture", psg.PsgError, "__format__ at .* gives different Python values"),
        # An op that reads a number which is no size: it was run again and again, up to Python's limit.
        (lambda w, x: plain(w, x) * torch.tensor([x.sum(), 1.0]).sum(), "capture", RuntimeError, "calling .item()"),
        (asks_the_sample, "vmap", RuntimeError, "vmap"),
        (writes_into_the_parameter, "capture", psg.PsgError, "writes into a parameter"),
    ],
)
def test_a_pinned_method_does_not_fall(fn, method, error, message, args):
    with pytest.raises(error, match=message):
        psg.per_sample_grad(fn, method=method)(*args)


def test_gradients_of_sequences_that_are_cut_to_different_lengths_stay_factored(device):
    def loss(params, ids, length):
        rows = F.embedding(ids[: int(length)], params["table"])
        return F.linear(rows, params["w"]).tanh().mean(0).square().sum()

    params = {"table": torch.randn(500, 16, device=device), "w": torch.randn(64, 16, device=device)}
    batch = torch.randint(500, (6, 8), device=device), torch.tensor([8, 5, 8, 3, 5, 8], device=device)
    grads = psg.factored_grad(loss)(params, *batch)
    assert (type(grads["table"]), type(grads["w"])) == (psg.factors.Rows, psg.factors.Outer)
    psg.check(loss)(params, *batch)


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_samples_that_go_different_ways_are_captured_apart(n, randomness, device):
    def fn(w, x):
        y = F.linear(x, w)
        way = "up" if x.sum() > 0 else "down"
        return (score(y) if way == "up" else 2 * score(y)), {"twice": 2 * x, "constant": 7}

    w, x = torch.randn(4, 3, device=device), torch.randn(n, 3, device=device)
    values, expected = loop_value_and_grad(lambda w, x: fn(w, x)[0])(w, x)
    transform = psg.per_sample_value_and_grad(fn, has_aux=True, method="capture", randomness=randomness)
    (found_values, aux), found = transform(w, x)
    assert_trees_close(found, expected)
    assert_trees_close(found_values, values)
    assert torch.equal(aux["twice"], 2 * x) and aux["constant"] == 7
    factored = psg.factored_grad(lambda w, x: fn(w, x)[0], method="capture")(w, x)
    assert type(factored).__name__ == "Outer"


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_model_that_looks_into_a_mask_unless_it_is_compiled_goes_one_way(n, randomness, device):
    """A padded batch also has samples without padding: two branches would cost two passes."""
    told = []

    def fn(w, x, mask):
        told.append(torch.compiler.is_compiling())
        y = F.linear(x, w)
        return score(y * mask[:, None] if torch.compiler.is_compiling() or not mask.all() else y)

    w, x, mask = torch.randn(4, 3, device=device), torch.randn(n, 5, 3, device=device), torch.ones(n, 5, device=device)
    mask[1:, 3:] = 0
    found = psg.per_sample_grad(fn, randomness=randomness)(w, x, mask)
    assert told == ([False] if n == 1 else [False, True]) and not torch.compiler.is_compiling()
    expected = loop_grad(fn)(w, x, mask)
    assert_trees_close(found, expected)
    # The same holds for the reference, through which derivatives are taken.
    assert_trees_close(psg.per_sample_grad(fn, randomness=randomness, method="vmap")(w, x, mask), expected)
    second = torch.func.jacrev(lambda w: psg.per_sample_norm(fn, randomness=randomness)(w, x, mask).sum())(w)
    assert_trees_close(second, torch.func.jacrev(lambda w: psg.per_sample_norm(fn, method="loop")(w, x, mask).sum())(w), per_sample=False)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["capture", "vmap"])
def test_what_fn_cannot_do_for_a_compiler_is_no_reason(method, device):
    def fn(w, x):
        table = None if torch.compiler.is_compiling() else w
        y = F.linear(x, table[:2])  # a TypeError for a compiler
        return score(y if x.sum() > 0 else 2 * y)

    w, x = torch.randn(4, 3, device=device), torch.randn(9, 3, device=device)
    x[0], x[1] = 1, -1
    if method == "capture":
        assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
    else:
        with pytest.raises(RuntimeError, match="data-dependent control flow"):
            psg.per_sample_grad(fn, method="vmap")(w, x)


def test_what_the_samples_share_may_be_checkpointed(device):
    """A checkpoint runs again in the backward pass, when the values that were computed once for all samples are gone."""
    shared = torch.randn(6, 3, device=device)

    def fn(p, x):
        table = torch.utils.checkpoint.checkpoint(lambda w: F.linear(shared, w).sin(), p["w"], use_reentrant=False)
        return score(table @ x)

    p, x = {"w": torch.randn(4, 3, device=device)}, torch.randn(5, 4, device=device)
    # Up to torch 2.12 checkpointing has an autograd function of its own, which vmap refuses first.
    with pytest.warns(psg.FallbackWarning, match="saves tensors through hooks|_NoopSaveInputs"):
        assert_trees_close(psg.per_sample_grad(fn)(p, x), loop_grad(fn)(p, x))


def test_what_fails_only_when_it_is_said_to_be_compiled_goes_apart(device):
    def fn(w, x):
        if torch.compiler.is_compiling():
            raise RuntimeError("not compiled")
        return score(F.linear(x, w)) * (2 if x.sum() > 0 else 3)

    w, x = torch.randn(4, 3, device=device), torch.randn(9, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


@pytest.mark.parametrize(
    "value",
    [lambda x: bool(x.sum() < 1e9), lambda x: int(x.abs().sum() * 0), lambda x: float(x[0] * 0), lambda x: (x > 1e9).sum().item(),
     lambda x: [3, 4][(x > 1e9).any()], lambda x: 7.0 in x, lambda x: sum((x > 1e9).tolist()), lambda x: len(x[:0].tolist()),
     lambda x: float(f"{(x > 1e9).sum():.1f}")],
    ids=["bool", "int", "float", "item", "index", "in", "tolist", "tolist of nothing", "format"],
)  # fmt: skip
def test_a_python_value_that_all_samples_share(value, args):
    def fn(w, x):
        return plain(w, x) * (1 + value(x))

    assert_trees_close(psg.per_sample_grad(fn, method="capture")(*args), loop_grad(fn)(*args))


@pytest.mark.parametrize("read", [lambda index: index.numpy(), np.asarray], ids=["numpy", "asarray"])
@pytest.mark.parametrize("alike", [True, False])
def test_arrays_of_numpy(read, alike):
    """Samples with equal values run together; a tensor that requires grad has no array, as in torch."""

    def fn(w, x):
        first, second = read(x.topk(2).indices)
        return (w[int(first)] * x[int(second)]).square()

    w, x = torch.randn(3), torch.randn(8, 3)
    x = x[:1].expand(8, 3) * torch.arange(1.0, 9)[:, None] if alike else x
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
    with pytest.raises(RuntimeError, match="requires grad"):
        psg.per_sample_grad(lambda w, x: (w * float(read(w * x).sum())).sum())(w, x)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_an_array_that_is_written_into():
    """In a loop the array shares the sample's memory."""

    def fn(w, x):
        x.numpy()[0] = 0
        return (w * x).sum().square()

    w, x = torch.randn(3), torch.ones(4, 3)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    assert (x == 1).all()


def test_lists_that_differ_between_samples_are_captured_apart(device):
    """Lengths, as models read them: samples with the same ones run together."""

    def fn(w, x, lengths):
        return sum(F.linear(part, w).square().sum() * (i + 1) for i, part in enumerate(x.split(lengths.tolist())))

    w, x = torch.randn(4, 3, device=device), torch.randn(8, 6, 3, device=device)
    lengths = torch.tensor([[1, 5], [2, 4], [1, 5], [2, 4], [1, 5], [1, 5], [2, 4], [2, 4]], device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x, lengths), loop_grad(fn)(w, x, lengths))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_every_transform_falls(args):
    grads = loop_grad(asks_the_sample)(*args)
    values, found = psg.per_sample_value_and_grad(asks_the_sample)(*args)
    assert_trees_close(values, loop_value_and_grad(asks_the_sample)(*args)[0])
    assert_trees_close(found, grads)
    assert_trees_close(psg.per_sample_norm(asks_the_sample)(*args), grads.flatten(1).norm(dim=1))
    assert_trees_close(psg.factored_grad(asks_the_sample)(*args).materialize(), grads)
    clipped = psg.clipped_grad(asks_the_sample, float("inf"))(*args)
    assert_trees_close(clipped.grads, grads.sum(0), per_sample=False)


# --- whose error --------------------------------------------------------------------------------------------


class Mine(Exception):
    pass


def raises_mine(w, x):
    raise Mine("the user's own words")


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_a_function_s_own_error_is_raised_as_it_is(method, args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # and nothing is said of another rung
        with pytest.raises(Mine, match="^the user's own words$") as caught:
            psg.per_sample_grad(raises_mine, method=method)(*args)
    assert caught.value.__cause__ is None
    assert caught.traceback[-1].name == "raises_mine"


def test_an_error_that_ends_iterations_is_the_function_s_own_too(args):
    with pytest.raises(StopIteration):
        psg.per_sample_grad(lambda w, x: next(iter(())), chunk_size=1)(*args)


def test_a_hook_on_a_tensor_is_named(args):
    def fn(w, x):
        hidden = F.linear(x, w)
        if hidden.requires_grad:
            hidden.register_hook(torch.neg)
        return score(hidden)

    with pytest.warns(psg.FallbackWarning, match="fn, or a tool such as FlopCounterMode, registers a hook on a tensor"):
        psg.per_sample_grad(fn)(*args)


def test_zeros_have_signs(args, device):
    def fn(w, x):
        return (w * x).sum() * math.atan2(x[0].item(), -1.0)

    w, x = args
    x[:, 0] = torch.tensor([0.0, -0.0, -0.0, 0.0, 0.0, -0.0, 0.0], device=device)[: len(x)]
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("fall", [lambda x: torch.linalg.norm(x.detach().cpu().numpy().sum()), lambda x: x[0].item() > 0])
def test_what_a_pass_held_is_let_go_of_when_it_fails(fall, args):
    held = []

    def fn(w, x):
        hidden = F.linear(x, w)
        held.append(weakref.ref(hidden))
        with contextlib.suppress(AttributeError, TypeError):
            fall(x)
        return score(hidden)

    gc.disable()
    try:
        psg.per_sample_norm(fn)(*args)
        assert len(held) > 1 and not any(hidden() is not None for hidden in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_inside_a_checkpointed_block(method, requires_grad, args):
    w, x = args[0].clone().requires_grad_(requires_grad), args[1]
    scale = torch.tensor(2.0, device=x.device, requires_grad=True)

    def block(scale):
        norms = psg.per_sample_norm(plain, method=method)(w, x)
        return (norms * scale).sin().sum()

    for call in (block, lambda scale: checkpoint(block, scale, use_reentrant=False)):
        w.grad = scale.grad = None
        call(scale).backward()
        if call is block:
            expected = scale.grad, w.grad
    assert_trees_close([part for part in (scale.grad, w.grad) if part is not None], [part for part in expected if part is not None])


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_a_wrong_shape_is_torch_s_own_error(method, args, device):
    with pytest.raises(RuntimeError, match="shapes? cannot be multiplied|size mismatch|must match|mat1 and mat2"):
        psg.per_sample_grad(lambda w, x: F.linear(x, w.T).sum(), method=method)(*args)


REFUSED = {
    "same padding with a stride": (
        lambda w, x: F.conv1d(x[None], w, stride=2, padding="same").sum(),
        ((2, 3, 3), (3, 6)),
        "not supported for strided",
    ),
    "one value in each group": (lambda w, x: F.group_norm(x[None], 4, w).sum(), ((4,), (4,)), "more than 1 value per channel"),
    "one value in each instance": (lambda w, x: F.instance_norm(x[None], weight=w).sum(), ((4,), (4, 1)), "more than 1 spatial element"),
    "one value in each of several": (lambda w, x: F.instance_norm(x, weight=w).sum(), ((4,), (3, 4, 1)), "more than 1 spatial element"),
    "groups that do not divide": (lambda w, x: F.group_norm(x[None], 3, w).sum(), ((4,), (4, 5)), "divisible"),
    "channels that do not fit": (lambda w, x: F.conv2d(x[None], w).sum(), ((2, 3, 2, 2), (4, 5, 5)), "channels"),
    "a kernel larger than the image": (lambda w, x: F.conv2d(x[None], w).sum(), ((2, 3, 6, 6), (3, 5, 5)), "[Kk]ernel size"),
    "a norm over other dimensions": (lambda w, x: F.layer_norm(x, (4,), w).sum(), ((4,), (5,)), "normalized_shape"),
    "a vector to a matrix": (lambda w, x: F.linear(x, w).sum(), ((2, 4), (3,)), "shape|size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_for_one_sample_is_refused(name, device):
    # A rule sees the whole batch, for which the call might be a legal one.
    fn, (weight, sample), message = REFUSED[name]
    w, x = torch.randn(weight, device=device), torch.randn(N, *sample, device=device)
    for call in (loop_grad(fn), psg.per_sample_grad(fn)):
        with pytest.raises((RuntimeError, ValueError), match=message):
            call(w, x)


def test_an_id_outside_the_table_is_refused(device):
    if device.type != "cpu":
        pytest.skip("a device reports an index out of range asynchronously, by failing for good")
    with pytest.raises(IndexError, match="out of range"):
        psg.per_sample_grad(lambda w, ids: F.embedding(ids, w).sum())(torch.randn(4, 2), torch.tensor([[1], [4]]))


def test_keyboard_interrupt_stops_at_once(args):
    calls = []

    def interrupted(w, x):
        calls.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        psg.per_sample_grad(interrupted)(*args)
    assert len(calls) == 1


def test_an_input_changed_after_a_layer_has_saved_it(args):
    # Plain PyTorch refuses this; so must every rung, and none may read the changed values.
    def fn(w, x):
        x = x * 2
        y = F.linear(x, w)
        x.zero_()
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loop_grad(fn)(*args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        psg.per_sample_grad(fn)(*args)


def test_an_output_changed_after_a_layer_keeps_the_layer_s_gradient(args):
    def fn(w, x):
        y = F.linear(x, w)
        y.mul_(x.sum()).add_(1)
        return score(y)

    assert_trees_close(psg.per_sample_grad(fn, method="capture")(*args), loop_grad(fn)(*args))


# --- where lifting leaks ------------------------------------------------------------------------------------
# Each of these was silently wrong when parameters were only lifted. The table's cases with "leak" compare every transform
# with the loop; here are further ways to use a parameter without its lifted copy.


LEAKS = {
    "a function that asks for requires_grad": lambda w, x: score(F.linear(x, w)) if w.requires_grad else x.sum(),
    "a function that asks for a version": lambda w, x: score(F.linear(x, w) * ((x * 2).add_(1)._version + 1)),
    "a function that asks for a version of what a parameter makes": lambda w, x: score(F.linear(x, w) * ((w * 2).add_(1)._version + 1)),
    "a function that asks for a view": lambda w, x: score(F.linear(x, w) * (1 + (x * 2)[:1]._is_view())),
    "a function that asks for the base of a view": lambda w, x: score(F.linear(x, w) * (1 + ((x * w)[:1]._base is None))),
    "as_strided of a parameter": lambda w, x: score(w.as_strided((3, 3), (1, 2)) @ x),
    "as_strided of a view of a parameter": lambda w, x: score(w.T.as_strided((3, 3), (3, 1), 3) @ x),
    "as_strided of what a parameter and a sample make": lambda w, x: score((w * x).as_strided((2, 3), (3, 1)) * x),
    "as_strided_copy of a parameter": lambda w, x: score(torch.as_strided_copy(w, (3, 3), (1, 2)) @ x),
    "as_strided_copy of a view of a parameter": lambda w, x: score(torch.as_strided_copy(w[1:], (2, 3), (3, 1)) @ x),
    "select_scatter of a parameter": lambda w, x: score(torch.select_scatter(w, x, 0, 1)),
    "select_scatter of what a parameter and a sample make": lambda w, x: score(torch.select_scatter(w * x, x, 0, 1)),
    "select_scatter into a parameter's product": lambda w, x: score(torch.select_scatter(w.tanh(), x * 2, 0, 1) @ x),
    "slice_scatter of a parameter": lambda w, x: score(torch.slice_scatter(w, (w[:2] * x), 0, 1, 3)),
    "diagonal_scatter of a parameter": lambda w, x: score(torch.diagonal_scatter(w, x)),
    "covariance of a parameter": lambda w, x: score(torch.cov(w.T) @ x),
    "correlation of a parameter": lambda w, x: score(torch.corrcoef(w.T) @ x),
    "column_stack": lambda w, x: score(torch.column_stack([w.T, x])),
    "is_contiguous of a memory format": lambda w, x: score(
        F.linear(x, w) * w.reshape(1, 1, 4, 3).is_contiguous(memory_format=torch.contiguous_format)
    ),
    "cdist of two parameters": lambda w, x: (torch.cdist(w, w.flip(0) + 1) * x.sum()).sin().sum(),
    "cdist of a parameter and the sample": lambda w, x: torch.cdist(w, x[None] * 2).sin().sum(),
    "pdist": lambda w, x: (F.pdist(w) * x.sum()).sin().sum(),
    "gaussian_nll_loss of parameters": lambda w, x: F.gaussian_nll_loss(x.sum(), w[0, 0], w[0, 1].exp()),
    "flip, roll and rot90": lambda w, x: score(torch.rot90(w.flip(0).roll(1, 1)).T @ x),
    "tril, diag and trace": lambda w, x: score(w.tril() @ x) + torch.diag(w[:3]).sum() * x[0] + w[:3].trace() * x[1],
    "solve and inverse": lambda w, x: score(torch.linalg.solve(w[:3] + 5 * torch.eye(3, device=w.device), x)),
    "sort, topk and max": lambda w, x: score(w.sort(0).values @ x + w.topk(2, 1).values.sum() + w.max(0).values.sum()),
    "cumulative ops": lambda w, x: score(w.cumsum(0).cumprod(1) @ x),
    "masked_select by a constant": lambda w, x: score(w.masked_fill(torch.eye(4, 3, device=w.device).bool(), 0) @ x),
    "repeat, tile and expand": lambda w, x: score(w.repeat(2, 1) @ x) + score(w[:1].expand(5, 3) @ x) + score(w.tile(1, 2)[:, :3] @ x),
    "unfold": lambda w, x: score(F.unfold(w[None, None], (2, 2)).sum() * x),
    "interpolate": lambda w, x: score(F.interpolate(w[None, None], scale_factor=2, mode="bilinear").mean() * x),
    "grid_sample": lambda w, x: score(F.grid_sample(w[None, None], x.tanh().expand(1, 2, 2, 3)[..., :2], align_corners=False)),
    "complex numbers and fft": lambda w, x: score(torch.fft.rfft(w, dim=1).abs() @ x[:2]),
    "a sparse matrix of parameters that is added": lambda w, x: score(w.detach().add(w.to_sparse()) @ x),
    "a sparse matrix of what a parameter and a sample make": lambda w, x: score(torch.sparse.mm((w * x).to_sparse(), x[:, None])),
    "einsum of two parameters and a sample": lambda w, x: torch.einsum("oi,pi,i->", w, w.tanh(), x),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_leak(name, args):
    fn = LEAKS[name]
    values, grads = psg.per_sample_value_and_grad(fn)(*args)
    norms = psg.per_sample_norm(fn)(*args)
    expected_values, expected = loop_value_and_grad(fn)(*args)
    assert_trees_close(values, expected_values)
    assert_trees_close(grads, expected)
    assert_trees_close(norms, expected.flatten(1).norm(dim=1))
    assert expected.abs().max() > 0  # an exact zero would hide a lost gradient


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_a_sparse_matrix_of_parameters_by_a_constant(args, device):
    """Of which vmap(grad) computed gradients for the first sample alone."""
    places, ones = torch.arange(3, device=device).expand(2, 3), torch.ones(3, 4, device=device)

    def fn(w, x):
        return score(torch.sparse.mm(torch.sparse_coo_tensor(places, w[0], (3, 3)), ones).T @ x)

    assert_trees_close(psg.per_sample_grad(fn)(*args), loop_grad(fn)(*args))
    assert [reason.split(",")[0] for _, reason in psg.explain(fn)(*args).reasons] == ["vmap knows no sparse tensors"] * 2


@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
@pytest.mark.parametrize(
    "use",
    [
        lambda reduce, w, x: reduce(w * x).sin(),
        lambda reduce, w, x: (w * x / (1 + reduce((w * x).abs()))).sum(),
        lambda reduce, w, x: (w * x).sum() * reduce(w),
        lambda reduce, w, x: torch.func.vjp(lambda x: reduce(w * x).sin(), x)[0],
        lambda reduce, w, x: torch.vmap(lambda x: reduce(w * x).sin())(torch.stack([x, x.flip(0)])).sum(),
        lambda reduce, w, x: reduce(w * x + torch.tensor([1.0, torch.nan, torch.inf, torch.nan], device=x.device)).nan_to_num(),
    ],
    ids=["of both", "of their scale", "of a parameter", "in a transform", "under vmap", "not finite"],
)
def test_ties_share_the_gradient_as_in_torch(name, use, device):
    # vmap turns the maximum of all entries into one along a dimension, whose gradient goes to only one of the tied entries.
    def fn(w, x):
        return use(getattr(torch, name), w, x)

    w, x = torch.ones(4, device=device), torch.tensor([[1.0, 1, 0, 1], [2, 2, 2, 0], [0, 0, 0, 0]], device=device)
    expected_values, expected = loop_value_and_grad(fn)(w, x)
    for method in ("capture", "vmap", "loop"):
        values, grads = psg.per_sample_value_and_grad(fn, method=method)(w, x)
        assert_trees_close(values, expected_values)
        assert_trees_close(grads, expected)
        each = lambda w: torch.vmap(lambda x: psg.per_sample_grad(fn, method=method)(w, x[None])[0])(x)  # noqa: B023, E731
        assert_trees_close(each(w), expected)
        assert_trees_close(torch.vmap(each)(w[None])[0], expected)
    x = x.requires_grad_()  # the values' own derivative
    values, _ = psg.per_sample_value_and_grad(fn)(w, x)
    assert_trees_close(torch.autograd.grad(values.sum(), x), torch.autograd.grad(sum(fn(w, own) for own in x), x))


@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
@given(sizes=st.lists(st.integers(1, 3), max_size=2), n=st.integers(0, 3), inside=st.booleans(), seed=st.integers(0, 99))
def test_ties_under_a_vmap_around(name, method, sizes, n, inside, seed, device):
    """Under one of fn's own, torch gives the gradient to one of them."""
    torch.manual_seed(seed)
    w, x = torch.ones(sizes, device=device), torch.randint(3, (n, 2, *sizes), device=device).to(torch.get_default_dtype())
    reduced = getattr(torch, name)

    def fn(w, x):
        return torch.vmap(lambda row: reduced(w * row))(x).sin().sum() if inside else reduced(w * x).sin() * x.sum()

    members = torch.stack([w, 2 * w])
    found = torch.vmap(lambda w: psg.per_sample_grad(fn, method=method)(w, x))(members)
    assert_trees_close(found, torch.stack([loop_grad(fn)(own, x) for own in members]))


def solved(left=True, adjoint=False, old=False):
    """Solves for many right-hand sides, with a matrix of each sample's own."""

    def fn(w, x):
        own, sides = pivoted(w, x), torch.arange(24.0, device=x.device).reshape(4, 3, 2) * w[:2]
        if old:
            return torch.lu_solve(sides, *torch.linalg.lu_factor(own)).sin().sum()
        return torch.linalg.lu_solve(*torch.linalg.lu_factor(own), sides if left else sides.mT, left=left, adjoint=adjoint).sin().sum()

    return fn


def pivoted(w, x):
    """A matrix whose LU factorisation swaps rows."""
    return torch.tensor([[0.1, 3, 1], [0.5, 0.2, 4], [5, 1, 0.3]], device=x.device) + torch.outer(w, x)


@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize(
    "fn",
    [
        *(solved(left, adjoint) for left in (True, False) for adjoint in (True, False)),
        pytest.param(solved(old=True), marks=pytest.mark.filterwarnings("ignore:torch.lu_solve is deprecated")),
        lambda w, x: torch.func.jacrev(lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(pivoted(w, x)), x[:, None]))(x).sin().sum(),
        lambda w, x: torch.func.jvp(lambda x: torch.linalg.solve(pivoted(w, x), x), (x,), (w,))[1].sin().sum(),
        lambda w, x: torch.func.jacrev(lambda x: torch.linalg.slogdet(pivoted(w, x))[1])(x).sin().sum(),
    ],
    ids=["left", "left, adjoint", "right", "right, adjoint", "old", "its jacobian", "a jvp of solve", "a jacobian of slogdet"],
)
def test_pivots_are_the_sample_s_own(fn, method, device):
    w, x = torch.rand(3, device=device), torch.randn(4, 3, device=device)
    values, grads = psg.per_sample_value_and_grad(fn, method=method)(w, x)
    expected_values, expected = loop_value_and_grad(fn)(w, x)
    assert_trees_close(values, expected_values)
    assert_trees_close(grads, expected)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize("dim", [(), (0,), (-1,)])
def test_squeeze_in_place_leaves_the_samples_alone(dim, method, n, device):
    def fn(w, x):
        return (x * w).squeeze_(*dim).sum(0).exp().sum()

    args = torch.randn(1, 2, 1, device=device), torch.randn(n, 1, 2, 1, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method=method)(*args), loop_grad(fn)(*args))


@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: torch.roll(w, 1) * x.sum(),  # computed once, and its gradient pulled back under vmap
        lambda w, x: (w * x.sum()).roll((2,)).sin(),
        lambda w, x: torch.func.grad(lambda w: w.roll(1).sin())(w) * x.sum(),
        lambda w, x: torch.func.vmap(lambda x: (x * w).roll(1))(x).sin().sum(),
    ],
)
@pytest.mark.parametrize("n", [0, 1, 4])
def test_scalars_do_not_roll(n, fn, method, device):
    w, x = torch.randn((), device=device), torch.randn(n, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x), loop_grad(fn)(w, x))


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
@pytest.mark.parametrize(
    "op",
    [
        lambda A, z: torch.linalg.solve(A, z).sin().sum(),
        lambda A, z: torch.linalg.solve_ex(A, z)[0].sin().sum(),
        lambda A, z: torch.linalg.tensorsolve(A[:, None], z[:, None]).sin().sum(),
        lambda A, z: A.det(),
        lambda A, z: A.slogdet()[1],
        lambda A, z: (A @ A.T).logdet(),
    ],
    ids=["solve", "solve_ex", "tensorsolve", "det", "slogdet", "logdet"],
)
@pytest.mark.parametrize("method", ["capture", "vmap"])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_tangents_of_solve_and_det(n, method, transform, op, device):
    """Written out: under two vmaps torch's own are those of other pivots."""

    def fn(w, x):
        return transform(lambda x: op(pivoted(w, x), x))(x).sin().sum()

    w, x = torch.rand(3, device=device), torch.randn(n, 3, device=device)
    values, grads = psg.per_sample_value_and_grad(fn, method=method)(w, x)
    expected_values, expected = loop_value_and_grad(fn)(w, x)
    assert_trees_close(values, expected_values)
    assert_trees_close(grads, expected)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "loop"])
def test_a_vmap_around_a_loop_that_writes_a_determinant_out(method, device):
    """Its own tangents would be those of other pivots."""

    def fn(w, x):
        return torch.func.jacfwd(lambda x: pivoted(w, x).det())(x).sin().sum()

    def written_out(w, x):
        def determinant(x):
            a, b, c = pivoted(w, x)
            return (a * torch.linalg.cross(b, c)).sum()

        return torch.func.jacfwd(determinant)(x).sin().sum()

    w, x = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    found = torch.func.vmap(psg.per_sample_grad(fn, method=method), (0, None))(w, x)
    assert_trees_close(found, torch.stack([loop_grad(written_out)(own, x) for own in w]))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (w * x * (w * x > 0).any(dim=())).square().sum(),
        lambda w, x: (w * x).sum() * (w * x).detach().clone().resize_(2).sum(),
    ],
    ids=["any", "resize_"],
)
def test_a_vmap_around_a_loop_runs_no_op_that_it_gets_wrong(fn, method, device):
    # All members go through the loop at once: it went on where the rungs above had refused, and its results were wrong.
    w, x = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    norms = psg.per_sample_norm(fn, method=method)
    for dims, args in (((0, None), (w, x)), ((None, 0), (w[0], torch.stack([x, x.flip(0)])))):
        with pytest.raises(psg.PsgError, match="call psg in a loop over the members of the vmap around it"):
            torch.func.vmap(norms, dims)(*args)
    shared = torch.func.vmap(lambda c: c * norms(w[0], x))(w[:, 0])  # what this vmap batches does not reach fn
    assert_trees_close(shared, w[:, :1] * norms(w[0], x), per_sample=False)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    "differentiate", [lambda f, w: f(w.requires_grad_()), lambda f, w: torch.func.grad(f)(w)], ids=["backward", "grad"]
)
def test_a_loop_under_a_vmap_that_autograd_records_below(differentiate, device):
    def fn(w, x):
        return torch.select_scatter(w * x, x[0] * w[1], 0, 1).square().sum()

    w, x = torch.randn(2, 3, 3, device=device), torch.randn(4, 3, 3, device=device)
    norms = lambda w: torch.func.vmap(psg.per_sample_norm(fn), (0, None))(w, x)  # noqa: E731
    assert_trees_close(norms(w), torch.stack([psg.per_sample_norm(fn)(own, x) for own in w]), per_sample=False)
    with pytest.raises(psg.PsgError, match="select_scatter under vmap has a wrong gradient"):
        differentiate(lambda w: norms(w).sum(), w)


def test_parameters_that_are_wrappers_seen_by_the_function_look_like_parameters(args):
    seen = []

    def fn(w, x):
        seen.append((w.requires_grad, x.requires_grad, w.shape, w.dtype, w.device.type, w.ndim, w.stride(), len(w)))
        return plain(w, x)

    psg.per_sample_grad(fn, method="capture")(*args)
    w = args[0]
    assert seen == [(True, False, w.shape, w.dtype, w.device.type, 2, w.stride(), 4)]


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_chunks_fall_together(args):
    grads = psg.per_sample_grad(asks_the_sample, chunk_size=2)(*args)
    assert_trees_close(grads, loop_grad(asks_the_sample)(*args))


def test_a_falling_function_draws_its_random_numbers_once(device):
    # What an abandoned rung drew must not leak into the result: values and gradients come from the same draw.
    def fn(w, x):
        mask = F.dropout(torch.ones_like(w), 0.5)
        return (w * mask * x).sum() * x.sum().item()

    w, x = torch.ones(64, device=device), torch.rand(4, 64, device=device)
    with pytest.warns(psg.FallbackWarning):
        values, grads = psg.per_sample_value_and_grad(fn)(w, x)
    assert_trees_close(grads.sum(1), values)


@pytest.mark.parametrize(
    "ask",
    [lambda x: x.sum().item(), lambda x: torch.nonzero(x > 0).shape[0]],
    ids=["our own error", "vmap's error"],
)
def test_an_error_that_the_function_handles_is_not_mistaken_for_the_sample_s(ask, args):
    def fn(w, x):
        try:
            scale = ask(x)
        except Exception:  # the loop raises nothing here
            scale = 0.0
        return plain(w, x) * scale

    with pytest.warns(psg.FallbackWarning, match="handles an error"):
        grads = psg.per_sample_grad(fn)(*args)
    assert_trees_close(grads, loop_grad(fn)(*args))
    for method in ("capture", "vmap"):
        with pytest.raises(psg.PsgError, match="handles an error"):
            psg.per_sample_grad(fn, method=method)(*args)


@pytest.mark.parametrize("history", [False, True])
def test_a_lazy_module_that_fn_makes(history, args):
    def fn(w, x):
        layer = nn.LazyLinear(3, bias=False, dtype=w.dtype, device=w.device)
        layer(x[None])
        layer.weight.data.fill_(0.5)
        return layer(F.linear(x, w)[:3]).tanh().sum()

    w, x = args[0].requires_grad_(history), args[1]
    with pytest.warns(psg.FallbackWarning, match="UninitializedParameter"):
        grads = psg.per_sample_grad(fn)(w, x)
    assert_trees_close(grads.detach(), loop_grad(fn)(w.detach(), x))


TEXTS = {
    "str": lambda w, x: "-" in str(x[0]),
    "repr": lambda w, x: "-" in repr(F.linear(x, w)),
    "an f-string": lambda w, x: "-" in f"{x}",
    "of truth": lambda w, x: "True" in str(x[0] > 0),
    "in a derivative": lambda w, x: torch.func.grad(lambda x: plain(w, x) * (2 if "-" in str(x) else 3))(x).sum() > 0,
    "in a vmap": lambda w, x: torch.func.vmap(lambda row: (row * ("-" in str(row))).sum())(x[None]).sum() != 0,
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("how", ["capture", "vmap", "jit"])
@pytest.mark.parametrize("name", TEXTS)
def test_text_of_a_tensor_is_its_sample_s(name, how, args):
    def fn(w, x):
        return plain(w, x) * (2 if TEXTS[name](w, x) else 3)

    w, x = args[0], args[1].abs()
    x[1] *= -1
    grad = psg.per_sample_grad(fn)
    with psg.rules.disabled() if how == "vmap" else contextlib.nullcontext():
        assert_trees_close((psg.jit(grad, backend="eager") if how == "jit" else grad)(w, x), loop_grad(fn)(w, x))
    assert not is_right_under_vmap(fn, w, x, expected=loop_grad(fn)(w, x))


def test_a_function_may_print(args, capsys):
    """What all samples share once, what each has for each, as in the loop."""

    def shared(w, x):
        print(w.detach())
        return plain(w, x)

    def own(w, x):
        print(x)
        return plain(w, x)

    psg.per_sample_grad(shared, method="capture")(*args)
    assert capsys.readouterr().out == f"{args[0]}\n"
    with pytest.warns(psg.FallbackWarning, match="__repr__ at .* gives different Python values"):
        psg.per_sample_grad(own)(*args)
    assert capsys.readouterr().out == "".join(f"{x}\n" for x in args[1])


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("ask", [torch.Tensor.item, lambda x: 2.0 if x > 0 else 3.0, lambda x: x.reshape(1).mul_(2).sum()])
@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_settings_that_a_pass_has_changed_are_put_back(method, ask, args):
    def fn(w, x):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True)
        scale = ask(x[:2].T.sum()) * torch.ones((), dtype=before)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(before)
        return plain(w, x) * scale * torch.ones(())

    before = torch.get_default_dtype()
    with contextlib.suppress(RuntimeError, psg.PsgError) if method in ("capture", "vmap") else contextlib.nullcontext():
        assert_trees_close(psg.per_sample_grad(fn, method=method)(*args), loop_grad(fn)(*args))
    assert torch.get_default_dtype() == before and not torch.are_deterministic_algorithms_enabled()


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, cotangent):
        return 3 * cotangent


REFUSED_UNSEEN = {
    "a function": OldStyle.apply,
    "a checkpoint": lambda h: checkpoint(torch.sin, h, use_reentrant=False),
    "a reentrant checkpoint": lambda h: checkpoint(torch.sin, h, use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", REFUSED_UNSEEN)
def test_what_torch_refuses_inside_transforms_where_the_function_handles_that(name, disabled, args):
    """Before a mode that watches the function could see the call."""

    def fn(w, x):
        try:
            h = REFUSED_UNSEEN[name](F.linear(x, w))
        except RuntimeError:  # the loop raises nothing here
            h = 7 * F.linear(x, w)
        return h.square().sum()

    with psg.rules.disabled() if disabled else contextlib.nullcontext():
        assert_trees_close(psg.per_sample_grad(fn)(*args), loop_grad(fn)(*args))
    with pytest.raises(psg.PsgError, match="handles an error"):
        psg.per_sample_grad(fn, method="vmap")(*args)
    w, x = args
    grads = lambda w: psg.per_sample_grad(fn, method="loop")(w, x)  # noqa: E731
    for run in (lambda: torch.func.jacrev(grads)(w), lambda: torch.vmap(grads)(w[None])):
        with pytest.raises(psg.PsgError, match="handles an error"):
            run()
    assert rung(fn, *args) == ("capture" if name == "a function" and _functions.SEES_BOUND else "loop")


@pytest.mark.parametrize("swallows", [False, True])
def test_a_hook_on_a_node_is_obeyed(swallows, args):
    def fn(w, x):
        y = F.linear(x, w)
        try:
            y.grad_fn.register_prehook(lambda cotangents: tuple(2 * c for c in cotangents))
        except psg.PsgError:  # the loop raises nothing here
            if not swallows:
                raise
        return y.square().sum()

    with pytest.warns(psg.FallbackWarning, match="fn uses register_prehook of the autograd node"):
        grads = psg.per_sample_grad(fn)(*args)
    assert_trees_close(grads, loop_grad(fn)(*args))
    assert_trees_close(grads, 2 * loop_grad(lambda w, x: F.linear(x, w).square().sum())(*args))


def test_a_node_says_that_it_is_there(args):
    def fn(w, x):
        y = F.linear(x, w)
        return y.square().sum() if y.grad_fn is not None and "Backward" in y.grad_fn.name() else y.sum()

    assert_trees_close(psg.per_sample_grad(fn, method="capture")(*args), loop_grad(fn)(*args))


def test_activation_checkpointing_falls_and_says_why(args):
    def fn(w, x):
        return torch.utils.checkpoint.checkpoint(lambda x: F.linear(F.linear(x, w).sin(), w.T), x, use_reentrant=False).square().sum()

    # Up to torch 2.12 vmap is the first to refuse.
    with pytest.warns(psg.FallbackWarning, match="saves tensors through hooks, as activation checkpointing does|_NoopSaveInputs"):
        grads = psg.per_sample_grad(fn)(*args)
    assert_trees_close(grads, loop_grad(fn)(*args))


def test_hooks_around_a_call_change_nothing(args):
    with torch.autograd.graph.save_on_cpu():
        grads = psg.per_sample_grad(plain, method="capture")(*args)
    assert_trees_close(grads, loop_grad(plain)(*args))


def test_chunks_of_which_only_the_last_has_a_history(device):
    rows = torch.randn(5, 3, device=device)
    collector = RowCollector(5)
    collector.add(0, [rows[:2]])
    collector.add(2, [rows[2:4]])
    collector.add(4, [rows[4:].requires_grad_()])
    (joined,) = collector.result()
    assert torch.equal(joined, rows) and joined.requires_grad


def test_parameters_that_some_samples_do_not_use(device):
    params, x = {name: torch.randn(3, device=device) for name in "ab"}, torch.tensor([[1.0] * 3, [-2.0] * 3], device=device)

    def fn(p, x):
        return (p["a" if x.sum() > 0 else "b"] * x).sin().sum()

    assert_trees_close(psg.per_sample_grad(fn, method="loop")(params, x), loop_grad(fn)(params, x))


def pushed(push):
    """A function of one sample with a Jacobian-vector product, and a layer that meets it."""

    def fn(w, x):
        output, tangent = push(lambda z: torch.tanh(w * z), x)
        return (output * tangent + w * push(lambda w: w**3 * x, w)[1]).square().sum()

    return fn


linearized = pushed(lambda f, x: (lambda output, push: (output, push(x)))(*torch.func.linearize(f, x)))
by_jvp = pushed(lambda f, x: torch.func.jvp(f, (x,), (x,)))


def test_linearize_inside_fn(device):
    # torch detaches the values that linearize computes once: its own gradients are wrong for what the function closes over.
    w, x = torch.randn(2, device=device), torch.randn(3, 2, device=device)
    expected = psg.per_sample_value_and_grad(by_jvp)(w, x)
    with pytest.warns(psg.FallbackWarning, match="tracer inside fn, such as torch.func.linearize's, .* torch.func.jvp"):
        found = psg.per_sample_value_and_grad(linearized)(w, x)
    assert_trees_close(found, expected)
    assert not any(part.requires_grad for part in found)
    assert_trees_close(loop_grad(linearized)(w, x), expected[1])
    norms = [psg.per_sample_norm(fn, method="loop")(w.requires_grad_(), x).sum() for fn in (linearized, by_jvp)]
    assert_trees_close(*(torch.autograd.grad(norm, w)[0] for norm in norms), per_sample=False)


@pytest.mark.parametrize("transform", [lambda f: torch.func.grad(lambda w: f(w).sum()), torch.func.vmap], ids=["grad", "vmap"])
def test_linearize_inside_fn_inside_transforms(transform, device):
    w, x = torch.randn(2, 2, device=device), torch.randn(3, 2, device=device)
    with pytest.raises(psg.PsgError, match="torch.func.linearize's, .* torch.func.jvp"):
        transform(lambda w: psg.per_sample_norm(linearized)(w, x))(w)


class Again(torch.autograd.Function):
    """Like a reversible layer: its backward pass runs the layer again, and adds to the `.grad` of the parameters that the layer uses."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), cotangent)
        return x.grad, None


RUN_AGAIN = {
    "checkpointed": lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
    "checkpointed by a function": lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True),
    "reversible": lambda layer, x: Again.apply(x, layer),
}


class RunsAgain(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first = nn.Linear(3, 4)
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        return self.way(self.layer, self.first(x))


@pytest.mark.parametrize("way", RUN_AGAIN.values(), ids=RUN_AGAIN)
def test_layers_that_run_again_in_the_backward_pass(way, device):
    """They read the parameters that were passed to the loss, not the module's own values, and leave no gradient on the module."""
    module = RunsAgain(way).to(device)
    loss, own = psg.stateless(module, lambda output, y: (output * y).sum().sin())
    params = {name: value + torch.randn_like(value) for name, value in own.items()}
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    plain = RunsAgain(lambda layer, x: layer(x)).to(device)
    plain.load_state_dict(params)
    expected = loop_grad(psg.stateless(plain, lambda output, y: (output * y).sum().sin())[0])(params, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_trees_close(psg.per_sample_grad(loss)(params, x, y), expected)
        assert_trees_close(loop_grad(loss)(params, x, y), expected)  # the oracle itself
        assert psg.check(loss)(params, x, y).error < 1e-12
    assert all(parameter.grad is None for parameter in module.parameters())
    assert_trees_close(dict(module.named_parameters()), own)


def test_what_backward_adds_up_has_no_derivative(device):
    """The loop with a history read the gradients that autograd returns, which are zeros for parameters of such layers."""
    module = RunsAgain(RUN_AGAIN["reversible"]).to(device)
    loss, _ = psg.stateless(module, lambda output, y: (output * y).sum().sin())
    live, batch = dict(module.named_parameters()), (torch.randn(N, 3, device=device), torch.randn(N, 2, device=device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (psg.factored_grad(loss), psg.per_sample_grad(lambda p, x, y: loss(p, x, y) * torch.rand([]))):
            with pytest.raises(psg.PsgError, match=r"calls backward\(\).*Pass detached parameters"):
                call(live, *batch)


def test_a_derivative_for_what_is_a_constant_to_psg_s_own_transform(device):
    """functorch says that a tensor which it takes as a constant is not used: the rung of vmap, and the loop in a transform, gave zero."""
    scale = torch.tensor(2.0, device=device, requires_grad=True)

    def fn(w, x):
        loss = (scale * w * x).square()
        (slope,) = torch.autograd.grad(loss, scale, create_graph=True, materialize_grads=True)
        return loss + slope.square()

    w, x = torch.ones((), device=device), torch.tensor([1.0, 2.0], device=device)
    with pytest.warns(psg.FallbackWarning, match="takes as a constant"):
        assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, x))
    for method in ("vmap", "loop"):
        with pytest.raises(psg.PsgError, match="takes as a constant"):
            torch.func.vmap(psg.per_sample_grad(fn, method=method), in_dims=(0, None))(w.expand(2), x)


class AgainForAll(torch.autograd.Function):
    """`Again`, with a generated rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, layer):
        return layer(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.x, ctx.layer = inputs

    @staticmethod
    def backward(ctx, cotangent):
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), cotangent)
        return x.grad, None


@pytest.mark.parametrize("first", [True, False])
def test_a_function_on_data_whose_backward_adds_to_leaves(first, device):
    """Nothing that psg asks autograd for lies behind it, so its backward was not called, and the gradients of `w` were zero."""

    def fn(p, x):
        hidden = x.clone().requires_grad_() if first else F.linear(x, p["v"])
        return AgainForAll.apply(hidden, lambda hidden: F.linear(hidden, p["w"]).tanh()).square().sum() + F.linear(x, p["v"]).sum()

    def plain(p, x):
        return F.linear(x if first else F.linear(x, p["v"]), p["w"]).tanh().square().sum() + F.linear(x, p["v"]).sum()

    p, x = {name: torch.randn(3, 3, device=device) for name in "vw"}, torch.randn(N, 3, device=device)
    with pytest.warns(psg.FallbackWarning, match="method='loop'"):
        assert_trees_close(psg.per_sample_grad(fn)(p, x), loop_grad(plain)(p, x))


@pytest.mark.parametrize("way", RUN_AGAIN.values(), ids=RUN_AGAIN)
def test_layers_that_run_again_after_functional_call_are_refused(way, device):
    module = RunsAgain(way).to(device)

    def loss(params, x):
        return torch.func.functional_call(module, params, (x,)).square().sum()

    params = {name: value.detach() + 1 for name, value in module.named_parameters()}
    with pytest.raises(psg.StateError, match="runs a part of fn again"):
        psg.per_sample_grad(loss, method="loop")(params, torch.randn(N, 3, device=device))


@pytest.mark.parametrize("make", [lambda leaf: leaf, lambda leaf: leaf * 2, lambda leaf: leaf[1:]])
def test_what_is_closed_over_and_hidden_in_a_function(make, device):
    leaf = torch.randn(4, device=device, requires_grad=True)
    closed = make(leaf)
    w, x = torch.randn(len(closed), device=device), torch.randn(N, len(closed), device=device)

    def hidden(w, x):
        return Times.apply(w * x, closed).sum().sin()

    with pytest.warns(UserWarning, match="closes over a tensor that requires grad"):
        assert not psg.per_sample_grad(hidden, method="loop")(w, x).requires_grad
    with torch.no_grad():
        found = psg.per_sample_grad(hidden, method="loop")(w, x)
    seen = psg.per_sample_grad(lambda w, x: (Times.apply(w, x) * closed).sum().sin(), method="loop")(w, x)
    assert_trees_close(found, seen.detach())
    assert seen.requires_grad and leaf.grad is None
    torch.autograd.grad(seen.sum(), leaf)  # its graph is intact


def test_what_fn_does_with_the_module_besides_sees_its_own_parameters(device):
    """A proximal term, a teacher: the parameters that were passed are in the module only during its call and the backward pass."""
    module = nn.Linear(3, 2).to(device)
    loss, own = psg.stateless(module, lambda output, y: (output - y).square().sum())
    params = {name: value + 1 for name, value in own.items()}

    def proximal(params, x, y):
        first = loss(params, x, y)
        near = sum((params[name] - value.detach()).square().sum() for name, value in module.named_parameters())
        with torch.no_grad():
            teacher = module(x)
        return first + near + (torch.func.functional_call(module, params, (x,)) - teacher).square().sum()

    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    captured = psg.per_sample_grad(proximal, method="capture")(params, x, y)
    assert_trees_close(psg.per_sample_grad(proximal, method="loop")(params, x, y), captured)
    assert_trees_close(loop_grad(proximal)(params, x, y), captured)


def test_a_checkpointed_module_with_two_sets_of_parameters_is_refused(device):
    module = RunsAgain(RUN_AGAIN["checkpointed"]).to(device)
    loss, params = psg.stateless(module, lambda output, y: (output * y).sum())

    def twice(params, x, y):
        return loss(params, x, y) + loss({name: 2 * value for name, value in params.items()}, x, y)

    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    with pytest.raises(psg.StateError, match="several sets of parameters"):
        psg.per_sample_grad(twice, method="loop")(params, x, y)


def test_threads_that_loop_over_two_modules_in_other_orders(device):
    modules = [nn.Linear(3, 2).to(device) for _ in range(2)]
    (first, p), (second, q) = (psg.stateless(module, lambda output, y: (output * y).sum().sin()) for module in modules)
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    orders = [lambda p, q, x, y: first(p, x, y) + second(q, x, y), lambda p, q, x, y: second(q, x, y) + first(p, x, y)]
    expected = psg.per_sample_grad(orders[0], argnums=(0, 1))(p, q, x, y)
    found = []

    def work(fn):
        for _ in range(20):
            found.append(psg.per_sample_grad(fn, argnums=(0, 1), method="loop")(p, q, x, y))

    threads = [threading.Thread(target=work, args=(fn,), daemon=True) for fn in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 40
    for own in found:
        assert_trees_close(own, expected)


def test_hooks_of_others_do_not_fire(device):
    """Hooks on a tensor that fn closes over, below a Python autograd.Function: an optimizer hooked there would take a step."""
    other, calls = torch.randn(3, device=device, requires_grad=True), []
    other.register_post_accumulate_grad_hook(calls.append)
    other.register_hook(calls.append)
    other.grad = torch.ones_like(other)
    w, x = torch.randn(3, device=device), torch.randn(N, 3, device=device)
    with torch.no_grad():
        psg.per_sample_grad(lambda w, x: (Times.apply(w, x) * other).sum(), method="loop")(w, x)
    assert not calls and (other.grad == 1).all()
    (other * 2).sum().backward()
    assert len(calls) == 2  # the hooks are back


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["loop", "auto"])
def test_samples_that_fn_differentiates_for_on_the_loop(method, device):
    def fn(w, x):
        x.requires_grad_()
        energy = (w * x).sum().sin() * (1 if float(x.detach().sum()) > 0 else 2)
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        made = torch.zeros_like(w, requires_grad=True)
        return slope.square().sum() + (made * w).sum()

    w, x = torch.randn(3, device=device), torch.randn(N, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x), loop_grad(fn)(w, x))


@pytest.mark.parametrize("way", ["checkpointed"])
def test_layers_that_run_again_where_a_derivative_may_be_asked_for(way, device):
    """If fn closes over a tensor that requires grad, its factors are dense and have a history: here too they must be right."""
    module = RunsAgain(RUN_AGAIN[way]).to(device)
    loss, own = psg.stateless(module, lambda output, y: (output * y).sum().sin())
    params = {name: value + torch.randn_like(value) for name, value in own.items()}
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    closed = torch.ones((), device=device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = psg.tree.materialize(psg.factored_grad(lambda p, x, y: loss(p, x, y) * closed)(params, x, y))
    assert_trees_close(tree_map(torch.Tensor.detach, found), loop_grad(loss)(params, x, y))


LAYOUTS = {
    "columns": lambda: torch.randn(4, 6)[:, ::2],
    "rows of more": lambda: torch.randn(4, 6)[:, 1:4],
    "transposed": lambda: torch.randn(3, 4).T,
    "expanded": lambda: torch.randn(3).expand(4, 3),
    "one of many": lambda: torch.randn(4, 3, 1000)[..., 7],
}


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_tensors_keep_their_layout(layout, method, device):
    w, shared, x = LAYOUTS[layout]().to(device), LAYOUTS[layout]().to(device), torch.randn(5, 3, device=device)
    strides = []

    def fn(w, x, shared):
        strides.append((w.stride(), shared.stride()))
        return (w @ x + shared @ x).square().sum()

    psg.per_sample_grad(fn, in_dims=(None, 0, None), method=method)(w, x, shared)
    if layout != "one of many" or method == "capture":
        assert set(strides) == {(w.stride(), shared.stride())}


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
def test_what_lies_between_the_entries_of_a_parameter(method):
    w, x = torch.randn(4, 4)[:, ::2], torch.randn(3)
    psg.check(lambda w, x: w.as_strided((2, 2), (2, 1)).square().sum() * x, method=method)(w, x)


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
def test_tensors_that_are_marked_as_negative(method, device):
    w = torch.randn(3, 3, dtype=torch.float64, device=device)
    marked = torch.complex(w, -w).conj().imag
    assert marked.is_neg()
    expected = loop_grad(lambda w, x: w.det() * x)(w, torch.ones(2, device=device))
    assert_trees_close(psg.per_sample_grad(lambda w, x: w.det() * x, method=method)(marked, torch.ones(2, device=device)), expected)


@pytest.mark.filterwarnings("ignore:.*fall back.*slow:UserWarning", "ignore::psg.FallbackWarning")  # torch's, of a selected sparse row
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_sparse_batches(branches, chunk_size, device):
    x, params = torch.randn(5, 6, device=device).relu(), {"w": torch.randn(6, 3, device=device)}

    def fn(p, x):
        total = (torch.sparse.mm(x[None], p["w"]) if x.is_sparse else x @ p["w"]).sum()
        return total.cos() if branches and total.item() > 0 else total.sin()

    for method in ("auto", "loop"):
        found = psg.per_sample_grad(fn, method=method, chunk_size=chunk_size)(params, x.to_sparse())
        assert_trees_close(found, loop_grad(fn)(params, x))
    psg.check(fn, chunk_size=chunk_size)(params, x.to_sparse())


def test_a_function_of_no_module_falls_back_with_the_warning():
    namespace = {"torch": torch}
    exec("def fn(p, x): return torch.nn.functional.rrelu(p * x, training=True).sum() * 0 + (p * x).sum()", namespace)
    fn = namespace["fn"]
    assert fn.__module__ is None
    with pytest.warns(psg.FallbackWarning):
        found = psg.per_sample_grad(fn)(torch.ones(3), torch.ones(2, 3))
    assert_trees_close(found, loop_grad(fn)(torch.ones(3), torch.ones(2, 3)))


@pytest.mark.parametrize(
    "fn, options, note",
    [
        (lambda w, x: F.linear(x.flatten(1), w).sum(), {}, r"gives fn one sample at a time, without the batch dimension: x \(4,\)"),
        (nn.Linear(4, 2), {}, r"calls fn\(params, \*sample\); psg.stateless\(module, criterion\) makes that of a module"),
        (lambda w, x: (x.flatten(2) * w).sum(1), {"method": "batch"}, "fn gets the whole batch, as a module does by psg.stateless"),
    ],
)
def test_errors_of_fn_say_what_it_was_given(fn, options, note):
    with pytest.raises((RuntimeError, TypeError, IndexError), match=note):  # pytest matches notes, too
        psg.per_sample_grad(fn, **options)(torch.ones(3, 4), torch.ones(5, 4))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_errors_of_fn_given_samples_that_cannot_be_moved():
    def fn(w, x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        psg.per_sample_grad(fn)(torch.ones(4), torch.ones(5, 4).to_sparse_csr())


def test_errors_of_a_function_of_a_batch_say_so_where_a_derivative_is_wanted():
    # There the ladder calls it on batches of one, which no user passes.
    with pytest.raises(IndexError, match="fn gets the whole batch, as a module does by psg.stateless"):
        psg.factored_grad(lambda w, x: (x.flatten(2) * w).sum(1), method="batch")(torch.ones(4, requires_grad=True), torch.ones(5, 4))


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_a_function_that_returns_its_parameter(method, device):
    params, x = {"a": torch.tensor(2.0, device=device), "b": torch.ones(2, device=device)}, torch.zeros(3, device=device)
    found = psg.per_sample_grad(lambda p, x: p["a"], method=method)(params, x)
    assert_trees_close(found, {"a": torch.ones(3, device=device), "b": torch.zeros(3, 2, device=device)})
