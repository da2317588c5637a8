"""Detects samples that affect each other's losses where no gradient shows it, by exchanging most samples.

Gradients show which sample each row belongs to (`_owners.py`). But samples may also be mixed before the first parameter, as in
x - x.mean(0), or through integers that choose rows of a parameter: where the embeddings of two towers are multiplied each with each, the
losses share rows of the parameters, but no rows of data. So fn runs on two more batches of the same shape, in each of which up to a quarter
of the samples keep their places, and copies of them replace all others; of a few samples, in several batches, one or two. The losses of
those that keep their places must not change, but for rounding: where the choice of an expert hangs on the last digits of a product, it may
change a loss as a meeting would. So a loss that has changed counts as rounded only if it also changes in the batch itself, with other last
digits in its products.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg._call import Call
from psg._errors import InputError, PsgError, StateError, code_of, warn_once
from psg._torch import _functorch, _random
from psg._torch._autocast import is_narrowed
from psg._torch._ops import draws, tensors_of, torchs_arguments
from psg._watch import _copies
from psg._watch._effects import forgetting
from psg.rules import _kernels


def refuse_meeting(call: Call, losses: Tensor, before: _random.Snapshot, after: _random.Snapshot) -> None:
    """Refuse a function of a whole batch whose losses change when other samples are exchanged.

    Args:
        call: The call, of at least two samples.
        losses: The losses that fn returned, [n].
        before: The states of the random generators before fn ran.
        after: Their states after fn had run.

    Raises:
        OutOfMemoryError: A device has not enough memory to run fn again.
        StateError: At least half of the compared losses have changed, or one by more than rounding.
    """
    before = before.without_idle(after)
    # If fn sorts its samples, dropout masks would fall on other samples. So all batches run without dropout.
    every, drew = torch.arange(call.n, device=losses.device), not before.equals(after)
    sets = [own.to(losses.device) for own in _kept(call.n)]
    now, dtypes = before.now(), {losses.dtype}

    def run(index: Tensor, noise: bool = True, digits: int | None = None) -> tuple[Tensor, _random.Snapshot]:
        before.restore()  # the samples that keep their places get the same numbers
        mode = _Undropped(call.n, noise, digits)
        output = _losses(call.take(index), mode)
        dtypes.update(mode.dtypes)
        return output, before.now()

    def compare(expected: Tensor, noise: bool = True) -> tuple[bool, list[_random.Snapshot]]:
        """Whether the losses agree with those of the batches with exchanged samples, but for rounding; the states after these."""
        found, states = [], []
        for kept in sets:
            # Each sample is replaced by the last kept one before it: this keeps the order of samples that are sorted by length.
            exchanged, state = run(kept[(torch.searchsorted(kept, every, right=True) - 1).clamp(min=0)], noise)
            found.append(exchanged[kept])
            states.append(state)
        return _are_same(torch.cat(found), torch.cat(sets), expected, lambda digits: run(every, noise, digits)[0], dtypes), states

    reason, end, states = None, after, []
    try:
        expected, end = run(every) if drew else (losses, after)
        agree, states = compare(expected)
        if agree:
            return
        if not _mostly(_agreeing(run(every)[0], expected, dtypes)):
            reason = "fn returns other losses when it is called again on the same samples"
        elif drew and compare(run(every, noise=False)[0], noise=False)[0]:
            return  # fn has sorted its samples, and the noise fell on others
    except torch.OutOfMemoryError:
        raise  # the samples have not been compared
    except Exception as error:
        reason = f"fn raises {type(error).__name__} when some samples are exchanged for others"
    finally:
        now.restore()
    if reason is None and not all(map(end.equals, states)):
        reason = "fn draws more or fewer random numbers when some samples are exchanged for others"
    if reason is not None:
        warn_once(
            (code_of(call.fn), "exchange"),
            f'{call.name}, method="batch": {reason}. So its losses could not be compared, and samples that meet in a statistic of the data '
            "alone (x - x.mean(0), say) would not be noticed.",
            UserWarning,
        )
        return
    raise StateError(
        f'method="batch": the losses of some samples change when others are exchanged (compared: {sum(map(len, sets))} of {call.n}). '
        "They meet in a statistic of the batch, say, in a loss that compares samples, or in an expert of limited room, so that no gradient "
        "tells what one sample does. Let losses[i] depend on sample i alone."
        + (" (Or fn draws random numbers for its samples in an order that depends on the others: use another method.)" if drew else "")
    )


def refuse_parting(call: Call, values: Tensor) -> None:
    """Refuse the losses [n] of samples that ran without the others if they are not those of the whole batch.

    Then samples meet, or arguments that all samples share hold their data, such as nodes of joined graphs, and the labels have met those of
    others. Where fn draws random numbers, which are others for each sample alone, the latter is refused without being known.

    Raises:
        InputError: They are not.
        PsgError: They cannot be read, in a trace, and arguments that all samples share may hold their data.
    """
    leaves = [leaf for i, (leaf, dim) in enumerate(zip(call.leaves, call.dims, strict=True)) if dim is None and i not in call.params]
    shares = bool(call.keyword_tensors) or any(isinstance(leaf, Tensor) for leaf in leaves)
    if call.n < 2 or _functorch.is_traced() and not shares:
        return
    if _functorch.is_traced():
        raise PsgError('method="batch" compares the losses of samples that ran without the others, so it cannot be traced')
    before, mode = _random.Snapshot.take(call.tensors), _Undropped(call.n)
    copied = call.take(torch.arange(call.n, device=values.device))
    try:
        whole, apart = (_functorch.bare(losses).detach() for losses in (_losses(copied, mode), values))
        drew = mode.has_skipped or not before.equals(before.now())
        if drew and not shares:
            return
        if whole.shape == apart.shape:
            whole, apart, dtypes = whole.flatten(), apart.flatten(), {whole.dtype, *mode.dtypes}

            def again(digits: int) -> Tensor:
                return _functorch.bare(_losses(copied, _Undropped(call.n, digits=digits))).flatten()

            every = torch.arange(len(whole), device=whole.device)  # of all members of a transform around psg
            if _agreeing(apart, whole, dtypes).all() if shares else _are_same(apart, every, whole, again, dtypes):
                return
    finally:
        before.restore()
    raise InputError(
        f'{call.name}, method="batch": some samples had to run without the others, because a sample is not finite, a derivative of the '
        "gradients is wanted or a transform is around psg; and their losses are not those of the whole batch. So samples meet (in a mean, "
        "say), or arguments without a dimension of samples hold data of samples (nodes of joined graphs, packed sequences), or fn draws "
        "random numbers. Let losses[i] depend on sample i alone, and give all that belongs to a sample a dimension of samples; or leave "
        "out what is not finite and pass detached parameters, outside of transforms."
    )


def _kept(n: int) -> list[Tensor]:
    """The samples that keep their places, in order, in each of the batches to compare. Of a few samples, every one does so once."""
    scattered = torch.randperm(n, generator=torch.Generator("cpu").manual_seed(n), device="cpu").tolist()
    if n < 8:
        size = 1 if n < 6 else 2
        sets = [scattered[start : start + size] for start in range(0, n, size)]
    else:
        sets = [_apart(scattered, n)]
        sets.append(_apart([i for i in scattered if i not in sets[0]], n))
        size = min(map(len, sets))
        sets = [own[:size] for own in sets]  # where all meet one sample, half of the losses change at least
    return [torch.tensor(sorted(own), device="cpu") for own in sets]


def _apart(candidates: list[int], n: int) -> list[int]:
    """Up to a quarter of the samples, neither the first nor the last, and none beside, opposite or half a batch from another."""
    found: list[int] = []
    for i in candidates:
        others = {i - 1, i + 1, n - 1 - i, (i + n // 2) % n, (i - n // 2) % n}
        if 0 < i < n - 1 and others.isdisjoint(found) and len(found) < n // 4:
            found.append(i)
    return found


def _losses(call: Call, mode: "_Undropped") -> Tensor:
    """The losses, computed under this mode, of a call with samples of its own. What these share is copied too: fn may write into it."""
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    for position, (leaf, dim) in enumerate(zip(leaves, call.dims, strict=True)):
        if dim is None and position not in call.params and isinstance(leaf, Tensor):
            leaves[position] = _copies.copy_of(leaf)
    with torch.enable_grad(), mode, forgetting():  # fn may differentiate for its data
        return call.evaluate(leaves, batch=True, copies=True)[0].detach()


class _Undropped(TorchFunctionMode):
    """Runs dropout as in evaluation mode, makes random orders rotations, and without `noise` gives every draw the same value.

    A random order may leave a sample in its place, or exchange two of those that keep theirs, whose losses would not tell that fn pairs
    samples at random. A rotation by one sample, which might have been drawn as well, pairs each with one that is exchanged.

    Args:
        n: The number of samples.
        noise: Whether draws from uniform and normal distributions are noise; otherwise each gives the same value.
        digits: Chooses other last digits for the results of matrix products; None leaves them as they are.

    Attributes:
        dtypes: Those of the tensors that ops have read, in which fn rounds: it may enter autocast itself.
        has_skipped: Whether fn has called for dropout.
    """

    def __init__(self, n: int, noise: bool = True, digits: int | None = None) -> None:
        super().__init__()
        self.n = n
        self.noise = noise
        self.digits = digits
        self.dtypes: set[torch.dtype] = set()
        self.has_skipped = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torchs_arguments(func, args, kwargs)
        self.dtypes.update([tensor.dtype for tensor in tensors_of(args, kwargs)])
        self.has_skipped |= func in _DROPPING and draws(func, args, kwargs)
        if func in _NOISE:
            drawn = func(*args, **kwargs)
            if not self.noise:
                drawn.fill_(0.5)
            if kwargs.get("generator") is None:
                vars(drawn)["_psg_drawn"] = drawn._version
            return drawn
        if func is torch.randperm and kwargs.get("generator") is None:
            order = func(*args, **kwargs)
            self._rotate(order, 0, len(order))
            return order
        if func in _SORTS and args[0].ndim:
            output, position = func(*args, **kwargs), _SORTS[func]
            dim = args[position] if len(args) > position else kwargs.get("dim", -1)
            if self._is_noise(args[0], dim):
                self._rotate(output if isinstance(output, Tensor) else output.indices, dim, args[0].shape[dim])
            return output
        if func in _DROPOUTS:
            return args[0]
        if func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is F.scaled_dot_product_attention:
            kwargs = kwargs | {"dropout_p": 0.0}
        output = _kernels.run(func, args, kwargs)
        if self.digits is not None and isinstance(output, Tensor) and is_narrowed(func) and kwargs.get("out") is None:
            return _rounded_otherwise(output, self.digits)
        return output

    def _is_noise(self, tensor: Tensor, dim: int) -> bool:
        """Whether entries along a dimension are noise, as far as can be told: as drawn, or all equal where noise is constant."""
        if vars(tensor).get("_psg_drawn") == tensor._version:
            return True
        return not self.noise and tensor.numel() > 0 and bool((tensor == tensor.narrow(dim, 0, 1)).all())

    def _rotate(self, order: Tensor, dim: int, size: int) -> None:
        """Write the indices of a rotation over those along a dimension, of `size` samples or rows of samples, or the first of these."""
        rotation = torch.arange(size, device=order.device).roll(max(1, size // self.n))
        order.movedim(dim, -1).copy_(rotation[: order.shape[dim]])


_NOISE = {torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.normal, Tensor.normal_, Tensor.uniform_}
_SORTS = {torch.argsort: 1, Tensor.argsort: 1, torch.sort: 1, Tensor.sort: 1, torch.topk: 2, Tensor.topk: 2}
"""Ops that make a random order of noise, and for each the position of the dimension."""

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout, torch.dropout_}
_DROPPING = _DROPOUTS | {F.scaled_dot_product_attention}


_ATTEMPTS = 16
"""With how many last digits a batch runs. One loss that hangs on them changes with two of five, or more."""


def _are_same(found: Tensor, index: Tensor, losses: Tensor, again: Callable[[int], Tensor], dtypes: set[torch.dtype]) -> bool:
    """Whether losses agree with those of the batch, but for rounding: where they differ, so they do if its products have other last digits.

    Args:
        found: Losses of some samples, among others or alone.
        index: Which samples these are.
        losses: Those of the batch, [n].
        again: Computes them once more, with last digits chosen by this number.
        dtypes: Those in which fn rounds.
    """
    if not _mostly(_agreeing(found, losses[index], dtypes)):
        return False
    changed = index[~_agreeing(found, losses[index], dtypes, 1e-4)]
    for digits in range(_ATTEMPTS):
        if not len(changed):
            break
        changed = changed[_agreeing(again(digits), losses, dtypes, 1e-4)[changed]]
    return not len(changed)


def _rounded_otherwise(product: Tensor, digits: int) -> Tensor:
    """A matrix product with an error of the size that sums in another order have; those of 16 bits are added in float32."""
    if not product.numel() or not (product.is_floating_point() or product.is_complex()):
        return product
    eps = torch.finfo(product.dtype).eps
    generator = torch.Generator(product.device).manual_seed(digits)
    noise = torch.rand(product.shape, generator=generator, device=product.device).sub_(0.5)
    magnitude = product.detach().abs().amax(-1, keepdim=True)
    return product + (noise * magnitude * ((8 if eps > 1e-4 else 64) * eps)).to(product.dtype)


def _agreeing(losses: Tensor, others: Tensor, dtypes: set[torch.dtype], rtol: float = 1e-3) -> Tensor:
    """Which losses agree up to rounding in these dtypes, which may differ where groups of samples have other sizes.

    Where they are narrower than float64, `rtol` is the least relative tolerance.
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    rtol = max(rtol, 4 * eps) if eps > torch.finfo(torch.float64).eps else 1e-9
    size = min(1.0, float(losses.abs().nan_to_num(0, 0).amax()))
    return torch.isclose(losses, others.to(losses), rtol=rtol, atol=10 * eps * size, equal_nan=True)


def _mostly(same: Tensor) -> bool:
    """Whether more than half of these are true."""
    return 2 * int(same.count_nonzero()) > len(same)
