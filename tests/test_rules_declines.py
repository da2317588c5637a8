"""Calls that a rule or a decomposition declines: they take a slower path, with torch's result or torch's error.

They decline by shapes, dtypes and options, which are the same on every device: these tests run on the CPU.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees
from cases import N, Problem, ids, normal, score
from torch.func import grad, vmap

import psg
from psg.testing import assert_trees_close, loop_grad


def complex_normal(*shape):
    return torch.randn(shape, dtype=torch.complex128)


def slope(op, x, *args, **options):
    """The score of a derivative that fn takes with respect to its data."""
    return score(grad(lambda x: score(op(x, *args, **options)))(x))


def rnn(x, weights, state=None):
    state = torch.zeros(1, 1, 4) if state is None else state
    return torch.rnn_tanh(x, state, weights, False, 1, 0.0, False, False, False)[0]


# Calls that torch computes: a function of parameters and one sample, the parameters, the batch.
DECLINED = {
    "layer_norm of complex data": lambda: (lambda w, x: score(x * F.layer_norm(w, (3,))), normal(3), complex_normal(N, 3)),
    "conv1d, complex": lambda: (lambda w, x: score(F.conv1d(x, w)), complex_normal(2, 3, 2), complex_normal(N, 3, 5)),
    "conv1d, kernels of each sample's own": lambda: (
        lambda w, x: score(F.conv1d(x, x[:, :2].cos().expand(2, 3, 2), w)),
        normal(2),
        normal(N, 3, 5),
    ),
    "layer_norm, scales of each sample's own": lambda: (
        lambda w, x: score(F.layer_norm(x, (3,), x[0].cos(), w)),
        normal(3),
        normal(N, 2, 3),
    ),
    "conv1d, no channels": lambda: (lambda w, x: score(F.conv1d(x, w)), normal(2, 0, 3), normal(N, 1, 0, 5)),
    "conv_transpose1d, complex": lambda: (lambda w, x: score(F.conv_transpose1d(x, w)), complex_normal(3, 2, 2), complex_normal(N, 3, 5)),
    "derivative of conv_transpose1d, windows of no input": lambda: (
        lambda w, x: slope(F.conv_transpose1d, x, w, dilation=2, output_padding=1),
        normal(3, 2, 2),
        normal(N, 3, 5),
    ),
    "derivative of conv1d, same padding of an even kernel": lambda: (
        lambda w, x: slope(F.conv1d, x, w, padding="same"),
        normal(2, 3, 2),
        normal(N, 3, 5),
    ),
    "derivative of linear, one output": lambda: (lambda w, x: slope(F.linear, x, w), normal(3), normal(N, 2, 3)),
    "derivative of matmul, a vector": lambda: (lambda w, x: slope(torch.matmul, x, w), normal(3), normal(N, 2, 3)),
    "derivative of matmul, a vector first": lambda: (lambda w, x: slope(lambda x: w @ x, x), normal(3), normal(N, 3, 2)),
    "derivative of matmul, a stack of matrices": lambda: (lambda w, x: slope(torch.matmul, x, w), normal(2, 3, 4), normal(N, 2, 3)),
    "derivative of einsum, data twice": lambda: (
        lambda w, x: slope(lambda x: torch.einsum("ti,tj,ij->t", x, x, w), x),
        normal(3, 3),
        normal(N, 2, 3),
    ),
    "derivative of einsum, equation of lists": lambda: (
        lambda w, x: slope(lambda x: torch.einsum(x, [0, 1], w, [1, 2], [0, 2]), x),
        normal(3, 4),
        normal(N, 2, 3),
    ),
    "einsum, equation of lists": lambda: (lambda w, x: score(torch.einsum(x, [0, 1], w, [1, 2], [0, 2])), normal(3, 4), normal(N, 2, 3)),
    "linear by a vector": lambda: (lambda w, x: score(F.linear(x, w)), normal(3), normal(N, 2, 3)),
    "matmul and a number": lambda: (lambda w, x: score(torch.dot(w, x) * w), normal(3), normal(N, 3)),
    "embedding_bag by frequency": lambda: (
        lambda w, x: score(F.embedding_bag(x, w, scale_grad_by_freq=True, mode="sum")),
        normal(5, 3),
        ids(5, N, 2, 4),
    ),
    "embedding_bag of the largest, of no ids": lambda: (
        lambda w, x: score(F.embedding_bag(x, w, torch.zeros(2, dtype=torch.int64), mode="sum")) + score(w),
        normal(5, 3),
        ids(5, N, 0),
    ),
    "index_add of data in another layout": lambda: (
        lambda w, x, i: score(torch.index_add(x, 0, i, w * x[:2])),
        normal(3),
        normal(N, 3, 4).transpose(1, 2),
        ids(4, N, 2),
    ),
    "index_add of 16 bits of index": lambda: (
        lambda w, x, i: score(torch.index_add(w * x, 0, i, x[:2])),
        normal(3),
        normal(N, 4, 3),
        ids(4, N, 2).int(),
    ),
    "index_add, a multiple": lambda: (
        lambda w, x, i: score(torch.index_add(w * x, 0, i, x[:2], alpha=2.0)),
        normal(3),
        normal(N, 3, 4).transpose(1, 2),
        ids(4, N, 2),
    ),
    "quantile of another dtype": lambda: (lambda w, x: torch.quantile(w * x, torch.tensor(0.3).to(x)).sum(), normal(4), normal(N, 4)),
    "renorm of one dimension": lambda: (lambda w, x: score((w * x).mT.renorm(2, 0, 1.0)), normal(3), normal(N, 4, 3)),
    "take of nothing": lambda: (
        lambda w, x: score((w * x).take(torch.zeros(0, dtype=torch.int64))) + w.sum(),
        normal(3),
        normal(N, 3),
    ),
    "tensordot of dims that count from the end": lambda: (
        lambda w, x: score(torch.tensordot(x, w, dims=([-1], [-2]))),
        normal(3, 4),
        normal(N, 2, 3),
    ),
    "ctc_loss of one sequence, unreduced": lambda: (
        lambda w, x: F.ctc_loss((w * x).log_softmax(-1), torch.tensor([1, 2]), torch.tensor(6), torch.tensor(2), reduction="none"),
        normal(4),
        normal(N, 6, 4),
    ),
    "scaled dot product without queries": lambda: (
        lambda w, x: score(F.scaled_dot_product_attention((w * x)[:0], x, x)) + w.sum(),
        normal(3),
        normal(N, 2, 3),
    ),
    "triplet_margin_loss without margin": lambda: (
        lambda w, x: F.triplet_margin_loss(w * x, x, x.flip(0), margin=1e-3),
        normal(3),
        normal(N, 2, 3),
    ),
    "layer_norm, differentiated, of 0 entries": lambda: (
        lambda w, x: score(F.layer_norm(x, (3,), w)) + w.sum(),
        normal(3),
        normal(N, 0, 3),
    ),
    "rms_norm, complex": lambda: (lambda w, x: score(F.rms_norm(x, (3,), w)), complex_normal(3), complex_normal(N, 2, 3)),
    "derivative of conv1d, complex": lambda: (lambda w, x: slope(F.conv1d, x, w), complex_normal(2, 3, 2), complex_normal(N, 3, 5)),
    "derivative of conv_transpose1d, complex": lambda: (
        lambda w, x: slope(F.conv_transpose1d, x, w),
        complex_normal(3, 2, 2),
        complex_normal(N, 3, 5),
    ),
    "derivative of layer_norm of nothing": lambda: (
        lambda w, x: slope(F.layer_norm, x, (3,), w) + w.sum(),
        normal(3),
        normal(N, 0, 3),
    ),
    "einsum of more dimensions than letters": lambda: (
        lambda w, x: score(torch.einsum("...i,io->...o", x.reshape(*[1] * 51, 3), w)),
        normal(3, 4),
        normal(N, 3),
    ),
    "grouped_mm without offsets": lambda: (
        lambda w, x: score(torch._grouped_mm(x, w)),
        normal(2, 8, 8).float(),
        normal(N, 2, 4, 8).float(),
    ),
    "lu_solve of a constant matrix": lambda: (
        lambda w, x: score(torch.linalg.lu_solve(*torch.linalg.lu_factor(torch.eye(3) + 1), w * x)),
        normal(2),
        normal(N, 3, 2),
    ),
    "lu_solve of a constant matrix, in the old order": lambda: (
        lambda w, x: score(torch.lu_solve(w * x, *torch.linalg.lu_factor(torch.eye(3) + 1))),
        normal(2),
        normal(N, 3, 2),
    ),
}


@pytest.mark.filterwarnings("ignore:torch.lu_solve is deprecated")
@pytest.mark.parametrize("name", DECLINED)
def test_what_is_declined_equals_the_loop(name):
    fn, *args = DECLINED[name]()
    assert_agrees(Problem(fn, tuple(args)))


# Calls that torch refuses.
REFUSED = {
    "weight norm of complex numbers": lambda: (
        lambda w, x: score(torch._weight_norm(x, w)),
        normal(3, 1).to(torch.complex128),
        complex_normal(N, 3, 2),
    ),
    "instance_norm of one image": lambda: (lambda w, x: score(F.instance_norm(x, weight=w)), normal(3), normal(N, 3, 4)),
    "gaussian_nll_loss of a whole variance": lambda: (
        lambda w, x: F.gaussian_nll_loss(w * x, x, torch.ones(4, dtype=torch.int64)),
        normal(4),
        normal(N, 4),
    ),
    "attention of batches that do not fit": lambda: (
        lambda w, x: score(F.scaled_dot_product_attention((w * x).expand(2, 4, 3), x.expand(3, 4, 3), x.expand(3, 4, 3))),
        normal(3),
        normal(N, 4, 3),
    ),
    "attention of a mask that does not fit": lambda: (
        lambda w, x: score(F.scaled_dot_product_attention(w * x, x, x, attn_mask=torch.ones(4, 3))),
        normal(3),
        normal(N, 4, 3),
    ),
    **{
        f"causal attention with a mask, {lead}": lambda lead=lead: (
            lambda w, x: score(F.scaled_dot_product_attention(w * x, x, x, torch.ones(4, 4) > 0, is_causal=True)),
            normal(3),
            normal(N, *lead, 4, 3),
        )
        for lead in ((), (2,), (1, 2, 2))
    },
    "cross_entropy smoothed by more than 1": lambda: (
        lambda w, x: F.cross_entropy(w * x, torch.tensor([0, 2]), torch.ones(3), label_smoothing=1.5),
        normal(3),
        normal(N, 2, 3),
    ),
    "conv1d of four dimensions": lambda: (lambda w, x: score(F.conv1d(x, w)), normal(2, 3, 2), normal(N, 1, 1, 3, 5)),
    "conv_transpose1d of four dimensions": lambda: (lambda w, x: score(F.conv_transpose1d(x, w)), normal(3, 2, 2), normal(N, 1, 1, 3, 5)),
    "ctc_loss of another reduction": lambda: (
        lambda w, x: F.ctc_loss((w * x).log_softmax(-1), torch.ones(1, 2).long(), [4], [2], reduction="max"),
        normal(5),
        normal(N, 4, 1, 5),
    ),
    "ctc_loss of a tensor of lengths and a list": lambda: (
        lambda w, x: F.ctc_loss((w * x).log_softmax(-1), torch.ones(1, 2).long(), torch.tensor([4]), [2]),
        normal(5),
        normal(N, 4, 1, 5),
    ),
    "ctc_loss of too few lengths": lambda: (
        lambda w, x: F.ctc_loss((w * x).log_softmax(-1), torch.ones(2, 2).long(), [4], [2]),
        normal(5),
        normal(N, 4, 2, 5),
    ),
    "ctc_loss of one list of targets of another length": lambda: (
        lambda w, x: F.ctc_loss((w * x).log_softmax(-1), torch.ones(3).long(), torch.tensor(4), torch.tensor(2)),
        normal(5),
        normal(N, 4, 5),
    ),
    "batch_norm by statistics that depend on a parameter": lambda: (
        lambda w, x: score(F.batch_norm(x, F.linear(x, w["mix"]).mean(0), torch.ones(4), w["scale"])),
        {"mix": normal(4, 4), "scale": normal(4)},
        normal(N, 2, 4),
    ),
    "batch_norm with one weight for all channels": lambda: (
        lambda w, x: score(F.batch_norm(x, torch.zeros(4), torch.ones(4), w)),
        normal(1),
        normal(N, 2, 4),
    ),
    "conv1d of 'same' padding with a stride": lambda: (
        lambda w, x: score(F.conv1d(x, w, stride=2, padding="same")),
        normal(2, 3, 2),
        normal(N, 3, 5),
    ),
    "cross_entropy of too many targets": lambda: (lambda w, x, y: F.cross_entropy(w * x, y), normal(5), normal(N, 2, 5), ids(5, N, 3)),
    "einsum of too few operands": lambda: (lambda w, x: score(torch.einsum("ti,io,o->to", x, w)), normal(3, 4), normal(N, 2, 3)),
    "einsum of too few labels": lambda: (lambda w, x: score(torch.einsum("i,io->o", x, w)), normal(3, 4), normal(N, 2, 3)),
    "embedding_bag of ids without bags": lambda: (lambda w, x: score(F.embedding_bag(x, w)), normal(5, 3), ids(5, N, 4)),
    "embedding_bag of weights of another shape": lambda: (
        lambda w, x: score(F.embedding_bag(x, w, mode="sum", per_sample_weights=torch.ones(2, 3))),
        normal(5, 3),
        ids(5, N, 2, 4),
    ),
    "embedding_bag of a padding that is no row": lambda: (
        lambda w, x: score(F.embedding_bag(x, w, padding_idx=7)),
        normal(5, 3),
        ids(5, N, 2, 4),
    ),
    "gaussian_nll_loss of another reduction": lambda: (
        lambda w, x: F.gaussian_nll_loss(w * x, x, torch.ones(4), reduction="max"),
        normal(4),
        normal(N, 4),
    ),
    "group_norm of one value a group": lambda: (lambda w, x: score(F.group_norm(x, 4, w)), normal(4), normal(N, 1, 4)),
    "index_add of a source that does not fit": lambda: (
        lambda w, x, i: score(torch.index_add(w * x, 0, i, x[:2, :2])),
        normal(3),
        normal(N, 4, 3),
        ids(4, N, 2),
    ),
    "index_add along a name": lambda: (
        lambda w, x, i: score(torch.index_add(w * x, "rows", i, x[:2])),
        normal(3),
        normal(N, 4, 3),
        ids(4, N, 2),
    ),
    "index_add of an index below zero": lambda: (
        lambda w, x, i: score(torch.index_add(w * x, 0, i, x[:2])),
        normal(3),
        normal(N, 4, 3),
        torch.cat([ids(4, 1, 2), -1 - ids(4, N - 1, 2)]),
    ),
    "index_add out of range": lambda: (
        lambda w, x, i: score(torch.index_add(w * x, 0, i, x[:2])),
        normal(3),
        normal(N, 4, 3),
        4 + ids(4, N, 2),
    ),
    "instance_norm of one value a channel": lambda: (lambda w, x: score(F.instance_norm(x, weight=w)), normal(4), normal(N, 2, 4, 1)),
    "kl_div of another reduction": lambda: (lambda w, x: F.kl_div(w * x, x, reduction="max"), normal(4), normal(N, 4)),
    "matmul of a number": lambda: (lambda w, x: (w @ x).sum(), normal(3, 3), normal(N)),
    "addmm of a bias that does not fit": lambda: (
        lambda w, x: score(torch.addmm(torch.ones(5), x, w)),
        normal(3, 4),
        normal(N, 2, 3),
    ),
    "bilinear of data of different shapes": lambda: (
        lambda w, x: score(torch.bilinear(x, x[0], w, None)),
        normal(4, 3, 3),
        normal(N, 2, 3),
    ),
    "bilinear of other features": lambda: (lambda w, x: score(torch.bilinear(x, x, w, None)), normal(4, 3, 5), normal(N, 2, 3)),
    "multi_margin_loss of too many targets": lambda: (
        lambda w, x, y: F.multi_margin_loss(w * x, y),
        normal(5),
        normal(N, 2, 5),
        ids(5, N, 3),
    ),
    "multilabel_margin_loss of fewer targets": lambda: (
        lambda w, x, y: F.multilabel_margin_loss(w * x, y),
        normal(5),
        normal(N, 2, 5),
        ids(5, N, 2, 4),
    ),
    "prelu of rows, a slope for each entry": lambda: (
        lambda w, x: score(vmap(grad(lambda x: score(F.prelu(x, w))))(x)),
        normal(3),
        normal(N, 2, 3),
    ),
    "prelu with a matrix of slopes": lambda: (
        lambda w, x: score(vmap(grad(lambda x: score(F.prelu(x[None], w))))(x)),
        normal(3, 1),
        normal(N, 2, 3),
    ),
    "put of too few": lambda: (lambda w, x: score((w * x).put(torch.tensor([0, 1]), w[:1])), normal(3), normal(N, 2, 3)),
    "take by integers of 32 bits": lambda: (
        lambda w, x: score((w * x).take(torch.tensor([0], dtype=torch.int32))),
        normal(3),
        normal(N, 2, 3),
    ),
    "quantile of a share above 1": lambda: (lambda w, x: torch.quantile(w * x, 1.5), normal(4), normal(N, 4)),
    "quantile of an interpolation that there is not": lambda: (
        lambda w, x: torch.quantile(w * x, 0.5, interpolation="mean"),
        normal(4),
        normal(N, 4),
    ),
    "renorm of a negative norm": lambda: (lambda w, x: score((w * x).renorm(2, 0, -1.0)), normal(3), normal(N, 4, 3)),
    "soft_margin_loss of integers": lambda: (
        lambda w, y: (w * F.soft_margin_loss(y, y, reduction="none")).sum(),
        normal(4),
        ids(2, N, 4),
    ),
    "tensordot of lists of different lengths": lambda: (
        lambda w, x: score(torch.tensordot(x, w, dims=([0, 1], [0]))),
        normal(3, 4),
        normal(N, 2, 3),
    ),
    "tensordot of too many dimensions": lambda: (lambda w, x: score(torch.tensordot(x, w, dims=3)), normal(3, 4), normal(N, 2, 3)),
    "tensordot of a dimension twice": lambda: (
        lambda w, x: score(torch.tensordot(x, w, dims=([1, 1], [0, 0]))),
        normal(3, 4),
        normal(N, 2, 3),
    ),
    "lstm of weights that do not fit": lambda: (
        lambda w, x: score(torch.rnn_tanh_cell(x, x, w, w)),
        normal(4, 3),
        normal(N, 2, 3),
    ),
    "batch_norm without statistics": lambda: (lambda w, x: score(F.batch_norm(x, None, None, w)), normal(3), normal(N, 1, 3)),
    "batch_norm, complex": lambda: (
        lambda w, x: score(F.batch_norm(x, torch.zeros(3), torch.ones(3), w)),
        complex_normal(3),
        complex_normal(N, 1, 3),
    ),
    "group_norm, complex": lambda: (lambda w, x: score(F.group_norm(x, 2, w)), complex_normal(2), complex_normal(N, 1, 2, 3)),
    "layer_norm, complex": lambda: (lambda w, x: score(F.layer_norm(x, (3,), w)), complex_normal(3), complex_normal(N, 3)),
    "derivative of layer_norm of another shape": lambda: (lambda w, x: w * slope(F.layer_norm, x, (4,)), normal(), normal(N, 2, 3)),
    "derivative of instance_norm of one pixel": lambda: (
        lambda w, x: slope(F.instance_norm, x, weight=w),
        normal(2),
        normal(N, 1, 2, 1),
    ),
    "derivative of einsum of too few labels": lambda: (
        lambda w, x: slope(lambda x: torch.einsum("tij,io->to", x, w), x),
        normal(3, 4),
        normal(N, 2, 3),
    ),
    "einsum of a number": lambda: (lambda w, x: score(torch.einsum(5, x, w)), normal(3, 4), normal(N, 2, 3)),
    "dot of three": lambda: (lambda w, x: torch.dot(w, x, 3), normal(3), normal(N, 3)),
    "mm of a stack of matrices, differentiated": lambda: (lambda w, x: slope(torch.mm, x, w), normal(3, 4), normal(N, 2, 2, 3)),
    "mv of a matrix, differentiated": lambda: (lambda w, x: slope(lambda x: torch.mv(w, x), x), normal(4, 3), normal(N, 2, 3)),
    "mm with an option that there is not": lambda: (lambda w, x: score(torch.mm(x, w, scale=2)), normal(3, 4), normal(N, 2, 3)),
    "index_add of no source": lambda: (lambda w, x: score(torch.index_add(w * x, 0, torch.tensor([0]))), normal(3), normal(N, 2, 3)),
    "quantile of a share of another dtype": lambda: (
        lambda w, x: torch.quantile(w * x, torch.ones(1, dtype=torch.float32)).sum(),
        normal(4).double(),
        normal(N, 4).double(),
    ),
    "rnn of weights that do not fit": lambda: (lambda w, x: score(rnn(x, [w, w])), normal(3, 3), normal(N, 5, 1, 4)),
    "rnn of too many weights": lambda: (lambda w, x: score(rnn(x, [w, w, w])), normal(4, 4), normal(N, 5, 1, 4)),
    "rnn of a state that does not fit": lambda: (
        lambda w, x: score(rnn(x, [w, w], torch.zeros(1, 1, 3))),
        normal(4, 4),
        normal(N, 5, 1, 4),
    ),
    "rnn of a state of another dtype": lambda: (
        lambda w, x: score(rnn(x, [w, w], torch.zeros(1, 1, 4, dtype=torch.float16))),
        normal(4, 4),
        normal(N, 5, 1, 4),
    ),
    **{
        f"pack_padded_sequence of lengths {lengths}": lambda lengths=lengths: (
            lambda w, x: score(torch._VF._pack_padded_sequence(w * x, torch.tensor(lengths), False)[0]),
            normal(3),
            normal(N, 4, 3, 3),
        )
        for lengths in ([3, 1, 2], [5, 1, 1], [2, 1, 0], [2, 1])
    },
    "pad_packed_sequence to too few steps": lambda: (
        lambda w, x: score(torch._VF._pad_packed_sequence(w * x, torch.tensor([2, 2]), False, 0.0, 1)[0]),
        normal(3),
        normal(N, 4, 3),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_declined_is_torch_s_error(name):
    fn, *args = REFUSED[name]()
    with pytest.raises(Exception) as refused:
        loop_grad(fn)(*args)
    with pytest.raises(type(refused.value), match=f"^{re.escape(str(refused.value))}"):
        psg.per_sample_grad(fn)(*args)


@pytest.mark.parametrize("dim", [2, -3])
def test_index_add_beyond_the_dimensions_is_torch_s_error_under_vmap(dim):
    """It was Python's own, of a list that the decomposition makes."""
    fn = lambda w, x, i: score(torch.index_add(w * x, dim, i, x[:2]))  # noqa: E731
    with pytest.raises(IndexError, match="Dimension out of range"):
        psg.per_sample_grad(fn, method="vmap")(normal(3), normal(N, 4, 3), ids(4, N, 2))


def test_a_recurrent_op_called_by_keywords_goes_down_the_ladder():
    names = ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
    options = dict(zip(names, (False, 2, 0.0, False, False, False), strict=True))

    def fn(w, x):
        return score(torch.rnn_tanh(input=x, hx=torch.zeros(2, 1, 4), params=[w] * 4, **options)[0])

    args = normal(4, 4), normal(N, 5, 1, 4)
    with pytest.warns(psg.FallbackWarning):
        assert_trees_close(psg.per_sample_grad(fn)(*args), loop_grad(fn)(*args))


# Functions of a whole batch with an op whose data cannot be split into rows, after the error; no error if a decomposition runs.
BATCHED = {
    "embedding by frequency": lambda: (
        "w reaches embedding at .* with scale_grad_by_freq=True, which counts the ids of the whole batch",
        lambda w, x: F.embedding(x, w, scale_grad_by_freq=True).sin().sum((1, 2)),
        normal(5, 3),
        ids(5, N, 4),
    ),
    "embedding_bag of a bag that ends before it starts": lambda: (
        "w reaches the losses by an op that no function mode sees",
        lambda w, x: F.embedding_bag(x.flatten(), w, torch.tensor([0, 4, 3])).sin().sum(1),
        normal(5, 3),
        ids(5, N, 4),
    ),
    "product with complex numbers": lambda: (
        None,
        lambda w, x: (w * x).abs().sum(1),
        complex_normal(3),
        normal(N, 3),
    ),
    "product that has more dimensions than the data": lambda: (
        None,
        lambda w, x: (w * x).sin().sum((0, 2)),
        normal(2, 1, 3),
        normal(N, 3),
    ),
    "attention to what is before": lambda: (
        "",
        lambda w, x: F.scaled_dot_product_attention(x, w, w, is_causal=True).sin().sum((1, 2)),
        normal(4, 3),
        normal(N, 4, 3),
    ),
    "mm of a stack of matrices": lambda: (
        "w reaches mm .* for which this method has no rule that fits",
        lambda w, x: torch.mm(x, w).sin().sum((1, 2)),
        normal(3, 4),
        normal(N, 2, 3),
    ),
}


@pytest.mark.parametrize("name", BATCHED)
def test_rows_that_cannot_be_told(name):
    message, fn, *args = BATCHED[name]()
    if not message:
        psg.check(fn, method="batch")(*args)
        return
    with pytest.raises((psg.InputError, psg.StateError), match=message):
        psg.per_sample_grad(fn, method="batch")(*args)
