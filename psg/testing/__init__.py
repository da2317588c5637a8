"""The loop oracle, comparisons and strategies: what psg's own tests use, for your models too.

The oracle calls autograd once for each sample, on a contiguous copy of it: no vmap, no rule, no batch. It is slow, and as right as eager
PyTorch is; where that is known to be wrong (the backward pass of batch norm for some memory layouts, higher derivatives of layer, instance,
batch and weight norm), it computes the same by other ops. Importing this package needs only torch and optree; a strategy imports hypothesis
when it is called.

    grads = psg.testing.loop_grad(loss)(params, x, y)                               # the reference
    psg.testing.assert_trees_close(psg.per_sample_grad(loss)(params, x, y), grads)  # names the leaf that differs
    psg.check(loss)(params, x, y)                                                   # both lines, and the reductions
"""

from psg.testing._check import Checked, assert_reductions_close, check
from psg.testing._compare import Mismatch, assert_trees_close, default_rtol
from psg.testing._loop import loop_grad, loop_value_and_grad
from psg.testing._reference import (
    reference_clipped_sum,
    reference_dot,
    reference_flat,
    reference_gram,
    reference_norm,
    reference_weighted_sum,
)
from psg.testing._strategies import batches, layouts, shapes, tensors

__all__ = [
    "Checked",
    "Mismatch",
    "assert_reductions_close",
    "assert_trees_close",
    "batches",
    "check",
    "default_rtol",
    "layouts",
    "loop_grad",
    "loop_value_and_grad",
    "reference_clipped_sum",
    "reference_dot",
    "reference_flat",
    "reference_gram",
    "reference_norm",
    "reference_weighted_sum",
    "shapes",
    "tensors",
]
