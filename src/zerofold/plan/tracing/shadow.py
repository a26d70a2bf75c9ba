"""A copy of a model that has no memory, computes in the dtypes of a policy and checkpoints as it is asked to."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zerofold.activation.blocks import checkpoint_blocks
from zerofold.dealing import choose_dtypes, split
from zerofold.entry import dtypes_of
from zerofold.precision import Precision
from zerofold.units import UnitChoice, assign, find_units


class Shadow:
    """The copy, its units and the slabs that the engine would make of their parameters. The root is unit 0."""

    def __init__(self, model: nn.Module, choice: UnitChoice, policy: Precision) -> None:
        units = find_units(model, choice)
        # Nothing of the original is copied: whatever has memory is replaced by the same without any.
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(_without_memory(parameter), requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = _without_memory(buffer)
        self.model: nn.Module = copy.deepcopy(model, memo).train()
        modules = dict(self.model.named_modules())
        self.units: dict[str, nn.Module] = {name: modules[name] for name in units}
        self.entries = assign(self.model, self.units)
        choose_dtypes(self.model, self.entries, policy)
        self.slabs = [slab for name, entries in self.entries.items() for slab in split(name, entries)]
        for entry in (entry for slab in self.slabs for entry in slab):
            entry.parameter.data = entry.parameter.data.to(dtypes_of(entry).compute)
        self.states = [*self.model.parameters(), *self.model.buffers()]

    def checkpoint_every(self, interval: int) -> list[nn.Module]:
        """Computes blocks again in backward, `interval` of them from each input that is kept; the modules that keep
        one."""
        if interval == 1 and getattr(self.model, "supports_gradient_checkpointing", False):
            # Hugging Face's own switch: blocks that also write to a cache are recomputed without it.
            enable: Any = self.model.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return list(self.units.values())
        config = getattr(self.model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
        return checkpoint_blocks(self.model, interval, units=lambda name, module: name in self.units).first_blocks


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
