"""Ordinary parameters outside a module's forward, DTensors inside it.

outside     module.weight is an nn.Parameter: this rank's piece, with a `Part` that says of what. ZeRO, optimizers and
            checkpoints see nothing else.
in forward  module.__dict__["weight"] is a DTensor over it, which hides the parameter without touching it. It is
            differentiable: gradients arrive at the piece, summed over the ranks where torch's own rules say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from zerofold.part import Part, part_of, set_part


class View(NamedTuple):
    """How a module sees a parameter of its own."""

    placement: Placement
    shape: torch.Size  # of the whole
    is_local: bool = False  # as an ordinary tensor, of whose gradient each rank has a part of the sum


class Views:
    """The hooks of one module that show its parameters as DTensors while it runs."""

    def __init__(self, mesh: DeviceMesh, views: Mapping[str, View]) -> None:
        self.mesh, self.views = mesh, dict(views)

    def __deepcopy__(self, memo: object) -> Views:
        return self  # for the copy of a module too: there is one mesh

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.show)
        # always_call: neither a forward that raises nor a recomputation that stops early may leave them there.
        module.register_forward_hook(self.hide, always_call=True)

    def show(self, module: nn.Module, args: Any) -> None:
        for name, view in self.views.items():
            held = module._parameters.get(name)
            local = module._buffers[name] if held is None else held
            assert local is not None
            shown = DTensor.from_local(
                local,
                self.mesh,
                [view.placement],
                run_check=False,
                shape=view.shape,
                stride=contiguous_strides(view.shape),  # both, or uneven pieces would be taken for even ones
            )
            module.__dict__[name] = shown.to_local(grad_placements=[Partial()]) if view.is_local else shown

    def hide(self, module: nn.Module, args: Any, output: Any) -> None:
        for name in self.views:
            module.__dict__.pop(name, None)


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def cut(parameter: Tensor, mesh: DeviceMesh, dim: int, *, blocks: int = 1) -> Part:
    """Leaves this rank's even piece in the parameter, which stays the same object."""
    known = part_of(parameter)
    shape = parameter.shape if known is None else known.shape
    length = shape[dim] // (blocks * mesh.size())
    start = length * mesh.get_local_rank()
    counts = known is None or known.counts
    part = Part(shape, dim, start, start + length, counts, blocks, None if known is None else known.name)
    if known is None or known.dim is None:
        keep(parameter, part.of(parameter.detach()), part, mesh)
    elif known != part:
        raise ValueError(
            f"a parameter of shape {tuple(known.shape)} that two modules share would be cut along dimension {dim} for "
            f"one and {known.dim} for the other: leave one of them out of plan="
        )
    return part


def keep(parameter: Tensor, piece: Tensor, part: Part, mesh: DeviceMesh) -> None:
    assert piece.shape == part.local_shape, f"{tuple(piece.shape)} is no {part}"
    parameter.grad = None
    parameter.data = piece
    set_part(parameter, part, mesh.get_group())


def is_in_a_graph(parameter: Tensor) -> bool:
    """Whether the graph of an earlier forward is alive that ends in the parameter, and remembers its shape.

    Autograd keeps the node of a leaf as long as some graph holds it, and makes another afterwards: a mark that is
    still there when it is asked for again tells.
    """
    if not parameter.requires_grad or parameter.device.type == "meta":
        return False
    marks: Any = get_gradient_edge(parameter).node.metadata  # a dict; torch declares a method
    marks["zerofold"] = "seen"
    marks = get_gradient_edge(parameter).node.metadata
    return "zerofold" in marks


def part_of_placement(shape: torch.Size, placement: Placement, mesh: DeviceMesh) -> Part:
    """Which part of the whole this rank has, as torch cuts it."""
    index, ranks = mesh.get_local_rank(), mesh.size()
    if isinstance(placement, Replicate):
        return Part(shape, None, 0, shape[0] if shape else 0, counts=index == 0)
    if type(placement) is not Shard:  # strided ones as well, which are Shards to isinstance
        raise ValueError(
            f"a parameter of shape {tuple(shape)} is placed as {placement} over the tensor axis: zerofold takes "
            "Shard(dim) and Replicate() there"
        )
    dim = placement.dim % len(shape)
    length = -(-shape[dim] // ranks)  # torch's chunk: full ones first
    start = min(index * length, shape[dim])
    return Part(shape, dim, start, min(start + length, shape[dim]), counts=True)
