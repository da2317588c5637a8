"""Reductions of trees of per-sample gradients. Every function takes dense, factored and mixed trees alike.

A leaf is a tensor [n, *shape] or a `psg.factors.Factor` that stands for one. Nothing is materialised unless that is the cheapest way.
Complex entries count as pairs of real numbers. Reductions accumulate in float32 or better.

Range of numbers. Inner products of entries below 1e-19 underflow in float32, and those of entries above 1e19 overflow. Where they underflow
on one side of a gradient while the other side is large (inputs of 1e8, cotangents of 1e-24), norms read too small under `psg.jit` and on
accelerators; where they overflow on one side, norms may be infinite or NaN there, whatever the other side. Eager calls on CPUs compute such
norms from the gradients, as `psg.plans.using(norm="chunks")` does everywhere, but not inner products between several uses of one parameter
or between samples (`gram`, `cosine`), nor the squares of `moments`. Weights above 1, and such clip coefficients ("normalize"), that bring
one side of a gradient beyond the range (inputs of 1e38) give sums that are not finite under `psg.jit` and on accelerators alone. Gradients
of 1e-20 and less have subnormal products, which take CPUs a hundred times as long; Gram matrices form such products where training does
not, and `torch.set_flush_denormal(True)` helps. Where a weight selects entries of a parameter and a sample's cotangents of the other
entries are not finite, that sample's gradient may be NaN under `psg.jit` or on an accelerator though it is finite in eager calls on a CPU.
float16 holds numbers from 6e-8 to 65504: smaller or larger gradients are rounded to that range. Clipped sums are float32.

Functions that take per-sample gradients raise InputError if the tree has no leaves, if a leaf is anything else, or if leaves disagree on n.
"""

import torch

from psg.tree._clipped import Clipped, add_noise, clip
from psg.tree._numbers import cosine, dot, gram, inner, norm, project, squared_norm
from psg.tree._samples import concat, flatten, materialize, precondition, segment_sum, take, unflatten
from psg.tree._sums import Moments, mean, moments, sparse_weighted_sum, sum, weighted_sum

__all__ = [
    "Clipped",
    "Moments",
    "add_noise",
    "clip",
    "concat",
    "cosine",
    "dot",
    "flatten",
    "gram",
    "inner",
    "materialize",
    "mean",
    "moments",
    "norm",
    "precondition",
    "project",
    "segment_sum",
    "sparse_weighted_sum",
    "squared_norm",
    "sum",
    "take",
    "unflatten",
    "weighted_sum",
]

for _result in (Clipped, Moments):
    _result.__module__ = __name__  # saved files hold this name
torch.serialization.add_safe_globals([Clipped, Moments])
