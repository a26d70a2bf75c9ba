"""What the host takes for a step: measured beforehand, and what follows for steps of other batches."""

from __future__ import annotations

import json
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.plan_models import H200, gpt
from torch import Tensor
from torch.autograd import DeviceType
from typer.testing import CliRunner

from zerofold.bench.plan_timing import seconds_by_kernel
from zerofold.cli import build_app
from zerofold.plan import probe as probing
from zerofold.plan.call import plan
from zerofold.plan.host import host_seconds
from zerofold.plan.machine import Machine
from zerofold.plan.measure import this_machine
from zerofold.plan.point import Point
from zerofold.plan.presets import preset
from zerofold.plan.probe import Step, probe
from zerofold.plan.shape import Launching
from zerofold.plan.times import times

CPU = torch.device("cpu")


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        time.sleep(0.010)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        time.sleep(0.020)
        return gradient


def test_each_part_of_a_step_is_timed_by_itself() -> None:
    taken = {"step": 0, "clear": 0}
    weight = torch.ones(1, requires_grad=True)

    def pause(part: str, seconds: float) -> None:
        taken[part] += 1
        # The first two are slow, as where a kernel is compiled: they are not to count.
        time.sleep(seconds if taken[part] > 2 else 10 * seconds)

    step = Step(lambda: Slow.apply(weight).sum(), lambda: pause("step", 0.005), lambda: pause("clear", 0.003))
    found = probe(step, CPU, samples=1, checkpoint_every=1)
    assert taken == {"step": probing.STEPS + 2, "clear": probing.STEPS + 2}
    assert 0.010 <= found.forward < 0.020
    assert 0.020 <= found.backward < 0.040
    assert 0.005 <= found.update < 0.025
    assert 0.003 <= found.clear < 0.015
    assert (found.checkpoint_every, found.samples, found.waits) == (1, 1, 0)


def test_waits_are_counted_by_cudas_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with probing._waits_counted(torch.device("cuda")) as count:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        assert count() == 3
    assert modes == ["warn", 0]


def ran(checkpoint_every: int = 0, **seconds: float) -> Launching:
    return Launching(
        checkpoint_every=checkpoint_every,
        samples=1,
        **{"forward": 0.0, "backward": 0.0, "update": 0.0, "clear": 0.0} | seconds,
    )


SMALL = gpt(layers=4, hidden=256, tokens=64, vocab=512)
LARGE = gpt(layers=28, hidden=3072, heads=24, tokens=2048)


def test_a_step_that_the_host_bounds_takes_what_the_host_took() -> None:
    """And the update on the device after it, which begins when the norm has been read."""
    model = replace(LARGE, launched=(ran(forward=1.0, backward=2.0, update=0.5), ran(1, forward=1.25, backward=3.5)))
    for batch in (1, 2):
        found = times(model, H200, Point(micro_batch=batch))
        assert found.update > 0.005 * found.step
        assert found.step == pytest.approx(3.5 + found.update, rel=1e-3)
        assert found.bottleneck == "launch"
    for interval in (1, 2):  # every block is computed again in both
        every = replace(model, activities=(*model.activities, replace(model.activity(1), checkpoint_every=2)))
        found = times(every, H200, Point(checkpoint_every=interval))
        assert found.step == pytest.approx(4.75 + found.update, rel=1e-3)
    four = times(model, H200, Point(accumulate=4))
    assert four.step == pytest.approx(4 * 3.0 + 0.5 + four.update, rel=1e-3)


def test_a_host_that_is_ahead_costs_its_update_alone() -> None:
    alone = times(replace(LARGE, launched=(ran(),)), H200, Point(micro_batch=8))
    ahead = ran(forward=0.1 * alone.compute, backward=0.1 * alone.compute, update=0.5, clear=0.9 * alone.update)
    found = times(replace(LARGE, launched=(ahead,)), H200, Point(micro_batch=8))
    assert found.step == pytest.approx(alone.step + 0.5, rel=1e-3)  # gradients are cleared while the device updates
    late = replace(ahead, clear=alone.update + 0.25)
    assert times(replace(LARGE, launched=(late,)), H200, Point(micro_batch=8)).step == pytest.approx(
        found.step + 0.25, rel=1e-3
    )


def test_an_update_that_was_seen_to_end_takes_what_it_took() -> None:
    """Whatever the host does beside it. With other ranks the device has less to do, and the host as much."""
    alone = times(replace(LARGE, launched=(ran(),)), H200, Point(micro_batch=8))
    seen = replace(LARGE, launched=(ran(update=0.25, clear=0.125, settled=alone.update + 0.0625),))
    for batch in (2, 8):
        found, without = (
            times(model, H200, Point(micro_batch=batch)) for model in (seen, replace(seen, launched=(ran(),)))
        )
        assert found.step - without.step == pytest.approx(0.0625)
    cut = times(seen, replace(H200, devices=8), Point(micro_batch=8))
    assert cut.update < 0.3 * alone.update
    assert cut.exposed["launch"] == pytest.approx(0.0625, rel=1e-3)
    short = replace(LARGE, launched=(ran(settled=0.5 * alone.update),))
    assert times(short, H200, Point(micro_batch=8)).step == pytest.approx(alone.step)


def test_what_is_made_ready_for_an_update_costs_where_the_host_is_not_ahead() -> None:
    alone = times(replace(LARGE, launched=(ran(),)), H200, Point(micro_batch=8))
    settled = alone.update + 0.25
    for passes, costs in ((0.1 * alone.compute, 0.0625), (4 * alone.compute, 0.25)):
        known = [ran(backward=passes, settled=settled, ahead=ahead) for ahead in (0.0, 0.1875)]
        all_after, in_part = (times(replace(LARGE, launched=(each,)), H200, Point(micro_batch=8)) for each in known)
        assert all_after.step - in_part.step == pytest.approx(0.25 - costs, abs=1e-3)


def test_what_is_over_sooner_behind_other_work_was_done_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does nothing but wait: the host needs 20 ms, 15 of them before it asks for the norm."""
    clock = SimpleNamespace(free_at=0.0)

    class Event:
        def __init__(self, **_: object) -> None:
            self.time = 0.0

        def record(self) -> None:
            self.time = max(time.perf_counter(), clock.free_at)

        def elapsed_time(self, other: Event) -> float:
            return (other.time - self.time) * 1000

    def wait(*_: object) -> None:
        time.sleep(max(0.0, clock.free_at - time.perf_counter()))

    def occupy(cycles: int) -> None:
        clock.free_at = time.perf_counter() + cycles / probing._CYCLES

    def update() -> None:
        time.sleep(0.015)
        wait()
        time.sleep(0.005)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "_sleep", occupy)
    monkeypatch.setattr(probing, "_waits_counted", lambda device: nullcontext(lambda: 0))
    weight = torch.ones(1, requires_grad=True)
    step = Step(lambda: weight.sum(), update, lambda: None)
    found = probe(step, torch.device("cuda"), samples=1, checkpoint_every=0, steps=3)
    assert found.settled == pytest.approx(0.020, abs=0.004)
    assert found.ahead == pytest.approx(0.015, abs=0.004)


def test_a_host_that_waits_in_every_block_loses_its_lead() -> None:
    """With as much to do as the device, it is ahead of it in one kernel and behind in the next."""
    alone = times(replace(LARGE, launched=(ran(),)), H200, Point(micro_batch=8))
    equal = ran(forward=0.5 * alone.compute, backward=0.5 * alone.compute)
    steps = [
        times(replace(LARGE, launched=(replace(equal, waits=waits),)), H200, Point(micro_batch=8)).step
        for waits in (0, 1, 28, 29, 64)
    ]
    over = [(step - alone.step) / alone.compute for step in steps]
    assert over == pytest.approx([0.09, 0.09, 0.09, 0.19, 0.19], abs=0.005)


def test_the_fastest_passes_and_the_fastest_update_may_be_of_two_steps() -> None:
    one, other = ran(forward=1.0, backward=3.0, update=0.5, clear=0.25), ran(forward=2.0, backward=1.5, update=1.0)
    for found in (one.fastest(other), other.fastest(one)):
        assert found == ran(forward=2.0, backward=1.5, update=0.5, clear=0.25)


def test_what_was_not_measured_is_counted_as_before() -> None:
    """Steps without recomputation tell nothing of those with it."""
    model = replace(SMALL, launched=(ran(forward=1.0),))
    assert host_seconds(model, H200, Point()).passes == 1.0
    assert host_seconds(model, H200, Point(checkpoint_every=1)) == host_seconds(SMALL, H200, Point(checkpoint_every=1))
    assert host_seconds(SMALL, H200, Point(checkpoint_every=1)).passes > host_seconds(SMALL, H200, Point()).passes > 0


def test_a_cpu_adds_the_arithmetic_of_a_larger_batch() -> None:
    """It has computed what it launched, so a step of the same batch takes what it took, and a larger one more."""
    machine = replace(preset("cpu"), flops_fp32=1e11)
    point = Point(micro_batch=1, precision="fp32")
    one = times(SMALL, machine, point)
    assert one.compute > 0
    model = replace(SMALL, launched=(ran(forward=one.compute, backward=1.0, update=one.update + 0.5, clear=0.25),))
    assert times(model, machine, point).step == pytest.approx(one.compute + 1.0 + one.update + 0.5 + 0.25)
    four = times(SMALL, machine, replace(point, micro_batch=4)).compute
    assert times(model, machine, replace(point, micro_batch=4)).step == pytest.approx(four + 1.75 + one.update)


@pytest.fixture(scope="module")
def timed_on_the_cpu() -> dict:
    args = [
        "bench",
        "plan",
        "--device",
        "cpu",
        "--only",
        "gpt",
        "--times-only",
        "--profile",
        "--batches",
        "2",
        "--json",
    ]
    return json.loads(CliRunner().invoke(build_app(), args).stdout)


def test_the_file_alone_tells_what_a_time_was_made_of(timed_on_the_cpu: dict) -> None:
    assert not timed_on_the_cpu["errors"]
    assert len(timed_on_the_cpu["runs"]) == 2  # a rank alone, with and without recomputation
    before = timed_on_the_cpu["beforehand"]["gpt"]
    assert before["rates"].keys() == {"flops", "memory", "kernel"}
    assert [(each["checkpoint_every"], each["samples"]) for each in before["launching"]] == [(0, 1), (1, 1)]
    for run in timed_on_the_cpu["runs"]:
        assert run["measured_bytes"] is None
        assert run["off"] is None
        of_host = {name for name in run["parts"] if name.startswith("host_")}
        assert of_host == {"host_passes", "host_update", "host_clear"}
        added = sum(seconds for name, seconds in run["parts"].items() if name not in of_host)
        assert added == pytest.approx(run["predicted_s"])
        measured = before["launching"][run["run"]["checkpointing"]]
        assert 0 < run["parts"]["host_passes"] <= measured["forward"] + measured["backward"]
        assert run["parts"]["host_update"] == measured["update"]


def test_steps_follow_from_what_was_measured_with_another_batch(timed_on_the_cpu: dict) -> None:
    """Loosely: other work on the machine slows one and not the other. Recomputation must show in both."""
    without, recomputed = timed_on_the_cpu["runs"]
    for run in (without, recomputed):
        assert 1 / 3 < run["predicted_s"] / run["measured_s"] < 3
    assert recomputed["predicted_s"] > without["predicted_s"]


def test_a_profile_names_what_ran_longest(timed_on_the_cpu: dict) -> None:
    assert [profile["run"] for profile in timed_on_the_cpu["profiles"]] == [
        run["run"] for run in timed_on_the_cpu["runs"]
    ]
    for profile in timed_on_the_cpu["profiles"]:
        seconds = list(profile["kernels"].values())
        assert seconds == sorted(seconds, reverse=True)
        assert 0 < sum(seconds) <= profile["device_s"]
        assert "aten::mm" in profile["kernels"] or "aten::addmm" in profile["kernels"]


def test_of_a_gpus_profile_kernels_count_and_not_who_launched_them() -> None:
    def event(key: str, kind: DeviceType, device: float, named: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            key=key,
            device_type=kind,
            is_user_annotation=named,
            self_device_time_total=device,
            self_cpu_time_total=1000.0,
        )

    events = [
        event("gemm", DeviceType.CUDA, 30.0),
        event("Memcpy HtoD", DeviceType.CUDA, 5.0),
        event("aten::mm", DeviceType.CPU, 30.0),
        event("cudaLaunchKernel", DeviceType.CPU, 0.0),
        event("unit 3", DeviceType.CUDA, 35.0, named=True),
        event("gemm", DeviceType.CUDA, 10.0),
    ]
    assert seconds_by_kernel(events, on_cuda=True) == pytest.approx({"gemm": 40e-6, "Memcpy HtoD": 5e-6})


BLOCKS = """
from torch import nn, zeros

def build():
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*blocks), lambda samples: {"input": zeros(samples, WIDTH)}

def bare():
    return build()[0]
"""


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "blocks_to_run.py").write_text(f"WIDTH = 16\n{BLOCKS}")
    (tmp_path / "blocks_too_large.py").write_text(f"WIDTH = 2**22\n{BLOCKS}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "blocks_to_run:build"


@pytest.fixture(scope="module")
def machine() -> Machine:
    return this_machine()


def test_a_plan_may_run_the_model(blocks: str, machine: Machine) -> None:
    for interval in (0, 1, 2):
        found = plan(function=blocks, machine=machine, precision="fp32", checkpoint_every=interval, run=True)
        (ran_here,) = found.model.launched
        assert (ran_here.checkpoint_every, ran_here.samples) == (interval, 1)
        assert found.stages[0].times.step > 0.9 * (ran_here.passes + ran_here.update)
        assert any("the host took" in note for note in found.model.notes)
    assert not plan(function=blocks, machine=machine, precision="fp32").model.launched
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--function", "blocks_to_run:build", "--run"], "error: --run measures on this machine, and the plan is for"),
        (["--params", "1e6", "--this-machine", "--run"], "error: --run needs a model that can be built"),
        (["--function", "blocks_to_run:bare", "--this-machine", "--run"], "error: --run needs an example"),
        (["--function", "blocks_too_large:build", "--this-machine", "--run"], "error: --run: one sample of blocks_too"),
    ],
)
def test_what_cannot_be_run_is_said(
    blocks: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    if "--function" in args:  # the other case measures itself
        # By the module itself: `zerofold.plan` is also a function of that name.
        monkeypatch.setattr(import_module("zerofold.plan.command"), "this_machine", lambda **_: machine)
    result = CliRunner().invoke(build_app(), ["plan", *args])
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
