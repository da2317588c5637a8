"""Samples that clipped_grad leaves out: masked ones, and those that are not finite."""

import math

import pytest
import torch
import torch.nn.functional as F
from agreement import rows_loss, summed, two_layer_params
from agreement import two_layer_loss as loss
from cases import score

import psg
from psg.clipping import PerLeaf
from psg.testing import (
    assert_trees_close,
    loop_grad,
)
from psg.testing._loop import tree_map

N = 5


@pytest.fixture
def args(device):
    return two_layer_params(device), torch.randn(N, 6, 3, device=device)


# --- masks --------------------------------------------------------------------------------------------------


def test_mask(args, device):
    params, x = args
    mask = torch.tensor([True, False, True, True, False], device=device)
    out = psg.clipped_grad(loss, 0.5)(params, x, mask=mask)
    alone = psg.clipped_grad(loss, 0.5)(params, x[mask])
    summed(out.grads, alone.grads, "grads")
    for name in ("norms", "values"):
        found = getattr(out, name)
        assert (found[~mask] == 0).all(), name
        assert_trees_close(found[mask], getattr(alone, name), name=name)
    assert all((coef[~mask] == 0).all() for coef in out.clip_coef.values())


def test_vmap_over_masks(args, device):
    masks = torch.arange(2**N, device=device)[:, None].bitwise_and(2 ** torch.arange(N, device=device)) > 0
    clipped = lambda mask: psg.clipped_grad(loss, 0.5)(*args, mask=mask).grads  # noqa: E731
    expected = tree_map(lambda *rows: torch.stack(rows), *map(clipped, masks))
    assert_trees_close(torch.func.vmap(clipped)(masks), expected)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, 1e38])
def test_a_masked_sample_contributes_exactly_zero_whatever_it_holds(bad, args, device):
    params, x = args
    mask = torch.tensor([True, True, True, True, False], device=device)
    plain = psg.clipped_grad(loss, 0.5)(params, x, mask=mask)
    spoiled = x.clone()
    spoiled[-1] = bad
    out = psg.clipped_grad(loss, 0.5)(params, spoiled, mask=mask)
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), out.grads, plain.grads)
    assert out.nonfinite.item() == 0
    assert out.norms[-1] == 0 and out.values[-1] == 0


def test_everything_masked_is_an_exact_zero(args, device):
    out = psg.clipped_grad(loss, 0.5)(*args, mask=torch.zeros(N, dtype=torch.bool, device=device))
    assert all((leaf == 0).all() for leaf in out.grads.values())
    assert (out.norms == 0).all() and (out.values == 0).all()


def test_padding_to_a_bucket(args, device):
    # What masks are for: batches of any size in one shape.
    params, x = args
    padded = torch.cat([x, torch.zeros(3, 6, 3, device=device)])
    mask = torch.arange(8, device=device) < N
    out, alone = psg.clipped_grad(loss, 0.5)(params, padded, mask=mask), psg.clipped_grad(loss, 0.5)(params, x)
    summed(out.grads, alone.grads, "grads")


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.ones(N + 1, dtype=torch.bool), rf"mask.*\({N + 1},\)"),
        (torch.ones(N, 1, dtype=torch.bool), rf"mask.*\({N}, 1\)"),
        (torch.ones(N), r"mask.*bool.*float"),
        ([True] * N, r"mask.*list"),
    ],
)
def test_a_mask_that_does_not_fit_is_an_error(mask, message, args, device):
    mask = mask.to(device) if isinstance(mask, torch.Tensor) else mask
    with pytest.raises(psg.InputError, match=message):
        psg.clipped_grad(loss, 0.5)(*args, mask=mask)


# --- samples that are not finite ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", ["clip", "automatic", "normalize"])
@pytest.mark.parametrize("clip_norm", [0.5, math.inf, 0.0], ids=str)
def test_a_bad_sample_contributes_exactly_zero_and_is_counted(bad, policy, clip_norm, args):
    if clip_norm == math.inf and policy != "clip":
        clip_norm = 1e6  # these policies cannot scale to an infinite norm
    params, x = args
    x[1, 0, 0] = bad
    out = psg.clipped_grad(loss, clip_norm, policy=policy)(params, x)
    rest = psg.clipped_grad(loss, clip_norm, policy=policy)(params, x[[0, 2, 3, 4]])
    summed(out.grads, rest.grads, "grads")
    assert all(leaf.isfinite().all() for leaf in out.grads.values())
    assert out.nonfinite.item() == 1
    assert not out.norms[1].isfinite()
    assert all(coef[1] == 0 for coef in out.clip_coef.values())


def test_a_bad_sample_in_one_leaf_is_left_out_of_all(args):
    # With one clip norm per leaf too: a sample is left out as a whole, never in part.
    params, x = args

    def fn(p, x):
        return loss(p, x) + (p["c"] * (1 / x[0, 0] - 1 / x[0, 0])).sum()

    x[2, 0, 0] = 0.0
    out = psg.clipped_grad(fn, PerLeaf(0.5))(params, x)
    rest = psg.clipped_grad(fn, PerLeaf(0.5))(params, x[[0, 1, 3, 4]])
    summed(out.grads, rest.grads, "grads")
    assert out.nonfinite.item() == 1


def test_a_gradient_whose_norm_overflows(device):
    # Finite entries, but no finite norm in float32: no coefficient can clip the sample, so it is left out.
    x = torch.tensor([[1e30, 1e30], [3.0, 4.0]], dtype=torch.float32, device=device)
    out = psg.clipped_grad(rows_loss, 1.0)(torch.zeros(2, dtype=torch.float32, device=device), x)
    assert_trees_close(out.grads, torch.tensor([0.6, 0.8], dtype=torch.float32, device=device), per_sample=False)
    assert out.nonfinite.item() == 1


def test_a_bad_sample_through_every_kind_of_factor(device):
    def fn(p, tokens, image, gain):
        y = F.embedding(tokens, p["table"]).sum(0) * gain
        z = F.conv2d(image, p["kernel"]).mean((1, 2)) * gain
        return score(F.linear(y, p["weight"], p["bias"])) + score(z) + score(F.linear(y, p["table"]))

    params = {"table": torch.randn(6, 4), "kernel": torch.randn(3, 2, 2, 2), "weight": torch.randn(2, 4), "bias": torch.randn(2)}
    params = tree_map(lambda leaf: leaf.to(device), params)
    tokens, image = torch.randint(6, (3, 5), device=device), torch.randn(3, 2, 4, 4, device=device)
    gain = torch.tensor([1.0, math.nan, 1.0], device=device)
    out = psg.clipped_grad(fn, 0.5)(params, tokens, image, gain)
    rest = psg.clipped_grad(fn, 0.5)(params, tokens[[0, 2]], image[[0, 2]], gain[[0, 2]])
    summed(out.grads, rest.grads, "grads")
    assert out.nonfinite.item() == 1


@pytest.mark.parametrize("locate", [torch.nonzero, torch.argwhere, lambda x: x.nonzero(as_tuple=True), torch.where])
@pytest.mark.parametrize("entries", [[1.0, 2.0], [0.0, 0.0]])
def test_the_nonzero_entries_of_a_number(locate, entries, device):
    def fn(w, x):
        return w * x, locate(x)

    args = torch.ones((), device=device), torch.tensor(entries, device=device)
    (_, found), (_, expected) = psg.per_sample_grad(fn, has_aux=True)(*args), loop_grad(fn, has_aux=True)(*args)
    assert_trees_close(found, expected)


def count(x):
    return (x > 0).sum()


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (w * x)[: count(x)].sum(),
        lambda w, x: (w[:4] * torch.arange(count(x), device=x.device)).sum() * x.sum(),
        lambda w, x: (x.new_zeros((count(x), 2)) + w[:2]).square().sum() * x.sum(),
        lambda w, x: torch.cat([w, x]).view(count(x), -1).prod(0).sum(),
        lambda w, x: (w * x).topk(count(x)).values.sum(),
        lambda w, x: F.pad(w * x, (0, count(x)), value=1.0).sum().square(),
        lambda w, x: torch.stack([part.sum() for part in (w * x).split([count(x), 2])]).prod(),
        lambda w, x: (w * torch.roll(x, count(x) - 2)).sum(),
    ],
)
def test_integer_tensors_that_torch_reads_as_numbers(fn, device):
    w, x = torch.randn(6, device=device), torch.rand(3, 6, device=device)
    x[:, 4:] *= -1
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))


@pytest.mark.filterwarnings("error")
def test_integer_tensors_that_differ_between_samples(device):
    w, x = torch.randn(6, device=device), torch.rand(4, 6, device=device)
    x[:2, 4:] *= -1
    fn = lambda w, x: (w * x)[: count(x)].square().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn, method="capture")(w, x), loop_grad(fn)(w, x))
