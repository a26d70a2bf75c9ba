"""Every collective in two forms, zerofold's and torch's own, on equal tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.comm import Comm
from zerofold.traffic import Traffic

OURS, TORCH = FORMS = ("zerofold", "torch")
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

Call = Callable[[], None]


@dataclass(frozen=True)
class Pair:
    """Two calls that do the same. `fill` makes their inputs, `results` are what they leave on this rank."""

    calls: dict[str, Call]
    results: dict[str, Tensor]
    fill: Call


@dataclass(frozen=True)
class Collective:
    """`bus` is what nccl-tests multiply the algorithm bandwidth by, so that it is comparable with that of a link."""

    name: str
    bus: Callable[[int], float]
    make: Callable[[Comm, int], Pair]


def make_comm(device: torch.device) -> Comm:
    assert dist.group.WORLD is not None
    return Comm(dist.group.WORLD, device, Traffic(), overlap=True)


def _values(comm: Comm, count: int, *, shift: int = 0) -> Tensor:
    """Whole numbers, so that sums are exact in whatever order: different on each rank, and along the tensor."""
    return (torch.arange(count, device=comm.device) % 13 + comm.rank + shift).float()


def _twice(comm: Comm, count: int, source: Callable[[], Tensor], call: dict[str, Callable[[Tensor], None]]) -> Pair:
    """For collectives in place: both forms work on a tensor of their own, filled alike."""
    held = {form: torch.empty(count, device=comm.device) for form in FORMS}

    def fill() -> None:
        for tensor in held.values():
            tensor.copy_(source())

    return Pair({form: partial(call[form], held[form]) for form in FORMS}, held, fill)


def _broadcast(comm: Comm, count: int) -> Pair:
    call: dict[str, Callable[[Tensor], None]] = {
        OURS: lambda tensor: comm.broadcast(tensor, 0, unit="bench").wait(),
        TORCH: lambda tensor: _done(dist.broadcast(tensor, src=0)),
    }
    return _twice(comm, count, lambda: _values(comm, count), call)


def _reduce(comm: Comm, count: int) -> Pair:
    """What is left on other ranks than the first is nobody's result."""
    call: dict[str, Callable[[Tensor], None]] = {
        OURS: lambda tensor: comm.reduce(tensor, 0, unit="bench").wait(),
        TORCH: lambda tensor: _done(dist.reduce(tensor, dst=0)),
    }
    pair = _twice(comm, count, lambda: _values(comm, count), call)
    return pair if comm.rank == 0 else Pair(pair.calls, {form: torch.zeros(1) for form in FORMS}, pair.fill)


def _all_reduce(comm: Comm, count: int) -> Pair:
    call: dict[str, Callable[[Tensor], None]] = {
        OURS: lambda tensor: comm.all_reduce(tensor, unit="bench").wait(),
        TORCH: lambda tensor: _done(dist.all_reduce(tensor)),
    }
    return _twice(comm, count, lambda: _values(comm, count), call)


def _all_gather(comm: Comm, count: int) -> Pair:
    part = count // comm.size
    bounds = range(0, count + 1, part)
    own = slice(comm.rank * part, (comm.rank + 1) * part)
    call: dict[str, Callable[[Tensor], None]] = {
        OURS: lambda tensor: comm.all_gather(tensor, bounds, unit="bench").wait(),
        TORCH: lambda tensor: _done(getattr(dist, _ALL_GATHER)(tensor, tensor[own])),
    }
    return _twice(comm, count, lambda: _values(comm, count), call)


def _scatter(comm: Comm, count: int) -> Pair:
    whole = _values(comm, count) if comm.rank == 0 else None
    pieces = None if whole is None else list(whole.chunk(comm.size))
    out = {form: torch.zeros(count // comm.size, device=comm.device) for form in FORMS}
    calls = {
        OURS: lambda: comm.scatter(out[OURS], whole, 0, unit="bench").wait(),
        TORCH: lambda: _done(dist.scatter(out[TORCH], pieces, src=0)),
    }
    return Pair(calls, out, _nothing)


def _gather(comm: Comm, count: int) -> Pair:
    own = _values(comm, count // comm.size)
    out = {form: torch.zeros(count if comm.rank == 0 else 1, device=comm.device) for form in FORMS}
    pieces = {form: list(each.chunk(comm.size)) if comm.rank == 0 else None for form, each in out.items()}
    calls = {
        OURS: lambda: comm.gather(own, pieces[OURS], 0, unit="bench").wait(),
        TORCH: lambda: _done(dist.gather(own, pieces[TORCH], dst=0)),
    }
    return Pair(calls, out, _nothing)


def _reduce_scatter(comm: Comm, count: int) -> Pair:
    """On gloo ours is what the engine does there: rows to their owners, who add them up in rank order."""
    part = count // comm.size
    rows = _values(comm, count)
    out = {form: torch.zeros(part, device=comm.device) for form in FORMS}
    own = rows[comm.rank * part : (comm.rank + 1) * part]
    others = torch.cat([row for rank, row in enumerate(rows.split(part)) if rank != comm.rank] or [rows[:0]])
    received = torch.zeros((comm.size - 1) * part, device=comm.device)

    def exchange_and_add() -> None:
        comm.swap_rows(received, others, [part] * comm.size, unit="bench").wait()
        ordered = list(received.split(part)) if comm.size > 1 else []
        ordered.insert(comm.rank, own)
        if len(ordered) == 1:
            out[OURS].copy_(own)
            return
        torch.add(ordered[0], ordered[1], out=out[OURS])
        for row in ordered[2:]:
            out[OURS].add_(row)

    calls = {
        OURS: exchange_and_add if comm.is_gloo else lambda: comm.reduce_scatter(out[OURS], rows, unit="bench").wait(),
        TORCH: lambda: _done(getattr(dist, _REDUCE_SCATTER)(out[TORCH], rows)),
    }
    return Pair(calls, out, _nothing)


def _all_to_all(comm: Comm, count: int) -> Pair:
    sent = _values(comm, count)
    out = {form: torch.zeros(count, device=comm.device) for form in FORMS}
    calls = {
        OURS: lambda: comm.all_to_all(out[OURS], sent, unit="bench").wait(),
        TORCH: lambda: _done(dist.all_to_all_single(out[TORCH], sent)),
    }
    return Pair(calls, out, _nothing)


def _done(_: object) -> None:
    """torch's own, not asynchronous: it has returned when it is through, or ordered behind it on the stream."""


def _nothing() -> None:
    pass


def _once(world: int) -> float:
    return 1.0


def _shared(world: int) -> float:
    return (world - 1) / world


COLLECTIVES = {
    each.name: each
    for each in (
        Collective("broadcast", _once, _broadcast),
        Collective("scatter", _shared, _scatter),
        Collective("gather", _shared, _gather),
        Collective("reduce", _once, _reduce),
        Collective("all_gather", _shared, _all_gather),
        Collective("reduce_scatter", _shared, _reduce_scatter),
        Collective("all_reduce", lambda world: 2 * _shared(world), _all_reduce),
        Collective("all_to_all", _shared, _all_to_all),
    )
}
