"""The fastest point that fits, without predicting every point.

Points are taken off a heap in the order of a time that none of them can be below, so the first that is known exactly
and fits is the best. Three kinds of entries:

    a group     rows and tiers open         its arithmetic, pipeline bubble and tensor parallelism, which every row has
    "auto"      tiers open, unit by unit    the same, with the waits that are there when no more is away from the device
                                            than must be
    a point                                 its time

Nothing is left out that could have won. Memory, which costs more to predict, is asked of points in that order only; it
is not asked where the states alone take more than there is, or where a smaller micro-batch did not fit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zerofold.placement import Cut, Row, Tier, Tiers, row
from zerofold.plan.activities import activity_of
from zerofold.plan.away import STATES_BYTES, Away, Shares, disk_seconds, host_update_seconds, node_ranks
from zerofold.plan.followed import greatest
from zerofold.plan.ground import Ground, ground_of
from zerofold.plan.held import UPDATE_RING
from zerofold.plan.machine import Machine
from zerofold.plan.memory import memory
from zerofold.plan.pipelining import in_flight
from zerofold.plan.point import Memory, Point, Prediction
from zerofold.plan.predict import lacks, predict
from zerofold.plan.shape import Activity, ModelShape
from zerofold.plan.space import ROWS, Space
from zerofold.plan.times import times
from zerofold.plan.waits import Waits

_SLACK = 1 - 1e-9  # sums in another order may differ in their last bits; a bound must not be above what it bounds
MOMENTS_BYTES = 8
RUNNERS_UP = 4
ROUNDING = 2**10
"""Bytes: parts of tensors are rounded up, numbers of bytes down."""
AWAY = 1.01
_BESIDE = (
    "gathered units",
    "fused buffers",
    "library workspaces",
    "local gradients",
    "activation checkpoints",
    "working activations",
    "logits",
)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """`best` is None where nothing fits. `tried` points had time and memory predicted, `pruned` did not need to."""

    best: Prediction | None
    tried: int
    pruned: int
    runners_up: tuple[Prediction, ...] = ()
    space: Space


class _Entry(NamedTuple):
    """Order on the heap: the bound, then the place in the space, so that equal times have one winner."""

    bound: float
    place: tuple[int, int]
    is_exact: bool
    point: Point
    memory: Memory | None = None


def search(
    model: ModelShape,
    machine: Machine,
    *,
    global_samples: int | None = None,
    precision: str = "bf16",
    rows: tuple[str, ...] = ROWS,
    offload: bool = True,
    runners_up: int = RUNNERS_UP,
    sequence_parallel: bool = True,
    **limits: tuple[int, ...] | None,
) -> SearchResult:
    """The point with the most samples a second at the wished global batch, among all that fit.

    `limits` are those of `Space`: tensor, pipeline, micro_batches, checkpoints. Where `global_samples` is left out, the
    batch is free, and one micro-batch makes a step (some for each stage of a pipeline).

    >>> from zerofold.plan.presets import preset
    >>> from zerofold.plan.transformer import from_parameters
    >>> found = search(from_parameters(7e9), preset("A100-80", devices=8), global_samples=64)
    >>> found.best.fits, found.best.point.samples * 8
    (True, 64)
    """
    space = Space(
        model=model,
        machine=machine,
        global_samples=global_samples,
        precision=precision,
        rows=rows,
        offload=offload,
        sequence_parallel=sequence_parallel,
        **limits,
    )
    return Search(space).run(1 + runners_up)


def weighed(seconds: float, point: Point) -> float:
    """By which points are compared: what leaves the device must be worth a hundredth, since a run then depends on the
    host's other work too, which no model knows."""
    return seconds * AWAY if point.is_away else seconds


@dataclass
class Search:
    space: Space
    tried: int = 0
    _heap: list[_Entry] = field(default_factory=list)
    _grounds: dict[int, Ground] = field(default_factory=dict)
    _activities: dict[Hashable, Activity] = field(default_factory=dict)
    _too_large: dict[Hashable, int] = field(default_factory=dict)
    """Of points that differ in nothing else: the least micro-batch that is known not to fit."""

    def run(self, wanted: int = 1) -> SearchResult:
        found: list[Prediction] = []
        groups = list(self.space.groups())
        ground_for: dict[Point, Ground] = {}
        for number, group in enumerate(groups):
            here = replace(group, checkpoints_on="device")  # where inputs wait is none of the ground
            if here not in ground_for:
                ground_for[here] = ground_of(self.space.model, self.space.machine, here)
            ground = self._grounds[number] = ground_for[here]
            bound = weighed(ground.floor.seconds, group) * _SLACK / self._samples(group, ground)
            heapq.heappush(self._heap, _Entry(bound, (number, -1), False, group))
        while self._heap and len(found) < wanted:
            entry = heapq.heappop(self._heap)
            if entry.place[1] < 0:
                self._open(entry)
            elif entry.is_exact and entry.point.auto:
                found.append(self._prediction(entry))
            elif (held := self._held(entry.point, entry.place[0])) is None:
                continue
            elif entry.is_exact:
                found.append(self._prediction(entry._replace(memory=held)))
            else:
                exact = self._seconds(entry.point, entry.place[0], held)
                heapq.heappush(self._heap, entry._replace(bound=exact, is_exact=True, memory=held))
        some = {_kind(group): group for group in groups}
        everything = sum(times * self.space.size(some[kind]) for kind, times in Counter(map(_kind, groups)).items())
        return SearchResult(
            best=found[0] if found else None,
            tried=self.tried,
            pruned=everything - self.tried,
            runners_up=tuple(found[1:]),
            space=self.space,
        )

    def _open(self, entry: _Entry) -> None:
        number = entry.place[0]
        ground = self._grounds[number]
        if not activations_fit(ground, self._activity(entry.point), entry.point, self.space.machine):
            return
        for index, point in enumerate(self.space.members(entry.point)):
            chosen = row(point.stage)
            if not states_fit(ground, chosen, point, self.space.machine):
                continue
            if point.auto:
                room = room_for_auto(self.space.model, self.space.machine, point)
                if room is None or room.left < 0:
                    continue
                waits = Waits(ground, self.space.machine, point, chosen, least_away(room, self.space.machine))
                seconds = weighed(ground.floor.seconds + waits.total().total, point)
                bound = seconds * _SLACK / self._samples(point, ground)
            else:
                bound = self._seconds(point, number, None)
            heapq.heappush(self._heap, _Entry(bound, (number, index), not point.auto, point))

    def _activity(self, point: Point) -> Activity:
        """Which batches have in common, as long as as many of them are on their way at once."""
        kept = point.checkpoint_every, point.checkpoints_on, point.partition, point.contiguous_checkpoints
        cut = point.tensor, point.pipeline, point.sequence_parallel, point.loss_parallel
        key = kept, cut, in_flight(point)
        if key not in self._activities:
            self._activities[key] = activity_of(self.space.model, point)
        return self._activities[key]

    def _seconds(self, point: Point, number: int, held: Memory | None) -> float:
        """Of a sample, weighed."""
        ground = self._grounds[number]
        taken = times(self.space.model, self.space.machine, point, held, ground=ground)
        return weighed(taken.step, point) / self._samples(point, ground)

    def _held(self, point: Point, number: int) -> Memory | None:
        """Its memory, if it fits."""
        self.tried += 1
        if point.auto:
            return held_by_auto(self.space.model, self.space.machine, point)
        # Memory knows one micro-batch from two and from more, and how many of them are in a pipeline at once.
        steps = min(point.accumulate, 3), min(point.accumulate, point.pipeline)
        kept = point.checkpoint_every, point.checkpoints_on, point.partition
        family = point.stage, point.tiers, point.tensor, point.pipeline, kept, steps
        if point.micro_batch >= self._too_large.get(family, point.micro_batch + 1):
            return None
        found = memory(self.space.model, self.space.machine, point)
        if not lacks(found, self.space.machine):
            return found
        self._too_large[family] = point.micro_batch
        return None

    def _prediction(self, entry: _Entry) -> Prediction:
        ground = self._grounds[entry.place[0]]
        return predict(self.space.model, self.space.machine, entry.point, memory=entry.memory, ground=ground)

    def _samples(self, point: Point, ground: Ground) -> int:
        return point.samples * ground.mesh.data


def _kind(group: Point) -> tuple[int, int, bool]:
    """On which it hangs which rows there are."""
    return group.tensor, group.pipeline, group.accumulate > 1


def held_by_auto(model: ModelShape, machine: Machine, point: Point) -> Memory | None:
    """Its memory, if it fits and something of it is away from the device: else it is the point with everything there.

    Placing units one by one takes a while, so it is not done where `room_for_auto` knows the answer.
    """
    room = room_for_auto(model, machine, point)
    if room is None or room.left < 0:
        return None
    found = memory(model, machine, point)
    is_away = any(found.host.values()) or any(found.disk.values())
    return found if is_away and not lacks(found, machine) else None


class Room(NamedTuple):
    """Bytes of one rank: the optimizer's states, and the most that each memory has for them."""

    states: int
    device: float
    host: float
    disk: float

    @property
    def left(self) -> float:
        """Less than nothing: they do not fit."""
        return -1.0 if self.device < 0 else self.device + self.host + self.disk - self.states


def least_away(room: Room, machine: Machine) -> Away:
    """Which part of the optimizer's states is off the device at the least, in whichever memory updates them sooner."""
    away = max(0.0, room.states - room.device)
    on_host = min(away, room.host)
    if disk_seconds(STATES_BYTES, STATES_BYTES, machine) < host_update_seconds(1, machine):
        on_host = away - min(away, room.disk)
    return Away(Shares(on_host / room.states, (away - on_host) / room.states), Shares(), Shares())


def room_for_auto(model: ModelShape, machine: Machine, point: Point) -> Room | None:
    """What there is for the optimizer's states where each unit's tiers are chosen; None where all stay on the device.

    With room for all states beside what comes and goes, the engine's rule leaves them there. No placement leaves less
    on the device than the one that sends everything away; and what that one leaves free, host and disk must together
    hold the optimizer's states.
    """
    here = memory(model, machine, replace(point, auto=False, tiers=Tiers()))
    is_alone = machine.devices == point.tensor * point.pipeline
    if not is_alone and here.states + _beside(here) + UPDATE_RING <= machine.device_memory:
        return None
    with_parameters = Tier.HOST if is_alone or row(point.stage).parameters.is_cut else Tier.DEVICE
    nothing_here = replace(point, auto=False, tiers=Tiers(Tier.HOST, Tier.HOST, with_parameters))
    room = machine.device_memory - (memory(model, machine, nothing_here).device_need - UPDATE_RING)
    ranks = node_ranks(machine)
    return Room(here.device["optimizer"], room, machine.host_memory / ranks, machine.disk / ranks)


def _beside(held: Memory) -> int:
    """What is on the device besides states, all of it at once."""
    return sum(held.device[line] for line in _BESIDE)


def activations_fit(ground: Ground, activity: Activity, group: Point, machine: Machine) -> bool:
    """Whether there is room for activations at their peak beside the largest unit, which is there to be computed with,
    whatever the row and the tiers."""
    alive = greatest(moment.alive.at(group.micro_batch) for moment in activity.moments)
    largest = max(unit.parameters for unit in ground.units) * ground.widths.compute
    return alive + largest <= machine.device_memory + ROUNDING


def states_fit(ground: Ground, chosen: Row, point: Point, machine: Machine) -> bool:
    """Whether there is room for the optimizer's states and for whole parameters, which no point can do without.

    Padding, gradients, activations and buffers come on top, so whatever is refused here does not fit.
    """
    widths = ground.widths
    owners = 1 if chosen.cut is Cut.FIRST else ground.mesh.ranks(chosen.optimizer)
    own = ground.trained / owners
    has_shard = widths.has_master or chosen.parameters.is_cut
    states = own * (MOMENTS_BYTES + widths.master * has_shard)
    whole = 0 if chosen.parameters.is_cut else ground.trained * widths.compute
    if ground.mesh.data == 1:
        whole = 0  # a rank that is alone makes them from its masters when they are needed
    ranks = node_ranks(machine)
    if point.auto:
        return states <= max(0, machine.device_memory - whole) + (machine.host_memory + machine.disk) / ranks
    room = {
        Tier.DEVICE: machine.device_memory - whole,
        Tier.HOST: machine.host_memory / ranks,
        Tier.NVME: machine.disk / ranks,
    }
    return whole <= machine.device_memory and states <= room[point.tiers.optimizer]
