"""For tests of derivatives: psg's functions beside the same written with vmap(grad), and what differentiates either."""

import torch
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

import psg


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, cotangent):
        x, y = ctx.saved_tensors
        return cotangent * y, cotangent * x


def gradients(fn, p, x):
    return vmap(grad(fn), in_dims=(None, 0))(p, x)


def flat(tree):
    return torch.cat([tree[key].flatten(1) for key in sorted(tree)], 1)


def weighted(tree, weights):
    return tree_map(lambda leaf: torch.einsum("n,n...->...", weights, leaf), tree)


def reference_clipped(fn, p, x, rest):
    grads = gradients(fn, p, x)
    norms = flat(grads).norm(dim=1)
    coef = (rest["clip_norm"] / norms).clamp(max=1)
    return weighted(grads, coef), norms, coef, vmap(fn, in_dims=(None, 0))(p, x)


def clipped(fn, **options):
    def call(p, x, rest):
        out = psg.clipped_grad(fn, rest["clip_norm"], **options)(p, x)
        return out.grads, out.norms, out.clip_coef["a"], out.values

    return call


def reference_clipped_leaves(fn, p, x, rest):
    return {key: weighted(g, (rest["clip_norm"] / g.flatten(1).norm(dim=1)).clamp(max=1)) for key, g in gradients(fn, p, x).items()}


def clipped_leaves(fn):
    return lambda p, x, rest: psg.clipped_grad(fn, psg.clipping.PerLeaf(rest["clip_norm"]))(p, x).grads


def of_tree(reduce):
    return lambda fn: lambda p, x, rest: reduce(psg.factored_grad(fn)(p, x), rest)


def of_flat(reduce):
    return lambda fn, p, x, rest: reduce(flat(gradients(fn, p, x)), rest)


def mean_square(g):
    return g.square().mean(0)


def reference_cosine(g, rest):
    g = g / g.norm(dim=1, keepdim=True)
    return g @ g.T


# Name -> (from fn to psg's function of (params, data, rest), the reference of (fn, params, data, rest)).
FUNCTIONS = {
    "per_sample_grad": (lambda fn: lambda p, x, rest: psg.per_sample_grad(fn)(p, x), lambda fn, p, x, rest: gradients(fn, p, x)),
    "per_sample_value_and_grad": (
        lambda fn: lambda p, x, rest: psg.per_sample_value_and_grad(fn)(p, x),
        lambda fn, p, x, rest: (vmap(fn, in_dims=(None, 0))(p, x), gradients(fn, p, x)),
    ),
    "per_sample_norm": (lambda fn: lambda p, x, rest: psg.per_sample_norm(fn)(p, x), of_flat(lambda g, rest: g.norm(dim=1))),
    "clipped_grad": (clipped, reference_clipped),
    "clipped_grad per leaf": (clipped_leaves, reference_clipped_leaves),
    "materialize": (of_tree(lambda g, rest: psg.tree.materialize(g)), lambda fn, p, x, rest: gradients(fn, p, x)),
    "norm": (of_tree(lambda g, rest: psg.tree.norm(g)), of_flat(lambda g, rest: g.norm(dim=1))),
    "squared_norm": (of_tree(lambda g, rest: psg.tree.squared_norm(g)), of_flat(lambda g, rest: g.square().sum(1))),
    "weighted_sum": (
        of_tree(lambda g, rest: psg.tree.weighted_sum(g, rest["weights"])),
        lambda fn, p, x, rest: weighted(gradients(fn, p, x), rest["weights"]),
    ),
    "sum": (of_tree(lambda g, rest: psg.tree.sum(g)), lambda fn, p, x, rest: tree_map(lambda g: g.sum(0), gradients(fn, p, x))),
    "mean": (of_tree(lambda g, rest: psg.tree.mean(g)), lambda fn, p, x, rest: tree_map(lambda g: g.mean(0), gradients(fn, p, x))),
    "dot": (
        of_tree(lambda g, rest: psg.tree.dot(g, rest["direction"])),
        of_flat(lambda g, rest: g @ flat(tree_map(lambda leaf: leaf[None], rest["direction"]))[0]),
    ),
    "inner": (of_tree(lambda g, rest: psg.tree.inner(g, psg.tree.take(g, slice(None)))), of_flat(lambda g, rest: g.square().sum(1))),
    "gram": (of_tree(lambda g, rest: psg.tree.gram(g)), of_flat(lambda g, rest: g @ g.T)),
    "cosine": (of_tree(lambda g, rest: psg.tree.cosine(g)), of_flat(reference_cosine)),
    "moments": (of_tree(lambda g, rest: psg.tree.moments(g).second), lambda fn, p, x, rest: tree_map(mean_square, gradients(fn, p, x))),
    "project": (
        of_tree(lambda g, rest: psg.tree.project(g, 5)),
        lambda fn, p, x, rest: psg.tree.project(gradients(fn, p, x), 5),
    ),
    "flatten": (of_tree(lambda g, rest: psg.tree.flatten(g)), of_flat(lambda g, rest: g)),
    "concat": (of_tree(lambda g, rest: psg.tree.flatten(psg.tree.concat([g, g]))), of_flat(lambda g, rest: torch.cat([g, g]))),
    "in chunks": (lambda fn: clipped(fn, chunk_size=2), reference_clipped),
    "method vmap": (lambda fn: clipped(fn, method="vmap"), reference_clipped),
    "method loop": (lambda fn: clipped(fn, method="loop"), reference_clipped),
}


def weigh(out):
    """A scalar of a tree whose derivative is nowhere zero."""
    return sum(
        (leaf * torch.arange(1.0, leaf.numel() + 1, device=leaf.device).reshape(leaf.shape)).square().sum() for leaf in tree_leaves(out)
    )


def scalar(f):
    return lambda *args: weigh(f(*args))


def stacked(tree):
    return tree_map(lambda leaf: torch.stack([leaf, leaf.sin(), 2 * leaf]), tree)


def live(args):
    return tree_map(lambda leaf: leaf.clone().requires_grad_(), args)


def slopes(value, args, **options):
    leaves = tree_leaves(args)
    found = torch.autograd.grad(value, leaves, allow_unused=True, **options)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
