"""Linear systems A X = B: torch.linalg.solve and solve_triangular, with the matrix as the parameter.

With C the cotangent of X: grad B = A^-T C and grad A = -(grad B) X^T; of a triangular matrix, the entries of its triangle (M. Giles, "An
extended collection of matrix derivative results for forward and reverse mode algorithmic differentiation", 2008, section 2.3). A matrix
that all samples share is factorised once; vmap would do that for each.
"""

from collections.abc import Callable
from functools import cache, partial
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor

from psg.factors import Dense, Factor
from psg.factors._maps import scaled
from psg.rules._registry import reshape, rule
from psg.rules.products import factor_of

Solve = Callable[[Tensor, bool], Tensor]
"""X with A X = B, or with A^T X = B: ([*,i,k], whether A is transposed) -> [*,i,k], for a matrix of shape [*,i,i]."""


def takes_vectors(A: torch.Size, B: torch.Size) -> bool:
    """Whether torch.linalg.solve takes sides of this shape for vectors, not matrices, given the matrix' shape."""
    return len(B) == 1 or B == A[:-1]


def lu_factors(A: Tensor, check_errors: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """The LU factors, pivots and errors of a matrix.

    Raises:
        torch.linalg.LinAlgError: The matrix is singular, as from torch.linalg.solve, if this is to be checked.
    """
    factors = torch.linalg.lu_factor_ex(A)
    if check_errors:
        torch._linalg_check_errors(factors[2], "torch.linalg.solve", is_matrix=A.ndim == 2)  # pyright: ignore[reportPrivateImportUsage]
    return factors


def by_lu(A: Tensor) -> Solve:
    """The solutions for any matrix, which is factorised when the first is needed.

    Raises:
        torch.linalg.LinAlgError: The matrix is singular, as from torch.linalg.solve.
    """
    factors = cache(partial(lu_factors, A))
    return lambda B, transposed: torch.linalg.lu_solve(*factors()[:2], B, adjoint=transposed)


def by_triangle(A: Tensor, upper: bool, unitriangular: bool) -> Solve:
    """The solutions for a triangular matrix."""

    def solve(B: Tensor, transposed: bool) -> Tensor:
        matrix = A.mT if transposed else A
        return torch.linalg.solve_triangular(matrix, B, upper=upper != transposed, unitriangular=unitriangular)

    return solve


def triangle(A: Tensor, upper: bool, unitriangular: bool) -> Tensor:
    """One for the entries of a triangular matrix that its solutions depend on, zero for the others."""
    entries = torch.ones(A.shape[-2:], dtype=A.dtype, device=A.device)
    return entries.triu(int(unitriangular)) if upper else entries.tril(-int(unitriangular))


def solve_all(solve: Solve, sides: Tensor, dims: int, transposed: bool = False) -> Tensor:
    """The solutions for [n,*,i,k], all columns at once, for a matrix of that many dimensions."""
    rows = sides.flatten(0, -1 - dims)  # samples, and what else the matrix does not have
    solved = solve(rows.movedim(0, -2).flatten(-2), transposed)
    return solved.unflatten(-1, (len(rows), sides.shape[-1])).movedim(-2, 0).reshape(sides.shape)


def _run(A: Tensor, B: Tensor, solve: Solve, left: bool, is_vector: bool = False, entries: Tensor | None = None) -> Any:
    """The op for a matrix that all samples share; with `entries`, the gradient has only these."""
    b = B.unsqueeze(-1) if is_vector else B if left else B.mT
    if A.ndim < 2 or b.ndim <= A.ndim or b.shape[-A.ndim : -1] != A.shape[:-1] or A.shape[-2] != A.shape[-1]:
        return NotImplemented
    if A.dtype != B.dtype or A.is_complex():
        return NotImplemented

    x = solve_all(solve, b, A.ndim, transposed=not left)  # X or, from the right, X^T with A^T X^T = B^T
    own = ascii_lowercase[: A.ndim - 2]
    shared = "N" + ascii_lowercase[A.ndim - 2 : b.ndim - 3] + own

    def build(cotangent: Tensor) -> Factor:
        c = cotangent.unsqueeze(-1) if is_vector else cotangent if left else cotangent.mT
        to_b = -solve_all(solve, c, A.ndim, transposed=left)
        factor = factor_of(to_b, f"{shared}RK", x, f"{shared}CK", own + ("RC" if left else "CR"), A.shape)
        if entries is None:
            return factor
        return scaled(factor, entries) or Dense(factor.materialize() * entries)

    # A copy, since fn may write into it, in the order of torch's own output.
    if is_vector:
        return x.squeeze(-1).clone(memory_format=torch.contiguous_format), {"A": build}
    output = x if left else x.mT
    if left or entries is not None:
        output = output.mT.clone(memory_format=torch.contiguous_format).mT
    else:
        output = output.clone(memory_format=torch.contiguous_format)
    return reshape(output, output.shape), {"A": build}


@rule(torch.linalg.solve, params=("A",), frozen=True, differentiable=True)
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Any:
    """([*,i,i], [n,*,i,k] or [n,*,i]) -> as B; from the right [n,*,k,i]."""
    is_vector = takes_vectors(A.shape, B.shape[1:])
    return NotImplemented if is_vector and not left else _run(A, B, by_lu(A), left, is_vector)


@rule(torch.linalg.solve_triangular, params=("A",), frozen=True, differentiable=True)
def solve_triangular(A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """([*,i,i], [n,*,i,k]) -> [n,*,i,k]; from the right [n,*,k,i]."""
    if A.ndim < 2 or B.ndim < 3:
        return NotImplemented
    return _run(A, B, by_triangle(A, upper, unitriangular), left, entries=triangle(A, upper, unitriangular))
