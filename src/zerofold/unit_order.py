"""In which order units are used: as in the forward before. Never more than a guess.

forward     root ┬ a ┬ b            enters root, a, b; leaves b, a: a unit after those inside it
                 └ c └ …
backward    enters units in the reverse of the order in which forward left them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerofold.unit import Unit


class UnitOrder:
    """Told where forward and backward are, says which units come next."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._root, self._most = units[0], 4 * len(units)
        self._last_entered: list[Unit] = list(units[1:])  # by the last forward; at first the order of definition
        self._last_left: list[Unit] = list(units[1:])
        self._entered: list[Unit] = []  # by this forward so far
        self._left: list[Unit] = []
        self._position = 0  # in `_last_entered` while forward runs, in `_left` while backward runs

    def enter(self, unit: Unit) -> None:
        """Forward is about to run."""
        if unit is self._root:
            self._last_entered, self._entered, self._position = self._entered or self._last_entered, [], 0
            self._last_left, self._left = self._left or self._last_left, []
            return
        if len(self._entered) > self._most:  # units called without their root, again and again
            self._entered.clear()
            self._left.clear()
        self._entered.append(unit)
        if unit in self._last_entered[self._position :]:
            self._position = self._last_entered.index(unit, self._position) + 1

    def leave(self, unit: Unit) -> None:
        """Forward is through."""
        if unit is not self._root:
            self._left.append(unit)

    def come_back(self, unit: Unit) -> None:
        """Backward is about to run."""
        if unit in self._left:
            self._position = len(self._left) - 1 - self._left[::-1].index(unit)

    def ahead_in_forward(self, *, expects_backward: bool) -> Iterator[Unit]:
        yield from self._last_entered[self._position :]
        if expects_backward:
            yield from reversed(self._last_left)

    def ahead_in_backward(self) -> Iterator[Unit]:
        yield from reversed(self._left[: self._position])
