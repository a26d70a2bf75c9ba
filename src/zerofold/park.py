"""A model's states put away into host memory for a while, to give its device to somebody else.

Nothing is exchanged for another tensor: each storage is copied to the host and loses its memory, and gets new memory
and its bytes back later. So all views and aliases (faces, pieces, graphs, whoever holds a buffer) stay what they were.

device    | shard |  | kept parameters |  | moments | …      0 bytes each while parked
              ↓               ↓                ↓
host      | shard | kept parameters | moments | …  |         in blocks, one after the other

Reading a storage without memory crashes the process on the CPU. Until they are back, all tensors that were parked
therefore wear the guard of released parameters, and pieces look before they are touched (`StepScope.look`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from zerofold.engine import Engine
from zerofold.face_gradient import FaceGradient
from zerofold.guard import guard
from zerofold.nested import tensors_in
from zerofold.optim.ema import EMA
from zerofold.schedule import in_backward
from zerofold.sharded import ShardedTensor

STATES = ("parameters", "buffers", "optimizer", "gradients")
_BLOCK = 2**26  # bytes; torch rounds pinned memory up to a power of two, which here wastes half a block at most
_ALIGNMENT = 512  # bytes, of each storage on the host
_GUARD = ("_arrive", "_plain_class")  # what the guard leaves on a tensor


@dataclass(frozen=True)
class Parking:
    """What was moved to the host or back, on this rank."""

    nbytes: dict[str, int]
    """By state."""
    seconds: float

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes.values())

    def __str__(self) -> str:
        states = ", ".join(f"{state} {_gib(nbytes)}" for state, nbytes in self.nbytes.items())
        return f"{_gib(self.total_nbytes)} in {self.seconds:.1f} s ({states})"


def offload_states(model: nn.Module, include: Collection[str] | None = None, *, pin: bool = False) -> Parking:
    """Parks the states of a sharded model in host memory; `reload_states` brings them back to the bit.

    Between micro-batches as well, and between forward and backward. Each rank moves its own and sends
    nothing. Until the states are back, whatever needs them raises: forward, backward, step, save, reading a parameter;
    views that somebody made of them before must not be touched. On the CPU they move as well, within the same memory.

    include  "parameters" (shards, masters, 16-bit copies), "gradients" (also sums not yet reduced), "optimizer" (states
             of attached optimizers and averages), "buffers"; all by default. While only optimizer and gradients are
             parked, forwards without a graph run, so the model itself may generate
    pin      page-locked memory: several times as fast from the second time on, as the process keeps it; the first time
             it has to be made, which takes longer than the copy

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Linear(64, 64)
    >>> model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=2)
    >>> zf.offload_states(model, ["parameters"]).nbytes
    {'parameters': 16640}
    >>> model(torch.ones(1, 64))
    Traceback (most recent call last):
    RuntimeError: parameters of this model are parked in host memory: call zf.reload_states(model) first
    >>> _ = zf.reload_states(model)
    >>> zf.close(model)
    """
    engine, wanted = Engine.of(model), _wanted(include)
    _check_idle(engine)
    engine.settle()
    if engine.updates is not None and "optimizer" in wanted:
        engine.updates.let_go()
    started = time.perf_counter()
    engine.end_step()
    engine.schedule.wait_all()
    engine.reducer.finish()
    parked = _Parked(engine, wanted, pin=pin)
    return Parking(parked.nbytes, time.perf_counter() - started)


def reload_states(model: nn.Module) -> Parking:
    """Brings back what `offload_states` has parked. Without enough device memory it raises, and all stays parked.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64, bias=False), stage=3)
    >>> _ = zf.offload_states(model)
    >>> zf.reload_states(model).nbytes["parameters"]
    16384
    >>> zf.close(model)
    """
    engine = Engine.of(model)
    if not isinstance(engine.parked, _Parked):
        raise RuntimeError("reload_states: nothing of this model is parked; zf.offload_states(model) parks its states")
    started = time.perf_counter()
    parked = engine.parked
    parked.restore()
    return Parking(parked.nbytes, time.perf_counter() - started)


def _wanted(include: Collection[str] | None) -> tuple[str, ...]:
    if isinstance(include, str):
        raise TypeError(f"include={include!r} must be a list of states, such as [{include!r}]")
    unknown = [state for state in include or () if state not in STATES]
    if unknown or (include is not None and not include):
        what = f"{unknown[0]!r} in include is" if unknown else "include is empty: there is"
        raise ValueError(f"offload_states: {what} no state of a model; choose from {', '.join(STATES)}")
    return tuple(state for state in STATES if include is None or state in include)


def _check_idle(engine: Engine) -> None:
    where = None
    if in_backward() or engine.schedule.is_in_forward:
        where = "a forward or backward"
    elif engine.schedule.holders:
        where = "`with zf.full_params(model)`"
    elif engine.is_swapped:
        where = "`with average.swapped()`"
    if where is not None:
        raise RuntimeError(f"offload_states inside {where}, which uses the states: call it after that")


class _Away(NamedTuple):
    """A storage whose bytes are on the host."""

    storage: torch.UntypedStorage
    nbytes: int
    start: int  # in the host's memory


class _Parked:
    """The states that are on the host. Made, it has freed them on the device; `restore` undoes all of it."""

    def __init__(self, engine: Engine, wanted: tuple[str, ...], *, pin: bool) -> None:
        self._engine, self._device = engine, engine.slabs()[0].home.device
        tensors = {state: [each for each in _tensors(engine, state) if self._can_move(each)] for state in STATES}
        owners: dict[int, str] = {}  # of each storage: where states share one, the first of them
        self.nbytes, self._away, end = dict.fromkeys(wanted, 0), dict[int, _Away](), 0
        for state, tensor in ((each, tensor) for each in STATES for tensor in tensors[each]):
            storage = tensor.untyped_storage()
            nbytes, key = storage.nbytes(), storage._cdata
            if owners.setdefault(key, state) in wanted and nbytes and key not in self._away:
                self._away[key] = _Away(storage, nbytes, end)
                self.nbytes[state] += nbytes
                end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._host = _host_blocks(end, self._device, pin=pin)
        _wait(self._device)
        for away in self._away.values():
            for host, device in self._pieces(away):
                host.copy_(device, non_blocking=True)
            _wait(self._device)  # before the memory gets another owner, who may use it on another stream
            away.storage.resize_(0)
        engine.cache.clear()
        engine.pool.clear()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()  # so that other processes can have it
        distinct = {id(tensor): tensor for state in STATES for tensor in tensors[state]}.values()
        parked = [tensor for tensor in distinct if tensor.untyped_storage()._cdata in self._away]
        self._guarded = [_Guarded.put_on(tensor, engine.step.refuse) for tensor in parked]
        engine.step.parked, engine.parked = wanted, self

    def restore(self) -> None:
        returned: list[_Away] = []
        try:
            for away in self._away.values():
                away.storage.resize_(away.nbytes)
                returned.append(away)
        except Exception:
            for away in returned:
                away.storage.resize_(0)
            raise
        for away in returned:
            for host, device in self._pieces(away):
                device.copy_(host, non_blocking=True)
        _wait(self._device)
        self._engine.step.parked, self._engine.parked = (), None
        for guarded in self._guarded:
            guarded.take_off()

    def _can_move(self, tensor: Tensor) -> bool:
        """Memory that is somebody else's (a mapped file, another process) stays where it is, and in use."""
        if tensor.device != self._device or tensor.layout is not torch.strided:
            return False
        has_no_memory = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__  # a wrapper around others
        return not has_no_memory and bool(tensor.untyped_storage().resizable())

    def _pieces(self, away: _Away) -> Iterator[tuple[Tensor, Tensor]]:
        """The same bytes on the host and on the device, cut where the host's blocks end."""
        # A tensor of its own over the storage: what is copied through it is no change of any other.
        device = torch.empty(0, dtype=torch.uint8, device=self._device).set_(away.storage)
        done = 0
        while done < away.nbytes:
            block, first = divmod(away.start + done, _BLOCK)
            size = min(_BLOCK - first, away.nbytes - done)
            yield self._host[block][first : first + size], device[done : done + size]
            done += size


class _Guarded(NamedTuple):
    """A tensor whose memory is away, and what it was before: a released parameter has a guard of its own."""

    tensor: Tensor
    kind: type
    attributes: dict[str, Any]

    @classmethod
    def put_on(cls, tensor: Tensor, refuse: Callable[[], None]) -> _Guarded:
        guarded = cls(tensor, type(tensor), {name: vars(tensor).get(name) for name in _GUARD})
        guard(tensor, refuse)
        return guarded

    def take_off(self) -> None:
        self.tensor.__class__ = self.kind
        for name, value in self.attributes.items():
            if value is None:
                vars(self.tensor).pop(name, None)  # or it would be pickled with the tensor
            else:
                setattr(self.tensor, name, value)


def _tensors(engine: Engine, state: str) -> Iterator[Tensor]:
    """All tensors with memory of their own or of others that make up a state on this rank."""
    for tensor in chain.from_iterable(map(tensors_in, _held(engine, state))):
        if not isinstance(tensor, ShardedTensor):
            yield tensor
        elif not isinstance(tensor, FaceGradient) and not tensor.is_used_up:  # they have no memory of their own
            yield tensor.local


def _held(engine: Engine, state: str) -> Iterator[Any]:
    parameters = [*engine.model.parameters(), *(p for slab in engine.slabs() for p in (*slab.parameters, *slab.faces))]
    if state == "parameters":
        yield parameters
        yield [(slab.shard, slab.resident, slab.storage.tensor, slab.group_copy) for slab in engine.slabs()]
    elif state == "buffers":
        yield list(engine.model.buffers())
    elif state == "optimizer":
        yield from (optimizer.state for optimizer in engine.optimizers)
        yield from (average.shards() for average in engine.averages if isinstance(average, EMA))
    else:
        yield [p.grad for p in parameters]
        # With what is added up and not yet shown; parameters among it count as parameters.
        yield from (vars(slab.gradients) for slab in engine.slabs())


def _host_blocks(nbytes: int, device: torch.device, *, pin: bool) -> list[Tensor]:
    on_cpu, ranks = device.type == "cpu", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = psutil.virtual_memory().available
    if not on_cpu and nbytes * ranks > available:
        raise MemoryError(
            f"offload_states needs {_gib(nbytes)} of host memory on each of {ranks} rank(s) here, and "
            f"{_gib(available)} are free: park fewer states with include=, or free memory on the host"
        )
    sizes = [min(_BLOCK, nbytes - start) for start in range(0, nbytes, _BLOCK)]
    return [torch.empty(size, dtype=torch.uint8, pin_memory=pin and not on_cpu) for size in sizes]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
