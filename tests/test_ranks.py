"""The pool of rank processes itself: values come back, errors are told in full, a failure ends the world."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

import zerofold as zf
from ranks import MOST_THREADS, RankError, RankPool, raised


def who(offset: int = 0) -> tuple[int, int]:
    return dist.get_rank() + offset, dist.get_world_size()


def summed(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def process_id() -> int:
    return os.getpid()


def package() -> str | None:
    return zf.__file__


def random_number() -> float:
    return torch.rand(()).item()


def change_defaults() -> None:
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def defaults() -> tuple[int, torch.dtype, bool]:
    return torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"bad value on {rank}")
    dist.barrier()


def fail_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()}")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    time.sleep(60)


def sleep_forever() -> None:
    time.sleep(1000)


def leave_group() -> None:
    dist.destroy_process_group()


def returns_a_lambda() -> object:
    return lambda: None


def test_every_rank_answers_in_order(ranks: RankPool) -> None:
    assert ranks(2, who) == [(0, 2), (1, 2)]
    assert ranks(2, who, offset=10) == [(10, 2), (11, 2)]
    assert ranks(1, who) == [(0, 1)]


def test_ranks_import_the_package_that_the_tests_do(ranks: RankPool) -> None:
    """Not another checkout's, which may be the one that is installed."""
    assert ranks(2, package) == [package()] * 2


def test_tensors_travel_both_ways(ranks: RankPool) -> None:
    for result in ranks(2, summed, torch.arange(3.0)):
        assert torch.equal(result, torch.tensor([0.0, 2.0, 4.0]))


def test_processes_are_kept_between_calls(ranks: RankPool) -> None:
    first = ranks(2, process_id)
    assert ranks(2, process_id) == first
    assert os.getpid() not in first


def test_each_call_starts_from_the_same_state(ranks: RankPool) -> None:
    ranks(2, change_defaults)
    assert ranks(2, defaults) == [(1, torch.float32, True)] * 2
    assert ranks(2, random_number) == ranks(2, random_number)


def test_an_error_shows_every_rank_and_renews_the_world(ranks: RankPool) -> None:
    before = ranks(2, process_id)
    with pytest.raises(RankError) as caught:
        ranks(2, fail_on, 1)
    message = str(caught.value)
    assert "ValueError: bad value on 1" in message
    assert "in fail_on" in message
    assert "--- rank 0:" in message
    assert set(ranks(2, process_id)).isdisjoint(before)


def test_expected_errors_are_values(ranks: RankPool) -> None:
    assert ranks(2, fail_everywhere, expect_error=True) == ["KeyError: 'rank 0'", "KeyError: 'rank 1'"]
    assert ranks.process_ids(2) == []


def test_errors_caught_on_the_ranks_cost_no_restart(ranks: RankPool) -> None:
    before = ranks(2, process_id)
    assert ranks(2, raised, fail_everywhere) == ["KeyError: 'rank 0'", "KeyError: 'rank 1'"]
    assert ranks(2, process_id) == before


def test_a_dead_rank_is_noticed_at_once(ranks: RankPool) -> None:
    ranks(2, who)
    start = time.monotonic()
    with pytest.raises(RankError, match="exit code 7"):
        ranks(2, die_on, 1)
    assert time.monotonic() - start < 20


def test_a_hang_ends_at_the_timeout_and_shows_where(ranks: RankPool) -> None:
    ranks(2, who)
    start = time.monotonic()
    with pytest.raises(RankError, match="no answer within 1 s") as caught:
        ranks(2, sleep_forever, timeout=1)
    assert "in sleep_forever" in str(caught.value)
    assert time.monotonic() - start < 20


def test_a_world_without_its_group_is_not_reused(ranks: RankPool) -> None:
    before = ranks(1, process_id)
    ranks(1, leave_group)
    assert ranks(1, process_id) != before


def test_what_does_not_pickle_is_refused_with_the_fix(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match="module level"):
        ranks(2, lambda: None)
    with pytest.raises(RankError, match="pickle"):
        ranks(1, returns_a_lambda)


def test_the_least_recently_used_world_goes_first() -> None:
    pool = RankPool(keep=1)
    pool(1, who)
    pool(2, who)
    assert pool.process_ids(1) == []
    assert len(pool.process_ids(2)) == 2
    pool.close()
    assert pool.process_ids(2) == []


def make_groups(count: int) -> None:
    for _ in range(count):
        dist.new_group([0])


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by Linux")
def test_a_world_with_the_threads_of_many_groups_is_made_anew(ranks: RankPool) -> None:
    before = ranks(1, process_id)
    ranks(1, make_groups, 2)
    assert ranks(1, process_id) == before
    ranks(1, make_groups, MOST_THREADS)
    assert ranks(1, process_id) == before  # counted when this call began, before which nobody knew
    assert ranks(1, process_id) != before


def train_and_leave() -> None:
    model = torch.nn.Linear(8, 8)
    model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def threads(at_most: int, seconds: float) -> int:
    """So many, or after some seconds: groups that have ended are dropped beside the calls."""
    end = time.monotonic() + seconds
    while (count := len(os.listdir("/proc/self/task"))) > at_most and time.monotonic() < end:
        time.sleep(0.01)
    return count


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by Linux")
def test_groups_of_models_that_were_left_open_end(ranks: RankPool) -> None:
    ranks(2, train_and_leave)
    before = max(ranks(2, threads, 0, 0.5))
    for _ in range(5):
        ranks(2, train_and_leave)
    assert max(ranks(2, threads, before, 10.0)) <= before
