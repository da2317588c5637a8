"""The rungs of the ladder: from a call to its result by the capture pass, by vmap(grad), in a loop, or as a function of a whole batch."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from psg import _trees
from psg._batch import _exchange
from psg._batch._batch import capture_batch
from psg._batch._owners import NotFinite
from psg._call import Call, shape_of_sample
from psg._capture._agreed import Diverged, Drawn
from psg._capture._capture import capture
from psg._capture._strided import Noting, View
from psg._capture._written import WrittenBackward
from psg._errors import InputError, PsgError, Stale, StateError, Unsupported, first_line
from psg._ladder._guards import LoopGuard, MembersGuard, RerunGuard, Unasserted, VmapGuard
from psg._torch import _ambient, _autograd, _functions, _functorch, _random, _scripts
from psg._torch._ops import foreign_mode, handles_ops, tensors_of
from psg._watch import _copies, _pass
from psg._watch._effects import Attempt, forgetting
from psg._watch._habits import Habits, Retry
from psg._watch._outside import Outside, is_looked_at
from psg.factors import Dense, Factor, Sum, concat
from psg.rules.leaks import unseen_op


class Result(NamedTuple):
    """The result of a rung.

    Attributes:
        values: The losses, [n].
        aux: The auxiliary output: every tensor in its tree with the samples in dim 0; None without has_aux.
        factors: The per-sample gradient of each leaf to differentiate, in the order of `Call.params`.
        rung: The name of the rung.
        uses: For each leaf to differentiate the ops that used it; empty lists from vmap and the loop.
        reasons: Why each rung above could not run the call, as (rung, reason).
        freed: How many bytes less the factors take than when they were found.
    """

    values: Tensor
    aux: Any
    factors: list[Factor]
    rung: str
    uses: list[list[str]]
    reasons: tuple[tuple[str, str], ...] = ()
    freed: int = 0

    @property
    def is_unused(self) -> bool:
        """Whether fn has used none of the leaves, as far as the rung can tell: `vmap(grad)` cannot."""
        return all(isinstance(factor, Sum) and not factor.terms for factor in self.factors)


def empty(call: Call) -> Result:
    """The result for no samples. fn is called only for the structure of its auxiliary output, on one sample of zeros.

    On every rung losses have the dtype in which fn returns them. Where fn is not called, the first parameter's stands for it: a call with
    fake tensors would tell, but could leave some of them in what fn or a module keeps from one call to the next.
    """
    factors: list[Factor] = []
    for position in call.params:
        leaf, dim = call.leaves[position], call.dims[position]
        factors.append(Dense((leaf.unsqueeze(0) if dim is None else leaf.movedim(dim, 0))[:0]))
    loss, aux = call.leaves[call.params[0]], None
    if call.has_aux:
        leaves = [
            leaf.new_zeros(shape_of_sample(leaf, dim)) if dim is not None else leaf
            for leaf, dim in zip(call.leaves, call.dims, strict=True)
        ]
        # Copies: a function that writes into its arguments must not write into the caller's.
        leaves = [_copies.copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with torch.enable_grad(), Unasserted(), _functorch.gradient_level() as level:  # fn may take derivatives itself
            for position in call.params:
                leaves[position] = _autograd.own_leaf(level.wrap(leaves[position]))
            loss, aux = call.evaluate(leaves, copies=True)
            aux = _trees.map_tensors(lambda tensor: level.unwrap(tensor.detach().new_zeros(0, *tensor.shape)), aux)
    return Result(torch.zeros(0, dtype=loss.dtype.to_real(), device=loss.device), aux, factors, "empty", [[] for _ in factors])


class _Outputs:
    """Converts what fn returns: inside a transform to a tuple of tensors, and outside of it, for batched tensors, to the auxiliary tree.

    Attributes:
        tree: The leaves and the structure of the latest auxiliary output.
    """

    def __init__(self, call: Call, batch: bool = False) -> None:
        self.call = call
        self.batch = batch
        self.tree: tuple[list[Any], Any] = [], None

    def of(self, leaves: Sequence[Any], copies: bool = True) -> tuple[Tensor, ...]:
        """Call fn; returns the loss, or those of a batch, and the tensors of the auxiliary output."""
        loss, aux = self.call.evaluate(leaves, self.batch, copies)
        if not self.call.has_aux:
            return (loss,)
        leaves, spec = _trees.flatten(aux)
        tensors = _trees.tensors_in(leaves)
        with torch._C.DisableTorchFunction():  # not fn's own, of which a pass has to know whether anyone keeps them
            self.tree = _trees.fill(leaves, [tensor.detach() for tensor in tensors]), spec
        return (loss, *tensors)

    def aux(self, tensors: Sequence[Tensor]) -> Any:
        """The auxiliary output with these tensors in the places of its own; None without one."""
        leaves, spec = self.tree
        return None if spec is None else _trees.unflatten(spec, _trees.fill(leaves, tensors))


def _run_capture(call: Call, start: _random.Start) -> Result:
    if _functorch.tangents_active() and not _functorch.transform_active():
        raise Unsupported("the call runs inside a level of torch.autograd.forward_ad")
    if call.needs_derivative and is_looked_at():
        raise Unsupported("the call is made in a function that psg runs, which differentiates it")  # and must not see the pass' own ops
    _refuse_overrides(call)
    if (mode := foreign_mode()) is not None:
        raise Unsupported(mode)
    try:
        return _capture_together(call, start)
    except (Diverged, Drawn) as error:
        branch = error.with_traceback(None)  # the traceback would keep the pass' tensors alive
    start.go_back()
    # Many models read a mask to leave it out if it masks nothing, unless they are compiled: then they take one branch for all samples.
    # Errors of any kind: what fn does for a compiler may not run here.
    with contextlib.suppress(Exception), _ambient.compiling:
        return _capture_together(call, start)
    if isinstance(branch, Drawn):
        raise Unsupported(str(branch))  # not `branch`, which this frame and those of its callers hold
    start.go_back()
    return _capture_apart(call, branch, call.shared_draws(), [max(2, call.n // 2)])


def _capture_apart(call: Call, diverged: Diverged, state: _random.State | None, left: list[int]) -> Result:
    """Capture samples that take different branches apart: each group is a batch of its own, and may be divided further.

    `left` holds how many passes are left: a pass takes longer than a sample of a loop, so that many would take longer than the loop.

    Raises:
        Unsupported: There are too many groups.
    """
    left[0] -= len(diverged.groups)
    if left[0] < 0:
        raise Unsupported(str(diverged))  # not `diverged`, which this frame and those of its callers hold

    def capture_group(own: Call) -> Result:
        try:
            return _capture_together(own, _random.Start(own.tensors))
        except Diverged as error:
            further = error.with_traceback(None)
        return _capture_apart(own, further, state, left)

    return _run_apart(capture_group, call, diverged.groups, state)


def _refuse_overrides(call: Call) -> None:
    """Refuse samples whose class fn may ask for, and all tensors whose class handles ops: under vmap's wrappers they are plain tensors."""
    kinds = list(map(type, call.leaves))
    for kind in set(kinds) - _PLAIN:
        if not issubclass(kind, Tensor):
            continue
        places = [i for i, own in enumerate(kinds) if own is kind and (handles_ops(kind) or call.dims[i] is not None)]
        if places and (handles_ops(kind) or "__torch_dispatch__" not in vars(kind)):
            why = "whose __torch_function__ sees no op under vmap" if handles_ops(kind) else "and under vmap a plain tensor"
            instead = "pass .as_subclass(torch.Tensor) if none needs it"
            if call.leaves[places[0]].is_nested:
                instead = "pad it (torch.nested.to_padded_tensor) and pass a mask"
            raise Unsupported(f"{call.paths[places[0]]} is a {kind.__name__}, {why}; {instead}")


_PLAIN = {Tensor, nn.Parameter}


def _run_apart(rung: Callable[[Call], Result], call: Call, groups: list[Tensor], state: _random.State | None) -> Result:
    """Run groups of the samples one after the other, each from this state of the random generators, if one is given."""
    results = []
    for index in groups:
        _random.set_state(state)
        results.append(rung(call.take(index)))
    back = torch.cat(groups).argsort()
    columns = zip(*(result.factors for result in results), strict=True)
    return Result(
        values=torch.cat([result.values for result in results])[back],
        aux=_trees.map_tensors(lambda tensor: tensor[back], _trees.concat([result.aux for result in results], "aux")),
        factors=[concat(column).take(back) for column in columns],
        rung=results[0].rung,
        uses=[[*reduce(or_, map(Counter, column)).elements()] for column in zip(*(result.uses for result in results), strict=True)],
        freed=sum(result.freed for result in results),
    )


def _capture_together(call: Call, start: _random.Start) -> Result:
    outputs = _Outputs(call)
    captured = capture(
        call, start, lambda tensors, copies: outputs.of(_trees.fill(call.leaves, tensors), copies), lambda: _views_of_a_sample(call)
    )
    values, *extra = captured.outputs
    return Result(values, outputs.aux(extra), captured.factors, "capture", captured.uses, freed=captured.freed)


def _views_of_a_sample(call: Call) -> list[View]:
    """What as_strided makes where fn runs on the first sample alone, as in the loop."""
    leaves = call.sample(0)
    for position in call.params:
        leaves[position].requires_grad_()
    with torch.enable_grad(), forgetting(), LoopGuard(call, leaves), Noting() as noting:
        _Outputs(call).of(leaves)
    return noting.views


def _run_vmap(call: Call, start: _random.Start) -> Result:
    _refuse_overrides(call)
    try:
        return _vmap_writes(call, start)
    except RuntimeError as error:
        if "data-dependent control flow" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they would keep the pass' tensors alive
        start.go_back()
        with contextlib.suppress(Exception), _ambient.compiling:  # as in `_run_capture`
            return _vmap_writes(call, start)
        raise


def _vmap_writes(call: Call, start: _random.Start) -> Result:
    """Follow what may share memory, and write out ops whose higher derivatives torch gets wrong, only if fn needs that: both cost time."""
    habits = Habits()
    while True:
        try:
            with Attempt():
                return _vmap_together(call, habits)
        except Retry as error:
            changed = habits._replace(**error.change)
            if changed == habits:
                raise
            start.go_back()
            habits = changed


def _vmap_together(call: Call, habits: Habits) -> Result:
    outputs, differentiated = _Outputs(call), call.needs_derivative
    # Clones: a function that writes into its arguments must not write into the caller's.
    copies = [*map(_copies.sample_by_sample, call.tensors, call.tensor_dims)]
    derived = differentiated or _functorch.is_differentiated()
    bare = set() if differentiated or _functorch.is_transformed() else {id(_autograd.own_leaf(copies[i])) for i in call.tensor_params}

    def function(*tensors: Tensor) -> tuple[Tensor, Any]:
        guard = VmapGuard(call, tensors, bare, differentiated, habits)
        with _scripts.watched(_expect_right(call), inlines=derived), _functions.noting(guard), guard:
            values = outputs.of(_trees.fill(call.leaves, tensors))
        if guard.failure is not None:
            raise PsgError(f"the function handles an error: {guard.failure}")
        guard.own.owns(values)  # raises if fn returns what it has kept from an earlier call
        guard.aliases.read("the result", values)
        if derived:
            _refuse_scripts(values[0])
        backward.is_on, backward.has_begun = guard.has_written, True
        return values[0], values

    backward = WrittenBackward(is_on=False)
    derivative = torch.func.grad(function, argnums=tuple(call.tensor_params), has_aux=True)

    def gradient(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        gradients, values = derivative(*tensors)
        return gradients, _functorch.unaliased(values, _functorch.current_level())

    batched = torch.func.vmap(gradient, in_dims=tuple(call.tensor_dims), randomness=call.randomness)
    with torch.no_grad() if bare else contextlib.nullcontext(), backward:
        gradients, (values, *extra) = batched(*copies)
    if bare:  # fn may return a parameter itself, whose copy requires grad
        values, *extra = (value.detach() for value in (values, *extra))
    return Result(values, outputs.aux(extra), [Dense(g) for g in gradients], "vmap", [[] for _ in gradients])


def _expect_right(call: Call) -> Callable[[Any, list[Any]], None]:
    """A function that refuses TorchScript with an op that transforms may get wrong where psg does not see it, or outside tensors."""
    level = _functorch.current_level()

    def look(script: Any, arguments: list[Any]) -> None:
        # Only to refuse, not to record: inside of TorchScript no tensor can be replaced.
        Outside.look(call.outside, script, [*tensors_of(arguments, {}), *_scripts.parameters_of(script)], (), level)
        if (op := unseen_op(script)) is not None:
            raise PsgError(
                f"fn calls {script.name}, which is TorchScript and calls {op}, which transforms may get wrong where psg does not see it"
            )

    return look


def _refuse_scripts(loss: Tensor) -> None:
    """Refuse a loss that TorchScript has a part in, inside transforms: its gradients would have a derivative of zero, or none."""
    with torch._C.DisableTorchFunction():  # other modes watch fn, not this question
        node = loss.grad_fn
    if _autograd.has_scripted_part(node):
        _scripts.refuse("transforms cannot differentiate the gradient of a function of torch.jit.script; use the function before scripting")


class _Misderived(PsgError):
    """fn itself differentiates gradients of an op whose higher derivatives torch gets wrong."""


def _run_loop(call: Call, start: _random.Start) -> Result:
    if _functorch.transform_active():
        return _loop_over_samples(call, _nested_gradient, start.state)
    try:
        return _loop_over_samples(call, partial(_recorded_gradient, differentiated=call.needs_derivative), start.state)
    except _Misderived:
        start.go_back()
        return _loop_over_samples(call, partial(_recorded_gradient, differentiated=True), start.state)


def _loop_over_samples(call: Call, gradient: Callable[[Call, list[Any], _Outputs], tuple[Any, ...]], state: _random.State) -> Result:
    outputs, leaves, rows = _Outputs(call), [], []
    for i in range(call.n):
        if call.randomness == "same":
            _random.rewind(state)
        leaves = call.sample(i)
        before = outputs.tree
        with forgetting():
            rows.append(gradient(call, leaves, outputs))
        if i:
            _trees.expect_same(before, outputs.tree, "aux")
        if call.randomness == "error":
            _refuse_draws(call, state, '. Use "different" or "same".')
    columns = list(zip(*rows, strict=True))
    factors = [_joined(leaves[position], own) for position, own in zip(call.params, columns, strict=False)]
    values, *aux = map(torch.stack, columns[len(factors) :])
    return Result(values, outputs.aux(aux), factors, "loop", [[] for _ in factors])


def _refuse_draws(call: Call, before: _random.State, rest: str) -> None:
    """Raise if fn has drawn random numbers since the generators were in these states.

    Raises:
        StateError: It has.
    """
    if not _random.same_state(before, _random.now(before)):
        raise StateError(f'{call.name}: fn drew random numbers, which randomness="{call.randomness}" forbids{rest}')


def _joined(leaf: Tensor, gradients: Sequence[Tensor | None]) -> Factor:
    """The gradients of all samples for one leaf; None where a sample does not use it."""
    if all(own is None for own in gradients):
        return Sum([], leaf.new_empty(len(gradients), 0), leaf.shape)
    return Dense(torch.stack([torch.zeros_like(leaf) if own is None else own for own in gradients]))


def _recorded_gradient(call: Call, leaves: list[Any], outputs: _Outputs, differentiated: bool) -> tuple[Any, ...]:
    """One sample's gradients, loss and auxiliary tensors by plain autograd, which can run whatever PyTorch can.

    Args:
        call: The call.
        leaves: The sample's own.
        outputs: Runs fn.
        differentiated: Whether to decompose ops whose higher derivatives torch gets wrong.

    Returns:
        The gradients, None for what the loss does not depend on; the loss and the auxiliary tensors.

    Raises:
        _Misderived: fn has asked for such derivatives of an op that was not decomposed.
    """
    history = call.needs_derivative
    own, called = [leaves[position].requires_grad_() for position in call.params], _pass.Pass()
    # No mode sees, and so can replace, an outside tensor that fn hands to TorchScript.
    scripts = _scripts.inlining() if history and call.outside.found else contextlib.nullcontext()
    with torch.enable_grad():
        with _pass.opened(called), _ambient.linearizing, scripts, LoopGuard(call, leaves, differentiated, history) as guard:
            values = outputs.of(leaves)
        if guard.is_misderived:
            raise _Misderived
        loss, again = values[0], RerunGuard(call, guard, called, history)
        with called.again():
            if not history:
                gradients = _pass.gradients(loss, own, again, lambda nodes: _look(call, nodes, own, guard.recorded_ids, called))
            elif not loss.requires_grad:
                gradients = [None] * len(own)
            else:
                ones = torch.ones_like(loss)
                with again:
                    found = _autograd.pulled((loss,), own, (ones,), retain_graph=True, create_graph=True)
                gradients = [None if g is None else _autograd.dense(g) for g in found]
    return (*gradients, *(values if history else [value.detach() for value in values]))


def _look(call: Call, nodes: list[Any], own: list[Tensor], seen: set[int], called: _pass.Pass) -> None:
    """Refuse a loss of another sample's copy of the parameters, or of a module's own, and check the outside tensors in its graph."""
    ids = set(map(id, own))
    for leaf in own:
        vars(leaf)["_psg_loop_leaf"] = True
    leaves = _autograd.leaves_in(nodes)
    if any(id(node.variable) not in ids and "_psg_loop_leaf" in vars(node.variable) for node in leaves):
        raise Stale("a value of the parameters of another sample")
    if _autograd.outdated([node for node in leaves if id(node.variable) in ids]):
        raise PsgError("fn changes the dtype of a parameter in place, after which autograd takes it for another one: cast a copy")
    called.expect_replaced(leaves)
    call.outside.expect(nodes, leaves, seen | ids)


def _nested_gradient(call: Call, leaves: list[Any], outputs: _Outputs) -> tuple[Tensor, ...]:
    """One sample's gradients inside an enclosing transform, which can differentiate `torch.func.grad` but not plain autograd."""
    derived, backward = _functorch.is_differentiated(), WrittenBackward(is_on=False)
    is_vmapped = _functorch.vmap_depth() > 0

    def function(*own: Tensor) -> tuple[Tensor, Any]:
        for position, leaf in zip(call.params, own, strict=True):
            leaves[position] = leaf
        guard = MembersGuard(call) if is_vmapped else LoopGuard(call)
        with _scripts.watched(_expect_right(call), inlines=derived), _functions.noting(guard), guard:
            values = outputs.of(leaves)
        guard.expect_right(values)
        if isinstance(guard, MembersGuard):
            backward.is_on, backward.has_begun = guard.has_written, True
        if derived:
            _refuse_scripts(values[0])
        return values[0], values

    own = [leaves[position] for position in call.params]
    try:
        with backward if is_vmapped else contextlib.nullcontext():
            gradients, values = torch.func.grad(function, argnums=tuple(range(len(own))), has_aux=True)(*own)
    except Unsupported as error:
        if not is_vmapped:
            raise
        raise PsgError(f"{error}; call psg in a loop over the members of the vmap around it") from error
    return (*gradients, *values)


def _run_batch(call: Call, start: _random.Start, whole: bool = True) -> Result:
    """Run fn on the whole batch; if a sample is not finite, on groups of its samples, which are not `whole`."""
    try:
        result = _batch_together(call)
        _refuse_draws_of_a_batch(call, start.state)
        return result
    except NotFinite as error:
        groups, found = error.groups, str(error)
    _refuse_draws_of_a_batch(call, start.state)
    try:
        result = _run_apart(lambda part: _run_batch(part, _random.Start(part.tensors), whole=False), call, groups, None)
    except (StateError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not whole:
            raise
        raise InputError(
            f'{call.name}, method="batch": {found}. What is not finite does not tell which sample a row belongs to, so psg runs such '
            f"samples alone, but fn cannot run without the others: {type(error).__name__}: {first_line(error).rstrip('.')}. Leave out what "
            "is not finite, or give all that belongs to the samples a dimension of samples."
        ) from error
    if whole:
        _exchange.refuse_parting(call, result.values)
    return result


def _refuse_draws_of_a_batch(call: Call, before: _random.State) -> None:
    if call.randomness == "error":
        _refuse_draws(call, before, '. Use "different".')
    elif call.randomness == "same" and call.n > 1:
        way_out = "draw before the call and share the numbers, or use another method."
        _refuse_draws(call, before, f' with method="batch", where fn draws for the whole batch: {way_out}')


def _batch_together(call: Call) -> Result:
    if _functorch.is_recorded():
        raise PsgError('method="batch" measures on the data whose row is whose, so it cannot be traced')
    if (mode := foreign_mode()) is not None:
        raise InputError(f'{call.name}, method="batch": {mode}.')
    for position in call.params:
        if call.dims[position] is not None:
            raise InputError(
                f'{call.name}, method="batch": {call.paths[position]} has a dimension of samples; this method differentiates only tensors '
                "that all samples share. Use another method."
            )
    outputs = _Outputs(call, batch=True)
    states: list[_random.Snapshot] = []

    def function(tensors: Sequence[Tensor], copies: bool) -> tuple[Tensor, ...]:
        states[:] = [_random.Snapshot.take(call.tensors)]
        with forgetting():
            values = outputs.of(_trees.fill(call.leaves, tensors), copies)
        states.append(_random.Snapshot.take(call.tensors))
        return values

    captured = capture_batch(call, function)
    values, *extra = captured.outputs
    if call.n > 1 and not _functorch.is_traced():
        _exchange.refuse_meeting(call, values, *states)
    return Result(values, outputs.aux(extra), captured.factors, "batch", captured.uses)


RUNGS: dict[str, Callable[[Call, _random.Start], Result]] = {
    "capture": _run_capture,
    "vmap": _run_vmap,
    "loop": _run_loop,
    "batch": _run_batch,
}
