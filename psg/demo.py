"""psg on real data, in one command: `python -m psg.demo`.

scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels, part of the package: nothing is downloaded) and a small convolutional
network. Four things happen:

1. check: psg's gradients are compared with a loop over samples, in double precision;
2. time: the loop, vmap(grad) and psg, side by side;
3. train: private training, that is clipped per-sample gradients plus Gaussian noise, on Poisson-sampled batches;
4. picture: the norms that training saw, with the clip norm, and accuracy by step, in one PNG.

Training draws its noise from torch's generator with a fixed seed, so that two runs agree. A real release needs a secret source of
randomness and an accountant; the demo prints the three numbers that an accountant asks for. The histogram shows exact norms, without noise:
learn from it, but do not release it.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

import psg
from psg import testing

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 3.0  # standard deviation of the noise, in units of the clip norm
SAMPLE_RATE = 1 / 8  # probability that a batch contains a given sample
LEARNING_RATE = 0.005
EVALUATE_EVERY = 10


class Digits(NamedTuple):
    """Images [n, 1, 8, 8] between 0 and 1, labels [n]; one fifth is held out."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


class Trained(NamedTuple):
    """The record of private training: test accuracy at `steps`, and the norms of each step's batch."""

    steps: list[int]
    accuracy: list[float]
    norms: list[Tensor]


def digits(seed: int) -> Digits:
    """Load the digits and hold out one fifth, drawn with `seed`."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    return Digits(x[train], y[train], x[test], y[test])


def network() -> nn.Module:
    """Two convolutions with group norm (batch norm would mix samples) and two linear layers: 151,498 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def check(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Compare psg with a loop over samples in double precision and print the largest error; raise if they differ."""
    loss, params = psg.stateless(model.double(), F.cross_entropy)
    found = psg.check(loss)(params, x.double(), y)
    model.float()
    print(
        f"check   {found.samples} samples, {found.leaves} parameter tensors, float64: gradients, norms, Gram matrix, dot\n"
        f"        products and weighted sums equal a loop over samples; largest relative error {found.error:.1e}\n"
    )


def measure(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each job. The repeats are interleaved, so that a busy moment hits all jobs alike."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if repeat:  # the first round warms up
                taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(values) for name, values in taken.items()}


def compare(model: nn.Module, x: Tensor, y: Tensor, repeats: int) -> None:
    """Time the loop, vmap(grad) and psg on one batch and print the table."""
    loss, params = psg.stateless(model, F.cross_entropy)
    stacked = vmap(grad(loss), in_dims=(None, 0, 0))
    clipped = psg.clipped_grad(loss, CLIP_NORM)

    def plain() -> object:
        return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))

    def stacked_then_clipped() -> object:
        grads = stacked(params, x, y)
        norms = torch.stack([leaf.flatten(1).norm(dim=1) for leaf in grads.values()]).norm(dim=0)
        coef = (CLIP_NORM / norms).clamp(max=1)
        return {name: torch.einsum("n,n...->...", coef, leaf) for name, leaf in grads.items()}

    jobs: dict[str, Callable[[], object]] = {
        "the batch's mean gradient, plain PyTorch": plain,
        "per-sample gradients: loop": lambda: testing.loop_grad(loss)(params, x, y),
        "per-sample gradients: vmap(grad)": lambda: stacked(params, x, y),
        "per-sample gradients: psg.per_sample_grad": lambda: psg.per_sample_grad(loss)(params, x, y),
        "clipped sum: vmap(grad), then clip": stacked_then_clipped,
        "clipped sum: psg.clipped_grad": lambda: clipped(params, x, y),
        "norms alone: psg.per_sample_norm": lambda: psg.per_sample_norm(loss)(params, x, y),
    }
    taken = measure(jobs, repeats)
    threads = torch.get_num_threads()
    print(f"time    {len(x)} samples, {threads} threads, float32, medians of {repeats} interleaved runs\n")
    first = next(iter(taken.values()))
    print(f"        {'':44}{'ms':>8}{'x plain':>10}")
    for name, milliseconds in taken.items():
        print(f"        {name:44}{milliseconds:8.1f}{milliseconds / first:10.1f}")
    print()


def train(model: nn.Module, data: Digits, steps: int, seed: int) -> Trained:
    """Train with clipped per-sample gradients and Gaussian noise on Poisson-sampled batches.

    One step: draw each sample with chance `q`; then `params -= Adam((sum_n clip(g[n], C) + sigma C z) / (q N))` with C the clip norm, sigma
    the noise multiplier, N the number of training samples and z standard normal.

    Args:
        model: The network; its parameters are trained in place.
        data: What to train on and what to evaluate on.
        steps: Number of steps.
        seed: For the sampling and the noise.

    Returns:
        Accuracy and norms along the way.

    Source:
        Abadi et al., "Deep Learning with Differential Privacy", 2016, algorithm 1.
    """
    loss, params = psg.stateless(model, F.cross_entropy)
    clipped_grad = psg.clipped_grad(loss, CLIP_NORM)
    optimizer = torch.optim.Adam(params.values(), LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    expected_size = SAMPLE_RATE * len(data.train_x)
    seen = Trained([0], [accuracy(model, params, data)], [])

    progress = tqdm(range(1, steps + 1), desc="train  ", unit="step")
    for step in progress:
        batch = torch.rand(len(data.train_x), generator=generator) < SAMPLE_RATE
        out = clipped_grad(params, data.train_x[batch], data.train_y[batch])
        noisy = psg.tree.add_noise(out.grads, NOISE_MULTIPLIER * out.sensitivity, generator=generator)
        for name, param in params.items():
            # The expected batch size, because this batch's own size would reveal something about its samples.
            param.grad = noisy[name] / expected_size
        optimizer.step()
        seen.norms.append(out.norms)
        if step % EVALUATE_EVERY == 0 or step == steps:
            seen.steps.append(step)
            seen.accuracy.append(accuracy(model, params, data))
            progress.set_postfix(accuracy=f"{seen.accuracy[-1]:.3f}")
    return seen


def accuracy(model: nn.Module, params: dict[str, Tensor], data: Digits) -> float:
    """Share of the held-out digits that the network classifies correctly."""
    with torch.no_grad():
        output = functional_call(model, params, data.test_x)
    return (output.argmax(1) == data.test_y).float().mean().item()


def picture(seen: Trained, path: Path) -> None:
    """Draw the norms of the first and last tenth of training, and accuracy by step."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        ax.set_axisbelow(True)
    tenth = max(1, len(seen.norms) // 10)
    ends = {f"first {tenth} steps": torch.cat(seen.norms[:tenth]), f"last {tenth} steps": torch.cat(seen.norms[-tenth:])}
    ends = {label: norms[norms.isfinite() & (norms > 0)] for label, norms in ends.items()}  # the axis is logarithmic
    found = torch.cat([*ends.values(), torch.tensor([CLIP_NORM])]).log10()
    edges = torch.logspace(found.min().item() - 0.05, found.max().item() + 0.05, 41).tolist()
    for (label, norms), colour in zip(ends.items(), ("#2166ac", "#e08214"), strict=True):
        left.hist(norms.tolist(), edges, label=label, color=colour, alpha=0.6)
    left.axvline(CLIP_NORM, color="#404040", linestyle="--", label=f"clip norm {CLIP_NORM:g}")
    left.set(xscale="log", xlabel="norm of one sample's gradient", ylabel="samples")
    left.legend(frameon=False)
    right.plot(seen.steps, seen.accuracy, label="held-out digits", color="#2166ac", linewidth=2)
    right.set(ylim=(0, 1), xlabel="step", ylabel="accuracy")
    right.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"picture {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo.

    Args:
        arguments: The command line's; None takes those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m psg.demo", description="Check, time and use psg on real data.")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the picture (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls of each method (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("steps", "repeats"):
        if (given := getattr(options, name)) < 1:
            parser.error(f"--{name}: got {given}, expected 1 or more")

    torch.manual_seed(options.seed)
    data, model = digits(options.seed), network()
    check(model, data.train_x[:32], data.train_y[:32])
    compare(model, data.train_x[:256], data.train_y[:256], options.repeats)
    seen = train(model, data, options.steps, options.seed)
    print(
        f"\n        test accuracy {seen.accuracy[-1]:.3f} on {len(data.test_y)} held-out digits\n"
        f"        noise multiplier {NOISE_MULTIPLIER:g} (noise of standard deviation {NOISE_MULTIPLIER * CLIP_NORM:g} on each entry of"
        f" the clipped sum, clip norm {CLIP_NORM:g}),\n"
        f"        sample rate {SAMPLE_RATE:g}, {options.steps} steps: an accountant library turns these three into epsilon;\n"
        f"        psg has none and claims no epsilon\n"
    )
    picture(seen, options.out)


if __name__ == "__main__":
    main()
