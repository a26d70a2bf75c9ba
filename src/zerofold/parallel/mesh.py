"""`zf.mesh`: which ranks share data, layers' insides and layers, over torch's DeviceMesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PIPELINE, REPLICATE, DATA, TENSOR = AXES = ("pipeline", "replicate", "data", "tensor")
"""From the axis that sends the least to the one that sends the most: neighbours have the fastest wires."""

_CARRIES = {
    PIPELINE: "activations from stage to stage",
    REPLICATE: "states between groups of ZeRO",
    DATA: "parameters and gradients (ZeRO)",
    TENSOR: "activations inside every layer",
}
_SHOWN_GROUPS = 8


@dataclass(frozen=True)
class Mesh:
    """Ranks in a block of four axes, as `zf.mesh` makes it. Printed, it is a table of who talks to whom.

    >>> import zerofold as zf
    >>> made = zf.mesh(data=1)
    >>> made.data, made.tensor, made.coordinate["pipeline"]
    (1, 1, 0)
    """

    device_mesh: DeviceMesh

    def __post_init__(self) -> None:
        if getattr(self.device_mesh, "mesh_dim_names", None) != AXES:
            raise TypeError(f"a Mesh has the axes {', '.join(AXES)}: make it with zf.mesh(data=…, tensor=…)")

    def size(self, axis: str) -> int:
        return self.device_mesh.size(AXES.index(axis))

    @property
    def data(self) -> int:
        return self.size(DATA)

    @property
    def tensor(self) -> int:
        return self.size(TENSOR)

    @property
    def pipeline(self) -> int:
        return self.size(PIPELINE)

    @property
    def replicate(self) -> int:
        return self.size(REPLICATE)

    @property
    def coordinate(self) -> dict[str, int]:
        """Of this rank, by axis."""
        found = self.device_mesh.get_coordinate()
        assert found is not None, "zf.mesh spans all ranks"
        return dict(zip(AXES, found, strict=True))

    @property
    def zero(self) -> DeviceMesh:
        """What ZeRO places states over: the ranks that hold the same part of the model."""
        return self.device_mesh[DATA] if self.replicate == 1 else self.device_mesh[REPLICATE, DATA]

    @property
    def all_zero(self) -> torch.Tensor:
        """Every such mesh as a block of ranks, along the first dimension: all ranks make the groups of all of them."""
        ranks = self.device_mesh.mesh.movedim(AXES.index(TENSOR), 1).flatten(0, 1)  # pipeline x tensor, replicate, data
        return ranks.squeeze(1) if self.replicate == 1 else ranks

    def along(self, axis: str) -> DeviceMesh:
        """This rank and those that differ from it in this axis alone."""
        return self.device_mesh[axis]

    def groups(self, *axes: str) -> list[list[int]]:
        """Every set of ranks that differ in these axes alone."""
        moved = [AXES.index(axis) for axis in axes]
        ranks = self.device_mesh.mesh.movedim(moved, list(range(-len(moved), 0)))
        return ranks.reshape(-1, *ranks.shape[-len(moved) :]).flatten(1).tolist()

    def __str__(self) -> str:
        used = [axis for axis in AXES if self.size(axis) > 1]
        ranks = self.device_mesh.size()
        shape = " x ".join(f"{axis} {self.size(axis)}" for axis in used)
        lines = [f"{ranks} ranks: {shape}" if used else f"{ranks} rank"]
        if used:
            lines.append(f"{'axis':<10} {'ranks':>6}  {'carries':<32}  groups")
        for axis in used:
            groups = self.groups(axis)
            shown = " | ".join(" ".join(map(str, group)) for group in groups[:_SHOWN_GROUPS])
            more = f" | and {len(groups) - _SHOWN_GROUPS} more" if len(groups) > _SHOWN_GROUPS else ""
            lines.append(f"{axis:<10} {self.size(axis):>6}  {_CARRIES[axis]:<32}  {shown}{more}")
        return "\n".join(lines)


def mesh(
    data: int | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    replicate: int = 1,
    *,
    device: str | None = None,
) -> Mesh:
    """All ranks as pipeline x replicate x data x tensor; `data` left out takes the ranks that remain.

    data       ranks with other samples, over which ZeRO cuts the states
    tensor     ranks that share the inside of every layer; neighbours, so that they are in one machine
    pipeline   ranks that follow each other, each with some of the layers
    replicate  groups, each with a data axis, for stage="hsdp" and "hpz"
    device     "cuda", "cpu", …; by default the accelerator if there is one

    >>> import zerofold as zf
    >>> print(zf.mesh(data=1))
    1 rank
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group yet: start the script with torchrun (or zerofold launch) and call "
            "torch.distributed.init_process_group() before zf.mesh"
        )
    given = {PIPELINE: pipeline, REPLICATE: replicate, TENSOR: tensor, DATA: 1 if data is None else data}
    for axis, size in given.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{axis}={size!r} must be a number of ranks, at least 1")
    world, others = dist.get_world_size(), pipeline * replicate * tensor
    if data is None and world % others == 0:
        data = world // others
    if data is None or data * others != world:
        product = " x ".join(f"{axis} {given[axis]}" for axis in AXES if given[axis] > 1 or axis == DATA)
        fix = (
            f"leave data out to get {world // others}"
            if world % others == 0
            else f"choose axes whose product divides {world}"
        )
        asked = product if data is not None else product.replace(f"{DATA} 1", f"{DATA} ?")
        raise ValueError(f"{asked} does not make {world} ranks, as many as there are: {fix}")
    _check_device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = device or ("cpu" if accelerator is None else accelerator.type)
    made = Mesh(init_device_mesh(kind, (pipeline, replicate, data, tensor), mesh_dim_names=AXES))
    _check_same_on_all_ranks(made)
    return made


def _check_device(device: object) -> None:
    try:
        is_kind = device is None or (isinstance(device, str) and torch.device(device).type == device)
    except RuntimeError:  # of a name that torch does not know
        is_kind = False
    if not is_kind:
        raise ValueError(f"device={device!r} must be a kind of device, 'cuda' or 'cpu', or left out to find one")


def _check_same_on_all_ranks(made: Mesh) -> None:
    """Ranks with other groups than their neighbours would wait for each other for ever, or add up what differs."""
    world = dist.get_world_size()
    if world == 1 or dist.get_backend() == "fake":  # where nobody answers
        return
    shapes: list[str] = [""] * world
    dist.all_gather_object(shapes, " x ".join(f"{axis} {made.size(axis)}" for axis in AXES))
    odd = next((rank for rank, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None:
        raise ValueError(
            f"zf.mesh: rank 0 asks for {shapes[0]}, rank {odd} for {shapes[odd]}: call it with the same numbers on "
            "every rank"
        )
