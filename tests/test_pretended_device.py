"""What can be tested of accelerators without one: no tensor on another device, no value read on the host, few kernels for a tree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOT_HERE = {
    "branch on a parameter": "fn asks for a value",
    "data dependent branch": "fn asks for a value",
    "leak: covariance of a parameter": "torch.cov asks for a value",
    "leak: gaussian_nll_loss": "the loss asks whether a variance is negative",
    "derived: orthogonal parametrisation": "torch checks values when it is made",
    "derived: gather of rows": "torch.tensor needs a device that holds something",
    "embedding of shared ids": "torch.tensor needs a device that holds something",
    "leak: index_put and scatter with parameters": "torch.tensor needs a device that holds something",
    "memory format: strides": "torch.tensor needs a device that holds something",
    "batch_norm in evaluation mode": "torch.tensor needs a device that holds something",
    "channels_last module on a channels_last sample": "Module.to cannot move such parameters",
    "live parameters": "the generators' states, which are compared, are real",
    "batch that requires grad": "the generators' states, which are compared, are real",
    "laplacian inside fn": "autograd has no streams for such a device",
}
"""Cases that cannot run on a pretended device, for reasons that have nothing to do with psg."""


@pytest.fixture(scope="module")
def found():
    script = Path(__file__).with_name("pretended_device.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_transforms_stay_on_the_device(found):
    assert found["asks"] and found["transforms"]
    assert all(devices == ["pretended:0"] for devices in found["transforms"].values())


def test_cases_run_there(found):
    assert not {name: error for name, error in found["cases"].items() if name not in NOT_HERE}


@pytest.mark.parametrize("function, most", [("norm", 2), ("weighted_sum", 4), ("mean", 5), ("moments", 12), ("add_noise", 4)])
def test_kernels_do_not_grow_with_the_leaves(found, function, most):
    ten, hundred = found["kernels"][function]
    assert ten == hundred <= most


@pytest.mark.parametrize("plan", ["gram", "chunks"])
def test_products_of_16_bits_are_added_up_in_32_without_widened_copies(found, plan):
    assert found["halves"][plan]["bmm"] and "_to_copy" not in found["halves"][plan]
