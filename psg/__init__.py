"""psg: per-sample gradients for PyTorch, the way JAX would do them.

The transforms turn a function of one sample, `fn(params, *sample) -> scalar`, into functions of a batch (`help(psg.transforms)`):

    per_sample_grad, per_sample_value_and_grad   every sample's gradient, a tree of tensors [n, *shape]; the same with the losses
    per_sample_norm                              the norms [n]
    clipped_grad                                 the sum of clipped gradients, a `ClippedGrad`
    factored_grad                                the gradients as factors, for `psg.tree`

    stateless                                    makes such a function, and its params, from an nn.Module
    jit                                          compiles a function that a transform has made
    explain, check                               reports each parameter's path, and why; compares psg with a loop
    rule, primitive                              adds a fast path for an op; makes your function one op
    keep_pages                                   makes the process reuse the memory that it frees

Modules: `tree` (norms, Gram matrices, weighted sums, projections, moments, noise), `clipping` (clip norms of leaves and groups, policies),
`distributed` (several processes), `plans` (how norms and sums are computed), `rules`, `factors`, `testing`.
"""

from psg._torch._replaced import torchs_own

with torchs_own():  # the tables of these modules are keyed by torch's functions
    from psg import clipping, distributed, factors, plans, rules, testing, tree
    from psg._compile._jit import Jitted, jit
    from psg._errors import FallbackWarning, InputError, PsgError, StateError
    from psg._explain import Report, explain
    from psg._hardware._memory import keep_pages
    from psg._stateless import stateless
    from psg.rules import primitive, rule
    from psg.testing import check
    from psg.transforms import (
        ClippedGrad,
        clipped_grad,
        factored_grad,
        per_sample_grad,
        per_sample_norm,
        per_sample_value_and_grad,
    )

__version__ = "0.1.0"

__all__ = [
    "ClippedGrad",
    "FallbackWarning",
    "InputError",
    "Jitted",
    "PsgError",
    "Report",
    "StateError",
    "__version__",
    "check",
    "clipped_grad",
    "clipping",
    "distributed",
    "explain",
    "factored_grad",
    "factors",
    "jit",
    "keep_pages",
    "per_sample_grad",
    "per_sample_norm",
    "per_sample_value_and_grad",
    "plans",
    "primitive",
    "rule",
    "rules",
    "stateless",
    "testing",
    "tree",
]
