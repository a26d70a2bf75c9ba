"""`zerofold report`: the numbers of a run folder, and the page that shows them.

The page holds the same object that `--json` prints, and shows no number that is not in it or follows from it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from zerofold.observe.html import page_of, write_whole
from zerofold.observe.report_files import (
    NoRunError,
    RunFiles,
    number,
    numbers_in,
    objects_in,
    read_run,
    text_of,
)
from zerofold.observe.report_timeline import timeline_of

STATES = ("parameters", "gradients", "optimizer", "gathered", "cached", "buffers", "other")
TIMES = ("compute", "gather", "reduce", "host", "disk", "other", "update")
CURVES = ("step", "seconds", "loss", "validation_loss", "lr", "tokens_per_second", "step_seconds")
_CURVE_BUCKETS = 1000


def report_of(run: RunFiles) -> dict[str, Any]:
    """Every number of the page, as JSON can hold it.

    >>> metrics = [{"step": 1, "loss": 2.5}]
    >>> run = RunFiles(name="first", config={}, metrics=metrics, ledger=None, timeline=None, missing=[])
    >>> report = report_of(run)
    >>> report["facts"]["loss"], report["curves"]["loss"], report["predicted"]
    (2.5, [2.5], [])
    """
    ledger = run.ledger or {}
    return {
        "run": run.name,
        "facts": _facts(run, ledger),
        "missing": run.missing,
        "hints": [text_of(hint) for hint in ledger.get("hints") or []] if _is_list(ledger.get("hints")) else [],
        "looked_for_hints": _is_list(ledger.get("hints")),
        "predicted": [_prediction(each) for each in objects_in(ledger.get("predicted"))],
        "curves": _curves(run.metrics),
        "non_finite_losses": sum(1 for line in run.metrics if _not_finite(line.get("loss"))),
        "time": _time(run.metrics, ledger),
        "communication": [_call(each) for each in objects_in(ledger.get("comm"))],
        "state_bytes": numbers_in(ledger.get("state_bytes") or _last(run.metrics, "state_bytes")),
        "peak_state_bytes": numbers_in(ledger.get("peak_state_bytes")),
        "tier_bytes": _tiers(ledger.get("tier_bytes")),
        "counts_activations": not text_of(ledger.get("device", run.config.get("device"))).startswith("cpu"),
        "peak_kept_bytes": _tiers(ledger.get("peak_kept_bytes")),
        "units": [_unit(each) for each in objects_in(ledger.get("units"))],
        "timeline": None if run.timeline is None else timeline_of(run.timeline, STATES),
        "config": {str(key): _setting(value) for key, value in run.config.items()},
    }


def write_report(run: RunFiles, path: Path) -> None:
    report = report_of(run)
    page = page_of(
        f"{run.name}: report",
        report,
        scripts=("draw.js", "report.js", "timeline.js"),
        footer="Written by zerofold report.",
    )
    write_whole(path, page)


def report_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="The page to write; default: report.html in the folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's numbers; a page only with --out.")] = False,
) -> None:
    """Show a run on one HTML page: predicted and measured, curves, memory, timeline, communication, hints.

    The page needs no network and no server. It reads config.json, metrics.jsonl, ledger.json and timeline.json of the
    folder, and says what is missing.

    \b
    Examples:
      zerofold report runs/last
      zerofold report runs/last --out page.html
      zerofold report runs/last --json
    """
    try:
        found = read_run(run)
    except NoRunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if out is not None or not as_json:
        page = out or run / "report.html"
        try:
            write_report(found, page)
        except OSError as error:
            typer.echo(f"error: {page} cannot be written ({error.strerror}): name another with --out", err=True)
            raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report_of(found), allow_nan=False))
    else:
        typer.echo(f"{page}")
        for sentence in found.missing:
            typer.echo(sentence)


def off_percent(value: float | None, reference: float | None) -> float | None:
    """By how much `value` is above (or below) the reference.

    >>> off_percent(105, 100), off_percent(1, 0), off_percent(None, 3)
    (5.0, None, None)
    """
    if value is None or not reference:
        return None
    return 100 * (value - reference) / reference


def thinned(lines: list[dict[str, Any]], buckets: int) -> list[dict[str, Any]]:
    """At most two lines of each bucket, the lowest and the highest loss, so that no spike is lost; the last one too.

    >>> [line["step"] for line in thinned([{"step": s, "loss": -s % 5} for s in range(9)], 2)]
    [0, 1, 5, 6, 8]
    """
    size = math.ceil(len(lines) / buckets) if lines else 1
    if size <= 2:
        return lines
    kept: list[dict[str, Any]] = []
    for start in range(0, len(lines), size):
        bucket = range(start, min(start + size, len(lines)))
        # A loss that is no number is what a reader looks for: it counts as the highest.
        ends = {pick(bucket, key=lambda at: _loss_or_infinite(lines[at])) for pick in (min, max)}
        if start + size >= len(lines):
            ends.add(len(lines) - 1)
        kept += [lines[at] for at in sorted(ends)]
    return kept


def _facts(run: RunFiles, ledger: dict[str, Any]) -> dict[str, Any]:
    last = run.metrics[-1] if run.metrics else {}
    facts: dict[str, Any] = {
        key: number(last.get(key))
        for key in ("step", "progress", "seconds", "loss", "validation_loss", "tokens", "skipped_steps")
    }
    speeds = [number(line.get("tokens_per_second")) for line in run.metrics]
    known = [speed for speed in speeds if speed is not None]
    facts["median_tokens_per_second"] = median(known) if known else None
    facts["mfu"] = number(ledger.get("mfu", last.get("mfu")))
    facts["peak_device_bytes"] = numbers_in(ledger.get("peak_bytes") or last.get("peak_bytes")).get("device")
    for key in ("rank", "world", "psi", "tokens_per_step", "flops_per_step", "peak_flops"):
        facts[key] = number(ledger.get(key))
    for key in ("stage", "precision", "device"):
        found = ledger.get(key, run.config.get(key))
        facts[key] = None if found is None else text_of(found)
    for key, setting in (("world", "world"), ("psi", "parameters")):
        if facts[key] is None:
            facts[key] = number(run.config.get(setting))
    return facts


def _curves(metrics: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    lines = thinned(metrics, _CURVE_BUCKETS)
    return {key: [number(line.get(key)) for line in lines] for key in CURVES}


def _prediction(line: dict[str, Any]) -> dict[str, Any]:
    predicted, measured = number(line.get("predicted")), number(line.get("measured"))
    return {
        "line": text_of(line.get("line")),
        "where": text_of(line.get("where")),
        "unit": text_of(line.get("unit")),
        "predicted": predicted,
        "measured": measured,
        "off_percent": off_percent(predicted, measured),
    }


def _call(each: dict[str, Any]) -> dict[str, Any]:
    sent, theory = number(each.get("bytes_per_step")), number(each.get("theory_bytes_per_step"))
    return {
        "operation": text_of(each.get("operation")),
        "group": text_of(each.get("group")),
        "calls": number(each.get("calls")),
        "bytes_per_step": sent,
        "theory_bytes_per_step": theory,
        "off_percent": off_percent(sent, theory),
    }


def _unit(each: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": text_of(each.get("name")),
        "parameters": number(each.get("parameters")),
        "state_bytes": _summed(each.get("state_bytes")),
        "comm_bytes": _summed(each.get("comm_bytes")),
    }


def _time(metrics: list[dict[str, Any]], ledger: dict[str, Any]) -> dict[str, Any] | None:
    """Seconds of the mean step; what no part claims is the rest."""
    parts = numbers_in(ledger.get("time")) or numbers_in(_last(metrics, "time"))
    if not parts:
        return None
    step = parts.pop("step", None)
    if step is None:
        step = number(_last(metrics, "step_seconds"))
    if step == 0:  # there was none
        return None
    known = [name for name in TIMES if name in parts] + [name for name in parts if name not in TIMES]
    ordered = {name: parts[name] for name in known}
    claimed = sum(ordered.values())
    return {"step": step, "parts": ordered, "rest": None if step is None else max(0.0, step - claimed)}


def _tiers(value: object) -> dict[str, dict[str, float]]:
    return {str(tier): numbers_in(sizes) for tier, sizes in value.items()} if isinstance(value, dict) else {}


def _summed(value: object) -> float | None:
    """A number, or an object of numbers by kind, in one."""
    found = numbers_in(value)
    return sum(found.values()) if found else number(value)


def _setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _last(metrics: list[dict[str, Any]], key: str) -> object:
    return next((line[key] for line in reversed(metrics) if line.get(key) is not None), None)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _loss_or_infinite(line: dict[str, Any]) -> float:
    loss = number(line.get("loss"))
    return math.inf if loss is None else loss
