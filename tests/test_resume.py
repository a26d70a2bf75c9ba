"""A run that is cut short and goes on is the run that was not, and every way to stop one leaves a checkpoint."""

import errno
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import RankPool, raised
from zerofold.checkpoint import job as save_module
from zerofold.checkpoint.manifest import candidates
from zerofold.checkpoint.native import read_native, verify_native
from zerofold.train.alone import alone_in
from zerofold.train.gpt import GPTConfig
from zerofold.train.loop import Result, Training, train
from zerofold.train.options import TrainOptions

TINY = GPTConfig(layers=2, hidden=32, heads=2, seq=32)
MEASURED = {"step_seconds", "mfu", "time", "peak_bytes"}
BY_THE_CLOCK = MEASURED | {"seconds", "tokens_per_second", "comm_bytes", "state_bytes"}


class Crash(Exception):
    pass


def run_tiny(out: Path, crash_after: int | None = None, signalled_after: int | None = None, **options: Any) -> Result:
    """A run in which all ranks crash, or the last one gets SIGTERM, in the step after the one given."""
    given = {"plain": True, "sample_bytes": 4, "validate_every": 8, "steps": 16, "lr": 1e-2} | options
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = Training.step

    def step(training: Training) -> torch.Tensor:
        loss = whole(training)
        if training.state.step == crash_after:
            raise Crash
        if training.state.step == signalled_after and rank == world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    Training.step = step  # type: ignore[method-assign]
    try:
        return train(TrainOptions(out=out, gpt=TINY, **given), rank, world, torch.device("cpu"))
    finally:
        Training.step = whole  # type: ignore[method-assign]


def metrics_of(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in BY_THE_CLOCK} for line in lines]


def tensors_of(out: Path) -> dict[str, torch.Tensor]:
    """The weights and optimizer states of the last checkpoint."""
    contents = read_native(out / "checkpoints")
    found = {name: stored.read(0, torch.Size(stored.shape).numel()) for name, stored in contents.tensors.items()}
    for name, states in contents.optimizers[0].states.items():
        for state, stored in states.items():
            if hasattr(stored, "read"):
                found[f"{name} {state}"] = stored.read(0, torch.Size(stored.shape).numel())
    assert len(found) > 30
    return found


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 1, "precision": "fp16"}], ids=str)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {"batch": 2, "save_every": 5, "csv": True} | options
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    first = ranks(2, run_tiny, whole, **options)[0]
    # Step 10 is reported, and taken again: the last checkpoint is that of step 5.
    ranks(2, raised, run_tiny, cut, crash_after=9, **options | {"save_every": 5})
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": 1.0}\n{"step": 10')  # as a kill in the middle of a line leaves it
    (cut / "csv" / "train_loss.csv").write_text("step,loss\n10,1.0\n1")
    second = ranks(2, run_tiny, cut, resume=True, **options)[0]
    assert (second.loss, second.validation_loss, second.sample) == (first.loss, first.validation_loss, first.sample)
    assert (second.first_loss, second.steps, second.tokens) == (first.first_loss, 16, first.tokens)
    assert metrics_of(cut) == metrics_of(whole)
    one, other = ((out / "csv" / "train_loss.csv").read_text() for out in (whole, cut))
    assert one == other
    assert [line.split(",")[0] for line in one.splitlines()] == ["step", "10", "16"]
    expected, found = tensors_of(whole), tensors_of(cut)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_it_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path, before: int, after: int) -> None:
    options = {"global_batch": 8, "at_once": 2, "save_every": 5}
    whole = ranks(before, run_tiny, tmp_path / "whole", **options)[0]
    ranks(before, raised, run_tiny, tmp_path / "cut", crash_after=11, **options)
    resumed = ranks(after, run_tiny, tmp_path / "cut", resume=True, **options)[0]
    assert resumed.steps == whole.steps == 16
    expected, found = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "cut")
    assert [line["step"] for line in found] == [10, 16]
    for one, other in zip(expected, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other["tokens"] == one["tokens"]
    assert resumed.validation_loss == pytest.approx(whole.validation_loss, abs=1e-5)


def test_a_signal_to_any_rank_stops_all_at_one_step_with_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks(2, run_tiny, tmp_path / "whole", batch=2)[0]
    stopped = ranks(2, run_tiny, tmp_path / "cut", signalled_after=6, batch=2)
    for result in stopped:
        assert (result.stopped_by, result.steps) == (signal.SIGTERM, 7)
        assert result.checkpoint == tmp_path / "cut" / "checkpoints" / "step-00000007"
    resumed = ranks(2, run_tiny, tmp_path / "cut", batch=2, resume=True)[0]
    assert (resumed.stopped_by, resumed.loss, resumed.validation_loss) == (None, whole.loss, whole.validation_loss)
    again = ranks(2, run_tiny, tmp_path / "cut", batch=2, resume=True)[0]  # it is complete: nothing is left to do
    assert (again.steps, again.loss, again.sample) == (16, whole.loss, whole.sample)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A file system of its own in `folder`, and a function that mounts it again with other options."""

    def mount(options: str) -> None:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting needs root")

    folder.mkdir(parents=True)
    mount(f"size={size}")
    try:
        yield lambda options: mount(f"remount,{options}")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("trouble", "message"), [("full", "needs .* the disk has .* left"), ("ro", "read-only")])
def test_a_disk_that_refuses_leaves_the_run_and_its_checkpoints(
    ranks: RankPool, tmp_path: Path, trouble: str, message: str
) -> None:
    out, options = tmp_path / "run", {"batch": 2, "save_every": 6}
    with small_disk(out / "checkpoints", size="1500k" if trouble == "full" else "4m") as again:
        if trouble == "ro":
            ranks(2, run_tiny, out, **options | {"steps": 6})
            again("ro")
        # Said at the save on the way, raised by the last one, on every rank.
        for error in ranks(2, raised, run_tiny, out, **options | {"resume": True}):
            assert re.match(f"CheckpointError: .*{message}", error)
        assert not any(verify_native(each) for each in candidates(out / "checkpoints"))
        again("size=8m,rw")
        resumed = ranks(2, run_tiny, out, **options | {"resume": True})[0]
    whole = ranks(2, run_tiny, tmp_path / "whole", batch=2, save_every=0)[0]
    assert (resumed.steps, resumed.checkpoint) == (16, out / "checkpoints" / "step-00000016")
    if trouble == "full":  # the other one was a run of 6 steps first, with learning rates of its own
        assert resumed.loss == whole.loss


def with_a_failing_write(out: Path, **options: Any) -> tuple[int, str]:
    """A run in which rank 1's second file meets a full disk in the middle; its steps and its output."""
    whole, output, written = save_module.write, StringIO(), []

    def write(path: Path, *args: Any, **kwargs: Any) -> list[str]:
        written.append(path)
        if len(written) == 2 and dist.get_rank() == 1:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, *args, **kwargs)

    save_module.write = write
    try:
        with redirect_stdout(output):
            result = run_tiny(out, **options)
    finally:
        save_module.write = whole
    return result.steps, output.getvalue()


def test_a_save_that_fails_in_the_background_is_said_and_tried_again(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2, with_a_failing_write, tmp_path / "run", batch=2, save_every=5)
    assert (first[0], second[0]) == (16, 16)
    assert re.search("No checkpoint: rank 1: .*No space left", first[1])
    assert second[1] == ""
    names = sorted(each.name for each in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step-00000015", "step-00000016"]


def test_accumulating_gives_the_losses_of_larger_batches(ranks: RankPool, tmp_path: Path) -> None:
    for stage in (0, 2):
        at_once = ranks(2, run_tiny, tmp_path / f"{stage}a", batch=4, steps=6, stage=stage)[0]
        in_parts = ranks(2, run_tiny, tmp_path / f"{stage}b", global_batch=8, accumulate=4, steps=6, stage=stage)[0]
        assert in_parts.tokens == at_once.tokens
        assert in_parts.loss == pytest.approx(at_once.loss, abs=1e-5)


def test_resume_without_a_checkpoint_begins(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, raised, run_tiny, tmp_path / "run", crash_after=11, save_every=0)
    result = ranks(2, run_tiny, tmp_path / "run", resume=True, steps=4, save_every=0)[0]
    assert result.steps == 4
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [4]
    assert not (tmp_path / "run" / "checkpoints").exists()


def into_a_folder_in_use(out: Path) -> str:
    with mock.patch("zerofold.train.alone.PATIENCE_S", 0.0), alone_in(out):
        return raised(run_tiny, out, steps=1)


def test_two_runs_do_not_share_a_folder(ranks: RankPool, tmp_path: Path) -> None:
    (said,) = ranks(1, into_a_folder_in_use, tmp_path / "run")
    assert said.startswith(f"ValueError: {tmp_path / 'run'} is in use by a run that has not ended: ")
    assert ranks(1, run_tiny, tmp_path / "run", steps=1)[0].steps == 1


def shares_of(ranks: int, **options: Any) -> tuple[int, ...]:
    return tuple(TrainOptions(out=Path("nowhere"), **options).shares(ranks))


def test_two_numbers_of_a_batch_give_the_third() -> None:
    assert shares_of(2) == (8, 2, 1)
    assert shares_of(2, batch=4, accumulate=3) == (4, 2, 3)
    assert shares_of(2, batch=4, global_batch=32) == (4, 2, 4)
    assert shares_of(2, accumulate=2, global_batch=32) == (8, 2, 2)
    assert shares_of(2, global_batch=64) == (8, 2, 4)
    assert shares_of(8, global_batch=32) == (4, 8, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 32}, "32 = 3 x 10 \\+ 2, for 3 ranks.*1, 2, 4, 8, 16 or 32 ranks"),
        ({"global_batch": 30, "batch": 4}, "30 = 12 x 2 \\+ 6, for 3 ranks x 4 samples"),
        ({"global_batch": 30, "accumulate": 4}, "10 = 4 x 2 \\+ 2"),
        ({"global_batch": 30, "batch": 5, "accumulate": 3}, "batch 5 x 3 ranks x accumulate 3 = 45, not .* 30"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_arithmetic(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shares_of(3, **options)


def test_a_run_goes_on_with_its_own_options(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1, run_tiny, tmp_path / "run", steps=2, seed=3, batch=2)
    options = TrainOptions.of_run(tmp_path / "run", {"steps": 9, "layers": 2})
    assert (options.seed, options.steps, options.gpt, options.global_batch, options.resume) == (3, 9, TINY, 2, True)
    more = TrainOptions.of_run(tmp_path / "run", {"batch": 8, "accumulate": 4})  # as it was begun, on more ranks
    assert tuple(more.shares(2)) == (1, 2, 1)
    with pytest.raises(ValueError, match="has seed 3, not 4: leave it out, or begin a new run"):
        TrainOptions.of_run(tmp_path / "run", {"seed": 4})
    with pytest.raises(ValueError, match="has layers 2, not 5"):
        TrainOptions.of_run(tmp_path / "run", {"layers": 5})
    with pytest.raises(ValueError, match="--resume .*run goes on with it, --out names another"):
        TrainOptions(out=tmp_path / "run")
