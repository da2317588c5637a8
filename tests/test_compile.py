"""torch.compile around psg's functions, around steps that contain them, and of what they differentiate."""

import shutil
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from agreement import two_layer_loss as loss
from agreement import two_layer_params
from cases import N
from differentiation import live, stacked
from torch import nn
from torch.func import grad, vmap

import psg
from psg.testing import assert_trees_close, loop_grad

# Dynamo reads `.grad` of every tensor that it meets after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def args(device):
    return {name: leaf / 2 for name, leaf in two_layer_params(device).items()}, torch.randn(N, 3, device=device)


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request):
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend=request.param)
    torch._dynamo.reset()


# --- around psg ---------------------------------------------------------------------------------------------


def reductions(p, x):
    g = psg.factored_grad(loss)(p, x)
    return psg.tree.norm(g), psg.tree.gram(g), psg.tree.dot(g, p), psg.tree.sum(g)


FUNCTIONS = {
    "per_sample_grad": psg.per_sample_grad(loss),
    "per_sample_value_and_grad": psg.per_sample_value_and_grad(loss),
    "per_sample_norm": psg.per_sample_norm(loss),
    "clipped_grad": lambda p, x: psg.clipped_grad(loss, 0.5)(p, x)[:4],
    "tree": reductions,
    "loop": psg.per_sample_grad(loss, method="loop"),
    "vmap": psg.per_sample_grad(loss, method="vmap"),
    "ensemble": lambda p, x: vmap(psg.per_sample_norm(loss), in_dims=(0, None))(stacked(p), x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_gives_what_it_gives(name, compiled, args):
    function = FUNCTIONS[name]
    fast = compiled(function)
    p, x = args
    for batch in (x, 2 * x, torch.cat([x, x])):  # other values; another number of samples
        assert_trees_close(fast(p, batch), function(p, batch), per_sample=False)


def test_a_compiled_training_step(compiled, args):
    def step(p, x):
        x = (x + 1).tanh()
        out = psg.clipped_grad(loss, 0.5)(p, x)
        return {name: (leaf - 0.1 * out.grads[name]).clamp(-5, 5) for name, leaf in p.items()}, out.norms.mean() + 1

    fast = compiled(step)
    ours, theirs, x = args[0], args[0], args[1]
    for k in range(3):
        (ours, found), (theirs, expected) = fast(ours, (k + 1) * x), step(theirs, (k + 1) * x)
        assert_trees_close((ours, found), (theirs, expected), per_sample=False)


def test_a_compiled_penalty_trains(compiled, args):
    def penalty(p, x):
        return (psg.per_sample_norm(loss)(p, 2 * x) - 1).square().mean() * 3

    found, expected = live(args[0]), live(args[0])
    compiled(penalty)(found, args[1]).backward()
    penalty(expected, args[1]).backward()
    assert_trees_close(*({name: leaf.grad for name, leaf in p.items()} for p in (found, expected)), per_sample=False)
    assert found["a"].grad.count_nonzero()


def test_the_graph_breaks_around_psg(args):
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(FUNCTIONS["per_sample_norm"], backend="eager", fullgraph=True)(*args)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    torch.compile(lambda p, x: psg.per_sample_norm(loss)(p, x * 2) + 1, backend=counter)(*args)
    assert counter.frame_count == 2 and counter.op_count == 2  # x * 2, and + 1


def test_nothing_is_imported_where_nothing_is_compiled():
    lines = [
        "import sys, torch, psg",
        "psg.per_sample_norm(torch.dot)(torch.ones(2), torch.ones(3, 2))",
        "assert 'torch._dynamo' not in sys.modules",
    ]
    subprocess.run([sys.executable, "-c", "; ".join(lines)], check=True)


# --- what psg differentiates --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
def test_a_compiled_loss(method, compiled, args):
    p, x = args
    fast = compiled(loss)
    fast(p, x[0])  # compiles before psg calls it
    for batch in (x, torch.cat([x, x])):
        assert_trees_close(psg.per_sample_grad(fast, method=method)(p, batch), loop_grad(loss)(p, batch))
    assert psg.explain(fast)(p, x).rung == "capture"
    own = live(p)
    psg.per_sample_norm(fast, method=method)(own, x).sum().backward()
    assert_trees_close({name: leaf.grad for name, leaf in own.items()}, grad(scalar_sum)(p, x), per_sample=False)


def scalar_sum(p, x):
    return psg.per_sample_norm(loss)(p, x).sum()


@pytest.mark.parametrize("way", ["torch.compile", "Module.compile", "a compiled part"])
def test_a_compiled_module(way, compiled, device):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    x, y = torch.randn(N, 3, device=device), torch.randint(2, (N,), device=device)
    loss, params = psg.stateless(module, F.cross_entropy)
    expected = loop_grad(loss)(params, x, y)
    if way == "torch.compile":
        module = compiled(module)
    elif way == "Module.compile":
        module.forward = compiled(module.forward)
    else:
        module[0] = compiled(module[0])
    module(x)
    loss, params = psg.stateless(module, F.cross_entropy)
    found = psg.per_sample_grad(loss)(params, x, y)
    assert_trees_close(list(found.values()), list(expected.values()))
    assert type(psg.factored_grad(loss)(params, x, y)[next(iter(params))]).__name__ == "Outer"


def test_compiled_functions_compile_again_afterwards(args):
    p, x = args
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    fast = torch.compile(loss, backend=counter)
    psg.per_sample_grad(fast)(p, x)
    assert counter.frame_count == 0
    fast(p, x[0])
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor(args):
    torch._dynamo.reset()

    def step(p, x):
        out = psg.clipped_grad(loss, 0.5)(p, x.tanh())
        return {name: leaf - 0.1 * out.grads[name] for name, leaf in p.items()}

    assert_trees_close(torch.compile(step)(*args), step(*args), per_sample=False)


def tanh_of(w, x):
    return (x @ w).tanh().sum()


WAYS = {
    "gradients": lambda w, x: psg.per_sample_grad(tanh_of)(w, x).flatten(1).norm(dim=1),
    "norms": psg.per_sample_norm(tanh_of),
    "norms by a loop": psg.per_sample_norm(tanh_of, method="loop"),
    "norms by vmap": psg.per_sample_norm(tanh_of, method="vmap"),
    "clipped": lambda w, x: psg.clipped_grad(tanh_of, 1.0)(w, x).norms,
}


@torch.library.custom_op("psg_tests::norms", mutates_args=())
def norms_in_an_op(way: str, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return WAYS[way](w, x).clone()


norms_in_an_op.register_fake(lambda way, w, x: x.new_empty(len(x)))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_inside_of_a_library_op(way, recorded, device):
    """It runs below autograd, where nothing has a history: torch.compile needs no graph break for it."""
    torch._dynamo.reset()
    w, x = torch.randn(4, 3, device=device, requires_grad=recorded), torch.randn(5, 4, device=device)
    expected = WAYS[way](w, x).detach()
    assert expected.min() > 0
    torch.testing.assert_close(norms_in_an_op(way, w, x).detach(), expected)
    compiled = torch.compile(lambda w, x: norms_in_an_op(way, w, x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(w, x).detach(), expected)
