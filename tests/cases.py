"""One table of cases, shared by all tests: functions of one sample, with parameters and a batch of N.

Each row is a name and a recipe; `case.build(device)` runs the recipe from a fixed seed. What a row says about the
ladder is the reason why a rung cannot run it, and tests hold it to that.
"""

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import psg

N = 3


class Problem(NamedTuple):
    """A function of one sample, its arguments (parameters and batch), keyword arguments and psg's options."""

    fn: Callable
    args: tuple
    shared: dict[str, Any] = {}
    options: dict[str, Any] = {}


class Case(NamedTuple):
    """A row of the table.

    `not_capture` says why the capture pass cannot run it, `not_vmap` why vmap(grad) cannot either: only then may psg
    warn that it goes down the ladder, and then it must. `vmap_wrong` says why vmap(grad) is no reference here.
    """

    name: str
    recipe: Callable[[], Problem]
    not_capture: str = ""
    not_vmap: str = ""
    vmap_wrong: str = ""

    def build(self, device="cpu") -> Problem:
        torch.manual_seed(0)
        with torch.device(device):
            return self.recipe()


def falling(reason):
    """The context of a call that goes down the ladder for a reason, or, without one, must not."""
    return pytest.warns(psg.FallbackWarning) if reason else nullcontext()


CASES: list[Case] = []


def each_case(keep=lambda case: True):
    """Parametrize a test over the table, or over the rows that `keep` picks."""
    return pytest.mark.parametrize("case", [case for case in CASES if keep(case)], ids=lambda case: case.name)


def case(recipe=None, *, name=None, **ladder):
    """Add a row whose recipe is the decorated function."""

    def add(recipe):
        CASES.append(Case(name or recipe.__name__.replace("_", " "), recipe, **ladder))
        return recipe

    return add if recipe is None else add(recipe)


def score(y):
    """A scalar whose derivative differs from entry to entry."""
    y = torch.view_as_real(y) if y.is_complex() else y
    return (y * torch.sin(y + 1)).sum()


def normal(*shape):
    return torch.randn(shape)


def ids(high, *shape):
    return torch.randint(high, shape)


def op_case(name, op, sample, *positional, params, high=None, ladder=None, **options):
    """Add the row of one op: parameters by keyword, a batch of samples of one shape (integers below `high`)."""

    def recipe():
        weights = {key: normal(*shape) for key, shape in params.items()}
        batch = normal(N, *sample) if high is None else ids(high, N, *sample)
        return Problem(lambda p, x: score(op(x, *positional, **p, **options)), (weights, batch))

    CASES.append(Case(name, recipe, **(ladder or {})))


def module_case(name, build, *samples, **ladder):
    """Add the row of a module: its own parameters, one batch dimension added for it."""

    def recipe():
        module = build()

        def fn(params, *inputs):
            out = functional_call(module, params, tuple(x.unsqueeze(0) for x in inputs))
            return score(out[0] if isinstance(out, tuple) else out)

        return Problem(fn, (parameters(module), *(normal(N, *sample) for sample in samples)))

    CASES.append(Case(name, recipe, **ladder))


def parameters(module):
    return {name: p.detach() for name, p in module.named_parameters()}


# --- rules: linear ----------------------------------------------------------------------------------------

LINEAR = {"weight": (4, 3), "bias": (4,)}
op_case("linear 1-D", F.linear, (3,), params=LINEAR)
op_case("linear 2-D", F.linear, (2, 3), params=LINEAR)
op_case("linear 3-D", F.linear, (2, 5, 3), params=LINEAR)
op_case("linear 4-D", F.linear, (2, 1, 5, 3), params=LINEAR)
op_case("linear without bias", F.linear, (5, 3), params={"weight": (4, 3)})
op_case("linear vector weight", F.linear, (5, 3), params={"weight": (3,)})
op_case("linear of no positions", F.linear, (0, 3), params=LINEAR)
op_case("bilinear", lambda x, weight: F.bilinear(x, x, weight), (2, 3), params={"weight": (4, 3, 3)})
op_case("matmul x W", lambda x, weight: x @ weight, (5, 3), params={"weight": (3, 4)})
op_case("matmul W x", lambda x, weight: weight @ x, (3, 5), params={"weight": (4, 3)})
op_case("addmm", lambda x, weight, bias: torch.addmm(bias, x, weight), (5, 3), params={"weight": (3, 4), "bias": (4,)})
op_case("einsum", lambda x, weight: torch.einsum("ti,hio->hto", x, weight), (5, 3), params={"weight": (2, 3, 4)})


@case
def linear_layouts():
    params = {"weight": normal(3, 4).T, "bias": normal(8)[::2]}
    return Problem(lambda p, x: score(F.linear(x, p["weight"], p["bias"])), (params, normal(N, 3, 5).transpose(1, 2)))


@case
def linear_batched_weight():
    # A weight that depends on the sample: no rule fits, lifting does.
    def fn(p, x):
        return score(F.linear(x, p["weight"] * x.sum(), p["bias"]))

    return Problem(fn, ({"weight": normal(4, 3), "bias": normal(4)}, normal(N, 5, 3)))


# --- rules: convolution -------------------------------------------------------------------------------------

CONV1, CONV2 = {"weight": (4, 3, 3), "bias": (4,)}, {"weight": (4, 3, 3, 3), "bias": (4,)}
op_case("conv1d", F.conv1d, (3, 8), params=CONV1)
op_case("conv1d no bias, stride, padding, dilation", F.conv1d, (1, 3, 9), params={"weight": (4, 3, 2)}, stride=2, padding=2, dilation=3)
op_case("conv1d same", F.conv1d, (3, 8), params={"weight": (4, 3, 4)}, padding="same", dilation=2)
op_case("conv2d of one image", F.conv2d, (1, 3, 6, 6), params=CONV2)
op_case("conv2d of an unbatched image", F.conv2d, (3, 6, 6), params=CONV2)
op_case("conv2d of two images", F.conv2d, (2, 3, 6, 6), params=CONV2)
op_case("conv2d stride that leaves a rest", F.conv2d, (1, 3, 6, 7), params=CONV2, stride=(2, 3), padding=(1, 0))
op_case("conv2d padding numbers", F.conv2d, (1, 3, 5, 6), params={"weight": (4, 3, 3, 2)}, padding=(2, 1))
op_case("conv2d same", F.conv2d, (1, 3, 5, 6), params=CONV2, padding="same")
op_case("conv2d same, even kernel", F.conv2d, (1, 3, 5, 6), params={"weight": (4, 3, 2, 4)}, padding="same")
op_case("conv2d valid", F.conv2d, (1, 3, 5, 6), params=CONV2, padding="valid")
op_case("conv2d dilation", F.conv2d, (1, 3, 7, 7), params=CONV2, dilation=(2, 3))
op_case("conv2d groups", F.conv2d, (1, 4, 5, 5), params={"weight": (6, 2, 3, 3), "bias": (6,)}, groups=2)
op_case("conv2d groups of two images", F.conv2d, (2, 4, 5, 5), params={"weight": (6, 2, 3, 3), "bias": (6,)}, groups=2)
op_case("conv2d depthwise", F.conv2d, (1, 4, 5, 5), params={"weight": (4, 1, 3, 3), "bias": (4,)}, groups=4, padding=1)
op_case("conv2d depthwise, multiplier 2", F.conv2d, (1, 3, 5, 5), params={"weight": (6, 1, 3, 3)}, groups=3)
op_case("conv2d 1x1", F.conv2d, (1, 3, 4, 4), params={"weight": (5, 3, 1, 1)}, stride=2)
op_case("conv2d kernel of the image's size", F.conv2d, (1, 3, 3, 3), params=CONV2)
op_case("conv3d", F.conv3d, (1, 2, 4, 5, 4), params={"weight": (4, 2, 2, 3, 2), "bias": (4,)}, stride=(1, 2, 1), padding=1)
op_case("conv3d groups", F.conv3d, (2, 4, 4, 3), params={"weight": (4, 1, 2, 3, 2)}, groups=2)
op_case("conv_transpose2d", F.conv_transpose2d, (1, 3, 4, 4), params={"weight": (3, 2, 3, 3), "bias": (2,)}, stride=2)
module_case("conv2d circular padding", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5))
module_case("conv2d reflect padding", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5))


@case
def conv2d_channels_last():
    weight = normal(4, 3, 3, 3).to(memory_format=torch.channels_last)
    images = normal(N, 3, 6, 6).to(memory_format=torch.channels_last)
    return Problem(lambda p, x: score(F.conv2d(x[None], p, padding=1)), (weight, images))


@case
def conv2d_channels_last_groups():
    weight = normal(4, 2, 3, 3).to(memory_format=torch.channels_last)
    images = normal(N, 4, 6, 6).to(memory_format=torch.channels_last)
    return Problem(lambda p, x: score(F.conv2d(x[None], p, groups=2)), (weight, images))


# --- rules: embedding ---------------------------------------------------------------------------------------

TABLE = {"weight": (7, 3)}
op_case("embedding", F.embedding, (5,), params=TABLE, high=7)
op_case("embedding of one id", F.embedding, (), params=TABLE, high=7)
op_case("embedding of a matrix of ids", F.embedding, (2, 4), params=TABLE, high=7)
op_case("embedding of no ids", F.embedding, (0,), params=TABLE, high=7)
op_case("embedding padding_idx", F.embedding, (6,), params=TABLE, high=4, padding_idx=1)
op_case("embedding negative padding_idx", F.embedding, (9,), params=TABLE, high=7, padding_idx=-2)
op_case("embedding scale_grad_by_freq", F.embedding, (6,), params=TABLE, high=3, scale_grad_by_freq=True)
op_case("embedding scale_grad_by_freq and padding_idx", F.embedding, (6,), params=TABLE, high=3, scale_grad_by_freq=True, padding_idx=0)
op_case("embedding max_norm", F.embedding, (4,), params=TABLE, high=7, max_norm=0.8, ladder={"not_vmap": "torch writes the shortened rows back into the weight"})
op_case("embedding with sparse gradients", F.embedding, (4,), params=TABLE, high=7, sparse=True, ladder={"not_vmap": "vmap has no sparse tensors"})
op_case("embedding_bag", lambda x, weight: F.embedding_bag(x[None], weight, mode="sum"), (4,), params=TABLE, high=7)


@case
def embedding_of_shared_ids():
    def fn(p, positions, x):
        return score(F.embedding(positions, p["weight"]) * x)

    args = ({"weight": normal(7, 3)}, torch.tensor([0, 2, 2, 5]), normal(N, 4, 3))
    return Problem(fn, args, options={"in_dims": (None, None, 0)})


@case
def embedding_of_ids_bound_in_fn():
    positions = torch.arange(4)
    return Problem(lambda p, x: score(F.embedding(positions, p) * x), (normal(6, 3), normal(N, 4, 3)))


# --- rules: normalisation -----------------------------------------------------------------------------------

FEATURES = {"weight": (4,), "bias": (4,)}
op_case("layer_norm", F.layer_norm, (5, 4), (4,), params=FEATURES)
op_case("layer_norm of a vector", F.layer_norm, (4,), (4,), params=FEATURES)
op_case("layer_norm without bias", F.layer_norm, (5, 4), (4,), params={"weight": (4,)})
op_case("layer_norm without weight", F.layer_norm, (5, 4), (4,), params={"bias": (4,)})
op_case("layer_norm over two dimensions", F.layer_norm, (5, 3, 4), (3, 4), params={"weight": (3, 4), "bias": (3, 4)})
op_case("group_norm", F.group_norm, (1, 4, 3, 3), 2, params=FEATURES)
op_case("group_norm of two vectors", F.group_norm, (2, 4), 2, params=FEATURES)
op_case("group_norm without bias", F.group_norm, (1, 4, 6), 2, params={"weight": (4,)})
op_case("instance_norm", F.instance_norm, (1, 4, 3, 3), params=FEATURES)
op_case("instance_norm of two sequences", F.instance_norm, (2, 4, 5), params=FEATURES, eps=1e-3)
op_case("instance_norm without bias", F.instance_norm, (1, 4, 5), params={"weight": (4,)})
op_case("instance_norm without weight", F.instance_norm, (1, 4, 5), params={"bias": (4,)})
op_case("rms_norm", F.rms_norm, (5, 4), (4,), params={"weight": (4,)})
op_case("rms_norm over two dimensions", F.rms_norm, (3, 4), (3, 4), params={"weight": (3, 4)}, eps=1e-2)
module_case("batch_norm in evaluation mode", lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).eval(), (2, 5, 5))


@case
def normalisation_without_parameters_between_layers():
    def fn(p, x):
        x = F.layer_norm(F.linear(x, p["a"]), (4,))
        return score(F.linear(F.rms_norm(x, (4,)), p["b"]))

    return Problem(fn, ({"a": normal(4, 3), "b": normal(2, 4)}, normal(N, 5, 3)))


# --- attention and whole models -----------------------------------------------------------------------------


@case
def scaled_dot_product_attention():
    def fn(p, x):
        q, k, v = (F.linear(x, w).unflatten(-1, (2, 2)).transpose(-2, -3) for w in p["qkv"].chunk(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return score(F.linear(y.transpose(-2, -3).flatten(-2), p["out"], p["bias"]))

    return Problem(fn, ({"qkv": normal(12, 4), "out": normal(4, 4), "bias": normal(4)}, normal(N, 5, 4)))


module_case("transformer encoder layer", lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (5, 4))
module_case("transformer encoder layer in evaluation mode", lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), (5, 4))


@case
def multihead_attention():
    module = nn.MultiheadAttention(4, 2, dropout=0.0, batch_first=True)

    def fn(p, x):
        out, weights = functional_call(module, p, (x[None], x[None], x[None]))
        return score(out) + score(weights)

    return Problem(fn, (parameters(module), normal(N, 5, 4)))


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2, groups=2), nn.GroupNorm(2, 6), nn.GELU(), nn.Flatten(), nn.Linear(24, 5)
    )  # fmt: skip


@case
def convnet_with_cross_entropy():
    loss, params = psg.stateless(convnet(), F.cross_entropy)
    return Problem(loss, (params, normal(N, 1, 8, 8), ids(5, N)))


class Tied(nn.Module):
    """Token embedding and output head share one weight."""

    def __init__(self, head_bias=True):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=head_bias)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)).tanh())


@case
def tied_embedding_and_head():
    module = Tied()

    def fn(p, tokens):
        logits = functional_call(module, p, (tokens[:-1],))
        return F.cross_entropy(logits, tokens[1:])

    return Problem(fn, (parameters(module), ids(11, N, 7)))


@case
def module_used_three_times():
    layer = nn.Linear(4, 4)

    def fn(p, x):
        for _ in range(3):
            x = functional_call(layer, p, (x,)).tanh()
        return score(x)

    return Problem(fn, (parameters(layer), normal(N, 5, 4)))


@case
def convolution_used_twice():
    def fn(p, x):
        return score(F.conv2d(F.conv2d(x, p, padding=1).tanh(), p, stride=2))

    return Problem(fn, (normal(3, 3, 3, 3), normal(N, 3, 6, 6)))


@case
def embedding_used_twice():
    return Problem(lambda p, a, b: score(F.embedding(a, p) - F.embedding(b, p)), (normal(7, 3), ids(7, N, 4), ids(7, N, 4)))


@case
def parameter_used_by_a_rule_and_outside_it():
    def fn(p, x):
        return score(F.linear(x, p["weight"], p["bias"])) + (p["weight"] ** 2 * x.sum()).sum() + p["bias"].prod()

    return Problem(fn, ({"weight": normal(4, 3), "bias": normal(4)}, normal(N, 5, 3)))


@case
def one_tensor_at_two_places_of_the_tree():
    shared = normal(4, 4)
    return Problem(lambda p, x: score(F.linear(F.linear(x, p["a"]).tanh(), p["b"])), ({"a": shared, "b": shared}, normal(N, 4)))


@case
def weight_as_data_and_as_weight():
    return Problem(lambda w, x: score(F.linear(F.linear(w, w) + x, w)), (normal(4, 4), normal(N, 4, 4)))


# --- derived parameters -------------------------------------------------------------------------------------


def derived(name, make, **params):
    """Add a row in which a linear layer's weight is computed from parameters alone."""

    def recipe():
        weights = {key: normal(*shape) for key, shape in params.items()}
        return Problem(lambda p, x: score(F.linear(x, make(**p))), (weights, normal(N, 5, 3)))

    CASES.append(Case(f"derived: {name}", recipe))


derived("view", lambda w: w.view(4, 3), w=(12,))
derived("reshape and transpose", lambda w: w.reshape(3, 4).t(), w=(2, 6))
derived("mT of permute", lambda w: w.permute(2, 0, 1)[0].mT, w=(3, 4, 1))
derived("cast there and back", lambda w: w.to(torch.complex128).real.to(w.dtype) * 2, w=(4, 3))
derived("low rank update", lambda w, a, b: w + 0.5 * (b @ a), w=(4, 3), a=(2, 3), b=(4, 2))
derived("chunk", lambda w: w.chunk(2)[1], w=(8, 3))
derived("split", lambda w: w.split([1, 4, 2])[1], w=(7, 3))
derived("unbind", lambda w: w.unbind(1)[0], w=(4, 2, 3))
derived("index", lambda w: w[1], w=(2, 4, 3))
derived("slice", lambda w: w[2:, ::2], w=(6, 6))
derived("gather of rows", lambda w: w[torch.tensor([0, 2, 2, 1], device=w.device)], w=(3, 3))
derived("expand", lambda w: w.expand(4, 3), w=(1, 3))
derived("cat", lambda a, b: torch.cat([a, b], 1), a=(4, 1), b=(4, 2))
derived("stack", lambda a, b: torch.stack([a, b]), a=(3,), b=(3,))
derived("weight times mask", lambda w: w * torch.ones(4, 3, device=w.device).tril(), w=(4, 3))
derived("norm and direction", lambda g, v: g * v / torch.linalg.vector_norm(v, dim=1, keepdim=True), g=(4, 1), v=(4, 3))
derived("exponential of skew", lambda w: torch.linalg.matrix_exp(w - w.T), w=(3, 3))
derived("scalar times constant", lambda s: s * torch.ones(4, 3, device=s.device), s=())
derived("softmax", lambda w: w.softmax(-1), w=(4, 3))


@case(name="derived: weight_norm parametrisation")
def _():
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    return Problem(lambda p, x: score(functional_call(module, p, (x,))), (parameters(module), normal(N, 5, 3)))


@case(name="derived: orthogonal parametrisation")
def _():
    module = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley")
    return Problem(lambda p, x: score(functional_call(module, p, (x,))), (parameters(module), normal(N, 5, 3)))


@case(name="derived: the result is used by a rule, outside it and returned")
def _():
    def fn(p, x):
        both = p["a"] @ p["b"]
        return score(F.linear(x, both)) + score(both * x.mean()) + both.square().sum()

    return Problem(fn, ({"a": normal(4, 2), "b": normal(2, 3)}, normal(N, 5, 3)))


@case(name="derived: convolution kernel standardised")
def _():
    def fn(p, x):
        weight = p["weight"]
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
        return score(F.conv2d(x, weight, p["bias"]))

    return Problem(fn, ({"weight": normal(4, 3, 2, 2), "bias": normal(4)}, normal(N, 3, 5, 5)))


# --- lifted only --------------------------------------------------------------------------------------------

op_case("bare parameters", lambda x, scale, shift: (x * scale.exp() + shift).tanh(), (5, 4), params={"scale": (4,), "shift": (5, 1)})
op_case("scalar parameter", lambda x, temperature: (x / temperature).softmax(-1), (4,), params={"temperature": ()})
op_case("prelu", F.prelu, (5, 4), params={"weight": (4,)})
op_case("parameter without entries", lambda x, weight, empty: (x * weight).sum() + empty.sum(), (3,), params={"weight": (3,), "empty": (0, 2)})
module_case("prelu module", lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.PReLU(3)), (2, 4, 4))


@case
def hypernetwork():
    # The weights of the second layer are an output of the first: they differ from sample to sample.
    def fn(p, x, y):
        generated = F.linear(x, p["weight"], p["bias"]).reshape(2, 4)
        return score(F.linear(y, generated))

    return Problem(fn, ({"weight": normal(8, 3), "bias": normal(8)}, normal(N, 3), normal(N, 5, 4)))


@case
def parameter_indexed_by_the_sample():
    return Problem(lambda p, i, x: score(p[i] * x), (normal(6, 3), ids(6, N, 2), normal(N, 3)))


@case
def parameters_compared_and_selected():
    return Problem(lambda p, x: score(torch.where(p["a"] > p["b"], p["a"] * x, p["b"])), ({"a": normal(4), "b": normal(4)}, normal(N, 4)))


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


module_case("in-place activation after the first linear", lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), (5, 3))
module_case("in-place activation after the first conv", lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 2)), (2, 4, 4))
module_case("in-place activation after the first norm", lambda: nn.Sequential(nn.LayerNorm(3), nn.ReLU(inplace=True), nn.Linear(3, 2)), (5, 3))


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


# --- trees, argnums, in_dims, other arguments ---------------------------------------------------------------

Layer = namedtuple("Layer", "weight bias")


@dataclasses.dataclass
class Net:
    first: torch.Tensor
    second: torch.Tensor


optree.register_pytree_node(
    Net, lambda net: ((net.first, net.second), None, ("first", "second")), lambda _, leaves: Net(*leaves), namespace="psg"
)


@case
def tree_a_tensor():
    return Problem(lambda w, x: score(F.linear(x, w)), (normal(4, 3), normal(N, 3)))


@case
def tree_list():
    return Problem(lambda p, x: score(F.linear(x, *p)), ([normal(4, 3), normal(4)], normal(N, 3)))


@case
def tree_tuple():
    return Problem(lambda p, x: score(F.linear(x, *p)), ((normal(4, 3), normal(4)), normal(N, 3)))


@case
def tree_namedtuple():
    return Problem(lambda p, x: score(F.linear(x, p.weight, p.bias)), (Layer(normal(4, 3), normal(4)), normal(N, 3)))


@case
def tree_dataclass():
    return Problem(lambda p, x: score(F.linear(F.linear(x, p.first), p.second)), (Net(normal(4, 3), normal(2, 4)), normal(N, 3)))


@case
def tree_nested():
    def fn(p, x):
        x = F.linear(x, *p["layers"][0]).tanh()
        return score(F.linear(x, p["layers"][1].weight, p["layers"][1].bias) * p["head"]["scale"])

    layers = [(normal(4, 3), normal(4)), Layer(normal(2, 4), normal(2))]
    return Problem(fn, ({"layers": layers, "head": {"scale": normal(2)}, "none": None, "empty": ()}, normal(N, 3)))


@case
def argnums_two():
    def fn(a, x, b):
        return score(F.linear(F.linear(x, a["w"]).tanh(), b))

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3), normal(2, 4)), options={"argnums": (0, 2)})


@case
def argnums_last():
    return Problem(lambda x, y, p: score(F.linear(x, p) - y), (normal(N, 3), normal(N, 4), normal(4, 3)), options={"argnums": 2})


@case
def argnums_in_another_order():
    return Problem(lambda a, b, x: score(a * x + b), (normal(3), normal(3), normal(N, 3)), options={"argnums": (1, 0)})


@case
def in_dims_along_dimension_one():
    return Problem(lambda p, x: score(F.linear(x, p)), (normal(4, 3), normal(5, N, 3)), options={"in_dims": (None, 1)})


@case
def in_dims_negative_and_prefix_tree():
    def fn(p, batch, mask):
        return score(F.linear(batch["x"], p) * batch["scale"] * mask)

    batch = {"x": normal(5, 3, N).transpose(0, 1).contiguous().transpose(0, 1), "scale": normal(4)}
    return Problem(fn, (normal(4, 3), batch, normal(N, 4)), options={"in_dims": (None, {"x": -1, "scale": None}, 0)})


@case
def in_dims_shared_tensor():
    return Problem(lambda p, buffer, x: score(F.linear(x + buffer, p)), (normal(4, 3), normal(3), normal(N, 3)), options={"in_dims": (None, None, 0)})


@case
def in_dims_batched_parameters():
    # Every sample has parameters of its own, as an ensemble has.
    return Problem(lambda p, x: score(F.linear(x, p["w"], p["b"])), ({"w": normal(N, 4, 3), "b": normal(4)}, normal(N, 3)), options={"in_dims": ({"w": 0, "b": None}, 0)})


@case
def batch_is_a_tree():
    def fn(p, batch):
        return score(F.embedding(batch["ids"], p["table"])) + score(F.linear(batch["pair"][0], p["w"]) * batch["pair"][1])

    batch = {"ids": ids(7, N, 4), "pair": (normal(N, 3), normal(N, 4))}
    return Problem(fn, ({"table": normal(7, 2), "w": normal(4, 3)}, batch))


@case
def arguments_that_are_no_tensors():
    def fn(p, x, options, nothing):
        y = F.linear(x, p)
        assert nothing is None
        return score(y if options["kind"] == "plain" else y.tanh()) * options["scale"]

    return Problem(fn, (normal(4, 3), normal(N, 3), {"kind": "other", "scale": 2.5}, None))


@case
def keyword_arguments_are_shared():
    def fn(p, x, *, scale, power=1, target=None):
        return score(F.linear(x, p) * scale) ** power + target.sum()

    return Problem(fn, (normal(4, 3), normal(N, 3)), {"scale": normal(4), "power": 2, "target": normal(2, 2)})


@case
def auxiliary_output():
    def fn(p, x):
        y = F.linear(x, p)
        return score(y), {"logits": y, "twice": (2 * y.sum(),)}

    return Problem(fn, (normal(4, 3), normal(N, 3)), options={"has_aux": True})


@case
def live_parameters():
    module = nn.Linear(3, 4)
    params = dict(module.named_parameters())
    return Problem(lambda p, x: score(F.linear(x, p["weight"], p["bias"])), (params, normal(N, 3)))


@case
def batch_that_requires_grad():
    return Problem(lambda p, x: score(F.linear(x, p)), (normal(4, 3), normal(N, 5, 3).requires_grad_()))


@case
def complex_input():
    def fn(p, x):
        return score(torch.fft.fft(x) @ p["w"].to(x.dtype.to_complex()) + p["b"])

    x = torch.complex(normal(N, 3), normal(N, 3))
    return Problem(fn, ({"w": normal(3, 4), "b": normal(4)}, x))


@case
def complex_parameter():
    def fn(p, x):
        return (p["w"] @ x.to(p["w"].dtype)).abs().square().sum() + score(F.linear(x, p["r"]))

    return Problem(fn, ({"w": torch.complex(normal(4, 3), normal(4, 3)), "r": normal(4, 3)}, normal(N, 3)))


@case
def ignored_targets():
    # Of the first sample every position is ignored: its loss is a sum over nothing.
    targets = ids(5, N, 4)
    targets[0] = -100
    targets[1, 2:] = -100

    def fn(p, x, y):
        return F.cross_entropy(F.linear(x, p), y, ignore_index=-100, reduction="sum")

    return Problem(fn, (normal(5, 3), normal(N, 4, 3), targets))


# --- where lifting leaks, and what it cannot run ------------------------------------------------------------

STRIDES = "as_strided reads memory that a batched parameter lays out differently"
SCATTERED = "select_scatter under vmap has a wrong gradient"
op_case("leak: as_strided of a parameter", lambda x, w: w.as_strided((2, 3), (3, 1)) * x, (2, 3), params={"w": (3, 3)})
op_case("leak: as_strided_copy of a parameter", lambda x, w: torch.as_strided_copy(w, (2, 3), (1, 2)) * x, (2, 3), params={"w": (3, 3)}, ladder={"not_capture": STRIDES})
op_case("leak: diagonal of a parameter written", lambda x, w: torch.diagonal_scatter(x, w), (3, 3), params={"w": (3,)})
op_case("leak: select_scatter into the sample", lambda x, w: torch.select_scatter(x, w, 0, 1), (4, 3), params={"w": (3,)}, ladder={"not_capture": SCATTERED})
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


op_case("leak: column_stack of parameters", lambda x, a, b: x @ torch.column_stack([a, b]), (5, 3), params={"a": (3,), "b": (3,)}, ladder={"not_capture": "vmap has no rule for column_stack"})
op_case("leak: covariance of a parameter", lambda x, w: torch.cov(w) @ x, (3,), params={"w": (3, 5)})
op_case("leak: is_contiguous of a memory format", lambda x, w: F.conv2d(x, w if w.is_contiguous(memory_format=torch.contiguous_format) else w * 0), (2, 4, 4), params={"w": (3, 2, 2, 2)})


BRANCH = "Python asks for a value of a sample"


@case(name="leak: gaussian_nll_loss", not_capture=BRANCH, not_vmap=BRANCH)
def _():
    def fn(p, x, y):
        return F.gaussian_nll_loss(F.linear(x, p["mean"]), y, F.softplus(F.linear(x, p["var"])))

    return Problem(fn, ({"mean": normal(4, 3), "var": normal(4, 3)}, normal(N, 3), normal(N, 4)))


@case(name="leak: attention bias from parameters", not_capture="the fused CPU kernel is not differentiable in its mask")
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


@case(name="leak: in-place write into a derived parameter", not_capture=IN_PLACE)
def _():
    def fn(p, x):
        w = p["w"] * 2
        w[0] = 0
        w.mul_(2)
        return score(F.linear(x, w))

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


INTO_PLAIN = "vmap cannot write a batched value into a plain tensor"


@case(name="leak: in-place write of the sample into a derived parameter", not_capture=IN_PLACE, not_vmap=INTO_PLAIN)
def _():
    def fn(p, x):
        w = p["w"].clone()
        w[0] = x
        return score(w)

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


@case(name="leak: gradient through torch.autograd.grad inside fn", not_capture="vmap hides what is differentiated beneath it")
def _():
    def fn(p, x):
        y = F.linear(x, p["w"]).tanh().sum()
        (slope,) = torch.autograd.grad(y, p["w"], create_graph=True)
        return slope.square().sum()

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


# --- the lower rungs ----------------------------------------------------------------------------------------


@case(not_capture=BRANCH, not_vmap=BRANCH)
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
    return Problem(lambda p, x: score(F.linear(x[x[:, 0] > 0], p)), (normal(4, 3), normal(N, 6, 3)))


OLD_STYLE = "an autograd.Function of the old style has no vmap rule"


@case(not_capture=OLD_STYLE, not_vmap=OLD_STYLE)
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


RECURRENT = "vmap has no rule for the fused recurrent op"
module_case("lstm", lambda: nn.LSTM(3, 4, batch_first=True), (5, 3), not_capture=RECURRENT, not_vmap=RECURRENT)
module_case("gru", lambda: nn.GRU(3, 4, num_layers=2, batch_first=True), (5, 3), not_capture=RECURRENT, not_vmap=RECURRENT)


HOOK = "vmap has no gradient of its own to hand to a hook"


@case(not_capture=HOOK)
def gradient_hook_on_an_output():
    # Gradient reversal and scaling are written like this.
    def fn(p, x):
        y = F.linear(x, p["a"])
        y.register_hook(lambda cotangent: -2 * cotangent)
        return score(F.linear(y, p["b"]))

    return Problem(fn, ({"a": normal(4, 3), "b": normal(2, 4)}, normal(N, 3)))


@case
def forward_hooks_on_a_module():
    module = nn.Linear(3, 4)
    module.register_forward_hook(lambda module, args, output: 2 * output)
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return Problem(lambda p, x: score(functional_call(module, p, (x,))), (parameters(module), normal(N, 3)))


@case
def tied_head_by_matrix_product():
    return Problem(lambda p, t: F.cross_entropy(F.embedding(t, p).cumsum(0) @ p.T, t), (normal(7, 3), ids(7, N, 5)))


@case
def recurrence_written_out():
    def fn(p, x):
        h = x.new_zeros(1, 4)
        for t in range(len(x)):
            h = torch.tanh(F.linear(x[t : t + 1], p["in"], p["bias"]) + F.linear(h, p["hidden"]))
        return score(h)

    return Problem(fn, ({"in": normal(4, 3), "hidden": normal(4, 4), "bias": normal(4)}, normal(N, 6, 3)))


@case
def factorisations_of_a_parameter():
    def fn(p, x):
        singular = torch.linalg.svd(p, full_matrices=False).S
        orthogonal, _ = torch.linalg.qr(p)
        return score(singular * x) + score(orthogonal @ x) + torch.linalg.eigh(p.T @ p).eigenvalues @ x

    return Problem(fn, (normal(4, 3), normal(N, 3)))


@case
def mixture_of_experts():
    # Routing by argmax, every expert run on every token and weighted by zero or one.
    def fn(p, x):
        gate = F.linear(x, p["gate"]).softmax(-1)
        chosen = torch.zeros_like(gate).scatter(-1, gate.argmax(-1, keepdim=True), 1) * gate
        outs = torch.stack([F.linear(x, p["experts"][e]).tanh() for e in range(2)], -1)
        return score((outs * chosen.unsqueeze(-2)).sum(-1))

    return Problem(fn, ({"gate": normal(2, 3), "experts": normal(2, 4, 3)}, normal(N, 5, 3)))


# --- ways to reach and write a parameter --------------------------------------------------------------------


@case
def class_token_and_positions():
    # As a vision transformer: a token of its own before the patches, positions added.
    def fn(p, x):
        patches = F.conv2d(x[None], p["patch"], stride=2).flatten(2).transpose(1, 2)
        tokens = torch.cat([p["token"].expand(1, -1, -1), patches], 1) + p["positions"]
        return score(F.layer_norm(tokens, (4,), p["scale"]))

    params = {"patch": normal(4, 1, 2, 2), "token": normal(1, 1, 4), "positions": normal(1, 5, 4), "scale": normal(4)}
    return Problem(fn, (params, normal(N, 1, 4, 4)))


@case
def parameters_iterated_and_stacked():
    def fn(p, x):
        rows = [F.linear(x, row[None]) for row in p["w"]]
        return score(torch.cat(rows)) + score(torch.stack([p["a"], x]))

    return Problem(fn, ({"w": normal(4, 3), "a": normal(3)}, normal(N, 3)))


@case(name="leak: data of a parameter", not_capture="vmap refuses .data")
def _():
    def fn(p, x):
        frozen = p["w"].data.clone()
        return score(F.linear(x, p["w"]) + F.linear(x, frozen) + F.linear(x, p["w"].clone().contiguous()))

    return Problem(fn, ({"w": normal(4, 3)}, normal(N, 3)))


@case
def parameter_by_keyword_and_position():
    def fn(p, x):
        y = F.linear(weight=p["w"], input=x, bias=p["b"])
        y = F.layer_norm(y, (4,), bias=p["c"])
        return score(torch.matmul(input=y, other=p["v"]))

    return Problem(fn, ({"w": normal(4, 3), "b": normal(4), "c": normal(4), "v": normal(4, 2)}, normal(N, 5, 3)))


@case
def custom_autograd_function_with_a_vmap_rule():
    class Scaled(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, w):
            return x * w

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, cotangent):
            x, w = ctx.saved_tensors
            return cotangent * w, 3 * cotangent * x  # not the derivative: the function's own rule counts

    return Problem(lambda p, x: score(Scaled.apply(F.linear(x, p["a"]), p["w"])), ({"a": normal(4, 3), "w": normal(4)}, normal(N, 4, 3)[:, 0]))


@case(name="leak: matrix assembled in place from parameters", not_capture=INTO_PLAIN)
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


@case(not_capture="Python asks for a value of a parameter")
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


@case(name="leak: linear_cross_entropy")
def _():
    def fn(p, x, y):
        return F.linear_cross_entropy(x, p["w"], y)

    return Problem(fn, ({"w": normal(7, 3)}, normal(N, 5, 3), ids(7, N, 5)))
