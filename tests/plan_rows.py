"""Rows for a plan's page that do everything a memory model does: padding, groups, moments, refusals, fractions."""

from __future__ import annotations

from zerofold.plan.formulas import Inputs, Outputs
from zerofold.plan.page import PEAK, Row, Slider

LAYERS, HIDDEN, HEADS, VOCAB = 48, 1600, 25, 50257
BUFFER = 2**28


def sliders(devices: int = 64, batch: int = 4, sequence: int = 1024) -> list[Slider]:
    return [
        Slider(name="devices", label="devices", value=devices, high=100_000),
        Slider(name="batch", label="micro-batch", value=batch, high=512),
        Slider(name="sequence", label="sequence", value=sequence, low=16, high=131_072),
    ]


def units(sequence: int) -> list[tuple[int, int]]:
    """Elements of a unit, and how many of them."""
    return [(VOCAB * HIDDEN + sequence * HIDDEN, 1), (12 * HIDDEN**2 + 13 * HIDDEN, LAYERS)]


def padded(elements: int, ranks: int) -> int:
    """Of one rank: each starts on 128 bytes."""
    return -(-elements // (32 * ranks)) * 32


def bytes_of(stage: str, at: Inputs) -> Outputs:
    devices, batch, sequence = at["devices"], at["batch"], at["sequence"]
    ranks = devices
    if stage == "hsdp":
        if devices % 8:
            raise ValueError(f"{devices} devices are no whole nodes of 8")
        ranks = 8
    if stage == "0":
        ranks = 1
    whole = sum(count * padded(size, 1) for size, count in units(sequence))
    shard = sum(count * padded(size, ranks) for size, count in units(sequence))
    is_cut = stage in ("3", "hsdp") and devices > 1
    largest = max(size for size, _ in units(sequence))
    found = {
        "parameters": 0 if is_cut else 2 * whole,
        "gradients": 4 * shard if stage in ("2", "3", "hsdp") else 4 * whole,
        "optimizer": 12 * shard,
        "fused buffers": min(BUFFER, 4 * largest) if devices > 1 else 0,
        "gathered units": 2 * sum(size for size, _ in units(sequence)) if is_cut else 0,
        "activation checkpoints": 2 * batch * sequence * HIDDEN * LAYERS,
        "working activations": batch * sequence * (16 * HIDDEN + 2 * HEADS * sequence),
        "logits": 6 * batch * sequence * VOCAB,
    }
    states = found["parameters"] + found["gradients"] + found["optimizer"]
    backward = found["working activations"] + found["gathered units"] + found["fused buffers"]
    peak = states + max(found["activation checkpoints"] + max(backward, found["logits"]), 4 * shard)
    reserve = round(peak * 0.013) if peak > 2**20 else 0
    return {**found, "fragmentation": reserve, PEAK: peak + reserve}


def rows() -> list[Row]:
    details = {"0": "all of it everywhere", "hsdp": "cut inside nodes of 8"}

    def row(stage: str) -> Row:
        return Row(
            name=f"stage {stage}" if stage.isdigit() else stage,
            detail=details.get(stage, ""),
            bytes_at=lambda at: bytes_of(stage, at),
            recommended=stage == "2",
        )

    return [row(stage) for stage in ("0", "1", "2", "3", "hsdp")]
