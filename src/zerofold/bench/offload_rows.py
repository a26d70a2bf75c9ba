"""The result of `zerofold bench offload`: from what the runs showed to one row each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerofold.bench import figures
from zerofold.bench.beside_disk import DiskTurn
from zerofold.bench.mixed import COMPARED_STEPS, LOSS_TOLERANCE
from zerofold.bench.offload_engines import OFFLOAD_ENGINES
from zerofold.bench.offload_worker import OffloadTask, Outcome

REFERENCE = "plain"
OFFLOADED = ("host", "nvme")


@dataclass(frozen=True)
class Run:
    """An engine with a clip; the label says both where the clip is not the common one."""

    label: str
    engine: str
    clip: float


@dataclass
class Measurement:
    """Everything seen so far, by label."""

    rounds: list[dict[str, Outcome]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def outcomes(self, label: str) -> list[Outcome]:
        return [each[label] for each in self.rounds if label in each]


@dataclass(frozen=True, kw_only=True)
class OffloadRow:
    """One line of the result. Figures are None where the engine failed, or could not tell."""

    engine: str
    clip: float
    psi: int
    model: str
    """Its sizes in words, and those of a step."""
    start_s: float | None = None
    step_s: float | None = None
    """Mean over the whole window, to the last update; the median over the rounds."""
    step_s_by_round: list[float] | None = None
    median_s: float | None = None
    """Of the single steps, each to the moment its loss was known."""
    seconds: list[float] | None = None
    """Of these steps, in the last round."""
    over_plain: float | None = None
    tokens_per_s: float | None = None
    bind_rate: float | None = None
    """Share of the timed steps whose norm was above the clip."""
    norms: list[float | None] | None = None
    device_peak_gib: float | None = None
    device_reserved_gib: float | None = None
    device_build_peak_gib: float | None = None
    device_over_activations_gib: float | None = None
    host_peak_gib: float | None = None
    host_start_gib: float | None = None
    host_parts_gib: dict[str, float] | None = None
    offloaded_parameters: int | None = None
    """Whose optimizer states are not on the device."""
    host_bytes_per_parameter: float | None = None
    """Host peak over the start, for each of these."""
    disk_read_per_parameter: float | None = None
    disk_written_per_parameter: float | None = None
    """Bytes in a step."""
    disk_gb_per_s: float | None = None
    """Over the whole step, in which the disk has nothing to do while the model computes."""
    disk_update_gb_per_s: float | None = None
    """Over an update, from its first read to its last write, where the engine tells; the median of the turns."""
    disk_raw_gb_per_s: float | None = None
    """The disk alone, half read and half written, mixed or in bursts, by the better median of the turns."""
    disk_turns: list[DiskTurn] | None = None
    """Updates and the disk alone, one behind the other."""
    disk_file_gib: float | None = None
    tiers: dict[str, dict[str, float]] | None = None
    """Tier → GiB predicted before the start and GiB measured."""
    losses: list[float] | None = None
    books: dict[str, Any] | None = None
    error: str | None = None


def make_row(run: Run, task: OffloadTask, measurement: Measurement, clip: float) -> OffloadRow:
    outcomes = measurement.outcomes(run.label)
    psi = task.size.parameters
    if not outcomes:
        error = measurement.errors.get(run.label)
        return OffloadRow(engine=run.label, clip=run.clip, psi=psi, model=_describe(task), error=error)
    last = outcomes[-1]
    step_s = statistics.median(outcome.step_s for outcome in outcomes)
    ratios = figures.ratios(
        [{label: outcome.step_s for label, outcome in each.items()} for each in measurement.rounds],
        run.label,
        REFERENCE,
    )
    references = measurement.outcomes(REFERENCE)
    device_peak = _largest([outcome.device_peak_bytes for outcome in outcomes])
    activations = _largest([outcome.activation_bytes for outcome in references])
    host_peak = max(outcome.host_peak_bytes for outcome in outcomes)
    offloaded = _offloaded_parameters(last) if OFFLOAD_ENGINES[run.engine].offloads else 0
    is_large = OFFLOAD_ENGINES[run.engine].is_large
    uses_disk = OFFLOAD_ENGINES[run.engine].uses_disk
    read, written = (last.disk_read_bytes, last.disk_written_bytes) if uses_disk else (None, None)
    return OffloadRow(
        engine=run.label,
        clip=run.clip,
        psi=psi,
        model=_describe(task),
        start_s=round(statistics.median(outcome.start_s for outcome in outcomes), 2),
        step_s=round(step_s, 5),
        step_s_by_round=[round(outcome.step_s, 5) for outcome in outcomes],
        median_s=round(statistics.median(second for outcome in outcomes for second in outcome.seconds), 5),
        seconds=[round(second, 5) for second in last.seconds],
        over_plain=None if ratios is None or is_large else round(ratios.median, 4),
        tokens_per_s=round(task.batch * task.size.seq / step_s, 1),
        bind_rate=bind_rate(last.norms[-len(last.seconds) :], run.clip),
        norms=[None if norm is None else round(norm, 5) for norm in last.norms],
        device_peak_gib=_gib(device_peak),
        device_reserved_gib=_gib(_largest([outcome.device_reserved_bytes for outcome in outcomes])),
        device_build_peak_gib=_gib(_largest([outcome.device_build_peak_bytes for outcome in outcomes])),
        device_over_activations_gib=(
            None if device_peak is None or activations is None or is_large else _gib(device_peak - activations)
        ),
        host_peak_gib=_gib(host_peak),
        host_start_gib=_gib(last.host_start_bytes),
        host_parts_gib={name: count / 2**30 for name, count in last.host_parts.items()},
        offloaded_parameters=offloaded,
        host_bytes_per_parameter=(
            round((host_peak - last.host_start_bytes) / offloaded, 2)
            if offloaded and last.host_start_bytes is not None
            else None
        ),
        disk_read_per_parameter=None if read is None else round(read / psi / len(last.seconds), 3),
        disk_written_per_parameter=None if written is None else round(written / psi / len(last.seconds), 3),
        disk_gb_per_s=None if read is None or written is None else round((read + written) / last.window_s / 1e9, 3),
        disk_update_gb_per_s=_median(turn.update for turn in last.disk_turns),
        disk_raw_gb_per_s=_median_of_better(last.disk_turns),
        disk_turns=last.disk_turns or None,
        disk_file_gib=_gib(last.disk_file_bytes),
        tiers=compare_tiers(last),
        losses=[round(loss, 5) for loss in outcomes[0].losses],
        books=last.books,
        error=measurement.errors.get(run.label) or _why_wrong(run, outcomes[0], references, clip),
    )


def _describe(task: OffloadTask) -> str:
    size = task.size
    return (
        f"{size.parameters / 1e9:.3f}e9 parameters: {size.layers} blocks of width {size.width}, "
        f"vocabulary {size.vocab}; {task.batch} x {size.seq} tokens a step"
    )


def bind_rate(norms: Sequence[float | None], clip: float) -> float | None:
    """The share of steps that were clipped.

    >>> bind_rate([0.5, 2.0, 3.0, 0.9], 1.0)
    0.5
    """
    known = [norm for norm in norms if norm is not None]
    return round(sum(norm > clip for norm in known) / len(known), 3) if known else None


def compare_tiers(outcome: Outcome) -> dict[str, dict[str, float]] | None:
    """GiB of each tier, as the engine predicted them and as they were measured; None where it predicts nothing."""
    predicted: Mapping[str, Any] = outcome.books.get("offload", {}).get("predicted", {})
    if not predicted:
        return None
    measured = {
        "device": outcome.device_peak_bytes,
        "host": outcome.host_peak_bytes,
        "nvme": outcome.disk_file_bytes,
    }
    return {
        tier: {"predicted_gib": _sum_gib(states), "measured_gib": round((measured.get(tier) or 0) / 2**30, 3)}
        for tier, states in predicted.items()
    }


def _median(rates: Iterable[float]) -> float | None:
    found = list(rates)
    return round(statistics.median(found), 3) if found else None


def _median_of_better(turns: Sequence[DiskTurn]) -> float | None:
    orders = {order for turn in turns for order in turn.alone}
    return max((_median(turn.alone[order] for turn in turns) or 0.0 for order in orders), default=None)


def _sum_gib(states: Mapping[str, float] | float) -> float:
    count = sum(states.values()) if isinstance(states, Mapping) else states
    return round(count / 2**30, 3)


def _offloaded_parameters(outcome: Outcome) -> int:
    """All, unless the engine says that it kept a part of the optimizer's states on the device."""
    tiers: Mapping[str, Mapping[str, float]] = outcome.books.get("tier_bytes", {})
    by_tier = {tier: states.get("optimizer", 0) for tier, states in tiers.items()}
    total = sum(by_tier.values())
    if not total:
        return outcome.psi
    return round(outcome.psi * sum(count for tier, count in by_tier.items() if tier in OFFLOADED) / total)


def _why_wrong(run: Run, outcome: Outcome, references: Sequence[Outcome], clip: float) -> str | None:
    if not all(math.isfinite(loss) for loss in outcome.losses):
        return f"a loss is not finite: {outcome.losses}"
    if OFFLOAD_ENGINES[run.engine].is_large:
        falls = all(after < before for before, after in zip(outcome.losses, outcome.losses[1:], strict=False))
        return None if falls else f"the loss does not fall on the same batch: {outcome.losses}"
    if not references or run.clip != clip:  # only at one clip must they agree
        return None
    gap = figures.largest_gap([outcome.losses[:COMPARED_STEPS]], [references[0].losses[:COMPARED_STEPS]])
    if gap <= LOSS_TOLERANCE:
        return None
    return f"does not train as plain PyTorch does: losses of the first steps up to {gap:.2g} apart"


def _largest(counts: Sequence[int | None]) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _gib(count: float | None) -> float | None:
    return None if count is None else round(count / 2**30, 3)
