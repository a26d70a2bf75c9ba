"""The pages in a real Chromium: nothing goes wrong, nothing is asked of a network, all of it can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from browser import Page
from run_folders import ledger_of, metrics_line, write_run
from zerofold.observe.report import report_of, write_report
from zerofold.observe.report_files import read_run

PHONE = 390
EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "whole": write_run(folder / "whole", steps=60),
        "bare": write_run(folder / "bare", steps=30, ledger=False, timeline=False),
        "one step": write_run(folder / "one", steps=1),
        "no number": write_run(folder / "nan", steps=9, timeline=False),
        "no step": write_run(folder / "none", steps=2),
        "evil": write_run(folder / f"evil {'long' * 40}", steps=3),
    }
    lines = [metrics_line(step, 9) | ({"loss": float("nan")} if step > 5 else {}) for step in range(1, 10)]
    (made["no number"] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (made["no step"] / "metrics.jsonl").write_text('{"st')
    ledger = ledger_of(3)
    ledger |= {"hints": [EVIL], "device": EVIL}
    ledger["units"][0]["name"] = ledger["comm"][0]["operation"] = ledger["predicted"][0]["line"] = EVIL
    (made["evil"] / "ledger.json").write_text(json.dumps(ledger))
    (made["evil"] / "config.json").write_text(json.dumps({EVIL: EVIL}))
    for run in made.values():
        write_report(read_run(run), run / "report.html")
    return made


@pytest.mark.parametrize("name", ["whole", "bare", "one step", "no number", "no step", "evil"])
def test_every_run_is_shown_on_a_screen_and_on_a_phone(page: Page, runs: dict[str, Path], name: str) -> None:
    file = runs[name] / "report.html"
    for width in (1280, PHONE):
        page.open(file, width=width)
        page.assert_sound(file)
        assert page.js("document.documentElement.scrollWidth") <= width
        assert page.js("document.querySelector('h1').textContent") == runs[name].name
        assert "NaN" not in page.js("document.body.innerText")
        assert page.js("document.querySelectorAll('svg [d*=NaN], svg [x*=NaN], svg [y*=NaN]').length") == 0


def test_nothing_is_shown_twice_and_what_is_not_counted_is_said(page: Page, tmp_path: Path) -> None:
    """On a CPU, with all states in one memory, control messages of some bytes, and nothing to hint at."""
    run = write_run(tmp_path / "cpu", steps=3)
    ledger = ledger_of(3) | {"device": "cpu", "hints": []}
    ledger["tier_bytes"] = {"device": dict(ledger["state_bytes"]), "host": {}, "nvme": {"optimizer": 0}}
    (run / "ledger.json").write_text(json.dumps(ledger))
    write_report(read_run(run), run / "report.html")
    page.open(run / "report.html", width=PHONE)
    said = page.js("document.body.innerText")
    assert "on device" not in said
    assert "On a CPU nobody counts activations" in said
    assert "without activations" in said
    assert "of different moments" in said
    assert "None: nothing that was measured" in said
    assert "Too little for a bar: all_reduce, all." in said
    assert len(page.table("communication")) == 3


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(page: Page, runs: dict[str, Path], dark: bool) -> None:
    for name in ("whole", "bare"):
        page.open(runs[name] / "report.html", dark=dark)
        page.assert_readable(dark=dark)


def test_the_page_shows_the_numbers_of_json(page: Page, runs: dict[str, Path]) -> None:
    report = report_of(read_run(runs["whole"]))
    page.open(runs["whole"] / "report.html")
    rows = page.table("predicted")
    for row, line in zip(rows, report["predicted"], strict=True):
        if line["unit"] == "bytes":
            assert [row[1]["title"], row[2]["title"]] == [f"{line[key]:,} bytes" for key in ("predicted", "measured")]
    assert [row[3]["text"] for row in rows] == ["–", "0.0%", "0.0%", "0.0%", "-1.1%", "+11.1%"]  # noqa: RUF001
    sent = page.table("communication")
    assert [row[3]["title"] for row in sent] == [
        f"{each['bytes_per_step']:,} bytes" for each in report["communication"]
    ]
    assert [row[1]["text"] for row in page.table("time")] == [
        "201 ms", "21.0 ms", "13.0 ms", "4.00 ms", "17.0 ms", "6.00 ms",
    ]  # fmt: skip


def test_the_timeline_zooms_moves_and_explains_itself(page: Page, runs: dict[str, Path]) -> None:
    page.open(runs["whole"] / "report.html")
    drawn = "document.querySelector('#timeline [data-kind=backward]').getAttribute('d')"
    spans = "document.querySelector('#timeline [data-kind=backward]').getAttribute('d').split('M').length - 1"
    first, all_spans = page.js(drawn), page.js(spans)
    assert all_spans == 13
    click(page, "zoom in")
    click(page, "zoom in")
    assert page.js(drawn) != first
    assert page.js(spans) < all_spans
    zoomed = page.js(drawn)
    click(page, "later")
    assert page.js(drawn) != zoomed
    click(page, "the whole time")
    assert page.js(drawn) == first
    page.js("document.querySelector('#timeline').scrollIntoView()")
    page.wait_for_drawing()  # scrolling hides what the mouse had called up
    box = page.js("(({x, y, width, height}) => ({x, y, width, height}))"
                  "(document.querySelector('#timeline [data-kind=update]').getBoundingClientRect())")  # fmt: skip
    page.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert page.js("document.querySelector('.tip').innerText").startswith("(root)\nupdate: 15.0 ms")
    assert page.errors == []


def test_lanes_by_unit(page: Page, runs: dict[str, Path]) -> None:
    page.open(runs["whole"] / "report.html")
    page.js("[...document.querySelectorAll('button')].find((each) => each.textContent === 'lanes by unit').click()")
    lanes = page.js("[...document.querySelectorAll('#timeline .lane title')].map((each) => each.textContent)")
    assert lanes == ["(root)", *(f"blocks.{number}" for number in range(12))]


def test_text_of_a_run_is_shown_as_text(page: Page, runs: dict[str, Path]) -> None:
    page.open(runs["evil"] / "report.html")
    assert page.js("document.title") == f"{runs['evil'].name}: report"
    assert page.js("document.querySelector('.hints li').textContent") == EVIL
    assert page.js("document.querySelectorAll('img').length") == 0


def click(page: Page, label: str) -> None:
    page.js(f"document.querySelector('button[aria-label=\"{label}\"]').click()")
