"""M_d: what the allocator holds is given back when it is of no use, and the backward has left nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofold as zf
from zerofold.activation.reserve import OVER, Books, Reserve
from zerofold.activation.shelves import DeviceShelf

MIB = 2**20


@dataclass
class Fake:
    """An allocator's books, in which `in_use` cannot be given back."""

    reserved: int = 1000 * MIB
    most_allocated: int = 1000 * MIB
    in_use: int = 400 * MIB
    calls: list[str] = field(default_factory=list)
    look: Callable[[], None] = lambda: None

    def books(self) -> Books:
        self.calls.append("books")
        self.look()
        return Books(self.reserved, self.most_allocated)

    def give_back(self) -> None:
        self.calls.append("give back")
        self.reserved = min(self.reserved, self.in_use)

    def take(self, nbytes: int) -> None:
        self.calls.append(f"take {nbytes // MIB}")
        self.reserved += nbytes


def test_the_cache_is_given_back_for_the_longest_since_the_last_time() -> None:
    reserve = Reserve(Fake())
    counts = []
    for nbytes in (10, 10, 5, 20, 19, 21):
        reserve.begin(nbytes)
        counts.append(reserve.given_back)
    assert counts == [1, 1, 1, 2, 2, 3]
    reserve.begin(7, is_new=True)  # the block was made of several: what comes is compared with this one
    reserve.begin(8)
    assert reserve.given_back == 5


def test_too_much_is_exchanged_for_one_segment_up_to_the_peak() -> None:
    cache = Fake()
    reserve = Reserve(cache)
    cache.reserved = int(OVER * cache.most_allocated)
    reserve.end()
    assert reserve.given_back == 0
    cache.reserved += 1
    reserve.end()
    assert cache.calls[-4:] == ["books", "give back", "books", "take 600"]
    assert cache.reserved == cache.most_allocated
    reserve.end()
    reserve.begin(0)  # of that segment, all that came so far can be cut
    assert reserve.given_back == 1


def test_a_model_that_needs_more_in_every_step_is_left_alone() -> None:
    """Its tensors leave gaps in one segment, too: to give back the cache each time would help nothing."""
    cache, reached = Fake(), 1100 * MIB
    reserve = Reserve(cache)
    for _ in range(5):
        cache.reserved = reached
        reserve.end()
    assert (reserve.given_back, cache.reserved) == (1, reached)
    cache.reserved = int(1.02 * reached)
    reserve.end()
    assert (reserve.given_back, cache.reserved) == (2, cache.most_allocated)


def test_segments_in_use_are_left_and_nothing_is_taken_beside_them() -> None:
    cache = Fake(reserved=1200 * MIB, in_use=1100 * MIB)  # more than was ever allocated: little is used of each
    Reserve(cache).end()
    assert cache.reserved == 1100 * MIB
    assert not any(call.startswith("take") for call in cache.calls)


def test_a_peak_that_the_user_sets_back_is_remembered() -> None:
    cache = Fake()
    reserve = Reserve(cache)
    reserve.end()
    cache.most_allocated = 500 * MIB  # torch.cuda.reset_peak_memory_stats()
    reserve.end()
    assert reserve.given_back == 0


def stored_on(cache: Fake) -> zf.CheckpointStore:
    """In which the CPU stands for a device whose allocator keeps books."""
    store = zf.CheckpointStore("device")
    store._device = torch.device("cpu")
    store._shelf = DeviceShelf(store._device, Reserve(cache))
    return store


def two_blocks(store: zf.CheckpointStore, x: Tensor, **how: Any) -> Tensor:
    return zf.checkpoint(torch.sin, zf.checkpoint(torch.exp, x, store=store, **how), store=store, **how).sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_it_looks_once_for_each_backward_when_all_is_given_back(use_reentrant: bool) -> None:
    cache, x, taken = Fake(), torch.ones(256, requires_grad=True), []
    store = stored_on(cache)
    cache.look = lambda: taken.append(store.nbytes["device"])
    for _ in range(3):
        two_blocks(store, x, use_reentrant=use_reentrant).backward()
    assert taken == [0, 0, 0]
    assert store.given_back == 2  # before the first, and when the blocks of its memory became one
    with torch.no_grad():
        two_blocks(store, x)
    assert len(taken) == 3


def test_a_backward_that_raises_does_not_keep_the_next_from_looking() -> None:
    cache, x = Fake(), torch.ones(256, requires_grad=True)
    store = stored_on(cache)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    y = x * 1
    y.register_hook(fail)
    loss = two_blocks(store, y)
    with pytest.raises(ArithmeticError):
        loss.backward()
    del loss
    assert "books" not in cache.calls
    two_blocks(store, x).backward()
    assert cache.calls.count("books") == 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.blocks(self.first(x)))
        return result


def gathered_at_the_end(sharded_first: bool) -> list[int]:
    """Bytes of gathered weights when it looks, of two backwards."""
    model, cache, found = Net(), Fake(), []
    optimizer = torch.optim.AdamW(model.parameters())
    how: dict[str, Any] = {"units": lambda name, module: name.startswith("blocks.")}
    if sharded_first:
        zf.prepare(model, optimizer, stage=3, precision="bf16", **how)
    checkpointing = zf.checkpoint_blocks(model, contiguous=True, **how)
    if not sharded_first:
        zf.prepare(model, optimizer, stage=3, precision="bf16", **how)
    store = checkpointing.store
    assert store is not None
    store._device = torch.device("cpu")
    store._shelf = DeviceShelf(store._device, Reserve(cache))
    cache.look = lambda: found.append(zf.ledger(model).snapshot()["temporary_bytes"]["gathered"])
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    checkpointing.remove()
    zf.close(model)
    return found


@pytest.mark.parametrize("sharded_first", [False, True])
def test_gathered_weights_are_gone_when_it_looks(ranks: Any, sharded_first: bool) -> None:
    """Or the segment that they lie in could not be given back."""
    assert ranks(2, gathered_at_the_end, sharded_first) == [[0, 0]] * 2
