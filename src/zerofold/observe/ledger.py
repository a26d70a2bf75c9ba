"""What each state costs on this rank, and what has been sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofold.engine import Engine
from zerofold.placement import Tier
from zerofold.sharded import ShardedTensor
from zerofold.slab import Slab


class Ledger:
    """Reads the books of one model; it holds none itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def snapshot(self) -> dict[str, Any]:
        """psi; state_bytes by state, as held right now; comm_bytes and comm_calls by operation and comm_elements, since
        the start.

        `comm_bytes_by_group` tells what went to all ranks, inside this rank's group, or across groups.
        `temporary_bytes` are no states: gathered parameters not owned here, and fused and cached buffers.
        """
        engine = self._engine
        return {
            "psi": engine.psi,
            "state_bytes": {
                "parameters": sum(_parameter_nbytes(slab) for slab in engine.slabs()),
                "gradients": sum(slab.gradients.nbytes for slab in engine.slabs()),
                "optimizer": sum(_nbytes(value) for value in self._optimizer_tensors())
                + sum(slab.master.nbytes for slab in engine.slabs() if slab.dtypes.has_master),
            },
            "temporary_bytes": {
                "gathered": sum(slab.storage.nbytes for slab in engine.slabs() if _is_temporary(slab)),
                "cached": engine.cache.nbytes,
                "buffers": engine.pool.nbytes,
            },
            "tier_bytes": self._by_tier(),
            **self._offload(),
            "peak_live_bytes": engine.schedule.peak_live_bytes,
            "comm_bytes": engine.traffic.bytes_by_operation(),
            "comm_calls": dict(engine.traffic.counts),
            "comm_bytes_by_group": engine.traffic.bytes_by_group(),
            "comm_elements": round(sum(engine.traffic.elements.values())),
        }

    def _by_tier(self) -> dict[str, dict[str, int]]:
        """States by the memory they are in; on the device without what is gathered for a while."""
        memory, slabs = self._engine.offloading.memory, self._engine.slabs()
        here = [slab for slab in slabs if not slab.is_away]
        copies = [slab.copy_of_shard for slab in slabs if slab.is_away and slab.tiers.parameters is Tier.DEVICE]
        moments = [value for value in self._optimizer_tensors() if _is_on_device(value, memory.device)]
        device = {
            "parameters": sum(map(_parameter_nbytes, here)) + sum(copy.nbytes for copy in copies if copy is not None),
            "gradients": sum(slab.gradients.nbytes for slab in slabs if slab.tiers.gradients is Tier.DEVICE),
            "optimizer": sum(map(_nbytes, moments)) + sum(s.master.nbytes for s in here if s.dtypes.has_master),
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

    def last_calls(self) -> list[str]:
        """The last collectives this rank started, oldest first."""
        return [str(call) for call in self._engine.traffic.calls]

    def _optimizer_tensors(self) -> list[Tensor]:
        states = [state for optimizer in self._engine.optimizers for state in optimizer.state.values()]
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _is_temporary(slab: Slab) -> bool:
    """The storage goes after use."""
    return slab.has_own_shard and not slab.is_kept


def _parameter_nbytes(slab: Slab) -> int:
    """What forward computes with and stays. A master counts with the optimizer's states."""
    if _is_temporary(slab):
        kept = 0 if slab.dtypes.has_master else slab.master.nbytes
    else:
        kept = slab.storage.nbytes
    return kept + (0 if slab.copy is None else slab.copy.nbytes)


def _nbytes(tensor: Tensor) -> int:
    return tensor.form.nbytes if isinstance(tensor, ShardedTensor) else tensor.nbytes


def _is_on_device(tensor: Tensor, device: torch.device) -> bool:
    """On a CPU run, what was taken from another tier is not the device's either: it is mapped memory."""
    form = tensor.form if isinstance(tensor, ShardedTensor) else tensor
    return form.device == device and (device.type != "cpu" or form.untyped_storage().resizable())
