"""Losses, whose rules fold the samples into rows, against the loop over drawn shapes and options."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, on
from cases import Problem
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import psg
from psg.rules import loss
from psg.testing import assert_trees_close, loop_grad, loop_value_and_grad, tensors


class Calls(TorchDispatchMode):
    """Counts the ops that run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize("many", [True, False])
@given(
    n=st.integers(0, 4), rows=st.sampled_from([(), (1,), (3,)]), size=st.sampled_from([1.0, 30.0, 1e4]),
    labels=st.sampled_from([torch.int64, torch.uint8]), reduction=REDUCTIONS, seed=st.integers(0, 1000),
)  # fmt: skip
def test_many_logits_and_few(many, n, rows, size, labels, reduction, seed, device):
    torch.manual_seed(seed)
    w, x = torch.randn(5, 3, device=device), size * torch.randn(n, *rows, 3, device=device)
    y = torch.randint(5, (n, *rows), device=device).to(labels)
    if rows:
        y[..., 1:] = 4  # is ignored: no sample ignores all its positions

    def fn(w, x, y):
        logits = F.linear(x, w)
        grid = torch.arange(5, device=device)
        logits = logits.masked_fill((grid == 3) & (y[..., None] != 3), -torch.inf)  # a class that is ruled out
        return weighted(F.cross_entropy(logits, y, reduction=reduction, ignore_index=4 if rows else -100))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_MANY_LOGITS", 0 if many else 1 << 18)
        assert_agrees(Problem(fn, (w, x, y)))


LOSSES_OF_CLASSES = {
    "cross_entropy": F.cross_entropy,
    "smoothed": partial(F.cross_entropy, label_smoothing=0.1),
    "nll_loss": lambda logits, y, **options: F.nll_loss(logits.log_softmax(-1), y, **options),
}


@pytest.mark.parametrize("name", LOSSES_OF_CLASSES)
@given(n=st.integers(0, 3), rows=st.sampled_from([(), (1,), (3,)]), weight=st.booleans(), reduction=REDUCTIONS, seed=st.integers(0, 99))
def test_labels_in_bytes(name, n, rows, weight, reduction, seed, device):
    torch.manual_seed(seed)
    w, x = torch.randn(5, 3, device=device), torch.randn(n, *rows, 3, device=device)
    y = torch.randint(1, 5, (n, *rows), device=device)
    if rows:
        y[..., 1:] = 0  # is ignored
    options = {"weight": torch.rand(5, device=device) if weight else None, "reduction": reduction, "ignore_index": 0}
    fn = lambda w, x, y: weighted(LOSSES_OF_CLASSES[name](F.linear(x, w), y, **options))  # noqa: E731
    found = [psg.per_sample_value_and_grad(fn, method="capture"), psg.per_sample_value_and_grad(fn, method="vmap")]
    found.append(lambda w, x, y: torch.func.vmap(lambda w: psg.per_sample_value_and_grad(fn)(w, x, y))(w[None]))
    for transform in found:
        values, grads = transform(w, x, y.byte())
        expected = psg.per_sample_value_and_grad(fn, method="loop")(w, x, y)
        assert_trees_close((values.reshape(n), grads.reshape(n, 5, 3)), expected)


@given(seed=st.integers(0, 1000), reduction=REDUCTIONS)
def test_ignored_positions(seed, reduction, device):
    torch.manual_seed(seed)
    w, x = torch.randn(4, 3, device=device), torch.randn(3, 5, 3, device=device)
    y = torch.randint(4, (3, 5), device=device)
    y[0, 1:] = y[1, ::2] = -100

    def fn(w, x, y):
        return weighted(F.cross_entropy(F.linear(x, w), y, reduction=reduction))

    assert_agrees(Problem(fn, (w, x, y)))


def test_a_sample_that_ignores_all_its_positions(device):
    # 0 / 0 is NaN, as in torch: in the row of that sample only.
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
        assert_agrees(Problem(fn, (w, x, y)))


# --- losses with margins, and of a variance ---------------------------------------------------------------------------

# Multiples of a half: sums and differences are exact, and some inputs lie at the kinks.
margins = st.sampled_from([0.5, 1.0, 1.5])


def on_a_grid(draw, *shape):
    """Inputs that are sums of a few halves: many are equal, and many differ by the margin."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return torch.randint(-2, 3, shape, generator=generator) / 2


def assert_loss_agrees(op, w, *batch, device):
    """The loss's input is w times the first tensor of the batch, without rounding: w holds powers of two."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap warns where it runs an op sample by sample
        assert_agrees(on(Problem(lambda w, x, *rest: weighted(op(w, x, *rest)), (w, *batch)), device))


@given(data=st.data())
def test_multi_margin_loss(data, device):
    draw = data.draw
    n, classes, rows = draw(st.integers(0, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([(), (1,), (3,)]))
    options = {"reduction": draw(REDUCTIONS), "p": draw(st.sampled_from([1, 2])), "margin": draw(margins)}
    weight = draw(st.sampled_from([None, 2.0 ** torch.arange(-1, classes - 1)]))
    target = torch.randint(classes, (n, *rows), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))

    def loss(w, x, y):
        return F.multi_margin_loss(w * x, y, weight=None if weight is None else weight.to(w), **options)

    assert_loss_agrees(loss, 2.0 ** torch.randint(-1, 2, (classes,)), on_a_grid(draw, n, *rows, classes), target, device=device)


@given(data=st.data())
def test_ctc_loss(data, device):
    draw = data.draw
    n, t, b, classes, s = draw(st.integers(0, 4)), draw(st.integers(1, 5)), draw(st.sampled_from([None, 1, 2])), 4, draw(st.integers(1, 3))
    options = {"reduction": draw(REDUCTIONS), "blank": draw(st.sampled_from([0, 2])), "zero_infinity": True}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rows = () if b is None else (b,)
    x = torch.randn(n, t, *rows, classes, generator=generator)
    targets = torch.randint(classes - 1, (n, *rows, s), generator=generator)
    targets += targets >= options["blank"]
    given = draw(st.sampled_from(["numbers", "shared", "own"]))

    def lengths(least, most):
        if given == "own":
            return torch.randint(least, most + 1, (n, *rows), generator=generator)
        fixed = torch.randint(least, most + 1, rows, generator=generator)
        return tuple(fixed.reshape(-1).tolist()) if given == "numbers" else fixed

    inputs, goals = lengths(1, t), lengths(s if b is None else 0, s)

    def loss(w, x, y, *own):
        each = own or (inputs, goals)
        return F.ctc_loss(
            (w * x).log_softmax(-1), y, *(side.to(w.device) if isinstance(side, torch.Tensor) else side for side in each), **options
        )

    own = (inputs, goals) if given == "own" else ()
    assert_loss_agrees(loss, 2.0 ** torch.randint(-1, 2, (classes,)), x, targets, *own, device=device)


@given(data=st.data())
def test_multilabel_margin_loss(data, device):
    draw = data.draw
    n, classes, rows = draw(st.integers(0, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([(), (1,), (3,)]))
    reduction = draw(REDUCTIONS)
    # The first -1 ends the list of targets, in which a class may occur twice.
    target = torch.randint(-1, classes, (n, *rows, classes), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))

    def loss(w, x, y):
        return F.multilabel_margin_loss(w * x, y, reduction=reduction)

    assert_loss_agrees(loss, 2.0 ** torch.randint(-1, 2, (classes,)), on_a_grid(draw, n, *rows, classes), target, device=device)


@given(data=st.data())
def test_elementwise_losses_with_a_margin(data, device):
    draw = data.draw
    n, shape = draw(st.integers(0, 4)), draw(st.sampled_from([(), (3,), (2, 3)]))
    reduction, margin = draw(REDUCTIONS), draw(st.sampled_from([0, 0.5, -0.5]))
    x, z, sign = on_a_grid(draw, n, *shape), on_a_grid(draw, n, *shape), on_a_grid(draw, n, *shape).sign()
    w = torch.tensor(draw(st.sampled_from([0.5, 1.0, 2.0])))
    other = {"both": lambda w, z: w * z, "data": lambda w, z: z, "stretched": lambda w, z: w.reshape(z.ndim * [1])}[
        draw(st.sampled_from(["both", "data", "stretched"]))
    ]
    assert_loss_agrees(lambda w, x, y: F.soft_margin_loss(w * x, y, reduction=reduction), w, x, sign, device=device)
    assert_loss_agrees(
        lambda w, x, z, y: F.margin_ranking_loss(w * x, other(w, z), y, margin, reduction=reduction), w, x, z, sign, device=device
    )


@pytest.mark.parametrize("n", [0, 1, 3])
@given(scale=st.sampled_from([1.0, 5.0, 9.0]), seed=st.integers(0, 99))
def test_second_derivatives_of_soft_margins_keep_their_digits(n, scale, seed, device):
    torch.manual_seed(seed)
    # Beyond exp(88) the loss itself is infinite, as torch's is.
    w, x = ((scale * torch.randn(*size, 4, device=device, dtype=torch.float32)).clamp(-9, 9) for size in ((), (n,)))

    def fn(w, x):
        return torch.func.grad(lambda w: F.soft_margin_loss(w, x))(w).square().sum()

    exact = loop_grad(fn)(w.double(), x.double())
    assert_trees_close(psg.per_sample_grad(fn)(w, x).double(), exact, rtol=1e-4)


@given(data=st.data())
def test_triplet_margin_loss(data, device):
    draw = data.draw
    n, rows, width = draw(st.integers(0, 3)), draw(st.sampled_from([(), (1,), (3,)])), draw(st.integers(1, 3))
    options = {
        "reduction": draw(REDUCTIONS),
        "margin": draw(margins),
        "p": draw(st.sampled_from([1.0, 2.0, 3.0])),
        "eps": draw(st.sampled_from([1e-6, 0.25])),
        "swap": draw(st.booleans()),
    }
    own = draw(st.sampled_from(["anchor", "all", "broadcast"]))

    def loss(w, x, y, z):
        if own == "broadcast":
            return F.triplet_margin_loss(w * x, w.expand(*(1 for _ in rows), width), z, **options)
        return F.triplet_margin_loss(w * x, *((w * y, w * z) if own == "all" else (y, z)), **options)

    assert_loss_agrees(loss, 2.0 ** torch.randint(-1, 2, (width,)), *(on_a_grid(draw, n, *rows, width) for _ in range(3)), device=device)


@given(data=st.data())
def test_gaussian_nll_loss(data, device):
    draw = data.draw
    n, rows, width = draw(st.integers(0, 3)), draw(st.sampled_from([(), (1,), (3,)])), draw(st.integers(1, 3))
    options = {"reduction": draw(REDUCTIONS), "full": draw(st.booleans()), "eps": draw(st.sampled_from([1e-6, 0.5]))}
    var = draw(st.sampled_from([0.75, (width,), (1,), None]))  # a number; for each entry; for each row; for each row, squeezed
    x, y = on_a_grid(draw, n, *rows, width), on_a_grid(draw, n, *rows, width)
    v = on_a_grid(draw, n, *rows, *(var if isinstance(var, tuple) else ())).abs()  # 0 is clamped, and 0.5 may be just at eps
    if var == (1,) and rows == (1,):
        var = 0.75

    def loss(w, x, y, v):
        return F.gaussian_nll_loss(w * x, y, var if isinstance(var, float) else w[0] * v, **options)

    assert_loss_agrees(loss, 2.0 ** torch.randint(0, 2, (width,)), x, y, v, device=device)


@pytest.mark.parametrize("var", [-1.0, [0.5, -0.5, 1.0], [0.5, 1.0]], ids=["number", "one sample", "size"])
def test_what_gaussian_nll_loss_refuses(var, device):
    w, x = torch.tensor(2.0, device=device), torch.randn(3, 4, device=device)
    if var == [0.5, 1.0]:
        batch, fn = (x,), lambda w, x: F.gaussian_nll_loss(w * x, x, torch.tensor(var, device=device))
    elif isinstance(var, float):
        batch, fn = (x,), lambda w, x: F.gaussian_nll_loss(w * x, x, var)
    else:
        batch, fn = (x, torch.tensor(var, device=device)), lambda w, x, v: F.gaussian_nll_loss(w * x, x, v.expand(4))
    with pytest.raises(ValueError, match="var"):
        psg.per_sample_grad(fn)(w, *batch)


MARGINS = {
    "soft_margin_loss": lambda w, x: F.soft_margin_loss(w * x, x.sign()),
    "margin_ranking_loss": lambda w, x: F.margin_ranking_loss(w * x, x.flip(0), x.sign(), 0.3),
    "triplet_margin_loss": lambda w, x: F.triplet_margin_loss(w * x, x.flip(0), -x, 3.0, swap=True),
    "triplet_margin_loss as it is": lambda w, x: F.triplet_margin_loss(w * x, x.flip(0), 0.9 * x.flip(0)),  # swap=True gives another
    "multi_margin_loss": lambda w, x: F.multi_margin_loss(w * x, x.argmin(-1)),
    "multilabel_margin_loss": lambda w, x: F.multilabel_margin_loss(w * x, x.argsort(-1)),
    "gaussian_nll_loss": lambda w, x: F.gaussian_nll_loss(w * x, x, x.square() * w.square()),
    "gaussian_nll_loss of rows": lambda w, x: F.gaussian_nll_loss(w * x, x, x.square().sum(-1) * w.square().sum()),
    "ctc_loss": lambda w, x: F.ctc_loss((w * x).log_softmax(-1), x[0, :2].argsort(-1) + 1, *torch.tensor([len(x), 2], device=x.device)),
}


@pytest.mark.parametrize("name", MARGINS)
def test_no_loss_runs_sample_by_sample(name, device):
    """It runs as many ops for 32 samples as for 2."""
    w = torch.randn(4, device=device)

    def ops(n):
        x = torch.randn(n, 3, 4, device=device)
        with Calls() as calls:
            psg.per_sample_grad(MARGINS[name])(w, x)
        return calls.count

    psg.check(MARGINS[name])(w, torch.randn(5, 3, 4, device=device))
    assert ops(32) == ops(2)


@pytest.mark.parametrize("name", [name for name in MARGINS if not name.startswith("gaussian_nll_loss")])
def test_losses_under_autocast_are_those_of_float32(name):
    w, x = torch.randn(4, dtype=torch.bfloat16), torch.randn(3, 2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = psg.per_sample_value_and_grad(MARGINS[name])(w, x)
        expected = torch.stack([MARGINS[name](w, sample) for sample in x])
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: F.soft_margin_loss(x, w * x),
        lambda w, x: F.multi_margin_loss(x, torch.tensor([0, 1]), weight=w),
        lambda w, x: F.triplet_margin_loss(w * x, x, x, margin=-1.0),
        lambda w, x: F.margin_ranking_loss(w * x, x, w.sum()),
        lambda w, x: F.multilabel_margin_loss(w * x, x.sign().long() + 7),
    ],
)
def test_what_losses_with_margins_refuse(fn):
    with pytest.raises((RuntimeError, ValueError)):
        psg.per_sample_grad(fn)(torch.randn(3), torch.randn(4, 2, 3))


OLD = {  # losses of rows [2, 4], given a parameter [4]
    "cross_entropy": lambda x, y, **options: F.cross_entropy(x, y, **options),
    "cross_entropy, smoothed and weighted": lambda x, y, **options: F.cross_entropy(
        x, y, x[0].detach().exp(), label_smoothing=0.1, **options
    ),
    "multi_margin_loss": lambda x, y, **options: F.multi_margin_loss(x, y, **options),
    "multilabel_margin_loss": lambda x, y, **options: F.multilabel_margin_loss(x, torch.stack([y, y + 1, -y.sign(), y], 1) % 4, **options),
    "soft_margin_loss": lambda x, y, **options: F.soft_margin_loss(x, torch.ones_like(x).detach(), **options),
    "kl_div": lambda x, y, **options: F.kl_div(x, x.detach().softmax(1), **options),
    "margin_ranking_loss": lambda x, y, **options: F.margin_ranking_loss(x[0], x[1], y.repeat(2).sign(), **options),
    "triplet_margin_loss": lambda x, y, **options: F.triplet_margin_loss(x, x.cos(), x.sin(), **options),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated", "ignore::psg.FallbackWarning")
@pytest.mark.parametrize("options", [{"size_average": False}, {"reduce": False}], ids=str)
@pytest.mark.parametrize("name", OLD)
def test_the_old_arguments_of_losses(name, options, device):
    """They come before `reduction`, whose default is the mean."""
    w, x, y = torch.randn(4, device=device), torch.randn(3, 2, 4, device=device), torch.randint(1, 4, (3, 2), device=device)
    fn = lambda w, x, y: OLD[name](w * x, y, **options).sin().sum()  # noqa: E731
    assert_trees_close(psg.per_sample_grad(fn)(w, x, y), loop_grad(fn)(w, x, y))
