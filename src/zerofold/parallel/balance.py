"""A row of blocks cut into stages so that the slowest stage is as fast as it can be: arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance(costs: Sequence[float], stages: int, *, before: float = 0.0, after: float = 0.0) -> list[int]:
    """The first block of each stage. `before` is done by the first stage as well, `after` by the last.

    Of all cuts whose largest stage is the smallest possible, the one with the smallest sum of squares is taken: the
    most even one. Every stage has at least one block.

    >>> balance([1, 1, 1, 1, 1, 1], 2, after=2)
    [0, 4]
    """
    sums = [0.0, *accumulate(costs)]
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise ValueError(f"{blocks} blocks cannot make {stages} stages: each needs at least one")

    def cost(start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (before if start == 0 else 0) + (after if stop == blocks else 0)

    # best[stop]: (largest stage, sum of squares, cuts) of blocks [0, stop) in as many stages as have been dealt out
    best = {stop: (cost(0, stop), cost(0, stop) ** 2, [0]) for stop in range(1, blocks + 1)}
    for stage in range(2, stages + 1):
        best = {
            stop: min(
                (max(largest, cost(start, stop)), squares + cost(start, stop) ** 2, [*cuts, start])
                for start, (largest, squares, cuts) in best.items()
                if start < stop
            )
            for stop in range(stage, blocks + 1)
        }
    return best[blocks][2]
