"""The update of all offloaded slabs: submitted by `step()` once the norm of all gradients is known, run under the next
forward, in its order.

main      [ backward ][ step ][ f0 ][ f1 ][ f2 ] …          a unit's use waits for its own update, no other's
host                        [u0 ][u1 ][u2 ]                  its share of each unit's chunks
device                      [u0 ][u1 ][u2 ]                  the rest, streamed through it
disk                        [ … u7 … u8 … ]                  where states are in a file

Before the norm is known an update can only be tried, for gradients may turn out to need clipping, or not to be finite,
and then the result must be exact all the same. Nothing gives the old states back but the old states, so as much is
tried early, under backward, as the device has room for a second copy of (`early.py`). The rest waits for the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import torch

from zerofold.gradients_away import AwayGradients
from zerofold.memory import Done, TierMemory, Transfers
from zerofold.optim.away.chunks import Chunk, Run, Scaling, SlabWork, count_of_chunks, runs_of
from zerofold.optim.away.early import EarlyUpdates, Upcoming, versions_of
from zerofold.optim.away.on_host import HostUpdate
from zerofold.optim.away.slab_update import SlabUpdate
from zerofold.optim.away.slots import Filling, Slot
from zerofold.optim.away.through_device import DeviceUpdate
from zerofold.optim.away.through_file import FileUpdates
from zerofold.optim.away.tuned_share import Split, TunedShare
from zerofold.optim.host_pool import HostPool, PoolJob
from zerofold.optim.host_worker import HostWorker, Job
from zerofold.placement import Tier
from zerofold.slab import Slab
from zerofold.slab_away import AwaySlab


@dataclass(frozen=True)
class Way:
    """How the update is shared between the host's cores and the device."""

    threads: int
    cores: frozenset[int] | None
    device_share: float
    tunes: bool
    """The share follows what the first steps take."""
    fewer: int | None = None
    """Threads that may be better than all of them: fewer are in the way of less."""
    keeps_gradients: bool = False
    """Of what streams through the device, on the device."""
    ahead: int = 0
    """Chunks for which the device has room between steps."""
    early: bool = False
    """They are updated under backward; else they wait for the next step."""
    filling: Filling | None = None
    """How many of the first chunks of all have states that stay on the device."""


class AwayUpdates:
    """The workers and buffers of one model's offloaded updates."""

    def __init__(self, transfers: Transfers, memory: TierMemory, slabs: Sequence[Slab], way: Way) -> None:
        device = transfers.device
        # One stream for all of an update that goes up: of two, one waits until the other has nothing left (measured).
        up = torch.cuda.Stream(device) if transfers.is_async else None
        self._memory, self.way, self._device, self._up = memory, way, device, up
        self.count = 0  # updates
        self._pools = [HostPool(way.threads, way.cores)]
        self._through: DeviceUpdate | None = None
        self._early: EarlyUpdates | None = None
        trained = [slab for slab in slabs if slab.requires_grad and isinstance(slab, AwaySlab)]
        self._streaming = [slab for slab in trained if slab.tier is Tier.HOST and _can_stream(slab)]
        if way.device_share > 0 and self._streaming:
            self._through = DeviceUpdate(device, up, ahead=way.ahead)
            self._device_worker = HostWorker(1, None)
            if way.fewer is not None:
                self._pools.append(HostPool(way.fewer))
            if way.early:
                self._early = EarlyUpdates(self._through, self._device_worker, self._streaming, way.ahead)
        self._hosts = [HostUpdate(device, up, pool) for pool in self._pools]
        self._in_file = FileUpdates(memory, self._hosts[0])
        self._versions: dict[AwaySlab, tuple[int, ...]] = {}  # of states, as the last update left them
        self._under_way: list[SlabUpdate] = []
        self._last: list[Job | PoolJob] = []
        self._share = TunedShare(way.device_share if self._through is not None else 0.0, len(self._pools))
        self._lasting = 0  # chunks whose states stay on the device
        # Slabs that stream whole: those that have such chunks, or that are updated early.
        self._special = [] if self._early is None else self._early.slabs
        self._is_unlike_others = False  # the last update: the number of chunks that stay changed in it
        self._dealt: Split = self._share.next  # by which parameters stream now
        self._has_to_deal = True
        self._ran: Split | None = None  # that of the last update
        self._deal()

    @property
    def nbytes_on_device(self) -> int:
        return 0 if self._through is None else self._through.nbytes

    def submit(self, work: Sequence[SlabWork], scaling: Scaling, upcoming: Upcoming | None = None) -> None:
        """Returns at once. `work` is in the order in which forward needs the slabs; `upcoming` tells what the next step
        would do to one of them."""
        self.finish_last()
        self.count += 1
        before, slots = self._lasting, self._fill(work)
        has_changed = self._lasting != before
        if self._up is not None:  # what it sends and overwrites is behind what the model is computing
            self._up.wait_stream(torch.cuda.current_stream(self._device))
        if self.way.tunes:
            self._share.tune(self._ran, is_like_others=not self._is_unlike_others)
        self._share.begin()
        self._in_file.begin()
        self._ran, self._has_to_deal, self._is_unlike_others = self._dealt, has_changed, has_changed
        host = self._hosts[self._dealt.pool]
        through, on_disk = self._through, list[tuple[Chunk, SlabUpdate]]()
        if through is not None:
            changed: set[object] = {each.slab for each in work if self._has_changed(each.slab)}
            if self._early is not None:
                self._last += self._early.begin_step(scaling, upcoming)
            self._last.append(
                self._device_worker.submit(partial(through.begin, changed, slots, frozenset(self._special)))
            )
        for each in work:  # the first is under way while the others are prepared
            update = self._announce(each.slab)
            gradients = each.slab.gradients
            arrived = gradients.landed if isinstance(gradients, AwayGradients) else Done()
            for run in runs_of(each, scaling, arrived):
                if each.slab.tier is Tier.NVME:
                    on_disk += [(chunk, update) for chunk in run.chunks()]
                elif through is not None and run.streams:
                    self._share.device_elements += run.size
                    update.jobs.append(self._device_worker.submit(_through(through, run, update)))
                else:
                    self._share.host_elements += run.size
                    update.jobs += [host.submit(chunk, chunk.states, update.sent) for chunk in run.chunks()]
        self._last += self._in_file.submit(on_disk)
        if through is not None:
            stages = self._early is None or self._early.is_paused
            self._last.append(self._device_worker.submit(partial(through.end, stages=stages)))
        self._last.append(self._pools[self._dealt.pool].submit([], self._share.end_of_host))
        self._deal()  # for the next step, whose gradients go where they will be needed

    def _announce(self, slab: AwaySlab) -> SlabUpdate:
        """From now on the slab is one whose new values are on their way."""
        if slab.tier is Tier.NVME:
            self._bring_to_file(slab)
        before = slab.version
        slab.mark_changed()
        slab.after_update(before)
        self._versions[slab] = versions_of(slab)
        slab.home.step.is_under_way = True
        slab.update = update = SlabUpdate(slab)
        if self._early is not None:
            self._early.announce(slab, update, self._versions[slab])
        self._under_way.append(update)
        return update

    def _deal(self) -> None:
        """Chooses which parameters stream through the device: as many as its share, spread over the model, and all of
        those slabs that stream whole. Their gradients stay on the device, if it has room for them."""
        dealt, self._dealt = self._dealt, self._share.next
        if self._through is None or (dealt.device_share == self._dealt.device_share and not self._has_to_deal):
            return
        special = self._special
        whole = sum(slab.raw_shard.numel() for slab in special)
        rest = sum(slab.raw_shard.numel() for slab in self._streaming) - whole
        share = max(0.0, self._dealt.device_share * (rest + whole) - whole) / max(1, rest)
        self._has_to_deal, owed = False, 0.0
        for slab in self._streaming:
            pieces = slab.layout.pieces(slab.place)
            chosen = list(range(len(pieces))) if slab in special else []
            for index, piece in enumerate(pieces) if slab not in special else ():
                owed += share * piece.size
                if owed >= piece.size / 2:
                    owed -= piece.size
                    chosen.append(index)
            slab.streamed = frozenset(chosen)
            if isinstance(slab.gradients, AwayGradients):
                stays = self.way.keeps_gradients or slab in special
                slab.gradients.staying = slab.streamed if stays else frozenset()

    def _fill(self, work: Sequence[SlabWork]) -> list[Slot]:
        """Follows `Filling`: slots with which more chunks may stay on the device from now on, no more of them than the
        model has; or takes some away."""
        filling, through = self.way.filling, self._through
        if filling is None or through is None or not any(each.slab in self._versions for each in work):
            return []  # the first step of these slabs
        most = sum(count_of_chunks(slab) for slab in self._streaming if slab.copy_of_shard is not None)
        wanted = min(filling.change(), most - self._lasting)
        if wanted < 0:
            self._device_worker.submit(partial(through.fewer, -wanted)).wait()
        if wanted:
            torch.cuda.empty_cache()  # what is left of it then is what new chunks must not be cut out of
        slots: list[Slot] = []
        with suppress(torch.OutOfMemoryError):  # somebody else has it
            for _ in range(wanted):
                slots.append(Slot(self._device, self._up))
        self._change_lasting(filling, len(slots) if wanted > 0 else wanted, wanted)
        return slots

    def _change_lasting(self, filling: Filling, changed: int, wanted: int) -> None:
        filling.changed(changed, wanted)
        self._lasting += changed
        self._special, chunks = [], self._lasting
        for slab in self._streaming:
            if chunks <= 0:
                break
            if slab.copy_of_shard is not None:  # without one, forward computes with what the host has
                self._special.append(slab)
                chunks -= count_of_chunks(slab)

    def finish(self) -> None:
        """Returns when all states are what the last step makes of them, where they live; raises what went wrong on the
        way."""
        if self._early is not None:
            self._early.take_back()
        self.finish_last()
        if self._through is not None and self._lasting:
            self._device_worker.submit(self._through.bring_down).wait()

    def get_ready(self) -> None:
        """Before a step: memory that was let go of is taken again, so that one without enough of it raises before
        anything is changed."""
        self.finish_last()
        through, filling = self._through, self.way.filling
        if through is not None and through.owed:
            self._device_worker.submit(through.take_again).wait()
            lost = self._lasting - through.most_lasting
            if filling is not None and lost:
                self._change_lasting(filling, -lost, -lost)

    def let_go(self) -> None:
        """Of the device's memory, until the next update; all states are where they live."""
        self.finish()
        if self._through is not None:
            self._device_worker.submit(self._through.let_go).wait()

    def finish_last(self) -> None:
        """As `finish`, but what was updated early for the next step and what stays on the device may remain so."""
        if not self._under_way:
            return
        for update in self._under_way:
            update.wait()
        for update in self._under_way:
            for end in update.ends:
                end.complete.finish()
        for job in self._last:
            job.wait()
        if self._through is not None:
            self._through.settle()
            self._share.device_seconds, self._share.early_elements = self._through.seconds(), self._through.stood
        self._under_way, self._last = [], []

    @property
    def figures(self) -> dict[str, float]:
        """How the last update went that is over, and how the next one is shared."""
        share, way = self._share, self.way
        is_first = share.next.pool == 0
        return {
            "host_threads": float(way.threads if is_first else way.fewer or 0),
            "bound_cores": float(len(way.cores or ()) if is_first else 0),
            "device_share": share.next.device_share,
            "host_elements": float(share.host_elements),
            "host_seconds": share.host_seconds,
            "device_elements": float(share.device_elements),
            "early_elements": float(share.early_elements),
            "device_seconds": share.device_seconds,
            **share.figures,
            **self._in_file.figures,
        }

    def close(self) -> None:
        """Ends the threads, also where an update has failed; raises that."""
        with ExitStack() as ends:
            if self._up is not None:  # the last of all: what comes up for a next step reads memory that is about to go
                ends.callback(torch.cuda.synchronize, self._device)
            for pool in self._pools:
                ends.callback(pool.close)
            if self._through is not None:
                ends.callback(self._through.close)
                ends.callback(self._device_worker.close)
            if self._early is not None:
                ends.callback(self._early.close)
            ends.callback(self._in_file.close)
            self.finish()

    def _bring_to_file(self, slab: AwaySlab) -> None:
        if self._has_changed(slab):  # its new values are not in the file
            for state in (slab.raw_shard, *slab.moments.values()):
                self._memory.written(state)

    def _has_changed(self, slab: AwaySlab) -> bool:
        """Its states were filled, loaded or changed by hand since the last update."""
        return self._versions.get(slab) != versions_of(slab)


def _can_stream(slab: AwaySlab) -> bool:
    """fp32 states; bf16 ones are rounded at random, by other bits on a device than on the host."""
    return slab.dtypes.master is torch.float32 and slab.home.precision.moments is torch.float32


def _through(device: DeviceUpdate, run: Run, update: SlabUpdate) -> Callable[[], None]:
    def work() -> None:
        for chunk in run.chunks():
            update.ends.append(device.run(chunk))

    return work
