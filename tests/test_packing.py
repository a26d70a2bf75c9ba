"""Gradients packed for all ranks at once are what they are packed one rank after another."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from zerofold.layout import FlatLayout
from zerofold.reduce import Reduction, _pack, _pack_table


@pytest.mark.parametrize("world", [1, 2, 7, 64])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_a_table_has_the_rows_of_every_rank(world: int, wire: torch.dtype) -> None:
    chance = random.Random(world)
    for _ in range(10):
        numels = [chance.choice([1, 31, 64, 100, 1000, 5000]) for _ in range(chance.randint(1, 6))]
        layout = FlatLayout.even(numels, world=world, itemsize=4)
        gradients = [torch.randn(numel) if chance.random() < 0.8 else None for numel in numels]
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
