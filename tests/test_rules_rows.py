"""Rows of ops that see a whole batch (method="batch"): gradients and norms equal those of the loop over batches of one."""

import pytest
import torch
import torch.nn.functional as F
from cases import normal
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import psg
from psg.testing import assert_trees_close, loop_value_and_grad, reference_norm

KNOWN = range(7)


def total(y):
    """One number for each sample, to which every entry contributes differently."""
    y = y.sin() * torch.arange(1, 1 + y[:1].numel()).reshape(y.shape[1:]).cos()
    return y.reshape(len(y), -1).sum(1) if len(y) else y.reshape(0)


def held_to_the_loop(fn, params, *batch):
    values, grads = loop_value_and_grad(lambda p, *sample: fn(p, *(x[None] for x in sample))[0])(params, *batch)
    found_values, found = psg.per_sample_value_and_grad(fn, method="batch")(params, *batch)
    assert_trees_close(found_values, values, atol=1e-11)
    assert_trees_close(found, grads, atol=1e-11)
    assert_trees_close(psg.per_sample_norm(fn, method="batch")(params, *batch), reference_norm(grads), atol=1e-11)


def drawn(**strategies):
    return given(seed=st.integers(0, 10_000), n=st.integers(0, 4), **strategies)


# [n, t, i] stands for the batch, w [i, o], v [i], heads [t, i, o] and so on for the parameters.
PRODUCTS = {
    "mm": lambda p, x: torch.mm(x[:, 0], p["w"]),
    "mm, parameter first": lambda p, x: torch.mm(p["w"].T, x[:, 0].T).T,
    "mv": lambda p, x: torch.mv(x[:, 0], p["v"])[:, None],
    "bmm": lambda p, x: torch.bmm(x.transpose(0, 1), p["heads"]).transpose(0, 1),
    "addmm": lambda p, x: torch.addmm(p["b"], x[:, 1], p["w"], beta=0.5, alpha=2),
    "baddbmm": lambda p, x: torch.baddbmm(p["b"], x.transpose(0, 1), p["heads"], beta=0.5, alpha=2).transpose(0, 1),
    "baddbmm, a bias for each": lambda p, x: torch.baddbmm(p["biases"], x.transpose(0, 1), p["heads"]).transpose(0, 1),
    "matmul": lambda p, x: x @ p["w"],
    "matmul, parameter first": lambda p, x: p["w"].T @ x.transpose(1, 2),
    "matmul, a matrix each": lambda p, x: x.unsqueeze(2) @ p["heads"],
    "matmul, all with all": lambda p, x: x.unsqueeze(1) @ p["heads"],
    "matmul, one matrix of three dimensions": lambda p, x: x @ p["w"][None],
    "matmul of a vector": lambda p, x: x @ p["v"],
    "matmul, sample by sample": lambda p, x: torch.stack([p["w"].T @ row for row in x[:, 0]]) if len(x) else x[:, 0],
    "rmatmul": lambda p, x: x.transpose(1, 2).__rmatmul__(p["w"].T),
    "rmatmul, data first": lambda p, x: p["w"].__rmatmul__(x),
    "einsum": lambda p, x: torch.einsum("nti,io->not", x, p["w"]),
    "einsum, a list": lambda p, x: torch.einsum("nti,io->not", [x, p["w"]]),
    "einsum, written into": lambda p, x: torch.einsum("nti,tio->not", x, p["heads"]).mul_(2),
    "einsum, ellipsis": lambda p, x: torch.einsum("...i,io->...o", x, p["w"]),
    "einsum, data twice": lambda p, x: torch.einsum("nti,tio,nti->no", x, p["heads"], x.cos()),
    "einsum, two parameters": lambda p, x: torch.einsum("nti,io,i->nto", x, p["w"], p["v"]),
    "einsum, a diagonal of the data": lambda p, x: torch.einsum("ntt,to->no", x[:, :, :2], p["w"][:2]),
    "bilinear": lambda p, x: F.bilinear(x, x[..., :2].cos(), p["pairs"], p["b"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
@drawn()
def test_products(name, seed, n):
    torch.manual_seed(seed)
    t, i, o = 2, *torch.randint(2, 5, (2,)).tolist()
    shapes = {"w": (i, o), "v": (i,), "b": (o,), "heads": (t, i, o), "biases": (t, 1, o), "pairs": (o, i, 2)}
    params = {key: normal(*shape) for key, shape in shapes.items()}
    held_to_the_loop(lambda p, x: total(PRODUCTS[name](p, x)), params, normal(n, t, i))


@drawn(
    dims=st.integers(1, 3), stride=st.integers(1, 2), padding=st.integers(0, 1), dilation=st.integers(1, 2), groups=st.sampled_from([1, 2])
)
def test_transposed_convolutions(seed, n, dims, stride, padding, dilation, groups):
    torch.manual_seed(seed)
    op = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "output_padding": min(1, stride - 1)}
    params = {"weight": normal(4, 3, *(2,) * dims), "bias": normal(3 * groups)}
    held_to_the_loop(lambda p, x: total(op(x, **p, **options)), params, normal(n, 4, *(3,) * dims))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("layout", ["rectangle", "offsets", "last offset"])
@drawn(size=st.integers(1, 5), padding_idx=st.sampled_from([None, 2, -1]))
def test_embedding_bags(mode, layout, seed, n, size, padding_idx):
    torch.manual_seed(seed)
    ids = torch.randint(len(KNOWN), (n, size))
    weighted = mode == "sum" and size > 2
    cuts = torch.sort(torch.randint(size + 1, (2,))).values  # three bags of any size, 0 included

    def fn(weight, ids, scales):
        options = {"mode": mode, "padding_idx": padding_idx, "per_sample_weights": scales if weighted else None}
        if layout == "rectangle":
            return total(F.embedding_bag(ids, weight, include_last_offset=True, **options))  # ignored
        flat = {**options, "per_sample_weights": scales.reshape(-1) if weighted else None}
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), cuts]) + size * torch.arange(len(ids))[:, None]
        offsets = starts.reshape(-1)
        if layout == "last offset":
            offsets = torch.cat([offsets, torch.tensor([ids.numel()])])
        bags = F.embedding_bag(ids.reshape(-1), weight, offsets, include_last_offset=layout == "last offset", **flat)
        return total(bags.reshape(len(ids), 3, -1))

    held_to_the_loop(fn, normal(len(KNOWN), 3), ids, normal(n, size))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@drawn(
    batch_first=st.booleans(), layers=st.integers(1, 2), bidirectional=st.booleans(), bias=st.booleans(),
    given_state=st.booleans(), project=st.booleans(),
)  # fmt: skip
def test_recurrent_layers(kind, seed, n, batch_first, layers, bidirectional, bias, given_state, project):
    torch.manual_seed(seed)
    options = {"proj_size": 2} if kind is nn.LSTM and project else {}
    module = kind(3, 4, layers, batch_first=batch_first, bidirectional=bidirectional, bias=bias, **options)
    rows = layers * (1 + bidirectional)

    def fn(p, x, h, c):
        states = h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()
        given = (states if kind is nn.LSTM else states[0],) if given_state else ()
        output, final = functional_call(module, p, (x if batch_first else x.transpose(0, 1), *given))
        final = torch.cat(final, -1) if kind is nn.LSTM else final
        return total(output if batch_first else output.transpose(0, 1)) + total(final.transpose(0, 1))

    params = {name: p.detach() for name, p in module.named_parameters()}
    held_to_the_loop(fn, params, normal(n, 5, 3), normal(n, rows, options.get("proj_size", 4)), normal(n, rows, 4))


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@drawn()
def test_recurrent_cells(kind, seed, n):
    torch.manual_seed(seed)
    module = kind(3, 4)

    def fn(p, x):
        state = None
        for step in x.unbind(1):
            state = functional_call(module, p, (step, state))
        return total(torch.cat(state, 1) if kind is nn.LSTMCell else state)

    held_to_the_loop(fn, {name: p.detach() for name, p in module.named_parameters()}, normal(n, 3, 3))


@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_packed_sequences(seed, lengths):
    torch.manual_seed(seed)
    module = nn.GRU(3, 4, batch_first=True)

    def fn(p, x, lengths):
        pack = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, final = functional_call(module, p, (pack,))
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True, total_length=5)
        return total(padded) + total(final.transpose(0, 1))

    params = {name: p.detach() for name, p in module.named_parameters()}
    held_to_the_loop(fn, params, normal(len(lengths), 5, 3), torch.tensor(lengths))


@drawn(module=st.sampled_from([nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm]))
def test_norms(seed, n, module):
    torch.manual_seed(seed)
    norm = module(2, 4) if module is nn.GroupNorm else module(4, affine=True, track_running_stats=True)
    norm = norm.eval()
    for buffer in norm.buffers():
        buffer.copy_(torch.rand(buffer.shape) + 0.5)
    x = normal(n, 4) if module is nn.BatchNorm1d else normal(n, 4, 3, 3)
    held_to_the_loop(lambda p, x: total(functional_call(norm, p, (x,))), {k: p.detach() for k, p in norm.named_parameters()}, x)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 2, 3), (1, 1, 3)])
@pytest.mark.parametrize("op", [torch.mul, torch.add])
@drawn()
def test_elementwise(shape, op, seed, n):
    torch.manual_seed(seed)
    held_to_the_loop(lambda p, x: total(op(p, x)), normal(*shape), normal(n, 2, 3))


def test_a_parameter_may_add_a_dimension():
    psg.check(lambda p, x: (x + p)[0].sin().sum(1), method="batch")(normal(1, 1, 3), normal(4, 3))


def test_rows_of_several_samples_are_found_out():
    def fn(p, x):  # a matrix for every second sample
        return (x.unflatten(0, (-1, 2)).transpose(0, 1) @ p).transpose(0, 1).reshape(len(x), -1).sum(1)

    with pytest.raises(psg.StateError, match="the output of matmul has a row on which more than one loss depends"):
        psg.per_sample_grad(fn, method="batch")(normal(2, 3, 2), normal(4, 3))


@pytest.mark.filterwarnings("ignore:.*returns other losses when it is called again")
def test_what_lies_around_bags_belongs_to_nobody():
    """torch's kernel for float64 adds what lies behind the last offset to the last bag, the one for float32 does not."""
    weight, ids, offsets = normal(len(KNOWN), 3), torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 2, 4])
    grads = psg.per_sample_grad(
        lambda w, x: x * total(F.embedding_bag(ids, w, offsets, mode="sum", include_last_offset=True)),
        method="batch",
    )(weight, torch.ones(2))
    assert grads[0, [1, 2]].abs().min() > 0 and grads[1, [3, 4]].abs().min() > 0
    assert grads[0, 3:].abs().max() == 0 and grads[1, [0, 1, 2, 5, 6]].abs().max() == 0
