"""All that zerofold keeps for one model. It lives on the model itself: two models, two engines, no globals."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerofold.comm import Comm, Traffic
from zerofold.hooks import Hooks
from zerofold.layout import FlatLayout
from zerofold.memory import BufferPool, StorageCache
from zerofold.placement import Row
from zerofold.reduce import Reducer
from zerofold.reduction_order import ReductionOrder
from zerofold.schedule import Schedule
from zerofold.unit import Entry, Slab, Unit

_ATTRIBUTE = "_zerofold_engine"
_LARGE_ROOT_PARAMETER = 2**20  # bytes


@dataclass(frozen=True)
class Groups:
    """Three ways between the same ranks, so that an order kept on one never waits for another.

    Gathers follow the forward, reductions their own order, and agreements (a few numbers on the CPU) must get
    through while either is under way.
    """

    gather: Comm
    reduce: Comm
    control: Comm

    @classmethod
    def make(cls, mesh: DeviceMesh | None, control: Comm, device: torch.device) -> Groups:
        given = group_of(mesh)
        backend = given._get_backend(device).name()
        local = mesh is not None
        reduce = dist.new_group(control.global_ranks, backend=backend, use_local_synchronization=local)
        traffic, overlap = control.traffic, control.overlap
        return cls(
            Comm(given, device, traffic, overlap=overlap), Comm(reduce, device, traffic, overlap=overlap), control
        )

    def destroy(self) -> None:
        for comm in (self.reduce, self.control):
            dist.destroy_process_group(comm.group)


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup:
    group = mesh.get_group() if mesh is not None else dist.group.WORLD
    assert group is not None
    return group


def make_control(mesh: DeviceMesh | None, *, overlap: bool) -> Comm:
    """Made before anything is checked: through it one rank's error becomes everybody's."""
    ranks = dist.get_process_group_ranks(group_of(mesh))
    # Other ranks of a larger mesh do not take part, so they must not be waited for.
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=mesh is not None)
    return Comm(group, torch.device("cpu"), Traffic(), overlap=overlap)


class Engine:
    """The units of one model with their schedule, hooks and counters."""

    def __init__(
        self,
        model: nn.Module,
        row: Row,
        assigned: dict[str, list[Entry]],
        modules: dict[str, nn.Module],
        groups: Groups,
        *,
        live_bytes: int | None,
        buffer_bytes: int,
        accumulate: int,
        overlap: bool,
    ) -> None:
        self.model, self.row, self.groups = model, row, groups
        self.traffic = groups.gather.traffic
        self.psi = sum(entry.parameter.numel() for entries in assigned.values() for entry in entries)
        self.cache, self.pool = StorageCache(), BufferPool(buffer_bytes)
        bound = live_bound(assigned, groups.gather.size, live_bytes)
        self.units: list[Unit] = []
        for index, (name, entries) in enumerate(assigned.items()):
            slabs = [Slab(name, part, row, groups.gather, self.cache) for part in _split(name, entries)]
            self.units.append(Unit(name, modules[name] if name else model, slabs, row, index))
        self.reducer = Reducer(groups.reduce, self.pool)
        self.reductions = ReductionOrder(self.units, row, self.reducer, groups.control, accumulate=accumulate)
        self.schedule = Schedule(self.units, row, self.reductions, live_bytes=bound, overlap=overlap)
        self.hooks = Hooks(self.schedule, self.reductions)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.is_closed = False
        setattr(model, _ATTRIBUTE, self)

    @staticmethod
    def of(model: nn.Module) -> Engine:
        engine = getattr(model, _ATTRIBUTE, None)
        if not isinstance(engine, Engine):
            raise ValueError(f"this {type(model).__name__} is not sharded: call zf.prepare or zf.shard on it first")
        return engine

    @staticmethod
    def is_on(model: nn.Module) -> bool:
        return any(hasattr(module, _ATTRIBUTE) for module in model.modules())

    def slabs(self) -> list[Slab]:
        return [slab for unit in self.units for slab in unit.slabs]

    def faces(self) -> dict[int, tuple[str, Tensor]]:
        """For each parameter, whole or sharded, by id: its name and what an optimizer should hold for it."""
        found: dict[int, tuple[str, Tensor]] = {}
        for slab in self.slabs():
            for entry, face in zip(slab.entries, slab.faces, strict=True):
                found[id(entry.parameter)] = found[id(face)] = (entry.name, face)
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


def fingerprint(assigned: dict[str, list[Entry]], settings: str) -> list[str]:
    """One line per parameter, equal on all ranks that hold the same model with the same settings."""
    lines = [settings]
    for unit, entries in assigned.items():
        for entry in entries:
            p = entry.parameter
            kind = f"{tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
            lines.append(f"{entry.name} {kind} in unit '{unit}'")
    return lines


def check_same_on_all_ranks(control: Comm, lines: list[str]) -> None:
    """Raises on every rank when models or settings differ, naming the first difference and the ranks."""
    digests = control.all_gather_objects(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone = control.all_gather_objects(lines)
    odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    pairs = zip([*everyone[0], "nothing more"], [*everyone[odd], "nothing more"], strict=False)
    first, second = next((a, b) for a, b in pairs if a != b)
    raise ValueError(
        f"ranks 0 and {odd} hold different models: rank 0 has '{first}' where rank {odd} has '{second}'; build the "
        "same model with the same arguments on every rank"
    )


def _split(unit: str, entries: list[Entry]) -> list[list[Entry]]:
    """The slabs of a unit: entries of the same dtype and requires_grad together, in the order they came.

    A large parameter of the root is a slab by itself. Input and output embeddings get their gradients at opposite
    ends of backward; together they would have to wait for each other.
    """
    slabs: dict[tuple[torch.dtype, bool, str], list[Entry]] = {}
    for entry in entries:
        p = entry.parameter
        alone = entry.name if not unit and p.nbytes >= _LARGE_ROOT_PARAMETER else ""
        slabs.setdefault((p.dtype, p.requires_grad, alone), []).append(entry)
    return list(slabs.values())


def live_bound(assigned: dict[str, list[Entry]], world: int, given: int | None) -> int:
    """How many gathered bytes may exist at once; by default what one unit needs, and one unit ahead."""
    sizes = {name: sum(_slab_nbytes(part, world) for part in _split(name, each)) for name, each in assigned.items()}

    def with_outer_units(name: str) -> int:
        return sum(size for outer, size in sizes.items() if outer in ("", name) or name.startswith(f"{outer}."))

    widest = max(sizes, key=with_outer_units)
    needed = with_outer_units(widest)
    if given is None:
        return needed + max((size for name, size in sizes.items() if name), default=0)
    if given < needed:
        raise ValueError(
            f"live_bytes={given} is too small: unit '{widest or 'root'}' with the units around it needs {needed} bytes "
            "gathered at once; raise the bound or choose smaller units"
        )
    return given


def _slab_nbytes(entries: list[Entry], world: int) -> int:
    itemsize = entries[0].parameter.element_size()
    numels = [entry.parameter.numel() for entry in entries]
    return FlatLayout.even(numels, world=world, itemsize=itemsize).size * itemsize
