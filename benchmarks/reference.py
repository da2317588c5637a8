"""The reference: a loop of autograd over contiguous single samples, and the error of a method's result against it.

Errors are relative and taken leaf by leaf (and sample by sample for per-sample gradients). They are divided by the leaf's
norm, or by a thousandth of the whole gradient's norm if that is larger: where a leaf's exact gradient is zero, there is
nothing but rounding error.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from methods import clip_coefficients, global_norm, sample_gradient, samples, trainable
from torch import Tensor
from workloads import Workload

# A result with a larger relative error is wrong. In float64 this allows the constant 1e-6 that some libraries add to a
# norm, and little else. Narrower types only catch gross faults: where rounding turns the sign of a ReLU's input, a whole
# column of a gradient changes.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-2, torch.bfloat16: 0.5, torch.float16: 0.5}


class Reference:
    """The loop's results for one workload; per-sample gradients are never all held at once."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.params = trainable(workload.model)

    @property
    def result_bytes(self) -> int:
        """The size of all per-sample gradients."""
        return self.workload.num_samples * sum(p.numel() * p.element_size() for p in self.params.values())

    def gradients(self):
        """One dict of gradients a sample, in order."""
        for sample in samples(self.workload):
            yield dict(zip(self.params, sample_gradient(self.workload, self.params, sample), strict=True))

    @cached_property
    def norms(self) -> Tensor:
        return torch.stack([global_norm(grads.values()) for grads in self.gradients()])

    @cached_property
    def clip_norm(self) -> float:
        """The median norm, so that half of the samples are clipped."""
        return self.norms.median().item()

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        total = {name: torch.zeros_like(param) for name, param in self.params.items()}
        for weight, grads in zip(weights, self.gradients(), strict=True):
            for name, g in grads.items():
                total[name].addcmul_(g, weight)
        return total

    @cached_property
    def clipped(self) -> dict[str, Tensor]:
        return self.weighted_sum(clip_coefficients(self.norms, self.clip_norm))

    @cached_property
    def mean(self) -> dict[str, Tensor]:
        return self.weighted_sum(torch.full_like(self.norms, 1 / self.workload.num_samples))

    def error(self, kind: str, result: Any) -> float:
        """The largest relative error of a result of this kind; infinite where names or shapes disagree."""
        if kind == "norm":
            return _scalar((result - self.norms).abs() / self.norms) if result.shape == self.norms.shape else float("inf")
        if result.keys() != self.params.keys():
            return float("inf")
        if kind in ("plain", "clip"):
            return _tree_error(result, self.mean if kind == "plain" else self.clipped)
        n = self.workload.num_samples
        if any(g.shape != (n, *self.params[name].shape) for name, g in result.items()):
            return float("inf")
        rows = ({name: g[i] for name, g in result.items()} for i in range(n))
        return max(_tree_error(row, grads) for row, grads in zip(rows, self.gradients(), strict=True))


def _scalar(errors: Tensor) -> float:
    """The largest entry, with nan counted as infinite."""
    return errors.double().nan_to_num(nan=float("inf")).max().item()


def _tree_error(result: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    if any(result[name].shape != leaf.shape for name, leaf in expected.items()):
        return float("inf")
    floor = 1e-3 * global_norm(expected.values())
    errors = [(result[name] - leaf).norm() / torch.maximum(leaf.norm(), floor) for name, leaf in expected.items()]
    return _scalar(torch.stack(errors))
