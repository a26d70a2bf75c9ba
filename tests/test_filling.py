"""How much of a device limit states that stay may have, by what CUDA's allocator would say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from zerofold.optim.away import slots


class FakeMemory:
    """What CUDA's allocator would say, in chunks' states."""

    def __init__(self, patch: pytest.MonkeyPatch, largest: int = 1, backend: str = "native") -> None:
        self.slot = slots.CHUNK * 12
        self.now = self.peak = self.ran_out = 0
        cuda = {
            "memory_stats": lambda _: {"num_alloc_retries": self.ran_out},
            "get_allocator_backend": lambda: backend,
            "memory_reserved": lambda _: self.now * self.slot,
            "max_memory_reserved": lambda _: self.peak * self.slot,
            "memory_snapshot": lambda: [  # of the native backend alone
                {"device": 0, "total_size": largest * self.slot},
                {"device": 0, "total_size": 99 * self.slot, "is_expandable": True},
                {"device": 1, "total_size": 99 * self.slot},
            ],
        }
        for name, fake in cuda.items():
            patch.setattr(torch.cuda, name, fake)

    def step(self, used: int) -> None:
        self.now, self.peak = used, max(self.peak, used)


def filled_by(memory: FakeMemory, limit: int, steps: Sequence[int], given: int = 0) -> tuple[slots.Filling, list[int]]:
    """So many chunks more or fewer after steps that take so much beside them."""
    filling, found = slots.Filling(torch.device("cuda", 0), limit * memory.slot), []
    for used in steps:
        memory.step(used + given)
        found.append(filling.change())
        filling.changed(found[-1], found[-1])
        given += found[-1]
    return filling, found


def test_a_device_is_filled_by_halves_of_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of the limit is left alone, or as much as the largest block, where that is more."""
    assert filled_by(FakeMemory(monkeypatch), 160, [120] * 9)[1] == [16, 8, 4, 2, 1, 0, 0, 0, 0]  # up to 152
    assert filled_by(FakeMemory(monkeypatch, largest=20), 160, [120] * 6)[1] == [10, 5, 2, 1, 1, 0]  # up to 140
    assert filled_by(FakeMemory(monkeypatch, largest=50), 160, [120] * 2)[1] == [0, 0]
    assert filled_by(FakeMemory(monkeypatch, largest=50, backend="cudaMallocAsync"), 160, [120] * 2)[1] == [16, 8]


def test_what_steps_happen_to_leave_later_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled_by(FakeMemory(monkeypatch), 160, [150, 150, 150, 20, 20])[1] == [1, 0, 0, 0, 0]


def test_a_short_step_does_not_fill_what_a_long_one_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a second optimizer's step, with the cache emptied since and no backward between them."""
    for steps in ([120, 120, *[60] * 8], [120, *[60] * 9]):
        found = filled_by(FakeMemory(monkeypatch), 160, steps)[1]
        assert 28 <= sum(found) <= 32


def test_chunks_go_where_memory_comes_closer_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = filled_by(FakeMemory(monkeypatch), 160, [*[120] * 6, 130, 130, 120, 60])
    assert found == [16, 8, 4, 2, 1, 0, -9, 0, 0, 0]
    assert filled_by(FakeMemory(monkeypatch), 160, [150, 190])[1] == [1, -1]  # no more than there are


def test_a_peak_from_before_the_first_look_is_passed_over_where_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all of the limit was reserved once, and the next step shows how much it takes."""
    memory = FakeMemory(monkeypatch)
    memory.step(160)
    memory.ran_out = 1
    filling, found = filled_by(memory, 160, [100, 120, 120, 120])
    assert found == [0, 16, 8, 4]
    memory.ran_out = 2  # from now on there is no room
    memory.step(120 + sum(found))
    assert [filling.change(), filling.change()] == [0, 0]
