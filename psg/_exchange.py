"""Whether the samples of a batch meet where no gradient tells: measured by exchanging most of them.

Whose each row is, gradients tell (psg/_owners.py). But samples may also meet before the first parameter does, as in x - x.mean(0), or in
integers that choose rows of a parameter: where the embeddings of two towers are multiplied each with each, a loss shares rows of the
parameters with the others, and none of data. So fn runs once more on a batch of the same shape, in which a quarter of the samples stand
where they stood, and the others are copies of those. The losses of that quarter are to stay what they were.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
    kept = _kept(call.n).to(losses.device)
    # The one of them that stands before: in order, for samples that are sorted by their lengths.
    index = kept[(torch.searchsorted(kept, every, right=True) - 1).clamp(min=0)]
    now = _random.get_state(call.tensors)
    try:
        # Masks of dropout may fall on other samples where fn puts them in an order: then neither batch has any.
        expected = losses if _random.same_state(before, after) else _losses(call.take(every))
        exchanged = _losses(call.take(index))
        if _agree(exchanged, expected, kept, call):
            return
        if not _random.same_state(now, _random.get_state(call.tensors)) or not _agree(_losses(call.take(every)), expected, kept, call):
            return  # other random numbers, or another value each time: there is nothing to compare with
    except Exception:
        return  # fn expects of a batch what this one does not have: it was right on the batch at hand
    finally:
        _random.set_state(now)
    raise StateError(
        f'method="batch": the losses of some samples change when others are exchanged (compared: {len(kept)} of {call.n}). They meet in a '
        "statistic of the batch, say, in a loss that compares samples, or in an expert of limited room, so that no gradient tells what one "
        "sample does. Let losses[i] depend on sample i alone."
    )


def _kept(n: int) -> Tensor:
    """The samples that are not exchanged, in order: without the first, and scattered, so that the neighbours of most are."""
    scattered = 1 + torch.randperm(n - 1, generator=torch.Generator("cpu").manual_seed(n), device="cpu")
    return scattered[: max(1, n // 4)].sort().values


def _losses(call: Call) -> Tensor:
    """What fn gives without dropout; it finds all but the parameters in copies, for it may write into them."""
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    for position, (leaf, dim) in enumerate(zip(leaves, call.dims, strict=True)):
        if dim is None and position not in call.params and isinstance(leaf, Tensor):
            leaves[position] = _copies.copy_of(leaf)
    with torch.enable_grad(), _Undropped():  # fn may differentiate for its data
        return call.evaluate(leaves, batch=True, copies=True)[0].detach()


class _Undropped(TorchFunctionMode):
    """Takes dropout for what it is in evaluation mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is F.scaled_dot_product_attention:
            kwargs = kwargs | {"dropout_p": 0.0}
        return func(*args, **kwargs)


_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout, torch.dropout_}


def _agree(losses: Tensor, others: Tensor, kept: Tensor, call: Call) -> bool:
    """Whether more than half of those that are kept are no further apart than rounding puts them, in groups of other sizes say."""
    losses, others = losses[kept], others[kept].to(losses)
    dtypes = {tensor.dtype for tensor in (*call.tensors, losses) if tensor.is_floating_point()}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes | {_functorch.autocast_dtype(losses) or losses.dtype})
    rtol = max(1e-3, 4 * eps)
    size = min(1.0, float(losses.abs().nan_to_num(0, 0).amax()))
    same = torch.isclose(losses, others, rtol=rtol, atol=10 * eps * size, equal_nan=True)
    return 2 * int(same.count_nonzero()) > len(same)
