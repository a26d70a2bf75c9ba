"""The eight collectives, in the fastest form each backend has; every byte counted, the last calls remembered.

gloo's own all-gather and reduce-scatter move the same bytes two to three times slower than broadcasts into slices
and an all-to-all with a local sum (docs/design.md has the figures), so those forms stand in for them there. The
local sum runs in rank order, which makes the result the same bits on every rank and for every stage.

All calls go through `dist.<name>` so that counters and debuggers outside see them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the single-tensor forms; 2.11 has only the old names.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class CommError(RuntimeError):
    """A collective failed; the message names the operation, the unit, the rank and what was called last."""


@dataclass
class Call:
    """One remembered call: what, for which unit, how much, and whether it has finished."""

    number: int
    operation: str
    unit: str
    elements: int
    done: bool = False

    def __str__(self) -> str:
        return f"#{self.number} {self.operation}({self.unit}, {self.elements}){'' if self.done else ' unfinished'}"


@dataclass
class Traffic:
    """Elements and bytes this rank has sent, by operation and unit, and the last calls.

    An operation counts what a ring would send per rank: n(N-1)/N for a gather, scatter, reduce or broadcast of n
    elements, twice that for an all-reduce.
    """

    elements: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    bytes: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    group_bytes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=64))
    number: int = 0

    def record(self, operation: str, unit: str, group: str, sent: float, itemsize: int) -> Call:
        self.number += 1
        self.elements[operation, unit] += sent
        self.bytes[operation, unit] += sent * itemsize
        self.group_bytes[group] += sent * itemsize
        call = Call(self.number, operation, unit, round(sent))
        self.calls.append(call)
        return call

    def bytes_by_operation(self) -> dict[str, int]:
        total: defaultdict[str, float] = defaultdict(float)
        for (operation, _), sent in self.bytes.items():
            total[operation] += sent
        return {operation: round(sent) for operation, sent in total.items()}

    def bytes_by_group(self) -> dict[str, int]:
        return {group: round(sent) for group, sent in self.group_bytes.items()}

    def last(self, count: int = 4) -> str:
        return ", ".join(str(call) for call in list(self.calls)[-count:])


class Handle:
    """An operation under way. `wait` returns when its result may be used on the current stream."""

    def __init__(self, comm: Comm, call: Call, works: Sequence[Any]) -> None:
        self._comm, self._call, self._works = comm, call, works

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._comm.failure(self._call, error) from error
        self._works = ()
        self._call.done = True


class Comm:
    """One process group with its counters. `overlap=False` finishes every call before it returns."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, traffic: Traffic, *, overlap: bool, name: str = "all"
    ) -> None:
        self.group, self.device, self.traffic, self.overlap, self.name = group, device, traffic, overlap, name
        self.rank, self.size = group.rank(), group.size()
        self.global_ranks = dist.get_process_group_ranks(group)
        # gloo is the slow case below; anything else (nccl, xccl, …) is taken to be best at its own collectives.
        self.is_gloo = group._get_backend(device).name() == "gloo"

    def broadcast(self, tensor: Tensor, source: int, *, unit: str) -> Handle:
        return self._start("broadcast", unit, tensor, 1, lambda: [self._broadcast(tensor, source)], in_place=True)

    def scatter(self, out: Tensor, pieces: list[Tensor] | None, source: int, *, unit: str) -> Handle:
        def start() -> list[Any]:
            root = self.global_ranks[source]
            return [dist.scatter(out, pieces, src=root, group=self.group, async_op=True)]

        return self._start("scatter", unit, out, self.size, start)

    def gather(self, tensor: Tensor, pieces: list[Tensor] | None, destination: int, *, unit: str) -> Handle:
        def start() -> list[Any]:
            root = self.global_ranks[destination]
            return [dist.gather(tensor, pieces, dst=root, group=self.group, async_op=True)]

        return self._start("gather", unit, tensor, self.size, start)

    def reduce(self, tensor: Tensor, destination: int, *, unit: str) -> Handle:
        def start() -> list[Any]:
            root = self.global_ranks[destination]
            return [dist.reduce(tensor, dst=root, group=self.group, async_op=True)]

        return self._start("reduce", unit, tensor, 1, start, in_place=True)

    def all_gather(self, flat: Tensor, bounds: Sequence[int], *, unit: str) -> Handle:
        """Completes `flat` in place: on entry rank r has filled its slice, flat[bounds[r]:bounds[r + 1]]."""

        def start() -> list[Any]:
            slices = [flat[low:high] for low, high in pairwise(bounds)]
            if self.is_gloo or any(piece.numel() != slices[0].numel() for piece in slices):
                return [self._broadcast(piece, source) for source, piece in enumerate(slices) if piece.numel()]
            return [getattr(dist, _ALL_GATHER)(flat, slices[self.rank], group=self.group, async_op=True)]

        return self._start("all_gather", unit, flat, 1, start, in_place=True)

    def reduce_scatter(self, out: Tensor, rows: Tensor, *, unit: str) -> Handle:
        """out = the sum over ranks of row number `self.rank`. For backends whose own form is the fastest."""

        def start() -> list[Any]:
            return [getattr(dist, _REDUCE_SCATTER)(out, rows, group=self.group, async_op=True)]

        return self._start("reduce_scatter", unit, rows, 1, start)

    def reduce_rows(self, rows: Sequence[Tensor], *, unit: str) -> Handle:
        """Row r is summed into rank r's, in place: a reduce-scatter of rows of different lengths."""

        def start() -> list[Any]:
            return [
                dist.reduce(row, dst=self.global_ranks[rank], group=self.group, async_op=True)
                for rank, row in enumerate(rows)
                if row.numel()
            ]

        sent = sum(row.numel() for row in rows) * (self.size - 1) / self.size
        return self._start("reduce_scatter", unit, rows[0], 1, start, sent=sent, in_place=True)

    def swap_rows(self, received: Tensor, rows: Tensor, widths: Sequence[int], *, unit: str) -> Handle:
        """The exchange half of a reduce-scatter: row r, of widths[r], goes to rank r; the own row stays where it is.

        `rows` holds the other ranks' rows end to end in rank order; `received` gets as many of the own width. The
        caller sums.
        """

        def start() -> list[Any]:
            out = [0 if rank == self.rank else width for rank, width in enumerate(widths)]
            into = [0 if rank == self.rank else widths[self.rank] for rank in range(self.size)]
            return [dist.all_to_all_single(received, rows, into, out, group=self.group, async_op=True)]

        # Every one of these elements goes to another rank, so all count: the same n(N-1)/N as a ring sends.
        return self._start("reduce_scatter", unit, rows, 1, start, sent=rows.numel(), in_place=True)

    def all_reduce(self, tensor: Tensor, *, unit: str, op: Any = dist.ReduceOp.SUM) -> Handle:
        def start() -> list[Any]:
            return [dist.all_reduce(tensor, op=op, group=self.group, async_op=True)]

        return self._start("all_reduce", unit, tensor, 2, start, in_place=True)

    def all_to_all(self, received: Tensor, sent: Tensor, *, unit: str) -> Handle:
        def start() -> list[Any]:
            return [dist.all_to_all_single(received, sent, group=self.group, async_op=True)]

        return self._start("all_to_all", unit, sent, 1, start)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. For set-up and errors, not for the hot path."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def raise_together(self, error: Exception | None) -> None:
        """Raises on every rank when any rank has an error, so that no rank waits for one that gave up."""
        messages = self.all_gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise ValueError(f"rank {rank} refused: {message}")

    def failure(self, call: Call, error: BaseException) -> CommError:
        return CommError(
            f"rank {self.rank}: {call.operation} of unit '{call.unit}' failed, most likely because another rank "
            f"stopped or did something else; last calls here: {self.traffic.last()}. Cause: {error}"
        )

    def _broadcast(self, tensor: Tensor, source: int) -> Any:
        root = self.global_ranks[source]
        return dist.broadcast(tensor, src=root, group=self.group, async_op=True)

    def _start(
        self,
        operation: str,
        unit: str,
        tensor: Tensor,
        times: float,
        start: Callable[[], list[Any]],
        *,
        sent: float | None = None,
        in_place: bool = False,
    ) -> Handle:
        if sent is None:
            sent = tensor.numel() * times * (self.size - 1) / self.size
        call = self.traffic.record(operation, unit, self.name, sent, tensor.element_size())
        try:
            # Alone, an operation in place has nothing to do; the others still copy from input to output.
            works = [] if in_place and self.size == 1 else start()
        except RuntimeError as error:
            raise self.failure(call, error) from error
        handle = Handle(self, call, works)
        if not self.overlap:
            handle.wait()
        return handle
