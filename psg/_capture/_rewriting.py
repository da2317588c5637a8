"""Writes into what is computed once for all samples, and into new constants, as ops that compute what these become.

Such an op is computed once, in place of the write; then fn's own tensors become its results. So what has read them before still has what it
read. All tensors that share their memory have to be known: those that were noted, and values computed once.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psg._capture._derived import derives
from psg._capture._lifted import Lifted, Watch
from psg._capture._steps import Step
from psg._torch import _functorch
from psg._torch._ops import NEW, assigned_by, index_put, is_mask, out_of_place, put_at, substitute, tensors_of
from psg._watch._marks import Marks
from psg._watch._writes import Aliases


class Family(NamedTuple):
    """Tensors of fn's in one memory that holds no others: one that is no view, and views of it."""

    owner: Tensor
    views: list[Tensor]


class Rewriting(Watch):
    """A watch of a pass that can write into what is computed once, and into new constants.

    Attributes:
        own: The marks of the tensors that the pass has made.
        aliases: Tensors that may share memory with others, or that fn has the memory of in another way.
        held: How many tensors hold the memory of a value computed once, if fn has no view of it.
    """

    own: Marks
    held = 3  # the output of the op that made it, the same without a history, and one for all samples

    def __init__(self, n: int, params: Sequence[Lifted], inputs: Sequence[Tensor], aliases: Aliases) -> None:
        super().__init__(n, params, inputs)
        self.aliases = aliases
        self._handed_on: set[int] = set()  # the id()s of values that fn got from several calls

    def derive_anew(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an op on parameters and constants once, and lift its output; NotImplemented if it may not be."""
        raise NotImplementedError

    def below(self) -> AbstractContextManager[Any]:
        """A context in which ops are computed once."""
        raise NotImplementedError

    def note_constant(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], output: Any) -> None:
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
        if not _functorch.shares_memory(output, tensors):
            self.own.note_new(output)
        elif args and output._base is not None and output._base is args[0] and self.own.is_new(args[0]):
            self.own.note_view(output, lambda owner: func(owner, *args[1:], **kwargs))

    def family_of(self, target: Tensor, value: Lifted | None) -> Family | None:
        """The tensors that share memory with a value computed once, or with a new constant; None if there may be others."""
        if self.aliases.shows(target):
            return None
        if value is None:
            owner = target if self.own.is_new(target) else target._base if self.own.view_of(target) else None
            if owner is None or not self.own.is_new(owner) or target.requires_grad or owner.requires_grad:
                return None
            family = Family(owner, [] if owner is target else [target])
            return family if _functorch.holders(owner) == 1 + len(family.views) else None
        if value.made_by is None:
            return None
        output = value.made_by[0].output
        base = output if output._base is None else output._base
        holders = _functorch.holders(base)
        if output is base and holders == self.held:
            return None if id(target) in self._handed_on else Family(target, [])
        made = [(own.handle, own.made_by[0]) for own in self.values if own.made_by is not None]
        made = [(handle, step) for handle, step in made if step.output is base or step.output._base is base]
        # An op may return a view of what nobody else holds. Then what fn has of that has to be made from the first tensor that it got.
        hidden = made[0][1].output is not base
        if len(made) > _MOST_VIEWS or holders != len(made) * self.held + hidden:
            return None
        known: set[int] = set()
        for _, step in made:
            if known and known.isdisjoint(map(id, step.tensors)):
                return None
            known.add(id(step.output))
        owner, *views = [handle for handle, _ in made if handle is not None]
        return Family(owner, views) if len(views) + 1 == len(made) and id(owner) not in self._handed_on else None

    def rewrite_once(self, func: Any, args: Any, kwargs: Any, family: Family) -> Any:
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
            self.become(own, other)
        return None if func is Tensor.__setitem__ else target

    def _computed(self, call: tuple[Any, Any, Any] | None, family: Family) -> Tensor | None:
        """The output of a call on members of a family, if it is computed once."""
        if call is None:
            return None
        op, *given = call
        # When the op is differentiated, fn's own constants are other tensors already.
        constants = {id(own): own.data for own in (family.owner, *family.views) if id(own) not in self.by_handle}
        args, kwargs = substitute(tuple(given), lambda leaf: constants.get(id(leaf), leaf))
        output = self.derive_anew(op, args, kwargs)
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
            with self.below(), torch.enable_grad():
                args, kwargs = substitute((step.args, step.kwargs), lambda leaf: made[id(leaf)].attached if id(leaf) in made else leaf)
                step, given = Step(step.run, args, kwargs, step.run(*args, **kwargs), step.name), id(step.output)
                lifted = Lifted.derivation(step, [made.get(id(own.attached), own) for own in parents], self.n)
                views.append(self.hold(lifted, self.wrapped(lifted)))
            lifted.shared = value.shared
            made[given] = lifted
            self.values.append(lifted)
            self.derived_at.add(_functorch.memory_of(lifted.leaf))
        return views

    def become(self, target: Tensor, output: Tensor) -> None:
        """Make fn's own tensor what an op has computed from it."""
        old, new = self.by_handle.pop(id(target), None), self.by_handle.pop(id(output), None)
        _functorch.swap(target, output)
        for value, handle in ((old, output), (new, target)):
            if value is not None:
                self.hold(value, handle)
        if old is None:
            self.own.forget_new(target)


_MOST_VIEWS = 8


def _form_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()
