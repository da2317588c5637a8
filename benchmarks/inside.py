"""Measures functions that contain derivatives or a vmap of their own, as ratios to plain training of the same batch.

    python benchmarks/inside.py --threads 4 --repeats 9 --compile --out results/inside.json
    python benchmarks/jax_peer.py --plain results/inside.json --out results/inside-jax.json

Residuals of differential equations, forces, scores, penalties: the loss of one sample contains derivatives with respect to its data. psg is
compared with `vmap(grad)` of the function, in the form that torch.func can run, with norms and clipped sums computed from its gradients.
All results are checked against vmap(grad) in double precision before anything is timed; times are medians of interleaved calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from run import median_ms, options, set_up, write
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import psg

CLIP_NORM = 1.0


class Problem(NamedTuple):
    """A model, a batch, and a loss in up to three forms.

    Attributes:
        model: The module.
        batch: Its data, samples in dim 0.
        fn: The loss of one sample, with torch.func for its derivatives; vmap(grad) can run it.
        batched: The losses of a batch, as one would write them for training; by default vmap of fn.
        by_autograd: The loss of one sample, with torch.autograd.grad for its derivatives.
    """

    model: nn.Module
    batch: tuple[Tensor, ...]
    fn: Callable[..., Tensor]
    batched: Callable[..., Tensor] | None = None
    by_autograd: Callable[..., Tensor] | None = None


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def slope(output: Tensor, data: Tensor) -> Tensor:
    return torch.autograd.grad(output.sum(), data, create_graph=True)[0]


def burgers() -> Problem:
    """u_t + u u_x = 0.01 u_xx on 2048 points."""
    model = mlp(2, 64, 64, 64, 64, 1)

    def residual(u: Tensor, du: Tensor, u_xx: Tensor) -> Tensor:
        return (du[..., 1] + u * du[..., 0] - 0.01 * u_xx).square()

    def fn(params: Any, point: Tensor) -> Tensor:
        def u(z: Tensor) -> Tensor:
            return functional_call(model, params, (z,))[0]

        along_x = torch.tensor([1.0, 0.0]).to(point)
        du, ddu = jvp(grad(u), (point,), (along_x,))
        return residual(u(point), du, ddu[0])

    def by_autograd(params: Any, point: Tensor) -> Tensor:
        point = point.clone().requires_grad_()
        u = functional_call(model, params, (point,))[..., 0]
        du = slope(u, point)
        return residual(u, du, slope(du[..., 0], point)[..., 0])

    return Problem(model, (torch.rand(2048, 2),), fn, by_autograd, by_autograd)


def poisson() -> Problem:
    """- (u_xx + u_yy + u_zz) = f on 1024 points."""
    model = mlp(3, 64, 64, 64, 1)

    def fn(params: Any, point: Tensor) -> Tensor:
        second = hessian(lambda z: functional_call(model, params, (z,))[0])(point)
        return (second.diagonal().sum() + point.sin().prod()).square()

    def by_autograd(params: Any, point: Tensor) -> Tensor:
        point = point.clone().requires_grad_()
        du = slope(functional_call(model, params, (point,)), point)
        second = [slope(du[..., i], point)[..., i] for i in range(3)]
        return (torch.stack(second).sum(0) + point.sin().prod(-1)).square()

    return Problem(model, (torch.rand(1024, 3),), fn, by_autograd, by_autograd)


def forces() -> Problem:
    """Energies and forces of 256 molecules of 9 atoms, from their distances."""
    model = mlp(36, 128, 128, 1, activation=nn.SiLU)
    one, other = torch.triu_indices(9, 9, 1)

    def energy(params: Any, atoms: Tensor) -> Tensor:
        distances = (atoms[..., one, :] - atoms[..., other, :]).square().sum(-1).sqrt()
        return functional_call(model, params, (distances.reciprocal(),))[..., 0]

    def loss(found: Tensor, target: Tensor, force: Tensor, truth: Tensor) -> Tensor:
        return (found - target).square() + (force - truth).square().mean((-1, -2))

    def fn(params: Any, atoms: Tensor, target: Tensor, truth: Tensor) -> Tensor:
        force = -grad(energy, argnums=1)(params, atoms)
        return loss(energy(params, atoms), target, force, truth)

    def by_autograd(params: Any, atoms: Tensor, target: Tensor, truth: Tensor) -> Tensor:
        atoms = atoms.clone().requires_grad_()
        found = energy(params, atoms)
        return loss(found, target, -slope(found, atoms), truth)

    return Problem(model, (3 * torch.randn(256, 9, 3), torch.randn(256), torch.randn(256, 9, 3)), fn, by_autograd, by_autograd)


class Score(nn.Module):
    """A small convolutional score network of images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(4, 64), nn.SiLU()),
            *(nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.SiLU(), nn.Conv2d(32, 1, 3, padding=1)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def sliced_score() -> Problem:
    """v . ds/dx v + |s|^2 / 2 on 64 images of 16 x 16."""
    model = Score()

    def fn(params: Any, image: Tensor, direction: Tensor) -> Tensor:
        score, along = jvp(lambda z: functional_call(model, params, (z[None],))[0], (image,), (direction,))
        return (direction * along).sum() + score.square().sum() / 2

    def batched(params: Any, images: Tensor, directions: Tensor) -> Tensor:
        score, along = jvp(lambda z: functional_call(model, params, (z,)), (images,), (directions,))
        return (directions * along).flatten(1).sum(1) + score.square().flatten(1).sum(1) / 2

    return Problem(model, (torch.randn(64, 1, 16, 16), torch.randn(64, 1, 16, 16)), fn, batched)


def gradient_penalty() -> Problem:
    """(|d critic / d image| - 1)^2 on 64 images of 16 x 16."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
        *(nn.Flatten(), nn.Linear(64 * 16, 1)),
    )

    def fn(params: Any, image: Tensor) -> Tensor:
        along = grad(lambda z: functional_call(model, params, (z[None],))[0, 0])(image)
        return (along.norm() - 1).square()

    def by_autograd(params: Any, image: Tensor) -> Tensor:
        image = image.clone().requires_grad_()
        return (slope(functional_call(model, params, (image[None],)), image).norm() - 1).square()

    def batched(params: Any, images: Tensor) -> Tensor:
        images = images.clone().requires_grad_()
        return (slope(functional_call(model, params, (images,)), images).flatten(1).norm(dim=1) - 1).square()

    return Problem(model, (torch.randn(64, 1, 16, 16),), fn, batched, by_autograd)


def layers_by_token() -> Problem:
    """fn itself uses vmap to apply a network to each of the 64 tokens of a sample; 64 samples."""
    model = mlp(64, 256, 256, 64, activation=nn.GELU)

    def fn(params: Any, tokens: Tensor, target: Tensor) -> Tensor:
        outputs = vmap(lambda token: functional_call(model, params, (token,)))(tokens)
        return F.mse_loss(outputs.mean(0), target)

    def batched(params: Any, tokens: Tensor, target: Tensor) -> Tensor:
        return (functional_call(model, params, (tokens,)).mean(1) - target).square().mean(1)

    return Problem(model, (torch.randn(64, 64, 64), torch.randn(64, 64)), fn, batched)


PROBLEMS = {make.__name__: make for make in (burgers, poisson, forces, sliced_score, gradient_penalty, layers_by_token)}


def main(problems: dict[str, Callable[[], Problem]] = PROBLEMS, description: str | None = __doc__) -> None:
    parser = options(description, problems=",".join(problems), repeats=9, threads=4, device="cpu")
    parser.add_argument("--compile", action="store_true", help="also time psg.jit of the clipped sum, and torch.compile of vmap(grad)'s")
    args = parser.parse_args()
    set_up(args)
    rows = [row for name in args.problems.split(",") for row in measure(name, problems[name], args)]
    write(args, results=rows)


def measure(name: str, make: Callable[[], Problem], args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    problem = make()
    model = problem.model.to(args.device)
    batch = tuple(tensor.to(args.device) for tensor in problem.batch)
    params = {key: value.detach() for key, value in model.named_parameters()}
    forms = {"": problem.fn, **({"_by_autograd": problem.by_autograd} if problem.by_autograd is not None else {})}
    check(problem, forms.values())

    def train() -> Any:
        leaves = {key: value.detach().requires_grad_() for key, value in params.items()}
        losses = problem.batched(leaves, *batch) if problem.batched is not None else vmap(lambda *s: problem.fn(leaves, *s))(*batch)
        return torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)

    gradients = vmap(grad(problem.fn), (None, *(0 for _ in batch)))

    def norms(found: Any) -> Tensor:
        return torch.stack([leaf.flatten(1).square().sum(1) for leaf in found.values()]).sum(0).sqrt()

    def clipped(params: Any, *batch: Tensor) -> Any:
        found = gradients(params, *batch)
        weights = (CLIP_NORM / norms(found)).clamp(max=1)
        return {key: torch.tensordot(weights, leaf, 1) for key, leaf in found.items()}

    ways: dict[str, Callable[..., Any]] = {
        "vmap_norm": lambda *given: norms(gradients(*given)),
        "vmap_clip": clipped,
        "vmap_grad": gradients,
    }
    for suffix, fn in forms.items():
        ways[f"psg_norm{suffix}"] = psg.per_sample_norm(fn)
        ways[f"psg_clip{suffix}"] = psg.clipped_grad(fn, CLIP_NORM)
        ways[f"psg_grad{suffix}"] = psg.per_sample_grad(fn)
    failed: list[dict[str, Any]] = []
    if args.compile:
        ways["vmap_clip_compiled"] = torch.compile(clipped)
        try:
            ways["vmap_clip_compiled"](params, *batch)
        except RuntimeError as error:
            del ways["vmap_clip_compiled"]
            failed = [{"workload": name, "method": "vmap_clip_compiled", "status": f"failed: {str(error).splitlines()[0]}"}]
        ways |= {f"psg_jit_clip{suffix}": psg.jit(psg.clipped_grad(fn, CLIP_NORM)) for suffix, fn in forms.items()}
    calls = {"plain": train} | {method: lambda way=way: way(params, *batch) for method, way in ways.items()}
    medians = median_ms(calls, args)
    rows = [
        {"workload": name, "method": method, "status": "ok", "ms": ms, "ratio": ms / medians["plain"]} for method, ms in medians.items()
    ]
    print(f"{name:<17} {medians['plain']:7.2f} ms  " + "  ".join(f"{row['method']} {row['ratio']:.2f}" for row in rows[1:]), flush=True)
    return rows + failed


def check(problem: Problem, forms: Any) -> None:
    """Raise unless all forms give the gradients of vmap(grad), in double precision on a few samples."""
    model = problem.model.cpu()
    params = {key: value.detach().double() for key, value in model.named_parameters()}
    batch = tuple(tensor[:3].double() if tensor.is_floating_point() else tensor[:3] for tensor in problem.batch)
    expected = vmap(grad(problem.fn), (None, *(0 for _ in batch)))(params, *batch)
    for fn in forms:
        found = psg.per_sample_grad(fn, method="capture")(params, *batch)
        for key, leaf in expected.items():
            torch.testing.assert_close(found[key], leaf, rtol=1e-7, atol=1e-9 * leaf.abs().max().item())


if __name__ == "__main__":
    main()
