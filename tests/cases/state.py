"""Unused parameters, writes in place, switched-off gradients, and torch.func inside fn."""

import torch
import torch.nn.functional as F
from torch import nn

from cases._table import N, Problem, case, ids, module_case, normal, score

# --- unused, in place, detached -----------------------------------------------------------------------------


@case
def unused_parameter():
    return Problem(lambda p, x: score(F.linear(x, p["used"])), ({"used": normal(4, 3), "unused": normal(2, 2)}, normal(N, 3)))


@case
def loss_without_parameters():
    return Problem(lambda p, x: score(x), ({"unused": normal(4, 3)}, normal(N, 3)))


@case
def regulariser_alone():
    return Problem(lambda p, x: p["weight"].square().sum(), ({"weight": normal(4, 3)}, normal(N, 3)))


module_case(
    "in-place activation after the first linear", lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), (5, 3)
)
module_case(
    "in-place activation after the first conv",
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 2)),
    (2, 4, 4),
)
module_case(
    "in-place activation after the first norm", lambda: nn.Sequential(nn.LayerNorm(3), nn.ReLU(inplace=True), nn.Linear(3, 2)), (5, 3)
)


@case
def in_place_activation_of_the_sample():
    # The model's first layer writes into its input; a loop over copies does not show it, and psg must not either.
    return Problem(lambda p, x: score(F.linear(F.relu(x, inplace=True), p)), (normal(4, 3), normal(N, 5, 3)))


@case
def in_place_arithmetic_on_an_output():
    def fn(p, x):
        y = F.linear(x, p["a"])
        y += 1
        y.mul_(2).clamp_(min=-1)
        y[0] = 0
        return score(F.linear(y, p["b"]))

    return Problem(fn, ({"a": normal(4, 3), "b": normal(2, 4)}, normal(N, 5, 3)))


@case
def in_place_activation_after_an_embedding():
    return Problem(lambda p, t: score(F.embedding(t, p).relu_()), (normal(7, 3), ids(7, N, 4)))


@case
def no_grad_section():
    def fn(p, x):
        with torch.no_grad():
            scale = F.linear(x, p["weight"]).abs().max() + 1
        return score(F.linear(x, p["weight"], p["bias"]) / scale)

    return Problem(fn, ({"weight": normal(4, 3), "bias": normal(4)}, normal(N, 5, 3)))


@case
def detached_parameter():
    return Problem(lambda p, x: score(F.linear(F.linear(x, p["w"]), p["w"].detach())), ({"w": normal(3, 3)}, normal(N, 5, 3)))


@case
def detached_output():
    def fn(p, x):
        y = F.linear(x, p["a"])
        return score(F.linear(y.detach(), p["b"])) + y.mean()

    return Problem(fn, ({"a": normal(3, 3), "b": normal(2, 3)}, normal(N, 5, 3)))


RECOMPUTED = "the backward pass computes the block again, when the transform is over"


@case(not_capture=RECOMPUTED, not_vmap=RECOMPUTED)
def checkpointed_block():
    from torch.utils.checkpoint import checkpoint

    def fn(p, x):
        y = checkpoint(lambda z: F.linear(z, p["a"]).tanh(), x, use_reentrant=False)
        return score(F.linear(y, p["b"]))

    return Problem(fn, ({"a": normal(3, 3), "b": normal(2, 3)}, normal(N, 5, 3)))


# --- torch.func inside fn -----------------------------------------------------------------------------------


@case
def gradient_of_the_input_inside_fn():
    def net(p, x):
        return F.linear(F.linear(x, p["a"], p["c"]).tanh(), p["b"]).sum()

    def fn(p, x):
        return (torch.func.grad(net, argnums=1)(p, x) ** 2).sum() + net(p, x)

    return Problem(fn, ({"a": normal(4, 3), "c": normal(4), "b": normal(1, 4)}, normal(N, 3)))


@case
def laplacian_inside_fn():
    def net(p, x):
        return F.linear(F.linear(x, p["a"]).tanh(), p["b"]).sum()

    def fn(p, x):
        return torch.func.hessian(net, argnums=1)(p, x).diagonal().sum() ** 2

    return Problem(fn, ({"a": normal(4, 3), "b": normal(1, 4)}, normal(N, 3)))


@case
def vmap_inside_fn():
    def fn(p, x):
        return score(torch.func.vmap(lambda row: F.linear(row, p["a"]).tanh())(x))

    return Problem(fn, ({"a": normal(4, 3)}, normal(N, 5, 3)))


@case
def jvp_inside_fn():
    def fn(p, x):
        return score(torch.func.jvp(lambda z: F.linear(z, p["a"]).tanh(), (x,), (torch.ones_like(x),))[1])

    return Problem(fn, ({"a": normal(4, 3)}, normal(N, 3)))


@case
def gradient_of_the_parameters_inside_fn():
    # One step of descent inside fn, as meta-learning takes it.
    def inner(p, x):
        return F.linear(x, p["a"], p["b"]).square().sum()

    def fn(p, x, y):
        step = torch.func.grad(inner)(p, x)
        moved = {key: p[key] - 0.1 * step[key] for key in p}
        return inner(moved, y)

    return Problem(fn, ({"a": normal(4, 3), "b": normal(4)}, normal(N, 3), normal(N, 3)))
