"""Shapes and machines for tests of the plan: GPTs by formula, the H200 that figures were measured on."""

from __future__ import annotations

from zerofold.plan.machine import GB, GIB, TERA, Link, Machine
from zerofold.plan.shape import ROOT, Activity, ModelShape, Moment, PerSample, Phase, UnitShape, Work

H200 = Machine(
    name="H200",
    device_memory=139 * GIB,
    host_memory=125 * GIB,
    disk=1000 * GB,
    flops=792 * TERA,
    flops_fp32=52 * TERA,
    memory_rate=3400 * GB,
    inside=Link(rate=450 * GB, latency=3e-6),
    across=Link(rate=50 * GB, latency=8e-6),
    to_host=Link(rate=55 * GB, latency=1e-5),
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
    itemsize: int = 2,
    fused: float = 1.0,
) -> ModelShape:
    """A GPT with untied embeddings; activations by the formulas of the memory model, 16 bytes and more a value of the
    hidden state. `fused`: the part of the elementwise traffic that is left after compilation."""
    heads = heads or max(1, hidden // 128)
    block = UnitShape(name="block", trained=12 * hidden**2 + 4 * hidden, count=layers)
    root = UnitShape(name=ROOT, trained=(2 * vocab + tokens) * hidden + 2 * hidden)
    wide = tokens * hidden
    attention = 2 * wide * tokens  # causal: half of two products of tokens × tokens
    matrix = PerSample(0, 2 * tokens * 12 * hidden**2 + attention)
    moved = PerSample(0, 12 * itemsize * 2 * wide * fused)
    once = Work(matrix, moved, kernels=16)
    head = Work(PerSample(0, 2 * wide * vocab), PerSample(0, 14 * tokens * vocab), kernels=6)
    activities = []
    for every in intervals:
        again = 1 if every else 0
        depth = every or layers
        inner = PerSample(0, tokens * depth * 8 * itemsize * hidden)
        inputs = PerSample(0, itemsize * wide * (-(-layers // every) if every else 0))
        alive = inner + inputs
        moments = (
            Moment(phase=Phase.FORWARD, unit=0, alive=alive, work=head),
            Moment(phase=Phase.FORWARD, unit=1, alive=alive, work=once, repeats=layers),
            Moment(phase=Phase.BACKWARD, unit=0, alive=alive, work=head + head),
            Moment(phase=Phase.BACKWARD, unit=1, alive=alive, work=_times(once, 2 + again), repeats=layers),
        )
        activities.append(Activity(checkpoint_every=every, moments=moments, checkpoints=inputs))
    return ModelShape(
        name=f"gpt-{layers}x{hidden}",
        units=(root, block),
        activities=tuple(activities),
        tokens=tokens,
        source="shape",
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
    )


def _times(work: Work, times: int) -> Work:
    return sum((work for _ in range(times - 1)), work)
