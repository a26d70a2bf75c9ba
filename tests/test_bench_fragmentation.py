"""`zerofold bench fragmentation`: the same training in every way, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zerofold.bench.alone import AloneError, run_alone
from zerofold.bench.fragmentation import SIZES, summarise
from zerofold.bench.fragmentation_worker import FragmentationTask, Outcome, Progress, lengths_of
from zerofold.cli import build_app


def invoke(*args: str):
    return CliRunner().invoke(build_app(), ["bench", "fragmentation", "--device", "cpu", *args])


def test_both_ways_train_alike_and_the_cpu_has_no_books(tmp_path: Path) -> None:
    result = invoke("--ways", "without,M_d", "--steps", "3", "--json", "--out", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "out.json").read_text())
    ways = found["ways"]
    assert ways["without"]["loss"] == ways["M_d"]["loss"] > 0
    assert [ways[way]["fragmentation"] for way in ("without", "M_d")] == [None, None]
    assert all(ways[way]["seconds_per_step"] > 0 for way in ("without", "M_d"))
    assert found["running"] is None
    for way in ("without", "M_d"):  # no terminal: lines, each of which can be read
        assert [f"{way}: step {step} of 3" in result.stderr for step in (1, 2, 3)] == [True] * 3


@pytest.mark.parametrize(("fragmentation", "ok"), [(1.09, True), (1.1, False), (None, True)])
def test_too_much_reserved_fails_with_m_d_alone(fragmentation: float | None, ok: bool) -> None:
    good = Outcome(peak_reserved=10, peak_allocated=10, fragmentation=1.0, loss=1.0, given_back=0, seconds_per_step=1.0)
    other = replace(good, fragmentation=fragmentation)
    assert summarise({"without": good, "M_d": other}, {})["ok"] is ok
    assert summarise({"without": other, "M_d": good}, {})["ok"]
    assert not summarise({"M_d": good}, {"without": "no memory"})["ok"]


def test_the_file_says_how_far_a_way_is_that_did_not_end(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    seen: list[dict[str, object]] = []

    def end_after_two(*arguments: object, hear: Callable[[Progress], None], **options: object) -> Outcome:
        for step in (1, 2):
            hear(Progress(step=step, seconds=1.5 * step, peak_reserved=105, peak_allocated=100))
            seen.append(json.loads(out.read_text())["running"])
        raise AloneError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerofold.bench.fragmentation.run_alone", end_after_two)
        result = invoke("--ways", "M_d", "--steps", "20", "--out", str(out))
    assert seen[1] == {"way": "M_d", "step": 2, "seconds": 3.0, "peak_reserved": 105, "peak_allocated": 100}
    assert (result.exit_code, "M_d: step 2 of 20, 3 s, reserved over peak 1.050" in result.stderr) == (1, True)
    assert "step 1 of 20" not in result.stderr  # ten lines for each way
    assert json.loads(out.read_text())["errors"] == {"M_d": "no memory"}


def told(*, tell: Callable[[int], None]) -> str:
    for number in (1, 2):
        tell(number)
    return "done"


def test_a_process_tells_while_it_runs() -> None:
    heard: list[int] = []
    assert run_alone(f"{__name__}:told", timeout=60, hear=heard.append) == "done"
    assert heard == [1, 2]


def test_lengths_vary_and_the_longest_is_among_them() -> None:
    task = FragmentationTask(way="M_d", size=SIZES["cuda"], batch=1, steps=20, accumulate=2, device="cpu")
    lengths = lengths_of(task)
    assert lengths == lengths_of(replace(task, way="without"))
    assert (len(lengths), max(lengths)) == (40, SIZES["cuda"].seq)
    assert len(set(lengths)) > 30


def test_a_way_that_is_none_is_told_in_one_line() -> None:
    result = invoke("--ways", "best")
    assert (result.exit_code, result.stderr.startswith("error: there is no way 'best'; the ways are")) == (2, True)
