"""Local rank processes: values come back, and the first failure is told in one line."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from zerofold.launch import RankFailed, init_ranks, run_ranks


def add_ranks(offset: int) -> tuple[int, int, float, str]:
    with init_ranks("cpu") as (rank, world, device):
        total = torch.tensor(float(rank + offset))
        dist.all_reduce(total)
        assert os.environ["LOCAL_RANK"] == str(rank)
        return rank, world, total.item(), device.type


def fail_on_rank_one() -> None:
    with init_ranks("cpu") as (rank, _, _):
        if rank == 1:
            raise ValueError("the second\nrank is wrong")
        dist.barrier()


def killed_on_rank_one() -> None:
    with init_ranks("cpu") as (rank, _, _):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def test_values_come_back_in_rank_order() -> None:
    assert run_ranks(add_ranks, 2, 10) == [(0, 2, 21.0, "cpu"), (1, 2, 21.0, "cpu")]


def test_the_first_failure_is_one_line_and_the_others_are_killed(capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(fail_on_rank_one, 2)
    assert str(caught.value) == "rank 1: ValueError: the second rank is wrong"
    assert "in fail_on_rank_one" in caught.value.trace
    assert time.monotonic() - start < 30
    assert "Traceback" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler


def test_debug_adds_the_traceback() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1: ValueError: the second rank is wrong\n.*Traceback"):
        run_ranks(fail_on_rank_one, 2, debug=True)


def test_a_killed_rank_is_named_with_the_likely_cause() -> None:
    with pytest.raises(RankFailed, match="rank 1: the process was killed.*lack of memory"):
        run_ranks(killed_on_rank_one, 2)


def test_no_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(add_ranks, 0, 1)


def test_a_process_started_alone_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="torchrun"), init_ranks("cpu"):
        pass
