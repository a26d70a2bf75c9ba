"""What a reader sees after moving the sliders is what `zerofold plan --json` says for those numbers, to the byte."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from browser import Page
from test_plan_command import invoke, planned
from test_plan_page import shown, type_in
from zerofold.placement import Tier, Tiers
from zerofold.plan.point import Point
from zerofold.plan.point import name_of as name_of_point

GPT = ["--layers", "6", "--hidden", "320", "--heads", "5", "--vocab", "50257", "--checkpoint-every", "1"]
LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
POSITIONS = [(1, 1, 1), (8, 3, 1000), (24, 2, 2048), (1001, 7, 4097), (100_000, 512, 65_536)]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(96, 301), nn.GELU(), nn.Linear(301, 96), nn.Linear(96, 77))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def built() -> tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
    return Odd(), lambda batch: {"x": torch.zeros(batch, 40, 96, device="meta")}


def asked(model: list[str], devices: int, batch: int, sequence: int | None) -> list[str]:
    length = [] if sequence is None else ["--seq", str(sequence)]
    return [*model, *length, "--world-size", str(devices), "--micro-batch", str(batch)]


def rows_of(plan: dict[str, Any]) -> dict[str, list[str]]:
    """The page's table as it must be."""
    rows = [row for row in plan["stages"] + plan["offloaded"] if row["tiers"] != "auto"]
    lines = [line for line in rows[0]["held_bytes"] if line != "init peak" and any(r["held_bytes"][line] for r in rows)]
    away = [name for name in ("host_bytes", "disk_bytes") if any(sum(row[name].values()) for row in rows)]
    return {
        name_of(row): [
            f"{size:,} bytes"
            for size in (
                row["device_need_bytes"],
                *(row["held_bytes"][line] for line in lines),
                *(sum(row[name].values()) for name in away),
            )
        ]
        for row in rows
    }


def name_of(row: dict[str, Any]) -> str:
    name = f"stage {row['stage']}" if isinstance(row["stage"], int) else row["stage"]
    tiers = {}
    for state in ("parameters", "gradients", "optimizer"):
        tiers.setdefault(row["tiers"][state], []).append(state)
    return name + ", ".join(f"{' and '.join(tiers[tier])} on {tier}" for tier in ("host", "nvme") if tier in tiers)


def compare(page: Page, file: Path, model: list[str], position: tuple[int, int, int], *, has_sequence: bool) -> None:
    devices, batch, sequence = position
    for name, value in (("devices", devices), ("batch", batch), *([("sequence", sequence)] if has_sequence else [])):
        type_in(page, name, value)
    assert shown(page) == rows_of(planned(*asked(model, devices, batch, sequence if has_sequence else None)))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "config.json"


@pytest.mark.parametrize("kind", ["params", "layers", "config", "function"])
def test_the_page_says_what_the_command_says(page: Page, tmp_path: Path, config: Path, kind: str) -> None:
    model = {
        "params": ["--params", "7.5e9"],
        "layers": GPT,
        "config": ["--model", str(config)],
        "function": ["--function", "test_plan_page_command:built"],
    }[kind]
    file = tmp_path / "plan.html"
    result = invoke(*asked(model, 64, 4, None), "--html", str(file))
    assert result.exit_code == 0, result.output
    page.open(file)
    has_sequence = bool(page.js("document.getElementById('field-sequence') !== null"))
    assert has_sequence == (kind in ("params", "layers"))
    for position in POSITIONS if has_sequence else POSITIONS[1:3]:  # a trace takes seconds
        compare(page, file, model, position, has_sequence=has_sequence)
    page.assert_sound(file)


def test_the_page_tells_the_choice_its_config_and_when_they_are_of_other_numbers(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    given = ["--params", "7.5e9", "--world-size", "64", "--tensor", "2"]
    chosen = planned(*given)["recommended"]
    assert invoke(*given, "--html", str(file)).exit_code == 0
    page.open(file)
    text = "document.getElementById('{}').innerText"
    assert page.js(text.format("chosen")) == f"stage {chosen['stage']}"
    config = page.js(text.format("config"))
    assert json.dumps(chosen["ds_config"]) in config
    assert f"stage={chosen['config']['stage']}" in config
    body = page.js("document.body.innerText")
    assert "Not on this page: stage 3 with tiers chosen unit by unit" in body
    assert "No disk was given (--disk)" in body
    is_hidden = "document.getElementById('moved').hidden"
    highlighted = "document.querySelectorAll('.row.recommended').length"
    assert (page.js(is_hidden), page.js(highlighted)) == (True, 1)
    type_in(page, "devices", 63)
    assert (page.js(is_hidden), page.js(highlighted)) == (False, 0)
    assert "devices must be a multiple of 2: tensor 2" in page.js(text.format("bars"))
    type_in(page, "devices", 64)
    assert (page.js(is_hidden), page.js(highlighted)) == (True, 1)
    is_cut = (
        "(() => { const box = document.getElementById('numbers'); return box.scrollWidth > box.clientWidth + 1 })()"
    )
    assert page.js("document.getElementById('aside').hidden") != page.js(is_cut)


SMALL = ["--params", "3e9", "--preset", "A100-40", "--host-memory", "40GB", "--disk", "30GB"]


@pytest.mark.parametrize("position", [(8, 4, 2048), (2, 64, 2048), (6, 300, 1000)])
def test_what_fits_is_written_anew_and_the_command_tells_the_rest(
    page: Page, tmp_path: Path, position: tuple[int, int, int]
) -> None:
    """By row, with what is missing, as the very command says that the page gives for these numbers."""
    file, more = tmp_path / "a plan.html", ["--contiguous-gradients", "--no-flash", "--link-inside", "12.5"]
    assert invoke(*asked(SMALL, 8, 4, 2048), *more, "--html", str(file)).exit_code == 0
    page.open(file)
    for name, value in zip(("devices", "batch", "sequence"), position, strict=True):
        type_in(page, name, value)
    words = shlex.split(page.js("document.getElementById('command').textContent"))
    assert words[:2] == ["zerofold", "plan"]
    assert set(more) <= set(words)
    found = planned(*words[2:])
    rows = [row for row in found["stages"] + found["offloaded"] if row["tiers"] != "auto"]
    assert [row["micro_batch"] for row in rows] == [position[1]] * len(rows)
    listed = "[...document.querySelectorAll('{}')].map((each) => each.innerText)"
    bad = [said_of(row) + f": {row['lacks']}" for row in rows if not row["fits"]]
    good = "; ".join(said_of(row) for row in rows if row["fits"])
    assert page.js(listed.format("#lacking li")) == bad
    (fitting,) = page.js(listed.format("#fitting"))
    assert fitting == (f"Fits: {good}" if good else "No row of this page fits.")
    assert any("host memory of a node" in each for each in bad)
    is_start = position == (8, 4, 2048)
    assert page.js("[...document.querySelectorAll('.of-start')].every((each) => each.hidden)") != is_start
    assert page.js("document.getElementById('moved').hidden") == is_start
    assert page.js("document.querySelector('h1').textContent") == found["title"]
    page.assert_sound(file)


def said_of(row: dict[str, Any]) -> str:
    return name_of_point(Point(stage=str(row["stage"]), tiers=Tiers(*(Tier(each) for each in in_order(row)))))


def in_order(row: dict[str, Any]) -> list[str]:
    return [row["tiers"][state] for state in ("optimizer", "gradients", "parameters")]
