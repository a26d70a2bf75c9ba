"""model.state_dict() and model.load_state_dict() of a sharded model.

A state dict shows what is trained: the sharded parameter where parameters are cut or 16-bit copies of masters, else
the whole parameter. torch.distributed.checkpoint saves and reshards the sharded ones. Loading takes sharded or whole
tensors; each rank keeps its own range. Inside `full_params` both work on whole tensors, as without zerofold.

Where parameters are cut over a tensor axis, a rank's part under the name of the whole would be a trap: state_dict()
raises, and names zf.save and zf.export. Loading takes whole tensors, of which each rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zerofold.engine import Engine
from zerofold.entry import Entry
from zerofold.refusals import state_dict_of_parts
from zerofold.sharded import ShardedParameter, ShardedTensor
from zerofold.slab import Slab
from zerofold.units import names_of_modules, names_of_sites


class StateDicts:
    """The hooks of one model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken: set[str] = set()  # names that the load under way has found
        model = engine.model

        def after_state_dict(
            *given: Any,
        ) -> None:  # torch marks the function it is given, which a method does not allow
            self._after_state_dict(*given)

        engine.on_close += [
            model.register_state_dict_pre_hook(self._before_state_dict).remove,
            model.register_state_dict_post_hook(after_state_dict).remove,
            model.register_load_state_dict_pre_hook(self._before_load).remove,
            model.register_load_state_dict_post_hook(self._after_load).remove,
        ]

    @property
    def _shows_whole(self) -> bool:
        return self._engine.schedule.holders > 0

    def _faces(self, *, away: bool = False) -> Iterator[tuple[Slab, Entry, ShardedParameter]]:
        """`away`: also of whole parameters of one dtype, which are copies of what is off the device."""
        for slab in self._engine.slabs():
            if self._engine.row.parameters.is_cut or slab.dtypes.has_master or (away and slab.is_away):
                for entry, face in zip(slab.entries, slab.faces, strict=True):
                    if isinstance(face, ShardedParameter):
                        yield slab, entry, face

    def _names(self, prefix: str) -> dict[int, list[str]]:
        paths = names_of_modules(self._engine.model)
        entries = [entry for slab in self._engine.slabs() for entry in slab.entries]
        return {id(entry): [f"{prefix}{name}" for name in names_of_sites(entry, paths)] for entry in entries}

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        for slab in self._engine.slabs():
            for entry in slab.entries:
                if entry.part is not None and entry.part.is_cut:
                    raise RuntimeError(state_dict_of_parts(entry.name, entry.part))
        if not self._shows_whole:
            self._exchange(to_faces=True)  # reading a 16-bit parameter that is released would fetch it

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self._shows_whole:
            return
        self._exchange(to_faces=False)
        names = self._names(prefix)
        for _, entry, face in self._faces():  # also those that are gathered just now: that memory will be gone
            for name in names[id(entry)]:
                if name in state:
                    state[name] = face if isinstance(state[name], nn.Parameter) else face.detach()

    def _exchange(self, *, to_faces: bool) -> None:
        for slab, entry, face in self._faces():
            if slab.dtypes.has_master and not self._engine.row.parameters.is_cut:
                before, after = (entry.parameter, face) if to_faces else (face, entry.parameter)
                for module, attribute in entry.sites:
                    if module._parameters.get(attribute) is before:
                        module._parameters[attribute] = after  # type: ignore[assignment]

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self._taken = set()
        names = self._names(prefix)
        self._cut(state, names)
        if self._shows_whole:
            return
        self._engine.settle()
        changed: set[Slab] = set()
        with torch.no_grad():
            for slab, entry, face in self._faces(away=True):
                found = [name for name in names[id(entry)] if name in state]
                # What has another shape is left to torch, which reports it.
                fitting = [name for name in found if getattr(state[name], "shape", None) == face.shape]
                if fitting and len(fitting) == len(found):
                    _copy(face, state[fitting[0]])
                    changed.add(slab)
                    self._taken.update(found)
                    for name in found:
                        del state[name]
        for slab in changed:
            slab.mark_changed()
        self._engine.schedule.refresh()

    def _cut(self, state: dict[str, Any], names: dict[int, list[str]]) -> None:
        """In place of whole tensors, the parts of them that this rank has."""
        for entry in (entry for slab in self._engine.slabs() for entry in slab.entries):
            part = entry.part
            if part is None or not part.is_cut:
                continue
            for name in names[id(entry)]:
                value = state.get(name)
                if value is None:
                    continue
                if isinstance(value, ShardedTensor) or tuple(value.shape) != tuple(part.shape):
                    raise ValueError(
                        f"load_state_dict: '{name}' has shape {tuple(value.shape)}; this rank has a part of it, and "
                        f"takes it from the whole, an ordinary tensor of shape {tuple(part.shape)}"
                    )
                state[name] = part.of(value)

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in self._taken]
        self._taken = set()


def _copy(face: ShardedParameter, value: Tensor) -> None:
    if isinstance(value, ShardedTensor) and value.spec.ranges != face.spec.ranges:
        value = value.full_tensor()  # of another model, cut in another way; all ranks come here
    if hasattr(value, "full_tensor") and not isinstance(value, ShardedTensor):
        value = value.full_tensor()  # a DTensor
    face.copy_(value)
