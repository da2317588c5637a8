"""The reference composition under transforms and autograd has a ladder of its own: vmap(grad), then a loop over samples."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import N, score
from differentiation import live, scalar, slopes, stacked, weigh
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves, tree_map

import psg
from psg.testing import assert_trees_close

# --- recurrent layers: fused ops without a rule of vmap's ---------------------------------------------------

LAYERS = {
    "rnn": lambda: nn.RNN(2, 3, batch_first=True),
    "lstm": lambda: nn.LSTM(2, 3, num_layers=2, bidirectional=True, batch_first=True),
    "lstm with a projection": lambda: nn.LSTM(2, 3, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(2, 3, batch_first=True),
    "gru cell": lambda: nn.GRUCell(2, 3),
}


def recurrent(name, device):
    torch.manual_seed(0)
    module = LAYERS[name]().to(device)

    def fn(p, x):
        out = functional_call(module, p, (x[0, None] if name == "gru cell" else x[None],))
        return score(out[0] if isinstance(out, tuple) else out)

    params = {name: p.detach() for name, p in module.named_parameters()}
    return fn, params, torch.randn(N, 4, 2, device=device)


def looped_norms(fn):
    """The oracle: plain autograd, sample by sample, with create_graph; no vmap and no torch.func."""

    def norms(p, x):
        found = []
        p = {name: leaf if leaf.requires_grad else leaf.clone().requires_grad_() for name, leaf in p.items()}
        for sample in x:
            with torch.backends.cudnn.flags(enabled=False):  # cuDNN's recurrent layers have no second derivative
                loss = fn(p, sample)
            gradients = torch.autograd.grad(loss, list(p.values()), create_graph=True)
            found.append(torch.cat([g.reshape(-1) for g in gradients]).norm())
        return torch.stack(found)

    return norms


@pytest.mark.parametrize("method", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_under_plain_autograd(name, method, device):
    fn, params, x = recurrent(name, device)

    def backward(norms):
        args = live((params, x))
        first = slopes(weigh(norms(*args)), args, create_graph=True)
        return first, slopes(weigh(first), args)

    assert_trees_close(backward(psg.per_sample_norm(fn, method=method)), backward(looped_norms(fn)), per_sample=False)


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_under_transforms(name, device):
    fn, params, x = recurrent(name, device)
    norms = psg.per_sample_norm(fn)
    args = live((params, x))
    expected = slopes(weigh(looped_norms(fn)(*args)), args)
    assert_trees_close(list(grad(scalar(norms))(params, x).values()), expected[:-1], per_sample=False)
    assert_trees_close(grad(scalar(norms), argnums=1)(params, x), expected[-1], per_sample=False)
    jacobian = torch.autograd.functional.jacobian(lambda x: looped_norms(fn)(params, x), x)
    assert_trees_close(jacrev(norms, argnums=1)(params, x), jacobian, per_sample=False)
    assert_trees_close(jacfwd(norms, argnums=1)(params, x), jacobian, per_sample=False)
    many = stacked(params)
    members = [looped_norms(fn)({name: p[i] for name, p in many.items()}, x) for i in range(3)]
    assert_trees_close(vmap(norms, in_dims=(0, None))(many, x), torch.stack(members), per_sample=False)


# --- what only a loop can run -------------------------------------------------------------------------------


def asks_the_sample(p, x):
    return score(F.linear(x, p["w"]).tanh()) * (1 + x[0].item())


def data_dependent_shape(p, x):
    return score(F.linear(x[x > -0.5][:1], p["w"][:, :1]).tanh())


def branch(p, x):
    y = F.linear(x, p["w"]).tanh()
    return score(y) if y.sum() > 0 else score(2 * y)


class OldStyleCube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent


def old_style(p, x):
    return score(OldStyleCube.apply(F.linear(x, p["w"])))


def checkpointed(p, x):
    from torch.utils.checkpoint import checkpoint

    return score(checkpoint(lambda z: F.linear(z, p["w"]).tanh(), x, use_reentrant=False))


ONLY_A_LOOP = [asks_the_sample, data_dependent_shape, branch, old_style, checkpointed]
IN_TRANSFORMS = [asks_the_sample, data_dependent_shape, branch]  # torch.func refuses the others, even without psg


@pytest.fixture
def args(device):
    x = torch.randn(N, 3, device=device)
    x[:, 0] = x[:, 0].abs() + 0.1
    return {"w": torch.randn(4, 3, device=device)}, x


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize("fn", ONLY_A_LOOP)
def test_plain_autograd(fn, method, args):
    norms = psg.per_sample_norm(fn, method=method)
    assert_trees_close(backward_of(norms)(*args), backward_of(looped_norms(fn))(*args), per_sample=False)


def backward_of(norms):
    def call(p, x):
        p = live(p)
        first = slopes(weigh(norms(p, x)), p, create_graph=True)
        return first, slopes(weigh(first), p)

    return call


OUTER = {
    "grad": lambda f: grad(scalar(f)),
    "grad of grad": lambda f: grad(scalar(grad(scalar(f)))),
    "jvp": lambda f: lambda p, x: jvp(lambda p: f(p, x), (p,), (tree_map(torch.cos, p),)),
    "jvp of grad": lambda f: lambda p, x: jvp(lambda p: grad(scalar(f))(p, x), (p,), (tree_map(torch.cos, p),)),
}


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.parametrize("method", ["auto", "loop"])
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("fn", IN_TRANSFORMS)
def test_transforms(fn, outer, method, args):
    # The oracle: the same with torch.func, sample by sample.
    def norms(p, x):
        return torch.stack([grad(fn)(p, sample)["w"].norm() for sample in x])

    transform = OUTER[outer]
    assert_trees_close(transform(psg.per_sample_norm(fn, method=method))(*args), transform(norms)(*args), per_sample=False)


@pytest.mark.parametrize("outer", ["jacrev", "jacfwd", "vmap", "hessian"])
def test_a_pinned_loop_is_batched_from_outside(outer, args):
    # The loop is over this call's samples; what the outer transform batches is another dimension.
    def fn(p, x):
        return score(F.linear(x, p["w"]).tanh())

    def norms(p, x):
        return torch.stack([grad(fn)(p, sample)["w"].norm() for sample in x])

    transform = {
        "jacrev": jacrev,
        "jacfwd": jacfwd,
        "hessian": lambda f: hessian(lambda p, x: f(p, x).sum()),
        "vmap": lambda f: lambda p, x: vmap(f, in_dims=(0, None))(stacked(p), x),
    }[outer]
    assert_trees_close(transform(psg.per_sample_norm(fn, method="loop"))(*args), transform(norms)(*args), per_sample=False)


# --- the warning --------------------------------------------------------------------------------------------


def test_one_warning_for_forward_and_backward(args):
    params, x = args
    p = live(params)
    with pytest.warns(psg.FallbackWarning) as caught:
        norms = psg.per_sample_norm(asks_the_sample)(p, x)
        norms.sum().backward()
    assert len(caught) == 1 and "method='loop'" in str(caught[0].message)


def test_no_warning_where_the_derivative_is_captured_too(args):
    """Samples that agree on a Python value are captured together, and so is the pass that is differentiated."""
    params, x = args
    p, q = live(params), live(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        psg.per_sample_norm(branch)(p, x).sum().backward()
    psg.per_sample_norm(branch, method="loop")(q, x).sum().backward()
    assert_trees_close([leaf.grad for leaf in tree_leaves(p)], [leaf.grad for leaf in tree_leaves(q)], per_sample=False)


def test_a_warning_inside_a_transform(args):
    params, x = args
    with pytest.warns(psg.FallbackWarning, match="vmap could not run it") as caught:
        grad(scalar(psg.per_sample_norm(asks_the_sample)))(params, x)
    assert len(caught) == 1


def test_a_batched_value_is_asked_for(args):
    # Under an outer vmap a batched value is no single Python number: the loop raises torch's own error.
    params, x = args
    with pytest.raises(RuntimeError, match="vmap|item"):
        vmap(psg.per_sample_norm(asks_the_sample, method="loop"), in_dims=(None, 0))(params, torch.stack([x, 3 * x]))


def test_the_derivative_of_a_batch_function_that_vmap_cannot_run(args):
    """Routing by the data: the derivative comes from batches of one, one after the other, without a warning, as the method is pinned."""
    params, x = args

    def losses(p, x):
        chosen = (x[:, 0] > 0.5).nonzero()[:, 0]
        y = F.linear(x, p["w"]).tanh()
        y = y.index_put((chosen,), F.linear(x[chosen], p["w"]).sigmoid())
        return (y * (y + 1).sin()).sum(1)

    found = backward_of(psg.per_sample_norm(losses, method="batch"))(params, x)
    expected = backward_of(looped_norms(lambda p, x: losses(p, x[None])[0]))(params, x)
    assert_trees_close(found, expected, per_sample=False)


def test_the_loop_in_a_transform_repairs_what_vmap_gets_wrong(args):
    """`.data` is a constant to the innermost transform alone; `lu_solve` is wrong under vmap. `.item()` sends fn to the loop."""
    w, x = args[0]["w"][:3].clone(), args[1]

    def data(w, x):
        return (w * w.data * x).square().sum() * (2 if x.sum().item() > 0 else 3)

    def solve(w, x):
        matrix = w @ w.T + 3 * torch.eye(3, device=w.device)
        right = x.expand(2, 3)[..., None]
        return torch.linalg.lu_solve(*torch.linalg.lu_factor(matrix), right).square().sum() * (2 if x.sum().item() > 0 else 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", psg.FallbackWarning)
        leaf = w.clone().requires_grad_()
        (expected,) = torch.autograd.grad(psg.per_sample_grad(data)(leaf, x).sum(), leaf)
        assert_trees_close(torch.func.grad(lambda w: psg.per_sample_grad(data)(w, x).sum())(w), expected, per_sample=False)
        scales = torch.tensor([0.5, 1.0], device=w.device)
        norms = torch.func.vmap(lambda scale: psg.per_sample_norm(solve)(scale * w, x))(scales)
        assert_trees_close(norms, torch.stack([psg.per_sample_norm(solve)(scale * w, x) for scale in scales]), per_sample=False)
