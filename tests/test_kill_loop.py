"""A few kills in every run of the tests; `python -m tests.kill_loop --kills 200` makes many."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_job_killed_at_random_moments_loses_nothing() -> None:
    command = [sys.executable, "-m", "tests.kill_loop", "--kills", "4", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
    assert "equal to the one without kills to the bit, every checkpoint whole, none lost" in done.stdout
