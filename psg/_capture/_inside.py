"""Rules inside torch.func transforms that fn calls, and inside derivatives that fn takes itself.

When fn differentiates for its data (a force, a score, the residual of a differential equation), or calls vmap, a parameter is a constant
there. The derivatives of an op that is linear in its data are again such ops: those of x W^T are dx W^T and C W. So each of them, at any
depth of nesting, finally runs by its rule, on the physical batch and the one unexpanded parameter, and is tapped there.

To each transform on the way down, a `LinearOp` looks like an `autograd.Function` whose derivatives are such Functions again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from psg._capture._lifted import Lifted, Watch, with_history
from psg._errors import PsgError
from psg._torch import _functorch
from psg._torch._ops import name_of
from psg.rules import _registry


@dataclass(frozen=True)
class LinearOp:
    """An op that is linear in its data, up to constants such as a bias, with its other arguments.

    Attributes:
        watch: The pass that it belongs to.
        op: The op; it has a rule, and a transpose.
        own: The arguments that are lifted values.
        others: All other arguments except the data.
        recorded: Whether fn calls autograd itself, so that the output must be differentiable for the data.
    """

    watch: Watch
    op: Any
    own: dict[str, Lifted]
    others: dict[str, Any]
    recorded: bool
    _transposes: "dict[torch.Size, LinearOp | None]" = field(init=False, default_factory=dict)

    def __call__(self, data: Tensor) -> Tensor:
        """The op's output for data under any wrappers."""
        level, here, data = self.watch.level, _functorch.current_level(), _functorch.alive(data)
        if here < level:
            return self._tapped(data)
        if here == level:
            return _functorch.run_below(self._tapped, [data], level, self.watch.n)
        if level not in _functorch.vmap_levels(data):
            # For example a tangent that all samples share: the parameter's gradient differs between samples nevertheless.
            with _functorch.below(level):
                zeros = torch.zeros(self.watch.n, dtype=data.dtype, device=data.device)
            data = data + _functorch.wrap(zeros, level)
        return _functorch.descend(data, self, self._batched, lambda forward: self._differentiated(data, data.shape, forward))

    def _batched(self, data: Tensor) -> Tensor:
        """The op's output for data with one more dimension in front."""
        item = self._transpose.item
        if item is None or data.ndim <= item + 1:
            return self(data)
        return self(data.flatten(0, 1)).unflatten(0, data.shape[:2])

    def _differentiated(self, data: Tensor, shape: torch.Size, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """The op's output with a history, computed by `forward`; one sample of the data has this shape."""
        return _Node.apply_here(data, self, shape, forward, _functorch.records_below(self.watch.level))

    def without_constants(self) -> "LinearOp":
        """The same without what only adds a constant."""
        without = self._transpose.constants
        own = {name: value for name, value in self.own.items() if name not in without}
        return replace(self, own=own, others={name: argument for name, argument in self.others.items() if name not in without})

    def transposed(self, shape: torch.Size) -> "LinearOp | None":
        """What maps the output's cotangent to that of data of this shape; None if the op's transpose declines the call."""
        if shape not in self._transposes:
            self._transposes[shape] = self._transposed(shape)
        return self._transposes[shape]

    def _transposed(self, shape: torch.Size) -> "LinearOp | None":
        values = {name: value.value for name, value in self.own.items()}
        found = self._transpose.run(shape, **self.others, **values)
        if found is NotImplemented:
            return None
        op, arguments = found
        lifted = {id(value.value): value for value in self.own.values()}
        own = {name: lifted[id(argument)] for name, argument in arguments.items() if id(argument) in lifted}
        return replace(self, op=op, own=own, others={name: argument for name, argument in arguments.items() if name not in own})

    def _compute(self, data: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Run the op's rule on physical data; returns the output and the builders of the factors."""
        rule = _registry.find_rule(self.op)
        arguments = {**self.others, **{name: value.value for name, value in self.own.items()}, self._transpose.data: data}
        shared = arguments.keys() - {self._transpose.data}
        result = NotImplemented if rule is None else rule.call(arguments, shared & set(rule.params))
        if result is NotImplemented:
            raise PsgError(f"the rule of {name_of(self.op)} declines arguments that the op's transpose accepts")
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


class _Node(_functorch.OneLevel):
    """A `LinearOp` as a node of the graph that autograd or a transform differentiates."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, op: LinearOp, shape: torch.Size, forward: Callable[[Tensor], Tensor], records: bool) -> Tensor:
        ctx.op, ctx.shape, ctx.records = op, shape, records
        return forward(data)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.records and _functorch.records_below(ctx.op.watch.level):
            # Whether torch's own op has a derivative for its weight in this case depends on which form of the weight it has saved.
            raise PsgError("a function that torch.func.vjp returned under torch.no_grad() is called outside of torch.no_grad()")
        return ctx.op.transposed(ctx.shape)(cotangent), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.op.without_constants()(tangent)
