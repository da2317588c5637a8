"""The common base of factors whose norms and sums can be computed in several ways, between which `psg.plans` chooses."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from psg import plans
from psg._hardware import _machine
from psg._torch import _functorch
from psg.factors._arithmetic import HALF
from psg.factors._base import Additive, Dense, Work

_OPS_PER_CARRY = 25
"""How many more ops it takes to carry a factor over a derivation and norm it, than to do the same with its materialised gradient."""


Costs = dict[str, float]
"""The answers to a question of `psg.plans`, with their costs in operations for one sample."""

_known: dict[Hashable, Costs] = {}


def remembered(compute: "Callable[[Any], Costs]") -> "Callable[[Any], Costs]":
    """Compute costs once for each layout of a factor: in every step of a training loop they are the same."""

    @functools.wraps(compute)
    def costs(factor: "Planned") -> Costs:
        if _functorch.is_traced():
            return compute(factor)  # sizes may be symbols, and the program is traced only once
        key = compute, factor._layout, factor._kernels(), _machine.settings(factor._lead.device)
        found = _known.get(key)
        return plans.remember(_known, key, compute(factor)) if found is None else found

    return costs


def norm_and_sum(factor: Any, plan: str) -> tuple[Any, ...]:
    """What a plan for a norm and a weighted sum computes."""
    weights = torch.ones(factor.n, device=factor.device)
    if plan == "keep":
        dense = Dense(factor.materialize())
        return dense, dense.norm(), dense.weighted_sum(weights)
    return factor._norm_by(plan), factor.weighted_sum(weights)


class Planned(Additive):
    """A factor with several plans for its norm, and for its norm and weighted sum together: the question "norm" of `psg.plans`.

    All its fields are tensors. Its costs depend on their shapes, dtype and device, on its constants, its kernels, and on
    `_machine.settings`.
    """

    @abstractmethod
    def _gram_sums(self) -> tuple[Tensor, Tensor]:
        """The squared norm by "gram", and `squared_terms`, both [n], for `recover`."""

    def _chunked_norm(self) -> Tensor:
        """The squared norm by "chunks"."""
        return self.materialized_norm()

    @abstractmethod
    def _norm_costs(self) -> Costs:
        """The costs of "gram" and "chunks", in operations for one sample."""

    @abstractmethod
    def _materialize_cost(self) -> float:
        """The cost of materialising, in operations for one sample."""

    @abstractmethod
    def _sum_cost(self) -> float:
        """The cost of a weighted sum that leaves samples out, in operations for one sample."""

    def _masking_cost(self) -> float:
        """The cost of zeroing samples in the factor's tensors, in operations for one sample."""
        return _machine.masked_byte(self.device, self.dtype) * (self.nbytes // max(1, self.n))

    def _kernels(self) -> Hashable:
        """Which kernels of its own take this factor now: they take no tensors of transforms."""
        return ()

    def _chunks_cost(self, byte: float) -> float:
        """The cost of a norm by "chunks": materialising, then reading from cache at `byte` operations a byte."""
        return self._materialize_cost() + byte * self.sample_bytes

    @functools.cached_property
    def _layout(self) -> Hashable:
        """Everything about this factor that its costs depend on."""
        lead = self._lead
        layout = [type(self), lead.dtype, lead.device]
        for name in self.fields:
            layout.append(getattr(self, name).shape)
        for name in self.constants:
            layout.append(getattr(self, name))
        return tuple(layout)

    def _norm_by(self, plan: str) -> Tensor:
        return self.recover(*self._gram_sums()) if plan == "gram" else self._chunked_norm()

    def _norm_plan(self) -> str:
        """The plan for the norm, when no weighted sum follows, or when `settle` has already decided against "keep"."""
        costs = self._norm_costs() | ({"chunks": 0.0} if self.prefers_exact_norm else {})
        return plans.choose("norm", costs, self, self._norm_by)

    @property
    def _is_planned(self) -> bool:
        """Whether the norm is computed by a plan: without samples or positions it is zero."""
        return self.n > 0 and self.positions > 0

    def squared_norm(self) -> Tensor:
        # Without terms their squares are zero, too, and have derivatives.
        return self._norm_by(self._norm_plan()) if self._is_planned else self.squared_terms()

    def unchecked_norm(self) -> tuple[Tensor, Tensor] | None:
        return self._gram_sums() if self._is_planned and self._norm_plan() == "gram" else None

    @remembered
    def _joint_costs(self) -> Costs:
        """The costs of a norm and a weighted sum together."""
        weighted, nbytes = self._sum_cost(), self.sample_bytes
        costs = {plan: cost + weighted for plan, cost in self._norm_costs().items()}
        byte = _machine.masked_byte(self.device, self.dtype) + _machine.kept_byte(self.device, self.dtype, self.n * nbytes)
        return costs | {"keep": self._materialize_cost() + byte * nbytes}

    def _plan(self, more: float = 0) -> str:
        """The plan for norm and sum together; `more` is added to the cost of every plan but "keep"."""
        costs = dict(self._joint_costs())
        if more:
            costs = {plan: cost if plan == "keep" else cost + more for plan, cost in costs.items()}
        if self.prefers_exact_norm:
            costs["keep"] = 0.0
        if not plans.may_keep(self.dense_bytes):
            del costs["keep"]
        return plans.choose("norm", costs, self, functools.partial(norm_and_sum, self))

    def _work(self) -> Work:
        costs = self._norm_costs()
        return Work(min(costs.values()), costs["gram"], self._materialize_cost(), self._sum_cost())

    @property
    def is_made_anew(self) -> bool:
        return True

    @property
    def prefers_dense_maps(self) -> bool:
        return self._plan(2 * self._materialize_cost() + _OPS_PER_CARRY * _machine.op_call(self.device) / max(1, self.n)) == "keep"

    @property
    def is_kept(self) -> bool:
        return self._plan() == "keep"

    @property
    def is_added_apart(self) -> bool:
        """Whether to add up gradients takes less time than to join these sides with others, over whose positions one product adds up.

        Where this gradient alone is kept, so is that of more positions. In half precision sums would be rounded term by term.
        """
        return self.nbytes > self.dense_bytes and self.dtype not in HALF and self.is_kept
