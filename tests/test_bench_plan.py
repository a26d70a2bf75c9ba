"""`zerofold bench plan`: the plan's peaks against the engine's own allocations."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from zerofold.bench.plan import all_runs, summarise
from zerofold.bench.plan_predicted import Run
from zerofold.bench.plan_worker import Compared
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


def compared(predicted: int, measured: int = 1000, seconds: float | None = None) -> Compared:
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
        ([], False),
    ],
)
def test_what_is_too_far_off_fails(results: list[Compared], ok: bool) -> None:
    assert summarise(results, {}, "cpu")["ok"] is ok
    assert summarise(results, {"vit": "no memory"}, "cpu")["ok"] is False


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
        (["--stages", "4"], "error: there is no stage '4'"),
        (["--out", "/nowhere/plan.json"], "error: --out /nowhere/plan.json: there is no folder /nowhere"),
    ],
)
def test_wrong_options_end_with_2(args: list[str], message: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
