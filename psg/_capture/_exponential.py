"""The derivative of the matrix exponential as a sum of few products, for gradients that are products themselves.

The gradient of A is the integral of exp(s A)^T G exp((1 - s) A)^T over s from 0 to 1, if G is that of exp(A): Higham, "Functions of
Matrices", 2008, equation 10.15. Gauss' rule gives it to rounding with few nodes, and as its weights are positive, nothing cancels. Of
G = l r^T each node makes one product.
"""

import math
from functools import cache

import torch
from torch import Tensor

from psg._torch._library import opaque


def sides_of(A: Tensor, left: Tensor, right: Tensor, most: float) -> tuple[Tensor, Tensor] | None:
    """The sides of the gradient of A from those of the gradient of exp(A): ([d,d], [n,t,d], [n,t,d]) -> two of [n,t*r,d].

    None if it takes more than `most` nodes r, or if the matrix is not finite.
    """
    matrices = _matrices(A, left.dtype, most)
    return None if matrices is None else (_by_each(left, matrices[0]), _by_each(right, matrices[1]))


def _by_each(rows: Tensor, matrices: Tensor) -> Tensor:
    """The products of rows [n, t, d] with each of the matrices [r, d, d] -> [n, t * r, d]."""
    r, _, size = matrices.shape
    products = rows.flatten(0, 1) @ matrices.movedim(0, 1).flatten(1)
    return products.reshape(len(rows), rows.shape[1] * r, size)


def _pull(A: Tensor, left: Tensor, right: Tensor) -> Tensor:
    matrices = _matrices(A, left.dtype, _MOST_NODES)
    if matrices is None:
        return _block(A, (left.mT @ right).to(A.dtype)).to(left.dtype)
    total = left.new_zeros(len(left), *A.shape)
    for one, other in zip(*matrices, strict=True):  # node by node: of all together the sides may be much larger than the gradient
        total.baddbmm_((left @ one).mT, right @ other)
    return total


_MOST_NODES = 64  # enough for singular values up to 60


def _block(A: Tensor, gradient: Tensor) -> Tensor:
    """The block beside the diagonal of exp([[A^T, G], [0, A^T]]), [n,d,d]. Higham, equation 3.16."""
    alike = A.mT.expand_as(gradient)
    rows = torch.cat([alike, gradient], 2), torch.cat([torch.zeros_like(gradient), alike], 2)
    return torch.linalg.matrix_exp(torch.cat(rows, 1))[:, : len(A), len(A) :].contiguous()


# A tracer, which cannot read the matrix, sees one op.
pulled = opaque("exponential_pulled", _pull, lambda A, left, right: left.new_empty(len(left), *A.shape))
"""The gradient itself, [n,d,d], from the same."""


def _matrices(A: Tensor, dtype: torch.dtype, most: float) -> tuple[Tensor, Tensor] | None:
    """What the rows of both sides are multiplied by at each node, two of [r,d,d]."""
    r = _nodes(A, most)
    if r is None:
        return None
    places, weights = torch.tensor(_gauss(r), dtype=A.dtype, device=A.device)[:, :, None, None]
    exps = torch.linalg.matrix_exp(places * A)
    return (weights * exps).to(dtype), exps.flip(0).mT.to(dtype)


def _nodes(A: Tensor, most: float) -> int | None:
    """How many nodes make the rule exact to rounding, whatever G is.

    Source:
        Davis and Rabinowitz, "Methods of Numerical Integration", 1984, section 2.7: the error, with (2 |A|)^(2r) times the integrand as
        its 2r-th derivative.
    """
    size, allowed = _largest_singular_value(A.double()), math.log(torch.finfo(A.dtype).eps / 8)
    if not math.isfinite(size):
        return None
    r, log = 1, math.log(2 * size) if size else -math.inf
    while 2 * r * log + 4 * math.lgamma(r + 1) - 3 * math.lgamma(2 * r + 1) - math.log(2 * r + 1) >= allowed:
        r += 1
        if r > most:
            return None
    return r


def _largest_singular_value(A: Tensor) -> float:
    """tr((A^T A)^8)^(1/16): never less than the largest singular value, and for 500 rows at most 1.5 times as much."""
    unit = A.abs().amax() if A.numel() else A.new_zeros(())
    part = A / torch.where(unit == 0, 1, unit)
    return (torch.linalg.matrix_norm(torch.linalg.matrix_power(part.mT @ part, 4)) ** (1 / 8) * unit).item()


@cache
def _gauss(r: int) -> tuple[list[float], list[float]]:
    """The nodes in [0, 1] and their weights. Golub and Welsch, "Calculation of Gauss Quadrature Rules", 1969."""
    k = torch.arange(1, r, dtype=torch.float64)
    beside = torch.zeros(r, r, dtype=torch.float64)
    beside.diagonal(1).copy_(k / (4 * k.square() - 1).sqrt())
    nodes, vectors = torch.linalg.eigh(beside, UPLO="U")
    return ((1 + nodes) / 2).tolist(), vectors[0].square().tolist()
