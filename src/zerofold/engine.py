"""All that zerofold keeps for one model. It lives on the model itself: two models, two engines, no globals."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from zerofold.agree import agree
from zerofold.buffers import Buffers
from zerofold.changes import Changes
from zerofold.dealing import live_bound, split
from zerofold.groups import Groups
from zerofold.hooks import Hooks
from zerofold.materialise import Materialiser
from zerofold.memory import BufferPool, StorageCache
from zerofold.placement import Row
from zerofold.reduce import Reducer
from zerofold.reduction_order import ReductionOrder
from zerofold.schedule import Schedule
from zerofold.sharded import ShardedParameter, StepScope
from zerofold.slab import Entry, Home, Slab
from zerofold.unit import Unit

_ATTRIBUTE = "_zerofold_engine"


class Engine:
    """The units of one model with their schedule, hooks and counters."""

    def __init__(
        self,
        model: nn.Module,
        row: Row,
        assigned: dict[str, list[Entry]],
        modules: dict[str, nn.Module],
        groups: Groups,
        device: torch.device,
        *,
        materialiser: Materialiser | None,
        live_bytes: int | None,
        buffer_bytes: int,
        accumulate: int,
        overlap: bool,
    ) -> None:
        self.model, self.row, self.groups = model, row, groups
        self.traffic = groups.gather.traffic
        self.cache, self.pool, self.step = StorageCache(), BufferPool(buffer_bytes), StepScope()
        home = Home(row, groups, device, self.cache, self.step)
        bound = live_bound(assigned, row, groups.gather.size, live_bytes)
        self.units: list[Unit] = []
        for index, (name, entries) in enumerate(assigned.items()):
            slabs = [Slab(name, part, home) for part in split(name, entries)]
            if materialiser is not None:
                try:
                    agree(groups.control, partial(materialiser.fill, name, slabs))
                except Exception:
                    setattr(model, _ATTRIBUTE, None)  # half of it is sharded: it must not be tried again
                    groups.destroy()
                    raise
            for slab in slabs:
                slab.share()
            self.units.append(Unit(name, modules[name] if name else model, slabs, row, index))
        self.reducer = Reducer(groups.reduce, groups.across, self.pool)
        buffers = Buffers(model, groups.everyone)
        self.reductions = ReductionOrder(self.units, row, self.reducer, groups.control, buffers, accumulate=accumulate)
        self.schedule = Schedule(self.units, row, self.reductions, live_bytes=bound, overlap=overlap)
        self.changes = Changes(model, home, self.schedule, self.reductions)
        self.hooks = Hooks(self.schedule, self.reductions, self.take_in_changes, self.changes.check)
        self.optimizers: list[torch.optim.Optimizer] = []
        self._changing: list[Slab] = []  # in the step under way
        self.is_closed = False
        setattr(model, _ATTRIBUTE, self)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Where parameters have owners: until `end_step`, this optimizer sees what this rank owns, and all of it."""
        if not self.row.has_owners:
            return
        faces = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]
        changing = {id(face) for face in faces if face.grad is not None}
        self._changing = [slab for slab in self.slabs() if any(id(face) in changing for face in slab.faces)]
        self.step.open([face for face in faces if not face.spec.is_owned_here])

    def end_step(self) -> None:
        """Also after a step that raised, and before a forward inside one (a closure)."""
        if self.step.is_open:
            self.step.close()
            for slab in self._changing:  # by their owners: the next use gathers, on every rank alike
                slab.mark_changed()

    def take_in_changes(self) -> None:
        self.end_step()
        self.changes.take_in(self.hooks)

    @property
    def psi(self) -> int:
        return sum(parameter.numel() for slab in self.slabs() for parameter in slab.parameters)

    @staticmethod
    def of(model: nn.Module) -> Engine:
        engine = getattr(model, _ATTRIBUTE, None)
        if not isinstance(engine, Engine):
            raise ValueError(f"this {type(model).__name__} is not sharded: call zf.prepare or zf.shard on it first")
        return engine

    @staticmethod
    def is_on(model: nn.Module) -> bool:
        return any(hasattr(module, _ATTRIBUTE) for module in model.modules())

    @staticmethod
    def is_broken(model: nn.Module) -> bool:
        return any(getattr(module, _ATTRIBUTE, model) is None for module in model.modules())

    def slabs(self) -> list[Slab]:
        return [slab for unit in self.units for slab in unit.slabs]

    def faces(self) -> dict[int, tuple[str, Tensor]]:
        """For each parameter, whole or sharded, by id: its name and what an optimizer should hold for it."""
        found: dict[int, tuple[str, Tensor]] = {}
        for slab in self.slabs():
            for entry, face in zip(slab.entries, slab.faces, strict=True):
                found[id(entry.parameter)] = found[id(face)] = (entry.name, face)
        return found

    def trained_faces(self) -> list[tuple[str, Tensor]]:
        """Those that want a gradient as the model stands now: a parameter may have been frozen since."""
        found = []
        for slab in self.slabs():
            for entry, face in zip(slab.entries, slab.faces, strict=True):
                if slab.requires_grad and entry.wants_gradient:
                    found.append((entry.name, face))
        return found

    def trainable_faces(self) -> list[tuple[str, Tensor]]:
        return [
            (entry.name, face)
            for slab in self.slabs()
            if slab.requires_grad
            for entry, face in zip(slab.entries, slab.faces, strict=True)
        ]

    def remove(self) -> None:
        """Leaves an ordinary model with whole parameters behind."""
        self.is_closed = True
        self.reducer.finish()
        self.schedule.hold_all()
        self.hooks.remove()
        for slab in self.slabs():
            for parameter in slab.parameters:
                parameter.grad = None
        delattr(self.model, _ATTRIBUTE)
        self.cache.clear()
        self.pool.clear()
        self.groups.destroy()
