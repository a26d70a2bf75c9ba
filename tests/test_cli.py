"""The command: help with examples, and one line and an exit code for what a user can get wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zerofold.cli import build_app

TINY = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "2", "--device", "cpu"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), list(arguments))
    return result.exit_code, result.output


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zerofold", *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["verify"],
        ["launch"],
        *(["bench", name] for name in ("step", "comm", "update", "mixed", "memory", "precision")),
        *(["checkpoint", name] for name in ("inspect", "verify", "export", "diff")),
    ],
)
def test_help_has_an_example(command: list[str]) -> None:
    code, output = run(*command, "--help")
    assert code == 0
    assert f"zerofold {' '.join(command)}" in output.split("Usage:")[1].split("\n", 1)[1]


def test_version() -> None:
    code, output = run("--version")
    assert code == 0
    assert output.startswith("zerofold ")


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["--stage", "7"], "choose one of dp, 0, 1, 2, 3, hsdp, hpz"),
        (["--hidden", "100", "--heads", "6"], "use hidden 96"),
        (["--nproc", "0"], "use 1 or more"),
        (["--steps", "0"], "at least 1"),
        (["--minutes", "0"], "above 0"),
        (["--lr", "-1"], "above 0"),
        (["--global-batch", "9", "--nproc", "2"], "9 = 2 x 4 + 1"),
        (["--save-every", "-1"], "0 or more"),
        (["--resume", "nowhere"], "nowhere holds no checkpoint to go on from"),
        (["--resume", "one", "--out", "other"], "leave --out other out"),
        (["--device", "tpu"], "use cpu, cuda or auto"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_bad_values_get_a_line_with_the_fix(arguments: list[str], fix: str) -> None:
    code, output = run("train", *arguments)
    assert code == 2
    assert fix in output
    assert "Traceback" not in output


def test_a_command_that_does_not_exist_is_refused() -> None:
    assert run("trian")[0] == 2


def test_train_runs_from_the_command_line(tmp_path: Path) -> None:
    process = start("train", *TINY, "--steps", "12", "--out", "run", cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Training a GPT of" in output
    assert "12 steps, 768 tokens" in output
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert "Traceback" not in errors


def test_a_failing_rank_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    process = start("train", *TINY, "--steps", "50", "--lr", "1e30", cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "smaller learning rate" in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors
