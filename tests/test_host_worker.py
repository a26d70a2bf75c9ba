"""The thread that updates offloaded states: order, failures, threads and cores."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerofold.optim.away import on_host
from zerofold.optim.away.chunks import PieceWork, Scaling
from zerofold.optim.away.tuned_share import Split, TunedShare
from zerofold.optim.host_pool import HostPool
from zerofold.optim.host_speed import HostSpeed, HostTrial, best_of, host_candidates, measure_host_update
from zerofold.optim.host_worker import HostWorker
from zerofold.optim.onepass import AdamSettings


def test_work_runs_in_order_and_beside_the_caller() -> None:
    worker, seen, gate = HostWorker(1, None), [], threading.Event()
    jobs = [worker.submit(lambda: seen.append(gate.wait(10)))]
    jobs += [worker.submit(lambda index=index: seen.append(index)) for index in range(3)]
    assert not any(job.is_done for job in jobs)
    gate.set()
    jobs[-1].wait()
    assert seen == [True, 0, 1, 2]
    assert all(job.is_done for job in jobs)
    worker.close()


def test_a_failure_takes_the_rest_of_its_step_with_it_and_no_more() -> None:
    worker, seen, gate = HostWorker(1, None), [], threading.Event()

    def broken_update() -> None:
        raise ZeroDivisionError("unit 3")

    before = worker.submit(lambda: seen.append("before"))
    failed = worker.submit(broken_update)
    held = worker.submit(lambda: seen.append("never"))
    before.wait()
    while not held.is_done:
        time.sleep(0.001)
    later = worker.submit(lambda: (gate.wait(10), seen.append("never")))  # nobody knows of the failure yet
    with pytest.raises(ZeroDivisionError, match="unit 3") as error:
        held.wait()
    assert "broken_update" in [entry.name for entry in error.traceback]
    new = worker.submit(lambda: seen.append("new"))
    gate.set()
    for job in (failed, later):
        with pytest.raises(ZeroDivisionError) as again:
            job.wait()
        assert again.value is error.value
    new.wait()
    worker.close()
    assert seen == ["before", "new"]


def test_closing_raises_a_failure_that_nobody_has_seen() -> None:
    worker = HostWorker(1, None)
    worker.submit(lambda: [][0])  # type: ignore[arg-type, return-value]
    with pytest.raises(IndexError):
        worker.close()


def affinity_of_threads() -> dict[int, frozenset[int]]:
    return {int(name): frozenset(os.sched_getaffinity(int(name))) for name in os.listdir("/proc/self/task")}


def test_the_worker_has_threads_and_cores_of_its_own() -> None:
    of_caller, cores, before = torch.get_num_threads(), os.sched_getaffinity(0), affinity_of_threads()
    one_core, seen = frozenset([min(cores)]), []
    worker = HostWorker(3, one_core)
    values = torch.zeros(2**20)
    # An operation starts the worker's team.
    worker.submit(lambda: seen.extend([torch.get_num_threads(), values.add_(1) is values])).wait()
    team = {thread: mask for thread, mask in affinity_of_threads().items() if thread not in before}
    assert list(team.values()).count(one_core) == 3
    assert seen == [3, True]
    # Neither this thread nor one that starts later is changed.
    assert torch.get_num_threads() == of_caller
    assert os.sched_getaffinity(0) == cores
    newcomer = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    newcomer.start()
    newcomer.join()
    assert seen[-1] == of_caller
    worker.close()


def test_wrong_threads_and_cores_are_named() -> None:
    with pytest.raises(ValueError, match="threads=0: a worker needs 1 or more"):
        HostWorker(0, None)
    with pytest.raises(ValueError, match=r"cores=\[4095\]: this process may use \[0"):
        HostWorker(1, frozenset([4095]))


def test_the_measured_choice_is_one_of_the_candidates_and_keeps_to_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = host_candidates()  # depend on the core that this thread is on just now
    speed = measure_host_update(2**20, candidates=candidates)
    assert (speed.threads, speed.cores) in candidates
    assert 1e6 < speed.parameters_per_second < 1e11
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("zerofold.optim.host_speed.usable_cores", lambda: 4)
    assert host_candidates() == [(3, None), (2, None), (1, None)]
    monkeypatch.setattr("zerofold.optim.host_speed.usable_cores", lambda: 64)
    bound = [(threads, cores) for threads, cores in host_candidates() if cores is not None]
    assert [(threads, len(cores)) for threads, cores in bound] == [(32, 32)]


def test_the_most_threads_of_those_that_are_fast_and_leave_the_caller_its_speed() -> None:
    bound = frozenset([1, 2])

    def best(*trials: tuple[int, frozenset[int] | None, float, float]) -> tuple[int, frozenset[int] | None]:
        found = best_of([HostTrial(HostSpeed(threads, cores, rate), caller) for threads, cores, rate, caller in trials])
        return found.threads, found.cores

    assert best((12, None, 3.1e9, 90.0), (8, None, 3.3e9, 100.0), (6, None, 2.9e9, 100.0)) == (12, None)
    assert best((12, None, 3.3e9, 70.0), (8, None, 3.3e9, 100.0)) == (8, None)  # the caller would be too slow
    assert best((12, None, 2.9e9, 99.0), (8, None, 3.3e9, 100.0)) == (8, None)
    assert best((2, None, 3.0e9, 99.0), (2, bound, 3.2e9, 99.0)) == (2, None)  # too little for threads that cannot move
    assert best((2, None, 3.0e9, 99.0), (2, bound, 3.4e9, 99.0)) == (2, bound)
    assert best((2, bound, 3.4e9, 99.0)) == (2, bound)


def test_the_next_smaller_number_of_threads_is_named_to_be_tried() -> None:
    def fewer(*trials: tuple[int, frozenset[int] | None, float]) -> int | None:
        return best_of([HostTrial(HostSpeed(threads, cores, rate), 1.0) for threads, cores, rate in trials]).fewer

    bound = frozenset(range(8))
    assert fewer((12, None, 3.0e9), (8, None, 3.0e9), (6, None, 3.0e9), (8, bound, 3.0e9)) == 8
    assert fewer((12, None, 1.0e9), (8, None, 3.0e9), (6, None, 2.0e9), (8, bound, 3.0e9)) == 6
    assert fewer((1, None, 3.0e9)) is None


def test_a_job_that_is_over_keeps_nothing() -> None:
    """An update holds its jobs, and what a job does at its end holds the update: with it all gradients of a step."""

    class Update:
        jobs: tuple[object, ...] = ()

        def sent(self) -> None:
            pass

    pool, update = HostPool(1), Update()
    job = pool.submit([lambda: None], update.sent)
    update.jobs = (job,)
    job.wait()
    watched = weakref.ref(update)
    gc.disable()
    try:
        del update, job
        pool.submit([], lambda: None).wait()  # the thread is through with the job
        assert watched() is None
    finally:
        gc.enable()
        pool.close()


def _shares(steps: int, seconds: Callable[[int, float], tuple[float, float]], bus: float = 0.0) -> list[float]:
    """Of each update, as they come about: what is dealt now streams in the next step. `bus`: what a step takes longer
    when all of an update is on it."""
    timing = TunedShare(0.65)
    dealt, ran, shares, now = timing.next, None, [], 0.0
    for step in range(steps):
        timing.tune(ran, now)
        timing.begin()
        ran = dealt
        timing.host_seconds, timing.device_seconds = seconds(step, ran.device_share)
        now += 1.0 + max(timing.host_seconds, timing.device_seconds) + bus * (ran.device_share == 1)
        dealt = timing.next
        shares.append(ran.device_share)
    return shares


def test_the_share_of_the_device_goes_where_both_are_done_together() -> None:
    def seconds(step: int, share: float) -> tuple[float, float]:
        slower = 3.0 if step in (12, 13) else 1.0  # something else ran on the host
        return slower * (1.0 - share), 0.8 * share

    shares = _shares(32, seconds)
    assert shares[:3] == [0.65] * 3  # the first update does not count, and what one says comes a step later
    assert shares[5:7] == [1.0, 1.0]  # tried, and not better
    assert shares[7:13] == pytest.approx([0.556] * 6, abs=0.02)
    assert max(shares[13:]) <= 0.556 + 2 * 0.1 + 0.02
    assert shares[-4:] == pytest.approx([0.556] * 4, abs=0.02)


def _disturbing(step: int, share: float) -> tuple[float, float]:
    if step >= 40:  # until whatever filled the host's memory is over
        return 1.0 - share, 0.8 * share
    return (2.0 * (1.0 - share), share) if share < 1 else (0.0, 0.5)


def test_the_device_updates_alone_where_the_host_only_disturbs_it() -> None:
    shares = _shares(90, _disturbing)
    assert shares[8:40] == [1.0] * 32
    assert shares[80:] == pytest.approx([0.556] * 10, abs=0.04)  # seen at the next trial


def test_the_device_does_not_update_alone_where_other_work_waits_for_the_bus() -> None:
    """Its own seconds are fewer, and the step takes longer."""
    shares = _shares(60, _disturbing, bus=0.4)
    assert [step for step, share in enumerate(shares) if share == 1] == [5, 6]


def _pools(steps: int, speed: dict[int, float], disturbs: Callable[[int, int], float]) -> list[Split]:
    """Of each update, with pools of so much speed beside a device of 1.0. `disturbs`: what a step takes longer."""
    timing = TunedShare(0.65, pools=len(speed))
    dealt, ran, splits, now = timing.next, None, [], 0.0
    for step in range(steps):
        timing.tune(ran, now)
        ran, dealt = dealt, timing.next  # what is dealt streams in the next step
        share = ran.device_share
        timing.host_seconds, timing.device_seconds = (1 - share) / speed[ran.pool], share
        now += 1.0 + max(timing.host_seconds, timing.device_seconds) + (disturbs(step, ran.pool) if share < 1 else 0.0)
        splits.append(ran)
    return splits


def test_a_smaller_pool_is_taken_where_steps_are_shorter_with_it() -> None:
    found = _pools(30, {0: 1.0, 1: 0.8}, lambda step, pool: 0.4 if pool == 0 else 0.0)
    assert [split.pool for split in found] == [0] * 5 + [1, 1] + [0] * 3 + [1] * 20
    assert [step for step, split in enumerate(found) if split.device_share == 1] == [7, 8]  # tried as well
    assert found[-1].device_share == pytest.approx(1 / 1.8, abs=0.02)  # its own


def test_the_first_pool_stays_unless_another_way_is_clearly_better() -> None:
    found = _pools(30, {0: 1.0, 1: 0.99}, lambda step, pool: 0.01 if pool == 0 else 0.0)
    assert {split.pool for split in found[11:]} == {0}


def test_what_is_not_taken_is_tried_again() -> None:
    """The smaller pool was better only while something else ran."""
    found = _pools(100, {0: 1.0, 1: 0.9}, lambda step, pool: 0.3 if pool == 0 and step < 40 else 0.0)
    assert {split.pool for split in found[12:60]} == {1}
    assert {split.pool for split in found[80:]} == {0}


def test_the_device_is_alone_where_every_pool_disturbs_it() -> None:
    found = _pools(30, {0: 1.0, 1: 0.9}, lambda step, pool: 0.9)
    assert {split.device_share for split in found[12:]} == {1.0}


def test_a_share_of_all_or_nothing_stays() -> None:
    for share in (0.0, 1.0):
        timing = TunedShare(share)
        for _ in range(6):
            timing.tune(Split(share))
            timing.host_seconds, timing.device_seconds = 1.0, 0.5
        assert timing.next == Split(share)


def test_a_process_that_ends_first_finishes_what_was_submitted() -> None:
    program = """
import torch
from zerofold.optim.host_pool import HostPool
states = [torch.zeros(2**20) for _ in range(10)]
blocks = [lambda state=state: [state.add_(1) for _ in range(20)] for state in states]
HostPool(2).submit(blocks, lambda: print(int(sum(state.min() for state in states)), flush=True))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "200\n"), ended.stderr


def test_numbers_of_a_step_are_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in host memory are submitted by the main thread, those from a file by another."""
    monkeypatch.setattr(on_host, "_MANY", 1)
    pool = HostPool(1)
    update, scaling = on_host.HostUpdate(torch.device("cpu"), None, pool), Scaling(None, None)
    settings = AdamSettings(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=True, maximize=False)
    interval = sys.getswitchinterval()

    def ask(first: int) -> bool:
        asked: Any = [(SimpleNamespace(scaling=scaling), PieceWork(0, 1, torch.ones(1), settings, first, 0))] * 5000
        return all(update._numbers_of(*each).step[0].item() == first for each in asked)

    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(2) as threads:
            assert all(threads.map(ask, range(2)))
    finally:
        sys.setswitchinterval(interval)
        pool.close()
