"""The ladder that runs a call: capture -> vmap(grad) -> loop.

Each rung is right wherever the one above cannot run. A rung that raises hands over to the next; what the last one raises is the user's
own error and is raised as it is.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psg import _ambient, _functorch, _pass, _random, _trees
from psg._agreed import Diverged
from psg._batch import NotFinite, capture_batch
from psg._call import Call
from psg._capture import Task, capture
from psg._errors import InputError, PsgError, StateError, UnsupportedByVmap, warn_once
from psg._ops import LIKENESSES, leaves_of, target_of
from psg.factors import Dense, Factor, Sum, concat
from psg.rules._registry import are_disabled, find_decomposition, find_leak
from psg.rules.leaks import OWN_GENERATOR, refuse_updates


class Result(NamedTuple):
    """What every rung gives.

    Attributes:
        values: The losses, [n].
        aux: The auxiliary output: every tensor in its tree with the samples in dim 0; None without has_aux.
        factors: The per-sample gradient of each leaf to differentiate, in the order of `Call.params`.
        rung: Which rung gave it.
        reasons: Why each rung above did not, as (rung, reason).
        uses: Of each leaf to differentiate the ops that met it; empty lists below capture.
        nbytes: What the factors took when they were found, where that is known to be more than what they take now.
    """

    values: Tensor
    aux: Any
    factors: list[Factor]
    rung: str
    reasons: tuple[tuple[str, str], ...]
    uses: list[list[str]]
    nbytes: int = 0


def run(call: Call, method: str) -> Result:
    """Run a call on the highest rung that can run it.

    Args:
        call: What to run, on at least one sample.
        method: "auto" for the ladder, or the name of the one rung to use.

    Returns:
        The result, with a derivative if `call.needs_derivative` (which capture cannot give) and else without history.

    Raises:
        InputError: fn does not return a scalar.
        StateError: fn changes state.
        OutOfMemoryError: A device has not enough memory for so many samples at once.
    """
    pinned = method != "auto"
    if method == "batch" and call.needs_derivative:
        call, method = call.single(), "auto"
    if method == "auto":
        rungs = ["vmap", "loop"] if are_disabled() or call.needs_derivative else ["capture", "vmap", "loop"]
    else:
        rungs = [method]
    reasons: list[tuple[str, str]] = []
    state = call.shared_draws()
    by_vmap = True
    for rung in rungs[:-1]:
        if rung == "vmap" and not by_vmap:
            continue
        forget = _functorch.attempt()
        try:
            result = _run(rung, call)
            break
        except (InputError, StateError):
            raise
        except torch.OutOfMemoryError as error:
            # The rungs below hold more at a time, or take n times as long.
            error.add_note(f"psg.{call.name}: pass chunk_size= to run fewer samples at a time.")
            raise
        except Exception as error:
            _refuse_stale(call, error)
            reasons.append((rung, _reason(error)))
            by_vmap = not isinstance(error, UnsupportedByVmap)
            forget()
            _random.set_state(state)
    else:
        try:
            result = _run(rungs[-1], call)
        except Exception as error:
            _refuse_stale(call, error)
            raise
    if reasons and not pinned:
        _warn_once(call, result.rung, reasons)
    if result.rung == "capture" and all(isinstance(factor, Sum) and not factor.terms for factor in result.factors):
        warn_once(
            (getattr(inspect.unwrap(call.fn), "__code__", type(call.fn)), "unused"),
            f"{call.name}: fn uses none of what it is differentiated for, so every gradient is zero. A module has to be called with the "
            "parameters that fn is given: torch.func.functional_call(module, params, x), or psg.stateless(module, criterion).",
            UserWarning,
        )
    return result._replace(reasons=tuple(reasons)) if reasons else result


def _run(rung: str, call: Call) -> Result:
    with _pass.opened(None):  # this call may stand inside another's pass
        return _RUNGS[rung](call)


def _refuse_stale(call: Call, error: Exception) -> None:
    if _functorch.Stale.seen_in(error):
        raise StateError(
            f"{call.name}: fn uses a tensor that it has kept from an earlier call, in a module's attribute or a cache. That tensor was "
            "made from the samples or the parameters of that call, and is dead. Make it anew in every call, and clear what is kept now; "
            "what depends on neither may be made outside of fn."
        ) from error


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    kind = "" if isinstance(error, PsgError) else f"{type(error).__name__}: "
    return kind + (text[0] if text else "no message")


_COST = {
    "vmap": "per-sample gradients are held in full",
    "loop": "one forward and backward for every sample, which a function of a whole batch need not pay (method='batch')",
}


def _warn_once(call: Call, rung: str, reasons: list[tuple[str, str]]) -> None:
    why = "; ".join(f"{above} could not run it ({reason})" for above, reason in reasons)
    message = (
        f"{call.name}: {why}. The result comes from method={rung!r} and is right; the cost is {_COST[rung]}. "
        f"Pass method={rung!r} to choose it without this warning."
    )
    fn = inspect.unwrap(call.fn)
    warn_once((getattr(fn, "__code__", type(fn)), getattr(fn, "__qualname__", None), rung, reasons[-1][1]), message)


# The rungs


class _Aux:
    """Takes an auxiliary tree apart inside a transform, and puts it together outside with batched tensors."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.spec: Any = None

    def split(self, aux: Any) -> tuple[Tensor, ...]:
        self.leaves, self.spec = _trees.flatten(aux)
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    def join(self, tensors: Sequence[Tensor]) -> Any:
        if self.spec is None:
            return None
        return _trees.unflatten(self.spec, _trees.fill(self.leaves, tensors))


def _run_capture(call: Call) -> Result:
    if _functorch.transform_active():
        raise PsgError('method="capture": it runs inside a torch.func transform, which sees through the other methods only')
    state = call.shared_draws()
    try:
        return _capture_together(call)
    except Diverged as error:
        diverged = error.with_traceback(None)  # which holds what the pass held
    with contextlib.suppress(PsgError, RuntimeError):
        return _as_compiled(_capture_together, call, state)
    # Samples that go different ways are captured apart: each group is then as one batch.
    if len(diverged.groups) > max(2, call.n // 2):
        try:
            raise diverged
        finally:
            del diverged  # whose traceback will hold this frame
    return _run_apart(_run_capture, call, diverged.groups, state)


def _as_compiled(together: Callable[[Call], Result], call: Call, state: _random.State | None) -> Result:
    """Run a function once more whose samples have gone different ways.

    Many a model looks for a shorter way, without a mask that masks nothing, unless it is compiled: then it goes one way for all samples.
    """
    _random.set_state(state)
    with _ambient.compiling():
        return together(call)


def _run_apart(rung: Callable[[Call], Result], call: Call, groups: list[Tensor], state: Any) -> Result:
    """Run groups of the samples one after the other, each from this state of the random generators, if one is given."""
    results = []
    for index in groups:
        _random.set_state(state)
        results.append(rung(call.take(index)))
    back = torch.cat(groups).argsort()
    columns = zip(*(result.factors for result in results), strict=True)
    return Result(
        values=torch.cat([result.values for result in results])[back],
        aux=_trees.map_leaves(
            lambda leaf: leaf[back] if isinstance(leaf, Tensor) else leaf, _trees.concat([r.aux for r in results], "aux")
        ),
        factors=[concat(column).take(back) for column in columns],
        rung=results[0].rung,
        reasons=(),
        uses=results[0].uses,
        nbytes=sum(result.nbytes for result in results),
    )


def _capture_together(call: Call) -> Result:
    aux, order = _Aux(), call.tensors

    def function(tensors: Sequence[Tensor], copies: bool) -> tuple[Tensor, ...]:
        loss, extra = call.evaluate(call.filled(tensors), copies=copies)
        return (loss, *aux.split(extra)) if call.has_aux else (loss,)

    task = Task(
        function=function,
        tensors=[call.leaves[i] for i in order],
        in_dims=[call.dims[i] for i in order],
        params=[order.index(i) for i in call.params],
        beside=call.keyword_tensors,
        n=call.n,
        randomness=call.randomness,
        look=call.outside.look,
        settles=call.settles,
        owner=call.fn,
    )
    captured = capture(task)
    values, *extra = captured.outputs
    return Result(values, aux.join(extra), captured.factors, "capture", (), captured.uses, captured.nbytes)


def _run_vmap(call: Call) -> Result:
    state = call.shared_draws()
    try:
        return _vmap_together(call)
    except RuntimeError as error:
        if "data-dependent control flow" not in str(error):
            raise
    return _as_compiled(_vmap_together, call, state)


def _vmap_together(call: Call) -> Result:
    aux, order, differentiated = _Aux(), call.tensors, call.needs_derivative

    def function(*tensors: Tensor) -> tuple[Tensor, Any]:
        with _Guard("vmap", call, differentiated=differentiated) as guard:
            if guard.own_pass is not None:
                guard.own_pass.claim(tensors)
            loss, extra = call.evaluate(call.filled(tensors), copies=True)
        if guard.failure is not None:
            raise PsgError(f"the function handles an error: {guard.failure}")
        return loss, (loss, *aux.split(extra))

    gradient = torch.func.grad(function, argnums=tuple(order.index(i) for i in call.params), has_aux=True)
    batched = torch.func.vmap(gradient, in_dims=tuple(call.dims[i] for i in order), randomness=call.randomness)
    # Clones: a function that writes into its arguments must not write into the caller's.
    gradients, (values, *extra) = batched(*(_functorch.sample_by_sample(call.leaves[i], call.dims[i]) for i in order))
    if len(values) != call.n:
        raise _functorch.Stale(f"a batch of another size than {call.n}")
    return Result(values, aux.join(extra), [Dense(g) for g in gradients], "vmap", (), [[] for _ in gradients])


def _run_loop(call: Call) -> Result:
    aux = _Aux()
    rows = []
    state = _random.get_state(call.leaves[i] for i in call.tensors)
    gradient = _nested_gradient if _functorch.transform_active() else _recorded_gradient
    for i in range(call.n):
        if call.randomness == "same":
            _random.set_state(state)
        leaves = call.sample(i)
        before = aux.leaves, aux.spec
        gradients, loss, extra = gradient(call, leaves, aux)
        if i:
            _trees.expect_same(before, (aux.leaves, aux.spec), "aux")
        rows.append((*gradients, loss, *extra))
        if call.randomness == "error" and not _random.same_state(state, _random.get_state(leaves[i] for i in call.tensors)):
            raise RuntimeError(f'{call.name}: fn drew random numbers, which randomness="error" forbids. Use "different" or "same".')
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    count = len(call.params)
    factors: list[Factor] = [Dense(values) for values in stacked[:count]]
    return Result(stacked[count], aux.join(stacked[count + 1 :]), factors, "loop", (), [[] for _ in factors])


_OneSample = tuple[Sequence[Tensor], Tensor, Sequence[Tensor]]


def _recorded_gradient(call: Call, leaves: list[Any], aux: _Aux) -> _OneSample:
    """One sample's gradients, loss and auxiliary tensors by plain autograd, which can run whatever PyTorch can."""
    history = call.needs_derivative
    for position in call.params:
        if not leaves[position].requires_grad:
            leaves[position].requires_grad_()
    own, called = [leaves[position] for position in call.params], _pass.Pass()
    with torch.enable_grad():
        with _pass.opened(called), _Guard("loop", call, leaves) as guard:
            loss, extra = call.evaluate(leaves, copies=True)
        again = _Again(call, guard.met, called)
        with called.again():
            if not history:
                gradients = _pass.gradients(loss, own, again, lambda nodes: _look(call, nodes, own, guard.recorded))
            else:
                with again:
                    found = _functorch.gradients(loss, own, create_graph=True) if loss.requires_grad else [None] * len(own)
                gradients = [torch.zeros_like(leaf) if g is None else g.to_dense() for leaf, g in zip(own, found, strict=True)]
    outputs = loss, *aux.split(extra)
    loss, *extra = outputs if history else [output.detach() for output in outputs]
    return gradients, loss, extra


def _look(call: Call, nodes: list[Any], own: list[Tensor], seen: set[int]) -> None:
    """Refuse what a loss has been computed from beside its sample and what is closed over."""
    ids = set(map(id, own))
    for leaf in own:
        vars(leaf)["_psg_sample"] = True
    for node in nodes:
        if hasattr(node, "variable") and "_psg_sample" in vars(node.variable) and id(node.variable) not in ids:
            raise _functorch.Stale("a value of the parameters of another sample")
    call.outside.expect(nodes, seen | ids)


def _nested_gradient(call: Call, leaves: list[Any], aux: _Aux) -> _OneSample:
    """The same for an enclosing transform, which sees through torch.func alone."""

    def function(*own: Tensor) -> tuple[Tensor, Any]:
        for position, leaf in zip(call.params, own, strict=True):
            leaves[position] = leaf
        with _Guard("loop", call):
            loss, extra = call.evaluate(leaves, copies=True)
        return loss, (loss, *aux.split(extra))

    own = [leaves[position] for position in call.params]
    gradients, (loss, *extra) = torch.func.grad(function, argnums=tuple(range(len(own))), has_aux=True)(*own)
    return gradients, loss, extra


def _run_batch(call: Call) -> Result:
    try:
        return _batch_together(call)
    except NotFinite as error:
        return _run_apart(_run_batch, call, error.groups, None)


def _batch_together(call: Call) -> Result:
    aux, order = _Aux(), call.tensors

    def function(tensors: Sequence[Tensor], copies: bool) -> tuple[Tensor, ...]:
        losses, extra = call.evaluate(call.filled(tensors), batch=True, copies=copies)
        return (losses, *aux.split(extra))

    for position in call.params:
        if call.dims[position] is not None:
            raise InputError(
                f'{call.name}, method="batch": {call.paths[position]} has a dimension of samples; only what the samples share can be '
                "differentiated."
            )
    params = {order.index(position): call.paths[position] for position in call.params}
    captured = capture_batch(function, [call.leaves[i] for i in order], call.keyword_tensors, params, call.n, call.outside.look)
    values, *extra = captured.outputs
    return Result(values, aux.join(extra), captured.factors, "batch", (), captured.uses)


_RUNGS: dict[str, Callable[[Call], Result]] = {
    "capture": _run_capture,
    "vmap": _run_vmap,
    "loop": _run_loop,
    "batch": _run_batch,
}


class _Guard(TorchFunctionMode):
    """Refuses what a rung would run wrongly or should not: updates of running statistics, and under vmap the ops that it gets wrong."""

    def __init__(self, rung: str, call: Call, own: Sequence[Any] = (), differentiated: bool = False) -> None:
        super().__init__()
        self.rung = rung
        self.differentiated = differentiated
        self.traced = _functorch.is_traced()
        self.outside = call.outside
        self.own = frozenset(map(id, own))
        self.failure: str | None = None  # the message alone: the error itself holds all frames, and so what they hold
        self.met: set[int] = set()  # what has met an op, by id
        self.recorded: set[int] = set()  # and what has met one that autograd records
        self.own_pass: _functorch.Marks | None = None
        if rung == "vmap":
            grad = _functorch.current_level()
            self.own_pass = _functorch.Marks(grad - 1, grad)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            leaves = leaves_of(args, kwargs)
            if self.rung == "loop":
                self._note(leaves)
            marked = self.own_pass is not None and self.own_pass.owns(leaves) and func not in LIKENESSES
            self.outside.look(func, leaves, self.own)
            output = self._checked(func, *self.outside.replace((args, kwargs)))
            if marked and self.own_pass is not None:
                self.own_pass.claim(output, target_of(func, args, kwargs))
            return output
        except Exception as error:
            self.failure = str(error)
            raise

    def _note(self, leaves: list[Any]) -> None:
        ids = set(map(id, leaves))
        self.met |= ids
        if torch.is_grad_enabled():
            self.recorded |= ids

    def _checked(self, func: Any, args: Any, kwargs: Any) -> Any:
        refuse_updates(func, args, kwargs)
        reason = find_leak(func, args, kwargs, self.rung)
        if self.rung == "vmap" and any(isinstance(leaf, torch.Generator) for leaf in leaves_of(args, kwargs)):
            reason = OWN_GENERATOR
        if reason is None and self.differentiated:
            reason = find_leak(func, args, kwargs, "capture")  # here too autograd is beneath vmap
        if self.rung == "vmap" and _functorch.is_traced() and not self.traced:
            reason = "a tracer inside fn, such as torch.func.linearize's, takes what it meets under vmap as constant"
        if reason is not None:
            raise PsgError(reason)
        decompose = find_decomposition(func, self.differentiated) if self.rung == "vmap" else None
        if decompose is not None:
            with self:
                output = decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        return _pass.straighten(func, output) if self.rung == "loop" else output


class _Again(TorchFunctionMode):
    """Watches what a backward pass runs again, as a checkpointed layer's does: it must meet the parameters that the forward pass met."""

    def __init__(self, call: Call, met: set[int], called: _pass.Pass) -> None:
        super().__init__()
        self.call, self.met, self.called = call, met, called
        self.shapes = {call.leaves[position].shape for position in call.params}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in leaves_of(args, kwargs):
            if isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad and id(leaf) not in self.met and leaf.shape in self.shapes:
                raise StateError(
                    f"{self.call.name}: the backward pass runs a part of fn again, as checkpointed, reversible and adjoint layers do, with "
                    f"a module's own parameter (of shape {tuple(leaf.shape)}) in the place of the one that fn was given: functional_call "
                    "has ended by then. Make fn with psg.stateless, which holds the parameters in place until the end."
                )
            if id(leaf) in self.called.ambiguous:
                raise StateError(
                    f"{self.call.name}: the backward pass runs a part of a module again, as a checkpointed layer's does, and fn has called "
                    "that module with several sets of parameters: which of them is not known by then. Take the checkpointing out."
                )
        return func(*args, **kwargs)


def empty(call: Call) -> Result:
    """The result for no samples. fn is called only for the structure of its auxiliary output, on one sample of zeros."""
    factors: list[Factor] = []
    for position in call.params:
        leaf, dim = call.leaves[position], call.dims[position]
        factors.append(Dense((leaf.unsqueeze(0) if dim is None else leaf.movedim(dim, 0))[:0]))
    first = call.leaves[call.params[0]]
    aux = None
    if call.has_aux:
        leaves = [
            leaf.new_zeros([size for d, size in enumerate(leaf.shape) if d != dim]) if dim is not None else leaf
            for leaf, dim in zip(call.leaves, call.dims, strict=True)
        ]
        # Copies: a function that writes into its arguments must not write into the caller's.
        leaves = [_functorch.copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        _, aux = call.evaluate(leaves, copies=True)
        tensors, spec = _trees.flatten(aux)
        aux = _trees.unflatten(spec, [t.detach().new_zeros(0, *t.shape) if isinstance(t, Tensor) else t for t in tensors])
    return Result(torch.zeros(0, dtype=first.dtype.to_real(), device=first.device), aux, factors, "empty", (), [[] for _ in factors])
