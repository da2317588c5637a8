"""Detects samples that affect each other's losses where no gradient shows it, by exchanging most samples.

Gradients show which sample each row belongs to (psg/_owners.py). But samples may also be mixed before the first parameter, as in
x - x.mean(0), or through integers that choose rows of a parameter: where the embeddings of two towers are multiplied each with each, the
losses share rows of the parameters, but no rows of data. So fn runs once more on a batch of the same shape, in which a quarter of the
samples keep their places, and copies of them replace all others. The losses of that quarter must not change.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg import _copies, _functorch, _random
from psg._call import Call
from psg._errors import StateError, code_of, warn_once


def refuse_meeting(call: Call, losses: Tensor, before: _random.State, after: _random.State) -> None:
    """Refuse a function of a whole batch whose losses change when other samples are exchanged.

    Args:
        call: The call, of at least two samples.
        losses: The losses that fn returned, [n].
        before: The states of the random generators before fn ran.
        after: Their states after fn had run.

    Raises:
        OutOfMemoryError: A device has not enough memory to run fn again.
        StateError: At least half of the compared losses have changed. Fewer changes may come from rounding that breaks a router's ties.
    """
    every = torch.arange(call.n, device=losses.device)
    kept = _kept(call.n).to(losses.device)
    # Each sample is replaced by the last kept one before it: this keeps the order of samples that are sorted by length.
    index = kept[(torch.searchsorted(kept, every, right=True) - 1).clamp(min=0)]
    now = _random.get_state(call.tensors)
    try:
        # If fn sorts its samples, dropout masks would fall on other samples. So both batches run without dropout.
        expected = losses if _random.same_state(before, after) else _losses(call.take(every))
        exchanged = _losses(call.take(index))
        if _agree(exchanged, expected, kept, call):
            return
        if not _random.same_state(now, _random.get_state(call.tensors)) or not _agree(_losses(call.take(every)), expected, kept, call):
            return  # fn drew other random numbers, or returns other values in every call: no comparison is possible
    except torch.OutOfMemoryError:
        raise  # the samples have not been compared
    except Exception as error:
        warn_once(
            (code_of(call.fn), "exchange"),
            f'{call.name}, method="batch": fn raises {type(error).__name__} when some samples are exchanged for others. So its losses '
            "could not be compared, and samples that meet in a statistic of the data alone (x - x.mean(0), say) would not be noticed.",
            UserWarning,
        )
        return
    finally:
        _random.set_state(now)
    raise StateError(
        f'method="batch": the losses of some samples change when others are exchanged (compared: {len(kept)} of {call.n}). They meet in a '
        "statistic of the batch, say, in a loss that compares samples, or in an expert of limited room, so that no gradient tells what one "
        "sample does. Let losses[i] depend on sample i alone."
    )


def _kept(n: int) -> Tensor:
    """The samples that keep their places, in order: not the first, and scattered, so that most have exchanged neighbours."""
    scattered = 1 + torch.randperm(n - 1, generator=torch.Generator("cpu").manual_seed(n), device="cpu")
    return scattered[: max(1, n // 4)].sort().values


def _losses(call: Call) -> Tensor:
    """The losses that fn returns without dropout. All arguments but the parameters are copies, because fn may write into them."""
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    for position, (leaf, dim) in enumerate(zip(leaves, call.dims, strict=True)):
        if dim is None and position not in call.params and isinstance(leaf, Tensor):
            leaves[position] = _copies.copy_of(leaf)
    with torch.enable_grad(), _Undropped():  # fn may differentiate for its data
        return call.evaluate(leaves, batch=True, copies=True)[0].detach()


class _Undropped(TorchFunctionMode):
    """Runs dropout as in evaluation mode."""

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
    """Whether more than half of the kept losses agree up to rounding, which may differ where groups of samples have other sizes."""
    losses, others = losses[kept], others[kept].to(losses)
    dtypes = {tensor.dtype for tensor in (*call.tensors, losses) if tensor.is_floating_point()}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes | {_functorch.autocast_dtype(losses) or losses.dtype})
    rtol = max(1e-3, 4 * eps) if eps > torch.finfo(torch.float64).eps else 1e-9
    size = min(1.0, float(losses.abs().nan_to_num(0, 0).amax()))
    same = torch.isclose(losses, others, rtol=rtol, atol=10 * eps * size, equal_nan=True)
    return 2 * int(same.count_nonzero()) > len(same)
