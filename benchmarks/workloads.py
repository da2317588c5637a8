"""The workloads: small models as people write them, each with a criterion and one batch.

Every entry of `WORKLOADS` builds a `Workload` from the same seed, so all methods get equal weights and equal data. The
models are plain `nn.Module`s that use no library for per-sample gradients; shapes are in the entry's name or beside it.
Entries whose size only makes sense on an accelerator are at the end, in `LARGE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Workload(NamedTuple):
    """A model, a criterion `(output, target, reduction=...)`, and a batch `(*inputs, target)` with samples in dim 0."""

    model: nn.Module
    criterion: Callable[..., Tensor]
    batch: tuple[Tensor, ...]

    @property
    def num_samples(self) -> int:
        return self.batch[0].shape[0]


def token_cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy over every position; with reduction "none" one mean a sample."""
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    return losses.mean(-1) if reduction == "none" else losses.mean()


class TutorialCNN(nn.Module):
    """The convolutional network of the torch.func tutorial on per-sample gradients."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.max_pool2d(x, 2).flatten(1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group norms, and a skip connection, projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 8):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    """A GroupNorm ResNet: a stem, stages that halve the image and double the width, a mean, a classifier."""

    def __init__(self, stem: nn.Module, width: int, stages: int, blocks: int, classes: int):
        super().__init__()
        self.stem = stem
        widths = [width * 2**stage for stage in range(stages)]
        layers, inputs = [], width
        for stage, outputs in enumerate(widths):
            for block in range(blocks):
                layers.append(ResidualBlock(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def vgg11(classes: int = 10) -> nn.Module:
    """VGG11's convolutions on 32x32 images, one linear classifier."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"):
        if outputs == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, classes))


def depthwise_net(classes: int = 10) -> nn.Module:
    """Depthwise 3x3 and pointwise 1x1 convolutions in turn, as in MobileNet."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for inputs, outputs, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
        layers += [nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs), nn.ReLU()]
        layers += [nn.Conv2d(inputs, outputs, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, classes))


class Attention(nn.Module):
    """Multi-head self-attention: one projection to q, k, v, and `scaled_dot_product_attention`."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(n, t, width))


class TransformerBlock(nn.Module):
    """Pre-norm attention and a two-layer MLP, each with a skip connection."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class AddPositions(nn.Module):
    """Adds a learned vector to every position."""

    def __init__(self, positions: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(positions, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class ViT(nn.Module):
    """A vision transformer that averages its patches."""

    def __init__(self, image: int, patch: int, width: int, depth: int, heads: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = AddPositions((image // patch) ** 2, width)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads, causal=False) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(self.blocks(x)).mean(1))


class GPT(nn.Module):
    """A decoder-only language model with learned positions; `tied` shares the embedding with the head."""

    def __init__(self, vocab: int, positions: int, width: int, depth: int, heads: int, tied: bool = False):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads, causal=True) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.tokens(ids) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable low-rank update."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Freezes the model and puts a LoRALinear around every linear layer of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for parent in (block, block.attention):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, LoRALinear(child, rank))
    return model


class EmbeddingClassifier(nn.Module):
    """The mean of the tokens' embeddings, then a linear classifier."""

    def __init__(self, vocab: int, width: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).mean(1))


class LSTMClassifier(nn.Module):
    """An embedding, an LSTM, and a linear classifier on its last state."""

    def __init__(self, vocab: int, width: int, hidden: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        output, _ = self.lstm(self.embedding(ids))
        return self.head(output[:, -1])


def _images(model: nn.Module, n: int, channels: int, size: int, classes: int = 10, criterion=F.cross_entropy) -> Workload:
    return Workload(model, criterion, (torch.randn(n, channels, size, size), torch.randint(classes, (n,))))


def _tokens(model: nn.Module, n: int, t: int, vocab: int) -> Workload:
    ids = torch.randint(vocab, (n, t + 1))
    return Workload(model, token_cross_entropy, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def _texts(model: nn.Module, n: int, t: int, vocab: int, classes: int) -> Workload:
    return Workload(model, F.cross_entropy, (torch.randint(vocab, (n, t)), torch.randint(classes, (n,))))


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _small_resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU())
    return ResNet(stem, width=32, stages=3, blocks=2, classes=10)


def _resnet18() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return ResNet(stem, width=64, stages=4, blocks=2, classes=1000)


def _vector(model: nn.Module, n: int, width: int, classes: int = 10) -> Workload:
    return Workload(model, F.cross_entropy, (torch.randn(n, width), torch.randint(classes, (n,))))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": lambda: _vector(_mlp(784, 1024, 1024, 10), n=128, width=784),
    "cnn": lambda: _images(TutorialCNN(), n=64, channels=1, size=28, criterion=F.nll_loss),
    "resnet": lambda: _images(_small_resnet(), n=32, channels=3, size=32),
    "vgg": lambda: _images(vgg11(), n=16, channels=3, size=32),
    "depthwise": lambda: _images(depthwise_net(), n=32, channels=3, size=32),
    "vit": lambda: _images(ViT(32, 4, width=192, depth=4, heads=3, classes=10), n=16, channels=3, size=32),
    "gpt": lambda: _tokens(GPT(4096, 128, width=256, depth=4, heads=4), n=8, t=128, vocab=4096),
    "gpt_tied": lambda: _tokens(GPT(4096, 128, width=256, depth=4, heads=4, tied=True), n=8, t=128, vocab=4096),
    "gpt_long": lambda: _tokens(GPT(4096, 1024, width=128, depth=2, heads=4), n=2, t=1024, vocab=4096),
    "lora": lambda: _tokens(add_lora(GPT(4096, 256, width=256, depth=4, heads=4), rank=8), n=4, t=256, vocab=4096),
    "embedding": lambda: _texts(EmbeddingClassifier(20000, 64, 10), n=64, t=64, vocab=20000, classes=10),
    "embedding_1024": lambda: _texts(EmbeddingClassifier(20000, 64, 10), n=1024, t=64, vocab=20000, classes=10),
    "lstm": lambda: _texts(LSTMClassifier(10000, 64, 128, 2), n=64, t=64, vocab=10000, classes=2),
    # measures the fixed cost of a call: arithmetic takes next to no time here
    "tiny": lambda: _vector(_mlp(4, 8, 2), n=4, width=4, classes=2),
}

# Sizes that people train on an accelerator.
LARGE: dict[str, Callable[[], Workload]] = {
    "resnet18": lambda: _images(_resnet18(), n=256, channels=3, size=224, classes=1000),
    "vit_b16": lambda: _images(ViT(224, 16, width=768, depth=12, heads=12, classes=1000), 64, 3, 224, classes=1000),
    "gpt2": lambda: _tokens(GPT(50257, 512, width=768, depth=12, heads=12), n=32, t=512, vocab=50257),
    "gpt2_tied": lambda: _tokens(GPT(50257, 512, width=768, depth=12, heads=12, tied=True), 32, 512, vocab=50257),
    "embedding_million": lambda: _texts(EmbeddingClassifier(1_000_000, 64, 10), 256, 64, vocab=1_000_000, classes=10),
}


def build(
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_samples: int | None = None,
) -> Workload:
    """The named workload, always from the same seed, on a device and with its floating-point tensors in a dtype."""
    builders = WORKLOADS | LARGE
    if name not in builders:
        raise SystemExit(f"unknown workload {name!r}: choose from {', '.join(builders)}")
    torch.manual_seed(0)
    model, criterion, batch = builders[name]()
    batch = tuple(x[:max_samples].to(device, dtype if x.is_floating_point() else None) for x in batch)
    return Workload(model.to(device, dtype), criterion, batch)
