"""Frozen weights of classes that handle ops themselves, as libraries for quantisation make them, beside trained adapters."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import psg
from psg.rules import libraries
from psg.testing import assert_trees_close, loop_grad

pytestmark = pytest.mark.filterwarnings("error::psg.FallbackWarning")


class Wrapped(torch.Tensor):
    """Eight bits and a scale for each row, with a linear layer of its own; a tensor without numbers of its own, as torchao's are."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight):
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.numbers = (weight / self.scale).round().to(torch.int8)

    def dequantise(self):
        return self.numbers * self.scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.dequantise(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a quantised weight")


class Activations(Wrapped):
    """The same, with activations rounded too, in the largest one's units: of all activations of a batch, were they in one call."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            step = x.detach().abs().amax() / 7
            return F.linear(x + ((x / step).round() * step - x).detach(), weight.dequantise(), *bias)
        return super().__torch_function__(func, types, args, kwargs)


class Product(torch.autograd.Function):
    """Of data and a frozen weight, whose numbers the forward and the backward pass restore, as bitsandbytes' does."""

    @staticmethod
    def forward(ctx, x, packed, state):
        ctx.state, ctx.tensors = state, (None, packed)
        return torch.ops.psg_tests.rows(x, packed, state.scale)

    @staticmethod
    def backward(ctx, cotangent):
        _, packed = ctx.tensors
        return cotangent @ (packed.t().t() * ctx.state.scale), None, None


@torch.library.custom_op("psg_tests::rows", mutates_args=())
def rows(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    calls.append(len(x))
    return x @ (packed * scale).T


calls = []


class Packed(nn.Parameter):
    """A parameter that keeps its class, and its state, through views, as bitsandbytes' does."""

    @staticmethod
    def of(weight):
        scale = weight.abs().amax(1, keepdim=True) / 7
        packed = torch.Tensor._make_subclass(Packed, (weight / scale).round().to(torch.int8), False)
        packed.state = State(scale)
        return packed

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class State:
    def __init__(self, scale):
        self.scale = scale


class PackedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = Packed.of(weight)

    def forward(self, x):
        return Product.apply(x, self.weight, self.weight.state)


class Adapted(nn.Module):
    """A frozen linear layer, and a low-rank update that is trained."""

    def __init__(self, inputs, outputs, kind, bias):
        super().__init__()
        weight = torch.randn(outputs, inputs) / inputs**0.5
        if kind is Packed:
            self.base = PackedLinear(weight)
        else:
            self.base = nn.Linear(inputs, outputs, bias=bias)
            self.base.weight = nn.Parameter(kind(weight), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@given(
    kind=st.sampled_from([Wrapped, Activations, Packed]),
    known=st.booleans(),
    bias=st.booleans(),
    n=st.integers(0, 4),
    t=st.sampled_from([(), (1,), (3,)]),
    sizes=st.tuples(*[st.integers(1, 5)] * 3),
)
def test_equals_the_loop(kind, known, bias, n, t, sizes, device):
    i, h, o = sizes
    model = nn.Sequential(Adapted(i, h, kind, bias), nn.Tanh(), Adapted(h, o, kind, bias)).to(device)
    loss, params = psg.stateless(model, lambda output: output.sin().square().sum())
    x = torch.randn(n, *t, i, device=device)
    with pytest.MonkeyPatch.context() as patch:
        if known:
            patch.setattr(libraries, "_PRODUCTS", {"psg_tests::rows"})
        assert_trees_close(psg.per_sample_grad(loss, method="capture")(params, x), loop_grad(loss)(params, x))


def test_a_product_that_psg_knows_runs_once_for_all_samples(device, monkeypatch):
    monkeypatch.setattr(libraries, "_PRODUCTS", {"psg_tests::rows"})
    model = nn.Sequential(Adapted(4, 5, Packed, False), nn.Tanh(), Adapted(5, 3, Packed, False)).to(device)
    loss, params = psg.stateless(model, lambda output: output.sin().square().sum())
    x = torch.randn(7, 2, 4, device=device)
    calls.clear()
    found = psg.clipped_grad(loss, 1e6, method="capture")(params, x).grads
    assert calls == [7, 7]
    assert_trees_close(found, {name: grad.sum(0) for name, grad in loop_grad(loss)(params, x).items()}, per_sample=False)


def test_rules_apply_beside_them(device):
    model = nn.Sequential(Adapted(64, 96, Wrapped, True), nn.Tanh(), Adapted(96, 64, Wrapped, True)).to(device)
    loss, params = psg.stateless(model, lambda output: output.square().sum())
    report = psg.explain(loss)(params, torch.randn(64, 64, device=device))
    assert {op for leaf in report.leaves for op in leaf.uses} == {"T: derived", "matmul: rule", "linear: rule"}  # linear: of a bias


@pytest.mark.filterwarnings("default::psg.FallbackWarning")
def test_a_compiled_call(device):
    model = nn.Sequential(Adapted(4, 5, Wrapped, True), nn.Tanh(), Adapted(5, 3, Wrapped, True)).to(device)
    loss, params = psg.stateless(model, lambda output: output.square().sum())
    fast = psg.jit(psg.per_sample_grad(loss), backend="eager")
    for _ in range(2):
        x = torch.randn(6, 4, device=device)
        assert_trees_close(fast(params, x), loop_grad(loss)(params, x))


class Undecided(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_without_an_implementation(device):
    frozen = torch.randn(3, 4, device=device).as_subclass(Undecided)
    with pytest.raises(TypeError, match="no implementation found for linear on types Undecided"):
        psg.per_sample_grad(lambda w, x: (w * F.linear(x, frozen)).sum(), method="capture")(
            torch.randn(3, device=device), torch.randn(5, 4, device=device)
        )


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed):
        packed.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 2, None


def test_a_function_that_writes_into_one(device):
    packed = Packed.of(torch.randn(3, 4, device=device))
    with pytest.raises(psg.StateError, match="Writing, an autograd.Function, writes into its arguments, one of them a Packed"):
        w, x = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
        psg.per_sample_grad(lambda w, x: Writing.apply(w @ x, packed).sum())(w, x)


class Reassigning(nn.Module):
    """Assigns its frozen weight anew in every call, with the same values: its data as bitsandbytes' eight-bit layers, or itself as peft."""

    def __init__(self, how):
        super().__init__()
        self.weight = Packed.of(torch.randn(3, 4))
        self.trained = nn.Parameter(torch.randn(3, 4))
        self.how, self.own = how, self.weight.data.as_subclass(torch.Tensor)

    def forward(self, x):
        output = Product.apply(x, self.weight, self.weight.state) + x @ self.trained.T
        if self.how == "data":
            self.weight.data = self.own
        else:
            weight = torch.Tensor._make_subclass(Packed, self.weight.data, False)
            weight.state = self.weight.state
            self.weight = weight
        return output


@pytest.mark.parametrize("method", ["capture", "loop"])
@pytest.mark.parametrize("how", ["data", "itself"])
def test_weights_that_are_assigned_anew_with_the_same_values(how, method, device):
    model = Reassigning(how).to(device)
    loss, params = psg.stateless(model, lambda output: output.sin().sum())
    x = torch.randn(5, 4, device=device)
    outputs = x @ (model.own * model.weight.state.scale + model.trained.detach()).T
    assert_trees_close(psg.per_sample_grad(loss, method=method)(params, x)["trained"], outputs.cos()[:, :, None] * x[:, None])


def test_a_weight_that_is_replaced(device):
    class Replacing(Reassigning):
        def forward(self, x):
            self.weight = Packed.of(torch.randn(3, 4, device=x.device))
            return x @ self.trained.T

    loss, params = psg.stateless(Replacing("itself").to(device), lambda output: output.sin().sum())
    with pytest.raises(psg.StateError, match="changes its parameter 'weight'"):
        psg.per_sample_grad(loss)(params, torch.randn(5, 4, device=device))


@pytest.mark.parametrize("kind", [Wrapped, Packed])
def test_functions_of_a_whole_batch(kind, device):
    model = nn.Sequential(Adapted(4, 5, kind, False), nn.Tanh(), Adapted(5, 3, kind, False)).to(device)
    losses, params = psg.stateless(model, lambda output: output.sin().square().sum(1), batch_dim=None)
    loss, _ = psg.stateless(model, lambda output: output.sin().square().sum())
    x = torch.randn(6, 4, device=device)
    assert_trees_close(psg.per_sample_grad(losses, method="batch")(params, x), loop_grad(loss)(params, x))
    psg.check(losses, method="batch")(params, x)


class Dequantising(torch.Tensor):
    """Handles F.linear by a function of its own, and all that it does not know as plain tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return Rounding.apply(args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*(arg.as_subclass(torch.Tensor) if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        if isinstance(weight, Dequantising):
            x = (4 * x).round() / 4
        ctx.save_for_backward(weight.as_subclass(torch.Tensor))
        return x @ weight.as_subclass(torch.Tensor).T

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent @ ctx.saved_tensors[0], None


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_function_is_given_the_class_itself(n, device):
    """As torch does: once the class was asked to handle the function, which then got a plain tensor."""
    frozen = torch.randn(3, 4, device=device).as_subclass(Dequantising)

    def fn(w, x):
        return F.linear(x @ w, frozen).sin().sum()

    w, x = torch.randn(4, 4, device=device), torch.randn(n, 2, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
