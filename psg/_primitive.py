"""psg's transforms as primitives of plain autograd: a fast forward, and the reference composition for whoever differentiates.

The capture pass has no history of its own. Where an input requires grad, the whole transform becomes one `autograd.Function`: its forward
is the fast pass, and its backward, computed only if it is asked for, is that of `vmap(grad(fn))`. Inside torch.func transforms the
reference runs from the start; they see through it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from psg import _functorch, _random, _trees
from psg._call import Call
from psg._errors import StateError

Compute = Callable[[Call, str], Any]


def differentiable(compute: Compute, call: Call, method: str) -> Any:
    """`compute(call, method)`, with a derivative.

    Args:
        compute: From a call and a method to a tree of tensors (other leaves pass through); differentiable under method="vmap".
        call: The call.
        method: As `psg.per_sample_grad` takes it.

    Returns:
        What compute returns.
    """
    if _functorch.transform_active():
        return compute(call, "vmap" if method == "auto" else method)
    if method == "vmap" or call.n == 0 or not needs_derivative(call):
        return compute(call, method)
    tensors = [call.leaves[i] for i in call.tensors]

    skeleton: list[Any] = []

    def run(tensors: tuple[Tensor, ...], method: str) -> tuple[Tensor, ...]:
        leaves, spec = _trees.flatten(compute(call.with_tensors(tensors), method))
        skeleton[:] = [leaves, spec]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    reference = "batch" if method == "batch" else "vmap"
    results = iter(_Primitive.apply(run, method, reference, *tensors))
    leaves, spec = skeleton
    return _trees.unflatten(spec, [next(results) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def needs_derivative(call: Call) -> bool:
    """Whether someone may differentiate what comes out: a transform, or plain autograd."""
    return _functorch.transform_active() or (torch.is_grad_enabled() and any(call.leaves[i].requires_grad for i in call.tensors))


class _Primitive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], method: str, reference: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        before = _random.get_state(tensors)
        outputs = run(tensors, method)
        if not _random.same_state(before, _random.get_state(tensors)):
            # fn draws random numbers. The backward pass replays the reference from this state, so the forward pass must be the
            # reference too: another rung may draw them in another order.
            _random.set_state(before)
            if reference == "batch":
                raise StateError('method="batch": fn draws random numbers, which a derivative of the result could not draw again.')
            outputs = run(tensors, reference)
        ctx.run, ctx.reference = run, reference
        ctx.state = before
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(output for output in outputs if not _differentiable(output)))
        return tuple(output.detach().clone() if output.requires_grad or any(output is t for t in tensors) else output for output in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        wanted = [i for i, tensor in enumerate(tensors) if ctx.needs_input_grad[i + 3]]

        def reference(*inputs: Tensor) -> tuple[Tensor, ...]:
            full = list(tensors)
            for i, tensor in zip(wanted, inputs, strict=True):
                full[i] = tensor
            return tuple(output for output in ctx.run(tuple(full), ctx.reference) if _differentiable(output))

        with _random.replay(ctx.state):
            _, pull_back, *_ = torch.func.vjp(reference, *(tensors[i] for i in wanted))
        cotangents = tuple(c for c in cotangents if c is not None and _differentiable(c))
        gradients = dict(zip(wanted, pull_back(cotangents), strict=True))
        return (None, None, None, *(gradients.get(i) for i in range(len(tensors))))


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
