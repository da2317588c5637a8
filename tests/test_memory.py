"""Chunks under a budget of bytes, and pages that a process keeps."""

import contextlib
import gc
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.overrides import get_overridable_functions, handle_torch_function, has_torch_function

import psg
from psg._capture import _backward
from psg._hardware import _memory
from psg._ladder import _chunks, _ladder
from psg._torch import _functorch
from psg._torch._cached import cached
from psg.testing import assert_trees_close


@pytest.fixture
def problem(device):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).to(device)
    loss, params = psg.stateless(model, F.cross_entropy)
    return loss, params, (torch.randn(20, 1, 8, 8, device=device), torch.randint(3, (20,), device=device))


def chunks_of(monkeypatch):
    """The sizes of the chunks that calls are split into from now on."""
    sizes = []
    run = _ladder.run

    def counting(call, method):
        sizes.append(call.n)
        return run(call, method)

    monkeypatch.setattr(_ladder, "run", counting)
    return sizes


@pytest.mark.parametrize("transform", [psg.per_sample_grad, psg.per_sample_norm, partial(psg.clipped_grad, clip_norm=1.0)])
def test_what_a_chunk_holds_is_let_go_of_before_the_next(transform, problem, monkeypatch):
    loss, params, batch = problem
    held, run = [], _ladder.run

    def watched(call, method):
        assert not any(factor() for factor in held)
        result = run(call, method)
        held.extend(map(weakref.ref, result.factors))
        return result

    monkeypatch.setattr(_ladder, "run", watched)
    transform(loss, chunk_size=5)(params, *batch)
    assert len(held) == 4 * len(params)


@pytest.mark.parametrize("chunk_size", ["auto", "64 KiB", "1 B", "1.5 GB"])
def test_a_budget_changes_no_result(chunk_size, problem):
    loss, params, batch = problem
    for transform in (psg.per_sample_grad, psg.per_sample_norm, psg.per_sample_value_and_grad):
        assert_trees_close(transform(loss, chunk_size=chunk_size)(params, *batch), transform(loss)(params, *batch), per_sample=False)
    whole, parts = (psg.clipped_grad(loss, 0.5, chunk_size=size)(params, *batch) for size in (None, chunk_size))
    assert_trees_close(parts.grads, whole.grads, per_sample=False)
    assert_trees_close((parts.norms, parts.clip_coef, parts.values), (whole.norms, whole.clip_coef, whole.values))
    factored = psg.factored_grad(loss, chunk_size=chunk_size)(params, *batch)
    assert_trees_close(psg.tree.materialize(factored), psg.per_sample_grad(loss)(params, *batch))


@pytest.mark.parametrize(
    "transform",
    [
        psg.per_sample_grad,
        psg.per_sample_value_and_grad,
        psg.per_sample_norm,
        psg.factored_grad,
        lambda fn, **o: psg.clipped_grad(fn, 1.0, **o),
    ],
    ids=["grad", "value_and_grad", "norm", "factored", "clipped"],
)
def test_a_sample_is_measured_once(transform, problem, monkeypatch):
    loss, params, batch = problem
    sizes = chunks_of(monkeypatch)
    fn = transform(loss, chunk_size="1 GiB")
    fn(params, *batch)
    fn(params, *batch)
    assert sizes == [1, 19, 20]


def test_chunks_follow_the_budget(problem, monkeypatch):
    loss, params, batch = problem
    sizes = chunks_of(monkeypatch)
    fn = psg.per_sample_norm(loss, chunk_size="1 B")
    fn(params, *batch)
    assert sizes == [1] * 20
    sizes.clear()
    fn = psg.per_sample_norm(loss, chunk_size="1 GiB")
    fn(params, *batch)
    assert sizes == [1, 19]  # the first sample is measured
    sizes.clear()
    fn(params, *batch)
    assert sizes == [20]
    sizes.clear()
    medium = psg.per_sample_norm(loss, chunk_size="100 KiB")
    medium(params, *batch)
    middle = sizes[1]
    assert 1 < middle < 19 and sizes == [1, *[middle] * (19 // middle), *[19 % middle] * (19 % middle > 0)]
    sizes.clear()
    psg.per_sample_grad(loss, chunk_size="100 KiB")(params, *batch)
    assert sizes[1] < middle  # materialised gradients take memory too


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["last chunk", "first chunk"])
@pytest.mark.parametrize("method", ["loop", "vmap"])
def test_chunks_of_which_some_have_a_history(order, method, device):
    # Only some samples' gradients depend on the parameter.
    def fn(w, x):
        return (w * x).sum() ** 2 if method == "vmap" or x[0] > 0 else (w.detach() * x).sum()

    w = torch.randn(3, device=device)
    x = torch.tensor([[-1.0, 1.0, 2.0], [-2.0, 0.0, 1.0], [1.0, 2.0, 3.0], [3.0, 1.0, 1.0]], device=device)[torch.arange(4).tolist()[order]]
    for transform in (psg.per_sample_grad, psg.per_sample_norm):
        slopes = [
            torch.autograd.grad(transform(fn, method=method, chunk_size=size)(v, x).sum(), v)[0]
            for size in (None, 2)
            for v in [w.clone().requires_grad_()]
        ]
        assert_trees_close(slopes[1], slopes[0], per_sample=False)


def test_a_budget_under_transforms(device):
    loss, w, x = lambda w, x: (w * x).sum() ** 2, torch.randn(2, 3, device=device), torch.randn(40, 3, device=device)
    whole, parts = (psg.per_sample_norm(loss, chunk_size=size) for size in (None, "100 B"))
    for outer in (lambda f: torch.func.vmap(f, (0, None))(w, x), lambda f: torch.func.grad(lambda w: f(w, x).sum())(w[0])):
        assert_trees_close(outer(parts), outer(whole), per_sample=False)
    assert_trees_close(psg.jit(parts, backend="eager")(w[0], x), whole(w[0], x))


@pytest.mark.parametrize("wrong", ["", "many", "12", "0 MiB", "-1 MiB", "1 XB"])
def test_a_size_that_names_none(wrong, problem):
    with pytest.raises(psg.InputError, match="chunk_size="):
        psg.per_sample_grad(problem[0], chunk_size=wrong)


@pytest.mark.parametrize(
    "text, expected", [("1 B", 1), ("2kb", 2000), ("1.5 KiB", 1536), ("3 MiB", 3 << 20), ("2GB", 2 * 10**9), ("auto", None)]
)
def test_sizes(text, expected):
    assert _memory.parse(text) == expected


def test_the_budget_of_auto_is_a_part_of_what_is_free(device):
    assert 0 < _memory.budget("auto", device) < 1 << 46
    assert _memory.budget("3 MiB", device) == 3 << 20


FAULTS = """
import resource, torch, psg
def step():
    return [torch.ones(10 << 20) for _ in range(2)]  # beyond 32 MiB malloc always asks the system
def faults():
    for _ in range(6):  # the heap may still grow where small things lie between the large ones
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fresh = faults()
small, factor = (psg.factors.Outer(torch.ones(n, 64, 64), torch.ones(n, 64, 64)) for n in (4, 256))
assert "kept" in small.plan()
plan = factor.plan()
assert not psg._hardware._memory.pages_are_kept()
kept = psg.keep_pages()
assert psg._hardware._memory.pages_are_kept() == kept
print(int(kept), fresh, faults(), plan, factor.plan(), sep=";")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another malloc")
def test_pages_are_kept():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    kept, fresh, reused, before, after = done.stdout.strip().split(";")
    if not int(kept):
        pytest.skip("a C library without mallopt")
    assert int(fresh) > 4 * int(reused)
    assert "kept" in after and "kept" not in before


def computed(kind):
    if kind == "weight norm":
        return nn.Sequential(weight_norm(nn.Conv2d(3, 8, 3)), nn.Flatten(), weight_norm(nn.Linear(8 * 16, 4)))
    return nn.Sequential(nn.GroupNorm(1, 3), nn.Flatten(), spectral_norm(nn.Linear(3 * 36, 4))).eval()


def left_in_cycles(fn, *args):
    """Shapes of the tensors that a second call leaves in reference cycles, where they hold memory until the garbage collector runs."""
    fn(*args)
    while gc.collect():
        pass  # what finalizers of an earlier test's garbage keep alive is found by the next collection
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        fn(*args)
        gc.collect()
        return [held.shape for held in gc.garbage if isinstance(held, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.fixture
def cleared(monkeypatch):
    """The addresses of the tensors that C's memset clears, of any size."""
    monkeypatch.setattr(_memory, "_kept", True)
    monkeypatch.setattr(_memory, "_LARGE", 1)
    monkeypatch.setattr(_memory, "is_amd", lambda: True)
    addresses, memset = [], _memory.ctypes.memset
    monkeypatch.setattr(_memory.ctypes, "memset", lambda *args: addresses.append(args[0]) or memset(*args))
    return addresses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0, 2), (2, 3, 1, 2)])
def test_zeros_by_memset(dtype, shape, cleared):
    like = torch.ones(2, dtype=dtype).requires_grad_(dtype.is_floating_point)
    found = _memory.new_zeros(like, *shape)
    assert cleared == ([found.data_ptr()] if found.numel() else [])
    torch.testing.assert_close(found, like.new_zeros(shape), rtol=0, atol=0)
    assert found.stride() == like.new_zeros(shape).stride() and not found.requires_grad


def test_zeros_that_memset_cannot_clear(cleared, monkeypatch):
    class Own(torch.Tensor):
        pass

    assert type(_memory.new_zeros(torch.ones(2).as_subclass(Own), 3)) is Own
    assert _memory.new_zeros(torch.ones(2, device="meta"), 3).shape == (3,)
    with FakeTensorMode():
        assert _memory.new_zeros(torch.ones(2), 3).shape == (3,)
    torch.testing.assert_close(torch.func.vmap(lambda x: _memory.new_zeros(x, 3))(torch.ones(2, 4)), torch.zeros(2, 3))
    monkeypatch.setattr(_memory, "_LARGE", 1 << 10)
    _memory.new_zeros(torch.ones(2), 3)
    monkeypatch.setattr(_memory, "_kept", False)
    _memory.new_zeros(torch.ones(2), 1 << 10)
    assert not cleared


def test_tables_parts_and_unused_parameters_in_zeros_by_memset(cleared):
    params = {"table": torch.randn(9, 4), "stack": torch.randn(3, 4, 4), "unused": torch.randn(2)}
    ids = torch.randint(9, (5, 3))

    def fn(p, ids):
        return torch.tanh(F.embedding(ids, p["table"]).sum(0) @ p["stack"][1]).square().sum()

    psg.check(fn)(params, ids)
    assert cleared
    compiled = torch.compile(psg.per_sample_grad(fn), backend="eager")(params, ids)
    assert_trees_close(compiled, psg.per_sample_grad(fn, method="loop")(params, ids))
    assert_trees_close(psg.jit(psg.per_sample_grad(fn), backend="eager")(params, ids), compiled)


@pytest.mark.parametrize("kind", ["weight norm", "spectral norm"])
@pytest.mark.parametrize("transform", [psg.per_sample_grad, psg.per_sample_norm, partial(psg.clipped_grad, clip_norm=1.0)])
def test_nothing_is_left_in_cycles(transform, kind, device):
    loss, params = psg.stateless(computed(kind).to(device), F.cross_entropy)
    x, y = torch.randn(6, 3, 6, 6, device=device), torch.randint(4, (6,), device=device)
    assert not left_in_cycles(transform(loss), params, x, y)


def differentiates(params, x):
    loss = F.linear(x, params).square().sum()
    return torch.autograd.grad(loss, params, create_graph=True)[0].square().sum()  # the first pass fails, in every call


def penalty_that_fails(params, x):
    x.requires_grad_()
    slope = torch.autograd.grad(F.linear(x, params).square().sum(), x, create_graph=True)[0]
    raise ValueError(f"a penalty of shape {tuple(slope.shape)}")


@pytest.mark.parametrize("fn", [differentiates, penalty_that_fails])
def test_passes_that_fail_leave_nothing(fn, device):
    def tensors_after_a_call():
        with contextlib.suppress(ValueError):
            psg.per_sample_grad(fn)(torch.randn(3, 4, device=device), torch.randn(5, 4, device=device))
        gc.collect()
        return sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects())

    tensors_after_a_call()
    assert len({tensors_after_a_call() for _ in range(3)}) == 1


def test_layers_that_the_loss_does_not_depend_on_are_freed_at_once(device, monkeypatch):
    """Their cotangents, waited for by hooks, never arrive."""
    monkeypatch.setattr(_backward, "LARGE", 1)
    inputs = []

    def fn(params, x):
        hidden = F.linear(x, params["first"])
        inputs.append(weakref.ref(_functorch.bare(hidden)))
        return hidden.square().sum() + F.linear(hidden, params["second"]).detach().sum()

    params = {name: torch.randn(4, 4, device=device) for name in ("first", "second")}
    gc.collect()
    gc.disable()
    try:
        psg.clipped_grad(fn, 1.0)(params, torch.randn(3, 8, 4, device=device))
        assert len(inputs) == 1 and inputs[0]() is None
    finally:
        gc.enable()


def test_chunks_of_different_dtypes_are_joined_in_the_wider(device):
    parts = [torch.randn(2, 3, device=device, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32)]
    collector = _chunks.RowCollector(6)
    for k, part in enumerate(parts):
        collector.add(2 * k, [part])
    assert_trees_close(collector.result(), [torch.cat(parts)])


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("apart", [lambda x: x.sum() > 0, lambda x: x.sum().item() > 0], ids=["two ways", "a number each"])
def test_nothing_is_left_in_cycles_by_samples_that_go_apart(apart, device):
    def fn(w, x):
        return (w @ x).sum() if apart(x) else (w @ x).sin().sum()

    assert not left_in_cycles(psg.clipped_grad(fn, 1.0), torch.randn(4, 3, device=device), torch.randn(6, 3, device=device))


def defined_function(large):
    class Scaled(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(a):
            return a * len(large)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent * len(large)

    return Scaled, Scaled.apply


def defined_primitive(large):
    @psg.primitive
    def scaled(a):
        return a * len(large)

    return scaled, scaled


def defined_op(large):
    def scaled(a):
        return handle_torch_function(scaled, (a,), a) if has_torch_function((a,)) else a * len(large)

    return scaled, scaled


def defined_subclass(large):
    class Own(torch.Tensor):
        def large(self):
            return large

    return Own, lambda a: a.as_subclass(Own).exp().as_subclass(torch.Tensor)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")  # not all of these can be traced
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("define", [defined_function, defined_primitive, defined_op, defined_subclass])
def test_what_fn_defines_in_each_call_is_freed(define, method, compiled, device):
    """Tables of what is known of functions must not keep them, nor the tensors in their closures."""
    made = []

    def fn(w, x):
        large = torch.ones(3, device=device)
        kept, run = define(large)
        made.extend(map(weakref.ref, (large, kept)))
        return run(w * x).sum()

    transform = psg.per_sample_norm(fn, method=method)
    transform = psg.jit(transform, backend="eager") if compiled else transform
    transform(torch.ones(3, device=device), torch.randn(4, 3, device=device))
    del transform  # a trace keeps the tensors that fn has made
    gc.collect()
    assert made and not any(reference() for reference in made)


def test_classes_of_leaves_of_aux_are_freed(device):
    made = []

    def fn(w, x):
        class Own:
            pass

        made.append(weakref.ref(Own))
        return (w * x).sum(), Own()

    psg.per_sample_norm(fn, has_aux=True)(torch.ones(3, device=device), torch.randn(4, 3, device=device))
    gc.collect()
    assert made and not any(reference() for reference in made)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_an_object_that_keeps_a_transform_of_its_method_is_freed(compiled, device):
    class Trainer:
        def __init__(self):
            self.scale = torch.ones(3, device=device)
            self.norms = psg.per_sample_norm(self.loss)
            if compiled:
                self.norms = psg.jit(self.norms, backend="eager")

        def loss(self, w, x):
            return (self.scale * w * x).sum()

    trainer = Trainer()
    trainer.norms(torch.ones(3, device=device), torch.randn(4, 3, device=device))
    freed = weakref.ref(trainer), weakref.ref(trainer.norms), weakref.ref(trainer.scale)
    del trainer
    gc.collect()
    assert not any(reference() for reference in freed)


def test_a_module_that_keeps_its_stateless_loss_is_freed(device):
    module = nn.Linear(2, 1).to(device)
    module.loss, params = psg.stateless(module, lambda output: output.sum())
    psg.clipped_grad(module.loss, 1.0)(params, torch.ones(3, 2, device=device), mask=torch.ones(3, dtype=torch.bool, device=device))
    freed = weakref.ref(module)
    del module, params
    gc.collect()
    assert freed() is None


def test_what_is_known_of_functions_is_asked_once():
    asked = []
    known = cached(lambda func: asked.append(func) or func)
    permanent = [func for functions in get_overridable_functions().values() for func in functions if not isinstance(func, type)]
    permanent += [torch._functorch.autograd_function.custom_function_call, torch.ops.aten.add, torch.ops.aten.add.Tensor]
    permanent = [func for func in permanent if not isinstance(getattr(func, "__self__", None), property)]
    assert all(known(func) == func for _ in range(2) for func in permanent)
    assert len(asked) == len(set(permanent))

    times = []
    named = cached(lambda func: times.append(1) or func.__name__)
    (_, first), (_, second) = map(defined_primitive, (None, None))
    assert [named(op) for op in (first, first, second, second)] == ["scaled"] * 4 and len(times) == 2
    bound = [torch.ones(3).add, torch.ones(3).__len__, partial(torch.add).__call__]  # made anew by each access
    assert [named(func) for func in bound for _ in range(2)] == ["add"] * 2 + ["__len__"] * 2 + ["__call__"] * 2
