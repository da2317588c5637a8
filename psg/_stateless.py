"""From an nn.Module to a loss function of one sample, and the parameters to differentiate."""

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from psg import _trees
from psg._call import KEYWORDS, arguments_of, note
from psg._errors import USED_ELSEWHERE, InputError, StateError, a_kind, as_integer, received, warn_once
from psg._torch import _ambient, _autograd, _functorch
from psg._torch._ops import target_of, tensors_of
from psg._watch import _pass, _writes
from psg._watch._effects import Attributes, Writes, changing, kind_of, note_attributes
from psg._watch._modules import CALLED, LOCKS
from psg._watch._outside import UNDIFFERENTIATED, is_looked_at, owning, refuse_own


def stateless(
    module: nn.Module, criterion: Callable[..., Any] | None = None, *, batch_dim: int | None = 0
) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    """Turn a module into a pure loss function of one sample, and the parameters to differentiate.

    The function adds the batch dimension that modules expect: a sample [*shape] enters the module as [1, *shape], tensors in trees too.
    Recurrent and Transformer layers of torch.nn expect it second unless they have `batch_first=True`: pass `batch_dim=1` for those. Frozen
    parameters and buffers are constants, read from the module at every call. If you differentiate the result, the
    backward pass reads them again, so they must not change before it. A parameter that the module holds under several names (tied) appears
    once, under the first.

    Args:
        module: Any module, including scripted, traced and exported ones; its mode (train or eval) at the time of a call counts. While the
            function runs, and during the backward passes of a loop, the module holds the parameters that the function was given. Threads
            that call functions of one module take turns; meanwhile no thread may use the module itself, or functions of another module
            that shares submodules with it.
        criterion: criterion(output, target) -> loss, a scalar, as `F.cross_entropy` gives by default. Output and target have a batch
            dimension of size 1, so a mean is one within the sample: class weights cancel for one label, unless `reduction="sum"`. With
            `has_aux=True` of the transforms it returns (loss, aux), and aux keeps this batch dimension. A criterion with one positional
            argument gets the output alone, and there is no target. None if the module's output is the loss, or has it as `.loss`. Pass
            several targets, or a weight for each sample, in a tuple. While the criterion runs, the module holds the parameters given to the
            loss, so a penalty on the module's parameters is differentiated too.
        batch_dim: Where to add the batch dimension: 1 turns sequences [t, *] into [t, 1, *]. None adds none: for modules written for one
            sample; for samples that are batches themselves (all samples of a user, augmentations of an image); and for `method="batch"`,
            which passes the whole batch and needs a criterion with one loss for each sample (`reduction="none"`).

    Returns:
        `(loss, params)`. `loss(params, *inputs, target, **shared)`, without a target if the criterion takes none, passes the inputs to the
        module; a mapping among them is passed as keyword arguments, as in `module(**batch)`. Keyword arguments (`shared`: masks, flags) are
        the same for all samples and reach the module unchanged. `params` maps names to the parameters that require grad, detached. They
        share memory with the module's parameters until those are moved, cast or assigned anew; call stateless again after that. You may
        pass a part of `params`: only that part is differentiated and paid for, and the module's other parameters are constants. `loss`
        cannot be pickled; `params` can.

    Raises:
        InputError: `module` is not a module, or is a wrapper (DataParallel, DistributedDataParallel, FSDP, Opacus' GradSampleModule); no
            parameter requires grad; a lazy parameter has no shape yet; `criterion` is not a function, or a module with parameters of its
            own that require grad; or `batch_dim` is not a dimension. At a call: the target is missing; there is no criterion and the output
            is and has no loss; `params` is not a mapping; or a name in it is not, or no longer, the first name of a parameter.
        StateError: At a call: a batch normalisation is in training mode or has no running statistics; the module, or a criterion that is
            a module, changes one of its buffers, or a parameter that is not differentiated, or writes into a parameter and changes an
            attribute, or puts another tensor in the place of a parameter; the module uses a parameter from an unregistered place, such as a
            list; or the criterion uses a parameter of the module to which it holds a reference of its own.

    Warns:
        UserWarning: A parameter has a hook, which is not called. With batch_dim=0, the module begins with a recurrent or Transformer layer
            of torch.nn without `batch_first=True`, which would take every step for a sequence of its own. At a call: the module's
            parameters have moved to other memory, so the `params` that stateless returned no longer change with them.

    Example:
        >>> import torch, psg
        >>> model = torch.nn.Linear(3, 2)
        >>> loss, params = psg.stateless(model, torch.nn.functional.cross_entropy)
        >>> psg.per_sample_grad(loss)(params, torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))["weight"].shape
        torch.Size([5, 2, 3])

    Source: `torch.func.functional_call`.
    """
    _refuse_unsupported(module)
    own_dim = as_integer(batch_dim, least=0)
    if batch_dim is not None and own_dim is None:
        raise InputError(f"stateless(batch_dim={batch_dim!r}): expected an integer of at least 0, or None for samples as they are.")
    lock = LOCKS.setdefault(module, threading.RLock())
    with lock:
        kept_elsewhere = _keeps_parameters_elsewhere(module)
        own = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        params = {name: parameter.detach() for name, parameter in own.items()}
        with torch._C.DisableTorchFunction():  # a pass under a function mode would look at each question
            hooked = [name for name, parameter in own.items() if parameter._backward_hooks or parameter._post_accumulate_grad_hooks]
            memory = {name: _address_of(parameter) for name, parameter in params.items()}
    if not params:
        raise InputError(f"stateless({type(module).__name__}): no parameter requires grad; call requires_grad_() on some.")
    if hooked:
        warnings.warn(
            f"stateless: the parameter {hooked[0]!r} has a hook, which psg does not call: apply it to the gradients yourself.",
            UserWarning,
            stacklevel=2,
        )
    if own_dim == 0:
        _warn_of_time_first(module)
    _refuse_criterion(criterion, module)
    takes_target = criterion is not None and _takes_two(criterion)
    # torch's own losses hold no tensors.
    own_loss = vars(F).get(getattr(criterion, "__name__", "")) is criterion
    guarded = contextlib.nullcontext if own_loss else partial(_guarding, message=_KEPT_BY_CRITERION)

    def loss(params: dict[str, Tensor], *sample: Any, **shared: Any) -> Tensor:
        if not isinstance(params, Mapping):
            raise InputError(
                f"stateless: params is {a_kind(params)}; expected a mapping from names to tensors, such as the "
                "one that stateless returned, which leaves frozen ones out: all that it holds is differentiated."
            )
        if takes_target and not sample:
            raise InputError("stateless: expected loss(params, *inputs, target), got no target.")
        batch = [_add_batch_dim(argument, own_dim) for argument in sample]
        inputs, target = (batch[:-1], batch[-1:]) if takes_target else (batch, [])
        positional = [argument for argument in inputs if not isinstance(argument, Mapping)]
        keyword = {key: value for argument in inputs if isinstance(argument, Mapping) for key, value in argument.items()}

        def run(own: dict[int, str]) -> Any:
            output = module(*positional, **{**keyword, **shared})
            if criterion is None:
                return _loss_of(output)
            with guarded(own):  # the call's parameters are in place: the criterion may penalise them
                return criterion(output, *target)

        try:
            with _ambient.uncached(), lock:
                return _call(module, criterion, params, run, lock, kept_elsewhere, memory)
        except TypeError as error:
            _explain(error, module, sample, shared, takes_target)
            raise

    loss.__qualname__ = f"stateless({kind_of(module)}).loss"

    def names_beside(args: Sequence[Any]) -> set[str]:
        return _keywords(module, args[1 : len(args) - takes_target])

    note(loss, KEYWORDS, names_beside)
    return loss, params


def _refuse_unsupported(module: Any) -> None:
    """Raise InputError for what is no module, or one of which no function can be made."""
    if not isinstance(module, nn.Module):
        raise InputError(f"stateless: expected a module, got {received(module)}. If it is a class, make an instance of it first.")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise InputError(f"stateless({type(module).__name__}): a lazy layer has no shape yet. Run the module on a batch once first.")
    for child in module.modules():
        for kind in type(child).__mro__:
            if kind.__name__ in _WRAPPERS:
                raise InputError(f"stateless({kind_of(child)}): {_WRAPPERS[kind.__name__]}.")


def _explain(error: TypeError, module: nn.Module, sample: Sequence[Any], shared: Mapping[str, Any], takes_target: bool) -> None:
    """Add to an error what the loss was given, or raise InputError if it lacks an input."""
    if takes_target and len(sample) == 1 and not shared and _needs_input(module):
        unpack = " Unpack the batch: loss(params, *batch)." if isinstance(sample[0], (list, tuple)) else ""
        raise InputError(
            "stateless: the call has one argument after params, which is the criterion's target, so the module gets no input. Pass "
            f"loss(params, *inputs, target).{unpack}"
        ) from error
    # A criterion(output, target, weight) fails here too.
    last = ", the last of them for criterion(output, target): pass several targets or weights in a tuple" if takes_target else ""
    named = f", and by keyword, for the module, {', '.join(shared)}" if shared else ""
    error.add_note(f"psg.stateless: loss(params, *inputs, target) was given {len(sample)} arguments after params{last}{named}.")


def _keywords(module: nn.Module, inputs: Sequence[Any]) -> set[str]:
    """The names of the arguments of a module, beside its `**kwargs`, that these inputs leave open."""
    own = _arguments_of(module)
    given = sum(not isinstance(argument, Mapping) for argument in inputs)
    positional = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named.difference(positional[:given], *(argument for argument in inputs if isinstance(argument, Mapping)))


def _needs_input(module: nn.Module) -> bool:
    """Whether the module cannot be called without an input."""
    return any(own.default is own.empty and own.kind not in (own.VAR_POSITIONAL, own.VAR_KEYWORD) for own in _arguments_of(module))


def _arguments_of(module: nn.Module) -> list[inspect.Parameter]:
    """What the module's forward takes; nothing if Python cannot tell, as for a traced module."""
    return arguments_of(getattr(module, "_orig_mod", module).forward)  # under torch.compile's wrapper, which takes anything


_SHARDED = (
    "its parameters are sharded over processes, which psg does not support. Give the module before it is sharded; sums and the optimizer's "
    "state may be held in parts, as the README shows for several processes"
)
_WRAPPERS = {
    "DataParallel": "it copies the parameters of the module that it wraps. Give that module itself: wrapper.module",
    "DistributedDataParallel": (
        "its forward pass broadcasts buffers, so processes that run it a different number of times would wait for ever. Give the module "
        "that it wraps, ddp.module, and add up the results: psg.distributed.all_reduce"
    ),
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
    "GradSampleModule": "it hooks the parameters of the module that it wraps. Give that module itself, before it is wrapped",
}
"""Class names of modules that copy, shard or hook parameters, or synchronise processes: no pure function does the same."""


def _warn_of_time_first(module: nn.Module) -> None:
    layer = _time_first_layer(module)
    if layer is not None:
        warnings.warn(
            f"stateless: {kind_of(layer)} without batch_first=True takes dimension 0 for time, so every step of a sample would be a "
            "sequence of its own. Pass batch_dim=1 for sequences [t, *].",
            UserWarning,
            stacklevel=3,
        )


def _time_first_layer(module: nn.Module) -> nn.Module | None:
    """The layer that takes dimension 0 of the module's own input for time: one of torch.nn's, with at most others of them before it."""
    for layer in _in_order(module):
        if not type(layer).__module__.startswith("torch.nn."):
            return None
        if any(isinstance(own, (nn.RNNBase, nn.MultiheadAttention)) and not own.batch_first for own in layer.modules()):
            return layer
    return None


def _in_order(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a Sequential, and of those in it; any other module as it is, also one with a forward of its own."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        yield module
        return
    for layer in module:
        yield from _in_order(layer)


def _refuse_criterion(criterion: Any, module: nn.Module) -> None:
    """Raise InputError for what is no criterion, or has parameters to train that are not the module's: they would get no gradient."""
    if criterion is not None and (not callable(criterion) or isinstance(criterion, type)):
        raise InputError(
            f"stateless: expected a criterion(output, target), got {received(criterion)}. If it is a class, make an instance of it."
        )
    if not isinstance(criterion, nn.Module):
        return
    own = set(map(id, module.parameters()))
    names = [name for name, parameter in criterion.named_parameters() if parameter.requires_grad and id(parameter) not in own]
    if names:
        raise InputError(
            f"stateless: the criterion {kind_of(criterion)} has parameters of its own that require grad ({', '.join(names[:3])}), which "
            "would get no gradient. Put module and criterion into one module whose output is the loss, or freeze the criterion: "
            "criterion.requires_grad_(False)."
        )


def _takes_two(criterion: Callable[..., Any]) -> bool:
    """Whether a criterion takes a target beside the output."""
    taken = arguments_of(criterion.forward if isinstance(criterion, nn.Module) else criterion)
    positional = [own for own in taken if own.kind in (own.POSITIONAL_ONLY, own.POSITIONAL_OR_KEYWORD)]
    # Of a built-in function, of torch's say, no arguments are known: that counts as two.
    return len(positional) != 1 or any(own.kind == own.VAR_POSITIONAL for own in taken)


def _call(
    module: nn.Module,
    criterion: Any,
    params: dict[str, Tensor],
    run: Callable[[dict[int, str]], Any],
    lock: Any,
    kept_elsewhere: bool,
    memory: dict[str, int],
) -> Any:
    """Put `params` into the module, call `run` with the names of the module's own parameters by id; raise if that changes a buffer."""
    # Read at every call: since the last, submodules may have been replaced and parameters tied.
    children = dict(module.named_modules())
    if isinstance(criterion, nn.Module):
        children |= criterion.named_modules(set(children.values()), "the criterion")
    _refuse_batch_norms(children)
    slots, buffer_slots = _slots(children, "_parameters"), _slots(children, "_buffers")
    own = _held(slots)
    _warn_of_stale_params(module, params, own, memory)
    params = _under_all_names(module, params, own)
    # Parameters that are not in `params` are constants, like frozen ones: detached, or the result would require grad for them.
    constants: dict[int, Tensor] = {}  # by id, so that a tied parameter has one for all its names
    with torch._C.DisableTorchFunction():  # a pass under a function mode would look at each question
        others = {name: own[name] for name in own if name not in params and (own[name].requires_grad or own[name].is_inference())}
    if (called := CALLED.get()) is not None:
        called.constants.update((id(parameter), parameter) for parameter in others.values())
    rest = {name: constants.setdefault(id(parameter), _ambient.usable(parameter.detach())) for name, parameter in others.items()}
    buffers = {name: _ambient.usable(buffer) for name, buffer in _held(buffer_slots).items()}
    slots |= buffer_slots
    frozen = {name: parameter for name, parameter in own.items() if name not in params and name not in rest}
    kept = frozen | rest | buffers
    versions = _versions(kept)
    scripted = isinstance(module, torch.jit.ScriptModule)
    layers = [child for child in children.values() if isinstance(child, nn.RNNBase)]
    held = partial(_scripted_holding, module, params | rest) if scripted else partial(_holding, slots, params | rest, buffers, layers)
    given = {id(parameter): name for name, parameter in own.items() if name in params}
    writes, attributes = Writes(children, kept, params), Attributes(children)
    note_attributes((id(module), id(criterion)), lock, attributes)
    # psg's passes see every write. A call by others must see those into buffers, to tell whether they change one.
    seen = contextlib.nullcontext() if not buffers or is_looked_at() else _WriteWatch(writes.refuse)
    try:
        with held(), _writes.refusing(writes.refuse), seen:
            with owning(given), _guarding(given) if kept_elsewhere else contextlib.nullcontext():
                output = run(given)
            now = params | kept if scripted else _held(slots)
    except BaseException:
        attributes.restore()
        raise
    attributes.adopt({id(tensor): own[name] for name, tensor in params.items()})
    # Layers that run again in the backward pass (checkpoints) must find the same parameters, and take the lock, which the caller holds now.
    _pass.remember(module, params, partial(_locked, lock, held), given)
    # One that was assigned anew is another tensor; one that was written into has a new version.
    after = _versions(kept)
    expected = {name: version + writes.rewrites[name] for name, version in versions.items()} if writes.rewrites else versions
    changed = [name for name, tensor in kept.items() if not _is_kept(now.get(name), tensor) or after[name] != expected[name]]
    if changed:
        raise StateError(changing(children, changed[0]))
    replaced = [name for name, tensor in params.items() if now.get(name) is not tensor]
    if replaced:
        raise StateError(
            f"stateless: the forward pass puts another tensor in the place of the parameter {replaced[0]!r}, whose gradient would be lost. "
            "Give what is computed from a parameter another name."
        )
    if writes.param:
        attributes.expect_same(writes.param)
    return output


def _is_kept(now: Tensor | None, before: Tensor) -> bool:
    """Whether a module still holds this tensor, or one of its values, as `.to(device)` of a quantised weight gives where it is there."""
    return now is before or now is not None and type(now) is type(before) and _functorch.are_one_view(now, before)


def _versions(tensors: dict[str, Tensor]) -> dict[str, int]:
    with torch._C.DisableTorchFunction():
        return {name: tensor._version for name, tensor in tensors.items()}


def _warn_of_stale_params(module: nn.Module, params: dict[str, Tensor], own: dict[str, Tensor], memory: dict[str, int]) -> None:
    """Warn if `params` are still those that stateless returned, at the addresses in `memory`, but the module's have moved."""
    with torch._C.DisableTorchFunction():
        held = [name for name in params if name in memory and name in own]
        try:
            moved = [name for name in held if own[name].data_ptr() != memory[name]]
        except RuntimeError as error:  # a wrapper of a transform has no memory
            left = [name for name in held if _functorch.alive(own[name]) is not own[name]]
            if left:
                raise StateError(
                    f"stateless: the module's parameter {left[0]!r} is a tensor that a torch.func transform has left there, as "
                    "torch.func.functional_call does in modules that have several names. Assign the module's own parameter to it again."
                ) from error
            moved = [name for name in held if _address_of(own[name]) != memory[name]]
        stale = [name for name in moved if _address_of(params[name]) == memory[name]]
    if stale:
        warn_once(
            (ref(module), "stale"),
            f"stateless: the module's parameter {stale[0]!r} has been moved, cast or assigned anew since stateless was called. The one in "
            "params is now another tensor, which an optimizer of the module does not update. Call stateless again.",
            UserWarning,
        )


def _address_of(tensor: Tensor) -> int:
    """Where the values begin, under all wrappers of transforms."""
    return _functorch.bare(tensor).data_ptr()


@contextlib.contextmanager
def _locked(lock: Any, held: _pass.Held) -> Iterator[None]:
    """The context that `held` makes, entered by one thread at a time."""
    with _ambient.uncached(), lock, held():
        yield


_Slots = dict[str, tuple[dict[str, Tensor | None], str]]


def _slots(children: dict[str, nn.Module], kind: str) -> _Slots:
    """Where the modules hold their parameters, or buffers: full name -> (dict, key). A module with two names is listed once."""
    slots: _Slots = {}
    for prefix, child in children.items():
        holder = getattr(child, kind)
        for key in holder.keys():  # a scripted module's is no mapping
            slots[f"{prefix}.{key}" if prefix else key] = holder, key
    return slots


def _held(slots: _Slots) -> dict[str, Tensor]:
    """The tensors in these slots, by full name."""
    return {name: tensor for name, (holder, key) in slots.items() if key in holder and (tensor := holder[key]) is not None}


@contextlib.contextmanager
def _holding(slots: _Slots, params: dict[str, Tensor], buffers: dict[str, Tensor], layers: list[nn.RNNBase]) -> Iterator[None]:
    """A context in which these slots hold other tensors, as under `torch.func.functional_call`.

    `params` are parameters to isinstance, and have the attributes that the module's own have, such as the scale of a quantised weight.

    `layers` are the recurrent ones. Each lists its weights anew when they have changed, and on a GPU moves them then: a list of the call's
    tensors would make the next call of the module move its own parameters away from those that `stateless` has returned.
    """
    tensors = {**params, **buffers}
    own = {name: slots[name][0][slots[name][1]] for name in tensors}
    marked = [(vars(tensor), _missing(tensor, own[name])) for name, tensor in params.items()]
    lists = [(layer, layer._flat_weights, layer._flat_weight_refs) for layer in layers]
    try:
        _put(slots, tensors)
        for attributes, added in marked:
            attributes.update(added)
        with _ambient.unmoved:
            yield
    finally:
        _put(slots, own)
        for layer, weights, refs in lists:
            layer._flat_weights, layer._flat_weight_refs = weights, refs
        for attributes, added in marked:
            for key in added:
                attributes.pop(key, None)


def _missing(tensor: Tensor, parameter: Any) -> dict[str, Any]:
    """What Python sees of a parameter and not of a tensor: that it is one, and the attributes that were set on it, but for psg's marks."""
    if isinstance(tensor, nn.Parameter):
        return {}
    found = {"_is_param": True}
    if attributes := vars(parameter):
        found |= {key: value for key, value in attributes.items() if not key.startswith("_psg_")}
    return {key: value for key, value in found.items() if key not in vars(tensor)}


def _put(slots: _Slots, tensors: Mapping[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        holder, key = slots[name]
        holder[key] = tensor


@contextlib.contextmanager
def _scripted_holding(module: torch.jit.ScriptModule, params: dict[str, Tensor]) -> Iterator[None]:
    """A context in which the parameter slots of a scripted or traced module hold other tensors."""
    slots = {}
    for name in params:
        *path, attribute = name.split(".")
        holder = module._c
        for part in path:
            holder = holder.getattr(part)
        slots[name] = (holder, attribute, holder.getattr(attribute))
    others = {id(own): params[name] for name, (_, _, own) in slots.items()}
    # Recurrent layers read their parameters from a list of their own.
    layers = [child._c for child in module.modules() if isinstance(child, torch.jit.ScriptModule) and child._c.hasattr("_flat_weights")]
    lists = [(layer, layer.getattr("_flat_weights")) for layer in layers]
    try:
        for name, (holder, attribute, _) in slots.items():
            holder.setattr(attribute, params[name])
        for layer, weights in lists:
            layer.setattr("_flat_weights", [others.get(id(weight), weight) for weight in weights])
        yield
    finally:
        for holder, attribute, own in slots.values():
            holder.setattr(attribute, own)
        for layer, weights in lists:
            layer.setattr("_flat_weights", weights)


def _under_all_names(module: nn.Module, params: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """`params` under all names that the module has for them: tied parameters have several."""
    first: dict[int, str] = {}
    primaries = {name: first.setdefault(id(parameter), name) for name, parameter in own.items()}
    for name in params:
        if primaries.get(name) != name:
            raise InputError(_misnamed(module, name, first))
    return {name: params[primary] for name, primary in primaries.items() if primary in params}


def _misnamed(module: nn.Module, name: str, first: dict[int, str]) -> str:
    for other, parameter in module.named_parameters(remove_duplicate=False):
        if other == name:
            return f"stateless: params has {name!r}, which is tied to {first[id(parameter)]!r}. Pass it under the latter name alone."
    return (
        f"stateless: params has {name!r}, which is no parameter of {kind_of(module)}. Pass what stateless gave, or a part of it; if the "
        "module has changed since, by a parametrization say, call stateless again."
    )


def _keeps_parameters_elsewhere(module: nn.Module) -> bool:
    """Whether the module also holds parameters, or views of them, in unregistered places, such as lists."""
    ids = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    held: list[Any] = []
    for child in module.modules():
        held += [value for name, value in vars(child).items() if name not in ("_parameters", "_buffers", "_modules")]
    tensors = (value for value in _reachable(held) if isinstance(value, Tensor))
    return any(id(_autograd.base_of(tensor) if tensor.requires_grad else tensor) in ids for tensor in tensors)


def _reachable(held: list[Any]) -> Iterator[Any]:
    """These objects, and what they hold if they are collections, functions, methods or partials of functions."""
    seen: set[int] = set()
    while held:
        value = held.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, dict):
            held += iter(value.values())
        elif isinstance(value, (list, tuple)):
            held += iter(value)  # a class derived from them need not have a length
        elif isinstance(value, partial):
            held += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            held += [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            held += [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]


_EMPTY_CELL = CellType()


_KEPT_BY_CRITERION = (
    "stateless: the criterion uses the module's parameter {!r} by a reference of its own, which is not the tensor that the loss is given: "
    "its gradient would be lost. Read it from the module at every call of the criterion, or detach it."
)


def _guarding(names: dict[int, str], message: str = USED_ELSEWHERE) -> contextlib.AbstractContextManager[Any]:
    """A context that refuses ops on these parameters, in psg's passes and outside of them."""
    return owning(names, message) if is_looked_at() else _OwnParameterGuard(names, message)


class _OwnParameterGuard(TorchFunctionMode):
    """Refuses ops on these parameters: they are the module's own, not those that the call was given."""

    def __init__(self, names: dict[int, str], message: str) -> None:
        super().__init__()
        self._names = names
        self._message = message
        self._level = _functorch.current_level()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_of(args, kwargs or {}) if torch.is_grad_enabled() and func not in UNDIFFERENTIATED else ():
            if (bare := _functorch.innermost(tensor, self._level)).requires_grad:
                refuse_own(func, bare, args[0] if args else None, self._names, self._message)
        return func(*args, **(kwargs or {}))


class _WriteWatch(TorchFunctionMode):
    """Shows all writes to `refuse`, as psg's passes do."""

    def __init__(self, refuse: _writes.Refuse) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (target := target_of(func, args, kwargs)) is not None:
            self._refuse(func, args, target)
        return func(*args, **kwargs)


def _refuse_batch_norms(children: dict[str, nn.Module]) -> None:
    for name, child in children.items():
        if _mixes_samples(child) and (child.training or getattr(child, "running_mean", child) is None):
            raise StateError(
                f"stateless: {name or 'the module'} ({kind_of(child)}) is in training mode, or keeps no running statistics, and so mixes "
                "the samples of a batch: no sample has a gradient of its own. Put it in eval mode, with running statistics, or use "
                "GroupNorm, LayerNorm or InstanceNorm."
            )


def _mixes_samples(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name.startswith("BatchNorm")  # the class itself is lost
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _add_batch_dim(argument: Any, dim: int | None) -> Any:
    def add(leaf: Tensor) -> Tensor:
        # A scalar, such as a label, has no dimension that could come first: with batch_dim=1 too it enters as [1].
        return leaf if dim is None else leaf.unsqueeze(dim and min(dim, leaf.ndim))

    return add(argument) if isinstance(argument, Tensor) else _trees.map_tensors(add, argument)


def _loss_of(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", output)
    if loss is None and output is not None:
        raise InputError("stateless: the module's output has .loss = None: did the batch contain labels? Or pass a criterion.")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
        raise InputError(f"stateless: without a criterion the module's output must be the loss or have it as .loss; got {got}.")
    return loss
