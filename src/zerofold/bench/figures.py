"""From step times to ratios: pure functions, without processes or clocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zerofold.bench.gpt import GPTSize


class Spread(NamedTuple):
    median: float
    low: float
    high: float


def turn_seconds(seconds_by_rank: Sequence[Sequence[float]]) -> float:
    """The figure of one turn: a step takes as long as its slowest rank; the median over the steps."""
    slowest: list[float] = [max(step) for step in zip(*seconds_by_rank, strict=True)]
    return statistics.median(slowest)


def ratios(rounds: Sequence[Mapping[str, float]], engine: str, reference: str) -> Spread | None:
    """The engine's time over the reference's in the same round, over all rounds in which both ran."""
    values = [each[engine] / each[reference] for each in rounds if engine in each and reference in each]
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def rotated(engines: Sequence[str], round_index: int) -> list[str]:
    """Another engine comes first in every round, so none always follows the same warm or cold machine."""
    start = round_index % len(engines)
    return [*engines[start:], *engines[:start]]


def there_and_back(engines: Sequence[str], round_index: int) -> list[str]:
    """In order, then in reverse: what drifts steadily over two rounds touches every engine alike."""
    return list(engines) if round_index % 2 == 0 else list(reversed(engines))


def largest(values: Iterable[float]) -> float:
    """The largest, where a NaN counts as infinite; `max` would let it pass unseen."""
    return max(math.inf if math.isnan(value) else value for value in values)


def largest_gap(losses_by_rank: Sequence[Sequence[float]], reference_by_rank: Sequence[Sequence[float]]) -> float:
    """The largest difference between two engines' losses, over ranks and steps."""
    return largest(
        abs(loss - other)
        for losses, others in zip(losses_by_rank, reference_by_rank, strict=True)
        for loss, other in zip(losses, others, strict=True)
    )


def rank_bytes(size: GPTSize, batch: int) -> int:
    """About how much memory a rank needs; it only decides how many engines live at a time."""
    libraries = 450 << 20
    states = 24 * size.parameters  # parameters, gradients and two moments, and half as much again in buffers
    activations = 4 * batch * size.seq * (3 * size.vocab + 40 * size.width * size.layers)
    return libraries + states + activations


def plan_batches(engines: Sequence[str], references: Sequence[str], *, at_once: int) -> list[list[str]]:
    """Groups of engines which are alive together, each with the references in front.

    DeepSpeed's engines stay among themselves: their ranks are by far the largest.
    """
    others = [engine for engine in engines if engine not in references]
    places = max(1, at_once - len(references))
    batches: list[list[str]] = []
    for family in (
        [engine for engine in others if not engine.startswith("ds")],
        [engine for engine in others if engine.startswith("ds")],
    ):
        batches += [[*references, *family[at : at + places]] for at in range(0, len(family), places)]
    return batches or [list(references)]
