"""Functions of a whole batch (method="batch"), each against the loop over batches of one."""

import contextlib
import dataclasses
import itertools
import operator
import random
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import psg
from psg._batch import _exchange
from psg._batch._owners import codes, owners, sets_apart
from psg._torch import _functions
from psg.rules import _registry
from psg.testing import assert_trees_close, loop_grad, reference_norm, reference_weighted_sum

WIDTH, VOCABULARY = 6, 11


class Experts(nn.Module):
    """A mixture of experts that routes every token to one of them, by data-dependent indices."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        hidden = self.embedding(ids) + self.positions[:, : ids.shape[1]]
        tokens = hidden.view(-1, WIDTH)
        routing = self.gate(tokens).softmax(-1)
        chosen = routing.argmax(-1)
        mixed = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(tokens[rows]).tanh() * routing[rows, i, None])
        return self.head(self.scale * (tokens + mixed)).view(*ids.shape, VOCABULARY)


def detached(module):
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def token_losses(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def experts(n, device):
    module = Experts().to(device)
    ids, targets = (torch.randint(VOCABULARY, (n, 5), device=device) for _ in range(2))
    return lambda p, ids, y: token_losses(functional_call(module, p, (ids,)), y), detached(module), (ids, targets)


def images(n, device):
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.InstanceNorm2d(4, affine=True), nn.Flatten(),
        nn.Linear(36, 5), nn.LayerNorm(5),
    ).to(device)  # fmt: skip
    batch = torch.randn(n, 2, 5, 5, device=device), torch.randint(5, (n,), device=device)
    return lambda p, x, y: F.cross_entropy(functional_call(module, p, (x,)), y, reduction="none"), detached(module), batch


def shuffled(n, device):
    """Rows that are not in the order of the samples, and a weight used twice."""

    def fn(p, x):
        order = torch.randperm(3 * len(x), generator=torch.Generator().manual_seed(1)).to(device)
        rows = F.linear(x.reshape(-1, WIDTH)[order], p["w"], p["b"]).tanh()
        return F.linear(rows[order.argsort()].reshape(x.shape), p["w"]).square().sum((1, 2))

    params = {"w": torch.randn(WIDTH, WIDTH, device=device), "b": torch.randn(WIDTH, device=device)}
    return fn, params, (torch.randn(n, 3, WIDTH, device=device),)


def time_first(n, device):
    def fn(w, x):
        return (x.transpose(0, 1) @ w).tanh().sum((0, 2))

    return fn, torch.randn(WIDTH, 2, device=device), (torch.randn(n, 3, WIDTH, device=device),)


def derived(n, device):
    """Low-rank and transposed weights: computed once; their gradients are pulled back to the parameters."""

    def fn(p, x):
        return F.linear(x @ p["t"].T, p["b"] @ p["a"]).sin().sum(1)

    shapes = {"a": (2, WIDTH), "b": (3, 2), "t": (WIDTH, WIDTH)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    return fn, params, (torch.randn(n, WIDTH, device=device),)


def projection(n, device):
    """addmm, and a parameter that is not used."""

    def fn(p, x):
        return torch.addmm(p["b"], x, p["w"]).tanh().sum(1)

    params = {"w": torch.randn(WIDTH, 2, device=device), "b": torch.randn(2, device=device), "idle": torch.ones(3, device=device)}
    return fn, params, (torch.randn(n, WIDTH, device=device),)


def positions(n, device):
    """Position tables looked up once for all samples, in both shapes, beside a table looked up by tokens; a norm of positions alone."""

    def fn(p, ids):
        steps = torch.arange(ids.shape[1], device=device)
        hidden = F.embedding(ids, p["tokens"]) + F.layer_norm(F.embedding(steps[None], p["first"]), (WIDTH,), p["gain"])
        hidden += F.embedding(steps, p["second"])
        return F.linear(hidden, p["tokens"]).tanh().sum((1, 2))

    shapes = {"tokens": (VOCABULARY, WIDTH), "first": (7, WIDTH), "second": (7, WIDTH), "gain": (WIDTH,)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    return fn, params, (torch.randint(VOCABULARY, (n, 5), device=device),)


def lookups(n, device):
    """Parameters indexed by data: rows of a table, and one matrix per expert."""

    def fn(p, ids, x):
        experts = p["experts"][ids % 3 - 3]  # negative indices
        mixed = torch.einsum("nti,ntio->nto", x, experts) + p["rows"][ids] + p["rows"][torch.arange(x.shape[1], device=device)]
        return (mixed * p["rows"].index_select(0, ids.flatten()).view(mixed.shape)).tanh().sum((1, 2)) + p["bias"][ids].sum((1, 2))

    shapes = {"experts": (3, WIDTH, 4), "rows": (VOCABULARY, 4), "bias": (VOCABULARY, 1)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    batch = torch.randint(VOCABULARY, (n, 5), device=device), torch.randn(n, 5, WIDTH, device=device)
    return fn, params, batch


def pairs(n, device):
    """Parameters indexed by several tensors: of one shape, of shapes that broadcast, among other indices, and at the end."""

    def fn(p, i, j, x):
        steps = torch.arange(4, device=device)
        scores = x * p["w"][i, j] - p["w"].log_softmax(1)[i[:, :1], j] + p["deep"][i, steps, j[:, :1].clamp(max=0)]
        between = p["deep"][i, :, j].sin().sum(2) + p["deep"][i, -1, j].cos() + p["w"][i, ...].tanh().sum(2)
        return (scores * between).sum(1) + (p["deep"][..., j].sin().movedim(2, 0) * x[:, None, None]).sum((1, 2, 3))

    params = {"w": torch.randn(5, 3, device=device), "deep": torch.randn(5, 4, 3, device=device)}
    ids = (torch.randint(-size, size, (n, 4), device=device) for size in (5, 3))
    return fn, params, (*ids, torch.randn(n, 4, device=device))


def converted(n, device):
    """Parameters, and data, that take the dtype, device or shape of the other."""

    def fn(p, x):
        scaled = x.float().to(p["w"]) * p["b"].to(x).view_as(x[0, 0]) * p["c"].reshape_as(x[0, :, :1])
        return (F.linear(scaled.float().type_as(p["w"]), p["w"].to(x, copy=True)) + p["b"].type_as(x)).tanh().sum((1, 2))

    params = {"w": torch.randn(WIDTH, WIDTH, device=device), "b": torch.randn(WIDTH, device=device), "c": torch.randn(5, device=device)}
    return fn, params, (torch.randn(n, 5, WIDTH, device=device),)


def class_tokens(n, device):
    """Parameters repeated for every sample, by each op that can do so; one is repeated for every head instead."""

    def fn(p, x):
        tokens = p["a"].expand(len(x), -1, -1), p["b"].repeat(len(x), 1, 1), p["c"].expand(len(x), 1, WIDTH), p["a"].tile(len(x), 1, 1)
        hidden = torch.cat([*tokens, x], 1)
        heads = torch.stack([hidden, hidden.cos()], 1) * p["head"].expand(2, 1, WIDTH)
        return F.linear(heads, p["w"]).tanh().sum((1, 2, 3)) + (p["first"].expand(len(x), -1) * x[:, 0]).sum(1)

    shapes = {"a": (1, 1, WIDTH), "b": (1, 1, WIDTH), "c": (WIDTH,), "head": (1, 1, WIDTH), "w": (3, WIDTH), "first": (1, WIDTH)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    return fn, params, (torch.randn(n, 3, WIDTH, device=device),)


def broadcasts(n, device):
    """Sums, differences, products and quotients with parameters of every shape, in place too; a bias of attention scores."""

    def fn(p, x):
        hidden = p["scale"] * (x - p["shift"][:, None]) / p["temperature"].exp() + p["shift"][:, None]
        hidden = 1 - hidden
        hidden *= p["gain"]
        hidden += p["scale"]
        hidden = p["gain"] / (3 + hidden.square()) + (p["gain"] - hidden)
        out = F.scaled_dot_product_attention(hidden, x, hidden.sin(), attn_mask=p["bias"][None], is_causal=False)
        return (out * p["scale"].expand_as(out)).sum((1, 2))

    shapes = {"scale": (1, 4, 1), "shift": (4,), "temperature": (), "gain": (1, WIDTH), "bias": (4, 4)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    return fn, params, (torch.randn(n, 4, WIDTH, device=device),)


def mask_tokens(n, device):
    """A parameter in place of masked entries, on either side of `where`, in all its forms; PReLU with one slope and one a channel."""

    def fn(p, x):
        mask = (x[..., :1] > 0) & (x[..., 1:2] > -1)
        hidden = torch.where(mask, p["token"], F.linear(x, p["w"]))
        hidden = hidden.where(~mask.roll(1, 1), p["other"][None]) + torch.where(mask, p["token"], p["other"])
        hidden = F.prelu(F.prelu(hidden, p["slope"]), p["slopes"]) + F.prelu(hidden.flatten(1), p["slope"]).view_as(hidden)
        return torch.where(mask, hidden, 0.0).sin().sum((1, 2))

    shapes = {"token": (WIDTH,), "other": (1, WIDTH), "w": (WIDTH, WIDTH), "slope": (1,), "slopes": (4,)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    return fn, params, (torch.randn(n, 4, WIDTH, device=device),)


def spectrum(n, device):
    """Real parameters that meet complex data."""

    def fn(p, x):
        shifted = (torch.fft.fft(x * p["a"]) * p["a"] + p["b"]).imag
        return (torch.fft.irfft(torch.fft.rfft(x) * p["gain"], n=WIDTH) + shifted).sin().sum(1)

    params = {
        "gain": torch.randn(WIDTH // 2 + 1, device=device),
        "a": torch.randn(WIDTH, device=device),
        "b": torch.randn(WIDTH, device=device),
    }
    return fn, params, (torch.randn(n, WIDTH, device=device),)


def frozen(n, device):
    """Parameters that meet what is frozen: merged low ranks, masks, anchors, statistics, positions, gates, a prefix."""
    generator = torch.Generator().manual_seed(0)
    base, mask, anchor, table, prefix = (torch.randn(5, WIDTH, generator=generator, dtype=torch.float64).to(device) for _ in range(5))
    gate = torch.rand(WIDTH, generator=generator, dtype=torch.float64).to(device)
    steps = torch.arange(5, device=device)

    def fn(p, x):
        hidden = x + (table + p["shift"]) * p["row"] + F.linear(table, p["square"]) + F.layer_norm(base, (WIDTH,), p["gain"])
        hidden = F.linear(hidden, base + p["up"] @ p["down"]).tanh() + F.linear(hidden, p["w"] * (mask > 0)).sin()
        hidden = hidden @ (p["w"] * base[:, :1] / (gate + 1).sqrt()).sin()
        hidden = hidden @ torch.cat([torch.where(mask > 0, p["w"], base), torch.lerp(prefix, p["w"], 0.3)]).T
        hidden = hidden * torch.maximum(p["row"], gate[:5, None]) + (gate * p["shift"]).sum() + p["w"][steps, steps].sum()
        penalty = (p["w"] - anchor).square().sum() + F.mse_loss(p["up"], base[:, :2]) + (anchor - p["w"]).abs().amax()
        return hidden.square().mean((1, 2)) + 0.1 * penalty

    shapes = {"up": (5, 2), "down": (2, WIDTH), "w": (5, WIDTH), "shift": (WIDTH,), "row": (5, 1), "gain": (WIDTH,), "square": (6, WIDTH)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    return fn, params, (torch.randn(n, 5, WIDTH, device=device),)


PROBLEMS = [
    frozen,
    spectrum,
    positions,
    lookups,
    pairs,
    converted,
    class_tokens,
    mask_tokens,
    broadcasts,
    experts,
    images,
    shuffled,
    time_first,
    derived,
    projection,
]
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.__name__)


def one(fn):
    """From a function of a batch to the function of one sample."""
    return lambda params, *sample: fn(params, *(x[None] for x in sample))[0]


@each_problem
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_gradients_equal_the_loop(problem, n, device):
    fn, params, batch = problem(n, device)
    found_values, found = psg.per_sample_value_and_grad(fn, method="batch")(params, *batch)
    assert_trees_close(found, loop_grad(one(fn))(params, *batch))
    if n:
        assert_trees_close(found_values, fn(params, *batch))


@each_problem
@pytest.mark.parametrize("n", [0, 1, 5])
def test_reductions_equal_the_loop(problem, n, device):
    fn, params, batch = problem(n, device)
    grads = loop_grad(one(fn))(params, *batch)
    norms = reference_norm(grads)
    assert_trees_close(psg.per_sample_norm(fn, method="batch")(params, *batch), norms)
    clip_norm = float(norms.median()) if n else 1.0
    out = psg.clipped_grad(fn, clip_norm, method="batch")(params, *batch)
    expected = reference_weighted_sum(grads, (clip_norm / norms).clamp(max=1))
    assert_trees_close(out.grads, expected, atol=1e-11, per_sample=False)


@each_problem
def test_check_passes_and_explain_tells_the_rung(problem, device):
    fn, params, batch = problem(4, device)
    assert psg.check(fn, method="batch")(params, *batch).samples == 4
    assert psg.explain(fn, method="batch")(params, *batch).rung == "batch"


@given(seed=st.integers(0, 10_000), n=st.integers(1, 6), size=st.integers(1, 7))
def test_chunks_change_nothing(seed, n, size):
    torch.manual_seed(seed)
    fn, params, batch = experts(n, "cpu")
    whole = psg.per_sample_grad(fn, method="batch")(params, *batch)
    assert_trees_close(psg.per_sample_grad(fn, method="batch", chunk_size=size)(params, *batch), whole)


@pytest.mark.parametrize("n", [1, 3])
def test_a_parameter_of_each_samples_own_is_an_error(n, device):
    w, x = torch.randn(2, device=device), torch.randn(n, 2, device=device)
    with pytest.raises(psg.InputError, match=r"x has a dimension of samples; this method differentiates only tensors that"):
        psg.per_sample_grad(lambda w, x: (w * x).sum(1), argnums=1, in_dims=(None, 0), method="batch")(w, x)


def test_aux_and_containers(device):
    fn, params, (x,) = projection(4, device)

    @dataclasses.dataclass
    class Rows:
        x: torch.Tensor

    def with_aux(p, rows):
        return fn(p, rows.x), {"twice": 2 * rows.x, "name": "rows"}

    grads, aux = psg.per_sample_grad(with_aux, method="batch", has_aux=True)(params, Rows(x))
    assert_trees_close(grads, loop_grad(one(fn))(params, x))
    assert torch.equal(aux["twice"], 2 * x) and aux["name"] == "rows"


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("few", [lambda x: x[:1], lambda x: x.mean(), lambda x: torch.cat([x, x])], ids=["one row", "mean", "twice"])
def test_aux_that_does_not_have_the_samples_in_dim_0(few, chunk_size, device):
    fn, params, (x,) = projection(4, device)
    transform = psg.per_sample_grad(lambda p, x: (fn(p, x), [x, few(x)]), has_aux=True, method="batch", chunk_size=chunk_size)
    with pytest.raises(psg.InputError, match=rf"expected the {chunk_size or 4} samples in dim 0 of .* in aux, got one of shape \("):
        transform(params, x)


def test_differentiable(device):
    fn, params, batch = time_first(4, device)
    results = []
    for function, method in ((fn, "batch"), (one(fn), "vmap")):
        w = params.clone().requires_grad_()
        psg.per_sample_norm(function, method=method)(w, *batch).sum().backward()
        results.append(w.grad)
    assert_trees_close(*results, per_sample=False)


def test_rows_shared_by_samples_are_found_out(device):
    def mixed(p, x):
        rows = F.linear(x, p["w"])
        return (rows - rows.mean(0)).square().sum(1)

    def opposed(p, x):
        rows = F.linear(x, p["w"])
        return (rows - rows.flip(0)).sum(1)  # the sum of the losses depends on no row

    def alternating(p, x):
        rows = F.linear(x, p["w"][:1])[:, 0]
        return rows.roll(1) + rows.roll(-1)  # two losses depend on each row, which is one number wide

    params, x = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(5, WIDTH, device=device)
    for fn in (mixed, opposed, alternating):
        with pytest.raises(psg.StateError, match=r"linear has a row on which more than one loss depends"):
            psg.per_sample_grad(fn, method="batch")(params, x)


def towers(p, x, ids):
    """A softmax over the batch: to each sample, the table rows of the others act as weights of a linear layer."""
    return F.cross_entropy(p["left"][ids] @ p["right"][ids].T, torch.arange(len(ids), device=ids.device), reduction="none")


def centred(p, x, ids):
    """Other samples change each sample's row, though no loss but its own depends on that row."""
    return F.linear(x - x.mean(0), p["right"]).square().sum(1)


def slightly_centred(p, x, ids):
    hidden = F.linear(x + 1, p["right"])
    share = 1e-6 if x.dtype == torch.float64 else 0.03
    return (hidden - share * hidden.detach().mean(0)).square().sum(1)


def weighted_by_counts(p, x, ids):
    return F.linear(x, p["right"]).square().sum(1) / ids.bincount()[ids]


def paired(p, x, ids):
    """Adjacent samples meet in pairs, as two augmentations of one image might."""
    pairs = x[: len(x) // 2 * 2].unflatten(0, (-1, 2))
    return F.linear(torch.cat([(pairs - pairs.mean(1, keepdim=True)).flatten(0, 1), x[len(x) // 2 * 2 :]]), p["right"]).square().sum(1)


def neighbours(p, x, ids):
    return F.linear(x - x.roll(1, 0), p["right"]).square().sum(1)


def small(p, x, ids):
    return 1e-20 * centred(p, x, ids)


@pytest.mark.parametrize("n", [2, 3, 16])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("fn", [towers, centred, slightly_centred, weighted_by_counts, paired, neighbours, small])
def test_samples_that_meet_where_no_gradient_tells_are_found_out(fn, dropout, n, device):
    params = {"left": torch.randn(n, 4, device=device), "right": torch.randn(n, 4, device=device)}
    ids = torch.arange(n, device=device) % (2 if fn is weighted_by_counts else n)
    ids = ids.sort().values if fn is weighted_by_counts and n > 3 else ids
    x = torch.randn(n, 4, device=device)

    def dropped(p, x, ids):
        return F.dropout(fn(p, x, ids)[:, None].expand(n, 3), 0.3).sum(1) if dropout else fn(p, x, ids)

    with pytest.raises(psg.StateError, match="losses of some samples change when others are exchanged"):
        psg.clipped_grad(dropped, 1.0, method="batch")(params, x, ids)


def with_zeros(w, x):
    """A head that is zero before the first step: so are the derivatives of its inputs."""
    return F.softplus((x - x.mean(0)) @ (w - w.detach()))


def surrogate(w, x):
    """A policy gradient with the mean reward as its baseline."""
    log_prob, advantage = x @ w, x[:, 0] - x[:, 0].mean()
    return (log_prob - log_prob.detach()) * advantage


def with_a_gradient_scale(w, x):
    scores, scale = x @ w, 1 / x.abs().sum()
    return (scores * scale + (scores - scores * scale).detach()).square()


def with_a_hook(w, x):
    scores, scale = x @ w, 1 / x.abs().sum()
    if scores.requires_grad:
        scores.register_hook(lambda cotangent: cotangent * scale)
    return scores.square()


class _Scaled(torch.autograd.Function):
    """The samples meet in the backward pass alone."""

    @staticmethod
    def forward(ctx, scores, scale):
        ctx.scale = scale
        return scores.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.scale, None


def with_a_function(w, x):
    return _Scaled.apply(x @ w, 1 / x.abs().sum()).square()


@pytest.mark.parametrize("n", [2, 3, 8, 16, 17, 40])
@pytest.mark.parametrize("fn", [with_zeros, surrogate, with_a_gradient_scale, with_a_hook, with_a_function])
def test_samples_that_meet_in_gradients_alone_are_found_out(fn, n, device):
    """The losses do not tell."""
    with pytest.raises(psg.StateError, match="the gradients of some samples change when others are exchanged"):
        psg.clipped_grad(lambda w, x: fn(w, x), 1.0, method="batch")(
            torch.randn(WIDTH, device=device), torch.randn(n, WIDTH, device=device)
        )


@pytest.mark.parametrize("n", [2, 16, 40])
def test_an_adapter_that_is_zero_hides_no_meeting(n, device):
    """Both factors of a low-rank update, one of them zero, with samples that meet and without."""
    params = {"a": torch.randn(2, WIDTH, device=device), "b": torch.zeros(WIDTH, 2, device=device)}
    x, y = torch.randn(n, WIDTH, device=device), torch.randint(WIDTH, (n,), device=device)

    def fn(p, x, y, center):
        return F.cross_entropy(x + (x - center(x)) @ p["a"].T @ p["b"].T, y, reduction="none")

    grads = psg.per_sample_grad(partial(fn, center=lambda x: x[..., :1]), method="batch")(params, x, y)
    assert_trees_close(grads, loop_grad(one(partial(fn, center=lambda x: x[..., :1])))(params, x, y))
    with pytest.raises(psg.StateError, match="the gradients of some samples change"):
        psg.per_sample_grad(partial(fn, center=lambda x: x.mean(0)), method="batch")(params, x, y)


def test_gradients_are_compared_when_a_function_runs_on_more_samples_than_before(device):
    """And not at every call."""
    counts = []

    def fn(w, x):
        counts.append(len(x))
        return (x @ w).square()

    transform, w = psg.per_sample_norm(fn, method="batch"), torch.randn(WIDTH, device=device)
    for n, runs in ((3, 1 + 1 + 3), (3, 1 + 3), (2, 1 + 2), (5, 1 + 1 + 5), (4, 1 + 4)):
        counts.clear()
        transform(w, torch.randn(n, WIDTH, device=device))
        assert counts == [n] * runs


def test_frozen_weights_of_eight_bits_do_not_blur_the_comparison(device):
    frozen = torch.randn(WIDTH, WIDTH, device=device).to(torch.float8_e4m3fn)
    w, x = torch.randn(WIDTH, 3, device=device) / 5, torch.randn(16, WIDTH, device=device)

    def fn(w, x):
        return ((x - x.mean(0)) @ frozen.to(x.dtype) @ w).logsumexp(1)

    with pytest.raises(psg.StateError, match="losses of some samples change when others are exchanged"):
        psg.per_sample_grad(fn, method="batch")(w, x)


NOISY = {
    "where a gate is open": lambda x: x - x.mean(0) if torch.rand((), device=x.device) < 0.5 else x,
    "where entries are swapped": lambda x: torch.where(torch.rand_like(x) < 0.3, x.roll(1, 0), x),
    "in the scale of noise": lambda x: x + (torch.rand_like(x) - 0.5) * x.std(0),
    "in the scale of normal noise": lambda x: x + torch.randn_like(x) * x.amax(0),
    "in the scale of noise in place": lambda x: x + torch.empty_like(x).normal_(0, 2) * x.std(0) + torch.empty_like(x).uniform_(-1, 1),
    "in the scale of noise around a mean": lambda x: x + torch.normal(torch.ones_like(x), 2.0) * x.std(0),
}


@pytest.mark.parametrize("n", [2, 7, 16])
@pytest.mark.parametrize("name", NOISY)
def test_samples_that_meet_by_chance_are_found_out(name, n, device):
    """And never run wrong: where the gate is closed, they do not meet."""
    w, found = torch.randn(WIDTH, device=device), 0
    for seed in range(6):
        x = torch.randn(n, WIDTH, device=device)

        def fn(w, x):
            return (NOISY[name](x) @ w).square()

        torch.manual_seed(seed)
        from_each = torch.autograd.functional.jacobian(partial(fn, w), x).abs().sum(2)
        meets = bool((from_each - from_each.diagonal().diag()).any())
        torch.manual_seed(seed)
        with pytest.raises(psg.StateError, match="losses of some samples change") if meets else contextlib.nullcontext():
            psg.per_sample_grad(fn, method="batch")(w, x)
        found += meets
    assert found


def test_what_is_compared_draws_the_same_and_leaves_nothing_behind(device):
    """The comparison redraws the batch's noise and undoes its write into an input. A function whose values change is not compared."""
    params, x, scale = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(8, WIDTH, device=device), torch.ones(3, device=device)
    count = iter(range(1000))

    def noisy(p, x, scale):
        return F.dropout(F.linear(x, p["w"]), 0.5).mul(scale.mul_(2)).square().sum(1)

    def unsteady(p, x, scale):
        return noisy(p, x, scale) * next(count)

    gradients = []
    for fn in (noisy, unsteady):
        torch.manual_seed(1)
        with contextlib.nullcontext() if fn is noisy else pytest.warns(UserWarning, match="returns other losses when it is called again"):
            gradients.append(psg.per_sample_grad(fn, in_dims=(None, 0, None), method="batch")(params, x, scale)["w"])
        after = torch.rand(3)
        torch.manual_seed(1)
        twice = scale.clone()
        F.dropout(x.new_ones(8, 3), 0.5)  # drawn once, though the first call wrote into its input, so that psg called again with a copy
        assert torch.equal(torch.rand(3), after)
        assert torch.equal(scale, twice) and torch.equal(scale, torch.ones_like(scale))
    assert gradients[0].isfinite().all()


NOISE = {
    "dropout": lambda rows: F.dropout(rows, 0.3),
    "attention by name": lambda rows: F.scaled_dot_product_attention(*[rows[:, None, :, None]] * 3, dropout_p=0.3).flatten(1),
    "attention by position": lambda rows: F.scaled_dot_product_attention(*[rows[:, None, :, None]] * 3, None, 0.3).flatten(1),
    "rand": lambda rows: rows + torch.rand(rows.shape, device=rows.device),
    "rand_like": lambda rows: rows + torch.rand_like(rows),
    "randn": lambda rows: rows * torch.randn(rows.shape, device=rows.device),
    "randn_like": lambda rows: rows * torch.randn_like(rows),
    "normal": lambda rows: torch.normal(rows.detach(), 1.0) * rows,
    "normal_": lambda rows: rows * torch.empty_like(rows).normal_(),
    "uniform_": lambda rows: rows * torch.empty_like(rows).uniform_(),
}


@pytest.mark.parametrize("order", ["by length", "by expert"])
@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_behind_an_order_that_depends_on_data(noise, order, device):
    """In another batch the noise falls on other samples: that is no mixing of samples."""

    def fn(w, x):
        groups = [x[:, 0].argsort()] if order == "by length" else [((x[:, 0] > 0) == flag).nonzero()[:, 0] for flag in (True, False)]
        output = x.new_zeros(len(x))
        for rows in groups:
            output = output.index_add(0, rows, noise(F.linear(x[rows], w).tanh()).square().sum(1))
        return output

    w = torch.randn(3, WIDTH, device=device)
    for _ in range(10):
        gradients = psg.per_sample_grad(fn, method="batch")(w, torch.randn(8, WIDTH, device=device))
        assert gradients.shape == (8, *w.shape) and gradients.isfinite().all()


@pytest.mark.parametrize("by_name", [False, True])
def test_samples_that_meet_before_an_attention_with_dropout(by_name, device):
    def fn(w, x):
        q = F.linear(x - x.mean(0), w)
        mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3) if by_name else F.scaled_dot_product_attention(q, q, q, None, 0.3)
        return mixed.square().sum((1, 2))

    with pytest.raises(psg.StateError, match="losses of some samples change when others are exchanged"):
        psg.per_sample_grad(fn, method="batch")(torch.randn(3, WIDTH, device=device), torch.randn(8, 4, WIDTH, device=device))


ORDERS = {
    "randperm": lambda n, device: torch.randperm(n, device=device),
    "argsort": lambda n, device: torch.rand(n, device=device).argsort(),
    "of a matrix": lambda n, device: torch.rand(n, 3, device=device).argsort(dim=0)[:, 0],
    "sort": lambda n, device: torch.sort(torch.randn(n, device=device), 0).indices,
    "topk": lambda n, device: torch.empty(n, device=device).uniform_().topk(n).indices,
}


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("share", ["fixed", "numpy", "python"])
def test_samples_that_meet_at_random_are_found_out_whatever_is_drawn(share, order, n, device):
    def mixup(w, x):
        own = {"fixed": lambda: 0.7, "numpy": lambda: np.random.uniform(0.2, 0.8), "python": lambda: random.uniform(0.2, 0.8)}[share]()
        return F.linear(own * x + (1 - own) * x[order(n, device)], w).square().sum(1)

    w, x = torch.randn(3, WIDTH, device=device), torch.randn(n, WIDTH, device=device)
    for _ in range(20):
        with pytest.raises(psg.StateError, match="losses of some samples change when others are exchanged"):
            psg.per_sample_norm(mixup, method="batch")(w, x)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_rows_that_meet_at_random_are_found_out(n, device):
    def fn(w, x):
        rows = x.flatten(0, 1)
        return F.linear(rows + rows[torch.randperm(len(rows), device=device)], w).square().view(n, -1).sum(1)

    for _ in range(10):
        with pytest.raises(psg.StateError, match="losses of some samples change when others are exchanged"):
            psg.per_sample_norm(fn, method="batch")(torch.randn(3, WIDTH, device=device), torch.randn(n, 4, WIDTH, device=device))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", [2, 7, 8])
def test_random_orders_within_samples_or_undone_are_accepted(n, device):
    """Tokens in a random order of each sample's own, as in a masked autoencoder, and samples in one that is undone; NumPy's factor."""

    def fn(p, x):
        tokens = torch.rand(n, 4, device=device).argsort(1)[:, :2]
        kept = x.gather(1, tokens[:, :, None].expand(-1, -1, WIDTH))
        order = torch.randperm(n, device=device)
        return np.random.uniform(1, 2) * F.linear(kept[order], p["w"]).sin()[order.argsort()].sum((1, 2))

    params, x = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(n, 4, WIDTH, device=device)

    def seeded(seed, grads, *args):
        torch.manual_seed(seed)
        np.random.seed(seed)
        return grads(*args)

    for seed in range(5):
        found = seeded(seed, psg.per_sample_grad(fn, method="batch"), params, x)
        assert_trees_close(found, seeded(seed, of_each_loss, fn, params, x))


def test_derivatives_for_data_inside(device):
    def fn(w, x):
        z = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(z.sin().square().sum(), z)
        return F.linear(x + 0.1 * slope.sign(), w).square().sum(1)

    w, x = torch.randn(3, WIDTH, device=device), torch.randn(5, WIDTH, device=device)
    with torch.no_grad():
        assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x), loop_grad(one(fn))(w, x))


def test_a_batch_that_fn_would_not_take_is_not_compared(device):
    def fn(w, x, ids):
        if len(ids.unique()) < len(ids):
            raise ValueError("ids twice")
        return F.linear(x, w).square().sum(1) * ids

    w, x, ids = torch.randn(3, WIDTH, device=device), torch.randn(6, WIDTH, device=device), torch.arange(6, device=device)
    with pytest.warns(UserWarning, match=r'method="batch": fn raises ValueError when some samples are exchanged'):
        found = psg.per_sample_grad(fn, method="batch")(w, x, ids)
    assert_trees_close(found, loop_grad(one(fn))(w, x, ids))


def test_out_of_memory_in_an_exchanged_batch_is_raised(device):
    def fn(w, x, ids):
        if len(ids.unique()) < len(ids):
            raise torch.OutOfMemoryError("the exchanged batch does not fit")
        return F.linear(x, w).square().sum(1)

    w, x, ids = torch.randn(3, WIDTH, device=device), torch.randn(6, WIDTH, device=device), torch.arange(6, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="exchanged batch does not fit"):
        psg.per_sample_grad(fn, method="batch")(w, x, ids)


@pytest.mark.parametrize("n", range(2, 41))
def test_which_samples_are_exchanged(n, device):
    """Of a few samples each keeps its place once. Of many, some do, from which no simple pairing leads to others that do."""
    seen, every = [], list(range(n))

    def fn(w, x):
        seen.append(x.long().tolist())
        return w * x * torch.rand(n, device=device)

    def kept():
        """The samples that kept their places in each of the exchanged batches of one call."""
        seen.clear()
        transform(torch.ones((), device=device), torch.arange(float(n), device=device))
        assert seen[:2] == [every] * 2  # the pass, and the same without dropout
        found = [[i for i in every if batch[i] == i] for batch in seen[2:]]
        for own, batch in zip(found, seen[2:], strict=True):
            assert batch == [max((j for j in own if j <= i), default=own[0]) for i in every]  # in order, if the batch was
        return found

    transform = psg.per_sample_grad(fn, method="batch")
    first, later = kept(), kept()
    assert kept() == later
    if n < 17:
        assert sorted(first) == [[i] for i in every]
    if n < 8:
        assert sorted(sum(later, [])) == every and {len(own) for own in later[:-1]} == {1 if n < 6 else 2}
    else:
        assert len(later) == 2 and (n < 17 or len(first) >= 4 and first[:2] == later)
    for sets in [first] * (n >= 17) + [later] * (n >= 8):
        together = sorted(sum(sets, []))
        assert len(set(together)) == len(together) and not {0, n - 1} & set(together)
        for own in sets:
            assert 1 <= len(own) <= len(sets[0]) <= n // 4
            for i in own:
                assert not {i + 1, n - 1 - i, (i + n // 2) % n} & (set(own) - {i})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_that_meet_are_found_out_in_dtypes_of_few_digits(dtype, device):
    w, x = torch.randn(3, WIDTH, device=device, dtype=dtype), torch.randn(8, WIDTH, device=device, dtype=dtype)
    with pytest.raises(psg.StateError, match="losses of some samples change when others are exchanged"):
        psg.per_sample_grad(lambda w, x: F.linear(x - x.mean(0), w).square().sum(1), method="batch")(w, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_by_groups_of_other_sizes_is_no_meeting(dtype, device):
    """In a mixture of experts, the number of rows of an expert depends on the batch, and so does rounding."""
    router, layers = torch.randn(8, 4), torch.randn(4, 8, 8) / 3
    params, x = {"router": router.to(device, dtype), "layers": layers.to(device, dtype)}, torch.randn(64, 8, device=device, dtype=dtype)

    def routed(p, x):
        gates = (x @ p["router"]).softmax(1)
        best = gates.argmax(1)
        output = torch.zeros_like(x)
        for expert in best.unique().tolist():
            rows = (best == expert).nonzero()[:, 0]
            output = output.index_add(0, rows, F.linear(x[rows], p["layers"][expert]) * gates[rows, expert, None])
        return output.float().square().sum(1)

    grads = psg.per_sample_grad(routed, method="batch")(params, x)
    narrow = torch.finfo(dtype).eps
    assert_trees_close(grads, loop_grad(one(routed))(params, x), rtol=30 * narrow, atol=30 * narrow)


THRESHOLDS = {
    "activations above the median": lambda h: h * (h.detach() > h.detach().median()),
    "activations above the mean": lambda h: h * (h.detach() > h.detach().mean()),
    "largest activations of the batch": lambda h: torch.where(h >= h.flatten().topk(h.numel() // 10).values[-1], h, 0),
}


@pytest.mark.parametrize("name", THRESHOLDS)
@pytest.mark.parametrize("n", [3, 16, 64])
def test_samples_that_meet_in_a_threshold_are_found_out(name, n, device):
    """Exchanging samples changes few losses, and those not always. So there are several batches, in one of which it does."""
    params = {"encoder": torch.randn(8, 4, device=device), "decoder": torch.randn(4, 8, device=device)}

    def fn(p, x):
        return (F.linear(THRESHOLDS[name](F.linear(x, p["encoder"]).relu()), p["decoder"]) - x).square().sum(1)

    with pytest.raises(psg.StateError, match="losses of some samples change when others are exchanged"):
        for _ in range(12):
            psg.clipped_grad(fn, 1.0, method="batch")(params, torch.randn(n, 4, device=device))


def test_samples_that_meet_in_a_scale_of_the_batch_are_found_out(device):
    """Activations of 8 bits with one scale for the batch: each loss changes by less than 1e-3 of it."""

    def quantized(x):
        scale = x.detach().abs().amax() / 127
        return x + ((x / scale).round() * scale - x).detach()

    def fn(w, x):
        return F.linear(quantized(x), w).square().mean((1, 2))

    w = torch.randn(64, 64, device=device, dtype=torch.float32)
    with pytest.raises(psg.StateError, match="losses of some samples change when others are exchanged"):
        for _ in range(12):
            psg.per_sample_norm(fn, method="batch")(w, torch.randn(16, 512, 64, device=device, dtype=torch.float32))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_choice_that_hangs_on_the_last_digits_is_no_meeting(dtype, alone, device, monkeypatch):
    """Every fourth sample has two equal scores, and rounding, which here depends on the batch, decides."""
    router, layer = torch.randn(1, WIDTH).expand(2, WIDTH).to(device, dtype), torch.randn(3, WIDTH, device=device, dtype=dtype)
    margin = torch.tensor([i % 4 != 0 for i in range(32)], device=device, dtype=dtype)
    changed = []

    def counted(found, index, losses, *others):
        changed.extend(index[found != losses[index]].tolist())
        return are_same(found, index, losses, *others)

    are_same = _exchange._are_same
    monkeypatch.setattr(_exchange, "_are_same", counted)

    def fn(p, x, margin):
        scores = F.linear(x, p["router"])
        last_digits = torch.where(x.double().sum() * 1000 % 1 < 0.5, 1, -1) * torch.finfo(dtype).eps * scores[:, 0].abs()
        chosen = scores[:, 0] + last_digits + margin > scores[:, 1]
        return F.linear(x, p["layer"]).square().sum(1) * (1 + chosen)

    for _ in range(8):
        psg.per_sample_norm(fn, method="batch")(
            {"router": router, "layer": layer}, torch.randn(32, WIDTH, device=device, dtype=dtype), margin
        )
    assert changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_an_order_that_depends_on_the_batch_are_no_meeting(dtype, device):
    def fn(w, x, places):
        return sum((1000 * w * x).roll(int(places.sum()), 1).unbind(1))

    w, x, places = torch.rand(300, device=device, dtype=dtype), torch.rand(32, 300, device=device, dtype=dtype), torch.arange(32)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x, places.to(device)), 1000 * x)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda p, x: torch.kron(x, p["w"][:1]).sum(1), r"p\['w'\] reaches kron"),
        (lambda p, x: torch.cdist(x, p["w"], p=1).sum(1), r"p\['w'\] reaches cdist"),
        (lambda p, x: F.conv1d(x.T, p["w"][:, :, None]).sum(0), r"reaches conv1d"),
        (lambda p, x: F.linear(x, p["w"]).sum(), r"expected fn to return one loss for each of the 5 samples, got a tensor of shape \(\)"),
        (lambda p, x: list(F.linear(x, p["w"]).sum(1)), r"a tensor with one loss for each of the 5 samples, got list of length 5. .*stack"),
        (lambda p, x: (F.linear(x, p["w"]).sum(1), x), r"one loss for each of the 5 samples, got tuple of length 2. .*has_aux=True"),
        (lambda p, x: F.linear(x, p["w"]).sum().item(), r"one loss for each of the 5 samples, got float. .* leave out .item\(\)"),
        (lambda p, x: F.linear(x, p["w"]).sum(1).long(), r"expected fn to return real floating-point losses, got dtype torch.int64"),
        (lambda p, x: (x.to_sparse() @ p["w"].T).sum(1), r"of p\['w'\] reaches matmul"),
        (lambda p, x: (x @ (x.new_zeros(3, WIDTH) + p["w"].to_sparse()).T).sum(1), r"p\['w'\] reaches to_sparse"),
        (lambda p, x: (lambda h: F.linear(h, p["w"]).sum(1) + h.mul_(2).sum(1))(x * 1), r"an input of linear was changed in place"),
    ],
)
def test_what_cannot_be_told_is_an_error(fn, message, device):
    params, x = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(5, WIDTH, device=device)
    with pytest.raises(psg.InputError, match=message):
        psg.per_sample_grad(fn, method="batch")(params, x)


@pytest.mark.parametrize(
    "lookup",
    [
        lambda w, i: w[i],
        lambda w, i: w[0, i - 4, None],
        lambda w, i: w[i % 5, i, None],
        lambda w, i: w.index_select(0, i.flatten()).view(*i.shape, -1),
        lambda w, i: F.embedding(i, w),
    ],
)
@pytest.mark.parametrize("beyond", [7, -8])
def test_an_index_out_of_range_is_torch_s_own_error(lookup, beyond, device):
    if device.type != "cpu":
        pytest.skip("a device-side assertion would end the process")
    w, ids = torch.randn(5, 3), torch.tensor([[1, beyond], [0, 2]])
    with pytest.raises(IndexError):
        psg.per_sample_grad(lambda w, i: lookup(w, i).sum((1, 2)), method="batch")(w, ids)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"max_norm": 0.5}, psg.InputError, "for which this method has no rule that fits. Freeze"),
        ({"sparse": True}, psg.StateError, "the output of embedding"),
    ],
    ids=["max_norm", "sparse"],
)
def test_a_table_of_positions_that_torch_cannot_compute_once_is_refused(options, error, message, device):
    w, x = torch.randn(5, 3, device=device), torch.randn(4, 3, 3, device=device)
    before, steps = w.clone(), torch.tensor([[1, 1, 2]], device=device)
    with pytest.raises(error, match=message):
        psg.per_sample_grad(lambda w, x: (x + F.embedding(steps, w, **options)).sin().sum((1, 2)), method="batch")(w, x)
    assert torch.equal(w, before)


def test_samples_packed_into_one_row(device):
    def fn(w, ids, x):
        return (F.embedding(ids.reshape(1, -1), w).view(x.shape) * x).sin().sum((1, 2))

    w, ids, x = torch.randn(5, 3, device=device), torch.randint(5, (4, 2), device=device), torch.randn(4, 2, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, ids, x), loop_grad(one(fn))(w, ids, x))


class Unseen(torch.autograd.Function):
    """An autograd.Function, whose call no torch function mode sees."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 3


triple = Unseen.apply
unseen = super(torch.autograd.Function, Unseen).apply  # psg does not see this one


class Reversal(torch.autograd.Function):
    """An autograd.Function whose forward returns its argument: rules would skip its backward."""

    @staticmethod
    def forward(ctx, x, recorded):
        with torch.set_grad_enabled(recorded):
            return x.view_as(x)

    @staticmethod
    def backward(ctx, cotangent):
        return -cotangent, None


reversal = super(torch.autograd.Function, Reversal).apply


class Binary(torch.autograd.Function):
    """Signs of a weight, with the straight-through gradient. Its backward is not linear in the cotangent."""

    @staticmethod
    def forward(ctx, w, scale):
        ctx.save_for_backward(w, scale)
        return scale * w.sign(), w > 0

    @staticmethod
    def backward(ctx, cotangent, _):
        w, scale = ctx.saved_tensors
        return (cotangent * scale * (w.abs() <= 1)).clamp(-0.5, 0.5), None


class Reading(Unseen):
    """The same function, whose backward reads a number."""

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * (3 if cotangent.isfinite().all().item() else 0)


def _binary(p, x):
    signs, positive = Binary.apply(p["w"], torch.full((), 0.7, device=x.device, dtype=x.dtype))
    return F.linear(x, torch.where(positive, signs, 2 * signs)).sin().sum(1)


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize(
    "fn",
    [
        _binary,
        lambda p, x: F.linear(x, Unseen.apply(2 * p["w"])).sin().sum(1),
        lambda p, x: F.linear(x, p["w"]).sin().sum(1) * (1 + Unseen.apply(p["w"]).square().mean()),
        lambda p, x: F.linear(x, Reversal.apply(p["w"], False)).sin().sum(1) + F.linear(x, p["w"]).sum(1),
        lambda p, x: checkpoint(lambda x: F.linear(x, Unseen.apply(p["w"])).sin().sum(1), x, use_reentrant=False),
        pytest.param(
            lambda p, x: F.linear(x, triple(p["w"])).sin().sum(1),
            marks=pytest.mark.skipif(not _functions.SEES_BOUND, reason="psg does not see this call"),
        ),
    ],
    ids=["signs", "of a computed weight", "factor", "reversed", "checkpointed", "bound before"],
)
def test_autograd_functions_of_parameters_alone(fn, n, device):
    params, x = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(n, WIDTH, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), of_each_loss(fn, params, x))


def test_autograd_functions_of_parameters_and_samples_or_of_which_vmap_cannot_run_the_backward_are_refused(device):
    params, x = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(4, WIDTH, device=device)
    with pytest.raises(psg.InputError, match="an autograd.Function that is given samples too"):
        psg.per_sample_grad(lambda p, x: Binary.apply(p["w"], x[0, 0])[0].sum() * x.sum(1), method="batch")(params, x)
    with pytest.raises(psg.InputError, match="backward of an autograd.Function that is given parameters cannot run for several cotangents"):
        psg.per_sample_grad(lambda p, x: F.linear(x, Reading.apply(p["w"])).sum(1), method="batch")(params, x)


def written(p, x):
    with torch.no_grad():
        p["w"].clamp_(-0.1, 0.1)
    return F.linear(x, p["w"]).sum(1)


def handled(p, x):
    try:
        return F.conv1d(x.T, p["w"][:, :, None]).sum(0)
    except psg.InputError:
        return F.linear(x, p["w"]).sum(1)


def hooked_node(p, x):
    y = F.linear(x, p["w"])
    y.grad_fn.register_prehook(lambda cotangents: tuple(2 * c for c in cotangents))
    return y.sum(1)


def hooked_under_no_grad(p, x):
    w = p["w"] * 1
    with torch.no_grad():  # the hook counts, as in a loop
        w.register_hook(torch.neg)
    return F.linear(x, w).sum(1)


def slope(p, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.linear(x, p["w"]).tanh().sum(), x, create_graph=True)
    return slope.square().sum(1)


def tangent(p, x):
    with forward_ad.dual_level():
        hidden = forward_ad.make_dual(F.linear(x, p["w"]), x[:, :3])
        return forward_ad.unpack_dual(F.linear(hidden, p["w"].T)).tangent.square().sum(1)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda p, x: F.linear(x, unseen(p["w"])).sum(1), r"p\['w'\] reaches the losses by an op that no function mode sees"),
        (lambda p, x: F.linear(x, p["w"]).sum(1) + unseen(p["w"]).sum(), r"p\['w'\] reaches the losses by an op"),
        (lambda p, x: F.linear(x, reversal(p["w"], True)).sum(1), r"fn uses view_as of p\['w'\] as an autograd.Function returns it"),
        (lambda p, x: F.linear(x, reversal(p["w"], False)).sum(1), r"p\['w'\] reaches the losses by an op that no function mode sees"),
        (lambda p, x: ((w := p["w"] * 1).detach_(), F.linear(x, w).sum(1))[1], r"fn uses detach_ on mul of p\['w'\] at .*test_batch"),
        (lambda p, x: p["w"].flatten()[: len(x)], r"__getitem__ of flatten of p\['w'\] reaches the losses by .*, or as it is"),
        (lambda p, x: torch.func.vmap(lambda x: (p["w"] @ x).sum())(x), r"p\['w'\] is used inside a torch.func transform at .*test_batch"),
        (lambda p, x: torch.func.grad(lambda x: F.linear(x, p["w"]).sin().sum())(x).sum(1), r"p\['w'\] is used inside a torch.func transf"),
        (slope, r"grad at .*test_batch.py:\d+ makes derivatives"),
        (tangent, r"_make_dual at .*test_batch.py:\d+ makes derivatives"),
        (written, r"clamp_ at .*test_batch.py:\d+ writes into a parameter"),
        (handled, r"reaches conv1d"),
        (lambda p, x: (p["w"].register_hook(torch.neg), F.linear(x, p["w"]).sum(1))[1], r"fn uses a hook on p\['w'\] at .*test_batch"),
        (hooked_under_no_grad, r"fn uses a hook on mul of p\['w'\] at .*test_batch"),
        (hooked_node, r"register_prehook of the autograd node .* at .*test_batch.py:\d+"),
    ],
)
def test_what_would_be_lost_is_an_error(fn, message, device):
    params, x = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(5, WIDTH, device=device)
    before = params["w"].clone()
    with pytest.raises(psg.InputError, match=message):
        psg.per_sample_grad(fn, method="batch")(params, x)
    assert torch.equal(params["w"], before)


def test_an_input_that_is_written_into_stays_the_caller_s(device):
    def fn(p, x):
        return F.linear(x.mul_(2), p).tanh().sum(1)

    w, x = torch.randn(3, WIDTH, device=device), torch.randn(5, WIDTH, device=device)
    before = x.clone()
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x), loop_grad(one(lambda p, x: fn(p, x.clone())))(w, x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("bad", ["nan", "inf", "huge"])
@pytest.mark.parametrize("broken", [[1], [0, 3], [0, 1, 2, 3]])
def test_a_sample_that_is_not_finite_keeps_to_itself(bad, broken, device):
    # Its cotangents do not show which sample a row belongs to; those of the other samples still must.
    def fn(p, x):
        return F.linear(F.linear(x, p), p).square().sum((1, 2))

    w, x = torch.randn(WIDTH, WIDTH, device=device), torch.randn(4, 2, WIDTH, device=device)
    x[broken, 0, 0] = torch.finfo(x.dtype).max ** 0.6 if bad == "huge" else float(bad)
    norms = psg.per_sample_norm(fn, method="batch")(w, x)
    expected = psg.per_sample_norm(one(fn), method="loop")(w, x)
    assert torch.equal(norms.isfinite(), expected.isfinite())
    assert_trees_close(norms[norms.isfinite()], expected[norms.isfinite()])
    out = psg.clipped_grad(fn, 1.0, method="batch")(w, x)
    assert out.grads.isfinite().all() and out.nonfinite == (~norms.isfinite()).sum()


def test_an_infinite_gradient_of_a_finite_loss_keeps_to_its_sample(device):
    def fn(p, x):
        return F.linear(x, p).square().sum(1).sqrt()

    w, x = torch.randn(3, WIDTH, device=device), torch.randn(4, WIDTH, device=device)
    x[2] = 0
    grads = psg.per_sample_grad(fn, method="batch")(w, x)
    expected = loop_grad(one(fn))(w, x)
    assert grads[2].isnan().all() and expected[2].isnan().all()
    assert_trees_close(grads[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.parametrize("reduced", [True, False])
def test_a_graph_that_is_not_finite_among_joined_graphs(reduced, device):
    """Labels alone are batched, so fn cannot run on the finite graphs alone."""

    def fn(w, x, graph, num_graphs, y):
        pooled = (x @ w).new_zeros(num_graphs, 3).index_add(0, graph, x @ w)
        return F.cross_entropy(pooled, y, reduction="none") if reduced else (pooled * (1 + y[:, None])).square().sum(1)

    w, x = torch.randn(4, 3, device=device), torch.randn(5, 4, device=device)
    graph, y = torch.tensor([0, 0, 0, 1, 1], device=device), torch.tensor([0, 2], device=device)
    options = {"method": "batch", "in_dims": (None, None, None, None, 0)}
    psg.per_sample_norm(fn, **options)(w, x, graph, 2, y)
    x[4, 0] = torch.inf
    with pytest.raises(psg.InputError, match=r"not finite: losses\[1\]\. .* fn cannot run without the others: \w+Error: ") as raised:
        psg.per_sample_norm(fn, **options)(w, x, graph, 2, y)
    assert isinstance(raised.value.__cause__, ValueError)


def _pooled(p, x, starts, y):
    """Losses of packed sequences, as many as there are labels: with a part of the labels it runs, on the wrong sequences."""
    pooled = torch.stack([(x[starts[i] : starts[i + 1]] @ p["w"]).tanh().mean(0) for i in range(len(y))])
    return F.cross_entropy(pooled @ p["v"], y, reduction="none")


def _scaled(p, x, scale, y):
    return F.cross_entropy((scale * x @ p["w"]).tanh() @ p["v"], y, reduction="none")


def test_samples_that_run_alone_must_not_meet_the_data_of_others(device):
    p = {"w": torch.randn(4, 5, device=device), "v": torch.randn(5, 3, device=device)}
    live = {name: leaf.clone().requires_grad_() for name, leaf in p.items()}
    x, starts, y = torch.randn(9, 4, device=device), torch.tensor([0, 2, 5, 9], device=device), torch.tensor([0, 2, 1], device=device)
    broken = x.clone()
    broken[3, 0] = torch.nan
    norms = psg.per_sample_norm(_pooled, method="batch", in_dims=(None, None, None, 0))
    alone = [norms(p, x[a:b], torch.tensor([0, b - a]), y[i : i + 1]) for i, (a, b) in enumerate(itertools.pairwise(starts.tolist()))]
    assert_trees_close(norms(p, x, starts, y), torch.cat(alone))
    calls = [
        lambda: norms(p, broken, starts, y),
        lambda: norms(live, x, starts, y).sum().backward(),
        lambda: torch.func.grad(lambda p: norms(p, x, starts, y).sum())(p),
        lambda: torch.func.vmap(lambda v: norms({**p, "v": v}, x, starts, y))(torch.stack([p["v"]] * 2)),
    ]
    for call in calls:
        with pytest.raises(psg.InputError, match="had to run without the others, .* their losses are not those of the whole batch"):
            call()


def test_samples_that_run_alone_must_not_meet(device):
    """A batch of one has no gradient here: zeros would be no more than that."""

    def norms(w, x):
        return psg.per_sample_norm(lambda w, x: F.linear(x - x.mean(0), w).square().sum(1), method="batch")(w, x)

    w, x = torch.randn(3, WIDTH, device=device), torch.randn(6, WIDTH, device=device)
    broken = [x.clone() for _ in range(2)]
    broken[0][2], broken[1][2] = torch.nan, torch.inf
    calls = [
        *(partial(norms, w, x) for x in broken),
        lambda: torch.func.grad(lambda w: norms(w, x).sum())(w),
        lambda: torch.func.vmap(lambda w: norms(w, x))(torch.stack([w, w])),
        lambda: psg.factored_grad(lambda w, x: F.linear(x - x.mean(0), w).square().sum(1), method="batch")(w.clone().requires_grad_(), x),
    ]
    for call in calls:
        with pytest.raises(psg.InputError, match="had to run without the others, .* So samples meet"):
            call()


def test_a_few_samples_that_run_alone_must_not_meet(device):
    """Only every fourth loss is another without the others."""

    def fn(w, x):
        losses = F.linear(x, w).square().sum(1)
        return losses * (1 + (losses.detach() < 0.01 * losses.detach().max()))

    w, x = torch.randn(8, WIDTH, device=device), torch.randn(16, WIDTH, device=device).clamp(-2, 2)
    x = torch.where(torch.arange(16, device=device)[:, None] % 4 == 0, 1e-3 * x, x + 3)
    with pytest.raises(psg.InputError, match="had to run without the others, .* So samples meet"):
        torch.func.grad(lambda w: psg.per_sample_norm(fn, method="batch")(w, x).sum())(w)


def test_samples_that_run_alone_leave_what_fn_writes_into_the_caller_s(device):
    def norms(w, x, scale):
        fn = lambda w, x, scale: F.linear(x.mul_(2) * scale.mul_(2), w).square().sum(1)  # noqa: E731
        return psg.per_sample_norm(fn, in_dims=(None, 0, None), method="batch")(w, x, scale)

    w, x, scale = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device), torch.ones(4, device=device)
    x[1] = 0.0
    given = x.clone()
    expected = norms(w, x, scale)
    torch.func.jacrev(lambda w: norms(w, x, scale))(w)
    assert torch.equal(x, given)
    x[1] = torch.nan
    found = norms(w, x, scale)
    assert torch.equal(x.nan_to_num(), given) and torch.equal(scale, torch.ones_like(scale))
    others = torch.arange(5, device=device) != 1
    assert_trees_close(found[others], expected[others])


def test_samples_that_run_alone_may_draw(device):
    """Numbers are others for each sample alone, so its loss tells nothing."""
    w, x = torch.randn(3, WIDTH, device=device), torch.randn(6, WIDTH, device=device)
    x[2] = torch.nan
    for fn in (lambda w, x: F.dropout(F.linear(x, w), 0.5).square().sum(1), lambda w, x: F.linear(x * torch.rand_like(x), w).sum(1)):
        norms = psg.per_sample_norm(fn, method="batch")(w, x)
        assert norms.isfinite().tolist() == [True, True, False, True, True, True]


def test_samples_that_run_alone_may_share_a_constant(device):
    p = {"w": torch.randn(4, 5, device=device), "v": torch.randn(5, 3, device=device)}
    x, scale, y = torch.randn(3, 4, device=device), torch.randn(4, device=device), torch.tensor([0, 2, 1], device=device)
    norms = psg.per_sample_norm(_scaled, method="batch", in_dims=(None, 0, None, 0))
    expected = norms(p, x, scale, y)
    slope = torch.func.grad(lambda p: norms(p, x, scale, y).sum())(p)
    by_vmap = psg.per_sample_norm(_scaled_one, in_dims=(None, 0, None, 0))
    assert_trees_close(slope, torch.func.grad(lambda p: by_vmap(p, x, scale, y).sum())(p))
    x[1, 0] = torch.nan
    broken = norms(p, x, scale, y)
    assert broken[1].isnan()
    assert_trees_close(broken[[0, 2]], expected[[0, 2]])


def _scaled_one(p, x, scale, y):
    return _scaled(p, x[None], scale, y[None])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 4, 66, 400, 3500])
def test_many_samples_in_low_precision(dtype, n, device):
    w, x = torch.randn(8, 16, device=device), torch.randn(n, 16, device=device)
    fn = lambda w, x: F.linear(x, w).tanh().square().sum(1)  # noqa: E731
    grads = psg.per_sample_grad(fn, method="batch")(w.to(dtype), x.to(dtype))
    expected = psg.per_sample_grad(one(fn), method="vmap")(w.to(dtype).double(), x.to(dtype).double())
    assert_trees_close(grads.double(), expected, rtol={torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}[dtype])


@pytest.mark.parametrize("n, most", [(2, 64), (65, 64), (66, 64), (3170, 64), (9, 8), (10, 8), (3, 1), (1000, 1)])
def test_codes_of_samples(n, most):
    found = codes(n, most)
    assert found.shape[1] == n == len(found.unique(dim=1).T)
    assert found.min() >= 0 and found.max() <= most
    assert len(found.sum(0).unique()) == 1


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_may_be_off_by_rounding_and_no_more(sign, strict, device):
    """By rounding of the row's own largest entry, or of the largest row's, relative to the weight."""
    exponents, samples = codes(5, 3).to(device), torch.tensor([4, 0, 5, 3, 1, 2, 2], device=device)
    rows = sign * (1 + torch.rand(7, 3, device=device))
    rows[1], rows[2] = rows[1] * 2**-10, 0
    weights = torch.cat([exponents, torch.zeros_like(exponents[:, :1])], 1)[:, samples].exp2()
    allowed = 2**-14 * rows.abs().amax(1)
    if not strict:
        allowed = allowed.clamp(min=2**-16 * rows.abs().max().item())
    for share, fits in ((0.9, True), (1.1, False)):
        for k in (0, 1, 5):
            off = torch.zeros_like(rows)
            off[k, 1] = share * allowed[k]
            found = owners(rows, [weight[:, None] * (rows + off) for weight in weights], exponents, 2**-14, strict)
            assert torch.equal(found, samples) if fits else found is None


@pytest.mark.parametrize("n", [2, 9])
def test_cotangents_that_weights_bring_beyond_the_dtype(n, device):
    w, x = torch.randn(1, 3, device=device, dtype=torch.float32), 0.1 * torch.randn(n, 3, device=device, dtype=torch.float32)
    sizes = torch.tensor([1.0, 3e38], device=device, dtype=torch.float32).repeat(n)[:n]
    fn = lambda w, x, sizes: F.linear(x, w)[..., 0].sin() * sizes  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x, sizes), psg.per_sample_grad(fn, method="vmap")(w, x, sizes), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 32, 300])
def test_cotangents_of_other_samples_that_cancel_are_no_share(dtype, n, device):
    """A segment sum by a difference of running sums leaves rounding errors of other samples' cotangents on each row."""

    def fn(w, x):
        hidden = F.linear(x, w).tanh().flatten(0, 1)
        sums = torch.cat([hidden.new_zeros(1, 4), hidden.cumsum(0)])
        return (sums[5::5] - sums[:-1:5]).sin().sum(1)

    w, x = torch.randn(4, 3, device=device, dtype=dtype), torch.randn(n, 5, 3, device=device, dtype=dtype)
    expected = psg.per_sample_grad(lambda w, x: F.linear(x, w).tanh().sum(0).sin().sum(), method="vmap")(w, x)
    rounding = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {}  # that of the running sums
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x), expected, **rounding)


@pytest.mark.parametrize("scale", [1e-35, 1e-25, 1e-6, 1e6, 1e25])
@pytest.mark.parametrize("n", [2, 9, 70])
def test_samples_with_gradients_of_very_different_sizes(scale, n, device):
    w, x = torch.randn(4, 3, device=device, dtype=torch.float32), torch.randn(n, 3, device=device, dtype=torch.float32)
    sizes = torch.tensor([1.0, scale], device=device, dtype=torch.float32).repeat(n)[:n]

    def fn(w, x, sizes):
        order = torch.arange(n - 1, -1, -1, device=device)
        return (F.linear(x[order], w).sin()[order] * sizes[:, None]).sum(1)

    grads = psg.per_sample_grad(fn, method="batch")(w, x, sizes)
    expected = psg.per_sample_grad(lambda w, x: F.linear(x, w).sin().sum(), method="vmap")(w, x)
    assert_trees_close(grads / sizes[:, None, None], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("n", [1, 2, 17, 300])
def test_models_in_bfloat16(autocast, n, device):
    module = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.GRU(16, 16, batch_first=True)).to(device)
    params = detached(module) if autocast else {name: own.bfloat16() for name, own in detached(module).items()}
    x = torch.randn(n, 5, 6, device=device, dtype=torch.float32 if autocast else torch.bfloat16)
    params = {name: own.to(x.dtype) for name, own in params.items()}

    def fn(p, x):
        order = x[:, :, 0].flatten().argsort()  # rows that stand in no order of the samples
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            tokens = x.flatten(0, 1)[order][order.argsort()].view_as(x)
            return functional_call(module, p, (tokens,))[0].float().square().mean((1, 2))

    grads = psg.per_sample_grad(fn, method="batch")(params, x)
    assert_trees_close(grads, psg.per_sample_grad(one(fn), method="loop")(params, x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("n", [2, 3, 16, 100])
@pytest.mark.parametrize("features", [1, 4])
def test_rows_shared_by_samples_in_bfloat16_are_found_out(features, n, device):
    def fn(w, x):
        hidden = F.linear(x, w).sin()
        return (hidden + 0.04 * hidden.roll(1, 0)).sum(1)

    with pytest.raises(psg.StateError, match="a row on which more than one loss depends"):
        psg.per_sample_grad(fn, method="batch")(
            torch.randn(features, 3, device=device).bfloat16(), torch.randn(n, 3, device=device).bfloat16()
        )


@pytest.mark.parametrize("whole", [False, True])
def test_activation_checkpointing(whole, device):
    layers = nn.ModuleDict({"first": nn.Linear(4, 4), "rnn": nn.GRU(4, 4, batch_first=True), "last": nn.LayerNorm(4)}).to(device)
    calls = []

    def body(p, x):
        calls.append(None)
        hidden = functional_call(layers["first"], {k: p[f"first.{k}"] for k in ("weight", "bias")}, (x,))
        own = {name: p[f"rnn.{name}"] for name, _ in layers["rnn"].named_parameters()}
        hidden, _ = functional_call(layers["rnn"], own, (hidden.tanh(),))
        return F.layer_norm(hidden, (4,), p["last.weight"], p["last.bias"]).sin() @ p["first.weight"].T

    def fn(p, x):
        if whole:
            return checkpoint(body, p, x, use_reentrant=False).square().sum((1, 2))
        return checkpoint(lambda x: body(p, x), F.linear(x, p["first.weight"]), use_reentrant=False).square().sum((1, 2))

    params, x = detached(layers), torch.randn(4, 3, 4, device=device)
    grads = psg.per_sample_grad(fn, method="batch")(params, x)
    # Forward, again for each of three backward passes; the batch and its backward passes for four samples; four exchanged, and back.
    assert len(calls) == 4 + (1 + 4) + 4 * 2
    assert_trees_close(grads, loop_grad(one(fn))(params, x))


class Recomputed(torch.autograd.Function):
    """A reversible layer: its backward runs a function again, or differentiates what its forward has run."""

    @staticmethod
    def forward(ctx, x, function, again, differentiate):
        ctx.again, ctx.differentiate = again, differentiate
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.function, ctx.output = function, function(ctx.x)
        return function(x) if again else ctx.output.detach()

    @staticmethod
    def backward(ctx, cotangent):
        x, output = ctx.x, ctx.output
        if ctx.again:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                output = ctx.function(x)
        if ctx.differentiate is torch.autograd.grad:
            return *torch.autograd.grad(output, x, cotangent), None, None, None
        ctx.differentiate(output, cotangent)
        return x.grad, None, None, None


RECOMPUTED = {
    "reentrant checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=True),
    **{
        f"{differentiate.__qualname__} {'again' if again else 'once'}": partial(
            lambda again, differentiate, function, x: Recomputed.apply(x, function, again, differentiate), again, differentiate
        )
        for again in (True, False)
        for differentiate in (torch.autograd.backward, torch.Tensor.backward)
    },
}


@pytest.mark.parametrize("way", RECOMPUTED.values(), ids=RECOMPUTED)
@pytest.mark.parametrize("first", [True, False], ids=["behind a layer", "first"])
def test_gradients_that_a_backward_adds_to_leaves_are_not_lost(way, first, device):
    """They were zero: the backward of an autograd.Function adds them to `.grad`, or was not called at all."""
    p, x = {name: torch.randn(3, 3, device=device) for name in "vw"}, torch.randn(4, 3, device=device)

    def fn(p, x):
        hidden = F.linear(x, p["v"]) if first else x.clone().requires_grad_()
        return way(lambda hidden: F.linear(hidden, p["w"]).tanh(), hidden).square().sum(1)

    with pytest.raises(psg.InputError, match=r"backward\(\) at .* would add to the .grad of p\['w'\]|pass use_reentrant=False"):
        psg.per_sample_grad(fn, method="batch")(p, x)


@pytest.mark.parametrize(
    "start, name",
    [(lambda w, x: unseen(w).sum(), "w"), (lambda w, x: F.linear(x, w).sum(), "w"), (lambda w, x: w.sin().sum(), "sum of sin of w")],
    ids=["unseen", "rule", "derived"],
)
def test_gradients_that_fn_itself_adds_to_leaves_are_not_lost(start, name, device):
    """Also where an op that no function mode sees leads to a parameter."""

    def fn(w, x):
        start(w, x).backward()
        return F.linear(x, w).sin().sum(1)

    with pytest.raises(psg.InputError, match=rf"backward\(\) at .* would add to the .grad of {name}, unseen"):
        psg.per_sample_grad(fn, method="batch")(torch.randn(3, 3, device=device), torch.randn(4, 3, device=device))


def test_a_frozen_part_may_run_again(device):
    way = RECOMPUTED["backward again"]
    p, frozen, x = torch.randn(3, 3, device=device), torch.randn(3, 3, device=device), torch.randn(4, 3, device=device)
    fn = lambda p, x: way(lambda hidden: F.linear(hidden, frozen).tanh(), F.linear(x, p)).square().sum(1)  # noqa: E731
    plain = lambda p, x: F.linear(F.linear(x, p), frozen).tanh().square().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(p, x), loop_grad(plain)(p, x))


def test_a_graph_that_can_be_differentiated_once(device):
    p, x = torch.randn(3, 3, device=device), torch.randn(4, 3, device=device)
    fn = lambda p, x: Recomputed.apply(F.linear(x, p), torch.tanh, False, torch.autograd.grad).sum(1)  # noqa: E731
    with pytest.raises(psg.InputError, match="a graph of its own, which allows one backward pass"):
        psg.per_sample_grad(fn, method="batch")(p, x)


@pytest.mark.parametrize("compute", [torch.square, torch.exp, lambda v: v.softmax(-1), lambda v: v * v.norm()])
@pytest.mark.parametrize("check", ["default", "none"])
@pytest.mark.parametrize("n", [3, 4])  # 4: the shapes of what the op's rule and the op itself save agree
def test_a_weight_that_is_computed_in_a_checkpoint(compute, check, n, device):
    def fn(p, x):
        body = lambda x: F.linear(F.linear(x, p["w"]).sin(), compute(p["v"]))  # noqa: E731
        return checkpoint(body, x, use_reentrant=False, determinism_check=check).square().sum(1)

    p, x = {name: torch.randn(4, 4, device=device) for name in ("w", "v")}, torch.randn(n, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(p, x), loop_grad(one(fn))(p, x))


@pytest.mark.parametrize("n", [8, 1024])
def test_a_row_of_all_samples_with_one_feature(n, device):
    """The row's cotangents are parallel for all losses, so any ratio is near one of a thousand loss weights: no sample may be guessed."""
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(1, 3, device=device), torch.randn(n, 3, device=device)
    for _ in range(20):
        shares = torch.randn(n, generator=generator).to(device)

        def fn(w, x, shares=shares):
            return F.linear(x[:1], w)[0] * shares + 0 * x.sum(1)

        with pytest.raises(psg.StateError, match="a row on which more than one loss depends"):
            psg.per_sample_grad(fn, method="batch")(w, x)


def test_checkpointed_modules_are_refused(device):
    class Checkpointed(nn.Linear):
        def forward(self, x):
            return checkpoint(lambda x: F.linear(x, self.weight, self.bias).sin().square(), x, use_reentrant=False)

    layer = Checkpointed(3, 4).to(device)
    params = detached(layer)
    with pytest.raises(psg.InputError, match="checkpoint a function of the parameters instead"):
        fn = psg.per_sample_grad(lambda p, x: functional_call(layer, p, (F.linear(x, p["weight"])[:, :3],)).sum(1), method="batch")
        fn(params, torch.randn(4, 3, device=device))


@pytest.mark.parametrize("made", ["repeated", "of the sample"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM, nn.RNNCell])
def test_recurrent_weights_that_are_computed(kind, made, device):
    """The layer's weight is computed from parameters, and from data too: the gradients through this computation must not be lost."""
    layer = kind(3, 4, bias=False).to(device)
    names = [name for name, _ in layer.named_parameters()]
    own = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    p = {"ih": own[names[0]], "hh": torch.randn(4, 3, device=device)}

    def fn(p, x):
        losses = []
        for sample in x:
            row = p["hh"][:, 0] if made == "repeated" else F.linear(sample[:1], p["hh"])[0]
            out = functional_call(layer, {names[0]: p["ih"], names[1]: row.expand(own[names[1]].shape)}, (sample,))
            losses.append((out[0] if isinstance(out, tuple) else out).sin().sum())
        return torch.stack(losses)

    x = torch.randn(3, 5, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(p, x), loop_grad(one(fn))(p, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 3, 16, 100, 1000])
def test_rows_of_which_another_loss_has_a_small_share_are_refused(n, dtype, device):
    """The share of the other loss must not be taken for rounding error."""

    def fn(w, x):
        hidden = F.linear(x, w).sin()
        return (hidden + 5e-5 * hidden.roll(1, 0)).sum(1)

    with pytest.raises(psg.StateError, match="a row on which more than one loss depends"):
        psg.per_sample_grad(fn, method="batch")(
            torch.randn(4, 3, device=device, dtype=dtype), torch.randn(n, 3, device=device, dtype=dtype)
        )


@pytest.mark.parametrize("made", ["repeated", "of the sample"])
def test_weights_of_group_norm_that_are_computed(made, device):
    p = {"lead": torch.randn(5, 5, device=device), "weight": torch.randn(4, 3, device=device), "bias": torch.randn(4, device=device)}

    def fn(p, x):
        losses = []
        for sample in F.linear(x, p["lead"]):
            weight = p["weight"][0, :1].expand(4) if made == "repeated" else F.linear(sample[:1, :3], p["weight"])[0]
            losses.append(F.group_norm(sample[None], 2, weight, p["bias"]).sin().sum())
        return torch.stack(losses)

    x = torch.randn(3, 4, 5, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(p, x), loop_grad(one(fn))(p, x))


def test_a_rule_that_is_broken_says_so_for_a_batch_too(monkeypatch, device):
    monkeypatch.setattr(_registry, "_rules", dict(_registry._rules))
    psg.rule(F.linear)(lambda input, weight, bias=None: F.linear(input, weight, bias))
    with pytest.raises(psg.InputError, match=r"has to return \(output, \{parameter: builder\}\).*got Tensor"):
        psg.per_sample_grad(lambda p, x: F.linear(x, p).sum(1), method="batch")(
            torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)
        )


def test_a_hook_that_is_not_linear_is_named(device):
    def fn(p, x):
        y = x @ p
        y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return y.square().sum(1)

    with pytest.raises(psg.StateError, match=r"the output of matmul .* or a hook .* behind it is not linear in the gradient"):
        psg.per_sample_norm(fn, method="batch")(torch.randn(3, 3, device=device), torch.randn(4, 3, device=device))


def test_another_default_device(device):
    """psg creates its own tensors on the device of the arguments, not on the default device."""
    p, x = torch.randn(4, 3, device=device), torch.randn(5, 3, device=device)
    expected = psg.per_sample_norm(lambda p, x: F.linear(x, p).sin().sum(1), method="batch")(p, x)
    with torch.device("meta"):
        assert_trees_close(psg.per_sample_norm(lambda p, x: F.linear(x, p).sin().sum(1), method="batch")(p, x), expected)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: x @ w.max(0).values,
        lambda w, x: (x @ torch.linalg.qr(w).R).square().sum(1),
        lambda w, x: x @ w.split(2)[1].mean(0),
    ],
    ids=["max", "qr", "split"],
)
@pytest.mark.parametrize("n", [1, 4])
def test_parameters_of_which_an_op_makes_several_tensors(fn, n, device):
    w, x = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.float64), torch.randn(n, WIDTH, device=device, dtype=torch.float64)
    psg.check(fn, method="batch")(w, x)


@pytest.mark.parametrize("op", [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow])
def test_operators_that_write_into_data(op, device):
    def fn(p, x):
        return F.linear(op(x.exp(), p["v"]), p["w"]).sin().sum(1)

    params = {"v": torch.rand(WIDTH, device=device) + 1, "w": torch.randn(3, WIDTH, device=device)}
    x = torch.randn(5, WIDTH, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), loop_grad(one(fn))(params, x))


@pytest.mark.parametrize("op", [Tensor.add_, Tensor.mul_, operator.iadd])
def test_a_float_written_into_integers_is_torch_s_own_error(op, device):
    ids, x = torch.arange(6, device=device).view(2, 3), torch.randn(2, 3, device=device)
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        psg.per_sample_grad(lambda w, ids, x: (op(ids.clone(), w) * x).sum(1), method="batch")(torch.rand(3, device=device), ids, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(device):
    rows = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], device=device)
    with pytest.raises(psg.InputError, match=r"x is a nested tensor of layout torch.strided, .*to_padded_tensor"):
        psg.per_sample_grad(lambda w, x: F.linear(x, w).sum(), method="batch")(torch.randn(4, 3, device=device), rows)
    with pytest.raises(psg.InputError, match="w meets a nested tensor in linear at .*to_padded_tensor"):
        psg.per_sample_grad(lambda w, x: F.linear(rows, w).to_padded_tensor(0.0).sum((1, 2)) * x, method="batch")(
            torch.randn(4, 3, device=device), torch.ones(2, device=device)
        )
    with pytest.raises(psg.InputError, match="w is a nested tensor; expected a dense tensor"):
        psg.per_sample_grad(lambda w, x: x * w.sum(), method="batch")(rows, torch.ones(2, device=device))


@pytest.mark.parametrize("n", [3, 4])
def test_a_sparse_constant_of_as_many_rows_as_samples(n, device):
    """It is the same for all samples, though it has a row for each."""
    adjacency = torch.randn(3, 3).relu().to_sparse().to(device)

    def fn(w, x):
        return (x @ (adjacency @ w)).sin().sum(1)

    w, x = torch.randn(3, 4, device=device), torch.randn(n, 3, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x), loop_grad(one(fn))(w, x))


CONVERTED = {
    "to": lambda constant, x: constant.to(x),
    "type_as": lambda constant, x: constant.type_as(x),
    "copied": lambda constant, x: constant.to(x, copy=True),
}


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_constant_in_the_dtype_of_the_data(name, dtype, n, device):
    """Nothing of the data but their dtype and device reaches it."""
    constant = torch.randn(3, 3, device=device)

    def fn(w, x):
        return (x @ (CONVERTED[name](constant, x) + w) * x.to(w)).sin().sum(1)

    w, x = torch.randn(3, 3, device=device, dtype=dtype), torch.randn(n, 3, device=device, dtype=dtype)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x), loop_grad(one(fn))(w, x))


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_nodes_of_a_graph_that_all_samples_share(layout, device):
    """Each sample is a node of one graph, whose layers are products of its adjacency and what is computed from parameters."""
    adjacency, features = torch.randn(7, 7, device=device).relu().to_sparse(layout=layout), torch.randn(7, 3, device=device)

    def fn(p, node):
        hidden = (adjacency @ (features @ p["first"])).relu()
        return (adjacency @ (hidden @ p["second"]))[node].sin().sum(1)

    params = {"first": torch.randn(3, 4, device=device), "second": torch.randn(4, 2, device=device)}
    nodes = torch.tensor([0, 3, 3, 6], device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, nodes), loop_grad(one(fn))(params, nodes))


@pytest.mark.parametrize(
    "lookup",
    [
        lambda w, ids: F.embedding(ids, w, None, None, 2.0, True).sum(1),
        lambda w, ids: torch.embedding(w, ids, scale_grad_by_freq=True).sum(1),
        lambda w, ids: F.embedding_bag(ids, w, scale_grad_by_freq=True),
    ],
    ids=["embedding", "torch.embedding", "bag"],
)
def test_frequencies_of_ids(lookup, device):
    """Of the samples' ids they would be counted in the batch; of ids that all share they are those of each sample."""

    def fn(w, x, ids):
        return (lookup(w, ids) * x).sin().sum(1)

    w, x = torch.randn(3, WIDTH, device=device), torch.randn(4, WIDTH, device=device)
    ids = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 1], [2, 0, 1, 0], [1, 2, 2, 2]], device=device)
    with pytest.raises(psg.InputError, match="with scale_grad_by_freq=True, which counts the ids of the whole batch"):
        psg.per_sample_grad(fn, method="batch")(w, x, ids)
    shared = lambda w, x: fn(w, x, ids[:1])  # noqa: E731
    assert_trees_close(psg.per_sample_grad(shared, method="batch")(w, x), loop_grad(one(shared))(w, x))
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x[:1], ids[:1]), loop_grad(one(fn))(w, x[:1], ids[:1]))


def of_each_loss(fn, params, *batch):
    """The gradients of each loss of one call, by plain autograd: for functions that no batch of one can be given to."""
    names, leaves = zip(*((name, value.clone().requires_grad_()) for name, value in params.items()), strict=True)
    losses = fn(dict(zip(names, leaves, strict=True)), *batch)
    rows = [torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True) for loss in losses]
    return dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True))


MEETINGS = {
    "sum": lambda p, c: c + p,
    "difference": lambda p, c: p - c,
    "product": lambda p, c: p * c,
    "quotient": lambda p, c: c / (p.square() + 1),
    "where": lambda p, c: torch.where(c > 0, p, c),
    "maximum": torch.maximum,
    "hypot": torch.hypot,
    "linear": lambda p, c: F.linear(c, p.expand(WIDTH, WIDTH) if p.ndim < 2 else p[:1].expand(WIDTH, WIDTH)).expand(c.shape),
    "in place": lambda p, c: c.clone().mul_(p),
}
USES = {
    "weight": lambda v, x: F.linear(x, v.expand(WIDTH, WIDTH) if v.ndim < 2 else v).sin().flatten(1).sum(1),
    "factor": lambda v, x: (x * v).sin().sum(1),
    "first": lambda v, x: (x * v[:1] + v.reshape(-1)[0]).sin().sum(1),
    "rows": lambda v, x: (x * v[: len(x)]).cos().sum(1) if v.shape[:1] == x.shape[:1] else x.sum(1),
    "looked up": lambda v, x: (x * v[(x[:, 0] > 0).long() % len(v)]).sin().sum(1) if v.ndim == 2 else x.sum(1),
    "penalty": lambda v, x: (v.square().sum() * x).sin().sum(1),
    "next to data": lambda v, x: torch.cat([x, v[: len(x)]], -1).sin().sum(1) if v.shape == x.shape else x.sum(1),
}


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 5),
    meetings=st.lists(st.sampled_from(sorted(MEETINGS)), min_size=1, max_size=3),
    uses=st.lists(st.sampled_from(sorted(USES)), min_size=1, max_size=3),
    rows=st.lists(st.sampled_from(["one", "some", "of the samples"]), min_size=3, max_size=3),
)
def test_whatever_is_taken_for_shared_the_gradient_is_right_or_refused(seed, n, meetings, uses, rows):
    """Constants that fn closes over: rows of all samples, or, as in a bank of what was seen before, one for each of them."""
    torch.manual_seed(seed)
    shapes = {"one": (WIDTH,), "some": (3, WIDTH), "of the samples": (n, WIDTH)}
    constants = [torch.randn(shapes[kind]) for kind in rows]
    params, x = {"p": torch.randn(WIDTH), "q": torch.randn(1, WIDTH)}, torch.randn(n, WIDTH)

    def fn(p, x):
        losses = F.linear(x, p["p"])
        for i, (meeting, use) in enumerate(zip(meetings, uses, strict=False)):
            value = MEETINGS[meeting](p["p"] if i % 2 else p["q"], constants[i])
            if use != "weight" or len(value.expand(1, WIDTH) if value.ndim < 2 else value) in (1, WIDTH):
                losses = losses + USES[use](value, x if i != 1 else x * p["p"])
        return losses

    try:
        expected = of_each_loss(fn, params, x)
    except RuntimeError:
        return  # shapes that do not fit
    try:
        grads = psg.per_sample_grad(fn, method="batch")(params, x)
    except psg.PsgError:
        return
    assert_trees_close(grads, expected)


@pytest.mark.parametrize("n", [1, 4, 5])
def test_rows_of_the_samples_that_are_closed_over_beside_a_merged_weight(n, device):
    """What has a row for each sample is taken for theirs, whether it comes from data or not; what has not is not."""
    base, bank, weights = torch.randn(5, WIDTH, device=device), torch.randn(n, WIDTH, device=device), torch.rand(n, device=device)
    calls = []

    def fn(p, x):
        calls.append(None)
        state = (torch.zeros(len(x), WIDTH, device=device) + p["state"]).tanh()
        hidden = torch.cat([state, (bank + p["shift"]) * x], 1).sin()
        return weights * (hidden.sum(1) + F.linear(x, base + p["up"] @ p["down"]).tanh().sum(1))

    shapes = {"state": (WIDTH,), "shift": (WIDTH,), "up": (5, 2), "down": (2, WIDTH)}
    params, x = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}, torch.randn(n, WIDTH, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), of_each_loss(fn, params, x))
    assert len(calls) == 2 + (1 + n) * (n > 1)  # one pass, the loop's, and the batch again and with exchanged samples


def test_what_is_taken_for_shared_and_is_not_is_tried_again(device):
    """Data by way of Python, and twice as many rows as there are samples, beside a merged weight."""
    base = torch.randn(5, WIDTH, device=device)

    def fn(p, x):
        told = torch.stack([(torch.tensor(row.tolist(), device=device) * p["shift"]).sin().sum() for row in x])
        doubled = (torch.zeros(2 * len(x), WIDTH, device=device) + p["shift"]).view(len(x), 2, WIDTH)
        hidden = torch.cat([doubled, x[:, None]], 1).cos().sum((1, 2))
        return told + hidden + F.linear(x, base + p["w"]).tanh().sum(1)

    params = {"shift": torch.randn(WIDTH, device=device), "w": torch.randn(5, WIDTH, device=device)}
    x = torch.randn(4, WIDTH, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), loop_grad(one(fn))(params, x))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_guess_that_is_wrong_is_withdrawn_without_blame_on_other_rows(n, device):
    """Constants with the samples in dimension 1 are taken for shared; what fails is neither made of them nor looked up by data."""
    places = torch.randn(5, 1, WIDTH, device=device).expand(-1, n, -1)

    def fn(p, ids):
        keys = torch.einsum("tbi,io->tbo", places, p["w"])
        scores = torch.einsum("tbi,sbi->bts", F.embedding(ids.T, p["table"]), keys)
        return scores.softmax(-1).sin().sum((1, 2))

    def alone(p, ids):
        keys = places[:, 0] @ p["w"]
        return (F.embedding(ids, p["table"]) @ keys.T).softmax(-1).sin().sum()

    params = {"w": torch.randn(WIDTH, WIDTH, device=device), "table": torch.randn(VOCABULARY, WIDTH, device=device)}
    ids = torch.randint(VOCABULARY, (n, 3), device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, ids), loop_grad(alone)(params, ids))


class Adapted(nn.Module):
    """A pruned, frozen layer and its low-rank update; its own parameters may require grad or not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, WIDTH))
        self.register_buffer("mask", (torch.rand(4, WIDTH) > 0.5).to(torch.get_default_dtype()))
        self.register_buffer("mean", torch.randn(WIDTH))

    def forward(self, x):
        return F.linear(x - self.mean, (self.weight + self.up @ self.down) * self.mask)


@pytest.mark.parametrize("n", [0, 1, 4])
def test_frozen_weights_and_buffers_of_a_module(n, device):
    module = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(4, 3)).to(device)
    criterion = lambda output, y: F.cross_entropy(output, y, reduction="none")  # noqa: E731
    fn, params = psg.stateless(module, criterion, batch_dim=None)
    assert set(params) == {"0.up", "0.down", "2.weight", "2.bias"}
    x, y = torch.randn(n, WIDTH, device=device), torch.randint(3, (n,), device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x, y), loop_grad(one(fn))(params, x, y))


def test_what_samples_share_among_the_arguments(device):
    base, w, x = torch.randn(3, WIDTH, device=device), torch.randn(3, WIDTH, device=device), torch.randn(4, WIDTH, device=device)

    def fn(w, x, base, scale):
        return F.linear(x, base + scale * w).sin().sum(1)

    grads = psg.per_sample_grad(fn, in_dims=(None, 0, None), method="batch")(w, x, base, scale=base[:, :1])
    assert_trees_close(grads, loop_grad(lambda w, x: fn(w, x[None], base, base[:, :1])[0])(w, x))


def of_the_samples(p, x):
    w = p["w"].clone()
    w[0] = x[0]
    return F.linear(x, w).sin().sum(1)


def masked_by_the_samples(p, x):
    w = torch.zeros(3, WIDTH, device=x.device)
    w[(x[:1] > 0).expand(3, -1)] = p["w"][0, 0]
    return F.linear(x, w).sin().sum(1)


def meeting_all_rows(p, x):
    return (torch.cat([p["w"][0].expand(len(x), -1), x]).mean(0) * x).sum(1)


def under_no_grad(p, x):
    w = p["w"] * 2
    with torch.no_grad():
        w.clamp_(-1, 1)
    return F.linear(x, w).sin().sum(1)


def of_detached_memory(p, x):
    w = p["w"] * 2
    detached = w.detach()
    w.mul_(3)
    return F.linear(x, w * detached).sin().sum(1)


def of_an_expanded_one(p, x):
    row = p["w"][0] * 2
    rows = row.expand(len(x), -1)
    row.mul_(3)
    return (x * rows).sin().sum(1)


def read_by_a_rule(p, x):
    images = torch.ones(len(x), WIDTH, 2, 2, device=x.device)
    hidden = F.conv2d(images, p["w"][:, :, None, None])
    images[0, :3, 0, 0] = p["w"][0, :3]
    return hidden.sin().sum((1, 2, 3)) + x.sum(1) * images.sum()


def differentiated_inside(p, x):
    z = torch.zeros(3, WIDTH, device=x.device).requires_grad_()
    (slope,) = torch.autograd.grad(F.linear(x, p["w"].lerp(z, 0.5)).sum() + z.sum(), z)
    return (F.linear(x, p["w"]) * slope.sum()).sum(1)


@pytest.mark.parametrize(
    "fn, error, message",
    [
        (
            lambda p, x: torch.cat([x, p["w"]]).sum().expand(len(x)),
            psg.StateError,
            "the output of cat has a row on which more than one loss",
        ),
        (lambda p, x: torch.cat([x, p["w"][[0] * len(x)]], 1).sum(1), psg.StateError, "the output of cat has a row on which more than one"),
        (of_the_samples, psg.InputError, r"__setitem__ at .*test_batch.py:\d+ writes into what was computed from parameters, where"),
        (masked_by_the_samples, psg.StateError, "the output of __setitem__ has a row on which more than one loss depends"),
        (meeting_all_rows, psg.StateError, "the output of expand has a row on which more than one loss depends"),
        (under_no_grad, psg.InputError, r"clamp_ at .*test_batch.py:\d+ writes into what was computed from parameters, where"),
        (of_detached_memory, psg.InputError, r"mul_ at .*test_batch.py:\d+ writes into what was computed from parameters, where"),
        (of_an_expanded_one, psg.InputError, r"mul_ at .*test_batch.py:\d+ writes into what was computed from parameters, where"),
        (read_by_a_rule, psg.InputError, r"reaches __setitem__ at .*test_batch.py:\d+"),
        (differentiated_inside, psg.StateError, "losses of some samples change when others are exchanged"),
        (lambda p, x: F.linear(x, p["w"] * x.mean(0)).sin().sum(1), psg.StateError, "the output of mul has a row on which more than one"),
        (lambda p, x: F.linear(x[:, :3], torch.cdist(p["w"], p["w"], p=1)).sin().sum(1), psg.InputError, r"reaches cdist at .*test_batch"),
    ],
)
@pytest.mark.parametrize("n", [2, 4])
def test_what_a_value_for_all_samples_must_not_be_made_of(fn, error, message, n, device):
    params, x = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(n, WIDTH, device=device)
    with pytest.raises(error, match=message):
        psg.per_sample_grad(fn, method="batch")(params, x)


@pytest.mark.parametrize(
    "view",
    [
        lambda y, n: y.expand(n, -1)[0],
        lambda y, n: torch.broadcast_to(y, (n, WIDTH))[-1],
        lambda y, n: y.expand_as(torch.ones(n, WIDTH, device=y.device))[0, :2],
        lambda y, n: torch.broadcast_tensors(y, torch.ones(n, 1, device=y.device))[0][0],
        lambda y, n: y.expand(1, WIDTH),
    ],
    ids=["expand", "broadcast_to", "expand_as", "broadcast_tensors", "once"],
)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_writes_into_expanded_views_of_what_is_computed_from_parameters(view, n, device):
    """In torch they reach the value itself; psg has copies there, a row for every sample."""

    def fn(p, x):
        y = p.clone()
        view(y, len(x)).mul_(3)
        return (x * y.sin()).sum(1)

    p, x = torch.randn(WIDTH, device=device), torch.randn(n, WIDTH, device=device)
    refusing = "mul_ at .* writes into (an expanded view of a parameter|what was computed from parameters)"
    try:
        assert_trees_close(psg.per_sample_grad(fn, method="batch")(p, x), loop_grad(one(fn))(p, x))
    except psg.InputError as error:
        assert re.search(refusing, str(error))


@pytest.mark.parametrize(
    "repeat",
    [
        lambda p, n: p.expand(n, -1).contiguous(),
        lambda p, n: p.expand(n, -1).clone(),
        lambda p, n: p.repeat(n, 1),
        lambda p, n: torch.stack([p] * n),
    ],
    ids=["contiguous", "clone", "repeat", "stack"],
)
@pytest.mark.parametrize("write", [lambda y, x: y.add_(x), lambda y, x: y[:, :2].mul_(x[:, 2:4])], ids=["all", "a part"])
def test_writes_into_copies_of_a_parameter_for_every_sample(repeat, write, device):
    def fn(p, x):
        y = repeat(p, len(x))
        write(y, x)
        return (x * y.sin()).sum(1)

    p, x = torch.randn(WIDTH, device=device), torch.randn(4, WIDTH, device=device)
    expected = loop_grad(lambda p, x: fn(p.clone(), x[None])[0])(p, x)  # for one sample, torch's contiguous() is p itself
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(p, x), expected)


@pytest.mark.parametrize("n", [2, 3])
def test_an_expansion_by_as_many_as_there_are_samples_that_is_one_value_for_all(n, device):
    """Its rows look like the samples'; that they are not shows in what is computed from them."""

    def fn(p, x, ids):
        w = p["b"].expand(2, 2) * p["w"]
        return (x + w[ids][:, :1]).tanh().sum((1, 2))

    for _ in range(8):
        params = {"b": torch.randn(2, device=device), "w": torch.randn(2, 2, device=device)}
        x, ids = torch.randn(n, 2, 2, device=device), torch.randint(2, (n, 2), device=device)
        expected = loop_grad(lambda p, x, ids: fn(p, x[None], ids[None])[0])(params, x, ids)
        assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x, ids), expected)


def test_a_constant_that_is_changed_when_a_parameter_has_met_it_is_torch_s_own_error(device):
    def fn(w, x):
        scale = torch.ones(3, WIDTH, device=device)
        hidden = F.linear(x, w * scale)
        scale.mul_(2)
        return hidden.sin().sum(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        psg.per_sample_grad(fn, method="batch")(torch.randn(3, WIDTH, device=device), torch.randn(4, WIDTH, device=device))


def test_what_a_primitive_closes_over(device):
    held = []

    @psg.primitive
    def scaled(w):
        return w * held[-1]

    def fn(p, x):
        held.append(p["scale"].square().sum())
        return F.linear(x, scaled(p["w"])).sin().sum(1)

    params = {"w": torch.randn(3, WIDTH, device=device), "scale": torch.randn(2, device=device)}
    x = torch.randn(4, WIDTH, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), loop_grad(one(fn))(params, x))


def test_a_scalar_that_is_repeated_for_nothing(device):
    scale, x = torch.randn((), device=device), torch.randn(4, 3, device=device)

    def fn(scale, x):
        return (x * scale.expand(()) * scale.expand_as(scale)).sin().sum(1)

    assert_trees_close(psg.per_sample_grad(fn, method="batch")(scale, x), loop_grad(one(fn))(scale, x))


@pytest.mark.parametrize("shape", [(4, 1, 1), (3,), (4, 3), (2, 4, 3), (4, 5, 1)])
def test_data_that_is_repeated_along_a_parameter(shape, device):
    p, x = {"a": torch.randn(shape, device=device), "b": torch.randn(shape, device=device)}, torch.randn(5, 1, 1, 1, device=device)

    def fn(p, x):
        return ((x * p["a"] - p["b"]).sin() / (x.square() + p["a"].exp())).flatten(1).sum(1)

    assert_trees_close(psg.per_sample_grad(fn, method="batch")(p, x), loop_grad(one(fn))(p, x))


WEIGHTS = {"v": (4,), "m": (4, 4), "positions": (3, 4), "s": (), "one": (1, 4), "z": (4,)}


@pytest.mark.parametrize("n", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "op",
    [
        lambda p, x: torch.add(x, p["v"], alpha=2) + torch.sub(x, p["v"], alpha=3) * torch.sub(p["v"], x, alpha=0.5),
        lambda p, x: torch.add(x, other=p["v"]) + torch.mul(input=x, other=p["v"]).divide(p["v"]),
        lambda p, x: torch.multiply(x, p["v"]) + x.multiply(p["s"]),
        lambda p, x: torch.lerp(x, x.cos(), p["v"]) + x.lerp(p["positions"], 0.3),
        lambda p, x: torch.addcmul(p["v"], x, x, value=0.5) + x.addcdiv(x, p["positions"]),
        lambda p, x: torch.tensordot(x, p["m"], dims=1) + torch.tensordot(p["m"], x, dims=([0], [2])).permute(1, 2, 0),
        lambda p, x: torch.inner(x, p["m"]) + torch.inner(x, p["v"])[..., None] + torch.inner(x, p["s"]),
        lambda p, x: torch.outer(x[:, 0, 0], p["v"]) + torch.addr(x[:, 0], x[:, 1, 0], p["v"], beta=0.5, alpha=2),
        lambda p, x: torch.linalg.vecdot(x, p["v"]) + F.cosine_similarity(x, p["v"], dim=-1) + F.pairwise_distance(x, p["v"]),
        lambda p, x: torch.linalg.multi_dot([x[:, 0], p["m"], p["m"]]),
        lambda p, x: torch.stack([torch.dot(own, p["v"]) * p["z"].vdot(own) * own for own in x[:, 0]]) if len(x) else x * p["s"],
        lambda p, x: torch.cdist(x, p["m"]) + torch.cdist(p["positions"], x[:, 1]).T[:, :, None],
        lambda p, x: torch.maximum(x, p["v"]) - x.minimum(p["positions"]) + torch.clamp(x, max=p["v"]) + x.fmax(p["s"]),
        lambda p, x: x.abs() ** p["v"] + p["v"] ** x + x.abs().pow(p["s"]) + torch.float_power(x.abs(), p["s"]),
        lambda p, x: torch.logaddexp(x, p["v"]) + torch.atan2(p["v"], x) + torch.hypot(x, p["s"]) + torch.xlogy(x, p["v"]),
        lambda p, x: (
            torch.stack([p["v"]] * len(x))[:, None] * x + torch.cat([p["one"]] * len(x)).view(len(x), 1, 4) if len(x) else x * p["v"]
        ),
        lambda p, x: p["positions"].expand_as(x).reshape(x.shape) * x,
        lambda p, x: x * p["one"].repeat_interleave(len(x), 0)[:, None] + torch.repeat_interleave(p["positions"][None], len(x), dim=0),
        lambda p, x: (lambda y: (y.__setitem__((slice(None), 0), p["v"]), y[:, 1].copy_(p["z"]), y)[-1])(x * p["s"]),
        lambda p, x: (lambda y: (y.__setitem__((slice(None), torch.tensor([0, 2], device=x.device)), p["s"]), y)[-1])(x * p["v"]),
        lambda p, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.complex(p["v"], p["z"]) + 1j * p["z"], n=3, dim=1),
        lambda p, x: torch.layer_norm(x, (4,), p["v"], p["z"]) + torch.rms_norm(x, (4,), p["v"]),
        lambda p, x: torch.group_norm(x.transpose(1, 2), 2, p["v"], p["z"]),
        lambda p, x: torch.addmm(x[:, 0], x[:, 1], p["m"], beta=0.5, alpha=2) + torch.addmm(p["z"], x[:, 0], p["m"], beta=0),
        lambda p, x: torch.stack([torch.addmm(p["positions"], own, p["m"]) for own in x]) if len(x) else x * p["s"],
        lambda p, x: torch.baddbmm(p["positions"], x, p["m"].expand(len(x), 4, 4), alpha=3),
        lambda p, x: torch.where(x > p["v"], x, 0) * p["v"] + (p["z"] == x) + torch.isclose(x, p["s"]) + torch.bucketize(x, p["z"]),
    ],
)
def test_other_ops_that_meet_a_parameter(op, n, device):
    params = {name: torch.rand(shape, device=device) + 0.5 for name, shape in WEIGHTS.items()}
    x = torch.randn(n, 3, 4, device=device)

    def fn(p, x):
        y = op(p, x).flatten(1)
        return (y + torch.arange(y.shape[1], device=device) + 0.1).sin().sum(1)

    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), loop_grad(one(fn))(params, x))


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kept=st.lists(st.booleans(), min_size=3, max_size=3),
    place=st.integers(0, 3),
    n=st.integers(0, 5),
    op=st.sampled_from([torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.Tensor.mul_, lambda x, p: x + p.expand(x.shape)]),
)
def test_a_parameter_that_is_broadcast_along_any_dimensions(shape, kept, place, n, op):
    """The samples are along any dimension of the data: first, last, or after time."""
    place = min(place, len(shape))
    wide = [*shape[:place], n, *shape[place:]]
    own = [size if keep else 1 for size, keep in zip(shape, kept, strict=False)]
    own.insert(place, 1)
    weight, x = torch.rand(own) + 0.5, torch.randn(wide).movedim(place, 0)

    def fn(weight, x):
        return op(x.movedim(0, place) * 1, weight).sin().movedim(place, 0).flatten(1).sum(1)

    assert_trees_close(psg.per_sample_grad(fn, method="batch")(weight, x), loop_grad(one(fn))(weight, x))


def noisy(w, x, y):
    """Each sample has noise of its own, and the batch's mean is subtracted."""
    x = x + 1e-6 * torch.randn_like(x)
    return ((x - x.mean(0)) @ w.T - y).square().sum(1)


def mixup(w, x, y):
    others = torch.arange(len(x)).roll(1 + int(torch.randint(len(x) - 1, ())))
    return (0.5 * (x + x[others.to(x.device)]) @ w.T - y).square().sum(1)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 13])
@pytest.mark.parametrize(
    "fn",
    [
        noisy,
        mixup,
        lambda w, x, y: ((x - x[-1]) @ w.T - y).square().sum(1),
        lambda w, x, y: ((x - 0.5 * x.flip(0)) @ w.T - y).square().sum(1),
    ],
    ids=["noise and a mean", "mixup", "minus the last", "minus the mirrored"],
)
def test_samples_that_meet_in_the_data_are_refused(fn, n, device):
    w, x, y = torch.randn(4, 3, device=device), torch.randn(n, 3, device=device), torch.randn(n, 4, device=device)
    with pytest.raises(psg.StateError, match="losses of some samples change when others are exchanged"):
        psg.per_sample_norm(fn, method="batch")(w, x, y)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 7, 8, 13])
def test_samples_with_random_numbers_of_their_own_are_accepted(n, device):
    def fn(p, x, y):
        return (F.dropout(x + torch.randn_like(x), 0.5) @ p["w"].T - y).square().sum(1) * torch.rand(len(x), device=x.device)

    p, x, y = {"w": torch.randn(4, 3, device=device)}, torch.randn(n, 3, device=device), torch.randn(n, 4, device=device)
    torch.manual_seed(0)
    found = psg.per_sample_grad(fn, method="batch")(p, x, y)
    end = torch.get_rng_state()
    torch.manual_seed(0)
    assert_trees_close(found, of_each_loss(fn, p, x, y) if n else {"w": torch.zeros(0, 4, 3, device=device)})
    assert torch.equal(end, torch.get_rng_state())


def test_numbers_of_draws_that_depend_on_the_data_cannot_be_compared():
    def fn(w, x, y):
        return (torch.poisson(x.abs() * 20) @ w.T - y).square().sum(1)

    torch.manual_seed(0)
    w, x, y = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5, 4)
    with pytest.warns(UserWarning, match="draws more or fewer random numbers when some samples are exchanged"):
        psg.per_sample_norm(fn, method="batch")(w, x, y)


def test_selective_checkpoints_are_refused(device):
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def fn(p, x):
        return checkpoint(lambda x: F.linear(x, p["w"], p["b"]).tanh(), x, use_reentrant=False, context_fn=kept).sum(1)

    params = {"w": torch.randn(3, WIDTH, device=device), "b": torch.randn(3, device=device)}
    with pytest.raises(psg.InputError, match="selective activation checkpoint, which allows one backward pass"):
        psg.per_sample_grad(fn, method="batch")(params, torch.randn(5, WIDTH, device=device))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_learned_initial_state(kind, device):
    module, h0 = kind(3, 4, batch_first=True).to(device), torch.randn(1, 1, 4, device=device)
    params = {"h0": h0, **detached(module)}
    x = torch.randn(5, 6, 3, device=device)

    def fn(p, x):
        state = p["h0"].expand(-1, len(x), -1).contiguous()
        weights = {name: weight for name, weight in p.items() if name != "h0"}
        output, _ = functional_call(module, weights, (x, (state, state) if kind is nn.LSTM else state))
        return output[:, -1].square().sum(1)

    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), loop_grad(one(fn))(params, x))


def test_both_readings_of_a_parameter_that_fail_are_told(device):
    """As one value of all samples it reaches cdist; as rows of each sample's own, fn goes on to an op that has no rule either."""

    def fn(p, x):
        tokens = p[None].expand(1, len(x), WIDTH)
        return torch.kron(torch.cdist(x[None], tokens, p=1.0)[0], p).sum(1)

    with pytest.raises(psg.InputError, match="reaches cdist") as error:
        psg.per_sample_grad(fn, method="batch")(torch.randn(1, WIDTH, device=device), torch.randn(5, WIDTH, device=device))
    assert "With rows of each sample's own instead" in error.value.__notes__[0] and "reaches kron" in error.value.__notes__[0]


@pytest.mark.parametrize("n", [2, 5])
def test_losses_that_compare_samples_with_a_class_token_are_told(n, device):
    """Rows of the token belong to several samples, as all others do; so would one token for all samples, as a row."""

    def fn(p, x):
        tokens = torch.cat([p["token"].expand(n, 1, -1), x], 1)
        own = F.linear(tokens, p["w"]).tanh().mean(1)
        return (own @ own.T).sin().sum(1)

    params = {"token": torch.randn(WIDTH, device=device), "w": torch.randn(3, WIDTH, device=device)}
    with pytest.raises(psg.StateError, match="Losses that compare samples have no per-sample gradients") as error:
        psg.per_sample_grad(fn, method="batch")(params, torch.randn(n, 4, WIDTH, device=device))
    assert "With one value for all samples instead" in error.value.__notes__[0] and "the output of cat" in error.value.__notes__[0]


@pytest.mark.parametrize(
    "fn, w, x",
    [
        (lambda w, x: (w * x).square().sum(1), torch.ones(1), torch.tensor([[300.0], [400.0]], dtype=torch.float16)),
        (lambda w, x: (1e8 * (x * w - x)).square().sum(1), torch.full((1, 1), 1 + 1e-9, dtype=torch.float64), torch.ones(2, 1)),
        (lambda w, x: (x + w).square().sum(1), torch.tensor(1e-9, dtype=torch.float64), torch.ones(2, 1)),
        (lambda w, x: (x**w).sum(1), torch.tensor(2.0, dtype=torch.float64), torch.ones(2, 1)),
        (lambda w, x: ((w - x) ** 2).sum(1), torch.ones(1), torch.tensor([[3], [200]], dtype=torch.uint8)),
        (lambda w, x: (torch.add(w, x, alpha=3) ** 2).sum(1), torch.ones(1), torch.tensor([[3], [100]], dtype=torch.int8)),
        (lambda w, x: (torch.rsub(x, w, alpha=2) ** 2).sum(1), torch.ones(1), torch.tensor([[3], [100]], dtype=torch.int8)),
        (lambda w, x: (w / x).sum(1), torch.ones(1), torch.tensor([[1e-5], [2.0]], dtype=torch.float16)),
        (lambda w, x: (w / x).sum(1), torch.ones(1, dtype=torch.float64), torch.tensor([[3], [7]])),
        (lambda w, x: (x / w).sum(1), *(torch.full(size, 1e-39, dtype=torch.float32) for size in ((1,), (2, 1)))),
    ],
)
def test_operands_of_other_dtypes(fn, w, x, device):
    """Each is computed in the dtype that torch takes, which ranks integers, and tensors without dimensions, below others."""
    w, x = w.to(device), x.to(device)
    values, grads = psg.per_sample_value_and_grad(fn, method="batch")(w, x)
    assert values.dtype == fn(w, x).dtype
    torch.testing.assert_close(values, fn(w, x), rtol=0, atol=0)
    assert_trees_close(grads, loop_grad(one(fn))(w, x))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "fn", [lambda w, x: (w / x).tanh().sum(1), lambda w, x: (w * x.log()).exp().sum(1), lambda w, x: (w / x * 0).sum(1)]
)
def test_zero_times_infinite_is_not_a_number(fn, n, device):
    """No cotangent tells whose a row is through which nothing but zero comes back."""
    w, x = torch.ones(1, device=device), torch.tensor([[0.0], [2.0], [3.0]], device=device)[:n]
    expected = loop_grad(one(fn))(w, x)
    assert expected[0].isnan()
    torch.testing.assert_close(psg.per_sample_grad(fn, method="batch")(w, x), expected, equal_nan=True)
    assert psg.clipped_grad(fn, 1.0, method="batch")(w, x).nonfinite == 1


@pytest.mark.parametrize("n", [1, 2, 5])
def test_frozen_operands_of_products(n, device):
    """Bias-only tuning, and a frozen matrix behind a trained one."""
    frozen = torch.randn(WIDTH, WIDTH, device=device)

    def fn(p, x):
        hidden = torch.addmm(p["b"], x, frozen).tanh() + torch.einsum("bi,ij,jk->bk", x, p["w"], frozen)
        return torch.baddbmm(p["c"], hidden.view(1, -1, WIDTH), frozen[None])[0].sin().sum(1)

    params = {"b": torch.randn(WIDTH, device=device), "c": torch.randn(WIDTH, device=device), "w": torch.randn(WIDTH, WIDTH, device=device)}
    x = torch.randn(n, WIDTH, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), loop_grad(one(fn))(params, x))


def test_products_by_name_and_into_a_tensor(device):
    matrix, vector, x = torch.randn(WIDTH, WIDTH, device=device), torch.randn(WIDTH, device=device), torch.randn(5, WIDTH, device=device)

    def fn(p, x):
        with torch.no_grad():
            gate = torch.div(x, p["v"], out=torch.empty_like(x)) + torch.addmm(p["v"], x, p["w"], out=torch.empty_like(x))
        sums = torch.addmv(x[:, 0], mat=x, vec=p["v"]) + x.addmm(mat2=p["w"], mat1=x, alpha=2).sum(1)
        return sums + torch.addr(x, vec2=p["v"], vec1=x[:, 0]).sin().sum(1) + (gate * x).sum(1)

    params = {"v": vector, "w": matrix}
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), loop_grad(one(fn))(params, x))


def test_distributions_of_a_parameter(device):
    def fn(p, x, labels):
        bernoulli = torch.distributions.Bernoulli(logits=p["b"], validate_args=False).log_prob(x).sum(1)
        return bernoulli + torch.distributions.Categorical(logits=p["c"], validate_args=False).log_prob(labels) * x.sum(1)

    params = {"b": torch.randn(WIDTH, device=device), "c": torch.randn(3, device=device)}
    batch = torch.rand(5, WIDTH, device=device).round(), torch.randint(3, (5,), device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, *batch), loop_grad(one(fn))(params, *batch))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_grouped_attention_with_a_learned_mask(n, device):
    def fn(mask, q, k):
        return F.scaled_dot_product_attention(q, k, k.sin(), attn_mask=mask, scale=0.3, enable_gqa=True).square().sum((1, 2, 3))

    mask, q, k = (torch.randn(shape, device=device) for shape in ((4, 5), (n, 6, 4, WIDTH), (n, 2, 5, WIDTH)))
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(mask, q, k), loop_grad(one(fn))(mask, q, k))


@pytest.mark.parametrize("n", [0, 1, 3])
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)),
    dropout=st.sampled_from([0.2, 0.5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=10)
def test_attention_with_a_learned_mask_and_dropout(n, sizes, dropout, seed, device):
    heads, queries, keys = sizes

    def fn(p, q, k):
        return F.scaled_dot_product_attention(q, k, k.sin(), attn_mask=p["mask"], dropout_p=dropout).square().sum((1, 2, 3))

    q, k = (torch.randn(n, heads, rows, WIDTH, device=device) for rows in (queries, keys))
    params = {"mask": torch.randn(queries, keys, device=device)}
    torch.manual_seed(seed)
    found = psg.per_sample_grad(fn, method="batch")(params, q, k)
    assert found["mask"].shape == (n, queries, keys)
    if n and device.type == "cpu":  # elsewhere torch's fused kernels draw other numbers
        torch.manual_seed(seed)
        assert_trees_close(found, of_each_loss(fn, params, q, k))


def test_attention_with_a_mask_and_causality_is_refused_as_by_torch(device):
    keys, x = torch.randn(4, WIDTH, device=device), torch.randn(5, 4, WIDTH, device=device)
    mask = torch.ones(4, 4, dtype=torch.bool, device=device)

    def fn(keys, x):
        return F.scaled_dot_product_attention(x, keys, keys, attn_mask=mask, is_causal=True).sum((1, 2))

    with pytest.raises(psg.InputError, match="reaches scaled_dot_product_attention"):
        psg.per_sample_grad(fn, method="batch")(keys, x)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize(
    "make", [torch.outer, lambda a, w: torch.einsum("b,i->bi", a, w), lambda a, w: torch.addr(a.new_zeros(len(a), 3), a, w)]
)
def test_rows_of_an_outer_product_are_each_sample_s_own(make, n, device):
    """Also where there are as many as the parameter has entries: one value for all would give the largest gradient the others' shares."""

    def fn(w, x):
        return (x * (make(torch.ones(len(x), device=x.device), w) + x)).sum(1)

    x = torch.full((n, 3), 1e-5, device=device).index_fill(0, torch.tensor([0], device=device), 1)
    found = psg.per_sample_grad(fn, method="batch")(torch.ones(3, device=device), x)
    torch.testing.assert_close(found, x, rtol=1e-6, atol=0)


FROZEN = {
    "a scale of rows": (lambda p, x, frozen: x @ (p["w"] * frozen[:, :1]), {"w": (4, 2)}),
    "a low rank": (lambda p, x, frozen: x @ (p["b"] @ frozen), {"b": (4, 4)}),
    "positions": (
        lambda p, x, frozen: (x[:, :, None] + F.embedding(torch.arange(4, device=x.device), p["table"])).tanh(),
        {"table": (6, 3)},
    ),
    "positions read by an index": (lambda p, x, frozen: (x[:, :, None] + p["table"][torch.arange(4)]).tanh(), {"table": (6, 3)}),
    "an expanded vector": (lambda p, x, frozen: x[:, :, None] * p["v"].expand(4, 3).exp(), {"v": (3,)}),
    "a buffer added to a vector": (lambda p, x, frozen: (x[:, :, None] + (p["v"] + frozen[:, :3])).square(), {"v": (3,)}),
}


@pytest.mark.parametrize("size", [1.0, 1e3, 1e7])
@pytest.mark.parametrize("name", FROZEN)
def test_a_sample_of_large_gradients_does_not_hide_that_rows_are_of_all_samples(name, size, device):
    """There are as many samples as rows of what meets the parameter: these are one value for all samples, not a sample's each."""
    fn, own = FROZEN[name]
    frozen = torch.rand(4, 4, device=device) + 0.5
    params = {key: torch.rand(shape, device=device) + 0.5 for key, shape in own.items()}
    for n in (2, 3, 4, 5, 8):
        x, scale = torch.rand(n, 4, device=device) + 0.1, torch.ones(n, device=device).index_fill(0, torch.tensor([0], device=device), size)
        found = psg.per_sample_grad(lambda p, x, s: fn(p, x, frozen).flatten(1).sum(1) * s, method="batch")(params, x, scale)  # noqa: B023
        expected = loop_grad(lambda p, x, s: fn(p, x[None], frozen).sum() * s)(params, x, scale)
        for k in range(n):
            for key in own:
                torch.testing.assert_close(found[key][k], expected[key][k], rtol=1e-9, atol=1e-9)


@given(n=st.integers(1, 70))
def test_sets_part_any_two_samples(n):
    sets = sets_apart(n)
    assert all((one > other).any() for i, one in enumerate(sets.T) for j, other in enumerate(sets.T) if i != j)


@pytest.mark.parametrize("op", [torch.float_power, lambda x, w: torch.float_power(w, x), lambda x, w: x.float_power(w)])
def test_float_power_computes_in_float64(op, device):
    w, x = torch.tensor(1.7, device=device, dtype=torch.float32), torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16, device=device)
    found = psg.per_sample_grad(lambda w, x: op(x, w).sum(1), method="batch")(w, x)
    torch.testing.assert_close(found, loop_grad(lambda w, x: op(x, w).sum())(w, x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", [torch.add, torch.mul])
def test_a_number_computed_from_the_only_sample_leaves_the_weight_s_dtype(op, device):
    w, x = torch.rand(2, 3, device=device, dtype=torch.float32)
    fn = lambda w, x: op(x.double().sum(), w).sum()[None]  # noqa: E731
    torch.testing.assert_close(psg.per_sample_value_and_grad(fn, method="batch")(w, x[None])[0], fn(w, x))


def test_sums_with_padding_that_is_infinite_take_one_pass(device):
    """Their gradient does not read the data: zero times infinity does not arise, and nothing runs sample by sample."""
    calls = []

    def fn(w, x):
        calls.append(len(x))
        return torch.where(x.isfinite(), x + w, 0.0).sin().sum((1, 2))

    x = torch.randn(6, 3, 2, device=device)
    x[:, 2] = -torch.inf
    w = torch.randn(2, device=device)
    found = psg.per_sample_grad(fn, method="batch")(w, x)
    assert 1 not in calls
    assert_trees_close(found, loop_grad(one(fn))(w, x))


@given(
    n=st.integers(0, 4),
    t=st.integers(1, 3),
    i=st.integers(1, 4),
    o=st.integers(1, 4),
    scale=st.sampled_from([1, 0.5, -2]),
    frozen=st.booleans(),
)
def test_products_of_drawn_shapes(n, t, i, o, scale, frozen):
    """tensordot in both orders, inner, outer, and products that are added to a parameter, beside frozen matrices or trained ones."""
    params = {"w": torch.randn(i, o), "a": torch.randn(o), "c": torch.randn(t, o), "v": torch.randn(i)}
    fixed, x = torch.randn(i, o), torch.randn(n, t, i)

    def fn(p, x):
        own = fixed if frozen else p["w"]
        found = torch.tensordot(x, p["w"], dims=1) + torch.tensordot(p["w"], x, dims=([0], [2])).permute(1, 2, 0)
        found = found + torch.inner(x, p["w"].T) + torch.baddbmm(p["c"], x, own.expand(len(x), i, o), beta=scale, alpha=2)
        found = found * torch.addmm(p["a"], x[:, 0], own, alpha=scale)[:, None] + torch.outer(x[:, 0, 0], p["a"])[:, None]
        return (found.sin().sum((1, 2)) + torch.addmv(x[:, 0, 0], x[:, 0], p["v"], beta=scale)) * torch.linalg.vecdot(x, p["v"]).sum(1)

    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), loop_grad(one(fn))(params, x))


REPETITIONS = {  # to [n, m, *shape]
    "whole, in front": lambda w, n, m: w.repeat(n, 1, 1).view(n, 1, *w.shape),
    "whole, in front of heads": lambda w, n, m: w.repeat(n * m, 1, 1).view(n, m, *w.shape),
    "whole, tiled": lambda w, n, m: torch.tile(w, (n, m, 1)).view(n, len(w), m, *w.shape[1:]).transpose(1, 2),
    "each entry, in front": lambda w, n, m: w.repeat_interleave(n, 0).view(len(w), n, *w.shape[1:]).transpose(0, 1)[:, None],
    "each entry, behind": lambda w, n, m: torch.repeat_interleave(w, n, dim=2).view(*w.shape, n).movedim(3, 0)[:, None],
    "expanded": lambda w, n, m: w[None, :, None].expand(n, -1, m, -1, -1).transpose(1, 2),
    "for all": lambda w, n, m: w.repeat(m, 1, 1).view(1, m, *w.shape),
    "for all, each entry": lambda w, n, m: w.repeat_interleave(m, 1)[:, ::m],
}


@given(
    seed=st.integers(0, 10_000),
    n=st.sampled_from([0, 1, 2, 3, None]),
    m=st.integers(1, 3),
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    repetition=st.sampled_from(sorted(REPETITIONS)),
    made=st.sampled_from([lambda w: w, torch.tanh]),
)
def test_repetitions_of_dimensions_of_a_parameter(seed, n, m, shape, repetition, made):
    """Of heads over the batch, say, as models with relative positions make them; n is None for as many samples as heads."""
    torch.manual_seed(seed)
    w, x = torch.randn(shape), torch.randn(shape[0] if n is None else n, m, *shape)

    def fn(w, x):
        return (x * REPETITIONS[repetition](made(w), len(x), m)).sin().flatten(1).sum(1)

    expected = loop_grad(one(fn))(w, x)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(w, x), expected)
    assert_trees_close(psg.per_sample_norm(fn, method="batch")(w, x), reference_norm(expected))


def filled(p, d):
    """A triangle and a diagonal, as in flows; a row, a column, entries of a mask, a view."""
    w = torch.zeros(d, d, device=p["v"].device)
    i, j = torch.tril_indices(d, d, -1, device=w.device)
    w[i, j] = p["w"][i, j].sin()
    w[range(d), range(d)] = p["v"].exp()
    w[d - 1] += p["v"]
    w[:, 0] = p["s"]
    w[torch.eye(d, device=w.device) > 0] *= p["v"]
    w.view(-1)[d:] *= 2
    return w


def added(p, d):
    """A constant as in merged weights, and what a diagonal of it becomes."""
    w = torch.eye(d, device=p["v"].device)
    w += p["w"]
    w.diagonal().copy_(p["v"])
    return w.clamp_(-0.5, 0.5)


def table_of_a_network(p, d):
    """A network of constants with activations in place, as of continuous positions."""
    places = torch.linspace(-1, 1, d, device=p["v"].device)[:, None]
    hidden = F.relu(F.linear(places, p["w"][:, :1], p["v"]).mul_(3).add_(p["s"]), inplace=True)
    return F.linear(hidden, p["w"]).sub_(p["v"]).mul_(2).sigmoid_()


def written_clone(p, d):
    w = p["w"].clone()
    before = w * 1.5
    w[torch.arange(0, d, 2, device=w.device)] = p["v"]
    w[0].mul_(3)
    w[1:, 0] = 0
    return w + before


def heads_of_positions(p, d):
    """A table of three dimensions: torch's own output is a view, of which fn has further ones."""
    table = F.linear(torch.linspace(-1, 1, d, device=p["v"].device).view(1, d, 1), p["w"][:, :1], p["v"]).mul_(2)
    heads = table.view(1, d, 1, d).transpose(1, 2)
    heads /= 1 + p["s"].square()
    return heads[0, 0] + table[0].sin()


def row_by_row(p, d):
    w = torch.empty(d, d, device=p["v"].device)
    for i in range(min(d, 6)):
        w[i] = p["w"][i] * (i + p["s"])
    return w[: min(d, 6)].repeat(d, 1)[:d]


@given(
    seed=st.integers(0, 10_000),
    d=st.integers(1, 6),
    n=st.sampled_from([0, 1, 3, None]),
    write=st.sampled_from([filled, added, table_of_a_network, heads_of_positions, written_clone, row_by_row]),
    use=st.sampled_from([lambda x, w: F.linear(x, w), lambda x, w: x[:, :, None] * w + x[:, None]]),
)
def test_writes_into_what_is_computed_once(seed, d, n, write, use):
    """Of parameters into new constants, and in place of values that parameters alone make; n is None for as many samples as sizes."""
    torch.manual_seed(seed)
    params = {name: torch.randn(shape) for name, shape in {"w": (d, d), "v": (d,), "s": ()}.items()}
    x = torch.randn(d if n is None else n, d)

    def fn(p, x):
        return use(x, write(p, d)).sin().flatten(1).sum(1)

    expected = loop_grad(one(fn))(params, x)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), expected)
    norms = reference_norm(expected)
    assert_trees_close(psg.per_sample_norm(fn, method="batch")(params, x), norms)
    clipped = psg.clipped_grad(fn, 0.5, method="batch")(params, x)
    assert_trees_close(clipped.grads, reference_weighted_sum(expected, (0.5 / norms).clamp(max=1)), atol=1e-11, per_sample=False)


def of_class_tokens(p, rows):
    """A token in front of as many rows as each sample has."""
    return [F.linear(torch.cat([p["token"][None], row, p["state"].expand(2, -1)]), p["w"]) for row in rows]


def of_written_tokens(p, rows):
    hidden = torch.zeros(len(rows), 5, 4, device=p["w"].device)
    for i, row in enumerate(rows):
        hidden[i, 0] = p["token"]
        hidden[i, 1 : 1 + len(row)] = row @ p["w"]
        hidden[i, 4] /= 2 + p["state"].square()
    return hidden


def of_single_rows(p, rows):
    choices = [torch.where(row[0] > 0, p["token"], row[-1]) / (1 + p["state"].square()) for row in rows]
    return [torch.maximum(torch.stack([choice, p["state"]]), p["token"]) @ p["w"] for choice in choices]


@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 3), max_size=5),
    embed=st.sampled_from([of_class_tokens, of_written_tokens, of_single_rows]),
)
def test_parameters_that_meet_one_sample_at_a_time(seed, sizes, embed):
    """In loops of fn's own, over samples of several sizes."""
    torch.manual_seed(seed)
    params = {"token": torch.randn(4), "state": torch.randn(4), "w": torch.randn(4, 4)}
    x, lengths = torch.randn(len(sizes), 3, 4), torch.tensor(sizes, dtype=torch.long)

    def fn(p, x, lengths):
        losses = [own.sin().sum() for own in embed(p, [own[:size] for own, size in zip(x, lengths.tolist(), strict=True)])]
        return torch.stack(losses) if losses else F.linear(x, p["w"]).sum((1, 2))

    expected = loop_grad(one(fn))(params, x, lengths)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x, lengths), expected)
    assert_trees_close(psg.per_sample_norm(fn, method="batch")(params, x, lengths), reference_norm(expected))


@pytest.mark.parametrize("n", [0, 1, 3, 4])
def test_writes_of_parameters_into_rows_of_each_sample_s_own(n, device):
    """A class token and an initial state, beside a matrix that is one value for all samples."""
    shapes = {"token": (4,), "state": (4,), "w": (4, 4)}
    params = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}

    def fn(p, x):
        hidden = torch.zeros(len(x), 3, 4, device=device)
        hidden[:, 0] = p["token"]
        hidden[:, 1:] = x[:, None]
        state = torch.zeros(len(x), 4, device=device)
        state += p["state"]
        weight = torch.zeros(4, 4, device=device)
        weight[1:] = p["w"][1:]
        return F.linear(hidden, weight).sin().sum((1, 2)) + (state * x).cos().sum(1)

    x = torch.randn(n, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn, method="batch")(params, x), loop_grad(one(fn))(params, x))


@pytest.mark.parametrize(
    "op",
    [
        lambda p, x, s, t: F.linear(x, p["w"]) + p["b"] * s,
        lambda p, x, s, t: F.linear(x, p["w"]) * torch.where(s > 0, p["b"], s),
        lambda p, x, s, t: x @ (p["w"].T @ t.T),
    ],
    ids=["product", "where", "matrix product"],
)
def test_shared_arguments_that_require_grad(op, device):
    """What is computed from them and parameters is one value for all samples, whether or not the caller differentiates further."""
    params = {"w": torch.randn(4, 3, device=device), "b": torch.randn(4, device=device)}
    x, s, t = (torch.randn(shape, device=device) for shape in ((5, 3), (4,), (2, 4)))

    def fn(p, x, s, t):
        return op(p, x, s, t).sin().sum(-1)

    expected = loop_grad(lambda p, x: fn(p, x, s, t))(params, x)
    for shared in ((s, t), (s.clone().requires_grad_(), t.clone().requires_grad_())):
        found = psg.per_sample_grad(fn, method="batch", in_dims=(None, 0, None, None))(params, x, *shared)
        assert_trees_close({name: grad.detach() for name, grad in found.items()}, expected)


@pytest.mark.parametrize("method", ["batch", "capture", "vmap", "loop"])
@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.matmul])
def test_an_operand_that_is_no_tensor_may_handle_the_op(op, method, device):
    """Tensor's own methods then return NotImplemented."""

    class Doubling:
        def doubled(self, tensor):
            return 2 * tensor.sin()

        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rmatmul__ = doubled

    w, x = torch.randn(3, device=device), torch.randn(4, 3, device=device)
    found = psg.per_sample_grad(lambda w, x: x @ op(w, Doubling()), method=method)(w, x)
    assert_trees_close(found, 2 * w.cos() * x)


def test_an_index_without_dimensions_is_a_number(device):
    """Beside it the samples' dimension stays in its place, as in torch; beside another place it would come first."""
    w, ids = torch.randn(3, 3, 5, 4, device=device), torch.tensor([4, 0, 2], device=device)
    one, weights = torch.tensor(1, device=device), torch.randn(12, device=device)
    found = psg.per_sample_grad(lambda w, ids: w[one, :, ids].sin().movedim(1, 0).flatten(1) @ weights, method="batch")(w, ids)
    assert_trees_close(found, loop_grad(lambda w, i: w[1, :, i].sin().flatten() @ weights)(w, ids))
