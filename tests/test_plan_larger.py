"""What the next larger model takes, and the largest that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan_models import H200, gpt

from zerofold.plan.larger import FACTORS, deeper, largest, next_larger, some_point
from zerofold.plan.machine import GB, GIB, Machine
from zerofold.plan.memory import memory
from zerofold.plan.predict import lacks
from zerofold.plan.search import search
from zerofold.plan.shape import ModelShape
from zerofold.plan.space import Space

NODE = replace(H200, devices=8, device_memory=40 * GIB, host_memory=200 * GIB, disk=0)


def model_of(layers: int) -> ModelShape:
    return gpt(layers=layers, hidden=12288, tokens=1024, intervals=(0, 1))


def fits(model: ModelShape, machine: Machine) -> bool:
    return some_point(Space(model=model, machine=machine)) is not None


def changes(layers: int, machine: Machine) -> dict[str, int]:
    model = model_of(layers)
    result = search(model, machine)
    found = next_larger(model, machine, result)
    assert found.model.layers == 2 * layers
    for change in found.changes:
        if change.name != "nothing":
            richer = replace(machine, **{change.name: change.needed})
            assert not lacks(memory(found.model, richer, change.point), richer)
            half = replace(machine, **{change.name: change.needed // 2})
            assert change.needed // 2 <= change.now or not fits(found.model, half)
    return {change.name: change.needed for change in found.changes}


def test_a_model_that_fits_as_well_needs_nothing() -> None:
    assert changes(2, NODE) == {"nothing": 0}


def test_each_change_is_the_least_of_its_kind() -> None:
    found = changes(16, NODE)
    assert set(found) == {"devices", "device_memory", "host_memory", "disk"}
    assert found["devices"] in {8 * factor for factor in FACTORS}


def test_the_sentence_names_numbers() -> None:
    model = model_of(16)
    said = next_larger(model, NODE, search(model, NODE)).sentence
    assert said.startswith("Twice the blocks (58.4e9 parameters) would fit with 16 devices instead of 8, or ")
    assert "GB of host memory in a node instead of" in said
    none = next_larger(model_of(6000), NODE, search(model, NODE)).sentence
    assert none.endswith("would not fit with 64 times as much of any one thing.")


def test_the_largest_fits_and_one_block_more_does_not() -> None:
    for machine in (NODE, replace(NODE, disk=1000 * GB)):
        found = largest(machine, model_of)
        assert found is not None
        assert found.layers is not None
        assert fits(found, machine)
        assert not fits(model_of(found.layers + 1), machine)


def test_more_of_anything_lets_a_larger_one_in() -> None:
    def parameters(machine: Machine) -> int:
        found = largest(machine, model_of)
        return 0 if found is None else found.parameters

    base = parameters(NODE)
    assert parameters(replace(NODE, devices=16)) > 1.5 * base
    assert parameters(replace(NODE, host_memory=800 * GIB)) > 1.5 * base
    assert parameters(replace(NODE, disk=10_000 * GB)) > 1.5 * base
    assert parameters(replace(NODE, device_memory=GIB // 4, host_memory=GIB // 4)) == 0


def test_a_deeper_model_is_the_model_with_more_blocks() -> None:
    twice, built = deeper(model_of(12), 2), model_of(24)
    assert twice.parameters == built.parameters
    for made, expected in zip(twice.activities, built.activities, strict=True):
        for one, other in zip(made.moments, expected.moments, strict=True):
            assert one.alive.at(3) == pytest.approx(other.alive.at(3), rel=1e-9)
            assert one.repeats == other.repeats
        assert made.checkpoints.at(2) == pytest.approx(expected.checkpoints.at(2))
