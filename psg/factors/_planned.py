"""What factors have in common whose norms and sums can be computed in several ways; `psg.plans` chooses."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from psg import _machine, plans
from psg.factors._base import Additive
from psg.factors._dense import Dense

_CARRIED = 25
"""Ops that it takes a factor, beyond what it takes its gradient, to be carried over a derivation, and normed then."""


class Planned(Additive):
    """A factor of which a norm, and a norm and a weighted sum together, have several plans. See `psg.plans`, the question "norm"."""

    @abstractmethod
    def _norm_by(self, plan: str) -> Tensor:
        """The squared norm by "gram" or "chunks"."""

    @abstractmethod
    def _norm_costs(self) -> dict[str, float]:
        """What "gram" and "chunks" cost, in operations for one sample."""

    @abstractmethod
    def _materialize_cost(self) -> float:
        """What materialising costs, in operations for one sample."""

    @abstractmethod
    def _sum_cost(self) -> float:
        """What a weighted sum costs, in operations for one sample."""

    def _chunks_cost(self, byte: float) -> float:
        """What a norm by "chunks" costs: materialising, and reading it from cache, where a byte costs so much."""
        return self._materialize_cost() + byte * self._bytes()

    def _bytes(self) -> int:
        """What one sample's gradient takes."""
        return self.shape.numel() * self.dtype.itemsize

    def _planned_norm(self) -> Tensor:
        """The squared norm, when no sum follows or what it takes is decided."""
        return self._norm_by(plans.choose("norm", self._norm_costs(), self, self._norm_by))

    def _plan(self, more: float = 0) -> str:
        """How norm and sum are computed together, where a gradient that is not kept costs some operations more."""
        byte = _machine.taken_out(self.device, self.dtype)
        more += self._sum_cost() + byte * (self.nbytes // max(1, self.n))
        costs = {plan: cost + more for plan, cost in self._norm_costs().items()}
        held = self._bytes()
        if plans.may_keep(self.n * held):
            costs["keep"] = self._materialize_cost() + (_machine.kept(self.device, self.dtype) + byte) * held
        return plans.choose("norm", costs, self, self._norm_and_sum_by)

    def _norm_and_sum_by(self, plan: str) -> tuple[Any, ...]:
        weights = torch.ones(self.n, device=self.device)
        if plan == "keep":
            dense = Dense(self.materialize())
            return dense, dense.norm(), dense.weighted_sum(weights)
        return self._norm_by(plan), self.weighted_sum(weights)

    @property
    def is_made_anew(self) -> bool:
        return True

    @property
    def is_best_formed(self) -> bool:
        return self._plan(2 * self._materialize_cost() + _CARRIED * _machine.dispatched(self.device) / max(1, self.n)) == "keep"

    @property
    def is_kept(self) -> bool:
        return self._plan() == "keep"
