"""The models of ``cases.py`` in PyTorch, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn


def build(case: Case) -> nn.Module:
    """Returns the case's model; the same values at every call."""
    kinds: dict[str, Callable[..., nn.Module]] = {
        "mlp": mlp,
        "cnn": cnn,
        "transformer": Transformer,
        "gpt2": GPT2,
        "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
        "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
        "lstm": LSTM,
        "lstm_lm": LSTMLanguageModel,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kinds[case.model](**case.sizes)


def batch_of(case: Case, *, examples: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns random inputs and classes for that many examples; the same at every call."""
    generator = torch.Generator().manual_seed(1)
    n, sizes = examples or case.batch, case.sizes
    if case.model in ("transformer", "gpt2", "lstm_lm"):
        shape = n, sizes["tokens"]
        text = [torch.randint(sizes["vocabulary"], shape, generator=generator) for _ in "xy"]
        return text[0], text[1]
    if case.model == "mlp":
        x = torch.randn(n, sizes["width"], generator=generator)
        return x, torch.randint(sizes["width"], (n,), generator=generator)
    if case.model == "lstm":
        x = torch.randn(n, sizes["tokens"], sizes["width"], generator=generator)
        shape = n, sizes["tokens"]
        return x, torch.randint(sizes["classes"], shape, generator=generator)
    channels = 1 if case.model == "cnn" else 3
    x = torch.randn(n, channels, sizes["size"], sizes["size"], generator=generator)
    return x, torch.randint(sizes["classes"], (n,), generator=generator)


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Returns the mean cross entropy, over examples or over tokens."""
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten())


def mlp(depth: int, width: int) -> nn.Sequential:
    """As many linear layers, with ReLU between them."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn(size: int, channels: int, hidden: int, classes: int) -> nn.Sequential:
    """Two convolutions of 3x3 without padding, each with ReLU and 2x2 pooling; two layers."""
    left = ((size - 2) // 2 - 2) // 2
    return nn.Sequential(
        nn.Conv2d(1, channels, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * left * left, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


class LSTM(nn.Module):
    """Two recurrent layers, and a linear one for each step of the sequence."""

    def __init__(self, width: int, tokens: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class LSTMLanguageModel(nn.Module):
    """An embedding, two recurrent layers, and a linear one for each step of the sequence."""

    def __init__(self, width: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class Transformer(nn.Module):
    """A causal language model: learned positions, pre-norm blocks, no dropout."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(x) + self.positions)))


class GPT2(Transformer):
    """GPT-2 (Radford et al., 2019) without dropout: the head is the embedding, transposed."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> None:
        super().__init__(layers, width, heads, tokens, vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight


class Block(nn.Module):
    """Causal attention and two linear layers, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class ResNet(nn.Module):
    """ResNet (He et al., 2015); width 64 is the paper's.

    Args:
        block: makes a block of so many channels in and inside, with a stride.
        counts: the number of blocks of each stage.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        counts: Sequence[int],
        *,
        size: int,
        width: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(counts):
            inner = width * 2**stage
            for i in range(count):
                blocks.append(block(channels, inner, stride=2 if stage and not i else 1))
                channels = block.expansion * inner
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


class Residual(nn.Module):
    """A path, and a shortcut, which is a convolution of 1x1 where the shape changes."""

    def __init__(self, path: nn.Module, channels: int, outer: int, stride: int) -> None:
        super().__init__()
        self.path = path
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


class BasicBlock(Residual):
    """Two convolutions of 3x3."""

    expansion = 1

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        path = nn.Sequential(
            nn.Conv2d(channels, inner, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            nn.BatchNorm2d(inner),
        )
        super().__init__(path, channels, inner, stride)


class Bottleneck(Residual):
    """Convolutions of 1x1, 3x3 and 1x1."""

    expansion = 4

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        outer = self.expansion * inner
        path = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        super().__init__(path, channels, outer, stride)
