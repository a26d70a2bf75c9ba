"""Ranks that do different things, stop or die: every other rank says who, in which module and in which collective."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import Block, batches, make_model
from tests.ranks import raised
from torch import Tensor, nn

import zerofold as zf
from zerofold.divergence import Account, Line, Seen, find_deadlock, find_mismatch, find_stop, who_is_gone, who_is_idle

WIDTH = 64


class Experts(nn.Module):
    """Runs the experts it is told to; each is a unit of its own, and the later ones are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.norm(x)
        for index in chosen:
            x = x + self.experts[index](x)
        return x


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for block in self.blocks:
            x = block(x, chosen)
        return self.head(x).square().mean()


@contextmanager
def timed() -> Iterator[None]:
    """Puts the seconds in front of the error."""
    start = time.monotonic()
    try:
        yield
    except zf.CommError as error:
        raise type(error)(f"{time.monotonic() - start:.1f} s: {error}") from error


def seconds(error: str) -> float:
    return float(error.split(": ")[1].removesuffix(" s"))


def routed(odd_one_out: list[int]) -> None:
    """Two steps on the same experts, then rank 2 takes others. How it ends, and after how many seconds."""
    torch.manual_seed(0)
    model = MoE()
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3, units=nn.Linear)
    for step in range(4):
        with timed():
            model(torch.ones(2, WIDTH), odd_one_out if dist.get_rank() == 2 and step == 2 else [0, 1]).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_rank_that_routes_to_other_experts_is_named_on_all(ranks: Any) -> None:
    for rank, error in enumerate(ranks(4, routed, [0, 3], expect_error=True)):
        assert f" s: rank {rank}: rank 2 called all_gather of 'blocks.0.experts.3' as call #" in error, error
        assert error.startswith("DivergenceError: ")
        assert "while ranks 0, 1, 3 called all_gather of 'blocks." in error
        assert "every rank must run the same modules" in error
        assert seconds(error) < 15


def misbehave(odd: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    if odd == "step":
        optimizer.step()
    elif odd == "full_params":
        with zf.full_params(model):
            pass
    elif odd == "attach":
        model.extra = nn.Linear(8, 8)
    elif odd == "slow":
        time.sleep(4)
    elif odd == "stop":
        time.sleep(8)
    elif odd == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def train(odd: str, stage: int, **settings: Any) -> int:
    """Two steps alike; then rank 1 does something else. The number of this library's threads that are left."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, units=Block, **settings)
    for number, batch in enumerate(batches(4)):
        with timed():
            if number == 2 and dist.get_rank() == 1:
                misbehave(odd, model, optimizer, batch)
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    zf.close(model)
    return sum(thread.name.startswith("zerofold") for thread in threading.enumerate())


CASES = {
    ("step", 3): ("rank 1 waits in all_reduce of 'gradient norm'", "rank 0 waits in all_gather of 'the root'"),
    ("full_params", 0): ("called all_reduce of 'full_params'", "called all_reduce of 'agreement'"),
    ("attach", 2): ("rank 1 waits in all_gather of 'set-up'", "was attached or unfrozen on some only"),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_of_one_rank_alone_is_named_on_all(ranks: Any, case: tuple[str, int]) -> None:
    for error in ranks(2, train, *case, expect_error=True):
        assert error.startswith("DivergenceError: "), error
        assert all(part in error for part in CASES[case]), error
        assert seconds(error) < 15


def test_a_slow_rank_is_no_fault_and_no_thread_is_left(ranks: Any) -> None:
    assert ranks(2, train, "slow", 3) == [0, 0]


def train_and_note_warnings(**settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        with pytest.raises(zf.DivergenceError) as caught:
            train("stop", 3, **settings)
    raise AssertionError(" | ".join([str(caught.value), *(str(warning.message) for warning in noted)]))


def test_a_rank_that_stops_is_warned_of_and_then_raised(ranks: Any) -> None:
    first, second = ranks(2, train_and_note_warnings, patience=5, expect_error=True)
    for said in (first, second):  # the one that stopped is told when it comes back
        assert "rank 1 has made no call for " in said
        assert "test_faults.py" in said
        assert "rank 0 waits in all_gather of 'the root'" in said
        assert "patience=5" in said
    assert "| rank 0 waits: rank 1 has made no call for" in first


def test_a_rank_that_dies_is_named(ranks: Any) -> None:
    first, dead, last = ranks(3, train, "die", 3, expect_error=True)
    assert "ProcessDied" in dead
    for said in (first, last):
        assert said.startswith("CommError: ")
        assert seconds(said) < 15
        assert "rank 1 does not answer any more: its process ended" in said


class Choice(nn.Module):
    """A block with parameters that not every rank uses, which is legal."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        x = x + self.always(x)
        return self.sometimes(x) if uses_all else x


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Choice() for _ in range(4))

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, uses_all)
        return x.mean()


def gradients_on_some_ranks(stage: int) -> float:
    """A rank that waits in a chunk of a reduction, and one that gathers for the first time in backward."""
    torch.manual_seed(0)
    model = Choosy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, units=Choice, buffer_bytes=4096)
    start = time.monotonic()
    for _ in range(2):
        model(torch.ones(2, 64), dist.get_rank() != 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    zf.close(model)
    return time.monotonic() - start


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_on_some_ranks_only_are_no_fault(ranks: Any, stage: int) -> None:
    assert max(ranks(2, gradients_on_some_ranks, stage)) < 2.5


def steps_of_some_ranks() -> None:
    model = nn.Linear(8, 8)
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=0)
    try:
        for number in range(3):
            model(torch.ones(2, 8)).sum().backward()
            if number != 1 or dist.get_rank() == 0:
                optimizer.step()
            optimizer.zero_grad()
    finally:
        zf.close(model)


def test_a_step_left_out_on_one_rank_is_noticed(ranks: Any) -> None:
    for message in ranks(2, raised, steps_of_some_ranks):
        assert "some ranks have taken 2 optimizer steps and others 1" in message


def account(
    rank: int, calls: list[str], *, group: str = "gather", blocked: int | None = None, **fields: Any
) -> Account:
    seen = {position + 1: Seen("all_gather", unit, 8) for position, unit in enumerate(calls)}
    groups = {
        "gather": Line([0, 1, 2], 0, {}),
        "reduce": Line([0, 1, 2], 0, {}),
        group: Line([0, 1, 2], len(calls), seen),
    }
    return Account(rank, groups, idle=0.0, blocked=None if blocked is None else (group, blocked), **fields)


def by_rank(*accounts: Account) -> dict[int, Account]:
    return {each.rank: Account.from_dict(each.as_dict()) for each in accounts}


def test_ranks_that_wait_for_a_slow_one_are_no_fault() -> None:
    waiting = [account(rank, ["a", "b"], blocked=2, waiting=30.0) for rank in (0, 1)]
    slow = account(2, ["a"])
    assert find_mismatch(by_rank(*waiting, slow)) is None
    assert find_deadlock(by_rank(*waiting, slow)) is None
    stop = find_stop(by_rank(*waiting, slow), [], at_least=10.0)
    assert stop is not None
    assert "rank 2 has made no call" in stop.text
    assert "ranks 0, 1 wait in all_gather of 'b'" in stop.text


def test_who_waits_for_whom() -> None:
    first, second = account(0, ["a"], blocked=1), account(1, ["x"], group="reduce", blocked=1)
    assert "rank 0 waits in all_gather of 'a'" in (find_deadlock(by_rank(first, second, account(2, []))) or "")
    assert find_deadlock(by_rank(first, account(1, []), account(2, []))) is None
    # A call that one rank sends waits for that rank only.
    sent = Account(0, {"gather": Line([0, 1], 1, {1: Seen("broadcast", "a", 8, 0)})}, idle=0.0, blocked=("gather", 1))
    other = Account(1, {"gather": Line([0, 1], 0, {})}, idle=0.0, blocked=None)
    assert find_deadlock(by_rank(sent, other)) is None


def test_one_that_sends_waits_for_those_that_receive() -> None:
    lines = {"gather": Line([0, 1, 2], 1, {1: Seen("broadcast", "a", 8, 0)}), "reduce": Line([0, 1, 2], 0, {})}
    sends = Account(0, lines, idle=0.0, blocked=("gather", 1))
    lines = {"gather": Line([0, 1, 2], 0, {}), "reduce": Line([0, 1, 2], 1, {1: Seen("all_reduce", "norm", 8)})}
    first, second = (Account(rank, lines, idle=0.0, blocked=("reduce", 1)) for rank in (1, 2))
    slow = Account(2, {"gather": Line([0, 1, 2], 0, {}), "reduce": Line([0, 1, 2], 0, {})}, idle=9.0)
    assert find_deadlock(by_rank(sends, first, slow)) is None  # when rank 2 has come, rank 0 may be through
    assert find_deadlock(by_rank(sends)) is None  # all have come, and the call is under way
    said = find_deadlock(by_rank(sends, first, second))
    assert said is not None
    assert "rank 0 waits in broadcast of 'a'" in said


def test_a_rank_that_failed_before_is_not_taken_for_the_one_that_is_gone() -> None:
    failed = account(0, ["a"], failed="connection closed")
    assert "rank 2 does not answer" in (who_is_gone(by_rank(failed), [0, 2]) or "")
    assert who_is_gone(by_rank(failed), [0]) is None


def test_after_a_time_out_the_idle_rank_is_named() -> None:
    failed, waiting = account(0, ["a"], failed="timed out"), account(1, ["a"], blocked=1, waiting=60.0)
    assert who_is_idle(by_rank(failed, waiting)) is None
    said = who_is_idle(by_rank(failed, waiting, account(2, [], where="train.py:7 in load")))
    assert said is not None
    assert said.startswith("rank 2 has made no call for")
    assert "train.py:7 in load" in said
