"""All that zerofold keeps for one model. It lives on the model itself: two models, two engines, no globals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.agree import agree
from zerofold.attachments import Activations, Checkpoints, Counts, Stages, StepInfo, Updates, Verdict
from zerofold.backward import Backward
from zerofold.boundary import Boundary
from zerofold.buffers import Buffers
from zerofold.changes import Changes
from zerofold.dealing import live_bound, make_slabs
from zerofold.entry import EngineLink, Entry, Home
from zerofold.filling import fill_new
from zerofold.gradient_arena import reserve_gradients
from zerofold.gradients_away import AwayGradients
from zerofold.groups import Groups
from zerofold.hooks import Hooks
from zerofold.loss_scale import LossScaler
from zerofold.materialise import Materialiser
from zerofold.memory import BufferPool, StorageCache, Transfers
from zerofold.offloading import Offloading
from zerofold.parallel.marks import HoldsStages
from zerofold.parallel.mesh import Mesh
from zerofold.placement import Row
from zerofold.plan.states import Widths, keeps_sums
from zerofold.precision import Precision
from zerofold.reduce import Reducer
from zerofold.reduction_order import ReductionOrder
from zerofold.replicas import Replicas
from zerofold.schedule import Schedule
from zerofold.shard_spec import StepScope
from zerofold.sharded import ShardedParameter
from zerofold.slab import Slab
from zerofold.timing import DISK, HOST
from zerofold.unit import Unit
from zerofold.watch import Watch

ATTRIBUTE = "_zerofold_engine"


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
        precision: Precision,
        offloading: Offloading | None = None,
        patience: float | None = None,
        check_replicas: int | None = None,
        contiguous_gradients: bool = False,
    ) -> None:
        self.model, self.row, self.groups, self.precision = model, row, groups, precision
        self.watch = Watch.over(groups, patience=patience)
        if self.watch is not None:
            finalize(self, self.watch.close)  # at the latest when the process ends
        self.traffic = groups.gather.traffic
        self.clock = self.traffic.clock
        self.cache, self.pool, self.step = StorageCache(), BufferPool(buffer_bytes), StepScope()
        self.step.model = groups.model
        self.device, self.transfers = device, Transfers(device)
        self.offloading = offloading or Offloading.none(device)
        self.updates: Updates | None = None  # of offloaded states, once a step has needed them
        self.step.finish = self.finish_updates
        home = Home(
            row=row,
            groups=groups,
            device=device,
            cache=self.cache,
            step=self.step,
            precision=precision,
            memory=self.offloading.memory,
            transfers=self.transfers,
            tiers=self.offloading.tiers,
            adds_up=accumulate > 1 or (self.offloading.wish is not None and self.offloading.wish.sums),
            engine=EngineLink(self),
        )
        bound = live_bound(assigned, row, groups.gather.size, live_bytes)
        self.units: list[Unit] = []
        for index, (name, entries) in enumerate(assigned.items()):
            slabs = make_slabs(name, entries, home)
            self._deal_out(name, slabs, materialiser)
            self.units.append(Unit(name, modules[name] if name else model, slabs, row, index))
        self.gradient_arena = self._reserve_gradients(accumulate) if contiguous_gradients else 0
        """Bytes of the block that gradients lie in, where there is one."""
        self.scaler = LossScaler(precision.scaling)
        self.boundary = Boundary(precision, self.scaler)
        self.reducer = Reducer(groups.reduce, groups.across, self.pool)
        self.reducer.loss_scale = self.scaler.value
        buffers = Buffers(model, groups.everyone)
        self.reductions = ReductionOrder(self.units, row, self.reducer, groups.control, buffers, accumulate=accumulate)
        self.schedule = Schedule(self.units, self.reductions, self.clock, live_bytes=bound, overlap=overlap)
        self.changes = Changes(model, home, self.schedule, self.reductions)
        backward = Backward(
            self.schedule,
            self.reductions,
            self.boundary,
            refuse=partial(self.step.need, "parameters", "buffers", "gradients"),
            check=self.changes.check,
        )
        self.hooks = Hooks(self.schedule, self.reductions, self.boundary, backward, self.take_in_changes)
        self.boundary.look(model)
        self.matmul_before = torch.get_float32_matmul_precision() if precision.tf32 else None
        if precision.tf32:
            torch.set_float32_matmul_precision("high")
        self.replicas = (
            None
            if check_replicas is None
            else Replicas(self.slabs, buffers, groups, self.schedule.wait_all, every=check_replicas)
        )
        self.whole_psi = self._count_whole()
        """Of the whole model, each parameter once."""
        self.spread: Mesh | None = None
        """All axes of the mesh, where it has more than those that states are placed over."""
        self.inside: Counts | None = None
        """Counts what the ranks of a tensor axis send each other, where there is one."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.groups_taken_in: list[Callable[[], None]] = []  # of each: groups that were added since go onto pieces
        self._changing: list[Slab] = []  # in the step under way
        self.verdict: Verdict | None = None  # on the gradients of the last step
        self._places: dict[int, tuple[Slab, int]] = {}
        self._in_order: list[tuple[str, Tensor]] = []
        self._places_of = -1  # the count of changes for which they hold
        self.after_step: list[Callable[[], None]] = []  # steps that were applied
        self.after_changes: list[Callable[[], None]] = []  # parameters that were taken in
        self.averages: list[object] = []  # of the weights
        self.is_swapped = False  # an average's values are in the model for a while, in place of the weights
        self.schedulers: list[Any] = []  # advanced after the steps of attached optimizers
        self.before_change: list[Callable[[], None]] = []  # what must be over before a state may change
        self.saving: object = None  # a checkpoint being written in the background
        self.saving_group: dist.ProcessGroup | None = None
        self.staging: Any = None  # host memory for it
        self.recording: Any = None  # of time and peaks, the last that was asked for
        self.parked: Any = None  # states that are in host memory for a while
        self.on_close: list[Callable[[], None]] = []
        self.is_closed = False
        setattr(model, ATTRIBUTE, self)
        if self.checkpoints is not None:
            self.checkpoints.count_in(self.traffic)

    def _deal_out(self, unit: str, slabs: list[Slab], materialiser: Materialiser | None) -> None:
        """Each rank is left with its shards of one unit, before the next unit takes any memory."""
        try:
            if materialiser is not None:
                agree(self.groups.control, partial(materialiser.fill, unit, slabs))
            for slab in slabs:
                slab.share()
            fill_new(slabs, self.groups.control)
        except Exception:
            setattr(self.model, ATTRIBUTE, None)  # half of it is sharded: it must not be tried again
            self.end_groups()
            raise

    def _reserve_gradients(self, accumulate: int) -> int:
        widths = Widths.of(self.precision).beside(is_offloaded=self.is_offloaded)
        has_sums = keeps_sums(self.row, widths, alone=self.groups.control.size == 1, accumulate=accumulate)
        return reserve_gradients(self.slabs(), self.device, sums_of=accumulate if has_sums else 0)

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
            self._changing = []

    @property
    def last_step(self) -> StepInfo | None:
        return None if self.verdict is None else self.verdict.info

    @property
    def is_offloaded(self) -> bool:
        return any(tiers.is_offloaded for tiers in self.offloading.tiers.values())

    def finish_updates(self) -> None:
        """Returns when offloaded states are what the last step makes of them, and gradients have arrived."""
        if self.updates is None:
            self._finish_gradients()
            return
        with self.clock.spent(DISK if self.offloading.memory.disk is not None else HOST):
            self.updates.finish()
            self._finish_gradients()

    def _finish_gradients(self) -> None:
        for slab in self.slabs():
            if isinstance(slab.gradients, AwayGradients):
                slab.gradients.finish()

    def settle(self, *states: str) -> None:
        """These states, or all, are here and may change after this: a copy that was under way is complete."""
        self.step.need(*states)
        while self.before_change:
            self.before_change.pop()()

    def set_scaler(self, state: Mapping[str, float]) -> None:
        self.scaler.load_state_dict(state)
        self.reducer.loss_scale = self.scaler.value

    def hold_all(self, *, masters: bool) -> None:
        self.schedule.hold_all(masters=masters)
        self.boundary.shows_masters = self.schedule.shows_masters
        half = [slab for slab in self.slabs() if slab.dtypes.compute.itemsize < self.precision.master.itemsize]
        self.boundary.has_frozen = any(not slab.dtypes.has_master for slab in half)

    def let_go(self) -> None:
        self.schedule.let_go()
        self.boundary.shows_masters = self.schedule.shows_masters

    def take_in_changes(self) -> None:
        self.step.need("parameters", "buffers")
        self.end_step()
        before = self.changes.count
        self.changes.take_in(self.hooks)
        if self.changes.count != before:
            self.boundary.look(self.model)
            for follow in self.after_changes:
                follow()

    def take_in_groups(self) -> None:
        """What was added to optimizers, as their next step would; after the changes of the model itself."""
        self.take_in_changes()
        for take_in in self.groups_taken_in:
            take_in()

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Of its blocks, where `zf.checkpoint_blocks` was called, before it was sharded or after."""
        return getattr(self.model, "_zerofold_checkpointing", None)

    @property
    def activations(self) -> Activations | None:
        """That have left the device, where `zf.offload_activations` was called with this model."""
        return getattr(self.model, "_zerofold_activations", None)

    @property
    def pipeline(self) -> Stages | None:
        """Where `zf.pipeline` has cut the model into stages."""
        return getattr(self.model, "_zerofold_pipeline", None)

    @property
    def uncounted(self) -> set[str]:
        """Parameters that another rank of this copy of the model holds as well, and counts."""
        if self.groups.model is None:
            return set()
        entries = (entry for slab in self.slabs() for entry in slab.entries)
        return {entry.name for entry in entries if entry.part is not None and not entry.part.counts}

    @property
    def psi(self) -> int:
        """Parameters that this rank and those it shares states with have between them: all, or those of its part of a
        model that tensor-parallel ranks and pipeline stages spread (`whole_psi`)."""
        return sum(parameter.numel() for slab in self.slabs() for parameter in slab.parameters)

    def _count_whole(self) -> int:
        """All ranks that hold a copy of the model between them must call it."""
        if self.groups.model is None:
            return self.psi
        skipped = self.uncounted
        entries = (entry for slab in self.slabs() for entry in slab.entries if entry.name not in skipped)
        total = torch.tensor(float(sum(entry.parameter.numel() for entry in entries)), dtype=torch.float64)
        self.groups.model.all_reduce(total, unit="set-up").wait()
        return round(float(total))

    @property
    def world(self) -> int:
        """All ranks that train the model: those that states are placed over, for each part of it."""
        return self.groups.control.size * (1 if self.groups.model is None else self.groups.model.size)

    @property
    def rank(self) -> int:
        """Among them."""
        return self.groups.control.rank if self.spread is None else dist.get_rank()

    @property
    def is_first(self) -> bool:
        """One of all ranks is: it writes files, and says what one is to say."""
        return self.groups.control.rank == 0 and (self.groups.model is None or self.groups.model.rank == 0)

    @staticmethod
    def of(model: nn.Module) -> Engine:
        engine = getattr(model, ATTRIBUTE, None)
        if not isinstance(engine, Engine):
            if isinstance(model, HoldsStages):
                raise TypeError("a pipeline is no module: give pipe.model")
            raise ValueError(f"this {type(model).__name__} is not sharded: call zf.prepare or zf.shard on it first")
        return engine

    @staticmethod
    def of_parameter(parameter: Tensor) -> Engine | None:
        """The engine that has this parameter, by whichever of its faces; None where there is none."""
        link = getattr(parameter, "_engine", None)
        engine = link.find() if isinstance(link, EngineLink) else None
        return engine if isinstance(engine, Engine) and not engine.is_closed else None

    @staticmethod
    def is_on(model: nn.Module) -> bool:
        return any(hasattr(module, ATTRIBUTE) for module in model.modules())

    @staticmethod
    def is_broken(model: nn.Module) -> bool:
        return any(getattr(module, ATTRIBUTE, model) is None for module in model.modules())

    def slabs(self) -> list[Slab]:
        return [slab for unit in self.units for slab in unit.slabs]

    def faces(self) -> dict[int, tuple[str, Tensor]]:
        """For each parameter, whole or sharded, by id: its name and what an optimizer should hold for it."""
        found: dict[int, tuple[str, Tensor]] = {}
        for slab in self.slabs():
            for entry, face in zip(slab.entries, slab.faces, strict=True):
                found[id(entry.parameter)] = found[id(face)] = (entry.name, face)
        return found

    def places(self) -> dict[int, tuple[Slab, int]]:
        """For each face and parameter, by id: its slab and its index there. Looked up once until slabs are taken in."""
        if self._places_of != self.changes.count:
            self._places_of = self.changes.count
            self._places = {
                id(tensor): (slab, index)
                for slab in self.slabs()
                for tensors in (slab.parameters, slab.faces)
                for index, tensor in enumerate(tensors)
            }
            faces = self.faces()
            self._in_order = [faces[id(p)] for p in self.model.parameters() if id(p) in faces]
        return self._places

    def faces_in_order(self) -> list[tuple[str, Tensor]]:
        """Names and faces in the order of `model.parameters()`."""
        self.places()
        return self._in_order

    def trained_faces(self) -> list[tuple[str, Tensor]]:
        """Those that want a gradient as the model stands now: a parameter may have been frozen since."""
        found = []
        for slab in self.slabs():
            for entry, face in zip(slab.entries, slab.faces, strict=True):
                if slab.requires_grad and entry.wants_gradient:
                    found.append((entry.name, face))
        return found

    def end_groups(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.groups.destroy()
