"""The process groups of one model: who gathers, reduces and agrees with whom, from the row and the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerofold.comm import ALONE, CONTROL, Comm
from zerofold.placement import ACROSS, AXES, INSIDE, Row
from zerofold.traffic import Traffic

MODEL = "model"
"""The group of those who hold one copy of the model between them."""
JOB = "job"
"""The group of all who train it."""


@dataclass(frozen=True)
class Groups:
    """Gathers follow the forward, reductions their own order, and agreements (a few numbers on the CPU) must get
    through while either is under way: three groups over the same ranks, so that none waits for another's order.
    """

    everyone: Comm  # all ranks of the mesh: first values, buffers
    gather: Comm  # those who share the parameters, or, where these are whole, their updates
    reduce: Comm  # those who share the update of the same copy
    across: Comm | None  # those who hold the same range in other groups
    copy: Comm | None  # those who share the second copy of the parameters
    control: Comm  # all ranks of the mesh, for agreements
    model: Comm | None  # those who hold the other parts of this copy of the model, for agreements
    job: Comm  # all who train this model: what `control` is where no other axis splits it
    mesh: DeviceMesh | None
    made: tuple[dist.ProcessGroup, ...]
    blocks: Tensor | None = None  # all such meshes, where all ranks have one and make their groups together

    @classmethod
    def make(
        cls,
        mesh: DeviceMesh | None,
        row: Row,
        control: Comm,
        device: torch.device,
        model: Comm | None = None,
        job: Comm | None = None,
        blocks: Tensor | None = None,
    ) -> Groups:
        maker = _Maker(mesh, control, device, blocks)
        gathered = row.parameters if row.parameters.is_cut else row.optimizer
        everyone = maker.shared(AXES)
        gather = maker.shared(gathered.axes or AXES)
        across = maker.shared(row.optimizer.other_axes) if row.reduces_across else None
        return cls(
            everyone,
            gather,
            maker.new(row.optimizer.axes or AXES),
            across if across is not None and across.size > 1 else None,
            None if row.copy is None else maker.smaller(row.copy.axes),
            control,
            model,
            job or control,
            mesh,
            tuple(maker.made),
            blocks,
        )

    def destroy(self) -> None:
        others = () if self.model is None else (self.model.group, self.job.group)
        destroy(self.mesh, (*self.made, self.control.group, *others), self.blocks)
        comms = (self.everyone, self.gather, self.reduce, self.across, self.copy, self.control, self.model, self.job)
        for comm in comms:
            if comm is not None:
                comm.latest = None  # which leads back to it: sockets would wait for the garbage collector


class _Maker:
    """Finds or makes a group for mesh axes; one that exists and has the right ranks is shared."""

    def __init__(self, mesh: DeviceMesh | None, control: Comm, device: torch.device, blocks: Tensor | None) -> None:
        self.mesh, self.control, self.device, self.blocks = mesh, control, device, blocks
        self.backend = _any_group(mesh)._get_backend(device).name()
        self.made: list[dist.ProcessGroup] = []
        self._shared: dict[tuple[int, ...], Comm] = {}

    def ranks(self, axes: tuple[str, ...]) -> list[int]:
        return ranks_along(self.mesh, axes)

    def shared(self, axes: tuple[str, ...]) -> Comm:
        ranks = tuple(self.ranks(axes))
        if ranks not in self._shared:
            existing = _existing(self.mesh, list(ranks))
            self._shared[ranks] = self._comm(axes, existing) if existing is not None else self.new(axes)
        return self._shared[ranks]

    def smaller(self, axes: tuple[str, ...]) -> Comm | None:
        """None where the axes hold all ranks: a copy cut like the parameters themselves would save nothing."""
        return self.shared(axes) if len(self.ranks(axes)) < self.control.size else None

    def new(self, axes: tuple[str, ...]) -> Comm:
        group = _new_group(self.mesh, axes, self.backend, self.blocks)
        self.made.append(group)
        return self._comm(axes, group)

    def _comm(self, axes: tuple[str, ...], group: dist.ProcessGroup) -> Comm:
        is_all = len(self.ranks(axes)) == self.control.size
        name = "all" if is_all else axes[0]
        return Comm(group, self.device, self.control.traffic, overlap=self.control.overlap, name=name)


def make_control(mesh: DeviceMesh | None, *, overlap: bool, blocks: Tensor | None = None) -> Comm:
    """Made before anything is checked: through it one rank's error becomes everybody's.

    Where one process stands for all ranks (torch's fake group, the simulator's), nobody would answer it, so it is of
    that kind too.
    """
    backend = dist.get_backend() if dist.get_backend() in ALONE else "gloo"
    return Comm(_new_group(mesh, AXES, backend, blocks), torch.device("cpu"), Traffic(), overlap=overlap, name=CONTROL)


def make_model_group(groups: list[list[int]], control: Comm) -> Comm | None:
    """Of the ranks that hold one copy of the model between them, given all such sets; None where each has all of it.

    Its few numbers are counted with those of the data axis.
    """
    if len(groups[0]) == 1:
        return None
    backend = dist.get_backend() if dist.get_backend() in ALONE else "gloo"
    made = {tuple(ranks): dist.new_group(ranks, backend=backend) for ranks in groups}
    (mine,) = [group for ranks, group in made.items() if dist.get_rank() in ranks]
    return Comm(mine, torch.device("cpu"), control.traffic, overlap=control.overlap, name=MODEL)


def make_job_group(model: Comm | None, control: Comm) -> Comm:
    """Of all who train the model, however it is split: what goes wrong on one of them stops all, not its axis alone."""
    if model is None:
        return control
    group = dist.new_group(backend="gloo" if model.is_gloo else dist.get_backend())
    return Comm(group, torch.device("cpu"), control.traffic, overlap=control.overlap, name=JOB)


def destroy(mesh: DeviceMesh | None, groups: Iterable[dist.ProcessGroup], blocks: Tensor | None = None) -> None:
    """A group made by its members alone is named after them and the number of groups there are: made anew, or after
    another one has gone, it would find the old one's addresses in the store. So those of a mesh over some of the ranks
    live on until torch.distributed itself ends, but where all ranks have made them together. Where it has ended
    before, which scripts do that clean up in the other order, so have they.
    """
    if dist.is_initialized() and (blocks is not None or _has_everyone(mesh)):
        for group in groups:
            dist.destroy_process_group(group)


def ranks_along(mesh: DeviceMesh | None, axes: tuple[str, ...]) -> list[int]:
    """This rank and those it reaches along the axes. In a mesh of one dimension all ranks are one group."""
    (found,) = [ranks for ranks in _all_along(mesh, axes) if dist.get_rank() in ranks]
    return found


def _all_along(mesh: DeviceMesh | None, axes: tuple[str, ...]) -> list[list[int]]:
    """Every group that the axes make."""
    if mesh is None:
        ranks = torch.arange(dist.get_world_size()).view(1, -1)
    else:
        ranks = mesh.mesh.view(-1, mesh.mesh.shape[-1])
    return _split(ranks, axes)


def _split(ranks: Tensor, axes: tuple[str, ...]) -> list[list[int]]:
    if ACROSS in axes and INSIDE in axes:
        return [sorted(ranks.reshape(-1).tolist())]
    if axes:
        return (ranks if INSIDE in axes else ranks.t()).tolist()
    return ranks.reshape(-1, 1).tolist()


def _has_everyone(mesh: DeviceMesh | None) -> bool:
    return mesh is None or mesh.size() == dist.get_world_size()


def _new_group(
    mesh: DeviceMesh | None, axes: tuple[str, ...], backend: str, blocks: Tensor | None
) -> dist.ProcessGroup:
    """A group of its own over these ranks. All ranks of the mesh must call it; with `blocks`, all ranks there are."""
    mine = ranks_along(mesh, axes)
    if blocks is not None:
        each = [tuple(ranks) for block in blocks for ranks in _split(block.view(-1, block.shape[-1]), axes)]
        return {ranks: dist.new_group(list(ranks), backend=backend) for ranks in each}[tuple(mine)]
    if not _has_everyone(mesh):  # other ranks do not take part, so they must not be waited for
        return dist.new_group(mine, backend=backend, use_local_synchronization=True)
    made = {tuple(ranks): dist.new_group(ranks, backend=backend) for ranks in _all_along(mesh, axes)}
    return made[tuple(mine)]


def _any_group(mesh: DeviceMesh | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if mesh is None else mesh.get_group(mesh.ndim - 1)
    assert group is not None
    return group


def _existing(mesh: DeviceMesh | None, ranks: list[int]) -> dist.ProcessGroup | None:
    candidates = [dist.group.WORLD] if mesh is None else [*mesh.get_all_groups(), dist.group.WORLD]
    for group in candidates:
        if group is not None and dist.get_process_group_ranks(group) == ranks:
            return group
    return None
