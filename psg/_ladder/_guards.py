"""Function modes that watch fn where vmap or plain autograd runs its ops as they are, and the loop's backward passes."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from psg._call import Call
from psg._capture._agreed import TEXT_OF_ALL
from psg._capture._written import has_written_backward, run_watched
from psg._errors import USED_ELSEWHERE, PsgError, Stale, StateError, UnsupportedByVmap
from psg._torch import _autograd, _functions, _functorch
from psg._torch._autocast import cast_of
from psg._torch._cached import cached
from psg._torch._higher_order import refuse_others
from psg._torch._ops import (
    ACCUMULATING,
    DIFFERENTIATING,
    GET_DATA,
    LIKENESSES,
    METADATA,
    TEXTS,
    foreign_handler,
    foreign_mode,
    is_torchs,
    name_of,
    operands_of,
    target_of,
    tensors_of,
    torchs_arguments,
)
from psg._watch import _pass
from psg._watch._habits import Habits, Retry
from psg._watch._marks import Marks
from psg._watch._outside import Looking
from psg._watch._writes import Aliases, changes_nothing, written
from psg.rules import _kernels
from psg.rules._registry import REWRITTEN, find_decomposition, find_leak, is_misderived, is_written_out, known_as, python_form
from psg.rules.leaks import OWN_GENERATOR, refuse_updates

OWN_TRACER = (
    "a tracer inside fn, such as torch.func.linearize's, takes the tensors that it meets inside of transforms as constants; torch.func.jvp "
    "has no tracer"
)


class VmapGuard(Looking):
    """Under vmap(grad): refuses updates of running statistics and ops that vmap gets wrong, but decomposes an op where that makes it right.

    Args:
        call: The call.
        samples: The tensors that fn is given.
        bare: The ids of leaves that they wrap, whose history shows ops that ran where no transform is: in threads that fn starts.
        differentiated: Whether the gradients are differentiated in turn.
        habits: Of these, `follows`, and `recorded`: fn differentiates gradients itself.

    Raises:
        Stale: fn goes on with a result of such an op.

    Attributes:
        failure: The message of the last error that an op raised, which fn may have caught; the error itself would keep all frames alive.
        has_written: Whether fn calls ops whose backward passes users may have written.
    """

    def __init__(self, call: Call, samples: Sequence[Tensor], bare: Collection[int], differentiated: bool, habits: Habits) -> None:
        super().__init__()
        self.bare = bare
        self.recorded = habits.recorded
        self._ran_undecomposed = False
        self.harmless: set[Any] = set()  # nodes of graphs that lead to none of these leaves
        self.outside = call.outside
        self.differentiated = differentiated
        self.tracers = _functorch.Tracers()
        self.failure: str | None = None
        self.has_written = False
        self.level = grad = _functorch.current_level()
        self.own = Marks(grad - 1, grad)
        self.own.claim(samples)
        self.aliases = Aliases(samples, habits.follows)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torchs_arguments(func, args, kwargs)
        if changes_nothing(func, args):
            return None
        try:
            if (form := python_form(func)) is not None:
                _refuse_watchers(func, tensors_of(args, kwargs))
                with self:
                    return form(*args, **kwargs)
            if (cast := cast_of(func, args, kwargs)) is not None:
                return cast.run(self, func, args, kwargs)
            self.has_written = self.has_written or has_written_backward(func)
            tensors, others = operands_of(args, kwargs)
            marked = self.own.owns(tensors) and func not in LIKENESSES
            self.outside.look(func, tensors, (), self.level)
            for tensor in tensors:
                if not _functorch.is_wrapped(tensor) and tensor.grad_fn and _autograd.find_leaf(tensor.grad_fn, self.bare, self.harmless):
                    raise Stale("a value of the parameters from another thread")
            if self.aliases.outdated and func not in METADATA:
                self.aliases.read(name_of(func), tensors)
            target = target_of(func, args, kwargs)
            if target is not None:
                self.aliases.write(name_of(func), written(target))
            output = self._run(func, tensors, others, target, *self.outside.replace((args, kwargs)))
            self.outside.made(output, kwargs)
            output = self.aliases.note(func, args, kwargs, tensors, output)
            if marked:
                self.own.claim(output, target)
            else:
                self.own.note(output)
            return output
        except Exception as error:
            self.failure = str(error)
            raise

    def _run(self, func: Any, tensors: list[Tensor], others: list[Any], target: Any, args: Any, kwargs: Any) -> Any:
        refuse_updates(func, args, kwargs, target)
        _refuse_constants(func, args, kwargs, self.level)
        if any(isinstance(leaf, torch.Generator) for leaf in others):
            raise PsgError(OWN_GENERATOR)
        if self.tracers.has_new():
            raise PsgError(OWN_TRACER)
        if func in TEXTS and _functorch.is_vmapped(tensors[0]):
            raise PsgError(TEXT_OF_ALL)
        if func in DIFFERENTIATING and kwargs.get("create_graph") and self._ran_undecomposed:
            raise Retry("fn differentiates gradients of an op whose higher derivatives torch gets wrong", recorded=True)
        if _is_data_inside(func, args, self.level):
            return func(*args)
        # In a transform of fn's own, too, which may differentiate, and in its levels of forward-mode autograd.
        inside = _functorch.current_level() > self.level or _functorch.tangents_active()
        higher = is_misderived(func) and (self.recorded or inside)
        decompose = find_decomposition(func, self.differentiated or higher)
        if decompose is not None:
            with self:
                output = decompose(*args, **kwargs)
            if output is not NotImplemented:  # else the op runs as a whole
                _refuse_watchers(func, tensors)
                return output
        # If the gradients are differentiated, autograd records the ops below vmap, as in the capture pass.
        if (reason := find_leak(func, args, kwargs, "vmap", *(("capture",) if self.differentiated else ()))) is not None:
            raise PsgError(reason)
        self._ran_undecomposed |= is_misderived(func)
        is_function = func is _functions.custom_function_call
        output = (run_watched if is_function else _kernels.run_without_gaps)(func, args, kwargs)
        if self.differentiated and is_function and (why := _functions.unbatched(args[0], tensors, output, self.level - 1)) is not None:
            raise PsgError(why)
        return output


def _is_data_inside(func: Any, args: Any, level: int) -> bool:
    """Whether this is `.data` of a tensor of a transform of fn's own, above this level: a constant for that transform alone."""
    return func == GET_DATA and _functorch.level_of(args[0]) > level


def _refuse_watchers(func: Any, tensors: Sequence[Tensor]) -> None:
    """Refuse to write an op out where a mode of the caller's, or a class of tensors, has seen other ops than the one that fn calls.

    Raises:
        PsgError: There is one.
    """
    if (why := foreign_mode() or foreign_handler(map(type, tensors))) is not None:
        raise PsgError(f"{name_of(func)} has to be written out as other ops inside of transforms, and {why}")


def _refuse_constants(func: Any, args: Any, kwargs: Any, level: int) -> None:
    """Refuse `torch.autograd.grad` for a tensor that is a constant to psg's own grad, at this level: autograd would take it as unused.

    Raises:
        PsgError: It is one.
    """
    if func is not torch.autograd.grad:
        return
    if kwargs.get("is_grads_batched"):
        raise PsgError(
            "fn calls torch.autograd.grad(..., is_grads_batched=True), whose results have no derivatives inside of transforms: use "
            "torch.func.vjp under torch.func.vmap"
        )
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    for tensor in (inputs,) if isinstance(inputs, Tensor) else inputs:
        if not isinstance(tensor, Tensor) or _functorch.level_of(tensor) < 0 and _functorch.is_wrapped(tensor):
            continue  # a transform of fn's own that has ended, as in jacrev, leaves its wrappers on what it differentiates for
        if _functorch.level_of(tensor) < level:
            raise PsgError(
                "fn calls torch.autograd.grad for a tensor that it closes over, or for one of a transform around psg, which psg's own "
                "torch.func.grad takes as a constant: only method='loop', outside of transforms, gives that gradient"
            )


@cached
def _is_ordinary(func: Any) -> tuple[bool, bool]:
    """Whether `Repaired` runs an op as it is, whatever its arguments, outside of transforms and inside: what all tables say of it."""
    if isinstance(func, HigherOrderOperator) or func in DIFFERENTIATING or is_misderived(func):
        return False, False
    if func in _kernels.BATCH_NORMS or func in _kernels.RECURRENT or is_written_out(func) or python_form(func) is not None:
        return False, False
    return True, known_as(func) not in REWRITTEN


class Unasserted(TorchFunctionMode):
    """Where fn runs on zeros, which stand for no samples: omits assertions, which zeros may fail (and which would end a GPU's context)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if name_of(func) == "_assert_async" and is_torchs(func) else func(*args, **(kwargs or {}))


class Repaired(TorchFunctionMode):
    """Under plain autograd, or for one sample inside a transform: works around ops that torch gets wrong there.

    Args:
        differentiated: Whether the gradients are differentiated in turn. Then ops whose higher derivatives torch gets wrong are decomposed,
            but not in checkpointed parts of fn: these may run again after the call has ended, when nothing decomposes them.

    Attributes:
        history: Whether the gradients get a history. Then checkpointed parts may run again, as torch's ops, after the call has ended.
        is_misderived: Whether fn itself has differentiated gradients, after such an op had run undecomposed: fn must run again, with
            `differentiated`.
    """

    history = False

    def __init__(self, differentiated: bool = False) -> None:
        super().__init__()
        self.differentiated = differentiated
        self.level = _functorch.current_level()
        self.is_inside = _functorch.transform_active()
        self.hooks = _autograd.saved_tensor_hooks()
        self.is_misderived = False
        self._ran_undecomposed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torchs_arguments(func, args, kwargs)
        if _is_ordinary(func)[self.is_inside]:
            return func(*args, **kwargs)
        if (form := python_form(func)) is not None:
            with self:
                return form(*args, **kwargs)
        if _is_data_inside(func, args, self.level):
            return func(*args)
        refuse_others(func, args)
        misderived = is_misderived(func)
        if self.is_inside or misderived:
            decompose = find_decomposition(func, differentiated=True)
            written_out = self.differentiated or _functorch.is_transformed() or _kernels.is_imprecise(func, args)
            if decompose is not None and written_out and _autograd.saved_tensor_hooks() == self.hooks:
                if (cast := cast_of(func, args, kwargs)) is not None:
                    return cast.run(self, func, args, kwargs)
                with self:
                    output = decompose(*args, **kwargs)
                if output is not NotImplemented:
                    if self.is_inside:
                        _refuse_watchers(func, tensors_of(args, kwargs))
                    return output
            self._ran_undecomposed |= misderived
        if func in DIFFERENTIATING and kwargs.get("create_graph"):
            self.is_misderived |= self._ran_undecomposed and not self.differentiated
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        kept = self.history and _autograd.saved_tensor_hooks() != self.hooks
        return (_kernels.run_whole if kept else _kernels.run)(func, args, kwargs)


class LoopGuard(Repaired, Looking):
    """Under plain autograd: also refuses updates of running statistics, and notes the arguments of fn's ops.

    Args:
        call: The call.
        own: The leaves that fn is given.
        differentiated: As `Repaired` takes it.
        history: Whether the gradients get a history.

    Attributes:
        recorded_ids: The ids of the tensors that were given to ops while autograd was on.
        other_ids: The ids of those that were given to other ops.
        failure: The message of the last error that only transforms raise, which fn may have caught.
        refusal: The error that tells of it.
    """

    refusal: type[PsgError] = PsgError

    def __init__(self, call: Call, own: Sequence[Any] = (), differentiated: bool = False, history: bool = False) -> None:
        super().__init__(differentiated)
        self.history = history
        self.outside = call.outside
        self.tracers = _functorch.Tracers()
        self.own = frozenset(map(id, own))
        self.draws_once = call.randomness == "same" and not self.is_inside  # transforms around psg have a randomness of their own
        self.recorded_ids: set[int] = set()
        self.other_ids: set[int] = set()
        self.failure: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torchs_arguments(func, args, kwargs)
        if changes_nothing(func, args):
            return None
        tensors = tensors_of(args, kwargs)
        (self.recorded_ids if torch.is_grad_enabled() else self.other_ids).update(map(id, tensors))
        self.outside.look(func, tensors, self.own, self.level)
        args, kwargs = self.outside.replace((args, kwargs))
        if self.is_inside and self.tracers.has_new():
            raise PsgError(OWN_TRACER)
        if self.draws_once and (output := _kernels.shared_dropout(func, args, kwargs)) is not NotImplemented:
            return output
        target = target_of(func, args, kwargs)
        if target is None and "requires_grad" not in kwargs and _is_ordinary(func)[self.is_inside]:
            return func(*args, **kwargs)
        refuse_updates(func, args, kwargs, target)
        if self.level >= 0:
            _refuse_constants(func, args, kwargs, self.level)
        output = super().__torch_function__(func, types, args, kwargs)
        self.outside.made(output, kwargs)
        return output

    def expect_right(self, values: Sequence[Tensor]) -> None:
        """Refuse the results of an fn that has handled such an error: it has taken a path that it would not take outside of transforms."""
        if self.failure is not None:
            raise self.refusal(f"the function handles an error: {self.failure}")


class MembersGuard(LoopGuard):
    """In the loop under a vmap around psg, which runs all of its members at once: refuses what may give one another result than alone.

    Attributes:
        aliases: Tensors that share memory in one member, or may.
        failure: The message of the last error that an op raised.
        has_written: Whether fn calls ops whose backward passes users may have written.
    """

    refusal = UnsupportedByVmap

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.aliases = Aliases((), follows=True)
        self.has_written = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torchs_arguments(func, args, kwargs)
        if changes_nothing(func, args):
            return None
        try:
            self.has_written = self.has_written or has_written_backward(func)
            tensors, target = tensors_of(args, kwargs), target_of(func, args, kwargs)
            if func in TEXTS and _functorch.is_vmapped(tensors[0]):
                raise UnsupportedByVmap(TEXT_OF_ALL)
            if func not in METADATA:
                self.aliases.read(name_of(func), tensors)
            if target is not None:
                self.aliases.write(name_of(func), written(target))
            output = super().__torch_function__(func, types, args, kwargs)
            return self.aliases.note(func, args, kwargs, tensors, output)
        except Exception as error:
            self.failure = str(error)
            raise

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        # It gets ops as wrong as psg's own vmap does on the rungs above: also where the members share all operands, but not the cotangents.
        tensors = tensors_of(args, kwargs)
        batched = [value for tensor in tensors for value in _functorch.under_vmaps(tensor, self.level)]
        recorded = ("capture",) if any(value.requires_grad for value in batched) else ()
        meets = batched or any(tensor.requires_grad for tensor in tensors)
        if meets and (reason := find_leak(func, args, kwargs, "vmap", *recorded)) is not None:
            raise UnsupportedByVmap(reason)
        return run_watched(func, args, kwargs) if func is _functions.custom_function_call else super()._run(func, args, kwargs)

    def expect_right(self, values: Sequence[Tensor]) -> None:
        """As in the base class; also those that may lack a write."""
        super().expect_right(values)
        self.aliases.read("the result", values)


class RerunGuard(Repaired):
    """Watches ops that a backward pass runs again, as a checkpointed layer's does: they must use the parameters of the forward pass.

    Args:
        call: The call.
        forward: The guard of the forward pass.
        called: The modules that fn has called.
        history: Whether the gradients get a history: they have none that `backward()` has added up.
    """

    def __init__(self, call: Call, forward: LoopGuard, called: _pass.Pass, history: bool) -> None:
        super().__init__(forward.differentiated)
        self.call, self.forward, self.called, self.history = call, forward, called, history

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torchs_arguments(func, args, kwargs)
        if self.history and func in ACCUMULATING:
            raise PsgError(
                f"{self.call.name}: the backward pass of an autograd.Function (of a reversible or reentrantly checkpointed layer) calls "
                "backward(), whose gradients have no derivatives, and an input requires grad. Pass detached parameters, as psg.stateless "
                "returns them, or call psg under torch.no_grad()."
            )
        for leaf in tensors_of(args, kwargs):
            if (name := self.called.replaced.get(id(_autograd.base_of(leaf)))) is not None and leaf.requires_grad:
                raise StateError(USED_ELSEWHERE.format(name))
            if isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad and self._is_unknown(leaf):
                raise StateError(
                    f"{self.call.name}: the backward pass runs a part of fn again, as checkpointed, reversible and adjoint layers do, with "
                    f"a module's own parameter (of shape {tuple(leaf.shape)}) in the place of the one that fn was given: functional_call "
                    "has ended by then. Make fn with psg.stateless, which holds the parameters in place until the end."
                )
            if id(leaf) in self.called.ambiguous:
                raise StateError(
                    f"{self.call.name}: the backward pass runs a part of a module again, as a checkpointed layer's does, and fn has called "
                    "that module with several sets of parameters: psg cannot tell which of them to use then. Remove the checkpointing."
                )
        if self.forward.draws_once and (output := _kernels.shared_dropout(func, args, kwargs)) is not NotImplemented:
            return output
        return super().__torch_function__(func, types, args, kwargs)

    def _is_unknown(self, leaf: Tensor) -> bool:
        """Whether the forward pass has not used this tensor, which has the shape of a parameter."""
        if id(leaf) in self.forward.recorded_ids or id(leaf) in self.forward.other_ids:
            return False
        if _functorch.is_wrapped(leaf):  # a call of psg that fn makes has put it into the module
            return False
        return any(leaf.shape == self.call.leaves[position].shape for position in self.call.params)
