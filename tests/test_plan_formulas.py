"""The plan's arithmetic as data gives what the plan's Python gives, wherever it is asked."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plan_rows import rows, sliders
from zerofold.placement import Tier, Tiers
from zerofold.plan.followed import NotAFormulaError
from zerofold.plan.formulas import Formulas, Inputs, Outputs
from zerofold.plan.page import Row, Slider, formulas_of, rows_of, sliders_of, write_page
from zerofold.plan.point import Point
from zerofold.plan.presets import preset
from zerofold.plan.shape import ModelShape
from zerofold.plan.transformer import GPTNumbers, from_numbers, from_parameters


def random_places(count: int) -> list[dict[str, int]]:
    chance = random.Random(7)
    return [
        {each.name: round(math.exp(chance.uniform(math.log(each.low), math.log(each.high)))) for each in sliders()}
        for _ in range(count)
    ]


def plainly(row: Row, place: Inputs) -> Outputs | None:
    try:
        return row.bytes_at(place)
    except ValueError:
        return None


def test_formulas_equal_the_functions_at_random_places() -> None:
    formulas = formulas_of(rows(), sliders())
    reached = refused = 0
    for place in random_places(400):
        found = formulas.at(place)
        for row in rows():
            if row.key in found:
                assert found[row.key] == plainly(row, place), (row.key, place)
                reached += 1
                refused += found[row.key] is None
    assert reached > 0.99 * 400 * len(rows())
    assert 0 < refused < reached


def real_rows() -> tuple[list[Row], list[Slider]]:
    """The plan's own memory model: every row of the table, and states on the host."""
    size = GPTNumbers(layers=48, hidden=1600, heads=25, vocab=50257, seq=1024)
    machine = preset("A100-80", devices=64)
    points = [Point(stage=stage, checkpoint_every=1) for stage in ("dp", "0", "1", "2", "3", "hsdp", "hpz")]
    points.append(Point(stage="3", checkpoint_every=1, tiers=Tiers(Tier.HOST, Tier.HOST, Tier.HOST)))

    def shape_at(at: Inputs) -> ModelShape:
        return from_numbers(replace(size, seq=at["sequence"]))

    return rows_of(points, shape_at, machine), sliders_of(machine, points[0], size.seq)


def test_the_plans_memory_model_is_followed_to_the_byte_everywhere() -> None:
    rows, sliders = real_rows()
    formulas = formulas_of(rows, sliders)
    for place in random_places(60):
        found = formulas.at(place)
        assert set(found) == {row.key for row in rows}, place
        for row in rows:
            assert found[row.key] == plainly(row, place), (row.key, place)


def test_rows_are_told_apart_by_what_differs() -> None:
    rows, _ = real_rows()
    assert [row.key for row in rows][-2:] == ["hpz", "stage 3 parameters and gradients and optimizer on host"]
    machine = preset("A100-80", devices=8)
    points = [Point(stage="3", checkpoint_every=every) for every in (0, 2)]
    named = rows_of(points, lambda at: from_parameters(1e9), machine, recommended=points[1])
    assert [row.key for row in named] == ["stage 3 checkpoint every 0", "stage 3 checkpoint every 2"]
    assert [row.recommended for row in named] == [False, True]


def test_numbers_beyond_53_bits_stay_exact() -> None:
    psi = 10**15 + 7

    def states(at: Inputs) -> Outputs:
        return {"states": 16 * -(-psi // at["devices"]) * at["devices"] ** 2}

    formulas = Formulas({"3": states})
    formulas.cover([{"devices": 64}])
    for devices in (1, 3, 99_999):
        assert formulas.at({"devices": devices}) == {"3": states({"devices": devices})}


def every_operation(at: Inputs) -> Outputs:
    x = at["x"]
    half = x / 2
    return {
        "round": round(half), "floor": math.floor(-half), "ceil": math.ceil(half - 3), "trunc": math.trunc(-half),
        "mod": (-x) % 7, "whole": -x // 3, "float": round(x * 0.1 + 0.7), "abs": abs(3 - x), "true": x * (x > 0),
        "below": x if x < 5 else 0, "not above": x if x <= 9 else 0, "above": x if x > 20 else 0,
        "not below": x if x >= 30 else 0, "is": x if x == 40 else 0, "is not": x if x != 41 else 0,
    }  # fmt: skip


def test_every_operation_gives_what_pythons_gives() -> None:
    formulas = Formulas({"": every_operation})
    formulas.cover({"x": x} for x in range(1, 60))
    formulas.check({"x": x} for x in range(1, 60))
    # Bounded by 3, 5, 9, 20, 30, and the two numbers 40 and 41.
    assert len(formulas.regions[""]) == 8


def test_every_branch_is_a_region_of_its_own() -> None:
    def branches(at: Inputs) -> Outputs:
        devices, batch = at["devices"], at["batch"]
        if devices % 8:
            raise ValueError("no whole nodes")
        return {"bytes": max(100 // batch, batch) if devices else 0}

    formulas = Formulas({"": branches})
    formulas.cover({"devices": n, "batch": b} for n, b in itertools.product((0, 4, 8), (1, 50)))
    assert [region.refused for region in formulas.regions[""]] == [False, True, False, False]
    for devices, batch in itertools.product((0, 1, 8, 15, 16), (1, 9, 10, 11, 99)):
        expected = plainly(Row(name="", bytes_at=branches), {"devices": devices, "batch": batch})
        assert formulas.at({"devices": devices, "batch": batch}) == {"": expected}


@pytest.mark.parametrize(
    "lose", [int, float, math.sqrt, math.log2, range, hash, lambda x: x**0.5, lambda x: x * 1.0 // 2]
)
def test_what_cannot_be_followed_is_refused(lose: Callable[[int], float]) -> None:
    def lost(at: Inputs) -> Outputs:
        return {"bytes": lose(at["devices"])}  # type: ignore[dict-item]

    with pytest.raises(NotAFormulaError, match="cannot be followed"):
        Formulas({"": lost}).cover([{"devices": 4}])


@pytest.mark.parametrize("lose", [lambda x: int(str(x)), lambda x: len(f"{x}")])
def test_what_is_lost_without_a_word_is_found_by_the_check(tmp_path: Path, lose: Callable[[int], int]) -> None:
    """A text forgets the formula: such a page would be wrong, so none is written."""
    row = Row(name="3", bytes_at=lambda at: {"bytes": lose(at["devices"])})
    devices = Slider(name="devices", label="devices", value=4, high=100)
    with pytest.raises(NotAFormulaError, match="3 at .* the formula gives .* the plan"):
        write_page({}, tmp_path / "plan.html", rows=[row], sliders=[devices])
    assert not (tmp_path / "plan.html").exists()
