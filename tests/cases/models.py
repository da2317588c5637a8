"""Attention, whole models, and parameters that are used more than once."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import psg
from cases._table import N, Problem, case, ids, module_case, normal, parameters, score

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
    """Every op family with a rule but attention and embedding, grouped convolution included."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 2, groups=2), nn.GroupNorm(2, 6), nn.GELU()),
        *(nn.Flatten(), nn.Linear(24, 5)),
    )


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
