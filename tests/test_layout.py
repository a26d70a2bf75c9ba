"""The flat space: every element has one owner, whatever the sizes."""

from __future__ import annotations

import itertools

import pytest
import torch

from zerofold.layout import Box, FlatLayout, boxes


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("numels", [[1], [33, 1, 640, 7], [1000, 1000], [31] * 9])
def test_pieces_cover_every_parameter_once(world: int, numels: list[int]) -> None:
    layout = FlatLayout.even(numels, world=world, itemsize=4)
    assert len({layout.shard_size(rank) for rank in range(world)}) == 1
    assert layout.size == world * layout.shard_size(0)
    assert all(offset % 32 == 0 for offset in layout.offsets)
    for index, numel in enumerate(numels):
        covered = [e for rank in range(world) for e in _elements(layout, rank, index)]
        assert covered == list(range(numel))


@pytest.mark.parametrize("buffer", [1, 64, 100, 10**6])
def test_chunks_cover_a_shard_and_fit_the_buffer(buffer: int) -> None:
    layout = FlatLayout.even([640, 5, 333], world=3, itemsize=4)
    chunks = list(layout.chunks(buffer))
    assert chunks[0].start == 0
    assert chunks[-1].start + chunks[-1].widths[0] == layout.shard_size(0)
    assert all(a.start + a.widths[0] == b.start for a, b in itertools.pairwise(chunks))
    assert all(sum(chunk.widths) <= max(buffer, 3) for chunk in chunks)


def test_parts_of_a_piece_in_chunks_make_the_piece() -> None:
    layout = FlatLayout.even([640, 5, 333], world=2, itemsize=4)
    for rank in range(2):
        for piece in layout.pieces(rank):
            parts = [chunk.part(piece, rank) for chunk in layout.chunks(100)]
            inside = [e for part in parts for e in range(part.start, part.stop)]
            assert inside == list(range(piece.start, piece.stop))
            for part in parts:
                if part.size:
                    assert part.shard_start - piece.shard_start == part.start - piece.start


def _elements(layout: FlatLayout, rank: int, index: int) -> range:
    piece = layout.pieces(rank)[index]
    if piece.size:  # the shard range must be the one this flat range falls into
        assert layout.bounds[rank] + piece.shard_start == layout.offsets[index] + piece.start
    return range(piece.start, piece.stop)


def test_a_flat_range_is_a_few_boxes() -> None:
    shape = (3, 4, 5)
    grid = torch.arange(60).view(shape)
    for start, stop in itertools.combinations(range(61), 2):
        found = list(boxes(shape, start, stop))
        inside = [tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)) for box in found]
        assert torch.cat([grid[each].reshape(-1) for each in inside]).tolist() == list(range(start, stop))
        assert [box.start for box in found] == [start, *(box.stop for box in found[:-1])]
        assert len(found) <= 5
    assert list(boxes((), 0, 1)) == [Box((), (), 0)]
