"""zf.Samples: which samples this rank trains on in each step, counted so that a run can go on at the exact sample.

epoch 0, shuffled       epoch 1, shuffled anew
| 4 0 3 5 | 1 2 . . |   | 2 5 0 1 | ...            drop_last: the rest of an epoch is left out
| 4 0 3 5 | 1 2   2 5 | 0 1 3 4   | ...            else a batch goes on in the next epoch
one global batch each

| m0 rank 0 | m0 rank 1 | m1 rank 0 | m1 rank 1 |  a global batch: 2 ranks, 2 micro-batches each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch.distributed as dist


class Shares(NamedTuple):
    """How a global batch is shared: micro × ranks × accumulate samples."""

    micro: int
    ranks: int
    accumulate: int


def share(batch: int, ranks: int, micro: int | None = None) -> Shares:
    """A global batch over `ranks`, with `micro` samples at a time on each, or all of a rank's at once.

    >>> share(32, 2, micro=4)
    Shares(micro=4, ranks=2, accumulate=4)
    """
    at_once = ranks if micro is None else ranks * micro
    if batch % at_once == 0:
        return Shares(micro or batch // ranks, ranks, 1 if micro is None else batch // at_once)
    how = f"{ranks} rank{'s' if ranks > 1 else ''}" + ("" if micro is None else f" x {micro} samples at a time")
    raise ValueError(
        f"a global batch of {batch} does not divide evenly: {batch} = {at_once} x {batch // at_once} + "
        f"{batch % at_once}, for {how}. Ranks with fewer samples would count as much as the others in the mean, so use "
        f"a batch of {max(1, round(batch / at_once)) * at_once}, or "
        + (f"{_named_divisors(batch)} ranks" if micro is None else "another number of ranks or samples at a time")
    )


class Samples:
    """The order of samples, a global batch for each step, and this rank's part of it: a resumable batch sampler.

    The order is a function of the seed alone. A step takes the next `batch` samples of it, however many ranks there
    are, so a run that goes on with another number of ranks sees the same samples in the same steps. Position moves in
    `step()` and nowhere else: call it after `optimizer.step()`. What a DataLoader's workers have fetched ahead does not
    count, so a checkpoint (`zf.save(..., data=samples)`) holds what was trained on.

    length      samples in the dataset
    batch       samples in a step, of all ranks together. It must divide evenly over them: the mean over ranks would
                otherwise not be the mean over samples
    micro       samples at a time on a rank: `samples.accumulate` lists of them make a step. By default all at once
    shuffle     a new order in every epoch
    drop_last   leave out the samples of an epoch that do not fill a batch. Otherwise that batch goes on with the first
                samples of the next epoch: none is lost, and none is short
    rank, ranks   those of the default process group unless given, as with a mesh that has further dimensions

    >>> import torch, zerofold as zf
    >>> data = torch.arange(10.0)
    >>> samples = zf.Samples(len(data), batch=4, seed=1, drop_last=True)
    >>> for x in torch.utils.data.DataLoader(data, batch_sampler=samples):  # the rest of this epoch
    ...     samples.step()  # after optimizer.step()
    >>> samples.epoch, samples.state_dict()["sample"]
    (1, 0)

    Or without a loader; `indices` has one list for each micro-batch of the next step:

    >>> samples = zf.Samples(10, batch=4, micro=2, shuffle=False)
    >>> samples.indices
    [[0, 1], [2, 3]]
    >>> samples.step(); samples.step(); samples.indices
    [[8, 9], [0, 1]]
    """

    def __init__(
        self,
        length: int,
        *,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        micro: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        for name, number, least in (("length", length, 1), ("batch", batch, 1), ("seed", seed, 0), ("micro", micro, 1)):
            if name == "micro" and number is None:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ValueError(f"{name}={number!r} must be a whole number of at least {least}")
        if (rank is None) != (ranks is None) or (rank is not None and ranks is not None and not 0 <= rank < ranks):
            raise ValueError(
                f"rank={rank!r}, ranks={ranks!r}: give both, with rank from 0 to below ranks, or neither for those of "
                "the process group"
            )
        if drop_last and length < batch:
            raise ValueError(
                f"{length} samples do not fill a batch of {batch}: use a smaller batch, or drop_last=False"
            )
        self.length, self.batch, self.seed, self.shuffle, self.drop_last = length, batch, seed, shuffle, drop_last
        self.epoch = 0
        self.steps = 0  # taken since the very beginning
        self._sample = 0  # in the epoch, the first one of the next step
        self._micro, self._rank, self._ranks = micro, rank, ranks
        self._orders: dict[int, numpy.ndarray] = {}
        self._given = 0  # micro-batches since the last step()
        _ = self.shares  # what does not divide is said here

    @property
    def shares(self) -> Shares:
        return share(self.batch, self._ranks or _of_group("get_world_size", 1), self._micro)

    @property
    def accumulate(self) -> int:
        """Micro-batches in a step: divide each loss by it, so that the step's gradient is the mean."""
        return self.shares.accumulate

    @property
    def indices(self) -> list[list[int]]:
        """This rank's samples in the next step, a list for each micro-batch."""
        return self._shared(self.epoch, self._sample)

    def step(self) -> None:
        """The next step was taken: its samples have been trained on."""
        self.epoch, self._sample = self._after(self.epoch, self._sample)
        self.steps += 1
        self._given = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Micro-batches from the next step on, until the epoch ends. A DataLoader may run ahead."""
        if self._given and self._given >= len(self):
            raise RuntimeError(
                "a whole epoch was given out and samples.step() was not called once, so it would be given out again: "
                "call samples.step() after every optimizer.step()"
            )
        self._given = 0
        epoch, sample = begun, _ = self.epoch, self._sample
        while epoch == begun:
            for indices in self._shared(epoch, sample):
                self._given += 1
                yield indices
            epoch, sample = self._after(epoch, sample)

    def __len__(self) -> int:
        """Micro-batches left in this epoch."""
        left = self.length - self._sample
        steps = left // self.batch if self.drop_last else -(-left // self.batch)
        return steps * self.accumulate

    def state_dict(self) -> dict[str, Any]:
        """Where the next step begins, the same on all ranks, and what the order depends on."""
        return {"epoch": self.epoch, "sample": self._sample, "steps": self.steps, **self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken. The number of ranks and the batch may be others; the order may not."""
        if not isinstance(state, Mapping):
            raise TypeError(f"a {type(state).__name__} is no position in the data: give what state_dict() returned")
        for name, here in self._order().items():
            if state.get(name) != here:
                raise ValueError(
                    f"the position was saved with {name}={state.get(name)!r}, and here it is {here!r}: the order "
                    f"of the samples would be another. Use {name}={state.get(name)!r}, or leave data= out to begin anew"
                )
        self.epoch, self._sample, self.steps = int(state["epoch"]), int(state["sample"]), int(state["steps"])
        self._given = 0
        if self.drop_last and self.length - self._sample < self.batch:  # the batch has grown since
            self.epoch, self._sample = self.epoch + 1, 0

    def _order(self) -> dict[str, Any]:
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def _after(self, epoch: int, sample: int) -> tuple[int, int]:
        sample += self.batch
        if self.drop_last:
            return (epoch + 1, 0) if self.length - sample < self.batch else (epoch, sample)
        return epoch + sample // self.length, sample % self.length

    def _shared(self, epoch: int, sample: int) -> list[list[int]]:
        micro, ranks, accumulate = self.shares
        rank = _of_group("get_rank", 0) if self._rank is None else self._rank
        whole = self._global(epoch, sample).reshape(accumulate, ranks, micro)
        found: list[list[int]] = whole[:, rank].tolist()
        return found

    def _global(self, epoch: int, sample: int) -> numpy.ndarray:
        found = numpy.empty(self.batch, dtype=numpy.int64)
        filled = 0
        while filled < self.batch:
            part = self._epoch_order(epoch)[sample : sample + self.batch - filled]
            found[filled : filled + len(part)] = part
            filled, epoch, sample = filled + len(part), epoch + 1, 0
        return found

    def _epoch_order(self, epoch: int) -> numpy.ndarray:
        """8 bytes for each sample. Two are kept: a loader runs ahead into the next epoch."""
        if epoch not in self._orders:
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            order = numpy.arange(self.length)
            self._orders[epoch] = (
                numpy.random.default_rng([self.seed, epoch]).permutation(order) if self.shuffle else order
            )
        return self._orders[epoch]


def _of_group(ask: str, alone: int) -> int:
    found: int = getattr(dist, ask)() if dist.is_available() and dist.is_initialized() else alone
    return found


def _named_divisors(number: int) -> str:
    found = [str(each) for each in range(1, number + 1) if number % each == 0]
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]
