"""The page of a plan in a real Chromium: sliders answer at once, with the bytes of the Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from browser import Page
from plan_rows import rows, sliders
from test_plan_formulas import every_operation, plainly, random_places, real_rows
from zerofold.plan.page import PEAK, Row, Slider, write_page

PLAN = {
    "title": "GPT-2 XL",
    "lead": "1.56 B parameters, bf16, H100",
    "reason": "stage 2: it fits, and sends least",
    "device_memory": 80 * 10**9,
}
POSITIONS = [(64, 4, 1024), (1, 1, 16), (8, 3, 1000), (100_000, 512, 131_072), (1001, 7, 4097), (24, 2, 2048)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    write_page(PLAN, path, rows=rows(), sliders=sliders())
    return path


def shown(page: Page) -> dict[str, list[str]]:
    """Titles of the table's cells by row: "6,231,955,456 bytes"."""
    return {row[0]["text"]: [cell["title"] for cell in row[1:]] for row in page.table("numbers")}


def expected(place: Mapping[str, int]) -> dict[str, list[str]]:
    found = {row.name + row.detail: plainly(row, place) for row in rows()}
    possible = {name: sizes for name, sizes in found.items() if sizes is not None}
    lines = [line for line in lines_of(possible) if any(sizes[line] for sizes in possible.values())]
    return {name: [f"{sizes[line]:,} bytes" for line in lines] for name, sizes in possible.items()}


def lines_of(possible: Mapping[str, Mapping[str, int]]) -> list[str]:
    """All lines, the peak first."""
    return [PEAK] + [line for line in next(iter(possible.values())) if line != PEAK]


def type_in(page: Page, name: str, value: object) -> None:
    field = f"document.getElementById('field-{name}')"
    page.js(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input'))")


@pytest.mark.parametrize("position", POSITIONS)
def test_numbers_typed_in_give_pythons_bytes(page: Page, file: Path, position: tuple[int, int, int]) -> None:
    page.open(file)
    place = dict(zip(("devices", "batch", "sequence"), position, strict=True))
    for name, value in place.items():
        type_in(page, name, value)
    assert shown(page) == expected(place)
    page.assert_sound(file)


def test_sliders_move_the_numbers_and_the_fields(page: Page, file: Path) -> None:
    page.open(file)
    before = shown(page)
    for name in ("devices", "batch", "sequence"):
        slider = f"document.getElementById('slider-{name}')"
        page.js(f"{slider}.value = Number({slider}.value) + 2; {slider}.dispatchEvent(new Event('input'))")
    place = {
        name: int(page.js(f"document.getElementById('field-{name}').value"))
        for name in ("devices", "batch", "sequence")
    }
    assert place == {"devices": 128, "batch": 8, "sequence": 2048}
    assert shown(page) == expected(place) != before


def test_a_real_key_moves_a_slider(page: Page, file: Path) -> None:
    page.open(file)
    page.js("document.getElementById('slider-devices').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    page.wait_for_drawing()
    assert page.js("document.getElementById('field-devices').value") == "96"
    assert shown(page) == expected({"devices": 96, "batch": 4, "sequence": 1024})


def every_row() -> tuple[list[Row], list[Slider]]:
    return [Row(name="all", bytes_at=every_operation)], [Slider(name="x", label="x", value=1, high=59)]


@pytest.mark.parametrize(
    ("made", "places"),
    [
        (lambda: (rows(), sliders()), random_places(80)),
        (real_rows, random_places(80)),
        (every_row, [{"x": x} for x in range(1, 60)]),
    ],
    ids=["stand-in", "plan", "every operation"],
)
def test_the_script_does_pythons_arithmetic(
    page: Page, tmp_path: Path, made: Callable[[], tuple[list[Row], list[Slider]]], places: list[dict[str, int]]
) -> None:
    shown_rows, shown_sliders = made()
    write_page(PLAN, tmp_path / "plan.html", rows=shown_rows, sliders=shown_sliders)
    page.open(tmp_path / "plan.html")
    page.assert_sound(tmp_path / "plan.html")
    texts = "JSON.stringify(found, (_, value) => typeof value === 'bigint' ? String(value) : value)"
    found = page.js(f"{json.dumps(places)}.map((place) => {{ const found = at(place); return {texts}; }})")
    compared = 0
    for place, text in zip(places, found, strict=True):
        answers: dict[str, Any] = json.loads(text)
        for row in shown_rows:
            if row.key in answers:
                sizes = plainly(row, place)
                assert answers[row.key] == (
                    None if sizes is None else {line: str(size) for line, size in sizes.items()}
                )
                compared += 1
    assert compared > 0.99 * len(places) * len(shown_rows)


def test_a_field_takes_only_what_the_slider_could(page: Page, file: Path) -> None:
    page.open(file)
    before = shown(page)
    for wrong in (0, -3, 1.5, 10**9, ""):
        type_in(page, "devices", wrong)
        assert not page.js("document.getElementById('field-devices').checkValidity()")
        assert shown(page) == before
    type_in(page, "devices", 8)
    assert page.js("document.getElementById('field-devices').checkValidity()")
    assert shown(page) != before


def test_what_cannot_be_trained_says_so(page: Page, file: Path) -> None:
    page.open(file)
    type_in(page, "devices", 12)
    assert "hsdp" not in "".join(shown(page))
    assert "not possible with these numbers" in page.js("document.getElementById('bars').innerText")


def test_bars_are_as_long_as_their_bytes(page: Page, file: Path) -> None:
    page.open(file)
    sizes = plainly(rows()[0], {"devices": 64, "batch": 4, "sequence": 1024})
    assert sizes is not None
    part = "document.querySelector('[data-part={}]').getBoundingClientRect().width"
    drawn = page.js(part.format("optimizer")) / page.js(part.format("gradients"))
    assert drawn == pytest.approx(sizes["optimizer"] / sizes["gradients"], rel=0.01)


def test_every_byte_can_be_read(page: Page, file: Path) -> None:
    page.open(file)
    page.js("[...document.querySelectorAll('button')].find((each) => each.textContent === 'every byte').click()")
    assert all(f"{cell['text']} bytes" == cell["title"] for row in page.table("numbers") for cell in row[1:])


@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_on_a_phone_day_and_night(page: Page, file: Path, dark: bool) -> None:
    page.open(file, width=390, dark=dark)
    assert page.js("document.documentElement.scrollWidth") <= 390
    page.assert_readable(dark=dark)


def test_a_plan_alone_is_drawn_without_sliders(page: Page, tmp_path: Path) -> None:
    """The paper's own table: 7.5e9 parameters on 64 devices."""
    psi, ranks = 7_500_000_000, 64
    kept = {
        "0": (2, 2, 12),
        "1": (2, 2, 12 / ranks),
        "2": (2, 2 / ranks, 12 / ranks),
        "3": (2 / ranks, 2 / ranks, 12 / ranks),
    }
    states = ("parameters", "gradients", "optimizer")
    stages = [
        {"stage": stage, **{f"{state}_bytes": round(psi * each) for state, each in zip(states, sizes, strict=True)}}
        for stage, sizes in kept.items()
    ]
    write_page({"stages": stages, "recommended": "2", "title": "<b>7.5B"}, tmp_path / "plan.html")
    page.open(tmp_path / "plan.html")
    page.assert_sound(tmp_path / "plan.html")
    assert [row[1]["text"] for row in page.table("numbers")] == ["120 GB", "31.4 GB", "16.6 GB", "1.88 GB"]
    assert page.js("document.querySelector('.recommended').dataset.row") == "2"
    assert page.js("document.querySelector('h1').textContent") == "<b>7.5B"
