"""Every differentiable op that PyTorch's own tests know, in every role of its tensors, compared with the loop.

A few of each op's problems run, the same at every run, one of a kind. All of them run with --hypothesis-profile=thorough, and by
`python -m sweeps.ops`, which prints a table.
"""

import zlib
from functools import cache

import pytest
import torch
from cases import Problem
from sweeps import ops
from sweeps.outcome import LEFT_OUT, REFUSED, TORCH, Outcome, settle

import psg
from psg.factors import Dense

PARTS = 16
# torch's warnings about unfinished and deprecated ops.
pytestmark = pytest.mark.filterwarnings("ignore:torch.qr is deprecated", "ignore:Sparse CSR tensor support is in beta state")

KINDS = 4  # the most kinds of problems (forms and roles) that run of an op

UPDATING = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
}
"""Training modes that update running statistics are refused on purpose; nothing else is."""

ONCE_WRONG = {
    "index_fill function 1 const.const.param": "vmap mixes the samples of a tensor value",
    "index_fill function 1 const.const.product": "vmap mixes the samples of a tensor value",
    "index_fill method 1 data.data.param": "vmap mixes the samples of a tensor value",
    "index_fill in place 1 data.data.param": "vmap mixes the samples of a tensor value",
    "roll function 16 product": "vmap rolls a scalar over the samples",
    "roll method 16 product": "vmap rolls a scalar over the samples",
    "addbmm in place 1 data.param.data": "vmap writes into a tensor that must be resized",
    "addbmm in place 1 product.product.product": "vmap writes into a tensor that must be resized",
    "select_scatter function 0 data.param": "a wrong batching rule of its backward",
    "select_scatter method 0 data.param": "a wrong batching rule of its backward",
    "as_strided in place 1 product": "as_strided_ reads past the sample",
    "as_strided_copy function 0 param": "a leaf made by expand has stride 0",
    "cdist function 30 param.param": "vmap(grad) drops a cross term",
    "native_batch_norm function 0 param.data.data.data.data": "running statistics in the caller's batch were updated",
    "_native_batch_norm_legit function 0 param.data.data.data.data": "running statistics in the caller's batch were updated",
    "nn.functional.batch_norm function 0 param.data.data.data.data": "running statistics in the caller's batch were updated",
    "nn.functional.instance_norm function 0 param.data.data.data.data": "running statistics in the caller's batch were updated",
    "nn.functional.linear_cross_entropy.chunked function 132 data.param.data.data": "it branches on requires_grad",
}


@cache
def _names() -> list[str]:
    pytest.importorskip("expecttest")
    return ops.names()


def _trials(name: str, thorough: bool) -> list:
    """All trials of an op; or at most KINDS of them, each of another kind, picked by a hash of their labels."""
    trials = list(ops.trials(name, torch.float64))
    if thorough:
        return trials
    picked: dict[str, tuple] = {}
    for trial in trials:
        kind = " ".join(word for word in trial.label.split() if not word.isdigit())
        rank = zlib.crc32(trial.label.encode())
        if kind not in picked or rank < picked[kind][0]:
            picked[kind] = (rank, trial)
    return [trial for _, trial in sorted(picked.values(), key=lambda pair: pair[0])[:KINDS]]


@pytest.mark.parametrize("part", range(PARTS))
def test_ops(part, request):
    thorough = request.config.getoption("--hypothesis-profile") == "thorough"
    names = [name for name in _names() if zlib.crc32(name.encode()) % PARTS == part]
    outcomes = {trial.label: trial.settle() for name in names for trial in _trials(name, thorough)}
    assert len(outcomes) > len(names)
    assert not {label: outcome for label, outcome in outcomes.items() if outcome.failed}
    assert {_op(label) for label, outcome in outcomes.items() if outcome.status == REFUSED} <= UPDATING
    assert not {label: outcome for label, outcome in outcomes.items() if outcome.status == TORCH}
    assert sum(outcome.status == LEFT_OUT for outcome in outcomes.values()) < len(outcomes) / 10  # the loop cannot run these either


def _op(label: str) -> str:
    return label.split()[0]


@pytest.mark.parametrize("label", ONCE_WRONG)
def test_once_wrong(label):
    if _op(label) not in _names():
        pytest.skip("torch's own list has this op from 2.13 on")
    (trial,) = (trial for trial in ops.trials(_op(label), torch.float64) if trial.label == label)
    outcome = trial.settle()
    assert outcome.status in ((REFUSED,) if _op(label) in UPDATING else ("capture", "vmap", "loop")), outcome


class _Doubled(torch.autograd.Function):
    """sin with twice its derivative, as a wrong kernel would have it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 2 * cotangent * x.cos()


@psg.primitive
def _sine(x, weight):
    return torch.sin(weight) * x


@psg.primitive
def _doubled_sine(x, weight):
    return _Doubled.apply(weight) * x


def _settled(op, slope) -> Outcome:
    psg.rule(op, params=("weight",))(
        lambda x, weight: (torch.sin(weight) * x, {"weight": lambda cotangent: Dense(slope * cotangent * x * weight.cos())})
    )
    return settle([Problem(lambda p, x: op(x, p).sum(), (torch.rand(4), torch.rand(3, 4)))])


def test_the_sweep_sees_a_wrong_gradient():
    assert _settled(_sine, 1).status == "capture"
    outcome = _settled(_sine, 2)
    assert outcome.failed and "finite differences: the loop" in outcome.reason


def test_the_sweep_sees_a_wrong_kernel_of_torch():
    assert _settled(_doubled_sine, 1).status == TORCH
    assert _settled(_doubled_sine, 3).failed
