"""What each state costs on this rank, what has been sent, and, while it is recorded, where the time goes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zerofold.attachments import Activations
from zerofold.engine import Engine
from zerofold.observe.recording import Recording
from zerofold.observe.states import master_nbytes, nbytes_of, parameter_nbytes, totals
from zerofold.observe.timeline import trace_events
from zerofold.parallel.mesh import AXES, DATA, PIPELINE, REPLICATE, TENSOR
from zerofold.placement import ACROSS, INSIDE, Tier
from zerofold.slab import Slab


class Ledger:
    """Reads the books of one model; it holds none itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def snapshot(self) -> dict[str, Any]:
        """psi, the parameters of the whole model; psi_here, those of this rank's part of it, before states are cut;
        where the mesh has tensor, pipeline or replicate axes `mesh`, with their sizes and this rank's coordinate;
        state_bytes by state, as held right now; comm_bytes and comm_calls by operation and comm_elements, since
        the start.

        `comm_bytes_by_group` tells what went to all ranks, inside this rank's group, or across groups, and over the
        "tensor" and "pipeline" axes. With a `zf.mesh`, `comm_bytes_by_axis` has the same by axis and operation:
        activations and their gradients along "tensor" and "pipeline", counted whoever sends them.
        `temporary_bytes` are no states: gathered parameters not owned here, fused and cached buffers, and, with
        `zf.checkpoint_blocks` that keeps inputs itself, "checkpoints": its block of the device, used or not, or what
        is on the device of those kept elsewhere. `checkpoint_bytes` has all of those by tier. After
        `zf.offload_activations` with this model, "activations" are those that have not left the device yet or are back,
        and `activation_bytes` has all of them by tier. `peak_checkpoint_bytes` and `peak_activation_bytes` are the most
        of each, in each tier.
        With `zf.pipeline`, `pipeline_bytes` are what its last step held besides: all parameters of this rank's stages
        gathered, their whole gradients before the reduction, and buffers for what is received.
        On CUDA, `device_memory` is what torch's allocator has of the device, for everything in this process, and its
        "fragmentation": the most it reserved over the most that was allocated.
        After `record`: `steps`, `time`, `peak_state_bytes`, `peak_tier_bytes`.
        """
        engine = self._engine
        held = totals(engine)
        return {
            "psi": engine.whole_psi,
            "psi_here": engine.psi,
            **self._mesh(),
            "state_bytes": {
                "parameters": held.parameters,
                "gradients": sum(slab.gradients.nbytes for slab in engine.slabs()),
                "optimizer": held.optimizer,
            },
            "temporary_bytes": {
                "gathered": sum(slab.storage.nbytes for slab in engine.slabs() if slab.is_temporary),
                "cached": engine.cache.nbytes,
                "buffers": engine.pool.nbytes,
                **self._checkpoints_on_device(),
                **self._activations_on_device(),
            },
            **_by_time("checkpoint_bytes", engine.checkpoints),
            **_by_time("activation_bytes", engine.activations),
            **self._pipeline(),
            **self._device_memory(),
            "tier_bytes": self._by_tier(),
            **self._offload(),
            "peak_live_bytes": engine.schedule.peak_live_bytes,
            "comm_bytes": engine.traffic.bytes_by_operation(),
            "comm_calls": engine.traffic.calls_by_operation(),
            "comm_bytes_by_group": engine.traffic.bytes_by_group(),
            **self._by_axis(),
            "comm_elements": round(sum(engine.traffic.elements.values())),
            **self._recorded(),
        }

    def _mesh(self) -> dict[str, Any]:
        spread = self._engine.spread
        if spread is None:
            return {}
        return {"mesh": {"axes": {axis: spread.size(axis) for axis in AXES}, "coordinate": spread.coordinate}}

    def _by_axis(self) -> dict[str, Any]:
        """Agreements of all who train the model, which are no axis', are left out."""
        engine = self._engine
        if engine.spread is None:
            return {}
        both = DATA if engine.spread.replicate == 1 else f"{REPLICATE} x {DATA}"
        axes = {"all": both, INSIDE: DATA, ACROSS: REPLICATE, TENSOR: TENSOR, PIPELINE: PIPELINE}
        found: dict[str, dict[str, int]] = {axes[group]: {} for group in ("all", TENSOR, PIPELINE)}
        for (operation, group), sent in engine.traffic.sent.items():
            if group in axes:
                of_axis = found.setdefault(axes[group], {})
                of_axis[operation] = of_axis.get(operation, 0) + round(sent)
        return {"comm_bytes_by_axis": {axis: sent for axis, sent in found.items() if sent}}

    def _checkpoints_on_device(self) -> dict[str, int]:
        found = self._engine.checkpoints
        return {} if found is None else {"checkpoints": max(found.arena_nbytes, found.nbytes["device"])}

    def _activations_on_device(self) -> dict[str, int]:
        found = self._engine.activations
        return {} if found is None else {"activations": found.nbytes["device"]}

    def _pipeline(self) -> dict[str, Any]:
        found = self._engine.pipeline
        return {} if found is None else {"pipeline_bytes": dict(found.memory)}

    def _device_memory(self) -> dict[str, Any]:
        device = self._engine.device
        if device.type != "cuda":
            return {}
        peaks = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
        found: dict[str, float] = {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak_allocated": peaks[1],
            "peak_reserved": peaks[0],
            "fragmentation": peaks[0] / max(1, peaks[1]),
        }
        return {"device_memory": found}

    def record(self, *, trace: bool = True, keep: int = 2) -> Recording:
        """From now on, until the recording is stopped or its `with` ends, time and peaks are written down.

        In a snapshot `time` then has the seconds of the mean step: computing ("compute"), waiting for communication
        that nothing hides ("gather", "reduce", "other"), for states on their way from "host" or "disk", and in the
        "update"; their sum is "step". A step ends with the step of the (last) optimizer. Whatever is between two of
        them counts, but for what is inside `with recording.paused()`.

        trace   also what every unit did when, for `trace`
        keep    of so many steps in a row, the last in which memory was looked at: the first four, 16 and 17, 32 and 33,
                64 and 65, and so on every 64

        >>> import torch, zerofold as zf
        >>> model = torch.nn.Linear(64, 64)
        >>> model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        >>> with zf.ledger(model).record():
        ...     model(torch.ones(1, 64)).sum().backward()
        ...     optimizer.step()
        >>> snapshot = zf.ledger(model).snapshot()
        >>> snapshot["steps"], snapshot["time"]["compute"] > 0, snapshot["peak_state_bytes"]["gradients"]
        (1, True, 16640)
        >>> zf.close(model)
        """
        return Recording(self._engine, trace=trace, keep=keep)

    def trace(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The timeline of the steps of this rank that were kept, as chrome://tracing and ui.perfetto.dev read it; also
        written to `path`.

        >>> import torch, zerofold as zf
        >>> model = torch.nn.Linear(64, 64)
        >>> model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        >>> with zf.ledger(model).record():
        ...     model(torch.ones(1, 64)).sum().backward()
        ...     optimizer.step()
        >>> {event["cat"] for event in zf.ledger(model).trace()["traceEvents"] if event["ph"] == "X"} >= {"forward"}
        True
        >>> zf.close(model)
        """
        recording = self.recording
        if recording is None or not recording.tape.traces:
            raise RuntimeError("there is no timeline: train a step inside `with zf.ledger(model).record()` first")
        events = trace_events(tuple(recording.tape.last_steps), rank=self._engine.rank)
        if path is not None:
            Path(path).write_text(json.dumps(events))
        return events

    @property
    def recording(self) -> Recording | None:
        """The last one, under way or over."""
        found = self._engine.recording
        return found if isinstance(found, Recording) else None

    def _recorded(self) -> dict[str, Any]:
        recording = self.recording
        if recording is None:
            return {}
        return {
            "steps": recording.steps,
            "time": recording.time(),
            "peak_state_bytes": dict(recording.peaks),
            "peak_tier_bytes": {tier: dict(states) for tier, states in recording.tier_peaks.items()},
        }

    def _by_tier(self) -> dict[str, dict[str, int]]:
        """States by the memory they are in; on the device without what is gathered for a while, and with local sums of
        gradients whose place is elsewhere."""
        memory, held = self._engine.offloading.memory, totals(self._engine)
        device = {
            "parameters": held.device_parameters,
            "gradients": sum(slab.gradients.device_nbytes for slab in self._engine.slabs()),
            "optimizer": held.device_optimizer,
        }
        return {"device": device, **{tier.value: memory.bytes_by_state(tier) for tier in (Tier.HOST, Tier.NVME)}}

    def _offload(self) -> dict[str, Any]:
        engine = self._engine
        if engine.offloading.plan is None:
            return {}
        plan = engine.offloading.plan
        predicted = {tier.value: dict(states) for tier, states in plan.predicted.items()}
        predicted[Tier.DEVICE.value]["gathered units and update"] = plan.extra_device
        disk = engine.offloading.memory.disk
        found: dict[str, Any] = {"predicted": predicted, "update": {}}
        if engine.updates is not None:
            engine.finish_updates()
            found["update"] = engine.updates.figures
            found["update_ring_bytes"] = engine.updates.nbytes_on_device
        if disk is not None:
            found["disk"] = {"read": disk.bytes_read, "written": disk.bytes_written, **disk.rates()._asdict()}
        return {"offload": found}

    def by_unit(self) -> dict[str, dict[str, int]]:
        """Bytes sent, by unit and operation."""
        table: dict[str, dict[str, int]] = {}
        for (operation, unit), sent in self._engine.traffic.bytes.items():
            table.setdefault(unit, {})[operation] = round(sent)
        return table

    def units(self) -> list[dict[str, Any]]:
        """For each unit, in forward order: its name ("" is the root), parameters, bytes of its states on this rank now,
        the most that its gradients and gathered parameters took while it was recorded, and bytes sent by operation.
        """
        engine, sent, recording = self._engine, self.by_unit(), self.recording
        moments = self._moments_by_unit()
        return [
            {
                "name": unit.name,
                "parameters": sum(parameter.numel() for slab in unit.slabs for parameter in slab.parameters),
                "state_bytes": {
                    "parameters": sum(map(parameter_nbytes, unit.slabs)),
                    "gradients": sum(slab.gradients.nbytes for slab in unit.slabs),
                    "optimizer": moments.get(unit.name, 0) + sum(map(master_nbytes, unit.slabs)),
                },
                "peak_bytes": {
                    "gradients": 0 if recording is None else recording.unit_peaks.get(unit.name, 0),
                    "gathered": unit.full_nbytes,
                },
                "tiers": _tiers(unit.slabs),
                "comm_bytes": sent.get(unit.name, {}),
            }
            for unit in engine.units
        ]

    def last_calls(self) -> list[str]:
        """The last collectives this rank started, oldest first."""
        return [str(call) for call in self._engine.traffic.calls]

    def _moments_by_unit(self) -> dict[str, int]:
        places, found = self._engine.places(), dict[str, int]()
        for optimizer in self._engine.optimizers:
            for parameter, state in optimizer.state.items():
                place = places.get(id(parameter))
                if place is not None:
                    nbytes = sum(nbytes_of(value) for value in state.values() if hasattr(value, "nbytes"))
                    found[place[0].unit] = found.get(place[0].unit, 0) + nbytes
        return found


def _by_time(name: str, kept: Activations | None) -> dict[str, dict[str, int]]:
    return {} if kept is None else {name: kept.nbytes, f"peak_{name}": dict(kept.peak_nbytes)}


def _tiers(slabs: Sequence[Slab]) -> dict[str, str]:
    """Where a unit's states live, all of its slabs alike."""
    return {state: tier.value for state, tier in vars(slabs[0].tiers).items()} if slabs else {}
