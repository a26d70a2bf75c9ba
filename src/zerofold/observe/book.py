"""What ledger.json holds: all that is known of a run on one rank, for a report to show."""

from __future__ import annotations

from typing import Any

import torch

from zerofold.engine import Engine
from zerofold.observe.hints import hints
from zerofold.observe.ledger import Ledger
from zerofold.observe.predicted import BYTES, Line, Workload, predictions
from zerofold.observe.recording import Recording
from zerofold.offload.budget import device_memory
from zerofold.optim.adam import why_not_one_pass
from zerofold.placement import Tier
from zerofold.plan.presets import peak_flops as preset_flops
from zerofold.plan.presets import preset_of

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
MIB = 2**20
_SAID = {"gather": "parameters", "reduce": "gradients", "other": "norm and other agreements"}


def book_of(
    engine: Engine,
    recording: Recording,
    snapshot: dict[str, Any],
    *,
    steps: int,
    tokens_per_step: float,
    flops_per_step: float | None,
    peak_flops: float | None,
    workload: Workload | None = None,
) -> dict[str, Any]:
    ledger = Ledger(engine)
    times, rank = recording.time(), engine.rank
    trained = [slab for slab in engine.slabs() if slab.requires_grad]
    info = engine.last_step
    skipped = 0 if info is None else info.skipped_total
    has_updated = recording.steps > skipped or (
        recording.steps > 0 and any(optimizer.state for optimizer in engine.optimizers)
    )
    predicted = predictions(engine, recording, snapshot, precision_of(engine), workload)
    book: dict[str, Any] = {
        "rank": rank,
        "world": engine.world,
        "mesh": snapshot.get("mesh"),
        "stage": engine.row.name,
        "precision": precision_of(engine),
        "wire": _SHORT.get(trained[0].dtypes.reduction, str(trained[0].dtypes.reduction)) if trained else None,
        "device": engine.device.type,
        "device_name": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu",
        "device_memory": device_memory(engine.device) if engine.device.type == "cuda" else None,
        "psi": snapshot["psi"],
        "psi_here": snapshot["psi_here"],
        "steps": steps,
        "recorded_steps": recording.steps,
        "could_update_in_one_pass": all(
            why_not_one_pass(optimizer) is None and not optimizer.defaults.get("fused")
            for optimizer in engine.optimizers
        ),
        "skipped_steps": skipped,
        "tokens_per_step": tokens_per_step,
        "flops_per_step": flops_per_step,
        "peak_flops": peak_flops,
        "mfu": mfu(flops_per_step, times["step"], peak_flops),
        "state_bytes": snapshot["state_bytes"],
        "peak_state_bytes": dict(recording.peaks),
        "peak_bytes": recording.peak_bytes(),
        "tier_bytes": snapshot["tier_bytes"],
        "peak_kept_bytes": _kept_for_backward(snapshot),
        "units": ledger.units(),
        "comm": [
            {
                "operation": row.operation,
                "group": row.group,
                "calls": row.calls,
                "bytes_per_step": row.nbytes,
                "theory_bytes_per_step": predicted.sent.get((row.operation, row.group)),
            }
            for row in recording.comm()
        ],
        "time": times,
        "predicted": [line._asdict() for line in _compared(predicted.lines, has_updated)],
    }
    return {**book, "hints": hints(book)}


def _compared(lines: list[Line], has_updated: bool) -> list[Line]:
    """Before its first update a run has not taken what a step takes: no moments, and maybe no gradients."""
    return lines if has_updated else [line._replace(measured=None) for line in lines]


def mfu(flops_per_step: float | None, seconds: float, peak_flops: float | None) -> float | None:
    """Model flops utilisation: what a step has to compute over what the device could have computed in that time.

    >>> mfu(2e12, 1.0, 8e12)
    0.25
    """
    if not flops_per_step or not peak_flops or seconds <= 0:
        return None
    return flops_per_step / seconds / peak_flops


def peak_flops_of(device: torch.device, precision: str) -> float | None:
    """What this device can compute in a second, where it has a preset; None elsewhere, as on a CPU.

    >>> peak_flops_of(torch.device("cpu"), "bf16") is None
    True
    """
    name = preset_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if name is None else preset_flops(name, in_16_bit=precision in ("bf16", "fp16"))


def precision_of(engine: Engine) -> str:
    """As `precision=` names it."""
    if engine.precision.tf32:
        return "tf32"
    slabs = engine.slabs()
    compute = max(slabs, key=lambda slab: slab.layout.size).dtypes.compute if slabs else torch.float32
    return _SHORT.get(compute, str(compute))


def ending(book: dict[str, Any]) -> list[str]:
    """A few lines for a person: where the time went, what was predicted, and what to do."""
    times = book["time"]
    if not times["step"]:
        return []
    parts = {
        name: times[name] for name in ("compute", "update", "host", "disk") if times[name] / times["step"] >= 0.001
    }
    exposed = {name: times[name] for name in ("gather", "reduce", "other")}
    waiting = sum(exposed.values())
    shown = ", ".join(f"{name} {seconds / times['step']:.0%}" for name, seconds in parts.items())
    utilised = "" if book["mfu"] is None else f", MFU {book['mfu']:.1%}"
    named = ", ".join(f"{_SAID[name]} {seconds / times['step']:.1%}" for name, seconds in exposed.items())
    lines = [
        f"A step took {1000 * times['step']:.1f} ms: {shown}{utilised}.",
        f"Communication that nothing hid: {waiting / times['step']:.1%} of a step ({named}).",
    ]
    compared = [row for row in book["predicted"] if row["unit"] == BYTES and row["measured"] is not None]
    if compared:
        each = [f"{_named(row)} {row['predicted'] / MIB:.1f} / {row['measured'] / MIB:.1f}" for row in compared]
        lines.append(f"Predicted / measured peak in MiB on rank {book['rank']}: {', '.join(each)}.")
    if book["hints"]:
        lines.append(f"Hint: {book['hints'][0]}")
    return lines


def _kept_for_backward(snapshot: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The most of it, by tier and kind, of what there was."""
    peaks = {kind: snapshot.get(f"peak_{kind}_bytes", {}) for kind in ("checkpoint", "activation")}
    found = {
        tier.value: {f"{kind}s": most[tier.value] for kind, most in peaks.items() if most.get(tier.value)}
        for tier in Tier
    }
    return {tier: kinds for tier, kinds in found.items() if kinds}


def _named(row: dict[str, Any]) -> str:
    """With its memory where that is not the device's: a state may be in two."""
    return row["line"] if row["where"] == Tier.DEVICE.value else f"{row['line']} ({row['where']})"
