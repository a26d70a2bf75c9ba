"""A small GPT in plain torch. Nothing in it knows that it will be sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    layers: int = 4
    hidden: int = 192
    heads: int = 6
    seq: int = 128
    """Longest sequence, in bytes."""
    vocab: int = 256
    """Every byte is a token, so there is no tokenizer."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.hidden % (2 * self.heads):
            fitting = max(2 * self.heads, round(self.hidden / (2 * self.heads)) * 2 * self.heads)
            raise ValueError(
                f"hidden {self.hidden} does not split into {self.heads} heads of even width: "
                f"use hidden {fitting}, or another number of heads"
            )


class Block(nn.Module):
    """The repeated unit: attention, then an MLP, each on normalised input and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.head_dim = hidden // config.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden, bias=False)
        self.mlp_out = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def attention(self, x: Tensor, rotation: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)  # each [batch, heads, seq, head_dim]; a part of the heads, maybe
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Bytes in, the loss out (or the logits, when no targets are given)."""

    rotation: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.register_buffer("rotation", rotations(config.seq, config.hidden // config.heads), persistent=False)
        self.apply(self._initialise)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:  # both [batch, seq]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[:, : tokens.shape[1]])
        logits = self.head(self.norm(x))
        if targets is None:
            return logits  # [batch, seq, vocab]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            # What a block adds starts small in proportion to depth, so the stream does not grow with it.
            for layer in (module.attention_out, module.mlp_out):
                nn.init.normal_(layer.weight, std=0.02 / (2 * self.config.layers) ** 0.5)


def rotations(seq: int, width: int) -> Tensor:
    """Cosines and sines of the rotary position embedding, [2, seq, width / 2]."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(seq), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of channels by an angle that grows with position; x is [batch, heads, seq, width]."""
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, length: int, *, seq: int, seed: int, device: torch.device) -> bytes:
    """`length` more bytes after the prompt, drawn from the model's own distribution, a little sharpened.

    Where parameters are cut every rank must call this together; the same seed keeps them on the same bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        window = torch.tensor([text[-seq:]], device=device)
        logits = model(window)[0, -1].float().cpu()
        text.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)))
    return bytes(text)
