"""How a step changes with the number of ranks: weak and strong scaling, as a table and as a plot."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerofold.observe.output import make_folder_of
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


def check_plot(file: Path) -> None:
    """Before anything is simulated."""
    if file.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot {file}: the name must end in .png or .svg")
    _figures()
    make_folder_of(file, "--plot")


def plot(points: Sequence[Simulation], file: Path, *, scaling: str) -> None:
    """Step time by what it is spent on, and efficiency, over the number of ranks."""
    drawn = _figures().Figure(figsize=(9, 4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for engine in dict.fromkeys(point.engine for point in points):
        some = [point for point in points if point.engine == engine]
        ranks = [point.world for point in some]
        exposed = [point.exposed_seconds or math.nan for point in some]  # none has no place on a scale of powers
        left.plot(ranks, [point.step_seconds for point in some], marker="o", label=f"{engine}: step")
        left.plot(ranks, exposed, marker=".", ls="--", label=f"{engine}: exposed")
        right.plot(ranks, [100 * efficiency(some, point) for point in some], marker="o", label=engine)
    ranks = sorted({point.world for point in points})
    left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds of a step")
    right.set(xscale="log", xlabel="ranks", ylabel="efficiency, % of the fewest ranks", ylim=(0, 110))
    for axes in (left, right):
        axes.set_xticks(ranks, [f"{rank:,}" for rank in ranks], rotation=30)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    low, high = left.get_ylim()
    left.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))  # whole powers have labels
    left.legend()
    right.legend(loc="lower left")
    drawn.suptitle(f"{points[0].model}, stage {points[0].stage}, {scaling} scaling, simulated", fontsize=10)
    drawn.savefig(file, dpi=150)


def _figures() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
