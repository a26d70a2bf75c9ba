"""`zerofold train --tensor --pipeline --data`: what is refused, who reads what, and the same losses as one process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import zerofold as zf
from zerofold.samples import Shares
from zerofold.train.gpt import GPTConfig
from zerofold.train.loop import Training, train
from zerofold.train.options import TrainOptions
from zerofold.train.spread import Degrees, filled

TINY = GPTConfig(layers=2, hidden=32, heads=2, seq=32)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor": 4}, "--tensor 4 does not divide the 2 heads"),
        ({"pipeline": 3}, "--pipeline 3 needs as many blocks, and there are 2"),
        ({"tensor": 0}, "--tensor 0 is no number of ranks"),
        ({"data": -1}, "--data -1 is no number of ranks"),
        ({"keep": "attic", "checkpoint_every": 1}, "--keep attic is not known: use device, host, nvme, auto"),
    ],
)
def test_degrees_that_cannot_be_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        TrainOptions(out=tmp_path / "run", gpt=TINY, **given)
    assert said in str(caught.value)


def test_processes_are_the_product_of_the_axes(tmp_path: Path) -> None:
    assert Degrees(tensor=2, pipeline=2, data=2).ranks(2) == 8
    assert Degrees(tensor=2, pipeline=2).ranks(2) == 4
    assert Degrees().ranks(2) == 2
    options = TrainOptions(out=tmp_path / "run", gpt=TINY, tensor=2, pipeline=2, data=2)
    with pytest.raises(ValueError, match="--data 2 x --tensor 2 x --pipeline 2 does not make 4 processes"):
        options.shares(4)
    with pytest.raises(ValueError, match="use a multiple of 4"):
        TrainOptions(out=tmp_path / "run", gpt=TINY, tensor=2, pipeline=2).shares(6)
    assert options.shares(8) == Shares(4, 2, 2)  # two ranks read, not eight


def test_a_pipeline_has_a_micro_batch_for_every_stage() -> None:
    assert filled(Shares(8, 2, 1), 4, is_given=False) == Shares(2, 2, 4)
    assert filled(Shares(8, 2, 6), 4, is_given=True) == Shares(8, 2, 6)
    assert filled(Shares(8, 2, 1), 1, is_given=True) == Shares(8, 2, 1)
    with pytest.raises(ValueError, match="a step has 2 of 8 sequences on a rank: use --accumulate 4"):
        filled(Shares(8, 2, 2), 4, is_given=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"global_batch": 7}, "the 7 sequences of a rank do not divide by 2: use --accumulate 7, or choose a --global"),
        ({"batch": 3}, "a step has 1 of 3 sequences on a rank: use --accumulate 2"),
    ],
)
def test_too_few_micro_batches_are_told_in_words_of_what_was_given(
    given: dict[str, int], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        TrainOptions(out=tmp_path / "run", gpt=TINY, pipeline=2, **given).shares(2)
    assert said in str(caught.value)
    assert "--accumulate 1" not in str(caught.value)


def losses(folder: str, **degrees: int) -> tuple[float, float | None, list[list[int]]]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    name = "-".join(f"{axis}{size}" for axis, size in degrees.items()) or "one"
    options = TrainOptions(
        out=Path(folder, name), gpt=TINY, global_batch=8, steps=3, save_every=0, plain=True, sample_bytes=4, **degrees
    )
    device = torch.device("cpu")
    read = Training(options, rank, world, device)
    indices = read.samples.indices
    read.recorded.close()
    zf.close(read.model)
    result = train(TrainOptions(**{**vars(options), "out": Path(folder, f"{name}-run")}), rank, world, device)
    return result.loss, result.validation_loss, indices


@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor": 2, "pipeline": 2},
        pytest.param({"tensor": 2, "data": 2}, marks=pytest.mark.thorough),
        pytest.param({"pipeline": 2, "data": 2}, marks=pytest.mark.thorough),
        pytest.param({"tensor": 2, "pipeline": 2, "data": 2}, marks=pytest.mark.thorough),
    ],
)
def test_losses_are_those_of_one_process(ranks: Any, tmp_path: Path, degrees: dict[str, int]) -> None:
    world = 1
    for degree in degrees.values():
        world *= degree
    ((loss, unseen, _),) = ranks(1, losses, str(tmp_path))
    found = ranks(world, losses, str(tmp_path), **degrees)
    for got, validated, _ in found:
        assert got == pytest.approx(loss, abs=1e-5)
        assert validated == pytest.approx(unseen, abs=1e-5)
    read = {str(indices) for *_, indices in found}
    assert len(read) == degrees.get("data", 1)  # all ranks that share a model read the same
    metrics = list(tmp_path.glob("*-run/metrics.jsonl"))
    assert len(metrics) == 2
    assert all(len(file.read_text().splitlines()) == 1 for file in metrics)  # one rank writes


SMALL = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "32", "--global-batch", "8", "--device", "cpu"]
STEPS = 40


def uninterrupted(folder: str) -> float:
    options = TrainOptions(out=Path(folder, "whole"), gpt=TINY, global_batch=8, steps=STEPS, save_every=0, plain=True)
    return train(options, 0, 1, torch.device("cpu")).loss


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [sys.executable, "-m", "zerofold", "train", "--plain", *arguments]
    return subprocess.Popen(started, cwd=folder, text=True, start_new_session=True, **pipes)


@pytest.mark.parametrize("data", [1, 2])
def test_a_killed_rank_ends_the_run_and_another_mesh_goes_on(ranks: Any, tmp_path: Path, data: int) -> None:
    """With what one process without a break comes to."""
    mesh = ["--tensor", "2", "--pipeline", "2", "--data", str(data)]
    process = command(tmp_path, *SMALL, *mesh, "--steps", str(STEPS), "--out", "run", "--save-every", "5")
    checkpoints, deadline = tmp_path / "run" / "checkpoints", time.monotonic() + 120
    while not (checkpoints / "latest").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = [each for each in psutil.Process(process.pid).children() if "spawn_main" in " ".join(each.cmdline())]
    assert len(workers) == 4 * data
    killed_at = time.monotonic()
    workers[2].kill()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed_at < 15
    assert process.returncode == 1
    assert "rank 2: the process was killed (SIGKILL)" in errors
    assert "Traceback" not in errors
    saved = sorted(checkpoints.glob("step-*"))[-1].name
    assert int(saved.removeprefix("step-")) < STEPS

    other = ["--tensor", "1", "--pipeline", "2", "--nproc", "2"]
    process = command(tmp_path, "--resume", "run", *other)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"going on after step {int(saved.removeprefix('step-'))}" in output
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == STEPS
    (expected,) = ranks(1, uninterrupted, str(tmp_path))
    assert last["loss"] == pytest.approx(expected, abs=1e-5)
