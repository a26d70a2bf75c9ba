"""A slab: parameters of one unit with the same dtypes and requires_grad, end to end in one flat space.

slab of a unit, rank 1 of 3                     parameters whole            parameters cut

storage  | p0 | p1     | p2 |                   always there                only while in use
shard         |-- own --|                       a view of the storage       memory of its own, copied in to gather

Where the optimizer changes another dtype than forward computes in, the shard is the master: memory of its own in
every case, cast straight into its slice of the storage. So it is where the shard is kept in another memory than the
device's (`slab_away`).

Every change of the shard, by an optimizer or by hand, raises its version counter. Whether a copy is out of date is told
by comparing that with the version the copy was made from, and nothing else has to be intercepted:

_gathered_version    the whole storage
_written_version     this rank's own slice of it, which an update may write beside the shard, ahead of the next gather
_shown_version       the whole masters that `full_params` shows in place of the storage
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from zerofold.comm import Handle
from zerofold.entry import Entry, Home, Update, Waitable, lay_out
from zerofold.flat import FlatParameters
from zerofold.gradients import SlabGradients
from zerofold.gradients_away import AwayGradients
from zerofold.gradients_on_faces import FaceGradients
from zerofold.gradients_whole import WholeGradients
from zerofold.group_copy import GroupCopy
from zerofold.placement import Tier, Tiers
from zerofold.shard_spec import ShardSpec
from zerofold.sharded import ShardedParameter


class Slab(FlatParameters):
    """Made in two steps: the parameters' values move into one flat tensor; then `share` deals them out to the ranks.

    Where all values come from sources, nothing moves and nothing is dealt out: each rank reads what it keeps
    (`filling`), and where parameters are cut no rank ever has memory for the whole.
    """

    _shard: Tensor
    faces: list[Tensor]
    gradients: SlabGradients

    def __init__(self, unit: str, entries: list[Entry], home: Home) -> None:
        self.comm = home.groups.gather
        super().__init__(entries, lay_out(entries, home.row, self.comm.size), home.device, home.cache)
        self.unit, self.home = unit, home
        self.clock = self.comm.traffic.clock
        self.place = self.comm.rank if self.layout.world > 1 else 0
        self.tiers = home.tiers.get(unit, Tiers())
        # Otherwise the shard is a view of the storage, so the optimizer writes where forward reads: on a single rank,
        # with one dtype and one memory, gathering then has nothing to do.
        self.has_own_shard = (
            self.dtypes.has_master or self.is_away or (home.row.parameters.is_cut and self.comm.size > 1)
        )
        self.resident: Tensor | None = None  # this rank's piece of what forward computes with, in `slab_away` alone
        self.update: Update | None = None  # of the shard, under way
        copies = home.groups.copy
        self.group_copy = GroupCopy(self.storage, copies) if copies is not None and self.has_own_shard else None
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
    def raw_shard(self) -> Tensor:
        """`shard` without waiting for an update under way: for its size, or for the update itself."""
        return self._shard

    @property
    def version(self) -> int:
        return self._shard._version

    @property
    def tier(self) -> Tier:
        """Where the shard is kept."""
        return self.tiers.of_shard(is_trained=self.requires_grad)

    @property
    def is_away(self) -> bool:
        return self.tier is not Tier.DEVICE

    def share(self) -> None:
        """Every rank starts from rank 0's values, as under DDP; or from zeros, where it is going to read its own."""
        self._shard = self._deal()
        self.hide_masters()
        self._move_in_elsewhere()
        row, precision = self.home.row, self.home.precision
        self.faces = list(self.parameters)
        mixed = precision.is_mixed or precision.needs_one_pass
        # All of a model or none, where some are offloaded: one optimizer updates them in one way.
        is_offloaded = any(tiers.is_offloaded for tiers in self.home.tiers.values())
        has_faces = row.optimizer.is_cut or mixed or is_offloaded
        if has_faces and (self.requires_grad or row.parameters.is_cut):
            self.faces = [self._face(index) for index in range(len(self.entries))]
        for tensor in (*self.parameters, *self.faces):
            tensor._engine = self.home.engine  # type: ignore[attr-defined]  # for whoever has the parameter alone
        self.gradients = self._gradients()
        self._gathered_version = self._written_version = self._shown_version = self.version

    def _deal(self) -> Tensor:
        """This rank's shard of rank 0's values, or memory for it."""
        row, flat = self.home.row, self.values
        if self.is_read and self.has_own_shard:
            return self._take(Tier.DEVICE, self.dtypes.master, "optimizer")
        if self.is_read:
            return self.own_slice(flat.data)
        if row.parameters.is_cut and self.comm.size > 1:
            return self._deal_out(flat)
        self.home.groups.everyone.broadcast(flat, 0, unit=self.unit).wait()
        # `.data` has a version counter of its own: gathering into the storage is not a change of the shard.
        shard = self.own_slice(flat.data)
        if self.dtypes.has_master:
            shard = shard.clone() if self.layout.world > 1 and not self.is_away else shard
            self.storage.allocate()
            self.storage.tensor.copy_(flat)
        return shard

    def _move_in_elsewhere(self) -> None:
        """For a slab that is kept in another memory than the device's."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which a gradient waits for the update: alone, the gradient of a single backward stays as it was made."""
        alone = self.comm.size == 1 and self.home.groups.across is None
        stays = alone and not self.home.adds_up and self.dtypes.compute is not torch.float16
        return self.dtypes.compute if stays else self.dtypes.accumulation

    def _take(self, tier: Tier, dtype: torch.dtype, state: str) -> Tensor:
        size = self.layout.shard_size(self.place)
        return self.home.memory.take(tier, size, dtype, state, self.unit or "root")

    def _deal_out(self, flat: Tensor) -> Tensor:
        groups = self.home.groups
        shard = torch.empty(self.layout.shard_size(self.place), dtype=flat.dtype, device=flat.device)
        if not self.home.row.has_owners:
            self.comm.scatter(shard, flat if self.comm.rank == 0 else None, 0, unit=self.unit).wait()
        else:  # shards of different lengths
            self.comm.broadcast(flat, 0, unit=self.unit).wait()
            shard.copy_(self.own_slice(flat))
        if groups.across is not None:  # each group has dealt out its own first rank's values
            groups.across.broadcast(shard, 0, unit=self.unit).wait()
        return shard

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
            if self.group_copy is not None and self.group_copy.version == self.version:
                return self.group_copy.start_gather(unit=self.unit)
            return self._complete()
        return self._gather_from_all()

    def _complete(self) -> Waitable | None:
        """This rank's values go into its slice of the storage, and then the other ranks' into theirs."""
        if self.has_own_shard and not (self.is_kept and self._written_version == self.version):
            self.own_slice(self.values).copy_(self._shard)
        return self._gather_from_all()

    def _gather_from_all(self) -> Handle | None:
        return self.comm.all_gather(self.values, self.layout.bounds, unit=self.unit) if self.layout.world > 1 else None

    @property
    def is_kept(self) -> bool:
        """The storage lives on between uses."""
        return not self.home.row.parameters.is_cut and self.comm.size > 1

    @property
    def is_temporary(self) -> bool:
        """The storage has memory only while it is in use, where the unit is released: its values are in the shards."""
        return self.has_own_shard and not self.is_kept

    def kept_piece(self, index: int) -> Tensor | None:
        """This rank's piece of a 16-bit parameter that lives on beside its master."""
        if not (self.is_kept and self.dtypes.has_master):
            return None
        piece = self.layout.pieces(self.place)[index]
        return self.own_slice(self.storage.tensor)[piece.shard_start : piece.shard_stop]

    def after_update(self, version_before: int) -> None:
        """An update has changed the shard, and writes its copy as well by its end: if that was up to date before, when
        the shard had `version_before`, it is so again, also where the update left something out."""
        if version_before in (self._gathered_version, self._written_version):
            self._written_version = self.version

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

    def after_gather(self) -> None:
        """The gather is through: what came from all ranks is kept cut inside the group as well (hpZ)."""
        kept = self.group_copy
        if kept is not None and kept.version != self._gathered_version and not self.shows_masters:
            kept.keep(self._gathered_version)

    @property
    def is_stale(self) -> bool:
        """Somebody changed the shard since it was last gathered: an optimizer, or the user by hand."""
        return self.version != (self._shown_version if self.shows_masters else self._gathered_version)

    def mark_changed(self) -> None:
        """Some rank has changed its shard. Whether to gather must be decided alike on all of them."""
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
        entry.face.behind = weakref.ref(entry.parameter)
        if self.dtypes.has_master:
            entry.parameter._master = entry.face  # type: ignore[attr-defined]  # for zf.full
        return entry.face

    def _gradients(self) -> SlabGradients:
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
