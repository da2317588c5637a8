"""Trace a function of tensors to one flat graph of ATen ops, in which whatever it closes over is an input.

`torch.fx.experimental.proxy_tensor.make_fx` sees through vmap, the function mode and the backward pass. What it would keep as a constant
of the first call is made an input, or refused.
"""

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot, make_fx, track_tensor_tree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from psg import _ambient, _trees
from psg._errors import PsgError, StateError
from psg._ops import read_by


class Trace(NamedTuple):
    """A flat graph, and what it takes to call it.

    Attributes:
        graph: From the tensors of the arguments, then those captured, to those of the result.
        captured: The tensors that the function closes over.
        leaves: Of the result; tensors stand for the graph's outputs.
        spec: Its structure.
    """

    graph: GraphModule
    captured: list[Tensor]
    leaves: list[Any]
    spec: Any


Generators = dict[int, tuple[torch.Generator, Tensor]]
"""Random generators, by id, and their states when they were first seen."""


def trace(fn: Callable[..., Any], leaves: list[Any], spec: Any, tensors: list[Tensor], name: str, generators: Generators) -> Trace:
    """Trace a function.

    Args:
        fn: From arguments to a tree.
        leaves: Of the arguments and keyword arguments; what is no tensor among them is a constant.
        spec: Their structure.
        tensors: The tensors among the leaves, without history.
        name: What messages call the function.
        generators: To be filled with those that the function draws from beside torch's own.

    Raises:
        StateError: It draws random numbers of Python or NumPy, or writes into an argument or what it closes over.
        PsgError: It makes a tensor past the tracer, or one with as many entries as its values say.
        Exception: What the tracer refuses, and the function's own errors.
    """
    result: list[Any] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = _trees.unflatten(spec, _trees.fill(leaves, tensors))
        with _ambient.compiling(), _ConstantsAsInputs(tensors, name), _Reads(generators):
            result[:] = _trees.flatten(fn(*args, **kwargs))
        return tuple(leaf for leaf in result[0] if isinstance(leaf, Tensor))

    before = _python_randomness()
    graph = _make_fx(flat, tensors)
    if _python_randomness() != before:
        raise StateError(
            f"psg.jit({name}): the function draws random numbers of Python or NumPy, which would be those of the first call for ever. "
            "Draw them with torch, or outside of the function and pass them to it."
        )
    captured = _captured(graph)
    # What fn has made past the tracer looks like what it closes over, but is another tensor each time. Autograd's symbolic zeros may be.
    suspects = {id(tensor) for tensor in captured if not tensor._is_zerotensor()}
    if suspects and not suspects <= {id(tensor) for tensor in _captured(_make_fx(flat, tensors))}:
        raise PsgError("it makes a tensor that the tracer does not see, as torch.func.linearize and DLPack do")
    if any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in graph.graph.nodes):
        # Compilers know functional graphs best, and refuse some ops that write into a given tensor.
        with _ambient.off():  # autocast is in the graph already
            graph = _make_fx(torch.func.functionalize(graph), [*tensors, *(tensor.detach() for tensor in captured)])
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        # A compiler may lay out a tensor in another way than eager does, in which it has no such view.
        node.target = torch.ops.aten.reshape.default
    returned = set(graph.graph.output_node().all_input_nodes)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        if node not in returned:  # nothing has a history here, and nothing is written into: it is the tensor itself
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return Trace(graph, captured, *result)


def _make_fx(function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule:
    # The tracer keeps what every op gives as a tensor without values, of a mode of its own for each op, unless it finds one for them all:
    # which takes a third of the time.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(function)(*tensors)


class _ConstantsAsInputs(TorchDispatchMode):
    """Makes what fn closes over as unknown to the tracer as its arguments: of a constant it would give a Python value, and keep that.

    And refuses what has as many entries as its values say: the number is a Python value too, on which all that follows may depend. And what
    would be written into either: a trace, a comparison and a call would write more than once.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[Tensor], name: str) -> None:
        super().__init__()
        self._literals: list[Tensor] = []
        self._name = name
        # Views of a tensor share its storage. Those of other tensors stay alive too, so that no other takes their place.
        self._outside = {_storage(tensor): tensor for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mode = get_proxy_mode()
        if mode is not None and isinstance(func, OpOverload) and torch.Tag.dynamic_output_shape in func.tags:
            if _counts(func, args, kwargs, self._literals):
                raise PsgError(f"how many entries {func} gives depends on the data")
        if mode is not None and func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(1.0) inside fn is a constant
            tracer = mode.tracer
            for leaf in _trees.flatten((args, kwargs))[0]:
                if isinstance(leaf, Tensor) and not has_proxy_slot(leaf, tracer):
                    self._outside[_storage(leaf)] = leaf
                    track_tensor_tree(leaf, tracer.proxy(tracer.create_arg(leaf)), constant=None, tracer=tracer)
        if any(_storage(tensor) in self._outside for tensor in _written(func, args, kwargs)):
            raise StateError(
                f"psg.jit({self._name}): the function writes into an argument or into a tensor that it closes over ({func}), which "
                "compiling would do more than once. Return the new value from the function and write it outside."
            )
        output = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            self._literals.append(output)
        return output


# They write into running statistics when in training mode, and their schemas do not say so.
_BATCH_NORMS = {torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default}


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an op writes into."""
    if func in _BATCH_NORMS and args[5]:
        return [leaf for leaf in args[3:5] if isinstance(leaf, Tensor)]
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return []
    arguments = zip(func._schema.arguments, args, strict=False)
    written = [value for argument, value in arguments if argument.is_write]
    written += [kwargs[argument.name] for argument in func._schema.arguments if argument.is_write and argument.name in kwargs]
    return [leaf for leaf in _trees.flatten(written)[0] if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _counts(func: OpOverload, args: Any, kwargs: Any, literals: list[Tensor]) -> bool:
    """Whether the shape of an op's output is one of its values: of an indexing only if a mask is among the indices."""
    if func is not torch.ops.aten.index.Tensor:
        return kwargs.get("output_size") is None
    masks = [index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
    return any(all(mask is not literal for literal in literals) for mask in masks)


class _Reads(TorchFunctionMode):
    """Lets the tracer refuse what reads memory and is no op: asked for one entry, it refuses those of all but constants.

    And notes the generators that ops draw from.
    """

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self._generators = generators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in (*args, *kwargs.values()):
            if isinstance(leaf, torch.Generator) and id(leaf) not in self._generators:
                self._generators[id(leaf)] = leaf, leaf.get_state()
        for tensor in read_by(func, args, kwargs):
            if tensor.numel():
                tensor.detach().flatten()[0].item()
        return func(*args, **kwargs)


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


def _python_randomness() -> Any:
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ()
    return random.getstate(), tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
