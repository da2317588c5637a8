"""Values computed once for all samples: how they are computed from parameters and constants, and what becomes of them in a write.

A write into such a value, into a new constant, or into a view of one, is run as an op that computes what the tensor becomes; then fn's own
tensors become the results.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call

from psg._call import Call
from psg._capture import _ruleless
from psg._capture._derived import derives, is_simple
from psg._capture._lifted import Lifted, Watch
from psg._capture._steps import Step, run_pullable
from psg._errors import PsgError, Unsupported, UnsupportedByVmap
from psg._torch import _ambient, _functions, _functorch, _random
from psg._torch._ops import (
    FACTORIES,
    LIKE_ANOTHER,
    NEW,
    assigned_by,
    call_key,
    index_put,
    is_mask,
    name_of,
    out_of_place,
    put_at,
    substitute,
    target_of,
    tensors_of,
)
from psg._watch._habits import Habits, Retry
from psg._watch._marks import Marks
from psg._watch._writes import Aliases
from psg.rules import _registry


class Family(NamedTuple):
    """Tensors of fn's in one memory that holds no others: one that is no view, and views of it."""

    owner: Tensor
    views: list[Tensor]


class Once(Watch):
    """A watch of a pass that computes once what is computed from parameters and constants alone.

    Attributes:
        own: The marks of the tensors that the pass has made.
        habits: How the pass runs.
        differentiated: Whether it is differentiated.
        aliases: Tensors that may share memory with others.
        constants: Computed from parameters, without a history.
        constants_at: Their storage addresses.
        rewrites: Whether fn has written into what is computed once.
    """

    own: Marks

    def __init__(self, call: Call, params: Sequence[Lifted], inputs: Sequence[Tensor], laid_out: Sequence[Tensor], habits: Habits) -> None:
        super().__init__(call.n, params, inputs)
        self.habits = habits
        self.differentiated = call.needs_derivative
        self.aliases = Aliases(laid_out, habits.follows)
        self.constants: list[Tensor] = []
        self.constants_at: set[int] = set()
        self.rewrites = False
        self._derivations: dict[Any, tuple[Any, Any]] = {}  # by the key of a call: its output, and its arguments
        self._handed_on: set[int] = set()  # the id()s of those outputs that fn got from several calls
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
        if not self.habits.lifts or not is_simple(name_of(func)):
            return True
        return not all(value.is_little for value in self.lifted_among(tensors_of(args, kwargs)))

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
            output, values, constants = self.lift(
                func, lifted, args, kwargs, output, lambda value, _: _functorch.wrap(value.leaf, self.level)
            )
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

    def _note_constant(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], output: Any) -> None:
        """Note what a call on constants has made, if it is a tensor in memory of its own, or a view of one."""
        self.own.note(output)
        if "out" in kwargs:
            return
        if func in NEW:
            self.own.note_new(output)
            return
        if not tensors or not isinstance(output, Tensor) or _functorch.is_wrapped(output) or not derives(func, args, kwargs):
            return
        if any(tensor.layout is not torch.strided for tensor in (output, *tensors)):
            return
        if _functorch.memory_of(output) not in map(_functorch.memory_of, tensors):
            self.own.note_new(output)
        elif args and output._base is not None and output._base is args[0] and self.own.is_new(args[0]):
            self.own.note_view(output, lambda owner: func(owner, *args[1:], **kwargs))

    def _rewrite(self, func: Any, args: Any, kwargs: Any, target: Tensor) -> Any:
        """Write into a value computed once, a new constant, or a view of one, by an op that computes what it becomes.

        NotImplemented for what other tensors share, and where each sample writes: there the target has become a value of each sample.
        """
        value = self.by_handle.get(id(target))
        family = self._family_of(target, value)
        if family is None:
            return NotImplemented
        sampled = any(map(_functorch.is_wrapped, self._others(args, kwargs)))
        if not (sampled or self.lifted_among(tensors_of(args, kwargs))):
            return NotImplemented
        self.aliases.write(name_of(func), [target])
        if not sampled and args and args[0] is target:
            output = self._rewrite_once(func, args, kwargs, family)
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
            self._become(target, each)
        return NotImplemented

    def _family_of(self, target: Tensor, value: Lifted | None) -> Family | None:
        """The tensors that share memory with a value computed once, or with a new constant; None if there may be others."""
        if value is None:
            owner = target if self.own.is_new(target) else target._base if self.own.view_of(target) else None
            if owner is None or not self.own.is_new(owner) or target.requires_grad or owner.requires_grad or self.aliases.shows(owner):
                return None
            family = Family(owner, [] if owner is target else [target])
            return family if _functorch.holders(owner) == 1 + len(family.views) else None
        if value.made_by is None:
            return None
        output = value.made_by[0].output
        base = output if output._base is None else output._base
        # Three hold each value: the output of the op that made it, the same without a history, and one for all samples.
        count, left = divmod(_functorch.holders(base), 3)
        if left or count > _MOST_VIEWS:
            return None
        if output is base and count == 1:
            return None if id(target) in self._handed_on else Family(target, [])
        made = [(own.handle, own.made_by[0].output) for own in self.values if own.made_by is not None]
        owner = next((handle for handle, own in made if own is base), None)
        views = [handle for handle, own in made if handle is not None and own._base is base]
        if owner is None or id(owner) in self._handed_on or count != 1 + len(views):
            return None
        return Family(owner, views)

    def _rewrite_once(self, func: Any, args: Any, kwargs: Any, family: Family) -> Any:
        """Compute what all tensors of a family become; NotImplemented where that cannot be computed once."""
        target, (owner, views) = args[0], family
        assigned, places = assigned_by(func, args, kwargs), None
        masks = [] if assigned is None else filter(is_mask, tensors_of((assigned.index,), {}))
        if _functorch.is_traced() and not all(map(_functorch.is_known, masks)):
            return NotImplemented  # a graph has no room for entries whose number depends on the data
        if target is not owner or assigned is not None and any(assigned.value is view for view in views):
            places = self._places_of(target, family)
            if places is None:
                return NotImplemented
        if assigned is None:
            after = self._computed(out_of_place(func, args, kwargs), family)
        elif places is None:
            after = self._computed(index_put(owner, assigned.index, assigned.value), family)
        else:
            places, after = places[assigned.index], assigned.value
            if (own := self._places_of(after, family)) is not None and torch.equal(own, places):
                return None if func is Tensor.__setitem__ else target  # tensor[0] += 1 ends with such a write of a view into itself
        if places is not None:
            fits = after is not None and (assigned is not None or _form_of(after)[:2] == _form_of(target)[:2])
            after = self._computed(put_at(owner, places, after), family) if fits else None
        # An op may lay its result out otherwise, which views of the target, and its strides, would show.
        if after is None or _form_of(after) != _form_of(owner):
            return NotImplemented
        again = self._viewed_again(family, after)
        uses = len(views) if id(owner) not in self.by_handle else 0
        if again is None or not (_functorch.may_swap(owner, uses) and all(map(_functorch.may_swap, (after, *views, *again)))):
            return NotImplemented
        for own, other in zip((owner, *views), (after, *again), strict=True):
            self._become(own, other)
        return None if func is Tensor.__setitem__ else target

    def _computed(self, call: tuple[Any, Any, Any] | None, family: Family) -> Tensor | None:
        """The output of a call on members of a family, if it is computed once."""
        if call is None:
            return None
        op, *given = call
        # When the op is differentiated, fn's own constants are other tensors already.
        constants = {id(own): own.data for own in (family.owner, *family.views) if id(own) not in self.by_handle}
        args, kwargs = substitute(tuple(given), lambda leaf: constants.get(id(leaf), leaf))
        output = self._derive(op, self.lifted_among(tensors_of(args, kwargs)), args, kwargs, anew=True)
        return output if id(output) in self.by_handle else None

    def _places_of(self, member: Any, family: Family) -> Tensor | None:
        """Where the entries of a member stand in the owner, in one row; None for others, and where the views tell nothing of that."""
        owner = family.owner
        if not isinstance(member, Tensor) or not any(member is own for own in (owner, *family.views)) or member.dtype != owner.dtype:
            return None
        places = torch.arange(owner.numel(), device=owner.device).reshape(owner.shape)
        if member is owner:
            return places
        if (view := self.own.view_of(member)) is not None:
            return view(places)
        held = {id(self.by_handle[id(owner)].attached): places}
        for value in [self.by_handle[id(own)] for own in family.views]:  # in the order in which they were made
            assert value.made_by is not None
            step = value.made_by[0]
            args, kwargs = substitute((step.args, step.kwargs), lambda leaf: held.get(id(leaf), leaf))
            held[id(step.output)] = step.run(*args, **kwargs)
        return held[id(self.by_handle[id(member)].attached)]

    def _viewed_again(self, family: Family, after: Tensor) -> list[Tensor] | None:
        """The same views of what the owner becomes."""
        if id(family.owner) not in self.by_handle:
            with self:
                views = [view(after) for own in family.views if (view := self.own.view_of(own)) is not None]
            return views if all(id(own) in self.by_handle for own in views) else None
        made, views = {id(self.by_handle[id(family.owner)].attached): self.by_handle[id(after)]}, []
        for value in [self.by_handle[id(own)] for own in family.views]:
            assert value.made_by is not None
            step, parents = value.made_by
            with _functorch.below(self.level), torch.enable_grad():
                args, kwargs = substitute((step.args, step.kwargs), lambda leaf: made[id(leaf)].attached if id(leaf) in made else leaf)
                step, given = Step(step.run, args, kwargs, step.run(*args, **kwargs), step.name), id(step.output)
                lifted = Lifted.derivation(step, [made.get(id(own.attached), own) for own in parents], self.n)
                views.append(self.hold(lifted, _functorch.wrap(lifted.leaf, self.level)))
            lifted.shared = value.shared
            made[given] = lifted
            self.values.append(lifted)
            self.derived_at.add(_functorch.memory_of(lifted.leaf))
        return views

    def _become(self, target: Tensor, output: Tensor) -> None:
        """Make fn's own tensor what an op has computed from it."""
        old, new = self.by_handle.pop(id(target), None), self.by_handle.pop(id(output), None)
        _functorch.swap(target, output)
        for value, handle in ((old, output), (new, target)):
            if value is not None:
                self.hold(value, handle)
        if old is None:
            self.own.forget_new(target)
            self._replaced.append((ref(target), output))
        self.rewrites = True
        self._derivations.clear()  # whose keys are id()s of arguments

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


_MOST_VIEWS = 8


def _form_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()
