"""Measures neural tangent kernels: all inner products of the gradients of all outputs of two sets of samples, [n, m, k, k].

    python benchmarks/tangent_kernels.py --threads 2 --repeats 5 --out results/tangent_kernels.json

psg takes the Gram matrix of two factored trees, with a sample for each output. The two other ways are those of torch.func's tutorial: to
contract Jacobians, by `vmap(jacrev)`, and to pull every basis vector back through one sample and push it forward through the other. All are
compared before they are timed; times are medians of interleaved calls. A way that takes more than --limit GiB is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from run import median_ms, options, set_up, write
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import build

import psg

Params = dict[str, Tensor]
SIZES = {"tiny": (2, 2), "mlp": (32, 16), "cnn": (32, 16), "resnet": (8, 4), "vit": (8, 4)}
"""How many samples of a workload are on each side."""


def by_gram(model: nn.Module, params: Params, x: Tensor, z: Tensor, k: int) -> Tensor:
    fn, _ = psg.stateless(model, lambda output, v: (output * v).sum())
    eye = torch.eye(k, device=x.device)

    def gradients(samples: Tensor) -> Any:
        return psg.factored_grad(fn)(params, samples.repeat_interleave(k, 0), eye.repeat(len(samples), 1))

    return psg.tree.gram(gradients(x), gradients(z)).reshape(len(x), k, len(z), k).transpose(1, 2)


def by_jacobians(model: nn.Module, params: Params, x: Tensor, z: Tensor, k: int) -> Tensor:
    def output(params: Params, sample: Tensor) -> Tensor:
        return functional_call(model, params, (sample[None],))[0]

    left, right = (vmap(jacrev(output), (None, 0))(params, side).values() for side in (x, z))
    products = [torch.einsum("nap,mbp->nmab", a.flatten(2), b.flatten(2)) for a, b in zip(left, right, strict=True)]
    return torch.stack(products).sum(0)


def by_vectors(model: nn.Module, params: Params, x: Tensor, z: Tensor, k: int) -> Tensor:
    def output(params: Params, sample: Tensor) -> Tensor:
        return functional_call(model, params, (sample[None],))[0]

    def kernel(one: Tensor, other: Tensor) -> Tensor:
        _, pull = vjp(lambda p: output(p, one), params)
        return vmap(lambda v: jvp(lambda p: output(p, other), (params,), pull(v))[1])(torch.eye(k, device=x.device))

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no forward-mode derivative
        return vmap(vmap(kernel, (None, 0)), (0, None))(x, z)


WAYS: dict[str, Callable[..., Tensor]] = {"psg": by_gram, "jacobians": by_jacobians, "vectors": by_vectors}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    n, m = SIZES[name]
    model, _, (inputs, _) = build(name, args.device, max_samples=n + m)
    params = {key: p.detach() for key, p in model.named_parameters()}
    x, z = inputs[:n], inputs[n:]
    k = model(x[:1]).shape[-1]
    # The bytes of the Jacobians, and of the gradients of every pair.
    size = sum(p.numel() * p.itemsize for p in params.values())
    needed = {"psg": 0, "jacobians": (n + m) * k * size, "vectors": n * m * k * size}
    ways = [way for way in WAYS if needed[way] <= args.limit * 2**30]
    calls = {way: lambda run=WAYS[way]: run(model, params, x, z, k) for way in ways}
    expected = calls["psg"]()
    for call in calls.values():
        torch.testing.assert_close(call(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    medians = median_ms(calls, args)
    print(f"{name:<8} {n} x {m} samples, {k} outputs: " + ", ".join(f"{way} {ms:.1f} ms" for way, ms in medians.items()), flush=True)
    return {"samples": [n, m], "outputs": k, "ms": {way: round(ms, 2) for way, ms in medians.items()}}


def main() -> None:
    parser = options(__doc__, repeats=5, threads=4, device="cpu", limit=6.0)
    parser.add_argument("--workloads", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    args = parser.parse_args()
    set_up(args)
    write(args, results={name: measure(name, args) for name in args.workloads.split(",")})


if __name__ == "__main__":
    main()
