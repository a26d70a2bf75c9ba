"""What follows from the numbers of a run: one sentence for each thing that would make it faster or roomier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

GATHERS_WAIT = REDUCES_WAIT = HOST_WAITS = DISK_WAITS = 0.10  # of a step
AGREEMENTS_WAIT = 0.05
SLOW_UPDATE = 0.15
FEW_BYTES = 0.50  # of the device's memory
MANY_SKIPS = 0.02  # of the steps
WRONG_BY = 0.10  # a prediction
FEW_OF_ALL = 0.01  # of the largest line: what is less matters to nobody

Book = Mapping[str, Any]
"""What ledger.json holds."""


def hints(book: Book) -> list[str]:
    """Most important first: what costs the most time, then memory, then what was predicted wrongly.

    >>> hints({"time": {"compute": 0.5, "gather": 0.5, "step": 1.0}, "stage": "3", "world": 8})[0]
    'Gathering parameters keeps a step waiting for 50% of its time: raise live_bytes, so that more units are fetched \
ahead, or choose larger units; over several nodes stage="hpz" gathers inside a node in backward.'
    """
    found = [hint for rule in _RULES if (hint := rule(book)) is not None]
    waits = sorted((hint for hint in found if hint[0] > 0), key=lambda hint: -hint[0])
    return [text for _, text in (*waits, *(hint for hint in found if hint[0] == 0))]


_Hint = tuple[float, str]
"""The part of a step that it is about, 0 where it is about something else; and the sentence."""


def _part(book: Book, *categories: str) -> float:
    times = book.get("time") or {}
    step = times.get("step") or 0.0
    return sum(times.get(category, 0.0) for category in categories) / step if step else 0.0


def _gather(book: Book) -> _Hint | None:
    part = _part(book, "gather")
    if part <= GATHERS_WAIT:
        return None
    if book.get("stage") in ("0", "1", "2", "dp"):
        fix = "fetching what other ranks have updated takes longer than the first units compute: use a larger batch"
    else:
        fix = "raise live_bytes, so that more units are fetched ahead, or choose larger units"
        if book.get("stage") == "3":
            fix += '; over several nodes stage="hpz" gathers inside a node in backward'
    return part, f"Gathering parameters keeps a step waiting for {part:.0%} of its time: {fix}."


def _reduce(book: Book) -> _Hint | None:
    part = _part(book, "reduce")
    if part <= REDUCES_WAIT:
        return None
    narrow = book.get("precision") in ("bf16", "fp16") and book.get("wire") == "fp32"
    fix = "zf.Precision(reduction=torch.bfloat16) halves what is sent; or " if narrow else ""
    fix += "let more micro-batches make a step (accumulate), or raise buffer_bytes"
    return part, f"Reducing gradients keeps a step waiting for {part:.0%} of its time: {fix}."


def _agreements(book: Book) -> _Hint | None:
    part = _part(book, "other")
    if part <= AGREEMENTS_WAIT:
        return None
    return part, (
        f"Agreements of a few numbers take {part:.0%} of a step, which is waiting for the slowest rank: give ranks "
        "batches of equal length, and look for a slower device or a loader that stalls."
    )


def _host(book: Book) -> _Hint | None:
    part = _part(book, "host")
    if part <= HOST_WAITS:
        return None
    return part, (
        f"States on the host keep a step waiting for {part:.0%} of its time: keep a larger part on the device "
        "(offload={'optimizer': 0.5}), update more of them there ('device_share'), or let more micro-batches make a "
        "step (accumulate)."
    )


def _disk(book: Book) -> _Hint | None:
    part = _part(book, "disk")
    if part <= DISK_WAITS:
        return None
    return part, (
        f"The disk keeps a step waiting for {part:.0%} of its time: let more micro-batches make a step (accumulate), "
        "or keep part of the states in host memory (offload='auto')."
    )


def _update(book: Book) -> _Hint | None:
    part = _part(book, "update")
    if part <= SLOW_UPDATE:
        return None
    fix = "let more micro-batches make a step (accumulate)"
    if book.get("stage") in ("0", "dp"):
        fix = "stage 1 and higher give each rank only its part to update; or " + fix
    # In 16 bits it is one pass by itself.
    if book.get("precision") not in ("bf16", "fp16") and book.get("could_update_in_one_pass"):
        fix = "one_pass=True or fused=True updates in one pass over memory; or " + fix
    return part, f"The update takes {part:.0%} of a step: {fix}."


def _wire(book: Book) -> _Hint | None:
    is_wide = book.get("precision") in ("bf16", "fp16") and book.get("wire") == "fp32"
    if not is_wide or book.get("world", 1) == 1 or _part(book, "reduce") > REDUCES_WAIT or _part(book, "reduce") < 0.02:
        return None
    return 0.0, (
        "Gradients travel in fp32 while the model computes in 16 bits: zf.Precision(reduction=torch.bfloat16) halves "
        "what reductions send, at the cost of their precision."
    )


def _room(book: Book) -> _Hint | None:
    memory, peak = book.get("device_memory"), (book.get("peak_bytes") or {}).get("device")
    if not memory or not peak or peak > FEW_BYTES * memory:
        return None
    free, stage = f"{peak / memory:.0%} of the device's memory was used", book.get("stage")
    if any((book.get("tier_bytes") or {}).get(tier) for tier in ("host", "nvme")):
        return 0.0, f"At most {free}: keep more states on the device ('reserve' of offload=, or a smaller part)."
    if stage == "3" and book.get("world", 1) > 1:  # the others send two thirds of what it does
        return 0.0, f"At most {free}: a larger batch, or stage 2 where its parameters fit, sends less for each sample."
    return 0.0, f"At most {free}: a larger batch makes better use of it."


def _skips(book: Book) -> _Hint | None:
    skipped, steps = book.get("skipped_steps", 0), book.get("steps", 0)
    if not steps or skipped / steps <= MANY_SKIPS:
        return None
    fix = "begin with a smaller loss scale, or use bf16, which needs none"
    if book.get("precision") != "fp16":
        fix = "use a smaller learning rate or clip gradients"
    return 0.0, f"{skipped} of {steps} steps were skipped for gradients that were not finite: {fix}."


def _predicted(book: Book) -> _Hint | None:
    rows = [row for row in book.get("predicted") or () if row.get("unit") == "bytes" and row.get("measured")]
    least = FEW_OF_ALL * max((row["measured"] for row in rows), default=0)
    wrong = [
        (row["measured"] / row["predicted"] - 1, row)
        for row in rows
        if row.get("predicted") and max(row["measured"], row["predicted"]) >= least
    ]
    # Too little is what ends a run: it comes before any that was too much.
    worst = max(wrong, key=lambda each: (each[0] > WRONG_BY, abs(each[0])), default=None)
    if worst is None or abs(worst[0]) <= WRONG_BY:
        return None
    by, row = worst
    what = f"Measured: {row['line']} on the {row['where']}"
    if by > 0:
        return 0.0, f"{what} took {by:.0%} more than planned: leave that much room in the next plan of this model."
    return 0.0, f"{what} took {-by:.0%} less than planned: there is room for more than the plan of this model says."


_RULES: tuple[Callable[[Book], _Hint | None], ...] = (
    _gather,
    _reduce,
    _agreements,
    _host,
    _disk,
    _update,
    _room,
    _wire,
    _skips,
    _predicted,
)
