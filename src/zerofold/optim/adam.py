"""torch's Adam and AdamW on masters, in one pass over memory: the same groups and states, another kernel."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofold.engine import Engine
from zerofold.gradients_away import AwayGradients
from zerofold.memory import share_storage
from zerofold.optim.away import DeviceMemory, updates_of
from zerofold.optim.away.chunks import PieceWork, Scaling, SlabWork
from zerofold.optim.onepass import STATE_DTYPES, AdamSettings, AdamTensors, Launch, prepare
from zerofold.sharded import ShardedParameter, ShardedTensor
from zerofold.slab import Slab
from zerofold.slab_away import AwaySlab

_MOMENTS = ("exp_avg", "exp_avg_sq")


def why_not_one_pass(
    optimizer: torch.optim.Optimizer, faces: Mapping[int, tuple[str, Tensor]] | None = None
) -> str | None:
    """None when the one pass does what this optimizer would do; otherwise what stands against it.

    `faces` of a model, by which those parameters go that the optimizer still holds whole, and in 16 bits: updated are
    the masters.
    """
    # A class that only sets other defaults steps as its parent does. torch wraps the step of each class it meets.
    own = inspect.unwrap(type(optimizer).step)
    if not isinstance(optimizer, torch.optim.Adam) or own is not inspect.unwrap(torch.optim.Adam.step):
        return f"it is for torch.optim.AdamW and Adam, not for {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        for option in ("amsgrad", "capturable", "differentiable"):
            if group.get(option):
                return f"it has no {option}=True"
        for parameter in group["params"]:
            _, face = (faces or {}).get(id(parameter), ("", parameter))
            is_updated = face.requires_grad or face.grad is not None
            if is_updated and face.dtype not in STATE_DTYPES:
                return f"it has no {face.dtype}"
    return None


class _Place(NamedTuple):
    """A parameter with a gradient, where it lies, and the numbers of its group."""

    face: ShardedParameter
    slab: Slab
    number: int
    """Of the parameter in its slab."""
    settings: AdamSettings


class Update:
    """One step of the optimizer on every piece that has a gradient.

    `prepare` may be called before anybody knows whether the step is made: it changes nothing, and on a GPU its work is
    done while the device is still in backward. Offloaded states are updated later: who needs them waits for that.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, clip_value: float | None) -> None:
        self._engine, self._optimizer, self._clip_value = engine, optimizer, clip_value
        places = engine.places()
        self._away: dict[AwaySlab, list[_Place]] = {}
        self._here: list[tuple[AdamSettings, list[_Place]]] = []
        for group in optimizer.param_groups:
            faces = [p for p in group["params"] if isinstance(p, ShardedParameter) and p.grad is not None]
            settings, here = _settings(group), list[_Place]()
            for face in faces:
                slab, number = places[id(face)]
                found = self._away.setdefault(slab, []) if isinstance(slab, AwaySlab) else here
                found.append(_Place(face, slab, number, settings))
            self._here.append((settings, here))
        self._launches: list[Launch] | None = None

    def prepare(self) -> None:
        """Unless states have to be made or moved first."""
        places = [place for _, here in self._here for place in here]
        if all(_is_complete(self._optimizer.state.get(place.face), place.slab) for place in places):
            self._launches = [
                prepare([self._tensors(place) for place in here], settings, clip_value=self._clip_value)
                for settings, here in self._here
                if here
            ]

    def run(self, scale: Tensor | None) -> None:
        """Every gradient is read times `scale` and at most `clip_value`."""
        engine, optimizer = self._engine, self._optimizer
        is_first = engine.is_offloaded and engine.updates is None
        memory = DeviceMemory.now(engine.device) if is_first else None
        here = [place for _, places in self._here for place in places]
        before = {place.slab: place.slab.version for place in here}
        if self._launches is None:
            for place in here:
                _complete_state(engine, optimizer, place)
            self.prepare()
        assert self._launches is not None
        for launch in self._launches:
            launch(scale)
        if here:
            torch._foreach_add_([optimizer.state[place.face]["step"] for place in here], 1)
        for slab, version in before.items():  # on every rank, also where it owns nothing of what was changed
            slab.mark_changed()
            if slab.is_kept and slab.dtypes.has_master:
                slab.after_update(version)
        if self._away:
            self._submit(scale, memory)

    def _tensors(self, place: _Place) -> AdamTensors:
        face, slab = place.face, place.slab
        state = self._optimizer.state[face]
        step = int(state["step"].item()) + 1
        assert isinstance(face.grad, ShardedTensor)
        return AdamTensors(
            face.local,
            face.grad.local.to(face.local.device),
            state["exp_avg"].local,
            state["exp_avg_sq"].local,
            slab.kept_piece(place.number),
            step,
            _seed(step, face, slab),
        )

    def _submit(self, scale: Tensor | None, memory: DeviceMemory | None) -> None:
        engine, optimizer, clip_value = self._engine, self._optimizer, self._clip_value
        pieces = {
            slab: [(place.number, piece) for place in places for piece in _piece(engine, optimizer, place)]
            for slab, places in self._away.items()
        }
        scaling = Scaling(None if scale is None or scale.item() == 1.0 else scale.item(), clip_value)
        ordered = [slab for slab in engine.slabs() if isinstance(slab, AwaySlab) and slab in pieces]  # as forward goes
        updates = updates_of(engine, memory)  # which the first time says which parameters stream through the device
        work = [
            _work_on(slab, [piece._replace(streams=_streams(slab, index, piece)) for index, piece in pieces[slab]])
            for slab in ordered
        ]
        alone = len(engine.optimizers) == 1  # else nobody knows which of them steps next
        updates.submit(work, scaling, partial(_upcoming, engine, optimizer) if alone else None)


def _work_on(slab: AwaySlab, pieces: list[PieceWork]) -> SlabWork:
    exp_avg, exp_avg_sq = (slab.moment(name, slab.home.precision.moments) for name in _MOMENTS)
    return SlabWork(slab, pieces, (exp_avg, exp_avg_sq))


def _upcoming(engine: Engine, optimizer: torch.optim.Optimizer, slab: AwaySlab) -> SlabWork | None:
    """What the next step will do to a slab if its gradients stay what they are; changes nothing."""
    if engine.is_swapped or engine.before_change:  # a copy of the states as they are now may be under way
        return None
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    pieces = []
    for index, (face, piece) in enumerate(zip(slab.faces, slab.layout.pieces(slab.place), strict=True)):
        gradient, state, group = face.grad, optimizer.state.get(face), groups.get(id(face))
        if not isinstance(gradient, ShardedTensor) or not piece.size:
            continue
        if group is None or not state or not all(_is_ready(state.get(name), slab, name) for name in _MOMENTS):
            return None
        if gradient.raw_local.device != slab.home.device or index not in slab.streamed:
            return None
        assert isinstance(face, ShardedParameter)
        step = int(state["step"]) + 1
        seed = _seed(step, face, slab)
        flat = gradient.raw_local.detach().reshape(-1)
        pieces.append(PieceWork(piece.shard_start, piece.shard_stop, flat, _settings(group), step, seed, streams=True))
    return _work_on(slab, pieces)


def _streams(slab: AwaySlab, index: int, piece: PieceWork) -> bool:
    """By its share; or because its gradient is on the device, from where the host would have to fetch it."""
    return index in slab.streamed or (bool(slab.streamed) and piece.gradient.device.type != "cpu")


def _piece(engine: Engine, optimizer: torch.optim.Optimizer, place: _Place) -> list[PieceWork]:
    """What is to be done to a parameter of which this rank has a piece, if it has one."""
    face, slab, number, settings = place
    piece = slab.layout.pieces(slab.place)[number]
    _complete_state(engine, optimizer, place)
    count = optimizer.state[face]["step"]
    count += 1
    step = int(count.item())
    assert isinstance(face.grad, ShardedTensor)
    gradient = face.grad.raw_local.detach().reshape(-1)
    if isinstance(slab.gradients, AwayGradients):
        slab.gradients.use_up(number)  # on every rank: one that has no piece of it must not wait where others raise
    face.grad.is_being_read = not face.grad.is_used_up
    if not piece.size:
        return []
    return [PieceWork(piece.shard_start, piece.shard_stop, gradient, settings, step, _seed(step, face, slab))]


def _complete_state(engine: Engine, optimizer: torch.optim.Optimizer, place: _Place) -> None:
    """The moments of a parameter are there, in their dtype and memory, and its count of steps on the host."""
    face, slab, number, _ = place
    state, dtype = optimizer.state[face], engine.precision.moments
    if not state:
        state["step"] = torch.tensor(0.0)
    for name in _MOMENTS:
        held = state.get(name)
        if _is_ready(held, slab, name):
            continue
        if isinstance(slab, AwaySlab):
            engine.step.look(slab.raw_shard)  # which may have begun to be updated
            room = face.spec.shaped(slab.new_moment(name, dtype, number))
        else:
            room = torch.zeros_like(face.raw_local, dtype=dtype)
        if held is not None:  # loaded or handed over: whole, in another dtype, or in other memory
            room.copy_(held.local if isinstance(held, ShardedTensor) else face.spec.cut(held))
        state[name] = ShardedTensor(room, face.spec)
    if not isinstance(state["step"], Tensor):
        state["step"] = torch.tensor(float(state["step"]))
    if state["step"].device.type != "cpu":  # where a fused torch kernel or a loaded state had it: reading would wait
        state["step"] = state["step"].cpu()


def _is_complete(state: dict[str, Any] | None, slab: Slab) -> bool:
    if not state or not all(_is_ready(state.get(name), slab, name) for name in _MOMENTS):
        return False
    count = state["step"]
    return isinstance(count, Tensor) and count.device.type == "cpu"


def _is_ready(held: object, slab: Slab, name: str) -> bool:
    """A moment is in its dtype and in its memory."""
    if not isinstance(held, ShardedTensor) or held.dtype is not slab.home.precision.moments:
        return False
    if not isinstance(slab, AwaySlab):
        return held.raw_local.device == slab.raw_shard.device
    own = slab.moments.get(name)
    return own is not None and share_storage(held.raw_local, own)


def _settings(group: dict[str, Any]) -> AdamSettings:
    beta1, beta2 = group["betas"]
    return AdamSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group.get("decoupled_weight_decay", False),
        maximize=group["maximize"],
    )


def _seed(step: int, face: ShardedParameter, slab: Slab) -> int:
    """The same on all ranks, so that ranks that update the same element round it alike."""
    return zlib.crc32(f"{step} {slab.place} {face.spec.name}".encode())
