"""One unit: the parameters gathered, released and reduced together, and its checked states.

slab of a unit, rank 1 of 3                     parameters whole            parameters cut

storage  | p0 | p1     | p2 |                   always there                only while in use
shard         |-- own --|                       a view of the storage       memory of its own, copied in to gather
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from zerofold.comm import Comm, Handle
from zerofold.gradients import CutGradients, Gradients, WholeGradients
from zerofold.guard import guard, unguard
from zerofold.layout import FlatLayout
from zerofold.memory import FlatStorage, StorageCache
from zerofold.placement import Row
from zerofold.sharded import ShardedParameter, ShardSpec


@dataclass
class Entry:
    """One parameter with every place (module, attribute) that holds it."""

    name: str
    parameter: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)


class Slab:
    """The parameters of a unit that share dtype and requires_grad, end to end in one flat space."""

    def __init__(self, unit: str, entries: list[Entry], row: Row, comm: Comm, cache: StorageCache) -> None:
        self.unit, self.entries, self.comm = unit, entries, comm
        self.parameters: list[Tensor] = [entry.parameter for entry in entries]
        first = entries[0].parameter
        self.requires_grad = first.requires_grad
        self.layout = FlatLayout.even(
            [p.numel() for p in self.parameters], world=comm.size, itemsize=first.element_size()
        )
        self.storage = FlatStorage(self.layout.size, first.dtype, first.device, cache)
        # With one rank the shard is all there is: it stays in the storage, and gathering has nothing to do.
        self.has_own_shard = row.parameters.is_cut and comm.size > 1
        self.shard = self._fill_from_rank_zero()
        self.faces: list[Tensor] = list(self.parameters)
        if row.optimizer.is_cut and (self.requires_grad or row.parameters.is_cut):
            self.faces = [self._face(index) for index in range(len(entries))]
        self.gradients: Gradients = self._gradients(row)
        self._gathered_version = self.shard._version

    def start_gather(self) -> Handle:
        self.storage.allocate()
        flat = self.storage.tensor
        if self.has_own_shard:
            self.own_slice(flat).copy_(self.shard)
        if self.is_stale:
            # A graph made before the change must not run backward with the new values: torch's own check sees it.
            torch.autograd.graph.increment_version(self.parameters)
        self._gathered_version = self.shard._version
        return self.comm.all_gather(flat, unit=self.unit)

    @property
    def is_stale(self) -> bool:
        """Somebody changed the shard since it was last gathered: an optimizer, or the user by hand."""
        return self.shard._version != self._gathered_version

    def own_slice(self, flat: Tensor) -> Tensor:
        start = self.comm.rank * self.layout.shard_size
        return flat[start : start + self.layout.shard_size]

    def view(self, index: int) -> Tensor:
        start = self.layout.offsets[index]
        return self.storage.tensor[start : start + self.layout.numels[index]].view(self.parameters[index].shape)

    def _fill_from_rank_zero(self) -> Tensor:
        """Moves the parameters' data into the flat space; every rank starts from rank 0's values, as under DDP."""
        flat = self.storage.tensor.zero_()
        for index, parameter in enumerate(self.parameters):
            view = self.view(index)
            view.copy_(parameter.detach())
            parameter.data = view
        if not self.has_own_shard:
            self.comm.broadcast(flat, 0, unit=self.unit).wait()
            # `.data` has a version counter of its own: gathering into the storage is not a change of the shard.
            return self.own_slice(flat.data)
        shard = torch.empty(self.layout.shard_size, dtype=flat.dtype, device=flat.device)
        pieces = list(flat.chunk(self.comm.size)) if self.comm.rank == 0 else None
        self.comm.scatter(shard, pieces, 0, unit=self.unit).wait()
        return shard

    def _face(self, index: int) -> ShardedParameter:
        parameter = self.parameters[index]
        ranges = tuple(
            (piece.start, piece.stop) for piece in (self.layout.pieces(rank)[index] for rank in range(self.comm.size))
        )
        spec = ShardSpec(self.entries[index].name, self.unit, parameter.shape, ranges, self.comm)
        piece = self.layout.pieces(self.comm.rank)[index]
        local = self.shard[piece.shard_start : piece.shard_stop]
        return ShardedParameter(local, spec, requires_grad=parameter.requires_grad)

    def _gradients(self, row: Row) -> Gradients:
        if not row.reduces_to_owner:
            return WholeGradients(self.parameters, self.layout)
        faces = [face for face in self.faces if isinstance(face, ShardedParameter)]
        return CutGradients(self.parameters, faces, self.layout)


class State(Enum):
    RELEASED = "released"
    GATHERING = "gathering"
    READY = "ready"


_ALLOWED = {
    (State.RELEASED, State.GATHERING),
    (State.GATHERING, State.READY),
    (State.READY, State.GATHERING),  # whole parameters refreshed after a step, or a shard changed while gathered
    (State.READY, State.RELEASED),
}


class Unit:
    """A module and those of its parameters that no unit inside it has taken."""

    def __init__(self, name: str, module: nn.Module, slabs: list[Slab], row: Row, index: int) -> None:
        self.name, self.module, self.slabs, self.index = name, module, slabs, index
        self.is_cut = row.parameters.is_cut
        self.full_nbytes = sum(slab.storage.full_nbytes for slab in slabs) if self.is_cut else 0
        self.trainable_slabs = [slab for slab in slabs if slab.requires_grad]
        self._state = State.READY
        self._handles: list[Handle] = []
        self._refusals = {entry.name: self._refuse(entry.name) for slab in slabs for entry in slab.entries}
        if self.is_cut:
            self.release()

    @property
    def state(self) -> State:
        return self._state

    def _enter(self, state: State) -> None:
        if (self._state, state) not in _ALLOWED:
            raise AssertionError(f"unit '{self.name}' cannot go from {self._state.value} to {state.value}")
        self._state = state

    @property
    def is_stale(self) -> bool:
        return any(slab.is_stale for slab in self.slabs)

    def gather(self) -> None:
        """Starts to complete the storage from all ranks' shards; `wait` ends it."""
        self._enter(State.GATHERING)
        self._handles = [slab.start_gather() for slab in self.slabs if self.is_cut or slab.is_stale]
        if not self.is_cut:
            self._guard(self.wait)

    def wait(self) -> None:
        """Returns with the parameters ready to use; whole Parameters are in the module."""
        if self._state is State.READY:
            return
        for handle in self._handles:
            handle.wait()
        self._handles = []
        self._enter(State.READY)
        for slab in self.slabs:
            for entry in slab.entries:
                unguard(entry.parameter)
            if self.is_cut:
                self._show_whole(slab)

    def _show_whole(self, slab: Slab) -> None:
        for entry, face in zip(slab.entries, slab.faces, strict=True):
            if face.requires_grad != entry.parameter.requires_grad:  # the user froze it, or tries to unfreeze it
                if not slab.requires_grad:
                    raise RuntimeError(
                        f"'{entry.name}' was frozen when the model was sharded and cannot be unfrozen now: call "
                        "zf.close(model), set requires_grad, and prepare it again"
                    )
                entry.parameter.requires_grad_(face.requires_grad)
            self._put(entry, entry.parameter)

    def release(self) -> None:
        """Frees the gathered memory; the module shows the sharded parameters."""
        self._enter(State.RELEASED)
        for slab in self.slabs:
            for entry, face in zip(slab.entries, slab.faces, strict=True):
                self._put(entry, face)
            if slab.has_own_shard:
                slab.storage.free()
        self._guard(None)

    def _put(self, entry: Entry, tensor: Tensor) -> None:
        for module, attribute in entry.sites:
            module._parameters[attribute] = tensor  # type: ignore[assignment]  # a ShardedParameter is one

    def _guard(self, arrive: Callable[[], None] | None) -> None:
        for slab in self.slabs:
            for entry in slab.entries:
                guard(entry.parameter, arrive or self._refusals[entry.name])

    def _refuse(self, name: str) -> Callable[[], None]:
        def refuse() -> None:
            raise RuntimeError(
                f"the data of parameter '{name}' is on other ranks outside the forward and backward of "
                f"'{self.name or 'the model'}': read it with zf.full(p) or inside `with zf.full_params(model)`"
            )

        return refuse
