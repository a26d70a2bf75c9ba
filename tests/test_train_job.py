"""The job as a person runs it: signals end it with a checkpoint, a killed process starts it again, and it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from zerofold.launch import Grace, Stopped, run_ranks

TINY = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "2", "--device", "cpu"]
TRAIN = [sys.executable, "-m", "zerofold", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1"]


def start(command: list[str], cwd: Path) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, text=True, start_new_session=True, **pipes)


def steps_in(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    # The last line may be on its way.
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines]


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def saved_steps(run: Path) -> list[str]:
    folder = run / "checkpoints"
    return sorted(each.name for each in folder.glob("step-*")) if folder.exists() else []


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start([*TRAIN, *TINY, "--minutes", "5", "--out", "run"], tmp_path)
    wait_until(lambda: bool(steps_in(tmp_path / "run")), process)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the command and to the ranks
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    (saved,) = saved_steps(tmp_path / "run")
    number = int(saved.removeprefix("step-"))
    assert f"stopped by Ctrl-C after step {number}; the last checkpoint is run/checkpoints/{saved}" in errors
    assert "to go on: zerofold train --resume run" in errors
    assert "Traceback" not in errors

    command = [*TRAIN, "--resume", "run", "--nproc", "1", "--steps", str(number + 5)]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"4 sequences a step (2 x 1 rank x 2 batches), going on after step {number}" in done.stdout
    steps = steps_in(tmp_path / "run")
    assert steps == sorted(set(steps))
    assert steps[-1] == number + 5


def test_a_killed_process_is_started_again_and_sigterm_ends_it_with_a_checkpoint(tmp_path: Path) -> None:
    options = ["--minutes", "5", "--out", "run", "--save-every", "10", "--max-restarts", "1"]
    process = start([*TRAIN, *TINY, *options], tmp_path)
    run = tmp_path / "run"
    wait_until(lambda: len(saved_steps(run)) == 2, process)
    ranks = [each for each in psutil.Process(process.pid).children() if "spawn_main" in " ".join(each.cmdline())]
    ranks[-1].kill()
    reached = steps_in(run)[-1]
    wait_until(lambda: steps_in(run)[-1:] > [reached + 30], process)
    process.terminate()  # the command alone, as a process manager does
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "rank 1: the process was killed (SIGKILL)" in errors
    assert "Starting again from step-" in errors
    assert "(1 of 1)" in errors
    assert ", going on after step " in output
    assert f"stopped by SIGTERM after step {int(saved_steps(run)[-1].removeprefix('step-'))}; " in errors
    assert "Traceback" not in errors
    assert steps_in(run) == list(range(10, steps_in(run)[-1] + 1, 10))


def test_torchrun_starts_it_again_where_it_was(tmp_path: Path) -> None:
    options = ["--steps", "150", "--out", "run", "--save-every", "10"]
    process = start([*TORCHRUN, "-m", "zerofold", "train", *TINY, *options], tmp_path)
    run = tmp_path / "run"
    wait_until(lambda: len(saved_steps(run)) == 2, process)
    psutil.Process(process.pid).children()[-1].kill()
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert ", going on after step " in output
    assert steps_in(run) == list(range(10, 151, 10))


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(os.environ["ZEROFOLD_TEST_READY"]).touch()
    time.sleep(60)


def test_a_rank_that_does_not_end_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = tmp_path / "ready"
    monkeypatch.setenv("ZEROFOLD_TEST_READY", str(ready))
    command = (
        f"import os, signal, threading, time\nfrom pathlib import Path\n"
        f"def later():\n    while not Path({str(ready)!r}).exists(): time.sleep(0.05)\n"
        f"    os.kill({os.getpid()}, signal.SIGTERM)\nlater()"
    )
    with subprocess.Popen([sys.executable, "-c", command]):
        begun = time.monotonic()
        with pytest.raises(Stopped, match="rank 0 did not end within 0.5 s and was killed") as caught:
            run_ranks(deaf, 1, grace=Grace(0.5))
        assert caught.value.signal_number == signal.SIGTERM
        assert time.monotonic() - begun < 55
