"""Runs psg on a pretended device for tests/test_pretended_device.py, and prints the findings as JSON.

Tensors have shapes, dtypes and a device, but no values. An op that mixes devices raises, and so does reading a value, for which the host
would have to wait for a real device. torch registers a pretended device for the whole process, so this script has its own process.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import CASES
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import psg
from psg._torch import _functorch
from psg._trees import flatten

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import roofline

N = 4


class Net(nn.Module):
    """All kinds of factors: convolution, embedding, matrix products with and without positions, small dense ones, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.group = nn.GroupNorm(2, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, ids):
        x = self.norm(self.tokens(ids))
        x = self.group(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = self.lstm(x)[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x).mean(1) @ self.tokens.weight.T


def transforms(device: torch.device) -> dict[str, list[str]]:
    """The devices of the results of every transform."""
    workload = roofline.moved(roofline.Workload(Net(), F.cross_entropy, (torch.zeros(N, 5).long(), torch.zeros(N).long())), device, N)
    loss, params = psg.stateless(workload.model, workload.criterion)
    mask, each = torch.empty(N, dtype=torch.bool, device=device), psg.clipping.PerLeaf(1.0)
    found = {}
    for method in ("capture", "vmap", "loop"):
        options = {"method": method}
        found |= {
            f"per_sample_grad {method}": psg.per_sample_grad(loss, **options)(params, *workload.batch),
            f"per_sample_norm {method}": psg.per_sample_norm(loss, **options)(params, *workload.batch),
            f"clipped_grad {method}": psg.clipped_grad(loss, 1.0, **options)(params, *workload.batch, mask=mask),
            f"clipped_grad per leaf, in chunks {method}": psg.clipped_grad(loss, each, chunk_size=3, **options)(params, *workload.batch),
        }
    g = psg.factored_grad(loss, method="capture")(params, *workload.batch)
    found["gram"], found["dot"] = psg.tree.gram(g), psg.tree.dot(g, params)
    found["moments"], found["project"] = psg.tree.moments(g), psg.tree.project(g, 8)
    return {name: sorted({str(leaf.device) for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)}) for name, tree in found.items()}


def cases(device: torch.device) -> dict[str, str]:
    """The errors that the table's cases raise when they run by capture, by name."""
    errors = {}
    for case in CASES:
        if case.not_capture:
            continue
        try:
            problem = case.build(device)
            g = psg.factored_grad(problem.fn, method="capture", **problem.options)(*problem.args, **problem.shared)
            psg.tree.clip(g, 1.0)
            psg.tree.materialize(g)
        except Exception as error:  # of any kind: the test knows which do not matter
            errors[case.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return errors


def memory_of(tensor: torch.Tensor) -> int:
    """A replacement of `_functorch.memory_of` for tensors that have no address."""
    while _functorch.is_wrapped(tensor):
        tensor = _functorch.value_of(tensor)
    return tensor.untyped_storage()._cdata


def asks(device: torch.device) -> bool:
    """Whether reading a value on the host raises: these tests rely on it."""
    try:
        torch.empty(2, device=device).sum().item()
    except RuntimeError:
        return True
    return False


def kernels(device: torch.device) -> dict[str, list[int]]:
    """How many kernels each tree function starts for gradients of ten leaves, and of a hundred."""
    counts: dict[str, list[int]] = {}
    for leaves in (10, 100):
        tree = [psg.factors.Dense(torch.empty(N, 16, device=device)) for _ in range(leaves)]
        summed, weights = [torch.empty(16, device=device) for _ in range(leaves)], torch.empty(N, device=device)
        calls = {
            "norm": lambda tree=tree: psg.tree.norm(tree),
            "weighted_sum": lambda tree=tree, weights=weights: psg.tree.weighted_sum(tree, weights),
            "mean": lambda tree=tree: psg.tree.mean(tree),
            "moments": lambda tree=tree: psg.tree.moments(tree),
            "add_noise": lambda summed=summed: psg.tree.add_noise(summed, 1.0),
        }
        for name, call in calls.items():
            with roofline.Count("float32") as count:
                call()
            counts.setdefault(name, []).append(count.kernels.total())
    return counts


def halves(device: torch.device) -> dict[str, dict[str, int]]:
    """The kernels that a norm of a 16-bit gradient starts, by plan and op."""
    factor = psg.factors.Outer(*(torch.empty(3, 5, size, device=device, dtype=torch.bfloat16) for size in (7, 4)))
    found = {}
    for plan in ("gram", "chunks"):
        with psg.plans.using(norm=plan), roofline.Count("float32") as count:
            assert factor.norm().dtype == torch.float32
        found[plan] = dict(count.kernels)
    return found


if __name__ == "__main__":
    _functorch.is_traced = lambda: False  # as in an ordinary call: the modes that pretend and count are no tracers
    _functorch.memory_of = memory_of
    pretended = roofline.pretend()
    with FakeTensorMode():
        print(json.dumps({ask.__name__: ask(pretended) for ask in (asks, transforms, cases, kernels, halves)}))
