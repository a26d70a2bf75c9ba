"""Small models and the reference runs that parity is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import zerofold as zf

VOCABULARY, SEQUENCE = 96, 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int, key_bias: bool) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=key_bias), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Returns the loss; a width that is no multiple of 32 puts padding into every slab.

    The gradient of a key bias is zero but for rounding, and Adam makes full-sized steps out of that noise, so two
    runs that differ in one bit anywhere part by far more in it: `key_bias=False` leaves it out.
    """

    def __init__(self, width: int = 40, layers: int = 3, checkpoint: str = "none", key_bias: bool = True) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width, 2, key_bias) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, indices: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(indices) + self.positions(torch.arange(indices.shape[1], device=indices.device))
        for block in self.blocks:
            if self.checkpoint == "none":
                x = block(x)
            else:
                reentrant = self.checkpoint == "reentrant"
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCABULARY), targets.reshape(-1))


def batches(count: int, *, rank: int | None = None, size: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    """The data of one rank: the same for every engine, different between ranks."""
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if rank is None else rank))
    for _ in range(count):
        data = torch.randint(0, VOCABULARY, (size, SEQUENCE + 1), generator=generator)
        yield data[:, :-1], data[:, 1:]


def make_model(**options: Any) -> TinyGPT:
    torch.manual_seed(1)
    return TinyGPT(**options)


OptimizerMaker = Callable[[Any], torch.optim.Optimizer]


def train_ddp(
    make_optimizer: OptimizerMaker,
    steps: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    model_options: dict[str, Any] | None = None,
) -> tuple[list[Tensor], list[float]]:
    """Weights and losses of torch's own DistributedDataParallel with the plain optimizer."""
    model = make_model(**(model_options or {}))
    wrapped = DistributedDataParallel(model)
    optimizer = make_optimizer(wrapped.parameters())
    losses = []
    for number, batch in enumerate(batches(steps * accumulate)):
        last = (number + 1) % accumulate == 0
        with nullcontext() if last else wrapped.no_sync():
            loss = wrapped(*batch)
            loss.backward()
        losses.append(loss.item())
        if last:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(wrapped.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], losses


def train_zerofold(
    make_optimizer: OptimizerMaker,
    steps: int,
    *,
    stage: int,
    accumulate: int = 1,
    use_no_sync: bool = True,
    clip: float | None = None,
    model_options: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[Tensor], list[float]]:
    """The same run through zf.prepare."""
    model = make_model(**(model_options or {}))
    model, optimizer = zf.prepare(model, make_optimizer(model.parameters()), stage=stage, clip=clip, **settings)
    losses = []
    for number, batch in enumerate(batches(steps * accumulate)):
        last = (number + 1) % accumulate == 0
        with nullcontext() if last or not use_no_sync else zf.no_sync(model):
            loss = model(*batch)
            loss.backward()
        losses.append(loss.item())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    with zf.full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
    zf.close(model)
    return weights, losses


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))
