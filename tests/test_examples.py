"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from multiprocessing import get_context
from typing import Any

import pytest

import zerofold

MODULES = [info.name for info in pkgutil.walk_packages(zerofold.__path__, "zerofold.") if "__main__" not in info.name]


ALONE = ("zerofold.simulation.run", "zerofold.bench.streams")
"""Those whose examples make a world of their own, where no other may be, or start a process, which a rank must not."""


FRESH = ("zerofold.compat.deepspeed.standing_in",)
"""Those that come before accelerate, which ranks have imported."""


def run_examples(name: str) -> tuple[int, int]:
    result = doctest.testmod(importlib.import_module(name))
    return result.failed, result.attempted


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(ranks: Any, name: str) -> None:
    if name in FRESH:
        with get_context("spawn").Pool(1) as process:
            failed, attempted = process.apply(run_examples, (name,))
        assert attempted
    else:
        failed, _ = run_examples(name) if name in ALONE else ranks(1, run_examples, name)[0]
    assert failed == 0


@pytest.mark.parametrize("name", zerofold.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(zerofold, name).__doc__ or "")
