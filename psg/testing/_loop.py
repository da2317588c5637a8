"""The oracle: autograd called once for each sample, on a contiguous copy of it. No vmap, no rule, no batch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from psg._call import Options, Paths, lay_out
from psg._errors import InputError
from psg._ladder._guards import Repaired
from psg._torch import _ambient, _autograd, _random
from psg._trees import NAMESPACE, Tree, flatten, tensors_in, unflatten
from psg._watch import _pass
from psg._watch._copies import contiguous_copy_of, copy_of
from psg._watch._effects import forgetting

tree_map: Any = partial(optree.tree_map, namespace=NAMESPACE)  # optree's own annotations do not allow users' trees


def loop_value_and_grad(fn: Callable, argnums: int | tuple[int, ...] = 0, *, in_dims: Any = None, has_aux: bool = False) -> Callable:
    """Values and per-sample gradients, by one call of autograd for each sample.

    `grads[n] = d fn(params, *batch[n]) / d params`, sample after sample. Not differentiable itself.

    Args:
        fn: Function of one sample that returns a scalar, or `(scalar, aux)` with `has_aux`.
        argnums: Position, or positions, of the arguments to differentiate.
        in_dims: As in `psg.per_sample_grad`; None shares the `argnums` arguments and batches every tensor of the others along dimension 0.
        has_aux: Whether `fn` returns `(scalar, aux)`, where `aux` is a tree of tensors.

    Returns:
        A function of `(*args, **shared)` that returns `(values [n], grads)`, or `((values, aux), grads)` with `has_aux`; every leaf of
        `grads` is [n, *shape] in the dtype of its parameter. For n = 0 `fn` is not called: gradients are [0, *shape], and `aux`, whose
        structure is unknown, is None.

    Raises:
        InputError: An option has a value that is not allowed. At a call: an argument does not fit (as in `psg.per_sample_grad`), or `fn`
            does not return a scalar tensor, real and floating.

    Example:
        >>> square = lambda w, x: (w * x).sum() ** 2
        >>> values, grads = loop_value_and_grad(square)(torch.ones(2), torch.tensor([[1., 2.], [0., 1.]]))
        >>> values.tolist(), grads.tolist()
        ([9.0, 1.0], [[6.0, 12.0], [0.0, 2.0]])
    """
    options = Options(argnums, in_dims, has_aux)

    def one(batch: Batch, i: int, shared: Any, differentiated: bool = False) -> tuple[Any, Any, Any]:
        """Value, aux and gradient of sample i; once more, `differentiated`, if fn differentiates gradients that only this makes right."""
        called, state = _pass.Pass(), _random.get_state(tensors_in(batch.leaves))
        # Autograd is on even if the caller has switched it off: inference mode would make every gradient a silent zero.
        with torch.inference_mode(False), torch.enable_grad(), forgetting():
            arguments = batch.sample(i)
            targets = [tree_map(Tensor.requires_grad_, arguments[k]) for k in batch.positions]
            with (
                _ambient.uncompiled(),
                _ambient.unmoved,
                _autograd.in_this_thread(),
                _pass.opened(called),
                _ambient.linearizing,
                Repaired(differentiated) as repaired,
            ):
                value, aux = fn(*arguments, **shared) if has_aux else (fn(*arguments, **shared), None)
            if repaired.is_misderived:
                _random.set_state(state)
                return one(batch, i, shared, differentiated=True)
            if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
                got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
                raise InputError(f"loop_grad: fn must return a real floating-point scalar tensor for one sample, got {got}")
            with called.again(), Repaired(differentiated):
                return value.detach(), tree_map(Tensor.detach, aux), _grad(value, targets)

    def looped(*args: Tree, **shared: Any) -> tuple[Any, Tree]:
        batch = Batch(fn, args, options)
        samples = [one(batch, i, shared) for i in range(batch.n)]
        if samples:
            values, auxes, rows = zip(*samples, strict=True)
            values, aux, grads = torch.stack(values), _stack(auxes), _stack(rows)
        else:
            grads = [batch.empty()[k] for k in batch.positions]
            values, aux = flatten(grads)[0][0].real.new_zeros(0), None
        grads = grads[0] if isinstance(options.argnums, int) else tuple(grads)
        return ((values, aux) if has_aux else values), grads

    return looped


def loop_grad(fn: Callable, argnums: int | tuple[int, ...] = 0, *, in_dims: Any = None, has_aux: bool = False) -> Callable:
    """Per-sample gradients, by one call of autograd for each sample.

    `grads[n] = d fn(params, *batch[n]) / d params`.

    Args:
        fn: As in `loop_value_and_grad`.
        argnums: As in `loop_value_and_grad`.
        in_dims: As in `loop_value_and_grad`.
        has_aux: As in `loop_value_and_grad`.

    Returns:
        A function of `(*args, **shared)` that returns `grads`, or `(grads, aux)` with `has_aux`.

    Raises:
        InputError: As in `loop_value_and_grad`.

    Example:
        >>> loop_grad(lambda w, x: w * x)(torch.tensor(2.0), torch.tensor([1.0, 3.0]))
        tensor([1., 3.])
    """
    both = loop_value_and_grad(fn, argnums, in_dims=in_dims, has_aux=has_aux)

    def looped(*args: Tree, **shared: Any) -> Tree:
        values, grads = both(*args, **shared)
        return (grads, values[1]) if has_aux else grads

    return looped


class Batch:
    """The arguments of a call, cut into samples.

    Attributes:
        n: Number of samples.
        positions: Those of the arguments to differentiate.
        leaves: The leaves of the arguments.
        dims: For each leaf its batch dimension, None where it is shared.
        spec: The structure of the arguments.
    """

    def __init__(self, fn: Callable, args: Any, options: Options):
        layout = lay_out("loop_grad", options, args, Paths(fn, args))
        self.leaves, self.spec, self.dims, self.positions, self.n = layout.leaves, layout.spec, layout.dims, layout.numbers, layout.n

    def pairs(self) -> list[tuple[Any, int | None]]:
        """Every leaf with its batch dimension, None where it is shared."""
        return list(zip(self.leaves, self.dims, strict=True))

    def sample(self, i: int) -> list:
        """The arguments of sample i, every tensor of them a copy."""

        def own(leaf: Any, dim: int | None) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if dim is None:
                return copy_of(leaf.detach())
            # Contiguous: eager float64 convolutions give a wrong weight gradient for a batch of one that is a slice of a channels_last
            # batch.
            return contiguous_copy_of(leaf.detach().select(dim, i))

        return list(unflatten(self.spec, [own(leaf, dim) for leaf, dim in self.pairs()]))

    def empty(self) -> list:
        """The arguments with [0, *shape] in place of every tensor: the gradients for n = 0."""

        def none_of(leaf: Any, dim: int | None) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.new_zeros(0, *(leaf.shape if dim is None else leaf.movedim(dim, 0).shape[1:]))

        return list(unflatten(self.spec, [none_of(leaf, dim) for leaf, dim in self.pairs()]))


def _grad(value: Tensor, targets: list[Tree]) -> list[Tree]:
    leaves, spec = flatten(targets)
    found = _pass.gradients(value, leaves)
    return unflatten(spec, [torch.zeros_like(leaf) if own is None else own for leaf, own in zip(leaves, found, strict=True)])


def _stack(rows: Sequence[Tree]) -> Tree:
    return tree_map(lambda *leaves: torch.stack(leaves), *rows)
