"""Every module with parameters that PyTorch's own tests know, on every sample input, compared with the loop.

Of more than `SAMPLES` inputs of a module, a hash of their labels picks the same ones at every run. All of them run with
--hypothesis-profile=thorough, and by `python -m sweeps.modules`, which prints a table.
"""

import zlib
from functools import cache

import pytest
import torch
from sweeps import modules
from sweeps.outcome import REFUSED, RUNGS

PARTS = 4
SAMPLES = 64

BELOW_CAPTURE = {
    ("nn.BatchNorm1d train", REFUSED): "it updates its running statistics",
    ("nn.BatchNorm2d train", REFUSED): "it updates its running statistics",
    ("nn.BatchNorm3d train", REFUSED): "it updates its running statistics",
}
"""All modules that do not run on the first rung, and why: the test notices any change of this list."""


@cache
def _names() -> list[str]:
    pytest.importorskip("expecttest")
    return modules.names()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:dropout option adds dropout after all but last")
@pytest.mark.parametrize("part", range(PARTS))
def test_modules(part, request):
    thorough = request.config.getoption("--hypothesis-profile") == "thorough"
    names = [name for name in _names() if zlib.crc32(name.encode()) % PARTS == part]
    outcomes = {}
    for name in names:
        trials = sorted(modules.trials(name, torch.float64), key=lambda trial: zlib.crc32(trial.label.encode()))
        outcomes |= {trial.label: trial.settle() for trial in (trials if thorough else trials[:SAMPLES])}
    assert outcomes
    assert all(outcome.status in (*RUNGS, REFUSED) for outcome in outcomes.values()), _others(outcomes, RUNGS)
    below = {(label.rpartition(" ")[0], outcome.status) for label, outcome in outcomes.items() if outcome.status != "capture"}
    expected = {(module, status) for module, status in BELOW_CAPTURE if module.split()[0] in names}
    assert below == expected, _others(outcomes, ["capture"])


def _others(outcomes, statuses) -> dict:
    return {label: outcome for label, outcome in outcomes.items() if outcome.status not in statuses}
