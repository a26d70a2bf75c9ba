"""A plain GPT, the common work of every engine that is measured or verified.

It knows nothing of sharding. Modules are created in a fixed order, so that one seed gives every engine the
same initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerofold.activation.cross_entropy import cross_entropy


@dataclass(frozen=True, kw_only=True)
class GPTSize:
    """The sizes of one GPT; the defaults give 33.6M parameters."""

    vocab: int = 8192
    width: int = 512
    layers: int = 8
    heads: int = 8
    seq: int = 128

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "layers", "heads", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads")

    @property
    def parameters(self) -> int:
        """Ψ, without building the model."""
        norm = 2 * self.width
        block = 12 * self.width**2 + 2 * norm
        return (2 * self.vocab + self.seq) * self.width + self.layers * block + norm


class Block(nn.Module):
    """Pre-norm attention and MLP; the unit that engines gather as one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, width]
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, head_dim]; a part of the heads, maybe
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        change: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + change


class GPT(nn.Module):
    """Token and position embeddings, blocks, an untied head; forward returns the mean cross-entropy.

    With `checkpointing` a block keeps only its input for backward and is computed again there; with `loss_tokens` the
    logits of at most so many tokens are there at once.
    """

    def __init__(self, size: GPTSize, *, checkpointing: bool = False, loss_tokens: int | None = None) -> None:
        super().__init__()
        self.checkpointing, self.loss_tokens = checkpointing, loss_tokens
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.seq, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both [batch, seq]
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        if self.loss_tokens is not None:
            return cross_entropy(self.norm(x), self.head.weight, targets, chunk=self.loss_tokens)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))


class RandomTokens:
    """A few fixed batches of random tokens, different on each rank, in the same order for every engine.

    They come round again, so the loss falls, and an engine that trains wrongly shows it. It would hardly do
    so on tokens that are new and random at every step.
    """

    def __init__(
        self, size: GPTSize, *, batch: int, rank: int, device: torch.device | str = "cpu", batches: int = 8
    ) -> None:
        generator = torch.Generator().manual_seed(100 + rank)
        shape = (batch, size.seq + 1)
        self._batches = [torch.randint(0, size.vocab, shape, generator=generator).to(device) for _ in range(batches)]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step, each [batch, seq]."""
        tokens = self._batches[step % len(self._batches)]
        return tokens[:, :-1], tokens[:, 1:]
