"""Run folders as `zerofold train` writes them, made up: a GPT of some blocks at stage 3, bf16, four ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

BLOCKS = 12
BLOCK = 7_087_872
ROOT = 38_597_376
PSI = ROOT + BLOCKS * BLOCK
WORLD = 4
STATES = ("parameters", "gradients", "optimizer", "gathered", "cached", "buffers", "other")


def write_run(folder: Path, *, steps: int = 300, ledger: bool = True, timeline: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"stage": 3, "precision": "bf16", "world": WORLD, "steps": steps, "lr": 0.0006, "gpt": {"layers": BLOCKS}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [json.dumps(metrics_line(step, steps)) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if ledger:
        (folder / "ledger.json").write_text(json.dumps(ledger_of(steps)))
    if timeline:
        (folder / "timeline.json").write_text(json.dumps({"traceEvents": events()}))
    return folder


def metrics_line(step: int, steps: int) -> dict[str, Any]:
    wave = math.sin(step * 12.9898) * 43758.5453
    noise = wave - math.floor(wave) - 0.5  # the same in every run
    return {
        "step": step,
        "progress": step / steps,
        "seconds": 0.262 * step,
        "loss": 2.1 + 8.9 * math.exp(-step / 60) + 0.12 * noise,
        "validation_loss": None if step < 50 else 2.2 + 8.8 * math.exp(-(step // 50 * 50) / 60),
        "lr": 6e-4 * min(1.0, step / 30),
        "tokens": 32768 * step,
        "tokens_per_second": 125_000 + 6_000 * noise - (40_000 if step == 1 else 0),
        "state_bytes": {"parameters": 0, "gradients": 4 * PSI // WORLD, "optimizer": 12 * PSI // WORLD},
        "comm_bytes": {"all_gather": 3 * PSI * step, "reduce_scatter": 3 * PSI * step},
        "skipped_steps": 0,
        "step_seconds": 0.262,
        "mfu": 0.412,
        "time": times(),
        "peak_bytes": {"device": 3_912_450_048},
    }


def times() -> dict[str, float]:
    return {
        "compute": 0.201, "gather": 0.021, "reduce": 0.013, "other": 0.0, "host": 0.004, "disk": 0.0, "update": 0.017,
    }  # fmt: skip


def ledger_of(steps: int) -> dict[str, Any]:
    shard = PSI // WORLD
    states = dict(zip(STATES, (0, 4 * shard, 12 * shard, 2 * ROOT, 4_194_304, 8_388_608, 9_437_184), strict=True))
    peak = dict(
        zip(
            STATES,
            (0, 4 * shard, 12 * shard, 2 * (ROOT + 2 * BLOCK), 14_175_744, 33_554_432, 2_901_234_176),
            strict=True,
        )
    )
    predicted = [
        ("parameters", "device", "bytes", 0, 0),
        ("gradients", "device", "bytes", 4 * shard, 4 * shard),
        ("optimizer", "device", "bytes", 12 * shard, 12 * shard + 4096),
        ("gathered units", "device", "bytes", 2 * (ROOT + 2 * BLOCK), 2 * (ROOT + 2 * BLOCK)),
        ("peak", "device", "bytes", 3_871_000_000, 3_912_450_048),
        ("step", "time", "seconds", 0.291, 0.262),
    ]
    sent = 2 * PSI * (WORLD - 1) // WORLD
    return {
        "rank": 0, "world": WORLD, "stage": "3", "precision": "bf16", "device": "cuda: NVIDIA H200", "psi": PSI,
        "steps": steps, "tokens_per_step": 32768, "flops_per_step": 2.4e13, "peak_flops": 7.92e14,
        "state_bytes": states, "peak_state_bytes": peak,
        "tier_bytes": {"device": {"gradients": 4 * shard}, "host": {"optimizer": 12 * shard}, "nvme": {}},
        "peak_kept_bytes": {"host": {"checkpoints": 50_331_648, "activations": 12_582_912}},
        "units": [
            {"name": name, "parameters": size, "state_bytes": {"optimizer": 12 * size // WORLD}, "comm_bytes": 4 * size}
            for name, size in [("", ROOT), *((f"blocks.{number}", BLOCK) for number in range(BLOCKS))]
        ],
        "comm": [
            {"operation": "all_gather", "group": "all", "calls": 25, "bytes_per_step": 2 * sent - 2 * ROOT,
             "theory_bytes_per_step": 2 * sent - 2 * ROOT},
            {"operation": "reduce_scatter", "group": "all", "calls": 13, "bytes_per_step": 2 * sent + 65536,
             "theory_bytes_per_step": 2 * sent},
            {"operation": "all_reduce", "group": "all", "calls": 1, "bytes_per_step": 96,
             "theory_bytes_per_step": None},
        ],
        "time": {**times(), "step": 0.262},
        "predicted": [
            dict(zip(("line", "where", "unit", "predicted", "measured"), line, strict=True)) for line in predicted
        ],
        "hints": ["8% of the step waits for parameters: prefetch=2 would gather two units ahead (15 MB more)."],
    }  # fmt: skip


def events(steps: int = 1) -> list[dict[str, Any]]:
    """A step of stage 3: gathers one unit ahead, reductions behind backward, an update, and the memory all along."""
    found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}]
    names = ["", *(f"blocks.{number}" for number in range(BLOCKS))]
    size = {name: 2 * (BLOCK if name else ROOT) for name in names}
    changes: list[tuple[float, dict[str, int]]] = []
    clock = 1_000_000.0

    def span(kind: str, unit: str, start: float, length: float, stream: int) -> float:
        arguments = {"unit": unit, "bytes": size[unit] if stream else None}
        found.append({"ph": "X", "name": f"{kind} {unit}", "cat": kind, "ts": start, "dur": length, "pid": 0,
                      "tid": stream, "args": arguments})  # fmt: skip
        return start + length

    def memory(at: float, **change: int) -> None:
        changes.append((at, change))

    for _ in range(steps):
        wire = behind = clock
        for name in names:
            wire = span("gather", name, wire, 5400.0 if not name else 2100.0, 1)
            memory(wire, gathered=size[name])
            clock = span("forward", name, max(clock, wire), 1500.0 if not name else 4700.0, 0)
            memory(clock, other=230_000_000, gathered=-size[name] if name else 0)
        for name in reversed(names):
            if name:
                wire = span("gather", name, max(wire, clock - 9000), 2100.0, 1)
                memory(wire, gathered=size[name])
                if wire > clock:
                    clock = span("wait", name, clock, wire - clock, 0)
            clock = span("backward", name, clock, 10_100.0 if name else 3000.0, 0)
            behind = span("reduce", name, max(clock, behind), 4600.0, 2)
            memory(clock, other=-230_000_000, gathered=-size[name], gradients=2 * size[name] // WORLD)
        clock = span("update", "", behind, 15_000.0, 0)
        memory(clock, gradients=-sum(2 * each // WORLD for each in size.values()))
    held = dict(zip(STATES, (0, 0, 12 * PSI // WORLD, 0, 0, 8_388_608, 0), strict=True))
    for at, change in sorted(changes, key=lambda each: each[0]):
        for state, by in change.items():
            held[state] += by
        found.append({"ph": "C", "name": "memory", "ts": at, "pid": 0, "args": dict(held)})
    return found
