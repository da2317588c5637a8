"""Losses, whose rules fold the samples into rows, against the loop over drawn shapes and options."""

import torch
import torch.nn.functional as F
from agreement import assert_agrees, on
from cases import Problem
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg.testing import assert_trees_close, loop_value_and_grad, tensors

each_rule = st.sampled_from([True, False])
REDUCTIONS = st.sampled_from(["mean", "sum", "none"])


def weighted(losses: torch.Tensor) -> torch.Tensor:
    """A scalar in which every entry counts differently."""
    return losses.flatten() @ torch.arange(1.0, losses.numel() + 1, dtype=losses.dtype, device=losses.device)


@st.composite
def problems(draw):
    n, classes, width = draw(st.integers(0, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rows = draw(st.sampled_from([(), (1,), (3,)]))
    ignored = draw(st.sampled_from([-100, 0, 1]))
    options = {"reduction": draw(REDUCTIONS), "ignore_index": ignored}
    if draw(st.booleans()):
        options["label_smoothing"] = 0.1
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    target = torch.randint(classes, (n, *rows), generator=generator)
    if classes > 1:  # a sample that ignores all its positions has no mean
        target = torch.where(target == ignored, (ignored + 1) % classes, target) if options["reduction"] == "mean" else target
    elif options["reduction"] == "mean":
        options["ignore_index"] = -100
    batch = draw(tensors((n, *rows, width))), target
    return Problem(lambda w, x, y: weighted(F.cross_entropy(F.linear(x, w), y, **options)), (draw(tensors((classes, width))), *batch))


@given(problem=problems(), rules=each_rule)
def test_cross_entropy(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules)


@given(seed=st.integers(0, 1000), reduction=REDUCTIONS)
def test_ignored_positions(seed, reduction, device):
    torch.manual_seed(seed)
    w, x = torch.randn(4, 3, device=device), torch.randn(3, 5, 3, device=device)
    y = torch.randint(4, (3, 5), device=device)
    y[0, 1:] = y[1, ::2] = -100

    def fn(w, x, y):
        return weighted(F.cross_entropy(F.linear(x, w), y, reduction=reduction))

    values, grads = loop_value_and_grad(fn)(w, x, y)
    found_values, found = psg.per_sample_value_and_grad(fn, method="capture")(w, x, y)
    assert_trees_close(found_values, values)
    assert_trees_close(found, grads)


def test_a_sample_that_ignores_all_its_positions(device):
    # 0 / 0, as in torch: that sample's own row says so, and no other's.
    w, x = torch.randn(4, 3, device=device), torch.randn(2, 5, 3, device=device)
    y = torch.stack([torch.full((5,), -100, device=device), torch.zeros(5, dtype=torch.int64, device=device)])

    def fn(w, x, y):
        return F.cross_entropy(F.linear(x, w), y)

    values, grads = loop_value_and_grad(fn)(w, x, y)
    found_values, found = psg.per_sample_value_and_grad(fn, method="capture")(w, x, y)
    assert torch.equal(found_values.isnan(), values.isnan()) and values.isnan().tolist() == [True, False]
    assert_trees_close(found[1:], grads[1:])
    assert torch.equal(found[0].isnan(), grads[0].isnan())


@st.composite
def weighted_problems(draw):
    """Class weights with label smoothing, in every layout: one position, rows, images, probabilities."""
    n, classes, width = draw(st.integers(0, 4)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    rows = draw(st.sampled_from([(), (1,), (3,), (2, 3), (2, 3, 1)]))
    options = {"reduction": draw(st.sampled_from(["mean", "sum", "none"])), "label_smoothing": draw(st.sampled_from([0.1, 0.5, 1.0]))}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    w, weight, x = draw(tensors((classes, width))), draw(tensors((classes,))).abs() + 0.5, draw(tensors((n, *rows, width)))
    target = torch.randint(classes, (n, *rows), generator=generator)
    if draw(st.booleans()):
        one_hot = F.one_hot(target, classes).movedim(-1, 2 if rows else 1)
        target = 0.3 * torch.rand(one_hot.shape, generator=generator) + one_hot
    else:
        options["ignore_index"] = draw(st.sampled_from([-100, 0, 1]))
        if rows:  # a sample that ignores all its positions has no mean
            target.flatten(1)[:, 0] = 1 - min(1, max(0, options["ignore_index"]))
        elif options["reduction"] == "mean":
            options["ignore_index"] = -100

    def fn(w, x, y):
        logits = F.linear(x, w)
        if rows:
            logits = logits.movedim(-1, 1)
        return F.cross_entropy(logits, y, weight.to(w), **options).sin().sum()

    return Problem(fn, (w, x, target))


@given(problem=weighted_problems(), rules=each_rule)
def test_class_weights_with_label_smoothing(problem, rules, device):
    assert_agrees(on(problem, device), rules=rules, may_fall="" if rules else "torch selects by a mask")


def test_class_weights_with_label_smoothing_where_all_is_ignored(device):
    w, x, y = torch.randn(4, 3, device=device), torch.randn(3, 5, 3, device=device), torch.randint(4, (3, 5), device=device)
    y[1] = -100

    def fn(w, x, y):
        return F.cross_entropy(F.linear(x, w), y, torch.arange(1.0, 5.0, device=device), label_smoothing=0.1)

    values, grads = loop_value_and_grad(fn)(w, x, y)
    found_values, found = psg.per_sample_value_and_grad(fn, method="capture")(w, x, y)
    assert torch.equal(found_values.isnan(), values.isnan()) and values.isnan().tolist() == [False, True, False]
    assert torch.equal(found.isnan(), grads.isnan())
    assert_trees_close(found[[0, 2]], grads[[0, 2]])


def test_probabilities_and_images_take_the_lifted_path(device):
    w, x = torch.randn(4, 3, device=device), torch.randn(2, 5, 3, device=device)
    for fn, y in (
        (lambda w, x, y: F.cross_entropy(F.linear(x, w), y), torch.rand(2, 5, 4, device=device).softmax(-1)),
        (lambda w, x, y: F.cross_entropy(F.linear(x, w).T[None], y[None]), torch.randint(4, (2, 5), device=device)),
    ):
        values, grads = loop_value_and_grad(fn)(w, x, y)
        found_values, found = psg.per_sample_value_and_grad(fn, method="capture")(w, x, y)
        assert_trees_close(found_values, values)
        assert_trees_close(found, grads)
