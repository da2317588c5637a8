"""Trees, argnums, in_dims, and arguments of every kind."""

import dataclasses
from collections import namedtuple

import optree
import torch
import torch.nn.functional as F
from torch import nn

from cases._table import N, Problem, case, ids, normal, score

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
    return Problem(
        lambda p, buffer, x: score(F.linear(x + buffer, p)), (normal(4, 3), normal(3), normal(N, 3)), options={"in_dims": (None, None, 0)}
    )


@case
def in_dims_batched_parameters():
    # Every sample has parameters of its own, as an ensemble has.
    return Problem(
        lambda p, x: score(F.linear(x, p["w"], p["b"])),
        ({"w": normal(N, 4, 3), "b": normal(4)}, normal(N, 3)),
        options={"in_dims": ({"w": 0, "b": None}, 0)},
    )


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
