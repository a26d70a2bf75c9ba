"""What several ranks hold alike is compared by fingerprints: a bit that flipped in one copy is found and named.

copied on            what
all ranks            whole parameters, their masters where every rank updates everything, buffers
across groups        the shards of rows that cut inside a group and copy across groups

It runs before every k-th step: then all copies are up to date, and nothing is waited for that the step does not need.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.buffers import Buffers
from zerofold.fingerprints import fingerprint, fingerprint_tensor
from zerofold.groups import Groups
from zerofold.slab import Slab

EVERYWHERE = -1


class ReplicaError(RuntimeError):
    """Copies that must be the same on several ranks are not; the message names the parameter and the ranks.

    >>> import zerofold as zf
    >>> issubclass(zf.ReplicaError, RuntimeError)
    True
    """


class Replicas:
    """Compares the copies of one model every so many steps."""

    def __init__(
        self,
        slabs: Callable[[], list[Slab]],
        buffers: Buffers,
        groups: Groups,
        arrive: Callable[[], None],
        *,
        every: int,
    ) -> None:
        """`arrive` waits for parameters that are on their way."""
        self._slabs, self._buffers, self._groups, self._arrive, self._every = slabs, buffers, groups, arrive, every
        self._steps = 0

    def before_step(self) -> None:
        self._steps += 1
        if self._steps % self._every == 0 and self._groups.control.size > 1:
            self._arrive()
            self._compare()

    def _compare(self) -> None:
        control = self._groups.control
        prints = self._prints()
        names, places = [name for name, _ in prints], [place for _, place in prints]
        numbers = torch.stack([number.to("cpu") for number in prints.values()]) if prints else torch.zeros(0).long()
        # One number for each of the two kinds; all of them only where those differ.
        kinds = torch.tensor([place == EVERYWHERE for place in places], dtype=torch.bool)
        digests = [_as_int64(fingerprint(numbers[kind])) for kind in (kinds, ~kinds)]
        own = self._groups.gather.rank
        everyone = torch.zeros(3 * control.size, dtype=torch.int64)
        everyone[3 * control.rank : 3 * control.rank + 3] = torch.tensor([*digests, own])
        control.all_gather(everyone, range(0, everyone.numel() + 1, 3), unit="replicas").wait()
        rows = everyone.view(-1, 3).tolist()
        by_place = {(place, shards) for _, shards, place in rows}
        if len({common for common, _, _ in rows}) > 1 or len(by_place) > len({place for place, _ in by_place}):
            self._raise(names, places, numbers.tolist())

    def _prints(self) -> dict[tuple[str, int], Tensor]:
        """By name and place: ranks with the same place must have the same number."""
        found: dict[tuple[str, int], Tensor] = {}
        across, place = self._groups.across, self._groups.gather.rank
        for slab in self._slabs():
            for index, (entry, piece) in enumerate(zip(slab.entries, slab.layout.pieces(slab.place), strict=True)):
                if slab.is_kept and not slab.is_stale:
                    found[f"parameter '{entry.name}'", EVERYWHERE] = fingerprint_tensor(slab.kept_view(index))
                if slab.is_kept and slab.dtypes.has_master and slab.layout.world == 1:
                    own = slab.shard[piece.shard_start : piece.shard_stop]
                    found[f"the fp32 master of '{entry.name}'", EVERYWHERE] = fingerprint_tensor(own)
                if across is not None:
                    own = slab.shard[piece.shard_start : piece.shard_stop]
                    found[f"parameter '{entry.name}'", place] = fingerprint_tensor(own, piece.start)
        for name, buffer in self._steady_buffers():
            found[f"buffer '{name}'", EVERYWHERE] = fingerprint_tensor(buffer)
        return found

    def _steady_buffers(self) -> list[tuple[str, Tensor]]:
        """Those that no rank has written to since they were last sent."""
        changed = torch.tensor(self._buffers.changed(), dtype=torch.float64)
        if changed.numel():
            self._groups.control.all_reduce(changed, unit="replicas", op=dist.ReduceOp.MAX).wait()
        steady = [item for item, flag in zip(self._buffers.holders.items(), changed.tolist(), strict=True) if not flag]
        return [
            (f"{holder}.{name}".lstrip("."), buffer)
            for module, holder in steady
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.numel()
        ]

    def _raise(self, names: list[str], places: list[int], numbers: list[int]) -> None:
        control = self._groups.control
        told = dict(zip(zip(names, places, strict=True), numbers, strict=True))
        everyone = control.all_gather_objects(told, unit="replicas")
        keys = dict.fromkeys(key for each in everyone for key in each)
        different: list[tuple[str, dict[int, list[int]]]] = []
        for key in keys:
            ranks: dict[int, list[int]] = {}
            for rank, each in enumerate(everyone):
                if key in each:
                    ranks.setdefault(each[key], []).append(rank)
            if len(ranks) > 1:
                different.append((key[0], ranks))
        name, ranks = different[0]
        *few, most = sorted(ranks.values(), key=lambda group: (len(group), [-rank for rank in group]))
        odd = sorted(rank for group in few for rank in group)
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        has = "has" if len(odd) == 1 else "have"
        tie = " or the other way round" if len(few) == 1 and len(few[0]) == len(most) else ""
        raise ReplicaError(
            f"{name}{more} must be the same on all ranks that hold it, but {_ranks(odd)} {has} other bits than "
            f"{_ranks(most)}{tie}, found before step {self._steps}: faulty memory, or a change made on some ranks only "
            "(p.data). Go back to a checkpoint, or take a good rank's weights: "
            f"`with zf.full_params(model, from_rank={most[0]}): pass`"
        )


def _as_int64(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
