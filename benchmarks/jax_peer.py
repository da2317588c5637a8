"""Measures JAX on the same workloads, in a separate environment that needs only jax.

    python benchmarks/jax_peer.py --plain results/cpu-4.json --out results/cpu-4-jax.json

The models of workloads.py and some of inside.py in plain JAX, with their own weights: `jit(vmap(grad))` for per-sample gradients, and one
jitted function of their norms and weighted sums for the clipped sum, checked against each other and against the gradient of the mean loss.
Ratios are to the plain torch training step in the JSON given by --plain, which run.py or inside.py has written; the process is limited to
as many cores as that run had threads. table.py merges the two files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", type=Path, required=True, help="the JSON of run.py or inside.py to compare with")
    parser.add_argument("--workloads", default="all")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch_run = json.loads(args.plain.read_text())
    cores = sorted(os.sched_getaffinity(0))[: torch_run["threads"]]
    os.sched_setaffinity(0, cores)  # before jax starts its threads
    import jax

    plain = {row["workload"]: row["ms"] for row in torch_run["results"] if row["method"] == "plain" and "ms" in row}
    models = workloads()
    names = [name for name in models if name in plain] if args.workloads == "all" else args.workloads.split(",")
    rows = []
    for name in names:
        for row in measure(name, *models[name](), args.repeats):
            rows.append(row | {"ratio": row["ms"] / plain[name]} if name in plain else row)
            print(f"{name:>12} {row['method']:<10} {row['ms']:10.2f} ms  x{rows[-1].get('ratio', math.nan):.2f}")
    report = {key: torch_run[key] for key in ("device", "threads", "dtype", "pages")}
    report |= {"date": datetime.date.today().isoformat(), "repeats": args.repeats}
    report |= {"versions": {"jax": jax.__version__}, "results": rows}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(name: str, loss: Callable, params: Any, batch: tuple, repeats: int) -> list[dict[str, Any]]:
    """Two rows: per-sample gradients and the clipped sum, each one jitted function of (params, *batch)."""
    import jax
    import jax.numpy as jnp

    axes = (None,) + (0,) * len(batch)
    grads = jax.jit(jax.vmap(jax.grad(loss), in_axes=axes))

    def norm(tree):
        return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))

    clip_norm = float(jnp.median(jax.jit(jax.vmap(lambda *a: norm(jax.grad(loss)(*a)), in_axes=axes))(params, *batch)))

    def clipped(params, *batch):
        tree = jax.vmap(jax.grad(loss), in_axes=axes)(params, *batch)
        weights = jnp.minimum(1.0, clip_norm / jax.vmap(norm)(tree))
        return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), tree)

    clip = jax.jit(clipped)
    mean = jax.jit(jax.grad(lambda *a: jax.vmap(loss, in_axes=axes)(*a).mean()))
    per_sample = grads(params, *batch)
    check(jax.tree.map(lambda leaf: leaf.mean(0), per_sample), mean(params, *batch))
    norms = jax.vmap(norm)(per_sample)
    scaled = jax.tree.map(lambda leaf: jax.vmap(jnp.multiply)(jnp.minimum(1.0, clip_norm / norms), leaf), per_sample)
    check(jax.tree.map(lambda leaf: leaf.sum(0), scaled), clip(params, *batch))
    del scaled
    del per_sample
    times: dict[str, list[float]] = {"jax_grad": [], "jax_clip": []}
    for repeat in range(-2, repeats):
        for method, fn in (("jax_grad", grads), ("jax_clip", clip)):
            start = time.perf_counter()
            result = jax.block_until_ready(fn(params, *batch))
            if repeat >= 0:
                times[method].append(1e3 * (time.perf_counter() - start))
            del result
    return [
        {"workload": name, "method": method, "kind": method[4:], "status": "ok", "ms": statistics.median(ms)}
        for method, ms in times.items()
    ]


def check(result: Any, expected: Any) -> None:
    import jax
    import jax.numpy as jnp

    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        if jnp.linalg.norm((a - b).ravel()) > 1e-2 * jnp.linalg.norm(b.ravel()) + 1e-6:
            raise SystemExit("the results disagree")


def workloads() -> dict[str, Callable[[], tuple[Callable, Any, tuple]]]:
    """name -> (loss of one sample, params, batch), as in workloads.py."""
    import jax
    import jax.numpy as jnp
    from jax import nn

    keys = iter(jax.random.split(jax.random.key(0), 10_000))

    def normal(*shape, std=1.0):
        return std * jax.random.normal(next(keys), shape)

    def labels(n, classes, *more):
        return jax.random.randint(next(keys), (n, *more), 0, classes)

    def dense(i, o, bias=True):
        weight = normal(i, o, std=i**-0.5)
        return {"w": weight, "b": jnp.zeros(o)} if bias else {"w": weight}

    def linear(p, x):
        return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]

    def cross_entropy(logits, target):
        return -jnp.take_along_axis(nn.log_softmax(logits), target[..., None], -1).mean()

    def conv(p, x, stride=1, padding="VALID"):
        """[c, h, w] -> [o, h, w]."""
        y = jax.lax.conv_general_dilated(x[None], p["w"], (stride, stride), padding)
        return y[0] + p["b"][:, None, None]

    def convolution(i, o, k):
        return {"w": normal(o, i, k, k, std=(i * k * k) ** -0.5), "b": jnp.zeros(o)}

    def mlp():
        widths = (784, 1024, 1024, 10)
        params = [dense(i, o) for i, o in zip(widths[:-1], widths[1:], strict=True)]

        def loss(params, x, y):
            for p in params[:-1]:
                x = nn.relu(linear(p, x))
            return cross_entropy(linear(params[-1], x), y)

        return loss, params, (normal(128, 784), labels(128, 10))

    def cnn():
        params = [convolution(1, 32, 3), convolution(32, 64, 3), dense(9216, 128), dense(128, 10)]

        def loss(params, x, y):
            x = nn.relu(conv(params[1], nn.relu(conv(params[0], x))))
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID").ravel()
            return cross_entropy(linear(params[3], nn.relu(linear(params[2], x))), y)

        return loss, params, (normal(64, 1, 28, 28), labels(64, 10))

    def layer_norm(p, x):
        x = x - x.mean(-1, keepdims=True)
        return p["w"] * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) + p["b"]

    def affine(width):
        return {"w": jnp.ones(width), "b": jnp.zeros(width)}

    def block(width):
        layers = {"qkv": dense(width, 3 * width), "proj": dense(width, width)}
        layers |= {"up": dense(width, 4 * width), "down": dense(4 * width, width)}
        return layers | {"norm1": affine(width), "norm2": affine(width)}

    def transformer(params, x, heads, causal):
        """[t, d] -> [t, d]."""
        t, width = x.shape
        for p in params:
            qkv = linear(p["qkv"], layer_norm(p["norm1"], x)).reshape(t, 3, heads, width // heads)
            scores = jnp.einsum("thd,shd->hts", qkv[:, 0], qkv[:, 1]) / math.sqrt(width // heads)
            if causal:
                scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
            y = jnp.einsum("hts,shd->thd", nn.softmax(scores), qkv[:, 2]).reshape(t, width)
            x = x + linear(p["proj"], y)
            x = x + linear(p["down"], nn.gelu(linear(p["up"], layer_norm(p["norm2"], x)), approximate=False))
        return x

    def gpt(n, t, width, depth, tied=False, vocab=4096, heads=4):
        params = {"tokens": normal(vocab, width, std=0.02), "positions": normal(t, width, std=0.02)}
        params |= {"blocks": [block(width) for _ in range(depth)], "norm": affine(width)}
        if not tied:
            params["head"] = dense(width, vocab, bias=False)

        def loss(params, ids, targets):
            x = transformer(params["blocks"], params["tokens"][ids] + params["positions"], heads, causal=True)
            x = layer_norm(params["norm"], x)
            return cross_entropy(x @ params["tokens"].T if tied else linear(params["head"], x), targets)

        return loss, params, (labels(n, vocab, t), labels(n, vocab, t))

    def vit():
        params = {"patches": convolution(3, 192, 4), "positions": normal(64, 192, std=0.02), "norm": affine(192)}
        params |= {"blocks": [block(192) for _ in range(4)], "head": dense(192, 10)}

        def loss(params, x, y):
            x = conv(params["patches"], x, stride=4).reshape(192, 64).T + params["positions"]
            x = layer_norm(params["norm"], transformer(params["blocks"], x, heads=3, causal=False))
            return cross_entropy(linear(params["head"], x.mean(0)), y)

        return loss, params, (normal(16, 3, 32, 32), labels(16, 10))

    def embedding(n=64):
        params = {"table": normal(20000, 64), "head": dense(64, 10)}

        def loss(params, ids, y):
            return cross_entropy(linear(params["head"], params["table"][ids].mean(0)), y)

        return loss, params, (labels(n, 20000, 64), labels(n, 10))

    def lstm(width=64, hidden=128):
        params = {"table": normal(10000, width), "head": dense(hidden, 2)}
        params |= {"x": dense(width, 4 * hidden), "h": dense(hidden, 4 * hidden)}

        def loss(params, ids, y):
            def step(state, z):
                h, c = state
                i, f, g, o = jnp.split(z + linear(params["h"], h), 4)
                c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
                return (nn.sigmoid(o) * jnp.tanh(c), c), None

            zeros = jnp.zeros(hidden)
            (h, _), _ = jax.lax.scan(step, (zeros, zeros), linear(params["x"], params["table"][ids]))
            return cross_entropy(linear(params["head"], h), y)

        return loss, params, (labels(64, 10000, 64), labels(64, 2))

    def tanh_network(*widths):
        params = [dense(i, o) for i, o in zip(widths, widths[1:], strict=False)]

        def network(params, x):
            for p in params[:-1]:
                x = jnp.tanh(linear(p, x))
            return linear(params[-1], x)[0]

        return network, params

    def points(n, dims):
        return (jax.random.uniform(next(keys), (n, dims)),)

    def burgers():
        network, params = tanh_network(2, 64, 64, 64, 64, 1)

        def residual(params, point):
            du, ddu = jax.jvp(jax.grad(lambda z: network(params, z)), (point,), (jnp.array([1.0, 0.0]),))
            return (du[1] + network(params, point) * du[0] - 0.01 * ddu[0]) ** 2

        return residual, params, points(2048, 2)

    def poisson():
        network, params = tanh_network(3, 64, 64, 64, 1)

        def residual(params, point):
            second = jax.hessian(lambda z: network(params, z))(point)
            return (jnp.trace(second) + jnp.prod(jnp.sin(point))) ** 2

        return residual, params, points(1024, 3)

    def forces():
        params = [dense(36, 128), dense(128, 128), dense(128, 1)]
        one, other = jnp.triu_indices(9, 1)

        def energy(params, atoms):
            x = 1 / jnp.sqrt(jnp.square(atoms[one] - atoms[other]).sum(-1))
            for p in params[:-1]:
                x = nn.silu(linear(p, x))
            return linear(params[-1], x)[0]

        def loss(params, atoms, target, truth):
            force = -jax.grad(energy, argnums=1)(params, atoms)
            return (energy(params, atoms) - target) ** 2 + jnp.square(force - truth).mean()

        return loss, params, (normal(256, 9, 3, std=3.0), normal(256), normal(256, 9, 3))

    return {
        "burgers": burgers,
        "poisson": poisson,
        "forces": forces,
        "mlp": mlp,
        "cnn": cnn,
        "vit": vit,
        "gpt": lambda: gpt(8, 128, 256, 4),
        "gpt_tied": lambda: gpt(8, 128, 256, 4, tied=True),
        "gpt_long": lambda: gpt(2, 1024, 128, 2),
        "embedding": embedding,
        "lstm": lstm,
    }


if __name__ == "__main__":
    main()
