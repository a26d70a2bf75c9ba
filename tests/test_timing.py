"""Where the time of a step goes: every moment counts once, a device's events are read late, and off means off."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofold as zf
from models import Block as TinyBlock
from models import TinyGPT
from ranks import RankPool
from zerofold import timing
from zerofold.comm import Handle
from zerofold.timing import COMPUTE, GATHER, HOST, REDUCE, UPDATE, Clock, Tape

CPU = torch.device("cpu")
PAUSE_S = 0.3


class Events:
    """Stands in for a device: events are numbers, and are over when the device has come to them."""

    def __init__(self) -> None:
        self.clock, self.reached, self.made, self.free = 0.0, -1.0, 0, list[list[float]]()

    def now(self) -> list[float]:
        event = self.free.pop() if self.free else [0.0]
        self.made += 1
        event[0] = self.clock
        return event

    def is_over(self, event: list[float]) -> bool:
        return event[0] <= self.reached

    def after(self, first: list[float], event: list[float]) -> float:
        assert self.is_over(event), "read before the device has come to it"
        return event[0] - first[0]

    def take_back(self, events: list[list[float]]) -> None:
        self.free += events


def test_what_is_inside_another_is_not_counted_twice() -> None:
    events = Events()
    tape = Tape(CPU, stamps=events)
    events.clock = 1.0
    tape.begin_update()
    events.clock = 3.0
    with tape.spent(HOST, "a"):
        events.clock = 7.0
    events.clock = 8.0
    with tape.paused():
        events.clock = 100.0
    tape.end_step()
    events.reached = 100.0
    tape.read()
    spent = {name: seconds for name, seconds in tape.seconds.items() if seconds}
    assert spent == {COMPUTE: 1.0, UPDATE: 3.0, HOST: 4.0}


class _Ready:
    def wait(self) -> None:
        """Nothing to wait for."""


def test_a_collective_takes_three_events_of_the_device() -> None:
    """An event costs the host and the device some microseconds each: when it began, and both ends of the wait."""
    events = Events()
    tape = Tape(CPU, stamps=events)
    comm = SimpleNamespace(traffic=SimpleNamespace(clock=Clock(tape)), is_gloo=False, overlap=True)
    call = SimpleNamespace(purpose=GATHER, unit="blocks.7", nbytes=100)
    before = events.made
    handle = Handle(comm, call, [_Ready()])  # type: ignore[arg-type]
    handle._wait = lambda: None  # type: ignore[method-assign]
    events.clock = 1.0
    handle.wait()
    assert events.made - before == 3
    events.clock = events.reached = 2.0
    tape.end_step()
    (step,) = tape.last_steps
    named = {span.name: span.end - step.begin for span in step.spans}
    assert named == {"wait for gather blocks.7": 1.0, "gather blocks.7": 1.0}


def test_events_are_read_when_the_device_has_come_to_them_and_used_again() -> None:
    events = Events()
    tape = Tape(CPU, stamps=events, keep=2)
    kept = []
    for step in range(20):
        with tape.spent(GATHER, "a"):
            events.clock += 2.0
        tape.forward("a")
        events.clock += 1.0
        tape.forward_ends("a")
        tape.end_step()
        assert tape.steps == max(0, step), "the step that has just ended is read with the next"
        events.reached = events.clock
        kept.append(len(events.free))
    tape.read()
    assert (tape.steps, tape.seconds[GATHER], tape.seconds[COMPUTE]) == (20, 40.0, 20.0)
    assert [span.end - span.begin for span in tape.last_steps[-1].spans if span.category == "forward"] == [1.0]
    assert len(tape.last_steps) == 2
    assert max(kept[5:]) == min(kept[5:]) > 0  # the number of events does not grow


def test_spans_are_true_however_late_they_are_read() -> None:
    """A gather that is waited for in the next step, whose first stamp is that step's no more."""
    events, began = Events(), None
    tape = Tape(CPU, stamps=events, keep=2)
    for _ in range(10):
        if began is not None:
            tape.on_wire(GATHER, "a", began, 8)
        events.clock += 3.0
        began = tape.stamp()
        events.clock += 1.0
        tape.end_step()
        events.reached = events.clock
    tape.read()
    for _ in range(20):  # the next step is under way when somebody looks
        events.clock += 0.1
        tape.stamp()
    events.reached = events.clock
    wires = [span for step in tape.last_steps for span in step.spans]
    first = tape.last_steps[0].begin
    assert [(span.begin - first, span.end - first) for span in wires] == [(-1.0, 0.0), (3.0, 4.0)]


@pytest.mark.parametrize(
    ("looked_at", "shown"),
    [([1, 2, 3, 4, 8, 9], [8, 9]), ([1, 2, 3, 4, 10], [3, 4]), ([1, 5, 9], [9]), ([], []), (range(1, 11), [9, 10])],
)
def test_samples_of_a_step_are_its_own_at_their_own_times(looked_at: list[int], shown: list[int]) -> None:
    """So is a gather that was begun in the step before, whose stamps nobody may have used again."""
    events, began = Events(), None
    tape = Tape(CPU, stamps=events, keep=2)
    begin = time.perf_counter()
    tape.sample = lambda _: {"clock": round(1000 * events.clock)}
    for step in range(1, 11):
        tape.looks = step in looked_at
        for _ in range(2):
            events.clock += 0.25
            if began is not None:
                tape.on_wire(GATHER, "a", began, 8)
                began = None
            tape.take_sample()
        began = tape.stamp()
        events.clock += 0.5 * step
        tape.end_step()
        events.reached = events.clock
        tape.read()
    steps = tape.last_steps
    assert [step.number for step in steps] == shown
    for step in steps:
        ends = [0.5 * number * (number + 1) / 2 + 0.5 * number for number in (step.number - 1, step.number)]
        assert (step.begin - begin, step.end - begin) == pytest.approx(ends, abs=0.01)
        at = [sample.at - begin for sample in step.samples]
        assert at == pytest.approx([ends[0] + 0.25, ends[0] + 0.5], abs=0.01)
        assert [sample.nbytes["clock"] / 1000 for sample in step.samples] == pytest.approx(at, abs=0.01)
        wires = [span.end - span.begin for span in step.spans if span.lane == "wire"]
        assert wires == ([] if step.number == 1 else pytest.approx([0.5 * (step.number - 1) + 0.25], abs=0.01))


def test_an_update_that_raised_does_not_go_on() -> None:
    events = Events()
    tape = Tape(CPU, stamps=events)
    tape.begin_update()
    events.clock = 1.0
    tape.begin_update()
    events.clock = 2.0
    tape.end_step()
    with tape.spent(REDUCE):
        events.clock = 5.0
    tape.end_step()
    events.reached = 5.0
    tape.read()
    assert (tape.seconds[UPDATE], tape.seconds[REDUCE]) == (2.0, 3.0)


# on real ranks


def prepared(stage: int | str = 3, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zf.prepare(model, optimizer, stage=stage, units=TinyBlock, **options)
    return model, optimizer, torch.randint(0, 90, (2, 16))


def train(model: Any, optimizer: Any, tokens: torch.Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def held_up(where: str, stage: int) -> dict[str, float]:
    """Rank 1 is slow in one place; what the ranks then wait for."""
    model, optimizer, tokens = prepared(stage)
    train(model, optimizer, tokens)
    with zf.ledger(model).record():
        if dist.get_rank() == 1:
            if where == "forward":
                model.blocks[0].register_forward_pre_hook(lambda *_: time.sleep(PAUSE_S))
            else:
                model.blocks[1].register_full_backward_hook(lambda *_: time.sleep(PAUSE_S))
        train(model, optimizer, tokens, 1)
    found = zf.ledger(model).snapshot()["time"]
    zf.close(model)
    return found


@pytest.mark.parametrize(
    ("where", "stage", "categories"), [("forward", 3, ["gather"]), ("backward", 0, ["reduce", "other"])]
)
def test_waiting_for_a_slow_rank_is_exposed_communication(
    ranks: RankPool, where: str, stage: int, categories: list[str]
) -> None:
    waiting, slow = ranks(2, held_up, where, stage)
    exposed, own = (sum(times[category] for category in categories) for times in (waiting, slow))
    assert exposed > 0.5 * PAUSE_S
    assert exposed > 2 * own
    assert slow["compute"] > 0.9 * PAUSE_S


class SlowAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        time.sleep(PAUSE_S)
        return super().step(closure)


def whole_and_parts() -> tuple[float, dict[str, float], int]:
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = SlowAdamW(model.parameters(), lr=1e-3)
    zf.prepare(model, optimizer, stage=2, units=TinyBlock)
    tokens = torch.randint(0, 90, (2, 16))
    began = time.perf_counter()
    recording = zf.ledger(model).record()
    model(tokens, tokens).backward()
    with recording.paused():
        time.sleep(PAUSE_S)
    optimizer.step()
    seconds = time.perf_counter() - began
    recording.stop()
    snapshot = zf.ledger(model).snapshot()
    zf.close(model)
    return seconds, snapshot["time"], snapshot["steps"]


def test_the_parts_make_the_whole_and_the_update_is_one_of_them(ranks: RankPool) -> None:
    for seconds, times, steps in ranks(2, whole_and_parts):
        assert steps == 1
        assert 0.5 * (seconds - PAUSE_S) < times["step"] < seconds - 0.99 * PAUSE_S
        assert PAUSE_S < times["update"] < times["step"]
        assert times["step"] == pytest.approx(sum(times[name] for name in timing.CATEGORIES))


def of_tiers(path: str) -> dict[str, dict[str, float]]:
    found = {}
    for tier in ("host", "nvme"):
        options = {"optimizer": tier, **({"path": path} if tier == "nvme" else {})}
        model, optimizer, tokens = prepared(3, precision="bf16", offload=options)
        with zf.ledger(model).record() as recording:
            train(model, optimizer, tokens, 3)
        found[tier] = zf.ledger(model).snapshot()["time"]
        found[tier]["lanes"] = len([s for step in recording.tape.last_steps for s in step.spans if s.lane != "main"])
        zf.close(model)
    return found


def test_waiting_for_host_and_disk_is_told_apart(ranks: RankPool, tmp_path: Any) -> None:
    (found,) = ranks(1, of_tiers, str(tmp_path))
    assert found["host"]["host"] > 0 == found["host"]["disk"]
    assert found["nvme"]["disk"] > 0
    assert found["host"]["lanes"] > 0 < found["nvme"]["lanes"]


def calls_into(module: Any, run: Callable[[], None]) -> int:
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename == module.__file__

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def on_and_off() -> tuple[int, int, int]:
    model, optimizer, tokens = prepared(3)
    train(model, optimizer, tokens)
    before = calls_into(timing, lambda: train(model, optimizer, tokens, 1))
    with zf.ledger(model).record():
        during = calls_into(timing, lambda: train(model, optimizer, tokens, 1))
    after = calls_into(timing, lambda: train(model, optimizer, tokens, 1))
    zf.close(model)
    return before, during, after


def test_off_costs_no_call(ranks: RankPool) -> None:
    for before, during, after in ranks(2, on_and_off):
        assert before == after == 0
        assert during > 20  # the counter counts


def peaks() -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer, tokens = prepared(3, precision="bf16")
    with zf.ledger(model).record():
        train(model, optimizer, tokens, 1)
        model(tokens, tokens).backward()
        full = zf.ledger(model).snapshot()
        optimizer.step()
        optimizer.zero_grad()
    empty = zf.ledger(model).snapshot()
    zf.close(model)
    return full, empty


def test_peaks_outlive_what_made_them(ranks: RankPool) -> None:
    for full, empty in ranks(1, peaks):
        assert full["state_bytes"]["gradients"] > 0 == empty["state_bytes"]["gradients"]
        peak = empty["peak_state_bytes"]
        assert peak["gradients"] >= full["state_bytes"]["gradients"]
        assert {state: peak[state] for state in ("parameters", "optimizer")} == {
            state: empty["state_bytes"][state] for state in ("parameters", "optimizer")
        }
        assert peak["gathered"] > 0 == empty["temporary_bytes"]["gathered"]


def sampled_steps() -> list[timing.StepTimes]:
    model, optimizer, tokens = prepared(3)
    with zf.ledger(model).record() as recording:
        train(model, optimizer, tokens, 7)
    found = recording.tape.last_steps
    zf.close(model)
    return found


def test_memory_rises_with_the_first_unit_and_falls_with_the_last(ranks: RankPool) -> None:
    for steps in ranks(2, sampled_steps):
        assert len(steps) == 2
        assert steps[0].number + 1 == steps[1].number
        for step in steps:
            assert all(step.begin <= sample.at <= step.end for sample in step.samples)
            first = next(span for span in step.spans if span.name == "forward blocks.0")
            gathered = [(sample.at, sample.nbytes["gathered"]) for sample in step.samples]
            assert gathered[0][0] < first.begin + 1e-3
            assert gathered[0][1] == 0 == gathered[-1][1]
            assert any(nbytes > 0 for at, nbytes in gathered if at <= first.begin)


def gathered_peak() -> tuple[int, int, list[dict[str, Any]]]:
    model, optimizer, tokens = prepared(3)
    with zf.ledger(model).record():
        train(model, optimizer, tokens)
    snapshot, units = zf.ledger(model).snapshot(), zf.ledger(model).units()
    zf.close(model)
    return snapshot["peak_state_bytes"]["gathered"], snapshot["peak_live_bytes"], units


def test_units_tell_their_states_peaks_and_traffic(ranks: RankPool) -> None:
    for gathered, live, units in ranks(2, gathered_peak):
        assert 0 < gathered <= live
        assert [unit["name"] for unit in units] == ["", "blocks.0", "blocks.1", "blocks.2"]
        block = units[1]
        padded = block["state_bytes"]["parameters"]
        assert block["parameters"] * 4 / 2 <= padded < block["parameters"] * 4 / 2 * 1.1
        assert block["state_bytes"]["optimizer"] == pytest.approx(2 * padded, rel=0.05)
        assert block["peak_bytes"]["gathered"] == 2 * padded
        assert block["peak_bytes"]["gradients"] >= padded
        assert set(block["comm_bytes"]) >= {"all_gather", "reduce_scatter"}


def test_a_model_is_recorded_once_at_a_time(ranks: RankPool) -> None:
    assert ranks(1, recorded_twice) == ["this model is being recorded already: stop that recording first"]


def recorded_twice() -> str:
    model = zf.shard(nn.Linear(4, 4), stage=1)
    try:
        with zf.ledger(model).record():
            zf.ledger(model).record()
    except RuntimeError as error:
        return str(error)
    finally:
        zf.close(model)
    return ""
