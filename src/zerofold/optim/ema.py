"""An exponential moving average of the weights, cut like the optimizer's states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zerofold.engine import Engine
from zerofold.sharded import ShardedParameter, ShardedTensor
from zerofold.slab import Slab

_SWAPPED_AT_ONCE = 2**22  # elements


class EMA:
    """average ← decay × average + (1 − decay) × weights, in fp32, after every step that was not skipped.

    Each rank averages what it updates, so it costs 4 bytes for each parameter of its shard and no communication. With
    several optimizers attached, the step of the last one counts. Buffers are not averaged.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Linear(64, 64)
    >>> model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    >>> average = zf.EMA(model, decay=0.99)
    >>> model(torch.ones(2, 64)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    >>> with average.swapped():  # evaluate with the averaged weights
    ...     _ = model(torch.ones(2, 64))
    >>> zf.close(model)
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ValueError(f"EMA: decay={decay!r} must be a number from 0 to below 1, such as 0.999")
        self._engine = Engine.of(model)
        self.decay = float(decay)
        self.updates = 0
        self._averages: dict[Slab, Tensor] = {}
        self._look()
        self._engine.averages.append(self)
        self._engine.after_step.append(self.update)
        self._engine.after_changes.append(self._look)  # not first when somebody asks: saving would change the average

    def _look(self) -> None:
        """Slabs may have come since, for modules attached or parameters unfrozen; they start from what they are."""
        trained = [slab for slab in self._engine.slabs() if slab.requires_grad]
        self._averages = {
            slab: self._averages[slab] if slab in self._averages else slab.shard.detach().float().clone()
            for slab in trained
        }

    @torch.no_grad()
    def update(self) -> None:
        self._look()
        self.updates += 1
        for slab, average in self._averages.items():
            average.lerp_(slab.shard.to(average.dtype), 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model has the averaged weights. All ranks must enter; no step may be taken inside."""
        if self._engine.is_swapped:
            raise RuntimeError("EMA.swapped: averaged weights are in the model already; leave that `with` block first")
        self._look()
        self._engine.is_swapped = True
        # Weights of another dtype than the average's are put aside, so that they come back exactly.
        aside = {s: s.shard.clone() for s, average in self._averages.items() if s.shard.dtype is not average.dtype}
        self._exchange(self._averages)
        try:
            yield
        finally:
            self._exchange({**self._averages, **aside})
            self._engine.is_swapped = False

    @torch.no_grad()
    def _exchange(self, others: dict[Slab, Tensor]) -> None:
        """Shards get what `others` hold, and where both have the same dtype, the other way round as well."""
        self._engine.settle()
        for slab, other in others.items():
            for mine, yours in zip(slab.shard.split(_SWAPPED_AT_ONCE), other.split(_SWAPPED_AT_ONCE), strict=True):
                held = mine.clone()
                mine.copy_(yours)
                if mine.dtype is self._averages[slab].dtype:
                    yours.copy_(held)
            slab.mark_changed()
        self._engine.schedule.refresh()

    def shards(self) -> dict[Slab, Tensor]:
        """The averages as flat as the weights are, by slab."""
        self._look()
        return self._averages

    def restart(self) -> None:
        """From the weights as they are now."""
        self._averages, self.updates = {}, 0
        self._look()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by parameter name: pieces where the weights are cut; `zf.full` makes one whole."""
        self._look()
        found: dict[str, Tensor] = {}
        for slab, average in self._averages.items():
            pieces = slab.layout.pieces(slab.place)
            for entry, face, piece in zip(slab.entries, slab.faces, pieces, strict=True):
                local = average[piece.shard_start : piece.shard_stop]
                if isinstance(face, ShardedParameter):
                    found[entry.name] = ShardedTensor(face.spec.shaped(local), face.spec)
                else:
                    found[entry.name] = local.view(face.shape)
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state_dict` gave, or whole tensors of the same names."""
        self._engine.settle()
        own = self.state_dict()
        missing = [name for name in own if name not in state]
        if missing:
            raise ValueError(f"EMA: the state has no average of '{missing[0]}' ({len(missing)} such parameter(s))")
        for name, average in own.items():
            if average.shape != state[name].shape:
                raise ValueError(
                    f"EMA: '{name}' has shape {tuple(average.shape)}, the state {tuple(state[name].shape)}"
                )
            average.copy_(state[name])
