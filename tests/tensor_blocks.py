"""Blocks whose insides tensor ranks share, as Megatron writes them: a linear cut by columns, one by rows, and an
all-reduce behind it. The stream between blocks is the same on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zerofold as zf
from zerofold.part import Part, set_part

WIDTH, LAYERS, ROWS = 16, 4, 12


class Ring:
    """The group of the tensor ranks, and what was reduced over it, in elements."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.reduced = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.reduced += tensor.numel()
        result = tensor.clone()
        dist.all_reduce(result, group=self.group)
        return result


class _Enter(torch.autograd.Function):
    """Into a layer that is cut: every rank makes a part of the input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ring.all_reduce(gradient), None


class _Leave(torch.autograd.Function):
    """Out of it: every rank has made a part of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        return ring.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Shared(nn.Module):
    """A linear by columns and one by rows."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self.ring = ring
        self.norm = nn.LayerNorm(WIDTH)
        self.columns, self.rows = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        for layer, dim in ((self.columns, 0), (self.rows, 1)):
            whole, index = layer.weight.data, ring.group.rank()
            size = whole.shape[dim] // ring.group.size()
            layer.weight.data = whole.narrow(dim, index * size, size).clone()
            set_part(layer.weight, Part(whole.shape, dim, index * size, (index + 1) * size, counts=True))

    def forward(self, x: Tensor) -> Tensor:
        entered: Tensor = _Enter.apply(self.norm(x), self.ring)
        left: Tensor = _Leave.apply(self.rows(F.gelu(self.columns(entered))), self.ring)
        return x + left


class TensorBlock(nn.Module):
    """Two of them, as attention and MLP are."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self.first, self.second = Shared(ring), Shared(ring)
        self.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return F.dropout(x, self.dropout) if self.dropout else x


class TensorModel(nn.Module):
    def __init__(self, mesh: zf.Mesh, layers: int = LAYERS) -> None:
        super().__init__()
        self.ring = Ring(mesh.along("tensor").get_group())
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(TensorBlock(self.ring) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def tensor_model(mesh: zf.Mesh, layers: int = LAYERS) -> TensorModel:
    torch.manual_seed(1)
    return TensorModel(mesh, layers)


def tensor_data(mesh: zf.Mesh, count: int, rows: int = ROWS) -> list[Tensor]:
    """The same on the ranks of one tensor group, another along the data axis."""
    generator = torch.Generator().manual_seed(100 + mesh.coordinate["data"])
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]
