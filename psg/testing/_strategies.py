"""Hypothesis strategies for shapes, tensors and batches; hypothesis itself is imported when one is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from psg._errors import InputError, as_integer

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def shapes(min_dims: int = 1, max_dims: int = 3, max_side: int = 4) -> SearchStrategy[tuple[int, ...]]:
    """Strategy for shapes without empty sides.

    Args:
        min_dims: Fewest dimensions.
        max_dims: Most dimensions.
        max_side: Largest side.

    Returns:
        A strategy of tuples of integers.

    Example:
        >>> from hypothesis import given
        >>> @given(shape=shapes(max_dims=2))
        ... def test(shape):
        ...     assert len(shape) in (1, 2) and torch.zeros(shape).numel() > 0
        >>> test()
    """
    from hypothesis import strategies as st

    return st.lists(st.integers(1, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def tensors(shape: Sequence[int], dtype: torch.dtype | None = None, high: int | None = None) -> SearchStrategy[Tensor]:
    """Strategy for tensors of one shape: normal values, or integers below `high`, from a drawn seed.

    Args:
        shape: The shape.
        dtype: The dtype; None takes torch's default.
        high: For class indices and token ids: draw integers in [0, high) instead.

    Returns:
        A strategy of CPU tensors.

    Example:
        >>> from hypothesis import given
        >>> @given(labels=tensors((5,), high=10))
        ... def test(labels):
        ...     assert labels.shape == (5,) and labels.max() < 10
        >>> test()
    """
    from hypothesis import strategies as st

    def make(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if high is not None:
            return torch.randint(high, tuple(shape), generator=generator, dtype=dtype or torch.int64)
        return torch.randn(tuple(shape), generator=generator, dtype=dtype)

    return st.integers(0, 2**16).map(make)


def batches(
    *fields: Sequence[int] | tuple[Sequence[int], int], max_samples: int = 4, dtype: torch.dtype | None = None
) -> SearchStrategy[tuple[Tensor, ...]]:
    """Strategy for whole batches, the empty batch and the batch of one included.

    For a classifier of 28 x 28 images: `@given(batch=psg.testing.batches((1, 28, 28), ((), 10)))`, then `psg.check(loss)(params, *batch)`.

    Args:
        fields: For each batched argument the shape of one sample, or `(shape, high)` for integers below `high`.
        max_samples: Largest batch.
        dtype: Dtype of the fields that are not integers; None takes torch's default.

    Returns:
        A strategy of tuples of [n, *shape] tensors, one a field, with one n for all.

    Raises:
        InputError: A field is neither a shape nor such a pair.

    Example:
        >>> from hypothesis import given
        >>> @given(batch=batches((1, 8, 8), ((), 10)))
        ... def test(batch):
        ...     images, labels = batch
        ...     assert images.shape[1:] == (1, 8, 8) and len(images) == len(labels) <= 4
        >>> test()
    """
    from hypothesis import strategies as st

    def split(field: Any) -> tuple[Sequence[int], int | None]:
        shape, high = field if isinstance(field, Sequence) and len(field) == 2 and isinstance(field[0], Sequence) else (field, None)
        is_shape = isinstance(shape, Sequence) and all(as_integer(size, least=0) is not None for size in shape)
        if not is_shape or high is not None and as_integer(high, least=1) is None:
            raise InputError(
                f"psg.testing.batches({field!r}): expected for each argument the shape of one sample, as in batches((1, 28, 28), ()), or "
                "(shape, high) for integers below high."
            )
        return shape, high

    parts = [split(field) for field in fields]

    def of(n: int) -> SearchStrategy[tuple[Tensor, ...]]:
        return st.tuples(*(tensors((n, *shape), dtype if high is None else None, high) for shape, high in parts))

    return st.integers(0, max_samples).flatmap(of)


def layouts(tensor: Tensor) -> SearchStrategy[Tensor]:
    """Strategy for tensors of equal values in different memory: contiguous, permuted, strided, offset.

    Args:
        tensor: The values.

    Returns:
        A strategy of tensors equal to `tensor`.

    Example:
        >>> from hypothesis import given
        >>> @given(x=layouts(torch.eye(3)))
        ... def test(x):
        ...     assert torch.equal(x, torch.eye(3))
        >>> test()
    """
    from hypothesis import strategies as st

    def permuted(x: Tensor) -> Tensor:
        axes = tuple(reversed(range(x.dim())))
        return x.permute(axes).contiguous().permute(axes)

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]

    def offset(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)

    return st.sampled_from([torch.Tensor.contiguous, permuted, strided, offset]).map(lambda form: form(tensor))
