"""A slab: parameters of one unit with the same dtype and requires_grad, end to end in one flat space.

slab of a unit, rank 1 of 3                     parameters whole            parameters cut

storage  | p0 | p1     | p2 |                   always there                only while in use
shard         |-- own --|                       a view of the storage       memory of its own, copied in to gather
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerofold.comm import Comm, Handle
from zerofold.gradients import CutGradients, Gradients, WholeGradients
from zerofold.groups import Groups
from zerofold.layout import FlatLayout
from zerofold.memory import FlatStorage, StorageCache
from zerofold.placement import Row
from zerofold.sharded import ShardedParameter, ShardSpec, StepScope


@dataclass
class Entry:
    """One parameter with every place (module, attribute) that holds it."""

    name: str
    parameter: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    owner: int = 0  # where the row gives parameters owners
    face: ShardedParameter | None = None  # what stands for it outside its unit and in optimizers, once it is cut

    @property
    def wants_gradient(self) -> bool:
        """By what the model shows of it now, which is what a user freezes and thaws."""
        shown = [module._parameters.get(attribute) for module, attribute in self.sites]
        return any(p is not None and p.requires_grad for p in shown)


class Home(NamedTuple):
    """What all slabs of a model share."""

    row: Row
    groups: Groups
    device: torch.device
    cache: StorageCache
    step: StepScope


def lay_out(entries: list[Entry], row: Row, world: int) -> FlatLayout:
    numels = [entry.parameter.numel() for entry in entries]
    itemsize = entries[0].parameter.element_size()
    if row.has_owners:
        return FlatLayout.by_owner(numels, [entry.owner for entry in entries], world=world, itemsize=itemsize)
    return FlatLayout.even(numels, world=world, itemsize=itemsize)


class Slab:
    """Made in two steps: the parameters' values move into the storage; then `share` deals them out to the ranks."""

    shard: Tensor
    faces: list[Tensor]
    gradients: Gradients

    def __init__(self, unit: str, entries: list[Entry], home: Home) -> None:
        self.unit, self.entries, self.home, self.comm = unit, entries, home, home.groups.gather
        self.parameters: list[Tensor] = [entry.parameter for entry in entries]
        first = entries[0].parameter
        self.requires_grad = first.requires_grad
        self.layout = lay_out(entries, home.row, self.comm.size)
        self.storage = FlatStorage(self.layout.size, first.dtype, home.device, home.cache)
        self._storage_id = self.storage.tensor.untyped_storage()._cdata
        # With one rank the shard is all there is: it stays in the storage, and gathering has nothing to do.
        self.has_own_shard = home.row.parameters.is_cut and self.comm.size > 1
        copies = home.groups.copy
        self.copy = GroupCopy(self.storage, copies) if copies is not None and self.has_own_shard else None
        self.unfilled = [index for index, p in enumerate(self.parameters) if p.is_meta]
        self.storage.tensor.zero_()
        for index, parameter in enumerate(self.parameters):
            if parameter.is_meta:
                # The same object gets memory, so whoever holds it (an optimizer) keeps holding it. `.data` has its own
                # version counter: a gather into the storage is not a change of the parameter.
                real = nn.Parameter(self.view(index).data, requires_grad=parameter.requires_grad)
                vars(real).update(vars(parameter))
                torch.utils.swap_tensors(parameter, real)
            else:
                self.view(index).copy_(parameter.detach())
                parameter.data = self.view(index)

    def share(self) -> None:
        """Every rank starts from rank 0's values, as under DDP."""
        row, groups, flat = self.home.row, self.home.groups, self.storage.tensor
        if self.has_own_shard:
            self.shard = torch.empty(self.layout.shard_size(self.comm.rank), dtype=flat.dtype, device=flat.device)
            self._deal_out(flat)
        else:
            groups.everyone.broadcast(flat, 0, unit=self.unit).wait()
            # `.data` has a version counter of its own: gathering into the storage is not a change of the shard.
            self.shard = self.own_slice(flat.data)
        self.faces = list(self.parameters)
        if row.optimizer.is_cut and (self.requires_grad or row.parameters.is_cut):
            self.faces = [self._face(index) for index in range(len(self.entries))]
        self.gradients = self._gradients(row)
        self._gathered_version = self.shard._version

    def _deal_out(self, flat: Tensor) -> None:
        groups, bounds = self.home.groups, self.layout.bounds
        if not self.home.row.has_owners:
            pieces = list(flat.chunk(self.comm.size)) if self.comm.rank == 0 else None
            self.comm.scatter(self.shard, pieces, 0, unit=self.unit).wait()
        else:  # shards of different lengths
            self.comm.broadcast(flat, 0, unit=self.unit).wait()
            self.shard.copy_(flat[bounds[self.comm.rank] : bounds[self.comm.rank + 1]])
        if groups.across is not None:  # each group has dealt out its own first rank's values
            groups.across.broadcast(self.shard, 0, unit=self.unit).wait()

    def start_gather(self) -> Handle:
        self.storage.allocate()
        flat = self.storage.tensor
        if self.is_stale:
            # A graph made before the change must not run backward with the new values: torch's own check sees it.
            torch.autograd.graph.increment_version(self.parameters)
        self._gathered_version = self.shard._version
        if self.copy is not None and self.copy.version == self.shard._version:
            return self.copy.start_gather(unit=self.unit)
        if self.has_own_shard:
            self.own_slice(flat).copy_(self.shard)
        return self.comm.all_gather(flat, self.layout.bounds, unit=self.unit)

    def gathered(self) -> None:
        """The gather is through."""
        if self.copy is not None and self.copy.version != self._gathered_version:
            self.copy.keep(self._gathered_version)

    @property
    def is_stale(self) -> bool:
        """Somebody changed the shard since it was last gathered: an optimizer, or the user by hand."""
        return self.shard._version != self._gathered_version

    def mark_changed(self) -> None:
        """Another rank has changed its shard. Whether to gather must be decided alike on all ranks."""
        torch.autograd.graph.increment_version(self.shard)

    def own_slice(self, flat: Tensor) -> Tensor:
        return flat[self.layout.bounds[self.comm.rank] : self.layout.bounds[self.comm.rank + 1]]

    def view(self, index: int) -> Tensor:
        start = self.layout.offsets[index]
        return self.storage.tensor[start : start + self.layout.numels[index]].view(self.parameters[index].shape)

    def holds(self, parameter: Tensor) -> bool:
        return parameter.untyped_storage()._cdata == self._storage_id

    def _face(self, index: int) -> ShardedParameter:
        entry, world = self.entries[index], range(self.comm.size)
        ranges = tuple((piece.start, piece.stop) for piece in (self.layout.pieces(rank)[index] for rank in world))
        has_owner = self.home.row.has_owners
        spec = ShardSpec(
            entry.name, self.unit, entry.parameter.shape, ranges, self.comm, has_owner=has_owner, step=self.home.step
        )
        piece = self.layout.pieces(self.comm.rank)[index]
        local = spec.shaped(self.shard[piece.shard_start : piece.shard_stop])
        if entry.face is None:
            entry.face = ShardedParameter(local, spec, requires_grad=entry.parameter.requires_grad)
        else:  # cut anew: the optimizer may hold the face already
            entry.face._local, entry.face._spec = local.detach(), spec
            entry.face.requires_grad_(entry.parameter.requires_grad)
        return entry.face

    def _gradients(self, row: Row) -> Gradients:
        if not row.reduces_to_owner:
            return WholeGradients(self.parameters, self.layout)
        faces = [face for face in self.faces if isinstance(face, ShardedParameter)]
        return CutGradients(self.parameters, faces, self.layout)


class GroupCopy:
    """The last gathered values cut over a smaller group, so that gathering them again stays inside that group."""

    def __init__(self, storage: FlatStorage, comm: Comm) -> None:
        self._storage, self._comm = storage, comm
        self.version: int | None = None  # of the shard it was gathered from
        self._piece = torch.empty(storage.tensor.numel() // comm.size, dtype=storage.tensor.dtype, device=comm.device)

    def keep(self, version: int) -> None:
        self._piece.copy_(self._own_slice())
        self.version = version

    def start_gather(self, *, unit: str) -> Handle:
        self._own_slice().copy_(self._piece)
        bounds = [rank * self._piece.numel() for rank in range(self._comm.size + 1)]
        return self._comm.all_gather(self._storage.tensor, bounds, unit=unit)

    def _own_slice(self) -> Tensor:
        return self._storage.tensor.chunk(self._comm.size)[self._comm.rank]

    @property
    def nbytes(self) -> int:
        return self._piece.nbytes
