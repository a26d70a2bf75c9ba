"""Shapes, machines and small models for tests of the plan: GPTs by their numbers, the H200 that figures were measured
on, and models whose parameters are frozen, tied, or in units inside units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerofold.plan.machine import GB, GIB, Link
from zerofold.plan.presets import preset
from zerofold.plan.shape import ModelShape
from zerofold.plan.transformer import GPTNumbers, from_numbers

H200 = replace(
    preset("H200"),
    device_memory=139 * GIB,
    host_memory=125 * GIB,
    disk=1000 * GB,
    inside=Link(rate=450 * GB, latency=3e-6),
    across=Link(rate=50 * GB, latency=8e-6),
    host_update=3.3e9,
    disk_read=3.1 * GB,
    disk_write=3.0 * GB,
)


def gpt(
    *,
    layers: int,
    hidden: int,
    heads: int | None = None,
    vocab: int = 32768,
    tokens: int = 1024,
    intervals: tuple[int, ...] = (0, 1),
    precision: str = "bf16",
) -> ModelShape:
    """With as many of the intervals of checkpoints as a test wants to look at."""
    heads = heads or max(1, hidden // 128)
    size = GPTNumbers(layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=tokens)
    model = from_numbers(size, precision=precision, checkpoint_every=intervals)
    known = tuple(each for each in model.activities if each.checkpoint_every in intervals)
    return replace(model, activities=known)


class Step(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Adapter(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.down = nn.Linear(width, width).requires_grad_(False), nn.Linear(width, 3, bias=False)
        self.up = nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Outer(nn.Module):
    """Units inside a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.steps, self.last = nn.Sequential(Step(width), Step(width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.steps(x))


class Residual(nn.Module):
    """Tokens and targets in, a loss out."""

    def __init__(self, blocks: Sequence[nn.Module], *, width: int, vocab: int, frozen: bool, tied: bool) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(vocab, width).requires_grad_(not frozen), nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def adapters(*, width: int = 72, vocab: int = 96, frozen: bool = True, tied: bool = False) -> nn.Module:
    blocks = [Adapter(width), Adapter(width), Step(width), Adapter(width), Adapter(width)]
    return Residual(blocks, width=width, vocab=vocab, frozen=frozen, tied=tied)


def nested() -> nn.Module:
    return Residual([Outer(40) for _ in range(3)], width=40, vocab=96, frozen=False, tied=False)
