"""Rules: fast paths for known ops. One file an op family: formula and source, then the rule.

A rule of your own in five steps (CONTRIBUTING.md has them at length, with an example):

1. Write down what the op computes, and each parameter's per-sample gradient from the op's input and its output's cotangent.
2. Choose the factor of each gradient: `Outer` for a sum of outer products over positions, `Rows` for rows chosen by an index, `Conv` for a
   convolution's weight, `Dense` for whatever is small. `help(psg.factors)` has all kinds.
3. Decorate a function with `psg.rule(op, params=...)`: it runs the ordinary op on the batch, samples in dim 0, and returns the output and,
   for each parameter, a function from cotangent to factor. Your own function becomes an op by `psg.primitive`.
4. Return NotImplemented for options, shapes and dtypes that the formula does not cover: the call then takes the lifted path.
5. Compare with a loop over samples: `psg.check(fn)(...)`.

`registered()` lists all rules; within `disabled()` none is used.
"""

from psg.rules import (  # noqa: F401
    activation,
    attention,
    conv,
    embedding,
    indexing,
    leaks,
    linear,
    loss,
    missing,
    normalization,
    products,
    recurrent,
    repairs,
    systems,
)
from psg.rules._registry import disabled, primitive, registered, rule

__all__ = ["disabled", "primitive", "registered", "rule"]
