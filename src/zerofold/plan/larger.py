"""What would have to change for the next larger model, and the largest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from zerofold.placement import row
from zerofold.plan.ground import ground_of
from zerofold.plan.machine import GB, Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Point, degrees_in_words, name_of
from zerofold.plan.predict import lacks
from zerofold.plan.search import Search, SearchResult, held_by_auto, room_for_auto, states_fit
from zerofold.plan.shape import ROOT, Activity, ModelShape, PerSample, Phase
from zerofold.plan.space import Space

FACTORS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing to have more of: `name` is a field of Machine, or "nothing" where the model fits as it is."""

    name: str
    now: int
    needed: int
    point: Point
    """At which the larger model then fits."""

    def __str__(self) -> str:
        if self.name == "nothing":
            return f"it fits here as well, with {_in_words(self.point)}"
        if self.name == "devices":
            return f"{self.needed} devices instead of {self.now}"
        what = {"device_memory": "of memory on each device", "host_memory": "of host memory in a node"}
        return f"{self.needed / GB:.0f} GB {what.get(self.name, 'of disk in a node')} instead of {self.now / GB:.0f}"


@dataclass(frozen=True, kw_only=True)
class Larger:
    """The next larger model, and each change that alone would make it fit, the least of its kind."""

    model: ModelShape
    changes: tuple[Change, ...]

    @property
    def sentence(self) -> str:
        count = self.model.parameters
        name = f"Twice the blocks ({_count(count)} parameters)"
        if not self.changes:
            return f"{name} would not fit with {FACTORS[-1]} times as much of any one thing."
        if self.changes[0].name == "nothing":
            return f"{name}: {self.changes[0]}, if a micro-batch is one sample."
        return f"{name} would fit with {', or '.join(map(str, self.changes))}."


def next_larger(model: ModelShape, machine: Machine, result: SearchResult) -> Larger:
    """The model with twice the blocks: whether it fits too, or what there would have to be more of.

    Looked at in the space of `result`, one sample in a micro-batch, whatever the time.
    """
    larger = deeper(model, 2)
    best = (
        Search(replace(result.space, model=larger, machine=machine, micro_batches=(1,), global_samples=None)).run().best
    )
    if best is not None:
        return Larger(model=larger, changes=(Change(name="nothing", now=0, needed=0, point=best.point),))
    return Larger(model=larger, changes=tuple(_changes(larger, machine, result.space)))


def _changes(larger: ModelShape, machine: Machine, space: Space) -> Iterator[Change]:
    for name in ("devices", "device_memory", "host_memory", "disk"):
        now = getattr(machine, name)
        base = now or machine.host_memory  # a disk where there was none
        for factor in FACTORS if now else (1, *FACTORS):
            more: dict[str, Any] = {name: factor * base}
            richer = replace(machine, **more)
            if name == "disk" and not machine.disk_read:
                richer = replace(richer, disk_read=3e9, disk_write=3e9)  # any rate: it is not about time
            fitting = some_point(replace(space, model=larger, machine=richer))
            if fitting is not None:
                yield Change(name=name, now=now, needed=factor * base, point=fitting)
                break


def largest(
    machine: Machine,
    make: Callable[[int], ModelShape],
    *,
    precision: str = "bf16",
    offload: bool = True,
) -> ModelShape | None:
    """The largest of the models `make(1)`, `make(2)`, … that fits, which are to grow with their number.

    By doubling and halving, so that a model of any size is found in some tens of trials.
    """

    def fits(number: int) -> bool:
        space = Space(model=make(number), machine=machine, precision=precision, offload=offload)
        return some_point(space) is not None

    if not fits(1):
        return None
    low = 1
    while fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return make(low)


def some_point(space: Space) -> Point | None:
    """Any point that fits, however slow: the one with the least batch of each kind is tried."""
    least = replace(space, micro_batches=(1,), global_samples=None)
    # The most degrees first: what is shared by more devices fits sooner.
    groups = sorted(least.groups(), key=lambda point: (-point.tensor * point.pipeline, -point.checkpoint_every))
    distinct = {replace(group, accumulate=1): group for group in groups}
    mixed = []
    for group in distinct.values():
        ground = ground_of(space.model, space.machine, group)
        for point in least.members(group):
            if not states_fit(ground, row(point.stage), point, space.machine):
                continue
            if point.auto:
                mixed.append(point)
            elif not lacks(memory(space.model, space.machine, point), space.machine):
                return point
    # To place units one by one takes longer, so it is tried last, and only where there is the most room for it.
    rooms = [room_for_auto(space.model, space.machine, point) for point in mixed]
    some = [(room.left, point) for room, point in zip(rooms, mixed, strict=True) if room is not None]
    left, roomiest = max(some, key=lambda pair: pair[0], default=(-1.0, Point()))
    return roomiest if left >= 0 and held_by_auto(space.model, space.machine, roomiest) is not None else None


def deeper(model: ModelShape, times: int) -> ModelShape:
    """The same model with more blocks: what each block leaves for backward is there so many times more often.

    >>> from zerofold.plan.shape import UnitShape
    >>> units = (UnitShape(name="", trained=10), UnitShape(name="block", trained=100, count=3))
    >>> deeper(ModelShape(name="m", units=units), 2).parameters
    610
    """
    units = tuple(unit if unit.name == ROOT else replace(unit, count=times * unit.count) for unit in model.units)
    return replace(
        model,
        name=f"{model.name} with {times} times the blocks",
        units=units,
        layers=None if model.layers is None else times * model.layers,
        activities=tuple(_deeper(activity, model, times) for activity in model.activities),
    )


def _deeper(activity: Activity, model: ModelShape, times: int) -> Activity:
    left = PerSample()
    for moment in activity.moments:
        if moment.phase is Phase.FORWARD and model.units[moment.unit].name != ROOT:
            left += PerSample(moment.growth.fixed * moment.repeats, moment.growth.each * moment.repeats)
    more = PerSample(left.fixed * (times - 1), left.each * (times - 1))
    blocks = [number for number, moment in enumerate(activity.moments) if model.units[moment.unit].name != ROOT]
    moments = list(activity.moments)
    for number in range(blocks[0], blocks[-1] + 1) if blocks else ():  # before and after, nothing of a block is kept
        moment = moments[number]
        repeats = moment.repeats if model.units[moment.unit].name == ROOT else times * moment.repeats
        moments[number] = replace(moment, alive=moment.alive + more, repeats=repeats)
    kept = activity.checkpoints
    return replace(activity, moments=tuple(moments), checkpoints=PerSample(kept.fixed * times, kept.each * times))


def _count(number: float) -> str:
    """
    >>> _count(6_830_000), _count(13.8e9), _count(2.0001e15)
    ('6.83e6', '13.8e9', '2000e12')
    """
    for power in (12, 9, 6, 3):
        if number >= 10**power:
            return f"{number / 10**power:.{4 if power == 12 else 3}g}e{power}"
    return f"{number:.0f}"


def _in_words(point: Point) -> str:
    return ", ".join(part for part in (name_of(point), degrees_in_words(point)) if part)
