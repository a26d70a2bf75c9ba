"""States on the host and in a file: every placement trains to the bits of none, on real ranks."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ranks import raised
from torch import Tensor, nn

import zerofold as zf
from zerofold import offloading
from zerofold.compat.deepspeed.ops.adam import DeepSpeedCPUAdam
from zerofold.engine import Engine
from zerofold.gradients_away import AwayGradients
from zerofold.memory.disk import DiskError, DiskStore
from zerofold.memory.disk_file import MAGIC
from zerofold.offload.budget import available

PLACES: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "host"},
    "all": {"optimizer": "host", "parameters": "host"},
    "gradients stay": {"optimizer": "host", "gradients": "device"},
    "half": {"optimizer": 0.5},
    "file": {"optimizer": "nvme"},
    "file, gradients too": {"optimizer": "nvme", "gradients": "nvme"},
    "file, parameters on the host": {"optimizer": "nvme", "parameters": "host"},
    "all in the file": {"optimizer": "nvme", "parameters": "nvme"},
    "gradients alone": {"optimizer": "device", "gradients": "host"},
}


BF16_STATES = zf.Precision(parameters=torch.bfloat16, moments=torch.bfloat16, master=torch.bfloat16)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 16))


def prepared(offload: Any, *, device: str = "cpu", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zf.prepare(model, optimizer, units=Block, offload=offload, **options)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    first: int = 0,
    backwards: int = 1,
    device: str = "cpu",
) -> None:
    for step in range(first, first + steps):
        for part in range(backwards):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + part)).to(device)
            (model(batch).float() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    faces = [p for group in optimizer.param_groups for p in group["params"]]
    found = [zf.full(p) for p in faces]
    return found + [zf.full(optimizer.state[p][name]) for p in faces for name in ("exp_avg", "exp_avg_sq")]


def result(offload: Any, *, backwards: int = 1, device: str = "cpu", **options: Any) -> list[Tensor]:
    options = {"clip": 0.5, "one_pass": True} | options
    model, optimizer = prepared(offload, accumulate=backwards, device=device, **options)
    train(model, optimizer, 3, backwards=backwards, device=device)
    found = states(model, optimizer)
    zf.close(model)
    return found


def places_that_differ(folder: str, stages: list[int], precisions: list[Any], backwards: int, few: bool) -> list[str]:
    """Each placement, or a few of them, against none, which must give the same bits."""
    wrong = []
    names = ("optimizer", "all", "file, gradients too", "all in the file") if few else PLACES
    for stage in stages:
        for precision in precisions:
            options: dict[str, Any] = {"stage": stage, "precision": precision, "backwards": backwards}
            # Without a cut and a master the one pass has no pieces, but where states are offloaded.
            has_pieces = stage > 0 or precision not in (None, "fp32")
            expected = result(None, **options | ({} if has_pieces else {"stage": 1}))
            for name in names:
                place = PLACES[name]
                if "parameters" in place and stage < 3:
                    continue
                offload = place | ({"path": folder} if "nvme" in place.values() else {})
                found = result(offload, **options)
                if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                    wrong.append(f"{name} at stage {stage}, {precision}")
    return wrong


@pytest.mark.parametrize(
    ("world", "stages", "precisions", "backwards", "few"),
    [
        (1, [3], ["bf16", None], 1, False),
        (1, [3], ["bf16", BF16_STATES], 3, False),
        (2, [3], ["bf16"], 1, False),
        (2, [1, 2], ["bf16"], 1, True),
        (4, [3], ["bf16"], 1, True),
        (1, [0, 1, 2, 3], ["bf16", "fp32", None], 3, False),
        (2, [0, 1, 2, 3], ["bf16", None], 2, False),
        (4, [2, 3], ["bf16", None], 1, False),
        (1, [0], ["fp32"], 1, False),
    ],
)
def test_the_same_bits_wherever_the_states_are(
    ranks: Callable[..., list[Any]],
    tmp_path: Any,
    world: int,
    stages: list[int],
    precisions: list[Any],
    backwards: int,
    few: bool,
) -> None:
    assert ranks(world, places_that_differ, str(tmp_path), stages, precisions, backwards, few) == [[]] * world


def folder_of_each_rank(folder: str) -> bool:
    own = Path(folder) / f"disk{dist.get_rank()}"
    own.mkdir()
    model, _ = prepared({"optimizer": "nvme", "path": str(own)})
    has_file = any(own.iterdir())
    zf.close(model)
    return has_file


def test_each_machine_may_have_a_folder_of_its_own(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, folder_of_each_rank, str(tmp_path)) == [True, True]


def test_a_root_without_parameters_of_its_own(ranks: Any) -> None:
    assert ranks(1, trains_without_root) == [True]


def trains_without_root() -> bool:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = zf.prepare(
        model, torch.optim.AdamW(model.parameters()), stage=3, units=nn.Linear, offload={"optimizer": "auto"}
    )
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    found = zf.last_step(model) is not None
    zf.close(model)
    return found


def test_a_killed_runs_file_is_gone_before_room_is_looked_for(ranks: Any, tmp_path: Any) -> None:
    assert ranks(1, files_when_measured, tmp_path) == [[]]


def files_when_measured(folder: Path) -> list[str]:
    tag = "0123456789abcdef"
    about = {"format": MAGIC, "tag": tag, "host": socket.gethostname(), "pid": 1}
    (folder / f"zerofold-rank0-pid1-{tag}.states").write_text(json.dumps(about))
    found = []

    def measured(*args: Any) -> Any:
        found.extend(os.listdir(folder))
        return available(*args)

    with mock.patch.object(offloading, "available", measured), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = prepared({"optimizer": "nvme", "path": folder}, stage=3)
    zf.close(model)
    return found


def checkpoint_across(folder: str) -> list[str]:
    """Saved from each tier, loaded into every other, and trained on: the same as without a break."""
    tiers: list[Any] = [None, {"optimizer": "host", "parameters": "host"}, {"optimizer": "nvme", "path": folder}]
    options: dict[str, Any] = {"stage": 3, "precision": "bf16", "clip": 0.5}
    model, optimizer = prepared(None, **options)
    train(model, optimizer, 4)
    expected = states(model, optimizer)
    zf.close(model)
    for position, tier in enumerate(tiers):
        model, optimizer = prepared(tier, **options)
        train(model, optimizer, 2)
        zf.save(model, optimizer, f"{folder}/{position}")
        zf.close(model)
    wrong = []
    for source in range(len(tiers)):
        for target, tier in enumerate(tiers):
            model, optimizer = prepared(tier, **options)
            zf.load(model, optimizer, f"{folder}/{source}")
            train(model, optimizer, 2, first=2)
            found = states(model, optimizer)
            zf.close(model)
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(f"from {source} to {target}")
    return wrong


def test_checkpoints_do_not_know_of_tiers(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2, checkpoint_across, str(tmp_path)) == [[]] * 2


def keeps_zeros(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Gradients that are zeros and not None: a unit without a gradient is updated all the same."""
    for step in range(4):
        x = model[1](model[0](torch.ones(2, 16)))
        (model[3](model[2](x) if step % 2 else x).float() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def keeps_zeros_of_parameters(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        (model(torch.full((2, 16), float(step))).float() ** 2).mean().backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)


def throws_gradients_away(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        (model(torch.ones(2, 16)).float() ** 2).mean().backward()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 16))
        train(model, optimizer, 1, first=step)


def skips_the_reduction(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        with zf.no_sync(model):
            (model(torch.ones(2, 16)).float() ** 2).mean().backward()
        train(model, optimizer, 1, first=step)


def changes_gradients(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        (model(torch.ones(2, 16)).float() ** 2).mean().backward()
        for parameter in model.parameters():
            parameter.grad.mul_(2.0)
        optimizer.step()
        optimizer.zero_grad()


def changes_parameters(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        train(model, optimizer, 1, first=step)
        with zf.full_params(model), torch.no_grad():
            model[0].weight.mul_(0.5)


def parks_between(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        (model(torch.full((2, 16), float(step))).float() ** 2).mean().backward()
        optimizer.step()
        zf.offload_states(model)
        zf.reload_states(model)
        optimizer.zero_grad()


LOOPS = [
    keeps_zeros,
    keeps_zeros_of_parameters,
    throws_gradients_away,
    skips_the_reduction,
    changes_gradients,
    changes_parameters,
    parks_between,
]


def loops_that_differ(folder: str, places: list[str], stage: int, precision: Any) -> list[str]:
    wrong = []
    for loop in LOOPS:
        found = []
        for place in (None, *(PLACES[name] | {"path": folder, "checksums": True} for name in places)):
            model, optimizer = prepared(place, stage=stage, precision=precision, clip=0.5, one_pass=True)
            loop(model, optimizer)
            found.append(states(model, optimizer))
            zf.close(model)
        same = [all(map(torch.equal, each, found[0])) for each in found[1:]]
        wrong += [f"{loop.__name__}: {name}" for name, is_same in zip(places, same, strict=True) if not is_same]
    return wrong


@pytest.mark.filterwarnings("ignore:gradients of several micro-batches")
@pytest.mark.parametrize(("world", "stage", "precision"), [(1, 3, "bf16"), (1, 2, None), (2, 3, None)])
def test_unusual_loops_train_to_the_same_bits(
    ranks: Callable[..., list[Any]], tmp_path: Any, world: int, stage: int, precision: Any
) -> None:
    places = ["optimizer", "half"] if stage < 3 else ["all"] if world == 1 else ["file, parameters on the host"]
    assert ranks(world, loops_that_differ, str(tmp_path), places, stage, precision) == [[]] * world


def gradients_read_after_a_step() -> list[str]:
    model, optimizer = prepared({"optimizer": "host"}, stage=3, precision="bf16")
    (model(torch.ones(2, 16)).float() ** 2).mean().backward()
    optimizer.step()
    errors = [raised(zf.full_grad, parameter) for parameter in model.parameters()]
    zf.close(model)
    return errors


def test_a_gradient_that_is_used_up_is_refused_on_every_rank(ranks: Callable[..., list[Any]]) -> None:
    for errors in ranks(2, gradients_read_after_a_step):
        assert all("read it before optimizer.step()" in error for error in errors)


def second_step_without_a_backward(stage: Any, place: str) -> str:
    model, optimizer = prepared(PLACES[place], stage=stage, precision="bf16")
    (model(torch.ones(2, 16)).float() ** 2).mean().backward()
    optimizer.step()
    error = raised(optimizer.step)
    zf.close(model)
    return error


@pytest.mark.parametrize(("world", "stage", "place"), [(1, 3, "all"), (2, "dp", "optimizer")])
def test_no_step_takes_a_gradient_that_is_used_up(
    ranks: Callable[..., list[Any]], world: int, stage: Any, place: str
) -> None:
    for error in ranks(world, second_step_without_a_backward, stage, place):
        assert "clear it with zero_grad() after" in error


def loaded_from_a_state_dict(stage: Any) -> list[bool]:
    found = []
    for place in (None, PLACES["optimizer"], PLACES["half"]):
        model, optimizer = prepared(place, stage=stage)
        before = {name: zf.full(value) for name, value in model.state_dict().items()}
        train(model, optimizer, 1)
        model.load_state_dict(before)
        train(model, optimizer, 1, first=1)
        found.append([zf.full(p) for p in model.parameters()])
        zf.close(model)
    return [all(map(torch.allclose, each, found[0])) for each in found]


@pytest.mark.parametrize("stage", [0, 2])
def test_whole_parameters_that_are_copies_of_the_hosts_load_as_others_do(
    ranks: Callable[..., list[Any]], stage: int
) -> None:
    assert ranks(2, loaded_from_a_state_dict, stage) == [[True] * 3] * 2


def unfrozen_later(folder: str, width: int) -> list[bool]:
    """Of units that train nothing, or a part of what they have: then the file has to grow."""
    found = []
    for place in (None, PLACES["file"] | {"path": folder}, PLACES["all in the file"] | {"path": folder}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, width), Block(width), Block(width), nn.Linear(width, 16))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "3.bias" if width < 256 else "up" not in name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = zf.prepare(model, optimizer, units=Block, stage=3, offload=place, one_pass=True)
        train(model, optimizer, 2)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        train(model, optimizer, 2, first=2)
        found.append(states(model, optimizer))
        zf.close(model)
    return [all(map(torch.equal, each, found[0])) for each in found]


@pytest.mark.parametrize("width", [32, 256])
def test_states_of_parameters_unfrozen_later_go_to_the_file_too(ranks: Any, tmp_path: Any, width: int) -> None:
    assert ranks(1, unfrozen_later, str(tmp_path), width) == [[True] * 3]


def with_a_frozen_parameter(folder: str, stage: int) -> tuple[bool, list[int]]:
    """Which the optimizer has as well. In 16 bits: what clips them there, as torch's own code would, is less exact."""
    found, written = [], []
    for place in (PLACES["optimizer"], PLACES["file"] | {"path": folder}):
        model = build()
        next(model[1].parameters()).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zf.prepare(model, optimizer, units=Block, stage=stage, precision="bf16", clip=0.5, offload=place)
        train(model, optimizer, 2)
        found.append([zf.full(p) for p in optimizer.param_groups[0]["params"]])
        snapshot = zf.ledger(model).snapshot()["offload"]
        written.append(snapshot["disk"]["written"] if "path" in place else int(snapshot["update"]["host_elements"]))
        zf.close(model)
    return all(map(torch.equal, *found)), written


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_parameter_leaves_the_update_where_the_states_are(ranks: Any, tmp_path: Path, stage: int) -> None:
    ((equal, written),) = ranks(1, with_a_frozen_parameter, str(tmp_path), stage)
    assert equal
    assert min(written) > 0


def closed_after_a_failure(folder: str, name: str, stage: int, gather: bool) -> list[Any]:
    def fail(*_: Any) -> NoReturn:
        raise DiskError(errno.EIO, "the disk broke")

    threads = set(threading.enumerate())
    model, optimizer = prepared(PLACES[name] | {"path": folder}, stage=stage, precision="bf16")
    held = next(model.parameters())
    train(model, optimizer, 1)
    zf.full(model[0].weight)  # its update is over
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskStore, "write", fail)
        train(model, optimizer, 1)
        errors = [raised(model, torch.ones(2, 16)) for _ in range(4)]
    with torch.no_grad():
        errors += [raised(model, torch.ones(2, 16)), raised(zf.full, model[0].weight)]
    errors.append(raised(train, model, optimizer, 1))
    if gather:
        errors.append(raised(zf.close, model))
    else:
        zf.close(model, gather=False)
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    left += [f"{name} has values" for name, p in model.named_parameters() if not p.is_meta]
    return [[*errors, raised(held.sum)], left, os.listdir(folder), hasattr(model, "_zerofold_engine")]


@pytest.mark.filterwarnings("ignore:.* raised an exception that was silenced")  # torch's, of a hook
@pytest.mark.parametrize(
    ("name", "stage", "gather"),
    [("file", 3, True), ("file", 3, False), ("file", 1, True), ("file", 1, False), ("all in the file", 3, True)],
)
def test_a_failed_update_is_raised_and_the_model_can_be_let_go(
    ranks: Callable[..., list[Any]], tmp_path: Any, name: str, stage: int, gather: bool
) -> None:
    (*errors, gone), *left = ranks(1, closed_after_a_failure, str(tmp_path), name, stage, gather)[0]
    assert all("the disk broke" in error for error in errors), errors
    assert left == [[], [], False]
    assert stage == 3 or "went with its model" in gone


def sums_of_three_backwards(quiet: bool) -> list[bool]:
    """`quiet`: those after the first are inside no_sync."""
    found = []
    for place, stays in ((None, False), (PLACES["optimizer"], True), (PLACES["all"], False), (PLACES["all"], True)):
        model, _ = prepared(place, stage=3, precision="bf16")
        for slab in Engine.of(model).slabs() if stays else ():
            assert isinstance(slab.gradients, AwayGradients)
            slab.gradients.staying = frozenset({0, 2})  # as a GPU with room for them has it
        for part in range(3):
            with zf.no_sync(model) if quiet and part else nullcontext():
                (model(torch.full((2, 16), float(part))).float() ** 2).mean().backward()
        zf.clip_grad_norm_(model, 1e9)  # reduces what is left
        found.append([zf.full(p.grad) for p in model.parameters()])
        zf.close(model)
    return [all(map(torch.equal, each, found[0])) for each in found]


@pytest.mark.filterwarnings("ignore:gradients of several micro-batches")
@pytest.mark.parametrize("quiet", [False, True])
def test_backwards_that_nobody_planned_add_up_wherever_gradients_wait(
    ranks: Callable[..., list[Any]], quiet: bool
) -> None:
    assert ranks(1, sums_of_three_backwards, quiet) == [[True] * 4]


def optimizers_for_a_file(folder: str) -> tuple[str, int]:
    offload = {"optimizer": "nvme", "path": folder}
    model = build()
    refusal = raised(
        zf.prepare, model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, units=Block, offload=offload
    )
    model = build()
    optimizer = DeepSpeedCPUAdam(model.parameters())  # torch's Adam with other defaults
    model, _ = zf.prepare(model, optimizer, stage=3, units=Block, precision="bf16", offload=offload)
    train(model, optimizer, 1)
    written = zf.ledger(model).snapshot()["offload"]["disk"]["written"]
    zf.close(model)
    return refusal, written


def test_who_can_have_states_in_a_file(ranks: Any, tmp_path: Any) -> None:
    ((refusal, written),) = ranks(1, optimizers_for_a_file, str(tmp_path))
    assert "not for SGD; use 'optimizer': 'host'" in refusal
    assert written > 0
