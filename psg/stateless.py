"""From an nn.Module to a function of one sample and the parameters it is differentiated for."""

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from psg import _ambient, _functorch, _pass, _trees, _writes
from psg._errors import InputError, StateError, warn_once
from psg._ops import LIKE_ANOTHER, LIKENESSES, leaves_of, name_of
from psg._outside import UNDIFFERENTIATED

# While a function of a module runs, the module holds the parameters of that call: threads take turns. A module may call psg on itself.
_turns: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


# What the functions of modules that are called meanwhile depend on: for whoever traces.
_met: ContextVar[list[Callable[[], Hashable]] | None] = ContextVar("_met", default=None)


@contextlib.contextmanager
def watching() -> Iterator[list[Callable[[], Hashable]]]:
    """A context that gives the `cache_key` of every function of `stateless` that is called in it."""
    met: list[Callable[[], Hashable]] = []
    token = _met.set(met)
    try:
        yield met
    finally:
        _met.reset(token)


def state_of(module: nn.Module) -> Hashable:
    """What a trace of a module depends on beside what is written into its tensors."""
    # The modules themselves, whose ids could come again; a program that reads a tensor keeps it.
    children = tuple(module.named_modules(remove_duplicate=False))
    held = (tensor for _, child in children for tensors in (child._parameters, child._buffers) for tensor in tensors.values())
    return children, tuple(child.training for _, child in children), tuple(map(id, held))


def stateless(
    module: nn.Module, criterion: Callable[..., Any] | None = None, *, batch_dim: int | None = 0
) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    """A pure function of one sample's loss, and the parameters to differentiate it for.

    The function adds the batch dimension that modules expect: a sample [*shape] enters as [1, *shape], tensors in trees too. Recurrent
    and Transformer layers of torch.nn expect it second unless they are told `batch_first=True`: say `batch_dim=1` then. Frozen parameters
    and buffers are constants, read from the module at every call; and once more when a derivative of the result is asked for, until when
    they must stay as they are. A parameter that the module holds under several names (tied) appears once, under the first.

    Args:
        module: Any module, scripted and traced ones and those of exported programs included; its mode (train or eval) at the time of a
            call counts. While the function runs, and while a loop runs backward, the module holds the parameters that it was given.
            Threads that call functions of one module take turns; let none use the module itself meanwhile, nor functions of another
            module that shares submodules with it.
        criterion: From the module's output and the target, both with the batch dimension of 1, to the loss: a scalar, such as
            `F.cross_entropy` with its default reduction gives; with `has_aux=True` of the transforms, to a pair of the loss and more, which
            keeps its batch dimension of 1. A function of one positional argument is given the output alone, and there is no target. None if
            the module's output is the loss, or has it as `.loss`. Several targets, or a weight for each sample, go in a tuple. It is called
            while the module has the parameters that the loss is given: a penalty on them counts.
        batch_dim: Where the batch dimension is added, 1 for sequences [t, *] that enter as [t, 1, *]. With None a sample enters as it is:
            for modules written for one sample, and for samples that are batches themselves (all of a user's, or augmentations of one).
            So does the whole batch of `method="batch"`, whose criterion gives one loss for each sample (`reduction="none"`).

    Returns:
        `(loss, params)`. `loss(params, *inputs, target, **shared)`, without a target if the criterion takes none, passes the inputs on to
        the module; a mapping among them is spread as keyword arguments, as in `module(**batch)`. What is given by keyword is the same for
        all samples (masks, flags) and reaches the module as it is. `params` maps names to the parameters that require grad, detached: they
        share their memory with the module's until that is moved, cast or assigned anew, after which stateless is to be called again. A part
        of them is differentiated at the price of that part; the rest are constants, as the module has them. Neither can be pickled.

    Raises:
        InputError: It is no module, no parameter requires grad, a lazy one has no shape yet, the module is wrapped (DataParallel, FSDP,
            Opacus), or `batch_dim` is no dimension. At a call: the output has no loss, `params` is no mapping, or a name in it is not, or
            no longer, the first name of a parameter.
        StateError: At a call: a batch normalisation is in training mode, the module has changed one of its buffers, or it has used a
            parameter that it also holds outside of its registered ones, in a list say, or the criterion one that it has kept.

    Warns:
        UserWarning: A parameter has a hook, which is not called. At a call: the module's parameters have other memory than those of
            `params`, which stateless gave and which therefore no longer change with them.

    Example:
        >>> import torch, psg
        >>> model = torch.nn.Linear(3, 2)
        >>> loss, params = psg.stateless(model, torch.nn.functional.cross_entropy)
        >>> psg.per_sample_grad(loss)(params, torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))["weight"].shape
        torch.Size([5, 2, 3])

    Source: `torch.func.functional_call`.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"stateless: expected a module, got {module!r}. Of a class make an instance first.")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise InputError(f"stateless({type(module).__name__}): a lazy layer has no shape yet. Run the module on a batch once first.")
    wrappers = [child for child in module.modules() if {kind.__name__ for kind in type(child).__mro__} & _WRAPPERS]
    if wrappers:
        raise InputError(
            f"stateless({_kind(wrappers[0])}): it copies, shards or hooks the parameters of the module that it wraps. Give that module "
            "itself, before it is wrapped."
        )
    if batch_dim is not None and (isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0):
        raise InputError(f"stateless(batch_dim={batch_dim!r}): expected an integer of at least 0, or None for samples as they are.")
    turn = _turns.setdefault(module, threading.RLock())
    with turn:
        strays = _strays(module)
        params = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
        hooked = [name for name, parameter in module.named_parameters() if parameter.requires_grad and parameter._backward_hooks]
        memory = {name: parameter.data_ptr() for name, parameter in params.items()}
    if not params:
        raise InputError(f"stateless({type(module).__name__}): no parameter requires grad; unfreeze what is to be differentiated.")
    if hooked:
        warnings.warn(
            f"stateless: the parameter {hooked[0]!r} has a hook, which psg does not call: a sample's gradient is that of its loss.",
            UserWarning,
            stacklevel=2,
        )
    takes_target = criterion is not None and _takes_two(criterion)

    def loss(params: dict[str, Tensor], *sample: Any, **shared: Any) -> Tensor:
        met = _met.get()
        if met is not None and cache_key not in met:
            met.append(cache_key)
        if not isinstance(params, Mapping):
            raise InputError(
                f"stateless: params is a {type(params).__name__}; expected a mapping from names to tensors, such as the one that stateless "
                "returned, or `dict(module.named_parameters())`."
            )
        if takes_target and not sample:
            raise InputError("stateless: expected loss(params, *inputs, target), got no target.")
        batch = [_add_batch_dim(argument, batch_dim) for argument in sample]
        inputs, target = (batch[:-1], batch[-1:]) if takes_target else (batch, [])
        positional = [argument for argument in inputs if not isinstance(argument, Mapping)]
        keyword = {key: value for argument in inputs if isinstance(argument, Mapping) for key, value in argument.items()}

        def run(own: dict[int, str]) -> Any:
            output = module(*positional, **{**keyword, **shared})
            if criterion is None:
                return _loss_of(output)
            with _Strays(own, _KEPT_BY_CRITERION):  # with the others in place: it may have a penalty on them
                return criterion(output, *target)

        try:
            with turn, _ambient.uncached():
                return _call(module, params, run, turn, strays, memory)
        except TypeError as error:
            last = ", the last of them for criterion(output, target)" if takes_target else ""
            named = f", and by keyword, for the module, {', '.join(shared)}" if shared else ""
            error.add_note(f"psg.stateless: loss(params, *inputs, target) was given {len(sample)} arguments after params{last}{named}.")
            raise

    def cache_key() -> Hashable:
        """For `psg.jit`: what the loss depends on beside its arguments and what is written into the tensors of module and criterion."""
        with turn:
            return state_of(module), state_of(criterion) if isinstance(criterion, nn.Module) else None

    loss.cache_key = cache_key  # type: ignore[attr-defined]
    loss.__qualname__ = f"stateless({_kind(module)}).loss"
    return loss, params


_WRAPPERS = {"DataParallel", "FullyShardedDataParallel", "FSDPModule", "GradSampleModule"}
"""Modules around modules, by the names of their classes, that do with parameters what no function can."""


def _takes_two(criterion: Callable[..., Any]) -> bool:
    """Whether a criterion takes a target beside the output."""
    try:
        parameters = inspect.signature(criterion.forward if isinstance(criterion, nn.Module) else criterion).parameters.values()
    except (TypeError, ValueError):
        return True  # one of torch's own, say
    positional = [own for own in parameters if own.kind in (own.POSITIONAL_ONLY, own.POSITIONAL_OR_KEYWORD)]
    return len(positional) != 1 or any(own.kind == own.VAR_POSITIONAL for own in parameters)


def _call(
    module: nn.Module,
    params: dict[str, Tensor],
    run: Callable[[dict[int, str]], Any],
    turn: Any,
    strays: dict[int, str],
    memory: dict[str, int],
) -> Any:
    """Run what calls the module, with the names of its own parameters by id, while it has others; raise if that has changed a buffer."""
    # Read at every call: submodules may have been exchanged, and parameters tied, since the last.
    children = dict(module.named_modules())
    _refuse_batch_norms(children)
    slots, buffer_slots = _slots(children, "_parameters"), _slots(children, "_buffers")
    own = _held(slots)
    _warn_of_those_left_behind(module, params, own, memory)
    params = _under_all_names(module, params, own)
    # Those that are not asked for are constants, as frozen ones are: with a history of their own the result would have one.
    constants: dict[int, Tensor] = {}  # one for all names of those that are tied
    others = {name: parameter for name, parameter in own.items() if name not in params and parameter.requires_grad}
    rest = {name: constants.setdefault(id(parameter), parameter.detach()) for name, parameter in others.items()}
    buffers = {name: _ambient.usable(buffer) for name, buffer in _held(buffer_slots).items()}
    slots |= buffer_slots
    versions = {name: buffer._version for name, buffer in buffers.items()}
    scripted = module if isinstance(module, torch.jit.ScriptModule) else None

    @contextlib.contextmanager
    def holding() -> Iterator[None]:
        with turn, _ambient.uncached():
            with _holding(slots, {**params, **rest, **buffers}) if scripted is None else _scripted_holding(scripted, params | rest):
                yield

    met = {key: name for key, name in strays.items() if name in params}
    refuse = _refuses_writes(children, buffers)
    with holding(), _writes.refusing(refuse) if buffers else contextlib.nullcontext():
        with _Strays(met, _KEPT_BY_MODULE) if met else contextlib.nullcontext():
            output = run({id(parameter): name for name, parameter in own.items() if name in params})
        now = buffers if scripted is not None else _held(buffer_slots)
    # What runs again in the backward pass is to find the same.
    _pass.remember(module, params, holding)
    # A buffer that was assigned anew is another tensor; one that was written into has a new version.
    changed = [name for name, buffer in buffers.items() if now.get(name) is not buffer or buffer._version != versions[name]]
    if changed:
        raise StateError(_changing(children, changed[0]))
    return output


def _warn_of_those_left_behind(module: nn.Module, params: dict[str, Tensor], own: dict[str, Tensor], memory: dict[str, int]) -> None:
    """Warn of what stateless gave, as `memory` tells, where the module has something else by now."""
    with torch._C.DisableTorchFunction():
        moved = [name for name in params if name in memory and name in own and own[name].data_ptr() != memory[name]]
        stale = [name for name in moved if _functorch.memory_of(params[name]) == memory[name]]
    if stale:
        warn_once(
            (type(module), "stale"),
            f"stateless: the module's parameter {stale[0]!r} has been moved, cast or assigned anew since stateless was called, and is no "
            "longer the one in params, which no optimizer of the module reaches. Call stateless again.",
            UserWarning,
        )


def _refuses_writes(children: dict[str, nn.Module], buffers: dict[str, Tensor]) -> Callable[[Any], None]:
    """What raises for one of the buffers that is about to be written into: by `.data` no version would tell."""
    names: dict[int, str] = {}

    def refuse(target: Any) -> None:
        if not names:
            names.update((_functorch.memory_of(buffer), name) for name, buffer in buffers.items() if buffer.numel())
        for tensor in _writes.written(target):
            if (name := names.get(_functorch.memory_of(tensor))) is not None:
                raise StateError(_changing(children, name))

    return refuse


def _changing(children: dict[str, nn.Module], name: str) -> str:
    owner = name.rpartition(".")[0]
    way_out = "Put the module in eval mode, or take the update out of forward."
    if not children[owner].training:
        way_out = "Take the update out of forward; if it fills a cache, run the module on the longest input once before."
    return (
        f"stateless: the forward pass of {owner or 'the module'} ({_kind(children[owner])}) changes its buffer {name!r}, so that one "
        f"sample's gradient would depend on the samples before it. {way_out}"
    )


_Slots = dict[str, tuple[dict[str, Tensor | None], str]]


def _slots(children: dict[str, nn.Module], kind: str) -> _Slots:
    """Where the modules hold their parameters, or buffers: by full name a dict and its key; those of a module with two names once."""
    holders = [(f"{prefix}." if prefix else "", getattr(child, kind)) for prefix, child in children.items()]
    return {f"{prefix}{key}": (holder, key) for prefix, holder in holders for key in holder.keys()}  # noqa: SIM118 (a scripted module's)


def _held(slots: _Slots) -> dict[str, Tensor]:
    """What is in them."""
    held = {name: holder[key] for name, (holder, key) in slots.items() if key in holder}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


@contextlib.contextmanager
def _holding(slots: _Slots, tensors: dict[str, Tensor]) -> Iterator[None]:
    """A context in which these slots hold other tensors: what `torch.func.functional_call` calls a module in."""
    own = {name: slots[name][0][slots[name][1]] for name in tensors}
    try:
        _put(slots, tensors)
        yield
    finally:
        _put(slots, own)


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
    # Recurrent layers hold theirs in a list too, from which they read them.
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
    """The parameters by the names of the module's own; those that are tied there have several."""
    first: dict[int, str] = {}
    primaries = {name: first.setdefault(id(parameter), name) for name, parameter in own.items()}
    for name in params:
        if primaries.get(name) != name:
            raise InputError(_misnamed(module, name, first))
    return {name: params[primary] for name, primary in primaries.items() if primary in params}


def _misnamed(module: nn.Module, name: str, first: dict[int, str]) -> str:
    for other, parameter in module.named_parameters(remove_duplicate=False):
        if other == name:
            return f"stateless: params has {name!r}, which is tied to {first[id(parameter)]!r}. Pass it under that name alone."
    return (
        f"stateless: params has {name!r}, which is no parameter of {_kind(module)}. Pass what stateless gave, or a part of it; if the "
        "module has changed since, by a parametrization say, call stateless again."
    )


def _strays(module: nn.Module) -> dict[int, str]:
    """The parameters that the module also holds where it looks for none, in a list say: their names, by id."""
    names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    held: list[Any] = []
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, dict) and name not in ("_parameters", "_buffers", "_modules"):
                held += value.values()
            else:
                held += value if isinstance(value, (list, tuple)) else [value]
    return {id(value): names[id(value)] for value in held if id(value) in names}


# What tells of a parameter no more than its shape, or is not differentiated.
_HARMLESS = UNDIFFERENTIATED | LIKENESSES


_KEPT_BY_MODULE = (
    "stateless: the module uses its parameter {!r} from a list, dict or attribute that is no registered parameter, where no other can take "
    "its place. Use it by its registered name."
)
_KEPT_BY_CRITERION = (
    "stateless: the criterion uses the module's parameter {!r} as it has kept it, and not as the loss is given it: its gradient would be "
    "lost. Read it from the module whenever the criterion is called, or detach it."
)


class _Strays(TorchFunctionMode):
    """Refuses them: what is kept there is not what the module is called with."""

    def __init__(self, strays: dict[int, str], message: str) -> None:
        super().__init__()
        self._names = strays
        self._message = message

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in leaves_of(args, kwargs or {}) if torch.is_grad_enabled() and func not in _HARMLESS else ():
            shapes = name_of(func) in LIKE_ANOTHER and leaf is not args[0]
            if isinstance(leaf, nn.Parameter) and id(leaf) in self._names and leaf.requires_grad and not shapes:
                raise StateError(self._message.format(self._names[id(leaf)]))
        return func(*args, **(kwargs or {}))


def _refuse_batch_norms(children: dict[str, nn.Module]) -> None:
    for name, child in children.items():
        if _mixes_samples(child) and (child.training or getattr(child, "running_mean", child) is None):
            raise StateError(
                f"stateless: {name or 'the module'} ({_kind(child)}) is in training mode, or keeps no running statistics, and so mixes "
                "the samples of a batch: no sample has a gradient of its own. Put it in eval mode, with running statistics, or use "
                "GroupNorm, LayerNorm or InstanceNorm."
            )


def _kind(module: nn.Module) -> str:
    # A scripted module knows what it was scripted from.
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _mixes_samples(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or _kind(module).startswith("BatchNorm")


def _add_batch_dim(argument: Any, dim: int | None) -> Any:
    def add(leaf: Any) -> Any:
        # A label, say, has no dimension that could come before.
        return leaf.unsqueeze(min(dim, leaf.ndim)) if isinstance(leaf, Tensor) and dim is not None else leaf

    return add(argument) if isinstance(argument, Tensor) else _trees.map_leaves(add, argument)


def _loss_of(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
        raise InputError(f"stateless: without a criterion the module's output must be the loss or have it as .loss; got {got}.")
    return loss
