"""clipped_grad: exact clipping, policies, groups, masks, samples that are not finite."""

import functools
import math
import pickle
from collections import OrderedDict, defaultdict
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from agreement import rows, rows_loss, summed, two_layer_params
from agreement import two_layer_loss as loss
from conftest import as_large
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg._hardware import _fused
from psg._torch import _functorch
from psg.clipping import PerGroup, PerLeaf
from psg.factors import Outer, _base
from psg.testing import (
    assert_trees_close,
    loop_grad,
    loop_value_and_grad,
    reference_clipped_sum,
    reference_norm,
    reference_weighted_sum,
)
from psg.testing._loop import tree_map

N = 5


@pytest.fixture
def args(device):
    return two_layer_params(device), torch.randn(N, 6, 3, device=device)


# --- the clip norm ------------------------------------------------------------------------------------------


def test_everything_it_returns(args):
    values, grads = loop_value_and_grad(loss)(*args)
    norms = reference_norm(grads)
    clip_norm = norms.median().item()
    out = psg.clipped_grad(loss, clip_norm)(*args)
    assert isinstance(out, psg.ClippedGrad)
    coef = (clip_norm / norms).clamp(max=1)
    summed(out.grads, reference_weighted_sum(grads, coef), "grads")
    assert_trees_close(out.norms, norms)
    assert_trees_close(out.values, values)
    assert_trees_close(out.clip_coef, {name: coef for name in grads})
    assert_trees_close(out.group_norms, {name: norms for name in grads})
    assert out.nonfinite.item() == 0 and out.nonfinite.dim() == 0
    assert float(out.sensitivity) == clip_norm
    assert out.aux is None


def test_no_flag_changes_the_shape_of_the_result(args):
    fields = psg.ClippedGrad._fields
    assert fields == ("grads", "norms", "clip_coef", "values", "aux", "nonfinite", "sensitivity", "group_norms")
    with_aux = psg.clipped_grad(lambda p, x: (loss(p, x), x), 1.0, has_aux=True)(*args)
    assert type(with_aux) is psg.ClippedGrad
    assert_trees_close(with_aux.aux, args[1])


def test_clip_norm_zero_gives_a_zero_sum(args):
    out = psg.clipped_grad(loss, 0.0)(*args)
    assert all((leaf == 0).all() for leaf in out.grads.values())
    assert_trees_close(out.norms, reference_norm(loop_grad(loss)(*args)))


@pytest.mark.parametrize("policy", ["clip", lambda norms, clip_norm: (norms < clip_norm).to(norms)])
def test_clip_norm_infinite_gives_the_plain_sum(policy, args):
    out = psg.clipped_grad(loss, math.inf, policy=policy)(*args)
    summed(out.grads, tree_map(lambda leaf: leaf.sum(0), loop_grad(loss)(*args)), "grads")
    assert all((coef == 1).all() for coef in out.clip_coef.values())


@pytest.mark.parametrize("clip_norm", [-1.0, -0.5, math.nan, -math.inf])
def test_clip_norm_negative_or_nan_is_an_error(clip_norm, args):
    with pytest.raises(psg.InputError, match=rf"clip_norm={clip_norm}.*at least 0"):
        psg.clipped_grad(loss, clip_norm)(*args)


@pytest.mark.parametrize("kind", [torch.tensor, lambda value: PerLeaf(torch.tensor(value)), PerLeaf])
@pytest.mark.parametrize("clip_norm", [-1.0, math.nan])
def test_tensors_are_no_other_clip_norms(clip_norm, kind, args):
    with pytest.raises(psg.InputError, match=rf"clip_norm={clip_norm}.*at least 0"):
        psg.clipped_grad(loss, kind(clip_norm))(*args)


@pytest.mark.parametrize("policy", [psg.clipping.clip, psg.clipping.normalize, psg.clipping.automatic()])
def test_a_clip_norm_of_nan_clips_to_nan(policy, device):
    """On an accelerator a NaN clip norm is not detected beforehand, so the result must not look like a clipped sum."""
    assert policy(torch.tensor([0.5, 2.0], device=device), torch.tensor(math.nan, device=device)).isnan().all()


def test_a_policy_that_writes_into_the_norms(args):
    plain = psg.clipped_grad(loss, 1.0)(*args)
    found = psg.clipped_grad(loss, 1.0, policy=lambda norms, clip_norm: norms.clamp_(min=1.0).reciprocal_())(*args)
    assert_trees_close((found.norms, found.group_norms, found.clip_coef), (plain.norms, plain.group_norms, plain.clip_coef))


@pytest.mark.parametrize("clip_norm, got", [("1", "a str"), (None, "a NoneType"), (True, "a bool"), (PerLeaf, "the class PerLeaf")])
def test_clip_norm_that_is_no_number_is_an_error(clip_norm, got, args):
    with pytest.raises(psg.InputError, match=rf"clip_norm.*expected a number.*got {got}"):
        psg.clipped_grad(loss, clip_norm)(*args)


def test_clip_norm_vector_is_an_error(args, device):
    with pytest.raises(psg.InputError, match=r"clip_norm.*scalar tensor.*\(2,\)"):
        psg.clipped_grad(loss, torch.ones(2, device=device))(*args)


def test_clip_norm_may_be_a_tensor(args, device):
    grads = loop_grad(loss)(*args)
    out = psg.clipped_grad(loss, torch.tensor(0.7, device=device))(*args)
    summed(out.grads, reference_clipped_sum(grads, 0.7), "grads")
    assert float(out.sensitivity) == pytest.approx(0.7)


def test_a_zero_norm_counts_as_coefficient_one(device):
    x, p = rows(0.0, 2.0, 0.5, device=device)
    for policy, expected in (("clip", [1.0, 0.5, 1.0]), ("normalize", [1.0, 0.5, 2.0])):
        out = psg.clipped_grad(rows_loss, 1.0, policy=policy)(p, x)
        assert out.clip_coef.tolist() == expected
    assert psg.clipped_grad(rows_loss, 0.0)(p, x).clip_coef[0] == 1.0


def test_no_epsilon_is_added(device):
    # A norm that is exactly the clip norm is left alone, bit for bit, and a tiny one is clipped exactly.
    x, p = rows(3.0, 4.0, device=device)
    assert psg.clipped_grad(rows_loss, 3.0)(p, x).clip_coef.tolist() == [1.0, 0.75]
    x, p = rows(1e-12, 2e-12, device=device)
    out = psg.clipped_grad(rows_loss, 1e-12)(p, x)
    assert out.grads[0].item() == pytest.approx(2e-12, rel=1e-6)


@given(clip_norm=st.floats(1e-3, 1e3), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 2**16))
def test_clipped_sum_over_drawn_norms(clip_norm, scale, seed, device):
    torch.manual_seed(seed)
    p, x = torch.randn(4, device=device), scale * torch.randn(N, 4, device=device)
    grads = loop_grad(rows_loss)(p, x)
    out = psg.clipped_grad(rows_loss, clip_norm)(p, x)
    summed(out.grads, reference_clipped_sum(grads, clip_norm), "grads")
    # Clipping twice is clipping once, and no clipped sample is longer than the clip norm.
    clipped = grads * out.clip_coef[:, None]
    tight = 1 + 8 * torch.finfo(x.dtype).eps
    assert (reference_norm(clipped) <= clip_norm * tight).all()
    again = psg.clipped_grad(rows_loss, clip_norm * tight)(p, clipped)
    assert (again.clip_coef == 1).all()


# --- policies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, coefficient",
    [
        ("clip", lambda norms, c: (c / norms).clamp(max=1)),
        ("automatic", lambda norms, c: c / (norms + 0.01)),
        (psg.clipping.automatic(gamma=0.5), lambda norms, c: c / (norms + 0.5)),
        ("normalize", lambda norms, c: c / norms),
        (lambda norms, clip_norm: clip_norm / (1 + norms), lambda norms, c: c / (1 + norms)),
    ],
    ids=["clip", "automatic", "automatic(gamma=0.5)", "normalize", "own"],
)
def test_policies(policy, coefficient, args):
    grads = loop_grad(loss)(*args)
    norms = reference_norm(grads)
    clip_norm = norms.median().item()
    out = psg.clipped_grad(loss, clip_norm, policy=policy)(*args)
    coef = coefficient(norms, clip_norm)
    assert_trees_close(out.clip_coef["a"], coef)
    summed(out.grads, reference_weighted_sum(grads, coef), "grads")


def test_the_sensitivity_holds_for_every_named_policy(args):
    # Adding or removing one sample moves the sum by no more than the result says.
    params, x = args
    for policy in ("clip", "automatic", "normalize"):
        clipped = psg.clipped_grad(loss, 0.3, policy=policy)
        whole = clipped(params, x)
        for i in range(N):
            rest = clipped(params, x[[j for j in range(N) if j != i]])
            moved = tree_map(lambda a, b: (a - b)[None], whole.grads, rest.grads)
            assert reference_norm(moved).item() <= float(whole.sensitivity) * (1 + 100 * torch.finfo(x.dtype).eps)


def test_the_sensitivity_of_an_own_policy_is_not_claimed(args):
    assert psg.clipped_grad(loss, 1.0, policy=lambda norms, c: norms)(*args).sensitivity == math.inf


@pytest.mark.parametrize("made", [psg.clipping.automatic(0.5), psg.clipping.bounded(psg.clipping.normalize)])
def test_the_sensitivity_is_not_claimed_for_a_wrapper_of_a_bounded_policy(made, args):
    """functools.wraps copies the attributes of what it wraps, but a wrapper may return other coefficients."""
    wrapper = functools.wraps(made)(lambda norms, c: 10 * made(norms, c))
    assert psg.clipped_grad(loss, 1.0, policy=made)(*args).sensitivity == 1
    assert psg.clipped_grad(loss, 1.0, policy=wrapper)(*args).sensitivity == math.inf


def test_made_policies_are_values():
    made = psg.clipping.bounded(psg.clipping.automatic(0.5))
    assert pickle.loads(pickle.dumps(made)) == made
    assert len({made, psg.clipping.bounded(psg.clipping.automatic(0.5)), psg.clipping.bounded(psg.clipping.automatic(1.0))}) == 2


@given(clip_norm=st.sampled_from([0.0, 0.3, 2.0]), scale=st.floats(-2, 50), power=st.floats(0, 2), seed=st.integers(0, 2**16))
def test_a_bounded_policy_of_ones_own_has_a_sensitivity(clip_norm, scale, power, seed):
    torch.manual_seed(seed)
    params, x = {"a": torch.randn(4, 3), "b": torch.randn(2, 4), "c": torch.randn(4)}, torch.randn(N, 2, 3)
    x[0] = 0
    own = psg.clipping.bounded(lambda norms, clip_norm: scale * clip_norm / (norms**power + 0.1))
    out = psg.clipped_grad(lambda p, x: loss(p, x) * (x != 0).any(), clip_norm, policy=own)(params, x)
    assert out.sensitivity == clip_norm and (out.clip_coef["a"] >= 0).all()
    assert (out.clip_coef["a"] * out.norms <= clip_norm * (1 + 1e-12)).all()
    assert all(leaf.isfinite().all() for leaf in out.grads.values())
    free = scale * clip_norm / (out.norms**power + 0.1)
    free = torch.where(out.norms > 0, free, free.clamp(max=1))
    within = (free >= 0) & (free * out.norms <= clip_norm)
    assert_trees_close(out.clip_coef["a"][within], free[within])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bounded_policy_meets_norms_that_are_or_read_zero(dtype, device):
    own = psg.clipping.bounded(lambda norms, clip_norm: clip_norm / norms)
    g = torch.tensor([[0.0, 0.0], [1e-30, 0.0], [3.0, 4.0]], dtype=dtype, device=device)
    out = psg.tree.clip(g, 1.0, policy=own)
    assert out.clip_coef.isfinite().all() and out.grads.isfinite().all()
    assert psg.tree.clip(g[:2], 1.0, policy=own).grads.norm() <= 1
    users = psg.tree.segment_sum(g, torch.tensor([0, 0, 2], device=device), 4)  # two of which have no samples
    assert psg.tree.clip(users, 1.0, policy=own).grads.isfinite().all()


@pytest.mark.parametrize("policy", ["normalize", "automatic"])
def test_no_gradient_can_be_brought_to_the_infinity_of_a_tensor(policy):
    with pytest.raises(psg.InputError, match="clip_norm=inf"):
        psg.tree.clip(torch.ones(2, 3), torch.tensor(math.inf), policy=policy)


@pytest.mark.parametrize("dtype, difference", [(torch.bfloat16, 3e-3), (torch.float16, 1e-3)])
def test_a_user_whose_samples_cancel_is_clipped_in_half_precision(dtype, difference, device):
    lengths = []
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        left, noise, right = (torch.randn(1, 1, 48, dtype=torch.float32, generator=generator) for _ in range(3))
        sides = torch.cat([left, -(left + difference * noise)]).mul(30), torch.cat([right, right])
        samples = Outer(*(side.to(device, dtype) for side in sides))
        user = psg.tree.segment_sum(samples, torch.zeros(2, dtype=torch.int64, device=device), 1)
        lengths.append(psg.tree.clip(user, 1.0).grads.double().norm().item())
    assert max(lengths) <= 1 + torch.finfo(dtype).eps


def test_coefficients_that_a_bounded_policy_does_not_take(device):
    own = psg.clipping.bounded(lambda norms, clip_norm: norms.new_tensor([-1.0, math.nan, 0.25, math.inf]))
    assert own(torch.full((4,), 2.0, device=device), 1.0).tolist() == [0.0, 0.0, 0.25, 0.5]


def test_only_a_function_can_be_bounded():
    with pytest.raises(psg.InputError, match="expected a function"):
        psg.clipping.bounded("clip")
    with pytest.raises(psg.InputError, match="a coefficient for each norm"):
        psg.clipping.bounded(lambda norms, clip_norm: norms.sum())(torch.ones(3), 1.0)


def test_unknown_policy_is_an_error(args):
    with pytest.raises(psg.InputError, match=r"policy='clamp'.*clip.*automatic.*normalize"):
        psg.clipped_grad(loss, 1.0, policy="clamp")(*args)
    with pytest.raises(psg.InputError, match=r"policy=\['clip'\]: expected one of"):
        psg.clipped_grad(loss, 1.0, policy=["clip"])
    with pytest.raises(psg.InputError, match=r"policy='per_layer'.*PerLeaf\(...\)"):
        psg.clipped_grad(loss, 1.0, policy="per_layer")
    with pytest.raises(psg.InputError, match=r"clip_norm: .* got a dict\. Wrap .* PerLeaf\(...\)"):
        psg.clipped_grad(loss, {"a": 1.0})


@pytest.mark.parametrize("gamma", [0, -1.0, math.nan, "a", None])
def test_gamma_must_be_positive(gamma):
    with pytest.raises(psg.InputError, match=rf"gamma={gamma!r}.*greater than 0"):
        psg.clipping.automatic(gamma=gamma)


# --- per leaf, per group ------------------------------------------------------------------------------------


def clipped_leaf(leaf, clip_norm):
    return reference_clipped_sum(leaf, clip_norm)


@pytest.mark.parametrize("norms", [0.5, {"a": 0.1, "b": 2.0, "c": math.inf}], ids=["one number", "a tree"])
def test_per_leaf(norms, args):
    grads = loop_grad(loss)(*args)
    out = psg.clipped_grad(loss, PerLeaf(norms))(*args)
    each = norms if isinstance(norms, dict) else dict.fromkeys(grads, norms)
    summed(out.grads, {name: clipped_leaf(grads[name], each[name]) for name in grads}, "grads")
    for name, coef in out.clip_coef.items():
        assert_trees_close(coef, (each[name] / reference_norm(grads[name])).clamp(max=1))
    assert_trees_close(out.norms, reference_norm(grads))
    assert float(out.sensitivity) == pytest.approx(math.hypot(*each.values()))


def test_clip_norms_of_groups_may_be_tensors(args, device):
    numbers = {"a": 0.1, "b": 2.0, "c": 0.3}
    as_tensors = {name: torch.tensor(value, device=device) for name, value in numbers.items()}
    out, expected = (psg.clipped_grad(loss, PerLeaf(norms))(*args) for norms in (as_tensors, numbers))
    summed(out.grads, expected.grads, "grads")
    assert float(out.sensitivity) == pytest.approx(float(expected.sensitivity))


def test_per_leaf_takes_a_prefix_of_the_tree(device):
    params = {"layers": [torch.randn(3, device=device), torch.randn(3, device=device)], "head": torch.randn(3, device=device)}
    x = torch.randn(N, 3, device=device)

    def fn(p, x):
        return sum((leaf * x).sum() * k for k, leaf in enumerate([*p["layers"], p["head"]], start=1))

    grads = loop_grad(fn)(params, x)
    out = psg.clipped_grad(fn, PerLeaf({"layers": 0.5, "head": 1.5}))(params, x)
    expected = {"layers": [clipped_leaf(leaf, 0.5) for leaf in grads["layers"]], "head": clipped_leaf(grads["head"], 1.5)}
    summed(out.grads, expected, "grads")


@pytest.mark.parametrize("params_kind", [dict, OrderedDict])
@pytest.mark.parametrize("norms_kind", [dict, OrderedDict])
def test_kinds_of_dicts_may_differ(params_kind, norms_kind, device):
    params = params_kind([("v", torch.randn(3, device=device)), ("a", torch.randn(3, device=device))])
    x = torch.randn(N, 3, device=device)

    def fn(p, x):
        return (p["v"] * x).sum() + 2 * (p["a"] * x).sum()

    out = psg.clipped_grad(fn, PerLeaf(norms_kind([("v", 1e-3), ("a", 1e9)])))(params, x)
    torch.testing.assert_close(out.grads["v"], clipped_leaf(x, 1e-3))
    torch.testing.assert_close(out.grads["a"], 2 * x.sum(0))


def test_a_policy_that_gives_something_else(args):
    with pytest.raises(psg.InputError, match=r"policy: expected it to return a real tensor of shape \(\d,\).*got \(\d, 1\)"):
        psg.clipped_grad(loss, 1.0, policy=lambda norms, clip_norm: norms[:, None])(*args)
    with pytest.raises(psg.InputError, match=r"got float\. One number for all"):
        psg.clipped_grad(loss, 1.0, policy=lambda norms, clip_norm: 1.0)(*args)
    with pytest.raises(psg.InputError, match=r"policy: expected it to return a real tensor .*complex"):
        psg.clipped_grad(loss, 1.0, policy=lambda norms, clip_norm: 1j * norms)(*args)


@pytest.mark.parametrize("made", [lambda policy: policy, psg.clipping.bounded])
def test_a_policy_may_give_booleans_and_integers(made, args):
    clip_norm = float(reference_norm(loop_grad(loss)(*args)).median())
    expected = psg.clipped_grad(loss, clip_norm, policy=made(lambda norms, c: (norms <= c).to(norms)))(*args)
    for own in (lambda norms, c: norms <= c, lambda norms, c: torch.where(norms <= c, 1, 0)):
        out = psg.clipped_grad(loss, clip_norm, policy=made(own))(*args)
        assert_trees_close(out._asdict(), expected._asdict())


def test_per_group(args):
    grads = loop_grad(loss)(*args)
    seen = []

    def label(path):
        seen.append(path)
        return "head" if path[-1] == "b" else "body"

    out = psg.clipped_grad(loss, PerGroup(label=label, clip_norm={"body": 0.2, "head": 0.4}))(*args)
    assert set(seen) == {("a",), ("b",), ("c",)}
    body = reference_clipped_sum({name: grads[name] for name in "ac"}, 0.2)
    summed(out.grads, {**body, "b": clipped_leaf(grads["b"], 0.4)}, "grads")
    assert_trees_close(out.clip_coef["a"], out.clip_coef["c"])
    assert float(out.sensitivity) == pytest.approx(math.hypot(0.2, 0.4))


def test_a_group_without_clip_norm_is_an_error(args):
    with pytest.raises(psg.InputError, match=r"'other', which has no clip norm.*body"):
        psg.clipped_grad(loss, PerGroup(label=lambda path: "other", clip_norm={"body": 1.0}))(*args)
    with pytest.raises(psg.InputError, match=r"PerGroup\(label=...\): expected a function .* got a dict"):
        psg.clipped_grad(loss, PerGroup({"body": 1.0}, lambda path: "body"))(*args)


def test_a_clip_norm_for_no_leaf_is_an_error(args):
    """Paths are tuples of names: a label function that looks for part of a name finds none, and all leaves get one label."""
    by_name = PerGroup(lambda path: "bias" if "ias" in path else "weight", {"bias": 1.0, "weight": 2.0})
    with pytest.raises(psg.InputError, match=r"no leaf has the label 'bias'; there are \['weight'\].*path\[0\]"):
        psg.clipped_grad(loss, by_name)(*args)


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_bad_clip_norm_inside_groups_is_an_error(bad, args):
    with pytest.raises(psg.InputError, match=r"clip_norm.*at least 0"):
        psg.clipped_grad(loss, PerLeaf({"a": 1.0, "b": bad, "c": 1.0}))(*args)


def test_per_leaf_tree_that_does_not_fit_is_an_error(args):
    for norms, message in (
        ({"a": 1.0}, r"there is no clip norm for 'b', 'c'\."),
        ({"a": 1.0, "b": 1.0, "d": 1.0}, r"there is no clip norm for 'c', and one for 'd', which is no parameter\."),
        ([1.0], r"prefix"),
    ):
        with pytest.raises(psg.InputError, match=rf"PerLeaf\(clip_norm\).*{message}"):
            psg.clipped_grad(loss, PerLeaf(norms))(*args)


@pytest.mark.parametrize("label, error", [(lambda name: name.split("."), AttributeError), (lambda path: path[1], IndexError)])
def test_a_label_that_fails_is_told_what_it_takes(label, error, args):
    with pytest.raises(error, match=r"PerGroup\(label=\.\.\.\) was given \('a',\): .*a tuple of keys.*path\[0\]"):
        psg.clipped_grad(loss, PerGroup(label, {"a": 1.0}))(*args)


def test_a_label_that_is_not_hashable_is_an_error(args):
    with pytest.raises(psg.InputError, match=r"PerGroup\(label=\.\.\.\) gives \['a'\] for \('a',\); expected .*hashable"):
        psg.clipped_grad(loss, PerGroup(list, {"a": 1.0}))(*args)


# --- the empty batch, chunks, rungs ---------------------------------------------------------------------------


def test_no_samples(args):
    params, x = args
    out = psg.clipped_grad(loss, 1.0)(params, x[:0])
    assert_trees_close(out.grads, tree_map(torch.zeros_like, params), per_sample=False)
    assert out.norms.shape == out.values.shape == (0,)
    assert out.nonfinite.item() == 0
    assert all(coef.shape == (0,) for coef in out.clip_coef.values())


@pytest.mark.parametrize(
    "options", [{"chunk_size": 2}, {"chunk_size": 1}, {"method": "vmap"}, {"method": "loop"}, {"method": "loop", "chunk_size": 3}], ids=str
)
def test_routes_agree(options, args, device):
    params, x = args
    x[3, 0, 0] = math.nan
    mask = torch.tensor([True, False, True, True, True], device=device)
    out = psg.clipped_grad(loss, 0.5)(params, x, mask=mask)
    other = psg.clipped_grad(loss, 0.5, **options)(params, x, mask=mask)
    summed(other.grads, out.grads, "grads")
    for name in ("norms", "values", "clip_coef"):
        assert_trees_close(getattr(other, name), getattr(out, name), name=name)
    assert other.nonfinite.item() == out.nonfinite.item() == 1


def test_clipped_sums_have_at_least_float32(device):
    params = {"a": torch.randn(3, device=device, dtype=torch.bfloat16), "b": torch.randn(3, device=device, dtype=torch.float32)}
    x = torch.randn(4, 3, device=device, dtype=torch.float32)
    out = psg.clipped_grad(lambda p, x: (p["a"] * x + p["b"] * x).sum(), 0.1)(params, x)
    assert {leaf.dtype for leaf in out.grads.values()} == {torch.float32}
    assert out.norms.dtype == torch.float32


SUMS = {
    "scalar": (lambda p, x: (p["w"].sum() * x).sum(), {"w": ()}),
    "linear": (lambda p, x: F.linear(x.view(2, 18), p["w"], p["b"]).square().sum(), {"w": (4, 18), "b": (4,)}),
    "conv": (lambda p, x: F.conv2d(x[None], p["w"], p["b"], padding=1).square().sum(), {"w": (5, 4, 3, 3), "b": (5,)}),
    "embedding": (lambda p, x: (p["w"][x.flatten().abs().mul(5).long() % 7] * p["b"]).square().sum(), {"w": (7, 3), "b": (3,)}),
    "norm": (lambda p, x: F.group_norm(x[None], 2, p["w"], p["b"]).pow(3).sum(), {"w": (4,), "b": (4,)}),
}


@pytest.mark.parametrize("chunk_size", [None, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fn", "shapes"), SUMS.values(), ids=SUMS)
def test_a_sample_changes_a_sum_of_16_bits_by_no_more_than_the_sensitivity(fn, shapes, dtype, chunk_size, device):
    """Rounded to 16 bits, sums of a thousand samples changed by up to eight times that."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype)  # noqa: E731
    params, x = {name: 1 + draw(*shape) for name, shape in shapes.items()}, 1 + draw(1000, 4, 3, 3) / 2
    clipped = psg.clipped_grad(fn, 0.1, chunk_size=chunk_size)
    whole, rest = clipped(params, x), clipped(params, x[1:])
    change = torch.cat([(whole.grads[name].double() - rest.grads[name].double()).flatten() for name in params]).norm()
    assert whole.norms[0] > 0.1 and abs(change / whole.sensitivity - 1) < 4 * torch.finfo(dtype).eps


def test_chunks_are_added_up_in_float32(device):
    # In bfloat16 256 + 1 is 256: the sum over chunks would stop there.
    w, x = torch.ones(2, device=device, dtype=torch.bfloat16), torch.ones(512, 2, device=device, dtype=torch.bfloat16)
    clipped = psg.clipped_grad(lambda w, x: (w * x).sum(), math.inf, chunk_size=1)
    for total in (clipped(w, x).grads, torch.func.vmap(lambda w: clipped(w, x).grads)(w[None])[0]):
        assert_trees_close(total, torch.full_like(w, 512, dtype=torch.float32), rtol=0, per_sample=False)


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
def test_a_parameter_without_entries_spoils_no_norm(method, device):
    """Its gradient has no entry that could be NaN, though the input of its layer is."""

    def fn(params, x):
        return F.linear(x, params["none"]).sum() + (x.expand(2, 4) @ params["no columns"]).sum() + params["b"].square().sum()

    params = {"none": torch.ones(0, 4, device=device), "no columns": torch.ones(4, 0, device=device), "b": torch.ones(2, device=device)}
    x = torch.randn(3, 4, device=device)
    x[1, 0] = torch.nan
    out = psg.clipped_grad(fn, 1.0, method=method)(params, x)
    assert out.nonfinite == 0
    assert_trees_close(out.norms, torch.full((3,), 8.0, device=device).sqrt())
    assert [leaf.shape for leaf in out.grads.values()] == [leaf.shape for leaf in params.values()]


# --- adaptive clip norms ---------------------------------------------------------------------------------------


def test_adapt_is_the_update_of_the_paper(device):
    norms = torch.tensor([0.5, 1.0, 2.0, math.nan, math.inf], device=device)
    # Two of five norms are within the clip norm: of as many samples as expected, then of half as many.
    for size, fraction in ((5, 0.4), (10, 0.5 + (2 * 0.5 - 3 * 0.5) / 10)):
        expected = torch.exp(-0.3 * (norms.new_tensor(fraction) - 0.7))
        assert_trees_close(psg.clipping.adapt(1.0, norms, size, quantile=0.7, rate=0.3), expected)
        scaled_up = psg.clipping.adapt(torch.tensor(3.0, device=device), 3 * norms, size, quantile=0.7, rate=0.3)
        assert_trees_close(scaled_up, 3 * expected)


def test_adapt_does_not_count_masked_samples(device):
    norms = torch.tensor([0.5, 3.0, 0.0, 0.0], device=device)
    mask = torch.tensor([True, True, False, False], device=device)
    assert_trees_close(psg.clipping.adapt(1.0, norms, 2, mask=mask), psg.clipping.adapt(1.0, norms[:2], 2))
    assert psg.clipping.adapt(1.0, norms[:0], 2, quantile=0.5).item() == 1.0
    assert_trees_close(psg.clipping.adapt(1.0, norms, 4), psg.clipping.adapt(1.0, norms, 4, quantile=0.5, rate=0.2, std=0.0))


def test_adapt_draws_noise_of_the_stated_size(device):
    generator = torch.Generator(device).manual_seed(0)
    norms = torch.ones(4, device=device)
    drawn = torch.stack([psg.clipping.adapt(1.0, norms, 4, rate=1.0, std=2.0, generator=generator) for _ in range(2000)])
    assert abs(drawn.log().std().item() - 2.0 / 4) < 0.03
    assert abs(drawn.log().mean().item() + 0.5) < 0.05
    before = torch.get_rng_state()
    first, again = (psg.clipping.adapt(1.0, norms, 4, std=2.0, generator=generator.manual_seed(1)) for _ in range(2))
    assert first == again and psg.clipping.adapt(1.0, norms, 4).item() == pytest.approx(math.exp(-0.1))  # which draws nothing
    assert torch.equal(torch.get_rng_state(), before)


def test_adapt_takes_the_ends_of_its_ranges(device):
    norms = torch.tensor([0.5, 3.0], device=device)
    assert psg.clipping.adapt(1.0, norms, 2, rate=0) == 1.0
    for quantile in (0, 1):
        assert_trees_close(psg.clipping.adapt(1.0, norms, 2, rate=1, quantile=quantile), torch.exp(norms.new_tensor(quantile - 0.5)))


def test_adapt_looks_at_no_tensor_in_a_trace(device):
    norms, numbers = torch.arange(4.0, device=device), torch.tensor([4, 0.7, 0.3, 0.0], device=device)
    plain = lambda norms, *own: psg.clipping.adapt(1.0, norms, own[0], quantile=own[1], rate=own[2], std=own[3])  # noqa: E731
    fast = psg.jit(plain, backend="eager")
    assert_trees_close(fast(norms, *numbers), plain(norms, *numbers.tolist()), per_sample=False)  # without a warning: it is traced


def test_adapted_clip_norms_clip_their_share(args):
    params, x = args
    clip_norm = torch.tensor(10.0, device=x.device)
    for _ in range(300):
        out = psg.clipped_grad(loss, clip_norm)(params, x)
        clip_norm = psg.clipping.adapt(clip_norm, out.norms, N, quantile=0.6)
    assert (out.norms <= clip_norm).sum() in (2, 3, 4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda norms: psg.clipping.adapt(1.0, norms[None], 4), r"adapt: expected real floating norms \[n\].*shape \(1, 4\)"),
        (lambda norms: psg.clipping.adapt(1.0, norms > 0, 4), r"adapt: expected real floating norms \[n\], got torch\.bool"),
        (lambda norms: psg.clipping.adapt(1.0, 1j * norms, 4), r"adapt: expected real floating norms \[n\], got torch\.complex"),
        (
            lambda norms: psg.clipping.adapt(1.0, norms, 4, std=1.0, generator=0),
            r"adapt: generator: expected a torch\.Generator, got an int",
        ),
        (
            lambda norms: psg.clipping.adapt(1.0, norms, 4, mask=torch.ones(3).bool()),
            r"adapt: mask: expected .*shape \(4,\), got .*shape \(3,\)",
        ),
        (lambda norms: psg.clipping.adapt(1.0, norms, 4, mask=torch.ones(4)), r"adapt: mask: expected a bool tensor .*got torch\.float"),
        (lambda norms: psg.clipping.adapt(1.0, norms, 4, mask=[True] * 4), r"adapt: mask: expected a bool tensor .*got list"),
        (lambda norms: psg.clipping.adapt(torch.ones(2), norms, 4), r"adapt: clip_norm=tensor\(\[1\., 1\.\].*: expected a number greater"),
        (lambda norms: psg.clipping.adapt("1", norms, 4), r"adapt: clip_norm='1': expected a number greater"),
        (lambda norms: psg.clipping.adapt(1.0, norms, 0), r"adapt: expected_batch_size=0: expected a number greater than 0"),
        (lambda norms: psg.clipping.adapt(1.0, norms, "a"), r"adapt: expected_batch_size='a': expected a number greater than 0"),
        (lambda norms: psg.clipping.adapt(1.0, norms, 4, quantile=1.5), r"adapt: quantile=1\.5: expected a number in \[0, 1\]"),
        (lambda norms: psg.clipping.adapt(1.0, norms, 4, rate=-1), r"adapt: rate=-1"),
        (
            lambda norms: psg.clipping.adapt(1.0, norms, torch.ones(2)),
            r"adapt: expected_batch_size=tensor\(\[1\., 1\.\].*\): expected a number",
        ),
        (
            lambda norms: psg.clipping.adapt(1.0, norms, 4, quantile=torch.tensor(1.5)),
            r"adapt: quantile=tensor\(1\.5.*\): expected a number in",
        ),
        (lambda norms: psg.clipping.adapt(1.0, norms, 4, std=math.nan), r"adapt: std=nan"),
        (lambda norms: psg.clipping.adapt(-1.0, norms, 4), r"clip_norm=-1\.0"),
        (lambda norms: psg.clipping.adapt(1.0, [1.0], 4), r"adapt: expected norms as a tensor \[n\], got a list\."),
        (
            lambda norms: psg.clipping.adapt(1.0, psg.clipped_grad(lambda w, x: (w * x).sum(), 1.0)(norms, norms[None]), 4),
            r"adapt: .*got a ClippedGrad: pass out\.norms",
        ),
    ],
)
def test_adapt_refuses(call, message):
    with pytest.raises(psg.InputError, match=message):
        call(torch.ones(4))


def test_sensitivity_is_that_of_the_call(device):
    """A clip norm that is adapted in place, between clipping and noise, must not change what the noise is scaled to."""
    clip_norm = torch.tensor(2.0, device=device)
    out = psg.clipped_grad(lambda w, x: (w * x).sum(), clip_norm)(torch.ones(3, device=device), torch.ones(4, 3, device=device))
    clip_norm.fill_(1.0)
    assert out.sensitivity == 2.0


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.bfloat16, 0.3), (torch.float16, 0.3), (torch.float32, 0.3), (torch.float32, 1e-25)], ids=str
)
def test_sensitivity_is_not_rounded_to_the_dtype_of_the_clip_norms(dtype, value, device):
    """Nor what a noise multiplier makes of it; squares do not underflow."""
    clip_norm, w, x = torch.tensor(value, dtype=dtype, device=device), torch.ones(3, device=device), torch.ones(4, 3, device=device)
    total = lambda p, x: sum((v * x).sum() for v in p.values())  # noqa: E731
    clipped = lambda C, names: psg.clipped_grad(total, C)(dict.fromkeys(names, w), x)  # noqa: E731
    found = {
        1: clipped(clip_norm, "uvw"),
        3: clipped(PerLeaf(clip_norm), "uvw"),
        2: clipped(PerGroup(lambda path: path[0] == "u", {True: clip_norm, False: float(clip_norm)}), "uvw"),
    }
    for count, out in found.items():
        exact = 1.1 * float(clip_norm) * math.sqrt(count)
        assert float(1.1 * out.sensitivity) == pytest.approx(exact, rel=1e-6, abs=0)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_norms_of_groups(masked, chunk_size, args):
    """The norms that adapt each clip norm need no second pass."""
    grads = loop_grad(loss)(*args)
    count = len(next(iter(grads.values())))
    mask = torch.arange(count, device=next(iter(grads.values())).device) != 1 if masked else None
    own = {name: reference_norm(leaf) for name, leaf in grads.items()}
    out = psg.clipped_grad(loss, PerLeaf({name: norm.median().item() for name, norm in own.items()}), chunk_size=chunk_size)(
        *args, mask=mask
    )
    assert_trees_close(out.group_norms, {name: norm if mask is None else norm * mask for name, norm in own.items()})
    labels = {name: "bias" if "b" in name else "weight" for name in grads}
    grouped = psg.clipped_grad(loss, PerGroup(lambda path: labels[path[0]], {"bias": 1.0, "weight": 2.0}), chunk_size=chunk_size)(*args)
    for label in set(labels.values()):
        together = reference_norm({name: leaf for name, leaf in grads.items() if labels[name] == label})
        assert_trees_close(
            [grouped.group_norms[name] for name in grads if labels[name] == label], [together] * list(labels.values()).count(label)
        )


def test_a_tiny_norm_is_not_brought_beyond_the_dtype(device):
    x, p = rows(1e-30, 3e-40, 0.0, 1.0, device=device)
    out = psg.clipped_grad(rows_loss, 1.0, policy="normalize")(p.float(), x.float())
    assert out.grads.isfinite().all() and out.nonfinite == 0 and out.clip_coef.max() < 1e28


SATURATED = {
    "linear": (lambda w, x: F.linear(x, w).tanh().sum(), (5, 4), (3, 4)),
    "wide": (lambda w, x: F.linear(x, w).tanh().sum(), (3, 9), (3, 9)),
    "matmul": (lambda w, x: (x @ w).tanh().sum(), (4, 5), (3, 4)),
    "conv": (lambda w, x: F.conv1d(x, w).tanh().sum(), (5, 3, 2), (3, 4)),
    "scaled": (lambda w, x: F.linear(x, w * 2).tanh().sum(), (5, 4), (3, 4)),
    "twice": (lambda w, x: F.linear(F.linear(x, w).tanh(), w).tanh().sum(), (4, 4), (3, 4)),
    "transposed": (lambda w, x: F.linear(x, w[:3].T).tanh().sum(), (4, 4), (3, 3)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("fn", "weight", "sample"), SATURATED.values(), ids=SATURATED)
def test_a_coefficient_above_one_brings_no_input_to_infinity(fn, weight, sample, masked, device):
    """Where a layer saturates, its cotangent is zero, however large the input."""
    if device.type != "cpu":
        pytest.skip("weights are not read: see help(psg.tree)")
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.rand(shape, generator=generator, dtype=torch.float32) / 10 + 0.05 for shape in (weight, (4, *sample)))
    x[0, 0, 0] = 1e38
    mask = torch.tensor([True, True, False, True]) if masked else None
    out = psg.clipped_grad(fn, 1000.0, policy="normalize", method="capture")(w, x, mask=mask)
    grads = loop_grad(fn)(w, x)
    coef = 1000 / reference_norm(grads) * (1 if mask is None else mask)
    assert out.nonfinite == 0 and coef[0] > 10
    torch.testing.assert_close(out.grads, reference_weighted_sum(grads, coef))
    factored = psg.factored_grad(fn)(w, x)
    for weighted_sum in (psg.tree.weighted_sum, psg.tree.sparse_weighted_sum):
        torch.testing.assert_close(weighted_sum(factored, -coef), reference_weighted_sum(grads, -coef))


@pytest.mark.parametrize("policy", ["normalize", "automatic", psg.clipping.automatic(0.5)])
def test_no_gradient_can_be_brought_to_infinity(policy, args):
    with pytest.raises(psg.InputError, match='clip_norm=inf.*policy="clip"'):
        psg.clipped_grad(loss, math.inf, policy=policy)(*args)


def test_clip_norms_that_are_integers_or_have_a_default(args):
    exact = psg.clipped_grad(loss, PerLeaf(2.0))(*args)
    found = psg.clipped_grad(loss, PerLeaf({"a": 2, "b": torch.tensor(2), "c": 2.0}))(*args)
    assert_trees_close(found.grads, exact.grads, per_sample=False)
    assert_trees_close(found.sensitivity, torch.tensor(12.0).sqrt(), per_sample=False)
    found = psg.clipped_grad(loss, PerGroup(lambda path: path[0], defaultdict(lambda: Fraction(4, 2))))(*args)
    assert_trees_close(found.grads, exact.grads, per_sample=False)


def test_a_mask_that_may_be_fn_s_own(args, device):
    def masked_loss(p, x, mask=None):
        return loss(p, x if mask is None else x * mask)

    params, x = args
    mask, own = torch.rand(N, device=device) < 0.5, torch.rand(6, 3, device=device)
    with pytest.raises(psg.InputError, match="fn has an argument of that name too. Pass fn's by position"):
        psg.clipped_grad(masked_loss, 1.0)(params, x, mask=mask)
    clipped = psg.clipped_grad(masked_loss, 1.0, in_dims=(None, 0, None))
    assert not psg.clipped_grad(masked_loss, 1.0, in_dims=(None, 0, None))(params, x, own, mask=mask).norms[~mask].any()
    exact = psg.clipped_grad(lambda p, x: masked_loss(p, x, own), 1.0)(params, x)
    for found in (clipped(params, x, own), psg.jit(clipped, backend="eager", buckets=4)(params, x, own)):
        assert_trees_close(found.grads, exact.grads, per_sample=False)
    bound = psg.clipped_grad(functools.partial(masked_loss, mask=own), 1.0)
    assert_trees_close(bound(params, x, mask=torch.ones_like(mask)).grads, exact.grads, per_sample=False)


class _Pooled(torch.nn.Module):
    """A sum over the positions that its own mask selects."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x, mask=None, **kwargs):
        y = self.linear(x)
        return (y if mask is None else y * mask[..., None]).sum(-2)


@pytest.mark.parametrize("make", [_Pooled, lambda: torch.compile(_Pooled())], ids=["plain", "compiled"])
def test_a_mask_that_may_be_the_module_s_own(make, device):
    # As many positions as samples, so that the module's mask would pass for the samples'.
    x, y = torch.rand(N, N, 3, device=device), torch.rand(N, 2, device=device)
    mask, own = torch.arange(N, device=device) < 2, torch.rand(N, N, device=device) < 0.5
    loss, params = psg.stateless(make().to(device), F.mse_loss)
    clipped, shared = psg.clipped_grad(loss, 1.0, chunk_size=2), functools.partial(loss, mask=own[0])
    for function in (clipped, psg.jit(clipped, backend="eager", buckets=4), psg.clipped_grad(functools.partial(loss), 1.0)):
        with pytest.raises(psg.InputError, match="fn has an argument of that name too. Pass fn's by position, for a module also in a map"):
            function(params, x, y, mask=mask)
    expected = psg.per_sample_norm(loss)(params, x, own, y) * mask
    assert_trees_close(clipped(params, x, own, y, mask=mask).norms, expected)
    assert_trees_close(clipped(params, {"x": x, "mask": own}, y, mask=mask).norms, expected)
    assert_trees_close(psg.clipped_grad(shared, 1.0)(params, x, y, mask=mask).norms, psg.per_sample_norm(shared)(params, x, y) * mask)


def test_a_mask_that_kwargs_of_fn_would_take(args, device):
    clipped = psg.clipped_grad(lambda p, x, **kwargs: loss(p, x), 1.0)
    for function in (clipped, psg.jit(clipped, backend="eager", buckets=4)):
        with pytest.raises(psg.InputError, match=r"expected a bool tensor of shape \(5,\).*does not reach fn: pass fn's own by position"):
            function(*args, mask=torch.ones(7, device=device).bool())


def test_second_derivatives_of_norms_over_groups(device):
    """A norm of the leaves' norms has none where the gradient of a leaf is zero."""
    other, zero = torch.randn(2, 3, device=device), torch.zeros(2, 3, device=device)
    norms = lambda own: psg.tree.clip({"a": own, "b": other}, PerLeaf(1.0)).norms.sum()  # noqa: E731
    plain = lambda own: torch.cat([own, other], 1).square().sum(1).sqrt().sum()  # noqa: E731
    hessian = torch.autograd.functional.hessian
    assert_trees_close(hessian(norms, zero), hessian(plain, zero), per_sample=False)


@pytest.mark.parametrize("policy", ["clip", "automatic", "normalize", lambda norms, clip_norm: clip_norm / (1 + norms)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_derivatives_for_clip_norms_leave_out_samples_that_are_not_finite(bad, policy, args, device):
    (params, x), clip_norm = args, torch.tensor(0.3, device=device, requires_grad=True)
    x[1, 0, 0] = bad

    def slope(x):
        out = psg.clipped_grad(loss, clip_norm, policy=policy)(params, x)
        return torch.autograd.grad(sum(leaf.sum() for leaf in out.grads.values()), clip_norm)[0], out.nonfinite.item()

    found, count = slope(x)
    assert count == 1
    assert_trees_close(found, slope(x[[0, 2, 3, 4]])[0], per_sample=False)


@pytest.mark.parametrize("policy", ["clip", "automatic", "normalize"])
def test_vmap_over_clip_norms(policy, args, device):
    """The value of such a tensor cannot be read, to check it."""
    clip_norms = torch.tensor([0.5, 2.0], device=device)
    clipped = lambda clip_norm: psg.clipped_grad(loss, clip_norm, policy=policy)(*args).grads  # noqa: E731
    found, expected = torch.func.vmap(clipped)(clip_norms), list(map(clipped, clip_norms))
    for k, own in enumerate(expected):
        summed({name: sums[k] for name, sums in found.items()}, own, "grads")


@pytest.mark.parametrize("clip_norm", [PerLeaf(1.0), PerGroup(lambda path: 0, {0: 1.0})])
def test_clip_norms_are_adapted_one_by_one(clip_norm):
    with pytest.raises(psg.InputError, match="got a Per.*each of its clip norms by its own `group_norms`"):
        psg.clipping.adapt(clip_norm, torch.ones(2), 2)


def test_what_makes_policies_is_none():
    with pytest.raises(psg.InputError, match=r"give what it returns, automatic\(\)"):
        psg.clipped_grad(loss, 1.0, policy=psg.clipping.automatic)
    with pytest.raises(psg.InputError, match=r"policy=bounded: .* give what it returns, bounded\("):
        psg.clipped_grad(loss, 1.0, policy=psg.clipping.bounded)


def test_norms_whose_squares_single_precision_does_not_hold(device):
    def out(size):
        w, x = torch.zeros(8, 8, device=device, dtype=torch.float32), torch.full((2, 3, 8), size, device=device, dtype=torch.float32)
        return psg.clipped_grad(lambda w, x: torch.nn.functional.linear(x, w).sum(), 1.0)(w, x)

    large = out(1e20)
    assert large.nonfinite == 2 and not large.grads.any()
    small = out(1e-24)
    assert not small.norms.any() and (small.clip_coef == 1).all() and small.grads.any()


# --- gradients that are there already ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["clip", "automatic", "normalize", lambda norms, clip_norm: clip_norm / (1 + norms)])
@pytest.mark.parametrize(
    "clip_norm", [0.3, PerLeaf({"a": 0.2, "b": 0.1, "c": 5.0}), PerGroup(lambda path: path[0] == "a", {True: 0.2, False: 1})]
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_tree_is_clipped_as_a_function_is(policy, clip_norm, masked, args, device):
    params, x = args
    x[3, 0, 0] = math.nan
    mask = torch.tensor([True, False, True, True, True], device=device) if masked else None
    expected = psg.clipped_grad(loss, clip_norm, policy=policy)(params, x, mask=mask)
    for tree in (psg.factored_grad(loss)(params, x), psg.per_sample_grad(loss)(params, x)):
        found = psg.tree.clip(tree, clip_norm, policy=policy, mask=mask)
        assert set(found._fields) == set(psg.ClippedGrad._fields) - {"values", "aux"}
        assert float(found.sensitivity) == float(expected.sensitivity) and found.nonfinite.item() == expected.nonfinite.item() == 1
        summed(found.grads, expected.grads, "grads")
        kept = torch.tensor([0, 2, 4], device=device)
        for name in ("norms", "clip_coef", "group_norms"):
            assert_trees_close(*(psg.tree.take(getattr(out, name), kept) for out in (found, expected)))


@given(
    n=st.integers(0, 12),
    count=st.integers(1, 5),
    t=st.integers(1, 3),
    clip_norm=st.floats(1e-2, 10),
    wrong=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_users_are_clipped_as_their_dense_sums(n, count, t, clip_norm, wrong, seed):
    torch.manual_seed(seed)
    params = {"a": torch.randn(4, 3), "b": torch.randn(2, 4), "c": torch.randn(4)}
    x, users = torch.randn(n, t, 3), torch.randint(count, (n,))
    users[: n // 2] = 0
    if wrong and n:
        x[0, 0, 0] = math.nan
    grads = loop_grad(loss)(params, x) if n else tree_map(lambda leaf: leaf.new_zeros(0, *leaf.shape), params)
    sums = tree_map(lambda leaf: torch.stack([leaf[users == k].sum(0) for k in range(count)]), grads)
    found = psg.tree.clip(psg.tree.segment_sum(psg.factored_grad(loss)(params, x), users, count), clip_norm)
    assert_trees_close(found.grads, reference_clipped_sum(sums, clip_norm), per_sample=False, atol=1e-12)
    finite = reference_norm(sums).isfinite()
    assert found.nonfinite == (~finite).sum()
    assert torch.equal(found.norms.isfinite(), finite)
    assert all((coef[~finite] == 0).all() for coef in found.clip_coef.values())
    assert_trees_close(found.norms[finite], reference_norm(sums)[finite], atol=1e-12)


def test_a_user_more_or_less_changes_the_sum_by_the_clip_norm_at_most(args, device):
    params, x = args
    users = torch.tensor([0, 1, 0, 0, 1], device=device)
    g = psg.tree.segment_sum(psg.factored_grad(loss)(params, x), users, 2)
    whole, rest = psg.tree.clip(g, 0.3), psg.tree.clip(psg.tree.take(g, [1]), 0.3)
    moved = reference_norm(tree_map(lambda a, b: (a - b)[None], whole.grads, rest.grads)).item()
    assert moved == pytest.approx(0.3) and whole.norms[0] > 0.3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"clip_norm": 1.0, "policy": "abadi"}, "policy='abadi'"),
        ({"clip_norm": math.inf, "policy": "normalize"}, "clip_norm=inf"),
        ({"clip_norm": 1.0, "mask": torch.ones(3)}, r"psg.tree.clip: mask: expected a bool tensor of shape \(3,\)"),
        ({"clip_norm": PerGroup(lambda path: path[0], {})}, "has no clip norm"),
        ({"clip_norm": PerGroup(lambda path: path[0], 3)}, "expected a mapping from labels to clip norms, got an int"),
    ],
)
def test_a_tree_that_cannot_be_clipped_so_is_an_error(options, message):
    with pytest.raises(psg.InputError, match=message):
        psg.tree.clip({"w": torch.ones(3, 2)}, **options)


def test_clipped_trees_in_a_trace(args):
    params, x = args
    x[3, 0, 0] = math.nan
    users = torch.tensor([0, 1, 0, 2, 1], device=x.device)

    def step(params, x, users):
        return psg.tree.clip(psg.tree.segment_sum(psg.factored_grad(loss)(params, x), users, 4), 0.3)

    fast = psg.jit(step, backend="aot_eager")
    found, expected = fast(params, x, users), step(params, x, users)
    assert [entry.error for entry in fast.cache_info()] == [None]
    assert found.nonfinite.item() == expected.nonfinite.item() == 1
    summed(found.grads, expected.grads, "grads")


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize(
    "policy",
    ["normalize", psg.clipping.automatic(1e-25), psg.clipping.bounded(lambda norms, clip_norm: clip_norm / norms)],
    ids=["normalize", "automatic", "own"],
)
@pytest.mark.parametrize("most", [4e-23, 1.2e-19])
def test_terms_of_gradients_whose_squares_underflow_are_within_the_sensitivity(most, policy, flush):
    """A million entries whose squares are zero, and one whose square is not."""
    x = torch.full((1, 1 << 20), most / 2, dtype=torch.float32)
    x[0, 0] = most
    flushed = torch.set_flush_denormal(flush)
    try:
        out = psg.clipped_grad(lambda w, x: (w * x).sum(), 1.0, policy=policy)(torch.zeros_like(x[0]), x)
    finally:
        torch.set_flush_denormal(False)
    assert flushed and out.grads.double().norm() <= out.sensitivity * (1 + 1e-5)


@pytest.mark.parametrize("policy", ["clip", "normalize", "automatic", psg.clipping.bounded(lambda norms, clip_norm: clip_norm / norms)])
@pytest.mark.parametrize("size", [1e20, 1e37])
def test_a_gradient_of_zero_with_huge_inputs_adds_nothing(size, policy, device):
    x, c, w = (torch.randn(3, size, device=device, dtype=torch.float32) for size in (2, 3, 2))
    x[0], c[0] = size, 0
    run = psg.clipped_grad(lambda w, x, c: (F.linear(x, w) * c).sum(), 1.0, policy=policy)
    out, rest = run(w, x, c), run(w, x[1:], c[1:])
    assert out.nonfinite == 0 and out.norms[0] == 0
    assert_trees_close(out.grads, rest.grads, per_sample=False)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("small", [1e-5, 1e-3, 1e-1])
def test_an_added_sample_leaves_the_others_terms_in_float16(small, positions, device):
    """An added sample with a gradient of zero, of an input of zero and a large cotangent."""
    half = torch.float16
    x = torch.full((50, positions, 64), 1250.0, dtype=half, device=device)
    c = torch.full((50, positions, 64), small, dtype=half, device=device)
    more = torch.cat([x, torch.zeros_like(x[:1])]), torch.cat([c, torch.full_like(c[:1], 6e4)])
    run = psg.clipped_grad(lambda w, x, c: (F.linear(x, w).float() * c).sum(), 1.0)
    w = torch.zeros(64, 64, dtype=half, device=device)
    before, after = run(w, x, c).grads.float(), run(w, *more).grads.float()
    assert before.norm() > 30
    torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("clip_norm", [0, 0.0, float("inf"), torch.tensor(0.0), torch.tensor(math.inf)])
def test_a_clip_norm_that_would_never_move(clip_norm):
    with pytest.raises(psg.InputError, match="expected a number greater than 0 and finite, or it would never move"):
        psg.clipping.adapt(clip_norm, torch.ones(3), 3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("policy", ["clip", "automatic"])
def test_samples_that_are_left_out_after_the_products(masked, policy, monkeypatch):
    """As on a GPU: a product of all samples is corrected where some are not finite, and nothing is zeroed before."""
    mended = []

    def mend(product, left, right, finite):
        mended.append(finite)
        product.copy_(torch.einsum("nta,ntb->ab", *(torch.where(finite[:, None, None], side, 0) for side in (left, right))))

    def tied(p, x):  # one weight twice, another once
        return torch.tanh(torch.tanh(x @ p["w"]) @ p["w"] @ p["v"]).sum()

    p = {"w": torch.randn(40, 40), "v": torch.randn(40, 30)}
    x = torch.randn(6, 5, 40)
    mask = torch.tensor([True, False, True, False, True, True]) if masked else None
    own = {} if mask is None else {"mask": mask}
    x[2, 1, 3], x[3] = torch.nan, torch.inf
    fn = psg.clipped_grad(tied, clip_norm=0.3, policy=policy)
    expected = fn(p, x, **own)
    as_large(monkeypatch)
    monkeypatch.setattr(_base, "_TINY", 0)
    monkeypatch.setattr(_functorch, "can_read_now", lambda tensor: False)
    monkeypatch.setattr(_fused, "takes_product", lambda tensor: True)
    monkeypatch.setattr(_fused, "_mend", mend)
    for wrap in (lambda fn: fn, functools.partial(psg.jit, backend="eager")):
        mended.clear()
        out = wrap(psg.clipped_grad(tied, clip_norm=0.3, policy=policy))(p, x, **own)
        assert mended and all(torch.equal(finite, x.flatten(1).isfinite().all(1)) for finite in mended)
        assert out.nonfinite == expected.nonfinite == (1 if masked else 2)
        summed(out.grads, expected.grads, "grads")
