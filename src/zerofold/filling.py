"""Values from where they are stored into shards: each rank reads what it keeps, and all of it is read once.

stages 1 to 3   a rank reads its own range                 whole parameters are then gathered, as after a step
stage 0         a rank reads 1/N of the whole              the ranks put together what each has read
hsdp            a rank reads 1/R of its range              the same, across the R groups
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerofold.agree import agree
from zerofold.comm import Comm
from zerofold.entry import Source
from zerofold.slab import Slab

_READ_AT_ONCE = 2**22  # elements, on their way from the file to the shard


def fill_slabs(slabs: Sequence[Slab], sources: Mapping[str, Source], control: Comm) -> None:
    """Fills the shards from sources by parameter name; the others keep what they have. All ranks must call it.

    What cannot be read on one rank is an error on all. Whole parameters are stale afterwards, as after a step.
    """
    agree(control, lambda: [_read(slab, sources) for slab in slabs])
    for slab in slabs:
        if any(entry.name in sources for entry in slab.entries):
            _put_together(slab)


def fill_new(slabs: Sequence[Slab], control: Comm) -> None:
    """For slabs that have just been made: their entries' sources, which are then let go."""
    entries = [entry for slab in slabs for entry in slab.entries]
    sources = {entry.name: entry.source for entry in entries if entry.source is not None}
    if not sources:
        return
    fill_slabs(slabs, sources, control)
    for slab in slabs:
        if slab.is_kept and slab.is_stale:
            handle = slab.start_gather()
            if handle is not None:
                handle.wait()
            slab.after_gather()
    for entry in entries:
        entry.source = None


@torch.no_grad()
def _read(slab: Slab, sources: Mapping[str, Source]) -> None:
    holders, shares = _holders(slab), _shares(slab)
    rank = 0 if holders is None else holders.rank
    for entry, piece in zip(slab.entries, slab.layout.pieces(slab.place), strict=True):
        source = sources.get(entry.name)
        if source is None:
            continue
        part = piece.within(shares[rank], shares[rank + 1])
        for start in range(part.start, part.stop, _READ_AT_ONCE):
            stop = min(start + _READ_AT_ONCE, part.stop)
            place = part.shard_start + start - part.start
            slab.shard[place : place + stop - start].copy_(source.read(start, stop))


def _put_together(slab: Slab) -> None:
    holders = _holders(slab)
    if holders is not None:
        holders.all_gather(slab.shard, _shares(slab), unit=slab.unit).wait()
    slab.mark_changed()


def _holders(slab: Slab) -> Comm | None:
    """The ranks that keep the same shard as this one, if there are others."""
    groups = slab.home.groups
    comm = groups.across if slab.home.row.optimizer.is_cut else groups.everyone
    return comm if comm is not None and comm.size > 1 else None


def _shares(slab: Slab) -> list[int]:
    """Where the shares of the shard begin that its holders read, and the end."""
    holders, size = _holders(slab), slab.shard.numel()
    count = 1 if holders is None else holders.size
    return [size * rank // count for rank in range(count + 1)]
