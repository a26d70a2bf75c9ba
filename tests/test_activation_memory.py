"""Where kept inputs are, how much of them is on the device, and that memory is used again."""

from __future__ import annotations

import contextlib
import errno
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zerofold as zf
from models import Block, batches, make_model
from zerofold.activation.shelves import DeviceShelf
from zerofold.activation.slots import Slots
from zerofold.bench.gpt import GPT, GPTSize, RandomTokens
from zerofold.bench.gpt import Block as GPTBlock
from zerofold.memory.disk import DiskError, whole_pages
from zerofold.memory.disk_blocks import Block as DiskBlock
from zerofold.plan.transformer import GPTNumbers

LAYERS, WIDTH, ROWS = 6, 64, 64
INPUT = ROWS * WIDTH * 4


def layers() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def first_input() -> Tensor:
    return torch.ones(ROWS, WIDTH, requires_grad=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_on_the_host_two_blocks_inputs_at_most_are_on_the_device(every: int, reentrant: bool) -> None:
    model = layers()
    checkpointing = zf.checkpoint_blocks(model, every, keep="host", use_reentrant=reentrant)
    assert checkpointing.store is not None
    kept = LAYERS // every
    for _ in range(3):
        loss = model(first_input()).sum()
        assert checkpointing.nbytes == {"device": 2 * INPUT, "host": kept * INPUT, "nvme": 0}
        loss.backward()
        del loss
        assert checkpointing.nbytes == {"device": 0, "host": 0, "nvme": 0}
    assert checkpointing.store.peak_device_nbytes == 2 * INPUT


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("how", "stays"), [({"keep": "host"}, True), ({"contiguous": True}, False)])
def test_nothing_holds_what_has_left_the_device(how: dict[str, Any], stays: bool, every: int) -> None:
    """By weak references to the memory, not by the store's own books."""
    model, seen = layers(), list[StorageWeakRef]()

    def note(module: nn.Module, args: Any) -> None:
        seen.append(StorageWeakRef(args[0].untyped_storage()))

    zf.checkpoint_blocks(model, every, **how)
    for block in model[::every]:
        block.register_forward_pre_hook(note)
    loss = model(first_input().tanh()).sum()  # what tanh made is saved for its own backward, and stays
    assert [not reference.expired() for reference in seen] == [True, *[False] * (LAYERS // every - 3), stays, stays]
    loss.backward()


def test_the_memory_of_one_step_serves_the_next() -> None:
    model = layers()
    checkpointing = zf.checkpoint_blocks(model, contiguous=True)
    sizes = []
    for rows in (ROWS, ROWS, ROWS // 2, ROWS, 2 * ROWS, 2 * ROWS):
        loss = model(torch.ones(rows, WIDTH, requires_grad=True)).sum()
        assert checkpointing.nbytes["device"] == LAYERS * rows * WIDTH * 4
        sizes.append(checkpointing.arena_nbytes // (LAYERS * INPUT))
        loss.backward()
        del loss
    assert sizes == [1, 1, 1, 1, 2, 2]
    checkpointing.remove()
    assert checkpointing.arena_nbytes == 0


def test_the_block_grows_before_it_is_too_small() -> None:
    shelf, blocks = DeviceShelf(torch.device("cpu")), []
    for rows in (4, 4, 2, 6, 5, 6):
        items = [shelf.put(torch.ones(rows, 128)) for _ in range(3)]
        blocks.append((shelf._slots.blocks, shelf.arena_nbytes))
        for item in items:
            shelf.give(item)
    first = 3 * 4 * 128 * 4
    assert blocks[0] == (3, first)  # nobody knows yet how much will be wanted
    assert blocks[1:3] == [(1, first)] * 2
    assert blocks[3:] == [(1, 3 * 6 * 128 * 4)] * 3  # as much larger as the first tensor of that step, at once


def test_slots_are_one_block_after_the_first_step_and_fill_gaps() -> None:
    allocated: list[int] = []

    def allocate(nbytes: int) -> Tensor:
        allocated.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    slots = Slots(allocate, align=64, merges=True)
    for _ in range(3):
        taken = [slots.take(100) for _ in range(4)]
        addresses = [slot.memory.data_ptr() for slot in taken]
        slots.give(taken[1])
        again = slots.take(100)
        assert again.memory.data_ptr() == addresses[1]  # as pipelines do: some go while others stay
        assert len(set(addresses)) == 4
        for slot in (taken[0], again, *taken[2:]):
            slots.give(slot)
    assert allocated == [128] * 4 + [4 * 128]
    assert slots.taken_nbytes == 0


def test_slots_of_many_sizes_given_back_in_any_order_serve_the_next_step() -> None:
    slots = Slots(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), align=64)
    sizes = [64, 640, 128, 640, 64, 6400]
    for order in (1, -1, 1):
        taken = [slots.take(size) for size in sizes]
        assert slots.nbytes == sum(sizes)
        for slot in taken[::order]:
            slots.give(slot)


def test_a_tensor_that_several_blocks_take_is_kept_once() -> None:
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, source: Tensor, mask: Tensor) -> Tensor:
            return self.linear(x) * source + mask

    def gradients(keep: str) -> list[Any]:
        torch.manual_seed(3)
        blocks = nn.ModuleList(Crossing() for _ in range(4))
        checkpointing = zf.checkpoint_blocks(blocks, keep=keep)
        given = torch.linspace(0, 1, WIDTH).expand(ROWS, WIDTH).clone().requires_grad_()
        source, mask = given.tanh(), torch.ones(ROWS, WIDTH)
        x = source
        for block in blocks:
            x = block(x, source=source, mask=mask)
        if keep == "host":
            assert checkpointing.nbytes["host"] == 4 * INPUT  # the source, and what three blocks made; no mask
        x.sum().backward()
        return [given.grad, *(p.grad for p in blocks.parameters())]

    assert all(map(torch.equal, gradients("device"), gradients("host")))


def test_files_hold_what_the_host_only_passes_on(tmp_path: Path) -> None:
    model = layers()
    checkpointing = zf.checkpoint_blocks(model, keep="nvme", path=tmp_path)
    for _ in range(2):
        loss = model(first_input()).sum()
        assert checkpointing.nbytes["nvme"] == (LAYERS - 2) * whole_pages(INPUT)  # the last two never left the device
        assert list(tmp_path.iterdir())
        loss.backward()
        del loss
        assert checkpointing.nbytes["nvme"] == 0
    assert checkpointing.store is not None
    assert checkpointing.store.peak_device_nbytes == 2 * INPUT
    checkpointing.remove()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_says_so_and_leaves_no_memory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    checkpointing = zf.checkpoint_blocks(model, keep="nvme", path=tmp_path)
    write, fails = DiskBlock.write, [True]

    def failing(self: DiskBlock, *args: Any) -> Any:
        if fails[0]:
            raise OSError(errno.EIO, "on purpose")
        return write(self, *args)

    monkeypatch.setattr(DiskBlock, "write", failing)
    with pytest.raises(DiskError, match="write of activations"):
        model(first_input()).sum().backward()
    gc.collect()
    for _ in range(LAYERS):  # each failed write is told once
        with contextlib.suppress(DiskError):
            assert checkpointing.nbytes == {"device": 0, "host": 0, "nvme": 0}
            break
    else:
        raise AssertionError(checkpointing.nbytes)
    fails[0] = False
    model(first_input()).sum().backward()
    checkpointing.remove()


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_formula_agrees_with_what_is_kept(ranks: Any, every: int, batch: int) -> None:
    """2 · bsz · seq · hd · nl / ci, in bf16."""
    assert ranks(1, kept_over_formula, every, batch)[0] == pytest.approx(1.0, abs=0.05)


def kept_over_formula(every: int, batch: int) -> float:
    size = GPTSize(vocab=64, width=64, layers=6, heads=2, seq=64)
    numbers = GPTNumbers(layers=size.layers, hidden=size.width, heads=size.heads, vocab=size.vocab, seq=size.seq)
    model = zf.shard(GPT(size), stage=3, precision="bf16", units=GPTBlock)
    checkpointing = zf.checkpoint_blocks(model, every, contiguous=True)
    loss = model(*RandomTokens(size, batch=batch, rank=0).at(0))
    kept = checkpointing.nbytes["device"]
    loss.backward()
    shown = zf.ledger(model).snapshot()
    assert shown["temporary_bytes"]["checkpoints"] == checkpointing.arena_nbytes == kept
    assert shown["checkpoint_bytes"] == {"device": 0, "host": 0, "nvme": 0}
    assert shown["peak_checkpoint_bytes"] == {"device": kept, "host": 0, "nvme": 0}
    zf.close(model)
    return kept / numbers.paper(batch, every).activation_checkpoints


def offloaded(stage: int, above: str | None, folder: str | None) -> tuple[list[Tensor], set[tuple[int, ...]]]:
    model = make_model(layers=3)
    shapes = {tuple(p.shape) for p in model.parameters()}
    model = zf.shard(model, stage=stage, units=Block)
    taken: set[tuple[int, ...]] = set()
    for batch in batches(2):
        if above is None:
            model(*batch).backward()
            continue
        keep: dict[str, Any] = {"keep": "host"} if folder is None else {"keep": "nvme", "path": folder}
        with zf.offload_activations(model, above=above, together="20KiB", **keep) as store:
            put = store.put

            def noted(block: Any, tensor: Tensor, put: Any = put) -> Any:
                taken.add(tuple(tensor.shape))
                return put(block, tensor)

            setattr(store, "put", noted)  # noqa: B010
            loss = model(*batch)
            assert store.nbytes["host"] + store.nbytes["nvme"] > 0
        loss.backward()
        del loss
        assert sum(store.nbytes.values()) == 0
    gradients = [zf.full_grad(p) for p in model.parameters()]
    zf.close(model)
    return gradients, taken & (shapes | {shape[::-1] for shape in shapes if len(shape) == 2})  # type: ignore[return-value]


def offloaded_alike(folder: str) -> list[Any]:
    found: list[Any] = []
    for stage in (0, 3):
        plain, _ = offloaded(stage, None, None)
        for where in (None, folder):
            gradients, parameters = offloaded(stage, "1KiB", where)
            found.append((all(map(torch.equal, plain, gradients)), parameters))
    return found


def test_activations_leave_the_device_and_parameters_stay(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, offloaded_alike, str(tmp_path)) == [[(True, set())] * 4] * 2


def test_the_threshold_and_plain_models() -> None:
    torch.manual_seed(0)
    model, x = layers(), first_input()
    model(x).sum().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with zf.offload_activations(None, above=INPUT) as store:  # Parameters are recognised without the model
        loss = model(x).sum()
        assert store.nbytes["host"] == (LAYERS + 1) * INPUT  # x, and each tanh, which is the next one's input
        assert store.peak_device_nbytes <= (LAYERS + 1) * INPUT
        loss.backward()
    assert all(map(torch.equal, plain, (p.grad for p in model.parameters())))
    with zf.offload_activations(model, above=INPUT + 1) as store:
        model(x).sum().backward()
        assert store.nbytes["host"] == 0
    pickle.dumps(model)  # without what is known of its activations
    with pytest.raises(ValueError, match='keep="device" would move nothing'), zf.offload_activations(keep="device"):
        pass
    with pytest.raises(ValueError, match="above='big' is no size"), zf.offload_activations(above="big"):
        pass


def in_the_ledger(keep: str, path: str | None) -> None:
    model = zf.shard(layers(), stage=3, units=nn.Linear)
    assert "activation_bytes" not in zf.ledger(model).snapshot()
    away = (LAYERS + 1) * INPUT
    if keep == "nvme":
        away -= INPUT  # the last one has not left yet
    for forwards, most in ((1, 1), (2, 2), (1, 2)):
        losses = []
        for _ in range(forwards):  # backward comes after all of them
            with zf.offload_activations(model, above=INPUT, together=INPUT, keep=keep, path=path) as store:
                losses.append(model(first_input()).sum())
            shown = zf.ledger(model).snapshot()
            assert shown["activation_bytes"][keep] == len(losses) * away
            assert shown["activation_bytes"]["device"] == len(losses) * INPUT == shown["temporary_bytes"]["activations"]
        sum(losses).backward()
        losses.clear()
        shown = zf.ledger(model).snapshot()
        assert shown["activation_bytes"] == {"device": 0, "host": 0, "nvme": 0}
        assert shown["peak_activation_bytes"][keep] == most * away
        gone = weakref.ref(store)
        del store
        assert gone() is None  # the ledger keeps no pinned memory
    zf.close(model)


@pytest.mark.parametrize("keep", ["host", "nvme"])
def test_what_has_left_the_device_is_in_the_ledger(ranks: Any, tmp_path: Path, keep: str) -> None:
    ranks(1, in_the_ledger, keep, str(tmp_path) if keep == "nvme" else None)


@pytest.mark.parametrize("keep", ["host", "device"])
def test_a_checkpoint_inside_a_checkpoint_keeps_nothing(keep: str) -> None:
    """The outer one makes its inputs again, so they are not to wait for backward too."""
    store, linear = zf.CheckpointStore(keep), nn.Linear(WIDTH, WIDTH)

    def outer(x: Tensor) -> Tensor:
        return zf.checkpoint(linear, zf.checkpoint(linear, x, store=store), store=store)

    loss = zf.checkpoint(outer, first_input(), store=store).sum()
    assert store.nbytes[keep] == INPUT
    loss.backward()
    assert sum(store.nbytes.values()) == 0
