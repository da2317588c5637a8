"""Random numbers in fn: each sample its own, one draw for all results of a call."""

import contextlib
import functools
import random

import numpy as np
import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
import torch.utils.checkpoint

import psg
from psg.testing import assert_trees_close


def dropout_loss(p, x):
    """The gradient of sample n for p is its dropout mask times x[n]: it can be read off."""
    return F.dropout(p * x, 0.5).sum()


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_each_sample_draws_its_own_mask(method, device):
    p, x = torch.ones(64, device=device), torch.ones(8, 64, device=device)
    grads = psg.per_sample_grad(dropout_loss, method=method)(p, x)
    assert set(grads.unique().tolist()) == {0.0, 2.0}
    assert len({tuple(row.tolist()) for row in grads}) == 8


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_randomness_same_draws_one_mask(method, device):
    p, x = torch.ones(64, device=device), torch.ones(8, 64, device=device)
    grads = psg.per_sample_grad(dropout_loss, method=method, randomness="same")(p, x)
    assert set(grads.unique().tolist()) == {0.0, 2.0}
    assert len({tuple(row.tolist()) for row in grads}) == 1


@pytest.mark.parametrize("method", ["auto", "capture", "vmap"])
def test_randomness_error_refuses_to_draw(method, device):
    p, x = torch.ones(4, device=device), torch.ones(8, 4, device=device)
    with pytest.raises(RuntimeError, match="random"):
        psg.per_sample_grad(dropout_loss, method=method, randomness="error")(p, x)


@pytest.mark.parametrize("randomness, way_out", [("error", 'Use "different"'), ("same", "draw before the call and share the numbers")])
@pytest.mark.parametrize("bad", [False, True])
def test_a_whole_batch_draws_at_once_which_other_randomness_refuses(randomness, way_out, bad, device):
    """A sample that is not finite runs alone, but has been refused before."""
    options = {"method": "batch", "randomness": randomness}

    def fn(p, x):
        return F.dropout(p * x, 0.5).sum(1)

    p, x = torch.ones(4, device=device), torch.ones(8, 4, device=device)
    x[2, 0] = torch.nan if bad else 1.0
    with pytest.raises(psg.StateError, match=f'drew random numbers, which randomness="{randomness}" forbids.*{way_out}'):
        psg.per_sample_grad(fn, **options)(p, x)
    assert_trees_close(psg.per_sample_grad(lambda p, x: (p * x).sum(1), **options)(p, x), x)


def test_batches_of_one_may_draw_the_same(device):
    p, x = torch.ones(64, device=device), torch.ones(8, 64, device=device)

    def fn(p, x):
        return F.dropout(p * x, 0.5).sum(1)

    grads = psg.per_sample_grad(fn, method="batch", randomness="same", chunk_size=1)(p, x)
    assert set(grads.unique().tolist()) == {0.0, 2.0} and len(grads.unique(dim=0)) == 1
    with pytest.raises(psg.StateError, match='randomness="error" forbids'):
        psg.per_sample_grad(fn, method="batch", randomness="error")(p, x[:1])


def layer_drop(p, x):
    y = (p * x).sum()
    return 0 * y if torch.rand([], device=x.device) < 0.5 else y


def kept_tokens(p, x):
    return (p * x)[torch.rand(2, device=x.device) < 0.5].sum()


def drawn_width(p, x):
    return (p * x)[: torch.randint(0, 3, (), device=x.device)].sum()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning", "ignore:psg.*uses none")
@pytest.mark.parametrize("fn", [layer_drop, kept_tokens, drawn_width])
def test_branches_on_random_numbers_are_taken_apart(fn, device):
    """Where passes went on if all samples happened to agree, two samples agreed in six calls of seven instead of one of two."""
    p, x = torch.ones(2, device=device), torch.ones(2, 2, device=device)
    norms = torch.stack([psg.per_sample_norm(fn)(p, x) for _ in range(400)]).square()
    first, second = norms.cpu().unbind(1)
    assert first.unique().numel() == second.unique().numel() == norms.unique().numel()
    counts = torch.stack([(norms == value).double().mean() for value in norms.unique()]).cpu()
    agreed = (first == second).double().mean()
    assert abs(agreed - counts.square().sum()) < 0.125  # five standard deviations of 400 independent pairs
    with pytest.raises(psg.PsgError, match="Python value from random numbers.*same"):
        psg.per_sample_norm(fn, method="capture")(p, x)
    if fn is not kept_tokens:
        psg.per_sample_norm(fn, method="capture", randomness="same")(p, x)


def attend(x, *options, **named):
    return F.scaled_dot_product_attention(x, x, x, *options, **named)


DRAWING = [
    F.dropout,
    lambda x: F.dropout(x, 0.5),
    lambda x: F.dropout(x, training=True),
    lambda x: attend(x, None, 0.5),
    lambda x: attend(x, dropout_p=0.5),
]
NOT_DRAWING = [
    lambda x: F.dropout(x, 0.0),
    lambda x: F.dropout(x, 0.5, False),
    lambda x: F.dropout(x, training=False),
    attend,
    lambda x: attend(x, None, 0.0),
    lambda x: attend(x, dropout_p=0),
]


@pytest.mark.parametrize("op, draws", [(op, op in DRAWING) for op in DRAWING + NOT_DRAWING])
def test_a_branch_on_a_drop_of_which_options_tell_whether_it_draws(op, draws, device):
    def fn(p, x):
        y = op(x) * p
        return y.sum() if y.isfinite().all() else 2 * y.sum()

    p, x = torch.ones(3, device=device), torch.randn(2, 2, 4, 3, device=device)
    with pytest.raises(psg.PsgError, match="Python value from random numbers") if draws else contextlib.nullcontext():
        psg.per_sample_norm(fn, method="capture")(p, x)


def test_branches_on_data_beside_random_numbers_stay_on_the_first_rung(device):
    def fn(p, x):
        y = F.dropout(p * x, 0.5).sum()
        return y if x[0] > 0 else 2 * y

    p, x = torch.ones(64, device=device), torch.ones(4, 64, device=device)
    x[1] = -1
    grads = psg.per_sample_grad(fn, method="capture")(p, x)
    assert set(grads[[0, 2, 3]].unique().tolist()) == {0.0, 2.0} and set(grads[1].unique().tolist()) == {0.0, -4.0}


PARAMETER_NOISE = {
    "dropped weights": lambda w, x: F.linear(x, F.dropout(w, 0.5)),
    "noise like the weights": lambda w, x: F.linear(x, w + torch.randn_like(w)),
    "weights as probabilities": lambda w, x: F.linear(x, w * torch.bernoulli(w.detach() * 0.5)),
    "fresh noise": lambda w, x: F.linear(x, w * torch.rand(8, 8, device=w.device)),
    "alpha dropout": lambda w, x: F.linear(x, F.alpha_dropout(w, 0.5, training=True)),
    "normal around the weights": lambda w, x: F.linear(x, torch.normal(w, 1.0)).square(),
}


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
@pytest.mark.parametrize("name", PARAMETER_NOISE)
def test_noise_on_parameters_is_drawn_for_each_sample(name, method, device):
    # The noisy weight does not depend on the sample, and still each sample draws its own noise.
    w, x = torch.ones(8, 8, device=device), torch.ones(4, 8, device=device)
    fn = PARAMETER_NOISE[name]
    values = psg.per_sample_value_and_grad(lambda w, x: fn(w, x).square().sum(), method=method)(w, x)[0]
    assert values.unique().numel() == 4


@pytest.mark.parametrize("distribution", [D.Laplace, D.Cauchy, D.Weibull])
def test_distributions_draw_for_each_sample(distribution, device):
    # These distributions draw into memory that they allocate with the legacy Tensor.new.
    w, x = torch.ones(3, device=device), torch.ones(4, 3, device=device)
    values = psg.per_sample_value_and_grad(lambda w, x: distribution(w * x, w).rsample().sum(), method="capture")(w, x)[0]
    assert values.unique().numel() == 4


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("lead", [(), (2,), (2, 1)])
@pytest.mark.parametrize("of", ["weights", "samples"])
@pytest.mark.parametrize("distribution", [D.Dirichlet, lambda c: D.Beta(c, c.flip(0)), lambda c: D.Gamma(c, c), D.Chi2])
def test_reparametrised_draws_are_differentiated_for_each_sample(distribution, of, lead, n):
    # torch's function of the Dirichlet distribution is in the old style, which vmap refuses. On the CPU a batch draws what a loop draws.
    def fn(p, x, y):
        logits = F.linear(x, p["w"]) if of == "samples" else p["b"]
        return (distribution(logits.exp()).rsample() * y).sum().square()

    params = {"w": torch.randn(3, 4) / 2, "b": torch.randn(*lead, 3) / 2}
    args = params, torch.randn(n, *lead, 4), torch.randn(n, *lead, 3)
    torch.manual_seed(0)
    values, grads = psg.per_sample_value_and_grad(fn, method="capture")(*args)
    torch.manual_seed(0)
    expected, expected_grads = psg.per_sample_value_and_grad(fn, method="loop")(*args)
    assert_trees_close(values, expected)
    assert_trees_close(grads, expected_grads)
    assert values.unique().numel() == n


def test_norms_and_sums_of_one_call_see_the_same_mask(device):
    p, x = torch.ones(64, device=device), torch.ones(1, 64, device=device)
    out = psg.clipped_grad(dropout_loss, float("inf"))(p, x)
    assert_trees_close(torch.linalg.vector_norm(out.grads)[None], out.norms)
    assert_trees_close(out.grads.sum()[None], out.values)
    out = psg.clipped_grad(dropout_loss, 0.25)(p, x)
    assert torch.linalg.vector_norm(out.grads).item() == pytest.approx(0.25)


def test_dropout_before_a_rule_is_the_same_in_both_passes(device):
    # The factor of the second layer must hold the masked input that the forward pass used.
    def fn(p, x):
        return F.linear(F.dropout(F.linear(x, p["a"]), 0.5), p["b"]).sum()

    params = {"a": torch.ones(16, 1, device=device), "b": torch.ones(1, 16, device=device)}
    values, grads = psg.per_sample_value_and_grad(fn)(params, torch.ones(4, 1, device=device))
    assert_trees_close(grads["b"].sum((1, 2)), values)
    assert_trees_close(grads["a"].sum((1, 2)), values)


@pytest.mark.parametrize("method", ["auto", "capture", "vmap", "loop"])
def test_attention_drops_for_each_sample(method, device):
    # All samples are the same, so that only the dropped weights can make their losses differ.
    w, x = torch.randn(4, 4, device=device), torch.ones(4, 6, 4, device=device).cumsum(1) / 6

    def fn(w, x, p):
        q, k, v = (F.linear(x, w) + shift for shift in (0, 1, 2))
        return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], dropout_p=p).square().sum()

    plain = psg.per_sample_value_and_grad(fn, method=method)(w, x, 0.0)[0]
    assert_trees_close(plain, plain[:1].expand(4))
    dropped = psg.per_sample_value_and_grad(fn, method=method)(w, x, 0.5)[0]
    assert dropped.unique().numel() == 4
    assert ((dropped - plain).abs() > 1e-3).all()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_randomness_same_draws_one_mask_on_whichever_rung_a_chunk_runs(device):
    def fn(p, x):
        kept = F.dropout(p * x, 0.5)
        return (kept * (1 + int(x[0] * 1000))).sum()  # one number in the first chunk; several in the second, which needs the loop

    p, x = torch.ones(16, device=device), torch.rand(16, 16, device=device) + 1e-3
    x[:8, 0] = 0.0015
    grads = psg.per_sample_grad(fn, randomness="same", chunk_size=8)(p, x)
    assert len((grads != 0).unique(dim=0)) == 1


def test_randomness_same_draws_one_mask_however_often_a_pass_starts(device):
    def fn(p, x):
        kept = F.dropout(p * x, 0.5)
        held = torch.zeros(16, device=x.device)
        held.copy_(kept)  # makes the pass start again
        return held.sum()

    p, x = torch.ones(16, device=device), torch.rand(3, 16, device=device)
    torch.manual_seed(0)
    grads = psg.per_sample_grad(fn, randomness="same")(p, x)
    torch.manual_seed(0)
    assert_trees_close(grads, psg.per_sample_grad(fn, randomness="same", method="loop")(p, x))


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(("method", "way"), [("auto", "repeated"), ("auto", "compiling"), ("auto", "vmap"), ("vmap", "compiling")])
def test_passes_that_are_given_up_leave_the_random_numbers_to_the_next(method, way, device):
    def fn(p, x, plain=False):
        kept = F.dropout(p * x, 0.5)
        if plain:
            return kept.square().sum()
        if way == "repeated":
            held = torch.zeros(16, device=x.device)
            held.copy_(kept)  # makes the pass start again
            kept = held
        elif way == "compiling" and not torch.compiler.is_compiling():
            kept = kept if x[0] > 0.5 else kept * 1  # the samples go different ways
        elif way == "vmap":
            with torch.no_grad():
                p.clamp_(-1, 1)  # which the capture pass refuses
        return kept.square().sum()

    p, x = torch.ones(16, device=device), torch.rand(3, 16, device=device)
    x[:, 0] = torch.tensor([0.2, 0.7, 0.8])
    torch.manual_seed(0)
    found, after = psg.per_sample_grad(fn, method=method)(p, x), torch.rand(1)
    torch.manual_seed(0)
    once = torch.func.vmap(torch.func.grad(functools.partial(fn, plain=True)), (None, 0), randomness="different")(p, x)
    assert_trees_close(found, once)
    assert torch.equal(after, torch.rand(1))


def test_a_batch_draws_the_same_however_often_its_pass_starts(device):
    def fn(p, x):
        kept = F.dropout(x, 0.5)
        x.zero_()  # makes the first call's pass start again; later calls begin with copies
        return kept @ p

    args, drawn = (torch.ones(16, device=device), torch.ones(3, 16, device=device)), []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append((psg.per_sample_grad(fn, method="batch")(*args), torch.rand(1)))
    assert_trees_close(*drawn)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    "draw",
    [
        lambda g, x: torch.rand(16, generator=g, device=x.device),
        lambda g, x: torch.zeros_like(x).normal_(generator=g),
        lambda g, x: torch.poisson(torch.full_like(x, 4), g),
    ],
)
def test_a_generator_seeded_in_fn_draws_the_same_for_every_sample(draw, device):
    def fn(p, x):
        return (draw(torch.Generator(device).manual_seed(0), x) * p * x).sum()

    p, x = torch.ones(16, device=device), torch.rand(3, 16, device=device)
    expected = draw(torch.Generator(device).manual_seed(0), x[0]) * x
    assert_trees_close(psg.per_sample_grad(fn)(p, x), expected)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
@pytest.mark.parametrize("method, count", [("capture", 1), ("vmap", 1), ("loop", 8)])
def test_numbers_of_python_and_numpy_are_drawn_once_but_by_the_loop(method, count, draw, device):
    w, x = torch.ones(1, device=device), torch.ones(8, 1, device=device)
    grads = psg.per_sample_grad(lambda w, x: (w * x).sum() * draw(), method=method)(w, x)
    assert grads.unique().numel() == count


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
@pytest.mark.parametrize("method", ["auto", "loop"])
def test_values_and_derivatives_come_from_one_draw_of_python_and_numpy(method, draw, device):
    w, x = torch.ones(3, device=device, requires_grad=True), torch.ones(4, 3, device=device)
    total = psg.per_sample_grad(lambda w, x: (w * x).square().sum() * draw(), method=method)(w, x).sum()
    (slope,) = torch.autograd.grad(total, w)
    torch.testing.assert_close((slope * w).sum(), total)  # which is linear in w


def _write(w, x):
    noise = torch.randn(3, device=x.device)
    noise[0] = x[0]
    return (w * noise).sum()


def _differentiate(w, x):
    start = torch.rand_like(x).requires_grad_()
    return (w * (x - torch.autograd.grad((w * start).square().sum(), start)[0])).sum()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fn", [_write, _differentiate])
def test_what_all_samples_draw_may_be_written_into_and_differentiated_for(fn, device):
    w, x = torch.randn(3, device=device), torch.randn(5, 3, device=device)
    torch.manual_seed(0)
    expected = psg.per_sample_grad(fn, randomness="same", method="loop")(w, x)
    torch.manual_seed(0)
    assert_trees_close(psg.per_sample_grad(fn, randomness="same")(w, x), expected)


@pytest.mark.parametrize("op", [F.dropout, lambda w, p: F.scaled_dot_product_attention(w, w, w, dropout_p=p)], ids=["dropout", "attention"])
def test_ops_on_parameters_that_draw_are_not_computed_once(op, device):
    """Every sample draws a mask of its own, as in the loop."""
    w = torch.ones(8, 8, device=device)
    values, _ = psg.per_sample_value_and_grad(lambda w, x: (op(w, 0.5)[0, 0] * x).sum(), randomness="different")(
        w, torch.ones(64, device=device)
    )
    assert len(set(values.tolist())) > 1


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("recorded", [False, True])
def test_dropout_in_a_checkpoint(method, randomness, recorded, device):
    """It runs again in the backward pass, with the same mask and the same scale."""

    def fn(w, x):
        hidden = torch.utils.checkpoint.checkpoint(lambda w: F.dropout(w * x, 0.5), w, use_reentrant=False)
        return hidden.sum(), hidden.detach()

    w, x = torch.ones(6, device=device, requires_grad=recorded), torch.ones(3, 6, device=device)
    for seed in range(3):
        torch.manual_seed(seed)
        grads, hidden = psg.per_sample_grad(fn, has_aux=True, randomness=randomness, method=method)(w, x)
        assert_trees_close(grads.detach(), hidden)
        assert set(hidden.flatten().tolist()) <= {0.0, 2.0}
        if randomness == "same":
            assert (hidden == hidden[0]).all()
