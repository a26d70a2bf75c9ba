"""`zerofold bench`: the statistics on small numbers, and one tiny run of each command from end to end."""

import json
import os

import pytest
import torch
import typer
from typer.testing import CliRunner

from zerofold.bench import disk, figures, memory, mixed, precision, step
from zerofold.bench.fleet import EngineError, EngineProcesses, Setting
from zerofold.bench.gpt import GPT, GPTSize, RandomTokens
from zerofold.bench.io import bench_io_command
from zerofold.bench.precision_runs import Case, Outcome
from zerofold.bench.step import Measurement, Record, bench_step_command, make_row
from zerofold.bench.update import bench_update_command
from zerofold.plan.states import paper_bytes

TINY = GPTSize(vocab=64, width=64, layers=2, heads=2, seq=16)
SETTING = Setting(world=2, device="cpu", size=TINY, batch=2, timeout=120)
MIB = 2**20


TINY_OPTIONS = [
    "--d",
    "64",
    "--layers",
    "2",
    "--heads",
    "2",
    "--vocab",
    "64",
    "--seq",
    "16",
    "--batch",
    "2",
    "--device",
    "cpu",
]


def invoke(*arguments: str, command=bench_step_command):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_a_turn_is_the_median_of_its_slowest_ranks():
    assert figures.turn_seconds([[1.0, 5.0, 2.0], [3.0, 1.0, 2.5]]) == 3.0


def test_ratios_compare_within_a_round():
    # The machine is ten times slower in the second round, which must not show.
    rounds = [{"ddp": 1.0, "zf3": 1.1}, {"ddp": 10.0, "zf3": 10.0}, {"ddp": 1.0, "zf3": 1.3}, {"ddp": 1.0}]
    assert figures.ratios(rounds, "zf3", "ddp") == pytest.approx((1.1, 1.0, 1.3))
    assert figures.ratios(rounds, "zf3", "none") is None


def test_another_engine_comes_first_in_each_round():
    orders = [figures.rotated(["a", "b", "c"], index) for index in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_batches_fit_the_memory_and_keep_the_references():
    engines = ["none", "ddp", "zro", "fsdp2", "ds1", "ds2", "zf0", "zf3"]
    batches = figures.plan_batches(engines, ["none", "ddp"], at_once=4)
    assert batches == [
        ["none", "ddp", "zro", "fsdp2"],
        ["none", "ddp", "zf0", "zf3"],
        ["none", "ddp", "ds1", "ds2"],
    ]
    # Too little memory for even one beside the references: one at a time, not none.
    assert figures.plan_batches(engines[:4], ["none", "ddp"], at_once=0) == [
        ["none", "ddp", "zro"],
        ["none", "ddp", "fsdp2"],
    ]
    assert figures.plan_batches(["ddp"], ["ddp"], at_once=4) == [["ddp"]]


def test_largest_gap_is_over_ranks_and_steps():
    assert figures.largest_gap([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.5], [3.0, 4.25]]) == 0.5


def measurement(zf3_losses: list[list[float]]) -> Measurement:
    ddp = Record(losses=[[5.0, 4.0]], peak_bytes=100 * MIB, peak_over_start_bytes=50 * MIB)
    zf3 = Record(losses=zf3_losses, peak_bytes=80 * MIB, peak_over_start_bytes=30 * MIB)
    rounds = [{"ddp": 0.1, "zf3": 0.11}, {"ddp": 0.2, "zf3": 0.24}, {"ddp": 0.1, "zf3": 0.13}]
    return Measurement(rounds=rounds, records={"ddp": ddp, "zf3": zf3}, errors={"ds3": "not installed"})


def test_a_row_has_ratios_times_memory_and_losses():
    row = make_row("zf3", measurement([[5.0, 4.0005]]))
    assert (row.over_ddp, row.over_ddp_min, row.over_ddp_max) == (1.2, 1.1, 1.3)
    assert (row.step_ms, row.peak_mib, row.peak_over_start_mib) == (130, 80, 30)
    assert row.loss_diff_ddp == pytest.approx(5e-4)
    assert row.error is None


@pytest.mark.parametrize("wrong", [4.1, float("nan")])
def test_an_engine_that_trains_wrongly_is_named(wrong):
    assert "does not train as DDP does" in (make_row("zf3", measurement([[5.0, wrong]])).error or "")


def test_a_failed_engine_is_a_row_with_its_reason():
    row = make_row("ds3", measurement([[5.0, 4.0]]))
    assert (row.error, row.over_ddp) == ("not installed", None)


def test_tiny_run_from_end_to_end(tmp_path):
    out = tmp_path / "result.json"
    options = "--engines none,ddp,fsdp2 --rounds 2 --steps 2 --nproc 2 --json"
    result = invoke(*options.split(), *TINY_OPTIONS, "--out", str(out))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary == json.loads(out.read_text())
    rows = {row["engine"]: row for row in summary["rows"]}
    assert list(rows) == ["none", "ddp", "fsdp2"]
    assert all(row["error"] is None and row["step_ms"] > 0 and row["peak_mib"] > 100 for row in rows.values())
    assert rows["ddp"]["over_ddp"] == 1.0
    assert rows["fsdp2"]["loss_diff_ddp"] < 1e-4 < rows["none"]["loss_diff_ddp"]
    assert summary["model"]["psi"] == TINY.parameters
    assert summary["machine"]["backend"] == "gloo"


def test_a_rank_that_dies_is_noticed_at_once_and_the_others_go_too():
    with EngineProcesses("ddp", SETTING) as engine:
        engine.ready()
        processes = [member.process for member in engine._ranks]
        processes[1].kill()
        with pytest.raises(EngineError, match="rank 1 was ended by SIGKILL"):
            engine.turn(untimed=0, timed=1)
        assert all(process.poll() is not None for process in processes)


def test_engines_that_fail_tell_their_errors():
    """The embedding cannot be that large, so every engine fails where it is built."""
    huge = Setting(world=1, device="cpu", size=GPTSize(vocab=2**48, width=2, heads=1), batch=1, timeout=60)
    seen = Measurement()
    step.measure_batch(["none", "ddp"], huge, seen, rounds=1, steps=1, progress=lambda _: None)
    assert set(seen.errors) == {"none", "ddp"}
    assert seen.errors["ddp"].startswith("rank 0: RuntimeError")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--engines", "ddp,warp"], "no engine 'warp'; the engines are none, ddp"),
        (["--d", "60", "--heads", "8"], "60 does not divide into 8 heads"),
        (["--malloc", "jemalloc"], "--malloc must be default or tuned"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda"),
        (["--out", "/dev/null/folder/file.json"], "cannot be made"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(arguments, hint):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert hint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_update_is_timed_beside_a_copy():
    app = typer.Typer()
    app.command()(bench_update_command)
    result = CliRunner().invoke(app, ["--params", "2e4", "--rounds", "2", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == ["plain copy", "one pass", "one pass, no copy", "separate passes"]
    assert rows["plain copy"]["share_of_copy"] == rows["one pass"]["over_one_pass"] == 1.0
    table = CliRunner().invoke(app, ["--params", "2e4", "--rounds", "1", "--device", "cpu"])
    assert "separate passes" in table.output
    refused = CliRunner().invoke(app, ["--params", "0"])
    assert refused.exit_code == 2
    assert "use 1 or more" in refused.stderr


def test_the_ceilings_of_offloading_are_measured(tmp_path):
    result = invoke("--size", "0.002", "--path", str(tmp_path), "--json", command=bench_io_command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["skipped"] == ({} if torch.cuda.is_available() else {"pcie": "no accelerator here"})
    rows = {(row["part"], row["name"]): row for row in found["rows"]}
    assert all(row["gb_per_s"] > 0 for row in rows.values())
    assert rows["host update", "plain copy"]["share"] == 1.0
    assert {"1 thread", "chosen", "blocks of 2**19"} <= {name for part, name in rows if part == "host update"}
    through, raw = rows["disk", "mixed, NVMe tier"], rows["disk", "mixed, raw"]
    assert through["share"] == pytest.approx(through["gb_per_s"] / raw["gb_per_s"])
    in_file = rows["engine", "update in a file"]
    orders = [rows["disk", "mixed, raw"]["gb_per_s"], rows["disk", "in bursts, raw"]["gb_per_s"]]
    assert in_file["share"] == pytest.approx(in_file["gb_per_s"] / max(orders))
    assert rows["engine", "update on the host"]["ceiling"] == "chosen"
    assert not [file for file in tmp_path.rglob("*") if file.is_file()], "the measurement leaves nothing behind"


def test_a_disk_alone_moves_the_same_in_either_order():
    """Of 7 blocks 3 are read and 3 written."""
    mixed, bursts = (list(disk._jobs(order, range(7), 1)) for order in disk.ORDERS)
    assert [offset for _, offset in mixed] == [0, 3, 1, 4, 2, 5]
    assert sorted(mixed, key=str) == sorted(bursts, key=str)
    long = list(disk._jobs("in bursts", range(400), disk.BURST // 50))
    assert [move for move, _ in long] == ([os.preadv] * 50 + [os.pwritev] * 50) * 4


def test_what_cannot_be_measured_is_named(tmp_path, monkeypatch):
    for options, message in (
        (["--size", "0"], "--size 0.0: use 0.0010 GiB or more"),
        (["--size", "1e9"], "GiB are available; use --size"),
        (["--path", str(tmp_path / "none")], "there is no such folder"),
    ):
        refused = invoke(*options, command=bench_io_command)
        assert refused.exit_code == 2
        assert message in refused.stderr

    def full(folder, nbytes):
        raise OSError("the disk is full")

    monkeypatch.setattr("zerofold.bench.io.disk_rates", full)
    monkeypatch.setattr("zerofold.bench.io.engine_rates", lambda *_: [])
    failed = invoke("--size", "0.002", "--path", str(tmp_path), command=bench_io_command)
    assert failed.exit_code == 1
    assert "error: disk: the disk is full" in failed.stderr
    assert "plain copy" in failed.stdout  # what was measured is shown all the same


def test_a_recomputed_model_trains_the_same():
    tokens, targets = RandomTokens(TINY, batch=2, rank=0).at(0)
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = GPT(TINY, checkpointing=checkpointing)
        model(tokens, targets).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_every_second_round_runs_backwards():
    assert [figures.there_and_back(["a", "b"], index) for index in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


@pytest.mark.parametrize(("second_loss", "error"), [(4.01, None), (4.2, "does not train as plain PyTorch does")])
def test_a_mixed_row_has_times_ratios_and_losses(second_loss, error):
    seen = mixed.Measurement(
        rounds=[{"plain": 1.0, "zf3": 1.1}, {"plain": 2.0, "zf3": 2.0}],
        records={
            "plain": mixed.Record(seconds=[1.0, 2.0], losses=[5.0, 4.0]),
            "zf3": mixed.Record(seconds=[1.1, 1.0, 2.0], losses=[5.0, second_loss], device_peak_bytes=2**31),
        },
        errors={"ds3": "not installed"},
    )
    setting = Setting(world=1, device="cpu", size=TINY, batch=2)
    row = mixed.make_row("zf3", seen, setting)
    assert (row.step_s, row.step_s_min, row.step_s_max) == (1.1, 1.0, 2.0)
    assert (row.over_plain, row.over_plain_min, row.over_plain_max) == (1.05, 1.0, 1.1)
    assert (row.tokens_per_s, row.device_peak_gib) == (29.1, 2.0)
    assert (row.first_loss, row.last_loss) == (5.0, second_loss)
    assert row.error == error or (row.error or "").startswith(error or "no error")
    assert mixed.make_row("ds3", seen, setting).error == "not installed"
    assert mixed.make_row("zf0", seen, setting).step_s is None  # its turn has not come


def test_tiny_mixed_run(tmp_path):
    out = tmp_path / "result.json"
    arguments = ["--engines", "zf3", "--rounds", "1", "--steps", "2", *TINY_OPTIONS, "--json", "--out", str(out)]
    result = invoke(*arguments, command=mixed.bench_mixed_command)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary == json.loads(out.read_text())
    plain, zf3 = summary["rows"]
    assert (plain["engine"], zf3["engine"]) == ("plain", "zf3")
    assert plain["over_plain"] == 1.0
    assert zf3["error"] is None
    assert zf3["first_loss"] == pytest.approx(plain["first_loss"], abs=1e-3)
    assert zf3["last_loss"] == pytest.approx(plain["last_loss"], abs=2e-2)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--engines", "zf3,ddp"], "no engine 'ddp'; the engines are plain, fsdp2"),
        (["--d", "60", "--heads", "8"], "60 does not divide into 8 heads"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda"),
        (["--out", "/dev/null/folder/file.json"], "cannot be made"),
    ],
)
def test_misuse_of_mixed(arguments, hint):
    result = invoke(*arguments, command=mixed.bench_mixed_command)
    assert result.exit_code == 2
    assert hint in result.stderr


def test_the_formula_is_the_papers():
    size = memory.SIZES["cuda"]
    assert size.parameters == pytest.approx(7.5e9, rel=0.003)
    task = memory.MemoryTask(stage=1, world=64, size=size, device="cuda", fused=True)
    assert memory.judge(task, None).formula_gb == pytest.approx(31.4, abs=0.05)


@pytest.mark.parametrize(("over", "ok"), [(-0.4, True), (0.029, True), (0.031, False)])
def test_a_stage_may_be_a_little_over_its_formula(over, ok):
    task = memory.MemoryTask(stage=3, world=4, size=TINY, device="cpu", fused=False)
    resident = round(paper_bytes(TINY.parameters, 3, 4).total * (1 + over))
    held = memory.Held(resident=resident, state_bytes={}, released={}, step_peak=None, build_peak=None)
    result = memory.judge(task, held)
    assert (result.ok, result.over_percent) == (ok, pytest.approx(100 * over, abs=0.01))
    assert not memory.judge(task, None, "rank 0: OutOfMemoryError").ok


def test_tiny_memory_run(tmp_path):
    out = tmp_path / "result.json"
    sizes = ["--d", "256", "--layers", "2", "--heads", "2", "--vocab", "256", "--seq", "8", "--world", "16"]
    arguments = ["--stages", "3", *sizes, "--device", "cpu", "--json", "--out", str(out)]
    result = invoke(*arguments, command=memory.bench_memory_command)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary == json.loads(out.read_text())
    (stage,) = summary["stages"]
    assert stage["ok"]
    assert -13 < stage["over_percent"] < 3  # the formula's 2 bytes for the parameters may come out of the master
    assert sum(stage["state_gb"].values()) == pytest.approx(stage["resident_gb"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--stages", "2,4"], "no stage '4'; choose from 0, 1, 2, 3"),
        (["--stages", ","], "--stages names no stage"),
        (["--d", "60", "--heads", "8"], "60 does not divide into 8 heads"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda"),
    ],
)
def test_misuse_of_memory(arguments, hint):
    result = invoke(*arguments, command=memory.bench_memory_command)
    assert result.exit_code == 2
    assert hint in result.stderr


def test_cases_are_every_precision_at_every_stage_after_ddp():
    cases = precision.make_cases(["fp32", "bf16", "states"], [0, 3])
    assert [str(case) for case in cases] == [
        *("fp32 DDP", "fp32, stage 0", "fp32, stage 3", "bf16, stage 0", "bf16, stage 3"),
        *("moments bf16, stage 2", "master bf16, stage 2", "both bf16, stage 2"),
    ]


def precision_row(stage: int, digests: tuple[str, str], loss: float = 2.0):
    by_rank = [Outcome(loss, 2.5, digest, 1, 3.0) for digest in digests]
    return precision.make_row(Case("bf16", stage), by_rank, Outcome(2.0, 2.5, "a", None, 3.0))


@pytest.mark.parametrize("loss", [2.03, 1.97, float("nan")])
def test_a_loss_off_the_reference_fails_the_row(loss):
    assert precision_row(1, ("b", "b"), 2.01).ok
    assert not precision_row(1, ("b", "b"), loss).ok
    assert not precision_row(1, ("b", "c")).ok  # the ranks ended apart


def test_the_page_has_its_command_the_rows_and_the_bits():
    rows = [precision_row(0, ("a", "a")), *(precision_row(stage, ("b", "b")) for stage in (1, 2, 3))]
    assert precision.same_bits(rows) == {"bf16": True}
    assert precision.same_bits([*rows, precision_row(3, ("c", "c"))]) == {"bf16": False}
    page = precision.markdown(rows, "zerofold bench precision", "200 steps.")
    assert "`zerofold bench precision`" in page.splitlines()[1]
    assert "| bf16 | 2 | 2.0000 | +0.00% | 2.5000 | +0.00% | b | 1 | ✓ | 3 |" in page
    assert "- bf16: stages 1, 2, 3 ended with the same bits." in page


def test_tiny_precision_run(tmp_path):
    page = tmp_path / "precision.md"
    sizes = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "2"]
    options = ["--steps", "4", "--precisions", "fp32,bf16", "--stages", "1,3", "--device", "cpu", "--nproc", "2"]
    arguments = [*options, *sizes, "--json", "--write", str(page)]
    result = invoke(*arguments, command=precision.bench_precision_command)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    ddp, *rows = summary["rows"]
    assert (ddp["stage"], ddp["loss_off"]) == (None, 0)
    assert [(row["precision"], row["stage"]) for row in rows] == [("fp32", 1), ("fp32", 3), ("bf16", 1), ("bf16", 3)]
    assert all(abs(row["loss_off"]) < (1e-5 if row["precision"] == "fp32" else 1e-2) for row in rows)
    assert summary["same_bits"] == {"fp32": True, "bf16": True}
    assert page.read_text().count("\n| ") == 7  # headings, a rule, five rows


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--precisions", "tf32"], "no precision 'tf32' on cpu; choose from fp32, bf16, fp16, states"),
        (["--stages", "5"], "no stage '5'"),
        (["--hidden", "100", "--heads", "6"], "use hidden 96"),
        (["--write", "/dev/null/at/page.md"], "--write /dev/null/at/page.md: /dev/null/at cannot be made"),
    ],
)
def test_misuse_of_precision(arguments, hint):
    result = invoke("--device", "cpu", *arguments, command=precision.bench_precision_command)
    assert result.exit_code == 2
    assert hint in result.stderr
