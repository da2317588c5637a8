"""Models of `transformers`, unchanged, compared with the loop; `python -m sweeps.architectures` prints a table of them."""

import pytest
import torch
import torch.nn.functional as F
from sweeps import models
from sweeps.architectures import check
from torch.func import functional_call, grad_and_value, vmap

import psg
from psg.testing import assert_trees_close, loop_value_and_grad

pytest.importorskip("transformers")

TABLE = {architecture.name: architecture for architecture in models.architectures()}

BELOW_CAPTURE = {"Switch": "a parameter's data is set"}
"""All models that only the loop can run, and why: the test notices any change of this list."""

ROUTED = ["Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "Jamba"]
"""Models whose experts get a number of tokens that depends on the data: only samples that agree on these numbers need no loop."""

EXPERTS = ["Mixtral", "Qwen2-MoE"]


@pytest.mark.parametrize("name", TABLE)
def test_architecture(name):
    result = check(TABLE[name])
    assert not result.wrong, result.remark
    expected = {"loop"} if name in BELOW_CAPTURE else {"capture", "loop"} if name in ROUTED else {"capture"}
    assert result.rung in expected, result.reasons


@pytest.mark.parametrize("name", ["ELECTRA", "GPT-2", "XLNet", "T5", "BART eager", "DistilBERT"])
def test_dropout_draws_as_torchs_own_transforms_do(name):
    fn, params, batch = TABLE[name].build(trains=True)
    torch.manual_seed(0)
    values, grads = psg.per_sample_value_and_grad(fn, method="capture")(params, *batch)
    torch.manual_seed(0)
    in_dims = (None, *(0 for _ in batch))
    expected, expected_values = vmap(grad_and_value(fn), in_dims, randomness="different")(params, *batch)
    assert_trees_close(values, expected_values)
    assert_trees_close(grads, expected)
    assert not torch.equal(values, psg.per_sample_value_and_grad(fn)(params, *batch)[0])  # other numbers


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("n", [0, 1, 3])
def test_routing_by_data_in_one_batch(name, n):
    """A mixture of experts whose tokens are routed by data-dependent indices, over the whole batch at once."""
    model, (batch, labels) = TABLE[name].model_and_batch()

    def fn(params, ids, labels):
        logits = functional_call(model, params, (), {"input_ids": ids}).logits
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)

    def one(params, ids, labels):
        return fn(params, ids[None], labels[None])[0]

    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    batch = batch["input_ids"][:n], labels[:n]
    values, grads = psg.per_sample_value_and_grad(fn, method="batch")(params, *batch)
    expected_values, expected = loop_value_and_grad(one)(params, *batch)
    assert_trees_close(values, expected_values)
    assert_trees_close(grads, expected)
