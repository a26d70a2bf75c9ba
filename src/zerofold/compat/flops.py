"""What one forward costs: floating-point operations by module, counted as torch runs them."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zerofold.config import FlopsProfiler


class ModuleCost(NamedTuple):
    name: str
    kind: str
    depth: int
    parameters: int
    flops: int


class FlopsCounter:
    """Counts between `start` and `stop`.

    >>> import torch
    >>> counter = FlopsCounter(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    >>> counter.start(); _ = counter.model(torch.ones(3, 4)); counter.stop()
    >>> [(cost.name, cost.flops, cost.parameters) for cost in counter.costs() if cost.flops]
    [('', 288, 58), ('0', 192, 40), ('2', 96, 18)]
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seconds = 0.0
        self._mode: FlopCounterMode | None = None
        self._flops: dict[str, int] = {}

    def start(self) -> None:
        self._mode = FlopCounterMode(display=False)
        self._mode.__enter__()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Once more does nothing: what is still running after an error is stopped by whoever closes."""
        if self._mode is None:
            return
        self.seconds = time.perf_counter() - self._started
        self._mode.__exit__(None, None, None)
        counts = self._mode.get_flop_counts()
        self._mode = None
        root = type(self.model).__name__
        for key, by_operation in counts.items():
            if key == root or key.startswith(f"{root}."):
                self._flops[key.removeprefix(root).removeprefix(".")] = sum(by_operation.values())
        self._flops[""] = sum(counts["Global"].values())

    def costs(self) -> list[ModuleCost]:
        """One for each module, in the model's order."""
        return [
            ModuleCost(
                name,
                type(module).__name__,
                name.count(".") + 1 if name else 0,
                sum(parameter.numel() for parameter in module.parameters()),
                self._flops.get(name, 0),
            )
            for name, module in self.model.named_modules()
        ]


def flops_report(counter: FlopsCounter, settings: FlopsProfiler, *, step: int, world: int, batch: int) -> list[str]:
    """The lines that the profiler prints or writes."""
    costs = counter.costs()
    total = costs[0]
    rate = total.flops / counter.seconds if counter.seconds else 0.0
    lines = [
        f"flops profiler, step {step}: forward of a micro-batch of {batch} on one of {world} ranks",
        f"parameters {_short(total.parameters)}, forward {_short(total.flops)} flops ({_short(total.flops / 2)} MACs)",
        f"forward latency {1e3 * counter.seconds:.2f} ms while counting, {_short(rate)} flops/s",
    ]
    deepest = max(cost.depth for cost in costs)
    depth = deepest if settings.module_depth < 0 else min(settings.module_depth, deepest)
    by_depth: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for cost in costs:
        by_depth[cost.depth][cost.kind] += cost.flops
    for level in range(depth + 1):
        kinds = sorted(by_depth[level].items(), key=lambda item: -item[1])[: settings.top_modules]
        lines.append(f"depth {level}: " + ", ".join(f"{kind} {_short(flops)} flops" for kind, flops in kinds))
    if settings.detailed:
        lines += _tree(costs, depth, total.flops)
    return lines


def write_report(lines: list[str], output_file: str | None) -> None:
    if output_file is None:
        print("\n".join(lines), flush=True)
        return
    path = Path(output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _tree(costs: list[ModuleCost], depth: int, total: int) -> list[str]:
    lines = []
    for cost in costs:
        if cost.depth <= depth:
            name = cost.name.rpartition(".")[2] or "model"
            share = 100 * cost.flops / total if total else 0.0
            lines.append(
                f"{'  ' * cost.depth}{name} ({cost.kind}): {_short(cost.parameters)} parameters, "
                f"{_short(cost.flops)} flops, {share:.1f}%"
            )
    return lines


def _short(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:g}"
