"""Data loaders as Accelerate prepares them: each rank gets its share of every global batch, as many as the others.

batches of the loader      | 0 | 1 | 2 | 3 | 4 |          2 ranks
rank 0                     | 0 |   | 2 |   | 4 |
rank 1                     |   | 1 |   | 3 |   | *        * filled up with the first samples; dropped from metrics
split_batches              each batch is cut in two instead
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from zerofold.nested import map_tensors

_END = object()


class Deal:
    """This rank's part of a row of batches (lists of samples), and how many samples of the last ones are real."""

    def __init__(self, batch_size: int | None, drop_last: bool, *, split: bool, even: bool) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.batch_size, self.drop_last, self.split, self.even = batch_size, drop_last, split, even
        self.remainder: int | None = None  # real samples in the last global batch, where it was filled up
        if split and (batch_size is None or batch_size % self.world):
            raise ValueError(
                f"split_batches=True: batches of {batch_size} samples do not divide evenly over {self.world} ranks: "
                "use another batch_size, or split_batches=False"
            )

    def __call__(self, batches: Iterable[list[Any]], skip: int = 0) -> Iterator[list[Any]]:
        """`skip`: how many of this rank's batches were given out before."""
        self.remainder = None
        at_once = 1 if self.split else self.world
        first: list[list[Any]] = []  # for filling up at the end
        source, given = iter(batches), 0
        while group := [list(batch) for batch in islice(source, at_once)]:
            first = first or group
            is_whole = len(group) == at_once and len(group[-1]) >= (self.batch_size or 0)
            if not is_whole and self.drop_last:
                return
            share = self._share(group) if is_whole or not self.even else self._filled(group, first)
            given += 1
            if share is not None and given > skip:
                yield share

    def _share(self, group: list[list[Any]]) -> list[Any] | None:
        if not self.split:
            return group[self.rank] if self.rank < len(group) else None
        assert self.batch_size is not None
        size = self.batch_size // self.world
        return group[0][self.rank * size : (self.rank + 1) * size] or None

    def _filled(self, group: list[list[Any]], first: list[list[Any]]) -> list[Any]:
        if self.batch_size is None:  # batches of any size: whole ones are repeated
            self.remainder = sum(len(batch) for batch in group)
            return list(islice(cycle(chain(group, first)), self.world))[self.rank]
        size = self.batch_size // self.world if self.split else self.batch_size
        samples = [sample for batch in group for sample in batch]
        self.remainder = len(samples)
        again = cycle(sample for batch in first for sample in batch)
        samples += islice(again, size * self.world - len(samples))
        return samples[self.rank * size : (self.rank + 1) * size]

    def length(self, batches: int) -> int:
        """This rank's batches, of so many in all."""
        if self.split:
            return batches
        if batches % self.world == 0 or self.drop_last:
            return batches // self.world
        return batches // self.world + (1 if self.even else int(self.rank < batches % self.world))


class _Batches:
    """A batch sampler that gives this rank's batches; or a sampler, where every sample is a batch of its own."""

    def __init__(self, sampler: Any, deal: Deal, *, single: bool) -> None:
        self.sampler, self.deal, self.single, self.skip = sampler, deal, single, 0

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        if self.single:
            return (share[0] for share in self.deal(([index] for index in self.sampler), skip))
        return self.deal(self.sampler, skip)

    def __len__(self) -> int:
        return self.deal.length(len(self.sampler))


class _Sample(NamedTuple):
    """One sample of a stream. Where the stream runs in a worker process, nothing else comes from there."""

    value: Any
    remainder: int | None  # of its global batch, as in Deal


class _Batch(NamedTuple):
    batch: Any
    remainder: int | None


class _Collate:
    """The loader's own collate_fn, for samples of a stream."""

    def __init__(self, collate: Any, *, single: bool) -> None:
        self.collate, self.single = collate, single

    def __call__(self, given: Any) -> _Batch:
        samples: list[_Sample] = [given] if self.single else given
        values = [sample.value for sample in samples]
        return _Batch(self.collate(values[0] if self.single else values), samples[0].remainder)


class _Stream(IterableDataset[Any]):
    """A dataset without indices: every rank reads all of it and keeps its share."""

    def __init__(self, dataset: Any, deal: Deal, at_once: int) -> None:
        self.dataset, self.deal, self.at_once, self.skip = dataset, deal, at_once, 0

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        source = iter(self.dataset)
        batches = iter(lambda: list(islice(source, self.at_once)), [])
        for share in self.deal(batches, skip):
            for value in share:
                yield _Sample(value, self.deal.remainder)


class PreparedLoader:
    """A DataLoader that gives each rank its share, on its device, and knows where it is.

    A pass through the data is an epoch, and each has its own order, the same on all ranks: a sampler that draws at
    random draws from rank 0's seed and the number of the epoch. A custom sampler must give the same order on all ranks.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device | None,
        active: list[PreparedLoader],
        *,
        split: bool = False,
        even: bool = True,
    ) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError(
                "prepare: the loader has a DistributedSampler, and would be shared out twice: leave it out"
            )
        self.base, self._device, self._active = loader, device, active
        self.epoch, self.position, self._is_through = -1, 0, True
        self._resumes, self._drops = False, 0
        self.is_last = False  # the batch in hand
        self.remainder: int | None = None  # real samples in its global batch, where it was filled up
        self._random = next((s for s in _samplers(loader) if _draws(s)), None)
        self._seed = _common_seed(getattr(self._random, "generator", None) or loader.generator)
        self._draws = torch.Generator()  # for workers' seeds: the process's own generator stays as it is
        batch_size: int | None = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size
        self.deal = Deal(batch_size, loader.drop_last, split=split, even=even)
        size = batch_size if batch_size is not None else 1
        self.total_batch_size = size if split else size * self.deal.world
        self._source: _Batches | _Stream
        if isinstance(loader.dataset, IterableDataset):
            self.deal.batch_size = size
            self._source = _Stream(loader.dataset, self.deal, size)
            own = None if loader.batch_size is None else size // (self.deal.world if split else 1)
            self._loader = _rebuilt(
                loader,
                generator=self._draws,
                dataset=self._source,
                batch_size=own,
                drop_last=loader.drop_last,
                collate_fn=_Collate(loader.collate_fn, single=own is None),
            )
        else:
            single = loader.batch_sampler is None
            self._source = _Batches(loader.sampler if single else loader.batch_sampler, self.deal, single=single)
            way = {"sampler": self._source, "batch_size": None} if single else {"batch_sampler": self._source}
            self._loader = _rebuilt(loader, generator=self._draws, dataset=loader.dataset, **way)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)

    def __len__(self) -> int:
        if isinstance(self._source, _Batches):
            return len(self._source)
        return self.deal.length(len(self.base))

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch. Where a loaded position is in it, it goes on from there."""
        if not (self._resumes and epoch == self.epoch):
            self.epoch, self._resumes, self._is_through = epoch - 1, False, True
        for each in (*_samplers(self.base), self.base.dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def skip_to(self, position: int) -> None:
        """The next pass begins at this batch of its epoch."""
        if not self._resumes:
            self.epoch += 1
        self._resumes, self.position, self._is_through = True, position, False

    def __iter__(self) -> Iterator[Any]:
        if self._resumes:
            self._resumes = False
        else:
            self.epoch, self.position = self.epoch + 1, 0
        self._is_through = False
        # Workers keep what they are told, and each would skip by itself.
        self._drops = self.position if isinstance(self._source, _Stream) and self._loader.num_workers else 0
        self._source.skip = self.position - self._drops
        self._draws.manual_seed(self._seed + self.epoch * self.deal.world + self.deal.rank)
        if self._random is not None:
            self._random.generator = torch.Generator().manual_seed(self._seed + self.epoch)
        self._active.append(self)
        try:
            yield from self._batches()
            self._is_through = True
        finally:
            self._active.remove(self)
            self.is_last, self.remainder = False, None

    def _batches(self) -> Iterator[Any]:
        """One ahead, to know the last."""
        batches: Iterator[Any] = islice(iter(self._loader), self._drops, None)
        batch: Any = next(batches, _END)
        while batch is not _END:
            following = next(batches, _END)
            self.is_last = following is _END
            self.position += 1
            if isinstance(self._source, _Stream):
                batch, self.remainder = batch
            else:
                self.remainder = self.deal.remainder if self.is_last else None
            yield self._placed(batch)
            batch = following

    def _placed(self, batch: Any) -> Any:
        device = self._device
        return batch if device is None else map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "is_through": self._is_through, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on where the state was taken; after a pass that was through, with the next one."""
        self.epoch, self.position, self._seed = int(state["epoch"]), int(state["position"]), int(state["seed"])
        self._is_through = bool(state["is_through"])
        self._resumes = not self._is_through


def _rebuilt(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A loader like this one, with another source."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    more = ("prefetch_factor", "persistent_workers")
    return DataLoader(**{**{name: getattr(loader, name) for name in (*names, *more)}, **changed})


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    found = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return [each for each in found if each is not None]


def _draws(sampler: Any) -> bool:
    """RandomSampler, WeightedRandomSampler, SubsetRandomSampler, and others built like them."""
    return isinstance(sampler, RandomSampler) or hasattr(sampler, "generator")


def _common_seed(generator: torch.Generator | None) -> int:
    """From rank 0's generator, the sampler's own where it has one."""
    seed: list[Any] = [int(torch.randint(2**31, (), generator=generator))]
    dist.broadcast_object_list(seed, 0)
    return int(seed[0])
