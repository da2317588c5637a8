"""Counts the kernels, operations and bytes that each method needs on an accelerator, without having one, and a lower bound of the time.

    python benchmarks/roofline.py --workloads resnet18,vit_b16,gpt2 --precision tf32 --out results/roofline_h100_tf32.json

The model runs on a pretended device, on tensors that have shapes and no values. Every op counts as one kernel that takes as long as the
slowest of its arithmetic, its bytes (inputs read once, outputs written once) and its launch, at the published figures of one H100 (SXM).
So one can estimate what a better plan would save before measuring it. The model ignores how well a kernel is written, what one op leaves
in cache for the next, fused attention (written out here, for all methods alike), and what a compiler would fuse.

An op that mixes devices fails, as on a real device. Reading a tensor's value in Python, which on a real device waits for it, fails too.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from methods import METHODS
from run import write
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from workloads import Workload, build

from psg._torch import _functorch
from psg.factors import _arithmetic

aten = torch.ops.aten

PEAK = {"float32": 67e12, "tf32": 495e12, "bfloat16": 989e12}  # operations a second
BANDWIDTH = 3.35e12  # bytes a second
LAUNCH = 2e-6  # seconds
SAMPLES = {"resnet18": 256, "vit_b16": 64, "gpt2": 32, "gpt2_tied": 32, "embedding_million": 256}

# No kernel runs for these.
FREE = {aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="resnet18,vit_b16,gpt2,gpt2_tied,embedding_million")
    parser.add_argument("--methods", default="plain,psg_clip,psg_norm", help="methods of methods.py; ratios are to the first of them")
    parser.add_argument("--precision", default="tf32", choices=PEAK)
    parser.add_argument("--ops", type=int, default=0, help="list this many of the ops that take longer than in the first method")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.device, args.repeats, args.threads, args.tf32 = "cpu", 1, 1, args.precision == "tf32"
    args.dtype = "bfloat16" if args.precision == "bfloat16" else "float32"
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = args.tf32  # psg's cost model asks
    _functorch.is_traced = lambda: False  # the counting mode is no tracer: run as in an ordinary call
    device = pretend()
    rows = []
    for name in args.workloads.split(","):
        counts: dict[str, Count] = {}
        for method in args.methods.split(","):
            found = counts[method] = count(name, method, device, getattr(torch, args.dtype), args.precision)
            first = next(iter(counts.values()))
            row = found.summary(first)
            rows.append({"workload": name, "method": method, **row})
            sizes = "{kernels:6d} kernels {gflop:9.0f} GFLOP {gbytes:8.1f} GB".format(**row)
            print(f"{name:>18} {method:<12} {sizes}  at least {row['ms']:8.2f} ms  x{row['ratio']:.2f}")
            for op, seconds in (found.seconds - first.seconds).most_common(args.ops):
                more = (found.bytes - first.bytes)[op] / 1e9
                print(f"{op:>36} {found.kernels[op]:6d} kernels  +{more:.1f} GB  +{1e3 * seconds:.2f} ms")
    write(args, device="H100 (SXM), by published figures, counted not measured", dtype=args.precision, results=rows)


def pretend() -> torch.device:
    """Register a pretended device, for tensors without values."""
    backend_registration._setup_privateuseone_for_python_backend("pretended")
    _arithmetic.WIDENING.add("pretended")
    return torch.device("pretended:0")


def count(workload: str, method: str, device: torch.device, dtype: torch.dtype, precision: str) -> Count:
    """Counts of one call of a method, with model and batch already on the device."""
    real = build(workload, "cpu", dtype, max_samples=2 if workload in SAMPLES else None)
    with FakeTensorMode():
        call = METHODS[method].prepare(moved(real, device, SAMPLES.get(workload)), 1.0)
        with Count(precision) as counted:
            call()
    return counted


def moved(workload: Workload, device: torch.device, samples: int | None) -> Workload:
    """The workload on a device, without its values, with `samples` samples if given."""
    made: dict[Tensor, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if tensor not in made:
            other = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            made[tensor] = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
        return made[tensor]

    for module in workload.model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: move(tensor) for name, tensor in held.items() if tensor is not None})
    batch = tuple(torch.empty((samples or len(x), *x.shape[1:]), dtype=x.dtype, device=device) for x in workload.batch)
    return Workload(workload.model, workload.criterion, batch)


class Count(TorchDispatchMode):
    """Counts kernels, operations, bytes, and the least seconds, by op."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision
        self.kernels: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "prim" or func.is_view or func.overloadpacket in FREE:
            return output
        flops = operations(func, args, kwargs or {}, output)
        count = distinct(tree_leaves((args, kwargs))) + distinct(tree_leaves(output))
        name = func.overloadpacket.__name__
        self.kernels[name] += 1
        self.flops[name] += flops
        self.bytes[name] += count
        self.seconds[name] += max(flops and flops / self.peak(func, args), count / BANDWIDTH, LAUNCH)
        return output

    def peak(self, func: Any, args: Any) -> float:
        """Operations a second. Beside bfloat16, float32 runs as torch's defaults have it: convolutions in TF32, products not."""
        dtype = next(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        if self.precision != "bfloat16" or dtype == torch.bfloat16:
            return PEAK[self.precision]
        return PEAK["tf32" if "convolution" in func.overloadpacket.__name__ else "float32"]

    def summary(self, first: Count) -> dict[str, Any]:
        """One row of the results."""
        return {
            "kernels": self.kernels.total(),
            "gflop": self.flops.total() / 1e9,
            "gbytes": self.bytes.total() / 1e9,
            "ms": 1e3 * self.seconds.total(),
            "ratio": self.seconds.total() / first.seconds.total(),
        }


def distinct(leaves: list[Any]) -> int:
    """Bytes of all tensors, counting each storage and each expanded dimension once."""
    sizes: dict[int, int] = {}
    for tensor in leaves:
        if isinstance(tensor, Tensor):
            entries = math.prod(length if stride else 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
            memory = tensor.untyped_storage()._cdata
            sizes[memory] = max(sizes.get(memory, 0), entries * tensor.element_size())
    return sum(sizes.values())


def operations(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Floating-point operations of matrix products and convolutions."""
    if func is aten.convolution.default:
        return 2 * output.numel() * args[1].shape[1:].numel()
    if func is aten.convolution_backward.default:
        return 2 * args[0].numel() * args[2].shape[1:].numel() * sum(args[10][:2])
    if func is aten.bmm.dtype:
        args = args[:2]  # the formula does not take the third argument, the dtype of the result
    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=output) if formula else 0


if __name__ == "__main__":
    main()
