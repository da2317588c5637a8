"""What psg knows of torch's functions, and helpers that take their arguments apart."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from psg._torch._cached import cached

_ATTRIBUTES = vars(torch._C.TensorBase)
REQUIRES_GRAD, GRAD_FN, IS_LEAF = (_ATTRIBUTES[name].__get__ for name in ("requires_grad", "grad_fn", "is_leaf"))
GET_DATA, SET_DATA = _ATTRIBUTES["data"].__get__, _ATTRIBUTES["data"].__set__
SET_REQUIRES_GRAD = _ATTRIBUTES["requires_grad"].__set__
PREDICATES = {REQUIRES_GRAD, GRAD_FN, IS_LEAF}
MEMORY_MARKS = {_ATTRIBUTES["_base"].__get__, _ATTRIBUTES["_version"].__get__, Tensor._is_view}
"""What a tensor says of the memory that it shares with others; wrappers of transforms have neither a base nor versions."""

METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_quantized", "is_nested")
} | {Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.stride, Tensor.__len__}


class Node:
    """Stands for the autograd node of a tensor: fn can see that there is one, and its name.

    The cotangents that rules take do not pass through the node, so a hook on it, or any other use of it, is refused.
    """

    def __init__(self, node: Any, refuse: Callable[[str], Any]) -> None:
        self._node = node
        self._refuse = refuse

    def name(self) -> str:
        return self._node.name()

    def __getattr__(self, attribute: str) -> Any:
        if self.name() == "_NoopSaveInputsBackward":  # torch's own checkpointing keeps its inputs in it, up to torch 2.12
            return getattr(self._node, attribute)
        return self._refuse(f"{attribute} of the autograd node {self.name()}")


DIFFERENTIATING = {torch.autograd.grad, Tensor.backward}
"""Calls that differentiate. Function modes get all their options as keyword arguments."""

ACCUMULATING = {torch.autograd.backward, Tensor.backward}
"""Calls that add gradients to the `.grad` of leaves."""

TEXTS = {Tensor.__repr__, Tensor.__format__}
"""Calls that give text, as `str` and `print` do too."""

CONVERSIONS = {
    *TEXTS,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__complex__,
    Tensor.__index__,
    Tensor.item,
    Tensor.tolist,
}
ARRAYS = {Tensor.numpy, Tensor.__array__}
"""Calls that give NumPy arrays."""

SHOWING = {*ARRAYS, Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr}
"""Calls that give what has a tensor's memory and is no tensor."""

# These use Python values too, but read them from memory without an op, unseen by tracers: those of their first argument (_READS), of
# where to split (_SPLITS), of the tensors in a list (_FROM_LISTS, _INDEXING), or of how many sequences each step of a pack has (_PACKED).
_READS = {Tensor.tolist, *TEXTS, *ARRAYS, Tensor.__dlpack__}
_SPLITS = {torch.tensor_split, Tensor.tensor_split}
_FROM_LISTS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new, torch.sparse_coo_tensor}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_PACKED = {torch._VF._pad_packed_sequence, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


def read_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose values this call reads from memory without an op."""
    items: Iterable[Any] = ()
    if func in _READS:
        items = args[:1]
    elif func in _SPLITS:
        items = (*args[1:], *(value for name, value in kwargs.items() if name != "input"))
    elif func in _FROM_LISTS:
        items = _in_lists((*args, *kwargs.values()))
        if func is torch.sparse_coo_tensor and len(args) < 3 and kwargs.get("size") is None:
            items = [*items, args[0] if args else kwargs["indices"]]
    elif func in _INDEXING and isinstance(args[1], (tuple, list)):
        items = _in_lists(args[1])  # a list of tensors is a tuple of indices, but one inside of it is an index
    elif func in _PACKED and isinstance(args[1], Tensor) and not args[1].is_floating_point():
        items = args[1:2]
    return [item for item in items if isinstance(item, Tensor)]


def _in_lists(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors in those arguments that are lists, or sequences of another kind."""
    return tensors_of([list(item) for item in arguments if isinstance(item, Sequence) and not isinstance(item, str)], {})


def dims_before(places: Mapping[int, bool], ndim: int) -> int:
    """How many dimensions come before those of an index in what `tensor[index]` reads: none unless the tensors in it are side by side.

    Args:
        places: The dimensions that tensors index, in order, each with whether that tensor counts: in brackets, one without dimensions is a
            number.
        ndim: The number of all dimensions.
    """
    counted = [dim for dim, counts in places.items() if counts]
    others = [dim for dim in range(ndim) if dim not in places]
    if not counted or any(counted[0] < dim < counted[-1] for dim in others):
        return 0
    return sum(dim < counted[0] for dim in others)


# Ops that select by a mask, or find nonzero entries: the number of entries is a Python value too.
MASKED = {Tensor.__getitem__, Tensor.__setitem__, torch.masked_select, Tensor.masked_select}
LOCATING = {torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.where}
REQUIRING = {Tensor.requires_grad_, SET_REQUIRES_GRAD}
"""Ops that can turn a tensor into an autograd leaf."""

DETACHING = {torch.detach_, Tensor.detach_}
"""Ops that detach the tensor that they get, and not a new one."""


def chooses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is torch.where between two values; of a condition alone, it locates entries."""
    return func is torch.where and len(args) + len(kwargs) > 2


def tells_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the caller learns more from this call than whether a tensor is true: Python values, NumPy arrays, numbers of entries."""
    if func in CONVERSIONS:
        return func is not Tensor.__bool__
    if func in MASKED or func in LOCATING:
        return not chooses(func, args, kwargs)
    return func in ARRAYS or bool(read_by(func, args, kwargs))


# Ops that use only the shape, dtype and device of their tensor.
LIKENESSES = {
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty),
}

# Ops, by name, that use only the dtype and device of their second tensor; and those that use only its shape, dtype and device.
CONVERTING = {"to", "type", "type_as"}
LIKE_ANOTHER = {*CONVERTING, "view_as", "expand_as", "reshape_as"}

# Ops that make tensors into which functions write: in the first set often, in the second now and then.
FACTORIES: list[set[Any]] = [
    {torch.zeros, torch.ones, torch.full, torch.empty, Tensor.new, Tensor.new_tensor, *LIKENESSES},
    {
        *(torch.tensor, torch.scalar_tensor, torch.as_tensor, torch.asarray),
        *(torch.eye, torch.arange, torch.linspace, torch.empty_strided, torch.clone, Tensor.clone),
        *(torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal),  # shared by all samples if randomness="same"
    },
]

# Those of them that always make a tensor in memory of its own.
NEW = FACTORIES[0].union(FACTORIES[1]) - {Tensor.new, torch.as_tensor, torch.asarray}

# Ops whose results often become masks, and are seldom written into.
CONSTANTS = {torch.ones_like, torch.full_like, Tensor.new_ones, Tensor.new_full}

# Functions with several names that compare equal, and so share one key of a cache.
_ALIASES = {"dsmm": "mm", "spmm": "mm", "hsmm": "hspmm", "saddmm": "sspaddmm"}


@cached
def name_of(func: Any) -> str:
    """The name of an op. Those of `torch.library` have their library's in front, so that none is taken for an op of torch's."""
    library = _library_of(func)
    if library not in (None, "aten") and isinstance(func, OpOverloadPacket):
        return func._qualified_op_name
    name = getattr(func, "__name__", str(func))
    name = _ALIASES.get(name, name)
    return func.__self__.__name__ if name == "__get__" else name  # an attribute such as Tensor.T


def base_name(func: Any) -> str:
    """The name of an op without that of its overload: `mul_` for aten.mul_.Tensor."""
    return name_of(func).partition(".")[0]


def _library_of(func: Any) -> str | None:
    """The library of an op that is a packet or an overload; None for others."""
    name = getattr(func, "_qualified_op_name", None) or (func._schema.name if isinstance(func, OpOverload) else None)
    return None if name is None else name.partition("::")[0]


@cached
def is_torchs(func: Any) -> bool:
    """Whether an op is one of torch's own: a user's may be anything, whatever its name and the names of its arguments."""
    library = _library_of(func)
    return (getattr(func, "__module__", None) or "torch").split(".")[0] == "torch" if library is None else library == "aten"


_NUMPYS = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""NumPy's names for arguments, which torch's own functions take, and torch's."""


def torchs_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: the first by its place, and by torch's own names (`dim`), where they have NumPy's (`axis`)."""
    if not kwargs:
        return args, {}
    if not kwargs.keys().isdisjoint(_NUMPYS):
        names = _renamed(func)
        kwargs = {names.get(name, name): value for name, value in kwargs.items()}
    if not args:
        given = _first_names(func) & kwargs.keys()
        if len(given) == 1:
            (first,) = given
            return (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}
    return args, kwargs


@cached
def _first_names(func: Any) -> set[str]:
    """The names that the first argument of a call may have."""
    if isinstance(func, FunctionType):
        return set(func.__code__.co_varnames[: min(func.__code__.co_argcount, 1)])
    first = {schema.arguments[0].name for schema in _schemas(func) if schema.arguments and not schema.arguments[0].kwarg_only}
    return first | {"input"} if "self" in first else first


def _schemas(func: Any) -> list[Any]:
    """What torch says of the arguments of an op, for each of its overloads; nothing of Python functions."""
    if isinstance(func, OpOverload):
        return [func._schema]
    if isinstance(func, OpOverloadPacket):
        return [*func._schemas.values()]
    is_known = isinstance(func, (BuiltinFunctionType, MethodDescriptorType)) and is_torchs(func)
    return torch._C._jit_get_schemas_for_operator(f"aten::{name_of(func)}") if is_known else []


@cached
def _renamed(func: Any) -> dict[str, str]:
    """NumPy's names that an op of torch's takes in the place of its own, and these."""
    own = {"input" if argument.name == "self" else argument.name for schema in _schemas(func) for argument in schema.arguments}
    return {name: known for name, known in _NUMPYS.items() if name not in own and known in own}


@cached
def may_draw(func: Any) -> bool:
    """Whether an op may draw random numbers; an op that is not torch's own may do anything."""
    name = base_name(func)
    if not is_torchs(func) or name in _DRAWING:
        return True
    packet = getattr(torch.ops.aten, name, None)
    return isinstance(packet, OpOverloadPacket) and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, own).tags for own in packet.overloads()
    )


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call may draw random numbers: not if an option, such as a probability of 0, says otherwise."""
    if not may_draw(func):
        return False
    for name, position, default in _SWITCHES.get(func, ()):
        option = kwargs.get(name, args[position] if position < len(args) else default)
        if type(option) in (bool, int, float) and not option:
            return False
    return True


_SWITCHES: dict[Any, tuple[tuple[str, int, float], ...]] = {
    F.scaled_dot_product_attention: (("dropout_p", 4, 0.0),),
    F.dropout: (("p", 1, 0.5), ("training", 2, True)),
}
"""Options of common ops, each with its position and its default, without which a call draws no random numbers."""

# Those written in Python, which have no tags.
_DRAWING = frozenset(
    """
    dropout1d dropout2d dropout3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices gumbel_softmax
    multi_head_attention_forward lobpcg pca_lowrank svd_lowrank custom_function_call
    """.split()
)


def target_of(func: Any, args: Any, kwargs: Any) -> Any:
    """The tensor, or list of tensors, that the call writes into; or None."""
    find = _target_finder(func)
    return kwargs.get("out") if find is None else find(args, kwargs)


def may_write(func: Any) -> bool:
    """Whether an op may write into a tensor that is not its argument `out`."""
    return _target_finder(func) is not None


@cached
def _target_finder(func: Any) -> Callable[[Any, Any], Any] | None:
    """The function that finds what a call of `func` writes into; None if that is at most its argument `out`."""
    if not is_torchs(func):
        return partial(mutated, mutating(func))
    if _writes(func):
        return _first
    if base_name(func) in ("fused_moving_avg_obs_fake_quant", "_fused_moving_avg_obs_fq_helper"):
        return _observed
    position = _inplace_position(func)
    return None if position is None else partial(_first_if_inplace, position)


def _first(args: Any, kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _observed(args: Any, kwargs: Any) -> Any:
    """What an observer of ranges for quantisation writes, while it is on; the versions of these tensors stay as they are."""
    given = {**dict(zip(("x", "observer_on", "fake_quant_on", *_RANGES), args, strict=False)), **kwargs}
    return [given[name] for name in _RANGES] if given["observer_on"].item() else None


_RANGES = ("running_min", "running_max", "scale", "zero_point")


def _first_if_inplace(position: int, args: Any, kwargs: Any) -> Any:
    if kwargs.get("inplace") or position < len(args) and args[position]:
        return args[0] if args else None
    return kwargs.get("out")


def mutated(names: dict[str, bool], args: Any, kwargs: Any) -> list[Tensor] | None:
    """The tensors that an op of `torch.library` says that it writes into, by what `mutating` gives; None if there are none."""
    if not names:
        return None
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return tensors_of([given[name] for name, writes in names.items() if writes and name in given], {})


def mutating(func: Any) -> dict[str, bool]:
    """For each argument of an op of `torch.library` whether it is written into; nothing if none is."""
    arguments = [argument for schema in _schemas(func)[:1] for argument in schema.arguments]
    found = {argument.name: argument.is_write for argument in arguments}
    return found if any(found.values()) else {}


def _writes(func: Any) -> bool:
    name = base_name(func)
    if name in ("requires_grad_", "detach_") or func == SET_REQUIRES_GRAD:
        return False  # these change what autograd records, and no values
    if name.startswith("__i"):
        return hasattr(Tensor, "__" + name[3:])  # __iadd__ has an __add__; __invert__, __int__ and __index__ write nothing
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def out_of_place(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """The call that returns what this one writes into its first argument, as a new tensor; None for others than torch's ops."""
    name, position = base_name(func), _inplace_position(func)
    if not is_torchs(func) or isinstance(func, (OpOverload, OpOverloadPacket)) or not args or "out" in kwargs:
        return None
    if position is not None:
        return func, args[:position], {option: value for option, value in kwargs.items() if option != "inplace"}
    if name == "fill_diagonal_" and args[0].ndim == 2 and not kwargs.get("wrap", len(args) > 2):
        mask = torch.eye(*args[0].shape, dtype=torch.bool, device=args[0].device)
        return Tensor.masked_fill, (args[0], mask, *args[1:2]), {key: value for key, value in kwargs.items() if key == "value"}
    # Not of `__iand__` and its kin, which have no derivative; torch calls `__iadd__` and its kin `add_`.
    if not name.endswith("_") or name.endswith("__") or not hasattr(Tensor, name[:-1]):
        return None
    return getattr(Tensor, name[:-1]), args, kwargs


def is_mask(index: Tensor) -> bool:
    """Whether an index selects entries where it is true."""
    return index.dtype in (torch.bool, torch.uint8)


class Assigned(NamedTuple):
    """What a write puts in the place of entries, whatever they were."""

    index: Any
    value: Any


def assigned_by(func: Any, args: Any, kwargs: Any) -> Assigned | None:
    """What a write into its first argument assigns; None if it computes something from that."""
    if func is Tensor.__setitem__:
        return Assigned(*args[1:])
    name = base_name(func)
    if name not in _ASSIGNING or not is_torchs(func) or isinstance(func, OpOverload):
        return None
    return Assigned(..., 0 if name == "zero_" else args[1] if len(args) > 1 else kwargs.get(_ASSIGNING[name]))


_ASSIGNING = {"copy_": "src", "fill_": "value", "zero_": ""}
"""Writes of a whole tensor, with the name of the argument that holds the value."""


def index_put(target: Tensor, index: Any, value: Any) -> tuple[Any, Any, Any] | None:
    """The call that returns what `target[index] = value` makes of the target; None where the value would be converted."""
    parts = index if isinstance(index, tuple) else (index,)
    if target.ndim and parts and all(isinstance(part, Tensor) and part.ndim > 0 for part in parts):
        taken = [(1, part.ndim) if is_mask(part) else (part.ndim, 1) for part in parts]
        return _put(target, parts, value, max(ndim for ndim, _ in taken) + target.ndim - sum(dims for _, dims in taken))
    if target.ndim and len(parts) <= target.ndim and all(type(part) in (int, slice) for part in parts):
        indices = _meshed(parts, target)
        return _put(target, indices, value, max(own.ndim for own in indices))
    return put_at(target, torch.arange(target.numel(), device=target.device).reshape(target.shape)[index], value)


def put_at(target: Tensor, places: Tensor, value: Any) -> tuple[Any, Any, Any] | None:
    """The same for places of the target in one row."""
    return _put(target, torch.unravel_index(places, target.shape), value, places.ndim) if target.ndim else None


def _put(target: Tensor, indices: Any, value: Any, ndim: int) -> tuple[Any, Any, Any] | None:
    if isinstance(value, (bool, int, float)):
        value = torch.full((), value, dtype=target.dtype, device=target.device)
    if not isinstance(value, Tensor) or (value.dtype, value.device) != (target.dtype, target.device):
        return None
    return (Tensor.index_put, (target, tuple(indices), value), {}) if value.ndim <= ndim else None


def _meshed(parts: Sequence[int | slice], tensor: Tensor) -> tuple[Tensor, ...]:
    """Numbers and slices of a tensor's dimensions as integer tensors, which broadcast to the shape that they select."""
    whole = [*parts, *[slice(None)] * (tensor.ndim - len(parts))]
    kept = sum(isinstance(part, slice) for part in whole)
    found: list[Tensor] = []
    for part, size in zip(whole, tensor.shape, strict=True):
        if isinstance(part, slice):
            kept -= 1
            found.append(torch.arange(*part.indices(size), device=tensor.device).reshape(-1, *[1] * kept))
        else:
            found.append(torch.full((), part, device=tensor.device))
    return tuple(found)


def _inplace_position(func: Any) -> int | None:
    # torch.nn.functional's activations are Python functions with an option `inplace`.
    names = func.__code__.co_varnames[: func.__code__.co_argcount] if isinstance(func, FunctionType) else ()
    return names.index("inplace") if "inplace" in names else None


def handles_ops(kind: Any) -> bool:
    """Whether a class of tensors handles ops itself, by a `__torch_function__` of its own."""
    if kind in (Tensor, torch.nn.Parameter):
        return False
    handler = kind.__torch_function__
    return getattr(handler, "__func__", handler) not in _USUAL


_USUAL = {getattr(kind.__torch_function__, "__func__", kind.__torch_function__) for kind in (Tensor, torch.nn.Parameter)}


def handlers_among(types: Iterable[type]) -> list[Any]:
    """Those of these classes of tensors that handle a call, in order; none where a handler has switched them off, to call the op itself."""
    return [*filter(handles_ops, types)] if torch._C._is_torch_function_enabled() else []


def handle_only(handlers: Sequence[Any], tensors: Iterable[Tensor], fits: Callable[[Tensor], bool]) -> bool:
    """Whether these classes handle a call because of tensors that fit alone, and not because of other tensors or objects."""
    own = [tensor for tensor in tensors if handles_ops(type(tensor))]
    return all(map(fits, own)) and {*map(type, own)} == {*handlers}


def run_handlers(mode: TorchFunctionMode, handlers: Sequence[Any], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run a call as tensors of such classes do it, frozen quantised weights say, under a mode that watches what they call.

    Raises:
        TypeError: None of the classes has an implementation.
    """
    with mode:
        for kind in handlers:
            output = kind.__torch_function__(func, types, args, kwargs)
            if output is not NotImplemented:
                return output
    raise TypeError(f"no implementation found for {name_of(func)} on types {', '.join(kind.__name__ for kind in handlers)}")


def foreign_handler(types: Iterable[type]) -> str | None:
    """Which of these classes of tensors handles ops itself, so that rules would not compute what it does; None if none does."""
    found = next(filter(handles_ops, types), None)
    return None if found is None else handled_by(found)


def handled_by(kind: type) -> str:
    """A message that fn uses such a class."""
    return f"fn uses a {kind.__name__}, a class of tensors with a __torch_function__ of its own, which .as_subclass(torch.Tensor) takes off"


def foreign_mode() -> str | None:
    """A function mode that the caller has entered, and that may change ops, which rules would not know; None if there is none."""
    if not torch._C._len_torch_function_stack():
        return None
    kinds = [type(mode) for mode in _get_current_function_mode_stack()]
    # torch's own modes, such as that of a default device, change no op of fn's.
    found = next((kind for kind in kinds if kind.__module__.split(".")[0] not in ("torch", "psg")), None)
    if found is None:
        return None
    return f"the call runs under {found.__name__}, a function mode that may change ops: enter it inside fn, or leave it"


Place = tuple[str, int | None]
"""Where a tensor stands among a call's arguments: a name, and an index if that argument is a list or tuple of tensors."""


def places_of(arguments: dict[str, Any]) -> list[tuple[Place, Tensor]]:
    places: list[tuple[Place, Tensor]] = []
    for name, argument in arguments.items():
        if isinstance(argument, Tensor):
            places.append(((name, None), argument))
        elif isinstance(argument, (list, tuple)):
            places += [((name, i), item) for i, item in enumerate(argument) if isinstance(item, Tensor)]
    return places


def replace_at(arguments: dict[str, Any], values: dict[Place, Any]) -> dict[str, Any]:
    """The arguments with these values in their places; a list or tuple of tensors in which one is replaced becomes a list."""
    replaced = dict(arguments)
    for (name, index), value in values.items():
        if index is None:
            replaced[name] = value
        elif replaced[name] is arguments[name]:
            replaced[name] = [values.get((name, i), item) for i, item in enumerate(arguments[name])]
    return replaced


def place_name(place: Place) -> str:
    name, index = place
    return name if index is None else f"{name}[{index}]"


_PLAIN = frozenset({type(None), bool, int, float, complex, str, type(...), torch.dtype, torch.device, torch.memory_format, torch.layout})


def operands_of(args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors among the leaves of an op's arguments, and the leaves that are neither tensors nor plain values.

    Arguments nest in lists, tuples and dicts only.
    """
    tensors: list[Tensor] = []
    others: list[Any] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif type(item) in _PLAIN:
            continue
        elif isinstance(item, (tuple, list, dict)):
            if not isinstance(item, dict) and _PLAIN.issuperset(map(type, item)):
                continue  # sizes, strides, paddings
            inner = operands_of((), item) if isinstance(item, dict) else operands_of(item, {})
            tensors += inner[0]
            others += inner[1]
        else:
            others.append(item)
    return tensors, others


def tensors_of(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the leaves of an op's arguments."""
    return operands_of(args, kwargs)[0]


def substitute(tree: Any, function: Callable[[Any], Any], keeps: Callable[[Any], bool] | None = None) -> Any:
    """The same arguments with `function` applied to every leaf. Parts that `keeps` is true of are the same objects."""
    if keeps is not None and keeps(tree):
        return tree
    if isinstance(tree, dict):
        return {key: substitute(item, function, keeps) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [substitute(item, function, keeps) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree)


def substitute_tensors(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same arguments with `function` applied to every tensor. Lists and dicts that hold none are the same objects."""
    return substitute(tree, function, keeps=lambda part: not tensors_of((part,), {}))


def call_key(*arguments: Any) -> Any:
    """A cache key for calls of a deterministic op: tensors by identity, plain values by type and value. None if there is anything else."""
    parts = [_key(argument) for argument in arguments]
    return None if None in parts else tuple(parts)


def _key(item: Any) -> Any:
    if isinstance(item, Tensor):
        return id(item)
    if isinstance(item, (tuple, list)):
        inner = call_key(*item)
        return None if inner is None else (type(item), inner)
    if isinstance(item, dict):
        inner = call_key(*item.values())
        return None if inner is None else (tuple(item), inner)
    if isinstance(item, slice):
        inner = call_key(item.start, item.stop, item.step)
        return None if inner is None else (slice, inner)
    return (type(item), repr(item)) if type(item) in _PLAIN else None  # by repr, since 0.0 == -0.0, and type, since True == 1
