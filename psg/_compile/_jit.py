"""Trace a whole transform, forward, backward and reductions, to one flat graph, and compile it.

The first call of every signature (tree structure, shapes, strides, dtypes, devices, Python values, autocast) is traced (`_trace.py`). The
graph of ATen ops goes to one of torch.compile's backends, and the compiled result is compared with the eager one before it is used:
compilers do go wrong. Later calls of the signature run the compiled graph alone.
"""

import functools
import logging
import operator
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from psg import _trees, plans
from psg._compile._trace import Trace, Unseen, bits_of, trace
from psg._compile._verify import Draws, draws_numbers, verify
from psg._errors import FallbackWarning, InputError, StateError, as_integer, first_line, received, user_line
from psg._torch import _ambient, _autograd, _functorch
from psg._torch._ops import handles_ops
from psg._torch._patches import assigned
from psg._watch._modules import CALLED, Called, Guard
from psg.rules._gates import FUSIBLE
from psg.rules._registry import are_disabled
from psg.testing import Mismatch
from psg.transforms import batching_of, first_samples, mark

_log = logging.getLogger("psg.jit")

# One build at a time, in all threads: torch's tracer patches state that they share, and a build rewinds the random generators.
_building = threading.RLock()

_Compile = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]


class Compiled(NamedTuple):
    """One entry of a jitted function's cache.

    Attributes:
        signature: The tensors of the call that was traced, written as dtype[shape].
        seconds: The time for tracing, compiling and the comparison with eager.
        error: Why calls of this signature run eagerly; None if they run compiled.
    """

    signature: str
    seconds: float
    error: str | None


def jit(
    fn: Callable[..., Any],
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    buckets: int | Sequence[int] | None = None,
    check: bool = True,
) -> "Jitted":
    """Compile a function made by psg's transforms, or any pure function of trees of tensors that calls such functions.

    What is traced and what is not, as in JAX:

    - Tensor arguments may change from call to call. New shapes, strides, dtypes or devices make a new signature, and so do other Python
      values (numbers, strings, flags, the tree's structure, the order of a dict's keys) and other autocast settings. Each signature is
      compiled once. Other objects are told apart by their hash: changes of their attributes are not seen. One tensor given twice reaches
      fn as two, so that `a is b` is false.
    - Tensors that fn closes over are read at every call. Changing one in place is seen (a new dtype or shape compiles anew); *replacing* it
      by another tensor is not. In modules, psg does see this: for every module of which fn reads anything, wherever it holds it, replaced
      buffers, frozen parameters or submodules, hooks, `train()`/`eval()`, and new values of the attributes that fn reads (a dropout's `p`,
      an entry of a list, deque or dict of up to 100, nested up to eight deep) lead to a new trace, in the criterion too. Not looked at are
      what other objects hold, attributes that fn itself writes, classes that are changed, and what a scripted module holds. After 16 traces
      for one signature, further changes run eagerly. Give fn an attribute `cache_key` for what psg does not see: a function without
      arguments, whose hashable result becomes part of the signature. Tensors that fn makes past torch's dispatcher (`torch.func.linearize`,
      DLPack) cannot be traced; to tell them from tensors that fn closes over, a function that closes over tensors runs twice.
    - Other Python values that fn closes over are fixed by the trace, and fn prints or appends to lists only then. A function may take
      Python values (by `.item()`, by branching), masks and sizes from tensors that it makes of numbers, and from tensors that it closes
      over, the edges of a graph say: all later calls compare the latter with what they were in the trace, for which Python waits on
      accelerators, and new values lead to a new trace. A function that takes them from arguments cannot be traced and runs eagerly.
      So does a transform with `method="batch"`, which looks at the data, and a function that calls `psg.distributed`, whose
      processes compare what they hold. `torch.distributions` validates its arguments in the eager comparison (`check`), and not in
      compiled calls.
    - `torch.compiler.is_compiling()` is true during the trace. Models that take a shortcut where a mask masks nothing should ask that
      first, as those of transformers do, and then take the path that is right for every mask.
    - fn must not write into an argument or a tensor that it closes over: return the new values instead.
    - Random numbers of torch are drawn anew at every call, from torch's generators, as `torch.manual_seed` sets them. A function that
      makes or seeds a generator itself, or draws from a generator object of Python's or NumPy's, runs eagerly, if `check` is true.

    Calls run eagerly, so that they can be differentiated, inside torch.func transforms and forward-mode AD, and where an input or a tensor
    that fn closes over requires grad. Calls on empty batches, under `torch.autograd.detect_anomaly`, inside another traced function, or
    under a function or dispatch mode are eager too. Thread-safe: each signature is compiled once, by whichever thread comes first.
    Compiling rewinds torch's generators, so no other thread should draw from them meanwhile.

    Args:
        fn: The function.
        backend: As in torch.compile: "inductor", "aot_eager", "eager", another name or a function of a graph and its inputs.
        mode: As in torch.compile, for the backend "inductor": "reduce-overhead" uses CUDA graphs, whose results a later call may overwrite
            (clone those that you keep); "max-autotune" tunes kernels.
        buckets: Pad batches to a few sizes, so that a varying number of samples (Poisson sampling) does not compile anew for each: an
            integer b for multiples of b, or a sequence of sizes (beyond the largest, its multiples). Padding repeats the last sample; it
            contributes exactly zero to sums and does not appear in the result; random numbers are those of the padded batch. Only for
            functions made by psg's transforms.
        check: Compare the first result of every signature with the eager one. Where they differ by more than rounding the inputs explains,
            a FallbackWarning says so, and calls of that signature stay eager. Graphs that draw random numbers are compared in any case:
            one does not know whether fn seeds a generator.

    Returns:
        The compiled function, with `cache_info()` and `cache_clear()`. Where tracing or compiling fails it gives a FallbackWarning that
        says why, and runs eagerly. The logger "psg.jit" reports every compilation at level INFO.

    Raises:
        InputError: `fn` is not a function, or an option has a value that is not allowed. At a call: an argument is neither a tensor nor
            hashable.
        StateError: At a call: fn writes into an argument or a tensor that it closes over, as an optimizer does. The error comes before
            anything is written.

    Example:
        >>> import torch, psg
        >>> loss = lambda w, x: (w * x).sum() ** 2
        >>> fast = psg.jit(psg.per_sample_norm(loss), backend="eager", buckets=4)
        >>> fast(torch.ones(2), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([2.0000, 5.6569])
        >>> [entry.signature for entry in fast.cache_info()]
        ['float32[2], float32[4, 2]']

    Source: Frostig et al., "Compiling machine learning programs via high-level tracing", 2018 (JAX's jit).
    """
    if not callable(fn) or isinstance(fn, type):
        raise InputError(f"psg.jit: expected a function, got {received(fn)}.")
    return Jitted(fn, backend, mode, buckets, check)


class Jitted:
    """What `psg.jit` returns: call it like the function."""

    def __init__(
        self, fn: Callable[..., Any], backend: str | Callable[..., Any], mode: str | None, buckets: int | Sequence[int] | None, check: bool
    ) -> None:
        functools.update_wrapper(self, fn, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
        self._fn = fn
        self._batching = batching_of(fn)
        self._key = getattr(fn if self._batching is None else self._batching.fn, "cache_key", tuple)
        self._compile = _compiler(backend, mode)
        if not isinstance(check, bool):
            raise InputError(f"psg.jit(check={check!r}): expected True or False.")
        self._check = check
        self._name = getattr(fn, "__name__", type(fn).__name__) if self._batching is None else self._batching.name
        self._sizes = None if buckets is None else _sizes(buckets)
        if self._sizes is not None and self._batching is None:
            raise InputError(
                f"psg.jit(buckets={buckets!r}): {self._name!r} is not made by one of psg's transforms, so psg cannot "
                "tell which of its arguments are batched. Pass the transform's result itself to jit, or leave buckets out."
            )
        if self._batching is not None:
            mark(self, self._batching)  # other functions must not take it for one of one sample
        # By signature, then by what a trace depends on beside it, then by the state that this was in.
        self._cache: dict[Hashable, dict[Guard, dict[Hashable, _Entry]]] = {}
        self._builds: Counter[Hashable] = Counter()

    def __repr__(self) -> str:
        """The function's name, and the number of traces."""
        return f"psg.jit({self._name}), compiled {len(self.cache_info())} times"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled for this signature."""
        if _functorch.is_traced() or _functorch.tangents_active() or _ambient.has_function_modes():
            return self._fn(*args, **kwargs)  # tracers and modes cannot see the ops of a compiled graph, which carries no tangents either
        if self._sizes is not None and self._batching is not None:
            args, kwargs, n = self._batching.pad(args, kwargs, self._sizes)
            return first_samples(self._run(args, kwargs), n)
        return self._run(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind to an instance: as an attribute of a class it is a method, like any function."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: Any) -> "Jitted":
        """Itself: functions are not copied."""
        return self

    def cache_info(self) -> list[Compiled]:
        """One entry for each trace, those of a signature side by side."""
        guarded = [entries for own in list(self._cache.values()) for entries in list(own.values())]  # copies: other threads may add
        return [entry.info for entries in guarded for entry in list(entries.values())]

    def cache_clear(self) -> None:
        """Forget what has been compiled."""
        with _building:
            self._cache.clear()
            self._builds.clear()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec, orders = _flatten((args, kwargs))
        # Compilers read memory as it is, and would miss that a tensor is marked as negated or conjugated.
        leaves = [leaf.resolve_conj().resolve_neg() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = _trees.tensors_in(leaves)
        if _runs_eagerly(tensors):
            return self._fn(*args, **kwargs)
        # psg's transforms enable autograd themselves.
        modes = None if self._batching is not None else (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        signature = (spec, orders, tuple(_signature(leaf) for leaf in leaves), _surroundings(), modes, _told(self._key()))
        entry = self._entry(signature, tensors)
        if entry is None:
            with _building:
                entry = self._entry(signature, tensors)
                if entry is None and self._builds[signature] < _MOST_BUILDS:
                    entry, guard, state = self._build(leaves, spec)
                    # If the function itself raises, it does so here, before anything is cached.
                    result = None if entry.info.error is None else self._fn(*args, **kwargs)
                    self._cache.setdefault(signature, {}).setdefault(guard, {})[state] = entry
                    self._builds[signature] += 1
                    if self._builds[signature] == _MOST_BUILDS:
                        warnings.warn(
                            f"psg.jit({self._name}): compiled {_MOST_BUILDS} times for {entry.info.signature}, because attributes of "
                            "modules, or tensors that the function closes over, have changed. Calls after further changes "
                            "run eagerly. Pass what changes as an argument.",
                            FallbackWarning,
                            stacklevel=3,
                        )
                    if entry.info.error is not None:
                        what = f"Calls of this signature run eagerly: {entry.info.signature}."
                        warnings.warn(f"psg.jit({self._name}): {entry.info.error}. {what}", FallbackWarning, stacklevel=3)
                        return result
        if entry is None or entry.program is None or entry.program.is_unfit:
            return self._fn(*args, **kwargs)
        return entry.program(tensors)

    def _entry(self, signature: Hashable, tensors: Sequence[Tensor]) -> "_Entry | None":
        for guard, entries in list(self._cache.get(signature, {}).items()):  # a copy: another thread may add to it
            entry = entries.get(guard.state())
            if entry is not None and (entry.program is None or not entry.program.is_outdated(tensors)):
                return entry
        return None

    def _build(self, leaves: list[Any], spec: Any, again: bool = True) -> tuple["_Entry", Guard, Hashable]:
        """A new entry, what the trace depends on beside the signature, and the state that this was in."""
        tensors = [tensor.detach() for tensor in _trees.tensors_in(leaves)]
        signature = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
        name = self._name
        start, draws = time.perf_counter(), Draws(tensors)
        _log.info("%s: compiling for %s", name, signature)
        found, program, error, called = None, None, None, Called()

        def eager(tensors: Sequence[Tensor]) -> Any:
            args, kwargs = _trees.unflatten(spec, _trees.fill(leaves, tensors))
            return self._fn(*args, **kwargs)

        try:
            with assigned(CALLED, called), _ambient.uncached():  # a parametrised weight that was cached would be a constant

                def noted(*args: Any, **kwargs: Any) -> Any:
                    mode: Any = get_proxy_mode()
                    with called.noting(*([] if mode is None else [mode.tracer.root])):  # the module in which the tracer keeps constants
                        return self._fn(*args, **kwargs)

                found = trace(noted, leaves, spec, tensors, name, draws.generators, called.constants)
            program = _Program(found, tensors, self._compile)
            if self._check or draws_numbers(found.graph):
                verify(program, eager, found.graph, tensors, draws)
        except (InputError, StateError):
            raise
        except Mismatch as mismatch:
            program, error = None, f"the compiled result is wrong: {first_line(mismatch)}"
        except Exception as reason:
            if again and isinstance(reason, Unseen):  # the run may have kept what the next one uses: a table that is made when first needed
                return self._build(leaves, spec, again=False)
            text = " ".join(str(reason).split("\n")[:3])
            text = text.partition("It may be possible to trace")[0].strip()  # advice for those who call torch's tracer
            line = "" if found else user_line(reason, "")
            kind = type(reason).__name__ + (line and f" at {line}")
            program, error = None, f"it cannot be {'compiled' if found else 'traced'} ({kind}: {text})"
        finally:
            draws.rewind()
        seconds = time.perf_counter() - start
        if error is None:
            _log.info("%s: compiled for %s in %.1f s", name, signature, seconds)
        guard, before, held = called.guard()
        return _Entry(program, Compiled(signature, seconds, error), held), guard, before


# As often is one signature compiled, for different states of the modules and the tensors that the function closes over.
_MOST_BUILDS = 16


class _Entry(NamedTuple):
    program: "_Program | None"
    info: Compiled
    held: list[Any]
    """What must stay alive, because the cache's key has its ids."""


class _Program:
    """A compiled trace: from the tensors of the arguments to the function's result."""

    def __init__(self, trace: Trace, tensors: list[Tensor], compile: _Compile) -> None:
        self._trace = trace
        self._outside = [*trace.captured, *trace.sized, *(tensor for tensor, _ in trace.read)]
        self._expected = [_signature(tensor) for tensor in self._outside]
        self._offsets = self._offsets_of(tensors)
        with _ambient.off(), torch.no_grad():
            self._run = compile(trace.graph, [*map(torch.detach, tensors), *map(_plain, trace.captured)])

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        # Under the same settings as when it was compiled.
        with _ambient.off(), torch.no_grad():
            outputs = self._run(*map(torch.detach, tensors), *map(_plain, self._trace.captured))
        return _trees.unflatten(self._trace.spec, _trees.fill(self._trace.leaves, outputs))

    def is_outdated(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the program does not fit these arguments, or what the function closes over now."""
        differ = any(_signature(tensor) != expected for tensor, expected in zip(self._outside, self._expected, strict=True))
        return differ or self._offsets_of(tensors) != self._offsets or not all(_has_bits(*pair) for pair in self._trace.read)

    def _offsets_of(self, tensors: Sequence[Tensor]) -> list[Any]:
        if not self._trace.placed:
            return []
        given = *tensors, *self._outside
        return [given[place].storage_offset() for place in self._trace.placed]

    @property
    def is_unfit(self) -> bool:
        """Whether the graph would differ, or its results lack a history, because a tensor that the function closes over requires grad."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._trace.recorded):
            return True
        return any(tensor.requires_grad != before for tensor, before in self._trace.flags)


def _has_bits(tensor: Tensor, bits: Tensor) -> bool:
    """Whether a tensor still has the values of the trace."""
    with _ambient.off(), torch.no_grad():
        return torch.equal(bits_of(tensor), bits)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor's memory as it is: compilers would miss that it is marked as negated or conjugated."""
    return tensor.detach().resolve_conj().resolve_neg()


def _flatten(tree: Any) -> tuple[list[Any], Any, Hashable]:
    """Leaves, structure, and what that ignores and fn may read: the order of dicts' keys, and what containers hold beside their leaves."""
    orders: list[Any] = []

    def note(node: Any) -> bool:
        if node is tree:
            orders.clear()  # a tree with containers that are new to optree is flattened once more
        elif isinstance(node, dict):
            orders.append(tuple(map(_told, node)))
        if others := _trees.attributes_of(node):
            orders.append(others)
        return False

    leaves, spec = _trees.flatten(tree, is_leaf=note)
    return leaves, spec, tuple(orders)


def _signature(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        kind = Tensor if isinstance(leaf, nn.Parameter) else type(leaf)
        strides = leaf.stride() if leaf.layout == torch.strided else (leaf.layout, *_entries(leaf))
        return kind, leaf.shape, strides, leaf.dtype, leaf.device, leaf.is_conj(), leaf.is_neg()
    try:
        hash(leaf)
    except TypeError:
        raise InputError(
            f"psg.jit: an argument of type {type(leaf).__name__} is neither a tensor nor hashable. Bind it by functools.partial first."
        ) from None
    return _told(leaf)


def _told(value: Any) -> Hashable:
    """What tells one hashable value from another: numbers and strings by type too, in tuples and sets as well; a range by its bounds."""
    if type(value) in (tuple, frozenset):
        return type(value), type(value)(map(_told, value))
    return _trees.key_of(value) or (type(value), repr(value) if type(value) is range else value)


def _entries(tensor: Tensor) -> tuple[Any, ...]:
    """What else the shape of a sparse tensor's parts depends on."""
    return (tensor._nnz(), tensor.is_coalesced()) if tensor.layout == torch.sparse_coo else (tensor._nnz(),)


def _runs_eagerly(tensors: Sequence[Tensor]) -> bool:
    """Whether a call with these tensors is left to the function as it is."""
    if _functorch.transform_active() or torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True  # the result must be differentiable
    if torch.is_anomaly_enabled():
        return True  # which names the op of fn that made a NaN
    if _autograd.saved_tensor_hooks() is not None and not _autograd.is_checkpointed():
        return True  # the caller's hooks may change what the backward pass reads
    # An empty batch: nothing to compile (empty registers, say, are no batch); or a tensor whose class would see no op of a compiled graph.
    return any(tensor.shape[:1] == (0,) or handles_ops(type(tensor)) for tensor in tensors)


def _surroundings() -> Hashable:
    """The settings that a trace depends on, beside the arguments."""
    # torch.get_float32_matmul_precision raises where some backend has a precision of its own.
    on_cpu = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    precisions = torch.backends.cuda.matmul.fp32_precision, on_cpu
    numerics = torch.get_default_dtype(), _ambient.default_device(), precisions, torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    halves = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")  # fn may switch autocast on
    return _ambient.autocast(), halves, are_disabled(), plans.settings_key(), numerics, strict


def _sizes(buckets: int | Sequence[int]) -> Callable[[int], int]:
    """From a number of samples to the size of its bucket."""
    given = list(buckets) if isinstance(buckets, Sequence) else [buckets]
    sizes = sorted(size for size in (as_integer(size, least=1) for size in given) if size is not None)
    if not sizes or len(sizes) < len(given):
        raise InputError(f"psg.jit(buckets={buckets!r}): expected an integer of at least 1 or a sequence of them.")
    return lambda n: next((size for size in sizes if n <= size), -(-n // sizes[-1]) * sizes[-1])


def _backend(name: str) -> _Compile:
    if not isinstance(name, str):
        raise InputError(f"psg.jit(backend={name!r}): expected a name, or a function of a graph and its inputs.")
    from torch._dynamo.exc import InvalidBackend  # takes half a second, so that only those who compile pay for it

    try:
        return torch._dynamo.lookup_backend(name)
    except InvalidBackend:
        # torch's list leaves out its backends for debugging, which "eager" and "aot_eager" are.
        known = ", ".join(map(repr, sorted({*torch.compiler.list_backends(), "eager", "aot_eager"})))
        raise InputError(f"psg.jit(backend={name!r}): there is no backend of that name; torch has {known}.") from None


def _compiler(backend: str | Callable[..., Any], mode: str | None) -> _Compile:
    """A function that compiles a flat graph for given inputs. The graph is traced already, so torch.compile's front end is left out."""
    if backend != "inductor":
        if mode is not None:
            raise InputError(f'psg.jit(mode={mode!r}): only the backend "inductor" has modes.')
        return backend if callable(backend) else _backend(backend)
    modes = torch._inductor.list_mode_options()
    if mode is not None and (not isinstance(mode, str) or mode not in modes):
        raise InputError(f"psg.jit(mode={mode!r}): expected None or one of {', '.join(map(repr, modes))}.")
    # With fallback_random the random numbers are those of eager, so that the results can be compared.
    options = {**({} if mode is None else modes[mode]), "fallback_random": True}

    def compile(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        for op in FUSIBLE:
            for node in graph.graph.find_nodes(op="call_function", target=op):
                node.update_kwarg("fuse", True)
        graph.recompile()
        if {tensor.device.type for tensor in inputs} == {"cpu"}:
            # Inductor would make every convolution channels-last: up to 1.4 times slower here (ResNet, VGG, depthwise).
            own = {"layout_optimization": False}
        elif _has_numbers_on_cpu(graph):
            own = {"allow_buffer_reuse": False}  # memory of the accelerator is freed and taken anew: next to nothing there
        else:
            own = {}
        run: Any = torch._inductor.compile(graph, [*inputs], options=options | own)
        return run

    return compile


def _has_numbers_on_cpu(graph: GraphModule) -> bool:
    """Whether an op with several outputs has one on the CPU, as the kernels of attention have: the seed of a dropout that does not happen.

    Inductor takes it for one on the accelerator, and would use its memory again for a number of its own.
    """
    outputs = graph.graph.find_nodes(op="call_function", target=operator.getitem)
    return any(isinstance(node.meta.get("val"), Tensor) and node.meta["val"].is_cpu for node in outputs)
