"""Measures the building blocks between which psg chooses: one function and one markdown table per question.

    python benchmarks/micro.py                       every question
    python benchmarks/micro.py conv outer --threads 1

Milliseconds, medians of interleaved calls; the best of a row in bold. All candidates of a row are first checked to give
the same numbers. Results go into newly allocated memory, as they do in a library, unless the candidate says `out=`.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import psg  # noqa: F401  (registers its ops)

aten = torch.ops.aten
Candidates = dict[str, Callable[[], Tensor]]
QUESTIONS: dict[str, Callable[[], None]] = {}


def question(fn: Callable[[], None]) -> Callable[[], None]:
    QUESTIONS[fn.__name__.rstrip("_")] = fn
    return fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help=f"any of {', '.join(QUESTIONS)}; all by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for name in args.questions or QUESTIONS:
        print(f"\n### {name}, {args.threads} threads: {inspect.getdoc(QUESTIONS[name])}\n")
        QUESTIONS[name]()


def median_ms(candidates: Candidates, seconds: float = 0.4, most: int = 25) -> dict[str, float]:
    """Median milliseconds of interleaved calls: at least three of each, more until the time is used up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    began = time.perf_counter()
    while (count := len(next(iter(times.values())))) < 3 or (count < most and time.perf_counter() - began < seconds * len(candidates)):
        for name, call in candidates.items():
            start = time.perf_counter()
            result = call()
            times[name].append(1e3 * (time.perf_counter() - start))
            del result
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def report(rows: list[tuple[str, Candidates]], columns: list[str] | None = None, floors: tuple[str, ...] = ()) -> None:
    """Checks, times and prints rows of candidates; `floors` are columns for comparison only, never the best of a row.

    Without `columns`, the candidates are in the order in which they first occur.
    """
    columns = columns or list(dict.fromkeys(name for _, candidates in rows for name in candidates))
    print("| | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
    for title, candidates in rows:
        agree({name: call for name, call in candidates.items() if name not in floors})
        ms = median_ms(candidates)
        best = min(value for name, value in ms.items() if name not in floors)
        cells = []
        for name in columns:
            text = f"{ms[name]:.3g}" if name in ms else "-"
            cells.append(f"**{text}**" if name in ms and name not in floors and ms[name] <= 1.05 * best else text)
        print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


def agree(candidates: Candidates) -> None:
    """Raises unless all candidates give equal numbers."""
    expected, *others = [(name, call()) for name, call in candidates.items()]
    for name, value in others:
        if not torch.allclose(value.reshape_as(expected[1]), expected[1], rtol=1e-3, atol=1e-3 * expected[1].abs().max().item()):
            raise SystemExit(f"{name} disagrees with {expected[0]}")


# Reductions of a materialised gradient


@question
def squared_norm() -> None:
    """Squared norms of [n, P]."""
    rows = []
    for n, p in ((128, 1_000_000), (8, 1_000_000), (64, 100_000), (32, 1000)):
        v = torch.randn(n, p)
        candidates = {
            "vector_norm": lambda v=v: torch.linalg.vector_norm(v, dim=1).square(),
            "square().sum": lambda v=v: v.square().sum(1),
            "bmm": lambda v=v: torch.bmm(v[:, None], v[:, :, None]).flatten(),
            "einsum": lambda v=v: torch.einsum("np,np->n", v, v),
            "norm a row": lambda v=v: torch.stack([row.norm() for row in v]).square(),
        }
        rows.append((f"({n}, {p})", candidates))
    report(rows)


@question
def weighted_sum() -> None:
    """Weighted sums over n of [n, P], whole and in blocks of columns."""
    rows = []
    for n, p in ((128, 1_000_000), (8, 1_000_000), (64, 100_000), (32, 1000)):
        v, w = torch.randn(n, p), torch.rand(n)
        candidates = {
            "w @ v": lambda v=v, w=w: w @ v,
            "v.T @ w": lambda v=v, w=w: v.T @ w,
            "tensordot": lambda v=v, w=w: torch.tensordot(w, v, 1),
            "(v * w).sum(0)": lambda v=v, w=w: (v * w[:, None]).sum(0),
            "4 blocks": lambda v=v, w=w: torch.bmm(w.expand(4, 1, -1), v.unflatten(1, (4, -1)).transpose(0, 1)).flatten(),
        }
        rows.append((f"({n}, {p})", candidates))
    report(rows)


# Embeddings


@question
def embedding_gradient() -> None:
    """The summed weight gradient [V, d] from n t scattered rows."""
    rows = []
    for count, d, vocab in ((4096, 64, 20000), (1024, 256, 4096), (65536, 64, 20000)):
        index, c = torch.randint(vocab, (count,)), torch.randn(count, d)
        zeros = lambda vocab=vocab, d=d: torch.zeros(vocab, d)  # noqa: E731
        candidates = {
            "embedding_dense_backward": lambda i=index, c=c, v=vocab: aten.embedding_dense_backward(c, i, v, -1, False),
            "index_add_": lambda i=index, c=c, z=zeros: z().index_add_(0, i, c),
            "index_put_": lambda i=index, c=c, z=zeros: z().index_put_((i,), c, accumulate=True),
            "scatter_add_": lambda i=index, c=c, z=zeros: z().scatter_add_(0, i[:, None].expand_as(c), c),
        }
        rows.append((f"n t={count}, d={d}, V={vocab}", candidates))
    report(rows)


@question
def rows_norm() -> None:
    """Squared norms per sample of rows [n, t, d] scattered by an index [n, t]."""
    rows = []
    for n, t, d, vocab in ((64, 64, 64, 20000), (8, 128, 256, 4096), (1024, 64, 64, 20000), (2, 1024, 128, 4096)):
        index, c = torch.randint(vocab, (n, t)), torch.randn(n, t, d)

        def segments(index=index, n=n, t=t) -> Tensor:
            # the segment of each row: after sorting, equal ids of one sample are adjacent
            ids, order = index.sort(1)
            new = torch.cat([ids.new_ones(n, 1), (ids[:, 1:] != ids[:, :-1]).long()], 1)
            return torch.empty_like(ids).scatter_(1, order, new.cumsum(1) - 1)

        def scatter(c=c, segments=segments) -> Tensor:
            return torch.zeros_like(c).scatter_add_(1, segments()[..., None].expand_as(c), c).square().sum((1, 2))

        def index_add(c=c, segments=segments, n=n, t=t, d=d) -> Tensor:
            flat = (segments() + t * torch.arange(n)[:, None]).flatten()
            return torch.zeros(n * t, d).index_add_(0, flat, c.reshape(-1, d)).view(n, -1).square().sum(1)

        def unique(c=c, index=index, n=n, d=d, vocab=vocab) -> Tensor:
            keys, inverse = torch.unique(index + vocab * torch.arange(n)[:, None], return_inverse=True)
            total = torch.zeros(len(keys), d).index_add_(0, inverse.flatten(), c.reshape(-1, d))
            return torch.zeros(n).index_add_(0, keys // vocab, total.square().sum(1))

        def masked_gram(c=c, index=index) -> Tensor:
            return (torch.bmm(c, c.transpose(1, 2)) * (index[:, :, None] == index[:, None])).sum((1, 2))

        def mask_product(c=c, index=index) -> Tensor:
            return (torch.bmm((index[:, :, None] == index[:, None]).to(c.dtype), c) * c).sum((1, 2))

        candidates = {
            "sort + scatter_add_": scatter,
            "sort + index_add_": index_add,
            "unique + index_add_": unique,
            "masked Gram": masked_gram,
            "mask @ rows": mask_product,
        }
        rows.append((f"n={n}, t={t}, d={d}", candidates))
    report(rows)


# Norm layers


@question
def layer_norm_weight() -> None:
    """Per-sample weight gradient of a layer norm: sum over t of xhat * c, [n, t, d] -> [n, d], xhat included."""
    rows = []
    for n, t, d in ((8, 128, 256), (16, 64, 192), (2, 1024, 128)):
        x, c = torch.randn(n, t, d), torch.randn(n, t, d)
        candidates = {
            "(xhat * c).sum(1)": lambda x=x, c=c: (F.layer_norm(x, x.shape[2:]) * c).sum(1),
            "xhat.mul_(c).sum(1)": lambda x=x, c=c: F.layer_norm(x, x.shape[2:]).mul_(c).sum(1),
            "einsum": lambda x=x, c=c: torch.einsum("ntd,ntd->nd", F.layer_norm(x, x.shape[2:]), c),
        }
        rows.append((f"({n}, {t}, {d})", candidates))
    report(rows)


@question
def group_norm_weight() -> None:
    """Per-sample weight gradient of a group norm: sum over positions of x * c, [n, C, H, W] -> [n, C]."""
    rows = []
    for shape in ((32, 32, 32, 32), (32, 128, 8, 8)):
        x, c = torch.randn(shape), torch.randn(shape)
        flat = (shape[0] * shape[1], 1, -1)
        candidates = {
            "(x * c).sum": lambda x=x, c=c: (x * c).sum((2, 3)),
            "bmm": lambda x=x, c=c, f=flat: torch.bmm(x.view(f), c.view(f).transpose(1, 2)).view(x.shape[:2]),
            "einsum": lambda x=x, c=c: torch.einsum("nchw,nchw->nc", x, c),
        }
        rows.append((str(shape), candidates))
    report(rows)


# Matrix products


@question
def product() -> None:
    """The weighted sum over all positions, left^T right for left [k, a] and right [k, b], whole and in blocks of rows."""
    rows = []
    shapes = ((4096, 512, 64), (1024, 4096, 256), (1024, 1024, 256), (1040, 768, 192), (1040, 192, 192), (128, 1024, 784))
    for k, a, b in (*shapes, (1024, 256, 1024), (16, 1024, 1024), (64, 256, 256)):
        left, right = torch.randn(k, a), torch.randn(k, b)
        candidates = {"mm": lambda x=left, y=right: x.T @ y, "transposed": lambda x=left, y=right: (y.T @ x).T.contiguous()}
        for blocks in (2, 4):
            sides = left.T.unflatten(0, (blocks, -1)), right.expand(blocks, k, b)
            candidates[f"{blocks} blocks"] = lambda sides=sides: torch.bmm(*sides)
        rows.append((f"({k}, {a}, {b})", candidates))
    report(rows)


@question
def affine() -> None:
    """A linear layer without bias, x W^T for x [k, i] and W [o, i], and its input's cotangent, C W: whole, in blocks of rows, by oneDNN."""
    rows = []
    onednn = torch.ops.mkldnn._linear_pointwise.default
    for k, i, o in ((64, 256, 256), (128, 784, 1024), (128, 1024, 1024), (1024, 256, 1024), (1024, 256, 4096), (1040, 192, 576)):
        for right in (torch.randn(o, i).T, torch.randn(i, o)):
            left = torch.randn(k, i)
            blocks = left.unflatten(0, (4, -1)), right.expand(4, i, o)
            candidates = {
                "mm": lambda x=left, y=right: x @ y,
                "4 blocks": lambda sides=blocks: torch.bmm(*sides),
                "oneDNN": lambda x=left, y=right: onednn(x, y.T, None, "none", [], ""),
            }
            rows.append((f"({k}, {i}, {o})" + ("" if right.is_contiguous() else ", transposed"), candidates))
    report(rows)


@question
def narrow() -> None:
    """left^T right for left [*, t, a] and a right [*, t, b] of few columns: as it is, and with the narrow side first, then transposed."""
    rows = []
    for shape, a, b in (((4, 256), 1024, 8), ((4, 256), 768, 8), ((4, 256), 1024, 32), ((32, 1024), 32, 27), ((1024,), 1024, 8)):
        left, right = torch.randn(*shape, a), torch.randn(*shape, b)
        candidates = {"as it is": lambda x=left, y=right: x.mT @ y, "narrow first": lambda x=left, y=right: (y.mT @ x).mT.contiguous()}
        rows.append((f"({', '.join(map(str, (*shape, a, b)))})", candidates))
    report(rows)


@question
def thin() -> None:
    """C W for C [k, o] and a W [o, i] of few columns: with its rows contiguous, with its columns, and copied so that they are."""
    rows = []
    for k, o, i in ((1024, 1024, 2), (1024, 1024, 4), (1024, 1024, 8), (1024, 768, 8), (128, 256, 8), (4096, 3072, 8), (1024, 1024, 12)):
        left, right = torch.randn(k, o), torch.randn(o, i)
        columns = right.T.contiguous().T
        candidates = {
            "rows": lambda x=left, y=right: x @ y,
            "columns": lambda x=left, y=columns: x @ y,
            "copied": lambda x=left, y=right: x @ y.T.contiguous().T,
        }
        rows.append((f"({k}, {o}, {i})", candidates))
    report(rows, floors=("columns",))


@question
def gram() -> None:
    """Inner products of all pairs of rows [n, P], whole and summed over blocks of columns."""
    rows = []
    for n, p in ((8, 1 << 20), (64, 98304), (32, 147456), (256, 65536)):
        v = torch.randn(n, p)
        candidates = {"mm": lambda v=v: v @ v.T}
        for blocks in (2, 4, 16):
            sides = v.unflatten(1, (blocks, -1)).transpose(0, 1)
            candidates[f"{blocks} blocks"] = lambda x=sides: torch.bmm(x, x.mT).sum(0)
        rows.append((f"({n}, {p})", candidates))
    report(rows)


@question
def outer() -> None:
    """Materialising sum_t left[n, t, a] right[n, t, b]; the last column is the summed gradient of plain training."""
    rows = []
    shapes = ((8, 128, 256, 1024), (8, 128, 256, 256), (8, 128, 4096, 256), (16, 64, 192, 768), (2, 1024, 128, 512))
    for n, t, a, b in (*shapes, (4, 256, 256, 8), (64, 1, 128, 9216), (128, 1, 1024, 1024), (4096, 1, 4, 64), (4096, 1, 1, 1000)):
        left, right, buffer = torch.randn(n, t, a), torch.randn(n, t, b), torch.empty(n, a, b)
        candidates = {
            "bmm": lambda x=left, y=right: torch.bmm(x.transpose(1, 2), y),
            "einsum": lambda x=left, y=right: torch.einsum("nta,ntb->nab", x, y),
            "bmm out=": lambda x=left, y=right, o=buffer: torch.bmm(x.transpose(1, 2), y, out=o),
            "one sum": lambda x=left, y=right: x.flatten(0, 1).T @ y.flatten(0, 1),
        }
        if t == 1:
            candidates["multiply"] = lambda x=left, y=right: x[:, 0, :, None] * y
            candidates["multiply out="] = lambda x=left, y=right, o=buffer: torch.mul(x[:, 0, :, None], y, out=o)
        rows.append((f"({n}, {t}, {a}, {b})", candidates))
    report(rows, ["bmm", "einsum", "multiply", "bmm out=", "multiply out=", "one sum"], ("one sum",))


@question
def lookup() -> None:
    """Means over t of rows that are looked up, compiled: fused with the mean, or by an op of its own as in psg.jit."""
    rows = []
    for n, t, v, d in ((64, 64, 20000, 64), (1024, 64, 20000, 64), (8, 128, 4096, 256)):
        index, table = torch.randint(v, (n, t)), torch.randn(v, d)
        means = {"fused": lambda i, w: F.embedding(i, w).mean(1), "its own": lambda i, w: torch.ops.psg.rows(i, w).mean(1)}
        compiled = {name: torch.compile(mean, dynamic=False) for name, mean in means.items()}
        candidates = {name: lambda mean=mean, i=index, w=table: mean(i, w) for name, mean in (compiled | {"eager": means["fused"]}).items()}
        rows.append((f"({n}, {t}, {v}, {d})", candidates))
    report(rows, floors=("eager",))


@question
def attention() -> None:
    """Both passes of self-attention, [n, t] positions with h heads of e entries: torch's fused kernel, or products and a softmax.

    From the projection to queries, keys and values to its cotangent, with the copies that other layouts need.
    """

    def products(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        q, k, v = (side.flatten(0, 1) for side in (q, k, v))
        scores = q.new_full((q.shape[1],) * 2, -torch.inf).triu_(1) if is_causal else q.new_zeros(1, 1)
        scores = torch.baddbmm(scores.expand(len(q), q.shape[1], q.shape[1]), q, k.mT, alpha=q.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(-1), v)

    def cotangent(attend: Callable[..., Tensor], qkv: Tensor, given: Tensor, is_causal: bool) -> Tensor:
        output = attend(*qkv.permute(2, 0, 3, 1, 4), is_causal=is_causal)
        output = output.view(len(qkv), -1, *output.shape[-2:]).transpose(1, 2).flatten(2)
        return torch.autograd.grad(output, qkv, given)[0]

    rows = []
    for n, t, h, e, is_causal in ((16, 65, 3, 64, False), (8, 128, 4, 64, True), (4, 256, 4, 64, True), (2, 1024, 4, 32, True)):
        args = torch.randn(n, t, 3, h, e, requires_grad=True), torch.randn(n, t, h * e), is_causal
        ways = {"fused": F.scaled_dot_product_attention, "products": products}
        candidates = {name: lambda attend=attend, args=args: cotangent(attend, *args) for name, attend in ways.items()}
        rows.append((f"({n}, {t}, {h}, {e}){', causal' if is_causal else ''}", candidates))
    report(rows)


@question
def outer_norm() -> None:
    """Squared norms of Outer without keeping its gradients: by the Gram form, or materialised in chunks."""
    rows = []
    shapes = ((8, 128, 256, 1024), (8, 128, 256, 256), (8, 128, 4096, 256), (16, 64, 192, 768), (2, 1024, 128, 512))
    for n, t, a, b in (*shapes, (4, 256, 256, 8), (16, 4, 512, 4608), (16, 16, 512, 4608), (32, 64, 128, 1152)):
        left, right = torch.randn(n, t, a), torch.randn(n, t, b)
        for_all = {"gram": lambda x=left, y=right: (x @ x.mT * (y @ y.mT)).sum((1, 2))}
        for size in (1, 4, n):
            name = "all at once" if size == n else f"chunks of {size}"
            for_all[name] = lambda x=left, y=right, s=size: _chunked(x, y, s)
        rows.append((f"({n}, {t}, {a}, {b})", for_all))
    report(rows)


def _chunked(left: Tensor, right: Tensor, size: int) -> Tensor:
    norms = []
    for x, y in zip(left.split(size), right.split(size), strict=True):
        norms.append(torch.linalg.vector_norm(torch.bmm(x.mT, y).flatten(1), dim=1).square())
    return torch.cat(norms)


# Convolutions

# name: n, channels in, channels out, height and width, kernel, stride, padding, groups
CONVOLUTIONS = {
    "cnn 1": (64, 1, 32, 28, 3, 1, 0, 1),
    "cnn 2": (64, 32, 64, 26, 3, 1, 0, 1),
    "resnet stem": (32, 3, 32, 32, 3, 1, 1, 1),
    "resnet stage 1": (32, 32, 32, 32, 3, 1, 1, 1),
    "resnet down 1": (32, 32, 64, 32, 3, 2, 1, 1),
    "resnet stage 2": (32, 64, 64, 16, 3, 1, 1, 1),
    "resnet down 2": (32, 64, 128, 16, 3, 2, 1, 1),
    "resnet stage 3": (32, 128, 128, 8, 3, 1, 1, 1),
    "resnet skip": (32, 32, 64, 32, 1, 2, 0, 1),
    "vgg 1": (16, 3, 64, 32, 3, 1, 1, 1),
    "vgg 2": (16, 64, 128, 16, 3, 1, 1, 1),
    "vgg 3": (16, 128, 256, 8, 3, 1, 1, 1),
    "vgg 4": (16, 256, 256, 8, 3, 1, 1, 1),
    "vgg 5": (16, 256, 512, 4, 3, 1, 1, 1),
    "vgg 6": (16, 512, 512, 4, 3, 1, 1, 1),
    "vgg 7": (16, 512, 512, 2, 3, 1, 1, 1),
    "imagenet stem": (8, 3, 64, 112, 7, 2, 3, 1),
    "imagenet stage 1": (8, 64, 64, 56, 3, 1, 1, 1),
    "vit patches": (16, 3, 192, 32, 4, 4, 0, 1),
    "depthwise 1": (32, 32, 32, 32, 3, 1, 1, 32),
    "depthwise 2": (32, 64, 64, 32, 3, 2, 1, 64),
    "depthwise 3": (32, 256, 256, 8, 3, 1, 1, 256),
    "depthwise 7 x 7": (8, 40, 40, 24, 7, 1, 3, 40),
    "depthwise 5 x 5": (16, 72, 72, 24, 5, 2, 2, 72),
    "pointwise 1": (32, 32, 64, 32, 1, 1, 0, 1),
    "pointwise 2": (32, 256, 256, 8, 1, 1, 0, 1),
    "4 groups": (32, 64, 64, 16, 3, 1, 1, 4),
}


@question
def conv() -> None:
    """Per-sample weight gradients of a 2-d convolution; the first column is the summed gradient of plain training.

    `raw` leaves the input channels innermost, [n, o, k, k, i]: a norm does not depend on the layout.
    """
    rows = [(f"{name} {shape}", _conv_candidates(*shape)) for name, shape in CONVOLUTIONS.items()]
    report(rows, floors=("native sum", "patches NHWC raw", "shifts NHWC raw"))


def _conv_candidates(n: int, i: int, o: int, size: int, k: int, stride: int, pad: int, groups: int) -> Candidates:
    out = (size + 2 * pad - k) // stride + 1
    x, c, per_group = torch.randn(n, i, size, size), torch.randn(n, o, out, out), i // groups
    options = ([stride] * 2, [pad] * 2, [1, 1], False, [0, 0])
    only_weight = [False, True, False]
    last = stride * (out - 1) + 1
    c3 = c.reshape(n * groups, o // groups, out * out)

    def native(x: Tensor, c: Tensor, channels: tuple[int, int], groups: int) -> Tensor:
        weight = x.new_empty(1).expand(*channels, k, k)
        return aten.convolution_backward(c, x, weight, None, *options, groups, only_weight)[1]

    def grouped() -> Tensor:
        folded = native(x.view(1, -1, size, size), c.view(1, -1, out, out), (n * o, per_group), n * groups)
        return folded.view(n, o, per_group, k, k)

    def loop() -> Tensor:
        result = x.new_empty(n, o, per_group, k, k)
        for sample in range(n):
            result[sample] = native(x[sample, None], c[sample, None], (o, per_group), groups)
        return result

    def unfold() -> Tensor:
        patches = F.unfold(x, k, padding=pad, stride=stride).view(n * groups, per_group * k * k, -1)
        return torch.bmm(c3, patches.mT).view(n, o, per_group, k, k)

    def patches() -> Tensor:
        padded = F.pad(x, [pad] * 4)
        a, b, y, z = padded.stride()
        windows = padded.as_strided((n, i, k, k, out, out), (a, b, y, z, stride * y, stride * z))
        return torch.bmm(c3, windows.reshape(n * groups, per_group * k * k, -1).mT).view(n, o, per_group, k, k)

    def channels_last() -> Tensor:
        padded = x.new_zeros(n, size + 2 * pad, size + 2 * pad, i)
        padded[:, pad : pad + size, pad : pad + size] = x.permute(0, 2, 3, 1)
        return padded

    def patches_last() -> Tensor:
        padded = channels_last()
        a, y, z, b = padded.stride()
        windows = padded.as_strided((n, out, out, k, k, i), (a, stride * y, stride * z, y, z, b))
        return torch.bmm(c3, windows.reshape(n, out * out, -1)).view(n, o, k, k, i)

    def shifts_last() -> Tensor:
        padded, result = channels_last(), x.new_empty(k * k, n, o, i)
        for tap in range(k * k):
            y, z = divmod(tap, k)
            shifted = padded[:, y : y + last : stride, z : z + last : stride].reshape(n, -1, i)
            torch.bmm(c3, shifted, out=result[tap])
        return result

    def shifts() -> Tensor:
        padded, result = F.pad(x, [pad] * 4), x.new_empty(k * k, n * groups, o // groups, per_group)
        for tap in range(k * k):
            y, z = divmod(tap, k)
            shifted = padded[:, :, y : y + last : stride, z : z + last : stride].reshape(n * groups, per_group, -1)
            torch.bmm(c3, shifted.mT, out=result[tap])
        return result.view(k, k, n, o, per_group).permute(2, 3, 4, 0, 1).contiguous()

    def correlation() -> Tensor:
        options = (None, [1, 1], [pad] * 2, [stride] * 2, False, [0, 0], n * o)
        found = torch.convolution(x.view(1, -1, size, size), c.view(n * o, 1, out, out), *options)
        return found[..., :k, :k].reshape(n, o, 1, k, k)

    candidates = {
        "native sum": lambda: native(x, c, (o, per_group), groups),
        "grouped convolution": grouped,
        "loop of native": loop,
        "unfold": unfold,
        "patches NCHW": patches,
        "shifts NCHW": shifts,
    }
    if groups == i == o:
        candidates["correlation"] = correlation
    if groups == 1:
        candidates |= {
            "patches NHWC": lambda: patches_last().permute(0, 1, 4, 2, 3).contiguous(),
            "shifts NHWC": lambda: shifts_last().view(k, k, n, o, i).permute(2, 3, 4, 0, 1).contiguous(),
            "patches NHWC raw": patches_last,
            "shifts NHWC raw": shifts_last,
        }
    return candidates


if __name__ == "__main__":
    main()
