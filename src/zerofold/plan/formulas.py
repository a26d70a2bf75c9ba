"""The plan's own arithmetic as data, so that a page can do it again for other numbers and come to the same byte.

A function is run on numbers that remember how they were made. What it returns is then a formula of its inputs, true
wherever every comparison that it made on the way comes out as it did: inside one region of the inputs. Other regions
are found by running it again where no formula known so far holds.

    devices = 64, batch = 8                     nodes                 region
    shard = -(-unit // devices)                 [neg, floordiv, …]
    max(alive.at(batch), step)        →         [mul, add, …]         alive.at(batch) > step
    16 * shard                                  [mul, …]

Nothing of the plan is written a second time: where its model changes, the page changes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zerofold.plan.followed import COMPARE, COMPUTE, Guard, NotAFormulaError, Tape

Inputs = Mapping[str, int]
Outputs = Mapping[str, int]

_MOST_REGIONS = 100
"""Of one function. With more of them it is no formula but a table."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """Where all guards come out as they did, the outputs are these nodes."""

    guards: tuple[Guard, ...]
    outputs: Mapping[str, int]
    refused: bool = False
    """The function raised ValueError: there is no such way to train."""


class _Values:
    """The nodes at one place, each computed once."""

    def __init__(self, nodes: list[tuple[Any, ...]], inputs: Inputs) -> None:
        self._nodes, self._inputs = nodes, inputs
        self._known: dict[int, Any] = {}

    def __getitem__(self, wanted: int) -> Any:
        known, nodes = self._known, self._nodes
        if wanted in known:
            return known[wanted]
        waiting = [wanted]  # a long sum is deeper than Python's stack
        while waiting:
            number = waiting[-1]
            operation, *operands = nodes[number]
            if operation == "value":
                known[number] = operands[0]
            elif operation == "input":
                known[number] = self._inputs[operands[0]]
            elif missing := [each for each in operands if each not in known]:
                waiting += missing
                continue
            else:
                known[number] = COMPUTE[operation](*[known[each] for each in operands])
            waiting.pop()
        return known[wanted]

    def meet(self, guards: Iterable[Guard]) -> bool:
        try:
            return all(COMPARE[each.compare](self[each.left], self[each.right]) == each.outcome for each in guards)
        except ZeroDivisionError:  # another region's arithmetic
            return False


class Formulas:
    """Functions of the same inputs, as data; more regions are learned with `cover`.

    >>> def shard(at):
    ...     return {"bytes": 16 * -(-1000 // at["devices"]) if at["devices"] > 1 else 2000}
    >>> formulas = Formulas({"a row": shard})
    >>> formulas.cover([{"devices": 1}, {"devices": 8}])
    >>> formulas.at({"devices": 3}), len(formulas.regions["a row"])
    ({'a row': {'bytes': 5344}}, 2)
    """

    def __init__(self, functions: Mapping[str, Callable[[Inputs], Outputs]]) -> None:
        self._functions = functions
        self._tape = Tape()
        self.regions: dict[str, list[Region]] = {name: [] for name in functions}

    def cover(self, places: Iterable[Inputs]) -> None:
        """Follow every function at each of the places that none of its regions reaches so far."""
        for place in places:
            values = _Values(self._tape.nodes, place)
            for name, regions in self.regions.items():
                if not any(values.meet(region.guards) for region in regions):
                    regions.append(self._follow(name, place))
                    if len(regions) > _MOST_REGIONS:
                        raise NotAFormulaError(f"{name}: more than {_MOST_REGIONS} regions, too many for a page")

    def check(self, places: Iterable[Inputs]) -> None:
        """Compare with the functions themselves: something may have gone where it could not be followed."""
        for place in places:
            for name, found in self.at(place).items():
                expected = _call(self._functions[name], place)
                if found != expected:
                    raise NotAFormulaError(f"{name} at {dict(place)}: the formula gives {found}, the plan {expected}")

    def at(self, place: Inputs) -> dict[str, Outputs | None]:
        """The outputs of every function that has a region there; None where it refuses."""
        values = _Values(self._tape.nodes, place)
        found: dict[str, Outputs | None] = {}
        for name, regions in self.regions.items():
            region = next((each for each in regions if values.meet(each.guards)), None)
            if region is not None:
                outputs = {key: values[number] for key, number in region.outputs.items()}
                found[name] = None if region.refused else outputs
        return found

    def as_data(self) -> dict[str, Any]:
        """For the page: the nodes that something needs, numbered anew. Whole numbers are texts, since JSON's readers
        have 53 bits."""
        new = {old: number for number, old in enumerate(sorted(self._needed()))}
        return {
            "nodes": [self._node_as_data(old, new) for old in new],
            "regions": {
                name: [
                    {
                        "guards": [
                            [each.compare, new[each.left], new[each.right], each.outcome] for each in region.guards
                        ],
                        "outputs": {key: new[number] for key, number in region.outputs.items()},
                        "refused": region.refused,
                    }
                    for region in regions
                ]
                for name, regions in self.regions.items()
            },
        }

    def _needed(self) -> set[int]:
        regions = [region for some in self.regions.values() for region in some]
        waiting = [number for region in regions for number in region.outputs.values()]
        waiting += [number for region in regions for guard in region.guards for number in (guard.left, guard.right)]
        needed: set[int] = set()
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                operation, *operands = self._tape.nodes[number]
                waiting += [] if operation in ("value", "input") else operands
        return needed

    def _node_as_data(self, number: int, new: Mapping[int, int]) -> list[Any]:
        operation, *operands = self._tape.nodes[number]
        if operation == "value":
            return [operation, str(operands[0]) if isinstance(operands[0], int) else operands[0]]
        return [operation, *operands] if operation == "input" else [operation, *(new[each] for each in operands)]

    def _follow(self, name: str, place: Inputs) -> Region:
        tape = self._tape
        tape.guards.clear()
        found = _call(self._functions[name], {key: tape.input(key, value) for key, value in place.items()})
        if found is None:
            return Region(guards=tuple(tape.guards), outputs={}, refused=True)
        outputs = {key: tape.number_of(value) for key, value in found.items()}
        return Region(guards=tuple(tape.guards), outputs=outputs)


def _call(function: Callable[[Inputs], Outputs], place: Inputs) -> Outputs | None:
    try:
        return dict(function(place))
    except ValueError:
        return None
