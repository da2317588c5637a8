"""Measures functions that use parameters in ops without a rule, or few numbers, against `vmap(grad)` of the same function.

    python benchmarks/lifted.py --threads 4 --repeats 15 --out results/lifted.json

Such a parameter is lifted: expanded to one copy per sample, and differentiated by PyTorch's own formulas under vmap. This should cost about
what vmap(grad) does. Per-sample gradients are compared with those of vmap(grad) before they are timed; times are medians of interleaved
calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from run import median_ms, options, set_up, write
from torch import Tensor
from torch.func import grad, vmap

import psg

BAR = 1.3

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], tuple[int, ...]]] = {}
"""name -> (fn(params, x), the shapes of its parameters, the shape of x with the samples first)."""


def function(params: tuple[tuple[int, ...], ...], x: tuple[int, ...]):
    def register(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        FUNCTIONS[fn.__name__] = fn, params, x
        return fn

    return register


@function(params=((128, 256), (256,)), x=(32, 128, 256))
def positions_and_gate(params, x):
    positions, gate = params
    return ((x + positions) * gate.sigmoid()).square().mean()


@function(params=((256,),), x=(32, 256, 28, 28))
def prelu(params, x):
    return F.prelu(x[None], params[0]).square().mean()


@function(params=((128, 256),), x=(64, 256))
def distances(params, x):
    return (x - params[0]).square().sum(1).softmax(0).square().sum()


@function(params=((8, 32, 256),), x=(32, 64, 256))
def einsum_of_three_dimensions(params, x):
    return torch.einsum("td,hkd->htk", x, params[0]).square().mean()


@function(params=((8, 64, 64),), x=(32, 8, 64, 64))
def bmm_by_expert(params, x):
    return torch.bmm(x, params[0]).square().mean()


@function(params=((16, 16, 32, 32),), x=(64, 16, 16))
def tensordot_twice(params, x):
    return torch.tensordot(x, params[0], 2).square().mean()


@function(params=((4, 64, 256),), x=(32, 128, 64))
def matmul_by_head(params, x):
    return (x @ params[0]).square().mean()


@function(params=((16, 128),), x=(32, 256, 128))
def learned_queries(params, x):
    return F.scaled_dot_product_attention(params[0][None], x[None], x[None]).square().mean()


@function(params=((64, 128), (128,)), x=(64, 128))
def weight_from_the_sample(params, x):
    weight, bias = params
    return F.linear(x, weight * x.sigmoid(), None).square().mean() + (bias * x).mean()


@function(params=((256, 128),), x=(32, 128, 128))
def chosen_rows(params, x):
    rows = params[0][(x[:, 0].abs() * 100).long() % 256]
    return (rows * x).square().mean()


@function(params=((64, 64), (64,)), x=(64, 64, 64))
def solve(params, x):
    matrix, vector = params
    return torch.linalg.solve(matrix @ matrix.T + 64 * torch.eye(64) + x @ x.T, vector).square().mean()


@function(params=((64, 513), (1024,)), x=(32, 64, 1024))
def fourier_filter(params, x):
    weight, window = params
    return torch.fft.irfft(torch.fft.rfft(x * window) * weight).square().mean()


@function(params=((256, 64),), x=(64, 64))
def by_hand(params, x):
    return (params[0] * x).sum(1).tanh().square().mean()


@function(params=((64, 64), (64, 64)), x=(32, 64, 64))
def recurrence_by_hand(params, x):
    inner, outer = params
    state = torch.zeros(64)
    for step in x.unbind(0):
        state = (outer @ step + inner @ state).tanh()
    return state.square().mean()


@function(params=((1, 1, 256), (65, 256)), x=(32, 64, 256))
def class_token(params, x):
    token, positions = params
    return (torch.cat([token[0], x]) + positions).softmax(-1).square().mean()


@function(params=((64, 64),), x=(64, 64, 16))
def inner_gradient(params, x):
    step = torch.func.grad(lambda w: F.linear(x.T, w).square().mean())(params[0])
    return F.linear(x.T, params[0] - 0.1 * step).square().mean()


@function(params=((3, 3), (2, 3), (3,), (2,)), x=(256, 4, 2))
def kalman_filter(params, x):
    dynamics, observation, noise, error = params
    mean, covariance, total = torch.zeros(3), torch.eye(3), 0
    for step in x.unbind(0):
        mean, covariance = dynamics @ mean, dynamics @ covariance @ dynamics.T + noise.exp().diag()
        off, spread = step - observation @ mean, observation @ covariance @ observation.T + error.exp().diag()
        gain = torch.linalg.solve(spread, observation @ covariance).T
        total = total + (torch.logdet(spread) + off @ torch.linalg.solve(spread, off)) / 2
        mean, covariance = mean + gain @ off, covariance - gain @ observation @ covariance
    return total


@function(params=((8,), (8, 8)), x=(64, 8))
def gaussian_of_a_covariance(params, x):
    mean, root = params
    normal = torch.distributions.MultivariateNormal(mean, root @ root.T + torch.eye(8), validate_args=False)
    return -normal.log_prob(x)


@function(params=((3, 4, 4), (3, 4)), x=(64, 4))
def normalising_flow(params, x):
    total = 0
    for matrix, shift in zip(*params, strict=True):
        x = matrix @ x + shift
        total = total + torch.linalg.slogdet(matrix)[1] + (1 - x.tanh().square()).log().sum()
        x = x.tanh()
    return x.square().sum() / 2 - total


@function(params=((12, 2), (12,)), x=(16, 12))
def gaussian_process(params, x):
    places, mean = params
    kernel = (places[:, None] - places).square().sum(2).neg().exp() + torch.eye(12)
    root = torch.linalg.cholesky(kernel)
    return torch.linalg.solve_triangular(root, (x - mean)[:, None], upper=False).square().sum() / 2 + root.diagonal().log().sum()


@function(params=((64, 8), (64,), (64, 64), (64,), (2, 64), (2,), (2,)), x=(64, 12))
def gaussian_policy(params, x):
    *layers, deviation = params
    observed, action, advantage, before = x.split((8, 2, 1, 1))
    hidden = F.linear(F.linear(observed, *layers[:2]).tanh(), *layers[2:4]).tanh()
    policy = torch.distributions.Normal(F.linear(hidden, *layers[4:]), deviation.exp(), validate_args=False)
    ratio = (policy.log_prob(action).sum() - before).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() - 0.01 * policy.entropy().sum()


@function(params=((16, 16), (2, 16), (16, 2), (16, 1)), x=(32, 16))
def merged_low_rank_update(params, x):
    base, a, b, size = params
    weight = base + b @ a
    return F.linear(x, size * weight / weight.norm(dim=1, keepdim=True)).square().sum()


@function(params=((16, 16), (1, 1)), x=(32, 16))
def fake_quantised_weight(params, x):
    weight, step = params[0] / params[1].abs(), params[1].abs()
    return F.linear(x, (weight + (weight.round().clamp(-8, 7) - weight).detach()) * step).square().sum()


@function(params=((6,),), x=(32, 7))
def stick_breaking(params, x):
    parts = params[0].sigmoid()
    left = F.pad((1 - parts).cumprod(0), (1, 0), value=1.0)
    return (x * (left * F.pad(parts, (0, 1), value=1.0)).log()).sum()


@function(params=((4,), (4,), (4,)), x=(32, 4))
def student_t(params, x):
    freedom, mean, deviation = params
    return -torch.distributions.StudentT(freedom.exp(), mean, deviation.exp()).log_prob(x).sum()


@function(params=((64, 32),), x=(64, 400, 32))
def edges_of_its_own(params, x):
    source, target = (x[:, :2].abs() * 100).long().remainder(100).unbind(1)
    return torch.zeros_like(x[:100]).index_add(0, target, (x @ params[0].T @ params[0])[source]).relu().square().mean()


@function(params=((64, 64),), x=(256, 64))
def quantile_of_outputs(params, x):
    return (params[0] @ x).quantile(0.3)


@function(params=((512,),), x=(64, 512))
def short_time_spectrum(params, x):
    return torch.stft(params[0] * x, 64, 32, window=torch.ones(64), return_complex=True).abs().square().mean()


@function(params=((16, 16),), x=(64, 40, 16))
def connectionist_temporal_classification(params, x):
    logits = (x @ params[0]).log_softmax(-1)
    return F.ctc_loss(logits, torch.arange(1, 9), torch.tensor(40), torch.tensor(8))


@function(params=((6, 32),), x=(64, 32))
def affine_transformer(params, x):
    return F.affine_grid((params[0] @ x).view(1, 2, 3), (1, 1, 16, 16), align_corners=False).sin().mean()


# Small models, whose layers have rules that take more time than the products of so few numbers.


@function(params=((8, 4), (8,), (8, 4), (8, 4), (8,), (3, 8)), x=(16, 32, 8))
def state_space_kernel(params, x):
    """A diagonal state space model as a convolution: 8 channels with 4 states each, 32 steps."""
    decay, step, inner, outer, skip, head = params
    rates, steps = -decay.exp() * step.exp()[:, None], torch.arange(len(x), device=x.device)
    kernel = (inner * outer)[:, :, None].mul((rates[:, :, None] * steps).exp()).sum(1)
    size = 2 * len(x)
    output = torch.fft.irfft(torch.fft.rfft(kernel, size) * torch.fft.rfft(x.T, size), size)[:, : len(x)].T
    return F.linear(F.gelu(output + x * skip), head).square().mean()


@function(params=((32, 4), (32,), (32, 32), (32,), (1, 32)), x=(16, 2, 4))
def hamiltonian(params, x):
    """A network's gradient moves a state of 2 positions and 2 momenta."""
    first, bias, second, other, head = params
    state, change = x.unbind(0)

    def energy(z):
        return F.linear(F.linear(F.linear(z, first, bias).tanh(), second, other).tanh(), head).sum()

    forces, velocities = torch.func.grad(energy)(state).chunk(2)
    return (torch.cat([velocities, -forces]) - change).square().sum()


@function(params=((3,), (16,), (8,), (8, 8), (8,), (16, 3), (16, 16), (16, 8)), x=(16, 12, 3))
def memory_cell(params, x):
    """A Legendre memory unit of 16 states and a memory of 8, over 12 steps."""
    read, recall, remember, turn, write, inputs, states, memories = params
    state, memory = torch.zeros(16, device=x.device), torch.zeros(8, device=x.device)
    for step in x.unbind(0):
        memory = turn @ memory + write * (read @ step + recall @ state + remember @ memory)
        state = (inputs @ step + states @ state + memories @ memory).tanh()
    return state.square().sum()


@function(params=((5, 12), (5, 5)), x=(16, 10, 12))
def conditional_random_field(params, x):
    """The normaliser of a chain of 10 tags out of 5, less the score of one chain."""
    emit, move = params
    scores = F.linear(x, emit)
    alpha = scores[0]
    for own in scores[1:].unbind(0):
        alpha = (alpha[:, None] + move).logsumexp(0) + own
    return alpha.logsumexp(0) - scores[:, 0].sum() - (len(x) - 1) * move[0, 0]


@function(params=((32,), (32,), (96, 32), (32, 32), (32,), (32,), (64, 32), (32, 64)), x=(8, 16, 32))
def small_transformer_block(params, x):
    """Width 32, 4 heads, 16 tokens."""
    gain, bias, mix, out, gain2, bias2, up, down = params
    query, key, value = F.linear(F.layer_norm(x, (32,), gain, bias), mix).unflatten(1, (3, 4, 8)).permute(1, 2, 0, 3)
    x = x + F.linear(F.scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1), out)
    return (x + F.linear(F.gelu(F.linear(F.layer_norm(x, (32,), gain2, bias2), up)), down)).square().mean()


@function(params=((100,), (50,), (50,)), x=(32, 3))
def item_response(params, x):
    """Answers of 100 people to 50 questions, each answer a sample."""
    abilities, slopes, difficulties = params
    person, item = (x[:2].abs() * 100).long().unsqueeze(1) % torch.tensor([[100], [50]])
    return F.softplus(-x[2] * (slopes[item] * (abilities[person] - difficulties[item]))).sum()


@function(params=((100, 8), (50, 8), (100,), (50,)), x=(32, 3))
def matrix_factorisation(params, x):
    """Ratings of 50 items by 100 people, each rating a sample."""
    people, items, leniences, qualities = params
    person, item = (x[:2].abs() * 100).long().unsqueeze(1) % torch.tensor([[100], [50]])
    return ((people[person] * items[item]).sum(1) + leniences[person] + qualities[item] - x[2]).square().sum()


def main() -> None:
    args = options(__doc__, functions=",".join(FUNCTIONS), repeats=15, threads=4, device="cpu").parse_args()
    set_up(args)
    rows = {name: measure(name, args) for name in args.functions.split(",")}
    write(args, bar=BAR, results=rows)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    fn, shapes, shape = FUNCTIONS[name]
    torch.manual_seed(0)
    params = tuple(torch.randn(s, device=args.device) / s[-1] ** 0.5 for s in shapes)
    x = torch.randn(shape, device=args.device)
    methods = {
        "vmap_grad": vmap(grad(fn), in_dims=(None, 0)),
        "psg_grad": psg.per_sample_grad(fn),
        "psg_norm": psg.per_sample_norm(fn),
        "psg_clip": psg.clipped_grad(fn, 1.0),
    }
    for got, expected in zip(methods["psg_grad"](params, x), methods["vmap_grad"](params, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    calls = {method: lambda call=call: call(params, x) for method, call in methods.items()}
    medians = median_ms(calls, args)
    base = medians["vmap_grad"]
    ratios = {method: round(ms / base, 2) for method, ms in medians.items()}
    print(f"{name:<37} {base:8.2f} ms " + " ".join(f"{m} {r:.2f}" for m, r in ratios.items() if m != "vmap_grad"), flush=True)
    return {"ms": round(base, 3), "rung": psg.explain(fn)(params, x).rung, "ratios": ratios}


if __name__ == "__main__":
    main()
