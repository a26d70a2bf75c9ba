"""keep="auto": inputs of checkpointed blocks go where the plan finds room, and training is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofold as zf
from zerofold.plan.batching import choose_batching
from zerofold.plan.keeping import Choice, Stream, choose
from zerofold.plan.machine import GIB, Link, Machine
from zerofold.plan.point import Point
from zerofold.plan.presets import preset
from zerofold.plan.shape import UnitShape
from zerofold.plan.transformer import from_parameters
from zerofold.train.gpt import GPT, GPTConfig
from zerofold.train.loop import Training
from zerofold.train.options import TrainOptions

H200 = preset("H200", devices=1)
UNITS = [UnitShape(name="", trained=10**8), *(UnitShape(name=f"blocks.{i}", trained=10**8) for i in range(64))]
POINT = Point(stage="3", checkpoint_every=1)

BUDGET_FOR_PARTS = 16 * 2**20
SEQUENCE_BUDGET = 10 * 2**20
LONG = 3 * 2**15


def stream(tokens: int, **more: Any) -> Stream:
    return Stream(nbytes=tokens * 4096 * 2, tokens=tokens, **more)


@pytest.mark.parametrize(
    ("tokens", "machine", "tensor", "expected"),
    [
        (2**13, H200, 1, ("device", False)),
        (2**17, H200, 1, ("host", False)),
        (3 * 2**15, H200, 2, ("device", True)),
        (2**18, H200, 2, ("host", True)),
        (2**17, replace(H200, host_memory=GIB, disk=10**13, disk_read=3e9, disk_write=3e9), 1, ("nvme", False)),
    ],
)
def test_the_first_place_with_room(tokens: int, machine: Any, tensor: int, expected: tuple[str, bool]) -> None:
    """The device, then parts of it where several ranks hold the same, then the host, then the disk."""
    found = choose(UNITS, stream(tokens, tensor=tensor), machine, POINT, can_cut=True)
    assert (found.keep, found.partition) == expected, found.sentence
    assert found.fits


def test_a_stream_that_is_in_parts_already_counts_as_such() -> None:
    """Sequence-parallel ranks: too much for the device if each had all of it. No store takes DTensors elsewhere."""
    whole, parts = (choose(UNITS, stream(LONG, tensor=2, own=own), H200, POINT) for own in (None, LONG * 4096))
    assert (whole.keep, parts.keep, parts.fits) == ("host", "device", True)
    for stays, keep in ((False, "host"), (True, "device")):
        found = choose(UNITS, stream(2 * LONG, tensor=2, own=LONG * 8192, stays=stays), H200, POINT)
        assert (found.keep, found.fits) == (keep, not stays)


def sequence_parallel(budget: int) -> str:
    """Where inputs wait."""
    mesh = zf.mesh(tensor=2, device="cpu")
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=8, hidden=32, heads=2, seq=256))
    zf.tensor_parallel(model, mesh, sequence_parallel=True)
    model, _ = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, mesh=mesh)
    checkpointing = zf.checkpoint_blocks(model, keep="auto", budget=budget)
    tokens = torch.zeros(8, 256, dtype=torch.long)
    model(tokens, tokens).backward()
    found = "device" if checkpointing.store is None else checkpointing.store.tier.value
    checkpointing.remove()
    zf.close(model)
    return found


def test_blocks_of_sequence_parallel_ranks_keep_parts(ranks: Any) -> None:
    """The first block is given all of the stream, and the others a half: there is room for that."""
    assert ranks(2, sequence_parallel, SEQUENCE_BUDGET) == ["device"] * 2


def test_what_fits_nowhere_is_said() -> None:
    found = choose(UNITS, stream(2**21), replace(H200, host_memory=GIB), POINT)
    assert found == Choice("host", False, False, found.sentence)
    assert "does not fit either (device memory" in found.sentence


def test_a_slow_bus_is_in_the_sentence() -> None:
    slow = replace(H200, to_host=replace(H200.to_host, rate=1e9))
    fast, late = (choose(UNITS, stream(2**17), machine, POINT).sentence for machine in (H200, slow))
    assert fast.endswith("and 0% longer")
    assert int(late.rpartition(" and ")[2].split("%")[0]) > 10


GPT_13B = from_parameters(13e9, seq=4096)
EIGHT = preset("A100-80", devices=8)


def with_wires(rate: float) -> Machine:
    return replace(EIGHT, inside=Link(rate=rate))


def test_larger_micro_batches_on_the_host_pay_where_the_wires_are_slow() -> None:
    """Copies to the host cost less than the gathers and reductions that are saved; on fast wires nothing is saved."""
    fast, slow = (choose_batching(GPT_13B, with_wires(rate), POINT, 64) for rate in (200e9, 1e9))
    assert fast is not None
    assert slow is not None
    assert (fast.keep, fast.saved) == ("device", 0)
    assert slow.keep == "host"
    assert slow.micro_batch > fast.micro_batch
    assert slow.saved > 0.2
    assert "it pays, by the plan a step is" in slow.sentence
    # A bus that is slower still takes more than it saves.
    neither = choose_batching(GPT_13B, replace(with_wires(1e9), to_host=Link(rate=2e8)), POINT, 64)
    assert neither is not None
    assert neither.keep == "device"


def test_what_fits_no_other_way_and_what_fits_nowhere() -> None:
    small = replace(EIGHT, device_memory=30 * GIB)
    found = choose_batching(GPT_13B, small, POINT, 4)
    assert found is not None
    assert found.keep == "host"
    assert "on the device not even 1 x 4 fit (device memory" in found.sentence
    assert choose_batching(GPT_13B, replace(small, device_memory=GIB), POINT, 4) is None
    bounded = choose_batching(GPT_13B, with_wires(1e9), POINT, 64, most=2)
    assert bounded is not None
    assert bounded[:3] == (2, 32, "device")


def test_tensor_ranks_keep_parts_where_the_bus_is_slow() -> None:
    """Gathers over fast wires cost less than copies to the host, and less than smaller micro-batches."""
    slow = replace(with_wires(200e9), to_host=Link(rate=1e8))
    found = {
        memory: choose_batching(GPT_13B, replace(slow, device_memory=memory * GIB), replace(POINT, tensor=2), 16)
        for memory in (30, 80)
    }
    for memory, expected in ((30, ("device", True)), (80, ("device", False))):
        batching = found[memory]
        assert batching is not None
        assert (batching.keep, batching.partition) == expected, batching.sentence
        assert ("in parts on the device" in batching.sentence) == batching.partition


def test_whoever_gives_the_samples_is_told_what_would_pay() -> None:
    """The micro-batch is the caller's: inputs stay where there is room, and the line says what larger ones would do."""
    several = replace(POINT, accumulate=16)
    machine = replace(preset("H200", devices=8), inside=Link(rate=2e9))
    found = choose(UNITS, stream(2**14), machine, several)
    assert found.keep == "device"
    assert "of these micro-batches in one (accumulate=" in found.sentence
    assert "in host memory a step would be" in found.sentence
    for quiet in (POINT, replace(several, accumulate=1)):
        assert "pay" not in choose(UNITS, stream(2**14), machine, quiet).sentence


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(8)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def train(
    keep: str, lengths: list[int], *, tensor: int = 1, **more: Any
) -> tuple[list[float], list[str], dict[str, int], list[str]]:
    torch.manual_seed(0)
    model = Net()
    mesh = zf.mesh(tensor=tensor, device="cpu") if tensor > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zf.prepare(model, optimizer, stage=3, units=nn.Sequential, mesh=mesh)
    checkpointing = zf.checkpoint_blocks(model, keep=keep, partition=mesh, **more)
    losses, places, most = [], [], dict.fromkeys(("device", "host", "nvme"), 0)
    said: list[str] = []
    for step, length in enumerate(lengths):
        loss = model(torch.arange(4 * length).view(4, length).mul(step + 3) % 64)
        most = {tier: max(nbytes, checkpointing.nbytes[tier]) for tier, nbytes in most.items()}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        said.append(checkpointing.choice)
        store = checkpointing.store
        places.append("device" if store is None else f"{'parts, ' * (store.partition is not None)}{store.tier.value}")
    checkpointing.remove()
    zf.close(model)
    return losses, places, most, said


def test_inputs_leave_the_device_when_they_no_longer_fit_it(ranks: Any) -> None:
    """Short sequences stay, and from the first long one on all go to the host; losses are the same bits."""
    lengths = [16, 16, 512, 16]
    plain = ranks(2, train, "device", lengths)
    for (losses, *_), (found, places, most, said) in zip(
        plain, ranks(2, train, "auto", lengths, budget=24 * 2**20), strict=True
    ):
        assert found == losses
        assert places == ["device", "device", "host", "host"]
        assert most["host"] >= 8 * 4 * 512 * 128 * 4
        assert most["nvme"] == 0
        assert "wait on the device: a step takes" in said[0]
        assert said[1] == said[0]
        assert "wait in host memory: with all of them on the device" in said[2]


def test_parts_of_tensor_ranks_come_before_the_host(ranks: Any) -> None:
    """Each keeps the half of every input; with still longer sequences, in host memory."""
    lengths = [16, 288, 16, 1024]
    plain = ranks(2, train, "device", lengths, tensor=2)
    for (losses, *_), (found, places, most, _) in zip(
        plain, ranks(2, train, "auto", lengths, tensor=2, budget=BUDGET_FOR_PARTS), strict=True
    ):
        assert found == losses
        assert places == ["device", "parts, device", "parts, device", "parts, host"]
        assert most["host"] == pytest.approx(8 * 4 * 1024 * 128 * 4 / 2, rel=0.05)  # of the longest, the half


def test_a_folder_is_the_last_place(ranks: Any, tmp_path: Path) -> None:
    (_, places, most, _), *_ = ranks(1, train, "auto", [64], path=str(tmp_path))
    assert places == ["device"]  # a CPU has one memory, and there is room in it
    assert most["nvme"] == 0


def test_a_budget_is_for_auto_alone() -> None:
    with pytest.raises(ValueError, match='budget=5 is for keep="auto"'):
        zf.checkpoint_blocks(Net(), keep="host", budget=5)
    with pytest.raises(ValueError, match='or "auto" of zf.checkpoint_blocks'):
        zf.checkpoint_blocks(Net(), keep="attic")


def built(folder: str, batch: int | None) -> tuple[Any, str]:
    """A run of `zerofold train` as it begins."""
    torch.set_num_threads(1)
    gpt = GPTConfig(layers=2, hidden=16, heads=2, seq=16)
    options = TrainOptions(out=Path(folder), gpt=gpt, global_batch=24, batch=batch, checkpoint_every=1, keep="auto")
    training = Training(options, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    said = training.introduction()
    training.recorded.close()
    zf.close(training.model)
    return training.shares, said


def test_a_run_with_a_batch_of_its_step_alone_leaves_the_rest_to_the_plan(ranks: Any, tmp_path: Path) -> None:
    """More than the 8 at a time that it took otherwise, and one line that says so; a batch that is given stays."""
    for shares, said in ranks(2, built, str(tmp_path / "open"), None):
        assert shares == (12, 2, 1)
        assert said.startswith('keep="auto": micro-batches of 12 x 1, inputs of checkpointed blocks on the device: by')
    for shares, said in ranks(2, built, str(tmp_path / "given"), 4):
        assert shares == (4, 2, 3)
        assert "micro-batches of" not in said
