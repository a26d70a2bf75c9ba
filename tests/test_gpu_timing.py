"""Where the time of a step goes on a GPU, by its events: the parts make the step, a wait is as long as it is, and
recording costs next to nothing."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from tests.ranks import RankPool
from torch import nn

import zerofold as zf
from zerofold.timing import CATEGORIES, COMPUTE, GATHER, UPDATE, Tape
from zerofold.train.gpt import GPT, Block, GPTConfig

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
WAIT_S, BUSY_S = 0.05, 0.02
CYCLES_TRIED = 20_000_000


def cycles(seconds: float) -> int:
    """Of torch.cuda._sleep."""
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(CYCLES_TRIED)
    torch.cuda.synchronize()
    return int(CYCLES_TRIED * seconds / (time.perf_counter() - began))


@needs_gpu
def test_a_wait_is_as_long_as_the_stream_stands_still() -> None:
    """The host is through at once; another stream keeps the computing one waiting for a while, behind some work."""
    device, side = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    wait, busy = cycles(WAIT_S), cycles(BUSY_S)
    tape = Tape(device)
    for _ in range(3):
        begun = torch.cuda.current_stream().record_event()
        torch.cuda._sleep(busy)  # hides part of what the other stream does
        with torch.cuda.stream(side):
            side.wait_event(begun)
            torch.cuda._sleep(wait)
        with tape.spent(GATHER, "a"):
            torch.cuda.current_stream().wait_stream(side)
        tape.begin_update()
        torch.cuda._sleep(busy)
        tape.end_update()
    assert tape.steps < 3, "read before the device has come to it"
    torch.cuda.synchronize()
    tape.read()
    assert tape.steps == 3
    spent = {name: seconds / 3 for name, seconds in tape.seconds.items()}
    assert spent[GATHER] == pytest.approx(WAIT_S - BUSY_S, rel=0.25)
    assert spent[COMPUTE] == pytest.approx(BUSY_S, rel=0.25)
    assert spent[UPDATE] == pytest.approx(BUSY_S, rel=0.25)
    waits = [span for step in tape.last_steps for span in step.spans if span.category == "wait"]
    assert [span.end - span.begin for span in waits] == pytest.approx([WAIT_S - BUSY_S] * 2, rel=0.25)


def prepared(config: GPTConfig, batch: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = zf.prepare(model, optimizer, precision="bf16", units=Block, clip=1.0, **options)
    return model, optimizer, torch.randint(0, config.vocab, (batch, config.seq), device="cuda")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def parts_and_whole(steps: int, **options: Any) -> tuple[float, dict[str, Any], list[Any], int]:
    model, optimizer, tokens = prepared(GPTConfig(layers=4, hidden=512, heads=8, seq=512), 8, **options)
    for _ in range(3):
        step(model, optimizer, tokens)
    torch.cuda.synchronize()
    recording = zf.ledger(model).record()
    began = time.perf_counter()
    for _ in range(steps):
        step(model, optimizer, tokens)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    recording.stop()
    snapshot = zf.ledger(model).snapshot()
    peak = recording.peak_bytes()["device"]
    zf.close(model)
    return seconds / steps, snapshot, list(recording.tape.last_steps), peak


@needs_gpu
@pytest.mark.parametrize(
    ("ranks_used", "options"),
    [
        (1, {"stage": 3}),
        (1, {"stage": 0}),
        (2, {"stage": 3}),
        (2, {"stage": 2}),
        (1, {"stage": 3, "offload": {"optimizer": "host"}}),
    ],
    ids=["alone", "alone 0", "stage 3", "stage 2", "host"],
)
def test_the_parts_make_the_step(ranks: RankPool, ranks_used: int, options: dict[str, Any]) -> None:
    for seconds, snapshot, last, peak in ranks(ranks_used, parts_and_whole, 10, **options):
        times = snapshot["time"]
        assert snapshot["steps"] == 10
        assert times["step"] == pytest.approx(sum(times[name] for name in CATEGORIES))
        assert times["step"] == pytest.approx(seconds, rel=0.1)
        assert times["compute"] > 0 < times["update"]
        assert all(times[name] >= 0 for name in CATEGORIES)
        assert peak >= snapshot["tier_bytes"]["device"]["parameters"]
        for each in last:
            spans = [span for span in each.spans if span.lane == "main"]
            assert {span.category for span in spans} >= {"forward", "backward", "update"}
            slack = 0.02 * (each.end - each.begin) + 1e-3
            assert all(each.begin - slack <= span.begin <= span.end <= each.end + slack for span in spans)
            in_order = [span.unit for span in spans if span.category == "forward" and span.unit]
            assert in_order == [f"blocks.{number}" for number in range(4)]


def cost() -> tuple[float, float]:
    """Median seconds of steps of a model of 1e8 parameters, off and on, turn by turn."""
    config = GPTConfig(vocab=32_000, layers=12, hidden=768, heads=12, seq=1024)
    model, optimizer, tokens = prepared(config, 8, stage=3)
    assert 1e8 < sum(p.numel() for p in model.parameters()) < 1.5e8
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(24):
        is_on = bool(turn % 2)
        recording = zf.ledger(model).record() if is_on else None
        for _ in range(5):  # in the first of them memory is looked at, which later ones seldom do
            step(model, optimizer, tokens)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            step(model, optimizer, tokens)
        torch.cuda.synchronize()
        if turn >= 4:  # the first ones learn the order and fill the caches
            found[is_on].append((time.perf_counter() - began) / 10)
        if recording is not None:
            recording.stop()
    zf.close(model)
    return statistics.median(found[False]), statistics.median(found[True])


@needs_gpu
def test_recording_costs_less_than_a_hundredth_of_a_step(ranks: RankPool) -> None:
    ((off, on),) = ranks(1, cost)
    print(f"a step: {1000 * off:.2f} ms off, {1000 * on:.2f} ms on")
    assert on < 1.01 * off


def beside_a_graph() -> tuple[float, int]:
    """Somebody else's CUDA graph is captured and replayed while a model is recorded."""
    model, optimizer, tokens = prepared(GPTConfig(layers=2, hidden=128, heads=4, seq=64), 2, stage=3)
    with zf.ledger(model).record():
        step(model, optimizer, tokens)
        still = torch.ones(64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            doubled = still * 2
        graph.replay()
        step(model, optimizer, tokens)
    steps = zf.ledger(model).snapshot()["steps"]
    zf.close(model)
    return doubled.sum().item(), steps


@needs_gpu
def test_a_graph_may_be_captured_between_steps(ranks: RankPool) -> None:
    assert ranks(1, beside_a_graph) == [(128.0, 2)]
