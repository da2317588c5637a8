"""One call of a function on a batch: its arguments checked, flattened, and split into chunks and samples."""

import inspect
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args
from weakref import ref

import torch
from torch import Tensor

from psg import _trees
from psg._errors import InputError, a_kind, as_integer, code_of, warn_once
from psg._hardware import _memory
from psg._torch import _ambient, _autograd, _functorch, _random
from psg._watch import _copies
from psg._watch._outside import Outside

Method = Literal["auto", "capture", "vmap", "loop", "batch"]
Randomness = Literal["different", "same", "error"]


@dataclass
class Options:
    """The options of a transform, with NumPy's integers as ints; see `psg.transforms`.

    Raises:
        InputError: A value is not one of those allowed.
    """

    argnums: int | tuple[int, ...]
    in_dims: Any = None
    has_aux: bool = False
    randomness: str = "different"
    chunk_size: int | str | None = None
    method: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.has_aux, bool):
            raise InputError(f"has_aux={self.has_aux!r}: expected True or False.")
        _one_of("randomness", self.randomness, get_args(Randomness))
        _one_of("method", self.method, get_args(Method))
        chunk = self.chunk_size
        if isinstance(chunk, str):
            _memory.parse(chunk)
        elif chunk is not None and (chunk := as_integer(chunk, least=1)) is None:
            raise InputError(
                f"chunk_size={self.chunk_size!r}: expected an integer of at least 1, bytes as in '512 MiB', 'auto', or None for the whole "
                "batch at once."
            )
        given = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        numbers = tuple(number for number in map(as_integer, given) if number is not None)
        if not numbers or len(numbers) < len(given):
            raise InputError(
                f"argnums={reprlib.repr(self.argnums)}: expected an integer or a non-empty tuple of integers. The batch goes to the "
                "function that the transform returns, per_sample_grad(fn)(params, *batch)."
            )
        self.chunk_size, self.argnums = chunk, numbers if isinstance(self.argnums, tuple) else numbers[0]
        self.in_dims = tuple(map(_dim, self.in_dims)) if isinstance(self.in_dims, (tuple, list)) else _dim(self.in_dims)


Kept = Literal["gradients", "factors", "reductions"]
"""What a transform keeps of each sample: its materialised gradient, the factors of it, or what these are reduced to."""


@dataclass(eq=False)
class Call:
    """A function, and a batch to call it on, flattened; not changed once it is made.

    Attributes:
        name: The name of the transform, for messages.
        fn: The function of one sample.
        leaves: The leaves of its positional arguments.
        spec: The structure of the positional arguments.
        dims: For each leaf the dimension of the samples, or None.
        params: The positions in `leaves` of those to differentiate.
        paths: The path of each leaf in the arguments, for messages.
        kwargs: Keyword arguments, the same for every sample.
        gradient_spec: The structure of the trees that are differentiated.
        has_aux: Whether fn returns (loss, aux).
        randomness: "different", "same" or "error".
        n: The number of samples.
        kept: What the transform keeps of each sample.
        outside: What to do with tensors with a history that fn closes over.
        tensors: The leaves that are tensors.
        tensor_dims: For each of `tensors` the dimension of the samples, or None.
        tensor_params: The positions in `tensors` of those to differentiate, in the order of `params`.
        keyword_tensors: The tensors among the keyword arguments.
    """

    name: str
    fn: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    dims: list[int | None]
    params: list[int]
    paths: "Paths"
    kwargs: dict[str, Any]
    gradient_spec: Any
    has_aux: bool
    randomness: str
    n: int
    kept: Kept
    outside: Outside = field(default_factory=Outside)
    tensors: list[Tensor] = field(init=False)
    tensor_dims: list[int | None] = field(init=False)
    tensor_params: list[int] = field(init=False)
    keyword_tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        # Not cached properties: in Python 3.11 these take a lock.
        positions = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        rank = {position: i for i, position in enumerate(positions)}
        self.tensors = [self.leaves[position] for position in positions]
        self.tensor_dims = [self.dims[position] for position in positions]
        self.tensor_params = [rank[position] for position in self.params]
        self.keyword_tensors = _trees.all_tensors(list(self.kwargs.values())) if self.kwargs else []

    @property
    def needs_derivative(self) -> bool:
        """Whether the result of this call must be differentiable, for a torch.func transform or for plain autograd."""
        if _functorch.is_transformed():
            return True
        return torch.is_grad_enabled() and any([t.requires_grad for t in (*self.tensors, *self.outside.found)])

    def watched_by(self, outside: Outside) -> "Call":
        """The same call with another `outside`. Unlike `replace`, it computes nothing anew."""
        call = object.__new__(Call)
        vars(call).update(vars(self), outside=outside)
        return call

    def shared_draws(self) -> _random.State | None:
        """The generators' states if randomness="same", for every attempt and chunk to draw the same random numbers; else None."""
        return _random.get_state(self.tensors) if self.randomness == "same" else None

    def gradient_tree(self, leaves: Sequence[Any]) -> Any:
        """The tree that is differentiated, or the tuple of such trees, with these leaves."""
        return _trees.unflatten(self.gradient_spec, leaves)

    def evaluate(self, leaves: Sequence[Any], batch: bool = False, copies: bool = False) -> tuple[Tensor, Any]:
        """Call fn on one sample's leaves, or with `batch` on those of the whole batch -> (loss, aux).

        With `copies`, fn gets copies of the tensors among the keyword arguments, which it may write into.

        Raises:
            InputError: fn does not return a real scalar (for a batch, [n]), or with has_aux no pair, or for a batch an auxiliary tensor
                without the samples in dim 0.
        """
        kwargs = _copied(self.kwargs) if copies and self.keyword_tensors else self.kwargs
        with _ambient.uncompiled(), _ambient.unmoved, _autograd.in_this_thread():
            output = self.fn(*_trees.unflatten(self.spec, leaves), **kwargs)
        aux = None
        if self.has_aux:
            if not isinstance(output, tuple) or len(output) != 2:
                raise InputError(f"{self.name}, has_aux=True: expected fn to return (loss, aux), got {_describe(output)}.")
            output, aux = output
        with torch._C.DisableTorchFunction():  # modes watch fn, not these questions
            self._expect_loss(output, batch)
        for tensor in _trees.all_tensors(aux) if batch else ():
            if tensor.shape[:1] != (self.n,):
                raise InputError(
                    f'{self.name}, method="batch": expected the {self.n} samples in dim 0 of every tensor in aux, got one of shape '
                    f"{tuple(tensor.shape)}."
                )
        return output, aux

    def _expect_loss(self, output: Any, batch: bool) -> None:
        """Refuse what is no real scalar, or for a batch no [n]."""
        prefix = f'{self.name}, method="batch"' if batch else self.name
        if not isinstance(output, Tensor):
            what = f"a tensor with one loss for each of the {self.n} samples" if batch else "a scalar tensor for one sample"
            hint = ""
            if isinstance(output, (int, float)):
                hint = " A number has no derivative: leave out .item() or float()."
            elif batch and isinstance(output, (tuple, list)) and len(output) == self.n:
                hint = " Join the losses by torch.stack."
            elif isinstance(output, tuple):
                hint = " To return more than the loss, pass has_aux=True."
            raise InputError(f"{prefix}: expected fn to return {what}, got {_describe(output)}.{hint}")
        if batch and output.shape != (self.n,):
            raise InputError(
                f"{prefix}: expected fn to return one loss for each of the {self.n} samples, "
                f'got a tensor of shape {tuple(output.shape)}. Take the loss with reduction="none", a module with batch_dim=None.'
            )
        if not batch and output.ndim != 0:
            raise InputError(
                f"{self.name}: expected fn to return a scalar for one sample, got a tensor of shape {tuple(output.shape)}. "
                'Reduce it inside fn, for example with .sum() or .mean(); a criterion of stateless with reduction="mean".'
            )
        if not output.is_floating_point():
            hint = " Take its .real; for the imaginary part's derivative, make a second call with .imag." if output.is_complex() else ""
            what = "real floating-point losses" if batch else "a real floating-point scalar"
            raise InputError(f"{prefix}: expected fn to return {what}, got dtype {output.dtype}.{hint}")

    def apart(self, outputs: Sequence[Tensor], history: bool = False) -> tuple[Tensor, ...]:
        """What fn has returned, with or without its history; if that is a parameter or an input itself, a clone in memory of its own."""
        held = [*self.tensors, *self.keyword_tensors]
        outputs = outputs if history else [output.detach() for output in outputs]
        return tuple(output.clone() if _functorch.shares_memory(output, held) else output for output in outputs)

    def sample(self, i: int) -> list[Any]:
        """Copies of the leaves for sample i, which fn may write into: every sample gets them as the caller gave them."""

        def own(leaf: Any, dim: int | None) -> Any:
            if dim is not None:
                return _copies.contiguous_copy_of(leaf.select(dim, i))
            return _copies.copy_of(leaf) if isinstance(leaf, Tensor) else leaf

        return [own(leaf, dim) for leaf, dim in zip(self.leaves, self.dims, strict=True)]

    def with_sample_fn(self) -> "Call":
        """For fn a function of a batch: the same call with a function of one sample, which calls fn on a batch of one."""

        def fn(*sample: Any, **kwargs: Any) -> Any:
            leaves, _ = _trees.flatten(sample)
            leaves = [leaf if dim is None else leaf.unsqueeze(dim) for leaf, dim in zip(leaves, self.dims, strict=True)]
            loss, aux = replace(self, kwargs=kwargs, n=1).evaluate(leaves, batch=True)
            if not self.has_aux:
                return loss[0]
            return loss[0], _trees.map_tensors(lambda tensor: tensor[0], aux)

        return replace(self, fn=fn)

    def chunk(self, start: int, size: int) -> "Call":
        """The same call on the samples from `start` on, at most `size` of them."""
        if start == 0 and size >= self.n:
            return self
        size = min(size, self.n - start)
        leaves = [leaf if dim is None else _narrow(leaf, dim, start, size) for leaf, dim in zip(self.leaves, self.dims, strict=True)]
        return replace(self, leaves=leaves, n=size)

    def take(self, index: Tensor) -> "Call":
        """The same call on the samples at these indices."""
        leaves = [
            leaf if dim is None else leaf.index_select(dim, index.to(leaf.device)) for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return replace(self, leaves=leaves, n=len(index))


def _narrow(tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
    """`tensor.narrow`, which sparse and nested tensors do not have."""
    if tensor.is_nested:
        return torch.nested.as_nested_tensor(list(tensor.unbind(dim)[start : start + size]), layout=tensor.layout)
    if tensor.layout == torch.strided:
        return tensor.narrow(dim, start, size)
    return tensor.index_select(dim, torch.arange(start, start + size, device=tensor.device))


def prepare(
    name: str,
    fn: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kept: Kept = "gradients",
) -> Call:
    """Check the arguments of a call against the options, and flatten them.

    Args:
        name: The name of the transform, for messages.
        fn: The function of one sample.
        options: The transform's options.
        args: The positional arguments, batched.
        kwargs: The keyword arguments.
        kept: What the transform keeps of each sample.

    Returns:
        The call.

    Raises:
        InputError: An argument does not fit; the message names its path, what arrived, what was expected and what to do.
    """
    paths = Paths(fn, args)
    leaves, spec, dims, in_dims, numbers, differentiated, n = lay_out(name, options, args, paths)
    empty = next((position for position in differentiated if leaves[position].is_meta), None)
    if empty is not None and not all(leaf.is_meta for leaf, dim in zip(leaves, dims, strict=True) if dim is not None):
        raise InputError(  # torch's kernels would read uninitialised memory
            f"{name}: {paths[empty]} is on the meta device, where tensors have no values, and the batch is not. Load the values first; for "
            "a module module.to_empty(device=...) and load_state_dict, then call psg.stateless."
        )
    if options.method != "batch" and n > 1:
        _warn_of_batched_keywords(name, fn, kwargs, n)
        if not all([isinstance(leaf, Tensor) for leaf in leaves]):
            for i, (argument, in_dim) in enumerate(zip(args, in_dims, strict=True)):
                if isinstance(in_dim, int) and i not in numbers:
                    _warn_of_batched_list(name, fn, argument, paths.names[i], n)
    specs = spec.children()
    single = isinstance(options.argnums, int)
    return Call(
        name=name,
        fn=fn,
        leaves=list(map(_ambient.usable, leaves)),
        spec=spec,
        dims=dims,
        params=differentiated,
        paths=paths,
        kwargs=kwargs,
        gradient_spec=specs[numbers[0]] if single else _trees.spec_of_tuple([specs[number] for number in numbers]),
        has_aux=options.has_aux,
        randomness=options.randomness,
        n=n,
        kept=kept,
    )


class Layout(NamedTuple):
    """The positional arguments of a call: attributes as of `Call`, each argument's in_dims, and the numbers of those to differentiate."""

    leaves: list[Any]
    spec: Any
    dims: list[int | None]
    in_dims: Sequence[Any]
    numbers: list[int]
    params: list[int]
    n: int


def lay_out(name: str, options: Options, args: tuple[Any, ...], paths: "Paths") -> Layout:
    """Check the positional arguments of a call against the options, and flatten them.

    Raises:
        InputError: As of `prepare`.
    """
    numbers = _argument_numbers(name, options.argnums, len(args))
    in_dims = _in_dims(name, options.in_dims, numbers, len(args))
    leaves, spec = _trees.flatten(args)
    specs = spec.children()
    dims: list[int | None] = []
    params: dict[int, range] = {}
    for i, (argument, in_dim) in enumerate(zip(args, in_dims, strict=True)):
        start = len(dims)
        own = leaves[start : start + specs[i].num_leaves]
        if in_dim is None or isinstance(in_dim, int):
            own_dims: list[Any] = [in_dim] * len(own)
        else:
            own_dims = _trees.broadcast(in_dim, argument, f"{name}: in_dims for {paths.names[i]}")
        if i in numbers:
            params[i] = range(start, start + len(own))
            _check_params(name, own, paths, start)
        for position, (leaf, dim) in enumerate(zip(own, own_dims, strict=True), start):
            dims.append(None if dim is None else _check_dim(name, leaf, dim, paths, position, default=options.in_dims is None))

    differentiated = [position for number in numbers for position in params[number]]
    n = _batch_size(name, leaves, spec, dims, differentiated, paths)
    return Layout(leaves, spec, dims, in_dims, numbers, differentiated, n)


def shape_of_sample(tensor: Tensor, dim: int | None) -> tuple[int, ...]:
    """The shape of a sample's part of a tensor with this batch dimension; that of the tensor if samples share it (None)."""
    return tuple(size for d, size in enumerate(tensor.shape) if d != dim)


def note(fn: Any, name: str, value: Any) -> None:
    """Note something of a function: in an attribute, since a table would keep alive what fn belongs to.

    fn may be the method of an object that holds what a transform has made of it. functools.wraps copies attributes to the user's wrappers,
    which are told from the function by the reference.
    """
    setattr(fn, f"_psg_{name}", (ref(fn), value))


def noted(fn: Any, name: str) -> Any:
    """What is noted of this very function under this name; None if nothing is."""
    made, value = getattr(fn, "__dict__", {}).get(f"_psg_{name}", (None, None))
    return value if made is not None and made() is fn else None


KEYWORDS = "keywords"
"""Noted of functions that take keywords by their `**kwargs`: from positional arguments to the names that they take beside them."""


def takes_keyword(fn: Callable[..., Any], name: str, args: Sequence[Any]) -> bool:
    """Whether fn has an argument of this name that neither these positional arguments nor functools.partial give; not by `**kwargs`."""
    while isinstance(fn, partial):
        if name in fn.keywords:
            return False
        fn, args = fn.func, (*fn.args, *args)
    names_beside = noted(fn, KEYWORDS)
    if names_beside is not None:
        return name in names_beside(args)
    return name in [own.name for own in arguments_of(fn)[len(args) :]]


def arguments_of(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """The arguments that a callable takes; none if Python cannot tell: not every callable has a signature."""
    try:
        return [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):
        return []


class Paths:
    """The path of each leaf in the arguments, for messages; computed when a message needs one."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._fn = fn
        self._args = args

    @cached_property
    def names(self) -> list[str]:
        """The names of the positional arguments in messages: those in fn's signature, `sample[i]` for `*sample`, or else `args[i]`."""
        parameters = arguments_of(self._fn)
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        star = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")
        return [*named, *(f"{star}[{i}]" for i in range(len(self._args) - len(named)))][: len(self._args)]

    @cached_property
    def _paths(self) -> list[str]:
        return [path for name, argument in zip(self.names, self._args, strict=True) for path in _trees.paths(argument, name)]

    def __getitem__(self, position: int) -> str:
        return self._paths[position]


def _dim(in_dim: Any) -> Any:
    """An entry of in_dims, an int if it is an integer."""
    number = as_integer(in_dim)
    return in_dim if number is None else number


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}.")


def _copied(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with their tensors copied, each distinct tensor once; an argument that holds no tensor is left as it is."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copies.copy_of(tensor)
        return copies[id(tensor)]

    holding = {name for name, value in kwargs.items() if _trees.all_tensors(value)}
    return {name: _trees.map_tensors(copied, value) if name in holding else value for name, value in kwargs.items()}


def _describe(value: Any) -> str:
    return f"{type(value).__name__} of length {len(value)}" if isinstance(value, (tuple, list, dict)) else type(value).__name__


def _argument_numbers(name: str, argnums: int | tuple[int, ...], count: int) -> list[int]:
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    for number in numbers:
        if not -count <= number < count:
            raise InputError(f"{name}: argnums={argnums!r} names argument {number}, but the call has {count} positional arguments.")
    numbers = [number % count for number in numbers]
    if len(set(numbers)) < len(numbers):
        raise InputError(f"{name}: argnums={argnums!r} names an argument twice.")
    return numbers


def _in_dims(name: str, in_dims: Any, numbers: list[int], count: int) -> list[Any]:
    if in_dims is None:
        return [None if i in numbers else 0 for i in range(count)]
    if isinstance(in_dims, int):
        return [in_dims] * count
    if not isinstance(in_dims, tuple) or len(in_dims) != count:
        raise InputError(
            f"{name}: in_dims={in_dims!r}: expected None, an integer, or a tuple with one entry for each of the {count} positional "
            "arguments."
        )
    return list(in_dims)


def _check_params(name: str, leaves: list[Any], paths: Paths, start: int) -> None:
    if not leaves:
        raise InputError(f"{name}: the argument to differentiate has no leaves.")
    for position, leaf in enumerate(leaves, start):
        if not isinstance(leaf, Tensor):
            way_out = "Bind a value that is no parameter with functools.partial, or pass it in another argument."
            if isinstance(leaf, torch.nn.Module):
                way_out = (
                    "psg.stateless(module, criterion) makes a function of parameters from a module; a ParameterDict p is the tree dict(p)."
                )
            elif isinstance(leaf, Iterator):
                way_out = "Parameters of a module: pass a dict of those to differentiate, by name, such as psg.stateless returns."
            elif hasattr(leaf, "__array__"):
                way_out = "Convert it with torch.as_tensor."
            raise InputError(f"{name}: {paths[position]} is {a_kind(leaf)}; expected a tensor, since it is differentiated. {way_out}")
        if type(leaf).__name__ == "DTensor":  # by name, since to import the class takes a second
            raise InputError(
                f"{name}: {paths[position]} is a DTensor, which several processes hold in parts; expected a whole tensor, .full_tensor()."
            )
        if leaf.layout != torch.strided or leaf.is_nested:
            what = "is a nested tensor" if leaf.is_nested else f"has layout {leaf.layout}"
            raise InputError(f"{name}: {paths[position]} {what}; expected a dense tensor, since it is differentiated.")
        if not _trees.is_computable(leaf):
            raise InputError(
                f"{name}: {paths[position]} has dtype {leaf.dtype}; expected a floating or complex tensor of at least 16 bits, since it is "
                "differentiated. Pass integer tensors in another argument, and those of 8 bits in a wider dtype."
            )


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether an object that is no tree holds tensors in its attributes, or in theirs; functions and modules are not searched."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or callable(value):
        return False
    if isinstance(value, (list, tuple)):
        items = value
    else:
        items = (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()
    return any(_holds_tensors(item, depth - 1) for item in items)


def _check_dim(name: str, leaf: Any, dim: Any, paths: Paths, position: int, default: bool) -> int | None:
    number = as_integer(dim)
    if number is None:
        raise InputError(f"{name}: in_dims for {paths[position]} is {dim!r}; expected an integer or None.")
    if not isinstance(leaf, Tensor):
        if hasattr(leaf, "shape") or isinstance(leaf, Sequence) and not isinstance(leaf, (str, bytes)):
            raise InputError(
                f"{name}: {paths[position]} is {a_kind(leaf)}, which is neither a tensor nor a tree that optree knows. Convert it "
                'with torch.as_tensor, or register its type with optree (namespace="psg"), or pass it by keyword to share it.'
            )
        if _holds_tensors(leaf):
            raise InputError(
                f"{name}: {paths[position]} is {a_kind(leaf)} that holds tensors, perhaps a batch, which psg cannot see. "
                'Register its type with optree (namespace="psg"), or share it: give in_dims with None for it, or pass it by keyword.'
            )
        return None  # a number, a string, a flag: the same for every sample
    if leaf.is_nested and leaf.layout == torch.strided:
        raise InputError(
            f"{name}: {paths[position]} is a nested tensor of layout torch.strided, which has no shape. Pad it "
            "(torch.nested.to_padded_tensor) and pass a mask, or make it with layout=torch.jagged, which runs in a loop."
        )
    if not -leaf.ndim <= number < leaf.ndim:
        hint = " If it is the same for every sample, say so with in_dims (None for it) or pass it by keyword." if default else ""
        raise InputError(f"{name}: {paths[position]} has shape {tuple(leaf.shape)}; expected a dimension {dim} with the samples.{hint}")
    return number % leaf.ndim


def sharing(spec: Any, dims: list[int | None], params: list[int]) -> str:
    """For messages: the way out if arguments behind the first are differentiated and shared, perhaps unintended; else nothing."""
    first = spec.children()[0].num_leaves
    if all(position < first or dims[position] is not None for position in params):
        return ""
    return (
        " By default the argnums arguments are shared and all others batched: for gradients with respect to inputs pass in_dims too, as in "
        "argnums=1, in_dims=(None, 0, 0)."
    )


def _batch_size(name: str, leaves: list[Any], spec: Any, dims: list[int | None], params: list[int], paths: Paths) -> int:
    sizes = {position: leaf.shape[dim] for position, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)) if dim is not None}
    if not sizes:
        raise InputError(
            f"{name}: no argument has a dimension for the samples; expected at least one. See in_dims. Only tensors have one: turn lists "
            "into tensors. Arguments passed by keyword are the same for all samples: pass a mapping itself, by position, as in "
            f"fn(params, batch).{sharing(spec, dims, params)}"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{paths[position]} has {size}" for position, size in sizes.items())
        raise InputError(
            f"{name}: the arguments disagree on the number of samples: {listed}. Share one of them with in_dims (None for it), or "
            "pass it by keyword, outside of a mapping; turn a list of samples into one tensor by padding and stacking them."
            f"{sharing(spec, dims, params)}"
        )
    return next(iter(sizes.values()))


def _warn_of_batched_list(name: str, fn: Callable[..., Any], argument: Any, argument_name: str, n: int) -> None:
    """Warn of a list of n numbers or strings, labels say: every sample gets all of it, for only tensors are batched."""

    def is_batched(node: Any) -> bool:
        return type(node) is list and len(node) == n and all(isinstance(item, (int, float, complex, str)) for item in node)

    if any(map(is_batched, _trees.flatten(argument, is_batched)[0])):
        warn_once(
            (code_of(fn), argument_name),
            f"{name}: the argument {argument_name!r} holds a list of {n} values, as many as there are samples. Only tensors are batched: "
            "each sample gets the whole list. To give each sample its own value, pass a tensor; to share the list, bind it with "
            "functools.partial, or pass it by keyword.",
            UserWarning,
        )


def _warn_of_batched_keywords(name: str, fn: Callable[..., Any], kwargs: dict[str, Any], n: int) -> None:
    """Warn of a keyword tensor with n rows, a mask [n, t] say: every sample gets all of it, which is documented but seldom meant."""
    for keyword, value in kwargs.items():
        if any(not tensor.is_nested and tensor.shape[:1] == (n,) for tensor in _trees.all_tensors(value)):
            warn_once(
                (code_of(fn), keyword),
                f"{name}: the keyword argument {keyword!r} holds a tensor with {n} rows, as many as there are samples. Keyword arguments "
                f"are the same for all samples: each gets all {n} rows. To give each sample its own row, pass the argument by position "
                "(in a dict, for psg.stateless). If all samples are meant to share it, bind it with functools.partial.",
                UserWarning,
            )
