"""Trainer, Accelerate and PEFT, unmodified, on the stand-in for deepspeed.

The curves they must give were recorded from DeepSpeed 0.19.8 by `python tests/hugging_face_jobs.py record`, on the CPU
with two ranks; `make test-all` runs DeepSpeed itself again.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from hugging_face_jobs import RECORDED, STAGES, jobs_of, start

for needed in ("transformers", "accelerate", "peft"):
    pytest.importorskip(needed)

TOLERANCE = 1e-4


def compare(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert sorted(found) == sorted(expected), where
        for name in expected:
            compare(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{where}: {found} is not {expected}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            compare(one, other, f"{where}[{index}]")
    else:
        # Sums over all weights are compared relative to their size.
        assert abs(found - expected) <= TOLERANCE * max(1.0, abs(expected) / 10), f"{where}: {found} is not {expected}"


@pytest.mark.parametrize("stage", STAGES)
def test_curves_are_those_of_deepspeed(stage: int) -> None:
    """Stage 3 runs where DeepSpeed is not installed, the others beside it."""
    expected = json.loads(RECORDED.read_text())[str(stage)]
    found = start("zerofold", stage, jobs_of(stage), hide=stage == 3)
    used = found.pop("library")
    assert used["version"] == "0.19.8+zerofold"
    assert used["installed"] == (stage != 3 and find_spec("deepspeed") is not None)
    del expected["library"]
    compare(found, expected, f"stage {stage}")
    for job, results in found.items():
        if "resumed" in results:
            end = results["losses"][-len(results["resumed"]) :]
            compare(results["resumed"], end, f"stage {stage} {job}, resumed against uninterrupted")
        assert results["losses"][-1] < results["losses"][0], f"{job} learned nothing"


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", STAGES)
def test_the_recording_is_what_deepspeed_gives(stage: int) -> None:
    expected = json.loads(RECORDED.read_text())[str(stage)]
    found = start("deepspeed", stage, jobs_of(stage))
    assert found.pop("library")["installed"]
    del expected["library"]
    compare(found, expected, f"stage {stage}")
