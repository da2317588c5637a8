"""psg.jit: tracing, compiling, comparing; padding to buckets; what every call reads again, and what must not become a constant."""

import collections
import contextlib
import copy
import functools
import logging
import math
import operator
import random
import re
import shutil
import threading
import unittest
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import linear_args, linear_loss
from cases import N, each_case
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import psg
from psg._compile import _jit, _trace
from psg._hardware import _machine
from psg._torch import _functorch
from psg._watch import _modules
from psg.rules import _gates, _steps
from psg.testing import assert_trees_close, loop_grad


def small(device, *layers):
    model = nn.Sequential(nn.Linear(5, 4), *layers, nn.Linear(4, 3)).to(device)
    loss, params = psg.stateless(model, F.cross_entropy)
    return model, loss, params


def batch(device, n=N):
    return torch.randn(n, 5, device=device), torch.randint(3, (n,), device=device)


def same(actual, expected, name="jit"):
    """Compare part by part, each with a tolerance for its own size: norms and losses are larger than sums."""
    if isinstance(expected, tuple):
        for i, (own, other) in enumerate(zip(actual, expected, strict=True)):
            same(own, other, f"{name}[{i}]")
    else:
        assert_trees_close(actual, expected, name=name, per_sample=False)


def never(graph, inputs):
    raise NotImplementedError("no such machine")


def wrong(graph, inputs):
    return lambda *args: tuple(output * 2 if output.is_floating_point() else output for output in graph(*args))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_is_not_unrolled(kind, device):
    layer, nodes = kind(3, 4, bidirectional=True, batch_first=True).to(device), []

    def counting(graph, inputs):
        nodes.append(len(graph.graph.nodes))
        return graph

    loss, params = psg.stateless(layer, lambda output, y: (output[0] * y).sum())
    fast = psg.jit(psg.clipped_grad(loss, 1.0), backend=counting)
    for steps in (9, 40):
        x, y = torch.randn(N, steps, 3, device=device), torch.randn(N, steps, 8, device=device)
        same(fast(params, x, y), psg.clipped_grad(loss, 1.0)(params, x, y))
    assert nodes[1] - nodes[0] < 20  # 31 more steps, unrolled, would be more; the plan of the norms may differ


class Recurrent(nn.Module):
    """Both kinds of steps that become kernels: a GRU, and an LSTM with a projection and two directions."""

    def __init__(self):
        super().__init__()
        self.gru, self.lstm = nn.GRU(3, 4, batch_first=True), nn.LSTM(4, 5, proj_size=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        return self.lstm(self.gru(x)[0])[0]


def test_steps_of_recurrent_layers_become_kernels(device, monkeypatch):
    kernels = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, **options: kernels.append(graph) or graph)
    monkeypatch.setattr(_steps, "_compiled", _steps._compiled.__wrapped__)  # without the cache, which tests share
    loss, params = psg.stateless(Recurrent().to(device), lambda output, y: (output * y).sum())
    x, y = torch.randn(N, 9, 3, device=device), torch.randn(N, 9, 4, device=device)
    fast = psg.jit(psg.clipped_grad(loss, 1.0), check=False)
    same(fast(params, x, y), psg.clipped_grad(loss, 1.0)(params, x, y))
    assert [entry.error for entry in fast.cache_info()] == [None]
    assert len(kernels) == 1 + 3 * 3  # the whole graph; for each direction a step forward, the slopes of all steps, and a step back


def test_shapes_of_recurrent_layers_are_found_without_kernels(monkeypatch):
    """The compiler runs the ops on fake tensors, for which no step may be compiled."""
    monkeypatch.setattr(_steps, "_compiled", None)
    with FakeTensorMode():
        x, state, cotangent = (torch.empty(shape) for shape in ((2, 5, 3), (2, 4), (2, 5, 4)))
        weights = [*(torch.empty(shape) for shape in ((12, 3), (12, 4), (12,), (12,))), None]
        saved = torch.ops.psg.recurrence_forward("Gru", x, [state], weights, False, True)
        found = torch.ops.psg.recurrence_backward("Gru", x, saved, weights, False, cotangent, [None], True)
    assert [tuple(tensor.shape) for tensor in (saved[0], *found)] == [(2, 6, 4), (2, 5, 12), (2, 4), (2, 5, 12)]


@pytest.mark.parametrize("step, count", [(_gates._advance_lstm, 9), (_gates._retreat_lstm, 8)])
def test_a_kernel_writes_what_the_step_writes(step, count, device):
    # Every other tensor is strided, like one step of a sequence.
    buffers = [torch.randn(5, 3, 8, device=device) if i % 2 else torch.randn(5, 1, 8, device=device) for i in range(count)]
    given, expected = ([buffer.clone()[:, -1] for buffer in buffers] for _ in range(2))
    kernel = _steps.CompiledStep(step)
    for _ in range(2):
        step(*expected)
        kernel(*given)
        same(given, expected)


@pytest.mark.parametrize("made", [lambda: torch.zeros(()), lambda: torch.zeros(4), lambda: torch.tensor(0.0)])
def test_what_fn_adds_up_in_place(made, device):
    """psg restarts the pass with a sum for every sample; nothing of the first pass may stay in the graph."""

    def fn(p, x):
        total = made().to(device)
        for row in x:
            total += (row @ p).sin().sum()
        return total.sum()

    p, x = torch.randn(3, 4, device=device), torch.randn(N, 2, 3, device=device)
    fast = psg.jit(psg.clipped_grad(fn, 1.0), backend="aot_eager")
    same(fast(p, x), psg.clipped_grad(fn, 1.0)(p, x))
    assert [entry.error for entry in fast.cache_info()] == [None]


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: torch.linalg.vector_norm(w * x, 3, dim=-1),
        lambda w, x: F.normalize(w * x, 1.5, dim=-1).sin().sum(),
        lambda w, x: torch.dist(w, x, 3),
    ],
)
def test_norms_whose_derivatives_raise_to_a_power_in_place(fn, device):
    """pow_ of a tensor and a number has another name where it writes nothing."""
    w, x = torch.randn(4, device=device), torch.randn(N, 4, device=device)
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    same(fast(w, x), psg.per_sample_grad(fn)(w, x))
    assert [entry.error for entry in fast.cache_info()] == [None]


# --- every case of the table --------------------------------------------------------------------------------


@each_case(lambda case: not case.not_capture and not case.not_traced)
def test_equals_eager(case, device):
    problem = case.build(device)
    fn = psg.clipped_grad(problem.fn, 1.0, **problem.options)
    fast = psg.jit(fn, backend="eager")
    for seed in (1, 2):  # the first call compiles, the second does not
        torch.manual_seed(seed)
        expected = fn(*problem.args, **problem.shared)
        torch.manual_seed(seed)
        same(fast(*problem.args, **problem.shared), expected)
    assert [entry.error for entry in fast.cache_info()] in ([None], [])


@pytest.mark.parametrize("transform", [psg.per_sample_grad, psg.per_sample_value_and_grad, psg.per_sample_norm, psg.factored_grad])
def test_each_transform(transform, device):
    p, _ = linear_args(device)
    fn = transform(linear_loss)
    fast = psg.jit(fn, backend="eager")
    for _ in range(2):
        x = torch.randn(N, 5, 3, device=device)
        same(fast(p, x), fn(p, x))
    assert len(fast.cache_info()) == 1


@pytest.mark.parametrize("n", [0, 1, N])
def test_on_a_cpu_a_lookup_stays_an_op_of_its_own(n, device):
    """Inductor would fuse it into the mean, and read the table entry by entry."""
    ops = []

    def backend(graph, inputs):
        ops.extend(node.target for node in graph.graph.nodes)
        return graph

    def fn(table, index):
        return F.embedding(index, table).mean(0).square().sum()

    table, index = torch.randn(6, 3, device=device), torch.randint(6, (n, 5), device=device)
    fast = psg.jit(psg.per_sample_grad(fn), backend=backend)
    same(fast(table, index), loop_grad(fn)(table, index))
    assert [entry.error for entry in fast.cache_info()] == [None] * min(n, 1)  # no samples: nothing to compile
    assert (torch.ops.psg.rows.default in ops) == (device.type == "cpu" and n > 0)


def test_a_factored_result_keeps_its_kinds(device):
    p, x = linear_args(device)
    assert isinstance(psg.jit(psg.factored_grad(linear_loss), backend="eager")(p, x)["w"], psg.factors.Outer)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler")
def test_inductor(device):
    torch.set_default_dtype(torch.float32)
    _, loss, params = small(device, nn.ReLU(), nn.Dropout(0.5))
    fn = psg.clipped_grad(loss, 0.1)
    fast = psg.jit(fn)
    for seed in range(3):
        x, y = batch(device)
        torch.manual_seed(seed)
        expected = fn(params, x, y)
        torch.manual_seed(seed)
        same(fast(params, x, y), expected)
    assert [entry.error for entry in fast.cache_info()] == [None]


def test_a_whole_step(device):
    """A user's function that contains a transform."""
    _, loss, params = small(device, nn.Tanh())

    def step(params, x, y):
        out = psg.clipped_grad(loss, 0.5)(params, x, y)
        return {name: p - 0.1 * out.grads[name] for name, p in params.items()}, out.norms.median()

    x, y = batch(device)
    same(psg.jit(step, backend="eager")(params, x, y), step(params, x, y))


def test_sums_of_segments(device):
    """A trace cannot check the ids: instead, an id out of range makes the results NaN."""
    fn = psg.per_sample_grad(linear_loss)
    fast = psg.jit(lambda p, x, ids: psg.tree.segment_sum(fn(p, x), ids, 2), backend="aot_eager")
    p, x = linear_args(device)
    for ids in ([0, 1, 0], [1, 1, 1]):
        ids = torch.tensor(ids, device=device)
        same(fast(p, x, ids), psg.tree.segment_sum(fn(p, x), ids, 2))
    assert [entry.error for entry in fast.cache_info()] == [None]
    for ids in ([0, -1, 0], [0, 1, 2]):
        assert all(leaf.isnan().all() for leaf in fast(p, x, torch.tensor(ids, device=device)).values())


def test_norms_of_segments_of_factors(device):
    p, x = linear_args(device)
    fn, ids = psg.factored_grad(linear_loss), torch.tensor([0, 1, 0], device=device)
    fast = psg.jit(lambda p, x, ids: psg.tree.norm(psg.tree.segment_sum(fn(p, x), ids, 3)), backend="aot_eager")
    expected = psg.tree.segment_sum(fn(p, x), ids, 3)
    same(fast(p, x, ids), psg.tree.norm(expected))
    assert fast(p, x, ids - 1).isnan().all()
    reduced = psg.jit(lambda tree, w: (psg.tree.norm(tree), psg.tree.weighted_sum(tree, w)), backend="aot_eager")
    w = torch.rand(3, device=device)
    same(reduced(expected, w), (psg.tree.norm(expected), psg.tree.weighted_sum(expected, w)))
    assert [entry.error for cached in (fast, reduced) for entry in cached.cache_info()] == [None, None]


def test_some_of_the_segments_of_a_factor(device):
    """A trace cannot read how many samples those have: it takes them out of all sums."""
    sizes = torch.tensor([2, 0, 1], device=device)
    tree = psg.factors.Segments(psg.factors.Outer(torch.randn(3, 2, 4, device=device), torch.randn(3, 2, 5, device=device)), sizes)
    fast = psg.jit(lambda tree, index: psg.tree.norm(psg.tree.take(tree, index)), backend="aot_eager")
    for index in ([2, 0], [1, 1]):
        index = torch.tensor(index, device=device)
        same(fast(tree, index), psg.tree.norm(tree)[index])
    assert [entry.error for entry in fast.cache_info()] == [None]


@pytest.mark.parametrize("returned", ["a weight from parameters", "sums of segments"])
def test_factors_of_another_kind_than_eager_ones(returned, device, monkeypatch):
    """Eager calls and traces weigh costs differently: what they return is compared materialised."""
    monkeypatch.setattr(_machine, "op_call", lambda device: 0 if _functorch.is_traced() else 10**12)
    if returned == "a weight from parameters":
        loss, params = psg.stateless(nn.utils.parametrizations.weight_norm(nn.Linear(160, 150)).to(device), F.cross_entropy)
        fn, sizes = psg.factored_grad(loss), (5, 160)
    else:
        loss, params = psg.stateless(nn.Linear(60, 50).to(device), F.cross_entropy)
        ids, sizes = torch.arange(50, device=device) % 4, (50, 60)
        fn = lambda p, x, y: psg.tree.segment_sum(psg.factored_grad(loss)(p, x, y), ids, 4)  # noqa: E731
    x, y = torch.randn(sizes, device=device), torch.randint(5, sizes[:1], device=device)
    fast, expected = psg.jit(fn, backend="eager"), fn(params, x, y)
    found = fast(params, x, y)
    assert [type(factor) for factor in found.values()] != [type(factor) for factor in expected.values()]
    same(psg.tree.materialize(found), psg.tree.materialize(expected))
    assert [entry.error for entry in fast.cache_info()] == [None]
    with pytest.warns(psg.FallbackWarning, match="the compiled result is wrong: compiled result.* where .* is allowed"):
        same(psg.jit(fn, backend=wrong)(params, x, y), expected)


# --- buckets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [8, [4, 8, 16]])
def test_poisson_sampled_batches(buckets, device):
    _, loss, params = small(device, nn.ReLU())
    fn = psg.clipped_grad(loss, 0.1)
    fast = psg.jit(fn, backend="eager", buckets=buckets)
    draw = random.Random(0)
    for n in [0, 1, 16, *(draw.randint(0, 16) for _ in range(37))]:
        x, y = batch(device, n)
        same(fast(params, x, y), fn(params, x, y))
    assert len(fast.cache_info()) <= 3
    assert all(entry.error is None for entry in fast.cache_info())


def test_beyond_the_largest_bucket(device):
    p, _ = linear_args(device)
    fast = psg.jit(psg.per_sample_norm(linear_loss), backend="eager", buckets=[2, 4])
    for n in (5, 7, 8):
        x = torch.randn(n, 5, 3, device=device)
        same(fast(p, x), psg.per_sample_norm(linear_loss)(p, x))
    assert len(fast.cache_info()) == 1


@pytest.mark.parametrize("transform", [psg.per_sample_grad, psg.per_sample_value_and_grad, psg.per_sample_norm, psg.factored_grad])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_buckets_of_each_transform(transform, n, device):
    p, x = linear_args(device, n)
    fn = transform(linear_loss)
    same(psg.jit(fn, backend="eager", buckets=4)(p, x), fn(p, x))


def test_buckets_with_aux_in_dims_and_mask(device):
    def fn(p, scale, x):
        return scale * linear_loss(p, x), {"mean": x.mean(), "tag": "a"}

    options = {"in_dims": (None, None, 1), "has_aux": True}
    p, x = linear_args(device)
    x, scale = x.movedim(0, 1).contiguous(), torch.tensor(2.0, device=device)
    mask = torch.tensor([True, False, True], device=device)
    eager = psg.clipped_grad(fn, 0.3, **options)
    same(psg.jit(eager, backend="eager", buckets=8)(p, scale, x, mask=mask), eager(p, scale, x, mask=mask))


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("mask", [torch.ones(7).bool(), torch.ones(2).bool(), torch.ones(3), [True, False, True]])
def test_buckets_and_a_mask_that_does_not_fit(mask, n, device):
    """After padding, the mask would have fitted."""
    p, x = linear_args(device, n)
    fast = psg.jit(psg.clipped_grad(linear_loss, 0.3), backend="eager", buckets=8)
    with pytest.raises(psg.InputError, match=rf"mask: expected a bool tensor of shape \({n},\)"):
        fast(p, x, mask=mask)


def test_buckets_are_for_the_transform_s_own_function(device):
    """A wrapper returns anything, of which nothing could be trimmed; `functools.wraps` copies attributes to it."""
    norms = psg.per_sample_norm(linear_loss)
    with pytest.raises(psg.InputError, match="is not made by one of psg's transforms"):
        psg.jit(functools.wraps(norms)(lambda p, x: norms(p, x).mean()), backend="eager", buckets=8)
    compiled = psg.jit(norms, backend="eager", buckets=8)
    p, x = linear_args(device, 3)
    same(psg.jit(compiled, backend="eager", buckets=4)(p, x), norms(p, x))


def test_a_batch_of_a_buckets_size_is_not_copied(device):
    p, x = linear_args(device, 8)
    args, kwargs, n = psg.transforms.batching_of(psg.clipped_grad(linear_loss, 0.3)).pad((p, x), {}, lambda n: 8)
    assert args[1] is x and n == 8 and all(mask.all() for mask in kwargs.values())


def test_a_sample_that_is_not_finite_is_counted_once(device):
    p, x = linear_args(device)
    x[-1] = torch.inf  # the bucket is padded with this sample
    out = psg.jit(psg.clipped_grad(linear_loss, 1.0), backend="eager", buckets=8)(p, x)
    assert out.nonfinite == 1
    assert all(leaf.isfinite().all() for leaf in out.grads.values())


# --- random numbers -----------------------------------------------------------------------------------------


def test_random_numbers_differ_between_calls_and_follow_the_seed(device):
    _, loss, params = small(device, nn.Dropout(0.5))
    x, y = batch(device, 16)
    fast = psg.jit(psg.per_sample_norm(loss), backend="eager")
    first, second = fast(params, x, y), fast(params, x, y)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    third = fast(params, x, y)
    torch.manual_seed(5)
    assert torch.equal(third, fast(params, x, y))
    torch.manual_seed(5)
    same(third, psg.per_sample_norm(loss)(params, x, y))


def test_compiling_leaves_the_generator_as_a_call_would(device):
    _, loss, params = small(device, nn.Dropout(0.5))
    x, y = batch(device)
    torch.manual_seed(3)
    psg.per_sample_norm(loss)(params, x, y)
    expected = torch.rand(2, device=device)
    torch.manual_seed(3)
    psg.jit(psg.per_sample_norm(loss), backend="eager")(params, x, y)
    assert torch.equal(torch.rand(2, device=device), expected)


@pytest.mark.parametrize(("seed", "draw"), [(random.seed, random.random), (np.random.seed, np.random.rand)], ids=["python", "numpy"])
@pytest.mark.parametrize("untraceable", [False, True])
def test_functions_that_draw_random_numbers_of_python_run_eagerly(untraceable, seed, draw, device):
    loss = lambda p, x: draw() * linear_loss(p, x) * (1 if untraceable and x.sum().item() else 2)  # noqa: E731
    fn = psg.per_sample_norm(loss, method="loop" if untraceable else "auto")
    fast, args = psg.jit(fn, backend="eager"), linear_args(device)
    seed(0)
    expected = [fn(*args) for _ in range(3)]
    seed(0)
    with pytest.warns(
        psg.FallbackWarning, match="get value out of a tracing tensor" if untraceable else "random numbers of Python or NumPy"
    ):
        found = [fast(*args) for _ in range(3)]
    same(found, expected)


# --- what is read again, and what leads to a new trace ------------------------------------------------------


def test_what_fn_closes_over_is_read_at_every_call(device):
    scale = torch.tensor(1.0, device=device)
    p, x = linear_args(device)
    fast = psg.jit(psg.per_sample_norm(lambda p, x: scale * linear_loss(p, x)), backend="eager")
    before = fast(p, x)
    scale.fill_(3.0)
    same(fast(p, x), 3 * before)
    assert len(fast.cache_info()) == 1


def test_the_first_op_may_use_one_of_several_tensors_that_fn_closes_over(device):
    """A graph input was once lost, because it was inserted before a node that was then removed."""
    mean, scale = torch.randn(5, device=device), torch.rand(5, device=device) + 1
    fn = psg.per_sample_grad(lambda w, x: (w * x).sum() ** 2)

    def step(w, x):
        return fn(w, (x - mean) / scale)

    fast = psg.jit(step, backend="eager")
    w, x = torch.randn(5, device=device), torch.randn(N, 5, device=device)
    same(fast(w, x), step(w, x))
    scale.mul_(2)
    same(fast(w, x), step(w, x))
    assert [entry.error for entry in fast.cache_info()] == [None]


@pytest.mark.parametrize(
    "change", [lambda module: module.bfloat16(), lambda module: module.weight.set_(torch.arange(16.0).to(module.weight)[::2])]
)
def test_what_fn_closes_over_may_change_its_layout(change, device):
    """Compiled code would read the new memory in the old layout."""
    frozen = torch.nn.LayerNorm(8, device=device).requires_grad_(False)
    frozen.weight.copy_(torch.arange(8.0) + 1)
    loss = lambda w, x: (frozen.weight * w * x).sum()  # noqa: E731
    fast = psg.jit(psg.per_sample_grad(loss), backend="eager")
    w, x = torch.ones(8, device=device), torch.ones(2, 8, device=device)
    same(fast(w, x), frozen.weight.expand(2, 8))
    change(frozen)
    same(fast(w, x), frozen.weight.expand(2, 8).to(w.dtype))
    assert len(fast.cache_info()) == 1


def test_a_literal_tensor_is_a_constant(device):
    p, x = linear_args(device)
    fn = psg.per_sample_norm(lambda p, x: linear_loss(p, x) * torch.tensor(2.0, device=x.device))
    same(psg.jit(fn, backend="eager")(p, x), fn(p, x))


VALUES = {
    "item": lambda k: k.item(),
    "float": float,
    "if": lambda k: 2.0 if k > 3 else 1.0,
    "if, with a constant": lambda k: 2.0 if k > torch.tensor(3.0, device=k.device) else 1.0,
    "full": lambda k: torch.full((1,), k, device=k.device).sum(),  # a conversion in C++
    "tolist": lambda k: k.tolist(),
    "numpy": lambda k: float(k.cpu().numpy()),
    "tensor of a list": lambda k: torch.tensor([k, 1.0], device=k.device).prod(),
    "as_tensor": lambda k: torch.as_tensor([[k]], device=k.device).sum(),
    "tensor_split": lambda k: torch.arange(8.0, device=k.device).tensor_split(k.long().cpu()[None])[0].sum(),
    "sparse tensor": lambda k: torch.sparse_coo_tensor(k.long()[None, None], k[None]).shape[0],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_python_values_of_arguments_are_not_kept(value, device):
    """As constants of the trace, they would stay those of the first call."""
    k = torch.tensor(2.0, device=device)
    p, x = linear_args(device)
    fn = psg.per_sample_norm(lambda p, x, k: linear_loss(p, x) * value(k), in_dims=(None, 0, None), method="loop")
    fast = psg.jit(fn, backend="eager")
    with pytest.warns(psg.FallbackWarning, match="cannot be traced .* get value out of a tracing tensor"):
        fast(p, x, k)
    k.fill_(5.0)
    same(fast(p, 2 * x, k), fn(p, 2 * x, k))


@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_python_values_of_what_fn_closes_over_lead_to_new_traces(value, method, device):
    k = torch.tensor(2.0, device=device)
    p, x = linear_args(device)
    fn = psg.per_sample_norm(lambda p, x: linear_loss(p, x) * value(k), method=method)
    fast = psg.jit(fn, backend="eager")
    for k_now, batch in ((2.0, x), (5.0, 2 * x), (5.0, x)):
        k.fill_(k_now)
        same(fast(p, batch), fn(p, batch))
        assert [entry.error for entry in fast.cache_info()] == [None]
    assert fast._builds.total() == 2


EDGES = {
    "without loops": lambda edges, x: x[edges[:, edges[0] != edges[1]][0]],
    "nonzero": lambda edges, x: x[edges[0, :4].nonzero()[:, 0]],
    "unique": lambda edges, x: x[edges.unique()],
    "repeat_interleave": lambda edges, x: x.repeat_interleave(edges[0, :4], 0),
    "split": lambda edges, x: torch.stack([part.sum() for part in x.repeat(4, 1)[: edges[1, :4].sum()].split(edges[1, :4].tolist())]),
    "bincount": lambda edges, x: x.T * torch.bincount(edges[0], minlength=4),
    "number": lambda edges, x: x.new_zeros(int(edges.max()) + 1, 2).index_add(0, edges[0], x[edges[1]]),
    "iteration": lambda edges, x: sum(x[i] * x[j] for i, j in edges.T),
}


@pytest.mark.parametrize("use", EDGES.values(), ids=EDGES)
def test_sizes_that_follow_from_what_fn_closes_over_lead_to_new_traces(use, device):
    edges = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 3]], device=device)
    w, x = torch.randn(3, 2, device=device), torch.randn(5, 4, 3, device=device)
    fn = lambda w, x: use(edges, x @ w).sin().sum()  # noqa: E731
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    for new in (edges.clone(), torch.tensor([[3, 0, 2, 0, 1], [2, 2, 1, 3, 0]], device=device), edges.clone()):
        edges.copy_(new)
        assert_trees_close(fast(w, x), loop_grad(fn)(w, x))
        assert [entry.error for entry in fast.cache_info()] == [None]
    assert fast._builds.total() == 3


WRITES = {
    "an op's own output": lambda w, x: (w * x).add_(w).mul_(x).sin(),
    "a number": lambda w, x: (w * x).add_(1.5).pow_(2),
    "an output that is used before": lambda w, x: (lambda y: y.exp().detach() * y.mul_(x))(w * x),
    "an output that is used after": lambda w, x: (lambda y: y.mul_(x) * y)(w * x),
    "another dtype": lambda w, x: (w.float() * x.float()).add_((w * x).sum()).sin(),
    "a view": lambda w, x: (lambda y: (y[:2].mul_(x[1:]), y)[1])(w * x),
    "a copy": lambda w, x: (w * x).clone().copy_(x * w.sin()),
    "numbers": lambda w, x: torch.zeros_like(x).add_(w * x).sin(),
    "a fill": lambda w, x: (w * x).clone().fill_(2.0) * w,
    "an activation": lambda w, x: torch.relu_(w * x) * torch.sigmoid_(w * x),
    "an index": lambda w, x: (w * x).index_put_((torch.arange(2, device=x.device),), x[1:]).sin(),
    "another shape": lambda w, x: (w * x).unsqueeze_(0).t_().sin(),
    "part of several": lambda w, x: torch.stack([part.mul_(x[:1]) for part in torch.frexp(w * x)[:1]]).sin() * w,
}


def test_a_backend_that_is_neither_a_name_nor_a_function():
    with pytest.raises(psg.InputError, match=r"psg\.jit\(backend=3\): expected a name, or a function"):
        psg.jit(torch.sin, backend=3)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_traced(write, device):
    w, x = torch.rand(3, device=device), torch.rand(5, 3, device=device) + 0.5
    fn = psg.per_sample_grad(lambda w, x: write(w, x).sum())
    fast = psg.jit(fn, backend="eager", check=False)
    for scale in (1.0, 0.5):
        same(fast(w, scale * x), fn(w, scale * x))
    assert [entry.error for entry in fast.cache_info()] == [None]


def test_a_graph_without_writes_of_fn_is_traced_once(monkeypatch, device):
    """Rules write into what they have just computed, but for that nothing is traced again."""
    traced = []
    make_fx = _trace._make_fx
    monkeypatch.setattr(_trace, "_make_fx", lambda function, tensors: traced.append(function) or make_fx(function, tensors))
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    loss, params = psg.stateless(model.to(device), lambda output: output.square().sum())
    fn, x = psg.clipped_grad(loss, clip_norm=0.1), torch.randn(5, 6, 3, device=device)
    same(psg.jit(fn, backend="eager")(params, x), fn(params, x))
    assert len(traced) == 1


def test_values_of_an_argument_under_a_view_that_fn_closes_over_are_not_kept(device):
    data = torch.arange(12.0, device=device).reshape(4, 3)
    w = torch.randn(3, device=device)
    fn = lambda w, x: (w * x).sum().sin() * (data[0, 0].item() + 1)  # noqa: E731
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    with pytest.warns(psg.FallbackWarning, match="get value out of a tracing tensor"):
        same(fast(w, data[:2]), psg.per_sample_grad(fn)(w, data[:2]))
    data += 1
    same(fast(w, data[:2]), psg.per_sample_grad(fn)(w, data[:2]))


def check_after(fn, changes, device, builds=None, **options):
    """The jitted function after each change of what fn closes over, beside the eager one."""
    w, x = torch.rand(4, device=device), torch.randn(2, 4, device=device)
    slow = psg.per_sample_grad(fn, **options)
    fast = psg.jit(slow, backend="eager")
    for change in (lambda: None, *changes):
        change()
        same(fast(w, x), slow(w, x))
    if builds is not None:
        assert [entry.error for entry in fast.cache_info()] == [None]
        assert fast._builds.total() == builds
    return fast


def test_several_views_of_one_memory_that_fn_closes_over(device):
    source, target = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]], device=device)
    fn = lambda w, x: (w * x)[target[source != target]].sum().sin() * int(target.max())  # noqa: E731
    changes = [lambda: target.copy_(torch.tensor([0, 0, 3, 0])), lambda: source.copy_(torch.tensor([0, 1, 1, 1]))]
    check_after(fn, changes, device, builds=3)


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("number", [True, False])
def test_masks_that_fn_closes_over_in_compiled_graphs(number, device):
    """Compilers refuse a mask as an index, whose number of entries they do not see, and take the places where it is true."""
    mask, edges = torch.tensor([True, False, True, True], device=device), torch.arange(8, device=device).view(2, 4) % 4

    def fn(w, x):
        table = torch.zeros(4, device=device)
        table[mask] = w[0] if number else w[:3].sin()
        return (table * x).sum() + (w * x)[edges[:, mask][0]].square().sum()

    w, x = torch.rand(4, device=device), torch.randn(3, 4, device=device)
    fast = psg.jit(psg.per_sample_grad(fn), backend="aot_eager")
    for _ in range(2):
        same(fast(w, x), psg.per_sample_grad(fn)(w, x))
        mask.copy_(mask.flip(0))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_values_beyond_a_view_that_fn_closes_over(device):
    whole = torch.arange(1.0, 9.0, device=device)
    part = whole[:3]
    other = whole[3:4]

    def fn(w, x):
        beyond = part.as_strided((8,), (1,), 0)
        return (w * x * other).sum().sin() * beyond.sum().item()

    check_after(fn, [lambda: whole[5:].add_(1)], device)


def test_entries_at_constant_places_are_not_baked_in(device):
    table, places = torch.rand(4, device=device), torch.tensor([0, 2, 1, 3], device=device)
    check_after(lambda w, x: (w * x * table[places]).sum().sin(), [lambda: table.add_(1)] * 3, device, builds=1)


def test_values_that_were_used_before_they_are_read(device):
    c = torch.tensor([0.5, 2.0, 3.0, 0.0], device=device)
    check_after(lambda w, x: ((w * x) ** 2 * c)[c > 1].sum() * c[1].item(), [lambda: c.copy_(c.flip(0))], device, builds=2)


@pytest.mark.parametrize(
    ("first", "second", "use"),
    [
        (0.0, -0.0, lambda c: math.copysign(1.0, c.item())),
        (complex("nan+1j"), complex("nan+3j"), lambda c: c.item().imag),
        (1.0, math.nan, lambda c: 1.0 if c > 0 else 2.0),
    ],
    ids=["zeros", "parts of numbers that are none", "to nan"],
)
def test_values_are_compared_bit_by_bit(first, second, use, device):
    c = torch.tensor(first, device=device)
    check_after(lambda w, x: (w * x).sum().sin() * use(c), [lambda: c.copy_(torch.tensor(second))], device, builds=2)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("reads_first", [False, True])
def test_memory_that_numpy_shares(reads_first):
    def fn(w, x):
        z = torch.zeros(4)
        array = z.numpy()
        if reads_first:
            z.copy_(x)
            return (w * x).sum().sin() * (float(array[0]) + 2)
        array[:] = 7.0
        return (w * x * z).sum().sin()

    fast = check_after(fn, [lambda: None], torch.device("cpu"), method="loop")
    assert fast.cache_info()[0].error is not None


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    "make",
    [lambda x: nn.Linear(4, 4).weight.detach()[0] * 0 + x, lambda x: nn.Parameter(torch.zeros_like(x)).data.copy_(x)],
    ids=["module", "parameter"],
)
def test_a_parameter_that_fn_makes_is_none_that_it_closes_over(make):
    check_after(lambda w, x: (w * make(x)).sum().sin(), [], torch.device("cpu"), method="loop")


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: torch.func.jvp(torch.func.grad(lambda q: ((q * x) ** 3).sum()), (w,), (x,))[1].sum(),
        lambda w, x: torch.func.hessian(lambda q: ((w * q) ** 4).mean())(x).diagonal().sum() ** 2,
    ],
    ids=["jvp of grad", "hessian"],
)
def test_symbolic_zeros_of_forward_mode(fn, device):
    """The tracer crashed where a power's second derivative in forward mode met one."""
    check_after(fn, [lambda: None], device, builds=1)


def test_nan_among_the_values_that_a_trace_depends_on(device):
    limits = torch.tensor([1.0, math.nan], device=device)
    fn = lambda w, x: (w * x).sum().sin() * limits[0].item()  # noqa: E731
    w, x = torch.randn(3, device=device), torch.randn(2, 3, device=device)
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    for _ in range(2):
        same(fast(w, x), psg.per_sample_grad(fn)(w, x))
    assert fast._builds.total() == 1


def test_values_that_require_grad_are_not_baked_in(device):
    """What is selected from a tensor by known values would lose its history."""
    scale = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
    fn = lambda w, x: (w * x * torch.masked_select(scale, torch.ones(3, dtype=torch.bool, device=device))).sum().sin()  # noqa: E731
    w, x = torch.randn(3, device=device), torch.randn(2, 3, device=device)
    fast, slow = psg.jit(psg.per_sample_norm(fn), backend="eager"), psg.per_sample_norm(fn)
    found = [torch.autograd.grad(run(w, x).sum(), scale)[0] for run in (fast, slow)]
    assert_trees_close(*found)


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x, fn: torch.func.linearize(lambda w: fn(w, x), w)[1](w),
        lambda w, x, fn: torch.func.linearize(lambda w: (w**3).sum(), w)[1](w),
        lambda w, x, fn: fn(w, torch.from_dlpack(x)),
        lambda w, x, fn: fn(w, torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))),
    ],
    ids=["linearize", "linearize without psg", "from_dlpack", "to_dlpack"],
)
def test_what_is_made_past_the_tracer_is_not_taken_for_closed_over(step, device):
    fn = psg.per_sample_norm(lambda w, x: (w * x).sin().sum() ** 2)
    fast = psg.jit(lambda w, x: step(w, x, fn), backend="eager")
    w, x = torch.randn(3, device=device), torch.randn(N, 3, device=device)
    with pytest.warns(psg.FallbackWarning, match="cannot be traced"):
        fast(w, x)
    same(fast(2 * w, 3 * x), step(2 * w, 3 * x, fn))


class Lazy(nn.Module):
    """Keeps a table that it computes from its buffers when it first needs it, like the codebooks of Mimi."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("sums", torch.randn(5, 3))
        self.register_buffer("counts", 1 + torch.rand(5))
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = self.sums / self.counts[:, None]
        return (x @ self.w.T @ self.table.T).sin().sum()


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_module_that_keeps_a_table_from_its_first_run_is_traced(n, is_kept, device):
    model, x = Lazy().to(device), torch.randn(n, 4, device=device)
    fn, params = psg.stateless(model)
    norms = psg.per_sample_norm(fn)
    fast = psg.jit(norms, backend="eager")
    if is_kept:
        norms(params, x)
    same(fast(params, x), norms(params, x))
    model.sums.mul_(2)
    same(fast(params, x), norms(params, x))  # by the table that it has kept
    model.table = None
    same(fast(params, x), norms(params, x))
    model.sums, model.table = torch.randn(5, 3, device=device), None
    same(fast(params, x), norms(params, x))


def test_linearize_inside_fn_is_no_write(device):
    def fn(w, x):
        output, push = torch.func.linearize(lambda z: torch.tanh(w * z), x)
        return (output * push(x)).sum()

    w, x = torch.randn(3, device=device), torch.randn(N, 3, device=device)
    fast = psg.jit(psg.per_sample_grad(fn, method="vmap"), backend="eager")
    with pytest.raises(psg.PsgError, match="linearize"):
        fast(w, x)
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    with pytest.warns(psg.FallbackWarning):
        fast(w, x)
    same(fast(2 * w, 3 * x), psg.per_sample_grad(fn, method="loop")(2 * w, 3 * x))


def into_an_argument(w, state, grads):
    w.sub_(0.1 * grads)


def into_a_view(w, state, grads):
    state[0].add_(grads)


def by_a_list_of_tensors(w, state, grads):
    torch._foreach_add_([state[0]], [grads])


def as_out(w, state, grads):
    torch.add(state[1], grads, out=state[1])


def by_an_optimizer(w, state, grads):
    parameter = nn.Parameter(state[1])
    parameter.grad = grads
    torch.optim.Adam([parameter]).step()


def by_a_batch_norm(w, state, grads):
    F.batch_norm(grads + torch.eye(3, dtype=w.dtype, device=w.device), state[0], state[1], training=True)


@pytest.mark.parametrize("write", [into_an_argument, into_a_view, by_a_list_of_tensors, as_out, by_an_optimizer, by_a_batch_norm])
def test_writing_into_what_fn_is_given_or_closes_over_is_refused(write, device):
    """Tracing and comparing would repeat the write."""
    state = torch.zeros(2, 3, device=device)
    fn = psg.clipped_grad(lambda w, x: (w * x).sum() ** 2, 1.0)

    def step(w, x):
        scratch = torch.zeros_like(w)
        scratch.add_(fn(w, x).grads)  # it may write into its own tensors
        write(w, state, scratch)
        return scratch

    fast = psg.jit(step, backend="eager")
    w, x = torch.ones(3, device=device), torch.ones(N, 3, device=device)
    for _ in range(2):
        with pytest.raises(psg.StateError, match=r"jit\(step\): the function writes into an argument or into a tensor that it closes over"):
            fast(w, x)
    assert torch.equal(w, torch.ones_like(w)) and not state.any()
    assert fast.cache_info() == []


def test_a_graph_asks_for_no_views(device):
    """A compiler may choose another layout, in which the view that eager takes is impossible."""
    targets = []

    def backend(graph, inputs):
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    fn = psg.clipped_grad(linear_loss, 0.5)
    args = linear_args(device)
    same(psg.jit(fn, backend=backend)(*args), fn(*args))
    assert torch.ops.aten.reshape.default in targets and torch.ops.aten.view.default not in targets


def test_a_model_that_asks_whether_it_is_compiled_is_told_so(device):
    """If it were not told, it might branch on a mask, and the branch for one mask is wrong for another."""
    weights = torch.arange(5.0, device=device)

    def loss(p, x, mask):
        if torch.compiler.is_compiling() or not mask.all():
            x = x * mask
        return (p * x * weights).sum() ** 2

    fn = psg.per_sample_norm(loss)
    fast = psg.jit(fn, backend="eager")
    p, x = torch.randn(5, device=device), torch.randn(N, 5, device=device)
    mask = torch.ones(N, 5, dtype=torch.bool, device=device)
    same(fast(p, x, mask), fn(p, x, mask))
    mask[1, 2:] = False
    same(fast(p, x, mask), fn(p, x, mask))
    assert [entry.error for entry in fast.cache_info()] == [None]
    assert not torch.compiler.is_compiling()


def test_threads_trace_different_functions(device):
    """All threads share torch's tracer, and the flag that tells a model that it is being compiled."""
    told, results = [], []
    p, x = torch.ones(5, device=device), torch.randn(N, 5, device=device)

    def one(power):
        def loss(p, x):
            told.append(torch.compiler.is_compiling())
            return (p * x).sum() ** power

        results.append((power, psg.jit(psg.per_sample_norm(loss), backend="eager", check=False)(p, x)))

    threads = [threading.Thread(target=one, args=(power,)) for power in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(told) and len(told) == 8 and not torch.compiler.is_compiling()
    for power, result in results:
        same(result, power * x.sum(1).abs() ** (power - 1) * x.norm(dim=1))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_models_of_transformers_with_padding(name, trains):
    pytest.importorskip("transformers")
    from sweeps import models

    architecture = next(architecture for architecture in models.architectures() if architecture.name == name)
    fn, params, batch = architecture.build(trains)
    fn = psg.clipped_grad(fn, 1.0)
    fast = psg.jit(fn, backend="eager")
    mask = batch[0]["attention_mask"]

    def agrees():
        torch.manual_seed(0)
        found = fast(params, *batch)
        torch.manual_seed(0)
        same(found, fn(params, *batch))

    agrees()
    mask[:] = 1
    agrees()
    assert [entry.error for entry in fast.cache_info()] == [None]


def test_a_module_that_reads_a_buffer(device):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            return super().forward(x) * self.scale.item()

    model = Scaled().to(device)
    loss, params = psg.stateless(model, F.cross_entropy)
    fn = psg.clipped_grad(loss, 0.1)
    fast = psg.jit(fn, backend="eager")
    x, y = batch(device)
    for scale in (2.0, 5.0):
        model.scale.fill_(scale)
        same(fast(params, x, y), fn(params, x, y))
        assert [entry.error for entry in fast.cache_info()] == [None]


def test_the_warning_names_the_line_that_reads_a_value(device):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    loss, params = psg.stateless(Scaled(5, 3, device=device), F.cross_entropy)
    fast = psg.jit(psg.clipped_grad(loss, 0.1, method="loop"), backend="eager")
    where = rf"cannot be traced .*{Path(__file__).name}:\d+: .* get value out of a tracing tensor"
    with pytest.warns(psg.FallbackWarning, match=where) as caught:
        fast(params, *batch(device))
    number = int(re.search(rf"{Path(__file__).name}:(\d+)", str(caught[0].message))[1])
    assert ".item()" in Path(__file__).read_text().splitlines()[number - 1]


def test_python_values_of_constants_are_kept(device):
    p, x = linear_args(device)

    def loss(p, x):
        two = torch.tensor(2.0, device=x.device)
        return linear_loss(p, x) * two.item() * (3 if two > torch.tensor(1.0, device=x.device) else 1) * x.shape[0]

    fn = psg.per_sample_norm(loss)
    fast = psg.jit(fn, backend="eager")
    same(fast(p, x), fn(p, x))
    assert [entry.error for entry in fast.cache_info()] == [None]


def test_stateless_modules_are_looked_after(device):
    model, loss, params = small(device, nn.Dropout(0.9), nn.BatchNorm1d(4).eval())
    x, y = batch(device)
    fn = psg.per_sample_norm(loss)
    fast = psg.jit(fn, backend="eager")
    fast(params, x, y)
    model.eval()
    same(fast(params, x, y), fn(params, x, y))
    model[2].running_var.mul_(4)  # in place
    same(fast(params, x, y), fn(params, x, y))
    assert len(fast.cache_info()) == 2
    model[2].running_var = torch.full((4,), 9.0, device=device)  # another tensor
    same(fast(params, x, y), fn(params, x, y))
    assert len(fast.cache_info()) == 3


class Criterion(nn.Dropout):
    def forward(self, output, y):
        return F.cross_entropy(super().forward(output), y)


@pytest.mark.parametrize("kind", ["step", "wrapped loss", "criterion", "argument"])
def test_modules_are_looked_after_wherever_they_are_called(kind, device):
    _, loss, params = small(device, module := nn.Dropout(0.9))
    x, y = batch(device)
    given = {}
    if kind == "step":
        fn = lambda params, x, y: psg.per_sample_norm(loss)(params, x, y)  # noqa: E731
    elif kind == "wrapped loss":
        fn = psg.per_sample_norm(lambda params, x, y: 2 * loss(params, x, y))
    elif kind == "criterion":
        loss, params = psg.stateless(nn.Linear(5, 3).to(device), module := Criterion(0.9))
        fn = psg.per_sample_norm(loss)
    else:
        given["layer"] = module
        fn = psg.per_sample_norm(lambda params, x, y, layer: loss(params, layer(x), y))
    fast = psg.jit(fn, backend="eager")
    for _ in range(2):
        for training in (True, False):
            module.train(training)
            torch.manual_seed(0)
            expected = fn(params, x, y, **given)
            torch.manual_seed(0)
            same(fast(params, x, y, **given), expected)
    assert len(fast.cache_info()) == 2  # one entry per mode


def test_exchanged_submodules_are_traced_anew(device):
    """A new submodule may have the address of one that is gone."""
    model, loss, params = small(device, nn.Linear(4, 4).requires_grad_(False))
    x, y = batch(device)
    fn = psg.per_sample_norm(loss)
    fast = psg.jit(fn, backend="eager")
    kinds = [lambda: nn.Linear(4, 4).to(device).requires_grad_(False), nn.Tanh, nn.ReLU, nn.Sigmoid, nn.Softplus]
    for kind in kinds:
        same(fast(params, x, y), fn(params, x, y))
        model[1] = kind()
    same(fast(params, x, y), fn(params, x, y))
    assert len(fast.cache_info()) == len(kinds) + 1


class Named(nn.Module):
    """Holds modules, buffers and frozen parameters by name."""

    def __init__(self):
        super().__init__()
        self.linear, self.parts = nn.Linear(4, 4), nn.ModuleDict({"a": nn.Tanh(), "b": nn.Sigmoid()})
        self.weights = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)}).requires_grad_(False)
        self.register_buffer("a", torch.randn(4))
        self.register_buffer("b", torch.randn(4))

    def forward(self, x):
        return self.parts["b"](self.parts["a"](self.linear(x)) * self.a + self.b) * self.weights["a"] - self.weights["b"]


@pytest.mark.parametrize("slots", [("parts", "_modules"), ("weights", "_parameters"), ("", "_buffers")], ids=lambda slots: slots[1])
def test_exchanged_names_are_traced_anew(slots, device):
    """The values were known by their order."""
    path, kind = slots
    module = Named().to(device)
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    fn = psg.per_sample_norm(loss)
    fast, x = psg.jit(fn, backend="eager"), torch.randn(3, 4, device=device)
    same(fast(params, x), fn(params, x))
    before = fast(params, x)
    held = getattr(module.get_submodule(path), kind)
    one, other = held.pop("a"), held.pop("b")
    held["b"], held["a"] = one, other
    same(fast(params, x), fn(params, x))
    assert not torch.allclose(fast(params, x), before)


def test_builds_in_other_threads_do_not_disturb_one_another():
    """A build rewinds torch's generators; another that compared them meanwhile took its function for one that seeds them."""
    comparing, go = threading.Event(), threading.Event()

    def slow(x):
        if not torch.compiler.is_compiling():
            comparing.set()
            go.wait(0.5)
        return 2 * x

    def fast(x):
        if not torch.compiler.is_compiling():
            go.set()
            thread.join(5)
        return 3 * x

    x = torch.ones(2)
    psg.jit(torch.sin, backend="eager")(x)  # torch 2.11 crashes where the thread that was the first to trace has ended
    thread = threading.Thread(target=psg.jit(slow, backend="eager"), args=(x,))
    thread.start()
    comparing.wait(60)
    compiled = psg.jit(fast, backend="eager")
    assert torch.equal(compiled(x), 3 * x)
    thread.join()
    assert compiled.cache_info()[0].error is None


def test_threads_take_the_locks_of_modules_in_one_order():
    modules = [nn.Linear(2, 2) for _ in range(5)]
    for module in modules:
        psg.stateless(module, F.mse_loss)
    forwards, backwards = (_modules.Guard(order, [])._locks for order in (modules, modules[::-1]))
    assert len(forwards) == len(modules) and all(map(operator.is_, forwards, backwards))


def test_hooks_of_modules_are_traced_anew(device):
    model, loss, params = small(device, nn.Tanh())
    x, y = batch(device)
    fn = psg.per_sample_norm(loss)
    fast = psg.jit(fn, backend="eager")
    same(fast(params, x, y), fn(params, x, y))
    hooks = [model[0].register_forward_hook(lambda module, args, output: 2 * output)]
    same(fast(params, x, y), fn(params, x, y))
    hooks.append(model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,)))
    same(fast(params, x, y), fn(params, x, y))
    for hook in hooks:
        hook.remove()
    same(fast(params, x, y), fn(params, x, y))
    assert len(fast.cache_info()) == 3


def test_functions_of_a_whole_batch_run_eagerly(device):
    w, x = torch.randn(4, device=device), torch.randn(6, 4, device=device)
    fn = psg.per_sample_norm(lambda w, x: (x @ w).square(), method="batch")
    fast = psg.jit(fn, backend="eager")
    with pytest.warns(psg.FallbackWarning, match='cannot be traced .*method="batch" measures on the data whose row is whose'):
        same(fast(w, x), fn(w, x))


def test_python_values_dtypes_strides_and_autocast_are_part_of_the_signature(device):
    p, x = linear_args(device)
    fn = psg.per_sample_norm(lambda p, x, power: linear_loss(p, x) ** power)
    fast = psg.jit(fn, backend="eager")
    for power in (1, 2, 1):
        same(fast(p, x, power), fn(p, x, power))
    assert len(fast.cache_info()) == 2
    same(fast(p, x.movedim(2, 1).contiguous().movedim(1, 2), 1), fn(p, x, 1))
    assert len(fast.cache_info()) == 3
    low = {name: leaf.float() for name, leaf in p.items()}
    same(fast(low, x.float(), 1), fn(low, x.float(), 1))
    assert len(fast.cache_info()) == 4
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        same(fast(low, x.float(), 1), fn(low, x.float(), 1))
    assert len(fast.cache_info()) == 5
    fast.cache_clear()
    assert fast.cache_info() == []


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_tensors_that_are_marked_as_their_negative_or_conjugate(backend, device):
    """Compiled code reads the memory itself, and would ignore lazy negation and conjugation."""
    w, z = torch.randn(4, 3, device=device), torch.randn(5, 3, dtype=torch.complex128, device=device)
    norms = psg.per_sample_norm(lambda w, x: F.linear(x, w).exp().sum())
    fast = psg.jit(norms, backend=backend)
    for x in (z.imag, z.conj().imag, z.imag.clone()):
        same(fast(w, x), norms(w, x))
    assert [info.error for info in fast.cache_info()] == [None] * len(fast.cache_info())
    if backend == "eager":  # inductor does not support complex numbers
        norms = psg.per_sample_norm(lambda w, z: (torch.view_as_real(z.resolve_conj()).sum(1) * w).exp().sum())
        fast = psg.jit(norms, backend=backend)
        for x in (z, z.conj()):
            same(fast(w[0], x), norms(w[0], x))


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta state")
def test_compressed_sparse_arguments_run_eagerly(device):
    norms = psg.per_sample_norm(lambda w, x, graph: (graph @ (x * w)[:, None]).square().sum())
    graph = torch.eye(3, device=device).to_sparse_csr()
    w, x = torch.randn(3, device=device), torch.randn(5, 3, device=device)
    fast = psg.jit(norms, backend="eager")
    with pytest.warns(psg.FallbackWarning):
        found = fast(w, x, graph=graph)
    same(found, norms(w, x, graph=graph))


def test_zeros_have_signs_and_plans_are_part_of_the_signature(device):
    fast = psg.jit(psg.per_sample_grad(lambda w, x, sign: (w * x).sum() * math.copysign(1, sign)), backend="eager")
    w, x = torch.ones(3, device=device), torch.ones(2, 3, device=device)
    same(fast(w, x, sign=0.0), x)
    same(fast(w, x, sign=-0.0), -x)
    with psg.plans.using(norm="gram"):
        same(fast(w, x, sign=0.0), x)
    assert len(fast.cache_info()) == 3
    for plan in ("gram", "gram", "chunks"):  # functions with the same code are one, unless it reads something else
        with psg.plans.using(norm=lambda factor, costs: "gram"):
            same(fast(w, x, sign=0.0), x)
        with psg.plans.using(norm=lambda factor, costs, plan=plan: plan):
            same(fast(w, x, sign=0.0), x)
    assert len(fast.cache_info()) == 7


def test_argument_trees(device):
    p, x = linear_args(device)
    fn = psg.per_sample_norm(lambda p, b: linear_loss({"w": p[0], "b": p[1]}, b["x"]))
    same(psg.jit(fn, backend="eager")([p["w"], p["b"]], {"x": x}), fn([p["w"], p["b"]], {"x": x}))


def test_the_order_of_a_dict_is_part_of_the_signature(device):
    """A pytree's structure does not show the order of a dict's keys, but fn may iterate over the dict."""
    fn = psg.per_sample_norm(
        lambda p, x, **scales: sum((i + 1) * (w * x).sum() ** 2 for i, w in enumerate([*p.values(), *scales.values()]))
    )
    fast = psg.jit(fn, backend="eager")
    a, b, x = torch.randn(5, device=device), torch.randn(5, device=device), torch.randn(N, 5, device=device)
    for p in ({"a": a, "b": b}, {"b": b, "a": a}):
        for scales in ({"c": a, "d": b}, {"d": b, "c": a}):
            same(fast(p, x, **scales), fn(p, x, **scales))
    assert len(fast.cache_info()) == 4
    fast({"b": a, "a": b}, x, c=b, d=a)
    assert len(fast.cache_info()) == 4


# --- composing ----------------------------------------------------------------------------------------------


def test_is_differentiable(device):
    p, x = linear_args(device)
    fn = psg.per_sample_norm(linear_loss)
    fast = psg.jit(fn, backend="eager")
    fast(p, x)
    same(torch.func.grad(lambda x: fast(p, x).sum())(x), torch.func.grad(lambda x: fn(p, x).sum())(x))
    tracked = {name: leaf.clone().requires_grad_() for name, leaf in p.items()}
    fast(tracked, x).sum().backward()
    same({name: leaf.grad for name, leaf in tracked.items()}, torch.func.grad(lambda p: fn(p, x).sum())(p))
    with torch.no_grad():
        assert not fast(tracked, x).requires_grad


def test_what_fn_closes_over_is_not_detached(device):
    scale = torch.tensor(2.0, device=device, requires_grad=True)
    p, x = linear_args(device)
    fn = psg.per_sample_norm(lambda p, x: scale * linear_loss(p, x))
    fast = psg.jit(fn, backend="eager")
    with torch.no_grad():
        same(fast(p, x), fn(p, x))
    fast(p, x).sum().backward()
    same(scale.grad, fn(p, x).detach().sum() / 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_inside_of_another_trace(compiled, device):
    """To the outer tracer, the results of a compiled graph would be constants."""
    p, x = linear_args(device)
    fn = psg.per_sample_norm(linear_loss)
    inner = psg.jit(fn, backend="aot_eager", buckets=4)
    if compiled:
        inner(p, x)
    outer = psg.jit(lambda p, x: 2 * inner(p, x), backend="aot_eager")
    for args in ((p, x), linear_args(device), (p, 3 * x)):
        same(outer(*args), 2 * fn(*args))
    assert [entry.error for entry in outer.cache_info()] == [None]


def test_tangents_of_forward_mode(device):
    p, x = torch.randn(3, device=device), torch.randn(N, 3, device=device)
    fn = psg.per_sample_norm(lambda w, x: (w * x).sin().sum() ** 2)
    fast = psg.jit(fn, backend="eager")
    fast(p, x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(p, torch.ones_like(p))
        same(forward_ad.unpack_dual(fast(dual, x)).tangent, forward_ad.unpack_dual(fn(dual, x)).tangent)


def test_under_inference_mode(device):
    p, x = linear_args(device)
    fast = psg.jit(psg.per_sample_norm(linear_loss), backend="eager")
    with torch.inference_mode():
        inside = fast(p, x)
    same(inside, fast(p, x))


def test_threads_compile_a_signature_once(device):
    p, x = linear_args(device)
    fast = psg.jit(psg.per_sample_norm(linear_loss), backend="eager")
    results = []
    threads = [threading.Thread(target=lambda: results.append(fast(p, x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fast.cache_info()) == 1
    for result in results:
        same(result, psg.per_sample_norm(linear_loss)(p, x))


# --- where it cannot be traced or is compiled wrongly -------------------------------------------------------


@each_case(lambda case: case.not_traced)
def test_what_cannot_be_traced_runs_eagerly(case, device):
    problem = case.build(device)
    fn = psg.per_sample_norm(problem.fn, **problem.options)
    expected = fn(*problem.args, **problem.shared)
    fast = psg.jit(fn, backend="eager")
    with pytest.warns(psg.FallbackWarning, match="cannot be traced .* run eagerly"):
        same(fast(*problem.args, **problem.shared), expected)
    same(fast(*problem.args, **problem.shared), expected)  # no second attempt, no second warning
    assert "cannot be traced" in fast.cache_info()[0].error


def test_a_compiler_that_fails(device):
    p, x = linear_args(device)
    fn = psg.per_sample_norm(linear_loss)
    with pytest.warns(psg.FallbackWarning, match="no such machine"):
        same(psg.jit(fn, backend=never)(p, x), fn(p, x))


def test_a_compiler_that_is_wrong(device):
    p, x = linear_args(device)
    fn = psg.clipped_grad(linear_loss, 1.0)
    fast = psg.jit(fn, backend=wrong)
    with pytest.warns(psg.FallbackWarning, match="the compiled result is wrong: compiled result.* where .* is allowed"):
        same(fast(p, x), fn(p, x))
    same(fast(p, x), fn(p, x))
    unchecked = psg.jit(fn, backend=wrong, check=False)(p, x)
    assert not torch.allclose(unchecked.norms, fn(p, x).norms)


def test_a_relu_at_its_kink_is_no_mismatch(device):
    """At the kink rounding decides the gradient: the difference is no larger than that from rounding the inputs."""

    def kink(p, x):
        return ((p - 1) * x).sum().relu()

    fn = psg.per_sample_grad(kink)
    p, x = torch.ones(50, device=device), torch.rand(4, 50, device=device)
    flipped = []

    def other_side(graph, inputs):
        def run(*args):
            (output,) = graph(*args)
            flipped.append(True)
            return (output + x,)

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = psg.jit(fn, backend=other_side)
        fast(p, x)
    assert flipped
    with pytest.warns(psg.FallbackWarning, match="the compiled result is wrong"):
        psg.jit(fn, backend=other_side)(2 * p, x)  # away from the kink the difference is an error


@pytest.mark.parametrize("always", [False, True])
def test_a_relu_near_its_kink_falls_to_the_other_side_now_and_then(always, device):
    """As one of millions in a large model does: where inputs that are nudged give equal results, the compiler is right."""
    fn = psg.per_sample_grad(lambda p, x: ((p - 1) * x).sum().relu())
    p, x = torch.full((50,), 1 + 1e-13, dtype=torch.float64, device=device), torch.rand(4, 50, dtype=torch.float64, device=device)
    calls = []

    def other_side(graph, inputs):
        def run(*args):
            calls.append(True)
            (output,) = graph(*args)
            return (output - x if always or len(calls) == 1 else output,)

        return run

    with pytest.warns(psg.FallbackWarning, match="the compiled result is wrong") if always else contextlib.nullcontext():
        psg.jit(fn, backend=other_side)(p, x)
    assert len(calls) > 1


@pytest.mark.parametrize("backend", ["eager", "reordered"])
def test_under_autocast(backend, device):
    """Autocast is applied once, and its rounding is not taken for an error of the compiler."""

    def reordered(graph, inputs):
        own = torch.Generator(device)
        noise = lambda output: 2e-3 * torch.rand(output.shape, dtype=output.dtype, device=device, generator=own)  # noqa: E731
        return lambda *args: tuple(output * (1 + noise(output)) for output in graph(*args))

    model = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).to(
        device, torch.float32
    )
    loss, params = psg.stateless(model, F.cross_entropy)
    fn = psg.per_sample_grad(loss)
    fast = psg.jit(fn, backend=backend if backend == "eager" else reordered)
    x, y = torch.randn(N, 16, device=device, dtype=torch.float32), torch.randint(3, (N,), device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        actual, expected = fast(params, x, y), fn(params, x, y)
    assert {name: leaf.dtype for name, leaf in actual.items()} == {name: leaf.dtype for name, leaf in expected.items()}
    assert [entry.error for entry in fast.cache_info()] == [None]


@pytest.mark.parametrize("wrong", [False, True])
def test_rounding_beside_samples_that_are_not_finite(wrong, device):
    """Norms of inf and NaN are no differences."""

    def reordered(graph, inputs):
        factor = 2 if wrong else 1.002
        return lambda *args: tuple(output * factor if output.is_floating_point() else output for output in graph(*args))

    p, x = linear_args(device)
    p, x = {name: leaf.float() for name, leaf in p.items()}, x.float()
    x[0], x[2, 0] = torch.inf, torch.nan
    fn = psg.clipped_grad(lambda p, x: linear_loss({name: leaf.bfloat16() for name, leaf in p.items()}, x.bfloat16()).float(), 0.1)
    fast = psg.jit(fn, backend=reordered)
    with pytest.warns(psg.FallbackWarning, match="the compiled result is wrong") if wrong else contextlib.nullcontext():
        assert fast(p, x).nonfinite == 2


def test_sums_in_another_order_are_no_random_numbers(device):
    """As atomic additions on a GPU make them, of which every call has other rounding errors."""
    calls = []

    def loss(w, x):
        if not torch.compiler.is_compiling():
            calls.append(x)
        return ((w * x).float() * (1 + 3e-4 * (len(calls) % 2))).sum()

    w, x = torch.rand(5, device=device), torch.rand(N, 5, device=device)
    fast = psg.jit(psg.per_sample_value_and_grad(loss), backend="eager")
    with pytest.warns(psg.FallbackWarning, match="it returns other values in every call"):
        fast(w, x)  # far beyond rounding in float64 and float32
    fast = psg.jit(psg.per_sample_value_and_grad(lambda w, x: loss(w.bfloat16(), x.bfloat16())), backend="eager")
    fast(w, x)
    assert [entry.error for entry in fast.cache_info()] == [None]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_in_float64_that_computes_in_float32_inside(wrong, device):
    """As layers that normalise in float32 do: its rounding is not taken for an error of the compiler, but an error is."""

    def reordered(graph, inputs):
        return lambda *args: tuple(output * (1 + (1e-4 if wrong else 2e-8)) for output in graph(*args))

    def fn(w, x):
        scale = (x @ w).float().square().mean().rsqrt()
        return ((x @ w) * scale).sin().sum()

    w, x = torch.randn(4, 4, device=device), torch.randn(N, 3, 4, device=device)
    fast = psg.jit(psg.per_sample_norm(fn), backend=reordered)
    with pytest.warns(psg.FallbackWarning, match="the compiled result is wrong") if wrong else contextlib.nullcontext():
        fast(w, x)


@pytest.mark.parametrize("device_of_seed, found", [("cpu", True), ("meta", False)])
def test_numbers_on_the_cpu_in_a_graph_of_an_accelerator(device_of_seed, found):
    """Such as the seed of attention without dropout: inductor must not take their memory for its own."""
    graph = torch.fx.Graph()
    outputs = graph.call_function(torch.ops.aten.var_mean.correction, (graph.placeholder("x"),))
    for place, where in enumerate(("meta", device_of_seed)):
        node = graph.call_function(operator.getitem, (outputs, place))
        node.meta["val"] = torch.empty((), device=where)
    graph.output(node)
    assert _jit._has_numbers_on_cpu(torch.fx.GraphModule({}, graph)) == found


def test_log(device):
    p, x = linear_args(device)
    with unittest.TestCase().assertLogs("psg.jit", logging.INFO) as logs:
        psg.jit(psg.per_sample_norm(linear_loss), backend="eager")(p, x)
    assert [record.message.partition(" for ")[0] for record in logs.records] == [
        "per_sample_norm(linear_loss): compiling",
        "per_sample_norm(linear_loss): compiled",
    ]


def test_errors(device):
    fn = psg.per_sample_norm(linear_loss)
    with pytest.raises(psg.InputError, match=r"buckets=0.*at least 1"):
        psg.jit(fn, buckets=0)
    with pytest.raises(psg.InputError, match=r"buckets=3\.5.*at least 1"):
        psg.jit(fn, buckets=3.5)
    with pytest.raises(psg.InputError, match=r"buckets=4.*not made by one of psg's transforms"):
        psg.jit(linear_loss, buckets=4)
    with pytest.raises(psg.InputError, match=r"mode='fast'.*'max-autotune'"):
        psg.jit(fn, mode="fast")
    with pytest.raises(psg.InputError, match=r"mode=\['default'\].*'max-autotune'"):
        psg.jit(fn, mode=["default"])
    with pytest.raises(psg.InputError, match=r"expected a function, got the class Linear"):
        psg.jit(nn.Linear)
    with pytest.raises(psg.InputError, match=r"mode='max-autotune'.*only the backend \"inductor\""):
        psg.jit(fn, mode="max-autotune", backend="eager")
    with pytest.raises(psg.InputError, match=r"backend='foo'.*'aot_eager',.*'eager',.*'inductor'"):
        psg.jit(fn, backend="foo")
    with pytest.raises(psg.InputError, match=r"check='no'\): expected True or False"):
        psg.jit(fn, check="no")
    p, x = linear_args(device)
    with pytest.raises(psg.InputError, match="argument of type set is neither a tensor nor hashable"):
        psg.jit(fn, backend="eager")(p, x, {1, 2})


def test_an_error_of_the_function_is_the_functions_own(device):
    p, x = linear_args(device)
    with pytest.raises(psg.InputError, match="expected fn to return a scalar"):
        psg.jit(psg.per_sample_norm(lambda p, x: x), backend="eager")(p, x)


def test_an_error_of_the_function_in_the_first_call_is_not_remembered(device):
    """Such an error was once taken for an op that cannot be traced."""
    p, x = linear_args(device)
    state = {}

    def fn(p, x):
        return linear_loss(p, x) * state["scale"]

    fast = psg.jit(psg.per_sample_norm(fn), backend="eager")
    with pytest.raises(KeyError, match="scale"):
        fast(p, x)
    assert fast.cache_info() == []
    state["scale"] = 2.0
    same(fast(p, x), 2 * psg.per_sample_norm(linear_loss)(p, x))
    assert [entry.error for entry in fast.cache_info()] == [None]


def test_copies_and_methods(device):
    p, x = linear_args(device)

    class Trainer:
        scale = 2.0

        @functools.partial(psg.jit, backend="eager")
        def step(self, p, x):
            return self.scale * psg.per_sample_norm(linear_loss)(p, x)

    same(Trainer().step(p, x), 2 * psg.per_sample_norm(linear_loss)(p, x))
    assert isinstance(Trainer.step, psg.jit(linear_loss).__class__)
    assert copy.deepcopy({"step": Trainer.step})["step"] is Trainer.step


MASKED = {
    "index": lambda w, x, mask: (w * x)[mask].square().mean(),
    "masked_select": lambda w, x, mask: torch.masked_select(w * x, mask).exp().mean(),
    "nonzero": lambda w, x, mask: (w * x)[mask.nonzero()[:, 0]].exp().mean(),
    "of the parameters": lambda w, x, mask: (w * x)[w.detach() * mask > 0].exp().sum(),
}


@pytest.mark.parametrize("fn", MASKED.values(), ids=MASKED)
def test_what_has_as_many_entries_as_a_mask_says_runs_eagerly(fn, device):
    """In a trace the number of entries would stay that of the first call."""
    w, x = torch.rand(4, device=device) + 0.1, torch.randn(3, 4, device=device)
    fast = psg.jit(psg.per_sample_grad(fn, in_dims=(None, 0, None)), backend="eager")
    masks = [[True, False, True, False], [False, True, True, False], [True, True, True, False], [False, False, False, True]]
    with pytest.warns(psg.FallbackWarning, match="depends on the data"):
        for mask in torch.tensor(masks, device=device):
            assert_trees_close(fast(w, x, mask), loop_grad(fn, in_dims=(None, 0, None))(w, x, mask))


def test_literal_masks_are_compiled(device):
    def fn(w, x):
        mask = torch.tensor([True, False, True, False], device=x.device)
        return (w * x)[mask].sin().sum() + w.repeat_interleave(torch.tensor([1, 2, 0, 1], device=x.device), output_size=4).dot(x)

    w, x = torch.randn(4, device=device), torch.randn(3, 4, device=device)
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    assert_trees_close(fast(w, x), loop_grad(fn)(w, x))
    assert [entry.error for entry in fast.cache_info()] == [None]


def test_booleans_are_results_too(device):
    p, x = linear_args(device)
    far = lambda p, x: psg.tree.norm(psg.factored_grad(linear_loss)(p, x)) > 1  # noqa: E731
    fast = psg.jit(far, backend="eager")
    assert torch.equal(fast(p, x), far(p, x))
    assert fast.cache_info()[0].error is None


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")  # torch 2.11 cannot trace it
def test_a_generator_of_the_caller_s_is_left_where_an_eager_call_leaves_it(device):
    generator = torch.Generator(device)
    w, x = torch.ones(3, device=device), torch.randn(5, 3, device=device)

    def noisy(w, x):
        return psg.tree.add_noise(psg.clipped_grad(lambda w, x: (w * x).sum(), 1.0)(w, x).grads, 1.0, generator=generator)

    generator.manual_seed(0)
    expected = [noisy(w, x) for _ in range(3)]
    for check in (True, False):
        fast = psg.jit(noisy, backend="eager", check=check)
        generator.manual_seed(0)
        assert_trees_close([fast(w, x) for _ in range(3)], expected, per_sample=False)


SHARED = torch.Generator()


def _seeds(w, x):
    SHARED.manual_seed(3)
    return (w * x * torch.rand(4, generator=SHARED)).sum()


def _seeds_the_default(w, x):
    torch.manual_seed(3)
    return (w * x * torch.rand(4)).sum()


def _seeds_in_a_fork(w, x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return (w * x * torch.rand(4)).sum()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("first", [0.0, 1.0], ids=["first met with zeros", "first met with data"])
@pytest.mark.parametrize(
    ("fn", "compiles"),
    [
        (lambda w, x: (w * x * torch.rand(4, generator=torch.Generator().manual_seed(7))).sum(), False),
        (_seeds, False),
        (_seeds_the_default, False),
        (_seeds_in_a_fork, False),
        (lambda w, x: (w * x * torch.rand(4, generator=SHARED)).sum(), True),
        (lambda w, x: (w * x * torch.rand(4)).sum(), True),
    ],
    ids=["made", "seeded", "default seeded", "seeded in a fork", "closed over", "default"],
)
def test_generators_that_fn_makes_or_seeds_are_not_fixed(fn, compiles, first):
    """Nor where the numbers make no difference to the first call's result, as before a head that starts at zero."""
    w, x = torch.randn(4), torch.randn(3, 4)
    eager = psg.per_sample_grad(fn)
    fast = psg.jit(eager, backend="eager")
    fast(w, first * x)
    for seed in range(3):
        SHARED.manual_seed(seed)
        torch.manual_seed(seed)
        found = fast(w, x)
        SHARED.manual_seed(seed)
        torch.manual_seed(seed)
        assert_trees_close(found, eager(w, x))
    assert compiles or fast.cache_info()[0].error is not None  # torch 2.11 traces no generator at all


def test_random_numbers_that_torch_does_not_know_are_not_fixed():
    numbers = random.Random(0)
    fast = psg.jit(psg.per_sample_grad(lambda w, x: (w * x).sum() * numbers.random()), backend="eager")
    w, x = torch.randn(4), torch.randn(3, 4)
    with pytest.warns(psg.FallbackWarning, match="returns other values in every call"):
        first = fast(w, x)
    assert not torch.allclose(first, fast(w, x))


class _Sines(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


def test_function_modes_see_every_op():
    w, x = torch.randn(3), torch.randn(2, 3)
    eager = psg.per_sample_grad(lambda w, x: torch.tanh(w * x).sum())
    for first in (True, False):
        fast = psg.jit(eager, backend="eager")
        fast(w, x) if first else None
        with _Sines(), warnings.catch_warnings():
            warnings.simplefilter("ignore", psg.FallbackWarning)
            assert_trees_close(fast(w, x), eager(w, x))
        assert_trees_close(fast(w, x), eager(w, x))
        assert len(fast.cache_info()) == 1


def test_another_default_device_is_another_signature():
    w, x = torch.randn(3), torch.randn(2, 3)
    eager = psg.per_sample_grad(lambda w, x: (w * x).sum() * (2 if torch.zeros(()).is_meta else 3))
    fast = psg.jit(eager, backend="eager")
    for device in ("cpu", "meta", "cpu"):
        with torch.device(device):
            assert_trees_close(fast(w, x), eager(w, x))
    assert len(fast.cache_info()) == 2


def test_zeros_of_numpy_have_signs():
    fast = psg.jit(psg.per_sample_grad(lambda w, x, s: (w * x).sum() * math.copysign(1, s), in_dims=(None, 0, None)), backend="eager")
    w, x = torch.randn(3), torch.randn(2, 3)
    assert_trees_close(fast(w, x, np.float32(-0.0)), -fast(w, x, np.float32(0.0)))


# --- values that are known in the trace ---------------------------------------------------------------------


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (w * x).square().sum() * torch.full((), 2.0).item(),
        lambda w, x: sum((w * x).square().sum() * (float(t) + 1) for t in torch.arange(3)),
        lambda w, x: (w * x)[torch.arange(4, device=x.device) % 2 == 0].square().sum(),
        lambda w, x: (w * x)[torch.ones(4, device=x.device).nonzero()[:, 0]].square().sum(),
        lambda w, x: (w * x).square().sum() * (2.0 if torch.equal(torch.ones(2), torch.ones(2)) else 1.0),
    ],
    ids=["item", "iteration", "mask", "nonzero", "equal"],
)
def test_what_is_computed_from_numbers_alone_has_python_values(fn, device):
    w, x = torch.randn(4, device=device), torch.randn(3, 4, device=device)
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    for batch in (x, x + 1):
        same(fast(w, batch), psg.per_sample_grad(fn)(w, batch))
    assert fast.cache_info()[0].error is None


@pytest.mark.parametrize("through_a_view", [False, True])
def test_numbers_that_data_have_overwritten_are_not_known(through_a_view, device):
    def fn(w, x):
        kept = torch.zeros(4, device=x.device)
        view = kept[:2]
        (view if through_a_view else kept).copy_(x[:2] if through_a_view else x)
        return (w * x).square().sum() * (kept if through_a_view else view)[0].item()

    w, x = torch.randn(4, device=device), torch.ones(3, 4, device=device)
    fast = psg.jit(psg.per_sample_grad(fn), backend="eager")
    with pytest.warns(psg.FallbackWarning, match="cannot be traced"):
        fast(w, x)
    same(fast(w, 2 * x), psg.per_sample_grad(fn)(w, 2 * x))


@pytest.mark.parametrize("wrap", [lambda c: c, functools.partial, lambda c: c.forward, lambda c: lambda o, y: c(o, y)])
def test_a_criterion_behind_other_functions_leads_to_a_new_trace(wrap, device):
    class Weighted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weights", torch.ones(2, device=device))

        def forward(self, output, target):
            return ((output - target) ** 2 * self.weights).sum()

    criterion = Weighted()
    loss, params = psg.stateless(torch.nn.Linear(3, 2, device=device), wrap(criterion))
    x, y = torch.randn(4, 3, device=device), torch.randn(4, 2, device=device)
    fast = psg.jit(psg.per_sample_norm(loss), backend="eager")
    fast(params, x, y)
    criterion.weights = torch.tensor([3.0, 4.0], device=device)
    same(fast(params, x, y), psg.per_sample_norm(loss)(params, x, y))


def test_a_part_of_the_parameters_runs_compiled(device):
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(1) or graph(*args)

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).to(device)
    loss, params = psg.stateless(model, torch.nn.functional.mse_loss)
    part = {name: value for name, value in params.items() if name.startswith("2")}
    x, y = torch.randn(4, 3, device=device), torch.randn(4, 2, device=device)
    fast = psg.jit(psg.per_sample_norm(loss), backend=backend)
    fast(part, x, y)
    runs.clear()
    same(fast(part, x, y), psg.per_sample_norm(loss)(part, x, y))
    assert runs


def test_what_is_no_function_and_a_representation():
    with pytest.raises(psg.PsgError, match="expected a function, got an int"):
        psg.jit(3)
    norms = psg.jit(psg.per_sample_norm(torch.dot), backend="eager")
    norms(torch.ones(3), torch.ones(2, 3))
    assert repr(norms) == "psg.jit(per_sample_norm(dot)), compiled 1 times"


# --- what a trace reads unseen, or takes for the same -------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda x, k: x[[k, 0], 1].sum(),
        lambda x, k: x[:, [k, 0]].sum(),
        lambda x, k: x[0, [[k, 0]]].sum(),
        lambda x, k: (torch.FloatTensor([k, 1.0]).to(x.device) * x.sum()).sum(),
        lambda x, k: (x.new([k, 1.0]) * x.sum()).sum(),
        lambda x, k: torch.sparse_coo_tensor([[0]], [k], (1,)).to_dense().sum() * x.sum(),
        lambda x, k: x.sum() / (torch.arange(3, device=k.device) < k).float().to_sparse()._nnz(),
    ],
    ids=["index", "second index", "nested index", "FloatTensor", "new", "sparse tensor", "number of entries"],
)
@pytest.mark.filterwarnings("ignore::psg.FallbackWarning", "ignore::UserWarning")
def test_values_that_are_read_unseen(read, device):
    k = torch.tensor(1, device=device)
    fn = psg.per_sample_norm(lambda w, x: read(w * x, k) ** 2)
    fast = psg.jit(fn, backend="eager")
    w, x = torch.randn(3, 3, device=device), torch.randn(4, 3, 3, device=device)
    for value in (1, 2):
        k.fill_(value)
        same(fast(w, x), fn(w, x))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_packed_sequences_of_other_lengths(device):
    def step(w, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return norms(w, pad_packed_sequence(packed, batch_first=True)[0])

    norms = psg.per_sample_norm(lambda w, x: (w * x).square().mean())
    fast = psg.jit(step, backend="eager")
    w, x = torch.randn(3, device=device), torch.randn(2, 5, 3, device=device)
    for lengths in ([5, 3], [5, 5], [2, 1]):
        same(fast(w, x, torch.tensor(lengths)), step(w, x, torch.tensor(lengths)))


def test_where_a_tensor_begins_in_memory(device):
    norms = psg.per_sample_norm(lambda w, x: (w * x).sum() ** 2)
    step = lambda w, s: norms(w, torch.as_strided(s, (3, 4), (1, 1), s.storage_offset()))  # noqa: E731
    fast = psg.jit(step, backend="eager")
    w, series = torch.randn(4, device=device), torch.randn(40, device=device)
    for start in (0, 5):
        same(fast(w, series[start : start + 6]), step(w, series[start : start + 6]))


@pytest.mark.parametrize("used", [True, False])
def test_where_what_fn_closes_over_begins_in_memory(used, device):
    flag, series = torch.nn.Parameter(torch.randn(3, device=device), requires_grad=False), torch.randn(40, device=device)
    norms = psg.per_sample_norm(lambda w, x: (w * x).sum() ** 2 * (1 + flag.storage_offset()) + (w[:3] * flag).sum() * used)
    fast = psg.jit(norms, backend="eager")
    w, x = torch.randn(4, device=device), torch.randn(3, 4, device=device)
    for start in (None, 5, 7, 5):
        if start is not None:
            flag.data = series[start : start + 3]
        same(fast(w, x), norms(w, x))


def test_the_shape_alone_of_what_fn_closes_over(device):
    queue = torch.zeros(4, device=device)
    fn = psg.per_sample_norm(lambda w, x: (w * x).sum() ** 2 / len(queue))
    fast = psg.jit(fn, backend="eager")
    w, x = torch.randn(4, device=device), torch.randn(3, 4, device=device)
    same(fast(w, x), fn(w, x))
    queue.resize_(8)
    same(fast(w, x), fn(w, x))


class Scaled(nn.Module):
    """A module with an attribute, and a buffer of which only the length is read."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.calls = nn.Linear(4, 2), 1.0, 0
        self.register_buffer("queue", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.scale / len(self.queue) * (3 if self.training else 1)


teacher = Scaled().requires_grad_(False).double()  # made before the tests' default dtype is set


class Distance:
    def __init__(self):
        self.net = teacher

    def __call__(self, output, x):
        return (output - self.net(x)).square().sum()


class Hiding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 2), [teacher]

    def forward(self, x):
        return self.linear(x) - self.kept[0](x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: psg.stateless(nn.Linear(4, 2), lambda output, x: (output - teacher(x)).square().sum()),
        lambda: psg.stateless(nn.Linear(4, 2), Distance()),
        lambda: psg.stateless(Hiding(), lambda output, x: output.square().sum()),
        lambda: (lambda w, x, _: (F.linear(x, w["w"]) - teacher(x)).square().sum(), {"w": torch.randn(2, 4)}),
    ],
    ids=["a global", "an attribute of a criterion", "in a list", "without stateless"],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda: teacher.train(not teacher.training),
        lambda: setattr(teacher, "scale", teacher.scale + 1),
        lambda: setattr(teacher, "queue", torch.zeros(len(teacher.queue) + 1)),
        lambda: setattr(teacher, "forward", lambda x: 2 * teacher.linear(x)),
    ],
    ids=["mode", "attribute", "buffer", "forward"],
)
def test_modules_are_looked_after_wherever_they_are(make, change):
    loss, params = make()
    fn = psg.per_sample_norm(loss)
    fast = psg.jit(fn, backend="eager")
    x = torch.randn(3, 4)
    try:
        for _ in range(2):
            same(fast(params, x, x), fn(params, x, x))
            before = len(fast.cache_info())
            same(fast(params, x, x), fn(params, x, x))  # fn has changed a counter meanwhile
            assert len(fast.cache_info()) == before
            change()
            same(fast(params, x, x), fn(params, x, x))
    finally:
        vars(teacher).pop("forward", None)


class Configured(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.count = nn.Linear(4, 2), 1

    def act(self, x):
        return x

    def forward(self, x):
        return self.act(self.linear(x)) * self.scale * getattr(self, "gain", 1.0) * (5 if isinstance(self.count, float) else 1)


class Other(Configured):
    def forward(self, x):
        return 7 * self.linear(x)


@pytest.mark.parametrize(
    "name, value", [("scale", 3.0), ("gain", 3.0), ("act", torch.tanh), ("count", 1.0), ("__class__", Other), ("scale", -0.0)]
)
def test_attributes_that_a_module_did_not_have(name, value):
    module = Configured()
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    fn = psg.per_sample_norm(loss)
    fast, x = psg.jit(fn, backend="eager"), torch.randn(3, 4)
    same(fast(params, x), fn(params, x))
    setattr(module, name, value)
    same(fast(params, x), fn(params, x))


class ByDict(nn.Module):
    """Reads its attributes in other ways than by their names."""

    def __init__(self):
        super().__init__()
        self.linear, self.f, self.calls, self.extra = nn.Linear(4, 2), torch.tanh, 0, {"g": 2.0}

    def __getattr__(self, name):
        return self.__dict__["extra"][name] if name == "g" else super().__getattr__(name)

    def forward(self, x):
        self.calls += 1
        vars(self)["seen"] = vars(self).get("seen", 0) + 1
        return self.__dict__["f"](self.linear(x)) * self.g * vars(self).get("h", 1.0)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name, value", [("f", torch.relu), ("extra", {"g": 3.0}), ("h", 3.0)])
def test_attributes_that_are_read_from_the_dict_of_a_module(name, value, called):
    module = ByDict()
    if called:
        module(torch.randn(3, 4))
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    fn = psg.per_sample_norm(loss)
    fast, x = psg.jit(fn, backend="eager"), torch.randn(3, 4)
    for entries in (1, 2):
        for _ in range(2):
            same(fast(params, x), fn(params, x))
        assert len(fast.cache_info()) == entries + (not called)  # the first call adds an attribute
        setattr(module, name, value)


class Listing(nn.Module):
    """Does what its containers say."""

    def __init__(self):
        super().__init__()
        self.linear, self.active, self.scales, self.signs = nn.Linear(4, 2), [True, [False]], {"x": [1.0]}, {1.0}
        self.steps, self.calls = [torch.tanh], []
        self.steps.append(self.steps)

    def forward(self, x):
        self.calls.append(x.shape)
        y = self.linear(x)
        for own in (self.active[0], self.active[1][0]):
            y = y.sigmoid() if own else y
        return self.steps[0](y) * self.scales["x"][0] * sum(self.signs)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.active.__setitem__(0, False),
        lambda module: module.active[1].__setitem__(0, True),
        lambda module: module.scales.update(x=[2.0]),
        lambda module: module.scales["x"].__setitem__(0, -0.5),
        lambda module: module.signs.add(3.0),
        lambda module: module.steps.__setitem__(0, torch.relu),
    ],
    ids=["a list", "a list in a list", "a dict", "a list in a dict", "a set", "a list of functions that holds itself"],
)
def test_what_containers_of_modules_hold(change):
    module = Listing()
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    fn = psg.per_sample_norm(loss)
    fast, x = psg.jit(fn, backend="eager"), torch.randn(3, 4)
    for _ in range(2):
        same(fast(params, x), fn(params, x))
        assert len(fast.cache_info()) == 1
    change(module)
    for _ in range(2):
        same(fast(params, x), fn(params, x))
        assert len(fast.cache_info()) == 2


class Shaping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.size = nn.Linear(4, 2), ()

    def forward(self, x):
        self.size = tuple(x.shape)
        return self.linear(x).reshape(self.size[0], 2)


class Frozen(nn.Module):
    """Keeps a part in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x):
        self.drop.eval()
        return self.linear(self.drop(x))


class Making(nn.Module):
    """Makes a module in each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return nn.Flatten(1)(self.linear(x))


@pytest.mark.parametrize("kind", [Shaping, Frozen, Making])
def test_what_a_module_writes_itself_needs_no_new_trace(kind):
    module = kind()
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    fn = psg.per_sample_norm(loss)
    fast, x = psg.jit(fn, backend="eager", check=False), torch.randn(3, 4)
    for n in range(1, 4):
        module.train()
        same(fast(params, x), fn(params, x))
        module(torch.randn(n, 4))
    assert len(fast.cache_info()) == 1


def test_a_module_that_leaves_another_mode_behind():
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            output = self.linear(x) * (3 if self.training else 1)
            self.eval()
            return output

    module = Once()
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    fn = psg.per_sample_norm(loss)
    fast, x = psg.jit(fn, backend="eager", check=False), torch.randn(3, 4)
    first = fast(params, x)
    same(fast(params, x), fn(params, x))
    module.train()
    same(fast(params, x), first)


def test_a_replaced_buffer_stays_alive_with_its_signature():
    """Otherwise its successor could lie in its place, and be taken for it."""
    module = Scaled()
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    fast = psg.jit(psg.per_sample_norm(loss), backend="eager")
    fast(params, torch.randn(3, 4))
    former = weakref.ref(module.queue)
    module.queue = torch.zeros(3)
    assert former() is not None
    fast.cache_clear()
    assert former() is None


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_backward_hooks_are_traced_anew():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    loss, params = psg.stateless(net, lambda output: output.square().sum())
    fn = psg.per_sample_grad(loss)
    fast, x = psg.jit(fn, backend="eager"), torch.randn(3, 4)
    same(fast(params, x), fn(params, x))
    net[2].register_full_backward_hook(lambda module, given, cotangent: (2 * given[0],))
    same(fast(params, x), fn(params, x))


def test_states_that_change_at_every_call_run_eagerly_at_last():
    module = Scaled()
    loss, params = psg.stateless(module, lambda output: output.square().sum())
    fn = psg.per_sample_norm(loss)
    fast, x = psg.jit(fn, backend="eager"), torch.randn(3, 4)
    with pytest.warns(psg.FallbackWarning, match=r"compiled 16 times for .*Pass what changes as an argument"):
        for step in range(20):
            module.scale = 1.0 + step
            same(fast(params, x), fn(params, x))
    assert len(fast.cache_info()) == 16


class Tripled(torch.Tensor):
    """A tensor with a sine of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
        return 3 * output if func is torch.Tensor.sin else output


class Level(int):
    def __repr__(self):
        return "Level"


@pytest.mark.parametrize("one, another", [(torch.ones(4), torch.ones(4).as_subclass(Tripled)), (Level(2), Level(4))])
def test_arguments_that_look_alike(one, another):
    norms = psg.per_sample_norm(lambda w, x: (w * x).sum() ** 2)
    fn = lambda w, x, k: norms(w, x) * (k.sin() if isinstance(k, torch.Tensor) else k)  # noqa: E731
    fast = psg.jit(fn, backend="eager")
    w, x = torch.randn(4), torch.randn(4, 4)
    for given in (one, another):
        same(fast(w, x, given), fn(w, x, given))


def test_a_plain_function_may_ask_for_the_mode():
    fn = lambda x: x * (2 if torch.is_grad_enabled() else 1) * (5 if torch.is_inference_mode_enabled() else 1)  # noqa: E731
    fast, x = psg.jit(fn, backend="eager"), torch.ones(3)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            same(fast(x), fn(x))


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize(
    "distribution",
    [
        lambda w, s: torch.distributions.Normal(w, s.exp()),
        lambda w, s: torch.distributions.Normal(w, s.exp(), validate_args=True),
        lambda w, s: torch.distributions.MultivariateNormal(w, torch.outer(s, s) + torch.eye(2, device=w.device)),
    ],
    ids=["of numbers", "validated", "of vectors"],
)
def test_distributions_are_traced(distribution, device):
    def fn(p, x, y):
        return -distribution(p["w"] @ x, p["s"]).log_prob(y).sum()

    params = {"w": torch.randn(2, 3, device=device), "s": torch.zeros(2, device=device)}
    x, y = torch.randn(N, 3, device=device), torch.randn(N, 2, device=device)
    fast = psg.jit(psg.per_sample_norm(fn), backend="eager")
    for scale in (1, 2):
        same(fast(params, scale * x, y), psg.per_sample_norm(fn)(params, scale * x, y))
    assert [entry.error for entry in fast.cache_info()] == [None]


@pytest.mark.filterwarnings("error::psg.FallbackWarning")
@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("where", ["parameters", "samples", "samples side by side"])
def test_tensors_without_entries_are_traced(where, n, device):
    """A model may have no register tokens, and a sample no neighbours; a batch without samples is not worth a trace."""

    def fn(p, x):
        return (torch.cat([p["registers"][0], p["w"]]) @ x).sin().sum() + p["w"].sum()

    sizes = {"parameters": (1, 0, 4), "samples": (1, 1, 4), "samples side by side": (1, 2, 4)}[where]
    params = {"registers": torch.randn(sizes, device=device), "w": torch.randn(2, 4, device=device)}
    x = torch.randn((n, 4, 0) if where == "samples" else (4, n) if where == "samples side by side" else (n, 4), device=device)
    norms = psg.per_sample_norm(fn, in_dims=(None, int(where == "samples side by side")))
    fast = psg.jit(norms, backend="eager")
    same(fast(params, x), norms(params, x))
    assert [entry.error for entry in fast.cache_info()] == [None] * (n > 0 or where == "samples side by side")


def test_anomaly_detection_runs_eagerly():
    """A trace under it would fail, and the failure would outlast it."""
    fast = psg.jit(psg.per_sample_norm(lambda w, x: torch.tanh(w @ x).sum()), backend="eager")
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly(check_nan=True):
            found = fast(w, x)
    assert fast.cache_info() == []
    assert_trees_close(fast(w, x), found)
    assert [entry.error for entry in fast.cache_info()] == [None]


def test_what_a_traced_module_leaves_in_its_attributes(device):
    """The tensor that takes the place of a pruned weight could not be made under a tracer."""
    module = prune.l1_unstructured(nn.Linear(3, 3), "weight", amount=4).to(device)
    loss, params = psg.stateless(module, F.mse_loss)
    fn = psg.clipped_grad(loss, 1.0)
    fast, x = psg.jit(fn, backend="eager"), torch.randn(5, 3, device=device)
    for _ in range(2):
        same(fast(params, x, x.sin()), fn(params, x, x.sin()))
    assert [entry.error for entry in fast.cache_info()] == [None]


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::psg.FallbackWarning")
def test_a_traced_module_that_writes_into_a_view():
    """Autograd sets the view's hooks under a lock, for which a look at its history waited for ever."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            h = self.linear(x)
            h[:, 1:].add_(x[:, 1:])
            return h

    loss, params = psg.stateless(torch.jit.trace(Shifted(), torch.randn(1, 3)), lambda output: output.square().sum())
    x = torch.randn(4, 3)
    found = psg.jit(psg.per_sample_norm(loss), backend="eager")(params, x)
    assert_trees_close(found, psg.per_sample_norm(loss, method="loop")(params, x))


def test_the_list_of_traces_can_be_read_while_others_are_added(hasty_threads):
    fast = psg.jit(psg.per_sample_norm(lambda w, x: (w * x).sum()), backend="eager")
    failures, done = [], threading.Event()

    def read():
        while not done.is_set():
            try:
                fast.cache_info()
            except RuntimeError as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(1, 40):
        fast(torch.ones(3), torch.ones(n, 3))
    done.set()
    reader.join()
    assert not failures and len(fast.cache_info()) == 39


# --- what a trace depends on -----------------------------------------------------------------------------------


def power(w, x):
    return (w * x).sum() ** 2


def both(fn, *args):
    """A function and its trace."""
    return fn, psg.jit(fn, backend="eager", **(args[0] if args else {}))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.type = nn.Linear(4, 2), "mean"  # a module's own method has this name

    def forward(self, x):
        x = self.linear(x)
        return x.mean() if self.type == "mean" else x.amax()


@pytest.mark.parametrize(
    "held, path",
    [
        ({"a": {"b": {"c": {"d": 1.0}}}}, "abcd"),
        ([[[[[1.0]]]]], (0, 0, 0, 0, 0)),
        (collections.OrderedDict(a=1.0), "a"),
        (collections.defaultdict(float, a=[1.0]), ("a", 0)),
        (collections.deque([1.0]), (0,)),
    ],
    ids=["dicts", "lists", "OrderedDict", "defaultdict", "deque"],
)
def test_entries_of_containers_that_a_module_holds(held, path, device):
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.held = nn.Linear(2, 2), copy.deepcopy(held)

        def forward(self, x):
            return self.layer(x) * functools.reduce(operator.getitem, path, self.held)

    model, x = Holding().to(device), torch.randn(3, 2, device=device)
    loss, params = psg.stateless(model, lambda output: output.square().sum())
    fast, slow = psg.jit(psg.per_sample_norm(loss), backend="eager"), psg.per_sample_norm(loss)
    for value in (1.0, 3.0):
        functools.reduce(operator.getitem, path[:-1], model.held)[path[-1]] = value
        assert_trees_close(fast(params, x), slow(params, x), per_sample=False)


def test_an_attribute_that_is_named_like_a_method_of_modules(device):
    module, x = Pooled().to(device), torch.randn(3, 4, device=device)
    loss, params = psg.stateless(module, lambda output: output**2)
    fn, fast = both(psg.per_sample_norm(loss))
    for kind in ("mean", "max", "mean"):
        module.type = kind
        same(fast(params, x), fn(params, x))
    assert len(fast.cache_info()) == 2


def test_assigning_the_data_of_a_tensor_of_its_own(device):
    norms = psg.per_sample_norm(power)

    def assigned(w, x):
        z = torch.zeros(4, device=device)
        z.data = x[0] * 2
        return norms(w * z, x)

    fn, fast = both(assigned)
    w, x = torch.ones(4, device=device), torch.randn(3, 4, device=device)
    with pytest.warns(psg.FallbackWarning, match="assigns the data or the gradient"):
        fast(torch.zeros_like(w), x)  # where the assignment makes no difference
    same(fast(w, x), fn(w, x))


@pytest.mark.parametrize("name", ["data", "grad"])
def test_assigning_the_data_or_the_gradient_of_a_closed_over_tensor(name, device):
    norms, held = psg.per_sample_norm(power), torch.zeros(3, device=device)

    def step(w, x):
        found = norms(w, x)
        setattr(held, name, held + found)
        return found

    with pytest.raises(psg.StateError, match="writes into .* closes over .it assigns the data"):
        psg.jit(step, backend="eager")(torch.ones(4, device=device), torch.ones(3, 4, device=device))
    assert not held.any() and held.grad is None


@pytest.mark.parametrize(
    "read",
    [
        lambda held, x: torch.ones(1, device=x.device).expand_as(held).sum(),
        lambda held, x: torch.broadcast_tensors(torch.ones(1, device=x.device), held)[0].sum(),
        lambda held, x: torch.numel(held),
    ],
)
def test_the_shape_of_a_closed_over_tensor_however_it_is_read(read, device):
    held, w, x = torch.zeros(2, 1, device=device), torch.ones(4, device=device), torch.randn(3, 4, device=device)
    fn, fast = both(psg.per_sample_norm(lambda w, x: power(w, x) * read(held, x)))
    same(fast(w, x), fn(w, x))
    held.resize_(5, 1)
    same(fast(w, x), fn(w, x))


def test_the_dtype_of_a_closed_over_tensor_however_it_is_read(device):
    held, norms = nn.Linear(2, 2, device=device), psg.per_sample_norm(power)
    fn, fast = both(lambda w, x: norms(w, x).to(held.weight))
    w, x = torch.ones(4, device=device), torch.randn(3, 4, device=device)
    for dtype in (torch.float64, torch.float32):
        held.to(dtype)
        assert fast(w, x).dtype == dtype


def test_traced_while_parametrised_weights_are_cached(device):
    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

    frozen = nn.Linear(4, 4, device=device).requires_grad_(False)
    nn.utils.parametrize.register_parametrization(frozen, "weight", Double())
    fn, fast = both(psg.per_sample_norm(lambda w, x: frozen(w * x).square().sum()))
    w, x = torch.ones(4, device=device), torch.randn(3, 4, device=device)
    with nn.utils.parametrize.cached():
        frozen(x)
        fast(w, x)
    frozen.parametrizations.weight.original.mul_(3)
    same(fast(w, x), fn(w, x))


def test_factors_of_a_function_that_learns_from_its_first_pass(device, monkeypatch):
    """A trace that meets constants is made twice; the second time psg knows more of the function, and makes another kind of factor."""
    monkeypatch.undo()  # where all sizes count as large, there is nothing to learn
    constant = torch.randn(3, 4, device=device)

    def fn(p, x):
        return (p * constant).sum() * x.sum()

    p, x = torch.randn(3, 4, device=device), torch.randn(5, 2, device=device)
    fast = psg.jit(psg.factored_grad(fn), backend="eager", check=False)
    assert_trees_close(psg.tree.materialize(fast(p, x)), loop_grad(fn)(p, x))
    assert [entry.error for entry in fast.cache_info()] == [None]


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")  # the loop's
def test_seeds_are_seen_without_a_check(device):
    def fn(p, x):
        numbers = torch.randn(3, generator=torch.Generator(device).manual_seed(3), device=device)
        return ((x * p).tanh() * numbers).sum()

    p, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    slow = loop_grad(fn)(p, x)
    with pytest.warns(psg.FallbackWarning, match="seeds or makes a random generator"):
        fast = psg.jit(psg.per_sample_grad(fn), backend="eager", check=False)
        for _ in range(3):
            assert_trees_close(fast(p, x), slow)


def test_the_callers_hooks_on_saved_tensors(device):
    fn, fast = both(psg.per_sample_grad(lambda w, x: (x @ w).tanh().square().sum()))
    w, x = torch.randn(4, 4, device=device), torch.randn(3, 4, device=device)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t if t.is_floating_point() else t, lambda t: t):
            same(fast(w, x), fn(w, x))
        same(fast(w, x), fn(w, x))


def test_whether_a_closed_over_tensor_requires_grad(device):
    held = nn.Linear(4, 4, device=device)
    fn, fast = both(psg.per_sample_value_and_grad(lambda w, x: power(w, x) + sum(p.sum() for p in held.parameters() if p.requires_grad)))
    w, x = torch.ones(4, device=device), torch.randn(3, 4, device=device)
    with torch.no_grad():
        for wanted in (True, False, True):
            held.weight.requires_grad_(wanted)
            same(fast(w, x), fn(w, x))


def test_keys_that_are_equal_and_differ(device):
    w, x = torch.ones(4, device=device), torch.randn(3, 4, device=device)
    setting = {"key": 1}

    def fn(w, x):
        return power(w, x) * (1.5 if isinstance(setting["key"], int) else 0.5)

    fn.cache_key = lambda: setting["key"]
    fn, fast = both(psg.per_sample_norm(fn))
    for setting["key"] in (1, 1.0, 1):
        same(fast(w, x), fn(w, x))
    norms = psg.per_sample_norm(power)
    fn, fast = both(lambda w, x, r: norms(w, x) * r.stop)
    for numbers in (range(0, 3, 2), range(0, 4, 2)):
        same(fast(w, x, numbers), fn(w, x, numbers))
    fn, fast = both(lambda w, x, d: norms(w, x) * (2 if type(next(iter(d))) is bool else 1))
    for key in (1, True):
        same(fast(w, x, {key: x}), fn(w, x, {key: x}))


def test_a_closed_over_tensor_that_is_marked_as_negated(device):
    seen = []

    def backend(graph, inputs):
        def run(*tensors):
            seen.extend(tensor.is_neg() or tensor.is_conj() for tensor in tensors)
            return graph(*tensors)

        return run

    held = torch.randn(4, dtype=torch.complex128, device=device).conj().imag
    assert held.is_neg()
    fn = psg.per_sample_norm(lambda w, x: (w * x * held).exp().sum())
    w, x = torch.ones(4, device=device), torch.randn(3, 4, device=device)
    same(psg.jit(fn, backend=backend)(w, x), fn(w, x))
    assert seen and not any(seen)


@pytest.mark.parametrize("options", [{"chunk_size": 2}, {"method": "loop"}])
def test_parts_of_a_call_that_draw_the_same(options, device):
    fn = psg.per_sample_grad(lambda w, x: F.dropout(w * x, 0.5).sum(), randomness="same", **options)
    fast = psg.jit(fn, backend="eager", check=False)
    with pytest.warns(psg.FallbackWarning, match='randomness="same" for a call that is run in parts'):
        out = fast(torch.ones(16, device=device), torch.ones(4, 16, device=device))
    assert len(out.unique(dim=0)) == 1


def _filled(w, x):
    h = (x @ w).T * 1
    h.masked_fill_(h > 1, 0.0)
    return h.T.reshape(-1).square().sum()


def _written_through_a_view(w, x):
    h = (x @ w).T * 1
    view = h.T.view(-1)
    view[2:5] = 0
    return h.square().sum() + view.sum()


def _viewed_before_the_write(w, x):
    h = (x @ w) * 1
    view = h.view(-1)
    h.masked_fill_(h > 1, 0.0)
    return view.pow(3).sum()


@pytest.mark.parametrize(
    "fn",
    [lambda w, x: F.linear(x, F.normalize(w.T, dim=1).T).square().sum(), _filled, _written_through_a_view, _viewed_before_the_write],
    ids=["normalize", "filled", "through a view", "before the write"],
)
def test_writes_into_tensors_in_another_layout(fn, device):
    """Made functional, such a write gives a contiguous tensor, which later views did not fit."""
    w, x = torch.randn(6, 6, device=device), torch.randn(4, 5, 6, device=device)
    for transform in (psg.per_sample_grad(fn), lambda w, x: psg.clipped_grad(fn, 1.0)(w, x).grads):
        assert_trees_close(psg.jit(transform, backend="eager", check=False)(w, x), transform(w, x))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "weight", [lambda w: w - w.mean(0), lambda w: w.softmax(0), lambda w: F.normalize(w, dim=0)], ids=["centred", "softmax", "unit"]
)
@pytest.mark.parametrize("shape", [(3, 4), (64, 96)])
def test_norms_of_gradients_whose_terms_cancel_are_no_error_of_the_compiler(shape, weight, device):
    """A trace cannot ask where terms cancel, and raises such norms; of small gradients, which it forms, they are exact."""
    norms = psg.per_sample_norm(lambda w, x: F.linear(x, weight(w)).square().sum())
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        w, x = (torch.randn(size, generator=generator, dtype=torch.float32) for size in (shape, (16, 6, shape[1])))
        w, x = w.to(device), (10 + 0.1 * x).to(device)
        found, expected = psg.jit(norms, backend="eager")(w, x), norms(w, x)
        if shape == (3, 4):
            assert_trees_close(found, expected)
        assert (found >= expected * (1 - 1e-3)).all() and (found <= 2 * expected).all()
