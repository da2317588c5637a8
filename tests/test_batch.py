"""Functions of a whole batch (method="batch"), each against the loop over batches of one."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg.testing import Mismatch, assert_trees_close, loop_grad, reference_norm, reference_weighted_sum

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
    """Rows that stand in no order of the samples, and a weight used twice."""

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
    """Low-rank and transposed parameters: computed once, pulled back."""

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


PROBLEMS = [experts, images, shuffled, time_first, derived, projection]
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.__name__)


def one(fn):
    """The function of one sample."""
    return lambda params, *sample: fn(params, *(x[None] for x in sample))[0]


@each_problem
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_gradients_equal_the_loop(problem, n, device):
    fn, params, batch = problem(n, device)
    found_values, found = psg.per_sample_value_and_grad(fn, method="batch")(params, *batch)
    assert_trees_close(found, loop_grad(one(fn))(params, *batch), rtol=1e-9)
    if n:
        assert_trees_close(found_values, fn(params, *batch), rtol=1e-9)


@each_problem
@pytest.mark.parametrize("n", [0, 1, 5])
def test_reductions_equal_the_loop(problem, n, device):
    fn, params, batch = problem(n, device)
    grads = loop_grad(one(fn))(params, *batch)
    norms = reference_norm(grads)
    assert_trees_close(psg.per_sample_norm(fn, method="batch")(params, *batch), norms, rtol=1e-9)
    clip_norm = float(norms.median()) if n else 1.0
    out = psg.clipped_grad(fn, clip_norm, method="batch")(params, *batch)
    expected = reference_weighted_sum(grads, (clip_norm / norms).clamp(max=1))
    assert_trees_close(out.grads, expected, rtol=1e-9, atol=1e-11, per_sample=False)


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
    assert_trees_close(psg.per_sample_grad(fn, method="batch", chunk_size=size)(params, *batch), whole, rtol=1e-9)


def test_aux_and_containers(device):
    fn, params, (x,) = projection(4, device)

    @dataclasses.dataclass
    class Rows:
        x: torch.Tensor

    def with_aux(p, rows):
        return fn(p, rows.x), {"twice": 2 * rows.x, "name": "rows"}

    grads, aux = psg.per_sample_grad(with_aux, method="batch", has_aux=True)(params, Rows(x))
    assert_trees_close(grads, loop_grad(one(fn))(params, x), rtol=1e-9)
    assert torch.equal(aux["twice"], 2 * x) and aux["name"] == "rows"


def test_differentiable(device):
    fn, params, batch = time_first(4, device)
    results = []
    for function, method in ((fn, "batch"), (one(fn), "vmap")):
        w = params.clone().requires_grad_()
        psg.per_sample_norm(function, method=method)(w, *batch).sum().backward()
        results.append(w.grad)
    assert_trees_close(*results, rtol=1e-9, per_sample=False)


def test_rows_shared_by_samples_are_found_out(device):
    def centred(p, x):
        return F.linear(x - x.mean(0), p["w"]).square().sum(1)  # another sample moves the row, no loss but its own depends on it

    def mixed(p, x):
        rows = F.linear(x, p["w"])
        return (rows - rows.mean(0)).square().sum(1)

    params, x = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(5, WIDTH, device=device)
    with pytest.raises(psg.StateError, match=r"linear has a row on which more than one loss depends"):
        psg.per_sample_grad(mixed, method="batch")(params, x)
    with pytest.raises(Mismatch):
        psg.check(centred, method="batch")(params, x)


@pytest.mark.parametrize(
    "fn, message",
    [
        (
            lambda p, x: torch.cat([x, p["w"][:1].expand(len(x), -1)], 1).sum(1),
            r"expand of .*p\['w'\].* reaches cat at .*test_batch\.py:\d+",
        ),
        (lambda p, x: F.conv1d(x.T, p["w"][:, :, None]).sum(0), r"reaches conv1d"),
        (lambda p, x: F.linear(x, p["w"]).sum(), r"expected fn to return one loss for each of the 5 samples, got a tensor of shape \(\)"),
        (lambda p, x: (lambda h: F.linear(h, p["w"]).sum(1) + h.mul_(2).sum(1))(x * 1), r"an input of linear was changed in place"),
    ],
)
def test_what_cannot_be_told_is_an_error(fn, message, device):
    params, x = {"w": torch.randn(3, WIDTH, device=device)}, torch.randn(5, WIDTH, device=device)
    with pytest.raises(psg.InputError, match=message):
        psg.per_sample_grad(fn, method="batch")(params, x)
