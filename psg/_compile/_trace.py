"""Trace a function of tensors to one flat graph of ATen ops, in which the tensors that it closes over are inputs.

`torch.fx.experimental.proxy_tensor.make_fx` sees through vmap, the function mode and the backward pass. A value that it would bake in as
a constant of the first call is made an input, or refused.
"""

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, has_proxy_slot, make_fx, track_tensor_tree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from psg import _trees
from psg._errors import PsgError, StateError
from psg._torch import _ambient, _functorch, _random
from psg._torch._ops import ARRAYS, CONVERSIONS, REQUIRES_GRAD, SET_DATA, is_mask, mutated, mutating, read_by, tensors_of
from psg._torch._patches import assigned


class Trace(NamedTuple):
    """A flat graph, and what it takes to call it.

    Attributes:
        graph: Maps the tensors of the arguments, followed by those captured, to those of the result.
        captured: The tensors that the function closes over.
        recorded: Those of them that autograd would record: all but a module's parameters that `stateless` has detached.
        read: Tensors that the function closes over whose values it takes for Python values, sizes or masks, with the bits of these values.
        sized: Other tensors that the function closes over, of which it may read the shape or the dtype.
        flags: The tensors of which it reads whether they require grad, with the answers.
        placed: The tensors whose `storage_offset` it reads, by position among those of the arguments, `captured` and `sized`.
        leaves: The leaves of the result; tensors stand for the graph's outputs.
        spec: The structure of the result.
    """

    graph: GraphModule
    captured: list[Tensor]
    recorded: list[Tensor]
    read: list[tuple[Tensor, Tensor]]
    sized: list[Tensor]
    flags: list[tuple[Tensor, bool]]
    placed: list[int]
    leaves: list[Any]
    spec: Any


class Unseen(PsgError):
    """A second run of the function does not close over the tensors that the traced one did."""


Generators = dict[int, tuple[torch.Generator, Tensor]]
"""Random generators, by id, and their states when they were first seen."""


def trace(
    fn: Callable[..., Any],
    leaves: list[Any],
    spec: Any,
    tensors: list[Tensor],
    name: str,
    generators: Generators,
    constants: Container[int],
) -> Trace:
    """Trace a function.

    Args:
        fn: Maps arguments to a tree.
        leaves: The leaves of the arguments and keyword arguments; those that are no tensors are constants.
        spec: The structure of the arguments and keyword arguments.
        tensors: The tensors among the leaves, without history.
        name: The name of the function, for messages.
        generators: To be filled with the generators that the function draws from, beside torch's default ones.
        constants: When the function has run, the ids of parameters that it takes for constants; see `Called`.

    Raises:
        StateError: The function writes into an argument or a tensor that it closes over.
        Unseen: It makes a tensor unseen by the tracer, or keeps what it has computed for its next run.
        PsgError: It draws random numbers of Python or NumPy, or makes a tensor whose size depends on the data.
        Exception: The tracer refuses an op, or the function raises an error itself.
    """
    result: list[Any] = []
    reads = _Reads(name, generators)

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = _trees.unflatten(spec, _trees.fill(leaves, tensors))
        with _ambient.compiling, _ambient.unmoved, _ambient.unvalidated, _ConstantsAsInputs(tensors, name) as watching, reads:
            reads.watching = watching
            with assigned(_functorch.KNOWING, watching.sources_of):
                result[:] = _trees.flatten(fn(*args, **kwargs))
        return tuple(_trees.tensors_in(result[0]))

    graph = _drawn_by_torch_alone(flat, tensors)
    outcome = result[0], result[1]  # a second trace may give other kinds of factors
    captured = _captured(graph)
    places = graph.graph.find_nodes(op="placeholder")[len(tensors) :]
    detached = [all(user.target in _DETACHING for user in place.users) for place in places]
    recorded = [own for own, alone in zip(captured, detached, strict=True) if not (alone and id(own) in constants)]
    read = [*reads.watching.read.values()]
    recorded += [tensor for tensor, _ in read]
    # A tensor that fn makes unseen by the tracer looks like one that it closes over, but a second run finds another one in its place.
    # Autograd's symbolic zeros may differ.
    suspects = {id(tensor) for tensor in captured if not tensor._is_zerotensor()} | {id(tensor) for tensor, _ in read}
    if suspects:
        with _Given() as again:
            flat(*tensors)
        if not suspects <= again.found.keys():
            raise Unseen("it makes a tensor that the tracer does not see, as torch.func.linearize and DLPack do")
    graph = _functional(graph, [*tensors, *(tensor.detach() for tensor in captured)])
    inputs = {*map(id, tensors), *map(id, captured)}
    sized = [tensor for key, tensor in reads.sized.items() if key not in inputs]
    known = enumerate((*tensors, *captured, *sized))
    placed = [place for place, tensor in known if tensor.layout == torch.strided and _storage(tensor) in reads.placed]
    return Trace(graph, captured, recorded, read, sized, [*reads.flags.values()], placed, *outcome)


def _drawn_by_torch_alone(function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule:
    """The graph of a function, whose random numbers have to be torch's.

    Raises:
        PsgError: It draws others.
    """
    before = _random.get_python_state()
    try:
        graph = _make_fx(function, tensors)
    finally:
        draws = not _random.same_python_state(before, _random.get_python_state())
        if draws:
            _random.set_python_state(before)  # for the eager call that follows
    if draws:
        raise PsgError(
            "it draws random numbers of Python or NumPy, which would be the same in every call; draw them with torch, or pass them to it"
        )
    return graph


def _functional(graph: GraphModule, tensors: Sequence[Tensor]) -> GraphModule:
    """The graph without writes and `detach`, and with reshapes for views; on these tensors it is traced again, if it has to be."""
    _write_anew(graph)
    if any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in graph.graph.nodes):
        # Compilers know functional graphs best, and refuse some ops that write into a given tensor. This traces the graph once more.
        _reshape(graph, _views_of_final_values(graph))
        with _ambient.off():  # autocast is in the graph already
            graph = _make_fx(torch.func.functionalize(graph), tensors)
    _reshape(graph, graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default))
    returned = set(graph.graph.output_node().all_input_nodes)
    for op in _DETACHING:
        for node in graph.graph.find_nodes(op="call_function", target=op):
            if node not in returned:  # no tensor has a history or is written into here, so detach does nothing
                node.replace_all_uses_with(node.all_input_nodes[0])
                graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _write_anew(graph: GraphModule) -> None:
    """Give an op that writes into a tensor, which nothing else uses or shares memory with, a tensor of its own to write into."""
    for node in graph.graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        place, *others = node.args
        packet = getattr(torch.ops.aten, node.target._schema.name.removeprefix("aten::").removesuffix("_"), None)
        op = getattr(packet, node.target._overloadname, None)
        if op is None or op._schema.is_mutable or node.kwargs or not isinstance(place, Node) or len(place.users) > 1:
            continue
        takes, given = ([argument.type for argument in own._schema.arguments] for own in (op, node.target))
        if takes != given:  # pow.Scalar is a number to the power of a tensor, pow_.Scalar a tensor to the power of a number
            continue
        operands = [place, *(other for other in others if isinstance(other, Node))]
        alike = all(getattr(own.meta.get("val"), "dtype", None) == place.meta["val"].dtype for own in operands)  # else the form promotes
        if alike and _is_fresh(place):
            node.target = op


def _is_fresh(node: Node) -> bool:
    """Whether an op has made this tensor, which is no view of another."""
    maker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(maker, Node) or not isinstance(maker.target, OpOverload):
        return False
    return all(returned.alias_info is None for returned in maker.target._schema.returns)


def _reshape(graph: GraphModule, views: Iterable[Node]) -> None:
    """Put reshapes in the place of views: another form of an op, or a compiler, may give a tensor strides that allow no such view."""
    for node in views:
        node.target = torch.ops.aten.reshape.default
    graph.recompile()


def _views_of_final_values(graph: GraphModule) -> list[Node]:
    """The calls of `view` after which nothing is written into the tensor, by whatever view of it: a copy serves there too."""
    owner: dict[Any, Any] = {}  # of a view, the tensor that it is a view of
    last_write: dict[Any, int] = {}
    for place, node in enumerate(graph.graph.nodes):
        if node.target is operator.getitem:  # of several views, as `split` gives them
            owner[node] = owner.get(node.args[0], node.args[0])
        if not isinstance(node.target, OpOverload):
            continue
        schema = node.target._schema
        given = {argument.name: argument.alias_info for argument in schema.arguments if argument.alias_info is not None}
        bound = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        for name, alias in given.items():
            for tensor in bound[name] if isinstance(bound.get(name), (list, tuple)) else [bound.get(name)]:
                if isinstance(tensor, Node):
                    own = owner.get(tensor, tensor)
                    owner[node] = own
                    if alias.is_write:
                        last_write[own] = place
    views = [(place, node) for place, node in enumerate(graph.graph.nodes) if node.target is torch.ops.aten.view.default]
    return [node for place, node in views if last_write.get(owner[node], -1) < place]


# What `Tensor.detach` is in a graph; an alias from torch 2.15 on.
_DETACHING = torch.ops.aten.detach.default, torch.ops.aten.alias.default


def _make_fx(function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule:
    # The tracer keeps a fake tensor for every output of an op. It makes a new FakeTensorMode for each op unless it finds one for all,
    # which about halves the time.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(function)(*tensors)


class _Given(TorchDispatchMode):
    """Finds the operands that no op has made: arguments, and what fn closes over. A tracer would take much longer.

    Attributes:
        found: They, by id.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._made = WeakIdKeyDictionary()
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _trees.all_tensors((args, kwargs)):
            if tensor not in self._made:
                self.found[id(tensor)] = tensor
        output = func(*args, **kwargs)
        for tensor in _trees.all_tensors(output):
            self._made[tensor] = True
        return output


class _ConstantsAsInputs(TorchDispatchMode):
    """Makes the tensors that fn closes over inputs of the trace: of a constant, the tracer would give Python values, and bake them in.

    It also refuses outputs whose size depends on the data, since the size is a Python value too, on which all later ops may depend;
    writes into inputs or closed-over tensors, since the trace, the comparison and the call would each write; and collectives, since
    Python waits for them outside of any op.

    What fn computes from numbers alone (a grid of times, a mask of positions), or from them and tensors that it closes over (the edges of
    a graph), is known in the trace: its Python values are baked in.

    Attributes:
        outside: The arguments, and the tensors that fn closes over as far as they are known, by storage.
        read: The latter as far as values that are baked in depend on them, each with a copy of its bits, by id.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[Tensor], name: str) -> None:
        super().__init__()
        self._name = name
        # By storage, which views share. The tensors are kept alive, so that no other storage gets the same key.
        self.outside = {_storage(tensor): tensor for tensor in tensors}
        self._varying = set(self.outside)  # whose values are not baked in
        self.read: dict[int, tuple[Tensor, Tensor]] = {}
        # By storage, what is known, with the tensors that fn closes over from which it is computed, by id.
        self._known: dict[StorageWeakRef, dict[int, Tensor]] = {}
        self._made: set[StorageWeakRef] = set()
        self._shown: set[StorageWeakRef] = set()  # to NumPy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mode: Any = get_proxy_mode()
        operands = _trees.all_tensors((args, kwargs))
        if mode is not None and any([tensor._is_zerotensor() for tensor in operands]):
            # The tracer crashes where some ops meet such a tensor, which autograd makes in forward mode.
            args, kwargs = _trees.map_tensors(lambda leaf: self._filled(leaf) if leaf._is_zerotensor() else leaf, (args, kwargs))
            operands = _trees.all_tensors((args, kwargs))
        literal = func is torch.ops.aten.lift_fresh.default  # torch.tensor(1.0) inside fn
        if mode is not None and not literal:
            for tensor in operands:
                if not has_proxy_slot(tensor, mode.tracer):
                    self._meet(tensor, mode.tracer)
        counts = self._counts(func, args, kwargs, operands)
        known = literal or self._is_fixed(func) and all(map(self._knows, operands))
        if known and operands and (counts or func in _PYTHON_VALUED) and mode is not None:
            self._note_read(operands)
            with disable_proxy_modes_tracing():
                output = func(*args, **kwargs)
            return _trees.map_tensors(self._literal, output)
        if counts and mode is not None:
            raise PsgError(f"the size of the output of {func} depends on the data")
        if getattr(func, "namespace", "") == "c10d" and mode is not None:
            raise PsgError(f"it calls {func}, and a graph would not wait for its end: call it outside")
        if func in _INDEXED and mode is not None:
            args = args[0], [place for index in args[1] for place in self._places(index)], *args[2:]
        written = _written(func, args, kwargs)
        self._expect_own(func, written)
        output = func(*args, **kwargs)
        made = {_functorch.storage_of(tensor): tensor for tensor in _strided([*_trees.flatten(output)[0], *written])}
        self._made.update([storage for storage, tensor in made.items() if _storage(tensor) not in self.outside])
        if known:
            sources = {key: own for tensor in operands for key, own in self._known.get(_functorch.storage_of(tensor), {}).items()}
            self._known.update(dict.fromkeys(made, sources))
        else:
            strided = func is torch.ops.aten.as_strided.default
            for tensor in made.values() if strided else _strided(written):
                self._known.pop(_functorch.storage_of(tensor), None)
            if strided:  # it reaches memory beyond the view that it is given, which is all that later calls compare
                self._varying.update(map(_storage, made.values()))
        return output

    def _meet(self, tensor: Tensor, tracer: Any) -> None:
        """Make a tensor that the tracer does not know, so that fn closes over it, an input."""
        if tensor.layout == torch.strided:
            storage = _functorch.storage_of(tensor)
            if storage in self._made:
                raise PsgError("it makes a tensor that the tracer does not see, as nn.Parameter does")
            if _storage(tensor) not in self._varying and not tensor.is_quantized:
                # All its views: what is computed from one may change where another is written into.
                self._known[storage] = {**self._known.get(storage, {}), id(tensor): tensor}
        self.outside[_storage(tensor)] = tensor
        track_tensor_tree(tensor, tracer.proxy(tracer.create_arg(tensor)), constant=None, tracer=tracer)

    def _filled(self, tensor: Tensor) -> Tensor:
        """A tensor of zeros with memory."""
        with self:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def _counts(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> bool:
        """Whether the size of an op's output depends on its operands' values, or on those of masks that are not known."""
        if func is torch.ops.aten.index.Tensor:
            return any(_is_mask(index) and not self._knows(index) for index in args[1])
        if func in _SPARSE_PARTS:
            return _storage(operands[0]) not in self.outside
        tags = func.tags if isinstance(func, OpOverload) else ()
        return (torch.Tag.dynamic_output_shape in tags or func in _SIZED_BY_DATA) and kwargs.get("output_size") is None

    def _is_fixed(self, func: Any) -> bool:
        """Whether an op's output follows from its operands' values. One of other libraries may draw random numbers unseen."""
        if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims", "prim"):
            return False
        return torch.Tag.nondeterministic_seeded not in func.tags and func is not torch.ops.aten.as_strided.default

    def _knows(self, tensor: Tensor) -> bool:
        return self.sources_of(tensor) is not None

    def sources_of(self, tensor: Tensor) -> dict[int, Tensor] | None:
        """The tensors that fn closes over from which a tensor's values follow; None if they do not follow from these and numbers alone."""
        return self._known.get(_functorch.storage_of(tensor)) if tensor.layout == torch.strided else None

    def _note_read(self, tensors: Sequence[Tensor]) -> None:
        """Note what known values depend on that are baked in."""
        for tensor in tensors:
            for key, source in self._known[_functorch.storage_of(tensor)].items():
                if key not in self.read:
                    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
                        self.read[key] = source, bits_of(source).clone()

    def show(self, tensor: Tensor) -> None:
        """Note that a NumPy array shares a tensor's memory."""
        self._shown.add(_functorch.storage_of(tensor))

    def _expect_own(self, func: Any, written: Sequence[Tensor]) -> None:
        """Refuse a write into an argument, what fn closes over, or what NumPy reads unseen."""
        if any(_storage(tensor) in self.outside for tensor in written):
            raise StateError(
                f"psg.jit({self._name}): the function writes into an argument or into a tensor that it closes over ({func}), which "
                "compiling would do more than once. Return the new value from the function and write it outside."
            )
        if any(_functorch.storage_of(tensor) in self._shown for tensor in _strided(written)):
            raise PsgError("it writes into the memory of a NumPy array, which the tracer does not see")

    def _places(self, index: Any) -> list[Any]:
        """An index of an op; in place of a mask that is known the places where it is true, whose number compilers see."""
        if not _is_mask(index) or not self._knows(index):
            return [index]
        self._note_read([index])
        with disable_proxy_modes_tracing():
            places = index.nonzero(as_tuple=True) if index.ndim else (index,)
        return list(map(self._literal, places))

    def _literal(self, tensor: Tensor) -> Tensor:
        """The same values as a literal of the graph."""
        with disable_proxy_modes_tracing():  # an accelerator's tensor is copied to the CPU first
            values = tensor.tolist()
        with self, torch._C.DisableTorchFunction():
            literal = torch.tensor(values, dtype=tensor.dtype, device=tensor.device)
            return literal if literal.shape == tensor.shape else literal.reshape(tensor.shape)


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor's entries bit by bit, in a row of integers: 0.0 is not -0.0, and NaN is NaN."""
    row = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return row.view(_INTEGERS.get(row.itemsize, torch.uint8))


# As large as the entries: to compare bytes takes seven times as long.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


_INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and is_mask(index)


# Ops with a Python value, which the tracer gives only of literals.
_PYTHON_VALUED = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default}

# Ops whose output has a size that depends on the data, though they have no such tag; these parts of a sparse tensor that fn makes do too.
_SIZED_BY_DATA = {
    torch.ops.aten._pack_padded_sequence.default,
    *(torch.ops.aten._to_sparse.default, torch.ops.aten._to_sparse.sparse_dim, torch.ops.aten._to_sparse_csr.default),
    *(torch.ops.aten._to_sparse_csc.default, torch.ops.aten._to_sparse_bsr.default, torch.ops.aten._to_sparse_bsc.default),
}
_SPARSE_PARTS = {
    getattr(torch.ops.aten, name).default for name in ("_nnz", "_values", "values", "_indices", "indices", "crow_indices", "col_indices")
}

# In training mode these write into running statistics, and their schemas do not say so.
_BATCH_NORMS = {torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default}


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an op writes into."""
    if func in _BATCH_NORMS and args[5]:
        return _trees.tensors_in(args[3:5])
    return mutated(mutating(func), args, kwargs) or []


def _strided(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


class _Reads(TorchFunctionMode):
    """Makes the tracer refuse reads of memory that are no ops, by asking it for one entry, which it gives only of what is known.

    It also notes the generators that ops draw from, and takes arguments for valid that are checked as torch.distributions does.

    Attributes:
        watching: The mode that sees the ops.
        sized: Tensors unknown to the tracer that the function has given to ops, which may have read the shape or the dtype, by id.
        flags: Those of which it has read whether they require grad, with the answers, by id.
        placed: The storages of tensors of which it has read where they begin.
    """

    def __init__(self, name: str, generators: Generators) -> None:
        super().__init__()
        self._name = name
        self._generators = generators
        self.watching: _ConstantsAsInputs
        self.sized: dict[int, Tensor] = {}
        self.flags: dict[int, tuple[Tensor, bool]] = {}
        self.placed: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in (*args, *kwargs.values()):
            if isinstance(leaf, torch.Generator) and id(leaf) not in self._generators:
                self._generators[id(leaf)] = leaf, leaf.get_state()
        tracer = getattr(get_proxy_mode(), "tracer", None)
        if tracer is not None:
            for leaf in tensors_of(args, kwargs):
                if not _functorch.is_wrapped(leaf) and not has_proxy_slot(leaf, tracer):
                    self.sized[id(leaf)] = leaf
                    if func == REQUIRES_GRAD:
                        self.flags[id(leaf)] = leaf, func(leaf)
        if func in _ASSIGNING:
            self._refuse_assignment(args[0])
        if func is Tensor.storage_offset:
            self.placed.add(_storage(_functorch.bare(args[0])))
        for tensor in read_by(func, args, kwargs):
            if tensor.numel():
                tensor.detach().flatten()[0].item()
        if func is _VALIDATING:
            return torch.tensor(True, device=args[0].device)
        if func in CONVERSIONS and torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
            raise PsgError("a constructor such as torch.FloatTensor reads a tensor unseen by the tracer; torch.stack makes one of tensors")
        output = func(*args, **kwargs)
        if func in ARRAYS:
            output.setflags(write=False)
            self.watching.show(_functorch.bare(args[0]))
        return output

    def _refuse_assignment(self, tensor: Tensor) -> None:
        """Refuse `.data =` and `.grad =`, which are no ops of a graph."""
        if _storage(_functorch.bare(tensor)) in self.watching.outside:
            raise StateError(
                f"psg.jit({self._name}): the function writes into an argument or into a tensor that it closes over (it assigns the data or "
                "the gradient), which a graph would not do. Return the new value from the function and assign it outside."
            )
        raise PsgError("it assigns the data or the gradient of a tensor, which is no op of a graph")


_ASSIGNING = {SET_DATA, vars(torch._C.TensorBase)["grad"].__set__}

_VALIDATING = torch._VF._is_all_true
"""What torch.distributions validates its arguments by, which a distribution may ask for (`validate_args`)."""


def _captured(graph: GraphModule) -> list[Tensor]:
    """Turn the tensors that the function closes over into inputs of the graph, and return them."""
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    tensors: dict[str, Tensor] = {}
    inputs: dict[str, Any] = {}
    for node in list(graph.graph.find_nodes(op="get_attr")):
        value = getattr(graph, node.target, None)
        literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)  # torch.tensor(1.0) inside fn
        if not isinstance(value, Tensor) or literal:
            continue
        if node.target not in inputs:
            with graph.graph.inserting_before(first):
                inputs[node.target] = graph.graph.placeholder(f"captured_{len(inputs)}")
            tensors[node.target] = value
        node.replace_all_uses_with(inputs[node.target])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return list(tensors.values())
