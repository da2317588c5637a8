"""psg's transforms as primitives of plain autograd: a fast forward pass, and a backward pass through the reference composition.

Results of the capture pass have no history. If an input requires grad, one `autograd.Function` attaches them to the graph. Its backward,
which runs only if it is asked for, differentiates the reference: `vmap(grad(fn))`, or, where vmap cannot run fn, a loop over the samples.
Inside torch.func transforms the reference runs from the start, since they can differentiate it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from psg import _trees
from psg._call import Call
from psg._errors import code_of, warn_once
from psg._torch import _ambient, _functorch, _random
from psg._watch import _pass
from psg._watch._effects import Attempt
from psg._watch._outside import Recorded, Replaced
from psg.rules._registry import are_disabled

Compute = Callable[[Call, str], Any]


def differentiable(compute: Compute, call: Call, method: str, attach: bool) -> Any:
    """`compute(call, method)`, with a derivative.

    Args:
        compute: Maps a call and a method to a tree of tensors (other leaves pass through).
        call: The call.
        method: As `psg.per_sample_grad` takes it.
        attach: Whether the tree is the same for every method. Otherwise a result that needs a derivative comes from the reference alone.

    Returns:
        The tree that compute returns.
    """
    if _functorch.is_transformed() or not torch.is_grad_enabled():
        return compute(call, method)
    # Every method except capture gives differentiable results itself.
    reference = "auto" if method == "capture" else method
    needed = call.needs_derivative
    if needed and not attach:
        _warn(call, method, [], _DENSE)
        return compute(call, reference)
    outside = Recorded()
    before, pythons = _random.get_state(call.tensors), _random.get_python_state() if needed else None
    with torch.no_grad(), Attempt() as first:
        result = compute(call.watched_by(outside), method)
    outside.conclude()
    if not needed and not outside.found:
        return result
    drew = not _random.same_state(before, _random.get_state(call.tensors))
    if pythons is not None and not _random.same_python_state(pythons, _random.get_python_state()):
        _random.set_python_state(pythons)
        drew = True
    if not attach or drew:
        # fn draws random numbers, and another pass may draw them in another order: value and derivative must come from one pass.
        _warn(call, method, outside.found, _DRAWN if attach else _DENSE)
        first.give_up()
        _random.set_state(before)
        return compute(call.watched_by(Replaced(outside.found, outside.found)), reference)

    def again(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        own, others = inputs[: len(call.tensors)], list(inputs[len(call.tensors) :])
        renewed = replace(call, leaves=_trees.fill(call.leaves, own), outside=Replaced(outside.found, others))
        return _trees.tensors_in(_trees.flatten(compute(renewed, reference))[0])

    leaves, spec = _trees.flatten(result)
    attached = _Primitive.apply(again, _trees.tensors_in(leaves), *call.tensors, *outside.found)
    return _trees.unflatten(spec, _trees.fill(leaves, attached))


_DENSE = "the gradients have a history, and come from vmap(grad), dense"
_DRAWN = "the result has a history, and comes from vmap(grad): fn draws random numbers, and a later pass may draw them in another order"


def _warn(call: Call, method: str, outside: list[Tensor], result: str) -> None:
    """Warn of a step down the ladder that only a derivative of the result needs, which the caller may not want."""
    if method not in ("auto", "capture") or _pass.is_open() or are_disabled():
        return
    own = next((i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
    what = f"fn closes over a tensor of shape {tuple(outside[0].shape)} that" if own is None else call.paths[own]
    warn_once(
        (code_of(call.fn), result),
        f"{call.name}: {what} requires grad, so {result}. If you want no derivative of it, pass detached tensors, as psg.stateless returns "
        "them, detach what fn closes over (module.requires_grad_(False)), or call under torch.no_grad(); if you do, method='vmap' says so.",
    )


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
        with _ambient.off(), torch.enable_grad():  # fn runs under the autocast of its call, whatever holds now
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
