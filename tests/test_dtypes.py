"""Low precision, autocast, and numbers that are not finite."""

import pytest
import torch
import torch.nn.functional as F
from agreement import linear_args, linear_loss
from cases import N, each_case
from hypothesis import given
from hypothesis import strategies as st
from sweeps.ops import database

import psg
from psg.factors import Dense, Expanded, Outer, Scaled
from psg.factors._arithmetic import scale_rows
from psg.testing import assert_trees_close, loop_grad, reference_clipped_sum, reference_norm
from psg.testing._loop import tree_map


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear 2-D", "conv2d groups", "embedding", "layer_norm", "group_norm", "instance_norm", "rms_norm"])
def test_low_precision_follows_torch(name, dtype, device):
    problem = next(case for case in each_case().args[1] if case.name == name).build(device)
    args = tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, problem.args)
    grads = psg.per_sample_grad(problem.fn)(*args)
    assert_trees_close(grads, loop_grad(problem.fn)(*args), name="grads")
    norms = psg.per_sample_norm(problem.fn)(*args)
    assert norms.dtype == torch.float32
    assert_trees_close(norms, reference_norm(grads), rtol=psg.testing.default_rtol(dtype), name="norms")


def test_norms_of_half_precision_do_not_overflow(device):
    # 300^2 is beyond float16, whose largest number is 65504.
    p, x = torch.ones(4, device=device, dtype=torch.float16), torch.full((2, 4), 300.0, device=device, dtype=torch.float16)
    norms = psg.per_sample_norm(lambda p, x: (p * x).sum())(p, x)
    assert_trees_close(norms, torch.full((2,), 600.0, device=device, dtype=torch.float32))
    w = torch.ones(1, 4, device=device, dtype=torch.float16)
    assert_trees_close(psg.per_sample_norm(lambda w, x: F.linear(x, w).sum())(w, x), norms)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_reductions_of_complex_half_precision_accumulate_in_float32(device):
    """Inner products were rounded to float16, in which these are infinite, and sums had no kernel."""
    z = 300 * torch.randn(3, 4, 2, device=device, dtype=torch.complex64)
    tree, exact = (psg.factored_grad(lambda p, z: (p * z.conj()).real.float().sum())(own[0], own) for own in (z.to(torch.complex32), z))
    assert tree.dtype == torch.complex32
    for reduce in (psg.tree.norm, psg.tree.gram, lambda g: psg.tree.dot(g, z[0]), lambda g: psg.tree.project(g, 4), psg.tree.moments):
        assert_trees_close(reduce(tree), reduce(exact), rtol=2e-3, per_sample=False)  # in the same dtypes
    assert_trees_close(psg.tree.clip(tree, 1.0).grads, psg.tree.clip(exact, 1.0).grads, rtol=2e-3, per_sample=False)
    assert psg.tree.sum(tree).dtype == torch.complex32


@given(
    dtype=st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16]),
    size=st.integers(-12, 12),
    n=st.integers(0, 3),
    t=st.integers(1, 3),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gradients_through_weights_rounded_to_fewer_bits(dtype, size, n, t, turned, seed, device):
    """They are rounded once, as products: the sides of an outer product, rounded one by one, lost more, and left the range of 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(4, 3, generator=generator).to(device, torch.float32)
    # Integers, whose products and sums have no rounding errors of their own.
    x, c = (torch.randint(-20, 21, (n, t, d), generator=generator).to(device, torch.float32) for d in (3, 4))

    def fn(w, x, c):
        rounded = w.T.to(dtype).T if turned else w.to(dtype)
        return (F.linear(x * 2.0**size, rounded.to(w.dtype)) * c * 2.0**-size).sum()

    found, expected = psg.per_sample_grad(fn)(w, x, c), loop_grad(fn)(w, x, c)
    assert_trees_close(found, expected, rtol=0 if dtype != torch.bfloat16 else 2**-6)  # which has all exponents: its sides are rounded


def test_autocast(device):
    def fn(p, x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = F.linear(F.linear(x, p["a"], p["c"]).relu(), p["b"])
        return y.float().square().mean()

    params = {"a": torch.randn(8, 6), "c": torch.randn(8), "b": torch.randn(3, 8)}
    params = {name: p.to(device, torch.float32) for name, p in params.items()}
    x = torch.randn(N, 5, 6, device=device, dtype=torch.float32)
    expected = loop_grad(fn)(params, x)
    grads = psg.per_sample_grad(fn)(params, x)
    assert_trees_close(grads, expected, rtol=psg.testing.default_rtol(torch.bfloat16), name="grads")
    norms = psg.per_sample_norm(fn)(params, x)
    assert_trees_close(norms, reference_norm(grads), rtol=psg.testing.default_rtol(torch.bfloat16), name="norms")


def test_autocast_outside_the_call(device):
    params, x = linear_args(device)
    params, x = tree_map(torch.Tensor.float, (params, x))
    fn = lambda p, x: F.linear(x, p["w"], p["b"]).float().square().mean()  # noqa: E731
    with torch.autocast(device.type, dtype=torch.bfloat16):
        grads, expected = psg.per_sample_grad(fn)(params, x), loop_grad(fn)(params, x)
    assert_trees_close(grads, expected, rtol=psg.testing.default_rtol(torch.bfloat16), name="grads")


@pytest.mark.parametrize("called", [False, True])
def test_a_backward_pass_runs_fn_under_the_autocast_of_its_call(called, device):
    """It runs fn again, and autocast may be on then that was off before, or off that was on."""
    w, x = torch.randn(8, 6, device=device).float(), torch.randn(N, 5, 6, device=device).float()

    def slope(differentiated):
        own = w.clone().requires_grad_()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=called):
            norms = psg.per_sample_norm(lambda w, x: F.linear(x, w).float().sin().sum())(own, x)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=differentiated):
            return torch.autograd.grad(norms.sum(), own)[0]

    assert torch.equal(slope(False), slope(True))


def test_trees_are_computed_with_as_outside_of_autocast(device):
    """What psg computes around fn is not in autocast's low dtype, nor an inference tensor."""
    left, right = torch.randn(3, 2, 4, device=device).float(), torch.randn(3, 2, 5, device=device).float()
    factored, dense = {"w": Outer(left, right)}, {"w": Dense(left.mT @ right)}
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.inference_mode():
        both = psg.tree.concat([factored, dense])
        some = psg.tree.take(dense, [2, 0])
    assert not both["w"].values.is_inference() and not some["w"].values.is_inference()
    assert_trees_close(psg.tree.materialize(both)["w"][:3], dense["w"].values)
    assert_trees_close(some["w"].values, dense["w"].values[[2, 0]])


def test_gradients_that_torch_gives_as_conjugates(device):
    # The gradient of Re(conj(z) x) is conj(conj(x)), which vmap returns as a lazily conjugated view.
    z, x = torch.randn(4, device=device, dtype=torch.complex128), torch.randn(3, 4, device=device, dtype=torch.complex128)
    fn = lambda z, x: (z.conj() * x).real.sum()  # noqa: E731
    expected = loop_grad(fn)(z, x)
    assert_trees_close(psg.per_sample_norm(fn)(z, x), reference_norm(expected))
    out = psg.clipped_grad(fn, 1.0, chunk_size=2)(z, x)
    assert_trees_close(out.grads, reference_clipped_sum(expected, 1.0), per_sample=False)


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("method", ["auto", "vmap", "loop", "batch"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_sums_of_an_unused_complex_parameter_are_complex(dtype, method, n, device):
    params = {"used": torch.randn(3, device=device, dtype=dtype), "unused": torch.randn(2, device=device, dtype=dtype)}
    fn = lambda p, x: (p["used"] * x).abs().sum(-1)  # noqa: E731
    grads = psg.clipped_grad(fn, 1.0, method=method)(params, torch.randn(n, 3, device=device, dtype=dtype.to_real())).grads
    assert {name: grad.dtype for name, grad in grads.items()} == dict.fromkeys(params, dtype)
    assert psg.tree.add_noise(grads, 1.0)["unused"].imag.all()


# --- numbers that are not finite stay where they are ----------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_spoils_its_own_row_alone(bad, device):
    params, x = linear_args(device)
    clean = psg.per_sample_grad(linear_loss)(params, x)
    x[1, 0, 0] = bad
    grads, norms = psg.per_sample_grad(linear_loss)(params, x), psg.per_sample_norm(linear_loss)(params, x)
    assert not torch.isfinite(norms[1])
    rest = [0, 2]
    assert_trees_close(tree_map(lambda leaf: leaf[rest], grads), tree_map(lambda leaf: leaf[rest], clean))
    assert_trees_close(norms[rest], reference_norm(clean)[rest])


@given(st.integers(0, 3), st.integers(1, 3), st.sampled_from([1e-9, 1e-4, 1.0, 1e5]), st.sampled_from([1e-4, 1.0, 1e3]), st.booleans())
def test_weighted_sums_of_half_precision_keep_inside_its_range(n, t, weight, size, turned):
    """A weight may scale one side out of the range of float16, though the sum is inside it."""
    left = (torch.rand(n, t, 3) + 0.5).mul(size).half()
    right = (torch.rand(n, t, 4) + 0.5).mul(min(1 / size / weight, 1e4)).half()
    weights = weight * (torch.rand(n) + 0.5)
    factor = Outer(right, left) if turned else Outer(left, right)
    exact = factor.to(torch.float64).weighted_sum(weights.double())
    assert_trees_close(psg.tree.weighted_sum(factor, weights), exact.half(), rtol=4e-3, atol=1e-7, per_sample=False)


@pytest.mark.parametrize(("size", "cotangent"), [(300, 1e-3), (3e-5, 1e4)])
@pytest.mark.parametrize("outputs", [3, 40])
@pytest.mark.parametrize(
    "op", [F.bilinear, lambda x, z, w: torch.einsum("ti,tj,oij->to", x, z, w)], ids=["bilinear", "einsum of three operands"]
)
def test_products_of_data_do_not_leave_the_range_of_half_precision(op, outputs, size, cotangent, device):
    """The gradient is their product with the cotangent, which autograd may form in another order."""
    w, c = (torch.ones(shape, device=device).half() for shape in ((outputs, 4, 4), (2, 1, outputs)))
    x, z = ((torch.rand(2, 1, 4, device=device) + 0.5).mul(size).half() for _ in range(2))
    loss = lambda w, x, z, c: (op(x, z, w) * c).sum()  # noqa: E731
    args = w, x, z, c * cotangent
    expected = loop_grad(loss)(*(arg.double() for arg in args))
    assert_trees_close(psg.per_sample_grad(loss, method="capture")(*args).double(), expected, rtol=4e-3)
    assert psg.clipped_grad(loss, 1.0, method="capture")(*args).nonfinite == 0


def test_clipped_sums_of_half_precision_keep_their_bound(device):
    w, x = torch.randn(64, 64, device=device).half(), torch.randn(4, 64, device=device).half()
    kernel, images = torch.randn(8, 4, 3, 3, device=device).half(), torch.randn(4, 4, 9, 9, device=device).half()
    for fn, args in (
        (lambda w, x: F.linear(x, w).square().sum(), (w, x)),
        (lambda w, x: F.conv2d(x[None], w).square().sum(), (kernel, images)),
    ):
        for norm in ("gram", "chunks", "keep"):
            with psg.plans.using(norm=norm):
                out = psg.clipped_grad(fn, clip_norm=2e-3)(args[0], args[1][:1])
            assert abs(out.grads.double().norm() / 2e-3 - 1) < 0.01


def test_clipped_sums_of_scaled_half_precision_keep_their_bound(device):
    """The product of a factor and its entries may be beyond float16 where its norm is not; samples may have entries of their own."""
    values, entries = torch.tensor([[300.0], [1.0]], device=device).half(), torch.tensor([[300.0, 3.0], [2.0, 1.0]], device=device).half()
    out = psg.tree.clip(Scaled(Expanded(values, torch.Size([2])), entries), 1.0)
    exact = values.float() * entries.float()
    assert_trees_close(out.grads, F.normalize(exact).sum(0), per_sample=False)
    assert out.nonfinite == 0


def test_autocast_of_a_recurrent_layer_of_data_in_the_low_dtype(device):
    """The data have 16 bits, as a preceding layer leaves them, and the weights 32."""
    layer = torch.nn.LSTM(3, 4, batch_first=True).to(device, torch.float32)

    def fn(params, x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            output, _ = torch.func.functional_call(layer, params, (x.to(torch.bfloat16)[None],))
        return output.float().square().mean()

    params = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(N, 5, 3, device=device, dtype=torch.float32)
    assert_trees_close(psg.per_sample_grad(fn)(params, x), loop_grad(fn)(params, x), rtol=psg.testing.default_rtol(torch.bfloat16))


@pytest.mark.parametrize("kind", ["group norm", "lstm"])
def test_a_device_that_autocast_does_not_know(kind):
    """torch raises if it is asked whether autocast is on for tensors without values."""
    with torch.device("meta"):
        layer = {"group norm": torch.nn.GroupNorm(2, 4), "lstm": torch.nn.LSTM(4, 4, batch_first=True)}[kind]
        loss, params = psg.stateless(layer, lambda output, _: (output if kind == "group norm" else output[0]).square().sum())
        grads = psg.per_sample_grad(loss, method="capture")(params, torch.empty(N, 4, 4), torch.empty(N))
    assert {name: grad.shape for name, grad in grads.items()} == {name: (N, *leaf.shape) for name, leaf in params.items()}


def test_derivatives_of_weighted_sums_of_16_bits(device):
    left = torch.randn(N, 2, 3, device=device).to(torch.bfloat16).requires_grad_()
    weights = torch.randn(N, device=device, dtype=torch.float32)
    right = torch.randn(N, 2, 4, device=device).to(torch.bfloat16)
    (found,) = torch.autograd.grad(Outer(left, right).weighted_sum(weights).float().sum(), left)
    expected = (weights[:, None] * right.float().sum(2))[:, :, None].expand(left.shape)
    assert_trees_close(found.float(), expected, rtol=psg.testing.default_rtol(torch.bfloat16))


PROMOTING = {
    "where": lambda a, b, c: torch.where(a.detach() > 0, b, c),
    "where, as a method": lambda a, b, c: b.where(a.detach() > 0, c),
    "clamp": lambda a, b, c: torch.clamp(a.expand(2), b, max=c),
    "clip": lambda a, b, c: a.expand(2).clip(max=b) + c.sum(),
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=2),
    "addcdiv": lambda a, b, c: a.addcdiv(b, tensor2=c + 5),
}
FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("op", PROMOTING)
@given(
    roles=st.tuples(*[st.sampled_from(["parameter", "data", "product", "constant"])] * 3),
    dtypes=st.tuples(*[st.sampled_from(FLOATING)] * 3),
    dimensional=st.integers(0, 2),
    n=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_operands_without_dimensions_leave_the_dtype_to_the_others(op, method, roles, dtypes, dimensional, n, seed, device):
    """vmap gives them a dimension, of samples: where, clamp, addcmul and addcdiv then promoted the result to their dtypes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape, dtype):
        return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).round().to(device, dtype)  # exact in all dtypes

    operands = [(role, (2,) if i == dimensional else (), dtype) for i, (role, dtype) in enumerate(zip(roles, dtypes, strict=True))]
    params, x, constants = {3: draw((), torch.float64)}, {3: draw((n,), torch.float64)}, {}
    for i, (role, shape, dtype) in enumerate(operands):
        if role == "product" or role == "parameter":
            params[i] = draw(shape, torch.bfloat16 if role == "product" else dtype)
        if role in ("data", "product"):
            x[i] = draw((n, *shape), dtype)
        constants[i] = draw(shape, dtype)
    seen = []

    def fn(params, x):
        values = {**constants, **x, **params, **{i: params[i] * x[i] for i, (role, *_) in enumerate(operands) if role == "product"}}
        output = PROMOTING[op](*(values[i] for i in range(3)))
        seen.append(output.dtype)
        return output.double().sum() * params[3] * x[3]

    expected, dtype = loop_grad(fn)(params, x), seen[-1:]  # none of no samples, for which fn is not called
    # Of bfloat16, in whose steps of 2^-8 each of a few ops rounds.
    assert_trees_close(psg.per_sample_grad(fn, method=method)(params, x), expected, rtol=2**-6)
    assert seen[-1:] == dtype


@pytest.mark.parametrize("method", ["auto", "vmap"])
@given(
    dtypes=st.tuples(*[st.sampled_from(FLOATING)] * 3),
    weights=st.sampled_from(["weight", "pos_weight", None]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    soft=st.booleans(),
    cast=st.booleans(),
    n=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_binary_cross_entropy_is_in_the_dtype_of_its_targets(method, dtypes, weights, reduction, soft, cast, n, seed, device):
    """vmap promotes it to the widest of its operands' dtypes; autocast, which takes it as a whole, to float32."""
    generator = torch.Generator().manual_seed(seed)
    p, x, target = (torch.rand(shape, generator=generator, dtype=torch.float64).to(device) for shape in ((4,), (n, 4), (n, 4)))
    p, x, target, weight = p.to(dtypes[0]), x.to(dtypes[0]), target.to(dtypes[1]), torch.ones(4, dtype=dtypes[2], device=device)
    seen = []

    def fn(p, x, target):
        options = {} if weights is None else {weights: weight + 1}
        target = target * p.to(target.dtype) if soft else target
        with torch.autocast(device.type, torch.bfloat16, enabled=cast):
            loss = F.binary_cross_entropy_with_logits(p * x, target, reduction=reduction, **options)
        seen.append(loss.dtype)
        return loss.sum()

    expected, dtype = loop_grad(fn)(p, x, target), seen[-1:]  # none of no samples, for which fn is not called
    assert_trees_close(psg.per_sample_grad(fn, method=method)(p, x, target), expected, rtol=2**-5)  # of bfloat16, which has steps of 2^-8
    assert seen[-1:] == dtype


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x: torch.view_as_real(x @ torch.complex(p, 2 * p).conj()).sin().sum(),
        lambda p, x: torch.complex(p.sum(1), x.real).conj().imag.sin().sum(),
        lambda p, x: torch.imag((p @ x.imag).conj() * x).sin().sum(),
        lambda p, x: (torch.complex(p, p.T).mH @ x).imag.sin().sum(),
    ],
    ids=["of a parameter", "imaginary part", "by torch.imag", "transposed"],
)
def test_conjugates(fn, device):
    p, x = torch.randn(3, 3, device=device), torch.randn(N, 3, device=device, dtype=torch.complex128)
    assert_trees_close(psg.per_sample_grad(fn)(p, x), loop_grad(fn)(p, x))


@given(
    n=st.integers(0, 3),
    left=st.lists(st.integers(1, 3), max_size=2),
    grow=st.booleans(),
    role=st.sampled_from(["both", "real part", "imaginary part"]),
    double=st.booleans(),
    seed=st.integers(0, 99),
)
def test_complex_numbers_made_of_real_ones(n, left, grow, role, double, seed, device):
    torch.manual_seed(seed)
    right = [1] * len(left) if grow else left  # of another shape, which is broadcast
    p, q = torch.randn(left, device=device), torch.randn(right, device=device)
    x, y = torch.randn(n, *left, device=device), torch.randn(n, *right, device=device)

    def fn(params, x, y):
        p, q = params
        real, imag = (p * x if role != "imaginary part" else x), (q * y if role != "real part" else y)
        value = torch.complex(real, imag).conj()
        return (value.imag.sin() + torch.imag(value * value) + value.abs()).sum() * (p.sum() + q.sum() if double else 1)

    assert_trees_close(psg.per_sample_grad(fn)((p, q), x, y), loop_grad(fn)((p, q), x, y))


# Autocast, op by op: torch casts the arguments of the op that fn calls, whatever vmap and the rules then take it apart into

W = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
CAST_AS_A_WHOLE = {
    "mv": lambda w, x: torch.mv(w, x[0]),
    "mv of data": lambda w, x: torch.mv(w * x.sum(), x[0]),
    "addmv": lambda w, x: torch.addmv(w[:, 0], w, x[0]),
    "dot": lambda w, x: torch.dot(w[0], x[0]),
    "vdot": lambda w, x: torch.vdot(w[0], x[0]),
    "inner of vectors": lambda w, x: torch.inner(w[0], x[0]),
    "inner": lambda w, x: torch.inner(w, x),
    "tensordot of all": lambda w, x: torch.tensordot(w[:3], x, 2),
    "tensordot": lambda w, x: torch.tensordot(w, x.T, 1),
    "linear": lambda w, x: F.linear(x, w, w[:, 0]),
    "linear of a weight of each sample": lambda w, x: F.linear(w, x, x[:, 0]),
    "addmm of data": lambda w, x: torch.addmm(x[:, :3], x * w[:3], x.T),
    "conv1d": lambda w, x: F.conv1d(x, w[:, :3, None], w[:, 0]),
    "conv1d of a frozen weight": lambda w, x: F.conv1d(x * w[:3], W[:, :3, None], W[:, 0]),
    "conv_transpose2d": lambda w, x: F.conv_transpose2d(x[None, :, None], w[:3, :, None, None]),
    "prelu": lambda w, x: F.prelu(x, w[0]),
    "cat": lambda w, x: torch.cat([F.linear(x, w), w[:3, :4]]),
    "attention": lambda w, x: F.scaled_dot_product_attention(w[None], x[None], x[None]),
    "prod": lambda w, x: F.linear(x, w).tanh().prod(),
    "cross_entropy": lambda w, x: F.cross_entropy(F.linear(x, w), x[:, :4].softmax(-1), label_smoothing=0.1, reduction="sum"),
    "cross_entropy of classes": lambda w, x: F.cross_entropy(
        20 * F.linear(x, w), x[:, :4].argmax(-1), weight=w[:, 0].abs().detach().to(F.linear(x, w).dtype), label_smoothing=0.1
    ),
    "nll_loss": lambda w, x: F.nll_loss(100 * F.linear(x, w), x[:, :4].argmax(-1), reduction="sum"),
    "binary_cross_entropy_with_logits": lambda w, x: F.binary_cross_entropy_with_logits(
        30 * F.linear(x, w), x[:, :4].sigmoid(), reduction="sum"
    ),
    "kl_div": lambda w, x: F.kl_div(F.linear(x, w), x[:, :4].softmax(-1), reduction="sum"),
    "l1_loss": lambda w, x: F.l1_loss(100 * F.linear(x, w), x[:, :4], reduction="sum"),
    "poisson_nll_loss": lambda w, x: F.poisson_nll_loss(F.linear(x, w).tanh(), x[:, :4].abs()),
    "cosine_embedding_loss": lambda w, x: F.cosine_embedding_loss(F.linear(x, w), x[:, :4], x[:, 0].sign(), reduction="sum"),
    "hinge_embedding_loss": lambda w, x: F.hinge_embedding_loss(F.linear(x, w), x[:, :4].sign()),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CAST_AS_A_WHOLE)
def test_autocast_takes_ops_as_a_whole(name, dtype):
    """In dtypes and in numbers: losses summed in float16 overflow, and products that torch leaves in float32 lose two digits in 16 bits."""

    def fn(w, x):
        with torch.autocast("cpu", dtype):
            output = CAST_AS_A_WHOLE[name](w, x)
        return output.float().sum(), output

    x = 3 * torch.randn(N, 3, 6, dtype=torch.float32)
    grads, aux = psg.per_sample_grad(fn, has_aux=True, method="loop")(W, x)
    rtol = 4 * torch.finfo(aux.dtype).eps if aux.dtype != torch.float32 else 1e-5
    for method in ("capture", "vmap"):
        found, output = psg.per_sample_grad(fn, has_aux=True, method=method)(W, x)
        assert output.dtype == aux.dtype, method
        torch.testing.assert_close(output, aux, rtol=rtol, atol=rtol * aux.abs().max().item())
        # Gradients pass through autocast's dtype in any case.
        error = (found - grads).norm() / grads.norm()
        assert error < 8 * torch.finfo(dtype).eps, method


@pytest.mark.parametrize("method", ["capture", "vmap", "batch"])
@pytest.mark.parametrize(
    "op",
    [
        lambda w, x: F.linear(x, (w[:3, :3] @ w[:3, :3].T) @ w[:3]),
        lambda w, x: F.prelu(x, w[0, :1]),
        lambda w, x: torch.linalg.vecdot(x, w[0]),
    ],
    ids=["derived", "prelu", "vecdot"],
)
def test_autocast_of_values_computed_from_parameters_and_of_ops_without_a_rule(op, method):
    """A product of parameters ran in another dtype when its gradient was pulled back; a rule or a decomposition that does not cast."""

    def fn(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            output = op(w, x)
        seen.append(output.dtype)
        squares = output.float().square()
        return squares.reshape(len(x), -1).sum(1) if method == "batch" else squares.sum()

    seen: list[torch.dtype] = []
    x = torch.randn(N, 6, dtype=torch.float32)
    found = psg.per_sample_grad(fn, method=method)(W, x)
    assert set(seen) == {torch.bfloat16}
    single = (lambda w, x: fn(w, x[None])[0]) if method == "batch" else fn
    expected = loop_grad(single)(W, x)
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_autocast_leaves_what_a_convolution_does_not_take():
    """Complex and integer inputs lost their imaginary part, or were converted."""

    def fn(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv1d(x, w).abs().sum()

    for dtype in (torch.complex64, torch.int64):
        with pytest.raises((RuntimeError, NotImplementedError)):
            psg.per_sample_grad(fn, method="capture")(W[:, :3, None], torch.ones(N, 3, 6, dtype=dtype))


def test_autocast_of_a_convolution_of_a_whole_batch():
    def losses(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.conv1d(x, w, W[:, 0])
        return y.sum((1, 2), dtype=torch.float32) if y.dtype == torch.bfloat16 else torch.full((len(x),), torch.nan) * y.sum()

    w, x = W[:, :3, None], torch.randn(N, 3, 6, dtype=torch.float32)
    expected = torch.stack([torch.func.grad(lambda w, x: losses(w, x[None])[0])(w, sample) for sample in x])
    torch.testing.assert_close(psg.per_sample_grad(losses, method="batch")(w, x), expected, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of deprecated ops
def test_dtypes_of_all_ops_under_autocast():
    """One sample input of every op that PyTorch's own tests know, as data and as a parameter."""
    different = []
    for op in database():
        if torch.float32 not in op.supported_dtypes("cpu") or op.name in LEFT_AS_THEY_ARE or op.name.startswith("jiterator"):
            continue
        try:
            sample = next(iter(op.sample_inputs("cpu", torch.float32)))
        except StopIteration:
            continue
        if not isinstance(sample.input, torch.Tensor) or sample.input.layout != torch.strided or not sample.input.is_floating_point():
            continue
        for make in (lambda w, x: x + 0 * w.sum(), lambda w, x: w):
            seen = []

            def fn(w, x):
                with torch.autocast("cpu", torch.bfloat16):
                    output = op.op(make(w, x), *sample.args, **sample.kwargs)  # noqa: B023
                output = psg._trees.tensors_in(psg._trees.flatten(output)[0])[0]
                seen.append(output.dtype)  # noqa: B023
                return output.double().sum() + 0 * x.sum()

            try:
                psg.per_sample_grad(fn, method="capture")(sample.input, torch.stack([sample.input] * 2))
                fn(sample.input, sample.input)
            except (psg.PsgError, RuntimeError, ValueError, TypeError, IndexError):
                continue
            if seen[-2] != seen[-1]:
                different.append((op.name, seen[-2:]))
    assert not different


LEFT_AS_THEY_ARE = {"nn.functional.linear_cross_entropy"}  # fused, it returns a loss in the dtype of its input; psg's is in float32


@pytest.mark.parametrize("live", ["rows", "weights"])
def test_rows_of_16_bits_are_scaled_under_transforms_and_with_a_history(live, device):
    """Where no memory is written into, they are rounded once, too."""
    rows, weights = torch.randn(3, 4, device=device).bfloat16(), torch.randn(3, device=device).float()
    expected = (rows * weights[:, None]).bfloat16()
    assert torch.equal(scale_rows(rows, weights), expected)
    assert torch.equal(torch.func.vmap(scale_rows)(rows[None], weights[None])[0], expected)
    leaf = (rows if live == "rows" else weights).requires_grad_()
    output = scale_rows(rows, weights)
    assert torch.equal(output, expected)
    assert torch.autograd.grad(output.sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("op", [torch.bmm, lambda x, w: torch.baddbmm(torch.zeros_like(x @ w), x, w)], ids=["bmm", "baddbmm"])
def test_autocast_of_batched_products(op, inner, device):
    """Of one column and one row too."""

    def fn(w, x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return op(x, w).sum()

    w, x = torch.randn(5, inner, 4, device=device).float(), torch.randn(N, 5, 6, inner, device=device).float()
    values, grads = psg.per_sample_value_and_grad(fn)(w, x)
    assert values.dtype == fn(w, x[0]).dtype == torch.bfloat16
    assert_trees_close(grads, loop_grad(fn)(w, x), rtol=2e-2)
