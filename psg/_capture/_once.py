"""Values computed once for all samples: how they are computed from parameters and constants, and what becomes of them in a write."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call

from psg._call import Call
from psg._capture import _ruleless
from psg._capture._derived import derives, runs_for_each
from psg._capture._lifted import Lifted
from psg._capture._rewriting import Rewriting
from psg._capture._steps import run_pullable
from psg._errors import PsgError, Unsupported, UnsupportedByVmap
from psg._torch import _ambient, _functions, _functorch, _random
from psg._torch._ops import (
    FACTORIES,
    LIKE_ANOTHER,
    call_key,
    name_of,
    substitute,
    target_of,
    tensors_of,
)
from psg._watch._habits import Habits, Retry
from psg._watch._writes import Aliases
from psg.rules import _registry


class Once(Rewriting):
    """A watch of a pass that computes once what is computed from parameters and constants alone.

    Attributes:
        habits: How the pass runs.
        differentiated: Whether it is differentiated.
        constants: Computed from parameters, without a history.
        constants_at: Their storage addresses.
        rewrites: Whether fn has written into what is computed once.
    """

    def __init__(self, call: Call, params: Sequence[Lifted], inputs: Sequence[Tensor], laid_out: Sequence[Tensor], habits: Habits) -> None:
        super().__init__(call.n, params, inputs, Aliases(laid_out, habits.follows))
        self.habits = habits
        self.differentiated = call.needs_derivative
        self.constants: list[Tensor] = []
        self.constants_at: set[int] = set()
        self.rewrites = False
        self._derivations: dict[Any, tuple[Any, Any]] = {}  # by the key of a call: its output, and its arguments
        self._replaced: list[tuple[ref[Tensor], Tensor]] = []  # new constants that fn has written into, and what they were

    def _avoid_leak(self, func: Any, args: Any, kwargs: Any) -> None:
        # Most rules have no place in a pass that is differentiated, where ops run as under vmap(grad).
        reason = _registry.find_leak(func, args, kwargs, "capture", *(("vmap",) if self.differentiated else ()))
        if reason is not None and self.habits.lifts:
            raise Retry(f"{reason}, and its arguments may be computed once", lifts=False)
        if reason is not None:
            raise Unsupported(reason)

    def _note_lifted(self, func: Any, lifted: list[Lifted]) -> None:
        """Note that an op is computed for every sample with these values, for `explain`."""
        for value in lifted:
            value.uses.append(f"{name_of(func)}: lifted")

    # Derivations

    def _may_derive(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op is computed once if it is on lifted values and constants alone."""
        if self.differentiated or not self.habits.derives or not derives(func, args, kwargs):
            return False  # a derived value has a leaf of its own, at which its derivative would end
        return not self.habits.lifts or not runs_for_each(name_of(func), *self.lifted_among(tensors_of(args, kwargs)))

    def _others(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors of a call that are no lifted values."""
        return [tensor for tensor in tensors_of(args, kwargs) if id(tensor) not in self.by_handle]

    def _derive(self, func: Any, lifted: list[Lifted], args: Any, kwargs: Any, anew: bool = False) -> Any:
        """Compute an op on parameters and constants once, below vmap, and lift its output; tensors without a history are constants.

        If the same call has been computed before, fn gets the same output, unless it is computed `anew`.
        """
        if not self._may_derive(func, args, kwargs):
            return NotImplemented
        others = self._others(args, kwargs)
        if any(map(_functorch.is_wrapped, others)):
            return NotImplemented  # depends on the sample
        if name_of(func) in LIKE_ANOTHER and id(args[0]) not in self.by_handle:
            return NotImplemented  # it uses only the shape, dtype and device of the parameters
        if target_of(func, args, kwargs) is not None:
            return NotImplemented
        # Inside a differentiating transform fn may run again: reuse the output. (Not if there are other tensors: they may have changed.)
        arguments, records = call_key(args, kwargs), _functorch.records_below(self.level)
        key = None if anew or others or arguments is None else (func, arguments, records, _ambient.autocast_dtype(lifted[0].leaf))
        if key in self._derivations:
            output = self._derivations[key][0]
            self._handed_on.update(map(id, tensors_of((output,), {})))
            return output
        given = args, kwargs
        with _functorch.below(self.level):
            args, kwargs = substitute((args, kwargs), self.attached)
            with torch.set_grad_enabled(records):
                output = self._compute(func, args, kwargs)
            parts = output if isinstance(output, (tuple, list)) else (output,)
            if not all(isinstance(part, Tensor) for part in parts):
                return NotImplemented
            output, values, constants = self.lift(func, lifted, args, kwargs, output)
        shared = any(value.shared for value in lifted) or any(leaf.is_floating_point() for leaf in others)
        for value in values:
            value.shared = shared
        self.constants += constants
        self.constants_at.update(map(_functorch.memory_of, constants))
        self.own.mark(constants)
        if key is not None and not constants:  # a constant may be written into later, other outputs may not
            self._derivations[key] = output, given  # the key holds id()s of these arguments, so they must stay alive
        return output

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on parameters and constants below vmap; NotImplemented for an autograd.Function that cannot run once for all."""
        if func is not custom_function_call:
            return run_pullable(func, *args, **kwargs)
        containers = _functions.containers_in(args)  # copies, as the step needs them: fn may write into its own later
        if tensors_of(containers, {}) or not {list, dict}.issuperset(map(type, containers)):
            return NotImplemented
        contents = _functions.contents_of(containers)
        self._avoid_leak(func, args, kwargs)
        state = _random.get_state(tensors_of(args, kwargs))
        try:
            output, _, written = _ruleless.call_on_copies(func, args, kwargs)
            if written:
                raise Unsupported(f"{_ruleless.writing(args[0])}, which all samples share")
        except PsgError:
            raise
        except RuntimeError:  # it may close over the sample, whose wrapper is unknown below vmap
            return NotImplemented
        if _random.same_state(state, _random.now(state)) and not _functions.have_changed(contents):
            return output
        _random.set_state(state)
        return NotImplemented  # it has drawn random numbers, and each sample must draw its own; or it writes into a list or a dict

    # Writes

    def derive_anew(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As in the base class."""
        return self._derive(func, self.lifted_among(tensors_of(args, kwargs)), args, kwargs, anew=True)

    def below(self) -> contextlib.AbstractContextManager[Any]:
        """As in the base class."""
        return _functorch.below(self.level)

    def wrapped(self, value: Lifted) -> Tensor:
        """As in the base class."""
        return _functorch.wrap(value.leaf, self.level)

    def become(self, target: Tensor, output: Tensor) -> None:
        """As in the base class."""
        if id(target) not in self.by_handle:
            self._replaced.append((ref(target), output))
        super().become(target, output)
        self.rewrites = True
        self._derivations.clear()  # whose keys are id()s of arguments

    def _rewrite(self, func: Any, args: Any, kwargs: Any, target: Tensor) -> Any:
        """Write into a value computed once, a new constant, or a view of one, by an op that computes what it becomes.

        NotImplemented for what other tensors share, and where each sample writes: there the target has become a value of each sample.
        """
        value = self.by_handle.get(id(target))
        family = self.family_of(target, value)
        if family is None:
            return NotImplemented
        sampled = any(map(_functorch.is_wrapped, self._others(args, kwargs)))
        if not (sampled or self.lifted_among(tensors_of(args, kwargs))):
            return NotImplemented
        self.aliases.write(name_of(func), [target])
        if not sampled and args and args[0] is target:
            output = self.rewrite_once(func, args, kwargs, family)
            if output is not NotImplemented:
                return output
        if family.views:
            return NotImplemented
        with _functorch.below(), torch.inference_mode(False), torch.enable_grad():
            each = (value.leaf if value else target.expand(self.n, *target.shape)).clone()
        each = _functorch.wrap(each, self.level)
        if _functorch.may_swap(target) and _functorch.may_swap(each):
            if value:
                self._note_lifted(func, [value])
            self.become(target, each)
        return NotImplemented

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """A context for the pass: afterwards new constants that fn has written into, and that somebody keeps, are what they were.

        Raises:
            Retry: There are such. A pass that makes constants for every sample from the start knows what to do with those that fn keeps.
            UnsupportedByVmap: There are such in a pass that does so, but for constants that fn's own transforms make.
        """
        kept: list[Tensor] = []
        try:
            yield
        finally:
            if self._replaced:
                self._derivations.clear()
                self.by_handle.clear()
                for value in self.values:
                    value.handle = None
            for target, before in self._replaced:
                own = target()
                if own is not None:
                    _functorch.swap(own, before)
                    self.own.disown(own)
                    kept.append(own)
            self._replaced.clear()
        if kept:
            why, most = "fn keeps a tensor that it has made and written into", len(FACTORIES)
            raise UnsupportedByVmap(why) if self.habits.fills == most else Retry(why, fills=most)
