"""A slab: parameters of one unit with the same dtypes and requires_grad, end to end in one flat space.

slab of a unit, rank 1 of 3                     parameters whole            parameters cut

storage  | p0 | p1     | p2 |                   always there                only while in use
shard         |-- own --|                       a view of the storage       memory of its own, copied in to gather

Where the optimizer changes another dtype than forward computes in, the shard is the master: memory of its own in
every case, cast straight into its slice of the storage. So it is where the shard is kept in another memory than the
device's; then what forward computes with may have a home of its own as well:

parameters on the device    the storage stays, or where parameters are cut this rank's piece of it
elsewhere                   this rank's piece, in the memory that a gradient of the same size takes after backward
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.comm import Handle
from zerofold.entry import Entry, Home, Update, Waitable, lay_out
from zerofold.flat import FlatParameters
from zerofold.gradients import FaceGradients, Gradients, WholeGradients
from zerofold.gradients_away import AwayGradients
from zerofold.group_copy import GroupCopy
from zerofold.memory import Done, FromFile
from zerofold.placement import Tier, Tiers
from zerofold.shard_spec import ShardSpec
from zerofold.sharded import ShardedParameter


class GradientRoom(NamedTuple):
    elements: int
    dtype: torch.dtype


_BROUGHT_AT_ONCE = 2**24  # elements of a master, on their way to be cast on the device


class Slab(FlatParameters):
    """Made in two steps: the parameters' values move into one flat tensor; then `share` deals them out to the ranks.

    Where all values come from sources, nothing moves and nothing is dealt out: each rank reads what it keeps
    (`filling`), and where parameters are cut no rank ever has memory for the whole.
    """

    _shard: Tensor
    faces: list[Tensor]
    gradients: Gradients

    def __init__(self, unit: str, entries: list[Entry], home: Home) -> None:
        self.comm = home.groups.gather
        super().__init__(entries, lay_out(entries, home.row, self.comm.size), home.device, home.cache)
        self.unit, self.home = unit, home
        self.clock = self.comm.traffic.clock
        self.place = self.comm.rank if self.layout.world > 1 else 0
        self.tiers = home.tiers.get(unit, Tiers())
        # With one rank, one dtype and one tier the shard is all there is: in the storage, nothing has to be gathered.
        self.has_own_shard = (
            self.dtypes.has_master or self.is_away or (home.row.parameters.is_cut and self.comm.size > 1)
        )
        self.resident: Tensor | None = None  # this rank's piece of what forward computes with, in its own home
        self.moments: dict[str, Tensor] = {}  # the memory of the optimizer's states, where that is not the device's
        self.update: Update | None = None  # of the shard, under way
        self.streamed: frozenset[int] = frozenset()  # parameters whose states come to the device to be updated
        copies = home.groups.copy
        self.copy = GroupCopy(self.storage, copies) if copies is not None and self.has_own_shard else None
        self.is_read = all(entry.source is not None for entry in entries)
        self.unfilled = [index for index, e in enumerate(entries) if e.parameter.is_meta and e.source is None]
        if self.is_read and self.has_own_shard:
            self.storage.free()
        else:
            self.make_zeros()
        self.move_in(with_values=not self.is_read)

    @property
    def shard(self) -> Tensor:
        """This rank's range of the master; an update of it that is under way ends first."""
        self.home.step.look(self._shard)
        return self._shard

    @property
    def master(self) -> Tensor:
        """The same, for the update itself: it does not wait for itself."""
        return self._shard

    @property
    def version(self) -> int:
        return self._shard._version

    @property
    def tier(self) -> Tier:
        """Where the shard is kept."""
        return self.tiers.optimizer if self.requires_grad else self.tiers.parameters

    @property
    def is_away(self) -> bool:
        return self.tier is not Tier.DEVICE

    def share(self) -> None:
        """Every rank starts from rank 0's values, as under DDP; or from zeros, where it is going to read its own."""
        row, flat = self.home.row, self.values
        if self.is_read and self.has_own_shard:
            self._shard = self._home_of_shard()
        elif self.is_read:
            self._shard = self.own_slice(flat.data)
        elif row.parameters.is_cut and self.comm.size > 1:
            self._shard = torch.empty(self.layout.shard_size(self.place), dtype=flat.dtype, device=flat.device)
            self._deal_out(flat)
        else:
            self.home.groups.everyone.broadcast(flat, 0, unit=self.unit).wait()
            # `.data` has a version counter of its own: gathering into the storage is not a change of the shard.
            self._shard = self.own_slice(flat.data)
            if self.dtypes.has_master:
                self._shard = self._shard.clone() if self.layout.world > 1 and not self.is_away else self._shard
                self.storage.allocate()
                self.storage.tensor.copy_(flat)
        if self.is_away and not self.is_read:
            self._shard = self._home_of_shard().copy_(self._shard)
        self.hide_masters()
        if self.has_resident:
            tier = self.tiers.parameters
            self.resident = self._take(tier, self.dtypes.compute, "parameters").copy_(self._shard)
        for tensor in (self._shard, self.resident):
            if tensor is not None:
                self.home.memory.written(tensor)
        self.faces = list(self.parameters)
        mixed = self.home.precision.is_mixed or self.home.precision.needs_one_pass
        # All of a model or none, where some are offloaded: one optimizer updates them in one way.
        is_offloaded = any(tiers.is_offloaded for tiers in self.home.tiers.values())
        has_faces = row.optimizer.is_cut or mixed or is_offloaded
        if has_faces and (self.requires_grad or row.parameters.is_cut):
            self.faces = [self._face(index) for index in range(len(self.entries))]
        for tensor in (*self.parameters, *self.faces):
            tensor._engine = self.home.engine  # type: ignore[attr-defined]  # for whoever has the parameter alone
        self.gradients = self._gradients()
        self._gathered_version = self._written_version = self._shown_version = self._resident_version = self.version

    @property
    def has_resident(self) -> bool:
        """Whether what forward computes with has memory of its own between uses, apart from a storage that stays.

        On the host only where the gradient of one backward takes the same place: otherwise it would be two bytes a
        parameter more than the masters, from which it can be made.
        """
        if not self.is_away or self.is_kept or not self.requires_grad:
            return False
        if not self.dtypes.has_master and self.tiers.parameters is self.tier:
            return False
        return self.tiers.parameters is not Tier.HOST or self.gradient_dtype.itemsize == self.dtypes.compute.itemsize

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which a gradient waits for the update: alone, the gradient of a single backward stays as it was made."""
        alone = self.comm.size == 1 and self.home.groups.across is None
        stays = alone and not self.home.adds_up and self.dtypes.compute is not torch.float16
        return self.dtypes.compute if stays else self.dtypes.accumulation

    def _home_of_shard(self) -> Tensor:
        is_master = self.dtypes.has_master or self.tiers.parameters is not self.tier  # else forward computes with it
        state = "optimizer" if self.requires_grad and is_master else "parameters"
        return self._take(self.tier, self.dtypes.master, state)

    def _take(self, tier: Tier, dtype: torch.dtype, state: str) -> Tensor:
        size = self.layout.shard_size(self.place)
        return self.home.memory.take(tier, size, dtype, state, self.unit or "root")

    def moment(self, name: str, dtype: torch.dtype) -> Tensor:
        """The memory of one state of the optimizer, for the whole shard; zeros at first."""
        if name not in self.moments:
            self.moments[name] = self._take(self.tier, dtype, "optimizer")
        return self.moments[name]

    def _deal_out(self, flat: Tensor) -> None:
        groups, bounds = self.home.groups, self.layout.bounds
        if not self.home.row.has_owners:
            self.comm.deal(self._shard, flat if self.comm.rank == 0 else None, 0, unit=self.unit).wait()
        else:  # shards of different lengths
            self.comm.broadcast(flat, 0, unit=self.unit).wait()
            self._shard.copy_(flat[bounds[self.comm.rank] : bounds[self.comm.rank + 1]])
        if groups.across is not None:  # each group has dealt out its own first rank's values
            groups.across.broadcast(self._shard, 0, unit=self.unit).wait()

    def start_gather(self, *, masters: bool = False) -> Waitable | None:
        """Completes the storage; with `masters`, a whole copy of the masters which the parameters then show."""
        self.check_unchanged()
        if self.is_stale:
            # A graph made before the change must not run backward with the new values: torch's own check sees it.
            torch.autograd.graph.increment_version(self.parameters)
            self.note_versions()
        if masters and self.dtypes.has_master:
            self._shown_version = self.version
            self.show_masters()
            self.own_slice(self.values).copy_(self.shard)
        else:
            self._gathered_version = self.version
            self.hide_masters()
            self.storage.allocate()
            if self.copy is not None and self.copy.version == self.version:
                return self.copy.start_gather(unit=self.unit)
            if self.is_away:
                return self._fetch()
            if self.has_own_shard and not (self.is_kept and self._written_version == self.version):
                self.own_slice(self.values).copy_(self._shard)
        return self._gather_from_all()

    def _gather_from_all(self) -> Handle | None:
        return self.comm.all_gather(self.values, self.layout.bounds, unit=self.unit) if self.layout.world > 1 else None

    def _fetch(self) -> Waitable | None:
        """Brings this rank's values to the device, beside what that is computing, and then the other ranks'."""
        update, self.update = self.update, None
        is_written = self.is_kept and self._written_version == self.version
        if is_written and self.layout.world == 1:
            return update  # which writes where forward reads
        is_read_from_file = self.tier is Tier.NVME and self.resident is None
        if not is_written and (self._resident_is_old or self.resident_is_lent or self.is_kept or is_read_from_file):
            # A unit can be used before its states are back in memory or in the file (where parameters are kept on the
            # device they may even stay there), and before gradients that nobody wants any more have come down to where
            # its parameters go.
            self.home.step.look(self._shard)
        transfers = self.home.transfers
        if self.resident is not None and self.tiers.parameters is Tier.NVME:
            return self._read(self.resident, update)
        with transfers.up():
            if update is not None:
                self._wait_for(update)
            if not is_written:
                self._bring(self.own_slice(self.values))
            return self._gather_from_all() or transfers.done()

    def _read(self, resident: Tensor, update: Update | None) -> FromFile:
        """The file is read while other units compute; who needs the parameters brings them to the device."""
        if update is not None:
            self._wait_for(update)
        if self._resident_version != self.version:
            resident.copy_(self.shard)
            self.home.memory.written(resident)
            self._resident_version = self.version

        def arrive(staged: Tensor) -> Done:
            with self.home.transfers.up():
                self.own_slice(self.values).copy_(staged, non_blocking=True)
                done = self.home.transfers.done()
            done.wait()
            gathering = self._gather_from_all()
            if gathering is not None:
                gathering.wait()
            return done

        return FromFile(self.home.memory, resident, arrive)

    def _wait_for(self, update: Update) -> None:
        tape = self.clock.tape
        try:
            with nullcontext() if tape is None else tape.spent(update.waits_for, self.unit):
                update.wait()
        except BaseException:
            self.update = update  # it has failed: every later use is to hear of that, and not compute with half of it
            raise

    def _bring(self, target: Tensor) -> None:
        source = self._shard if self.resident is None or self.resident_is_lent else self.resident
        if source is self.resident and self._resident_is_old:
            source.copy_(self._shard)
            self._resident_version = self.version
            self._spoiled.clear()
        if source.dtype is target.dtype or source.device == target.device:
            target.copy_(source, non_blocking=True)
            return
        for part, some in zip(target.split(_BROUGHT_AT_ONCE), source.split(_BROUGHT_AT_ONCE), strict=True):
            part.copy_(some.to(target.device, non_blocking=True))  # cast where that is fast

    @property
    def resident_is_lent(self) -> bool:
        """A gradient is in its place."""
        return isinstance(self.gradients, AwayGradients) and self.gradients.is_in_place_of_parameters

    @property
    def _resident_is_old(self) -> bool:
        """It has to be made anew: the last step was skipped, or somebody else than the update changed the master."""
        if self.resident is None or self.resident_is_lent:
            return False
        return self._resident_version != self.version or bool(self._spoiled)

    @property
    def _spoiled(self) -> set[int]:
        return self.gradients.spoiled if isinstance(self.gradients, AwayGradients) else set()

    @property
    def is_kept(self) -> bool:
        """The storage lives on between uses."""
        if self.is_away and self.tiers.parameters is Tier.DEVICE and self.comm.size == 1:
            return True
        return not self.home.row.parameters.is_cut and self.comm.size > 1

    def kept_piece(self, index: int) -> Tensor | None:
        """This rank's piece of a 16-bit parameter that lives on beside its master."""
        if not (self.is_kept and self.dtypes.has_master):
            return None
        piece = self.layout.pieces(self.place)[index]
        return self.own_slice(self.storage.tensor)[piece.shard_start : piece.shard_stop]

    @property
    def copy_of_shard(self) -> Tensor | None:
        """What an update writes beside the shard so that nobody has to make it from the shard later."""
        if self.is_kept and self.has_own_shard:
            return self.own_slice(self.storage.tensor)
        return self.resident

    def written(self, version_before: int) -> None:
        """An update has changed the shard, and has written (or will have, by its end) its copy as well."""
        if version_before in (self._gathered_version, self._written_version):  # the rest of the slice was up to date
            self._written_version = self.version
        if version_before == self._resident_version:
            self._resident_version = self.version

    def check_unchanged(self) -> None:
        """16-bit parameters are made from their masters, so what somebody writes into them would be lost."""
        if self.shows_masters or not (self.dtypes.has_master or (self.is_away and self.is_kept)):
            return
        for entry, version in zip(self.entries, self._versions, strict=True):
            if entry.parameter._version != version:
                self.discard_changes()
                which = "a 16-bit copy of its fp32" if self.dtypes.has_master else f"a copy of its {self.tier.value}"
                raise RuntimeError(
                    f"parameter '{entry.name}' was changed in place, but it is {which} master and will be made anew "
                    "from it: load or change weights inside `with zf.full_params(model)`"
                )

    def discard_changes(self) -> None:
        """The next use makes the parameters anew from their masters."""
        self.note_versions()
        self.mark_changed()

    def gathered(self) -> None:
        """The gather is through."""
        is_new = self.copy is not None and self.copy.version != self._gathered_version
        if self.copy is not None and is_new and not self.shows_masters:
            self.copy.keep(self._gathered_version)

    @property
    def is_stale(self) -> bool:
        """Somebody changed the shard since it was last gathered: an optimizer, or the user by hand."""
        return self.version != (self._shown_version if self.shows_masters else self._gathered_version)

    def mark_changed(self) -> None:
        """Another rank has changed its shard. Whether to gather must be decided alike on all ranks."""
        torch.autograd.graph.increment_version(self._shard)

    def own_slice(self, flat: Tensor) -> Tensor:
        return flat[self.layout.bounds[self.place] : self.layout.bounds[self.place + 1]]

    def _face(self, index: int) -> ShardedParameter:
        entry, is_replicated = self.entries[index], not self.home.row.optimizer.is_cut
        piece = self.layout.pieces(0 if is_replicated else self.comm.rank)[index]
        everywhere = ((piece.start, piece.stop),) * self.comm.size
        spec = ShardSpec(
            entry.name,
            self.unit,
            entry.parameter.shape,
            everywhere if is_replicated else self.layout.ranges(index),
            self.comm,
            has_owner=self.home.row.has_owners,
            step=self.home.step,
            is_replicated=is_replicated,
            device=self.home.device if self.tiers.is_offloaded else None,
            is_part=entry.part is not None and entry.part.is_cut,
        )
        local = spec.shaped(self._shard[piece.shard_start : piece.shard_stop])
        face = ShardedParameter(local, spec, requires_grad=entry.parameter.requires_grad)
        if entry.face is None:
            entry.face = face
        else:  # cut anew: the optimizer may hold the face already
            torch.utils.swap_tensors(entry.face, face)
        if self.dtypes.has_master:
            entry.parameter._master = entry.face  # type: ignore[attr-defined]  # for zf.full
        return entry.face

    @property
    def gradient_room(self) -> GradientRoom | None:
        """What its gradients take on the device from one backward to the step; None where they are elsewhere."""
        if not self.requires_grad or self.tiers.gradients is not Tier.DEVICE:
            return None
        if isinstance(self.gradients, WholeGradients):
            return GradientRoom(self.layout.size, self.parameters[0].dtype)
        return GradientRoom(self.layout.shard_size(self.place), self.gradient_dtype)

    def sums_room(self, backwards: int) -> GradientRoom | None:
        """What gradients of so many backwards take besides while they wait for one reduction; None where they are added
        up in their room itself. Two are not added before the second is reduced: the first waits as it was made.
        """
        if self.gradient_room is None or not isinstance(self.gradients, FaceGradients):
            return None
        return GradientRoom(
            sum(self.layout.numels), self.dtypes.compute if backwards == 2 else self.dtypes.accumulation
        )

    def _gradients(self) -> Gradients:
        faces = [face for face in self.faces if isinstance(face, ShardedParameter)]
        if not faces:
            return WholeGradients(self.parameters, self.layout)
        if self.tiers.gradients is Tier.DEVICE or not self.requires_grad:
            return FaceGradients(self.parameters, faces, self.layout, self.dtypes)
        shares = self.tiers.gradients is self.tiers.parameters is Tier.HOST and self.resident is not None
        dtype = self.gradient_dtype
        room = self.resident if shares else self._take(self.tiers.gradients, dtype, "gradients")
        assert room is not None
        take, tier, size, unit = self.home.memory.take, self.tiers.gradients, room.numel(), self.unit or "root"
        return AwayGradients(
            self.parameters,
            faces,
            self.layout,
            self.dtypes,
            room.view(dtype),
            self.home.transfers,
            in_place=shares,
            more_room=lambda wide: take(tier, size, wide, "gradients", unit),  # without the slab, which has this
        )
