"""`zerofold bench plan`: the plan's peaks against the engine's own allocations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zerofold.bench import plan
from zerofold.bench.plan import Gathered, all_runs
from zerofold.bench.plan_predicted import Compared, Failed, Run
from zerofold.bench.plan_worker import Measured, PlanTask, measure_model
from zerofold.bench.streams import Stream, StreamFailed
from zerofold.cli import build_app


def invoke(*args: str):
    return CliRunner().invoke(build_app(), ["bench", "plan", "--device", "cpu", *args])


def test_a_tiny_model_takes_what_the_plan_says_on_every_row(tmp_path) -> None:
    result = invoke("--only", "gpt", "--batches", "2", "--json", "--out", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "plan.json").read_text())
    assert len(found["runs"]) == 10  # four rows of eight ranks and a rank alone, with and without checkpointing
    assert found["worst"] < 0.005
    peaks = {(run["run"]["world"], run["run"]["stage"]): run["measured_bytes"] for run in found["runs"]}
    assert peaks[8, 0] > peaks[8, 1] >= peaks[8, 2] > peaks[8, 3]
    assert found["spent_s"]["gpt"]["measured steps"] > 0


def test_experts_run_through_every_row() -> None:
    found = json.loads(invoke("--only", "mixtral", "--batches", "2", "--json").stdout)
    assert not found["errors"]
    assert sorted({run["run"]["stage"] for run in found["runs"]}) == [0, 1, 2, 3]
    assert len(found["runs"]) == 10
    assert found["worst"] < 0.005


def peaks_of(*runs: Run) -> dict[Run, int]:
    with Stream(measure_model, PlanTask(model="gpt", device="cpu", precision="fp32", runs=runs)) as found:
        return {each.run: each.peak_bytes for each in found if isinstance(each, Measured)}


def test_a_row_shows_what_it_shows_in_a_process_of_its_own() -> None:
    first, later = (Run(stage=stage, world=8, batch=2, checkpointing=True) for stage in (0, 3))
    assert peaks_of(first, later)[later] == peaks_of(later)[later]


def three_and_a_crash() -> Iterator[int]:
    yield from range(3)
    os._exit(7)


def two_and_an_error() -> Iterator[int]:
    yield from range(2)
    raise ValueError("no\nmore")


@pytest.mark.parametrize(
    ("source", "kept", "message"),
    [
        (three_and_a_crash, [0, 1, 2], "the process ended with exit code 7 and no error"),
        (two_and_an_error, [0, 1], "ValueError: no more"),
    ],
)
def test_what_came_before_a_process_died_is_there(
    source: Callable[[], Iterator[int]], kept: list[int], message: str
) -> None:
    found = []
    with pytest.raises(StreamFailed, match=message), Stream(source) as numbers:
        for number in numbers:
            found.append(number)
    assert found == kept


def test_a_bench_that_is_stopped_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "plan.json", []

    def stopped(*_: object, **__: object) -> Iterator[Compared | Failed]:
        for number in range(3):
            yield compared(1000 + number)
            seen.append(len(json.loads(path.read_text())["runs"]))
        yield Failed("t5", "no memory")
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "compare_models", stopped)
    assert invoke("--out", str(path)).exit_code
    assert seen == [1, 2, 3]
    left = json.loads(path.read_text())
    assert [run["predicted_bytes"] for run in left["runs"]] == [1000, 1001, 1002]
    assert left["errors"] == {"t5": "no memory"}
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def compared(predicted: int, measured: int | None = 1000, seconds: float | None = None) -> Compared:
    run = Run(stage=3, world=8, batch=2, checkpointing=False)
    return Compared(
        model="gpt",
        parameters=1,
        run=run,
        predicted_bytes=predicted,
        measured_bytes=measured,
        predicted_s=seconds,
        measured_s=None if seconds is None else 1.0,
    )


@pytest.mark.parametrize(
    ("results", "ok"),
    [
        ([compared(1019), compared(981), compared(1049)], True),
        ([compared(1001), compared(1001), compared(1051)], False),
        ([compared(1001), compared(1030), compared(970)], False),
        ([compared(1000, seconds=1.14)], True),
        ([compared(1000, seconds=0.84)], False),
        ([compared(1, measured=None, seconds=1.14)], True),
        ([compared(1, measured=None, seconds=1.16)], False),
        ([], False),
    ],
)
def test_what_is_too_far_off_fails(results: list[Compared], ok: bool) -> None:
    assert Gathered(results).summarise("cpu")["ok"] is ok
    assert Gathered(results, errors={"vit": "no memory"}).summarise("cpu")["ok"] is False


def test_at_least_24_runs_by_default() -> None:
    runs = all_runs((0, 1, 2, 3), 8, (2, 8), alone=True)
    assert len(set(runs)) == len(runs) == 20  # of each of five models
    assert {replace(run, stage=0) for run in runs if run.world == 8} == {
        Run(stage=0, world=8, batch=batch, checkpointing=on) for batch in (2, 8) for on in (False, True)
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "bert"], "error: there is no model 'bert'; the models are gpt, llama, t5, vit, mixtral"),
        (["--only", ","], "error: --only names no model"),
        (["--batches", "2,x"], "error: --batches has 'x'; give numbers of samples, with commas"),
        (["--times-only", "--batches", "1,2"], "error: --batches has 1, from which the host's time is measured"),
        (["--times-only", "--no-alone"], "error: --times-only with --no-alone leaves nothing"),
        (["--profile"], "error: --profile has no timed run to look at; add --times-only"),
        (["--stages", "4"], "error: there is no stage '4'"),
        (["--out", "/dev/null/at/plan.json"], "error: --out /dev/null/at/plan.json: /dev/null/at cannot be made"),
    ],
)
def test_wrong_options_end_with_2(args: list[str], message: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
