"""What happens to a model after it was sharded: modules attached, parameters unfrozen, replaced, moved or cast.

The first two are taken in before the next forward. The others would train something else than what is sharded, so
they raise, naming the parameter and the way to do it.
"""

from __future__ import annotations

from torch import nn

from zerofold.agree import check_same_on_all_ranks, fingerprint
from zerofold.dealing import choose_dtypes, choose_owners, make_slabs
from zerofold.entry import Entry, Home
from zerofold.hooks import Hooks
from zerofold.reduction_order import ReductionOrder
from zerofold.schedule import Schedule
from zerofold.slab import Slab
from zerofold.unit import Unit
from zerofold.units import assign


class Changes:
    """Compares a model with what it was, cheaply, and brings the engine up to it."""

    def __init__(self, model: nn.Module, home: Home, schedule: Schedule, reductions: ReductionOrder) -> None:
        self._model, self._home, self._schedule, self._reductions = model, home, schedule, reductions
        self._units = {unit.name: unit for unit in schedule.units}
        self.count = 0  # of slabs taken in
        self._look()

    def _look(self) -> None:
        self._seen = [(m, tuple(m._modules.values()), *_count(m)) for m in self._model.modules()]

    def take_in(self, hooks: Hooks) -> None:
        """New parameters and unfrozen ones get their place. Every rank must have made the same changes."""
        if any((tuple(m._modules.values()), *_count(m)) != tuple(known) for m, *known in self._seen):
            self._take_in_new(hooks)
            self._reductions.buffers.look(self._model)
            self._look()
        for unit in self._schedule.units:
            for slab in unit.slabs:
                if not slab.requires_grad and any(entry.wants_gradient for entry in slab.entries):
                    self._schedule.make_current(unit)  # which also tells the parameters that they are wanted
                    choose_dtypes(self._model, {unit.name: slab.entries}, self._home.precision)
                    self._replace(unit, [slab], slab.entries, hooks)

    def check(self) -> None:
        for unit in self._schedule.units:
            unit.check_places()

    def _take_in_new(self, hooks: Hooks) -> None:
        known: dict[int, Entry] = {}
        for unit in self._schedule.units:
            for slab in unit.slabs:
                for entry in slab.entries:
                    known |= {id(entry.parameter): entry, id(entry.face): entry}
        new: dict[str, list[Entry]] = {}
        places = {place for entry in known.values() for place in entry.sites}
        for name, entries in assign(self._model, {u.name: u.module for u in self._schedule.units if u.name}).items():
            for found in entries:
                if id(found.parameter) in known:
                    known[id(found.parameter)].sites = found.sites  # wrapped or moved, as adapters do
                elif not any(place in places for place in found.sites):  # else replaced: `check` says so
                    new.setdefault(name, []).append(found)
        for name, entries in new.items():
            self._refuse_elsewhere(entries)
            choose_owners({name: entries}, self._home.row, self._home.groups.gather.size, None)
            choose_dtypes(self._model, {name: entries}, self._home.precision)
            check_same_on_all_ranks(self._home.groups.control, fingerprint({name: entries}, "attached later"))
            self._replace(self._units[name], [], entries, hooks)

    def _replace(self, unit: Unit, old: list[Slab], entries: list[Entry], hooks: Hooks) -> None:
        self.count += 1
        self._schedule.make_current(unit)
        before = unit.full_nbytes
        slabs = make_slabs(unit.name, entries, self._home)
        for slab in slabs:
            slab.share()
        unit.replace_slabs(old, slabs)
        self._schedule.resized(unit, unit.full_nbytes - before)
        for slab in slabs:
            slab.mark_changed()  # what this rank had may differ from rank 0's, which has just been dealt out
            if slab.requires_grad:
                self._reductions.add(slab)
            hooks.install_on(unit, slab)

    def _refuse_elsewhere(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.parameter.device != self._home.device:
                raise RuntimeError(
                    f"'{entry.name}' was attached after the model was sharded and is on {entry.parameter.device}; the "
                    f"model is on {self._home.device}: move the new module there first"
                )


def _count(module: nn.Module) -> tuple[int, int]:
    """Of parameters and buffers: one may come in the place of a None."""
    return sum(p is not None for p in module._parameters.values()), len(module._buffers)
