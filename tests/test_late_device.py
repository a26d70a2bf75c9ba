"""Updates through a device whose streams are late, each by a random while: to the bits of those on the host.

A wait that is missing shows as other values. Taken out to see whether it does: waits of kernels and of both ways down
for what comes before them, of slots for their last use, of a step for all that the one before has set going, of the
update from a file for its writes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.late_device import LONGEST, LateDevice
from tests.test_early_update import NEVER, PLACES, Between, a_change, a_look, another_backward
from tests.test_offload import states, train
from tests.test_through_device import backward, updated_through_the_device
from torch import Tensor

from zerofold.memory.disk_blocks import Block

WAYS: dict[str, dict[str, Any]] = {
    "host": {"share": 0.0},
    "shared": {"share": 0.6, "ahead": 3},
    "early": {"share": 1.0, "ahead": 64, "early": True},
    "lasting": {"share": 0.4, "lasting": 30, "later": (0, -13, 0, -5)},
}
FILES: dict[str, dict[str, Any]] = {
    "file": {"optimizer": "nvme"},
    "all in the file": {"optimizer": "nvme", "parameters": "nvme"},
    "file, parameters on the host": {"optimizer": "nvme", "parameters": "host"},
}


def trained(place: dict[str, Any], between: Between | None, late: LateDevice | None, **way: Any) -> list[Tensor]:
    chunk = 2**11 if "nvme" in place.values() else 2**9  # in a file, whole pages
    with updated_through_the_device(**way, place=place, clip=NEVER, chunk=chunk, late=late) as (model, optimizer):
        train(model, optimizer, 2)
        backward(model, 2)
        if between is not None:
            between(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, 3, first=3)
        return states(model, optimizer)


@contextmanager
def late_disk(seed: int) -> Iterator[None]:
    chance = random.Random(seed)

    def late(move: Any) -> Any:
        def moved(block: Block, fd: int) -> None:
            if chance.random() < 0.5:
                time.sleep(chance.random() * LONGEST)
            move(block, fd)

        return moved

    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "write"):
            patch.setattr(Block, name, late(getattr(Block, name)))
        yield


def late_ones_that_differ(way: str) -> list[str]:
    wrong = []
    for seed, (place, between) in enumerate(zip(PLACES, (a_look, another_backward, a_change), strict=True)):
        expected = trained(PLACES[place], between, None, share=0.0)
        found = trained(PLACES[place], between, LateDevice(seed), **WAYS[way])
        if not all(map(torch.equal, found, expected)):
            wrong.append(f"{place}, {between}")
    return wrong


@pytest.mark.parametrize("way", list(WAYS))
def test_late_streams(ranks: Any, way: str) -> None:
    assert ranks(1, late_ones_that_differ, way) == [[]]


def late_files_that_differ(folder: str) -> list[str]:
    wrong = []
    for seed, (name, place) in enumerate(FILES.items()):
        expected = trained(PLACES["optimizer"], a_look, None, share=0.0)
        with late_disk(seed):
            found = trained(place | {"path": folder}, a_look, LateDevice(seed), share=0.0)
        if not all(map(torch.equal, found, expected)):
            wrong.append(name)
    return wrong


def test_late_streams_and_a_late_disk(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1, late_files_that_differ, str(tmp_path)) == [[]]
