"""Drawn programs: straight-line functions of parameters and a sample, compared with the loop.

Every value is a [3, 3] matrix, so that any instruction may follow any other: rules, ops without rules, derived
parameters, views, writes in place, detached and no_grad sections, in combinations that nobody wrote down.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from cases import score
from hypothesis import given
from hypothesis import strategies as st

import psg
from psg.testing import assert_trees_close, loop_value_and_grad, reference_norm
from psg.testing._loop import tree_map

SIDE = 3


def without_grad(x, y):
    with torch.no_grad():
        return x.tanh() * y


def write(x, y):
    x = x.clone()
    x[0] = y[1]
    return x


def write_view(x, y):
    x = (x * 1).contiguous()
    x.view(-1)[::2].mul_(y.reshape(-1)[::2])
    return x


UNARY = {
    "tanh": torch.tanh,
    "transpose": lambda x: x.T,
    "permute": lambda x: x.permute(1, 0).contiguous(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: torch.roll(x, 1, 1),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (SIDE,), eps=0.1),
    "detach": lambda x: x.detach(),
    "clone": torch.clone,
    "relu_": lambda x: (x * 1).relu_(),
    "view": lambda x: x.reshape(-1).view(SIDE, SIDE),
    "chunks": lambda x: torch.cat(x.split(1)[::-1]),
    "row": lambda x: x[1].expand(SIDE, SIDE),
    "index": lambda x: x[[2, 0, 0]],
    "diagonal": lambda x: torch.diag_embed(x.diagonal()) + x.tril(),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1))[1:-1, 2:],
    "float": lambda x: x.to(torch.complex128).real.to(x.dtype),
    "stacked": lambda x: torch.stack([x, 2 * x]).sum(0),
    "unfold": lambda x: x.unfold(0, 1, 1).squeeze(-1),
    "sorted": lambda x: x.sort(0).values,
    "maximum": lambda x: x.max(0).values.expand(SIDE, SIDE),
}  # fmt: skip
BINARY = {
    "add": torch.add,
    "mul": torch.mul,
    "linear": lambda x, y: F.linear(x, y),
    "linear with bias": lambda x, y: F.linear(x, y, y[0]),
    "matmul": torch.matmul,
    "addmm": lambda x, y: torch.addmm(x[0], x, y),
    "einsum": lambda x, y: torch.einsum("ij,kj->ki", x, y),
    "conv1d": lambda x, y: F.conv1d(x[None], y[:, :, None])[0],
    "conv2d": lambda x, y: F.conv2d(x[None, None], y[None, None], padding=1)[0, 0],
    "depthwise": lambda x, y: F.conv1d(x[None], y[:, None], groups=SIDE, padding=1)[0],
    "embedding": lambda x, y: F.embedding(x.argmax(-1), y),
    "scaled norm": lambda x, y: F.layer_norm(x, (SIDE,), y[0], y[1], eps=0.1),
    "group norm": lambda x, y: F.group_norm(x[None], 1, y[0], y[1], eps=0.1)[0],
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None])[0, 0],
    "prelu": lambda x, y: F.prelu(x, y[0]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cat": lambda x, y: torch.cat([x[:1], y[1:]]),
    "add_": lambda x, y: (x * 1).add_(y),
    "write": write,
    "write view": write_view,
    "no grad": without_grad,
    "outer": lambda x, y: torch.outer(x[0], y[0]),
    "scatter": lambda x, y: x.scatter_add(0, torch.zeros(1, SIDE, dtype=torch.int64, device=x.device), y[:1]),
}  # fmt: skip

operand = st.integers(0, 20)
instruction = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), operand, st.just(None)),
    st.tuples(st.sampled_from(sorted(BINARY)), operand, operand),
)


def program(instructions):
    def fn(params, x):
        values = [*params.values(), x]
        for name, i, j in instructions:
            first = values[i % len(values)]
            value = UNARY[name](first) if j is None else BINARY[name](first, values[j % len(values)])
            values.append(value / (1 + value.detach().abs().amax()))  # of order one, however long the program
        return sum(score(value) for value in values[4:][-3:])

    return fn


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")  # some drawn programs are beyond capture or vmap
@given(instructions=st.lists(instruction, min_size=1, max_size=8), n=st.integers(1, 3), seed=st.integers(0, 2**16), rules=st.booleans())
def test_programs(instructions, n, seed, rules, device):
    generator = torch.Generator().manual_seed(seed)
    params = {name: torch.randn(SIDE, SIDE, generator=generator).to(device) for name in "abc"}
    x = torch.randn(n, SIDE, SIDE, generator=generator).to(device)
    kept = tree_map(torch.clone, (params, x))
    fn = program(instructions)
    values, expected = loop_value_and_grad(fn)(params, x)
    atol = 1e4 * torch.finfo(x.dtype).eps
    with nullcontext() if rules else psg.rules.disabled():
        found_values, found = psg.per_sample_value_and_grad(fn)(params, x)
        norms = psg.per_sample_norm(fn)(params, x)
    assert_trees_close(found_values, values, atol=atol, name="values")
    assert_trees_close(found, expected, atol=atol, name="grads")
    assert_trees_close(norms, reference_norm(expected), atol=atol, name="norm")
    assert_trees_close((params, x), kept, rtol=0, name="arguments")
