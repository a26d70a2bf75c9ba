"""Tensors kept from forward to backward off the device, or in one block of it: copied down behind their use, and up
one block before it.

forward    [ f0 ][ f1 ][ f2 ][ f3 ]        a block's inputs go down while it computes, and leave the device when the
down       [d0  ][d1  ][d2  ]              block after the next begins
backward   [ b3 ][ b2 ][ b1 ][ b0 ]        while a block is computed again, the inputs of the one before come up
up               [u1  ][u0  ]
read       [r1  ][r0  ]                    from a file: and those of the one before that are read
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from zerofold.activation.disk_shelf import make_shelf
from zerofold.activation.partition import Partition, Whole
from zerofold.activation.shelves import DeviceShelf, Ends, Item, Shelf
from zerofold.memory import Done
from zerofold.parallel.mesh import Mesh
from zerofold.placement import Tier

AT_ONCE = 2  # blocks whose inputs are on the device: the one that computes, and its neighbour on its way


class Kept:
    """One tensor: its place on the shelf, and what is on the device of it now. When it goes, its place is free."""

    def __init__(self, shelf: Shelf, tensor: Tensor, whole: Whole | None = None) -> None:
        """`whole`: what to make of it, where the ranks of a partition keep a part each."""
        self._shelf, self._whole = shelf, whole
        self._item: Item = shelf.put(tensor if whole is None else whole.part_of(tensor))
        self.nbytes = (self._item if whole is None else whole).layout.nbytes
        self.version = tensor._version
        # Without its graph. A shelf on the device has a copy, and the tensor may go at once.
        self._here: Tensor | None = tensor.detach() if shelf.frees_device else None
        self._is_origin = self._here is not None
        self._arrival: Ends = Done()
        self._check: Callable[[], None] | None = None  # asked when it has arrived
        self._lent: TensorWeakRef | None = None
        self._is_changed = False

    def look(self, tensor: Tensor) -> None:
        """A tensor that is changed in place while it is copied, or by the function that takes it, is lost. As with
        what autograd keeps itself, it is an error only if backward wants it.
        """
        self._is_changed |= tensor._version != self.version

    def let_go(self) -> None:
        """What came with forward leaves the device; the copy may still be under way."""
        if self._here is None:
            return
        if self._is_origin:
            self.look(self._here)
        self._shelf.settle(self._item)
        self._here = None

    def fetch(self) -> None:
        """It is wanted next but one: a file is read."""
        # Parts are gathered even where the whole is still in use, see `start`.
        if self._here is None if self._whole is not None else not self.is_here:
            self._shelf.fetch(self._item)

    def start(self) -> None:
        """It is wanted next: its copy to the device begins."""
        if self._here is None and self._whole is None:
            self._here = None if self._lent is None else self._lent()
        if self._here is None:
            # All ranks of a partition must come here alike, so it cannot be asked what is still in use.
            whole = self._whole
            self._here, self._arrival, self._check = (
                self._shelf.get(self._item) if whole is None else whole.rebuild(self._shelf, self._item)
            )
            self._is_origin = False

    def use(self) -> Tensor:
        self.start()
        assert self._here is not None
        self._arrival.wait()
        if self._check is not None:
            self._check()
        if self._is_origin:
            self.look(self._here)
            (self._item.done or Done()).wait()  # its memory may go right after its use
        if self._is_changed:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._here.shape)} that is kept for backward (the input of a checkpoint, or "
                "an activation) was changed in place after it was kept: write `x = x + …` for `x += …`"
            )
        # A second backward over the same graph asks again.
        tensor, self._here = self._here, None
        self._lent = TensorWeakRef(tensor)
        return tensor

    @property
    def is_rebuilt(self) -> bool:
        """From parts, in memory of its own."""
        return self._whole is not None

    @property
    def is_here(self) -> bool:
        return self._here is not None or (self._lent is not None and self._lent() is not None)

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_item"):  # the driver may be gone; or there was no room for it
            return
        if self._here is not None:
            # Its memory is free for the current stream only after the copies from and to it.
            (self._item.done or Done()).wait()
            self._arrival.wait()
        self._shelf.give(self._item)


class Block:
    """What one checkpointed call keeps."""

    def __init__(self, before: Block | None) -> None:
        self.kept: list[Kept] = []
        self.is_wanted = False
        """Backward has come to it."""
        self._before = None if before is None else weakref.ref(before)

    @property
    def before(self) -> Block | None:
        """The one that backward comes to after this one, if its graph is still there."""
        return None if self._before is None else self._before()


@dataclass(frozen=True)
class Place:
    """Stands in autograd's graph for a kept tensor."""

    block: Block
    kept: Kept


class _Calls(threading.local):
    depth = 0
    name = "a checkpoint"


class CheckpointStore:
    """Keeps the inputs of checkpointed calls: in one contiguous block of the "device", on the "host", or on "nvme".

    The memory is taken with the first tensor and used again in every step. Where the device is the host, copies are
    made all the same.

    path       the folder for "nvme"
    partition  a `zf.mesh`: inputs, which the ranks along its tensor axis hold alike, are cut, and each keeps its part;
               they are rebuilt one block ahead of their use. All ranks must make the store.
    expected   on the device: how many tensors like the first one a step keeps. Their block is taken at once; else it is
               what the first step turns out to need

    >>> import torch, zerofold as zf
    >>> store, x = zf.CheckpointStore("host"), torch.ones(2, 2, requires_grad=True)
    >>> y = zf.checkpoint(torch.exp, x, store=store)
    >>> store.nbytes["host"] > 0
    True
    >>> y.sum().backward(); del y; store.nbytes["host"]
    0
    >>> store.close()
    """

    def __init__(
        self,
        keep: str = "host",
        *,
        path: str | os.PathLike[str] | None = None,
        partition: Mesh | dist.ProcessGroup | Partition | None = None,
        expected: int = 0,
    ) -> None:
        try:
            self.tier = Tier(keep)
        except ValueError:
            raise ValueError(
                f'keep={keep!r}: use "device", "host" or "nvme", or "auto" of zf.checkpoint_blocks'
            ) from None
        if self.tier is Tier.NVME and path is None:
            raise ValueError('keep="nvme" needs a folder on the disk: add path=')
        if not isinstance(expected, int) or expected < 0:
            raise ValueError(f"expected={expected!r} must be a number of tensors, or 0 for what the first step needs")
        self._path, self._expected = path, expected
        if partition is not None and not isinstance(partition, Partition):
            partition = Partition.over(partition, has_files=self.tier is Tier.NVME)
        self.partition = partition
        self._shelf: Shelf | None = None
        self._device: torch.device | None = None
        self._present: weakref.WeakSet[Kept] = weakref.WeakSet()  # on the device, or there when last looked
        self._last: weakref.ref[Block] | None = None
        self._resident: deque[weakref.ref[Block]] = deque()
        self._wanted: weakref.ref[Block] | None = None  # the last one that backward came to
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors that several blocks take, while they live
        self._calls = _Calls()
        self.whole_nbytes = 0
        """Of all inputs so far: those that were kept whole, since the ranks of a partition do not hold them alike."""
        self.peak_device_nbytes = 0
        """The most bytes of kept tensors that were on the device at once."""
        self.on_growth: Callable[[CheckpointStore, dict[str, int]], None] | None = None
        """Told of `nbytes` whenever they may be more than before."""

    @property
    def depth(self) -> int:
        """Calls under way in this thread whose inputs are kept here; calls inside them keep nothing, since they are
        made again. Backward may run in another thread.
        """
        return self._calls.depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._calls.depth = depth

    @property
    def name(self) -> str:
        """Of whose inputs are kept next in this thread, for messages."""
        return self._calls.name

    @name.setter
    def name(self, name: str) -> None:
        self._calls.name = name

    def to_cut(self, given: Sequence[Tensor], chosen: Sequence[Tensor]) -> list[Tensor]:
        """Those of the inputs `chosen`, of those given, that the ranks of a partition may cut."""
        if self.partition is None:
            return []
        self.partition.note_parts(self.name, given)
        stream = next((tensor for tensor in chosen if tensor is given[0]), None)
        others = [tensor for tensor in chosen if tensor is not stream and self._kept(tensor) is None]
        alike = self.partition.are_alike(self.name, stream, others)
        return [*compress(others, alike), *([] if stream is None else [stream])]

    def begin(self) -> Block:
        """For the next call. Inputs of the call before the last one leave the device."""
        while len(self._resident) >= AT_ONCE:
            self._let_go(self._resident.popleft()())
            self._turn()
        last = None if self._last is None else self._last()
        if last is not None and self._comes_late(last):  # another forward begins
            last = None
        block = Block(last)
        self._last = weakref.ref(block)
        self._resident.append(self._last)
        return block

    def put(self, block: Block, tensor: Tensor, *, is_cut: bool = False) -> Place:
        """A tensor that several blocks take is kept once."""
        kept = self._kept(tensor)
        if kept is None:
            shelf, whole = self._shelf_on(tensor.device), None
            # Ranks that read their own from files tell each other how it went, cut or not.
            if self.partition is not None and (is_cut or shelf.can_fail):
                whole = self.partition.whole(tensor, self.name, is_cut=is_cut)
            kept = Kept(shelf, tensor, whole)
            self.whole_nbytes += tensor.nbytes if self.partition is not None and not is_cut else 0
            self._seen[tensor] = weakref.ref(kept)
        block.kept.append(kept)
        self._present.add(kept)
        self._note_peak()
        return Place(block, kept)

    def get(self, place: Place) -> Tensor:
        """The tensor, on the device; those of the block before are set going, and those of the one before that are
        read where they are in a file.
        """
        if self._wanted is None or self._wanted() is not place.block:
            self._wanted = weakref.ref(place.block)
            self._turn()
        place.block.is_wanted = True
        tensor = place.kept.use()
        self._present.add(place.kept)
        ahead = self._ahead_of(place.block)
        if self.tier is not Tier.DEVICE or self.partition is not None:
            for kept in () if ahead is None else ahead.kept:
                kept.start()
                self._present.add(kept)
        after = None if ahead is None else self._ahead_of(ahead)
        for kept in () if after is None else after.kept:
            kept.fetch()
        self._note_peak()
        return tensor

    def unpack(self, saved: Tensor | Place) -> Tensor:
        """For autograd, which has a place of what is kept, and all else itself."""
        return self.get(saved) if isinstance(saved, Place) else saved

    def _kept(self, tensor: Tensor) -> Kept | None:
        """Of another block that takes it, if it has not been changed since."""
        found = self._seen.get(tensor)
        kept: Kept | None = None if found is None else found()
        return None if kept is None or kept.version != tensor._version else kept

    def close(self) -> None:
        """Gives all memory back; no graph may need it any more."""
        self._resident.clear()
        taken = self._taken()
        if taken:
            gc.collect()  # the graph of a forward that raised goes in cycles with its traceback
            taken = self._taken()
        if taken:
            raise RuntimeError(
                f"{taken} bytes of this store are kept for a backward that has not come: call it, or drop the loss"
            )
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None

    def _taken(self) -> int:
        return 0 if self._shelf is None else sum(self._shelf.nbytes().values())

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of kept tensors now, by tier; on the device those that are there beside their copies."""
        taken: dict[str, int] = {} if self._shelf is None else self._shelf.nbytes()
        return {"device": 0, "host": 0, "nvme": 0} | taken | {"device": self._device_nbytes}

    @property
    def arena_nbytes(self) -> int:
        """Of the block on the device, used or not."""
        return 0 if self._shelf is None else self._shelf.arena_nbytes

    @property
    def given_back(self) -> int:
        """How often CUDA's allocator has given back what it held, so that no more is reserved than is needed."""
        reserve = self._shelf.reserve if isinstance(self._shelf, DeviceShelf) else None
        return 0 if reserve is None else reserve.given_back

    @property
    def _device_nbytes(self) -> int:
        """On a device that keeps them, those rebuilt from their parts count besides."""
        own, is_own = 0, False
        if self._shelf is not None and not self._shelf.frees_device:
            own, is_own = self._shelf.nbytes()["device"], True
            if self.partition is None:
                return own
        self._present -= {kept for kept in self._present if not kept.is_here}
        return own + sum(kept.nbytes for kept in self._present if kept.is_rebuilt or not is_own)

    def _note_peak(self) -> None:
        if self.on_growth is None:
            self.peak_device_nbytes = max(self.peak_device_nbytes, self._device_nbytes)
            return
        now = self.nbytes
        self.peak_device_nbytes = max(self.peak_device_nbytes, now["device"])
        self.on_growth(self, now)

    def _shelf_on(self, device: torch.device) -> Shelf:
        if self._shelf is None:
            self._shelf, self._device = self._make_shelf(device), device
        if device != self._device:
            raise ValueError(f"a checkpoint on {device}, in a store that has those of {self._device}: use one for each")
        return self._shelf

    def _make_shelf(self, device: torch.device) -> Shelf:
        return make_shelf(self.tier, device, self._path, is_shared=self.partition is not None, expected=self._expected)

    def _ahead_of(self, block: Block) -> Block | None:
        """The block that backward comes to next."""
        before = block.before
        return None if before is None or self._comes_late(before) else before

    def _turn(self) -> None:
        if self._shelf is not None:
            self._shelf.turn()

    def _comes_late(self, block: Block) -> bool:
        """Whether backward has been there. With a partition it counts, and not what is left in memory of it: whether a
        part is gathered must be the same on all ranks.
        """
        return self.partition is not None and block.is_wanted

    def _let_go(self, block: Block | None) -> None:
        for kept in () if block is None else block.kept:
            kept.let_go()

    def __deepcopy__(self, memo: Any) -> CheckpointStore:
        if self.partition is not None:
            raise ValueError("a store that cuts inputs over tensor ranks cannot be copied: make a new one on all ranks")
        return CheckpointStore(self.tier.value, path=self._path, expected=self._expected)
