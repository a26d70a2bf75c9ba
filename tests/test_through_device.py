"""The update through a device without one: streams and events that do all at once, on the CPU.

What runs beside what is for a real GPU to show. Here it is which chunk goes where, who waits for whom, and what becomes
of a failure in one of the threads.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ranks import raised
from tests.test_offload import BF16_STATES, prepared, result, states, train

import zerofold as zf
from zerofold.compat.fsdp_calls import _to_read
from zerofold.engine import Engine
from zerofold.optim.away import chunks, slots, through_device
from zerofold.optim.away.timing import Timing
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


class Filled:
    """There is room for so many chunks, half of them in the second step, the others in the third."""

    def __init__(self, chunks: int) -> None:
        self._more = [0, chunks // 2, chunks - chunks // 2]

    def more(self) -> int:
        return self._more.pop(0) if self._more else 0


@contextmanager
def updated_through_the_device(
    share: float,
    *,
    ahead: int = 0,
    early: bool = False,
    lasting: int = 0,
    tunes: bool = False,
    precision: Any = "bf16",
    place: Any = None,
    clip: float = 0.5,
) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """A model whose offloaded states go through a device that is the host."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (chunks, slots):
            patch.setattr(module, "CHUNK", 2**9)  # so that a small model has many
        for name, fake in {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "stream": lambda _: nullcontext(),
            "current_stream": FakeStream,
            "set_device": lambda _: None,
            "synchronize": lambda _: None,
        }.items():
            patch.setattr(torch.cuda, name, fake)
        options: dict[str, Any] = {"stage": 3, "precision": precision, "clip": clip, "one_pass": True}
        model, optimizer = prepared(place or {"optimizer": "host"}, **options)
        filling: Any = Filled(lasting) if lasting else None
        engine, way = Engine.of(model), Way(2, None, share, tunes, ahead=ahead, early=early, filling=filling)
        transfers: Any = SimpleNamespace(device=CPU, is_async=True)
        engine.updates = AwayUpdates(transfers, engine.offloading.memory, engine.slabs(), way)
        yield model, optimizer
        if Engine.is_on(model):
            zf.close(model, gather=False)


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


def test_a_device_is_filled_by_halves_of_what_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, used, emptied = slots.CHUNK * slots.BYTES, 100, []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: used * slot)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: (used - 4) * slot)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(used))
    filling, found = slots.Filling(CPU, 140 * slot), []
    for step in range(9):
        used += 8 * (step == 1)  # the second takes more than the first
        found.append(filling.more())
        used += found[-1]
    assert found == [0, 16, 8, 4, 2, 1, 0, 0, 0]
    assert len(emptied) == 5  # so that they are not cut out of what activations left
    used = 0
    assert filling.more() == 0  # what a step happens to leave later is not taken


def test_a_short_step_does_not_fill_what_a_long_one_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is emptied where chunks get room, so what is reserved then tells of the step after that alone."""
    slot, peak, filled = slots.CHUNK * slots.BYTES, 0, 0
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: (needed + filled) * slot)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak * slot)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    filling = slots.Filling(CPU, 140 * slot)
    for needed in (120, 120, *[60] * 8):
        peak = max(peak, needed + filled)
        filled += filling.more()
    assert 15 <= filled <= 20
    needed = 120
    assert needed + filled <= 140


def test_chunks_that_wait_on_the_device_are_those_on_the_host(ranks: Any) -> None:
    assert ranks(1, places_that_differ) == [[]]


def states_beside_a_host_that_updates_too() -> list[float]:
    """The shares with which they differ from those of a host alone."""
    wrong, expected = [], None
    for share, lasting in ((0.0, 0), (0.4, 30), (0.8, 30)):  # of 29 chunks
        with updated_through_the_device(share, lasting=lasting) as (model, optimizer):
            train(model, optimizer, 5)
            found = states(model, optimizer)
        expected = expected or found
        if not all(map(torch.equal, found, expected)):
            wrong.append(share)
    return wrong


def test_states_that_stay_are_never_updated_on_the_host_as_well(ranks: Any) -> None:
    """In the step that gets room for them the parameters are still dealt out as before, others in the next one."""
    assert ranks(1, states_beside_a_host_that_updates_too) == [[]]


def memory_for_states_that_stay(room: int) -> list[float]:
    """In slots, where all can stay, and where none can: parameters on the host are made from what is there."""
    taken = []
    for place, precision in (({"optimizer": "host"}, "bf16"), ({"optimizer": "host", "parameters": "host"}, None)):
        with updated_through_the_device(1.0, lasting=room, place=place, precision=precision) as (model, optimizer):
            train(model, optimizer, 4)
            updates: Any = Engine.of(model).updates
            updates.finish()
            taken.append(len(updates._through._slots) + len(updates._through._lasting) - through_device.SLOTS)
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
        held = {p.grad.form.untyped_storage()._cdata for p in optimizer.param_groups[0]["params"]}
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
            away = [t for slab in Engine.of(model).slabs() for t in (slab.master, slab.resident) if t is not None]
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


def test_the_device_alone_is_not_taken_for_fast_where_it_had_nothing_to_do() -> None:
    timing = Timing(0.5)
    timing.steps, timing.host_seconds, timing.device_seconds = 10, 1.0, 1.0
    timing.tune(0.5)
    timing.device_seconds = 0.0
    timing.tune(1.0)
    assert timing.device_share == 0.5


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
