"""Detects samples that affect each other where no gradient shows it, by exchanging most samples.

Gradients show which sample each row belongs to (`_owners.py`). But samples may also be mixed before the first parameter, as in
x - x.mean(0), or through integers that choose rows of a parameter: where the embeddings of two towers are multiplied each with each, the
losses share rows of the parameters, but no rows of data. So fn runs on more batches of the same shape, in each of which up to a quarter
of the samples keep their places, and copies of them replace all others; of a few samples, one or two. The losses of those that keep their
places must not change, but for rounding: where the choice of an expert hangs on the last digits of a product, it may change a loss as a
meeting would. So a loss that has changed counts as rounded only if it also changes in the batch itself, with other last digits in its
products.

Where weights are zero, as those of a head are before the first step, losses may be equal and their gradients not. So when fn runs for the
first time, on so many samples, the gradients of those that keep their places are compared too, and more samples keep theirs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from psg._call import Call
from psg._errors import InputError, PsgError, StateError, code_of, warn_once
from psg._torch import _autograd, _functorch, _random
from psg._torch._autocast import is_narrowed
from psg._torch._ops import draws, tensors_of, torchs_arguments
from psg._watch import _copies, _pass
from psg._watch._effects import forgetting
from psg.factors._arithmetic import as_real
from psg.rules import _kernels


def refuse_meeting(call: Call, losses: Tensor, before: _random.Snapshot, after: _random.Snapshot) -> None:
    """Refuse a function of a whole batch whose losses, or their gradients, change when other samples are exchanged.

    Args:
        call: The call, of at least two samples.
        losses: The losses that fn returned, [n].
        before: The states of the random generators before fn ran.
        after: Their states after fn had run.

    Raises:
        OutOfMemoryError: A device has not enough memory to run fn again.
        StateError: At least half of the compared losses have changed, or one, or a gradient, by more than rounding.
    """
    try:
        most, is_known = _compared.setdefault(call.fn, 0), True
    except TypeError:  # not every callable has a hash, and can be referred to weakly
        most, is_known = 0, False
    _refuse_meeting(call, losses, before.without_idle(after), after, call.n > most)
    if is_known:
        _compared[call.fn] = max(call.n, most)


_compared: Any = WeakIdKeyDictionary()
"""Of how many samples the gradients of a function have been compared: at most once, however often it is called.

Two functions that are equal need not compute the same.
"""


def _refuse_meeting(call: Call, losses: Tensor, before: _random.Snapshot, after: _random.Snapshot, is_first: bool) -> None:
    """The same; only if it is the first time that fn runs on so many samples the gradients are compared."""
    # If fn sorts its samples, dropout masks would fall on other samples. So all batches run without dropout.
    every, drew = torch.arange(call.n, device=losses.device), not before.equals(after)
    sets = [own.to(losses.device) for own in _kept(call.n, is_first)]
    weights = [torch.zeros_like(losses).index_fill(0, kept, 1) for kept in sets] if is_first else []
    now, dtypes, ends = before.now(), {losses.dtype}, [] if drew or is_first else [after]

    def run(index: Tensor, weights: Sequence[Tensor] = (), noise: float | None = None, digits: int | None = None) -> _Run:
        before.restore()  # the samples that keep their places get the same numbers
        mode = _Undropped(call.n, noise, digits)
        found = _run(call.take(index), mode, weights)
        dtypes.update(mode.dtypes)
        ends.append(before.now())
        return found

    def compare(expected: _Run, noise: float | None = None) -> str | None:
        """What differs in the batches with exchanged samples by more than rounding."""
        # Each sample is replaced by the last kept one before it: this keeps the order of samples that are sorted by length.
        exchanged = [
            run(kept[(torch.searchsorted(kept, every, right=True) - 1).clamp(min=0)], weights[k : k + 1], noise)
            for k, kept in enumerate(sets)
        ]
        own = torch.cat([found.losses[kept] for found, kept in zip(exchanged, sets, strict=True)])
        if not _are_same(own, torch.cat(sets), expected.losses, lambda digits: run(every, (), noise, digits).losses, dtypes):
            return "losses"
        for k, gradient in enumerate(expected.gradients):
            rounded = (run(every, weights[k : k + 1], noise, digits).gradients[0] for digits in range(_ATTEMPTS))
            if not _are_gradients_same(exchanged[k].gradients[0], gradient, rounded, dtypes):
                return "gradients"
        return None

    reason, changed, drawn = None, None, []
    try:
        expected = run(every, weights) if drew or is_first else _Run(losses, [])
        changed, drawn = compare(expected), ends[:]
        if changed is None:
            return
        if not _mostly(_agreeing(run(every).losses, expected.losses, dtypes)):
            reason = "fn returns other losses when it is called again on the same samples"
        elif drew and not any(compare(run(every, weights, noise), noise) for noise in _NOISES):
            return  # fn has sorted its samples, and the noise fell on others
    except torch.OutOfMemoryError:
        raise  # the samples have not been compared
    except Exception as error:
        reason = f"fn raises {type(error).__name__} when some samples are exchanged for others"
    finally:
        now.restore()
    if reason is None and not all(map(drawn[0].equals, drawn)):
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
        f'method="batch": the {changed} of some samples change when others are exchanged (compared: {sum(map(len, sets))} of {call.n}). '
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
        whole, apart = (_functorch.bare(losses).detach() for losses in (_run(copied, mode).losses, values))
        drew = mode.has_skipped or not before.equals(before.now())
        if drew and not shares:
            return
        if whole.shape == apart.shape:
            whole, apart, dtypes = whole.flatten(), apart.flatten(), {whole.dtype, *mode.dtypes}

            def again(digits: int) -> Tensor:
                return _functorch.bare(_run(copied, _Undropped(call.n, digits=digits)).losses).flatten()

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


def _kept(n: int, is_first: bool) -> list[Tensor]:
    """The samples that keep their places, in order, in each of the batches to compare. Of a few samples, every one does so once."""
    scattered = torch.randperm(n, generator=torch.Generator("cpu").manual_seed(n), device="cpu").tolist()
    if n < (_ALL_ALONE if is_first else 8):
        size = 1 if n < 6 or is_first else 2
        sets = [scattered[start : start + size] for start in range(0, n, size)]
    else:
        sets: list[list[int]] = []
        while len(sets) < (_SETS if is_first else 2):
            sets.append(_apart([i for i in scattered if all(i not in own for own in sets)], n))
        size = min(map(len, sets[:2]))
        sets = [own[:size] for own in sets if own]  # where all meet one sample, half of the losses change at least
    return [torch.tensor(sorted(own), device="cpu") for own in sets]


_ALL_ALONE = 17
_SETS = 6
"""How many batches of exchanged samples are compared when fn runs for the first time: of fewer samples than the former, one for each."""


def _apart(candidates: list[int], n: int) -> list[int]:
    """Up to a quarter of the samples, neither the first nor the last, and none beside, opposite or half a batch from another."""
    found: list[int] = []
    for i in candidates:
        others = {i - 1, i + 1, n - 1 - i, (i + n // 2) % n, (i - n // 2) % n}
        if 0 < i < n - 1 and others.isdisjoint(found) and len(found) < n // 4:
            found.append(i)
    return found


class _Run(NamedTuple):
    """What fn returns for a batch.

    Attributes:
        losses: [n], without history.
        gradients: Those of sums of the losses, for each of some weights, one for each parameter, folded.
    """

    losses: Tensor
    gradients: list[list[Tensor]]


def _run(call: Call, mode: "_Undropped", weights: Sequence[Tensor] = ()) -> _Run:
    """Run fn, under this mode, for a call with samples of its own. What these share is copied too: fn may write into it."""
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    for position, (leaf, dim) in enumerate(zip(leaves, call.dims, strict=True)):
        if dim is None and position not in call.params and isinstance(leaf, Tensor):
            leaves[position] = _copies.copy_of(leaf)
    params = [leaves[position] for position in call.params]
    if not _functorch.transform_active():
        params = [param.requires_grad_() for param in params]  # also without weights: fn may ask what requires grad
    called, gradients = _pass.Pass(), []
    with torch.enable_grad(), mode, forgetting():
        with _pass.opened(called):
            losses = call.evaluate(leaves, batch=True, copies=True)[0]
        with called.again():
            for own in weights if losses.requires_grad else ():
                found = _autograd.pulled((losses,), params, (own.to(losses),), retain_graph=True)
                gradients.append(
                    [_folded(torch.zeros_like(param) if own is None else own) for param, own in zip(params, found, strict=True)]
                )
    return _Run(losses.detach(), gradients)


def _folded(gradient: Tensor) -> Tensor:
    """Signed sums of a gradient's entries, as few as can be kept for many batches, in which differences do not cancel."""
    entries = as_real(_autograd.dense(gradient.detach())).flatten()
    entries = entries if entries.dtype == torch.float64 else entries.float()
    rows = F.pad(entries, (0, -len(entries) % _FOLD)).reshape(-1, _FOLD) if len(entries) > _FOLD else entries[None]
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(2, (len(rows),), generator=generator, device="cpu").mul(2).sub(1)
    return signs.to(rows) @ rows if len(rows) > 1 else rows[0]


_FOLD = 4096


class _Undropped(TorchFunctionMode):
    """Runs dropout as in evaluation mode, makes random orders rotations, and may give all entries of each draw one value.

    A random order may leave a sample in its place, or exchange two of those that keep theirs, whose losses would not tell that fn pairs
    samples at random. A rotation by one sample, which might have been drawn as well, pairs each with one that is exchanged.

    Args:
        n: The number of samples.
        noise: Chooses the value, at which quantile of its distribution, for each draw another; None leaves the noise as it is.
        digits: Chooses other last digits for the results of matrix products; None leaves them as they are.

    Attributes:
        dtypes: Those of the tensors that ops have read, in which fn rounds: it may enter autocast itself.
        has_skipped: Whether fn has called for dropout.
    """

    def __init__(self, n: int, noise: float | None = None, digits: int | None = None) -> None:
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
            if self.noise is not None:
                self.noise = (self.noise + _GOLDEN) % 1  # so that no loop draws forever
                drawn.copy_(torch.as_tensor(_quantile(func, args, kwargs, self.noise)))
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
        return self.noise is not None and tensor.numel() > 0 and bool((tensor == tensor.narrow(dim, 0, 1)).all())

    def _rotate(self, order: Tensor, dim: int, size: int) -> None:
        """Write the indices of a rotation over those along a dimension, of `size` samples or rows of samples, or the first of these."""
        rotation = torch.arange(size, device=order.device).roll(max(1, size // self.n))
        order.movedim(dim, -1).copy_(rotation[: order.shape[dim]])


_NOISE = {torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.normal, Tensor.normal_, Tensor.uniform_}
_SORTS = {torch.argsort: 1, Tensor.argsort: 1, torch.sort: 1, Tensor.sort: 1, torch.topk: 2, Tensor.topk: 2}
"""Ops that make a random order of noise, and for each the position of the dimension."""

_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, spread evenly
_NOISES = (0.02, 0.27, 0.52, 0.77)  # each draw gets a value in every quarter of its distribution


def _quantile(func: Any, args: Any, kwargs: Any, share: float) -> float | Tensor:
    """The value below which this share of the distribution lies from which a call draws."""
    names = ("from", "to") if func is Tensor.uniform_ else ("mean", "std") if func in (torch.normal, Tensor.normal_) else ()
    given = dict(zip(names, args[func is not torch.normal :], strict=False)) | kwargs
    low, high = given.get("from", 0), given.get("to", 1)
    if func in (torch.rand, torch.rand_like, Tensor.uniform_):
        return low + (high - low) * share
    return given.get("mean", 0) + given.get("std", 1) * float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64)))


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


def _are_gradients_same(found: list[Tensor], expected: list[Tensor], rounded: Iterable[list[Tensor]], dtypes: set[torch.dtype]) -> bool:
    """Whether gradients of the same losses agree, but for rounding: then they change as much if other digits are rounded.

    Those that are not finite are not compared: the losses of other samples may be what is not.
    """
    if not all(bool(own.isfinite().all()) for own in expected):
        return True
    difference = _difference(found, expected)
    if difference <= _rtol(dtypes, 5e-3 if expected[0].is_cuda else 1e-3):  # in TF32 products have the digits of float16
        return True
    return any(difference <= 4 * _difference(others, expected) for others in rounded)


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference in one gradient, relative to that gradient, or to a hundredth of all."""
    pairs = [(own, want) for own, want in zip(found, expected, strict=True) if want.numel()]
    sizes = [max(float(own.abs().max()), float(want.abs().max())) for own, want in pairs]
    scales = [max(size, max(sizes) / 100) for size in sizes]
    return max([float((own - want).abs().max()) / scale for (own, want), scale in zip(pairs, scales, strict=True) if scale], default=0.0)


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
    size = min(1.0, float(losses.abs().nan_to_num(0, 0).amax()))
    return torch.isclose(losses, others.to(losses), rtol=_rtol(dtypes, rtol), atol=10 * _eps(dtypes) * size, equal_nan=True)


def _rtol(dtypes: set[torch.dtype], least: float) -> float:
    """How far results may be off, relative to their size: no less than this but in float64."""
    eps = _eps(dtypes)
    return max(least, 4 * eps) if eps > torch.finfo(torch.float64).eps else 1e-9


def _eps(dtypes: set[torch.dtype]) -> float:
    """The largest rounding error of an op: in dtypes of fewer than 16 bits values are stored, but no op adds up."""
    return max(torch.finfo(dtype).eps for dtype in dtypes if (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1)


def _mostly(same: Tensor) -> bool:
    """Whether more than half of these are true."""
    return 2 * int(same.count_nonzero()) > len(same)
