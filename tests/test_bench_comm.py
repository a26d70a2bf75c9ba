"""`zerofold bench comm`: its arithmetic, what it refuses, and a tiny run on real ranks."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner, Result

from zerofold.bench.comm import CommRow, Task, bench_comm_command, elements, make_rows, print_table
from zerofold.bench.comm_calls import COLLECTIVES, FORMS, OURS, TORCH, make_comm


def invoke(*arguments: str) -> Result:
    app = Typer()
    app.command()(bench_comm_command)
    return CliRunner().invoke(app, arguments)


def left_by(name: str, count: int) -> tuple[list[float], list[float], float]:
    """What both forms leave on this rank, and what zerofold counted as sent."""
    comm = make_comm(torch.device("cpu"))
    pair = COLLECTIVES[name].make(comm, count)
    pair.fill()
    for form in FORMS:
        pair.calls[form]()
    return pair.results[OURS].tolist(), pair.results[TORCH].tolist(), sum(comm.traffic.elements.values())


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_both_forms_do_the_collective(ranks: Any, name: str, world: int) -> None:
    """Against the result worked out here: two forms that do nothing would agree as well."""
    count = 10 * world
    found = ranks(world, left_by, name, count)
    inputs = [[float(i % 13 + rank) for i in range(count)] for rank in range(world)]
    sums = [sum(column) for column in zip(*inputs, strict=True)]
    for rank, (ours, torchs, sent) in enumerate(found):
        part = slice(10 * rank, 10 * (rank + 1))
        pieces = [inputs[source][part] for source in range(world)]
        expected = {
            "broadcast": inputs[0],
            "scatter": inputs[0][part],
            "gather": [value for source in inputs for value in source[:10]] if rank == 0 else [0.0],
            "reduce": sums if rank == 0 else [0.0],
            "all_gather": [
                value for source in range(world) for value in inputs[source][10 * source : 10 * source + 10]
            ],
            "reduce_scatter": sums[part],
            "all_reduce": sums,
            "all_to_all": [value for piece in pieces for value in piece],
        }[name]
        assert ours == expected
        assert torchs == expected
        assert sent == pytest.approx((2 if name == "all_reduce" else 1) * count * (world - 1) / world)


def test_rows_take_the_slowest_rank_and_the_ratio_of_a_round() -> None:
    task = Task(("all_reduce",), (4096,), rounds=3, device_type="cpu")
    fast = [[{OURS: 1e-6, TORCH: 1e-6}] * 3]
    slow = [[{OURS: 1e-3, TORCH: 2e-3}, {OURS: 2e-3, TORCH: 4e-3}, {OURS: 9e-3, TORCH: 6e-3}]]
    (row,) = make_rows(task, [fast, slow], 2)
    assert (row.zerofold_us, row.torch_us) == (2000, 4000)
    assert (row.over_torch, row.over_torch_min, row.over_torch_max) == (0.5, 0.5, 1.5)
    assert row.algorithm_gb_per_s == pytest.approx(4096 / 2e-3 / 1e9, abs=1e-4)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    factors = {name: collective.bus(4) for name, collective in COLLECTIVES.items()}
    assert factors.pop("all_reduce") == 1.5
    assert factors.pop("broadcast") == factors.pop("reduce") == 1
    assert set(factors.values()) == {0.75}
    assert elements(1000, 3) == 249
    assert elements(4, 8) == 8


def test_a_tiny_run(tmp_path: Path) -> None:
    file = tmp_path / "comm.json"
    result = invoke("--sizes", "64B,4KiB", "--rounds", "2", "--device", "cpu", "--json", "--out", str(file))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads(file.read_text())
    assert found["machine"]["world"] == 2
    assert [(row["collective"], row["nbytes"]) for row in found["rows"]] == [
        (name, size) for name in COLLECTIVES for size in (64, 4096)
    ]
    for row in found["rows"]:
        bus = COLLECTIVES[row["collective"]].bus(2)
        assert row["bus_gb_per_s"] == pytest.approx(bus * row["algorithm_gb_per_s"], abs=1e-4)
        assert row["zerofold_us"] > 0


def test_the_table_fits_80_columns() -> None:
    row = CommRow("reduce_scatter", 2**28, 1234567.8, 1234567.8, 123.4, 123.4, 123.4, 12.34, 10.5, 14.75)
    shown = io.StringIO()
    print_table(Console(file=shown, width=80), [row, replace(row, nbytes=2**10)], "2 ranks, gloo")
    for text in ("reduce_scatter", "256 MiB", "1 KiB", "1234568", "123.40", "10.50-14.75"):
        assert text in shown.getvalue()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--collectives", "allgather"), "there is no collective 'allgather'; they are broadcast, scatter"),
        (("--sizes", "2"), "give one or more sizes of 4 bytes or more"),
        (("--sizes", "1Kib,large"), "--sizes='large' is no size"),
        (("--sizes", "4000GiB", "--device", "cpu"), "leave out the largest"),
        (("--out", "/dev/null/at/all.json"), "/dev/null/at cannot be made"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(options: tuple[str, ...], said: str) -> None:
    result = invoke(*options)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
