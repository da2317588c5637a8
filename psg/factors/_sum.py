"""Sum: several terms for one parameter (tied or used several times), or none (unused)."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
from torch import Tensor

from psg import plans
from psg._hardware import _machine, _memory
from psg.factors._arithmetic import HALF, wide
from psg.factors._base import Additive, Dense, Factor, Work
from psg.factors._planned import Costs, norm_and_sum
from psg.factors._scaled import Expanded, Scaled, are_few, products_in
from psg.factors._sketch import Sketch
from psg.factors._views import Views

_OPS_PER_TERM = 40
"""How many ops one term more takes: its inner products with the others, and their `squared_terms`."""


class Sum(Additive):
    """gradient = the sum of the terms' gradients; without terms, zeros that take no memory.

    Args:
        terms: Factors of the same samples and shape.
        like: An empty tensor [n, 0] whose dtype and device are those of the gradient.
        shape: The parameter's shape.

    Example:
        >>> import torch
        >>> one = Dense(torch.tensor([[3.0, 4.0]]))
        >>> twice = Sum([one, one], torch.empty(1, 0), torch.Size([2]))
        >>> twice.norm(), Sum([], torch.empty(1, 0), torch.Size([2])).materialize()
        (tensor([10.]), tensor([[0., 0.]]))
    """

    fields = ("terms", "like")
    constants = ("_shape",)

    def __init__(self, terms: Sequence[Factor], like: Tensor, shape: torch.Size) -> None:
        self.terms = tuple(terms)
        self.like = like
        self._shape = torch.Size(shape)

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def _lead(self) -> Tensor:
        return self.like

    def materialize(self) -> Tensor:
        if not self.terms:
            return _memory.new_zeros(self.like, self.n, *self.shape)
        if self.dtype in HALF:  # terms may cancel, so they must not be rounded one by one
            return self.to(wide(self.dtype)).materialize().to(self.dtype)
        first, *rest = sorted(self.terms, key=lambda term: (_is_spread(term), not term.is_made_anew))
        total, is_anew = first.materialize(), first.is_made_anew
        for term in rest:
            if is_anew and not self.is_differentiated:
                term.add_to(total)  # in place, since nobody else holds this memory
            else:
                total, is_anew = total + term.materialize(), True
        return total

    def squared_norm(self) -> Tensor:
        return self._norm_by(self._plan())

    def _norm_by(self, plan: str) -> Tensor:
        if plan == "chunks":
            return self.to(wide(self.dtype)).materialized_norm()
        # |sum_i x_i|^2 = sum_i |x_i|^2 + 2 sum_{i<j} <x_i, x_j>
        total = squared_terms = self._zeros(self.n)
        for i, term in enumerate(self.terms):
            squared, own_terms = term.squared_norm_and_terms()
            total = total + squared
            # Terms may cancel each other, and so may the positions within a term.
            squared_terms = squared_terms + squared + own_terms
            for earlier in self.terms[:i]:
                total = total + 2 * earlier.inner(term)
        return self.recover(total, squared_terms) if len(self.terms) > 1 else total

    @property
    def positions(self) -> int:
        return sum(term.positions for term in self.terms)

    def squared_terms(self) -> Tensor:
        return self._reduce(lambda term: term.squared_terms(), self._zeros(self.n))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._reduce(lambda term: term.weighted_sum(weights), self._zero_sum())

    def weighted_sum_of(self, weights: Tensor, keep: Tensor, finite: Tensor) -> Tensor:
        return self._reduce(lambda term: term.weighted_sum_of(weights, keep, finite), self._zero_sum())

    def project(self, sketch: Sketch) -> Tensor:
        return self._reduce(lambda term: term.project(sketch), self._zeros(self.n, sketch.dim))

    def dot(self, direction: Tensor) -> Tensor:
        return self._reduce(lambda term: term.dot(direction), self._zeros(self.n))

    @property
    def is_mixed(self) -> bool:
        """Whether the inner product of some two terms takes their materialised gradients."""
        materialized = [term for term in self.terms if not _is_spread(term)]
        if len(materialized) < 2 or not any(isinstance(term, Scaled) for term in materialized):
            return False
        views = [term for term in materialized if isinstance(term, Views)]
        if len(views) > 1 or not all(map(multiplies_parts, views)):
            return True
        others = [products_in(term) for term in materialized if not isinstance(term, Views)]
        parts = [products_in(own) for view in views for own in view.factors]
        products = [own[0] for own in (*others, *parts) if own is not None]
        return None in others or not all(itertools.starmap(are_few, itertools.combinations(products, 2)))

    @property
    def is_kept(self) -> bool:
        # Once one term is materialised, adding the others to it costs less than inner products with it.
        mixed = self.is_mixed and plans.may_keep(self.dense_bytes)
        return mixed or any(term.is_kept for term in self.terms) or self._plan_with_sum() == "keep"

    def plan(self) -> str:
        if not self.terms:
            return "zero: not used"
        kinds = " + ".join(type(term).__name__ for term in self.terms)
        if self.is_kept:
            return f"{kinds}, added up and kept"
        return f"{kinds}, {'added up in chunks' if self._plan() == 'chunks' else 'with their inner products'}"

    def _plan(self) -> str:
        """Whether the norm comes from the terms' inner products ("gram"), or from their gradients, added up ("chunks")."""
        if self.is_mixed or any(isinstance(term, Dense) for term in self.terms):
            return "chunks"
        if len(self.terms) < 2:
            return "gram"
        costs = {"gram": math.inf, "chunks": 0.0} if self.prefers_exact_norm else self._norm_costs()
        return plans.choose("norm", costs, self, self._norm_by)

    def _plan_with_sum(self) -> str:
        """The plan for norm and weighted sum together: also "keep", since the sum would form all terms once more."""
        works = [work for term in self.terms if (work := term._work()) is not None]
        if len(self.terms) < 2 or len(works) < len(self.terms) or not plans.may_keep(self.dense_bytes):
            return self._plan()
        summed = sum(work.sum for work in works)
        kept = len(works) * _machine.kept_byte(self.device, self.dtype, self.dense_bytes) + _machine.masked_byte(self.device, self.dtype)
        costs = {plan: cost + summed for plan, cost in self._norm_costs().items()}
        costs["keep"] = 0.0 if self.prefers_exact_norm else sum(work.materialize for work in works) + kept * self.sample_bytes
        return plans.choose("norm", costs, self, partial(norm_and_sum, self))

    def _norm_costs(self) -> Costs:
        """The costs of both, in operations for one sample."""
        spread = [term for term in self.terms if _is_spread(term)]
        others = [term._work() for term in self.terms if not _is_spread(term)]
        works = [work for work in others if work is not None]
        if not works or len(works) < len(others):
            return {"gram": 0.0, "chunks": math.inf}
        written = _machine.reused_byte(self.device, self.dtype) * self.sample_bytes
        # An inner product with an Expanded term takes every entry at every position, as materialising does.
        apart = sum(work.norm + len(spread) * work.materialize for work in works)
        for one, other in itertools.combinations(works, 2):
            # Every position of one term with every position of the other: the geometric mean of each term's own Gram cost.
            apart += min((one.gram * other.gram) ** 0.5, one.materialize + other.materialize + 2 * written)
        apart += _OPS_PER_TERM * (len(self.terms) - 1) * _machine.op_call(self.device) / max(1, self.n)
        return {"gram": apart, "chunks": sum(work.materialize for work in works) + len(self.terms) * written}

    def _work(self) -> Work | None:
        works = [work for term in self.terms if (work := term._work()) is not None]
        if len(works) < len(self.terms):
            return None
        written = _machine.reused_byte(self.device, self.dtype) * self.sample_bytes
        materialize = sum(work.materialize for work in works) + len(works) * written
        norm = sum(work.norm for work in works) if len(works) < 2 else self._norm_costs()[self._plan()]
        return Work(norm, math.inf, materialize, sum(work.sum for work in works))

    def _zeros(self, *shape: int) -> Tensor:
        return self.like.new_zeros(shape, dtype=wide(self.dtype).to_real())

    def _zero_sum(self) -> Tensor:
        return self.like.new_zeros(self.shape, dtype=wide(self.dtype))

    def _reduce(self, function: Callable[[Factor], Tensor], zero: Tensor) -> Tensor:
        return reduce(torch.add, (function(term) for term in self.terms), zero)


def multiplies_parts(views: Views) -> bool:
    """Whether inner products of these views with products materialise at most a few entries."""
    return views.is_small_part or all(products_in(own) is not None for own in views.factors)


def _is_spread(term: Factor) -> bool:
    """Whether the term is a few numbers a sample, expanded: its inner product with another term materialises nothing."""
    return isinstance(term.factor if isinstance(term, Scaled) else term, Expanded)
