"""Parameters that reach an op through other ops, or without any rule."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from cases._table import CASES, Case, N, Problem, case, ids, module_case, normal, op_case, parameters, score

# --- derived parameters -------------------------------------------------------------------------------------


def derived(name, make, **params):
    """Add a row in which a linear layer's weight is computed from parameters alone."""

    def recipe():
        weights = {key: normal(*shape) for key, shape in params.items()}
        return Problem(lambda p, x: score(F.linear(x, make(**p))), (weights, normal(N, 5, 3)))

    CASES.append(Case(f"derived: {name}", recipe))


derived("view", lambda w: w.view(4, 3), w=(12,))
derived("reshape and transpose", lambda w: w.reshape(3, 4).t(), w=(2, 6))
derived("mT of permute", lambda w: w.permute(2, 0, 1)[0].mT, w=(3, 4, 1))
derived("cast there and back", lambda w: w.to(torch.complex128).real.to(w.dtype) * 2, w=(4, 3))
derived("low rank update", lambda w, a, b: w + 0.5 * (b @ a), w=(4, 3), a=(2, 3), b=(4, 2))
derived("chunk", lambda w: w.chunk(2)[1], w=(8, 3))
derived("split", lambda w: w.split([1, 4, 2])[1], w=(7, 3))
derived("unbind", lambda w: w.unbind(1)[0], w=(4, 2, 3))
derived("index", lambda w: w[1], w=(2, 4, 3))
derived("slice", lambda w: w[2:, ::2], w=(6, 6))
derived("gather of rows", lambda w: w[torch.tensor([0, 2, 2, 1], device=w.device)], w=(3, 3))
derived("expand", lambda w: w.expand(4, 3), w=(1, 3))
derived("cat", lambda a, b: torch.cat([a, b], 1), a=(4, 1), b=(4, 2))
derived("stack", lambda a, b: torch.stack([a, b]), a=(3,), b=(3,))
derived("weight times mask", lambda w: w * torch.ones(4, 3, device=w.device).tril(), w=(4, 3))
derived("norm and direction", lambda g, v: g * v / torch.linalg.vector_norm(v, dim=1, keepdim=True), g=(4, 1), v=(4, 3))
derived("exponential of skew", lambda w: torch.linalg.matrix_exp(w - w.T), w=(3, 3))
derived("scalar times constant", lambda s: s * torch.ones(4, 3, device=s.device), s=())
derived("softmax", lambda w: w.softmax(-1), w=(4, 3))


def spectral(w):
    with torch.no_grad():
        u = F.normalize(torch.ones_like(w[:, 0]), dim=0)
        for _ in range(3):
            v = F.normalize(torch.mv(w.t(), u), dim=0)
            u = F.normalize(torch.mv(w, v), dim=0)
    return w / torch.dot(u, torch.mv(w, v))


def quantised(w):
    step = w.abs().max().detach() / 7
    return w + ((w / step).round().clamp(-8, 7) * step - w).detach()


def polynomials(w):
    several = w.sin() * w.cos() + w.tan().atan() - w.sinh() / w.cosh() + w.erf() * torch.special.expit(w) + torch.hypot(w, w.exp())
    return several + torch.logaddexp(w, 2 * w) + torch.atan2(w, w.exp()) + torch.addcmul(w, w, w, value=0.5) + torch.nan_to_num(w)


derived("spectral norm", spectral, w=(4, 3))
derived("quantised, straight through", quantised, w=(4, 3))
derived("pruned by a mask of its own", lambda w: torch.where(w.abs() > w.abs().mean(), w, 0.0) * (w < 1), w=(4, 3))
derived("its norm, detached", lambda w: w / w.norm().detach() + w.detach() * w.sign(), w=(4, 3))
derived("pruned by the opposite of a mask", lambda w: w * ~(w.abs() < 0.5), w=(4, 3))
derived("largest entries", lambda w: w - w.max(1, keepdim=True).values + w.min() + w[:, w.sum(0).argmax()][:, None], w=(4, 3))
derived("elementwise functions", polynomials, w=(4, 3))
derived("orthogonal", lambda w: torch.matrix_exp(w.tril(-1) - w.tril(-1).mH)[:, :3], w=(4, 4))
derived("inverse", lambda w: torch.linalg.inv(w @ w.T + torch.eye(3).to(w)) + torch.linalg.solve(w + 4 * torch.eye(3).to(w), w), w=(3, 3))
derived("factorised", lambda w: torch.linalg.qr(w).Q + torch.linalg.cholesky(w.T @ w + torch.eye(3).to(w)).sum(), w=(4, 3))
derived("of its spectrum", lambda w: torch.fft.irfft(torch.fft.rfft(w, dim=1).conj() * (1 + w[:, :1]), n=3, dim=1), w=(4, 3))
derived("complex numbers", lambda w: torch.view_as_real(torch.view_as_complex(w) ** 2).flatten(1)[:, :3], w=(4, 2, 2))
derived("its trace and determinant", lambda w: w * w.trace() + torch.linalg.det(w) - torch.logdet(w @ w.T), w=(3, 3))


@case(name="derived: weight_norm parametrisation")
def _():
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    return Problem(lambda p, x: score(functional_call(module, p, (x,))), (parameters(module), normal(N, 5, 3)))


@case(name="derived: orthogonal parametrisation")
def _():
    module = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley")
    return Problem(lambda p, x: score(functional_call(module, p, (x,))), (parameters(module), normal(N, 5, 3)))


@case(name="derived: the result is used by a rule, outside it and returned")
def _():
    def fn(p, x):
        both = p["a"] @ p["b"]
        return score(F.linear(x, both)) + score(both * x.mean()) + both.square().sum()

    return Problem(fn, ({"a": normal(4, 2), "b": normal(2, 3)}, normal(N, 5, 3)))


@case(name="derived: convolution kernel standardised")
def _():
    def fn(p, x):
        weight = p["weight"]
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
        return score(F.conv2d(x, weight, p["bias"]))

    return Problem(fn, ({"weight": normal(4, 3, 2, 2), "bias": normal(4)}, normal(N, 3, 5, 5)))


# --- lifted only --------------------------------------------------------------------------------------------

op_case("bare parameters", lambda x, scale, shift: (x * scale.exp() + shift).tanh(), (5, 4), params={"scale": (4,), "shift": (5, 1)})
op_case("scalar parameter", lambda x, temperature: (x / temperature).softmax(-1), (4,), params={"temperature": ()})
op_case("prelu", F.prelu, (5, 4), params={"weight": (4,)})
op_case(
    "parameter without entries", lambda x, weight, empty: (x * weight).sum() + empty.sum(), (3,), params={"weight": (3,), "empty": (0, 2)}
)
module_case("prelu module", lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.PReLU(3)), (2, 4, 4))


@case
def hypernetwork():
    # The weights of the second layer are an output of the first: they differ from sample to sample.
    def fn(p, x, y):
        generated = F.linear(x, p["weight"], p["bias"]).reshape(2, 4)
        return score(F.linear(y, generated))

    return Problem(fn, ({"weight": normal(8, 3), "bias": normal(8)}, normal(N, 3), normal(N, 5, 4)))


@case
def parameter_indexed_by_the_sample():
    return Problem(lambda p, i, x: score(p[i] * x), (normal(6, 3), ids(6, N, 2), normal(N, 3)))


@case
def parameters_compared_and_selected():
    return Problem(lambda p, x: score(torch.where(p["a"] > p["b"], p["a"] * x, p["b"])), ({"a": normal(4), "b": normal(4)}, normal(N, 4)))


@case
def class_token_and_positions():
    # As a vision transformer: a token of its own before the patches, positions added.
    def fn(p, x):
        patches = F.conv2d(x[None], p["patch"], stride=2).flatten(2).transpose(1, 2)
        tokens = torch.cat([p["token"].expand(1, -1, -1), patches], 1) + p["positions"]
        return score(F.layer_norm(tokens, (4,), p["scale"]))

    params = {"patch": normal(4, 1, 2, 2), "token": normal(1, 1, 4), "positions": normal(1, 5, 4), "scale": normal(4)}
    return Problem(fn, (params, normal(N, 1, 4, 4)))


@case
def parameters_iterated_and_stacked():
    def fn(p, x):
        rows = [F.linear(x, row[None]) for row in p["w"]]
        return score(torch.cat(rows)) + score(torch.stack([p["a"], x]))

    return Problem(fn, ({"w": normal(4, 3), "a": normal(3)}, normal(N, 3)))


@case
def parameter_by_keyword_and_position():
    def fn(p, x):
        y = F.linear(weight=p["w"], input=x, bias=p["b"])
        y = F.layer_norm(y, (4,), bias=p["c"])
        return score(torch.matmul(input=y, other=p["v"]))

    return Problem(fn, ({"w": normal(4, 3), "b": normal(4), "c": normal(4), "v": normal(4, 2)}, normal(N, 5, 3)))


class Scaled(torch.autograd.Function):
    """x w, with a rule of its own for w, which no function mode sees."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        x, w = ctx.saved_tensors
        return cotangent * w, 3 * cotangent * x  # not the derivative: the function's own rule counts


@case
def custom_autograd_function_with_a_vmap_rule():
    return Problem(
        lambda p, x: score(Scaled.apply(F.linear(x, p["a"]), p["w"])), ({"a": normal(4, 3), "w": normal(4)}, normal(N, 4, 3)[:, 0])
    )
