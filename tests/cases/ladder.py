"""Where lifting leaks, and what only the lower rungs can run."""

import torch
import torch.nn.functional as F
from torch import nn

from cases._table import N, Problem, case, ids, module_case, normal, op_case, score

# --- where lifting leaks, and what it cannot run ------------------------------------------------------------

STRIDES = "as_strided reads memory that a batched parameter lays out differently"
SCATTERED = "select_scatter under vmap has a wrong gradient"
op_case("leak: as_strided of a parameter", lambda x, w: w.as_strided((2, 3), (3, 1)) * x, (2, 3), params={"w": (3, 3)})
for _name, _layout in (("an activation", lambda y: y), ("a transposed activation", lambda y: y.T.sin()), ("a slice", lambda y: y[1:])):
    # The sliding windows of Longformer and LED.
    op_case(
        f"leak: as_strided of {_name}",
        lambda x, w, layout=_layout: layout(F.linear(x, w)).as_strided((3, 2), (2, 1)),
        (4, 3),
        params={"w": (4, 3)},
        ladder={"not_vmap": STRIDES},
    )
op_case(
    "leak: as_strided past a slice",
    lambda x, w: F.linear(x, w)[:1].as_strided((3, 2), (2, 1)),
    (4, 3),
    params={"w": (4, 3)},
    ladder={"not_capture": STRIDES, "not_vmap": STRIDES},
)
op_case(
    "leak: as_strided_copy of a parameter",
    lambda x, w: torch.as_strided_copy(w, (2, 3), (1, 2)) * x,
    (2, 3),
    params={"w": (3, 3)},
    ladder={"not_capture": STRIDES},
)
op_case("leak: diagonal of a parameter written", lambda x, w: torch.diagonal_scatter(x, w), (3, 3), params={"w": (3,)})
op_case(
    "leak: select_scatter into the sample",
    lambda x, w: torch.select_scatter(x, w, 0, 1),
    (4, 3),
    params={"w": (3,)},
    ladder={"not_capture": SCATTERED},
)
op_case("leak: slice_scatter into the sample", lambda x, w: torch.slice_scatter(x, w, 0, 1, 3), (4, 3), params={"w": (2, 3)})


@case(name="leak: select_scatter into the parameter", not_capture=SCATTERED)
def _():
    return Problem(lambda p, x: score(torch.select_scatter(p["a"], p["b"] * x, 0, 1)), ({"a": normal(4, 3), "b": normal(3)}, normal(N, 3)))


@case(name="leak: code that asks for requires_grad")
def _():
    def fn(p, x):
        y = F.linear(x, p)
        return score(y) if p.requires_grad else score(y.detach())

    return Problem(fn, (normal(4, 3), normal(N, 3)))


@case(name="leak: distances between parameters", vmap_wrong="vmap(grad) of cdist of two parameters is wrong in torch itself")
def _():
    return Problem(lambda p, x: score(torch.cdist(p["a"], p["b"]) * x), ({"a": normal(4, 3), "b": normal(5, 3)}, normal(N, 4, 5)))


op_case(
    "leak: column_stack of parameters",
    lambda x, a, b: x @ torch.column_stack([a, b]),
    (5, 3),
    params={"a": (3,), "b": (3,)},
)
op_case("leak: covariance of a parameter", lambda x, w: torch.cov(w) @ x, (3,), params={"w": (3, 5)})
op_case(
    "leak: is_contiguous of a memory format",
    lambda x, w: F.conv2d(x, w if w.is_contiguous(memory_format=torch.contiguous_format) else w * 0),
    (2, 4, 4),
    params={"w": (3, 2, 2, 2)},
)


LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
module_case("channels_last module on a channels_last sample", lambda: nn.Conv2d(2, 3, 2).to(memory_format=LAST), (2, 4, 4))
for _name, _change in (
    ("to", lambda y: y.to(memory_format=LAST)),
    ("to a dtype", lambda y: y.to(y.dtype.to_complex(), memory_format=LAST).real),
    ("contiguous", lambda y: y.contiguous(memory_format=LAST).mul_(2)),
    ("contiguous, and back", lambda y: y.contiguous(memory_format=LAST).contiguous(memory_format=torch.contiguous_format).view(-1)),
    ("clone", lambda y: y.clone(memory_format=LAST).mul_(2)),
    ("strides", lambda y: y * torch.tensor(y.contiguous(memory_format=LAST).stride()[1:], device=y.device)),
    ("asked for", lambda y: y * y.contiguous(memory_format=LAST).is_contiguous(memory_format=LAST)),
    ("of zeros", lambda y: torch.zeros_like(y, memory_format=LAST) + y),
    ("three dimensions", lambda y: y[None].contiguous(memory_format=LAST_3D)),
    ("of a weight", lambda y: F.conv2d(y, y.new_ones(1, 3, 1, 1).to(memory_format=LAST))),
):
    op_case(
        f"memory format: {_name}",
        lambda x, weight, bias, change=_change: change(F.conv2d(x[None], weight.to(memory_format=LAST), bias)),
        (2, 4, 4),
        params={"weight": (3, 2, 2, 2), "bias": (3,)},
    )
op_case(
    "memory format: read by as_strided",
    lambda x, w: F.conv2d(x[None], w).contiguous(memory_format=LAST).as_strided((2, 2), (3, 1)),
    (2, 4, 4),
    params={"w": (3, 2, 2, 2)},
    ladder={"not_vmap": STRIDES},
)


BRANCH = "Python asks for a value of a sample"


@case(name="leak: gaussian_nll_loss")
def _():
    def fn(p, x, y):
        return F.gaussian_nll_loss(F.linear(x, p["mean"]), y, F.softplus(F.linear(x, p["var"])))

    return Problem(fn, ({"mean": normal(4, 3), "var": normal(4, 3)}, normal(N, 3), normal(N, 4)))


@case(name="leak: attention bias from parameters")
def _():
    def fn(p, x):
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 2)).transpose(0, 1) for w in p["qkv"].chunk(3))
        distance = torch.arange(5, device=x.device)
        bias = p["bias"][:, (distance[:, None] - distance).abs()]
        return score(F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias[None]))

    return Problem(fn, ({"qkv": normal(12, 4), "bias": normal(2, 5)}, normal(N, 5, 4)))


IN_PLACE = "it writes into a parameter, of which every sample has a copy of its own"


@case(name="leak: in-place write into a parameter under no_grad", not_capture=IN_PLACE)
def _():
    # Temperatures are clamped like this in CLIP and BLIP.
    def fn(p, x):
        with torch.no_grad():
            p["temperature"].clamp_(0.5, 0.6)
        return score(F.linear(x, p["w"]) / p["temperature"])

    return Problem(fn, ({"w": normal(4, 3), "temperature": normal()}, normal(N, 3)))


@case(name="leak: in-place write into a view of a parameter under no_grad", not_capture=IN_PLACE)
def _():
    def fn(p, x):
        with torch.no_grad():
            p["w"][:2].clamp_(max=0.1)
        return score(F.linear(x, p["w"]))

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


@case(name="leak: in-place write into a derived parameter")
def _():
    def fn(p, x):
        w = p["w"] * 2
        w[0] = 0
        w.mul_(2)
        return score(F.linear(x, w))

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


INTO_PLAIN = "vmap cannot write a batched value into a plain tensor"


@case(name="leak: in-place write of the sample into a derived parameter", not_vmap=INTO_PLAIN)
def _():
    def fn(p, x):
        w = p["w"].clone()
        w[0] = x
        return score(w)

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


@case(name="gradient through torch.autograd.grad inside fn")
def _():
    def fn(p, x):
        y = F.linear(x, p["w"]).tanh().sum()
        (slope,) = torch.autograd.grad(y, p["w"], create_graph=True)
        return slope.square().sum()

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


# --- the lower rungs ----------------------------------------------------------------------------------------


@case(not_vmap=BRANCH, not_traced=BRANCH)
def data_dependent_branch():
    def fn(p, x):
        y = F.linear(x, p["w"], p["b"])
        return score(y) if y.sum() > 0 else score(2 * y)

    return Problem(fn, ({"w": normal(4, 3), "b": normal(4)}, normal(N, 5, 3)))


@case(not_capture=BRANCH, not_vmap=BRANCH)
def item_of_a_sample():
    return Problem(lambda p, x: score(F.linear(x, p)) * x[0].item(), (normal(4, 3), normal(N, 3)))


SHAPE = "the shape of an intermediate depends on the sample"


@case(not_capture=SHAPE, not_vmap=SHAPE)
def boolean_mask_of_a_sample():
    def fn(p, x, last):
        return score(F.linear(x[torch.arange(6, device=x.device) <= last], p))  # as many as no other sample's

    return Problem(fn, (normal(4, 3), normal(N, 6, 3), torch.arange(N)))


OLD_STYLE = "an autograd.Function of the old style has no vmap rule"


@case(not_vmap=OLD_STYLE)
def old_style_autograd_function():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, cotangent):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * cotangent

    return Problem(lambda p, x: score(Cube.apply(F.linear(x, p))), (normal(4, 3), normal(N, 5, 3)))


module_case("lstm with a projection", lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True), (5, 3))
module_case("gru", lambda: nn.GRU(3, 4, num_layers=2, batch_first=True), (5, 3))


HOOK = "vmap has no gradient of its own to hand to a hook"


@case(not_capture=HOOK)
def gradient_hook_on_an_output():
    # Gradient reversal and scaling are written like this.
    def fn(p, x):
        y = F.linear(x, p["a"])
        y.register_hook(lambda cotangent: -2 * cotangent)
        return score(F.linear(y, p["b"]))

    return Problem(fn, ({"a": normal(4, 3), "b": normal(2, 4)}, normal(N, 3)))


@case(name="data of a parameter")
def _():
    def fn(p, x):
        frozen = p["w"].data.clone()
        return score(F.linear(x, p["w"]) + F.linear(x, frozen) + F.linear(x, p["w"].clone().contiguous()))

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


@case(name="leak: data of a parameter set", not_capture="vmap refuses .data", not_vmap="vmap refuses .data")
def _():
    # Switch Transformers' routers convert their own weight at every call, as nn.Module.to does.
    def fn(p, x):
        w = p["w"]
        w.data = w.data.to(w.dtype).clamp(-1, 1)
        return score(F.linear(x, w))

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


@case(name="leak: matrix assembled in place from parameters")
def _():
    def fn(p, x):
        angle = p["angle"]
        rotation = torch.zeros(2, 2, device=x.device)
        rotation[0, 0] = angle.cos()
        rotation[1, 1] = angle.cos()
        rotation[0, 1] = -angle.sin()
        rotation[1, 0] = angle.sin()
        return score(rotation @ x)

    return Problem(fn, ({"angle": normal()}, normal(N, 2)))


@case(not_traced=BRANCH)
def branch_on_a_parameter():
    def fn(p, x):
        return score(F.linear(x, p["w"])) if p["w"].sum() < 100 else x.sum()

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


@case(name="leak: unfold of a parameter")
def _():
    return Problem(lambda p, x: score(p["w"].unfold(0, 3, 2) @ x), ({"w": normal(9)}, normal(N, 3)))


@case(name="leak: parameter seen as complex")
def _():
    return Problem(lambda p, x: score(torch.view_as_complex(p["w"]) * x), ({"w": normal(4, 2)}, normal(N, 4)))


@case(name="leak: index_put and scatter with parameters")
def _():
    def fn(p, x):
        index = torch.tensor([0, 2], device=x.device)
        y = x.index_put((index,), p["a"])
        return score(y.scatter_add(0, index, p["a"]).index_add(0, index, p["b"]))

    return Problem(fn, ({"a": normal(2), "b": normal(2)}, normal(N, 4)))


if hasattr(F, "linear_cross_entropy"):  # torch >= 2.13

    @case(name="leak: linear_cross_entropy")
    def _():
        def fn(p, x, y):
            return F.linear_cross_entropy(x, p["w"], y, linear_bias=p["b"])

        return Problem(fn, ({"w": normal(7, 3), "b": normal(7)}, normal(N, 5, 3), ids(7, N, 5)))
