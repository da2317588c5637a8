"""psg: per-sample gradients for PyTorch, the way JAX would do them."""

from psg import clipping, distributed, factors, plans, rules, testing, tree
from psg._errors import FallbackWarning, InputError, PsgError, StateError
from psg.explain import explain
from psg.jit import jit
from psg.memory import keep_pages
from psg.rules import primitive, rule
from psg.stateless import stateless
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
    "PsgError",
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
