"""Offload beside a real GPU: pinned memory, copies on side streams, updates through the device and on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.test_offload import PLACES, Block, result
from tests.test_through_device import Filled
from torch import Tensor, nn

import zerofold as zf
from zerofold.engine import Engine
from zerofold.optim.away import chunks, slots, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
alone = pytest.mark.usefixtures("one_rank")

SMALL_CHUNK = 2**12  # so that a small model has many


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (chunks, slots, start):
        monkeypatch.setattr(module, "CHUNK", SMALL_CHUNK)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(width=128) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 128), *blocks, nn.Linear(128, 16)).cuda()


def train(
    offload: Any,
    steps: int,
    *,
    backwards: int = 1,
    precision: Any = "bf16",
    stage: int = 3,
    clip: float = 0.05,
    early: list[float] | None = None,
) -> list[Tensor]:
    """Weights and moments. The large eps keeps Adam from making updates out of the last bits of gradients. `early`
    collects how many elements each step found updated."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    options: dict[str, Any] = {"clip": clip, "accumulate": backwards, "one_pass": True}
    model, optimizer = zf.prepare(
        model, optimizer, stage=stage, units=Block, offload=offload, precision=precision, **options
    )
    for step in range(steps):
        for part in range(backwards):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + part)).cuda()
            (model(batch).float() ** 2).mean().backward()
        optimizer.step()
        if early is not None:
            early.append(zf.ledger(model).snapshot()["offload"]["update"]["early_elements"])
        optimizer.zero_grad()
    faces = [p for group in optimizer.param_groups for p in group["params"]]
    found = [zf.full(p) for p in faces]
    found += [zf.full(optimizer.state[p][name]) for p in faces for name in ("exp_avg", "exp_avg_sq")]
    with zf.full_params(model, masters=False):
        for parameter, face in zip(model.parameters(), faces, strict=True):
            assert torch.equal(parameter, zf.full(face).to(parameter.dtype)), "forward has other weights"
    zf.close(model)
    return found


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to the largest number of each tensor."""
    return max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item() for a, b in zip(found, expected, strict=True)
    )


@alone
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("name", list(PLACES))
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_every_placement_trains_as_none(
    tmp_path: Path, name: str, share: float, backwards: int, precision: str
) -> None:
    place = PLACES[name] | {"device_share": share, "threads": 2}
    if "nvme" in place.values():
        place |= {"path": str(tmp_path / "disk")}
    expected, found = (train(each, 1, backwards=backwards, precision=precision) for each in (None, place))
    assert all(tensor.is_cuda for tensor in found)
    assert largest_difference(found, expected) < 1e-6, "after one step"
    if precision == "fp32":  # 16-bit parameters that round the other way once are something else afterwards
        expected, found = (train(each, 6, backwards=backwards, precision=precision) for each in (None, place))
        assert largest_difference(found, expected) < 1e-5, "after six steps"


@alone
@pytest.mark.parametrize("name", ["optimizer", "all", "half"])
@pytest.mark.parametrize("clip", [1e9, 1e-3])
@pytest.mark.parametrize("way", ["early", "lasting"])
def test_updates_early_and_of_states_that_stay_have_the_bits_of_others(
    monkeypatch: pytest.MonkeyPatch, name: str, clip: float, way: str
) -> None:
    place, chosen = PLACES[name] | {"device_share": 1.0, "threads": 2}, start._way

    def choose(**options: Any) -> None:
        def way_of(*given: Any) -> Any:
            filling: Any = Filled(30, -5) if way == "lasting" else None
            return replace(chosen(*given), filling=filling, **options)

        monkeypatch.setattr(start, "_way", way_of)

    choose(ahead=64 if way == "early" else 0, early=way == "early")
    early: list[float] = []
    found, watched = train(place, 6, clip=clip), train(place, 6, clip=clip, early=early)
    monkeypatch.setattr(start, "_way", lambda *given: replace(chosen(*given), ahead=0, early=False, filling=None))
    expected = train(place, 6, clip=clip)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, watched, expected))
    assert (max(early[2:]) > 0) == (clip > 1 and way == "early"), early


@alone
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_rows(stage: int) -> None:
    assert largest_difference(train({"optimizer": "host"}, 1, stage=stage), train(None, 1, stage=stage)) < 1e-6


@alone
def test_the_share_is_tuned_and_training_goes_on_the_same() -> None:
    found = train({"optimizer": "host"}, 10, precision="fp32")
    assert largest_difference(found, train(None, 10, precision="fp32")) < 2e-5


@alone
def test_host_states_leave_the_device(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = {"optimizer": "host", "parameters": "host"}
    model, optimizer = zf.prepare(model, optimizer, stage=3, units=Block, offload=offload, precision="bf16")
    batch = torch.randn(8, 16).cuda()
    for _ in range(2):
        (model(batch).float() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    books = zf.ledger(model).snapshot()
    assert sum(books["tier_bytes"]["device"].values()) == 0
    assert all(p.device.type == "cuda" for p in model.parameters()), "the model is where it was"
    engine = Engine.of(model)
    assert all(slab.raw_shard.device.type == "cpu" and slab.raw_shard.is_pinned() for slab in engine.slabs())
    zf.close(model)


@alone
def test_a_skipped_step_changes_nothing() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = {"optimizer": "host", "parameters": "host"}
    model, optimizer = zf.prepare(model, optimizer, stage=3, units=Block, offload=offload, precision="bf16", clip=1.0)
    batch = torch.randn(8, 16).cuda()

    def step(factor: float) -> Tensor:
        loss = (model(batch).float() ** 2).mean() * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(1.0)
    before = [zf.full(p) for p in model.parameters()]
    with pytest.warns(UserWarning, match="step skipped"):
        step(float("inf"))
    assert all(torch.equal(a, zf.full(b)) for a, b in zip(before, model.parameters(), strict=True))
    assert step(1.0).isfinite()  # parameters, whose place the gradients had, are there again
    zf.close(model)


def ranks_that_differ() -> dict[str, float]:
    found = {}
    for stage in (2, 3):
        expected = result(None, stage=stage, precision="bf16", device="cuda")
        for name in ("optimizer", "all", "gradients stay"):
            if stage == 3 or name != "all":
                other = result(PLACES[name], stage=stage, precision="bf16", device="cuda")
                found[f"{name}, {stage}"] = largest_difference(other, expected)
    return found


def test_two_ranks_that_share_a_gpu(ranks: Any) -> None:
    for found in ranks(2, ranks_that_differ):
        assert max(found.values()) < 2e-3, found


def accumulates(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        for part in range(2):
            (model(torch.full((4, 16), step + 0.5 * part, device="cuda")).float() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def keeps_zeros(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        (model(torch.full((4, 16), float(step), device="cuda")).float() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)  # those of the next step are made on the device


def clips_by_hand(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        (model(torch.full((4, 16), step + 1.0, device="cuda")).float() ** 2).mean().backward()
        zf.clip_grad_norm_(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()


@alone
@pytest.mark.parametrize("precision", ["fp32", "bf16", "kept"])
@pytest.mark.parametrize("loop", [accumulates, keeps_zeros, clips_by_hand])
@pytest.mark.parametrize("stage", [1, 3])
def test_loops_whose_gradients_wait_on_the_device(loop: Any, stage: int, precision: str) -> None:
    """Streamed wholly through the device; the model is closed while the first chunks come up for the next step."""
    policy: Any = precision
    if precision == "kept":
        policy = zf.Precision(parameters=torch.bfloat16, keep=[nn.LayerNorm, "0"])
    found = []
    for offload in (None, {"optimizer": "host", "device_share": 1.0, "threads": 2}):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        accumulate = 2 if loop is accumulates else 1
        options: dict[str, Any] = {"accumulate": accumulate, "one_pass": True}
        zf.prepare(model, optimizer, stage=stage, units=Block, offload=offload, precision=policy, **options)
        loop(model, optimizer)
        found.append([zf.full(p) for group in optimizer.param_groups for p in group["params"]])
        zf.close(model, gather=False)
    # 16-bit gradients round once more when they are clipped, and a LayerNorm's bias is nothing but its updates.
    assert largest_difference(found[1], found[0]) < (1e-5 if precision == "fp32" else 3e-2)


def test_what_an_allocator_says_fills_a_limit_and_makes_room_again() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    limit = torch.cuda.memory_reserved(device) + 3 * 2**30
    filling, stream, held = slots.Filling(device, limit), torch.cuda.Stream(device), []
    for _ in range(6):
        wanted = filling.change()
        held += [slots.Slot(device, stream) for _ in range(wanted)]
        filling.changed(wanted, wanted)
    assert limit * 0.7 < torch.cuda.memory_reserved(device) <= limit * 0.95
    others = torch.empty(limit - torch.cuda.memory_reserved(device), dtype=torch.uint8, device=device)
    assert -len(held) <= filling.change() < 0
    del others, held
    torch.cuda.empty_cache()
