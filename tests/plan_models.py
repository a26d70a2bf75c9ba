"""Shapes and machines for tests of the plan: GPTs by their numbers, the H200 that figures were measured on."""

from __future__ import annotations

from dataclasses import replace

from zerofold.plan.machine import GB, GIB, Link
from zerofold.plan.presets import preset
from zerofold.plan.shape import ModelShape
from zerofold.plan.transformer import GPTNumbers, from_numbers

H200 = replace(
    preset("H200"),
    device_memory=139 * GIB,
    host_memory=125 * GIB,
    disk=1000 * GB,
    inside=Link(rate=450 * GB, latency=3e-6),
    across=Link(rate=50 * GB, latency=8e-6),
    host_update=3.3e9,
    disk_read=3.1 * GB,
    disk_write=3.0 * GB,
)


def gpt(
    *,
    layers: int,
    hidden: int,
    heads: int | None = None,
    vocab: int = 32768,
    tokens: int = 1024,
    intervals: tuple[int, ...] = (0, 1),
    precision: str = "bf16",
) -> ModelShape:
    """With as many of the intervals of checkpoints as a test wants to look at."""
    heads = heads or max(1, hidden // 128)
    size = GPTNumbers(layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=tokens)
    model = from_numbers(size, precision=precision, checkpoint_every=intervals)
    known = tuple(each for each in model.activities if each.checkpoint_every in intervals)
    return replace(model, activities=known)
