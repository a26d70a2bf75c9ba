"""How a step changes with the number of ranks: weak and strong scaling, as a table and as a plot."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerofold.simulation.engines import Training
from zerofold.simulation.result import Simulation
from zerofold.simulation.run import World, simulate

SCALINGS = ("weak", "strong")


def batch_at(scaling: str, batch: int, world: int) -> int:
    """Samples of a rank: the same for any number of ranks, or its part of the same samples, which must be whole.

    >>> batch_at("weak", 8, 64), batch_at("strong", 1000, 64)
    (8, 16)
    """
    if scaling == "weak":
        return batch
    if batch < world:
        raise ValueError(f"strong scaling of {batch} samples ends at {batch} ranks, not {world}: give a larger batch")
    return -(-batch // world)


def curve(
    make: Callable[[int], Training],
    world: World,
    worlds: Sequence[int],
    *,
    scaling: str,
    batch: int,
    engine: str = "zerofold",
    steps: int = 3,
) -> Iterator[Simulation]:
    """One simulation for each number of ranks; `make` gives the training of a rank with so many samples."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling={scaling!r} must be one of {', '.join(SCALINGS)}")
    for size in worlds:
        training = make(batch_at(scaling, batch, size))
        yield simulate(training, replace(world, size=size), engine=engine, steps=steps)


def efficiency(points: Sequence[Simulation], point: Simulation) -> float:
    """Samples a second and rank, over those of the fewest ranks."""
    first = min(points, key=lambda each: each.world)
    return (point.samples_per_second / point.world) / (first.samples_per_second / first.world)


def plot(points: Sequence[Simulation], file: Path, *, scaling: str) -> None:
    """Step time by what it is spent on, and efficiency, over the number of ranks."""
    try:
        figure: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    if file.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot {file}: the name must end in .png or .svg")
    drawn = figure.Figure(figsize=(9, 4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for engine in dict.fromkeys(point.engine for point in points):
        some = [point for point in points if point.engine == engine]
        ranks = [point.world for point in some]
        left.plot(ranks, [point.step_seconds for point in some], marker="o", label=f"{engine}: step")
        left.plot(ranks, [point.exposed_seconds for point in some], marker=".", ls="--", label=f"{engine}: exposed")
        right.plot(ranks, [100 * efficiency(some, point) for point in some], marker="o", label=engine)
    left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds of a step")
    right.set(xscale="log", xlabel="ranks", ylabel="samples a second and rank, % of the fewest", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    drawn.suptitle(f"{points[0].model}, stage {points[0].stage}, {scaling} scaling, simulated", fontsize=10)
    drawn.savefig(file, dpi=150)
