"""Ops that write one tensor into another, with the gradient on either side: every rung gives the loop's result, or refuses."""

import contextlib
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import is_right_under_vmap
from cases import score
from conftest import as_large
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import psg
from psg.testing import assert_trees_close, loop_grad, loop_value_and_grad

INDEX = [2, 0]


def into(y, place, value):
    """Write into a part of a copy, whichever way the part is taken."""
    y = y.clone()
    place(y).copy_(value)
    return y


def put(y, key, value):
    y = y.clone()
    y[key] = value
    return y


def index(tensor):
    return torch.tensor(INDEX, device=tensor.device)


def stairs(tensor):
    return torch.tensor([[1, 0, 2], [1, 1, 1]], device=tensor.device)


def diagonal(tensor):
    return torch.eye(4, 3, dtype=torch.bool, device=tensor.device)


WRITES = {
    "select_scatter": lambda y, v: torch.select_scatter(y, v[0], 0, 1),
    "select_scatter, last": lambda y, v: torch.select_scatter(y, v[:, 0].repeat(2)[:4], 1, -1),
    "slice_scatter": lambda y, v: torch.slice_scatter(y, v[:2], 0, 1, 3),
    "slice_scatter by steps": lambda y, v: torch.slice_scatter(y, v[:, :2].repeat(2, 1)[:4], 1, 0, 3, 2),
    "diagonal_scatter": lambda y, v: torch.diagonal_scatter(y, v[0], -1),
    "as_strided_scatter": lambda y, v: torch.as_strided_scatter(y, v[:2, :2], (2, 2), (3, 1), 1),
    "index_copy": lambda y, v: y.index_copy(0, index(y), v[:2]),
    "index_add": lambda y, v: y.index_add(0, index(y), v[:2], alpha=2),
    "index_put": lambda y, v: y.index_put((index(y),), v[:2]),
    "index_fill": lambda y, v: y.index_fill(0, index(y), v[0, 0]),
    "scatter": lambda y, v: y.scatter(0, stairs(y)[:1], v[:1]),
    "scatter_add": lambda y, v: y.scatter_add(0, stairs(y), v[:2]),
    "scatter_reduce": lambda y, v: y.scatter_reduce(0, stairs(y), v[:2], "prod"),
    "masked_scatter": lambda y, v: y.masked_scatter(diagonal(y), v),
    "masked_fill": lambda y, v: y.masked_fill(diagonal(y), v[0, 0]),
    "put": lambda y, v: y.put(stairs(y)[0], v[0]),
    "setitem of a row": lambda y, v: put(y, 1, v[0]),
    "setitem of a column": lambda y, v: put(y, (slice(None), 1), v[:, 0].repeat(2)[:4]),
    "setitem by indices": lambda y, v: put(y, index(y), v[:2]),
    "setitem by a mask": lambda y, v: put(y, diagonal(y), v[0]),
    "setitem, broadcast": lambda y, v: put(y, slice(0, 2), v[0]),
    "select": lambda y, v: into(y, lambda c: c.select(0, 1), v[0]),
    "narrow": lambda y, v: into(y, lambda c: c.narrow(0, 1, 2), v[:2]),
    "narrow of columns": lambda y, v: into(y, lambda c: c.narrow(1, 1, 2), v[:1, :2]),
    "diagonal": lambda y, v: into(y, lambda c: c.diagonal(), v[0]),
    "transposed": lambda y, v: into(y, lambda c: c.T[1], v[:, 0].repeat(2)[:4]),
    "flattened": lambda y, v: into(y, lambda c: c.view(-1)[3:6], v[0]),
}  # fmt: skip
SIDES = {
    "parameter": lambda p, x: p,
    "derived": lambda p, x: p.sin(),
    "sample": lambda p, x: x,
    "both": lambda p, x: p * x.mean() + x,
    "nothing": lambda p, x: torch.zeros_like(x),
}
TAUGHT = {"parameter", "derived", "both"}
PAIRS = [(side, other) for side in SIDES for other in SIDES if other != "nothing" and TAUGHT & {side, other}]


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("side, other", PAIRS)
@pytest.mark.parametrize("write", WRITES)
def test_writes(write, side, other, device):
    def fn(p, x, z):
        return score(WRITES[write](SIDES[side](p["y"], x), SIDES[other](p["v"], z)))

    def batch(p, x, z):
        # Clones, as in a loop: `as_strided_scatter` reads a view's memory from where that of the whole begins.
        return torch.stack([fn(p, own.clone(), other.clone()) for own, other in zip(x, z, strict=True)])

    params = {"y": torch.rand(4, 3, device=device) + 0.5, "v": torch.rand(3, 3, device=device) + 0.5}
    samples = torch.randn(2, 4, 3, device=device), torch.randn(2, 3, 3, device=device)
    expected = loop_grad(fn)(params, *samples)
    assert_trees_close(psg.per_sample_grad(fn)(params, *samples), expected)
    for method, function in (("capture", fn), ("vmap", fn), ("batch", batch)):
        try:
            found = psg.per_sample_grad(function, method=method)(params, *samples)
        except (psg.PsgError, RuntimeError):
            continue  # refused, not guessed
        assert_trees_close(found, expected)


# --- masks that depend on the sample ---------------------------------------------------------------------------


TARGETS = {"of both": lambda p, x: p * x, "new": lambda p, x: torch.zeros_like(p), "int": lambda p, x: (3 * x).int()}
MASKS = {"whole": lambda x: x > 0, "rows": lambda x: x[:, 0] > 0, "scalar": lambda x: x[0, 0] > 0}


@pytest.mark.parametrize("value", [0, -2.5, True, "parameter"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_mask_of_the_sample_is_filled(target, mask, value, device):
    def fn(p, x):
        y = TARGETS[target](p["y"], x)
        y[MASKS[mask](x)] = p["v"].to(y.dtype) if value == "parameter" else value
        return (p["y"] * y).sin().sum()

    params = {"y": torch.randn(4, 3, device=device), "v": torch.randn((), device=device)}
    x = torch.randn(5, 4, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(params, x), loop_grad(fn)(params, x))


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("value", [7, 2.5, "number"])
def test_large_integers_beside_those_that_a_mask_fills(value, method, device):
    """`torch.where` of integers and a float is a float, which rounds them."""
    if value == "number" and device.type == "cuda":
        pytest.skip("torch itself refuses to put a float on a GPU into integers")

    def fn(p, ids):
        ids = ids.clone()
        ids[ids % 2 == 0] = p.sum().detach() if value == "number" else value
        return (p * (ids % 5)).sum()

    args = torch.rand(4, device=device), 2**60 + torch.arange(12, device=device).reshape(3, 4) ** 2
    assert_trees_close(psg.per_sample_grad(fn, method=method)(*args), loop_grad(fn)(*args))


# --- inputs that are written into ------------------------------------------------------------------------------


def doubled_then_filled(p, x):
    x.mul_(2)  # makes psg start again on a copy
    held = torch.zeros(3, device=x.device)
    held.copy_(x)  # makes it start again once more
    return (held * p["w"]).sum()


def doubled_then_derived(p, x):
    x.mul_(2)
    w = p["w"] * 1
    w[0] = 0  # a write into a value of parameters alone: makes it start again once more too
    return (w * x).sum()


@pytest.mark.parametrize("fn", [doubled_then_filled, doubled_then_derived])
@pytest.mark.parametrize("n", [1, 4])
def test_a_pass_that_starts_again_starts_from_the_inputs(fn, n, device):
    params, x = {"w": torch.randn(3, device=device)}, torch.randn(n, 3, device=device)
    before = x.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", psg.FallbackWarning)
        found = psg.per_sample_grad(fn)(params, x)
    assert_trees_close(found, loop_grad(fn)(params, before))
    assert torch.equal(x, before)


def test_a_batch_that_starts_again_starts_from_the_inputs(device):
    def fn(p, x):  # at first psg takes the rows of the table for rows of the samples
        x.mul_(2)
        rows = torch.nn.functional.embedding(torch.arange(x.shape[1], device=x.device), p["table"])
        return (x + rows).square().flatten(1).sum(1)

    params, x = {"table": torch.randn(5, 2, device=device)}, torch.randn(3, 3, 2, device=device)
    expected = loop_grad(lambda p, x: fn(p, x[None])[0])(params, x.clone())
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), expected)


def test_a_loop_gives_every_sample_the_shared_arguments_as_they_were(device):
    def fn(p, x, shared):
        shared.mul_(2)
        return (p * x * shared).sum()

    p, x, shared = torch.randn(3, device=device), torch.randn(4, 3, device=device), torch.ones(3, device=device)
    for method in ("loop", "auto"):
        found = psg.per_sample_grad(fn, in_dims=(None, 0, None), method=method)(p, x, shared)
        assert_trees_close(found, 2 * x)
        assert torch.equal(shared, torch.ones_like(shared))


# --- views of a sample's own that are copies under vmap, and the other way round --------------------------------


def done(tensor, write):
    write(tensor)
    return tensor


# y [4, 3], and d, a number of each sample's own.
SELECTED = {
    "a row": lambda y, d: done(y, lambda y: y[d].copy_(2 * y[0].detach() + 1)),
    "a row, by a method": lambda y, d: done(y, lambda y: y[d].mul_(3)),
    "a row, added to": lambda y, d: done(y, lambda y: done(y[d], lambda row: row.add_(1))),
    "a part of a row": lambda y, d: done(y, lambda y: y[d, 1:3].mul_(2)),
    "a column": lambda y, d: done(y, lambda y: y[..., d].zero_()),
    "an entry": lambda y, d: done(y, lambda y: y[d, d].zero_()),
    "what it is selected from": lambda y, d: (lambda row: done(y, lambda y: y.mul_(2)).sum() * row)(y[d]),
    "rows from there": lambda y, d: done(y, lambda y: y.narrow(0, d, 2).mul_(2)),
    "rows from there, zeros": lambda y, d: done(torch.zeros_like(y), lambda cache: cache.narrow(0, d, 1).copy_(y[:1])),
    "a row, by a list": lambda y, d: done(y, lambda y: y[[d]].mul_(3)),
    "a part of a row, by a list": lambda y, d: done(y, lambda y: y[[d, slice(1, 3)]].mul_(3)),
    "columns, in another shape": lambda y, d: (lambda chosen: done(chosen, lambda chosen: chosen.reshape(-1).mul_(3)))(
        y[:, torch.stack([d, d, (d + 1) % 3])]
    ),
    "masked, in another shape": lambda y, d: (lambda t: done(t, lambda t: t.reshape(-1).mul_(3)))(y.T.masked_fill(y.T > 1, y[0, 0])),
    "entries that are taken, in another shape": lambda y, d: (lambda t: done(t, lambda t: t.reshape(-1).mul_(3)))(
        y.take(torch.stack([d, d + 1, d + 2, d]).view(2, 2).T)
    ),
    "a row that is only read": lambda y, d: y[d] * y[d, 1] + y[:, d].sum(),
    "a row that is assigned": lambda y, d: put(y, d, 2.0),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning", "ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("write", SELECTED)
def test_what_a_number_of_the_sample_s_own_selects(write, device):
    def fn(w, x, d):
        return score(SELECTED[write](w * x, d))

    args = torch.rand(4, 3, device=device) + 0.5, torch.randn(3, 4, 3, device=device), torch.tensor([2, 0, 1], device=device)
    expected = loop_grad(fn)(*args)
    assert_trees_close(psg.per_sample_grad(fn)(*args), expected)
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    assert_trees_close(fast(*args), expected)
    assert is_right_under_vmap(fn, *args, expected=expected) == (write in ("a row that is only read", "a row that is assigned"))


THROUGH = {
    "contiguous": lambda y: y.contiguous(),
    "reshape": lambda y: y.reshape(2, -1),
    "flatten": lambda y: y.flatten(),
    "ravel": lambda y: y.ravel(),
    "flatten of a function": lambda y: y.exp().flatten(),
    "zeros": lambda y: torch.zeros_like(y).ravel(),
    "a slice": lambda y: y[:, 1:3].reshape(-1),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("in_dims, lay", [((None, 1), lambda x: x), (None, lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0))])
def test_samples_that_are_not_contiguous_in_their_batch(in_dims, lay, through, method, device):
    """Each sample alone is contiguous, so a write through a reshaped view of it must reach it."""

    def fn(w, x):
        y = w * x
        THROUGH[through](y).mul_(2).add_(x[0, 0])
        return score(y)

    w, x = torch.randn(4, 3, device=device), lay(torch.randn(4 if in_dims else 5, 5 if in_dims else 4, 3, device=device))
    try:
        found = psg.per_sample_grad(fn, in_dims=in_dims, method=method)(w, x)
    except psg.PsgError:
        assert method == "vmap"  # refused: fn reads y after a write into its reshape, of which vmap does not know what a loop makes
    else:
        assert_trees_close(found, loop_grad(fn, in_dims=in_dims)(w, x))


def lstm(y, w, batch_first):
    """Of two sequences."""
    state = y.new_zeros(1, y.shape[0 if batch_first else 1], 2)
    return torch.lstm(y, (state, state), [w[:, :3], w[:, 3:]], False, 1, 0.0, False, False, batch_first)[0]


def channels_last(w, x):
    return (x[:, None] * w[:4, :3]).contiguous(memory_format=torch.channels_last)


# w [8, 5] and x [2, 4, 3], of which one op lays out its output in one way for a sample alone, and in another way for all samples.
LAID_OUT = {
    "a recurrence": lambda w, x: lstm(x, w, True),
    "a recurrence, time first": lambda w, x: lstm(x, w, False),
    "a function of a recurrence": lambda w, x: lstm(x, w, True).sin(),
    "convolved with weights of its own": lambda w, x: F.conv1d(x, w[:4, :4, None] * x[0, :, :1, None]),
    "the same, transposed": lambda w, x: F.conv_transpose1d(x, w[:4, :2, None] * x[0, :, :1, None]),
    "columns, multiplied": lambda w, x: (x[0] * w[:4, :3])[:, (x[1, 0] > 0).long()] * 2,
    "channels last, joined": lambda w, x: torch.cat([channels_last(w, x)] * 2, 1),
    "channels last, stacked": lambda w, x: torch.stack([channels_last(w, x)] * 2),
    "channels last, padded": lambda w, x: F.pad(channels_last(w, x), (1, 1)),
    "channels last, squared": lambda w, x: F.mse_loss(channels_last(w, x), x[:, None].expand(2, 1, 4, 3), reduction="none"),
    "a product": lambda w, x: x[0] * w[:4, :3],
}


def through_a_part(y):
    y.reshape(-1)[1:].mul_(3)
    return y


def both_ways(y):
    flat = y.reshape(-1)
    y.mul_(3)
    return flat


def through_a_reshape_of_a_reshape(y):
    y.flatten().reshape(2, -1)[0].mul_(3)
    return y


def through_a_reshape_in_a_transform(y):
    torch.func.vmap(lambda row: row.reshape(-1))(y).mul_(3)
    return y


def in_a_transform(y):
    flat = y.reshape(-1)
    torch.func.vmap(lambda entry: entry.mul_(3))(flat)
    return y


def read_in_a_transform(y):
    flat = y.reshape(-1)
    y.mul_(3)
    return torch.func.vmap(lambda entry: entry * 2)(flat)


def by_operators(y):
    torch.ops.aten.mul_.Tensor(torch.ops.aten.reshape(y, [-1]), 3.0)
    return y


def through_itself(y):
    y.transpose(0, -1).contiguous().mul_(3)
    return y


WRITTEN_INTO = {
    "a part": through_a_part,
    "the reshaped": both_ways,
    "a reshape of a reshape": through_a_reshape_of_a_reshape,
    "a reshape in a transform": through_a_reshape_in_a_transform,
    "in a transform": in_a_transform,
    "read in a transform": read_in_a_transform,
    "by operators": by_operators,
    "contiguous": through_itself,
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning", "ignore:Using a target size")
@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
@pytest.mark.parametrize("write", WRITTEN_INTO)
@pytest.mark.parametrize("make", LAID_OUT)
def test_reshapes_of_what_is_laid_out_otherwise_for_all_samples(make, write, method, device):
    """A reshape may be a view where in a loop it is a copy, or the other way round: a write into it would be missed, or be too much."""

    def fn(w, x):
        return score(WRITTEN_INTO[write](LAID_OUT[make](w, x)))

    def with_result(w, x):
        y = LAID_OUT[make](w, x)
        loss = score(y)
        return loss, WRITTEN_INTO[write](y.detach() * 1)

    args = torch.randn(8, 5, device=device), torch.randn(3, 2, 4, 3, device=device)
    for function, has_aux in ((fn, False), (with_result, True)):
        expected = loop_value_and_grad(function, has_aux=has_aux)(*args)
        try:
            found = psg.per_sample_value_and_grad(function, method=method, has_aux=has_aux)(*args)
        except (psg.PsgError, RuntimeError):
            assert method != "auto"
        else:
            assert_trees_close(found, expected)
    if method == "auto":
        assert not is_right_under_vmap(fn, *args, expected=loop_grad(fn)(*args))


KEPT = {
    "a reshape alone is used on": lambda y: y.flatten().relu_() * 2,
    "parts of a reshape": lambda y: (lambda rows: rows[0].mul_(2) + rows[1].add_(1))(y.reshape(2, -1)),
    "a reshape is written into, then reshaped": lambda y: y.flatten().mul_(2).reshape(3, 4).add_(1).reshape(-1),
    "what was reshaped is written into alone": lambda y: (y.reshape(-1).sum(), y.mul_(2))[1],
    "the input, by a reshape": lambda y: y,
}


@pytest.mark.parametrize("use", KEPT)
def test_reshapes_that_are_written_into_stay_on_the_first_rung(use, device):
    def fn(w, x):
        x.reshape(-1)[1:].mul_(3)  # contiguous: a view, also in a loop
        return score(KEPT[use](x * w)) + score(x * w)

    args = torch.randn(4, 3, device=device), torch.randn(5, 4, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(*args), loop_grad(fn)(*args))


@pytest.mark.parametrize(
    "convert", [lambda t: t.contiguous(), lambda t: t.to(memory_format=torch.contiguous_format), lambda t: t[0].flatten()]
)
@pytest.mark.parametrize("quiet", [True, False])
def test_what_is_returned_as_it_is_keeps_its_history(convert, quiet, device):
    """Also where autograd is off, and after a write, from which on such tensors are told apart."""

    def fn(w, x):
        other = (x * w).T.contiguous()
        other.mul_(2)  # after a reshape: from here on such tensors are followed
        hidden = x * w
        with torch.no_grad() if quiet else contextlib.nullcontext():
            same = convert(hidden)
        return hidden.sin().sum() + (same * w).sum() + other.sum()

    w, x = torch.randn(2, 3, device=device), torch.randn(4, 2, 3, device=device)
    slow = [torch.autograd.grad(fn(own := w.clone().requires_grad_(), row), own)[0] for row in x]
    fast = psg.per_sample_grad(fn)
    for _ in range(2):  # the second call follows such tensors from the start
        assert_trees_close(fast(w, x), torch.stack(slow))


def test_a_write_that_no_mode_sees_is_refused(device):
    def fn(w, x):
        with torch._C.DisableTorchFunction():
            x.mul_(2)
        return (w * x).sin().sum()

    args = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    with pytest.raises(psg.StateError, match="fn writes into an argument where psg does not see it"):
        psg.per_sample_grad(fn)(*args)


def test_the_message_names_the_op_that_reads(device):
    def fn(w, x):
        y = x * w
        y.reshape(-1).mul_(2)
        return y.exp().sum()

    args = torch.randn(4, 3, device=device), torch.randn(5, 4, 3, device=device)
    with pytest.raises(psg.PsgError, match="exp reads a tensor after a write into another, where one is a reshape of the other"):
        psg.per_sample_grad(fn, method="capture")(*args)
    with pytest.warns(psg.FallbackWarning, match="exp reads a tensor after a write"):
        assert_trees_close(psg.per_sample_grad(fn)(*args), loop_grad(fn)(*args))


@pytest.mark.parametrize(
    "make", [lambda w, x: lstm(x, w, True), lambda w, x: lstm(x.transpose(0, 1), w, False).transpose(0, 1), lambda w, x: w[:3, :3] @ x.mT]
)
def test_outputs_that_are_laid_out_otherwise_for_rows(make, device):
    def fn(w, x):
        y = make(w, x)
        base = y if y.is_contiguous() else y.transpose(0, 1)
        base.reshape(-1).mul_(3)
        y.reshape(-1).mul_(3)
        return (y**2).flatten(1).sum(1)

    w, x = torch.randn(8, 5, device=device), torch.randn(3, 4, 3, device=device)
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN's recurrent layers run under no transform
        expected = torch.stack([torch.func.grad(lambda w, i=i: fn(w, x)[i])(w) for i in range(len(x))])
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x), expected)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
@pytest.mark.parametrize("table", [lambda x, t: torch.zeros(3, 4, device=x.device), lambda x, t: t, lambda x, t: t[None][0] * 2])
def test_a_row_of_what_all_samples_share(table, method, device):
    """A number of each sample's own selects a view in a loop, but a copy under vmap: the table would stay as it is."""

    def fn(w, x, i, t):
        rows = table(x, t)
        rows[i].add_(1)
        return (rows * x * w).sin().sum()

    w, x, t = torch.randn(4, device=device), torch.randn(3, 3, 4, device=device), torch.randn(3, 4, device=device)
    args, in_dims = (w, x, torch.tensor([2, 0, 1], device=device), t), (None, 0, 0, None)
    try:
        found = psg.per_sample_grad(fn, in_dims=in_dims, method=method)(*args)
    except (psg.PsgError, RuntimeError):
        assert method != "auto"
    else:
        assert_trees_close(found, loop_grad(fn, in_dims=in_dims)(*args))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("op", [torch.ops.aten.mul_, torch.ops.aten.mul_.Tensor])
@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
def test_operators_write_into_no_tensor_of_the_caller(op, method, device):
    def fn(w, x):
        op(x, 2.0)
        return (w * x).sin().sum()

    def into_the_parameter(w, x):
        op(w.detach(), 2.0)
        return (w * x).sin().sum()

    w, x = torch.randn(4, device=device), torch.randn(3, 4, device=device)
    before = w.clone(), x.clone()
    assert_trees_close(psg.per_sample_grad(fn, method=method)(w, x), loop_grad(fn)(*before))
    if method != "vmap":
        with contextlib.suppress(psg.PsgError):
            psg.per_sample_grad(into_the_parameter, method=method)(w, x)
    assert_trees_close((w, x), before)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_a_function_that_writes_into_its_argument(device):
    class Double(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.mul_(2)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_dirty(inputs[0])

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent * 2

    def fn(w, x):
        Double.apply(x)
        return (w * x).sin().sum()

    w, x = torch.randn(4, device=device), torch.randn(3, 4, device=device)
    before = x.clone()
    assert_trees_close(psg.per_sample_grad(fn)(w, x), loop_grad(fn)(w, before))
    assert_trees_close(x, before)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_a_list_in_place_and_its_views(method, device):
    def fn(w, x):
        y = w * 2
        view = y[None][0]
        torch._foreach_mul_([y], 3.0)
        return (view * x).sin().sum()

    args = torch.randn(4, device=device), torch.randn(3, 4, device=device)
    try:
        found = psg.per_sample_grad(fn, method=method)(*args)
    except psg.PsgError:
        assert method == "vmap"
    else:
        assert_trees_close(found, loop_grad(fn)(*args))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_conversions_to_a_layout_that_a_tensor_already_has(layout, device):
    def fn(w, x):
        y = (x * w).unsqueeze(2)
        both = y.contiguous(memory_format=torch.channels_last)
        both.double(memory_format=layout)[0].mul_(3)
        return score(both)

    args = torch.randn(2, 3, 1, device=device).double(), torch.randn(2, 2, 3, 1, device=device).double()
    assert_trees_close(psg.per_sample_grad(fn)(*args), loop_grad(fn)(*args))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("shape", [(1, 1, 4, 6), (1, 24, 1, 1), (4, 6, 1, 1)])
@pytest.mark.parametrize("convert", [lambda y, **f: y.to(**f), lambda y, **f: y.double(**f), lambda y, **f: y.contiguous(**f)])
def test_a_tensor_in_both_layouts_at_once(convert, shape, device):
    def fn(w, x):
        y = w * x
        other = convert(y, memory_format=torch.channels_last)
        other.mul_(2)
        return score(y) + score(other.clone())

    args = torch.randn(shape, device=device), torch.randn(3, *shape, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(*args), loop_grad(fn)(*args))


INTO = {
    "a sum": lambda x, out: torch.cumsum(x.detach(), 0, out=out[1:]),
    "numbers of its own": lambda x, out: torch.mul(x.detach(), 2, out=out[:-1]),
    "numbers for all": lambda x, out: torch.arange(4.0, out=out[1:]),
}


@pytest.mark.parametrize("make", [lambda x: torch.zeros(5, device=x.device), lambda x: x.new_zeros(5)], ids=["of its own", "of the sample"])
@pytest.mark.parametrize("op", INTO)
def test_ops_into_tensors_that_they_are_given(op, make, device):
    def fn(w, x):
        out = make(x)
        INTO[op](x, out)
        return (w * out).square().sum()

    psg.check(fn, method="capture")(torch.randn(5, device=device), torch.randn(3, 4, device=device))


def test_an_op_into_a_tensor_that_does_not_fit_is_torch_s_own_error(device):
    def fn(w, x):
        counts = torch.zeros(4, dtype=torch.int64, device=x.device)
        return (w * torch.add(x.detach(), 1, out=counts)).sum()

    with pytest.raises(RuntimeError, match="can't be cast"):
        psg.per_sample_grad(fn)(torch.randn(4, device=device), torch.randn(3, 4, device=device))


def test_an_op_into_a_tensor_is_not_differentiated_as_in_torch(device):
    def fn(w, x):
        out = torch.empty(4, device=x.device)
        torch.mv(w, x, out=out)
        return out.sin().sum()

    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        psg.per_sample_grad(fn)(torch.randn(4, 3, device=device), torch.randn(5, 3, device=device))


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize(
    "write",
    [
        lambda p, x: x[3:].zero_(),
        lambda p, x: x[:0].add_(p[0]),
        lambda p, x: x[0].copy_(p[0]),
        lambda p, x: x.unflatten(0, (1, 3)).add_(p[0]),
        lambda p, x: x.__setitem__(0, p[0]),
    ],
    ids=["zeros into an empty part", "a parameter into an empty part", "a parameter", "a parameter into a view", "a parameter by index"],
)
@pytest.mark.parametrize("n", [0, 1, 4])
def test_writes_of_nothing_and_of_parameters_into_an_argument(write, n, device):
    def fn(p, x):
        write(p, x)
        return (p * x).sin().sum()

    p, x = torch.randn(3, device=device), torch.randn(n, 3, device=device)
    before = x.clone()
    assert_trees_close(psg.per_sample_grad(fn)(p, x), loop_grad(fn)(p, x))
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
def test_a_masked_write_into_a_number(device):
    def fn(p, x):
        y = x * p[0]
        y[y > 0.3] = 0.7
        return y * p[1]

    p, x = torch.randn(2, device=device), torch.randn(5, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(p, x), loop_grad(fn)(p, x))


def _moved(tensor):
    """As libraries move a parameter to the device of its input, where it mostly is already."""
    tensor.data = tensor.data.to(tensor.device)
    return tensor


def _assigned(tensor, change):
    tensor.data = change(tensor.data)
    return tensor


ASSIGNED = {
    "a parameter": (lambda w, x: (_moved(w) @ x).tanh().sum(), "capture"),
    "a sample": (lambda w, x: (w @ _moved(x)).tanh().sum(), "capture"),
    "a value of a parameter": (lambda w, x: (_moved(w * 2) @ x).tanh().sum(), "capture"),
    "a view": (lambda w, x: (_assigned(w[0], lambda data: w.data[0]) * x).tanh().sum(), "capture"),
    "another row": (lambda w, x: (_assigned(w[0], lambda data: w.data[1]) * x).tanh().sum(), "loop"),
    "the transpose": (lambda w, x: (_assigned(w * 1, lambda data: data.T) @ x).tanh().sum(), "loop"),
    "another value": (lambda w, x: (_assigned(w * 1, torch.sin) @ x).tanh().sum(), "loop"),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(("fn", "rung"), ASSIGNED.values(), ids=ASSIGNED)
def test_data_that_is_assigned(fn, rung, device):
    """Assigning a tensor's own data changes nothing, on any rung."""
    w, x = torch.randn(3, 3, device=device), torch.randn(4, 3, device=device)
    expected = loop_grad(fn)(w, x)
    assert_trees_close(psg.per_sample_grad(fn)(w, x), expected)
    assert psg.explain(fn)(w, x).rung == rung
    if rung == "capture":
        assert_trees_close(psg.per_sample_grad(fn, method="vmap")(w, x), expected)
        assert_trees_close(psg.jit(psg.per_sample_grad(fn), backend="eager")(w, x), expected)


def test_data_that_is_assigned_in_a_batch(device):
    w, x = torch.randn(3, 3, device=device), torch.randn(4, 3, device=device)
    batch = psg.per_sample_grad(lambda w, x: F.linear(x, _moved(w)).tanh().sum(1), method="batch")(w, x)
    assert_trees_close(batch, loop_grad(lambda w, x: (w @ x).tanh().sum())(w, x))


class Flags(torch.nn.Module):
    """Sets `requires_grad` by assignment, which writes no values, as `requires_grad_` writes none."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        self.linear.weight.requires_grad = True
        self.scale.requires_grad = False
        return self.linear(x).tanh() * self.scale


@pytest.mark.parametrize("method", ["capture", "vmap", "loop", "batch"])
def test_flags_that_are_assigned_are_no_writes(method, device):
    module, x = Flags().to(device), torch.randn(4, 3, device=device)
    loss, params = psg.stateless(module, lambda output: output.sum(-1), batch_dim=None)
    plain, _ = psg.stateless(module, lambda output: output.sum())
    expected = loop_grad(lambda p, x: (F.linear(x, p["linear.weight"], p["linear.bias"]).tanh() * module.scale).sum())(params, x)
    assert_trees_close(psg.per_sample_grad(loss if method == "batch" else plain, method=method)(params, x), expected)


# --- places of samples --------------------------------------------------------------------------------------

_I = torch.tensor([0, 2, 1])
# Of y [3, 3, 2], values v [3, 3], the places of all samples alike, those of each sample's own, and a number of each sample's own.
PLACES = {
    "behind a dimension": lambda y, v, i, own, k: put(y, (slice(None), own), v[:, :, None]),
    "behind a dimension, of an ellipsis": lambda y, v, i, own, k: put(y, (..., own % 2), v[:, None]),
    "behind a number": lambda y, v, i, own, k: put(y, (slice(1, None), 1, own % 2), v[1:]),
    "in two dimensions that are apart": lambda y, v, i, own, k: put(y, (own, slice(None), own % 2), v),
    "alike, in two dimensions that are apart": lambda y, v, i, own, k: put(y, (i, slice(None), i % 2), v),
    "alike and of their own": lambda y, v, i, own, k: put(y, (i, slice(None), own % 2), v),
    "behind a new dimension": lambda y, v, i, own, k: put(y, (None, own, slice(None), i % 2), v[:, None]),
    "of two dimensions": lambda y, v, i, own, k: put(y, (slice(None), own.expand(2, 3)), v[:, None, :, None]),
    "added to": lambda y, v, i, own, k: put(y, (slice(None), own), y[:, own] + v[:, :, None]),
    "in lists": lambda y, v, i, own, k: put(y, ([0, 2, 1], slice(None), [1, 0, 1]), v),
    "beside a mask": lambda y, v, i, own, k: put(y, (i > -1, slice(None), own % 2), v),
    "beside a mask of their own": lambda y, v, i, own, k: put(y, (own > -1, slice(None), i % 2), v),
    "a number": lambda y, v, i, own, k: put(y, (slice(None), k), v[:, :2]),
    "a number, and places": lambda y, v, i, own, k: put(y, (k, slice(None), own % 2), v),
    "a number, for a number": lambda y, v, i, own, k: put(y, (..., k, 0), 2.0),
    "by index_put_": lambda y, v, i, own, k: torch.ops.aten.index_put_(y, [own, None, i % 2], v),
    "by index_put_, accumulated": lambda y, v, i, own, k: torch.ops.aten.index_put_(y, [i, None, own % 2], v, True),
    "by index_put": lambda y, v, i, own, k: torch.ops.aten.index_put(y, [None, own, i % 2], v),
    "read, a number and places": lambda y, v, i, own, k: y[k, :, own % 2] * v,
    "read, a number and places alike": lambda y, v, i, own, k: y[k, :, i % 2] * v,
    "read, apart": lambda y, v, i, own, k: y[own, :, i % 2] * v,
    "read, a number, NumPy's, and places": lambda y, v, i, own, k: y[k, None, np.int64(1), own % 2] * v,
    "read, a number and a tuple": lambda y, v, i, own, k: y[k, :, (0, 1, 1)] * v,
    "read, a number beside True": lambda y, v, i, own, k: y[k, :, True],
    "read, a number beside what is true": lambda y, v, i, own, k: y[k, :, k > -1],
    "read, a number beside False": lambda y, v, i, own, k: y[k, :, False],
    "a number beside True": lambda y, v, i, own, k: put(y, (k, slice(None), True), v[:, None, :2]),
    "beside True": lambda y, v, i, own, k: put(y, (slice(None), own, True), v[:, :2]),
    "behind a number of NumPy's": lambda y, v, i, own, k: put(y, (slice(1, None), np.int64(1), own % 2), v[1:]),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
@pytest.mark.parametrize("use", PLACES.values(), ids=PLACES)
def test_places_of_samples(use, method, device):
    """vmap put the values into places in another order, which no error showed where the sizes were the same."""

    def fn(params, x, own, k):
        y = use(params["w"] * x * 1, params["v"], _I.to(x.device), own, k)
        return (y * weights[tuple(map(slice, y.shape))]).sum().sin()

    weights = torch.randn(3, 3, 3, device=device)
    params = {"w": torch.randn(3, 3, 2, device=device), "v": torch.randn(3, 3, device=device)}
    x, own = torch.randn(4, 3, 3, 2, device=device), torch.stack([torch.randperm(3, device=device) for _ in range(4)])
    args = params, x, own, torch.tensor([0, 1, 1, 0], device=device)
    try:
        found = psg.per_sample_grad(fn, method=method)(*args)
    except (RuntimeError, psg.PsgError):
        assert method == "vmap"  # a number that it cannot read, masks
        return
    assert_trees_close(found, loop_grad(fn)(*args))


@st.composite
def subscripts(draw):
    """Sizes of a tensor, and what stands in the brackets for each dimension."""
    sizes = draw(st.lists(st.integers(2, 3), min_size=2, max_size=4))
    lead = draw(st.sampled_from([(1,), (2,), (3,), (2, 2)]))  # the places' own dimensions
    items = []
    for size in sizes:
        items += [None] * draw(st.sampled_from([0, 0, 0, 1]))
        items.append(draw(st.sampled_from(["own", "own", "alike", "list", "number", slice(None), slice(0, 2), size - 1, -1])))
    if draw(st.booleans()):
        first = draw(st.integers(0, len(items)))
        items[first:] = [...]
    if "own" not in items and "alike" not in items:
        items = ["own" if item == "list" else item for item in items]
    return sizes, lead, items


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@given(subscript=subscripts(), n=st.integers(0, 3), part=st.booleans(), seed=st.integers(0, 99))
def test_drawn_places_of_samples(subscript, n, part, seed):
    """Reads and writes at drawn places, of values that may broadcast; a place is never written twice."""
    sizes, lead, items = subscript
    torch.manual_seed(seed)
    dims = iter(sizes[: sum(item is not None and item is not ... for item in items)])
    places = [None if item is None or item is ... else next(dims) for item in items]
    count = math.prod(lead)
    assume(all(item not in ("own", "alike", "list") or count <= size for item, size in zip(items, places, strict=True)))

    def drawn(item, size):
        if item == "number":
            return torch.randint(0, size, (n,))
        rows = torch.stack([torch.randperm(size)[:count].reshape(lead) for _ in range(max(n, 1))])
        return rows[:n] if item == "own" else rows[0]

    found = {i: drawn(item, size) for i, (item, size) in enumerate(zip(items, places, strict=True)) if isinstance(item, str)}
    own = {i: place for i, place in found.items() if items[i] in ("own", "number")}

    def key(own):
        return tuple(
            own[i] if i in own else found[i].tolist() if item == "list" else found[i] if i in found else item
            for i, item in enumerate(items)
        )

    w, x = torch.randn(sizes), torch.randn(n, *sizes)
    shape = w[key({i: place[0] if n else torch.zeros(place.shape[1:], dtype=torch.int64) for i, place in own.items()})].shape
    v, weights = torch.randn(shape[1:] if part and shape else shape), torch.randn(max(shape, default=1), *sizes)

    def write(params, x, own):
        return (put(params["w"] * x, key(own), params["v"]) * weights[0]).sum().sin()

    def read(params, x, own):
        return ((params["w"] * x)[key(own)] * params["v"] * torch.arange(1.0, 1 + shape.numel()).reshape(shape)).sum().sin()

    args = {"w": w, "v": v}, x, own
    for fn in (write, read):
        expected = loop_grad(fn)(*args)
        assert_trees_close(psg.per_sample_grad(fn)(*args), expected)
        with contextlib.suppress(RuntimeError):  # vmap cannot read a number of each sample's own
            assert_trees_close(psg.per_sample_grad(fn, method="vmap")(*args), expected)


def test_values_that_do_not_fit_places(device):
    """The loop's error, where vmap would have taken them."""
    args = torch.ones(2, 2, device=device), torch.ones(3, 2, 2, device=device), torch.ones(3, 1, device=device).long()
    with pytest.raises(RuntimeError, match="shape|size"):
        psg.per_sample_grad(lambda w, x, i: put(w * x, (slice(None), i), w[0]).sum())(*args)


@given(
    n=st.integers(0, 4),
    t=st.integers(1, 4),
    i=st.integers(1, 3),
    o=st.integers(1, 3),
    rows=st.booleans(),
    own=st.booleans(),
    as_tensor=st.booleans(),
    seed=st.integers(0, 99),
)
def test_numbers_written_by_masks(n, t, i, o, rows, own, as_tensor, seed, device):
    """By masks of each sample's own, and by one that all samples share; of entries, and of rows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (t,) if rows else (t, o)
    mask = (torch.rand((n, *shape) if own else shape, generator=generator) < 0.5).to(device)
    w, x = torch.randn(i, o, device=device), torch.randn(n, t, i, device=device)

    def fn(w, x, mask):
        hidden = x @ w
        value = torch.tensor(0.5, device=device) if as_tensor else 0.5
        hidden[mask] = value
        return (hidden @ w.T).sin().sum()

    axes = (None, 0, 0 if own else None)
    expected = psg.per_sample_grad(fn, in_dims=axes, method="loop")(w, x, mask)
    assert_trees_close(psg.per_sample_grad(fn, in_dims=axes, method="capture")(w, x, mask), expected)


KEYS_WITH_MASKS = {
    "mask": lambda mask: mask,
    "dots": lambda mask: (..., mask, slice(None)),
    "dots behind": lambda mask: (mask, ...),
    "slice behind": lambda mask: (mask, slice(1, None)),
    "number behind": lambda mask: (mask, 0),
    "new dimension": lambda mask: (mask, None, -1),
}
"""With a mask of rows, [t], for a tensor [t, o]."""

BEHIND = {
    "all": lambda mask: (slice(None), mask),
    "number": lambda mask: (0, mask),
    "dots": lambda mask: (..., mask),
    "new dimensions": lambda mask: (None, slice(None), mask, None),
}
"""With a mask of columns, [o]."""


@given(
    n=st.sampled_from([0, 1, 3]),
    t=st.integers(1, 3),
    o=st.integers(1, 3),
    case=st.sampled_from([*((0, key) for key in KEYS_WITH_MASKS), *((1, key) for key in BEHIND)]),
    shape=st.sampled_from([(), (1,), (0,), (1, 0), (1, 1), (1, 1, 1, 1, 1, 0)]),
    made=st.sampled_from(["samples", "parameter", "zeros"]),
    op=st.sampled_from(["brackets", "index_put_", "index_put", "accumulate"]),
    seed=st.integers(0, 99),
)
def test_one_row_written_by_masks(n, t, o, case, shape, made, op, seed, device):
    """Where masks of each sample's own select different numbers of entries, all of which get the same: a number, a row or a parameter."""
    generator = torch.Generator().manual_seed(seed)
    dim, name = case
    mask = (torch.rand((n, (t, o)[dim]), generator=generator) < 0.5).to(device)
    key = (KEYS_WITH_MASKS, BEHIND)[dim][name]
    free = torch.ones(t, o)[key(torch.ones((t, o)[dim], dtype=torch.bool))].shape[-1]  # 0 stands for it
    free = 1 if dim or name in ("number behind", "new dimension") else free
    w, x = torch.randn(o, o, device=device), torch.randn(n, t, o, device=device)
    row = torch.randn([size or free for size in shape], device=device)

    def fn(params, x, mask):
        w, row = params
        zeros = torch.zeros(t, o, device=device)
        hidden = {"samples": x @ w, "parameter": w[:1] + zeros, "zeros": zeros}[made]
        if op == "brackets" or dim:
            hidden[key(mask)] = row
        else:
            values = row[(0,) * max(0, row.ndim - 2)][..., :1] if row.ndim else row
            put = hidden.index_put_ if op == "index_put_" else hidden.index_put
            hidden = put((mask,), values, accumulate=op == "accumulate")
        return ((hidden + x) @ w).sin().sum() + row.sum() * w.sum()

    expected = psg.per_sample_grad(fn, method="loop")((w, row), x, mask)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")((w, row), x, mask), expected)


def test_a_mask_token_compiles(device):
    def fn(params, x, mask):
        w, token = params
        hidden = x @ w
        hidden[mask] = token
        return (hidden @ w.T).sin().sum()

    params, x = (torch.randn(3, 4, device=device), torch.randn(4, device=device)), torch.randn(3, 5, 3, device=device)
    compiled = psg.jit(psg.per_sample_grad(fn), backend="eager")
    for least in (0.2, 0.6):
        mask = torch.rand(3, 5, device=device) > least
        assert_trees_close(compiled(params, x, mask), loop_grad(fn)(params, x, mask))
    assert [entry.error for entry in compiled.cache_info()] == [None]


@pytest.mark.parametrize("shape", [(2,), (3, 1), (2, 1, 4)])
def test_rows_that_do_not_fit_what_a_mask_selects(shape, device):
    """The loop's error."""
    mask = torch.tensor([[True, False, True], [True, False, False], [True, True, True], [False] * 3], device=device)
    row = torch.ones(shape, device=device)
    with pytest.raises((RuntimeError, IndexError), match="shape|size"):
        psg.per_sample_grad(lambda w, x, m: put(w * x, m, row).sum())(
            torch.ones(4, device=device), torch.ones(4, 3, 4, device=device), mask
        )


# --- writes into what is computed once for all samples, and into new constants -------------------------------------------


SIZE, ROWS = 3, [0, 2, 2]


def rows_of(tensor):
    return torch.tensor(ROWS, device=tensor.device)


def add_to_a_row(target, source):
    target[0] += source[1]


def by_scatter(target, source):
    target.scatter_add_(0, rows_of(source)[:, None].expand_as(source), source)


MADE = {
    "zeros": lambda a, b: torch.zeros(SIZE, SIZE, device=a.device),
    "eye": lambda a, b: torch.eye(SIZE, device=a.device),
    "zeros_like": lambda a, b: torch.zeros_like(a),
    "new_zeros": lambda a, b: a.new_zeros(SIZE, SIZE),
    "clone": lambda a, b: a.clone(),
    "twice": lambda a, b: a * 2,
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a @ b,
    "sine": lambda a, b: a.sin(),
    "rows": lambda a, b: a[rows_of(a)],
    "view": lambda a, b: a[:],
    "transposed": lambda a, b: a.T,
    "reshaped": lambda a, b: a.T.reshape(-1).view(SIZE, SIZE),
    "contiguous": lambda a, b: a.contiguous(),
    "detached": lambda a, b: a.detach(),
    "itself": lambda a, b: a,
}
WRITTEN = {
    "add_": lambda a, b: a.add_(b),
    "+=": lambda a, b: a.__iadd__(b),
    "mul_": lambda a, b: a.mul_(2.0),
    "sub_": lambda a, b: a.sub_(b, alpha=0.5),
    "relu_": lambda a, b: torch.relu_(a),
    "relu in place": lambda a, b: F.relu(a, inplace=True),
    "clamp_": lambda a, b: a.clamp_(-1.0, 1.0),
    "zero_": lambda a, b: a.zero_(),
    "fill_": lambda a, b: a.fill_(b[0, 0]),
    "copy_": lambda a, b: a.copy_(b),
    "t_": lambda a, b: a.t_(),
    "index_add_": lambda a, b: a.index_add_(0, rows_of(b), b),
    "scatter_add_": by_scatter,
    "masked_fill_": lambda a, b: a.masked_fill_(torch.eye(SIZE, dtype=torch.bool, device=a.device), 0.7),
    "a row": lambda a, b: a.__setitem__(0, b[1]),
    "rows": lambda a, b: a.__setitem__(rows_of(a)[:2], b[:2]),
    "a column": lambda a, b: a.__setitem__((..., 1), 1.5),
    "rows of a view": lambda a, b: a[1:].add_(b[1:]),
    "a row added": add_to_a_row,
    "its diagonal": lambda a, b: a.diagonal().copy_(b[0]),
    "its diagonal, in place": lambda a, b: a.diagonal().tanh_(),
    "its diagonal filled": lambda a, b: a.fill_diagonal_(0.3),
    "a flat view": lambda a, b: a.view(-1).__setitem__(slice(2, 5), 1.0),
}  # fmt: skip
STEPS = [*((name, False) for name in MADE), *((name, quiet) for name in WRITTEN for quiet in (False, False, True))]


def run_program(steps, p, x):
    """Each step makes a tensor of two earlier ones, or writes the second into the first, which is none of the arguments."""
    held = [p["w"], p["b"].expand(SIZE, SIZE), x, torch.full((SIZE, SIZE), 0.5, device=x.device)]
    for (name, quiet), i, j in steps:
        a, b = held[i % len(held)], held[j % len(held)]
        if name in MADE:
            held.append(MADE[name](a, b))
            continue
        with torch.no_grad() if quiet else contextlib.nullcontext():
            WRITTEN[name](held[3 + i % (len(held) - 3)], b)
    return sum(((1 + k) * tensor).sin().sum() for k, tensor in enumerate(held))


@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 11), st.integers(0, 11)), min_size=2, max_size=8),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_drawn_programs_that_write(steps, n, seed):
    """Writes reach all views of what is written into and nothing else, with the history that they have in plain PyTorch."""
    generator = torch.Generator().manual_seed(seed)
    p = {"w": torch.randn(SIZE, SIZE, generator=generator), "b": torch.randn(SIZE, generator=generator)}
    x = torch.randn(n, SIZE, SIZE, generator=generator)

    def fn(p, x):
        return run_program(steps, p, x)

    def alone(row):
        live = {name: value.clone().requires_grad_() for name, value in p.items()}
        found = torch.autograd.grad(fn(live, row.clone()), list(live.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(live, found, strict=True))

    try:
        alone(torch.zeros(SIZE, SIZE))
    except (RuntimeError, UserWarning):
        assume(False)  # a program that plain PyTorch refuses, or warns of
    expected = [alone(row) for row in x]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", psg.FallbackWarning)
        warnings.filterwarnings("ignore", "There is a performance drop")
        found = psg.per_sample_grad(fn)(p, x)
    for name, value in p.items():
        assert_trees_close(found[name], torch.stack([own[name] for own in expected]) if n else value.new_zeros(0, *value.shape))


def of_a_graph(p, x):
    """A layer over a whole graph that adds messages to new zeros, as those of torch_geometric do."""
    hidden = p["w"] @ p["w"]
    hidden += p["b"]
    hidden = F.relu(hidden, inplace=True)
    messages = hidden[rows_of(hidden)]
    added = messages.new_zeros(SIZE, SIZE).scatter_add_(0, rows_of(hidden)[:, None].expand_as(messages), messages)
    return (added * x).sum()


def of_several_writes(p, x):
    total = torch.zeros_like(p["w"])
    for k in range(3):
        total += p["w"] * k
        total.mul_(p["b"])
    return (total * x).sum()


def of_itself(p, x):
    total = torch.ones(SIZE, SIZE, device=x.device)
    total += p["w"]
    total.add_(total)
    return (total * x).sum()


def of_another_name(p, x):
    total = other = p["w"] * 2
    total += p["b"]
    return (other * x).sum()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("fn", [of_a_graph, of_several_writes, of_itself, of_another_name])
def test_what_is_written_into_is_still_computed_once(fn, jit, device, monkeypatch):
    as_large(monkeypatch)
    p = {"w": torch.randn(SIZE, SIZE, device=device), "b": torch.randn(SIZE, device=device)}
    x = torch.randn(2, SIZE, SIZE, device=device)
    per_sample = psg.per_sample_grad(fn, method="capture")
    assert_trees_close((psg.jit(per_sample, backend="eager") if jit else per_sample)(p, x), loop_grad(fn)(p, x))
    uses = [use for leaf in psg.explain(fn)(p, x).leaves for use in leaf.uses]
    assert uses and not any("_: lifted" in use or "zeros" in use or "clone" in use for use in uses)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_constant_becomes_each_sample_s_own_where_samples_write(n, device):
    """Until then it has a Python value."""

    def fn(p, x):
        table, other = torch.zeros(3, device=device), torch.eye(3, device=device)
        scale = 2.0 if table.sum().item() == 0 else 3.0
        table[0] = x.sum()
        other[1] += x
        return (table * p * scale).sin().sum() + (other @ p).sin().sum()

    p, x = torch.randn(3, device=device), torch.randn(n, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(p, x), loop_grad(fn)(p, x))


def stored(table):
    return torch.empty(0).set_(table.untyped_storage())


def assigned(table):
    array = np.zeros(3)
    table.data = torch.from_numpy(array)
    return array


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("seen", [Tensor.numpy, lambda t: t.detach().numpy(), lambda t: t[:1], np.asarray, stored, assigned])
def test_what_else_sees_the_memory_of_a_constant_sees_a_write(seen, device):
    if device.type != "cpu":
        pytest.skip("arrays are on the CPU")

    def fn(p, x):
        table = torch.zeros(3)
        view = seen(table)
        table += p
        return (table * x).sum() + float(view[0])

    p, x = torch.tensor([2.0, 3.0, 4.0]), torch.randn(2, 3)
    assert_trees_close(psg.per_sample_value_and_grad(fn)(p, x)[0], x @ p + 2.0)


def test_a_tensor_that_fn_is_given_to_fill_is_not_new(device):
    kept = torch.zeros(3, device=device)

    def fn(p, x):
        steps = torch.arange(3, out=kept, dtype=p.dtype, device=device)
        steps += p
        return (steps * x).sum()

    with pytest.raises(psg.StateError, match="kept from an earlier call"), warnings.catch_warnings():
        warnings.simplefilter("ignore", psg.FallbackWarning)
        psg.per_sample_grad(fn)(torch.randn(3, device=device), torch.randn(2, 3, device=device))
    assert type(kept) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(kept)


def filled(table, p, x):
    table.copy_(x)
    table.mul_(2)
    return (table.clone() * p).sum()


def filled_from_a_parameter(table, p, x):
    with torch.no_grad():
        table.copy_(p)
    return (table.clone() * p * x).sum()


def filled_before_a_reshape(table, p, x):
    table[0] = x.sum()
    twice = x * 2
    rows = twice.reshape(3, 1)
    twice += 1  # a write for which the pass starts again
    return (table.clone() * p * rows[:, 0]).sum()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("use", [filled, filled_from_a_parameter, filled_before_a_reshape])
def test_a_constant_that_fn_keeps_stays_a_plain_tensor(use, device):
    """A workspace that the first call makes; later calls, plain ones too, find what a loop would have left there."""
    kept = []

    def fn(p, x):
        if not kept:
            kept.append(torch.zeros(3, device=device))
        return use(kept[0], p, x)

    p, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    expected = loop_grad(fn)(p, x)
    left = kept.pop()
    for _ in range(2):
        assert_trees_close(psg.per_sample_grad(fn)(p, x), expected)
        assert_trees_close(kept[0] + 0, left, per_sample=False)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_a_constant_that_a_transform_of_fn_s_own_makes_and_keeps(device):
    kept = []

    def fn(p, x):
        def inner(value):
            kept.append(torch.zeros(3, device=device))
            return value.sin().sum()

        slope = torch.func.grad(inner)(x)
        kept[-1].add_(x)
        return (kept[-1] * slope * p).sum()

    p, x = torch.randn(3, device=device), torch.randn(2, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(p, x), x * x.cos())
    assert torch.equal(kept[-1] + 0, x[-1])


class Keeps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.last = None

    def forward(self, x):
        hidden = self.linear(x)
        self.last = torch.zeros(1, 2, device=x.device)
        self.last += hidden.detach()
        return hidden.sin() * self.last.cos()


def test_a_constant_that_a_module_keeps(device):
    """It is taken out again after the pass, as other activations are, without a fallback."""
    loss, params = psg.stateless(module := Keeps().to(device), lambda output: output.sum())
    x = torch.randn(4, 3, device=device)
    for _ in range(2):
        assert_trees_close(psg.per_sample_grad(loss)(params, x), psg.per_sample_grad(loss, method="loop")(params, x))
    assert module.last is None or not torch._C._functorch.is_functorch_wrapped_tensor(module.last)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_a_constant_that_fn_keeps_survives_an_error_of_fn(device):
    kept = []

    def fn(p, x):
        kept.append(torch.zeros(3, device=device))
        kept[-1].add_(p)
        kept[-1].mul_(x)
        raise KeyError("of fn")

    with pytest.raises(KeyError, match="of fn"):
        psg.per_sample_grad(fn)(torch.randn(3, device=device), torch.randn(2, 3, device=device))
    assert all(torch.isfinite(table + 1).all() for table in kept)


@pytest.mark.parametrize("n", [1, 3])
def test_a_loss_that_is_added_up(n, device):
    def fn(p, x):
        loss = torch.zeros((), device=device)
        loss += (p * x).sin().sum()
        loss.add_(p.square().sum())
        return loss

    p, x = torch.randn(3, device=device), torch.randn(n, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(p, x), loop_grad(fn)(p, x))


@pytest.mark.parametrize("jit", [False, True])
def test_a_constant_that_is_written_into_and_returned(jit, device):
    def fn(p, x):
        seen, known = torch.zeros(3, device=device), torch.ones(3, device=device)
        seen += x
        known += p
        return (known * seen).sum(), {"seen": seen, "known": known}

    p, x = torch.randn(3, device=device), torch.randn(2, 3, device=device)
    per_sample = psg.per_sample_grad(fn, has_aux=True, method="capture")
    grads, aux = (psg.jit(per_sample, backend="eager") if jit else per_sample)(p, x)
    assert_trees_close((grads, aux), (x, {"seen": x, "known": (1 + p).expand(2, 3)}))


@pytest.mark.parametrize("write", [lambda h, p: h.mul_(2), lambda h, p: h.add_(p), lambda h, p: h.relu_()])
def test_writes_in_inference_mode_leave_the_history(write, device):
    def fn(p, x):
        hidden = p + 3
        with torch.inference_mode():
            write(hidden, p.detach())
        return (hidden * x).sum()

    p, x = torch.rand(3, device=device), torch.randn(2, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(p, x), x)


OTHERWISE_LAID_OUT = {
    "masked_fill_": lambda h: h.masked_fill_(torch.eye(3, dtype=torch.bool, device=h.device), 7.0),
    "tril_": lambda h: h.tril_(),
    "cumsum_": lambda h: h.cumsum_(0),
    "index_add_": lambda h: h.index_add_(0, rows_of(h), torch.ones_like(h)),
    "scatter_add_": lambda h: by_scatter(h, torch.ones_like(h)),
    "addmm_": lambda h: h.addmm_(torch.ones_like(h), torch.ones_like(h)),
}


@pytest.mark.parametrize("name", OTHERWISE_LAID_OUT)
def test_writes_keep_the_layout(name, device):
    def fn(p, x):
        hidden = p.T * 2
        OTHERWISE_LAID_OUT[name](hidden)
        assert hidden.stride() == (1, 3)
        return (hidden.T.view(-1) * x).sum()

    p, x = torch.randn(3, 3, device=device), torch.randn(2, 9, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(p, x), loop_grad(fn)(p, x))


def test_attributes_of_a_constant_stay_where_they_are_written_into(device):
    def fn(p, x):
        total = torch.zeros(3, device=device)
        total.scale = 2.0
        total += p
        return (total * x).sum() * total.scale

    p, x = torch.randn(3, device=device), torch.randn(2, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(p, x), 2 * x)


@torch.library.custom_op("psg_tests::halve_", mutates_args=("values",))
def halve_(scale: float, values: torch.Tensor) -> None:
    values.mul_(scale)


@pytest.mark.parametrize("by_name", [False, True])
def test_what_an_op_of_torch_library_says_that_it_writes_into(by_name, device):
    """That is not its first argument. Without a copy, every pass would halve the caller's batch."""

    def fn(w, x):
        halve_(0.5, values=x) if by_name else halve_(0.5, x)
        return (w * x).sum(1)

    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    given = x.clone()
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x), 0.5 * given, per_sample=False)
    assert torch.equal(x, given)


def test_a_filled_diagonal_of_what_is_computed_once(device):
    """Written as a selection: torch has no op that makes a new tensor of it."""

    def fn(w, x):
        a = 2 * w
        a.fill_diagonal_(0.3)
        return (a @ x).sin().sum()

    w, x = torch.randn(60, 60, device=device), torch.randn(40, 60, 2, device=device)
    (leaf,) = psg.explain(fn, method="capture")(w, x).leaves
    assert "masked_fill: derived" in leaf.uses
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


def flat_view(c, row):
    view = c.view(-1)
    view[3 : 3 + len(row)] = row


@pytest.mark.parametrize(
    "write",
    [
        lambda c, row: c[0].copy_(row),
        lambda c, row: c.diagonal().copy_(row),
        lambda c, row: c[0].__setitem__(slice(2, 5), row[2:5]),
        lambda c, row: c.__setitem__(1, row),
        flat_view,
    ],
    ids=["a row", "the diagonal", "a part of a row", "the whole", "a flat view"],
)
def test_a_parameter_written_into_a_view_of_a_new_tensor(write, device):
    """Computed once: the new tensor, and its view, become results of one op."""

    def fn(w, x):
        c = torch.zeros(60, 60, device=w.device)
        write(c, w[0])
        return (c @ x).sin().sum()

    w, x = torch.randn(60, 60, device=device), torch.randn(40, 60, 2, device=device)
    (leaf,) = psg.explain(fn, method="capture")(w, x).leaves
    assert "index_put: derived" in leaf.uses
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
