"""A copy of a model that has no memory, computes in the dtypes of a policy and checkpoints as it is asked to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from zerofold.dealing import choose_dtypes, split
from zerofold.entry import dtypes_of
from zerofold.nested import tensors_in
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
        blocks = list(self.units.items())
        keepers: list[nn.Module] = []
        for group in _groups(blocks, interval):
            if len(group) == 1:
                keeper: nn.Module = checkpoint_wrapper(group[0][1])
                self._replace(group[0][0], keeper)
                keepers.append(keeper)
                continue
            first = _Group([block for _, block in group])
            self._replace(group[0][0], first)
            for name, _ in group[1:]:
                self._replace(name, _PassedThrough(first))
            keepers.append(first)
        return keepers

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, attribute = name.rpartition(".")
        self.model.get_submodule(parent).register_module(attribute, module)


def _groups(blocks: list[tuple[str, nn.Module]], interval: int) -> list[list[tuple[str, nn.Module]]]:
    """Neighbours in the same list, `interval` at a time: those of an encoder and a decoder are not mixed."""
    rows: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, block in blocks:
        rows.setdefault(name.rpartition(".")[0], []).append((name, block))
    return [row[start : start + interval] for row in rows.values() for start in range(0, len(row), interval)]


class _Group(nn.Module):
    """Several blocks, one after the other, of which only the first one's input is kept."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = list(blocks)  # hidden from torch: the model knows each of them under its own name
        self.result: Any = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.blocks[0], name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            result: Any = x
            for block in self.blocks:
                result = block(x, *args, **kwargs)
                x = next(iter(tensors_in(result)))
            return result

        self.result = checkpoint(run, x, *args, use_reentrant=False, **kwargs)
        return self.result


class _PassedThrough(nn.Module):
    """Stands where a later block of a group was: what comes in is what the group has made."""

    def __init__(self, group: _Group) -> None:
        super().__init__()
        self._group = (group,)  # hidden from torch

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._group[0].blocks[0], name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self._group[0].result
        if next(iter(tensors_in(result)), None) is not x:
            raise ValueError(
                "the blocks of this model do not simply follow each other, so several cannot be recomputed together: "
                "use checkpoint_every=1"
            )
        return result


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
