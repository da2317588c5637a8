"""How tests trace."""

from contextlib import AbstractContextManager

from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode


def one_mode() -> AbstractContextManager:
    """One FakeTensorMode for all ops of a trace: torch would make one for every op, and read the whole stack for each."""
    return tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))
