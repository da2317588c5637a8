"""The methods: every way of computing per-sample gradients, under one signature.

A method is registered by name with the `kind` of its result:

    plain   gradient of the mean loss               {name: [*shape]}      one ordinary training step's gradient
    grad    per-sample gradients                    {name: [n, *shape]}
    norm    norms of the per-sample gradients       [n]
    clip    sum of min(1, clip_norm / norm) * gradient over the samples   {name: [*shape]}

The registered function takes a workload, which it may change and keep, and a clip norm. It returns a call without
arguments that does the whole work once, from the batch to the result, and returns the result. Work that a user does once
per training run (wrapping the model, building the transformed function) stays outside that call. `needs` names the
package that the method requires, if any. Methods of other libraries are in `peers`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from workloads import Workload

Call = Callable[[], Any]


@dataclass(frozen=True)
class Method:
    """One way to compute one kind of result."""

    name: str
    kind: str
    prepare: Callable[[Workload, float], Call]
    needs: str | None = None

    @property
    def installed(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


METHODS: dict[str, Method] = {}


def method(name: str, kind: str, needs: str | None = None):
    """Registers the decorated `(workload, clip_norm) -> call` under a name."""

    def register(prepare: Callable[[Workload, float], Call]) -> Callable[[Workload, float], Call]:
        METHODS[name] = Method(name, kind, prepare, needs)
        return prepare

    return register


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that get gradients; a tied one appears once."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def clip_coefficients(norms: Tensor, clip_norm: float) -> Tensor:
    """min(1, clip_norm / norm)."""
    return (clip_norm / norms).clamp(max=1.0)


def samples(workload: Workload):
    """The batch one sample at a time, as batches of one."""
    for i in range(workload.num_samples):
        yield tuple(x[i : i + 1].contiguous() for x in workload.batch)


def sample_gradient(workload: Workload, params: dict[str, torch.nn.Parameter], sample: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradient of one sample's loss by autograd."""
    *inputs, target = sample
    return torch.autograd.grad(workload.criterion(workload.model(*inputs), target), list(params.values()))


def global_norm(grads) -> Tensor:
    """The norm over all leaves of one sample's gradient."""
    return torch.stack([g.norm() for g in grads]).norm()


def _plain(workload: Workload, wrap=lambda fn: fn) -> Call:
    params = trainable(workload.model)
    forward = wrap(lambda *batch: workload.criterion(workload.model(*batch[:-1]), batch[-1]))

    def call():
        workload.model.zero_grad(set_to_none=True)
        forward(*workload.batch).backward()
        return {name: param.grad for name, param in params.items()}

    return call


@method("loop", "grad")
def _loop(workload: Workload, clip_norm: float) -> Call:
    params = trainable(workload.model)

    def call():
        result = {name: p.new_empty(workload.num_samples, *p.shape) for name, p in params.items()}
        for i, sample in enumerate(samples(workload)):
            for out, g in zip(result.values(), sample_gradient(workload, params, sample), strict=True):
                out[i] = g
        return result

    return call


@method("loop_norm", "norm")
def _loop_norm(workload: Workload, clip_norm: float) -> Call:
    params = trainable(workload.model)
    return lambda: torch.stack([global_norm(sample_gradient(workload, params, s)) for s in samples(workload)])


@method("loop_clip", "clip")
def _loop_clip(workload: Workload, clip_norm: float) -> Call:
    params = trainable(workload.model)

    def call():
        result = {name: torch.zeros_like(p) for name, p in params.items()}
        for sample in samples(workload):
            grads = sample_gradient(workload, params, sample)
            coefficient = clip_coefficients(global_norm(grads), clip_norm)
            for total, g in zip(result.values(), grads, strict=True):
                total.addcmul_(g, coefficient)
        return result

    return call


def functional(workload: Workload):
    """(loss of one sample, detached parameters), as the torch.func tutorial writes it."""
    model, criterion, _ = workload
    params = {name: param.detach() for name, param in trainable(model).items()}

    def loss(params, *sample):
        *inputs, target = (x.unsqueeze(0) for x in sample)
        return criterion(functional_call(model, params, tuple(inputs)), target)

    return loss, params


def _over_samples(workload: Workload, fn):
    return vmap(fn, in_dims=(None,) + (0,) * len(workload.batch), randomness="different")


def _vmap_grad(workload: Workload, wrap=lambda fn: fn) -> Call:
    loss, params = functional(workload)
    fn = wrap(_over_samples(workload, grad(loss)))
    return lambda: fn(params, *workload.batch)


def _vmap_norm(workload: Workload, wrap=lambda fn: fn) -> Call:
    loss, params = functional(workload)
    fn = wrap(_over_samples(workload, lambda *args: global_norm(grad(loss)(*args).values())))
    return lambda: fn(params, *workload.batch)


def _vmap_clip(workload: Workload, clip_norm: float, wrap=lambda fn: fn) -> Call:
    """Clips inside the mapped function, then sums over the samples, as JAX libraries do."""
    loss, params = functional(workload)

    def clipped(params, *sample):
        grads = grad(loss)(params, *sample)
        coefficient = clip_coefficients(global_norm(grads.values()), clip_norm)
        return {name: g * coefficient for name, g in grads.items()}

    def summed(params, *batch):
        return {name: g.sum(0) for name, g in _over_samples(workload, clipped)(params, *batch).items()}

    fn = wrap(summed)
    return lambda: fn(params, *workload.batch)


def _compile(fn):
    """Compile with static shapes: otherwise another batch size, as in a check, makes later graphs dynamic, for which inductor is slower."""
    return torch.compile(fn, dynamic=False)


METHODS |= {
    m.name: m
    for m in (
        Method("plain", "plain", lambda workload, clip_norm: _plain(workload)),
        Method("plain_compiled", "plain", lambda workload, clip_norm: _plain(workload, _compile)),
        Method("vmap_grad", "grad", lambda workload, clip_norm: _vmap_grad(workload)),
        Method("vmap_norm", "norm", lambda workload, clip_norm: _vmap_norm(workload)),
        Method("vmap_clip", "clip", _vmap_clip),
        Method("vmap_grad_compiled", "grad", lambda workload, clip_norm: _vmap_grad(workload, _compile)),
        Method("vmap_norm_compiled", "norm", lambda workload, clip_norm: _vmap_norm(workload, _compile)),
        Method("vmap_clip_compiled", "clip", lambda workload, clip_norm: _vmap_clip(workload, clip_norm, _compile)),
    )
}


def _stateless(workload: Workload):
    import psg

    return psg.stateless(workload.model, workload.criterion)


def psg_by(
    transform: str, backend: str | None = None, pure: Callable[[Workload], Any] = _stateless, mode: str | None = None
) -> Callable[[Workload, float], Call]:
    """psg's transform of this name, compiled if there is a backend, of the function of one sample that `pure` makes."""

    def prepare(workload: Workload, clip_norm: float) -> Call:
        import psg

        loss, params = pure(workload)
        options = {"clip_norm": clip_norm} if transform == "clipped_grad" else {}
        fn = getattr(psg, transform)(loss, **options)
        if backend is not None:
            fn = psg.jit(fn, backend=backend, mode=mode)
        if transform == "clipped_grad":
            return lambda: fn(params, *workload.batch).grads
        return lambda: fn(params, *workload.batch)

    return prepare


TRANSFORMS = {"grad": "per_sample_grad", "norm": "per_sample_norm", "clip": "clipped_grad"}
for _kind, _transform in TRANSFORMS.items():
    method(f"psg_{_kind}", _kind, needs="psg")(psg_by(_transform))
    method(f"psg_{_kind}_jit", _kind, needs="psg")(psg_by(_transform, "inductor"))
    method(f"psg_{_kind}_traced", _kind, needs="psg")(psg_by(_transform, "eager"))
    # CUDA graphs. Builds of torch for CPUs come without Triton.
    method(f"psg_{_kind}_graphs", _kind, needs="triton")(psg_by(_transform, "inductor", mode="reduce-overhead"))
