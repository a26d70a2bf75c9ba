"""States that are not on the device: which part of them, and how long their update and their copies take.

The update on a host's cores and the one streamed through its devices run side by side and share the host's memory, so
together they reach less than the sum: 4.9e9 parameters a second of 3.3e9 + 3.3e9 on the machine of docs/offload.md. Of
the way to the device, 12 bytes up and 12 down a parameter, the stream reaches 0.72. Both are fitted to that machine.
"""

from __future__ import annotations

from typing import NamedTuple

from zerofold.placement import Tier
from zerofold.plan.machine import Machine
from zerofold.plan.point import Memory, Point

STATES_BYTES = 12
"""Of a parameter: master and two moments."""
TOGETHER, STREAM = 0.74, 0.72


class Shares(NamedTuple):
    """Which part of a state's elements is in host memory and on disk."""

    host: float = 0.0
    disk: float = 0.0

    @property
    def device(self) -> float:
        return 1 - self.host - self.disk


class Away(NamedTuple):
    optimizer: Shares
    gradients: Shares
    parameters: Shares


def away_of(point: Point, memory: Memory | None) -> Away:
    """By the tiers that were named; or, where the plan chose them unit by unit, by what it put there."""
    if not point.auto and point.part == 1:
        tiers = point.tiers
        return Away(*(_share(tier) for tier in (tiers.optimizer, tiers.gradients, tiers.parameters)))
    if memory is None:
        raise ValueError("tiers that differ between units need the bytes by tier: give memory=")
    gradients, parameters = (Shares(*memory.shares[state]) for state in ("gradients", "parameters"))
    return Away(_by_bytes(memory, "optimizer"), gradients, parameters)


def _share(tier: Tier) -> Shares:
    return Shares(float(tier is Tier.HOST), float(tier is Tier.NVME))


def _by_bytes(memory: Memory, state: str) -> Shares:
    found = [float(lines.get(state, 0)) for lines in (memory.device, memory.host, memory.disk)]
    everything = sum(found)
    return Shares(found[1] / everything, found[2] / everything) if everything else Shares()


def node_ranks(machine: Machine) -> int:
    return min(machine.per_node, machine.devices)


def host_update_seconds(elements: float, machine: Machine) -> float:
    """Of the elements of one rank, while all ranks of its node do the same."""
    ranks = node_ranks(machine)
    through_devices = ranks * STREAM * machine.to_host.rate / STATES_BYTES
    return elements * ranks / (TOGETHER * (machine.host_update + through_devices)) if elements else 0.0


def disk_seconds(read: float, written: float, machine: Machine) -> float:
    """Of the bytes of one rank; a node's ranks share its disks. Endless where there is no disk."""
    if not (read or written):
        return 0.0
    if not (machine.disk_read and machine.disk_write):
        return float("inf")
    return node_ranks(machine) * (read / machine.disk_read + written / machine.disk_write)


def host_copy_seconds(nbytes: float, machine: Machine) -> float:
    """One way, between a device and its host."""
    return machine.to_host.latency + nbytes / machine.to_host.rate if nbytes else 0.0
