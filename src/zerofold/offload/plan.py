"""Which unit's states go where, what that takes of each memory, and what to do where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerofold.offload.budget import GIB, Budget
from zerofold.offload.placing import Bytes, Choice, Room, Search, total
from zerofold.offload.sizes import ByTier, UnitSize, summed
from zerofold.offload.wishes import AUTO, Offload, read_offload
from zerofold.placement import Tier, Tiers

# Kept free for activations where the plan is free to choose: the first that leaves room for all states.
_RESERVES = (0.15, 0.12, 0.09, 0.06, 0.04)
_AMPLE_RESERVE = 0.3  # where the host has room for all that leaves the device: a unit there costs little, too little
# memory for activations costs the run
_LEAST_RESERVE = 2 * GIB


class OffloadError(MemoryError):
    """The states do not fit where they were asked to go; the message has the numbers and a plan that fits."""


@dataclass(frozen=True)
class Plan:
    """Tiers by unit, and what they come to."""

    tiers: dict[str, Tiers]
    predicted: ByTier
    budget: Budget
    extra_device: int
    """Gathered units and the buffers of the update."""
    reserve: int
    is_least_reserve: bool
    """All states fit only because less than usual is kept for activations."""

    def text(self) -> str:
        """A few lines for a person."""
        where = [tiers.optimizer for tiers in self.tiers.values()]
        moved = sum(tiers.parameters is not Tier.DEVICE for tiers in self.tiers.values())
        counts = f"{where.count(Tier.DEVICE)} on the device, {where.count(Tier.HOST)} on the host"
        counts += f", {where.count(Tier.NVME)} on disk" if Tier.NVME in where else ""
        lines = [f"offload: optimizer states of {len(where)} units: {counts}; parameters of {moved} off the device"]
        taken = self.extra_device + self.reserve
        lines.append(self._line("device", Tier.DEVICE, self.budget.device, taken))
        kept = f"  and     {_gib(self.extra_device)} for gathered units and the update"
        kept += f", {_gib(self.reserve)} kept for activations" if self.reserve else ""
        lines.append(kept + (", less than usual: else the states would not fit" if self.is_least_reserve else ""))
        lines.append(self._line("host", Tier.HOST, self.budget.host))
        if self.budget.disk is not None:
            lines.append(self._line("disk", Tier.NVME, self.budget.disk))
        elif self.reserve:  # the plan was free to choose
            lines.append("  disk    not used: offload= has no 'path'")
        return "\n".join(lines)

    def used(self, tier: Tier) -> int:
        return sum(self.predicted[tier].values())

    def _line(self, name: str, tier: Tier, budget: int, taken: int = 0) -> str:
        used = self.used(tier)
        states = [f"{state} {_gib(nbytes)}" for state, nbytes in self.predicted[tier].items() if nbytes]
        left = f"{_gib(max(0, budget - used - taken))} left"
        return f"  {name:<7} {_gib(used)} of {_gib(budget)} GiB: {', '.join([*states, left])}"


def place(units: Sequence[UnitSize], offload: Offload, budget: Budget, *, extra_device: int = 0) -> Plan:
    """The plan for units in forward order, the root first; raises OffloadError where the states do not fit.

    >>> from zerofold.offload.wishes import read_offload
    >>> blocks = [UnitSize(f"block{index}", 100 * 2**20) for index in range(8)]
    >>> plan = place(blocks, read_offload("auto"), Budget(device=8 * GIB, host=32 * GIB))
    >>> [tiers.optimizer.value for tiers in plan.tiers.values()]
    ['device', 'device', 'device', 'device', 'host', 'host', 'host', 'host']
    >>> print(plan.text())
    offload: optimizer states of 8 units: 4 on the device, 4 on the host; parameters of 4 off the device
      device  5.5 of 8.0 GiB: optimizer 4.7, gradients 0.8, 0.1 left
      and     0.0 for gathered units and the update, 2.4 kept for activations
      host    5.5 of 32.0 GiB: optimizer 4.7, parameters 0.8, 26.5 left
      disk    not used: offload= has no 'path'
    """
    found = try_place(units, offload, budget, extra_device=extra_device)
    if found is None:
        raise OffloadError(_refusal(units, offload, budget, extra_device))
    return found


def try_place(units: Sequence[UnitSize], offload: Offload, budget: Budget, *, extra_device: int = 0) -> Plan | None:
    """The same for whoever can do without a reason: None where the states do not fit."""
    search = Search(units, offload, budget.disk is not None)
    reserves = _reserves(offload, budget)
    if len(reserves) > 1:
        ample = max(_LEAST_RESERVE, int(_AMPLE_RESERVE * budget.device))
        placed = search.place(Room.of(budget, extra_device + ample))
        if placed is not None and all(Tier.NVME not in vars(choice.tiers).values() for choice in placed):
            return _plan(units, placed, budget, extra_device, ample, False)
    for attempt, reserve in enumerate(reserves):
        placed = search.place(Room.of(budget, extra_device + reserve))
        if placed is not None:
            return _plan(units, placed, budget, extra_device, reserve, attempt > 0)
    return None


def _plan(
    units: Sequence[UnitSize], placed: list[Choice], budget: Budget, extra_device: int, reserve: int, is_least: bool
) -> Plan:
    tiers = {unit.name: choice.tiers for unit, choice in zip(units, placed, strict=True)}
    return Plan(tiers, summed(units, tiers), budget, extra_device, reserve, is_least)


def _reserves(offload: Offload, budget: Budget) -> list[int]:
    """Those to try, largest first. Where every tier was named there is nothing to choose, so nothing is kept back."""
    if offload.reserve is not None:
        return [offload.reserve]
    if AUTO not in (offload.optimizer, offload.parameters):
        return [0]
    parts = [int(part * budget.device) for part in _RESERVES]
    return [max(_LEAST_RESERVE, parts[0]), *(part for part in parts if part < max(_LEAST_RESERVE, parts[0]))]


def _refusal(units: Sequence[UnitSize], offload: Offload, budget: Budget, extra_device: int) -> str:
    reserve = _reserves(offload, budget)[-1]
    used = total(Search(units, offload, budget.disk is not None).cheapest())
    if offload.optimizer == AUTO:
        have = budget.host if budget.one_memory else max(0, budget.device - extra_device - reserve) + budget.host
        said = (
            f"the states need {_size(used.device + used.host + used.disk)}, and device, host and disk "
            f"together have {_size(have + (budget.disk or 0))} for them"
        )
    else:
        said = " and ".join(_overdrawn(used, offload, budget, extra_device + reserve)) or "no placement was found"
    fitting = list(_fitting(units, offload, budget, extra_device))
    if not fitting:
        return f"offload: {said}; nothing fits here: give more memory, more ranks or a smaller model"
    return f"offload: {said}; fits: {', or '.join(fitting[:2])}"


def _overdrawn(used: Bytes, offload: Offload, budget: Budget, taken_on_device: int) -> Iterator[str]:
    for name, need, have in (
        ("device memory", used.device + taken_on_device, budget.device),
        ("host memory", used.host + used.device * budget.one_memory, budget.host),
        (f"the disk of {offload.path}", used.disk, budget.disk or 0),
    ):
        if need > have:
            yield f"needs {_size(need)} of {name}, where {_size(have)} may be used"


def _fitting(units: Sequence[UnitSize], offload: Offload, budget: Budget, extra_device: int) -> Iterator[str]:
    """Other wishes that fit, nearest to this one first."""
    given = offload.optimizer
    asked = given if isinstance(given, float) else 0.0 if given is Tier.DEVICE else 1.0
    fractions = sorted((part / 10 for part in range(1, 10)), key=lambda part: abs(part - asked))
    wishes: list[dict[str, Any]] = [{"optimizer": part} for part in ("host", *fractions)]
    if not all(unit.whole_parameters for unit in units):
        wishes.append({"optimizer": "host", "parameters": "host"})
    path = {"path": offload.path or "..."}
    wishes += [{"optimizer": AUTO}, {"optimizer": AUTO} | path]
    for wish in wishes:
        # A disk that nobody named may be of any size: what it must hold is said.
        disk = (budget.disk or 2**62) if "path" in wish else None
        other = replace(read_offload(wish), reserve=offload.reserve)
        plan = try_place(units, other, replace(budget, disk=disk), extra_device=extra_device)
        if plan is not None:
            extent = f"{_size(plan.used(Tier.DEVICE) + extra_device)} on the device"
            extent += f", {_size(plan.used(Tier.HOST))} on the host"
            extent += f", {_size(plan.used(Tier.NVME))} on disk" if "path" in wish else ""
            yield f"offload={wish} with {extent}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"


def _size(nbytes: int) -> str:
    """For numbers that are compared with each other, however small.

    >>> _size(3 * GIB), _size(3 * 2**20), _size(3000)
    ('3.0 GiB', '3.0 MiB', '2.9 KiB')
    """
    unit, name = next((pair for pair in ((GIB, "GiB"), (2**20, "MiB")) if nbytes >= pair[0] / 10), (2**10, "KiB"))
    return f"{nbytes / unit:.1f} {name}"
