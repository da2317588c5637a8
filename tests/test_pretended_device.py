"""What can be said of accelerators without one: no tensor on another device, no question to the host, few kernels for a whole tree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found():
    script = Path(__file__).with_name("pretended_device.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_transforms_stay_on_the_device(found):
    assert found["asks"] and found["transforms"]
    assert all(devices == ["pretended:0"] for devices in found["transforms"].values())


@pytest.mark.parametrize("function", ["norm", "weighted_sum", "add_noise"])
def test_kernels_do_not_grow_with_the_leaves(found, function):
    ten, hundred = found["kernels"][function]
    assert ten == hundred <= 4


@pytest.mark.parametrize("plan", ["gram", "chunks"])
def test_products_of_16_bits_are_added_up_in_32_without_widened_copies(found, plan):
    assert found["halves"][plan]["bmm"] and "_to_copy" not in found["halves"][plan]
