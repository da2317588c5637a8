"""The report: rung, reasons, factor kinds, ops and sizes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from cases import N, Tied, convnet, score

import psg


def test_a_convnet(device):
    loss, params = psg.stateless(convnet().to(device), F.cross_entropy)
    report = psg.explain(loss)(params, torch.randn(N, 1, 8, 8, device=device), torch.randint(5, (N,), device=device))
    assert report.rung == "capture" and report.n == N and report.reasons == ()
    kinds = {leaf.path: leaf.kind for leaf in report.leaves}
    assert kinds["params['0.weight']"] == kinds["params['3.weight']"] == "Conv"
    assert kinds["params['7.weight']"] == "Outer"
    assert kinds["params['4.weight']"] == "Dense"
    text = str(report)
    for path in kinds:
        assert path in text
    assert "conv2d" in text and "linear" in text and "group_norm" in text


def test_a_tied_weight_names_both_ops(device):
    loss, params = psg.stateless(Tied().to(device), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    tokens = torch.randint(11, (N, 6), device=device)
    report = psg.explain(loss)(params, tokens, tokens)
    (tied,) = [leaf for leaf in report.leaves if "embed.weight" in leaf.path]
    assert tied.kind == "Sum"
    assert any("embedding" in use for use in tied.uses) and any("linear" in use for use in tied.uses)


def test_sizes(device):
    w, x = torch.randn(30, 20, device=device), torch.randn(N, 2, 20, device=device)
    (leaf,) = psg.explain(lambda w, x: score(F.linear(x, w)))(w, x).leaves
    assert leaf.dense_bytes == N * 30 * 20 * w.element_size()
    assert leaf.factored_bytes == N * 2 * (30 + 20) * w.element_size()


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_the_lower_rungs_say_why(device):
    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)

    def fn(w, x):
        return score(F.linear(x, w)) * x[0].item()

    report = psg.explain(fn)(w, x)
    assert report.rung == "loop"
    assert [rung for rung, _ in report.reasons] == ["capture", "vmap"]
    assert all("item" in reason for _, reason in report.reasons)
    for part in ("loop", "not capture", "not vmap", "item"):
        assert part in str(report)


def test_a_pinned_method(device):
    w, x = torch.randn(4, 3, device=device), torch.randn(N, 3, device=device)
    assert psg.explain(lambda w, x: score(F.linear(x, w)), method="vmap")(w, x).rung == "vmap"


def test_an_unused_parameter_holds_nothing(device):
    params = {"used": torch.randn(3, device=device), "unused": torch.randn(300, device=device)}
    report = psg.explain(lambda p, x: score(p["used"] * x))(params, torch.randn(N, 3, device=device))
    (unused,) = [leaf for leaf in report.leaves if "unused" in leaf.path]
    assert unused.factored_bytes == 0 and not unused.uses


def test_an_empty_batch_is_an_error(device):
    with pytest.raises(psg.InputError, match=r"explain.*empty.*at least one sample"):
        psg.explain(lambda w, x: score(w * x))(torch.randn(3, device=device), torch.randn(0, 3, device=device))


TRANSFORMED = {
    "clipped_grad": lambda fn: psg.clipped_grad(fn, 1.0),
    "per_sample_norm": psg.per_sample_norm,
    "jit": lambda fn: psg.jit(psg.per_sample_norm(fn), backend="eager"),
}


def quadratic(w, x):
    return (w * x).sum().square()


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("tool", [psg.explain, psg.check])
def test_what_a_transform_has_made_is_no_function_of_one_sample(tool, name):
    label = "per_sample_norm" if name == "jit" else name
    with pytest.raises(psg.InputError, match=rf"got psg\.{label}\(quadratic\), .*expected the function of one sample"):
        tool(TRANSFORMED[name](quadratic))


@pytest.mark.parametrize("name", TRANSFORMED)
def test_functions_that_call_what_a_transform_has_made(name, device):
    inner = TRANSFORMED[name](quadratic)

    @functools.wraps(inner)  # copies its attributes
    def penalised(w, x):
        found = inner(w, x)
        return (found if isinstance(found, torch.Tensor) else found.norms).sum()

    w, x = torch.randn(3, device=device), torch.randn(N, 2, 3, device=device)
    assert psg.explain(penalised)(w, x).n == N
    assert psg.check(penalised)(w, x).samples == N


def test_a_jitted_function_of_one_sample(device):
    fn = psg.jit(quadratic, backend="eager")
    w, x = torch.randn(3, device=device), torch.randn(N, 3, device=device)
    assert psg.explain(fn)(w, x).rung == "capture"
    assert psg.check(fn)(w, x).samples == N


def test_the_uses_of_samples_that_are_captured_apart(device):
    def fn(p, x):
        return F.linear(x, p["w"]).square().sum() if x[0] > 0 else (p["b"] * x[1]).square().sum()

    p = {"w": torch.randn(3, 4, device=device), "b": torch.randn(3, device=device)}
    x = torch.tensor([1.0, -1, 1, -1, -1], device=device)[:, None] * torch.rand(5, 4, device=device)
    uses = {leaf.path: leaf.uses for leaf in psg.explain(fn)(p, x).leaves}
    assert uses == {"p['b']": {"mul: lifted": 1}, "p['w']": {"linear: rule": 1}}


def test_reports_how_later_calls_run(device):
    """Few numbers computed from a parameter are computed once in the first call, and for every sample in the next."""

    def fn(scale, x):
        return (x * scale.exp()).sum()

    given = torch.ones(3, device=device), torch.ones(4, 3, device=device)
    first, second = (psg.explain(fn)(*given).leaves[0].uses for _ in range(2))
    assert first == second == {"exp: lifted": 1}
