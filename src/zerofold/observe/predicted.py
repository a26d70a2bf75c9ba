"""What the plan says of a run, line by line, beside what the ledger has measured of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from zerofold.engine import Engine
from zerofold.gradient_arena import filled_by
from zerofold.observe.recording import Recording
from zerofold.optim.probe import Keeps
from zerofold.optim.probe import keeps as keeps_of
from zerofold.parallel.marks import loss_ranks, sequence_ranks
from zerofold.placement import Cut, Tier
from zerofold.plan.comparison import Parameter, predicted_for, shape_of
from zerofold.plan.machine import Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Point, Traffic
from zerofold.plan.presets import preset, preset_of
from zerofold.plan.shape import ModelShape
from zerofold.plan.states import Widths, keeps_sums
from zerofold.plan.times import times
from zerofold.plan.traffic import Share, model_exchanges, traffic

BYTES, SECONDS = "bytes", "seconds"
TIME = "time"
_COUNTERS = 2**16  # bytes: a number per parameter, which optimizers keep beside their states, is nothing to compare


class Line(NamedTuple):
    """One number twice. `where` is a memory, or "time"."""

    line: str
    where: str
    unit: str
    predicted: float
    measured: float | None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a plan must know beyond what an engine knows of itself, to tell activations and time."""

    shape: ModelShape
    """Of the model, traced or computed."""
    micro_batch: int
    """Samples of a rank in a forward."""
    checkpoint_every: int = 0
    checkpoints_on: str = "device"


@dataclass(frozen=True)
class Predicted:
    """All that was predicted for one engine."""

    lines: list[Line]
    sent: dict[tuple[str, str], float]
    """Bytes in a step, by operation and group."""


def predictions(
    engine: Engine, recording: Recording, measured: dict[str, Any], precision: str, workload: Workload | None = None
) -> Predicted:
    """`measured` is a snapshot of the ledger. Gradients, gathered units and the whole are compared at their peaks."""
    units = {
        unit.name: [Parameter(p.numel(), slab.requires_grad) for slab in unit.slabs for p in slab.parameters]
        for unit in engine.units
    }
    point = Point(
        stage=engine.row.name,
        group=_group(engine),
        accumulate=engine.reductions.accumulate,
        live_bytes=engine.schedule.live_bytes,
        buffer_bytes=engine.pool.buffer_nbytes,
        contiguous_gradients=bool(engine.gradient_arena),
        precision=precision,
    )
    tiers = {name: tiers for name, tiers in engine.offloading.tiers.items() if tiers.is_offloaded}
    # A pipeline adds up all of its micro-batches. A block of gradients was made for what `accumulate=` has said.
    pipe = None if point.contiguous_gradients else engine.pipeline
    backwards = point.accumulate if pipe is None else pipe.microbatches
    keeps = _keeps(engine)
    held = predicted_for(
        units,
        row=engine.row,
        ranks=engine.groups.control.size,
        group=point.group,
        precision=engine.precision,
        moments=keeps.numbers,
        counters=keeps.nbytes,
        accumulate=backwards,
        tiers=tiers or None,
        live_bytes=point.live_bytes,
        buffer_bytes=point.buffer_bytes,
        device_type=engine.device.type,
        built_bytes=4,
        pipeline=_stages(engine),
        contiguous_gradients=point.contiguous_gradients,
    )
    on_device = measured["tier_bytes"][Tier.DEVICE.value]
    # Local sums are gone when the optimizer steps; without them that is the moment with none on their way.
    widths = Widths.of(engine.precision, moments=keeps.numbers, counters=keeps.nbytes)
    widths = widths.beside(is_offloaded=bool(tiers))
    has_sums = keeps_sums(
        engine.row,
        widths,
        alone=engine.groups.control.size == 1,
        accumulate=backwards,
        in_pipeline=engine.pipeline is not None and not point.contiguous_gradients,
    )
    gradients = recording.device_gradients if has_sums else recording.step_gradients
    are_gradients = has_sums or (engine.groups.control.size == 1 and not engine.gradient_arena)
    waiting = recording.passing_sums + (0 if are_gradients else recording.sums)
    if engine.gradient_arena:
        gradients += engine.gradient_arena - filled_by(engine.slabs(), sums_of=point.accumulate if has_sums else 0)
    found = [
        Line("parameters", Tier.DEVICE.value, BYTES, held.device["parameters"], on_device["parameters"]),
        Line("gradients", Tier.DEVICE.value, BYTES, held.device["gradients"], gradients),
        Line("local sums", Tier.DEVICE.value, BYTES, held.waiting, waiting),
        Line("gradient arena", Tier.DEVICE.value, BYTES, held.gradient_arena, engine.gradient_arena),
        Line("optimizer", Tier.DEVICE.value, BYTES, held.device["optimizer"], on_device["optimizer"]),
        Line("fused buffers", Tier.DEVICE.value, BYTES, held.device["fused buffers"], engine.pool.nbytes),
        Line("gathered units", Tier.DEVICE.value, BYTES, held.device["gathered units"], recording.peaks["gathered"]),
    ]
    for tier, states in ((Tier.HOST, held.host), (Tier.NVME, held.disk)):
        peaks = recording.tier_peaks.get(tier.value, {})
        found += [Line(state, tier.value, BYTES, states[state], peaks.get(state, 0)) for state in states]
    machine = _machine(engine)
    shape = shape_of(units) if workload is None else workload.shape
    if workload is not None:
        point = replace(
            point,
            micro_batch=workload.micro_batch,
            checkpoint_every=workload.checkpoint_every,
            checkpoints_on=workload.checkpoints_on,
        )
        found += _of_workload(engine, recording, machine, point, workload, tiers)
    # The engine's units are this rank's parts already; activations are those of the whole model.
    stages = _stages(engine)
    sent = traffic(
        shape_of(units) if _is_spread(engine) else shape,
        replace(machine, devices=stages * machine.devices),
        replace(point, pipeline=stages),
        with_activations=False,
        widths=widths,
    )
    activations = {} if workload is None else _activations(engine, point, workload)
    counters = keeps.nbytes * sum(parameter.is_trained for some in units.values() for parameter in some)
    lines = [line for line in found if _says_something(line, counters)]
    return Predicted(lines, {**_of_this_rank(engine, sent), **activations})


def _of_this_rank(engine: Engine, sent: Traffic) -> dict[tuple[str, str], float]:
    """A plan tells the mean of all ranks. One that owns everything has nobody to send gradients to."""
    owns_all = engine.row.cut is Cut.FIRST and engine.groups.reduce.rank == 0
    return {key: 0.0 if owns_all and key[0] == "reduce_scatter" else nbytes for key, nbytes in sent.bytes.items()}


def _activations(engine: Engine, point: Point, workload: Workload) -> dict[tuple[str, str], float]:
    """Bytes of a step along the tensor and pipeline axes, of this very rank."""
    shape, spread, stages = workload.shape, engine.spread, engine.pipeline
    if spread is None or shape.hidden is None or shape.layers is None:
        return {}
    share = Share(shape.layers) if stages is None else stages.share
    spread_point = replace(
        point,
        micro_batch=workload.micro_batch,
        accumulate=point.accumulate if stages is None else stages.microbatches,
        checkpoint_every=workload.checkpoint_every,
        partition=engine.checkpoints is not None and engine.checkpoints.is_cut,
        tensor=spread.tensor,
        pipeline=spread.pipeline,
        sequence_parallel=sequence_ranks(engine.model) > 1,
        loss_parallel=loss_ranks(engine.model) > 1,
    )
    found: dict[tuple[str, str], float] = {}
    for exchange in model_exchanges(shape, spread_point, share):
        key = exchange.collective, exchange.group
        found[key] = found.get(key, 0.0) + exchange.sent * exchange.itemsize
    return found


def _says_something(line: Line, counters: int) -> bool:
    """`counters`: what stays on the device of an optimizer whose states are all elsewhere."""
    if line.line == "optimizer" and line.predicted == counters:
        return False
    least = _COUNTERS if line.unit == BYTES else 0
    return bool(line.predicted) or (line.measured or 0) > least


def _of_workload(
    engine: Engine, recording: Recording, machine: Machine, point: Point, workload: Workload, tiers: Any
) -> list[Line]:
    """What a device alone can show: a CPU does not count activations, and no preset knows how fast one is. A workload
    is that of a whole model, so it says nothing of a part.
    """
    if engine.device.type != "cuda" or _is_spread(engine):
        return []
    held = memory(workload.shape, machine, point, tiers=tiers or None)
    found = [Line("peak", Tier.DEVICE.value, BYTES, held.device_peak, recording.peak_bytes()[Tier.DEVICE.value])]
    if machine.name in _NO_PRESET:
        return found
    spent, measured = times(workload.shape, machine, point, held), recording.time()
    found += [
        Line("compute", TIME, SECONDS, spent.compute, measured["compute"]),
        Line("update", TIME, SECONDS, spent.update, measured["update"]),
        *(
            Line(name, TIME, SECONDS, spent.exposed.get(name, 0.0), measured[name])
            for name in ("gather", "reduce", "host", "disk")
        ),
        Line("step", TIME, SECONDS, spent.step, measured["step"]),
    ]
    return found


_NO_PRESET = ("cpu", "unknown")


def _machine(engine: Engine) -> Machine:
    """As many devices as there are ranks, of the kind that this one is."""
    ranks, inside = engine.groups.control.size, _group(engine) or None
    if engine.device.type != "cuda":
        return preset("cpu", devices=ranks, per_node=inside or ranks)
    name = torch.cuda.get_device_name(engine.device)
    known = preset_of(name)
    found = preset(known or "A100-80", devices=ranks, per_node=inside or torch.cuda.device_count())
    return found if known is not None else replace(found, name="unknown")


def _is_spread(engine: Engine) -> bool:
    """This rank has a part of the model."""
    return engine.groups.model is not None


def _stages(engine: Engine) -> int:
    return 1 if engine.spread is None else engine.spread.pipeline


def _group(engine: Engine) -> int:
    """Ranks inside a group, where the mesh has two axes."""
    mesh = engine.groups.mesh
    return int(mesh.mesh.shape[-1]) if mesh is not None and mesh.ndim == 2 else 0


def _keeps(engine: Engine) -> Keeps:
    """Of several optimizers, what the one with the most elements keeps."""
    if not engine.optimizers:
        return Keeps(0, 0)

    def elements(optimizer: torch.optim.Optimizer) -> int:
        return sum(face.numel() for group in optimizer.param_groups for face in group["params"])

    return keeps_of(max(engine.optimizers, key=elements))
