"""Ranks with different numbers of batches: the last ones train, as in one process with the same data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, largest_difference, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf

COUNTS = (1, 3, 0)


def jointly(stage: int | str, divide_by: str, accumulate: int, counts: tuple[int, ...]) -> tuple[list[Tensor], Any]:
    model = make_model()
    settings: dict[str, Any] = {"accumulate": accumulate}
    if stage == "hsdp":
        settings["mesh"] = init_device_mesh("cpu", (1, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, clip=1.0, **settings)
    data = zf.join(model, list(batches(counts[dist.get_rank()])), divide_by=divide_by)
    seen = []
    for number, batch in enumerate(data):
        model(*batch).backward()
        seen.append((data.is_shadow, data.present))
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    zf.close(model)
    return [p.detach().clone() for p in model.parameters()], seen


def alone(divide_by: str, accumulate: int, counts: tuple[int, ...]) -> list[Tensor]:
    """One process that has the batches of all ranks; each iteration takes those that are there."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [list(batches(count, rank=rank)) for rank, count in enumerate(counts)]
    for number in range(max(counts)):
        there = [batches_of[number] for batches_of in data if number < len(batches_of)]
        for batch in there:
            (model(*batch) / (len(there) if divide_by == "present" else len(counts))).backward()
        if (number + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("stage", "divide_by", "accumulate", "counts"),
    [
        (0, "present", 1, COUNTS),
        (1, "present", 2, (4, 1, 3)),
        (2, "all", 1, COUNTS),
        (3, "present", 1, COUNTS),
        (3, "all", 2, (4, 1, 3)),
        ("hsdp", "present", 1, COUNTS),
    ],
)
def test_uneven_data_trains_as_in_one_process(
    ranks: Any, stage: int | str, divide_by: str, accumulate: int, counts: tuple[int, ...]
) -> None:
    expected = alone(divide_by, accumulate, counts)
    for rank, (weights, seen) in enumerate(ranks(3, jointly, stage, divide_by, accumulate, counts)):
        assert largest_difference(expected, weights) <= 1e-6
        assert [is_shadow for is_shadow, _ in seen] == [number >= counts[rank] for number in range(max(counts))]
        assert [present for _, present in seen] == [
            [other for other in range(3) if number < counts[other]] for number in range(max(counts))
        ]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x)).sum()


def buffers_after_a_shadow() -> list[float]:
    """Rank 0 has one batch, rank 1 two: the statistics go on with what rank 1 sees."""
    rank = dist.get_rank()
    model = zf.shard(Counting(), stage=2)
    mine = [torch.full((2, 4), 10.0 * rank + number) for number in range(1 + rank)]
    for batch in zf.join(model, mine):
        model(batch).backward()
    return model.norm.running_mean.tolist()[:1]


def test_running_statistics_follow_a_rank_that_has_data(ranks: Any) -> None:
    (first,), (second,) = ranks(2, buffers_after_a_shadow)
    assert first == second == pytest.approx(0.1 * 11)


def nothing_anywhere() -> int:
    model = zf.shard(make_model(), stage=3)
    return sum(1 for _ in zf.join(model, []))


def test_no_data_at_all_is_no_iteration(ranks: Any) -> None:
    assert ranks(2, nothing_anywhere) == [0, 0]


def test_a_wrong_divisor_is_refused(ranks: Any) -> None:
    assert "divide_by='mean'" in ranks(1, wrong_divisor)[0]


def wrong_divisor() -> str:
    model = zf.shard(make_model(), stage=3)
    try:
        zf.join(model, [], divide_by="mean")
    except ValueError as error:
        return str(error)
    return "nothing"


def joined_twice() -> tuple[float, int]:
    """A loop that changes its batches, with an evaluation inside, against one without."""
    found = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
        count = 1 + 2 * dist.get_rank()
        data = [{"x": torch.full((2, 4), float(index + 1)), "y": torch.ones(2, 1)} for index in range(count)]
        shadows = 0
        batches = zf.join(model, data)
        for batch in batches:
            shadows += batches.is_shadow
            target = batch.pop("y")
            loss = (model(batch["x"].mul_(0.5)) - target).square().mean()
            if evaluates:
                with torch.no_grad():
                    for inner in zf.join(model, data[:1]):
                        model(inner["x"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        zf.close(model)
        found.append(model.weight.detach().clone())
    return (found[0] - found[1]).abs().max().item(), shadows


def test_a_join_inside_a_join_and_batches_that_are_changed(ranks: Any) -> None:
    assert ranks(2, joined_twice) == [(0.0, 2), (0.0, 0)]
