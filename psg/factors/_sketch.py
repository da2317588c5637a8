"""Random projections that work on factors of outer products: every entry of a gradient is added to one bucket, with a random sign.

Entry (a, b) of a matrix goes to bucket h(a) + k(b), modulo the number of buckets, with sign s(a) r(b). So the sketch of an outer product
is the cyclic convolution of the sketches of its two sides, and the outer product need not be materialised. The map does not depend on the
kind of factor: every factor of one gradient has the same sketch.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from psg._hardware import _machine
from psg.factors._arithmetic import widen

_PRIME = (1 << 31) - 1


class _Hash:
    """Random buckets and signs, independent for any four different integers below 2^31 - 1: polynomials of degree 3 modulo a prime.

    Source: Wegman & Carter, "New hash functions and their use in authentication and set equality", 1981.
    """

    def __init__(self, draw: random.Random) -> None:
        self._bucket, self._sign = ([draw.randrange(_PRIME) for _ in range(4)] for _ in range(2))

    def bucket(self, index: Tensor, dim: int) -> Tensor:
        return _polynomial(self._bucket, index) % dim

    def sign(self, index: Tensor) -> Tensor:
        return 1 - 2 * (_polynomial(self._sign, index) % 2)


def _polynomial(coefficients: Sequence[Any], index: Tensor) -> Tensor:
    value, *rest = coefficients
    for coefficient in rest:
        value = (value * index + coefficient) % _PRIME  # exact: below 2^62
    return value


class Sketch:
    """The random projection for one parameter: gradients, as matrices [shape[0], the rest], to `dim` numbers.

    E[sketch(u) . sketch(v)] = u . v, with a variance of at most 11 / dim |u|^2 |v|^2.

    Args:
        dim: The number of buckets.
        draw: The random generator that draws the two hashes.

    Source: Pham & Pagh, "Fast and Scalable Polynomial Kernels via Explicit Feature Maps", 2013 (TensorSketch); Avron, Nguyen & Woodruff,
    "Subspace Embeddings for the Polynomial Kernel", 2014, Lemma 1 (the variance); Charikar, Chen & Farach-Colton, "Finding Frequent Items
    in Data Streams", 2002 (CountSketch, the case of one side).
    """

    def __init__(self, dim: int, draw: random.Random) -> None:
        self.dim = dim
        self._sides = _Hash(draw), _Hash(draw)

    def matrices(self, values: Tensor) -> Tensor:
        """[n, a, b] -> [n, dim]."""
        n, a, b = values.shape
        total = widen(values).new_zeros(n, self.dim)
        size = _machine.items_at_a_time(values.device, n * b * values.element_size())
        rows, columns = torch.arange(a, device=values.device), torch.arange(b, device=values.device)
        for index, part in zip(rows.split(size), values.split(size, dim=1), strict=True):
            bucket, sign = self._at(index[:, None], columns)
            total = total.scatter_add(1, bucket.reshape(1, -1).expand(n, -1), (widen(part) * sign).flatten(1))
        return total

    def rows(self, index: Tensor, values: Tensor) -> Tensor:
        """Matrices given by rows: values [n, t, b] at the row index [n, t] -> [n, dim]."""
        bucket, sign = self._at(index[:, :, None], torch.arange(values.shape[2], device=values.device))
        return widen(values).new_zeros(len(values), self.dim).scatter_add(1, bucket.flatten(1), (widen(values) * sign).flatten(1))

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """sum_t left[n, t, a] right[n, t, b] -> [n, dim], by the convolution theorem."""
        n, t = left.shape[:2]
        if n * t == 0:
            return widen(left).new_zeros(n, self.dim)  # torch has no Fourier transform of an empty tensor
        size = _machine.items_at_a_time(left.device, t * self.dim * widen(left).element_size())
        chunks = zip(left.split(size), right.split(size), strict=True)
        return torch.cat([torch.fft.irfft((self._spectra(x, 0) * self._spectra(y, 1)).sum(1), n=self.dim) for x, y in chunks])

    def _spectra(self, values: Tensor, side: int) -> Tensor:
        """The Fourier transforms of the sketches of vectors: [n, t, d] -> [n, t, dim / 2 + 1]."""
        index, hashed = torch.arange(values.shape[2], device=values.device), self._sides[side]
        signed = widen(values) * hashed.sign(index)
        bucket = hashed.bucket(index, self.dim).expand(values.shape)
        return torch.fft.rfft(signed.new_zeros(*values.shape[:2], self.dim).scatter_add(2, bucket, signed))

    def _at(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Bucket and sign of the entries at (a, b)."""
        left, right = self._sides
        return (left.bucket(a, self.dim) + right.bucket(b, self.dim)) % self.dim, left.sign(a) * right.sign(b)


def sketch_side_by_side(rows: Tensor, sketches: Sequence[Sketch], shapes: Sequence[torch.Size]) -> Tensor:
    """The sum of the sketches of real gradients of several parameters, given side by side: [n, P] -> [n, dim].

    It is the same as by `Sketch.matrices`, but all hashes are computed at once.

    Args:
        rows: The gradients.
        sketches: One for each parameter.
        shapes: The parameters' shapes.
    """
    dim, counts = sketches[0].dim, torch.tensor([shape.numel() for shape in shapes], device="cpu")
    owner = torch.repeat_interleave(counts, output_size=rows.shape[1])
    place = torch.arange(len(owner), device="cpu") - (counts.cumsum(0) - counts)[owner]
    columns = torch.tensor([shape[1:].numel() for shape in shapes], device="cpu")[owner]
    index = torch.stack([place // columns, place % columns], dim=1)[:, :, None]  # a and b of every entry
    # [entry, side, bucket or sign, coefficient]
    hashes = [[[side._bucket, side._sign] for side in sketch._sides] for sketch in sketches]
    coefficients = torch.tensor(hashes, device="cpu")[owner]
    value = _polynomial(coefficients.unbind(-1), index)
    bucket, sign = (value[:, :, 0] % dim).sum(1) % dim, (1 - 2 * (value[:, :, 1] % 2)).prod(1)
    signed = widen(rows) * sign.to(rows.device)
    return signed.new_zeros(len(rows), dim).scatter_add(1, bucket.to(rows.device).expand(signed.shape), signed)
