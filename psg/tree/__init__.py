"""Reductions of trees of per-sample gradients. Every function takes dense, factored and mixed trees alike.

A leaf is a tensor [n, *shape] or a `psg.factors.Factor` that stands for one. Nothing is materialised unless that is the cheapest way.
Complex entries count as pairs of real numbers. Reductions accumulate in float32 or better.

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

torch.serialization.add_safe_globals([Clipped, Moments])
