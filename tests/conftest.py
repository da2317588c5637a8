"""Options, seeds and hypothesis profiles for every test.

`--device` and `--dtype` run the same tests elsewhere; tolerances follow the dtype (`psg.testing.default_rtol`).
`--hypothesis-profile=thorough` draws more examples.
"""

import gc
import sys
import zlib

import hypothesis
import pytest
import torch
from seeding import seed

from psg import _errors
from psg._capture import _lifted
from psg._hardware import _machine
from psg.rules import loss, products

torch.set_num_threads(1)

_quiet = [hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=_quiet)
hypothesis.settings.register_profile("thorough", max_examples=300, deadline=None, suppress_health_check=_quiet)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device of every tensor in the tests")
    parser.addoption("--dtype", default="float64", help="default dtype of the tests")


# Warnings are errors; these are torch's own remarks on how it runs something, not on what psg does.
TORCH_REMARKS = [
    "There is a performance drop",  # vmap runs this op sample by sample
    "Using padding='same' with even kernel",  # the input is copied once more
    "LSTM with projections is not supported with oneDNN",  # another kernel runs it
    "RNN module weights are not part of single contiguous chunk",  # cuDNN copies them in every call
    "`torch.jit.script_method` is deprecated",  # torch's inductor still uses it
    "`torch.jit.script` is deprecated",  # torch.func.jvp scripts its decompositions
    "TensorFloat32 tensor cores for float32 matrix multiplication available",  # a remark of torch's inductor on speed
    "\\s*Online softmax is disabled on the fly",  # another one
    "`torch._prims_common.check` is deprecated",  # torch's own lowerings still use it
    "Attempting to run cuBLAS, but there was no current CUDA context",  # in a thread of autograd's own; torch makes one
    "Attempted to insert a get_attr Node",  # torch.func.linearize folds constants in the graph that it traces
]

# psg's own warning about a function that uses none of its parameters, as some cases do on purpose.
OWN_REMARK = ".* fn uses none of the tensors that it is differentiated for"


def pytest_configure(config):
    for remark in (*TORCH_REMARKS, OWN_REMARK):
        config.addinivalue_line("filterwarnings", f"ignore:{remark}")
    # The tests compare algorithms, and TensorFloat-32 would hide their differences behind its rounding.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


# Each of these files takes as long as thousands of other tests: they go first, so that no worker starts one at the very end.
LONG = {"test_docs", "test_benchmarks", "test_pretended_device"}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Garbage collections need not visit what stays (modules, tests, caches of torch's), which took a twentieth of the time of a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _defaults(request):
    """Each test starts from one seed and the chosen dtype; doctests, outside this folder, keep torch's own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, request.config.getoption("--dtype")))
    seed()
    _errors.warned.clear()  # psg warns once for a function and a reason: each test must see its own warning
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _size(request, monkeypatch):
    """Three tests in four take the code paths of large problems, the others those of small ones."""
    if zlib.crc32(request.node.nodeid.encode()) % 4:
        as_large(monkeypatch)


def as_large(monkeypatch):
    """As if calling an op cost nothing, and no parameter were small."""
    monkeypatch.setattr(_machine, "MANY_BYTES", 0)
    monkeypatch.setattr(_machine, "op_call", lambda device: 0)
    monkeypatch.setattr(_lifted, "_FEW_BYTES", 0)
    monkeypatch.setattr(products, "_SMALL_GRADIENTS", 0)
    monkeypatch.setattr(loss, "_MANY_LOGITS", 0)


@pytest.fixture
def hasty_threads():
    """Threads switch after a few lines, so that races on shared state show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
