"""P_a with parts in files: read two blocks ahead, gathered one block ahead, bounded memory, disks that fail."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerofold as zf
from ranks import raised
from tensor_blocks import WIDTH, TensorBlock, TensorModel, tensor_data, tensor_model
from zerofold.activation.blocks import Checkpointing
from zerofold.activation.disk_shelf import DiskShelf
from zerofold.activation.partition import Partition
from zerofold.activation.store import Kept
from zerofold.comm import Handle
from zerofold.memory.disk import DiskStore
from zerofold.memory.disk_blocks import Block as DiskBlock

LAYERS, ROWS = 6, 256
WHOLE = ROWS * WIDTH * 4


def made(tensor: int, path: str | None) -> tuple[zf.Mesh, TensorModel, Checkpointing]:
    spread = zf.mesh(tensor=tensor, device="cpu")
    model = tensor_model(spread, layers=LAYERS)
    how: dict[str, Any] = {} if path is None else {"keep": "nvme", "path": path, "partition": spread}
    return spread, model, zf.checkpoint_blocks(model, units=TensorBlock, **how)


def gradients(spread: zf.Mesh, model: TensorModel, rows: int) -> list[Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    for x in tensor_data(spread, 2, rows):
        model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def alike_and_files(tensor: int, rows: int, path: str) -> tuple[bool, bool]:
    """Whether gradients have the same bits, and parts were in files."""
    spread, model, checkpointing = made(tensor, None)
    plain = gradients(spread, model, rows)
    checkpointing.remove()
    spread, model, checkpointing = made(tensor, path)
    loss = model(tensor_data(spread, 1, rows)[0])
    part = -(-rows * WIDTH // tensor) * 4
    is_in_files = checkpointing.nbytes["nvme"] == (LAYERS - 2) * -(-part // 4096) * 4096 and any(Path(path).iterdir())
    loss.backward()
    found = gradients(spread, model, rows)
    assert sum(checkpointing.nbytes.values()) == 0
    checkpointing.remove()
    return len(plain) == len(found) > 0 and all(map(torch.equal, plain, found)), is_in_files


@pytest.mark.parametrize(("tensor", "rows"), [(2, ROWS), (4, ROWS - 1)])
def test_the_same_gradients_from_files(ranks: Any, tensor: int, rows: int, tmp_path: Path) -> None:
    assert ranks(tensor, alike_and_files, tensor, rows, str(tmp_path)) == [(True, True)] * tensor
    assert not list(tmp_path.iterdir())


class Log:
    """What happened in backward, in order. Reads and gathers are noted where they begin, gathers where they end too."""

    def __init__(self, patch: pytest.MonkeyPatch, model: TensorModel) -> None:
        self.lines: list[str] = []
        fetch, rebuild, wait = Kept.fetch, Partition.rebuild, Handle.wait

        def fetched(kept: Any) -> None:
            was_reading = kept._item.reading
            fetch(kept)
            if kept._item.reading is not was_reading:
                self.lines.append(f"read {kept._whole.name[-1]}")

        def rebuilt(partition: Partition, whole: Any, shelf: Any, item: Any) -> Any:
            if item.reading is None:
                self.lines.append(f"late read {whole.name[-1]}")
            self.lines.append(f"gather {whole.name[-1]}")
            return rebuild(partition, whole, shelf, item)

        def waited(handle: Handle) -> None:
            wait(handle)
            if handle.call.operation == "all_gather" and handle.call.nbytes > 100:
                self.lines.append(f"have {handle.call.unit[-1]}")

        patch.setattr(Kept, "fetch", fetched)
        patch.setattr(Partition, "rebuild", rebuilt)
        patch.setattr(Handle, "wait", waited)
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda module, args, index=index: self.lines.append(f"block {index}"))
            block.second.norm.register_forward_hook(
                lambda module, args, result, index=index: self.lines.append(f"inside {index}")
            )


def order(path: str) -> list[str]:
    spread, model, checkpointing = made(2, path)
    with pytest.MonkeyPatch.context() as patch:
        log = Log(patch, model)
        model(tensor_data(spread, 1)[0]).backward()  # compares inputs, too
        loss = model(tensor_data(spread, 1)[0])
        log.lines.clear()
        loss.backward()
    checkpointing.remove()
    return log.lines


def test_a_part_is_read_two_blocks_ahead_and_gathered_one_block_ahead(ranks: Any, tmp_path: Path) -> None:
    """While block 3 is computed again, the gather for block 2 is under way, whose read began before block 4."""
    expected = (
        "read 3, block 5, inside 5, "  # 5 and 4 have not left the device
        "gather 3, read 2, block 4, inside 4, "
        "have 3, gather 2, read 1, block 3, inside 3, "
        "have 2, gather 1, read 0, block 2, inside 2, "
        "have 1, gather 0, block 1, inside 1, "
        "have 0, block 0, inside 0"
    )
    for lines in ranks(2, order, str(tmp_path)):
        assert ", ".join(lines) == expected


def peaks(tensor: int, path: str, delay: float) -> tuple[int, int]:
    """On the device and on the host, with a disk that is slower than the blocks."""
    spread, model, checkpointing = made(tensor, path)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "write"):
            move = getattr(DiskBlock, name)

            def slow(block: DiskBlock, fd: int, move: Any = move) -> None:
                time.sleep(delay)
                move(block, fd)

            patch.setattr(DiskBlock, name, slow)
        for _ in range(2):
            model(tensor_data(spread, 1, ROWS)[0]).backward()
    store = checkpointing.store
    assert store is not None
    shelf = store._shelf
    assert isinstance(shelf, DiskShelf)
    found = store.peak_device_nbytes, shelf.peak_host_nbytes
    checkpointing.remove()
    return found


@pytest.mark.parametrize("tensor", [2, 4])
def test_two_whole_inputs_on_the_device_and_four_parts_on_the_host(ranks: Any, tensor: int, tmp_path: Path) -> None:
    for device, host in ranks(tensor, peaks, tensor, str(tmp_path), 0.05):
        assert device == 2 * WHOLE
        assert 3 * WHOLE // tensor <= host <= 4 * WHOLE // tensor


def after_a_fault(tensor: int, path: str, fault: str) -> tuple[str, bool]:
    """What a rank raises when the disk of the last one fails, and whether all is well with a disk that is whole."""
    spread, model, checkpointing = made(tensor, path)
    gradients(spread, model, ROWS)
    expected = gradients(spread, model, ROWS)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == tensor - 1:
            break_disk(patch, fault)
        message = raised(gradients, spread, model, ROWS)
    again = gradients(spread, model, ROWS)
    assert sum(checkpointing.nbytes.values()) == 0
    checkpointing.remove()
    return message, all(map(torch.equal, expected, again))


def break_disk(patch: pytest.MonkeyPatch, fault: str) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, f"{fault} on purpose")

    if fault == "room":
        patch.setattr(DiskStore, "take", fails)
    elif fault == "third read":
        read, lock, calls = DiskBlock.read, threading.Lock(), iter(range(100))

        def third(block: DiskBlock, fd: int) -> None:
            with lock:
                number = next(calls)
            return fails() if number == 2 else read(block, fd)

        patch.setattr(DiskBlock, "read", third)
    else:
        patch.setattr(DiskBlock, fault, fails)


@pytest.mark.parametrize(
    ("tensor", "fault", "name"), [(2, "read", 3), (4, "third read", 1), (2, "write", 3), (2, "room", 3)]
)
def test_a_disk_that_fails_on_one_rank_ends_the_backward_of_all(
    ranks: Any, tensor: int, fault: str, name: int, tmp_path: Path
) -> None:
    """In forward the others wait for it in all-reduces of their own: it must not raise there."""
    answers = ranks(tensor, after_a_fault, tensor, str(tmp_path), fault, timeout=40.0)
    for message, is_well in answers:
        assert f"DiskError: rank {tensor - 1} has lost its part of the input of blocks.{name}: " in message
        assert f"{fault} on purpose" in message
        assert "\n" not in message
        assert is_well


def crossed(path: str, *, is_cut: bool, is_kept: bool) -> list[Tensor]:
    """What all blocks of a decoder take is kept once, and gathered for each of them; a second backward asks again."""
    spread = zf.mesh(tensor=2, device="cpu")
    store = zf.CheckpointStore("nvme", path=path, partition=spread if is_cut else None) if is_kept else None
    weights = [torch.full((WIDTH,), 0.5 + 0.1 * index, requires_grad=True) for index in range(5)]
    given = torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH).requires_grad_()
    x = source = given.tanh()
    for weight in weights:
        x = zf.checkpoint(lambda x, source, weight=weight: (x * weight + source).tanh(), x, source, store=store)
    loss = x.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    del loss, x, source
    if store is not None:
        assert sum(store.nbytes.values()) == 0
        store.close()
    return [each.grad for each in (given, *weights) if each.grad is not None]


def crossed_alike(path: str) -> list[bool]:
    plain = crossed(path, is_cut=False, is_kept=False)
    ways = [crossed(path, is_cut=is_cut, is_kept=True) for is_cut in (False, True)]
    return [len(found) == 6 and all(map(torch.equal, plain, found)) for found in ways]


def test_an_input_of_several_blocks_and_a_second_backward(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, crossed_alike, str(tmp_path)) == [[True, True]] * 2
