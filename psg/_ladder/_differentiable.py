"""psg's transforms as primitives of plain autograd: a forward pass without a history, and a backward pass that runs fn again with one.

If an input requires grad, one `autograd.Function` attaches the results to the graph. Its backward, which runs only if it is asked for,
computes them again with a history, and differentiates that: callers who want no derivative, but whose parameters require grad, pay nothing.
Inside torch.func transforms, which differentiate what runs in them, the first pass has a history.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from psg import _trees
from psg._call import Call
from psg._ladder._ladder import AGAIN
from psg._torch import _ambient, _functorch, _random
from psg._torch._ops import foreign_mode
from psg._watch._effects import Attempt
from psg._watch._outside import Recorded, Replaced

Compute = Callable[[Call, str], Any]


def differentiable(compute: Compute, call: Call, method: str) -> Any:
    """`compute(call, method)`, with a derivative.

    Args:
        compute: Maps a call and a method to a tree of tensors (other leaves pass through).
        call: The call.
        method: As `psg.per_sample_grad` takes it.

    Returns:
        The tree that compute returns.
    """
    if _functorch.is_transformed() or not torch.is_grad_enabled():
        return compute(call, method)
    # A tree of factors is not the same with and without a history: if it needs a derivative, it is computed once, with a history. So is
    # everything under a function mode of the caller's, which has ended when a backward pass runs fn again.
    needed, attach = call.needs_derivative, call.kept != "factors" and foreign_mode() is None
    # And where fn may ask whether a sample requires grad: value and derivative must come from one path.
    if needed and (not attach or any(t.requires_grad for t, dim in zip(call.tensors, call.tensor_dims, strict=True) if dim is not None)):
        return compute(call, method)
    outside = Recorded()
    before = _random.Snapshot.take(call.tensors, pythons=needed)
    with torch.no_grad(), Attempt() as first:
        result = compute(call.watched_by(outside), method)
    outside.conclude(call.fn)
    if not needed and not outside.found:
        return result
    if not attach or not before.equals(before.now()):
        # fn draws random numbers, and another pass may draw them in another order: value and derivative must come from one pass.
        first.give_up()
        before.restore()
        return compute(call.watched_by(Replaced(outside.found, outside.found)), method)

    as_now = _ambient.as_now()

    def again(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        own, others = inputs[: len(call.tensors)], list(inputs[len(call.tensors) :])
        renewed = replace(call, leaves=_trees.fill(call.leaves, own), outside=Replaced(outside.found, others))
        with as_now():
            return _trees.all_tensors(compute(renewed, AGAIN if method in ("auto", "capture") else method))

    leaves, spec = _trees.flatten(result)
    attached = _Primitive.apply(again, _trees.tensors_in(leaves), *call.tensors, *outside.found)
    return _trees.unflatten(spec, _trees.fill(leaves, attached))


class _Primitive(torch.autograd.Function):
    """Attaches outputs that have been computed already to the graph; its backward calls `again` for outputs with a history."""

    @staticmethod
    def forward(ctx: Any, again: Callable[..., list[Tensor]], outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.again = again
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        # Views made here could not be written into by the caller; `.data` is the same memory as no view.
        outputs = [output.data if output._is_view() else output for output in outputs]
        ctx.mark_non_differentiable(*(output for output in outputs if not _trees.is_inexact(output)))
        return tuple(output.clone() if any(output is tensor for tensor in inputs) else output for output in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        create_graph, wanted = torch.is_grad_enabled(), ctx.needs_input_grad[2:]
        # fn runs under the autocast of its call, whatever holds now, and classes handle its ops: where torch calls for the backward pass
        # from such a class's handler of `torch.autograd.grad`, they do not.
        with _ambient.off(), torch._C._EnableTorchFunction(), torch.enable_grad():
            # Aliases: this gradient stops at them; it goes on to the originals if the backward pass is itself differentiated.
            inputs = tuple(tensor.view_as(tensor) if want else tensor for tensor, want in zip(ctx.saved_tensors, wanted, strict=True))
            outputs = ctx.again(inputs)
            pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
            if not pairs:
                return (None,) * (2 + len(inputs))
            outputs, cotangents = zip(*pairs, strict=True)
            targets = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
            gradients = iter(torch.autograd.grad(outputs, targets, cotangents, create_graph=create_graph, allow_unused=True))
        return (None, None, *(next(gradients) if want else None for want in wanted))
