"""A timeline that chrome://tracing and ui.perfetto.dev show: who did what when, and what the memory held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerofold.timing import LANES, StepTimes

_MICRO = 1e6


def trace_events(steps: Sequence[StepTimes], *, rank: int) -> dict[str, Any]:
    """Chrome's trace format. Times begin at 0 with the first thing shown.

    >>> from zerofold.timing import Sample, Span
    >>> span = Span("main", "forward", "forward blocks.0", "blocks.0", 10.0, 10.5)
    >>> trace = trace_events([StepTimes(7, 10.0, 11.0, {}, [span], [Sample(10.5, {"parameters": 8})])], rank=0)
    >>> [(event["ph"], event["name"], event.get("ts"), event.get("dur")) for event in trace["traceEvents"]][-2:]
    [('X', 'forward blocks.0', 0.0, 500000.0), ('C', 'memory', 500000.0, None)]
    """
    first = min([step.begin for step in steps] + [span.begin for step in steps for span in step.spans], default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "steps", "pid": rank, "args": {"steps": [step.number for step in steps]}},
        *(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
            for number, lane in enumerate(LANES, start=1)
        ),
    ]
    for step in steps:
        for span in sorted(step.spans, key=lambda span: (span.begin, -span.end)):
            args: dict[str, Any] = {"unit": span.unit}
            if span.nbytes:
                args["bytes"] = span.nbytes
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.category,
                    "ts": round((span.begin - first) * _MICRO, 3),
                    "dur": round((span.end - span.begin) * _MICRO, 3),
                    "pid": rank,
                    "tid": LANES.index(span.lane) + 1,
                    "args": args,
                }
            )
        for sample in step.samples:
            at = round((sample.at - first) * _MICRO, 3)
            events.append({"ph": "C", "name": "memory", "ts": at, "pid": rank, "args": sample.nbytes})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
