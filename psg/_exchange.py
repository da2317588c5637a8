"""Whether the samples of a batch meet where no gradient tells: measured by exchanging most of them.

Whose each row is, gradients tell (psg/_owners.py). But samples may also meet before the first parameter does, as in x - x.mean(0), or in
integers that choose rows of a parameter: where the embeddings of two towers are multiplied each with each, a loss shares rows of the
parameters with the others, and none of data. So fn runs once more, without gradients, with the same random numbers, on a batch of the same
shape whose samples are every second one of the first quarter, each followed by copies of it, most by those of the last. Their losses are
to stay what they were.
"""

import torch
from torch import Tensor

from psg import _copies, _functorch, _random
from psg._call import Call
from psg._errors import StateError


def refuse_meeting(call: Call, losses: Tensor, before: _random.State, after: _random.State) -> None:
    """Refuse a function of a whole batch whose losses change when other samples do.

    Args:
        call: Of at least two samples.
        losses: What it has given, [n].
        before: The generators' states when it ran.
        after: The same when it had run.

    Raises:
        StateError: At least half of the losses that were compared have changed. Fewer may be a router's ties that rounding has turned.
    """
    every = torch.arange(call.n, device=losses.device)
    index = every.clamp(max=max(0, call.n // 4 - 1)) // 2 * 2  # in order, for samples that are sorted by their lengths
    kept = index == every
    now = _random.get_state(call.tensors)
    try:
        exchanged = _losses(call.take(index), before)
        # A function that has drawn other numbers, or that gives other losses for the same batch, cannot be compared.
        if not _random.same_state(_random.get_state(call.tensors), after) or not _differ(exchanged, losses, kept, call):
            return
        again = _losses(call.take(every), before)
    except Exception:
        return  # nor one that expects of its batch what this one does not have: fn was right on the batch at hand
    finally:
        _random.set_state(now)
    if not _differ(again, losses, kept, call) and _differ(exchanged, again, kept, call):
        raise StateError(
            f'method="batch": the losses of some samples change when others are exchanged (compared: {int(kept.sum())} of {call.n}). They '
            "meet in a statistic of the batch, say, in a loss that compares samples, or in an expert of limited room, so that no gradient "
            "tells what one sample does. Let losses[i] depend on sample i alone."
        )


def _losses(call: Call, state: _random.State) -> Tensor:
    """What fn gives with random numbers from this state; it finds all but the parameters in copies, for it may write into them."""
    _random.set_state(state)
    leaves = list(call.leaves)
    for position, (leaf, dim) in enumerate(zip(leaves, call.dims, strict=True)):
        if dim is None and position not in call.params and isinstance(leaf, Tensor):
            leaves[position] = _copies.copy_of(leaf)
    with torch.no_grad():
        return call.evaluate(leaves, batch=True, copies=True)[0]


def _differ(losses: Tensor, others: Tensor, kept: Tensor, call: Call) -> bool:
    """Whether at least half of those that are kept are further apart than rounding puts them."""
    losses, others = losses[kept], others[kept].to(losses)
    dtypes = {tensor.dtype for tensor in (*call.tensors, losses) if tensor.is_floating_point()}
    dtypes |= {torch.float32, _functorch.autocast_dtype(losses) or losses.dtype}  # fn may itself compute in float32
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    size = min(1.0, float(losses.abs().nan_to_num(0, 0).amax()))
    same = torch.isclose(losses, others, rtol=eps ** (2 / 3), atol=10 * eps * size, equal_nan=True)
    return 2 * int(same.count_nonzero()) <= len(same)
