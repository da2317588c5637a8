"""The methods of other libraries: Opacus, BackPACK, fastDP. Importing this module registers them.

Each library is used as its documentation shows, with a mean loss over the batch. What it leaves on the
parameters is removed before the call returns, so that no method pays for another's memory.
"""

from __future__ import annotations

import torch
from methods import Call, clip_coefficients, method, trainable
from torch import Tensor
from workloads import Workload


def _mean_loss(workload: Workload, model: torch.nn.Module) -> Tensor:
    *inputs, target = workload.batch
    return workload.criterion(model(*inputs), target)


def _take(params: dict[str, torch.nn.Parameter], attribute: str) -> dict[str, Tensor]:
    """Moves what a library left on each parameter into a dict, and drops the ordinary gradients."""
    result = {}
    for name, param in params.items():
        result[name] = getattr(param, attribute)
        param.grad = None
        setattr(param, attribute, None)
    return result


def _weighted_sum(grads: dict[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    """The two lines of Opacus' optimizer: norms, then one einsum a parameter."""
    norms = torch.stack([g.flatten(1).norm(2, dim=-1) for g in grads.values()], dim=1).norm(2, dim=1)
    coefficients = clip_coefficients(norms, clip_norm)
    return {name: torch.einsum("i,i...", coefficients, g) for name, g in grads.items()}


def _opacus_model(workload: Workload, wrapper: str, **options) -> torch.nn.Module:
    """The model inside one of Opacus' wrappers, its unsupported modules replaced by Opacus' own."""
    import opacus
    from opacus.validators import ModuleValidator

    params = trainable(workload.model)
    first = next(iter(params.values()))
    model = ModuleValidator.fix(workload.model.train()).to(first.device, first.dtype)
    if trainable(model).keys() != params.keys():
        raise NotImplementedError("Opacus' replacement of a module changes the parameters")
    if wrapper == "GradSampleModuleFastGradientClipping":
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
            GradSampleModuleFastGradientClipping as Wrapper,
        )
    elif wrapper == "GradSampleModuleExpandedWeights":
        from opacus.grad_sample import GradSampleModuleExpandedWeights as Wrapper
    else:
        Wrapper = opacus.GradSampleModule
    return Wrapper(model, loss_reduction="mean", **options)


def _opacus_grad(workload: Workload, wrapper: str = "GradSampleModule", **options) -> Call:
    model = _opacus_model(workload, wrapper, **options)
    params = trainable(model._module)

    def call():
        _mean_loss(workload, model).backward()
        return _take(params, "grad_sample")

    return call


@method("opacus_hooks", "grad", needs="opacus")
def _opacus_hooks(workload: Workload, clip_norm: float) -> Call:
    return _opacus_grad(workload)


@method("opacus_functorch", "grad", needs="opacus")
def _opacus_functorch(workload: Workload, clip_norm: float) -> Call:
    return _opacus_grad(workload, force_functorch=True)


@method("opacus_expanded", "grad", needs="opacus")
def _opacus_expanded(workload: Workload, clip_norm: float) -> Call:
    return _opacus_grad(workload, "GradSampleModuleExpandedWeights")


@method("opacus_clip", "clip", needs="opacus")
def _opacus_clip(workload: Workload, clip_norm: float) -> Call:
    call = _opacus_grad(workload)
    return lambda: _weighted_sum(call(), clip_norm)


@method("opacus_ghost_norm", "norm", needs="opacus")
def _opacus_ghost_norm(workload: Workload, clip_norm: float) -> Call:
    model = _opacus_model(workload, "GradSampleModuleFastGradientClipping", max_grad_norm=clip_norm)

    def call():
        model.zero_grad(set_to_none=True)
        _mean_loss(workload, model).backward()
        return model.get_norm_sample()

    return call


@method("opacus_ghost_clip", "clip", needs="opacus")
def _opacus_ghost_clip(workload: Workload, clip_norm: float) -> Call:
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    model = _opacus_model(workload, "GradSampleModuleFastGradientClipping", max_grad_norm=clip_norm)
    optimizer = torch.optim.SGD(trainable(model).values(), lr=0.1)
    params = trainable(model._module)
    *inputs, target = workload.batch

    def call():
        model.zero_grad(set_to_none=True)
        losses = workload.criterion(model(*inputs), target, reduction="none")
        DPTensorFastGradientClipping(model, optimizer, losses, "mean").backward()
        return {name: param.grad for name, param in params.items()}

    return call


def _backpack(workload: Workload, extension: str) -> Call:
    """One backward pass under a BackPACK extension. Its results are those of the mean loss: 1/n of each sample's own gradient."""
    import backpack

    model = backpack.extend(workload.model)
    params = trainable(model)
    field = {"BatchGrad": "grad_batch", "BatchL2Grad": "batch_l2"}[extension]

    def call():
        model.zero_grad(set_to_none=True)
        with backpack.backpack(getattr(backpack.extensions, extension)()):
            _mean_loss(workload, model).backward()
        return _take(params, field)

    return call


@method("backpack_grad", "grad", needs="backpack")
def _backpack_grad(workload: Workload, clip_norm: float) -> Call:
    call, n = _backpack(workload, "BatchGrad"), workload.num_samples
    return lambda: {name: g.mul_(n) for name, g in call().items()}


@method("backpack_norm", "norm", needs="backpack")
def _backpack_norm(workload: Workload, clip_norm: float) -> Call:
    call, n = _backpack(workload, "BatchL2Grad"), workload.num_samples
    return lambda: n * torch.stack(list(call().values())).sum(0).sqrt()


@method("backpack_clip", "clip", needs="backpack")
def _backpack_clip(workload: Workload, clip_norm: float) -> Call:
    """Norms from BackPACK, then a second, ordinary backward pass of the weighted losses through the same graph."""
    import backpack

    model, n = backpack.extend(workload.model), workload.num_samples
    params = trainable(model)
    *inputs, target = workload.batch

    def call():
        model.zero_grad(set_to_none=True)
        losses = workload.criterion(model(*inputs), target, reduction="none")
        with backpack.backpack(backpack.extensions.BatchL2Grad(), retain_graph=True):
            losses.mean().backward(retain_graph=True)
        norms = n * torch.stack(list(_take(params, "batch_l2").values())).sum(0).sqrt()
        grads = torch.autograd.grad(losses @ clip_coefficients(norms, clip_norm), list(params.values()))
        return dict(zip(params, grads, strict=True))

    return call


@method("fastdp_clip", "clip", needs="fastDP")
def _fastdp_clip(workload: Workload, clip_norm: float) -> Call:
    """Book-keeping in its fast mode: in the backward pass only the first layer and embeddings require gradients."""
    import fastDP

    params, n = trainable(workload.model), workload.num_samples
    first_layer = next(iter(params)).rpartition(".")[0]
    origin = [name for name in params if name.rpartition(".")[0] == first_layer][-1:]
    modules = workload.model.named_modules()
    origin += [f"{name}.weight" for name, module in modules if isinstance(module, torch.nn.Embedding)]
    engine = fastDP.PrivacyEngine(
        workload.model,
        batch_size=n,
        sample_size=n,
        epochs=1,
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        clipping_fn="Abadi",
        clipping_mode="MixOpt",
        origin_params=origin,
        loss_reduction="mean",
    )
    engine.attach(torch.optim.SGD(params.values(), lr=0.1))

    def call():
        for param in params.values():
            param.grad = None
        _mean_loss(workload, workload.model).backward()
        result = {}
        for name, param in params.items():
            result[name] = param.summed_clipped_grad
            del param.summed_clipped_grad
        return result

    return call
