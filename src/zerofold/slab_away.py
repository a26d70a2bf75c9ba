"""A slab whose shard is kept in another memory than the device's: how what forward computes with comes to the device.

shard      in host memory or in the file: masters, as the optimizer changes them
resident   this rank's piece of what forward computes with, where that has a home of its own between uses
storage    as in `slab`: there while the unit is in use, or always where parameters stay on the device

parameters on the device    no resident where whole parameters stay in the storage; else it is on the device
parameters elsewhere        the resident is there; on the host it shares its memory with the gradient, which comes down
                            after backward, when nobody needs the old parameters any more
no resident                 forward's values are cast from the shard each time, or the shard is all there is

So the resident can be out of date in two ways. Its version falls behind the shard's, when something else than the
update changed that. Or gradients were written over parts of it (`spoiled`), and no update made parameters there since.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerofold.entry import Entry, Home, Update, Waitable
from zerofold.gradients_away import AwayGradients
from zerofold.memory import Done, FromFile
from zerofold.placement import Tier
from zerofold.slab import Slab

_BROUGHT_AT_ONCE = 2**24  # elements of a master, on their way to be cast on the device


class AwaySlab(Slab):
    """Also the memory of the optimizer's states, which is in the same tier as the shard."""

    _resident_version: int

    def __init__(self, unit: str, entries: list[Entry], home: Home) -> None:
        super().__init__(unit, entries, home)
        self.moments: dict[str, Tensor] = {}
        self._begun: set[tuple[str, int]] = set()  # the parts of them that were in use
        self.streamed: frozenset[int] = frozenset()  # parameters whose states come to the device to be updated

    def _deal(self) -> Tensor:
        if self.is_read:
            return self._take_shard()
        dealt = super()._deal()
        return self._take_shard().copy_(dealt)

    def _move_in_elsewhere(self) -> None:
        if self.has_resident:
            self.resident = self._take(self.tiers.parameters, self.dtypes.compute, "parameters").copy_(self._shard)
        for tensor in (self._shard, self.resident):
            if tensor is not None:
                self.home.memory.written(tensor)
        self._resident_version = self.version

    @property
    def has_resident(self) -> bool:
        """On the host only where the gradient of one backward takes the same place: otherwise it would be two bytes a
        parameter more than the masters, from which it can be made.
        """
        if self.is_kept or not self.requires_grad:
            return False
        if not self.dtypes.has_master and self.tiers.parameters is self.tier:
            return False
        return self.tiers.parameters is not Tier.HOST or self.gradient_dtype.itemsize == self.dtypes.compute.itemsize

    def _take_shard(self) -> Tensor:
        is_master = self.dtypes.has_master or self.tiers.parameters is not self.tier  # else forward computes with it
        state = "optimizer" if self.requires_grad and is_master else "parameters"
        return self._take(self.tier, self.dtypes.master, state)

    def moment(self, name: str, dtype: torch.dtype) -> Tensor:
        """The memory of one state of the optimizer, for the whole shard; zeros at first."""
        if name not in self.moments:
            self.moments[name] = self._take(self.tier, dtype, "optimizer")
        return self.moments[name]

    def new_moment(self, name: str, dtype: torch.dtype, index: int) -> Tensor:
        """One parameter's part of it, zeros again where it was somebody's before: its states may be cleared, by hand or
        by a checkpoint that has none."""
        piece = self.layout.pieces(self.place)[index]
        room = self.moment(name, dtype)[piece.shard_start : piece.shard_stop]
        if (name, index) in self._begun:
            room.zero_()
        self._begun.add((name, index))
        return room

    @property
    def is_kept(self) -> bool:
        return super().is_kept or (self.tiers.parameters is Tier.DEVICE and self.comm.size == 1)

    @property
    def copy_of_shard(self) -> Tensor | None:
        """What an update writes beside the shard so that nobody has to make it from the shard later."""
        return self.own_slice(self.storage.tensor) if self.is_kept else self.resident

    def after_update(self, version_before: int) -> None:
        super().after_update(version_before)
        if version_before == self._resident_version:
            self._resident_version = self.version

    def _complete(self) -> Waitable | None:
        """Brings this rank's values to the device, beside what that is computing, and then the other ranks'."""
        update, self.update = self.update, None
        is_written = self.is_kept and self._written_version == self.version
        if is_written and self.layout.world == 1:
            return update  # which writes where forward reads
        makes_anew = self._resident_is_old or self.resident_is_lent or self.is_kept
        is_read_from_file = self.tier is Tier.NVME and self.resident is None
        if not is_written and (makes_anew or is_read_from_file):
            # The values are made from the shard. A unit can be used before the last update has brought that back to
            # memory or to the file; where parameters stay on the device, states may even stay there with them. And to
            # the resident's place gradients may still be on their way that were cleared since. `look` waits for it all.
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
        try:
            with self.clock.spent(update.waits_for, self.unit):
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
        """A gradient that somebody may still want is in its place."""
        return isinstance(self.gradients, AwayGradients) and self.gradients.is_in_place_of_parameters

    @property
    def _resident_is_old(self) -> bool:
        """It has to be made anew: the last step was skipped, or something else than the update changed the master."""
        if self.resident is None or self.resident_is_lent:
            return False
        return self._resident_version != self.version or bool(self._spoiled)

    @property
    def _spoiled(self) -> set[int]:
        return self.gradients.spoiled if isinstance(self.gradients, AwayGradients) else set()
