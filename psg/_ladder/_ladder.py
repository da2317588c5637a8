"""The ladder that runs a call: capture -> vmap(grad) -> loop.

Each rung is right wherever the one above cannot run. If a rung raises, the next one runs; an error of the last rung is the user's own
and is raised as it is.
"""

import torch
from torch import nn

from psg._batch import _exchange
from psg._call import Call, shape_of_sample, sharing
from psg._errors import InputError, PsgError, Stale, StateError, UnsupportedByVmap, code_of, first_line, unwrapped, user_line, warn_once
from psg._ladder._rungs import RUNGS, Result
from psg._torch import _ambient, _functorch, _random
from psg._watch import _pass
from psg._watch._effects import Attempt, forget_results
from psg._watch._outside import is_looked_at
from psg.rules._registry import are_disabled

AGAIN = "again"
"""The method of a backward pass: the ladder, but nobody is told that capture cannot run it, since the results came by capture."""

_LADDER = "capture", "vmap", "loop"


def run(call: Call, method: str) -> Result:
    """Run a call on the highest rung that can run it.

    Args:
        call: What to run, on at least one sample.
        method: "auto" for the ladder, AGAIN for that of a backward pass, or the name of the one rung to use.

    Returns:
        The result, with a derivative if `call.needs_derivative` and else without history.

    Raises:
        InputError: fn does not return a scalar, or the method needs rules, which are disabled.
        StateError: fn changes state.
        OutOfMemoryError: A device has not enough memory for so many samples at once.
    """
    if are_disabled() and method in ("capture", "batch"):
        raise InputError(f"{call.name}: method={method!r} runs ops by their rules, which psg.rules.disabled() turns off.")
    own, rungs = call, [method]
    if method == "batch" and call.needs_derivative:
        own, rungs = call.with_sample_fn(), list(_LADDER)
    elif method in ("auto", AGAIN):
        rungs = [rung for rung in _LADDER if rung != "capture" or not are_disabled()]
    reasons: list[tuple[str, str]] = []
    start, compiles = _random.Start(call.tensors), _ambient.may_compile()
    while True:
        rung = rungs.pop(0)
        try:
            with Attempt(), _pass.opened(None):  # this call may be made inside another call's pass
                result = RUNGS[rung](own, start)
                forget_results()
            break
        except Exception as error:
            refuse_stale(call.name, error)
            if _ambient.may_compile() and not compiles:
                # fn has imported the compiler, by `torch.cond` say, and run into it. From now on psg keeps it from compiling.
                compiles, rungs = True, [rung, *rungs]
            elif not rungs or isinstance(error, (InputError, StateError)):
                if type(error) in (RuntimeError, TypeError, ValueError, IndexError):  # perhaps torch's, of a shape that fn did not expect
                    error.add_note(_hint(call, method))
                if isinstance(getattr(call.fn, "__self__", call.fn), nn.Module):  # a module or its method: given params, it raises anything
                    error.add_note(f"psg.{call.name} calls fn(params, *sample); psg.stateless(module, criterion) makes that of a module.")
                raise
            elif isinstance(error, torch.OutOfMemoryError):
                # The rungs below hold more at a time, or take n times as long.
                error.add_note(f"psg.{call.name}: pass chunk_size= to run fewer samples at a time.")
                raise
            else:
                rungs = ["loop"] if isinstance(error, UnsupportedByVmap) else rungs
                if rung != "capture" or not (method == AGAIN or _functorch.is_transformed() or is_looked_at()):
                    reasons.append((rung, _reason(error)))
        start.go_back()
    if own is not call:
        _exchange.refuse_parting(call, result.values)
    if reasons and method in ("auto", AGAIN):
        _warn_of_descent(call, rung, reasons)
    return result._replace(reasons=tuple(reasons)) if reasons else result


def _hint(call: Call, method: str) -> str:
    """What fn is called with, for an error of its own."""
    if method == "batch":
        return f'psg.{call.name}, method="batch": fn gets the whole batch, as a module does by psg.stateless(..., batch_dim=None).'
    samples = [
        f"{call.paths[i]} {shape_of_sample(leaf, dim)}"
        for i, (leaf, dim) in enumerate(zip(call.leaves, call.dims, strict=True))
        if dim is not None
    ]
    way_out = sharing(call.spec, call.dims, call.params)
    return f"psg.{call.name} gives fn one sample at a time, without the batch dimension: {', '.join(samples)}.{way_out}"


def warn_of_unused(call: Call) -> None:
    """Warn that no sample's gradient depends on anything that fn is differentiated for."""
    warn_once(
        (code_of(call.fn), "unused"),
        f"{call.name}: fn uses none of the tensors that it is differentiated for, so every gradient is zero. Call a module with the "
        "parameters that fn is given: torch.func.functional_call(module, params, x), or psg.stateless(module, criterion). If fn does "
        "compute with them, it does so detached, or under torch.no_grad().",
        UserWarning,
    )


def refuse_stale(name: str, error: Exception) -> None:
    """Raise StateError, for the function of this name, if an error comes of a tensor that fn has kept from an earlier call."""
    if Stale.seen_in(error):
        raise StateError(
            f"{name}: fn uses a tensor that it has kept from an earlier call, in a module's attribute or a cache. That tensor was made "
            "from the samples or the parameters of that call, or under its vmap, and cannot be used any more. Make it anew in every call, "
            "and clear the one that is kept now; a tensor that depends on neither samples nor parameters may be made outside of fn. (Or fn "
            "uses samples or parameters in a thread that it starts, where only method='loop' can follow.)"
        ) from error


def _reason(error: Exception) -> str:
    """What an error says, and where in fn it was raised."""
    text = first_line(error).partition(" For (1): ")[0]  # torch's advice for those who call vmap
    line = user_line(error, "")
    if isinstance(error, PsgError):
        return f"{text}, at {line}" if line else text
    return f"{type(error).__name__} at {line}: {text}" if line else f"{type(error).__name__}: {text}"


_COST = {
    "vmap": "per-sample gradients are held in full",
    "loop": "one forward and backward pass for every sample, unless you write fn for the whole batch (method='batch')",
}


def _warn_of_descent(call: Call, rung: str, reasons: list[tuple[str, str]]) -> None:
    why = "; ".join(f"{above} could not run it ({reason})" for above, reason in reasons)
    message = (
        f"{call.name}: {why}. The result comes from method={rung!r} and is right; the cost is {_COST[rung]}. "
        f"Pass method={rung!r} to choose it without this warning."
    )
    name = getattr(unwrapped(call.fn), "__qualname__", None)
    warn_once((code_of(call.fn), name, rung, reasons[-1][1]), message)
