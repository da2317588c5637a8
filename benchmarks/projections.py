"""Measures random projections and moments of per-sample gradients, from the batch to the result, as ratios to plain training.

    python benchmarks/projections.py --threads 4 --dims 512,4096 --out results/projections.json

psg is compared with methods that need every sample's gradient: `vmap(grad)`, then a product with a Gaussian matrix that is drawn block by
block from a fixed seed, as in TRAK's BasicProjector, or the mean square. psg's results are checked against those of materialised gradients
before anything is timed; times are medians of interleaved calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from methods import METHODS
from run import median_ms, options, set_up, write
from torch import Tensor
from workloads import Workload, build

import psg

BLOCK = 1 << 14  # rows of the Gaussian matrix that are drawn at a time


def main() -> None:
    parser = options(__doc__, workloads="mlp,cnn,vit,gpt,embedding", dims="512,4096", repeats=7, threads=4, device="cpu")
    parser.add_argument("--gaussian", type=int, default=512, help="the largest dimension that the (slow) Gaussian projection is timed for")
    args = parser.parse_args()
    set_up(args)
    rows = {name: measure(name, [int(dim) for dim in args.dims.split(",")], args) for name in args.workloads.split(",")}
    write(args, results=rows)


def measure(name: str, dims: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """The ratio to plain training of every method for projections and moments."""
    workload = build(name, args.device)
    loss, params = psg.stateless(workload.model, workload.criterion)
    factored = psg.factored_grad(loss)
    check(factored(params, *workload.batch), dims)
    gradients = METHODS["vmap_grad"].prepare(workload, 1.0)
    calls: dict[str, Callable[[], Any]] = {
        "plain": METHODS["plain"].prepare(build(name, args.device), 1.0),
        "psg_moments": lambda: psg.tree.moments(factored(params, *workload.batch)),
        "vmap_moments": lambda: [(g.mean(0), g.square().mean(0)) for g in gradients().values()],
    }
    for dim in dims:
        calls[f"psg_project_{dim}"] = lambda dim=dim: psg.tree.project(factored(params, *workload.batch), dim)
        if dim <= args.gaussian:
            calls[f"vmap_gaussian_{dim}"] = lambda dim=dim: gaussian(gradients(), dim, workload)
    medians = median_ms(calls, args)
    base = medians["plain"]
    ratios = {method: round(ms / base, 2) for method, ms in medians.items()}
    print(f"{name:<12} {base:8.2f} ms " + " ".join(f"{m} {r:.2f}" for m, r in ratios.items() if m != "plain"), flush=True)
    return {"ms": round(base, 3), "ratios": ratios}


def check(factored: Any, dims: list[int]) -> None:
    """Compares psg's reductions of factors with those of materialised gradients."""
    dense = psg.tree.materialize(factored)
    for dim in dims:
        torch.testing.assert_close(*(psg.tree.project(tree, dim) for tree in (factored, dense)), rtol=1e-3, atol=1e-4)
    second = psg.tree.moments(factored).second
    for leaf, values in dense.items():
        torch.testing.assert_close(second[leaf], values.square().mean(0), rtol=1e-3, atol=1e-8)


def gaussian(grads: dict[str, Tensor], dim: int, workload: Workload) -> Tensor:
    """Every sample's gradient times one Gaussian matrix [P, dim]."""
    n, device = workload.num_samples, workload.batch[0].device
    generator = torch.Generator(device).manual_seed(0)
    total = torch.zeros(n, dim, device=device)
    for leaf in grads.values():
        for block in leaf.reshape(n, -1).split(BLOCK, dim=1):
            total += block @ torch.randn(block.shape[1], dim, device=device, generator=generator)
    return total / dim**0.5


if __name__ == "__main__":
    main()
