"""The search: which tiers for which unit, so that all fit and the least work is moved off the device.

What a move costs, in nanoseconds a parameter on one fast accelerator (docs/offload.md has the measurements): 0.25 to
update it on the host, 10 on a disk, 0.05 to fetch a 16-bit parameter from the host for forward and backward. What it
frees: the first, 12 bytes of the device; the last, 2. Per byte freed the two are near each other, so optimizer states
go first, and parameters follow only where that saves a unit from the disk or nothing else fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from zerofold.offload.budget import Budget
from zerofold.offload.sizes import UnitSize, bytes_of
from zerofold.offload.wishes import AUTO, Offload
from zerofold.placement import Tier, Tiers

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME

# In twentieths of a nanosecond a parameter.
_OPTIMIZER_COST = {DEVICE: 0, HOST: 5, NVME: 200}
_GRADIENTS_COST = {DEVICE: 0, HOST: 0, NVME: 32}
_PARAMETERS_COST = {DEVICE: 0, HOST: 1, NVME: 40}
_MOST_CUTS_TRIED = 64


@dataclass(frozen=True)
class Bytes:
    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.disk + other.disk)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.device - other.device, self.host - other.host, self.disk - other.disk)


@dataclass(frozen=True)
class Room:
    """What states may take."""

    device: int
    host: int
    disk: int
    one_memory: bool = False

    @staticmethod
    def of(budget: Budget, taken_on_device: int) -> Room:
        return Room(budget.device - taken_on_device, budget.host, budget.disk or 0, budget.one_memory)

    def fits(self, used: Bytes) -> bool:
        fits = used.device <= self.device and used.host <= self.host and used.disk <= self.disk
        return fits and (not self.one_memory or used.device + used.host <= self.host)


@dataclass(frozen=True)
class Choice:
    """One way to place one unit."""

    tiers: Tiers
    size: Bytes
    cost: int


@dataclass(frozen=True)
class Search:
    """All ways to place each unit that the wish allows, cheapest first."""

    units: Sequence[UnitSize]
    offload: Offload
    has_disk: bool

    @cached_property
    def choices(self) -> list[list[Choice]]:
        optimizers = self._optimizers()
        return [
            sorted(self._of(unit, optimizers[index]), key=lambda choice: choice.cost)
            for index, unit in enumerate(self.units)
        ]

    def cheapest(self) -> list[Choice]:
        """Whatever it takes."""
        return [choices[0] for choices in self.choices]

    def place(self, room: Room) -> list[Choice] | None:
        """The cheapest placement found that fits; None where none was found.

        The FIRST units stay on the device, the next go to the host, the last to the disk: updates run under the next
        forward, so late units have the most time. So do the units from a `cut` on, whose parameters leave the device.
        """
        count = len(self.units)
        cuts = range(count, -1, -1) if self.offload.parameters == AUTO else [count]
        stride = -(-len(cuts) // _MOST_CUTS_TRIED)
        tried = dict.fromkeys([*cuts[::stride], cuts[-1]])
        forward = range(count)
        largest_first = sorted(forward, key=lambda index: -self.units[index].kept)  # packs best where sizes differ much
        for order, keeps_slots in ((forward, True), (forward, False), (largest_first, True), (largest_first, False)):
            found = [walk for cut in tried if (walk := self._walk(room, cut, order, keeps_slots)) is not None]
            if found:
                best = min(found, key=lambda walk: sum(choice.cost for choice in walk))
                moved = dict(self.improvements(best, room))
                return [moved.get(index, choice) for index, choice in enumerate(best)]
        return None

    def improvements(self, placed: Sequence[Choice], room: Room) -> Iterator[tuple[int, Choice]]:
        """Units that may move up into what is left, in forward order, again until nothing fits any more."""
        now = list(placed)
        used = total(now)
        moved = True
        while moved:
            moved = False
            for index, choices in enumerate(self.choices):
                for choice in choices:
                    if choice.cost >= now[index].cost:
                        break
                    after = used - now[index].size + choice.size
                    if room.fits(after):
                        used, now[index], moved = after, choice, True
                        yield index, choice
                        break

    def _walk(self, room: Room, cut: int, order: Sequence[int], keeps_slots: bool) -> list[Choice] | None:
        """In `order`, each unit to the first memory that holds it and what later ones need there at the least.

        `keeps_slots`: host memory for the gradients of later units, should they go to the disk.
        """
        allowed = [_allowed(choices, stays=index < cut) for index, choices in enumerate(self.choices)]
        least = [
            Bytes(min(choice.size.device for choice in choices), _slot(choices) if keeps_slots else 0)
            for choices in allowed
        ]
        later = total_bytes(least)
        used, walk = Bytes(), {}
        for index in order:
            later -= least[index]
            on_device = Bytes(later.device)
            found = next(
                (
                    choice
                    for choice in allowed[index]
                    # What takes nothing of the host leaves the slots there to others.
                    if room.fits(used + choice.size + (later if choice.size.host else on_device))
                ),
                None,
            )
            if found is None:
                return None
            used += found.size
            walk[index] = found
        return [walk[index] for index in range(len(self.units))]

    def _optimizers(self) -> list[list[Tier]]:
        """The tiers open to each unit's optimizer states."""
        wish = self.offload.optimizer
        if isinstance(wish, float):
            first = first_offloaded([unit.trained for unit in self.units], wish)
            return [[DEVICE if index < first else HOST] for index in range(len(self.units))]
        if isinstance(wish, Tier):
            return [[wish]] * len(self.units)
        return [[DEVICE, HOST, NVME] if self.has_disk else [DEVICE, HOST]] * len(self.units)

    def _of(self, unit: UnitSize, optimizers: list[Tier]) -> Iterator[Choice]:
        if not unit.trained:
            for parameters in self._parameters(unit, Tiers(NVME, NVME)):
                yield _choice(unit, Tiers(parameters=parameters))
            return
        for optimizer in optimizers:
            for gradients in self._gradients(optimizer):
                for parameters in self._parameters(unit, Tiers(optimizer, gradients)):
                    yield _choice(unit, Tiers(optimizer, gradients, parameters))

    def _gradients(self, optimizer: Tier) -> list[Tier]:
        wish = self.offload.gradients
        if isinstance(wish, Tier):
            return [wish]
        return {DEVICE: [DEVICE], HOST: [HOST], NVME: [HOST, NVME]}[optimizer]

    def _parameters(self, unit: UnitSize, others: Tiers) -> list[Tier]:
        """Where they may go, given the tiers of the other two states. They are made from masters, so beside these there
        is nothing to free; and on the disk nothing is freed while a gradient keeps a slot on the host."""
        if unit.whole_parameters or others.optimizer is DEVICE:
            return [DEVICE]
        if isinstance(self.offload.parameters, Tier):
            return [self.offload.parameters]
        is_below = others.optimizer is NVME and others.gradients is NVME
        return [DEVICE, HOST, NVME] if is_below and self.has_disk else [DEVICE, HOST]


def first_offloaded(trained: Sequence[int], fraction: float) -> int:
    """From which unit on the states go to the host, so that nearest to `fraction` of the elements do.

    >>> first_offloaded([10, 10, 10, 10], 0.5), first_offloaded([10, 10], 1.0), first_offloaded([10, 10], 0.0)
    (2, 0, 2)
    """
    wanted = fraction * sum(trained)
    return min(range(len(trained) + 1), key=lambda first: (abs(sum(trained[first:]) - wanted), first))


def total(choices: Sequence[Choice]) -> Bytes:
    return total_bytes([choice.size for choice in choices])


def total_bytes(sizes: Sequence[Bytes]) -> Bytes:
    return sum(sizes, Bytes())


def _allowed(choices: list[Choice], *, stays: bool) -> list[Choice]:
    """Of one unit: parameters stay on the device, or go with the optimizer's states wherever these go."""
    if stays:
        return [choice for choice in choices if choice.tiers.parameters is DEVICE] or choices
    if all(choice.tiers.parameters is DEVICE for choice in choices):
        return choices
    return [choice for choice in choices if not choice.tiers.is_offloaded or choice.tiers.parameters is not DEVICE]


def _slot(choices: list[Choice]) -> int:
    return next((choice.size.host for choice in choices if choice.tiers.optimizer is NVME), 0)


def _choice(unit: UnitSize, tiers: Tiers) -> Choice:
    size = bytes_of(unit, tiers)
    cost = unit.trained * (_OPTIMIZER_COST[tiers.optimizer] + _GRADIENTS_COST[tiers.gradients])
    cost += unit.kept * _PARAMETERS_COST[tiers.parameters]
    return Choice(tiers, Bytes(*(sum(size[tier].values()) for tier in Tier)), cost)
