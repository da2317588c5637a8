"""Same inputs and seed, same bits; and torch.use_deterministic_algorithms is respected."""

import ast
from pathlib import Path

import pytest
import torch
from cases import CASES, each_case
from torch.utils._pytree import tree_leaves

import psg

MODELS = {
    *("linear 2-D", "conv2d groups", "conv2d of two images", "embedding padding_idx", "layer_norm", "multihead attention"),
    *("transformer encoder layer", "convnet with cross entropy", "tied embedding and head", "gru", "lstm with a projection"),
    *("module used three times", "mixture of experts", "embedding_bag", "data dependent branch", "item of a sample"),
}  # fmt: skip


def results(problem):
    """The results of the five transforms and of the tree functions, from one seed."""
    torch.manual_seed(1)
    fn, args, shared, options = problem
    has_aux = options.get("has_aux")
    out = [
        psg.per_sample_grad(fn, **options)(*args, **shared),
        psg.per_sample_value_and_grad(fn, **options)(*args, **shared),
        psg.per_sample_norm(fn, **options)(*args, **shared),
        psg.clipped_grad(fn, 0.5, **options)(*args, **shared),
    ]
    factored = psg.factored_grad(fn, **options)(*args, **shared)
    factored = factored[0] if has_aux else factored
    out += [factored, psg.tree.norm(factored), psg.tree.sum(factored), psg.tree.gram(factored)]
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()) and ours.dtype == theirs.dtype


@pytest.fixture(params=[1, 4])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _ordered(device):
    """On accelerators torch adds at repeated indices, and takes gradients of convolutions, in any order unless it is told otherwise."""
    torch.use_deterministic_algorithms(device.type != "cpu")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.usefixtures("_threads", "_ordered")
@each_case(lambda case: case.name in MODELS)
def test_the_same_bits_every_time(case, device):
    problem = case.build(device)
    expected = results(problem)
    for _ in range(3):
        assert_same_bits(results(problem), expected)


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.usefixtures("_threads", "_ordered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_of_a_large_model(dtype, device):
    """Large enough for kernels to split their work among threads."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.GroupNorm(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2)),
        *(torch.nn.AvgPool2d(3), torch.nn.Flatten(), torch.nn.Linear(1024, 256), torch.nn.GELU(), torch.nn.Linear(256, 10)),
    ).to(device, dtype)
    loss, params = psg.stateless(model, torch.nn.functional.cross_entropy)
    batch = torch.randn(32, 3, 24, 24, device=device, dtype=dtype), torch.randint(10, (32,), device=device)
    problem = (loss, (params, *batch), {}, {})
    expected = results(problem)
    assert_same_bits(results(problem), expected)
    torch.manual_seed(2)
    assert not torch.equal(psg.per_sample_norm(loss)(params, *batch), psg.per_sample_norm(loss)(params, *batch))  # dropout draws anew


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
def test_the_same_bits_under_autograd(device):
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Flatten(), torch.nn.Linear(40, 3)).to(device)
    loss, params = psg.stateless(model, torch.nn.functional.cross_entropy)
    x, y = torch.randint(50, (16, 5), device=device), torch.randint(3, (16,), device=device)

    def slopes():
        own = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
        return torch.autograd.grad(psg.per_sample_norm(loss)(own, x, y).sum(), list(own.values()))

    assert_same_bits(slopes(), slopes())


@pytest.mark.filterwarnings("ignore::psg.FallbackWarning")
@pytest.mark.usefixtures("_deterministic")
@each_case(lambda case: case.name in MODELS)
def test_deterministic_algorithms(case, device):
    problem = case.build(device)
    expected = results(problem)
    assert_same_bits(results(problem), expected)


def test_the_models_are_there():
    assert {case.name for case in CASES} >= MODELS


# Under use_deterministic_algorithms torch adds at repeated indices in a deterministic way. For these ops it cannot on a GPU, and raises.
RAISES = {"bincount", "histc", "put_", "kthvalue", "median", "scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_"}


def test_no_op_of_psg_s_own_raises_on_a_gpu_under_deterministic_algorithms():
    called = {
        (node.func.attr, path.name)
        for path in Path(psg.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in RAISES
    }
    # Without weights, bincount counts in integers, which is exact in any order. What fn itself calls raises anyway.
    assert called == {
        ("bincount", "_division.py"),
        ("bincount", "_owners.py"),
        *((op, "repairs.py") for op in ("scatter_reduce", "index_reduce")),
    }
