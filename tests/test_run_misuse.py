"""zf.Run in loops that end early, go on, fail, or share what they should not."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zerofold as zf
from ranks import RankPool, raised
from zerofold.observe.run_files import RunFiles


def trained(folder: Path, steps: int, *, tokens: int = 8, values: dict[str, Any] | None = None, **options: Any) -> None:
    model, optimizer = made()
    with zf.Run(folder, model, **options) as run:
        take(run, model, optimizer, steps, tokens=tokens, **values or {})
    zf.close(model)


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    return zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3)


def take(
    run: zf.Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, tokens: int, **values: Any
) -> None:
    for _ in range(steps):
        loss = model(torch.ones(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        run.step(loss=loss, lr=1e-3, tokens=tokens, **values)
        optimizer.zero_grad()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("steps", "expected"), [(0, []), (3, [3]), (4, [4]), (10, [4, 8, 10])])
def test_the_steps_after_the_last_line_get_one_too(
    ranks: RankPool, tmp_path: Path, steps: int, expected: list[int]
) -> None:
    ranks(1, trained, tmp_path, steps, every=4)
    found = lines(tmp_path)
    assert [line["step"] for line in found] == expected
    assert all(line["loss"] is not None and line["tokens"] == 8 * line["step"] for line in found)


def test_a_run_that_goes_on_counts_on(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1, trained, tmp_path, 8, every=2)
    before = lines(tmp_path)
    ranks(1, trained, tmp_path, 4, every=2, after=4)
    after = lines(tmp_path)
    assert after[:2] == before[:2]
    assert [(line["step"], line["tokens"]) for line in after] == [(2, 16), (4, 32), (6, 48), (8, 64)]
    assert after[1]["seconds"] < after[2]["seconds"] < after[3]["seconds"]
    assert json.loads((tmp_path / "ledger.json").read_text())["tokens_per_step"] == 8


def uneven(folder: Path) -> int:
    model, optimizer = made()
    with zf.Run(folder, model, every=2, peak_flops=1e12) as run:
        for tokens in (10, 30, 5, 15):
            take(run, model, optimizer, 1, tokens=tokens)
    zf.close(model)
    return sum(p.numel() for p in model.parameters())


def test_mfu_of_uneven_batches_is_that_of_their_mean(ranks: RankPool, tmp_path: Path) -> None:
    (parameters,) = ranks(1, uneven, tmp_path)
    for line, tokens in zip(lines(tmp_path), (20, 10), strict=True):
        assert line["mfu"] == pytest.approx(6 * parameters * tokens / line["step_seconds"] / 1e12)
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert ledger["tokens_per_step"] == 15
    assert ledger["mfu"] == pytest.approx(6 * parameters * 15 / ledger["time"]["step"] / 1e12)


def test_values_may_be_tensors(ranks: RankPool, tmp_path: Path) -> None:
    values = {"accuracy": torch.tensor(0.5), "of": Path("a")}
    ranks(1, trained, tmp_path, 1, every=1, values=values, csv=True)
    assert (lines(tmp_path)[0]["accuracy"], lines(tmp_path)[0]["of"]) == (0.5, "a")
    assert (tmp_path / "csv" / "train_accuracy.csv").read_text().splitlines() == ["step,accuracy", "1,0.5"]


def test_what_the_run_counts_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks(2, raised, trained, tmp_path, 1, values={"step": 7})
    assert said == ["ValueError: step= is counted by the run itself: leave it out, or give it another name"] * 2


def full_disk(folder: Path) -> list[str]:
    model, optimizer = made()
    full = OSError(errno.ENOSPC, "No space left on device")
    with warnings.catch_warnings(record=True) as said, zf.Run(folder, model, every=1) as run:
        warnings.simplefilter("always")
        with patch.object(RunFiles, "line", side_effect=full), patch.object(RunFiles, "ledger", side_effect=full):
            take(run, model, optimizer, 3, tokens=8)
        take(run, model, optimizer, 1, tokens=8)
    zf.close(model)
    return [str(each.message) for each in said]


def test_a_full_disk_is_said_once_and_training_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2, full_disk, tmp_path)
    assert len(first) == 1
    assert first[0].startswith(f"numbers of this run are missing in {tmp_path}: [Errno 28] No space left on device")
    assert second == []
    assert [line["step"] for line in lines(tmp_path)] == [4]


def test_a_folder_that_cannot_be_is_said_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for message in ranks(2, raised, trained, tmp_path / "taken", 1):
        assert f"{tmp_path / 'taken'} cannot be a run folder (File exists): name another" in message


def two_runs(folder: Path) -> list[str]:
    (model, optimizer), (other, its) = made(), made()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with zf.Run(folder, model, every=1) as run:
            take(run, model, optimizer, 2, tokens=8)
            with zf.Run(folder, other, every=1) as second:
                take(second, other, its, 1, tokens=8)
                take(run, model, optimizer, 2, tokens=8)
    zf.close(model)
    zf.close(other)
    return [str(each.message) for each in said]


def test_two_runs_in_one_folder_are_noticed(ranks: RankPool, tmp_path: Path) -> None:
    (said,) = ranks(1, two_runs, tmp_path)
    assert len(said) == 1
    assert "another run writes into this folder" in said[0]
    assert [line["step"] for line in lines(tmp_path)] == [1]


def misused(folder: Path, how: str) -> None:
    model, optimizer = made()
    try:
        run = zf.Run(folder, model)
        take(run, model, optimizer, 1, tokens=8)
        if how == "twice":
            zf.Run(folder / "other", model)
        run.close()
        take(run, model, optimizer, 1, tokens=8)
    finally:
        run.close()
        zf.close(model)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("twice", "this model is being recorded already: close its zf.Run, or stop that recording, first"),
        ("closed", "this run is closed: make another zf.Run for further steps, with after= for the same folder"),
    ],
)
def test_misuse_is_said_on_every_rank(ranks: RankPool, tmp_path: Path, how: str, expected: str) -> None:
    for message in ranks(2, raised, misused, tmp_path, how):
        assert expected in message


def ended_early(folder: Path) -> None:
    model, optimizer = made()
    with zf.Run(folder, model, every=2) as run:
        take(run, model, optimizer, 3, tokens=8)
        raise KeyError("the loop's own")


def test_an_error_in_the_loop_is_the_one_seen_and_the_folder_is_whole(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(1, raised, ended_early, tmp_path) == ['KeyError: "the loop\'s own"']
    assert [line["step"] for line in lines(tmp_path)] == [2, 3]
    assert json.loads((tmp_path / "ledger.json").read_text())["steps"] == 3
    assert (tmp_path / "timeline.json").exists()


def test_what_other_programs_read(ranks: RankPool, tmp_path: Path) -> None:
    """TensorBoard and Prometheus' own parsers read what is written, where they are installed."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    parser = pytest.importorskip("prometheus_client.parser")
    prom, odd = tmp_path / "x.prom", tmp_path / 'a "name" \\ é'
    values = {"odd name-é": 1.0, "odd name_é": 2.0}
    ranks(1, trained, odd, 4, every=2, values=values, tensorboard=True, prometheus=prom)
    events = accumulator.EventAccumulator(str(odd / "tensorboard"))
    events.Reload()
    expected = [(line["step"], pytest.approx(line["loss"])) for line in lines(odd)]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == expected
    found = {family.name: family.samples for family in parser.text_string_to_metric_families(prom.read_text())}
    assert all(len(samples) == 1 for samples in found.values()), "a metric is written once"
    assert found["zerofold_train_loss"][0].value == lines(odd)[-1]["loss"]
    assert found["zerofold_train_loss"][0].labels == {"run": odd.name}


def test_weights_and_biases_gets_the_numbers(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    ranks(1, offline, tmp_path)
    written = list(tmp_path.rglob("*.wandb"))
    assert len(written) == 1
    assert b"train/loss" in written[0].read_bytes()


def offline(folder: Path) -> None:
    with patch.dict(os.environ, {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}):
        trained(folder / "run", 2, every=1, wandb="a project")
