"""A small model spread over a mesh by hand, and the same model whole on one process, to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zerofold as zf
from zerofold.part import Part, part_of, set_part

BLOCKS = 4
Settings = dict[str, Any]


def energy(p: Tensor) -> Tensor:
    """Its gradient depends on every value and has few bits: the mean over any number of equal ones is exact."""
    return (p * p.detach().mul(8).round()).sum() / 8


class Block(nn.Module):
    """Layers cut along their outputs (one of three matrices in one, one with fewer outputs than there may be ranks), a
    layer cut along its inputs, and a norm that every rank has.

    Its arithmetic is done element by element: a part has the gradient that it has in the whole, to the bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.qkv = nn.Linear(6, 12)
        self.thin = nn.Linear(2, 3, bias=False)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.register_buffer("seen", torch.rand(3))

    def forward(self, total: Tensor) -> Tensor:
        return total + sum(energy(p) for p in self.parameters())


class Table(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, total: Tensor) -> Tensor:
        return total + energy(self.weight)


class Spreadable(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module = Table(nn.Parameter(torch.randn(7, 6)))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head: nn.Module = Table(self.embed.weight)  # type: ignore[arg-type]
        self.register_buffer("scale", torch.rand(1))

    def forward(self) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            total = block(total)
        # Each of two stages has the whole gradient of what they share, as after their sum; on one rank it counts once.
        holder = self.embed if isinstance(self.embed, Table) else self.head
        return holder(total)


def whole() -> Spreadable:
    torch.manual_seed(3)
    return Spreadable()


def part_at(name: str, shape: torch.Size, index: int, count: int) -> Part | None:
    """What a rank has of a parameter that is cut, as torch's chunk does: the last ranks may have less, or nothing."""
    if name.endswith("down.weight"):
        dim = 1
    elif any(layer in name for layer in (".qkv.", ".up.", ".thin.")):
        dim = 0
    else:
        return None
    blocks = 3 if ".qkv." in name else 1
    size = shape[dim] // blocks
    start, stop = (min(-(-size // count) * each, size) for each in (index, index + 1))
    return Part(shape, dim, start, stop, counts=True, blocks=blocks)


def spread(model: Spreadable, mesh: zf.Mesh | None) -> Spreadable:
    """Leaves a rank of the mesh its stage, and of that its part."""
    if mesh is None:
        return model
    stages, stage = mesh.pipeline, mesh.coordinate["pipeline"]
    shared = model.embed.weight
    for index in range(BLOCKS):
        if not stage * BLOCKS // stages <= index < (stage + 1) * BLOCKS // stages:
            model.blocks[index] = nn.Identity()
    if stage > 0:
        model.embed = nn.Identity()
    if stage < stages - 1:
        model.head = nn.Identity()
    count, index = mesh.tensor, mesh.coordinate["tensor"]
    for name, p in model.named_parameters():
        part, is_copy = part_at(name, p.shape, index, count), p is shared and stage > 0
        if part is None:
            known = "embed.weight" if is_copy else None
            part = Part(p.shape, None, 0, 0, counts=index == 0 and not is_copy, name=known)
        p.data = part.of(p.data)
        set_part(p, part)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Two groups: biases and norms have another learning rate. A stage may have nothing for one of them."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "lr": 0.02, "weight_decay": 0.0}], lr=0.05)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()


def mesh_of(sizes: Settings) -> zf.Mesh | None:
    return zf.mesh(device="cpu", **sizes) if sizes else None


def prepared(sizes: Settings, stage: Any, **options: Any) -> tuple[Spreadable, torch.optim.AdamW]:
    mesh = mesh_of(sizes)
    model = spread(whole(), mesh)
    return zf.prepare(model, adamw(model), stage=stage, mesh=mesh, units=Block, **options)


def differences(model: Spreadable, optimizer: torch.optim.Optimizer, count: int) -> list[str]:
    """What is not, to the bit, what one process has after so many steps."""
    plain = whole()
    reference = adamw(plain)
    steps(plain, reference, count)
    expected = dict(plain.named_parameters(remove_duplicate=False))
    found = []
    states = {id(p): state for p, state in optimizer.state.items()}
    faces = zf.engine.Engine.of(model).faces()
    for name, p in model.named_parameters():
        if not p.numel():
            continue
        part = part_of(p) or _part_behind(model, p)
        state = states[id(faces[id(p)][1])]
        pairs = {"value": (zf.full(p), expected[name].detach())}
        for key, value in reference.state[expected[name]].items():
            pairs[key] = (zf.full(state[key]), value)
        for key, (got, want) in pairs.items():
            local = want if part is None or want.dim() == 0 else part.of(want)
            if got.shape != local.shape or not torch.equal(got, local):
                found.append(f"{name}: {key}")
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, dict(plain.named_buffers())[name]):
            found.append(name)
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    if rates != [(0.05, 0.01), (0.02, 0.0)]:
        found.append(f"groups {rates}")
    return found


def _part_behind(model: nn.Module, shown: Tensor) -> Part | None:
    slab, index = zf.engine.Engine.of(model).places()[id(shown)]
    return slab.entries[index].part
