"""Trainer, Accelerate and PEFT, unmodified, on the stand-in for deepspeed.

The curves they must give were recorded from DeepSpeed 0.19.8 by `python tests/hugging_face_runs.py record`, on the CPU
with two ranks; `make test-all` runs DeepSpeed itself again.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from hugging_face_runs import ALONE, BESIDE, FURTHER, RECORDED, start

for needed in ("transformers", "accelerate", "peft"):
    pytest.importorskip(needed)

TOLERANCE = 1e-4
# zerofold adds up gradients in fp32, DeepSpeed in bf16: losses of bf16 runs agree as far as bf16 does.
BF16_TOLERANCE = 2e-3


def check(library: str, names: list[str], *, hide: bool = False) -> None:
    expected = json.loads(RECORDED.read_text())
    found = start(library, names, hide=hide)
    assert found["library"]["version"] == {"zerofold": "0.19.8+zerofold", "deepspeed": "0.19.8"}[library]
    assert found["library"]["installed"] == (not hide and find_spec("deepspeed") is not None)
    for name in names:
        compare(found[name], expected[name], BF16_TOLERANCE if name.endswith("best") else TOLERANCE, name)
        losses, resumed = found[name]["losses"], found[name].get("resumed", [])
        compare(resumed, losses[len(losses) - len(resumed) :], TOLERANCE, f"{name} resumed against uninterrupted")
        assert losses[-1] < losses[0], f"{name} learned nothing"


def compare(found: Any, expected: Any, tolerance: float, where: str) -> None:
    if isinstance(expected, dict):
        assert sorted(found) == sorted(expected), where
        for name in expected:
            compare(found[name], expected[name], tolerance, f"{where} {name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{where}: {found} is not {expected}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            compare(one, other, tolerance, f"{where}[{index}]")
    else:
        # Sums over all weights are compared relative to their size.
        allowed = tolerance * max(1.0, abs(expected) / 10)
        assert abs(found - expected) <= allowed, f"{where}: {found} is not {expected}"


def test_stages_1_and_2_give_the_curves_of_deepspeed() -> None:
    check("zerofold", BESIDE)


def test_stage_3_gives_the_curves_of_deepspeed_where_it_is_not_installed() -> None:
    check("zerofold", ALONE, hide=True)


def test_further_curves_are_those_of_deepspeed() -> None:
    check("zerofold", FURTHER)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_the_recording_is_what_deepspeed_gives() -> None:
    check("deepspeed", BESIDE + ALONE)
