"""Sorts the tensors of a call for the rule that runs it (lifted values, data, frozen parameters, numbers), and runs the rule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psg._capture._adjoints import AS_SMALL
from psg._capture._agreed import python_value
from psg._capture._lifted import Lifted, Watch
from psg._errors import InputError, a_kind
from psg._torch import _functorch
from psg._torch._ops import Place, place_name, places_of, replace_at
from psg.rules._registry import Rule, outputs_and_builders


class Operands(NamedTuple):
    """The tensors among a call's arguments.

    Attributes:
        own: Lifted values in the places of parameters: the rule takes their one unexpanded value.
        data: The tensors that the rule takes with the samples in dim 0.
        shared: Frozen parameters, which the rule takes as they are.
        numbers: The values of tensors in the places of Python numbers.
        sampled: Whether some data differs from sample to sample.
        varied: Whether some data is not computed from parameters alone.
        batched: Whether some data is under vmap's wrapper.
    """

    own: dict[Place, Lifted]
    data: dict[Place, Tensor]
    shared: dict[Place, Tensor]
    numbers: dict[Place, Any]
    sampled: bool
    varied: bool
    batched: bool

    @classmethod
    def of(cls, watch: Watch, rule: Rule, arguments: dict[str, Any]) -> "Operands | None":
        """Sort a call's arguments for this rule; None if the rule does not take them."""
        own: dict[Place, Lifted] = {}
        data: dict[Place, Tensor] = {}
        shared: dict[Place, Tensor] = {}
        numbers: dict[Place, Any] = {}
        sampled = varied = batched = False
        for place, argument in places_of(arguments):
            value = watch.by_handle.get(id(argument))
            if place[0] in rule.numbers:
                if value is not None or any(own.requires_grad for own in _functorch.layers(argument)):
                    return None  # its gradient would be lost; torch raises
                numbers[place] = python_value(watch, Tensor.item, (argument,), {})
                continue
            if place[0] in rule.params:
                if value is not None and value.value is not None:
                    own[place] = value
                    continue
                if value is None and not _functorch.is_wrapped(argument):
                    shared[place] = argument
                    continue
                if not rule.takes_shared:
                    return None  # every sample has a weight of its own
            data[place] = argument  # also a lifted value in the place of data: its leaf has the samples in dim 0
            varied |= value is None or value.shared
            if _functorch.is_batched(argument, watch.level):
                batched = True
                sampled |= value is None
            elif _functorch.is_wrapped(argument):
                return None
        return cls(own, data, shared, numbers, sampled, varied, batched)

    def are_worth(self, name: str, rule: Rule, derives: Callable[[], bool]) -> bool:
        """Whether the op's rule costs less than lifting; `derives` tells whether it could be computed once as a derived value instead."""
        if not (self.varied if self.own else self.batched and rule.takes_data_alone):
            return False
        if self.sampled or not derives():
            return True
        if name in AS_SMALL:
            return False
        # The samples share the data: deriving once saves time; the rule saves memory, if its factor is smaller than the gradient.
        held = 2 * sum(tensor.numel() for tensor in self.data.values())  # of data and of the cotangent, about
        return any(held < value.leaf[0].numel() for value in self.own.values())


def run_rule(
    watch: Watch,
    op: str,
    rule: Rule,
    arguments: dict[str, Any],
    own: dict[Place, Lifted],
    data: dict[Place, Tensor],
    shared: dict[Place, Tensor],
    n: int,
    guess: Any = None,
) -> Any:
    """Run a rule on the physical batch and tap its outputs.

    Args:
        watch: The pass.
        op: The name of the op, for messages.
        rule: The op's rule.
        arguments: The arguments of the call, by name.
        own: Lifted values among the arguments: the rule takes their one unexpanded value.
        data: Tensors with the samples, or rows, in dim 0, by the places in which the rule takes them.
        shared: Frozen parameters among the arguments.
        n: The number of samples, or of rows.
        guess: See `Tap`.

    Returns:
        What the op returns, a tensor or a tuple of them; NotImplemented if the rule declines.

    Raises:
        InputError: The rule gives no builder for one of the parameters, or is broken otherwise.
    """
    values: dict[Place, Any] = dict(data)
    for place, value in own.items():
        values[place] = value.value
    result = rule.call(replace_at(arguments, values), map(place_name, (*own, *shared)))
    if result is NotImplemented:
        return NotImplemented
    outputs, builders = outputs_and_builders(op, result, n)
    single = isinstance(result[0], Tensor)
    if own and torch.is_grad_enabled():
        targets = []
        for (name, index), value in own.items():
            place = place_name((name, index))
            try:
                build = builders[name] if index is None else builders[name][index]
            except (LookupError, TypeError):
                hint = "" if index is None else f"; expected {{{name!r}: [builder, ...]}}, one for each entry of the list"
                raise InputError(
                    f"the rule for {op} gives no builder for the parameter {place}, only for {list(builders)}{hint}."
                ) from None
            if not callable(build):
                raise InputError(
                    f"the rule for {op} gives {a_kind(build)} as the builder for {place}; expected a function from the output's "
                    "cotangent to a factor."
                )
            targets.append((place, value, build))
        outputs = watch.tap(op, outputs, single, targets, (*data.values(), *shared.values()), guess)
    for value in own.values():
        value.uses.append(f"{op}: rule")
    return outputs[0] if single else outputs
