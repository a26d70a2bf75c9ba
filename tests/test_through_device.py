"""The update through a device without one: streams and events that do all at once, on the CPU.

What runs beside what is for a real GPU to show. Here it is which chunk goes where, who waits for whom, and what becomes
of a failure in one of the threads.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.late_device import LateDevice
from tests.ranks import raised
from tests.test_offload import BF16_STATES, prepared, result, states, train

import zerofold as zf
from zerofold.compat.fsdp_calls import _to_read
from zerofold.engine import Engine
from zerofold.optim.away import chunks, slots, through_device
from zerofold.optim.away.on_host import HostUpdate
from zerofold.optim.away.tuned_share import Split, TunedShare
from zerofold.optim.away.updates import AwayUpdates, Way
from zerofold.shard_spec import StepScope

CPU = torch.device("cpu")


class FakeEvent:
    def __init__(self, **_: Any) -> None:
        self.is_recorded, self.device = False, CPU

    def record(self, stream: Any = None) -> None:
        self.is_recorded = True

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.is_recorded and end.is_recorded):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1.0


class FakeStream:
    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record()
        return event


FAKES: dict[str, Any] = {
    "Stream": FakeStream,
    "Event": FakeEvent,
    "stream": lambda _: nullcontext(),
    "current_stream": FakeStream,
    "set_device": lambda _: None,
    "synchronize": lambda _: None,
    "empty_cache": lambda: None,
}


class Filled:
    """There is room for so many chunks, half of them in the second step, the others in the third. In later steps as
    many more or fewer as is said."""

    def __init__(self, chunks: int, *later: int) -> None:
        self._changes = [chunks // 2, chunks - chunks // 2, *later]
        self.told: list[tuple[int, int]] = []

    def change(self) -> int:
        return self._changes.pop(0) if self._changes else 0

    def changed(self, count: int, wanted: int) -> None:
        self.told.append((count, wanted))


@contextmanager
def updated_through_the_device(
    share: float,
    *,
    ahead: int = 0,
    early: bool = False,
    lasting: int = 0,
    later: Sequence[int] = (),
    tunes: bool = False,
    fewer: int | None = None,
    precision: Any = "bf16",
    place: Any = None,
    clip: float = 0.5,
    chunk: int = 2**9,
    late: LateDevice | None = None,
) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """A model whose offloaded states go through a device that is the host."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (chunks, slots):
            patch.setattr(module, "CHUNK", chunk)  # so that a small model has many
        for name, fake in (FAKES if late is None else late.fakes).items():
            patch.setattr(torch.cuda, name, fake)
        if late is not None:
            patch.setattr(through_device, "adam", late.adam)
        options: dict[str, Any] = {"stage": 3, "precision": precision, "clip": clip, "one_pass": True}
        model, optimizer = prepared(place or {"optimizer": "host"}, **options)
        filling: Any = Filled(lasting, *later) if lasting else None
        engine, way = Engine.of(model), Way(2, None, share, tunes, fewer, ahead=ahead, early=early, filling=filling)
        transfers: Any = SimpleNamespace(device=CPU, is_async=True)
        engine.updates = AwayUpdates(transfers, engine.offloading.memory, engine.slabs(), way)
        yield model, optimizer
        if Engine.is_on(model):
            zf.close(model, gather=False)
        if late is not None:
            late.close()


def backward(model: torch.nn.Module, step: int, factor: float = 1.0) -> None:
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step))
    (factor * (model(batch).float() ** 2).mean()).backward()


def places_that_differ() -> list[str]:
    wrong = []
    for place in ({"optimizer": "host"}, {"optimizer": "host", "parameters": "host"}):
        expected = result(None, stage=3, precision="bf16")
        for share, ahead in ((0.6, 0), (0.6, 3), (1.0, 5)):
            with updated_through_the_device(share, ahead=ahead, place=place) as (model, optimizer):
                train(model, optimizer, 3)
                found = states(model, optimizer)
                if not all(map(torch.equal, found, expected)):
                    wrong.append(f"{place}, share {share}, {ahead} ahead")
    return wrong


def test_chunks_that_wait_on_the_device_are_those_on_the_host(ranks: Any) -> None:
    assert ranks(1, places_that_differ) == [[]]


def states_beside_a_host_that_updates_too() -> list[float]:
    """The shares with which they differ from those of a host alone."""
    wrong, expected = [], None
    for share, lasting, later in (
        (0.0, 0, ()),
        (0.4, 30, ()),
        (0.8, 30, ()),
        (0.4, 30, (-13, 0, -5)),
        (0.8, 20, (-20,)),
    ):
        with updated_through_the_device(share, lasting=lasting, later=later) as (model, optimizer):  # of 29 chunks
            train(model, optimizer, 7)
            found = states(model, optimizer)
        expected = expected or found
        if not all(map(torch.equal, found, expected)):
            wrong.append(share)
    return wrong


def test_states_that_stay_are_never_updated_on_the_host_as_well(ranks: Any) -> None:
    """In the step that gets room for them the parameters are still dealt out as before, others in the next one."""
    assert ranks(1, states_beside_a_host_that_updates_too) == [[]]


def slabs_that_stay_no_more() -> bool:
    """Those of the second stay anew after a change, so they are the last to have come, and the first to go."""
    found = []
    for share, lasting in ((0.0, 0), (0.4, 29)):
        with updated_through_the_device(share, lasting=lasting, later=(0, 0, -14)) as (model, optimizer):
            train(model, optimizer, 4)
            with zf.full_params(model), torch.no_grad():
                model[1].up.weight.mul_(0.5)
            train(model, optimizer, 5, first=4)
            found.append(states(model, optimizer))
    return all(map(torch.equal, *found))


def test_what_stays_of_a_slab_that_is_shared_again_goes_down_first(ranks: Any) -> None:
    assert ranks(1, slabs_that_stay_no_more) == [True]


def slots_of(updates: Any) -> int:
    """With memory on the device."""
    through = updates._through
    return len(through._slots) + len(through._lasting) + len(through._staged) + len(through._early)


def memory_for_states_that_stay(room: int) -> list[float]:
    """In slots, where all can stay, and where none can: parameters on the host are made from what is there."""
    taken = []
    for place, precision in (({"optimizer": "host"}, "bf16"), ({"optimizer": "host", "parameters": "host"}, None)):
        with updated_through_the_device(1.0, lasting=room, place=place, precision=precision) as (model, optimizer):
            train(model, optimizer, 4)
            updates: Any = Engine.of(model).updates
            updates.finish()
            taken.append(slots_of(updates) - through_device.SLOTS)
    return taken


def test_no_more_memory_is_taken_than_there_are_states_that_can_stay(ranks: Any) -> None:
    assert ranks(1, memory_for_states_that_stay, 10) == [[10, 0]]
    assert ranks(1, memory_for_states_that_stay, 100) == [[29, 0]]


def changed_between_steps() -> bool:
    found = []
    for share in (0.0, 1.0):
        with updated_through_the_device(share, ahead=8) as (model, optimizer):
            train(model, optimizer, 2)
            with zf.full_params(model), torch.no_grad():
                model[1].up.weight.mul_(0.5)
            train(model, optimizer, 2, first=2)
            found.append(states(model, optimizer))
    return all(map(torch.equal, *found))


def test_what_was_changed_between_steps_comes_up_again(ranks: Any) -> None:
    assert ranks(1, changed_between_steps) == [True]


def slots_for(room: int) -> Callable[..., slots.Slot]:
    """Of a device with memory for so many."""
    left = iter(range(room))

    def slot(*given: Any) -> slots.Slot:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return slots.Slot(*given)

    return slot


def memory_of_chunks() -> list[list[int]]:
    """On the device after each step: with fewer of them later, and with none left for the third."""
    found = []
    for later, slots_there in (((-7, 0, -1), 99), ((), 13)):
        with (
            updated_through_the_device(1.0, lasting=20, later=later) as (model, optimizer),
            pytest.MonkeyPatch.context() as patch,
        ):
            updates: Any = Engine.of(model).updates
            patch.setattr("zerofold.optim.away.updates.Slot", slots_for(slots_there))
            taken = []
            for step in range(6):
                train(model, optimizer, 1, first=step)
                updates.finish()
                taken.append(slots_of(updates) - through_device.SLOTS)
            found.append([*taken, *(count for count, _ in updates.way.filling.told)])
    return found


def test_memory_for_states_that_stay_comes_and_goes(ranks: Any) -> None:
    given_back, refused = ranks(1, memory_of_chunks)[0]
    assert given_back == [0, 10, 20, 13, 13, 12, 10, 10, -7, 0, -1]
    assert refused == [0, 10, 13, 13, 13, 13, 10, 3, 0, 0, 0]


def gradients_that_stay() -> list[int]:
    """Slabs of which the next backward leaves gradients on the device: none, half, all, and none again."""
    found = []
    with updated_through_the_device(0.3, lasting=29, later=(-29,)) as (model, optimizer):
        for step in range(4):
            train(model, optimizer, 1, first=step)
            gradients: list[Any] = [slab.gradients for slab in Engine.of(model).slabs()]
            found.append(sum(bool(each.staying) for each in gradients))
    return found


def test_gradients_stay_as_long_as_their_states_do(ranks: Any) -> None:
    assert ranks(1, gradients_that_stay) == [[0, 2, 3, 0]]


def parked_and_back(ahead: int, early: bool, lasting: int, room: int = 99) -> tuple[bool, list[int]]:
    """`room`: slots that somebody else has left meanwhile; where these are too few, he lets go of them after that."""
    found, there = [], []
    for parks in (False, True):
        with (
            updated_through_the_device(1.0, clip=1e9, ahead=ahead, early=early, lasting=lasting) as (model, optimizer),
            pytest.MonkeyPatch.context() as patch,
        ):
            train(model, optimizer, 4)
            updates: Any = Engine.of(model).updates
            if parks:
                zf.offload_states(model)
                there.append(updates.nbytes_on_device)
                zf.reload_states(model)
                patch.setattr(through_device, "Slot", slots_for(room))
                if room < 2:
                    backward(model, 4)
                    assert "CUDA out of memory" in raised(optimizer.step)
                    optimizer.zero_grad()
                    patch.undo()
            train(model, optimizer, 3, first=4)
            updates.finish()
            there.append(slots_of(updates))
            found.append(states(model, optimizer))
    return all(map(torch.equal, *found)), there


@pytest.mark.parametrize(("ahead", "early", "lasting"), [(0, False, 10), (6, True, 0), (6, False, 0)])
def test_parking_lets_go_of_the_memory_of_an_update(ranks: Any, ahead: int, early: bool, lasting: int) -> None:
    ((equal, (before, parked, after)),) = ranks(1, parked_and_back, ahead, early, lasting)
    assert equal
    assert parked == 0
    assert before == after > through_device.SLOTS


@pytest.mark.parametrize(("ahead", "early", "lasting"), [(0, False, 10), (6, True, 0), (6, False, 0)])
@pytest.mark.parametrize("room", [1, 2, 8])
def test_an_update_makes_do_with_the_memory_that_is_left_after_parking(
    ranks: Any, ahead: int, early: bool, lasting: int, room: int
) -> None:
    ((equal, (before, _, after)),) = ranks(1, parked_and_back, ahead, early, lasting, room)
    assert equal
    assert before == through_device.SLOTS + ahead + lasting
    assert after == (before if room < 2 else min(room, through_device.SLOTS))


def fewer_after_parking(after: int) -> tuple[bool, int]:
    """Less memory for states that stay, in the step after they were away, or in the one after that."""
    found = []
    for parks in (False, True):
        later = (0, 0, *[0] * after, -13)
        with updated_through_the_device(1.0, clip=1e9, lasting=20, later=later) as (model, optimizer):
            train(model, optimizer, 5)
            updates: Any = Engine.of(model).updates
            if parks:
                zf.offload_states(model)
                zf.reload_states(model)
            train(model, optimizer, 3, first=5)
            updates.finish()
            there = slots_of(updates) - through_device.SLOTS
            found.append(states(model, optimizer))
    return all(map(torch.equal, *found)), there


@pytest.mark.parametrize("after", [0, 1])
def test_fewer_states_stay_after_parking(ranks: Any, after: int) -> None:
    assert ranks(1, fewer_after_parking, after) == [(True, 7)]


def looked_at_whole() -> list[str]:
    """FSDP's summon_full_params(writeback=False): what was shown may have been changed, so parameters are made anew."""
    wrong = []
    for precision in (None, "bf16"):
        expected = None
        for options in ({"share": 0.0}, {"share": 1.0}, {"share": 1.0, "lasting": 29}):
            with updated_through_the_device(**options, clip=1e9, precision=precision) as (model, optimizer):
                engine = Engine.of(model)
                train(model, optimizer, 4)
                with _to_read(engine):
                    pass
                with torch.no_grad():
                    out = model(torch.ones(2, 16))
                train(model, optimizer, 1, first=4)
                backward(model, 5)
                with _to_read(engine):
                    pass
                optimizer.step()
                optimizer.zero_grad()
                found = [out, *states(model, optimizer)]
            expected = expected or found
            if not all(map(torch.equal, found, expected)):
                wrong.append(f"{precision}, {options}")
    return wrong


def test_parameters_made_anew_are_made_from_states_wherever_these_are(ranks: Any) -> None:
    assert ranks(1, looked_at_whole) == [[]]


def memory_of_gradients_after_they_were_cleared() -> int:
    with updated_through_the_device(1.0, clip=1e9, lasting=29) as (model, optimizer):
        train(model, optimizer, 4)
        backward(model, 4)
        held = {p.grad.raw_local.untyped_storage()._cdata for p in optimizer.param_groups[0]["params"]}
        optimizer.step()
        updates: Any = Engine.of(model).updates
        updates.finish_last()
        optimizer.zero_grad()
        assert len(updates._through._lasting) == 29
        gc.collect()
        alive = [found for found in gc.get_objects() if type(found) is torch.Tensor]
        return sum(found.untyped_storage()._cdata in held for found in alive)


def test_chunks_that_stay_let_go_of_their_gradients(ranks: Any) -> None:
    assert ranks(1, memory_of_gradients_after_they_were_cleared) == [0]


def gradients_set_to_zero_beside_an_update() -> list[bool]:
    """As on a GPU: nobody waits because a gradient that is touched is in host memory, and kernels are late."""
    look, brought = StepScope.look, through_device.DeviceUpdate._brought
    found = []
    for set_to_none in (True, False):
        with (
            pytest.MonkeyPatch.context() as patch,
            updated_through_the_device(1.0, clip=1e9, place={"optimizer": "host", "gradients": "device"}) as made,
        ):
            model, optimizer = made
            away = [t for slab in Engine.of(model).slabs() for t in (slab.raw_shard, slab.resident) if t is not None]
            memory = {tensor.untyped_storage().data_ptr() for tensor in away}

            def look_at(scope: StepScope, local: torch.Tensor, memory: set[int] = memory) -> None:
                if local.untyped_storage().data_ptr() in memory:
                    look(scope, local)

            def late(*given: Any) -> torch.Tensor:
                time.sleep(0.003)
                return brought(*given)

            patch.setattr(StepScope, "look", look_at)
            patch.setattr(
                through_device.DeviceUpdate, "_brought", lambda *given: (time.sleep(0.003), brought(*given))[1]
            )
            for step in range(3):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            patch.undo()
            found.append(states(model, optimizer))
    return list(map(torch.equal, *found))


def test_gradients_are_not_set_to_zero_before_an_update_has_read_them(ranks: Any) -> None:
    assert all(ranks(1, gradients_set_to_zero_beside_an_update)[0])


def steps_without_a_chunk() -> list[float]:
    taken = []
    for share, precision in ((0.7, BF16_STATES), (1e-6, "bf16")):
        with updated_through_the_device(share, tunes=True, ahead=2, precision=precision) as (model, optimizer):
            train(model, optimizer, 4)
            taken.append(zf.ledger(model).snapshot()["offload"]["update"]["device_elements"])
    return taken


def test_an_update_of_which_nothing_streams(ranks: Any) -> None:
    """States that are rounded at random, or a share that is less than half of any parameter."""
    assert ranks(1, steps_without_a_chunk) == [[0.0, 0.0]]


def trained_by_pools(fewer: int | None) -> tuple[list[torch.Tensor], set[int], set[float]]:
    """Through all trials; how many threads updated something, and how many the ledger has told."""
    update, there, told = HostUpdate.submit, set[int](), set[float]()

    def note(self: Any, *given: Any) -> Any:
        there.add(len(self._pool._threads))
        return update(self, *given)

    with (
        updated_through_the_device(0.5, tunes=fewer is not None, fewer=fewer) as (model, optimizer),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(HostUpdate, "submit", note)
        for step in range(14):
            train(model, optimizer, 1, first=step)
            told.add(zf.ledger(model).snapshot()["offload"]["update"]["host_threads"])
        found, updates = states(model, optimizer), Engine.of(model).updates
        zf.close(model, gather=False)
        assert not any(thread.is_alive() for pool in updates._pools for thread in pool._threads)  # type: ignore
        return found, there, told


def pools_that_differ() -> tuple[bool, set[int], set[float]]:
    (expected, *_), (found, there, told) = trained_by_pools(None), trained_by_pools(1)
    return all(map(torch.equal, found, expected)), there, told


def pools_where_nothing_streams() -> int:
    with updated_through_the_device(0.0, fewer=1) as (model, _):
        updates: Any = Engine.of(model).updates
        return len(updates._pools)


def test_a_smaller_pool_updates_alike_and_ends(ranks: Any) -> None:
    assert ranks(1, pools_that_differ) == [(True, {1, 2}, {1.0, 2.0})]
    assert ranks(1, pools_where_nothing_streams) == [1]


def share_after(alone: float, *, device_seconds: float = 0.1, is_like_others: bool = True) -> float:
    """With steps of one second each, but for the two in which the device is alone."""
    timing, now, ran = TunedShare(0.5), 0.0, Split(0.5)
    for step in range(12):
        is_alone = ran.device_share == 1
        timing.host_seconds, timing.device_seconds = 0.5, device_seconds if is_alone else 0.5
        timing.tune(ran, now, is_like_others=is_like_others or is_alone or step > 6)
        ran, now = timing.next, now + (alone if timing.next.device_share == 1 else 1.0)
    return timing.next.device_share


def test_the_device_alone_is_taken_where_steps_are_shorter_and_it_had_something_to_do() -> None:
    assert share_after(0.5) == 1.0
    assert share_after(1.5) == 0.5
    assert share_after(0.5, device_seconds=0.0) == 0.5


def failures(where: str) -> tuple[list[str], list[str]]:
    before = set(threading.enumerate())

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the bus broke")

    with updated_through_the_device(1.0, ahead=2) as (model, optimizer):
        train(model, optimizer, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(through_device.DeviceUpdate, where, fail)
            errors = [raised(lambda: (train(model, optimizer, 1, first=1), zf.full(model[0].weight)))]
        errors += [raised(train, model, optimizer, 1, first=2), raised(zf.close, model)]
    return errors, [thread.name for thread in set(threading.enumerate()) - before]


@pytest.mark.parametrize("where", ["_send_down", "_bring", "_rooms_for_copies", "end"])
def test_a_failure_in_either_thread_is_raised_and_the_threads_end(ranks: Any, where: str) -> None:
    ((errors, left),) = ranks(1, failures, where)
    assert all("the bus broke" in error for error in errors), errors
    assert left == []


def held_by_somebody() -> bool:
    """An average holds the engine, for instance."""
    with updated_through_the_device(1.0, ahead=6) as (model, optimizer):
        train(model, optimizer, 2)
        engine = Engine.of(model)
        zf.close(model)
        return engine.updates is None


def test_an_engine_that_outlives_its_model_keeps_no_memory_of_updates(ranks: Any) -> None:
    assert ranks(1, held_by_somebody) == [True]
