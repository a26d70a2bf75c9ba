"""Who looks when calls end is no burden: a recorded script ends with 0 while a call is under way, nobody waits for a
rank that does not come, and a call that ends long before its result is asked for is shown so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofold as zf
from ranks import RankPool
from zerofold.ends import SLICE, Ends

LATE_S, ASLEEP_S = 0.3, 1.0

# The gather of whole parameters after the last step is under way when the script is over. Nothing is closed.
ENDS_RECORDING = """
import sys, torch, torch.distributed as dist, zerofold as zf
folder, rank, stage = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(6)))
model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=stage, units=torch.nn.Linear)
with zf.ledger(model).record():
    for _ in range(3):
        model(torch.ones(4, 600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("stage", ["dp", "0", "1", "2", "3"])
def test_a_recorded_script_that_ends_after_its_last_step_ends_with_0(tmp_path: Path, stage: str) -> None:
    environment = {**os.environ, **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS_RECORDING, str(tmp_path), str(rank), stage],
            env=environment,
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(errors)


def seen_ends() -> tuple[float, float, float]:
    """Of a call that the other rank is late for, while this one is busy: when it began, ended, and was asked for."""
    ends, seen, rank = Ends(), list[float](), dist.get_rank()
    dist.barrier()
    began = time.perf_counter()
    if rank == 1:
        time.sleep(LATE_S)
    work = dist.all_reduce(torch.ones(8), async_op=True)
    ends.watch(work, seen.append)
    time.sleep(ASLEEP_S)
    work.wait()
    asked = time.perf_counter()
    ends.close()
    return began, *seen, asked


def test_a_call_ends_when_it_is_over_not_when_its_result_is_used(ranks: RankPool) -> None:
    began, ended, asked = ranks(2, seen_ends)[0]
    assert LATE_S * 0.9 < ended - began < asked - began - 0.3 * ASLEEP_S


def not_waited_for() -> float:
    """Seconds until a rank has stopped looking at a call that the other one has yet to make."""
    ends, rank = Ends(), dist.get_rank()
    dist.barrier()
    if rank == 1:
        time.sleep(4 * SLICE.total_seconds())
    work = dist.all_reduce(torch.ones(8), async_op=True)
    began = time.perf_counter()
    if rank == 0:
        ends.watch(work, lambda at: None)
        time.sleep(0.1)
    ends.close()
    seconds = time.perf_counter() - began
    work.wait()
    return seconds


def test_nobody_waits_for_a_rank_that_does_not_come(ranks: RankPool) -> None:
    assert ranks(2, not_waited_for)[0] < 2 * SLICE.total_seconds()


def gathers_of_a_step() -> list[float]:
    """Seconds that the second unit's took, behind a slow first one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, stage=3, units=torch.nn.Linear)
    model[0].register_forward_hook(lambda *_: time.sleep(LATE_S))  # meanwhile the next unit arrives
    with zf.ledger(model).record() as recording:
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    spans = recording.tape.last_steps[-1].spans
    zf.close(model)
    return [span.end - span.begin for span in spans if span.lane == "wire" and span.name == "gather 1"]


def test_a_gather_behind_computing_is_as_long_as_it_took(ranks: RankPool) -> None:
    """Not until the computing that it hides behind is over."""
    for seconds in ranks(2, gathers_of_a_step):
        assert 0 < min(seconds) < 0.5 * LATE_S
