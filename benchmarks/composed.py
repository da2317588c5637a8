"""Measures derivatives of psg's results, and psg's functions under torch.func's transforms, on the fast path and by `vmap(grad)`.

    python benchmarks/composed.py --threads 1 --repeats 5 --out results/composed.json

Figures are multiples of plain training of the same model on the same batch (for an ensemble, of as many such steps as it has members). Both
ways are compared before they are timed; times are medians of interleaved calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from run import median_ms, options, set_up, write
from torch import Tensor
from torch.func import grad, jvp, vmap
from workloads import WORKLOADS, Workload, build

import psg

Params = dict[str, Tensor]
MEMBERS = 3


def penalty(norms: Callable[[Params], Tensor], params: Params) -> list[Tensor]:
    """The gradient of the mean norm, by plain autograd."""
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    return list(torch.autograd.grad(norms(leaves).mean(), list(leaves.values())))


def transformed_penalty(norms: Callable[[Params], Tensor], params: Params) -> list[Tensor]:
    """The same by torch.func.grad."""
    return list(grad(lambda p: norms(p).mean())(params).values())


def tangents(norms: Callable[[Params], Tensor], params: Params) -> list[Tensor]:
    """The norms' derivative in one direction, by torch.func.jvp."""
    return [jvp(norms, (params,), ({name: p.cos() for name, p in params.items()},))[1]]


def ensemble(norms: Callable[[Params], Tensor], params: Params) -> list[Tensor]:
    """The norms of several models at once, by torch.func.vmap."""
    return [vmap(norms)({name: torch.stack([p * 0.9**i for i in range(MEMBERS)]) for name, p in params.items()})]


COMPOSITIONS = {"penalty": penalty, "torch.func.grad": transformed_penalty, "jvp": tangents, "ensemble": ensemble}


def main() -> None:
    parser = options(__doc__, repeats=5, threads=4, device="cpu")
    parser.add_argument("--workloads", default="tiny,mlp,cnn,vit", help=f"of {', '.join(WORKLOADS)}")
    args = parser.parse_args()
    set_up(args)
    rows = {name: measure(build(name, args.device), name, args) for name in args.workloads.split(",")}
    write(args, results=rows)


def measure(workload: Workload, name: str, args: argparse.Namespace) -> dict[str, Any]:
    model, criterion, (*inputs, target) = workload
    loss, params = psg.stateless(model, criterion)

    def plain() -> Any:
        return torch.autograd.grad(criterion(model(*inputs), target), list(model.parameters()))

    def norms(method: Any, params: Params) -> Tensor:
        return psg.per_sample_norm(loss, method=method)(params, *workload.batch)

    rows: dict[str, Any] = {}
    for composition, compose in COMPOSITIONS.items():
        ways = {method: partial(compose, partial(norms, method), params) for method in ("auto", "vmap")}
        for got, expected in zip(ways["auto"](), ways["vmap"](), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
        medians = median_ms({"plain": plain, **ways}, args)
        base = medians["plain"] * (MEMBERS if compose is ensemble else 1)
        rows[composition] = {"ms": round(base, 3), "psg": round(medians["auto"] / base, 2), "vmap": round(medians["vmap"] / base, 2)}
        own = rows[composition]
        print(f"{name:<10} {composition:<16} {base:8.2f} ms psg {own['psg']} vmap {own['vmap']}", flush=True)
    return rows


if __name__ == "__main__":
    main()
