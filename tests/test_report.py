"""`zerofold report`: the numbers of a run folder, whatever state it is in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from run_folders import BLOCKS, PSI, WORLD, events, ledger_of, metrics_line, write_run
from zerofold.cli import build_app


def report(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["report", *map(str, arguments)])


def numbers(folder: Path) -> dict[str, Any]:
    result = report(folder, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def in_page(page: Path) -> dict[str, Any]:
    text = page.read_text()
    begin = text.index('id="data">') + len('id="data">')
    return dict(json.loads(text[begin : text.index("</script>", begin)]))


def test_the_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    found = numbers(write_run(tmp_path / "run", steps=40))
    last = metrics_line(40, 40)
    assert found["run"] == "run"
    assert found["facts"]["loss"] == last["loss"]
    assert found["facts"]["psi"] == PSI
    assert found["curves"]["loss"] == [metrics_line(step, 40)["loss"] for step in range(1, 41)]
    peak = next(line for line in found["predicted"] if line["line"] == "peak")
    assert peak["off_percent"] == pytest.approx(100 * (3_871_000_000 / 3_912_450_048 - 1))
    reduced = next(each for each in found["communication"] if each["operation"] == "reduce_scatter")
    assert reduced["off_percent"] == pytest.approx(100 * 65536 / (4 * PSI * (WORLD - 1) // WORLD), rel=1e-6)
    assert found["time"]["rest"] == pytest.approx(0.262 - 0.256)
    assert found["peak_kept_bytes"] == ledger_of(40)["peak_kept_bytes"]
    assert found["missing"] == []
    assert len(found["timeline"]["spans"]) == sum(1 for event in events() if event["ph"] == "X")
    assert found["timeline"]["names"][:2] == ["", "blocks.0"]
    assert len(found["units"]) == BLOCKS + 1


def test_the_page_holds_what_json_prints(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5)
    result = report(folder)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [str(folder / "report.html")]
    assert in_page(folder / "report.html") == numbers(folder)


def test_json_alone_writes_no_page_and_out_names_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    numbers(folder)
    assert not (folder / "report.html").exists()
    assert report(folder, "--out", tmp_path / "new" / "page.html").exit_code == 0
    assert in_page(tmp_path / "new" / "page.html")["facts"]["step"] == 2


@pytest.mark.parametrize(("speeds", "middle"), [([4312, 8509], 6410.5), ([1, 9, 5], 5), ([None, 3], 3)])
def test_the_median_is_the_middle_of_all_lines(tmp_path: Path, speeds: list[float | None], middle: float) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    lines = [metrics_line(step + 1, 9) | {"tokens_per_second": speed} for step, speed in enumerate(speeds)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert numbers(folder)["facts"]["median_tokens_per_second"] == middle


def test_memory_before_the_first_span_is_that_at_its_begin(tmp_path: Path) -> None:
    """Or the plot would begin with nothing."""
    folder = write_run(tmp_path / "run", steps=1)
    counted = [("C", "memory", at, {"optimizer": held}) for at, held in ((1, 5), (2, 7), (30, 9))]
    made = [{"ph": ph, "name": name, "ts": at, "pid": 0, "args": args} for ph, name, at, args in counted]
    made += [{"ph": "X", "name": "a", "cat": "forward", "ts": 10, "dur": 40, "pid": 0, "args": {"unit": "a"}}]
    made += [{"ph": "M", "name": "steps", "pid": 0, "args": {"steps": [16, 17]}}]
    (folder / "timeline.json").write_text(json.dumps({"traceEvents": made}))
    found = numbers(folder)["timeline"]
    assert (found["memory"]["at"], found["memory"]["bytes"]) == ([0, 20], {"optimizer": [7, 9]})
    assert found["steps"] == [16, 17]


def test_what_is_missing_is_said_with_the_way_to_get_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, ledger=False, timeline=False)
    result = report(folder)
    assert result.exit_code == 0
    assert "ledger.json is missing: `zerofold train` writes it" in result.stdout
    assert "timeline.json is missing: `zerofold train" in result.stdout
    found = in_page(folder / "report.html")
    assert len(found["missing"]) == 2
    assert found["time"]["parts"]["compute"] == 0.201  # of the metrics
    assert found["state_bytes"]["optimizer"] == 12 * PSI // WORLD
    assert found["timeline"] is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '"text"', "[" * 100_000, '{"traceEvents": 3}'])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, damage: str) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    (folder / "timeline.json").write_text(damage)
    found = numbers(folder)
    if damage == "[]":  # Chrome reads a bare list of events too
        assert found["timeline"]["spans"] == []
    else:
        assert [text.split(" (")[0] for text in found["missing"]] == ["timeline.json cannot be read"]
    assert found["facts"]["psi"] == PSI


def test_values_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    """Another version may write other things: the page shows what it knows."""
    folder = write_run(tmp_path / "run", steps=3)
    ledger = ledger_of(3)
    ledger |= {"psi": "many", "hints": 3, "comm": [1, {"operation": None}], "time": [], "tier_bytes": 1, "units": {}}
    ledger |= {"peak_kept_bytes": [1]}
    (folder / "ledger.json").write_text(json.dumps(ledger))
    odd = [*events(), {"ph": "X", "ts": None}, {"ph": "X", "ts": 1, "dur": -1}, 7, {"ph": "C", "name": "memory"}]
    (folder / "timeline.json").write_text(json.dumps({"traceEvents": odd}))
    found = numbers(folder)
    assert found["facts"]["psi"] is None
    assert found["hints"] == []
    assert [each["calls"] for each in found["communication"]] == [None]
    assert found["time"]["step"] == 0.262


def test_a_killed_run_with_a_loss_that_is_no_number(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, ledger=False, timeline=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(4, 9) | {"loss": float("nan")}) + "\n")
        file.write('{"step": 5, "loss": 1.')
    found = numbers(folder)
    assert found["curves"]["step"] == [1, 2, 3, 4]
    assert found["curves"]["loss"][3] is None
    assert found["non_finite_losses"] == 1
    assert found["facts"]["loss"] is None


def test_no_run_there_is_wrong_input(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        result = report(folder)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_a_long_run_makes_a_light_page_and_keeps_its_extremes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1, timeline=False)
    lines = [metrics_line(step, 30_000) for step in range(1, 30_001)]
    lines[12_345]["loss"] = 99.0
    lines[23_456]["loss"] = float("inf")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    many = events(200)
    points = [event for event in many if event["ph"] == "C"]
    for number in (9, 11, 13):  # peaks of one point, each higher than the one after it
        points[-number]["args"]["other"] = 10**10 + number
    (folder / "timeline.json").write_text(json.dumps({"traceEvents": many}))
    assert report(folder).exit_code == 0
    page = folder / "report.html"
    assert page.stat().st_size < 1_000_000
    found = in_page(page)
    assert 99.0 in found["curves"]["loss"]
    assert None in found["curves"]["loss"]
    assert found["curves"]["step"][-1] == 30_000
    timeline = found["timeline"]
    spans = sum(1 for event in many if event["ph"] == "X")
    assert len(timeline["spans"]) + timeline["left_out"] == spans
    drawn = max(sum(sizes) for sizes in zip(*timeline["memory"]["bytes"].values(), strict=True))
    last = max(event["ts"] for event in many if event["ph"] == "X") - timeline["length"]
    counted = [event for event in many if event["ph"] == "C" and event["ts"] > last]
    assert drawn == max(sum(event["args"].values()) for event in counted)


def test_text_of_a_run_never_becomes_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>run", steps=1)
    evil = "</script><script>document.title = 'taken'</script><!--"
    (folder / "ledger.json").write_text(json.dumps(ledger_of(1) | {"hints": [evil], "device": evil}))
    assert report(folder).exit_code == 0
    page = (folder / "report.html").read_text()
    assert evil not in page
    assert "<title>&lt;b&gt;run" in page
    assert page.count("<script") == 2
    assert in_page(folder / "report.html")["hints"] == [evil]
