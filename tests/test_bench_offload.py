"""`zerofold bench offload`: its rows on small numbers, its processes, and one tiny run from end to end."""

import json
import os
import time
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from zerofold.bench import deepspeed_ops, offload_rows
from zerofold.bench.alone import AloneError, run_alone
from zerofold.bench.beside_disk import TURNS, DiskTurn
from zerofold.bench.gpt import GPTSize
from zerofold.bench.offload import bench_offload_command, parse_runs, size_for, task_of
from zerofold.bench.offload_engines import OFFLOAD_ENGINES
from zerofold.bench.offload_rows import Measurement, Run, make_row
from zerofold.bench.offload_table import details
from zerofold.bench.offload_worker import OffloadTask, Outcome

GIB = 2**30
SIZE = GPTSize(vocab=64, width=64, layers=2, heads=1, seq=32)
TASK = OffloadTask(
    engine="plain",
    size=SIZE,
    batch=2,
    clip=1.0,
    device="cpu",
    path="",
    device_limit=40 * GIB,
    untimed=2,
    timed=4,
    batches=8,
)
OUTCOME = Outcome(
    psi=SIZE.parameters,
    start_s=1.0,
    window_s=8.0,
    seconds=[1.0, 1.0, 1.5, 1.0],
    losses=[5.0, 4.0, 3.0, 2.0, 1.5, 1.0],
    norms=[9.0, 9.0, 0.5, 2.0, None, 0.9],
    device_peak_bytes=30 * GIB,
    device_reserved_bytes=32 * GIB,
    device_build_peak_bytes=GIB,
    activation_bytes=10 * GIB,
    host_start_bytes=GIB,
    host_peak_bytes=3 * GIB,
    host_parts={"RssAnon": GIB},
    disk_read_bytes=48 * SIZE.parameters,
    disk_written_bytes=48 * SIZE.parameters,
    disk_file_bytes=2 * GIB,
    books={},
)


def invoke(*arguments: str):
    app = typer.Typer()
    app.command()(bench_offload_command)
    return CliRunner().invoke(app, list(arguments))


def row_of(outcome: Outcome, *, engine: str = "zf3_nvme", clip: float = 1.0, plain: Outcome = OUTCOME):
    run = Run(engine, engine, clip)
    return make_row(run, TASK, Measurement(rounds=[{"plain": plain, engine: outcome}]), 1.0)


def test_a_row_counts_the_window_to_the_last_update():
    row = row_of(replace(OUTCOME, window_s=10.0, device_peak_bytes=16 * GIB))
    assert (row.step_s, row.median_s, row.over_plain) == (2.5, 1.0, 1.25)
    assert (row.device_over_activations_gib, row.host_peak_gib) == (6.0, 3.0)
    assert row.host_bytes_per_parameter == round(2 * GIB / SIZE.parameters, 2)
    assert (row.disk_read_per_parameter, row.disk_written_per_parameter) == (12.0, 12.0)
    assert row.bind_rate == pytest.approx(1 / 3, abs=1e-3)  # of the timed steps whose norm is known
    assert row.error is None


def test_an_update_is_compared_with_the_disk_alone_by_medians():
    """A single turn in which the disk was quicker or slower decides nothing."""
    turns = [
        DiskTurn(2.7, {"mixed": 2.9, "in bursts": 3.1}),
        DiskTurn(2.8, {"mixed": 3.0, "in bursts": 1.0}),
        DiskTurn(9.9, {"mixed": 9.0, "in bursts": 2.0}),
    ]
    row = row_of(replace(OUTCOME, disk_turns=turns))
    assert (row.disk_update_gb_per_s, row.disk_raw_gb_per_s, row.disk_turns) == (2.8, 3.0, turns)
    assert "disk: 2.80 GB/s over an update, 93% of the 3.00 GB/s that it does alone" in "\n".join(details(row))
    assert row_of(OUTCOME).disk_raw_gb_per_s is None


def test_only_what_is_off_the_device_counts_as_offloaded():
    tiers = {"device": {"optimizer": 30}, "host": {"optimizer": 60, "gradients": 7}, "nvme": {"optimizer": 30}}
    predicted = {"device": {"optimizer": 15 * GIB, "parameters": 15 * GIB}, "host": {"optimizer": 2 * GIB}}
    update = {"host_threads": 8.0, "host_elements": 890259456.0, "host_seconds": 0.530841162999991}
    books = {"tier_bytes": tiers, "offload": {"predicted": predicted, "update": update}}
    row, large = (row_of(replace(OUTCOME, books=books), engine=engine) for engine in ("zf3_nvme", "zf3_large"))
    assert row.offloaded_parameters == round(0.75 * SIZE.parameters)
    assert details(row)[1:] == [
        "device: 30.00 GiB predicted for states and the update, 30.00 GiB at the peak",
        "host: 2.00 GiB predicted, 3.00 GiB measured (+50.0%)",
        "update: host threads 8, host elements 8.9e+08, host seconds 0.531",
    ]
    assert "device: 30.00 GiB predicted, 30.00 GiB measured (+0.0%)" in details(large)


@pytest.mark.parametrize(
    ("engine", "clip", "losses", "error"),
    [
        ("zf3_opt", 1.0, [5.0, 4.0, 3.2], "does not train as plain PyTorch does"),
        ("zf3_opt", 9.0, [5.0, 4.0, 3.2], ""),  # at another clip it may
        ("zf3_opt", 9.0, [5.0, float("nan"), 3.0], "not finite"),
        ("zf3_large", 1.0, [5.0, 5.1, 4.0], "the loss does not fall"),
        ("zf3_large", 1.0, [9.0, 8.0, 7.0], ""),  # it has a model of its own
    ],
)
def test_a_run_that_trains_wrongly_is_named(engine, clip, losses, error):
    plain = replace(OUTCOME, losses=[5.0, 4.0, 3.0])
    found = row_of(replace(OUTCOME, losses=losses), engine=engine, clip=clip, plain=plain).error or ""
    assert error in found
    assert bool(error) == bool(found)


def test_runs_and_sizes():
    assert [run.clip for run in parse_runs("plain, zf3_opt@1e-3", 2.0)] == [2.0, 1e-3]
    for wanted in (1e5, 3.38e9, 20e9):
        size = size_for(wanted, vocab=512, seq=64)
        block = 12 * size.width**2 + 4 * size.width
        assert size.layers == 1 or wanted <= size.parameters < wanted + block


def test_only_engines_that_try_ways_take_all_untimed_steps():
    common, large = replace(TASK, untimed=8), replace(TASK, untimed=1)
    untimed = {run.label: task_of(run, common, large).untimed for run in parse_runs(",".join(OFFLOAD_ENGINES), 1.0)}
    assert {label for label, steps in untimed.items() if steps == 8} == {"zf3_opt", "zf3_all", "zf3_auto", "zf3_nvme"}
    assert untimed["ds3_cpu"] == untimed["plain"] == 2
    assert untimed["zf3_large"] == 1


def test_a_process_is_killed_when_its_time_is_up():
    start = time.monotonic()
    with pytest.raises(AloneError, match="not done after 1 s, so it was killed"):
        run_alone("time:sleep", 60, timeout=0.6)
    assert time.monotonic() - start < 10


def test_locks_of_killed_builds_go_and_older_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for op, age in (("old", 100), ("new", 0)):
        (tmp_path / op).mkdir()
        (tmp_path / op / "lock").touch()
        os.utime(tmp_path / op / "lock", (time.time() - age,) * 2)
    deepspeed_ops.forget_broken_builds(time.time() - 50)
    assert [lock.parent.name for lock in tmp_path.glob("*/lock")] == ["old"]


@pytest.mark.parametrize(
    ("preset", "expected"), [(None, "9.0"), ("9.0a", "9.0"), ("8.0;9.0a", "9.0"), ("8.6+PTX", "8.6+PTX")]
)
def test_deepspeed_builds_for_an_architecture_that_it_can_read(monkeypatch, preset, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in ("PATH", "DS_SKIP_CUDA_CHECK"):  # which it changes as well
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", preset or "")
    deepspeed_ops._prepare_environment()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == expected


def test_tiny_offload_run(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # on two busy cores threads that wait for each other spin
    out = tmp_path / "result.json"
    sizes = ["--d", "64", "--layers", "2", "--vocab", "64", "--seq", "32", "--batch", "2", "--device", "cpu"]
    options = [
        "--engines",
        "plain,zf3@1e-3,zf3_nvme",
        "--steps",
        "2",
        "--path",
        str(tmp_path),
        "--json",
        "--out",
        str(out),
    ]
    result = invoke(*sizes, *options)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary == json.loads(out.read_text())
    plain, zf3, nvme = summary["rows"]
    assert (plain["engine"], zf3["engine"], zf3["clip"], zf3["bind_rate"]) == ("plain", "zf3@1e-3", 1e-3, 1.0)
    assert zf3["norms"][0] == pytest.approx(plain["norms"][0], rel=0.02)
    assert zf3["losses"][0] == pytest.approx(plain["losses"][0], abs=1e-3)
    assert len(zf3["losses"]) == offload_rows.COMPARED_STEPS == 4
    assert 0 < zf3["median_s"] < 60
    assert zf3["host_peak_gib"] > zf3["host_start_gib"] > 0.05
    assert len(nvme["disk_turns"]) == TURNS
    assert min(nvme["disk_update_gb_per_s"], nvme["disk_raw_gb_per_s"]) > 0
    assert list(tmp_path.iterdir()) == [out]  # the folders for states went with the runs


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--engines", "zf3,ddp"], "no engine 'ddp'; the engines are plain, fsdp2_cpu"),
        (["--engines", "zf3@none"], "'none' is no number to clip at; write zf3@0.5"),
        (["--clip", "-1"], "the clip must be above 0, not -1"),
        (["--engines", ","], "--engines names no engine"),
        (["--path", "/no/such/folder"], "--path /no/such/folder: there is no such folder"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(arguments, hint):
    result = invoke("--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert hint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
