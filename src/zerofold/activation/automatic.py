"""keep="auto": where inputs of checkpointed blocks wait is chosen by the plan, when it is seen how large they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zerofold.activation.chains import first_of
from zerofold.activation.checkpointing import is_to_be_kept
from zerofold.activation.held import Held
from zerofold.activation.partition import Partition, is_dtensor
from zerofold.activation.store import CheckpointStore
from zerofold.activation.wishes import AUTO as AUTO  # zerofold.train asks for it here
from zerofold.engine import Engine
from zerofold.memory.host import host_memory
from zerofold.nested import tensors_in
from zerofold.offload.budget import device_memory
from zerofold.parallel.marks import sequence_ranks
from zerofold.placement import Tier
from zerofold.plan.keeping import Choice, Stream, choose
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point
from zerofold.plan.presets import preset, preset_of
from zerofold.plan.shape import UnitShape
from zerofold.plan.states import Widths
from zerofold.precision import policy_of

_DISK_RATE = 2e9  # for the line that says what it costs


class Automatic:
    """Runs checkpointed functions for the blocks of one model, their inputs kept where there is room.

    It looks when a block gets more than any got before, so in the first forward, and in one with longer sequences. What
    blocks get besides, and what of it tensor ranks do not hold alike, is known when such a forward is through: then it
    looks once more. Once inputs leave the device they do so for good.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        every: int,
        *,
        path: str | os.PathLike[str] | None,
        budget: int | None,
        model: Callable[[], nn.Module | None],
        run: Callable[..., Any],
        parts: Partition | None = None,
    ) -> None:
        self._blocks, self._every, self._path, self._budget = dict(blocks), every, path, budget
        self._model, self._run, self.parts = model, run, parts
        self._longest: Stream | None = None
        self._width, self._device = 0, torch.device("cpu")  # of its elements, and where it was
        self._first = ""  # the group with which forwards begin
        self._begins = self._is_new = False  # a forward; there is something that no whole forward has shown yet
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()  # inputs of this forward besides streams
        self._others = self._whole = 0  # their bytes, and of them what was kept whole
        self._known = (0, 0)  # the most of both in any forward
        self.held = Held()
        self.choice: Choice | None = None
        """None before the first forward."""
        self.stores: list[CheckpointStore] = []
        """The last one is in use; those before it may still hold what a backward wants."""

    def comes_to(self, name: str) -> None:
        """The group that is called next. All ranks run the same forwards, so they look at the same moments."""
        self._first = self._first or name
        self._begins = name == self._first

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stream = first_of((args, kwargs))
        again = self._begins and self._is_new
        if self._begins:
            self._take_in()
        if stream is not None and (self._longest is None or stream.nbytes > self._longest.nbytes):
            self._longest, self._width, self._device = _stream_of(stream), stream.element_size(), stream.device
            self._is_new = True
            self._look(again=False)
        elif again:
            self._is_new = False
            self._look(again=True)
        store = self.stores[-1] if self.stores else None
        before = 0 if store is None else store.whole_nbytes
        for tensor in tensors_in((args, kwargs)):
            if tensor is not stream and tensor not in self._seen and is_to_be_kept(tensor):
                self._seen[tensor] = None  # what several blocks take is kept once
                self._others += tensor.nbytes
        result = self._run(fn, *args, store=store, **kwargs)
        self._whole += 0 if store is None else store.whole_nbytes - before
        return result

    def _take_in(self) -> None:
        """What the forward before has shown; a new one begins."""
        self._known = max(self._others, self._known[0]), max(self._whole, self._known[1])
        self._begins, self._others, self._whole = False, 0, 0
        self._seen.clear()

    def _look(self, *, again: bool) -> None:
        model = self._model()
        if model is None:
            return
        found = self._choose(model)
        if self.parts is not None:
            found = self.parts.furthest(found)
        before, place = self.choice, found.distance
        if before is not None and (place < before.distance or (place == before.distance and not again)):
            return
        self.choice = found
        if before is not None and place == before.distance:
            if found.partition and self._known[1]:
                _say(found)
            return
        self._is_new = True
        if found.partition or found.keep != Tier.DEVICE.value:
            path = self._path if found.keep == Tier.NVME.value else None
            parts = self.parts if found.partition else None
            self.stores.append(CheckpointStore(found.keep, path=path, partition=parts))
            self.held.add(self.stores[-1])
        _say(found)

    def _choose(self, model: nn.Module) -> Choice:
        assert self._longest is not None
        engine = getattr(model, "_zerofold_engine", None)
        engine = engine if isinstance(engine, Engine) else None
        machine = machine_here(self._device, engine, path=self._path, budget=self._budget)
        spread = None if engine is None else engine.spread
        stages = None if engine is None else engine.pipeline
        is_first = stages is None or stages.share.has_embedding
        seen = replace(
            _of_sequence_ranks(self._longest, sequence_ranks(model), is_whole=is_first),
            vocab=_vocabulary(model),
            tensor=1 if spread is None else spread.tensor,
            at_once=1 if spread is None else spread.pipeline,
            others=max(self._known),
            whole=self._known[1],
        )
        units = _units(model, self._blocks)
        precision = "fp32" if self._width > 2 else "bf16"
        point = Point(stage="0", checkpoint_every=self._every, precision=precision)
        if engine is None:
            return choose(units, seen, machine, point, widths=Widths.of(policy_of(None)))
        axes = engine.groups.mesh
        point = replace(
            point,
            stage=engine.row.name,
            accumulate=engine.reductions.accumulate,
            live_bytes=engine.schedule.live_bytes,
            buffer_bytes=engine.pool.buffer_nbytes,
            group=0 if axes is None or axes.ndim == 1 else int(axes.mesh.shape[-1]),
        )
        tiers = {name: tiers for name, tiers in engine.offloading.tiers.items() if tiers.is_offloaded}
        return choose(
            units,
            seen,
            machine,
            point,
            can_cut=self.parts is not None,
            widths=Widths.of(engine.precision),
            tiers=tiers or None,
        )


def _stream_of(tensor: Tensor) -> Stream:
    """Of a DTensor each rank has a part already (sequence parallelism)."""
    stays = is_dtensor(tensor)
    own = tensor.to_local().nbytes if stays else None  # type: ignore[attr-defined]
    tokens = max(1, tensor.numel() // max(1, tensor.shape[-1]))
    return Stream(nbytes=tensor.nbytes, tokens=tokens, own=own, stays=stays)


def _of_sequence_ranks(stream: Stream, ranks: int, *, is_whole: bool) -> Stream:
    """`is_whole`: it is what the model's first block gets, which cuts it for the others; else a part already."""
    if ranks == 1 or stream.stays:
        return stream
    if is_whole:
        return replace(stream, own=-(-stream.nbytes // ranks))
    return replace(stream, own=stream.nbytes, nbytes=ranks * stream.nbytes, tokens=ranks * stream.tokens)


def _say(choice: Choice) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f'keep="auto": {choice.sentence}.', flush=True)


def machine_here(
    device: torch.device,
    engine: Engine | None,
    *,
    path: str | os.PathLike[str] | None,
    budget: int | None = None,
    ranks: int = 1,
) -> Machine:
    """The memories that are there, and the rates of a preset of such a device.

    `ranks`: how many there are, where no engine knows it yet.
    """
    ranks = ranks if engine is None else engine.groups.control.size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    host = host_memory().available
    if device.type == "cpu":
        found, here = preset("cpu", devices=ranks, per_node=min(ranks, local)), host // local
    else:
        known = preset_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        found, here = preset(known or "A100-80", devices=ranks, per_node=local), device_memory(device)
    if engine is not None and engine.spread is not None and engine.spread.pipeline > 1:
        # A stage's units stay gathered, and its gradients whole, until all micro-batches are through.
        widths = Widths.of(engine.precision)
        here -= engine.psi * (widths.compute + widths.gradient)
    disk = 0 if path is None else shutil.disk_usage(_existing(Path(path))).free
    return replace(
        found,
        device_memory=min(here, budget or here),
        host_memory=host,
        disk=disk,
        disk_read=found.disk_read or _DISK_RATE,
        disk_write=found.disk_write or _DISK_RATE,
    )


def _existing(folder: Path) -> Path:
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def _units(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[UnitShape]:
    """Every block, and first whatever is in none."""
    seen: set[int] = set()
    found = [_unit(name, module.parameters(), seen) for name, module in blocks.items()]
    return [_unit("", model.parameters(), seen), *found]


def _unit(name: str, parameters: Any, seen: set[int]) -> UnitShape:
    own = [parameter for parameter in parameters if id(parameter) not in seen]
    seen.update(map(id, own))
    trained = tuple(parameter.numel() for parameter in own if parameter.requires_grad)
    frozen = tuple(parameter.numel() for parameter in own if not parameter.requires_grad)
    return UnitShape(name=name, trained=sum(trained), frozen=sum(frozen), tensors=trained, frozen_tensors=frozen)


def _vocabulary(model: nn.Module) -> int:
    return max((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), default=0)
