"""The simulator's clock on a GPU: messages take their time on streams, and compute goes on beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from zerofold.bench.gpt import GPT, Block, GPTSize, RandomTokens
from zerofold.plan.machine import Link
from zerofold.plan.presets import preset
from zerofold.plan.wires import Wires
from zerofold.simulation import Simulation, Training, World, simulate
from zerofold.simulation.clocks import CudaClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

MESSAGE = 0.02
SIZE = GPTSize(vocab=512, width=256, layers=3, heads=4, seq=32)


@pytest.fixture(scope="module")
def clock() -> CudaClock:
    return CudaClock(torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def forgotten(clock: CudaClock) -> None:
    clock.now()
    clock.forget()


def nothing() -> None:
    pass


def compute(clock: CudaClock, seconds: float) -> None:
    """Keeps the current stream busy."""
    clock.waiting.wait(seconds)


def test_a_message_takes_its_time(clock: CudaClock) -> None:
    begin = clock.now()
    ticket = clock.send("across", "all_gather", MESSAGE, nothing)
    assert not ticket.is_over()
    ticket.wait()
    took = clock.now() - begin
    assert took == pytest.approx(MESSAGE, rel=0.1)
    assert ticket.is_over()
    assert clock.exposed["all_gather"] == pytest.approx(MESSAGE, rel=0.1)


def test_messages_follow_each_other_on_one_wire_and_not_on_two(clock: CudaClock) -> None:
    for wires, expected in ((("across", "across"), 2 * MESSAGE), (("across", "inside"), MESSAGE)):
        begin = clock.now()
        tickets = [clock.send(wire, "all_gather", MESSAGE, nothing) for wire in wires]
        for ticket in tickets:
            ticket.wait()
        assert clock.now() - begin == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(("busy", "exposed"), [(2 * MESSAGE, 0.0), (MESSAGE / 2, MESSAGE / 2)])
def test_what_computes_beside_a_message_hides_it(clock: CudaClock, busy: float, exposed: float) -> None:
    begin = clock.now()
    ticket = clock.send("across", "reduce_scatter", MESSAGE, nothing)
    compute(clock, busy)
    ticket.wait()
    assert clock.now() - begin == pytest.approx(busy + exposed, rel=0.15)
    assert clock.exposed["reduce_scatter"] == pytest.approx(exposed, abs=0.1 * MESSAGE)


def test_a_message_begins_when_what_it_sends_is_computed(clock: CudaClock) -> None:
    begin = clock.now()
    compute(clock, MESSAGE)
    clock.send("across", "reduce_scatter", MESSAGE, nothing).wait()
    assert clock.now() - begin == pytest.approx(2 * MESSAGE, rel=0.15)


def test_waits_of_another_stream_are_not_exposed(clock: CudaClock) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        clock.send("across", "all_gather", MESSAGE, nothing).wait()
    compute(clock, MESSAGE)
    assert clock.exposed["all_gather"] == 0.0


def test_what_a_message_brings_is_there_after_the_wait(clock: CudaClock) -> None:
    values = torch.zeros(1000, device="cuda")
    sent = torch.full((1000,), 3.0, device="cuda")

    def fill() -> None:
        values.copy_(sent)

    ticket = clock.send("across", "all_gather", MESSAGE, fill)
    ticket.wait()
    assert values.sum().item() == 3000.0


def training(losses: list[Tensor], stage: str = "3") -> Training:
    def loss(model: nn.Module, device: torch.device) -> Tensor:
        tokens, targets = RandomTokens(SIZE, batch=2, rank=0).at(0)
        found: Tensor = model(tokens.to(device), targets.to(device))
        losses.append(found.detach())
        return found

    return Training(name="GPT", build=lambda: GPT(SIZE), loss=loss, batch=2, units=Block, stage=stage)


def run(rate: float, engine: str = "zerofold", stage: str = "3") -> Simulation:
    losses: list[Tensor] = []
    link = Link(rate=rate)
    here = World(size=8, wires=Wires(inside=link, across=link), machine=preset("H200"), device="cuda")
    found = simulate(training(losses, stage), here, engine=engine, steps=3)
    assert losses
    assert all(bool(torch.isfinite(loss)) for loss in losses)
    return found


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_step_on_slow_wires_takes_what_the_virtual_clock_says(stage: str) -> None:
    """So slow that computing hardly matters."""
    real = run(2e7, stage=stage)
    link = Link(rate=2e7)
    here = World(size=8, wires=Wires(inside=link, across=link), machine=preset("H200"))
    virtual = simulate(training([], stage), here)
    assert real.clock == "real"
    assert real.sent_bytes == pytest.approx(virtual.sent_bytes)
    assert real.wire_seconds == pytest.approx(virtual.wire_seconds)
    assert real.step_seconds - real.compute_seconds == pytest.approx(virtual.exposed_seconds, rel=0.15)
    assert sum(real.exposed.values()) == pytest.approx(real.exposed_seconds, rel=0.15)
    assert real.peak_bytes is not None
    assert real.peak_bytes > sum(real.state_bytes.values())


def test_fast_wires_expose_little() -> None:
    slow, fast = run(2e7), run(1e12)
    assert fast.exposed_seconds < 0.1 * slow.exposed_seconds


@pytest.mark.parametrize("stage", ["2", "3"])
def test_fsdp2_runs_under_the_same_wires(stage: str) -> None:
    ours, theirs = (run(2e7, engine, stage) for engine in ("zerofold", "fsdp2"))
    for operation in ("all_gather", "reduce_scatter"):
        # A small model fits under the bound on live bytes, so zerofold gathers less of it a second time.
        assert ours.sent_bytes[operation] <= 1.05 * theirs.sent_bytes[operation] <= 2 * ours.sent_bytes[operation]
    occupied = sum(theirs.wire_seconds.values())
    assert 0.5 * occupied < theirs.exposed_seconds <= 1.1 * occupied
    assert theirs.exposed == {}  # streams of its own wait
    assert theirs.step_seconds >= 0.95 * occupied


def test_clipping_and_other_precisions_stay_finite() -> None:
    for change in ({"clip": 1.0}, {"precision": "fp16"}, {"precision": "fp32"}):
        losses: list[Tensor] = []
        link = Link(rate=1e11)
        here = World(size=8, wires=Wires(inside=link, across=link), machine=preset("H200"), device="cuda")
        simulate(replace(training(losses), **change), here, steps=1)  # type: ignore[arg-type]
        assert all(bool(torch.isfinite(loss)) for loss in losses)
