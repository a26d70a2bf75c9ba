"""Rank 0 of a modelled world: times worked out by hand, bytes of the formulas, memory as with real tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofold as zf
from zerofold.bench.gpt import GPT, Block, GPTSize, RandomTokens
from zerofold.engine import Engine
from zerofold.plan.compute import ATTAINED
from zerofold.plan.machine import Link, Machine
from zerofold.plan.presets import preset
from zerofold.plan.wires import Wires, free
from zerofold.simulation.clocks import VirtualClock
from zerofold.simulation.curves import curve, efficiency
from zerofold.simulation.engines import Training
from zerofold.simulation.group import Network, modelled_world
from zerofold.simulation.memory import LiveBytes
from zerofold.simulation.run import World, simulate

WIDTH, SAMPLES, RANKS = 256, 512, 8
UNIT_BYTES = 4 * WIDTH**2
H200 = preset("H200")
SIZE = GPTSize(vocab=512, width=256, layers=3, heads=4, seq=32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def two_layers(**options: object) -> Training:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))

    def loss(model: nn.Module, device: torch.device) -> Tensor:
        result: Tensor = model(torch.ones(SAMPLES, WIDTH, device=device)).sum()
        return result

    given = Training(name="two", build=build, loss=loss, batch=SAMPLES, units=nn.Linear, precision=None)
    return replace(given, **options)  # type: ignore[arg-type]


def one_second_a_product() -> Machine:
    """Memory and the host cost nothing, so a step is what its matrix products and messages are."""
    rate = 2 * SAMPLES * WIDTH**2 / ATTAINED
    return replace(H200, flops=rate, flops_fp32=rate, memory_rate=float("inf"), kernel_seconds=0.0)


def wires_for(seconds: float) -> Wires:
    """A gather or a reduction of one layer takes so long, in a node of 8."""
    link = Link(rate=UNIT_BYTES * (RANKS - 1) / RANKS / seconds)
    return Wires(inside=link, across=link, per_node=RANKS)


def gpt(batch: int = 2, *, stage: str = "3", precision: str | None = "bf16", checkpointing: bool = True) -> Training:
    def loss(model: nn.Module, device: torch.device) -> Tensor:
        result: Tensor = model(*RandomTokens(SIZE, batch=batch, rank=0, device=device, batches=1).at(0))
        return result

    def build() -> nn.Module:
        return GPT(SIZE, checkpointing=checkpointing)

    return Training(name="gpt", build=build, loss=loss, batch=batch, units=Block, stage=stage, precision=precision)


def world(size: int, wires: Wires | None = None, **options: object) -> World:
    given = World(size=size, wires=wires or Wires(inside=H200.inside, across=H200.across), machine=H200)
    return replace(given, **options)  # type: ignore[arg-type]


# Both layers fit the bound on live bytes, so each is gathered once: g0 and g1 begin with the step. Forward takes a
# second a layer, backward two (one where no gradient of the input is wanted), and a message m seconds.
#
# m = 0.5   wire     [g0][g1]                       [r1]     [r0]       wire     m = 3: g0 until 3, g1 until 6,
#           device       [f0    ][f1    ][b1            ][b0    ]xx     r1 from 9 until 12, r0 until 15
BY_HAND = [
    (0.5, True, 6.0, {"all_gather": 0.5, "reduce_scatter": 0.5}),
    (3.0, True, 15.0, {"all_gather": 3.0 + 2.0, "reduce_scatter": 2.0 + 3.0}),
    (0.5, False, 7.0, {"all_gather": 2 * 0.5, "reduce_scatter": 2 * 0.5}),
    (3.0, False, 17.0, {"all_gather": 2 * 3.0, "reduce_scatter": 2 * 3.0}),
]


@pytest.mark.parametrize(("message", "overlap", "step", "exposed"), BY_HAND)
def test_a_step_takes_what_it_takes_by_hand(
    message: float, overlap: bool, step: float, exposed: dict[str, float]
) -> None:
    here = world(RANKS, wires_for(message), machine=one_second_a_product())
    found = simulate(two_layers(overlap=overlap), here)
    assert found.step_seconds == pytest.approx(step, rel=1e-3)
    assert found.compute_seconds == pytest.approx(5.0, rel=1e-3)
    for operation, seconds in exposed.items():
        assert found.exposed[operation] == pytest.approx(seconds, rel=1e-3)
        assert found.wire_seconds[operation] == pytest.approx(2 * message, rel=1e-3)
        assert found.sent_bytes[operation] == 2 * UNIT_BYTES * (RANKS - 1) / RANKS
    assert found.exposed_seconds + found.compute_seconds + found.other_seconds == pytest.approx(step, rel=1e-3)


# Three layers, messages of 3 s. What is gathered last in forward stays for backward.
# stage 2   wire      [g0      ][g1      ][g2      ].........[r2      ][r1      ][r0      ]     g0 begins with the step
#           compute            [f0]      [f1]      [f2][b2  ][b1   ][b0]                       3, 6, 9; 12, 15, 18 to 21
# stage 3   wire      [g0      ][g1      ][g2      ].........[r2      ][g0      ][r1    ][r0   ]
#           compute            [f0]      [f1]      [f2][b2  ][b1   ]            [b0]           b0 from 18, r1 too, to 24
THREE = [
    ("2", 3.0, 21.0, {"all_gather": 3.0 + 2.0 + 2.0, "reduce_scatter": 6.0}),
    ("3", 3.0, 24.0, {"all_gather": 3.0 + 2.0 + 2.0 + 4.0, "reduce_scatter": 5.0}),
    ("2", 1.0, 10.0, {"all_gather": 1.0, "reduce_scatter": 1.0}),
    ("3", 1.0, 10.0, {"all_gather": 1.0, "reduce_scatter": 1.0}),
]


@pytest.mark.parametrize(("stage", "message", "step", "exposed"), THREE)
def test_three_units_take_what_they_take_by_hand(
    stage: str, message: float, step: float, exposed: dict[str, float]
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))

    here = world(RANKS, wires_for(message), machine=one_second_a_product())
    found = simulate(replace(two_layers(stage=stage), build=build), here)
    assert found.step_seconds == pytest.approx(step, rel=1e-3)
    assert found.compute_seconds == pytest.approx(8.0, rel=1e-3)
    assert {operation: found.exposed[operation] for operation in exposed} == pytest.approx(exposed, rel=1e-3)


def test_the_same_simulation_gives_the_same_numbers() -> None:
    assert simulate(gpt(), world(64)) == simulate(gpt(), world(64))


def test_a_slow_host_keeps_a_fast_device_waiting() -> None:
    quick = simulate(gpt(), world(1, machine=replace(H200, kernel_seconds=0.0)))
    slow = simulate(gpt(), world(1, machine=replace(H200, kernel_seconds=1e-3)))
    assert quick.other_seconds == pytest.approx(0.0, abs=1e-6)
    assert slow.compute_seconds == pytest.approx(quick.compute_seconds)
    assert slow.other_seconds > 10 * slow.compute_seconds


@pytest.mark.parametrize(("stage", "ranks"), [("0", 8), ("1", 8), ("2", 1000), ("3", 8), ("3", 1000)])
def test_bytes_are_those_of_the_formulas_and_of_the_ledger(stage: str, ranks: int) -> None:
    found = simulate(gpt(stage=stage), world(ranks))
    part, psi = (ranks - 1) / ranks, SIZE.parameters
    padding = 1.01 if ranks == 8 else 1.25  # 1000 shards of each unit, each in steps of 128 bytes
    fp32, bf16 = 4 * psi * part, 2 * psi * part
    if stage == "0":
        assert 1 <= found.sent_bytes["all_reduce"] / (2 * fp32) <= padding
        return
    assert 1 <= found.sent_bytes["reduce_scatter"] / fp32 <= padding
    gathers = (1, 1) if stage in "12" else (1, 2)  # at stage 3 what stays for backward is gathered once
    assert gathers[0] <= found.sent_bytes["all_gather"] / bf16 <= gathers[1] * padding


def test_the_group_counts_what_the_ledger_counts() -> None:
    network = Network(Wires(inside=H200.inside, across=H200.across), VirtualClock(), torch.device("cpu"))
    with modelled_world(24, network):
        model = GPT(SIZE)
        optimizer = torch.optim.AdamW(model.parameters())
        zf.prepare(model, optimizer, stage=3, precision="bf16", units=Block)
        before = zf.ledger(model).snapshot()["comm_bytes"]
        network.forget()
        model(*RandomTokens(SIZE, batch=1, rank=0).at(0)).backward()
        after = zf.ledger(model).snapshot()["comm_bytes"]
        zf.close(model, gather=False)
    for operation in ("all_gather", "reduce_scatter"):
        assert network.sent[operation] == pytest.approx(after[operation] - before.get(operation, 0), abs=1)


@pytest.mark.parametrize(
    ("stage", "checkpointing"), [("0", True), ("2", False), ("3", True), ("3", False), ("hsdp", True), ("hpz", True)]
)
def test_the_peak_on_the_meta_device_is_that_of_real_tensors(stage: str, checkpointing: bool) -> None:
    training = gpt(stage=stage, checkpointing=checkpointing)
    shapes, real = (simulate(training, world(16, device=device, is_virtual=True)) for device in ("meta", "cpu"))
    assert shapes.state_bytes == real.state_bytes
    assert shapes.peak_bytes == pytest.approx(real.peak_bytes, rel=2e-3)  # attention has other kernels on the CPU
    assert shapes.peak_bytes is not None
    assert shapes.peak_bytes > sum(shapes.state_bytes.values())


def test_without_attention_the_peaks_are_equal_to_the_byte() -> None:
    training = two_layers(precision="bf16")
    shapes, real = (simulate(training, world(16, device=device, is_virtual=True)) for device in ("meta", "cpu"))
    counters = 2 * 4  # of the optimizer's steps, which are in host memory: here that is the device's as well
    assert real.peak_bytes is not None
    assert shapes.peak_bytes == real.peak_bytes - counters


def test_memory_that_comes_and_goes_is_counted_when_it_is_there() -> None:
    live = LiveBytes("cpu")
    one, other = torch.empty(1000), torch.empty(1000)
    live.see(one)
    one.untyped_storage().resize_(0)
    live.look()
    live.see(other)
    assert (live.now, live.peak) == (4000, 4000)  # never both at once
    one.untyped_storage().resize_(4000)
    live.see(one)
    assert (live.now, live.peak) == (8000, 8000)
    one.untyped_storage().resize_(0)
    del other
    more = torch.empty(2000)
    live.see(more)
    assert (live.now, live.peak) == (8000, 8000)  # what went unseen does not make a peak


def test_more_ranks_wait_more_and_hold_less() -> None:
    rings = Wires(inside=H200.inside, across=H200.across, steps="ring")
    points = list(curve(lambda batch: gpt(batch), world(1, rings), [1, 8, 64, 1024], scaling="weak", batch=2))
    exposed, peaks = [point.exposed_seconds for point in points], [point.peak_bytes or 0 for point in points]
    assert exposed == sorted(exposed)
    assert exposed[0] == 0.0
    assert peaks[:3] == sorted(peaks[:3], reverse=True)  # then padding is most of this small model
    ratios = [efficiency(points, point) for point in points]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == 1.0


def test_strong_scaling_shares_the_samples() -> None:
    points = list(curve(lambda batch: gpt(batch), world(1), [1, 4], scaling="strong", batch=8))
    assert [point.batch for point in points] == [8, 2]
    assert points[0].flops is not None
    assert points[1].flops == points[0].flops / 4


def test_a_hundred_thousand_ranks_need_no_list_of_them() -> None:
    network = Network(free(), VirtualClock(), torch.device("meta"))
    with modelled_world(100_000, network):
        with torch.device("meta"):
            model = GPT(SIZE)
        zf.shard(model, stage=3, units=Block, device="meta")
        for slab in Engine.of(model).slabs():
            assert isinstance(slab.layout.bounds, range)
            assert slab.layout.world == 100_000
            assert len(slab.layout.ranges(0)) == 100_000
        zf.close(model, gather=False)
    found = simulate(gpt(), world(100_000))
    assert found.world == 100_000
    assert found.nodes == 12_500
    assert found.exposed_seconds > 0


def test_time_that_passes_agrees_with_the_virtual_clock() -> None:
    """On wires so slow that computing hardly matters, on the real clock of the CPU."""
    link = Link(rate=5e7)
    slow = Wires(inside=link, across=link)
    real, virtual = (
        simulate(gpt(), world(8, slow, device="cpu", is_virtual=is_virtual), steps=1) for is_virtual in (False, True)
    )
    assert real.clock == "real"
    assert virtual.clock == "virtual"
    assert real.sent_bytes == pytest.approx(virtual.sent_bytes)
    assert real.wire_seconds == pytest.approx(virtual.wire_seconds)
    occupied = sum(virtual.wire_seconds.values())
    assert real.step_seconds >= 0.99 * occupied  # one wire, and a step needs all of its messages
    assert 0 < sum(real.exposed.values()) <= 1.01 * occupied
    assert 0.8 * occupied < virtual.exposed_seconds <= 1.01 * occupied


def test_fsdp2_runs_under_the_same_wires() -> None:
    link = Link(rate=1e8)
    here = world(8, Wires(inside=link, across=link), device="cpu")
    ours, theirs = (simulate(gpt(), here, engine=engine, steps=1) for engine in ("zerofold", "fsdp2"))
    psi, part = SIZE.parameters, 7 / 8
    assert theirs.sent_bytes["reduce_scatter"] == pytest.approx(4 * psi * part, rel=0.02)
    assert theirs.sent_bytes["all_gather"] > 1.5 * 2 * psi * part
    assert ours.sent_bytes["all_gather"] <= theirs.sent_bytes["all_gather"] * 1.01
    # It waits for each message at once on the CPU, so all of its wires' time is exposed.
    occupied = sum(theirs.wire_seconds.values())
    assert 0.5 * occupied < sum(theirs.exposed.values()) <= 1.01 * occupied


def test_misuse_is_refused_with_the_fix() -> None:
    for change, message in [
        ({"device": "tpu"}, "must be one of meta, cpu, cuda"),
        ({"is_virtual": False}, "no real time"),
        ({"size": 0}, "at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            simulate(gpt(), replace(world(8), **change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="FSDP2 does not run on the meta device"):
        simulate(gpt(), world(8), engine="fsdp2")
    with pytest.raises(ValueError, match="do not divide into nodes of 8"):
        simulate(gpt(stage="hsdp"), world(12))
    assert not dist.is_initialized()  # whatever was refused, and when


def test_a_simulation_needs_a_world_of_its_own() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="a world of its own"):
            simulate(gpt(), world(8))
    finally:
        dist.destroy_process_group()
