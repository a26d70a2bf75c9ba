"""The search against trying every point."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest
from tests.plan_models import H200, gpt

from zerofold.placement import Tier, row
from zerofold.plan.dividing import divided, divisions
from zerofold.plan.ground import ground_of
from zerofold.plan.machine import GB, GIB, Link, Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Point, Prediction
from zerofold.plan.predict import lacks, predict
from zerofold.plan.presets import preset
from zerofold.plan.search import AWAY, Search, SearchResult, search, states_fit, weighed
from zerofold.plan.shape import ROOT, ModelShape, UnitShape
from zerofold.plan.space import ROWS, Space
from zerofold.plan.times import times

CLUSTER = replace(H200, name="cluster", devices=1024, device_memory=80 * GIB, host_memory=1000 * GIB, disk=8000 * GB)


def by_trying_all(space: Space) -> list[Prediction]:
    """Every point that fits, the fastest first; of equal ones the first in the space. "auto" that leaves everything on
    the device is no point of its own."""
    found = []
    for point in space.points():
        prediction = predict(space.model, space.machine, point)
        held = prediction.memory
        is_away = any(held.host.values()) or any(held.disk.values())
        if prediction.fits and (is_away or not point.auto):
            found.append(prediction)
    return sorted(found, key=_seconds_of_a_sample)  # stable


def _seconds_of_a_sample(found: Prediction) -> float:
    """By the same operations as the search's, or points that differ in the last bit alone would change places."""
    step = found.times.step
    return weighed(step, found.point) / round(found.samples_per_second * step)


def searched(space: Space, wanted: int = 3) -> SearchResult:
    return Search(space).run(wanted)


def random_space(seed: int) -> Space:
    """A small model on a small machine, of rates and memories from any corner."""
    chance = random.Random(seed)
    devices, per_node = chance.choice([1, 2, 4, 6, 8, 16]), chance.choice([1, 2, 4, 8])
    layers = chance.choice([1, 2, 4])
    hidden = chance.choice([1024, 2048, 4096])
    model = gpt(
        layers=layers,
        hidden=hidden,
        heads=chance.choice([1, 2, 4]),
        vocab=chance.choice([64, 1000, 20_000]),
        tokens=chance.choice([16, 128, 512]),
        intervals=chance.choice([(0,), (0, 1), (1,)]),
    )
    if chance.random() < 0.15:
        model = replace(model, activities=(), hidden=None)
    states = 16 * model.parameters

    def rate() -> Link:
        return Link(rate=10 ** chance.uniform(7, 12), latency=10 ** chance.uniform(-7, -3))

    machine = Machine(
        name=f"machine {seed}",
        devices=devices,
        per_node=per_node,
        device_memory=int(states * 10 ** chance.uniform(-1.5, 0.5)) + 2**29,
        host_memory=int(states * 10 ** chance.uniform(-1, 1)),
        disk=chance.choice([0, int(states * 10 ** chance.uniform(-1, 1.5))]),
        flops=10 ** chance.uniform(10, 15),
        flops_fp32=10 ** chance.uniform(10, 14),
        memory_rate=10 ** chance.uniform(9, 13),
        kernel_seconds=chance.choice([0, 1e-5]),
        inside=rate(),
        across=rate(),
        to_host=rate(),
        host_update=10 ** chance.uniform(6, 10),
        disk_read=10 ** chance.uniform(6, 10),
        disk_write=10 ** chance.uniform(6, 10),
    )
    return Space(
        model=model,
        machine=machine,
        global_samples=chance.choice([None, devices * chance.choice([1, 2, 6, 8])]),
        precision=chance.choice(["bf16", "fp32"]),
        micro_batches=chance.choice([None, (1, 2, 8)]),
        sequence_parallel=chance.choice([False, True]),
    )


@pytest.mark.parametrize(
    ("first", "count"), [(0, 12), *(pytest.param(n, 25, marks=pytest.mark.thorough) for n in range(0, 400, 25))]
)
def test_the_choice_is_that_of_trying_every_point(first: int, count: int) -> None:
    chosen, kept, nothing = set(), set(), 0
    for seed in range(first, first + count):
        space = random_space(seed)
        space = replace(space, micro_batches=space.micro_batches or (1, 2, 4))
        all_that_fit, found = by_trying_all(space), searched(space)
        nothing += not all_that_fit
        got = [each for each in (found.best, *found.runners_up) if each is not None]
        assert [each.point for each in got] == [each.point for each in all_that_fit[:3]], seed
        assert got == all_that_fit[:3], seed
        assert found.tried + found.pruned == sum(1 for _ in space.points())
        if found.best is not None:
            chosen.add((found.best.point.stage, found.best.point.auto, found.best.point.tiers))
        kept |= {(each.point.checkpoints_on, each.point.partition) for each in got}
    assert len(chosen) >= 3  # the machines differ enough to ask for different answers
    assert len(kept) >= (3 if first == 0 else 1)  # and keep checkpoints in different places, the first ones at least
    assert nothing < 0.6 * count


def test_a_rank_alone_has_the_best_of_all_rows() -> None:
    """Those that the space leaves out as equal are tried too. Of two devices, each has half of the blocks."""
    card = replace(preset("4090"), host_memory=60 * GIB, disk=1000 * GB)
    model = gpt(layers=4, hidden=8192, heads=4, vocab=50304, tokens=256, intervals=(1,))
    for devices, samples in ((1, 1), (1, 8), (1, 32), (2, 32)):
        machine = replace(card, devices=devices)
        space = Space(model=model, machine=machine, global_samples=samples, tensor=(1,), pipeline=(devices,))
        every = []
        for group in space.groups():
            members = {replace(each, stage="3") for each in space.members(group)}
            for point in (replace(each, stage=stage) for each in members for stage in ROWS):
                if point.tiers.parameters is Tier.DEVICE or row(point.stage).parameters.is_cut:
                    every.append(predict(model, machine, point))
        best = min(weighed(1 / each.samples_per_second, each.point) for each in every if each.fits)
        found = searched(space, 1).best
        assert found is not None
        assert weighed(1 / found.samples_per_second, found.point) == pytest.approx(best, rel=1e-9), samples


def test_seventy_billion_on_1024_devices() -> None:
    """What a person waits for; `test_the_choice_for_seventy_billion…` tries every point."""
    space = Space(
        model=gpt(layers=80, hidden=8192, heads=64, tokens=4096, intervals=(0, 1, 2, 4)),
        machine=CLUSTER,
        global_samples=2048,
    )
    start = time.perf_counter()
    found = searched(space)
    assert time.perf_counter() - start < 5
    assert found.best is not None
    assert found.best.fits
    assert found.best.samples_per_second * AWAY >= max(each.samples_per_second for each in found.runners_up)


@pytest.mark.thorough
def test_the_choice_for_seventy_billion_is_that_of_trying_every_point() -> None:
    """Some of the degrees: to place 80 units one by one for every point takes minutes."""
    model = gpt(layers=80, hidden=8192, heads=64, tokens=4096, intervals=(0, 1))
    space = Space(model=model, machine=CLUSTER, global_samples=2048, tensor=(1, 2, 8), pipeline=(1, 2, 8))
    found = searched(space)
    assert [found.best, *found.runners_up] == by_trying_all(space)[:3]


def test_a_quadrillion_parameters_on_a_hundred_thousand_devices() -> None:
    """States of 1.6e16 bytes are 160 GB a device, so they cannot all be there."""
    model = gpt(layers=5120, hidden=128_000, heads=1600, vocab=100_000, tokens=2048, intervals=(1,))
    assert model.parameters > 1e15
    machine = replace(H200, devices=100_000, host_memory=2000 * GIB, disk=60_000 * GB)
    start = time.perf_counter()
    found = search(model, machine, global_samples=100_000)
    assert time.perf_counter() - start < 5
    assert found.best is not None
    assert found.best.point.tensor * found.best.point.pipeline > 1  # a block alone has 0.4e12 bytes
    assert row(found.best.point.stage).optimizer.is_cut


def test_a_quadrillion_known_by_its_count_alone() -> None:
    units = (UnitShape(name=ROOT, trained=10**9), UnitShape(name="block", trained=10**9, count=10**6))
    model = ModelShape(name="count", units=units, tokens=2048)
    machine = replace(H200, devices=100_000, host_memory=2000 * GIB, disk=60_000 * GB)
    found = search(model, machine, global_samples=100_000)
    assert found.best is not None
    assert found.best.point.auto or found.best.point.tiers.is_offloaded
    smaller = search(model, replace(machine, host_memory=0, disk=0), global_samples=100_000)
    assert smaller.best is None


def test_bounds_are_below_what_they_bound() -> None:
    """On which the search rests: floors of time, and states that must fit."""
    refused = 0
    for seed in range(12):
        space = random_space(seed)
        space = replace(space, micro_batches=(1, 4))
        for group in space.groups():
            ground = ground_of(space.model, space.machine, group)
            for point in space.members(group):
                held = memory(space.model, space.machine, point)
                taken = times(space.model, space.machine, point, held, ground=ground)
                assert taken.step >= ground.floor.seconds * (1 - 1e-9)
                if not states_fit(ground, row(point.stage), point, space.machine):
                    refused += 1
                    assert lacks(held, space.machine)
    assert refused > 100


def test_a_faster_wire_is_never_slower() -> None:
    for seed in range(10):
        space = random_space(seed)
        slow = searched(space, 1).best
        links = {name: replace(getattr(space.machine, name), rate=1e13) for name in ("inside", "across", "to_host")}
        fast = searched(replace(space, machine=replace(space.machine, **links)), 1).best
        if slow is not None:
            assert fast is not None
            assert fast.samples_per_second >= slow.samples_per_second * (1 - 1e-9)


def test_all_samples_at_once_need_no_local_sums() -> None:
    """So what fits is not the smaller micro-batches alone: 1 and 9 do here, and 3 does not."""
    model = gpt(layers=8, hidden=2048, tokens=256, intervals=(1,))
    point = Point(stage="0", checkpoint_every=1)
    machine = replace(CLUSTER, devices=2, per_node=2)
    needs = {at.micro_batch: predict(model, machine, at).memory.device_need for at in divisions(point, 9)}
    assert max(needs[1], needs[9]) < needs[3]
    tight = replace(machine, device_memory=math.ceil(max(needs[1], needs[9])))
    assert divided(model, tight, point, 9).point.micro_batch == 9
