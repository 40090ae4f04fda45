"""ResNet-50, GPT-2 and BERT in torch, as a careful user writes them for one GPU.

The benchmark train_step compares jaxmp with these models. They compute the same functions with the same params as the
models of :mod:`experiments.models`, and a test checks this with converted weights. The torch models have a single
product for query, key and value, torch's fused attention, and tied embeddings.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import jaxmp
from experiments.benchmarks.models.workloads import LAST_SCALE, Workload


class Attention(nn.Module):
    """A layer of attention, from (batch, tokens, width) to the same shape."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, head width)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and a perceptron.

    The causal block of GPT-2 normalises inputs; BERT's block normalises results.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        eps = 1e-5 if causal else 1e-12
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.attention, self.causal = Attention(width, heads, causal), causal
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.causal:
            x = x + self.attention(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    """The common part of GPT-2 and BERT. The embeddings are also the output layer."""

    def __init__(self, vocabulary: int, sequence: int, layers: int, width: int, causal: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, width // 64, causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-5 if causal else 1e-12)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class GPT2(Transformer):
    """A model from tokens (batch, tokens) to the logits of the next tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.body(x)), self.embed.weight)


class BERT(Transformer):
    """A model from tokens (batch, tokens) to the logits of each position's token."""

    def __init__(self, vocabulary: int, sequence: int, layers: int, width: int, causal: bool) -> None:
        super().__init__(vocabulary, sequence, layers, width, causal)
        self.types = nn.Embedding(2, width)
        self.head, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]] + self.types.weight[0]
        x = self.head_norm(F.gelu(self.head(self.body(self.norm(x)))))
        return F.linear(x, self.embed.weight, self.bias)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with a shortcut.

    The result has four times ``width`` channels. The 3×3 convolution has the stride (v1.5).
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = _conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = _conv(width, out, 1), nn.BatchNorm2d(out)
        nn.init.constant_(self.norm3.weight, LAST_SCALE)
        self.shortcut = (
            nn.Sequential(_conv(channels, out, 1, stride), nn.BatchNorm2d(out))
            if stride > 1 or channels != out
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A model from images (batch, 3, height, width) to logits (batch, classes).

    :func:`build` converts it to channels-last.
    """

    def __init__(self, stages: tuple[int, ...], classes: int, width: int) -> None:
        super().__init__()
        self.stem, self.norm = _conv(3, width, 7, 2), nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(stages):
            for i in range(count):
                blocks.append(Bottleneck(channels, width * 2**stage, stride=2 if stage and i == 0 else 1))
                channels = 4 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.dense = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        return self.dense(self.blocks(x).mean((2, 3)))


def build(case: Workload) -> nn.Module:
    """Return a workload's model with fresh float32 params on the CPU.

    The vocabulary is padded to a multiple of 64 for speed. The padding is treated like other tokens.
    """
    sizes = case.sizes
    if case.images:
        return ResNet(sizes.stages, sizes.vocabulary, sizes.width).to(memory_format=torch.channels_last)
    kind, vocabulary = GPT2 if case.name == "gpt2" else BERT, jaxmp.hardware.align_dim(sizes.vocabulary, 64)
    model = kind(vocabulary, sizes.length, sizes.layers, sizes.width, causal=case.name == "gpt2")
    return model.apply(_normal)


def loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over examples or tokens.

    The loss is float32 even under autocast.
    """
    logits = model(inputs)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def _conv(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _normal(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
