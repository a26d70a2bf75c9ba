"""The eight collectives give what torch.distributed gives, and count what they send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerofold.comm import Comm
from zerofold.traffic import Traffic


def make_comm() -> Comm:
    return Comm(dist.group.WORLD, torch.device("cpu"), Traffic(), overlap=True)


def all_eight() -> dict[str, Any]:
    comm = make_comm()
    rank, world = comm.rank, comm.size
    mine = torch.arange(6.0) + 100 * rank
    results = {}

    sent = mine.clone()
    comm.broadcast(sent, world - 1, unit="u").wait()
    results["broadcast"] = sent.tolist()

    piece = torch.empty(2)
    whole = torch.arange(float(world)).repeat_interleave(2) if rank == 0 else None
    comm.scatter(piece, whole, 0, unit="u").wait()
    results["scatter"] = piece.tolist()

    collected = [torch.empty(6) for _ in range(world)] if rank == 1 else None
    comm.gather(mine, collected, 1, unit="u").wait()
    results["gather"] = None if collected is None else [t[0].item() for t in collected]

    summed = mine.clone()
    comm.reduce(summed, 0, unit="u").wait()
    results["reduce"] = summed.tolist() if rank == 0 else None

    flat = torch.zeros(2 * world)
    flat[2 * rank : 2 * rank + 2] = float(rank + 1)
    comm.all_gather(flat, [2 * r for r in range(world + 1)], unit="u").wait()
    results["all_gather"] = flat.tolist()

    out = torch.empty(2)
    comm.reduce_scatter(out, torch.arange(2.0 * world) + rank, unit="u").wait()
    results["reduce_scatter"] = out.tolist()

    total = mine.clone()
    comm.all_reduce(total, unit="u").wait()
    results["all_reduce"] = total.tolist()

    received = torch.empty(world)
    comm.all_to_all(received, torch.arange(float(world)) + 10 * rank, unit="u").wait()
    results["all_to_all"] = received.tolist()

    results["elements"] = {operation: n for (operation, _), n in comm.traffic.elements.items()}
    results["calls"] = [call.operation for call in comm.traffic.calls]
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_all_eight(ranks: Any, world: int) -> None:
    answers = ranks(world, all_eight)
    base = torch.arange(6.0)
    share = (world - 1) / world
    for rank, got in enumerate(answers):
        assert got["broadcast"] == (base + 100 * (world - 1)).tolist()
        assert got["scatter"] == [rank, rank]
        assert got["gather"] == (None if rank != 1 else [100.0 * r for r in range(world)])
        assert got["all_gather"] == [float(r + 1) for r in range(world) for _ in range(2)]
        everyone = world * (world - 1) / 2
        assert got["reduce_scatter"] == [world * (2 * rank) + everyone, world * (2 * rank + 1) + everyone]
        assert got["all_reduce"] == (world * base + 100 * everyone).tolist()
        assert got["all_to_all"] == [rank + 10.0 * r for r in range(world)]
        assert got["elements"]["broadcast"] == pytest.approx(6 * share)
        assert got["elements"]["all_reduce"] == pytest.approx(12 * share)
        assert got["elements"]["all_gather"] == pytest.approx(2 * world * share)
        assert got["elements"]["reduce_scatter"] == pytest.approx(2 * world * share)
        assert len(got["calls"]) == 8
    assert answers[0]["reduce"] == (world * base + 100 * world * (world - 1) / 2).tolist()


def abandoned() -> None:
    comm = make_comm()
    if comm.rank == 1:
        import os

        os._exit(7)
    comm.all_reduce(torch.ones(2), unit="blocks.7").wait()


def test_a_rank_that_dies_is_reported_with_unit_and_last_calls(ranks: Any) -> None:
    errors = ranks(2, abandoned, expect_error=True)
    assert "CommError" in errors[0]
    assert "all_reduce of unit 'blocks.7' failed" in errors[0]
    assert "last calls here: #1 all_reduce(blocks.7" in errors[0]
