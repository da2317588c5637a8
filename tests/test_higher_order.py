"""Ops that are given functions. These close over parameters and data, which torch finds by compiling them; psg compiles nothing in fn."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees
from cases import Problem
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.foreach_map import foreach_map
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import psg
from psg.testing import assert_trees_close, loop_grad


def by_scan(p, x):
    def step(carry, item):
        hidden, seen = carry["hidden"], carry["seen"]
        hidden = (hidden @ p["w"] + item[0]).tanh()
        return {"hidden": hidden, "seen": seen + item[1]}, (hidden.sin(), seen * p["b"])

    carry, (rows, others) = scan(step, {"hidden": p["b"].exp(), "seen": x[0]}, (x, x.cos()), reverse=True)
    return carry["hidden"].sum() + (carry["seen"] * p["b"]).sum() + rows.square().sum() + others.sum()


def by_hand(p, x):
    hidden, seen, total = p["b"].exp(), x[0], 0
    for item in x.flip(0):
        hidden, before = (hidden @ p["w"] + item).tanh(), seen
        seen = seen + item.cos()
        total = total + hidden.sin().square().sum() + (before * p["b"]).sum()
    return hidden.sum() + (seen * p["b"]).sum() + total


def by_while_loop(p, x):
    last = torch.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, (h @ p["w"] + p["b"]).sin()), (torch.tensor(0), x[0]))[1]
    return last.sum()


def by_hand_thrice(p, x):
    hidden = x[0]
    for _ in range(3):
        hidden = (hidden @ p["w"] + p["b"]).sin()
    return hidden.sum()


def by_map(p, x):
    rows, scaled = torch_map(lambda row, b: ((row @ p["w"] + b).tanh(), row * b), x, p["b"])
    return rows.square().sum() + scaled.sin().sum()


def by_hand_together(p, x):
    return (x @ p["w"] + p["b"]).tanh().square().sum() + (x * p["b"]).sin().sum()


def by_cond(p, x):
    return torch.cond(x.sum() > 0, lambda x: (x @ p["w"]).sin().sum(), lambda x: (x @ p["w"] + p["b"]).cos().sum(), (x,))


def by_hand_apart(p, x):
    return (x @ p["w"]).sin().sum() if x.sum() > 0 else (x @ p["w"] + p["b"]).cos().sum()


WRITTEN = {by_scan: by_hand, by_while_loop: by_hand_thrice, by_map: by_hand_together, by_cond: by_hand_apart}


@pytest.fixture
def drawn(device):
    params = {"w": torch.randn(3, 3, device=device), "b": torch.randn(3, device=device)}
    return params, torch.randn(5, 4, 3, device=device)


@pytest.mark.parametrize("method", ["capture", "loop"])
@pytest.mark.parametrize("fn", WRITTEN, ids=lambda fn: fn.__name__)
def test_closed_over_parameters_are_differentiated(fn, method, drawn):
    assert_trees_close(psg.per_sample_grad(fn, method=method)(*drawn), loop_grad(WRITTEN[fn])(*drawn))


@pytest.mark.parametrize("fn", WRITTEN, ids=lambda fn: fn.__name__)
def test_equals_the_loop(fn, drawn):
    assert_agrees(Problem(fn, drawn))


def test_nested_values_of_a_loop(drawn):
    def fn(p, x):
        step = lambda i, h: (i + 1, {"h": (h["h"] @ p["w"] + p["b"]).sin()})  # noqa: E731
        return while_loop(lambda i, h: i < 3, step, (torch.tensor(0), {"h": x[0]}))[1]["h"].sum()

    def written(p, x):
        h = x[0]
        for _ in range(3):
            h = (h @ p["w"] + p["b"]).sin()
        return h.sum()

    assert_trees_close(psg.per_sample_grad(fn)(*drawn), loop_grad(written)(*drawn))


@pytest.mark.parametrize("options", [{}, {"swap": True, "reduction": "sum"}, {"margin": 3.0, "reduction": "none"}])
@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
def test_a_triplet_loss_with_a_distance_of_the_users(method, options, drawn):
    def distance(x, y):
        return (x - y).abs().max()  # of tied entries, vmap takes others

    def written(p, x):
        rows = (x * p["b"]).round()
        near, far = distance(rows[0], rows[1]), distance(rows[0], rows[2])
        if options.get("swap"):
            far = torch.minimum(far, distance(rows[1], rows[2]))
        return (options.get("margin", 1.0) + near - far).clamp_min(0) + (x @ p["w"]).sin().sum()

    def fn(p, x):
        rows = (x * p["b"]).round()
        loss = F.triplet_margin_with_distance_loss(*rows[:3].unbind(), distance_function=distance, **options)
        return loss + (x @ p["w"]).sin().sum()

    assert_trees_close(psg.per_sample_grad(fn, method=method)(*drawn), loop_grad(written)(*drawn))


@pytest.mark.parametrize("options, error", [({"margin": 0}, ValueError), ({"reduction": "max"}, ValueError)])
def test_a_triplet_loss_refuses_what_torch_refuses(options, error, drawn):
    fn = lambda p, x: F.triplet_margin_with_distance_loss(*(x[:3] * p["b"]).unbind(), **options)  # noqa: E731
    with pytest.raises(error):
        psg.per_sample_grad(fn)(*drawn)
    with pytest.raises(error):
        fn(drawn[0], drawn[1][0])


def test_inside_a_transform(drawn):
    def fn(p, x):
        return torch.func.grad(lambda x: by_scan(p, x))(x).square().sum()

    def written(p, x):
        return torch.func.grad(lambda x: by_hand(p, x))(x).square().sum()

    assert_trees_close(psg.per_sample_grad(fn)(*drawn), loop_grad(written)(*drawn))


def test_method_batch(drawn):
    def losses(p, x):
        _, rows = scan(lambda h, row: ((h + torch.nn.functional.linear(row, p["w"], p["b"])).tanh(), h.sin()), x[:, 0], x.movedim(1, 0))
        return rows.square().sum((0, 2))

    def loss(p, x):
        h, total = x[0], 0
        for row in x:
            h, total = (h + torch.nn.functional.linear(row, p["w"], p["b"])).tanh(), total + h.sin().square().sum()
        return total

    assert_trees_close(psg.per_sample_grad(losses, method="batch")(*drawn), loop_grad(loss)(*drawn))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.export
@pytest.mark.parametrize("fn", [by_scan, by_map, by_cond], ids=lambda fn: fn.__name__)
def test_exported(fn, drawn):
    params, x = drawn

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = map(torch.nn.Parameter, (params["w"], params["b"]))

        def forward(self, x):
            return fn({"w": self.w, "b": self.b}, x[0])

    loss, held = psg.stateless(torch.export.export(Module(), (x[:1],)).module())
    assert_trees_close(psg.per_sample_grad(loss)(held, x), loop_grad(WRITTEN[fn])(params, x))


def attend(p, x):
    """[heads, t, d], with a learned bias for each distance and a gain for each head. Queries 0 and 1 see no key; two heads share a key."""
    numbers = torch.arange(x.shape[1], device=x.device)
    query, key, value = x * p["gain"][:, None, None], x[::2].sin(), x[::2].cos()
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    scores = query @ key.mT * 0.3 + p["bias"][(numbers[:, None] - numbers).abs()]
    allowed = (numbers[:, None] >= numbers) & (numbers[:, None] > 1)
    weights = scores.masked_fill(~allowed, -math.inf)[:, 2:].softmax(-1)
    return (weights @ value).square().sum() + scores.masked_fill(~allowed, -math.inf)[:, 2:].logsumexp(-1).sum()


def attend_flexibly(p, x):
    # The op itself: the function around it refuses queries that require grad on CPUs.
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q > 1), None, None, x.shape[1], x.shape[1], device=x.device)
    query, key, value = (x * p["gain"][:, None, None])[None], x[None, ::2].sin(), x[None, ::2].cos()
    bias = lambda score, b, h, q, k: score + p["bias"][(q - k).abs()]  # noqa: E731
    output, logsumexp, _ = torch.ops.higher_order.flex_attention(query, key, value, bias, mask.as_tuple(), 0.3, {})
    return output.square().sum() + math.log(2) * logsumexp[:, :, 2:].sum()


@pytest.mark.parametrize("method", ["capture", "vmap", "loop"])
def test_flex_attention(method, device):
    params, x = {"gain": torch.randn(4, device=device), "bias": torch.randn(6, device=device)}, torch.randn(3, 4, 6, 5, device=device)
    assert_trees_close(psg.per_sample_grad(attend_flexibly, method=method)(params, x), loop_grad(attend)(params, x))
    assert_agrees(Problem(attend_flexibly, (params, x)))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames")  # torch 2.12, where it must not compile
def test_flex_attention_by_its_public_name(device):
    def fn(bias, x):
        return flex_attention(x, x, x, score_mod=lambda score, b, h, q, k: score + bias[h, (q - k).abs()]).square().sum()

    def written(bias, x):
        numbers = torch.arange(x.shape[2], device=x.device)
        return ((x @ x.mT / math.sqrt(x.shape[3]) + bias[:, (numbers[:, None] - numbers).abs()]).softmax(-1) @ x).square().sum()

    bias, x = torch.randn(2, 6, device=device), torch.randn(3, 1, 2, 6, 4, device=device)
    assert_trees_close(psg.per_sample_grad(fn)(bias, x), loop_grad(written)(bias, x))


@pytest.mark.parametrize("method", ["auto", "loop"])
def test_other_ops_that_are_given_functions_are_refused(method):
    def fn(p, x):
        return foreach_map(lambda row: row * p, [x])[0].sum()

    with pytest.raises(psg.InputError, match="foreach_map, a higher-order op for which psg has no rule"):
        psg.per_sample_grad(fn, method=method)(torch.ones(3), torch.ones(2, 3))
    with pytest.raises(psg.InputError, match="foreach_map"):
        loop_grad(fn)(torch.ones(3), torch.ones(2, 3))


FRESH = """
import sys, warnings, torch, psg
warnings.simplefilter("error")

def fn(p, x):
    return torch.cond(x.sum() > 0, lambda x: (x * p).sin().sum(), lambda x: (x + p).cos().sum(), (x,))

assert "torch._dynamo" not in sys.modules
print(psg.per_sample_grad(fn, method=sys.argv[1])(torch.zeros(2), torch.ones(1, 2)).tolist())
"""


@pytest.mark.parametrize("method", ["capture", "loop"])
def test_in_a_process_that_has_not_compiled_yet(method):
    """The op imports torch's compiler, which psg then keeps from compiling fn."""
    ran = subprocess.run([sys.executable, "-c", FRESH, method], capture_output=True, text=True)
    assert ran.stdout == "[[1.0, 1.0]]\n", ran.stderr
