"""In which memory the states of every unit are: by the tiers of the point, or by the rule that the engine uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zerofold.offload.budget import Budget
from zerofold.offload.plan import try_place
from zerofold.offload.sizes import ByTier, bytes_of
from zerofold.offload.wishes import AUTO, Offload
from zerofold.placement import Tier, Tiers
from zerofold.plan.held import HeldUnit, Ranks
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point

_MOST_PLACED = 64


@dataclass(frozen=True)
class Tiered:
    """States by memory."""

    by_tier: ByTier
    placed: Sequence[Mapping[Tiers, int]]
    """How many of each unit are where."""

    @property
    def is_offloaded(self) -> bool:
        return any(tiers.is_offloaded for each in self.placed for tiers in each)

    def shares(self, units: Sequence[HeldUnit]) -> dict[str, tuple[float, float]]:
        """Of the elements of a state, those on the host and on the disk. Bytes would not tell: a gradient may have the
        place of its parameter, and what is made from masters that stay on the device takes none."""
        found = {}
        for state in ("gradients", "parameters"):
            counts = dict.fromkeys(Tier, 0)
            for unit, some in zip(units, self.placed, strict=True):
                frozen = unit.size.frozen if state == "parameters" else 0
                for tiers, times in some.items():
                    counts[getattr(tiers, state)] += times * (unit.size.trained + frozen)
            every = sum(counts.values())
            found[state] = (counts[Tier.HOST] / every, counts[Tier.NVME] / every) if every else (0.0, 0.0)
        return found


def by_tier(
    units: Sequence[HeldUnit],
    ranks: Ranks,
    machine: Machine,
    point: Point,
    *,
    taken: int,
    activations: int,
    given: Mapping[str, Tiers] | None = None,
) -> Tiered:
    """Where the states are. `taken`: device bytes that are no states; `activations`: those that must stay free;
    `given`: tiers by unit, where they are known."""
    found: ByTier = {tier: {"parameters": 0, "gradients": 0, "optimizer": 0} for tier in Tier}
    if given:
        placed: list[dict[Tiers, int]] = [{given.get(unit.shape.name, Tiers()): unit.shape.count} for unit in units]
    elif point.auto:
        placed = _auto(units, ranks, machine, taken, activations)
    else:
        placed = [{point.tiers: unit.shape.count} for unit in units] if point.part == 1 else _part(units, point)
    for unit, some in zip(units, placed, strict=True):
        for tiers, times in some.items():
            if not tiers.is_offloaded:
                for state, nbytes in unit.states._asdict().items():
                    found[Tier.DEVICE][state] += math.trunc(nbytes) * times
                continue
            for tier, states in bytes_of(unit.size, tiers).items():
                for state, number in states.items():
                    found[tier][state] += number * times
            found[Tier.DEVICE]["optimizer"] += unit.counters * times  # of steps: they stay where the optimizer is
    return Tiered(found, placed)


def _part(units: Sequence[HeldUnit], point: Point) -> list[dict[Tiers, int]]:
    """The last units, so that nearest to a part of the elements go (`zerofold.offload.placing.first_offloaded`)."""
    wanted = point.part * sum(unit.size.trained * unit.shape.count for unit in units)
    found: list[dict[Tiers, int]] = []
    for unit in reversed(units):
        one = unit.size.trained
        gone = min(unit.shape.count, math.floor(wanted / one + 0.5)) if one and wanted > 0 else 0
        wanted -= gone * one
        found.append({tiers: n for tiers, n in ((Tiers(), unit.shape.count - gone), (point.tiers, gone)) if n})
    return found[::-1]


def _auto(
    units: Sequence[HeldUnit], ranks: Ranks, machine: Machine, taken: int, activations: int
) -> list[dict[Tiers, int]]:
    """How many of each unit go where, by the rule that the engine uses; all to the host, where nothing fits.

    Of very many equal units some are placed together: the engine's choice may differ by less than so many.
    """
    may_go = ranks.placed.parameters.is_cut or ranks.alone
    away = Tiers(Tier.HOST, Tier.HOST, Tier.HOST if may_go else Tier.DEVICE)
    everything_away = [{away: unit.shape.count} for unit in units]
    at_least = sum(_bytes(bytes_of(unit.size, away), Tier.DEVICE) * unit.shape.count for unit in units)
    if taken + activations + at_least > machine.device_memory:
        return everything_away
    sizes, of_unit = [], {}
    for index, unit in enumerate(units):
        count, places = unit.shape.count, min(unit.shape.count, _MOST_PLACED)
        for place in range(places):
            together = count * (place + 1) // places - count * place // places
            name = f"{index}.{place}"
            of_unit[name] = index, together
            size = unit.size
            sizes.append(
                replace(
                    size,
                    name=name,
                    trained=size.trained * together,
                    frozen=size.frozen * together,
                    gathered_bytes=size.gathered_bytes * together,
                    copy_bytes=size.copy_bytes * together,
                )
            )
    budget = Budget(
        machine.device_memory,
        machine.host_memory // ranks.on_node,
        machine.disk // ranks.on_node if machine.disk else None,
        one_memory=machine.kind == "cpu",
    )
    wish = Offload(optimizer=AUTO, parameters=AUTO, path="disk" if machine.disk else None, reserve=activations)
    plan = try_place(sizes, wish, budget, extra_device=taken)
    if plan is None:
        return everything_away
    found: list[dict[Tiers, int]] = [{} for _ in units]
    for name, (index, together) in of_unit.items():
        times = found[index]
        times[plan.tiers[name]] = times.get(plan.tiers[name], 0) + together
    return found


def _bytes(by_tier: ByTier, tier: Tier) -> int:
    return sum(by_tier[tier].values())
