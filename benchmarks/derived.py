"""Measures models whose weights are computed from parameters, or parts of them, as ratios to plain training of the same batch.

    python benchmarks/derived.py --threads 4 --keep-pages --out results/derived.json

Scaled weights, merged low-rank updates, spectral and weight norm, straight-through estimators, masks, standardised filters, penalties,
layers of a stack, fused gates, repeated layers, Kronecker products, networks that make weights, symmetric and orthogonal weights, linear
systems, networks of splines, weights that vectors are written into, tables that are indexed, normalised, or mixed along a graph, networks
over a whole graph: layers use values computed from parameters, or only parts of them, or use them again.
Results are checked and timed as in inside.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from inside import Problem, main
from torch import Tensor, nn
from torch.func import functional_call

CLASSES, WIDTH, INPUTS, SAMPLES = 10, 512, 256, 128


class Linear(nn.Module):
    """A linear layer whose weight `make` computes from its parameters."""

    def __init__(self, inputs: int, outputs: int, make: Callable[[nn.Module], Tensor], rank: int = 8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))
        self.a, self.b = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs)), nn.Parameter(0.01 * torch.randn(outputs, rank))
        self.gain = nn.Parameter(self.weight.detach().norm(dim=1, keepdim=True))
        self.u, self.v = (F.normalize(torch.randn(size), dim=0) for size in self.weight.shape)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self))


def merged(layer: nn.Module) -> Tensor:
    return layer.weight.detach() + 0.5 * layer.b @ layer.a


def magnitude(layer: nn.Module) -> Tensor:
    weight = merged(layer)
    return layer.gain * weight / weight.norm(dim=1, keepdim=True).detach()


def spectral(layer: nn.Module) -> Tensor:
    u, v = (vector.to(layer.weight) for vector in (layer.u, layer.v))
    return layer.weight / torch.dot(u, torch.mv(layer.weight, v))


def weight_norm(layer: nn.Module) -> Tensor:
    return torch._weight_norm(layer.weight, layer.gain, 0)


class Rounded(torch.autograd.Function):
    """Weights in steps of 1/64, for which the backward passes straight through between -1 and 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return (64 * weight).round() / 64

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return cotangent * (weight.abs() < 1)


def straight_through(layer: nn.Module) -> Tensor:
    return Rounded.apply(layer.weight)


def positive(layer: nn.Module) -> Tensor:
    return F.softplus(layer.weight) / math.sqrt(layer.weight.shape[1])


def network(make: Callable[[nn.Module], Tensor]) -> Callable[[], Problem]:
    def problem() -> Problem:
        layers = [Linear(INPUTS, WIDTH, make), nn.ReLU(), Linear(WIDTH, WIDTH, make), nn.ReLU(), nn.Linear(WIDTH, CLASSES)]
        return classifier(nn.Sequential(*layers), torch.randn(SAMPLES, INPUTS))

    return problem


def classifier(model: nn.Module, x: Tensor) -> Problem:
    def batched(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x,)), y, reduction="none")

    return Problem(model, (x, torch.randint(CLASSES, (len(x),))), lambda params, x, y: batched(params, x[None], y[None])[0], batched)


def penalised() -> Problem:
    layers = [nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)]
    problem = classifier(nn.Sequential(*layers), torch.randn(SAMPLES, INPUTS))

    def penalty(params: dict[str, Tensor]) -> Tensor:
        return 1e-3 * sum(param.square().sum() for param in params.values())

    return problem._replace(
        fn=lambda params, *batch: problem.fn(params, *batch) + penalty(params),
        batched=lambda params, *batch: problem.batched(params, *batch) + penalty(params),
    )


class Masked(nn.Module):
    """A masked autoregressive network: the output for each variable depends only on the variables before it."""

    def __init__(self, variables: int = 64):
        super().__init__()
        degrees = [torch.arange(1, variables + 1), *[torch.arange(WIDTH) % (variables - 1) + 1] * 2, torch.arange(variables)]
        sizes = list(zip(degrees, degrees[1:], strict=False))
        self.layers = nn.ModuleList(nn.Linear(len(before), len(after)) for before, after in sizes)
        for k, (before, after) in enumerate(sizes):
            self.register_buffer(f"mask{k}", (after[:, None] >= before).float())

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = F.linear(x, layer.weight * getattr(self, f"mask{k}"), layer.bias)
            x = x.relu() if k + 1 < len(self.layers) else x
        return x


def masked() -> Problem:
    def batched(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (functional_call(model, params, (x,)) - x).square().mean(1)

    model = Masked()
    return Problem(model, (torch.randn(SAMPLES, 64),), lambda params, x: batched(params, x[None])[0], batched)


class Standardised(nn.Conv2d):
    """A convolution whose filters have mean zero and variance one. Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and
    Weight Standardization", 2019."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, len(self.weight), -1)
        weight = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight / math.sqrt(rows.shape[2]), self.bias, self.stride, self.padding)


def standardised() -> Problem:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [Standardised(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.ReLU()]

    blocks = [block(3, 32, 1), block(32, 32, 1), block(32, 64, 2), block(64, 64, 1), block(64, 128, 2), block(128, 128, 1)]
    model = nn.Sequential(*itertools.chain(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))
    return classifier(model, torch.randn(32, 3, 32, 32))


class Filters(nn.Conv2d):
    """A convolution whose filters are standardised, and scaled by a parameter of each."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args, bias=False)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(variance * self.weight[0].numel() + 1e-4) * self.gain
        return F.conv2d(x, weight, None, self.stride, self.padding)


class WideBlock(nn.Module):
    """Normalisation, rectifier and convolution, twice, beside a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(16, inputs), nn.ReLU())
        self.second = nn.Sequential(
            Filters(inputs, outputs, 3, stride, 1), nn.GroupNorm(16, outputs), nn.ReLU(), Filters(outputs, outputs, 3, 1, 1)
        )
        self.skip = Filters(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return (x if self.skip is None else self.skip(hidden)) + self.second(hidden)


def wide_resnet() -> Problem:
    """WRN-16-4 as De et al., "Unlocking High-Accuracy Differentially Private Image Classification through Scale", 2022, train it."""
    sizes = [(16, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    blocks = [Filters(3, 16, 3, 1, 1), *itertools.starmap(WideBlock, sizes), nn.GroupNorm(16, 256), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return classifier(nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, CLASSES)), torch.randn(32, 3, 32, 32))


class Stack(nn.Module):
    """Layers whose weights are slices of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, INPUTS, INPUTS) / math.sqrt(INPUTS))
        self.head = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.linear(x, weight).tanh()
        return self.head(x)


class Fused(nn.Module):
    """Gates whose weights are chunks of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, INPUTS) / math.sqrt(INPUTS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.weight.chunk(3)
        return self.head(F.linear(x, a).tanh() * F.linear(x, b).sigmoid() + F.linear(x, c))


class Table(nn.Module):
    """A table that is indexed (`table[ids]`) rather than looked up by `F.embedding`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(2000, 64))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table[ids].mean(1))


class Pooled(nn.Module):
    """A classifier of the mean over positions."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def scaled_by_a_product() -> Problem:
    """Low-rank factors of frozen weights, as LoHa's. Hyeon-Woo et al., "FedPara", 2022."""

    def make(layer: nn.Module) -> Tensor:
        return layer.weight.detach() * (1 + layer.b @ layer.a)

    body = nn.Sequential(Linear(128, 256, make), nn.Tanh(), Linear(256, 128, make))
    return classifier(Pooled(body, 128), torch.randn(64, 64, 128))


class Repeated(nn.Module):
    """One layer that is called again and again, as an equilibrium is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.layer(x).tanh()
        return x


class Kronecker(nn.Module):
    """A frozen weight and a Kronecker product with a low-rank side. Yeh et al., "Navigating Text-To-Image Customization" (LoKr), 2024."""

    def __init__(self, size: int = 8, rank: int = 4) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(size, size) / size)
        self.a = nn.Parameter(torch.randn(rank, INPUTS // size) / math.sqrt(INPUTS))
        self.b = nn.Parameter(torch.randn(INPUTS // size, rank))
        self.frozen = torch.randn(INPUTS, INPUTS) / math.sqrt(INPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.frozen.to(x) + torch.kron(self.first, self.b @ self.a))


class Made(nn.Module):
    """A layer whose weight a small network makes from a vector. Ha et al., "HyperNetworks", 2017."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width, self.code = width, nn.Parameter(torch.randn(16))
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, width * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.network(self.code).view(self.width, self.width))


class Splines(nn.Module):
    """A layer of learned functions, sums of B-splines with a scale each. Liu et al., "KAN: Kolmogorov-Arnold Networks", 2024."""

    def __init__(self, inputs: int, outputs: int, intervals: int = 5, order: int = 3) -> None:
        super().__init__()
        self.order, width = order, 2 / intervals
        self.register_buffer("knots", torch.arange(-order, intervals + order + 1) * width - 1)
        self.base = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))
        self.splines = nn.Parameter(0.1 * torch.randn(outputs, inputs, intervals + order))
        self.scales = nn.Parameter(torch.ones(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.splines * self.scales.unsqueeze(2)
        return F.linear(F.silu(x), self.base) + F.linear(self._basis(x).flatten(-2), weight.flatten(1))

    def _basis(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., i, splines], by the recursion of Cox and de Boor."""
        x, knots = x.unsqueeze(-1), self.knots
        basis = ((x >= knots[:-1]) & (x < knots[1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            rising = (x - knots[: -k - 1]) / (knots[k:-1] - knots[: -k - 1])
            falling = (knots[k + 1 :] - x) / (knots[k + 1 :] - knots[1:-k])
            basis = rising * basis[..., :-1] + falling * basis[..., 1:]
        return basis


class Recommender(nn.Module):
    """Scores of pairs of items, from a table of embeddings that is computed anew for each batch."""

    def __init__(self, compute: Callable[[Tensor], Tensor], items: int = 2000, width: int = 64) -> None:
        super().__init__()
        self.table, self.compute = nn.Parameter(0.1 * torch.randn(items, width)), compute

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        table = self.compute(self.table)
        return (F.embedding(one, table) * F.embedding(other, table)).sum(-1)


def recommender(compute: Callable[[Tensor], Tensor]) -> Callable[[], Problem]:
    def problem() -> Problem:
        def loss(params: dict[str, Tensor], one: Tensor, other: Tensor) -> Tensor:
            return F.softplus(-functional_call(model, params, (one, other)))

        model = Recommender(compute)
        return Problem(model, tuple(torch.randint(len(model.table), (256,)) for _ in range(2)), loss, loss)

    return problem


def along_a_graph() -> Problem:
    """Means of the tables of three layers. He et al., "LightGCN", 2020."""
    degree, items = 10, 2000
    links = torch.zeros(items, items).index_put_(
        (torch.arange(items).repeat_interleave(degree), torch.randint(items, (degree * items,))), torch.tensor(1.0)
    )
    links = links / links.sum(1, keepdim=True)

    def compute(table: Tensor) -> Tensor:
        layers = [table]
        for _ in range(2):
            layers.append(links.to(table.dtype) @ layers[-1])
        return torch.stack(layers, 1).mean(1)

    return recommender(compute)()


class GraphNetwork(nn.Module):
    """Classes of some nodes of one graph, by two layers that add messages of neighbours to new zeros, as torch_geometric's do."""

    def __init__(self, attends: bool, nodes: int = 2708, degree: int = 4, inputs: int = 100, width: int = 16) -> None:
        super().__init__()
        own, (source, target) = torch.arange(nodes), torch.randint(nodes, (2, nodes * degree // 2))
        self.source, self.target = torch.cat([own, source, target]), torch.cat([own, target, source])
        self.inputs, self.attends = torch.randn(nodes, inputs), attends
        self.layers = nn.ModuleList([nn.Linear(inputs, width, bias=False), nn.Linear(width, CLASSES, bias=False)])
        self.scores = nn.ParameterList([nn.Parameter(torch.randn(2, size) / math.sqrt(size)) for size in (width, CLASSES)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (width, CLASSES)])

    def forward(self, node: Tensor) -> Tensor:
        hidden = self.inputs.to(self.biases[0])
        for layer, scores, bias in zip(self.layers, self.scores, self.biases, strict=True):
            hidden = layer(hidden)
            weights = self._attention(hidden, scores) if self.attends else torch.ones_like(self.source, dtype=hidden.dtype)[:, None]
            messages = weights / self._added(weights).index_select(0, self.target) * hidden.index_select(0, self.source)
            hidden = self._added(messages) + bias
            hidden = hidden.relu() if layer is self.layers[0] else hidden
        return F.embedding(node, hidden)

    def _attention(self, hidden: Tensor, scores: Tensor) -> Tensor:
        """Velickovic et al., "Graph Attention Networks", 2018, up to a constant for each node."""
        to_own, to_others = ((hidden * score).sum(-1, keepdim=True) for score in scores)
        return F.leaky_relu(to_own.index_select(0, self.target) + to_others.index_select(0, self.source), 0.2).exp()

    def _added(self, messages: Tensor) -> Tensor:
        zeros = messages.new_zeros(len(self.inputs), messages.shape[1])
        return zeros.scatter_add_(0, self.target[:, None].expand_as(messages), messages)


class Written(nn.Module):
    """A square layer of whose weight some entries are parameters, as those of a triangular matrix or of a sparse update are."""

    def __init__(self, places: Tensor, others: Tensor, make: Callable[[Tensor], Tensor] = lambda weight: weight) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(places.shape[1]) / math.sqrt(WIDTH))
        self.places, self.others, self.make = places, others, make

    def forward(self, x: Tensor) -> Tensor:
        weight = self.others.to(self.values.dtype, copy=True)
        weight[self.places[0], self.places[1]] = self.values
        return F.linear(x, self.make(weight))


def square(layer: Callable[[], nn.Module]) -> Callable[[], Problem]:
    return lambda: classifier(nn.Sequential(layer(), nn.Tanh(), nn.Linear(WIDTH, CLASSES)), torch.randn(SAMPLES, WIDTH))


def sparse_update() -> nn.Module:
    places = torch.randperm(WIDTH**2)[: WIDTH**2 // 100]
    return Written(torch.stack([places // WIDTH, places % WIDTH]), torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))


class Reused(nn.Module):
    """A square layer whose weight reads its entries from a vector, each again and again."""

    def __init__(self, places: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(int(places.max()) + 1) / math.sqrt(WIDTH))
        self.register_buffer("places", places)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.values[self.places])


def hashed() -> nn.Module:
    """Chen et al., "Compressing Neural Networks with the Hashing Trick", 2015."""
    return Reused(torch.randint(WIDTH**2 // 64, (WIDTH, WIDTH)))


def toeplitz() -> nn.Module:
    """Every diagonal has one value."""
    return Reused(torch.arange(WIDTH)[:, None] - torch.arange(WIDTH) + WIDTH - 1)


def orthogonal(layer: nn.Module) -> Tensor:
    """(I - A/2)^-1 (I + A/2), of a skew-symmetric matrix A, as torch.nn.utils.parametrizations.orthogonal computes it."""
    skew = layer.weight.tril() - layer.weight.tril().mT
    eye = torch.eye(WIDTH, dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(eye - 0.5 * skew, eye + 0.5 * skew)


def exponential(layer: nn.Module) -> Tensor:
    """exp(A) of a skew-symmetric matrix A: what torch.nn.utils.parametrizations.orthogonal makes of square weights."""
    return torch.linalg.matrix_exp(layer.weight.tril() - layer.weight.tril().mT)


def reflections(layer: nn.Module) -> Tensor:
    """A product of Householder reflections: what it makes of other weights."""
    vectors = layer.weight.mT.tril(-1)
    return torch.linalg.householder_product(vectors, 2 / (1 + vectors.square().sum(0))).mT


class Monarch(nn.Module):
    """A product of two block-diagonal matrices, with the inputs of the second in another order. Dao et al., "Monarch: Expressive Structured
    Matrices for Efficient and Accurate Training", 2022."""

    def __init__(self, blocks: int = 16) -> None:
        super().__init__()
        self.size = blocks, WIDTH // blocks, WIDTH
        self.first, self.second = (nn.Parameter(torch.randn(blocks, *[self.size[1]] * 2) / math.sqrt(self.size[1])) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first @ torch.eye(WIDTH, dtype=x.dtype, device=x.device).view(self.size)
        return F.linear(x, (self.second @ rows.transpose(0, 1).reshape(self.size)).view(WIDTH, WIDTH))


class Shuffled(nn.Module):
    """A square layer whose weight is another matrix with its entries in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.register_buffer("order", torch.randperm(WIDTH**2).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.flatten()[self.order])


def computed(make: Callable[[nn.Module], Tensor], outputs: int) -> Callable[[], Problem]:
    def problem() -> Problem:
        layers = Linear(INPUTS, outputs, make), nn.Tanh(), nn.Linear(outputs, CLASSES)
        return classifier(nn.Sequential(*layers), torch.randn(SAMPLES, INPUTS))

    return problem


class Inverted(nn.Module):
    """Its output is the x for which W x is the input: the inverse direction of an invertible layer, and the sampling of a flow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.3 * torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.weight, x.mT).mT


def quantised(layer: nn.Module) -> Tensor:
    """In four bits, at a scale for each output channel that training leaves alone: quantisation-aware training."""
    scales = layer.weight.detach().abs().amax(1).float() / 7  # torch takes no others
    return torch.fake_quantize_per_channel_affine(layer.weight, scales, torch.zeros_like(scales, dtype=torch.int32), 0, -7, 7)


def mirrored(layer: nn.Module) -> Tensor:
    return (layer.weight + layer.weight.flip(1)) / 2


def symmetric(layer: nn.Module) -> Tensor:
    return layer.weight.triu() + layer.weight.triu(1).T


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "scaled": network(lambda layer: 0.7 * layer.weight),
    "merged_low_rank": network(merged),
    "magnitude_and_direction": network(magnitude),
    "spectral_norm": network(spectral),
    "weight_norm": network(weight_norm),
    "straight_through": network(straight_through),
    "positive": network(positive),
    "probabilities": network(lambda layer: (8 * math.sqrt(layer.weight.shape[1]) * layer.weight).softmax(1)),
    "between_vectors": network(lambda layer: layer.weight / (layer.u.to(layer.weight) @ layer.weight @ layer.v.to(layer.weight))),
    "divided_by_the_largest": network(lambda layer: layer.weight / layer.weight.abs().max(1, keepdim=True)[0]),
    "layer_normalised": network(lambda layer: F.layer_norm(layer.weight, layer.weight.shape[1:]) / math.sqrt(layer.weight.shape[1])),
    "quantised_channels": network(quantised),
    "mirrored": network(mirrored),
    "masked": masked,
    "standardised_filters": standardised,
    "wide_resnet": wide_resnet,
    "squared_norm_in_the_loss": penalised,
    "layers_of_a_stack": lambda: classifier(Stack(), torch.randn(SAMPLES, INPUTS)),
    "fused_gates": lambda: classifier(Fused(), torch.randn(SAMPLES, INPUTS)),
    "scaled_by_a_product": scaled_by_a_product,
    "repeated_layer": lambda: classifier(Pooled(Repeated(), 64), torch.randn(SAMPLES, 128, 64)),
    "kronecker": lambda: classifier(nn.Sequential(Kronecker(), nn.Tanh(), nn.Linear(INPUTS, CLASSES)), torch.randn(SAMPLES, INPUTS)),
    "made_weights": lambda: classifier(nn.Sequential(Made(), nn.Tanh(), nn.Linear(64, CLASSES)), torch.randn(SAMPLES, 64)),
    "splines": lambda: classifier(nn.Sequential(Splines(256, 128), Splines(128, CLASSES)), torch.rand(SAMPLES, 256) * 2 - 1),
    "symmetric": square(lambda: Linear(WIDTH, WIDTH, symmetric)),
    "triangular": square(lambda: Written(torch.tril_indices(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH))),
    "skew_symmetric": square(lambda: Written(torch.triu_indices(WIDTH, WIDTH, 1), torch.zeros(WIDTH, WIDTH), lambda w: w - w.T)),
    "sparse_update": square(sparse_update),
    "hashed": square(hashed),
    "toeplitz": square(toeplitz),
    "monarch": square(Monarch),
    "shuffled": square(Shuffled),
    "pseudoinverse": computed(lambda layer: torch.linalg.pinv(layer.weight).mT, INPUTS // 2),
    "orthogonal": square(lambda: Linear(WIDTH, WIDTH, orthogonal)),
    "inverted": square(Inverted),
    "exponential": computed(exponential, INPUTS),
    "reflections": computed(reflections, INPUTS // 2),
    "indexed_table": lambda: classifier(Table(), torch.randint(2000, (256, 32))),
    "normalised_table": recommender(F.normalize),
    "table_along_a_graph": along_a_graph,
    "graph_convolutions": lambda: classifier(GraphNetwork(attends=False), torch.arange(64)),
    "graph_attention": lambda: classifier(GraphNetwork(attends=True), torch.arange(64)),
}


if __name__ == "__main__":
    main(PROBLEMS, __doc__)
