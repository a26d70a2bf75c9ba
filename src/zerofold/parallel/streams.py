"""What stages send each other for batches of each shape, and whether all ranks of a model are about to do the same.

every step   one message of four numbers: has anybody failed already, is the shape new to anybody, is it the same
first step   the batches themselves are compared, and how the model was cut
new shape    the first block runs once where it is, and the others are told what it gives, or that it has raised

So no rank waits for another that gave up, or that expects something else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofold.engine import Engine
from zerofold.nested import tensors_in
from zerofold.parallel.alike import checksum
from zerofold.parallel.mesh import PIPELINE, Mesh
from zerofold.parallel.split import Split
from zerofold.parallel.stage import MicroBatch, Stream
from zerofold.parallel.stand_ins import Failure, Reached

_UNIT = "shapes of batches"


class Streams:
    """Of one pipeline."""

    def __init__(self, model: nn.Module, mesh: Mesh, split: Split, goes_on: Callable[[], bool]) -> None:
        self.model, self.goes_on = model, goes_on
        self._split, self._group = split, mesh.along(PIPELINE).get_group()
        self._ranks = dist.get_process_group_ranks(self._group)
        self._has_first = split.stages[0].rank == mesh.coordinate[PIPELINE]
        self._known: dict[Any, Stream] = {}
        self._has_looked = False  # whether all ranks of the pipeline get the same batch

    def agree(self, engine: Engine, batches: list[MicroBatch], batch: Any, what: str, table: str) -> Stream | None:
        """None where there can be no step: `Course.failure` says why on a rank that knows. `batches` are the parts of
        `batch`, none after a failure; `table` is how the model was cut."""
        key = _key(engine, batches[0]) if batches else None
        described = _described(engine, batch, what)
        digest = zlib.crc32(described.encode())
        has_failed, is_new, highest, lowest = self._highest(
            engine, [self._has_failed, key not in self._known, digest, -digest]
        )
        if has_failed:
            return None
        if not self._has_looked:
            self._try(lambda: self._look(batch, table))
            if any(self._highest(engine, [self._has_failed])):  # of other pipelines that share the layers' insides
                return None
            self._has_looked = True
        if highest != -lowest:
            self._try(lambda: _refuse(engine, described))
            return None
        if is_new:
            found = self._find(engine.device, batches[0])
            if found is None:
                return None
            self._known[key] = found
        stream = self._known[key]
        self._split.course.dtype = stream.dtype
        return stream

    @property
    def _has_failed(self) -> bool:
        return self._split.course.failure is not None

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except ValueError as error:
            self._split.course.failure = Failure(self._split.own[0].index, error)

    def _highest(self, engine: Engine, numbers: list[int]) -> list[int]:
        """Over all ranks that hold one copy of the model between them. By the CPU: nobody waits for a device."""
        if engine.groups.model is None:
            return numbers
        told = torch.tensor(numbers, dtype=torch.int64)
        engine.groups.model.all_reduce(told, unit=_UNIT, op=dist.ReduceOp.MAX).wait()
        return told.tolist()

    def _look(self, batch: Any, table: str) -> None:
        """A sampler over all ranks would give the first stage other samples than the last has targets of. And stages
        that count micro-batches in different ways would wait for each other for ever."""
        if len(self._ranks) == 1:
            return
        ranks = ", ".join(map(str, self._ranks))
        told: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(told, (table, checksum(batch)), group=self._group)
        tables = [table for table, _ in told]
        odd = next((index for index, table in enumerate(tables) if table != tables[0]), None)
        if odd is not None:
            lines = zip(tables[0].splitlines(), tables[odd].splitlines(), strict=False)
            first, other = next(((a, b) for a, b in lines if a != b), (tables[0], tables[odd]))
            raise ValueError(
                f"pipe.step: ranks {ranks} are stages of one pipeline and cut it differently: rank {self._ranks[0]} "
                f"has '{' '.join(first.split())}', rank {self._ranks[odd]} '{' '.join(other.split())}'; call "
                "zf.pipeline with the same arguments on every rank"
            )
        if len({batch for _, batch in told}) > 1:
            raise ValueError(
                f"pipe.step: ranks {ranks} are stages of one pipeline and got different batches: give them the same, "
                "chosen by mesh.coordinate['data']"
            )

    def _find(self, device: torch.device, batch: MicroBatch) -> Stream | None:
        """What the first block gives; the rank that has it finds out, and tells the others. None: it has failed.

        What it is given may be something else: with sequence_parallel it cuts the sequence.
        """
        told: list[Any] = [None]
        if self._has_first:
            try:
                told = [self._given_by_first_block(device, batch)]
            except Exception as error:
                if not self.goes_on():
                    raise
                self._split.course.failure = Failure(0, error)
        dist.broadcast_object_list(told, src=self._ranks[self._split.stages[0].rank], group=self._group)
        if told[0] is None:
            return None
        shape, dtype = told[0]
        return Stream(torch.Size(shape), dtype)

    def _given_by_first_block(self, device: torch.device, batch: MicroBatch) -> tuple[tuple[int, ...], torch.dtype]:
        course = self._split.course
        course.first, course.stop = 0, 1
        self._split.seat_beginning()
        cards = [device] if device.type != "cpu" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(cards, device_type=device.type if cards else "cuda"):
                self.model(*batch.args, **batch.kwargs)
        except Reached as reached:
            return tuple(reached.stream.shape), reached.stream.dtype
        finally:
            course.stop = None
            self._split.seat(None)
        raise RuntimeError("the model's forward ended without calling its second block")


def _autocast(engine: Engine) -> torch.dtype | None:
    kind = engine.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _key(engine: Engine, batch: MicroBatch) -> Any:
    """Of micro-batches for which the stages send the same."""
    return (*((t.shape, t.dtype) for t in tensors_in(batch)), _autocast(engine), engine.boundary.compute)


def _described(engine: Engine, batch: Any, what: str) -> str:
    """In an order of its own: keyword arguments may come in any."""
    shapes = sorted(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors_in(batch))
    autocast = _autocast(engine)
    return f"{what} of {', '.join(shapes)}{'' if autocast is None else f' with autocast to {autocast}'}"


def _refuse(engine: Engine, described: str) -> None:
    model = engine.groups.model
    assert model is not None, "a rank alone agrees with itself"
    told = model.all_gather_objects(described, unit=_UNIT)
    odd = next(rank for rank, said in enumerate(told) if said != told[0])
    raise ValueError(
        f"pipe.step: ranks {', '.join(map(str, model.global_ranks))} hold one model between them and are not at the "
        f"same batch: rank {model.global_ranks[0]} is at {told[0]}, rank {model.global_ranks[odd]} at {told[odd]}; "
        "give them the same, chosen by mesh.coordinate['data']"
    )
