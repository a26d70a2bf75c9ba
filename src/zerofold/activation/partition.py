"""P_a of ZeRO-R: what every tensor rank holds alike is kept by each in part, and rebuilt before it is used.

the input of a block, on each of 4 tensor ranks     | a | b | c | d |
kept by rank 1                                          | b |                 flat, the last one shorter
rebuilt, one block ahead of its use                 | a | b | c | d |         an all-gather in place

Inputs that the ranks do not hold alike are kept whole by each.

The gathers have a process group of their own: they are under way while the model's own collectives run, and neither
waits for the other's order.

A part in a file may be lost. The rank whose disk fails does not raise there, while the others wait in a collective for
it: it takes part in the gather with whatever its memory holds, and a byte of each rank beside the gather says how its
read went. So all of them know before anybody computes with it, and raise together.
"""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.activation.shelves import Arrived, Ends, Item, Layout, Shelf
from zerofold.comm import ALONE, Comm, Handle
from zerofold.memory import Done
from zerofold.memory.disk import DiskError
from zerofold.parallel.mesh import TENSOR, Mesh
from zerofold.plan.keeping import Choice
from zerofold.traffic import Traffic


class Whole(NamedTuple):
    """What a kept part is of."""

    partition: Partition
    layout: Layout
    name: str
    is_cut: bool
    """Else the part is all of it, since other ranks have something else: each has its own, and tells how it read it."""

    def part_of(self, tensor: Tensor) -> Tensor:
        return self.partition.part_of(tensor) if self.is_cut else tensor

    def rebuild(self, shelf: Shelf, item: Item) -> Arrived:
        """On its way; the memory belongs to the stream that asks for it."""
        return self.partition.rebuild(self, shelf, item)


class _Told:
    """A gather, and beside it what each rank says of its own part."""

    def __init__(self, control: Comm, name: str, gathering: Ends, trouble: Exception | None) -> None:
        self._control, self._name, self._gathering, self._trouble = control, name, gathering, trouble
        self._has_failed = torch.zeros(control.size, dtype=torch.bool)
        self._has_failed[control.rank] = trouble is not None
        self._telling = control.all_gather(self._has_failed, range(control.size + 1), unit=name)

    def wait(self) -> None:
        self._gathering.wait()
        self._telling.wait()

    def check(self) -> None:
        """Raises on all ranks if any of them has failed."""
        if not self._has_failed.any():
            return
        own = None if self._trouble is None else (getattr(self._trouble, "errno", None), str(self._trouble))
        everyones = self._control.all_gather_objects(own, unit=self._name)
        failed = {rank: each for rank, each in zip(self._control.global_ranks, everyones, strict=True) if each}
        rank, (code, why) = next(iter(failed.items()))
        others = "" if len(failed) == 1 else f" (so with {len(failed) - 1} more of the {len(everyones)} tensor ranks)"
        raise DiskError(
            code or errno.EIO, f"rank {rank} has lost its part of the input of {self._name}{others}: {why}"
        ) from self._trouble


class Partition:
    """The ranks over which inputs are cut.

    Every rank asks for the same inputs in the same order, since all of them run the same backward: whether a part is
    gathered must not depend on what happens to be in memory still.
    """

    def __init__(self, comm: Comm, control: Comm) -> None:
        """`control`: the same ranks. Where parts are in files it must be one that the host can wait for by itself."""
        self._comm, self._control = comm, control
        self._looked_at: set[str] = set()
        self._has_noted = False

    @classmethod
    def over(cls, where: Mesh | dist.ProcessGroup, *, has_files: bool = False) -> Partition | None:
        """Those along the tensor axis of a mesh, or of a group; None where there is one alone, and nothing to cut.

        All ranks of the mesh, or of the group, must call it. `has_files`: parts may be kept in files.
        """
        if not isinstance(where, (Mesh, dist.ProcessGroup)):
            raise TypeError(f"partition={where!r} must be what zf.mesh(tensor=…) returned, or a process group")
        make: Callable[..., dist.ProcessGroup]
        if isinstance(where, Mesh):
            if where.tensor == 1:
                return None
            make = partial(_own_of, where.groups(TENSOR))
            backend = dist.get_backend() if dist.get_backend() in ALONE else None
            device = torch.device(where.device_mesh.device_type)
        else:
            if where.size() == 1:
                return None
            make = partial(dist.new_group, dist.get_process_group_ranks(where), use_local_synchronization=True)
            backend = None
            device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        # Groups live until torch.distributed ends: see `zerofold.groups.destroy`.
        comm = Comm(make(backend=backend), device, Traffic(), overlap=True, name=TENSOR)
        if not has_files or comm.is_gloo or comm.is_alone:
            return cls(comm, comm)
        # The host asks how a read went. Over the device's group it would wait for the device.
        control = make(backend="gloo")
        return cls(comm, Comm(control, torch.device("cpu"), comm.traffic, overlap=True, name=TENSOR))

    @property
    def ranks(self) -> int:
        return self._comm.size

    def count_in(self, traffic: Traffic | None) -> None:
        """What is sent from now on counts there too: of an engine, whose own groups it has nothing to do with."""
        self._comm.traffic.onto = traffic

    @property
    def sent_nbytes(self) -> int:
        """By this rank, as a ring would send it, since the beginning."""
        return sum(self._comm.traffic.bytes_by_operation().values())

    def whole(self, tensor: Tensor, name: str, *, is_cut: bool = True) -> Whole:
        return Whole(self, Layout.of(tensor), name, is_cut)

    def part_of(self, tensor: Tensor) -> Tensor:
        """This rank's range of it: a view, where the tensor has no gaps."""
        layout = Layout.of(tensor)
        dense = tensor if tensor.stride() == layout.stride else layout.empty(tensor.device).copy_(tensor)
        flat = dense.detach().as_strided((dense.numel(),), (1,))
        size = self._size(flat.numel())
        return flat[self._comm.rank * size : (self._comm.rank + 1) * size]

    def rebuild(self, whole: Whole, shelf: Shelf, item: Item) -> Arrived:
        if not whole.is_cut:
            return self._own(whole, shelf, item)
        numel, device = whole.layout.shape.numel(), self._comm.device
        size = self._size(numel)
        flat = torch.empty(size * self.ranks, dtype=whole.layout.dtype, device=device)
        first = self._comm.rank * size
        bounds = range(0, size * self.ranks + 1, size)

        def gather() -> Handle:
            """Behind the copy of the own part, in its stream: whoever computes meanwhile waits for neither."""
            return self._comm.all_gather(flat, bounds, unit=whole.name)

        own = flat[first : first + item.layout.shape.numel()]
        trouble = shelf.trouble(item)
        gathering = shelf.fill(item, own, gather) if trouble is None else gather()
        tensor = flat[:numel].as_strided(whole.layout.shape, whole.layout.stride).data
        if not shelf.can_fail:
            return Arrived(tensor, gathering)
        told = _Told(self._control, whole.name, gathering, trouble)
        return Arrived(tensor, told, told.check)

    def _own(self, whole: Whole, shelf: Shelf, item: Item) -> Arrived:
        """Nothing is gathered. But a rank that has lost its own must not raise alone."""
        trouble = shelf.trouble(item)
        tensor, done, _ = shelf.get(item) if trouble is None else Arrived(whole.layout.empty(self._comm.device), Done())
        told = _Told(self._control, whole.name, done, trouble)
        return Arrived(tensor, told, told.check)

    def furthest(self, choice: Choice) -> Choice:
        """Of what its ranks would choose, the place that is furthest from the device. All of them must ask: each knows
        its own host alone, and what they keep in parts they must keep alike."""
        return max(self._comm.all_gather_objects(choice, unit="keep"), key=lambda each: each.distance)

    def are_alike(self, name: str, stream: Tensor | None, others: Sequence[Tensor]) -> list[bool]:
        """Which of the others all ranks hold alike: the rest cannot be cut, such as the bias of T5, of which each has
        that of its heads. A stream that differs raises: its rank would compute on a mixture, and nobody would notice.

        The stream is compared once for each block. Others come once a forward, and are compared each time: a bias that
        begins with zeros is alike until the first update.
        """
        is_new = stream is not None and name not in self._looked_at
        asked = [*([stream] if stream is not None and is_new else []), *others]
        if not asked:
            return []
        everyones = self._comm.all_gather_objects([_checksum(tensor) for tensor in asked], unit=name)
        alike = [all(one == each[0] for one in each) for each in zip_longest(*everyones)]
        if is_new:
            self._looked_at.add(name)
            if not alike.pop(0):
                raise ValueError(
                    f"partition=: the inputs of {name} are not the same on the {self.ranks} tensor ranks, so they "
                    "cannot be cut: give all of them the same samples and random numbers, or, if they are parts "
                    "already (sequence parallelism), leave partition= out"
                )
        return alike

    def note_parts(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Of an input that is a part already; said once."""
        found = next((tensor for tensor in tensors if is_dtensor(tensor) and tensor.requires_grad), None)
        if found is not None and not self._has_noted:
            self._has_noted = True
            warnings.warn(
                f"partition=: an input of {name}, {tuple(found.shape)}, is a DTensor: with a part of it on every rank "
                "(sequence parallelism) there is nothing left to cut, so it is kept as it is",
                stacklevel=2,
            )

    def _size(self, numel: int) -> int:
        return -(-numel // self.ranks)


def _own_of(groups: Sequence[Sequence[int]], *, backend: str | None) -> dist.ProcessGroup:
    """Every rank makes all of them, and has one."""
    made = {tuple(ranks): dist.new_group(list(ranks), backend=backend) for ranks in groups}
    (group,) = [group for ranks, group in made.items() if dist.get_rank() in ranks]
    return group


def _checksum(tensor: Tensor) -> list[int]:
    """A few sums of its bits, which need no memory: of all, of the first half and of every third element."""
    bits = tensor.detach().reshape(-1).view(torch.uint8 if tensor.itemsize == 1 else torch.int16)
    sums = [part.sum(dtype=torch.int64) for part in (bits, bits[: len(bits) // 2], bits[::3])]
    return [tensor.numel(), *torch.stack(sums).tolist()]


def is_dtensor(tensor: Tensor) -> bool:
    """Where nobody has loaded torch's module for them, which takes half a second, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
