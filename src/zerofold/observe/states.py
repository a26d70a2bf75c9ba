"""How many bytes each state takes on this rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.engine import Engine
from zerofold.placement import Tier
from zerofold.sharded import ShardedTensor
from zerofold.slab import Slab
from zerofold.slab_away import AwaySlab


class Totals(NamedTuple):
    """Bytes of what stays between steps, in whatever memory; and of it, on the device."""

    parameters: int
    optimizer: int
    device_parameters: int
    device_optimizer: int

    @property
    def on_device(self) -> int:
        return self.device_parameters + self.device_optimizer


def totals(engine: Engine) -> Totals:
    slabs, states = engine.slabs(), optimizer_tensors(engine)
    device = engine.offloading.memory.device
    here = [slab for slab in slabs if not slab.is_away]
    copies = [slab for slab in slabs if slab.is_away and slab.tiers.parameters is Tier.DEVICE]
    of_groups = sum(slab.group_copy.nbytes for slab in slabs if slab.is_away and slab.group_copy is not None)
    return Totals(
        parameters=sum(map(parameter_nbytes, slabs)),
        optimizer=sum(map(nbytes_of, states)) + sum(map(master_nbytes, slabs)),
        device_parameters=sum(map(parameter_nbytes, here)) + sum(map(_beside_master, copies)) + of_groups,
        device_optimizer=sum(nbytes_of(state) for state in states if _is_on_device(state, device))
        + sum(map(master_nbytes, here)),
    )


def optimizer_tensors(engine: Engine) -> list[Tensor]:
    states = [state for optimizer in engine.optimizers for state in optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def parameter_nbytes(slab: Slab) -> int:
    """What forward computes with and stays. A master counts with the optimizer's states."""
    if slab.is_temporary:
        kept = 0 if slab.dtypes.has_master else slab.raw_shard.nbytes
        if isinstance(slab, AwaySlab) and slab.resident is not None and not slab.resident_is_lent:
            kept += slab.resident.nbytes
    else:
        kept = slab.storage.nbytes
    return kept + (0 if slab.group_copy is None else slab.group_copy.nbytes)


def _beside_master(slab: Slab) -> int:
    """On the device, of a slab whose master is elsewhere: whole parameters that stay, or this rank's part of them."""
    if slab.is_kept:
        return slab.storage.nbytes
    return 0 if slab.resident is None else slab.resident.nbytes


def master_nbytes(slab: Slab) -> int:
    return slab.raw_shard.nbytes if slab.dtypes.has_master else 0


def nbytes_of(tensor: Tensor) -> int:
    return tensor.raw_local.nbytes if isinstance(tensor, ShardedTensor) else tensor.nbytes


def _is_on_device(tensor: Tensor, device: torch.device) -> bool:
    """On a CPU run, what was taken from another tier is not the device's either: it is mapped memory."""
    piece = tensor.raw_local if isinstance(tensor, ShardedTensor) else tensor
    return piece.device == device and (device.type != "cpu" or piece.untyped_storage().resizable())
