"""Rules inside of transforms of the function's own, and of derivatives that it takes itself.

To a derivative that fn takes for its data (a force, a score, the residual of a differential equation) and to a vmap of its own, a parameter
is a constant; and an op that is linear in its data has derivatives that are such ops again: those of x W^T are dx W^T and C W. So each of
them, however deep, is in the end run by its rule, on the physical batch and the one true parameter, and tapped there.

On its way down a product is for each transform what an `autograd.Function` is whose derivatives are Functions again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from psg import _functorch
from psg._errors import PsgError
from psg._lifted import Lifted, Watch, with_history
from psg._ops import name_of
from psg.rules import _registry


@dataclass(frozen=True)
class Product:
    """An op that is linear in its data, up to constants, with its other arguments.

    Attributes:
        watch: The pass that it belongs to.
        op: The op; it has a rule, and a transpose.
        own: The arguments that are lifted values.
        others: The other arguments but the data.
        recorded: Whether fn differentiates by autograd itself, which then must find here what it can differentiate.
    """

    watch: Watch
    op: Any
    own: dict[str, Lifted]
    others: dict[str, Any]
    recorded: bool
    _transposes: "dict[torch.Size, Product | None]" = field(init=False, default_factory=dict)

    def __call__(self, data: Tensor) -> Tensor:
        """Its value, for data under whatever wrappers."""
        level, here, data = self.watch.level, _functorch.current_level(), _functorch.alive(data)
        if here < level:
            return self._tapped(data)
        if here == level:
            (output,) = _functorch.run_below(lambda physical: (self._tapped(physical),), [data], level, self.watch.n)
            return output
        if not _functorch.is_batched_within(data, level):
            # A tangent that all samples share, say: the product has a gradient of each sample's own nevertheless.
            with _functorch.below(level):
                zeros = torch.zeros(self.watch.n, dtype=data.dtype, device=data.device)
            data = data + _functorch.wrap(zeros, level)
        return _functorch.descend(data, self, self._batched, lambda forward: self._differentiated(data, data.shape, forward))

    def _batched(self, data: Tensor) -> Tensor:
        """Its value for data with one dimension more, in front."""
        item = self._transpose.item
        if item is None or data.ndim <= item + 1:
            return self(data)
        return self(data.flatten(0, 1)).unflatten(0, data.shape[:2])

    def _differentiated(self, data: Tensor, shape: torch.Size, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Its value, by `forward`, for data of which one sample has this shape, with a history."""
        return _Linear.apply_here(data, self, shape, forward, _functorch.records_below(self.watch.level))

    def linear(self) -> "Product":
        """The product without the constants."""
        without = self._transpose.constants
        own = {name: value for name, value in self.own.items() if name not in without}
        return replace(self, own=own, others={name: argument for name, argument in self.others.items() if name not in without})

    def transposed(self, shape: torch.Size) -> "Product | None":
        """What takes the cotangent of the output to that of data of this shape; None if the rule or its transpose does not fit."""
        if shape not in self._transposes:
            self._transposes[shape] = self._transposed(shape)
        return self._transposes[shape]

    def _transposed(self, shape: torch.Size) -> "Product | None":
        values = {name: value.value for name, value in self.own.items()}
        found = self._transpose.run(shape, **self.others, **values)
        if found is NotImplemented:
            return None
        op, arguments = found
        lifted = {id(value.value): value for value in self.own.values()}
        own = {name: lifted[id(argument)] for name, argument in arguments.items() if id(argument) in lifted}
        return replace(self, op=op, own=own, others={name: argument for name, argument in arguments.items() if name not in own})

    def _compute(self, data: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """What its rule makes of physical data: the output, and how to build the factors."""
        rule = _registry.find_rule(self.op)
        arguments = {**self.others, **{name: value.value for name, value in self.own.items()}, self._transpose.data: data}
        shared = arguments.keys() - {self._transpose.data}
        result = NotImplemented if rule is None else rule.call(arguments, shared & set(rule.params))
        if result is NotImplemented:
            raise PsgError(f"the rule of {name_of(self.op)} declines what its transpose takes")
        return result

    @property
    def _transpose(self) -> _registry.Transpose:
        found = _registry.find_transpose(self.op)
        assert found is not None
        return found

    def _tapped(self, data: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._compute(data)[0]
        (data,) = with_history((data,))
        builders: dict[str, Any] = {}

        def forward(data: Tensor) -> Tensor:
            output, found = self._compute(data)
            builders.update(found)
            return output

        output = self._differentiated(data, data.shape[1:], forward) if self.recorded else forward(data)
        targets = [(name, value, builders[name]) for name, value in self.own.items()]
        given = [argument for argument in self.others.values() if isinstance(argument, Tensor)]
        (output,) = self.watch.tap(name_of(self.op), (output,), True, targets, (data, *given))
        for value in self.own.values():
            value.uses.append(f"{name_of(self.op)}: rule")
        return output


class _Linear(_functorch.OneLevel):
    """A product's place in the graph of one who differentiates."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, product: Product, shape: torch.Size, forward: Callable[[Tensor], Tensor], records: bool) -> Tensor:
        ctx.product, ctx.shape, ctx.records = product, shape, records
        return forward(data)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.records and _functorch.records_below(ctx.product.watch.level):
            # Whether torch's own op then has a derivative for its weight depends on which form of it the op has saved.
            raise PsgError("a function of torch.func.vjp, made under torch.no_grad(), is called outside of it")
        return ctx.product.transposed(ctx.shape)(cotangent), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.product.linear()(tangent)
