"""Each hint: the number that calls for it, the number that does not, and what it says to do."""

from __future__ import annotations

from typing import Any

import pytest

from zerofold.observe.hints import hints

GIB = 2**30


def book(times: dict[str, float] | None = None, **values: Any) -> dict[str, Any]:
    spent = {"compute": 1.0 - sum((times or {}).values()), **(times or {}), "step": 1.0}
    return {"time": spent, "stage": "3", "world": 8, "precision": "bf16", "wire": "bf16", "steps": 100, **values}


def line(name: str, predicted: float, measured: float) -> dict[str, Any]:
    return {"line": name, "where": "device", "unit": "bytes", "predicted": predicted, "measured": measured}


@pytest.mark.parametrize(
    ("calls", "does_not", "says"),
    [
        (book({"gather": 0.12}), book({"gather": 0.09}), "12% of its time: raise live_bytes"),
        (book({"gather": 0.12}, stage="1"), book({"gather": 0.09}, stage="1"), "use a larger batch"),
        (book({"reduce": 0.2}), book({"reduce": 0.05}), "raise buffer_bytes"),
        (book({"reduce": 0.2}, wire="fp32"), book({"reduce": 0.2}), "reduction=torch.bfloat16"),
        (book({"reduce": 0.05}, wire="fp32"), book({"reduce": 0.01}, wire="fp32"), "travel in fp32"),
        (book({"other": 0.06}), book({"other": 0.04}), "slowest rank"),
        (book({"host": 0.3}), book({"host": 0.1}), "'device_share'"),
        (book({"disk": 0.3}), book({"disk": 0.1}), "The disk keeps"),
        (book({"update": 0.2}), book({"update": 0.1}), "The update takes 20%"),
        (
            book({"update": 0.2}, precision="fp32", could_update_in_one_pass=True),
            book({"update": 0.2}, could_update_in_one_pass=True),
            "one_pass=True",
        ),
        (book({"update": 0.2}, precision="fp32"), book({"update": 0.1}, precision="fp32"), "20% of a step: let more"),
        (book({"gather": 0.2}), book({"gather": 0.2}, stage="hpz"), 'stage="hpz"'),
        (
            book(device_memory=80 * GIB, peak_bytes={"device": 20 * GIB}),
            book(device_memory=80 * GIB, peak_bytes={"device": 60 * GIB}),
            "or stage 2 where",
        ),
        (
            book(device_memory=80 * GIB, peak_bytes={"device": 20 * GIB}, tier_bytes={"host": {"optimizer": 1}}),
            book(device_memory=80 * GIB, peak_bytes={"device": 20 * GIB}, tier_bytes={"host": {}}),
            "keep more states on the device",
        ),
        (book(skipped_steps=5, precision="fp16"), book(skipped_steps=2, precision="fp16"), "smaller loss scale"),
        (book(skipped_steps=5), book(skipped_steps=0), "smaller learning rate"),
        (
            book(predicted=[{"line": "peak", "where": "device", "unit": "bytes", "predicted": 100, "measured": 120}]),
            book(predicted=[{"line": "peak", "where": "device", "unit": "bytes", "predicted": 100, "measured": 105}]),
            "peak on the device took 20% more than planned",
        ),
        (
            book(predicted=[line("peak", 100, 80), line("tiny", 0.1, 0.3)]),
            book(predicted=[line("peak", 100, 95), line("tiny", 0.1, 0.3)]),
            "peak on the device took 20% less than planned",
        ),
        (
            book(predicted=[line("peak", 100, 50), line("optimizer", 40, 50)]),
            book(predicted=[line("peak", 100, 50), line("optimizer", 50, 50)]),
            "optimizer on the device took 25% more",
        ),
        (  # stages 1 and 2 send no more than 0
            book(device_memory=80 * GIB, peak_bytes={"device": 20 * GIB}, stage="2"),
            book(device_memory=80 * GIB, peak_bytes={"device": 20 * GIB}, stage="3"),
            "a larger batch makes better use of it",
        ),
    ],
)
def test_a_number_calls_for_its_hint(calls: dict[str, Any], does_not: dict[str, Any], says: str) -> None:
    assert any(says in hint for hint in hints(calls)), hints(calls)
    assert not any(says in hint for hint in hints(does_not)), hints(does_not)


def test_what_costs_the_most_comes_first() -> None:
    found = hints(book({"gather": 0.12, "host": 0.3, "update": 0.2}, skipped_steps=50))
    assert [hint.split()[0] for hint in found] == ["States", "The", "Gathering", "50"]


def test_a_run_that_waits_for_nothing_gets_none() -> None:
    assert hints(book()) == []
    assert hints({}) == []
