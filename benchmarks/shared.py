"""Measures models that call a layer several times for one sample, as ratios to plain training of the same batch.

    python benchmarks/shared.py --threads 2 --repeats 9 --out results/shared.json

Recurrent convolutions, deep equilibrium models, towers that share their weights, heads over a pyramid of resolutions, shared transformer
blocks. The gradient of a shared layer is a sum over its calls. Measured as in `inside.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from inside import Problem, main
from torch import Tensor, nn
from torch.func import functional_call


def of_module(model: nn.Module, *batch: Tensor) -> Problem:
    """A module from a batch to losses [n]."""

    def fn(params: Any, *sample: Tensor) -> Tensor:
        return functional_call(model, params, tuple(tensor[None] for tensor in sample))[0]

    return Problem(model, batch, fn, lambda params, *batch: functional_call(model, params, batch))


class ConvLSTM(nn.Module):
    """Predicts the last of the frames (Shi et al., "Convolutional LSTM Network", 2015)."""

    def __init__(self, width: int):
        super().__init__()
        self.gates = nn.Conv2d(1 + width, 4 * width, 3, padding=1)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        n, steps, *size = frames.shape
        h = c = frames.new_zeros(n, self.head.in_channels, *size)
        for t in range(steps - 1):
            i, f, g, o = self.gates(torch.cat([frames[:, t, None], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return (self.head(h)[:, 0] - frames[:, -1]).square().mean((1, 2))


class Equilibrium(nn.Module):
    """Iterations of one residual block of convolutions (Bai, Koltun & Kolter, "Multiscale Deep Equilibrium Models", 2020), unrolled."""

    def __init__(self, width: int, iterations: int):
        super().__init__()
        self.stem, self.iterations = nn.Conv2d(3, width, 3, padding=1), iterations
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(8, width), nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        z = torch.zeros_like(x)
        for _ in range(self.iterations):
            z = self.norm(F.relu(z + self.second(F.relu(self.first(z)) + x)))
        return F.cross_entropy(self.head(z.mean((2, 3))), labels, reduction="none")


class Towers(nn.Module):
    """A contrastive loss of three images, the towers of which share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 64, bias=False)),
        )

    def forward(self, images: Tensor) -> Tensor:
        anchor, near, far = (self.tower(images[:, i]) for i in range(3))
        return F.triplet_margin_loss(anchor, near, far, margin=10.0, reduction="none")


class Pyramid(nn.Module):
    """A head that all levels of a pyramid of features share (Lin et al., "Focal Loss for Dense Object Detection", 2017)."""

    def __init__(self, width: int):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.head = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 5, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        levels = [self.stem(images)]
        for _ in range(3):
            levels.append(F.avg_pool2d(levels[-1], 2))
        return sum((self.head(level).square().mean((1, 2, 3)) for level in levels), start=images.new_zeros(len(images)))


class Repeated(nn.Module):
    """A transformer whose layers are one layer (Lan et al., "ALBERT", 2020)."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = layers
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True, bias=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        for _ in range(self.layers):
            tokens = self.layer(tokens)
        return F.cross_entropy(self.head(tokens.mean(1)), labels, reduction="none")


def conv_lstm() -> Problem:
    """Nine steps on frames of 16 x 16, n = 16."""
    return of_module(ConvLSTM(32), torch.randn(16, 10, 16, 16))


def equilibrium() -> Problem:
    """Twelve iterations on images of 16 x 16, n = 16."""
    return of_module(Equilibrium(32, 12), torch.randn(16, 3, 16, 16), torch.randint(10, (16,)))


def towers() -> Problem:
    """Triples of images of 32 x 32, n = 16."""
    return of_module(Towers(), torch.randn(16, 3, 3, 32, 32))


def pyramid() -> Problem:
    """Four levels from 32 x 32 on, n = 16."""
    return of_module(Pyramid(32), torch.randn(16, 3, 32, 32))


def repeated() -> Problem:
    """Six times one layer of width 128 on 64 tokens, n = 16."""
    return of_module(Repeated(128, 6), torch.randn(16, 64, 128), torch.randint(10, (16,)))


PROBLEMS = {make.__name__: make for make in (conv_lstm, equilibrium, towers, pyramid, repeated)}

if __name__ == "__main__":
    main(PROBLEMS, __doc__)
