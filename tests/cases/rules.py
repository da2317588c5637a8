"""Ops that have a rule, in all their options."""

import torch
import torch.nn.functional as F
from torch import nn

from cases._table import N, Problem, case, module_case, normal, op_case, score

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
op_case("einsum, order left to torch", lambda x, weight: torch.einsum("...i,io", x, weight), (2, 5, 3), params={"weight": (3, 4)})


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
op_case(
    "embedding max_norm",
    F.embedding,
    (4,),
    params=TABLE,
    high=7,
    max_norm=0.8,
    ladder=dict.fromkeys(("not_capture", "not_vmap"), "torch writes the shortened rows back into the weight"),
)
op_case(
    "embedding with sparse gradients",
    F.embedding,
    (4,),
    params=TABLE,
    high=7,
    sparse=True,
    ladder={"not_vmap": "vmap has no sparse tensors"},
)
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
op_case("torch.layer_norm", torch.layer_norm, (5, 4), (4,), params=FEATURES)
op_case("torch.group_norm", torch.group_norm, (1, 4, 3), 2, params=FEATURES)
op_case("torch.rms_norm", torch.rms_norm, (5, 4), (4,), params={"weight": (4,)})
op_case("rms_norm", F.rms_norm, (5, 4), (4,), params={"weight": (4,)})
op_case("rms_norm over two dimensions", F.rms_norm, (3, 4), (3, 4), params={"weight": (3, 4)}, eps=1e-2)
module_case("batch_norm in evaluation mode", lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).eval(), (2, 5, 5))


@case
def normalisation_without_parameters_between_layers():
    def fn(p, x):
        x = F.layer_norm(F.linear(x, p["a"]), (4,))
        return score(F.linear(F.rms_norm(x, (4,)), p["b"]))

    return Problem(fn, ({"a": normal(4, 3), "b": normal(2, 4)}, normal(N, 5, 3)))
