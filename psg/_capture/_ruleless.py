"""Functions and ops for which vmap has no rule: once for all samples where that gives the same, else sample by sample.

Below vmap autograd differentiates what a rule of the user's own calls, which need not be the function. So such rules are not used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from psg import _trees
from psg._capture import _vectorised
from psg._errors import StateError, Unsupported
from psg._torch import _functions, _functorch, _random
from psg._torch._ops import handles_ops, operands_of, substitute_tensors, tensors_of


def run_function(
    func: Any, args: Any, kwargs: Any, level: int, n: int, randomness: str, apart: frozenset[Any] | None
) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Run an autograd.Function without a generated rule for vmap: on constants alone once, else for all samples.

    Args:
        func: torch's op that calls it.
        args: The function and its arguments.
        kwargs: Its keyword arguments.
        level: The level of the vmap.
        n: The number of samples.
        randomness: As vmap takes it.
        apart: The keys of the functions that are known to have to run sample by sample; None for all.

    Returns:
        Its output, and the arguments that it has written into, each with what it has left there.

    Raises:
        Unsupported: Only a loop may run it.
        StateError: It writes into a tensor of a class that handles ops itself.
        OutOfMemoryError: It does not fit.
    """
    (tensors, others), function, what = operands_of(args, kwargs), args[0], described(args[0])
    wrapped = [tensor for tensor in tensors if _functorch.is_wrapped(tensor)]
    containers = _functions.containers_in(args)
    if tensors_of(containers, {}):
        raise Unsupported(f"{what} takes a list or a dict with tensors, into which it may write; pass a tuple")
    others += containers
    state, kept = _random.get_state(tensors), _functions.state_of(function, others)
    elsewhere = _functions.forward_state_of(function, others)
    contents, known = _functions.contents_of([*kept, *elsewhere]), set(map(id, elsewhere))
    places: set[int] = set()
    left: list[Tensor] = []

    def run(*own: Any, **options: Any) -> Any:
        output, copies, written = call_on_copies(func, own, options)
        places.update(written)
        return output, copies

    try:
        output = NotImplemented
        if wrapped and apart is not None and not kwargs and _vectorised.key_of(function) not in apart:
            output = _run_together(function, args[1:], wrapped, level, n, randomness, apart)
            if output is NotImplemented:
                _functions.put_back(contents)
        if output is NotImplemented and wrapped:
            output, left = one_by_one(run, args, kwargs, wrapped, level, n)
        elif output is NotImplemented:
            with _functorch.below():
                output, left = run(*args, **kwargs)
    except (torch.OutOfMemoryError, StateError):
        raise
    except (RuntimeError, TypeError, IndexError) as error:  # it closes over a sample, say, or returns what is no tensor
        _functions.put_back(contents)
        raise Unsupported(f"{what} raises {type(error).__name__} sample by sample") from error
    if not _random.same_state(state, _random.now(state)):
        raise Unsupported(f"{what} draws random numbers")
    left_there = [part for part in _functions.forward_state_of(function, others) if isinstance(part, Tensor) and id(part) not in known]
    if not _functions.same_state(kept, _functions.state_of(function, others)):
        # All backward passes run after all forward passes: each would see what the last sample has left.
        _functions.put_back(contents)
        raise Unsupported(f"{what} changes its class, an argument or what its backward reads elsewhere; what that needs belongs on ctx")
    if any(map(_functorch.is_wrapped, left_there)):
        _functions.put_back(contents)
        raise Unsupported(f"{what} keeps a tensor that it has computed from the samples, where its next call finds it")
    return output, [(tensors[place], left[place]) for place in sorted(places)]


def _run_together(
    function: Any, args: Sequence[Any], wrapped: Sequence[Tensor], level: int, n: int, randomness: str, apart: frozenset[Any]
) -> Any:
    """Run an autograd.Function once for all samples; NotImplemented if it has to run sample by sample."""
    given = list(args)
    batched = [place for place, own in enumerate(given) if isinstance(own, Tensor) and _functorch.is_wrapped(own)]
    constants = [own for place, own in enumerate(given) if isinstance(own, Tensor) and place not in batched]
    if any(own.requires_grad for own in constants) or not all(_functorch.is_batched(tensor, level) for tensor in wrapped):
        return NotImplemented
    with _functorch.below():
        for place in batched:
            given[place] = _functorch.physical(given[place], level, n)
        forget = _functorch.attempt()
        try:
            output, _, written = call_on_copies(
                lambda _, *own: _vectorised.apply(function, own, batched, n, randomness, apart), (function, *given), {}
            )
        except (torch.OutOfMemoryError, StateError):
            raise
        except Exception:  # an op that vmap cannot run, or a branch on a sample; an error of the function's own comes again
            forget()
            return NotImplemented
        if written:
            forget()
            return NotImplemented
        return _trees.map_tensors(lambda tensor: _functorch.wrap(tensor, level), output)


def one_by_one(func: Callable[..., Any], args: Any, kwargs: Any, wrapped: Sequence[Tensor], level: int, n: int) -> Any:
    """Run an op sample by sample. vmap would too, but selects each sample by an op whose backward writes zeros for the whole batch.

    Args:
        func: The op.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        wrapped: The tensors among them that vmap has wrapped.
        level: The level of the vmap.
        n: The number of samples.

    Returns:
        Its output, of whatever structure.
    """
    with _functorch.below():
        sides = {id(leaf): _functorch.physical(leaf, level, n).unbind() for leaf in wrapped}
        results = []
        for i in range(n):
            own, options = substitute_tensors((args, kwargs), lambda leaf: sides[id(leaf)][i] if id(leaf) in sides else leaf)  # noqa: B023
            results.append(_trees.flatten(func(*own, **options)))
        outputs = [torch.stack(parts) for parts in zip(*(parts for parts, _ in results), strict=True)]
    return _trees.unflatten(results[0][1], [_functorch.wrap(output, level) for output in outputs])


def call_on_copies(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor], list[int]]:
    """Call an autograd.Function on copies: it may write into its arguments without saying so, and they are the caller's.

    Returns:
        Its output, the copies without history, and the places of those that it has written into.

    Raises:
        Unsupported: It writes into an argument of which its output or another argument is a view, or past autograd, which then
            differentiates with what a later call may leave in tensors that this call has saved.
        StateError: It writes into a tensor of a class that handles ops itself.
    """
    tensors = tensors_of(args, kwargs)
    frozen = {id(tensor) for tensor in tensors if handles_ops(type(tensor))}  # a copy of a quantised weight may be of another class
    copies = {id(tensor): tensor if id(tensor) in frozen else tensor.clone() for tensor in tensors}
    args, kwargs = substitute_tensors((args, kwargs), lambda leaf: copies.get(id(leaf), leaf))
    before = {key: copy._version for key, copy in copies.items()}
    output = func(*args, **kwargs)
    written = [place for place, tensor in enumerate(tensors) if copies[id(tensor)]._version != before[id(tensor)]]
    for place, tensor in enumerate(tensors):
        copy = copies[id(tensor)]
        if id(tensor) in frozen:
            if place in written:
                raise StateError(f"{writing(args[0])}, one of them a {type(tensor).__name__}, which all samples share")
        elif place not in written:
            if _has_changed(args[0], tensor.detach(), copy.detach()):
                raise Unsupported(f"{writing(args[0])} unseen by autograd, as by .data")
        else:
            others = [_functorch.memory_of(other) for other in tensors if other is not tensor]
            outputs = map(_functorch.memory_of, _trees.all_tensors(output))
            if _functorch.memory_of(tensor) in others or _functorch.memory_of(copy) in outputs:
                raise Unsupported(f"{writing(args[0])}, of which it has other views")
    return output, [copies[id(tensor)].detach() for tensor in tensors], written


def _has_changed(function: Any, tensor: Tensor, copy: Tensor) -> bool:
    """Whether a copy has other values now. In a trace that cannot be asked: there the result is compared with that of an eager call.

    Of an accelerator it is asked only where the function names `.data`, since Python would wait for the answer.
    """
    if tensor.layout != torch.strided or _functorch.is_traced():
        return False
    if not tensor.is_cpu and "data" not in getattr(getattr(function.forward, "__code__", None), "co_names", ("data",)):
        return False
    return not (torch.equal(copy, tensor) or bool(((copy == tensor) | (tensor != tensor)).all()))


def described(function: Any) -> str:
    """The beginning of a message that such a function cannot run."""
    return f"{function.__name__}, an autograd.Function without a generated rule for vmap (generate_vmap_rule = True),"


def writing(function: Any) -> str:
    """The beginning of a message that it writes into what it must not."""
    return f"{function.__name__}, an autograd.Function, writes into its arguments"
