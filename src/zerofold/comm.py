"""The eight collectives, in the fastest form each backend has.

gloo's own all-gather and reduce-scatter move the same bytes two to three times slower than broadcasts into slices
and an all-to-all with a local sum (docs/design.md has the figures), so those forms stand in for them there. The
local sum runs in rank order, which makes the result the same bits on every rank and for every stage.

All calls go through `dist.<name>` so that counters and debuggers outside see them.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.ends import SLICE
from zerofold.stamps import Stamp
from zerofold.timing import GATHER, OTHER, REDUCE, Tape
from zerofold.traffic import REMEMBERED, Call, Habit, Traffic

# torch 2.13 renamed the single-tensor forms; 2.11 has only the old names.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

# Groups in which one process stands for all ranks: torch's fake one, and the simulator's, which takes time.
ALONE = ("fake", "modelled")
CONTROL = "control"
"""The group of agreements."""
_PURPOSES = {"all_gather": GATHER, "broadcast": GATHER, "reduce_scatter": REDUCE, "reduce": REDUCE}


class CommError(RuntimeError):
    """A collective failed; the message names the operation, the unit, the rank and what was called last.

    >>> import zerofold as zf
    >>> issubclass(zf.CommError, RuntimeError)
    True
    """


class DivergenceError(CommError):
    """The ranks do different things, or one keeps the others waiting beyond `patience`; the message names them, the
    modules and the collectives. All ranks raise it. Calls that were left half done stay in torch's groups: end the
    process, or destroy and initialise torch.distributed, before a model is built again.

    >>> import zerofold as zf
    >>> issubclass(zf.DivergenceError, zf.CommError)
    True
    """


class Watcher(Protocol):
    """Whoever knows what the other ranks do (`watch`)."""

    has_diverged: bool  # what `explain` found is that ranks do different things

    def look(self) -> None:
        """Raises what it has found out."""

    def explain(self, cause: str) -> str:
        """Why a call failed, from what the other ranks tell; takes seconds."""

    def compare(self) -> str | None:
        """Which calls differ between ranks; all of them must ask."""

    def confirm(self, comm: Comm, call: Call) -> None:
        """Returns when all ranks are about to make the same call."""


class Handle:
    """An operation under way. `wait` returns when its result may be used on the current stream."""

    def __init__(self, comm: Comm, call: Call, works: Sequence[Any]) -> None:
        self._comm, self.call, self._works = comm, call, works
        self._begun: Stamp = None
        self._ended: Stamp = None
        tape = comm.traffic.clock.tape
        if tape is not None and tape.traces and works:
            self._begun = tape.stamp()
            # Of several works the last to be started ends last, or nearly so. Only on gloo and the CPU does waiting for
            # it tell when it ended: elsewhere that makes a stream wait, and returns at once.
            if comm.is_gloo and comm.device.type == "cpu":
                tape.ends_of(comm).watch(works[-1], self._note_end)

    @property
    def waits_for(self) -> str:
        return self.call.purpose

    def wait(self) -> None:
        tape = self._comm.traffic.clock.tape
        if tape is None or not self._works:
            self._wait()
        else:
            self._wait_on(tape)

    def _wait_on(self, tape: Tape) -> None:
        call = self.call
        tape.begin(call.purpose, call.unit)
        try:
            self._wait()
        finally:
            waited = tape.end()
        if self._begun is not None:
            seen = self._ended
            # The thread that looks for the end may get its turn after this one has gone on: then this one knows better.
            if seen is None or (isinstance(waited, float) and waited < seen):
                seen = waited
            tape.on_wire(call.purpose, call.unit, self._begun, call.nbytes, seen)
            self._begun = None

    def _note_end(self, at: float) -> None:
        """In another thread."""
        self._ended = at

    def _wait(self) -> None:
        try:
            for work in self._works:
                self._wait_for(work)
        except DivergenceError:
            raise
        except RuntimeError as error:
            raise self._comm.failure(self.call, error) from error
        if self._comm.is_gloo:  # others order the stream and go on: their work may be under way still
            self._works = ()
        self.call.done = True

    def is_finished(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def _wait_for(self, work: Any) -> None:
        comm = self._comm
        if comm.watcher is None or not comm.is_gloo:
            work.wait()
            return
        try:
            while True:
                try:
                    work.wait(SLICE)  # and then looks whether the ranks have diverged
                    return
                except RuntimeError:
                    if work.is_completed():  # it has failed, or come at the last moment: asking again tells
                        work.wait()
                        return
                comm.blocked = self.call
                comm.watcher.look()
        finally:
            comm.blocked = None


class Comm:
    """One process group with its counters. `overlap=False` finishes every call before it returns."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, traffic: Traffic, *, overlap: bool, name: str = "all"
    ) -> None:
        self.group, self.device, self.traffic, self.overlap, self.name = group, device, traffic, overlap, name
        self.rank, self.size = group.rank(), group.size()
        self.global_ranks = dist.get_process_group_ranks(group)
        # gloo is the slow case below; anything else (nccl, xccl, …) is taken to be best at its own collectives.
        backend = group._get_backend(device).name()
        self.is_gloo = backend == "gloo"
        self.is_alone = backend in ALONE
        self.watcher: Watcher | None = None
        self.calls: deque[Call] = deque(maxlen=REMEMBERED)
        self.count = 0  # of all calls so far: the next one's position, the same on every rank
        # What the watch reads, and the other ranks are told, when a call takes long:
        self.latest: Handle | None = None
        self.blocked: Call | None = None  # this rank has been waiting in it for a while
        self.about: Call | None = None  # what this rank is to call next, once the others confirm it
        self.habit: Habit | None = None  # which call follows which: one that is new in its place is to be confirmed

    def broadcast(self, tensor: Tensor, source: int, *, unit: str) -> Handle:
        return self._start(
            "broadcast", unit, tensor, 1, lambda: [self._broadcast(tensor, source)], in_place=True, root=source
        )

    def scatter(self, out: Tensor, whole: Tensor | None, source: int, *, unit: str) -> Handle:
        """Deals equal parts of one tensor out, in rank order. The source alone has it; the others pass None."""

        def start() -> list[Any]:
            if self.is_alone:  # a list of 100,000 parts would be for nobody
                if whole is not None:
                    out.copy_(whole[: out.numel()])
                return []
            pieces = None if whole is None else list(whole.chunk(self.size))
            return [dist.scatter(out, pieces, src=self.global_ranks[source], group=self.group, async_op=True)]

        return self._start("scatter", unit, out, self.size, start, root=source)

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
            is_even = isinstance(bounds, range) or len({high - low for low, high in pairwise(bounds)}) == 1
            if is_even and not self.is_gloo:
                own = flat[bounds[self.rank] : bounds[self.rank + 1]]
                return [getattr(dist, _ALL_GATHER)(flat, own, group=self.group, async_op=True)]
            slices = [flat[low:high] for low, high in pairwise(bounds)]
            return [self._broadcast(piece, source) for source, piece in enumerate(slices) if piece.numel()]

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

        whole = sum(row.numel() for row in rows)
        sent = whole * (self.size - 1) / self.size
        return self._start("reduce_scatter", unit, rows[0], 1, start, sent=sent, whole=whole, in_place=True)

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
        sent, whole = rows.numel(), sum(widths)
        return self._start("reduce_scatter", unit, rows, 1, start, sent=sent, whole=whole, in_place=True)

    def all_reduce(
        self, tensor: Tensor, *, unit: str, op: Any = dist.ReduceOp.SUM, purpose: str | None = None
    ) -> Handle:
        def start() -> list[Any]:
            return [dist.all_reduce(tensor, op=op, group=self.group, async_op=True)]

        return self._start("all_reduce", unit, tensor, 2, start, in_place=True, purpose=purpose)

    def all_to_all(self, received: Tensor, sent: Tensor, *, unit: str) -> Handle:
        def start() -> list[Any]:
            return [dist.all_to_all_single(received, sent, group=self.group, async_op=True)]

        return self._start("all_to_all", unit, sent, 1, start)

    def all_gather_objects(self, value: Any, *, unit: str = "set-up") -> list[Any]:
        """Every rank's `value`, in rank order. For set-up and errors, not for the hot path."""
        if self.is_alone:
            return [value] * self.size
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = packed.numel()
        self.all_gather(sizes, range(self.size + 1), unit=unit).wait()
        bounds = [0, *accumulate(sizes.tolist())]
        flat = torch.empty(bounds[-1], dtype=torch.uint8, device=self.device)
        flat[bounds[self.rank] : bounds[self.rank + 1]] = packed
        self.all_gather(flat, bounds, unit=unit).wait()
        everything = flat.cpu().numpy()
        return [pickle.loads(everything[low:high].tobytes()) for low, high in pairwise(bounds)]

    def raise_together(self, error: Exception | None, *, unit: str = "set-up") -> None:
        """Raises on every rank when any rank has an error, so that no rank waits for one that gave up."""
        messages = self.all_gather_objects(None if error is None else f"{type(error).__name__}: {error}", unit=unit)
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise ValueError(f"rank {rank} refused: {message}")

    def failure(self, call: Call, error: BaseException) -> CommError:
        explained = "" if self.watcher is None else self.watcher.explain(str(error))
        why = explained or "most likely because another rank stopped or did something else"
        # A rank that has raised already closes its connections, which is how the others may hear of it.
        kind = DivergenceError if self.watcher is not None and self.watcher.has_diverged else CommError
        return kind(
            f"rank {self.rank}: {call.operation} of unit '{call.unit or 'root'}' failed, {why}; last calls here: "
            f"{self.traffic.last()}. Cause: {error}"
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
        whole: int | None = None,
        root: int | None = None,
        in_place: bool = False,
        purpose: str | None = None,
    ) -> Handle:
        if self.watcher is not None:
            self.watcher.look()
        size, itemsize = tensor.numel(), tensor.element_size()
        if sent is None:
            sent = size * times * (self.size - 1) / self.size
        call = self.traffic.record(operation, unit, self.name, sent, itemsize)
        call.position, call.root = self.count + 1, root
        call.purpose = OTHER if self.name == CONTROL else purpose or _PURPOSES.get(operation, OTHER)
        call.nbytes = (size if whole is None else whole) * itemsize
        if self.habit is not None and self.habit.breaks_with(call) and self.watcher is not None:
            self.watcher.confirm(self, call)
        self.count += 1
        self.calls.append(call)
        try:
            # Alone, an operation in place has nothing to do; the others still copy from input to output.
            works = [] if in_place and self.size == 1 else start()
        except RuntimeError as error:
            raise self.failure(call, error) from error
        handle = self.latest = Handle(self, call, works)
        if not self.overlap:
            handle.wait()
        return handle
