"""Ledger, run folder and predictions of a model that tensor-parallel ranks hold between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofold as zf
from zerofold.part import Part, set_part

WIDTH, TOKENS = 64, 32


class Half(nn.Module):
    """Of a block whose matrix two ranks share by rows; the bias is on both."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.randn(WIDTH // 2, WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        rows = WIDTH // 2
        whole = torch.Size([WIDTH, WIDTH])
        set_part(self.matrix, Part(whole, 0, index * rows, (index + 1) * rows, counts=True))
        set_part(self.bias, Part(self.bias.shape, None, 0, WIDTH, counts=index == 0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.t() @ self.matrix + self.bias


def run(folder: str) -> dict[str, Any]:
    spread = zf.mesh(tensor=2, device="cpu")
    model = nn.Sequential(*(Half(spread.coordinate["tensor"]) for _ in range(3)))
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3, units=Half, mesh=spread)
    with zf.Run(folder, model, every=2, peak_flops=1e12) as recorded:
        for _ in range(4):
            model(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
            recorded.step(loss=1.0, tokens=TOKENS)
            optimizer.zero_grad()
        flops = recorded.flops_per_step
    snapshot = zf.ledger(model).snapshot()
    zf.close(model)
    return {
        "first": recorded.is_first,
        "flops": flops,
        **{name: snapshot[name] for name in ("psi", "psi_here", "mesh")},
    }


def test_books_count_the_whole_model_once(ranks: Any, tmp_path: Path) -> None:
    found = ranks(4, run, str(tmp_path))
    whole, here = 3 * (WIDTH * WIDTH + WIDTH), 3 * (WIDTH * WIDTH // 2 + WIDTH)
    assert [each["psi"] for each in found] == [whole] * 4
    assert [each["psi_here"] for each in found] == [here] * 4
    assert found[3]["mesh"]["axes"] == {"pipeline": 1, "replicate": 1, "data": 2, "tensor": 2}
    assert [each["mesh"]["coordinate"]["tensor"] for each in found] == [0, 1, 0, 1]
    # One of four ranks writes; the arithmetic of a step is shared by all four.
    assert [each["first"] for each in found] == [True, False, False, False]
    assert found[0]["flops"] == pytest.approx(6 * whole * TOKENS / 4)
    book = json.loads((tmp_path / "ledger.json").read_text())
    assert (book["world"], book["psi"], book["psi_here"], book["rank"]) == (4, whole, here, 0)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    compared = {line["line"]: line for line in book["predicted"] if line["where"] == "device"}
    for state in ("gradients", "optimizer"):
        assert compared[state]["predicted"] == compared[state]["measured"] > 0
    for row in book["comm"]:
        if row["theory_bytes_per_step"] is not None:
            assert row["bytes_per_step"] == pytest.approx(row["theory_bytes_per_step"], rel=0.01)
    assert {(row["operation"], row["group"]) for row in book["comm"]} >= {
        ("all_gather", "all"),
        ("reduce_scatter", "all"),
    }


def refused(folder: str) -> str:
    spread = zf.mesh(tensor=2, device="cpu")
    model = zf.shard(nn.Sequential(Half(spread.coordinate["tensor"])), stage=1, units=Half, mesh=spread)
    with pytest.raises(Exception) as caught:
        zf.Run(folder, model)
    zf.close(model)
    return str(caught.value)


def test_a_folder_that_cannot_be_is_known_to_every_rank(ranks: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for said in ranks(4, refused, str(file / "run")):
        assert "cannot be a run folder" in said
