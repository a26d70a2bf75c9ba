"""Gradients packed for all ranks at once are what they are packed one rank after another."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zerofold.layout import FlatLayout
from zerofold.memory import BufferPool
from zerofold.memory.buffers import default_buffer_bytes
from zerofold.reduce import Reducer, Reduction, _pack, _pack_table


@pytest.mark.parametrize("world", [1, 2, 7, 64])
@pytest.mark.parametrize(
    ("made", "wire"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
def test_a_table_has_the_rows_of_every_rank(world: int, made: torch.dtype, wire: torch.dtype) -> None:
    chance = random.Random(world)
    for _ in range(10):
        numels = [chance.choice([1, 31, 64, 100, 1000, 5000]) for _ in range(chance.randint(1, 6))]
        layout = FlatLayout.even(numels, world=world, itemsize=4)
        gradients = [torch.randn(numel).to(made) if chance.random() < 0.8 else None for numel in numels]
        accumulate = (False,) * len(numels)
        reduction = Reduction("unit", gradients, layout, torch.empty(0), accumulate, False, wire)
        for chunk in layout.chunks(chance.choice([world, 50 * world, 10**6])):
            table = torch.full((world, chunk.widths[0]), 7.0, dtype=wire)
            rows = table.clone()
            # On copies: where the wire is narrower, a gradient is scaled where it is, since nobody needs it afterwards.
            copies = [None if gradient is None else gradient.clone() for gradient in gradients]
            _pack_table(table, replace(reduction, gradients=copies), chunk, 0.37)
            copies = [None if gradient is None else gradient.clone() for gradient in gradients]
            for rank in range(world):
                _pack(rows[rank], replace(reduction, gradients=copies), rank, chunk, 0.37)
            assert torch.equal(table, rows)


@pytest.mark.parametrize("world", [1, 3, 8, 50])
def test_ranges_by_rank_are_those_of_the_pieces(world: int) -> None:
    layout = FlatLayout.even([33, 1, 640, 7, 5000], world=world, itemsize=4)
    for index in range(5):
        expected = tuple((piece.start, piece.stop) for piece in (layout.pieces(rank)[index] for rank in range(world)))
        found = layout.ranges(index)
        assert [high - low for low, high in found] == [high - low for low, high in expected]
        assert all(one == other for one, other in zip(found, expected, strict=True) if other[0] < other[1])
        assert found == layout.ranges(index)
        assert found[-1] == found[world - 1]


class Alone:
    """A group in which every other rank sent zeros: the sum that rank 0 gets is its own row."""

    is_gloo, overlap, rank, device = False, True, 0, torch.device("cpu")

    def __init__(self, size: int) -> None:
        self.size = size

    def reduce_scatter(self, out: Tensor, rows: Tensor, *, unit: str) -> Alone:
        out.copy_(rows[: out.numel()])
        return self

    def reduce_rows(self, rows: Sequence[Tensor], *, unit: str) -> Alone:
        return self

    def all_reduce(self, flat: Tensor, *, unit: str, purpose: str) -> Alone:
        return self

    def wait(self) -> None:
        pass


NUMELS = [100, 7, 33, 640, 1]


@pytest.mark.parametrize("cut", ["even", "whole", "none"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_shard_gets_its_part_of_the_mean(cut: str, groups: int) -> None:
    """By the form that every backend but gloo takes; across groups the mean is half of what this one adds."""
    world = 1 if cut == "none" else 3
    layout = FlatLayout.even(NUMELS, world=world, itemsize=4)
    if cut == "whole":
        layout = FlatLayout.by_owner(NUMELS, [0, 2, 1, 0, 1], world=world, itemsize=4)
    gradients = [torch.randn(numel) for numel in NUMELS]
    shard = torch.full((layout.shard_size(0),), 5.0)
    accumulate = (True, False, True, False, True)
    across = Alone(2) if groups == 2 else None
    reducer = Reducer(Alone(3), across, BufferPool(1024))  # type: ignore[arg-type]
    local = [gradients[0].clone(), None, *(gradient.clone() for gradient in gradients[2:])]
    reducer.start(Reduction("unit", local, layout, shard, accumulate, groups == 2, torch.float32))
    reducer.finish()
    for piece in layout.pieces(0):
        mean = gradients[piece.index] * (1 / 3) if piece.index != 1 else torch.zeros(7)
        expected = (mean + 5.0 * accumulate[piece.index])[piece.start : piece.stop] / groups
        torch.testing.assert_close(shard[piece.shard_start : piece.shard_stop], expected)


@pytest.mark.parametrize("world", [1, 3])
def test_gradients_go_when_they_are_packed(world: int) -> None:
    """The buffers have them then; until the reduction is waited for, the next unit needs the memory."""
    layout = FlatLayout.even(NUMELS, world=world, itemsize=4)
    local = [torch.randn(numel) for numel in NUMELS]
    alive = [weakref.ref(gradient) for gradient in local]
    reducer = Reducer(Alone(3), None, BufferPool(2**20))  # type: ignore[arg-type]
    shard = torch.zeros(layout.shard_size(0))
    reducer.start(Reduction("unit", local, layout, shard, (False,) * 5, False, torch.float32))
    assert all(each() is not None for each in alive)
    del local
    assert all(each() is None for each in alive)
    assert not shard.any()  # nothing has been waited for
    reducer.finish()
    assert shard.any()


def test_a_buffer_is_larger_where_a_device_would_wait_for_each() -> None:
    assert default_buffer_bytes("cpu") == 16 * 2**20
    assert default_buffer_bytes("cuda") == default_buffer_bytes("meta") > default_buffer_bytes("cpu")
