"""Optimizer states that are filed by position, as `optimizer.state_dict()` does, brought back to parameter names.

Such a file does not say which parameter has which number. The shapes of the states and the order of the model's
tensors often leave only one answer; where they do not, the numbers stay, as names like "#7", and the optimizer that
is loaded into can say: `named` gives its parameters' names, in the order of its groups, to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerofold.checkpoint.contents import CheckpointError, OptimizerContents

Shape = tuple[int, ...]


def numbered(position: int) -> str:
    return f"#{position}"


def named(optimizer: OptimizerContents, names: Sequence[str]) -> OptimizerContents:
    """The same with names for numbers: `names` are those of the live optimizer's parameters, group after group."""
    highest = max(
        (int(name[1:]) for group in optimizer.groups for name in group["params"] if name[0] == "#"), default=-1
    )
    if highest >= len(names):
        raise CheckpointError(
            f"the checkpoint's optimizer numbers its parameters up to {highest} and this one has {len(names)}: "
            "build the optimizer with the same parameter groups as the run that saved it"
        )

    def real(name: str) -> str:
        return names[int(name[1:])] if name.startswith("#") else name

    groups = [{**group, "params": [real(name) for name in group["params"]]} for group in optimizer.groups]
    states = {real(name): state for name, state in optimizer.states.items()}
    return replace(optimizer, groups=groups, states=states)


def names_of_positions(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], model: Mapping[str, Shape]
) -> dict[int, str]:
    """The positions whose parameter is certain.

    A group lists its parameters in the model's order (what every usual way of building an optimizer does), and may
    leave some out: frozen ones, buffers, those of other groups. So each of its shapes is placed as early as possible
    and as late as possible; where both agree, that is the parameter, and it is gone for the other groups.

    model  (7,5) (3,5) (3,) (5,3) (5,)        group (7,5) (3,5) (5,3) → certain
    model  (4,4) (4,4)                        group (4,4)             → either
    """
    found: dict[int, str] = {}
    progress = True
    while progress:
        progress = False
        for group in groups:
            # A parameter without a state has no shape here: nothing is known about it, nor about its neighbours' gap.
            open_ = [position for position in group if position in shapes and position not in found]
            taken = set(found.values())
            free = [name for name in model if name not in taken]
            wanted = [shapes[position] for position in open_]
            early = _placed(wanted, [model[name] for name in free])
            late = _placed(wanted[::-1], [model[name] for name in free[::-1]])
            if early is None or late is None:
                continue
            for position, first, last in zip(open_, early, reversed(late), strict=True):
                if first == len(free) - 1 - last:
                    found[position] = free[first]
                    progress = True
    return found


def _placed(wanted: Sequence[Shape], there: Sequence[Shape]) -> list[int] | None:
    """Each wanted shape at the first place after the one before it; None where they do not all occur in this order."""
    places = iter(range(len(there)))
    result = []
    for shape in wanted:
        place = next((place for place in places if there[place] == shape), None)
        if place is None:
            return None
        result.append(place)
    return result


def by_name(
    groups: list[dict[str, Any]], states: Mapping[int, dict[str, Any]], model: Mapping[str, Shape]
) -> OptimizerContents:
    """An optimizer of `optimizer.state_dict()`: a name where it is certain, a number like "#7" where it is not."""
    shapes = {
        position: largest
        for position, state in states.items()
        if (largest := max((tuple(getattr(value, "shape", ())) for value in state.values()), key=len, default=()))
    }
    found = names_of_positions([group["params"] for group in groups], shapes, model)

    def name(position: int) -> str:
        return found.get(position, numbered(position))

    return OptimizerContents(
        groups=[{**group, "params": [name(position) for position in group["params"]]} for group in groups],
        states={name(position): dict(state) for position, state in states.items()},
    )
